//! A device behind a software IOMMU, whose frames are the heap.
#![expect(clippy::cast_possible_truncation, reason = "addresses of this process are pointers")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dma_api::{DeviceDma, DmaCoherency, DmaConstraints, DmaDeviceInfo, DmaDomainId};
use dmaspan::dma::{
    Device, DeviceConfig, Direct, DmaConfig, DmaDomain, Error, FrameBounce, FrameMemory, NoPool,
    Trust,
};
use dmaspan::io_pgtable::{FrameAlloc, FrameTables, PageTable, TableShape, X86_64, X86_64Config};
use dmaspan::iommu::Domain;
use dmaspan::iommu::soft::{Bus, BusError, SoftDevice, SoftIommu};
use dmaspan::platform::{Flag, OneThread};
use dmaspan::swiotlb::{Pool, PoolConfig};
use dmaspan::{PhysAddr, Promise, Span};
use dmaspan_dma_api::DeviceOps;

pub(crate) struct Heap;

fn layout(shape: TableShape) -> Layout {
    Layout::from_size_align(1 << shape.lg2_size, 1 << shape.lg2_align).unwrap()
}

fn pointer(paddr: PhysAddr) -> NonNull<u8> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(paddr.get() as usize)).unwrap()
}

#[expect(unsafe_code, reason = "frames of the heap")]
// SAFETY: 1. The heap gives each frame once, zeroed. 2. Physical addresses are the process's own.
unsafe impl FrameAlloc for Heap {
    type Lock = Flag;

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        // SAFETY: the size is not 0.
        let frames = NonNull::new(unsafe { alloc_zeroed(layout(shape)) })?;
        Some(PhysAddr::new(frames.as_ptr().expose_provenance() as u64))
    }

    fn free(&self, _promise: Promise<'_>, frames: PhysAddr, shape: TableShape) {
        // SAFETY: they were allocated above in this shape, and nobody uses them.
        unsafe { dealloc(pointer(frames).as_ptr(), layout(shape)) }
    }

    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
        pointer(paddr)
    }
}

/// The memory of the process, as a device reaches it.
pub(crate) struct Process;

impl Bus for Process {
    #[expect(unsafe_code, reason = "a device reaches memory by its address")]
    fn read(&self, at: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        // SAFETY: tests map memory that they own, and the IOMMU lets nothing else through.
        unsafe { pointer(at).copy_to_nonoverlapping(NonNull::from(&mut *buf).cast(), buf.len()) };
        Ok(())
    }

    #[expect(unsafe_code, reason = "a device reaches memory by its address")]
    fn write(&self, at: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        // SAFETY: as above.
        unsafe { pointer(at).copy_from_nonoverlapping(NonNull::from(buf).cast(), buf.len()) };
        Ok(())
    }
}

pub(crate) type Ops = DeviceOps<parking_lot::RawMutex>;
pub(crate) type Iommu = SoftDevice<X86_64, Arc<FrameTables<Heap>>>;

/// Refusals of all tests of one program.
pub(crate) static REFUSED: AtomicU32 = AtomicU32::new(0);

/// A device that is not trusted, with addresses up to `mask`, and what reaches memory for it.
pub(crate) fn device(mask: u64) -> (DeviceDma, &'static Ops, Iommu) {
    let tables = Arc::new(FrameTables::new(Heap));
    let table = PageTable::new(X86_64::new(X86_64Config::new(48, 52)).unwrap(), tables).unwrap();
    let iommu = SoftIommu::over(&table);
    let reach = iommu.device(1);
    let domain = Domain::new(table, iommu).unwrap();
    let domain = Arc::new(DmaDomain::new(domain, DmaConfig::new(1), OneThread).unwrap());
    let slots = FrameBounce::new(Arc::new(Heap), 1 << 16, PhysAddr::new(u64::MAX)).unwrap();
    let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), OneThread).unwrap());
    let config = DeviceConfig { trust: Trust::Untrusted, ..DeviceConfig::bits(40) };
    let device = Device::erased(domain, pool, config).unwrap();
    let device = device.with_coherent(Arc::new(FrameMemory::new(Arc::new(Heap))));
    let find =
        |buffer: NonNull<[u8]>| Some(buffer.cast::<u8>().as_ptr().expose_provenance() as u64);
    let refused = |_| {
        REFUSED.fetch_add(1, Ordering::Relaxed);
    };
    #[expect(unsafe_code, reason = "the promise of a kernel")]
    // SAFETY: physical addresses are the process's own; tests keep what they map.
    let ops: &'static Ops = Box::leak(Box::new(unsafe { Ops::new(device, find, refused) }));
    let constraints = DmaConstraints::new(mask);
    let info = DmaDeviceInfo::new(DmaDomainId::Direct, DmaCoherency::Coherent, constraints);
    (DeviceDma::new(info, ops), ops, reach)
}

/// A device that reaches all memory by its own addresses.
pub(crate) fn direct(
    find: fn(NonNull<[u8]>) -> Option<u64>,
    refused: fn(Error),
) -> (DeviceDma, &'static Ops) {
    let all = Span::new(PhysAddr::new(0), 1 << 52).unwrap();
    let memory = Arc::new(Direct::new(all, OneThread));
    let device = Device::erased(memory, NoPool, DeviceConfig::bits(64)).unwrap();
    #[expect(unsafe_code, reason = "no device is told")]
    // SAFETY: nothing reaches the buffers by their addresses.
    let ops: &'static Ops = Box::leak(Box::new(unsafe { Ops::new(device, find, refused) }));
    let constraints = DmaConstraints::new(u64::MAX);
    let info = DmaDeviceInfo::new(DmaDomainId::Direct, DmaCoherency::Coherent, constraints);
    (DeviceDma::new(info, ops), ops)
}
