//! What came of `dmaspan-bench fixed`, for people and for programs.

use std::fs;

use serde::Serialize;

use super::clocks::Taken;
use super::plan::Plan;
use super::source::Limits;
use super::work::{Reader, WAYS, Way};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::median;
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{Marks, align_right, new_table, push_table, push_wrapped};
use dmaspan_cli::units;

/// What was measured. `--format json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    path: String,
    size: u64,
    /// The kernel's release.
    kernel: String,
    block: u64,
    depth: u32,
    count: u64,
    runs: u32,
    memory: &'static str,
    page_size: u64,
    /// Registered buffers.
    buffers: u32,
    /// Pages of each.
    pages: u64,
    /// How they came to the ring.
    registration: String,
    disk: Option<Limits>,
    rows: Vec<Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

/// A way to read: medians for one read.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    way: &'static str,
    reads_per_s: f64,
    gib_per_s: f64,
    wall_ns: u64,
    thread_ns: u64,
    cpu_ns: u64,
    busy_ns: Option<u64>,
    requests: Option<f64>,
}

const GIB: f64 = (1u64 << 30) as f64;

impl Row {
    fn new(plan: &Plan, way: Way, taken: &[Taken]) -> Self {
        let count = plan.count.max(1);
        let each = |of: fn(&Taken) -> u64| median(&taken.iter().map(of).collect::<Vec<_>>());
        let every = |of: fn(&Taken) -> Option<u64>| {
            let all: Option<Vec<u64>> = taken.iter().map(of).collect();
            all.map(|all| median(&all))
        };
        let wall = each(|taken| taken.wall);
        let rate = count as f64 / (wall.max(1) as f64 / 1e9);
        Self {
            way: way.name(),
            reads_per_s: rounded(rate),
            gib_per_s: rounded(rate * plan.block as f64 / GIB),
            wall_ns: wall / count,
            thread_ns: each(|taken| taken.thread) / count,
            cpu_ns: each(|taken| taken.cpu) / count,
            busy_ns: every(|taken| taken.busy).map(|ns| ns / count),
            requests: every(|taken| taken.requests)
                .map(|requests| rounded(requests as f64 / count as f64)),
        }
    }

    fn cells(&self) -> [String; 8] {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            format!(" {}", self.way),
            units::three_digits(self.reads_per_s),
            units::three_digits(self.gib_per_s),
            units::time(self.wall_ns),
            units::time(self.thread_ns),
            units::time(self.cpu_ns),
            or_none(self.busy_ns.map(units::time)),
            or_none(self.requests.map(units::three_digits)),
        ]
    }
}

const HEADER: [&str; 8] = [
    "A READ",
    "\nreads/s",
    "\nGiB/s",
    "\ntime",
    "CPU time\nthread",
    "\nprocess",
    "\nmachine",
    "\nrequests",
];

impl Report {
    pub(super) fn new(plan: &Plan, reader: &Reader<'_>, taken: &[Vec<Taken>; 2]) -> Self {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let page_size = plan.memory.page_size();
        Self {
            path: plan.source.path.display().to_string(),
            size: plan.source.len,
            kernel: release.trim().to_owned(),
            block: plan.block,
            depth: plan.depth,
            count: plan.count,
            runs: plan.runs,
            memory: plan.memory.name(),
            page_size,
            buffers: reader.buffers(),
            pages: plan.buffer / page_size,
            registration: reader.method().to_string(),
            disk: plan.source.limits(),
            rows: WAYS.iter().zip(taken).map(|(way, taken)| Row::new(plan, *way, taken)).collect(),
            notes: plan.notes.clone(),
        }
    }

    fn title(&self) -> String {
        let size = |bytes| ByteSize::new(bytes);
        format!(
            "Direct reads of {} at random places of {} ({}), {} at a time, Linux {}: medians of {} \
             × {} reads each way",
            size(self.block),
            self.path,
            size(self.size),
            self.depth,
            self.kernel,
            self.runs,
            self.count
        )
    }

    fn buffers(&self) -> String {
        let (buffers, pages) = (plural(self.buffers.into(), "buffer"), plural(self.pages, "page"));
        format!(
            "{buffers} of {pages} of {}, {} memory, {}",
            units::page_size(self.page_size),
            self.memory,
            self.registration
        )
    }
}

/// `1 page`, `4 pages`.
fn plural(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

const LEGEND: &str = "Fixed: buffers registered with the ring. Plain: the same buffers by their \
    addresses, pinned for each read. Thread is what submits and waits; process has the kernel's \
    threads for it too; machine is all time in which a CPU was not idle, for whatever.";

/// The report as text, with a newline at its end.
pub(crate) fn render(report: &Report, marks: Marks) -> String {
    let mut text = String::new();
    push_wrapped(&mut text, "", &report.title());
    let mut table = new_table(HEADER);
    for row in &report.rows {
        table.add_row(row.cells());
    }
    align_right(&mut table, 1);
    push_table(&mut text, &table);
    text.push('\n');
    push_wrapped(&mut text, "", LEGEND);
    text.push('\n');
    push_wrapped(&mut text, "note: ", &report.buffers());
    if let Some(disk) = &report.disk {
        let limits = format!(
            "the disk takes {} KiB ({} KiB at most, /sys/block/*/queue/max_sectors_kb) and {} \
             pieces a request",
            disk.max_sectors_kb, disk.max_hw_sectors_kb, disk.max_segments
        );
        push_wrapped(&mut text, "note: ", &limits);
    }
    for note in &report.notes {
        push_wrapped(&mut text, "note: ", note);
    }
    text.push('\n');
    push_wrapped(&mut text, &format!("{} ", marks.right()), "both ways read the same bytes");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_for_one_read_and_says_nothing_where_a_run_had_nothing() {
        let row = |cpus: [Option<u64>; 2]| {
            let taken = cpus.map(|busy| Taken {
                wall: 2_000_000_000,
                thread: 400,
                cpu: 800,
                busy,
                requests: Some(34),
            });
            Row::new(&super::super::plan::tests::example(8 << 20, 2), Way::Fixed, &taken)
        };
        let both = row([Some(10), Some(30)]);
        assert_eq!((both.wall_ns, both.thread_ns, both.cpu_ns), (1_000_000_000, 200, 400));
        assert_eq!((both.busy_ns, both.requests), (Some(10), Some(17.0)));
        assert_eq!((both.reads_per_s, both.gib_per_s), (1.0, 0.008));
        assert_eq!(row([Some(10), None]).busy_ns, None);
    }
}
