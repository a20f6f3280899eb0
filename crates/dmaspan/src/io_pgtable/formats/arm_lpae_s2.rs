//! Arm's 64-bit translation tables (VMSAv8-64), stage 2, with granules of 4K, 16K and 64K.
//!
//! Source: Arm Architecture Reference Manual for A-profile, DDI 0487, chapter D8 "The AArch64
//! Virtual Memory System Architecture": D8.2 "Translation process", D8.3 "Translation table
//! descriptor formats", D8.4 "Memory access control", the registers VTTBR_EL2 and VTCR_EL2 in D24,
//! and the functions AArch64.S2StartLevel, AArch64.S2InvalidSL, AArch64.S2InconsistentSL and
//! AArch64.S2MinTxSZ in J1.1. The stream table entry of an SMMUv3 has the fields of VTCR as they
//! are here, and in S2TTB the address of the root (IHI 0070, 5.2). That is not always
//! [`ArmS2Registers::vttbr`]: with 52 bits VTTBR has the upper ones in bits 5:2.
//!
//! Level 0 here is the manual's level 3.
//!
//! # Where the tree starts
//!
//! The root of stage 2 may be up to 16 tables side by side, so that the bits of up to four entries
//! more are resolved by the initial lookup (D8.2, "Concatenated translation tables"). A start level
//! is possible if the root has at least two entries and at most 16 tables of them
//! (AArch64.S2InconsistentSL), and if the hardware has addresses that need it
//! (AArch64.S2InvalidSL): level 0 with 4K from 44 bits on and never with 16K, level 1 with 16K from
//! 42 bits on and with 64K from 44 bits on. Where a level is thus missing, the tables of the next
//! one must be concatenated.

use super::arm_lpae::{
    ACCESSED, DIRTY_MODIFIER, Descriptor, SH_INNER, SH_OUTER, SOFTWARE, base_address,
    granule_field, long_descriptors, output_size, walk_fields,
};
use super::{BreakBeforeMake, ConfigError, DirtyTracking, Half, manuals};
use crate::addr::PhysAddr;
use crate::io_pgtable::format::{Entry, Format, Geometry, Groups};
use crate::io_pgtable::manual::Manual;
use crate::prot::{Coherency, Prot};

/// Bits 5:2, MemAttr: memory type and cacheability (D8.6, "Stage 2 memory type and Cacheability
/// attributes").
const MEM_ATTR_SHIFT: u32 = 2;
const MEM_ATTR_MASK: u64 = 0b1111 << MEM_ATTR_SHIFT;
/// Device nGnRE, also where stage 2 decides alone.
const DEVICE: u64 = 0b0001 << MEM_ATTR_SHIFT;
/// Normal, non-cacheable, also where stage 2 decides alone.
const NON_CACHEABLE: u64 = 0b0101 << MEM_ATTR_SHIFT;
/// Normal, inner and outer write-back.
const WRITE_BACK: u64 = 0b1111 << MEM_ATTR_SHIFT;
/// Normal write-back, whatever stage 1 says (D8.6, FEAT_S2FWB).
const FORCED_WRITE_BACK: u64 = 0b0110 << MEM_ATTR_SHIFT;
/// Bits 7:6, S2AP: reads and writes are permitted, each by its own bit (D8.4, "Stage 2 data
/// accesses").
const READ: u64 = 1 << 6;
const WRITE: u64 = 1 << 7;
/// Bits 54:53, XN: 0b10 permits no instruction fetches, with and without FEAT_XNX (D8.4, "Stage 2
/// instruction execution").
const EXECUTE_NEVER_MASK: u64 = 0b11 << 53;
const EXECUTE_NEVER: u64 = 0b10 << 53;

/// The manual's number of the level of pages.
const LAST_LEVEL: u32 = 3;

/// The most tables that a root is made of, log2.
const LG2_CONCATENATED: u32 = 4;

/// Says which stage decides the memory type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum S2MemoryTypes {
    /// The stricter of the two.
    Combined,
    /// Stage 2 for normal memory: FEAT_S2FWB, enabled by HCR_EL2.FWB or the SMMU's STE.S2FWB.
    Forced,
}

/// Says what distinguishes one stage-2 table from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmLpaeS2Config {
    /// Bits of input addresses: 25 to 48, and to 52 with the 64K granule; at most `output_bits`
    /// (AArch64.S2MinTxSZ).
    pub input_bits: u32,
    /// Bits of physical addresses that the hardware has: 32, 36, 40, 42, 44, 48, and 52 with the
    /// 64K granule.
    pub output_bits: u32,
    /// The level of the root as the manual counts, 0 at the top. `None` for the fewest levels, with
    /// tables side by side where they save one.
    ///
    /// With 4K, level 3 needs FEAT_TTST and is never what `None` chooses.
    pub start_level: Option<u32>,
    /// The leaf sizes to use, bit n for 2^n bytes; `None` for the granule and the blocks.
    /// Contiguous groups ([`ArmLpaeS2::CONTIGUOUS_SIZES`]) are for hardware that has them.
    pub page_sizes: Option<u64>,
    /// Whether hardware's walks see the CPU's caches.
    pub walks: Coherency,
    /// Which stage decides the memory type.
    pub memory_types: S2MemoryTypes,
    /// Whether hardware manages dirty state (FEAT_HAFDBS, D8.5).
    pub dirty: DirtyTracking,
    /// How leaves of different sizes replace each other (D8, "Using break-before-make when
    /// updating translation table entries").
    pub break_before_make: BreakBeforeMake,
}

impl ArmLpaeS2Config {
    /// A table of the fewest levels with coherent walks and leaves that are single descriptors.
    pub const fn new(input_bits: u32, output_bits: u32) -> Self {
        Self {
            input_bits,
            output_bits,
            start_level: None,
            page_sizes: None,
            walks: Coherency::Coherent,
            memory_types: S2MemoryTypes::Combined,
            dirty: DirtyTracking::Off,
            break_before_make: BreakBeforeMake::Needed,
        }
    }
}

/// The values of the registers that a stage-2 table goes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmS2Registers {
    /// VTTBR_EL2; the VMID is the driver's to add. With 52 output bits, bits 51:48 of the root's
    /// address are in bits 5:2.
    pub vttbr: u64,
    /// VTCR_EL2.
    pub vtcr: u64,
}

/// Arm's 64-bit stage 2 with a granule of `2^GRANULE_LG2` bytes: 12, 14 or 16.
#[derive(Clone, Debug)]
pub struct ArmLpaeS2<const GRANULE_LG2: u32> {
    config: ArmLpaeS2Config,
    page_sizes: u64,
    top_level: u32,
}

impl<const G: u32> ArmLpaeS2<G> {
    /// Leaves that are one descriptor each: pages, and blocks where the granule has them (D8.3.1).
    pub const PAGE_SIZES: u64 = Descriptor::<G>::PAGE_SIZES;

    /// Leaves that are a group of contiguous descriptors, as at stage 1 (D8.7.1).
    pub const CONTIGUOUS_SIZES: u64 = Descriptor::<G>::CONTIGUOUS_SIZES;

    /// A format with this configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] where the architecture has no such table.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{ArmLpaeS2, ArmLpaeS2Config, Format};
    ///
    /// // 40 bits from level 1 on: two tables of 4K side by side.
    /// let format = ArmLpaeS2::<12>::new(ArmLpaeS2Config::new(40, 40))?;
    /// assert_eq!(format.start_level(), 1);
    /// assert_eq!(format.geometry().root.lg2_size, 13);
    /// // Level 0 is for hardware with addresses of 44 bits and more.
    /// let config = ArmLpaeS2Config { start_level: Some(0), ..ArmLpaeS2Config::new(40, 40) };
    /// assert!(ArmLpaeS2::<12>::new(config).is_err());
    /// Ok::<(), dmaspan::io_pgtable::ConfigError>(())
    /// ```
    pub fn new(config: ArmLpaeS2Config) -> Result<Self, ConfigError> {
        let ArmLpaeS2Config { input_bits, output_bits, .. } = config;
        let format = Self::with_any_input(config)?;
        if input_bits > output_bits {
            let supported = "at most as many as output bits";
            return Err(ConfigError::InputBits { input_bits, supported });
        }
        Ok(format)
    }

    /// The same where addresses before translation may be larger than physical ones, as in AArch32
    /// (AArch64.S2MinTxSZ).
    pub(super) fn with_any_input(config: ArmLpaeS2Config) -> Result<Self, ConfigError> {
        let ArmLpaeS2Config { input_bits, output_bits, .. } = config;
        Descriptor::<G>::check(input_bits, output_bits)?;
        let top_level = match config.start_level {
            Some(level) => Self::top_level(level, input_bits, output_bits)?,
            None => Self::lowest_top_level(input_bits),
        };
        let page_sizes = Descriptor::<G>::page_sizes::<Self>(
            config.page_sizes,
            input_bits,
            output_bits,
            top_level,
        )?;
        Ok(Self { config, page_sizes, top_level })
    }

    /// The level of the root as the manual counts, 0 at the top.
    pub const fn start_level(&self) -> u32 {
        LAST_LEVEL - self.top_level
    }

    /// The register values for a table whose root is at `root`.
    ///
    /// VTCR_EL2's fields: T0SZ at bits 5:0, SL0 7:6, IRGN0, ORGN0 and SH0 13:8, TG0 15:14, PS
    /// 18:16, HA 21, HD 22, and bit 31, which is 1.
    pub fn registers(&self, root: PhysAddr) -> ArmS2Registers {
        let size = u64::from(64 - self.config.input_bits);
        let granule = granule_field(G, [0b00, 0b10, 0b01]);
        let output_size = output_size(self.config.output_bits).unwrap_or(0);
        // Hardware manages dirty state only where it manages the access flag too.
        let managed = if self.tracks_dirty() { 0b11 << 21 } else { 0 };
        let start = match (G, self.start_level()) {
            (12, level @ 0..=2) => 2 - level,
            // SL0 0b11 with 4K is level 3 (FEAT_TTST); the other granules count from there.
            (12, _) => 0b11,
            (_, level) => LAST_LEVEL - level,
        };
        let walked = u64::from(start) << 6 | walk_fields(self.config.walks) | granule << 14;
        ArmS2Registers {
            vttbr: base_address(root, self.config.output_bits),
            vtcr: size | walked | output_size << 16 | managed | 1 << 31,
        }
    }

    /// Returns what it was made with: a driver compares it with what hardware walks.
    pub const fn config(&self) -> &ArmLpaeS2Config {
        &self.config
    }

    /// MemAttr of write-back memory.
    #[inline(always)]
    const fn write_back(&self) -> u64 {
        match self.config.memory_types {
            S2MemoryTypes::Combined => WRITE_BACK,
            S2MemoryTypes::Forced => FORCED_WRITE_BACK,
        }
    }

    /// The top level of a tree that starts at the manual's `level`.
    fn top_level(level: u32, input_bits: u32, output_bits: u32) -> Result<u32, ConfigError> {
        let first = match G {
            12 if output_bits >= 44 => 0,
            12 => 1,
            14 if output_bits >= 42 => 1,
            14 => 2,
            _ if output_bits >= 44 => 1,
            _ => 2,
        };
        if !(first..=LAST_LEVEL).contains(&level) {
            let what = "a start level that hardware with these output bits does not have";
            return Err(ConfigError::Unsupported { what });
        }
        let top_level = LAST_LEVEL - level;
        if input_bits <= Self::shift(top_level) {
            let what = "a start level at which the input bits leave the root a single entry";
            return Err(ConfigError::Unsupported { what });
        }
        if input_bits > Self::shift(top_level + 1) + LG2_CONCATENATED {
            let what = "a start level at which the root would be more than 16 tables";
            return Err(ConfigError::Unsupported { what });
        }
        Ok(top_level)
    }

    /// The top level of the tree with the fewest levels. It never needs a level that hardware with
    /// as many output bits lacks.
    fn lowest_top_level(input_bits: u32) -> u32 {
        // FEAT_TTST is not to be expected.
        let lowest = if G == 12 { 1 } else { 0 };
        let reached = Self::shift(lowest + 1) + LG2_CONCATENATED;
        lowest + input_bits.saturating_sub(reached).div_ceil(Self::LG2_ENTRIES)
    }
}

// SAFETY: a link is VALID | TABLE_OR_PAGE with the table's address, which `Descriptor::address`
// takes out again; no leaf above level 0 has both bits, hardware's AF and S2AP are neither, and no
// walk asks for a table at level 0.
#[expect(unsafe_code, reason = "the promise of a format")]
unsafe impl<const G: u32> Format for ArmLpaeS2<G> {
    long_descriptors!(G);

    fn manual(&self) -> Manual {
        manuals::arm_s2(G)
    }

    fn geometry(&self) -> Geometry {
        let ArmLpaeS2Config { input_bits, output_bits, .. } = self.config;
        let aperture = Half::Lower.aperture(input_bits);
        // Tables side by side are aligned as one, VTTBR's address to at least 64 bytes (D24,
        // VTTBR_EL2.BADDR).
        let tree = (self.top_level, input_bits - Self::shift(self.top_level));
        Geometry::of_tree::<Self>(aperture, output_bits, self.page_sizes, tree)
    }

    #[inline(always)]
    fn template(&self, level: u32, lg2: u32, prot: Prot) -> u64 {
        let kind = Descriptor::<G>::leaf(level, lg2, Self::shift(level));
        let read = if prot.contains(Prot::READ) { READ } else { 0 };
        let write = match (prot.contains(Prot::WRITE), self.config.dirty) {
            (false, _) => 0,
            (true, DirtyTracking::Off) => WRITE,
            // Writable-clean: hardware sets S2AP[1] at the first write.
            (true, DirtyTracking::Hardware) => DIRTY_MODIFIER,
        };
        let execute = if prot.contains(Prot::NOEXEC) { EXECUTE_NEVER } else { 0 };
        let memory = if prot.contains(Prot::MMIO) {
            DEVICE | SH_OUTER
        } else if prot.contains(Prot::CACHE) {
            self.write_back() | SH_INNER
        } else {
            NON_CACHEABLE | SH_OUTER
        };
        kind | read | write | execute | memory | ACCESSED
    }

    /// Stage 2 cannot tell privileged accesses from others.
    #[inline(always)]
    fn prot(&self, _level: u32, leaf: u64) -> Prot {
        let memory = leaf & MEM_ATTR_MASK;
        let mut prot = Prot::empty();
        prot.set(Prot::READ, leaf & READ != 0);
        prot.set(Prot::WRITE, leaf & (WRITE | DIRTY_MODIFIER) != 0);
        prot.set(Prot::NOEXEC, leaf & EXECUTE_NEVER_MASK == EXECUTE_NEVER);
        prot.set(Prot::CACHE, memory == self.write_back());
        prot.set(Prot::MMIO, memory == DEVICE);
        prot
    }

    /// Writable-dirty is DBM with S2AP\[1\] set (D8.5, "Hardware management of dirty state").
    #[inline(always)]
    fn is_dirty(&self, leaf: u64) -> bool {
        leaf & (DIRTY_MODIFIER | WRITE) == DIRTY_MODIFIER | WRITE
    }

    #[inline(always)]
    fn clean(&self, leaf: u64) -> u64 {
        leaf & !write_if_managed(leaf)
    }

    #[inline(always)]
    fn dirtied(&self, leaf: u64) -> u64 {
        leaf | write_if_managed(leaf)
    }
}

/// S2AP\[1\] where the leaf has DBM: the bit that hardware changes, if it may.
#[inline(always)]
const fn write_if_managed(leaf: u64) -> u64 {
    leaf >> (DIRTY_MODIFIER.ilog2() - WRITE.ilog2()) & WRITE
}

#[cfg(test)]
mod tests {
    use super::super::arm_lpae::tests::{reads_back, writes_are_seen};
    use super::*;
    use crate::lg2;
    use alloc::vec::Vec;

    /// Stage 2 has no privilege, and a device's registers are not cached.
    fn granted(mut prot: Prot) -> Prot {
        prot.set(Prot::CACHE, prot.contains(Prot::CACHE) && !prot.contains(Prot::MMIO));
        prot - Prot::PRIV
    }

    fn with_groups<const G: u32>(config: ArmLpaeS2Config) -> ArmLpaeS2<G> {
        let singles = ArmLpaeS2::<G>::new(config).unwrap().page_sizes;
        let page_sizes = Some(singles | ArmLpaeS2::<G>::CONTIGUOUS_SIZES);
        ArmLpaeS2::new(ArmLpaeS2Config { page_sizes, ..config }).unwrap()
    }

    fn reads_back_of<const G: u32>(bits: u32) {
        let config = ArmLpaeS2Config::new(bits, bits);
        let dirty = DirtyTracking::Hardware;
        let memory_types = S2MemoryTypes::Forced;
        let forced = ArmLpaeS2Config { memory_types, ..config };
        for config in [config, forced, ArmLpaeS2Config { dirty, ..config }] {
            let format = with_groups::<G>(config);
            reads_back(&format, granted);
        }
        // The first write sets S2AP[1], bit 7 (D8.5).
        let format = with_groups::<G>(ArmLpaeS2Config { dirty, ..config });
        writes_are_seen(&format, |leaf| leaf | 1 << 7);
    }

    #[test]
    fn what_is_encoded_reads_back_and_hardware_marks_writes() {
        reads_back_of::<12>(48);
        reads_back_of::<14>(48);
        reads_back_of::<16>(48);
        reads_back_of::<16>(52);
    }

    fn page(config: ArmLpaeS2Config, prot: Prot) -> u64 {
        let format = ArmLpaeS2::<12>::new(config).unwrap();
        format.leaf(format.template(0, 12, prot), PhysAddr::new(0x5000))
    }

    #[test]
    fn page_descriptors_have_the_bits_of_the_manual() {
        let config = ArmLpaeS2Config::new(48, 48);
        // Valid and page 0b11, MemAttr 0b1111 in bits 5:2, S2AP 0b11 in bits 7:6, SH 0b11 in bits
        // 9:8, AF bit 10.
        assert_eq!(page(config, Prot::READ_WRITE | Prot::CACHE), 0x57ff);
        // MemAttr 0b0101 and SH 0b10; S2AP 0b01 reads, 0b10 writes.
        assert_eq!(page(config, Prot::READ), 0x5657);
        assert_eq!(page(config, Prot::WRITE), 0x5697);
        // MemAttr 0b0001, XN 0b10 in bits 54:53.
        assert_eq!(page(config, Prot::READ | Prot::MMIO | Prot::NOEXEC), 0x0040_0000_0000_5647);
        // DBM is bit 51; S2AP[1] is clear until the first write.
        let dirty = ArmLpaeS2Config { dirty: DirtyTracking::Hardware, ..config };
        assert_eq!(page(dirty, Prot::READ_WRITE | Prot::CACHE), 0x0008_0000_0000_577f);
        assert_eq!(page(dirty, Prot::READ | Prot::CACHE), 0x577f);
        // MemAttr 0b0110, 0b0101 and 0b0001.
        let forced = ArmLpaeS2Config { memory_types: S2MemoryTypes::Forced, ..config };
        assert_eq!(page(forced, Prot::READ | Prot::CACHE), 0x575b);
        assert_eq!(page(forced, Prot::READ), 0x5657);
        assert_eq!(page(forced, Prot::READ | Prot::MMIO), 0x5647);
    }

    #[test]
    fn dirty_state_is_only_where_hardware_may_change_it() {
        let config = ArmLpaeS2Config::new(48, 48);
        let dirty = DirtyTracking::Hardware;
        let format = ArmLpaeS2::<12>::new(ArmLpaeS2Config { dirty, ..config }).unwrap();
        assert!(format.is_dirty(0x0008_0000_0000_57ff));
        // Writable without DBM: no write is noted.
        assert!(!format.is_dirty(0x57ff));
        assert_eq!(format.clean(0x57ff), 0x57ff);
        assert!(!ArmLpaeS2::<12>::new(config).unwrap().tracks_dirty());
    }

    fn registers<const G: u32>(config: ArmLpaeS2Config, root: u64) -> (u64, u64) {
        let registers = ArmLpaeS2::<G>::new(config).unwrap().registers(PhysAddr::new(root));
        (registers.vttbr, registers.vtcr)
    }

    #[test]
    fn registers_have_the_bits_of_the_manual() {
        let config = ArmLpaeS2Config::new(48, 48);
        // T0SZ 64 - 40 = 0x18, SL0 0b01 for level 1 with 4K (0x40), IRGN0 and ORGN0 0b01 (0x500),
        // SH0 0b11 (0x3000), TG0 0b00, PS 0b010 (0x2_0000), bit 31.
        let concatenated = registers::<12>(ArmLpaeS2Config::new(40, 40), 0x4321_0000);
        assert_eq!(concatenated, (0x4321_0000, 0x8002_3558));
        // T0SZ 16, SL0 0b10 for level 0, SH0 0b10 and no caches, PS 0b101.
        let walks = Coherency::NonCoherent;
        assert_eq!(registers::<12>(ArmLpaeS2Config { walks, ..config }, 0).1, 0x8005_2090);
        // HA and HD, bits 21 and 22.
        let dirty = DirtyTracking::Hardware;
        assert_eq!(registers::<12>(ArmLpaeS2Config { dirty, ..config }, 0).1, 0x8065_3590);
        // SL0 0b10 for level 1 with 16K, TG0 0b10 (0x8000).
        assert_eq!(registers::<14>(config, 0).1, 0x8005_b590);
        // T0SZ 12, SL0 0b10 for level 1 with 64K, TG0 0b01 (0x4000), PS 0b110; address bits 51:48
        // in bits 5:2 of VTTBR.
        let high = registers::<16>(ArmLpaeS2Config::new(52, 52), 0x9_0000_4321_0000);
        assert_eq!(high, (0x4321_0024, 0x8006_758c));
        // T0SZ 39, SL0 0b11 for level 3 with 4K, PS 0b000.
        let small = ArmLpaeS2Config { start_level: Some(3), ..ArmLpaeS2Config::new(25, 32) };
        assert_eq!(registers::<12>(small, 0).1, 0x8000_35e7);
        // T0SZ 39, SL0 0b00 for level 3 with 16K.
        assert_eq!(registers::<14>(ArmLpaeS2Config::new(25, 32), 0).1, 0x8000_b527);
    }

    /// The start levels that there are for these widths.
    fn start_levels<const G: u32>(input_bits: u32, output_bits: u32) -> Vec<u32> {
        (0..8)
            .filter(|&level| {
                let start_level = Some(level);
                let config = ArmLpaeS2Config::new(input_bits, output_bits);
                ArmLpaeS2::<G>::new(ArmLpaeS2Config { start_level, ..config }).is_ok()
            })
            .collect()
    }

    #[test]
    fn start_levels_are_those_of_the_manual() {
        // 39 bits are a whole table of level 1: level 2 would need 32 tables. 34 are 16 tables of
        // level 2, 25 are 16 of level 3.
        assert_eq!(start_levels::<12>(48, 48), [0]);
        assert_eq!(start_levels::<12>(43, 48), [0, 1]);
        assert_eq!(start_levels::<12>(40, 44), [0, 1]);
        assert_eq!(start_levels::<12>(39, 48), [1]);
        assert_eq!(start_levels::<12>(34, 48), [1, 2]);
        assert_eq!(start_levels::<12>(30, 48), [2]);
        assert_eq!(start_levels::<12>(25, 48), [2, 3]);
        // Level 0 is not for addresses of 42 bits and less: 2 and 8 tables of level 1.
        assert_eq!(start_levels::<12>(40, 40), [1]);
        assert_eq!(start_levels::<12>(42, 42), [1]);
        // 16K has no level 0: 2 tables of level 1. 40 bits are 16 of level 2, which hardware with
        // 40 bits must use. 29 are 16 of level 3.
        assert_eq!(start_levels::<14>(48, 48), [1]);
        assert_eq!(start_levels::<14>(40, 42), [1, 2]);
        assert_eq!(start_levels::<14>(40, 40), [2]);
        assert_eq!(start_levels::<14>(29, 48), [2, 3]);
        assert_eq!(start_levels::<14>(25, 48), [3]);
        // 46 bits are 16 tables of level 2, 33 are 16 of level 3.
        assert_eq!(start_levels::<16>(52, 52), [1]);
        assert_eq!(start_levels::<16>(46, 48), [1, 2]);
        assert_eq!(start_levels::<16>(42, 48), [2]);
        assert_eq!(start_levels::<16>(33, 48), [2, 3]);
        assert_eq!(start_levels::<16>(29, 48), [3]);
    }

    fn chosen_level<const G: u32>(output_bits: u32, most: u32) {
        for input_bits in 25..=output_bits {
            let config = ArmLpaeS2Config::new(input_bits, output_bits);
            let format = ArmLpaeS2::<G>::new(config).unwrap();
            let possible = start_levels::<G>(input_bits, output_bits);
            let fewest = possible.into_iter().rfind(|&level| level <= most);
            assert_eq!(Some(format.start_level()), fewest, "{input_bits} bits");
            // The root has an entry for each block of its level, and is aligned to its size.
            let geometry = format.geometry();
            let entries = geometry.root.lg2_size - 3;
            assert_eq!(ArmLpaeS2::<G>::shift(geometry.top_level) + entries, input_bits);
            assert!(entries <= G - 3 + 4 && geometry.root.lg2_align >= geometry.root.lg2_size);
            assert_eq!(geometry.aperture.last().get(), lg2::mask(input_bits));
            // No leaf is larger than what the tree translates, nor than entries of the root.
            let largest = lg2::floor(geometry.page_sizes);
            assert!(largest <= input_bits);
            assert!(ArmLpaeS2::<G>::level_of(largest) <= geometry.top_level);
        }
    }

    #[test]
    fn the_level_chosen_is_the_lowest_but_that_of_pages_with_4k() {
        for output_bits in [32, 36, 40, 42, 44, 48] {
            chosen_level::<12>(output_bits, 2);
            chosen_level::<14>(output_bits, 3);
            chosen_level::<16>(output_bits, 3);
        }
        chosen_level::<16>(52, 3);
    }

    #[test]
    fn tables_that_the_architecture_lacks_are_refused() {
        let new = |config| ArmLpaeS2::<12>::new(config).map(|_| ());
        for input_bits in [0, 24, 41, 48, u32::MAX] {
            let refused = new(ArmLpaeS2Config::new(input_bits, 40));
            assert!(matches!(refused, Err(ConfigError::InputBits { .. })), "{input_bits}");
        }
        let refused = new(ArmLpaeS2Config::new(39, 39));
        assert!(matches!(refused, Err(ConfigError::OutputBits { output_bits: 39, .. })));
        let refused = ArmLpaeS2::<13>::new(ArmLpaeS2Config::new(40, 40)).map(|_| ());
        assert!(matches!(refused, Err(ConfigError::Granule { granule_lg2: 13, .. })));
        // Blocks of 1G are entries of level 1, which a tree from level 2 on does not have.
        let page_sizes = Some(1 << 12 | 1 << 30);
        let config = ArmLpaeS2Config { page_sizes, ..ArmLpaeS2Config::new(34, 40) };
        assert!(matches!(new(config), Err(ConfigError::PageSizes { .. })));
        assert_eq!(new(ArmLpaeS2Config { start_level: Some(1), ..config }), Ok(()));
        for (input_bits, start_level) in [(48, 1), (39, 2), (39, 0), (26, 3), (40, 4), (40, 9)] {
            let start_level = Some(start_level);
            let config = ArmLpaeS2Config { start_level, ..ArmLpaeS2Config::new(input_bits, 48) };
            assert!(matches!(new(config), Err(ConfigError::Unsupported { .. })), "{config:?}");
        }
    }
}
