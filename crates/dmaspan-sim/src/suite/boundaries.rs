//! Mappings over the borders of tables and page sizes.

use dmaspan::io_pgtable::Format as _;
use dmaspan::{Iova, lg2};

use super::space::{range, span};
use super::survey;
use super::tree::{PROT, Tree, arena};
use super::{Subject, each};
use crate::model::optimal_leaf_census;

/// The sizes for which Linux's cases give numbers: 4K, 2M and 1G.
const THREE_SIZES: u64 = 1 << 12 | 1 << 21 | 1 << 30;

/// Maps `len` bytes, and requires the fewest leaves that brute force finds, all of them read back.
#[track_caller]
fn map_with_fewest_leaves<S: Subject>(tree: &mut Tree<S>, iova: u64, paddr: u64, len: u64) {
    tree.map(iova, &[span(paddr, len)], PROT).unwrap();
    let page_sizes = tree.space.page_sizes;
    let fewest = optimal_leaf_census(Iova::new(iova), &[span(paddr, len)], page_sizes).unwrap();
    assert_eq!(tree.census(), fewest.into_iter().collect::<Vec<_>>());
    let leaves = tree.leaves();
    for leaf in &leaves {
        let offset = leaf.range.start().get() - iova;
        assert_eq!(leaf.paddr.get(), paddr + offset);
        assert_eq!(
            tree.lookup(leaf.range.last().get()),
            Some(paddr + (leaf.range.last().get() - iova))
        );
    }
    let total: u64 = tree.census().iter().map(|(_, count)| count).sum();
    assert_eq!(leaves.len() as u64, total);
}

/// Pages, blocks and pages again, wherever tables end.
pub fn mappings_go_over_table_borders_with_the_fewest_leaves<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let space = tree.space.clone();
        let (granule, chunk) = (space.granule(), lg2::size(space.chunk()));
        let start = space.aperture.start().get() + 6 * chunk - 3 * granule;
        let len = 3 * granule + 4 * chunk + 5 * granule;
        // Memory that is congruent to the IOVAs, and memory that is not.
        for paddr in [6 * chunk - 3 * granule, 11 * granule, 2 * chunk + granule] {
            map_with_fewest_leaves(&mut tree, start, paddr, len);
            assert_eq!(tree.unmap(range(start, len)).unwrap(), [span(paddr, len)]);
            tree.reclaim();
        }
    });
}

/// Whether a case of Linux's can be run: its addresses are in the tree's spaces and its alignment
/// is the granule's.
fn has<S: Subject>(tree: &Tree<S>, iova: u64, paddr: u64, len: u64) -> bool {
    let space = &tree.space;
    space.aperture.covers(range(iova, len))
        && paddr + (len - 1) <= space.paddr_last()
        && lg2::is_aligned(iova | paddr | len, space.granule_lg2)
}

/// generic_pt's pgsize_boundary: memory that is aligned to a page only, up to an IOVA with the
/// alignment of a large leaf.
pub fn the_page_size_boundary_case_maps_every_byte<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let (iova, paddr, len) = (0xfef8_0000, 0x20_8b95_d000, 0x2_0000);
        if !has(&tree, iova, paddr, len) {
            return;
        }
        map_with_fewest_leaves(&mut tree, iova, paddr, len);
        if tree.space.page_sizes == THREE_SIZES {
            assert_eq!(tree.census(), [(12, 32)]);
        }
    });
}

/// generic_pt's mixed: 14 × 2M, 3 × 1G and 3 × 2M, where these are the sizes.
pub fn the_mixed_case_has_twenty_leaves<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let (start, end) = (0x3_fe40_0000, 0x4_c060_0000);
        let len = end - start;
        if !has(&tree, start, start, len) {
            return;
        }
        map_with_fewest_leaves(&mut tree, start, start, len);
        if tree.space.page_sizes == THREE_SIZES {
            assert_eq!(tree.census(), [(21, 17), (30, 3)]);
        }
        assert_eq!(tree.unmap(range(start, len)).unwrap(), [span(start, len)]);
    });
}

/// A page for the first time above what each level translates: everything mapped before stays, to
/// look-ups and to the walker (increase_level of generic_pt, where trees grow).
pub fn trees_grow_and_keep_what_they_translate<S: Subject>() {
    each::<S>(|format| {
        let (arena, first) = (arena(), format.first_top_level());
        let mut tree = Tree::<S>::sapling(format, arena.clone(), arena);
        let space = tree.space.clone();
        let granule = space.granule();
        let mut pages = space.beyond(0);
        pages.insert(0, space.aperture.start().get());
        pages.extend(space.nth_back(space.granule_lg2, 0));
        assert_eq!(tree.table.root_and_level().1, first);
        for n in 0..pages.len() {
            let paddr = |n: usize| (2 * n as u64 + 1) * granule;
            tree.map(pages[n], &[span(paddr(n), granule)], PROT).unwrap();
            let walker = tree.walker();
            for (n, &page) in pages.iter().enumerate().take(n + 1) {
                let found = survey::translate(&walker, &tree.arena, Iova::new(page)).unwrap();
                assert_eq!(found.paddr.get(), paddr(n), "at {page:#x}");
                assert_eq!(tree.lookup(page + (granule - 1)), Some(paddr(n) + granule - 1));
            }
        }
        assert_eq!(tree.table.root_and_level().1, space.top_level);
        assert_eq!(tree.leaves().len(), pages.len());
    });
}
