//! A format of this project's own, which keeps code from taking pages of 4 KiB for granted.
//!
//! This is its whole specification. Entries are little-endian words of 64 bits. The granule is
//! 2 KiB. A table has 256 entries and is 2 KiB aligned to 2 KiB. There are one to four levels,
//! numbered from 0 for the last, so that an entry of level n covers `2^(11 + 8n)` bytes.
//!
//! Input addresses have 19 to 43 bits. The root is at the lowest level whose table can cover them
//! and has only as many entries as they need; it is aligned to its size and at least to 64 bytes.
//!
//! | bits | meaning |
//! |---|---|
//! | 0 | valid; nothing else counts where it is 0 |
//! | 1 | leads to a table; not at level 0 |
//! | 2, 3 | reading, writing permitted |
//! | 4 | cacheable |
//! | 5 | no execution |
//! | 6 | dirty: hardware sets it at the first write, where dirty tracking is on |
//! | 7 | run: one of 16 identical, aligned entries that are one leaf of 16 times the size |
//! | 8 | software's |
//! | 51:11 | the address of the table, or of the leaf or run, aligned to its size |
//!
//! All other bits are 0, and in an entry that leads to a table all but 0, 1, 8 and the address.
//! Leaves stand at levels 0, 1 and 2 (2 KiB, 512 KiB, 128 MiB), runs too (32 KiB, 8 MiB, 2 GiB).

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use super::check::Checked;
use super::radix::{self, BadRegister, Leaf, Next, Radix, Switch, bits, must_be_zero};
use super::{Access, Fault, FaultKind, Shareability, TableLink, TableStep, block_around};

#[cfg(test)]
mod tests;

const VALID: u64 = 1 << 0;
const TABLE: u64 = 1 << 1;
const READ: u64 = 1 << 2;
const WRITE: u64 = 1 << 3;
const CACHE: u64 = 1 << 4;
const NO_EXECUTE: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const RUN: u64 = 1 << 7;
const SOFTWARE: u64 = 1 << 8;
const ADDRESS: u64 = bits(51, 11);

/// Zero in a leaf.
const RESERVED_LEAF: u64 =
    !(VALID | READ | WRITE | CACHE | NO_EXECUTE | DIRTY | RUN | SOFTWARE | ADDRESS);
/// Zero in an entry that leads to a table.
const RESERVED_TABLE: u64 = !(VALID | TABLE | SOFTWARE | ADDRESS);

/// log2 of the entries of a run.
const RUN_LG2: u32 = 4;

/// The registers of the mock format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MockWalkRegisters {
    /// The address of the root table.
    pub root: u64,
    /// Bits of an input address, 19 to 43.
    pub input_lg2: u32,
    /// Whether hardware marks leaves dirty.
    pub dirty_tracking: Switch,
}

/// The walk of the mock format.
#[derive(Clone, Copy, Debug)]
pub struct MockWalker {
    registers: MockWalkRegisters,
    root_level: u8,
}

impl MockWalker {
    /// A walker that hardware with these registers would be.
    ///
    /// # Errors
    ///
    /// [`BadRegister`] for an input size out of range, and a root that is misaligned or above
    /// 52 bits.
    pub fn new(registers: MockWalkRegisters) -> Result<Self, BadRegister> {
        let MockWalkRegisters { root, input_lg2, .. } = registers;
        let root_level = match input_lg2 {
            19 => 0,
            20..=27 => 1,
            28..=35 => 2,
            36..=43 => 3,
            _ => {
                let (field, value) = ("the input size", input_lg2.into());
                return Err(BadRegister::Reserved { field, value });
            }
        };
        let walker = Self { registers, root_level };
        let align_lg2 = (input_lg2 - walker.entry_lg2(root_level) + 3).max(6);
        BadRegister::refuse_misaligned(root, align_lg2)?;
        BadRegister::refuse(root >> 52 != 0, "the root", root)?;
        Ok(walker)
    }

    /// The registers.
    pub fn registers(&self) -> &MockWalkRegisters {
        &self.registers
    }

    /// Every address that the tables can translate.
    pub fn input_range(&self) -> IovaRange {
        block_around(Iova::new(0), self.registers.input_lg2)
    }
}

impl Radix for MockWalker {
    fn entry_lg2(&self, level: u8) -> u32 {
        11 + 8 * u32::from(level)
    }

    fn table_lg2(&self, level: u8) -> u32 {
        (self.entry_lg2(level) + 8).min(self.registers.input_lg2)
    }

    fn decode(&self, step: &TableStep, iova: Iova, access: Access) -> Result<Next, FaultKind> {
        let (entry, level) = (step.entry, step.link.level);
        if entry & VALID == 0 {
            return Err(FaultKind::Translation);
        }
        if entry & TABLE != 0 {
            must_be_zero(entry & RESERVED_TABLE)?;
            let level = level.checked_sub(1).ok_or(FaultKind::Reserved)?;
            return Ok(Next::Table { table: entry & ADDRESS, level, inherited: 0 });
        }
        must_be_zero(entry & RESERVED_LEAF)?;
        let run_lg2 = if entry & RUN != 0 { RUN_LG2 } else { 0 };
        let group_lg2 = step.entry_lg2 + run_lg2;
        // A small root may have fewer entries than a run.
        if level == 3 || group_lg2 > self.table_lg2(level) {
            return Err(FaultKind::Reserved);
        }
        let output = entry & ADDRESS;
        must_be_zero(output & lg2::mask(group_lg2))?;
        let mut prot = Prot::empty();
        prot.set(Prot::READ, entry & READ != 0);
        prot.set(Prot::WRITE, entry & WRITE != 0);
        prot.set(Prot::CACHE, entry & CACHE != 0);
        prot.set(Prot::NOEXEC, entry & NO_EXECUTE != 0);
        let tracked = self.registers.dirty_tracking.select(DIRTY);
        let unmarked = tracked & !entry != 0;
        Ok(Next::Leaf(Leaf {
            paddr: output | (iova.get() & lg2::mask(group_lg2)),
            group_lg2,
            prot,
            clean: unmarked && prot.contains(Prot::WRITE),
            attributes: 0,
            shareability: Shareability::Inner,
            marked: entry | (if self.writes(prot, access) { tracked } else { 0 }),
        }))
    }

    /// Faults of the root are at the level of the root table.
    fn start(&self, iova: Iova, access: Access) -> Result<TableLink, Fault> {
        let (block, level) = (self.input_range(), self.root_level);
        let table = PhysAddr::new(self.registers.root);
        radix::root(TableLink { table, block, level, inherited: 0 }, iova, access)
    }
}

impl Checked for MockWalker {
    fn input_ranges(&self) -> Vec<IovaRange> {
        vec![self.input_range()]
    }

    fn hardware_bits(&self) -> u64 {
        self.registers.dirty_tracking.select(DIRTY)
    }
}
