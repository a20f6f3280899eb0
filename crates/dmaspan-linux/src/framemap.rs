//! A [`FrameMap`] leads back from the addresses that a device uses to the memory.
//!
//! A device that is simulated in this process gets physical addresses from the page table that it
//! walks. A [`FrameMap`] says which bytes of a [`Memory`] they are.

use dmaspan::{Address, Errno, PhysAddr, Span, UserRange};

use crate::mem::{Memory, OutsideMemory};

/// The reason why spans do not map memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameMapError {
    /// The range is not all in the memory.
    #[error(transparent)]
    Outside(#[from] OutsideMemory),
    /// The spans have another length than the range.
    #[error("spans of {spans_len:#x} bytes do not cover {range}: pass all spans of the range")]
    Length {
        /// The range asked for.
        range: UserRange,
        /// The length of all spans, in bytes.
        spans_len: u64,
    },
    /// A frame backs two parts of the memory.
    #[error(
        "the spans of the bytes from {first:#x} and from {second:#x} on overlap: pass spans of one \
         memory, which never do"
    )]
    Overlap {
        /// Where the span with the lower address is in the memory, in bytes.
        first: u64,
        /// Where the one is that begins in it.
        second: u64,
    },
    /// More spans than can be numbered.
    #[error("{count} spans are too many: at most {} are possible", u32::MAX)]
    TooMany {
        /// How many spans there are.
        count: usize,
    },
}

impl FrameMapError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Outside(outside) => outside.errno(),
            Self::Length { .. } => Errno::EINVAL,
            Self::Overlap { .. } => Errno::EEXIST,
            Self::TooMany { .. } => Errno::ENOMEM,
        }
    }
}

/// A span, and where in the memory it is.
#[derive(Clone, Copy, Debug)]
struct Piece<A: Address> {
    span: Span<A>,
    offset: u64,
}

/// Finds the bytes of a [`Memory`] that an address means: a physical one, or another that a
/// [`FrameSource`](crate::FrameSource) gives.
///
/// A look-up is a binary search among the few spans that begin in the same block of the physical
/// address space: O(log spans) at worst. A span takes 24 bytes, and a directory of the blocks at
/// most 8 bytes a span.
#[derive(Debug)]
pub struct FrameMap<A: Address = PhysAddr> {
    /// By address, disjoint.
    pieces: Box<[Piece<A>]>,
    /// For each block the number of pieces that begin in blocks before it, and at last all of them.
    blocks: Box<[u32]>,
    /// The address where the first block begins.
    base: u64,
    /// Log2 of the bytes of a block.
    block_lg2: u32,
}

impl<A: Address> FrameMap<A> {
    /// The map of `range` of `memory`, whose `spans` a pinner pushed in this order.
    ///
    /// # Errors
    ///
    /// [`FrameMapError`] where the range is not in the memory, the spans have another length, or
    /// two spans overlap.
    pub fn new(
        memory: &Memory,
        range: UserRange,
        spans: &[Span<A>],
    ) -> Result<Self, FrameMapError> {
        let start = memory.offset_of(range)?;
        let count = spans.len();
        if u32::try_from(count).is_err() {
            return Err(FrameMapError::TooMany { count });
        }
        let mut offset = start;
        let mut pieces = Vec::with_capacity(count);
        for &span in spans {
            pieces.push(Piece { span, offset });
            offset = offset.saturating_add(span.len());
        }
        if Some(offset - start) != range.checked_len() {
            return Err(FrameMapError::Length { range, spans_len: offset - start });
        }
        pieces.sort_unstable_by_key(|piece| piece.span.start());
        for pair in pieces.windows(2) {
            if pair[1].span.start() <= pair[0].span.last() {
                let [first, second] = [pair[0].offset, pair[1].offset];
                return Err(FrameMapError::Overlap { first, second });
            }
        }
        let (base, block_lg2) = block_size(&pieces);
        let blocks = directory(&pieces, base, block_lg2);
        Ok(Self { pieces: pieces.into_boxed_slice(), blocks, base, block_lg2 })
    }

    /// The offset in the memory of the byte at `at`, and how many bytes from there on are
    /// contiguous in both; `None` where the address is of no memory here.
    #[inline]
    pub fn locate(&self, at: A) -> Option<(u64, u64)> {
        let above = at.get().checked_sub(self.base)?;
        let block = usize::try_from(above >> self.block_lg2).ok()?;
        // Behind the last block only the last piece can reach.
        let last_block = self.blocks.len().checked_sub(2)?;
        let block = block.min(last_block);
        let first = usize::try_from(self.blocks[block]).ok()?;
        let end = usize::try_from(self.blocks[block + 1]).ok()?;
        let begun = self.pieces[first..end].partition_point(|piece| piece.span.start() <= at);
        // The piece may have begun in a block before.
        let piece = self.pieces.get((first + begun).checked_sub(1)?)?;
        let skip = at.get() - piece.span.start().get();
        let left = piece.span.len().checked_sub(skip).filter(|left| *left != 0)?;
        Some((piece.offset + skip, left))
    }

    /// Returns how many spans it has.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Returns whether it has no spans. It always has: no range is empty.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }
}

/// Where blocks begin, and the log2 of their size: not more blocks than pieces.
fn block_size<A: Address>(pieces: &[Piece<A>]) -> (u64, u32) {
    let [first, .., last] = pieces else {
        return (pieces.first().map_or(0, |piece| piece.span.start().get()), u64::BITS - 1);
    };
    let base = first.span.start().get();
    let extent = last.span.start().get() - base;
    let count = u64::try_from(pieces.len()).unwrap_or(u64::MAX);
    // The least size of which `count` blocks reach the start of the last piece.
    let lg2 = (0..u64::BITS - 1).find(|lg2| extent >> lg2 < count);
    (base, lg2.unwrap_or(u64::BITS - 1))
}

/// For each block how many pieces begin before it, and at last all of them.
fn directory<A: Address>(pieces: &[Piece<A>], base: u64, block_lg2: u32) -> Box<[u32]> {
    let block_of = |piece: &Piece<A>| (piece.span.start().get() - base) >> block_lg2;
    let mut blocks = Vec::with_capacity(pieces.len() + 1);
    for (number, piece) in (0_u32..).zip(pieces) {
        let block = block_of(piece);
        while u64::try_from(blocks.len()).is_ok_and(|len| len <= block) {
            blocks.push(number);
        }
    }
    blocks.push(u32::try_from(pieces.len()).unwrap_or(u32::MAX));
    blocks.into_boxed_slice()
}

#[cfg(test)]
mod tests;
