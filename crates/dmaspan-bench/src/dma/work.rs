//! What a thread does: fill, map, wait, unmap, and again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::models::unwalked::{ByCalls, Caller, Mapped, MappedList, Told, UnwalkedDma};
use dmaspan::dma::{self, DeviceConfig, DmaConfig, Piece, Segment};
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config};
use dmaspan::iommu::iova;
use dmaspan::{Direction, DmaAddr, Iova, IovaRange, PhysAddr};
use dmaspan_linux::{Memory, UserPlatform};
use dmaspan_sim::walker::arm_lpae::{ArmLpaeS1Walker, ArmS1WalkRegisters};
use dmaspan_sim::walker::{Access, Walker};

use super::latency::Latency;
use super::plan::{Buffer, Case};
use crate::crew::{self, Gate};
use crate::failed::Failed;
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

/// A domain of its own for one way of mapping.
#[derive(Debug)]
pub(crate) struct Rig {
    tables: Tables,
    walker: ArmLpaeS1Walker,
}

impl Rig {
    /// One whose buffers are mapped below the root that `root` gives.
    pub(crate) fn new(case: &Case, root: impl Fn(&Tables) -> PhysAddr) -> Result<Self, Failed> {
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
    fn check(&self, addr: DmaAddr, buffer: &Buffer, way: Direction) -> Result<(), Failed> {
        let access = if way == Direction::FromDevice { Access::Write } else { Access::Read };
        let (Some(first), Some(last)) = (buffer.pieces.first(), buffer.pieces.last()) else {
            return Ok(());
        };
        let end = DmaAddr::new(addr.get() + buffer.bytes - 1);
        for (addr, expected) in [(addr, first.span.paddr()), (end, last.span.last())] {
            let found = self.walker.walk(self.tables.words(), Iova::new(addr.get()), access);
            let found = found.ok().map(|translation| translation.paddr);
            if found != Some(expected) {
                return Err(Failed::new(format_args!(
                    "the device would find {found:x?} at {addr}, where {expected} was mapped"
                )));
            }
        }
        Ok(())
    }

    /// Whether nothing is left, after all was unmapped and flushed.
    pub(crate) fn check_empty(mut self) -> Result<(), Failed> {
        let whole = IovaRange::from_len(Iova::new(0), 1 << ADDRESS_BITS)?;
        let census = self.walker.census(self.tables.words(), whole);
        let leaves: u64 = census.map_err(Failed::at("the tables are damaged"))?.values().sum();
        if leaves > 0 {
            return Err(Failed::new(format_args!(
                "{leaves} leaves are left in the tables after all unmaps"
            )));
        }
        self.tables.check_all_free().map_err(Failed::at("not all IOVAs were given back"))
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
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    pub(crate) map: Latency,
    pub(crate) unmap: Latency,
    pub(crate) told: Told,
}

impl Measured {
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
    mapper: M,
    rig: &'r Rig,
    memory: &'r Memory,
    buffer: &'r Buffer,
    case: &'r Case,
    pub(crate) measured: Measured,
}

impl<'r, M: Mapper> Worker<'r, M> {
    pub(crate) fn new(
        case: &'r Case,
        memory: &'r Memory,
        rig: &'r Rig,
        buffer: &'r Buffer,
        mapper: M,
    ) -> Self {
        Self { mapper, rig, memory, buffer, case, measured: Measured::default() }
    }

    /// Maps and unmaps until `stop` is set, once at least. What looking at the clock takes is not
    /// counted.
    fn work(&mut self, gate: &Gate, stop: &AtomicBool, clock_ns: u64) -> Result<(), Failed> {
        gate.pass();
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
    fn flush(&mut self) -> Result<(), Failed> {
        let told = Told::by_this_thread();
        self.mapper.flush().map_err(|source| self.case.refused(source))?;
        self.measured.add(Told::by_this_thread().since(told));
        Ok(())
    }

    fn fill(&self) -> Result<(), Failed> {
        if self.case.direction != Direction::FromDevice {
            for &(offset, len) in &self.buffer.parts {
                self.memory.fill_words(offset, len, |_| FILLING)?;
            }
        }
        Ok(())
    }

    /// Tries again where there were no IOVAs: see [`PATIENCE`].
    #[cold]
    fn map_again(&mut self, refused: dma::Error) -> Result<M::Mapped, Failed> {
        let mut refused = refused;
        let begin = Instant::now();
        while matches!(refused, dma::Error::Iova(iova::Error::Exhausted { .. }))
            && begin.elapsed() < PATIENCE
        {
            thread::sleep(PAUSE);
            match self.mapper.map() {
                Ok(mapped) => return Ok(mapped),
                Err(error) => refused = error,
            }
        }
        Err(self.case.refused(refused))
    }
}

/// Lets all workers work at once, each in a thread of its own.
pub(crate) fn turn<M: Mapper>(
    workers: &mut [Worker<'_, M>],
    length: Duration,
    clock_ns: u64,
) -> Result<(), Failed> {
    let work = |worker: &mut Worker<'_, M>, gate: &Gate, stop: &AtomicBool| {
        worker.work(gate, stop, clock_ns)
    };
    crew::for_a_while(workers.iter_mut(), length, work).map(drop)
}

/// Syncs what waits, and adds up what all workers measured.
pub(crate) fn finish<M: Mapper>(workers: Vec<Worker<'_, M>>) -> Result<Measured, Failed> {
    let mut all = Measured::default();
    for mut worker in workers {
        worker.flush()?;
        all.merge(&worker.measured);
    }
    Ok(all)
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
