//! Checks that hardware does not make: reserved bits, contiguous groups, whole tables.

use std::collections::BTreeMap;

use dmaspan::{Iova, IovaRange, PhysAddr, lg2};

use super::registers::{FlagUpdate, State, bit};
use super::{ACCESS_FLAG, CONTIGUOUS, DIRTY_MODIFIER, DIRTY_STATE, Descriptor, LpaeWalker};
use crate::walker::{
    Access, Fault, FaultKind, TableStep, TableWords, Translated, WalkPath, Walker, block_around,
};

/// Says what is wrong with a table that hardware may nevertheless walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadLpaeTable {
    /// The walk faults.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// Bits are set that are RES0.
    #[error("entry {entry:#x} at {entry_paddr} of level {level} has RES0 bits {bits:#x} set")]
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
    /// A field has a reserved value.
    #[error("entry {entry:#x} at {entry_paddr} of level {level} has a reserved {field}")]
    ReservedValue {
        /// Where the entry is.
        entry_paddr: PhysAddr,
        /// The entry.
        entry: u64,
        /// Its level.
        level: u8,
        /// Which field.
        field: &'static str,
    },
    /// Entries of one contiguous group disagree.
    #[error(
        "entry {entry:#x} at {entry_paddr} does not fit its group {group}: expected {expected:#x}"
    )]
    Group {
        /// What the group covers.
        group: IovaRange,
        /// Where the first entry that disagrees is.
        entry_paddr: PhysAddr,
        /// The entry.
        entry: u64,
        /// What the first entry of the group asks for there.
        expected: u64,
    },
    /// The output address of a contiguous group is not aligned to the group's size, or the group is
    /// larger than the table.
    #[error("the group {group} at {entry_paddr} begins with the misaligned entry {entry:#x}")]
    GroupAlignment {
        /// What the group covers.
        group: IovaRange,
        /// Where its first entry is.
        entry_paddr: PhysAddr,
        /// Its first entry.
        entry: u64,
    },
}

impl<R> LpaeWalker<R> {
    /// Walks to the leaf of `iova` and checks every entry on the way for RES0 bits and reserved
    /// values. Accesses are not checked against the permissions.
    ///
    /// # Errors
    ///
    /// [`BadLpaeTable`] for the first entry that is wrong, or with the fault.
    pub fn strict_walk(
        &self,
        tables: &dyn TableWords,
        iova: Iova,
    ) -> Result<Translated, BadLpaeTable> {
        let root = self.root(iova, Access::Read)?;
        let mut path = WalkPath::new();
        let walked = self.walk_from(tables, root, iova, Access::Read, &mut path);
        path.iter().try_for_each(|step| self.check_reserved(step))?;
        let translation = walked?;
        let Some(step) = path.last() else { return Ok(translation) };
        match self.config.stage.reserved_value(step.entry) {
            None => Ok(translation),
            Some(field) => Err(BadLpaeTable::ReservedValue {
                entry_paddr: step.entry_paddr,
                entry: step.entry,
                level: step.link.level,
                field,
            }),
        }
    }

    /// Checks that all entries of the contiguous group around `iova` say the same: either none has
    /// the Contiguous bit, or all have it and map one aligned run with the same attributes (D8.7,
    /// "The Contiguous bit"). Returns the group where there is one.
    ///
    /// The access flag may differ where hardware sets it, and AP\[2\] or S2AP\[1\] where it keeps
    /// dirty state.
    ///
    /// # Errors
    ///
    /// [`BadLpaeTable`] for the first entry that does not fit, or with the fault that a walk gets.
    pub fn check_contiguous_group(
        &self,
        tables: &dyn TableWords,
        iova: Iova,
    ) -> Result<Option<IovaRange>, BadLpaeTable> {
        let translation = self.strict_walk(tables, iova)?;
        let level = translation.level;
        let step = &translation.step;
        let Some(group_lg2) = self.group_lg2(level) else { return Ok(None) };
        let group = block_around(iova, group_lg2);
        if group_lg2 > self.config.table_lg2(level) {
            // The table ends before the group would.
            return if bit(step.entry, CONTIGUOUS) {
                let (entry_paddr, entry) = (step.entry_paddr, step.entry);
                Err(BadLpaeTable::GroupAlignment { group, entry_paddr, entry })
            } else {
                Ok(None)
            };
        }
        let steps = self.group_steps(tables, step, group)?;
        let contiguous = |step: &TableStep| {
            matches!(self.decode(step.entry, level), Descriptor::Leaf(_))
                && bit(step.entry, CONTIGUOUS)
        };
        if !steps.iter().any(contiguous) {
            return Ok(None);
        }
        self.compare_group(&steps, group, group_lg2)?;
        Ok(Some(group))
    }

    /// Walks everything mapped in `range`, checks every entry on the way and every contiguous
    /// group, and calls `visit` with each leaf in order.
    ///
    /// # Errors
    ///
    /// [`BadLpaeTable`]. Addresses at which nothing is mapped are passed over.
    pub fn survey(
        &self,
        tables: &dyn TableWords,
        range: IovaRange,
        mut visit: impl FnMut(&Translated),
    ) -> Result<(), BadLpaeTable> {
        let Some(range) = range.intersection(self.input_range()) else { return Ok(()) };
        let mut checked: Option<IovaRange> = None;
        let mut next = Some(range.start());
        while let Some(iova) = next.filter(|iova| range.contains(*iova)) {
            let passed = match self.strict_walk(tables, iova) {
                Ok(leaf) => {
                    if leaf.group != leaf.leaf && checked != Some(leaf.group) {
                        self.check_contiguous_group(tables, iova)?;
                        checked = Some(leaf.group);
                    }
                    visit(&leaf);
                    leaf.leaf
                }
                Err(BadLpaeTable::Fault(fault)) if fault.kind == FaultKind::Translation => {
                    self.absent_block(tables, iova, fault)?
                }
                Err(error) => return Err(error),
            };
            next = passed.last().checked_add(1);
        }
        Ok(())
    }

    /// Returns how many translations of each size the tables hold in `range`, by log2 of the size.
    /// A contiguous group counts as one of its size.
    ///
    /// # Errors
    ///
    /// [`BadLpaeTable`], as [`survey`](Self::survey).
    pub fn census(
        &self,
        tables: &dyn TableWords,
        range: IovaRange,
    ) -> Result<BTreeMap<u32, u64>, BadLpaeTable> {
        let mut census = BTreeMap::new();
        self.survey(tables, range, |leaf| {
            if leaf.group.start() == leaf.leaf.start() {
                *census.entry(leaf.group_lg2).or_default() += 1;
            }
        })?;
        Ok(census)
    }

    /// What the invalid entry that ends the walk for `iova` covers.
    fn absent_block(
        &self,
        tables: &dyn TableWords,
        iova: Iova,
        fault: Fault,
    ) -> Result<IovaRange, BadLpaeTable> {
        let root = self.root(iova, Access::Read)?;
        let mut path = WalkPath::new();
        let again = self.walk_from(tables, root, iova, Access::Read, &mut path);
        match path.last() {
            Some(step) => Ok(block_around(iova, step.entry_lg2)),
            None => Err(again.err().unwrap_or(fault).into()),
        }
    }

    /// RES0 bits of a valid descriptor without FEAT_LPA2, FEAT_BBM, FEAT_BTI and FEAT_XS (D8.3.1).
    /// A table descriptor ignores bits 11:2 and 58:51; a leaf's bits 58:55 are software's, and
    /// 63:59 are ignored. In AArch32 state there is no DBM, and a table's bit 51 is reserved too
    /// (G5.5).
    fn check_reserved(&self, step: &TableStep) -> Result<(), BadLpaeTable> {
        let level = step.link.level;
        // Bits 15:12 belong to the address with the 64K granule.
        let address_low = if self.config.granule_lg2 == 16 { 16 } else { 12 };
        let above = match self.config.state {
            State::AArch64 => 0b111 << 48,
            State::AArch32 => 0b1111 << 48,
        };
        let stage = self.config.stage;
        let reserved = match self.decode(step.entry, level) {
            Descriptor::Invalid => 0,
            Descriptor::Table(_) => {
                let low = mask_between(self.config.granule_lg2, address_low);
                above | low | stage.reserved_in_table()
            }
            Descriptor::Leaf(_) => {
                let low = mask_between(step.entry_lg2, address_low);
                above | low | stage.reserved_in_leaf()
            }
        };
        match step.entry & reserved {
            0 => Ok(()),
            bits => Err(BadLpaeTable::Reserved {
                entry_paddr: step.entry_paddr,
                entry: step.entry,
                level,
                bits,
            }),
        }
    }

    /// All entries of a group, in order.
    fn group_steps(
        &self,
        tables: &dyn TableWords,
        step: &TableStep,
        group: IovaRange,
    ) -> Result<Vec<TableStep>, BadLpaeTable> {
        let count = (group.len_less_one() >> step.entry_lg2) + 1;
        (0..count)
            .map(|index| {
                let iova = group.start().wrapping_add(index << step.entry_lg2);
                Ok(self.step(tables, step.link, iova, Access::Read)?)
            })
            .collect()
    }

    fn compare_group(
        &self,
        steps: &[TableStep],
        group: IovaRange,
        group_lg2: u32,
    ) -> Result<(), BadLpaeTable> {
        let Some(first) = steps.first() else { return Ok(()) };
        let level = first.link.level;
        let Descriptor::Leaf(output) = self.decode(first.entry, level) else {
            // Another entry has the bit, this one is not even a leaf.
            let (entry_paddr, entry) = (first.entry_paddr, first.entry);
            let expected = entry | 0b1 | 1 << CONTIGUOUS;
            return Err(BadLpaeTable::Group { group, entry_paddr, entry, expected });
        };
        if !lg2::is_aligned(output, group_lg2) {
            let (entry_paddr, entry) = (first.entry_paddr, first.entry);
            return Err(BadLpaeTable::GroupAlignment { group, entry_paddr, entry });
        }
        let model = first.entry | 1 << CONTIGUOUS;
        for (index, step) in (0u64..).zip(steps) {
            // The output is aligned to the group, so the index does not carry out of it.
            let expected = model | index << step.entry_lg2;
            if self.comparable(step.entry) != self.comparable(expected) {
                let (entry_paddr, entry) = (step.entry_paddr, step.entry);
                return Err(BadLpaeTable::Group { group, entry_paddr, entry, expected });
            }
        }
        Ok(())
    }

    /// An entry without the bits that hardware changes in single entries.
    fn comparable(&self, entry: u64) -> u64 {
        let mut ignored = 0;
        if self.config.access_flag == FlagUpdate::Hardware {
            ignored |= 1 << ACCESS_FLAG;
        }
        if self.config.dirty == FlagUpdate::Hardware && bit(entry, DIRTY_MODIFIER) {
            ignored |= 1 << DIRTY_STATE;
        }
        entry & !ignored
    }
}

/// Bits `high - 1` down to `low`; none where `high` is not above.
const fn mask_between(high: u32, low: u32) -> u64 {
    if high > low { lg2::mask(high) & !lg2::mask(low) } else { 0 }
}
const _: () = assert!(mask_between(14, 12) == 0x3000 && mask_between(12, 12) == 0);
