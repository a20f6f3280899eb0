//! Memory that stands in for what a device cannot use.

use core::fmt;

use crate::span::Span;

/// What a bounce slot has to be like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRequest {
    /// The memory that it stands in for: any bytes.
    pub original: Span,
    /// Low bits of addresses that are the same in the slot as in the original.
    pub keep_bits: u64,
    /// The slot's whole granules of so many bytes (a power of two) are nobody else's, and what of
    /// them is not the original's is zero. 1 where that does not matter.
    pub granule: u64,
    /// The last address that the device can use.
    pub last: u64,
    /// No slot crosses a multiple of this power of two; `None` where that does not matter.
    pub boundary: Option<u64>,
}

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum To {
    /// From the original to the slot, for the device to read.
    Slot,
    /// From the slot to the original, for the CPU to read.
    Original,
}

/// Gives slots of memory that devices reach, and copies.
///
/// Here with a pool of simulated memory, and a device that reaches half of the memory:
///
/// ```
/// # use std::sync::Arc;
/// use dmaspan::dma::{Device, DeviceConfig, Direct, Piece, RawMemory};
/// # use dmaspan::{Direction, PhysAddr, Platform, Span};
/// # use dmaspan_sim::bounce::SimPool;
/// # use dmaspan_sim::memory::SimMemory;
/// # struct OneThread;
/// # impl Platform for OneThread {
/// #     type Lock = parking_lot::RawMutex;
/// #     fn cpu(&self) -> usize { 0 }
/// #     fn now(&self) -> u64 { 0 }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let span = |addr, len| Span::new(PhysAddr::new(addr), len);
/// let ram = span(0xfff0_0000, 2 << 20)?;
/// let memory = Arc::new(SimMemory::new(ram.paddr(), ram.len(), 12)?);
/// let pool = SimPool::new(Arc::clone(&memory), span(0xfff0_0000, 0x1_0000)?)?;
/// let direct = Arc::new(Direct::<RawMemory, _>::new(ram, OneThread));
/// let device = Device::new(direct, pool, DeviceConfig::bits(32))?;
/// let buffer = span(0x1_0000_1200, 1500)?;
/// # memory.allocate_at(span(0x1_0000_1000, 0x1000)?)?;
/// // SAFETY: the frame is this program's, and nobody else touches it.
/// let raw = unsafe { RawMemory::new(Piece::memory(buffer)) };
/// let mapping = device.map_single(raw, Direction::FromDevice).map_err(|r| r.error)?;
/// assert!(mapping.is_bounced() && mapping.addr().get() < 1 << 32);
/// let _unmapped = device.unmap(mapping).map_err(|failed| failed.error)?;
/// # Ok(())
/// # }
/// ```
///
/// # Safety
///
/// 1. The memory of a slot is the holder's alone until the slot is dropped, and devices may read
///    and write it at any time, padding to the granule asked for included.
/// 2. [`copy`](Self::copy) touches no memory but the slot's and the original's.
#[expect(
    unsafe_code,
    reason = "a contract about memory that devices write; nothing here is unsafe"
)]
pub unsafe trait BouncePool: Send + Sync {
    /// A slot; gives itself back when it is dropped.
    type Slot: Send + fmt::Debug;

    /// A slot for a piece of memory, whose padding is zeroed; nothing is copied yet. `None` where
    /// there is none now, or where no slot can be so.
    ///
    /// # Context
    ///
    /// Like a slot's drop, may run with interrupts off where mappings are made so.
    fn take(&self, request: SlotRequest) -> Option<Self::Slot>;

    /// Where the slot's bytes are: as long as the original.
    fn span(&self, slot: &Self::Slot) -> Span;

    /// Copies `len` bytes at `offset`, which are within the slot.
    fn copy(&self, slot: &Self::Slot, offset: u64, len: u64, to: To);

    /// From the lowest to the highest address that a slot may have; `None` where there is none at
    /// all.
    fn reach(&self) -> Option<Span>;

    /// How long a slot can be that has `keep_bits` of the address of its original, in bytes.
    fn max_len(&self, keep_bits: u64) -> u64;
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

    fn take(&self, _request: SlotRequest) -> Option<NoSlot> {
        None
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

    fn max_len(&self, _keep_bits: u64) -> u64 {
        0
    }
}
