//! The report of `inspect` for people.

use std::collections::BTreeSet;
use std::fmt::{Display, Write};

use dmaspan_cli::size::ByteSize;
use dmaspan_cli::text::{
    LOOK, RIGHT, WRONG, align_right, new_table, push_table, push_words, push_wrapped,
};
use dmaspan_cli::units;

use super::findings::Severity;
use super::report::{ChangeReport, DomainDiff, DomainReport, Lookup, Missed, Report, Target};
use crate::html::Cell;

/// How many mappings and changes of a domain are shown.
const MOST_ROWS: usize = 20;

/// The report as text, with a newline at its end.
pub(crate) fn render(report: &Report) -> String {
    let mut text = String::new();
    push_wrapped(&mut text, "", &heading(report));
    for note in &report.notes {
        push_wrapped(&mut text, "note: ", note);
    }
    for domain in &report.domains {
        text.push('\n');
        push_domain(&mut text, domain);
    }
    for lookup in &report.lookups {
        text.push('\n');
        push_lookup(&mut text, lookup);
    }
    for diff in report.diff.iter().flatten() {
        text.push('\n');
        push_diff(&mut text, diff);
    }
    text.push('\n');
    for finding in &report.findings {
        let mark = match finding.severity {
            Severity::Wrong => WRONG,
            Severity::Look => LOOK,
            Severity::Note => "·",
        };
        let bytes = finding.bytes.map(|bytes| format!(", {}", ByteSize::new(bytes)));
        let (name, count, text_of) = (finding.name, finding.count, &finding.text);
        let bytes = bytes.unwrap_or_default();
        push_wrapped(&mut text, "", &format!("{mark} {name} ({count}{bytes}): {text_of}"));
        for example in &finding.examples {
            push_words(&mut text, "    ", "      ", example.split_whitespace());
        }
        let shown = finding.examples.len() as u64;
        if finding.bytes.is_some() && finding.count > shown {
            let _ = writeln!(text, "    … and {} more", finding.count - shown);
        }
    }
    if report.findings.iter().all(|finding| finding.severity == Severity::Note) {
        let _ = writeln!(text, "{RIGHT} nothing suspicious was found");
    }
    text
}

/// What was read, in a sentence.
pub(crate) fn heading(report: &Report) -> String {
    let source = &report.source;
    let kind = match source.kind {
        "raw" => "memory",
        "elf" => "a core file",
        "debugfs" => "Intel's domain_translation_struct",
        _ => "a dump by lines",
    };
    let mut text = format!("{}: {kind}", source.files.join(", "));
    match source.memory.as_slice() {
        [] => {}
        [[first, last]] => {
            let _ = write!(text, ", {first:#x}..={last:#x}");
        }
        [[first, _], .., [_, last]] => {
            let count = source.memory.len();
            let _ = write!(text, " of {count} parts, {first:#x}..={last:#x}");
        }
    }
    if let Some(other) = &source.compared_with {
        let _ = write!(text, ", compared with {other}");
    }
    text
}

/// A domain in a sentence or two.
pub(crate) fn summary(domain: &DomainReport) -> [String; 2] {
    let mut what = format!("{}: {}", domain.name, domain.tables);
    if let Some(root) = domain.root
        && !domain.devices.is_empty()
    {
        let _ = write!(what, " at {root:#x}");
    }
    if let Some([first, last]) = domain.aperture {
        let _ = write!(what, ", for {first:#x}..={last:#x}");
    }
    let (spans, bytes) = (domain.spans, ByteSize::new(domain.mapped_bytes));
    let tables = ByteSize::new(domain.table_bytes);
    let count = domain.table_count;
    let mapped = match spans.count {
        0 => format!("nothing is mapped; {count} tables, {tables}"),
        1 => format!("{bytes} in one span; {count} tables, {tables}"),
        number => {
            let largest = ByteSize::new(spans.largest_bytes);
            let median = ByteSize::new(spans.median_bytes);
            format!(
                "{bytes} in {number} spans, the largest {largest}, half of them {median} or less; \
                 {count} tables, {tables}"
            )
        }
    };
    [what, mapped]
}

fn push_domain(text: &mut String, domain: &DomainReport) {
    for line in summary(domain) {
        push_wrapped(text, "", &line);
    }
    if domain.devices.len() > 1 {
        push_wrapped(text, "devices: ", &domain.devices.join(" "));
    }
    for note in &domain.notes {
        push_wrapped(text, "note: ", note);
    }
    if domain.mappings.is_empty() {
        return;
    }
    push_cells(text, ["leaf", "now", "best here", "best elsewhere"], leaf_rows(domain));
    let missed = missed_rows(domain);
    if !missed.is_empty() {
        push_cells(text, ["smaller than", "leaves", "IOVA", "memory"], missed);
        push_wrapped(text, "", MISSED);
    }
    let mut rows = new_table(["IOVA", "memory", "size", "leaves", "may"]);
    for mapping in domain.mappings.iter().take(MOST_ROWS) {
        let last = mapping.iova.saturating_add(mapping.bytes - 1);
        rows.add_row([
            format!("{:#x}..={last:#x}", mapping.iova),
            format!("{:#x}", mapping.paddr),
            ByteSize::new(mapping.bytes).to_string(),
            leaf_sizes(mapping.leaf_sizes),
            mapping.prot.clone(),
        ]);
    }
    push_table(text, &rows);
    push_rest(text, domain.mappings.len());
}

/// A table of numbers behind a name.
fn push_cells(text: &mut String, header: [&str; 4], rows: Vec<Vec<Cell>>) {
    let mut table = new_table(header);
    table.add_rows(rows);
    align_right(&mut table, 1);
    push_table(text, &table);
}

/// How many leaves of each size there are, could be here, and could be elsewhere.
pub(crate) fn leaf_rows(domain: &DomainReport) -> Vec<Vec<Cell>> {
    let all = [&domain.leaves, &domain.best_leaves, &domain.best_leaves_elsewhere];
    let known: BTreeSet<u64> = all.iter().flat_map(|census| census.keys().copied()).collect();
    let row = |size| {
        let counts = all.map(|census| {
            let count = census.get(&size).copied().unwrap_or(0);
            Cell::number(count, or_dash(count, count))
        });
        [Cell::number(size, units::page_size(size))].into_iter().chain(counts).collect()
    };
    known.into_iter().rev().map(row).collect()
}

/// What lies in leaves that are smaller than they could be, by the size that they miss.
pub(crate) fn missed_rows(domain: &DomainReport) -> Vec<Vec<Cell>> {
    let row = |missed: &Missed| {
        let reasons = [missed.by_leaves_bytes, missed.by_iova_bytes, missed.by_memory_bytes];
        let cells = reasons.map(|bytes| Cell::number(bytes, or_dash(bytes, ByteSize::new(bytes))));
        let size = Cell::number(missed.size, units::page_size(missed.size));
        let is_any = reasons.iter().any(|bytes| *bytes != 0);
        is_any.then(|| [size].into_iter().chain(cells).collect())
    };
    domain.missed.iter().filter_map(row).collect()
}

/// What a number is shown as, but 0.
fn or_dash(number: u64, shown: impl Display) -> String {
    if number == 0 { "-".to_owned() } else { shown.to_string() }
}

/// What the columns of missed leaves say.
pub(crate) const MISSED: &str = "\
    Bytes in leaves smaller than that: because the table has smaller leaves although both \
    addresses are aligned; because the IOVA is not aligned as the memory is; because the memory is \
    not contiguous where it is aligned.";

/// The smallest and the largest leaf.
pub(crate) fn leaf_sizes([smallest, largest]: [u64; 2]) -> String {
    match (units::page_size(smallest), units::page_size(largest)) {
        (one, other) if one == other => one,
        (one, other) => format!("{one} to {other}"),
    }
}

fn push_rest(text: &mut String, count: usize) {
    if count > MOST_ROWS {
        let _ = writeln!(text, "… and {} more; --format json has all", count - MOST_ROWS);
    }
}

fn push_lookup(text: &mut String, lookup: &Lookup) {
    let space = if lookup.space == "iova" { "IOVA" } else { "memory" };
    if lookup.found.is_empty() {
        let _ = writeln!(text, "{space} {:#x} is not mapped", lookup.address);
    }
    for found in &lookup.found {
        let line = format!(
            "{space} {:#x}: {} maps IOVA {:#x} to {:#x}, by a leaf of {} ({})",
            lookup.address,
            found.domain,
            found.iova,
            found.paddr,
            units::page_size(found.leaf_size),
            found.prot,
        );
        push_wrapped(text, "", &line);
    }
}

fn push_diff(text: &mut String, diff: &DomainDiff) {
    if diff.changes.is_empty() {
        let _ = writeln!(text, "{}: the same mappings as before", diff.domain);
        return;
    }
    let bytes = diff.bytes.iter().filter(|(_, bytes)| **bytes != 0);
    let bytes: Vec<_> =
        bytes.map(|(name, bytes)| format!("{name} {}", ByteSize::new(*bytes))).collect();
    push_wrapped(text, "", &format!("{}, compared: {}", diff.domain, bytes.join(", ")));
    let mut rows = new_table(["", "IOVA", "size", "before", "after"]);
    rows.add_rows(change_rows(diff, MOST_ROWS));
    push_table(text, &rows);
    push_rest(text, diff.changes.len());
}

/// The first changes, of which there are `most`.
pub(crate) fn change_rows(diff: &DomainDiff, most: usize) -> Vec<Vec<Cell>> {
    let row = |change: &ChangeReport| {
        vec![
            Cell::text(change.change),
            Cell::number(change.iova, format!("{:#x}", change.iova)),
            Cell::number(change.bytes, ByteSize::new(change.bytes).to_string()),
            Cell::text(target(change.before.as_ref())),
            Cell::text(target(change.after.as_ref())),
        ]
    };
    diff.changes.iter().take(most).map(row).collect()
}

/// Where a range leads, in a cell.
fn target(target: Option<&Target>) -> String {
    target.map_or_else(|| "-".to_owned(), |target| format!("{:#x} {}", target.paddr, target.prot))
}

#[cfg(test)]
mod tests {
    use dmaspan_cli::text::WIDTH;

    use super::*;
    use crate::inspect::report::example;

    #[test]
    fn everything_that_was_found_is_there_in_80_columns() {
        let text = render(&example());
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line}");
            assert_eq!(line, line.trim_end());
        }
        let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [
            "guest.mem: memory, 0x0..=0x7fffffff, compared with before.mem",
            "0000:00:05.0 and 1 more: VT-d second-stage page tables at 0x1000",
            "1 GiB in 3 spans, the largest 1023 MiB, half of them 4 MiB or less; 1 tables, 4 KiB",
            "note: the stage is a guess",
            "2M 511 511 513",
            "4K 1440 1440 416",
            "2M - 4 MiB 1.62 MiB",
            "0x100000..=0x3fffffff 0x40100000 1023 MiB 4K to 2M rw",
            "IOVA 0x201234: 0000:00:05.0 and 1 more maps IOVA 0x201234 to 0x40201234, by a leaf of \
             2M (rw)",
            "IOVA 0xdead0000 is not mapped",
            "0000:00:05.0 and 1 more, compared: added 4 MiB",
            "table at 0x9000, compared: added 8 KiB",
            "✗ loop (3): links lead back up the tree; they were not followed",
            "✗ tables_mapped (1, 4 KiB): a device can write page tables",
            "! shared_frames (1, 4 KiB)",
            "! interrupt_window (1, 4 KiB)",
        ] {
            assert!(flat.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains('\x1b') && !text.contains("nothing suspicious"), "{text}");
    }
}
