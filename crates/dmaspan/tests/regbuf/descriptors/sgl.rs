//! NVMe scatter-gather lists, read as a controller does.

use dmaspan::regbuf::descriptors::{Error, ListPage, SegmentLimits, Sgl, SglDescriptor};
use dmaspan::{DmaAddr, Errno, Span};
use proptest::prelude::*;

use super::common::{
    Memory, Spans, address_and_length, joined, joined_spans, limits, lists, small_lists, span,
};

/// Where lists are.
const LISTS: u64 = 1 << 40;

/// The bytes that a controller transfers (NVM Express Base Specification 2.0, section 4.1.2).
fn transfer(memory: &Memory, sgl1: [u8; 16]) -> Vec<(u64, u64)> {
    let mut pieces = Vec::new();
    // Where the current segment goes on, and how many descriptors of it are left.
    let (mut descriptor, mut at, mut left, mut is_last) = (sgl1, 0, 0, false);
    let mut is_command = true;
    loop {
        let (addr, len) = address_and_length(descriptor);
        assert_eq!(descriptor[12..15], [0; 3], "reserved");
        match descriptor[15] {
            0x00 => pieces.push((addr, len)),
            kind @ (0x20 | 0x30) => {
                assert!(!is_last, "the last segment points to none");
                assert_eq!(left, 0, "only the last descriptor of a segment points to another");
                assert!(len > 0 && len % 16 == 0 && addr % 8 == 0, "{len} bytes at {addr:#x}");
                (at, left, is_last) = (addr, len / 16, kind == 0x30);
                is_command = false;
            }
            other => panic!("a descriptor of type {other:#x}"),
        }
        if left == 0 {
            assert!(is_last || is_command, "a segment that is not the last points to another");
            return pieces;
        }
        descriptor = memory.read(at);
        (at, left) = (at + 16, left - 1);
    }
}

struct List {
    pages: Vec<Vec<SglDescriptor>>,
}

impl List {
    fn new(pages: &[usize]) -> Self {
        Self { pages: pages.iter().map(|&len| vec![old(); len]).collect() }
    }

    fn addr(n: usize) -> u64 {
        LISTS + n as u64 * 0x10008
    }

    fn write(&mut self, limits: SegmentLimits, spans: &[Span<DmaAddr>]) -> Result<Sgl, Error> {
        let addr = |n| DmaAddr::new(Self::addr(n));
        let pages = self.pages.iter_mut().enumerate();
        let mut list: Vec<_> =
            pages.map(|(n, entries)| ListPage { addr: addr(n), entries }).collect();
        Sgl::write(limits, spans.iter().copied(), &mut list)
    }

    fn memory(&self) -> Memory {
        let mut memory = Memory::default();
        for (n, page) in self.pages.iter().enumerate() {
            let written = page.iter().take_while(|&&descriptor| descriptor != old());
            memory.put(Self::addr(n), written.flat_map(|descriptor| descriptor.to_bytes()));
        }
        memory
    }
}

/// What list memory has before: the segment of a command that was made of nothing in particular.
fn old() -> SglDescriptor {
    Sgl::write(SegmentLimits::default(), [span(0x5a5a, 0x5a5a)], &mut []).unwrap().sgl1
}

fn check(limits: SegmentLimits, spans: &[Span<DmaAddr>], mut list: List) -> Result<Sgl, Error> {
    let written = list.write(limits, spans);
    match written {
        Ok(sgl) => {
            let pieces = transfer(&list.memory(), sgl.sgl1.to_bytes());
            let entries = limits.entries(spans.iter().copied());
            let entries = entries.map(|entry| (entry.addr.get(), u64::from(entry.len)));
            assert_eq!(pieces, entries.collect::<Vec<_>>());
            assert_eq!(joined(pieces), joined_spans(spans));
            let used = list.pages.iter().take_while(|page| page.first() != Some(&old())).count();
            assert_eq!(sgl.list_pages, used);
        }
        Err(_) => assert!(list.pages.iter().flatten().all(|&descriptor| descriptor == old())),
    }
    written
}

fn apart(count: u64) -> Spans {
    (0..count).map(|n| span(n * 0x100, 0x80)).collect()
}

#[test]
fn small_spans_are_told_under_all_limits() {
    for base in [0, u64::MAX - 4] {
        for spans in small_lists(base, 1, 5, 3).into_iter().filter(|spans| !spans.is_empty()) {
            for max in 1..=5 {
                for boundary in [None, Some(1), Some(2), Some(4)] {
                    check(limits(max, boundary), &spans, List::new(&[3, 2, 4, 9])).unwrap();
                }
            }
        }
    }
}

#[test]
fn every_number_of_blocks_has_lists_that_are_just_long_enough() {
    let any = SegmentLimits::default();
    for count in 2..24 {
        for first in 1..=6 {
            for second in 1..=6 {
                let pages = [first, second, 1, 3, 24];
                check(any, &apart(count), List::new(&pages)).unwrap();
                // What pages have room for, of which all but the last have a pointer.
                for last in 1..=pages.len() {
                    let room = pages[..last].iter().sum::<usize>() - (last - 1);
                    let needed = usize::try_from(count).unwrap();
                    let expected = (room >= needed).then_some(());
                    let written = check(any, &apart(count), List::new(&pages[..last]));
                    assert_eq!(written.ok().map(drop), expected);
                    if expected.is_none() {
                        assert_eq!(written, Err(Error::Room { needed, room }));
                    }
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn large_transfers_are_told(
        spans in lists(512, 1 << 24, 300),
        pages in prop::collection::vec(1..100_usize, 1..10),
        max in prop_oneof![Just(u32::MAX), 1_u32 << 28..=u32::MAX],
    ) {
        let pages = [&pages[..], &[40_000]].concat();
        prop_assert!(check(limits(max, None), &spans, List::new(&pages)).is_ok());
    }
}

#[test]
fn one_block_stands_in_the_command() {
    let sgl =
        check(SegmentLimits::default(), &[span(0x1001, 0x1234), span(0x2235, 1)], List::new(&[]));
    let sgl = sgl.unwrap();
    let expected = [1, 0x10, 0, 0, 0, 0, 0, 0, 0x35, 0x12, 0, 0, 0, 0, 0, 0];
    assert_eq!((sgl.sgl1.to_bytes(), sgl.list_pages), (expected, 0));
}

#[test]
fn blocks_are_as_long_as_a_length_of_32_bits_can_tell() {
    let sgl = check(limits(u32::MAX, None), &[span(8, u64::from(u32::MAX))], List::new(&[]));
    assert_eq!(sgl.unwrap().sgl1.to_bytes()[8..12], [0xff; 4]);
    check(limits(u32::MAX, None), &[span(0, 1 << 32)], List::new(&[2])).unwrap();
}

#[test]
fn a_last_page_without_entries_takes_no_room_away() {
    for (pages, room) in [(&[3, 0][..], 3), (&[3, 1], 3), (&[1, 0], 1), (&[0], 0), (&[], 0)] {
        let written = check(SegmentLimits::default(), &apart(4), List::new(pages));
        assert_eq!(written, Err(Error::Room { needed: 4, room }));
    }
}

#[test]
fn lists_that_no_descriptor_can_tell_are_refused() {
    assert_eq!(check(SegmentLimits::default(), &[], List::new(&[4])), Err(Error::Empty));
    let error = check(SegmentLimits::default(), &apart(3), List::new(&[0, 4])).unwrap_err();
    let addr = DmaAddr::new(LISTS);
    assert_eq!(error, Error::ListPage { addr, entries: 0, expected: 1 });
    assert_eq!(error.errno(), Errno::EINVAL);
    let mut entries = [old(); 4];
    let addr = DmaAddr::new(0x1004);
    let list = &mut [ListPage { addr, entries: &mut entries }];
    let error = Sgl::write(SegmentLimits::default(), apart(3), list);
    assert_eq!(error, Err(Error::Unaligned { addr, align: 8 }));
    assert_eq!(entries, [old(); 4]);
}
