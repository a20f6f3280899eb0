//! The second stage of Intel VT-d: the tables that translate requests without PASID in legacy mode,
//! and in scalable mode those of a PASID whose PGTT says so.
//!
//! Source: Intel Virtualization Technology for Directed I/O, Architecture Specification (D51397),
//! 3.7 "Second-Stage Translation" and 9.8 "Second-Stage Paging Entries".
//!
//! Levels count from the last table: 1 is an SS-PTE, 2 an SS-PDE, 3 an SS-PDPE, 4 an SS-PML4E and 5
//! an SS-PML5E. Not supported: nested translation, the memory type of bits 6:3, the transient
//! mappings of device TLBs (bit 62 counts as reserved). Bit 2, execute, is ignored, as hardware
//! without execute requests does. Where SSADE is on hardware also sets A in the entries above the
//! leaf; a [`Translated`] reports the leaf's update alone.
//!
//! [`Translated`]: super::Translated

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use super::check::Checked;
use super::radix::{self, BadRegister, Leaf, Next, Radix, Switch, bits, must_be_zero};
use super::{Access, Fault, FaultKind, Shareability, TableLink, TableStep, block_around};

#[cfg(test)]
mod tests;

// Table "Format of SS-PTE" and those of the other entries (9.8).
const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const PAGE_SIZE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;
const SNOOP: u64 = 1 << 11;
const TRANSIENT: u64 = 1 << 62;
const ADDRESS: u64 = bits(51, 12);

/// The fields of a PASID-table entry or a context entry that describe second-stage tables, and the
/// features of the hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VtdSsWalkRegisters {
    /// SSPTPTR: the address of the root table, with bits 11:0 clear.
    pub ssptptr: u64,
    /// AW: 1 is 39 bits and three levels, 2 is 48 and four, 3 is 57 and five.
    pub aw: u8,
    /// SSADE: hardware sets accessed and dirty bits.
    pub ssade: Switch,
    /// The host address width in bits, HAW, 12 to 52.
    pub host_lg2: u32,
    /// SSLPS of the capability register: bit 0 for pages of 2 MiB, bit 1 for 1 GiB.
    pub sslps: u8,
    /// SC of the extended capability register: SNP is no reserved bit.
    pub snoop_control: Switch,
}

/// The walk of second-stage tables.
#[derive(Clone, Copy, Debug)]
pub struct VtdSsWalker {
    registers: VtdSsWalkRegisters,
    levels: u8,
}

impl VtdSsWalker {
    /// A walker that hardware with these registers would be.
    ///
    /// # Errors
    ///
    /// [`BadRegister`] for reserved values and a root that is misaligned or above the host address
    /// width.
    pub fn new(registers: VtdSsWalkRegisters) -> Result<Self, BadRegister> {
        let VtdSsWalkRegisters { ssptptr: root, aw, host_lg2, sslps, .. } = registers;
        BadRegister::refuse(!(1..=3).contains(&aw), "AW", aw.into())?;
        BadRegister::refuse(sslps > 3, "SSLPS", sslps.into())?;
        BadRegister::refuse(!(12..=52).contains(&host_lg2), "HAW", host_lg2.into())?;
        BadRegister::refuse_misaligned(root, 12)?;
        BadRegister::refuse(root & !lg2::mask(host_lg2) != 0, "SSPTPTR", root)?;
        Ok(Self { registers, levels: registers.aw + 2 })
    }

    /// The registers.
    pub fn registers(&self) -> &VtdSsWalkRegisters {
        &self.registers
    }

    /// Every address that the tables can translate.
    pub fn input_range(&self) -> IovaRange {
        block_around(Iova::new(0), self.table_lg2(self.levels))
    }

    /// Whether the entry is a leaf: all of level 1, and with PS where such pages are supported.
    fn is_leaf(&self, entry: u64, level: u8) -> bool {
        level == 1 || (entry & PAGE_SIZE != 0 && self.has_pages(level))
    }

    fn has_pages(&self, level: u8) -> bool {
        matches!((level, self.registers.sslps), (2, 1 | 3) | (3, 2 | 3))
    }

    /// Bits that must be 0 (9.8): addresses above the host's, the offset in a large page, PS where
    /// there is none, and bit 11 of an entry that is no leaf.
    fn reserved(&self, entry: u64, level: u8) -> u64 {
        let above = ADDRESS & !lg2::mask(self.registers.host_lg2);
        let format = if self.is_leaf(entry, level) {
            let snoop = SNOOP & !self.registers.snoop_control.select(SNOOP);
            snoop | (ADDRESS & lg2::mask(self.entry_lg2(level)))
        } else {
            // Above level 1 a set PS that came here asks for pages that are not supported.
            SNOOP | PAGE_SIZE
        };
        above | format | TRANSIENT
    }
}

impl Radix for VtdSsWalker {
    fn entry_lg2(&self, level: u8) -> u32 {
        12 + 9 * u32::from(level.saturating_sub(1))
    }

    fn table_lg2(&self, level: u8) -> u32 {
        self.entry_lg2(level) + 9
    }

    fn decode(&self, step: &TableStep, iova: Iova, access: Access) -> Result<Next, FaultKind> {
        let (entry, level) = (step.entry, step.link.level);
        // An entry with neither permission is not present, and its other bits mean nothing (3.7).
        if entry & (READ | WRITE) == 0 {
            return Err(FaultKind::Translation);
        }
        must_be_zero(entry & self.reserved(entry, level))?;
        let inherited = step.link.inherited | (!entry & (READ | WRITE));
        let address = entry & ADDRESS;
        if !self.is_leaf(entry, level) {
            return Ok(Next::Table { table: address, level: level - 1, inherited });
        }
        let mut prot = Prot::empty();
        prot.set(Prot::READ, inherited & READ == 0);
        prot.set(Prot::WRITE, inherited & WRITE == 0);
        // Without snoop control a request snoops unless the device asks it not to.
        let snoops = entry & SNOOP != 0 || self.registers.snoop_control == Switch::Off;
        prot.set(Prot::CACHE, snoops);
        let dirty = if self.writes(prot, access) { DIRTY } else { 0 };
        let unmarked = self.registers.ssade.select(!entry & DIRTY) != 0;
        Ok(Next::Leaf(Leaf {
            paddr: address | (iova.get() & lg2::mask(step.entry_lg2)),
            group_lg2: step.entry_lg2,
            prot,
            clean: unmarked && prot.contains(Prot::WRITE),
            attributes: 0,
            shareability: Shareability::Inner,
            marked: entry | self.registers.ssade.select(ACCESSED | dirty),
        }))
    }

    /// Faults of the root are at the level of the root table.
    fn start(&self, iova: Iova, access: Access) -> Result<TableLink, Fault> {
        let (block, level) = (self.input_range(), self.levels);
        let table = PhysAddr::new(self.registers.ssptptr);
        radix::root(TableLink { table, block, level, inherited: 0 }, iova, access)
    }
}

impl Checked for VtdSsWalker {
    fn input_ranges(&self) -> Vec<IovaRange> {
        vec![self.input_range()]
    }

    fn hardware_bits(&self) -> u64 {
        self.registers.ssade.select(ACCESSED | DIRTY)
    }
}
