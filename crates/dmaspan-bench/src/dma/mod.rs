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

use args::Mode;
use plan::Case;
pub(crate) use plan::Plan;
use work::{Measured, Worker};

use crate::failed::Failed;
use crate::models::unwalked::{Caller, List, MappedBy, Mapper, Single};
use crate::report::Report;
use crate::time;

/// How long caches are warmed up before a case is measured.
const WARM_UP: Duration = Duration::from_millis(1);

/// Measures what is planned.
///
/// # Errors
///
/// For the first case that could not be mapped or was not mapped right.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, Failed> {
    let bench = Bench { plan, clock_ns: time::clock_ns(), progress };
    let cases = u64::try_from(plan.cases.len()).unwrap_or(u64::MAX);
    progress.begin("DMA mapping".to_owned(), cases * u64::from(plan.effort.rounds));
    let rows = plan.cases.iter().map(|case| Ok(report::row(case, &bench.measure(case)?)));
    let rows = rows.collect::<Result<_, Failed>>()?;
    Ok(report::report(plan, rows, bench.clock_ns))
}

struct Bench<'a> {
    plan: &'a Plan,
    clock_ns: u64,
    progress: &'a Progress,
}

impl Bench<'_> {
    /// Measures a case: by page and batched, each in tables of its own.
    fn measure(&self, case: &Case) -> Result<[Measured; 2], Failed> {
        let memory = &plan::memory(case)?;
        let buffers = plan::buffers(case, memory)?;
        let mut by_page = work::tables(case, MappedBy::Calls)?;
        let mut batched = work::tables(case, MappedBy::Device)?;
        let (direction, dma) = (case.direction, &batched);
        let pages = buffers.iter().map(|pieces| {
            let mapper = Caller::new(&by_page, pieces, direction, case.waiting());
            let measured = Measured::default();
            Worker { mapper, tables: &by_page, memory, pieces, case, measured }
        });
        let pages = pages.collect();
        let measured = match case.mode {
            Mode::Single => {
                let whole = buffers.iter().map(|pieces| {
                    let mapper = Single { dma, piece: &pieces[0], direction };
                    let measured = Measured::default();
                    Worker { mapper, tables: dma, memory, pieces, case, measured }
                });
                self.turns(case, pages, whole.collect())?
            }
            Mode::Sg => {
                let whole = buffers.iter().map(|pieces| {
                    let segments = vec![Segment::default(); pieces.len()];
                    let mapper = List { dma, pieces, segments, direction };
                    let measured = Measured::default();
                    Worker { mapper, tables: dma, memory, pieces, case, measured }
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
        let length = self.plan.effort.turn_of(case.threads);
        for _ in 0..self.plan.effort.rounds {
            work::turn(&mut by_page, length, self.clock_ns)?;
            work::turn(&mut batched, length, self.clock_ns)?;
            self.progress.advance(1);
        }
        Ok([work::finish(by_page)?, work::finish(batched)?])
    }
}
