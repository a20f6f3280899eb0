//! All pools, used alike.

use dmaspan::swiotlb::{BouncedOf, Fill, NotReleased, Original, Pool, PoolConfig, SlotRequest};
use dmaspan::{HostAddr, Platform, Span};
use dmaspan_linux::{Memory, MemoryKind};
use parking_lot::lock_api::RawMutex;

use super::plan::Case;
use crate::failed::Failed;
use crate::models::slots::Slots;
use crate::models::swiotlb_before::{self, MappedBefore, Patches, PoolBefore};

/// What is asked of slots: nothing.
const ANY: SlotRequest = SlotRequest { keep_bits: 0, granule: 1, last: u64::MAX, boundary: None };

/// The buffers of a case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    memory: &'static Memory,
    block: u64,
}

/// Memory for buffers, which is never given back: that is what permits pools to copy to them.
pub(crate) fn leak(bytes: u64) -> Result<&'static Memory, Failed> {
    let bytes = bytes.next_multiple_of(MemoryKind::Thp.page_size());
    Ok(Box::leak(Box::new(Memory::new(MemoryKind::Thp, bytes)?)))
}

impl Buffers {
    pub(crate) fn new(memory: &'static Memory, case: &Case) -> Self {
        Self { memory, block: case.block }
    }

    /// The memory, and where in it a buffer is.
    pub(crate) fn place(&self, number: u64) -> (&'static Memory, u64) {
        (self.memory, number * self.block)
    }

    #[inline]
    fn original(&self, number: u64) -> Result<Original<HostAddr>, Failed> {
        Ok(self.memory.original(number * self.block, self.block)?)
    }
}

/// A pool that is measured.
pub(crate) trait Bounces: Sync {
    /// A buffer that a device may use.
    type Mapped<'p>: Send
    where
        Self: 'p;

    /// Takes a slot for the buffer of a number, copies, and hands it on: a buffer or a slot that is
    /// passed by value would be copied several times, which takes longer than the rest.
    fn map<'p, R>(
        &'p self,
        buffer: (Buffers, u64),
        case: &Case,
        then: impl FnOnce(Self::Mapped<'p>) -> R,
    ) -> Result<R, Failed>;

    /// Copies back and releases the slot. The device wrote all of it, where it writes.
    fn unmap(&self, mapped: Self::Mapped<'_>, case: &Case) -> Result<(), Failed>;

    /// Where the device finds the bytes.
    fn span(mapped: &Self::Mapped<'_>) -> Span<HostAddr>;

    /// Whether slots are filled.
    fn fill(&self, case: &Case) -> Fill;

    /// How many bytes of slots are held.
    fn used(&self) -> u64;

    /// The memory of the slots, as a device sees it.
    fn slots(&self) -> &Memory;
}

/// The pool of dmaspan.
pub(crate) type Now<const COPIED: bool, P> = Pool<Slots<COPIED>, P>;

/// One of so many bytes and areas.
pub(crate) fn now<const COPIED: bool, P: Platform>(
    bytes: u64,
    areas: u64,
    platform: P,
) -> Result<Now<COPIED, P>, Failed> {
    let areas = usize::try_from(areas).unwrap_or(usize::MAX);
    Ok(Pool::new(Slots::new(bytes)?, PoolConfig::new(areas), platform)?)
}

impl<const COPIED: bool, P: Platform + 'static> Bounces for Now<COPIED, P> {
    type Mapped<'p>
        = BouncedOf<P, HostAddr>
    where
        Self: 'p;

    #[inline]
    fn map<'p, R>(
        &'p self,
        (buffers, number): (Buffers, u64),
        case: &Case,
        then: impl FnOnce(Self::Mapped<'p>) -> R,
    ) -> Result<R, Failed> {
        let original = buffers.original(number)?;
        match self.map(original, case.direction, case.fill, &ANY) {
            Ok(mapped) => Ok(then(mapped)),
            Err(error) => Err(error.into()),
        }
    }

    #[inline]
    fn unmap(&self, mapped: Self::Mapped<'_>, case: &Case) -> Result<(), Failed> {
        let unmapped = match case.fill {
            Fill::Copy => self.unmap(mapped),
            Fill::Overwritten => {
                let written = mapped.span().len();
                self.unmap_written(mapped, written)
            }
        };
        Ok(unmapped.map_err(|NotReleased { error, .. }| error)?)
    }

    fn span(mapped: &Self::Mapped<'_>) -> Span<HostAddr> {
        mapped.span()
    }

    fn fill(&self, case: &Case) -> Fill {
        case.fill
    }

    fn used(&self) -> u64 {
        self.stats().used
    }

    fn slots(&self) -> &Memory {
        self.memory().memory()
    }
}

/// The pool before the series, with the locks of the platform, and what it has of the series.
pub(crate) type Before<const COPIED: bool, P> = PoolBefore<Slots<COPIED>, <P as Platform>::Lock>;

/// One of so many bytes.
pub(crate) fn before<const COPIED: bool, P: Platform>(
    bytes: u64,
    patches: Patches,
) -> Result<Before<COPIED, P>, Failed> {
    Ok(PoolBefore::patched(Slots::new(bytes)?, patches)?)
}

impl<const COPIED: bool, L: RawMutex + Send + Sync + 'static> Bounces
    for PoolBefore<Slots<COPIED>, L>
{
    type Mapped<'p>
        = MappedBefore<'p, Slots<COPIED>, L>
    where
        Self: 'p;

    #[inline]
    fn map<'p, R>(
        &'p self,
        (buffers, number): (Buffers, u64),
        case: &Case,
        then: impl FnOnce(Self::Mapped<'p>) -> R,
    ) -> Result<R, Failed> {
        let original = buffers.original(number)?;
        match self.map_owned(original, case.direction, &ANY) {
            Some(mapped) => Ok(then(mapped)),
            None => Err(Failed::new("the pool has no slot")),
        }
    }

    #[inline]
    fn unmap(&self, mapped: Self::Mapped<'_>, _: &Case) -> Result<(), Failed> {
        mapped.unmap();
        Ok(())
    }

    fn span(mapped: &Self::Mapped<'_>) -> Span<HostAddr> {
        mapped.span()
    }

    fn fill(&self, _: &Case) -> Fill {
        Fill::Copy
    }

    fn used(&self) -> u64 {
        self.used() as u64 * swiotlb_before::SLOT
    }

    fn slots(&self) -> &Memory {
        self.memory().memory()
    }
}
