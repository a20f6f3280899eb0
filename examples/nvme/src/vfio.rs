//! Controllers that a process has by VFIO: of real machines, and of guests.
//!
//! The registers are the device's BAR 0. A [`Mapper`] of dmaspan maps what the controller is to
//! reach: it plans the IOVAs, owns the memory while it is mapped, and leaks what cannot be
//! unmapped.
//!
//! ```text
//! Memory ──VfioBuffer::new──► mapped, one segment ──► submit, as often as one likes
//!                                └── the last clone unmaps it
//! ```
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use dmaspan::Prot;
//! use dmaspan_linux::plan::Region;
//! use dmaspan_linux::vfio::Backend;
//! use dmaspan_linux::{Memory, MemoryKind};
//! use dmaspan_nvme::vfio::{VfioAccess, VfioBuffer};
//! use dmaspan_nvme::{Controller, QueueConfig};
//!
//! let (space, access) = VfioAccess::open(Backend::Vfio, "0000:00:05.0".parse()?)?;
//! let memory = Arc::new(Memory::new(MemoryKind::thp_for(2 << 20), 2 << 20)?);
//! let buffer = VfioBuffer::new(&space, Region::whole(&memory, Prot::READ_WRITE))?;
//!
//! let mut controller = Controller::new(access, 1)?;
//! let namespace = controller.namespace(1)?;
//! let mut queue = controller.create_queue(QueueConfig::new(32))?;
//! queue.read(&namespace, 0, &buffer, 0..1 << 20)?;
//! println!("the disk begins with {:#018x}", memory.read_u64(0)?);
//! controller.shutdown([queue])?;
//! Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![expect(unsafe_code, reason = "memory that a device writes is promised")]

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::cell::Cell;
use core::fmt;
use core::hint;
use core::ptr;
use core::slice;
use core::sync::atomic::AtomicU64;
use core::time::Duration;
use std::thread;
use std::time::Instant;

use dmaspan::regbuf::{
    Buffer, BuildError, ImportError, Keep, PinBufferError, Segments, SegmentsBuilder,
};
use dmaspan::{DmaAddr, DmaSpace as _, PhysAddr, Prot, RangeError, Span};
use dmaspan_drivers::Mmio as _;
use dmaspan_linux::physical::{ContiguousMemory, PhysicalMemory};
use dmaspan_linux::plan::{MapError, MappedRegions, Mapper, PlanError, Region};
use dmaspan_linux::vfio::{
    self, Backend, Bar, BusMaster, DeviceError, IrqEvent, Msix, NoIommuPinError, NoIommuPinner,
    VfioDevice, VfioSpace,
};
use dmaspan_linux::{Bdf, Memory, MemoryKind};

use crate::access::{Access, AllocateError, Pause, SharedMemory};

/// For so many polls a wait only spins: fast disks answer within them.
const SPINS: u32 = 1 << 10;
/// For so many it lets other threads go first. Then it sleeps between two of them.
const YIELDS: u32 = 1 << 14;
/// How long it sleeps.
const NAP: Duration = Duration::from_micros(100);
/// How often it looks at the clock before it sleeps: after so many polls.
const LOOK: u32 = 64;

/// The reason why a device cannot be used as a controller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The kernel does not give it.
    #[error(transparent)]
    Device(#[from] vfio::OpenError),
    /// Nothing can be mapped for it.
    #[error(transparent)]
    Space(#[from] PlanError),
    /// Its registers cannot be mapped.
    #[error(transparent)]
    Registers(DeviceError),
    /// It has no such interrupts.
    #[error(transparent)]
    Interrupts(DeviceError),
    /// It cannot be allowed to access memory.
    #[error("the device cannot be made a bus master: {0}")]
    BusMaster(DeviceError),
}

/// The reason why memory was not registered. Nothing of it is mapped, unless that is what it says.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// It cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError<vfio::Error>),
    /// It has no length, or is too long.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Its segments cannot be kept track of.
    #[error(transparent)]
    Segments(#[from] BuildError),
    /// It cannot be pinned.
    #[error(transparent)]
    Pin(#[from] PinBufferError<NoIommuPinError>),
    /// Segments and memory do not fit.
    #[error(transparent)]
    Import(#[from] ImportError),
}

/// Memory that is mapped for the devices of a space, as long as a clone exists. A clone is the same
/// one.
#[derive(Clone)]
pub struct VfioBuffer(Arc<Registered>);

struct Registered {
    buffer: Buffer<DmaAddr>,
    reach: Reach,
}

/// What gives memory to controllers.
#[derive(Clone, Debug)]
enum Reach {
    /// It is mapped for their address space.
    Mapped(Mapper<VfioSpace>),
    /// It is pinned: they reach all memory.
    Pinned(PhysicalMemory),
}

/// What a buffer keeps: a mapping or a pin, which owns the memory. Dropped, either ends, and leaks
/// the memory where it cannot.
struct Kept<T>(Option<T>);

impl<T: Send + Sync> Keep<DmaAddr> for Kept<T> {
    fn end(&mut self, _segments: &Segments<DmaAddr>) {
        self.0 = None;
    }
}

/// A controller without an IOMMU, which is told physical addresses: iommufd pins for it (Linux
/// 7.3). A clone is the same one.
#[derive(Clone, Debug)]
pub struct Untranslated {
    pinner: NoIommuPinner,
    memory: PhysicalMemory,
}

impl Untranslated {
    /// Opens the controller `bdf`, which accesses no memory.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(bdf: Bdf) -> Result<Self, OpenError> {
        let pinner = NoIommuPinner::new(bdf)?;
        let memory = PhysicalMemory::pinned_by_iommufd(pinner.clone());
        Ok(Self { pinner, memory })
    }

    /// What drives it, one at a time.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    ///
    /// # Safety
    ///
    /// No IOMMU keeps the controller from any memory: whoever has what is returned, or
    /// [`Controller::access`](crate::Controller::access), writes registers as the driver does
    /// alone, and tells the controller no addresses by them. It is asked for again only when the
    /// driver has ended.
    pub unsafe fn access(&self) -> Result<VfioAccess, OpenError> {
        // SAFETY: the driver tells it of memory that is pinned while it uses it (the contract of
        // `Access`), and nobody else tells it anything (the caller's promise).
        let device = unsafe { self.pinner.device() };
        VfioAccess::new(Reach::Pinned(self.memory.clone()), device)
    }
}

impl VfioBuffer {
    /// Maps a region, which is one segment, whatever pages its memory has.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    pub fn new(space: &Mapper<VfioSpace>, region: Region) -> Result<Self, RegisterError> {
        let Region { user, prot, .. } = region;
        let mapped = space.map([region])?;
        let mut builder = SegmentsBuilder::new();
        for map in mapped.plan().maps() {
            builder.push(Span::new(DmaAddr::new(map.iova().start().get()), map.len())?)?;
        }
        let segments = builder.build()?;
        // SAFETY: the mapping owns the memory, which stays there until `end` lets go of it, and
        // forever where it cannot be unmapped. All accesses to a `Memory` are of atomic bytes, so
        // nothing breaks either if somebody maps another one there behind the mapper's back.
        let buffer = unsafe { Buffer::new(segments, user, prot, Box::new(Kept(Some(mapped)))) }?;
        Ok(Self(Arc::new(Registered { buffer, reach: Reach::Mapped(space.clone()) })))
    }

    /// Pins a memory, which is as many segments as it is contiguous parts, for controllers without
    /// an IOMMU.
    ///
    /// # Errors
    ///
    /// [`RegisterError`].
    pub fn pinned(by: &Untranslated, memory: &Arc<Memory>) -> Result<Self, RegisterError> {
        let prot = Prot::READ_WRITE;
        let pinned = by.pinner.pin_whole(memory, prot)?;
        let mut builder = SegmentsBuilder::new();
        for segment in pinned.segments().iter() {
            builder.push(Span::new(DmaAddr::new(segment.start().get()), segment.len())?)?;
        }
        let (segments, user) = (builder.build()?, memory.user_range());
        // SAFETY: the pin owns the memory, which stays there until `end` lets go of it, and
        // forever where it cannot be unpinned. All accesses to a `Memory` are of atomic bytes.
        let buffer = unsafe { Buffer::new(segments, user, prot, Box::new(Kept(Some(pinned)))) }?;
        Ok(Self(Arc::new(Registered { buffer, reach: Reach::Pinned(by.memory.clone()) })))
    }

    /// Returns what is registered, at the addresses that devices see.
    pub fn buffer(&self) -> &Buffer<DmaAddr> {
        &self.0.buffer
    }
}

impl fmt::Debug for VfioBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VfioBuffer").field(&self.0.buffer).finish()
    }
}

/// A controller that this process has by VFIO.
///
/// Waits are [polls](Access::pause) that spin at first, then let other threads go first, and sleep
/// in the end.
#[derive(Debug)]
pub struct VfioAccess {
    registers: Bar,
    interrupts: Option<Msix>,
    /// Dropped, the kernel resets the device.
    device: VfioDevice,
    /// What gives it memory.
    reach: Reach,
}

impl VfioAccess {
    /// The controller `bdf` in an address space of its own, and what maps there.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn open(backend: Backend, bdf: Bdf) -> Result<(Mapper<VfioSpace>, Self), OpenError> {
        let (space, device) = VfioSpace::open(backend, bdf)?;
        let space = Mapper::new(space)?;
        let access = Self::new(Reach::Mapped(space.clone()), device)?;
        Ok((space, access))
    }

    /// The controller `bdf` in a space that there is: it reaches what is mapped there.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn attach(space: &Mapper<VfioSpace>, bdf: Bdf) -> Result<Self, OpenError> {
        Self::new(Reach::Mapped(space.clone()), space.space().attach(bdf)?)
    }

    /// A device that has memory by that.
    fn new(reach: Reach, device: VfioDevice) -> Result<Self, OpenError> {
        let registers = device.bar(0).map_err(OpenError::Registers)?;
        device.set_bus_master(BusMaster::On).map_err(OpenError::BusMaster)?;
        Ok(Self { registers, interrupts: None, device, reach })
    }

    /// The same with `vectors` interrupts by MSI-X. Queues may share one if the same thread waits
    /// for all of them: a wait takes the interrupt, whichever queue it was for.
    ///
    /// # Errors
    ///
    /// [`OpenError::Interrupts`] where the device does not have so many.
    pub fn with_interrupts(self, vectors: u16) -> Result<Self, OpenError> {
        let msix = self.device.enable_msix(vectors.into());
        let interrupts = Some(msix.map_err(OpenError::Interrupts)?);
        Ok(Self { interrupts, ..self })
    }

    fn events(&self) -> &[IrqEvent] {
        self.interrupts.as_ref().map_or(&[], Msix::events)
    }
}

/// Memory of the driver's own, mapped or pinned.
#[derive(Debug)]
pub struct Shared {
    addr: DmaAddr,
    words: SharedWords,
}

#[derive(Debug)]
enum SharedWords {
    Mapped {
        memory: Arc<Memory>,
        /// Which word is the first one that is at `addr`.
        first: usize,
        #[expect(dead_code, reason = "it is kept mapped")]
        mapped: MappedRegions<VfioSpace>,
    },
    Pinned(ContiguousMemory),
}

// SAFETY: contiguous memory that is pinned is where it is, and its value's alone. Of what is mapped
// nobody else has a reference to the memory, which is mapped in one piece until this is
// dropped, for a device that was opened in the space. A program that maps another `Memory` there
// behind the mapper's back makes the driver err, and breaks no memory: the kernel lets a device
// reach what is mapped for it alone, which are atomic bytes.
unsafe impl SharedMemory for Shared {
    fn addr(&self) -> DmaAddr {
        self.addr
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        let words = match &self.words {
            SharedWords::Mapped { memory, first, .. } => {
                memory.words().get(*first..).unwrap_or_default()
            }
            SharedWords::Pinned(memory) => memory.words(),
        };
        // SAFETY: they are as long and as aligned, and nobody else of this process has them: so all
        // of its accesses to them are of this size.
        unsafe { slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
    }
}

std::thread_local! {
    /// When this thread began to wait for what it waits for.
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

// SAFETY: 1. The process has the device to itself, since the kernel gives a group or a cdev to one
// alone. Code that opens it twice in the process, or writes its registers beside the driver, makes
// the driver err, and no more: see `Shared`; of one without an IOMMU `Untranslated::access` has the
// caller's promise. 2. A buffer is given only if it is mapped in the controller's space or pinned,
// where it stays as long as a clone exists. 3. As above.
unsafe impl Access for VfioAccess {
    type Memory = Shared;
    type Buffer = VfioBuffer;

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

    fn allocate(&self, bytes: u64, align: u64) -> Result<Shared, AllocateError> {
        let space = match &self.reach {
            Reach::Mapped(space) => space,
            Reach::Pinned(memory) => {
                let memory = memory.allocate(bytes, align, PhysAddr::new(u64::MAX))?;
                let addr = DmaAddr::new(memory.span().start().get());
                return Ok(Shared { addr, words: SharedWords::Pinned(memory) });
            }
        };
        let page = MemoryKind::Base.page_size().max(space.space().limits().granule());
        // The mapper aligns to pages. Where that is not enough, a part of what it maps is.
        let len = bytes.checked_add(align.saturating_sub(page)).ok_or(BuildError::TooLong)?;
        let len = len.checked_next_multiple_of(page).ok_or(BuildError::TooLong)?;
        let memory = Arc::new(Memory::new(MemoryKind::Base, len)?);
        let mapped = space.map([Region::whole(&memory, Prot::READ_WRITE)])?;
        let start = mapped.iova(0).ok_or("the mapping has no IOVA")?.get();
        let skip = start.wrapping_neg() & align.saturating_sub(1);
        let (first, addr) = (usize::try_from(skip / 8)?, DmaAddr::new(start + skip));
        Ok(Shared { addr, words: SharedWords::Mapped { memory, first, mapped } })
    }

    #[inline]
    fn buffer<'b>(&self, buffer: &'b VfioBuffer) -> Option<&'b Buffer<DmaAddr>> {
        let is_reached = match (&buffer.0.reach, &self.reach) {
            // Handles of one mapper have the same space.
            (Reach::Mapped(of), Reach::Mapped(own)) => ptr::eq(of.space(), own.space()),
            // Where nothing translates, what is pinned for one is where it is for all.
            (Reach::Pinned(_), Reach::Pinned(_)) => true,
            _ => false,
        };
        is_reached.then_some(&buffer.0.buffer)
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
