//! [`Direct`] stands in for a domain where nothing translates the addresses of a device.

use core::fmt;
use core::marker::PhantomData;

use super::bounce::{BouncePool, NoPool};
use super::domain::Flush;
use super::domain::translation::{Known, Sealed};
use super::error::Error;
use super::memory::DmaMemory;
use super::queued::QueuedMemory;
use super::reach::Typed;
use super::single::Unmapped;
use crate::addr::{Iova, PhysAddr};
use crate::iommu::iova::{Iovas, Request};
use crate::platform::Platform;
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::Span;

/// No translation: a device uses physical addresses, because it has no IOMMU or that lets them
/// through (Linux's dma-direct, kernel/dma/direct.c).
///
/// What a device's mask does not reach is bounced through its pool. Nothing confines the device:
/// [`Trust`](super::Trust) makes no difference. A mapping holds nothing but its memory, which its
/// unmap gives back at once. There are no IOVAs to reserve, and nothing is joined in lists.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::dma::{Device, DeviceConfig, Direct, NoPool, Piece, RawMemory, Unmapped};
/// use dmaspan::platform::OneThread;
/// use dmaspan::{Direction, PhysAddr, Span};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let ram = Span::new(PhysAddr::new(0x8000_0000), 2 << 30)?;
///     let direct = Arc::new(Direct::<RawMemory, _>::new(ram, OneThread));
///     let device = Device::new(direct, NoPool, DeviceConfig::bits(32))?;
///     let piece = Piece::memory(Span::new(PhysAddr::new(0x8000_1200), 1500)?);
///     // SAFETY: the frame is this program's, and nobody touches it.
///     let memory = unsafe { RawMemory::new(piece) };
///     let mapping = device.map_single(memory, Direction::ToDevice)?;
///     assert_eq!(mapping.addr().get(), 0x8000_1200);
///     assert!(matches!(device.unmap(mapping), Ok(Unmapped::Released(_))));
///     Ok(())
/// }
/// ```
pub struct Direct<H, P> {
    memory: Span,
    platform: P,
    /// It holds no memory.
    holds: PhantomData<fn() -> H>,
}

impl<H: DmaMemory, P: Platform> Direct<H, P> {
    /// Devices beside memory that lies within `memory`, from its lowest to its highest address.
    /// That is what tells a mask that reaches some of it from one that does not.
    pub const fn new(memory: Span, platform: P) -> Self {
        Self { memory, platform, holds: PhantomData }
    }
}

impl<H: DmaMemory, P: Platform> Known for Direct<H, P> {
    type Platform = P;

    const TRANSLATES: bool = false;
}

impl<H: DmaMemory, P: Platform> Sealed for Direct<H, P> {
    type Memory = H;
    type Pool = NoPool;
    type Reach<B: BouncePool> = Typed<Self, B>;

    fn write_back(&self, span: Span) {
        self.platform.write_back(span);
    }

    fn invalidate(&self, span: Span) {
        self.platform.invalidate(span);
    }

    #[inline(always)]
    fn direct_memory(&self) -> Option<Span> {
        Some(self.memory)
    }

    #[inline(always)]
    fn granule_lg2(&self) -> u32 {
        0
    }

    fn last_paddr(&self) -> PhysAddr {
        self.memory.last()
    }

    fn aperture(&self) -> IovaRange {
        let first = Iova::new(self.memory.paddr().get());
        let last = Iova::new(self.memory.last().get());
        IovaRange::new(first, last).unwrap_or(IovaRange::point(first))
    }

    #[inline(always)]
    fn flush_mode(&self) -> Flush {
        Flush::Strict
    }

    fn alloc(&self, _request: Request) -> Result<Iovas, Error> {
        Err(Error::Untranslated)
    }

    fn free(&self, _promise: Promise<'_>, iovas: Iovas) {
        drop(iovas);
    }

    fn map(
        &self,
        _promise: Promise<'_>,
        _iova: Iova,
        _spans: &[Span],
        _prot: Prot,
    ) -> Result<(), Error> {
        Err(Error::Untranslated)
    }

    fn announce(&self, _promise: Promise<'_>, _range: IovaRange) -> Result<(), Error> {
        Err(Error::Untranslated)
    }

    fn unmap(
        &self,
        _promise: Promise<'_>,
        iovas: Iovas,
        memory: H,
        _flush: Flush,
    ) -> Result<Unmapped<H>, Error> {
        // Nothing was mapped in any.
        drop(iovas);
        Ok(Unmapped::Released(memory))
    }

    fn unmap_linked(
        &self,
        _promise: Promise<'_>,
        iovas: Iovas,
        memory: QueuedMemory<H>,
    ) -> Result<(), Error> {
        // Nobody calls this: there are no reservations. Kept for ever rather than released.
        core::mem::forget((iovas, memory));
        Err(Error::Untranslated)
    }

    fn unlink(&self, _promise: Promise<'_>, _range: IovaRange) -> Result<(), Error> {
        Err(Error::Untranslated)
    }

    fn keep_torn(&self) {}

    fn settle(&self) -> Result<(), Error> {
        Ok(())
    }

    fn hold(&self, _promise: Promise<'_>, iovas: Iovas, memory: H) {
        // Nobody calls this: nothing of it can fail. Kept for ever rather than released.
        core::mem::forget((iovas, memory));
    }
}

impl<H, P> fmt::Debug for Direct<H, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Direct").field("memory", &self.memory).finish_non_exhaustive()
    }
}
