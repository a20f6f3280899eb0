//! Leaves of ranges in use, and inner nodes that sum up what is free below them.

use alloc::vec::Vec;

use super::arena::NoNode;
use crate::lg2;

/// How many ranges a leaf has at most, and how many children an inner node: few in tests, so that
/// few ranges make a tall tree.
pub(super) const FAN: usize = if cfg!(test) { 8 } else { 32 };

/// How many each but the root has at least.
pub(super) const LEAST: usize = FAN / 4;

/// How many two siblings have at most when they become one: some are left to come and go before
/// that must be split again.
pub(super) const MERGED: usize = FAN * 3 / 4;

/// No grid has more orders.
pub(super) const ORDERS: usize = 64;

/// What is in use from `start` up to before `end`, in bytes from the start of the aperture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::iommu::iova) enum Kind {
    #[default]
    Reserved,
    Allocated,
}

/// What is free between two entries: may be nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Gap {
    pub(super) start: u64,
    pub(super) len: u64,
}

/// The aligned positions of the aperture. An order `k` stands for an alignment to `2^k` granules.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// The first IOVA of the aperture, which is not 0.
    pub(super) base: u64,
    pub(super) granule_lg2: u32,
    /// The orders that have an aligned address in the aperture are those below.
    pub(super) orders: u32,
}

impl Grid {
    /// How far the first aligned address at or above `offset` is. What lies beyond the top of the
    /// 64-bit space is further than any gap reaches.
    #[inline(always)]
    pub(super) fn padding(self, offset: u64, order: u32) -> u64 {
        self.base.wrapping_add(offset).wrapping_neg() & (lg2::size(self.granule_lg2 + order) - 1)
    }

    /// The longest range in `gap` that starts at an aligned address. No larger order has more.
    #[inline(always)]
    pub(super) fn fit(self, gap: Gap, order: u32) -> u64 {
        gap.len.saturating_sub(self.padding(gap.start, order))
    }
}

/// Neighbouring entries. Each has the gap before it.
#[derive(Default)]
pub(super) struct Leaf {
    /// Where the entry before the first one ends, in the leaf before.
    pub(super) begin: u64,
    pub(super) len: usize,
    entries: [Entry; FAN],
}

impl Leaf {
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries[..self.len]
    }

    /// The first entry that ends above `offset`.
    #[inline]
    pub(super) fn position(&self, offset: u64) -> usize {
        self.entries().partition_point(|entry| entry.end <= offset)
    }

    /// What is free before entry `index`.
    #[inline]
    pub(super) fn gap(&self, index: usize) -> Gap {
        let start = if index == 0 { self.begin } else { self.entries[index - 1].end };
        Gap { start, len: self.entries[index].start - start }
    }

    /// The longest fit in one of the gaps, none of which has more than `most`.
    pub(super) fn best(&self, grid: Grid, order: u32, most: u64) -> u64 {
        let mut best = 0;
        let mut start = self.begin;
        for entry in self.entries() {
            let gap = Gap { start, len: entry.start - start };
            if gap.len > best {
                best = best.max(grid.fit(gap, order));
                if best == most {
                    break;
                }
            }
            start = entry.end;
        }
        best
    }

    /// The longest fit of each order in one of the gaps; 0 beyond the grid's.
    ///
    /// Gap by gap, since most have nothing or fit few orders.
    pub(super) fn fits(&self, grid: Grid) -> [u64; ORDERS] {
        let mut fits = [0; ORDERS];
        let mut start = self.begin;
        for entry in self.entries() {
            let gap = Gap { start, len: entry.start - start };
            for (order, longest) in (0..grid.orders).zip(&mut fits) {
                match grid.fit(gap, order) {
                    0 => break,
                    fit => *longest = fit.max(*longest),
                }
            }
            start = entry.end;
        }
        fits
    }

    /// The length of the longest gap that is none of `these`.
    #[inline]
    pub(super) fn longest_but(&self, these: [Gap; 2]) -> u64 {
        let mut longest = 0;
        let mut start = self.begin;
        for entry in self.entries() {
            let gap = Gap { start, len: entry.start - start };
            if gap.len > longest && !these.contains(&gap) {
                longest = gap.len;
            }
            start = entry.end;
        }
        longest
    }

    /// Where the first `len` bytes are free.
    #[inline]
    pub(super) fn first_fit(&self, grid: Grid, order: u32, len: u64) -> Option<u64> {
        let mut start = self.begin;
        for entry in self.entries() {
            let gap = Gap { start, len: entry.start - start };
            if gap.len >= len && grid.fit(gap, order) >= len {
                return Some(start + grid.padding(start, order));
            }
            start = entry.end;
        }
        None
    }

    pub(super) fn insert(&mut self, index: usize, entry: Entry) {
        insert(&mut self.entries, self.len, index, entry);
        self.len += 1;
    }

    pub(super) fn remove(&mut self, index: usize) {
        remove(&mut self.entries, self.len, index, Entry::default());
        self.len -= 1;
    }

    /// Moves entries between two neighbours until `self` has `len` of them, at least one.
    pub(super) fn divide(&mut self, right: &mut Self, len: usize) {
        let total = self.len + right.len;
        divide(&mut self.entries, &mut right.entries, [self.len, right.len], len);
        (self.len, right.len) = (len, total - len);
        right.begin = self.entries[len - 1].end;
    }
}

/// Neighbouring nodes of the level below.
#[derive(Default)]
pub(super) struct Inner {
    pub(super) len: usize,
    /// Where the first gap of each child starts; `u64::MAX`, which is no offset, beyond `len`.
    keys: [u64; FAN],
    children: [u32; FAN],
    /// For each order, the longest aligned fit below each child; 0 beyond `len`.
    fits: Vec<[u64; FAN]>,
}

impl Inner {
    pub(super) fn new(orders: u32) -> Result<Self, NoNode> {
        let mut fits = Vec::new();
        fits.try_reserve_exact(orders as usize).map_err(|_| NoNode)?;
        fits.resize(orders as usize, [0; FAN]);
        Ok(Self { len: 0, keys: [u64::MAX; FAN], children: [0; FAN], fits })
    }

    #[inline(always)]
    pub(super) fn child(&self, index: usize) -> u32 {
        self.children[index]
    }

    /// Which child has the first entry that ends above `offset`.
    #[inline]
    pub(super) fn position(&self, offset: u64) -> usize {
        self.keys[..self.len].partition_point(|key| *key <= offset).saturating_sub(1)
    }

    pub(super) fn begin(&self, index: usize) -> u64 {
        self.keys[index]
    }

    pub(super) fn set_begin(&mut self, index: usize, begin: u64) {
        self.keys[index] = begin;
    }

    #[inline]
    pub(super) fn fit(&self, index: usize, order: u32) -> u64 {
        self.fits[order as usize][index]
    }

    pub(super) fn set_fit(&mut self, index: usize, order: u32, fit: u64) {
        self.fits[order as usize][index] = fit;
    }

    /// The longest fit below one of the children, none of which has more than `most`.
    pub(super) fn best(&self, order: u32, most: u64) -> u64 {
        let mut best = 0;
        for fit in &self.fits[order as usize] {
            best = best.max(*fit);
            if best == most {
                break;
            }
        }
        best
    }

    /// The longest fit of each order below one of the children; 0 beyond the grid's.
    pub(super) fn longest(&self) -> [u64; ORDERS] {
        let mut longest = [0; ORDERS];
        for (longest, fits) in longest.iter_mut().zip(&self.fits) {
            *longest = fits.iter().fold(0, |most, fit| most.max(*fit));
        }
        longest
    }

    /// The first child below which `len` bytes are free, not 0.
    #[inline]
    pub(super) fn first_fit(&self, order: u32, len: u64) -> Option<usize> {
        self.fits[order as usize].iter().position(|fit| *fit >= len)
    }

    /// Puts in a child whose fits are to be set yet.
    pub(super) fn insert(&mut self, index: usize, begin: u64, child: u32) {
        insert(&mut self.keys, self.len, index, begin);
        insert(&mut self.children, self.len, index, child);
        for fits in &mut self.fits {
            insert(fits, self.len, index, 0);
        }
        self.len += 1;
    }

    pub(super) fn remove(&mut self, index: usize) {
        remove(&mut self.keys, self.len, index, u64::MAX);
        remove(&mut self.children, self.len, index, 0);
        for fits in &mut self.fits {
            remove(fits, self.len, index, 0);
        }
        self.len -= 1;
    }

    /// Moves children between two neighbours until `self` has `len` of them.
    pub(super) fn divide(&mut self, right: &mut Self, len: usize) {
        let lens = [self.len, right.len];
        divide(&mut self.keys, &mut right.keys, lens, len);
        divide(&mut self.children, &mut right.children, lens, len);
        for (left, right) in self.fits.iter_mut().zip(&mut right.fits) {
            divide(left, right, lens, len);
        }
        (self.len, right.len) = (len, lens[0] + lens[1] - len);
        self.keys[len..].fill(u64::MAX);
        right.keys[right.len..].fill(u64::MAX);
    }
}

fn insert<T: Copy>(array: &mut [T; FAN], len: usize, index: usize, value: T) {
    array.copy_within(index..len, index + 1);
    array[index] = value;
}

fn remove<T: Copy>(array: &mut [T; FAN], len: usize, index: usize, none: T) {
    array.copy_within(index + 1..len, index);
    array[len - 1] = none;
}

/// Moves values over the seam between two neighbours until the left one has `len`; where none is
/// left, there is the default.
fn divide<T: Copy + Default>(
    left: &mut [T; FAN],
    right: &mut [T; FAN],
    [in_left, in_right]: [usize; 2],
    len: usize,
) {
    if let Some(moved) = len.checked_sub(in_left) {
        left[in_left..len].copy_from_slice(&right[..moved]);
        right.copy_within(moved..in_right, 0);
        right[in_right - moved..in_right].fill(T::default());
    } else {
        let moved = in_left - len;
        right.copy_within(..in_right, moved);
        right[..moved].copy_from_slice(&left[len..in_left]);
        left[len..in_left].fill(T::default());
    }
}
