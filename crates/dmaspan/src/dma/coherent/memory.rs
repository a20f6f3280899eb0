//! [`CoherentMemory`] supplies memory that a program and a device use at the same time.

use super::frames::CoherentFrames;
use crate::addr::PhysAddr;
use crate::prot::Coherency;

/// What a device needs of coherent memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoherentRequest {
    /// How many bytes, neither more nor less: a positive multiple of `granule`.
    pub len: u64,
    /// Each span begins on a multiple of it and has a multiple of its bytes: a power of two of at
    /// least [`GRANULE`](Self::GRANULE).
    pub granule: u64,
    /// The first span begins on a multiple of it: a power of two of at least `granule`.
    pub align: u64,
    /// The last address that any byte may have.
    pub last: PhysAddr,
    /// Whether there may be several spans.
    pub contiguity: Contiguity,
    /// Whether the device sees the CPU's caches. Where it does not, the program's pointer is to a
    /// mapping that is not cached, and no cache has a line of the memory any more (Linux's
    /// `pgprot_dmacoherent`); or the request is refused.
    pub coherency: Coherency,
}

impl CoherentRequest {
    /// The least granule in bytes.
    pub const GRANULE: u64 = 0x1000;
}

/// Whether memory has to be one span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contiguity {
    /// It has: nothing translates the addresses of the device.
    OneSpan,
    /// An IOMMU makes any number of spans one range for the device. For the program, too, they are
    /// one: its pointer leads from each span to the next.
    AnySpans,
}

/// The reason why there is no coherent memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct NoCoherent {
    /// What is missing, as a clause: "no huge page is free".
    pub why: &'static str,
}

/// Where the memory comes from that [`Device::alloc`](crate::dma::Device::alloc) gives: a kernel's
/// frame allocator, a process's pinned memory, or the pool of a device that
/// [bounces all](crate::dma::Bounce::Always). A device gets it by
/// [`Device::with_coherent`](crate::dma::Device::with_coherent).
///
/// An implementer promises nothing but by [`CoherentFrames::new`], among that: several threads and
/// devices access the same bytes at once, all of them by [`bytes`](crate::bytes). A kernel with a
/// direct map:
///
/// ```
/// use std::ptr::NonNull;
/// use std::sync::Arc;
///
/// use dmaspan::dma::{CoherentFrames, CoherentMemory, CoherentRequest, NoCoherent};
/// use dmaspan::{Coherency, PhysAddr, Span};
///
/// /// The kernel's frame allocator.
/// struct Frames;
///
/// impl Frames {
///     fn take(&self, len: u64, align: u64, last: PhysAddr) -> Option<PhysAddr> {
///         let _ = (len, align, last);
///         None
///     }
///     fn give(&self, at: PhysAddr, len: u64) {
///         let _ = (at, len);
///     }
///     /// Where the direct map has it, after it was zeroed.
///     fn zeroed(&self, at: PhysAddr, len: u64) -> NonNull<u8> {
///         let _ = (at, len);
///         NonNull::dangling()
///     }
/// }
///
/// /// Frees them.
/// struct Owner(Arc<Frames>, Span);
///
/// impl Drop for Owner {
///     fn drop(&mut self) {
///         self.0.give(self.1.paddr(), self.1.len());
///     }
/// }
///
/// struct Kernel(Arc<Frames>);
///
/// impl CoherentMemory for Kernel {
///     fn allocate(&self, wish: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
///         if wish.coherency == Coherency::NonCoherent {
///             return Err(NoCoherent { why: "the direct map is cached" });
///         }
///         let taken = self.0.take(wish.len, wish.align, wish.last);
///         let at = taken.ok_or(NoCoherent { why: "no such frames are free" })?;
///         let start = self.0.zeroed(at, wish.len);
///         let span = Span::new(at, wish.len).map_err(|_| NoCoherent { why: "no bytes" })?;
///         let owner = Arc::new(Owner(Arc::clone(&self.0), span));
///         // SAFETY: the direct map has the frames, which are the owner's until it is dropped.
///         Ok(unsafe { CoherentFrames::new(start, span, owner) })
///     }
/// }
/// ```
pub trait CoherentMemory: Send + Sync {
    /// Memory as `request` says, zeroed. It may be contiguous also where it need not be.
    ///
    /// # Errors
    ///
    /// [`NoCoherent`], with nothing changed.
    ///
    /// # Context
    ///
    /// May allocate and wait, as [`Device::alloc`](crate::dma::Device::alloc) may; so may dropping
    /// the frames.
    fn allocate(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent>;
}
