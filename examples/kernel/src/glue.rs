//! The glue of a kernel that has a heap and memory mapped one to one. This file is there to be
//! copied.

use alloc::alloc::{alloc_zeroed, dealloc};
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::alloc::Layout;
use core::error::Error;
use core::fmt::Debug;
use core::ptr::{NonNull, with_exposed_provenance_mut};

use dmaspan::dma::{
    AnyMemory, Device, DeviceConfig, DmaConfig, DmaDomain, FrameBounce, FrameMemory,
};
use dmaspan::io_pgtable::{Format, FrameAlloc, FrameTables, PageTable, TableShape};
use dmaspan::iommu::{
    Attachment, Domain, FaultHandler, IommuOps, Port, Prepared, Relaxable, Target,
};
use dmaspan::platform::Flag;
use dmaspan::swiotlb::{Pool, PoolConfig};
use dmaspan::{PhysAddr, Platform, Promise};
use dmaspan_virtio_drivers::VirtioDma;

use crate::cpu;

/// The frames of the kernel: blocks of its heap.
#[derive(Clone, Copy)]
pub(crate) struct Frames;

// SAFETY: 1. The heap gives each block once, zeroed, and of this layout. 2. Memory is mapped one to
// one, for all CPUs and for ever.
unsafe impl FrameAlloc for Frames {
    type Lock = Flag; // no interrupt maps anything

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        let layout = Layout::from_size_align(1 << shape.lg2_size, 1 << shape.lg2_align).ok()?;
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let paddr = start.as_ptr().expose_provenance() as u64;
        if paddr + (layout.size() as u64 - 1) > shape.max_paddr.get() {
            // SAFETY: it was allocated above, and nobody has it.
            unsafe { dealloc(start.as_ptr(), layout) };
            return None;
        }
        Some(PhysAddr::new(paddr))
    }

    fn free(&self, _promise: Promise<'_>, frames: PhysAddr, shape: TableShape) {
        let layout = Layout::from_size_align(1 << shape.lg2_size, 1 << shape.lg2_align);
        // SAFETY: they were allocated above in this shape, and nobody uses them.
        layout.map(|layout| unsafe { dealloc(self.pointer(frames).as_ptr(), layout) }).ok();
    }

    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
        NonNull::new(with_exposed_provenance_mut(paddr.get() as usize)).expect("no frame is at 0")
    }
}

/// The machine's CPUs.
#[derive(Clone, Copy)]
pub(crate) struct Cpus;

impl Platform for Cpus {
    type Lock = Flag;

    fn cpu(&self) -> usize {
        cpu::number()
    }

    fn now(&self) -> u64 {
        cpu::nanoseconds()
    }
}

pub(crate) type Tables = Arc<FrameTables<Frames>>;
pub(crate) type IoDomain<F, O> = DmaDomain<F, Tables, O, Cpus, AnyMemory>;

/// What tables, queues and slots of all devices are made of.
pub(crate) struct Memory {
    pub(crate) tables: Tables,
    pool: Arc<Pool<FrameBounce<Frames>, Cpus>>,
}

impl Memory {
    /// With slots of so many bytes, for what shares its page with others.
    pub(crate) fn new(slots: u64) -> Result<Self, Box<dyn Error>> {
        let slots = FrameBounce::new(Frames, slots, PhysAddr::new(u64::MAX))?;
        let pool = Arc::new(Pool::new(slots, PoolConfig::new(cpu::COUNT), Cpus)?);
        Ok(Self { tables: Arc::new(FrameTables::new(Frames)), pool })
    }
}

/// A device that reaches what is mapped for it, and what keeps it attached.
pub(crate) type Attached = (Device, Box<dyn Send + Sync>);

/// Gives a stream a domain of its own.
pub(crate) fn attach<F, O, P>(
    memory: &Memory,
    (format, ops, port): (F, O, P),
    config: DeviceConfig,
    faults: Arc<dyn FaultHandler>,
) -> Result<Attached, Box<dyn Error>>
where
    F: Format + 'static,
    O: IommuOps<Address = PhysAddr> + 'static,
    P: Port<Paging = IoDomain<F, O>> + Debug + 'static,
{
    let domain = Domain::new(PageTable::new(format, Arc::clone(&memory.tables))?, ops)?;
    let domain = Arc::new(DmaDomain::new(domain, DmaConfig::new(cpu::COUNT), Cpus)?);
    port.reserved_regions().reserve_in(domain.iovas(), Relaxable::Keep)?;
    port.faults().set(Some(faults));
    let stream = Attachment::new(port)?;
    stream.attach(Target::Paging(Prepared::new(Arc::clone(&domain))))?;
    let device = Device::erased(domain, Arc::clone(&memory.pool), config)?;
    Ok((device.with_coherent(Arc::new(FrameMemory::new(Frames))), Box::new(stream)))
}

/// A device, for the drivers of `virtio-drivers`, whose buffers are anywhere in the kernel.
pub(crate) fn virtio(device: Device) -> VirtioDma {
    let find = |buffer: NonNull<[u8]>| Some(buffer.as_ptr().expose_provenance() as u64);
    // SAFETY: memory is mapped one to one, and a driver keeps its buffers.
    unsafe { VirtioDma::new(device, find, |error| println!("virtio: refused: {error}")) }
}
