//! Random operations of many threads in tables that they share, and a checker beside them.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::io_pgtable::{Error, MapUndone, Owned, PageTable};
use dmaspan::{IovaRange, PhysAddr, Span, SpanBuf, lg2};

use super::space::{Space, range, span};
use super::tree::{PROT, Tree, free, granted};
use super::{Subject, each, share, survey};
use crate::arena::Arena;
use crate::model::{Coverage, IntervalModel};
use crate::rng::Rng;

/// Threads that change their pieces.
const WORKERS: u64 = 4;
/// Chunks whose granules all threads have a part of.
const SHARED_CHUNKS: u64 = 2;
/// Operations of a worker in one round.
const STEPS: u64 = 60;
/// Granules next to each other in such a chunk that one thread has.
const LANE: u64 = 3;

type Table<S> = PageTable<<S as Subject>::Format, Arena>;

/// The pieces of the worker with this number, or of the checker, whose number is behind theirs: a
/// lane of every few granules of the first chunk, one lane of the second, which is empty now and
/// then, and a chunk of its own.
fn pieces(space: &Space, base: u64, owner: u64) -> Vec<IovaRange> {
    let chunk = lg2::size(space.chunk());
    // The workers' lanes fit in a chunk, also of the smallest trees.
    let lane = LANE.min((chunk / WORKERS) >> space.granule_lg2) * space.granule();
    let round = (WORKERS + 1) * lane;
    let lanes = (0..chunk / round).map(|n| range(base + n * round + owner * lane, lane));
    let single = (owner < WORKERS).then(|| range(base + chunk + owner * lane, lane));
    let own = range(base + (SHARED_CHUNKS + owner) * chunk, chunk);
    lanes.chain(single).chain([own]).collect()
}

/// One thread's work.
struct Worker<'t, S: Subject> {
    table: &'t Table<S>,
    space: &'t Space,
    pieces: Vec<IovaRange>,
    model: IntervalModel,
    rng: Rng,
}

impl<'t, S: Subject> Worker<'t, S> {
    /// Begins in a chunk of which all workers need the same table at once, and goes on anywhere.
    fn work(mut self, start: &Barrier) -> IntervalModel {
        let single = self.pieces[self.pieces.len() - 2];
        start.wait();
        self.step(single);
        for _ in 0..STEPS {
            // The last pieces, the single lane and the chunk, most of the time.
            let count = self.pieces.len() as u64;
            let back = if self.rng.below(3) == 0 { count } else { 2 };
            let which = count - 1 - self.rng.below(back);
            let piece = self.pieces[usize::try_from(which).unwrap()];
            self.step(piece);
        }
        self.model
    }

    /// Does something to a part of a piece.
    fn step(&mut self, piece: IovaRange) {
        let owned = claim::<S>(self.table, piece);
        let part = self.part(piece);
        match self.rng.below(8) {
            0..3 => self.map(&owned, part),
            3 => self.map_pages(&owned, part),
            4 => self.unmap(&owned, part),
            5 => self.unmap(&owned, piece),
            6 => self.unmap_pages(&owned, part),
            _ => free(self.table, owned.reclaim(part).unwrap()),
        }
        for iova in [part.start(), part.last(), piece.last()] {
            let found = self.model.lookup(iova).map(|(paddr, _)| paddr);
            assert_eq!(owned.iova_to_phys(iova), found, "at {iova}");
        }
        let found: Vec<_> = owned.walk(piece).map(|run| (run.range, run.paddr)).collect();
        let runs = self.model.runs(piece);
        assert_eq!(found, runs.iter().map(|run| (run.iova, run.paddr)).collect::<Vec<_>>());
    }

    /// All of a piece, or some granules of it.
    fn part(&mut self, piece: IovaRange) -> IovaRange {
        let granules = (piece.len_less_one() >> self.space.granule_lg2) + 1;
        if self.rng.below(3) == 0 {
            return piece;
        }
        let first = self.rng.below(granules);
        let len = 1 + self.rng.below(granules - first);
        let granule = self.space.granule_lg2;
        range(piece.start().get() + (first << granule), len << granule)
    }

    /// As much memory as `part` has IOVAs, at any place or where large leaves are possible.
    fn memory(&mut self, part: IovaRange) -> Span {
        let chunk = lg2::size(self.space.chunk());
        let paddr = match self.rng.below(2) {
            0 => self.rng.below((8 * chunk) >> self.space.granule_lg2) << self.space.granule_lg2,
            _ => chunk + part.start().get() % chunk,
        };
        span(paddr, part.len_less_one() + 1)
    }

    fn map(&mut self, owned: &Owned<'_, S::Format, Arena>, part: IovaRange) {
        let span = self.memory(part);
        let grant = granted(self.table.format(), PROT);
        match owned.map_spans(part.start(), &[span], PROT) {
            Ok(()) => self.model.map(part.start(), &[span], grant).unwrap(),
            Err(MapUndone { error, retired }) => {
                free(self.table, retired);
                self.refused(error, part);
            }
        }
    }

    fn map_pages(&mut self, owned: &Owned<'_, S::Format, Arena>, part: IovaRange) {
        let span = self.memory(part);
        let granule = self.space.granule();
        let count = span.len() / granule;
        let (done, result) = owned.map_pages(part.start(), span.paddr(), granule, count, PROT);
        if done > 0 {
            let mapped = Span::new(span.paddr(), done).unwrap();
            let grant = granted(self.table.format(), PROT);
            self.model.map(part.start(), &[mapped], grant).unwrap();
        }
        if let Err(error) = result {
            self.refused(error, part);
        }
    }

    fn refused(&self, error: Error, part: IovaRange) {
        match error {
            Error::Occupied { .. } => assert_ne!(self.model.covered(part), Coverage::None),
            Error::EmptyTable { block } => assert!(block.intersection(part).is_some()),
            error => panic!("{error}"),
        }
    }

    fn unmap(&mut self, owned: &Owned<'_, S::Format, Arena>, part: IovaRange) {
        let mut room = SpanBuf::room::<2>();
        let mut buf = SpanBuf::new(&mut room);
        let mut unmapped = match owned.unmap(part, &mut buf) {
            Ok(unmapped) => unmapped,
            Err(Error::Hole { hole }) => {
                return assert!(self.model.lookup(hole.start()).is_none());
            }
            Err(Error::WouldSplit { leaf }) => return assert!(!part.covers(leaf)),
            Err(error) => panic!("{error}"),
        };
        let expected = self.model.unmap(part);
        let mut bytes = 0;
        loop {
            bytes += buf.spans().iter().map(|span| span.len()).sum::<u64>();
            assert!(buf.spans().iter().all(|span| expected.iter().any(|all| holds(*all, *span))));
            buf.clear();
            free(self.table, unmapped.retired);
            let Some(rest) = unmapped.rest else { break };
            unmapped = owned.resume(rest, &mut buf);
        }
        assert_eq!(bytes, part.len_less_one() + 1);
    }

    fn unmap_pages(&mut self, owned: &Owned<'_, S::Format, Arena>, part: IovaRange) {
        let granule = self.space.granule();
        let count = (part.len_less_one() >> self.space.granule_lg2) + 1;
        let gone = owned.unmap_pages(part.start(), granule, count);
        free(self.table, gone.retired);
        if gone.bytes > 0 {
            let taken = range(part.start().get(), gone.bytes);
            assert_eq!(self.model.covered(taken), Coverage::All);
            self.model.unmap(taken);
        }
    }
}

/// Whether a span lies in another.
fn holds(outer: Span, inner: Span) -> bool {
    outer.paddr() <= inner.paddr() && inner.last() <= outer.last()
}

fn claim<S: Subject>(table: &Table<S>, piece: IovaRange) -> Owned<'_, S::Format, Arena> {
    #[expect(unsafe_code, reason = "the pieces are disjoint")]
    // SAFETY: every piece is one thread's.
    unsafe {
        table.claim(piece)
    }
}

/// Looks its own pieces up, by the table and as hardware, until the workers are done: they were
/// mapped before, and nothing that happens beside them may show.
fn watch<S: Subject>(tree: &Tree<S>, pieces: &[IovaRange], done: &AtomicBool) -> u64 {
    let walker = tree.walker();
    let mut rounds = 0;
    loop {
        let last_round = done.load(Ordering::Acquire);
        for &piece in pieces {
            let owned = claim::<S>(&tree.table, piece);
            let (first, place) = (piece.start(), PhysAddr::new(place(tree, piece)));
            let runs: Vec<_> = owned.walk(piece).map(|run| (run.range, run.paddr)).collect();
            assert_eq!(runs, [(piece, place)]);
            let walked = survey::translate(&walker, &tree.arena, first).map(|found| found.paddr);
            assert_eq!(walked, Some(place), "hardware at {first}");
        }
        rounds += 1;
        if last_round {
            return rounds;
        }
    }
}

/// Where the checker's pieces lead.
fn place<S: Subject>(tree: &Tree<S>, piece: IovaRange) -> u64 {
    let chunk = lg2::size(tree.space.chunk());
    16 * chunk + piece.start().get() % chunk
}

/// Threads that share tables do whatever they like with their own granules, and each finds what it
/// expects; so does one that only looks. In the end the table has what all of them have, and no
/// table leaked.
pub fn threads_with_random_operations_keep_to_their_pieces<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let chunk = lg2::size(tree.space.chunk());
        let border = tree.space.shift(2).and_then(|shift| tree.space.nth(shift, 1));
        let start = tree.space.aperture.start().get();
        let base = border.map_or(start, |border| border.saturating_sub(4 * chunk)).max(start);
        let window = range(base, (SHARED_CHUNKS + WORKERS + 1) * chunk);
        for seed in 0..share::<S>(150) {
            let mut all = IntervalModel::new();
            let grant = granted(tree.table.format(), PROT);
            for piece in pieces(&tree.space, base, WORKERS) {
                let memory = span(place(&tree, piece), piece.len_less_one() + 1);
                tree.map(piece.start().get(), &[memory], PROT).unwrap();
                all.map(piece.start(), &[memory], grant).unwrap();
            }
            for run in round(&tree, base, seed).iter().flat_map(|model| model.runs(window)) {
                let memory = span(run.paddr.get(), run.iova.len_less_one() + 1);
                all.map(run.iova.start(), &[memory], run.prot).unwrap();
            }
            tree.check(&all, window, &mut Rng::new(seed));
            for run in all.runs(window) {
                tree.unmap(run.iova).unwrap();
            }
            tree.reclaim();
            assert_eq!(tree.arena.tables(), 1, "only the root is left");
        }
    });
}

/// All threads at once; returns what the workers left mapped.
fn round<S: Subject>(tree: &Tree<S>, base: u64, seed: u64) -> Vec<IntervalModel> {
    let (start, done) = (Barrier::new(5), AtomicBool::new(false));
    thread::scope(|scope| {
        let (start, done) = (&start, &done);
        let checker = scope.spawn(move || {
            let watched = pieces(&tree.space, base, WORKERS);
            start.wait();
            watch(tree, &watched, done)
        });
        let workers = [0, 1, 2, 3].map(|number| {
            let (table, space) = (&tree.table, &tree.space);
            let pieces = pieces(space, base, number);
            let (model, rng) = (IntervalModel::new(), Rng::new(seed * WORKERS + number));
            let worker = Worker::<S> { table, space, pieces, model, rng };
            scope.spawn(move || worker.work(start))
        });
        let models = workers.map(|worker| worker.join());
        // Also where a worker panicked: the checker waits for it.
        done.store(true, Ordering::Release);
        assert!(checker.join().unwrap() > 0);
        models.into_iter().map(Result::unwrap).collect()
    })
}
