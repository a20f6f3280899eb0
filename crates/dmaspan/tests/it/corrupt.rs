//! Tables that something else wrote: a link leads to another table, and two to one.

use std::collections::HashSet;

use dmaspan::io_pgtable::{Arena, Error, TableMemory, TableShape};
use dmaspan::{Iova, PhysAddr, Promise, lg2};
use dmaspan_sim::walker::{Access, TableWords, WalkPath, Walker};

use crate::common::{PROT, Table, for_all_granules, free, map, range, span, table, unmap, walker};

for_all_granules!(
    a_drop_frees_a_table_once_that_two_links_lead_to,
    a_reclaim_frees_a_table_once_that_two_links_lead_to,
    a_drop_frees_a_table_once_that_leads_to_itself,
    a_table_that_is_being_filled_is_none_to_a_link,
);

/// The bytes that a table of pages translates.
const fn block<const G: u32>() -> u64 {
    1 << (2 * G - 3)
}

/// The address of the link to the pages around `iova`, of which one is mapped, and the link.
fn link<const G: u32>(table: &Table<G>, iova: u64) -> (PhysAddr, u64) {
    let (walker, mut path) = (walker(table.format(), table.root()), WalkPath::new());
    let root = walker.root(Iova::new(iova), Access::Read).unwrap();
    let _ = walker.walk_from(table.memory(), root, Iova::new(iova), Access::Read, &mut path);
    let steps: Vec<_> = path.iter().map(|step| step.entry_paddr).collect();
    let entry = steps[steps.len() - 2];
    (entry, table.memory().read_u64(entry).unwrap())
}

/// Writes an entry as a device might.
fn scribble(tables: &Arena, entry: PhysAddr, word: u64) {
    let old = tables.read_u64(entry).unwrap();
    tables.exchange_u64(entry, old, word).unwrap();
}

/// A link to another table.
fn led_to<const G: u32>(link: u64, paddr: PhysAddr) -> u64 {
    link & !(lg2::mask(48) & !lg2::mask(G)) | paddr.get()
}

/// A page in each of the first two tables of pages.
fn two_tables<const G: u32>() -> (Table<G>, Arena, [(PhysAddr, u64); 2]) {
    let (mut table, g) = (table::<G>(), 1 << G);
    map(&mut table, 0, &[span(g, g)], PROT).unwrap();
    map(&mut table, block::<G>(), &[span(4 * g, g)], PROT).unwrap();
    let tables = table.memory().clone();
    let links = [0, block::<G>()].map(|iova| link(&table, iova));
    (table, tables, links)
}

/// Some tables of the arena's, none of which it gives twice.
fn all_are_apart(tables: &Arena, shape: TableShape) {
    let mut list = TableMemory::<u64>::reserve(tables, shape, 16).unwrap();
    let taken: HashSet<_> = (0..16)
        // SAFETY: the list was reserved so.
        .map(|_| unsafe { TableMemory::<u64>::take(tables, Promise::new(), shape, &mut list) })
        .map(|fresh| fresh.unwrap().paddr())
        .collect();
    assert_eq!(taken.len(), 16);
}

fn a_drop_frees_a_table_once_that_two_links_lead_to<const G: u32>() {
    let (table, tables, [(_, first), (second, _)]) = two_tables::<G>();
    let shape = table.geometry().table;
    scribble(&tables, second, first);
    drop(table);
    assert_eq!(tables.tables(), 1, "what nothing leads to leaks");
    all_are_apart(&tables, shape);
}

fn a_reclaim_frees_a_table_once_that_two_links_lead_to<const G: u32>() {
    let (mut table, tables, [(_, first), (second, _)]) = two_tables::<G>();
    for iova in [0, block::<G>()] {
        unmap(&mut table, range(iova, 1 << G)).unwrap();
    }
    scribble(&tables, second, first);
    let (before, shape) = (tables.tables(), table.geometry().table);
    let retired = table.whole().reclaim(table_range::<G>()).unwrap();
    free(&table, retired);
    assert_eq!(tables.tables(), before - 1);
    drop(table);
    assert_eq!(tables.tables(), 1, "what nothing leads to leaks");
    all_are_apart(&tables, shape);
}

/// The first two tables of pages.
fn table_range<const G: u32>() -> dmaspan::IovaRange {
    range(0, 2 * block::<G>())
}

fn a_drop_frees_a_table_once_that_leads_to_itself<const G: u32>() {
    let (table, tables, [_, (second, link)]) = two_tables::<G>();
    let shape = table.geometry().table;
    let itself = PhysAddr::new(lg2::align_down(second.get(), G));
    scribble(&tables, second, led_to::<G>(link, itself));
    drop(table);
    assert_eq!(tables.tables(), 1, "what nothing leads to leaks");
    all_are_apart(&tables, shape);
}

fn a_table_that_is_being_filled_is_none_to_a_link<const G: u32>() {
    let (mut table, tables, [_, (second, link)]) = two_tables::<G>();
    let shape = table.geometry().table;
    let mut list = TableMemory::<u64>::reserve(&tables, shape, 1).unwrap();
    // SAFETY: the list was reserved so.
    let fresh = unsafe { TableMemory::<u64>::take(&tables, Promise::new(), shape, &mut list) };
    let mut fresh = fresh.unwrap();
    scribble(&tables, second, led_to::<G>(link, fresh.paddr()));
    fresh.words().fill(0);
    let at = block::<G>() + (1 << G);
    let error = map(&mut table, at, &[span(1 << G, 1 << G)], PROT).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert_eq!(table.whole().iova_to_phys(Iova::new(block::<G>())), None);
    assert!(fresh.words().iter().all(|&word| word == 0));
}
