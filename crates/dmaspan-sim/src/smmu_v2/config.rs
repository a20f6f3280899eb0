//! The configuration says what the SMMU implements, and makes the identification registers that
//! show it.

use dmaspan::lg2;

/// SMMU_IDR1.PAGESIZE: the size of the pages that the register space is divided into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum PageSize {
    /// 4 KiB.
    #[default]
    Size4K,
    /// 64 KiB.
    Size64K,
}

impl PageSize {
    /// log2 of the bytes of a page.
    pub const fn lg2(self) -> u32 {
        match self {
            Self::Size4K => 12,
            Self::Size64K => 16,
        }
    }
}

/// SMMU_IDR0.SMS: how a stream finds its stream mapping group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum StreamMatchSupport {
    /// By comparing with SMMU_SMRn.
    #[default]
    Matching,
    /// The stream ID is the number of the group.
    Indexing,
}

/// SMMU_IDR0.PTFS: the formats of AArch32 translation tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Aarch32 {
    /// Long and short descriptors: 0b00.
    #[default]
    LongAndShort,
    /// Long descriptors only: 0b01.
    Long,
    /// None: 0b10.
    None,
}

/// SMMU_IDR0.S1TS, S2TS and NTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Stages {
    /// Stage 1 only.
    One,
    /// Stage 2 only.
    Two,
    /// Each by itself.
    Both,
    /// Each by itself, and stage 1 followed by stage 2.
    #[default]
    Nested,
}

impl Stages {
    /// Returns whether stage 1 is there.
    pub const fn one(self) -> bool {
        !matches!(self, Self::Two)
    }

    /// Returns whether stage 2 is there.
    pub const fn two(self) -> bool {
        !matches!(self, Self::One)
    }
}

/// Says what an [`Smmu`](super::Smmu) implements.
///
/// The default has the features of a large MMU-500: 4 KiB pages of registers, 16 context banks of
/// which none is for stage 2 only, 48 stream mapping groups, all formats and 48 bits of each
/// address, of which the upstream bus has 49.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmmuConfig {
    /// SMMU_IDR1.PAGESIZE.
    pub page_size: PageSize,
    /// log2 of the pages of the global space, NUMPAGE: SMMU_IDR1.NUMPAGENDXB + 1. The space of the
    /// context banks has as many. 1 to 8.
    pub pages_lg2: u32,
    /// SMMU_IDR1.NUMCB: context banks, no more than 128 and no more than pages.
    pub context_banks: u8,
    /// SMMU_IDR1.NUMS2CB: how many of the first banks are for stage 2 only.
    pub stage2_banks: u8,
    /// SMMU_IDR0.NUMSMRG: stream mapping groups, 1 to 128.
    pub mapping_groups: u8,
    /// SMMU_IDR0.SMS.
    pub streams: StreamMatchSupport,
    /// SMMU_IDR0.NUMSIDB: bits of a stream ID, up to 15, which are 16 while
    /// SMMU_sCR0.EXIDENABLE is 1.
    pub stream_id_bits: u32,
    /// SMMU_IDR0.EXIDS: extended stream IDs.
    pub extended_ids: bool,
    /// SMMU_IDR2.PTFSv8: a bitmap of the granules of AArch64 tables, in bytes.
    pub granules: u64,
    /// SMMU_IDR0.PTFS.
    pub aarch32: Aarch32,
    /// SMMU_IDR2.UBS: bits of an address on the upstream bus: 32, 36, 40, 42, 44 or 49.
    pub upstream_bits: u32,
    /// SMMU_IDR2.IAS: bits of an intermediate physical address: 32, 36, 40, 42, 44 or 48.
    pub ipa_bits: u32,
    /// SMMU_IDR2.OAS: bits of an output address, as `ipa_bits`.
    pub output_bits: u32,
    /// SMMU_IDR0.CTTW: table walks are coherent. It changes nothing but the register.
    pub coherent_walks: bool,
    /// SMMU_IDR2.VMID16S: 16-bit VMIDs.
    pub vmid16: bool,
    /// SMMU_IDR0.S1TS, S2TS and NTS.
    pub stages: Stages,
    /// SMMU_IDR7: the implementation's major revision in bits 7:4, the minor one in bits 3:0.
    pub revision: u8,
}

impl Default for SmmuConfig {
    fn default() -> Self {
        Self {
            page_size: PageSize::Size4K,
            pages_lg2: 4,
            context_banks: 16,
            stage2_banks: 0,
            mapping_groups: 48,
            streams: StreamMatchSupport::Matching,
            stream_id_bits: 15,
            extended_ids: false,
            granules: 1 << 12 | 1 << 14 | 1 << 16,
            aarch32: Aarch32::LongAndShort,
            upstream_bits: 49,
            ipa_bits: 48,
            output_bits: 48,
            coherent_walks: true,
            vmid16: false,
            stages: Stages::Nested,
            revision: 0x21,
        }
    }
}

/// No SMMU can be like this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} cannot be {value}")]
pub struct BadConfig {
    /// The field of [`SmmuConfig`].
    pub field: &'static str,
    /// Its value.
    pub value: u64,
}

/// The most context banks and stream mapping groups.
const MOST: u8 = 128;

impl SmmuConfig {
    pub(super) fn check(&self) -> Result<(), BadConfig> {
        let pages = 1u64.checked_shl(self.pages_lg2).unwrap_or(0);
        let banks = u64::from(self.context_banks);
        let only_stage2 = if self.stages.one() { self.stage2_banks } else { self.context_banks };
        let checks = [
            ("pages_lg2", u64::from(self.pages_lg2), (1..=8).contains(&self.pages_lg2)),
            ("context_banks", banks, (1..=pages.min(MOST.into())).contains(&banks)),
            ("stage2_banks", self.stage2_banks.into(), self.stage2_banks <= self.context_banks),
            ("stage2_banks", self.stage2_banks.into(), self.stage2_banks == only_stage2),
            ("stage2_banks", self.stage2_banks.into(), self.stages.two() || only_stage2 == 0),
            (
                "mapping_groups",
                self.mapping_groups.into(),
                (1..=MOST).contains(&self.mapping_groups),
            ),
            ("stream_id_bits", self.stream_id_bits.into(), (1..=15).contains(&self.stream_id_bits)),
            ("granules", self.granules, self.granules & !(1 << 12 | 1 << 14 | 1 << 16) == 0),
            ("upstream_bits", self.upstream_bits.into(), self.ubs().is_some()),
            ("ipa_bits", self.ipa_bits.into(), size_code(self.ipa_bits).is_some()),
            ("output_bits", self.output_bits.into(), size_code(self.output_bits).is_some()),
        ];
        match checks.into_iter().find(|(.., good)| !good) {
            Some((field, value, _)) => Err(BadConfig { field, value }),
            None => Ok(()),
        }
    }

    fn ubs(&self) -> Option<u32> {
        match self.upstream_bits {
            49 => Some(5),
            48 => None,
            bits => size_code(bits),
        }
    }

    /// The largest stream ID without extended ones.
    pub(super) fn stream_id_mask(&self) -> u32 {
        (1 << self.stream_id_bits) - 1
    }

    /// SMMU_IDR0 to SMMU_IDR7 (IHI 0062, "SMMU_IDR0-7, Identification registers"); `None` for
    /// others.
    ///
    /// Fields that are always 0 here: SES, EXSMRGS and BTM in SMMU_IDR0; HAFDBS, SMCD and SSDTP in
    /// SMMU_IDR1; what architecture extensions add in SMMU_IDR2 to SMMU_IDR6. ATOSNS is 1, because
    /// address translation operations are not modelled.
    pub(super) fn identification(&self, number: u64) -> Option<u32> {
        let flag = |set: bool, bit: u32| u32::from(set) << bit;
        match number {
            0 => {
                let stages = flag(self.stages.one(), 30)
                    | flag(self.stages.two(), 29)
                    | flag(self.stages == Stages::Nested, 28);
                let formats = match self.aarch32 {
                    Aarch32::LongAndShort => 0b00,
                    Aarch32::Long => 0b01,
                    Aarch32::None => 0b10,
                };
                let streams = flag(self.streams == StreamMatchSupport::Matching, 27)
                    | self.stream_id_bits << 9
                    | flag(self.extended_ids, 8)
                    | u32::from(self.mapping_groups);
                let walks = flag(self.coherent_walks, 14);
                Some(stages | 1 << 26 | formats << 24 | walks | streams)
            }
            1 => {
                let pages = flag(self.page_size == PageSize::Size64K, 31)
                    | self.pages_lg2.saturating_sub(1) << 28;
                Some(pages | u32::from(self.stage2_banks) << 16 | u32::from(self.context_banks))
            }
            2 => {
                let granule = |lg2, bit| flag(self.granules & lg2::size(lg2) != 0, bit);
                let formats = granule(16, 14) | granule(14, 13) | granule(12, 12);
                let sizes = self.ubs()? << 8
                    | size_code(self.output_bits)? << 4
                    | size_code(self.ipa_bits)?;
                Some(flag(self.vmid16, 15) | formats | sizes)
            }
            3..=6 => Some(0),
            7 => Some(self.revision.into()),
            _ => None,
        }
    }
}

/// How IAS and OAS encode a size.
fn size_code(bits: u32) -> Option<u32> {
    match bits {
        32 => Some(0),
        36 => Some(1),
        40 => Some(2),
        42 => Some(3),
        44 => Some(4),
        48 => Some(5),
        _ => None,
    }
}

/// The code of OAS, for comparing with PASize.
pub(super) fn output_code(config: &SmmuConfig) -> u32 {
    size_code(config.output_bits).unwrap_or(5)
}
