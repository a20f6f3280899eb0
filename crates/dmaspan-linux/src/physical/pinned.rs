//! [`PinnedMemory`] is memory that stays where it is, as drivers map it.

use std::fmt;
use std::slice;
use std::sync::Arc;

use dmaspan::dma::{DmaMemory, Piece};
use dmaspan::regbuf::Buffer;
use dmaspan::{PhysAddr, Span};

use super::{PhysicalError, Shared};
use crate::mem::{AccessError, Memory};

/// Memory that is pinned, or a part of it: what a driver maps for its device.
///
/// [`part`](Self::part) makes more of it, which share the pin: it ends when the last of them is
/// dropped. One that a device's mapping owns is dropped by nobody else, so memory that a device may
/// write stays pinned.
pub struct PinnedMemory {
    base: Arc<Base>,
    pieces: Pieces,
    offset: u64,
    len: u64,
}

/// One piece takes no memory of its own.
enum Pieces {
    One(Piece),
    Many(Box<[Piece]>),
}

/// All of a memory, pinned.
struct Base {
    memory: Arc<Memory>,
    spans: Vec<Span>,
    shared: Arc<Shared>,
    /// Unpins when it is dropped, last.
    _buffer: Buffer<PhysAddr>,
}

impl Drop for Base {
    fn drop(&mut self) {
        self.shared.map.remove(&self.spans);
    }
}

impl PinnedMemory {
    pub(super) fn pin(shared: &Arc<Shared>, memory: &Arc<Memory>) -> Result<Self, PhysicalError> {
        let buffer = shared.supply.pin(memory)?;
        let spans: Vec<Span> = buffer.segments().iter().collect();
        shared.map.add(memory, &spans).map_err(|span| PhysicalError::Known { span })?;
        let (memory, shared, len) = (Arc::clone(memory), Arc::clone(shared), memory.len());
        let pieces = Pieces::of(spans.iter().copied());
        let base = Arc::new(Base { memory, spans, shared, _buffer: buffer });
        Ok(Self { base, pieces, offset: 0, len })
    }

    /// `len` bytes from `offset` of this, which share its pin.
    ///
    /// # Errors
    ///
    /// [`AccessError::OutOfBounds`] where they are not all of this, or none.
    pub fn part(&self, offset: u64, len: u64) -> Result<Self, AccessError> {
        let outside = AccessError::OutOfBounds { offset, len, memory_len: self.len };
        let end = offset.checked_add(len).filter(|end| len > 0 && *end <= self.len);
        let (start, end) = end
            .and_then(|end| Some((self.offset.checked_add(offset)?, self.offset.checked_add(end)?)))
            .ok_or(outside)?;
        let mut at = 0;
        let spans = self.base.spans.iter().filter_map(|span| {
            let (first, behind) = (at, at + span.len());
            at = behind;
            let (from, to) = (start.max(first), end.min(behind));
            let part_len = to.checked_sub(from).filter(|part_len| *part_len > 0)?;
            Span::new(span.paddr().wrapping_add(from - first), part_len).ok()
        });
        let pieces = Pieces::of(spans);
        Ok(Self { base: Arc::clone(&self.base), pieces, offset: start, len })
    }

    /// All of the memory that it is of.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.base.memory
    }

    /// Returns where it begins in the [memory](Self::memory), in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "there is at least one byte")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns where it is, in the order of its bytes, as few spans as can be.
    pub fn spans(&self) -> impl Iterator<Item = Span> {
        self.pieces.as_slice().iter().map(|piece| piece.span)
    }
}

impl Pieces {
    fn of(spans: impl Iterator<Item = Span>) -> Self {
        let mut pieces = spans.map(Piece::memory).peekable();
        match (pieces.next(), pieces.peek()) {
            (Some(only), None) => Self::One(only),
            (first, _) => Self::Many(first.into_iter().chain(pieces).collect()),
        }
    }

    fn as_slice(&self) -> &[Piece] {
        match self {
            Self::One(piece) => slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }
}

#[expect(unsafe_code, reason = "the pin keeps the memory where it is")]
// SAFETY:
// 1. The pieces never change. They are where a `Memory` is pinned, which this keeps, and its pin,
//    until it is dropped.
// 2. Nobody has a reference to a `Memory` but to atomic bytes, which devices may write.
unsafe impl DmaMemory for PinnedMemory {
    fn pieces(&self) -> &[Piece] {
        self.pieces.as_slice()
    }
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedMemory")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .field("pieces", &self.pieces.as_slice())
            .finish_non_exhaustive()
    }
}

/// Memory that was made to be pinned, so that whoever has this has all of it alone.
///
/// # Invariant
///
/// Nobody else has the memory, and it is zeroed: it was made here, and handed to nobody.
pub(crate) struct FreshMemory(PinnedMemory);

impl FreshMemory {
    /// Pins memory that was just made.
    pub(super) fn pin(shared: &Arc<Shared>, memory: Memory) -> Result<Self, PhysicalError> {
        PinnedMemory::pin(shared, &Arc::new(memory)).map(Self)
    }

    /// Where it is.
    pub(crate) fn pinned(&self) -> &PinnedMemory {
        &self.0
    }
}
