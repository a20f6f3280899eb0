//! A [`Span`] is contiguous bytes, the currency between all layers.

use core::fmt;

use crate::addr::{Address, PhysAddr};
use crate::range::RangeError;

/// Contiguous bytes of an address space: of physical addresses, where no other is named. Never
/// empty, and its last byte has an address.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span<A = PhysAddr> {
    start: A,
    /// Bytes behind the first one.
    above: u64,
}

impl<A: Address> Span<A> {
    /// The span of `len` bytes from `start`.
    ///
    /// # Errors
    ///
    /// [`RangeError`] where `len` is 0 or the last byte has no address.
    #[inline]
    pub fn new(start: A, len: u64) -> Result<Self, RangeError> {
        let Some(above) = len.checked_sub(1) else {
            return Err(RangeError::Empty { start: start.get() });
        };
        match start.get().checked_add(above) {
            Some(_) => Ok(Self { start, above }),
            None => Err(RangeError::Wraps { start: start.get(), len }),
        }
    }

    /// The span of `above` bytes behind the one at `start`, which are known not to wrap nor to be
    /// the whole space: of memory that a table maps, or part of a span.
    #[inline(always)]
    pub(crate) fn covering(start: A, above: u64) -> Self {
        debug_assert!(start.get().checked_add(above).is_some() && above != u64::MAX);
        Self { start, above }
    }

    /// The first address.
    #[inline(always)]
    pub fn start(self) -> A {
        self.start
    }

    /// The last address, which belongs to the span.
    #[inline(always)]
    pub fn last(self) -> A {
        A::new(self.start.get().wrapping_add(self.above))
    }

    /// Both spans as one where `next` starts right behind this one.
    ///
    /// Wherever memory ends up contiguous the spans join: over folio borders, over kinds of page.
    #[inline(always)]
    pub fn join(self, next: Self) -> Option<Self> {
        // Nothing lies behind the top address, and the sum of the lengths may not be 2^64.
        let above = next.last().get().wrapping_sub(self.start.get());
        let follows = self.last().get().wrapping_add(1) == next.start.get();
        let joins = follows && next.start.get() != 0 && above != u64::MAX;
        joins.then_some(Self { start: self.start, above })
    }

    /// The part from byte `offset` on; `None` where the span is not longer than that.
    #[inline(always)]
    pub fn skip(self, offset: u64) -> Option<Self> {
        if offset > self.above {
            return None;
        }
        let start = A::new(self.start.get().wrapping_add(offset));
        Some(Self { start, above: self.above - offset })
    }

    /// The length in bytes. A span of the whole space, 2^64 bytes, cannot be made.
    #[inline(always)]
    pub const fn len(self) -> u64 {
        self.above + 1
    }

    /// Always `false`: a span has at least one byte.
    pub const fn is_empty(self) -> bool {
        false
    }
}

impl<A: Address> Span<A> {
    /// The span as page tables have it: the numbers of its addresses.
    #[inline(always)]
    pub(crate) fn output(self) -> Span {
        Span { start: PhysAddr::new(self.start.get()), above: self.above }
    }
}

impl Span {
    /// The span of one byte.
    pub(crate) const fn point(start: PhysAddr) -> Self {
        Self { start, above: 0 }
    }

    /// The first address.
    #[inline(always)]
    pub const fn paddr(self) -> PhysAddr {
        self.start
    }

    /// The span of which this is the [`output`](Self::output).
    #[inline(always)]
    pub(crate) fn of_output<A: Address>(self) -> Span<A> {
        Span { start: A::new(self.start.get()), above: self.above }
    }
}

impl<A: Address> fmt::Debug for Span<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({self})")
    }
}

impl<A: Address> fmt::Display for Span<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..={:#x}", self.start.get(), self.last().get())
    }
}

/// A [`SpanBuf`] has no room for the span; it was left as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Spans in a caller's fixed buffer, coalesced as they come. Nothing here allocates.
///
/// ```
/// use dmaspan::{PhysAddr, RangeError, Span, SpanBuf};
///
/// let mut room = SpanBuf::room::<8>();
/// let mut buf = SpanBuf::new(&mut room);
/// buf.push(Span::new(PhysAddr::new(0x1000), 0x1000)?).unwrap();
/// buf.push(Span::new(PhysAddr::new(0x2000), 0x3000)?).unwrap(); // right behind: joins
/// assert_eq!(buf.spans(), &[Span::new(PhysAddr::new(0x1000), 0x4000)?]);
/// Ok::<(), RangeError>(())
/// ```
#[derive(Debug)]
pub struct SpanBuf<'a, A: Address = PhysAddr> {
    spans: &'a mut [Span<A>],
    len: usize,
}

impl<'a, A: Address> SpanBuf<'a, A> {
    /// Room for `N` spans, to put a buffer over.
    #[inline(always)]
    pub fn room<const N: usize>() -> [Span<A>; N] {
        [Span { start: A::new(0), above: 0 }; N]
    }

    /// An empty buffer over `room`, whose content does not matter.
    pub fn new(room: &'a mut [Span<A>]) -> Self {
        Self { spans: room, len: 0 }
    }

    /// Adds a span, joined to the last one where it starts right behind that.
    ///
    /// # Errors
    ///
    /// [`Full`] where it neither joins nor has a place.
    #[inline(always)]
    pub fn push(&mut self, span: Span<A>) -> Result<(), Full> {
        if let Some(last) = self.last_mut()
            && let Some(joined) = last.join(span)
        {
            *last = joined;
            return Ok(());
        }
        self.push_apart(span)
    }

    /// Adds a span that is known not to join the last one.
    ///
    /// # Errors
    ///
    /// [`Full`] where it has no place.
    #[inline(always)]
    pub(crate) fn push_apart(&mut self, span: Span<A>) -> Result<(), Full> {
        let place = self.spans.get_mut(self.len).ok_or(Full)?;
        *place = span;
        self.len += 1;
        Ok(())
    }

    /// Adds the outputs of spans as [`push`](Self::push) does, as many as have a place. Returns how
    /// many that are, and how many bytes they have together.
    #[inline(always)]
    pub(crate) fn extend<B: Address>(&mut self, spans: &[Span<B>]) -> (usize, u64) {
        let mut bytes = 0u64;
        for (taken, span) in spans.iter().enumerate() {
            let span = Span { start: A::new(span.start.get()), above: span.above };
            if self.push(span).is_err() {
                return (taken, bytes);
            }
            bytes = bytes.saturating_add(span.len());
        }
        (spans.len(), bytes)
    }

    /// The spans so far, each maximal.
    pub fn spans(&self) -> &[Span<A>] {
        &self.spans[..self.len]
    }

    /// Returns how many spans are in the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no span is in the buffer.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns how many spans have a place.
    pub fn capacity(&self) -> usize {
        self.spans.len()
    }

    /// Empties the buffer.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Where the buffer stands, for [`rewind`](Self::rewind).
    pub(crate) fn mark(&self) -> Mark<A> {
        Mark { len: self.len, last: self.spans().last().copied() }
    }

    /// Forgets what was pushed since `mark`.
    pub(crate) fn rewind(&mut self, mark: Mark<A>) {
        self.len = mark.len;
        if let (Some(place), Some(last)) = (self.last_mut(), mark.last) {
            *place = last;
        }
    }

    #[inline(always)]
    fn last_mut(&mut self) -> Option<&mut Span<A>> {
        self.spans[..self.len].last_mut()
    }
}

/// A state of a [`SpanBuf`] to go back to: joining may have changed the last span.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark<A: Address = PhysAddr> {
    len: usize,
    last: Option<Span<A>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(paddr: u64, len: u64) -> Span {
        Span::new(PhysAddr::new(paddr), len).unwrap()
    }

    #[test]
    fn spans_reach_the_top_of_the_space_and_not_beyond() {
        assert_eq!(span(u64::MAX, 1).last(), PhysAddr::new(u64::MAX));
        assert!(Span::new(PhysAddr::new(u64::MAX), 2).is_err());
        assert!(Span::new(PhysAddr::new(0), 0).is_err());
        // Behind the top lies nothing, not address 0.
        assert_eq!(span(u64::MAX, 1).join(span(0, 1)), None);
    }

    #[test]
    fn only_neighbours_join() {
        assert_eq!(span(0, 5).join(span(5, 2)), Some(span(0, 7)));
        assert_eq!(span(0, 5).join(span(6, 2)), None);
        assert_eq!(span(5, 2).join(span(0, 5)), None);
    }

    #[test]
    fn skipping_leaves_at_least_one_byte() {
        assert_eq!(span(10, 3).skip(0), Some(span(10, 3)));
        assert_eq!(span(10, 3).skip(2), Some(span(12, 1)));
        assert_eq!(span(10, 3).skip(3), None);
    }

    #[test]
    fn a_full_buffer_refuses_and_still_joins() {
        let mut room = SpanBuf::room::<2>();
        let mut buf = SpanBuf::new(&mut room);
        buf.push(span(0, 1)).unwrap();
        buf.push(span(2, 1)).unwrap();
        assert_eq!(buf.push(span(4, 1)), Err(Full));
        buf.push(span(3, 1)).unwrap();
        assert_eq!(buf.spans(), &[span(0, 1), span(2, 2)]);
    }

    #[test]
    fn rewinding_undoes_a_join() {
        let mut room = SpanBuf::room::<3>();
        let mut buf = SpanBuf::new(&mut room);
        buf.push(span(0, 1)).unwrap();
        let mark = buf.mark();
        buf.push(span(1, 1)).unwrap();
        buf.push(span(8, 1)).unwrap();
        buf.rewind(mark);
        assert_eq!(buf.spans(), &[span(0, 1)]);
    }
}
