//! `dmaspan-bench dma`: what mapping a buffer for a device costs, from IOVA to flush.
//!
//! ```text
//! plan (cases, buffers) ──► turns of both ways (threads: work) ──► latency ──► report
//! ```

pub(crate) mod args;
mod latency;
mod plan;
pub(crate) mod report;
mod work;

use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dmaspan::dma::Segment;

use args::Mode;
use dmaspan_cli::progress::Progress;
use dmaspan_cli::stats::{median, nanoseconds};
pub(crate) use plan::Plan;
use plan::{Case, Effort};
use report::{Report, Row};
use work::{Calling, DmaBenchError, List, Mapper, Measured, Rig, Single, Tables, Worker};

/// How long caches are warmed up before a case is measured.
const WARM_UP: Duration = Duration::from_millis(1);

/// Measures what is planned.
///
/// # Errors
///
/// [`DmaBenchError`] for the first case that could not be mapped or was not mapped right.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, DmaBenchError> {
    let bench = Bench {
        effort: plan.effort,
        cpus: thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64),
        clock_ns: clock_ns(),
        progress,
    };
    let cases = u64::try_from(plan.cases.len()).unwrap_or(u64::MAX);
    progress.begin("DMA mapping".to_owned(), cases * u64::from(plan.effort.rounds));
    let rows = plan.cases.iter().map(|case| {
        let (per_page, batched) = bench.measure(case)?;
        Ok(Row::new(case, &per_page, &batched))
    });
    let rows = rows.collect::<Result<_, DmaBenchError>>()?;
    progress.clear();
    Ok(Report::new(plan, rows, bench.cpus, bench.clock_ns))
}

/// What looking at the clock twice takes.
fn clock_ns() -> u64 {
    let look = |_| {
        let begin = Instant::now();
        nanoseconds(Instant::now() - begin)
    };
    let looks: Vec<u64> = (0..10_001).map(look).collect();
    median(&looks)
}

struct Bench<'a> {
    effort: Effort,
    cpus: u64,
    clock_ns: u64,
    progress: &'a Progress,
}

impl Bench<'_> {
    /// Measures a case: by page and batched, each in tables of its own.
    fn measure(&self, case: &Case) -> Result<(Measured, Measured), DmaBenchError> {
        let memory = &plan::memory(case)?;
        let buffers = plan::buffers(case, memory)?;
        let per_page = Rig::new(case, Tables::pages_root)?;
        let batched = Rig::new(case, Tables::root)?;
        let (direction, measured) = (case.direction, Measured::new);
        let pages = buffers.iter().map(|buffer| {
            let rig = &per_page;
            let caller = rig.tables().caller(case.waiting());
            let mapper = Calling { caller, pieces: &buffer.pieces, direction };
            Worker { mapper, rig, memory, buffer, case, measured: measured() }
        });
        let rig = &batched;
        let tables = rig.tables();
        let measured = match case.mode {
            Mode::Single => {
                let workers = buffers.iter().flat_map(|buffer| {
                    buffer.pieces.iter().map(move |piece| {
                        let mapper = Single { tables, piece, direction };
                        Worker { mapper, rig, memory, buffer, case, measured: measured() }
                    })
                });
                self.turns(case, pages.collect(), workers.collect())?
            }
            Mode::Sg => {
                let workers = buffers.iter().map(|buffer| {
                    let pieces = &buffer.pieces;
                    let segments = vec![Segment::default(); pieces.len()];
                    let mapper = List { tables, pieces, segments, direction };
                    Worker { mapper, rig, memory, buffer, case, measured: measured() }
                });
                self.turns(case, pages.collect(), workers.collect())?
            }
        };
        per_page.check_empty()?;
        batched.check_empty()?;
        Ok(measured)
    }

    /// Lets both ways work in turn.
    fn turns<A: Mapper, B: Mapper>(
        &self,
        case: &Case,
        mut per_page: Vec<Worker<'_, A>>,
        mut batched: Vec<Worker<'_, B>>,
    ) -> Result<(Measured, Measured), DmaBenchError> {
        self.turn(&mut per_page, WARM_UP)?;
        self.turn(&mut batched, WARM_UP)?;
        per_page.iter_mut().for_each(|worker| worker.measured = Measured::new());
        batched.iter_mut().for_each(|worker| worker.measured = Measured::new());
        let length =
            if case.threads > self.cpus { self.effort.shared_turn } else { self.effort.turn };
        for _ in 0..self.effort.rounds {
            self.turn(&mut per_page, length)?;
            self.turn(&mut batched, length)?;
            self.progress.advance(1);
        }
        Ok((finish(per_page)?, finish(batched)?))
    }

    /// Lets all workers work at once, each in a thread of its own.
    fn turn<M: Mapper>(
        &self,
        workers: &mut [Worker<'_, M>],
        length: Duration,
    ) -> Result<(), DmaBenchError> {
        let (stop, clock_ns) = (&AtomicBool::new(false), self.clock_ns);
        thread::scope(|scope| {
            let mut running = Vec::new();
            let mut result = Ok(());
            for worker in workers {
                let work = move || worker.work(stop, clock_ns);
                match thread::Builder::new().spawn_scoped(scope, work) {
                    Ok(thread) => running.push(thread),
                    Err(error) => {
                        result = Err(DmaBenchError::NoThread(error));
                        break;
                    }
                }
            }
            if result.is_ok() {
                thread::sleep(length);
            }
            stop.store(true, Ordering::Relaxed);
            for thread in running {
                let worked = thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
                result = result.and(worked);
            }
            result
        })
    }
}

/// Syncs what waits, and adds up what all workers measured.
fn finish<M: Mapper>(workers: Vec<Worker<'_, M>>) -> Result<Measured, DmaBenchError> {
    let mut all = Measured::new();
    for mut worker in workers {
        worker.flush()?;
        all.merge(&worker.measured);
    }
    Ok(all)
}
