//! What a thread does: fill, map, wait, unmap, and again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::models::unwalked::{ByCalls, Caller, Mapped, MappedList, Told, UnwalkedDma};
use dmaspan::dma::{self, DeviceConfig, DmaConfig, Piece, Segment};
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ConfigError};
use dmaspan::iommu::iova;
use dmaspan::{Direction, DmaAddr, Iova, IovaRange, PhysAddr};
use dmaspan_linux::mem::AccessError;
use dmaspan_linux::{Memory, UserPlatform};
use dmaspan_sim::walker::arm_lpae::{
    ArmLpaeS1Walker, ArmS1WalkRegisters, BadLpaeRegisters, BadLpaeTable,
};
use dmaspan_sim::walker::{Access, Walker};

use super::latency::Latency;
use super::plan::{Buffer, Case};
use dmaspan_cli::stats::nanoseconds;

/// Bits of IOVAs and of physical addresses of the tables.
pub(crate) const ADDRESS_BITS: u32 = 48;

/// Where tables lie: any address, since no hardware looks there.
const TABLES_AT: PhysAddr = PhysAddr::new(1 << 40);

/// Room for the tables of each thread, and for those of all. Memory is only used once tables lie in
/// it.
const TABLE_BYTES: u64 = 48 << 20;
const MOST_TABLE_BYTES: u64 = 1 << 30;

/// What a buffer is filled with, in each byte, as in Linux's benchmark.
const FILLING: u64 = 0x6666_6666_6666_6666;

/// One mapping of so many is looked up, and the first of each round.
const SAMPLE: u64 = 1024;

/// How long a mapping that found no IOVAs is tried again. Those that are free may all be with a
/// thread that waits for its CPU: in the middle of a flush, which the DMA API does not wait for
/// when it flushes and allocates once more, or with its hand in a cache. No thread waits so long
/// for its CPU, however many there are: then no IOVAs come free any more.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between the tries, so that such a thread gets its CPU.
const PAUSE: Duration = Duration::from_micros(20);

/// What is mapped in.
pub(crate) type Tables = UnwalkedDma<ArmLpaeS1<12>, UserPlatform>;

/// Why mapping was not measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DmaBenchError {
    /// There are no such tables.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The walker knows no such tables.
    #[error(transparent)]
    Registers(#[from] BadLpaeRegisters),
    /// The DMA API refused something.
    #[error("with {threads} threads and {granule} pages: {source}")]
    Dma {
        /// How many threads there were.
        threads: u64,
        /// How many pages a buffer has.
        granule: u64,
        /// Why.
        source: dma::Error,
    },
    /// There is no memory for the buffers.
    #[error(transparent)]
    Memory(#[from] dmaspan_linux::mem::MemoryError),
    /// A buffer is not all in the memory.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A buffer is no span.
    #[error(transparent)]
    Range(#[from] dmaspan::RangeError),
    /// A mapping leads elsewhere.
    #[error("the device would find {found:x?} at {addr}, where {expected} was mapped")]
    Elsewhere {
        /// Where it was looked up.
        addr: DmaAddr,
        /// Where it leads.
        found: Option<PhysAddr>,
        /// Where it should lead.
        expected: PhysAddr,
    },
    /// The tables are damaged.
    #[error("the tables are damaged: {0}")]
    Tables(#[from] BadLpaeTable),
    /// Leaves are left though all was unmapped.
    #[error("{leaves} leaves are left in the tables after all unmaps")]
    Left {
        /// How many.
        leaves: u64,
    },
    /// IOVAs are left.
    #[error("not all IOVAs were given back: {0}")]
    Iovas(dma::Error),
    /// The system gave no thread.
    #[error("there is no thread: {0}")]
    NoThread(std::io::Error),
}

/// A domain of its own for one way of mapping.
#[derive(Debug)]
pub(crate) struct Rig {
    tables: Tables,
    walker: ArmLpaeS1Walker,
}

impl Rig {
    /// One whose buffers are mapped below the root that `root` gives.
    pub(crate) fn new(
        case: &Case,
        root: impl Fn(&Tables) -> PhysAddr,
    ) -> Result<Self, DmaBenchError> {
        let format = || ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(ADDRESS_BITS, ADDRESS_BITS));
        let bytes = TABLE_BYTES.saturating_mul(case.threads).min(MOST_TABLE_BYTES);
        let cpus = usize::try_from(case.threads).unwrap_or(usize::MAX);
        let config = DmaConfig { flush: case.flush, ..DmaConfig::new(cpus) };
        let device = DeviceConfig::bits(case.bits);
        let tables = UnwalkedDma::new(
            [format()?, format()?],
            (TABLES_AT, bytes),
            (config, device),
            UserPlatform,
        )
        .map_err(|source| case.refused(source))?;
        let registers = tables.format().registers(root(&tables));
        let walker = ArmLpaeS1Walker::new(ArmS1WalkRegisters {
            ttbr: registers.ttbr,
            tcr: registers.tcr,
            mair: registers.mair,
            ..Default::default()
        })?;
        Ok(Self { tables, walker })
    }

    /// The domain.
    pub(crate) fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Whether a device would find the buffer.
    fn check(&self, addr: DmaAddr, buffer: &Buffer, way: Direction) -> Result<(), DmaBenchError> {
        let access = if way == Direction::FromDevice { Access::Write } else { Access::Read };
        let (Some(first), Some(last)) = (buffer.pieces.first(), buffer.pieces.last()) else {
            return Ok(());
        };
        let end = DmaAddr::new(addr.get() + buffer.bytes - 1);
        for (addr, expected) in [(addr, first.span.paddr()), (end, last.span.last())] {
            let found = self.walker.walk(self.tables.words(), Iova::new(addr.get()), access);
            let found = found.ok().map(|translation| translation.paddr);
            if found != Some(expected) {
                return Err(DmaBenchError::Elsewhere { addr, found, expected });
            }
        }
        Ok(())
    }

    /// Whether nothing is left, after all was unmapped and flushed.
    pub(crate) fn check_empty(mut self) -> Result<(), DmaBenchError> {
        let whole = IovaRange::from_len(Iova::new(0), 1 << ADDRESS_BITS)?;
        let leaves = self.walker.census(self.tables.words(), whole)?.values().sum();
        if leaves > 0 {
            return Err(DmaBenchError::Left { leaves });
        }
        self.tables.check_all_free().map_err(DmaBenchError::Iovas)
    }
}

/// How a buffer is mapped and unmapped.
pub(crate) trait Mapper: Send {
    /// A buffer that is mapped.
    type Mapped;

    fn map(&mut self) -> Result<Self::Mapped, dma::Error>;

    fn unmap(&mut self, mapped: Self::Mapped) -> Result<(), dma::Error>;

    /// Where its first byte is; the others follow.
    fn addr(&self, mapped: &Self::Mapped) -> DmaAddr;

    /// Syncs what waits.
    fn flush(&mut self) -> Result<(), dma::Error>;
}

/// By `map_single` and `unmap` of a device.
#[derive(Debug)]
pub(crate) struct Single<'r, 'm> {
    pub(crate) tables: &'r Tables,
    pub(crate) piece: &'m Piece,
    pub(crate) direction: Direction,
}

impl Mapper for Single<'_, '_> {
    type Mapped = Mapped<ArmLpaeS1<12>, UserPlatform>;

    #[inline]
    fn map(&mut self) -> Result<Self::Mapped, dma::Error> {
        self.tables.map_single(self.piece, self.direction)
    }

    #[inline]
    fn unmap(&mut self, mapped: Self::Mapped) -> Result<(), dma::Error> {
        self.tables.unmap(mapped)
    }

    fn addr(&self, mapped: &Self::Mapped) -> DmaAddr {
        mapped.addr()
    }

    fn flush(&mut self) -> Result<(), dma::Error> {
        self.tables.flush()
    }
}

/// By `map_list` and `unmap_list` of a device.
#[derive(Debug)]
pub(crate) struct List<'r, 'm> {
    pub(crate) tables: &'r Tables,
    pub(crate) pieces: &'m Arc<[Piece]>,
    /// What the device is given: one for each piece is room enough.
    pub(crate) segments: Vec<Segment>,
    pub(crate) direction: Direction,
}

impl Mapper for List<'_, '_> {
    type Mapped = MappedList<ArmLpaeS1<12>, UserPlatform>;

    #[inline]
    fn map(&mut self) -> Result<Self::Mapped, dma::Error> {
        self.tables.map_list(self.pieces, self.direction, &mut self.segments)
    }

    #[inline]
    fn unmap(&mut self, mapped: Self::Mapped) -> Result<(), dma::Error> {
        self.tables.unmap_list(mapped)
    }

    fn addr(&self, _: &Self::Mapped) -> DmaAddr {
        // Pieces of whole pages leave no gaps between the segments.
        self.segments.first().map_or(DmaAddr::new(0), |segment| segment.addr)
    }

    fn flush(&mut self) -> Result<(), dma::Error> {
        self.tables.flush()
    }
}

/// By calls of its own to the table, one for each page.
#[derive(Debug)]
pub(crate) struct Calling<'r, 'm> {
    pub(crate) caller: Caller<'r, ArmLpaeS1<12>, UserPlatform>,
    pub(crate) pieces: &'m [Piece],
    pub(crate) direction: Direction,
}

impl<'r, 'm> Mapper for Calling<'r, 'm> {
    type Mapped = ByCalls<'r, 'm, ArmLpaeS1<12>, UserPlatform>;

    #[inline]
    fn map(&mut self) -> Result<Self::Mapped, dma::Error> {
        self.caller.map(self.pieces, self.direction)
    }

    #[inline]
    fn unmap(&mut self, mapped: Self::Mapped) -> Result<(), dma::Error> {
        self.caller.unmap(mapped)
    }

    fn addr(&self, mapped: &Self::Mapped) -> DmaAddr {
        mapped.addr()
    }

    fn flush(&mut self) -> Result<(), dma::Error> {
        self.caller.flush();
        Ok(())
    }
}

/// What was measured of one way.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) map: Latency,
    pub(crate) unmap: Latency,
    pub(crate) told: Told,
}

impl Measured {
    pub(crate) fn new() -> Self {
        Self { map: Latency::new(), unmap: Latency::new(), told: Told::default() }
    }

    /// Adds what another thread measured.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.map.merge(&other.map);
        self.unmap.merge(&other.unmap);
        self.add(other.told);
    }

    /// Adds what hardware was told.
    pub(crate) fn add(&mut self, told: Told) {
        self.told.commands += told.commands;
        self.told.syncs += told.syncs;
    }
}

/// One thread of one way.
#[derive(Debug)]
pub(crate) struct Worker<'r, M> {
    pub(crate) mapper: M,
    pub(crate) rig: &'r Rig,
    pub(crate) memory: &'r Memory,
    pub(crate) buffer: &'r Buffer,
    pub(crate) case: &'r Case,
    pub(crate) measured: Measured,
}

impl<M: Mapper> Worker<'_, M> {
    /// Maps and unmaps until `stop` is set, once at least. What looking at the clock takes is not
    /// counted.
    pub(crate) fn work(&mut self, stop: &AtomicBool, clock_ns: u64) -> Result<(), DmaBenchError> {
        let told = Told::by_this_thread();
        let mut count = 0u64;
        loop {
            self.fill()?;
            let begin = Instant::now();
            let mapped = match self.mapper.map() {
                Ok(mapped) => mapped,
                Err(error) => self.map_again(error)?,
            };
            let done = Instant::now();
            self.measured.map.add(nanoseconds(done - begin).saturating_sub(clock_ns));
            if count.is_multiple_of(SAMPLE) {
                self.rig.check(self.mapper.addr(&mapped), self.buffer, self.case.direction)?;
            }
            count += 1;
            wait(self.case.delay);
            let begin = Instant::now();
            self.mapper.unmap(mapped).map_err(|source| self.case.refused(source))?;
            let done = Instant::now();
            self.measured.unmap.add(nanoseconds(done - begin).saturating_sub(clock_ns));
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        self.measured.add(Told::by_this_thread().since(told));
        Ok(())
    }

    /// Syncs what waits, and counts that too.
    pub(crate) fn flush(&mut self) -> Result<(), DmaBenchError> {
        let told = Told::by_this_thread();
        self.mapper.flush().map_err(|source| self.case.refused(source))?;
        self.measured.add(Told::by_this_thread().since(told));
        Ok(())
    }

    fn fill(&self) -> Result<(), DmaBenchError> {
        if self.case.direction != Direction::FromDevice {
            for &(offset, len) in &self.buffer.parts {
                self.memory.fill_words(offset, len, |_| FILLING)?;
            }
        }
        Ok(())
    }

    /// Tries again where there were no IOVAs: see [`PATIENCE`].
    #[cold]
    fn map_again(&mut self, refused: dma::Error) -> Result<M::Mapped, DmaBenchError> {
        let mut refused = refused;
        let begin = Instant::now();
        while matches!(refused, dma::Error::Iova(iova::Error::Exhausted { .. }))
            && begin.elapsed() < PATIENCE
        {
            std::thread::sleep(PAUSE);
            match self.mapper.map() {
                Ok(mapped) => return Ok(mapped),
                Err(error) => refused = error,
            }
        }
        Err(self.case.refused(refused))
    }
}

/// Waits without giving the CPU away, as for a short transmission.
fn wait(delay: Duration) {
    if !delay.is_zero() {
        let begin = Instant::now();
        while begin.elapsed() < delay {
            std::hint::spin_loop();
        }
    }
}
