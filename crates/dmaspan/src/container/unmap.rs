//! Unmapping: one walk that yields spans, one sync for each batch, and unpinning behind it.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::iter;

use lock_api::RawMutex;

use super::domains::Domains;
use super::error::Error;
use super::mapping::{Behind, Leaving, Mapping, SlotState, Vaddr, overlapping};
use super::paging::{Reach, Taken};
use super::{ALL, Container, RANGES, State, Version};
use crate::addr::Iova;
use crate::io_pgtable::DirtyBitmap;
use crate::iommu::HardwareError;
use crate::pin::{Dirty, Pinner};
use crate::range::IovaRange;
use crate::span::{Span, SpanBuf};

/// Places for ranges, whose content does not matter.
const NO_RANGES: [IovaRange; RANGES] = [IovaRange::point(Iova::new(0)); RANGES];

/// Whether a range reaches what is to be unmapped, by the rules of the container's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reaches {
    Mappings,
    /// It begins inside a mapping, which with version 1 stays and hides all behind it.
    Nothing,
}

/// What an unmap takes down.
pub(super) struct Doomed {
    /// The number of the unmap, by which it knows its mappings: others may be mapped and doomed in
    /// the range meanwhile.
    unmap: u64,
    domains: Arc<Domains>,
}

impl<P: Pinner> State<P> {
    /// Makes all mappings that begin in `range` the caller's, who works on them without the lock.
    pub(super) fn doom(&mut self, range: IovaRange) -> Doomed {
        self.working += 1;
        self.unmaps += 1;
        let unmap = self.unmaps;
        for (_, slot) in self.tree.range_mut(range.start()..=range.last()) {
            slot.doom(unmap);
            self.invalid -= usize::from(slot.vaddr == Vaddr::Invalid);
            slot.vaddr = Vaddr::Known;
        }
        Doomed { unmap, domains: Arc::clone(&self.domains) }
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
    /// [`Error::NotForgotten`] for the first mapping that hardware may still use; all others in the
    /// range are gone.
    pub fn unmap(&self, range: IovaRange) -> Result<u64, Error<P::Error>> {
        let doomed = self.announcing(range, || self.doom_range(&mut self.state.lock(), range))?;
        doomed.map_or(Ok(0), |doomed| self.unmap_doomed(doomed, range, None))
    }

    /// Makes what an unmap of `range` takes down the caller's.
    pub(super) fn doom_range(
        &self,
        all: &mut State<P>,
        range: IovaRange,
    ) -> Result<Option<Doomed>, Error<P::Error>> {
        match self.check_unmap(all, range)? {
            Reaches::Nothing => Ok(None),
            Reaches::Mappings => self.try_doom(all, range).map(Some),
        }
    }

    /// What an unmap of `range` is about.
    pub(super) fn check_unmap(
        &self,
        all: &State<P>,
        range: IovaRange,
    ) -> Result<Reaches, Error<P::Error>> {
        let granule = self.granule(&all.domains);
        let ends = range.start().get() | range.last().get().wrapping_add(1);
        if ends & granule.wrapping_sub(1) != 0 {
            return Err(Error::MisalignedUnmap { range, granule });
        }
        let first = overlapping(&all.tree, range).next();
        let inside = first.is_some_and(|(mapped, _)| mapped.start() < range.start());
        let nothing = inside && self.version == Version::V1;
        Ok(if nothing { Reaches::Nothing } else { Reaches::Mappings })
    }

    /// Unmaps everything and returns its bytes.
    ///
    /// # Errors
    ///
    /// As for [`unmap`](Self::unmap).
    pub fn unmap_all(&self) -> Result<u64, Error<P::Error>> {
        let doomed = self.announcing(ALL, || self.try_doom(&mut self.state.lock(), ALL))?;
        self.unmap_doomed(doomed, ALL, None)
    }

    /// Makes all mappings in `range` the caller's to take down, or none of them.
    fn try_doom(&self, all: &mut State<P>, range: IovaRange) -> Result<Doomed, Error<P::Error>> {
        self.check_whole(all, range)?;
        // Last: devices are told only of what will be unmapped.
        for (mapped, slot) in overlapping(&all.tree, range) {
            if let Some(mapping) = slot.mapped() {
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
                SlotState::Quarantined => {}
                _ if self.version == Version::V2 && !range.covers(mapped) => {
                    return Err(Error::Bisects { range, mapping: mapped });
                }
                SlotState::Mapped(_) => {}
                SlotState::Busy | SlotState::Doomed(..) => {
                    return Err(Error::Busy { range, busy: mapped });
                }
            }
        }
        if all.exclusive { Err(Error::Changing) } else { Ok(()) }
    }

    /// Takes down what was doomed, and marks what was written of it in `marks`.
    pub(super) fn unmap_doomed(
        &self,
        doomed: Doomed,
        range: IovaRange,
        marks: Option<&mut DirtyBitmap<'_>>,
    ) -> Result<u64, Error<P::Error>> {
        let Doomed { unmap, domains } = doomed;
        let mut rest = Some(range);
        let outcome = self.take_down(&domains, marks, &mut || {
            let mapping = self.take_doomed(rest?, unmap)?;
            self.stop_reading(&mapping);
            let behind = mapping.range.last().checked_add(1);
            rest = behind.and_then(|at| IovaRange::new(at, range.last()));
            Some(mapping)
        });
        drop(domains);
        self.state.lock().working -= 1;
        self.wake();
        outcome.failed.map_or(Ok(outcome.unmapped), Err)
    }

    /// The next mapping of a range that the unmap with this number doomed.
    fn take_doomed(&self, range: IovaRange, unmap: u64) -> Option<Box<Mapping<P>>> {
        let mut all = self.state.lock();
        for (_, slot) in all.tree.range_mut(range.start()..=range.last()) {
            match core::mem::replace(&mut slot.state, SlotState::Busy) {
                SlotState::Doomed(mapping, by) if by == unmap => return Some(mapping),
                other => slot.state = other,
            }
        }
        None
    }

    /// Takes down all mappings that `next` gives, whose slots are the caller's: translations, pins,
    /// charges, and the slots.
    pub(super) fn take_down(
        &self,
        domains: &Domains,
        mut marks: Option<&mut DirtyBitmap<'_>>,
        next: &mut dyn FnMut() -> Option<Box<Mapping<P>>>,
    ) -> TakenDown<P::Error> {
        let by_hardware = domains.track_dirty();
        let mut outcome = TakenDown { unmapped: 0, failed: None };
        let mut queue = Queue::<P>::new();
        let mut room = SpanBuf::room::<BATCH>();
        while queue.fill(next) {
            let mut ranges = NO_RANGES;
            let wanted = wanted(queue.mappings().map(|mapping| &*mapping), &mut ranges, BATCH);
            let exact = marks.as_deref_mut().filter(|_| by_hardware);
            self.take_batch(domains, wanted, queue.mappings(), &mut room, exact);
            while let Some(mut mapping) = queue.pop_done() {
                let range = mapping.range;
                if let Some(marks) = &mut marks {
                    mapping.mark_gone(domains, marks);
                }
                let Err(source) = self.release(&mut mapping) else {
                    let mut all = self.state.lock();
                    self.forget(&mut all, domains, range);
                    let len = range.len_less_one().wrapping_add(1);
                    outcome.unmapped = outcome.unmapped.wrapping_add(len);
                    continue;
                };
                let mut all = self.state.lock();
                all.set_vaddr(range, Vaddr::Known);
                if let Some(slot) = all.tree.get_mut(&range.start()) {
                    slot.state = SlotState::Quarantined;
                }
                drop(all);
                let error = Error::NotForgotten { range, source };
                outcome.failed = outcome.failed.or(Some(error));
            }
        }
        outcome
    }

    /// Takes back what a mapping has mapped and pinned; it stays, without a pin.
    pub(super) fn take_back(
        &self,
        mapping: &mut Box<Mapping<P>>,
        domains: &Domains,
        room: &mut [Span],
    ) -> Reach {
        while !mapping.is_down() {
            let mut ranges = NO_RANGES;
            let wanted = wanted(iter::once(&**mapping), &mut ranges, BATCH);
            self.take_batch(domains, wanted, iter::once(&mut **mapping), room, None);
        }
        // Devices may have written all of it, and nobody asked hardware.
        mapping.mark_dirty(mapping.range);
        let released = self.release(mapping);
        mapping.leaving = Leaving::default();
        if released.is_ok() { Reach::None } else { Reach::Possible }
    }

    /// Unmaps `wanted`, which the mappings have in front, as far as the room reaches, syncs, and
    /// unpins.
    fn take_batch<'m>(
        &self,
        domains: &Domains,
        wanted: &[IovaRange],
        mappings: impl Iterator<Item = &'m mut Mapping<P>>,
        room: &mut [Span],
        marks: Option<&mut DirtyBitmap<'_>>,
    ) where
        P: 'm,
    {
        let mut buf = SpanBuf::new(room);
        let Taken { mut bytes, synced } = domains.unmap(wanted, &mut buf, marks);
        let mut spans = Spans::new(buf.spans());
        for mapping in mappings {
            let dirty = Dirty::after(mapping.prot);
            let (Some(pinned), leaving) = (&mut mapping.pinned, &mut mapping.leaving) else {
                continue;
            };
            while let Some(run) = pinned.runs.rest(leaving.at).next() {
                let taken = match run.behind {
                    Behind::Revoked => run.bytes,
                    Behind::Pinned(_) if bytes == 0 => break,
                    Behind::Pinned(_) => run.bytes.min(bytes),
                };
                if let Behind::Pinned(kind) = run.behind {
                    bytes -= taken;
                    match synced {
                        Ok(()) => spans.next(taken, |spans| {
                            if mapping.unforgotten.is_none() {
                                self.pinner.unpin(&mut pinned.pin, spans, kind, dirty);
                            }
                        }),
                        Err(error) => leaving.failed = Some(error),
                    }
                }
                leaving.pass(run, taken);
            }
        }
    }

    /// Releases the pin and the charge of a mapping that was taken down; leaks them where hardware
    /// may still use the memory.
    fn release(&self, mapping: &mut Mapping<P>) -> Result<(), HardwareError> {
        let Some(pinned) = mapping.pinned.take() else { return Ok(()) };
        match mapping.leaving.failed.or(mapping.unforgotten) {
            None => {
                self.pinner.release(pinned.pin);
                drop(pinned.charge);
                Ok(())
            }
            Some(error) => {
                pinned.leak(&mapping.space);
                Err(error)
            }
        }
    }

    /// Takes a slot out of the tree, and with it the tables that it leaves empty.
    ///
    /// Those at its ends may hold entries of neighbours. The gap between its neighbours, under the
    /// lock and so nobody else's, says which.
    pub(super) fn forget(&self, all: &mut State<P>, domains: &Domains, range: IovaRange) {
        let before = all.tree.range(..range.start()).next_back().map(|(_, slot)| slot.last);
        let start = before.map_or(Some(ALL.start()), |last| last.checked_add(1));
        let behind = range.last().checked_add(1);
        let next = behind.and_then(|at| all.tree.range(at..).next().map(|(&start, _)| start));
        let last = next.map_or(ALL.last(), |start| start.wrapping_add(u64::MAX));
        if let Some(gap) = start.and_then(|start| IovaRange::new(start, last)) {
            domains.reclaim(range, gap);
        }
        all.set_vaddr(range, Vaddr::Known);
        all.tree.remove(&range.start());
    }
}

/// What came of taking mappings down.
pub(super) struct TakenDown<E: core::error::Error> {
    /// Bytes of the mappings that are gone.
    pub(super) unmapped: u64,
    /// The first that is not.
    pub(super) failed: Option<Error<E>>,
}

/// Mappings that are being taken down, in the order of their IOVAs. It allocates nothing.
struct Queue<P: Pinner> {
    places: [Option<Box<Mapping<P>>>; RANGES],
    /// Where the first is; all before are gone.
    first: usize,
    /// How many places are filled, those that are gone included.
    len: usize,
}

impl<P: Pinner> Queue<P> {
    fn new() -> Self {
        Self { places: [const { None }; RANGES], first: 0, len: 0 }
    }

    /// Fills up, and says whether there is anything.
    fn fill(&mut self, next: &mut dyn FnMut() -> Option<Box<Mapping<P>>>) -> bool {
        self.places.rotate_left(self.first);
        self.len -= self.first;
        self.first = 0;
        while self.len < RANGES
            && let Some(mapping) = next()
        {
            self.places[self.len] = Some(mapping);
            self.len += 1;
        }
        self.len > 0
    }

    fn mappings(&mut self) -> impl Iterator<Item = &mut Mapping<P>> {
        self.places[self.first..self.len].iter_mut().flatten().map(|mapping| &mut **mapping)
    }

    /// The first mapping, if nothing of it is mapped any more or hardware does not forget it.
    fn pop_done(&mut self) -> Option<Box<Mapping<P>>> {
        let place = self.places[..self.len].get_mut(self.first)?;
        let mapping = place.take_if(|mapping| mapping.is_down())?;
        self.first += 1;
        Some(mapping)
    }
}

/// What mappings have in front that is mapped: as many ranges as there are places, and of a mapping
/// not more runs than a batch has spans.
fn wanted<'r, 'm, P: Pinner + 'm>(
    mappings: impl Iterator<Item = &'m Mapping<P>>,
    ranges: &'r mut [IovaRange; RANGES],
    max_runs: usize,
) -> &'r [IovaRange] {
    let mut len = 0;
    for mapping in mappings {
        let Some(pinned) = &mapping.pinned else { continue };
        let mut at = mapping.range.start().wrapping_add(mapping.leaving.bytes);
        let mut open = None;
        let mut runs = pinned.runs.rest(mapping.leaving.at);
        for run in runs.by_ref().take(max_runs) {
            let range = IovaRange::from_len(at, run.bytes).ok();
            at = at.wrapping_add(run.bytes);
            let Some(range) = range.filter(|_| run.behind != Behind::Revoked) else {
                open = None;
                continue;
            };
            match open.and_then(|n: usize| Some((n, ranges[n].join(range)?))) {
                Some((n, joined)) => ranges[n] = joined,
                None if len < RANGES => {
                    ranges[len] = range;
                    open = Some(len);
                    len += 1;
                }
                None => return ranges,
            }
        }
        // What follows waits until this mapping is gone: bytes are handed out in order.
        if runs.next().is_some() {
            break;
        }
    }
    &ranges[..len]
}

/// Spans of a batch, handed out by bytes.
pub(super) struct Spans<'s> {
    spans: &'s [Span],
    /// Bytes of the first span that were handed out.
    skip: u64,
}

impl<'s> Spans<'s> {
    pub(super) fn new(spans: &'s [Span]) -> Self {
        Self { spans, skip: 0 }
    }

    /// Hands the next `bytes` out, in as few calls as they allow.
    pub(super) fn next(&mut self, bytes: u64, mut each: impl FnMut(&[Span])) {
        let mut left = bytes;
        while left > 0 {
            let mut whole = 0;
            let mut sum = 0;
            for span in self.spans {
                if self.skip > 0 || sum + span.len() > left {
                    break;
                }
                (whole, sum) = (whole + 1, sum + span.len());
            }
            let (now, rest) = self.spans.split_at(whole);
            if whole > 0 {
                each(now);
                (self.spans, left) = (rest, left - sum);
                continue;
            }
            let Some((span, rest)) = rest.split_first() else { return };
            let Some(piece) = span.skip(self.skip) else { return };
            let len = piece.len().min(left);
            each(&[Span::covering(piece.paddr(), len - 1)]);
            left -= len;
            self.skip += len;
            if self.skip == span.len() {
                (self.spans, self.skip) = (rest, 0);
            }
        }
    }
}
