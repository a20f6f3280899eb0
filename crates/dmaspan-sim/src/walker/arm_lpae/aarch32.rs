//! The registers of long-descriptor tables in AArch32 state: TTBCR, TTBR and MAIR of stage 1, VTCR
//! and VTTBR of stage 2.
//!
//! DDI 0487, issue K.a: chapter G8, registers TTBCR, TTBR0, TTBR1, MAIR0, MAIR1, VTCR and VTTBR;
//! G5.5, "The VMSAv8-32 Long-descriptor translation table format". ARMv7 has them with the Large
//! Physical Address Extension (DDI 0406C, B3.6 and B4.1). The granule is 4 KiB, the output address
//! has 40 bits, and hardware changes no descriptor.

use dmaspan::{Iova, IovaRange, lg2};

use super::registers::{
    AddressHalf, BadLpaeRegisters, LpaeConfig, Registers, State, Walks, bit, field,
};
use super::stage::{AccessPrivilege, ExecuteNever, Hierarchical, MemAttr, Stage};

const GRANULE_LG2: u32 = 12;
const OUTPUT_LG2: u32 = 40;
/// Bits of a virtual address.
const VIRTUAL_LG2: u32 = 32;
const LAST: u64 = lg2::mask(VIRTUAL_LG2);

/// The registers of a stage 1 translation regime of AArch32 state, PL1&0, with TTBCR.EAE = 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Arm32S1Registers {
    /// TTBR0 or TTBR1, as `half` says.
    pub ttbr: u64,
    /// TTBCR.
    pub ttbcr: u32,
    /// MAIR0 and MAIR1: the attributes 0 to 3 and 4 to 7.
    pub mair: [u32; 2],
    /// Whether TTBR0 or TTBR1 is meant.
    pub half: AddressHalf,
    /// As whom the device accesses memory.
    pub privilege: AccessPrivilege,
}

/// The registers of a stage 2 translation regime of AArch32 state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Arm32S2Registers {
    /// VTTBR.
    pub vttbr: u64,
    /// VTCR.
    pub vtcr: u32,
}

impl Registers for Arm32S1Registers {
    fn parse(&self) -> Result<LpaeConfig, BadLpaeRegisters> {
        let tcr = u64::from(self.ttbcr);
        if !bit(tcr, 31) {
            return Err(BadLpaeRegisters::Unsupported { field: "EAE = 0", tcr });
        }
        // Fields of three bits fit.
        let [t0sz, t1sz] = [field(tcr, 2, 0), field(tcr, 18, 16)]
            .map(|txsz| u32::try_from(txsz).unwrap_or_default());
        let (txsz, epd) = match self.half {
            AddressHalf::Lower => (t0sz, 7),
            AddressHalf::Upper => (t1sz, 23),
        };
        let input_lg2 = VIRTUAL_LG2 - txsz;
        let [low, high] = self.mair.map(u64::from);
        let stage = Stage::One {
            mair: high << 32 | low,
            privilege: self.privilege,
            hierarchical: Hierarchical::Honoured,
            state: State::AArch32,
        };
        let config = LpaeConfig {
            input_range: input_range(self.half, t0sz, t1sz)
                .ok_or(BadLpaeRegisters::Reserved { field: "T1SZ", tcr })?,
            walks: Walks::parse(tcr, epd),
            ..LpaeConfig::new(GRANULE_LG2, input_lg2, OUTPUT_LG2, stage, State::AArch32)
        };
        config.with_base(self.ttbr)
    }
}

impl Registers for Arm32S2Registers {
    fn parse(&self) -> Result<LpaeConfig, BadLpaeRegisters> {
        let vtcr = u64::from(self.vtcr);
        // T0SZ is a signed number of four bits, and S repeats its sign.
        let (magnitude, negative) = (field(vtcr, 2, 0), bit(vtcr, 3));
        if bit(vtcr, 4) != negative {
            return Err(BadLpaeRegisters::Reserved { field: "S", tcr: vtcr });
        }
        // A field of three bits fits.
        let magnitude = u32::try_from(magnitude).unwrap_or_default();
        let input_lg2 = VIRTUAL_LG2 + if negative { 8 } else { 0 } - magnitude;
        let start_level = match field(vtcr, 7, 6) {
            0b00 => 2,
            0b01 => 1,
            _ => return Err(BadLpaeRegisters::StartLevel { vtcr, input_lg2 }),
        };
        let stage = Stage::Two {
            mem_attr: MemAttr::Combined,
            execute_never: ExecuteNever::ForAll,
            privilege: AccessPrivilege::Unprivileged,
        };
        let config = LpaeConfig::new(GRANULE_LG2, input_lg2, OUTPUT_LG2, stage, State::AArch32);
        LpaeConfig { start_level, ..config }.with_concatenated_root(vtcr)?.with_base(self.vttbr)
    }
}

/// What TTBR0 and TTBR1 translate (G5.5, "Selecting between TTBR0 and TTBR1, VMSAv8-32
/// Long-descriptor translation table format"): a size of 0 leaves a half all that the other one
/// does not take. `None` where that is nothing.
fn input_range(half: AddressHalf, t0sz: u32, t1sz: u32) -> Option<IovaRange> {
    let upper = |t1sz| LAST - lg2::mask(VIRTUAL_LG2 - t1sz);
    let (start, last) = match (half, t0sz, t1sz) {
        (AddressHalf::Lower, 0, 0) => (0, LAST),
        (AddressHalf::Lower, 0, _) => (0, upper(t1sz) - 1),
        (AddressHalf::Lower, _, _) => (0, lg2::mask(VIRTUAL_LG2 - t0sz)),
        (AddressHalf::Upper, 0, 0) => return None,
        (AddressHalf::Upper, _, 0) => (lg2::size(VIRTUAL_LG2 - t0sz), LAST),
        (AddressHalf::Upper, _, _) => (upper(t1sz), LAST),
    };
    IovaRange::new(Iova::new(start), Iova::new(last))
}
