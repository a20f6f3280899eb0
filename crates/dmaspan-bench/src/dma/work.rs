//! The work of a thread: fill, map, wait, unmap, and again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dmaspan::dma::{self, DeviceConfig, DmaConfig, Piece};
use dmaspan::iommu::iova;
use dmaspan::{Direction, DmaAddr};
use dmaspan_linux::{Memory, UserPlatform};
use dmaspan_sim::walker::Access;

use super::latency::Latency;
use super::plan::Case;
use crate::crew::{self, Gate};
use crate::failed::Failed;
use crate::models::unwalked::{MappedBy, Mapper, Told, UnwalkedDma};
use dmaspan_cli::stats::nanoseconds;

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
pub(crate) type Tables = UnwalkedDma<UserPlatform>;

/// A domain of its own for one way of mapping.
pub(crate) fn tables(case: &Case, by: MappedBy) -> Result<Tables, Failed> {
    let bytes = TABLE_BYTES.saturating_mul(case.threads).min(MOST_TABLE_BYTES);
    let cpus = usize::try_from(case.threads).unwrap_or(usize::MAX);
    let config = DmaConfig { flush: case.flush, ..DmaConfig::new(cpus) };
    let configs = (config, DeviceConfig::bits(case.bits));
    UnwalkedDma::new(by, bytes, configs, UserPlatform).map_err(|error| case.refused(error))
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
    pub(crate) mapper: M,
    pub(crate) tables: &'r Tables,
    pub(crate) memory: &'r Memory,
    pub(crate) pieces: &'r [Piece],
    pub(crate) case: &'r Case,
    pub(crate) measured: Measured,
}

impl<M: Mapper> Worker<'_, M> {
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
                self.check(self.mapper.addr(&mapped))?;
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
            let base = self.memory.user_range().start().get();
            for Piece { span, .. } in self.pieces {
                let offset = span.paddr().get() - base;
                self.memory.fill_words(offset, span.len(), |_| FILLING)?;
            }
        }
        Ok(())
    }

    /// Whether a device would find the buffer.
    fn check(&self, addr: DmaAddr) -> Result<(), Failed> {
        let is_write = self.case.direction == Direction::FromDevice;
        let access = if is_write { Access::Write } else { Access::Read };
        let (Some(first), Some(last)) = (self.pieces.first(), self.pieces.last()) else {
            return Ok(());
        };
        let end = DmaAddr::new(addr.get() + self.case.bytes() - 1);
        for (addr, expected) in [(addr, first.span.paddr()), (end, last.span.last())] {
            let found = self.tables.found(addr, access);
            if found != Some(expected) {
                return Err(Failed::new(format_args!(
                    "the device would find {found:x?} at {addr}, where {expected} was mapped"
                )));
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
