//! Both pools, used alike.

use crate::models::swiotlb_before::{self, MappedBefore, PoolBefore};
use crate::models::uncopied::Uncopied;
use dmaspan::swiotlb::{
    self, BouncedOf, Fill, NotReleased, Original, Pool, PoolConfig, PoolMemory, SlotRequest,
};
use dmaspan::{Direction, HostAddr, Platform, RangeError, Span};
use dmaspan_linux::mem::{AccessError, CheckError, MemoryError, OutsideMemory};
use dmaspan_linux::{BounceMemory, Memory, MemoryKind, UserPlatform};

use super::plan::Case;

/// What is asked of slots: nothing.
const ANY: SlotRequest = SlotRequest { keep_bits: 0, granule: 1, last: u64::MAX, boundary: None };

/// Why a case could not be measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SwiotlbBenchError {
    /// A pool refused.
    #[error(transparent)]
    Refused(#[from] swiotlb::Error),
    /// The pool that gives no reason refused.
    #[error("the pool has no slot")]
    Full,
    /// There is no memory for slots and buffers.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A buffer is not in the memory.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A span is none.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// A slot is not in the pool.
    #[error("a slot is elsewhere: {0}")]
    Elsewhere(#[from] OutsideMemory),
    /// Bytes are not what they should be.
    #[error("after a turn, in a slot or a buffer: {0}")]
    Content(#[from] CheckError),
    /// A slot is not as long as its buffer.
    #[error("the slot {slot} stands in for {len} bytes")]
    Length {
        /// It.
        slot: Span<HostAddr>,
        /// What it should be.
        len: u64,
    },
    /// Two slots are held by two jobs, or by one for two buffers.
    #[error("the slots {one} and {other} overlap and are both held")]
    Overlap {
        /// One.
        one: Span<HostAddr>,
        /// The other.
        other: Span<HostAddr>,
    },
    /// Slots are held though everything was unmapped.
    #[error("{bytes} bytes of slots are held after all unmaps")]
    Left {
        /// How many.
        bytes: u64,
    },
    /// The system gave no thread.
    #[error("there is no thread: {0}")]
    NoThread(std::io::Error),
}

/// Slots in memory of this process.
pub(crate) trait Slots: PoolMemory<Address = HostAddr> {
    /// The memory, as a device sees it.
    fn as_seen(&self) -> &Memory;
}

impl Slots for BounceMemory {
    fn as_seen(&self) -> &Memory {
        self.memory()
    }
}

impl Slots for Uncopied<BounceMemory> {
    fn as_seen(&self) -> &Memory {
        self.0.memory()
    }
}

/// So many bytes in the largest pages, as a kernel's own mapping of memory has them.
fn kind_for(bytes: u64) -> MemoryKind {
    let is_huge = bytes.is_multiple_of(MemoryKind::Thp.page_size());
    if is_huge { MemoryKind::Thp } else { MemoryKind::Base }
}

/// Memory for so many bytes of slots.
pub(crate) fn slots(bytes: u64) -> Result<BounceMemory, SwiotlbBenchError> {
    Ok(BounceMemory::new(kind_for(bytes), bytes)?)
}

/// The buffers of a case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    memory: &'static Memory,
    block: u64,
}

/// Memory for buffers, which is never given back: that is what permits pools to copy to them.
pub(crate) fn leak(bytes: u64) -> Result<&'static Memory, SwiotlbBenchError> {
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
    fn original(&self, number: u64) -> Result<Original<HostAddr>, SwiotlbBenchError> {
        Ok(self.memory.original(number * self.block, self.block)?)
    }
}

/// A pool that is measured, with the buffers of a case.
pub(crate) trait Way: Sync {
    /// How it is called where it fails.
    const NAME: &'static str;

    /// A buffer that a device may use.
    type Mapped: Send;

    /// Takes a slot for the buffer of this number, copies, and hands it on: returned, it would be
    /// copied several times, which takes longer than the rest.
    fn map<R>(
        &self,
        buffer: u64,
        then: impl FnOnce(Self::Mapped) -> R,
    ) -> Result<R, SwiotlbBenchError>;

    /// Copies back and releases the slot. The device wrote all of it, where it writes.
    fn unmap(&self, mapped: Self::Mapped) -> Result<(), SwiotlbBenchError>;

    /// Where the device finds the bytes.
    fn span(mapped: &Self::Mapped) -> Span<HostAddr>;

    /// Whether slots are filled.
    fn fill(&self) -> Fill;

    /// How many bytes of slots are held.
    fn used(&self) -> u64;

    /// The memory of the slots, as a device sees it.
    fn slots(&self) -> &Memory;

    /// The buffers.
    fn buffers(&self) -> Buffers;
}

/// The pool of dmaspan.
pub(crate) struct Now<M: Slots> {
    pool: Pool<M, UserPlatform>,
    buffers: Buffers,
    direction: Direction,
    fill: Fill,
}

impl<M: Slots> Now<M> {
    /// A pool of so many areas.
    pub(crate) fn new(
        memory: M,
        areas: u64,
        buffers: Buffers,
        case: &Case,
    ) -> Result<Self, SwiotlbBenchError> {
        let areas = usize::try_from(areas).unwrap_or(usize::MAX);
        let pool = Pool::new(memory, PoolConfig::new(areas), UserPlatform)?;
        Ok(Self { pool, buffers, direction: case.direction, fill: case.fill })
    }
}

impl<M: Slots> Way for Now<M> {
    const NAME: &'static str = "now";

    type Mapped = BouncedOf<UserPlatform, HostAddr>;

    #[inline]
    fn map<R>(
        &self,
        buffer: u64,
        then: impl FnOnce(Self::Mapped) -> R,
    ) -> Result<R, SwiotlbBenchError> {
        let original = self.buffers.original(buffer)?;
        match self.pool.map(original, self.direction, self.fill, &ANY) {
            Ok(mapped) => Ok(then(mapped)),
            Err(error) => Err(error.into()),
        }
    }

    #[inline]
    fn unmap(&self, mapped: Self::Mapped) -> Result<(), SwiotlbBenchError> {
        let unmapped = match self.fill {
            Fill::Copy => self.pool.unmap(mapped),
            Fill::Overwritten => {
                let written = mapped.span().len();
                self.pool.unmap_written(mapped, written)
            }
        };
        Ok(unmapped.map_err(|NotReleased { error, .. }| error)?)
    }

    fn span(mapped: &Self::Mapped) -> Span<HostAddr> {
        mapped.span()
    }

    fn fill(&self) -> Fill {
        self.fill
    }

    fn used(&self) -> u64 {
        self.pool.stats().used
    }

    fn slots(&self) -> &Memory {
        self.pool.memory().as_seen()
    }

    fn buffers(&self) -> Buffers {
        self.buffers
    }
}

/// The lock of both pools.
type Lock = <UserPlatform as Platform>::Lock;
/// The pool before the series.
pub(crate) type Before<M> = PoolBefore<M, Lock>;

/// The same, with buffers.
pub(crate) struct Vanilla<'p, M> {
    pool: &'p Before<M>,
    buffers: Buffers,
    direction: Direction,
}

impl<'p, M: Slots> Vanilla<'p, M> {
    pub(crate) fn new(pool: &'p Before<M>, buffers: Buffers, case: &Case) -> Self {
        Self { pool, buffers, direction: case.direction }
    }
}

impl<'p, M: Slots> Way for Vanilla<'p, M> {
    const NAME: &'static str = "vanilla";

    type Mapped = MappedBefore<'p, M, Lock>;

    #[inline]
    fn map<R>(
        &self,
        buffer: u64,
        then: impl FnOnce(Self::Mapped) -> R,
    ) -> Result<R, SwiotlbBenchError> {
        let original = self.buffers.original(buffer)?;
        match self.pool.map_owned(original, self.direction, &ANY) {
            Some(mapped) => Ok(then(mapped)),
            None => Err(SwiotlbBenchError::Full),
        }
    }

    #[inline]
    fn unmap(&self, mapped: Self::Mapped) -> Result<(), SwiotlbBenchError> {
        mapped.unmap();
        Ok(())
    }

    fn span(mapped: &Self::Mapped) -> Span<HostAddr> {
        mapped.span()
    }

    fn fill(&self) -> Fill {
        Fill::Copy
    }

    fn used(&self) -> u64 {
        self.pool.used() as u64 * swiotlb_before::SLOT
    }

    fn slots(&self) -> &Memory {
        self.pool.memory().as_seen()
    }

    fn buffers(&self) -> Buffers {
        self.buffers
    }
}
