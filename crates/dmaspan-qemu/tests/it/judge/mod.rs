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
mod planted;
mod probes;
mod rig;
mod riscv;
mod vtd;

use engine::judge;
use planted::Bug;

/// The tests of one way to translate.
macro_rules! judged {
    ($($name:ident: $rig:ty $(, but $unseen:ident)?;)+) => { $(
        mod $name {
            use super::*;

            #[test]
            fn all_agree() {
                judge::<$rig>();
            }

            #[test]
            fn an_invalidation_that_is_left_out_is_found() {
                planted::finds::<$rig>(Bug::NoInvalidation);
            }

            #[test]
            fn an_invalidation_of_another_domain_is_found() {
                planted::finds::<$rig>(Bug::WrongDomain);
            }

            #[test]
            fn devices_that_go_by_each_other_s_number_are_found() {
                planted::finds_swapped_streams::<$rig>();
            }

            judged!(@kept $rig $(, $unseen)?);

            #[test]
            fn entries_in_the_wrong_place_are_found() {
                planted::finds_spoiled::<$rig>(planted::misplace);
            }

            #[test]
            fn tables_are_freed_after_hardware_was_told() {
                planted::frees_tables_late::<$rig>();
            }
        }
    )+ };
    (@kept $rig:ty) => {
        #[test]
        fn a_configuration_that_is_not_invalidated_is_found() {
            planted::finds::<$rig>(Bug::NoConfiguration);
        }

        #[test]
        fn an_invalidation_that_is_too_narrow_is_found() {
            planted::finds::<$rig>(Bug::TooNarrow);
        }
    };
    // The model keeps no configuration, and forgets all of a domain at once.
    (@kept $rig:ty, kept) => {};
}

judged! {
    smmu_v3_stage_1_4k: arm_smmu_v3::Stage1<12>;
    smmu_v3_stage_1_16k: arm_smmu_v3::Stage1<14>;
    smmu_v3_stage_1_64k: arm_smmu_v3::Stage1<16>;
    smmu_v3_stage_2_4k: arm_smmu_v3::Stage2<12>;
    smmu_v3_stage_2_16k: arm_smmu_v3::Stage2<14>;
    smmu_v3_stage_2_64k: arm_smmu_v3::Stage2<16>;
    vt_d_legacy: vtd::VtdRig<vtd::SecondStage<false, false>>;
    vt_d_caching_mode: vtd::VtdRig<vtd::SecondStage<false, true>>;
    vt_d_scalable_second_stage: vtd::VtdRig<vtd::SecondStage<true, false>>;
    vt_d_scalable_first_stage: vtd::VtdRig<vtd::FirstStage>;
    amd_vi_v1: amd_vi::AmdViRig, but kept;
    risc_v_first_stage: riscv::RiscvRig<false>;
    risc_v_second_stage: riscv::RiscvRig<true>;
}

/// Arm's access flag (DDI 0487, D8.3) and RISC-V's.
#[test]
fn a_missing_access_flag_is_found() {
    const ARM: planted::Spoil = |ram, step| planted::clear(ram, step, 1 << 10);
    const RISC_V: planted::Spoil = |ram, step| planted::clear(ram, step, 1 << 6);
    planted::finds_spoiled::<arm_smmu_v3::Stage1<12>>(ARM);
    planted::finds_spoiled::<arm_smmu_v3::Stage1<14>>(ARM);
    planted::finds_spoiled::<arm_smmu_v3::Stage1<16>>(ARM);
    planted::finds_spoiled::<arm_smmu_v3::Stage2<12>>(ARM);
    planted::finds_spoiled::<arm_smmu_v3::Stage2<14>>(ARM);
    planted::finds_spoiled::<arm_smmu_v3::Stage2<16>>(ARM);
    planted::finds_spoiled::<riscv::RiscvRig<false>>(RISC_V);
    planted::finds_spoiled::<riscv::RiscvRig<true>>(RISC_V);
}

/// A contiguous group of which one entry says that it stands alone (DDI 0487, D8.7).
#[test]
fn a_group_whose_entries_disagree_is_found_by_the_walker() {
    const ALONE: planted::Spoil = |ram, step| planted::clear(ram, step, 1 << 52);
    planted::finds_unequal_groups::<arm_smmu_v3::Stage1<12>>(16, ALONE);
    planted::finds_unequal_groups::<arm_smmu_v3::Stage2<12>>(16, ALONE);
    planted::finds_unequal_groups::<arm_smmu_v3::Stage1<16>>(21, ALONE);
}
