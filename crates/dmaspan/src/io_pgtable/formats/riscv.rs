//! RISC-V's page tables: Sv39, Sv48 and Sv57 as a first stage, Sv39x4, Sv48x4 and Sv57x4 as the
//! second, with Svnapot and Svpbmt.
//!
//! Sources: The RISC-V Instruction Set Manual, Volume II, Privileged Architecture: "Sv39:
//! Page-Based 39-bit Virtual-Memory System" and its siblings, the extensions "Svnapot" and
//! "Svpbmt", and "Two-Stage Address Translation" of the hypervisor extension; RISC-V IOMMU
//! Architecture Specification, "Device-context fields".
//!
//! Levels are counted as in the manual.

use super::{ConfigError, DirtyTracking, Half, config, manuals};
use crate::addr::PhysAddr;
use crate::io_pgtable::format::{Entry, Format, Geometry, Groups, Leaf};
use crate::io_pgtable::manual::Manual;
use crate::lg2;
use crate::prot::Prot;

#[cfg(test)]
mod tests;

/// Bit 0, V: the entry is valid (Sv32, "Addressing and Memory Protection"; also the next six).
const VALID: u64 = 1 << 0;
/// Bit 1, R: reads are permitted. An entry without R, W and X leads to a table.
const READ: u64 = 1 << 1;
/// Bit 2, W: writes are permitted; reserved without R.
const WRITE: u64 = 1 << 2;
/// Bit 3, X: instruction fetches are permitted.
const EXECUTE: u64 = 1 << 3;
/// Bit 4, U: user-mode accesses are permitted. All accesses are user-mode for the second stage
/// (hypervisor extension, "Guest Physical Address Translation").
const USER: u64 = 1 << 4;
/// Bit 6, A: accessed; a clear one makes hardware fault or set it. Reserved in links.
const ACCESSED: u64 = 1 << 6;
/// Bit 7, D: written; a clear one makes hardware fault on a write or set it. Reserved in links.
const DIRTY: u64 = 1 << 7;
/// Bit 8, one of RSW, which hardware ignores.
const SOFTWARE: u64 = 1 << 8;
/// Bits 53:10, PPN: bits 55:12 of the address (Sv39).
const PPN: u64 = lg2::mask(54) & !lg2::mask(10);
/// How much lower an address is in an entry.
const PPN_DOWN: u32 = 2;
/// Bits 60:54: reserved (Sv39).
const RESERVED: u64 = lg2::mask(61) & !lg2::mask(54);
/// Bits 62:61, PBMT: 0 for the memory's own type, 1 non-cacheable memory, 2 IO (Svpbmt).
const PBMT_MASK: u64 = 0b11 << 61;
const PBMT_NON_CACHEABLE: u64 = 1 << 61;
const PBMT_IO: u64 = 2 << 61;
/// Bit 63, N: one of a naturally aligned group; its size is in the PPN's low bits (Svnapot).
const NAPOT: u64 = 1 << 63;
/// PPN\[3:0\] and its value in a group of 64K, the only size (Svnapot).
const NAPOT_SIZE_MASK: u64 = 0b1111 << 10;
const NAPOT_64K: u64 = 0b1000 << 10;

/// The mode field of satp, hgatp, iosatp and iohgatp (IOMMU, "First-Stage context" and "IO
/// hypervisor guest address translation and protection").
const MODE_SHIFT: u32 = 60;
/// Bit 7 of DC.tc, GADE: hardware sets A and D in second-stage entries (IOMMU, "Translation
/// control").
const TC_GADE: u64 = 1 << 7;
/// Bit 8 of DC.tc, SADE: the same for first-stage entries.
const TC_SADE: u64 = 1 << 8;

/// Says how many levels the tables have, and so how many input bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RiscvMode {
    /// Three levels: 39 bits, 41 in the second stage.
    Sv39,
    /// Four levels: 48 bits, 50 in the second stage.
    Sv48,
    /// Five levels: 57 bits, 59 in the second stage.
    Sv57,
}

impl RiscvMode {
    /// The level of the root.
    const fn top_level(self) -> u32 {
        match self {
            Self::Sv39 => 2,
            Self::Sv48 => 3,
            Self::Sv57 => 4,
        }
    }
}

/// Says what a table translates, and for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RiscvStage {
    /// One half of the sign-extended addresses: one bit less than the mode's name says.
    First(Half),
    /// Guest physical addresses, zero-extended, with a root of 16K (Sv39x4, Sv48x4, Sv57x4).
    Second,
}

/// Says what decides the memory type of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RiscvMemoryTypes {
    /// The platform alone, by physical address.
    Platform,
    /// The entries too: hardware has Svpbmt.
    Svpbmt,
}

/// Says what distinguishes one RISC-V table from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RiscvConfig {
    /// The number of levels.
    pub mode: RiscvMode,
    /// Which stage.
    pub stage: RiscvStage,
    /// Bits of physical addresses: 32 to 56.
    pub output_bits: u32,
    /// The leaf sizes to use, bit n for 2^n bytes; `None` for one a level. 64K
    /// ([`Riscv::NAPOT_SIZES`]) is for hardware that has Svnapot.
    pub page_sizes: Option<u64>,
    /// Whether entries say the type of memory.
    pub memory_types: RiscvMemoryTypes,
    /// Whether hardware marks the leaves that it writes through: for IOMMUs with
    /// capabilities.AMO_HWAD.
    pub dirty: DirtyTracking,
}

impl RiscvConfig {
    /// The lower half of a first stage, with what all hardware has.
    pub const fn new(mode: RiscvMode, output_bits: u32) -> Self {
        Self {
            mode,
            stage: RiscvStage::First(Half::Lower),
            output_bits,
            page_sizes: None,
            memory_types: RiscvMemoryTypes::Platform,
            dirty: DirtyTracking::Off,
        }
    }
}

/// The fields of an IOMMU's device context that describe a RISC-V table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RiscvRegisters {
    /// Mode and root: iosatp, which is DC.fsc, in the first stage and iohgatp in the second. A
    /// hart's satp and hgatp are the same. GSCID, ASID and VMID are 0 and the driver's to add.
    pub atp: u64,
    /// The bits that the table needs in DC.tc.
    pub tc: u64,
}

/// RISC-V's page tables for 64-bit address spaces.
#[derive(Clone, Debug)]
pub struct Riscv {
    config: RiscvConfig,
    page_sizes: u64,
}

impl Riscv {
    /// Leaves that are one entry each: every level has them (Sv32, "Virtual Address Translation
    /// Process").
    pub const PAGE_SIZES: u64 = 1 << 12 | 1 << 21 | 1 << 30 | 1 << 39 | 1 << 48;

    /// Leaves that are a group of 16 entries at level 0 (Svnapot).
    pub const NAPOT_SIZES: u64 = 1 << 16;

    /// A format with this configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] where the architecture has no such table.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{Riscv, RiscvConfig, RiscvMode, RiscvStage};
    ///
    /// let sv48 = RiscvConfig::new(RiscvMode::Sv48, 56);
    /// assert!(Riscv::new(RiscvConfig { stage: RiscvStage::Second, ..sv48 }).is_ok());
    /// assert!(Riscv::new(RiscvConfig { output_bits: 57, ..sv48 }).is_err());
    /// ```
    pub fn new(config: RiscvConfig) -> Result<Self, ConfigError> {
        let RiscvConfig { mode, output_bits, .. } = config;
        if !(32..=56).contains(&output_bits) {
            return Err(ConfigError::OutputBits { output_bits, supported: "32 to 56" });
        }
        let levels = lg2::mask(Self::shift(mode.top_level() + 1));
        let singles = Self::PAGE_SIZES & levels & lg2::mask(output_bits + 1);
        let supported = singles | Self::NAPOT_SIZES;
        let page_sizes =
            config::page_sizes(config.page_sizes, singles, supported, Self::GRANULE_LG2)?;
        Ok(Self { config, page_sizes })
    }

    /// Returns what the format was made with: a driver asks whether its hardware walks such tables.
    pub fn config(&self) -> &RiscvConfig {
        &self.config
    }

    /// The register values for a table whose root is at `root`.
    pub fn registers(&self, root: PhysAddr) -> RiscvRegisters {
        let mode = match self.config.mode {
            RiscvMode::Sv39 => 8,
            RiscvMode::Sv48 => 9,
            RiscvMode::Sv57 => 10,
        };
        let tc = match (self.config.dirty, self.config.stage) {
            (DirtyTracking::Off, _) => 0,
            (DirtyTracking::Hardware, RiscvStage::First(_)) => TC_SADE,
            (DirtyTracking::Hardware, RiscvStage::Second) => TC_GADE,
        };
        RiscvRegisters { atp: mode << MODE_SHIFT | root.get() >> 12, tc }
    }

    #[inline(always)]
    const fn address(word: u64) -> u64 {
        (word & PPN) << PPN_DOWN
    }
}

// SAFETY: a link is VALID with the table's address and nothing else but SOFTWARE, and only such a
// word is taken for one above level 0. Leaves have READ; hardware sets A and D in leaves alone.
#[expect(unsafe_code, reason = "the promise of a format")]
unsafe impl Format for Riscv {
    type Word = u64;
    const GRANULE_LG2: u32 = 12;
    const LG2_ENTRIES: u32 = 9;
    const GROUPS: Groups = Groups::Repeated;
    const WRITTEN_BACK: u64 = SOFTWARE;
    const DIRTY: u64 = DIRTY;

    fn manual(&self) -> Manual {
        let second = self.config.stage == RiscvStage::Second;
        manuals::riscv(match (self.config.mode, second) {
            (RiscvMode::Sv39, false) => "Sv39",
            (RiscvMode::Sv48, false) => "Sv48",
            (RiscvMode::Sv57, false) => "Sv57",
            (RiscvMode::Sv39, true) => "Sv39x4",
            (RiscvMode::Sv48, true) => "Sv48x4",
            (RiscvMode::Sv57, true) => "Sv57x4",
        })
    }

    fn geometry(&self) -> Geometry {
        let top_level = self.config.mode.top_level();
        let bits = Self::shift(top_level + 1);
        // A second stage's root is 16K at a multiple of 16K ("Guest Physical Address Translation").
        let (aperture, root_lg2_entries) = match self.config.stage {
            // The top input bit is the sign.
            RiscvStage::First(half) => (half.aperture(bits - 1), 9),
            RiscvStage::Second => (Half::Lower.aperture(bits + 2), 11),
        };
        let tree = (top_level, root_lg2_entries);
        Geometry::of_tree::<Self>(aperture, self.config.output_bits, self.page_sizes, tree)
    }

    #[inline(always)]
    fn template(&self, level: u32, lg2: u32, prot: Prot) -> u64 {
        let group = if lg2 > Self::shift(level) { NAPOT | NAPOT_64K } else { 0 };
        let written = match self.config.dirty {
            DirtyTracking::Off => DIRTY,
            DirtyTracking::Hardware => 0,
        };
        let write = if prot.contains(Prot::WRITE) { WRITE | written } else { 0 };
        let execute = if prot.contains(Prot::NOEXEC) { 0 } else { EXECUTE };
        let user = match self.config.stage {
            RiscvStage::First(_) if prot.contains(Prot::PRIV) => 0,
            _ => USER,
        };
        let memory = match self.config.memory_types {
            RiscvMemoryTypes::Svpbmt if prot.contains(Prot::MMIO) => PBMT_IO,
            RiscvMemoryTypes::Svpbmt if !prot.contains(Prot::CACHE) => PBMT_NON_CACHEABLE,
            _ => 0,
        };
        VALID | READ | ACCESSED | group | write | execute | user | memory
    }

    #[inline(always)]
    fn leaf(&self, template: u64, paddr: PhysAddr) -> u64 {
        template | paddr.get() >> PPN_DOWN
    }

    #[inline(always)]
    fn advance(&self, leaf: u64, bytes: u64) -> u64 {
        leaf.wrapping_add(bytes >> PPN_DOWN)
    }

    #[inline(always)]
    fn link(&self, _level: u32, table: PhysAddr) -> u64 {
        VALID | table.get() >> PPN_DOWN
    }

    #[inline(always)]
    fn decode(&self, level: u32, word: u64) -> Entry {
        let address = Self::address(word);
        if self.is_single(level, word) {
            let paddr = PhysAddr::new(address);
            return Entry::Leaf(Leaf { paddr, lg2: Self::shift(level) });
        }
        if let Some(table) = self.table_of(level, word).filter(|_| level != 0) {
            return Entry::Table(table);
        }
        let group = VALID | READ | NAPOT | NAPOT_64K;
        if level == 0 && word & (group | RESERVED | NAPOT_SIZE_MASK) == group {
            let paddr = PhysAddr::new(lg2::align_down(address, 16));
            return Entry::Leaf(Leaf { paddr, lg2: 16 });
        }
        if word == 0 { Entry::Empty } else { Entry::Invalid }
    }

    #[inline(always)]
    fn table_of(&self, _level: u32, word: u64) -> Option<PhysAddr> {
        let is_table = word & !(PPN | SOFTWARE) == VALID;
        is_table.then(|| PhysAddr::new(Self::address(word)))
    }

    #[inline(always)]
    fn is_single(&self, _level: u32, word: u64) -> bool {
        word & (VALID | READ | RESERVED | NAPOT) == VALID | READ
    }

    #[inline(always)]
    fn prot(&self, _level: u32, leaf: u64) -> Prot {
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, leaf & WRITE != 0);
        prot.set(Prot::NOEXEC, leaf & EXECUTE == 0);
        prot.set(Prot::PRIV, leaf & USER == 0);
        prot.set(Prot::CACHE, leaf & PBMT_MASK == 0);
        prot.set(Prot::MMIO, leaf & PBMT_MASK == PBMT_IO);
        prot
    }

    fn tracks_dirty(&self) -> bool {
        self.config.dirty == DirtyTracking::Hardware
    }
}
