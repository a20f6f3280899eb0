//! `dmaspan-bench fixed`: reads and writes of this machine's kernel, by registered and by plain
//! buffers.
//!
//! ```text
//! plan (source, depth) ──► work (pool, ring): check, then runs of both ways in turn ──► report
//!                            └─ clocks: wall, CPU time, idle time, the disk's requests
//! ```

pub(crate) mod args;
mod clocks;
mod plan;
mod report;
mod source;
mod work;

use dmaspan_cli::hold::HeldPages;
use dmaspan_cli::progress::Progress;
pub(crate) use plan::Plan;
use work::{Reader, WAYS};

use crate::failed::Failed;
use crate::report::Report;

/// Measures what is planned.
///
/// # Errors
///
/// Where there is no memory or no ring, a read failed, or the ways differ.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, Failed> {
    let turns = (plan.ops.len() * WAYS.len()) as u64;
    progress.begin("fixed and plain".to_owned(), turns * u64::from(plan.runs) + 1);
    // Dropped last: the number of pages is lowered when they are back.
    let held = HeldPages::for_memory(plan.memory, plan.memory_bytes());
    let held = held.map_err(|error| Failed::new(format_args!("{error}; --memory thp needs none")));
    let mut held = held?;
    let mut reader = Reader::new(plan)?;
    if let Some(held) = &mut held {
        held.mapped();
    }
    reader.check()?;
    progress.advance(1);
    let mut rows = Vec::new();
    for &op in plan.ops {
        let mut taken = WAYS.map(|_| Vec::new());
        for run in 0..plan.runs {
            for turn in 0..WAYS.len() {
                // The way that is first in one run is later in the next.
                let place = (turn + usize::try_from(run).unwrap_or(0)) % WAYS.len();
                taken[place].push(reader.run(op, WAYS[place], run)?);
                progress.advance(1);
            }
        }
        rows.extend(WAYS.iter().zip(&taken).map(|(way, taken)| report::row(plan, op, *way, taken)));
    }
    Ok(report::report(plan, &reader, rows))
}
