//! This says what an invalidation makes hardware forget, and what it does not.

use std::thread::ThreadId;

use dmaspan::iommu::Tables;
use dmaspan::{Iova, IovaRange};

use super::config::LeafSizes;
use super::event::{Forget, Invalidating, Op, Outcome, Record};
use super::intervals::Intervals;
use super::report::{Cause, FindingKind};
use super::state::{Gone, Stale, State};

impl Stale {
    /// Returns what keeps an invalidation of its IOVAs from making hardware forget it.
    fn survives(&self, ended: &Invalidating, sizes: LeafSizes) -> Option<Cause> {
        let what = &ended.what;
        let unnamed = self.leaf_sizes & !what.leaf_sizes != 0 && what.iovas.ranges().is_some();
        match &self.was {
            _ if self.unmapped.number > ended.begin.number => Some(Cause::BeganBeforeUnmap),
            Some(_) => (sizes == LeafSizes::Named && unnamed).then_some(Cause::LeafSizes),
            None => (!what.forgets_walks()).then_some(Cause::TablesKept),
        }
    }
}

impl State {
    pub(super) fn invalidate_begin(&mut self, what: &Forget, now: &Record) {
        if let Some(range) = self.pointless(what, now.origin.thread) {
            let before = self.gone.first(range).map(|(_, gone)| gone.flushed.clone());
            let before = before.into_iter().collect();
            self.find(FindingKind::PointlessFlush, (range, None), before, now);
        }
        self.in_flight.push(now.clone());
    }

    /// What an invalidation names, if hardware holds nothing stale there and its thread can know.
    ///
    /// A thread knows what it unmapped and flushed itself. Of what others unmapped it knows nothing
    /// unless that was named: threads that gather apart from each other, as CPUs do in a flush
    /// queue, may each flush everything, and then the first one has done it for all. And whoever
    /// names ranges need not know that everything was flushed meanwhile, by itself for another
    /// CPU's queue or by others.
    fn pointless(&self, what: &Forget, thread: ThreadId) -> Option<IovaRange> {
        let all = [everything()];
        let ranges = what.iovas.ranges();
        let own_flush = self.flushed_all.get(&thread).copied().unwrap_or(0);
        let known = |unmapped: &Record| {
            let is_own = unmapped.origin.thread == thread;
            ranges.is_none() && is_own && own_flush > unmapped.number
        };
        let holds = |&range: &IovaRange| {
            let mut gone = self.gone.meeting(range);
            self.leaves.first(range).is_some()
                || self.walks.first(range).is_some()
                || !self.vain.meeting(range).all(|(_, unmapped)| known(unmapped))
                || !gone.all(|(_, gone)| gone.named || known(&gone.unmapped))
        };
        let named = ranges.unwrap_or(&all);
        let first = named.first().copied().filter(|_| what.tables == Tables::Kept)?;
        (!named.iter().any(holds)).then_some(first)
    }

    pub(super) fn invalidate_end(&mut self, ended: &Invalidating, outcome: Outcome) {
        self.in_flight.retain(|begin| begin.number != ended.begin.number);
        let all = [everything()];
        let ranges = ended.what.iovas.ranges();
        for &range in ranges.unwrap_or(&all) {
            if outcome == Outcome::Failed {
                for stale in [&mut self.leaves, &mut self.walks] {
                    stale.each_meeting(range, |stale| stale.missed = Some(Cause::Failed));
                }
                continue;
            }
            forget(&mut self.walks, range, ended, self.config.leaf_sizes);
            let forgotten = forget(&mut self.leaves, range, ended, self.config.leaf_sizes);
            forgotten.into_iter().for_each(|(piece, stale)| self.went(piece, stale, &ended.begin));
            if ranges.is_some() {
                self.vain.take(range);
                self.gone.each_meeting(range, |gone| gone.named = true);
            }
        }
        if ranges.is_none() && outcome == Outcome::Done {
            self.flushed_all.insert(ended.begin.origin.thread, ended.begin.number);
        }
    }

    /// Hardware let go of everything.
    pub(super) fn detached(&mut self, now: &Record) {
        let leaves = std::mem::take(&mut self.leaves);
        leaves.iter().for_each(|(piece, stale)| self.went(piece, stale.clone(), now));
        self.walks = Intervals::default();
        self.in_flight.clear();
    }

    /// Hardware has forgotten what was unmapped.
    fn went(&mut self, piece: IovaRange, stale: Stale, flushed: &Record) {
        let Stale { was: Some(was), unmapped, .. } = stale else { return };
        if !matches!(unmapped.op, Op::Unmap { .. }) || self.config.history == 0 {
            return;
        }
        let lasts = |gone: &Intervals<Gone>, &(start, number): &(Iova, u64)| {
            gone.at(start).filter(|(_, gone)| gone.flushed.number == number).map(|(range, _)| range)
        };
        while self.gone.len() >= self.config.history
            && let Some(oldest) = self.going.pop_front()
        {
            lasts(&self.gone, &oldest).map(|range| self.gone.take(range));
        }
        if self.going.len() > 2 * self.config.history {
            self.going.retain(|one| lasts(&self.gone, one).is_some());
        }
        self.going.push_back((piece.start(), flushed.number));
        self.gone.take(piece);
        let flushed = flushed.clone();
        self.gone.insert(piece, Gone { mapped: was.mapped, unmapped, flushed, named: false });
    }
}

/// Takes out what an invalidation makes hardware forget in a range.
fn forget(
    waiting: &mut Intervals<Stale>,
    range: IovaRange,
    ended: &Invalidating,
    sizes: LeafSizes,
) -> Vec<(IovaRange, Stale)> {
    let mut taken = waiting.take(range);
    for unmapped in taken.iter().map(|(_, stale)| &stale.unmapped) {
        let wholes = unmapped.iovas.ranges().unwrap_or_default();
        // What the same unmap took away and is not named: the range is too short for it.
        for &whole in wholes.iter().filter(|whole| !range.covers(**whole)) {
            waiting.each_meeting(whole, |stale| {
                if stale.unmapped.number == unmapped.number {
                    stale.missed = Some(Cause::TooShort);
                }
            });
        }
    }
    taken.retain_mut(|(piece, stale)| {
        let Some(cause) = stale.survives(ended, sizes) else { return true };
        stale.missed = Some(cause);
        waiting.insert(*piece, stale.clone());
        false
    });
    taken
}

pub(super) fn everything() -> IovaRange {
    let start = Iova::new(0);
    IovaRange::new(start, Iova::new(u64::MAX)).unwrap_or(IovaRange::point(start))
}
