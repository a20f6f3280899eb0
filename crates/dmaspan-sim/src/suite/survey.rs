//! All that a walker finds in a range, entry by entry.

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use crate::walker::{
    Access, FaultKind, TableLink, TableWords, Translated, WalkPath, Walker, block_around,
};

/// A leaf as a walker sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) range: IovaRange,
    pub(super) paddr: PhysAddr,
    pub(super) prot: Prot,
}

/// The translation of one address, whatever it permits.
pub(super) fn translate(
    walker: &dyn Walker,
    tables: &dyn TableWords,
    iova: Iova,
) -> Option<Translated> {
    step(walker, tables, &mut None, iova).1
}

/// All the IOVAs that the entry for `iova` is for, and what it says unless it is empty. `table` is
/// the table where the walk before ended: one that translates `iova`, too, is read at once.
#[track_caller]
fn step(
    walker: &dyn Walker,
    tables: &dyn TableWords,
    table: &mut Option<TableLink>,
    iova: Iova,
) -> (IovaRange, Option<Translated>) {
    let root = || walker.root(iova, Access::Read).unwrap_or_else(|fault| panic!("{fault}"));
    let from = table.filter(|table| table.block.contains(iova)).unwrap_or_else(root);
    let mut path = WalkPath::new();
    let walked = walker.walk_from(tables, from, iova, Access::Read, &mut path);
    let entry = path.last().unwrap_or_else(|| panic!("no entry was read for {iova}"));
    *table = Some(entry.link);
    let block = block_around(iova, entry.entry_lg2);
    match walked {
        Ok(translation) => (block, Some(translation)),
        Err(fault) if fault.kind == FaultKind::Translation => (block, None),
        Err(fault) => panic!("{fault}, entry {:#x} at {}", entry.entry, entry.entry_paddr),
    }
}

/// Calls `visit` with every entry that maps something in `range`, in the order of IOVAs: the IOVAs
/// that it is for, and what it says. All entries of a leaf must say the same.
#[track_caller]
pub(super) fn survey(
    walker: &dyn Walker,
    tables: &dyn TableWords,
    range: IovaRange,
    visit: &mut dyn FnMut(IovaRange, &Translated),
) {
    let mut leaf: Option<Seen> = None;
    let mut table = None;
    let mut next = Some(range.start());
    while let Some(iova) = next.filter(|&iova| iova <= range.last()) {
        let (block, found) = step(walker, tables, &mut table, iova);
        let known = leaf.filter(|leaf| leaf.range.contains(iova));
        let Some(found) = found else {
            let inside = leaf.is_some_and(|leaf| leaf.range.contains(block.start()));
            assert!(!inside, "a hole at {block:?} in the leaf {leaf:?}");
            next = block.last().checked_add(1);
            continue;
        };
        let seen = seen(&found);
        assert!(known.is_none_or(|leaf| leaf == seen), "one leaf, two answers: {seen:?}");
        leaf = Some(seen);
        visit(block, &found);
        next = block.last().checked_add(1);
    }
}

/// All leaves in `range`, as hardware finds them that has nothing cached.
#[track_caller]
pub(super) fn leaves(walker: &dyn Walker, tables: &dyn TableWords, range: IovaRange) -> Vec<Seen> {
    let mut leaves = Vec::new();
    survey(walker, tables, range, &mut |_, found| {
        let seen = seen(found);
        if leaves.last() != Some(&seen) {
            leaves.push(seen);
        }
    });
    leaves
}

/// The leaf of a translation, whole.
#[track_caller]
fn seen(found: &Translated) -> Seen {
    let range = found.group;
    assert!(range.contains(found.iova) && range.covers(found.leaf), "{found:?}");
    let offset = found.iova.get() - range.start().get();
    let paddr = found.paddr.get().wrapping_sub(offset);
    let aligned = lg2::is_aligned(paddr | range.start().get(), found.group_lg2);
    assert!(aligned && range.len_less_one() == lg2::mask(found.group_lg2), "{found:?}");
    Seen { range, paddr: PhysAddr::new(paddr), prot: found.prot }
}
