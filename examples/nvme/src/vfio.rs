//! Controllers that a process has by VFIO: of real machines, and of guests.
//!
//! The registers are the device's BAR 0. All that the controller is to reach is mapped in the
//! [`AddressSpace`] that its device is attached to, whichever interface of the kernel that is of:
//! [`Type1`](dmaspan_linux::vfio::Type1) or [`Ioas`](dmaspan_linux::vfio::Ioas).
//!
//! ```text
//! Memory ──register──► VfioBuffer: mapped, one segment ──► submit, as often as one likes
//!                           └── the last clone unmaps it
//! ```
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use dmaspan::Prot;
//! use dmaspan_linux::vfio::Type1;
//! use dmaspan_linux::{Memory, MemoryKind};
//! use dmaspan_nvme::vfio::{AddressSpace, VfioAccess};
//! use dmaspan_nvme::{Controller, QueueConfig};
//!
//! let (space, device) = Type1::open("0000:00:05.0".parse()?)?;
//! let space = AddressSpace::new(space)?;
//! let memory = Arc::new(Memory::new(MemoryKind::Thp, 2 << 20)?);
//! let buffer = space.register(&memory, memory.user_range(), Prot::READ_WRITE)?;
//!
//! let mut controller = Controller::new(VfioAccess::new(&space, device)?, 1)?;
//! let namespace = controller.namespace(1)?;
//! let mut queue = controller.create_queue(QueueConfig::new(32))?;
//! queue.read(&namespace, 0, &buffer, 0..1 << 20)?;
//! println!("the disk begins with {:#018x}", memory.read_u64(0)?);
//! controller.shutdown([queue])?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![expect(unsafe_code, reason = "memory that a device writes is promised")]

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::cell::Cell;
use core::fmt;
use core::hint;
use core::mem;
use core::sync::atomic::AtomicU64;
use core::time::Duration;
use std::thread;
use std::time::Instant;

use dmaspan::iommu::iova::{self, Align, Iovas, Request};
use dmaspan::regbuf::{Buffer, BuildError, ImportError, Keep, Segments, SegmentsBuilder};
use dmaspan::{DmaAddr, DmaSpace, Iova, Prot, RangeError, Span, UserRange};
use dmaspan_drivers::Mmio as _;
use dmaspan_linux::vfio::{Bar, BusMaster, Device, DeviceError, Event, Msix};
use dmaspan_linux::{Memory, MemoryKind, UserPlatform};

use crate::access::{Access, AllocateError, Pause, SharedMemory};

/// For so many polls a wait only spins: fast disks answer within them.
const SPINS: u32 = 1 << 10;
/// For so many it lets other threads go first. Then it sleeps between two of them.
const YIELDS: u32 = 1 << 14;
/// How long it sleeps.
const NAP: Duration = Duration::from_micros(100);
/// How often it looks at the clock before it sleeps: after so many polls.
const LOOK: u32 = 64;

/// Why memory was not registered. Nothing of it is mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError<E: core::error::Error + 'static> {
    /// There are no IOVAs for it.
    #[error(transparent)]
    Iova(#[from] iova::Error),
    /// The space did not map it.
    #[error(transparent)]
    Map(E),
    /// It has no length, or is too long.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Its segments cannot be kept track of.
    #[error(transparent)]
    Segments(#[from] BuildError),
    /// Segments and memory do not fit.
    #[error(transparent)]
    Import(#[from] ImportError),
}

/// Why a device cannot be used as a controller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Its registers cannot be mapped.
    #[error(transparent)]
    Registers(#[from] DeviceError),
    /// It has no such interrupts.
    #[error(transparent)]
    Interrupts(DeviceError),
    /// It cannot be allowed to access memory.
    #[error("the device cannot be made a bus master: {0}")]
    BusMaster(DeviceError),
}

/// An address space of devices, and which of its IOVAs are taken.
pub struct AddressSpace<S> {
    space: S,
    iovas: iova::Space<UserPlatform>,
}

impl<S> AddressSpace<S>
where
    S: DmaSpace<Memory = Arc<Memory>> + Send + Sync + 'static,
    S::Error: Send + Sync,
{
    /// Of a space in which nothing is mapped, and nobody else maps.
    ///
    /// # Errors
    ///
    /// [`iova::Error`] where it has no apertures to map anything in.
    pub fn new(space: S) -> Result<Arc<Self>, iova::Error> {
        let limits = space.limits();
        let granule_lg2 = limits.granule().trailing_zeros();
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let iovas =
            iova::Space::with_apertures(&limits.apertures, granule_lg2, cpus, UserPlatform)?;
        Ok(Arc::new(Self { space, iovas }))
    }

    /// The space itself: to attach more devices, and to see what was asked of the kernel.
    pub fn space(&self) -> &S {
        &self.space
    }

    /// Maps `user` of a memory for the space's devices, which may access it as `access` says, for
    /// as long as the buffer or a clone of it exists.
    ///
    /// It is one segment, whatever pages the memory has. Where it has huge ones, they are at such
    /// IOVAs that the IOMMU can have huge ones for them.
    ///
    /// # Errors
    ///
    /// [`RegisterError`], with nothing mapped.
    pub fn register(
        self: &Arc<Self>,
        memory: &Arc<Memory>,
        user: UserRange,
        access: Prot,
    ) -> Result<VfioBuffer<S>, RegisterError<S::Error>> {
        let len = user.checked_len().ok_or(BuildError::TooLong)?;
        let leaf = memory.kind().leaf_size();
        let align = if leaf > len { self.iovas.granule() } else { leaf };
        let lead = user.start().get() & (align - 1);
        let mapping = self.map(memory, user, access, Place { len, align, lead })?;
        let mut builder = SegmentsBuilder::new();
        builder.push(Span::new(DmaAddr::new(mapping.iova.get()), len)?)?;
        let segments = builder.build()?;
        // SAFETY: the mapping owns the memory and has it mapped until `end`, and forever where it
        // cannot be unmapped. All accesses to a `Memory` are of atomic words.
        let buffer = unsafe { Buffer::new(segments, user, access, Box::new(mapping)) }?;
        Ok(VfioBuffer(Arc::new(Registered { buffer, space: Arc::clone(self) })))
    }

    fn map(
        self: &Arc<Self>,
        memory: &Arc<Memory>,
        user: UserRange,
        access: Prot,
        Place { len, align, lead }: Place,
    ) -> Result<Mapping<S>, RegisterError<S::Error>> {
        let bytes = len.checked_add(lead).ok_or(BuildError::TooLong)?;
        let limit = Iova::new(u64::MAX);
        let iovas = self.iovas.alloc(Request { bytes, align: Align::To(align), limit })?;
        let iova = iovas.range().start().wrapping_add(lead);
        if let Err(error) = self.space.map(memory, user, iova, access & Prot::READ_WRITE) {
            // They are the space's own.
            let _ = self.iovas.free(iovas);
            return Err(RegisterError::Map(error));
        }
        let (space, memory) = (Arc::clone(self), Arc::clone(memory));
        Ok(Mapping { iova, held: Some(Held { iovas, memory }), space })
    }
}

/// Where memory is to be mapped.
struct Place {
    /// How many bytes it has.
    len: u64,
    /// To what the IOVAs are aligned, and how far behind that it begins.
    align: u64,
    lead: u64,
}

impl<S> fmt::Debug for AddressSpace<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace").field("aperture", &self.iovas.aperture()).finish()
    }
}

/// Memory that is mapped until this is dropped.
struct Mapping<S: DmaSpace<Memory = Arc<Memory>>> {
    iova: Iova,
    /// `None` when it has ended.
    held: Option<Held>,
    space: Arc<AddressSpace<S>>,
}

struct Held {
    iovas: Iovas,
    memory: Arc<Memory>,
}

impl<S: DmaSpace<Memory = Arc<Memory>>> Mapping<S> {
    /// Unmaps it. Where that fails, the device may still use the memory: it is leaked, and its
    /// IOVAs are not used again.
    fn end(&mut self) {
        let Some(Held { iovas, memory }) = self.held.take() else { return };
        match self.space.space.unmap(iovas.range()) {
            // They are the space's own.
            Ok(_) => drop(self.space.iovas.free(iovas)),
            Err(_) => mem::forget(memory),
        }
    }
}

impl<S: DmaSpace<Memory = Arc<Memory>>> Drop for Mapping<S> {
    fn drop(&mut self) {
        self.end();
    }
}

impl<S> Keep<DmaAddr> for Mapping<S>
where
    S: DmaSpace<Memory = Arc<Memory>> + Send + Sync,
{
    fn end(&mut self, _segments: &Segments<DmaAddr>) {
        Mapping::end(self);
    }
}

/// Memory that is registered with an [`AddressSpace`]. A clone is the same one.
pub struct VfioBuffer<S>(Arc<Registered<S>>);

struct Registered<S> {
    buffer: Buffer<DmaAddr>,
    space: Arc<AddressSpace<S>>,
}

impl<S> VfioBuffer<S> {
    /// What is registered, at the addresses that devices see.
    pub fn buffer(&self) -> &Buffer<DmaAddr> {
        &self.0.buffer
    }
}

impl<S> Clone for VfioBuffer<S> {
    #[inline]
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S> fmt::Debug for VfioBuffer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VfioBuffer").field(&self.0.buffer).finish()
    }
}

/// A controller that this process has by VFIO.
///
/// Waits are [polls](Access::pause) that spin at first, then let other threads go first, and sleep
/// in the end.
pub struct VfioAccess<S> {
    registers: Bar,
    space: Arc<AddressSpace<S>>,
    interrupts: Option<Msix>,
    /// Dropped, the kernel resets the device.
    device: Device,
}

impl<S> VfioAccess<S> {
    /// A device that is attached to a space, and may access what is mapped there from now on.
    ///
    /// A device of another space finds nothing that the driver tells it of.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn new(space: &Arc<AddressSpace<S>>, device: Device) -> Result<Self, OpenError> {
        device.set_bus_master(BusMaster::On).map_err(OpenError::BusMaster)?;
        let registers = device.bar(0)?;
        Ok(Self { registers, space: Arc::clone(space), interrupts: None, device })
    }

    /// The same with `vectors` interrupts by MSI-X, each of which any number of queues may share.
    ///
    /// # Errors
    ///
    /// [`OpenError::Interrupts`] where the device does not have so many.
    pub fn with_interrupts(self, vectors: u16) -> Result<Self, OpenError> {
        let msix = self.device.enable_msix(vectors.into());
        let interrupts = Some(msix.map_err(OpenError::Interrupts)?);
        Ok(Self { interrupts, ..self })
    }

    fn events(&self) -> &[Event] {
        self.interrupts.as_ref().map_or(&[], Msix::events)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl<S> fmt::Debug for VfioAccess<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VfioAccess").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Memory of the driver's own, mapped.
pub struct Shared<S: DmaSpace<Memory = Arc<Memory>>> {
    #[expect(dead_code, reason = "it is kept mapped")]
    mapping: Mapping<S>,
    addr: DmaAddr,
    memory: Arc<Memory>,
}

impl<S: DmaSpace<Memory = Arc<Memory>>> fmt::Debug for Shared<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("addr", &self.addr).finish_non_exhaustive()
    }
}

// SAFETY: nobody else has a reference to the memory, which is mapped in one piece from `addr` on as
// long as this exists. Where the device is not attached to the space, it does not find it, and
// nothing else that could be harmed: the kernel lets it reach what is mapped for it alone, which
// are atomic words of a `Memory`.
unsafe impl<S: DmaSpace<Memory = Arc<Memory>>> SharedMemory for Shared<S> {
    fn addr(&self) -> DmaAddr {
        self.addr
    }

    fn words(&self) -> &[AtomicU64] {
        self.memory.words()
    }
}

std::thread_local! {
    /// When this thread began to wait for what it waits for.
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

// SAFETY: 1. The process has the device to itself, since the kernel gives a group or a cdev to one
// alone, and the value has it to itself in the process. 2. A buffer is given only if it is mapped
// in the controller's space, where it stays as long as a clone exists. 3. As above.
unsafe impl<S> Access for VfioAccess<S>
where
    S: DmaSpace<Memory = Arc<Memory>> + Send + Sync + 'static,
    S::Error: Send + Sync,
{
    type Memory = Shared<S>;
    type Buffer = VfioBuffer<S>;

    fn registers_len(&self) -> u64 {
        self.registers.len()
    }

    #[inline]
    fn read32(&self, offset: u64) -> u32 {
        self.registers.read32(offset)
    }

    #[inline]
    fn read64(&self, offset: u64) -> u64 {
        self.registers.read64(offset)
    }

    #[inline]
    fn write32(&self, offset: u64, value: u32) {
        self.registers.write32(offset, value);
    }

    #[inline]
    fn write64(&self, offset: u64, value: u64) {
        self.registers.write64(offset, value);
    }

    fn allocate(&self, bytes: u64, align: u64) -> Result<Shared<S>, AllocateError> {
        let page = MemoryKind::Base.page_size().max(self.space.iovas.granule());
        let len = bytes.checked_next_multiple_of(page).ok_or(BuildError::TooLong)?;
        let memory = Arc::new(Memory::new(MemoryKind::Base, len)?);
        let (user, place) = (memory.user_range(), Place { len, align, lead: 0 });
        let mapping = self.space.map(&memory, user, Prot::READ_WRITE, place)?;
        let addr = DmaAddr::new(mapping.iova.get());
        Ok(Shared { mapping, addr, memory })
    }

    #[inline]
    fn buffer<'b>(&self, buffer: &'b VfioBuffer<S>) -> Option<&'b Buffer<DmaAddr>> {
        Arc::ptr_eq(&buffer.0.space, &self.space).then_some(&buffer.0.buffer)
    }

    fn pause(&self, polls: u32, limit: Duration) -> Pause {
        if polls <= 1 {
            BEGAN.set(None);
        }
        if polls < SPINS {
            hint::spin_loop();
            return Pause::Again;
        }
        if polls < YIELDS {
            thread::yield_now();
            if !polls.is_multiple_of(LOOK) {
                return Pause::Again;
            }
        } else {
            thread::sleep(NAP);
        }
        // The first look at the clock comes late, and the limit is so much longer.
        let now = Instant::now();
        let began = BEGAN.get().unwrap_or(now);
        BEGAN.set(Some(began));
        if now.duration_since(began) > limit { Pause::GiveUp } else { Pause::Again }
    }

    fn vectors(&self) -> u16 {
        u16::try_from(self.events().len()).unwrap_or(u16::MAX)
    }

    fn wait(&self, vector: u16, limit: Duration) {
        if let Some(event) = self.events().get(usize::from(vector)) {
            // Where it cannot be waited for, the caller polls.
            let _ = event.wait(Some(limit));
        }
    }
}
