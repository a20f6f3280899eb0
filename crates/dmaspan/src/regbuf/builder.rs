//! This makes segments of spans as they come, as few as can be. Sources of buffers call it.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::marker::PhantomData;
use core::mem;

use super::segments::{Layout, Mixed, Piece, Segments, to_index};
use crate::addr::Address;
use crate::error::Errno;
use crate::lg2;
use crate::span::Span;

/// The reason why no segments were made of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// There is no memory for so many segments.
    #[error("there is no memory for {segments} segments")]
    NoMemory {
        /// How many there are.
        segments: usize,
    },
    /// The spans have 2^64 bytes or more, or there are more than 2^32 of them.
    #[error("a buffer cannot have more than {} bytes or {} segments", u64::MAX, u32::MAX)]
    TooLong,
    /// There is no span.
    #[error("a buffer cannot be empty")]
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
///
/// Segments are written down as they are kept later, in 8 bytes as long as they are uniform.
#[derive(Debug)]
pub struct SegmentsBuilder<A: Address> {
    closed: Closed,
    /// Where the segment begins that the next span may join, and what is behind it; 0 where nothing
    /// was taken, and behind the last address, where no span joins.
    open_start: u64,
    open_end: u64,
    len: u64,
    /// How many bytes come, as far as that is known; 0 where it is not.
    expected: u64,
    addresses: PhantomData<A>,
}

/// The most segments that there is room for before a second one has come.
const MOST_EXPECTED: u64 = 64;

/// The segments that nothing joins any more.
#[derive(Debug)]
enum Closed {
    /// All but the first have `unit` bytes, a power of two, and the first has no more. Where there
    /// is no other than the first, `unit` is its length or 0.
    Uniform {
        starts: Vec<u64>,
        first_len: u64,
        unit: u64,
    },
    Mixed(Vec<Piece>),
}

impl Default for Closed {
    fn default() -> Self {
        Self::Uniform { starts: Vec::new(), first_len: 0, unit: 0 }
    }
}

impl<A: Address> Default for SegmentsBuilder<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Address> SegmentsBuilder<A> {
    /// No spans.
    pub fn new() -> Self {
        Self::expecting(0)
    }

    /// No spans, of so many bytes that will come, most likely.
    pub(super) fn expecting(expected: u64) -> Self {
        let closed = Closed::default();
        Self { closed, open_start: 0, open_end: 0, len: 0, expected, addresses: PhantomData }
    }

    /// Takes the next span.
    ///
    /// # Errors
    ///
    /// [`BuildError::NoMemory`] and [`BuildError::TooLong`]. Then it was not taken.
    #[inline(always)]
    pub fn push(&mut self, span: Span<A>) -> Result<(), BuildError> {
        if self.push_quickly(span) { Ok(()) } else { self.push_other(span) }
    }

    /// Takes a span that is the first, that joins, or that comes behind a segment for which there
    /// is a place, and returns whether it did.
    #[inline(always)]
    pub(super) fn push_quickly(&mut self, span: Span<A>) -> bool {
        let (start, end) = (span.start().get(), span.start().get().wrapping_add(span.len()));
        let Some(len) = self.len.checked_add(span.len()) else { return false };
        if start != self.open_end || start == 0 {
            let open_len = self.open_len();
            match &mut self.closed {
                Closed::Uniform { starts, unit, .. }
                    if *unit == open_len && starts.len() < starts.capacity() =>
                {
                    starts.push(self.open_start);
                }
                Closed::Mixed(pieces) if pieces.len() < pieces.capacity() => {
                    pieces.push(Piece::ending(self.open_start, open_len, self.len));
                }
                _ if self.len == 0 => {}
                _ => return false,
            }
            self.open_start = start;
        }
        (self.open_end, self.len) = (end, len);
        true
    }

    /// Takes one that does not join, behind a segment that is the first of its kind or has no room
    /// yet.
    #[inline(never)]
    pub(super) fn push_other(&mut self, span: Span<A>) -> Result<(), BuildError> {
        let start = span.start().get();
        let len = self.len.checked_add(span.len()).ok_or(BuildError::TooLong)?;
        let open_len = self.open_len();
        if let Closed::Uniform { starts, .. } = &mut self.closed
            && starts.capacity() == 0
            && let Some(guess) = self.expected.checked_div(open_len)
        {
            // As if all were as long as the first one. Without memory for so many there may be for
            // those that come.
            let _ = starts.try_reserve_exact(to_index(guess.min(MOST_EXPECTED)));
        }
        if open_len != 0 {
            self.closed.push(self.open_start, open_len, self.len)?;
        }
        (self.open_start, self.open_end) = (start, start.wrapping_add(span.len()));
        self.len = len;
        Ok(())
    }

    fn open_len(&self) -> u64 {
        self.open_end.wrapping_sub(self.open_start)
    }

    /// Returns how many bytes were taken.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether no span was taken.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns what was taken, joined.
    pub fn spans(&self) -> impl Iterator<Item = Span<A>> {
        let mut end = 0;
        let closed = (0..self.closed.count()).filter_map(move |index| {
            let begin = end;
            end = self.closed.end_behind(index, begin)?;
            let start = A::new(self.closed.start_of(index, begin)?);
            Some(Span::covering(start, end - begin - 1))
        });
        closed.chain(self.open())
    }

    fn open(&self) -> Option<Span<A>> {
        let above = self.open_len().checked_sub(1)?;
        Some(Span::covering(A::new(self.open_start), above))
    }

    /// The segments of what was taken; nothing is left.
    ///
    /// # Errors
    ///
    /// [`BuildError`]: no memory for them, none at all, or too many. Then nothing is taken away.
    #[inline(always)]
    pub fn build(&mut self) -> Result<Segments<A>, BuildError> {
        let open = self.open().ok_or(BuildError::Empty)?;
        if self.closed.count() == 0 {
            (self.open_start, self.open_end, self.len) = (0, 0, 0);
            return Ok(Segments::one(open));
        }
        self.build_many()
    }

    #[inline(never)]
    fn build_many(&mut self) -> Result<Segments<A>, BuildError> {
        let (start, open_len) = (self.open_start, self.open_len());
        let segments = match self.closed.unit_with(open_len, self.len) {
            Some((unit_lg2, skew)) => {
                let mut starts = self.closed.take_starts_and(start)?;
                if let Some(start) = starts.first_mut() {
                    *start = start.wrapping_sub(skew);
                }
                Segments::with(Layout::Uniform { starts, unit_lg2 }, skew, self.len + skew)
            }
            None => {
                let pieces = self.closed.pieces_and(start, open_len, self.len)?;
                Segments::with(Layout::Mixed(mixed(pieces, self.len)?), 0, self.len)
            }
        };
        *self = Self::new();
        Ok(segments)
    }
}

impl Closed {
    fn count(&self) -> usize {
        match self {
            Self::Uniform { starts, .. } => starts.len(),
            Self::Mixed(pieces) => pieces.len(),
        }
    }

    /// The position behind a segment that begins at `begin`.
    fn end_behind(&self, index: usize, begin: u64) -> Option<u64> {
        match self {
            Self::Uniform { first_len, .. } if index == 0 => Some(*first_len),
            Self::Uniform { unit, .. } => Some(begin + unit),
            Self::Mixed(pieces) => Some(pieces.get(index)?.end),
        }
    }

    /// The address of a segment that begins at `begin`.
    fn start_of(&self, index: usize, begin: u64) -> Option<u64> {
        match self {
            Self::Uniform { starts, .. } => starts.get(index).copied(),
            Self::Mixed(pieces) => Some(pieces.get(index)?.origin.wrapping_add(begin)),
        }
    }

    /// Adds a segment, behind the last byte of which `end` bytes were taken.
    fn push(&mut self, start: u64, len: u64, end: u64) -> Result<(), BuildError> {
        if let Self::Uniform { starts, first_len, unit } = self {
            let fits = match starts.len() {
                0 => true,
                1 => len.is_power_of_two() && *first_len <= len,
                _ => len == *unit,
            };
            if fits {
                reserve_one(starts)?;
                if starts.is_empty() {
                    *first_len = len;
                }
                if len.is_power_of_two() {
                    *unit = len;
                }
                starts.push(start);
                return Ok(());
            }
            *self = Self::Mixed(self.to_pieces(self.count().saturating_mul(2))?);
        }
        if let Self::Mixed(pieces) = self {
            reserve_one(pieces)?;
            pieces.push(Piece::ending(start, len, end));
        }
        Ok(())
    }

    /// The size of segments and the skew of the first one, if they are uniform with a last one of
    /// `last_len` bytes; `len` bytes in all.
    fn unit_with(&self, last_len: u64, len: u64) -> Option<(u32, u64)> {
        let Self::Uniform { starts, first_len, unit } = self else { return None };
        let unit = match starts.len() {
            1 => last_len.max(*first_len).checked_next_power_of_two()?,
            _ => *unit,
        };
        let skew = unit - first_len;
        (last_len <= unit && len.checked_add(skew).is_some()).then(|| (lg2::floor(unit), skew))
    }

    /// Takes the addresses of all segments, which are uniform, and adds that of the last one.
    fn take_starts_and(&mut self, last: u64) -> Result<Box<[u64]>, BuildError> {
        let starts = match self {
            Self::Uniform { starts, .. } => starts,
            Self::Mixed(_) => &mut Vec::new(),
        };
        if starts.len() + 1 == starts.capacity() {
            starts.push(last);
            return Ok(mem::take(starts).into_boxed_slice());
        }
        let mut all = with_capacity(starts.len() + 1)?;
        all.extend_from_slice(starts);
        all.push(last);
        Ok(all.into_boxed_slice())
    }

    /// All segments, and the last one of `len` bytes that ends at `end`.
    fn pieces_and(&self, start: u64, len: u64, end: u64) -> Result<Box<[Piece]>, BuildError> {
        let mut all = self.to_pieces(self.count() + 1)?;
        all.push(Piece::ending(start, len, end));
        Ok(all.into_boxed_slice())
    }

    /// All segments, with room for so many.
    fn to_pieces(&self, room: usize) -> Result<Vec<Piece>, BuildError> {
        let mut all = with_capacity(room)?;
        match self {
            Self::Mixed(pieces) => all.extend_from_slice(pieces),
            Self::Uniform { starts, first_len, unit } => {
                let mut begin = 0;
                all.extend(starts.iter().map(|start| {
                    let end = if begin == 0 { *first_len } else { begin + unit };
                    let origin = start.wrapping_sub(mem::replace(&mut begin, end));
                    Piece { origin, end }
                }));
            }
        }
        Ok(all)
    }
}

/// Segments of different lengths, `len` bytes in all.
fn mixed(pieces: Box<[Piece]>, len: u64) -> Result<Mixed, BuildError> {
    let last_index = u32::try_from(pieces.len() - 1).map_err(|_| BuildError::TooLong)?;
    // As many parts as segments at most, more than half as many at least.
    let segments = u64::from(last_index) + 1;
    let mut part_lg2 = lg2::floor(len / segments);
    if (len - 1) >> part_lg2 >= segments {
        part_lg2 += 1;
    }
    let parts = to_index((len - 1) >> part_lg2) + 1;
    let mut index = 0;
    let part_starts = (0..parts).scan(0, |at: &mut u64, _| {
        while pieces.get(index).is_some_and(|piece| piece.end <= *at) {
            index += 1;
        }
        *at = at.saturating_add(lg2::size(part_lg2));
        u32::try_from(index).ok()
    });
    let mut directory = with_capacity(parts + 1)?;
    directory.extend(part_starts.chain([last_index]));
    Ok(Mixed { pieces, directory: directory.into_boxed_slice(), part_lg2 })
}

fn reserve_one<T>(all: &mut Vec<T>) -> Result<(), BuildError> {
    let segments = all.len() + 1;
    all.try_reserve(1).map_err(|_| BuildError::NoMemory { segments })
}

/// Room for exactly so many, which becomes a slice without another allocation.
fn with_capacity<T>(count: usize) -> Result<Vec<T>, BuildError> {
    let mut all = Vec::new();
    all.try_reserve_exact(count).map_err(|_| BuildError::NoMemory { segments: count })?;
    Ok(all)
}
