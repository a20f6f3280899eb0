//! Table memory whose hardware does not see the CPU's caches.

use std::collections::{BTreeMap, HashMap};
use std::ptr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::{self, ThreadId};

use dmaspan::io_pgtable::{
    Arena, ArenaList, Fresh, NoTables, TableAddr, TableMemory, TableShape, Word,
};
use dmaspan::{Coherency, PhysAddr, Promise, lg2};
use parking_lot::Mutex;

use super::space::{range, span};
use super::tree::{PROT, Tree, arena};
use super::{Subject, each};
use crate::walker::{NotATable, TableWords};

/// An arena of which hardware sees only what was published or written back.
#[derive(Clone)]
pub(super) struct NonCoherent {
    pub(super) inner: Arena,
    seen: Arc<Mutex<Seen>>,
    stall: Arc<Mutex<Option<Stall>>>,
}

/// A thread that is held up when it is about to write back.
pub(super) struct Stall {
    pub(super) thread: ThreadId,
    /// Told that it has come so far.
    pub(super) reached: Sender<()>,
    /// It goes on when it hears from here.
    pub(super) go_on: Receiver<()>,
}

#[derive(Default)]
struct Seen {
    /// What hardware sees, by 8 bytes and their physical address.
    words: HashMap<u64, u64>,
    /// Where each published table is: its physical address by its address in this process.
    tables: BTreeMap<usize, u64>,
    /// How often each cache line of a published table was written back.
    lines: BTreeMap<usize, u32>,
}

/// log2 of the bytes of a cache line.
const LINE_LG2: u32 = 6;

impl NonCoherent {
    pub(super) fn new(inner: Arena) -> Self {
        Self { inner, seen: Arc::default(), stall: Arc::default() }
    }

    /// How often each cache line was written back since the last call.
    pub(super) fn lines(&self) -> BTreeMap<usize, u32> {
        std::mem::take(&mut self.seen.lock().lines)
    }

    /// Holds a thread up, once.
    pub(super) fn stall(&self, stall: Stall) {
        *self.stall.lock() = Some(stall);
    }

    /// Waits where this thread is one to be held up.
    fn maybe_stalled(&self) {
        let mut stall = self.stall.lock();
        let mine = stall.take_if(|stall| stall.thread == thread::current().id());
        drop(stall);
        if let Some(Stall { reached, go_on, .. }) = mine {
            reached.send(()).unwrap();
            go_on.recv().unwrap();
        }
    }

    /// Makes hardware see `bytes` from `paddr` on.
    fn write_back(&self, seen: &mut Seen, paddr: u64, bytes: u64) {
        for word in (lg2::align_down(paddr, 3)..paddr + bytes).step_by(8) {
            let value = self.inner.read_u64(PhysAddr::new(word)).unwrap();
            seen.words.insert(word, value);
        }
    }
}

impl TableWords for NonCoherent {
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
        // Refuses what is freed.
        self.inner.read_u64(paddr)?;
        let seen = self.seen.lock();
        seen.words.get(&paddr.get()).copied().ok_or(NotATable::Outside { paddr })
    }

    fn exchange_u64(&self, paddr: PhysAddr, old: u64, new: u64) -> Result<u64, NotATable> {
        // An atomic access is seen by both.
        let found = self.inner.exchange_u64(paddr, old, new)?;
        if found == old {
            self.seen.lock().words.insert(paddr.get(), new);
        }
        Ok(found)
    }
}

#[expect(unsafe_code, reason = "everything but the looking on is the arena's")]
// SAFETY: every table comes from the arena and goes back to it.
unsafe impl<W: Word> TableMemory<W> for NonCoherent {
    type List = ArenaList;

    fn coherency(&self) -> Coherency {
        Coherency::NonCoherent
    }

    fn publish(&self, mut fresh: Fresh<'_, W>) {
        let paddr = fresh.paddr().get();
        let bytes = size_of_val(fresh.words()) as u64;
        let place = ptr::from_ref(&*fresh.words()).addr();
        self.inner.publish(fresh);
        let mut seen = self.seen.lock();
        seen.tables.insert(place, paddr);
        self.write_back(&mut seen, paddr, bytes);
    }

    fn written(&self, _promise: Promise<'_>, entries: &[W::Atomic]) {
        self.maybe_stalled();
        let place = ptr::from_ref(entries).addr();
        let mut seen = self.seen.lock();
        let last = place + size_of_val(entries) - 1;
        for line in place >> LINE_LG2..=last >> LINE_LG2 {
            *seen.lines.entry(line).or_default() += 1;
        }
        let table = seen.tables.range(..=place).next_back();
        let (start, paddr) = table.map(|(start, paddr)| (*start, *paddr)).unwrap();
        let offset = (place - start) as u64;
        self.write_back(&mut seen, paddr + offset, size_of_val(entries) as u64);
    }

    forward! { inner: Arena as TableMemory<W>:
        fn reserve(&self, shape: TableShape, count: usize) -> Result<ArenaList, NoTables>;
        fn take(
            &self, promise: Promise<'_>, shape: TableShape, list: &mut ArenaList
        ) -> Option<Fresh<'_, W>>;
        fn entries(&self, table: &TableAddr) -> &[W::Atomic];
        fn retire(&self, list: &mut ArenaList, table: TableAddr);
        fn append(&self, promise: Promise<'_>, list: &mut ArenaList, other: ArenaList);
        fn free(&self, promise: Promise<'_>, shape: TableShape, list: ArenaList);
    }
}

/// A walker that does not see the CPU's caches finds after each call what one that does finds.
pub fn everything_is_written_back_before_a_call_returns<S: Subject>() {
    each::<S>(|format| {
        let inner = arena();
        let memory = NonCoherent::new(inner.clone());
        let mut tree = Tree::<S, _>::over(format, memory.clone(), inner);
        let (granule, chunk) = (tree.space.granule(), lg2::size(tree.space.chunk()));
        let first = tree.space.aperture.start().get();
        let at = |n: u64| first + n;
        let [start, border, pages] = [chunk - 5 * granule, chunk, 2 * chunk + granule].map(at);
        let all_seen = |tree: &Tree<S, NonCoherent>, leaves: Option<usize>| {
            let found = tree.leaves();
            assert_eq!(tree.leaves_in(&memory), found);
            assert!(leaves.is_none_or(|leaves| found.len() == leaves), "{found:?}");
        };
        let scattered: Vec<_> = (0..8).map(|n| span((3 * n + 1) * granule, granule)).collect();
        tree.map(start, &scattered, PROT).unwrap();
        all_seen(&tree, Some(8));
        // A large leaf, or a table of pages.
        let long = [span(4 * chunk, 2 * chunk), span(granule, 3 * granule)];
        tree.map(at(8 * chunk), &long, PROT).unwrap();
        all_seen(&tree, None);
        assert_eq!(tree.map_pages(pages, granule, granule, 4, PROT).1, Ok(()));
        all_seen(&tree, None);
        assert_eq!(tree.unmap_pages(pages, granule, 4).bytes, 4 * granule);
        all_seen(&tree, None);
        // Refused, and taken back.
        assert!(tree.map(start - 2 * granule, &scattered, PROT).is_err());
        all_seen(&tree, None);
        tree.unmap(range(border - 2 * granule, 4 * granule)).unwrap();
        all_seen(&tree, None);
        tree.reclaim();
        all_seen(&tree, None);
        tree.unmap(range(at(8 * chunk), 2 * chunk + 3 * granule)).unwrap();
        tree.reclaim();
        all_seen(&tree, Some(4));
    });
}
