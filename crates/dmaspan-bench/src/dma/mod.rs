//! `dmaspan-bench dma`: what mapping a buffer for a device costs, from IOVA to flush.
//!
//! ```text
//! plan (cases, buffers) ──► turns of both ways (threads: work) ──► latency ──► report
//! ```

pub(crate) mod args;
mod latency;
mod plan;
mod report;
mod work;

use std::time::Duration;

use dmaspan::dma::Segment;
use dmaspan_cli::progress::Progress;

use args::{DmaArgs, Mode};
use plan::{Case, Plan};
use work::{Calling, List, Mapper, Measured, Rig, Single, Tables, Worker};

use crate::failed::Failed;
use crate::report::Report;
use crate::time::{self, Effort};

/// How long caches are warmed up before a case is measured.
const WARM_UP: Duration = Duration::from_millis(1);

/// What `args` ask for.
pub(crate) fn plan(args: &DmaArgs) -> Result<Plan, Failed> {
    Plan::new(args)
}

/// Measures what is planned.
///
/// # Errors
///
/// For the first case that could not be mapped or was not mapped right.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, Failed> {
    let bench = Bench { effort: plan.effort, clock_ns: time::clock_ns(), progress };
    let cases = u64::try_from(plan.cases.len()).unwrap_or(u64::MAX);
    progress.begin("DMA mapping".to_owned(), cases * u64::from(plan.effort.rounds));
    let rows = plan.cases.iter().map(|case| Ok(report::row(case, &bench.measure(case)?)));
    let rows = rows.collect::<Result<_, Failed>>()?;
    Ok(report::report(plan, rows, bench.clock_ns))
}

struct Bench<'a> {
    effort: Effort,
    clock_ns: u64,
    progress: &'a Progress,
}

impl Bench<'_> {
    /// Measures a case: by page and batched, each in tables of its own.
    fn measure(&self, case: &Case) -> Result<[Measured; 2], Failed> {
        let memory = &plan::memory(case)?;
        let buffers = plan::buffers(case, memory)?;
        let [by_page, batched] =
            [Rig::new(case, Tables::pages_root)?, Rig::new(case, Tables::root)?];
        let (direction, tables) = (case.direction, batched.tables());
        let pages = buffers.iter().map(|buffer| {
            let caller = by_page.tables().caller(case.waiting());
            let mapper = Calling { caller, pieces: &buffer.pieces, direction };
            Worker::new(case, memory, &by_page, buffer, mapper)
        });
        let pages = pages.collect();
        let measured = match case.mode {
            Mode::Single => {
                let rig = &batched;
                let whole = buffers.iter().flat_map(|buffer| {
                    buffer.pieces.iter().map(move |piece| {
                        let mapper = Single { tables, piece, direction };
                        Worker::new(case, memory, rig, buffer, mapper)
                    })
                });
                self.turns(case, pages, whole.collect())?
            }
            Mode::Sg => {
                let whole = buffers.iter().map(|buffer| {
                    let pieces = &buffer.pieces;
                    let segments = vec![Segment::default(); pieces.len()];
                    let mapper = List { tables, pieces, segments, direction };
                    Worker::new(case, memory, &batched, buffer, mapper)
                });
                self.turns(case, pages, whole.collect())?
            }
        };
        by_page.check_empty()?;
        batched.check_empty()?;
        Ok(measured)
    }

    /// Lets both ways work in turn.
    fn turns<A: Mapper, B: Mapper>(
        &self,
        case: &Case,
        mut by_page: Vec<Worker<'_, A>>,
        mut batched: Vec<Worker<'_, B>>,
    ) -> Result<[Measured; 2], Failed> {
        work::turn(&mut by_page, WARM_UP, self.clock_ns)?;
        work::turn(&mut batched, WARM_UP, self.clock_ns)?;
        by_page.iter_mut().for_each(|worker| worker.measured = Measured::default());
        batched.iter_mut().for_each(|worker| worker.measured = Measured::default());
        let length = self.effort.turn_of(case.threads);
        for _ in 0..self.effort.rounds {
            work::turn(&mut by_page, length, self.clock_ns)?;
            work::turn(&mut batched, length, self.clock_ns)?;
            self.progress.advance(1);
        }
        Ok([work::finish(by_page)?, work::finish(batched)?])
    }
}
