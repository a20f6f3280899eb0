//! Intel VT-d's second-stage tables, of 3, 4 and 5 levels.
//!
//! Source: Intel Virtualization Technology for Directed I/O, Architecture Specification, D51397:
//! section 3.7 "Second-Stage Translation", 9.8 "Second-Stage Paging Entries", 9.3 "Context Entry"
//! and 9.6 "Scalable-Mode PASID Table Entry", and the capabilities in 11.4.2 and 11.4.3.
//!
//! Entries have no present bit: one that permits reads or writes is present. Level 0 here is the
//! manual's SS-PTE, level 4 its SS-PML5E.

use super::{ConfigError, DirtyTracking, Half, config, manuals};
use crate::addr::PhysAddr;
use crate::io_pgtable::format::{Entry, Format, Geometry, Groups, Leaf, sizes_within, tree_of};
use crate::io_pgtable::manual::Manual;
use crate::lg2;
use crate::prot::{Coherency, Prot};

#[cfg(test)]
mod tests;

/// Bit 0, R: reads are permitted (9.8).
const READ: u64 = 1 << 0;
/// Bit 1, W: writes are permitted (9.8).
const WRITE: u64 = 1 << 1;
/// Either makes an entry present (3.7).
const PRESENT: u64 = READ | WRITE;
/// Bit 7, PS: a leaf above level 0 (9.8, SS-PDPTE and SS-PDE).
const PAGE_SIZE: u64 = 1 << 7;
/// Bit 8, A: hardware used the entry; ignored without SSADE (3.7.2).
const ACCESSED: u64 = 1 << 8;
/// Bit 9, D: hardware wrote through the leaf; ignored without SSADE (3.7.2).
const DIRTY: u64 = 1 << 9;
/// Bit 11, SNP: accesses snoop the CPU's caches whatever the device asks for. Reserved where the
/// extended capability SC is 0 (9.8).
const SNOOP: u64 = 1 << 11;
/// Bits 51:12: the address of the table or the memory (9.8).
const ADDRESS: u64 = lg2::mask(52) & !lg2::mask(12);
/// Bit 52: ignored by hardware (9.8).
const SOFTWARE: u64 = 1 << 52;

/// The highest level that has leaves: 1 GiB (3.7).
const TOP_LEAF: u32 = 2;

/// Says which leaves force accesses to snoop the CPU's caches (SNP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnoopControl {
    /// None: for hardware without snoop control. Accesses snoop unless the device asks not to, so
    /// all mappings count as coherent.
    Absent,
    /// Those with [`Prot::CACHE`].
    Cached,
    /// All: the device cannot escape the caches.
    Forced,
}

/// Says whether there may be leaves that permit no writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOnlyLeaves {
    /// There may.
    Allowed,
    /// None: for hardware that goes wrong with them under nested translation (erratum SPR17 of
    /// Intel's document 772415). Mappings without [`Prot::WRITE`] are refused.
    Refused,
}

/// Says what distinguishes one second-stage table from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VtdSsConfig {
    /// Bits of input addresses: 39, 48 or 57, of those in the capability SAGAW.
    pub input_bits: u32,
    /// Bits of physical addresses, the host address width: 32 to 52.
    pub output_bits: u32,
    /// The leaf sizes to use, bit n for 2^n bytes; `None` for 4K, 2M and 1G. Those above 4K are for
    /// hardware that has them (the capability SSLPS).
    pub page_sizes: Option<u64>,
    /// Which leaves snoop.
    pub snoop: SnoopControl,
    /// Whether there may be read-only leaves.
    pub read_only: ReadOnlyLeaves,
    /// Whether hardware sets A and D (SSADE), which the extended capability SSADS says that it can.
    pub dirty: DirtyTracking,
    /// Whether scalable mode's walks snoop the CPU's caches, which the extended capability SMPWC
    /// says that they can.
    pub walks: Coherency,
}

impl VtdSsConfig {
    /// A table with all leaf sizes and coherent walks that uses no optional bit of the entries.
    pub const fn new(input_bits: u32, output_bits: u32) -> Self {
        Self {
            input_bits,
            output_bits,
            page_sizes: None,
            snoop: SnoopControl::Absent,
            read_only: ReadOnlyLeaves::Allowed,
            dirty: DirtyTracking::Off,
            walks: Coherency::Coherent,
        }
    }
}

/// The parts of hardware's structures that a second-stage table determines. All other bits, such as
/// the domain and whether the entry is present, are 0 and the driver's to add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VtdSsRegisters {
    /// Bits 127:0 of a scalable-mode PASID-table entry (9.6): SSPTPTR in 63:12, SSADE in 9, AW in
    /// 4:2, PWSNP in 87.
    pub pasid_entry: [u64; 2],
    /// A legacy context entry (9.3): SSPTPTR in 63:12, AW in 66:64. Legacy mode has no dirty bits.
    pub context_entry: [u64; 2],
}

/// VT-d's second stage.
#[derive(Clone, Debug)]
pub struct VtdSs {
    config: VtdSsConfig,
    page_sizes: u64,
}

impl VtdSs {
    /// The leaves that the architecture has (3.7).
    pub const PAGE_SIZES: u64 = 1 << 12 | 1 << 21 | 1 << 30;

    /// A format with this configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] where the architecture has no such table.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{SnoopControl, VtdSs, VtdSsConfig};
    ///
    /// let config = VtdSsConfig { snoop: SnoopControl::Forced, ..VtdSsConfig::new(48, 46) };
    /// assert!(VtdSs::new(config).is_ok());
    /// assert!(VtdSs::new(VtdSsConfig { input_bits: 47, ..config }).is_err());
    /// ```
    pub fn new(config: VtdSsConfig) -> Result<Self, ConfigError> {
        let VtdSsConfig { input_bits, output_bits, .. } = config;
        if !matches!(input_bits, 39 | 48 | 57) {
            return Err(ConfigError::InputBits { input_bits, supported: "39, 48 and 57" });
        }
        if !(32..=52).contains(&output_bits) {
            return Err(ConfigError::OutputBits { output_bits, supported: "32 to 52" });
        }
        let supported = sizes_within::<Self>(Self::PAGE_SIZES, input_bits);
        let page_sizes =
            config::page_sizes(config.page_sizes, supported, supported, Self::GRANULE_LG2)?;
        Ok(Self { config, page_sizes })
    }

    /// Returns what hardware is told of a table whose root is at `root`.
    pub fn registers(&self, root: PhysAddr) -> VtdSsRegisters {
        // AW: 001b for 3 levels, 010b for 4, 011b for 5 (9.3 and 9.6).
        let width = match self.config.input_bits {
            39 => 0b001,
            48 => 0b010,
            _ => 0b011,
        };
        let track = u64::from(self.tracks_dirty());
        let snooped = u64::from(self.config.walks == Coherency::Coherent);
        VtdSsRegisters {
            pasid_entry: [root.get() | track << 9 | width << 2, snooped << (87 - 64)],
            context_entry: [root.get(), width],
        }
    }

    /// A where hardware would set it: only D changes then.
    #[inline(always)]
    fn accessed(&self) -> u64 {
        if self.tracks_dirty() { ACCESSED } else { 0 }
    }
}

// SAFETY: 1. a link is PRESENT without PAGE_SIZE, and its address bits are the table's; SOFTWARE is
// none of them. 2. Leaves above level 0 have PAGE_SIZE, no walk asks for a table at level 0, and A
// and D are not looked at. 3. Nothing changes a value.
#[expect(unsafe_code, reason = "the promise of a format")]
unsafe impl Format for VtdSs {
    type Word = u64;
    const GRANULE_LG2: u32 = 12;
    const LG2_ENTRIES: u32 = 9;
    const GROUPS: Groups = Groups::Consecutive;
    const WRITTEN_BACK: u64 = SOFTWARE;
    const DIRTY: u64 = DIRTY;

    fn manual(&self) -> Manual {
        manuals::VTD_SS
    }

    fn geometry(&self) -> Geometry {
        let VtdSsConfig { input_bits, output_bits, .. } = self.config;
        let aperture = Half::Lower.aperture(input_bits);
        let tree = tree_of::<Self>(input_bits);
        Geometry::of_tree::<Self>(aperture, output_bits, self.page_sizes, tree)
    }

    #[inline(always)]
    fn template(&self, level: u32, _lg2: u32, prot: Prot) -> u64 {
        let read = if prot.contains(Prot::READ) { READ } else { 0 };
        let write = if prot.contains(Prot::WRITE) { WRITE } else { 0 };
        let snoop = match self.config.snoop {
            SnoopControl::Forced => SNOOP,
            SnoopControl::Cached if prot.contains(Prot::CACHE) => SNOOP,
            _ => 0,
        };
        let kind = if level == 0 { 0 } else { PAGE_SIZE };
        read | write | snoop | kind | self.accessed()
    }

    #[inline(always)]
    fn refuses(&self, prot: Prot) -> bool {
        self.config.read_only == ReadOnlyLeaves::Refused && !prot.contains(Prot::WRITE)
    }

    #[inline(always)]
    fn link(&self, _level: u32, table: PhysAddr) -> u64 {
        table.get() | PRESENT | self.accessed()
    }

    #[inline(always)]
    fn decode(&self, level: u32, word: u64) -> Entry {
        let paddr = PhysAddr::new(word & ADDRESS);
        if word & PRESENT == 0 {
            return if word == 0 { Entry::Empty } else { Entry::Invalid };
        }
        match (word & PAGE_SIZE != 0, level) {
            (_, 0) | (true, ..=TOP_LEAF) => Entry::Leaf(Leaf { paddr, lg2: Self::shift(level) }),
            (true, _) => Entry::Invalid,
            (false, _) => Entry::Table(paddr),
        }
    }

    #[inline(always)]
    fn table_of(&self, _level: u32, word: u64) -> Option<PhysAddr> {
        let is_table = word & PRESENT != 0 && word & PAGE_SIZE == 0;
        is_table.then(|| PhysAddr::new(word & ADDRESS))
    }

    #[inline(always)]
    fn is_single(&self, level: u32, word: u64) -> bool {
        let is_leaf = level == 0 || (level <= TOP_LEAF && word & PAGE_SIZE != 0);
        is_leaf && word & PRESENT != 0
    }

    #[inline(always)]
    fn prot(&self, _level: u32, leaf: u64) -> Prot {
        let snoops = self.config.snoop == SnoopControl::Absent || leaf & SNOOP != 0;
        let mut prot = Prot::empty();
        prot.set(Prot::READ, leaf & READ != 0);
        prot.set(Prot::WRITE, leaf & WRITE != 0);
        prot.set(Prot::CACHE, snoops);
        prot
    }

    #[inline(always)]
    fn tracks_dirty(&self) -> bool {
        self.config.dirty == DirtyTracking::Hardware
    }
}
