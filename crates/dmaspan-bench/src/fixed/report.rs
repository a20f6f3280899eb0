//! The results of `dmaspan-bench fixed`, for people and for programs.

use std::fs;

use comfy_table::Table;
use dmaspan_cli::series::{FIXED_BUFFERS, SeriesRow};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::{median, rounded};
use dmaspan_cli::units::{fine_time, page_size, three_digits};
use serde_json::Value;

use super::clocks::Taken;
use super::plan::Plan;
use super::work::{Op, Reader, Way};
use crate::args::name_of;
use crate::report::{self, Column, Fields, Report, plural};

const GIB: f64 = (1u64 << 30) as f64;

/// An operation one way: medians for one of them.
pub(super) fn row(plan: &Plan, op: Op, way: Way, taken: &[Taken]) -> Fields {
    let count = plan.count.max(1);
    let each = |of: fn(&Taken) -> u64| median(&taken.iter().map(of).collect::<Vec<_>>());
    let every = |of: fn(&Taken) -> Option<u64>| {
        let all: Option<Vec<u64>> = taken.iter().map(of).collect();
        all.map(|all| median(&all))
    };
    let wall = each(|taken| taken.wall);
    let rate = count as f64 / (wall.max(1) as f64 / 1e9);
    let requests = every(|taken| taken.requests);
    let fields = Fields::from([
        (".section", format!("A {}", name_of(&op).to_uppercase()).into()),
        (".label", name_of(&way).into()),
        ("op", name_of(&op).into()),
        ("way", name_of(&way).into()),
        ("reads_per_s", rounded(rate).into()),
        ("gib_per_s", rounded(rate * plan.block as f64 / GIB).into()),
        ("wall_ns", (wall / count).into()),
        ("thread_ns", (each(|taken| taken.thread) / count).into()),
        ("cpu_ns", (each(|taken| taken.cpu) / count).into()),
        ("busy_ns", every(|taken| taken.busy).map(|ns| ns / count).into()),
        ("requests", requests.map(|requests| rounded(requests as f64 / count as f64)).into()),
    ]);
    match way {
        Way::Fixed => {
            fields.series(&FIXED_BUFFERS, FIXED_BUFFERS.of(series_case(op)), &differs(plan))
        }
        Way::Plain => fields,
    }
}

/// What fio calls it.
const fn series_case(op: Op) -> &'static str {
    match op {
        Op::Read => "randread",
        Op::Write => "randwrite",
    }
}

/// Each way in which this measurement differs from that of the series.
fn differs(plan: &Plan) -> String {
    let all = ["CPU times, no profile".to_owned()].into_iter().chain(load_differs(plan));
    all.collect::<Vec<_>>().join(", ")
}

/// Each way in which the load differs from that of the series: depth, block and page.
fn load_differs(plan: &Plan) -> impl Iterator<Item = String> {
    let depth = (plan.depth != 64).then(|| format!("{} at a time", plan.depth));
    let block = (plan.block != 8 << 20).then(|| format!("blocks of {}", ByteSize::new(plan.block)));
    let page = plan.memory.page_size();
    let page = (page != 2 << 20).then(|| format!("pages of {}", page_size(page)));
    depth.into_iter().chain(block).chain(page)
}

/// The profile of the series.
fn series_table(plan: &Plan) -> Table {
    let differs = load_differs(plan).collect::<Vec<_>>().join(",\n");
    let lines: Vec<Fields> = FIXED_BUFFERS
        .of("randread")
        .map(|row| {
            let share = |op| {
                let shown = FIXED_BUFFERS.row(series_case(op), row.figure).map(SeriesRow::shown);
                Value::from(shown.unwrap_or_default())
            };
            let (read, write) = (share(Op::Read), share(Op::Write));
            Fields::from([
                (".label", row.figure.into()),
                ("read", read),
                ("write", write),
                ("differs", differs.as_str().into()),
            ])
        })
        .collect();
    let columns = plan.ops.iter().map(|op| match op {
        Op::Read => ("series, % of cycles\nrandread", "read", three_digits as fn(f64) -> String),
        Op::Write => ("\nrandwrite", "write", three_digits as fn(f64) -> String),
    });
    let here = ("differs\nhere", "differs", three_digits as fn(f64) -> String);
    let columns = columns.chain((!differs.is_empty()).then_some(here));
    report::table("", &columns.collect::<Vec<_>>(), &lines)
}

const FIGURES: &[Column] = &[
    ("\nI/Os/s", "reads_per_s", three_digits),
    ("\nGiB/s", "gib_per_s", three_digits),
    ("\ntime", "wall_ns", fine_time),
    ("CPU time\nthread", "thread_ns", fine_time),
    ("\nprocess", "cpu_ns", fine_time),
    ("\nmachine", "busy_ns", fine_time),
    ("\nrequests", "requests", three_digits),
];

const LEGEND: &str = "Fixed: buffers registered with the ring. Plain: the same buffers by their \
    addresses, pinned for each I/O. Thread is what submits and waits; process has the kernel's \
    threads for it too; machine is all time in which a CPU was not idle, for whatever.";

const LEGEND_SERIES: &str = "The series: shares of all cycles in a profile of fio with fixed \
    buffers (8M, 64 at a time, four pages of 2M), before it → with it. This program has no \
    profiler: compare how CPU times and requests of fixed and plain I/Os differ between kernels \
    before 6.12 and after.";

const DONE: &str = "both ways moved the same bytes";

/// All of it.
pub(super) fn report(plan: &Plan, reader: &Reader<'_>, rows: Vec<Fields>) -> Report {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let (kernel, source, page) = (kernel.trim(), &plan.source, plan.memory.page_size());
    let (path, pages) = (source.path.display().to_string(), plan.buffer / page);
    let (memory, registration) = (plan.memory.name(), reader.method().to_string());
    let limits = source.limits();
    let head = Fields::from([
        ("path", path.as_str().into()),
        ("size", source.len.into()),
        ("kernel", kernel.into()),
        ("block", plan.block.into()),
        ("depth", plan.depth.into()),
        ("count", plan.count.into()),
        ("runs", plan.runs.into()),
        ("memory", memory.into()),
        ("page_size", page.into()),
        // Registered buffers, pages of each, and how they came to the ring.
        ("buffers", reader.buffers().into()),
        ("pages", pages.into()),
        ("registration", registration.as_str().into()),
        ("disk", serde_json::to_value(limits).unwrap_or_default()),
    ]);
    let notes = (!plan.notes.is_empty()).then(|| plan.notes.clone());
    let tail = Fields::default().some("notes", notes);
    let [block, size] = [plan.block, source.len].map(ByteSize::new);
    let title = format!(
        "Direct {} of {block} at random places of {path} ({size}), {} at a time, Linux {kernel}: \
         medians of {} × {} each way",
        if plan.ops.contains(&Op::Write) { "reads and writes" } else { "reads" },
        plan.depth,
        plan.runs,
        plan.count
    );
    let mut report = Report::new([head, tail], rows, &title, DONE);
    report.tabulate("", FIGURES, |_| true);
    report.show(&series_table(plan));
    report.say(LEGEND);
    report.say(LEGEND_SERIES);
    let (buffers, pages) = (plural(reader.buffers().into(), "buffer"), plural(pages, "page"));
    let page = page_size(page);
    report.note(format!("{buffers} of {pages} of {page}, {memory} memory, {registration}"));
    if let Some(disk) = limits {
        report.note(format!(
            "the disk takes {} KiB ({} KiB at most, /sys/block/*/queue/max_sectors_kb) and {} \
             pieces a request",
            disk.max_sectors_kb, disk.max_hw_sectors_kb, disk.max_segments
        ));
    }
    plan.notes.iter().for_each(|note| report.note(note));
    report
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_is_for_one_read_and_says_nothing_where_a_run_had_nothing() {
        let row = |op, cpus: [Option<u64>; 2]| {
            let taken = cpus.map(|busy| Taken {
                wall: 2_000_000_000,
                thread: 400,
                cpu: 800,
                busy,
                requests: Some(34),
            });
            super::row(&super::super::plan::tests::example(8 << 20, 2), op, Way::Plain, &taken)
        };
        let both = row(Op::Write, [Some(10), Some(30)]);
        let both = serde_json::to_value(both).unwrap();
        assert_eq!(
            both,
            json!({
                "op": "write", "way": "plain",
                "wall_ns": 1_000_000_000, "thread_ns": 200, "cpu_ns": 400,
                "busy_ns": 10, "requests": 17.0, "reads_per_s": 1.0, "gib_per_s": 0.008,
            })
        );
        assert!(row(Op::Read, [Some(10), None]).has("busy_ns", Value::Null));
    }
}
