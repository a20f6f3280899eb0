//! What came of `dmaspan-bench regbuf`, for people and for programs.

use crate::models::regbuf_before::BufferBefore;
use comfy_table::Table;
use dmaspan::PhysAddr;
use dmaspan::regbuf::{Buffer, Node};
use serde::Serialize;

use super::plan::{Case, Plan};
use super::timing::{Measured, Series};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{
    Marks, QUICK, TIMES, align_right, new_table, push_table, push_wrapped, ratio,
};
use dmaspan_cli::units;

/// What was measured. `--format json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    size_bytes: u64,
    runs: u32,
    quick: bool,
    rows: Vec<Row>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

/// Where a case's memory is from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Setting {
    /// Whether frames are those of a model.
    pub(super) is_model: bool,
    /// Why, where nobody asked for that.
    pub(super) why_model: Option<String>,
    /// What the kernel took to register the memory, where it did.
    pub(super) kernel_ns: Option<u64>,
    /// Bytes that should be in huge pages and are not.
    pub(super) not_huge: u64,
}

/// How many pieces a buffer is kept in, and by how many bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    /// Page by page, and as two ages of Linux coalesced.
    pages: usize,
    single: usize,
    linux72: usize,
    segments: usize,
    page_bytes: u64,
    page_temporary: u64,
    bytes: u64,
    uniform: bool,
}

impl Counts {
    pub(super) fn new(
        pages: &BufferBefore,
        single: &BufferBefore,
        linux72: &BufferBefore,
        node: &Node<PhysAddr>,
    ) -> Self {
        let (kept, segments) = (pages.bytes(), node.segments());
        // The footprint has the part of the buffer in it that the segments are.
        let bytes = size_of::<Buffer<PhysAddr>>() - size_of_val(segments) + segments.footprint();
        Self {
            pages: pages.bvecs().len(),
            single: single.bvecs().len(),
            linux72: linux72.bvecs().len(),
            segments: segments.count(),
            page_bytes: kept.kept,
            page_temporary: kept.temporary,
            bytes: u64::try_from(bytes).unwrap_or(u64::MAX),
            uniform: segments.count() == 1 || segments.uniform_len().is_some(),
        }
    }
}

/// A case, both ways.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    case: &'static str,
    /// What pages it has.
    memory: &'static str,
    /// Whose frames they are.
    frames: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_model: Option<String>,
    size: u64,
    not_huge_bytes: u64,
    segments_per_page: usize,
    segments_single: usize,
    segments_linux72: usize,
    segments: usize,
    /// Whether the segment of an offset is found by a shift.
    uniform: bool,
    bytes_per_page: u64,
    bytes: u64,
    /// The array of pages by page, while registering.
    temporary_bytes_per_page: u64,
    register_per_page_ns: f64,
    register_ns: f64,
    kernel_register_ns: Option<u64>,
    import_per_page_ns: f64,
    import_ns: f64,
    io_bytes: u64,
    per_page_descriptor_ns: f64,
    linux72_descriptor_ns: f64,
    descriptor_ns: f64,
    speedup: f64,
    per_page_sgl_ns: f64,
    sgl_ns: f64,
    sgl_speedup: f64,
    per_page_prp_ns: f64,
    prp_ns: f64,
    prp_stores_ns: f64,
}

/// How many times faster, of rounded times.
fn faster(old: f64, new: f64) -> f64 {
    // What is never 0, however fast: a picosecond.
    rounded(old / new.max(0.001))
}

impl Row {
    /// Of both ways, and of what Linux 7.2 takes for entries and a loop for its stores.
    pub(super) fn new(
        case: &Case,
        memory: &'static str,
        setting: Setting,
        counts: Counts,
        [old, new]: [&Measured; 2],
        [linux72, stores]: [&Series; 2],
    ) -> Self {
        let ns = |series: &Series| rounded(series.ns());
        let (scatter, sgl) = ([&old.scatter, &new.scatter].map(ns), [&old.sgl, &new.sgl].map(ns));
        Self {
            case: case.name.name(),
            memory,
            frames: if setting.is_model { "model" } else { "physical" },
            why_model: setting.why_model,
            size: case.bytes,
            not_huge_bytes: setting.not_huge,
            segments_per_page: counts.pages,
            segments_single: counts.single,
            segments_linux72: counts.linux72,
            segments: counts.segments,
            uniform: counts.uniform,
            bytes_per_page: counts.page_bytes,
            bytes: counts.bytes,
            temporary_bytes_per_page: counts.page_temporary,
            register_per_page_ns: ns(&old.register),
            register_ns: ns(&new.register),
            kernel_register_ns: setting.kernel_ns,
            import_per_page_ns: ns(&old.import),
            import_ns: ns(&new.import),
            io_bytes: case.io_bytes(),
            per_page_descriptor_ns: scatter[0],
            linux72_descriptor_ns: ns(linux72),
            descriptor_ns: scatter[1],
            speedup: faster(scatter[0], scatter[1]),
            per_page_sgl_ns: sgl[0],
            sgl_ns: sgl[1],
            sgl_speedup: faster(sgl[0], sgl[1]),
            per_page_prp_ns: ns(&old.prp),
            prp_ns: ns(&new.prp),
            prp_stores_ns: ns(stores),
        }
    }

    /// The name, with a star where frames are a model's.
    fn label(&self) -> String {
        let star = if self.frames == "model" { "*" } else { "" };
        format!(" {}{star}", self.case)
    }

    fn counts(&self) -> [String; 7] {
        let count = |count: usize| count.to_string();
        [
            self.label(),
            count(self.segments_per_page),
            count(self.segments_single),
            count(self.segments_linux72),
            count(self.segments),
            ByteSize::new(self.bytes_per_page).to_string(),
            ByteSize::new(self.bytes).to_string(),
        ]
    }

    fn registering(&self) -> [String; 7] {
        let kernel = self.kernel_register_ns.map_or("-".to_owned(), units::time);
        let time = units::fine_time;
        [
            self.label(),
            time(self.register_per_page_ns),
            time(self.register_ns),
            ratio(faster(self.register_per_page_ns, self.register_ns)),
            kernel,
            time(self.import_per_page_ns),
            time(self.import_ns),
        ]
    }

    fn entries(&self) -> [String; 5] {
        let time = units::fine_time;
        [
            self.label(),
            time(self.per_page_descriptor_ns),
            time(self.linux72_descriptor_ns),
            time(self.descriptor_ns),
            ratio(self.speedup),
        ]
    }

    fn nvme(&self) -> [String; 7] {
        let time = units::fine_time;
        [
            self.label(),
            time(self.per_page_sgl_ns),
            time(self.sgl_ns),
            ratio(self.sgl_speedup),
            time(self.per_page_prp_ns),
            time(self.prp_ns),
            time(self.prp_stores_ns),
        ]
    }
}

const COUNTS: [&str; 7] = [
    "KEPT AS",
    "pieces\nby page",
    "single\nhuge page",
    "\nLinux 7.2",
    "\nnow",
    "bytes\nby page",
    "\nnow",
];
const REGISTERING: [&str; 7] =
    ["TIMES", "register\nby page", "\nnow", "\nfaster", "\nkernel", "import\nby page", "\nnow"];
const ENTRIES: [&str; 5] = ["8 MiB I/O", "entries\nby page", "\nLinux 7.2", "\nnow", "\nfaster"];
const NVME: [&str; 7] =
    ["NVMe I/O", "SGL\nby page", "\nnow", "\nfaster", "PRPs\nby page", "\nnow", "\nstores"];

impl Report {
    pub(super) fn new(plan: &Plan, rows: Vec<Row>) -> Self {
        let mut notes = plan.notes.clone();
        notes.extend(rows.iter().filter_map(why_model));
        notes.extend(rows.iter().filter_map(not_huge));
        Self { size_bytes: plan.bytes, runs: plan.effort.runs, quick: plan.quick, rows, notes }
    }

    fn table<const N: usize>(
        &self,
        header: [&str; N],
        cells: impl Fn(&Row) -> [String; N],
    ) -> Table {
        let mut table = new_table(header);
        for row in &self.rows {
            table.add_row(cells(row));
        }
        align_right(&mut table, 1);
        table
    }
}

fn why_model(row: &Row) -> Option<String> {
    let why = row.why_model.as_ref()?;
    Some(format!("{}: frames are a model's, all apart: {why}", row.case))
}

fn not_huge(row: &Row) -> Option<String> {
    (row.not_huge_bytes > 0).then(|| {
        format!(
            "{}: {} have no transparent huge pages: /sys/kernel/mm/transparent_hugepage/enabled \
             should say madvise or always, and memory may be fragmented",
            row.case,
            ByteSize::new(row.not_huge_bytes)
        )
    })
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
    import included. Of PRPs there is one for each page by definition: stores is a loop that \
    writes as many addresses and does nothing else.";
const MIXED: &str = "mixed is by huge pages and by base pages in turn, 2 MiB each";
const APART: &str =
    "this machine's frames are often neighbours; --model shows what is left where none are";

/// The report as text, with a newline at its end.
pub(crate) fn render(report: &Report, marks: Marks) -> String {
    let mut text = String::new();
    let size = ByteSize::new(report.size_bytes);
    let runs = if report.runs == 1 { "one run".into() } else { format!("{} runs", report.runs) };
    let title = format!("Registered buffers, by page and by segment: 8 MiB and {size}, {runs}");
    push_wrapped(&mut text, "", &title);
    push_table(&mut text, &report.table(COUNTS, Row::counts));
    push_table(&mut text, &report.table(REGISTERING, Row::registering));
    push_table(&mut text, &report.table(ENTRIES, Row::entries));
    push_table(&mut text, &report.table(NVME, Row::nvme));
    if report.rows.iter().any(|row| row.frames == "model") {
        text.push_str("* frames of a model, no two pages of which are neighbours\n");
    }
    text.push('\n');
    push_wrapped(&mut text, "", LEGEND);
    text.push('\n');
    push_wrapped(&mut text, "", LEGEND_TIMES);
    text.push('\n');
    push_wrapped(&mut text, "note: ", if report.quick { QUICK } else { TIMES });
    if report.rows.iter().any(|row| row.case == "mixed") {
        push_wrapped(&mut text, "note: ", MIXED);
    }
    for note in &report.notes {
        push_wrapped(&mut text, "note: ", note);
    }
    if report.rows.iter().any(|row| row.frames == "physical") {
        push_wrapped(&mut text, "note: ", APART);
    }
    text.push('\n');
    let done = "every import and every descriptor leads to the same bytes, by page and by segment";
    push_wrapped(&mut text, &format!("{} ", marks.right()), done);
    text
}
