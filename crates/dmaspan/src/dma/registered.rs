//! Registered buffers are mapped here once, so that their imports are addresses that a device uses.
//!
//! Behind a translation a buffer lies in one range of IOVAs, whatever its memory is scattered over:
//! it is one segment wherever its pieces end and begin on granules. How much a device takes in one
//! descriptor does not matter here, but where descriptors are made of an import.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::mem::ManuallyDrop;

use lock_api::Mutex;

use super::any::AnyTranslation;
use super::attrs::Privilege;
use super::bounce::BouncePool;
use super::device::{Device, Policy};
use super::domain::translation::Sealed;
use super::domain::{Flush, Translation, map_into};
use super::error::Error;
use super::list::{Placed, Shape};
use super::memory::{FromRegistered, Piece, Registered, Via};
use super::stage::{STAGE, Stage};
use super::way::Way;
use crate::addr::{DmaAddr, Iova, PhysAddr};
use crate::error::Errno;
use crate::iommu::Event;
use crate::iommu::iova::{self, Align, Iovas, Request};
use crate::label::Caller;
use crate::lg2;
use crate::platform::Flag;
use crate::promise::Promise;
use crate::prot::{Coherency, Direction, Prot};
use crate::range::UserRange;
use crate::regbuf::{self, Buffer, BuildError, Keep, Owner, Segments, SegmentsBuilder};
use crate::span::{Span, SpanBuf};

/// The reason why a device cannot have memory itself, but only slots in its place, which a
/// registered buffer cannot have: each operation would copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MustBounce {
    /// The device does not address it, and nothing translates.
    #[error("the memory is beyond {last:#x}, the last address of the device")]
    Beyond {
        /// The last address that the device can use.
        last: u64,
    },
    /// The device sees nothing but a pool, and the memory is not the pool's.
    #[error("the device may see nothing but its pool")]
    NotPooled,
    /// The device is not trusted, and the memory shares granules with other memory.
    #[error(
        "the device is not trusted, and the memory does not fill its granules of {granule:#x} bytes"
    )]
    SharesGranule {
        /// The granule in bytes.
        granule: u64,
    },
}

/// The reason why a registered buffer was not mapped. Nothing is mapped, and the device reaches
/// nothing of it, unless it says that it is in quarantine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapBufferError {
    /// The buffer is not registered for what the device is to do with it.
    #[error("{user} is registered for {access:?}, not for {wanted:?}")]
    Access {
        /// What was registered.
        user: UserRange,
        /// What devices may do with it.
        access: Prot,
        /// What this one is to do.
        wanted: Prot,
    },
    /// The device does not see the CPU's caches: each operation would take syncs.
    #[error("{user} was not mapped: the device does not see the caches of the CPU")]
    NonCoherent {
        /// What was registered.
        user: UserRange,
    },
    /// The device cannot have all of the buffer itself.
    #[error("{part} would be bounced: {why}")]
    Bounced {
        /// The part of what was registered.
        part: UserRange,
        /// Where it is.
        span: Span,
        /// Why.
        why: MustBounce,
    },
    /// The segments cannot be kept track of.
    #[error("{user} was not mapped: {error}")]
    Segments {
        /// What was registered.
        user: UserRange,
        /// Why.
        #[source]
        error: BuildError,
    },
    /// There are no IOVAs or no tables, or hardware does not answer.
    #[error("{user} was not mapped: {error}")]
    Map {
        /// What was registered.
        user: UserRange,
        /// Why. After [`Error::Quarantined`] the buffer is held until a
        /// [flush](super::DmaDomain::flush) succeeds.
        #[source]
        error: Error,
    },
}

impl MapBufferError {
    /// Returns what a front end that looks like Linux answers: `EACCES` for another access,
    /// `EOPNOTSUPP` for a device that needs syncs, `EIO` for what it does not reach, `EPERM` for
    /// what it must not see.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Access { .. } => Errno::EACCES,
            Self::NonCoherent { .. } => Errno::EOPNOTSUPP,
            Self::Bounced { why: MustBounce::Beyond { .. }, .. } => Errno::EIO,
            Self::Bounced { .. } => Errno::EPERM,
            Self::Segments { error, .. } => error.errno(),
            Self::Map { error, .. } => error.errno(),
        }
    }
}

/// What a buffer needs of a space of IOVAs.
#[derive(Clone, Copy, Debug, Default)]
struct Need {
    /// How many bytes.
    bytes: u64,
    /// log2 of its largest aligned block: of the largest leaf that it can have.
    block_lg2: u32,
    /// Where an IOVA of 0 would be in memory if that block were mapped at its own address.
    phase: u64,
}

/// By how much the alignment falls where there is no place: what a level of tables has of address
/// bits, with tables of 4K pages.
const LEVEL_LG2: u32 = 9;

impl<T: Translation + 'static, B: BouncePool> Device<T, B>
where
    T::Memory: FromRegistered,
{
    /// Maps a registered buffer for as long as the buffer exists that this returns, for a device
    /// that may access it as `access` says.
    ///
    /// Any number of devices may have one buffer mapped; it stays until the last mapping is gone.
    /// An import of what this returns is for this device, and takes no more work than one of the
    /// buffer itself: nothing is mapped, unmapped or told to hardware by an operation.
    ///
    /// Behind a translation all of it lies in one range of IOVAs. The largest block of its memory
    /// that is aligned is aligned there, too, if there is a place for that, and has one leaf. So
    /// have others that are at such a distance from it: all pages of a buffer of huge pages are.
    /// Where nothing is translated, the segments are those of the buffer.
    ///
    /// No segment is cut to what the device takes of a list, its
    /// [`max_segment`](super::DeviceLimits::max_segment) and
    /// [`boundary`](super::DeviceLimits::boundary): descriptors of an import are, by
    /// [`SegmentLimits`](crate::regbuf::descriptors::SegmentLimits) of the same numbers.
    ///
    /// The last reference to what this returns unmaps it strictly, in a lazy domain too, and only
    /// then lets go of the buffer. Where hardware does not answer, the domain has it in quarantine
    /// until a [flush](super::DmaDomain::flush) succeeds.
    ///
    /// # Errors
    ///
    /// [`MapBufferError`], with nothing mapped.
    ///
    /// # Context
    ///
    /// Allocates for as many segments as it makes; tables may be allocated. The end waits for
    /// hardware, in the context of whoever lets go of the last reference, and never fails for want
    /// of memory.
    #[track_caller]
    pub fn map_buffer(
        &self,
        buffer: Arc<Buffer<PhysAddr>>,
        access: Prot,
    ) -> Result<Buffer<DmaAddr>, MapBufferError> {
        let (user, by) = (buffer.user(), self.caller());
        let access = access & Prot::READ_WRITE;
        let direction = check_access(&buffer, access)?;
        if self.config.coherency == Coherency::NonCoherent {
            return Err(MapBufferError::NonCoherent { user });
        }
        self.check_ways(&buffer)?;
        let map = |error| MapBufferError::Map { user, error };
        let (segments, iovas, memory) = if self.is_direct() {
            let own = |span: Span| Span::covering(DmaAddr::new(span.paddr().get()), span.len() - 1);
            let segments = joined(user, buffer.segments().iter().map(own))?;
            (segments, None, T::Memory::from_registered(Registered::new(buffer)))
        } else {
            let need = self.buffer_need(&buffer).map_err(map)?;
            let (iovas, lead) = self.buffer_iovas(need).map_err(map)?;
            let base = iovas.range().start().wrapping_add(lead);
            let segments = match joined(user, self.buffer_spans(&buffer, base)) {
                Ok(segments) => segments,
                Err(error) => {
                    self.translation.free(Promise::kept(), iovas);
                    return Err(error);
                }
            };
            let prot = self.prot(Via::Memory, direction, Privilege::Any);
            let memory = T::Memory::from_registered(Registered::new(Arc::clone(&buffer)));
            let mapped = map_into(&*self.translation, iovas, memory, by, |translation, _, _| {
                self.fill_buffer(translation, &buffer, base, prot)
            });
            let (iovas, memory) = mapped.map_err(|refused| map(refused.error))?;
            (segments, Some(iovas), memory)
        };
        let mapped = segments.len();
        let held = Mutex::new(Some((iovas, ManuallyDrop::new(memory))));
        let keep = Box::new(MappedBuffer { translation: Arc::clone(&self.translation), by, held });
        // As long as the buffer, whose length is that of what was registered.
        let (addr, len) = (DmaAddr::default(), mapped);
        Buffer::kept(segments, user, access, keep)
            .map_err(|_| map(Error::OtherLength { addr, len, mapped }))
    }

    /// Whether the device may have all of a buffer itself.
    fn check_ways(&self, buffer: &Buffer<PhysAddr>) -> Result<(), MapBufferError> {
        let mut offset = 0;
        for span in buffer.segments() {
            // There is no error for memory.
            if let Ok(Way::Bounced) = self.way(Piece::memory(span)) {
                let start = buffer.user().start().wrapping_add(offset);
                let last = start.wrapping_add(span.len() - 1);
                let part = UserRange::new(start, last).unwrap_or(buffer.user());
                return Err(MapBufferError::Bounced { part, span, why: self.why_bounced(span) });
            }
            offset += span.len();
        }
        Ok(())
    }

    #[cold]
    fn why_bounced(&self, span: Span) -> MustBounce {
        let last = self.config.limits.last;
        if self.is_direct() && span.last().get() > last {
            return MustBounce::Beyond { last };
        }
        match self.policy {
            Policy::Pool if !self.pool.owns(span) => MustBounce::NotPooled,
            Policy::Pool | Policy::Free | Policy::Granules => {
                MustBounce::SharesGranule { granule: lg2::size(self.translation.granule_lg2()) }
            }
        }
    }

    /// Where the segments go, one behind the other, and how many bytes they have.
    fn places<'a>(
        &'a self,
        buffer: &'a Buffer<PhysAddr>,
    ) -> impl Iterator<Item = Result<(Placed, u64), Error>> + 'a {
        let granule_lg2 = self.translation.granule_lg2();
        let shape = Shape { granule_lg2, window: u64::MAX, max_segment: u64::MAX };
        let mut next = 0;
        buffer.segments().iter().enumerate().map(move |(piece, span)| {
            let placed = shape.place(&mut next, span).ok_or(Error::ListWraps { piece })?;
            Ok((placed, span.len()))
        })
    }

    fn buffer_need(&self, buffer: &Buffer<PhysAddr>) -> Result<Need, Error> {
        self.places(buffer).try_fold(Need::default(), |mut need, place| {
            let (Placed { at, whole, .. }, _) = place?;
            need.bytes = at + whole.len();
            let block_lg2 = largest_block_lg2(whole);
            if block_lg2 > need.block_lg2 {
                need.block_lg2 = block_lg2;
                need.phase = whole.paddr().get().wrapping_sub(at);
            }
            Ok(need)
        })
    }

    /// IOVAs for a buffer, and how many of them are left out at the beginning, so that its largest
    /// block is aligned as in memory, or as well as there is a place for.
    #[track_caller]
    fn buffer_iovas(&self, need: Need) -> Result<(Iovas, u64), Error> {
        let limit = Iova::new(self.config.limits.last);
        let granule_lg2 = self.translation.granule_lg2();
        let mut align_lg2 = need.block_lg2;
        loop {
            let lead = need.phase & lg2::mask(align_lg2);
            let bytes = need.bytes.saturating_add(lead);
            let request = Request { bytes, align: Align::To(lg2::size(align_lg2)), limit };
            match self.translation.alloc(request) {
                Ok(iovas) => return Ok((iovas, lead)),
                Err(Error::Iova(iova::Error::Exhausted { .. })) if align_lg2 > granule_lg2 => {
                    align_lg2 = align_lg2.saturating_sub(LEVEL_LG2).max(granule_lg2);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Where a device finds the segments if the first granule of them is at `base`.
    fn buffer_spans<'a>(
        &'a self,
        buffer: &'a Buffer<PhysAddr>,
        base: Iova,
    ) -> impl Iterator<Item = Span<DmaAddr>> + 'a {
        // All of them have a place: it was counted.
        self.places(buffer).map_while(Result::ok).map(move |(placed, len)| {
            let start = base.wrapping_add(placed.at + placed.offset);
            Span::covering(DmaAddr::new(start.get()), len - 1)
        })
    }

    /// Maps the granules of the segments, by as few calls as there are full stages.
    fn fill_buffer(
        &self,
        translation: &T,
        buffer: &Buffer<PhysAddr>,
        base: Iova,
        prot: Prot,
    ) -> Result<(), Error> {
        let mut room = SpanBuf::room::<STAGE>();
        let mut stage = Stage::new(translation, &mut room);
        for place in self.places(buffer) {
            let (Placed { at, offset, whole }, len) = place?;
            let at = base.wrapping_add(at);
            self.observe_bytes(at.wrapping_add(offset), len);
            stage.add(at, &[whole], prot)?;
        }
        stage.map()
    }
}

/// log2 of the largest block of whole granules, aligned to its own length.
fn largest_block_lg2(whole: Span) -> u32 {
    let longest = lg2::floor(whole.len());
    let before = whole.paddr().get().wrapping_neg() & lg2::mask(longest);
    // Half of that is in it wherever it begins.
    if whole.len() - before >= lg2::size(longest) { longest } else { longest - 1 }
}

/// Which way data goes that a device may access so, if the buffer is registered for it.
fn check_access(buffer: &Buffer<PhysAddr>, wanted: Prot) -> Result<Direction, MapBufferError> {
    let (user, access) = (buffer.user(), buffer.access());
    let refused = MapBufferError::Access { user, access, wanted };
    if !access.contains(wanted) {
        return Err(refused);
    }
    match (wanted.contains(Prot::READ), wanted.contains(Prot::WRITE)) {
        (true, true) => Ok(Direction::Bidirectional),
        (true, false) => Ok(Direction::ToDevice),
        (false, true) => Ok(Direction::FromDevice),
        (false, false) => Err(refused),
    }
}

fn joined(
    user: UserRange,
    spans: impl Iterator<Item = Span<DmaAddr>>,
) -> Result<Segments<DmaAddr>, MapBufferError> {
    let mut builder = SegmentsBuilder::new();
    let mut spans = spans;
    let pushed = spans.try_for_each(|span| builder.push(span));
    let built = pushed.and_then(|()| builder.build());
    built.map_err(|error| MapBufferError::Segments { user, error })
}

/// What a mapped buffer keeps. Dropped without an end it leaks the memory: a device may use it.
struct MappedBuffer<T: Translation> {
    translation: Arc<T>,
    /// The caller that mapped it, which is named when it ends.
    by: Caller,
    /// In a lock as memory need not be `Sync`; it is never waited for. There are no IOVAs where
    /// nothing is translated.
    held: Mutex<Flag, Option<MappedMemory<T::Memory>>>,
}

type MappedMemory<H> = (Option<Iovas>, ManuallyDrop<H>);

impl<T: Translation> Keep<DmaAddr> for MappedBuffer<T> {
    fn end(&mut self, _segments: &Segments<DmaAddr>) {
        let Some((iovas, memory)) = self.held.get_mut().take() else { return };
        if let Some(range) = iovas.as_ref().map(Iovas::range) {
            // Where an observer panics, a device may still use the memory.
            self.translation.observe(&Event::Unmapping { range, by: self.by });
        }
        let memory = ManuallyDrop::into_inner(memory);
        match iovas {
            // Where it fails, the domain has the memory.
            Some(iovas) => {
                drop(self.translation.unmap(Promise::kept(), iovas, memory, Flush::Strict))
            }
            None => drop(memory),
        }
    }
}

/// The reason why memory was not registered for a device. `E` is the error of the source of the
/// memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MappedSourceError<E: core::error::Error> {
    /// There is no buffer to map.
    #[error("{error}")]
    Buffer {
        /// Why.
        #[source]
        error: E,
        /// Its errno.
        errno: Errno,
    },
    /// It was not mapped.
    #[error(transparent)]
    Map(#[from] MapBufferError),
}

impl<E: core::error::Error> MappedSourceError<E> {
    /// The errno of the source's error, or of the [mapping](MapBufferError::errno).
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Buffer { errno, .. } => *errno,
            Self::Map(error) => error.errno(),
        }
    }
}

/// Registers memory for a device: what another source gives, mapped.
///
/// Its registries are of one device: buffers are cloned only to registries whose source maps for
/// the same one. For several devices, register the memory once and
/// [map](Device::map_buffer) it for each.
///
/// A driver of an NVMe controller behind an IOMMU, say:
///
/// ```no_run
/// use std::error::Error;
/// use std::sync::Arc;
///
/// use dmaspan::dma::{
///     Device, DeviceConfig, DmaConfig, DmaDomain, MappedSource, NoPool, Registered,
/// };
/// use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
/// use dmaspan::iommu::{Domain, SoftIommu};
/// use dmaspan::platform::OneThread;
/// use dmaspan::regbuf::descriptors::{ListPage, MemoryPageSize};
/// use dmaspan::regbuf::{BufferRequest, Pinned, Registry};
/// use dmaspan::{Account, Direction, DmaAddr, PhysAddr};
/// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
///
/// fn main() -> Result<(), Box<dyn Error>> {
///     // A controller behind an IOMMU, here one of software.
///     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
///     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
///     let table = PageTable::new(format, tables)?;
///     let iommu = SoftIommu::over(&table);
///     let domain = Domain::new(table, iommu)?;
///     let config = DmaConfig::new(1);
///     let domain = DmaDomain::<_, _, _, _, Registered>::new(domain, config, OneThread)?;
///     let controller = Arc::new(Device::new(Arc::new(domain), NoPool, DeviceConfig::bits(64))?);
///     // Once: pages that lie anywhere are one segment for the controller.
///     let memory = Arc::new(Memory::new(MemoryKind::Base, 64 << 12)?);
///     let pinner = Arc::new(LinuxPinner::<PhysAddr>::new()?);
///     let pinned = Pinned::new(pinner, Arc::clone(&memory), Account::unlimited(), 12);
///     let mut registry = Registry::new(MappedSource::new(pinned, controller));
///     registry.register(&[BufferRequest::new(memory.user_range())])?;
///     assert_eq!(registry.get(0)?.segments().count(), 1);
///
///     // For each command: where it goes is looked up. Its node keeps the buffer until it is done.
///     let node = registry.get(0)?.clone();
///     let import = node.import(0x1200, 0x2800, Direction::FromDevice)?;
///     let first = import.clone().next().ok_or("no bytes")?.start();
///     let mut entries = [0; 16];
///     let list = ListPage { addr: DmaAddr::new(0x1000), entries: &mut entries };
///     let prps = MemoryPageSize::new(0)?.write(import, &mut [list])?;
///     assert_eq!((prps.prp1, prps.prp2), (first.get(), 0x1000));
///     assert_eq!(u64::from_le(entries[0]), first.get() - 0x200 + 0x1000);
///     Ok(())
/// }
/// ```
pub struct MappedSource<S, T: Translation = AnyTranslation, B: BouncePool = <T as Sealed>::Pool> {
    memory: S,
    device: Arc<Device<T, B>>,
}

impl<S, T: Translation, B: BouncePool> MappedSource<S, T, B> {
    /// Maps for `device` what `memory` gives.
    pub fn new(memory: S, device: Arc<Device<T, B>>) -> Self {
        Self { memory, device }
    }

    /// Returns where the memory comes from.
    pub fn memory(&self) -> &S {
        &self.memory
    }

    /// The device that it is mapped for.
    pub fn device(&self) -> &Arc<Device<T, B>> {
        &self.device
    }
}

impl<S, T, B> regbuf::Source for MappedSource<S, T, B>
where
    S: regbuf::Source<Addr = PhysAddr>,
    T: Translation<Memory: FromRegistered> + 'static,
    B: BouncePool,
{
    type Addr = DmaAddr;
    type Error = MappedSourceError<S::Error>;

    fn buffer(&self, user: UserRange, access: Prot) -> Result<Buffer<DmaAddr>, Self::Error> {
        let buffer = self.memory.buffer(user, access).map_err(|error| {
            let errno = self.memory.errno(&error);
            MappedSourceError::Buffer { error, errno }
        })?;
        Ok(self.device.map_buffer(Arc::new(buffer), access)?)
    }

    fn owner(&self) -> Owner<'_> {
        Owner { device: Some(self.device.id()), ..self.memory.owner() }
    }

    fn errno(&self, error: &Self::Error) -> Errno {
        error.errno()
    }
}

impl<S, T: Translation, B: BouncePool> fmt::Debug for MappedSource<S, T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedSource").field("device", &self.device).finish_non_exhaustive()
    }
}
