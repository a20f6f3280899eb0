//! The host page tables of the AMD IOMMU, which its manual calls version 1.
//!
//! Source: AMD I/O Virtualization Technology (IOMMU) Specification (48882), 2.2.2.1 "Device Table
//! Entry Format" and 2.2.3 "I/O Page Tables for Host Translations".
//!
//! Levels are those of the manual: 1 is the last table, and the root is that of the DTE's Mode, 1
//! to 6. An entry may lead to any lower level; the address bits of the levels between must be 0. A
//! page may have any power of two as its size: one larger than an entry repeats in as many entries
//! as it covers. Where the access bit is enabled hardware sets it above the leaf too; a
//! [`Translated`] reports the leaf's update alone, which is in the copy that the walk read.
//!
//! [`Translated`]: super::Translated

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use super::check::Checked;
use super::radix::{self, BadRegister, Leaf, Next, Radix, Switch, bits, must_be_zero};
use super::{Access, Fault, FaultKind, Shareability, TableLink, TableStep, block_around};

#[cfg(test)]
mod tests;

// Table "Device Table Entry": bits of its first 64.
const VALID: u64 = 1 << 0;
const TRANSLATION_VALID: u64 = 1 << 1;
const GUEST: u64 = 1 << 55;

// Page translation entries and page directory entries (2.2.3).
const PRESENT: u64 = 1 << 0;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const ADDRESS: u64 = bits(51, 12);
const FORCE_COHERENT: u64 = 1 << 60;
const READ: u64 = 1 << 61;
const WRITE: u64 = 1 << 62;
/// Of an entry that is a page.
const RESERVED_PAGE: u64 = bits(58, 52);
/// Of an entry that leads to a table.
const RESERVED_DIRECTORY: u64 = bits(60, 52);

/// The fields of a device table entry that describe host tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AmdV1WalkRegisters {
    /// Bits 63:0 of the DTE: V, TV, HAD, Mode, the root's address, IR and IW.
    pub dte: u64,
}

/// The walk of host tables.
#[derive(Clone, Copy, Debug)]
pub struct AmdV1Walker {
    registers: AmdV1WalkRegisters,
    /// The level of the root table.
    mode: u8,
    accessed: Switch,
    dirty: Switch,
}

impl AmdV1Walker {
    /// A walker that hardware with this device table entry would be.
    ///
    /// # Errors
    ///
    /// [`BadRegister`] where V or TV is clear, for a Mode without tables, for guest translation,
    /// and for reserved values.
    pub fn new(registers: AmdV1WalkRegisters) -> Result<Self, BadRegister> {
        let dte = registers.dte;
        let valid = dte & (VALID | TRANSLATION_VALID);
        BadRegister::refuse(valid != VALID | TRANSLATION_VALID, "V and TV", valid)?;
        let unused = dte & (bits(6, 2) | 1 << 63);
        BadRegister::refuse(unused != 0, "bits 6:2 and 63", unused)?;
        BadRegister::refuse(dte & GUEST != 0, "GV", 1)?;
        let mode = level_field(dte);
        BadRegister::refuse(!(1..=6).contains(&mode), "Mode", mode.into())?;
        let (accessed, dirty) = match (dte & bits(8, 7)) >> 7 {
            0b00 => (Switch::Off, Switch::Off),
            0b01 => (Switch::On, Switch::Off),
            0b11 => (Switch::On, Switch::On),
            value => return Err(BadRegister::Reserved { field: "HAD", value }),
        };
        Ok(Self { registers, mode, accessed, dirty })
    }

    /// The device table entry.
    pub fn registers(&self) -> &AmdV1WalkRegisters {
        &self.registers
    }

    /// Every address that the tables can translate: with mode 6 all 64 bits.
    pub fn input_range(&self) -> IovaRange {
        block_around(Iova::new(0), self.table_lg2(self.mode))
    }

    /// Where the page begins and log2 of its size.
    ///
    /// With next level 0 the size is the entry's. With 7 the address bits tell (2.2.3, "page size
    /// encodings"): the lowest clear bit from bit 12 up is the highest of the offset, so that clear
    /// bit 12 means 8 KiB. The size must be one that several entries of this level cover but not a
    /// whole table.
    fn page(&self, entry: u64, level: u8) -> Result<(u64, u32), FaultKind> {
        let entry_lg2 = self.entry_lg2(level);
        let address = entry & ADDRESS;
        // A page of level 6 would be larger than all physical memory.
        if level >= 6 {
            return Err(FaultKind::Reserved);
        }
        let size_lg2 = match level_field(entry) {
            0 => entry_lg2,
            _ => 13 + (address >> 12).trailing_ones(),
        };
        let whole = entry_lg2 + 9;
        if !(entry_lg2..whole).contains(&size_lg2)
            || (level_field(entry) == 7 && size_lg2 == entry_lg2)
            || size_lg2 > 52
        {
            return Err(FaultKind::Reserved);
        }
        Ok((lg2::align_down(address, size_lg2), size_lg2))
    }

    /// The table that a directory entry leads to (2.2.3): a lower level, where the address has no
    /// bit set that the levels left out would resolve.
    fn table(&self, step: &TableStep, iova: Iova, inherited: u64) -> Result<Next, FaultKind> {
        let entry = step.entry;
        let level = level_field(entry);
        if level >= step.link.level {
            return Err(FaultKind::Reserved);
        }
        must_be_zero(entry & RESERVED_DIRECTORY)?;
        let skipped = lg2::mask(step.entry_lg2) & !lg2::mask(self.table_lg2(level));
        if iova.get() & skipped != 0 {
            return Err(FaultKind::Translation);
        }
        Ok(Next::Table { table: entry & ADDRESS, level, inherited })
    }
}

/// Bits 11:9: Mode of a DTE, Next Level of an entry.
fn level_field(word: u64) -> u8 {
    // Three bits fit.
    u8::try_from((word >> 9) & 7).unwrap_or(7)
}

impl Radix for AmdV1Walker {
    fn entry_lg2(&self, level: u8) -> u32 {
        12 + 9 * u32::from(level.saturating_sub(1))
    }

    /// Level 6 resolves the seven bits that are left of 64.
    fn table_lg2(&self, level: u8) -> u32 {
        (self.entry_lg2(level) + 9).min(64)
    }

    fn decode(&self, step: &TableStep, iova: Iova, access: Access) -> Result<Next, FaultKind> {
        let (entry, level) = (step.entry, step.link.level);
        if entry & PRESENT == 0 {
            return Err(FaultKind::Translation);
        }
        let inherited = step.link.inherited | (!entry & (READ | WRITE));
        if !matches!(level_field(entry), 0 | 7) {
            return self.table(step, iova, inherited);
        }
        must_be_zero(entry & RESERVED_PAGE)?;
        let (output, group_lg2) = self.page(entry, level)?;
        let mut prot = Prot::empty();
        prot.set(Prot::READ, inherited & READ == 0);
        prot.set(Prot::WRITE, inherited & WRITE == 0);
        prot.set(Prot::CACHE, entry & FORCE_COHERENT != 0);
        let dirty = if self.writes(prot, access) { self.dirty.select(DIRTY) } else { 0 };
        let unmarked = self.dirty.select(!entry & DIRTY) != 0;
        Ok(Next::Leaf(Leaf {
            paddr: output | (iova.get() & lg2::mask(group_lg2)),
            group_lg2,
            prot,
            clean: unmarked && prot.contains(Prot::WRITE),
            attributes: 0,
            shareability: Shareability::Inner,
            marked: entry | (self.accessed.select(ACCESSED) | dirty),
        }))
    }

    /// Faults of the root are at the level of the root table. IR and IW of the DTE bound what the
    /// tables permit.
    fn start(&self, iova: Iova, access: Access) -> Result<TableLink, Fault> {
        let (block, dte) = (self.input_range(), self.registers.dte);
        let table = PhysAddr::new(dte & ADDRESS);
        let inherited = !dte & (READ | WRITE);
        radix::root(TableLink { table, block, level: self.mode, inherited }, iova, access)
    }
}

impl Checked for AmdV1Walker {
    fn input_ranges(&self) -> Vec<IovaRange> {
        vec![self.input_range()]
    }

    fn hardware_bits(&self) -> u64 {
        self.accessed.select(ACCESSED) | self.dirty.select(DIRTY)
    }

    /// The address of a page with next level 0 is aligned to the page.
    fn must_be_clear(&self, step: &TableStep) -> u64 {
        match level_field(step.entry) {
            0 => step.entry & ADDRESS & lg2::mask(step.entry_lg2),
            _ => 0,
        }
    }
}
