//! An [`Import`] is part of a buffer, as the contiguous pieces that it is in.

use core::fmt;
use core::iter::FusedIterator;

use super::segments::{Layout, Segments, to_index};
use crate::addr::Address;
use crate::error::Errno;
use crate::lg2;
use crate::span::Span;

/// Bytes were asked for that are not all in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len:#x} bytes at offset {offset:#x} leave the buffer of {buffer:#x} bytes")]
pub struct Outside {
    /// The offset of the first byte.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
    /// How many the buffer has.
    pub buffer: u64,
}

impl Outside {
    /// `EFAULT`, as `io_import_fixed` (Linux, io_uring/rsrc.c).
    pub const fn errno(&self) -> Errno {
        Errno::EFAULT
    }
}

/// Part of a buffer: its pieces, in order. Each is contiguous, and none touches the next.
///
/// Made in a few steps for any offset where segments are uniform, in O(log n) for *n* segments
/// otherwise; nothing is allocated. Each next piece takes as long, however long it is.
#[derive(Clone)]
pub struct Import<'a, A> {
    segments: &'a Segments<A>,
    /// The segment of the next byte, where lengths differ.
    index: usize,
    position: u64,
    end: u64,
}

impl<'a, A: Address> Import<'a, A> {
    /// The bytes at positions from `position` up to `end`.
    #[inline(always)]
    pub(super) fn new(segments: &'a Segments<A>, position: u64, end: u64) -> Self {
        let index = match &segments.layout {
            Layout::Mixed(mixed) if position < end => mixed.find(position),
            _ => 0,
        };
        Self { segments, index, position, end }
    }

    /// Returns how many bytes are left.
    #[inline(always)]
    pub fn bytes(&self) -> u64 {
        self.end - self.position
    }

    /// Puts the next pieces into `room`, as many as it has places for, and returns how many.
    #[inline]
    pub(super) fn fill(&mut self, room: &mut [Span<A>]) -> usize {
        let mut filled = 0;
        while let Some(places) = room.get_mut(filled..).filter(|places| !places.is_empty()) {
            let whole = self.fill_whole(places);
            filled += whole;
            if whole == 0 {
                let (Some(place), Some(piece)) = (places.first_mut(), self.next()) else { break };
                *place = piece;
                filled += 1;
            }
        }
        filled
    }

    /// The same of pieces that are whole segments; none where the next one is not.
    #[inline]
    fn fill_whole(&mut self, room: &mut [Span<A>]) -> usize {
        let mut filled = 0;
        match &self.segments.layout {
            Layout::Uniform { starts, unit_lg2 } if self.position & lg2::mask(*unit_lg2) == 0 => {
                let whole = to_index((self.end - self.position) >> unit_lg2);
                let index = to_index(self.position >> unit_lg2);
                let starts = starts.get(index..).unwrap_or_default();
                filled = whole.min(starts.len()).min(room.len());
                let above = lg2::mask(*unit_lg2);
                let (room, starts) = (&mut room[..filled], &starts[..filled]);
                for (place, start) in room.iter_mut().zip(starts) {
                    *place = Span::covering(A::new(*start), above);
                }
                self.position += u64::try_from(filled).unwrap_or(0) << unit_lg2;
            }
            Layout::Mixed(mixed) => {
                for (place, (origin, end)) in room.iter_mut().zip(mixed.behind(self.index)) {
                    if end > self.end {
                        break;
                    }
                    let start = origin.wrapping_add(self.position);
                    *place = Span::covering(A::new(start), end - self.position - 1);
                    self.position = end;
                    self.index += 1;
                    filled += 1;
                }
            }
            Layout::One { .. } | Layout::Uniform { .. } => {}
        }
        filled
    }

    /// The only segment, or what is left of it; `None` where there are more.
    #[inline]
    pub(super) fn single(&self) -> Option<Span<A>> {
        let above = (self.end - self.position).checked_sub(1)?;
        match self.segments.layout {
            Layout::One { start } => {
                Some(Span::covering(A::new(start.wrapping_add(self.position)), above))
            }
            Layout::Uniform { .. } | Layout::Mixed(_) => None,
        }
    }

    /// Returns how many pieces are left; found without going through them.
    pub fn pieces(&self) -> usize {
        let Some(last) = self.end.checked_sub(1).filter(|last| *last >= self.position) else {
            return 0;
        };
        match &self.segments.layout {
            Layout::One { .. } => 1,
            Layout::Uniform { unit_lg2, .. } => {
                to_index((last >> unit_lg2) - (self.position >> unit_lg2)) + 1
            }
            Layout::Mixed(mixed) => mixed.find(last) - self.index + 1,
        }
    }
}

impl<A: Address> Iterator for Import<'_, A> {
    type Item = Span<A>;

    #[inline(always)]
    fn next(&mut self) -> Option<Span<A>> {
        let position = self.position;
        if position >= self.end {
            return None;
        }
        let (start, segment_end) = match &self.segments.layout {
            Layout::One { start } => (start.wrapping_add(position), self.end),
            Layout::Uniform { starts, unit_lg2 } => {
                let start = starts.get(to_index(position >> unit_lg2))?;
                let inside = position & lg2::mask(*unit_lg2);
                let rest = lg2::size(*unit_lg2) - inside;
                (start.wrapping_add(inside), position.saturating_add(rest))
            }
            Layout::Mixed(mixed) => {
                let rest = mixed.rest(self.index, position)?;
                self.index += 1;
                rest
            }
        };
        let end = segment_end.min(self.end);
        self.position = end;
        Some(Span::covering(A::new(start), end - position - 1))
    }

    /// Goes through whole segments without looking for each of them anew.
    #[inline(always)]
    fn fold<T, F: FnMut(T, Span<A>) -> T>(mut self, init: T, mut each: F) -> T {
        let Some(first) = self.next() else { return init };
        let mut folded = each(init, first);
        match &self.segments.layout {
            Layout::One { .. } => {}
            Layout::Uniform { starts, unit_lg2 } => {
                let whole = (self.end - self.position) >> unit_lg2;
                let index = to_index(self.position >> unit_lg2);
                let above = lg2::mask(*unit_lg2);
                for start in starts.get(index..).unwrap_or_default().iter().take(to_index(whole)) {
                    folded = each(folded, Span::covering(A::new(*start), above));
                }
                self.position += whole << unit_lg2;
            }
            Layout::Mixed(mixed) => {
                let mut position = self.position;
                for (origin, end) in mixed.behind(self.index) {
                    if end > self.end {
                        break;
                    }
                    let start = origin.wrapping_add(position);
                    folded = each(folded, Span::covering(A::new(start), end - position - 1));
                    position = end;
                    self.index += 1;
                }
                self.position = position;
            }
        }
        match self.next() {
            Some(last) => each(folded, last),
            None => folded,
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let pieces = self.pieces();
        (pieces, Some(pieces))
    }
}

impl<A: Address> ExactSizeIterator for Import<'_, A> {}
impl<A: Address> FusedIterator for Import<'_, A> {}

impl<A: Address> fmt::Debug for Import<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone()).finish()
    }
}
