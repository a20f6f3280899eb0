use std::collections::BTreeSet;

use dmaspan::pin::{Kind, Stopped};

use super::*;
use crate::hugetlb::{self, HugetlbReservation};
use crate::mem::MemoryKind;
use crate::registration::Registrar;
use crate::sys::mapping::Advice;

const SIZE_2M: u64 = 2 << 20;

fn source() -> Option<FrameSource> {
    FrameSource::new().inspect_err(|why| eprintln!("SKIP: {why}")).ok()
}

/// The addresses that this process has for its memory.
fn host() -> FrameSource<HostAddr> {
    FrameSource::new().unwrap()
}

/// Pins memory until the registrar is dropped: frames only stay the same while it is pinned.
fn pinned(memory: &Memory) -> Option<Registrar> {
    let registrar = Registrar::io_uring().ok()?;
    // Closing the ring ends its registrations.
    let _slots = registrar.register(memory, memory.user_range(), 0).unwrap();
    Some(registrar)
}

fn spans<A: FrameAddress>(
    source: &FrameSource<A>,
    memory: &Memory,
    range: UserRange,
    lookup: Lookup,
) -> Vec<Span<A>> {
    let mut spans = Vec::new();
    source.frames(memory, range, lookup, &mut spans).unwrap();
    spans
}

/// The spans as one frame for each page gives them, without any other code of the walk.
fn reference(source: &FrameSource, memory: &Memory, range: UserRange) -> Vec<Span> {
    let mut pages = Vec::new();
    source.page_frames(memory, range, &mut pages).unwrap();
    let page = sys::page_size();
    let (mut spans, mut at) = (Vec::new(), range.start().get());
    for paddr in pages {
        let skip = at % page;
        let len = (page - skip).min(range.last().get() - at + 1);
        let span = Span::new(PhysAddr::new(paddr.get() + skip), len).unwrap();
        SpanSink::push(&mut spans, span, Kind::Memory).unwrap();
        at += len;
    }
    spans
}

fn assert_agreement(source: &FrameSource, memory: &Memory) {
    let page = sys::page_size();
    let len = memory.len();
    let mut parts = BTreeSet::from([(0, len), (0, 1), (len - 1, 1), (page - 1, 2)]);
    for size in [SIZE_2M, crate::os::thp_size()] {
        if len > 2 * size {
            parts.extend([(page, len - 2 * page), (size - 5, 10), (size + 123, size)]);
        }
    }
    for (offset, len) in parts {
        let range = memory.sub_range(offset, len).unwrap();
        let expected = reference(source, memory, range);
        assert_eq!(expected.iter().map(|span| span.len()).sum::<u64>(), len);
        for lookup in [Lookup::EveryPage, Lookup::HugeLeaves, Lookup::Auto] {
            let found = spans(source, memory, range, lookup);
            assert_eq!(found, expected, "{lookup:?} of {len:#x} at {offset:#x}");
        }
    }
}

fn entries(source: &FrameSource, memory: &Memory, lookup: Lookup) -> u64 {
    source.frames(memory, memory.user_range(), lookup, &mut Vec::new()).unwrap().entries
}

#[test]
fn both_lookups_agree_on_memory_without_hugetlb() {
    let Some(source) = source() else { return };
    for kind in [MemoryKind::Thp, MemoryKind::Base, MemoryKind::Memfd] {
        let len = (64_u64 << 20).next_multiple_of(kind.page_size());
        let memory = Memory::new(kind, len).unwrap();
        let _pinned = pinned(&memory);
        assert_agreement(&source, &memory);
    }
}

#[test]
fn both_lookups_agree_on_hugetlb_and_a_leaf_takes_one_entry() {
    let Some(source) = source() else { return };
    let _turn = hugetlb::turn();
    let kinds =
        [(MemoryKind::Hugetlb2M, 8), (MemoryKind::MemfdHugetlb2M, 8), (MemoryKind::Hugetlb1G, 1)];
    for (kind, count) in kinds {
        let len = count * kind.page_size();
        let mut reserved = match HugetlbReservation::for_memory(kind, len) {
            Ok(reservation) => reservation,
            Err(error) => {
                eprintln!("SKIP: {error}");
                continue;
            }
        };
        let memory = Memory::new(kind, len).unwrap();
        reserved.iter_mut().for_each(HugetlbReservation::mapped);
        assert_eq!(huge_bytes(&memory), Ok(len));
        assert_agreement(&source, &memory);
        assert_eq!(entries(&source, &memory, Lookup::HugeLeaves), count);
        let pages = len / sys::page_size();
        assert_eq!(entries(&source, &memory, Lookup::EveryPage), pages);
    }
}

#[test]
fn both_lookups_agree_on_huge_pages_of_which_some_are_split() {
    let Some(source) = source() else { return };
    let huge_page = crate::os::thp_size();
    let page = usize::try_from(sys::page_size()).unwrap();
    let size = usize::try_from(huge_page).unwrap();
    // Of huge pages of 512 MiB there are no 16: of four, the last stays whole.
    let few = huge_page > 32 << 20;
    let (count, middle, border) = if few { (4, 0, 2) } else { (16, 3, 6) };
    let memory = Memory::new(MemoryKind::Thp, count * huge_page).unwrap();
    let mapping = memory.mapping();
    // One page in the middle of a huge page goes and another frame comes in its place.
    mapping.advise(middle * size + 7 * page, page, Advice::Discard).unwrap();
    // Two huge pages and the base pages around their border go, and come back as base pages; or
    // the base pages alone.
    let around = if few { 2 * page } else { 2 * size };
    mapping.advise(border * size - page, around, Advice::NoHuge).unwrap();
    mapping.advise(border * size - page, around, Advice::Discard).unwrap();
    // The first page of the memory goes as well, and of many huge pages the last.
    mapping.advise(0, page, Advice::Discard).unwrap();
    if !few {
        mapping.advise(memory.mapping().len() - page, page, Advice::Discard).unwrap();
    }
    let pages = memory.len() / sys::page_size();
    (0..pages).for_each(|n| memory.write_u64(n * sys::page_size(), n).unwrap());
    let _pinned = pinned(&memory);
    let huge = huge_bytes(&memory).unwrap();
    let split = if few { 3 } else { 5 };
    assert!(huge <= memory.len() - split * huge_page, "{huge:#x}");
    assert_agreement(&source, &memory);
    // Where there are leaves, fewer entries are read than pages are there.
    let read = entries(&source, &memory, Lookup::HugeLeaves);
    let expected = (memory.len() - huge) / sys::page_size() + huge / huge_page;
    assert_eq!(read, expected);
}

#[test]
fn more_regions_than_one_scan_holds_are_all_found() {
    let Some(source) = source() else { return };
    let huge = crate::os::thp_size();
    if huge > SIZE_2M {
        return eprintln!("SKIP: 300 huge pages of {huge} bytes are more than machines have");
    }
    // Every second huge page is split, so each leaf is a region of its own: more than a batch.
    let memory = Memory::new(MemoryKind::Thp, 300 * SIZE_2M).unwrap();
    let page = usize::try_from(sys::page_size()).unwrap();
    let size = usize::try_from(SIZE_2M).unwrap();
    for leaf in (0..300).step_by(2) {
        memory.mapping().advise(leaf * size, page, Advice::Discard).unwrap();
        memory.write(u64::try_from(leaf * size).unwrap(), &[1]).unwrap();
    }
    let whole = memory.user_range();
    let by_leaves = spans(&source, &memory, whole, Lookup::HugeLeaves);
    assert_eq!(by_leaves, spans(&source, &memory, whole, Lookup::EveryPage));
    if huge_bytes(&memory).unwrap() == 150 * SIZE_2M {
        assert_eq!(entries(&source, &memory, Lookup::Auto), 150 * 512 + 150);
    } else {
        eprintln!("SKIP: the kernel found fewer huge pages, so the entries are not counted");
    }
}

#[test]
fn a_page_that_is_not_there_is_an_error_and_no_frame() {
    let Some(source) = source() else { return };
    let memory = Memory::new(MemoryKind::Base, 1 << 20).unwrap();
    let page = usize::try_from(sys::page_size()).unwrap();
    memory.mapping().advise(5 * page, page, Advice::Discard).unwrap();
    let address = memory.user_range().start().wrapping_add(5 * sys::page_size());
    let whole = memory.user_range();
    let expected = PagemapError::NotPresent { address };
    let mut pages = vec![PhysAddr::new(1)];
    assert_eq!(source.page_frames(&memory, whole, &mut pages), Err(expected));
    assert_eq!(pages.len(), 1);
    let result = source.frames(&memory, whole, Lookup::Auto, &mut Vec::new());
    assert_eq!(result, Err(PinError::Failed(expected)));
    assert_eq!(expected.errno(), Errno::EFAULT);
}

#[test]
fn a_sink_that_wants_no_more_stops_the_walk() {
    struct Refuses;
    impl<A> SpanSink<A> for Refuses {
        fn push(&mut self, _span: Span<A>, _kind: Kind) -> Result<(), Stopped> {
            Err(Stopped)
        }
    }
    let memory = Memory::new(MemoryKind::Base, 1 << 20).unwrap();
    let range = memory.user_range();
    if let Some(source) = source() {
        let result = source.frames(&memory, range, Lookup::Auto, &mut Refuses);
        assert_eq!(result, Err(PinError::Stopped));
    }
    let result = host().frames(&memory, range, Lookup::Auto, &mut Refuses);
    assert_eq!(result, Err(PinError::Stopped));
}

#[test]
fn a_sink_that_takes_some_of_what_is_pushed_at_once_gets_no_more() {
    struct TakesSome(usize);
    impl<A> SpanSink<A> for TakesSome {
        fn push(&mut self, _span: Span<A>, _kind: Kind) -> Result<(), Stopped> {
            self.0 = self.0.checked_sub(1).ok_or(Stopped)?;
            Ok(())
        }
    }
    let memory = Memory::new(MemoryKind::Base, 1 << 20).unwrap();
    let range = memory.user_range();
    let Some((source, _pinned)) = source().zip(pinned(&memory)) else { return };
    let all = spans(&source, &memory, range, Lookup::Auto).len();
    for room in 0..=all {
        let mut sink = TakesSome(room);
        let result = source.frames(&memory, range, Lookup::Auto, &mut sink);
        assert_eq!((result.is_ok(), sink.0), (room == all, 0));
    }
}

#[test]
fn virtual_addresses_are_those_of_the_process() {
    let source = host();
    let memory = Memory::new(MemoryKind::Base, 1 << 20).unwrap();
    let range = memory.sub_range(3, 0x5000).unwrap();
    let expected = Span::new(HostAddr::new(range.start().get()), 0x5000).unwrap();
    assert_eq!(spans(&source, &memory, range, Lookup::Auto), [expected]);
    let mut pages = Vec::new();
    let expected = (3 + 0x5000_u64).div_ceil(sys::page_size());
    assert_eq!(source.page_frames(&memory, range, &mut pages), Ok(expected));
    assert_eq!(pages[0].get(), range.start().get() - 3);
}

#[test]
fn a_range_outside_the_memory_is_refused() {
    let memory = Memory::new(MemoryKind::Base, 1 << 20).unwrap();
    let range = UserRange::from_len(memory.user_range().start(), (1 << 20) + 1).unwrap();
    let source = host();
    let result = source.frames(&memory, range, Lookup::Auto, &mut Vec::new());
    assert!(matches!(result, Err(PinError::Failed(PagemapError::Outside(_)))));
    assert!(source.page_frames(&memory, range, &mut Vec::new()).is_err());
}

#[test]
fn without_a_scan_leaves_are_an_error_only_where_they_were_asked_for() {
    let none = Some(os::ENOTTY);
    let choose = |lookup, why| walk::Leaves::choose(MemoryKind::Thp, lookup, why);
    assert_eq!(choose(Lookup::Auto, none), Ok(walk::Leaves::None));
    assert_eq!(choose(Lookup::HugeLeaves, none), Err(os::ENOTTY));
    assert_eq!(choose(Lookup::EveryPage, none), Ok(walk::Leaves::None));
    let hugetlb = walk::Leaves::choose(MemoryKind::Hugetlb2M, Lookup::Auto, none);
    assert_eq!(hugetlb, Ok(walk::Leaves::Everywhere(SIZE_2M)));
}
