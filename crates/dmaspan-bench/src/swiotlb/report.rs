//! What came of `dmaspan-bench swiotlb`, for people and for programs.

use comfy_table::Table;
use serde::Serialize;

use super::load::Measured;
use super::plan::{Case, Copies, Order, Plan};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{
    Marks, QUICK, TIMES, align_right, new_table, push_table, push_wrapped, ratio,
};
use dmaspan_cli::units;

/// What was measured. `--format json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pool_bytes: u64,
    /// Of the pool that has any.
    areas: u64,
    cpus: u64,
    /// Of the rows `read`, `write` and `read-overwritten`.
    iodepth: u64,
    block: u64,
    quick: bool,
    /// Why instructions were not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    instructions_not_counted: Option<String>,
    rows: Vec<Row>,
    /// Names and threads of cases that need more than half of the pool.
    left_out: Vec<(&'static str, u64)>,
}

/// A case with both pools.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    case: &'static str,
    threads: u64,
    block: u64,
    copies: bool,
    vanilla_ns: f64,
    ns: f64,
    speedup: f64,
    vanilla_mbps: f64,
    mbps: f64,
    vanilla_kiops: f64,
    kiops: f64,
    vanilla_cpu_ns: f64,
    cpu_ns: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    vanilla_instructions: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    instructions: Option<f64>,
    #[serde(skip)]
    label: &'static str,
    #[serde(skip)]
    order: Order,
    #[serde(skip)]
    series: Option<Series>,
}

/// What the series for Linux measured: a guest with 8 CPUs, fio, 4K, 256 out, 5.19-rc2.
#[derive(Clone, Copy, Debug)]
struct Series {
    /// The gain of bandwidth, in per cent.
    gain: u64,
    /// CPU time of an I/O in the guest, before and after, in nanoseconds: utilization by IOPS.
    cpu_ns: (f64, f64),
}

/// With one job and with four: reads, writes.
const SERIES: [[Series; 2]; 2] = [
    [Series { gain: 12, cpu_ns: (4028.0, 3573.0) }, Series { gain: 4, cpu_ns: (3606.0, 3447.0) }],
    [
        Series { gain: 164, cpu_ns: (18_666.0, 3577.0) },
        Series { gain: 130, cpu_ns: (18_889.0, 3564.0) },
    ],
];

fn series(case: &Case) -> Option<Series> {
    let jobs = &SERIES[usize::from(case.threads > 1)];
    match case.name {
        "read" => Some(jobs[0]),
        "write" => Some(jobs[1]),
        _ => None,
    }
}

impl Row {
    pub(super) fn new(case: &Case, vanilla: &Measured, now: &Measured) -> Self {
        let (old, new) = (rounded(vanilla.ns()), rounded(now.ns()));
        // What is never 0, however fast: a picosecond.
        let kiops = |ns: f64| case.threads as f64 * 1e6 / ns.max(0.001);
        let mbps = |ns| kiops(ns) * case.block as f64 / 1000.0;
        Self {
            case: case.name,
            threads: case.threads,
            block: case.block,
            copies: case.copies == Copies::Made,
            vanilla_ns: old,
            ns: new,
            speedup: rounded(old / new.max(0.001)),
            vanilla_mbps: rounded(mbps(old)),
            mbps: rounded(mbps(new)),
            vanilla_kiops: rounded(kiops(old)),
            kiops: rounded(kiops(new)),
            vanilla_cpu_ns: rounded(vanilla.cpu_ns()),
            cpu_ns: rounded(now.cpu_ns()),
            vanilla_instructions: vanilla.instructions().map(rounded),
            instructions: now.instructions().map(rounded),
            label: case.label,
            order: case.order,
            series: series(case),
        }
    }

    fn bandwidth(&self) -> [String; 7] {
        [
            format!(" {}", self.label),
            whole(self.vanilla_mbps),
            whole(self.vanilla_kiops),
            whole(self.mbps),
            whole(self.kiops),
            format!("{:+.0} %", (self.speedup - 1.0) * 100.0),
            self.series.map_or(String::new(), |series| format!("+{} %", series.gain)),
        ]
    }

    fn cpu(&self) -> [String; 6] {
        let series = self.series.map(|series| series.cpu_ns);
        [
            format!(" {}", self.label),
            units::fine_time(self.vanilla_cpu_ns),
            units::fine_time(self.cpu_ns),
            saved(self.vanilla_cpu_ns, self.cpu_ns),
            series.map_or(String::new(), |(old, new)| {
                let micros = |ns| units::three_digits(ns / 1000.0);
                format!("{} → {} µs", micros(old), micros(new))
            }),
            series.map_or(String::new(), |(old, new)| saved(old, new)),
        ]
    }

    fn times(&self) -> [String; 7] {
        [
            format!(" {}", self.label),
            self.threads.to_string(),
            units::fine_time(self.vanilla_ns),
            units::fine_time(self.ns),
            ratio(self.speedup),
            whole(self.vanilla_kiops),
            whole(self.kiops),
        ]
    }

    fn counts(&self) -> [String; 4] {
        let count = |count: Option<f64>| count.map_or("-".to_owned(), units::three_digits);
        let label = if self.copies { self.label.to_owned() } else { format!("{}*", self.label) };
        [
            label,
            self.threads.to_string(),
            count(self.vanilla_instructions),
            count(self.instructions),
        ]
    }
}

/// A number of which tenths say nothing.
fn whole(number: f64) -> String {
    if number < 99.5 { units::three_digits(number) } else { format!("{number:.0}") }
}

/// Nanoseconds, which may be lost ones.
fn saved(old: f64, new: f64) -> String {
    format!("{:.0} ns", old - new)
}

const BANDWIDTH: [&str; 7] =
    ["", "vanilla\nMB/s", "\nkIOPS", "now\nMB/s", "\nkIOPS", "gain", "series"];
const CPU: [&str; 6] = ["CPU of an I/O", "vanilla", "now", "saved", "series", "saved"];
const TIMES_HEADER: [&str; 7] =
    ["", "threads", "vanilla", "now", "faster", "vanilla\nkIOPS", "now\nkIOPS"];
const COUNTS: [&str; 4] = ["instructions of an I/O", "threads", "vanilla", "now"];

impl Report {
    pub(super) fn new(plan: &Plan, uncounted: Option<String>, rows: Vec<Row>) -> Self {
        Self {
            pool_bytes: plan.pool,
            areas: plan.cpus,
            cpus: plan.cpus,
            iodepth: plan.iodepth,
            block: plan.block,
            quick: plan.quick,
            instructions_not_counted: uncounted,
            rows,
            left_out: plan.left_out.iter().map(|case| (case.name, case.threads)).collect(),
        }
    }

    /// A table of the load of fio, by the number of jobs.
    fn queues<const N: usize>(
        &self,
        header: [&str; N],
        cells: impl Fn(&Row) -> [String; N],
    ) -> Table {
        let mut table = new_table(header);
        let mut jobs = 0;
        for row in self.rows.iter().filter(|row| row.order == Order::Queue) {
            if row.threads != jobs {
                jobs = row.threads;
                table.add_row([plural(jobs, "job")]);
            }
            table.add_row(cells(row));
        }
        align_right(&mut table, 1);
        table
    }

    /// A table of pairs and bursts, by whether they copy.
    fn bursts(&self) -> Table {
        let mut table = new_table(TIMES_HEADER);
        for (copies, title) in [(true, "copied in and out"), (false, "copies left out")] {
            table.add_row([title]);
            let rows = self.rows.iter().filter(|row| row.order == Order::Burst);
            for row in rows.filter(|row| row.copies == copies) {
                table.add_row(row.times());
            }
        }
        align_right(&mut table, 1);
        table
    }

    /// How much more CPU time an I/O takes with many jobs than with one.
    fn scaling(&self) -> Option<String> {
        let most = self.rows.iter().filter(|row| row.order == Order::Queue).map(|row| row.threads);
        let most = most.max().filter(|most| *most > 1)?;
        let times = ["read", "write"].map(|case| {
            let row = |jobs| self.rows.iter().find(|row| row.case == case && row.threads == jobs);
            let (one, many) = (row(1)?, row(most)?);
            let [old, new] = [many.vanilla_cpu_ns / one.vanilla_cpu_ns, many.cpu_ns / one.cpu_ns];
            Some(format!("{} (vanilla {}) to {case}", ratio(new), ratio(old)))
        });
        let [Some(read), Some(write)] = times else { return None };
        Some(format!(
            "CPU of an I/O with {most} jobs, by that with one: {read}, {write}; the series, with \
             four: 1.00× (vanilla 4.63×), 1.03× (vanilla 5.24×)"
        ))
    }

    /// How much of their time jobs that wait for no lock had a CPU, in per cent.
    fn had_cpu(&self) -> f64 {
        let alone = || self.rows.iter().filter(|row| row.threads == 1);
        let shares: f64 = alone().map(|row| row.cpu_ns / row.ns.max(0.001)).sum();
        100.0 * shares / alone().count().max(1) as f64
    }

    fn instructions(&self) -> Table {
        let mut table = new_table(COUNTS);
        for row in &self.rows {
            table.add_row(row.counts());
        }
        align_right(&mut table, 1);
        table
    }
}

fn plural(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

const LEGEND: &str = "Vanilla: the pool of Linux before the series for swiotlb performance \
    (5.19-rc2), with one lock, a run length for each slot, and a search from where the last one \
    ended. Now: areas with locks of their own, bitmaps, the slots released last taken first. Both \
    run in turn, with the same load, memory and copies. Gain is that of bandwidth, and faster = \
    vanilla / now. An I/O is the map and the unmap of a buffer: a read copies in and out, a write \
    in. Read, overwritten: the device says that it wrote all, so nothing is copied in; vanilla \
    has no such word, and copies.";
const LEGEND_SERIES: &str = "The series measured whole I/Os of a guest, with one job and with \
    four: its kernel, driver and device are in those times, and make gains smaller. Here they are \
    left out: no time has a device in it, which is this program and works between the turns. \
    Pairs are buffers of 4K mapped and unmapped, bursts are so many mapped and then unmapped, all \
    as reads.";
const STARRED: &str = "* copies left out";

/// The report as text, with a newline at its end.
pub(crate) fn render(report: &Report, marks: Marks) -> String {
    let mut text = String::new();
    let (pool, block) = (ByteSize::new(report.pool_bytes), ByteSize::new(report.block));
    let title = format!(
        "Bounce buffers: {pool} of slots, {}, {}, {} of {block} a job",
        plural(report.areas, "area"),
        plural(report.cpus, "CPU"),
        plural(report.iodepth, "buffer"),
    );
    push_wrapped(&mut text, "", &title);
    push_table(&mut text, &report.queues(BANDWIDTH, Row::bandwidth));
    push_table(&mut text, &report.queues(CPU, Row::cpu));
    if let Some(scaling) = report.scaling() {
        text.push('\n');
        push_wrapped(&mut text, "", &scaling);
    }
    push_table(&mut text, &report.bursts());
    if report.instructions_not_counted.is_none() {
        push_table(&mut text, &report.instructions());
        text.push_str(STARRED);
        text.push('\n');
    }
    text.push('\n');
    push_wrapped(&mut text, "", LEGEND);
    text.push('\n');
    push_wrapped(&mut text, "", LEGEND_SERIES);
    text.push('\n');
    push_notes(&mut text, report);
    text.push('\n');
    let done = "after each turn a device found what was mapped, its bytes came back and no others \
        changed, no two slots overlapped, and none was left";
    push_wrapped(&mut text, &format!("{} ", marks.right()), done);
    text
}

fn push_notes(text: &mut String, report: &Report) {
    push_wrapped(text, "note: ", if report.quick { QUICK } else { TIMES });
    let had_cpu = report.had_cpu();
    if had_cpu < 90.0 && !report.quick {
        let busy = format!(
            "single jobs had a CPU for {had_cpu:.0} % of their time: others use this machine, \
             which bandwidth and times suffer from, and CPU times less"
        );
        push_wrapped(text, "note: ", &busy);
    }
    if let Some(why) = &report.instructions_not_counted {
        push_wrapped(text, "note: ", &format!("instructions are not counted: {why}"));
    }
    for (case, threads) in &report.left_out {
        let out = format!(
            "{case} with {} needs more than half of the pool and is left out; --pool makes it \
             larger",
            plural(*threads, "thread")
        );
        push_wrapped(text, "note: ", &out);
    }
}
