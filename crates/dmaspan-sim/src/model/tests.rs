//! The model against a plain page map, and the census against cases counted by hand.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const FOUR_K: u64 = 1 << 12 | 1 << 21 | 1 << 30;
const TOP: u64 = u64::MAX - 0xfff;

fn span(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).unwrap()
}

fn range(start: u64, last: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), Iova::new(last)).unwrap()
}

fn iova(value: u64) -> Iova {
    Iova::new(value)
}

#[test]
fn what_overlaps_is_refused_whole() {
    let mut model = IntervalModel::new();
    model.map(iova(0x3000), &[span(0x8000, 0x1000)], Prot::READ).unwrap();
    let before = model.clone();
    let error = model.map(iova(0x1000), &[span(0, 0x1000), span(0x5000, 0x1001)], Prot::READ);
    let (asked, mapped) = (range(0x2000, 0x3000), range(0x3000, 0x3fff));
    assert_eq!(error, Err(ModelError::Overlap { asked, mapped }));
    assert_eq!(model, before);
    assert!(model.map(iova(0x1000), &[span(0, 0x2000)], Prot::READ).is_ok());
    assert!(matches!(model.map(iova(0), &[], Prot::READ), Err(ModelError::Range(_))));
}

#[test]
fn the_top_page_is_mapped_found_and_unmapped() {
    let mut model = IntervalModel::new();
    model
        .map(iova(TOP - 0x1000), &[span(0x8000, 0x1000), span(0x4000, 0x1000)], Prot::READ)
        .unwrap();
    assert_eq!(model.lookup(iova(u64::MAX)), Some((PhysAddr::new(0x4fff), Prot::READ)));
    assert_eq!(model.covered(range(TOP - 0x1000, u64::MAX)), Coverage::All);
    assert_eq!(model.unmap(range(TOP + 0x800, u64::MAX)), [span(0x4800, 0x800)]);
    assert_eq!(model.covered(range(TOP, u64::MAX)), Coverage::FirstHole(iova(TOP + 0x800)));
    assert_eq!(model.unmap(range(0, u64::MAX)), [span(0x8000, 0x1000), span(0x4000, 0x800)]);
    assert!(model.is_empty());
    let wraps = model.map(iova(TOP), &[span(0, 0x1000), span(0, 1)], Prot::READ);
    assert!(matches!(wraps, Err(ModelError::Range(RangeError::Wraps { .. }))));
    assert!(model.is_empty());
}

#[test]
fn unmapping_from_the_middle_keeps_both_ends() {
    let mut model = IntervalModel::new();
    model.map(iova(0), &[span(0x1_0000, 0x3000)], Prot::READ_WRITE).unwrap();
    assert_eq!(model.unmap(range(0x1000, 0x1fff)), [span(0x1_1000, 0x1000)]);
    assert_eq!(model.lookup(iova(0xfff)), Some((PhysAddr::new(0x1_0fff), Prot::READ_WRITE)));
    assert_eq!(model.lookup(iova(0x1000)), None);
    assert_eq!(model.lookup(iova(0x2000)), Some((PhysAddr::new(0x1_2000), Prot::READ_WRITE)));
    assert_eq!(model.covered(range(0x1000, 0x1fff)), Coverage::None);
    assert_eq!(model.covered(range(0x1000, 0x2000)), Coverage::FirstHole(iova(0x1000)));
}

#[test]
fn runs_join_only_where_both_addresses_and_permissions_go_on() {
    let mut model = IntervalModel::new();
    model.map(iova(0), &[span(0x8000, 0x1000), span(0x9000, 0x1000)], Prot::READ).unwrap();
    model.map(iova(0x2000), &[span(0xa000, 0x1000)], Prot::READ_WRITE).unwrap();
    model.map(iova(0x4000), &[span(0xc000, 0x1000)], Prot::READ_WRITE).unwrap();
    // Right behind the last page, with the same permissions, but elsewhere in memory.
    model.map(iova(0x5000), &[span(0xf000, 0x1000)], Prot::READ_WRITE).unwrap();
    let ranges: Vec<_> = model.runs(range(0x800, 0x5fff)).iter().map(|run| run.iova).collect();
    let expected = [(0x800, 0x1fff), (0x2000, 0x2fff), (0x4000, 0x4fff), (0x5000, 0x5fff)];
    assert_eq!(ranges, expected.map(|(start, last)| range(start, last)));
    assert_eq!(model.runs(range(0x800, 0x800))[0].paddr, PhysAddr::new(0x8800));
}

#[test]
fn the_census_uses_the_largest_leaf_that_fits_and_no_larger() {
    let census = |at: u64, spans: &[Span]| optimal_leaf_census(iova(at), spans, FOUR_K);
    let expect = |counts: &[(u32, u64)]| Ok(counts.iter().copied().collect());
    assert_eq!(census(0, &[span(0, 1 << 30)]), expect(&[(30, 1)]));
    // The memory is not aligned to 1G, only to 2M.
    assert_eq!(census(0, &[span(2 << 20, 1 << 30)]), expect(&[(21, 512)]));
    // A page before, a block and a page behind it.
    assert_eq!(census(0x1f_f000, &[span(0x3f_f000, 0x20_2000)]), expect(&[(12, 2), (21, 1)]));
    // Neighbouring spans are one.
    let halves = [span(0x20_0000, 0x10_0000), span(0x30_0000, 0x10_0000)];
    assert_eq!(census(0x4000_0000, &halves), expect(&[(21, 1)]));
    let apart = [span(0x20_0000, 0x10_0000), span(0x50_0000, 0x10_0000)];
    assert_eq!(census(0x4000_0000, &apart), expect(&[(12, 512)]));
    // The last leaf of the space.
    assert_eq!(census(TOP - 0x1f_f000, &[span(0x20_0000, 0x20_0000)]), expect(&[(21, 1)]));
    let unaligned = CensusError::Unaligned { iova: iova(0), lg2: 12 };
    assert_eq!(census(0, &[span(0x800, 0x1000)]), Err(unaligned));
    assert_eq!(census(0, &[span(0, 0x800)]), Err(unaligned));
    assert_eq!(optimal_leaf_census(iova(0), &[span(0, 1)], 0), Err(CensusError::NoSizes));
    assert!(matches!(census(0, &[]), Err(CensusError::Range(_))));
}

#[test]
fn intermediate_sizes_are_used_where_the_bitmap_has_them() {
    let sizes = FOUR_K | 1 << 16;
    let census = optimal_leaf_census(iova(0xf000), &[span(0xf000, 0x1_2000)], sizes).unwrap();
    assert_eq!(census, [(12, 2), (16, 1)].into());
}

#[derive(Clone, Debug)]
enum Op {
    Map { page: u64, spans: Vec<(u64, u64)>, prot: Prot },
    Unmap { page: u64, pages: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let spans = prop::collection::vec((0..40u64, 1..4u64), 1..4);
    let prot = prop_oneof![Just(Prot::READ), Just(Prot::READ_WRITE)];
    prop_oneof![
        (0..32u64, spans, prot).prop_map(|(page, spans, prot)| Op::Map { page, spans, prot }),
        (0..32u64, 1..12u64).prop_map(|(page, pages)| Op::Unmap { page, pages }),
    ]
}

/// The last 32 pages of the space.
fn page_iova(page: u64) -> u64 {
    TOP - ((31 - page) << 12)
}

type Pages = HashMap<u64, (u64, Prot)>;

fn apply(model: &mut IntervalModel, pages: &mut Pages, op: Op) {
    match op {
        Op::Map { page, spans, prot } => {
            let frames: Vec<u64> = spans.iter().flat_map(|(at, len)| *at..at + len).collect();
            let spans: Vec<Span> =
                spans.iter().map(|(at, len)| span(at << 12, len << 12)).collect();
            let asked: Vec<(u64, u64)> = (page..).zip(frames).collect();
            let free = asked.iter().all(|(page, _)| *page < 32 && !pages.contains_key(page));
            let mapped = model.map(iova(page_iova(page)), &spans, prot);
            assert_eq!(mapped.is_ok(), free, "{mapped:?}");
            if free {
                pages.extend(asked.into_iter().map(|(page, frame)| (page, (frame, prot))));
            }
        }
        Op::Unmap { page, pages: count } => {
            let last = (page + count - 1).min(31);
            let mut expected = Vec::new();
            for page in page..=last {
                if let Some((frame, _)) = pages.remove(&page) {
                    expected.push(span(frame << 12, 0x1000));
                }
            }
            let spans = model.unmap(range(page_iova(page), page_iova(last) | 0xfff));
            assert_eq!(spans, coalesce(expected));
        }
    }
}

fn agrees(model: &IntervalModel, pages: &Pages) {
    for page in 0..32 {
        let expected = pages.get(&page).map(|(frame, prot)| (PhysAddr::new(frame << 12), *prot));
        assert_eq!(model.lookup(iova(page_iova(page))), expected);
        let hole = (page..32).find(|page| !pages.contains_key(page));
        let coverage = match hole {
            None => Coverage::All,
            Some(_) if (page..32).all(|page| !pages.contains_key(&page)) => Coverage::None,
            Some(hole) => Coverage::FirstHole(iova(page_iova(hole))),
        };
        assert_eq!(model.covered(range(page_iova(page), u64::MAX)), coverage);
    }
}

proptest! {
    #[test]
    fn the_model_agrees_with_a_page_map(ops in prop::collection::vec(op(), 1..40)) {
        let (mut model, mut pages) = (IntervalModel::new(), Pages::new());
        for op in ops {
            apply(&mut model, &mut pages, op);
            agrees(&model, &pages);
        }
    }

    /// Another way to count: from each address, the largest leaf that is aligned and fits.
    #[test]
    fn the_census_is_no_worse_than_taking_the_largest_leaf_at_each_step(
        start in 0..64u64,
        lens in prop::collection::vec((0..64u64, 1..80u64), 1..5),
    ) {
        let sizes = 1 << 12 | 1 << 14 | 1 << 15 | 1 << 17;
        let spans: Vec<Span> = lens.iter().map(|(at, len)| span(at << 12, len << 12)).collect();
        let joined = coalesce(spans.clone());
        let mut greedy = BTreeMap::new();
        let mut at = start << 12;
        for span in joined {
            let (mut paddr, mut left) = (span.paddr().get(), span.len());
            while left > 0 {
                let fits = |lg2: &u32| left >> lg2 > 0 && lg2::is_aligned(at | paddr, *lg2);
                let lg2 = [17, 15, 14, 12].into_iter().find(fits).unwrap();
                *greedy.entry(lg2).or_default() += 1;
                (at, paddr, left) = (at + (1 << lg2), paddr + (1 << lg2), left - (1 << lg2));
            }
        }
        prop_assert_eq!(optimal_leaf_census(iova(start << 12), &spans, sizes), Ok(greedy));
    }
}
