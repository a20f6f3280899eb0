//! The handles that a pool hands out: slots, and mappings of a pool used by itself.

use alloc::sync::Arc;
use core::fmt;

use super::chunk::{Chunk, Taken};
use super::error::Error;
use crate::addr::{Address, PhysAddr};
use crate::leak::{self, Held};
use crate::log;
use crate::platform::Id;
use crate::prot::Direction;
use crate::span::Span;

/// Slots of a pool that stand in for memory; only [`Pool::release`](super::Pool::release) of the
/// same pool gives them back, once.
///
/// Dropped, they are lost to the pool for ever: a device may still use them.
///
/// ```compile_fail,E0382
/// use dmaspan::Platform;
/// use dmaspan::swiotlb::{Pool, PoolMemory, SlotOf};
///
/// fn twice<M: PoolMemory, P: Platform>(pool: &Pool<M, P>, slot: SlotOf<P, M::Address>) {
///     let _ = pool.release(slot);
///     let _ = pool.release(slot); // It was moved.
/// }
/// ```
#[must_use = "slots that are dropped are lost to their pool"]
pub struct Slot<L, A: Address = PhysAddr> {
    pub(super) pool: Id,
    /// What was added to the pool that they are in, if any.
    pub(super) grown: Option<Arc<Chunk<L>>>,
    /// Otherwise the number of the pool's span, or [`SINGLE`].
    pub(super) node: u32,
    pub(super) taken: Taken,
    pub(super) original: Span<A>,
}

impl<L, A: Address> Drop for Slot<L, A> {
    #[cold]
    #[inline(never)]
    fn drop(&mut self) {
        let (addr, slots) = (self.taken.data, self.original.len());
        leak::count(Held { slots, ..Held::default() });
        log::warn!(
            "{slots:#x} bytes of slots at {addr:#x} were dropped and are lost: release them to \
             their pool"
        );
    }
}

/// In the place of a span: memory that was obtained for these slots alone.
pub(super) const SINGLE: u32 = u32::MAX;

impl<L, A: Address> Slot<L, A> {
    /// Returns where the bytes are: as long as the original.
    #[inline(always)]
    pub fn span(&self) -> Span<A> {
        Span::covering(A::new(self.taken.data), self.original.len() - 1)
    }

    /// Returns how many bytes there are.
    #[inline(always)]
    pub fn len(&self) -> u64 {
        self.original.len()
    }

    /// Whether it is of what the pool began with.
    pub(super) const fn is_base(&self) -> bool {
        self.grown.is_none() && self.node != SINGLE
    }

    /// Always `false`: a slot has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl<L, A: Address> fmt::Debug for Slot<L, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("span", &self.span()).finish_non_exhaustive()
    }
}

/// Says whether a slot is filled from its original when it is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Fill {
    /// The slot is filled from the original, whatever the direction: bytes that the device does not
    /// write then stay as they were.
    #[default]
    Copy,
    /// The slot is not filled, because the device overwrites all of it or the driver says how much
    /// it wrote. Only what was written is copied back: the rest of the slot may hold data of a
    /// former holder, and never reaches the original (CVE-2022-0854).
    ///
    /// It is for devices that tell the truth. One that says more than it wrote has the difference
    /// copied to the original: former holders' data, unless the pool [wipes](super::Wipe::Release)
    /// it. The DMA API therefore fills the slots of devices that are
    /// [not trusted](crate::dma::Trust::Untrusted) all the same.
    Overwritten,
}

/// A buffer that a device uses through a slot; from [`Pool::map`](super::Pool::map).
///
/// Dropped, its slots are lost to the pool for ever: the device may still use them.
#[must_use = "slots that are dropped are lost to their pool"]
pub struct Bounced<L, A: Address = PhysAddr> {
    pub(super) slot: Slot<L, A>,
    pub(super) direction: Direction,
    pub(super) fill: Fill,
}

impl<L, A: Address> Bounced<L, A> {
    /// Returns where the device finds the bytes.
    pub fn span(&self) -> Span<A> {
        self.slot.span()
    }

    /// Returns which way the data goes.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Returns whether the slot was filled.
    pub fn fill(&self) -> Fill {
        self.fill
    }
}

impl<L, A: Address> fmt::Debug for Bounced<L, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bounced")
            .field("span", &self.slot.span())
            .field("direction", &self.direction)
            .field("fill", &self.fill)
            .finish()
    }
}

/// Gives back a handle that was to be ended and is not.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct NotReleased<H> {
    /// The reason.
    pub error: Error,
    /// The handle, which is as it was.
    pub handle: H,
}

impl<H> From<NotReleased<H>> for Error {
    /// The handle is dropped, and its slots are lost to the pool.
    fn from(failed: NotReleased<H>) -> Self {
        failed.error
    }
}

// Of any handle: a caller that unwraps wants the error.
impl<H> fmt::Debug for NotReleased<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotReleased").field("error", &self.error).finish_non_exhaustive()
    }
}
