//! `dmaspan-bench container`: what mapping a user's memory for devices costs, by page and by span.
//!
//! ```text
//! plan (cases) ──► ground (simulated memory, a space) ──► runs of both ways ──► report
//!                                                  work: Type1Before, Container
//! ```

pub(crate) mod args;
mod ground;
mod plan;
mod report;
mod work;

use dmaspan_cli::progress::Progress;
use ground::Ground;
use plan::Case;
pub(crate) use plan::Plan;
use work::{Measured, OPS, Way};

use crate::failed::Failed;
use crate::report::Report;

/// Measures what is planned.
///
/// # Errors
///
/// For the first case that could not be mapped or left something behind.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, Failed> {
    let mut rows = Vec::new();
    for case in &plan.cases {
        progress.begin(format!("container: {}", case.name), u64::from(plan.runs) + 1);
        let measured = measure(plan, case, progress).map_err(Failed::at(case.name))?;
        rows.extend((0..OPS.len()).map(|op| report::row(case, op, &measured)));
    }
    Ok(report::report(plan, rows))
}

/// Measures a case by page and by span, in turn, each in tables of its own.
fn measure(plan: &Plan, case: &Case, progress: &Progress) -> Result<[Measured; 2], Failed> {
    let ground = &Ground::new(case)?;
    let [by_page, by_span] = &Way::both(ground)?;
    let [mut old, mut new] = [Measured::default(), Measured::default()];
    // What is timed once is timed cold. The other runs find their memory in use.
    if case.per_page_runs > 1 {
        work::run(by_page, ground, &mut Measured::default())?;
    }
    work::run(by_span, ground, &mut Measured::default())?;
    progress.advance(1);
    for run in 0..plan.runs {
        if run < case.per_page_runs {
            work::run(by_page, ground, &mut old)?;
        }
        work::run(by_span, ground, &mut new)?;
        progress.advance(1);
    }
    by_page.check_empty(ground)?;
    by_span.check_empty(ground)?;
    Ok([old, new])
}
