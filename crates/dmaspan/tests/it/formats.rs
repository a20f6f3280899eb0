//! The suite of dmaspan-sim, run on every format of the core.

mod amd_v1;
mod arm_lpae_s1;
mod riscv;
mod vtd_ss;
mod x86_64;

use dmaspan::IovaRange;
use dmaspan_sim::Arena;
use dmaspan_sim::walker::Checked;

/// What the walkers' own check of whole tables finds.
pub(crate) fn checked<W: Checked>(
    walker: &W,
    tables: &Arena,
    range: IovaRange,
) -> Result<(), String> {
    walker.survey(tables, range, |_| ()).map_err(|bad| bad.to_string())
}
