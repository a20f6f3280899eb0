//! `dmaspan-bench swiotlb`: what bouncing a buffer costs, with one lock and with areas.
//!
//! ```text
//! plan (cases) ──► work (both pools) ──► load (jobs, turn by turn) ──► report
//!                                          └─ check: what a device finds
//! ```

pub(crate) mod args;
mod check;
mod load;
mod plan;
pub(crate) mod report;
mod work;

use std::thread;

use crate::models::uncopied::Uncopied;
use dmaspan_linux::{BounceMemory, Instructions};

use args::SwiotlbArgs;
use dmaspan_cli::progress::Progress;
use load::Measured;
use plan::{Case, Copies};
pub(crate) use plan::{Plan, UsageError};
use report::{Report, Row};
use work::{Before, Buffers, Now, Slots, SwiotlbBenchError, Vanilla, Way};

/// Why not everything was measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchFailed {
    /// There is no memory for buffers.
    #[error("no memory for the buffers: {0}")]
    NoBuffers(SwiotlbBenchError),
    /// In a case something refused or was wrong.
    #[error("{case} with {threads} at once, {way}: {source}")]
    Case {
        /// Which one.
        case: &'static str,
        /// How many jobs it had.
        threads: u64,
        /// With which pool.
        way: &'static str,
        /// What.
        source: SwiotlbBenchError,
    },
}

/// What `args` ask for on this machine.
///
/// # Errors
///
/// [`UsageError`] where that cannot be done.
pub(crate) fn plan(args: &SwiotlbArgs) -> Result<Plan, UsageError> {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    Plan::new(args, u64::try_from(cpus).unwrap_or(1))
}

/// Measures what is planned.
///
/// # Errors
///
/// [`BenchFailed`] without memory, and for the first case in which a pool refused or something was
/// wrong.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, BenchFailed> {
    let uncounted = Instructions::of_this_thread().err().map(|error| error.to_string());
    let rounds = plan.cases.iter().map(|case| u64::from(plan.effort(case).rounds) + 1);
    progress.begin("bounce buffers".to_owned(), rounds.sum());
    let most = plan.cases.iter().map(Case::bytes).max().unwrap_or(0);
    let memory = work::leak(most).map_err(BenchFailed::NoBuffers)?;
    let rows = plan.cases.iter().map(|case| {
        let buffers = Buffers::new(memory, case);
        let measured = match case.copies {
            Copies::Made => measure(plan, case, buffers, |slots| slots, progress),
            Copies::LeftOut => measure(plan, case, buffers, Uncopied, progress),
        };
        measured.map_err(|(way, source)| {
            let &Case { name: case, threads, .. } = case;
            BenchFailed::Case { case, threads, way, source }
        })
    });
    let rows = rows.collect::<Result<_, _>>()?;
    progress.clear();
    Ok(Report::new(plan, uncounted, rows))
}

/// What failed, and in which pool.
type Failed = (&'static str, SwiotlbBenchError);

/// Measures a case with both pools, in turn, each in memory of its own that `wrap` makes of slots.
fn measure<M: Slots>(
    plan: &Plan,
    case: &Case,
    buffers: Buffers,
    wrap: impl Fn(BounceMemory) -> M,
    progress: &Progress,
) -> Result<Row, Failed> {
    let in_vanilla = |source| (Vanilla::<M>::NAME, source);
    let in_now = |source| (Now::<M>::NAME, source);
    let before = work::slots(plan.pool).and_then(|slots| Ok(Before::new(wrap(slots))?));
    let before = before.map_err(in_vanilla)?;
    let vanilla = Vanilla::new(&before, buffers, case);
    let now = work::slots(plan.pool)
        .and_then(|slots| Now::new(wrap(slots), plan.cpus, buffers, case))
        .map_err(in_now)?;
    let effort = plan.effort(case);
    let (mut old, mut new) = (Measured::default(), Measured::default());
    check::fill(&now, case).map_err(in_now)?;
    for round in 0..=effort.rounds {
        load::turn(&vanilla, case, effort.turn, &mut old).map_err(in_vanilla)?;
        load::turn(&now, case, effort.turn, &mut new).map_err(in_now)?;
        if round == 0 {
            // Slots and caches were used for the first time.
            (old, new) = (Measured::default(), Measured::default());
        }
        progress.advance(1);
    }
    Ok(Row::new(case, &old, &new))
}
