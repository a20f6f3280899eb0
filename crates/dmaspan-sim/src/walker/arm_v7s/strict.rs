//! Checks that hardware does not make: bits that should be zero, repeated entries, whole tables.

use std::collections::BTreeMap;

use dmaspan::{Iova, IovaRange, PhysAddr};

use super::registers::AccessFlag;
use super::{ArmV7sWalker, Descriptor, Leaf, Variant, word};
use crate::walker::{
    Access, Fault, FaultKind, TableStep, TableWords, Translation, WalkPath, Walker, block_around,
};

/// How many entries repeat a large page or a supersection.
const REPEATED: u64 = 16;

/// What is wrong with a table that hardware may nevertheless walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadTable {
    /// The walk faults.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// Bits are set that should be zero.
    #[error("entry {entry:#x} at {entry_paddr} of level {level} has bits {bits:#x} set")]
    Reserved {
        /// Where the entry is.
        entry_paddr: PhysAddr,
        /// The entry.
        entry: u64,
        /// Its level.
        level: u8,
        /// The bits that should be 0.
        bits: u64,
    },
    /// AP\[2:0\] is 0b100, which is reserved where it is no access flag.
    #[error("entry {entry:#x} at {entry_paddr} of level {level} has a reserved AP")]
    ReservedPermissions {
        /// Where the entry is.
        entry_paddr: PhysAddr,
        /// The entry.
        entry: u64,
        /// Its level.
        level: u8,
    },
    /// One of the 16 entries of a large page or a supersection is not as the others.
    #[error("entry {entry:#x} at {entry_paddr} does not repeat {expected:#x} of {leaf}")]
    Repeated {
        /// What the large page or supersection covers.
        leaf: IovaRange,
        /// Where the first entry that differs from the one walked is.
        entry_paddr: PhysAddr,
        /// The entry.
        entry: u64,
        /// The entry that was walked.
        expected: u64,
    },
}

impl ArmV7sWalker {
    /// Walks to the leaf of `iova` and checks every entry on the way for bits that should be zero
    /// and reserved values, and the 16 entries of a large page or a supersection for being the same
    /// (B3.5.1). Accesses are not checked against the permissions.
    ///
    /// # Errors
    ///
    /// [`BadTable`] for the first entry that is wrong, or with the fault.
    pub fn strict_walk<T: TableWords + ?Sized>(
        &self,
        tables: &T,
        iova: Iova,
    ) -> Result<Translation, BadTable> {
        self.strict_path(tables, iova, &mut WalkPath::new())
    }

    /// Walks everything mapped in `range`, checks it as [`strict_walk`](Self::strict_walk) does,
    /// and calls `visit` with each leaf in order.
    ///
    /// # Errors
    ///
    /// [`BadTable`]. Addresses at which nothing is mapped are passed over.
    pub fn survey<T: TableWords + ?Sized>(
        &self,
        tables: &T,
        range: IovaRange,
        mut visit: impl FnMut(&Translation),
    ) -> Result<(), BadTable> {
        let Some(range) = range.intersection(self.input_range()) else { return Ok(()) };
        let mut next = Some(range.start());
        while let Some(iova) = next.filter(|iova| range.contains(*iova)) {
            let mut path = WalkPath::new();
            let passed = match (self.strict_path(tables, iova, &mut path), path.last()) {
                (Ok(leaf), _) => {
                    visit(&leaf);
                    leaf.leaf
                }
                (Err(BadTable::Fault(fault)), Some(step))
                    if fault.kind == FaultKind::Translation =>
                {
                    block_around(iova, step.entry_lg2)
                }
                (Err(error), _) => return Err(error),
            };
            next = passed.last().checked_add(1);
        }
        Ok(())
    }

    /// How many translations of each size the tables hold in `range`, by log2 of the size.
    ///
    /// # Errors
    ///
    /// [`BadTable`], as [`survey`](Self::survey).
    pub fn census<T: TableWords + ?Sized>(
        &self,
        tables: &T,
        range: IovaRange,
    ) -> Result<BTreeMap<u32, u64>, BadTable> {
        let mut census = BTreeMap::new();
        self.survey(tables, range, |leaf| *census.entry(leaf.leaf_lg2).or_default() += 1)?;
        Ok(census)
    }

    fn strict_path<T: TableWords + ?Sized>(
        &self,
        tables: &T,
        iova: Iova,
        path: &mut WalkPath,
    ) -> Result<Translation, BadTable> {
        let root = self.root(iova, Access::Read)?;
        let walked = self.walk_from(tables, root, iova, Access::Read, path);
        path.iter().try_for_each(|step| self.check_entry(step))?;
        let translation = walked?;
        if let Some(step) = path.last() {
            self.check_repeated(tables, step, &translation)?;
        }
        Ok(translation)
    }

    /// Bits that should be zero (B3.5.1): bit 4 of a page table, bits 8:6 of a large page. Bit 9 of
    /// the first level is implementation defined. MediaTek's address bits take some of their
    /// places, and those of a supersection's extended address should be zero there.
    fn check_entry(&self, step: &TableStep) -> Result<(), BadTable> {
        let (entry, level) = (word(step.entry), step.link.level);
        let should_be_zero = match (Self::decode(entry, level), self.registers.variant) {
            (Descriptor::PageTable, Variant::Arm) => 1 << 4,
            (Descriptor::Leaf(Leaf::LargePage), _) => 0b111 << 6,
            (Descriptor::Leaf(Leaf::Supersection), Variant::MediaTek { .. }) => 0b1111 << 20,
            _ => 0,
        };
        let &TableStep { entry_paddr, entry, .. } = step;
        match entry & should_be_zero {
            0 => {}
            bits => return Err(BadTable::Reserved { entry_paddr, entry, level, bits }),
        }
        let Descriptor::Leaf(leaf) = Self::decode(word(entry), level) else { return Ok(()) };
        let permissions = self.config.access_flag == AccessFlag::None
            && self.registers.variant == Variant::Arm
            && leaf.fields(word(entry), 0).ap == 0b100;
        if permissions {
            return Err(BadTable::ReservedPermissions { entry_paddr, entry, level });
        }
        Ok(())
    }

    /// Compares the entries that repeat a leaf, which are all in one table.
    fn check_repeated<T: TableWords + ?Sized>(
        &self,
        tables: &T,
        step: &TableStep,
        translation: &Translation,
    ) -> Result<(), BadTable> {
        if translation.leaf_lg2 == step.entry_lg2 {
            return Ok(());
        }
        let leaf = translation.leaf;
        for index in 0..REPEATED {
            let iova = leaf.start().wrapping_add(index << step.entry_lg2);
            let other = self.step(tables, step.link, iova, Access::Read)?;
            if other.entry != step.entry {
                let &TableStep { entry: expected, .. } = step;
                let TableStep { entry_paddr, entry, .. } = other;
                return Err(BadTable::Repeated { leaf, entry_paddr, entry, expected });
            }
        }
        Ok(())
    }
}
