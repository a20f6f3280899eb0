//! `dmaspan-bench fixed`: reads of this machine's kernel into registered and plain buffers.
//!
//! ```text
//! plan (source, depth) ──► work (pool, ring): check, then runs of both ways in turn ──► report
//!                            └─ clocks: wall, CPU time, idle time, the disk's requests
//! ```

pub(crate) mod args;
mod clocks;
mod plan;
pub(crate) mod report;
mod source;
mod work;

use args::FixedArgs;
use dmaspan_cli::hold::HeldPages;
use dmaspan_cli::machine::Machine;
use dmaspan_cli::progress::Progress;
pub(crate) use plan::{Plan, UsageError};
use report::Report;
use work::{FixedBenchError, Reader, WAYS};

/// What `args` ask for on this machine.
///
/// # Errors
///
/// [`UsageError`] where that cannot be done.
pub(crate) fn plan(args: &FixedArgs) -> Result<Plan, UsageError> {
    Plan::new(args, &Machine::read())
}

/// Measures what is planned.
///
/// # Errors
///
/// [`FixedBenchError`] where there is no memory or no ring, a read failed, or the ways differ.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, FixedBenchError> {
    progress.begin("reads, fixed and plain".to_owned(), 2 * u64::from(plan.runs) + 1);
    // Dropped last: the number of pages is lowered when they are back.
    let mut held = HeldPages::for_memory(plan.memory, plan.memory_bytes())?;
    let mut reader = Reader::new(plan)?;
    if let Some(held) = &mut held {
        held.mapped();
    }
    reader.check()?;
    progress.advance(1);
    let mut taken = WAYS.map(|_| Vec::new());
    for run in 0..plan.runs {
        for turn in 0..WAYS.len() {
            // Whoever is first in one run is later in the next.
            let place = (turn + usize::try_from(run).unwrap_or(0)) % WAYS.len();
            taken[place].push(reader.run(WAYS[place], run)?);
            progress.advance(1);
        }
    }
    progress.clear();
    Ok(Report::new(plan, &reader, &taken))
}
