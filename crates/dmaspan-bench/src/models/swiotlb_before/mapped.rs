//! Mappings that are moved, so that nobody needs to promise to end one once.

use dmaspan::swiotlb::{Original, PoolMemory, SlotRequest};
use dmaspan::{Direction, Span};
use parking_lot::lock_api::RawMutex;

use super::PoolBefore;

/// A mapping of a [`PoolBefore`], for callers who have no addresses to give it instead.
///
/// Dropped, its slots are lost to the pool for ever: a device may still use them.
#[must_use = "slots that are dropped are lost to their pool"]
pub(crate) struct MappedBefore<'p, M: PoolMemory, L> {
    pool: &'p PoolBefore<M, L>,
    span: Span<M::Address>,
    direction: Direction,
}

impl<M: PoolMemory, L: RawMutex> PoolBefore<M, L> {
    /// As [`map`](Self::map).
    #[inline]
    pub(crate) fn map_owned(
        &self,
        original: Original<M::Address>,
        direction: Direction,
        request: &SlotRequest,
    ) -> Option<MappedBefore<'_, M, L>> {
        let len = original.span().len();
        let addr = self.map(original, direction, request)?;
        let span = Span::new(addr, len).ok()?;
        Some(MappedBefore { pool: self, span, direction })
    }
}

impl<M: PoolMemory, L: RawMutex> MappedBefore<'_, M, L> {
    /// Where the device finds the bytes.
    pub(crate) fn span(&self) -> Span<M::Address> {
        self.span
    }

    /// Copies it back where the device writes, and releases its slots: as
    /// [`PoolBefore::unmap`].
    #[inline]
    #[expect(unsafe_code, reason = "it keeps the promise that an address asks for")]
    pub(crate) fn unmap(self) {
        let (addr, len) = (self.span.start(), self.span.len());
        // SAFETY: `map` of this pool gave the address for so many bytes and this direction. Only
        // this value knows of it and can end it, and it is consumed.
        unsafe { self.pool.unmap(addr, len, self.direction) };
    }
}
