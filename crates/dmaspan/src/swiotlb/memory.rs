//! [`PoolMemory`] is what a pool is made of, and what copies to and from it.

use core::ptr::NonNull;

use crate::addr::{Address, PhysAddr};
use crate::promise::Promise;
use crate::span::Span;

/// Memory that a slot stands in for, with the promise that it may be copied.
///
/// It cannot be cloned: a slot keeps it until it is released.
#[derive(Debug, PartialEq, Eq)]
pub struct Original<A: Address = PhysAddr>(Span<A>);

impl<A: Address> Original<A> {
    /// The memory of `span`.
    ///
    /// # Safety
    ///
    /// Until the slot that is taken for it has been released or is lost for ever, the memory is
    /// neither freed nor given another use, and while a slot is filled, synced or ended no code
    /// holds a Rust reference to it that the copy would break. Code that accesses it at that moment
    /// does so as the copy does: by [`bytes`](crate::bytes), or by atomic bytes.
    #[expect(unsafe_code, reason = "the caller promises to keep the memory")]
    pub const unsafe fn new(span: Span<A>) -> Self {
        Self(span)
    }

    /// Memory that somebody promised in another way.
    #[inline(always)]
    pub(crate) const fn promised(span: Span<A>) -> Self {
        Self(span)
    }

    /// Returns where it is.
    #[inline(always)]
    pub const fn span(&self) -> Span<A> {
        self.0
    }
}

/// Says which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum To {
    /// From the original to the slot, for the device to read.
    Slot,
    /// From the slot to the original, for the CPU to read.
    Original,
}

/// Bytes to copy between a slot and what it stands in for.
///
/// The slot is held and the original was promised: the code that gets a transfer may rely on both.
#[derive(Debug)]
pub struct Transfer<A = PhysAddr> {
    slot: A,
    original: A,
    len: u64,
    to: To,
}

impl<A: Address> Transfer<A> {
    #[inline(always)]
    pub(super) const fn new(slot: A, original: A, len: u64, to: To) -> Self {
        Self { slot, original, len, to }
    }

    /// A transfer of another pool's slot.
    ///
    /// # Safety
    ///
    /// The bytes from `slot` on are of a slot that the caller holds, and those from `original` on
    /// of memory for which holds what [`Original::new`] asks for.
    #[expect(unsafe_code, reason = "the caller promises both sides")]
    pub const unsafe fn between(slot: A, original: A, len: u64, to: To) -> Self {
        Self::new(slot, original, len, to)
    }

    /// Returns where the first byte is read.
    #[inline(always)]
    pub const fn source(&self) -> A {
        match self.to {
            To::Slot => self.original,
            To::Original => self.slot,
        }
    }

    /// Returns where the first byte is written.
    #[inline(always)]
    pub const fn target(&self) -> A {
        match self.to {
            To::Slot => self.slot,
            To::Original => self.original,
        }
    }

    /// Returns how many bytes; at least one.
    #[inline(always)]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// A transfer is never empty: always `false`.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Returns which way they go.
    #[inline(always)]
    pub const fn to(&self) -> To {
        self.to
    }
}

/// Bytes of a slot that is held, on which the code that gets them may rely.
#[derive(Debug)]
pub struct InSlot<A: Address = PhysAddr>(Span<A>);

impl<A: Address> InSlot<A> {
    #[inline(always)]
    pub(super) const fn new(span: Span<A>) -> Self {
        Self(span)
    }

    /// Bytes of another pool's slot.
    ///
    /// # Safety
    ///
    /// They are of a slot that the caller holds.
    #[expect(unsafe_code, reason = "the caller promises to hold the slot")]
    pub const unsafe fn of(span: Span<A>) -> Self {
        Self(span)
    }

    /// Returns where they are.
    #[inline(always)]
    pub const fn span(&self) -> Span<A> {
        self.0
    }
}

/// Memory that was asked for by a pool that grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// How many bytes, neither more nor less: a multiple of the pool's slots.
    pub bytes: u64,
    /// The alignment of the first one: a power of two.
    pub align: u64,
    /// The last address that there may be.
    pub last: u64,
}

/// The host did not do as it was asked, and the state of the memory is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the host refused to change who sees the memory")]
pub struct HostRefused;

/// The memory of a pool, and who copies between it and originals.
///
/// A kernel implements it with its direct mapping, by [`PhysAddr`]s, a process with memory of its
/// own, by [`HostAddr`](crate::HostAddr)s.
///
/// # Safety
///
/// 1. What [`spans`](Self::spans) and [`allocate`](Self::allocate) give is memory that nobody else
///    uses, until it is [freed](Self::free) or the value is dropped: the first for the value's
///    life, disjoint, always the same. Devices may read and write it at any time.
/// 2. [`copy`](Self::copy), [`zero`](Self::zero), [`read`](Self::read) and [`write`](Self::write)
///    touch no memory but what they were told to. Several threads call them at once, also for the
///    same bytes of a slot or an original, or for some that overlap: each byte is accessed
///    atomically and by itself, as by the functions of [`bytes`](crate::bytes), so that no two
///    calls race.
/// 3. Addresses of the kind that [`Address`](Self::Address) names mean to it what they mean to all
///    that promise originals or give slots in the program: [`PhysAddr`]s, where memory is;
///    [`HostAddr`](crate::HostAddr)s, what the program's pointers are. Or it checks each address
///    that it is given, and panics where that is of no memory of its own; of such originals it says
///    [before](Self::can_copy) that there are no copies.
/// 4. While a slot is held, any thread can read and write its bytes at the
///    [pointer](Self::pointer) to it and behind that, beside those calls. It is aligned as the slot
///    is, up to 4096.
#[expect(
    unsafe_code,
    reason = "a contract about memory that devices write; nothing here is unsafe"
)]
pub unsafe trait PoolMemory: Send + Sync {
    /// What its addresses are, and those of the originals that it copies to and from: [`PhysAddr`],
    /// or in a process [`HostAddr`](crate::HostAddr). Devices of the DMA API have pools of the
    /// first:
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::dma::{Device, DeviceConfig, Direct, RawMemory};
    /// use dmaspan::swiotlb::{Pool, PoolMemory};
    /// use dmaspan::{PhysAddr, Platform};
    ///
    /// fn device<M, P>(direct: Arc<Direct<RawMemory, P>>, pool: Arc<Pool<M, P>>)
    /// where
    ///     M: PoolMemory<Address = PhysAddr> + 'static,
    ///     P: Platform + 'static,
    /// {
    ///     let _device = Device::new(direct, pool, DeviceConfig::bits(32));
    /// }
    /// ```
    ///
    /// Addresses of a process are none that hardware can be told:
    ///
    /// ```compile_fail,E0271
    /// use std::sync::Arc;
    ///
    /// use dmaspan::dma::{Device, DeviceConfig, Direct, RawMemory};
    /// use dmaspan::swiotlb::{Pool, PoolMemory};
    /// use dmaspan::{HostAddr, Platform};
    ///
    /// fn device<M, P>(direct: Arc<Direct<RawMemory, P>>, pool: Arc<Pool<M, P>>)
    /// where
    ///     M: PoolMemory<Address = HostAddr> + 'static,
    ///     P: Platform + 'static,
    /// {
    ///     let _device = Device::new(direct, pool, DeviceConfig::bits(32));
    /// }
    /// ```
    ///
    /// Nor does a pool copy to what is at the same number in another space:
    ///
    /// ```compile_fail,E0308
    /// use dmaspan::swiotlb::{Original, Pool, PoolMemory, SlotRequest};
    /// use dmaspan::{HostAddr, PhysAddr, Platform};
    ///
    /// fn take<M, P>(pool: &Pool<M, P>, original: Original<HostAddr>)
    /// where
    ///     M: PoolMemory<Address = PhysAddr> + 'static,
    ///     P: Platform,
    /// {
    ///     let _slot = pool.take(original, &SlotRequest::default());
    /// }
    /// ```
    type Address: Address;

    /// Returns what the pool begins with: one span, or one for each NUMA node, in the nodes' order.
    fn spans(&self) -> &[Span<Self::Address>];

    /// Returns whether all of an original can be copied to and from, which is asked before it gets
    /// a slot. Always, by default: by a memory that finds whatever is promised.
    #[inline(always)]
    fn can_copy(&self, _original: Span<Self::Address>) -> bool {
        true
    }

    /// Copies as told. A device and other threads may write what is read, and read and write what
    /// is written, at the same time.
    ///
    /// # Context
    ///
    /// This and the next three are called without a lock, also with interrupts off where mappings
    /// are made so.
    fn copy(&self, transfer: Transfer<Self::Address>);

    /// Writes zeros.
    fn zero(&self, bytes: InSlot<Self::Address>);

    /// Copies the bytes of a slot out; `into` is as long.
    fn read(&self, bytes: InSlot<Self::Address>, into: &mut [u8]);

    /// Copies bytes into a slot; `from` is as long.
    fn write(&self, bytes: InSlot<Self::Address>, from: &[u8]);

    /// Returns where the program reaches the bytes of a slot by a pointer, which coherent memory
    /// has to have; `None` where there is no such place, as by default.
    fn pointer(&self, bytes: InSlot<Self::Address>) -> Option<NonNull<u8>> {
        let _ = bytes;
        None
    }

    /// Memory for a pool that is too small, private as all memory is; `None` where there is none
    /// now, or never, as by default.
    ///
    /// # Context
    ///
    /// Called by [`Pool::grow`](super::Pool::grow), and where a pool may grow for single requests,
    /// wherever slots are taken.
    fn allocate(&self, room: Room) -> Option<Span<Self::Address>> {
        let _ = room;
        None
    }

    /// Takes memory back that [`allocate`](Self::allocate) gave: private again, and used by nobody,
    /// as the caller promises.
    ///
    /// # Context
    ///
    /// This, [`share`](Self::share) and [`unshare`](Self::unshare) are called without a lock: where
    /// `allocate` is, where slots for single requests are released, and where a pool is made,
    /// shrinks or is dropped.
    fn free(&self, _promise: Promise<'_>, span: Span<Self::Address>) {
        let _ = span;
    }

    /// Lets the host of a confidential guest see memory, and devices with it
    /// (`set_memory_decrypted`). What was in it is lost. Nothing, where all memory is seen anyway.
    /// The caller promises that the memory is the pool's, and has no slots yet.
    ///
    /// # Errors
    ///
    /// [`HostRefused`]: the memory is never used again.
    fn share(&self, _promise: Promise<'_>, span: Span<Self::Address>) -> Result<(), HostRefused> {
        let _ = span;
        Ok(())
    }

    /// Takes it out of the host's sight again (`set_memory_encrypted`). The caller promises that
    /// the memory was shared, and that no slot of it is held.
    ///
    /// # Errors
    ///
    /// As [`share`](Self::share).
    fn unshare(&self, _promise: Promise<'_>, span: Span<Self::Address>) -> Result<(), HostRefused> {
        let _ = span;
        Ok(())
    }

    /// A request found no slot, and there might be one after [`Pool::grow`](super::Pool::grow):
    /// to wake who calls that. Nothing, by default.
    fn pressed(&self) {}
}
