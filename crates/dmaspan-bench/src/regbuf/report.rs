//! The results of `dmaspan-bench regbuf`, for people and for programs.

use comfy_table::Table;
use dmaspan::PhysAddr;
use dmaspan::regbuf::{Buffer, Node};
use dmaspan_cli::series::{FIXED_BUFFERS, SeriesRow};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{QUICK, TIMES, ratio};
use dmaspan_cli::units::fine_time;
use serde_json::Value;

use super::args::RegbufCase;
use super::ground::Ground;
use super::plan::{Case, Plan};
use super::timing::Measured;
use crate::args::name_of;
use crate::models::regbuf_before::BufferBefore;
use crate::report::{self, Column, Fields, Report, count, plural, speedup};
use crate::time::Series;

/// How many pieces a buffer is kept in, page by page, as two ages of Linux coalesced and now, and
/// by how many bytes.
pub(super) fn counts(
    [pages, single, linux72]: [&BufferBefore; 3],
    node: &Node<PhysAddr>,
) -> [(&'static str, Value); 10] {
    let (kept, segments) = (pages.bytes(), node.segments());
    // The footprint has the part of the buffer in it that the segments are.
    let bytes = size_of::<Buffer<PhysAddr>>() - size_of_val(segments) + segments.footprint();
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    let shown = |bytes| Value::from(ByteSize::new(bytes).to_string());
    let is_uniform = segments.count() == 1 || segments.uniform_len().is_some();
    [
        (".bytes_per_page", shown(kept.kept)),
        (".bytes", shown(bytes)),
        ("segments_per_page", pages.bvecs().len().into()),
        ("segments_single", single.bvecs().len().into()),
        ("segments_linux72", linux72.bvecs().len().into()),
        ("segments", segments.count().into()),
        // Whether the segment of an offset is found by a shift.
        ("uniform", is_uniform.into()),
        ("bytes_per_page", kept.kept.into()),
        ("bytes", bytes.into()),
        // The array of pages by page, while registering.
        ("temporary_bytes_per_page", kept.temporary.into()),
    ]
}

/// A case both ways, and what Linux 7.2 takes for entries and a loop for its stores.
pub(super) fn row(
    case: &Case,
    ground: &Ground,
    counts: [(&'static str, Value); 10],
    [old, new]: [&Measured; 2],
    [linux72, stores]: [&Series; 2],
    entries: [usize; 2],
) -> Fields {
    let ns = |series: &Series| Value::from(rounded(series.each()));
    let faster =
        |old: &Series, new: &Series| Value::from(speedup(rounded(old.each()), rounded(new.each())));
    let (name, model) = (&*name_of(&case.name), ground.is_model);
    let fields = Fields::from([
        (".label", format!("{name}{}", if model { "*" } else { "" }).into()),
        (".not_huge", not_huge(name, ground.not_huge).into()),
        (".register", faster(&old.register, &new.register)),
        ("case", name.into()),
        ("memory", ground.memory.into()),
        ("frames", if model { "model" } else { "physical" }.into()),
    ]);
    let fields = fields.some("why_model", ground.why_model.as_deref());
    let fields =
        fields.and([("size", case.bytes.into()), ("not_huge_bytes", ground.not_huge.into())]);
    let fields = fields.and(counts).and([
        ("entries_per_page", entries[0].into()),
        ("entries", entries[1].into()),
        ("register_per_page_ns", ns(&old.register)),
        ("register_ns", ns(&new.register)),
        ("kernel_register_ns", ground.kernel_ns.into()),
        ("import_per_page_ns", ns(&old.import)),
        ("import_ns", ns(&new.import)),
        ("io_bytes", case.io_bytes().into()),
        ("per_page_descriptor_ns", ns(&old.scatter)),
        ("linux72_descriptor_ns", ns(linux72)),
        ("descriptor_ns", ns(&new.scatter)),
        ("speedup", faster(&old.scatter, &new.scatter)),
        ("per_page_sgl_ns", ns(&old.sgl)),
        ("sgl_ns", ns(&new.sgl)),
        ("sgl_speedup", faster(&old.sgl, &new.sgl)),
        ("per_page_prp_ns", ns(&old.prp)),
        ("prp_ns", ns(&new.prp)),
        ("prp_stores_ns", ns(stores)),
    ]);
    if case.name != RegbufCase::FourHuge {
        return fields;
    }
    fields.series(&FIXED_BUFFERS, FIXED_BUFFERS.rows, DIFFERS)
}

/// What is not as it was for the series, whose shares no benchmark without a disk has.
const DIFFERS: &str = "no disk: times and counts of one I/O's steps, not shares of all cycles";

/// What a symbol of the series' profile does, and which figures of ours are of the same work: by
/// page and now.
const STEPS: [(&str, &str, [&str; 2]); 5] = [
    ("__blk_rq_map_sg", "entries", ["per_page_descriptor_ns", "descriptor_ns"]),
    ("dma_direct_map_sg", "in entries", ["", ""]),
    ("dma_pool_alloc", "SGL", ["per_page_sgl_ns", "sgl_ns"]),
    ("sg_next", "entries made", ["entries_per_page", "entries"]),
    ("dma_map_page_attrs", "none", ["", ""]),
];

/// The profile of the series, and beside each of its lines our steps that do the same work.
fn series_table(row: &Fields) -> Table {
    let lines = STEPS.map(|(symbol, step, ours)| {
        let share = |case| {
            let row = FIXED_BUFFERS.row(case, symbol);
            Value::from(row.map_or_else(String::new, SeriesRow::shown))
        };
        let show = if step == "entries made" { count } else { fine_time };
        let [by_page, now] = ours.map(|name| {
            let shown = row.knows(name).then(|| show(row.number(name)));
            Value::from(shown.unwrap_or_default())
        });
        Fields::from([
            (".label", symbol.into()),
            ("randread", share("randread")),
            ("randwrite", share("randwrite")),
            ("step", step.into()),
            ("by page", by_page),
            ("now", now),
        ])
    });
    report::table("of 8m-4x2m", SERIES, &lines)
}

const SERIES: &[Column] = &[
    ("series, %\nrandread", "randread", count),
    ("\nrandwrite", "randwrite", count),
    ("ours\nstep", "step", count),
    ("\nby page", "by page", count),
    ("\nnow", "now", count),
];

const COUNTS: &[Column] = &[
    ("pieces\nby page", "segments_per_page", count),
    ("single\nhuge page", "segments_single", count),
    ("\nLinux 7.2", "segments_linux72", count),
    ("\nnow", "segments", count),
    ("bytes\nby page", ".bytes_per_page", count),
    ("\nnow", ".bytes", count),
];
const REGISTERING: &[Column] = &[
    ("register\nby page", "register_per_page_ns", fine_time),
    ("\nnow", "register_ns", fine_time),
    ("\nfaster", ".register", ratio),
    ("\nkernel", "kernel_register_ns", fine_time),
    ("import\nby page", "import_per_page_ns", fine_time),
    ("\nnow", "import_ns", fine_time),
];
const ENTRIES: &[Column] = &[
    ("entries\nby page", "per_page_descriptor_ns", fine_time),
    ("\nLinux 7.2", "linux72_descriptor_ns", fine_time),
    ("\nnow", "descriptor_ns", fine_time),
    ("\nfaster", "speedup", ratio),
];
const NVME: &[Column] = &[
    ("SGL\nby page", "per_page_sgl_ns", fine_time),
    ("\nnow", "sgl_ns", fine_time),
    ("\nfaster", "sgl_speedup", ratio),
    ("PRPs\nby page", "per_page_prp_ns", fine_time),
    ("\nnow", "prp_ns", fine_time),
    ("\nstores", "prp_stores_ns", fine_time),
];

fn why_model(row: &Fields) -> Option<String> {
    let (case, why) = (row.word("case"), row.word("why_model"));
    (!why.is_empty()).then(|| format!("{case}: frames are a model's, all apart: {why}"))
}

/// What is to be said of so many bytes that are not in huge pages.
fn not_huge(case: &str, bytes: u64) -> Option<String> {
    let bytes = (bytes > 0).then(|| ByteSize::new(bytes))?;
    Some(format!(
        "{case}: {bytes} have no transparent huge pages: \
         /sys/kernel/mm/transparent_hugepage/enabled should say madvise or always, and memory may \
         be fragmented"
    ))
}

const LEGEND: &str = "By page: as Linux's io_uring kept registered buffers before it coalesced, a \
    piece for each 4K page. Single huge page: where all of a buffer is in one, as in Linux 6.3. \
    Linux 7.2: where all pages are huge and of one size. Now: dmaspan's, over pages of any and of \
    mixed sizes and over frames that happen to be neighbours. All work on the same frames, in \
    turn; faster = by page / now.";
const LEGEND_TIMES: &str = "Register makes that of memory that is pinned already, and charges \
    it; kernel is what Linux here takes for its own IORING_REGISTER_BUFFERS of the same memory, \
    pins included. Import finds the first piece at a random offset, aligned or odd. Entries are \
    those of a scatter list for an I/O of 8 MiB at a random offset (in 8m-4x2m all of it), its \
    import included. PRPs take one entry for each page: stores is a loop that writes as many \
    addresses and does nothing else.";
const LEGEND_SERIES: &str = "The series' shares are of all cycles while fio reads or writes a real \
    disk, before it → with it. Ours have no disk. Entries are the import, the scatter list and its \
    mapping for the device together; SGL is the same and the list that a controller reads, in \
    memory that is there already. By page neighbours become one entry while entries are made, so \
    there are no more of them than now: what sg_next took is not repeated, and nothing here \
    calls dma_map_page_attrs.";
const MIXED: &str = "mixed is by huge pages and by base pages in turn, 2 MiB each";
const APART: &str =
    "this machine's frames are often neighbours; --model shows what is left where none are";

const STARRED: &str = "* frames of a model, no two pages of which are neighbours";
const DONE: &str =
    "every import and every descriptor leads to the same bytes, by page and by segment";

/// All of it.
pub(super) fn report(plan: &Plan, rows: Vec<Fields>) -> Report {
    let runs = plan.effort.rounds;
    let head = Fields::from([
        ("size_bytes", plan.bytes.into()),
        ("runs", runs.into()),
        ("quick", plan.quick.into()),
    ]);
    let mut notes = plan.notes.clone();
    notes.extend(rows.iter().filter_map(why_model));
    let not_huge = rows.iter().map(|row| row.word(".not_huge")).filter(|words| !words.is_empty());
    notes.extend(not_huge.map(str::to_owned));
    let said = (!notes.is_empty()).then(|| notes.clone());
    let tail = Fields::default().some("notes", said);
    let (size, runs) = (ByteSize::new(plan.bytes), plural(runs.into(), "run"));
    let title = format!("Registered buffers, by page and by segment: 8 MiB and {size}, {runs}");
    let has = |name: &str, word: &str| rows.iter().any(|row| row.word(name) == word);
    let (is_model, is_real) = (has("frames", "model"), has("frames", "physical"));
    let is_mixed = has("case", "mixed");
    let of_series = rows.iter().find(|row| row.knows("series")).map(series_table);
    let mut report = Report::new([head, tail], rows, &title, DONE);
    report.tabulate("KEPT AS", COUNTS, |_| true);
    report.tabulate("TIMES", REGISTERING, |_| true);
    report.tabulate("8 MiB I/O", ENTRIES, |_| true);
    report.tabulate("NVMe I/O", NVME, |_| true);
    let is_beside = of_series.is_some();
    of_series.iter().for_each(|table| report.show(table));
    if is_model {
        report.say(STARRED);
    }
    report.say(LEGEND);
    report.say(LEGEND_TIMES);
    if is_beside {
        report.say(LEGEND_SERIES);
    }
    report.note(if plan.quick { QUICK } else { TIMES });
    if is_mixed {
        report.note(MIXED);
    }
    notes.into_iter().for_each(|note| report.note(note));
    if is_real {
        report.note(APART);
    }
    report
}
