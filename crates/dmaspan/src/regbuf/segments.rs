//! Where a buffer's bytes are, kept compactly, and found at once from any offset.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::marker::PhantomData;

use super::import::{Import, Outside};
use crate::addr::Address;
use crate::error::Errno;
use crate::lg2;
use crate::span::Span;

/// Contiguous pieces of memory that are a buffer in this order, each as long as can be.
///
/// Made by a [`SegmentsBuilder`]. Kept in one of three ways, whatever takes least:
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
/// # Ok::<(), Box<dyn std::error::Error>>(())
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
    pieces: Box<[Piece]>,
    /// The segment with the first byte of each `2^part_lg2`, and the last segment.
    directory: Box<[u32]>,
    part_lg2: u32,
}

/// A segment: what is needed of one is together, as it is seldom in a cache.
struct Piece {
    /// The address of position 0, were the segment so long: modulo 2^64.
    origin: u64,
    /// The position behind its last byte.
    end: u64,
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

    fn with(layout: Layout, skew: u64, end: u64) -> Self {
        Self { layout, skew, end, addresses: PhantomData }
    }

    /// The length of the buffer in bytes, never 0.
    #[inline(always)]
    #[expect(clippy::len_without_is_empty, reason = "there is at least one byte")]
    pub fn len(&self) -> u64 {
        self.end - self.skew
    }

    /// How many segments there are.
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

    /// How many bytes of memory keep track of the segments, this value included.
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

    /// Where `len` bytes from `offset` on are. None where `len` is 0.
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

/// Why no segments were made of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// There is no memory for so many segments.
    #[error("no memory to keep track of {segments} segments")]
    NoMemory {
        /// How many there are.
        segments: usize,
    },
    /// The spans have 2^64 bytes or more, or there are more than 2^32 of them.
    #[error("more than {} bytes, or more than {} segments", u64::MAX, u32::MAX)]
    TooLong,
    /// There is no span.
    #[error("a buffer without bytes")]
    Empty,
}

impl BuildError {
    /// `ENOMEM`, `EOVERFLOW` and `EINVAL`, as `io_sqe_buffer_register` (Linux, io_uring/rsrc.c).
    pub const fn errno(&self) -> Errno {
        match self {
            Self::NoMemory { .. } => Errno::ENOMEM,
            Self::TooLong => Errno::EOVERFLOW,
            Self::Empty => Errno::EINVAL,
        }
    }
}

/// Takes spans in the order of a buffer's bytes and joins them wherever memory ends up contiguous:
/// over folios of any size, and over kinds of page.
#[derive(Debug)]
pub struct SegmentsBuilder<A: Address> {
    spans: Vec<Span<A>>,
    len: u64,
}

impl<A: Address> Default for SegmentsBuilder<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Address> SegmentsBuilder<A> {
    /// No spans.
    pub const fn new() -> Self {
        Self { spans: Vec::new(), len: 0 }
    }

    /// Takes the next span.
    ///
    /// # Errors
    ///
    /// [`BuildError::NoMemory`] and [`BuildError::TooLong`]. Then it was not taken.
    #[inline]
    pub fn push(&mut self, span: Span<A>) -> Result<(), BuildError> {
        let len = self.len.checked_add(span.len()).ok_or(BuildError::TooLong)?;
        match self.spans.last_mut().and_then(|last| Some((last.join(span)?, last))) {
            Some((joined, last)) => *last = joined,
            None => {
                let segments = self.spans.len() + 1;
                self.spans.try_reserve(1).map_err(|_| BuildError::NoMemory { segments })?;
                self.spans.push(span);
            }
        }
        self.len = len;
        Ok(())
    }

    /// How many bytes were taken.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether no span was taken.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// What was taken, joined.
    pub fn spans(&self) -> &[Span<A>] {
        &self.spans
    }

    /// The segments.
    ///
    /// # Errors
    ///
    /// [`BuildError`]: no memory for them, none at all, or too many.
    pub fn build(&self) -> Result<Segments<A>, BuildError> {
        match *self.spans {
            [] => Err(BuildError::Empty),
            [span] => Ok(Segments::one(span)),
            [first, .., last] => {
                let unit = self.unit_lg2(first, last).and_then(|unit_lg2| {
                    let skew = lg2::size(unit_lg2).checked_sub(first.len())?;
                    Some((unit_lg2, skew, self.len.checked_add(skew)?))
                });
                match unit {
                    Some((unit_lg2, skew, end)) => {
                        let starts = self.spans.iter().map(|span| span.start().get());
                        let mut starts = self.collect(self.spans.len(), starts)?;
                        if let Some(start) = starts.first_mut() {
                            *start = start.wrapping_sub(skew);
                        }
                        Ok(Segments::with(Layout::Uniform { starts, unit_lg2 }, skew, end))
                    }
                    None => Ok(Segments::with(Layout::Mixed(self.mixed()?), 0, self.len)),
                }
            }
        }
    }

    /// What all segments are long, if it is a power of two, but for the first and the last.
    fn unit_lg2(&self, first: Span<A>, last: Span<A>) -> Option<u32> {
        let longest = first.len().max(last.len());
        let inner = self.spans.get(1..self.spans.len() - 1).unwrap_or_default();
        let unit = match inner.first() {
            Some(span) => span.len(),
            None => longest.checked_next_power_of_two()?,
        };
        let uniform = unit.is_power_of_two()
            && longest <= unit
            && inner.iter().all(|span| span.len() == unit);
        uniform.then(|| lg2::floor(unit))
    }

    fn mixed(&self) -> Result<Mixed, BuildError> {
        let count = self.spans.len();
        let last_index = u32::try_from(count - 1).map_err(|_| BuildError::TooLong)?;
        let pieces = self.spans.iter().scan(0, |end: &mut u64, span| {
            let origin = span.start().get().wrapping_sub(*end);
            *end += span.len();
            Some(Piece { origin, end: *end })
        });
        let pieces = self.collect(count, pieces)?;
        // As many parts as segments at most, more than half as many at least.
        let segments = u64::from(last_index) + 1;
        let mut part_lg2 = lg2::floor(self.len / segments);
        if (self.len - 1) >> part_lg2 >= segments {
            part_lg2 += 1;
        }
        let parts = to_index((self.len - 1) >> part_lg2) + 1;
        let mut index = 0;
        let part_starts = (0..parts).scan(0, |at: &mut u64, _| {
            while pieces.get(index).is_some_and(|piece| piece.end <= *at) {
                index += 1;
            }
            *at = at.saturating_add(lg2::size(part_lg2));
            u32::try_from(index).ok()
        });
        let directory = self.collect(parts + 1, part_starts.chain([last_index]))?;
        Ok(Mixed { pieces, directory, part_lg2 })
    }

    fn collect<T>(
        &self,
        count: usize,
        values: impl Iterator<Item = T>,
    ) -> Result<Box<[T]>, BuildError> {
        let mut all = Vec::new();
        let segments = self.spans.len();
        all.try_reserve_exact(count).map_err(|_| BuildError::NoMemory { segments })?;
        all.extend(values);
        Ok(all.into_boxed_slice())
    }
}

#[cfg(test)]
mod tests;
