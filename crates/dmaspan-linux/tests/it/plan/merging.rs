//! Neighbours become the fewest maps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dmaspan::{Iova, Prot};
use dmaspan_linux::Memory;
use dmaspan_linux::plan::{Plan, PlanError, Region};
use proptest::prelude::*;

use crate::plan::kernel::{RW, file, memory, page_size, x86};

/// Pieces of one page of a memory: which ones, in that order.
fn pages(of: &Arc<Memory>, which: impl IntoIterator<Item = u64>) -> Vec<Region> {
    let page = |n| Region::part(of, n * page_size(), page_size(), RW).unwrap();
    which.into_iter().map(page).collect()
}

fn maps(regions: impl IntoIterator<Item = Region>) -> usize {
    Plan::new(&x86(), regions).unwrap().maps().len()
}

#[test]
fn a_quarter_of_a_million_pieces_of_one_memory_are_one_map() {
    let (len, gib) = (262_144 * page_size(), file(262_144 * page_size()));
    let plan = Plan::new(&x86(), pages(&gib, 0..262_144)).unwrap();
    assert_eq!((plan.maps().len(), plan.bytes(), plan.regions()), (1, len, 262_144));
    let first = plan.iova_of(0).unwrap();
    assert_eq!(plan.iova_of(262_143), Some(first.wrapping_add(len - page_size())));
    assert_eq!(plan.iova_of(262_144), None);
    assert!(!gib.is_populated());
}

#[test]
fn pieces_in_any_order_are_one_map() {
    let gib = file(262_144 * page_size());
    let backward = pages(&gib, (0..262_144).rev());
    assert_eq!(maps(backward), 1);
    // 2^18 is coprime to any odd step, so this comes by every page.
    let shuffled = pages(&gib, (0..262_144).map(|n| n * 77_773 % 262_144));
    let plan = Plan::new(&x86(), shuffled).unwrap();
    assert_eq!((plan.maps().len(), plan.bytes()), (1, 262_144 * page_size()));
    let first = plan.maps()[0].iova().start();
    assert_eq!(plan.iova_of(1), Some(first.wrapping_add(77_773 * page_size())));
}

#[test]
fn every_second_piece_is_a_map_of_its_own() {
    let mib = memory(256);
    assert_eq!(maps(pages(&mib, (0..256).step_by(2))), 128);
}

#[test]
fn pieces_of_two_memories_in_turn_are_two_maps() {
    let [first, second] = [memory(64), memory(64)];
    let both = pages(&first, 0..64).into_iter().zip(pages(&second, 0..64));
    assert_eq!(maps(both.flat_map(|(a, b)| [a, b])), 2);
}

#[test]
fn pieces_for_different_uses_in_turn_stay_apart() {
    let mib = memory(64);
    let prots = [Prot::READ, Prot::WRITE].into_iter().cycle();
    let regions = pages(&mib, 0..64).into_iter().zip(prots);
    let regions = regions.map(|(region, prot)| Region { prot, ..region });
    assert_eq!(maps(regions), 64);
}

#[test]
fn repeated_and_overlapping_pieces_are_one_map() {
    let memory = memory(16);
    let part =
        |first, count| Region::part(&memory, first * page_size(), count * page_size(), RW).unwrap();
    let regions = [part(4, 4), part(0, 6), part(4, 4), part(5, 1), part(8, 8)];
    let plan = Plan::new(&x86(), regions).unwrap();
    assert_eq!((plan.maps().len(), plan.bytes()), (1, 16 * page_size()));
    assert_eq!(plan.iova_of(0), plan.iova_of(2));
    let start = plan.iova_of(1).unwrap();
    assert_eq!(plan.iova_of(3), Some(start.wrapping_add(5 * page_size())));
}

#[test]
fn pieces_smaller_than_a_page_merge_into_pages() {
    let (memory, len) = (memory(2), page_size() / 8);
    let piece = |n| Region::part(&memory, n * len, len, RW).unwrap();
    let parts = (0..16).map(piece);
    assert_eq!(maps(parts), 1);
    let parts = (0..15).map(piece);
    assert!(matches!(Plan::new(&x86(), parts), Err(PlanError::Unaligned { .. })));
}

#[test]
fn neighbours_with_iovas_merge_only_where_both_are_neighbours() {
    let memory = memory(8);
    let at = |page: u64, iova: u64| {
        Region::part(&memory, page * page_size(), page_size(), RW)
            .unwrap()
            .at(Iova::new(iova * page_size()))
    };
    assert_eq!(maps([at(3, 3), at(1, 1), at(0, 0), at(2, 2)]), 1);
    assert_eq!(maps([at(0, 0), at(1, 2)]), 2);
    assert_eq!(maps([at(0, 0), at(2, 1)]), 2);
    assert_eq!(maps([at(0, 1), at(1, 0)]), 2);
    // One page at two places.
    assert_eq!(maps([at(0, 0), at(0, 1), at(1, 2)]), 2);
    let without = Region::part(&memory, page_size(), page_size(), RW).unwrap();
    assert_eq!(maps([at(0, 0), without]), 2);
}

#[test]
fn nothing_is_no_map() {
    let plan = Plan::new(&x86(), []).unwrap();
    assert_eq!((plan.maps().len(), plan.bytes(), plan.iova_of(0)), (0, 0, None));
}

/// A piece: which memory, first page, pages, prot, and the page of its IOVA.
type Draw = (usize, u64, u64, bool, Option<u64>);

const PAGES: u64 = 12;

fn draw() -> impl Strategy<Value = Draw> {
    let place = prop_oneof![Just(None), (0..PAGES * 2).prop_map(Some)];
    let drawn = (0..2_usize, 0..PAGES, 1..4_u64, any::<bool>(), place);
    drawn.prop_map(|(memory, first, len, use_of, at)| {
        (memory, first, len.min(PAGES - first), use_of, at)
    })
}

/// What a page of a device's address space is, or what is wanted anywhere.
type Use = (usize, bool);

/// The pages that are asked for: those with an IOVA by it, and the others by memory, use and page.
struct Wanted {
    fixed: BTreeMap<u64, (Use, u64)>,
    floating: BTreeSet<(Use, u64)>,
}

/// `None` where two pieces want the same IOVA.
fn wanted(draws: &[Draw]) -> Option<Wanted> {
    let mut wanted = Wanted { fixed: BTreeMap::new(), floating: BTreeSet::new() };
    for &(memory, first, len, use_of, at) in draws {
        for page in 0..len {
            let what = ((memory, use_of), first + page);
            match at {
                Some(at) => {
                    if wanted.fixed.insert(at + page, what).is_some() {
                        return None;
                    }
                }
                None => {
                    wanted.floating.insert(what);
                }
            }
        }
    }
    Some(wanted)
}

/// The fewest maps: a page has to begin one if nothing that is wanted can come before it in its
/// map, and no other page has to.
fn fewest(wanted: &Wanted) -> usize {
    let begins_fixed = |(&at, &(use_of, page)): (&u64, &(Use, u64))| {
        let before = at.checked_sub(1).and_then(|before| wanted.fixed.get(&before));
        page == 0 || before != Some(&(use_of, page - 1))
    };
    let begins = |&&(use_of, page): &&(Use, u64)| {
        page == 0 || !wanted.floating.contains(&(use_of, page - 1))
    };
    wanted.fixed.iter().filter(|page| begins_fixed(*page)).count()
        + wanted.floating.iter().filter(begins).count()
}

fn check(memories: &[Arc<Memory>; 2], draws: &[Draw]) {
    let regions = draws.iter().map(|&(memory, first, len, use_of, at)| {
        let prot = if use_of { RW } else { Prot::READ };
        let region =
            Region::part(&memories[memory], first * page_size(), len * page_size(), prot).unwrap();
        Region { iova: at.map(|at| Iova::new(at * page_size())), ..region }
    });
    let regions: Vec<_> = regions.collect();
    let result = Plan::new(&x86(), regions.clone());
    let Some(wanted) = wanted(draws) else {
        let Err(PlanError::Overlap { regions: [a, b], .. }) = result else { panic!("{result:?}") };
        let [a, b] = [a, b].map(|n| (draws[n].4.unwrap(), draws[n].2));
        assert!(a.0 < b.0 + b.1 && b.0 < a.0 + a.1, "{a:?} {b:?}");
        return;
    };
    let plan = result.unwrap();
    assert_eq!(plan.maps().len(), fewest(&wanted));

    // What is mapped is what was wanted: no page more, none twice.
    let mut found = Wanted { fixed: BTreeMap::new(), floating: BTreeSet::new() };
    let mut iovas = BTreeSet::new();
    for map in plan.maps() {
        let memory = usize::from(Arc::ptr_eq(map.memory(), &memories[1]));
        let first = memories[memory].offset_of(map.user()).unwrap() / page_size();
        for page in 0..map.len() / page_size() {
            let what = ((memory, map.prot() == RW), first + page);
            let at = map.iova().start().get() / page_size() + page;
            assert!(iovas.insert(at), "{at} is mapped twice");
            if wanted.fixed.get(&at) == Some(&what) {
                found.fixed.insert(at, what);
            } else {
                assert!(found.floating.insert(what), "{what:?}");
            }
        }
    }
    assert_eq!((&found.fixed, &found.floating), (&wanted.fixed, &wanted.floating));

    for (n, region) in regions.iter().enumerate() {
        let iova = plan.iova_of(n).unwrap();
        assert!(region.iova.is_none_or(|wanted| wanted == iova));
        let holds = plan.maps().iter().any(|map| {
            Arc::ptr_eq(map.memory(), &region.memory)
                && map.prot() == region.prot
                && map.user().covers(region.user)
                && map.translate(region.user.start()) == Some(iova)
        });
        assert!(holds, "region {n}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn any_pieces_are_covered_exactly_by_the_fewest_maps(
        draws in prop::collection::vec(draw(), 0..8),
    ) {
        check(&[memory(PAGES), memory(PAGES)], &draws);
    }
}
