//! TTBCR, TTBR, PRRR, NMRR and SCTLR as software gives them to the hardware, and what they say.
//!
//! DDI 0406C, B4.1, "VMSA System control registers descriptions, in register order". In an SMMU the
//! fields AFE and TRE are in SMMU_CBn_SCTLR, in other places.

use dmaspan::{Iova, IovaRange, lg2};

use super::bits;
use crate::walker::arm_lpae::{AccessPrivilege, AddressHalf, Walks};

/// SCTLR.TRE: PRRR and NMRR say what memory types are.
pub const SCTLR_TRE: u32 = 1 << 28;
/// SCTLR.AFE: AP\[0\] is the access flag.
pub const SCTLR_AFE: u32 = 1 << 29;

/// Bits that one entry of the first level covers.
pub(super) const SECTION_LG2: u32 = 20;

/// Whose tables they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Variant {
    /// Arm's.
    #[default]
    Arm,
    /// Those of MediaTek's M4U: bits 32, 33 and 34 of every address are in the bits 9, 4 and 5 of
    /// its entry, there are no permissions, and TTBCR is 0. Bits 34:32 of the root's address are in
    /// bits 2:0 of TTBR.
    MediaTek {
        /// Bits of an input address, 32 to 34. The root has an entry for each MiB.
        input_lg2: u32,
    },
}

/// The registers of a translation regime of short descriptors, PL1&0 with TTBCR.EAE = 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ArmV7sWalkRegisters {
    /// TTBR0 or TTBR1, as `half` says.
    pub ttbr: u32,
    /// TTBCR.
    pub ttbcr: u32,
    /// PRRR.
    pub prrr: u32,
    /// NMRR.
    pub nmrr: u32,
    /// SCTLR, of which [`SCTLR_TRE`] and [`SCTLR_AFE`] are looked at.
    pub sctlr: u32,
    /// Whether TTBR0 or TTBR1 is meant.
    pub half: AddressHalf,
    /// As whom the device accesses memory.
    pub privilege: AccessPrivilege,
    /// Whose tables they are.
    pub variant: Variant,
}

/// The reason why registers describe no tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadV7sRegisters {
    /// TTBCR.EAE asks for long descriptors, or MediaTek's TTBCR is not 0.
    #[error("TTBCR {ttbcr:#x} is not one of these tables")]
    Control {
        /// TTBCR.
        ttbcr: u32,
    },
    /// SCTLR.TRE is 0: memory types without TEX remap are not supported.
    #[error("SCTLR {sctlr:#x} does not enable TEX remap")]
    NoRemap {
        /// SCTLR.
        sctlr: u32,
    },
    /// A memory type in PRRR is reserved.
    #[error("PRRR {prrr:#x} has a reserved type")]
    MemoryType {
        /// PRRR.
        prrr: u32,
    },
    /// TTBR1 is meant and TTBCR.N is 0, so that it translates nothing.
    #[error("TTBR1 is not used where TTBCR.N is 0")]
    Unused,
    /// MediaTek's input size is out of range.
    #[error("{input_lg2} bits of input address are not in 32..=34")]
    InputSize {
        /// Bits of an input address.
        input_lg2: u32,
    },
    /// The table base is not aligned to the size of the root table.
    #[error("the base in {ttbr:#x} is not aligned to 2^{align_lg2} bytes")]
    Base {
        /// The register.
        ttbr: u32,
        /// log2 of the alignment.
        align_lg2: u32,
    },
}

/// What the registers say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Config {
    /// Bits of an address that index the root.
    pub(super) input_lg2: u32,
    /// Every address that the tables translate.
    pub(super) input_range: IovaRange,
    pub(super) base: u64,
    pub(super) walks: Walks,
    pub(super) access_flag: AccessFlag,
}

/// SCTLR.AFE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessFlag {
    /// AP\[2:0\] are permissions.
    None,
    /// AP\[2:1\] are permissions and AP\[0\] is the access flag.
    InEntries,
}

impl Config {
    pub(super) fn parse(registers: &ArmV7sWalkRegisters) -> Result<Self, BadV7sRegisters> {
        let &ArmV7sWalkRegisters { ttbr, ttbcr, prrr, sctlr, half, variant, .. } = registers;
        if sctlr & SCTLR_TRE == 0 {
            return Err(BadV7sRegisters::NoRemap { sctlr });
        }
        // The type of region 6 is implementation defined.
        if (0..8).any(|region| region != 6 && bits(prrr, 2 * region + 1, 2 * region) == 0b11) {
            return Err(BadV7sRegisters::MemoryType { prrr });
        }
        let (input_lg2, input_range) = match variant {
            Variant::Arm if bits(ttbcr, 31, 31) == 1 => {
                return Err(BadV7sRegisters::Control { ttbcr });
            }
            Variant::Arm => arm_input(half, bits(ttbcr, 2, 0)).ok_or(BadV7sRegisters::Unused)?,
            Variant::MediaTek { .. } if ttbcr != 0 => {
                return Err(BadV7sRegisters::Control { ttbcr });
            }
            Variant::MediaTek { .. } if half == AddressHalf::Upper => {
                return Err(BadV7sRegisters::Unused);
            }
            Variant::MediaTek { input_lg2: input_lg2 @ 32..=34 } => {
                (input_lg2, range(0, lg2::mask(input_lg2)))
            }
            Variant::MediaTek { input_lg2 } => {
                return Err(BadV7sRegisters::InputSize { input_lg2 });
            }
        };
        // Entries of 4 bytes.
        let align_lg2 = input_lg2 - SECTION_LG2 + 2;
        // Bits 6:0 are attributes of the walk, or MediaTek's address bits.
        let low = u64::from(bits(ttbr, 31, 7)) << 7;
        let high = match variant {
            Variant::Arm => 0,
            Variant::MediaTek { .. } => u64::from(bits(ttbr, 2, 0)) << 32,
        };
        if !lg2::is_aligned(low, align_lg2) {
            return Err(BadV7sRegisters::Base { ttbr, align_lg2 });
        }
        // PD0 and PD1.
        let disabled = match half {
            AddressHalf::Lower => 4,
            AddressHalf::Upper => 5,
        };
        Ok(Self {
            input_lg2,
            input_range,
            base: low | high,
            walks: Walks::parse(ttbcr.into(), disabled),
            access_flag: if sctlr & SCTLR_AFE == 0 {
                AccessFlag::None
            } else {
                AccessFlag::InEntries
            },
        })
    }
}

/// What TTBCR.N leaves to TTBR0 and TTBR1 (B3.5.4, "Selecting between TTBR0 and TTBR1,
/// Short-descriptor translation table format"), and how many bits index the root: TTBR1's always
/// has an entry for every MiB of 4 GiB.
fn arm_input(half: AddressHalf, n: u32) -> Option<(u32, IovaRange)> {
    match half {
        AddressHalf::Lower => Some((32 - n, range(0, lg2::mask(32 - n)))),
        AddressHalf::Upper if n == 0 => None,
        AddressHalf::Upper => Some((32, range(lg2::size(32 - n), lg2::mask(32)))),
    }
}

fn range(start: u64, last: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), Iova::new(last))
        .unwrap_or_else(|| unreachable!("{start:#x} is not above {last:#x}"))
}
