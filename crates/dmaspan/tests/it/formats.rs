//! The suite of dmaspan-sim, run on every format of the core.

pub(crate) mod amd_v1;
mod arm_lpae_32;
mod arm_lpae_s1;
pub(crate) mod arm_lpae_s2;
pub(crate) mod arm_v7s;
mod riscv;
mod vtd_ss;
pub(crate) mod x86_64;

use dmaspan::IovaRange;
use dmaspan::io_pgtable::Arena;
use dmaspan_sim::walker::Checked;

/// Bits of input and output addresses that Linux's self-test of io-pgtable-arm tries.
#[rustfmt::skip]
pub(crate) const WIDTHS: [(u32, u32); 21] = [
    (32, 32), (32, 36), (32, 40), (32, 42), (32, 44), (32, 48), (36, 36), (36, 40), (36, 42),
    (36, 44), (36, 48), (40, 40), (40, 42), (40, 44), (40, 48), (42, 42), (42, 44), (42, 48),
    (44, 44), (44, 48), (48, 48),
];

/// What the walkers' own check of whole tables finds.
pub(crate) fn checked<W: Checked>(
    walker: &W,
    tables: &Arena,
    range: IovaRange,
) -> Result<(), String> {
    walker.survey(tables, range, |_| ()).map_err(|bad| bad.to_string())
}
