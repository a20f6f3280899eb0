//! [`DmaMemory`] is the memory of a buffer: a mapping owns it for as long as a device may use it.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::slice;

use crate::addr::PhysAddr;
use crate::platform::Platform;
use crate::regbuf::Buffer;
use crate::span::Span;
use crate::swiotlb::{Lease, PoolMemory};

/// Says how a device comes to a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
// A word, so that a piece has no padding, whose bytes would be moved one by one.
#[repr(usize)]
pub enum Via {
    /// It is memory.
    Memory,
    /// It is registers or memory of another device that are reached through the host bridge, as
    /// memory is: translated, and never bounced.
    HostBridge,
    /// It is of another device and reached below the host bridge: the span is of addresses on
    /// their common bus, which are passed through.
    Bus,
}

/// Contiguous memory and the way to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Where it is; any bytes.
    pub span: Span,
    /// How a device comes to it.
    pub via: Via,
}

impl Piece {
    /// A piece of memory.
    pub const fn memory(span: Span) -> Self {
        Self { span, via: Via::Memory }
    }
}

/// Memory that may be mapped for devices: a proof that letting them at it harms nobody.
///
/// A mapping owns it until no device reaches it any more; a mapping that is dropped leaks it. So
/// it borrows nothing: what it borrowed would end while a device still uses it.
///
/// # Safety
///
/// While the value exists, also after it has been moved,
///
/// 1. [`pieces`](Self::pieces) gives the same pieces, and they stay the value's: neither freed nor
///    given another use; and
/// 2. a device may read and write all of them at any time: no code holds a Rust reference to them
///    that this would break. So may a bounce pool while they are mapped, synced or unmapped, on
///    several threads at once: code that accesses them at that moment does so by
///    [`bytes`](crate::bytes), or by atomic bytes.
#[expect(
    unsafe_code,
    reason = "a contract about memory that devices write; nothing here is unsafe"
)]
pub unsafe trait DmaMemory: Send + 'static {
    /// Returns where the memory is, in the order of its bytes.
    fn pieces(&self) -> &[Piece];
}

/// A piece of memory that somebody promised to keep.
///
/// ```
/// use dmaspan::dma::{Piece, RawMemory};
/// use dmaspan::{PhysAddr, Span};
///
/// let piece = Piece::memory(Span::new(PhysAddr::new(0x8000_0000), 1500)?);
/// // SAFETY: this driver owns the frame and frees it only after the mapping has given it back.
/// let memory = unsafe { RawMemory::new(piece) };
/// assert_eq!(memory.piece(), piece);
/// Ok::<(), dmaspan::RangeError>(())
/// ```
#[derive(Debug, PartialEq, Eq)]
pub struct RawMemory(Piece);

impl RawMemory {
    /// The piece, as memory that may be mapped.
    ///
    /// # Safety
    ///
    /// While the value exists, what [`DmaMemory`] asks for holds for the piece. Where the value is
    /// leaked, that is for ever.
    #[expect(unsafe_code, reason = "the caller promises to keep the memory")]
    pub const unsafe fn new(piece: Piece) -> Self {
        Self(piece)
    }

    /// The piece.
    pub const fn piece(&self) -> Piece {
        self.0
    }
}

#[expect(unsafe_code, reason = "whoever made it promised")]
// SAFETY: `RawMemory::new` asks for exactly this.
unsafe impl DmaMemory for RawMemory {
    #[inline(always)]
    fn pieces(&self) -> &[Piece] {
        slice::from_ref(&self.0)
    }
}

/// Memory of a bounce pool that a driver keeps and uses again and again: a ring, or a buffer that
/// it copies to and from itself. Mapped once, it is not bounced: but for a device that does not
/// reach it, and one that is not trusted if the lease is not of whole granules.
///
/// ```no_run
/// use std::error::Error;
/// use std::sync::Arc;
///
/// use dmaspan::dma::{Bounce, Device, DeviceConfig, Direct, Leased};
/// use dmaspan::swiotlb::{Pool, PoolConfig, SlotRequest};
/// use dmaspan::{Direction, PhysAddr};
/// use dmaspan_linux::UserPlatform;
/// use dmaspan_linux::physical::PhysicalMemory;
///
/// fn main() -> Result<(), Box<dyn Error>> {
///     let memory = PhysicalMemory::new()?;
///     let slots = memory.bounce(1 << 20, PhysAddr::new(u64::MAX))?;
///     let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), UserPlatform)?);
///     let direct = Arc::new(Direct::new(memory.extent()?, UserPlatform));
///     // A device of a confidential guest.
///     let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(40) };
///     let device = Device::new(direct, Arc::clone(&pool), config)?;
///
///     let ring = Arc::new(Leased::new(pool.lease(0x1000, &SlotRequest::default())?));
///     let mapping = device.map_single(Arc::clone(&ring), Direction::Bidirectional)?;
///     assert!(!mapping.is_bounced());
///     ring.lease().write(0, b"a descriptor")?;
///     let _unmapped = device.unmap(mapping)?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct Leased<M: PoolMemory<Address = PhysAddr>, P: Platform> {
    lease: Lease<M, P>,
    piece: Piece,
}

impl<M: PoolMemory<Address = PhysAddr>, P: Platform> Leased<M, P> {
    /// The memory of a lease.
    pub fn new(lease: Lease<M, P>) -> Self {
        let piece = Piece::memory(lease.span());
        Self { lease, piece }
    }

    /// The lease, to read and write it.
    pub fn lease(&self) -> &Lease<M, P> {
        &self.lease
    }
}

#[expect(unsafe_code, reason = "the pool's memory promises")]
// SAFETY: the slot is the lease's until that is dropped, and stays where it is; devices may read
// and write a pool's memory at any time, and it is only reached through `PoolMemory`.
unsafe impl<M, P> DmaMemory for Leased<M, P>
where
    M: PoolMemory<Address = PhysAddr> + 'static,
    P: Platform + 'static,
{
    #[inline(always)]
    fn pieces(&self) -> &[Piece] {
        slice::from_ref(&self.piece)
    }
}

/// A registered buffer that is mapped, as a domain holds it: the buffer stays while any mapping of
/// it does, and in [quarantine](super::DmaDomain::waiting) after an unmap that hardware did not
/// answer.
///
/// Domains that it is mapped in have memory which [is made of it](FromRegistered).
///
/// It lists no pieces, so that nothing is kept for each:
/// [`Device::map_buffer`](super::Device::map_buffer) goes by the buffer's segments, and nothing
/// else maps it.
#[derive(Debug)]
pub struct Registered(Arc<Buffer<PhysAddr>>);

impl Registered {
    /// A buffer, whose maker promised what [`DmaMemory`] asks for.
    pub(super) fn new(buffer: Arc<Buffer<PhysAddr>>) -> Self {
        Self(buffer)
    }

    /// The buffer.
    pub fn buffer(&self) -> &Arc<Buffer<PhysAddr>> {
        &self.0
    }
}

#[expect(unsafe_code, reason = "whoever made the buffer promised")]
// SAFETY: there are no pieces. What is mapped are the segments of the buffer, which stay memory of
// the buffer that devices may access at any time, as `Buffer::new` asks for, while this has it.
unsafe impl DmaMemory for Registered {
    fn pieces(&self) -> &[Piece] {
        &[]
    }
}

/// Memory of domains that registered buffers are mapped in: a [`Registered`] itself, a
/// `Box<dyn DmaMemory>`, or a driver's own enum.
///
/// ```
/// use dmaspan::dma::{DmaMemory, FromRegistered, Piece, RawMemory, Registered};
///
/// enum Memory {
///     Ring(RawMemory),
///     Buffer(Registered),
/// }
///
/// // SAFETY: either promised, and is dropped with this.
/// unsafe impl DmaMemory for Memory {
///     fn pieces(&self) -> &[Piece] {
///         match self {
///             Self::Ring(ring) => ring.pieces(),
///             Self::Buffer(buffer) => buffer.pieces(),
///         }
///     }
/// }
///
/// // SAFETY: it owns the buffer.
/// unsafe impl FromRegistered for Memory {
///     fn from_registered(registered: Registered) -> Self {
///         Self::Buffer(registered)
///     }
/// }
/// ```
///
/// # Safety
///
/// What [`from_registered`](Self::from_registered) makes owns what it is given for as long as it
/// exists: nothing else keeps the buffer while a device uses it.
#[expect(unsafe_code, reason = "a contract about who keeps memory; nothing here is unsafe")]
pub unsafe trait FromRegistered: DmaMemory + Sized {
    /// Memory that keeps the buffer.
    fn from_registered(registered: Registered) -> Self;
}

#[expect(unsafe_code, reason = "it is kept")]
// SAFETY: it is what it was given.
unsafe impl FromRegistered for Registered {
    fn from_registered(registered: Registered) -> Self {
        registered
    }
}

#[expect(unsafe_code, reason = "it is kept")]
// SAFETY: the box owns its content.
unsafe impl FromRegistered for Box<dyn DmaMemory> {
    fn from_registered(registered: Registered) -> Self {
        Box::new(registered)
    }
}

/// Owners of several kinds in one domain: `Box<dyn DmaMemory>`.
#[expect(unsafe_code, reason = "the content promises")]
// SAFETY: a box is moved without its content, which is dropped with it and promised the rest.
unsafe impl<M: DmaMemory + ?Sized> DmaMemory for Box<M> {
    #[inline(always)]
    fn pieces(&self) -> &[Piece] {
        (**self).pieces()
    }
}

/// One buffer in several mappings at a time, or kept by its driver while it is mapped.
#[expect(unsafe_code, reason = "the content promises")]
// SAFETY: the content lives as long as any of its handles, is not moved, and promised the rest.
unsafe impl<M: DmaMemory + Sync + ?Sized> DmaMemory for Arc<M> {
    #[inline(always)]
    fn pieces(&self) -> &[Piece] {
        (**self).pieces()
    }
}
