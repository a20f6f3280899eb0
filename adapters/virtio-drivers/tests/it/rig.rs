//! Devices behind a software IOMMU, whose frames are the heap.
#![expect(clippy::cast_possible_truncation, reason = "addresses of this process are pointers")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use dmaspan::dma::{
    AnyPool, Device, DeviceConfig, DmaConfig, DmaDomain, FrameBounce, FrameMemory, NoPool, Trust,
};
use dmaspan::io_pgtable::{
    Arena, FrameAlloc, FrameTables, PageTable, TableShape, X86_64, X86_64Config,
};
use dmaspan::iommu::Domain;
use dmaspan::iommu::soft::{Bus, BusError, SoftDevice, SoftIommu};
use dmaspan::platform::{Flag, OneThread};
use dmaspan::swiotlb::{Pool, PoolConfig, PoolMemory};
use dmaspan::{Account, Address, Container, DmaAddr, HostAddr, PhysAddr, Promise};
use dmaspan_linux::plan::{MappedBounce, Mapper};
use dmaspan_linux::{LinuxPinner, UserPlatform};
use dmaspan_virtio_drivers::VirtioDma;

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

impl<A: Address> Bus<A> for Process {
    #[expect(unsafe_code, reason = "a device reaches memory by its address")]
    fn read(&self, at: A, buf: &mut [u8]) -> Result<(), BusError> {
        let at = pointer(PhysAddr::new(at.get()));
        // SAFETY: tests map memory that they own, and the IOMMU lets nothing else through.
        unsafe { at.copy_to_nonoverlapping(NonNull::from(&mut *buf).cast(), buf.len()) };
        Ok(())
    }

    #[expect(unsafe_code, reason = "a device reaches memory by its address")]
    fn write(&self, at: A, buf: &[u8]) -> Result<(), BusError> {
        let at = pointer(PhysAddr::new(at.get()));
        // SAFETY: as above.
        unsafe { at.copy_from_nonoverlapping(NonNull::from(buf).cast(), buf.len()) };
        Ok(())
    }
}

pub(crate) type Iommu = SoftDevice<X86_64, Arc<FrameTables<Heap>>>;

/// A device, and what reaches memory for it.
pub(crate) fn device(trust: Trust) -> (VirtioDma, Iommu) {
    with_pool(trust, NoPool)
}

/// The same, with slots for what may not be reached itself.
pub(crate) fn with_pool(trust: Trust, pool: impl Into<AnyPool>) -> (VirtioDma, Iommu) {
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

/// A device that may not be trusted, with slots for what shares its page with others.
pub(crate) fn untrusted() -> (VirtioDma, Iommu) {
    let slots = FrameBounce::new(Arc::new(Heap), 1 << 18, PhysAddr::new(u64::MAX)).unwrap();
    let pool = Pool::new(slots, PoolConfig::new(1), OneThread).unwrap();
    with_pool(Trust::Untrusted, Arc::new(pool))
}

/// A device that reaches a pool of a process and nothing else, and whether its IOMMU has nothing
/// mapped any more.
pub(crate) fn copying(len: u64) -> (VirtioDma, Reach) {
    let (pool, reach) = copying_pool(len);
    (VirtioDma::copying(pool, |error| eprintln!("refused: {error}")), reach)
}

type Reach = SoftDevice<X86_64, Arc<Arena>, HostAddr>;

/// The pool of such a device, and what it reaches.
pub(crate) fn copying_pool(
    len: u64,
) -> (Arc<Pool<impl PoolMemory<Address = DmaAddr> + 'static, UserPlatform>>, Reach) {
    let tables = Arc::new(Arena::new(PhysAddr::new(1 << 50), 1 << 20));
    let table = PageTable::new(X86_64::new(X86_64Config::new(48, 52)).unwrap(), tables).unwrap();
    let iommu = SoftIommu::over(&table).reaching::<HostAddr>();
    let reach = iommu.device(1);
    let pinner = LinuxPinner::<HostAddr>::new().unwrap();
    let domain = Domain::new(table, iommu).unwrap();
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(pinner, domain, Account::new(1 << 30));
    let slots = MappedBounce::new(&Mapper::new(container).unwrap(), len).unwrap();
    (Arc::new(Pool::new(slots, PoolConfig::new(1), UserPlatform).unwrap()), reach)
}
