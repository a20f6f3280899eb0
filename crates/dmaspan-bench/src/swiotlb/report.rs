//! The results of `dmaspan-bench swiotlb`, for people and for programs.

use dmaspan_cli::series::{SWIOTLB, SeriesRow, Told};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{QUICK, TIMES, ratio};
use dmaspan_cli::units::{fine_time, three_digits};
use serde_json::{Value, json};

use super::load::Measured;
use super::plan::{Case, Order, PATCHES, Plan};
use crate::report::{Column, Fields, Report, count, plural, speedup};
use crate::time;

/// What the series measured of this load, with one job or with four: its name for it.
fn series_case(case: &Case) -> Option<&'static str> {
    let one_or_four = usize::from(case.threads > 1);
    match case.name {
        "read" => Some(["1 job read", "4 jobs read"][one_or_four]),
        "write" => Some(["1 job write", "4 jobs write"][one_or_four]),
        _ => None,
    }
}

/// CPU time of an I/O in the series' guest, before and after, in nanoseconds: utilization by I/Os.
fn series_cpu_ns(name: &str) -> Option<[f64; 2]> {
    let value = |figure: &str, when: fn(&SeriesRow) -> Option<Told>| {
        Some(when(SWIOTLB.row(name, figure)?)?.parts().1)
    };
    let cpu = |when| Some(value("guest CPU", when)? / 100.0 * 1e6 / value("I/Os", when)?);
    Some([cpu(|row| row.before)?, cpu(|row| row.after)?])
}

/// What is not as it was for the series.
fn differs(case: &Case, plan: &Plan) -> String {
    let jobs = (case.threads > 1 && case.threads != 4).then(|| plural(case.threads, "job"));
    let depth = (case.depth != 256).then(|| format!("{} out", case.depth));
    let block = (case.block != 4096).then(|| ByteSize::new(case.block).to_string());
    let cpus = (plan.cpus != 8).then(|| plural(plan.cpus, "CPU"));
    let all = ["no guest".to_owned()].into_iter().chain(jobs).chain(depth).chain(block);
    all.chain(cpus).collect::<Vec<_>>().join(",\n")
}

/// With what the series measured of it.
fn beside_series(fields: Fields, case: &Case, plan: &Plan) -> Fields {
    let Some(name) = series_case(case) else { return fields };
    let short = |figure| SWIOTLB.row(name, figure).map(SeriesRow::shown_short);
    let cpus = series_cpu_ns(name).unwrap_or_default();
    let micros = |ns: f64| three_digits(ns / 1000.0);
    // As the authors say it: by I/Os.
    let gain = SWIOTLB.row(name, "I/Os").and_then(SeriesRow::ratio);
    let fields = fields
        .some(".gain", gain.map(|ratio| self::gain(1.0 / ratio)))
        .some(".series_mbps", short("bandwidth"))
        .some(".series_kiops", short("I/Os"))
        .some(".series_host", short("host CPU"))
        .some(".series_guest", short("guest CPU"))
        .and([
            (".cpus", format!("{} → {} µs", micros(cpus[0]), micros(cpus[1])).into()),
            (".saved_by", saved(cpus[0] - cpus[1]).into()),
        ]);
    fields.series(&SWIOTLB, SWIOTLB.of(name), &differs(case, plan))
}

/// A case with all pools: vanilla and now, those between by the names of their patches, and what
/// each area of now held at most.
pub(super) fn row(
    plan: &Plan,
    case: &Case,
    [vanilla, now]: [&Measured; 2],
    patched: &[(&str, &Measured)],
    high_water: &[u64],
) -> Fields {
    let (old, new) = (rounded(vanilla.ns.each()), rounded(now.ns.each()));
    // What is never 0, however fast: a picosecond.
    let kiops = |ns: f64| case.threads as f64 * 1e6 / ns.max(0.001);
    let mbps = |ns| kiops(ns) * case.block as f64 / 1000.0;
    let percent = |cpu: f64, ns: f64| rounded(100.0 * case.threads as f64 * cpu / ns.max(0.001));
    let (old_cpu, cpu) = (rounded(vanilla.cpu_ns.each()), rounded(now.cpu_ns.each()));
    let (is_queue, is_copied) = (case.order == Order::Queue, case.copies);
    let section = match (is_queue, is_copied) {
        // The tables of bandwidth and CPU time have the series' figures in these lines.
        (true, _) => format!(
            "{}; series\n {} on 8 CPUs",
            plural(case.threads, "job"),
            if case.threads > 1 { 4 } else { 1 }
        ),
        (false, true) => "copied in and out".to_owned(),
        (false, false) => "copies left out".to_owned(),
    };
    let fields = Fields::from([
        (".section", section.into()),
        (".label", case.label.into()),
        (".queue", is_queue.into()),
        (".saved", (old_cpu - cpu).into()),
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
        // Of one CPU, of all jobs, as fio's host and guest count it.
        ("vanilla_cpu_percent", percent(old_cpu, old).into()),
        ("cpu_percent", percent(cpu, new).into()),
        ("area_high_water", high_water.into()),
    ]);
    let each = |measured: &Measured| {
        let (ns, cpu) = (rounded(measured.ns.each()), rounded(measured.cpu_ns.each()));
        json!({"ns": ns, "cpu_ns": cpu, "kiops": rounded(kiops(ns)), "mbps": rounded(mbps(ns))})
    };
    let patches: Value =
        patched.iter().map(|(name, measured)| ((*name).to_owned(), each(measured))).collect();
    let shown = |figure: &str, name: &str| Value::from(patches[name][figure].as_f64());
    let fields = if patched.is_empty() {
        fields
    } else {
        let fields = KIOPS_OF.iter().zip(CPU_OF).zip(PATCHES).fold(
            fields,
            |fields, ((kiops, cpu), name)| {
                fields.and([(*kiops, shown("kiops", name)), (cpu, shown("cpu_ns", name))])
            },
        );
        fields.and([("patches", patches.clone())])
    };
    let waits = |way: &Measured| Value::from(rounded(way.waits.each() * 1e6));
    let fields = match plan.oversubscribed {
        true => fields.and([("vanilla_waits", waits(vanilla)), ("waits", waits(now))]),
        false => fields,
    };
    let instructions = |way: &Measured| way.instructions.counted().map(rounded);
    let fields = fields.some("vanilla_instructions", instructions(vanilla));
    beside_series(fields.some("instructions", instructions(now)), case, plan)
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
/// The fields of [`PATCHES`].
const KIOPS_OF: [&str; 4] = [".kiops_lock", ".kiops_bitmap", ".kiops_order", ".kiops_all"];
const CPU_OF: [&str; 4] = [".cpu_lock", ".cpu_bitmap", ".cpu_order", ".cpu_all"];

/// Patch by patch.
const KIOPS: &[Column] = &[
    ("vanilla", "vanilla_kiops", whole),
    (PATCHES[0], KIOPS_OF[0], whole),
    (PATCHES[1], KIOPS_OF[1], whole),
    (PATCHES[2], KIOPS_OF[2], whole),
    (PATCHES[3], KIOPS_OF[3], whole),
    ("now", "kiops", whole),
];
const CPUS: &[Column] = &[
    ("vanilla", "vanilla_cpu_ns", fine_time),
    (PATCHES[0], CPU_OF[0], fine_time),
    (PATCHES[1], CPU_OF[1], fine_time),
    (PATCHES[2], CPU_OF[2], fine_time),
    (PATCHES[3], CPU_OF[3], fine_time),
    ("now", "cpu_ns", fine_time),
];

/// How often a lock was waited for, of a million I/Os.
const WAITS: &[Column] = &[("vanilla", "vanilla_waits", whole), ("now", "waits", whole)];

/// What the series measured, beside the CPUs that jobs had here.
const SERIES: &[Column] = &[
    ("series\nMB/s", ".series_mbps", whole),
    ("\nkIOPS", ".series_kiops", whole),
    ("CPU, %\nhost", ".series_host", whole),
    ("\nguest", ".series_guest", whole),
    ("differs\nhere", ".differs", whole),
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

/// How much more CPU time an I/O takes with the most jobs than with one, by case: vanilla, with
/// each patch, and now. Nothing where there is but one number of jobs, or not one job.
fn growth(rows: &[Fields]) -> Option<Value> {
    let queues = || rows.iter().filter(|row| row.is(".queue"));
    let threads = |row: &&Fields| row.number("threads");
    let busiest = queues().max_by(|one, other| threads(one).total_cmp(&threads(other)))?;
    let most = threads(&busiest);
    let cases = ["read", "write"].map(|case| {
        let row = |jobs: f64| {
            queues().find(|row| row.word("case") == case && row.number("threads") >= jobs)
        };
        let (one, many) = (row(1.0).filter(|row| row.has("threads", 1))?, row(most)?);
        let more = |name: &str| Value::from(rounded(many.number(name) / one.number(name)));
        let pools = [("vanilla", "vanilla_cpu_ns"), ("now", "cpu_ns")];
        let pools = pools.into_iter().chain(PATCHES.into_iter().zip(CPU_OF));
        let pools: Value = pools.map(|(pool, name)| (pool.to_owned(), more(name))).collect();
        Some((case.to_owned(), pools))
    });
    let [Some(read), Some(write)] = cases else { return None };
    (most > 1.0).then(|| json!({"jobs": busiest.get("threads"), read.0: read.1, write.0: write.1}))
}

/// The same in words.
fn scaling(growth: &Value) -> String {
    let more = |case: &str, pool: &str| ratio(growth[case][pool].as_f64().unwrap_or(0.0));
    let of =
        |case: &str| format!("{} (vanilla {}) to {case}", more(case, "now"), more(case, "vanilla"));
    format!(
        "CPU of an I/O with {} jobs, by that with one: {}, {}; the series, with four: 1.00× \
         (vanilla 4.63×), 1.03× (vanilla 5.24×)",
        growth["jobs"],
        of("read"),
        of("write")
    )
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
const LEGEND_PATCHES: &str = "Patch by patch, each alone over vanilla: lock is vanilla with a \
    lock for each area, bitmap has free slots in a bitmap, order takes the slots released last \
    first, and all has the three. They are models like vanilla; now is dmaspan's own pool.";
const LEGEND_SHARED: &str = "Jobs share CPUs, as a guest's CPUs do on a host that has fewer, \
    and all locks spin, as a kernel's do: who waits for a lock whose holder has no CPU uses its \
    own for nothing. Pools have an area for each job, unless --areas says otherwise.";
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
        ("areas", plan.areas.into()),
        ("oversubscribed", plan.oversubscribed.into()),
        ("cpus", plan.cpus.into()),
        ("iodepth", plan.iodepth.into()),
        ("block", plan.block.into()),
        ("quick", plan.quick.into()),
    ]);
    let head = head.some("instructions_not_counted", uncounted.clone());
    let growth = growth(&rows);
    let left_out = plan.left_out.iter().map(|case| json!([case.name, case.threads]));
    let tail = Fields::from([("left_out", left_out.collect())]).some("growth", growth.clone());
    let title = format!(
        "Bounce buffers: {} of slots, {}, {}, {} of {} a job",
        ByteSize::new(plan.pool),
        plural(plan.areas, "area"),
        plural(plan.cpus, "CPU"),
        plural(plan.iodepth, "buffer"),
        ByteSize::new(plan.block),
    );
    let had_cpu = had_cpu(&rows);
    let mut report = Report::new([head, tail], rows, &title, DONE);
    report.tabulate("", BANDWIDTH, |row| row.is(".queue"));
    report.tabulate("CPU of an I/O", CPU, |row| row.is(".queue"));
    report.tabulate("", SERIES, |row| row.knows("series"));
    growth.iter().for_each(|growth| report.say(&scaling(growth)));
    report.tabulate("kIOPS", KIOPS, |row| row.knows("patches"));
    report.tabulate("CPU of an I/O", CPUS, |row| row.knows("patches"));
    if plan.oversubscribed {
        report.tabulate("waits for a lock in a million I/Os", WAITS, |row| row.is(".queue"));
    } else {
        report.tabulate("", TIMES_OF, |row| !row.is(".queue"));
    }
    if uncounted.is_none() {
        report.tabulate("instructions of an I/O", COUNTS, |_| true);
    }
    report.say(LEGEND);
    report.say(LEGEND_PATCHES);
    report.say(LEGEND_SERIES);
    if plan.oversubscribed {
        report.say(LEGEND_SHARED);
    }
    report.note(if plan.quick { QUICK } else { TIMES });
    if had_cpu < 90.0 && !plan.quick && !plan.oversubscribed {
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
