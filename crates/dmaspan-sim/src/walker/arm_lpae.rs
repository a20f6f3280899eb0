//! Stage 1 of VMSAv8-64: the tables of AArch64 CPUs, and of SMMUs that share their format.
//!
//! Source: Arm Architecture Reference Manual for A-profile architecture (DDI 0487, issue K.a),
//! chapter D8, "The AArch64 Virtual Memory System Architecture". Each use of bits names its
//! section.
//!
//! Supported are the granules of 4, 16 and 64 KiB with every start level, both halves of the
//! address space, blocks, the Contiguous bit, hierarchical permissions, 52-bit addresses with the
//! 64K granule, and the access flag and dirty state managed by hardware. Not supported are
//! FEAT_LPA2 (TCR_EL1.DS), FEAT_D128, top byte ignore, PAN, and the difference between the Secure
//! and the Non-secure address space: NS and NSTable are ignored, as they are outside Secure state.

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use super::{
    Access, EntryUpdate, Fault, FaultKind, Shareability, TableLink, TableStep, TableWords,
    Translation, WalkPath, Walker, block_around,
};

mod registers;
mod strict;
#[cfg(test)]
mod tests;

pub use registers::{ArmS1Registers, BadRegisters, Half, Privilege};
use registers::{Config, FlagUpdate, Hierarchical, Walks, bit, field};
pub use strict::BadTable;

/// Attribute bits 63:59 of a table descriptor: NSTable, APTable, UXNTable, PXNTable (D8.3.1).
const HIERARCHICAL: u64 = 0b1_1111 << 59;
/// APTable\[1\]: no writes below.
const AP_TABLE_READ_ONLY: u32 = 62;
/// APTable\[0\]: no unprivileged accesses below.
const AP_TABLE_PRIVILEGED: u32 = 61;
const UXN_TABLE: u32 = 60;
const PXN_TABLE: u32 = 59;

// Attributes of a block or page descriptor (D8.3.1, "Block descriptor and Page descriptor").
const AP_UNPRIVILEGED: u32 = 6;
const AP_READ_ONLY: u32 = 7;
const ACCESS_FLAG: u32 = 10;
const DIRTY_MODIFIER: u32 = 51;
const CONTIGUOUS: u32 = 52;
const PXN: u32 = 53;
const UXN: u32 = 54;

/// The walk of one half of a stage 1 address space.
#[derive(Clone, Copy, Debug)]
pub struct ArmLpaeS1Walker {
    registers: ArmS1Registers,
    config: Config,
}

/// What a descriptor is (D8.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Descriptor {
    Invalid,
    Table(u64),
    Leaf(u64),
}

impl ArmLpaeS1Walker {
    /// A walker that hardware with these registers would be.
    ///
    /// # Errors
    ///
    /// [`BadRegisters`] for reserved values, misaligned bases and features that are not supported.
    pub fn new(registers: ArmS1Registers) -> Result<Self, BadRegisters> {
        Ok(Self { registers, config: Config::parse(&registers)? })
    }

    /// The registers.
    pub fn registers(&self) -> &ArmS1Registers {
        &self.registers
    }

    /// log2 of the granule.
    pub fn granule_lg2(&self) -> u32 {
        self.config.granule_lg2
    }

    /// The level of the root table, 0 to 3.
    pub fn start_level(&self) -> u8 {
        self.config.start_level
    }

    /// Every address that the tables can translate.
    pub fn input_range(&self) -> IovaRange {
        let some = match self.registers.half {
            Half::Lower => Iova::new(0),
            Half::Upper => Iova::new(u64::MAX),
        };
        block_around(some, self.config.input_lg2)
    }

    /// Reads the entry for `iova` in the table of `link`.
    fn step<T: TableWords + ?Sized>(
        &self,
        tables: &T,
        link: TableLink,
        iova: Iova,
        access: Access,
    ) -> Result<TableStep, Fault> {
        let entry_lg2 = self.config.entry_lg2(link.level);
        let index = (iova.get() & lg2::mask(self.config.table_lg2(link.level))) >> entry_lg2;
        // Table addresses have 52 bits at most and an index 13.
        let entry_paddr = link.table.wrapping_add(index << 3);
        let entry = tables.read_u64(entry_paddr).map_err(|why| Fault {
            kind: FaultKind::ExternalAbort(why),
            level: link.level,
            iova,
            access,
        })?;
        Ok(TableStep { link, entry_lg2, entry_paddr, entry })
    }

    /// What kind of descriptor an entry is and the address in it (D8.3.1).
    fn decode(&self, entry: u64, level: u8) -> Descriptor {
        let granule_lg2 = self.config.granule_lg2;
        match (field(entry, 1, 0), level) {
            (0b11, 3) => Descriptor::Leaf(self.address(entry, granule_lg2)),
            (0b11, _) => Descriptor::Table(self.address(entry, granule_lg2)),
            // At level 3 the encoding 0b01 is reserved and treated as invalid.
            (0b01, 1 | 2) if self.has_blocks(level) => {
                Descriptor::Leaf(self.address(entry, self.config.entry_lg2(level)))
            }
            _ => Descriptor::Invalid,
        }
    }

    /// Where blocks are permitted (D8.3.1; level 1 with the 64K granule needs 52-bit addresses, and
    /// level 0 with the 4K granule FEAT_LPA2).
    fn has_blocks(&self, level: u8) -> bool {
        match (self.config.granule_lg2, level) {
            (12, 1 | 2) | (14 | 16, 2) => true,
            (16, 1) => self.config.output_lg2 == 52,
            _ => false,
        }
    }

    /// Bits 47 to `low`, and with the 64K granule bits 51:48 from bits 15:12 (D8.3.1).
    fn address(&self, entry: u64, low: u32) -> u64 {
        let address = field(entry, 47, low) << low;
        if self.config.granule_lg2 == 16 { address | (field(entry, 15, 12) << 48) } else { address }
    }

    /// Whether an address is larger than IPS permits (D8.2, "Output address size").
    fn too_large(&self, address: u64) -> bool {
        address & !lg2::mask(self.config.output_lg2) != 0
    }

    /// log2 of a contiguous group of leaves at `level` (D8.7, "The Contiguous bit").
    fn group_lg2(&self, level: u8) -> Option<u32> {
        let entries_lg2 = match (self.config.granule_lg2, level) {
            (12, 1..=3) => 4,
            (14, 2) | (16, 2 | 3) => 5,
            (14, 3) => 7,
            _ => return None,
        };
        Some(self.config.entry_lg2(level) + entries_lg2)
    }

    /// Permissions of a leaf (D8.4, "Memory access control"), and whether it is writable-clean
    /// (D8.5).
    fn permissions(&self, entry: u64, inherited: u64) -> (Prot, bool) {
        let marked_clean = self.config.dirty == FlagUpdate::Hardware && bit(entry, DIRTY_MODIFIER);
        let read_only = bit(entry, AP_READ_ONLY);
        let writable = !bit(inherited, AP_TABLE_READ_ONLY) && (!read_only || marked_clean);
        let unprivileged = bit(entry, AP_UNPRIVILEGED) && !bit(inherited, AP_TABLE_PRIVILEGED);
        let execute_never = match self.registers.privilege {
            Privilege::Unprivileged => bit(entry, UXN) || bit(inherited, UXN_TABLE),
            Privilege::Privileged => bit(entry, PXN) || bit(inherited, PXN_TABLE),
        };
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, writable);
        prot.set(Prot::PRIV, !unprivileged);
        prot.set(Prot::NOEXEC, execute_never);
        (prot, writable && read_only)
    }

    /// The attribute byte of MAIR that AttrIndx selects (D8.6).
    fn attributes(&self, entry: u64) -> u8 {
        let index = field(entry, 4, 2);
        let [byte, ..] = (self.registers.mair >> (8 * index)).to_le_bytes();
        byte
    }

    /// The translation by a leaf, whose address was found to fit.
    fn translate(
        &self,
        step: &TableStep,
        output: u64,
        iova: Iova,
        access: Access,
    ) -> Result<Translation, Fault> {
        let level = step.link.level;
        let entry = step.entry;
        let (mut prot, clean) = self.permissions(entry, step.link.inherited);
        let first_write = clean && access == Access::Write && self.permits(prot, access);
        let update = self.update(step, if first_write { 1 << AP_READ_ONLY } else { 0 });
        let flag_set = bit(update.map_or(entry, |update| update.new), ACCESS_FLAG);
        if !flag_set {
            return Err(Fault { kind: FaultKind::AccessFlag, level, iova, access });
        }
        let attributes = self.attributes(entry);
        prot.insert(memory_type(attributes));
        let group_lg2 = match self.group_lg2(level) {
            // A group larger than the tables' input range cannot be cached whole.
            Some(lg2) if bit(entry, CONTIGUOUS) => lg2.min(self.config.input_lg2),
            _ => step.entry_lg2,
        };
        Ok(Translation {
            iova,
            paddr: PhysAddr::new(output | (iova.get() & lg2::mask(step.entry_lg2))),
            leaf: block_around(iova, step.entry_lg2),
            leaf_lg2: step.entry_lg2,
            group: block_around(iova, group_lg2),
            group_lg2,
            level,
            prot,
            clean,
            attributes,
            shareability: shareability(entry),
            update,
            tables: WalkPath::new(),
        })
    }

    /// What hardware writes into the entry for an access (D8.5): the access flag, and without the
    /// bits `cleared`, which for the first write is AP\[2\].
    fn update(&self, step: &TableStep, cleared: u64) -> Option<EntryUpdate> {
        let set = match self.config.access_flag {
            FlagUpdate::Hardware => 1 << ACCESS_FLAG,
            FlagUpdate::Software => 0,
        };
        let old = step.entry;
        let new = (old | set) & !cleared;
        (new != old).then_some(EntryUpdate { entry_paddr: step.entry_paddr, old, new })
    }
}

impl Walker for ArmLpaeS1Walker {
    /// Faults of the root are at level 0, whatever the start level (D8.15, fault levels).
    fn root(&self, iova: Iova, access: Access) -> Result<TableLink, Fault> {
        let fault = |kind| Fault { kind, level: 0, iova, access };
        let block = self.input_range();
        if self.config.walks == Walks::Disabled || !block.contains(iova) {
            return Err(fault(FaultKind::Translation));
        }
        if self.too_large(self.config.base) {
            return Err(fault(FaultKind::AddressSize));
        }
        let table = PhysAddr::new(self.config.base);
        Ok(TableLink { table, block, level: self.config.start_level, inherited: 0 })
    }

    fn walk_from<T: TableWords + ?Sized>(
        &self,
        tables: &T,
        from: TableLink,
        iova: Iova,
        access: Access,
        path: &mut WalkPath,
    ) -> Result<Translation, Fault> {
        let mut link = from;
        loop {
            let level = link.level;
            let step = self.step(tables, link, iova, access)?;
            path.push(step);
            let fault = |kind| Err(Fault { kind, level, iova, access });
            match self.decode(step.entry, level) {
                Descriptor::Invalid => return fault(FaultKind::Translation),
                Descriptor::Table(address) | Descriptor::Leaf(address)
                    if self.too_large(address) =>
                {
                    return fault(FaultKind::AddressSize);
                }
                Descriptor::Leaf(address) => {
                    let translation = self.translate(&step, address, iova, access)?;
                    return Ok(Translation { tables: *path, ..translation });
                }
                Descriptor::Table(address) => {
                    let imposed = match self.config.hierarchical {
                        Hierarchical::Honoured => step.entry & HIERARCHICAL,
                        Hierarchical::Disabled => 0,
                    };
                    link = TableLink {
                        table: PhysAddr::new(address),
                        block: block_around(iova, step.entry_lg2),
                        level: level + 1,
                        inherited: link.inherited | imposed,
                    };
                }
            }
        }
    }

    fn permits(&self, prot: Prot, access: Access) -> bool {
        let reachable =
            self.registers.privilege == Privilege::Privileged || !prot.contains(Prot::PRIV);
        let needed = match access {
            Access::Read => Prot::READ,
            Access::Write => Prot::WRITE,
        };
        reachable && prot.contains(needed)
    }
}

/// What an attribute byte says of coherency (MAIR_EL1): device memory has an upper half of 0, and
/// normal memory is cacheable where neither half is 0b0100, non-cacheable.
fn memory_type(attributes: u8) -> Prot {
    match (attributes >> 4, attributes & 0xf) {
        (0, _) => Prot::MMIO,
        (0b0100, _) | (_, 0b0100) => Prot::empty(),
        _ => Prot::CACHE,
    }
}

/// SH\[1:0\] (D8.6, "Shareability").
fn shareability(entry: u64) -> Shareability {
    match field(entry, 9, 8) {
        0b00 => Shareability::NonShareable,
        0b10 => Shareability::Outer,
        0b11 => Shareability::Inner,
        _ => Shareability::Reserved,
    }
}
