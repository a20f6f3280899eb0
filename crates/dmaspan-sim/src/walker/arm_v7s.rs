//! Short descriptors: the tables of 32-bit Arm CPUs, of SMMUs that share their format, and of
//! MediaTek's IOMMUs, which extend it.
//!
//! Source: Arm Architecture Reference Manual for ARMv7-A and ARMv7-R (DDI 0406C), B3.5,
//! "Short-descriptor translation table format"; B3.7, "Memory access control"; B3.8, "Memory region
//! attributes". Each use of bits names its section. MediaTek's extension is as its driver in Linux,
//! mtk_iommu.c, and io-pgtable-arm-v7s.c describe the hardware.
//!
//! Supported are small and large pages, sections and supersections, both halves of the address
//! space, permissions with and without the access flag, PXN, and memory types by TEX remap. Not
//! supported are memory types without it and an access flag that hardware sets. Every domain is a
//! client, as in SMMUs, which have no DACR; NS is ignored, as it is outside Secure state.
//!
//! The levels are 1 and 2. Entries have 32 bits; what holds entries of 64 bits has them in its
//! lower half.

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use super::arm_lpae::{AccessPrivilege, Walks};
use super::radix::{Leaf, Next, Radix};
use super::{Access, Fault, FaultKind, Shareability, TableLink, TableStep};

mod registers;
mod strict;
#[cfg(test)]
mod tests;

use registers::{AccessFlag, Config, SECTION_LG2};
pub use registers::{ArmV7sWalkRegisters, BadV7sRegisters, SCTLR_AFE, SCTLR_TRE, Variant};

const SMALL_PAGE_LG2: u32 = 12;
const LARGE_PAGE_LG2: u32 = 16;
const SUPERSECTION_LG2: u32 = 24;

/// PXN of a page table descriptor (B3.5.1).
const PXN_TABLE: u64 = 1 << 2;

/// The walk of one half of an address space of short descriptors.
#[derive(Clone, Copy, Debug)]
pub struct ArmV7sWalker {
    registers: ArmV7sWalkRegisters,
    config: Config,
}

/// What an entry is (B3.5.1, "Short-descriptor translation table format descriptors").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Descriptor {
    Invalid,
    PageTable,
    Leaf(LeafKind),
}

/// The four kinds of leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeafKind {
    Section,
    Supersection,
    LargePage,
    SmallPage,
}

/// The attributes of a leaf, wherever they are in the descriptor.
struct Fields {
    /// AP\[2:0\].
    ap: u32,
    /// TEX\[0\], C and B: the index of the memory type.
    region: u32,
    shareable: u32,
    execute_never: u32,
    privileged_execute_never: u32,
}

impl LeafKind {
    const fn lg2(self) -> u32 {
        match self {
            Self::Section => SECTION_LG2,
            Self::Supersection => SUPERSECTION_LG2,
            Self::LargePage => LARGE_PAGE_LG2,
            Self::SmallPage => SMALL_PAGE_LG2,
        }
    }

    /// Where the attributes are (B3.5.1).
    fn fields(self, entry: u32, inherited: u64) -> Fields {
        let bit = |number| bits(entry, number, number);
        // S, AP[2], AP[0] of AP[1:0], TEX[0] and XN.
        let [s, ap2, ap, tex, xn] = match self {
            Self::Section | Self::Supersection => [16, 15, 10, 12, 4],
            Self::LargePage => [10, 9, 4, 12, 15],
            Self::SmallPage => [10, 9, 4, 6, 0],
        };
        let of_table = u32::from(inherited & PXN_TABLE != 0);
        let privileged_execute_never = match self {
            Self::Section | Self::Supersection => bit(0),
            Self::LargePage | Self::SmallPage => of_table,
        };
        Fields {
            ap: bit(ap2) << 2 | bits(entry, ap + 1, ap),
            region: bit(tex) << 2 | bits(entry, 3, 2),
            shareable: bit(s),
            execute_never: bit(xn),
            privileged_execute_never,
        }
    }
}

impl ArmV7sWalker {
    /// A walker that hardware with these registers would be.
    ///
    /// # Errors
    ///
    /// [`BadV7sRegisters`] for reserved values, misaligned bases and features that are not
    /// supported.
    pub fn new(registers: ArmV7sWalkRegisters) -> Result<Self, BadV7sRegisters> {
        Ok(Self { registers, config: Config::parse(&registers)? })
    }

    /// The registers.
    pub fn registers(&self) -> &ArmV7sWalkRegisters {
        &self.registers
    }

    /// Every address that the tables can translate.
    pub fn input_range(&self) -> IovaRange {
        self.config.input_range
    }

    /// The kind of an entry. PXN takes the bit that makes 0b11 of a section's 0b10.
    fn descriptor(entry: u32, level: u8) -> Descriptor {
        match (level, bits(entry, 1, 0)) {
            (1, 0b01) => Descriptor::PageTable,
            (1, 0b10 | 0b11) if bits(entry, 18, 18) == 0 => Descriptor::Leaf(LeafKind::Section),
            (1, 0b10 | 0b11) => Descriptor::Leaf(LeafKind::Supersection),
            (2, 0b01) => Descriptor::Leaf(LeafKind::LargePage),
            (2, 0b10 | 0b11) => Descriptor::Leaf(LeafKind::SmallPage),
            _ => Descriptor::Invalid,
        }
    }

    /// Bits of an address above 31, for what is no supersection of Arm's.
    fn high_address(&self, entry: u32) -> u64 {
        match self.registers.variant {
            Variant::Arm => 0,
            Variant::MediaTek { .. } => {
                let [bit32, bit33, bit34] = [9, 4, 5].map(|number| bits(entry, number, number));
                u64::from(bit34 << 2 | bit33 << 1 | bit32) << 32
            }
        }
    }

    /// Where a second level table is: bits 31:10 (B3.5.1).
    fn table_address(&self, entry: u32) -> u64 {
        u64::from(bits(entry, 31, 10)) << 10 | self.high_address(entry)
    }

    /// Where a leaf is. A supersection of Arm's has bits 35:32 of its address in 23:20 and bits
    /// 39:36 in 8:5 (B3.5.1).
    fn leaf_address(&self, entry: u32, leaf: LeafKind) -> u64 {
        let low = u64::from(bits(entry, 31, leaf.lg2())) << leaf.lg2();
        match (leaf, self.registers.variant) {
            (LeafKind::Supersection, Variant::Arm) => {
                let extended = bits(entry, 8, 5) << 4 | bits(entry, 23, 20);
                low | u64::from(extended) << 32
            }
            _ => low | self.high_address(entry),
        }
    }

    /// AP\[2:0\] or AP\[2:1\] (B3.7.1, "Access permissions"); 0b100 is reserved and permits
    /// nothing. MediaTek's entries have an address bit in their place.
    fn permissions(&self, fields: &Fields) -> Prot {
        if let Variant::MediaTek { .. } = self.registers.variant {
            return Prot::READ_WRITE;
        }
        let unprivileged = self.registers.privilege == AccessPrivilege::Unprivileged;
        let ap = match self.config.access_flag {
            AccessFlag::None => fields.ap,
            // AP[2:1] mean what AP[2:0] with AP[0] = 1 mean.
            AccessFlag::InEntries => fields.ap | 1,
        };
        let mut prot = match ap {
            0b001 => Prot::READ_WRITE | Prot::PRIV,
            0b010 if unprivileged => Prot::READ,
            0b010 | 0b011 => Prot::READ_WRITE,
            0b101 => Prot::READ | Prot::PRIV,
            0b110 | 0b111 => Prot::READ,
            _ => Prot::empty(),
        };
        let privileged_never = !unprivileged && fields.privileged_execute_never == 1;
        prot.set(Prot::NOEXEC, fields.execute_never == 1 || privileged_never);
        prot
    }

    /// The type of a memory region and its shareability by PRRR and NMRR (B3.8.3, "Short-descriptor
    /// format memory region attributes, with TEX remap"), and what they say of coherency.
    ///
    /// The type is TR in bits 5:4, OR in bits 3:2 and IR in bits 1:0, as PRRR and NMRR have them.
    fn memory(&self, fields: &Fields) -> (u8, Prot, Shareability) {
        let (prrr, nmrr, region) = (self.registers.prrr, self.registers.nmrr, fields.region);
        let pair = |word, low| bits(word, low + 1, low);
        let (tr, inner, outer) =
            (pair(prrr, 2 * region), pair(nmrr, 2 * region), pair(nmrr, 2 * region + 16));
        let [attributes, ..] = (tr << 4 | outer << 2 | inner).to_le_bytes();
        // DS0 and DS1 are bits 16 and 17, NS0 and NS1 18 and 19; NOS has a bit for each region.
        let (memory_type, shareable) = match tr {
            0b00 => (Prot::MMIO, true),
            0b01 => (Prot::MMIO, bits(prrr, 16 + fields.shareable, 16 + fields.shareable) == 1),
            _ => {
                let cached = inner != 0 && outer != 0;
                let shareable = bits(prrr, 18 + fields.shareable, 18 + fields.shareable) == 1;
                (if cached { Prot::CACHE } else { Prot::empty() }, shareable)
            }
        };
        let shareability = match (shareable, bits(prrr, 24 + region, 24 + region)) {
            (false, _) => Shareability::NonShareable,
            // Strongly-ordered memory is not limited to the inner domain.
            (true, 1) if tr != 0 => Shareability::Inner,
            (true, _) => Shareability::Outer,
        };
        (attributes, memory_type, shareability)
    }

    /// A leaf of this kind.
    fn leaf(&self, step: &TableStep, kind: LeafKind, iova: Iova) -> Result<Leaf, FaultKind> {
        let entry = word(step.entry);
        let fields = kind.fields(entry, step.link.inherited);
        let mut prot = self.permissions(&fields);
        let has_flag = self.config.access_flag == AccessFlag::InEntries
            && self.registers.variant == Variant::Arm;
        if has_flag && fields.ap & 1 == 0 {
            return Err(FaultKind::AccessFlag);
        }
        let (attributes, memory_type, shareability) = self.memory(&fields);
        prot.insert(memory_type);
        Ok(Leaf {
            paddr: self.leaf_address(entry, kind) | (iova.get() & lg2::mask(kind.lg2())),
            group_lg2: kind.lg2(),
            prot,
            clean: false,
            attributes,
            shareability,
            marked: step.entry,
        })
    }
}

/// B3.5.5, "Translation table walks".
impl Radix for ArmV7sWalker {
    fn entry_lg2(&self, level: u8) -> u32 {
        if level == 1 { SECTION_LG2 } else { SMALL_PAGE_LG2 }
    }

    fn table_lg2(&self, level: u8) -> u32 {
        if level == 1 { self.config.input_lg2 } else { SECTION_LG2 }
    }

    fn decode(&self, step: &TableStep, iova: Iova, _: Access) -> Result<Next, FaultKind> {
        let entry = word(step.entry);
        match Self::descriptor(entry, step.link.level) {
            Descriptor::Invalid => Err(FaultKind::Translation),
            Descriptor::PageTable => {
                let (table, inherited) = (self.table_address(entry), step.entry & PXN_TABLE);
                Ok(Next::Table { table, level: 2, inherited })
            }
            Descriptor::Leaf(kind) => self.leaf(step, kind, iova).map(Next::Leaf),
        }
    }

    /// Addresses out of reach fault at level 1 (B3.12.2, "MMU fault-checking sequence").
    fn start(&self, iova: Iova, access: Access) -> Result<TableLink, Fault> {
        let block = self.config.input_range;
        if self.config.walks == Walks::Disabled || !block.contains(iova) {
            return Err(Fault { kind: FaultKind::Translation, level: 1, iova, access });
        }
        let table = PhysAddr::new(self.config.base);
        Ok(TableLink { table, block, level: 1, inherited: 0 })
    }

    fn allows(&self, prot: Prot, access: Access) -> bool {
        let reachable =
            self.registers.privilege == AccessPrivilege::Privileged || !prot.contains(Prot::PRIV);
        reachable && prot.contains(access.needs())
    }
}

/// Bits `high..=low` of a word.
const fn bits(word: u32, high: u32, low: u32) -> u32 {
    (word >> low) & (u32::MAX >> (31 - (high - low)))
}
const _: () = assert!(bits(0x1234, 11, 4) == 0x23 && bits(u32::MAX, 31, 0) == u32::MAX);

/// An entry, of which all bits are in the lower half.
fn word(entry: u64) -> u32 {
    let [a, b, c, d, ..] = entry.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
