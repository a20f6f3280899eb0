//! The tables that are read: `--iommu` names a format and the variant of it.

use std::fmt::Debug;
use std::ops::ControlFlow;
use std::str::FromStr;

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2,
    ArmLpaeS2Config, ArmV7s, ArmV7sConfig, ArmV7sVariant, ConfigError, Entry, ForeignError,
    ForeignMemory, ForeignPiece, Format, Half, Riscv, RiscvConfig, RiscvMemoryTypes, RiscvMode,
    RiscvStage, SnoopControl, VtdSs, VtdSsConfig, Word, X86_64, X86_64Config, read_foreign,
};
use dmaspan::{IovaRange, PhysAddr, Prot, lg2};

use super::fit::Fit;

/// What `--iommu` takes, for its error and its help.
pub(crate) const KINDS: &str = "vtd, amd, amd-v2, smmuv3, smmu32, v7s, mediatek or riscv, and \
     behind it stage=1 or 2, bits=N, granule=4k, 16k or 64k, levels=N, half=upper, encryption=N";

/// A format that is chosen at run time.
pub(crate) trait Tables: Debug {
    /// What the manual calls the tables.
    fn title(&self) -> &'static str;
    /// What the tables translate.
    fn aperture(&self) -> IovaRange;
    /// The leaf sizes of the format, bit n for 2^n bytes.
    fn page_sizes(&self) -> u64;
    /// Reads a tree.
    fn read(
        &self,
        root: PhysAddr,
        memory: &dyn ForeignMemory,
        visit: &mut dyn FnMut(ForeignPiece) -> ControlFlow<()>,
    ) -> Result<(), ForeignError>;
    /// What an entry means.
    fn decode(&self, level: u32, word: u64) -> Entry;
    /// What a leaf permits.
    fn prot(&self, level: u32, word: u64) -> Prot;
    /// How well the entries of a tree fit.
    fn fit(&self, root: PhysAddr, memory: &dyn ForeignMemory) -> Fit;
}

impl<F: Format> Tables for F {
    fn title(&self) -> &'static str {
        self.manual().title
    }

    fn aperture(&self) -> IovaRange {
        self.geometry().aperture
    }

    fn page_sizes(&self) -> u64 {
        self.geometry().page_sizes
    }

    fn read(
        &self,
        root: PhysAddr,
        memory: &dyn ForeignMemory,
        visit: &mut dyn FnMut(ForeignPiece) -> ControlFlow<()>,
    ) -> Result<(), ForeignError> {
        read_foreign(self, root, memory, visit)
    }

    fn decode(&self, level: u32, word: u64) -> Entry {
        Format::decode(self, level, F::Word::of_bytes(&word.to_le_bytes()))
    }

    fn prot(&self, level: u32, word: u64) -> Prot {
        Format::prot(self, level, F::Word::of_bytes(&word.to_le_bytes()))
    }

    fn fit(&self, root: PhysAddr, memory: &dyn ForeignMemory) -> Fit {
        Fit::of(self, root, memory)
    }
}

/// An architecture, as `--iommu` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Intel VT-d.
    Vtd,
    /// AMD-Vi, host translations.
    Amd,
    /// AMD-Vi, guest translations: x86-64's tables.
    AmdV2,
    /// Arm SMMUv3 and SMMUv2, 64-bit descriptors.
    Smmu,
    /// Arm SMMUv2, AArch32's long descriptors.
    Smmu32,
    /// Arm's short descriptors.
    V7s,
    /// MediaTek's.
    MediaTek,
    /// RISC-V.
    Riscv,
}

const FAMILIES: [(&str, Family); 8] = [
    ("vtd", Family::Vtd),
    ("amd", Family::Amd),
    ("amd-v2", Family::AmdV2),
    ("smmuv3", Family::Smmu),
    ("smmu32", Family::Smmu32),
    ("v7s", Family::V7s),
    ("mediatek", Family::MediaTek),
    ("riscv", Family::Riscv),
];

/// What `--iommu` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableKind {
    pub(crate) family: Family,
    pub(crate) stage: Option<u32>,
    pub(crate) bits: Option<u32>,
    pub(crate) granule_lg2: Option<u32>,
    pub(crate) levels: Option<u32>,
    pub(crate) half: Half,
    pub(crate) encryption_bit: Option<u32>,
}

impl TableKind {
    /// The usual tables of a family.
    pub(crate) const fn new(family: Family) -> Self {
        Self {
            family,
            stage: None,
            bits: None,
            granule_lg2: None,
            levels: None,
            half: Half::Lower,
            encryption_bit: None,
        }
    }

    /// The format.
    ///
    /// # Errors
    ///
    /// Why the architecture has no such tables.
    pub(crate) fn tables(&self) -> Result<Box<dyn Tables>, String> {
        self.check_words()?;
        let tables = self.make().map_err(|error| error.to_string());
        tables.map_err(|why| format!("--iommu asks for tables that there are not: {why}"))
    }

    /// Refuses words that the family does not have.
    fn check_words(&self) -> Result<(), String> {
        use Family::{Amd, AmdV2, MediaTek, Riscv, Smmu, Smmu32, V7s, Vtd};
        let refuse = |word: &str, takes: &str| {
            let name = FAMILIES.iter().find(|(_, family)| *family == self.family);
            let name = name.map_or("", |(name, _)| name);
            Err(format!("--iommu {name} takes no {word}: it is for {takes}"))
        };
        if self.stage.is_some() && !matches!(self.family, Vtd | Smmu | Smmu32 | Riscv) {
            return refuse("stage", "vtd, smmuv3, smmu32 and riscv");
        }
        if self.granule_lg2.is_some() && self.family != Smmu {
            return refuse("granule", "smmuv3");
        }
        if self.levels.is_some() && self.family != Amd {
            return refuse("levels", "amd; other families have bits");
        }
        if self.bits.is_some() && matches!(self.family, Amd | V7s | MediaTek) {
            return refuse("bits", "vtd, amd-v2, smmuv3, smmu32 and riscv; amd has levels");
        }
        let is_second = self.stage.unwrap_or(if self.family == Vtd { 2 } else { 1 }) == 2;
        if self.half == Half::Upper
            && (is_second || !matches!(self.family, AmdV2 | Smmu | Vtd | Riscv))
        {
            return refuse("half", "first stages of vtd, amd-v2, smmuv3 and riscv");
        }
        if self.encryption_bit.is_some() && !matches!(self.family, Amd | AmdV2) {
            return refuse("encryption", "amd and amd-v2");
        }
        Ok(())
    }

    fn make(&self) -> Result<Box<dyn Tables>, ConfigError> {
        let (half, second) = (self.half, self.stage == Some(2));
        // Addresses of leaves reach as far as the entry can say, less what an encryption bit takes.
        let output_bits = self.encryption_bit.map_or(52, |bit| bit.min(52));
        let x86 = |bits| {
            let encryption_bit = self.encryption_bit;
            let config =
                X86_64Config { half, encryption_bit, ..X86_64Config::new(bits, output_bits) };
            X86_64::new(config)
        };
        Ok(match self.family {
            Family::Vtd if self.stage == Some(1) => Box::new(x86(self.bits.unwrap_or(48))?),
            Family::Vtd => {
                let snoop = SnoopControl::Cached;
                let config = VtdSsConfig { snoop, ..VtdSsConfig::new(self.bits.unwrap_or(48), 52) };
                Box::new(VtdSs::new(config)?)
            }
            Family::AmdV2 => Box::new(x86(self.bits.unwrap_or(48))?),
            Family::Amd => {
                let config = AmdV1Config {
                    first_levels: self.levels.unwrap_or(3),
                    encryption_bit: self.encryption_bit,
                    ..AmdV1Config::new(64, output_bits)
                };
                Box::new(AmdV1::new(config)?)
            }
            Family::Smmu => {
                let granule = self.granule_lg2.unwrap_or(12);
                let output_bits = if granule == 16 { 52 } else { 48 };
                let bits = self.bits.unwrap_or(if second { 40 } else { 48 });
                let s1 = ArmLpaeS1Config { half, ..ArmLpaeS1Config::new(bits, output_bits) };
                let s2 = ArmLpaeS2Config::new(bits, output_bits);
                match (second, granule) {
                    (false, 12) => Box::new(ArmLpaeS1::<12>::new(s1)?),
                    (false, 14) => Box::new(ArmLpaeS1::<14>::new(s1)?),
                    (false, _) => Box::new(ArmLpaeS1::<16>::new(s1)?),
                    (true, 12) => Box::new(ArmLpaeS2::<12>::new(s2)?),
                    (true, 14) => Box::new(ArmLpaeS2::<14>::new(s2)?),
                    (true, _) => Box::new(ArmLpaeS2::<16>::new(s2)?),
                }
            }
            Family::Smmu32 if second => {
                Box::new(ArmLpae32S2::new(ArmLpaeS2Config::new(self.bits.unwrap_or(40), 40))?)
            }
            Family::Smmu32 => {
                Box::new(ArmLpae32S1::new(ArmLpaeS1Config::new(self.bits.unwrap_or(32), 40))?)
            }
            Family::V7s => Box::new(ArmV7s::new(ArmV7sConfig::new(32, 32))?),
            Family::MediaTek => {
                let variant = ArmV7sVariant::MediaTek;
                Box::new(ArmV7s::new(ArmV7sConfig { variant, ..ArmV7sConfig::new(34, 35) })?)
            }
            Family::Riscv => {
                let bits = self.bits.unwrap_or(39);
                let mode = match bits {
                    39 => RiscvMode::Sv39,
                    48 => RiscvMode::Sv48,
                    57 => RiscvMode::Sv57,
                    _ => {
                        let supported = "39, 48 and 57, also in stage 2";
                        return Err(ConfigError::InputBits { input_bits: bits, supported });
                    }
                };
                let stage = if second { RiscvStage::Second } else { RiscvStage::First(half) };
                let memory_types = RiscvMemoryTypes::Svpbmt;
                let config = RiscvConfig { stage, memory_types, ..RiscvConfig::new(mode, 56) };
                Box::new(Riscv::new(config)?)
            }
        })
    }
}

impl FromStr for TableKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.trim().split(',').map(str::trim);
        let name = words.next().unwrap_or_default();
        let family = FAMILIES.iter().find(|(known, _)| *known == name);
        let Some(&(_, family)) = family else { return Err(format!("--iommu takes {KINDS}")) };
        let mut kind = Self::new(family);
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let number = || {
                let number = value.parse::<u32>().ok();
                number.ok_or_else(|| format!("--iommu takes a whole number behind {key}="))
            };
            match (key, value) {
                ("stage", "1") => kind.stage = Some(1),
                ("stage", "2") => kind.stage = Some(2),
                ("bits", _) => kind.bits = Some(number()?),
                ("levels", _) => kind.levels = Some(number()?),
                ("encryption", _) => kind.encryption_bit = Some(number()?),
                ("granule", "4k" | "4K" | "4096") => kind.granule_lg2 = Some(12),
                ("granule", "16k" | "16K" | "16384") => kind.granule_lg2 = Some(14),
                ("granule", "64k" | "64K" | "65536") => kind.granule_lg2 = Some(16),
                ("half", "upper") => kind.half = Half::Upper,
                ("half", "lower") => kind.half = Half::Lower,
                _ => return Err(format!("--iommu does not take {word}; it takes {KINDS}")),
            }
        }
        kind.tables()?;
        Ok(kind)
    }
}

/// The sizes in a bitmap, ascending.
pub(crate) fn sizes(bitmap: u64) -> Vec<u64> {
    (0..64).map(lg2::size).filter(|size| bitmap & size != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_and_stage_has_tables() {
        for (text, title, last) in [
            ("vtd", "VT-d second-stage page tables", (1 << 48) - 1),
            ("vtd,bits=39", "VT-d second-stage page tables", (1 << 39) - 1),
            ("vtd,stage=1", "x86-64 page tables", (1 << 47) - 1),
            ("vtd,stage=1,bits=57,half=upper", "x86-64 page tables", u64::MAX),
            ("amd", "AMD I/O page tables for host translations", u64::MAX),
            ("amd,levels=6,encryption=47", "AMD I/O page tables for host translations", u64::MAX),
            ("amd-v2", "x86-64 page tables", (1 << 47) - 1),
            ("smmuv3", "VMSAv8-64 stage 1, 4K granule", (1 << 48) - 1),
            ("smmuv3,stage=2,granule=16k", "VMSAv8-64 stage 2, 16K granule", (1 << 40) - 1),
            ("smmuv3,granule=64k,bits=52", "VMSAv8-64 stage 1, 64K granule", (1 << 52) - 1),
            ("smmu32", "VMSAv8-32 long descriptors, stage 1", u64::from(u32::MAX)),
            ("smmu32,stage=2", "VMSAv8-32 long descriptors, stage 2", (1 << 40) - 1),
            ("v7s", "VMSAv7 short descriptors", u64::from(u32::MAX)),
            ("mediatek", "VMSAv7 short descriptors, MediaTek's", (1 << 34) - 1),
            ("riscv", "Sv39", (1 << 38) - 1),
            ("riscv,bits=57,stage=2", "Sv57x4", (1 << 59) - 1),
        ] {
            let tables = text.parse::<TableKind>().unwrap().tables().unwrap();
            assert_eq!((tables.title(), tables.aperture().last().get()), (title, last), "{text}");
        }
    }

    #[test]
    fn what_a_family_does_not_have_is_refused_with_what_it_takes() {
        for (text, part) in [
            ("intel", "--iommu takes vtd, amd"),
            ("vtd,stage=3", "does not take stage=3"),
            ("vtd,levels=3", "--iommu vtd takes no levels: it is for amd"),
            ("amd,bits=48", "--iommu amd takes no bits"),
            ("amd,levels=7", "1 to 6"),
            ("vtd,bits=40", "39, 48 and 57"),
            ("riscv,bits=41,stage=2", "39, 48 and 57, also in stage 2"),
            ("smmuv3,granule=8k", "does not take granule=8k"),
            ("v7s,half=upper", "takes no half"),
            ("vtd,half=upper", "takes no half"),
            ("vtd,bits=x", "a whole number behind bits="),
            ("amd,encryption=60", "encryption bit"),
        ] {
            let error = text.parse::<TableKind>().unwrap_err();
            assert!(error.contains(part) && !error.contains('\n'), "{text}: {error}");
        }
    }
}
