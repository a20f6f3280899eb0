//! The timing of a case: rounds of both ways in turn, and their medians.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{ConfigError, Format};
use dmaspan_cli::stats::{median, nanoseconds};

use super::cases::{Case, Extent, Shape};
use super::work::{Way, Worker, refused};
use crate::crew::{self, Gate};
use crate::failed::Failed;
use crate::models::unwalked::Unwalked;
use crate::time::{self, Effort, Series};

/// The ways, in the order in which a round takes them.
const WAYS: [Way; 2] = [Way::PerPage, Way::Batched];

/// Where tables lie: low enough for formats whose tables must lie below 4 GiB.
const TABLES_AT: PhysAddr = PhysAddr::new(1 << 30);

/// How long to measure, and how much a thread maps in each pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) effort: Effort,
    pub(crate) extent: Extent,
}

/// For figures. The tables of 8192 pages are larger than a first-level cache.
pub(crate) const FULL: Load = Load {
    effort: Effort::new(7, 4000).shared(16_000),
    extent: Extent { pages_in_pass: 8192, bulk_bytes: 16 << 30 },
};
/// For seeing that everything works.
pub(crate) const QUICK: Load =
    Load { effort: Effort::new(1, 0), extent: Extent { pages_in_pass: 512, bulk_bytes: 1 << 30 } };

/// How long a range takes one way, over all rounds: to map, to unmap.
pub(crate) type Times = [Series; 2];

/// Measures a case of a format: each way in a table of its own, and `threads` threads in as many
/// regions of it.
///
/// # Errors
///
/// What was mapped leads elsewhere or is there after the unmap, or the tables refused something.
pub(crate) fn measure<F: Format>(
    new_format: fn() -> Result<F, ConfigError>,
    case: &Case,
    threads: u64,
    load: Load,
) -> Result<[Times; 2], Failed> {
    let shape = Shape::of(&new_format()?);
    let region_bytes = shape.region_bytes(case);
    let table_bytes = shape.table_bytes(case, threads);
    let mut tables = Vec::new();
    for _ in WAYS {
        // Memory is only used once tables lie in it.
        tables.push(Unwalked::new(new_format()?, TABLES_AT, table_bytes).map_err(refused)?);
    }
    let length = load.effort.turn_of(threads);
    let clock_ns = time::clock_ns();
    let mut times = [Times::default(), Times::default()];
    let mut crews = Vec::new();
    for (table, way) in tables.iter_mut().zip(WAYS) {
        let regions = (0..threads).zip(table.regions(region_bytes)).map(|(_, region)| region);
        let mut workers: Vec<_> = regions.map(|region| Worker::new(region, case, way)).collect();
        // This allocates their tables too.
        workers.iter_mut().try_for_each(Worker::checked_pass)?;
        crews.push(workers);
    }
    for _ in 0..load.effort.rounds {
        for (workers, times) in crews.iter_mut().zip(&mut times) {
            let took = crew::for_a_while(workers.iter_mut(), length, passes)?;
            add(times, &took, case.ranges, clock_ns);
        }
    }
    drop(crews);
    tables.iter_mut().try_for_each(check_empty)?;
    Ok(times)
}

/// Nanoseconds of each pass of a thread: of its maps, of its unmaps.
type Passes = [Vec<u64>; 2];

/// Adds a round of passes of so many ranges: the median pass, since those in which a thread waited
/// for a CPU say nothing of the tables, without what looking at the clock took.
fn add(times: &mut Times, passes: &[Passes], ranges: u64, clock_ns: u64) {
    for (op, series) in times.iter_mut().enumerate() {
        let all: Vec<u64> = passes.iter().flat_map(|passes| &passes[op]).copied().collect();
        series.add(median(&all).saturating_sub(clock_ns), ranges);
    }
}

/// Maps and unmaps until the time is over, once at least.
fn passes<F: Format>(
    worker: &mut Worker<'_, F>,
    gate: &Gate,
    stop: &AtomicBool,
) -> Result<Passes, Failed> {
    let mut passes = Passes::default();
    gate.pass();
    loop {
        let begin = Instant::now();
        worker.map_all()?;
        let mapped = Instant::now();
        worker.unmap_all()?;
        let end = Instant::now();
        passes[0].push(nanoseconds(mapped - begin));
        passes[1].push(nanoseconds(end - mapped));
        if stop.load(Ordering::Relaxed) {
            return Ok(passes);
        }
    }
}

/// Whether nothing is left in a table.
fn check_empty<F: Format>(table: &mut Unwalked<F>) -> Result<(), Failed> {
    let leaves = table.whole().clean_up().map_err(refused)?;
    // A tree that grew keeps its levels.
    let tables = if F::GROWS { 0 } else { table.tables() - 1 };
    if leaves == 0 && tables == 0 {
        return Ok(());
    }
    Err(Failed::new(format_args!(
        "left after all unmaps: {leaves} leaves, {tables} tables besides the root"
    )))
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
        let mut times = Times::default();
        let medians = |times: &Times| times.each_ref().map(Series::each);
        add(&mut times, &[[vec![9_000_000, 2010], vec![]], [vec![2000], vec![110]]], 4, 10);
        assert_eq!(medians(&times), [500.0, 25.0]);
        add(&mut times, &[[vec![3], vec![3]]], 1, 10);
        add(&mut times, &[[vec![11], vec![11]]], 1, 10);
        assert_eq!(medians(&times), [1.0, 1.0]);
    }

    /// Maps every case of a format at its full length once and unmaps it again.
    fn map_in_full<F: Format>(name: &str, new_format: fn() -> Result<F, ConfigError>) {
        let shape = Shape::of(&new_format().unwrap());
        for threads in [1, 10] {
            for case in shape.cases(threads, FULL.extent) {
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
        let error = check_empty(&mut table).unwrap_err().to_string();
        assert!(error.ends_with("1 leaves, 3 tables besides the root"), "{error}");
    }

    #[test]
    fn a_case_that_meets_another_mapping_is_an_error() {
        let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
        let case = Shape::of(&format).cases(1, QUICK.extent).swap_remove(0);
        let mut table = Unwalked::new(format, TABLES_AT, 1 << 20).unwrap();
        let region = table.whole();
        let last = Iova::new(case.bytes * (case.ranges - 1));
        region.owned().map_pages(last, PhysAddr::new(0), 4096, 1, Prot::READ).1.unwrap();
        for way in WAYS {
            let mut worker = Worker::new(table.whole(), &case, way);
            let error = worker.checked_pass().unwrap_err();
            assert!(error.to_string().starts_with("the table refused: "), "{error}");
            worker.unmap_all().unwrap();
            let region = table.whole();
            region.owned().map_pages(last, PhysAddr::new(0), 4096, 1, Prot::READ).1.unwrap();
        }
    }
}
