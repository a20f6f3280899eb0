//! A [`Gather`] collects what hardware must forget, so that a domain tells it once.

use super::ops::{HardwareError, Invalidation, Scope, Tables};
use crate::addr::Iova;
use crate::error::Errno;
use crate::io_pgtable::Retired;
use crate::range::IovaRange;

/// How many ranges a gather has places for, which are in it: nothing is allocated to unmap.
const PLACES: usize = 8;

/// Ranges without gaps between neighbours joined, up to a bound; past it, everything.
#[derive(Clone, Copy, Debug)]
struct Ranges {
    places: [IovaRange; PLACES],
    len: usize,
    bound: usize,
    overflowed: bool,
}

impl Ranges {
    #[inline]
    fn new(max_ranges: usize) -> Self {
        Self {
            places: [IovaRange::point(Iova::new(0)); PLACES],
            len: 0,
            bound: max_ranges.min(PLACES),
            overflowed: false,
        }
    }

    #[inline(always)]
    fn add(&mut self, range: IovaRange) {
        if let Some(last) = self.places[..self.len].last_mut()
            && let Some(joined) = last.join(range)
        {
            *last = joined;
        } else if self.len < self.bound {
            self.places[self.len] = range;
            self.len += 1;
        } else {
            self.overflowed = true;
        }
    }

    #[inline]
    fn scope(&self) -> Scope<'_> {
        if self.overflowed { Scope::All } else { Scope::Ranges(&self.places[..self.len]) }
    }

    /// The least range that has all of them; every address where there is nothing to tell.
    fn covering(&self) -> IovaRange {
        let (first, last) = (Iova::new(0), Iova::new(u64::MAX));
        let all = IovaRange::new(first, last).unwrap_or(IovaRange::point(first));
        match self.scope() {
            Scope::All => all,
            Scope::Ranges(ranges) => {
                let join = |one: IovaRange, other: IovaRange| {
                    let start = one.start().min(other.start());
                    IovaRange::new(start, one.last().max(other.last())).unwrap_or(all)
                };
                ranges.iter().copied().reduce(join).unwrap_or(all)
            }
        }
    }

    fn any(&self, is_so: impl Fn(IovaRange) -> bool) -> bool {
        match self.scope() {
            Scope::All => true,
            Scope::Ranges(ranges) => ranges.iter().any(|&range| is_so(range)),
        }
    }
}

/// Collects what was retired from one domain and is to be synced together.
///
/// Any number of ranges and leaf sizes go into one gather; none forces a sync in between. Past the
/// bound that the driver sets ([`IommuOps::max_ranges`](super::IommuOps::max_ranges)) it asks for
/// everything to be forgotten. Dropped, it leaks the tables in it.
#[derive(Debug)]
#[must_use = "hardware may still use what was retired: sync it"]
pub struct Gather<L> {
    ranges: Ranges,
    leaf_sizes: u64,
    pub(super) tables: Option<L>,
    /// Whether walks are to be forgotten for tables that are not in it.
    walks: Tables,
}

impl<L> Gather<L> {
    /// The most ranges that a gather names, however high the driver's bound is.
    pub const MAX_RANGES: usize = PLACES;

    /// An empty gather that names at most `max_ranges` ranges, and [`MAX_RANGES`](Self::MAX_RANGES)
    /// if that is more.
    #[inline]
    pub fn new(max_ranges: usize) -> Self {
        Self { ranges: Ranges::new(max_ranges), leaf_sizes: 0, tables: None, walks: Tables::Kept }
    }

    /// All that a domain may ever have retired, for what is not known any more; its tables leaked.
    pub(crate) fn everything() -> Self {
        let mut ranges = Ranges::new(0);
        ranges.overflowed = true;
        Self { ranges, leaf_sizes: u64::MAX, tables: None, walks: Tables::Detached }
    }

    /// Adds what an operation retired; `append` puts two lists of tables together.
    #[inline(always)]
    pub(super) fn add_with(&mut self, retired: Retired<L>, append: impl FnOnce(&mut L, L)) {
        if let Some(range) = retired.range {
            self.ranges.add(range);
        }
        self.leaf_sizes |= retired.leaf_sizes;
        self.add_tables(retired.tables, append);
    }

    /// Adds walks in a range, which lead to tables that are not in the gather.
    pub(crate) fn add_walks(&mut self, range: IovaRange) {
        self.ranges.add(range);
        self.walks = Tables::Detached;
    }

    /// Adds all of another gather.
    pub(crate) fn merge_with(&mut self, more: Self, append: impl FnOnce(&mut L, L)) {
        match more.ranges.scope() {
            Scope::All => self.ranges.overflowed = true,
            Scope::Ranges(ranges) => ranges.iter().for_each(|&range| self.ranges.add(range)),
        }
        self.leaf_sizes |= more.leaf_sizes;
        if more.walks == Tables::Detached {
            self.walks = Tables::Detached;
        }
        self.add_tables(more.tables, append);
    }

    #[inline(always)]
    fn add_tables(&mut self, more: Option<L>, append: impl FnOnce(&mut L, L)) {
        // Most often there are none, and nothing is moved.
        let Some(more) = more else { return };
        match &mut self.tables {
            Some(tables) => append(tables, more),
            tables @ None => *tables = Some(more),
        }
    }

    /// Adds ranges without tables: what a page-at-a-time unmap retires.
    ///
    /// # Errors
    ///
    /// Gives back what has tables; those go through [`Domain::gather`](super::Domain::gather).
    #[inline]
    pub fn add(&mut self, retired: Retired<L>) -> Result<(), Retired<L>> {
        if retired.has_tables() {
            return Err(retired);
        }
        self.add_with(retired, |_, _| ());
        Ok(())
    }

    /// Returns whether there is nothing to sync.
    pub fn is_empty(&self) -> bool {
        self.ranges.len == 0 && !self.ranges.overflowed && self.tables.is_none()
    }

    /// Returns what hardware must forget.
    pub fn invalidation(&self) -> Invalidation<'_> {
        Invalidation {
            scope: self.ranges.scope(),
            leaf_sizes: self.leaf_sizes,
            tables: if self.tables.is_some() { Tables::Detached } else { self.walks },
        }
    }

    /// The least range that has all of what was gathered.
    pub(super) fn covering(&self) -> IovaRange {
        self.ranges.covering()
    }

    pub(super) fn synced(&self) -> Synced {
        Synced { ranges: self.ranges }
    }
}

/// The proof that a sync happened: hardware has forgotten what was gathered.
///
/// Owners release pins and IOVAs only against it.
#[derive(Clone, Copy, Debug)]
#[must_use = "what was synced can be released now"]
pub struct Synced {
    ranges: Ranges,
}

impl Synced {
    /// That nothing but this was gathered.
    #[inline(always)]
    pub(super) fn of(range: Option<IovaRange>) -> Self {
        let mut ranges = Ranges::new(1);
        range.into_iter().for_each(|range| ranges.add(range));
        Self { ranges }
    }

    /// Returns whether the sync covered `range`.
    pub fn covers(&self, range: IovaRange) -> bool {
        self.ranges.any(|synced| synced.covers(range))
    }

    /// Returns whether the sync covered any part of `range`.
    pub fn meets(&self, range: IovaRange) -> bool {
        self.ranges.any(|synced| synced.intersection(range).is_some())
    }
}

/// A sync that hardware did not complete. What was gathered may still be in use.
///
/// Sync the gather again, or drop it: then its tables leak, and whoever owns memory that was mapped
/// there keeps it pinned for ever.
#[derive(Debug, thiserror::Error)]
#[error("the invalidation did not complete: {error}")]
pub struct SyncFailed<L> {
    /// What was not synced.
    pub gather: Gather<L>,
    /// What hardware said.
    pub error: HardwareError,
}

impl<L> SyncFailed<L> {
    /// Returns what a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        Errno::EIO
    }
}

/// What `?` makes of it, as [`Error`](super::Error) does.
impl<L> From<SyncFailed<L>> for HardwareError {
    fn from(failed: SyncFailed<L>) -> Self {
        failed.error
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    fn range(start: u64, last: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), Iova::new(last)).unwrap()
    }

    fn retired(range: IovaRange) -> Retired<()> {
        Retired { range: Some(range), leaf_sizes: 1 << 12, tables: None }
    }

    #[test]
    fn neighbouring_ranges_are_one_whichever_comes_first() {
        let mut gather = Gather::new(8);
        gather.add(retired(range(0x2000, 0x2fff))).unwrap();
        gather.add(retired(range(0x3000, 0x3fff))).unwrap();
        gather.add(retired(range(0x1000, 0x1fff))).unwrap();
        gather.add(retired(range(0x8000, u64::MAX))).unwrap();
        let expected = [range(0x1000, 0x3fff), range(0x8000, u64::MAX)];
        assert_eq!(gather.invalidation().scope, Scope::Ranges(&expected));
    }

    #[test]
    fn past_the_bound_everything_is_forgotten() {
        let mut gather = Gather::new(2);
        for n in 0..3 {
            assert!(matches!(gather.invalidation().scope, Scope::Ranges(_)));
            gather.add(retired(range(n * 0x10000, n * 0x10000))).unwrap();
        }
        assert_eq!(gather.invalidation().scope, Scope::All);
        assert!(gather.synced().covers(range(0, u64::MAX)));
    }

    #[test]
    fn merging_keeps_all_that_either_gather_has() {
        let mut gather = Gather::new(2);
        gather.add(retired(range(0, 1))).unwrap();
        let mut more = Gather::new(2);
        more.add(Retired { leaf_sizes: 1 << 21, ..retired(range(8, 9)) }).unwrap();
        gather.merge_with(more, |_, _| ());
        let expected = [range(0, 1), range(8, 9)];
        assert_eq!(gather.invalidation().scope, Scope::Ranges(&expected));
        assert_eq!(gather.invalidation().leaf_sizes, 1 << 12 | 1 << 21);
        let mut all = Gather::new(0);
        all.add(retired(range(0, 1))).unwrap();
        gather.merge_with(all, |_, _| ());
        assert_eq!(gather.invalidation().scope, Scope::All);
    }

    #[test]
    fn tables_make_an_invalidation_one_of_walks_too() {
        let mut gather = Gather::new(8);
        assert!(gather.is_empty());
        gather.add_with(Retired { tables: Some(()), ..retired(range(0, 0)) }, |_, _| ());
        assert_eq!(gather.invalidation().tables, Tables::Detached);
        assert!(gather.add(Retired { tables: Some(()), ..retired(range(0, 0)) }).is_err());
    }

    /// What a gather has to say, in other words: pages by their numbers.
    #[derive(Clone, Debug, Default)]
    struct Told {
        /// Those that are named, in their order.
        named: Vec<IovaRange>,
        all: bool,
        sizes: u64,
        walks: bool,
        tables: Option<u32>,
    }

    impl Told {
        fn name(&mut self, range: IovaRange, bound: usize) {
            if self.all {
                return;
            }
            match self.named.last().and_then(|last| last.join(range)) {
                Some(joined) => *self.named.last_mut().unwrap() = joined,
                None if self.named.len() < bound.min(PLACES) => self.named.push(range),
                None => self.all = true,
            }
        }

        fn check(&self, gather: &Gather<u32>) {
            let what = gather.invalidation();
            match what.scope {
                Scope::All => assert!(self.all),
                Scope::Ranges(ranges) => assert_eq!((ranges, self.all), (&*self.named, false)),
            }
            assert_eq!(what.leaf_sizes, self.sizes);
            assert_eq!(what.tables == Tables::Detached, self.walks || self.tables.is_some());
            assert_eq!(gather.tables, self.tables);
            let nothing = self.named.is_empty() && !self.all && self.tables.is_none();
            assert_eq!(gather.is_empty(), nothing);
            let first = self.named.iter().map(|it| it.start()).min();
            let last = self.named.iter().map(|it| it.last()).max();
            let hull = first.zip(last).filter(|_| !self.all);
            let hull = hull.and_then(|(first, last)| IovaRange::new(first, last));
            assert_eq!(gather.covering(), hull.unwrap_or(IovaRange::ALL));
            let synced = gather.synced();
            for (first, last) in
                (0..22).flat_map(|first| (first..22).map(move |last| (first, last)))
            {
                let asked = range(first, last);
                let covers = self.named.iter().any(|it| it.covers(asked));
                assert_eq!(synced.covers(asked), self.all || covers, "{asked} in {self:?}");
                let meets =
                    |it: &IovaRange| it.start() <= asked.last() && asked.start() <= it.last();
                let meets = self.named.iter().any(meets);
                assert_eq!(synced.meets(asked), self.all || meets, "{asked} in {self:?}");
            }
        }
    }

    #[test]
    fn whatever_is_added_and_merged_is_said_and_nothing_else() {
        let mut random = 1u64;
        let mut below = |n: u64| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (random >> 33) % n
        };
        for round in 0..600 {
            let bound = [0, 1, 2, 3, 8, 20][round % 6];
            let mut both = [(); 2].map(|()| (Gather::<u32>::new(bound), Told::default()));
            for step in 0..1 + below(14) {
                let (gather, told) = &mut both[usize::try_from(step % 2).unwrap()];
                let first = below(20);
                let at = range(first, first + below(3));
                match below(5) {
                    0 => {
                        gather.add_walks(at);
                        told.name(at, bound);
                        told.walks = true;
                    }
                    kind => {
                        let tables = (kind == 1).then_some(1);
                        let leaf_sizes = 1 << (12 + below(3));
                        let range = (below(8) > 0).then_some(at);
                        gather.add_with(Retired { range, leaf_sizes, tables }, |all, more| {
                            *all += more
                        });
                        range.into_iter().for_each(|at| told.name(at, bound));
                        told.sizes |= leaf_sizes;
                        if let Some(more) = tables {
                            told.tables = Some(told.tables.unwrap_or(0) + more);
                        }
                    }
                }
                told.check(gather);
            }
            let [(mut gather, mut told), (more, other)] = both;
            gather.merge_with(more, |all, more| *all += more);
            other.named.iter().filter(|_| !other.all).for_each(|&at| told.name(at, bound));
            told.all |= other.all;
            told.sizes |= other.sizes;
            told.walks |= other.walks;
            told.tables =
                told.tables.map_or(other.tables, |it| Some(it + other.tables.unwrap_or(0)));
            told.check(&gather);
        }
    }

    #[test]
    fn what_is_not_known_any_more_is_everything_with_walks() {
        let everything = Gather::<u32>::everything();
        let all = Told { all: true, sizes: u64::MAX, walks: true, ..Told::default() };
        all.check(&everything);
        let mut gather = Gather::new(8);
        gather.merge_with(everything, |_, _| ());
        all.check(&gather);
    }

    #[test]
    fn a_sync_of_one_operation_covers_its_range_and_that_of_none_nothing() {
        let synced = Synced::of(Some(range(4, 7)));
        assert!(
            synced.covers(range(4, 7)) && synced.meets(range(7, 9)) && !synced.meets(range(8, 9))
        );
        assert!(!synced.covers(range(3, 7)));
        assert!(!Synced::of(None).meets(IovaRange::ALL));
    }
}
