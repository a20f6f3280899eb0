//! x86-64 page tables of 4 and 5 levels, as IOMMUs walk them: the first stage of Intel VT-d and the
//! guest tables of the AMD IOMMU.
//!
//! Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3A, 4.5 "4-Level
//! Paging and 5-Level Paging", 4.6 "Access Rights", 4.8 "Accessed and Dirty Flags" and 4.9 "Paging
//! and Memory Typing"; VT-d Architecture Specification (D51397), 3.6 "First-Stage Translation" and
//! 9.7 "First-Stage Paging Entries"; AMD I/O Virtualization Technology Specification (48882),
//! 2.2.6.
//!
//! Levels count from the last table: 1 is a PTE, 2 a PDE, 3 a PDPTE, 4 a PML4E and 5 a PML5E. Not
//! supported: protection keys, the extended accessed bit, SMEP and SMAP. Where hardware updates
//! entries it also sets A in the entries above the leaf; a [`Translated`] reports the leaf's
//! update alone.
//!
//! [`Translated`]: super::Translated

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use super::check::Checked;
use super::radix::{BadRegister, Leaf, Next, Radix, Requester, Switch, bits, must_be_zero};
use super::{Access, Fault, FaultKind, Shareability, TableLink, TableStep, block_around};

#[cfg(test)]
mod tests;

// SDM 3A, tables 4-14 to 4-20.
const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const PWT: u64 = 1 << 3;
const PCD: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
/// PS above level 1; PAT at level 1.
const PAGE_SIZE: u64 = 1 << 7;
const PAT_SMALL: u64 = 1 << 7;
const PAT_LARGE: u64 = 1 << 12;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = bits(51, 12);

/// The registers that x86-64 tables are walked with. In VT-d they are fields of a PASID-table
/// entry, in the AMD IOMMU of a DTE and a GCR3 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct X86_64WalkRegisters {
    /// CR3, FSPTPTR or a GCR3 table's entry: the address of the root table in bits 51:12. Bits 11:0
    /// are ignored.
    pub root: u64,
    /// 4 or 5.
    pub levels: u8,
    /// MAXPHYADDR or the host address width, 32 to 52 bits.
    pub physical_lg2: u32,
    /// The memory encryption mask: address bits that select encryption and are no address. 0 for
    /// none.
    pub encryption_mask: u64,
    /// IA32_PAT, or the field of the PASID-table entry: eight memory types of one byte.
    pub pat: u64,
    /// IA32_EFER.NXE: bit 63 is execute-disable. Otherwise it is reserved.
    pub nxe: Switch,
    /// CR0.WP or WPE: a supervisor's writes need R/W too.
    pub wp: Switch,
    /// Pages of 1 GiB are supported.
    pub pages_1g: Switch,
    /// Hardware sets A and D. VT-d's first stage always does.
    pub updates: Switch,
    /// As whom the device accesses memory.
    pub requester: Requester,
}

impl X86_64WalkRegisters {
    /// IA32_PAT after reset (SDM 3A, 12.12.4): WB, WT, UC- and UC, twice.
    pub const PAT_AT_RESET: u64 = 0x0007_0406_0007_0406;
}

impl Default for X86_64WalkRegisters {
    /// Four levels with the root at 0, 52-bit addresses, no encryption, the PAT of reset, every
    /// feature on, and the requests of a user.
    fn default() -> Self {
        Self {
            root: 0,
            levels: 4,
            physical_lg2: 52,
            encryption_mask: 0,
            pat: Self::PAT_AT_RESET,
            nxe: Switch::On,
            wp: Switch::On,
            pages_1g: Switch::On,
            updates: Switch::On,
            requester: Requester::User,
        }
    }
}

/// The walk of x86-64 tables.
#[derive(Clone, Copy, Debug)]
pub struct X86Walker {
    registers: X86_64WalkRegisters,
}

impl X86Walker {
    /// A walker that hardware with these registers would be.
    ///
    /// # Errors
    ///
    /// [`BadRegister`] for another number of levels, an address width out of range, a root above
    /// it, an encryption mask that is no address bit, and reserved memory types.
    pub fn new(registers: X86_64WalkRegisters) -> Result<Self, BadRegister> {
        let X86_64WalkRegisters { root, levels, physical_lg2, encryption_mask, pat, .. } =
            registers;
        let wrong = !(4..=5).contains(&levels);
        BadRegister::refuse(wrong, "the number of levels", levels.into())?;
        BadRegister::refuse(!(32..=52).contains(&physical_lg2), "MAXPHYADDR", physical_lg2.into())?;
        let is_more = encryption_mask & !ADDRESS != 0;
        BadRegister::refuse(is_more, "the encryption mask", encryption_mask)?;
        let walker = Self { registers };
        let above = root & bits(63, 12) & !walker.address_mask();
        BadRegister::refuse(above & !encryption_mask != 0, "the root", root)?;
        let is_reserved = |kind: &u8| matches!(kind, 2 | 3 | 8..);
        BadRegister::refuse(pat.to_le_bytes().iter().any(is_reserved), "PAT", pat)?;
        Ok(walker)
    }

    /// The registers.
    pub fn registers(&self) -> &X86_64WalkRegisters {
        &self.registers
    }

    /// Every address that the tables can translate: the lower and the upper half of the canonical
    /// addresses.
    pub fn halves(&self) -> [IovaRange; 2] {
        [0, u64::MAX].map(|some| self.half_around(Iova::new(some)))
    }

    /// The half of the address space that has `iova`, if that is canonical (SDM 3A, 4.5.2).
    fn half_around(&self, iova: Iova) -> IovaRange {
        block_around(iova, self.table_lg2(self.registers.levels) - 1)
    }

    /// The address bits of an entry.
    fn address_mask(&self) -> u64 {
        let width = lg2::mask(self.registers.physical_lg2);
        ADDRESS & width & !self.registers.encryption_mask
    }

    fn is_leaf(&self, entry: u64, level: u8) -> bool {
        match level {
            1 => true,
            2 => entry & PAGE_SIZE != 0,
            3 => self.registers.pages_1g.select(entry & PAGE_SIZE) != 0,
            _ => false,
        }
    }

    /// Bits that must be 0 (SDM 3A, 4.5.4): addresses above MAXPHYADDR, PS where there are no
    /// pages, the offset in a large page above its PAT bit, and XD where it is not enabled.
    fn reserved(&self, entry: u64, level: u8) -> u64 {
        let above = ADDRESS & !lg2::mask(self.registers.physical_lg2);
        let format = match (self.is_leaf(entry, level), level) {
            (true, 1) => 0,
            (true, _) => bits(self.entry_lg2(level) - 1, 13),
            (false, _) => PAGE_SIZE,
        };
        let execute = NO_EXECUTE & !self.registers.nxe.select(NO_EXECUTE);
        ((above | format) & !self.registers.encryption_mask) | execute
    }

    /// Access rights from what all levels together took away (SDM 3A, 4.6.1).
    fn permissions(&self, inherited: u64) -> Prot {
        let unprotected =
            self.registers.requester == Requester::Supervisor && self.registers.wp == Switch::Off;
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, inherited & WRITE == 0 || unprotected);
        prot.set(Prot::PRIV, inherited & USER != 0);
        prot.set(Prot::NOEXEC, inherited & NO_EXECUTE != 0);
        prot
    }

    /// The byte of the PAT that the leaf selects (SDM 3A, 4.9.2).
    fn memory_kind(&self, entry: u64, level: u8) -> u8 {
        let pat = if level == 1 { PAT_SMALL } else { PAT_LARGE };
        let bit = |mask, weight| if entry & mask != 0 { weight } else { 0 };
        let index: usize = bit(pat, 4) + bit(PCD, 2) + bit(PWT, 1);
        // Three bits select one of eight bytes.
        self.registers.pat.to_le_bytes()[index]
    }
}

impl Radix for X86Walker {
    fn entry_lg2(&self, level: u8) -> u32 {
        12 + 9 * u32::from(level.saturating_sub(1))
    }

    fn table_lg2(&self, level: u8) -> u32 {
        self.entry_lg2(level) + 9
    }

    fn decode(&self, step: &TableStep, iova: Iova, access: Access) -> Result<Next, FaultKind> {
        let (entry, level) = (step.entry, step.link.level);
        if entry & PRESENT == 0 {
            return Err(FaultKind::Translation);
        }
        must_be_zero(entry & self.reserved(entry, level))?;
        let taken = (!entry & (WRITE | USER)) | (entry & NO_EXECUTE);
        let inherited = step.link.inherited | taken;
        let address = entry & self.address_mask();
        if !self.is_leaf(entry, level) {
            return Ok(Next::Table { table: address, level: level - 1, inherited });
        }
        let attributes = self.memory_kind(entry, level);
        let prot = self.permissions(inherited) | memory_type(attributes);
        let dirty = if self.writes(prot, access) { DIRTY } else { 0 };
        let unmarked = self.registers.updates.select(!entry & DIRTY) != 0;
        Ok(Next::Leaf(Leaf {
            // Bit 12 of a large page is its PAT bit.
            paddr: lg2::align_down(address, step.entry_lg2)
                | (iova.get() & lg2::mask(step.entry_lg2)),
            group_lg2: step.entry_lg2,
            prot,
            clean: unmarked && prot.contains(Prot::WRITE),
            attributes,
            shareability: Shareability::Inner,
            marked: entry | self.registers.updates.select(ACCESSED | dirty),
        }))
    }

    /// Faults of the root are at the level of the root table. An address that is not canonical is a
    /// translation fault.
    fn start(&self, iova: Iova, access: Access) -> Result<TableLink, Fault> {
        let level = self.registers.levels;
        let block = self.half_around(iova);
        if !self.halves().contains(&block) {
            return Err(Fault { kind: FaultKind::Translation, level, iova, access });
        }
        let table = PhysAddr::new(self.registers.root & self.address_mask());
        Ok(TableLink { table, block, level, inherited: 0 })
    }

    fn allows(&self, prot: Prot, access: Access) -> bool {
        let reachable =
            self.registers.requester == Requester::Supervisor || !prot.contains(Prot::PRIV);
        reachable && prot.contains(access.needs())
    }
}

impl Checked for X86Walker {
    fn input_ranges(&self) -> Vec<IovaRange> {
        self.halves().to_vec()
    }

    fn hardware_bits(&self) -> u64 {
        self.registers.updates.select(ACCESSED | DIRTY)
    }
}

/// What a memory type says of coherency (SDM 3A, 12.3): WT, WP and WB are cacheable, WC is memory
/// that is not cached, UC and UC- are for devices.
fn memory_type(kind: u8) -> Prot {
    match kind {
        4..=6 => Prot::CACHE,
        1 => Prot::empty(),
        _ => Prot::MMIO,
    }
}
