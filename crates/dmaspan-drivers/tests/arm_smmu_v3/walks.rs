//! Hardware that keeps walks until a command takes them.

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2, ArmLpaeS2Config, Format as _};
use dmaspan::iommu::Port as _;
use dmaspan_drivers::arm_smmu_v3::SmmuV3Config;
use dmaspan_sim::iotlb::IotlbConfig;
use dmaspan_sim::walker::arm_lpae::{ArmLpaeS1Walker, ArmLpaeS2Walker, ArmS2WalkRegisters};

use crate::hardware::Model;
use crate::setup::Rig;
use crate::walked::{CacheCommand, Walked};

/// With ranges and without, and with queues in which there is room to name each leaf.
fn rigs() -> [Rig; 2] {
    let config = || SmmuV3Config { lg2_commands: 12, ..Default::default() };
    [Rig::with(Model::LARGE, config()), Rig::with(Model { idr3: 0, ..Model::LARGE }, config())]
}

/// The number of the first domain.
const FIRST: u32 = 1;

fn stage_1<const G: u32>(seed: u64) {
    for (rig, groups) in rigs().into_iter().zip([0, ArmLpaeS1::<G>::CONTIGUOUS_SIZES]) {
        let config = rig.smmu.stage1_config(G).unwrap();
        let singles = ArmLpaeS1::<G>::new(config).unwrap();
        let page_sizes = Some(singles.geometry().page_sizes | groups);
        let format = ArmLpaeS1::<G>::new(ArmLpaeS1Config { page_sizes, ..config }).unwrap();
        let domain = rig.domain(format);
        rig.port::<ArmLpaeS1<G>>(1).translate(&domain).unwrap();
        let registers = domain.format().registers(domain.root());
        let walker = ArmLpaeS1Walker::new(registers.into()).unwrap();
        let told = || rig.hardware.take().into_iter().filter_map(CacheCommand::smmu_v3).collect();
        let config = IotlbConfig::default();
        Walked::new(&domain, (walker, config), FIRST, &told, seed).storm(60);
    }
}

fn stage_2<const G: u32>(seed: u64) {
    for rig in rigs() {
        let config = rig.smmu.stage2_config(G).unwrap();
        let singles = ArmLpaeS2::<G>::new(config).unwrap();
        let groups = ArmLpaeS2::<G>::CONTIGUOUS_SIZES;
        let page_sizes = Some(singles.geometry().page_sizes | groups);
        let format = ArmLpaeS2::<G>::new(ArmLpaeS2Config { page_sizes, ..config }).unwrap();
        let domain = rig.domain(format);
        rig.port::<ArmLpaeS2<G>>(1).translate(&domain).unwrap();
        let registers = domain.format().registers(domain.root());
        let (vttbr, vtcr) = (registers.vttbr, registers.vtcr);
        let registers = ArmS2WalkRegisters { vttbr, vtcr, ..ArmS2WalkRegisters::default() };
        let walker = ArmLpaeS2Walker::new(registers).unwrap();
        let told = || rig.hardware.take().into_iter().filter_map(CacheCommand::smmu_v3).collect();
        let config = IotlbConfig::default();
        Walked::new(&domain, (walker, config), FIRST, &told, seed).storm(60);
    }
}

#[test]
fn nothing_is_kept_of_a_first_stage_that_its_tables_contradict() {
    for seed in 0..2 {
        stage_1::<12>(seed);
        stage_1::<14>(seed);
        stage_1::<16>(seed);
    }
}

#[test]
fn nothing_is_kept_of_a_second_stage_that_its_tables_contradict() {
    for seed in 0..2 {
        stage_2::<12>(seed);
        stage_2::<14>(seed);
        stage_2::<16>(seed);
    }
}
