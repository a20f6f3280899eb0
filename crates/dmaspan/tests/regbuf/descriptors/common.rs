//! Spans, the bytes that they stand for, and memory that a device reads.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use dmaspan::regbuf::descriptors::SegmentLimits;
use dmaspan::{DmaAddr, Span};
use proptest::prelude::*;

pub(crate) type Spans = Vec<Span<DmaAddr>>;

pub(crate) fn span(start: u64, len: u64) -> Span<DmaAddr> {
    Span::new(DmaAddr::new(start), len).unwrap()
}

pub(crate) fn limits(max_segment: u32, boundary: Option<u64>) -> SegmentLimits {
    let limits = SegmentLimits::new(NonZeroU32::new(max_segment).unwrap());
    boundary.map_or(limits, |boundary| limits.with_boundary(boundary).unwrap())
}

/// Every address, one after the other.
pub(crate) fn bytes(spans: &[Span<DmaAddr>]) -> Vec<u64> {
    spans.iter().flat_map(|span| span.start().get()..=span.last().get()).collect()
}

/// What pieces, of an address and a length, stand for: the same where their bytes are.
pub(crate) fn joined(pieces: impl IntoIterator<Item = (u64, u64)>) -> Vec<(u128, u128)> {
    let mut joined: Vec<(u128, u128)> = Vec::new();
    for (start, len) in pieces {
        let (start, end) = (u128::from(start), u128::from(start) + u128::from(len));
        match joined.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => joined.push((start, end)),
        }
    }
    joined
}

pub(crate) fn joined_spans(spans: &[Span<DmaAddr>]) -> Vec<(u128, u128)> {
    joined(spans.iter().map(|span| (span.start().get(), span.len())))
}

pub(crate) fn total(spans: &[Span<DmaAddr>]) -> u64 {
    spans.iter().map(|span| span.len()).sum()
}

/// All lists of up to `most` spans within `size` units of `unit` bytes from `base` on.
pub(crate) fn small_lists(base: u64, unit: u64, size: u64, most: usize) -> Vec<Spans> {
    let one: Vec<_> = (0..size)
        .flat_map(|start| (1..=size - start).map(move |len| (start, len)))
        .map(|(start, len)| span(base + start * unit, len * unit))
        .collect();
    let mut lists = vec![Vec::new()];
    let mut from = 0;
    for _ in 0..most {
        let longest = lists[from..].to_vec();
        from = lists.len();
        for list in longest {
            lists.extend(one.iter().map(|&span| [list.as_slice(), &[span]].concat()));
        }
    }
    lists
}

/// Lists of spans of up to `longest` units, of which about every second one touches the one before.
pub(crate) fn lists(unit: u64, longest: u64, most: usize) -> impl Strategy<Value = Spans> {
    let piece = (any::<bool>(), 0..1_u64 << 20, 1..=longest);
    prop::collection::vec(piece, 1..=most).prop_map(move |pieces| {
        let mut next = 0;
        let of = |(touches, start, len): (bool, u64, u64)| {
            let start = if touches { next } else { start * unit };
            next = start + len * unit;
            span(start, len * unit)
        };
        pieces.into_iter().map(of).collect()
    })
}

/// Memory, of which a device may read only what was written.
#[derive(Default)]
pub(crate) struct Memory {
    /// Stretches of it that do not overlap.
    stretches: BTreeMap<u64, Vec<u8>>,
}

impl Memory {
    pub(crate) fn put(&mut self, addr: u64, bytes: impl IntoIterator<Item = u8>) {
        self.stretches.insert(addr, bytes.into_iter().collect());
    }

    pub(crate) fn read<const N: usize>(&self, addr: u64) -> [u8; N] {
        let (start, bytes) = self.stretches.range(..=addr).next_back().expect("nothing is there");
        let at = usize::try_from(addr - start).unwrap();
        bytes[at..at + N].try_into().unwrap()
    }
}

/// The fields of a descriptor: the first eight bytes and the next four, as all formats have them.
pub(crate) fn address_and_length(bytes: [u8; 16]) -> (u64, u64) {
    let addr = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    (addr, u64::from(u32::from_le_bytes(bytes[8..12].try_into().unwrap())))
}
