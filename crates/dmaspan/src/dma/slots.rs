//! This divides a piece into stretches that are bounced and stretches that are mapped straight, and
//! finds their bytes.
//!
//! A device that may see nothing but its buffers shares no granule with other memory: only the
//! granules at the ends of a piece are bounced, each in a granule of its own, and those between
//! them are mapped straight. A piece without such granules, and one that a device cannot or must
//! not have at all, is bounced whole. All other code asks for the [stretches](Device::stretches) of
//! a piece.

use alloc::vec::Vec;

use super::attrs::CpuSync;
use super::bounce::BouncePool;
use super::device::{Device, DeviceLimits, Policy, Trust};
use super::domain::Translation;
use super::error::Error;
use super::memory::Piece;
use super::way::Way;
use crate::lg2;
use crate::span::Span;
use crate::swiotlb::{Fill, Original, SlotRequest, To};

/// The slots of a piece that is bounced.
#[derive(Debug)]
pub(super) enum Slots<S> {
    /// One for its first bytes, or for all of them.
    Head(S),
    /// One for its last bytes.
    Tail(S),
    /// One for either.
    Both(S, S),
}

impl<S> Slots<S> {
    /// That of the first bytes, and that of the last.
    fn ends(&self) -> (Option<&S>, Option<&S>) {
        match self {
            Self::Head(head) => (Some(head), None),
            Self::Tail(tail) => (None, Some(tail)),
            Self::Both(head, tail) => (Some(head), Some(tail)),
        }
    }

    fn into_ends(self) -> [Option<S>; 2] {
        match self {
            Self::Head(slot) | Self::Tail(slot) => [Some(slot), None],
            Self::Both(head, tail) => [Some(head), Some(tail)],
        }
    }
}

/// Bytes of a piece that follow each other for the device and for the CPU.
pub(super) struct Stretch<'a, S> {
    /// Where the device finds them.
    pub(super) span: Span,
    /// The slot that they are in, and where; `None` where they are the memory itself.
    pub(super) slot: Option<(&'a S, u64)>,
}

/// The most stretches of a piece: a head, a middle and a tail.
pub(super) const STRETCHES: usize = 3;

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// What slots have to be like that keep these bits of addresses.
    pub(super) fn slot_request(&self, keep_bits: u64) -> SlotRequest {
        let DeviceLimits { last, boundary, .. } = self.config.limits;
        let is_direct = self.is_direct();
        SlotRequest {
            keep_bits,
            granule: lg2::size(self.translation.granule_lg2()),
            last: if is_direct { last } else { u64::MAX },
            boundary: boundary.filter(|_| is_direct),
        }
    }

    /// Slots for the part of a piece that the device must not or cannot have itself, filled where
    /// `fill` or the device's trust says so. A slot for all of it keeps `keep_bits`, those of ends
    /// all bits below the granule.
    #[cold]
    pub(super) fn bounce(
        &self,
        span: Span,
        keep_bits: u64,
        fill: Fill,
    ) -> Result<Slots<B::Slot>, Error> {
        let request = self.slot_request(keep_bits);
        let mask = lg2::mask(self.translation.granule_lg2());
        let of_ends = SlotRequest { keep_bits: mask, ..request };
        match self.shared(span) {
            (Some(head), None) => self.take_slot(head, &of_ends, fill).map(Slots::Head),
            (None, Some(tail)) => self.take_slot(tail, &of_ends, fill).map(Slots::Tail),
            (Some(head), Some(tail)) => {
                let head = self.take_slot(head, &of_ends, fill)?;
                match self.take_slot(tail, &of_ends, fill) {
                    Ok(tail) => Ok(Slots::Both(head, tail)),
                    Err(error) => {
                        self.pool.release(head);
                        Err(error)
                    }
                }
            }
            (None, None) => self.take_slot(span, &request, fill).map(Slots::Head),
        }
    }

    /// Slots for all pieces that are bounced, where each is bounced whole: by as few locks of the
    /// pool as it can. Whether there are all of them, or the pieces have to be looked at one by
    /// one: so they are also where one is alone, or is refused, or has no slot.
    #[cold]
    pub(super) fn bounce_whole(
        &self,
        pieces: &[Piece],
        slots: &mut Vec<Slots<B::Slot>>,
        fill: Fill,
    ) -> bool {
        let ways = || pieces.iter().map(|&piece| (piece.span, self.way(piece)));
        let bounced = || ways().filter(|(_, way)| *way == Ok(Way::Bounced)).map(|(span, _)| span);
        let is_refused = self.policy == Policy::Granules || ways().any(|(_, way)| way.is_err());
        let count = if is_refused { 0 } else { bounced().count() };
        let mut taken = Vec::new();
        // `DmaMemory` promised them, as for one.
        let originals = bounced().map(Original::promised);
        let request = self.slot_request(self.config.limits.keep_bits);
        if count < 2
            || slots.try_reserve(count).is_err()
            || !self.pool.take_all(originals, &request, &mut taken)
        {
            return false;
        }
        if taken.len() != count {
            // A piece without a slot would be the device's itself.
            taken.into_iter().for_each(|slot| self.pool.release(slot));
            return false;
        }
        for (slot, span) in taken.into_iter().zip(bounced()) {
            if self.fills(fill) {
                self.pool.copy(&slot, 0, span.len(), To::Slot);
            }
            slots.push(Slots::Head(slot));
        }
        true
    }

    /// The first and the last bytes, in granules that they may share with others, of a piece that
    /// has whole granules between them; none where it is bounced whole.
    fn shared(&self, span: Span) -> (Option<Span>, Option<Span>) {
        let mask = lg2::mask(self.translation.granule_lg2());
        let head = span.paddr().get().wrapping_neg() & mask;
        let tail = span.last().wrapping_add(1).get() & mask;
        if self.policy != Policy::Granules || head + tail >= span.len() {
            return (None, None);
        }
        let behind = span.paddr().wrapping_add(span.len() - tail);
        // No bytes are no span.
        (Span::new(span.paddr(), head).ok(), Span::new(behind, tail).ok())
    }

    fn take_slot(&self, span: Span, request: &SlotRequest, fill: Fill) -> Result<B::Slot, Error> {
        // `DmaMemory` promised it, and a mapping keeps it until the slot is released.
        let taken = self.pool.take(Original::promised(span), request);
        let slot = taken.ok_or_else(|| self.no_slot(span))?;
        if self.fills(fill) {
            self.pool.copy(&slot, 0, span.len(), To::Slot);
        }
        Ok(slot)
    }

    /// Whether slots are filled where `fill` is asked for. What an untrusted device says that it
    /// wrote may be more than it did: the rest is then what the buffer had, and not what a former
    /// holder of the slot left there.
    fn fills(&self, fill: Fill) -> bool {
        fill == Fill::Copy || self.config.trust == Trust::Untrusted
    }

    /// Why there is no slot.
    #[cold]
    fn no_slot(&self, span: Span) -> Error {
        let last = self.config.limits.last;
        let is_beyond = self.pool.reach().is_none_or(|slots| slots.paddr().get() > last);
        match self.is_direct() && is_beyond {
            true => Error::Unreachable { span, last },
            false => Error::NoSlot { span, len: span.len() },
        }
    }

    /// Gives slots back that no device uses.
    #[cold]
    pub(super) fn release(&self, slots: Slots<B::Slot>) {
        slots.into_ends().into_iter().flatten().for_each(|slot| self.pool.release(slot));
    }

    /// Keeps slots that hardware may still use from ever being used again.
    #[cold]
    pub(super) fn quarantine(&self, slots: Slots<B::Slot>) {
        slots.into_ends().into_iter().flatten().for_each(|slot| self.pool.quarantine(slot));
    }

    /// Ends slots of a mapping that was refused: `memory` is what was given back of it.
    #[cold]
    pub(super) fn withdraw(&self, slots: Slots<B::Slot>, memory: Option<&T::Memory>) {
        match memory {
            Some(_) => self.release(slots),
            None => self.quarantine(slots),
        }
    }

    /// Where a piece lies for the device, but for the whole granules of it: its slot is as long,
    /// where it is bounced whole; those of its ends lie in granules as it does.
    #[inline(always)]
    pub(super) fn lies(&self, span: Span, slots: Option<&Slots<B::Slot>>) -> Span {
        match slots {
            Some(Slots::Head(slot)) if self.pool.span(slot).len() == span.len() => {
                self.pool.span(slot)
            }
            _ => span,
        }
    }

    /// The stretches of `len` bytes at `offset` of a piece, which are within it.
    pub(super) fn stretches<'a>(
        &'a self,
        span: Span,
        slots: Option<&'a Slots<B::Slot>>,
        offset: u64,
        len: u64,
    ) -> impl Iterator<Item = Stretch<'a, B::Slot>> {
        let (head, tail) = slots.map_or((None, None), Slots::ends);
        let bytes = |slot: Option<&B::Slot>| slot.map_or(0, |slot| self.pool.span(slot).len());
        let (middle, behind) = (bytes(head), span.len() - bytes(tail));
        let parts = [(head, 0, middle), (None, middle, behind), (tail, behind, span.len())];
        let end = offset.saturating_add(len);
        parts.into_iter().filter_map(move |(slot, from, to)| {
            let first = offset.max(from);
            let len = end.min(to).checked_sub(first)?;
            let start = match slot {
                Some(slot) => self.pool.span(slot).paddr().wrapping_add(first - from),
                None => span.paddr().wrapping_add(first),
            };
            // No bytes are no span.
            let span = Span::new(start, len).ok()?;
            Some(Stretch { span, slot: slot.map(|slot| (slot, first - from)) })
        })
    }

    /// The granules of a piece, or of what stands in for it, in `room`.
    #[inline(always)]
    pub(super) fn wholes<'r>(
        &self,
        span: Span,
        slots: Option<&Slots<B::Slot>>,
        room: &'r mut [Span; STRETCHES],
    ) -> Result<&'r [Span], Error> {
        let mut count = 0;
        for (whole, stretch) in room.iter_mut().zip(self.stretches(span, slots, 0, span.len())) {
            *whole = self.granules(stretch.span)?.0;
            count += 1;
        }
        Ok(&room[..count])
    }

    /// Writes caches back of a piece before a device gets it: of slots always and with their
    /// padding, since their content is what the device is to read.
    #[cold]
    pub(super) fn give_piece(&self, piece: Piece, slots: Option<&Slots<B::Slot>>, sync: CpuSync) {
        for stretch in self.stretches(piece.span, slots, 0, piece.span.len()) {
            let padded = self.granules(stretch.span).map_or(stretch.span, |(whole, _)| whole);
            let (span, sync) = match stretch.slot {
                Some(_) => (padded, CpuSync::Sync),
                None => (stretch.span, sync),
            };
            self.give_caches(Piece { span, ..piece }, sync);
        }
    }
}
