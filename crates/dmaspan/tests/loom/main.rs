//! Parallel work on one tree, one queue or one stream, in all interleavings and with all values
//! that the orderings let a load see.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p dmaspan --test loom --release`. Trees are tiny, so that
//! loom comes to the end of what can happen.
#![cfg(loom)]
#![expect(unsafe_code, reason = "the tests own the ranges, and no hardware walks their tables")]

mod attach;
mod flush_queue;
mod iova;
mod platform;
mod readers;
mod soft;
mod swiotlb;
mod tables;
mod tiny;

use dmaspan::io_pgtable::{Owned, PageTable, Retired};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use loom::sync::Arc;
use loom::thread;

use tables::{List, Tables};
use tiny::{TOP, Tiny};

const PAGE: u64 = 1 << 12;
/// Where page 0 is mapped to; the others behind it.
const MEMORY: u64 = 0x10_0000;

type Table<const FIRST: u32> = PageTable<Tiny<FIRST>, Tables>;

/// The range of `count` pages from page `first` on.
fn pages(first: u64, count: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(first * PAGE), count * PAGE).unwrap()
}

fn paddr(page: u64) -> PhysAddr {
    PhysAddr::new(MEMORY + page * PAGE)
}

/// A range that no other thread works on: each test hands every page to one thread.
fn claim<const FIRST: u32>(
    table: &Table<FIRST>,
    first: u64,
    count: u64,
) -> Owned<'_, Tiny<FIRST>, Tables> {
    // SAFETY: see above.
    unsafe { table.claim(pages(first, count)) }
}

fn free<const FIRST: u32>(table: &Table<FIRST>, retired: Retired<List>) {
    // SAFETY: no hardware walks the table.
    unsafe { table.free(retired) }
}

/// Maps pages where each has its place in memory, and finds them.
fn map<const FIRST: u32>(table: &Table<FIRST>, first: u64, count: u64) {
    let owned = claim(table, first, count);
    let span = Span::new(paddr(first), count * PAGE).unwrap();
    owned.map_spans(Iova::new(first * PAGE), &[span], Prot::READ_WRITE).unwrap();
    for page in first..first + count {
        assert_eq!(owned.iova_to_phys(Iova::new(page * PAGE)), Some(paddr(page)));
    }
}

/// Unmaps pages that are mapped, and finds them gone.
fn unmap<const FIRST: u32>(table: &Table<FIRST>, first: u64, count: u64) {
    let owned = claim(table, first, count);
    let mut room = SpanBuf::room::<1>();
    let mut buf = SpanBuf::new(&mut room);
    let unmapped = owned.unmap(pages(first, count), &mut buf).unwrap();
    assert_eq!(buf.spans(), [Span::new(paddr(first), count * PAGE).unwrap()]);
    free(table, unmapped.retired);
    for page in first..first + count {
        assert_eq!(owned.iova_to_phys(Iova::new(page * PAGE)), None);
    }
}

/// Detaches and frees the empty tables of some pages.
fn reclaim<const FIRST: u32>(table: &Table<FIRST>, first: u64, count: u64) {
    let retired = claim(table, first, count).reclaim(pages(first, count)).unwrap();
    free(table, retired);
}

/// Runs `work` of two threads on one table in every way that it can go. In the end exactly the
/// pages in `mapped` are mapped, `tables` tables are in the tree, and it gives them all back.
fn race<const FIRST: u32>(
    prepare: fn(&Table<FIRST>),
    work: [fn(&Table<FIRST>); 2],
    mapped: &'static [u64],
    tables: usize,
) {
    loom::model(move || {
        let memory = Tables::new();
        let table = Arc::new(PageTable::new(Tiny, memory.clone()).unwrap());
        prepare(&table);
        let other = Arc::clone(&table);
        let [here, there] = work;
        let thread = thread::spawn(move || there(&other));
        here(&table);
        thread.join().unwrap();
        for page in 0..1 << (TOP + 1) {
            let found = claim(&table, page, 1).iova_to_phys(Iova::new(page * PAGE));
            assert_eq!(found, mapped.contains(&page).then(|| paddr(page)), "page {page}");
        }
        assert_eq!(memory.in_use(), tables);
        drop(table);
        assert_eq!(memory.in_use(), 0, "the tree gives back what it took");
    });
}

/// A tree of all its levels from the start.
const WHOLE: u32 = TOP;
/// A tree that begins with one table.
const GROWING: u32 = 0;

#[test]
fn two_mappings_that_need_the_same_tables_install_each_once() {
    race::<WHOLE>(|_| {}, [|table| map(table, 0, 1), |table| map(table, 1, 1)], &[0, 1], 3);
}

#[test]
fn two_mappings_below_one_missing_table_both_get_there() {
    race::<WHOLE>(|_| {}, [|table| map(table, 0, 2), |table| map(table, 3, 1)], &[0, 1, 3], 4);
}

#[test]
fn mapping_goes_on_beside_an_unmap_that_detaches_the_table_next_to_it() {
    race::<WHOLE>(
        |table| map(table, 0, 2),
        [|table| unmap(table, 0, 2), |table| map(table, 2, 1)],
        &[2],
        3,
    );
}

#[test]
fn a_table_that_was_detached_and_freed_becomes_the_neighbours() {
    race::<WHOLE>(
        |table| map(table, 0, 2),
        [
            |table| {
                unmap(table, 0, 2);
                map(table, 0, 1);
            },
            |table| map(table, 2, 1),
        ],
        &[0, 2],
        4,
    );
}

#[test]
fn two_unmaps_in_one_table_leave_it_there() {
    race::<WHOLE>(
        |table| map(table, 0, 2),
        [|table| unmap(table, 0, 1), |table| unmap(table, 1, 1)],
        &[],
        3,
    );
}

#[test]
fn an_owner_reclaims_while_a_neighbour_maps_in_the_next_table() {
    race::<WHOLE>(
        |table| {
            map(table, 0, 1);
            unmap(table, 0, 1);
        },
        [|table| reclaim(table, 0, 2), |table| map(table, 2, 1)],
        &[2],
        3,
    );
}

#[test]
fn an_owner_of_half_a_table_leaves_it_to_the_neighbour() {
    race::<WHOLE>(
        |table| {
            map(table, 0, 1);
            unmap(table, 0, 1);
        },
        [|table| reclaim(table, 0, 1), |table| map(table, 1, 1)],
        &[1],
        3,
    );
}

#[test]
fn an_owner_reclaims_two_levels_while_a_neighbour_maps() {
    race::<WHOLE>(
        |table| {
            map(table, 0, 1);
            unmap(table, 0, 1);
        },
        [|table| reclaim(table, 0, 4), |table| map(table, 4, 1)],
        &[4],
        3,
    );
}

#[test]
fn two_mappings_grow_the_tree_to_different_heights() {
    race::<GROWING>(
        |table| map(table, 0, 1),
        [|table| map(table, 2, 1), |table| map(table, 4, 1)],
        &[0, 2, 4],
        6,
    );
}

#[test]
fn two_mappings_grow_the_tree_to_the_same_height() {
    race::<GROWING>(|_| {}, [|table| map(table, 2, 1), |table| map(table, 3, 1)], &[2, 3], 3);
}

#[test]
fn a_tree_grows_above_what_a_neighbour_maps_and_unmaps() {
    race::<GROWING>(
        |_| {},
        [
            |table| {
                map(table, 0, 1);
                unmap(table, 0, 1);
            },
            |table| map(table, 2, 1),
        ],
        &[2],
        3,
    );
}
