//! The cost of making hardware forget: the commands between a driver and QEMU's IOMMUs, counted by
//! a [`Tap`](dmaspan_qemu::Tap) that shares nothing with the driver, beside the fewest that the
//! hardware can do with, and beside unmapping page at a time.
//!
//! The test of a gibibyte prints a table. Of the page-at-a-time way it does as many pages as
//! `DMASPAN_COST_PAGES=N` says, 1024 where nothing is said: 262144 are the gibibyte whole.

mod amd_vi;
mod bench;
mod fewest;
mod riscv;
mod smmu_v3;
mod table;
mod vtd;

use std::thread;

use dmaspan::{Iova, IovaRange};
use dmaspan_sim::rng::Rng;

use bench::{Bench, PAGE_LG2, Started};
use fewest::{Forget, Hardware};
use table::{Row, cases, page_at_a_time, print};

const ALL: [fn() -> Option<Started>; 11] = [
    smmu_v3::stage_1,
    smmu_v3::stage_2,
    smmu_v3::stage_1_without_ranges,
    vtd::legacy,
    vtd::scalable_second_stage,
    vtd::scalable_first_stage,
    amd_vi::start,
    riscv::first_stage,
    riscv::second_stage,
    riscv::first_stage_with_ranges,
    riscv::second_stage_with_ranges,
];

/// Does `work` with every IOMMU that there is, on threads of their own.
fn on_all<T: Send>(work: impl Fn(&mut dyn Bench, &Hardware) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let run = |start: fn() -> Option<Started>| {
            scope.spawn(move || start().map(|(mut bench, hardware)| work(&mut *bench, &hardware)))
        };
        let threads: Vec<_> = ALL.into_iter().map(run).collect();
        let done = threads.into_iter().map(|thread| thread.join().expect("it said why"));
        done.flatten().collect()
    })
}

#[test]
fn a_gibibyte_of_pages_is_forgotten_by_the_fewest_commands() {
    let rows = on_all(|bench, hardware| {
        let forgets = cases().map(|case| {
            let counted = bench.unmap(&case.ranges, case.leaf_lg2);
            let fewest = (hardware.fewest)(&case.ranges, case.leaf_lg2);
            let about = format!("{}, {}", hardware.name, case.name);
            assert_eq!(counted.forget, fewest, "{about}");
            assert_eq!((counted.waits, counted.doorbells), (1, 1), "{about}");
            counted.forget
        });
        let by_page = bench.unmap_by_page(page_at_a_time());
        let pages = page_at_a_time();
        // Nothing is saved where each page is told on its own: a command, a wait and a doorbell.
        assert_eq!(by_page.forget, Forget::Named(pages), "{}", hardware.name);
        assert_eq!((by_page.waits, by_page.doorbells), (pages, pages), "{}", hardware.name);
        Row { name: hardware.name, forgets: forgets.into(), by_page }
    });
    print(&rows);
}

/// Up to as many pages, from any page on.
const MOST_PAGES: u64 = 4096;

#[test]
fn ranges_of_any_length_are_named_by_the_fewest_commands() {
    on_all(|bench, hardware| {
        let mut rng = Rng::new(0x5eed);
        for lg2 in (1..=12).cycle().take(60) {
            let pages = 1 + rng.below(1 << lg2);
            let start = (1 << 32) + (rng.below(MOST_PAGES) << PAGE_LG2);
            let range = IovaRange::from_len(Iova::new(start), pages << PAGE_LG2);
            let ranges = [range.expect("it is not empty")];
            let counted = bench.unmap(&ranges, PAGE_LG2);
            let fewest = (hardware.fewest)(&ranges, PAGE_LG2);
            assert_eq!(counted.forget, fewest, "{}, {pages} pages at {start:#x}", hardware.name);
            assert_eq!((counted.waits, counted.doorbells), (1, 1), "{}", hardware.name);
        }
    });
}
