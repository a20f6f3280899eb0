//! [`FrameBounce`] is a bounce pool's memory in a kernel, of the frames that its page tables have.
#![expect(unsafe_code, reason = "memory that devices and other threads write is copied here")]

use alloc::vec::Vec;
use core::fmt;
use core::ptr::NonNull;

use crate::addr::PhysAddr;
use crate::bytes;
use crate::io_pgtable::{FrameAlloc, TableShape};
use crate::lg2;
use crate::promise::Promise;
use crate::span::Span;
use crate::swiotlb::{Error, InSlot, PoolMemory, Room, Transfer};

/// What a kernel's bounce [`Pool`](crate::swiotlb::Pool) is made of: frames of the
/// [allocator](FrameAlloc) that its page tables have too, by whose direct map slots are copied.
///
/// Originals are any memory that the direct map has. A pool that may grow takes frames for that as
/// well, a power of two of them each time. All frames go back to the allocator when the pool is
/// dropped, unless slots of it are out: then a device may use them, and they leak with the pool.
///
/// Nothing is done to show the memory to the host of a confidential guest.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::dma::{AnyMemory, Device, DeviceConfig, DmaDomain, FrameBounce, Trust};
/// use dmaspan::io_pgtable::{Format, FrameAlloc, FrameTables};
/// use dmaspan::iommu::IommuOps;
/// use dmaspan::swiotlb::{Pool, PoolConfig};
/// use dmaspan::{PhysAddr, Platform};
///
/// /// A device that sees whole pages only, though it is to see no more than its buffers: the pages
/// /// that a buffer shares with other memory are bounced.
/// fn untrusted<F: Format, A: FrameAlloc + 'static, O: IommuOps + 'static, P: Platform + 'static>(
///     domain: Arc<DmaDomain<F, Arc<FrameTables<Arc<A>>>, O, P, AnyMemory>>,
///     frames: &Arc<A>,
///     platform: P,
/// ) -> Result<Device, Box<dyn std::error::Error>> {
///     let slots = FrameBounce::new(Arc::clone(frames), 1 << 20, PhysAddr::new(u64::MAX))?;
///     let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), platform)?);
///     let config = DeviceConfig { trust: Trust::Untrusted, ..DeviceConfig::bits(32) };
///     Ok(Device::erased(domain, pool, config)?)
/// }
/// ```
pub struct FrameBounce<A: FrameAlloc> {
    frames: A,
    /// Each was allocated at once: a power of two of frames.
    spans: Vec<Span>,
}

impl<A: FrameAlloc> FrameBounce<A> {
    /// Memory of `len` bytes, rounded up to whole frames, the last of which is at `last` or below.
    ///
    /// It is in as few pieces as the allocator has, and a slot lies within one. A pool of no bytes
    /// is refused when it is [made](crate::swiotlb::Pool::new).
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] where there are no such frames, or where the heap has no room for a list
    /// of them. All are given back then.
    pub fn new(frames: A, len: u64, last: PhysAddr) -> Result<Self, Error> {
        let none = Error::NoMemory { bytes: len };
        let mut left = lg2::align_up(len, A::FRAME_LG2).ok_or(none)?;
        let mut memory = Self { frames, spans: Vec::new() };
        let mut most = u32::MAX;
        while left > 0 {
            let lg2 = lg2::floor(left).min(most);
            memory.spans.try_reserve(1).map_err(|_| none)?;
            match memory.take(lg2, last) {
                Some(first) => {
                    memory.spans.push(Span::covering(first, lg2::mask(lg2)));
                    left -= lg2::size(lg2);
                }
                None if lg2 > A::FRAME_LG2 => most = lg2 - 1,
                None => return Err(none),
            }
        }
        Ok(memory)
    }

    /// The allocator.
    pub fn frames(&self) -> &A {
        &self.frames
    }

    fn take(&self, lg2: u32, max_paddr: PhysAddr) -> Option<PhysAddr> {
        self.frames.allocate(TableShape { lg2_size: lg2, lg2_align: lg2, max_paddr })
    }

    /// Gives back what was allocated for a span, which nobody uses any more.
    fn give_back(&self, span: Span) {
        let lg2 = frames_lg2::<A>(span.len());
        let shape =
            TableShape { lg2_size: lg2, lg2_align: lg2, max_paddr: PhysAddr::new(u64::MAX) };
        self.frames.free(Promise::kept(), span.paddr(), shape);
    }

    /// Where the CPU finds the byte at `at`, and how many there are from there to the end of its
    /// frame.
    #[inline]
    fn place(&self, at: PhysAddr) -> (*mut u8, u64) {
        let offset = at.get() & lg2::mask(A::FRAME_LG2);
        let frame = self.frames.pointer(PhysAddr::new(at.get() - offset));
        // A frame is in memory.
        let byte = frame.as_ptr().wrapping_add(usize::try_from(offset).unwrap_or(0));
        (byte, lg2::size(A::FRAME_LG2) - offset)
    }

    /// Calls `with` with each frame's part of a slot: its first byte, which one of the slot's that
    /// is, and how many there are.
    #[inline]
    fn each(&self, span: Span, mut with: impl FnMut(*mut u8, usize, usize)) {
        let mut done = 0;
        while done < span.len() {
            let (start, len) = self.place(span.paddr().wrapping_add(done));
            let len = len.min(span.len() - done);
            with(start, number(done), number(len));
            done += len;
        }
    }
}

/// log2 of how many bytes of frames are allocated for so many.
fn frames_lg2<A: FrameAlloc>(bytes: u64) -> u32 {
    // No power of two is as large: no frames are.
    bytes.checked_next_power_of_two().map_or(u64::BITS - 1, u64::ilog2).max(A::FRAME_LG2)
}

/// The same number: what is in memory has a `usize`.
#[inline]
fn number(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

// SAFETY:
// 1. `spans` and `allocate` give frames that the allocator gave and nobody else has, until `free`
//    or the drop gives them back. Devices may write them, and other threads.
// 2. The copies touch what a transfer or a slot says, frame by frame, by the accesses of `bytes`.
// 3. The allocator's direct map leads to the memory at a physical address, or panics (its third
//    promise).
// 4. A slot is within what was allocated at once, which is one piece of memory behind its pointer
//    (the second promise); that has the low bits of the address.
unsafe impl<A: FrameAlloc> PoolMemory for FrameBounce<A> {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.spans
    }

    #[inline]
    fn copy(&self, transfer: Transfer) {
        let mut done = 0;
        while done < transfer.len() {
            let (from, readable) = self.place(transfer.source().wrapping_add(done));
            let (to, writable) = self.place(transfer.target().wrapping_add(done));
            let len = (transfer.len() - done).min(readable).min(writable);
            // SAFETY: one side is of a slot that is held, the other of an original that was
            // promised, and both are in one frame each, to which the direct map leads: so they can
            // be read and written, and no reference forbids it.
            unsafe { bytes::copy(from, to, number(len)) };
            done += len;
        }
    }

    #[inline]
    fn zero(&self, slot: InSlot) {
        self.each(slot.span(), |start, _, len| {
            // SAFETY: they are of a slot that is held, in one frame, to which the direct map leads.
            unsafe { bytes::clear(start, len) };
        });
    }

    #[inline]
    fn read(&self, slot: InSlot, into: &mut [u8]) {
        self.each(slot.span(), |start, at, len| {
            let Some(into) = into.get_mut(at..).and_then(|rest| rest.get_mut(..len)) else {
                return;
            };
            // SAFETY: those read are of a slot that is held, as above.
            unsafe { bytes::read(start, into) };
        });
    }

    #[inline]
    fn write(&self, slot: InSlot, from: &[u8]) {
        self.each(slot.span(), |start, at, len| {
            let Some(from) = from.get(at..).and_then(|rest| rest.get(..len)) else { return };
            // SAFETY: those written are of a slot that is held, as above.
            unsafe { bytes::write(from, start) };
        });
    }

    fn pointer(&self, bytes: InSlot) -> Option<NonNull<u8>> {
        NonNull::new(self.place(bytes.span().paddr()).0)
    }

    /// Whole frames, a power of two of them.
    fn allocate(&self, room: Room) -> Option<Span> {
        let lg2 = frames_lg2::<A>(room.bytes);
        if room.bytes == 0 || room.align > lg2::size(lg2) {
            return None;
        }
        Some(Span::covering(self.take(lg2, PhysAddr::new(room.last))?, room.bytes - 1))
    }

    fn free(&self, _promise: Promise<'_>, span: Span) {
        self.give_back(span);
    }
}

impl<A: FrameAlloc> Drop for FrameBounce<A> {
    fn drop(&mut self) {
        self.spans.iter().for_each(|&span| self.give_back(span));
    }
}

impl<A: FrameAlloc> fmt::Debug for FrameBounce<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameBounce").field("spans", &self.spans).finish_non_exhaustive()
    }
}
