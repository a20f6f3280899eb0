//! The check of whole tables needs to know this of short descriptors.

use dmaspan::{IovaRange, PhysAddr};

use super::registers::AccessFlag;
use super::{ArmV7sWalker, Descriptor, LeafKind, Variant, word};
use crate::walker::{Checked, NotATable, TableStep, TableWords};

impl Checked for ArmV7sWalker {
    const ENTRY_LG2_BYTES: u32 = 2;

    fn input_ranges(&self) -> Vec<IovaRange> {
        vec![self.input_range()]
    }

    fn hardware_bits(&self) -> u64 {
        0
    }

    /// Bits that should be zero (B3.5.1): bit 4 of a page table, bits 8:6 of a large page. Bit 9 of
    /// the first level is implementation defined. MediaTek's address bits take some of their
    /// places, and those of a supersection's extended address should be zero there. AP\[2:0\] is
    /// never 0b100 where it has no access flag (B3.7.1).
    fn must_be_clear(&self, step: &TableStep) -> u64 {
        let entry = word(step.entry);
        let arm = self.registers.variant == Variant::Arm;
        let Descriptor::Leaf(leaf) = Self::descriptor(entry, step.link.level) else {
            return if arm { 1 << 4 } else { 0 };
        };
        let reserved_ap =
            arm && self.config.access_flag == AccessFlag::None && leaf.fields(entry, 0).ap == 0b100;
        let (ap2, others) = match leaf {
            LeafKind::Section => (15, 0),
            LeafKind::Supersection => (15, if arm { 0 } else { 0b1111 << 20 }),
            LeafKind::LargePage => (9, 0b111 << 6),
            LeafKind::SmallPage => (9, 0),
        };
        others | u64::from(reserved_ap) << ap2
    }

    fn read_entry(&self, tables: &dyn TableWords, paddr: PhysAddr) -> Result<u64, NotATable> {
        tables.read_u32(paddr).map(u64::from)
    }
}
