//! The results of `dmaspan-bench dma`, for people and for programs.

use std::fmt::Write;

use comfy_table::Table;
use dmaspan::Direction;
use dmaspan::dma::Flush;
use dmaspan_cli::series::{MAP_PAGES, SeriesRow, Told};
use dmaspan_cli::stats::{nanoseconds, rounded};
use dmaspan_cli::text::{QUICK, TIMES, ratio};
use dmaspan_cli::units;
use serde_json::Value;

use super::args::{Mode, direction_name};
use super::latency::{Figures, PERMILLES};
use super::plan::{BLOCK, Case, PAGE, Plan};
use super::work::Measured;
use crate::args::name_of;
use crate::report::{self, Column, Fields, Report, count, plural};
use crate::time;

const PERCENTILES: [&str; PERMILLES.len()] = ["50", "90", "99", "99.9"];

/// Microseconds to a tenth of a nanosecond.
fn us(ns: f64) -> f64 {
    (ns * 10.0).round() / 10_000.0
}

fn percentiles(figures: &Figures) -> Value {
    let named = PERCENTILES.into_iter().zip(figures.percentiles.map(us));
    named.map(|(name, us)| (name.to_owned(), us)).collect()
}

/// A case, both ways. Times are in microseconds.
pub(super) fn row(case: &Case, [by_page, batched]: &[Measured; 2]) -> Fields {
    let (map, unmap) = (batched.map.figures(), batched.unmap.figures());
    let (old_map, old_unmap) = (by_page.map.figures(), by_page.unmap.figures());
    let each = |told: u64, unmap: &Figures| {
        let each = told as f64 / unmap.count.max(1) as f64;
        (each * 1e6).round() / 1e6
    };
    let average = |figures: &Figures| us(figures.average);
    // Of the times as they are printed.
    let faster = |old: &Figures, new: &Figures| rounded(average(old) / average(new).max(0.0001));
    let (faster_map, faster_unmap) = (faster(&old_map, &map), faster(&old_unmap, &unmap));
    let commands = [each(by_page.told.commands, &old_unmap), each(batched.told.commands, &unmap)];
    let syncs = [each(by_page.told.syncs, &old_unmap), each(batched.told.syncs, &unmap)];
    let pair = |one: String, other: String| Value::from(format!("{one}/{other}"));
    let times = |map, unmap| pair(micros(average(map)), micros(average(unmap)));
    let size = units::page_size(case.granule * PAGE);
    let fields = Fields::from([
        (".by buffer", case.granule.to_string().into()),
        (".label", format!("g={} ({size})", case.granule).into()),
        (".by page", times(&old_map, &old_unmap)),
        (".batched", times(&map, &unmap)),
        (".faster", pair(ratio(faster_map), ratio(faster_unmap))),
        (".commands", pair(per_unmap(commands[0]), per_unmap(commands[1]))),
        (".syncs", pair(per_unmap(syncs[0]), per_unmap(syncs[1]))),
        ("threads", case.threads.into()),
        ("granule", case.granule.into()),
        ("mode", name_of(&case.mode).into()),
        ("map_us", average(&map).into()),
        ("unmap_us", average(&unmap).into()),
        ("per_page_map_us", average(&old_map).into()),
        ("per_page_unmap_us", average(&old_unmap).into()),
        ("speedup_map", faster_map.into()),
        ("speedup_unmap", faster_unmap.into()),
        ("map_stddev_us", us(map.deviation).into()),
        ("unmap_stddev_us", us(unmap.deviation).into()),
        ("per_page_map_stddev_us", us(old_map.deviation).into()),
        ("per_page_unmap_stddev_us", us(old_unmap.deviation).into()),
        ("map_percentiles_us", percentiles(&map)),
        ("unmap_percentiles_us", percentiles(&unmap)),
        ("per_page_map_percentiles_us", percentiles(&old_map)),
        ("per_page_unmap_percentiles_us", percentiles(&old_unmap)),
        ("invalidations_per_unmap", commands[1].into()),
        ("syncs_per_unmap", syncs[1].into()),
        ("per_page_invalidations_per_unmap", commands[0].into()),
        ("per_page_syncs_per_unmap", syncs[0].into()),
        ("operations", unmap.count.into()),
        ("per_page_operations", old_unmap.count.into()),
        // Maps and unmaps that waited for a CPU.
        ("interrupted", (map.interrupted + unmap.interrupted).into()),
        ("per_page_interrupted", (old_map.interrupted + old_unmap.interrupted).into()),
    ]);
    beside_series(fields, case)
}

/// With what the series measured of such a buffer, which it did of contiguous ones.
fn beside_series(fields: Fields, case: &Case) -> Fields {
    let name = format!("t={} g={}", case.threads, case.granule);
    let of = |figure| MAP_PAGES.row(&name, figure).filter(|_| case.mode == Mode::Single);
    let (Some(map), Some(unmap)) = (of("map"), of("unmap")) else { return fields };
    let told = |told: fn(&SeriesRow) -> Option<Told>| {
        let [map, unmap] = [map, unmap].map(|row| told(row).map_or(0.0, |told| told.parts().1));
        Value::from(format!("{map}/{unmap}"))
    };
    let [map_faster, unmap_faster] = [map, unmap].map(|row| ratio(row.ratio().unwrap_or(0.0)));
    let fields = fields.and([
        (".series_before", told(|row| row.before)),
        (".series_after", told(|row| row.after)),
        (".series_faster", format!("{map_faster}/{unmap_faster}").into()),
    ]);
    fields.series(&MAP_PAGES, [map, unmap], &differs(case))
}

/// What is not as it was for the series.
fn differs(case: &Case) -> String {
    let cpus = (case.threads > time::cpus()).then(|| plural(time::cpus(), "CPU"));
    let lazy = (case.flush == Flush::Lazy).then(|| "lazy".to_owned());
    let delay = (!case.delay.is_zero()).then(|| "delay".to_owned());
    let all = ["no IOMMU".to_owned()].into_iter().chain(cpus).chain(lazy).chain(delay);
    all.collect::<Vec<_>>().join(", ")
}

/// The grid: times of map and unmap together.
const GRID: &[Column] = &[
    ("by page µs\nmap/unmap", ".by page", count),
    ("batched µs\nmap/unmap", ".batched", count),
    ("faster\nmap/unmap", ".faster", count),
    ("commands\nper unmap", ".commands", count),
    ("syncs", ".syncs", count),
];

/// The grid of the series beside ours.
const SERIES: &[Column] = &[
    ("series, µs\nbefore", ".series_before", count),
    ("\nwith it", ".series_after", count),
    ("\nfaster", ".series_faster", count),
    ("ours\nfaster", ".faster", count),
    ("differs\nhere", ".differs", count),
];

/// What the series measured of some rows, beside what they gained here.
fn series_table<'r>(rows: impl Iterator<Item = &'r Fields>) -> Option<Table> {
    let rows = rows.filter(|row| row.knows("series"));
    let lines: Vec<Fields> = rows
        .map(|row| {
            let cells =
                [".series_before", ".series_after", ".series_faster", ".faster", ".differs"];
            let cells = cells.map(|name| (name, row.word(name).into()));
            Fields::from([(".label", row.word(".by buffer").into())]).and(cells)
        })
        .collect();
    (!lines.is_empty()).then(|| report::table("pages", SERIES, &lines))
}

/// The figures of a single case, a line each.
const FIGURES: &[Column] =
    &[("by page", "by page", count), ("batched", "batched", count), ("faster", "faster", count)];

/// All figures of a case.
fn figures(row: &Fields) -> Table {
    let mut lines = Vec::new();
    let mut add = |section: &str, label: &str, [old, new]: [String; 2], faster: String| {
        lines.push(Fields::from([
            (".section", section.into()),
            (".label", label.into()),
            ("by page", old.into()),
            ("batched", new.into()),
            ("faster", faster.into()),
        ]));
    };
    let time = |us: f64| units::fine_time(us * 1000.0);
    for (section, op) in [("MAP", "map"), ("UNMAP", "unmap")] {
        let ways = ["per_page_", ""].map(|way| format!("{way}{op}"));
        let both =
            |unit: &str| ways.each_ref().map(|way| time(row.number(&format!("{way}{unit}"))));
        add(section, "average", both("_us"), ratio(row.number(&format!("speedup_{op}"))));
        add(section, "deviation", both("_stddev_us"), String::new());
        for name in PERCENTILES {
            let of =
                ways.each_ref().map(|way| time(row.part(&format!("{way}_percentiles_us"), name)));
            add(section, &format!("{name} %"), of, String::new());
        }
    }
    let both = |name: &str, show: fn(f64) -> String| {
        ["per_page_", ""].map(|way| show(row.number(&format!("{way}{name}"))))
    };
    add("UNMAP", "commands", both("invalidations_per_unmap", per_unmap), String::new());
    add("UNMAP", "syncs", both("syncs_per_unmap", per_unmap), String::new());
    add("UNMAP", "buffers", both("operations", count), String::new());
    report::table("", FIGURES, &lines)
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

/// What is mapped, and how.
fn title(plan: &Plan, case: &Case, flush: &str) -> String {
    let (mode, direction, bits) = (name_of(&case.mode), direction_name(case.direction), case.bits);
    let cpus = plural(time::cpus(), "CPU");
    let mut title = format!("DMA mapping ({mode}, {direction}, {bits} bits, {flush}); {cpus}");
    if let Some(seconds) = plan.seconds {
        let size = units::page_size(case.granule * PAGE);
        let (threads, pages) = (plural(case.threads, "thread"), plural(case.granule, "page"));
        let _ =
            write!(title, ": {threads}, buffers of {pages} ({size}), {seconds} s for both ways");
    }
    if !case.delay.is_zero() {
        let _ = write!(title, ", {} between map and unmap", units::time(nanoseconds(case.delay)));
    }
    title
}

const LEGEND: &str = "Times are averages of one buffer, from IOVA to release. By page: IOVAs \
    allocated once, then a call straight to the page table for each page, as Linux before 5.15; \
    where a buffer has blocks of 2M, a call for each block. Batched: one call of the DMA API for \
    the buffer. Faster = by page / batched; both run in turn, in tables of their own. Commands \
    and syncs are those of one unmap, by page / batched: by page each call gathers a command; \
    batched it is one for the range. Buffers, IOVAs, tables (Arm stage 1, 4K pages) and flush \
    queue are real, physical addresses are made of virtual ones, and there is no hardware: \
    commands are counted, and no time has a wait for them in it.";
const LEGEND_SERIES: &str = "The series' figures are Linux's own, from IOVA to the end of the \
    IOMMU's work, on an SMMUv3, before map_pages and with it; ours have no IOMMU to wait for. \
    Compare how many times faster each became, not the times.";
const LEGEND_SG: &str = "A list has pages that lie apart: by page a call for each to map and one \
    to unmap it, batched one map_list and one unmap_list.";
const LEGEND_LAZY: &str = "Lazy: unmaps wait and are synced together, by page 256 of a thread, \
    batched 256 of a CPU, fewer where addresses are few, and none longer than 10 ms, in which \
    only some large buffers are filled: 0.4% is one sync for 256. A queue is flushed by one \
    command for everything, or batched by one for each range while there are up to 8.";
const NOTE_BLOCKS: &str = "buffers of 512 pages and more are blocks of 2M, one or two leaves \
    either way, and filling them empties the caches: without filling (-d 2) map and unmap take as \
    long as those of a page";
const DONE: &str = "a device would have found the buffers that were looked up; nothing was left \
    mapped, and all IOVAs were given back";

/// All of it.
pub(super) fn report(plan: &Plan, rows: Vec<Fields>, clock_ns: u64) -> Report {
    // All cases are alike in what is said here.
    let case = &plan.cases[0];
    let flush = if case.flush == Flush::Strict { "strict" } else { "lazy" };
    let head = Fields::from([
        ("cpus", time::cpus().into()),
        ("direction", direction_name(case.direction).into()),
        ("bits", case.bits.into()),
        ("flush", flush.into()),
        ("delay_ns", nanoseconds(case.delay).into()),
        // `null` for the grid.
        ("seconds", plan.seconds.into()),
        ("quick", plan.quick.into()),
        // What looking at the clock takes, which no figure has in it.
        ("clock_ns", clock_ns.into()),
    ]);
    let single = plan.seconds.and(rows.first()).map(figures);
    let mut threads: Vec<u64> = plan.cases.iter().map(|case| case.threads).collect();
    threads.dedup();
    let of_series = threads.iter().map(|threads| {
        (*threads, series_table(rows.iter().filter(|row| row.has("threads", *threads))))
    });
    let of_series: Vec<_> = of_series.collect();
    let sum = |names: [&str; 2]| -> f64 {
        rows.iter().flat_map(|row| names.map(|name| row.number(name))).sum()
    };
    let interrupted = sum(["interrupted", "per_page_interrupted"]);
    let all = 2.0 * sum(["operations", "per_page_operations"]);
    let mut report = Report::new([head, Fields::default()], rows, &title(plan, case, flush), DONE);
    match single {
        Some(table) => report.show(&table),
        None => {
            for threads in threads {
                report.say(&plural(threads, "thread"));
                report.tabulate("buffer", GRID, |row| row.has("threads", threads));
            }
        }
    }
    for (threads, table) in of_series {
        if let Some(table) = table {
            let of = plural(threads, "thread");
            report.say(&format!("Beside the series for map_pages, map/unmap of {of}"));
            report.show(&table);
        }
    }
    let is_sg = case.mode == Mode::Sg;
    let mut legend = LEGEND.to_owned();
    let said = [(!is_sg, LEGEND_SERIES), (is_sg, LEGEND_SG), (flush == "lazy", LEGEND_LAZY)];
    for (is_said, more) in said {
        if is_said {
            let _ = write!(legend, " {more}");
        }
    }
    report.say(&legend);
    report.note(if plan.quick { QUICK } else { TIMES });
    report.note(format!("looking at the clock takes {clock_ns} ns, which is subtracted"));
    let has_blocks = plan.cases.iter().any(|case| case.granule * PAGE >= BLOCK);
    if has_blocks && case.direction != Direction::FromDevice && !is_sg {
        report.note(NOTE_BLOCKS);
    }
    let most = plan.cases.iter().map(|case| case.threads).max();
    report.note_crowd(most.unwrap_or(0), time::cpus());
    if interrupted > 0.0 {
        report.note(format!(
            "{interrupted} of {all} maps and unmaps took more than 2 ms and 16 times the median, \
             waiting for a CPU: averages and deviations are without them, percentiles with them"
        ));
    }
    report
}
