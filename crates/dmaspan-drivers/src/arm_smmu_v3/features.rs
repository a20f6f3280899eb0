//! The driver reads here what the hardware can do, from its ID registers.

use dmaspan::Coherency;
use dmaspan::io_pgtable::{
    ArmLpaeS1Config, ArmLpaeS2Config, BreakBeforeMake, DirtyTracking, S2MemoryTypes,
};

use super::spec::{idr0, idr1, idr3, idr5, queue, reg};
use crate::error::Error;
use crate::mmio::Mmio;
use crate::stage::Stage;

/// Says what can become of an access that faults (IDR0.STALL_MODEL).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StallModel {
    /// It ends or is held, as each domain says.
    Both,
    /// It ends.
    Terminate,
    /// It is held until the driver says what to do.
    Forced,
}

/// Says what an SMMUv3 can do (IHI 0070, 6.3.1 to 6.3.6).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SmmuV3Features {
    /// Whether there is stage 1.
    pub stage1: bool,
    /// Whether there is stage 2.
    pub stage2: bool,
    /// Whether the SMMU's accesses see the CPU's caches.
    pub coherency: Coherency,
    /// The granules, bit n for 2^n bytes: 12, 14 and 16.
    pub granules: u64,
    /// Bits of physical addresses: 32, 36, 40, 42, 44, 48 or 52.
    pub output_bits: u32,
    /// Bits of addresses before stage 1 with the 64K granule: 48 or 52. Others have 48.
    pub input_bits: u32,
    /// Bits of an ASID: 8 or 16.
    pub asid_bits: u32,
    /// Bits of a VMID: 8 or 16.
    pub vmid_bits: u32,
    /// Bits of a stream's number, at most 32.
    pub stream_bits: u32,
    /// Whether the stream table can have two levels.
    pub two_levels: bool,
    /// Whether one command can invalidate a range (IDR3.RIL).
    pub range_invalidation: bool,
    /// Whether hardware manages dirty state in the tables.
    pub dirty: DirtyTracking,
    /// What it takes to change the size of a leaf.
    pub break_before_make: BreakBeforeMake,
    /// Which memory types stage 2 can have: [`S2MemoryTypes::Forced`] where it can (IDR3.FWB).
    pub memory_types: S2MemoryTypes,
    /// Whether tables may be smaller than usual (IDR3.STT): stage 2 with 4K may start at level 3.
    pub small_tables: bool,
    /// What can become of accesses that fault.
    pub stalls: StallModel,
    /// log2 of the most commands that the queue can have.
    pub lg2_commands: u32,
    /// log2 of the most events that the queue can have.
    pub lg2_events: u32,
    /// Whether devices may ask for translations (IDR0.ATS). The driver lets none.
    pub(super) ats: bool,
    /// Whether there are TLB entries of EL2.
    pub(super) hypervisor: bool,
}

impl SmmuV3Features {
    /// Reads what the ID registers say.
    pub(super) fn read(registers: &impl Mmio) -> Result<Self, Error> {
        let [idr0, idr1, idr3, idr5] =
            [reg::IDR0, reg::IDR1, reg::IDR3, reg::IDR5].map(|offset| registers.read32(offset));
        if idr0 == u32::MAX || idr1 == u32::MAX {
            return Err(super::hardware::gone(idr0).into());
        }
        let features = Self::decode(idr0, idr1, idr3, idr5)?;
        features.check(idr0, idr1)?;
        Ok(features)
    }

    fn decode(idr0: u32, idr1: u32, idr3: u32, idr5: u32) -> Result<Self, Error> {
        let has = |register: u32, bit: u32| register & bit != 0;
        let bits = |register: u32, bit: u32| if has(register, bit) { 16 } else { 8 };
        let granule = |bit: u32, lg2: u32| if has(idr5, bit) { 1u64 << lg2 } else { 0 };
        let lg2_places = |shift: u32| (idr1 >> shift & 0x1f).min(queue::MAX_LG2);
        let Some(&output_bits) = idr5::OUTPUT_BITS.get(idr5 as usize & 0b111) else {
            return Err(Error::unsupported("output size that is known", idr5));
        };
        Ok(Self {
            stage1: has(idr0, idr0::S1P),
            stage2: has(idr0, idr0::S2P),
            coherency: match has(idr0, idr0::COHACC) {
                true => Coherency::Coherent,
                false => Coherency::NonCoherent,
            },
            granules: granule(idr5::GRAN4K, 12)
                | granule(idr5::GRAN16K, 14)
                | granule(idr5::GRAN64K, 16),
            output_bits,
            input_bits: if idr5 >> idr5::VAX_SHIFT & 0b11 == idr5::VAX_52 { 52 } else { 48 },
            asid_bits: bits(idr0, idr0::ASID16),
            vmid_bits: bits(idr0, idr0::VMID16),
            stream_bits: (idr1 & ((1 << idr1::SIDSIZE_BITS) - 1)).min(32),
            two_levels: idr0 >> idr0::ST_LEVEL_SHIFT & 0b11 == idr0::ST_LEVEL_TWO,
            range_invalidation: has(idr3, idr3::RIL),
            dirty: match idr0 >> idr0::HTTU_SHIFT & 0b11 {
                idr0::HTTU_DIRTY => DirtyTracking::Hardware,
                _ => DirtyTracking::Off,
            },
            break_before_make: match idr3 >> idr3::BBML_SHIFT & 0b11 {
                idr3::BBML_2 => BreakBeforeMake::NotNeeded,
                _ => BreakBeforeMake::Needed,
            },
            memory_types: match has(idr3, idr3::FWB) {
                true => S2MemoryTypes::Forced,
                false => S2MemoryTypes::Combined,
            },
            small_tables: has(idr3, idr3::STT),
            stalls: match idr0 >> idr0::STALL_MODEL_SHIFT & 0b11 {
                idr0::STALL_MODEL_BOTH => StallModel::Both,
                idr0::STALL_MODEL_FORCED => StallModel::Forced,
                _ => StallModel::Terminate,
            },
            lg2_commands: lg2_places(idr1::CMDQS_SHIFT),
            lg2_events: lg2_places(idr1::EVENTQS_SHIFT),
            ats: has(idr0, idr0::ATS),
            hypervisor: has(idr0, idr0::HYP),
        })
    }

    /// Whether this driver can drive it.
    fn check(&self, idr0: u32, idr1: u32) -> Result<(), Error> {
        if idr0 & idr0::TTF_AARCH64 == 0 {
            return Err(Error::unsupported("64-bit tables", idr0));
        }
        if idr0 >> idr0::TTENDIAN_SHIFT & 0b11 == idr0::TTENDIAN_BIG {
            return Err(Error::unsupported("little-endian tables", idr0));
        }
        if !self.stage1 && !self.stage2 {
            return Err(Error::unsupported("stage of translation", idr0));
        }
        if idr1 & (idr1::QUEUES_PRESET | idr1::TABLES_PRESET) != 0 {
            return Err(Error::unsupported("place for queues and tables of the driver's", idr1));
        }
        Ok(())
    }

    /// Whether there is that stage.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    pub(super) fn check_stage(&self, stage: Stage) -> Result<(), Error> {
        match stage {
            Stage::First if !self.stage1 => Err(Error::unsupported("stage 1", 0u32)),
            Stage::Second if !self.stage2 => Err(Error::unsupported("stage 2", 0u32)),
            _ => Ok(()),
        }
    }

    /// The largest stage-1 tables with a granule of `2^granule_lg2` bytes that this hardware walks:
    /// for [`ArmLpaeS1`](dmaspan::io_pgtable::ArmLpaeS1). [`dirty`](Self::dirty) tracking is left
    /// off; it costs a write of the table for each leaf that is written to.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the hardware has no stage 1 or not this granule.
    pub fn stage1_config(&self, granule_lg2: u32) -> Result<ArmLpaeS1Config, Error> {
        self.check_stage(Stage::First)?;
        let (input_bits, output_bits) = self.widths(granule_lg2)?;
        let mut config = ArmLpaeS1Config::new(input_bits, output_bits);
        config.walks = self.coherency;
        config.break_before_make = self.break_before_make;
        Ok(config)
    }

    /// The largest stage-2 tables with a granule of `2^granule_lg2` bytes that this hardware walks:
    /// for [`ArmLpaeS2`](dmaspan::io_pgtable::ArmLpaeS2). [`dirty`](Self::dirty) tracking is left
    /// off, as is [`memory_types`](Self::memory_types).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the hardware has no stage 2 or not this granule.
    pub fn stage2_config(&self, granule_lg2: u32) -> Result<ArmLpaeS2Config, Error> {
        self.check_stage(Stage::Second)?;
        let (_, output_bits) = self.widths(granule_lg2)?;
        let mut config = ArmLpaeS2Config::new(output_bits, output_bits);
        config.walks = self.coherency;
        config.break_before_make = self.break_before_make;
        Ok(config)
    }

    /// The most bits before stage 1 and behind either stage.
    fn widths(&self, granule_lg2: u32) -> Result<(u32, u32), Error> {
        if self.granules.checked_shr(granule_lg2).unwrap_or(0) & 1 == 0 {
            return Err(Error::unsupported("such granule", self.granules));
        }
        let most = if granule_lg2 == 16 { 52 } else { 48 };
        Ok((self.input_bits.min(most), self.output_bits.min(most)))
    }
}
