//! A pin of simulated memory holds this.

use std::collections::BTreeMap;

use dmaspan::pin::{Dirty, Kind};
use dmaspan::{PhysAddr, Span, UserRange, lg2};

use super::{Books, SimMemory, Violation};

/// A pin of a [`SimPinner`](super::SimPinner).
///
/// A few words, and the frames that are pinned or unpinned in part. Where books are exact also the
/// spans, to find out what the pin does not have.
#[derive(Debug)]
pub struct SimPin {
    range: UserRange,
    bytes_left: u64,
    /// Sorted, disjoint and maximal once the pin is complete.
    held: Option<Held>,
    /// Frames of which the pin has parts only, and frames unpinned in part so far: bytes still
    /// pinned, by the frame's address.
    partial: BTreeMap<u64, u64>,
}

#[derive(Debug, Default)]
struct Held {
    memory: Vec<Span>,
    mmio: Vec<Span>,
}

impl Held {
    fn of(&mut self, kind: Kind) -> &mut Vec<Span> {
        match kind {
            Kind::Memory => &mut self.memory,
            Kind::Mmio => &mut self.mmio,
        }
    }
}

/// A span in whole frames and the parts of frames around them.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Frames of which the span has a part only, and how many bytes: the first and the last.
    parts: [Option<(PhysAddr, u64)>; 2],
    whole: Option<Span>,
}

impl Cut {
    fn new(span: Span, granule_lg2: u32) -> Self {
        let frame = |paddr: PhysAddr| PhysAddr::new(lg2::align_down(paddr.get(), granule_lg2));
        let (first, last) = (span.paddr().get(), span.last().get());
        let head = u64::from(!lg2::is_aligned(first, granule_lg2));
        let tail = u64::from(!lg2::is_aligned(last.wrapping_add(1), granule_lg2));
        if head + tail == 0 {
            return Self { parts: [None; 2], whole: Some(span) };
        }
        if frame(span.paddr()) == frame(span.last()) {
            return Self { parts: [Some((frame(span.paddr()), span.len())), None], whole: None };
        }
        let head = (head > 0).then(|| lg2::size(granule_lg2) - (first & lg2::mask(granule_lg2)));
        let tail = (tail > 0).then(|| (last & lg2::mask(granule_lg2)) + 1);
        let len = span.len() - head.unwrap_or(0) - tail.unwrap_or(0);
        Self {
            parts: [
                head.map(|bytes| (frame(span.paddr()), bytes)),
                tail.map(|bytes| (frame(span.last()), bytes)),
            ],
            whole: Span::new(span.paddr().wrapping_add(head.unwrap_or(0)), len).ok(),
        }
    }
}

/// A frame, as a span.
fn frame(memory: &SimMemory, paddr: PhysAddr) -> Option<Span> {
    Span::new(paddr, lg2::size(memory.granule_lg2())).ok()
}

impl SimPin {
    /// A pin of nothing yet, of `range`.
    pub(super) fn new(range: UserRange, memory: &SimMemory) -> Self {
        let held = (memory.books() == Books::Exact).then(Held::default);
        Self { range, bytes_left: 0, held, partial: BTreeMap::new() }
    }

    /// Returns what was pinned.
    pub fn range(&self) -> UserRange {
        self.range
    }

    /// Returns how many bytes of it are left: pinned memory, and device memory that was not given
    /// back.
    pub fn bytes_left(&self) -> u64 {
        self.bytes_left
    }

    /// Pins the frames under memory that the pin is about to have: one that it has in parts only
    /// once.
    #[inline]
    pub(super) fn pin(&mut self, memory: &SimMemory, span: Span) {
        if lg2::is_aligned(span.paddr().get() | span.len(), memory.granule_lg2()) {
            return memory.pin_span(span);
        }
        let cut = Cut::new(span, memory.granule_lg2());
        for (paddr, bytes) in cut.parts.into_iter().flatten() {
            let sum = self.partial.entry(paddr.get()).or_insert(0);
            if *sum == 0
                && let Some(frame) = frame(memory, paddr)
            {
                memory.pin_span(frame);
            }
            *sum += bytes;
        }
        if let Some(whole) = cut.whole {
            memory.pin_span(whole);
        }
    }

    /// Undoes [`pin`](Self::pin) of memory that nobody was told of.
    pub(super) fn undo_pin(&mut self, memory: &SimMemory, span: Span) {
        self.unpin_frames(memory, span, Dirty::Clean);
    }

    fn unpin_frames(&mut self, memory: &SimMemory, span: Span, dirty: Dirty) {
        let cut = Cut::new(span, memory.granule_lg2());
        for (paddr, bytes) in cut.parts.into_iter().flatten() {
            self.unpin_part(memory, paddr, bytes, dirty);
        }
        if let Some(whole) = cut.whole {
            memory.unpin_span(whole, dirty);
        }
    }

    /// Writes down that a sink took a span.
    pub(super) fn took(&mut self, span: Span, kind: Kind) {
        self.bytes_left += span.len();
        if let Some(held) = &mut self.held {
            held.of(kind).push(span);
        }
    }

    /// The pin of what the sink took; `None` where that is nothing.
    pub(super) fn finish(mut self) -> Option<Self> {
        let range = UserRange::from_len(self.range.start(), self.bytes_left).ok()?;
        if let Some(held) = &mut self.held {
            union(&mut held.memory);
            union(&mut held.mmio);
        }
        Some(Self { range, ..self })
    }

    /// Counts a span down and unpins each frame of memory whose last byte that was.
    pub(super) fn unpin(&mut self, memory: &SimMemory, span: Span, kind: Kind, dirty: Dirty) {
        if let Some(held) = &mut self.held {
            let held = held.of(kind);
            let before = held.partition_point(|own| own.paddr() <= span.paddr());
            let own = before.checked_sub(1).and_then(|at| held.get(at));
            if own.is_none_or(|own| own.last() < span.last()) {
                memory.violate(Violation::UnpinnedForeign { span });
                return;
            }
        }
        self.bytes_left = self.bytes_left.saturating_sub(span.len());
        if kind == Kind::Mmio {
            return;
        }
        if lg2::is_aligned(span.paddr().get() | span.len(), memory.granule_lg2()) {
            return memory.unpin_span(span, dirty);
        }
        self.unpin_frames(memory, span, dirty);
    }

    /// Counts part of a frame down. One pin of the frame stands for all of its bytes in `partial`.
    fn unpin_part(&mut self, memory: &SimMemory, paddr: PhysAddr, bytes: u64, dirty: Dirty) {
        let parts = self.partial.remove(&paddr.get()).unwrap_or(0);
        // Where they are too few, the frame is pinned as a whole besides, and from now on in parts.
        let whole = if parts < bytes { lg2::size(memory.granule_lg2()) } else { 0 };
        let left = (parts + whole).saturating_sub(bytes);
        if left > 0 {
            self.partial.insert(paddr.get(), left);
        }
        let pins_before = u32::from(parts > 0) + u32::from(whole > 0);
        if pins_before > u32::from(left > 0)
            && let Some(frame) = frame(memory, paddr)
        {
            memory.unpin_span(frame, dirty);
        }
    }
}

/// The spans' bytes as sorted, disjoint, maximal spans. A user may map the same memory twice.
fn union(spans: &mut Vec<Span>) {
    spans.sort_unstable_by_key(|span| span.paddr());
    spans.dedup_by(|next, span| {
        let touches = span.last().checked_add(1).is_none_or(|behind| next.paddr() <= behind);
        let len = next.last().max(span.last()).get() - span.paddr().get();
        match Span::new(span.paddr(), len.saturating_add(1)) {
            Ok(joined) if touches => {
                *span = joined;
                true
            }
            _ => false,
        }
    });
}
