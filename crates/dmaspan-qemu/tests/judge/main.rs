//! One stream of operations, on tables of ours, judged three ways: by an interval map, by the
//! walker of `dmaspan-sim`, which was written from the manuals, and by QEMU's model of the
//! hardware, through which devices do DMA after each operation.
//!
//! `DMASPAN_JUDGE_OPERATIONS=N` sets how many operations each model judges, and
//! `DMASPAN_JUDGE_SEED=S` with which seed: a disagreement prints both.

mod amd_vi;
mod arm_smmu_v3;
mod engine;
mod operations;
mod probes;
mod rig;
mod riscv;
mod vtd;

use engine::judge;

#[test]
fn all_agree_on_risc_v_first_stage() {
    judge::<riscv::RiscvRig<false>>();
}

#[test]
fn all_agree_on_risc_v_second_stage() {
    judge::<riscv::RiscvRig<true>>();
}

#[test]
fn all_agree_on_amd_vi() {
    judge::<amd_vi::AmdViRig>();
}

#[test]
fn all_agree_on_smmu_v3_stage_1_4k() {
    judge::<arm_smmu_v3::Stage1<12>>();
}

#[test]
fn all_agree_on_smmu_v3_stage_1_16k() {
    judge::<arm_smmu_v3::Stage1<14>>();
}

#[test]
fn all_agree_on_smmu_v3_stage_1_64k() {
    judge::<arm_smmu_v3::Stage1<16>>();
}

#[test]
fn all_agree_on_smmu_v3_stage_2_4k() {
    judge::<arm_smmu_v3::Stage2<12>>();
}

#[test]
fn all_agree_on_smmu_v3_stage_2_16k() {
    judge::<arm_smmu_v3::Stage2<14>>();
}

#[test]
fn all_agree_on_smmu_v3_stage_2_64k() {
    judge::<arm_smmu_v3::Stage2<16>>();
}

#[test]
fn all_agree_on_vt_d_legacy() {
    judge::<vtd::VtdRig<vtd::SecondStage<false, false>>>();
}

#[test]
fn all_agree_on_vt_d_caching_mode() {
    judge::<vtd::VtdRig<vtd::SecondStage<false, true>>>();
}

#[test]
fn all_agree_on_vt_d_scalable_second_stage() {
    judge::<vtd::VtdRig<vtd::SecondStage<true, false>>>();
}

#[test]
fn all_agree_on_vt_d_scalable_first_stage() {
    judge::<vtd::VtdRig<vtd::FirstStage>>();
}
