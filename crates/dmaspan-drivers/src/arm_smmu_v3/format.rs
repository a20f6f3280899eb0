//! The formats of tables that an SMMUv3 walks, and the values that describe them to it.

use dmaspan::io_pgtable::{
    ArmLpaeS1, ArmLpaeS2, BreakBeforeMake, DirtyTracking, Format, Half, S2MemoryTypes,
};
use dmaspan::iommu::Incompatible;
use dmaspan::{Coherency, PhysAddr, lg2};

use super::Stage;
use super::features::SmmuV3Features;
use super::spec::{cd, ste, vtcr};
use crate::stream::require;

/// The formats of tables that an SMMUv3 walks: [`ArmLpaeS1`] and [`ArmLpaeS2`].
pub trait SmmuV3Format: Format + sealed::SmmuV3Tables {
    /// Which stage the tables are for.
    const STAGE: Stage;
}

impl<const G: u32> SmmuV3Format for ArmLpaeS1<G> {
    const STAGE: Stage = Stage::First;
}

impl<const G: u32> SmmuV3Format for ArmLpaeS2<G> {
    const STAGE: Stage = Stage::Second;
}

pub(super) mod sealed {
    use super::*;

    /// What the driver has to know of tables.
    pub trait SmmuV3Tables {
        /// Returns whether hardware with these features walks them.
        fn check(&self, features: &SmmuV3Features) -> Result<(), Incompatible>;

        /// For stage 1 the words of a context descriptor, but for the ASID and what becomes of
        /// faults; for stage 2 those of a stream table entry, but for the VMID and that.
        fn words(&self, root: PhysAddr) -> [u64; 4];
    }
}

impl<const G: u32> sealed::SmmuV3Tables for ArmLpaeS1<G> {
    fn check(&self, features: &SmmuV3Features) -> Result<(), Incompatible> {
        let config = self.config();
        check_common(self, config.walks, features)?;
        let most = if G == 16 { features.input_bits } else { 48 };
        let what = "its input addresses have more bits than the SMMU's";
        require(&[(config.input_bits <= most, what)])
    }

    /// 5.4: the fields of TCR_EL1 are in word 0, TTB0 and TTB1 are words 1 and 2, MAIR is word 3.
    /// Unlike in TTBR an address has all its bits in their places.
    fn words(&self, root: PhysAddr) -> [u64; 4] {
        let registers = self.registers(root);
        let tcr = registers.tcr;
        let moved = (tcr & cd::TCR_TG) >> cd::TG_DOWN | (tcr & cd::TCR_EPD) << cd::EPD_UP;
        let managed = flag(tcr & cd::TCR_HA, cd::HA) | flag(tcr & cd::TCR_HD, cd::HD);
        let fixed = cd::VALID | cd::AA64 | cd::R | cd::A | cd::ASET;
        let word = tcr & cd::AS_IN_TCR | moved | managed | fixed;
        match self.config().half {
            Half::Lower => [word, root.get(), 0, registers.mair],
            Half::Upper => [word, 0, root.get(), registers.mair],
        }
    }
}

impl<const G: u32> sealed::SmmuV3Tables for ArmLpaeS2<G> {
    fn check(&self, features: &SmmuV3Features) -> Result<(), Incompatible> {
        let config = self.config();
        check_common(self, config.walks, features)?;
        let forced = config.memory_types == S2MemoryTypes::Forced;
        let can = features.memory_types == S2MemoryTypes::Forced;
        let small = G == 12 && self.start_level() == 3;
        require(&[
            (!forced || can, "its stage 2 decides on memory types alone (IDR3.FWB)"),
            (!small || features.small_tables, "its tables start at level 3 (IDR3.STT)"),
        ])
    }

    /// 5.2: the fields of VTCR_EL2 are in word 2, S2TTB is word 3.
    fn words(&self, root: PhysAddr) -> [u64; 4] {
        let vtcr = self.registers(root).vtcr;
        let walked = (vtcr & lg2::mask(ste::VTCR_BITS)) << ste::VTCR_SHIFT;
        let managed = flag(vtcr & vtcr::HA, ste::S2HA) | flag(vtcr & vtcr::HD, ste::S2HD);
        let forced = match self.config().memory_types {
            S2MemoryTypes::Combined => 0,
            S2MemoryTypes::Forced => ste::S2FWB,
        };
        [
            ste::VALID | ste::STAGE_2,
            ste::SHCFG_INCOMING | forced,
            walked | managed | ste::S2AA64 | ste::S2R,
            root.get(),
        ]
    }
}

/// What both stages ask of the hardware.
fn check_common<F: Format>(
    format: &F,
    walks: Coherency,
    features: &SmmuV3Features,
) -> Result<(), Incompatible> {
    let granule = features.granules & lg2::size(F::GRANULE_LG2) != 0;
    let outputs = format.geometry().output_bits <= features.output_bits;
    let seen = walks == Coherency::NonCoherent || features.coherency == Coherency::Coherent;
    let marks = !format.tracks_dirty() || features.dirty == DirtyTracking::Hardware;
    let sizes = format.needs_break() || features.break_before_make == BreakBeforeMake::NotNeeded;
    require(&[
        (granule, "its granule is not one of the SMMU's"),
        (outputs, "its output addresses have more bits than the SMMU's"),
        (seen, "its tables are in the CPU's caches, which the SMMU does not see"),
        (marks, "it tracks writes, which the SMMU does not mark"),
        (sizes, "it changes the sizes of leaves without a break (IDR3.BBML)"),
    ])
}

fn flag(bits: u64, flag: u64) -> u64 {
    if bits == 0 { 0 } else { flag }
}
