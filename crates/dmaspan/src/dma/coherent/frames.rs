//! [`CoherentFrames`] are memory that a device and the program use at the same time.
#![expect(unsafe_code, reason = "memory that devices write is read and written here")]

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::ptr::NonNull;
use core::{fmt, slice};

use super::memory::{CoherentMemory, CoherentRequest, Contiguity, NoCoherent};
use crate::addr::PhysAddr;
use crate::bytes::{self, Scalar};
use crate::dma::error::Error;
use crate::dma::memory::Piece;
use crate::io_pgtable::{FrameAlloc, TableShape};
use crate::platform::Platform;
use crate::promise::Promise;
use crate::prot::Coherency;
use crate::span::Span;
use crate::swiotlb::{Lease, PoolMemory};

/// Memory that a program and a device share, as
/// [`CoherentMemory`](super::memory::CoherentMemory) gives it.
///
/// Dropping it frees the memory. [`Device::free`](crate::dma::Device::free) drops it when no device
/// reaches it any more.
pub struct CoherentFrames {
    pub(super) bytes: SharedBytes,
    pieces: Pieces,
}

/// One piece takes no memory of its own.
enum Pieces {
    One(Piece),
    Many(Box<[Piece]>),
}

impl CoherentFrames {
    /// The memory of one span, which the program reaches at `start`. `owner` frees it when the last
    /// clone of it is dropped.
    ///
    /// # Safety
    ///
    /// 1. The bytes of the span can be read and written by any thread at `start` and behind it, and
    ///    are zeros.
    /// 2. The memory is the owner's alone until that is dropped, for ever where it never is: it is
    ///    neither freed nor given another use, whatever becomes of the
    ///    [`CoherentMemory`](super::memory::CoherentMemory).
    /// 3. A device may read and write it at any time, and threads of the program several at once:
    ///    no code holds a Rust reference to it but to atomic bytes, and other code of the program
    ///    that accesses it meanwhile does so by [`bytes`] or by such.
    pub unsafe fn new(start: NonNull<u8>, span: Span, owner: Arc<dyn Send + Sync>) -> Self {
        let bytes = SharedBytes { start, len: span.len(), owner };
        Self { bytes, pieces: Pieces::One(Piece::memory(span)) }
    }

    /// The memory of many spans, which the program reaches one behind the other at `start`.
    ///
    /// # Safety
    ///
    /// What [`new`](Self::new) asks for, of all of the spans.
    pub unsafe fn scattered(
        start: NonNull<u8>,
        spans: &[Span],
        owner: Arc<dyn Send + Sync>,
    ) -> Self {
        let len = spans.iter().map(|span| span.len()).fold(0, u64::saturating_add);
        let pieces = spans.iter().copied().map(Piece::memory).collect();
        Self { bytes: SharedBytes { start, len, owner }, pieces: Pieces::Many(pieces) }
    }

    /// The memory of a lease, which goes back to its pool when this is dropped; `None` where the
    /// pool's memory has no pointer.
    pub(in crate::dma) fn leased<M, P>(lease: Lease<M, P>) -> Option<Self>
    where
        M: PoolMemory<Address = PhysAddr> + 'static,
        P: Platform + 'static,
    {
        // A lease keeps zeroed memory of its own, and `PoolMemory` promises what the pointer is.
        let (start, span) = (lease.as_ptr()?, lease.span());
        let bytes = SharedBytes { start, len: span.len(), owner: Arc::new(lease) };
        Some(Self { bytes, pieces: Pieces::One(Piece::memory(span)) })
    }

    /// Returns where the program reaches the first byte.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.bytes.start
    }

    /// Returns where the memory is, in the order of its bytes.
    pub fn pieces(&self) -> &[Piece] {
        match &self.pieces {
            Pieces::One(piece) => slice::from_ref(piece),
            Pieces::Many(pieces) => pieces,
        }
    }

    /// Whether they are what was asked for.
    pub(super) fn check(&self, request: &CoherentRequest) -> Result<(), NoCoherent> {
        let CoherentRequest { len, granule, align, last, contiguity, .. } = *request;
        let pieces = self.pieces();
        let is_one = contiguity == Contiguity::AnySpans || pieces.len() == 1;
        let first = pieces.first().map_or(1, |piece| piece.span.paddr().get());
        let fits = |piece: &Piece| {
            let ends = piece.span.paddr().get() | piece.span.len();
            ends & (granule - 1) == 0 && piece.span.last() <= last
        };
        let is_whole = self.bytes.len == len && pieces.iter().all(fits);
        // The pointer is aligned as the device's address is, up to a page.
        let low_bits = usize::try_from(CoherentRequest::GRANULE - 1).unwrap_or(0);
        let is_at_page = self.bytes.start.addr().get() & low_bits == 0;
        if is_one && is_whole && is_at_page && first & (align - 1) == 0 {
            return Ok(());
        }
        Err(NoCoherent { why: "other memory was given than was asked for" })
    }
}

/// Coherent memory of a kernel, over the [allocator of frames](FrameAlloc) that its page tables
/// have too.
///
/// Each allocation takes contiguous frames, a power of two of them. There is none for a device that
/// does not see the CPU's caches, since the direct map is cached.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::dma::{Device, Error, FrameMemory};
/// use dmaspan::io_pgtable::FrameAlloc;
///
/// /// A device whose rings are of the kernel's frames.
/// fn device<A: FrameAlloc + 'static>(device: Device, frames: &Arc<A>) -> Result<Device, Error> {
///     let device = device.with_coherent(Arc::new(FrameMemory::new(Arc::clone(frames))));
///     let ring = device.alloc(256 * 16, 4096)?;
///     device.free(ring)?;
///     Ok(device)
/// }
/// ```
#[derive(Clone, Debug)]
pub struct FrameMemory<A> {
    frames: A,
}

impl<A: FrameAlloc + Clone + 'static> FrameMemory<A> {
    /// Memory of `frames`, of which what is allocated keeps a clone: a `&'static` or an [`Arc`].
    pub fn new(frames: A) -> Self {
        Self { frames }
    }
}

impl<A: FrameAlloc + Clone + 'static> CoherentMemory for FrameMemory<A> {
    fn allocate(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        let CoherentRequest { len, align, granule, last, coherency, .. } = *request;
        if coherency == Coherency::NonCoherent {
            return Err(NoCoherent { why: "the kernel's direct map is cached" });
        }
        let least = |bytes: u64| bytes.checked_next_power_of_two().map(u64::ilog2);
        let none = NoCoherent { why: "the kernel has no such frames free" };
        let lg2_size = least(len).ok_or(none)?.max(A::FRAME_LG2);
        let lg2_align = least(align.max(granule)).ok_or(none)?.max(A::FRAME_LG2);
        let shape = TableShape { lg2_size, lg2_align, max_paddr: last };
        let frames = self.frames.clone();
        let first = frames.allocate(shape).ok_or(none)?;
        let start = frames.pointer(first);
        let owner = Arc::new(Allocated { frames, first, shape });
        let span = Span::new(first, len).map_err(|_| none)?;
        let mut bytes = SharedBytes { start, len, owner };
        bytes.zero();
        Ok(CoherentFrames { bytes, pieces: Pieces::One(Piece::memory(span)) })
    }
}

/// Frames that go back to a kernel's allocator.
struct Allocated<A: FrameAlloc> {
    frames: A,
    first: PhysAddr,
    shape: TableShape,
}

impl<A: FrameAlloc> Drop for Allocated<A> {
    fn drop(&mut self) {
        // They are not a table's, and whoever had them has dropped them.
        self.frames.free(Promise::kept(), self.first, self.shape);
    }
}

impl fmt::Debug for CoherentFrames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoherentFrames")
            .field("start", &self.bytes.start)
            .field("pieces", &self.pieces())
            .finish()
    }
}

/// Bytes that the program reads and writes, and a device at the same time. They are nobody else's
/// in the program, and are freed when all parts that they were [split](Self::split_off) into are
/// dropped.
pub(super) struct SharedBytes {
    /// Of so many bytes that the owner keeps, which no other value has.
    start: NonNull<u8>,
    len: u64,
    owner: Arc<dyn Send + Sync>,
}

// SAFETY: whoever made it promised that any thread may use the memory, and the owner is `Send`.
unsafe impl Send for SharedBytes {}
// SAFETY: whatever writes the memory, others of the program may be reading and writing it: a bounce
// pool, for a device that has this mapped, too. All accesses are those of `bytes`, which any
// threads make at once.
unsafe impl Sync for SharedBytes {}

impl SharedBytes {
    /// Returns where the first byte is.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns how many there are.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Leaves out all but the first `len` bytes: nobody has the others any more.
    pub(super) fn truncate(&mut self, len: u64) {
        self.len = self.len.min(len);
    }

    /// Takes the bytes from `at` on away from these; `None` where there are none.
    pub(super) fn split_off(&mut self, at: u64) -> Option<Self> {
        let len = self.len.checked_sub(at).filter(|len| *len > 0)?;
        let start = self.place(at, len, 1)?;
        self.len = at;
        Some(Self { start, len, owner: Arc::clone(&self.owner) })
    }

    /// Where `len` bytes at an offset begin; `None` where they are not within these, or not at a
    /// multiple of `align`.
    #[inline]
    fn place(&self, offset: u64, len: u64, align: u64) -> Option<NonNull<u8>> {
        let is_within = offset.checked_add(len).is_some_and(|end| end <= self.len);
        // As many bytes as there are in memory have a `usize`.
        let offset = usize::try_from(offset).ok().filter(|_| is_within)?;
        // SAFETY: it is an offset within the memory, or directly behind it.
        let at = unsafe { self.start.add(offset) };
        let low_bits = usize::try_from(align - 1).ok()?;
        (at.addr().get() & low_bits == 0).then_some(at)
    }

    /// Where a number is at an offset.
    #[inline]
    fn number<S: Scalar>(&self, offset: u64) -> Result<NonNull<S>, Error> {
        let len = const { size_of::<S>() as u64 };
        match self.place(offset, len, len) {
            Some(at) => Ok(at.cast()),
            None => Err(self.refuse(offset, len)),
        }
    }

    /// Why there is no number.
    #[cold]
    fn refuse(&self, offset: u64, len: u64) -> Error {
        match self.place(offset, len, 1) {
            Some(_) => Error::Unaligned { offset, len },
            None => Error::OutsideMapping { offset, len, mapped: self.len },
        }
    }

    /// Reads a number by one access.
    #[inline]
    pub(super) fn read<S: Scalar>(&self, offset: u64) -> Result<S, Error> {
        let at = self.number(offset)?;
        // SAFETY: it is aligned and within the memory, which the owner keeps and to which nobody
        // has a reference.
        Ok(unsafe { bytes::load(at.as_ptr()) })
    }

    /// Writes a number by one access.
    #[inline]
    pub(super) fn write<S: Scalar>(&mut self, offset: u64, value: S) -> Result<(), Error> {
        let at = self.number(offset)?;
        // SAFETY: as for `read`.
        unsafe { bytes::store(at.as_ptr(), value) };
        Ok(())
    }

    /// Copies bytes out.
    pub(super) fn read_bytes(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let from = self.part(offset, into.len())?;
        // SAFETY: as many bytes are within the memory, as for `read`.
        unsafe { bytes::read(from.as_ptr(), into) };
        Ok(())
    }

    /// Copies bytes in.
    pub(super) fn write_bytes(&mut self, offset: u64, from: &[u8]) -> Result<(), Error> {
        let to = self.part(offset, from.len())?;
        // SAFETY: as many bytes are within the memory, as for `read`.
        unsafe { bytes::write(from, to.as_ptr()) };
        Ok(())
    }

    /// Writes zeros all over.
    pub(super) fn zero(&mut self) {
        // As many bytes as there are in memory have a `usize`.
        let len = usize::try_from(self.len).unwrap_or(0);
        // SAFETY: all of them are the memory, as for `read`.
        unsafe { bytes::clear(self.start.as_ptr(), len) };
    }

    /// Where `len` bytes at an offset begin, all within these.
    fn part(&self, offset: u64, len: usize) -> Result<NonNull<u8>, Error> {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        self.place(offset, len, 1).ok_or_else(|| self.refuse(offset, len))
    }
}
