//! The n-th fallible step fails, for every n: everything is as before.

use std::sync::Arc;

use dmaspan::io_pgtable::{Error, PageTable};
use dmaspan::iommu::{Domain, IommuOps};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::Arena;
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{Holes, SimMemory, SimPinner, SimSpace};

use crate::common::{
    PROT, arena, contents, for_all_granules, format, free, map, range, span, unmap, walker,
};

for_all_granules!(
    a_page_table_survives_a_failure_of_every_step,
    a_domain_survives_a_failure_of_every_step,
    a_container_survives_a_failure_of_every_step,
    unmapping_a_page_table_has_no_step_that_can_fail,
);

/// Spans of all shapes: scattered pages, blocks, a run over table borders.
fn spans<const G: u32>() -> Vec<Span> {
    let (g, block) = (1u64 << G, 1u64 << (2 * G - 3));
    vec![
        span(3 * g, g),
        span(9 * g, 2 * g),
        span(4 * block, 2 * block),
        span(16 * block - 3 * g, block),
        span(32 * block, 3 * block + 5 * g),
    ]
}

fn a_page_table_survives_a_failure_of_every_step<const G: u32>() {
    let faults = Faults::none();
    let memory = arena();
    let tables = Faulty::new(memory.clone(), &faults);
    let mut table = PageTable::new(format::<G>(48, 48), tables).unwrap();
    let (g, block) = (1u64 << G, 1u64 << (2 * G - 3));
    // Part of the tables exist: entries are stored before the first table is found missing.
    let start = 7 * block - 2 * g;
    map(&mut table, start - g, &[span(g, g)], PROT).unwrap();
    let (before, tables) = (contents(&mut table), memory.tables());
    let steps = faults.sweep(|n| {
        let result = map(&mut table, start, &spans::<G>(), PROT);
        match result {
            Ok(()) => {
                let len = spans::<G>().iter().map(|span| span.len()).sum();
                assert_eq!(unmap(&mut table, range(start, len)).unwrap(), spans::<G>());
                let retired = table.whole().reclaim(range(start, 1 << 47)).unwrap();
                free(&table, retired);
            }
            Err(error) => assert!(matches!(error, Error::NoTables { .. }), "step {n}: {error}"),
        }
        assert_eq!(contents(&mut table), before, "step {n}");
        assert_eq!(memory.tables(), tables, "step {n}");

        let (bytes, result) =
            table.whole().map_pages(Iova::new(start), PhysAddr::new(0), g, 3 * block / g, PROT);
        if let Err(error) = result {
            assert!(matches!(error, Error::NoTables { .. }));
        }
        // Partial progress is the caller's to unmap.
        if bytes > 0 {
            let unmapped = table.whole().unmap_pages(Iova::new(start), g, bytes / g);
            assert_eq!((unmapped.bytes, unmapped.result), (bytes, Ok(())));
            free(&table, unmapped.retired);
        }
        if result.is_ok() {
            let retired = table.whole().reclaim(range(start, 1 << 47)).unwrap();
            free(&table, retired);
        }
        assert_eq!(contents(&mut table), before, "step {n}");
        assert_eq!(memory.tables(), tables, "step {n}");
    });
    assert_eq!(steps, 2, "one reservation each");
}

fn unmapping_a_page_table_has_no_step_that_can_fail<const G: u32>() {
    let faults = Faults::none();
    let memory = arena();
    let tables = Faulty::new(memory.clone(), &faults);
    let mut table = PageTable::new(format::<G>(48, 48), tables).unwrap();
    let len: u64 = spans::<G>().iter().map(|span| span.len()).sum();
    map(&mut table, 0, &spans::<G>(), PROT).unwrap();
    faults.arm(1);
    assert_eq!(unmap(&mut table, range(0, len)).unwrap(), spans::<G>());
    let retired = table.whole().reclaim(table_range()).unwrap();
    free(&table, retired);
    assert_eq!(faults.disarm(), dmaspan_sim::fault::Fired::No);
    drop(table);
    assert_eq!(memory.tables(), 0);
}

fn table_range() -> IovaRange {
    range(0, 1 << 48)
}

/// A domain over a simulated IOMMU, with faults in its tables and its invalidations.
pub(crate) type FaultyDomain<const G: u32> = Domain<
    dmaspan::io_pgtable::ArmLpaeS1<G>,
    Faulty<Arena>,
    Faulty<Iotlb<dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker, Arena>>,
>;

pub(crate) fn faulty_domain<const G: u32>(
    faults: &Faults,
) -> (FaultyDomain<G>, Arena, Iotlb<dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker, Arena>) {
    let memory = arena();
    let table = PageTable::new(format::<G>(48, 48), Faulty::new(memory.clone(), faults)).unwrap();
    let iotlb = Iotlb::new(walker(table.format(), table.root()), memory.clone());
    let domain = Domain::new(table, Faulty::new(iotlb.clone(), faults)).unwrap();
    (domain, memory, iotlb)
}

fn a_domain_survives_a_failure_of_every_step<const G: u32>() {
    let faults = Faults::none();
    let (domain, memory, iotlb) = faulty_domain::<G>(&faults);
    let g = 1u64 << G;
    // A neighbour in the same table, and a collision behind it that is found late.
    // SAFETY: nobody else uses the domain, and its device touches no memory.
    unsafe { domain.map_spans(Iova::new(0), &[span(0, g)], PROT) }.unwrap();
    // SAFETY: as above.
    unsafe { domain.map_spans(Iova::new(64 * g), &[span(0, g)], PROT) }.unwrap();
    let tables = memory.tables();
    let mut done = 0;
    let steps = faults.sweep(|n| {
        for (iova, len) in [(g, 4 * g), (g, 64 * g)] {
            let spans = [span(g, g), span(4 * g, len - g)];
            // SAFETY: as above.
            match unsafe { domain.map_spans(Iova::new(iova), &spans, PROT) } {
                Ok(()) => {
                    assert_eq!(len, 4 * g, "the other one collides");
                    let mut room = dmaspan::SpanBuf::room::<4>();
                    let mut buf = dmaspan::SpanBuf::new(&mut room);
                    // SAFETY: as above.
                    let unsynced = unsafe { domain.unmap(range(iova, len), &mut buf) }.unwrap();
                    assert_eq!(buf.spans(), spans);
                    if let Err(failed) = unsynced.sync() {
                        // SAFETY: the gather is this domain's.
                        let again = unsafe { domain.sync(failed.gather) };
                        assert!(again.is_ok(), "step {n}: only once");
                    }
                    done += 1;
                }
                Err(failed) => {
                    // Taken back, and where that was not confirmed the caller is told.
                    if let Some(gather) = failed.unsynced {
                        // SAFETY: the gather is this domain's.
                        assert!(unsafe { domain.sync(gather) }.is_ok());
                    }
                }
            }
            assert_eq!(memory.tables(), tables, "step {n}");
            assert_eq!(iotlb.stale_leaves(range(0, 1 << 40)), []);
        }
    });
    assert!(steps >= 3 && done > 0, "{steps} steps, {done} times through");
}

const USER: u64 = 0x7f00_0000_0000;

fn a_container_survives_a_failure_of_every_step<const G: u32>() {
    let faults = Faults::none();
    for holes in [Holes::FoundFirst, Holes::FoundOnTheWay] {
        let (domain, memory, _iotlb) = faulty_domain::<G>(&faults);
        let bytes = 1600u64 << G;
        let physical = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 4 * bytes, G).unwrap());
        let space = SimSpace::new(Arc::clone(&physical));
        // More spans than a batch has, so that some are mapped when a later step fails.
        let spans = physical.allocate_scattered(bytes, 7).unwrap();
        assert!(spans.len() > 300);
        let user = space.map(UserAddr::new(USER), &spans).unwrap();
        let hole = UserRange::new(user.start(), user.last().wrapping_add(1 << G)).unwrap();
        let account = dmaspan::Account::new(u64::MAX);
        let pinner = Faulty::new(SimPinner::new(Arc::clone(&physical)).with_holes(holes), &faults);
        let container = dmaspan::Container::<_, parking_lot::RawMutex>::new(
            pinner,
            domain,
            Arc::clone(&account),
        );
        let neighbour = space
            .map(UserAddr::new(1 << 30), &physical.allocate_scattered(1 << G, 9).unwrap())
            .unwrap();
        let first = Iova::new(3 << G);
        container.map(&space, neighbour, first, Prot::READ).unwrap();
        let tables = memory.tables();
        let before = (container.census(), physical.pinned_frames(), account.used());
        let mut through = 0;
        let steps = faults.sweep(|n| {
            let iova = Iova::new(9 << G);
            if container.map(&space, user, iova, PROT).is_ok() {
                through += 1;
                let range = IovaRange::from_len(iova, bytes).unwrap();
                let stays = faults.disarm();
                assert_eq!(container.unmap(range).unwrap(), bytes);
                if stays == dmaspan_sim::fault::Fired::No {
                    faults.arm(1 << 30);
                }
            }
            assert!(container.map(&space, hole, Iova::new(1 << 44), PROT).is_err(), "a hole");
            let now = (container.census(), physical.pinned_frames(), account.used());
            // An invalidation that fails while a map is taken back keeps its memory for ever; every
            // other step leaves nothing.
            if container.mappings() == 1 {
                assert_eq!(now, before, "step {n}");
                assert_eq!(memory.tables(), tables, "step {n}");
            }
            assert_eq!(physical.violations(), [], "step {n}");
        });
        assert!(steps > 300, "{steps} steps");
        assert!(through > 0);
        drop(container);
        assert_eq!(physical.violations(), []);
    }
}

#[test]
fn the_injected_invalidation_failure_reaches_the_hooks() {
    let faults = Faults::none();
    let (domain, ..) = faulty_domain::<12>(&faults);
    faults.arm(1);
    assert!(domain.ops().sync_map(range(0, 4096)).is_err());
}
