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

use args::SwiotlbArgs;
use dmaspan_cli::progress::Progress;
use dmaspan_linux::BounceMemory;
use load::Measured;
use plan::{Case, Copies, Plan};
use work::{Bounces, Buffers, Now, Slots, Vanilla};

use crate::failed::Failed;
use crate::models::uncopied::Uncopied;
use crate::report::{Fields, Report};
use crate::time;

/// What `args` ask for on this machine.
pub(crate) fn plan(args: &SwiotlbArgs) -> Result<Plan, Failed> {
    Plan::new(args, time::cpus())
}

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
        match case.copies {
            Copies::Made => measure(plan, case, buffers, |slots| slots, progress),
            Copies::LeftOut => measure(plan, case, buffers, Uncopied, progress),
        }
    });
    Ok(report::report(plan, rows.collect::<Result<_, _>>()?))
}

/// Measures a case with both pools, in turn, each in memory of its own that `wrap` makes of slots.
fn measure<M: Slots>(
    plan: &Plan,
    case: &Case,
    buffers: Buffers,
    wrap: impl Fn(BounceMemory) -> M,
    progress: &Progress,
) -> Result<Fields, Failed> {
    let of = |way| Failed::at(format!("{} with {} at once, {way}", case.name, case.threads));
    let slots = || Ok::<M, Failed>(wrap(work::slots(plan.pool)?));
    let vanilla = slots().and_then(|slots| Ok(Vanilla::new(slots)?));
    let vanilla = vanilla.map_err(of(Vanilla::<M>::NAME))?;
    let now = slots().and_then(|slots| work::now(slots, plan.cpus)).map_err(of(Now::<M>::NAME))?;
    let effort = plan.effort(case);
    let [mut old, mut new] = [Measured::default(), Measured::default()];
    check::fill(buffers, case).map_err(of(Now::<M>::NAME))?;
    for round in 0..=effort.rounds {
        let turn = load::turn(&vanilla, buffers, case, effort.turn, &mut old);
        turn.map_err(of(Vanilla::<M>::NAME))?;
        let turn = load::turn(&now, buffers, case, effort.turn, &mut new);
        turn.map_err(of(Now::<M>::NAME))?;
        if round == 0 {
            // Slots and caches were used for the first time.
            [old, new] = [Measured::default(), Measured::default()];
        }
        progress.advance(1);
    }
    Ok(report::row(case, &old, &new))
}
