//! How long a case takes: rounds of both ways in turn, and their medians.

use std::panic;
use std::thread;
use std::time::{Duration, Instant};

use crate::models::unwalked::Unwalked;
use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{ConfigError, Format};

use super::cases::{Case, Extent, Shape};
use super::work::{BenchError, Way, Worker};
use dmaspan_cli::stats::{median, nanoseconds};

/// The ways, in the order in which a round takes them.
const WAYS: [Way; 2] = [Way::PerPage, Way::Batched];

/// Where tables lie: low enough for formats whose tables must lie below 4 GiB.
const TABLES_AT: PhysAddr = PhysAddr::new(1 << 30);

/// How long to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Effort {
    /// How many times each way is timed.
    pub(crate) rounds: u32,
    /// How long threads work in a round, for at least one pass.
    round: Duration,
    /// The same where there are more threads than CPUs: long enough for all to have their turn.
    shared_round: Duration,
    /// How much a thread maps in each pass.
    pub(crate) extent: Extent,
}

impl Effort {
    /// For figures.
    pub(crate) const FULL: Self = Self {
        rounds: 7,
        round: Duration::from_millis(4),
        shared_round: Duration::from_millis(16),
        // The tables of 8192 pages are larger than a first-level cache.
        extent: Extent { pages_in_pass: 8192, bulk_bytes: 16 << 30 },
    };
    /// For seeing that everything works.
    pub(crate) const QUICK: Self = Self {
        rounds: 1,
        round: Duration::ZERO,
        shared_round: Duration::ZERO,
        extent: Extent { pages_in_pass: 512, bulk_bytes: 1 << 30 },
    };
}

/// How long one range takes, in picoseconds: the median round, and of it the median pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RangeTime {
    pub(crate) map_ps: u64,
    pub(crate) unmap_ps: u64,
}

/// Both ways of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Times {
    pub(crate) per_page: RangeTime,
    pub(crate) batched: RangeTime,
}

/// Measures a case of a format: each way in a table of its own, and `threads` threads in as many
/// regions of it.
///
/// # Errors
///
/// [`BenchError`]: what was mapped leads elsewhere or is there after the unmap, or the tables
/// refused something.
pub(crate) fn measure<F: Format>(
    new_format: fn() -> Result<F, ConfigError>,
    case: &Case,
    threads: usize,
    effort: Effort,
) -> Result<Times, BenchError> {
    let shape = Shape::of(&new_format()?);
    let region_bytes = shape.region_bytes(case);
    let table_bytes = shape.table_bytes(case, u64::try_from(threads).unwrap_or(u64::MAX));
    let mut tables = Vec::new();
    for _ in WAYS {
        // Memory is only used once tables lie in it.
        tables.push(Unwalked::new(new_format()?, TABLES_AT, table_bytes)?);
    }
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let length = if threads > cpus { effort.shared_round } else { effort.round };
    let clock_ns = clock_ns();
    let mut rounds = [Rounds::default(), Rounds::default()];
    let mut crews = Vec::new();
    for (table, way) in tables.iter_mut().zip(WAYS) {
        let regions = table.regions(region_bytes).take(threads);
        let mut workers: Vec<_> = regions.map(|region| Worker::new(region, case, way)).collect();
        // This allocates their tables too.
        workers.iter_mut().try_for_each(Worker::checked_pass)?;
        crews.push(workers);
    }
    for _ in 0..effort.rounds {
        for (workers, rounds) in crews.iter_mut().zip(&mut rounds) {
            rounds.add(&round(workers, length)?, case.ranges, clock_ns);
        }
    }
    drop(crews);
    tables.iter_mut().try_for_each(check_empty)?;
    let [per_page, batched] = rounds.map(|rounds| rounds.medians());
    Ok(Times { per_page, batched })
}

/// Nanoseconds of each pass of a round.
#[derive(Debug, Default)]
struct Passes {
    map_ns: Vec<u64>,
    unmap_ns: Vec<u64>,
}

/// The rounds of one way so far, in picoseconds a range.
#[derive(Debug, Default)]
struct Rounds {
    map_ps: Vec<u64>,
    unmap_ps: Vec<u64>,
}

impl Rounds {
    /// Adds a round of passes of so many ranges: the median pass, since those in which a thread
    /// waited for a CPU say nothing of the tables, without what looking at the clock took.
    fn add(&mut self, passes: &Passes, ranges: u64, clock_ns: u64) {
        let per_range = |ns: &[u64]| {
            let ns = median(ns).saturating_sub(clock_ns);
            ns.saturating_mul(1000) / ranges.max(1)
        };
        self.map_ps.push(per_range(&passes.map_ns));
        self.unmap_ps.push(per_range(&passes.unmap_ns));
    }

    fn medians(&self) -> RangeTime {
        RangeTime { map_ps: median(&self.map_ps), unmap_ps: median(&self.unmap_ps) }
    }
}

/// What looking at the clock twice takes.
fn clock_ns() -> u64 {
    let looks: Vec<u64> = (0..1001).map(|_| nanoseconds(Instant::now().elapsed())).collect();
    median(&looks)
}

/// Maps and unmaps until the time is over, once at least.
fn passes<F: Format>(worker: &mut Worker<'_, F>, length: Duration) -> Result<Passes, BenchError> {
    let mut passes = Passes::default();
    let start = Instant::now();
    loop {
        let begin = Instant::now();
        worker.map_all()?;
        let mapped = Instant::now();
        worker.unmap_all()?;
        let end = Instant::now();
        passes.map_ns.push(nanoseconds(mapped - begin));
        passes.unmap_ns.push(nanoseconds(end - mapped));
        if end - start >= length {
            return Ok(passes);
        }
    }
}

/// All workers at once, each in a thread of its own.
fn round<F: Format>(workers: &mut [Worker<'_, F>], length: Duration) -> Result<Passes, BenchError> {
    thread::scope(|scope| {
        let mut running = Vec::new();
        for worker in workers {
            let thread = thread::Builder::new().spawn_scoped(scope, move || passes(worker, length));
            running.push(thread.map_err(|error| BenchError::NoThread(error.to_string()))?);
        }
        let mut all = Passes::default();
        for thread in running {
            let passes = thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))?;
            all.map_ns.extend(passes.map_ns);
            all.unmap_ns.extend(passes.unmap_ns);
        }
        Ok(all)
    })
}

/// Whether nothing is left in a table.
fn check_empty<F: Format>(table: &mut Unwalked<F>) -> Result<(), BenchError> {
    let leaves = table.whole().clean_up()?;
    // A tree that grew keeps its levels.
    let tables = if F::GROWS { 0 } else { table.tables() - 1 };
    if leaves > 0 || tables > 0 {
        return Err(BenchError::Left { leaves, tables });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use dmaspan::io_pgtable::{
        AmdV1, AmdV1Config, ArmLpaeS1, ArmLpaeS1Config, ArmV7s, ArmV7sConfig, DirtyTracking,
    };
    use dmaspan::{Iova, Prot};
    use dmaspan_sim::mock::MockFormat;

    use super::*;

    #[test]
    fn a_round_is_its_median_pass_by_range_without_the_clock() {
        let mut rounds = Rounds::default();
        let passes = Passes { map_ns: vec![9_000_000, 2010, 2000], unmap_ns: vec![110] };
        rounds.add(&passes, 4, 10);
        assert_eq!(rounds.medians(), RangeTime { map_ps: 500_000, unmap_ps: 25_000 });
        rounds.add(&Passes { map_ns: vec![3], unmap_ns: vec![3] }, 1, 10);
        rounds.add(&Passes { map_ns: vec![11], unmap_ns: vec![11] }, 1, 10);
        assert_eq!(rounds.medians(), RangeTime { map_ps: 1000, unmap_ps: 1000 });
    }

    /// Maps every case of a format at its full length once and unmaps it again.
    fn map_in_full<F: Format>(name: &str, new_format: fn() -> Result<F, ConfigError>) {
        let shape = Shape::of(&new_format().unwrap());
        for threads in [1, 10] {
            for case in shape.cases(threads, Effort::FULL.extent) {
                let room = shape.table_bytes(&case, threads);
                let mut table = Unwalked::new(new_format().unwrap(), TABLES_AT, room).unwrap();
                let regions = table.regions(shape.region_bytes(&case));
                let regions = regions.take(usize::try_from(threads).unwrap());
                let mut workers: Vec<_> =
                    regions.map(|region| Worker::new(region, &case, Way::Batched)).collect();
                let mapped = workers.iter().try_for_each(Worker::map_all);
                assert_eq!(mapped, Ok(()), "{name}, {threads} threads: {}", case.name);
                workers.iter_mut().for_each(|worker| worker.unmap_all().unwrap());
                drop(workers);
                check_empty(&mut table).unwrap();
            }
        }
    }

    #[test]
    fn the_tables_of_every_case_have_room_whatever_the_size_of_pages_and_tables() {
        map_in_full("mock", || MockFormat::new(43, DirtyTracking::Off));
        map_in_full("arm-lpae", || ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)));
        map_in_full("arm-lpae-64k", || ArmLpaeS1::<16>::new(ArmLpaeS1Config::new(48, 48)));
        map_in_full("arm-v7s", || ArmV7s::new(ArmV7sConfig::new(32, 32)));
        map_in_full("amd-v1", || AmdV1::new(AmdV1Config::new(64, 52)));
    }

    #[test]
    fn leaves_and_tables_that_stay_are_found() {
        let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
        let mut table = Unwalked::new(format, TABLES_AT, 1 << 20).unwrap();
        assert_eq!(check_empty(&mut table), Ok(()));
        let iova = Iova::new(0x5000);
        let region = table.whole();
        region.owned().map_pages(iova, PhysAddr::new(0), 4096, 1, Prot::READ).1.unwrap();
        assert_eq!(check_empty(&mut table), Err(BenchError::Left { leaves: 1, tables: 3 }));
    }

    #[test]
    fn a_case_that_meets_another_mapping_is_an_error() {
        let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
        let case = Shape::of(&format).cases(1, Effort::QUICK.extent).swap_remove(0);
        let mut table = Unwalked::new(format, TABLES_AT, 1 << 20).unwrap();
        let region = table.whole();
        let last = Iova::new(case.bytes * (case.ranges - 1));
        region.owned().map_pages(last, PhysAddr::new(0), 4096, 1, Prot::READ).1.unwrap();
        for way in WAYS {
            let mut worker = Worker::new(table.whole(), &case, way);
            let error = worker.checked_pass().unwrap_err();
            assert!(matches!(error, BenchError::Table(_)), "{error}");
            worker.unmap_all().unwrap();
            let region = table.whole();
            region.owned().map_pages(last, PhysAddr::new(0), 4096, 1, Prot::READ).1.unwrap();
        }
    }
}
