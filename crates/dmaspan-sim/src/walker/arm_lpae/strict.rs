//! Checks that hardware does not make: reserved bits, contiguous groups, whole tables.

use dmaspan::{Iova, IovaRange, lg2};

use super::registers::{State, bit};
use super::{ACCESS_FLAG, CONTIGUOUS, DIRTY_MODIFIER, DIRTY_STATE, Descriptor, LpaeWalker};
use crate::walker::check::strict_path;
use crate::walker::radix::read_step;
use crate::walker::{
    Access, BadTable, Checked, Fault, TableStep, TableWords, Translated, WalkPath, block_around,
};

impl<R> Checked for LpaeWalker<R> {
    fn input_ranges(&self) -> Vec<IovaRange> {
        vec![self.input_range()]
    }

    fn hardware_bits(&self) -> u64 {
        self.config.access_flag.select(1 << ACCESS_FLAG)
    }

    /// RES0 bits of a valid descriptor without FEAT_LPA2, FEAT_BBM, FEAT_BTI and FEAT_XS (D8.3.1).
    /// A table descriptor ignores bits 11:2 and 58:51; a leaf's bits 58:55 are software's, and
    /// 63:59 are ignored. In AArch32 state there is no DBM, and a table's bit 51 is reserved too
    /// (G5.5).
    fn must_be_clear(&self, step: &TableStep) -> u64 {
        // Bits 15:12 belong to the address with the 64K granule.
        let address_low = if self.config.granule_lg2 == 16 { 16 } else { 12 };
        let above = match self.config.state {
            State::AArch64 => 0b111 << 48,
            State::AArch32 => 0b1111 << 48,
        };
        let stage = self.config.stage;
        match self.descriptor(step.entry, step.link.level) {
            Descriptor::Invalid => 0,
            Descriptor::Table(_) => {
                let low = mask_between(self.config.granule_lg2, address_low);
                above | low | stage.reserved_in_table()
            }
            Descriptor::Leaf(_) => {
                let low = mask_between(step.entry_lg2, address_low);
                above | low | stage.reserved_in_leaf()
            }
        }
    }

    fn reserved_field(&self, leaf: &TableStep) -> Option<&'static str> {
        self.config.stage.reserved_value(leaf.entry)
    }

    /// [`check_contiguous_group`](Self::check_contiguous_group) of a leaf that says to be of one.
    fn check_group(&self, tables: &dyn TableWords, leaf: &Translated) -> Result<(), BadTable> {
        if leaf.group == leaf.leaf {
            return Ok(());
        }
        self.check_contiguous_group(tables, leaf.iova).map(drop)
    }
}

impl<R> LpaeWalker<R> {
    /// Checks that all entries of the contiguous group around `iova` say the same: either none has
    /// the Contiguous bit, or all have it and map one aligned run with the same attributes (D8.7,
    /// "The Contiguous bit"). Returns the group where there is one.
    ///
    /// The access flag may differ where hardware sets it, and AP\[2\] or S2AP\[1\] where it keeps
    /// dirty state.
    ///
    /// # Errors
    ///
    /// [`BadTable`] for the first entry that does not fit, or with the fault that a walk gets.
    pub fn check_contiguous_group(
        &self,
        tables: &dyn TableWords,
        iova: Iova,
    ) -> Result<Option<IovaRange>, BadTable> {
        let mut path = WalkPath::new();
        let translation = strict_path(self, tables, iova, &mut path)?;
        let level = translation.level;
        let step = &translation.step;
        let Some(group_lg2) = self.group_lg2(level) else { return Ok(None) };
        let group = block_around(iova, group_lg2);
        if group_lg2 > self.config.table_lg2(level) {
            // The table ends before the group would.
            return if bit(step.entry, CONTIGUOUS) {
                let (entry_paddr, entry) = (step.entry_paddr, step.entry);
                Err(BadTable::GroupAlignment { group, entry_paddr, entry })
            } else {
                Ok(None)
            };
        }
        let steps = self.group_steps(tables, step, group)?;
        let contiguous = |step: &TableStep| {
            matches!(self.descriptor(step.entry, level), Descriptor::Leaf(_))
                && bit(step.entry, CONTIGUOUS)
        };
        if !steps.iter().any(contiguous) {
            return Ok(None);
        }
        self.compare_group(&steps, group, group_lg2)?;
        Ok(Some(group))
    }

    /// All entries of a group, in order.
    fn group_steps(
        &self,
        tables: &dyn TableWords,
        step: &TableStep,
        group: IovaRange,
    ) -> Result<Vec<TableStep>, BadTable> {
        let count = (group.len_less_one() >> step.entry_lg2) + 1;
        let read = |index| {
            let (iova, link) = (group.start().wrapping_add(index << step.entry_lg2), step.link);
            let fault = |kind| Fault { kind, level: link.level, iova, access: Access::Read };
            Ok(read_step(self, tables, link, iova).map_err(fault)?)
        };
        (0..count).map(read).collect()
    }

    fn compare_group(
        &self,
        steps: &[TableStep],
        group: IovaRange,
        group_lg2: u32,
    ) -> Result<(), BadTable> {
        let Some(first) = steps.first() else { return Ok(()) };
        let level = first.link.level;
        let Descriptor::Leaf(output) = self.descriptor(first.entry, level) else {
            // Another entry has the bit, this one is not even a leaf.
            let (entry_paddr, entry) = (first.entry_paddr, first.entry);
            let expected = entry | 0b1 | 1 << CONTIGUOUS;
            return Err(BadTable::Group { group, entry_paddr, entry, expected });
        };
        if !lg2::is_aligned(output, group_lg2) {
            let (entry_paddr, entry) = (first.entry_paddr, first.entry);
            return Err(BadTable::GroupAlignment { group, entry_paddr, entry });
        }
        let model = first.entry | 1 << CONTIGUOUS;
        for (index, step) in (0u64..).zip(steps) {
            // The output is aligned to the group, so the index does not carry out of it.
            let expected = model | index << step.entry_lg2;
            if self.comparable(step.entry) != self.comparable(expected) {
                let (entry_paddr, entry) = (step.entry_paddr, step.entry);
                return Err(BadTable::Group { group, entry_paddr, entry, expected });
            }
        }
        Ok(())
    }

    /// An entry without the bits that hardware changes in single entries.
    fn comparable(&self, entry: u64) -> u64 {
        let has_modifier = bit(entry, DIRTY_MODIFIER);
        let dirty = self.config.dirty.select(u64::from(has_modifier) << DIRTY_STATE);
        entry & !(self.hardware_bits() | dirty)
    }
}

/// Bits `high - 1` down to `low`; none where `high` is not above.
const fn mask_between(high: u32, low: u32) -> u64 {
    if high > low { lg2::mask(high) & !lg2::mask(low) } else { 0 }
}
const _: () = assert!(mask_between(14, 12) == 0x3000 && mask_between(12, 12) == 0);
