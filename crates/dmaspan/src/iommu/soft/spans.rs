//! The IOTLB of one device model: spans of IOVAs that lead to contiguous memory.

use alloc::collections::TryReserveError;
use alloc::vec::Vec;
use core::iter;

use crate::addr::{Iova, PhysAddr};
use crate::io_pgtable::MappedRun;
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::Span;

/// The bits of a [`Prot`] that an access needs, and those that forbid it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    needed: Prot,
    looked_at: Prot,
}

impl Needs {
    /// An access that needs `needed`, and is refused where there is something of `forbidden`.
    #[inline(always)]
    pub(super) const fn new(needed: Prot, forbidden: Prot) -> Self {
        Self { needed, looked_at: needed.union(forbidden) }
    }

    #[inline(always)]
    pub(super) const fn are_met(self, prot: Prot) -> bool {
        prot.bits() & self.looked_at.bits() == self.needed.bits()
    }
}

/// A translation that is kept.
#[derive(Clone, Copy, Debug)]
struct Kept {
    start: u64,
    /// Bytes behind the first one.
    above: u64,
    /// Where the first byte leads.
    paddr: u64,
    prot: Prot,
}

impl Kept {
    fn of(run: MappedRun) -> Self {
        let start = run.range.start().get();
        Self { start, above: run.range.len_less_one(), paddr: run.paddr.get(), prot: run.prot }
    }

    fn last(&self) -> u64 {
        self.start + self.above
    }

    /// The part before `start`.
    fn before(self, start: u64) -> Option<Self> {
        let above = start.checked_sub(1)?.checked_sub(self.start)?;
        Some(Self { above, ..self })
    }

    /// The part behind `last`.
    fn behind(self, last: u64) -> Option<Self> {
        let above = self.last().checked_sub(last)?.checked_sub(1)?;
        let start = last + 1;
        Some(Self { start, above, paddr: self.paddr + (start - self.start), ..self })
    }
}

/// Translations, sorted by their IOVAs, of which no two overlap. It allocates nothing once it is
/// made.
#[derive(Debug)]
struct Sorted {
    kept: Vec<Kept>,
    places: usize,
    /// Which one makes room next.
    victim: usize,
}

impl Sorted {
    fn new(places: usize) -> Result<Self, TryReserveError> {
        let mut kept = Vec::new();
        kept.try_reserve_exact(places)?;
        Ok(Self { kept, places, victim: 0 })
    }

    /// The one that has `iova`.
    fn at(&self, iova: Iova) -> Option<Kept> {
        let behind = self.kept.partition_point(|kept| kept.start <= iova.get());
        let kept = *self.kept.get(behind.checked_sub(1)?)?;
        (iova.get() <= kept.last()).then_some(kept)
    }

    /// Keeps one more, in the place of whatever was kept for its IOVAs, if there is any room.
    fn insert(&mut self, new: Kept) {
        self.forget(new.start, new.last());
        if self.places == 0 {
            return;
        }
        if self.kept.len() >= self.places {
            // In turn by their order: no books of uses that a hit would have to keep.
            self.victim = if self.victim < self.kept.len() { self.victim } else { 0 };
            self.kept.remove(self.victim);
            self.victim += 1;
        }
        let at = self.kept.partition_point(|other| other.start < new.start);
        self.kept.insert(at, new);
    }

    /// Keeps nothing from `first` to `last` any more. What reaches out of that is cut.
    fn forget(&mut self, first: u64, last: u64) {
        let from = self.kept.partition_point(|kept| kept.last() < first);
        let meets = self.kept.get(from..).unwrap_or(&[]).iter();
        let count = meets.take_while(|kept| kept.start <= last).count();
        let Some(after) = count.checked_sub(1) else { return };
        let left = self.kept[from].before(first);
        let right = self.kept[from + after].behind(last);
        let mut at = from;
        for part in [left, right].into_iter().flatten() {
            if at < from + count {
                self.kept[at] = part;
            } else if self.kept.len() < self.places {
                self.kept.insert(at, part);
            } else {
                break;
            }
            at += 1;
        }
        if at < from + count {
            self.kept.drain(at..from + count);
        }
    }
}

/// How many translations are searched without a loop.
const FRONT: usize = 32;

/// What is kept: up to 32 translations at the front, where a hit looks, and behind them all that
/// there is room for, if that is more. Each of both may have what the other has not.
#[derive(Debug)]
pub(super) struct Spans {
    front: Sorted,
    /// The starts of those at the front, and behind them the highest address.
    starts: [u64; FRONT],
    more: Sorted,
}

/// Room for a full front.
impl Default for Spans {
    fn default() -> Self {
        let front = Sorted { kept: Vec::with_capacity(FRONT), places: FRONT, victim: 0 };
        let more = Sorted { kept: Vec::new(), places: 0, victim: 0 };
        Self { front, starts: [u64::MAX; FRONT], more }
    }
}

impl Spans {
    /// Room for so many, at least one, if there is memory for it.
    pub(super) fn new(places: usize) -> Result<Self, TryReserveError> {
        let more = Sorted::new(if places > FRONT { places } else { 0 })?;
        let front = Sorted::new(places.clamp(1, FRONT))?;
        Ok(Self { front, starts: [u64::MAX; FRONT], more })
    }

    /// Where `range` leads, if one translation at the front has all of it and permits the access.
    /// It may miss the highest address.
    #[inline(always)]
    pub(super) fn find(&self, range: IovaRange, needs: Needs) -> Option<Span> {
        let (start, above) = (range.start().get(), range.len_less_one());
        let kept = self.front.kept.get(last_at_most(&self.starts, start))?;
        // What lies before the first one is beyond its end, too.
        let offset = start.wrapping_sub(kept.start);
        let fits = offset <= kept.above && above <= kept.above - offset;
        (fits && needs.are_met(kept.prot))
            .then(|| Span::covering(PhysAddr::new(kept.paddr + offset), above))
    }

    /// What is kept for `iova`, which is at the front from now on.
    pub(super) fn at(&mut self, iova: Iova) -> Option<MappedRun> {
        if let Some(kept) = self.front.at(iova) {
            return run(&kept);
        }
        let kept = self.more.at(iova)?;
        self.front.insert(kept);
        self.index();
        run(&kept)
    }

    /// Keeps a translation, in the place of whatever was kept for its IOVAs.
    pub(super) fn insert(&mut self, run: MappedRun) {
        let kept = Kept::of(run);
        self.front.insert(kept);
        self.more.insert(kept);
        self.index();
    }

    /// Keeps nothing of `range` any more. What reaches out of it is cut.
    pub(super) fn forget(&mut self, range: IovaRange) {
        let (first, last) = (range.start().get(), range.last().get());
        self.front.forget(first, last);
        self.more.forget(first, last);
        self.index();
    }

    /// Keeps nothing any more.
    pub(super) fn clear(&mut self) {
        self.front.kept.clear();
        self.more.kept.clear();
        self.index();
    }

    /// All that is kept, in the order of IOVAs.
    pub(super) fn runs(&self) -> Vec<MappedRun> {
        let is_missing = |kept: &&Kept| self.more.at(Iova::new(kept.start)).is_none();
        let front = self.front.kept.iter().filter(is_missing);
        let mut runs: Vec<_> = front.chain(&self.more.kept).filter_map(run).collect();
        runs.sort_unstable_by_key(|run| run.range.start());
        runs
    }

    /// Enters the starts of what is at the front.
    fn index(&mut self) {
        let starts = self.front.kept.iter().map(|kept| kept.start).chain(iter::repeat(u64::MAX));
        self.starts.iter_mut().zip(starts).for_each(|(place, start)| *place = start);
    }
}

/// The place of the last of sorted `starts` that is at most `iova`, and 0 where there is none: five
/// steps, of which none is a branch.
#[inline(always)]
fn last_at_most(starts: &[u64; FRONT], iova: u64) -> usize {
    let mut at = if starts[16] <= iova { 16 } else { 0 };
    at |= if starts[at | 8] <= iova { 8 } else { 0 };
    at |= if starts[at | 4] <= iova { 4 } else { 0 };
    at |= if starts[at | 2] <= iova { 2 } else { 0 };
    at | usize::from(starts[at | 1] <= iova)
}

fn run(kept: &Kept) -> Option<MappedRun> {
    let range = IovaRange::new(Iova::new(kept.start), Iova::new(kept.last()))?;
    Some(MappedRun { range, paddr: PhysAddr::new(kept.paddr), prot: kept.prot })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, last: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), Iova::new(last)).unwrap()
    }

    fn mapped(start: u64, last: u64) -> MappedRun {
        let paddr = PhysAddr::new(start + 0x10_0000);
        MappedRun { range: range(start, last), paddr, prot: Prot::READ }
    }

    const READS: Needs = Needs::new(Prot::READ, Prot::PRIV);

    /// What is kept, as starts and lasts; each leads where it did when it was inserted.
    fn kept(spans: &Spans) -> Vec<(u64, u64)> {
        let ends = |run: MappedRun| {
            let (start, last) = (run.range.start().get(), run.range.last().get());
            assert_eq!(run.paddr.get(), start + 0x10_0000);
            (start, last)
        };
        spans.runs().into_iter().map(ends).collect()
    }

    #[test]
    fn an_access_is_answered_only_where_one_span_has_all_of_it() {
        let mut spans = Spans::new(4).unwrap();
        assert_eq!(spans.find(range(0, 0), READS), None);
        spans.insert(mapped(0x3000, 0x3fff));
        spans.insert(mapped(0x1000, 0x1fff));
        let first = spans.find(range(0x1010, 0x1fff), READS).unwrap();
        assert_eq!((first.paddr().get(), first.len()), (0x10_1010, 0xff0));
        assert_eq!(spans.find(range(0x3800, 0x3800), READS).unwrap().paddr().get(), 0x10_3800);
        for (start, last) in [(0xfff, 0x1000), (0x1fff, 0x2000), (0x2000, 0x2fff), (0x4000, !0)] {
            assert_eq!(spans.find(range(start, last), READS), None, "{start:#x}");
        }
        assert_eq!(spans.find(range(0x1000, 0x1fff), Needs::new(Prot::WRITE, Prot::PRIV)), None);
    }

    #[test]
    fn what_is_forgotten_is_cut_out_of_what_is_kept() {
        let all = || {
            let mut spans = Spans::new(4).unwrap();
            spans.insert(mapped(0x1000, 0x4fff));
            spans.insert(mapped(0x8000, 0x8fff));
            spans
        };
        for (forgotten, left) in [
            (range(0x2000, 0x2fff), &[(0x1000, 0x1fff), (0x3000, 0x4fff), (0x8000, 0x8fff)][..]),
            (range(0, 0x1fff), &[(0x2000, 0x4fff), (0x8000, 0x8fff)]),
            (range(0x4000, 0x8000), &[(0x1000, 0x3fff), (0x8001, 0x8fff)]),
            (range(0x4fff, 0x8fff), &[(0x1000, 0x4ffe)]),
            (range(0x5000, 0x7fff), &[(0x1000, 0x4fff), (0x8000, 0x8fff)]),
            (range(0x9000, u64::MAX), &[(0x1000, 0x4fff), (0x8000, 0x8fff)]),
            (range(0, u64::MAX), &[]),
        ] {
            let mut spans = all();
            spans.forget(forgotten);
            assert_eq!(kept(&spans), left, "{forgotten}");
        }
    }

    #[test]
    fn a_full_iotlb_keeps_no_more_than_it_has_places_for() {
        let mut spans = Spans::new(2).unwrap();
        for n in 0..9 {
            spans.insert(mapped(n << 12, n << 12 | 0xfff));
            assert!(spans.find(range(n << 12, n << 12), READS).is_some());
            assert!(kept(&spans).len() <= 2);
        }
        let mut one = Spans::new(0).unwrap();
        one.insert(mapped(0, 0xffff));
        one.forget(range(0x4000, 0x4fff));
        assert_eq!(kept(&one), [(0, 0x3fff)]);
    }

    #[test]
    fn any_number_of_spans_is_found_whatever_came_and_went() {
        // Miri, which is hundreds of times slower, tries the last without more and one with few.
        let tried: &[usize] = if cfg!(miri) { &[32, 36] } else { &[1, 31, 32, 33, 64, 1000] };
        let steps: &[usize] = if cfg!(miri) { &[3] } else { &[1, 2, 3, 7] };
        for &places in tried {
            let mut spans = Spans::new(places).unwrap();
            let rooms = (spans.front.kept.capacity(), spans.more.kept.capacity());
            let found = |spans: &mut Spans, n: u64| {
                let at = range(n << 13 | 5, n << 13 | 0xfff);
                let kept = spans.at(at.start()).map(|run| run.paddr.get() + 5);
                assert_eq!(spans.find(at, READS).map(|span| span.paddr().get()), kept);
                assert_eq!(spans.find(range(n << 13 | 0x1000, n << 13 | 0x1000), READS), None);
                kept
            };
            for n in (0..places as u64).rev() {
                spans.insert(mapped(n << 13, n << 13 | 0xfff));
            }
            for &step in steps {
                for n in 0..places as u64 {
                    let expected = (n << 13 | 5) + 0x10_0000;
                    assert_eq!(found(&mut spans, n), Some(expected), "{n} of {places}");
                }
                for n in (0..places as u64).step_by(step) {
                    spans.forget(range(n << 13, n << 13 | 0xfff));
                    assert_eq!(found(&mut spans, n), None);
                }
                for n in (0..places as u64).step_by(step) {
                    spans.insert(mapped(n << 13, n << 13 | 0xfff));
                }
                assert_eq!(kept(&spans).len(), places);
            }
            assert_eq!((spans.front.kept.capacity(), spans.more.kept.capacity()), rooms);
        }
    }

    #[test]
    fn the_ends_of_the_space_are_addresses() {
        let mut spans = Spans::new(4).unwrap();
        let top = MappedRun {
            range: range(u64::MAX - 0xfff, u64::MAX),
            paddr: PhysAddr::new(0),
            prot: Prot::READ,
        };
        spans.insert(top);
        assert_eq!(spans.at(Iova::new(u64::MAX)).map(|run| run.range), Some(top.range));
        spans.forget(range(u64::MAX, u64::MAX));
        assert_eq!(spans.find(range(u64::MAX, u64::MAX), READS), None);
        assert_eq!(spans.at(Iova::new(u64::MAX)), None);
        assert!(spans.find(range(u64::MAX - 1, u64::MAX - 1), READS).is_some());
    }
}
