//! [`Segments`] say where a buffer's bytes are. They are kept compactly, and found at once from any
//! offset.

use alloc::boxed::Box;
use core::fmt;
use core::marker::PhantomData;

use super::import::{Import, Outside};
use crate::addr::Address;
use crate::lg2;
use crate::span::Span;

/// Contiguous pieces of memory that are a buffer in this order, each as long as can be.
///
/// Made by a [`SegmentsBuilder`](super::SegmentsBuilder). Kept in one of three ways, whatever takes
/// least:
///
/// - One segment takes no memory.
/// - Segments of the same power of two, but for the first one, which may be entered in its middle,
///   and the last one, which may be left early: 8 bytes each. The one with a given byte is found by
///   a shift.
/// - All others: 16 bytes each, and at most 4 more in a directory that says which segment each of
///   so many equal parts of the buffer begins in. A binary search goes on from there, in the few
///   that one part has; among *n* in the worst case.
///
/// ```
/// use dmaspan::regbuf::SegmentsBuilder;
/// use dmaspan::{PhysAddr, Span};
///
/// // A buffer in three huge pages, the second and third of which are neighbours.
/// let mut builder = SegmentsBuilder::new();
/// builder.push(Span::new(PhysAddr::new(0x401f_f000), 0x1000)?)?;
/// builder.push(Span::new(PhysAddr::new(0x8000_0000), 0x20_0000)?)?;
/// builder.push(Span::new(PhysAddr::new(0x8020_0000), 0x20_0000)?)?;
/// let segments = builder.build()?;
/// assert_eq!(segments.count(), 2);
/// let spans: Vec<_> = segments.import(0x800, 0x1000)?.collect();
/// assert_eq!(spans[0], Span::new(PhysAddr::new(0x401f_f800), 0x800)?);
/// assert_eq!(spans[1], Span::new(PhysAddr::new(0x8000_0000), 0x800)?);
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Segments<A> {
    pub(super) layout: Layout,
    /// Where the buffer's first byte is, counted from where the first segment would begin if it
    /// were as long as the others.
    pub(super) skew: u64,
    /// The position behind the last byte, counted likewise.
    pub(super) end: u64,
    addresses: PhantomData<A>,
}

/// How the segments are kept. Addresses are those of position 0 of the first segment: modulo 2^64,
/// as the first one may be entered in its middle.
pub(super) enum Layout {
    One {
        start: u64,
    },
    /// Each of `2^unit_lg2` bytes.
    Uniform {
        starts: Box<[u64]>,
        unit_lg2: u32,
    },
    Mixed(Mixed),
}

/// Segments of different lengths.
pub(super) struct Mixed {
    pub(super) pieces: Box<[Piece]>,
    /// The segment with the first byte of each `2^part_lg2`, and the last segment.
    pub(super) directory: Box<[u32]>,
    pub(super) part_lg2: u32,
}

/// A segment: what is needed of one is together, as it is seldom in a cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The address of position 0, were the segment so long: modulo 2^64.
    pub(super) origin: u64,
    /// The position behind its last byte.
    pub(super) end: u64,
}

impl Piece {
    /// A segment of `len` bytes from the address `start` on, behind which is position `end`.
    #[inline(always)]
    pub(super) fn ending(start: u64, len: u64, end: u64) -> Self {
        Self { origin: start.wrapping_sub(end - len), end }
    }
}

impl Mixed {
    /// The segment with the byte at `position`, which is one of the buffer.
    #[inline]
    pub(super) fn find(&self, position: u64) -> usize {
        let part = to_index(position >> self.part_lg2);
        let low = self.directory.get(part).map_or(0, |index| to_index((*index).into()));
        let high = self.directory.get(part + 1).map_or(low, |index| to_index((*index).into()));
        let pieces = self.pieces.get(low..high).unwrap_or_default();
        low + pieces.partition_point(|piece| piece.end <= position)
    }

    /// The origins of segments and the positions behind them, from one on.
    #[inline(always)]
    pub(super) fn behind(&self, index: usize) -> impl Iterator<Item = (u64, u64)> {
        let pieces = self.pieces.get(index..).unwrap_or_default();
        pieces.iter().map(|piece| (piece.origin, piece.end))
    }

    /// The address of `position`, which lies in the segment, and the position where that ends.
    #[inline(always)]
    pub(super) fn rest(&self, index: usize, position: u64) -> Option<(u64, u64)> {
        let piece = self.pieces.get(index)?;
        Some((piece.origin.wrapping_add(position), piece.end))
    }
}

impl<A: Address> Segments<A> {
    /// One segment: memory that is contiguous, as what a domain maps is for its devices.
    pub fn one(span: Span<A>) -> Self {
        Self::with(Layout::One { start: span.start().get() }, 0, span.len())
    }

    pub(super) fn with(layout: Layout, skew: u64, end: u64) -> Self {
        Self { layout, skew, end, addresses: PhantomData }
    }

    /// The length of the buffer in bytes, never 0.
    #[inline(always)]
    #[expect(clippy::len_without_is_empty, reason = "there is at least one byte")]
    pub fn len(&self) -> u64 {
        self.end - self.skew
    }

    /// Returns how many segments there are.
    pub fn count(&self) -> usize {
        self.iter().pieces()
    }

    /// The length of all segments but the first and the last, which are no longer, where that is a
    /// power of two: then [`import`](Self::import) takes the same time for any offset.
    pub fn uniform_len(&self) -> Option<u64> {
        match self.layout {
            Layout::Uniform { unit_lg2, .. } => Some(lg2::size(unit_lg2)),
            Layout::One { .. } | Layout::Mixed(_) => None,
        }
    }

    /// Returns how many bytes of memory keep track of the segments, this value included.
    pub fn footprint(&self) -> usize {
        let allocated = match &self.layout {
            Layout::One { .. } => 0,
            Layout::Uniform { starts, .. } => size_of_val(&**starts),
            Layout::Mixed(Mixed { pieces, directory, .. }) => {
                size_of_val(&**pieces) + size_of_val(&**directory)
            }
        };
        size_of::<Self>() + allocated
    }

    /// All segments.
    pub fn iter(&self) -> Import<'_, A> {
        Import::new(self, self.skew, self.end)
    }

    /// Takes bytes away at both ends, fewer than there are.
    pub(super) fn narrow(&mut self, before: u64, behind: u64) {
        self.skew += before;
        self.end -= behind;
    }

    /// All segments, with the bytes that were taken away from both ends.
    pub(super) fn widened(&self, before: u64, behind: u64) -> Import<'_, A> {
        Import::new(self, self.skew - before, self.end + behind)
    }

    /// Returns where `len` bytes from `offset` on are. None where `len` is 0.
    ///
    /// # Errors
    ///
    /// [`Outside`] where they are not all in the buffer.
    #[inline(always)]
    pub fn import(&self, offset: u64, len: u64) -> Result<Import<'_, A>, Outside> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => {
                Ok(Import::new(self, self.skew + offset, self.skew + end))
            }
            _ => Err(Outside { offset, len, buffer: self.len() }),
        }
    }
}

impl<'a, A: Address> IntoIterator for &'a Segments<A> {
    type Item = Span<A>;
    type IntoIter = Import<'a, A>;

    fn into_iter(self) -> Import<'a, A> {
        self.iter()
    }
}

impl<A: Address> fmt::Debug for Segments<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

/// Segments are of memory that is there, so an index of one fits.
#[inline(always)]
pub(super) fn to_index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;
