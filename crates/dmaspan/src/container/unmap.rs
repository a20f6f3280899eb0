//! Unmapping: this decides which mappings go, by the rules of the version, and what the caller is
//! told. [`takedown`](super::takedown) does the work.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::mem;

use lock_api::RawMutex;

use super::domains::Domains;
use super::error::Error;
use super::mapping::{Mapping, SlotState, Then, Vaddr};
use super::takedown::{TakenDown, Unmap};
use super::tree::Place;
use super::{Container, State, Version};
use crate::io_pgtable::DirtyBitmap;
use crate::iommu::HardwareError;
use crate::pin::Pinner;
use crate::range::IovaRange;

/// Whether a range reaches what is to be unmapped, by the rules of the container's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnmapScope {
    Mappings,
    /// It begins inside a mapping, which with version 1 stays and hides all behind it.
    Nothing,
}

/// What an unmap takes down.
pub(super) struct PendingUnmap<P: Pinner> {
    /// The number of the unmap, by which it knows its mappings: others may be mapped and doomed in
    /// the range meanwhile.
    unmap: u64,
    domains: Arc<Domains>,
    /// Whether anything waits for hardware.
    waits: bool,
    /// The first mapping, whose slot is the unmap's.
    first: Option<Box<Mapping<P>>>,
    /// How many more there are, in their slots.
    more: usize,
    /// For how many spans of the only mapping there is room in quarantine already.
    reserved: usize,
}

impl<P: Pinner> PendingUnmap<P> {
    /// Takes the only mapping, if it is [plain](Mapping::is_plain), there is room for all of its
    /// spans, which the only one has alone, and nothing waits for hardware. Without domains nobody
    /// says what hardware has forgotten.
    #[inline(always)]
    fn take_plain(&mut self) -> Option<Box<Mapping<P>>> {
        let Self { domains, waits, first, reserved, .. } = self;
        if *waits || domains.is_empty() || domains.oldest().is_some() {
            return None;
        }
        let has_room = |bytes| domains.spans_at_most(bytes) <= *reserved;
        first.take_if(|mapping| mapping.is_plain() && has_room(mapping.len()))
    }
}

impl<P: Pinner> State<P> {
    /// Makes all mappings that begin in `range` the caller's own, to work on without the lock. They
    /// are at `place` and behind it, and taken down in batches of so many spans.
    #[inline(always)]
    pub(super) fn doom(
        &mut self,
        range: IovaRange,
        mut place: Place,
        batch: usize,
    ) -> PendingUnmap<P> {
        self.working += 1;
        self.unmaps += 1;
        let unmap = self.unmaps;
        let waits = !self.quarantine.is_empty();
        let (mut first, mut more, mut is_last) = (None, 0, false);
        while !is_last {
            let next = self.tree.next(place);
            let Some((start, slot)) = self.tree.at_mut(place) else { break };
            place = next;
            is_last = slot.last >= range.last();
            if !range.contains(start) {
                continue;
            }
            if let SlotState::Quarantined(mapping) = &mut slot.state {
                // Of what is in quarantine nothing is cut, and it hides nothing.
                if !range.covers(mapping.range) {
                    continue;
                }
                // Also what was to stay goes when hardware has forgotten it.
                mapping.leaving.then = Then::Go;
                if !mapping.has_rest() {
                    continue;
                }
                self.quarantine.leave();
            }
            self.invalid -= usize::from(slot.vaddr == Vaddr::Invalid);
            slot.vaddr = Vaddr::Known;
            slot.state = match mem::replace(&mut slot.state, SlotState::Busy) {
                SlotState::Mapped(mapping) | SlotState::Quarantined(mapping) => match first {
                    None => {
                        first = Some(mapping);
                        SlotState::Busy
                    }
                    Some(_) => {
                        more += 1;
                        SlotState::Doomed(mapping, unmap)
                    }
                },
                other => other,
            };
        }
        let mut reserved = 0;
        if let (Some(only), 0) = (&first, more) {
            let wanted = self.domains.spans_at_most(only.bytes_left()).min(batch);
            reserved = self.quarantine.reserve(wanted);
        }
        let domains = Arc::clone(&self.domains);
        PendingUnmap { unmap, domains, waits, first, more, reserved }
    }

    /// The next mapping of a range that the unmap with this number doomed.
    fn take_doomed(&mut self, range: IovaRange, unmap: u64) -> Option<Box<Mapping<P>>> {
        self.tree.visit_mut(range.start(), range.last(), |slot| {
            match mem::replace(&mut slot.state, SlotState::Busy) {
                SlotState::Doomed(mapping, by) if by == unmap => return Some(mapping),
                other => slot.state = other,
            }
            None
        })
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Unmaps all mappings in `range` and returns their bytes.
    ///
    /// With [`Version::V2`] the range may hold any number of mappings and cut none. With
    /// [`Version::V1`] the first mapping that the range reaches may not begin before it, or nothing
    /// is unmapped, and the last may end behind it: then all of it goes.
    ///
    /// # Errors
    ///
    /// [`Error::MisalignedUnmap`], [`Error::Bisects`] and [`Error::Busy`] with nothing changed, and
    /// [`Error::StillPinned`] where emulated devices do not unpin, though they were told ten times.
    /// [`Error::NotForgotten`] where hardware may still use a mapping in the range: its memory
    /// stays pinned and charged and its IOVAs out of use, others in the range are gone. Every later
    /// operation that syncs tries it again; this one succeeds when nothing of the range is left,
    /// and counts what an earlier one could not release where it does so itself. While so much
    /// waits for hardware that there is no room for more, mappings stay mapped.
    #[track_caller]
    pub fn unmap(&self, range: IovaRange) -> Result<u64, Error<P::Error>> {
        let seen = self.seen();
        let doomed = match self.doom_now(range) {
            Ok(doomed) => doomed,
            Err(error) => self.doom_again(seen, error, range)?,
        };
        match doomed {
            Some(doomed) => self.unmap_doomed(doomed, range, None),
            None => Ok(0),
        }
    }

    /// [`doom_range`](Self::doom_range) under the lock.
    #[inline(always)]
    fn doom_now(&self, range: IovaRange) -> Result<Option<PendingUnmap<P>>, Error<P::Error>> {
        self.doom_range(&mut self.state.lock(), range)
    }

    /// [`doom_now`](Self::doom_now) where it failed, which may have been for what others are at.
    #[cold]
    #[inline(never)]
    fn doom_again(
        &self,
        seen: u64,
        error: Error<P::Error>,
        range: IovaRange,
    ) -> Result<Option<PendingUnmap<P>>, Error<P::Error>> {
        let mut again = || self.doom_now(range);
        match self.or_wait(seen, Err(error), &mut again) {
            Err(Error::StillPinned { .. }) => self.announce(range, &mut again),
            doomed => doomed,
        }
    }

    /// Makes what an unmap of `range` takes down the caller's, or nothing.
    #[inline(always)]
    pub(super) fn doom_range(
        &self,
        all: &mut State<P>,
        range: IovaRange,
    ) -> Result<Option<PendingUnmap<P>>, Error<P::Error>> {
        let first = all.tree.reaching(range.start());
        let mut unused = Ok(());
        let scope = self.check_unmap(all, range, first, Some(&mut unused))?;
        // Last: devices are told only of what will be unmapped.
        unused?;
        Ok(match scope {
            UnmapScope::Nothing => None,
            UnmapScope::Mappings => Some(all.doom(range, first, BATCH)),
        })
    }

    /// What an unmap of `range` is about. Refuses a range that cuts a mapping where it may not, or
    /// reaches what others work on. Its first slot is at `first`. Whether emulated devices use what
    /// there is goes to `unused`.
    #[inline(always)]
    pub(super) fn check_unmap(
        &self,
        all: &State<P>,
        range: IovaRange,
        first: Place,
        mut unused: Option<&mut Result<(), Error<P::Error>>>,
    ) -> Result<UnmapScope, Error<P::Error>> {
        let granule = self.granule(&all.domains);
        let ends = range.start().get() | range.last().get().wrapping_add(1);
        if ends & granule.wrapping_sub(1) != 0 {
            return Err(Error::MisalignedUnmap { range, granule });
        }
        for (mapped, slot) in all.tree.overlapping(first, range) {
            match (&slot.state, self.version) {
                // Unmapped already, as far as it can be.
                (SlotState::Quarantined(_), _) => {}
                (_, Version::V1) if mapped.start() < range.start() => {
                    return Ok(UnmapScope::Nothing);
                }
                (_, Version::V2) if !range.covers(mapped) => {
                    return Err(Error::Bisects { range, mapping: mapped });
                }
                (SlotState::Mapped(_), _) => {}
                (SlotState::Busy | SlotState::Emptied | SlotState::Doomed(..), _) => {
                    return Err(Error::Busy { range, busy: mapped });
                }
            }
            if let Some(unused) = &mut unused {
                // Of what is in quarantine nothing is cut.
                let goes = slot.mapped().is_some() || range.covers(mapped);
                if let Some(mapping) = slot.left().filter(|_| goes && unused.is_ok()) {
                    **unused = all.check_unused(range, mapped, mapping.copies);
                }
            }
        }
        all.check_open().map(|()| UnmapScope::Mappings)
    }

    /// Unmaps everything and returns its bytes. Where it succeeds nothing of the container's is
    /// mapped, pinned for domains, or charged for that.
    ///
    /// # Errors
    ///
    /// As for [`unmap`](Self::unmap).
    #[track_caller]
    pub fn unmap_all(&self) -> Result<u64, Error<P::Error>> {
        self.unmap(IovaRange::ALL)
    }

    /// Takes down what was doomed, and marks what was written of it in `marks`.
    #[inline(always)]
    #[track_caller]
    pub(super) fn unmap_doomed(
        &self,
        mut doomed: PendingUnmap<P>,
        range: IovaRange,
        marks: Option<&mut DirtyBitmap<'_>>,
    ) -> Result<u64, Error<P::Error>> {
        if marks.is_some() {
            return self.unmap_batches(doomed, range, marks);
        }
        let Some(plain) = doomed.take_plain() else {
            return self.unmap_batches(doomed, range, None);
        };
        let PendingUnmap { domains, reserved, .. } = doomed;
        match self.take_plain_down(plain, &domains, reserved) {
            Ok(gone) => {
                drop(domains);
                self.wake();
                Ok(gone.len())
            }
            Err(outcome) => self.end_unmap(&outcome, domains, range),
        }
    }

    /// [`unmap_doomed`](Self::unmap_doomed) by batches.
    #[inline(never)]
    #[track_caller]
    fn unmap_batches(
        &self,
        doomed: PendingUnmap<P>,
        range: IovaRange,
        mut marks: Option<&mut DirtyBitmap<'_>>,
    ) -> Result<u64, Error<P::Error>> {
        let PendingUnmap { unmap, domains, waits, first, mut more, reserved } = doomed;
        let mut unmapped = 0u64;
        let mut batches = Unmap::of_unmap(self, &domains, (first, more), reserved);
        if waits || domains.oldest().is_some() {
            if let Some(marks) = &mut marks {
                // It may be gone soon, and was written until then.
                self.state.lock().mark_quarantined(range, marks);
            }
            unmapped = self.retry(&domains, range);
        }
        let mut rest = Some(range);
        let mut outcome = batches.run(
            &mut |all| {
                more = more.checked_sub(1)?;
                let mapping = all.take_doomed(rest?, unmap)?;
                let behind = mapping.range.last().checked_add(1);
                rest = behind.and_then(|at| IovaRange::new(at, range.last()));
                Some(mapping)
            },
            marks,
        );
        drop(batches);
        if waits {
            // What was in quarantine with a part that was mapped.
            unmapped = unmapped.wrapping_add(self.settle(&domains, range));
        }
        outcome.unmapped = outcome.unmapped.wrapping_add(unmapped);
        self.end_unmap(&outcome, domains, range)
    }

    /// Ends the work of an unmap of `range`, and says what came of it.
    #[inline(never)]
    fn end_unmap(
        &self,
        outcome: &TakenDown,
        domains: Arc<Domains>,
        range: IovaRange,
    ) -> Result<u64, Error<P::Error>> {
        let unmapped = outcome.unmapped;
        drop(domains);
        let mut all = self.state.lock();
        all.working -= 1;
        let kept = all.unforgotten(range);
        drop(all);
        self.wake();
        let kept_mapped = outcome.kept.map_or(0, |kept| kept.bytes);
        match kept.or(outcome.kept.filter(|_| outcome.stuck)) {
            None => Ok(unmapped),
            Some(Unforgotten { first, source, bytes }) => {
                let kept = if kept.is_some() { bytes.wrapping_add(kept_mapped) } else { bytes };
                Err(Error::NotForgotten { range: first, source, kept, unmapped })
            }
        }
    }
}

/// What hardware may still use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unforgotten {
    /// The first mapping.
    pub(super) first: IovaRange,
    /// What hardware said.
    pub(super) source: HardwareError,
    /// The bytes of all.
    pub(super) bytes: u64,
}
