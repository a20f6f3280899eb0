//! Trees that get more levels while devices use them.

use dmaspan::io_pgtable::{Arena, Error, Format, Gap, PageTable, TableMemory};
use dmaspan::iommu::{self, Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Iova, PhysAddr, Promise, Span, lg2};
use parking_lot::Mutex;

use super::rig::Rig;
use super::space::{Space, range, span};
use super::survey;
use super::tree::{PROT, Tree, WordOf, arena};
use super::{Subject, each, share};
use crate::fault::{Faults, Faulty};
use crate::walker::{Switch, TableWords};

/// A driver that programs a new root under its lock, into hardware without caches.
struct Driver<S: Subject> {
    format: S::Format,
    arena: Arena,
    programmed: Mutex<Programmed>,
}

struct Programmed {
    /// The root and its level.
    root: (PhysAddr, u32),
    /// Whether hardware takes another one.
    takes: Switch,
}

impl<S: Subject> Driver<S> {
    /// Where hardware finds `iova`. It never reads a table that was freed.
    #[track_caller]
    fn translate(&self, iova: u64) -> Option<u64> {
        let programmed = self.programmed.lock();
        let (root, level) = programmed.root;
        if level < self.format.geometry().top_level && iova >> S::Format::shift(level + 1) != 0 {
            // Beyond the reach of the root.
            return None;
        }
        let walker = S::walker(&self.format, root, level);
        survey::translate(&walker, &self.arena, Iova::new(iova)).map(|found| found.paddr.get())
    }

    fn takes(&self, takes: Switch) {
        self.programmed.lock().takes = takes;
    }
}

#[expect(unsafe_code, reason = "hardware without caches has nothing to forget")]
// SAFETY: 1. Every translation walks anew. 2. As 1. 3. The root is programmed under the lock under
// which it is asked for, and used under it.
unsafe impl<S: Subject> IommuOps for &Driver<S> {
    type Address = PhysAddr;

    fn invalidate(&self, _what: &Invalidation<'_>) -> Result<(), HardwareError> {
        Ok(())
    }

    fn root_changed(
        &self,
        _: Promise<'_>,
        current: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        let mut programmed = self.programmed.lock();
        let read = self.arena.read_u64(programmed.root.0);
        read.expect("the root that hardware walks is a table");
        if programmed.takes == Switch::Off {
            return Err(HardwareError { what: "hardware keeps its root", status: 0 });
        }
        programmed.root = current();
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        8
    }
}

type Grown<'d, S, M> = Rig<S, M, &'d Driver<S>>;

/// A new tree in `memory`, and its hardware; and what is done with them.
fn with_domain<S: Subject, M: TableMemory<WordOf<S>>>(
    format: S::Format,
    memory: M,
    arena: &Arena,
    case: impl FnOnce(&Grown<'_, S, M>, &Driver<S>),
) {
    let table = PageTable::new(format.clone(), memory).unwrap();
    let programmed = Programmed { root: table.root_and_level(), takes: Switch::On };
    let driver = Driver::<S> { format, arena: arena.clone(), programmed: Mutex::new(programmed) };
    let (domain, space) = (Domain::new(table, &driver).unwrap(), Space::of(&driver.format));
    let rig = Rig { domain, arena: arena.clone(), space };
    case(&rig, &driver);
    drop(rig);
    assert_eq!(arena.tables(), 0, "all tables were given back");
}

/// Hardware finds a mapping as soon as the call returns, and the older ones too: by a mapping in
/// each level's reach, and by one that goes over all of the borders at once.
pub fn hardware_has_a_new_root_before_it_is_needed<S: Subject>() {
    each::<S>(|format| {
        let (space, first) = (Space::of(&format), format.first_top_level());
        let granule = space.granule();
        let beyond = space.beyond(first + 1);
        let mut pages = vec![space.aperture.start().get()];
        pages.extend(&beyond);
        let arena = arena();
        with_domain::<S, _>(format.clone(), arena.clone(), &arena, |rig, driver| {
            for (n, &page) in (1u64..).zip(&pages) {
                rig.map(page, &[span(n * granule, granule)], PROT).unwrap();
                for (n, &page) in (1u64..).zip(&pages[..to_usize(n)]) {
                    assert_eq!(driver.translate(page), Some(n * granule), "{page:#x}");
                }
            }
            for &page in &pages {
                rig.unmap(range(page, granule)).unwrap();
                assert_eq!(driver.translate(page), None);
            }
        });
        // Two pages around each border.
        for &border in beyond.iter().rev() {
            with_domain::<S, _>(format.clone(), arena.clone(), &arena, |rig, driver| {
                let start = border - granule;
                let spans = [span(3 * granule, granule), span(granule, granule)];
                rig.map(start, &spans, PROT).unwrap();
                assert_eq!(driver.translate(start), Some(3 * granule));
                assert_eq!(driver.translate(border), Some(granule));
                assert_eq!(rig.unmap(range(start, 2 * granule)).unwrap(), spans);
                assert_eq!(driver.translate(start), None);
            });
        }
    });
}

fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap()
}

/// A leaf of each size goes to the start of a new tree, also one that is larger than all that the
/// first root translates.
pub fn the_first_leaf_may_be_larger_than_the_tree<S: Subject>() {
    each::<S>(|format| {
        let space = Space::of(&format);
        for lg2 in space.sizes() {
            let (arena, size) = (arena(), lg2::size(lg2));
            let start = space.aperture.start().get();
            with_domain::<S, _>(format.clone(), arena.clone(), &arena, |rig, driver| {
                rig.map(start, &[span(0, size)], PROT).unwrap();
                assert_eq!(driver.translate(start + (size - 1)), Some(size - 1));
                assert_eq!(rig.unmap(range(start, size)).unwrap(), [span(0, size)]);
                assert_eq!(driver.translate(start), None);
            });
        }
    });
}

/// Hardware that keeps its old root: the mapping is refused and taken back, and what the old root
/// translates goes when it is unmapped, since that root never leaves the tree.
pub fn a_refused_root_leaves_the_old_one_in_use<S: Subject>() {
    each::<S>(|format| {
        let (space, first) = (Space::of(&format), format.first_top_level());
        let granule = space.granule();
        for page in space.beyond(first + 1) {
            let (arena, start) = (arena(), space.aperture.start().get());
            with_domain::<S, _>(format.clone(), arena.clone(), &arena, |rig, driver| {
                rig.map(start, &[span(granule, granule)], PROT).unwrap();
                driver.takes(Switch::Off);
                let error = rig.map(page, &[span(0, granule)], PROT).unwrap_err();
                assert!(matches!(error, iommu::Error::Hardware { .. }), "{error}");
                assert_eq!(driver.translate(start), Some(granule));
                rig.unmap(range(start, granule)).unwrap();
                assert_eq!(driver.translate(start), None);
                // All that the old root translates, by as many leaves as it has entries.
                let (block, leaf) = (S::Format::shift(first + 1), S::Format::shift(first));
                if space.page_sizes & lg2::size(leaf) == 0 || !space.has_memory(block, 1) {
                    return;
                }
                let (block, leaf) = (lg2::size(block), lg2::size(leaf));
                let leaves: Vec<_> =
                    (0..block / leaf).rev().map(|n| span(n * leaf, leaf)).collect();
                domain_is_as_before(rig, driver, start, &leaves);
                driver.takes(Switch::On);
                rig.map(page, &[span(granule, granule)], PROT).unwrap();
                assert_eq!(driver.translate(page), Some(granule));
            });
        }
    });
}

/// A domain whose new root is refused takes its tables back, and leaves no empty tables behind the
/// old root, which is the only one that has to stay.
pub fn a_refused_root_takes_its_tables_with_it<S: Subject>() {
    each::<S>(|format| {
        let (space, first) = (Space::of(&format), format.first_top_level());
        let (block, leaf) = (S::Format::shift(first + 1), S::Format::shift(first));
        if !S::Format::GROWS
            || first == space.top_level
            || space.page_sizes & lg2::size(leaf) == 0
            || !space.has_memory(block, 3)
        {
            return;
        }
        let (arena, start) = (arena(), space.aperture.start().get());
        with_domain::<S, _>(format.clone(), arena.clone(), &arena, |rig, driver| {
            let leaves = 3 << (block - leaf);
            let spans: Vec<_> =
                (0..leaves).rev().map(|n| span(n << leaf, lg2::size(leaf))).collect();
            driver.takes(Switch::Off);
            let error = rig.map(start, &spans, PROT).unwrap_err();
            assert!(matches!(error, iommu::Error::Hardware { .. }), "{error}");
            let grown = rig.domain.root_and_level().1 - first;
            assert!(grown > 0);
            assert_eq!(arena.tables(), to_usize(u64::from(1 + grown)));
        });
    });
}

/// Maps and unmaps leaves that fill the root which hardware walks.
#[track_caller]
fn domain_is_as_before<S: Subject, M: TableMemory<WordOf<S>>>(
    rig: &Grown<'_, S, M>,
    driver: &Driver<S>,
    start: u64,
    leaves: &[Span],
) {
    let block: u64 = leaves.iter().map(|leaf| leaf.len()).sum();
    rig.map(start, leaves, PROT).unwrap();
    assert_eq!(driver.translate(start), leaves.first().map(|leaf| leaf.paddr().get()));
    assert_eq!(rig.split(start, Gap::Accept), Ok(()));
    rig.unmap(range(start, block)).unwrap();
    for n in 0..4 {
        let at = start + n * (block / 4);
        assert_eq!(driver.translate(at), None, "hardware finds what was unmapped");
    }
    // A leaf in the place of all of it would need the root that hardware refused.
    let is_leaf = rig.space.page_sizes & block != 0;
    assert_eq!(rig.map(start, &[span(0, block)], PROT).is_err(), is_leaf);
    assert_eq!(driver.translate(start), (!is_leaf).then_some(0));
    if !is_leaf {
        rig.unmap(range(start, block)).unwrap();
    }
    assert_eq!(driver.translate(start), None);
}

/// Everything beyond the root's reach is a hole to every operation, and none of them makes the tree
/// grow.
pub fn beyond_the_root_is_a_hole<S: Subject>() {
    each::<S>(|format| {
        let (arena, first) = (arena(), format.first_top_level());
        let tracks = format.tracks_dirty();
        let mut tree = Tree::<S>::sapling(format, arena.clone(), arena);
        let (granule, root) = (tree.space.granule(), tree.table.root_and_level());
        let last = tree.space.nth_back(tree.space.granule_lg2, 0);
        let beyond: Vec<_> = tree.space.beyond(first + 1).into_iter().chain(last).collect();
        if !S::Format::GROWS || first == tree.space.top_level {
            return;
        }
        let start = tree.space.aperture.start().get();
        tree.map(start, &[span(granule, granule)], PROT).unwrap();
        for page in beyond {
            let there = range(page, granule);
            let is_hole = |error: Error| matches!(error, Error::Hole { .. });
            assert_eq!(tree.lookup(page), None);
            assert!(is_hole(tree.unmap(there).unwrap_err()));
            assert!(is_hole(tree.unmap_pages(page, granule, 1).result.unwrap_err()));
            assert!(is_hole(tree.protect(there, PROT).unwrap_err()));
            let whole = tree.table.whole();
            assert_eq!((whole.walk(there).count(), whole.census(there).sizes().count()), (0, 0));
            assert!(whole.reclaim(there).unwrap().is_empty());
            if tracks {
                let (words, forgotten) = tree.clear_dirty(there, granule).unwrap();
                assert_eq!((words, forgotten), (vec![0], (None, 0)));
            }
        }
        assert_eq!(tree.contents().0.len(), 1);
        assert_eq!(tree.table.root_and_level(), root);
        tree.unmap(range(start, granule)).unwrap();
        let (arena, format) = (tree.arena.clone(), tree.table.format().clone());
        drop(tree);
        with_domain::<S, _>(format, arena.clone(), &arena, |rig, _| {
            let split = rig.split(lg2::size(S::Format::shift(first + 1)), Gap::Accept);
            assert!(matches!(split, Err(iommu::Error::Table(Error::Hole { .. }))), "{split:?}");
        });
    });
}

/// Where no table is left for a new root, or below it, everything is as before.
pub fn a_tree_that_cannot_grow_stays_as_it_is<S: Subject>() {
    each::<S>(|format| {
        let (space, first) = (Space::of(&format), format.first_top_level());
        let granule = space.granule();
        for page in space.beyond(first + 1) {
            let (arena, faults) = (arena(), Faults::none());
            let memory = Faulty::new(arena.clone(), &faults);
            let mut tree = Tree::<S, _>::sapling(format.clone(), memory, arena.clone());
            let start = space.aperture.start().get();
            tree.map(start, &[span(granule, granule)], PROT).unwrap();
            let state = |tree: &mut Tree<S, _>| {
                (tree.contents(), arena.tables(), tree.table.root_and_level())
            };
            let before = state(&mut tree);
            // A leaf larger than the tree over what is mapped is refused before the tree grows.
            for lg2 in space.sizes().into_iter().filter(|&lg2| lg2 > S::Format::shift(first + 1)) {
                let occupied = Error::Occupied { leaf: range(start, granule) };
                assert_eq!(tree.map(start, &[span(0, lg2::size(lg2))], PROT), Err(occupied));
                assert_eq!(state(&mut tree), before);
            }
            let steps = faults.sweep(|n| match tree.map(page, &[span(0, granule)], PROT) {
                Ok(()) => assert_eq!(tree.lookup(page), Some(0)),
                Err(error) => {
                    assert!(matches!(error, Error::NoTables { .. }), "step {n}: {error}");
                    assert_eq!(state(&mut tree), before, "step {n}");
                }
            });
            assert!(steps > 0, "tables were missing");
            // So many spans that their tables are not counted one by one, on both sides.
            let mut tree = Tree::<S, _>::sapling(format.clone(), arena.clone(), arena.clone());
            let spans: Vec<_> = (0..64).map(|n| span((2 * n + 1) * granule, granule)).collect();
            tree.map(page - 32 * granule, &spans, PROT).unwrap();
            assert_eq!(tree.lookup(page), Some(65 * granule));
        }
    });
}

/// Threads that need levels of different heights at once: each finds its mapping in hardware when
/// its call returns, and no table is lost.
pub fn threads_grow_a_tree_together<S: Subject>() {
    each::<S>(|format| {
        let (space, first) = (Space::of(&format), format.first_top_level());
        let granule = space.granule();
        let mut pages = vec![space.aperture.start().get()];
        pages.extend(space.beyond(first + 1));
        // Two threads for each level.
        let pages: Vec<_> = pages.iter().flat_map(|&page| [page, page + granule]).collect();
        for _ in 0..share::<S>(60) {
            let (arena, start) = (arena(), std::sync::Barrier::new(pages.len()));
            with_domain::<S, _>(format.clone(), arena.clone(), &arena, |rig, driver| {
                std::thread::scope(|scope| {
                    for (n, &page) in (1u64..).zip(&pages) {
                        let start = &start;
                        scope.spawn(move || {
                            start.wait();
                            rig.map(page, &[span(n * granule, granule)], PROT).unwrap();
                            assert_eq!(driver.translate(page), Some(n * granule), "{page:#x}");
                        });
                    }
                });
                for (n, &page) in (1u64..).zip(&pages) {
                    let gone = rig.unmap(range(page, granule)).unwrap();
                    assert_eq!(gone, [span(n * granule, granule)]);
                    assert_eq!(driver.translate(page), None);
                }
            });
        }
    });
}
