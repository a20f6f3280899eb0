//! `dmaspan-bench container`: what mapping a user's memory for devices costs, by page and by span.
//!
//! ```text
//! plan (cases) ──► ground (simulated memory, a space) ──► runs of both ways ──► report
//!                                                  work: Type1Before, Container
//! ```

pub(crate) mod args;
mod plan;
pub(crate) mod report;
mod timing;
mod work;

use std::thread;

use dmaspan_linux::Instructions;

use args::ContainerArgs;
use dmaspan_cli::machine::Machine;
use dmaspan_cli::progress::Progress;
pub(crate) use plan::{Plan, UsageError};
use report::{Report, Row};
use timing::{Measured, Op};
use work::{ByPage, BySpan, ContainerBenchError, Ground, Way};

/// Which case could not be measured, and why.
#[derive(Debug, thiserror::Error)]
#[error("{case}: {source}")]
pub(crate) struct CaseFailed {
    case: &'static str,
    source: ContainerBenchError,
}

/// What `args` ask for on this machine.
///
/// # Errors
///
/// [`UsageError`] where that cannot be done.
pub(crate) fn plan(args: &ContainerArgs) -> Result<Plan, UsageError> {
    Plan::new(args, &Machine::read())
}

/// Measures what is planned.
///
/// # Errors
///
/// [`CaseFailed`] for the first case that could not be mapped or left something behind.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, CaseFailed> {
    let uncounted = Instructions::of_this_thread().err().map(|error| error.to_string());
    let mut rows = Vec::new();
    for case in &plan.cases {
        progress.begin(format!("container: {}", case.name), u64::from(plan.runs) + 1);
        let measured = measure(plan, case, progress);
        let (per_page, by_span) =
            measured.map_err(|source| CaseFailed { case: case.name, source })?;
        rows.extend(Op::ALL.map(|op| Row::new(case, op, &per_page, &by_span)));
    }
    progress.clear();
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    Ok(Report::new(plan, cpus, uncounted, rows))
}

/// Measures a case both ways, in turn, each in tables of its own.
fn measure(
    plan: &Plan,
    case: &plan::Case,
    progress: &Progress,
) -> Result<(Measured, Measured), ContainerBenchError> {
    let ground = Ground::new(case)?;
    let (by_page, by_span) = (ByPage::new(&ground)?, BySpan::new(&ground)?);
    let (mut old, mut new) = (Measured::default(), Measured::default());
    // What is timed once is timed cold. The other runs find their memory in use.
    if case.per_page_runs > 1 {
        timing::run(&by_page, &ground.shares, &mut Measured::default())?;
    }
    timing::run(&by_span, &ground.shares, &mut Measured::default())?;
    progress.advance(1);
    for run in 0..plan.runs {
        if run < case.per_page_runs {
            timing::run(&by_page, &ground.shares, &mut old)?;
        }
        timing::run(&by_span, &ground.shares, &mut new)?;
        progress.advance(1);
    }
    by_page.check_empty()?;
    by_span.check_empty()?;
    Ok((old, new))
}
