//! The results of `dmaspan-bench container`, for people and for programs.

use dmaspan_cli::series::{HUGE_PFNMAPS, LARGE_FOLIOS, SeriesRow};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{QUICK, TIMES, ratio};
use dmaspan_cli::units::{fine_time, three_digits};

use super::plan::{Case, GIB, PAGE, Plan, What};
use super::work::{Measured, OPS};
use crate::report::{Column, Fields, Report, count, plural};
use crate::time;

/// What is measured by what.
const MODEL: &str = "Type1Before over dmaspan-sim / Container over dmaspan-sim";

/// One operation of a case, by page and by span.
pub(super) fn row(case: &Case, op: usize, [old, new]: &[Measured; 2]) -> Fields {
    let op_name = OPS[op];
    let (old_ns, ns) = (old.ns[op].whole(), new.ns[op].whole());
    let gibps = |ns: u64| rounded(case.bytes as f64 / GIB as f64 * 1e9 / ns.max(1) as f64);
    let pages = (case.bytes / PAGE) as f64;
    let per_4k = |way: &Measured| way.instructions[op].counted().map(|all| rounded(all / pages));
    let fields = Fields::from([
        (".section", OPS[op].to_uppercase().into()),
        (".label", case.name.into()),
        (".memory", matches!(case.what, What::Memory { .. }).into()),
        (".per_page_gibps", gibps(old_ns).into()),
        ("case", case.name.into()),
        ("op", OPS[op].into()),
        ("per_page_ns", old_ns.into()),
        ("ns", ns.into()),
        ("speedup", rounded(old_ns as f64 / ns.max(1) as f64).into()),
        ("lookups_per_page", old.lookups[op].into()),
        ("lookups", new.lookups[op].into()),
        ("leaves", new.leaves.into()),
        ("gibps", gibps(ns).into()),
    ]);
    let fields = fields.some("per_page_instructions_per_4k", per_4k(old));
    beside_series(fields.some("instructions_per_4k", per_4k(new)), case, op_name)
}

/// With what a series measured of the same on a real kernel.
fn beside_series(fields: Fields, case: &Case, op: &str) -> Fields {
    let lookups = ["lookups_per_page", "lookups"].map(|name| count(fields.number(name)));
    let fields = fields.and([(".lookups", lookups.join(" → ").into())]);
    let shown = |row: Option<&SeriesRow>| row.map(SeriesRow::shown);
    match case.what {
        What::Memory { order, .. } => {
            let of = |figure: &str| LARGE_FOLIOS.row(case.name, figure);
            let (seconds, rate) = (of(op), of(&format!("{op} rate")));
            let gib = case.bytes / GIB;
            let size = if gib == 16 { String::new() } else { format!(",\n{gib} GiB") };
            let pages = if order == 18 { ",\n1G pages,\ntheirs ?" } else { "" };
            let faster = seconds.and_then(SeriesRow::ratio).map(ratio);
            let fields = fields.some(".series_s", shown(seconds));
            let fields = fields
                .some(".series_rate", rate.map(SeriesRow::shown_short))
                .some(".series_faster", faster);
            let differs = format!("a model{size}{pages}");
            fields.series(&LARGE_FOLIOS, seconds.into_iter().chain(rate), &differs)
        }
        What::Bars { count: 1, .. } if op == "map" => {
            let of = |figure| HUGE_PFNMAPS.row("BAR 32G", figure);
            let fields = fields.some(".series_s", shown(of("map")));
            let fields = fields.some(".series_lookups", shown(of("look-ups")));
            fields.series(&HUGE_PFNMAPS, HUGE_PFNMAPS.of("BAR 32G"), "a model")
        }
        What::Bars { .. } if op == "map" => {
            let boot = HUGE_PFNMAPS.row("a VM with four GPUs", "boot");
            let differs = "a model,\nno boot";
            fields.some(".series_s", shown(boot)).series(&HUGE_PFNMAPS, boot, differs)
        }
        // The series measured maps alone.
        What::Bars { .. } => fields,
    }
}

/// GB/s, in thousands where they are many.
fn rate(gibps: f64) -> String {
    if gibps < 9999.5 { three_digits(gibps) } else { format!("{}k", three_digits(gibps / 1000.0)) }
}

/// Instructions, of which a page may have less than one.
fn fine(count: f64) -> String {
    if count < 0.0995 { format!("{count:.4}") } else { three_digits(count) }
}

const TIMES_OF: &[Column] = &[
    ("by page", "per_page_ns", fine_time),
    ("GB/s", ".per_page_gibps", rate),
    ("by span", "ns", fine_time),
    ("GB/s", "gibps", rate),
    ("faster", "speedup", ratio),
];
/// What the series for large folios measured, beside what is gained here.
const FOLIOS: &[Column] = &[
    ("series\nseconds", ".series_s", rate),
    ("\nGB/s", ".series_rate", rate),
    ("\nfaster", ".series_faster", rate),
    ("ours\nfaster", "speedup", ratio),
    ("differs\nhere", ".differs", rate),
];
/// The same of the series for huge pfnmaps.
const PFNMAPS: &[Column] = &[
    ("series\nseconds", ".series_s", rate),
    ("\nlook-ups", ".series_lookups", rate),
    ("ours\nlook-ups", ".lookups", rate),
    ("differs\nhere", ".differs", rate),
];
const COUNTS: &[Column] = &[
    ("look-ups\nby page", "lookups_per_page", count),
    ("\nby span", "lookups", count),
    ("\nleaves", "leaves", count),
    ("instructions/4K\nby page", "per_page_instructions_per_4k", fine),
    ("\nby span", "instructions_per_4k", fine),
];

const LEGEND: &str = "Our model by our model: memory, folios, the CPU's page tables and pins are \
    dmaspan-sim's, page tables (Arm stage 1, 4K pages) and gathers are real, and no time has a \
    kernel or hardware in it. By page: as Linux's VFIO container did it, through arrays of 512 \
    pages, with a look-up for each page of a pfnmap and of an unmap, over the same memory and \
    tables. By span: the container. Times are of all bytes: medians of runs in turn. Faster = by \
    page / by span. GB/s are GiB a second, as in the figures of the series.";
const LEGEND_SERIES: &str = "The series are those by which Linux's VFIO container learned large \
    folios (16 GiB, 6.16-rc4) and huge pfnmaps (6.14): a real kernel's pins, tables and IOMMU are \
    in their times, on machines of their own. How many pages HUGETLBFS had of which size is not \
    told.";
const LEGEND_CASES: &str = "MADV_HUGEPAGE: folios of 2M as a buddy allocator hands them out of \
    fresh memory, most of them neighbours. 4K in blocks: base pages block by block of 2M, half of \
    each in any order. All others lie anywhere: of 2M, 4K (MAP_POPULATE), 1G (HUGETLBFS) and 64K. \
    threads=N map their shares of the 64K folios \
    into one container. A BAR is named by the leaves of the CPU's tables. Look-ups are leaves met \
    in the CPU's tables to map, and steps over the IOMMU's to unmap; leaves are entries of the \
    IOMMU's tables by span.";
const ONCE: &str = "BAR 4x128G by page is timed once";

const DONE: &str =
    "what came out of the tables is what was pinned, nothing was left after the unmaps";

/// All of it.
pub(super) fn report(plan: &Plan, rows: Vec<Fields>) -> Report {
    let (cpus, uncounted) = (time::cpus(), time::uncounted());
    let head = Fields::from([
        ("model", MODEL.into()),
        ("size_bytes", plan.bytes.into()),
        ("runs", plan.runs.into()),
        ("cpus", cpus.into()),
        ("quick", plan.quick.into()),
    ]);
    let head = head.some("instructions_not_counted", uncounted.clone());
    let (size, runs) = (ByteSize::new(plan.bytes), plural(plan.runs.into(), "run"));
    let cpus_of = plural(cpus, "CPU");
    let title = format!("The container, page by page and by span: {size}, {runs}, {cpus_of}");
    let mut report = Report::new([head, Fields::default()], rows, &title, DONE);
    report.tabulate("", TIMES_OF, |row| row.is(".memory"));
    report.tabulate("", TIMES_OF, |row| !row.is(".memory"));
    report.tabulate("", COUNTS, |_| true);
    report.tabulate("", FOLIOS, |row| row.is(".memory") && row.knows("series"));
    report.tabulate("", PFNMAPS, |row| !row.is(".memory") && row.knows("series"));
    report.say(LEGEND);
    report.say(LEGEND_CASES);
    report.say(LEGEND_SERIES);
    report.note(if plan.quick { QUICK } else { TIMES });
    if plan.runs > 1 {
        report.note(ONCE);
    }
    report.note_uncounted(uncounted.as_deref());
    if cpus < 4 {
        report.note("threads that are more than the CPUs take turns");
    }
    report
}
