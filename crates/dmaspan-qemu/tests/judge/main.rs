//! One stream of operations, on tables of ours, judged three ways: by an interval map, by the
//! walker of `dmaspan-sim`, which was written from the manuals, and by QEMU's model of the
//! hardware, through which devices do DMA after each operation.
//!
//! `DMASPAN_JUDGE_OPERATIONS=N` sets how many operations each model judges, and
//! `DMASPAN_JUDGE_SEED=S` with which seed: a disagreement prints both.

mod engine;
mod operations;
mod probes;
mod rig;
mod riscv;

use engine::judge;

#[test]
fn all_agree_on_risc_v_first_stage() {
    judge::<riscv::RiscvRig<false>>();
}

#[test]
fn all_agree_on_risc_v_second_stage() {
    judge::<riscv::RiscvRig<true>>();
}
