//! What came of `dmaspan-bench swiotlb`, for people and for programs.

use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{QUICK, TIMES, ratio};
use dmaspan_cli::units::{fine_time, three_digits};
use serde_json::json;

use super::load::Measured;
use super::plan::{Case, Order, Plan};
use crate::report::{Column, Fields, Report, count, plural, speedup};
use crate::time;

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

/// A case with both pools.
pub(super) fn row(case: &Case, vanilla: &Measured, now: &Measured) -> Fields {
    let (old, new) = (rounded(vanilla.ns.each()), rounded(now.ns.each()));
    // What is never 0, however fast: a picosecond.
    let kiops = |ns: f64| case.threads as f64 * 1e6 / ns.max(0.001);
    let mbps = |ns| kiops(ns) * case.block as f64 / 1000.0;
    let (old_cpu, cpu) = (rounded(vanilla.cpu_ns.each()), rounded(now.cpu_ns.each()));
    let (is_queue, is_copied) = (case.order == Order::Queue, case.copies);
    let section = match (is_queue, is_copied) {
        (true, _) => plural(case.threads, "job"),
        (false, true) => "copied in and out".to_owned(),
        (false, false) => "copies left out".to_owned(),
    };
    let micros = |ns| three_digits(ns / 1000.0);
    let series = series(case);
    let [gain, cpus, saved_by] = series.map_or_else(Default::default, |series| {
        let (old, new) = series.cpu_ns;
        let cpus = format!("{} → {} µs", micros(old), micros(new));
        [format!("+{} %", series.gain), cpus, saved(old - new)]
    });
    let fields = Fields::from([
        (".section", section.into()),
        (".label", case.label.into()),
        (".queue", is_queue.into()),
        (".saved", (old_cpu - cpu).into()),
        (".gain", gain.into()),
        (".cpus", cpus.into()),
        (".saved_by", saved_by.into()),
        ("case", case.name.into()),
        ("threads", case.threads.into()),
        ("block", case.block.into()),
        ("copies", is_copied.into()),
        ("vanilla_ns", old.into()),
        ("ns", new.into()),
        ("speedup", speedup(old, new).into()),
        ("vanilla_mbps", rounded(mbps(old)).into()),
        ("mbps", rounded(mbps(new)).into()),
        ("vanilla_kiops", rounded(kiops(old)).into()),
        ("kiops", rounded(kiops(new)).into()),
        ("vanilla_cpu_ns", old_cpu.into()),
        ("cpu_ns", cpu.into()),
    ]);
    let instructions = |way: &Measured| way.instructions.counted().map(rounded);
    let fields = fields.some("vanilla_instructions", instructions(vanilla));
    fields.some("instructions", instructions(now))
}

/// A number of which tenths say nothing.
fn whole(number: f64) -> String {
    if number < 99.5 { three_digits(number) } else { format!("{number:.0}") }
}

/// Nanoseconds, which may be lost ones.
fn saved(ns: f64) -> String {
    format!("{ns:.0} ns")
}

/// How much more that is, in per cent.
fn gain(speedup: f64) -> String {
    format!("{:+.0} %", (speedup - 1.0) * 100.0)
}

const BANDWIDTH: &[Column] = &[
    ("vanilla\nMB/s", "vanilla_mbps", whole),
    ("\nkIOPS", "vanilla_kiops", whole),
    ("now\nMB/s", "mbps", whole),
    ("\nkIOPS", "kiops", whole),
    ("gain", "speedup", gain),
    ("series", ".gain", gain),
];
const CPU: &[Column] = &[
    ("vanilla", "vanilla_cpu_ns", fine_time),
    ("now", "cpu_ns", fine_time),
    ("saved", ".saved", saved),
    ("series", ".cpus", saved),
    ("saved", ".saved_by", saved),
];
const TIMES_OF: &[Column] = &[
    ("threads", "threads", count),
    ("vanilla", "vanilla_ns", fine_time),
    ("now", "ns", fine_time),
    ("faster", "speedup", ratio),
    ("vanilla\nkIOPS", "vanilla_kiops", whole),
    ("now\nkIOPS", "kiops", whole),
];
const COUNTS: &[Column] = &[
    ("threads", "threads", count),
    ("vanilla", "vanilla_instructions", three_digits),
    ("now", "instructions", three_digits),
];

/// How much more CPU time an I/O takes with many jobs than with one.
fn scaling(rows: &[Fields]) -> Option<String> {
    let queues = || rows.iter().filter(|row| row.is(".queue"));
    let most = queues().map(|row| row.number("threads")).reduce(f64::max)?;
    let times = ["read", "write"].map(|case| {
        let row = |jobs: f64| {
            queues().find(|row| row.word("case") == case && row.number("threads") >= jobs)
        };
        let (one, many) = (row(1.0)?, row(most)?);
        let more = |name| ratio(many.number(name) / one.number(name));
        Some(format!("{} (vanilla {}) to {case}", more("cpu_ns"), more("vanilla_cpu_ns")))
    });
    let [Some(read), Some(write)] = times else { return None };
    (most > 1.0).then(|| {
        format!(
            "CPU of an I/O with {most} jobs, by that with one: {read}, {write}; the series, with \
             four: 1.00× (vanilla 4.63×), 1.03× (vanilla 5.24×)"
        )
    })
}

/// How much of their time jobs that wait for no lock had a CPU, in per cent.
fn had_cpu(rows: &[Fields]) -> f64 {
    let alone = || rows.iter().filter(|row| row.number("threads") <= 1.0);
    let shares: f64 = alone().map(|row| row.number("cpu_ns") / row.number("ns").max(0.001)).sum();
    100.0 * shares / alone().count().max(1) as f64
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

const DONE: &str = "after each turn a device found what was mapped, its bytes came back and no \
    others changed, no two slots overlapped, and none was left";

/// All of it.
pub(super) fn report(plan: &Plan, rows: Vec<Fields>) -> Report {
    let uncounted = time::uncounted();
    let head = Fields::from([
        ("pool_bytes", plan.pool.into()),
        ("areas", plan.cpus.into()),
        ("cpus", plan.cpus.into()),
        ("iodepth", plan.iodepth.into()),
        ("block", plan.block.into()),
        ("quick", plan.quick.into()),
    ]);
    let head = head.some("instructions_not_counted", uncounted.clone());
    let left_out = plan.left_out.iter().map(|case| json!([case.name, case.threads]));
    let tail = Fields::from([("left_out", left_out.collect())]);
    let title = format!(
        "Bounce buffers: {} of slots, {}, {}, {} of {} a job",
        ByteSize::new(plan.pool),
        plural(plan.cpus, "area"),
        plural(plan.cpus, "CPU"),
        plural(plan.iodepth, "buffer"),
        ByteSize::new(plan.block),
    );
    let (scaling, had_cpu) = (scaling(&rows), had_cpu(&rows));
    let mut report = Report::new([head, tail], rows, &title, DONE);
    report.tabulate("", BANDWIDTH, |row| row.is(".queue"));
    report.tabulate("CPU of an I/O", CPU, |row| row.is(".queue"));
    scaling.iter().for_each(|words| report.say(words));
    report.tabulate("", TIMES_OF, |row| !row.is(".queue"));
    if uncounted.is_none() {
        report.tabulate("instructions of an I/O", COUNTS, |_| true);
    }
    report.say(LEGEND);
    report.say(LEGEND_SERIES);
    report.note(if plan.quick { QUICK } else { TIMES });
    if had_cpu < 90.0 && !plan.quick {
        report.note(format!(
            "single jobs had a CPU for {had_cpu:.0} % of their time: others use this machine, \
             which bandwidth and times suffer from, and CPU times less"
        ));
    }
    report.note_uncounted(uncounted.as_deref());
    for case in &plan.left_out {
        report.note(format!(
            "{} with {} needs more than half of the pool and is left out; --pool makes it larger",
            case.name,
            plural(case.threads, "thread")
        ));
    }
    report
}
