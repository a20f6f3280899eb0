//! The duties of a pool, told by addresses and bytes alone.

use dmaspan::Span;
use dmaspan::swiotlb::SlotRequest;

use crate::common::span;
use crate::flat::{Bytes, POISON, part, part_mut};

/// What slots have to be, found by trying all addresses.
pub(crate) struct Model {
    pub(crate) slot_bytes: u64,
    /// What the pool has that is divided into slots.
    pub(crate) spans: Vec<Span>,
    /// The whole slots that are held.
    pub(crate) held: Vec<Span>,
    /// All memory.
    pub(crate) bytes: Bytes,
}

fn overlap(a: Span, b: Span) -> bool {
    a.paddr() <= b.last() && b.paddr() <= a.last()
}

fn inside(a: Span, b: Span) -> bool {
    b.paddr() <= a.paddr() && a.last() <= b.last()
}

impl Model {
    /// Whole granules and slots around bytes; `None` where they reach beyond the address space.
    pub(crate) fn whole(&self, data: Span, request: &SlotRequest) -> Option<Span> {
        let unit = self.slot_bytes.max(request.granule);
        let start = data.paddr().get() & !(unit - 1);
        let last = data.last().get() | (unit - 1);
        (last - start != u64::MAX).then(|| span(start, last - start + 1))
    }

    /// Why bytes are no slot for the original; `None` where they are one.
    pub(crate) fn objection(
        &self,
        data: Span,
        original: Span,
        request: &SlotRequest,
    ) -> Option<&'static str> {
        let (first, last) = (data.paddr().get(), data.last().get());
        let Some(whole) = self.whole(data, request) else { return Some("too large") };
        let crosses = request.boundary.is_some_and(|boundary| first / boundary != last / boundary);
        match () {
            () if data.len() != original.len() => Some("not as long"),
            () if (first ^ original.paddr().get()) & request.keep_bits != 0 => Some("low bits"),
            () if last > request.last => Some("out of reach"),
            () if crosses => Some("a boundary is crossed"),
            () if !self.spans.iter().any(|span| inside(whole, *span)) => Some("not in the pool"),
            () if self.held.iter().any(|held| overlap(*held, whole)) => Some("held already"),
            () => None,
        }
    }

    /// Whether there is a slot for the original: all addresses are tried whose distance is 64, or
    /// as the bits to keep want it.
    pub(crate) fn has_place(&self, original: Span, request: &SlotRequest) -> bool {
        let Some(step) = request.keep_bits.checked_add(1) else { return false };
        let low = original.paddr().get() & request.keep_bits;
        let step = step.max(64);
        self.spans.iter().any(|pool| {
            let start = pool.paddr().get();
            let ahead = low.wrapping_sub(start) & (step - 1);
            let mut at = start.checked_add(ahead);
            while let Some(first) = at.filter(|at| *at <= pool.last().get()) {
                let fits = pool.last().get() - first >= original.len() - 1;
                let data = fits.then(|| span(first, original.len()));
                if data.is_some_and(|data| self.objection(data, original, request).is_none()) {
                    return true;
                }
                at = first.checked_add(step);
            }
            false
        })
    }

    /// Slots that were taken: what of them is not data is zero.
    pub(crate) fn take(&mut self, data: Span, whole: Span) {
        self.held.push(whole);
        let kept = part(&self.bytes, data).to_vec();
        part_mut(&mut self.bytes, whole).fill(0);
        part_mut(&mut self.bytes, data).copy_from_slice(&kept);
    }

    pub(crate) fn release(&mut self, whole: Span) {
        let index = self.held.iter().position(|held| *held == whole);
        self.held.swap_remove(index.expect("it was held"));
    }

    /// A copy of bytes.
    pub(crate) fn copy(&mut self, from: Span, to: Span) {
        let copied = part(&self.bytes, from).to_vec();
        part_mut(&mut self.bytes, to).copy_from_slice(&copied);
    }

    /// Bytes of slots that are held.
    pub(crate) fn used(&self) -> u64 {
        self.held.iter().map(|held| held.len()).sum()
    }

    /// Memory that appeared.
    pub(crate) fn add(&mut self, at: Span) {
        let len = usize::try_from(at.len()).unwrap();
        self.bytes.push((at.paddr().get(), vec![POISON; len]));
    }

    /// Memory that is gone.
    pub(crate) fn remove(&mut self, at: Span) {
        self.bytes.retain(|(base, _)| *base != at.paddr().get());
    }
}
