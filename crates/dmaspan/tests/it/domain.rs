//! Unmap, sync, release: in this order, with a device in between.

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::{Domain, IommuOps, Scope, Tables};
use dmaspan::{Iova, SpanBuf};
use dmaspan_sim::iotlb::{Iotlb, Planted};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{PROT, arena, for_all_granules, format, range, span, walker};

for_all_granules!(
    what_was_unmapped_translates_until_the_sync_and_never_after,
    a_forgotten_flush_leaves_stale_translations,
    a_dropped_unmap_syncs,
    a_failed_sync_releases_nothing_and_can_be_repeated,
    a_block_replaces_an_empty_table_through_a_sync,
    a_domain_whose_hardware_is_gone_leaks_its_tables,
    many_unmaps_are_synced_by_one_invalidation,
);

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
type SimDomain<const G: u32> = Domain<ArmLpaeS1<G>, Arena, Tlb>;

fn domain<const G: u32>() -> (SimDomain<G>, Tlb) {
    let table = PageTable::new(format::<G>(48, 48), arena()).unwrap();
    let iotlb = Iotlb::new(walker(table.format(), table.root()), table.memory().clone());
    (Domain::new(table, iotlb.clone()).unwrap(), iotlb)
}

fn map<const G: u32>(domain: &SimDomain<G>, iova: u64, paddr: u64, len: u64) {
    // SAFETY: the test alone uses the domain, and its device touches no memory.
    unsafe { domain.map_spans(Iova::new(iova), &[span(paddr, len)], PROT) }.unwrap();
}

/// How many pages of the range a device can still reach.
fn reached<const G: u32>(iotlb: &Tlb, iova: u64, len: u64) -> u64 {
    let pages = (iova..iova + len).step_by(1 << G);
    pages.filter(|&page| iotlb.translate(Iova::new(page), Access::Read).is_ok()).count() as u64
}

fn what_was_unmapped_translates_until_the_sync_and_never_after<const G: u32>() {
    let (domain, iotlb) = domain::<G>();
    let block = 1u64 << (2 * G - 3);
    // Pages in one table that is covered whole, and a block.
    for (iova, paddr, len) in [(0, 1 << G, block), (4 * block, 4 * block, block)] {
        map(&domain, iova, paddr, len);
        let pages = len >> G;
        assert_eq!(reached::<G>(&iotlb, iova, len), pages);
        let mut room = SpanBuf::room::<4>();
        let mut buf = SpanBuf::new(&mut room);
        // SAFETY: as for `map`.
        let unsynced = unsafe { domain.unmap(range(iova, len), &mut buf) }.unwrap();
        assert_eq!(reached::<G>(&iotlb, iova, len), pages, "the IOTLB keeps what it may");
        let tables = domain.memory().tables();
        let (synced, rest) = unsynced.sync().unwrap();
        assert!(rest.is_none() && synced.covers(range(iova, len)));
        assert_eq!(reached::<G>(&iotlb, iova, len), 0);
        let freed = usize::from(paddr != iova);
        assert_eq!(domain.memory().tables(), tables - freed, "tables are freed by the sync");
    }
}

fn a_forgotten_flush_leaves_stale_translations<const G: u32>() {
    for planted in [Planted::IgnoreAll, Planted::IgnoreLeaves] {
        let (domain, iotlb) = domain::<G>();
        let len = 8u64 << G;
        map(&domain, 0, 0, len);
        assert_eq!(reached::<G>(&iotlb, 0, len), 8);
        iotlb.drop_invalidations(planted);
        let mut room = SpanBuf::room::<4>();
        // SAFETY: as for `map`.
        drop(unsafe { domain.unmap(range(0, len), &mut SpanBuf::new(&mut room)) }.unwrap());
        assert_eq!(reached::<G>(&iotlb, 0, len), 8, "the missing flush shows");
        assert_eq!(iotlb.stale_leaves(range(0, len)).len(), 8);
    }
}

fn a_dropped_unmap_syncs<const G: u32>() {
    let (domain, iotlb) = domain::<G>();
    map(&domain, 0, 0, 1 << G);
    assert_eq!(reached::<G>(&iotlb, 0, 1 << G), 1);
    let mut room = SpanBuf::room::<4>();
    // SAFETY: as for `map`.
    drop(unsafe { domain.unmap(range(0, 1 << G), &mut SpanBuf::new(&mut room)) }.unwrap());
    assert_eq!(reached::<G>(&iotlb, 0, 1 << G), 0);
}

fn a_failed_sync_releases_nothing_and_can_be_repeated<const G: u32>() {
    let (domain, iotlb) = domain::<G>();
    let block = 1u64 << (2 * G - 3);
    map(&domain, 0, 1 << G, block);
    let tables = domain.memory().tables();
    let mut room = SpanBuf::room::<4>();
    // SAFETY: as for `map`.
    let unsynced = unsafe { domain.unmap(range(0, block), &mut SpanBuf::new(&mut room)) }.unwrap();
    iotlb.fail_next_invalidations(1);
    let failed = unsynced.sync().unwrap_err();
    assert_eq!(domain.memory().tables(), tables, "no table is freed without the sync");
    assert_eq!(failed.gather.invalidation().scope, Scope::Ranges(&[range(0, block)]));
    assert_eq!(failed.gather.invalidation().tables, Tables::Detached);
    // SAFETY: the gather is this domain's.
    assert!(unsafe { domain.sync(failed.gather) }.is_ok());
    assert_eq!(domain.memory().tables(), tables - 1);
}

fn a_block_replaces_an_empty_table_through_a_sync<const G: u32>() {
    let (domain, iotlb) = domain::<G>();
    let (g, block) = (1u64 << G, 1u64 << (2 * G - 3));
    map(&domain, block + g, 0, g);
    let mut room = SpanBuf::room::<4>();
    // SAFETY: as for `map`.
    drop(unsafe { domain.unmap(range(block + g, g), &mut SpanBuf::new(&mut room)) }.unwrap());
    // The walk to the empty table is cached, and must be forgotten before it is freed.
    assert_eq!(reached::<G>(&iotlb, block, block), 0);
    assert!(iotlb.cached_links() > 0);
    let tables = domain.memory().tables();
    map(&domain, block, block, block);
    assert_eq!(domain.memory().tables(), tables - 1);
    assert_eq!(iotlb.stale_links(range(0, 4 * block)), []);
    assert_eq!(reached::<G>(&iotlb, block, block), block >> G);
}

fn a_domain_whose_hardware_is_gone_leaks_its_tables<const G: u32>() {
    let (domain, iotlb) = domain::<G>();
    map(&domain, 0, 0, 1 << G);
    let memory = domain.memory().clone();
    let tables = memory.tables();
    iotlb.fail_next_invalidations(1);
    drop(domain);
    assert_eq!(memory.tables(), tables);
}

fn many_unmaps_are_synced_by_one_invalidation<const G: u32>() {
    let (domain, iotlb) = domain::<G>();
    let (g, block) = (1u64 << G, 1u64 << (2 * G - 3));
    let count = domain.ops().max_ranges() as u64 + 3;
    let mut gather = domain.gather();
    for n in 0..count {
        map(&domain, 4 * n * block, 1 << G, block + g);
    }
    for n in 0..count {
        let mut room = SpanBuf::room::<4>();
        let all = range(4 * n * block, block + g);
        // SAFETY: as for `map`.
        let unsynced = unsafe { domain.unmap(all, &mut SpanBuf::new(&mut room)) }.unwrap();
        let (more, _) = unsynced.into_gather();
        // SAFETY: both are this domain's.
        unsafe { domain.merge(&mut gather, more) };
    }
    let before = iotlb.counters();
    // SAFETY: the gather is this domain's.
    assert!(unsafe { domain.sync(gather) }.is_ok());
    let after = iotlb.counters();
    assert_eq!(after.invalidations_of_all - before.invalidations_of_all, 1);
    assert_eq!(after.invalidations_by_range, before.invalidations_by_range);
    for n in 0..count {
        assert_eq!(reached::<G>(&iotlb, 4 * n * block, block + g), 0);
    }
}
