//! Bitmaps of what devices wrote are exact to the leaf, and nothing is ever lost.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use dmaspan::io_pgtable::{
    Arena, ArenaList, DirtyBitmap, Error, Format, Rest, Retired, UnmappedSpans,
};
use dmaspan::{Iova, IovaRange, Span, SpanBuf, lg2};

use super::rig::Rig;
use super::space::{range, span};
use super::survey::Seen;
use super::tree::{PROT, Tree, claim, free, marks_of};
use super::{Subject, each, each_with_marks, share};
use crate::modelled::take;
use crate::rng::Rng;
use crate::sanitizer::joined;
use crate::walker::{Access, TableWords, Walker as _};

/// What devices wrote since it was last cleared, leaf by leaf.
struct Written {
    leaves: Vec<(Seen, bool)>,
}

impl Written {
    fn of<S: Subject>(tree: &Tree<S>) -> Self {
        Self { leaves: tree.leaves().into_iter().map(|leaf| (leaf, false)).collect() }
    }

    fn write(&mut self, iova: Iova) {
        let found = self.leaves.iter_mut().find(|(leaf, _)| leaf.range.contains(iova));
        found.unwrap().1 = true;
    }

    /// The bits of a bitmap for `range`, one for `granule` bytes each.
    fn bits(&self, range: IovaRange, granule: u64) -> Vec<u64> {
        let count = range.len_less_one() / granule + 1;
        let mut words = vec![0u64; usize::try_from(count.div_ceil(64)).unwrap()];
        for (leaf, _) in self.leaves.iter().filter(|(_, dirty)| *dirty) {
            let Some(part) = leaf.range.intersection(range) else { continue };
            let bit = |iova: Iova| (iova.get() - range.start().get()) / granule;
            for bit in bit(part.start())..=bit(part.last()) {
                words[usize::try_from(bit / 64).unwrap()] |= 1 << (bit % 64);
            }
        }
        words
    }

    /// Takes the marks of all leaves away that `range` covers.
    fn clear(&mut self, range: IovaRange) {
        for (leaf, dirty) in &mut self.leaves {
            *dirty &= !range.covers(leaf.range);
        }
    }
}

/// Writes as a device does that has nothing cached.
#[track_caller]
fn write<S: Subject>(tree: &Tree<S>, iova: Iova) {
    let found = tree.walker().walk(&tree.arena, iova, Access::Write).unwrap();
    assert_eq!(found.clean, found.update.is_some());
    if let Some(update) = found.update {
        let before = tree.arena.exchange_u64(update.entry_paddr, update.old, update.new);
        assert_eq!(before, Ok(update.old));
    }
}

/// Maps pages, a leaf of every size that has room, and pages again, with a hole in between.
fn mixed<S: Subject>(tree: &mut Tree<S>) -> IovaRange {
    let (granule, chunk) = (tree.space.granule(), lg2::size(tree.space.chunk()));
    let start = tree.space.aperture.start().get() + 5 * chunk;
    let spans = [span(3 * granule, granule), span(9 * granule, 2 * granule)];
    tree.map(start, &spans, PROT).unwrap();
    let spans = [span(11 * chunk - 3 * granule, 3 * granule), span(20 * chunk, chunk + chunk / 2)];
    tree.map(start + chunk - 3 * granule, &spans, PROT).unwrap();
    range(start, 3 * chunk)
}

/// A part of `range`, to the byte.
fn part(rng: &mut Rng, whole: IovaRange) -> IovaRange {
    let len = whole.len_less_one() + 1;
    let first = rng.below(len);
    range(whole.start().get() + first, 1 + rng.below(len - first))
}

/// Random writes and reads, of granules below, at and above the leaves' sizes, from any byte to any
/// byte: the bits are those of the leaves written since they were last cleared whole, no more and
/// no fewer, and a read that clears nothing says the same twice.
pub fn bitmaps_are_exact_to_the_leaf<S: Subject>() {
    let mut rng = Rng::new(23);
    each_with_marks::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let whole = mixed(&mut tree);
        let mut written = Written::of(&tree);
        for _ in 0..share::<S>(1000) {
            for _ in 0..rng.below(4) {
                let n = usize::try_from(rng.below(written.leaves.len() as u64)).unwrap();
                let leaf = written.leaves[n].0.range;
                let iova = leaf.start().wrapping_add(rng.next() & leaf.len_less_one());
                write(&tree, iova);
                written.write(iova);
            }
            let asked = if rng.below(3) == 0 { whole } else { part(&mut rng, whole) };
            // No more than some thousand bits.
            let least = lg2::floor(asked.len_less_one()).saturating_sub(12);
            let granule = lg2::size(least + u32::try_from(rng.below(14)).unwrap());
            let expected = written.bits(asked, granule);
            let mut words = Vec::new();
            for _ in 0..2 {
                let mut bits = marks_of(&mut words, asked, granule);
                tree.table.whole().read_dirty(asked, &mut bits).unwrap();
                assert_eq!(words, expected, "{asked} by {granule:#x}");
            }
            let (words, forgotten) = tree.clear_dirty(asked, granule).unwrap();
            let cleared =
                written.leaves.iter().filter(|(leaf, dirty)| *dirty && asked.covers(leaf.range));
            for (leaf, _) in cleared {
                let (range, leaf_sizes) = forgotten;
                assert!(range.is_some_and(|range| range.covers(leaf.range)));
                assert_ne!(leaf_sizes & (leaf.range.len_less_one() + 1), 0);
            }
            assert_eq!(words, expected, "{asked} by {granule:#x}");
            written.clear(asked);
        }
    });
}

/// The top of the aperture, to its last byte.
pub fn the_last_page_is_reported<S: Subject>() {
    each_with_marks::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let granule = tree.space.granule();
        let page = tree.space.nth_back(tree.space.granule_lg2, 0).unwrap();
        tree.map(page, &[span(0, granule)], PROT).unwrap();
        let last = tree.space.aperture.last();
        write(&tree, last);
        for (asked, expected) in [
            (range(last.get(), 1), vec![1]),
            (range(page - 3 * granule, 4 * granule), vec![0b1000]),
            (range(page - granule, 2 * granule), vec![0]),
        ] {
            let (words, _) = tree.clear_dirty(asked, granule).unwrap();
            assert_eq!(words, expected, "{asked}");
        }
    });
}

/// Unmaps with marks, by buffers of `ROOM` spans; `between` is called after each.
fn unmap_dirty<S: Subject, const ROOM: usize>(
    tree: &mut Tree<S>,
    asked: IovaRange,
    bits: &mut DirtyBitmap<'_>,
    mut between: impl FnMut(&mut Tree<S>, IovaRange),
) -> Vec<Span> {
    let mut room = SpanBuf::room::<ROOM>();
    let mut buf = SpanBuf::new(&mut room);
    let mut spans = Vec::new();
    let mut unmapped: UnmappedSpans<ArenaList> =
        tree.table.whole().unmap_dirty(asked, &mut buf, bits).unwrap();
    loop {
        take(&mut buf, &mut spans);
        free(&tree.table, unmapped.retired);
        let Some(rest) = unmapped.rest else { return spans };
        between(tree, rest.range());
        unmapped = tree.table.whole().resume_dirty(rest, &mut buf, bits);
    }
}

/// An unmap by small buffers reports every write up to the moment in which the translation went,
/// returns the spans, and frees the tables that a plain unmap frees.
pub fn an_unmap_by_batches_loses_no_write<S: Subject>() {
    fn run<S: Subject, const ROOM: usize>(format: &S::Format, rng: &mut Rng) {
        let [mut tree, mut twin] = [(); 2].map(|()| Tree::<S>::new(format.clone()));
        mixed(&mut tree);
        mixed(&mut twin);
        let mut written = Written::of(&tree);
        let runs = tree.contents().0.into_iter().map(|run| run.range);
        for run in joined(runs, tree.space.aperture) {
            let mut words = Vec::new();
            let granule = tree.space.granule();
            let mut bits = marks_of(&mut words, run, granule);
            let first = part(rng, run).start();
            write(&tree, first);
            written.write(first);
            let spans = unmap_dirty::<S, ROOM>(&mut tree, run, &mut bits, |tree, rest| {
                let iova = part(rng, rest).start();
                write(tree, iova);
                written.write(iova);
            });
            assert_eq!(spans, twin.unmap_by::<ROOM>(run).unwrap());
            assert_eq!(words, written.bits(run, granule));
            assert_eq!(tree.arena.tables(), twin.arena.tables(), "tables that were covered");
            assert_eq!(tree.contents(), twin.contents());
        }
        assert_eq!(tree.leaves(), []);
    }
    let mut rng = Rng::new(29);
    each_with_marks::<S>(|format| {
        run::<S, 1>(&format, &mut rng);
        run::<S, 2>(&format, &mut rng);
        run::<S, 64>(&format, &mut rng);
    });
}

/// Formats and configurations without marks, bitmaps of other ranges, and ranges of others: typed
/// errors, and nothing is changed.
pub fn bad_requests_for_marks_change_nothing<S: Subject>() {
    each::<S>(|format| {
        let tracks = format.tracks_dirty();
        let mut tree = Tree::<S>::new(format);
        let granule = tree.space.granule();
        let start = tree.space.aperture.start().get();
        let all = range(start, 4 * granule);
        tree.map(start, &[span(granule, 4 * granule)], PROT).unwrap();
        if tracks {
            write(&tree, all.start());
        }
        let before = (tree.contents(), tree.leaves());
        let mut room = SpanBuf::room::<4>();
        let mut buf = SpanBuf::new(&mut room);
        let covered = range(start, 3 * granule);
        let mut words = [0];
        let mut bits = DirtyBitmap::new(&mut words, covered, granule).unwrap();
        let refused = if tracks {
            Error::OutsideBitmap { range: all, covered }
        } else {
            Error::NoDirtyBits { range: all }
        };
        let whole = tree.table.whole();
        assert_eq!(whole.read_dirty(all, &mut bits), Err(refused));
        assert_eq!(whole.read_and_clear_dirty(all, &mut bits).map(drop), Err(refused));
        assert_eq!(whole.unmap_dirty(all, &mut buf, &mut bits).map(drop), Err(refused));
        let rest = whole.unmap(all, &mut SpanBuf::new(&mut [])).unwrap();
        assert!(rest.retired.is_empty());
        let rest: Option<Rest> = rest.rest;
        let resumed = whole.resume_dirty(rest.unwrap(), &mut buf, &mut bits);
        assert_eq!(resumed.rest.map(|rest| rest.range()), Some(all));
        assert!(resumed.retired.is_empty());
        let owned = claim(&tree.table, range(start + granule, granule));
        let outside: Result<Retired<ArenaList>, _> = owned.read_and_clear_dirty(covered, &mut bits);
        assert!(matches!(outside.map(drop), Err(Error::NotOwned { .. })));
        assert_eq!((buf.len(), words), (0, [0]));
        assert_eq!((tree.contents(), tree.leaves()), before);
        if tracks {
            let mut bits = DirtyBitmap::new(&mut words, all, granule).unwrap();
            tree.table.whole().read_dirty(all, &mut bits).unwrap();
            assert_ne!(words, [0], "the mark is still there");
        }
    });
}

/// Memory that a device writes and somebody copies.
struct Page {
    written: AtomicU64,
    copied: u64,
}

/// A device writes, one thread reads marks, clears them, syncs and copies what was reported, and
/// changes permissions in between: in the end the copy is complete, as a migration needs it.
pub fn no_write_escapes_a_reader_that_clears<S: Subject>() {
    each_with_marks::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let all = joined_mixed(&mut tree);
        let rig = Rig::<S>::with_config(tree, crate::iotlb::IotlbConfig::default());
        remap(&rig, all);
        let granule = rig.space.granule();
        let last_page = (all.len_less_one() / granule).min(511);
        let mut pages: Vec<_> =
            (0..=last_page).map(|_| Page { written: AtomicU64::new(0), copied: 0 }).collect();
        let written: Vec<_> = pages.iter().map(|page| &page.written).collect();
        let asked = range(all.start().get(), (last_page + 1) * granule);
        let done = AtomicBool::new(false);
        let iotlb = rig.iotlb().clone();
        let mut copies = vec![0; pages.len()];
        thread::scope(|scope| {
            let (done, written_by, iotlb) = (&done, &written, &iotlb);
            scope.spawn(move || {
                let mut rng = Rng::new(31);
                for _ in 0..share::<S>(20_000) {
                    let n = rng.below(last_page + 1);
                    let iova = Iova::new(asked.start().get() + n * granule + n % granule);
                    // A fault in the gap of a break is one that the device retries.
                    let _ = iotlb.with_translation(iova, Access::Write, |_| {
                        written_by[usize::try_from(n).unwrap()].fetch_add(1, Ordering::Relaxed);
                    });
                }
                done.store(true, Ordering::Release);
            });
            let mut round = 0u32;
            loop {
                // The last round begins when the device is done.
                let is_last = done.load(Ordering::Acquire);
                round += 1;
                if round.is_multiple_of(3) {
                    let more = if round.is_multiple_of(2) { PROT } else { PROT | NO_EXECUTE };
                    rig.protect(all, more).unwrap();
                }
                let mut words = [0; 8];
                let mut bits = DirtyBitmap::new(&mut words, asked, granule).unwrap();
                // Leaves that reach out of the range keep their marks: also good for a copy.
                rig.clear_dirty(asked, &mut bits).unwrap();
                for (n, copy) in copies.iter_mut().enumerate() {
                    if words[n / 64] >> (n % 64) & 1 == 1 {
                        *copy = written_by[n].load(Ordering::Relaxed);
                    }
                }
                if is_last {
                    break;
                }
            }
        });
        for (page, copy) in pages.iter_mut().zip(copies) {
            page.copied = copy;
            assert_eq!(page.written.load(Ordering::Relaxed), page.copied);
        }
    });
}

/// No instruction fetches: what is changed while the device goes on.
const NO_EXECUTE: dmaspan::Prot = dmaspan::Prot::NOEXEC;

/// Where the mixed mappings of a domain go. The tree stays empty: a domain begins so.
fn joined_mixed<S: Subject>(tree: &mut Tree<S>) -> IovaRange {
    let (granule, chunk) = (tree.space.granule(), lg2::size(tree.space.chunk()));
    let start = tree.space.aperture.start().get() + 5 * chunk - 40 * granule.min(chunk / 64);
    range(lg2::align_down(start, tree.space.granule_lg2), 2 * chunk)
}

/// Scattered pages up to the border of a chunk, and whatever leaves the rest takes.
fn remap<S: Subject>(rig: &Rig<S, Arena>, all: IovaRange) {
    let (granule, chunk) = (rig.space.granule(), lg2::size(rig.space.chunk()));
    let to_border = (5 * chunk + rig.space.aperture.start().get()) - all.start().get();
    let pages = to_border / granule;
    let mut spans: Vec<_> = (0..pages).map(|n| span((2 * n + 1) * granule, granule)).collect();
    spans.push(span(20 * chunk, all.len_less_one() + 1 - to_border));
    rig.map(all.start().get(), &spans, PROT).unwrap();
}
