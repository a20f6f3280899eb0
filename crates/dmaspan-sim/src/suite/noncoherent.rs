//! Changes in place, and races, before hardware that does not see the CPU's caches.

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::thread;

use dmaspan::io_pgtable::{Format, Gap, Word};
use dmaspan::{Iova, iommu, lg2};

use super::memory::{NonCoherent, Stall};
use super::rewrite::other;
use super::rig::Rig;
use super::space::{range, span};
use super::survey;
use super::tree::{PROT, Tree, WordOf, arena, claim};
use super::{Subject, each};
use crate::iotlb::IotlbConfig;
use crate::walker::{Access, TableWords, Walker as _};

fn tree<S: Subject>(format: S::Format) -> (Tree<S, NonCoherent>, NonCoherent) {
    let inner = arena();
    let memory = NonCoherent::new(inner.clone());
    (Tree::over(format, memory.clone(), inner), memory)
}

/// After permissions, marks and leaves were changed in place, hardware finds what a CPU finds.
pub fn changes_in_place_are_written_back<S: Subject>() {
    each::<S>(|format| {
        let (mut tree, memory) = tree::<S>(format.clone());
        let sizes: Vec<_> = tree.space.sizes();
        for &lg2 in &sizes {
            let (size, iova) = (lg2::size(lg2), tree.space.nth(lg2, 0).unwrap());
            let all = range(iova, size);
            tree.map(iova, &[span(0, size)], PROT).unwrap();
            if tree.protect(all, other(&format)).is_ok() {
                assert_eq!(tree.leaves_in(&memory), tree.leaves());
                tree.protect(all, PROT).unwrap();
            }
            if format.tracks_dirty() {
                let found = tree.walker().walk(&memory, Iova::new(iova), Access::Write).unwrap();
                let update = found.update.unwrap();
                memory.exchange_u64(update.entry_paddr, update.old, update.new).unwrap();
                let (words, _) = tree.clear_dirty(all, size).unwrap();
                assert_eq!(words, [1]);
                let found = tree.walker().walk(&memory, Iova::new(iova), Access::Write).unwrap();
                assert!(found.clean, "hardware marks the next write");
            }
            assert_eq!(tree.leaves_in(&memory), tree.leaves());
            tree.unmap(all).unwrap();
            assert_eq!(tree.leaves_in(&memory), []);
            tree.reclaim();
        }
        // Split, and groups that are broken, by a domain.
        let rig = Rig::<S, _>::with_config(tree, IotlbConfig::default());
        let same = |rig: &Rig<S, NonCoherent>| {
            let (walker, aperture) = (rig.iotlb().walker(), rig.space.aperture);
            let mut seen = [Vec::new(), Vec::new()];
            survey::survey(walker, &rig.arena, aperture, &mut |_, found| seen[0].push(found.paddr));
            survey::survey(walker, &memory, aperture, &mut |_, found| seen[1].push(found.paddr));
            assert_eq!(seen[0], seen[1]);
        };
        for &lg2 in sizes.iter().skip(1) {
            let (size, iova) = (lg2::size(lg2), rig.space.nth(lg2, 0).unwrap());
            rig.map(iova, &[span(0, size)], PROT).unwrap();
            rig.protect(range(iova, size), other(&format)).unwrap();
            same(&rig);
            let border = iova + rig.space.granule();
            if rig.split(border, Gap::Accept).is_err() {
                // A format without leaves of some level's size.
                rig.unmap(range(iova, size)).unwrap();
                continue;
            }
            same(&rig);
            rig.hooks().fail(1);
            let failed = rig.split(iova + size - rig.space.granule(), Gap::Accept);
            assert!(
                failed.is_ok() || matches!(failed, Err(iommu::Error::Hardware { .. })),
                "{failed:?}"
            );
            rig.hooks().fail(0);
            same(&rig);
            rig.unmap(range(iova, size)).unwrap();
            same(&rig);
        }
    });
}

/// A tree that grows is written back before its new root is used.
pub fn new_roots_are_written_back<S: Subject>() {
    each::<S>(|format| {
        let inner = arena();
        let memory = NonCoherent::new(inner.clone());
        let mut tree = Tree::<S, _>::sapling(format, memory.clone(), inner);
        let granule = tree.space.granule();
        for page in tree.space.beyond(0) {
            tree.map(page, &[span(granule, granule)], PROT).unwrap();
            let found = survey::translate(&tree.walker(), &memory, Iova::new(page));
            assert_eq!(found.map(|found| found.paddr.get()), Some(granule));
        }
        assert_eq!(tree.leaves_in(&memory), tree.leaves());
    });
}

/// However many spans of one call write into a cache line, it is written back once.
pub fn scattered_pages_write_each_line_back_once<S: Subject>() {
    each::<S>(|format| {
        let (mut tree, memory) = tree::<S>(format);
        let (granule, chunk) = (tree.space.granule(), lg2::size(tree.space.chunk()));
        let start = tree.space.aperture.start().get() + 2 * chunk;
        let count = (chunk / granule).min(100);
        // The table exists, with a page at its end.
        tree.map(start + chunk - granule, &[span(0, granule)], PROT).unwrap();
        memory.lines();
        let spans: Vec<_> = (0..count - 4).map(|n| span((2 * n + 1) * granule, granule)).collect();
        tree.map(start + 3 * granule, &spans, PROT).unwrap();
        let lines = memory.lines();
        let bytes = (count - 4) << <WordOf<S> as Word>::LG2_BYTES;
        let least = usize::try_from(bytes.div_ceil(64)).unwrap();
        let most = |lines: &BTreeMap<usize, u32>| lines.values().max().copied();
        assert_eq!(most(&lines), Some(1), "{lines:?}");
        // One more where they begin within a line, and those of links that have no bit to say that
        // they were written back.
        let links = usize::try_from(tree.space.top_level).unwrap();
        assert!((least..=least + 1 + links).contains(&lines.len()), "{lines:?}");
    });
}

/// A thread that installed a table and did not write the link back yet, at each link on the way: a
/// thread that maps below meanwhile finds its own mapping in hardware when its call returns.
pub fn who_maps_below_a_link_in_the_cache_writes_it_back<S: Subject>() {
    each::<S>(|format| {
        // A page beside the other one, and one that shares the upper tables only.
        for level in 0..=Tree::<S>::new(format.clone()).space.top_level {
            let (tree, memory) = tree::<S>(format.clone());
            let granule = tree.space.granule();
            let start = tree.space.aperture.start().get();
            let far =
                if level == 0 { granule } else { lg2::size(tree.space.shift(level).unwrap()) };
            if !tree.space.aperture.covers(range(start, far + granule)) {
                continue;
            }
            let walker = tree.walker();
            let (reached, has_reached) = channel();
            let (go_on, may_go_on) = channel();
            thread::scope(|scope| {
                let (table, stalled) = (&tree.table, memory.clone());
                // Dropped before the thread is waited for, also where this one panics.
                let go_on = go_on;
                scope.spawn(move || {
                    let owned = claim(table, range(start, granule));
                    let thread = thread::current().id();
                    stalled.stall(Stall { thread, reached, go_on: may_go_on });
                    owned.map_spans(Iova::new(start), &[span(granule, granule)], PROT).unwrap();
                });
                has_reached.recv().unwrap();
                let owned = claim(table, range(start + far, granule));
                let at = Iova::new(start + far);
                owned.map_spans(at, &[span(3 * granule, granule)], PROT).unwrap();
                let found = survey::translate(&walker, &memory, at);
                go_on.send(()).unwrap();
                let found = found.map(|found| found.paddr.get());
                assert_eq!(found, Some(3 * granule), "level {level}: not in memory yet");
            });
            assert_eq!(tree.leaves_in(&memory), tree.leaves());
        }
    });
}
