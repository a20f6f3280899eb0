//! This says what an invalidation makes hardware forget, and what it does not.

use dmaspan::iommu::Tables;
use dmaspan::{Iova, IovaRange};

use super::config::{LeafSizes, Pointless};
use super::event::{Forget, Invalidating, Outcome, Record};
use super::intervals::{Cut, Intervals};
use super::report::{Cause, FindingKind};
use super::state::{Stale, State, Unflushed, Walk};

/// What was unmapped and waits for a flush.
trait Waiting: Cut {
    fn by(&mut self) -> &mut Unflushed;

    fn unmapped(&self) -> &Record;

    /// Returns what keeps an invalidation of its IOVAs from making hardware forget it.
    fn survives(&self, what: &Forget, sizes: LeafSizes) -> Option<Cause>;
}

impl Waiting for Stale {
    fn by(&mut self) -> &mut Unflushed {
        &mut self.by
    }

    fn unmapped(&self) -> &Record {
        &self.by.unmapped
    }

    fn survives(&self, what: &Forget, sizes: LeafSizes) -> Option<Cause> {
        let unnamed = self.leaf_sizes & !what.leaf_sizes != 0 && what.iovas.ranges().is_some();
        (sizes == LeafSizes::Named && unnamed).then_some(Cause::LeafSizes)
    }
}

impl Waiting for Walk {
    fn by(&mut self) -> &mut Unflushed {
        &mut self.0
    }

    fn unmapped(&self) -> &Record {
        &self.0.unmapped
    }

    fn survives(&self, what: &Forget, _sizes: LeafSizes) -> Option<Cause> {
        (!what.forgets_walks()).then_some(Cause::TablesKept)
    }
}

impl State {
    pub(super) fn invalidate_begin(&mut self, what: &Forget, now: &Record) {
        if self.config.pointless == Pointless::Report
            && what.tables == Tables::Kept
            && let Some(range) = self.nothing_stale_in(what)
        {
            self.find(FindingKind::PointlessFlush, (range, None), Vec::new(), now);
        }
        self.in_flight.push(now.clone());
    }

    /// What an invalidation names, if hardware holds nothing stale there.
    fn nothing_stale_in(&self, what: &Forget) -> Option<IovaRange> {
        let Some(ranges) = what.iovas.ranges() else {
            return (self.stale.is_empty() && self.walks.is_empty()).then_some(everything());
        };
        let holds = |&range: &IovaRange| {
            self.stale.first(range).is_some() || self.walks.first(range).is_some()
        };
        ranges.first().copied().filter(|_| !ranges.iter().any(holds))
    }

    pub(super) fn invalidate_end(&mut self, ended: &Invalidating, outcome: Outcome) {
        self.in_flight.retain(|begin| begin.number != ended.number);
        let sizes = self.config.leaf_sizes;
        let all = [everything()];
        for &range in ended.what.iovas.ranges().unwrap_or(&all) {
            match outcome {
                Outcome::Done => {
                    forget(&mut self.stale, range, ended, sizes);
                    forget(&mut self.walks, range, ended, sizes);
                }
                Outcome::Failed => {
                    self.stale.each_meeting(range, |stale| stale.by.missed = Some(Cause::Failed));
                    self.walks.each_meeting(range, |walk| walk.0.missed = Some(Cause::Failed));
                }
            }
        }
    }
}

fn forget<V: Waiting>(
    waiting: &mut Intervals<V>,
    range: IovaRange,
    ended: &Invalidating,
    sizes: LeafSizes,
) {
    let taken = waiting.take(range);
    for (piece, value) in &taken {
        // What the same unmap took away and is not named: the range is too short for it.
        let unmapped = value.unmapped().clone();
        for &whole in unmapped.iovas.ranges().unwrap_or_default() {
            if piece.start() == range.start() || piece.last() == range.last() {
                waiting.each_meeting(whole, |value| {
                    if value.unmapped().number == unmapped.number {
                        value.by().missed = Some(Cause::TooShort);
                    }
                });
            }
        }
    }
    for (piece, mut value) in taken {
        let began_before = value.unmapped().number > ended.number;
        let survives = began_before.then_some(Cause::BeganBeforeUnmap);
        if let Some(cause) = survives.or_else(|| value.survives(&ended.what, sizes)) {
            value.by().missed = Some(cause);
            waiting.insert(piece, value);
        }
    }
}

pub(super) fn everything() -> IovaRange {
    let start = Iova::new(0);
    IovaRange::new(start, Iova::new(u64::MAX)).unwrap_or(IovaRange::point(start))
}
