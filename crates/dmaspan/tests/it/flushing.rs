//! What a walker that does not see the CPU's caches would read.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::io_pgtable::{Fresh, NoTables, PageTable, TableAddr, TableMemory, TableShape};
use dmaspan::{Coherency, Iova, PhysAddr};
use dmaspan_sim::Arena;
use dmaspan_sim::arena::ArenaList;
use dmaspan_sim::walker::TableWords;
use parking_lot::Mutex;

use crate::common::{PROT, for_all_granules, format, free, map, range, span, unmap};

for_all_granules!(
    every_written_entry_is_written_back_before_the_call_returns,
    scattered_pages_write_each_cache_line_back_once,
    a_link_that_its_winner_did_not_write_back_yet_is_written_back_by_who_maps_below,
);

/// Table memory whose hardware sees only what was published or written back.
#[derive(Clone)]
struct NonCoherent {
    inner: Arena,
    /// What hardware sees of each word, by its address in this process.
    seen: Arc<Mutex<HashMap<usize, u64>>>,
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

    fn take(&self, shape: TableShape, list: &mut ArenaList) -> Option<Fresh<'_, u64>> {
        self.inner.take(shape, list)
    }

    fn publish(&self, mut fresh: Fresh<'_, u64>) {
        let mut seen = self.seen.lock();
        for word in fresh.words() {
            seen.insert(address(word), *word);
        }
        drop(seen);
        self.inner.publish(fresh);
    }

    fn entries(&self, table: &TableAddr) -> &[AtomicU64] {
        TableMemory::<u64>::entries(&self.inner, table)
    }

    fn written(&self, entries: &[AtomicU64]) {
        let mut seen = self.seen.lock();
        for word in entries {
            seen.insert(address(word), word.load(Ordering::Relaxed));
        }
        let lines: HashSet<usize> = entries.iter().map(|word| address(word) / 64).collect();
        let mut counts = self.lines.lock();
        lines.into_iter().for_each(|line| *counts.entry(line).or_default() += 1);
    }

    fn retire(&self, list: &mut ArenaList, table: TableAddr) {
        TableMemory::<u64>::retire(&self.inner, list, table);
    }

    fn append(&self, list: &mut ArenaList, other: ArenaList) {
        TableMemory::<u64>::append(&self.inner, list, other);
    }

    fn free(&self, shape: TableShape, list: ArenaList) {
        TableMemory::<u64>::free(&self.inner, shape, list);
    }
}

fn every_written_entry_is_written_back_before_the_call_returns<const G: u32>() {
    let memory = non_coherent();
    let mut table = PageTable::new(format::<G>(48, 48), memory.clone()).unwrap();
    let (g, block) = (1u64 << G, 1u64 << (2 * G - 3));
    let all_seen = |memory: &NonCoherent| {
        let seen = memory.seen.lock().clone();
        let base = seen.keys().min().copied().unwrap_or(0);
        for (&address, &word) in &seen {
            let offset = u64::try_from(address - base).unwrap();
            let paddr = PhysAddr::new(0x4000_0000 + offset);
            // What was freed is nobody's entry any more.
            if let Ok(now) = TableWords::read_u64(&memory.inner, paddr) {
                // That a link was written back is only in the cache.
                assert_eq!(now & !(1 << 55), word & !(1 << 55), "the entry at {paddr}");
            }
        }
    };
    let spans = [span(3 * g, g), span(9 * g, 7 * g), span(4 * block, 2 * block), span(g, block)];
    map(&mut table, block - 8 * g, &spans, PROT).unwrap();
    all_seen(&memory);
    let pages = table.whole().map_pages(Iova::new(block - 40 * g), PhysAddr::new(g), g, 20, PROT);
    assert_eq!(pages.1, Ok(()));
    all_seen(&memory);
    let unmapped = table.whole().unmap_pages(Iova::new(block - 40 * g), g, 20);
    assert_eq!(unmapped.result, Ok(()));
    free(&table, unmapped.retired);
    all_seen(&memory);
    // Refused, and taken back.
    let spans: Vec<_> = (0..30).map(|n| span(3 * n * g, g)).collect();
    assert!(map(&mut table, block - 30 * g, &spans, PROT).is_err());
    all_seen(&memory);
    unmap(&mut table, range(block - 8 * g, 8 * g + 3 * block)).unwrap();
    all_seen(&memory);
    let retired = table.whole().reclaim(range(0, 1 << 40)).unwrap();
    free(&table, retired);
    all_seen(&memory);
}

fn non_coherent() -> NonCoherent {
    let inner = crate::common::arena();
    NonCoherent { inner, seen: Arc::default(), lines: Arc::default() }
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
