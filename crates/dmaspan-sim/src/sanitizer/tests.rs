//! Every kind of bug, planted and found; and programs without one, in which nothing is found.

use dmaspan::dma::Trust;
use dmaspan::iommu::{Event, Invalidation, Scope, Tables};
use dmaspan::{Caller, Direction, Iova, IovaRange, Label, PhysAddr, Prot, Span};

use super::*;
use crate::iotlb::AbsentEntries;

mod neighbours;
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

fn kinds_of(findings: Vec<Finding>) -> Vec<FindingKind> {
    findings.iter().map(|finding| finding.kind).collect()
}

fn kinds(sanitizer: &Sanitizer) -> Vec<FindingKind> {
    kinds_of(sanitizer.findings())
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
        let sanitizer = Sanitizer::default();
        let range = map(&sanitizer, 16, 4);
        plant(&sanitizer, range);
        sanitizer.on_release(range);
        assert_eq!(kinds_of(sanitizer.errors()), [late(cause)]);
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
fn a_device_that_goes_on_after_the_unmap_is_found_and_after_the_flush_with_both_numbers() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Write);
    sanitizer.on_unmap(map(&sanitizer, 3, 2), Tables::Kept);
    sanitizer.on_dma(Iova::new(5 * PAGE - 1), 1, access);
    let cause = Cause::NoFlush;
    assert_eq!(kinds(&sanitizer), [FindingKind::UseAfterUnmap { access, cause }]);
    flush(&sanitizer, pages(3, 2), Tables::Kept);
    sanitizer.on_dma(Iova::new(5 * PAGE - 1), 1, access);
    let kind = FindingKind::UseAfterFlush { access, unmapped: 2, flushed: 4 };
    assert_eq!(kinds(&sanitizer)[1..], [kind]);
    let found = &sanitizer.findings()[1];
    assert!(found.to_string().contains("unmapped by #2, flushed by #4"), "{found}");
    let numbers: Vec<u64> = found.history.iter().map(|record| record.number).collect();
    let used = IovaRange::point(Iova::new(5 * PAGE - 1));
    assert_eq!((found.iovas, numbers), (used, vec![1, 2, 3, 4, 5, 6]));
    let memory = Span::new(frames(4, 1).last(), 1).unwrap();
    assert_eq!(
        (sanitizer.findings()[0].iovas, sanitizer.findings()[0].memory),
        (used, Some(memory))
    );
    // What is mapped there next is another's.
    let range = map(&sanitizer, 3, 1);
    sanitizer.on_dma(range.start(), 1, access);
    assert_eq!(sanitizer.found(), 2);
    sanitizer.on_dma(pages(4, 1).start(), 1, access);
    assert_eq!(kinds(&sanitizer)[2..], [kind]);
}

#[test]
fn what_was_unmapped_is_known_after_many_other_events_and_after_a_detach() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Read);
    let unmap = |first| {
        let range = map(&sanitizer, first, 1);
        sanitizer.on_unmap(range, Tables::Kept);
        flush(&sanitizer, range, Tables::Kept);
        range
    };
    let range = unmap(1);
    for _ in 0..1 << 16 {
        unmap(2);
    }
    sanitizer.on_dma(range.start(), 1, access);
    let flushed = |unmapped, flushed| FindingKind::UseAfterFlush { access, unmapped, flushed };
    assert_eq!(kinds(&sanitizer), [flushed(2, 3)]);
    let numbers: Vec<_> = sanitizer.findings()[0].history.iter().map(|r| r.number).collect();
    assert_eq!(numbers[..3], [1, 2, 3]);
    let last = sanitizer.events();
    sanitizer.on_unmap(map(&sanitizer, 8, 1), Tables::Kept);
    sanitizer.on_detach();
    sanitizer.on_dma(pages(8, 1).start(), 1, access);
    assert_eq!(kinds(&sanitizer)[1..], [flushed(last + 2, last + 3)]);
}

#[test]
fn of_unmaps_only_as_many_are_known_as_the_history_has() {
    let sanitizer = Sanitizer::new(SanitizerConfig { history: 64, ..SanitizerConfig::default() });
    for first in 1..=100 {
        let range = map(&sanitizer, 2 * first, 1);
        sanitizer.on_unmap(range, Tables::Kept);
        flush(&sanitizer, range, Tables::Kept);
    }
    for first in [36, 37] {
        sanitizer.on_dma(pages(2 * first, 1).start(), 1, Access::Read);
    }
    let access = Access::Read;
    let gone = FindingKind::UseAfterFlush { access, unmapped: 37 * 4 - 2, flushed: 37 * 4 - 1 };
    assert_eq!(kinds(&sanitizer), [FindingKind::Unmapped { access }, gone]);
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
    sanitizer.on_dma(Iova::new(!0xfff - 1), 2, access);
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
fn a_flush_of_nothing_stale_is_pointless_which_is_advice() {
    let sanitizer = Sanitizer::default();
    let range = map(&sanitizer, 1, 1);
    flush(&sanitizer, range, Tables::Kept);
    sanitizer.on_unmap(range, Tables::Kept);
    flush(&sanitizer, pages(0, 9), Tables::Kept);
    flush(&sanitizer, pages(0, 9), Tables::Kept);
    assert_eq!(kinds(&sanitizer), [FindingKind::PointlessFlush; 2]);
    assert_eq!((sanitizer.errors(), sanitizer.advice()), (vec![], sanitizer.findings()));
    assert!(sanitizer.findings()[1].to_string().starts_with("ADVICE: pointless flush"));
}

/// Unmaps a page by another thread, which then flushes all of it, or by name, or not.
fn elsewhere(sanitizer: &Sanitizer, first: u64, forget: Option<Scope<'_>>) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let range = map(sanitizer, first, 1);
            sanitizer.on_unmap(range, Tables::Kept);
            let tables = Tables::Kept;
            if let Some(scope) = forget {
                sanitizer.on_invalidate(&Invalidation { scope, leaf_sizes: 1 << 12, tables });
            }
        });
    });
}

#[test]
fn a_flush_for_what_a_flush_of_another_thread_forgot_by_the_way_is_not_pointless() {
    let all = Invalidation { scope: Scope::All, leaf_sizes: 0, tables: Tables::Kept };
    // Two CPUs gather apart, and both flush everything: the first one has done it for both.
    let sanitizer = Sanitizer::default();
    sanitizer.on_unmap(map(&sanitizer, 1, 1), Tables::Kept);
    elsewhere(&sanitizer, 2, Some(Scope::All));
    sanitizer.on_invalidate(&all);
    assert_eq!(kinds(&sanitizer), []);
    // A third thread flushes what both had gathered.
    elsewhere(&sanitizer, 3, None);
    sanitizer.on_invalidate(&all);
    flush(&sanitizer, pages(3, 1), Tables::Kept);
    assert_eq!(kinds(&sanitizer), []);
    // Again, which by then everybody knows.
    flush(&sanitizer, pages(3, 1), Tables::Kept);
    assert_eq!(kinds(&sanitizer), [FindingKind::PointlessFlush]);
}

#[test]
fn a_flush_for_an_unmap_of_nothing_is_not_pointless_after_one_of_another_thread() {
    let sanitizer = Sanitizer::default();
    sanitizer.on_unmap_parts(pages(1, 1), Tables::Kept, 1 << 12);
    elsewhere(&sanitizer, 2, Some(Scope::All));
    flush(&sanitizer, pages(1, 1), Tables::Kept);
    assert_eq!(kinds(&sanitizer), []);
    flush(&sanitizer, pages(1, 1), Tables::Kept);
    assert_eq!(kinds(&sanitizer), [FindingKind::PointlessFlush]);
}

#[test]
fn a_flush_that_names_an_unmap_of_nothing_need_not_know_of_one_of_everything_by_its_thread() {
    let all = Invalidation { scope: Scope::All, leaf_sizes: 0, tables: Tables::Kept };
    for unmapped in [true, false] {
        let sanitizer = Sanitizer::default();
        // The unmap waits in the queue of one CPU; the thread flushes that of another.
        if unmapped {
            sanitizer.on_unmap(map(&sanitizer, 1, 1), Tables::Kept);
        } else {
            sanitizer.on_unmap_parts(pages(1, 1), Tables::Kept, 1 << 12);
        }
        sanitizer.on_invalidate(&all);
        flush(&sanitizer, pages(1, 1), Tables::Kept);
        assert_eq!(kinds(&sanitizer), []);
        // By then it does.
        sanitizer.on_invalidate(&all);
        assert_eq!(kinds(&sanitizer), [FindingKind::PointlessFlush]);
    }
}

#[test]
fn a_buffer_has_all_its_bytes_after_a_part_was_mapped_for_a_moment_and_taken_back() {
    let sanitizer = Sanitizer::default();
    // A table is in the way of the second page: the map takes back the first, and begins anew.
    let (whole, prot) = (pages(1, 2), Prot::READ_WRITE);
    let bytes = IovaRange::new(Iova::new(0x1ed7), Iova::new(0x2097)).unwrap();
    sanitizer.on_event(&Event::Bytes { range: bytes, granule_lg2: 12 });
    sanitizer.on_event(&Event::Mapped { range: pages(1, 1), spans: &[], prot });
    let (leaf_sizes, tables) = (1 << 12, Tables::Kept);
    sanitizer.on_event(&Event::Unmapped { range: pages(1, 1), leaf_sizes, tables });
    flush(&sanitizer, pages(1, 1), tables);
    let spans = [Span::new(PhysAddr::new(0x8000_0000), 0x2000).unwrap()];
    sanitizer.on_event(&Event::Mapped { range: whole, spans: &spans, prot });
    sanitizer.on_dma(bytes.start(), bytes.checked_len().unwrap(), Access::Write);
    assert_eq!(kinds(&sanitizer), []);
    // And no more than these.
    sanitizer.on_dma(Iova::new(0x1000), 1, Access::Write);
    assert_eq!(kinds(&sanitizer).len(), 1);
}

#[test]
fn a_thread_that_flushes_everything_twice_flushes_once_in_vain() {
    let all = Invalidation { scope: Scope::All, leaf_sizes: 0, tables: Tables::Kept };
    let sanitizer = Sanitizer::default();
    elsewhere(&sanitizer, 2, Some(Scope::Ranges(&[pages(2, 1)])));
    sanitizer.on_unmap(map(&sanitizer, 1, 1), Tables::Kept);
    sanitizer.on_invalidate(&all);
    assert_eq!(kinds(&sanitizer), []);
    sanitizer.on_invalidate(&all);
    assert_eq!(kinds(&sanitizer), [FindingKind::PointlessFlush]);
    let flushed = &sanitizer.findings()[0].history;
    assert!(flushed.iter().any(|record| record.number == 6), "the flush that did it");
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
fn a_flood_of_one_kind_hides_no_other_and_what_is_found_can_be_indexed() {
    let sanitizer = Sanitizer::new(SanitizerConfig { findings: 2, ..SanitizerConfig::default() });
    let leaked = map(&sanitizer, 9, 1);
    (0..5).for_each(|page| sanitizer.on_unmap(pages(page, 1), Tables::Kept));
    let use_it = |page| sanitizer.on_dma(pages(page, 1).start(), 1, Access::Read);
    (100..104).for_each(use_it);
    let findings = sanitizer.finish();
    assert_eq!((sanitizer.found(), sanitizer.left_out()), (findings.len(), 5));
    let unmapped = FindingKind::Unmapped { access: Access::Read };
    let nothing = FindingKind::UnmapOfNothing;
    assert_eq!(kinds_of(findings), [nothing, nothing, unmapped, unmapped, FindingKind::Leak]);
    assert_eq!(sanitizer.findings()[sanitizer.found() - 1].iovas, leaked);
    let report = sanitizer.to_string();
    let tail = "DMA to nothing: 2 more\nunmap of nothing: 3 more\nerrors: 5, advice: 0, events: 11";
    assert!(report.ends_with(tail), "{report}");
    assert_eq!(report.matches("ERROR: ").count(), 5);
}

#[test]
fn a_driver_that_never_flushes_costs_no_more_with_each_unmap() {
    let sanitizer = Sanitizer::default();
    let memory = frames(1, 1);
    let rounds = 1 << 16;
    for page in 1..=rounds {
        sanitizer.on_map(pages(page, 1), &[memory], Prot::WRITE);
        sanitizer.on_unmap(pages(page, 1), Tables::Kept);
        sanitizer.on_free(memory);
        sanitizer.on_dma(pages(page, 1).start(), 1, Access::Write);
    }
    sanitizer.finish();
    let kept = u64::try_from(sanitizer.found()).unwrap();
    assert_eq!((kept, sanitizer.left_out()), (200, 2 * rounds - 200));
}

#[test]
fn a_leak_names_the_map_and_its_place() {
    let sanitizer = Sanitizer::default();
    // Not this one, which was unmapped.
    let range = map(&sanitizer, 1, 1);
    sanitizer.on_unmap(range, Tables::Kept);
    flush(&sanitizer, range, Tables::Kept);
    let line = line!() + 1;
    sanitizer.named("rx ring").on_map(range, &[frames(1, 1)], Prot::WRITE);
    let report = sanitizer.finish()[0].to_string();
    let place = format!("what: #5, at {}:{line}, ", file!());
    let end = ", rx ring, mapped 0x1000..=0x1fff: it is still mapped at the end\n";
    assert!(report.contains(&place) && report.contains(end), "{report}");
}

/// Half a page of memory, and the IOVAs that are mapped to it, of a page of their own.
fn half(page: u64, half: u64, iova: u64) -> (Span, IovaRange) {
    let memory = Span::new(frames(page, 1).paddr().wrapping_add(half * PAGE / 2), PAGE / 2);
    let start = pages(iova, 1).start().wrapping_add(half * PAGE / 2);
    (memory.unwrap(), IovaRange::from_len(start, PAGE / 2).unwrap())
}

/// Maps half a page as a domain does.
fn map_half(sanitizer: &Sanitizer, (memory, iovas): (Span, IovaRange)) -> IovaRange {
    let page = memory.paddr().get() & !(PAGE - 1);
    let whole = Span::new(PhysAddr::new(page), PAGE).unwrap();
    let range = pages(iovas.start().get() / PAGE, 1);
    sanitizer.on_event(&Event::Bytes { range: iovas, granule_lg2: 12 });
    sanitizer.on_event(&Event::Mapped { range, spans: &[whole], prot: Prot::READ_WRITE });
    range
}

fn of_trust(trust: Trust) -> Sanitizer {
    Sanitizer::new(SanitizerConfig { trust, ..SanitizerConfig::default() })
}

#[test]
fn a_neighbour_of_what_is_mapped_may_be_freed_unless_the_device_is_not_trusted() {
    for (trust, found) in [(Trust::Trusted, 0), (Trust::Untrusted, 1)] {
        let sanitizer = of_trust(trust);
        let (first, second) = (half(5, 0, 1), half(5, 1, 2));
        let one = map_half(&sanitizer, first);
        let other = map_half(&sanitizer, second);
        assert_eq!(sanitizer.mapped(pages(0, 9)), [pages(1, 2)]);
        sanitizer.on_unmap_parts(one, Tables::Kept, 0);
        flush(&sanitizer, one, Tables::Kept);
        sanitizer.on_free(first.0);
        let (freed, granule) = (first.0, frames(5, 1));
        let shared = FindingKind::SharedGranule { freed, granule };
        assert_eq!(kinds(&sanitizer), [shared][..found], "{trust:?}");
        assert!(sanitizer.findings().iter().all(|found| found.iovas == second.1));
        // Of the neighbour itself it is a bug.
        sanitizer.on_free(second.0);
        let freed = Some(second.0);
        let while_mapped = FindingKind::ReleasedWhileMapped { freed };
        assert_eq!(kinds(&sanitizer)[found..], [while_mapped], "{trust:?}");
        sanitizer.on_unmap_parts(other, Tables::Kept, 0);
        sanitizer.on_free(second.0);
        let late = FindingKind::LateFlush { cached: Cached::Leaf, cause: Cause::NoFlush, freed };
        assert_eq!(kinds(&sanitizer)[found + 1..], [late], "{trust:?}");
    }
}

#[test]
fn a_device_that_leaves_its_buffer_within_a_granule_is_found() {
    let kind = |access, trust| {
        let mapping = half(5, 0, 1).1;
        FindingKind::BesideMapping { access, mapping, trust }
    };
    for trust in [Trust::Trusted, Trust::Untrusted] {
        let sanitizer = of_trust(trust);
        let (memory, iovas) = half(5, 0, 1);
        map_half(&sanitizer, (memory, iovas));
        let access = |access, offset, len| {
            sanitizer.on_dma(iovas.start().wrapping_add(offset), len, access);
        };
        access(Access::Write, 0, PAGE / 2);
        assert_eq!(kinds(&sanitizer), []);
        access(Access::Write, 1, PAGE / 2);
        assert_eq!(kinds(&sanitizer), [kind(Access::Write, trust)]);
        assert_eq!(sanitizer.errors().len(), 1);
        // It may see what is beside, if it is trusted, which stays advice.
        access(Access::Read, 0, PAGE);
        assert_eq!(kinds(&sanitizer)[1..], [kind(Access::Read, trust)]);
        assert_eq!(sanitizer.advice().len(), usize::from(trust == Trust::Trusted));
        // And not what is behind.
        let errors = sanitizer.errors().len();
        access(Access::Read, 0, PAGE + 1);
        assert_eq!(sanitizer.errors().len(), errors + 1);
        let report = sanitizer.findings()[0].to_string();
        assert!(
            report.contains("wrote 0x1800..=0x1800, in a granule of 0x1000..=0x17ff"),
            "{report}"
        );
    }
}

#[test]
fn advice_about_a_kind_hides_no_error_of_that_kind() {
    let sanitizer = Sanitizer::new(SanitizerConfig { findings: 3, ..SanitizerConfig::default() });
    let (memory, iovas) = half(5, 0, 1);
    map_half(&sanitizer, (memory, iovas));
    let beside = iovas.last().wrapping_add(1);
    // A trusted device that looks ahead, again and again, and then writes there once.
    (0..10).for_each(|_| sanitizer.on_dma(beside, 8, Access::Read));
    assert_eq!((sanitizer.advice().len(), sanitizer.errors()), (3, vec![]));
    sanitizer.on_dma(beside, 8, Access::Write);
    let (access, mapping, trust) = (Access::Write, iovas, Trust::Trusted);
    let wrote = FindingKind::BesideMapping { access, mapping, trust };
    assert_eq!(kinds_of(sanitizer.errors()), [wrote]);
    assert_eq!((sanitizer.found(), sanitizer.left_out()), (4, 7));
}

#[test]
fn a_granule_as_large_as_the_space_is_no_reason_to_panic() {
    for granule_lg2 in [63, 64, u32::MAX] {
        let trust = Trust::Untrusted;
        let config = SanitizerConfig { trust, granule_lg2, ..SanitizerConfig::default() };
        let sanitizer = Sanitizer::new(config);
        let range = map(&sanitizer, 1, 1);
        sanitizer.on_free(frames(3, 1));
        sanitizer.on_dma(pages(5, 1).start(), 8, Access::Read);
        sanitizer.on_unmap(range, Tables::Kept);
        flush(&sanitizer, range, Tables::Kept);
        assert_eq!(sanitizer.mapped(range), []);
    }
}

#[test]
fn the_bytes_of_each_piece_of_a_list_are_its_own() {
    let sanitizer = Sanitizer::default();
    let bytes = |start, len| {
        let range = IovaRange::from_len(Iova::new(start), len).unwrap();
        sanitizer.on_event(&Event::Bytes { range, granule_lg2: 12 });
        range
    };
    let (first, second) = (bytes(0x1100, 0x200), bytes(0x2f00, 0x1100));
    let spans = [frames(1, 1), frames(7, 2)];
    sanitizer.on_event(&Event::Mapped { range: pages(1, 3), spans: &spans, prot: Prot::WRITE });
    let free = |first: Span, offset, len| {
        sanitizer.on_free(Span::new(first.paddr().wrapping_add(offset), len).unwrap());
        sanitizer.found()
    };
    // Before, between and behind.
    assert_eq!(free(frames(1, 1), 0, 0x100), 0);
    assert_eq!(free(frames(1, 1), 0x300, 0xd00), 0);
    assert_eq!(free(frames(7, 1), 0, 0xf00), 0);
    assert_eq!(free(frames(1, 1), 0x2ff, 1), 1);
    assert_eq!(sanitizer.findings()[0].iovas, first);
    assert_eq!(free(frames(7, 1), 0xf00, 1), 2);
    assert_eq!(sanitizer.findings()[1].iovas, second);
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
    let by = Caller { device: None, label: Label::caller() };
    let refused = Event::RefusedUnmap { range, by };
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
