//! The cases of the benchmark, and the ranges that each of them maps.

use super::args::ContainerArgs;
use crate::failed::Failed;
use dmaspan_cli::machine::Machine;
use dmaspan_cli::size::ByteSize;

pub(crate) const GIB: u64 = 1 << 30;
/// The pages that all is counted in.
pub(crate) const PAGE: u64 = 4096;

/// How much memory Linux's own figures map.
const USUAL_BYTES: u64 = 16 * GIB;
const QUICK_BYTES: u64 = GIB;
const USUAL_RUNS: u32 = 5;

/// What the simulation takes for a page of memory at most: base pages that lie apart, with their
/// records and those of the frames between, the CPU's entry and one in each IOMMU's table.
const BYTES_PER_PAGE: u64 = 256;
/// The same for all else: the CPU's tables of a BAR by pages, above all.
const BYTES_BESIDES: u64 = 256 << 20;

/// Where folios are that follow each other in a user's range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// As the buddy allocator hands them out of fresh memory.
    Fresh,
    /// Anywhere, in any order.
    Apart,
    /// In blocks of 2 MiB one after the other, of each about half, in any order: as a system hands
    /// base pages out that has fragmented its memory.
    InBlocks,
}

/// What a case maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Memory in folios of `2^order` pages.
    Memory {
        /// log2 of the pages of a folio.
        order: u32,
        /// Where they are.
        lie: Lie,
    },
    /// BARs of devices, by CPU leaves of one size.
    Bars {
        /// How many, each a mapping.
        count: u64,
        /// GiB of each.
        gib: u64,
        /// log2 of the bytes of a CPU's leaf.
        leaf_lg2: u32,
    },
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    /// How scripts call it.
    pub(crate) name: &'static str,
    pub(crate) what: What,
    /// All bytes.
    pub(crate) bytes: u64,
    /// How many threads share them.
    pub(crate) threads: u64,
    /// How often by page is timed; by span it is the plan's.
    pub(crate) per_page_runs: u32,
}

/// What `dmaspan-bench container` does.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) bytes: u64,
    pub(crate) runs: u32,
    pub(crate) quick: bool,
    pub(crate) cases: Vec<Case>,
}

/// The most GiB: four times as much memory is simulated, by frame numbers of 32 bits.
const MOST_GIB: u64 = 2048;

impl Plan {
    /// What `args` ask for on `machine`.
    ///
    /// # Errors
    ///
    /// What cannot be done, and what can.
    pub(crate) fn new(args: &ContainerArgs, machine: &Machine) -> Result<Self, Failed> {
        let usual = if args.quick { QUICK_BYTES } else { USUAL_BYTES };
        let bytes = args.size.map_or(usual, ByteSize::bytes);
        if !bytes.is_multiple_of(GIB) || !(1..=MOST_GIB).contains(&(bytes / GIB)) {
            return Err(Failed::new(format_args!(
                "--size takes whole GiB from 1 to {MOST_GIB} (pages of 1 GiB are measured too), \
                 like 16G"
            )));
        }
        let needed = bytes / PAGE * BYTES_PER_PAGE + BYTES_BESIDES;
        let available = machine.available();
        if needed > available {
            let fits = available.saturating_sub(BYTES_BESIDES) / (GIB / PAGE * BYTES_PER_PAGE);
            let [bytes, needed, available] = [bytes, needed, available].map(ByteSize::new);
            return Err(Failed::new(format_args!(
                "simulating {bytes} takes {needed} of memory for page tables and records, of which \
                 {available} are available: ask for less, like --size {}G",
                fits.max(1)
            )));
        }
        let runs = if args.quick { 1 } else { args.runs.unwrap_or(USUAL_RUNS) };
        Ok(Self { bytes, runs, quick: args.quick, cases: cases(bytes, runs) })
    }
}

fn cases(memory: u64, runs: u32) -> Vec<Case> {
    let case = |name, what| {
        let bytes = match what {
            What::Memory { .. } => memory,
            What::Bars { count, gib, .. } => count * gib * GIB,
        };
        Case { name, what, bytes, threads: 1, per_page_runs: runs }
    };
    let folios = |order, lie| What::Memory { order, lie };
    let bars = |count, gib, leaf_lg2| What::Bars { count, gib, leaf_lg2 };
    let small = |name, threads| Case { threads, ..case(name, folios(4, Lie::Apart)) };
    vec![
        case("MADV_HUGEPAGE", folios(9, Lie::Fresh)),
        case("2M apart", folios(9, Lie::Apart)),
        case("MAP_POPULATE", folios(0, Lie::Apart)),
        case("4K in blocks", folios(0, Lie::InBlocks)),
        case("HUGETLBFS", folios(18, Lie::Apart)),
        small("64K", 1),
        small("threads=1", 1),
        small("threads=2", 2),
        small("threads=4", 4),
        case("BAR 32G as 1G", bars(1, 32, 30)),
        case("BAR 32G as 2M", bars(1, 32, 21)),
        case("BAR 32G as 4K", bars(1, 32, 12)),
        // By page it takes seconds.
        Case { per_page_runs: 1, ..case("BAR 4x128G as 1G", bars(4, 128, 30)) },
    ]
}

#[cfg(test)]
mod tests {
    use dmaspan_cli::series::LARGE_FOLIOS;

    use super::*;

    fn plan(size: Option<u64>, available: u64) -> Result<Plan, Failed> {
        let size = size.map(ByteSize::new);
        let args = ContainerArgs { size, runs: None, quick: false };
        Plan::new(&args, &Machine::with_available(available))
    }

    #[test]
    fn the_usual_plan_is_that_of_linux_and_its_sizes() {
        let plan = plan(None, 8 * GIB).unwrap();
        assert_eq!((plan.bytes, plan.runs, plan.quick), (16 * GIB, 5, false));
        for row in LARGE_FOLIOS.rows {
            let case = plan.cases.iter().find(|case| case.name == row.case);
            assert_eq!(case.map(|case| case.bytes), Some(16 * GIB), "{}", row.case);
        }
        let last = plan.cases.last().unwrap();
        assert_eq!((last.bytes, last.per_page_runs), (512 * GIB, 1));
    }

    #[test]
    fn what_does_not_fit_says_what_does() {
        let error = plan(Some(64 * GIB), 4 * GIB).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("64 GiB takes 4.25 GiB") && text.contains("--size 60G"), "{text}");
        assert!(plan(Some(60 * GIB), 4 * GIB).is_ok());
        for bytes in [0, GIB / 2, GIB + 4096, 4096 * GIB] {
            let error = plan(Some(bytes), u64::MAX).unwrap_err().to_string();
            assert!(error.starts_with("--size takes whole GiB from 1 to 2048 "), "{error}");
        }
    }
}
