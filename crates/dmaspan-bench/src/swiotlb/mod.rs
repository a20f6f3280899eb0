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
mod report;
mod work;

use dmaspan_cli::progress::Progress;
use load::Measured;
use plan::Case;
pub(crate) use plan::Plan;
use work::Buffers;

use crate::failed::Failed;
use crate::report::{Fields, Report};

/// Measures what is planned.
///
/// # Errors
///
/// Without memory, and for the first case in which a pool refused or something was wrong.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, Failed> {
    let rounds = plan.cases.iter().map(|case| u64::from(plan.effort(case).rounds) + 1);
    progress.begin("bounce buffers".to_owned(), rounds.sum());
    let most = plan.cases.iter().map(Case::bytes).max().unwrap_or(0);
    let memory = work::leak(most).map_err(Failed::at("no memory for the buffers"))?;
    let rows = plan.cases.iter().map(|case| {
        let buffers = Buffers::new(memory, case);
        let measure = if case.copies { measure::<true> } else { measure::<false> };
        measure(plan, case, buffers, progress)
    });
    Ok(report::report(plan, rows.collect::<Result<_, _>>()?))
}

/// Measures a case with both pools, in turn, each in memory of its own.
fn measure<const COPIED: bool>(
    plan: &Plan,
    case: &Case,
    buffers: Buffers,
    progress: &Progress,
) -> Result<Fields, Failed> {
    let of = |way| Failed::at(format!("{} with {} at once, {way}", case.name, case.threads));
    let vanilla = work::vanilla::<COPIED>(plan.pool).map_err(of("vanilla"))?;
    let now = work::now::<COPIED>(plan.pool, plan.cpus).map_err(of("now"))?;
    let effort = plan.effort(case);
    let [mut old, mut new] = [Measured::default(), Measured::default()];
    check::fill(buffers, case).map_err(of("now"))?;
    for round in 0..=effort.rounds {
        let turn = load::turn(&vanilla, buffers, case, effort.turn, &mut old);
        turn.map_err(of("vanilla"))?;
        let turn = load::turn(&now, buffers, case, effort.turn, &mut new);
        turn.map_err(of("now"))?;
        if round == 0 {
            // Slots and caches were used for the first time.
            [old, new] = [Measured::default(), Measured::default()];
        }
        progress.advance(1);
    }
    Ok(report::row(case, &old, &new))
}
