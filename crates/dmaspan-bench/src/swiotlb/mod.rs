//! `dmaspan-bench swiotlb`: what bouncing a buffer costs, with one lock and with areas.
//!
//! ```text
//! plan (cases) ──► work (all pools) ──► load (jobs, turn by turn) ──► report
//!                                          └─ check: what a device finds
//! ```

pub(crate) mod args;
mod check;
mod load;
mod plan;
mod report;
mod work;

use dmaspan::Platform;
use dmaspan_cli::progress::Progress;
use dmaspan_linux::UserPlatform;
use load::Measured;
use plan::Case;
pub(crate) use plan::Plan;
use work::Buffers;

use crate::failed::Failed;
use crate::models::spin::Spinning;
use crate::models::swiotlb_before::Patches;
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
        match (plan.oversubscribed, case.copies) {
            (true, _) => measure::<true, _>(plan, case, buffers, Spinning, progress),
            (_, true) => measure::<true, _>(plan, case, buffers, UserPlatform, progress),
            (_, false) => measure::<false, _>(plan, case, buffers, UserPlatform, progress),
        }
    });
    Ok(report::report(plan, rows.collect::<Result<_, _>>()?))
}

/// Measures a case with all pools, in turn, each in memory of its own.
fn measure<const COPIED: bool, P: Platform + 'static>(
    plan: &Plan,
    case: &Case,
    buffers: Buffers,
    platform: P,
    progress: &Progress,
) -> Result<Fields, Failed> {
    let of = |way| Failed::at(format!("{} with {} at once, {way}", case.name, case.threads));
    let vanilla = work::before::<COPIED, P>(plan.pool, Patches::NONE).map_err(of("vanilla"))?;
    let patched = plan.patches(case).into_iter().map(|(name, patches)| {
        let pool = work::before::<COPIED, P>(plan.pool, patches).map_err(of(name))?;
        Ok((name, pool, Measured::default()))
    });
    let mut patched = patched.collect::<Result<Vec<_>, Failed>>()?;
    let now = work::now::<COPIED, P>(plan.pool, plan.areas, platform).map_err(of("now"))?;
    let effort = plan.effort(case);
    let [mut old, mut new] = [Measured::default(), Measured::default()];
    check::fill(buffers, case).map_err(of("now"))?;
    for round in 0..=effort.rounds {
        let turn = load::turn(&vanilla, buffers, case, effort.turn, &mut old);
        turn.map_err(of("vanilla"))?;
        for (name, pool, measured) in &mut patched {
            load::turn(pool, buffers, case, effort.turn, measured).map_err(of(name))?;
        }
        let turn = load::turn(&now, buffers, case, effort.turn, &mut new);
        turn.map_err(of("now"))?;
        if round == 0 {
            // Slots and caches were used for the first time.
            [old, new] = [Measured::default(), Measured::default()];
            patched.iter_mut().for_each(|(_, _, measured)| *measured = Measured::default());
        }
        progress.advance(1);
    }
    let patched: Vec<_> = patched.iter().map(|(name, _, measured)| (*name, measured)).collect();
    let high: Vec<u64> = now.area_stats().map(|area| area.high_water).collect();
    Ok(report::row(plan, case, [&old, &new], &patched, &high))
}
