//! [`FrameWords`] is memory of a kernel's frames that is no table: a queue of hardware, say.

use alloc::sync::Arc;
use core::fmt;
use core::slice;
// Not loom's, which are no plain words.
use core::sync::atomic::{AtomicU64, Ordering};

use super::{FrameAlloc, FrameTables};
use crate::addr::PhysAddr;
use crate::io_pgtable::memory::TableShape;
use crate::lg2;
use crate::promise::Promise;

/// Frames that are one owner's, as words: memory that a driver and hardware read and write at the
/// same time. From [`FrameTables::words`]. Dropped, it is given back to the allocator.
///
/// # Invariant
///
/// The frames at `paddr` were allocated in this shape, and nobody else has them.
pub struct FrameWords<A: FrameAlloc> {
    tables: Arc<FrameTables<A>>,
    paddr: PhysAddr,
    shape: TableShape,
}

impl<A: FrameAlloc> FrameTables<A> {
    /// `2^lg2_size` bytes of the allocator's frames, zeroed and aligned to their size, the last of
    /// which is at `max_paddr` or below: for a structure of hardware. It takes a frame at least.
    /// `None` where there are none, or for more bytes than a process can address.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::Ordering;
    ///
    /// use dmaspan::PhysAddr;
    /// use dmaspan::io_pgtable::{FrameAlloc, FrameTables};
    ///
    /// fn ring<A: FrameAlloc>(tables: &Arc<FrameTables<A>>) -> Option<PhysAddr> {
    ///     let ring = tables.words(12, PhysAddr::new(u64::MAX))?;
    ///     ring.words()[7].store(1, Ordering::Release);
    ///     Some(ring.paddr()) // for a register of the hardware
    /// }
    /// ```
    pub fn words(self: &Arc<Self>, lg2_size: u32, max_paddr: PhysAddr) -> Option<FrameWords<A>> {
        if !(3..usize::BITS - 1).contains(&lg2_size) {
            return None;
        }
        let lg2_whole = lg2_size.max(A::FRAME_LG2);
        let shape = TableShape { lg2_size: lg2_whole, lg2_align: lg2_whole, max_paddr };
        let paddr = self.frames.allocate(shape)?;
        let words = FrameWords { tables: Arc::clone(self), paddr, shape };
        words.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
        Some(words)
    }
}

impl<A: FrameAlloc> FrameWords<A> {
    /// Returns where hardware finds it.
    pub fn paddr(&self) -> PhysAddr {
        self.paddr
    }

    /// Returns its memory, whole frames.
    #[inline]
    #[expect(unsafe_code, reason = "frames are found by the direct map")]
    pub fn words(&self) -> &[AtomicU64] {
        let start = self.tables.frames.pointer(self.paddr).cast::<AtomicU64>();
        let count = 1usize << (self.shape.lg2_size - 3);
        // SAFETY: the frames are this value's (its invariant) and not freed while it is borrowed:
        // so their words are mapped, initialised and aligned, as the allocator promises, and all
        // access to them is atomic.
        unsafe { slice::from_raw_parts(start.as_ptr(), count) }
    }
}

impl<A: FrameAlloc> Drop for FrameWords<A> {
    fn drop(&mut self) {
        self.tables.frames.free(Promise::kept(), self.paddr, self.shape);
    }
}

impl<A: FrameAlloc> fmt::Debug for FrameWords<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameWords")
            .field("paddr", &self.paddr)
            .field("bytes", &lg2::size(self.shape.lg2_size))
            .finish_non_exhaustive()
    }
}
