//! The page tables of RISC-V, as its IOMMU walks them: Sv39, Sv48 and Sv57 for the first stage,
//! Sv39x4, Sv48x4 and Sv57x4 for the second.
//!
//! Sources: The RISC-V Instruction Set Manual, volume II, Privileged Architecture, chapters
//! "Supervisor-Level ISA" ("Sv39: Page-Based 39-bit Virtual-Memory System", "Svnapot", "Svpbmt",
//! "Svadu") and "Hypervisor Extension" ("Two-Stage Address Translation"); RISC-V IOMMU Architecture
//! Specification, "Device context fields" and "Translation of IOVA".
//!
//! Levels are those of the manual: 0 is the last table, the root is level 2, 3 or 4.

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use super::check::Checked;
use super::radix::{BadRegister, Leaf, Next, Radix, Requester, Switch, bits, must_be_zero};
use super::{Access, Fault, FaultKind, Shareability, TableLink, TableStep, block_around};

#[cfg(test)]
mod tests;

// Figure "Sv39 page table entry".
const VALID: u64 = 1 << 0;
const READ: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const EXECUTE: u64 = 1 << 3;
const USER: u64 = 1 << 4;
const GLOBAL: u64 = 1 << 5;
const ACCESSED: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;
const RESERVED: u64 = bits(60, 54);
const PBMT: u64 = bits(62, 61);
const NAPOT: u64 = 1 << 63;

/// log2 of the one size that Svnapot defines.
const NAPOT_LG2: u32 = 16;

/// Says which stage the tables are, with the register that has their root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RiscvRoot {
    /// The first stage: `fsc` of a device context, or the same bits in a process context.
    First {
        /// iosatp: MODE in bits 63:60 and PPN in bits 43:0.
        fsc: u64,
    },
    /// The second stage, with a root of four tables.
    Second {
        /// MODE in bits 63:60, GSCID in 59:44 and PPN in 43:0.
        iohgatp: u64,
    },
}

/// The fields of a device context that describe the tables, and the features of the hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RiscvWalkRegisters {
    /// The stage and its register.
    pub stage: RiscvRoot,
    /// SADE for the first stage, GADE for the second: hardware sets A and D. Otherwise a leaf whose
    /// bit is clear faults.
    pub updates: Switch,
    /// The Svnapot extension.
    pub svnapot: Switch,
    /// The Svpbmt extension.
    pub svpbmt: Switch,
    /// As whom the device accesses memory, for the first stage. The second takes everybody for a
    /// user.
    pub requester: Requester,
    /// SUM: a supervisor may access the pages of users.
    pub sum: Switch,
}

/// The walk of one stage.
#[derive(Clone, Copy, Debug)]
pub struct RiscvWalker {
    registers: RiscvWalkRegisters,
    /// 3, 4 or 5.
    levels: u8,
    root: u64,
}

impl RiscvWalker {
    /// A walker that hardware with these registers would be.
    ///
    /// # Errors
    ///
    /// [`BadRegister`] for a MODE that is Bare or reserved, reserved bits, and a misaligned root.
    pub fn new(registers: RiscvWalkRegisters) -> Result<Self, BadRegister> {
        let (register, align_lg2) = match registers.stage {
            RiscvRoot::First { fsc } => (fsc, 12),
            RiscvRoot::Second { iohgatp } => (iohgatp, 14),
        };
        let levels = match register >> 60 {
            8 => 3,
            9 => 4,
            10 => 5,
            value => return Err(BadRegister::Reserved { field: "MODE", value }),
        };
        if matches!(registers.stage, RiscvRoot::First { .. }) {
            let above = register & bits(59, 44);
            BadRegister::refuse(above != 0, "bits 59:44", above)?;
        }
        let root = (register & bits(43, 0)) << 12;
        BadRegister::refuse_misaligned(root, align_lg2)?;
        Ok(Self { registers, levels, root })
    }

    /// The registers.
    pub fn registers(&self) -> &RiscvWalkRegisters {
        &self.registers
    }

    /// The level of the root table.
    pub fn root_level(&self) -> u8 {
        self.levels - 1
    }

    /// What the root would translate around `iova`, if that is in reach.
    fn block(&self, iova: Iova) -> IovaRange {
        let whole = self.table_lg2(self.root_level());
        match self.registers.stage {
            RiscvRoot::First { .. } => block_around(iova, whole - 1),
            RiscvRoot::Second { .. } => block_around(iova, whole),
        }
    }

    /// Bits that are reserved in every entry, with the extensions there are.
    fn reserved(&self) -> u64 {
        let napot = NAPOT & !self.registers.svnapot.select(NAPOT);
        let pbmt = PBMT & !self.registers.svpbmt.select(PBMT);
        RESERVED | napot | pbmt
    }

    /// Where the leaf's output begins and log2 of its size.
    ///
    /// A superpage is aligned to its size. Of the NAPOT encodings only that of 64 KiB is defined:
    /// level 0 and PPN bits 3:0 0b1000.
    fn output(&self, step: &TableStep) -> Result<(u64, u32), FaultKind> {
        let address = (step.entry & bits(53, 10)) << 2;
        if step.entry & NAPOT == 0 {
            must_be_zero(address & lg2::mask(step.entry_lg2))?;
            return Ok((address, step.entry_lg2));
        }
        let size = address & lg2::mask(NAPOT_LG2);
        if step.link.level != 0 || size != 1 << (NAPOT_LG2 - 1) {
            return Err(FaultKind::Reserved);
        }
        Ok((address & !size, NAPOT_LG2))
    }
}

impl Radix for RiscvWalker {
    fn entry_lg2(&self, level: u8) -> u32 {
        12 + 9 * u32::from(level)
    }

    /// The root of the second stage resolves two bits more.
    fn table_lg2(&self, level: u8) -> u32 {
        let wide = matches!(self.registers.stage, RiscvRoot::Second { .. });
        let more = if wide && level == self.root_level() { 2 } else { 0 };
        self.entry_lg2(level) + 9 + more
    }

    /// "Virtual Address Translation Process", steps 2 to 9.
    fn decode(&self, step: &TableStep, iova: Iova, access: Access) -> Result<Next, FaultKind> {
        let (entry, level) = (step.entry, step.link.level);
        if entry & VALID == 0 {
            return Err(FaultKind::Translation);
        }
        must_be_zero(entry & self.reserved())?;
        if entry & (READ | WRITE) == WRITE {
            return Err(FaultKind::Reserved);
        }
        if entry & (READ | WRITE | EXECUTE) == 0 {
            // What only a leaf has is reserved here.
            must_be_zero(entry & (USER | ACCESSED | DIRTY | PBMT | NAPOT))?;
            let table = (entry & bits(53, 10)) << 2;
            let level = level.checked_sub(1).ok_or(FaultKind::Reserved)?;
            return Ok(Next::Table { table, level, inherited: 0 });
        }
        let (output, group_lg2) = self.output(step)?;
        let mut prot = match (entry & PBMT) >> 61 {
            0 => Prot::CACHE,
            1 => Prot::empty(),
            2 => Prot::MMIO,
            _ => return Err(FaultKind::Reserved),
        };
        prot.set(Prot::READ, entry & READ != 0);
        prot.set(Prot::WRITE, entry & WRITE != 0);
        prot.set(Prot::NOEXEC, entry & EXECUTE == 0);
        prot.set(Prot::PRIV, entry & USER == 0);
        let dirty = if self.writes(prot, access) { DIRTY } else { 0 };
        let set = ACCESSED | dirty;
        if self.registers.updates == Switch::Off && !entry & set != 0 {
            return Err(FaultKind::AccessFlag);
        }
        Ok(Next::Leaf(Leaf {
            paddr: output | (iova.get() & lg2::mask(group_lg2)),
            group_lg2,
            prot,
            // Where hardware does not set D, the first write has to find that out by a walk too.
            clean: entry & (WRITE | DIRTY) == WRITE,
            attributes: 0,
            shareability: Shareability::Inner,
            marked: entry | set,
        }))
    }

    /// Faults of the root are at the level of the root table. An address out of reach is a
    /// translation fault.
    fn start(&self, iova: Iova, access: Access) -> Result<TableLink, Fault> {
        let level = self.root_level();
        let block = self.block(iova);
        let last = match self.registers.stage {
            RiscvRoot::First { .. } => Iova::new(u64::MAX),
            RiscvRoot::Second { .. } => Iova::new(0),
        };
        if !block.contains(Iova::new(0)) && !block.contains(last) {
            return Err(Fault { kind: FaultKind::Translation, level, iova, access });
        }
        Ok(TableLink { table: PhysAddr::new(self.root), block, level, inherited: 0 })
    }

    /// `PRIV` is a clear U bit: a user needs U, and a supervisor without SUM needs it clear. All
    /// accesses of the second stage are a user's ("Guest Physical Address Translation").
    fn allows(&self, prot: Prot, access: Access) -> bool {
        let supervisors = prot.contains(Prot::PRIV);
        let reachable = match (self.registers.stage, self.registers.requester) {
            (RiscvRoot::Second { .. }, _) | (_, Requester::User) => !supervisors,
            (_, Requester::Supervisor) => supervisors || self.registers.sum == Switch::On,
        };
        reachable && prot.contains(access.needs())
    }
}

impl Checked for RiscvWalker {
    /// Of the first stage the lower and the upper half of the addresses whose upper bits all equal
    /// the highest that is translated, of the second those whose upper bits are 0.
    fn input_ranges(&self) -> Vec<IovaRange> {
        let lower = self.block(Iova::new(0));
        match self.registers.stage {
            RiscvRoot::First { .. } => vec![lower, self.block(Iova::new(u64::MAX))],
            RiscvRoot::Second { .. } => vec![lower],
        }
    }

    fn hardware_bits(&self) -> u64 {
        self.registers.updates.select(ACCESSED | DIRTY)
    }

    /// G is reserved in the second stage, and hardware ignores it.
    fn must_be_clear(&self, _: &TableStep) -> u64 {
        match self.registers.stage {
            RiscvRoot::First { .. } => 0,
            RiscvRoot::Second { .. } => GLOBAL,
        }
    }
}
