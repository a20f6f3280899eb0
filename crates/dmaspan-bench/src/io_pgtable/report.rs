//! What came of `dmaspan-bench io-pgtable`, for people and for programs.

use comfy_table::Table;
use serde::{Serialize, Serializer};

use super::cases::Case;
use super::formats::NamedFormat;
use super::timing::{RangeTime, Times};
use dmaspan_cli::stats::rounded;
use dmaspan_cli::text::{
    Marks, QUICK, TIMES, align_right, new_table, push_table, push_wrapped, ratio,
};
use dmaspan_cli::units;

/// What was measured. Its public part is what `--format json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) rounds: u32,
    pub(crate) cpus: usize,
    #[serde(skip)]
    pub(crate) threads: Vec<usize>,
    #[serde(rename = "rows", serialize_with = "all_rows")]
    pub(crate) formats: Vec<FormatRows>,
}

/// The rows of one format.
#[derive(Debug)]
pub(crate) struct FormatRows {
    format: &'static NamedFormat,
    rows: Vec<Row>,
}

/// One operation on a range, both ways.
#[derive(Clone, Debug, Serialize)]
struct Row {
    format: &'static str,
    case: String,
    #[serde(skip)]
    label: String,
    threads: usize,
    op: Op,
    /// A range, a call for each page.
    per_page_ns: f64,
    /// A range, one call.
    ns: f64,
    /// `per_page_ns / ns`.
    speedup: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Op {
    Map,
    Unmap,
}

impl Op {
    const ALL: [Self; 2] = [Self::Map, Self::Unmap];

    const fn of(self, time: RangeTime) -> u64 {
        match self {
            Self::Map => time.map_ps,
            Self::Unmap => time.unmap_ps,
        }
    }
}

fn all_rows<S: Serializer>(formats: &[FormatRows], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(formats.iter().flat_map(|format| &format.rows))
}

impl FormatRows {
    /// No rows yet.
    pub(super) const fn new(format: &'static NamedFormat) -> Self {
        Self { format, rows: Vec::new() }
    }

    /// Adds what was measured of a case.
    pub(super) fn add(&mut self, case: &Case, threads: usize, times: Times) {
        for op in Op::ALL {
            let (per_page, batched) = (op.of(times.per_page), op.of(times.batched));
            self.rows.push(Row {
                format: self.format.name,
                case: case.name.clone(),
                label: case.label.clone(),
                threads,
                op,
                per_page_ns: per_page as f64 / 1000.0,
                ns: batched as f64 / 1000.0,
                speedup: rounded(per_page as f64 / batched.max(1) as f64),
            });
        }
    }

    /// A table of the rows with these numbers of threads.
    fn table(&self, threads: &[usize]) -> Table {
        let mut header = vec!["\nrange".to_owned()];
        for &count in threads {
            let who = if count == 1 { "1 thread".to_owned() } else { format!("{count} threads") };
            header.extend([format!("{who}\nby page"), "\nbatched".into(), "\nfaster".into()]);
        }
        let mut table = new_table(header);
        for op in Op::ALL {
            table.add_row([if op == Op::Map { "MAP" } else { "UNMAP" }]);
            for label in self.labels(threads) {
                let mut cells = vec![format!(" {label}")];
                for &count in threads {
                    cells.extend(self.cells(op, label, count));
                }
                table.add_row(cells);
            }
        }
        align_right(&mut table, 1);
        table
    }

    /// The cases that were measured with any of these numbers of threads, in their order.
    fn labels(&self, threads: &[usize]) -> Vec<&str> {
        let mut labels: Vec<&str> = Vec::new();
        for row in self.rows.iter().filter(|row| threads.contains(&row.threads)) {
            if !labels.contains(&row.label.as_str()) {
                labels.push(&row.label);
            }
        }
        labels
    }

    fn cells(&self, op: Op, label: &str, threads: usize) -> [String; 3] {
        let mut rows = self.rows.iter();
        match rows.find(|row| row.op == op && row.label == label && row.threads == threads) {
            Some(row) => {
                [units::fine_time(row.per_page_ns), units::fine_time(row.ns), ratio(row.speedup)]
            }
            None => ["-", "-", "-"].map(str::to_owned),
        }
    }
}

/// How many numbers of threads fit beside each other.
const THREADS_ACROSS: usize = 2;

const LEGEND: &str = "Times are of one range: medians, so that waiting for a CPU is left out. By \
    page: a call for each page, in tables that are there already. Batched: one call for the \
    range; its unmap frees the tables that the range covers, and the next map fills them anew. g \
    is the number of smallest pages. scatter is a list of spans: by page means a map call for \
    each span, and a look-up and an unmap call for each leaf; batched, one call maps all, and one \
    unmaps and gives the spans back. Every unmap gathers what hardware would have to forget; none \
    is told. Faster = by page / batched.";
/// The report as text, with a newline at its end.
pub(crate) fn render(report: &Report, marks: Marks) -> String {
    let mut text = String::new();
    let Report { rounds, cpus, .. } = report;
    let rounds = if *rounds == 1 { "one round".to_owned() } else { format!("{rounds} rounds") };
    let cpus = if *cpus == 1 { "one CPU".to_owned() } else { format!("{cpus} CPUs") };
    push_wrapped(
        &mut text,
        "",
        &format!("IO page tables: a call for each page against one for all; {rounds}, {cpus}"),
    );
    for format in &report.formats {
        text.push('\n');
        let about = format!("{}: {}", format.format.name, format.format.about);
        push_wrapped(&mut text, "", &about);
        for threads in report.threads.chunks(THREADS_ACROSS) {
            push_table(&mut text, &format.table(threads));
        }
    }
    text.push('\n');
    push_wrapped(&mut text, "", LEGEND);
    text.push('\n');
    push_wrapped(&mut text, "note: ", if report.rounds == 1 { QUICK } else { TIMES });
    if let Some(most) = report.threads.last().filter(|&&most| most > report.cpus) {
        let crowded = format!("{most} threads share {cpus}: no more of them than that run at once");
        push_wrapped(&mut text, "note: ", &crowded);
    }
    text.push('\n');
    let done = "every range led where it was mapped to, and nothing was left after the unmaps";
    push_wrapped(&mut text, &format!("{} ", marks.right()), done);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::io_pgtable::cases::Work;
    use crate::io_pgtable::formats::FORMATS;
    use dmaspan_cli::json;
    use dmaspan_cli::text::WIDTH;

    fn case(name: &str, label: &str) -> Case {
        let work = Work::Pages { page_size: 4096, pages: 1 };
        Case { name: name.to_owned(), label: label.to_owned(), bytes: 4096, ranges: 1, work }
    }

    fn report() -> Report {
        let mut rows = FormatRows::new(&FORMATS[0]);
        let per_page = RangeTime { map_ps: 8_187_000, unmap_ps: 987_654_321_000 };
        let batched = RangeTime { map_ps: 14_250, unmap_ps: 9_876_543_000 };
        let times = Times { per_page, batched };
        for threads in [1, 10] {
            rows.add(&case("2M", "2M (128 × 16K)"), threads, times);
        }
        rows.add(&case("16G as 512M", "16G as 512M"), 1, times);
        Report { rounds: 7, cpus: 2, threads: vec![1, 10], formats: vec![rows] }
    }

    #[test]
    fn the_shape_is_the_one_that_scripts_use() {
        let value: Value = serde_json::from_str(&json::render(&report())).unwrap();
        assert_eq!((&value["rounds"], &value["cpus"]), (&json!(7), &json!(2)));
        assert_eq!(value["rows"].as_array().unwrap().len(), 6);
        let row = json!({
            "format": "arm-lpae", "case": "2M", "threads": 1, "op": "map",
            "per_page_ns": 8187.0, "ns": 14.25, "speedup": 574.526,
        });
        assert_eq!(value["rows"][0], row);
        assert_eq!(value["rows"][1]["op"], "unmap");
    }

    #[test]
    fn a_table_is_narrow_and_says_what_was_not_measured() {
        let text = render(&report(), Marks::Plain);
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
            assert_eq!(line, line.trim_end());
        }
        for part in ["8.19 µs", "14.2 ns", "575×", "988 ms", "10 threads share 2 CPUs", "✓ every"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("--quick"), "{text}");
        let bulk = text.lines().find(|line| line.starts_with("  16G as 512M")).unwrap();
        assert_eq!(bulk.matches(" -").count(), 3, "{bulk}");
    }

    #[test]
    fn one_round_is_no_measurement() {
        let text = render(&Report { rounds: 1, ..report() }, Marks::Plain);
        assert!(text.contains("leave --quick out") && !text.contains("ratios are"), "{text}");
    }
}
