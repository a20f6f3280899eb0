//! Disjoint ranges in parallel, without a lock around the table.

use std::sync::Barrier;
use std::thread;

use dmaspan::io_pgtable::{Error, Owned, PageTable};
use dmaspan::{Iova, PhysAddr, SpanBuf};
use dmaspan_sim::Arena;

use crate::common::{PROT, Table, arena, for_all_granules, format, free, range, span};

for_all_granules!(
    disjoint_ranges_of_shared_tables_are_mapped_in_parallel,
    tables_are_installed_once_however_many_threads_race,
);

/// As many as the barrier below waits for.
const THREADS: u64 = 4;

/// Maps, checks and unmaps ranges of its own in tables that all threads share.
fn churn<const G: u32>(table: &Table<G>, thread: u64, rounds: u64) {
    let g = 1u64 << G;
    let per_table = 1u64 << (G - 3);
    // Threads alternate in chunks of a quarter table, over four tables and a border of level 1.
    let chunk = per_table / THREADS;
    let base = (1u64 << (3 * G - 6)) - (2 << (2 * G - 3));
    for round in 0..rounds {
        for n in 0..4 {
            let at = base + (n * per_table + thread * chunk) * g;
            // SAFETY: no other thread computes this range.
            let owned = unsafe { table.claim(range(at, chunk * g)) };
            let paddr = ((round + 1) * 1000 + thread) * 3 * g;
            let spans = [span(paddr, g), span(paddr + 2 * g, (chunk - 1) * g)];
            owned.map_spans(Iova::new(at), &spans, PROT).unwrap();
            let last = Iova::new(at + chunk * g - 1);
            assert_eq!(owned.iova_to_phys(last), Some(PhysAddr::new(paddr + (chunk + 1) * g - 1)));
            assert_eq!(owned.walk(owned.range()).count(), 2);
            if (round + n) % 3 == 0 {
                let error = owned.map_spans(Iova::new(at), &spans, PROT).unwrap_err();
                assert!(matches!(error.error, Error::Occupied { .. }));
                free(table, error.retired);
            }
            unmap(table, &owned, &spans);
        }
    }
}

fn unmap<const G: u32>(
    table: &Table<G>,
    owned: &Owned<'_, dmaspan::io_pgtable::ArmLpaeS1<G>, Arena>,
    expected: &[dmaspan::Span],
) {
    let mut room = SpanBuf::room::<8>();
    let mut buf = SpanBuf::new(&mut room);
    let unmapped = owned.unmap(owned.range(), &mut buf).unwrap();
    assert_eq!(buf.spans(), expected);
    assert!(unmapped.rest.is_none());
    free(table, unmapped.retired);
}

fn disjoint_ranges_of_shared_tables_are_mapped_in_parallel<const G: u32>() {
    let memory = arena();
    let mut table = PageTable::new(format::<G>(48, 48), memory.clone()).unwrap();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let table = &table;
            scope.spawn(move || churn::<G>(table, thread, 300));
        }
    });
    assert_eq!(crate::common::contents(&mut table), (vec![], vec![]));
    let retired = table.whole().reclaim(range(0, 1 << 48)).unwrap();
    free(&table, retired);
    assert_eq!(memory.tables(), 1, "only the root is left");
}

fn tables_are_installed_once_however_many_threads_race<const G: u32>() {
    let g = 1u64 << G;
    for round in 0..200u64 {
        let memory = arena();
        let mut table = PageTable::new(format::<G>(48, 48), memory.clone()).unwrap();
        let start = Barrier::new(4);
        let at = |thread: u64| (1 << 40) + (round % 7) * (1 << (2 * G - 3)) + thread * g;
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (table, start) = (&table, &start);
                scope.spawn(move || {
                    // SAFETY: each thread has a page of its own.
                    let owned = unsafe { table.claim(range(at(thread), g)) };
                    start.wait();
                    owned.map_spans(Iova::new(at(thread)), &[span(thread * g, g)], PROT).unwrap();
                });
            }
        });
        for thread in 0..THREADS {
            let found = table.whole().iova_to_phys(Iova::new(at(thread)));
            assert_eq!(found, Some(PhysAddr::new(thread * g)), "no mapping is lost to a race");
        }
        let levels = table.geometry().top_level as usize;
        assert_eq!(memory.tables(), 1 + levels, "losers gave their tables back");
    }
}
