//! Any sequence of operations leaves what an interval map would.

use dmaspan::io_pgtable::{ArmLpaeS1, Error, Format, PageTable};
use dmaspan::{Iova, PhysAddr, Prot, Span};
use dmaspan_sim::model::{Coverage, IntervalModel, optimal_leaf_census};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::common::{
    arena, for_all_granules, free, map_over_empty_tables, range, unmap_by, walker, with_groups,
};

for_all_granules!(
    random_operations_agree_with_an_interval_map,
    random_operations_with_groups_agree_with_an_interval_map,
    every_mapping_has_the_fewest_leaves,
);

/// One operation, in granules from the start of a window that spans several tables of every level.
#[derive(Clone, Debug)]
enum Op {
    Map { at: u64, spans: Vec<(u64, u64)>, prot: Prot },
    MapPages { at: u64, paddr: u64, count: u64, prot: Prot },
    Unmap { at: u64, len: u64 },
    UnmapPages { at: u64, len: u64 },
    Reclaim { at: u64, len: u64 },
}

/// Granules that operations can reach: five tables to begin in, and five spans of up to three more.
fn window(granule_lg2: u32) -> u64 {
    22 << (granule_lg2 - 3)
}

/// Lengths that are small, or near the size of a table.
fn len(granule_lg2: u32) -> impl Strategy<Value = u64> {
    let table = 1u64 << (granule_lg2 - 3);
    prop_oneof![4 => 1..20u64, 2 => table - 3..table + 3, 1 => 1..3 * table]
}

fn prot() -> impl Strategy<Value = Prot> {
    prop_oneof![Just(Prot::READ), Just(Prot::READ_WRITE), Just(Prot::READ_WRITE | Prot::CACHE)]
}

/// Places that are anywhere, or at the start of a table.
fn at(granule_lg2: u32) -> impl Strategy<Value = u64> {
    let table = 1u64 << (granule_lg2 - 3);
    prop_oneof![3 => 0..5 * table, 2 => (0..5u64).prop_map(move |n| n * table)]
}

fn op(granule_lg2: u32) -> impl Strategy<Value = Op> {
    let (at, len) = (move || at(granule_lg2), move || len(granule_lg2));
    let spans = proptest::collection::vec((at(), len()), 1..6);
    prop_oneof![
        3 => (at(), spans, prot()).prop_map(|(at, spans, prot)| Op::Map { at, spans, prot }),
        2 => (at(), at(), len(), prot())
            .prop_map(|(at, paddr, count, prot)| Op::MapPages { at, paddr, count, prot }),
        3 => (at(), len()).prop_map(|(at, len)| Op::Unmap { at, len }),
        2 => (at(), len()).prop_map(|(at, len)| Op::UnmapPages { at, len }),
        1 => (at(), len()).prop_map(|(at, len)| Op::Reclaim { at, len }),
    ]
}

/// A table, and what it should say.
struct Pair<const G: u32> {
    table: PageTable<ArmLpaeS1<G>, dmaspan_sim::Arena>,
    model: IntervalModel,
    base: u64,
}

impl<const G: u32> Pair<G> {
    fn new(format: ArmLpaeS1<G>) -> Self {
        // The window lies around a border between tables of the top level but one.
        let border = 1u64 << (3 * G - 6);
        let base = (border - (2 << (2 * G - 3))) & !((1 << (2 * G - 3)) - 1);
        let table = PageTable::new(format, arena()).unwrap();
        Self { table, model: IntervalModel::new(), base }
    }

    fn iova(&self, at: u64) -> u64 {
        self.base + (at << G)
    }

    fn range(&self, at: u64, len: u64) -> dmaspan::IovaRange {
        range(self.iova(at), len << G)
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Map { at, spans, prot } => {
                let spans: Vec<Span> = spans
                    .iter()
                    .map(|&(p, n)| Span::new(PhysAddr::new(p << G), n << G).unwrap())
                    .collect();
                let iova = self.iova(*at);
                let expected = self.model.map(Iova::new(iova), &spans, *prot);
                let result = map_over_empty_tables(&mut self.table, iova, &spans, *prot);
                match result {
                    Ok(()) => assert!(expected.is_ok()),
                    Err(error) => {
                        assert!(matches!(error, Error::Occupied { .. }), "{error}");
                        assert!(expected.is_err());
                    }
                }
            }
            Op::MapPages { at, paddr, count, prot } => self.map_pages(*at, *paddr, *count, *prot),
            Op::Unmap { at, len } => self.unmap(*at, *len),
            Op::UnmapPages { at, len } => self.unmap_pages(*at, *len),
            Op::Reclaim { at, len } => {
                let range = self.range(*at, *len);
                let retired = self.table.whole().reclaim(range).unwrap();
                free(&self.table, retired);
            }
        }
    }

    fn map_pages(&mut self, at: u64, paddr: u64, count: u64, prot: Prot) {
        let (iova, paddr) = (Iova::new(self.iova(at)), PhysAddr::new(paddr << G));
        let (bytes, result) = self.table.whole().map_pages(iova, paddr, 1 << G, count, prot);
        let free_pages = match self.model.covered(self.range(at, count)) {
            Coverage::None => count,
            _ => (0..count)
                .find(|n| self.model.lookup(Iova::new(self.iova(at + n))).is_some())
                .unwrap_or(count),
        };
        if result.is_ok() {
            assert_eq!((bytes, free_pages), (count << G, count));
        } else {
            // Tables that are missing behind a collision are not made, so it may stop before it.
            assert!(bytes <= free_pages << G && free_pages < count, "{result:?}");
        }
        if bytes > 0 {
            self.model.map(iova, &[Span::new(paddr, bytes).unwrap()], prot).unwrap();
        }
    }

    /// Whether a leaf reaches over one end of the range: then it cannot be unmapped.
    fn is_cut(&mut self, at: u64, len: u64) -> bool {
        let range = self.range(at, len);
        let cuts = |table: &mut PageTable<ArmLpaeS1<G>, dmaspan_sim::Arena>, iova: u64| {
            let (before, behind) = (Iova::new(iova - 1), Iova::new(iova));
            let whole = table.whole();
            let one = |iova: Iova| whole.census(dmaspan::IovaRange::new(before, iova).unwrap());
            whole.iova_to_phys(before).is_some()
                && whole.iova_to_phys(behind).is_some()
                && one(behind).total() == one(before).total()
        };
        cuts(&mut self.table, range.start().get())
            || cuts(&mut self.table, range.last().get().wrapping_add(1))
    }

    fn unmap(&mut self, at: u64, len: u64) {
        let range = self.range(at, len);
        let covered = self.model.covered(range);
        let cut = self.is_cut(at, len);
        match unmap_by::<3, _, _>(&mut self.table, range) {
            Ok(spans) => {
                assert_eq!(covered, Coverage::All);
                assert!(!cut);
                let expected = self.model.unmap(range);
                let coalesced = expected.iter().fold(Vec::new(), |mut all, &span| {
                    dmaspan::pin::SpanSink::push(&mut all, span).unwrap();
                    all
                });
                assert_eq!(spans, coalesced);
            }
            Err(Error::Hole { hole }) => {
                assert!(self.model.lookup(hole.start()).is_none());
                assert_ne!(covered, Coverage::All);
            }
            Err(Error::WouldSplit { leaf }) => {
                assert!(cut && !range.covers(leaf) && range.intersection(leaf).is_some());
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn unmap_pages(&mut self, at: u64, len: u64) {
        let range = self.range(at, len);
        let unmapped = self.table.whole().unmap_pages(range.start(), 1 << G, len);
        free(&self.table, unmapped.retired);
        if unmapped.bytes > 0 {
            let gone = crate::common::range(range.start().get(), unmapped.bytes);
            assert_eq!(self.model.covered(gone), Coverage::All);
            self.model.unmap(gone);
        }
        let next = Iova::new(range.start().get() + unmapped.bytes);
        match unmapped.result {
            Ok(()) => assert_eq!(unmapped.bytes, len << G),
            Err(Error::Hole { hole }) => {
                assert!(hole.contains(next));
                assert!(self.model.lookup(next).is_none());
            }
            Err(Error::WouldSplit { leaf }) => assert!(leaf.contains(next) && !range.covers(leaf)),
            Err(error) => panic!("{error}"),
        }
    }

    /// The table, the independent walker and the model say the same.
    fn check(&mut self) {
        let window = self.range(0, window(G));
        let runs: Vec<_> = self.table.whole().walk(window).collect();
        let expected = self.model.runs(window);
        assert_eq!(runs.len(), expected.len());
        for (found, expected) in runs.iter().zip(&expected) {
            assert_eq!(
                (found.range, found.paddr, found.prot),
                (expected.iova, expected.paddr, expected.prot)
            );
        }
        let walker = walker(self.table.format(), self.table.root());
        let mut mapped = 0;
        walker
            .survey(self.table.memory(), window, |translation| {
                let at = translation.iova;
                assert_eq!(
                    self.model.lookup(at),
                    Some((translation.paddr, translation.prot)),
                    "as the manual reads it"
                );
                mapped += translation.leaf.len_less_one() + 1;
            })
            .unwrap();
        let total: u64 = expected.iter().map(|run| run.iova.len_less_one() + 1).sum();
        assert_eq!(mapped, total);
    }
}

fn run<const G: u32>(cases: u32, format: impl Fn() -> ArmLpaeS1<G>) {
    let ops = proptest::collection::vec(op(G), 1..40);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&ops, |ops| {
            let mut pair = Pair::<G>::new(format());
            let memory = pair.table.memory().clone();
            for op in &ops {
                pair.apply(op);
            }
            pair.check();
            drop(pair);
            assert_eq!(memory.tables(), 0, "tables leaked");
            Ok(())
        })
        .unwrap();
}

fn random_operations_agree_with_an_interval_map<const G: u32>() {
    run::<G>(1500, || crate::common::format(48, 48));
}

fn random_operations_with_groups_agree_with_an_interval_map<const G: u32>() {
    run::<G>(700, with_groups);
}

fn every_mapping_has_the_fewest_leaves<const G: u32>() {
    let spans = || proptest::collection::vec((at(G), len(G)), 1..8);
    let config = Config { cases: 600, failure_persistence: None, ..Config::default() };
    for format in [crate::common::format::<G>(48, 48), with_groups::<G>()] {
        TestRunner::new(config.clone())
            .run(&(at(G), spans(), any::<bool>()), |(at, spans, congruent)| {
                let mut pair = Pair::<G>::new(format.clone());
                let iova = pair.iova(at);
                let mut next = iova;
                let spans: Vec<Span> = spans
                    .iter()
                    .map(|&(p, n)| {
                        // Half of the cases have memory that is aligned as its IOVAs are.
                        let paddr = if congruent { next + (p << (2 * G - 3)) } else { p << G };
                        next += n << G;
                        Span::new(PhysAddr::new(paddr), n << G).unwrap()
                    })
                    .collect();
                crate::common::map(&mut pair.table, iova, &spans, Prot::READ).unwrap();
                let page_sizes = pair.table.format().geometry().page_sizes;
                let expected = optimal_leaf_census(Iova::new(iova), &spans, page_sizes).unwrap();
                let census = crate::common::contents(&mut pair.table).1;
                assert_eq!(census, expected.into_iter().collect::<Vec<_>>());
                Ok(())
            })
            .unwrap();
    }
}
