//! The page tables that context banks walk, and the register values that describe them.

use core::fmt;

use dmaspan::io_pgtable::{ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS2, ArmV7s, Format, Groups};
use dmaspan::iommu::Incompatible;
use dmaspan::{Coherency, PhysAddr, Prot};

use super::features::{Has, SmmuV2Features};
use super::spec::{gr0, tcr2};
use crate::stage::Stage;
use crate::stream::require;

/// A page-table format that context banks of an SMMUv2 walk: [`ArmLpaeS1`] and [`ArmLpaeS2`] with
/// each granule, [`ArmLpae32S1`], [`ArmLpae32S2`] and [`ArmV7s`].
pub trait SmmuV2Format: sealed::SmmuTables {}

/// Says what kind of context bank a format needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Context {
    pub(super) stage: Stage,
    pub(super) tables: Kind,
    granule_lg2: u32,
    lg2_entries: u32,
    groups: Groups,
}

/// Which descriptors, and which registers go with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AArch64,
    AArch32Long,
    AArch32Short,
}

/// The values of a bank's registers. Without an ASID or a VMID, which the driver adds.
#[derive(Clone, Copy, Debug)]
pub struct Values {
    pub(super) ttbr0: u64,
    pub(super) tcr: u32,
    /// TCR2.PASize.
    pub(super) output_size: u32,
    pub(super) mair: [u32; 2],
    pub(super) walks: Coherency,
}

pub(super) mod sealed {
    use super::{Context, Format, Kind, Stage, Values};
    use dmaspan::PhysAddr;

    /// What the driver asks of a format.
    pub trait SmmuTables: Format {
        /// What kind of bank walks it.
        const CONTEXT: Context;

        /// The bank's registers, for a table whose root is at `root`.
        fn values(&self, root: PhysAddr) -> Values;

        /// Whether leaves force memory types on stage 1 (FEAT_S2FWB).
        fn forces_types(&self) -> bool {
            false
        }
    }

    pub(super) const fn context<F: Format>(stage: Stage, tables: Kind) -> Context {
        Context {
            stage,
            tables,
            granule_lg2: F::GRANULE_LG2,
            lg2_entries: F::LG2_ENTRIES,
            groups: F::GROUPS,
        }
    }
}

use sealed::{SmmuTables, context};

impl<F: SmmuTables> SmmuV2Format for F {}

impl<const G: u32> SmmuTables for ArmLpaeS1<G> {
    const CONTEXT: Context = context::<Self>(Stage::First, Kind::AArch64);

    fn values(&self, root: PhysAddr) -> Values {
        let registers = self.registers(root);
        Values {
            ttbr0: registers.ttbr,
            tcr: low(registers.tcr),
            output_size: high(registers.tcr) & 0b111,
            mair: [low(registers.mair), high(registers.mair)],
            walks: walks(low(registers.tcr)),
        }
    }
}

impl<const G: u32> SmmuTables for ArmLpaeS2<G> {
    const CONTEXT: Context = context::<Self>(Stage::Second, Kind::AArch64);

    fn values(&self, root: PhysAddr) -> Values {
        let registers = self.registers(root);
        second_stage(registers.vttbr, low(registers.vtcr))
    }

    fn forces_types(&self) -> bool {
        // MemAttr, bits 5:2: write-back is 0b1111 unless it is forced (DDI 0487, D8.6).
        self.template(0, G, Prot::READ_WRITE | Prot::CACHE) >> 2 & 0b1111 != 0b1111
    }
}

impl SmmuTables for ArmLpae32S1 {
    const CONTEXT: Context = context::<Self>(Stage::First, Kind::AArch32Long);

    fn values(&self, root: PhysAddr) -> Values {
        let registers = self.registers(root);
        Values {
            ttbr0: registers.ttbr0,
            tcr: registers.ttbcr,
            output_size: 0,
            mair: [registers.mair0, registers.mair1],
            walks: walks(registers.ttbcr),
        }
    }
}

impl SmmuTables for ArmLpae32S2 {
    const CONTEXT: Context = context::<Self>(Stage::Second, Kind::AArch32Long);

    fn values(&self, root: PhysAddr) -> Values {
        let registers = self.registers(root);
        second_stage(registers.vttbr, registers.vtcr)
    }
}

impl SmmuTables for ArmV7s {
    const CONTEXT: Context = context::<Self>(Stage::First, Kind::AArch32Short);

    fn values(&self, root: PhysAddr) -> Values {
        let registers = self.registers(root);
        // IRGN is in bits 0 and 6 of TTBR0 (DDI 0406C, B4.1.154).
        let cached = registers.ttbr & (1 << 0 | 1 << 6) != 0;
        Values {
            ttbr0: registers.ttbr.into(),
            tcr: registers.tcr,
            output_size: 0,
            mair: [registers.prrr, registers.nmrr],
            walks: if cached { Coherency::Coherent } else { Coherency::NonCoherent },
        }
    }
}

const fn second_stage(vttbr: u64, vtcr: u32) -> Values {
    Values { ttbr0: vttbr, tcr: vtcr, output_size: 0, mair: [0; 2], walks: walks(vtcr) }
}

/// Whether walks are cached, by IRGN0 in bits 9:8 of TCR, TTBCR and VTCR.
const fn walks(tcr: u32) -> Coherency {
    if tcr >> 8 & 0b11 == 0 { Coherency::NonCoherent } else { Coherency::Coherent }
}

impl Context {
    /// The part of such a bank that the hardware does not have, and the register that says it.
    pub(super) fn missing(&self, features: &SmmuV2Features) -> Option<(&'static str, u64)> {
        let stage = match self.stage {
            Stage::First => features.stage_1,
            Stage::Second => features.stage_2,
        };
        let tables = match self.tables {
            Kind::AArch64 if features.granules >> self.granule_lg2 & 1 == 0 => Has::No,
            Kind::AArch64 => Has::Yes,
            Kind::AArch32Long => features.long_descriptors,
            Kind::AArch32Short => features.short_descriptors,
        };
        match (stage, tables) {
            (Has::No, _) => Some(("such a stage", gr0::ID0)),
            (_, Has::No) if self.tables == Kind::AArch64 => Some(("such a granule", gr0::ID2)),
            (_, Has::No) => Some(("such page tables", gr0::ID0)),
            _ => None,
        }
    }

    /// log2 of the distance of the addresses at which all leaves of `leaf_sizes` are met, and all
    /// tables where `walks` are to be forgotten too.
    ///
    /// Each entry of a contiguous group may be cached by itself; a leaf of repeated entries is one.
    pub(super) fn stride_lg2(&self, leaf_sizes: u64, walks: Walks) -> u32 {
        let smallest = match leaf_sizes {
            0 => self.granule_lg2,
            sizes => sizes.trailing_zeros().max(self.granule_lg2),
        };
        let leaf = match self.groups {
            Groups::Repeated => smallest,
            Groups::Consecutive => {
                let above = (smallest - self.granule_lg2).checked_rem(self.lg2_entries);
                smallest - above.unwrap_or(0)
            }
        };
        match walks {
            Walks::Kept => leaf,
            // The smallest table may have been empty.
            Walks::Forgotten => leaf.min(self.granule_lg2 + self.lg2_entries),
        }
    }

    /// Whether the hardware walks the tables of this format.
    pub(super) fn fits<F: SmmuTables>(
        format: &F,
        features: &SmmuV2Features,
    ) -> Result<(), Incompatible> {
        let geometry = format.geometry();
        let input_bits = match (F::CONTEXT.stage, F::CONTEXT.tables) {
            (Stage::First, Kind::AArch64) => features.input_bits,
            (Stage::First, _) => 32,
            (Stage::Second, _) => features.stage_2_input_bits,
        };
        let output_bits = match F::CONTEXT.tables {
            Kind::AArch32Short => 32,
            _ => features.output_bits,
        };
        let lower = geometry.aperture.start().get() == 0;
        let inputs = geometry.aperture.last().get() <= dmaspan::lg2::mask(input_bits);
        let outputs = geometry.output_bits <= output_bits;
        let seen = format.values(PhysAddr::new(0)).walks == Coherency::NonCoherent
            || features.walks == Coherency::Coherent;
        require(&[
            (lower, "the SMMU walks tables of the lower half only"),
            (inputs, "the SMMU translates addresses of fewer bits"),
            (outputs, "the SMMU has physical addresses of fewer bits"),
            (seen, "the SMMU's walks do not see the CPU's caches"),
            (!format.tracks_dirty(), "the SMMU does not manage dirty state"),
            (format.needs_break(), "the SMMU needs a break before a leaf changes its size"),
            (!format.forces_types(), "the SMMU does not force memory types"),
        ])
    }
}

/// Whether cached walks are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Walks {
    Kept,
    Forgotten,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({:?}, {:?}, 2^{})", self.stage, self.tables, self.granule_lg2)
    }
}

/// SEP: a bit that no address of the table has, so that none is sign-extended. The uppermost one
/// that comes in, or else one above it.
pub(super) fn sign_position(input_bits: u32, upstream_bits: u32) -> u32 {
    if upstream_bits > input_bits {
        return tcr2::SEP_UPSTREAM;
    }
    let position = tcr2::SEP_BITS.iter().position(|&bit| bit >= input_bits);
    position.and_then(|position| u32::try_from(position).ok()).unwrap_or(tcr2::SEP_UPSTREAM)
}

/// Bits 31:0.
#[expect(clippy::cast_possible_truncation, reason = "the low word is what is asked for")]
pub(super) const fn low(value: u64) -> u32 {
    value as u32
}

/// Bits 63:32.
const fn high(value: u64) -> u32 {
    low(value >> 32)
}
