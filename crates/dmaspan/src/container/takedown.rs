//! Mappings are taken down here a batch at a time: translations, a sync, pins, charges and slots.
//! Unmapping, detaching and the quarantine call it.

use alloc::boxed::Box;

use lock_api::RawMutex;

use super::domains::{Domains, Gathers};
use super::mapping::{BackingRun, Behind, Leaving, Mapping, SlotState, Then};
use super::room::Room;
use super::unmap::Unforgotten;
use super::{Container, RANGES, State, unconfirmed};
use crate::addr::Iova;
use crate::io_pgtable::DirtyBitmap;
use crate::iommu::{Event, HardwareError};
use crate::label::{Caller, Label};
use crate::pin::{Dirty, Kind, Pinner, unpin_outputs};
use crate::promise::Promise;
use crate::range::IovaRange;
use crate::span::{Span, SpanBuf};

/// Places for ranges, whose content does not matter.
const NO_RANGES: [IovaRange; RANGES] = [IovaRange::point(Iova::new(0)); RANGES];

/// Gives the next mapping to take down, whose slot is the taker's.
pub(super) type NextMapping<'a, P> = &'a mut dyn FnMut(&mut State<P>) -> Option<Box<Mapping<P>>>;

/// Mappings on their way out. It allocates nothing.
pub(super) struct Unmap<'c, P: Pinner, L: RawMutex, const BATCH: usize> {
    container: &'c Container<P, L, BATCH>,
    domains: &'c Domains,
    then: Then,
    by: Caller,
    /// In the order of their IOVAs.
    places: [Option<Box<Mapping<P>>>; RANGES],
    /// How many of the places have one, from the front.
    len: usize,
    /// How many of those have nothing mapped any more, from the front.
    down: usize,
    /// Whether there are no more to claim.
    last: bool,
    /// For how many spans there is room in quarantine.
    reserved: usize,
    /// Where tables were detached with this batch.
    walks: Option<IovaRange>,
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
            places: [const { None }; RANGES],
            len: 0,
            down: 0,
            last: false,
            reserved: 0,
            walks: None,
            outcome: TakenDown::default(),
        }
    }

    /// Takes all mappings down that `claim` gives, and marks what was written of them in `marks`.
    pub(super) fn run(
        mut self,
        claim: NextMapping<'_, P>,
        mut marks: Option<&mut DirtyBitmap<'_>>,
    ) -> TakenDown {
        let domains = self.domains;
        domains.gathering(&mut |gathers| {
            // What it costs to clear is paid once for all batches.
            let mut room = Room::<BATCH>::new(0);
            while self.next_batch(claim) {
                let mut buf = SpanBuf::new(room.first(self.reserved));
                self.gather(gathers, &mut buf, marks.as_deref_mut());
                self.detach_tables(gathers);
                let synced = gathers.sync();
                self.unpin(buf.spans(), synced);
                self.release(marks.as_deref_mut());
            }
        });
        self.put_back(claim);
        self.outcome
    }

    /// Claims mappings for the next batch, and room in quarantine for what it takes away. Says
    /// whether there is anything to do, and room to do it.
    fn next_batch(&mut self, claim: NextMapping<'_, P>) -> bool {
        let (before, mut asked) = (self.len, false);
        loop {
            if self.last && self.reserved > 0 {
                return self.len > 0;
            }
            let mut all = self.container.state.lock();
            while !self.last && self.len < RANGES {
                self.places[self.len] = claim(&mut all);
                self.last = self.places[self.len].is_none();
                self.len += usize::from(!self.last);
            }
            let wanted = self.spans_at_most();
            if self.reserved < wanted {
                self.reserved += all.quarantine.reserve(wanted - self.reserved);
            }
            drop(all);
            for mapping in self.places[before..self.len].iter().flatten() {
                self.domains.observe(&Event::Unmapping { range: mapping.range, by: self.by });
                self.container.stop_reading(mapping);
            }
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

    /// How many spans the next batch may find.
    fn spans_at_most(&self) -> usize {
        let page = self.domains.page_sizes & self.domains.page_sizes.wrapping_neg();
        let mut left = 0u64;
        for mapping in self.places[..self.len].iter().flatten() {
            if mapping.has_rest() {
                left = left.saturating_add(mapping.len() - mapping.leaving.bytes);
            }
        }
        usize::try_from(left.div_ceil(page.max(1))).unwrap_or(BATCH).min(BATCH)
    }

    /// Takes away what the mappings have in front, as far as the room reaches, in all domains.
    fn gather(
        &mut self,
        gathers: &mut Gathers<'_>,
        buf: &mut SpanBuf<'_>,
        marks: Option<&mut DirtyBitmap<'_>>,
    ) {
        let mut ranges = NO_RANGES;
        let mappings = self.places[..self.len].iter().flatten();
        let wanted = wanted(mappings.map(|mapping| &**mapping), &mut ranges, buf.capacity());
        let exact = marks.filter(|_| self.domains.track_dirty());
        let mut bytes = if wanted.is_empty() { 0 } else { gathers.unmap(wanted, buf, exact) };
        for mapping in self.places[self.down..self.len].iter_mut().flatten() {
            let Mapping { pinned, leaving, .. } = &mut **mapping;
            leaving.before = leaving.at;
            while let Some(run) = pinned.as_ref().and_then(|p| p.runs.rest(leaving.at).next()) {
                let taken = match run.behind {
                    Behind::Revoked => run.bytes,
                    Behind::Pinned(_) if bytes == 0 => break,
                    Behind::Pinned(_) => run.bytes.min(bytes),
                };
                if run.behind != Behind::Revoked {
                    bytes -= taken;
                }
                leaving.pass(run, taken);
            }
            if mapping.has_rest() {
                break;
            }
            self.down += 1;
        }
    }

    /// Detaches the tables that mappings which go leave empty, and says that these are empty.
    ///
    /// Tables at the ends of mappings may hold entries of neighbours. The gap between those, under
    /// the lock and so nobody else's, says which. A map that comes into the gap before the sync
    /// finds by `walks` that it has to sync first.
    fn detach_tables(&mut self, gathers: &mut Gathers<'_>) {
        if self.down == 0 || self.then == Then::Stay || self.domains.is_empty() {
            return;
        }
        let mut all = self.container.state.lock();
        let all = &mut *all;
        let down = || self.places[..self.down].iter().flatten().map(|mapping| mapping.range);
        for range in down() {
            if let Some(slot) = all.tree.get_mut(&range.start()) {
                slot.state = SlotState::Emptied;
            }
        }
        let mut ranges = down().peekable();
        let mut first = 0;
        while let Some(range) = ranges.next() {
            let Some(gap) = all.gap(range) else { continue };
            let (mut hull, mut count) = (range, 1);
            // What follows without others in between is looked at at once.
            while let Some(next) = ranges.next_if(|next| gap.covers(*next)) {
                hull = IovaRange::new(hull.start(), next.last()).unwrap_or(hull);
                count += 1;
            }
            if let Some(walks) = gathers.reclaim(hull, gap) {
                self.walks = super::domains::cover(self.walks, Some(walks));
                for range in down().skip(first).take(count) {
                    if let Some(slot) = all.tree.get_mut(&range.start()) {
                        all.walking += usize::from(slot.walks.replace(walks).is_none());
                    }
                }
            }
            first += count;
        }
    }

    /// Unpins what was taken away, or puts it into quarantine.
    fn unpin(&mut self, spans: &[Span], synced: Result<(), HardwareError>) {
        let pinner = &self.container.pinner;
        let mut spans = Spans::new(spans);
        // The last one may have been taken down in part.
        let touched = (self.down + 1).min(self.len);
        let mut holds = false;
        if self.places[..touched].iter().flatten().any(|mapping| mapping.bound.is_some()) {
            let proven = self.container.state.lock().proven(self.domains);
            self.places[..touched].iter_mut().flatten().for_each(|mapping| mapping.unbind(proven));
        }
        for mapping in self.places[..touched].iter_mut().flatten() {
            let unforgotten = synced.err().or(mapping.bound.map(|bound| bound.source));
            let dirty = Dirty::after(mapping.prot);
            let Mapping { range, pinned: Some(pinned), leaving, .. } = &mut **mapping else {
                continue;
            };
            let (owner, pin) = (range.start(), &mut pinned.pin);
            let taken = pinned.runs.between(leaving.before, leaving.at);
            if let Some(error) = unforgotten {
                leaving.failed = leaving.failed.or(Some(error));
                leaving.lost |= self.domains.is_empty();
                let mut all = self.container.state.lock();
                for BackingRun { bytes, behind } in taken {
                    let Behind::Pinned(kind) = behind else { continue };
                    spans.next(bytes, |spans| {
                        leaving.held += spans.len();
                        hold(&mut all, owner, spans, kind);
                    });
                }
                holds = true;
            } else if let Some(pin) = pin {
                for BackingRun { bytes, behind } in taken {
                    let Behind::Pinned(kind) = behind else { continue };
                    spans.next(bytes, |spans| {
                        unpin_outputs(pinner, pin, spans, kind, dirty);
                    });
                }
            }
            leaving.before = leaving.at;
        }
        if holds || synced.is_err() {
            let mut all = self.container.state.lock();
            // What was reserved is used: the next batch has to ask anew.
            all.quarantine.give_back(core::mem::take(&mut self.reserved));
            all.quarantine.keep_walks(self.walks.filter(|_| synced.is_err()));
        }
        self.walks = None;
    }

    /// Releases pins, charges and slots of what is down; what hardware may use goes into
    /// quarantine.
    fn release(&mut self, mut marks: Option<&mut DirtyBitmap<'_>>) {
        if self.down == 0 {
            return;
        }
        let (then, domains) = (self.then, self.domains);
        let down = &mut self.places[..self.down];
        for mapping in down.iter_mut().flatten() {
            if let Some(marks) = &mut marks {
                mapping.mark_gone(domains, marks);
            }
            if then == Then::Stay {
                // Devices may have written all of it, and nobody asked hardware.
                mapping.mark_dirty(mapping.range);
            }
            if mapping.is_free(0) {
                self.container.release(mapping);
            }
        }
        let mut all = self.container.state.lock();
        for place in down.iter_mut() {
            let Some(mapping) = place else { continue };
            let range = mapping.range;
            if !mapping.is_free(0) {
                mapping.leaving.then = then;
                let source = mapping.unforgotten();
                let (first, bytes) = (range, 0);
                let kept = source.map(|source| Unforgotten { first, source, bytes });
                self.outcome.kept = self.outcome.kept.or(kept);
                place.take().into_iter().for_each(|mapping| all.quarantine(mapping));
            } else if then == Then::Stay {
                mapping.leaving = Leaving::default();
                let slot = all.tree.get_mut(&range.start());
                if let Some((slot, mapping)) = slot.zip(place.take()) {
                    slot.state = SlotState::Mapped(mapping);
                }
            } else {
                self.outcome.unmapped = self.outcome.unmapped.wrapping_add(mapping.len());
                all.remove(range);
            }
        }
        drop(all);
        // Behind the lock: what spaces do when they are dropped is their own affair.
        down.iter_mut().for_each(|place| drop(place.take()));
        self.places[..self.len].rotate_left(self.down);
        self.len -= self.down;
        self.down = 0;
    }

    /// Ends it. What there was no room for is as it was, or in quarantine with the part that is
    /// still mapped.
    fn put_back(&mut self, claim: NextMapping<'_, P>) {
        let mut all = self.container.state.lock();
        all.quarantine.give_back(core::mem::take(&mut self.reserved));
        if self.last && self.len == 0 {
            return;
        }
        self.outcome.stuck = true;
        let mut rest = self.places.iter_mut().filter_map(Option::take);
        let mut next = |all: &mut State<P>| rest.next().or_else(|| claim(all));
        while let Some(mut mapping) = next(&mut all) {
            let first = mapping.range;
            let full = HardwareError {
                what: "too many unmaps wait for hardware that does not answer",
                status: 0,
            };
            let kept = Unforgotten { first, source: full, bytes: 0 };
            let kept = self.outcome.kept.get_or_insert(kept);
            if mapping.leaving.bytes > 0 || mapping.leaving.unfinished {
                mapping.leaving.failed = mapping.leaving.failed.or(Some(full));
                mapping.leaving.then = self.then;
                all.quarantine(mapping);
                continue;
            }
            kept.bytes = kept.bytes.wrapping_add(mapping.len());
            if let Some(slot) = all.tree.get_mut(&first.start()) {
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
    /// Releases the pin and the charge of a mapping that was taken down, and that no device can
    /// use any more.
    pub(super) fn release(&self, mapping: &mut Mapping<P>) {
        let Some(pinned) = mapping.pinned.take() else { return };
        if let Some(pin) = pinned.pin {
            self.pinner.release(Promise::kept(), pin);
        }
        drop(pinned.charge);
    }
}

impl<P: Pinner> State<P> {
    /// What lies between the neighbours of the slot at `range`. Those that are empty count as not
    /// there.
    fn gap(&self, range: IovaRange) -> Option<IovaRange> {
        let full =
            |slot: &super::mapping::MappingSlot<P>| !matches!(slot.state, SlotState::Emptied);
        let mut before = self.tree.range(..range.start()).rev();
        let before = before.find(|(_, slot)| full(slot)).map(|(_, slot)| slot.last);
        let start = before.map_or(Some(IovaRange::ALL.start()), |last| last.checked_add(1))?;
        let behind = range.last().checked_add(1);
        let next = behind.and_then(|at| self.tree.range(at..).find(|(_, slot)| full(slot)));
        let last = next.map_or(IovaRange::ALL.last(), |(start, _)| start.wrapping_add(u64::MAX));
        IovaRange::new(start, last)
    }
}

/// What mappings have in front that is mapped: as many ranges as there are places, and not more
/// runs than there are.
fn wanted<'r, 'm, P: Pinner + 'm>(
    mappings: impl Iterator<Item = &'m Mapping<P>>,
    ranges: &'r mut [IovaRange; RANGES],
    mut max_runs: usize,
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
            max_runs -= 1;
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
