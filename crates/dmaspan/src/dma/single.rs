//! Mapping one contiguous buffer, and unmapping it.

use core::fmt;
use core::mem::{self, ManuallyDrop};

use super::any::AnyTranslation;
use super::attrs::{Attrs, CpuSync, Privilege};
use super::bounce::BouncePool;
use super::device::{Device, Place};
use super::domain::translation::PlaceFailed;
use super::domain::translation::Sealed;
use super::domain::{Flush, Translation, map_into, take_back};
use super::error::Error;
use super::memory::{DmaMemory, Piece, Via};
use super::reach::Reach as _;
use super::slots::{STRETCHES, Slots};
use super::way::Way;
use crate::addr::{DmaAddr, Iova, PhysAddr};
use crate::iommu::Event;
use crate::iommu::iova::{self, Align, Iovas, Request};
use crate::leak::{self, Held};
use crate::lg2;
use crate::platform::Id;
use crate::promise::Promise;
use crate::prot::{Coherency, Direction, Prot};
use crate::span::{Span, SpanBuf};
use crate::swiotlb::Fill;

/// A buffer that a device may use. It owns the memory: [`Device::unmap`] gives it back.
///
/// Dropped, it leaks the memory and the IOVAs, and the device goes on using them.
#[must_use = "a mapping that is dropped is never unmapped, and its memory leaks"]
// IOVAs and memory come first, so that an unmap reads them in the pieces of 16 bytes in which they
// were moved: a CPU waits for what was stored in other pieces a moment ago.
#[repr(C)]
pub struct Mapping<T: Translation = AnyTranslation, B: BouncePool = <T as Sealed>::Pool> {
    pub(super) iovas: Option<Iovas>,
    /// Taken by the unmap; leaked where there was none.
    pub(super) memory: Option<T::Memory>,
    pub(super) addr: DmaAddr,
    pub(super) len: u64,
    pub(super) device: Id,
    pub(super) slots: Option<Slots<B::Slot>>,
    pub(super) direction: Direction,
    flush: Flush,
    sync: CpuSync,
    pub(super) fill: Fill,
}

impl<T: Translation, B: BouncePool> Mapping<T, B> {
    /// Returns what the device is given.
    #[inline(always)]
    pub fn addr(&self) -> DmaAddr {
        self.addr
    }

    /// Returns how many bytes are mapped.
    #[inline(always)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always `false`: a mapping has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns which way the data goes.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// When hardware is told about its unmap.
    pub fn flush(&self) -> Flush {
        self.flush
    }

    /// Returns whether slots stand in for the memory or its ends.
    pub fn is_bounced(&self) -> bool {
        self.slots.is_some()
    }

    /// Returns whether slots were filled. Of what was not, the unmap [says](Device::unmap_written)
    /// how much the device wrote.
    pub fn fill(&self) -> Fill {
        self.fill
    }
}

impl<T: Translation, B: BouncePool> Drop for Mapping<T, B> {
    #[inline(always)]
    fn drop(&mut self) {
        // A device may still use them.
        let (memory, slots) = (ManuallyDrop::new(self.memory.take()), self.slots.take());
        let slots = ManuallyDrop::new(slots);
        if memory.is_some() {
            let iovas = ManuallyDrop::new(self.iovas.take());
            // By values: a mapping whose address is given away stays in no register.
            let held = Held {
                iovas: iovas.as_ref().map(Iovas::range),
                memory: self.len,
                slots: if slots.is_some() { self.len } else { 0 },
            };
            if T::Reach::<B>::MAY_TRANSLATE {
                leak::dropped("a mapping", "Device::unmap", self.addr, held);
            } else {
                leak::dropped_in_place("a mapping", "Device::unmap", self.addr, held);
            }
        }
    }
}

/// Says what became of memory that was unmapped.
#[derive(Debug)]
#[must_use = "the memory is in it"]
pub enum Unmapped<H> {
    /// No device reaches it any more.
    Released(H),
    /// The flush queue owns it, and drops it when it has been synced.
    Queued,
}

/// A mapping that was refused.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct Refused<H> {
    /// The reason.
    pub error: Error,
    /// What was to be mapped, which no device reaches. `None` where hardware was not seen to forget
    /// what had been mapped before the error: the memory is in quarantine.
    pub memory: Option<H>,
}

impl<H> From<Refused<H>> for Error {
    /// The reason alone. The memory is dropped: no device reaches it.
    #[cold]
    fn from(refused: Refused<H>) -> Self {
        refused.error
    }
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Maps memory of one piece, as [`map_single_with`](Self::map_single_with) does by default.
    ///
    /// # Errors
    ///
    /// [`Refused`], with nothing changed.
    #[inline]
    #[track_caller]
    pub fn map_single(
        &self,
        memory: T::Memory,
        direction: Direction,
    ) -> Result<Mapping<T, B>, Refused<T::Memory>> {
        T::Reach::<B>::map(self, memory, direction)
    }

    /// Maps memory of one piece: translated, by its own address, or bounced, as the device needs
    /// it. A slot is filled from the memory whatever the direction, so that what the device does
    /// not write is as it was, unless the attributes say that it
    /// [overwrites](Fill::Overwritten) all that it reports.
    ///
    /// # Errors
    ///
    /// [`Refused`], with nothing changed: [`Error::Overwrites`] for a device that overwrites and
    /// reads; [`Error::NotSingle`]; [`Error::Unreachable`],
    /// [`Error::NoSlot`] and [`Error::NotMemory`] where the device cannot have the memory itself
    /// and it cannot be bounced; [`Error::Iova`] and [`Error::Domain`] where there are no IOVAs or
    /// tables; [`Error::Quarantined`] with the memory, and slots for ever, gone.
    ///
    /// # Context
    ///
    /// Takes no lock and allocates nothing itself; the pool, the IOVAs and the tables may.
    #[inline]
    #[track_caller]
    pub fn map_single_with(
        &self,
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
    ) -> Result<Mapping<T, B>, Refused<T::Memory>> {
        T::Reach::<B>::map_with(self, memory, direction, attrs)
    }

    /// Maps memory for a caller by the device's translation, whatever is known of its type.
    #[inline(always)]
    #[track_caller]
    pub(super) fn map_by<D>(
        &self,
        translation: &D,
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
        place: Place,
    ) -> Result<Mapping<T, B>, Refused<T::Memory>>
    where
        D: Sealed<Memory = T::Memory>,
    {
        if attrs.fill == Fill::Overwritten && direction != Direction::FromDevice {
            return refuse(Error::Overwrites { direction }, memory);
        }
        let &[piece] = memory.pieces() else {
            let pieces = memory.pieces().len();
            return refuse(Error::NotSingle { pieces }, memory);
        };
        match self.way_by(translation, piece) {
            Ok(Way::Translated) => {}
            Ok(Way::Straight) => {
                self.give_caches(piece, attrs.sync);
                let addr = DmaAddr::new(piece.span.paddr().get());
                return Ok(self.straight(piece, (addr, None), memory, direction, attrs));
            }
            Ok(Way::Bounced) => return self.map_bounced(piece, memory, direction, attrs, place),
            Err(error) => return refuse(error, memory),
        }
        self.give_caches(piece, attrs.sync);
        let prot = self.prot(piece.via, direction, attrs.privilege);
        // Where a hook panics, a device may use it by then.
        let memory = ManuallyDrop::new(memory);
        let placed = translation.place(Promise::kept(), &self.config, piece.span, prot, place);
        let memory = ManuallyDrop::into_inner(memory);
        let (iovas, addr) = match placed {
            Ok(placed) => placed,
            Err(failed) => return self.not_placed(failed, memory),
        };
        Ok(Mapping {
            addr,
            len: piece.span.len(),
            direction,
            flush: self.flush_by(translation, attrs.flush),
            sync: attrs.sync,
            fill: attrs.fill,
            device: self.id(),
            slots: None,
            iovas: Some(iovas),
            memory: Some(memory),
        })
    }

    #[cold]
    #[track_caller]
    fn not_placed(
        &self,
        PlaceFailed { error, iovas }: PlaceFailed,
        memory: T::Memory,
    ) -> Result<Mapping<T, B>, Refused<T::Memory>> {
        match iovas {
            Some(iovas) => Err(take_back(&*self.translation, iovas, memory, error)),
            None => refuse(error, memory),
        }
    }

    /// Ends a mapping. What was bounced is copied back when no device can change it any more.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another device, and [`Error::Unreported`] for one that
    /// the device overwrites, which [`unmap_written`](Self::unmap_written) ends: both are given
    /// back by [`UnmapFailed`]. [`Error::Quarantined`] where hardware does not answer: the memory
    /// is held until a [flush](super::DmaDomain::flush) succeeds, and slots for ever.
    ///
    /// # Context
    ///
    /// As [`map_single_with`](Self::map_single_with); and it never fails for want of memory.
    #[inline]
    #[track_caller]
    pub fn unmap(
        &self,
        mut mapping: Mapping<T, B>,
    ) -> Result<Unmapped<T::Memory>, UnmapFailed<T, B>> {
        // One branch for both.
        if (mapping.device != self.id()) | (mapping.fill == Fill::Overwritten) {
            return self.keep_mapped(mapping);
        }
        // By reference: what is moved into a function is copied.
        let written = mapping.len;
        let ended = T::Reach::<B>::end(self, &mut mapping, written);
        // Nothing is left in it.
        mem::forget(mapping);
        ended
    }

    /// Ends a mapping of which the device has written the first `written` bytes: if they were
    /// bounced, those are copied back and no others.
    ///
    /// That is how a mapping ends which the device [overwrites](Fill::Overwritten), and any other
    /// may. Where a driver [syncs](CpuSync::Skip) the buffer itself, nothing is copied.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::dma::{Attrs, Device, DeviceConfig, Direct, Error, NoPool, Piece, RawMemory};
    /// use dmaspan::swiotlb::Fill;
    /// use dmaspan::platform::OneThread;
    /// use dmaspan::{Direction, PhysAddr, Span};
    ///
    /// fn main() -> Result<(), Error> {
    ///     let ram = Span::new(PhysAddr::new(0), 1 << 30).unwrap();
    ///     let direct = Arc::new(Direct::<RawMemory, _>::new(ram, OneThread));
    ///     let device = Device::new(direct, NoPool, DeviceConfig::bits(32))?;
    ///     let piece = Piece::memory(Span::new(PhysAddr::new(0x1000), 0x100).unwrap());
    ///     // SAFETY: nobody touches the memory.
    ///     let memory = unsafe { RawMemory::new(piece) };
    ///     let attrs = Attrs { fill: Fill::Overwritten, ..Attrs::default() };
    ///     let mapping = device.map_single_with(memory, Direction::FromDevice, attrs)?;
    ///     // Bounced or not, its end takes a report of the device.
    ///     let refused = device.unmap(mapping).unwrap_err();
    ///     assert_eq!(refused.error, Error::Unreported { len: 0x100 });
    ///     let mapping = refused.mapping.expect("nothing was changed");
    ///     let _unmapped = device.unmap_written(mapping, 60)?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// As of [`unmap`](Self::unmap), but for [`Error::Unreported`]; with the mapping given back
    /// also [`Error::OutsideMapping`] where it has not so many bytes, and
    /// [`Error::OtherDirection`] where the device only reads and some were written.
    ///
    /// # Context
    ///
    /// As [`unmap`](Self::unmap).
    #[track_caller]
    pub fn unmap_written(
        &self,
        mut mapping: Mapping<T, B>,
        written: u64,
    ) -> Result<Unmapped<T::Memory>, UnmapFailed<T, B>> {
        let Mapping { addr, len, direction, .. } = mapping;
        if mapping.device != self.id() {
            return self.keep_mapped(mapping);
        }
        match check_written(addr, len, direction, written) {
            Ok(()) => {
                let ended = T::Reach::<B>::end(self, &mut mapping, written);
                mem::forget(mapping);
                ended
            }
            Err(error) => Err(UnmapFailed { error, mapping: Some(mapping) }),
        }
    }

    /// Gives back a mapping that cannot be ended so.
    #[cold]
    fn keep_mapped<R>(&self, mapping: Mapping<T, B>) -> Result<R, UnmapFailed<T, B>> {
        let error = if mapping.device == self.id() {
            Error::Unreported { len: mapping.len }
        } else {
            Error::Foreign { addr: mapping.addr }
        };
        Err(UnmapFailed { error, mapping: Some(mapping) })
    }

    /// Ends a mapping of this device, of which the CPU is to see so many bytes, for a caller, and
    /// takes all out of it: by the device's translation, whatever is known of its type.
    #[inline(always)]
    #[track_caller]
    pub(super) fn end_by<D>(
        &self,
        translation: &D,
        mapping: &mut Mapping<T, B>,
        written: u64,
        place: Place,
    ) -> Result<Unmapped<T::Memory>, UnmapFailed<T, B>>
    where
        D: Sealed<Memory = T::Memory>,
    {
        // Every mapping has it until here.
        let Some(memory) = mapping.memory.take() else { return Ok(Unmapped::Queued) };
        if translation.direct_memory().is_some() {
            // There are no IOVAs; so there is no code for any.
            self.finish(mapping, &memory, written);
            return Ok(Unmapped::Released(memory));
        }
        let Some(iovas) = mapping.iovas.take() else {
            self.finish(mapping, &memory, written);
            return Ok(Unmapped::Released(memory));
        };
        let by = self.caller_at(place);
        // Where an observer or a hook panics, a device may still use it.
        let memory = ManuallyDrop::new(memory);
        translation.observe(&Event::Unmapping { range: iovas.range(), by });
        if mapping.flush == Flush::Lazy {
            // The memory is the queue's after the unmap.
            self.finish(mapping, &memory, written);
        }
        let memory = ManuallyDrop::into_inner(memory);
        match translation.unmap(Promise::kept(), iovas, memory, mapping.flush) {
            Ok(Unmapped::Released(memory)) => {
                if mapping.flush == Flush::Strict {
                    self.finish(mapping, &memory, written);
                }
                Ok(Unmapped::Released(memory))
            }
            Ok(Unmapped::Queued) => Ok(Unmapped::Queued),
            Err(error) => {
                if let Some(slots) = mapping.slots.take() {
                    self.quarantine(slots);
                }
                Err(UnmapFailed::of_none(error))
            }
        }
    }

    /// Maps memory by way of slots.
    #[cold]
    #[track_caller]
    fn map_bounced(
        &self,
        piece: Piece,
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
        place: Place,
    ) -> Result<Mapping<T, B>, Refused<T::Memory>> {
        let slots = match self.bounce(piece.span, self.config.limits.keep_bits, attrs.fill) {
            Ok(slots) => slots,
            Err(error) => return refuse(error, memory),
        };
        self.give_piece(piece, Some(&slots), attrs.sync);
        if self.is_direct() {
            let addr = DmaAddr::new(self.lies(piece.span, Some(&slots)).paddr().get());
            return Ok(self.straight(piece, (addr, Some(slots)), memory, direction, attrs));
        }
        match self.place_bounced((piece, &slots), memory, direction, attrs, place) {
            Ok((addr, iovas, memory)) => Ok(Mapping {
                addr,
                len: piece.span.len(),
                direction,
                flush: Flush::Strict,
                sync: attrs.sync,
                fill: attrs.fill,
                device: self.id(),
                slots: Some(slots),
                iovas: Some(iovas),
                memory: Some(memory),
            }),
            Err(refused) => {
                self.withdraw(slots, refused.memory.as_ref());
                Err(refused)
            }
        }
    }

    /// Maps slots, and the part of the piece that lies between them.
    #[track_caller]
    fn place_bounced(
        &self,
        (piece, slots): (Piece, &Slots<B::Slot>),
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
        place: Place,
    ) -> Result<(DmaAddr, Iovas, T::Memory), Refused<T::Memory>> {
        let (whole, offset) = match self.granules(self.lies(piece.span, Some(slots))) {
            Ok(granules) => granules,
            Err(error) => return refuse(error, memory),
        };
        let limit = Iova::new(self.config.limits.last);
        let request = Request { bytes: whole.len(), align: Align::Natural, limit };
        let iovas = match self.translation.alloc(request) {
            Ok(iovas) => iovas,
            Err(error) => return refuse(error, memory),
        };
        let prot = self.prot(piece.via, direction, attrs.privilege);
        let by = self.caller_at(place);
        let (iovas, memory) = map_into(&*self.translation, iovas, memory, by, |_, _, range| {
            self.observe_bytes(range.start().wrapping_add(offset), piece.span.len());
            let mut room = SpanBuf::room::<STRETCHES>();
            let wholes = self.wholes(piece.span, Some(slots), &mut room)?;
            self.translation.map(Promise::kept(), range.start(), wholes, prot)
        })?;
        Ok((DmaAddr::new(iovas.range().start().get() + offset), iovas, memory))
    }

    /// What is used by its own address or by that of its slot.
    #[inline(always)]
    fn straight(
        &self,
        piece: Piece,
        (addr, slots): (DmaAddr, Option<Slots<B::Slot>>),
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
    ) -> Mapping<T, B> {
        Mapping {
            addr,
            len: piece.span.len(),
            direction,
            flush: Flush::Strict,
            sync: attrs.sync,
            fill: attrs.fill,
            device: self.id(),
            slots,
            iovas: None,
            memory: Some(memory),
        }
    }

    /// Lets the CPU see what the device wrote, and gives slots back, when no device uses the
    /// mapping any more.
    #[inline(always)]
    fn finish(&self, mapping: &mut Mapping<T, B>, memory: &T::Memory, written: u64) {
        if self.config.coherency == Coherency::NonCoherent || mapping.slots.is_some() {
            self.finish_slowly(mapping, memory, written);
        }
    }

    #[cold]
    fn finish_slowly(&self, mapping: &mut Mapping<T, B>, memory: &T::Memory, written: u64) {
        if mapping.sync == CpuSync::Sync
            && let &[piece] = memory.pieces()
        {
            self.part_for_cpu(piece, mapping.slots.as_ref(), mapping.direction, 0, written);
        }
        if let Some(slots) = mapping.slots.take() {
            self.release(slots);
        }
    }

    /// The granules around a span, and where it begins in them.
    #[inline(always)]
    pub(super) fn granules(&self, span: Span) -> Result<(Span, u64), Error> {
        granules(self.translation.granule_lg2(), span)
    }

    /// What the device is permitted.
    #[inline(always)]
    pub(super) fn prot(&self, via: Via, direction: Direction, privilege: Privilege) -> Prot {
        let mut prot = direction.prot(self.config.coherency);
        if via == Via::HostBridge {
            prot |= Prot::MMIO;
        }
        if privilege == Privilege::Privileged {
            prot |= Prot::PRIV;
        }
        prot
    }
}

/// The granules around a span, and where it begins in them.
#[inline(always)]
pub(super) fn granules(granule_lg2: u32, span: Span) -> Result<(Span, u64), Error> {
    let offset = span.paddr().get() & lg2::mask(granule_lg2);
    let start = PhysAddr::new(span.paddr().get() - offset);
    let bytes = lg2::align_up(offset.saturating_add(span.len()), granule_lg2);
    let whole = Span::new(start, bytes.unwrap_or(u64::MAX)).map_err(iova::Error::from)?;
    Ok((whole, offset))
}

/// Whether a device can have written so many of `len` bytes.
pub(super) fn check_written(
    addr: DmaAddr,
    len: u64,
    direction: Direction,
    written: u64,
) -> Result<(), Error> {
    if written > len {
        return Err(Error::OutsideMapping { offset: 0, len: written, mapped: len });
    }
    if written != 0 && direction == Direction::ToDevice {
        let mapped = direction;
        return Err(Error::OtherDirection { addr, direction: Direction::FromDevice, mapped });
    }
    Ok(())
}

#[cold]
fn refuse<M, H>(error: Error, memory: H) -> Result<M, Refused<H>> {
    Err(Refused { error, memory: Some(memory) })
}

/// An unmap that was refused or could not be synced.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct UnmapFailed<T: Translation = AnyTranslation, B: BouncePool = <T as Sealed>::Pool> {
    /// The reason.
    pub error: Error,
    /// The mapping, where nothing was changed. `None` where it is in quarantine, memory and all,
    /// until a [flush](super::DmaDomain::flush) succeeds.
    pub mapping: Option<Mapping<T, B>>,
}

impl<T: Translation, B: BouncePool> UnmapFailed<T, B> {
    /// One with no mapping, made where nobody's way is longer for it.
    #[cold]
    fn of_none(error: Error) -> Self {
        Self { error, mapping: None }
    }
}

impl<T: Translation, B: BouncePool> From<UnmapFailed<T, B>> for Error {
    /// The reason alone. A mapping that was given back is dropped, and so it leaks: the device goes
    /// on using its memory, which is never freed.
    #[cold]
    fn from(failed: UnmapFailed<T, B>) -> Self {
        failed.error
    }
}

impl<T: Translation, B: BouncePool> fmt::Debug for Mapping<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("addr", &self.addr)
            .field("len", &self.len)
            .field("direction", &self.direction)
            .finish_non_exhaustive()
    }
}

// Of any memory: a boxed trait has no `Debug`, and whoever unwraps wants the error.
impl<H> fmt::Debug for Refused<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = if self.memory.is_some() { "given back" } else { "in quarantine" };
        f.debug_struct("Refused").field("error", &self.error).field("memory", &memory).finish()
    }
}

impl<T: Translation, B: BouncePool> fmt::Debug for UnmapFailed<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnmapFailed")
            .field("error", &self.error)
            .field("mapping", &self.mapping)
            .finish()
    }
}
