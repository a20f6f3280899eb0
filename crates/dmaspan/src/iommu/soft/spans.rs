//! The IOTLB of one device model: spans of IOVAs that lead to contiguous memory.

use alloc::vec::Vec;

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
pub(super) struct Spans {
    kept: Vec<Kept>,
    places: usize,
    /// The one that answered last, if it is there still.
    recent: usize,
    /// Which one makes room next.
    victim: usize,
}

impl Spans {
    /// Room for so many, at least one.
    pub(super) fn new(places: usize) -> Self {
        let places = places.max(1);
        Self { kept: Vec::with_capacity(places), places, recent: 0, victim: 0 }
    }

    /// Where `range` leads, if all of it is kept as one and permits the access.
    #[inline(always)]
    pub(super) fn find(&mut self, range: IovaRange, needs: Needs) -> Option<Span> {
        let (start, above) = (range.start().get(), range.len_less_one());
        let kept = match self.kept.get(self.recent) {
            Some(kept) if start.wrapping_sub(kept.start) <= kept.above => kept,
            _ => {
                self.recent = self.kept.partition_point(|kept| kept.start <= start).wrapping_sub(1);
                self.kept.get(self.recent)?
            }
        };
        let offset = start.wrapping_sub(kept.start);
        let fits = offset <= kept.above && above <= kept.above - offset;
        (fits && needs.are_met(kept.prot))
            .then(|| Span::covering(PhysAddr::new(kept.paddr + offset), above))
    }

    /// What is kept for `iova`.
    pub(super) fn at(&self, iova: Iova) -> Option<MappedRun> {
        let behind = self.kept.partition_point(|kept| kept.start <= iova.get());
        let kept = self.kept.get(behind.checked_sub(1)?)?;
        run(kept).filter(|run| run.range.contains(iova))
    }

    /// Keeps a translation, in the place of whatever was kept for its IOVAs.
    pub(super) fn insert(&mut self, run: MappedRun) {
        self.forget(run.range);
        if self.kept.len() >= self.places {
            // In turn by their order: no books of uses that a hit would have to keep.
            self.victim = if self.victim < self.kept.len() { self.victim } else { 0 };
            self.kept.remove(self.victim);
            self.victim += 1;
        }
        let kept = Kept::of(run);
        let at = self.kept.partition_point(|other| other.start < kept.start);
        self.kept.insert(at, kept);
        self.recent = at;
    }

    /// Keeps nothing of `range` any more. What reaches out of it is cut.
    pub(super) fn forget(&mut self, range: IovaRange) {
        let (first, last) = (range.start().get(), range.last().get());
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

    /// Keeps nothing any more.
    pub(super) fn clear(&mut self) {
        self.kept.clear();
    }

    /// All that is kept, in the order of IOVAs.
    pub(super) fn runs(&self) -> impl Iterator<Item = MappedRun> + '_ {
        self.kept.iter().filter_map(run)
    }
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
        spans.runs().map(ends).collect()
    }

    #[test]
    fn an_access_is_answered_only_where_one_span_has_all_of_it() {
        let mut spans = Spans::new(4);
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
            let mut spans = Spans::new(4);
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
        let mut spans = Spans::new(2);
        for n in 0..9 {
            spans.insert(mapped(n << 12, n << 12 | 0xfff));
            assert!(spans.find(range(n << 12, n << 12), READS).is_some());
            assert!(kept(&spans).len() <= 2);
        }
        let mut one = Spans::new(0);
        one.insert(mapped(0, 0xffff));
        one.forget(range(0x4000, 0x4fff));
        assert_eq!(kept(&one), [(0, 0x3fff)]);
    }

    #[test]
    fn the_ends_of_the_space_are_addresses() {
        let mut spans = Spans::new(4);
        let top = MappedRun {
            range: range(u64::MAX - 0xfff, u64::MAX),
            paddr: PhysAddr::new(0),
            prot: Prot::READ,
        };
        spans.insert(top);
        assert_eq!(spans.find(range(u64::MAX, u64::MAX), READS).unwrap().paddr().get(), 0xfff);
        spans.forget(range(u64::MAX, u64::MAX));
        assert_eq!(spans.find(range(u64::MAX, u64::MAX), READS), None);
        assert!(spans.find(range(u64::MAX - 1, u64::MAX - 1), READS).is_some());
    }
}
