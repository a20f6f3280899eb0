//! Memory that a device and the program use at the same time, for long: rings, queues and tables.
//!
//! It is mapped once, and nothing is synced (Linux's `dma_alloc_coherent`, kernel/dma/mapping.c).

mod frames;
mod memory;
mod pool;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;

use lock_api::Mutex;

use self::frames::SharedBytes;
use super::attrs::Privilege;
use super::bounce::BouncePool;
use super::device::{Device, Policy};
use super::domain::Translation;
use super::error::Error;
use super::memory::{DmaMemory, Piece, Via};
use super::stage::{STAGE, Stage};
use super::unmapped::{UnmappedIovas, UnmappedState};
use crate::addr::{DmaAddr, Iova, PhysAddr};
pub use crate::bytes::Scalar;
use crate::iommu::Event;
use crate::iommu::iova::{Align, Iovas, Request};
use crate::leak::LeakNote;
use crate::lg2;
use crate::log;
use crate::platform::{Flag, Id};
use crate::promise::Promise;
use crate::prot::{Coherency, Direction};
use crate::range::IovaRange;
use crate::span::SpanBuf;
pub use frames::{CoherentFrames, FrameMemory};
pub use memory::{CoherentMemory, CoherentRequest, Contiguity, NoCoherent};
pub use pool::{CoherentBlock, CoherentPool, ForeignBlock};

/// Memory that a device and the program use at the same time, zeroed at first: from
/// [`Device::alloc`].
///
/// The program reads and writes it at offsets, with nothing to sync. A number that lies at a
/// multiple of its length is read or written by one access, which the compiler neither leaves out
/// nor repeats. It orders no other access of the CPU: a driver fences before it tells the device of
/// what it wrote, and before it reads what the device announced.
///
/// [`Device::free`] ends it. Dropped, it leaks: the device may still use it.
#[must_use = "coherent memory that is dropped leaks"]
pub struct Coherent {
    addr: DmaAddr,
    device: Id,
    held: Held,
}

/// What a device holds of memory. It leaks where it is dropped.
struct Held {
    iovas: Option<Iovas>,
    frames: ManuallyDrop<CoherentFrames>,
    note: LeakNote,
}

impl Held {
    fn new(iovas: Option<Iovas>, frames: CoherentFrames, addr: u64) -> Self {
        let bytes = frames.pieces().iter().map(|piece| piece.span.len());
        let what = "coherent memory was dropped: give it back by Device::free";
        let note = LeakNote { what, addr, bytes: bytes.fold(0, u64::saturating_add) };
        Self { iovas, frames: ManuallyDrop::new(frames), note }
    }
}

/// The program's accesses to what is in `$bytes`.
macro_rules! accesses {
    () => {
        /// Returns how many bytes there are, never 0.
        #[expect(clippy::len_without_is_empty, reason = "there is at least one byte")]
        pub fn len(&self) -> u64 {
            self.bytes().len()
        }

        /// Returns where the program reaches the first byte: aligned as the address that the device
        /// has, up to 4096. The pointer is read and written by [`bytes`](crate::bytes), which all
        /// else that accesses the memory uses, and nothing but atomic bytes is borrowed from it: a
        /// device may write at any time.
        pub fn as_ptr(&self) -> NonNull<u8> {
            self.bytes().start()
        }

        /// Reads a number at `offset`, by one access.
        ///
        /// # Errors
        ///
        /// [`Error::OutsideMapping`], and [`Error::Unaligned`] where `offset` is not a multiple of
        /// its length.
        #[inline]
        pub fn read<S: Scalar>(&self, offset: u64) -> Result<S, Error> {
            self.bytes().read(offset)
        }

        /// Writes a number at `offset`, by one access.
        ///
        /// # Errors
        ///
        /// As of [`read`](Self::read).
        #[inline]
        pub fn write<S: Scalar>(&mut self, offset: u64, value: S) -> Result<(), Error> {
            self.bytes_mut().write(offset, value)
        }

        /// Copies bytes from `offset` on out of it, by accesses of any length, also while others
        /// write them: another device that has the memory mapped, or the slots that stand in for
        /// it.
        ///
        /// # Errors
        ///
        /// [`Error::OutsideMapping`], with nothing read.
        pub fn read_bytes(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
            self.bytes().read_bytes(offset, into)
        }

        /// Copies bytes to `offset` and on, by accesses of any length.
        ///
        /// # Errors
        ///
        /// [`Error::OutsideMapping`], with nothing written.
        pub fn write_bytes(&mut self, offset: u64, from: &[u8]) -> Result<(), Error> {
            self.bytes_mut().write_bytes(offset, from)
        }
    };
}
use accesses;

impl Coherent {
    /// Returns what the device is given.
    #[inline(always)]
    pub fn addr(&self) -> DmaAddr {
        self.addr
    }

    accesses!();

    #[inline(always)]
    fn bytes(&self) -> &SharedBytes {
        &self.held.frames.bytes
    }

    #[inline(always)]
    fn bytes_mut(&mut self) -> &mut SharedBytes {
        &mut self.held.frames.bytes
    }
}

/// Another device can have it mapped, while this one has it.
#[expect(unsafe_code, reason = "who made the frames promised")]
// SAFETY: the frames are its own until `Device::free` takes it, which cannot be while it is in a
// mapping; dropped, it leaks them. `CoherentFrames::new` asks for the rest.
unsafe impl DmaMemory for Coherent {
    fn pieces(&self) -> &[Piece] {
        self.held.frames.pieces()
    }
}

impl fmt::Debug for Coherent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coherent")
            .field("addr", &self.addr)
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// Coherent memory that was not freed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct FreeFailed {
    /// The reason.
    pub error: Error,
    /// The memory, where nothing was changed. `None` where it is in quarantine until
    /// [`Device::flush`], or another `alloc` or `free`, sees hardware forget it.
    pub coherent: Option<Coherent>,
}

impl From<FreeFailed> for Error {
    /// The reason alone. Memory that was given back is dropped, and so it leaks.
    #[cold]
    fn from(failed: FreeFailed) -> Self {
        failed.error
    }
}

/// What a device has of coherent memory beside the handles.
#[derive(Default)]
pub(super) struct Coherents {
    /// Where it comes from.
    source: Option<Arc<dyn CoherentMemory>>,
    /// A lock that is waited for: it guards a few instructions, and no interrupt takes it.
    quarantine: Mutex<Flag, Quarantine>,
}

/// What hardware was not seen to forget.
#[derive(Default)]
struct Quarantine {
    /// There is room for all that is out.
    held: Vec<Held>,
    /// How many there are, in here and out.
    count: usize,
}

impl Coherents {
    /// Makes room for one more in the quarantine: whether there is memory for it.
    fn enter(&self) -> bool {
        let mut quarantine = self.quarantine.lock();
        let missing = (quarantine.count + 1).saturating_sub(quarantine.held.len());
        let has_room = quarantine.held.try_reserve(missing).is_ok();
        quarantine.count += usize::from(has_room);
        has_room
    }

    /// Gives the room back.
    fn leave(&self) {
        self.quarantine.lock().count -= 1;
    }

    /// Puts memory into quarantine, because of `error`.
    fn quarantine(&self, held: Held, error: &Error) {
        let bytes = held.note.bytes;
        self.keep(held);
        log::warn!("{bytes:#x} bytes of coherent memory are kept: {error}");
    }

    fn keep(&self, held: Held) {
        // There is room: `enter` made it.
        self.quarantine.lock().held.push(held);
    }

    fn take(&self) -> Option<Held> {
        self.quarantine.lock().held.pop()
    }

    /// The IOVAs of one in quarantine, by its place.
    fn kept_iovas(&self, place: usize) -> Option<IovaRange> {
        self.quarantine.lock().held.get(place)?.iovas.as_ref().map(Iovas::range)
    }
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// A device whose [coherent memory](Self::alloc) comes from `memory`. One that
    /// [bounces all](super::Bounce::Always) has it from its pool, and needs none.
    #[must_use]
    pub fn with_coherent(mut self, memory: Arc<dyn CoherentMemory>) -> Self {
        self.coherents.source = Some(memory);
        self
    }

    /// Memory of `len` bytes that the device and the program use at the same time
    /// (`dma_alloc_coherent`): zeroed, at one range of addresses for the device, the first a
    /// multiple of `align`, and within its [mask](super::DeviceLimits::last).
    ///
    /// It fills whole granules, and pages of 4096 bytes: for many small ones there is
    /// [`CoherentPool`]. Behind an IOMMU it may be of any pages; otherwise it is contiguous. A
    /// device that [bounces all](super::Bounce::Always) gets memory of its pool, as in Linux
    /// (`swiotlb_alloc`). For a device that does not see the CPU's caches the memory is not cached,
    /// where its source has such memory.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::dma::{CoherentMemory, Device, DeviceConfig, Direct, NoPool, RawMemory};
    /// use dmaspan::{PhysAddr, Platform, Span};
    ///
    /// fn ring<P: Platform>(
    ///     direct: Arc<Direct<RawMemory, P>>,
    ///     frames: Arc<dyn CoherentMemory>,
    /// ) -> Result<(), Box<dyn std::error::Error>> {
    ///     let device = Device::new(direct, NoPool, DeviceConfig::bits(32))?.with_coherent(frames);
    ///     let mut ring = device.alloc(256 * 16, 4096)?;
    ///     ring.write(8, 0x1234_u32)?; // of the first descriptor
    ///     assert_eq!(ring.read::<u64>(0)?, 0);
    ///     let base = ring.addr(); // for a register of the device
    ///     // The device is reset, and uses it no more.
    ///     device.free(ring)?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// With nothing changed: [`Error::Length`] for no bytes and for more than the device can
    /// address, [`Error::Alignment`] for what is no power of two or larger than any address of the
    /// device; [`Error::NoCoherent`] where there is no such memory, or nobody
    /// [said](Self::with_coherent) from where; [`Error::Iova`] and [`Error::Domain`] where there
    /// are no IOVAs or tables. [`Error::Quarantined`] where hardware was not seen to forget what
    /// had been mapped before an error: the memory is kept as after a failed [`free`](Self::free).
    ///
    /// # Context
    ///
    /// Allocates, and waits where its source does: not in an interrupt.
    #[track_caller]
    pub fn alloc(&self, len: u64, align: u64) -> Result<Coherent, Error> {
        let request = self.coherent_request(len, align)?;
        let refused = |source| Error::NoCoherent { len, align, last: request.last, source };
        // A failure would be that of another's memory.
        let _ = self.settle_coherents();
        let frames = self.coherent_frames(&request).map_err(refused)?;
        if !self.coherents.enter() {
            return Err(refused(NoCoherent { why: "there is no memory for a record of it" }));
        }
        let mut coherent = self.map_coherent(frames, request.len, align)?;
        coherent.bytes_mut().truncate(len);
        Ok(coherent)
    }

    /// Ends coherent memory, which the device does not use any more (`dma_free_coherent`): unmaps
    /// it, and frees it when hardware has forgotten it.
    ///
    /// # Errors
    ///
    /// [`FreeFailed`]: [`Error::Foreign`] for memory of another device, which is given back, and
    /// [`Error::Quarantined`] where hardware does not answer. Then the device keeps the memory, and
    /// tries again with each [`alloc`](Self::alloc), `free` and [`flush`](Self::flush). A device
    /// that is dropped before leaks it.
    ///
    /// # Context
    ///
    /// Waits for hardware, and where freeing the memory does: not in an interrupt. Never fails for
    /// want of memory.
    #[track_caller]
    pub fn free(&self, coherent: Coherent) -> Result<(), FreeFailed> {
        if coherent.device != self.id() {
            let error = Error::Foreign { addr: coherent.addr };
            return Err(FreeFailed { error, coherent: Some(coherent) });
        }
        let ended = self.end_coherent(coherent.held);
        // A failure would be that of another's memory.
        let _ = ended.is_ok().then(|| self.settle_coherents());
        ended.map_err(|error| FreeFailed { error, coherent: None })
    }

    /// Makes hardware forget all that was unmapped in this device's translation, of other devices
    /// too, and frees what waited for that: what the flush queue holds, and what is in quarantine.
    ///
    /// # Errors
    ///
    /// [`Error::Quarantined`]: what hardware was not seen to forget stays in quarantine.
    ///
    /// # Context
    ///
    /// As [`DmaDomain::flush`](super::DmaDomain::flush), and as [`free`](Self::free).
    pub fn flush(&self) -> Result<(), Error> {
        self.translation.settle()?;
        self.settle_coherents()
    }

    /// The IOVAs of this device's coherent memory in quarantine, which it keeps with the memory
    /// until hardware forgets them. Other mappings that are in quarantine are in the list of the
    /// translation: [`DmaDomain::list_unmapped`](super::DmaDomain::list_unmapped). What changes
    /// meanwhile may be listed or not.
    ///
    /// # Context
    ///
    /// Allocates nothing, and waits for nobody but for the quarantine's lock, which is held for a
    /// few instructions. Not in an interrupt.
    pub fn list_unmapped(&self) -> impl Iterator<Item = UnmappedIovas> {
        let kept = |place| self.coherents.kept_iovas(place);
        let state = UnmappedState::Quarantined;
        (0..).map_while(kept).map(move |range| UnmappedIovas { range, state })
    }

    /// What memory has to be like, for so many bytes.
    fn coherent_request(&self, len: u64, align: u64) -> Result<CoherentRequest, Error> {
        let last = self.config.limits.last;
        let aperture = self.translation.aperture();
        let reached = last.min(aperture.last().get());
        let limit = reached.saturating_sub(aperture.start().get()).saturating_add(1);
        let highest = lg2::size(lg2::floor(reached.max(1)));
        if !align.is_power_of_two() || align > highest {
            return Err(Error::Alignment { align, limit: highest });
        }
        let granule_lg2 = self.translation.granule_lg2();
        let granule = lg2::size(granule_lg2).max(CoherentRequest::GRANULE);
        let whole = lg2::align_up(len, granule.ilog2()).filter(|whole| (1..=limit).contains(whole));
        let whole = whole.ok_or(Error::Length { len, limit })?;
        let (align, last, contiguity) = match self.is_direct() {
            true => (align.max(granule), last, Contiguity::OneSpan),
            false => (granule, u64::MAX, Contiguity::AnySpans),
        };
        let (last, coherency) = (PhysAddr::new(last), self.config.coherency);
        Ok(CoherentRequest { len: whole, granule, align, last, contiguity, coherency })
    }

    /// Memory as requested.
    fn coherent_frames(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        let frames = match (self.policy, &self.coherents.source) {
            (Policy::Pool, _) if request.coherency == Coherency::NonCoherent => {
                return Err(NoCoherent { why: "the device bounces all, and its pool is cached" });
            }
            (Policy::Pool, _) => self.pool.coherent(request)?,
            (_, Some(source)) => source.allocate(request)?,
            (_, None) => {
                let why = "nobody said where it comes from: `Device::with_coherent` does";
                return Err(NoCoherent { why });
            }
        };
        frames.check(request)?;
        let is_others = |piece: &Piece| !self.pool.owns(piece.span);
        if self.policy == Policy::Pool && frames.pieces().iter().any(is_others) {
            return Err(NoCoherent { why: "the pool gave memory that is not its own" });
        }
        Ok(frames)
    }

    /// Gives the device addresses of memory, which are a multiple of `align`.
    #[track_caller]
    fn map_coherent(
        &self,
        frames: CoherentFrames,
        bytes: u64,
        align: u64,
    ) -> Result<Coherent, Error> {
        let device = self.id();
        if self.is_direct() {
            let first = frames.pieces().first().map_or(0, |piece| piece.span.paddr().get());
            let held = Held::new(None, frames, first);
            return Ok(Coherent { addr: DmaAddr::new(first), device, held });
        }
        let limit = Iova::new(self.config.limits.last);
        let align = Align::NaturalAndTo(align);
        let iovas = self
            .translation
            .alloc(Request { bytes, align, limit })
            .inspect_err(|_| self.coherents.leave())?;
        let range = iovas.range();
        // Where a hook panics, a device may use it by then.
        let held = Held::new(Some(iovas), frames, range.start().get());
        self.translation.observe(&Event::Mapping { range, by: self.caller() });
        match self.fill_coherent(range, held.frames.pieces()) {
            Ok(()) => Ok(Coherent { addr: DmaAddr::new(range.start().get()), device, held }),
            Err(error @ Error::Quarantined { .. }) => {
                self.coherents.quarantine(held, &error);
                Err(error)
            }
            Err(error) => Err(self.end_coherent(held).err().unwrap_or(error)),
        }
    }

    /// Maps all pieces in a range that is as long.
    fn fill_coherent(&self, range: IovaRange, pieces: &[Piece]) -> Result<(), Error> {
        let prot = self.prot(Via::Memory, Direction::Bidirectional, Privilege::Any);
        let mut room = SpanBuf::room::<STAGE>();
        let mut stage = Stage::new(&*self.translation, &mut room);
        let mut at = range.start();
        for piece in pieces {
            stage.add(at, &[piece.span], prot)?;
            at = at.wrapping_add(piece.span.len());
        }
        stage.map()?;
        self.translation.announce(Promise::kept(), range)
    }

    /// Unmaps memory, and frees it or puts it into quarantine.
    #[track_caller]
    fn end_coherent(&self, held: Held) -> Result<(), Error> {
        if let Some(range) = held.iovas.as_ref().map(Iovas::range) {
            self.translation.observe(&Event::Unmapping { range, by: self.caller() });
            if let Err(error) = self.translation.unlink(Promise::kept(), range) {
                self.coherents.quarantine(held, &error);
                return Err(error);
            }
        }
        self.release_coherent(held);
        Ok(())
    }

    /// Frees what is in quarantine, if hardware forgets it now.
    fn settle_coherents(&self) -> Result<(), Error> {
        while let Some(held) = self.coherents.take() {
            let forget = |range| {
                self.translation.unlink(Promise::kept(), range)?;
                // What was taken away before is in the quarantine of the translation.
                self.translation.settle()
            };
            if let Err(error) = held.iovas.as_ref().map(Iovas::range).map_or(Ok(()), forget) {
                self.coherents.keep(held);
                return Err(error);
            }
            self.release_coherent(held);
        }
        Ok(())
    }

    /// Frees memory that no device reaches.
    fn release_coherent(&self, held: Held) {
        if let Some(iovas) = held.iovas {
            self.translation.free(Promise::kept(), iovas);
        }
        self.coherents.leave();
        held.note.done();
        drop(ManuallyDrop::into_inner(held.frames));
    }
}
