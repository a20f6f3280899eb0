//! Dirty bits: what hardware writes into leaves.

use dmaspan::io_pgtable::Format;
use dmaspan::{Iova, Prot, lg2};

use super::space::{range, span};
use super::survey;
use super::tree::{PROT, Tree};
use super::{Subject, each};
use crate::walker::{Access, TableWords, Walker as _};

/// A write through any entry of a leaf marks it, and the leaf says and does what it did before.
pub fn hardware_marks_any_entry_of_a_leaf<S: Subject>() {
    each::<S>(|format| {
        if !format.tracks_dirty() {
            return;
        }
        let mut tree = Tree::<S>::new(format);
        for lg2 in tree.space.sizes() {
            let (size, step) = (lg2::size(lg2), S::Format::shift(S::Format::level_of(lg2)));
            let Some(iova) = tree.space.nth(lg2, 0) else { continue };
            for entry in 0..size >> step {
                tree.map(iova, &[span(0, size)], PROT).unwrap();
                let (contents, leaves) = (tree.contents(), tree.leaves());
                write::<S>(&tree, iova + (entry << step));
                assert_eq!((tree.contents(), tree.leaves()), (contents, leaves));
                assert_eq!(tree.unmap(range(iova, size)).unwrap(), [span(0, size)]);
            }
            tree.map(iova, &[span(0, size)], Prot::READ).unwrap();
            let walker = tree.walker();
            assert!(walker.walk(&tree.arena, Iova::new(iova), Access::Write).is_err());
            tree.unmap(range(iova, size)).unwrap();
            tree.reclaim();
        }
    });
}

/// Writes as a device does: through an entry that is clean before and dirty behind it.
#[track_caller]
pub(super) fn write<S: Subject>(tree: &Tree<S>, iova: u64) {
    let (walker, iova) = (tree.walker(), Iova::new(iova));
    let found = walker.walk(&tree.arena, iova, Access::Write).unwrap();
    assert!(found.clean, "nobody wrote at {iova} before");
    let update = found.update.unwrap_or_else(|| panic!("no mark for a write at {iova}"));
    let before = tree.arena.exchange_u64(update.entry_paddr, update.old, update.new).unwrap();
    assert_eq!(before, update.old);
    let found = survey::translate(&walker, &tree.arena, iova).unwrap();
    assert!(!found.clean, "written at {iova}");
}
