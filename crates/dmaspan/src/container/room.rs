//! Room for what a batch has, of which only as much is written as is asked for.

use crate::addr::PhysAddr;
use crate::span::Span;

/// Spans of a small batch.
pub(super) const FEW_SPANS: usize = 16;

/// What lies in room for spans that has none yet.
pub(super) const NO_SPAN: Span = Span::point(PhysAddr::new(0));

/// Places for up to `MANY` values, on the stack.
pub(super) enum Room<T, const FEW: usize, const MANY: usize> {
    One([T; 1]),
    Few([T; FEW]),
    Many([T; MANY]),
}

impl<T: Copy, const FEW: usize, const MANY: usize> Room<T, FEW, MANY> {
    /// Room for so many values, `MANY` at most. Until they are written they are `none`.
    #[inline(always)]
    pub(super) fn new(count: usize, none: T) -> Self {
        match count {
            0 | 1 => Self::One([none]),
            _ if count <= FEW => Self::Few([none; FEW]),
            _ => Self::Many([none; MANY]),
        }
    }

    /// The first so many places, `MANY` at most. Room for few becomes room for more where it has
    /// to, and stays that; what was written in it is `none` then.
    #[inline(always)]
    pub(super) fn first(&mut self, count: usize, none: T) -> &mut [T] {
        let has_room = match self {
            Self::One(_) => count <= 1,
            Self::Few(_) => count <= FEW,
            Self::Many(_) => true,
        };
        if !has_room {
            *self = Self::new(count, none);
        }
        match self {
            Self::One(values) => &mut values[..count],
            Self::Few(values) => &mut values[..count],
            Self::Many(values) => &mut values[..count],
        }
    }
}
