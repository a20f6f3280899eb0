//! AMD's IO page tables for host translations, "version 1": every power of two is a leaf size, and
//! the tree grows.
//!
//! Source: AMD I/O Virtualization Technology (IOMMU) Specification, 48882, section 2.2.3 "I/O Page
//! Tables for Host Translations" with its tables of the directory entry (PDE), of the translation
//! entry (PTE), of the page table levels and of page size encodings, and 2.2.2.1 "Device Table
//! Entry Format".
//!
//! Level 0 here is level 1 of the manual.

use super::{ConfigError, DirtyTracking, Half, config, manuals};
use crate::addr::PhysAddr;
use crate::io_pgtable::format::{Entry, Format, Geometry, Groups, Leaf, sizes_within, tree_of};
use crate::io_pgtable::manual::Manual;
use crate::lg2;
use crate::prot::Prot;

#[cfg(test)]
mod tests;

/// Bit 0, PR: the entry is present (2.2.3, PDE and PTE).
const PRESENT: u64 = 1 << 0;
/// Bit 1, one of 4:1 that hardware ignores in directory entries (2.2.3, PDE).
const SOFTWARE: u64 = 1 << 1;
/// Bit 5, A: accessed, set by hardware where DTE.HAD says so (2.2.3, PTE).
const ACCESSED: u64 = 1 << 5;
/// Bit 6, D: written, set by hardware where DTE.HAD says so (2.2.3, PTE).
const DIRTY: u64 = 1 << 6;
/// Bits 11:9, the next level: of a table; 0 for a leaf of one entry (2.2.3, PDE and PTE).
const NEXT_SHIFT: u32 = 9;
const NEXT_MASK: u64 = 0b111 << NEXT_SHIFT;
/// The next level of a leaf whose size is in its address (2.2.3, PTE).
const NEXT_SIZE: u64 = 0b111 << NEXT_SHIFT;
const SIZED: u64 = PRESENT | NEXT_SIZE;
/// Bits 51:12: the address (2.2.3, PDE and PTE).
const ADDRESS: u64 = lg2::mask(52) & !lg2::mask(12);
/// Bit 60, FC: accesses are coherent, even those that ask not to be (2.2.3, PTE).
const FORCE_COHERENT: u64 = 1 << 60;
/// Bit 61, IR: reads are permitted, if they are at all levels (2.2.3, PDE and PTE).
const READ: u64 = 1 << 61;
/// Bit 62, IW: writes are permitted, if they are at all levels (2.2.3, PDE and PTE).
const WRITE: u64 = 1 << 62;

/// DTE bit 0, V: bits 127:1 are valid (2.2.2.1).
const DTE_VALID: u64 = 1 << 0;
/// DTE bit 1, TV: so are the mode, root, IR and IW (2.2.2.1).
const DTE_TRANSLATION_VALID: u64 = 1 << 1;
/// DTE bits 8:7, HAD: hardware sets accessed and dirty bits (2.2.2.1).
const DTE_ACCESSED_AND_DIRTY: u64 = 0b11 << 7;
/// DTE bits 11:9, Mode: the number of levels (2.2.2.1).
const DTE_MODE_SHIFT: u32 = 9;
/// DTE bits 61 and 62, IR and IW: the tables may permit reads and writes (2.2.2.1).
const DTE_READ_WRITE: u64 = 0b11 << 61;

/// The levels of the manual (2.2.3, page table levels).
const MOST_LEVELS: u32 = 6;
/// The largest leaf.
const LARGEST_LG2: u32 = 51;
/// The level whose entries cover 512G each.
const LEVEL_512G: u32 = 3;

/// Says what distinguishes one AMD v1 table from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AmdV1Config {
    /// Bits of input addresses that the tree may grow to: 13 to 64.
    pub input_bits: u32,
    /// Bits of physical addresses: 32 to 52.
    pub output_bits: u32,
    /// Levels of a new tree: 1 to 6.
    pub first_levels: u32,
    /// The leaf sizes to use, bit n for 2^n bytes; `None` for [all](AmdV1::PAGE_SIZES).
    pub page_sizes: Option<u64>,
    /// Whether hardware marks the leaves that it writes through: for IOMMUs with HASup and HDSup in
    /// their extended features.
    pub dirty: DirtyTracking,
    /// The address bit that makes memory encrypted, where the host's memory is (the C-bit of CPUID
    /// function 8000_001Fh): above the output bits and below 52. Set for tables and memory, clear
    /// for [`Prot::MMIO`].
    pub encryption_bit: Option<u32>,
}

impl AmdV1Config {
    /// A tree of three levels at first, with leaves of all sizes and plain memory.
    pub const fn new(input_bits: u32, output_bits: u32) -> Self {
        Self {
            input_bits,
            output_bits,
            first_levels: 3,
            page_sizes: None,
            dirty: DirtyTracking::Off,
            encryption_bit: None,
        }
    }
}

/// The fields of a device table entry that describe an AMD v1 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AmdV1Registers {
    /// Bits 63:0: V, TV, HAD, Mode, the root, IR and IW. All others are 0 and the driver's to add.
    pub dte: u64,
}

/// AMD's IO page tables for host translations.
#[derive(Clone, Debug)]
pub struct AmdV1 {
    config: AmdV1Config,
    page_sizes: u64,
    /// The address bit of encrypted memory, or none.
    encrypted: u64,
}

impl AmdV1 {
    /// Every power of two from 4K to 2^51 but 512G.
    ///
    /// A leaf of 512G is in the manual and does not work in hardware: Linux leaves it out for that
    /// reason (drivers/iommu/generic_pt/fmt/amdv1.h, `amdv1pt_possible_sizes`).
    pub const PAGE_SIZES: u64 = lg2::mask(LARGEST_LG2 + 1) & !lg2::mask(12) & !lg2::size(39);

    /// A format with this configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] where the architecture has no such table.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{AmdV1, AmdV1Config};
    ///
    /// assert!(AmdV1::new(AmdV1Config { first_levels: 4, ..AmdV1Config::new(64, 52) }).is_ok());
    /// assert!(AmdV1::new(AmdV1Config::new(64, 56)).is_err());
    /// ```
    pub fn new(config: AmdV1Config) -> Result<Self, ConfigError> {
        let AmdV1Config { input_bits, output_bits, first_levels, .. } = config;
        if !(13..=64).contains(&input_bits) {
            return Err(ConfigError::InputBits { input_bits, supported: "13 to 64" });
        }
        if !(1..=MOST_LEVELS).contains(&first_levels) {
            return Err(ConfigError::Levels { levels: first_levels, supported: "1 to 6" });
        }
        if !(32..=52).contains(&output_bits) {
            return Err(ConfigError::OutputBits { output_bits, supported: "32 to 52" });
        }
        let encrypted = match config.encryption_bit {
            None => 0,
            Some(bit) if (output_bits..52).contains(&bit) => lg2::size(bit),
            Some(_) => {
                let what = "an encryption bit among the output bits or above bit 51";
                return Err(ConfigError::Unsupported { what });
            }
        };
        let possible = Self::PAGE_SIZES & lg2::mask(output_bits + 1);
        let supported = sizes_within::<Self>(possible, input_bits);
        let page_sizes =
            config::page_sizes(config.page_sizes, supported, supported, Self::GRANULE_LG2)?;
        Ok(Self { config, page_sizes, encrypted })
    }

    /// The device table entry's part for a table whose root is at `root` and whose top level is
    /// `top_level` now: both change when the tree grows, and are written at once.
    pub fn registers(&self, root: PhysAddr, top_level: u32) -> AmdV1Registers {
        let levels = u64::from(top_level.min(MOST_LEVELS - 1) + 1);
        let dirty = match self.config.dirty {
            DirtyTracking::Off => 0,
            DirtyTracking::Hardware => DTE_ACCESSED_AND_DIRTY,
        };
        let valid = DTE_VALID | DTE_TRANSLATION_VALID | DTE_READ_WRITE;
        let root = root.get() & ADDRESS | self.encrypted;
        AmdV1Registers { dte: valid | dirty | levels << DTE_MODE_SHIFT | root }
    }

    /// The address in an entry; of a leaf with its size in it, both.
    #[inline(always)]
    const fn address(&self, word: u64) -> u64 {
        word & ADDRESS & !self.encrypted
    }

    /// Whether one entry at `level` can be a leaf: not where it covers 512G
    /// ([`PAGE_SIZES`](Self::PAGE_SIZES)), nor at the manual's level 6, which has only directory
    /// entries (2.2.3, page table levels).
    #[inline(always)]
    const fn has_single(level: u32) -> bool {
        level != LEVEL_512G && level < MOST_LEVELS - 1
    }
}

// SAFETY: a link is PRESENT with its own level as the next level, 1 to 5, and the table's address,
// from which the encryption bit is taken out again. Leaves have next level 0 or 7, which no link
// has; SOFTWARE and hardware's bits 5 and 6 are in none of these fields. No walk asks for a table
// at level 0.
#[expect(unsafe_code, reason = "the promise of a format")]
unsafe impl Format for AmdV1 {
    type Word = u64;
    const GRANULE_LG2: u32 = 12;
    const LG2_ENTRIES: u32 = 9;
    const GROUPS: Groups = Groups::Repeated;
    const WRITTEN_BACK: u64 = SOFTWARE;
    const DIRTY: u64 = DIRTY;
    const GROWS: bool = true;

    fn manual(&self) -> Manual {
        manuals::AMD_V1
    }

    fn geometry(&self) -> Geometry {
        let AmdV1Config { input_bits, output_bits, first_levels, .. } = self.config;
        let (needed, _) = tree_of::<Self>(input_bits);
        let tree = (needed.max(first_levels - 1), Self::LG2_ENTRIES);
        let aperture = Half::Lower.aperture(input_bits);
        Geometry::of_tree::<Self>(aperture, output_bits, self.page_sizes, tree)
    }

    fn first_top_level(&self) -> u32 {
        self.config.first_levels - 1
    }

    #[inline(always)]
    fn template(&self, level: u32, lg2: u32, prot: Prot) -> u64 {
        // Address bits below the size are ones, but for the highest (2.2.3, page size encodings).
        let size = if lg2 > Self::shift(level) {
            NEXT_SIZE | lg2::mask(lg2 - 1) & !lg2::mask(12)
        } else {
            0
        };
        let read = if prot.contains(Prot::READ) { READ } else { 0 };
        let write = if prot.contains(Prot::WRITE) { WRITE } else { 0 };
        let coherent = if prot.contains(Prot::CACHE) { FORCE_COHERENT } else { 0 };
        let encrypted = if prot.contains(Prot::MMIO) { 0 } else { self.encrypted };
        // Set from the start, since hardware's own update of it is a locked access.
        let accessed = match self.config.dirty {
            DirtyTracking::Off => 0,
            DirtyTracking::Hardware => ACCESSED,
        };
        PRESENT | size | read | write | coherent | encrypted | accessed
    }

    #[inline(always)]
    fn link(&self, level: u32, table: PhysAddr) -> u64 {
        let next = u64::from(level) << NEXT_SHIFT;
        PRESENT | next | table.get() | self.encrypted | READ | WRITE
    }

    #[inline(always)]
    fn decode(&self, level: u32, word: u64) -> Entry {
        if let Some(table) = self.table_of(level, word).filter(|_| level != 0) {
            return Entry::Table(table);
        }
        let address = self.address(word);
        match word & (PRESENT | NEXT_MASK) {
            PRESENT if Self::has_single(level) => {
                Entry::Leaf(Leaf { paddr: PhysAddr::new(address), lg2: Self::shift(level) })
            }
            SIZED => {
                // The lowest zero is the highest bit below the size.
                let lg2 = 13 + (address >> 12).trailing_ones();
                let fits = Self::shift(level) < lg2 && lg2 < Self::shift(level + 1);
                if !fits || lg2 > LARGEST_LG2 {
                    return Entry::Invalid;
                }
                let paddr = PhysAddr::new(lg2::align_down(address, lg2));
                Entry::Leaf(Leaf { paddr, lg2 })
            }
            _ if word == 0 => Entry::Empty,
            _ => Entry::Invalid,
        }
    }

    #[inline(always)]
    fn table_of(&self, level: u32, word: u64) -> Option<PhysAddr> {
        let is_table = word & (PRESENT | NEXT_MASK) == PRESENT | u64::from(level) << NEXT_SHIFT;
        is_table.then(|| PhysAddr::new(self.address(word)))
    }

    #[inline(always)]
    fn is_single(&self, level: u32, word: u64) -> bool {
        word & (PRESENT | NEXT_MASK) == PRESENT && Self::has_single(level)
    }

    #[inline(always)]
    fn prot(&self, _level: u32, leaf: u64) -> Prot {
        let mut prot = Prot::empty();
        prot.set(Prot::READ, leaf & READ != 0);
        prot.set(Prot::WRITE, leaf & WRITE != 0);
        prot.set(Prot::CACHE, leaf & FORCE_COHERENT != 0);
        prot.set(Prot::MMIO, self.encrypted != 0 && leaf & self.encrypted == 0);
        prot
    }

    fn tracks_dirty(&self) -> bool {
        self.config.dirty == DirtyTracking::Hardware
    }
}
