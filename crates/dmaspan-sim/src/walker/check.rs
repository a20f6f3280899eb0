//! Formats share these checks that hardware does not make: bits that software must leave clear,
//! entries that repeat one leaf, whole tables.

use std::collections::BTreeMap;

use dmaspan::{Iova, IovaRange, PhysAddr};

use super::{
    Access, Fault, FaultKind, NotATable, TableStep, TableWords, Translated, WalkPath, Walker,
    block_around,
};

/// Says what is wrong with a table that hardware may nevertheless walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadTable {
    /// The walk faults.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// Bits are set that software must leave clear.
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
    /// Entries that should repeat one leaf disagree.
    #[error("entry {entry:#x} at {entry_paddr} does not repeat {expected:#x} of {group}")]
    Copies {
        /// What the leaf covers.
        group: IovaRange,
        /// Where the first entry that disagrees is.
        entry_paddr: PhysAddr,
        /// The entry.
        entry: u64,
        /// The entry that the walk found.
        expected: u64,
    },
}

/// A walker whose tables can be checked as a whole.
pub trait Checked: Walker {
    /// log2 of the bytes of an entry.
    const ENTRY_LG2_BYTES: u32 = 3;

    /// Every address that the tables can translate, in order.
    fn input_ranges(&self) -> Vec<IovaRange>;

    /// Bits that hardware may change in one of several entries that repeat a leaf.
    fn hardware_bits(&self) -> u64;

    /// Bits of a present entry that software must leave clear though hardware takes no offence.
    fn must_be_clear(&self, _step: &TableStep) -> u64 {
        0
    }

    /// The field of a leaf that has a reserved value, if one has.
    fn reserved_field(&self, _leaf: &TableStep) -> Option<&'static str> {
        None
    }

    /// Checks the entries that are one leaf together: here, that all repeat it.
    ///
    /// # Errors
    ///
    /// [`BadTable`] for the first entry that is wrong, or that cannot be read.
    fn check_group(&self, tables: &dyn TableWords, leaf: &Translated) -> Result<(), BadTable> {
        check_copies(self, tables, leaf)
    }

    /// The entry at `paddr`, read as a walk reads it.
    ///
    /// # Errors
    ///
    /// [`NotATable`].
    fn read_entry(&self, tables: &dyn TableWords, paddr: PhysAddr) -> Result<u64, NotATable> {
        tables.read_u64(paddr)
    }

    /// Walks to the leaf of `iova` and checks every entry on the way, and all entries that repeat
    /// the leaf. Accesses are not checked against the permissions.
    ///
    /// # Errors
    ///
    /// [`BadTable`] for the first entry that is wrong, or with the fault.
    fn strict_walk(&self, tables: &dyn TableWords, iova: Iova) -> Result<Translated, BadTable> {
        let mut path = WalkPath::new();
        let translation = strict_path(self, tables, iova, &mut path)?;
        self.check_group(tables, &translation)?;
        Ok(translation)
    }

    /// Walks everything mapped in `range`, checks it as [`strict_walk`](Self::strict_walk) does,
    /// and calls `visit` with the leaf of each entry in order.
    ///
    /// # Errors
    ///
    /// [`BadTable`]. Addresses at which nothing is mapped are passed over.
    fn survey(
        &self,
        tables: &dyn TableWords,
        range: IovaRange,
        mut visit: impl FnMut(&Translated),
    ) -> Result<(), BadTable> {
        let reach = self.input_ranges();
        for range in reach.into_iter().filter_map(|reach| range.intersection(reach)) {
            let mut checked: Option<IovaRange> = None;
            let mut next = Some(range.start());
            while let Some(iova) = next.filter(|iova| range.contains(*iova)) {
                let mut path = WalkPath::new();
                let passed = match strict_path(self, tables, iova, &mut path) {
                    Ok(leaf) => {
                        if checked != Some(leaf.group) {
                            self.check_group(tables, &leaf)?;
                            checked = Some(leaf.group);
                        }
                        visit(&leaf);
                        leaf.leaf
                    }
                    Err(BadTable::Fault(fault)) if fault.kind == FaultKind::Translation => {
                        let step = path.last().ok_or(BadTable::Fault(fault))?;
                        block_around(iova, step.entry_lg2)
                    }
                    Err(error) => return Err(error),
                };
                next = passed.last().checked_add(1);
            }
        }
        Ok(())
    }

    /// How many translations of each size the tables hold in `range`, by log2 of the size. Entries
    /// that repeat one leaf count as one of its size.
    ///
    /// # Errors
    ///
    /// [`BadTable`], as [`survey`](Self::survey).
    fn census(
        &self,
        tables: &dyn TableWords,
        range: IovaRange,
    ) -> Result<BTreeMap<u32, u64>, BadTable> {
        let mut census = BTreeMap::new();
        self.survey(tables, range, |leaf| {
            if leaf.group.start() == leaf.leaf.start() {
                *census.entry(leaf.group_lg2).or_default() += 1;
            }
        })?;
        Ok(census)
    }
}

/// The walk, with every entry on the way checked.
pub(super) fn strict_path<W: Checked + ?Sized>(
    walker: &W,
    tables: &dyn TableWords,
    iova: Iova,
    path: &mut WalkPath,
) -> Result<Translated, BadTable> {
    let root = walker.root(iova, Access::Read)?;
    let walked = walker.walk_from(tables, root, iova, Access::Read, path);
    let present = match walked {
        Ok(_) => path.len(),
        // The entry at which the walk ended is absent, or hardware itself found it wrong.
        Err(_) => path.len().saturating_sub(1),
    };
    for step in path.iter().take(present) {
        let bits = step.entry & walker.must_be_clear(step);
        if bits != 0 {
            return Err(BadTable::Reserved {
                entry_paddr: step.entry_paddr,
                entry: step.entry,
                level: step.link.level,
                bits,
            });
        }
    }
    let translation = walked?;
    match walker.reserved_field(&translation.step) {
        None => Ok(translation),
        Some(field) => {
            let TableStep { link, entry_paddr, entry, .. } = translation.step;
            Err(BadTable::ReservedValue { entry_paddr, entry, level: link.level, field })
        }
    }
}

/// Compares the entries that repeat a leaf, which are all in one table.
fn check_copies<W: Checked + ?Sized>(
    walker: &W,
    tables: &dyn TableWords,
    leaf: &Translated,
) -> Result<(), BadTable> {
    let step = &leaf.step;
    let before = (leaf.leaf.start().get() - leaf.group.start().get()) >> leaf.leaf_lg2;
    let count = 1 << (leaf.group_lg2 - leaf.leaf_lg2);
    let first = step.entry_paddr.get() - (before << W::ENTRY_LG2_BYTES);
    for paddr in (0..count).map(|index: u64| PhysAddr::new(first + (index << W::ENTRY_LG2_BYTES))) {
        let entry = walker.read_entry(tables, paddr).map_err(|why| Fault {
            kind: FaultKind::ExternalAbort(why),
            level: leaf.level,
            iova: leaf.iova,
            access: Access::Read,
        })?;
        if (entry ^ step.entry) & !walker.hardware_bits() != 0 {
            let (group, expected) = (leaf.group, step.entry);
            return Err(BadTable::Copies { group, entry_paddr: paddr, entry, expected });
        }
    }
    Ok(())
}
