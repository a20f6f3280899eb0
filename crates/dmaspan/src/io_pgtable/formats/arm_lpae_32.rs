//! Arm's 32-bit translation tables with long descriptors (VMSAv8-32), stages 1 and 2.
//!
//! Source: Arm Architecture Reference Manual for A-profile, DDI 0487, chapter G5 "The AArch32
//! Virtual Memory System Architecture", G5.5 "The VMSAv8-32 Long-descriptor translation table
//! format", and the registers TTBCR, TTBR0, MAIR0, MAIR1, VTCR and VTTBR in G8; before, DDI 0406C,
//! B3.6 "Long-descriptor translation table format".
//!
//! The descriptors are those of the 64-bit tables with the 4K granule, within 40 bits of output:
//! only the registers differ. There is no dirty state, and stage 1's upper half (TTBR1) is not
//! supported.

use super::arm_lpae::{base_address, walk_fields};
use super::arm_lpae_s1::{ArmLpaeS1, ArmLpaeS1Config};
use super::arm_lpae_s2::{ArmLpaeS2, ArmLpaeS2Config, S2MemoryTypes};
use super::{BreakBeforeMake, ConfigError, DirtyTracking, Half, manuals};
use crate::addr::PhysAddr;
use crate::io_pgtable::format::{Entry, Format, Geometry, Groups};
use crate::io_pgtable::manual::Manual;
use crate::prot::Prot;

/// A 64-bit format of the 4K granule whose tables AArch32 walks: [`ArmLpae32S1`] or
/// [`ArmLpae32S2`].
#[derive(Clone, Debug)]
pub struct ArmLpae32<F> {
    format: F,
    manual: Manual,
}

/// Stage 1 in AArch32.
pub type ArmLpae32S1 = ArmLpae32<ArmLpaeS1<12>>;

/// Stage 2 in AArch32.
pub type ArmLpae32S2 = ArmLpae32<ArmLpaeS2<12>>;

/// The values of the registers that a 32-bit stage-1 table goes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmLpae32S1Registers {
    /// TTBR0; the ASID is the driver's to add.
    pub ttbr0: u64,
    /// TTBCR with long descriptors and walks through TTBR1 disabled.
    pub ttbcr: u32,
    /// MAIR0.
    pub mair0: u32,
    /// MAIR1.
    pub mair1: u32,
}

/// The values of the registers that a 32-bit stage-2 table goes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmLpae32S2Registers {
    /// VTTBR; the VMID is the driver's to add.
    pub vttbr: u64,
    /// VTCR.
    pub vtcr: u32,
}

impl ArmLpae32S1 {
    /// A format with this configuration: 25 to 32 input bits, and 32, 36 or 40 output bits.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] where the architecture has no such table, and for what only 64-bit tables
    /// have: an upper half, dirty state, leaves that replace others of another size.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{ArmLpae32S1, ArmLpaeS1Config};
    ///
    /// assert!(ArmLpae32S1::new(ArmLpaeS1Config::new(32, 40)).is_ok());
    /// assert!(ArmLpae32S1::new(ArmLpaeS1Config::new(33, 40)).is_err());
    /// ```
    pub fn new(config: ArmLpaeS1Config) -> Result<Self, ConfigError> {
        check(config.input_bits, "25 to 32", 32, config.output_bits)?;
        check_features(config.dirty, config.break_before_make)?;
        if config.half == Half::Upper {
            return Err(ConfigError::Unsupported { what: "an upper half of 32-bit tables" });
        }
        Ok(Self { format: ArmLpaeS1::new(config)?, manual: manuals::ARM_32_S1 })
    }

    /// The register values for a table whose root is at `root`.
    ///
    /// TTBCR's fields: T0SZ at bits 2:0, IRGN0, ORGN0 and SH0 at bits 13:8, EPD1 at bit 23, EAE at
    /// bit 31.
    pub fn registers(&self, root: PhysAddr) -> ArmLpae32S1Registers {
        let config = self.format.config();
        let mair = self.format.registers(root).mair;
        let size = u64::from(32 - config.input_bits);
        ArmLpae32S1Registers {
            ttbr0: base_address(root, config.output_bits),
            ttbcr: low(size | self.format.walk_fields() | 1 << 23 | 1 << 31),
            mair0: low(mair),
            mair1: low(mair >> 32),
        }
    }
}

impl ArmLpae32S2 {
    /// A format with this configuration: 25 to 40 input bits, and 32, 36 or 40 output bits, which
    /// may be fewer (AArch64.S2MinTxSZ with AArch32 below). The root is at the manual's level 1 or
    /// 2.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] where the architecture has no such table, and for what only 64-bit tables
    /// have: dirty state, forced memory types, leaves that replace others of another size.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{ArmLpae32S2, ArmLpaeS2Config};
    ///
    /// assert!(ArmLpae32S2::new(ArmLpaeS2Config::new(40, 40)).is_ok());
    /// assert!(ArmLpae32S2::new(ArmLpaeS2Config::new(42, 42)).is_err());
    /// ```
    pub fn new(config: ArmLpaeS2Config) -> Result<Self, ConfigError> {
        check(config.input_bits, "25 to 40", 40, config.output_bits)?;
        check_features(config.dirty, config.break_before_make)?;
        if config.memory_types == S2MemoryTypes::Forced {
            return Err(ConfigError::Unsupported { what: "forced memory types of 32-bit tables" });
        }
        if config.start_level == Some(3) {
            return Err(ConfigError::Unsupported { what: "32-bit tables that start at level 3" });
        }
        Ok(Self { format: ArmLpaeS2::with_any_input(config)?, manual: manuals::ARM_32_S2 })
    }

    /// The level of the root as the manual counts, 0 at the top.
    pub const fn start_level(&self) -> u32 {
        self.format.start_level()
    }

    /// The register values for a table whose root is at `root`.
    ///
    /// VTCR's fields: T0SZ at bits 3:0, a signed number whose sign is once more in S, bit 4; SL0 at
    /// bits 7:6; IRGN0, ORGN0 and SH0 at bits 13:8; bit 31 is 1.
    pub fn registers(&self, root: PhysAddr) -> ArmLpae32S2Registers {
        let config = self.format.config();
        // Five bits of 32 - input bits, which is -8 to 7: T0SZ and its sign.
        let size = u64::from(32u32.wrapping_sub(config.input_bits) & 0b1_1111);
        let start = u64::from(2 - self.start_level());
        ArmLpae32S2Registers {
            vttbr: base_address(root, config.output_bits),
            vtcr: low(size | start << 6 | walk_fields(config.walks) | 1 << 31),
        }
    }
}

/// Whether AArch32 has these widths.
fn check(
    input_bits: u32,
    supported: &'static str,
    most: u32,
    output_bits: u32,
) -> Result<(), ConfigError> {
    if input_bits > most {
        return Err(ConfigError::InputBits { input_bits, supported });
    }
    if output_bits > 40 {
        return Err(ConfigError::OutputBits { output_bits, supported: "32, 36 and 40" });
    }
    Ok(())
}

fn check_features(
    dirty: DirtyTracking,
    break_before_make: BreakBeforeMake,
) -> Result<(), ConfigError> {
    if dirty != DirtyTracking::Off {
        return Err(ConfigError::Unsupported { what: "dirty state in 32-bit tables" });
    }
    if break_before_make != BreakBeforeMake::Needed {
        return Err(ConfigError::Unsupported { what: "32-bit tables without break-before-make" });
    }
    Ok(())
}

/// The low word of a register.
#[expect(clippy::cast_possible_truncation, reason = "the low word is what is asked for")]
const fn low(register: u64) -> u32 {
    register as u32
}

// SAFETY: all answers are those of the format inside, whose promises they keep.
#[expect(unsafe_code, reason = "the promise of a format")]
#[deny(clippy::missing_trait_methods)]
unsafe impl<F: Format> Format for ArmLpae32<F> {
    type Word = F::Word;
    const GRANULE_LG2: u32 = F::GRANULE_LG2;
    const LG2_ENTRIES: u32 = F::LG2_ENTRIES;
    const GROUPS: Groups = F::GROUPS;
    const WRITTEN_BACK: F::Word = F::WRITTEN_BACK;
    const DIRTY: F::Word = F::DIRTY;
    const GROWS: bool = F::GROWS;

    fn manual(&self) -> Manual {
        self.manual
    }

    fn geometry(&self) -> Geometry {
        self.format.geometry()
    }

    fn first_top_level(&self) -> u32 {
        self.format.first_top_level()
    }

    #[inline(always)]
    fn template(&self, level: u32, lg2: u32, prot: Prot) -> F::Word {
        self.format.template(level, lg2, prot)
    }

    #[inline(always)]
    fn refuses(&self, prot: Prot) -> bool {
        self.format.refuses(prot)
    }

    #[inline(always)]
    fn leaf(&self, template: F::Word, paddr: PhysAddr) -> F::Word {
        self.format.leaf(template, paddr)
    }

    #[inline(always)]
    fn advance(&self, leaf: F::Word, bytes: u64) -> F::Word {
        self.format.advance(leaf, bytes)
    }

    #[inline(always)]
    fn link(&self, level: u32, table: PhysAddr) -> F::Word {
        self.format.link(level, table)
    }

    #[inline(always)]
    fn decode(&self, level: u32, word: F::Word) -> Entry {
        self.format.decode(level, word)
    }

    #[inline(always)]
    fn table_of(&self, level: u32, word: F::Word) -> Option<PhysAddr> {
        self.format.table_of(level, word)
    }

    #[inline(always)]
    fn is_single(&self, level: u32, word: F::Word) -> bool {
        self.format.is_single(level, word)
    }

    #[inline(always)]
    fn prot(&self, level: u32, leaf: F::Word) -> Prot {
        self.format.prot(level, leaf)
    }

    #[inline(always)]
    fn tracks_dirty(&self) -> bool {
        self.format.tracks_dirty()
    }

    #[inline(always)]
    fn is_dirty(&self, leaf: F::Word) -> bool {
        self.format.is_dirty(leaf)
    }

    #[inline(always)]
    fn clean(&self, leaf: F::Word) -> F::Word {
        self.format.clean(leaf)
    }

    #[inline(always)]
    fn dirtied(&self, leaf: F::Word) -> F::Word {
        self.format.dirtied(leaf)
    }

    fn needs_break(&self) -> bool {
        self.format.needs_break()
    }

    fn breaks_to_change(&self) -> bool {
        self.format.breaks_to_change()
    }

    #[inline(always)]
    fn shift(level: u32) -> u32 {
        F::shift(level)
    }

    #[inline(always)]
    fn level_of(lg2: u32) -> u32 {
        F::level_of(lg2)
    }
}

#[cfg(test)]
mod tests {
    use super::super::arm_lpae::tests::reads_back;
    use super::*;
    use crate::prot::Coherency;

    #[test]
    fn what_is_encoded_reads_back() {
        let uncached_device = |mut prot: Prot| {
            prot.set(Prot::CACHE, prot.contains(Prot::CACHE) && !prot.contains(Prot::MMIO));
            prot
        };
        for output_bits in [32, 36, 40] {
            let stage_1 = ArmLpae32S1::new(ArmLpaeS1Config::new(32, output_bits)).unwrap();
            reads_back(&stage_1, |prot| uncached_device(prot) | Prot::READ);
            let stage_2 = ArmLpae32S2::new(ArmLpaeS2Config::new(32, output_bits)).unwrap();
            reads_back(&stage_2, |prot| uncached_device(prot) - Prot::PRIV);
        }
    }

    #[test]
    fn stage_1_registers_have_the_bits_of_the_manual() {
        let config = ArmLpaeS1Config::new(32, 40);
        let registers = |config| ArmLpae32S1::new(config).unwrap().registers(PhysAddr::new(0x1040));
        // T0SZ 0, IRGN0 and ORGN0 0b01 (0x500), SH0 0b11 (0x3000), EPD1 bit 23, EAE bit 31. MAIR0
        // has the attributes 0 to 3, from the low byte on: 0x44 non-cacheable, 0xff write-back,
        // 0x04 device nGnRE, 0xf4 outer write-back.
        let expected = ArmLpae32S1Registers {
            ttbr0: 0x1040,
            ttbcr: 0x8080_3500,
            mair0: 0xf404_ff44,
            mair1: 0,
        };
        assert_eq!(registers(config), expected);
        // T0SZ 7, SH0 0b10 and no caches.
        let walks = Coherency::NonCoherent;
        let small = ArmLpaeS1Config { input_bits: 25, walks, ..config };
        assert_eq!(registers(small).ttbcr, 0x8080_2007);
    }

    #[test]
    fn stage_2_registers_have_the_bits_of_the_manual() {
        let registers = |input_bits, start_level| {
            let config = ArmLpaeS2Config { start_level, ..ArmLpaeS2Config::new(input_bits, 40) };
            ArmLpae32S2::new(config).unwrap().registers(PhysAddr::new(0x12_3456_8000))
        };
        // T0SZ -8 is 0b1000 with S set: 0x18. SL0 0b01 for level 1 (0x40), IRGN0 and ORGN0 0b01
        // (0x500), SH0 0b11 (0x3000), bit 31.
        let expected = ArmLpae32S2Registers { vttbr: 0x12_3456_8000, vtcr: 0x8000_3558 };
        assert_eq!(registers(40, None), expected);
        // T0SZ -2 is 0b1110 with S set: 0x1e. 16 tables of level 2, SL0 0b00.
        assert_eq!(registers(34, None).vtcr, 0x8000_351e);
        // T0SZ 1, level 1.
        assert_eq!(registers(31, Some(1)).vtcr, 0x8000_3541);
        // T0SZ 7, level 2.
        assert_eq!(registers(25, None).vtcr, 0x8000_3507);
    }

    #[test]
    fn roots_have_the_shapes_of_the_manual() {
        // T0SZ 0 is level 1 with four entries, T0SZ 2 and more is level 2.
        let root = |input_bits| {
            let format = ArmLpae32S1::new(ArmLpaeS1Config::new(input_bits, 40)).unwrap();
            (format.geometry().top_level, format.geometry().root.lg2_size)
        };
        assert_eq!(root(32), (2, 5));
        assert_eq!(root(30), (1, 12));
        assert_eq!(root(25), (1, 7));
        // T0SZ -8 is two tables of level 1 with 512 entries each.
        let format = ArmLpae32S2::new(ArmLpaeS2Config::new(40, 40)).unwrap();
        assert_eq!((format.geometry().root.lg2_size, format.geometry().root.lg2_align), (13, 13));
        // VTCR does not know how many bits physical addresses have.
        let few = ArmLpae32S2::new(ArmLpaeS2Config::new(40, 32)).unwrap();
        assert_eq!(few.geometry().root.lg2_size, 13);
    }

    #[test]
    fn what_only_64_bit_tables_have_is_refused() {
        let unsupported = |error| matches!(error, ConfigError::Unsupported { .. });
        let (dirty, break_before_make) = (DirtyTracking::Hardware, BreakBeforeMake::NotNeeded);
        let s1 = ArmLpaeS1Config::new(32, 40);
        let refused = |config| ArmLpae32S1::new(config).unwrap_err();
        assert!(unsupported(refused(ArmLpaeS1Config { dirty, ..s1 })));
        assert!(unsupported(refused(ArmLpaeS1Config { break_before_make, ..s1 })));
        assert!(unsupported(refused(ArmLpaeS1Config { half: Half::Upper, ..s1 })));
        let supported = "25 to 32";
        let expected = ConfigError::InputBits { input_bits: 33, supported };
        assert_eq!(refused(ArmLpaeS1Config::new(33, 40)), expected);
        let expected = ConfigError::OutputBits { output_bits: 42, supported: "32, 36 and 40" };
        assert_eq!(refused(ArmLpaeS1Config::new(32, 42)), expected);
        let s2 = ArmLpaeS2Config::new(32, 40);
        let refused = |config| ArmLpae32S2::new(config).unwrap_err();
        assert!(unsupported(refused(ArmLpaeS2Config { dirty, ..s2 })));
        assert!(unsupported(refused(ArmLpaeS2Config { break_before_make, ..s2 })));
        let memory_types = S2MemoryTypes::Forced;
        assert!(unsupported(refused(ArmLpaeS2Config { memory_types, ..s2 })));
        for (input_bits, level) in [(40, 0), (40, 2), (30, 1), (25, 3)] {
            let start_level = Some(level);
            assert!(unsupported(refused(ArmLpaeS2Config { input_bits, start_level, ..s2 })));
        }
        let expected = ConfigError::InputBits { input_bits: 41, supported: "25 to 40" };
        assert_eq!(refused(ArmLpaeS2Config::new(41, 40)), expected);
    }
}
