//! Walks of tables with very many mappings: complete, sorted, and at the cost of reading each table
//! once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::io_pgtable::{
    Arena, ArenaList, Fresh, NoTables, PageTable, TableAddr, TableMemory, TableShape,
};
use dmaspan::iommu::Domain;
use dmaspan::iommu::soft::SoftIommu;
use dmaspan::{Coherency, Iova, PhysAddr, Promise};

use crate::common::{PROT, format, range, span};

const PAGE: u64 = 4096;
const MAPPINGS: u64 = 1 << 20;

/// Table memory that counts how often somebody enters a table.
#[derive(Clone)]
struct Counting(Arena, Arc<AtomicU64>);

// SAFETY: all tables are the arena's.
unsafe impl TableMemory<u64> for Counting {
    type List = ArenaList;

    fn coherency(&self) -> Coherency {
        Coherency::Coherent
    }

    fn reserve(&self, shape: TableShape, count: usize) -> Result<ArenaList, NoTables> {
        TableMemory::<u64>::reserve(&self.0, shape, count)
    }

    fn take(
        &self,
        promise: Promise<'_>,
        shape: TableShape,
        list: &mut ArenaList,
    ) -> Option<Fresh<'_, u64>> {
        self.0.take(promise, shape, list)
    }

    fn publish(&self, fresh: Fresh<'_, u64>) {
        self.0.publish(fresh);
    }

    fn entries(&self, table: &TableAddr) -> &[AtomicU64] {
        self.1.fetch_add(1, Ordering::Relaxed);
        TableMemory::<u64>::entries(&self.0, table)
    }

    fn retire(&self, list: &mut ArenaList, table: TableAddr) {
        TableMemory::<u64>::retire(&self.0, list, table);
    }

    fn append(&self, promise: Promise<'_>, list: &mut ArenaList, other: ArenaList) {
        TableMemory::<u64>::append(&self.0, promise, list, other);
    }

    fn free(&self, promise: Promise<'_>, shape: TableShape, list: ArenaList) {
        TableMemory::<u64>::free(&self.0, promise, shape, list);
    }
}

/// A live domain with a million mappings of a page each, to memory that is never contiguous.
#[test]
fn a_walk_of_a_million_mappings_has_each_of_them_and_enters_few_tables_twice() {
    let entered = Arc::new(AtomicU64::new(0));
    let memory = Counting(Arena::default(), entered.clone());
    let table = PageTable::new(format::<12>(48, 48), memory.clone()).unwrap();
    let iommu = SoftIommu::over(&table);
    let domain = Domain::new(table, iommu).unwrap();
    let base = 0x40_0000_0000;
    let paddr = |n: u64| (n ^ 1) * PAGE;
    for first in (0..MAPPINGS).step_by(512) {
        let spans: Vec<_> = (first..first + 512).map(|n| span(paddr(n), PAGE)).collect();
        // SAFETY: one thread works on the domain, and no device uses it.
        unsafe { domain.map_spans(Iova::new(base + first * PAGE), &spans, PROT) }.unwrap();
    }
    let tables = memory.0.tables() as u64;
    let aperture = domain.geometry().aperture;

    entered.store(0, Ordering::Relaxed);
    let mut count = 0;
    for (n, run) in (0..).zip(domain.walk(aperture)) {
        assert_eq!(run.range, range(base + n * PAGE, PAGE));
        assert_eq!((run.paddr, run.prot), (PhysAddr::new(paddr(n)), PROT));
        count += 1;
    }
    assert_eq!(count, MAPPINGS);
    // Each section, of dozens of runs, goes down from the root once.
    let most = tables + MAPPINGS / 10;
    let walked = entered.swap(0, Ordering::Relaxed);
    assert!(walked <= most, "{walked} tables were entered, of {tables}");

    assert_eq!(domain.census(aperture).count(12), MAPPINGS);
    let counted = entered.swap(0, Ordering::Relaxed);
    assert!(counted <= most, "{counted} tables were entered, of {tables}");

    let lines = domain.dump().lines().to_string();
    let leaves = lines.lines().filter(|line| line.starts_with("leaf")).count() as u64;
    assert_eq!(leaves, MAPPINGS);
    let links = lines.lines().filter(|line| line.starts_with("link")).count() as u64;
    assert_eq!(links + 1, tables);
    let drawn = entered.swap(0, Ordering::Relaxed);
    assert!(drawn <= tables + MAPPINGS / 5, "{drawn} tables were entered, of {tables}");
    assert_eq!(domain.iova_to_phys(Iova::new(base + 5 * PAGE + 7)), Some(PhysAddr::new(0x4007)));
}

/// A million pages of contiguous memory are one run, whatever lies before and behind them.
#[test]
fn a_million_contiguous_pages_are_one_run() {
    let entered = Arc::new(AtomicU64::new(0));
    let memory = Counting(Arena::default(), entered.clone());
    let mut table = PageTable::new(format::<12>(48, 48), memory.clone()).unwrap();
    // No block of 2 MiB fits, so that all of it is pages.
    let (iova, paddr) = (0x40_0000_0000, 0x10_0000_1000);
    let spans = [span(paddr, MAPPINGS * PAGE)];
    table.whole().map_spans(Iova::new(iova), &spans, PROT).unwrap();
    for (at, to) in [(iova - PAGE, 0), (iova + MAPPINGS * PAGE, 7 * PAGE)] {
        table.whole().map_spans(Iova::new(at), &[span(to, PAGE)], PROT).unwrap();
    }
    let tables = memory.0.tables() as u64;
    entered.store(0, Ordering::Relaxed);
    let runs: Vec<_> = table.walk(table.geometry().aperture).collect();
    let expected = [
        (range(iova - PAGE, PAGE), 0),
        (range(iova, MAPPINGS * PAGE), paddr),
        (range(iova + MAPPINGS * PAGE, PAGE), 7 * PAGE),
    ];
    let found: Vec<_> = runs.iter().map(|run| (run.range, run.paddr.get())).collect();
    assert_eq!(found, expected);
    let walked = entered.load(Ordering::Relaxed);
    assert!(walked <= tables + 4 * (tables / 100 + 2), "{walked} tables entered, of {tables}");
}

/// A walk that is kept, or leaked, keeps no table from its memory.
#[test]
fn a_walk_that_is_kept_or_leaked_holds_nothing_up() {
    let arena = Arena::default();
    let table = PageTable::new(format::<12>(48, 48), arena.clone()).unwrap();
    let iommu = SoftIommu::over(&table);
    let domain = Domain::new(table, iommu).unwrap();
    let spans: Vec<_> = (0..512).map(|n| span(2 * n * PAGE, PAGE)).collect();
    let all = range(0, 512 * PAGE);
    for _ in 0..3 {
        // SAFETY: one thread works on the domain, and no device uses it.
        unsafe { domain.map_spans(Iova::new(0), &spans, PROT) }.unwrap();
        let mut kept = domain.walk(all);
        assert_eq!(kept.next().map(|run| run.range), Some(range(0, PAGE)));
        // One that is never dropped: there is nothing in it that would have to be.
        assert!(Box::leak(Box::new(domain.walk(all))).next().is_some());
        // SAFETY: as above.
        let _synced = unsafe { domain.remove(all) }.unwrap().sync().unwrap();
        assert_eq!(arena.tables(), 3, "the table of the pages was freed");
        assert!(kept.count() < 512, "what was read ahead, and nothing of what is unmapped");
    }
}
