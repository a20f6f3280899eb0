//! The table of `map`, for people.

use std::fmt::Write;

use comfy_table::Table;
use dmaspan_linux::vfio::Backend;

use super::{By, Figures, Phase, RealDevice, Report, Row, Way, real_table};
use crate::doctor;
use crate::pinned::Witness;
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::text::{RIGHT, WRONG, align_right, new_table, push_table, push_wrapped, ratio};
use dmaspan_cli::units;

/// The report as text, with a newline at its end.
pub(crate) fn render(report: &Report) -> String {
    let mut text = doctor::paragraph(&report.machine);
    if !text.is_empty() {
        text.push('\n');
    }
    text.push_str(&heading(report));
    let figures = report.figures();
    if !figures.is_empty() {
        match &report.real {
            Some(real) => real_table::push(&mut text, &figures, real),
            None => {
                push_table(&mut text, &memory_table(&figures));
                push_table(&mut text, &times_table(&figures));
                text.push('\n');
                LEGENDS.iter().for_each(|legend| push_wrapped(&mut text, "", legend));
            }
        }
    }
    text.push('\n');
    for note in &report.notes {
        push_wrapped(&mut text, "note: ", note);
    }
    for row in &report.rows {
        // What failed is the verdict's to say.
        if let Row::Skipped { memory, skipped } = row {
            push_wrapped(&mut text, &format!("skipped {memory}: "), skipped);
        }
    }
    if !text.ends_with("\n\n") {
        text.push('\n');
    }
    push_verdict(&mut text, report);
    text
}

const LEGENDS: [&str; 2] = [
    "In each run, total = pin or unpin (by the kernel) + look-up of frame numbers + tables (by \
     dmaspan). Each figure is a median of its own.",
    "Per page: the same table work, one page at a time. A map makes one call for each page, whose \
     frame number was read before, in bulk and untimed. An unmap looks each page up and unmaps it \
     with one call, which adds one entry to the gather of a single sync. Faster = per page / \
     tables.",
];

/// What was mapped by what, in sentences.
pub(crate) fn heading(report: &Report) -> String {
    let runs = report.runs;
    let (size, granule) = (ByteSize::new(report.size_bytes), ByteSize::new(report.granule));
    let medians = if runs == 1 { "one run".to_owned() } else { format!("medians of {runs} runs") };
    let mut text = String::new();
    let what = match &report.real {
        Some(RealDevice { device, bar: Some(index), backend, .. }) => {
            let by = name(*backend);
            format!("BAR {index} of {device}, {size}, mapped for the device itself by {by}")
        }
        Some(RealDevice { device, backend: backend @ Backend::NoIommu, .. }) => {
            format!("{size} of each kind of memory, pinned for {device} by {}", name(*backend))
        }
        Some(RealDevice { device, backend, .. }) => {
            format!("{size} of each kind of memory, mapped for {device} by {}", name(*backend))
        }
        None => {
            let pin = report.pin.unwrap_or("the kernel");
            format!(
                "{size} of each kind of memory, pinned with {pin} and mapped by a software IOMMU \
                 (Arm stage 1, granule {granule})"
            )
        }
    };
    push_wrapped(&mut text, "", &format!("{what}; {medians}"));
    if let Some(real) = &report.real {
        push_wrapped(&mut text, "", &limits(real));
    }
    text
}

/// What the kernel was asked by.
const fn name(backend: Backend) -> &'static str {
    match backend {
        Backend::Vfio => "VFIO type1",
        Backend::Iommufd => "iommufd",
        Backend::Compat => "iommufd in place of VFIO type1",
        Backend::NoIommu => "iommufd without an IOMMU",
    }
}

/// What the IOMMU can map.
fn limits(real: &RealDevice) -> String {
    if real.backend == Backend::NoIommu {
        return "It reaches all memory, at physical addresses, which the kernel tells one span a \
                request; IOVAs are names of pins"
            .to_owned();
    }
    let iommu = &real.iommu;
    let range = |[first, last]: &[u64; 2]| format!("{first:#x}..={last:#x}");
    let apertures: Vec<String> = iommu.apertures.iter().map(range).collect();
    let mappings = match iommu.mappings_limit {
        // What iommufd says in place of VFIO is no limit, but the largest number.
        Some(limit) if limit < u64::from(u32::MAX) => format!("at most {limit} mappings"),
        _ => "any number of mappings".to_owned(),
    };
    let (apertures, sizes) = (apertures.join(" and "), units::page_sizes(&iommu.page_sizes));
    format!("Its IOMMU maps IOVAs {apertures}, with pages of {sizes} and {mappings}")
}

/// How each kind of memory lies in the tables.
fn memory_table(rows: &[&Figures]) -> Table {
    let mut table = new_table(["memory", "spans", "leaves", "tables"]);
    for row in rows {
        let By::Tables { leaves, table_bytes, .. } = &row.by else { continue };
        let leaves = leaves.iter().rev();
        let leaves = leaves.map(|(size, n)| format!("{n} × {}", units::page_size(*size)));
        let leaves = leaves.collect::<Vec<_>>().join(" + ");
        let tables = ByteSize::new(*table_bytes).to_string();
        table.add_row([row.memory.clone(), row.spans.to_string(), leaves, tables]);
    }
    align_right(&mut table, 1);
    table
}

/// Where the time goes.
fn times_table(rows: &[&Figures]) -> Table {
    let header = ["", "total", "GiB/s", "pin", "look-up", "tables", "per page", "faster"];
    let mut table = new_table(header);
    for way in Way::ALL {
        table.add_row([way.title()]);
        for row in rows {
            if let By::Tables { times, per_page, table_speedup, .. } = &row.by {
                let (slow, faster) = (*per_page.times().of(way), *table_speedup.of(way));
                table.add_row(phase_cells(&row.memory, times.of(way), slow, faster));
            }
        }
    }
    align_right(&mut table, 1);
    table
}

fn phase_cells(memory: &str, phase: &Phase, per_page_ns: u64, speedup: f64) -> [String; 8] {
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

/// What the verdict is, each line behind its mark.
pub(crate) fn push_verdict(text: &mut String, report: &Report) {
    for failure in report.failures() {
        push_wrapped(text, "", &format!("{WRONG} {failure}"));
    }
    if !report.passed() {
        return;
    }
    let mark = RIGHT;
    if report.real.is_some() {
        push_real_verdict(text, report, mark);
    } else if report.verified_bytes > 0 {
        if let Some(witnesses) = witnesses(report) {
            push_wrapped(
                text,
                "",
                &format!("{mark} all of it was pinned, according to {witnesses}"),
            );
        }
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
    let measured = report.rows.iter().filter(|row| matches!(row, Row::Figures(_))).count();
    let bytes = report.size_bytes.saturating_mul(measured as u64);
    let bytes = ByteSize::new(bytes);
    let _ = writeln!(text, "{mark} {bytes} were mapped and unmapped again; no DMA was tried");
    let pins = witnesses(report).map_or_else(String::new, |witnesses| {
        format!(": the kernel counted the pinned memory, and counts none of it now ({witnesses})")
    });
    push_wrapped(text, "", &format!("{mark} no mapping is left{pins}"));
}

/// What showed that memory was pinned; `None` where nothing did of one kind.
fn witnesses(report: &Report) -> Option<String> {
    let mut witnesses: Vec<Witness> = Vec::new();
    for row in &report.rows {
        let Row::Figures(figures) = row else { continue };
        match figures.witness? {
            Witness::Accepted(_) => return None,
            witness if witnesses.contains(&witness) => {}
            witness => witnesses.push(witness),
        }
    }
    let names: Vec<String> = witnesses.iter().map(Witness::to_string).collect();
    Some(names.join(" and "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples;
    use dmaspan_cli::text::WIDTH;

    #[test]
    fn no_line_is_wider_than_the_terminal_of_most() {
        for mut report in [examples::report(), examples::real_report(), examples::bar_report()] {
            report.notes.push("word ".repeat(60));
            for line in render(&report).lines() {
                assert!(line.chars().count() <= WIDTH, "{line}");
                assert_eq!(line, line.trim_end());
            }
        }
    }

    #[test]
    fn a_real_device_says_what_was_asked_of_the_kernel_and_that_no_dma_was_tried() {
        let text = render(&examples::real_report());
        for part in [
            "1 GiB of each kind of memory, mapped for 0000:00:05.0 by VFIO type1",
            "0x0..=0xfedfffff and 0xfef00000..=0x7fffffffff, with pages of 4K, 2M, 1G and at most \
             65535",
            "thp 7 12.1 ms 82.6 1 4.88 µs 8192 106×",
            "thp 4.00 ms 250 2 2.44 µs 8193 160×",
            "one of 8192 pages (32 MiB)",
            "✓ 1 GiB were mapped and unmapped again; no DMA was tried",
            "✓ no mapping is left: the kernel counted the pinned memory, and counts none of it now \
             (VmPin in /proc/self/status)",
        ] {
            let found = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(found.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("translates") && !text.contains("the CPU saw"), "{text}");
    }

    #[test]
    fn a_bar_says_how_large_and_how_aligned_it_is() {
        let text = render(&examples::bar_report());
        for part in [
            "BAR 2 of 0000:00:05.0, 32 GiB, mapped for the device itself by VFIO type1",
            "bar 2 32 GiB 1G 1.25 ms 1",
            "bar 2 625 µs 1",
            "✓ 32 GiB were mapped and unmapped again; no DMA was tried",
            "✓ no mapping is left",
        ] {
            let found = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(found.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("per page") && !text.contains("pinned"), "{text}");
    }

    #[test]
    fn everything_that_was_found_is_there() {
        let text = render(&examples::report());
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
            "✓ all of it was pinned, according to VmPin in /proc/self/status",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains('\x1b'));
    }

    #[test]
    fn a_failure_is_a_verdict_of_its_own() {
        let mut report = examples::report();
        let failed = "at iova 0x1000 the device reads 5".to_owned();
        report.rows.push(Row::Failed { memory: "base".to_owned(), failed });
        report.stale_translations = Some(3);
        let text = render(&report);
        assert!(text.contains("✗ base: at iova 0x1000"), "{text}");
        assert_eq!(text.matches("the device reads 5").count(), 1, "{text}");
        assert!(!text.contains("nothing translates") && !text.contains("saw the same"), "{text}");
    }
}
