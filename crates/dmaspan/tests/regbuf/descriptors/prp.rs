//! PRP entries and lists, read as a controller does.

use dmaspan::regbuf::descriptors::{Error, ListPage, MemoryPageSize, Prps};
use dmaspan::{DmaAddr, Errno, Span};
use proptest::prelude::*;

use super::common::{Memory, joined, joined_spans, lists, small_lists, span, total};

/// Where lists are: their pages are not neighbours.
const LISTS: u64 = 1 << 40;
/// What list memory has before.
const OLD: u64 = 0x5a5a_5a5a_5a5a_5a5a;

/// The bytes that a controller transfers (NVM Express Base Specification 2.0, section 4.1.1).
fn transfer(memory: &Memory, dptr: [u8; 16], len: u64, page: u64) -> Vec<(u64, u64)> {
    let prp1 = u64::from_le_bytes(dptr[..8].try_into().unwrap());
    let prp2 = u64::from_le_bytes(dptr[8..].try_into().unwrap());
    assert_eq!(prp1 % 4, 0, "PRP entry 1 is aligned to dwords");
    let first = len.min(page - prp1 % page);
    let mut pieces = vec![(prp1, first)];
    let mut left = len - first;
    if left == 0 {
        assert_eq!(prp2, 0, "PRP entry 2 is reserved");
    } else if left <= page {
        assert_eq!(prp2 % page, 0, "no entry but the first has an offset");
        pieces.push((prp2, left));
    } else {
        assert_eq!(prp2 % 8, 0, "a list is aligned to its entries");
        let mut at = prp2;
        while left > 0 {
            let entry = u64::from_le_bytes(memory.read(at));
            assert_eq!(entry % page, 0, "neither an entry nor a further list has an offset");
            if at % page == page - 8 && left > page {
                at = entry;
                continue;
            }
            let bytes = left.min(page);
            pieces.push((entry, bytes));
            left -= bytes;
            at += 8;
        }
    }
    pieces
}

/// Memory for a list whose first page begins `offset` bytes into a memory page, and has no more
/// than `entries` entries in all.
struct List {
    pages: Vec<(DmaAddr, Vec<u64>)>,
}

impl List {
    fn new(page: u64, offset: u64, entries: usize) -> Self {
        let mut pages = Vec::new();
        let (mut addr, mut left) = (LISTS + offset, entries);
        while left > 0 {
            let count = left.min(usize::try_from((page - addr % page) / 8).unwrap());
            pages.push((DmaAddr::new(addr), vec![OLD; count]));
            left -= count;
            addr = addr / page * page + 3 * page;
        }
        Self { pages }
    }

    fn write(&mut self, size: MemoryPageSize, spans: &[Span<DmaAddr>]) -> Result<Prps, Error> {
        let mut list: Vec<_> = self
            .pages
            .iter_mut()
            .map(|(addr, entries)| ListPage { addr: *addr, entries })
            .collect();
        size.write(spans.iter().copied(), &mut list)
    }

    fn memory(&self) -> Memory {
        let mut memory = Memory::default();
        for (addr, entries) in &self.pages {
            let written = entries.iter().take_while(|&&entry| entry != OLD);
            memory.put(addr.get(), written.flat_map(|entry| entry.to_ne_bytes()));
        }
        memory
    }

    fn is_untouched(&self) -> bool {
        self.pages.iter().all(|(_, entries)| entries.iter().all(|&entry| entry == OLD))
    }
}

/// Whether PRP entries can tell it at all, and how many do: from each page that has bytes.
fn expressible(spans: &[Span<DmaAddr>], page: u64) -> Option<usize> {
    let page = u128::from(page);
    let runs = joined_spans(spans);
    let (first, last) = (runs.first()?, runs.len() - 1);
    let starts = runs[1..].iter().all(|run| run.0.is_multiple_of(page));
    let ends = runs[..last].iter().all(|run| run.1.is_multiple_of(page));
    let pages = runs.iter().map(|run| run.1.div_ceil(page) - run.0 / page).sum::<u128>();
    (starts && ends && first.0.is_multiple_of(4)).then(|| usize::try_from(pages).unwrap())
}

fn check(mps: u32, spans: &[Span<DmaAddr>], mut list: List) -> Result<Prps, Error> {
    let size = MemoryPageSize::new(mps).unwrap();
    let entries = expressible(spans, size.bytes());
    match (size.entries(spans.iter().copied()), entries) {
        (Ok(made), Some(count)) => {
            assert_eq!(size.count(spans.iter().copied()), Ok(count));
            assert_eq!(made.count(), count);
        }
        (Err(_), None) => {}
        (made, expected) => panic!("{spans:x?}: {made:x?}, and {expected:?} entries were expected"),
    }
    let written = list.write(size, spans);
    match written {
        Ok(prps) => {
            let len = total(spans);
            let pieces = transfer(&list.memory(), prps.to_bytes(), len, size.bytes());
            assert_eq!(Some(pieces.len()), entries);
            let made = size.entries(spans.iter().copied()).unwrap();
            assert!(made.eq(pieces.iter().map(|piece| piece.0)));
            assert_eq!(joined(pieces), joined_spans(spans));
            let used = list.pages.iter().take_while(|(_, entries)| entries[0] != OLD).count();
            assert_eq!(prps.list_pages, used);
        }
        Err(_) => assert!(list.is_untouched()),
    }
    written
}

#[test]
fn small_spans_in_dwords_and_pages_are_told_or_refused() {
    // Units of half a page: some lists can be told, some cannot.
    for base in [0x10_0000, 0x10_0004, 0_u64.wrapping_sub(4 * 0x1000)] {
        let size = if base % 8 == 0 { 8 } else { 7 };
        for spans in small_lists(base, 0x800, size, 3) {
            let list = List::new(0x1000, 0, 64);
            let is_told = check(0, &spans, list).is_ok();
            assert_eq!(is_told, expressible(&spans, 0x1000).is_some(), "{spans:x?}");
        }
    }
}

#[test]
fn every_number_of_pages_has_lists_that_are_just_long_enough() {
    for offset in [0, 8, 0x800, 0xff0, 0xff8] {
        for pages in (1..40).chain(505..520).chain(1018..1030).chain(1530..1538) {
            // Pages that no two of are neighbours, up to 8 that all are, and all of them.
            for group in [1, 8, pages] {
                let spans: Vec<_> = (0..pages)
                    .step_by(group)
                    .map(|n| (n as u64, group.min(pages - n) as u64))
                    .map(|(n, count)| span((1 << 30) + n * 0x2000, count * 0x1000))
                    .collect();
                let size = MemoryPageSize::new(0).unwrap();
                let (first, listed) = (512 - offset / 8, pages as u64 - 1);
                // All of the list's entries, with those that point to the next page.
                let further = (listed.max(first) - first).div_ceil(511);
                let needed = match listed {
                    0 | 1 => 0,
                    _ => listed + further,
                };
                let needed = usize::try_from(needed).unwrap();
                let prps = check(0, &spans, List::new(0x1000, offset, needed)).unwrap();
                if offset == 0 {
                    assert_eq!(prps.list_pages, size.list_pages(pages));
                }
                check(0, &spans, List::new(0x1000, offset, needed + 1000)).unwrap();
                if needed > 0 {
                    let error = check(0, &spans, List::new(0x1000, offset, needed - 1));
                    let Err(Error::Room { needed, room }) = error else { panic!("{error:?}") };
                    assert_eq!(needed as u64, listed);
                    assert!(room < needed);
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn large_transfers_are_told(
        mps in prop_oneof![Just(0_u32), Just(4), 0..=15_u32],
        spans in lists(1, 200, 30),
        offset in 0..512_u64,
        (skip, cut) in (0..1024_u64, 0..4096_u64),
        slot in 0..0x200_u64,
    ) {
        let page = MemoryPageSize::new(mps).unwrap().bytes();
        let mut spans: Vec<_> = spans
            .iter()
            .map(|of| span((of.start().get() + 1) * page, of.len() * page))
            .collect();
        // The first byte is anywhere in its page, by dwords, and the last one anywhere.
        spans[0] = spans[0].skip(skip * 4 % page).unwrap();
        let last = spans.pop().unwrap();
        spans.push(span(last.start().get(), last.len() - cut.min(last.len() - 1) % page));
        let list = List::new(page, slot * 8, 40_000);
        prop_assert!(check(mps, &spans, list).is_ok());
        // Inside of a page no span but the first may begin.
        let amid = span(spans[0].start().get() / page * page + (offset + 1) * 4, 4);
        spans.push(span(1 << 60, page));
        spans.push(amid);
        prop_assert!(check(mps, &spans, List::new(page, 0, 40_000)).is_err());
    }
}

#[test]
fn one_page_and_two_need_no_list() {
    let one = check(0, &[span(0x1ffc, 4)], List::new(0x1000, 0, 0)).unwrap();
    assert_eq!((one.prp1, one.prp2, one.list_pages), (0x1ffc, 0, 0));
    let one = check(4, &[span(0x1_0000, 0x1_0000)], List::new(0x1_0000, 0, 0)).unwrap();
    assert_eq!((one.prp1, one.prp2), (0x1_0000, 0));
    let two = check(0, &[span(0x1ffc, 5)], List::new(0x1000, 0, 0)).unwrap();
    assert_eq!((two.prp1, two.prp2), (0x1ffc, 0x2000));
    // At the top of the space too.
    let top = 0_u64.wrapping_sub(0x2000);
    let two = check(0, &[span(top, 0x2000)], List::new(0x1000, 0, 0)).unwrap();
    assert_eq!((two.prp1, two.prp2), (top, top + 0x1000));
    check(15, &[span(0_u64.wrapping_sub(1 << 29), 1 << 29)], List::new(1 << 27, 8, 3)).unwrap();
}

#[test]
fn the_span_that_begins_or_ends_inside_a_page_is_named() {
    let whole = [span(0x1000, 0x1000), span(0x8000, 0x800), span(0x8800, 0x100)];
    let behind = [&whole[..], &[span(0x3000, 0x1000)]].concat();
    check(0, &whole, List::new(0x1000, 0, 8)).unwrap();
    let error = check(0, &behind, List::new(0x1000, 0, 8)).unwrap_err();
    assert_eq!(error, Error::AmidPage { span: span(0x8000, 0x900), page: 0x1000 });
    assert_eq!(error.errno(), Errno::EINVAL);
    let error = check(4, &[span(0, 0x1_0000), span(0x2_1000, 4)], List::new(0x1_0000, 0, 8));
    assert_eq!(error, Err(Error::AmidPage { span: span(0x2_1000, 4), page: 0x1_0000 }));
}

#[test]
fn transfers_of_nothing_and_from_within_a_dword_are_refused() {
    assert_eq!(check(0, &[], List::new(0x1000, 0, 8)), Err(Error::Empty));
    let error = check(0, &[span(0x1002, 8)], List::new(0x1000, 0, 8));
    assert_eq!(error, Err(Error::Unaligned { addr: DmaAddr::new(0x1002), align: 4 }));
    assert_eq!(MemoryPageSize::new(16), Err(Error::MemoryPageSize { mps: 16 }));
    assert_eq!(MemoryPageSize::new(15).unwrap().bytes(), 128 << 20);
}

#[test]
fn list_pages_that_a_controller_would_read_otherwise_are_refused() {
    let spans = [span(0, 600 * 0x1000)];
    let refused = |pages: &[(u64, usize)]| {
        let pages = pages.iter().map(|&(addr, len)| (DmaAddr::new(addr), vec![OLD; len]));
        check(0, &spans, List { pages: pages.collect() }).unwrap_err()
    };
    let list_page =
        |addr, entries, expected| Error::ListPage { addr: DmaAddr::new(addr), entries, expected };
    let unaligned = |addr, align| Error::Unaligned { addr: DmaAddr::new(addr), align };
    assert_eq!(refused(&[(0x1004, 512), (0x3000, 512)]), unaligned(0x1004, 8));
    assert_eq!(refused(&[(0x1000, 512), (0x3008, 511)]), unaligned(0x3008, 0x1000));
    assert_eq!(refused(&[(0x1000, 511), (0x3000, 512)]), list_page(0x1000, 511, 512));
    assert_eq!(refused(&[(0x1000, 0), (0x3000, 512)]), list_page(0x1000, 0, 512));
    assert_eq!(refused(&[(0x1000, 513), (0x3000, 512)]), list_page(0x1000, 513, 512));
    assert_eq!(refused(&[(0x1008, 512), (0x3000, 512)]), list_page(0x1008, 512, 511));
    assert_eq!(refused(&[(0x1000, 512), (0x3000, 513)]), list_page(0x3000, 513, 512));
    assert_eq!(refused(&[(0x1000, 512)]), Error::Room { needed: 599, room: 512 });
    assert_eq!(refused(&[]), Error::Room { needed: 599, room: 0 });
}
