//! Random operations of many threads in tables that they share, and a checker beside them.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::io_pgtable::{Arena, PageTable};
use dmaspan::{IovaRange, PhysAddr, lg2};

use super::space::{Space, range, span};
use super::tree::{PROT, Tree, claim, granted};
use super::{Subject, each, share, survey};
use crate::model::IntervalModel;
use crate::modelled::{Marks, Modelled};
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
        let part = self.part(piece);
        let (which, memory, chunk) = (self.rng.below(8), self.rng.next(), self.space.chunk());
        let owned = claim(self.table, piece);
        let mut both = Modelled { table: self.table, owned, model: &mut self.model };
        // As much memory as `part` has IOVAs, at any place or where large leaves are possible.
        let paddr = match memory % 2 {
            0 => lg2::align_down(memory >> 1, self.space.granule_lg2) & lg2::mask(chunk + 3),
            _ => lg2::size(chunk) + (part.start().get() & lg2::mask(chunk)),
        };
        match which {
            0..3 => both.map(part.start(), &[span(paddr, part.len_less_one() + 1)], PROT),
            3 => both.map_pages(part, PhysAddr::new(paddr), self.space.granule_lg2, PROT),
            4 => both.unmap(part, Marks::Ignored),
            5 => both.unmap(piece, Marks::Ignored),
            6 => both.unmap_pages(part),
            _ => both.reclaim(part),
        }
        for iova in [part.start(), part.last(), piece.last()] {
            both.look_up(iova);
        }
        both.agree(piece);
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
}

/// Looks its own pieces up, by the table and as hardware, until the workers are done: they were
/// mapped before, and nothing that happens beside them may show.
fn watch<S: Subject>(tree: &Tree<S>, pieces: &[IovaRange], done: &AtomicBool) -> u64 {
    let walker = tree.walker();
    let mut rounds = 0;
    loop {
        let last_round = done.load(Ordering::Acquire);
        for &piece in pieces {
            let owned = claim(&tree.table, piece);
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
        let base = tree.space.before_border(4);
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
