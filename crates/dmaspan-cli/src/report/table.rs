//! For people.

use std::fmt::Write;

use comfy_table::Table;

use super::text::{Marks, align_right, new_table, push_table, push_wrapped, ratio};
use super::units;
use super::{Failed, Figures, Phase, Report, Row, Skipped};
use crate::size::ByteSize;

/// The report as text, with a newline at its end.
pub(crate) fn render(report: &Report, marks: Marks) -> String {
    let mut text = heading(report);
    let figures: Vec<&Figures> = report
        .rows
        .iter()
        .filter_map(|row| match row {
            Row::Figures(figures) => Some(&**figures),
            Row::Skipped(_) | Row::Failed(_) => None,
        })
        .collect();
    if !figures.is_empty() {
        push_table(&mut text, &memory_table(&figures));
        push_table(&mut text, &times_table(&figures));
        text.push('\n');
        push_wrapped(&mut text, "", LEGEND);
        push_wrapped(&mut text, "", LEGEND_PER_PAGE);
    }
    text.push('\n');
    for note in &report.notes {
        push_wrapped(&mut text, "note: ", note);
    }
    for row in &report.rows {
        match row {
            Row::Figures(_) => {}
            Row::Skipped(Skipped { memory, skipped }) => {
                push_wrapped(&mut text, &format!("skipped {memory}: "), skipped);
            }
            Row::Failed(Failed { memory, failed }) => {
                push_wrapped(&mut text, &format!("failed {memory}: "), failed);
            }
        }
    }
    if !text.ends_with("\n\n") {
        text.push('\n');
    }
    push_verdict(&mut text, report, marks);
    text
}

const LEGEND: &str = "In each run total = pin or unpin (the kernel's) + look-up of frame numbers \
    + tables (dmaspan's); each figure is a median of its own.";
const LEGEND_PER_PAGE: &str = "Per page: the same table work one page at a time. To map, one call \
    for each page, its frame number read in bulk before, untimed. To unmap, each page is looked \
    up and unmapped with one call, and adds one entry to the gather of a single sync. Faster = \
    per page / tables.";

fn heading(report: &Report) -> String {
    let Report { runs, pin, .. } = report;
    let (size, granule) = (ByteSize::new(report.size_bytes), ByteSize::new(report.granule));
    let medians = if *runs == 1 { "one run".to_owned() } else { format!("medians of {runs} runs") };
    let mut text = String::new();
    let what = format!(
        "{size} of each kind of memory, pinned with {pin} and mapped by a software IOMMU (Arm \
         stage 1, granule {granule}); {medians}"
    );
    push_wrapped(&mut text, "", &what);
    text
}

/// How each kind of memory lies and is mapped.
fn memory_table(rows: &[&Figures]) -> Table {
    let mut table = new_table(["memory", "spans", "leaves", "tables"]);
    for row in rows {
        let leaves = row.leaves.iter().rev();
        let leaves: Vec<String> =
            leaves.map(|(size, count)| format!("{count} × {}", units::page_size(*size))).collect();
        let tables = ByteSize::new(row.table_bytes).to_string();
        let cells = [row.memory.to_owned(), row.spans.to_string(), leaves.join(" + "), tables];
        table.add_row(cells);
    }
    align_right(&mut table, 1);
    table
}

/// Where the time goes.
fn times_table(rows: &[&Figures]) -> Table {
    let header = ["", "total", "GiB/s", "pin", "look-up", "tables", "per page", "faster"];
    let mut table = new_table(header);
    table.add_row(["MAP"]);
    for row in rows {
        let old = row.per_page.map_table_ns;
        table.add_row(times(row.memory, &row.map, old, row.table_speedup.map));
    }
    table.add_row(["UNMAP"]);
    for row in rows {
        let old = row.per_page.unmap_table_ns;
        table.add_row(times(row.memory, &row.unmap, old, row.table_speedup.unmap));
    }
    align_right(&mut table, 1);
    table
}

fn times(memory: &str, phase: &Phase, per_page_ns: u64, speedup: f64) -> [String; 8] {
    let lookup = match phase.lookup_ns {
        0 => "-".to_owned(),
        ns => units::time(ns),
    };
    [
        format!("  {memory}"),
        units::time(phase.total_ns),
        units::three_digits(phase.gibps),
        units::time(phase.pin_ns),
        lookup,
        units::time(phase.table_ns),
        units::time(per_page_ns),
        ratio(speedup),
    ]
}

fn push_verdict(text: &mut String, report: &Report, marks: Marks) {
    for failure in report.failures() {
        push_wrapped(text, "", &format!("{} {failure}", marks.wrong()));
    }
    if report.verified_bytes > 0 && report.passed() {
        let bytes = ByteSize::new(report.verified_bytes);
        let mark = marks.right();
        let _ = writeln!(
            text,
            "{mark} the device wrote and read back {bytes}, and the CPU saw the same"
        );
        let _ = writeln!(text, "{mark} nothing translates after the unmap");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples;
    use crate::report::text::WIDTH;

    #[test]
    fn no_line_is_wider_than_the_terminal_of_most() {
        let mut report = examples::report();
        report.notes.push("word ".repeat(60));
        for line in render(&report, Marks::Plain).lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
            assert_eq!(line, line.trim_end());
        }
    }

    #[test]
    fn everything_that_was_found_is_there() {
        let text = render(&examples::report(), Marks::Plain);
        for part in [
            "1 GiB of each kind",
            "io_uring",
            "granule 4 KiB",
            "medians of 5 runs",
            "512 × 2M + 3 × 4K",
            "12 KiB",
            "12.1 ms",
            "82.6",
            "41.0 µs",
            "4.10 µs",
            "3.10 ms",
            "756×",
            "0.50×",
            "note: a note",
            "skipped hugetlb: no pool: do this",
            "✓ the device wrote and read back 1 GiB, and the CPU saw the same",
            "✓ nothing translates after the unmap",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains('\x1b'));
    }

    #[test]
    fn a_failure_is_a_verdict_of_its_own() {
        let mut report = examples::report();
        let failed = "at iova 0x1000 the device reads 5".to_owned();
        report.rows.push(Row::Failed(Failed { memory: "base", failed }));
        report.stale_translations = 3;
        let text = render(&report, Marks::Coloured);
        assert!(text.contains("\x1b[31m✗\x1b[0m base: at iova 0x1000"), "{text}");
        assert!(!text.contains("nothing translates") && !text.contains("saw the same"), "{text}");
    }
}
