//! Long descriptors: the tables of Arm CPUs, and of SMMUs that share their formats.
//!
//! Source: Arm Architecture Reference Manual for A-profile architecture (DDI 0487, issue K.a),
//! chapter D8, "The AArch64 Virtual Memory System Architecture". Each use of bits names its
//! section. VMSAv8-32 has the same descriptors where G5.5, "The VMSAv8-32 Long-descriptor
//! translation table format", does not differ.
//!
//! | tables | walker | registers |
//! |---|---|---|
//! | AArch64, stage 1 | [`ArmLpaeS1Walker`] | [`ArmS1WalkRegisters`] |
//! | AArch64, stage 2 | [`ArmLpaeS2Walker`] | [`ArmS2WalkRegisters`] |
//! | AArch32, stage 1 | [`Arm32LpaeS1Walker`] | [`Arm32S1Registers`] |
//! | AArch32, stage 2 | [`Arm32LpaeS2Walker`] | [`Arm32S2Registers`] |
//!
//! Supported are the granules of 4, 16 and 64 KiB with every start level, concatenated roots of
//! stage 2, both halves of the address space, blocks, the Contiguous bit, hierarchical permissions,
//! 52-bit addresses with the 64K granule, and the access flag and dirty state managed by hardware.
//! Not supported are FEAT_LPA2 (TCR_EL1.DS), FEAT_D128, top byte ignore, PAN, and the difference
//! between the Secure and the Non-secure address space: NS and NSTable are ignored, as they are
//! outside Secure state.

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use super::radix::{Leaf, Next, Radix};
use super::{Access, Fault, FaultKind, Shareability, TableLink, TableStep};

mod aarch32;
mod registers;
mod stage;
mod stage2;
mod strict;
#[cfg(test)]
mod tests;

pub use aarch32::{Arm32S1Registers, Arm32S2Registers};
pub(super) use registers::Walks;
pub use registers::{AddressHalf, ArmS1WalkRegisters, BadLpaeRegisters};
use registers::{LpaeConfig, Registers, State, bit, field};
use stage::Stage;
pub use stage::{AccessPrivilege, ExecuteNever, MemAttr};
pub use stage2::ArmS2WalkRegisters;

// Attributes of a block or page descriptor that all stages have (D8.3.1, "Block descriptor and Page
// descriptor").
/// AP\[2\] at stage 1, where it forbids writes, and S2AP\[1\] at stage 2, where it permits them.
const DIRTY_STATE: u32 = 7;
const ACCESS_FLAG: u32 = 10;
const DIRTY_MODIFIER: u32 = 51;
const CONTIGUOUS: u32 = 52;

/// A walk of long descriptors as the registers `R` say.
#[derive(Clone, Copy, Debug)]
pub struct LpaeWalker<R> {
    registers: R,
    config: LpaeConfig,
}

/// The walk of one half of a stage 1 address space of AArch64 state.
pub type ArmLpaeS1Walker = LpaeWalker<ArmS1WalkRegisters>;
/// The walk of a stage 2 of AArch64 state.
pub type ArmLpaeS2Walker = LpaeWalker<ArmS2WalkRegisters>;
/// The walk of one half of a stage 1 address space of AArch32 state.
pub type Arm32LpaeS1Walker = LpaeWalker<Arm32S1Registers>;
/// The walk of a stage 2 of AArch32 state.
pub type Arm32LpaeS2Walker = LpaeWalker<Arm32S2Registers>;

/// What a descriptor is (D8.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Descriptor {
    Invalid,
    Table(u64),
    Leaf(u64),
}

impl<R: Registers> LpaeWalker<R> {
    /// A walker that hardware with these registers would be.
    ///
    /// # Errors
    ///
    /// [`BadLpaeRegisters`] for reserved values, misaligned bases and features that are not
    /// supported.
    pub fn new(registers: R) -> Result<Self, BadLpaeRegisters> {
        Ok(Self { registers, config: registers.parse()? })
    }
}

impl<R> LpaeWalker<R> {
    /// The registers.
    pub fn registers(&self) -> &R {
        &self.registers
    }

    /// The same walk, of which nobody asks for the registers.
    pub(crate) fn without_registers(self) -> LpaeWalker<()> {
        LpaeWalker { registers: (), config: self.config }
    }

    /// Whether the tables are a stage 2.
    pub(crate) fn is_stage2(&self) -> bool {
        matches!(self.config.stage, Stage::Two { .. })
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
        self.config.input_range
    }

    /// What kind of descriptor an entry is and the address in it (D8.3.1).
    fn descriptor(&self, entry: u64, level: u8) -> Descriptor {
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

    /// A leaf, whose address was found to fit. For an access hardware sets the access flag, and at
    /// the first write inverts the dirty state (D8.5).
    fn leaf(
        &self,
        step: &TableStep,
        output: u64,
        iova: Iova,
        access: Access,
    ) -> Result<Leaf, FaultKind> {
        let (entry, stage) = (step.entry, self.config.stage);
        let (mut prot, clean) = stage.permissions(entry, step.link.inherited, self.config.dirty);
        // Clean is AP[2] = 1 at stage 1 and S2AP[1] = 0 at stage 2: either changes.
        let written = u64::from(clean && self.writes(prot, access)) << DIRTY_STATE;
        let marked = (entry | self.config.access_flag.select(1 << ACCESS_FLAG)) ^ written;
        if !bit(marked, ACCESS_FLAG) {
            return Err(FaultKind::AccessFlag);
        }
        let (attributes, memory_type) = stage.memory(entry);
        prot.insert(memory_type);
        let group_lg2 = match self.group_lg2(step.link.level) {
            // A group larger than the tables' input range cannot be cached whole.
            Some(lg2) if bit(entry, CONTIGUOUS) => lg2.min(self.config.input_lg2),
            _ => step.entry_lg2,
        };
        let paddr = output | (iova.get() & lg2::mask(step.entry_lg2));
        let shareability = shareability(entry);
        Ok(Leaf { paddr, group_lg2, prot, clean, attributes, shareability, marked })
    }
}

impl<R> Radix for LpaeWalker<R> {
    fn entry_lg2(&self, level: u8) -> u32 {
        self.config.entry_lg2(level)
    }

    fn table_lg2(&self, level: u8) -> u32 {
        self.config.table_lg2(level)
    }

    fn decode(&self, step: &TableStep, iova: Iova, access: Access) -> Result<Next, FaultKind> {
        let (entry, level) = (step.entry, step.link.level);
        match self.descriptor(entry, level) {
            Descriptor::Invalid => Err(FaultKind::Translation),
            Descriptor::Table(address) | Descriptor::Leaf(address) if self.too_large(address) => {
                Err(FaultKind::AddressSize)
            }
            Descriptor::Leaf(address) => self.leaf(step, address, iova, access).map(Next::Leaf),
            Descriptor::Table(table) => {
                let inherited = step.link.inherited | self.config.stage.imposed(entry);
                Ok(Next::Table { table, level: level + 1, inherited })
            }
        }
    }

    /// Faults of the root are at level 0, whatever the start level (D8.15, fault levels); in
    /// AArch32 state translation faults are at level 1 (G5.10, "VMSAv8-32 memory aborts").
    fn start(&self, iova: Iova, access: Access) -> Result<TableLink, Fault> {
        let block = self.input_range();
        if self.config.walks == Walks::Disabled || !block.contains(iova) {
            let level = match self.config.state {
                State::AArch64 => 0,
                State::AArch32 => 1,
            };
            return Err(Fault { kind: FaultKind::Translation, level, iova, access });
        }
        if self.too_large(self.config.base) {
            return Err(Fault { kind: FaultKind::AddressSize, level: 0, iova, access });
        }
        let table = PhysAddr::new(self.config.base);
        Ok(TableLink { table, block, level: self.config.start_level, inherited: 0 })
    }

    fn allows(&self, prot: Prot, access: Access) -> bool {
        self.config.stage.reaches(prot) && prot.contains(access.needs())
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
