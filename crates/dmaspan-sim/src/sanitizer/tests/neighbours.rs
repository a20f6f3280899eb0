//! Accesses that begin in one mapping and end in another.

use super::*;

fn into_next(access: Access, mapping: IovaRange, next: IovaRange) -> FindingKind {
    FindingKind::IntoNext { access, mapping, next }
}

#[test]
fn an_access_that_runs_into_the_next_mapping_is_found_though_no_iommu_refuses_it() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Write);
    let (first, next) = (map(&sanitizer, 1, 1), map(&sanitizer, 2, 1));
    sanitizer.on_dma(first.start(), 2 * PAGE, access);
    assert_eq!(kinds_of(sanitizer.errors()), [into_next(access, first, next)]);
    let found = &sanitizer.findings()[0];
    assert_eq!((found.iovas, found.memory), (next, Some(frames(2, 1))));
    let numbers: Vec<u64> = found.history.iter().map(|record| record.number).collect();
    assert_eq!(numbers, [1, 2, 3]);
    let report = found.to_string();
    let what = "a device wrote 0x2000..=0x2fff, past 0x1000..=0x1fff and into 0x2000..=0x2fff";
    assert!(report.contains(what), "{report}");
    // By one byte, and within each.
    sanitizer.on_dma(first.last(), 2, Access::Read);
    assert_eq!(kinds(&sanitizer)[1..], [into_next(Access::Read, first, next)]);
    assert_eq!(sanitizer.findings()[1].iovas, IovaRange::point(next.start()));
    sanitizer.on_dma(first.start(), PAGE, access);
    sanitizer.on_dma(next.start(), PAGE, access);
    assert_eq!(sanitizer.found(), 2);
}

#[test]
fn an_access_over_several_mappings_is_one_finding_and_a_hole_before_the_next_is_that() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Write);
    let (first, next) = (map(&sanitizer, 1, 1), map(&sanitizer, 2, 1));
    map(&sanitizer, 3, 1);
    map(&sanitizer, 6, 1);
    sanitizer.on_dma(first.start(), 8 * PAGE, access);
    assert_eq!(kinds(&sanitizer), [into_next(access, first, next)]);
    sanitizer.on_dma(pages(3, 1).start(), 4 * PAGE, access);
    let past = FindingKind::PastMapping { access, mapping: pages(3, 1) };
    assert_eq!(kinds(&sanitizer)[1..], [past]);
    assert_eq!(sanitizer.findings()[1].iovas, pages(4, 2));
}

#[test]
fn mappings_without_memory_and_at_the_top_of_the_space_have_neighbours_too() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Write);
    let top = |first| IovaRange::new(Iova::new(first), Iova::new(first + 0xfff)).unwrap();
    let (first, next) = (top(!0x1fff), top(!0xfff));
    sanitizer.on_map(next, &[], Prot::WRITE);
    sanitizer.on_map(first, &[], Prot::WRITE);
    sanitizer.on_dma(first.start(), u64::MAX, access);
    assert_eq!(kinds(&sanitizer), [into_next(access, first, next)]);
}

#[test]
fn what_was_mapped_again_within_a_mapping_is_another() {
    let config = SanitizerConfig { parts: Parts::Allow, ..SanitizerConfig::default() };
    let (sanitizer, access) = (Sanitizer::new(config), Access::Write);
    let whole = map(&sanitizer, 1, 3);
    sanitizer.on_unmap(pages(2, 1), Tables::Kept);
    flush(&sanitizer, pages(2, 1), Tables::Kept);
    map(&sanitizer, 2, 1);
    sanitizer.on_dma(whole.start(), 3 * PAGE, access);
    assert_eq!(kinds(&sanitizer), [into_next(access, pages(1, 1), pages(2, 1))]);
}

#[test]
fn a_part_that_was_protected_is_of_its_mapping_still() {
    let sanitizer = Sanitizer::default();
    let range = map(&sanitizer, 1, 4);
    sanitizer.on_protect(pages(2, 2), Prot::READ);
    sanitizer.on_dma(range.start(), 4 * PAGE, Access::Read);
    assert_eq!(kinds(&sanitizer), []);
}

#[test]
fn neighbours_are_one_buffer_where_that_is_said_or_the_domain_has_one_owner() {
    let owned = |neighbours, is_one_owners| {
        let sanitizer =
            Sanitizer::new(SanitizerConfig { neighbours, ..SanitizerConfig::default() });
        if is_one_owners {
            sanitizer.on_event(&Event::OneOwner);
        }
        map(&sanitizer, 2, 1);
        let first = map(&sanitizer, 1, 1);
        sanitizer.on_dma(first.start(), 2 * PAGE, Access::Read);
        // Beyond both it is wrong in any case.
        sanitizer.on_dma(pages(2, 1).start(), 2 * PAGE, Access::Read);
        sanitizer.found() - 1
    };
    assert_eq!((owned(Neighbours::ByOwner, false), owned(Neighbours::ByOwner, true)), (1, 0));
    assert_eq!((owned(Neighbours::Apart, false), owned(Neighbours::Apart, true)), (1, 1));
    assert_eq!((owned(Neighbours::Joined, false), owned(Neighbours::Joined, true)), (0, 0));
}

#[test]
fn what_was_asked_for_together_is_one_buffer_until_it_is_unmapped() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Write);
    let by = Caller { device: None, label: Label::caller() };
    let range = pages(1, 3);
    sanitizer.on_event(&Event::Mapping { range, by });
    for page in [1, 2, 3] {
        map(&sanitizer, page, 1);
    }
    map(&sanitizer, 4, 1);
    sanitizer.on_dma(range.start(), 3 * PAGE, access);
    assert_eq!(kinds(&sanitizer), []);
    sanitizer.on_dma(range.start(), 4 * PAGE, access);
    let kind = into_next(access, pages(1, 1), pages(4, 1));
    assert_eq!(kinds(&sanitizer), [kind]);
    // A part that goes and comes again, as in a reservation.
    sanitizer.on_event(&Event::Unmapping { range: pages(2, 1), by });
    sanitizer.on_unmap_parts(pages(2, 1), Tables::Kept, 0);
    flush(&sanitizer, pages(2, 1), Tables::Kept);
    sanitizer.on_event(&Event::Mapping { range, by });
    map(&sanitizer, 2, 1);
    sanitizer.on_dma(range.start(), 3 * PAGE, access);
    assert_eq!(sanitizer.found(), 1);
    // Those who map by themselves next were not asked for together.
    sanitizer.on_event(&Event::Unmapping { range, by });
    sanitizer.on_unmap_parts(range, Tables::Kept, 0);
    flush(&sanitizer, range, Tables::Kept);
    map(&sanitizer, 1, 1);
    map(&sanitizer, 2, 1);
    sanitizer.on_dma(range.start(), 2 * PAGE, access);
    assert_eq!(kinds(&sanitizer)[1..], [into_next(access, pages(1, 1), pages(2, 1))]);
}

#[test]
fn a_trusted_device_that_reads_on_behind_its_buffer_is_found_where_the_next_begins() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Read);
    let bytes = |start, len| IovaRange::from_len(Iova::new(start), len).unwrap();
    for (page, len) in [(1, 0x800), (2, 0x1000)] {
        let range = bytes(page * PAGE, len);
        sanitizer.on_event(&Event::Bytes { range, granule_lg2: 12 });
        map(&sanitizer, page, 1);
    }
    sanitizer.on_dma(Iova::new(PAGE), PAGE + 1, access);
    let beside =
        FindingKind::BesideMapping { access, mapping: bytes(PAGE, 0x800), trust: Trust::Trusted };
    let next = into_next(access, bytes(PAGE, 0x800), pages(2, 1));
    assert_eq!(kinds(&sanitizer), [beside, next]);
}

#[test]
fn an_access_at_the_address_of_a_refused_buffer_has_words_of_its_own() {
    let (sanitizer, access) = (Sanitizer::default(), Access::Read);
    let refused = Iova::new(dmaspan::DmaAddr::REFUSED.get());
    sanitizer.on_dma(refused, 64, access);
    sanitizer.on_dma(refused.wrapping_add(512), PAGE, Access::Write);
    let kind = |access| FindingKind::RefusedBuffer { access };
    assert_eq!(kinds_of(sanitizer.errors()), [kind(access), kind(Access::Write)]);
    let report = sanitizer.findings()[0].to_string();
    let words =
        ["ERROR: DMA to a refused buffer\n", "in place of a buffer that was refused", "pool"];
    assert!(words.iter().all(|words| report.contains(words)), "{report}");
    // Nothing but that, where the page was mapped.
    let range = IovaRange::from_len(refused, PAGE).unwrap();
    sanitizer.on_map(range, &[], Prot::READ);
    sanitizer.on_dma(refused, PAGE, access);
    assert_eq!(sanitizer.found(), 2);
}
