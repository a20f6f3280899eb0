//! Virtio chains, read as a device does.

use dmaspan::regbuf::descriptors::{
    Chain, Error, PackedDescriptor, PackedPosition, SegmentLimits, SplitDescriptor,
};
use dmaspan::{DmaAddr, Errno, Span};
use proptest::prelude::*;

use super::common::{
    Spans, address_and_length, joined, joined_spans, limits, lists, small_lists, span,
};

type Pieces = Vec<(u64, u64)>;

/// The last two fields of a descriptor: flags and the next one if split, id and flags if packed.
fn last_fields(bytes: [u8; 16]) -> (u16, u16) {
    let field = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    (field(12), field(14))
}

/// Adds what a descriptor of data tells to what the device reads and what it writes.
fn add(descriptor: [u8; 16], flags: u16, read: &mut Pieces, written: &mut Pieces) {
    if flags & 2 != 0 {
        written.push(address_and_length(descriptor));
    } else {
        assert!(written.is_empty(), "what is read comes before what is written");
        read.push(address_and_length(descriptor));
    }
}

/// What a device reads and writes by a chain of a split table (Virtio 1.2, section 2.7.5).
fn split_chain(table: &[SplitDescriptor], head: u16) -> (Pieces, Pieces) {
    let (mut read, mut written) = (Vec::new(), Vec::new());
    let mut index = head;
    for _ in 0..table.len() {
        let descriptor = table[usize::from(index)].to_bytes();
        let (flags, next) = last_fields(descriptor);
        assert_eq!(flags & !3, 0, "no flags but NEXT and WRITE");
        add(descriptor, flags, &mut read, &mut written);
        if flags & 1 == 0 {
            return (read, written);
        }
        index = next;
    }
    panic!("a chain with a loop");
}

/// What a device reads and writes by the next list of a packed ring (section 2.8), the id of it,
/// and how many descriptors it has; `None` where the first one is not available.
fn packed_list(
    ring: &[[u8; 16]],
    position: PackedPosition,
) -> Option<((Pieces, Pieces), u16, usize)> {
    let (mut read, mut written) = (Vec::new(), Vec::new());
    let (mut index, mut wrap) = (usize::from(position.index()), position.wrap_counter());
    for count in 1..=ring.len() {
        let (id, flags) = last_fields(ring[index]);
        if (flags >> 7 & 1, flags >> 15) != (wrap, 1 - wrap) {
            assert_eq!(count, 1, "all of a list is available when its first one is");
            return None;
        }
        assert_eq!(flags & !0x8083, 0, "no flags but NEXT, WRITE, AVAIL and USED");
        add(ring[index], flags, &mut read, &mut written);
        if flags & 1 == 0 {
            return Some(((read, written), id, count));
        }
        index += 1;
        if index == ring.len() {
            (index, wrap) = (0, 1 - wrap);
        }
    }
    panic!("a list with a loop");
}

fn check_pieces(pieces: &(Pieces, Pieces), limits: SegmentLimits, read: &Spans, written: &Spans) {
    for (pieces, spans) in [(&pieces.0, read), (&pieces.1, written)] {
        let entries = limits.entries(spans.iter().copied());
        let entries = entries.map(|entry| (entry.addr.get(), u64::from(entry.len)));
        assert_eq!(*pieces, entries.collect::<Vec<_>>());
        assert_eq!(joined(pieces.iter().copied()), joined_spans(spans));
    }
}

/// Checks a chain of bytes that are read and written, in all formats.
fn check(limits: SegmentLimits, read: &Spans, written: &Spans) {
    let chain = Chain::new(limits, read.iter().copied(), written.iter().copied());
    let count = chain.descriptors().unwrap();

    let free: Vec<u16> = (0..u16::try_from(count + 2).unwrap()).map(|n| n ^ 1).rev().collect();
    let mut table = vec![SplitDescriptor::default(); count + 4];
    let put = |index, descriptor| table[usize::from(index)] = descriptor;
    assert_eq!(chain.clone().write_split(&free, put), Ok(count));
    check_pieces(&split_chain(&table, free[0]), limits, read, written);
    let unused = SplitDescriptor::default();
    assert_eq!(table.iter().filter(|&&descriptor| descriptor != unused).count(), count);

    let mut table = vec![SplitDescriptor::default(); count + 1];
    assert_eq!(chain.clone().write_split_table(&mut table), Ok(count));
    check_pieces(&split_chain(&table, 0), limits, read, written);
    let in_order = |(n, of): (u16, &SplitDescriptor)| last_fields(of.to_bytes()).1 == n;
    assert!((1..).zip(&table[..count - 1]).all(in_order));
    assert_eq!(table[count], unused);

    let mut table = vec![PackedDescriptor::default(); count + 1];
    assert_eq!(chain.clone().write_packed_table(&mut table), Ok(count));
    let mut pieces = (Vec::new(), Vec::new());
    for descriptor in table[..count].iter().map(|descriptor| descriptor.to_bytes()) {
        let (id, flags) = last_fields(descriptor);
        assert_eq!((id, flags & !2), (0, 0));
        add(descriptor, flags, &mut pieces.0, &mut pieces.1);
    }
    check_pieces(&pieces, limits, read, written);
    assert_eq!(table[count], PackedDescriptor::default());

    let size = u16::try_from(count).unwrap() + 1;
    let mut position = PackedPosition::start(size).unwrap();
    let mut ring = vec![[0; 16]; count + 1];
    // Some rounds, from everywhere in the ring and with either wrap counter.
    for id in 0..6 {
        let mut left = count;
        let behind = chain.clone().write_packed(position, size, id, |index, descriptor| {
            assert!(packed_list(&ring, position).is_none(), "available before all was written");
            left -= 1;
            assert_eq!(left == 0, index == position.index());
            ring[usize::from(index)] = descriptor.to_bytes();
        });
        let (pieces, found, descriptors) = packed_list(&ring, position).unwrap();
        assert_eq!((found, descriptors), (id, count));
        check_pieces(&pieces, limits, read, written);
        position = (0..count).fold(position, |position, _| position.next());
        assert_eq!(behind, Ok(position));
    }
}

#[test]
fn small_spans_are_told_in_all_formats() {
    let lists = small_lists(0, 1, 3, 2);
    for read in &lists {
        for written in lists.iter().filter(|written| !read.is_empty() || !written.is_empty()) {
            for max in 1..=3 {
                for boundary in [None, Some(1), Some(2)] {
                    check(limits(max, boundary), read, written);
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn large_chains_are_told(
        read in lists(512, 1 << 12, 60),
        written in lists(512, 1 << 12, 60),
        max in prop_oneof![Just(u32::MAX), 1_u32 << 16..=u32::MAX],
    ) {
        check(limits(max, None), &read, &written);
    }
}

#[test]
fn a_chain_has_up_to_4_gib() {
    let any = limits(u32::MAX, None);
    let chain = |bytes| Chain::new(any, [span(0, 16)], [span(1 << 40, bytes)]);
    assert_eq!(chain((1 << 32) - 16).descriptors(), Ok(2));
    check(any, &vec![span(0, 16)], &vec![span(1 << 40, (1 << 32) - 16)]);
    let error = chain((1 << 32) - 15).descriptors().unwrap_err();
    assert_eq!(error, Error::TooLong { bytes: (1 << 32) + 1, max: 1 << 32 });
    assert_eq!(error.errno(), Errno::ERANGE);
    let half = [span(0, 1 << 63), span(1 << 63, 1 << 63)];
    let error = Chain::new(any, half, half).descriptors();
    assert_eq!(error, Err(Error::TooLong { bytes: u64::MAX, max: 1 << 32 }));
    let nothing: [Span<DmaAddr>; 0] = [];
    assert_eq!(Chain::new(any, nothing, nothing).descriptors(), Err(Error::Empty));
}

#[test]
fn too_little_room_is_refused_with_nothing_written() {
    let chain = Chain::new(limits(1, None), [span(0, 2)], [span(8, 3)]);
    let refused = Error::Room { needed: 5, room: 4 };
    assert_eq!(refused.errno(), Errno::ENOSPC);
    let error = chain.clone().write_split(&[0, 1, 2, 3], |_, _| panic!("nothing is put"));
    assert_eq!(error, Err(refused));
    let mut table = [SplitDescriptor::default(); 4];
    assert_eq!(chain.clone().write_split_table(&mut table), Err(refused));
    assert_eq!(table, [SplitDescriptor::default(); 4]);
    let mut table = [PackedDescriptor::default(); 4];
    assert_eq!(chain.clone().write_packed_table(&mut table), Err(refused));
    assert_eq!(table, [PackedDescriptor::default(); 4]);
    // In a ring of 8, and in one of 4 of which the caller says that 8 are free.
    for (size, free) in [(8, 4), (4, 8)] {
        let start = PackedPosition::start(size).unwrap();
        let error = chain.clone().write_packed(start, free, 1, |_, _| panic!("nothing is put"));
        assert_eq!(error, Err(refused));
    }
}

/// An iterator of four spans, of which clones give one only.
struct FewerInClones(std::ops::Range<u64>);

impl Clone for FewerInClones {
    fn clone(&self) -> Self {
        Self(0..1)
    }
}

impl Iterator for FewerInClones {
    type Item = Span<DmaAddr>;

    fn next(&mut self) -> Option<Span<DmaAddr>> {
        self.0.next().map(|n| span(n << 12, 1))
    }
}

#[test]
fn spans_that_were_not_counted_take_no_descriptor_of_another_chain() {
    let chain = || Chain::new(SegmentLimits::default(), FewerInClones(0..4), FewerInClones(0..4));
    let mut indices = Vec::new();
    assert_eq!(chain().write_split(&[7, 5, 3], |index, _| indices.push(index)), Ok(2));
    assert_eq!(indices, [7, 5]);
    indices.clear();
    let start = PackedPosition::start(8).unwrap();
    let behind = chain().write_packed(start, 2, 1, |index, _| indices.push(index));
    assert_eq!((behind, indices), (Ok(start.next().next()), vec![1, 0]));
}

#[test]
fn indirect_tables_have_a_descriptor_of_their_own() {
    let of = SplitDescriptor::indirect(DmaAddr::new(0x1234_5678), 3).unwrap().to_bytes();
    assert_eq!((address_and_length(of), last_fields(of)), ((0x1234_5678, 48), (4, 0)));
    let mut position = PackedPosition::start(1).unwrap();
    for flags in [4 | 1 << 7, 4 | 1 << 15] {
        let of = PackedDescriptor::indirect(position, 9, DmaAddr::new(0x1000), 1).unwrap();
        assert_eq!(of.flags(), flags);
        let of = of.to_bytes();
        assert_eq!((address_and_length(of), last_fields(of)), ((0x1000, 16), (9, flags)));
        position = position.next();
    }
    let nothing = DmaAddr::new(0x1000);
    assert_eq!(SplitDescriptor::indirect(nothing, 0), Err(Error::Empty));
    assert_eq!(PackedDescriptor::indirect(position, 9, nothing, 0), Err(Error::Empty));
    let room = (1 << 28) - 1;
    assert!(SplitDescriptor::indirect(DmaAddr::new(0), room).is_ok());
    let error = SplitDescriptor::indirect(DmaAddr::new(0), room + 1);
    assert_eq!(error, Err(Error::Room { needed: room + 1, room }));
}

#[test]
fn a_packed_ring_has_1_to_32768_descriptors() {
    for size in [0, 32769, u16::MAX] {
        assert_eq!(PackedPosition::start(size), Err(Error::QueueSize { size }));
    }
    let start = PackedPosition::start(1 << 15).unwrap();
    assert_eq!((start.index(), start.wrap_counter()), (0, 1));
}
