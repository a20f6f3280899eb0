//! What came of `dmaspan-bench dma`, for people and for programs.

use std::collections::BTreeMap;
use std::fmt::Write;

use comfy_table::Table;
use dmaspan::dma::Flush;
use serde::Serialize;

use super::args::{Mode, direction_name};
use super::latency::{Figures, PERMILLES};
use super::plan::{BLOCK, Case, PAGE, Plan};
use super::work::Measured;
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{
    Marks, QUICK, TIMES, align_right, new_table, push_table, push_wrapped, ratio,
};
use dmaspan_cli::units;

/// What was measured. `--format json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    cpus: u64,
    direction: &'static str,
    bits: u32,
    flush: &'static str,
    delay_ns: u64,
    /// `null` for the grid.
    seconds: Option<u64>,
    quick: bool,
    /// What looking at the clock takes, which no figure has in it.
    clock_ns: u64,
    rows: Vec<Row>,
}

/// A case, both ways. Times are in microseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Row {
    threads: u64,
    granule: u64,
    mode: &'static str,
    map_us: f64,
    unmap_us: f64,
    per_page_map_us: f64,
    per_page_unmap_us: f64,
    speedup_map: f64,
    speedup_unmap: f64,
    map_stddev_us: f64,
    unmap_stddev_us: f64,
    per_page_map_stddev_us: f64,
    per_page_unmap_stddev_us: f64,
    map_percentiles_us: Percentiles,
    unmap_percentiles_us: Percentiles,
    per_page_map_percentiles_us: Percentiles,
    per_page_unmap_percentiles_us: Percentiles,
    invalidations_per_unmap: f64,
    syncs_per_unmap: f64,
    per_page_invalidations_per_unmap: f64,
    per_page_syncs_per_unmap: f64,
    operations: u64,
    per_page_operations: u64,
    /// Maps and unmaps that waited for a CPU.
    interrupted: u64,
    per_page_interrupted: u64,
}

/// By what they are called: `50`, `90`, `99`, `99.9`.
type Percentiles = BTreeMap<&'static str, f64>;

const PERCENTILES: [&str; PERMILLES.len()] = ["50", "90", "99", "99.9"];

/// Microseconds to a tenth of a nanosecond.
fn us(ns: f64) -> f64 {
    (ns * 10.0).round() / 10_000.0
}

fn percentiles(figures: &Figures) -> Percentiles {
    PERCENTILES.into_iter().zip(figures.percentiles.map(us)).collect()
}

/// How many times faster; of the times as they are printed.
fn speedup(per_page_us: f64, us: f64) -> f64 {
    rounded(per_page_us / us.max(0.0001))
}

impl Row {
    pub(super) fn new(case: &Case, per_page: &Measured, batched: &Measured) -> Self {
        let (map, unmap) = (batched.map.figures(), batched.unmap.figures());
        let (old_map, old_unmap) = (per_page.map.figures(), per_page.unmap.figures());
        let each = |told: u64, unmap: &Figures| {
            let each = told as f64 / unmap.count.max(1) as f64;
            (each * 1e6).round() / 1e6
        };
        let (map_us, unmap_us) = (us(map.average), us(unmap.average));
        let (per_page_map_us, per_page_unmap_us) = (us(old_map.average), us(old_unmap.average));
        Self {
            threads: case.threads,
            granule: case.granule,
            mode: case.mode.name(),
            map_us,
            unmap_us,
            per_page_map_us,
            per_page_unmap_us,
            speedup_map: speedup(per_page_map_us, map_us),
            speedup_unmap: speedup(per_page_unmap_us, unmap_us),
            map_stddev_us: us(map.deviation),
            unmap_stddev_us: us(unmap.deviation),
            per_page_map_stddev_us: us(old_map.deviation),
            per_page_unmap_stddev_us: us(old_unmap.deviation),
            map_percentiles_us: percentiles(&map),
            unmap_percentiles_us: percentiles(&unmap),
            per_page_map_percentiles_us: percentiles(&old_map),
            per_page_unmap_percentiles_us: percentiles(&old_unmap),
            invalidations_per_unmap: each(batched.told.commands, &unmap),
            syncs_per_unmap: each(batched.told.syncs, &unmap),
            per_page_invalidations_per_unmap: each(per_page.told.commands, &old_unmap),
            per_page_syncs_per_unmap: each(per_page.told.syncs, &old_unmap),
            operations: unmap.count,
            per_page_operations: old_unmap.count,
            interrupted: map.interrupted + unmap.interrupted,
            per_page_interrupted: old_map.interrupted + old_unmap.interrupted,
        }
    }

    /// A line of the grid: times as the seed of the grid has them, map and unmap together.
    fn cells(&self) -> [String; 6] {
        let (count, size) = (self.granule, units::page_size(self.granule * PAGE));
        let pair = |map, unmap| format!("{}/{}", micros(map), micros(unmap));
        let (old, new) = (self.per_page_invalidations_per_unmap, self.invalidations_per_unmap);
        [
            format!("g={count} ({size})"),
            pair(self.per_page_map_us, self.per_page_unmap_us),
            pair(self.map_us, self.unmap_us),
            format!("{}/{}", ratio(self.speedup_map), ratio(self.speedup_unmap)),
            format!("{}/{}", per_unmap(old), per_unmap(new)),
            format!(
                "{}/{}",
                per_unmap(self.per_page_syncs_per_unmap),
                per_unmap(self.syncs_per_unmap)
            ),
        ]
    }

    /// All figures of a case.
    fn table(&self) -> Table {
        let mut table = new_table(["", "by page", "batched", "faster"]);
        let mut add = |label: &str, old: String, new: String, faster: String| {
            table.add_row([label.to_owned(), old, new, faster]);
        };
        let time = |us: f64| units::fine_time(us * 1000.0);
        let sets = [
            (
                "MAP",
                (self.per_page_map_us, self.map_us, self.speedup_map),
                (self.per_page_map_stddev_us, self.map_stddev_us),
                (&self.per_page_map_percentiles_us, &self.map_percentiles_us),
            ),
            (
                "UNMAP",
                (self.per_page_unmap_us, self.unmap_us, self.speedup_unmap),
                (self.per_page_unmap_stddev_us, self.unmap_stddev_us),
                (&self.per_page_unmap_percentiles_us, &self.unmap_percentiles_us),
            ),
        ];
        for (title, average, deviation, percentiles) in sets {
            add(title, String::new(), String::new(), String::new());
            add(" average", time(average.0), time(average.1), ratio(average.2));
            add(" deviation", time(deviation.0), time(deviation.1), String::new());
            for name in PERCENTILES {
                let of = |set: &Percentiles| time(set.get(name).copied().unwrap_or(0.0));
                let (old, new) = (of(percentiles.0), of(percentiles.1));
                add(&format!(" {name} %"), old, new, String::new());
            }
        }
        let (old, new) = (self.per_page_invalidations_per_unmap, self.invalidations_per_unmap);
        add(" commands", per_unmap(old), per_unmap(new), String::new());
        let (old, new) = (self.per_page_syncs_per_unmap, self.syncs_per_unmap);
        add(" syncs", per_unmap(old), per_unmap(new), String::new());
        let (old, new) = (self.per_page_operations, self.operations);
        add("buffers", old.to_string(), new.to_string(), String::new());
        align_right(&mut table, 1);
        table
    }
}

/// Microseconds with as many digits as say something.
fn micros(us: f64) -> String {
    if us < 0.0995 { format!("{us:.3}") } else { units::three_digits(us) }
}

/// Commands or syncs of one unmap; in per cent where many unmaps share one.
fn per_unmap(count: f64) -> String {
    match count {
        0.1..1.0 => format!("{:.0}%", count * 100.0),
        ..1.0 => format!("{:.1}%", count * 100.0),
        _ if count.fract() == 0.0 => format!("{count}"),
        _ => format!("{count:.1}"),
    }
}

impl Report {
    pub(super) fn new(plan: &Plan, rows: Vec<Row>, cpus: u64, clock_ns: u64) -> Self {
        let case = plan.cases.first();
        let strict = case.is_none_or(|case| case.flush == Flush::Strict);
        Self {
            cpus,
            direction: case.map_or("", |case| direction_name(case.direction)),
            bits: case.map_or(0, |case| case.bits),
            flush: if strict { "strict" } else { "lazy" },
            delay_ns: case.map_or(0, |case| u64::try_from(case.delay.as_nanos()).unwrap_or(0)),
            seconds: plan.seconds,
            quick: plan.quick,
            clock_ns,
            rows,
        }
    }

    /// The numbers of threads, in their order.
    fn threads(&self) -> Vec<u64> {
        let mut threads: Vec<u64> = self.rows.iter().map(|row| row.threads).collect();
        threads.dedup();
        threads
    }

    /// The grid's rows with so many threads.
    fn grid(&self, threads: u64) -> Table {
        let header = [
            "buffer",
            "by page µs\nmap/unmap",
            "batched µs\nmap/unmap",
            "faster\nmap/unmap",
            "commands\nper unmap",
            "syncs",
        ];
        let mut table = new_table(header);
        for row in self.rows.iter().filter(|row| row.threads == threads) {
            table.add_row(row.cells());
        }
        align_right(&mut table, 1);
        table
    }

    /// What is mapped, and how.
    fn title(&self) -> String {
        let Self { direction, bits, flush, .. } = self;
        let cpus = plural(self.cpus, "CPU", "CPUs");
        let mode = self.rows.first().map_or("", |row| row.mode);
        let mut title = format!("DMA mapping ({mode}, {direction}, {bits} bits, {flush}); {cpus}");
        if let (Some(seconds), [row]) = (self.seconds, &self.rows[..]) {
            let (threads, pages) = (row.threads, row.granule);
            let size = units::page_size(pages * PAGE);
            let _ = write!(
                title,
                ": {}, buffers of {} ({size}), {seconds} s for both ways",
                plural(threads, "thread", "threads"),
                plural(pages, "page", "pages"),
            );
        }
        if self.delay_ns > 0 {
            let _ = write!(title, ", {} between map and unmap", units::time(self.delay_ns));
        }
        title
    }
}

fn plural(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

const LEGEND: &str = "Times are averages of one buffer, from IOVA to release. By page: IOVAs \
    allocated once, then a call straight to the page table for each page, as Linux before 5.15; \
    where a buffer has blocks of 2M, a call for each block. Batched: one call of the DMA API for \
    the buffer. Faster = by page / batched; both run in turn, in tables of their own. Commands \
    and syncs are those of one unmap, by page / batched: by page each call gathers a command; \
    batched it is one for the range. Buffers, IOVAs, tables (Arm stage 1, 4K pages) and flush \
    queue are real, physical addresses are made of virtual ones, and there is no hardware: \
    commands are counted, and no time has a wait for them in it.";
const LEGEND_SG: &str = "A list has pages that lie apart: by page a call for each to map and one \
    to unmap it, batched one map_list and one unmap_list.";
const LEGEND_LAZY: &str = "Lazy: unmaps wait and are synced together, by page 256 of a thread, \
    batched 256 of a CPU, fewer where addresses are few, and none longer than 10 ms, in which \
    only some large buffers are filled: 0.4% is one sync for 256. A queue is flushed by one \
    command for everything, or batched by one for each range while there are up to 8.";
const NOTE_BLOCKS: &str = "buffers of 512 pages and more are blocks of 2M, one or two leaves \
    either way, and filling them empties the caches: without filling (-d 2) map and unmap take as \
    long as those of a page";
/// The report as text, with a newline at its end.
pub(crate) fn render(report: &Report, marks: Marks) -> String {
    let mut text = String::new();
    push_wrapped(&mut text, "", &report.title());
    match &report.rows[..] {
        [row] if report.seconds.is_some() => push_table(&mut text, &row.table()),
        _ => {
            for threads in report.threads() {
                text.push('\n');
                push_wrapped(&mut text, "", &plural(threads, "thread", "threads"));
                push_table(&mut text, &report.grid(threads));
            }
        }
    }
    text.push('\n');
    let mut legend = LEGEND.to_owned();
    if is_sg(report) {
        let _ = write!(legend, " {LEGEND_SG}");
    }
    if report.flush == "lazy" {
        let _ = write!(legend, " {LEGEND_LAZY}");
    }
    push_wrapped(&mut text, "", &legend);
    text.push('\n');
    push_notes(&mut text, report);
    text.push('\n');
    let done = "a device would have found the buffers that were looked up; nothing was left \
        mapped, and all IOVAs were given back";
    push_wrapped(&mut text, &format!("{} ", marks.right()), done);
    text
}

fn is_sg(report: &Report) -> bool {
    report.rows.iter().any(|row| row.mode == Mode::Sg.name())
}

fn push_notes(text: &mut String, report: &Report) {
    push_wrapped(text, "note: ", if report.quick { QUICK } else { TIMES });
    let clock = format!("looking at the clock takes {} ns, which is subtracted", report.clock_ns);
    push_wrapped(text, "note: ", &clock);
    let has_blocks = report.rows.iter().any(|row| row.granule * PAGE >= BLOCK);
    if has_blocks && report.direction != "from-device" && !is_sg(report) {
        push_wrapped(text, "note: ", NOTE_BLOCKS);
    }
    let most = report.rows.iter().map(|row| row.threads).max().unwrap_or(0);
    if most > report.cpus {
        let cpus = plural(report.cpus, "CPU", "CPUs");
        let crowded = format!("{most} threads share {cpus}: no more of them than that run at once");
        push_wrapped(text, "note: ", &crowded);
    }
    let rows = report.rows.iter();
    let interrupted: u64 = rows.map(|row| row.interrupted + row.per_page_interrupted).sum();
    if interrupted > 0 {
        let rows = report.rows.iter();
        let all: u64 = rows.map(|row| 2 * (row.operations + row.per_page_operations)).sum();
        let left_out = format!(
            "{interrupted} of {all} maps and unmaps took more than 2 ms and 16 times the median, \
             waiting for a CPU: averages and deviations are without them, percentiles with them"
        );
        push_wrapped(text, "note: ", &left_out);
    }
}
