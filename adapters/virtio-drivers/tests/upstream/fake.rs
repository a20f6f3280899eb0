//! The `Hal` of the tests that the crate `virtio-drivers` has of itself, over the adapter.
//!
//! `cargo xtask ci adopters` runs these tests with this file in the place of the crate's
//! `src/hal/fake.rs`. Their devices take addresses for pointers, so that nothing is translated
//! here; every buffer is bounced, so that one which is not shared, or not unshared, shows.

use core::ptr::{NonNull, with_exposed_provenance_mut};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::{Arc, OnceLock};

use dmaspan::dma::{Bounce, Device, DeviceConfig, Direct, FrameBounce, FrameMemory};
use dmaspan::io_pgtable::{FrameAlloc, TableShape};
use dmaspan::platform::{Flag, OneThread};
use dmaspan::swiotlb::{Pool, PoolConfig};
use dmaspan::{Promise, Span};
use dmaspan_virtio_drivers::{BufferDirection as Way, VirtioDma, VirtioSlot};

use crate::{BufferDirection, Hal, PhysAddr};

/// The heap of the tests, whose addresses are physical.
struct Heap;

fn layout(shape: TableShape) -> Layout {
    Layout::from_size_align(1 << shape.lg2_size, 1 << shape.lg2_align).unwrap()
}

fn pointer(paddr: u64) -> NonNull<u8> {
    NonNull::new(with_exposed_provenance_mut(paddr as usize)).unwrap()
}

// SAFETY: 1. The heap gives each frame once, zeroed. 2. Physical addresses are the process's own.
unsafe impl FrameAlloc for Heap {
    type Lock = Flag;

    fn allocate(&self, shape: TableShape) -> Option<dmaspan::PhysAddr> {
        // SAFETY: the size is not 0.
        let frames = NonNull::new(unsafe { alloc_zeroed(layout(shape)) })?;
        Some(dmaspan::PhysAddr::new(frames.as_ptr().expose_provenance() as u64))
    }

    fn free(&self, _promise: Promise<'_>, frames: dmaspan::PhysAddr, shape: TableShape) {
        // SAFETY: they were allocated above in this shape, and nobody uses them.
        unsafe { dealloc(pointer(frames.get()).as_ptr(), layout(shape)) }
    }

    fn pointer(&self, paddr: dmaspan::PhysAddr) -> NonNull<u8> {
        pointer(paddr.get())
    }
}

/// One device, whose drivers are those of all tests.
fn slot() -> &'static VirtioSlot<Flag> {
    static SLOT: OnceLock<VirtioSlot<Flag>> = OnceLock::new();
    SLOT.get_or_init(|| {
        let all = dmaspan::PhysAddr::new(u64::MAX);
        let memory = Span::new(dmaspan::PhysAddr::new(0), u64::MAX).unwrap();
        let slots = FrameBounce::new(Arc::new(Heap), 1 << 24, all).unwrap();
        let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), OneThread).unwrap());
        let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(64) };
        let device = Device::erased(Arc::new(Direct::new(memory, OneThread)), pool, config);
        let device = device.unwrap().with_coherent(Arc::new(FrameMemory::new(Arc::new(Heap))));
        let find = |buffer: NonNull<[u8]>| Some(buffer.as_ptr().expose_provenance() as u64);
        // SAFETY: physical addresses are the process's own; drivers keep what they share.
        let dma = unsafe { VirtioDma::new(device, find, |error| panic!("refused: {error}")) };
        let slot = VirtioSlot::new();
        assert!(slot.attach(dma).is_ok());
        slot
    })
}

fn way(direction: BufferDirection) -> Way {
    match direction {
        BufferDirection::DriverToDevice => Way::DriverToDevice,
        BufferDirection::DeviceToDriver => Way::DeviceToDriver,
        BufferDirection::Both => Way::Both,
    }
}

#[derive(Debug)]
pub struct FakeHal;

// SAFETY: as of what `dmaspan_virtio_drivers::hal!` makes, whose trait is that of another package.
unsafe impl Hal for FakeHal {
    fn dma_alloc(pages: usize, _direction: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        slot().dma_alloc(pages)
    }

    unsafe fn dma_dealloc(paddr: PhysAddr, _vaddr: NonNull<u8>, _pages: usize) -> i32 {
        // SAFETY: the caller promises the same.
        unsafe { slot().dma_dealloc(paddr) }
    }

    unsafe fn mmio_phys_to_virt(paddr: PhysAddr, size: usize) -> NonNull<u8> {
        slot().registers(paddr, size)
    }

    unsafe fn share(buffer: NonNull<[u8]>, direction: BufferDirection) -> PhysAddr {
        // SAFETY: the caller promises the same.
        unsafe { slot().share(buffer, way(direction)) }
    }

    unsafe fn unshare(paddr: PhysAddr, buffer: NonNull<[u8]>, direction: BufferDirection) {
        // SAFETY: the caller promises the same.
        unsafe { slot().unshare(paddr, buffer, way(direction)) }
    }
}
