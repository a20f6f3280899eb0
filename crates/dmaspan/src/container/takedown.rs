//! Mappings are taken down here a batch at a time: translations, a sync, pins, charges and slots.
//! Unmapping, detaching and the quarantine call it.

use alloc::boxed::Box;
use core::iter;

use lock_api::RawMutex;

use super::domains::{Domains, Gathers};
use super::mapping::{BackingRun, Behind, Leaving, Mapping, MappingSlot, SlotState, Then};
use super::room::{FEW_SPANS, NO_SPAN, Room};
use super::unmap::Unforgotten;
use super::{Container, MAPPINGS, State, unconfirmed};
use crate::addr::Iova;
use crate::io_pgtable::DirtyBitmap;
use crate::iommu::{Event, HardwareError};
use crate::label::{Caller, Label};
use crate::pin::{Dirty, Kind, Pinner, unpin_outputs};
use crate::promise::Promise;
use crate::range::IovaRange;
use crate::span::{Span, SpanBuf};

/// Gives the next mapping to take down, whose slot is the taker's.
pub(super) type NextMapping<'a, P> = &'a mut dyn FnMut(&mut State<P>) -> Option<Box<Mapping<P>>>;

/// Mappings on their way out. It allocates nothing.
pub(super) struct Unmap<'c, P: Pinner, L: RawMutex, const BATCH: usize> {
    container: &'c Container<P, L, BATCH>,
    domains: &'c Domains,
    then: Then,
    by: Caller,
    /// The first of those at work. Each has the next one, in the order of their IOVAs.
    first: Option<Box<Mapping<P>>>,
    /// How many they are.
    len: usize,
    /// How many of them have nothing mapped any more, from the front.
    down: usize,
    /// How many of them observers have heard of, from the front.
    told: usize,
    /// Whether there are no more to claim.
    last: bool,
    /// For how many spans there is room in quarantine.
    reserved: usize,
    outcome: TakenDown,
}

/// What came of taking mappings down.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TakenDown {
    /// Bytes of the mappings that are gone.
    pub(super) unmapped: u64,
    /// Those that are not. The bytes are only of those that stay mapped, as there is no room for
    /// what hardware would have to confirm.
    pub(super) kept: Option<Unforgotten>,
    /// Whether any stays mapped.
    pub(super) stuck: bool,
}

impl<'c, P: Pinner, L: RawMutex, const BATCH: usize> Unmap<'c, P, L, BATCH> {
    /// Nothing yet. `then` is what becomes of the mappings; observers hear the place of this call.
    #[track_caller]
    pub(super) fn new(
        container: &'c Container<P, L, BATCH>,
        domains: &'c Domains,
        then: Then,
    ) -> Self {
        Self {
            container,
            domains,
            then,
            by: Caller { device: None, label: Label::caller() },
            first: None,
            len: 0,
            down: 0,
            told: 0,
            last: false,
            reserved: 0,
            outcome: TakenDown::default(),
        }
    }

    /// Of an unmap: the first mapping is claimed already, `more` are to be, and there is room in
    /// quarantine for so many spans.
    #[track_caller]
    pub(super) fn of_unmap(
        container: &'c Container<P, L, BATCH>,
        domains: &'c Domains,
        (first, more): (Option<Box<Mapping<P>>>, usize),
        reserved: usize,
    ) -> Self {
        let (len, last) = (usize::from(first.is_some()), more == 0);
        Self { first, len, last, reserved, ..Self::new(container, domains, Then::Go) }
    }

    /// Takes all mappings down that `claim` gives, and marks what was written of them in `marks`.
    pub(super) fn run(
        &mut self,
        claim: NextMapping<'_, P>,
        mut marks: Option<&mut DirtyBitmap<'_>>,
    ) -> TakenDown {
        let domains = self.domains;
        domains.gathering(&mut |gathers| {
            // What it costs to clear is paid once for all batches.
            let mut room = Room::<Span, FEW_SPANS, BATCH>::new(0, NO_SPAN);
            while self.next_batch(claim) {
                let mut buf = SpanBuf::new(room.first(self.reserved, NO_SPAN));
                self.gather(gathers, &mut buf, marks.as_deref_mut());
                let walks = self.detach_tables(gathers);
                let synced = gathers.sync();
                self.unpin(buf.spans(), synced, walks, marks.as_deref_mut());
                self.release();
            }
        });
        self.put_back(claim);
        self.outcome
    }

    /// Goes on where so many bytes of the only mapping were taken away, which had these spans.
    #[cold]
    #[inline(never)]
    pub(super) fn go_on(
        mut self,
        taken: u64,
        spans: &[Span],
        synced: Result<(), HardwareError>,
        walks: Option<IovaRange>,
    ) -> TakenDown {
        self.told = self.len;
        if let Some(Mapping { pinned: Some(pinned), leaving, .. }) = self.first.as_deref_mut()
            && let Some(run) = pinned.runs.at(leaving.at)
        {
            leaving.pass(run, taken);
            self.down = usize::from(taken == run.bytes);
        }
        self.unpin(spans, synced, walks, None);
        self.release();
        self.run(&mut |_| None, None)
    }

    /// Claims mappings for the next batch, and room in quarantine for what it takes away. Says
    /// whether there is anything to do, and room to do it.
    fn next_batch(&mut self, claim: NextMapping<'_, P>) -> bool {
        let mut asked = false;
        loop {
            if self.is_done() || self.last && self.reserved > 0 {
                self.tell();
                return self.len > 0;
            }
            let mut all = self.container.state.lock();
            self.claim_more(|| claim(&mut all));
            let wanted = self.spans_at_most();
            if self.reserved < wanted {
                self.reserved += all.quarantine.reserve(wanted - self.reserved);
            }
            drop(all);
            self.tell();
            if self.reserved > 0 || wanted == 0 {
                return self.len > 0;
            }
            if asked {
                return false;
            }
            // What waits for hardware has all room: perhaps it answers again.
            self.container.retry(self.domains, IovaRange::ALL);
            asked = true;
        }
    }

    /// Tells of mappings that were claimed, and ends the reading of their marks.
    #[inline(always)]
    fn tell(&mut self) {
        if self.told == self.len {
            return;
        }
        for mapping in self.mappings().skip(self.told) {
            self.domains.observe(&Event::Unmapping { range: mapping.range, by: self.by });
            self.container.stop_reading(mapping);
        }
        self.told = self.len;
    }

    /// Puts mappings behind those at work, as many as there are and one batch may have.
    fn claim_more(&mut self, mut claim: impl FnMut() -> Option<Box<Mapping<P>>>) {
        let mut end = &mut self.first;
        while let Some(mapping) = end {
            end = &mut mapping.next;
        }
        while !self.last && self.len < MAPPINGS {
            *end = claim();
            match end {
                Some(mapping) => end = &mut mapping.next,
                None => {
                    self.last = true;
                    break;
                }
            }
            self.len += 1;
        }
    }

    /// All mappings at work.
    fn mappings(&self) -> impl Iterator<Item = &Mapping<P>> {
        let first = self.first.as_deref();
        iter::successors(first, |mapping| mapping.next.as_deref())
    }

    /// How many spans the next batch may find.
    fn spans_at_most(&self) -> usize {
        let left = self.mappings().map(Mapping::bytes_left).fold(0, u64::saturating_add);
        self.domains.spans_at_most(left).min(BATCH)
    }

    /// Takes away what the mappings have in front, as far as the room reaches, in all domains.
    fn gather(
        &mut self,
        gathers: &mut Gathers<'_>,
        buf: &mut SpanBuf<'_>,
        marks: Option<&mut DirtyBitmap<'_>>,
    ) {
        let mut exact = marks.filter(|_| self.domains.track_dirty());
        // Not more runs than spans: each end of either may end a piece in quarantine.
        let mut runs = buf.capacity();
        let mut next = self.first.as_deref_mut();
        while let Some(mapping) = next {
            let Mapping { range, pinned, leaving, .. } = &mut *mapping;
            while let Some(run) = pinned.as_ref().and_then(|p| p.runs.at(leaving.at)) {
                let mut taken = run.bytes;
                if run.behind != Behind::Revoked {
                    let at = range.start().wrapping_add(leaving.bytes);
                    let part = IovaRange::from_len(at, run.bytes).ok().filter(|_| runs > 0);
                    let Some(part) = part else { return };
                    taken = gathers.unmap(part, buf, exact.as_deref_mut());
                    runs -= 1;
                }
                leaving.pass(run, taken);
                if taken < run.bytes {
                    return;
                }
            }
            self.down += 1;
            next = mapping.next.as_deref_mut();
        }
    }

    /// Detaches the tables that mappings which go leave empty, and says that these are empty.
    /// Returns where the tables were.
    ///
    /// Tables at the ends of mappings may hold entries of neighbours. The gap between those, under
    /// the lock and so nobody else's, says which. A map that comes into the gap before the sync
    /// finds by `walks` that it has to sync first.
    fn detach_tables(&self, gathers: &mut Gathers<'_>) -> Option<IovaRange> {
        if self.down == 0 || self.then == Then::Stay || self.domains.is_empty() {
            return None;
        }
        let mut all = self.container.state.lock();
        let all = &mut *all;
        let mut next = self.first.as_deref();
        for _ in 0..self.down {
            let Some(mapping) = next else { break };
            if let Some(slot) = all.tree.get_mut(mapping.range.start()) {
                slot.state = SlotState::Emptied;
            }
            next = mapping.next.as_deref();
        }
        let (mut next, mut left) = (self.first.as_deref(), self.down);
        let mut detached = None;
        while let Some(first) = next.filter(|_| left > 0) {
            (next, left) = (first.next.as_deref(), left - 1);
            let mut hull = first.range;
            let Some(gap) = all.gap(hull) else { continue };
            // What follows without others in between is looked at at once.
            while let Some(more) = next.filter(|more| left > 0 && gap.covers(more.range)) {
                hull = IovaRange::new(hull.start(), more.range.last()).unwrap_or(hull);
                (next, left) = (more.next.as_deref(), left - 1);
            }
            if self.domains.may_reclaim(hull, gap)
                && let Some(walks) = gathers.reclaim(hull, gap)
            {
                detached = super::domains::cover(detached, Some(walks));
                all.note_walks(first, hull, walks);
            }
        }
        detached
    }

    /// Unpins what was taken away, or puts it into quarantine, and releases pins and charges of
    /// what is down.
    fn unpin(
        &mut self,
        spans: &[Span],
        synced: Result<(), HardwareError>,
        walks: Option<IovaRange>,
        mut marks: Option<&mut DirtyBitmap<'_>>,
    ) {
        let (container, domains, then) = (self.container, self.domains, self.then);
        let mut spans = Spans::new(spans);
        // The last one may have been taken down in part.
        let touched = (self.down + 1).min(self.len);
        let (mut holds, mut proven) = (synced.is_err(), None);
        let mut next = self.first.as_deref_mut();
        for n in 0..touched {
            let Some(mapping) = next else { break };
            if mapping.bound.is_some() {
                let proven = proven.get_or_insert_with(|| container.state.lock().proven(domains));
                mapping.unbind(*proven);
            }
            holds |= container.unpin_taken(mapping, domains, &mut spans, synced);
            if n < self.down {
                if let Some(marks) = &mut marks {
                    mapping.mark_gone(domains, marks);
                }
                if then == Then::Stay {
                    // Devices may have written all of it, and nobody asked hardware.
                    mapping.mark_dirty(mapping.range);
                }
                if mapping.is_free(0) {
                    container.release(mapping);
                }
            }
            next = mapping.next.as_deref_mut();
        }
        if holds {
            let mut all = container.state.lock();
            // What was reserved is used: the next batch has to ask anew.
            all.quarantine.give_back(core::mem::take(&mut self.reserved));
            all.quarantine.keep_walks(walks.filter(|_| synced.is_err()));
        }
    }

    /// Removes the slots of what is down; what hardware may use goes into quarantine.
    fn release(&mut self) {
        if self.down == 0 {
            return;
        }
        let mut gone = None;
        let mut all = self.container.state.lock();
        for _ in 0..core::mem::take(&mut self.down) {
            let Some(mut mapping) = self.take_first() else { break };
            let (range, then) = (mapping.range, mapping.leaving.then(self.then));
            if !mapping.is_free(0) {
                mapping.leaving.then = then;
                let source = mapping.unforgotten();
                let (first, bytes) = (range, 0);
                let kept = source.map(|source| Unforgotten { first, source, bytes });
                self.outcome.kept = self.outcome.kept.or(kept);
                all.quarantine(mapping);
            } else if then == Then::Stay {
                mapping.leaving = Leaving::default();
                if let Some(slot) = all.tree.get_mut(range.start()) {
                    slot.state = SlotState::Mapped(mapping);
                }
            } else {
                self.outcome.unmapped = self.outcome.unmapped.wrapping_add(mapping.len());
                all.remove(range);
                mapping.next = gone.take();
                gone = Some(mapping);
            }
        }
        if self.is_done() {
            all.quarantine.give_back(core::mem::take(&mut self.reserved));
        }
        drop(all);
        // Behind the lock: what spaces do when they are dropped is their own affair.
        while let Some(mut mapping) = gone {
            gone = mapping.next.take();
        }
    }

    /// Takes the first mapping out of those at work.
    fn take_first(&mut self) -> Option<Box<Mapping<P>>> {
        let mut mapping = self.first.take()?;
        self.first = mapping.next.take();
        self.len -= 1;
        self.told = self.told.saturating_sub(1);
        Some(mapping)
    }

    /// Whether there are no mappings any more.
    fn is_done(&self) -> bool {
        self.last && self.len == 0
    }

    /// Ends it. What there was no room for is as it was, or in quarantine with the part that is
    /// still mapped.
    fn put_back(&mut self, claim: NextMapping<'_, P>) {
        if self.is_done() && self.reserved == 0 {
            return;
        }
        let mut all = self.container.state.lock();
        all.quarantine.give_back(core::mem::take(&mut self.reserved));
        if self.is_done() {
            return;
        }
        self.outcome.stuck = true;
        while let Some(mut mapping) = self.take_first().or_else(|| claim(&mut all)) {
            let first = mapping.range;
            let full = HardwareError {
                what: "too many unmaps wait for hardware that does not answer",
                status: 0,
            };
            let kept = Unforgotten { first, source: full, bytes: 0 };
            let kept = self.outcome.kept.get_or_insert(kept);
            if mapping.leaving.bytes > 0 || mapping.leaving.unfinished {
                mapping.leaving.failed = mapping.leaving.failed.or(Some(full));
                mapping.leaving.then = mapping.leaving.then(self.then);
                all.quarantine(mapping);
                continue;
            }
            kept.bytes = kept.bytes.wrapping_add(mapping.len());
            if let Some(slot) = all.tree.get_mut(first.start()) {
                slot.state = SlotState::Mapped(mapping);
            }
        }
    }
}

/// A panic may end it: room for the next ones is given back.
impl<P: Pinner, L: RawMutex, const BATCH: usize> Drop for Unmap<'_, P, L, BATCH> {
    fn drop(&mut self) {
        if self.reserved > 0 {
            self.container.state.lock().quarantine.give_back(self.reserved);
        }
    }
}

/// Puts spans of a mapping into quarantine, in room that was reserved.
pub(super) fn hold<P: Pinner>(all: &mut State<P>, owner: Iova, spans: &[Span], kind: Kind) {
    let number = unconfirmed::now();
    spans.iter().for_each(|span| all.quarantine.hold(owner, *span, kind, number));
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Unpins what was taken out of a mapping since the last batch, the next of `spans`, or puts it
    /// into quarantine, and says whether it did that.
    #[inline(always)]
    fn unpin_taken(
        &self,
        mapping: &mut Mapping<P>,
        domains: &Domains,
        spans: &mut Spans<'_>,
        synced: Result<(), HardwareError>,
    ) -> bool {
        let unforgotten = synced.err().or(mapping.bound.map(|bound| bound.source));
        let dirty = Dirty::after(mapping.prot);
        let Mapping { range, pinned: Some(pinned), leaving, .. } = mapping else { return false };
        let (owner, pin) = (range.start(), &mut pinned.pin);
        let taken = pinned.runs.between(leaving.before, leaving.at);
        if let Some(error) = unforgotten {
            leaving.failed = leaving.failed.or(Some(error));
            leaving.lost |= domains.is_empty();
            let mut all = self.state.lock();
            for BackingRun { bytes, behind } in taken {
                let Behind::Pinned(kind) = behind else { continue };
                spans.next(bytes, |spans| {
                    leaving.held += spans.len();
                    hold(&mut all, owner, spans, kind);
                });
            }
        } else if let Some(pin) = pin {
            for BackingRun { bytes, behind } in taken {
                let Behind::Pinned(kind) = behind else { continue };
                spans.next(bytes, |spans| {
                    unpin_outputs(&self.pinner, pin, spans, kind, dirty);
                });
            }
        }
        leaving.before = leaving.at;
        unforgotten.is_some()
    }

    /// Releases the pin and the charge of a mapping that was taken down, and that no device can
    /// use any more.
    #[inline(always)]
    pub(super) fn release(&self, mapping: &mut Mapping<P>) {
        let Some(pinned) = mapping.pinned.take() else { return };
        if let Some(pin) = pinned.pin {
            self.pinner.release(Promise::kept(), pin);
        }
        drop(pinned.charge);
    }
}

impl<P: Pinner> State<P> {
    /// Notes in the slots of mappings, from the `first` on and as far as `hull` covers them, where
    /// tables around them were detached.
    #[cold]
    fn note_walks(&mut self, first: &Mapping<P>, hull: IovaRange, walks: IovaRange) {
        let mappings = iter::successors(Some(first), |mapping| mapping.next.as_deref());
        for mapping in mappings.take_while(|mapping| hull.covers(mapping.range)) {
            if let Some(slot) = self.tree.get_mut(mapping.range.start()) {
                self.walking += usize::from(slot.walks.replace(walks).is_none());
            }
        }
    }

    /// What lies between the neighbours of the slot at `range`. Those that are empty count as not
    /// there.
    #[inline(always)]
    pub(super) fn gap(&self, range: IovaRange) -> Option<IovaRange> {
        let full = |slot: &MappingSlot<P>| !matches!(slot.state, SlotState::Emptied);
        let own = self.tree.find(range.start())?;
        let (mut start, mut last) = (IovaRange::ALL.start(), IovaRange::ALL.last());
        let mut before = own;
        while let Some(at) = self.tree.before(before) {
            if let Some((_, slot)) = self.tree.at(at).filter(|(_, slot)| full(slot)) {
                start = slot.last.checked_add(1)?;
                break;
            }
            before = at;
        }
        let mut next = self.tree.next(own);
        while let Some((behind, slot)) = self.tree.at(next) {
            if full(slot) {
                last = behind.wrapping_add(u64::MAX);
                break;
            }
            next = self.tree.next(next);
        }
        IovaRange::new(start, last)
    }
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

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::addr::PhysAddr;

    /// Spans of these lengths, none of which touches the next.
    fn spans(lens: [u64; 3]) -> [Span; 3] {
        let mut start = 0;
        lens.map(|len| {
            start += 16;
            Span::covering(PhysAddr::new(start), len - 1)
        })
    }

    fn bytes(spans: &[Span]) -> Vec<u64> {
        spans.iter().flat_map(|span| span.paddr().get()..=span.last().get()).collect()
    }

    #[test]
    fn spans_are_handed_out_byte_by_byte_and_whole_ones_at_once() {
        let lens = |n: u64| [n % 3 + 1, n / 3 % 3 + 1, n / 9 + 1];
        for lens in (0..27).map(lens) {
            let (spans, ends) = (spans(lens), [lens[0], lens[0] + lens[1], lens.iter().sum()]);
            let (all, len) = (bytes(&spans), ends[2]);
            for (first, last) in (0..=len).flat_map(|last| (0..=last).map(move |at| (at, last))) {
                let mut rest = Spans::new(&spans);
                // Of no more than there are, also where more are asked for.
                let parts = [(0, first), (first, last), (last, len + 1), (len, len + 1)];
                let mut found = Vec::new();
                for (at, end) in parts {
                    let mut calls = 0;
                    rest.next(end - at, |spans| {
                        calls += 1;
                        found.extend(bytes(spans));
                    });
                    let end = end.min(len);
                    let inside = |at| at > 0 && !ends.contains(&at);
                    let whole = ends.iter().zip(lens);
                    let whole = whole.filter(|(to, len)| **to - len >= at && **to <= end).count();
                    let cut = usize::from(inside(at)) + usize::from(inside(end));
                    let within = ends.iter().all(|it| *it <= at || end < *it);
                    let expected = match at < end {
                        true if within => 1,
                        true => cut + usize::from(whole > 0),
                        false => 0,
                    };
                    assert_eq!(calls, expected, "{at}..{end} of {lens:?}");
                }
                assert_eq!(found, all, "{first}, {last} of {lens:?}");
            }
        }
    }
}
