//! The unmapped ranges, and the table of their cost.

use std::env;

use dmaspan::{Iova, IovaRange};

use crate::cost::bench::{Counted, PAGE_LG2};
use crate::cost::fewest::Forget;

const GIB_LG2: u32 = 30;
/// Where ranges begin.
const START: u64 = 1 << 32;
const PAGES: &str = "DMASPAN_COST_PAGES";

/// What is unmapped under one sync.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// log2 of the leaves by which it is mapped.
    pub(crate) leaf_lg2: u32,
    pub(crate) ranges: Vec<IovaRange>,
}

/// One range, from `START` and `offset` on.
fn one(name: &'static str, leaf_lg2: u32, offset: u64, bytes: u64) -> Case {
    let range = IovaRange::from_len(Iova::new(START + offset), bytes);
    Case { name, leaf_lg2, ranges: vec![range.expect("it is not empty")] }
}

/// A gibibyte of pages in `parts`, each followed by as much that is not mapped.
fn scattered(name: &'static str, parts: u64) -> Case {
    let bytes = ((1 << GIB_LG2) / parts) >> PAGE_LG2 << PAGE_LG2;
    let part = |part| IovaRange::from_len(Iova::new(START + 2 * part * bytes), bytes);
    let ranges = (0..parts).map(|of| part(of).expect("it is not empty")).collect();
    Case { name, leaf_lg2: PAGE_LG2, ranges }
}

/// The columns of the table.
pub(crate) fn cases() -> [Case; 9] {
    [
        scattered("whole", 1),
        scattered("in 2", 2),
        scattered("in 8", 8),
        scattered("in 9", 9),
        one("+4K", PAGE_LG2, 1 << PAGE_LG2, 1 << GIB_LG2),
        one("4K", PAGE_LG2, 0, 1 << PAGE_LG2),
        one("64K", PAGE_LG2, 0, 1 << 16),
        one("2M", 21, 0, 1 << 21),
        one("1G", GIB_LG2, 0, 1 << GIB_LG2),
    ]
}

/// As many pages are unmapped one at a time.
pub(crate) fn page_at_a_time() -> u64 {
    let Ok(text) = env::var(PAGES) else { return 1024 };
    let pages = text.parse().ok().filter(|pages| (1..=1 << (GIB_LG2 - PAGE_LG2)).contains(pages));
    pages.unwrap_or_else(|| panic!("{PAGES}={text} is no number of pages up to a gibibyte"))
}

/// What an IOMMU was told.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) forgets: Vec<Forget>,
    pub(crate) by_page: Counted,
}

/// Prints the table.
pub(crate) fn print(rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    let pages = page_at_a_time();
    println!("Commands that make hardware forget what was unmapped under one sync, with one wait");
    println!(
        "behind them and one write of a doorbell; \"all\" is one command for all of the domain."
    );
    println!("Page at a time: {pages} × 4K, with as many waits and as many doorbells.\n");
    let head: String = cases().iter().map(|case| format!("{:>7}", case.name)).collect();
    let (gibibyte, pages, leaf) = ("1 GiB of leaves of 4K", "leaves of 4K", "one leaf");
    println!("{:<28}{gibibyte:>35}{pages:>14}{leaf:>14}{:>10}", "", "page at");
    println!("{:<28}{head}{:>10}", "", "a time");
    println!("{}", "─".repeat(28 + 7 * cases().len() + 10));
    for row in rows {
        let cell = |forget: &Forget| match forget {
            Forget::Named(count) => format!("{count:>7}"),
            Forget::All => format!("{:>7}", "all"),
        };
        let cells: String = row.forgets.iter().map(cell).collect();
        println!("{:<28}{cells}{:>10}", row.name, row.by_page.waits);
    }
}
