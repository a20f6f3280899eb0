//! Walks of a table that nobody owns, beside the detaching, freeing and reuse of what they read.
//!
//! The walk is each time the thread that loom runs second. What a thread stores where it loaded
//! before hides from loom what another one loaded still earlier, so that it would not try the two
//! in another order.

use super::*;

/// Walks all of the table, which shows each page where it has its place in memory, and nothing
/// else. Returns the pages.
fn walk<const FIRST: u32>(table: &Table<FIRST>) -> Vec<u64> {
    let mut pages = Vec::new();
    for run in table.walk(table.geometry().aperture) {
        let first = run.range.start().get() / PAGE;
        assert_eq!(run.paddr, paddr(first), "{run:?}");
        pages.extend(first..=run.range.last().get() / PAGE);
    }
    assert!(pages.is_sorted());
    pages
}

fn walks<const FIRST: u32>(table: &Table<FIRST>) {
    walk(table);
}

#[test]
fn a_walk_shows_nothing_of_a_table_that_is_freed_and_becomes_anothers() {
    race::<WHOLE>(
        |table| map(table, 0, 2),
        [walks, |table| {
            unmap(table, 0, 2);
            map(table, 2, 1);
        }],
        &[2],
        3,
    );
}

#[test]
fn a_walk_finds_what_stays_mapped_beside_what_goes() {
    race::<WHOLE>(
        |table| {
            map(table, 0, 2);
            map(table, 3, 1);
        },
        [|table| unmap(table, 0, 2), |table| assert!(walk(table).contains(&3))],
        &[3],
        3,
    );
}

#[test]
fn a_table_that_is_reclaimed_waits_for_a_walk_and_is_given_back() {
    race::<WHOLE>(
        |table| {
            map(table, 0, 1);
            unmap(table, 0, 1);
        },
        [|table| reclaim(table, 0, 4), walks],
        &[],
        1,
    );
}

#[test]
fn a_look_up_finds_a_page_or_nothing_while_its_table_goes() {
    race::<WHOLE>(
        |table| map(table, 0, 2),
        [
            |table| {
                unmap(table, 0, 2);
                map(table, 2, 1);
            },
            |table| {
                let found = table.iova_to_phys(Iova::new(PAGE));
                assert!(found.is_none_or(|found| found == paddr(1)), "{found:?}");
            },
        ],
        &[2],
        3,
    );
}

#[test]
fn a_walk_goes_on_in_a_root_that_becomes_an_inner_table_and_leaves_the_tree() {
    race::<GROWING>(
        |table| map(table, 0, 2),
        [walks, |table| {
            map(table, 2, 1);
            unmap(table, 0, 2);
        }],
        &[2],
        2,
    );
}

#[test]
fn a_mapping_above_the_tree_never_asks_for_a_former_root_that_was_freed() {
    race::<GROWING>(
        |table| map(table, 0, 2),
        [
            |table| {
                map(table, 2, 1);
                unmap(table, 0, 2);
            },
            |table| map(table, 4, 1),
        ],
        &[2, 4],
        5,
    );
}

/// What is freed while walks overlap is given back when those that may see it have ended.
#[test]
fn walks_that_overlap_give_back_all_that_waited_for_them() {
    let mut model = loom::model::Builder::new();
    // Three threads: what takes more changes from one to another than this is not tried.
    model.preemption_bound = Some(2);
    model.check(|| {
        let memory = Tables::new();
        let table = Arc::new(Table::<WHOLE>::new(Tiny, memory.clone()).unwrap());
        map(&table, 0, 2);
        map(&table, 4, 2);
        let threads = [(); 2].map(|()| {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                walk(&table);
            })
        });
        unmap(&table, 0, 2);
        unmap(&table, 4, 2);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(memory.in_use(), 3, "two tables were freed behind the walks");
        drop(table);
        assert_eq!(memory.in_use(), 0);
    });
}
