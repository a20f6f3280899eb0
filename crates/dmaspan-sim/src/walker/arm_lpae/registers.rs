//! The meaning of registers for the tables, and the registers of stage 1 in AArch64 state: TTBR,
//! TCR and MAIR as software gives them to the hardware.
//!
//! Arm Architecture Reference Manual for A-profile architecture (DDI 0487, issue K.a): chapter D24,
//! registers TCR_EL1, TTBR0_EL1, TTBR1_EL1 and MAIR_EL1; D8.2, "Translation process", for address
//! sizes, the alignment of the base and the start level with each granule. An SMMUv3 context
//! descriptor (IHI 0070, 5.4) has the same fields in other places.

use dmaspan::{Iova, IovaRange, lg2};

use super::stage::{AccessPrivilege, Hierarchical, Stage};
use crate::walker::block_around;

/// Says which half of the address space the tables are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum AddressHalf {
    /// Addresses whose upper bits are all 0: TTBR0, T0SZ, TG0, EPD0, HPD0.
    #[default]
    Lower,
    /// Addresses whose upper bits are all 1: TTBR1, T1SZ, TG1, EPD1, HPD1.
    Upper,
}

/// The registers of a stage 1 translation regime, EL1&0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ArmS1WalkRegisters {
    /// TTBR0_EL1 or TTBR1_EL1, as `half` says.
    pub ttbr: u64,
    /// TCR_EL1.
    pub tcr: u64,
    /// MAIR_EL1.
    pub mair: u64,
    /// Which half of the address space.
    pub half: AddressHalf,
    /// As whom the device accesses memory.
    pub privilege: AccessPrivilege,
}

/// What a table wants in the registers, for the half that TCR lets be walked.
impl From<dmaspan::io_pgtable::ArmS1Registers> for ArmS1WalkRegisters {
    fn from(registers: dmaspan::io_pgtable::ArmS1Registers) -> Self {
        let dmaspan::io_pgtable::ArmS1Registers { ttbr, tcr, mair, .. } = registers;
        let half = if tcr & EPD0 == 0 { AddressHalf::Lower } else { AddressHalf::Upper };
        Self { ttbr, tcr, mair, half, privilege: AccessPrivilege::default() }
    }
}

/// TCR_EL1.EPD0: TTBR0 is not walked.
const EPD0: u64 = 1 << 7;

/// The reason why registers describe no tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadLpaeRegisters {
    /// TG0 or TG1 is reserved.
    #[error("the granule field of {tcr:#x} is reserved")]
    Granule {
        /// The control register.
        tcr: u64,
    },
    /// IPS or PS is reserved.
    #[error("the output size in {tcr:#x} is reserved")]
    OutputSize {
        /// The control register.
        tcr: u64,
    },
    /// SL0 is reserved, or a stage 2 root at its level would have fewer than two entries or be more
    /// than 16 tables.
    #[error("SL0 in {vtcr:#x} is reserved or does not fit {input_lg2} bits of input address")]
    StartLevel {
        /// The control register.
        vtcr: u64,
        /// Bits of an input address.
        input_lg2: u32,
    },
    /// A bit has the wrong value for the other fields, or for this format.
    #[error("{field} in {tcr:#x} has a reserved value")]
    Reserved {
        /// The field.
        field: &'static str,
        /// The control register.
        tcr: u64,
    },
    /// T0SZ or T1SZ is too small or too large for the granule.
    #[error("TxSZ {txsz} is not in {min}..={max}")]
    InputSize {
        /// The field.
        txsz: u32,
        /// The smallest for the granule.
        min: u32,
        /// The largest for the granule.
        max: u32,
    },
    /// The table base is not aligned to the size of the root table, or to 64 bytes.
    #[error("the base in {ttbr:#x} is not aligned to 2^{align_lg2} bytes")]
    Base {
        /// The register.
        ttbr: u64,
        /// log2 of the alignment.
        align_lg2: u32,
    },
    /// A field asks for something that this walker does not do.
    #[error("{field} in {tcr:#x} is not supported")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// The control register.
        tcr: u64,
    },
}

/// Registers that describe tables of long descriptors. Only this module's kinds do.
pub trait Registers: Copy {
    /// Returns what the registers say.
    ///
    /// # Errors
    ///
    /// [`BadLpaeRegisters`].
    fn parse(&self) -> Result<LpaeConfig, BadLpaeRegisters>;
}

/// The meaning of the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LpaeConfig {
    pub(super) granule_lg2: u32,
    /// Bits of an input address.
    pub(super) input_lg2: u32,
    /// Every address that the tables translate.
    pub(super) input_range: IovaRange,
    /// Bits of an output or table address.
    pub(super) output_lg2: u32,
    pub(super) start_level: u8,
    pub(super) base: u64,
    pub(super) walks: Walks,
    pub(super) access_flag: FlagUpdate,
    pub(super) dirty: FlagUpdate,
    pub(super) stage: Stage,
    pub(super) state: State,
}

/// The execution state whose format the tables have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    AArch64,
    AArch32,
}

/// EPD0 and EPD1; of short descriptors PD0 and PD1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::walker) enum Walks {
    Enabled,
    Disabled,
}

impl Walks {
    /// What the bit `epd` of a control register says.
    pub(in crate::walker) fn parse(tcr: u64, epd: u32) -> Self {
        if bit(tcr, epd) { Self::Disabled } else { Self::Enabled }
    }
}

/// HA and HD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlagUpdate {
    Hardware,
    Software,
}

impl FlagUpdate {
    /// `bits` where hardware sets them.
    pub(super) fn select(self, bits: u64) -> u64 {
        match self {
            Self::Hardware => bits,
            Self::Software => 0,
        }
    }

    /// Whether hardware sets the access flag and keeps dirty state, by the bits HA and HD of a
    /// control register. Hardware manages dirty state only where it manages the access flag (D8.5).
    pub(super) fn parse(tcr: u64, ha: u32, hd: u32) -> (Self, Self) {
        match (bit(tcr, ha), bit(tcr, hd)) {
            (true, true) => (Self::Hardware, Self::Hardware),
            (true, false) => (Self::Hardware, Self::Software),
            (false, _) => (Self::Software, Self::Software),
        }
    }
}

/// Bits `high..=low` of a word.
pub(super) const fn field(word: u64, high: u32, low: u32) -> u64 {
    (word >> low) & lg2::mask(high - low + 1)
}
const _: () = assert!(field(0x1234, 11, 4) == 0x23 && field(u64::MAX, 63, 0) == u64::MAX);

/// Whether a bit of a word is set.
pub(super) const fn bit(word: u64, number: u32) -> bool {
    field(word, number, number) == 1
}

impl Registers for ArmS1WalkRegisters {
    fn parse(&self) -> Result<LpaeConfig, BadLpaeRegisters> {
        let tcr = self.tcr;
        // DS (FEAT_LPA2), TBI0 and TBI1 change what an address is; a wrong walk would be silent.
        for (field, number) in [("DS", 59), ("TBI0", 37), ("TBI1", 38)] {
            if bit(tcr, number) {
                return Err(BadLpaeRegisters::Unsupported { field, tcr });
            }
        }
        let (txsz, epd, hpd, inside) = match self.half {
            AddressHalf::Lower => (field(tcr, 5, 0), 7, 41, Iova::new(0)),
            AddressHalf::Upper => (field(tcr, 21, 16), 23, 42, Iova::new(u64::MAX)),
        };
        let granule_lg2 = granule_lg2(self)?;
        let output_lg2 = output_lg2(tcr, field(tcr, 34, 32), granule_lg2)?;
        let input_lg2 = input_lg2(txsz, granule_lg2)?;
        let (access_flag, dirty) = FlagUpdate::parse(tcr, 39, 40);
        let stage = Stage::One {
            mair: self.mair,
            privilege: self.privilege,
            state: State::AArch64,
            hierarchical: if bit(tcr, hpd) {
                Hierarchical::Disabled
            } else {
                Hierarchical::Honoured
            },
        };
        let config = LpaeConfig {
            input_range: block_around(inside, input_lg2),
            walks: Walks::parse(tcr, epd),
            access_flag,
            dirty,
            ..LpaeConfig::new(granule_lg2, input_lg2, output_lg2, stage, State::AArch64)
        };
        config.with_base(self.ttbr)
    }
}

impl LpaeConfig {
    /// Tables for the lowest addresses, with as many levels as those need, in which hardware
    /// changes nothing.
    pub(super) fn new(
        granule_lg2: u32,
        input_lg2: u32,
        output_lg2: u32,
        stage: Stage,
        state: State,
    ) -> Self {
        Self {
            granule_lg2,
            input_lg2,
            input_range: block_around(Iova::new(0), input_lg2),
            output_lg2,
            start_level: start_level(input_lg2, granule_lg2),
            base: 0,
            walks: Walks::Enabled,
            access_flag: FlagUpdate::Software,
            dirty: FlagUpdate::Software,
            stage,
            state,
        }
    }

    /// Address bits that one level resolves: a table is one granule of 8-byte descriptors.
    pub(super) const fn stride_lg2(granule_lg2: u32) -> u32 {
        granule_lg2 - 3
    }

    /// log2 of what one entry of a table at `level` covers.
    pub(super) fn entry_lg2(&self, level: u8) -> u32 {
        self.granule_lg2 + Self::stride_lg2(self.granule_lg2) * u32::from(3 - level.min(3))
    }

    /// log2 of what a whole table at `level` covers.
    pub(super) fn table_lg2(&self, level: u8) -> u32 {
        if level <= self.start_level { self.input_lg2 } else { self.entry_lg2(level - 1) }
    }

    /// The same with BADDR of a base register. For 52-bit output addresses its bits 51:48 are in
    /// bits 5:2.
    ///
    /// The root has as many descriptors of 8 bytes as the input address needs, and in AArch64 state
    /// at least 64 bytes' alignment.
    pub(super) fn with_base(self, ttbr: u64) -> Result<Self, BadLpaeRegisters> {
        let size_lg2 = self.input_lg2 - self.entry_lg2(self.start_level) + 3;
        let align_lg2 = match self.state {
            State::AArch64 => size_lg2.max(6),
            State::AArch32 => size_lg2,
        };
        // Bits 63:48 are the ASID or VMID and bit 0 is CnP.
        let low = field(ttbr, 47, 1) << 1;
        let (low, high) = if self.output_lg2 == 52 {
            (low & !0b11_1100, field(ttbr, 5, 2) << 48)
        } else {
            (low, 0)
        };
        if lg2::is_aligned(low, align_lg2) {
            Ok(Self { base: low | high, ..self })
        } else {
            Err(BadLpaeRegisters::Base { ttbr, align_lg2 })
        }
    }
}

/// TG0 and TG1 have different encodings.
fn granule_lg2(registers: &ArmS1WalkRegisters) -> Result<u32, BadLpaeRegisters> {
    let tcr = registers.tcr;
    match (registers.half, registers.half.granule_field(tcr)) {
        (AddressHalf::Lower, 0b00) | (AddressHalf::Upper, 0b10) => Ok(12),
        (AddressHalf::Lower, 0b10) | (AddressHalf::Upper, 0b01) => Ok(14),
        (AddressHalf::Lower, 0b01) | (AddressHalf::Upper, 0b11) => Ok(16),
        _ => Err(BadLpaeRegisters::Granule { tcr }),
    }
}

impl AddressHalf {
    fn granule_field(self, tcr: u64) -> u64 {
        match self {
            Self::Lower => field(tcr, 15, 14),
            Self::Upper => field(tcr, 31, 30),
        }
    }
}

/// IPS and PS. 52 bits need the 64K granule where DS is 0; with others the size is 48 bits.
pub(super) fn output_lg2(tcr: u64, size: u64, granule_lg2: u32) -> Result<u32, BadLpaeRegisters> {
    match size {
        0b000 => Ok(32),
        0b001 => Ok(36),
        0b010 => Ok(40),
        0b011 => Ok(42),
        0b100 => Ok(44),
        0b101 => Ok(48),
        0b110 => Ok(if granule_lg2 == 16 { 52 } else { 48 }),
        _ => Err(BadLpaeRegisters::OutputSize { tcr }),
    }
}

/// T0SZ and T1SZ. 52-bit input needs the 64K granule (FEAT_LVA); small tables as FEAT_TTST has
/// them.
pub(super) fn input_lg2(txsz: u64, granule_lg2: u32) -> Result<u32, BadLpaeRegisters> {
    let (min, max) = if granule_lg2 == 16 { (12, 47) } else { (16, 48) };
    // A field of six bits fits.
    let txsz = u32::try_from(txsz).unwrap_or(u32::MAX);
    if (min..=max).contains(&txsz) {
        Ok(64 - txsz)
    } else {
        Err(BadLpaeRegisters::InputSize { txsz, min, max })
    }
}

/// As many levels as the input address needs, the last one being level 3.
fn start_level(input_lg2: u32, granule_lg2: u32) -> u8 {
    match (input_lg2 - granule_lg2).div_ceil(LpaeConfig::stride_lg2(granule_lg2)) {
        0 | 1 => 3,
        2 => 2,
        3 => 1,
        _ => 0,
    }
}
