//! [`BouncePool`] supplies memory that stands in for a buffer that the device cannot use, and
//! [`Bounce`] says when a device uses it.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use super::coherent::{CoherentFrames, CoherentRequest, NoCoherent};
use crate::addr::PhysAddr;
use crate::platform::Platform;
use crate::span::Span;
use crate::swiotlb::{self, Original, PoolMemory, SlotOf, SlotRequest, To};
pub use frames::FrameBounce;

mod frames;

/// When a device gets slots in place of its buffers.
///
/// A device that is to see nothing but a pool of its own:
///
/// ```no_run
/// use std::error::Error;
/// use std::sync::Arc;
///
/// use dmaspan::dma::{Bounce, Device, DeviceConfig, Direct};
/// use dmaspan::swiotlb::{Pool, PoolConfig};
/// use dmaspan::{Direction, PhysAddr};
/// use dmaspan_linux::physical::PhysicalMemory;
/// use dmaspan_linux::{Memory, MemoryKind, UserPlatform};
///
/// fn main() -> Result<(), Box<dyn Error>> {
///     let memory = PhysicalMemory::new()?;
///     let slots = memory.bounce(1 << 20, PhysAddr::new(u64::MAX))?;
///     let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), UserPlatform)?);
///     let direct = Arc::new(Direct::new(memory.extent()?, UserPlatform));
///     let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(64) };
///     let device = Device::new(direct, Arc::clone(&pool), config)?;
///
///     let buffer = memory.pin(&Arc::new(Memory::new(MemoryKind::Base, 0x1000)?))?;
///     let mapping = device.map_single(buffer.part(0, 0x1000)?, Direction::FromDevice)?;
///     assert!(mapping.is_bounced());
///     let _unmapped = device.unmap(mapping)?;
///     Ok(())
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Bounce {
    /// Where it cannot, or must not, have the memory itself.
    #[default]
    AsNeeded,
    /// Always, and for whole buffers: what is not in the pool it cannot see, as in a confidential
    /// guest, or must not, as with a pool of its own (`swiotlb=force`, `restricted-dma-pool`).
    /// Memory that is the pool's already, as that of a [lease](swiotlb::Lease), is used itself;
    /// what is reached on the bus is not memory and passes, and what is reached through the host
    /// bridge is refused.
    Always,
}

/// Gives slots of memory that devices reach, and copies: a [`swiotlb::Pool`], or one of another
/// kind.
///
/// Here for a device with 32 bits of address:
///
/// ```no_run
/// use std::error::Error;
/// use std::sync::Arc;
///
/// use dmaspan::dma::{Device, DeviceConfig, Direct};
/// use dmaspan::swiotlb::{Pool, PoolConfig};
/// use dmaspan::{Direction, PhysAddr};
/// use dmaspan_linux::physical::PhysicalMemory;
/// use dmaspan_linux::{Memory, MemoryKind, UserPlatform};
///
/// fn main() -> Result<(), Box<dyn Error>> {
///     let memory = PhysicalMemory::new()?;
///     let slots = memory.bounce(1 << 20, PhysAddr::new(0xffff_ffff))?;
///     let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), UserPlatform)?);
///     let direct = Arc::new(Direct::new(memory.extent()?, UserPlatform));
///     let device = Device::new(direct, Arc::clone(&pool), DeviceConfig::bits(32))?;
///
///     // Wherever the buffer is, the device gets an address that it reaches.
///     let buffer = memory.pin(&Arc::new(Memory::new(MemoryKind::Base, 0x1000)?))?;
///     let mapping = device.map_single(buffer.part(0x200, 1500)?, Direction::FromDevice)?;
///     assert!(mapping.addr().get() < 1 << 32);
///     let _unmapped = device.unmap(mapping)?;
///     assert_eq!(pool.stats().used, 0);
///     Ok(())
/// }
/// ```
///
/// # Safety
///
/// 1. The memory of a slot is the holder's alone until the slot is [released](Self::release), and
///    for ever where it never is. Devices may read and write it at any time, padding to the granule
///    asked for included.
/// 2. [`span`](Self::span) names that memory, always the same for a slot: as long as its original,
///    with the low bits, below the last address and within the boundary that were asked for. Slots
///    that are taken together come in the order of their originals.
/// 3. [`copy`](Self::copy) touches no memory but the slot's and the original's. Several threads
///    call it at once, also for the same bytes, or for some that overlap: each byte is accessed
///    atomically and by itself, as by [`bytes::copy`](crate::bytes::copy).
/// 4. Memory that the pool [owns](Self::owns) is such as a device may see that sees nothing else.
#[expect(
    unsafe_code,
    reason = "a contract about memory that devices write; nothing here is unsafe"
)]
pub unsafe trait BouncePool: Send + Sync {
    /// A slot. Dropped, it is lost to the pool for ever: a device may still use it.
    type Slot: Send + fmt::Debug;

    /// A slot for a piece of memory, whose padding is zeroed; nothing is copied yet. `None` where
    /// there is none now, or where no slot can be so.
    ///
    /// # Context
    ///
    /// Like [`release`](Self::release), may run with interrupts off where mappings are made so.
    fn take(&self, original: Original, request: &SlotRequest) -> Option<Self::Slot>;

    /// Slots for many pieces of memory, all like `request`, are pushed to `slots` in their order,
    /// as by a [`take`](Self::take) for each: whether there are all of them. Otherwise none is
    /// held, and `slots` is as before.
    ///
    /// # Context
    ///
    /// As [`take`](Self::take), and allocates where `slots` has no room.
    #[must_use]
    fn take_all(
        &self,
        originals: impl Iterator<Item = Original>,
        request: &SlotRequest,
        slots: &mut Vec<Self::Slot>,
    ) -> bool {
        let before = slots.len();
        for original in originals {
            let has_room = slots.try_reserve(1).is_ok();
            let Some(slot) = has_room.then(|| self.take(original, request)).flatten() else {
                slots.drain(before..).for_each(|slot| self.release(slot));
                return false;
            };
            slots.push(slot);
        }
        true
    }

    /// Gives a slot of this pool back, which no device uses any more. Nothing is copied.
    fn release(&self, slot: Self::Slot);

    /// Keeps a slot of this pool from ever being used again, since hardware was not seen to forget
    /// it.
    fn quarantine(&self, slot: Self::Slot) {
        drop(slot);
    }

    /// Returns where the slot's bytes are: as long as the original.
    fn span(&self, slot: &Self::Slot) -> Span;

    /// Copies `len` bytes at `offset`, which are within the slot, one of this pool.
    fn copy(&self, slot: &Self::Slot, offset: u64, len: u64, to: To);

    /// From the lowest to the highest address that a slot may have; `None` where there is none at
    /// all.
    fn reach(&self) -> Option<Span>;

    /// Whether memory is the pool's own: what a device that sees nothing but the pool sees, too.
    /// Of no memory, by default.
    fn owns(&self, span: Span) -> bool {
        let _ = span;
        false
    }

    /// Returns how long a slot can be that is like `request`, whatever the low bits of its
    /// original, in bytes: 0 where some original has no slot at all.
    fn max_len(&self, request: &SlotRequest) -> u64;

    /// Memory of the pool that the program and a device use at the same time, for one that
    /// [bounces all](Bounce::Always) (`swiotlb_alloc`). A pool has none by default.
    ///
    /// # Errors
    ///
    /// [`NoCoherent`], with nothing changed.
    fn coherent(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        let _ = request;
        Err(NoCoherent { why: "the pool lends none: put it into an `Arc`, or use another" })
    }

    /// The same of a pool that is shared, as a [lease](swiotlb::Lease) has to.
    ///
    /// # Errors
    ///
    /// [`NoCoherent`], with nothing changed.
    fn coherent_of(
        this: &Arc<Self>,
        request: &CoherentRequest,
    ) -> Result<CoherentFrames, NoCoherent>
    where
        Self: Sized,
    {
        this.coherent(request)
    }

    /// How many slots of one granule each, of so many bytes, can be held at a time. By default one,
    /// where there is any.
    fn granules(&self, granule: u64) -> u64 {
        let request = SlotRequest { keep_bits: granule - 1, granule, ..SlotRequest::default() };
        self.max_len(&request).min(1)
    }
}

#[expect(unsafe_code, reason = "the pool's memory promises")]
// SAFETY: a run of slots is one holder's until it is released, with whole granules, and never given
// out again where it is not; `PoolMemory` promises that nobody else uses the memory, and to copy no
// more than it is told to, which is of a slot and its original.
unsafe impl<M, P> BouncePool for swiotlb::Pool<M, P>
where
    M: PoolMemory<Address = PhysAddr> + 'static,
    P: Platform + 'static,
{
    type Slot = SlotOf<P>;

    #[inline]
    fn take(&self, original: Original, request: &SlotRequest) -> Option<SlotOf<P>> {
        Self::take(self, original, request).ok()
    }

    fn take_all(
        &self,
        originals: impl Iterator<Item = Original>,
        request: &SlotRequest,
        slots: &mut Vec<SlotOf<P>>,
    ) -> bool {
        Self::take_all(self, originals, request, slots).is_ok()
    }

    #[inline]
    fn release(&self, slot: SlotOf<P>) {
        // One of another pool is lost.
        drop(Self::release(self, slot));
    }

    fn quarantine(&self, slot: SlotOf<P>) {
        drop(Self::quarantine(self, slot));
    }

    #[inline]
    fn span(&self, slot: &SlotOf<P>) -> Span {
        slot.span()
    }

    #[inline]
    fn copy(&self, slot: &SlotOf<P>, offset: u64, len: u64, to: To) {
        // What is not within a slot of this pool is not copied.
        let _ = Self::copy(self, slot, offset, len, to);
    }

    fn reach(&self) -> Option<Span> {
        match self.config().growth {
            // Memory for a single request is wherever its device reaches.
            Some(_) => Some(Span::covering(PhysAddr::new(0), u64::MAX - 1)),
            None => Some(Self::reach(self)),
        }
    }

    fn owns(&self, span: Span) -> bool {
        Self::owns(self, span)
    }

    fn max_len(&self, request: &SlotRequest) -> u64 {
        Self::max_len(self, request)
    }

    fn coherent_of(
        this: &Arc<Self>,
        request: &CoherentRequest,
    ) -> Result<CoherentFrames, NoCoherent> {
        let CoherentRequest { len, granule, align, last, .. } = *request;
        let granule = granule.max(align);
        let request = SlotRequest { granule, last: last.get(), ..SlotRequest::default() };
        let lease = this.lease(len, &request).map_err(|error| NoCoherent {
            why: match error {
                swiotlb::Error::Full { .. } => "the pool has no run of free slots that fits",
                swiotlb::Error::TooLong { .. } => "the pool has no run of slots that long",
                swiotlb::Error::Unreachable { .. } => "the pool has no slot that low",
                _ => "the pool has no slots so aligned",
            },
        })?;
        CoherentFrames::leased(lease).ok_or(NoCoherent { why: "the pool's memory has no pointers" })
    }

    fn granules(&self, granule: u64) -> u64 {
        // What shares a slot is one holder's.
        let unit = granule.max(self.config().slot_bytes);
        let whole = |span: &Span| {
            let (first, last) = (span.paddr().get().div_ceil(unit), span.last().get());
            let behind = last / unit + u64::from(last % unit == unit - 1);
            behind.saturating_sub(first)
        };
        self.memory().spans().iter().map(whole).sum()
    }
}

/// One pool of several devices, or one that its owner looks at.
#[expect(unsafe_code, reason = "the pool promises")]
// SAFETY: everything is done by the pool, which promised.
unsafe impl<B: BouncePool> BouncePool for Arc<B> {
    type Slot = B::Slot;

    #[inline(always)]
    fn take(&self, original: Original, request: &SlotRequest) -> Option<B::Slot> {
        (**self).take(original, request)
    }

    fn take_all(
        &self,
        originals: impl Iterator<Item = Original>,
        request: &SlotRequest,
        slots: &mut Vec<B::Slot>,
    ) -> bool {
        (**self).take_all(originals, request, slots)
    }

    #[inline(always)]
    fn release(&self, slot: B::Slot) {
        (**self).release(slot);
    }

    fn quarantine(&self, slot: B::Slot) {
        (**self).quarantine(slot);
    }

    #[inline(always)]
    fn span(&self, slot: &B::Slot) -> Span {
        (**self).span(slot)
    }

    #[inline(always)]
    fn copy(&self, slot: &B::Slot, offset: u64, len: u64, to: To) {
        (**self).copy(slot, offset, len, to);
    }

    fn reach(&self) -> Option<Span> {
        (**self).reach()
    }

    fn owns(&self, span: Span) -> bool {
        (**self).owns(span)
    }

    fn max_len(&self, request: &SlotRequest) -> u64 {
        (**self).max_len(request)
    }

    fn coherent(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        B::coherent_of(self, request)
    }

    fn granules(&self, granule: u64) -> u64 {
        (**self).granules(granule)
    }
}

/// No pool: nothing is bounced.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPool;

/// There is no slot without a pool.
#[derive(Clone, Copy, Debug)]
pub enum NoSlot {}

#[expect(unsafe_code, reason = "nothing is promised where there is no slot")]
// SAFETY: there are no slots.
unsafe impl BouncePool for NoPool {
    type Slot = NoSlot;

    fn take(&self, _original: Original, _request: &SlotRequest) -> Option<NoSlot> {
        None
    }

    fn release(&self, slot: NoSlot) {
        match slot {}
    }

    fn span(&self, slot: &NoSlot) -> Span {
        match *slot {}
    }

    fn copy(&self, slot: &NoSlot, _offset: u64, _len: u64, _to: To) {
        match *slot {}
    }

    fn reach(&self) -> Option<Span> {
        None
    }

    fn max_len(&self, _request: &SlotRequest) -> u64 {
        0
    }
}
