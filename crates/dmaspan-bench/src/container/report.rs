//! What came of `dmaspan-bench container`, for people and for programs.

use comfy_table::Table;
use serde::Serialize;

use super::plan::{Case, GIB, PAGE, Plan, What};
use super::timing::{Measured, Op};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{
    Marks, QUICK, TIMES, align_right, new_table, push_table, push_wrapped, ratio,
};
use dmaspan_cli::units;

/// What was measured. `--format json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// What is measured by what.
    model: &'static str,
    size_bytes: u64,
    runs: u32,
    cpus: usize,
    quick: bool,
    /// Why instructions were not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    instructions_not_counted: Option<String>,
    rows: Vec<Row>,
}

/// One operation of a case, both ways.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    case: &'static str,
    op: Op,
    per_page_ns: u64,
    ns: u64,
    speedup: f64,
    lookups_per_page: u64,
    lookups: u64,
    leaves: u64,
    /// GiB a second by span.
    gibps: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    per_page_instructions_per_4k: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    instructions_per_4k: Option<f64>,
    #[serde(skip)]
    bytes: u64,
    /// GB/s of Linux itself, before and after.
    #[serde(skip)]
    linux: Option<(f64, f64)>,
    #[serde(skip)]
    is_memory: bool,
}

const MODEL: &str = "Type1Before over dmaspan-sim / Container over dmaspan-sim";

fn gibps(bytes: u64, ns: u64) -> f64 {
    rounded(bytes as f64 / GIB as f64 * 1e9 / ns.max(1) as f64)
}

impl Row {
    pub(super) fn new(case: &Case, op: Op, per_page: &Measured, by_span: &Measured) -> Self {
        let (old, new) = (per_page.of(op), by_span.of(op));
        let pages = (case.bytes / PAGE) as f64;
        let per_4k = |count: Option<u64>| count.map(|count| rounded(count as f64 / pages));
        let rates = |rates: super::plan::LinuxRates| match op {
            Op::Map => rates.map,
            Op::Unmap => rates.unmap,
        };
        Self {
            case: case.name,
            op,
            per_page_ns: old.ns(),
            ns: new.ns(),
            speedup: rounded(old.ns() as f64 / new.ns().max(1) as f64),
            lookups_per_page: old.lookups,
            lookups: new.lookups,
            leaves: by_span.leaves,
            gibps: gibps(case.bytes, new.ns()),
            per_page_instructions_per_4k: per_4k(old.instructions()),
            instructions_per_4k: per_4k(new.instructions()),
            bytes: case.bytes,
            linux: case.linux.map(rates),
            is_memory: matches!(case.what, What::Memory { .. }),
        }
    }

    /// Times and rates.
    fn times(&self) -> [String; 7] {
        let rate = |ns| rate(gibps(self.bytes, ns));
        [
            format!(" {}", self.case),
            units::time(self.per_page_ns),
            rate(self.per_page_ns),
            units::time(self.ns),
            rate(self.ns),
            ratio(self.speedup),
            self.linux.map_or(String::new(), |(old, new)| format!("{old:.0} → {new:.0}")),
        ]
    }

    /// Look-ups, leaves and instructions.
    fn counts(&self) -> [String; 6] {
        let instructions = |count: Option<f64>| count.map_or("-".to_owned(), fine);
        [
            format!(" {}", self.case),
            self.lookups_per_page.to_string(),
            self.lookups.to_string(),
            self.leaves.to_string(),
            instructions(self.per_page_instructions_per_4k),
            instructions(self.instructions_per_4k),
        ]
    }
}

/// GB/s, in thousands where they are many.
fn rate(gibps: f64) -> String {
    if gibps < 9999.5 {
        units::three_digits(gibps)
    } else {
        format!("{}k", units::three_digits(gibps / 1000.0))
    }
}

/// Instructions, of which a page may have less than one.
fn fine(count: f64) -> String {
    if count < 0.0995 { format!("{count:.4}") } else { units::three_digits(count) }
}

impl Report {
    pub(super) fn new(
        plan: &Plan,
        cpus: usize,
        instructions_not_counted: Option<String>,
        rows: Vec<Row>,
    ) -> Self {
        let Plan { bytes, runs, quick, .. } = *plan;
        Self { model: MODEL, size_bytes: bytes, runs, cpus, quick, instructions_not_counted, rows }
    }

    /// A table with a line for each row, by operation.
    fn table<const N: usize>(
        &self,
        header: [&str; N],
        choose: impl Fn(&Row) -> bool,
        cells: impl Fn(&Row) -> [String; N],
    ) -> Table {
        let mut table = new_table(header);
        for op in Op::ALL {
            table.add_row([if op == Op::Map { "MAP" } else { "UNMAP" }]);
            for row in self.rows.iter().filter(|row| row.op == op && choose(row)) {
                table.add_row(cells(row));
            }
        }
        align_right(&mut table, 1);
        table
    }
}

const TIMES_HEADER: [&str; 7] = ["", "by page", "GB/s", "by span", "GB/s", "faster", "Linux\nGB/s"];

const COUNTS_HEADER: [&str; 6] =
    ["", "look-ups\nby page", "\nby span", "\nleaves", "instructions/4K\nby page", "\nby span"];

const LEGEND: &str = "Our model by our model: memory, folios, the CPU's page tables and pins are \
    dmaspan-sim's, page tables (Arm stage 1, 4K pages) and gathers are real, and no time has a \
    kernel or hardware in it. By page: as Linux's VFIO container did it, through arrays of 512 \
    pages, with a look-up for each page of a pfnmap and of an unmap, over the same memory and \
    tables. By span: the container. Times are of all bytes: medians of runs in turn. Faster = by \
    page / by span. GB/s are GiB a second, as in Linux's figures, which are those of the series \
    that taught it large folios (16 GiB, v6.16-rc4): before → after, on another machine.";
const LEGEND_CASES: &str = "MADV_HUGEPAGE: folios of 2M as a buddy allocator hands them out of \
    fresh memory, most of them neighbours. 4K in blocks: base pages block by block of 2M, half of \
    each in any order. All others lie anywhere: of 2M, 4K (MAP_POPULATE), 1G (HUGETLBFS) and 64K. \
    threads=N map their shares of the 64K folios \
    into one container. A BAR is named by the leaves of the CPU's tables. Look-ups are leaves met \
    in the CPU's tables to map, and steps over the IOMMU's to unmap; leaves are entries of the \
    IOMMU's tables by span.";
const ONCE: &str = "BAR 4x128G by page is timed once";

/// The report as text, with a newline at its end.
pub(crate) fn render(report: &Report, marks: Marks) -> String {
    let mut text = String::new();
    let size = ByteSize::new(report.size_bytes);
    let runs = if report.runs == 1 { "one run".into() } else { format!("{} runs", report.runs) };
    let cpus = if report.cpus == 1 { "one CPU".into() } else { format!("{} CPUs", report.cpus) };
    let title = format!("The container, page by page and by span: {size}, {runs}, {cpus}");
    push_wrapped(&mut text, "", &title);
    push_table(&mut text, &report.table(TIMES_HEADER, |row| row.is_memory, Row::times));
    push_table(&mut text, &report.table(TIMES_HEADER, |row| !row.is_memory, Row::times));
    push_table(&mut text, &report.table(COUNTS_HEADER, |_| true, Row::counts));
    text.push('\n');
    push_wrapped(&mut text, "", LEGEND);
    text.push('\n');
    push_wrapped(&mut text, "", LEGEND_CASES);
    text.push('\n');
    push_wrapped(&mut text, "note: ", if report.quick { QUICK } else { TIMES });
    if report.runs > 1 {
        push_wrapped(&mut text, "note: ", ONCE);
    }
    if let Some(why) = &report.instructions_not_counted {
        push_wrapped(&mut text, "note: ", &format!("instructions are not counted: {why}"));
    }
    if report.cpus < 4 {
        let crowded = "threads that are more than the CPUs take turns";
        push_wrapped(&mut text, "note: ", crowded);
    }
    text.push('\n');
    let done = "what came out of the tables is what was pinned, nothing was left after the unmaps";
    push_wrapped(&mut text, &format!("{} ", marks.right()), done);
    text
}
