//! The tests of several walkers share this.

use dmaspan::{Iova, IovaRange, PhysAddr};

use super::{Access, EntryUpdate, FaultKind, TableImage, TableStep, Translated, WalkPath, Walker};

/// Tables of 512 entries at these addresses.
pub(super) fn tables(at: &[u64]) -> TableImage {
    let image = TableImage::new();
    at.iter().for_each(|paddr| image.add_table(PhysAddr::new(*paddr), 512));
    image
}

pub(super) fn set(image: &TableImage, words: &[(u64, u64)]) {
    words.iter().for_each(|(paddr, word)| image.set(PhysAddr::new(*paddr), *word).unwrap());
}

/// The outcome of an access, faults as their kind and level.
pub(super) type Outcome = Result<Translated, (FaultKind, u8)>;

pub(super) fn read(walker: &impl Walker, image: &TableImage, iova: u64) -> Outcome {
    walker.walk(image, Iova::new(iova), Access::Read).map_err(|fault| (fault.kind, fault.level))
}

pub(super) fn write(walker: &impl Walker, image: &TableImage, iova: u64) -> Outcome {
    walker.walk(image, Iova::new(iova), Access::Write).map_err(|fault| (fault.kind, fault.level))
}

/// The entries that a walk for a write reads, from the root.
pub(super) fn steps(walker: &impl Walker, image: &TableImage, iova: u64) -> Vec<TableStep> {
    let (iova, mut path) = (Iova::new(iova), WalkPath::new());
    let root = walker.root(iova, Access::Write).unwrap();
    walker.walk_from(image, root, iova, Access::Write, &mut path).unwrap();
    path.iter().copied().collect()
}

/// What hardware writes: the entry's address and its old and new value.
pub(super) fn update(outcome: Outcome) -> Option<(u64, u64, u64)> {
    let EntryUpdate { entry_paddr, old, new } = outcome.unwrap().update?;
    Some((entry_paddr.get(), old, new))
}

pub(super) fn block(start: u64, lg2: u32) -> IovaRange {
    IovaRange::from_len(Iova::new(start), 1 << lg2).unwrap()
}

/// The output address, log2 of the entry's size and of the group's, and the level.
pub(super) fn shape(outcome: Outcome) -> (u64, u32, u32, u8) {
    let leaf = outcome.unwrap();
    (leaf.paddr.get(), leaf.leaf_lg2, leaf.group_lg2, leaf.level)
}
