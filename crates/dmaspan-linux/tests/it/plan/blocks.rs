//! Maps that are planned together share blocks of IOVAs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use dmaspan::space::Limits;
use dmaspan::{DmaSpace, Iova, IovaRange};
use dmaspan_linux::Memory;
use dmaspan_linux::plan::{MapError, MappedRegions, Mapper, Plan, PlanError, PlannedMap, Region};
use proptest::prelude::*;

use crate::plan::kernel::{Kernel, RW, file, g1, m2, memory, page_size, x86};

/// Where parts of [`Rig::memory`] lie in it, their lengths, and where they lie in their block.
fn parts() -> [(u64, u64, u64); 4] {
    [
        (0, page_size(), 0),
        (m2(), m2(), m2()),
        (3 * m2(), m2(), 2 * m2()),
        (5 * m2() + page_size(), 2 * m2() - page_size(), 3 * m2() + page_size()),
    ]
}
/// The second and the third part are neighbours, and unmapped at once.
const UNMAPS: u64 = 3;

struct Rig {
    kernel: Arc<Kernel>,
    mapper: Mapper<Kernel>,
    memory: Arc<Memory>,
}

impl Rig {
    fn new() -> Self {
        let kernel = Kernel::new(x86());
        let mapper = Mapper::shared(kernel.clone()).unwrap();
        Self { kernel, mapper, memory: file(8 * m2()) }
    }

    fn map(&self) -> MappedRegions<Kernel> {
        let part = |(offset, len, _)| Region::part(&self.memory, offset, len, RW).unwrap();
        self.mapper.map(parts().map(part)).unwrap()
    }

    fn is_free(&self, iova: u64) -> bool {
        self.mapper.plan([Region::whole(&memory(1), RW).at(Iova::new(iova))]).is_ok()
    }
}

/// Where the block begins whose maps are at these places.
fn start_of(mapped: &MappedRegions<Kernel>) -> u64 {
    let start = mapped.iova(0).unwrap().get();
    for (region, (_, _, at)) in parts().into_iter().enumerate() {
        assert_eq!(mapped.iova(region), Some(Iova::new(start + at)));
    }
    assert!(start.is_multiple_of(m2()));
    start
}

#[test]
fn a_block_goes_back_when_all_of_it_is_unmapped_in_whatever_order() {
    let rig = Rig::new();
    let start = start_of(&rig.map());
    // A bit for each unmap that fails at first, and is made later.
    for failing in 0..1_u64 << UNMAPS {
        let mapped = rig.map();
        assert_eq!(start_of(&mapped), start, "it was given back");
        let before = rig.kernel.state().unmap_calls;
        rig.kernel.state().failing_unmaps =
            (0..UNMAPS).filter(|n| failing >> n & 1 != 0).map(|n| n + 1).collect();
        let result = mapped.unmap();
        assert_eq!(rig.kernel.state().unmap_calls, before + UNMAPS);
        if let Err(unmapped) = result {
            // Also what lies between the maps, and those that are unmapped.
            assert!(!rig.is_free(start) && !rig.is_free(start + page_size()));
            assert!(!rig.is_free(start + 2 * m2()) && !rig.is_free(start + 4 * m2()));
            let beside = rig.map();
            assert!(start_of(&beside) > start + 4 * m2());
            drop(beside);
            unmapped.left.unmap().unwrap();
        }
        assert!(rig.kernel.is_empty());
    }
    assert_eq!((rig.mapper.mapped_bytes(), rig.mapper.leaked_bytes()), (0, 0));
}

#[test]
fn one_map_that_is_leaked_keeps_the_iovas_of_its_block_and_its_own_memory() {
    for (failing, leaked) in [(1, page_size()), (2, 2 * m2()), (3, 2 * m2() - page_size())] {
        let mut rig = Rig::new();
        let mapped = rig.map();
        let start = start_of(&mapped);
        rig.kernel.state().failing_unmaps = vec![failing];
        drop(mapped);
        assert_eq!((rig.mapper.mapped_bytes(), rig.mapper.leaked_bytes()), (0, leaked));
        for (_, len, at) in parts() {
            assert!(!rig.is_free(start + at) && !rig.is_free(start + at + len - page_size()));
        }
        assert!(rig.is_free(start - page_size()) && rig.is_free(start + 5 * m2()));
        assert!(start_of(&rig.map()) > start);
        let weak = Arc::downgrade(&rig.memory);
        rig.memory = memory(1);
        rig.kernel.state().entries.clear();
        assert!(weak.upgrade().is_some());
    }
}

#[test]
fn a_space_that_panics_gets_nothing_of_the_block_again() {
    for n in 1..=4 {
        let rig = Rig::new();
        rig.kernel.state().failing_map = Some(n);
        rig.kernel.state().panics = true;
        assert!(catch_unwind(AssertUnwindSafe(|| rig.map())).is_err());
        assert!(rig.kernel.is_empty(), "what was mapped before is unmapped");
        assert_eq!(rig.mapper.mapped_bytes(), 0);
        // Nobody knows whether that one was mapped.
        assert!(parts().iter().all(|(_, _, at)| !rig.is_free(m2() + at)));
        assert!(start_of(&rig.map()) > 4 * m2());
    }
}

#[test]
fn where_a_block_does_not_fit_its_maps_are_placed_one_by_one() {
    let range =
        |first: u64| IovaRange::from_len(Iova::new(first * page_size()), 4 * page_size()).unwrap();
    let apertures = vec![range(16), range(32)];
    let kernel = Kernel::new(Limits { apertures, ..x86() });
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memories: Vec<_> = (0..9).map(|_| memory(1)).collect();
    let regions = |count| memories.iter().take(count).map(|of| Region::whole(of, RW));
    let error = mapper.map(regions(9)).unwrap_err();
    assert!(matches!(error, MapError::Plan(PlanError::NoRoom { .. })), "{error}");
    for _ in 0..3 {
        let mapped = mapper.map(regions(8)).unwrap();
        let entries = kernel.entries();
        let pages = entries.iter().map(|entry| entry.iova.start().get() / page_size());
        assert_eq!(pages.collect::<Vec<_>>(), [16, 17, 18, 19, 32, 33, 34, 35]);
        mapped.unmap().unwrap();
    }
}

#[test]
fn maps_of_more_than_a_gib_lie_side_by_side() {
    let large = file(3 * g1());
    let mib = 1 << 20;
    let parts = (0..1536).map(|n| Region::part(&large, 2 * n * mib, mib, RW).unwrap());
    let plan = Plan::new(&x86(), parts).unwrap();
    assert_eq!((plan.maps().len(), plan.bytes()), (1536, 1536 * mib));
    let apart = |pair: &[PlannedMap]| pair[0].iova().last() < pair[1].iova().start();
    assert!(plan.maps().windows(2).all(apart));
    let first = plan.maps()[0].iova();
    assert!(plan.maps().iter().all(|map| map.iova().last().get() - first.start().get() < 2 * g1()));
}

/// A part of a memory: first page and pages; and whether it says where it wants to be, from which
/// page on.
fn draw() -> impl Strategy<Value = (u64, u64, Option<u64>)> {
    let pages = prop_oneof![1..4_u64, 500..1600_u64];
    let at = prop_oneof![4 => Just(None), 1 => (0..8192_u64).prop_map(Some)];
    (0..16_384_u64, pages, at)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn maps_in_blocks_permit_the_largest_leaves_and_never_meet(
        draws in prop::collection::vec(draw(), 1..40),
    ) {
        let large = file(18_000 * page_size());
        let regions: Vec<_> = draws
            .iter()
            .map(|&(first, pages, at)| {
                let (offset, len) = (first * page_size(), pages * page_size());
                let region = Region::part(&large, offset, len, RW).unwrap();
                Region { iova: at.map(|at| Iova::new(at * page_size())), ..region }
            })
            .collect();
        let kernel = Kernel::new(x86());
        let mapper = Mapper::shared(kernel.clone()).unwrap();
        let planned = match mapper.plan(regions.clone()) {
            Err(PlanError::Overlap { .. }) => return Ok(()),
            result => result.unwrap(),
        };
        let fixed: Vec<_> = regions.iter().filter_map(|region| region.iova).collect();
        for map in planned.maps() {
            if fixed.contains(&map.iova().start()) {
                continue;
            }
            let (start, behind) = (map.user().start().get(), map.user().last().get() + 1);
            let fits = |leaf: &u64| start.next_multiple_of(*leaf) + leaf <= behind;
            let leaf = [g1(), m2(), page_size()].into_iter().find(fits).unwrap();
            let iova = map.iova().start().get();
            prop_assert_eq!((iova ^ start) & (leaf - 1), 0, "{:#x} {:#x}", iova, start);
        }
        // The space refuses what overlaps.
        for map in planned.maps() {
            kernel.map(&large, map.user(), map.iova().start(), map.prot()).unwrap();
        }
        prop_assert_eq!(kernel.entries().len(), planned.maps().len());
    }
}
