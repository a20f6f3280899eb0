//! Random operations, against an interval map and brute force.

use dmaspan::io_pgtable::{Error, Format};
use dmaspan::{Iova, IovaRange, Prot, Span, lg2};

use super::space::{Space, range, span};
use super::tree::{Tree, granted};
use super::{Subject, each, share};
use crate::model::{Coverage, IntervalModel, optimal_leaf_census};
use crate::rng::Rng;

/// One operation, in granules from the start of a window.
#[derive(Clone, Debug)]
enum Op {
    Map { at: u64, spans: Vec<(u64, u64)>, prot: Prot },
    MapPages { at: u64, paddr: u64, lg2: u32, count: u64, prot: Prot },
    Unmap { at: u64, len: u64 },
    UnmapPages { at: u64, len: u64 },
    Reclaim { at: u64, len: u64 },
}

/// Draws operations of a size that fits the tree.
struct Draw {
    rng: Rng,
    /// Granules in a piece of the window: a table's where there is room.
    chunk: u64,
    /// Granules of memory.
    memory: u64,
    /// Leaf sizes to ask for, log2 of granules.
    sizes: Vec<u32>,
    /// Permissions to ask for.
    prots: Vec<Prot>,
}

impl Draw {
    /// Granules that operations reach: five chunks to begin in, and five spans of up to three more.
    const CHUNKS: u64 = 22;

    fn new<F: Format>(format: &F, seed: u64) -> Self {
        let space = Space::of(format);
        let some = [Prot::READ, Prot::READ_WRITE, Prot::READ_WRITE | Prot::CACHE];
        let chunk = space.chunk() - space.granule_lg2;
        let sizes = space.sizes().into_iter().map(|lg2| lg2 - space.granule_lg2);
        Self {
            rng: Rng::new(seed),
            chunk: lg2::size(chunk),
            memory: lg2::size(space.output_bits - space.granule_lg2),
            sizes: sizes.filter(|&lg2| lg2 <= chunk).collect(),
            prots: some.into_iter().filter(|&prot| !format.refuses(prot)).collect(),
        }
    }

    /// A place that is anywhere, or at the start of a chunk.
    fn at(&mut self) -> u64 {
        match self.rng.below(5) {
            0..3 => self.rng.below(5 * self.chunk),
            _ => self.rng.below(5) * self.chunk,
        }
    }

    /// A length that is small, or near the size of a chunk.
    fn len(&mut self) -> u64 {
        match self.rng.below(7) {
            0..4 => 1 + self.rng.below(19),
            4..6 => self.chunk - 3 + self.rng.below(6),
            _ => 1 + self.rng.below(3 * self.chunk - 1),
        }
    }

    fn prot(&mut self) -> Prot {
        self.prots[usize::try_from(self.rng.below(self.prots.len() as u64)).unwrap_or(0)]
    }

    /// Memory of `len` granules, or of as many as there are behind it.
    fn span(&mut self) -> (u64, u64) {
        let (paddr, len) = (self.at(), self.len());
        (paddr, len.min(self.memory - paddr))
    }

    fn op(&mut self) -> Op {
        let at = self.at();
        match self.rng.below(11) {
            0..3 => {
                let spans = (0..=self.rng.below(5)).map(|_| self.span()).collect();
                Op::Map { at, spans, prot: self.prot() }
            }
            3..5 => {
                // Mostly pages, and sometimes leaves of another size.
                let which = self.rng.below(2 * self.sizes.len() as u64);
                let which = usize::try_from(which).unwrap_or(0);
                let lg2 = self.sizes.get(which).copied().unwrap_or(0);
                let (paddr, len) = self.span();
                let [at, paddr] = [at, paddr].map(|place| lg2::align_down(place, lg2));
                let count = (len >> lg2).max(1);
                Op::MapPages { at, paddr, lg2, count, prot: self.prot() }
            }
            5..8 => Op::Unmap { at, len: self.len() },
            8..10 => Op::UnmapPages { at, len: self.len() },
            _ => Op::Reclaim { at, len: self.len() },
        }
    }
}

/// A tree, and what it should say.
struct Pair<S: Subject> {
    tree: Tree<S>,
    model: IntervalModel,
    window: IovaRange,
    /// What was done so far, for the report of a failure.
    done: Vec<Op>,
}

impl<S: Subject> Pair<S> {
    /// Around a border between tables of an upper level, or at the end of the aperture.
    fn new(format: S::Format, place: u64) -> Self {
        let tree = Tree::<S>::new(format);
        let space = &tree.space;
        let chunk = lg2::size(space.chunk());
        let bytes = Draw::CHUNKS * chunk;
        let borders = [2, 1].into_iter().filter_map(|level| space.nth(space.shift(level)?, 1));
        let around = borders.map(|border| border.saturating_sub(2 * chunk)).find(|&start| {
            let inside = start >= space.aperture.start().get();
            inside && space.aperture.last().get() - start >= bytes
        });
        let end = space.aperture.last().get() - (bytes - 1);
        let start = if place == 0 { around.unwrap_or(end) } else { end };
        let window = range(start, bytes);
        Self { tree, model: IntervalModel::new(), window, done: Vec::new() }
    }

    fn iova(&self, at: u64) -> u64 {
        self.window.start().get() + (at << self.tree.space.granule_lg2)
    }

    fn range(&self, at: u64, len: u64) -> IovaRange {
        range(self.iova(at), len << self.tree.space.granule_lg2)
    }

    fn spans(&self, spans: &[(u64, u64)]) -> Vec<Span> {
        let lg2 = self.tree.space.granule_lg2;
        spans.iter().map(|&(paddr, len)| span(paddr << lg2, len << lg2)).collect()
    }

    fn apply(&mut self, op: Op) {
        match &op {
            Op::Map { at, spans, prot } => {
                let (iova, spans) = (self.iova(*at), self.spans(spans));
                let grant = granted(self.tree.table.format(), *prot);
                let expected = self.model.map(Iova::new(iova), &spans, grant);
                match self.tree.map_over_empty_tables(iova, &spans, *prot) {
                    Ok(()) => assert!(expected.is_ok(), "overlap was not refused"),
                    Err(error) => {
                        assert!(matches!(error, Error::Occupied { .. }), "{error}");
                        assert!(expected.is_err(), "{error}");
                    }
                }
            }
            Op::MapPages { at, paddr, lg2, count, prot } => {
                self.map_pages(*at, *paddr, *lg2, *count, *prot);
            }
            Op::Unmap { at, len } => self.unmap(self.range(*at, *len)),
            Op::UnmapPages { at, len } => self.unmap_pages(self.range(*at, *len), *len),
            Op::Reclaim { at, len } => {
                let range = self.range(*at, *len);
                let retired = self.tree.table.whole().reclaim(range).unwrap();
                super::tree::free(&self.tree.table, retired);
            }
        }
        self.done.push(op);
    }

    fn map_pages(&mut self, at: u64, paddr: u64, lg2: u32, count: u64, prot: Prot) {
        let lg2 = lg2 + self.tree.space.granule_lg2;
        let (size, bytes) = (lg2::size(lg2), count << lg2);
        let iova = lg2::align_down(self.iova(at), lg2);
        let paddr = paddr << self.tree.space.granule_lg2;
        let (done, result) = self.tree.map_pages(iova, paddr, size, count, prot);
        let mapped = self.model.runs(range(iova, bytes)).first().map(|run| run.iova.start().get());
        // Leaves before the first that is in the way.
        let room = mapped.map_or(bytes, |first| lg2::align_down(first - iova, lg2));
        match result {
            Ok(()) => assert_eq!((done, room), (bytes, bytes)),
            // Tables that are missing behind a collision are not made, so it may stop before it.
            Err(Error::Occupied { .. }) => assert!(done <= room && room < bytes, "{result:?}"),
            Err(Error::EmptyTable { block }) => {
                assert!(size > self.tree.space.granule() && done <= room);
                assert!(block.intersection(range(iova, bytes)).is_some());
            }
            Err(error) => panic!("{error}"),
        }
        if done > 0 {
            let grant = granted(self.tree.table.format(), prot);
            self.model.map(Iova::new(iova), &[span(paddr, done)], grant).unwrap();
        }
    }

    /// Whether one leaf has this address and the one before it.
    fn cuts(&mut self, iova: u64) -> bool {
        let Some(before) = iova.checked_sub(1).map(Iova::new) else { return false };
        let whole = self.tree.table.whole();
        let Some(pair) = IovaRange::new(before, Iova::new(iova)) else { return false };
        // A leaf counts where it begins: none begins at the second address of one leaf.
        let begins =
            |first: Iova| IovaRange::new(first, pair.last()).map(|r| whole.census(r).total());
        whole.iova_to_phys(before).is_some()
            && whole.iova_to_phys(pair.last()).is_some()
            && begins(pair.last()) == Some(0)
    }

    /// Whether a leaf reaches over one end of the range: then it cannot be unmapped.
    fn is_cut(&mut self, range: IovaRange) -> bool {
        let behind = range.last().checked_add(1);
        self.cuts(range.start().get()) || behind.is_some_and(|behind| self.cuts(behind.get()))
    }

    fn unmap(&mut self, range: IovaRange) {
        let covered = self.model.covered(range);
        let cut = self.is_cut(range);
        match self.tree.unmap_by::<3>(range) {
            Ok(spans) => {
                assert_eq!(covered, Coverage::All);
                assert!(!cut);
                assert_eq!(spans, self.model.unmap(range));
            }
            Err(Error::Hole { hole }) => {
                assert!(self.model.lookup(hole.start()).is_none());
                assert_ne!(covered, Coverage::All);
            }
            Err(Error::WouldSplit { leaf }) => {
                assert!(cut && !range.covers(leaf) && range.intersection(leaf).is_some());
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn unmap_pages(&mut self, range: IovaRange, count: u64) {
        let start = range.start().get();
        let gone = self.tree.unmap_pages(start, self.tree.space.granule(), count);
        if gone.bytes > 0 {
            let gone = super::space::range(start, gone.bytes);
            assert_eq!(self.model.covered(gone), Coverage::All);
            self.model.unmap(gone);
        }
        let next = Iova::new(start.wrapping_add(gone.bytes));
        match gone.result {
            Ok(()) => assert_eq!(gone.bytes - 1, range.len_less_one()),
            Err(Error::Hole { hole }) => {
                assert!(hole.contains(next));
                assert!(self.model.lookup(next).is_none());
            }
            Err(Error::WouldSplit { leaf }) => assert!(leaf.contains(next) && !range.covers(leaf)),
            Err(error) => panic!("{error}"),
        }
    }
}

impl<S: Subject> Drop for Pair<S> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("in the window {:?}, behind the operations {:?}", self.window, self.done);
        }
    }
}

/// Table, walker and model say the same whatever was mapped, unmapped and reclaimed, and no table
/// leaks (random_map of generic_pt).
pub fn random_operations_agree_with_an_interval_map<S: Subject>() {
    each::<S>(|format| {
        let mut rng = Rng::new(5);
        for seed in 0..share::<S>(60) {
            let mut pair = Pair::<S>::new(format.clone(), seed % 2);
            let mut draw = Draw::new(&format, seed);
            for _ in 0..=rng.below(40) {
                pair.apply(draw.op());
            }
            let Pair { tree, model, window, .. } = &mut pair;
            tree.check(model, *window, &mut rng);
            let (arena, everything) = (tree.arena.clone(), window.to_owned());
            for run in model.runs(everything) {
                tree.unmap(run.iova).unwrap();
            }
            tree.reclaim();
            assert_eq!(arena.tables(), 1, "only the root is left");
            drop(pair);
            assert_eq!(arena.tables(), 0, "tables leaked");
        }
    });
}

/// Any mapping is made of as few leaves as brute force finds: the sizes are chosen from the
/// alignment of both addresses, and the room (best_pgsize of generic_pt).
pub fn every_mapping_has_the_fewest_leaves<S: Subject>() {
    each::<S>(|format| {
        let space = Space::of(&format);
        let chunk = lg2::size(space.chunk() - space.granule_lg2);
        for seed in 0..share::<S>(60) {
            let mut pair = Pair::<S>::new(format.clone(), seed % 2);
            let mut draw = Draw::new(&format, seed);
            let at = draw.at();
            let iova = pair.iova(at);
            let mut next = iova >> space.granule_lg2;
            let congruent = seed % 4 < 2;
            let count = draw.rng.below(5) + 1;
            let spans: Vec<_> = (0..count)
                .map(|_| {
                    let (paddr, len) = draw.span();
                    // Half of the cases have memory that is aligned as its IOVAs are.
                    let offset = next % (2 * chunk) + (paddr & (7 * chunk));
                    let paddr = if congruent { offset } else { paddr };
                    let len = len.min(draw.memory - paddr);
                    next = next.wrapping_add(len);
                    (paddr, len)
                })
                .collect();
            let spans = pair.spans(&spans);
            pair.tree.map(iova, &spans, Prot::READ_WRITE).unwrap();
            let census = pair.tree.census();
            let fewest = optimal_leaf_census(Iova::new(iova), &spans, space.page_sizes).unwrap();
            assert_eq!(census, fewest.into_iter().collect::<Vec<_>>());
            let leaves = pair.tree.leaves().len() as u64;
            assert_eq!(leaves, census.iter().map(|(_, count)| count).sum::<u64>());
        }
    });
}
