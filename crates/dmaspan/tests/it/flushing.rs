//! What a walker that does not see the CPU's caches would read.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::io_pgtable::{Fresh, NoTables, PageTable, TableAddr, TableMemory, TableShape};
use dmaspan::{Iova, PhysAddr};
use dmaspan_sim::Arena;
use dmaspan_sim::arena::ArenaList;
use parking_lot::Mutex;

use crate::common::{PROT, for_all_granules, format, free, map, range, span, unmap};

for_all_granules!(every_written_entry_is_written_back_before_the_call_returns);

/// Table memory whose hardware sees only what was published or written back.
#[derive(Clone)]
struct NonCoherent {
    inner: Arena,
    /// What hardware sees of each word, by its address in this process.
    seen: Arc<Mutex<HashMap<usize, u64>>>,
}

fn address<T>(word: &T) -> usize {
    std::ptr::from_ref(word).addr()
}

// SAFETY: all tables are the arena's.
unsafe impl TableMemory<u64> for NonCoherent {
    type List = ArenaList;

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
    let inner = crate::common::arena();
    let memory = NonCoherent { inner, seen: Arc::default() };
    let mut table = PageTable::new(format::<G>(48, 48), memory.clone()).unwrap();
    let (g, block) = (1u64 << G, 1u64 << (2 * G - 3));
    let all_seen = |memory: &NonCoherent| {
        let seen = memory.seen.lock().clone();
        let base = seen.keys().min().copied().unwrap_or(0);
        for (&address, &word) in &seen {
            let offset = u64::try_from(address - base).unwrap();
            let paddr = PhysAddr::new(0x4000_0000 + offset);
            // What was freed is nobody's entry any more.
            if let Ok(now) = dmaspan_sim::walker::TableWords::read_u64(&memory.inner, paddr) {
                assert_eq!(now, word, "the entry at {paddr}");
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
