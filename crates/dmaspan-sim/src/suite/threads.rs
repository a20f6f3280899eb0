//! Disjoint ranges in parallel, without a lock around the table.

use std::sync::Barrier;
use std::thread;

use dmaspan::io_pgtable::{Arena, Error, Owned, PageTable};
use dmaspan::{Iova, PhysAddr, Span, SpanBuf, lg2};

use super::space::{Space, range, span};
use super::tree::{PROT, Tree, claim, free};
use super::{Subject, each, share};

const THREADS: u64 = 4;

type Table<S> = PageTable<<S as Subject>::Format, Arena>;

/// Where threads work side by side: quarters of chunks around the border of an upper level.
struct Lanes {
    base: u64,
    granule: u64,
    /// Granules in what one thread has of each chunk.
    pages: u64,
}

impl Lanes {
    fn new(space: &Space) -> Self {
        let chunk = lg2::size(space.chunk());
        let granule = space.granule();
        Self { base: space.before_border(2), granule, pages: chunk / granule / THREADS }
    }

    fn at(&self, chunk: u64, thread: u64) -> u64 {
        self.base + (chunk * THREADS + thread) * self.pages * self.granule
    }
}

/// Maps, checks and unmaps ranges of its own in tables that all threads share.
fn churn<S: Subject>(table: &Table<S>, lanes: &Lanes, thread: u64, rounds: u64) {
    let Lanes { granule, pages, .. } = *lanes;
    for round in 0..rounds {
        for n in 0..4 {
            let at = lanes.at(n, thread);
            let owned = claim(table, range(at, pages * granule));
            let paddr = (round % 8 + thread + 1) * 3 * granule;
            let spans = [span(paddr, granule), span(paddr + 2 * granule, (pages - 1) * granule)];
            owned.map_spans(Iova::new(at), &spans, PROT).unwrap();
            let last = Iova::new(at + pages * granule - 1);
            let expected = PhysAddr::new(paddr + (pages + 1) * granule - 1);
            assert_eq!(owned.iova_to_phys(last), Some(expected));
            assert_eq!(owned.walk(owned.range()).count(), 2);
            if (round + n) % 3 == 0 {
                let error = owned.map_spans(Iova::new(at), &spans, PROT).unwrap_err();
                assert!(matches!(error.error, Error::Occupied { .. }));
                free(table, error.retired);
            }
            unmap::<S>(table, &owned, &spans);
        }
    }
}

fn unmap<S: Subject>(table: &Table<S>, owned: &Owned<'_, S::Format, Arena>, expected: &[Span]) {
    let mut room = SpanBuf::room::<8>();
    let mut buf = SpanBuf::new(&mut room);
    let unmapped = owned.unmap(owned.range(), &mut buf).unwrap();
    assert_eq!(buf.spans(), expected);
    assert!(unmapped.rest.is_none());
    free(table, unmapped.retired);
}

/// Threads that share tables, and no range, do not disturb each other.
pub fn disjoint_ranges_are_mapped_in_parallel<S: Subject>() {
    each::<S>(|format| {
        let mut tree = Tree::<S>::new(format);
        let lanes = Lanes::new(&tree.space);
        let rounds = share::<S>(200);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (table, lanes) = (&tree.table, &lanes);
                scope.spawn(move || churn::<S>(table, lanes, thread, rounds));
            }
        });
        assert_eq!(tree.contents(), (vec![], vec![]));
        tree.reclaim();
        assert_eq!(tree.arena.tables(), 1, "only the root is left");
    });
}

/// However many threads need a table at once, one is installed and the others go back.
pub fn racing_threads_install_each_table_once<S: Subject>() {
    each::<S>(|format| {
        for round in 0..share::<S>(60) {
            let mut tree = Tree::<S>::new(format.clone());
            let lanes = Lanes::new(&tree.space);
            let granule = lanes.granule;
            let at = |thread: u64| lanes.at(round % 7, 0) + thread * granule;
            let start = Barrier::new(4);
            thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (table, start) = (&tree.table, &start);
                    scope.spawn(move || {
                        let owned = claim(table, range(at(thread), granule));
                        start.wait();
                        let spans = [span(thread * granule, granule)];
                        owned.map_spans(Iova::new(at(thread)), &spans, PROT).unwrap();
                    });
                }
            });
            for thread in 0..THREADS {
                let found = tree.lookup(at(thread));
                assert_eq!(found, Some(thread * granule), "no mapping is lost to a race");
            }
            let levels = tree.space.top_level as usize;
            assert_eq!(tree.arena.tables(), 1 + levels, "losers gave their tables back");
        }
    });
}
