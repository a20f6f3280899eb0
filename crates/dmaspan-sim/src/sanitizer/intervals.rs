//! Disjoint ranges of IOVAs with values, and which of them lead to a piece of memory.

use std::collections::{BTreeMap, BTreeSet};

use dmaspan::{Iova, IovaRange};

/// A value that can be cut in two with its range.
pub(super) trait Cut: Clone {
    /// The value for what lies `bytes` behind the start.
    fn advance(&mut self, _bytes: u64) {}

    /// Returns where the memory begins that the range leads to, where that matters.
    fn paddr(&self) -> Option<u64> {
        None
    }
}

#[derive(Debug)]
pub(super) struct Intervals<V> {
    /// By start, the last address and the value.
    map: BTreeMap<u64, (u64, V)>,
    by_memory: ByMemory,
}

impl<V> Default for Intervals<V> {
    fn default() -> Self {
        Self { map: BTreeMap::new(), by_memory: ByMemory::default() }
    }
}

fn range(start: u64, last: u64) -> IovaRange {
    let start = Iova::new(start);
    IovaRange::new(start, Iova::new(last)).unwrap_or(IovaRange::point(start))
}

impl<V: Cut> Intervals<V> {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (IovaRange, &V)> {
        self.map.iter().map(|(&start, (last, value))| (range(start, *last), value))
    }

    /// Those that have an address of `within`, in order.
    pub(super) fn meeting(&self, within: IovaRange) -> impl Iterator<Item = (IovaRange, &V)> {
        let (start, last) = (within.start().get(), within.last().get());
        let before = self.map.range(..start).next_back().filter(|(_, (last, _))| *last >= start);
        let others = self.map.range(start..=last);
        before.into_iter().chain(others).map(|(&start, (last, value))| (range(start, *last), value))
    }

    /// The first of [`meeting`](Self::meeting).
    pub(super) fn first(&self, within: IovaRange) -> Option<(IovaRange, &V)> {
        self.meeting(within).next()
    }

    /// As [`meeting`](Self::meeting), to change. What leads to memory stays.
    pub(super) fn each_meeting(&mut self, within: IovaRange, mut change: impl FnMut(&mut V)) {
        let first = self.first(within).map(|(range, _)| range.start().get());
        let Some(first) = first else { return };
        for (_, value) in self.map.range_mut(first..=within.last().get()).map(|(_, v)| v) {
            change(value);
        }
    }

    /// The one with this address.
    pub(super) fn at(&self, iova: Iova) -> Option<(IovaRange, &V)> {
        self.first(IovaRange::point(iova))
    }

    /// Puts in a range of which no address is taken.
    pub(super) fn insert(&mut self, range: IovaRange, value: V) {
        if let Some(paddr) = value.paddr() {
            self.by_memory.insert(paddr, range);
        }
        self.map.insert(range.start().get(), (range.last().get(), value));
    }

    /// Takes out everything in `within`; what crosses its borders is cut there and stays outside.
    pub(super) fn take(&mut self, within: IovaRange) -> Vec<(IovaRange, V)> {
        let mut taken = Vec::new();
        while let Some((found, _)) = self.first(within) {
            let Some((_, mut value)) = self.map.remove(&found.start().get()) else { break };
            if let Some(paddr) = value.paddr() {
                self.by_memory.remove(paddr, found);
            }
            let Some(inner) = found.intersection(within) else { break };
            let (start, last) = (inner.start().get(), inner.last().get());
            if found.start() < inner.start() {
                self.insert(range(found.start().get(), start - 1), value.clone());
                value.advance(start - found.start().get());
            }
            if found.last() > inner.last() {
                let mut behind = value.clone();
                behind.advance(last - start + 1);
                self.insert(range(last + 1, found.last().get()), behind);
            }
            taken.push((inner, value));
        }
        taken
    }

    /// Those that lead to memory from one physical address to another, both included.
    pub(super) fn leading_to(&self, memory: (u64, u64)) -> impl Iterator<Item = (IovaRange, &V)> {
        self.by_memory.starts(memory).filter_map(|start| self.at(Iova::new(start)))
    }

    /// The first addresses of `within` that none has.
    pub(super) fn gap(&self, within: IovaRange) -> Option<IovaRange> {
        let mut next = within.start();
        for (found, _) in self.meeting(within) {
            if next < found.start() {
                return Some(range(next.get(), found.start().get() - 1));
            }
            next = found.last().checked_add(1).filter(|next| *next <= within.last())?;
        }
        Some(range(next.get(), within.last().get()))
    }
}

/// Extents of memory by size: those of one size that meet a span begin close to it, so that finding
/// them costs a look-up a size however many there are.
#[derive(Debug)]
struct ByMemory {
    /// By log2 of the length: starts, and the IOVAs that lead there, first and last.
    sizes: [BTreeSet<(u64, u64, u64)>; 64],
}

impl Default for ByMemory {
    fn default() -> Self {
        Self { sizes: std::array::from_fn(|_| BTreeSet::new()) }
    }
}

impl ByMemory {
    /// log2 of the length, rounded down, as an index.
    fn size(range: IovaRange) -> usize {
        let lg2 = 63 - (range.len_less_one() | 1).leading_zeros();
        usize::try_from(lg2).unwrap_or(63)
    }

    fn insert(&mut self, paddr: u64, range: IovaRange) {
        let iovas = (paddr, range.start().get(), range.last().get());
        self.sizes[Self::size(range)].insert(iovas);
    }

    fn remove(&mut self, paddr: u64, range: IovaRange) {
        let iovas = (paddr, range.start().get(), range.last().get());
        self.sizes[Self::size(range)].remove(&iovas);
    }

    fn starts(&self, (first, last): (u64, u64)) -> impl Iterator<Item = u64> {
        self.sizes.iter().enumerate().filter(|(_, all)| !all.is_empty()).flat_map(
            move |(lg2, all)| {
                let longest = u64::MAX >> (63 - lg2);
                let from = (first.saturating_sub(longest), 0, 0);
                all.range(from..=(last, u64::MAX, u64::MAX))
                    .filter(move |(paddr, start, end)| paddr.saturating_add(end - start) >= first)
                    .map(|&(_, start, _)| start)
            },
        )
    }
}
