//! The number of write-backs of entries for a walker that does not see the CPU's caches.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use dmaspan::io_pgtable::{
    Arena, ArenaList, Fresh, NoTables, PageTable, TableAddr, TableMemory, TableShape,
};
use dmaspan::{Coherency, PhysAddr, Promise};
use dmaspan_sim::walker::TableWords;
use parking_lot::Mutex;

use crate::common::{PROT, for_all_granules, format, map, span};

for_all_granules!(
    scattered_pages_write_each_cache_line_back_once,
    a_link_that_its_winner_did_not_write_back_yet_is_written_back_by_who_maps_below,
);

/// Table memory that counts what is written back.
#[derive(Clone)]
struct NonCoherent {
    inner: Arena,
    /// How often each cache line was written back through `written`.
    lines: Arc<Mutex<HashMap<usize, u32>>>,
}

fn address<T>(word: &T) -> usize {
    std::ptr::from_ref(word).addr()
}

// SAFETY: all tables are the arena's.
unsafe impl TableMemory<u64> for NonCoherent {
    type List = ArenaList;

    fn coherency(&self) -> Coherency {
        Coherency::NonCoherent
    }

    fn reserve(&self, shape: TableShape, count: usize) -> Result<ArenaList, NoTables> {
        TableMemory::<u64>::reserve(&self.inner, shape, count)
    }

    fn take(
        &self,
        promise: Promise<'_>,
        shape: TableShape,
        list: &mut ArenaList,
    ) -> Option<Fresh<'_, u64>> {
        self.inner.take(promise, shape, list)
    }

    fn publish(&self, fresh: Fresh<'_, u64>) {
        self.inner.publish(fresh);
    }

    fn entries(&self, table: &TableAddr) -> &[AtomicU64] {
        TableMemory::<u64>::entries(&self.inner, table)
    }

    fn written(&self, _promise: Promise<'_>, entries: &[AtomicU64]) {
        let lines: HashSet<usize> = entries.iter().map(|word| address(word) / 64).collect();
        let mut counts = self.lines.lock();
        lines.into_iter().for_each(|line| *counts.entry(line).or_default() += 1);
    }

    fn retire(&self, list: &mut ArenaList, table: TableAddr) {
        TableMemory::<u64>::retire(&self.inner, list, table);
    }

    fn append(&self, promise: Promise<'_>, list: &mut ArenaList, other: ArenaList) {
        TableMemory::<u64>::append(&self.inner, promise, list, other);
    }

    fn free(&self, promise: Promise<'_>, shape: TableShape, list: ArenaList) {
        TableMemory::<u64>::free(&self.inner, promise, shape, list);
    }
}

fn non_coherent() -> NonCoherent {
    let inner = crate::common::arena();
    NonCoherent { inner, lines: Arc::default() }
}

fn scattered_pages_write_each_cache_line_back_once<const G: u32>() {
    let memory = non_coherent();
    let mut table = PageTable::new(format::<G>(48, 48), memory.clone()).unwrap();
    let g = 1u64 << G;
    // The table exists, with a page at its end.
    map(&mut table, 200 * g, &[span(0, g)], PROT).unwrap();
    memory.lines.lock().clear();
    let spans: Vec<_> = (0..100).map(|n| span((3 * n + 1) * g, g)).collect();
    map(&mut table, 3 * g, &spans, PROT).unwrap();
    let counts = memory.lines.lock().clone();
    // 103 entries from the start of a table, eight a line.
    assert_eq!(counts.len(), 13);
    assert!(counts.values().all(|&count| count == 1), "{counts:?}");
}

fn a_link_that_its_winner_did_not_write_back_yet_is_written_back_by_who_maps_below<const G: u32>() {
    let memory = non_coherent();
    let mut table = PageTable::new(format::<G>(48, 48), memory.clone()).unwrap();
    let g = 1u64 << G;
    map(&mut table, 0, &[span(0, g)], PROT).unwrap();
    let root = PhysAddr::new(table.root().get());
    let read = |paddr| TableWords::read_u64(&memory.inner, paddr).unwrap();
    let link = read(root);
    assert_eq!(link & 1 << 55, 1 << 55, "its own link is written back");
    // As another CPU left it between installing the link and writing it back.
    let unsynced = link & !(1 << 55);
    TableWords::exchange_u64(&memory.inner, root, link, unsynced).unwrap();
    let seen_before = memory.lines.lock().values().sum::<u32>();
    map(&mut table, g, &[span(5 * g, g)], PROT).unwrap();
    assert_eq!(read(root), link);
    // The line of the leaf and that of the link.
    assert_eq!(memory.lines.lock().values().sum::<u32>() - seen_before, 2);
}
