//! Unmapping: this decides which mappings go, by the rules of the version, and what the caller is
//! told. [`takedown`](super::takedown) does the work.

use alloc::boxed::Box;
use alloc::sync::Arc;

use lock_api::RawMutex;

use super::domains::Domains;
use super::error::Error;
use super::mapping::{Mapping, MappingSlot, SlotState, Then, Vaddr, overlapping};
use super::takedown::Unmap;
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
pub(super) struct PendingUnmap {
    /// The number of the unmap, by which it knows its mappings: others may be mapped and doomed in
    /// the range meanwhile.
    unmap: u64,
    domains: Arc<Domains>,
    /// Whether anything waits for hardware.
    waits: bool,
}

impl<P: Pinner> State<P> {
    /// Makes all mappings that begin in `range` the caller's own, to work on without the lock.
    pub(super) fn doom(&mut self, range: IovaRange) -> PendingUnmap {
        self.working += 1;
        self.unmaps += 1;
        let unmap = self.unmaps;
        for (_, slot) in self.tree.range_mut(range.start()..=range.last()) {
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
            slot.doom(unmap);
            self.invalid -= usize::from(slot.vaddr == Vaddr::Invalid);
            slot.vaddr = Vaddr::Known;
        }
        let waits = !self.quarantine.is_empty();
        PendingUnmap { unmap, domains: Arc::clone(&self.domains), waits }
    }

    /// The next mapping of a range that the unmap with this number doomed.
    fn take_doomed(&mut self, range: IovaRange, unmap: u64) -> Option<Box<Mapping<P>>> {
        for (_, slot) in self.tree.range_mut(range.start()..=range.last()) {
            match core::mem::replace(&mut slot.state, SlotState::Busy) {
                SlotState::Doomed(mapping, by) if by == unmap => return Some(mapping),
                other => slot.state = other,
            }
        }
        None
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
        let doomed = self.announcing(range, || self.doom_range(&mut self.state.lock(), range))?;
        // No closure, which would be the caller.
        match doomed {
            Some(doomed) => self.unmap_doomed(doomed, range, None),
            None => Ok(0),
        }
    }

    /// Makes what an unmap of `range` takes down the caller's.
    pub(super) fn doom_range(
        &self,
        all: &mut State<P>,
        range: IovaRange,
    ) -> Result<Option<PendingUnmap>, Error<P::Error>> {
        match self.check_unmap(all, range)? {
            UnmapScope::Nothing => Ok(None),
            UnmapScope::Mappings => self.try_doom(all, range).map(Some),
        }
    }

    /// What an unmap of `range` is about.
    pub(super) fn check_unmap(
        &self,
        all: &State<P>,
        range: IovaRange,
    ) -> Result<UnmapScope, Error<P::Error>> {
        let granule = self.granule(&all.domains);
        let ends = range.start().get() | range.last().get().wrapping_add(1);
        if ends & granule.wrapping_sub(1) != 0 {
            return Err(Error::MisalignedUnmap { range, granule });
        }
        let in_use = |slot: &MappingSlot<P>| !matches!(slot.state, SlotState::Quarantined(_));
        let first = overlapping(&all.tree, range).find(|(_, slot)| in_use(slot));
        let inside = first.is_some_and(|(mapped, _)| mapped.start() < range.start());
        let nothing = inside && self.version == Version::V1;
        Ok(if nothing { UnmapScope::Nothing } else { UnmapScope::Mappings })
    }

    /// Unmaps everything and returns its bytes. Where it succeeds nothing of the container's is
    /// mapped, pinned for domains, or charged for that.
    ///
    /// # Errors
    ///
    /// As for [`unmap`](Self::unmap).
    #[track_caller]
    pub fn unmap_all(&self) -> Result<u64, Error<P::Error>> {
        let doomed = self
            .announcing(IovaRange::ALL, || self.try_doom(&mut self.state.lock(), IovaRange::ALL))?;
        self.unmap_doomed(doomed, IovaRange::ALL, None)
    }

    /// Makes all mappings in `range` the caller's to take down, or none of them.
    fn try_doom(
        &self,
        all: &mut State<P>,
        range: IovaRange,
    ) -> Result<PendingUnmap, Error<P::Error>> {
        self.check_whole(all, range)?;
        // Last: devices are told only of what will be unmapped.
        for (mapped, slot) in overlapping(&all.tree, range) {
            // Of what is in quarantine nothing is cut.
            let goes = slot.mapped().is_some() || range.covers(mapped);
            if let Some(mapping) = slot.left().filter(|_| goes) {
                all.check_unused(range, mapped, mapping.copies)?;
            }
        }
        Ok(all.doom(range))
    }

    /// Refuses a range that cuts a mapping where it may not, or reaches what others work on.
    pub(super) fn check_whole(
        &self,
        all: &State<P>,
        range: IovaRange,
    ) -> Result<(), Error<P::Error>> {
        for (mapped, slot) in overlapping(&all.tree, range) {
            match slot.state {
                // Unmapped already, as far as it can be.
                SlotState::Quarantined(_) => {}
                _ if self.version == Version::V2 && !range.covers(mapped) => {
                    return Err(Error::Bisects { range, mapping: mapped });
                }
                SlotState::Mapped(_) => {}
                SlotState::Busy | SlotState::Emptied | SlotState::Doomed(..) => {
                    return Err(Error::Busy { range, busy: mapped });
                }
            }
        }
        all.check_open()
    }

    /// Takes down what was doomed, and marks what was written of it in `marks`.
    #[track_caller]
    pub(super) fn unmap_doomed(
        &self,
        doomed: PendingUnmap,
        range: IovaRange,
        mut marks: Option<&mut DirtyBitmap<'_>>,
    ) -> Result<u64, Error<P::Error>> {
        let PendingUnmap { unmap, domains, waits } = doomed;
        let mut unmapped = 0u64;
        if waits || domains.oldest().is_some() {
            if let Some(marks) = &mut marks {
                // It may be gone soon, and was written until then.
                self.state.lock().mark_quarantined(range, marks);
            }
            unmapped = self.retry(&domains, range);
        }
        let mut rest = Some(range);
        let outcome = Unmap::new(self, &domains, Then::Go).run(
            &mut |all| {
                let mapping = all.take_doomed(rest?, unmap)?;
                let behind = mapping.range.last().checked_add(1);
                rest = behind.and_then(|at| IovaRange::new(at, range.last()));
                Some(mapping)
            },
            marks,
        );
        unmapped = unmapped.wrapping_add(outcome.unmapped);
        if waits {
            // What was in quarantine with a part that was mapped.
            unmapped = unmapped.wrapping_add(self.settle(&domains, range));
        }
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
