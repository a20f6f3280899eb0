//! Table memory that runs out, and tables that must not leak.

use dmaspan::io_pgtable::{Error, Format as _};
use dmaspan::{Iova, Span, SpanBuf, lg2};

use super::space::{Space, range, span};
use super::tree::{PROT, Tree, free};
use super::{Subject, each};
use crate::fault::{Faults, Fired};

/// Spans of all shapes: scattered pages, blocks, a run over table borders.
fn spans(space: &Space) -> Vec<Span> {
    let (granule, chunk) = (space.granule(), lg2::size(space.chunk()));
    vec![
        span(3 * granule, granule),
        span(9 * granule, 2 * granule),
        span(4 * chunk, 2 * chunk),
        span(10 * chunk - 3 * granule, chunk),
        span(20 * chunk, 3 * chunk + 5 * granule),
    ]
}

/// Bytes of all spans together.
fn len(spans: &[Span]) -> u64 {
    spans.iter().map(|span| span.len()).sum()
}

/// With every single allocation failing in turn, a map is done or leaves translations and tables as
/// they were.
pub fn every_failing_allocation_leaves_everything_as_before<S: Subject>() {
    each::<S>(|format| {
        let faults = Faults::none();
        let mut tree = Tree::<S, _>::faulty(format, &faults);
        let space = tree.space.clone();
        let (granule, chunk) = (space.granule(), lg2::size(space.chunk()));
        let start = space.aperture.start().get() + 7 * chunk - 2 * granule;
        // Part of the tables exist: entries are stored before the first table is found missing.
        tree.map(start - granule, &[span(granule, granule)], PROT).unwrap();
        let before = (tree.contents(), tree.leaves(), tree.arena.tables());
        let spans = spans(&space);
        let steps = faults.sweep(|n| {
            match tree.map(start, &spans, PROT) {
                Ok(()) => {
                    assert_eq!(tree.unmap(range(start, len(&spans))).unwrap(), spans);
                    tree.reclaim();
                }
                Err(error) => assert!(matches!(error, Error::NoTables { .. }), "step {n}: {error}"),
            }
            let now = (tree.contents(), tree.leaves(), tree.arena.tables());
            assert_eq!(now, before, "step {n}");

            let count = 3 * chunk / granule;
            let (bytes, result) = tree.map_pages(start, 0, granule, count, PROT);
            if let Err(error) = result {
                assert!(matches!(error, Error::NoTables { .. }), "step {n}: {error}");
            }
            // Partial progress is the caller's to unmap.
            if bytes > 0 {
                let gone = tree.unmap_pages(start, granule, bytes / granule);
                assert_eq!((gone.bytes, gone.result), (bytes, Ok(())));
            }
            tree.reclaim();
            let now = (tree.contents(), tree.leaves(), tree.arena.tables());
            assert_eq!(now, before, "step {n}");
        });
        assert!(steps > 0 || space.blocks(32).is_none(), "tables were missing");
    });
}

/// Unmapping and reclaiming take no tables, and dropping a table gives all of them back.
pub fn unmapping_needs_no_tables<S: Subject>() {
    each::<S>(|format| {
        let faults = Faults::none();
        let mut tree = Tree::<S, _>::faulty(format, &faults);
        let memory = tree.arena.clone();
        let start = tree.space.aperture.start().get();
        let spans = spans(&tree.space);
        tree.map(start, &spans, PROT).unwrap();
        faults.arm(1);
        assert_eq!(tree.unmap(range(start, len(&spans))).unwrap(), spans);
        tree.reclaim();
        assert_eq!(faults.disarm(), Fired::No);
        tree.map(start, &spans, PROT).unwrap();
        drop(tree);
        assert_eq!(memory.tables(), 0);
    });
}

/// A large unmap over tables full of pages frees all of them, and none before the sync: the leak
/// that Linux's io-pgtable had.
pub fn unmapping_blocks_over_full_tables_frees_all_of_them<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let space = tree.space.clone();
        let Some(lg2) = space.blocks(8) else { return };
        let (granule, block) = (space.granule(), lg2::size(lg2));
        let start = space.aperture.start().get();
        // A neighbour keeps the tables above alive, so that only the covered ones go.
        tree.map(start, &[span(0, granule)], PROT).unwrap();
        let before = tree.arena.tables();
        let base = start + 4 * block;
        let count = 3 * block / granule;
        let mapped = tree.map_pages(base, granule, granule, count, PROT);
        assert_eq!(mapped, (3 * block, Ok(())));
        assert_eq!(tree.arena.tables(), before + 3);
        let page_size = if space.page_sizes & block != 0 { block } else { granule };
        let whole = tree.table.whole();
        let pages = 3 * block / page_size;
        let unmapped = whole.unmap_pages(Iova::new(base), page_size, pages);
        assert_eq!((unmapped.bytes, unmapped.result), (3 * block, Ok(())));
        assert_eq!(unmapped.retired.range(), Some(range(base, 3 * block)));
        assert_eq!(unmapped.retired.leaf_sizes(), granule);
        assert!(unmapped.retired.has_tables());
        assert_eq!(tree.arena.tables(), before + 3, "nothing is freed before the sync");
        free(&tree.table, unmapped.retired);
        assert_eq!(tree.arena.tables(), before);
    });
}

/// A mapping that is taken back leaves the tables that it filled whole: they were there before.
pub fn a_mapping_taken_back_leaves_all_tables<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let space = tree.space.clone();
        let Some(lg2) = space.blocks(8).filter(|&lg2| space.page_sizes >> lg2 & 1 == 1) else {
            return;
        };
        let (granule, block) = (space.granule(), lg2::size(lg2));
        let base = space.aperture.start().get() + 4 * block;
        tree.map(base + block, &[span(0, granule)], PROT).unwrap();
        assert_eq!(tree.unmap(range(base + block, granule)).unwrap().len(), 1);
        tree.map(base + 2 * block, &[span(0, granule)], PROT).unwrap();
        let before = (tree.contents(), tree.arena.tables());
        // A block, pages that fill the empty table, and one that is in the way.
        let spans = [span(block, block), span(3 * block + granule, block + granule)];
        let error = tree.map(base, &spans, PROT);
        let leaf = range(base + 2 * block, granule);
        assert_eq!(error, Err(Error::Occupied { leaf }));
        assert_eq!((tree.contents(), tree.arena.tables()), before);
    });
}

/// Leaves that the owner unmaps while the buffer is full are passed over: those behind them are
/// unmapped all the same, and no table below them leaks.
pub fn an_unmap_passes_over_what_was_unmapped_meanwhile<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let space = tree.space.clone();
        let (granule, start) = (space.granule(), space.aperture.start().get());
        let sizes = [Some(space.granule_lg2), space.blocks(8)].into_iter().flatten();
        for lg2 in sizes.filter(|&lg2| space.page_sizes >> lg2 & 1 == 1) {
            let size = lg2::size(lg2);
            // With a whole table of the leaves, where there is one, behind the first.
            let table = space.nth(lg2 + S::Format::LG2_ENTRIES, 1);
            let behind = table.filter(|_| space.has_memory(lg2, 4 << S::Format::LG2_ENTRIES));
            let entries = lg2::size(S::Format::LG2_ENTRIES);
            let (first, count) = behind.map_or((start, 3), |table| (table - size, entries + 1));
            let spans: Vec<_> = (0..count).map(|n| span(2 * n * size, size)).collect();
            tree.map(first, &spans, PROT).unwrap();
            let mut room = SpanBuf::room::<1>();
            let mut buf = SpanBuf::new(&mut room);
            let whole = tree.table.whole();
            let unmapped = whole.unmap(range(first, len(&spans)), &mut buf).unwrap();
            let rest = unmapped.rest.unwrap();
            free(&tree.table, unmapped.retired);
            assert_eq!(tree.unmap(range(first + size, size)).unwrap(), spans[1..2]);
            if size != granule {
                // An empty table, where there was a leaf.
                tree.map(first + size, &[span(0, granule)], PROT).unwrap();
                tree.unmap(range(first + size, granule)).unwrap();
            }
            let mut room = vec![spans[0]; spans.len()];
            let mut buf = SpanBuf::new(&mut room);
            let unmapped = tree.table.whole().resume(rest, &mut buf);
            assert!(unmapped.rest.is_none());
            assert_eq!(unmapped.retired.range(), Some(range(first + size, len(&spans[1..]))));
            assert_eq!(buf.spans(), &spans[2..]);
            free(&tree.table, unmapped.retired);
            assert_eq!(tree.contents().1, []);
            tree.reclaim();
            assert_eq!(tree.arena.tables(), 1, "only the root is left");
        }
    });
}
