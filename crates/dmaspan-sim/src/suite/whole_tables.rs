//! Tables that a range covers exactly, leaves that a range begins inside, and lists of large spans.

use dmaspan::io_pgtable::{DirtyBitmap, Error, Format};
use dmaspan::{Iova, IovaRange, Prot, SpanBuf, lg2};

use super::space::{range, span};
use super::tree::{PROT, Tree, claim, free};
use super::{Subject, each};
use crate::model::optimal_leaf_census;

/// A walk that begins or ends inside a leaf says where its own first byte leads.
pub fn a_walk_may_begin_inside_a_leaf<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        for lg2 in tree.space.sizes() {
            let (size, iova) = (lg2::size(lg2), tree.space.nth(lg2, 0).unwrap());
            tree.map(iova, &[span(0, size)], PROT).unwrap();
            for (offset, len) in [(1, 2), (size / 2, size / 2), (size - 1, 1), (size / 4 + 3, 5)] {
                let asked = range(iova + offset, len);
                let whole = tree.table.whole();
                let found: Vec<_> = whole.walk(asked).collect();
                let places: Vec<_> = found.iter().map(|run| (run.range, run.paddr.get())).collect();
                assert_eq!(places, [(asked, offset)], "2^{lg2}");
                assert_eq!(whole.census(asked).total(), 0, "a leaf counts where it begins");
            }
            tree.unmap(range(iova, size)).unwrap();
            tree.reclaim();
        }
    });
}

/// An unmap of exactly what one table translates, or a table above it with tables below, frees all
/// of these tables, whichever way it unmaps, and names the sizes of the leaves.
pub fn an_unmap_of_exactly_a_table_frees_all_below_it<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format.clone());
        let space = tree.space.clone();
        let granule = space.granule();
        for level in 1..=space.top_level {
            let shift = space.shift(level).unwrap();
            let (Some(base), true) = (space.nth(shift, 1), space.has_memory(shift, 4)) else {
                continue;
            };
            let block = lg2::size(shift);
            // Its entries are leaves, but the first leads to tables down to pages.
            let below = lg2::size(space.shift(level - 1).unwrap());
            if space.page_sizes & below == 0 {
                continue;
            }
            let spans = [span(2 * block + granule, granule), span(granule, block - granule)];
            tree.map(space.aperture.start().get(), &[span(0, granule)], PROT).unwrap();
            let before = tree.arena.tables();
            for way in 0..3 {
                tree.map(base, &spans, PROT).unwrap();
                assert!(tree.arena.tables() > before);
                let all = range(base, block);
                let census: Vec<_> = tree.table.whole().census(all).sizes().collect();
                let sizes = census.iter().fold(0, |all, &(lg2, _)| all | lg2::size(lg2));
                let mut room = SpanBuf::room::<4>();
                let mut buf = SpanBuf::new(&mut room);
                let mut words = [0];
                let retired = match way {
                    0 => tree.table.whole().unmap(all, &mut buf).unwrap().retired,
                    1 if format.tracks_dirty() => {
                        let mut bits = DirtyBitmap::new(&mut words, all, block).unwrap();
                        let whole = tree.table.whole();
                        whole.unmap_dirty(all, &mut buf, &mut bits).unwrap().retired
                    }
                    _ => {
                        let whole = tree.table.whole();
                        let gone = whole.unmap_pages(Iova::new(base), granule, block / granule);
                        assert_eq!(gone.result, Ok(()));
                        gone.retired
                    }
                };
                assert_eq!((retired.range(), retired.leaf_sizes()), (Some(all), sizes));
                assert!(retired.has_tables());
                free(&tree.table, retired);
                assert_eq!(tree.arena.tables(), before, "level {level}, way {way}");
            }
            tree.unmap(range(space.aperture.start().get(), granule)).unwrap();
            tree.reclaim();
        }
    });
}

/// Spans of a large leaf's length at any alignment, in tables that exist and that do not: each is
/// made of leaves that its address allows. So are single pages that happen to be neighbours.
pub fn lists_of_large_spans_are_mapped_by_aligned_leaves<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let space = tree.space.clone();
        let Some(lg2) = space.large(32) else { return };
        let (granule, size) = (space.granule(), lg2::size(lg2));
        let iova = space.nth(lg2, 4).unwrap();
        let large: Vec<_> = [3, 5, 7, 9]
            .map(|n| span(n * size + if n > 5 { granule } else { 0 }, size))
            .into_iter()
            .chain([span(12 * size, size)])
            .collect();
        let pages: Vec<_> = [1, 3, 5]
            .map(|n| span(n * granule, granule))
            .into_iter()
            .chain((0..(size / granule).min(1024)).map(|n| span(16 * size + n * granule, granule)))
            .collect();
        // The pages end before a large leaf's border, and what joins begins there.
        for (at, spans) in [(iova, &large), (iova, &large), (iova - 3 * granule, &pages)] {
            let len = spans.iter().map(|span| span.len()).sum();
            tree.map(at, spans, PROT).unwrap();
            let fewest = optimal_leaf_census(Iova::new(at), spans, space.page_sizes).unwrap();
            assert_eq!(tree.census(), fewest.into_iter().collect::<Vec<_>>());
            tree.leaves();
            let mut at = at;
            for span in spans {
                assert_eq!(tree.lookup(at), Some(span.paddr().get()));
                at += span.len();
            }
            tree.unmap_by::<3>(range(at - len, len)).unwrap();
        }
    });
}

/// A mapping that fails leaves tables that were there, also those that it filled whole, and makes
/// none: an empty table behind many spans is found before the first of them is installed.
pub fn a_failed_map_keeps_the_tables_as_they_are<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let space = tree.space.clone();
        let Some(block) = space.blocks(32) else { return };
        let (granule, block) = (space.granule(), lg2::size(block));
        let at = |n: u64| space.aperture.start().get() + n * block;
        // An empty table, and a page behind it.
        tree.map(at(2), &[span(0, granule)], PROT).unwrap();
        tree.map(at(3), &[span(0, granule)], PROT).unwrap();
        tree.unmap(range(at(2), granule)).unwrap();
        let before = (tree.contents(), tree.arena.tables());
        let leaf = range(at(3), granule);
        let taken = tree.map(at(2), &[span(4 * block + granule, block + granule)], PROT);
        assert_eq!(taken, Err(Error::Occupied { leaf }));
        assert_eq!((tree.contents(), tree.arena.tables()), before);
        if space.page_sizes & block != 0 {
            let mut spans: Vec<_> = (0..40).map(|n| span((2 * n + 1) * granule, granule)).collect();
            spans.push(span(8 * block, block));
            let refused = tree.map(at(2) - 40 * granule, &spans, PROT);
            assert!(matches!(refused, Err(Error::EmptyTable { .. })), "{refused:?}");
            assert_eq!((tree.contents(), tree.arena.tables()), before);
        }
    });
}

/// Permissions, ranges and remains that are not the owner's are refused by every operation that
/// changes leaves in place.
pub fn changes_in_place_check_their_arguments<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format.clone());
        let granule = tree.space.granule();
        let start = tree.space.aperture.start().get();
        let pages = range(start, 2 * granule);
        tree.map(start, &[span(granule, 2 * granule)], PROT).unwrap();
        let none = Err(Error::NoAccess { iova: Iova::new(start) });
        assert_eq!(tree.protect(pages, Prot::CACHE), none);
        for cut in [range(start, granule / 2), range(start + granule / 2, granule)] {
            let expected = Err(Error::Misaligned { range: cut, page_size: granule });
            assert_eq!(tree.protect(cut, PROT), expected);
            let mut words = [0];
            let mut bits = DirtyBitmap::new(&mut words, pages, granule).unwrap();
            let mut room = SpanBuf::room::<4>();
            let whole = tree.table.whole();
            let gone = whole.unmap_dirty(cut, &mut SpanBuf::new(&mut room), &mut bits);
            assert_eq!(gone.map(drop), expected);
        }
        let owned = claim(&tree.table, range(start, granule));
        let refused = owned.protect(pages, PROT).map(drop);
        assert_eq!(refused, Err(Error::NotOwned { range: pages, owned: owned.range() }));
        if format.tracks_dirty() {
            let rest = owned_rest(&mut tree, pages);
            let owned = claim(&tree.table, range(start, granule));
            let mut words = [0];
            let mut bits = DirtyBitmap::new(&mut words, pages, granule).unwrap();
            let mut room = SpanBuf::room::<4>();
            let mut buf = SpanBuf::new(&mut room);
            let refused = owned.resume_dirty(rest, &mut buf, &mut bits);
            assert!(refused.retired.is_empty() && buf.is_empty());
        }
        assert_eq!(tree.contents().0.len(), 1);
    });
}

/// The rest of an unmap whose buffer had no room.
fn owned_rest<S: Subject>(tree: &mut Tree<S>, pages: IovaRange) -> dmaspan::io_pgtable::Rest {
    let unmapped = tree.table.whole().unmap(pages, &mut SpanBuf::new(&mut [])).unwrap();
    assert!(unmapped.retired.is_empty());
    unmapped.rest.unwrap()
}
