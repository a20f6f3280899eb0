//! Arm's short descriptors (VMSAv7), and MediaTek's extension of them.
//!
//! Source: ARM Architecture Reference Manual, ARMv7-A and ARMv7-R edition, DDI 0406C, section B3.5
//! "Short-descriptor translation table format", with B3.7 "Memory access control", B3.8 "Memory
//! region attributes", B3.10.1 "General TLB maintenance requirements", and the registers TTBR0,
//! TTBCR, PRRR and NMRR in B4.1. No manual describes MediaTek's extension: its facts come from
//! Linux's io-pgtable-arm-v7s.c.
//!
//! The descriptors rely on SCTLR.TRE (attributes remapped by PRRR and NMRR) and SCTLR.AFE (AP\[0\]
//! is an access flag), both set. Level 0 here is the manual's second level.

use super::{ConfigError, Half, config, manuals};
use crate::addr::PhysAddr;
use crate::io_pgtable::format::{Entry, Format, Geometry, Groups, Leaf};
use crate::io_pgtable::manual::Manual;
use crate::io_pgtable::memory::TableShape;
use crate::lg2;
use crate::prot::{Coherency, Prot};

#[cfg(test)]
mod tests;

/// Bits 1:0 of a first-level descriptor that leads to a table, with its address in 31:10 (B3.5.1).
const TABLE: u32 = 0b01;
const TABLE_ADDRESS: u32 = !0x3ff;
/// Bit 1: a section at the first level, a small page at the second (B3.5.1).
const SECTION_OR_SMALL: u32 = 1 << 1;
/// Bit 18 of a section: a supersection (B3.5.1).
const SUPERSECTION: u32 = 1 << 18;
/// Bit 2, B, and bit 3, C: with TEX\[0\] in front, the index of the memory type (B3.8.3).
const BUFFERABLE: u32 = 1 << 2;
const CACHEABLE: u32 = 1 << 3;

/// MediaTek: bits 32, 33 and 34 of an address are in bits 9, 4 and 5, where Arm has permissions.
const HIGH_ADDRESS: u32 = 1 << 9 | 1 << 4 | 1 << 5;

/// The memory types of the indices in use: 1 is device, 4 normal, 7 normal (B3.8.3). Device memory
/// is shareable with either value of S, normal memory with S set, and index 7 inner shareable.
const PRRR: u32 = 0b01 << 2 | 0b10 << 8 | 0b10 << 14 | 1 << 16 | 1 << 17 | 1 << 19 | 1 << 31;
/// The caching of the indices in use: 7 is write-back, write-allocate, inner and outer; 4 is
/// non-cacheable (B3.8.3).
const NMRR: u32 = 0b01 << 14 | 0b01 << 30;

/// Where a leaf's descriptor has its fields (B3.5.1, figures B3-4 and B3-5).
struct Layout {
    /// The bits that say what descriptor it is.
    kind: u32,
    /// AP\[0\], the access flag.
    accessed: u32,
    /// AP\[1\]: unprivileged accesses are permitted (B3.7.1).
    unprivileged: u32,
    /// AP\[2\]: writes are not permitted (B3.7.1).
    read_only: u32,
    /// TEX\[0\].
    tex: u32,
    /// S.
    shareable: u32,
    /// nG: belongs to one ASID.
    not_global: u32,
    /// XN.
    execute_never: u32,
}

const SMALL_PAGE: Layout = Layout {
    kind: SECTION_OR_SMALL,
    accessed: 1 << 4,
    unprivileged: 1 << 5,
    read_only: 1 << 9,
    tex: 1 << 6,
    shareable: 1 << 10,
    not_global: 1 << 11,
    execute_never: 1 << 0,
};
const LARGE_PAGE: Layout =
    Layout { kind: 0b01, tex: 1 << 12, execute_never: 1 << 15, ..SMALL_PAGE };
const SECTION: Layout = Layout {
    kind: SECTION_OR_SMALL,
    accessed: 1 << 10,
    unprivileged: 1 << 11,
    read_only: 1 << 15,
    tex: 1 << 12,
    shareable: 1 << 16,
    not_global: 1 << 17,
    execute_never: 1 << 4,
};

impl Layout {
    /// That of leaves of `2^lg2` bytes.
    #[inline(always)]
    const fn of(lg2: u32) -> Self {
        match lg2 {
            12 => SMALL_PAGE,
            16 => LARGE_PAGE,
            20 => SECTION,
            _ => Self { kind: SECTION_OR_SMALL | SUPERSECTION, ..SECTION },
        }
    }
}

/// Whose short descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArmV7sVariant {
    /// Arm's.
    Arm,
    /// MediaTek's: input and output addresses above 4 GiB in place of permissions, so everything
    /// may read, write and execute. Tables are below 4 GiB.
    MediaTek,
    /// MediaTek's, where tables may be above 4 GiB too.
    MediaTekHighTables,
}

/// Says what distinguishes one table from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmV7sConfig {
    /// Whose descriptors.
    pub variant: ArmV7sVariant,
    /// Bits of input addresses: 32, or 34 with MediaTek's.
    pub input_bits: u32,
    /// Bits of physical addresses: 32, or 32 to 35 with MediaTek's.
    pub output_bits: u32,
    /// The leaf sizes to use, bit n for 2^n bytes; `None` for 4K, 64K and 1M. 16M is for hardware
    /// that has supersections.
    pub page_sizes: Option<u64>,
    /// Whether hardware's walks see the CPU's caches.
    pub walks: Coherency,
}

impl ArmV7sConfig {
    /// Arm's descriptors without supersections, and coherent walks.
    pub const fn new(input_bits: u32, output_bits: u32) -> Self {
        Self {
            variant: ArmV7sVariant::Arm,
            input_bits,
            output_bits,
            page_sizes: None,
            walks: Coherency::Coherent,
        }
    }
}

/// The values of the registers that a table goes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmV7sRegisters {
    /// TTBR0, or MediaTek's base register, which has address bits 34:32 in bits 2:0.
    pub ttbr: u32,
    /// TTBCR: TTBR0 translates all addresses.
    pub tcr: u32,
    /// PRRR.
    pub prrr: u32,
    /// NMRR.
    pub nmrr: u32,
}

/// Arm's short descriptors.
#[derive(Clone, Debug)]
pub struct ArmV7s {
    config: ArmV7sConfig,
    page_sizes: u64,
    /// The bits of leaves, and of links, that are bits 34:32 of the address.
    leaf_high: u32,
    table_high: u32,
}

impl ArmV7s {
    /// The leaves that the architecture has: small and large pages, sections and supersections
    /// (B3.5.1).
    pub const PAGE_SIZES: u64 = 1 << 12 | 1 << 16 | 1 << 20 | 1 << 24;

    /// A format with this configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] where there is no such table.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{ArmV7s, ArmV7sConfig, ArmV7sVariant};
    ///
    /// assert!(ArmV7s::new(ArmV7sConfig::new(32, 32)).is_ok());
    /// assert!(ArmV7s::new(ArmV7sConfig::new(34, 35)).is_err());
    /// let variant = ArmV7sVariant::MediaTek;
    /// assert!(ArmV7s::new(ArmV7sConfig { variant, ..ArmV7sConfig::new(34, 35) }).is_ok());
    /// ```
    pub fn new(config: ArmV7sConfig) -> Result<Self, ConfigError> {
        let ArmV7sConfig { variant, input_bits, output_bits, .. } = config;
        let is_arm = variant == ArmV7sVariant::Arm;
        if input_bits != 32 && (is_arm || input_bits != 34) {
            let supported = if is_arm { "32" } else { "32 and 34" };
            return Err(ConfigError::InputBits { input_bits, supported });
        }
        if output_bits != 32 && (is_arm || !(33..=35).contains(&output_bits)) {
            let supported = if is_arm { "32" } else { "32 to 35" };
            return Err(ConfigError::OutputBits { output_bits, supported });
        }
        let supported = Self::PAGE_SIZES;
        let usual = supported & !lg2::size(24);
        let page_sizes =
            config::page_sizes(config.page_sizes, usual, supported, Self::GRANULE_LG2)?;
        let (leaf_high, table_high) = match variant {
            ArmV7sVariant::Arm => (0, 0),
            ArmV7sVariant::MediaTek => (HIGH_ADDRESS, 0),
            ArmV7sVariant::MediaTekHighTables => (HIGH_ADDRESS, HIGH_ADDRESS),
        };
        Ok(Self { config, page_sizes, leaf_high, table_high })
    }

    /// The register values for a table whose root is at `root`.
    pub fn registers(&self, root: PhysAddr) -> ArmV7sRegisters {
        let root = root.get();
        // TTBR0 with the multiprocessing extensions: IRGN in bits 0 and 6, S in 1, RGN in 4:3, NOS
        // in 5. Write-back, write-allocate is 01b, of which IRGN has the 1 in bit 6.
        let attributes = match (self.config.variant, self.config.walks) {
            (ArmV7sVariant::Arm, Coherency::Coherent) => 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6,
            (ArmV7sVariant::Arm, Coherency::NonCoherent) => 1 << 1,
            _ => low_half(root >> 32),
        };
        ArmV7sRegisters { ttbr: low_half(root) | attributes, tcr: 0, prrr: PRRR, nmrr: NMRR }
    }

    /// What a leaf that permits `prot` has there.
    #[inline(always)]
    fn permissions(layout: &Layout, prot: Prot) -> u32 {
        let write = if prot.contains(Prot::WRITE) { 0 } else { layout.read_only };
        let privilege = if prot.contains(Prot::PRIV) { 0 } else { layout.unprivileged };
        let execute = if prot.contains(Prot::NOEXEC) { layout.execute_never } else { 0 };
        layout.accessed | write | privilege | execute
    }
}

// SAFETY: 1. a link has TABLE in bits 1:0 and the table's address, which `paddr_of` takes out
// again; WRITTEN_BACK is no bit. 2. No leaf above level 0 has these bits, `table_of` and `decode`
// look at the level, and hardware sets no bits. 3. Nothing changes a value.
#[expect(unsafe_code, reason = "the promise of a format")]
unsafe impl Format for ArmV7s {
    type Word = u32;
    const GRANULE_LG2: u32 = 12;
    const LG2_ENTRIES: u32 = 8;
    const GROUPS: Groups = Groups::Repeated;

    fn manual(&self) -> Manual {
        if self.config.variant == ArmV7sVariant::Arm { manuals::ARM_V7S } else { manuals::MEDIATEK }
    }

    fn geometry(&self) -> Geometry {
        let table_bits = if self.table_high == 0 { 32 } else { self.config.output_bits };
        let max_paddr = PhysAddr::new(lg2::mask(table_bits));
        // One word for each MiB; tables are aligned to their size (B3.5.4, TTBR0).
        let root_size = self.config.input_bits - Self::shift(1) + 2;
        Geometry {
            aperture: Half::Lower.aperture(self.config.input_bits),
            output_bits: self.config.output_bits,
            top_level: 1,
            page_sizes: self.page_sizes,
            root: TableShape { lg2_size: root_size, lg2_align: root_size, max_paddr },
            table: TableShape { lg2_size: 10, lg2_align: 10, max_paddr },
        }
    }

    #[inline(always)]
    fn template(&self, _level: u32, lg2: u32, prot: Prot) -> u32 {
        let layout = Layout::of(lg2);
        let memory = if prot.contains(Prot::MMIO) {
            BUFFERABLE
        } else if prot.contains(Prot::CACHE) {
            layout.tex | CACHEABLE | BUFFERABLE
        } else {
            layout.tex
        };
        let permissions = if self.leaf_high == 0 { Self::permissions(&layout, prot) } else { 0 };
        layout.kind | permissions | memory | layout.shareable | layout.not_global
    }

    #[inline(always)]
    fn leaf(&self, template: u32, paddr: PhysAddr) -> u32 {
        template | low_half(paddr.get()) | high_bits(paddr.get()) & self.leaf_high
    }

    #[inline(always)]
    fn advance(&self, leaf: u32, bytes: u64) -> u32 {
        // Bits 34:32 do not follow bit 31; what the bytes are added to below the address is 0.
        let sum = (u64::from(leaf) | high_of(leaf & self.leaf_high)).wrapping_add(bytes);
        low_half(sum) & !self.leaf_high | high_bits(sum) & self.leaf_high
    }

    #[inline(always)]
    fn link(&self, _level: u32, table: PhysAddr) -> u32 {
        low_half(table.get()) | TABLE | high_bits(table.get()) & self.table_high
    }

    #[inline(always)]
    fn decode(&self, level: u32, word: u32) -> Entry {
        let lg2 = match (word & 0b11, level) {
            (0b01, 0) => 16,
            (0b10 | 0b11, 0) => 12,
            (TABLE, _) => return self.table_of(level, word).map_or(Entry::Invalid, Entry::Table),
            (0b10, _) if word & SUPERSECTION == 0 => 20,
            (0b10, _) => 24,
            _ if word == 0 => return Entry::Empty,
            // 11b at level 1 is a section that privileged code may not execute.
            _ => return Entry::Invalid,
        };
        let paddr = lg2::align_down(u64::from(word), lg2) | high_of(word & self.leaf_high);
        Entry::Leaf(Leaf { paddr: PhysAddr::new(paddr), lg2 })
    }

    #[inline(always)]
    fn table_of(&self, level: u32, word: u32) -> Option<PhysAddr> {
        let table = u64::from(word & TABLE_ADDRESS) | high_of(word & self.table_high);
        (level > 0 && word & 0b11 == TABLE).then(|| PhysAddr::new(table))
    }

    #[inline(always)]
    fn is_single(&self, level: u32, word: u32) -> bool {
        if level == 0 {
            word & SECTION_OR_SMALL != 0
        } else {
            word & (0b11 | SUPERSECTION) == SECTION_OR_SMALL
        }
    }

    #[inline(always)]
    fn prot(&self, level: u32, leaf: u32) -> Prot {
        let mut prot = Prot::READ_WRITE;
        if self.leaf_high == 0 {
            let layout = match level {
                0 if leaf & SECTION_OR_SMALL == 0 => LARGE_PAGE,
                0 => SMALL_PAGE,
                _ => SECTION,
            };
            prot.set(Prot::WRITE, leaf & layout.read_only == 0);
            prot.set(Prot::PRIV, leaf & layout.unprivileged == 0);
            prot.set(Prot::NOEXEC, leaf & layout.execute_never != 0);
        }
        prot.set(Prot::CACHE, leaf & CACHEABLE != 0);
        prot.set(Prot::MMIO, leaf & (CACHEABLE | BUFFERABLE) == BUFFERABLE);
        prot
    }

    /// A change of size without it may leave two translations of one address in the TLB (B3.10.1).
    fn needs_break(&self) -> bool {
        true
    }

    /// So does a change of the memory type, and the 16 entries of a leaf must be equal (B3.5.1,
    /// B3.10.1).
    fn breaks_to_change(&self) -> bool {
        true
    }
}

/// Bits 31:0.
#[inline(always)]
const fn low_half(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
const _: () = assert!(low_half(0x5_1234_5678) == 0x1234_5678);

/// Bits 34:32 of an address, where MediaTek's descriptors have them.
#[inline(always)]
const fn high_bits(paddr: u64) -> u32 {
    let high = low_half(paddr >> 32);
    (high & 0b001) << 9 | (high & 0b110) << 3
}
const _: () = assert!(high_bits(0b111 << 32) == HIGH_ADDRESS && high_bits(1 << 33) == 1 << 4);

/// The address bits 34:32 of a descriptor that has only them.
#[inline(always)]
const fn high_of(descriptor: u32) -> u64 {
    ((descriptor >> 9 & 0b001 | descriptor >> 3 & 0b110) as u64) << 32
}
const _: () = assert!(high_of(HIGH_ADDRESS) == 0b111 << 32 && high_of(1 << 5) == 1 << 34);
