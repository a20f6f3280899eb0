//! Every kind of bug, planted and found; and programs without one, in which nothing is found.

use dmaspan::iommu::{Invalidation, Scope, Tables};
use dmaspan::{Direction, Iova, IovaRange, PhysAddr, Prot, Span};

use super::*;
use crate::iotlb::AbsentEntries;

mod programs;

const PAGE: u64 = 0x1000;

fn pages(first: u64, count: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(first * PAGE), count * PAGE).unwrap()
}

fn frames(first: u64, count: u64) -> Span {
    Span::new(PhysAddr::new((1 << 32) + first * PAGE), count * PAGE).unwrap()
}

fn flush(sanitizer: &Sanitizer, range: IovaRange, tables: Tables) {
    let scope = Scope::Ranges(&[range]);
    sanitizer.on_invalidate(&Invalidation { scope, leaf_sizes: 1 << 12, tables });
}

fn map(sanitizer: &Sanitizer, first: u64, count: u64) -> IovaRange {
    let range = pages(first, count);
    sanitizer.on_map(range, &[frames(first, count)], Prot::READ_WRITE);
    range
}

fn kinds(sanitizer: &Sanitizer) -> Vec<FindingKind> {
    sanitizer.findings().iter().map(|finding| finding.kind).collect()
}

fn late(cause: Cause) -> FindingKind {
    FindingKind::LateFlush { cached: Cached::Leaf, cause, freed: None }
}

fn missing(cause: Cause) -> FindingKind {
    FindingKind::MissingFlush { cached: Cached::Leaf, cause }
}

#[test]
fn a_correct_program_has_no_findings() {
    let sanitizer = Sanitizer::default();
    for round in 0..3 {
        let range = map(&sanitizer, 8, 4);
        sanitizer.on_dma(Iova::new(8 * PAGE + 5), 3 * PAGE, Access::Write);
        sanitizer.on_sync(pages(9, 2), SyncFor::Cpu, Direction::Bidirectional);
        sanitizer.on_unmap(range, if round == 1 { Tables::Detached } else { Tables::Kept });
        flush(&sanitizer, range, if round == 1 { Tables::Detached } else { Tables::Kept });
        sanitizer.on_free(frames(8, 4));
        sanitizer.on_release(range);
        sanitizer.on_alloc(range);
    }
    assert_eq!(sanitizer.finish(), []);
}

#[test]
fn a_reuse_before_the_flush_is_a_missing_flush() {
    let sanitizer = Sanitizer::default();
    sanitizer.on_unmap(map(&sanitizer, 4, 4), Tables::Kept);
    map(&sanitizer, 6, 1);
    assert_eq!(kinds(&sanitizer), [missing(Cause::NoFlush)]);
    let found = &sanitizer.findings()[0];
    assert_eq!(found.iovas, pages(4, 4));
    let numbers: Vec<u64> = found.history.iter().map(|record| record.number).collect();
    assert_eq!(numbers, [1, 2, 3]);
}

#[test]
fn iovas_that_are_handed_out_before_the_flush_are_a_missing_flush_once() {
    let sanitizer = Sanitizer::default();
    sanitizer.on_unmap(map(&sanitizer, 4, 4), Tables::Kept);
    sanitizer.on_alloc(pages(4, 1));
    map(&sanitizer, 4, 1);
    assert_eq!(kinds(&sanitizer), [missing(Cause::NoFlush)]);
}

#[test]
fn a_release_before_the_flush_is_a_late_flush_and_says_why() {
    let everything = Invalidation { scope: Scope::All, leaf_sizes: 0, tables: Tables::Kept };
    type Plant = fn(&Sanitizer, IovaRange);
    let cases: [(Cause, Plant); 6] = [
        (Cause::NoFlush, |s, range| s.on_unmap(range, Tables::Kept)),
        (Cause::FlushBeforeUnmap, |s, range| {
            flush(s, range, Tables::Kept);
            s.on_unmap(range, Tables::Kept);
        }),
        (Cause::BeganBeforeUnmap, |s, range| {
            let scope = Scope::Ranges(&[range]);
            let what = Invalidation { scope, leaf_sizes: 0, tables: Tables::Kept };
            let begun = s.on_invalidate_begin(&what);
            s.on_unmap(range, Tables::Kept);
            s.on_invalidate_end(begun, Outcome::Done);
        }),
        (Cause::TooShort, |s, range| {
            s.on_unmap(range, Tables::Kept);
            flush(s, pages(range.start().get() / PAGE, 3), Tables::Kept);
        }),
        (Cause::Failed, |s, range| {
            s.on_unmap(range, Tables::Kept);
            let scope = Scope::Ranges(&[range]);
            let what = Invalidation { scope, leaf_sizes: 0, tables: Tables::Kept };
            let begun = s.on_invalidate_begin(&what);
            s.on_invalidate_end(begun, Outcome::Failed);
        }),
        (Cause::StillRunning, |s, range| {
            s.on_unmap(range, Tables::Kept);
            let scope = Scope::Ranges(&[range]);
            let what = Invalidation { scope, leaf_sizes: 0, tables: Tables::Kept };
            let _ = s.on_invalidate_begin(&what);
        }),
    ];
    for (cause, plant) in cases {
        let config = SanitizerConfig { pointless: Pointless::Ignore, ..SanitizerConfig::default() };
        let sanitizer = Sanitizer::new(config);
        let range = map(&sanitizer, 16, 4);
        plant(&sanitizer, range);
        sanitizer.on_release(range);
        assert_eq!(kinds(&sanitizer), [late(cause)]);
        // One bug, one finding; and a flush ends it.
        sanitizer.on_free(frames(16, 4));
        sanitizer.on_invalidate(&everything);
        sanitizer.on_release(range);
        assert_eq!(sanitizer.finish().len(), 1, "{cause:?}");
    }
}

#[test]
fn memory_that_is_freed_while_a_translation_leads_there_is_found() {
    let sanitizer = Sanitizer::default();
    // The same memory twice: only the second mapping of it is unmapped.
    let memory = frames(100, 8);
    sanitizer.on_map(pages(1, 8), &[memory], Prot::READ);
    sanitizer.on_map(pages(20, 8), &[frames(0, 1), memory], Prot::READ);
    let freed = frames(103, 1);
    sanitizer.on_unmap(pages(1, 8), Tables::Kept);
    flush(&sanitizer, pages(1, 8), Tables::Kept);
    sanitizer.on_free(freed);
    assert_eq!(kinds(&sanitizer), [FindingKind::ReleasedWhileMapped { freed: Some(freed) }]);
    assert_eq!(sanitizer.findings()[0].iovas, pages(21, 7));
    sanitizer.on_unmap(pages(20, 8), Tables::Kept);
    sanitizer.on_free(freed);
    let (cached, cause, freed) = (Cached::Leaf, Cause::NoFlush, Some(freed));
    assert_eq!(kinds(&sanitizer)[1..], [FindingKind::LateFlush { cached, cause, freed }]);
    flush(&sanitizer, pages(20, 8), Tables::Kept);
    sanitizer.on_free(memory);
    assert_eq!(sanitizer.finish().len(), 2);
}

#[test]
fn walks_into_detached_tables_outlive_a_flush_of_leaves() {
    let sanitizer = Sanitizer::default();
    let range = map(&sanitizer, 512, 512);
    sanitizer.on_unmap(range, Tables::Detached);
    flush(&sanitizer, range, Tables::Kept);
    sanitizer.on_release(range);
    let (cached, cause) = (Cached::Walk, Cause::TablesKept);
    assert_eq!(kinds(&sanitizer), [FindingKind::LateFlush { cached, cause, freed: None }]);
    flush(&sanitizer, range, Tables::Detached);
    sanitizer.on_release(range);
    assert_eq!(sanitizer.finish().len(), 1);
}

#[test]
fn leaves_whose_size_was_not_named_stay_where_hardware_minds() {
    for (leaf_sizes, found) in [(LeafSizes::Any, 0), (LeafSizes::Named, 1)] {
        let sanitizer =
            Sanitizer::new(SanitizerConfig { leaf_sizes, ..SanitizerConfig::default() });
        let range = map(&sanitizer, 512, 513);
        sanitizer.on_unmap_leaves(range, Tables::Kept, 1 << 12 | 1 << 21);
        flush(&sanitizer, range, Tables::Kept);
        sanitizer.on_release(range);
        assert_eq!(kinds(&sanitizer), [late(Cause::LeafSizes)][..found]);
    }
}

#[test]
fn a_device_that_goes_on_after_the_unmap_is_found_until_the_flush() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Write);
    sanitizer.on_unmap(map(&sanitizer, 3, 2), Tables::Kept);
    sanitizer.on_dma(Iova::new(5 * PAGE - 1), 1, access);
    let cause = Cause::NoFlush;
    assert_eq!(kinds(&sanitizer), [FindingKind::UseAfterUnmap { access, cause }]);
    flush(&sanitizer, pages(3, 2), Tables::Kept);
    sanitizer.on_dma(Iova::new(5 * PAGE - 1), 1, access);
    assert_eq!(kinds(&sanitizer)[1..], [FindingKind::Unmapped { access }]);
}

#[test]
fn a_device_that_leaves_its_mapping_or_its_permissions_is_found() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Read);
    sanitizer.on_map(pages(1, 1), &[], Prot::WRITE);
    sanitizer.on_map(pages(2, 2), &[frames(9, 1), frames(5, 1)], Prot::READ);
    sanitizer.on_dma(Iova::new(2 * PAGE), 2 * PAGE, access);
    assert_eq!(kinds(&sanitizer), []);
    sanitizer.on_dma(Iova::new(3 * PAGE), PAGE + 1, access);
    sanitizer.on_dma(Iova::new(2 * PAGE - 1), 2, access);
    sanitizer.on_dma(Iova::new(u64::MAX), 2, access);
    assert_eq!(
        kinds(&sanitizer),
        [
            FindingKind::PastMapping { access, mapping: pages(2, 2) },
            FindingKind::Denied { access, prot: Prot::WRITE },
            FindingKind::Unmapped { access },
        ]
    );
}

#[test]
fn an_unmap_that_fits_no_mapping_is_found() {
    let sanitizer = Sanitizer::default();
    let range = map(&sanitizer, 1, 4);
    map(&sanitizer, 5, 1);
    sanitizer.on_unmap(pages(3, 1), Tables::Kept);
    assert_eq!(kinds(&sanitizer), [FindingKind::PartialUnmap { mapping: range }]);
    sanitizer.on_unmap(pages(3, 1), Tables::Kept);
    assert_eq!(kinds(&sanitizer)[1..], [FindingKind::DoubleUnmap]);
    flush(&sanitizer, pages(3, 1), Tables::Kept);
    sanitizer.on_unmap(pages(3, 1), Tables::Kept);
    sanitizer.on_unmap(pages(7, 1), Tables::Kept);
    assert_eq!(kinds(&sanitizer)[2..], [FindingKind::DoubleUnmap, FindingKind::UnmapOfNothing]);
    // Two whole mappings by one unmap are fine.
    let sanitizer = Sanitizer::default();
    map(&sanitizer, 1, 4);
    map(&sanitizer, 5, 1);
    sanitizer.on_unmap(pages(1, 5), Tables::Kept);
    assert_eq!(kinds(&sanitizer), []);
}

#[test]
fn a_map_over_a_mapping_is_found() {
    let sanitizer = Sanitizer::default();
    let taken = map(&sanitizer, 1, 4);
    map(&sanitizer, 4, 2);
    assert_eq!(kinds(&sanitizer), [FindingKind::AlreadyMapped { taken }]);
}

#[test]
fn a_mapping_is_not_seen_before_its_sync_where_absent_entries_are_cached() {
    let config = SanitizerConfig { absent: AbsentEntries::Cached, ..SanitizerConfig::default() };
    let (sanitizer, access) = (Sanitizer::new(config), Access::Read);
    // Of the mapping before, and so of no use.
    sanitizer.on_sync_map(pages(1, 2));
    map(&sanitizer, 1, 2);
    sanitizer.on_dma(Iova::new(PAGE), 1, access);
    assert_eq!(kinds(&sanitizer), [FindingKind::Unannounced { access }]);
    sanitizer.on_sync_map(pages(1, 1));
    sanitizer.on_dma(Iova::new(PAGE), PAGE, access);
    assert_eq!(kinds(&sanitizer).len(), 1);
    sanitizer.on_dma(Iova::new(2 * PAGE - 1), 2, access);
    assert_eq!(kinds(&sanitizer).len(), 2);
}

#[test]
fn the_old_entries_of_what_was_protected_want_a_flush() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Write);
    let range = map(&sanitizer, 1, 4);
    sanitizer.on_protect(pages(2, 2), Prot::READ);
    assert_eq!(sanitizer.stale(range), [pages(2, 2)]);
    sanitizer.on_dma(Iova::new(PAGE), 4 * PAGE, Access::Read);
    assert_eq!(kinds(&sanitizer), []);
    sanitizer.on_dma(Iova::new(PAGE), 4 * PAGE, access);
    assert_eq!(kinds(&sanitizer), [FindingKind::Denied { access, prot: Prot::READ }]);
    flush(&sanitizer, pages(2, 1), Tables::Kept);
    sanitizer.on_protect(pages(5, 1), Prot::READ);
    assert_eq!(kinds(&sanitizer)[1..], [FindingKind::ProtectOfNothing]);
    sanitizer.finish();
    assert_eq!(kinds(&sanitizer)[2..], [FindingKind::Leak, missing(Cause::TooShort)]);
    assert_eq!(sanitizer.findings()[3].iovas, pages(3, 1));
    // The flush of the unmap does for both.
    let sanitizer = Sanitizer::default();
    let range = map(&sanitizer, 1, 4);
    sanitizer.on_protect(range, Prot::READ);
    sanitizer.on_unmap(range, Tables::Kept);
    flush(&sanitizer, range, Tables::Kept);
    assert_eq!(sanitizer.finish(), []);
}

#[test]
fn a_record_is_as_small_as_the_configuration_says() {
    assert!(size_of::<Record>() <= 112, "{}", size_of::<Record>());
}

#[test]
fn a_sync_outside_of_a_mapping_or_of_another_direction_is_found() {
    let sanitizer = Sanitizer::default();
    let (from, both) = (Direction::FromDevice, Direction::Bidirectional);
    sanitizer.on_map(pages(1, 2), &[], Prot::WRITE);
    sanitizer.on_map(pages(3, 1), &[], Prot::WRITE);
    sanitizer.on_sync(pages(1, 2), SyncFor::Cpu, from);
    sanitizer.on_sync(pages(2, 1), SyncFor::Device, from);
    assert_eq!(kinds(&sanitizer), []);
    sanitizer.on_sync(pages(2, 2), SyncFor::Cpu, from);
    sanitizer.on_sync(pages(4, 1), SyncFor::Cpu, from);
    sanitizer.on_sync(pages(1, 1), SyncFor::Device, both);
    assert_eq!(
        kinds(&sanitizer),
        [
            FindingKind::SyncOutside { mapping: Some(pages(1, 2)) },
            FindingKind::SyncOutside { mapping: None },
            FindingKind::SyncDirection { direction: both, prot: Prot::WRITE },
        ]
    );
}

#[test]
fn what_is_left_at_the_end_is_found_and_a_detach_forgives_what_was_unmapped() {
    let sanitizer = Sanitizer::default();
    let spans = [frames(1, 1), frames(7, 2)];
    sanitizer.on_map(pages(1, 3), &spans, Prot::READ);
    sanitizer.on_unmap(map(&sanitizer, 8, 1), Tables::Detached);
    let other = Sanitizer::default();
    other.on_unmap(map(&other, 8, 1), Tables::Detached);
    let found = sanitizer.finish();
    let walk = FindingKind::MissingFlush { cached: Cached::Walk, cause: Cause::NoFlush };
    assert_eq!(kinds(&sanitizer), [FindingKind::Leak, missing(Cause::NoFlush), walk]);
    assert_eq!((found[0].iovas, found[0].history[0].number), (pages(1, 3), 1));
    other.on_detach();
    assert_eq!(other.finish(), []);
}

#[test]
fn a_flush_of_nothing_stale_is_pointless_unless_that_is_ignored() {
    for (pointless, count) in [(Pointless::Report, 2), (Pointless::Ignore, 0)] {
        let sanitizer = Sanitizer::new(SanitizerConfig { pointless, ..SanitizerConfig::default() });
        let range = map(&sanitizer, 1, 1);
        flush(&sanitizer, range, Tables::Kept);
        sanitizer.on_unmap(range, Tables::Kept);
        flush(&sanitizer, pages(0, 9), Tables::Kept);
        flush(&sanitizer, pages(0, 9), Tables::Kept);
        assert_eq!(kinds(&sanitizer), vec![FindingKind::PointlessFlush; count]);
        assert!(sanitizer.findings().iter().all(|f| f.class() == Severity::Performance));
    }
}

#[test]
fn the_top_of_the_space_is_an_iova_like_others() {
    let sanitizer = Sanitizer::default();
    let top = IovaRange::new(Iova::new(u64::MAX - 0x1fff), Iova::new(u64::MAX)).unwrap();
    sanitizer.on_map(top, &[frames(0, 1), frames(4, 1)], Prot::READ);
    sanitizer.on_dma(top.start(), 0x2000, Access::Read);
    sanitizer.on_unmap(top, Tables::Detached);
    flush(&sanitizer, top, Tables::Detached);
    sanitizer.on_free(frames(4, 1));
    assert_eq!(sanitizer.finish(), []);
}

#[test]
fn findings_beyond_the_bound_are_counted() {
    let sanitizer = Sanitizer::new(SanitizerConfig { findings: 2, ..SanitizerConfig::default() });
    (0..5).for_each(|page| sanitizer.on_unmap(pages(page, 1), Tables::Kept));
    assert_eq!((sanitizer.findings().len(), sanitizer.found()), (2, 5));
}

#[test]
#[should_panic(expected = "ERROR: double unmap")]
fn an_error_panics_where_that_is_asked_for() {
    let sanitizer =
        Sanitizer::new(SanitizerConfig { mode: OnFinding::Panic, ..SanitizerConfig::default() });
    let range = map(&sanitizer, 1, 1);
    flush(&sanitizer, range, Tables::Kept);
    sanitizer.on_unmap(range, Tables::Kept);
    sanitizer.on_unmap(range, Tables::Kept);
}

#[test]
fn a_report_keeps_the_map_and_the_unmap_however_long_ago_they_were() {
    let sanitizer = Sanitizer::new(SanitizerConfig { history: 8, ..SanitizerConfig::default() });
    let old = map(&sanitizer, 1, 1);
    sanitizer.on_unmap(old, Tables::Kept);
    for _ in 0..20 {
        let range = map(&sanitizer, 2, 1);
        sanitizer.on_unmap(range, Tables::Kept);
        flush(&sanitizer, range, Tables::Kept);
    }
    sanitizer.named("pool").on_release(old);
    let found = &sanitizer.findings()[0];
    let numbers: Vec<u64> = found.history.iter().map(|record| record.number).collect();
    assert_eq!(numbers, [1, 2, 83]);
    let report = found.to_string();
    let place = format!("at {}:", file!());
    assert_eq!(report.matches(&place).count(), 3, "{report}");
    assert!(report.ends_with(", pool"), "{report}");
}

#[test]
fn a_flush_of_everything_forgets_walks_and_is_pointless_only_where_there_is_nothing() {
    let sanitizer = Sanitizer::default();
    let all = Invalidation { scope: Scope::All, leaf_sizes: 0, tables: Tables::Kept };
    let range = map(&sanitizer, 512, 512);
    sanitizer.on_unmap(range, Tables::Detached);
    sanitizer.on_invalidate(&all);
    sanitizer.on_release(range);
    assert_eq!(kinds(&sanitizer), []);
    sanitizer.on_invalidate(&all);
    assert_eq!(kinds(&sanitizer), [FindingKind::PointlessFlush]);
}

#[test]
fn iovas_that_are_released_while_they_are_mapped_are_found() {
    let sanitizer = Sanitizer::default();
    let range = map(&sanitizer, 1, 2);
    sanitizer.on_release(pages(2, 1));
    assert_eq!(kinds(&sanitizer), [FindingKind::ReleasedWhileMapped { freed: None }]);
    assert_eq!(sanitizer.findings()[0].iovas, range);
}

#[test]
fn a_double_unmap_before_the_flush_is_one_however_short_the_history() {
    let sanitizer = Sanitizer::new(SanitizerConfig { history: 2, ..SanitizerConfig::default() });
    let range = map(&sanitizer, 1, 1);
    sanitizer.on_unmap(range, Tables::Kept);
    for page in 8..16 {
        map(&sanitizer, page, 1);
    }
    sanitizer.on_unmap(range, Tables::Kept);
    let by = dmaspan::Caller { device: None, label: dmaspan::Label::caller() };
    let refused = dmaspan::iommu::Event::RefusedUnmap { range, by };
    sanitizer.on_event(&refused);
    assert_eq!(kinds(&sanitizer), [FindingKind::DoubleUnmap, FindingKind::DoubleUnmap]);
}

#[test]
fn a_table_goes_with_the_unmap_of_its_thread_and_counts_once() {
    let sanitizer = Sanitizer::default();
    let (other, own) = (map(&sanitizer, 512, 512), map(&sanitizer, 1024, 1024));
    let tables = [frames(1, 1), frames(2, 1), frames(3, 1)];
    sanitizer.on_retire_table(tables[0]);
    sanitizer.on_retire_table(tables[1]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            sanitizer.on_retire_table(tables[2]);
            sanitizer.on_unmap(other, Tables::Detached);
        });
    });
    sanitizer.on_unmap(own, Tables::Detached);
    // The other thread's flush.
    flush(&sanitizer, other, Tables::Detached);
    sanitizer.on_free_table(tables[2]);
    assert_eq!(kinds(&sanitizer), []);
    sanitizer.on_free_table(tables[0]);
    sanitizer.on_free_table(tables[1]);
    let (cached, cause, freed) = (Cached::Walk, Cause::NoFlush, Some(tables[0]));
    assert_eq!(kinds(&sanitizer), [FindingKind::LateFlush { cached, cause, freed }]);
}

#[test]
fn a_table_that_was_flushed_may_be_freed_while_a_later_one_of_its_place_is_not() {
    let sanitizer = Sanitizer::default();
    let table = frames(1, 1);
    sanitizer.on_retire_table(table);
    let range = map(&sanitizer, 512, 512);
    sanitizer.on_unmap(range, Tables::Detached);
    flush(&sanitizer, range, Tables::Detached);
    sanitizer.on_unmap(map(&sanitizer, 512, 512), Tables::Detached);
    sanitizer.on_free_table(table);
    assert_eq!(kinds(&sanitizer), []);
}
