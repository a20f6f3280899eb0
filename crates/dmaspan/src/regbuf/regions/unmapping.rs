//! An [`Unmapping`] ends when nothing holds what was unmapped.

use alloc::sync::Arc;
use core::fmt;
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll};

use lock_api::RawMutex;

use super::region::Fate;
use crate::addr::Address;
use crate::span::Span;

/// Regions that were unmapped, some of which something may hold still. Nobody new gets any of them.
///
/// A server answers its client's request when this is done: asked by [`is_done`](Self::is_done),
/// awaited as a future by any runtime, or waited for with a bound, by
/// `dmaspan_linux::client::wait`. The output of the future is [`bytes`](Self::bytes).
///
/// Dropped, it changes nothing: the memory goes when nothing holds it.
///
/// # Context
///
/// Waiting for it while holding part of what was unmapped waits for itself.
#[must_use = "a client is answered when this is done"]
pub struct Unmapping<A: Address, L: RawMutex> {
    bytes: u64,
    regions: usize,
    /// The lowest region that was not seen to be gone, and from there on the others.
    first: Option<Arc<Fate<A, L>>>,
}

impl<A: Address, L: RawMutex> Unmapping<A, L> {
    pub(super) fn new(bytes: u64, regions: usize, first: Option<Arc<Fate<A, L>>>) -> Self {
        Self { bytes, regions, first }
    }

    /// Returns how many bytes were unmapped: 0 where no region was there.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns how many regions were unmapped.
    pub fn regions(&self) -> usize {
        self.regions
    }

    /// Returns whether nothing holds any of it any more, and its memory was let go.
    pub fn is_done(&mut self) -> bool {
        self.held().is_none()
    }

    /// The lowest region that something holds; `None` when all is done.
    pub fn held(&mut self) -> Option<Span<A>> {
        while let Some(fate) = &self.first {
            if !fate.is_gone() {
                return Some(fate.range);
            }
            self.first = fate.take_next();
        }
        None
    }
}

impl<A: Address, L: RawMutex> Future for Unmapping<A, L> {
    type Output = u64;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<u64> {
        while let Some(fate) = &self.first {
            if fate.poll_gone(context).is_pending() {
                return Poll::Pending;
            }
            self.first = fate.take_next();
        }
        Poll::Ready(self.bytes)
    }
}

impl<A: Address, L: RawMutex> Drop for Unmapping<A, L> {
    /// Link by link: a list that is dropped as a whole would need a stack as long as itself.
    fn drop(&mut self) {
        while let Some(fate) = self.first.take() {
            self.first = fate.take_next();
        }
    }
}

impl<A: Address, L: RawMutex> fmt::Debug for Unmapping<A, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, regions, first } = self;
        let mut fields = f.debug_struct("Unmapping");
        fields.field("bytes", bytes).field("regions", regions);
        fields.field("first", &first.as_ref().map(|fate| fate.range)).finish()
    }
}
