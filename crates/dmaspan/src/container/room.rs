//! Room for the spans of a batch, of which only as much is written as is asked for.

use crate::span::{Span, SpanBuf};

/// Spans of a small batch.
const FEW: usize = 16;

/// Places for up to `BATCH` spans, on the stack.
#[expect(clippy::large_enum_variant, reason = "it is on the stack, and never moved")]
pub(super) enum Room<const BATCH: usize> {
    Few([Span; FEW]),
    Many([Span; BATCH]),
}

impl<const BATCH: usize> Room<BATCH> {
    /// Room for so many spans, `BATCH` at most.
    #[inline(always)]
    pub(super) fn new(count: usize) -> Self {
        if count <= FEW { Self::Few(SpanBuf::room()) } else { Self::Many(SpanBuf::room()) }
    }

    /// The first so many places, `BATCH` at most. Room for few becomes room for many where it has
    /// to, and stays that.
    #[inline(always)]
    pub(super) fn first(&mut self, count: usize) -> &mut [Span] {
        if count > FEW && matches!(self, Self::Few(_)) {
            *self = Self::Many(SpanBuf::room());
        }
        match self {
            Self::Few(spans) => &mut spans[..count],
            Self::Many(spans) => &mut spans[..count],
        }
    }
}
