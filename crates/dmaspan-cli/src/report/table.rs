//! For people.

use std::fmt::Write;

use comfy_table::Table;

use super::text::{Marks, align_right, new_table, push_table, push_wrapped, ratio};
use super::units;
use super::{
    By, Failed, Figures, PerPageRequests, Phase, RealDevice, Report, Row, Skipped, Times, gibps,
};
use crate::pinned::Counted;
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
        let is_real = report.real.is_some();
        push_table(&mut text, &memory_table(&figures, is_real));
        push_table(&mut text, &times_table(&figures));
        text.push('\n');
        let legends = if is_real { LEGENDS_REAL } else { LEGENDS };
        for legend in legends {
            push_wrapped(&mut text, "", legend);
        }
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

const LEGENDS: [&str; 2] = [
    "In each run total = pin or unpin (the kernel's) + look-up of frame numbers + tables \
     (dmaspan's); each figure is a median of its own.",
    "Per page: the same table work one page at a time. To map, one call for each page, its frame \
     number read in bulk before, untimed. To unmap, each page is looked up and unmapped with one \
     call, and adds one entry to the gather of a single sync. Faster = per page / tables.",
];
const LEGENDS_REAL: [&str; 2] = [
    "The kernel pins the memory, looks it up and writes the tables, and tells of all three only \
     the total. Ioctls: to map + to unmap, once.",
    "Per page: a request for each page, on so many pages as there are ioctls; its GiB/s. Faster = \
     GiB/s / per page.",
];

fn heading(report: &Report) -> String {
    let runs = report.runs;
    let (size, granule) = (ByteSize::new(report.size_bytes), ByteSize::new(report.granule));
    let medians = if runs == 1 { "one run".to_owned() } else { format!("medians of {runs} runs") };
    let mut text = String::new();
    let how = match &report.real {
        Some(RealDevice { device, api, .. }) => {
            format!("mapped by the kernel's {api} for {device} (granule {granule})")
        }
        None => {
            let pin = report.pin.unwrap_or("the kernel");
            format!(
                "pinned with {pin} and mapped by a software IOMMU (Arm stage 1, granule {granule})"
            )
        }
    };
    push_wrapped(&mut text, "", &format!("{size} of each kind of memory, {how}; {medians}"));
    if let Some(real) = &report.real {
        push_wrapped(&mut text, "", &limits(real));
    }
    text
}

/// What the IOMMU can map.
fn limits(real: &RealDevice) -> String {
    let iommu = &real.iommu;
    let range = |[first, last]: &[u64; 2]| format!("{first:#x}..={last:#x}");
    let apertures: Vec<String> = iommu.apertures.iter().map(range).collect();
    let sizes: Vec<String> = iommu.page_sizes.iter().map(|size| units::page_size(*size)).collect();
    let mappings = match iommu.mappings_limit {
        Some(limit) => format!("{limit} mappings at most"),
        None => "mappings without a limit".to_owned(),
    };
    let (apertures, sizes) = (apertures.join(" and "), sizes.join(", "));
    format!("Its IOMMU has IOVAs {apertures}, pages of {sizes}, {mappings}")
}

/// How each kind of memory lies and is mapped.
fn memory_table(rows: &[&Figures], is_real: bool) -> Table {
    let header = ["memory", "spans", "leaves", "tables", "ioctls", "per page"];
    let mut table = new_table(header.into_iter().take(if is_real { 6 } else { 4 }));
    for row in rows {
        let mut cells = vec![row.memory.to_owned(), row.spans.to_string()];
        match &row.by {
            By::Tables { leaves, table_bytes, .. } => {
                let leaves = leaves.iter().rev();
                let leaves = leaves.map(|(size, n)| format!("{n} × {}", units::page_size(*size)));
                cells.push(leaves.collect::<Vec<_>>().join(" + "));
                cells.push(ByteSize::new(*table_bytes).to_string());
            }
            By::Requests { ioctls, per_page, .. } => {
                let both = [ioctls, &per_page.ioctls];
                let both = both.map(|ioctls| format!("{} + {}", ioctls.map, ioctls.unmap));
                cells.extend([UNTOLD.to_owned(), UNTOLD.to_owned()].into_iter().chain(both));
            }
        }
        table.add_row(cells);
    }
    align_right(&mut table, 1);
    table
}

/// Stands for what there is not, or nobody tells.
const UNTOLD: &str = "-";

/// Where the time goes.
fn times_table(rows: &[&Figures]) -> Table {
    let header = ["", "total", "GiB/s", "pin", "look-up", "tables", "per page", "faster"];
    let mut table = new_table(header);
    table.add_row(["MAP"]);
    for row in rows {
        table.add_row(match &row.by {
            By::Tables { map, per_page, table_speedup, .. } => {
                phase_cells(row.memory, map, per_page.map_table_ns, table_speedup.map)
            }
            By::Requests { map, per_page, speedup, .. } => {
                request_cells(row.memory, *map, per_page, per_page.map_ns, speedup.map)
            }
        });
    }
    table.add_row(["UNMAP"]);
    for row in rows {
        table.add_row(match &row.by {
            By::Tables { unmap, per_page, table_speedup, .. } => {
                phase_cells(row.memory, unmap, per_page.unmap_table_ns, table_speedup.unmap)
            }
            By::Requests { unmap, per_page, speedup, .. } => {
                request_cells(row.memory, *unmap, per_page, per_page.unmap_ns, speedup.unmap)
            }
        });
    }
    align_right(&mut table, 1);
    table
}

fn phase_cells(memory: &str, phase: &Phase, per_page_ns: u64, speedup: f64) -> [String; 8] {
    let lookup = match phase.lookup_ns {
        0 => UNTOLD.to_owned(),
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

fn request_cells(
    memory: &str,
    times: Times,
    per_page: &PerPageRequests,
    per_page_ns: u64,
    speedup: f64,
) -> [String; 8] {
    [
        format!("  {memory}"),
        units::time(times.total_ns),
        units::three_digits(times.gibps),
        UNTOLD.to_owned(),
        UNTOLD.to_owned(),
        UNTOLD.to_owned(),
        units::three_digits(gibps(per_page.bytes(), per_page_ns)),
        ratio(speedup),
    ]
}

fn push_verdict(text: &mut String, report: &Report, marks: Marks) {
    for failure in report.failures() {
        push_wrapped(text, "", &format!("{} {failure}", marks.wrong()));
    }
    if !report.passed() {
        return;
    }
    let mark = marks.right();
    if report.real.is_some() {
        push_real_verdict(text, report, mark);
    } else if report.verified_bytes > 0 {
        let bytes = ByteSize::new(report.verified_bytes);
        let _ = writeln!(
            text,
            "{mark} the device wrote and read back {bytes}, and the CPU saw the same"
        );
        let _ = writeln!(text, "{mark} nothing translates after the unmap");
    }
}

/// What is known without DMA.
fn push_real_verdict(text: &mut String, report: &Report, mark: &str) {
    let mut counted = Vec::new();
    for row in &report.rows {
        if let Row::Figures(figures) = row {
            counted.push(figures.counted);
        }
    }
    let bytes = report.size_bytes.saturating_mul(counted.len() as u64);
    let bytes = ByteSize::new(bytes);
    let _ = writeln!(text, "{mark} {bytes} were mapped and unmapped again; no DMA was tried");
    let pins = if counted.iter().all(|counted| *counted == Counted::All) {
        ": the kernel counts what was pinned, and none of it now"
    } else {
        ""
    };
    let _ = writeln!(text, "{mark} no mapping is left{pins}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples;
    use crate::report::text::WIDTH;

    #[test]
    fn no_line_is_wider_than_the_terminal_of_most() {
        for mut report in [examples::report(), examples::real_report()] {
            report.notes.push("word ".repeat(60));
            for line in render(&report, Marks::Plain).lines() {
                assert!(line.chars().count() <= WIDTH, "{line}");
                assert_eq!(line, line.trim_end());
            }
        }
    }

    #[test]
    fn a_real_device_says_what_was_asked_of_the_kernel_and_that_no_dma_was_tried() {
        let text = render(&examples::real_report(), Marks::Plain);
        for part in [
            "mapped by the kernel's VFIO type 1 for 0000:00:05.0",
            "0x0..=0xfedfffff and 0xfef00000..=0x7fffffffff, pages of 4K, 2M, 1G, 65535",
            "1 + 2",
            "8192 + 8193",
            "12.1 ms",
            "0.78",
            "106×",
            "160×",
            "✓ 1 GiB were mapped and unmapped again; no DMA was tried",
            "✓ no mapping is left: the kernel counts what was pinned, and none of it now",
        ] {
            let found = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(found.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("translates") && !text.contains("the CPU saw"), "{text}");
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
        report.stale_translations = Some(3);
        let text = render(&report, Marks::Coloured);
        assert!(text.contains("\x1b[31m✗\x1b[0m base: at iova 0x1000"), "{text}");
        assert!(!text.contains("nothing translates") && !text.contains("saw the same"), "{text}");
    }
}
