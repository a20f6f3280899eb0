//! The driver reads here which features an SMMUv2 has.

use dmaspan::Coherency;
use dmaspan::io_pgtable::{ArmLpaeS1Config, ArmLpaeS2Config, ArmV7sConfig};

use super::registers::Registers;
use super::spec::{gr0, id0, id1, id2};
use crate::error::Error;
use crate::mmio::Mmio;

/// The most entries of a stream map, and the most context banks (IHI 0062, SMMU_SMRn, SMMU_CBARn).
const MOST: u32 = 128;

/// Says whether hardware has a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Has {
    /// It does.
    Yes,
    /// It does not.
    No,
}

impl Has {
    const fn bit(register: u32, bit: u32) -> Self {
        if register & bit == 0 { Self::No } else { Self::Yes }
    }
}

/// Says how streams find their entry in the stream map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamMapping {
    /// The stream ID is the entry's number.
    Indexed,
    /// Each entry says which stream IDs it is for.
    Matched {
        /// The bits that entries can have in their mask.
        mask_bits: u32,
    },
}

/// Says what an SMMUv2 has, by its ID registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SmmuV2Features {
    /// Stage 1.
    pub stage_1: Has,
    /// Stage 2.
    pub stage_2: Has,
    /// Granules of AArch64 tables, bit n for 2^n bytes.
    pub granules: u64,
    /// AArch32 tables with long descriptors.
    pub long_descriptors: Has,
    /// AArch32 tables with short descriptors.
    pub short_descriptors: Has,
    /// Whether walks see the CPU's caches.
    pub walks: Coherency,
    /// Bits of addresses that stage 1 of AArch64 translates.
    pub input_bits: u32,
    /// Bits of addresses that come in. Where they are more than [`input_bits`](Self::input_bits),
    /// the uppermost is a sign.
    pub upstream_bits: u32,
    /// Bits of addresses that stage 2 translates.
    pub stage_2_input_bits: u32,
    /// Bits of physical addresses.
    pub output_bits: u32,
    /// All context banks.
    pub banks: u32,
    /// The first of them have only stage 2: so many.
    pub stage_2_banks: u32,
    /// VMIDs of 16 bits, not 8.
    pub wide_vmids: Has,
    /// Stream IDs of 16 bits, not 15.
    pub wide_streams: Has,
    /// How streams find their entry.
    pub mapping: StreamMapping,
    /// Entries of the stream map.
    pub entries: u32,
    /// The largest stream ID.
    pub last_stream: u32,
    /// The revision of the implementation: SMMU_IDR7, major in bits 7:4 and minor in 3:0.
    pub revision: u32,
}

impl SmmuV2Features {
    /// Reads the ID registers. Which bits the entries of the stream map have is found out later, by
    /// writing them.
    pub(super) fn read<R: Mmio>(registers: &Registers<R>) -> Result<Self, Error> {
        let id0 = registers.read(gr0::ID0);
        let id1 = registers.read(gr0::ID1);
        let id2 = registers.read(gr0::ID2);
        if id0 == u32::MAX && id1 == u32::MAX {
            return Err(Error::unsupported("registers that answer", id0));
        }
        if id0 & (id0::S1TS | id0::S2TS) == 0 {
            return Err(Error::unsupported("translation", id0));
        }
        let banks = id1 & id1::NUM_MASK;
        let stage_2_banks = id1 >> id1::NUMS2CB_SHIFT & id1::NUM_MASK;
        let most = MOST.min(u32::try_from(registers.bank_pages()).unwrap_or(MOST));
        if banks == 0 || banks > most || stage_2_banks > banks {
            return Err(Error::unsupported("context banks that its registers have room for", id1));
        }
        let matched = id0 & id0::SMS != 0;
        // An index is never that large.
        let wide_streams = if matched { Has::bit(id0, id0::EXIDS) } else { Has::No };
        let stream_bits = match wide_streams {
            Has::Yes => 16,
            Has::No => (id0 >> id0::NUMSIDB_SHIFT & id0::NUMSIDB_MASK).min(15),
        };
        let streams = 1 << stream_bits;
        let (mapping, entries) = if matched {
            (StreamMapping::Matched { mask_bits: 0 }, id0 & id0::NUMSMRG_MASK)
        } else {
            (StreamMapping::Indexed, streams)
        };
        if entries == 0 {
            return Err(Error::unsupported("entries in its stream map", id0));
        }
        let entries = entries.min(MOST);
        let last_stream = if matched { streams - 1 } else { entries - 1 };
        let granules = [(id2::GRANULE_4K, 12), (id2::GRANULE_16K, 14), (id2::GRANULE_64K, 16)];
        let size = |shift| size_of_bits(id2 >> shift & id2::SIZE_MASK);
        let upstream = size(id2::UBS_SHIFT);
        Ok(Self {
            stage_1: Has::bit(id0, id0::S1TS),
            stage_2: Has::bit(id0, id0::S2TS),
            granules: granules
                .iter()
                .filter(|(bit, _)| id2 & bit != 0)
                .fold(0, |granules, (_, lg2)| granules | 1 << lg2),
            long_descriptors: Has::bit(!id0, id0::NO_AARCH32),
            short_descriptors: match id0 & (id0::NO_AARCH32 | id0::NO_SHORT) {
                0 => Has::Yes,
                _ => Has::No,
            },
            walks: match id0 & id0::CTTW {
                0 => Coherency::NonCoherent,
                _ => Coherency::Coherent,
            },
            input_bits: upstream,
            // Of all sizes only the largest has a bit for the sign (IHI 0062, SMMU_IDR2.UBS).
            upstream_bits: if upstream == 48 { 49 } else { upstream },
            stage_2_input_bits: size(id2::IAS_SHIFT),
            output_bits: size(id2::OAS_SHIFT),
            banks,
            stage_2_banks,
            wide_vmids: Has::bit(id2, id2::VMID16),
            wide_streams,
            mapping,
            entries,
            last_stream,
            revision: registers.read(gr0::ID7) & 0xff,
        })
    }

    /// Tables of stage 1 in AArch64 that this hardware walks, as large as they may be.
    pub fn stage_1_config(&self) -> ArmLpaeS1Config {
        let config = ArmLpaeS1Config::new(self.input_bits, self.output_bits);
        ArmLpaeS1Config { walks: self.walks, ..config }
    }

    /// Tables of stage 2 in AArch64 that this hardware walks, as large as they may be.
    pub fn stage_2_config(&self) -> ArmLpaeS2Config {
        let input_bits = self.stage_2_input_bits.min(self.output_bits);
        let config = ArmLpaeS2Config::new(input_bits, self.output_bits);
        ArmLpaeS2Config { walks: self.walks, ..config }
    }

    /// Tables of stage 1 in AArch32, with long descriptors.
    pub fn long_stage_1_config(&self) -> ArmLpaeS1Config {
        let config = ArmLpaeS1Config::new(32, self.output_bits.min(40));
        ArmLpaeS1Config { walks: self.walks, ..config }
    }

    /// Tables of stage 2 in AArch32, as large as they may be.
    pub fn long_stage_2_config(&self) -> ArmLpaeS2Config {
        let input_bits = self.stage_2_input_bits.min(40);
        let config = ArmLpaeS2Config::new(input_bits, self.output_bits.min(40));
        ArmLpaeS2Config { walks: self.walks, ..config }
    }

    /// Tables with short descriptors, without supersections.
    pub fn short_config(&self) -> ArmV7sConfig {
        ArmV7sConfig { walks: self.walks, ..ArmV7sConfig::new(32, 32) }
    }
}

/// How many bits an address has, by the encoding of SMMU_IDR2.
const fn size_of_bits(encoding: u32) -> u32 {
    match encoding {
        0 => 32,
        1 => 36,
        2 => 40,
        3 => 42,
        4 => 44,
        _ => 48,
    }
}
