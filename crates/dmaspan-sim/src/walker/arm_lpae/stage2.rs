//! The registers of stage 2 in AArch64 state: VTTBR and VTCR.
//!
//! DDI 0487, issue K.a: chapter D24, registers VTTBR_EL2 and VTCR_EL2; D8.2, "Translation process",
//! for start levels and concatenated tables. An SMMUv3 stream table entry (IHI 0070, 5.2) has the
//! same fields in other places.

use super::registers::{
    BadLpaeRegisters, FlagUpdate, LpaeConfig, Registers, State, bit, field, input_lg2, output_lg2,
};
use super::stage::{AccessPrivilege, ExecuteNever, MemAttr, Stage};

/// log2 of how many tables a root of stage 2 can be at most, one behind the other.
const CONCATENATED_LG2: u32 = 4;

/// The registers of a stage 2 translation regime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ArmS2WalkRegisters {
    /// VTTBR_EL2.
    pub vttbr: u64,
    /// VTCR_EL2.
    pub vtcr: u64,
    /// HCR_EL2.FWB.
    pub mem_attr: MemAttr,
    /// Whether FEAT_XNX is there.
    pub execute_never: ExecuteNever,
    /// As whom the device accesses memory, for [`ExecuteNever::ByPrivilege`].
    pub privilege: AccessPrivilege,
}

impl Registers for ArmS2WalkRegisters {
    fn parse(&self) -> Result<LpaeConfig, BadLpaeRegisters> {
        let vtcr = self.vtcr;
        // DS and SL2 are FEAT_LPA2's.
        for (field, number) in [("DS", 32), ("SL2", 33)] {
            if bit(vtcr, number) {
                return Err(BadLpaeRegisters::Unsupported { field, tcr: vtcr });
            }
        }
        let granule_lg2 = match field(vtcr, 15, 14) {
            0b00 => 12,
            0b01 => 16,
            0b10 => 14,
            _ => return Err(BadLpaeRegisters::Granule { tcr: vtcr }),
        };
        let output_lg2 = output_lg2(vtcr, field(vtcr, 18, 16), granule_lg2)?;
        let input_lg2 = input_lg2(field(vtcr, 5, 0), granule_lg2)?;
        // With FEAT_TTST a walk of 4K tables can start at level 3.
        let start_level = match (granule_lg2, field(vtcr, 7, 6)) {
            (12, 0b11) | (14 | 16, 0b00) => 3,
            (12, 0b00) | (14 | 16, 0b01) => 2,
            (12, 0b01) | (14 | 16, 0b10) => 1,
            (12, 0b10) => 0,
            _ => return Err(BadLpaeRegisters::StartLevel { vtcr, input_lg2 }),
        };
        let (access_flag, dirty) = FlagUpdate::parse(vtcr, 21, 22);
        let stage = Stage::Two {
            mem_attr: self.mem_attr,
            execute_never: self.execute_never,
            privilege: self.privilege,
        };
        LpaeConfig {
            start_level,
            access_flag,
            dirty,
            ..LpaeConfig::new(granule_lg2, input_lg2, output_lg2, stage, State::AArch64)
        }
        .with_concatenated_root(vtcr)?
        .with_base(self.vttbr)
    }
}

impl LpaeConfig {
    /// The same, where the root at the start level has two entries at least and is 16 tables at
    /// most (D8.2, "Concatenated translation tables").
    pub(super) fn with_concatenated_root(self, vtcr: u64) -> Result<Self, BadLpaeRegisters> {
        let entry_lg2 = self.entry_lg2(self.start_level);
        let most = entry_lg2 + Self::stride_lg2(self.granule_lg2) + CONCATENATED_LG2;
        if (entry_lg2 + 1..=most).contains(&self.input_lg2) {
            Ok(self)
        } else {
            Err(BadLpaeRegisters::StartLevel { vtcr, input_lg2: self.input_lg2 })
        }
    }
}
