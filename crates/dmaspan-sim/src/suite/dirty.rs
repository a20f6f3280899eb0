//! Dirty bits: what hardware writes into leaves, and what an operation reads of it.

use dmaspan::io_pgtable::{DirtyBitmap, Error, Format};
use dmaspan::{Errno, Iova, IovaRange, Prot, SpanBuf, lg2};

use super::space::{range, span};
use super::survey;
use super::tree::{PROT, Tree, free};
use super::{Subject, each, each_with_marks};
use crate::walker::{Access, TableWords, Walker as _};

/// A write through any entry of a leaf marks it, and the leaf says and does what it did before; it
/// is reported whole, once.
pub fn hardware_marks_any_entry_of_a_leaf<S: Subject>() {
    each_with_marks::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        for lg2 in tree.space.sizes() {
            let (size, step) = (lg2::size(lg2), S::Format::shift(S::Format::level_of(lg2)));
            let iova = tree.space.nth(lg2, 0).unwrap();
            let all = range(iova, size);
            tree.map(iova, &[span(0, size)], PROT).unwrap();
            let (contents, leaves) = (tree.contents(), tree.leaves());
            for entry in 0..size >> step {
                assert_eq!(read(&mut tree, all), None);
                write::<S>(&tree, iova + (entry << step));
                assert_eq!((tree.contents(), tree.leaves()), (contents.clone(), leaves.clone()));
                assert_eq!(read(&mut tree, all), Some(all), "entry {entry} of 2^{lg2} bytes");
            }
            assert_eq!(read(&mut tree, all), None);
            assert_eq!(tree.unmap(all).unwrap(), [span(0, size)]);
            if tree.map(iova, &[span(0, size)], Prot::READ).is_ok() {
                let walked = tree.walker().walk(&tree.arena, Iova::new(iova), Access::Write);
                assert!(walked.is_err(), "a write through a read-only leaf");
                tree.unmap(all).unwrap();
            }
            tree.reclaim();
        }
    });
}

/// Pages that are dirty, clean and missing side by side: each bit says what its page is, also where
/// the range begins in the middle of a large leaf, which keeps its mark then.
pub fn marks_are_read_among_holes_and_in_parts_of_leaves<S: Subject>() {
    each::<S>(|format| {
        let tracks = format.tracks_dirty();
        let mut tree = Tree::<S>::new(format.clone());
        let (granule, start) = (tree.space.granule(), tree.space.aperture.start().get());
        let pages = range(start, 16 * granule);
        if !tracks {
            let error = dirty_pages(&mut tree, pages).unwrap_err();
            assert_eq!(error, Error::NoDirtyBits { range: pages });
            assert_eq!(error.errno(), Errno::EOPNOTSUPP);
            return;
        }
        for n in [1, 2, 3, 7, 8, 15] {
            tree.map(start + n * granule, &[span(2 * n * granule, granule)], PROT).unwrap();
        }
        for n in [2, 7, 15] {
            write::<S>(&tree, start + n * granule);
        }
        let part = range(start + 3 * granule, 5 * granule);
        assert_eq!(dirty_pages(&mut tree, part), Ok(1 << (7 - 3)));
        assert_eq!(dirty_pages(&mut tree, pages), Ok(1 << 2 | 1 << 15));
        assert_eq!(dirty_pages(&mut tree, pages), Ok(0));
        // In a large leaf.
        let mut tree = Tree::<S>::new(format);
        let Some(large) = tree.space.large(2) else { return };
        let (leaf, size) = (tree.space.nth(large, 1).unwrap(), lg2::size(large));
        tree.map(leaf, &[span(0, size)], PROT).unwrap();
        write::<S>(&tree, leaf);
        let part = range(leaf + granule, granule);
        for _ in 0..2 {
            assert_eq!(read(&mut tree, part), Some(part), "the rest is not told yet");
        }
        assert_eq!(read(&mut tree, range(leaf, size)), Some(range(leaf, size)));
        assert_eq!(read(&mut tree, part), None);
    });
}

/// An unmap that asks for marks gets those of its range, and takes the translations.
pub fn unmapping_reports_marks<S: Subject>() {
    each_with_marks::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let (granule, start) = (tree.space.granule(), tree.space.aperture.start().get());
        let spans: Vec<_> = (0..8).map(|n| span((3 * n + 1) * granule, granule)).collect();
        tree.map(start, &spans, PROT).unwrap();
        for n in [0, 5] {
            write::<S>(&tree, start + n * granule);
        }
        let all = range(start, 8 * granule);
        let mut words = [0];
        let mut bitmap = DirtyBitmap::new(&mut words, all, granule).unwrap();
        let mut room = SpanBuf::room::<8>();
        let mut buf = SpanBuf::new(&mut room);
        let unmapped = tree.table.whole().unmap_dirty(all, &mut buf, &mut bitmap).unwrap();
        assert_eq!(unmapped.retired.range(), Some(all));
        assert!(unmapped.rest.is_none());
        free(&tree.table, unmapped.retired);
        assert_eq!((buf.spans(), words), (&spans[..], [1 | 1 << 5]));
        assert_eq!(tree.leaves(), []);
    });
}

/// Which of up to 64 granules are dirty, their marks taken away.
fn dirty_pages<S: Subject>(tree: &mut Tree<S>, range: IovaRange) -> Result<u64, Error> {
    let granule = tree.space.granule();
    tree.clear_dirty(range, granule).map(|(words, _)| words[0])
}

/// The part of `range` that is reported dirty: all, or nothing. Its marks are taken away.
#[track_caller]
fn read<S: Subject>(tree: &mut Tree<S>, range: IovaRange) -> Option<IovaRange> {
    // One bit for a quarter of it: none may differ.
    let granule = lg2::size(lg2::floor(range.len_less_one()).saturating_sub(1));
    let (words, (synced, _)) = tree.clear_dirty(range, granule).unwrap();
    let bits = lg2::mask(u32::try_from(range.len_less_one() / granule + 1).unwrap());
    assert!(words == [0] || words == [bits], "{words:x?} of {bits:#x}");
    assert!(synced.is_none_or(|synced| synced == range && words == [bits]));
    (words == [bits]).then_some(range)
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
