//! The `Hal` over a device behind a software IOMMU, whose frames are the heap.
#![expect(clippy::cast_possible_truncation, reason = "addresses of this process are pointers")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use dmaspan::dma::{
    AnyPool, Device, DeviceConfig, DmaConfig, DmaDomain, FrameBounce, FrameMemory, NoPool, Trust,
};
use dmaspan::io_pgtable::{FrameAlloc, FrameTables, PageTable, TableShape, X86_64, X86_64Config};
use dmaspan::iommu::Domain;
use dmaspan::iommu::soft::{Bus, BusError, SoftDevice, SoftIommu};
use dmaspan::platform::{Flag, OneThread};
use dmaspan::swiotlb::{Pool, PoolConfig};
use dmaspan::{Iova, PhysAddr, Promise};
use dmaspan_virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, VirtioDma, VirtioUsage, hal};

struct Heap;

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
struct Process;

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

type Iommu = SoftDevice<X86_64, Arc<FrameTables<Heap>>>;

/// A device, and what reaches memory for it.
fn device(trust: Trust) -> (VirtioDma, Iommu) {
    with_pool(trust, NoPool)
}

/// The same, with slots for what may not be reached itself.
fn with_pool(trust: Trust, pool: impl Into<AnyPool>) -> (VirtioDma, Iommu) {
    let tables = Arc::new(FrameTables::new(Heap));
    let table = PageTable::new(X86_64::new(X86_64Config::new(48, 52)).unwrap(), tables).unwrap();
    let iommu = SoftIommu::over(&table);
    let reach = iommu.device(1);
    let domain = Domain::new(table, iommu).unwrap();
    let domain = Arc::new(DmaDomain::new(domain, DmaConfig::new(1), OneThread).unwrap());
    let config = DeviceConfig { trust, ..DeviceConfig::bits(40) };
    let device = Device::erased(domain, pool, config).unwrap();
    let device = device.with_coherent(Arc::new(FrameMemory::new(Arc::new(Heap))));
    let find =
        |buffer: NonNull<[u8]>| Some(buffer.cast::<u8>().as_ptr().expose_provenance() as u64);
    #[expect(unsafe_code, reason = "the promise of a kernel")]
    // SAFETY: physical addresses are the process's own; tests keep what they share.
    let dma = unsafe { VirtioDma::new(device, find, |error| eprintln!("refused: {error}")) };
    (dma, reach)
}

#[repr(align(4096))]
struct Page([u8; PAGE_SIZE]);

const WAY: BufferDirection = BufferDirection::DeviceToDriver;

fn share<H: Hal>(buffer: NonNull<[u8]>, direction: BufferDirection) -> u64 {
    #[expect(unsafe_code, reason = "a driver of tests")]
    // SAFETY: tests keep the buffer and leave it alone until it is unshared.
    unsafe {
        H::share(buffer, direction)
    }
}

fn unshare<H: Hal>(addr: u64, buffer: NonNull<[u8]>, direction: BufferDirection) {
    #[expect(unsafe_code, reason = "a driver of tests")]
    // SAFETY: it is the buffer of `share`, or is refused.
    unsafe {
        H::unshare(addr, buffer, direction);
    }
}

#[test]
fn a_device_writes_a_shared_buffer_and_faults_once_it_is_unshared() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (dma, mut reach) = device(Trust::Trusted);
    Disk::attach(dma).unwrap();
    let mut page = Box::new(Page([0; PAGE_SIZE]));
    let buffer = NonNull::from(&mut page.0[..]);
    let addr = share::<Disk>(buffer, WAY);
    assert_ne!(addr, 0);
    reach.write(&Process, Iova::new(addr), b"sector").unwrap();
    let past = Iova::new(addr + PAGE_SIZE as u64);
    assert!(reach.write(&Process, past, b"past").is_err());
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 1, queues: 0, refused: 0 });
    unshare::<Disk>(addr, buffer, WAY);
    assert_eq!(&page.0[..6], b"sector");
    assert!(reach.write(&Process, Iova::new(addr), b"late").is_err());
    assert_eq!((Disk::usage(), page.0[0]), (VirtioUsage::default(), b's'));
}

#[test]
fn a_second_unshare_and_another_length_or_direction_are_refused_and_counted() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (dma, mut reach) = device(Trust::Trusted);
    Disk::attach(dma).unwrap();
    let (second, _) = device(Trust::Trusted);
    assert!(Disk::attach(second).is_err());
    let mut page = Box::new(Page([0; PAGE_SIZE]));
    let buffer = NonNull::from(&mut page.0[..]);
    let addr = share::<Disk>(buffer, WAY);
    unshare::<Disk>(addr, NonNull::from(&mut page.0[..512]), WAY);
    unshare::<Disk>(addr, buffer, BufferDirection::DriverToDevice);
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 1, queues: 0, refused: 2 });
    reach.write(&Process, Iova::new(addr), b"still").unwrap();
    unshare::<Disk>(addr, buffer, WAY);
    unshare::<Disk>(addr, buffer, WAY);
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 0, queues: 0, refused: 3 });
}

#[test]
fn a_buffer_whose_neighbours_an_untrusted_device_would_reach_is_refused_without_a_pool() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (dma, mut reach) = device(Trust::Untrusted);
    Disk::attach(dma).unwrap();
    let mut page = Box::new(Page([7; PAGE_SIZE]));
    let addr = share::<Disk>(NonNull::from(&mut page.0[512..1024]), WAY);
    assert!(reach.write(&Process, Iova::new(addr), b"no").is_err());
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 0, queues: 0, refused: 1 });
    let whole = NonNull::from(&mut page.0[..]);
    let addr = share::<Disk>(whole, WAY);
    reach.write(&Process, Iova::new(addr), b"yes").unwrap();
    assert!(reach.write(&Process, Iova::new(addr + PAGE_SIZE as u64), b"no").is_err());
    unshare::<Disk>(addr, whole, WAY);
}

#[test]
fn a_device_that_tries_reaches_a_buffer_and_none_of_its_neighbours() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let slots = FrameBounce::new(Arc::new(Heap), 1 << 16, PhysAddr::new(u64::MAX)).unwrap();
    let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), OneThread).unwrap());
    let (dma, mut reach) = with_pool(Trust::Untrusted, pool);
    Disk::attach(dma).unwrap();
    let mut page = Box::new(Page([7; PAGE_SIZE]));
    page.0[512..1024].fill(1);
    for way in [BufferDirection::DriverToDevice, BufferDirection::Both, WAY] {
        let buffer = NonNull::from(&mut page.0[512..1024]);
        let addr = share::<Disk>(buffer, way);
        // It reads and writes whatever it can around the buffer.
        let (mut seen, mut reached, mut written) = (0, 0, 0);
        for at in addr.saturating_sub(2 * PAGE_SIZE as u64)..addr + 2 * PAGE_SIZE as u64 {
            let mut byte = [0];
            if reach.read(&Process, Iova::new(at), &mut byte).is_ok() {
                seen += usize::from(byte[0] == 7);
                reached += 1;
            }
            written += usize::from(reach.write(&Process, Iova::new(at), &[9]).is_ok());
        }
        let buffer = NonNull::from(&mut page.0[512..1024]);
        unshare::<Disk>(addr, buffer, way);
        assert_eq!(seen, 0, "{way:?}: it saw a neighbour");
        // These tables let a device read whatever it may write.
        assert!(reached >= 512, "{way:?}");
        let may_write = way != BufferDirection::DriverToDevice;
        assert_eq!(written, if may_write { reached } else { 0 }, "{way:?}");
        let expected = if may_write { 9 } else { 1 };
        assert!(page.0[512..1024].iter().all(|&byte| byte == expected), "{way:?}");
        assert!(page.0[..512].iter().chain(&page.0[1024..]).all(|&byte| byte == 7), "{way:?}");
    }
    assert_eq!(Disk::usage(), VirtioUsage::default());
}

#[test]
fn queues_are_zeroed_pages_and_without_a_device_there_are_none() {
    hal! { struct Disk: parking_lot::RawMutex; }
    assert_eq!(Disk::dma_alloc(1, BufferDirection::Both).0, 0);
    let (dma, mut reach) = device(Trust::Trusted);
    Disk::attach(dma).unwrap();
    let (addr, start) = Disk::dma_alloc(3, BufferDirection::Both);
    assert!(addr != 0 && addr % 4096 == 0 && start.addr().get() % PAGE_SIZE == 0);
    let mut bytes = [1; 64];
    reach.read(&Process, Iova::new(addr), &mut bytes).unwrap();
    assert_eq!((bytes, Disk::usage().queues), ([0; 64], 1));
    #[expect(unsafe_code, reason = "a driver of tests")]
    // SAFETY: it is of `dma_alloc`, and nobody uses it.
    let answer = unsafe { Disk::dma_dealloc(addr, start, 3) };
    assert_eq!((answer, Disk::usage()), (0, VirtioUsage::default()));
    assert!(reach.read(&Process, Iova::new(addr), &mut bytes).is_err());
}
