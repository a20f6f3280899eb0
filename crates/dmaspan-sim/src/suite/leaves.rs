//! Leaves of every size: mapped, looked up, refused twice, unmapped.

use dmaspan::io_pgtable::{Error, Format};
use dmaspan::{Iova, Prot, lg2};

use super::space::{range, span};
use super::survey::{self, Seen};
use super::tree::{PROT, Tree, free, granted};
use super::{Subject, codec, each};
use crate::rng::Rng;
use crate::walker::{Access, Walker as _};

/// A mapping of one leaf is one leaf of that size, to the walker too; it is found, refuses another,
/// and goes (map_simple of generic_pt, and the self-test of io-pgtable).
pub fn every_size_is_one_leaf<S: Subject>() {
    let mut rng = Rng::new(4);
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format.clone());
        let space = tree.space.clone();
        let prot = granted(&format, PROT);
        for lg2 in space.sizes() {
            let size = lg2::size(lg2);
            assert_eq!(tree.lookup(space.aperture.start().get() + 42), None);
            for n in [0, 1, 5] {
                let Some(iova) = space.nth(lg2, n) else { continue };
                let paddr = size.wrapping_mul(rng.next()) & space.paddr_last();
                assert_eq!(tree.map_pages(iova, paddr, size, 1, PROT), (size, Ok(())));
                let occupied = Err(Error::Occupied { leaf: range(iova, size) });
                assert_eq!(tree.map_pages(iova, 0, size, 1, PROT), (0, occupied));
                assert_eq!(tree.lookup(iova + 42), Some(paddr + 42));
                assert_eq!(tree.census(), [(lg2, 1)]);
                let seen = Seen { range: range(iova, size), paddr: span(paddr, 1).paddr(), prot };
                assert_eq!(tree.leaves(), [seen]);
                let gone = tree.unmap_pages(iova, size, 1);
                assert_eq!((gone.bytes, gone.result), (size, Ok(())));
                assert_eq!((gone.gathered, gone.leaf_sizes), (Some(range(iova, size)), size));
                assert_eq!(tree.lookup(iova + 42), None);
                assert_eq!(tree.leaves(), []);
                tree.reclaim();
                tree.map(iova, &[span(paddr, size)], PROT).unwrap();
                assert_eq!(tree.census(), [(lg2, 1)]);
                assert_eq!(tree.unmap(range(iova, size)).unwrap(), [span(paddr, size)]);
                tree.reclaim();
                assert_eq!(tree.arena.tables(), 1, "only the root is left");
            }
        }
    });
}

/// The last leaf of the aperture leads to the last one of memory.
pub fn the_last_leaf_of_both_spaces_maps<S: Subject>() {
    each::<S>(|format| {
        for lg2 in Tree::<S>::new(format.clone()).space.sizes() {
            let mut tree = Tree::<S>::new(format.clone());
            let space = tree.space.clone();
            let size = lg2::size(lg2);
            let (iova, paddr) = (space.nth_back(lg2, 0).unwrap(), space.last_block(lg2));
            tree.map(iova, &[span(paddr, size)], PROT).unwrap();
            let last = space.aperture.last();
            assert_eq!(tree.lookup(last.get()), Some(space.paddr_last()));
            let walker = tree.walker();
            let found = survey::translate(&walker, &tree.arena, last).unwrap();
            assert_eq!(found.paddr.get(), space.paddr_last());
            assert_eq!(tree.census(), [(lg2, 1)]);
            assert_eq!(tree.contents().0.len(), 1);
            let gone = tree.unmap_pages(iova, size, 1);
            assert_eq!((gone.bytes, gone.result), (size, Ok(())));
            assert_eq!(tree.lookup(last.get()), None);
        }
    });
}

/// A walk reports as permitted what the walker finds, for every combination.
pub fn permissions_read_back_by_the_walker<S: Subject>() {
    each::<S>(|format| {
        for lg2 in Tree::<S>::new(format.clone()).space.sizes() {
            let mut tree = Tree::<S>::new(format.clone());
            let Some(iova) = tree.space.nth(lg2, 0) else { continue };
            for prot in codec::prots(&format) {
                let size = lg2::size(lg2);
                tree.map(iova, &[span(0, size)], prot).unwrap();
                let expected = granted(&format, prot);
                let runs = tree.contents().0;
                assert_eq!((runs.len(), runs[0].prot), (1, expected), "{prot:?}");
                let walker = tree.walker();
                let seen = survey::translate(&walker, &tree.arena, Iova::new(iova)).unwrap();
                assert_eq!(seen.prot, expected, "{prot:?} of 2^{lg2}, as the manual reads it");
                let rights = [(Access::Read, Prot::READ), (Access::Write, Prot::WRITE)];
                for (access, right) in rights.into_iter().filter(|_| !prot.contains(Prot::PRIV)) {
                    let walked = walker.walk(&tree.arena, Iova::new(iova), access);
                    assert_eq!(walked.is_ok(), expected.contains(right), "{access:?} of {prot:?}");
                }
                S::strict(&walker, &tree.arena, range(iova, size)).unwrap();
                tree.unmap(range(iova, size)).unwrap();
            }
        }
    });
}

/// Other permissions change nothing but the permissions, of leaves of every size; part of a leaf is
/// refused, and so is a group that hardware wants broken first.
pub fn protecting_changes_permissions_alone<S: Subject>() {
    each::<S>(|format| {
        let prots = [Prot::READ, PROT].map(|prot| (prot, granted(&format, prot)));
        for lg2 in Tree::<S>::new(format.clone()).space.sizes() {
            let mut tree = Tree::<S>::new(format.clone());
            let (size, iova) = (lg2::size(lg2), tree.space.nth(lg2, 0).unwrap());
            let (all, granule) = (range(iova, size), tree.space.granule());
            tree.map(iova, &[span(0, size)], Prot::READ_WRITE).unwrap();
            let hole = tree.protect(range(iova.wrapping_add(size), granule), PROT);
            assert!(hole.is_err(), "nothing is mapped there");
            for (prot, grant) in prots.into_iter().filter(|&(prot, _)| !format.refuses(prot)) {
                let before = tree.leaves();
                match tree.protect(all, prot) {
                    Ok(()) => {
                        let expected = Seen { prot: grant, ..before[0] };
                        assert_eq!(tree.leaves(), [expected]);
                        assert_eq!(tree.contents().0[0].prot, grant);
                    }
                    Err(Error::NeedsBreak { leaf }) => {
                        assert!(format.breaks_to_change() && leaf == all);
                        assert_eq!(tree.leaves(), before);
                    }
                    Err(error) => panic!("{error}"),
                }
                if lg2 > tree.space.granule_lg2 {
                    let split = Err(Error::WouldSplit { leaf: all });
                    assert_eq!(tree.protect(range(iova, granule), prot), split);
                }
            }
            assert_eq!(tree.unmap(all).unwrap(), [span(0, size)]);
        }
    });
}

/// A leaf goes where smaller ones were once these are unmapped and their tables reclaimed, and not
/// before (map_table_to_oa of generic_pt; io-pgtable-arm drops live pages here).
pub fn large_leaves_replace_emptied_tables_only<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let sizes = tree.space.sizes();
        for (small, large) in sizes.iter().zip(sizes.iter().skip(1)) {
            let (small, large) = (lg2::size(*small), lg2::size(*large));
            let Some(iova) = tree.space.nth(lg2::alignment(large), 0) else { continue };
            let count = large / small;
            assert_eq!(tree.map_pages(iova, 0, small, count, PROT), (large, Ok(())));
            assert_eq!(tree.census(), [(lg2::alignment(small), count)], "of the size asked for");
            // With all there, with holes, and with the last one only.
            for kept in [0, count / 2, count - 1] {
                let before = tree.contents();
                let leaf = range(iova + kept * small, small);
                let occupied = Err(Error::Occupied { leaf });
                assert_eq!(tree.map_pages(iova, 0, large, 1, PROT), (0, occupied));
                assert_eq!(tree.map(iova, &[span(0, large)], PROT), occupied);
                assert_eq!(tree.contents(), before, "nothing is lost");
                if kept < count - 1 {
                    let next = if kept == 0 { count / 2 } else { count - 1 };
                    tree.unmap(range(iova + kept * small, (next - kept) * small)).unwrap();
                }
            }
            tree.unmap(range(iova + large - small, small)).unwrap();
            if let Err(error) = tree.map(iova, &[span(0, large)], PROT) {
                assert!(matches!(error, Error::EmptyTable { .. }), "{error}");
                let retired = tree.table.whole().reclaim(range(iova, large)).unwrap();
                assert!(retired.has_tables());
                free(&tree.table, retired);
                tree.map(iova, &[span(0, large)], PROT).unwrap();
            }
            assert_eq!(tree.census(), [(lg2::alignment(large), 1)]);
            assert_eq!(tree.leaves().len(), 1);
            tree.unmap(range(iova, large)).unwrap();
            tree.reclaim();
            assert_eq!(tree.arena.tables(), 1, "only the root is left");
        }
    });
}

/// A range that begins or ends inside a leaf is refused and changes nothing, of every size (where
/// generic_pt's unmap_split takes the whole leaf).
pub fn leaves_are_never_split_by_an_unmap<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let granule = tree.space.granule();
        for lg2 in tree.space.sizes().into_iter().skip(1) {
            let size = lg2::size(lg2);
            let Some(iova) = tree.space.nth(lg2, 1).or(tree.space.nth(lg2, 0)) else { continue };
            tree.map(iova, &[span(0, size)], PROT).unwrap();
            let before = (tree.contents(), tree.leaves());
            let split = Error::WouldSplit { leaf: range(iova, size) };
            let parts = [(0, granule), (granule, size - granule), (size - granule, granule)];
            for (offset, len) in parts {
                let (at, count) = (iova + offset, len / granule);
                assert_eq!(tree.unmap(range(at, len)), Err(split));
                let gone = tree.unmap_pages(at, granule, count);
                assert_eq!((gone.bytes, gone.result, gone.gathered), (0, Err(split), None));
                assert_eq!((tree.contents(), tree.leaves()), before);
            }
            // Pages in front of it go, and it stays.
            let room = tree.space.aperture.start().get() < iova;
            if room && tree.map_pages(iova - granule, 0, granule, 1, PROT).0 == granule {
                let gone = tree.unmap_pages(iova - granule, granule, 2);
                assert_eq!((gone.bytes, gone.result), (granule, Err(split)));
                assert_eq!(gone.gathered, Some(range(iova - granule, granule)));
                assert_eq!((tree.contents(), tree.leaves()), before);
            }
            assert_eq!(tree.unmap(range(iova, size)).unwrap(), [span(0, size)]);
            tree.reclaim();
        }
    });
}

/// One call for many pages does what as many calls for one page do, at every size.
pub fn batches_equal_single_pages<S: Subject>() {
    each::<S>(|format| {
        let [mut batched, mut single] = [(); 2].map(|()| Tree::<S>::new(format.clone()));
        let space = batched.space.clone();
        for lg2 in space.sizes() {
            let size = lg2::size(lg2);
            // Over the border of a table, where there is room.
            let entries = lg2::size(S::Format::LG2_ENTRIES);
            let counts = [entries / 2 + 5, 5, 2, 1];
            let fits = |&count: &u64| {
                space.nth(lg2, entries / 2 + count).is_some() && space.has_memory(lg2, count)
            };
            let Some(count) = counts.into_iter().find(fits) else { continue };
            let iova = space.nth(lg2, entries / 2).unwrap();
            assert_eq!(batched.map_pages(iova, 0, size, count, PROT), (count * size, Ok(())));
            for n in 0..count {
                let at = n * size;
                assert_eq!(single.map_pages(iova + at, at, size, 1, PROT), (size, Ok(())));
            }
            assert_eq!(batched.contents(), single.contents());
            assert_eq!(batched.leaves(), single.leaves());
            assert_eq!(batched.arena.tables(), single.arena.tables());
            let gone = batched.unmap_pages(iova, size, count);
            assert_eq!((gone.bytes, gone.result), (count * size, Ok(())));
            assert_eq!(gone.gathered, Some(range(iova, count * size)));
            assert_eq!(gone.leaf_sizes, size);
            for n in 0..count {
                let gone = single.unmap_pages(iova + n * size, size, 1);
                assert_eq!((gone.bytes, gone.result), (size, Ok(())));
            }
            assert_eq!((batched.leaves(), single.leaves()), (vec![], vec![]));
            batched.reclaim();
            single.reclaim();
        }
    });
}

/// An unmap of pages goes as far as something is mapped, wherever the hole is.
pub fn unmapping_stops_at_the_first_hole<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let space = tree.space.clone();
        let granule = space.granule();
        // Three tables, or half of the only one.
        let block = space.blocks(5).unwrap_or(space.input_bits.min(space.output_bits) - 3);
        let (block, total) = (lg2::size(block), 3 * lg2::size(block));
        let start = space.aperture.start().get();
        // The hole is at the start, in the middle of a table, at a table's first entry, in a table
        // behind a whole one, and a missing table.
        for hole in [0, 5 * granule, block, block + 7 * granule, 2 * block] {
            let behind = if hole < 2 * block { hole + granule } else { total };
            for (from, to) in [(0, hole), (behind, total)].into_iter().filter(|(a, b)| a < b) {
                let count = (to - from) / granule;
                let mapped = tree.map_pages(start + from, granule, granule, count, PROT);
                assert_eq!(mapped, (to - from, Ok(())));
            }
            let gone = tree.unmap_pages(start, granule, total / granule);
            assert_eq!(gone.bytes, hole);
            let Err(Error::Hole { hole: found }) = gone.result else { panic!("{:?}", gone.result) };
            assert!(found.contains(Iova::new(start + hole)));
            assert_eq!(gone.gathered, (hole > 0).then(|| range(start, hole)));
            let left: u64 = tree.contents().0.iter().map(|run| run.range.len_less_one() + 1).sum();
            assert_eq!(left, total - behind);
            if left > 0 {
                tree.unmap(range(start + behind, left)).unwrap();
            }
            tree.reclaim();
        }
    });
}
