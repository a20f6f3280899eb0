//! Addresses to try, from a format's geometry.

use dmaspan::io_pgtable::{Format, Geometry};
use dmaspan::{Iova, IovaRange, PhysAddr, Span, lg2};

/// Which IOVAs and which memory a format has, and in what pieces.
#[derive(Clone, Debug)]
pub(super) struct Space {
    pub(super) aperture: IovaRange,
    /// log2 of the IOVAs there are.
    pub(super) input_bits: u32,
    pub(super) output_bits: u32,
    pub(super) page_sizes: u64,
    pub(super) granule_lg2: u32,
    pub(super) top_level: u32,
    /// log2 of the bytes that one entry covers, by level.
    shifts: Vec<u32>,
}

impl Space {
    pub(super) fn of<F: Format>(format: &F) -> Self {
        let Geometry { aperture, output_bits, top_level, page_sizes, .. } = format.geometry();
        Self {
            aperture,
            input_bits: 64 - aperture.len_less_one().leading_zeros(),
            output_bits,
            page_sizes,
            granule_lg2: F::GRANULE_LG2,
            top_level,
            shifts: (0..=top_level).map(F::shift).collect(),
        }
    }

    /// The bytes of the smallest leaf.
    pub(super) fn granule(&self) -> u64 {
        lg2::size(self.granule_lg2)
    }

    /// log2 of the leaf sizes of which both spaces have room for one, ascending.
    pub(super) fn sizes(&self) -> Vec<u32> {
        let most = self.input_bits.min(self.output_bits);
        (0..64).filter(|&lg2| self.page_sizes & lg2::size(lg2) != 0 && lg2 <= most).collect()
    }

    /// The smallest leaf that is larger than a granule and of which there is room for `count`.
    pub(super) fn large(&self, count: u64) -> Option<u32> {
        let room = |lg2: u32| self.nth(lg2, count - 1).is_some() && self.has_memory(lg2, count);
        self.sizes().into_iter().skip(1).find(|&lg2| room(lg2))
    }

    /// log2 of what an entry above the lowest level covers, where `count` of them fit.
    pub(super) fn blocks(&self, count: u64) -> Option<u32> {
        let block = *self.shifts.get(1)?;
        (self.nth(block, count - 1).is_some() && self.has_memory(block, count)).then_some(block)
    }

    /// log2 of pieces of which both spaces have 32: what an entry above the lowest level covers,
    /// where there is so much room.
    pub(super) fn chunk(&self) -> u32 {
        self.blocks(32).unwrap_or(self.input_bits.min(self.output_bits) - 5)
    }

    /// log2 of what an entry at `level` covers, where the tree has that level.
    pub(super) fn shift(&self, level: u32) -> Option<u32> {
        self.shifts.get(level as usize).copied()
    }

    /// The address of the second entry of each level from this one on: where what a table below
    /// translates ends. Ascending.
    pub(super) fn beyond(&self, level: u32) -> Vec<u64> {
        let shifts = (level..=self.top_level).filter_map(|level| self.shift(level));
        shifts.filter_map(|shift| self.nth(shift, 1)).collect()
    }

    /// Some chunks before a border between tables of an upper level, or the aperture's start.
    pub(super) fn before_border(&self, chunks: u64) -> u64 {
        let border = self.shift(2).and_then(|shift| self.nth(shift, 1));
        let start = self.aperture.start().get();
        let before = |border: u64| border.saturating_sub(chunks * lg2::size(self.chunk()));
        border.map_or(start, before).max(start)
    }

    /// The first address of the `n`-th block of `2^lg2` bytes, counted from the aperture's start.
    pub(super) fn nth(&self, lg2: u32, n: u64) -> Option<u64> {
        let offset = n.checked_mul(1u64.checked_shl(lg2)?)?;
        let last = offset.checked_add(lg2::mask(lg2))?;
        (last <= self.aperture.len_less_one()).then(|| self.aperture.start().get() + offset)
    }

    /// [`nth`](Self::nth), counted from the aperture's end.
    pub(super) fn nth_back(&self, lg2: u32, n: u64) -> Option<u64> {
        self.nth(lg2, n)?;
        let last = self.aperture.last().get();
        Some(lg2::align_down(last - n.checked_mul(lg2::size(lg2))?, lg2))
    }

    /// Whether physical addresses go so far.
    pub(super) fn has_memory(&self, lg2: u32, count: u64) -> bool {
        lg2 <= self.output_bits && count <= 1 << (self.output_bits - lg2)
    }

    /// The last physical address.
    pub(super) fn paddr_last(&self) -> u64 {
        lg2::mask(self.output_bits)
    }

    /// The last `2^lg2` bytes of memory.
    pub(super) fn last_block(&self, lg2: u32) -> u64 {
        lg2::align_down(self.paddr_last(), lg2)
    }
}

/// `len` bytes from `start` on.
#[track_caller]
pub(super) fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

/// `len` bytes of memory.
#[track_caller]
pub(super) fn span(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).unwrap()
}
