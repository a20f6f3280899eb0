//! The IOTLB keeps and forgets entries when it should. The tables are 4K ones of three levels at
//! 0x1000, 0x2000 and 0x3000, written by hand.

use dmaspan::iommu::{Invalidation, IommuOps, Scope, Tables};
use dmaspan::{Iova, IovaRange, PhysAddr};
use proptest::prelude::*;

use super::leaves::PackedLeaf;
use super::*;
use crate::walker::TableImage;
use crate::walker::arm_lpae::{ArmLpaeS1Walker, ArmS1WalkRegisters};

type TestIotlb = Iotlb<ArmLpaeS1Walker, Arc<TableImage>>;

const PAGE: u64 = 0x747;
const READ_ONLY: u64 = 0x7c7;
const TCR: u64 = 5 << 32 | 25;
/// TCR with hardware access flag and dirty state.
const TCR_DIRTY: u64 = TCR | 3 << 39;

fn iotlb_with(tcr: u64, config: IotlbConfig) -> TestIotlb {
    let image = Arc::new(TableImage::new());
    for table in [0x1000, 0x2000, 0x3000] {
        image.add_table(PhysAddr::new(table), 512);
    }
    let registers = ArmS1WalkRegisters { ttbr: 0x1000, tcr, mair: 0xff00, ..Default::default() };
    let iotlb = Iotlb::with_config(ArmLpaeS1Walker::new(registers).unwrap(), image, config);
    set(&iotlb, 0x1000, 0x2003);
    set(&iotlb, 0x2000, 0x3003);
    iotlb
}

fn iotlb() -> TestIotlb {
    iotlb_with(TCR, IotlbConfig::default())
}

fn set(iotlb: &TestIotlb, paddr: u64, word: u64) {
    iotlb.tables().set(PhysAddr::new(paddr), word).unwrap();
}

fn read(iotlb: &TestIotlb, iova: u64) -> Result<u64, FaultKind> {
    let hit = iotlb.translate(Iova::new(iova), Access::Read);
    hit.map(|hit| hit.paddr.get()).map_err(|fault| fault.kind)
}

fn write(iotlb: &TestIotlb, iova: u64) -> Result<u64, FaultKind> {
    let hit = iotlb.translate(Iova::new(iova), Access::Write);
    hit.map(|hit| hit.paddr.get()).map_err(|fault| fault.kind)
}

fn range(start: u64, last: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), Iova::new(last)).unwrap()
}

fn whole() -> IovaRange {
    range(0, u64::MAX)
}

fn invalidate(iotlb: &TestIotlb, ranges: &[IovaRange], tables: Tables) {
    invalidate_sizes(iotlb, ranges, 1 << 12, tables);
}

fn invalidate_sizes(iotlb: &TestIotlb, ranges: &[IovaRange], leaf_sizes: u64, tables: Tables) {
    let scope = Scope::Ranges(ranges);
    iotlb.invalidate(&Invalidation { scope, leaf_sizes, tables }).unwrap();
}

#[test]
fn a_leaf_survives_in_the_iotlb_until_its_range_is_invalidated() {
    let iotlb = iotlb();
    set(&iotlb, 0x3008, 0x8000 | PAGE);
    assert_eq!(read(&iotlb, 0x1234), Ok(0x8234));
    set(&iotlb, 0x3008, 0);
    assert_eq!(read(&iotlb, 0x1fff), Ok(0x8fff));
    // The pages on both sides are not this one.
    invalidate(&iotlb, &[range(0, 0xfff), range(0x2000, 0x2fff)], Tables::Kept);
    assert_eq!(read(&iotlb, 0x1000), Ok(0x8000));
    // One byte of it is enough.
    invalidate(&iotlb, &[range(0x1fff, 0x1fff)], Tables::Kept);
    assert_eq!(read(&iotlb, 0x1000), Err(FaultKind::Translation));
    assert_eq!(iotlb.counters().leaves_dropped, 1);
}

#[test]
fn a_cached_walk_leads_into_a_detached_table_unless_tables_are_invalidated() {
    let iotlb = iotlb();
    set(&iotlb, 0x3000, 0x8000 | PAGE);
    assert!(read(&iotlb, 0).is_ok());
    // The table of level 3 is detached, and its memory gets another use.
    set(&iotlb, 0x2000, 0);
    set(&iotlb, 0x3000, 0xbad_0000 | PAGE);
    invalidate(&iotlb, &[range(0, 0x1f_ffff)], Tables::Kept);
    assert_eq!(read(&iotlb, 0), Ok(0xbad_0000));
    assert_eq!(iotlb.counters().walks_from_link, 1);
    assert_eq!(iotlb.stale_links(whole()).len(), 1);
    invalidate(&iotlb, &[range(0, 0x1f_ffff)], Tables::Detached);
    assert_eq!(read(&iotlb, 0), Err(FaultKind::Translation));
    assert_eq!(iotlb.stale_links(whole()), []);
}

#[test]
fn a_freed_table_is_read_through_a_cached_link() {
    let iotlb = iotlb();
    assert_eq!(read(&iotlb, 0), Err(FaultKind::Translation));
    set(&iotlb, 0x2000, 0);
    iotlb.tables().free_table(PhysAddr::new(0x3000));
    // Another page of the same table: only the link leads there.
    let why = NotATable::Freed { paddr: PhysAddr::new(0x3008) };
    assert_eq!(read(&iotlb, 0x1000), Err(FaultKind::ExternalAbort(why)));
}

#[test]
fn a_walk_that_faults_leaves_links_but_no_absent_entry() {
    let iotlb = iotlb();
    assert_eq!(read(&iotlb, 0), Err(FaultKind::Translation));
    assert_eq!((iotlb.cached_links(), iotlb.cached_leaves()), (2, 0));
    set(&iotlb, 0x3000, 0x8000 | PAGE);
    assert_eq!(read(&iotlb, 0), Ok(0x8000));
}

#[test]
fn links_outside_an_invalidated_range_stay() {
    let iotlb = iotlb();
    iotlb.tables().add_table(PhysAddr::new(0x4000), 512);
    set(&iotlb, 0x2008, 0x4003);
    let _ = (read(&iotlb, 0), read(&iotlb, 0x20_0000));
    assert_eq!(iotlb.cached_links(), 3);
    // The table of level 2 and that of the second 2M intersect, the first 2M do not.
    invalidate(&iotlb, &[range(0x20_0000, 0x20_0fff)], Tables::Detached);
    assert_eq!(iotlb.cached_links(), 1);
    assert_eq!(iotlb.counters().links_dropped, 2);
}

#[test]
fn everything_is_forgotten_by_an_invalidation_of_all() {
    let iotlb = iotlb();
    set(&iotlb, 0x3000, 0x8000 | PAGE);
    assert!(read(&iotlb, 0).is_ok());
    let all = Invalidation { scope: Scope::All, leaf_sizes: 0, tables: Tables::Kept };
    iotlb.invalidate(&all).unwrap();
    assert_eq!((iotlb.cached_links(), iotlb.cached_leaves()), (0, 0));
    let counters = iotlb.counters();
    assert_eq!((counters.invalidations_of_all, counters.ranges_invalidated), (1, 0));
}

/// Sixteen pages from 0x4_0000 on, at 0.
fn set_group(iotlb: &TestIotlb) {
    for page in 0..16 {
        set(iotlb, 0x3000 + page * 8, 1 << 52 | (0x4_0000 + (page << 12)) | PAGE);
    }
}

#[test]
fn a_contiguous_group_answers_for_every_page_and_is_forgotten_page_by_page() {
    let iotlb = iotlb();
    set_group(&iotlb);
    assert_eq!(read(&iotlb, 0x3000), Ok(0x4_3000));
    assert_eq!(iotlb.cached_leaves(), 1);
    (0..16).for_each(|page| set(&iotlb, 0x3000 + page * 8, 0));
    assert_eq!(read(&iotlb, 0x5abc), Ok(0x4_5abc));
    assert_eq!(iotlb.stale_leaves(whole())[0].iova, Iova::new(0));
    // Two pages are named. A TLB that holds each page by itself keeps the others.
    invalidate_sizes(&iotlb, &[range(0x6000, 0x7fff)], 1 << 16, Tables::Kept);
    for page in 0..16 {
        let kept = !(6..8).contains(&page);
        assert_eq!(read(&iotlb, page << 12).is_ok(), kept, "page {page}");
    }
    // The pages are of the group: named as pages they stay, and named as its size they go.
    invalidate(&iotlb, &[whole()], Tables::Kept);
    assert_eq!(read(&iotlb, 0xf123), Ok(0x4_f123));
    assert_eq!(iotlb.stale_leaves(whole()).len(), 14);
    invalidate_sizes(&iotlb, &[range(0, 0xffff)], 1 << 16, Tables::Kept);
    assert_eq!((iotlb.cached_leaves(), iotlb.stale_leaves(whole()).len()), (0, 0));
    assert_eq!(read(&iotlb, 0xf123), Err(FaultKind::Translation));
}

#[test]
fn a_page_of_a_group_that_is_walked_for_again_is_as_the_tables_have_it() {
    let iotlb = iotlb_with(TCR_DIRTY, IotlbConfig::default());
    let clean = |page: u64| 1 << 52 | 1 << 51 | (0x4_0000 + (page << 12)) | READ_ONLY;
    (0..16).for_each(|page| set(&iotlb, 0x3000 + page * 8, clean(page)));
    assert!(read(&iotlb, 0).is_ok());
    invalidate_sizes(&iotlb, &[range(0, 0xfff)], 1 << 16, Tables::Kept);
    // The first write to a page that is cached as clean marks it, and the next one is a hit.
    assert_eq!(write(&iotlb, 0x3000), Ok(0x4_3000));
    let walks = iotlb.counters().walks;
    assert_eq!(write(&iotlb, 0x3000), Ok(0x4_3000));
    assert_eq!(iotlb.counters().walks, walks);
}

#[test]
fn a_leaf_stays_unless_its_size_is_named_or_everything_is_forgotten() {
    let (page, block) = (1 << 12, 1 << 21);
    for (leaf_sizes, left) in [(0, 2), (page, 1), (block, 1), (page | block, 0), (1 << 16, 2)] {
        for tables in [Tables::Kept, Tables::Detached] {
            let iotlb = iotlb();
            set(&iotlb, 0x3000, 0x8000 | PAGE);
            set(&iotlb, 0x2008, 0x60_0745);
            assert!(read(&iotlb, 0).is_ok() && read(&iotlb, 0x20_0000).is_ok());
            invalidate_sizes(&iotlb, &[whole()], leaf_sizes, tables);
            assert_eq!(iotlb.cached_leaves(), left, "{leaf_sizes:#x} {tables:?}");
            let all = Invalidation { scope: Scope::All, leaf_sizes: 0, tables };
            iotlb.invalidate(&all).unwrap();
            assert_eq!(iotlb.cached_leaves(), 0);
        }
    }
}

#[test]
fn a_leaf_that_refuses_an_access_is_kept() {
    let iotlb = iotlb();
    set(&iotlb, 0x3000, 0x8000 | READ_ONLY);
    assert_eq!(write(&iotlb, 0), Err(FaultKind::Permission));
    set(&iotlb, 0x3000, 0x8000 | PAGE);
    let refused = iotlb.translate(Iova::new(0), Access::Write).unwrap_err();
    assert_eq!((refused.kind, refused.level), (FaultKind::Permission, 3));
    assert_eq!(read(&iotlb, 0), Ok(0x8000));
    invalidate(&iotlb, &[range(0, 0xfff)], Tables::Kept);
    assert_eq!(write(&iotlb, 0), Ok(0x8000));
}

#[test]
fn a_small_stale_leaf_is_found_inside_a_large_new_one_and_the_other_way_round() {
    let iotlb = iotlb();
    set(&iotlb, 0x3000, 0x8000 | PAGE);
    assert!(read(&iotlb, 0).is_ok());
    // A 2M block instead of the table.
    set(&iotlb, 0x2000, 0x4000_0745);
    invalidate(&iotlb, &[range(0x1000, 0x1f_ffff)], Tables::Detached);
    assert_eq!(read(&iotlb, 0x1000), Ok(0x4000_1000));
    assert_eq!(read(&iotlb, 0), Ok(0x8000));
    // And the table again instead of the block.
    set(&iotlb, 0x2000, 0x3003);
    set(&iotlb, 0x3010, 0x9000 | PAGE);
    assert_eq!(read(&iotlb, 0x2000), Ok(0x4000_2000));
    let stale = iotlb.stale_leaves(whole());
    assert_eq!(stale.len(), 1);
    assert_eq!(stale[0].block, range(0, 0x1f_ffff));
}

#[test]
fn a_stale_leaf_is_told_by_its_address_its_absence_or_its_permission() {
    let iotlb = iotlb();
    for page in 0..4 {
        set(&iotlb, 0x3000 + page * 8, (0x8000 + (page << 12)) | PAGE);
        assert!(read(&iotlb, page << 12).is_ok());
    }
    assert_eq!(iotlb.stale_leaves(whole()), []);
    set(&iotlb, 0x3000, 0);
    set(&iotlb, 0x3008, 0xf000 | PAGE);
    set(&iotlb, 0x3010, 0xa000 | READ_ONLY);
    let stale = iotlb.stale_leaves(whole());
    let starts: Vec<u64> = stale.iter().map(|leaf| leaf.iova.get()).collect();
    assert_eq!(starts, [0, 0x1000, 0x2000]);
    assert!(stale[0].tables.is_err());
    assert_eq!((stale[1].cached.get(), stale[1].tables.unwrap().get()), (0x9000, 0xf000));
    assert_eq!(iotlb.stale_leaves(range(0x1000, 0x1fff)).len(), 1);
}

#[test]
fn absent_entries_are_cached_until_the_mapping_is_synced_where_asked_for() {
    let config = IotlbConfig { absent: AbsentEntries::Cached, ..Default::default() };
    let iotlb = iotlb_with(TCR, config);
    assert_eq!(read(&iotlb, 0), Err(FaultKind::Translation));
    // The whole 2M behind an absent entry of level 2 are absent.
    assert_eq!(read(&iotlb, 0x20_0000), Err(FaultKind::Translation));
    set(&iotlb, 0x3000, 0x8000 | PAGE);
    set(&iotlb, 0x2008, 0x60_0745);
    assert_eq!(read(&iotlb, 0), Err(FaultKind::Translation));
    assert_eq!(read(&iotlb, 0x3f_f000), Err(FaultKind::Translation));
    iotlb.sync_map(range(0, 0xfff)).unwrap();
    assert_eq!(read(&iotlb, 0), Ok(0x8000));
    assert_eq!(read(&iotlb, 0x3f_f000), Err(FaultKind::Translation));
    iotlb.sync_map(range(0x3f_f000, 0x3f_ffff)).unwrap();
    assert_eq!(read(&iotlb, 0x3f_f000), Ok(0x7f_f000));
    assert_eq!(iotlb.counters().sync_maps, 2);
}

#[test]
fn a_sync_of_a_mapping_does_not_stand_for_an_invalidation() {
    let iotlb = iotlb();
    set(&iotlb, 0x3000, 0x8000 | PAGE);
    assert!(read(&iotlb, 0).is_ok());
    set(&iotlb, 0x3000, 0x9000 | PAGE);
    iotlb.sync_map(range(0, 0xfff)).unwrap();
    assert_eq!(read(&iotlb, 0), Ok(0x8000));
}

#[test]
fn failing_calls_forget_nothing_and_are_as_many_as_asked_for() {
    let iotlb = iotlb();
    set(&iotlb, 0x3000, 0x8000 | PAGE);
    assert!(read(&iotlb, 0).is_ok());
    iotlb.fail_next_invalidations(2);
    let all = Invalidation { scope: Scope::All, leaf_sizes: 0, tables: Tables::Detached };
    assert!(iotlb.invalidate(&all).is_err());
    assert!(iotlb.invalidate(&all).is_err());
    assert_eq!((iotlb.cached_leaves(), iotlb.cached_links()), (1, 2));
    assert!(iotlb.invalidate(&all).is_ok());
    assert_eq!((iotlb.cached_leaves(), iotlb.cached_links()), (0, 0));
    assert_eq!(iotlb.counters().invalidations_failed, 2);
    iotlb.fail_next_sync_maps(1);
    assert!(iotlb.sync_map(range(0, 1)).is_err());
    assert!(iotlb.sync_map(range(0, 1)).is_ok());
}

#[test]
fn a_planted_bug_answers_ok_and_keeps_what_it_says() {
    for (planted, left) in [
        (Planted::None, (0, 0)),
        (Planted::IgnoreLeaves, (2, 0)),
        (Planted::IgnoreSmallest, (1, 0)),
        (Planted::IgnoreLargest, (1, 0)),
        (Planted::IgnoreTables, (0, 2)),
        (Planted::IgnoreAll, (2, 2)),
    ] {
        let iotlb = iotlb();
        set(&iotlb, 0x3000, 0x8000 | PAGE);
        set(&iotlb, 0x2008, 0x60_0745);
        assert!(read(&iotlb, 0).is_ok() && read(&iotlb, 0x20_0000).is_ok());
        iotlb.drop_invalidations(planted);
        invalidate_sizes(&iotlb, &[whole()], 1 << 12 | 1 << 21, Tables::Detached);
        assert_eq!((iotlb.cached_leaves(), iotlb.cached_links()), left, "{planted:?}");
    }
}

#[test]
fn the_first_write_marks_a_clean_page_even_when_it_is_cached() {
    let iotlb = iotlb_with(TCR_DIRTY, IotlbConfig::default());
    let clean = 1 << 51 | 0x8000 | READ_ONLY;
    set(&iotlb, 0x3000, clean);
    let entry = || iotlb.tables().read_u64(PhysAddr::new(0x3000)).unwrap();
    assert!(read(&iotlb, 0).is_ok());
    assert_eq!(entry(), clean);
    assert_eq!(write(&iotlb, 0), Ok(0x8000));
    assert_eq!(entry(), 1 << 51 | 0x8000 | PAGE);
    // Marked again as clean without an invalidation, the next write is lost to dirty tracking.
    set(&iotlb, 0x3000, clean);
    assert_eq!(write(&iotlb, 0), Ok(0x8000));
    assert_eq!(entry(), clean);
    invalidate(&iotlb, &[range(0, 0xfff)], Tables::Kept);
    assert_eq!(write(&iotlb, 0), Ok(0x8000));
    assert_eq!(entry(), 1 << 51 | 0x8000 | PAGE);
}

#[test]
fn tables_that_cannot_be_updated_abort_the_access() {
    /// Reads through, and refuses updates by the default method.
    #[derive(Debug)]
    struct Frozen(Arc<TableImage>);
    impl TableWords for Frozen {
        fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
            self.0.read_u64(paddr)
        }
    }
    let plain = iotlb_with(TCR_DIRTY, IotlbConfig::default());
    set(&plain, 0x3000, 0x8347);
    let frozen = Iotlb::new(*plain.walker(), Frozen(Arc::clone(plain.tables())));
    let fault = frozen.translate(Iova::new(0), Access::Read).unwrap_err();
    let why = NotATable::ReadOnly { paddr: PhysAddr::new(0x3000) };
    assert_eq!(fault.kind, FaultKind::ExternalAbort(why));
    assert_eq!(frozen.cached_leaves(), 0);
}

#[test]
fn counters_tell_hits_from_misses_and_walks() {
    let iotlb = iotlb();
    set(&iotlb, 0x3000, 0x8000 | PAGE);
    let _ = (read(&iotlb, 0), read(&iotlb, 8), read(&iotlb, 0x1000), read(&iotlb, 1 << 40));
    let counters = iotlb.counters();
    assert_eq!((counters.hits, counters.misses), (1, 3));
    // The last address is beyond the tables: no walk.
    assert_eq!((counters.walks, counters.walks_from_link, counters.faults), (2, 1, 2));
}

#[test]
fn an_invalidation_waits_for_accesses_in_flight() {
    let iotlb = iotlb();
    set(&iotlb, 0x3000, 0x8000 | PAGE);
    let (started, wait) = std::sync::mpsc::channel();
    let (finish, finished) = std::sync::mpsc::channel::<()>();
    let device = iotlb.clone();
    let access = std::thread::spawn(move || {
        device.with_translation(Iova::new(0), Access::Read, |_| {
            started.send(()).unwrap();
            finished.recv().unwrap();
            std::time::Instant::now()
        })
    });
    wait.recv().unwrap();
    let driver = iotlb.clone();
    let invalidation = std::thread::spawn(move || {
        invalidate(&driver, &[whole()], Tables::Kept);
        std::time::Instant::now()
    });
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(!invalidation.is_finished());
    finish.send(()).unwrap();
    let accessed = access.join().unwrap().unwrap();
    assert!(accessed <= invalidation.join().unwrap());
}

#[test]
fn both_ways_of_removing_a_range_remove_the_same() {
    let fill = || {
        let mut map = BlockMap::default();
        (0..1000u64).for_each(|page| map.insert(Iova::new(page << 12), 12, page));
        map.insert(Iova::new(0), 21, 0);
        map.insert(Iova::new(u64::MAX), 64, 0);
        map
    };
    let last_page: Vec<_> = fill()
        .blocks_in(range(999 << 12, u64::MAX))
        .map(|(block, value)| (block, *value))
        .collect();
    assert!(last_page.contains(&(range(999 << 12, (999 << 12) | 0xfff), 999)));
    assert!(last_page.contains(&(whole(), 0)));
    assert_eq!(last_page.len(), 2);
    // Few blocks against many entries, and the other way round.
    for (from, to) in [(10, 19), (10, 900), (999, 5000), (1000, 5000)] {
        let mut map = fill();
        let removed = map.remove(range(from << 12, (to << 12) | 0xfff));
        let expected = (from..=to).filter(|page| *page < 1000).count();
        let large = u64::from(from < 512) + 1;
        assert_eq!(removed, u64::try_from(expected).unwrap() + large);
        for page in 0..1000u64 {
            let kept = map.get(Iova::new(page << 12)).is_some_and(|(lg2, _)| lg2 == 12);
            assert_eq!(kept, !(from..=to).contains(&page), "page {page} of {from}..={to}");
        }
    }
}

#[test]
fn a_packed_leaf_unpacks_to_itself() {
    for prot in [Prot::READ, Prot::READ_WRITE | Prot::CACHE, Prot::all()] {
        for (paddr, level, clean) in [(0x800, 0, false), (0xff_ffff_ffff_f800, 7, true)] {
            let leaf = CachedLeaf { paddr, prot, level, clean, entry_lg2: 12 + u32::from(level) };
            assert_eq!(PackedLeaf::new(leaf).unwrap().unpack(), leaf);
        }
    }
    for paddr in [0x400, 1 << 58] {
        let leaf = CachedLeaf { paddr, prot: Prot::READ, level: 0, clean: false, entry_lg2: 12 };
        assert_eq!(PackedLeaf::new(leaf), None);
    }
}

/// What a driver and a device do to 64 pages.
#[derive(Clone, Debug)]
enum Op {
    /// The driver changes the page's entry; 0 is no mapping.
    Set { page: u64, entry: u64 },
    /// The device reads the page.
    Read { page: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let entry = prop_oneof![Just(0), (1..1000u64).prop_map(|frame| frame << 12 | PAGE)];
    prop_oneof![
        (0..64u64, entry).prop_map(|(page, entry)| Op::Set { page, entry }),
        (0..64u64).prop_map(|page| Op::Read { page }),
    ]
}

fn fresh(iotlb: &TestIotlb, page: u64) -> Result<u64, FaultKind> {
    let walked = iotlb.walker().walk(iotlb.tables(), Iova::new(page << 12), Access::Read);
    walked.map(|leaf| leaf.paddr.get()).map_err(|fault| fault.kind)
}

proptest! {
    /// Of two IOTLBs one is told of every change and the other of none, which makes the first agree
    /// with its tables and the second answer what it answered first.
    #[test]
    fn an_iotlb_is_stale_exactly_where_it_was_used_and_not_told(
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let (told, untold) = (iotlb(), iotlb());
        let mut first_answers = std::collections::BTreeMap::new();
        for op in ops {
            match op {
                Op::Set { page, entry } => {
                    for iotlb in [&told, &untold] {
                        set(iotlb, 0x3000 + page * 8, entry);
                    }
                    invalidate(&told, &[range(page << 12, page << 12 | 0xfff)], Tables::Kept);
                }
                Op::Read { page } => {
                    prop_assert_eq!(read(&told, page << 12), fresh(&told, page));
                    if let Ok(paddr) = read(&untold, page << 12) {
                        prop_assert_eq!(*first_answers.entry(page).or_insert(paddr), paddr);
                    } else {
                        prop_assert!(!first_answers.contains_key(&page));
                    }
                }
            }
            prop_assert_eq!(told.stale_leaves(whole()), []);
        }
        let stale: Vec<u64> =
            untold.stale_leaves(whole()).iter().map(|leaf| leaf.iova.get() >> 12).collect();
        first_answers.retain(|page, paddr| fresh(&untold, *page) != Ok(*paddr));
        prop_assert_eq!(stale, first_answers.into_keys().collect::<Vec<_>>());
    }
}
