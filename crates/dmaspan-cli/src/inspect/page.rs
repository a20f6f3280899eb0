//! The report of `inspect` as a page.

use dmaspan_cli::size::ByteSize;
use dmaspan_cli::units;
use maud::{Markup, html};

use crate::html::{
    Cell, LEAF_CLASSES, Part, STRIP, bar, document, figure, leaf_class, legend, strip, table,
};

use super::findings::{Finding, Severity};
use super::report::{DomainDiff, DomainReport, Lookup, Mapping, Report, Run};
use super::table::{MISSED, change_rows, heading, leaf_rows, leaf_sizes, missed_rows, summary};

/// How many regions a map has: the largest.
const MOST_REGIONS: usize = 24;
/// How many rows a table has: more make a page that no browser likes.
const MOST_ROWS: usize = 2000;
/// x86's interrupts, which are never translated.
const INTERRUPTS: [u64; 2] = [0xfee0_0000, 0xfeef_ffff];

/// The report as a page.
pub(crate) fn render(report: &Report) -> String {
    let body = html! {
        (overview(report))
        @if !report.lookups.is_empty() {
            section {
                h2 { "Addresses" }
                @for lookup in &report.lookups { (look_up(lookup)) }
            }
        }
        @for diff in report.diff.iter().flatten() { (difference(diff)) }
        @for domain in &report.domains { (section(domain)) }
    };
    document("What the IO page tables map", &heading(report), &body)
}

fn overview(report: &Report) -> Markup {
    let sum = |of: &dyn Fn(&DomainReport) -> u64| {
        report.domains.iter().map(of).fold(0_u64, u64::saturating_add)
    };
    let mapped = sum(&|domain| domain.mapped_bytes);
    let spans = sum(&|domain| domain.spans.count as u64);
    let leaves = sum(&|domain| domain.leaves.values().sum());
    let tables = sum(&|domain| domain.table_bytes);
    html! {
        section {
            h2 { "In short" }
            ul.figures {
                (figure(&report.domains.len().to_string(), "tables"))
                (figure(&ByteSize::new(mapped).to_string(), "mapped"))
                (figure(&spans.to_string(), "spans"))
                (figure(&leaves.to_string(), "leaves"))
                (figure(&ByteSize::new(tables).to_string(), "of table memory"))
            }
            @for note in &report.notes { p.quiet { "Devices " (note) "." } }
            h3 { "Findings" }
            ul.findings {
                @for finding in &report.findings { li { (shown(finding)) } }
                @if report.findings.iter().all(|it| it.severity == Severity::Note) {
                    li { span.mark.right { "✓" } "Nothing suspicious was found." }
                }
            }
        }
    }
}

fn shown(finding: &Finding) -> Markup {
    let (mark, class) = match finding.severity {
        Severity::Wrong => ("✗", "wrong"),
        Severity::Look => ("!", "look"),
        Severity::Note => ("·", "note"),
    };
    let bytes = finding.bytes.map(|bytes| format!(", {}", ByteSize::new(bytes)));
    let more = finding.count.saturating_sub(finding.examples.len() as u64);
    html! {
        span class={ "mark " (class) } { (mark) }
        strong { (finding.name.replace('_', " ")) }
        " (" (finding.count) (bytes.unwrap_or_default()) "): " (finding.text) "."
        @if !finding.examples.is_empty() {
            ul.examples {
                @for example in &finding.examples { li { (example) } }
                @if more != 0 && finding.bytes.is_some() { li { "and " (more) " more" } }
            }
        }
    }
}

fn section(domain: &DomainReport) -> Markup {
    let [what, mapped] = summary(domain);
    let what = what.strip_prefix(&format!("{}: ", domain.name)).unwrap_or(&what);
    html! {
        section {
            h2 { (domain.name) }
            p.quiet { (what) "; " (mapped) "." }
            @if domain.devices.len() > 1 { p { "Devices: " (domain.devices.join(", ")) } }
            @for note in &domain.notes { p.quiet { "Note: " (note) } }
            @if !domain.mappings.is_empty() {
                h3 { "Address space" }
                (map(domain))
                h3 { "Leaves beside the best possible" }
                (costs(domain))
                (missed(domain))
                (mappings(domain))
            }
        }
    }
}

/// Mappings without large holes between them.
struct Region<'m> {
    mappings: &'m [Mapping],
    first: u64,
    last: u64,
    bytes: u64,
}

/// The regions by address: a hole that is larger than what is on both of its sides divides.
fn regions(mappings: &[Mapping]) -> Vec<Region<'_>> {
    let mut regions = Vec::new();
    let (mut from, mut bytes, mut last) = (0, 0_u64, 0_u64);
    for (index, mapping) in mappings.iter().enumerate() {
        let hole = mapping.iova.saturating_sub(last);
        if index > from && hole > 1 << 20 && hole > bytes.max(mapping.bytes) / 4 {
            regions.extend(region(mappings.get(from..index).unwrap_or(&[])));
            (from, bytes) = (index, 0);
        }
        bytes = bytes.saturating_add(mapping.bytes);
        last = mapping.iova.saturating_add(mapping.bytes - 1);
    }
    regions.extend(region(mappings.get(from..).unwrap_or(&[])));
    regions
}

fn region(mappings: &[Mapping]) -> Option<Region<'_>> {
    let (first, end) = (mappings.first()?, mappings.last()?);
    let bytes = mappings.iter().map(|it| it.bytes).fold(0_u64, u64::saturating_add);
    let last = end.iova.saturating_add(end.bytes - 1);
    Some(Region { mappings, first: first.iova, last, bytes })
}

/// A line of a map.
enum Line<'r, 'm> {
    Region(&'r Region<'m>),
    /// How many bytes have no mapping.
    Hole(u64),
    /// x86's interrupts, where nothing is mapped.
    Interrupts,
}

/// The map of an address space: a strip for each region, and the holes between them.
fn map(domain: &DomainReport) -> Markup {
    let mut regions = regions(&domain.mappings);
    let count = regions.len();
    if count > MOST_REGIONS {
        regions.sort_by_key(|region| std::cmp::Reverse(region.bytes));
        regions.truncate(MOST_REGIONS);
        regions.sort_by_key(|region| region.first);
    }
    let mut classes = LEAF_CLASSES.to_vec();
    let lines = lines(domain, &regions, count);
    if lines.iter().any(|line| matches!(line, Line::Interrupts)) {
        classes.push(("reserved", "reserved"));
    }
    if domain.runs.iter().any(|run| run.is_register) {
        classes.push(("other", "outside of the dump, or registers (BARs)"));
    }
    html! {
        ul.map {
            @for line in &lines {
                @match line {
                    Line::Region(region) => li { (region_strip(domain, region)) },
                    Line::Hole(bytes) => li.hole { "hole of " (ByteSize::new(*bytes)) },
                    Line::Interrupts => li { (interrupts()) },
                }
            }
        }
        @if count > regions.len() {
            p.quiet { "The map has the " (regions.len()) " largest of " (count) " regions." }
        }
        (legend(&classes))
    }
}

/// The lines of a map with `regions` of `count`. Where regions are left out, holes are not holes.
fn lines<'r, 'm>(
    domain: &DomainReport,
    regions: &'r [Region<'m>],
    count: usize,
) -> Vec<Line<'r, 'm>> {
    let is_whole = regions.len() == count;
    let is_x86 = ["VT-d", "AMD", "x86-64"].iter().any(|title| domain.tables.starts_with(title));
    let mut lines = Vec::new();
    // The first address behind what is shown; none at the end of the space.
    let mut next = Some(domain.aperture.map_or(0, |[first, _]| first));
    let hole = |from: u64, to: u64| (from < to).then(|| Line::Hole(to - from));
    let between = |from: Option<u64>, to: u64| {
        let (Some(from), true) = (from, is_whole) else { return Vec::new() };
        let [first, last] = INTERRUPTS;
        if is_x86 && from <= first && last < to {
            [hole(from, first), Some(Line::Interrupts), hole(last + 1, to)]
        } else {
            [hole(from, to), None, None]
        }
        .into_iter()
        .flatten()
        .collect()
    };
    for region in regions {
        lines.extend(between(next, region.first));
        lines.push(Line::Region(region));
        next = region.last.checked_add(1);
    }
    if let Some([_, last]) = domain.aperture {
        lines.extend(between(next, last.saturating_add(1)));
    }
    lines
}

/// What x86 never translates, as a strip.
fn interrupts() -> Markup {
    let [first, last] = INTERRUPTS;
    let whole = Part { start: 0.0, width: f64::from(STRIP), height: 1.0, class: "reserved" };
    html! {
        div.row {
            span.address { (format!("{first:#x}..={last:#x}")) }
            span.quiet { "reserved: x86's interrupts, never translated" }
        }
        (strip("reserved for interrupts", &[whole]))
    }
}

fn region_strip(domain: &DomainReport, region: &Region<'_>) -> Markup {
    let count = region.mappings.len();
    let size = ByteSize::new(region.bytes);
    let spans = if count == 1 { "one span".to_owned() } else { format!("{count} spans") };
    let label = format!("{size} in {spans} from {:#x} to {:#x}", region.first, region.last);
    html! {
        div.row {
            span.address { (format!("{:#x}..={:#x}", region.first, region.last)) }
            span.quiet { (size) " in " (spans) }
        }
        (strip(&label, &parts(region, &domain.runs)))
    }
}

/// The classes that a step of a strip can be of.
const CLASSES: [&str; 5] = ["leaf-small", "leaf-group", "leaf-large", "leaf-huge", "other"];

/// The strip of a region: each step has the colour of most of its bytes, and the height of what is
/// mapped there.
fn parts(region: &Region<'_>, runs: &[Run]) -> Vec<Part> {
    let len = u128::from(region.last - region.first) + 1;
    let border = |step: u32| len * u128::from(step) / u128::from(STRIP);
    let step_at = |offset: u128| {
        let step = u32::try_from(offset * u128::from(STRIP) / len).unwrap_or(STRIP);
        step.min(STRIP - 1)
    };
    let mut filled = vec![[0_u128; CLASSES.len()]; STRIP as usize];
    let from = runs.partition_point(|run| run.iova < region.first);
    for run in runs.iter().skip(from).take_while(|run| run.iova <= region.last) {
        let class = if run.is_register { "other" } else { leaf_class(run.leaf_size) };
        let class = CLASSES.iter().position(|known| *known == class).unwrap_or(0);
        let start = u128::from(run.iova - region.first);
        let end = start + u128::from(run.bytes);
        for step in step_at(start)..=step_at(end - 1) {
            // Where steps are smaller than a byte, neighbours share it.
            let inside = end.min(border(step + 1)).saturating_sub(start.max(border(step)));
            if let Some(bytes) = filled.get_mut(step as usize).and_then(|it| it.get_mut(class)) {
                *bytes += inside.max(1);
            }
        }
    }
    let mut parts: Vec<Part> = Vec::new();
    for (step, bytes) in (0..STRIP).zip(&filled) {
        let total: u128 = bytes.iter().sum();
        if total == 0 {
            continue;
        }
        let most = CLASSES.iter().zip(bytes).max_by_key(|(_, bytes)| **bytes);
        let class = most.map_or("other", |(class, _)| *class);
        // In quarters, so that neighbours join; never so low that it is not seen.
        let height = match total * 4 / (border(step + 1) - border(step)).max(1) {
            0 => 0.25,
            1 => 0.5,
            2 => 0.75,
            _ => 1.0,
        };
        let start = f64::from(step);
        match parts.last_mut() {
            Some(last)
                if (last.class, last.height) == (class, height)
                    && last.start + last.width == start =>
            {
                last.width += 1.0;
            }
            _ => parts.push(Part { start, width: 1.0, height, class }),
        }
    }
    parts
}

/// How many leaves there are, could be here, and could be elsewhere.
fn costs(domain: &DomainReport) -> Markup {
    let count = |census: &std::collections::BTreeMap<u64, u64>| census.values().sum::<u64>();
    let rows = [
        ("now", count(&domain.leaves)),
        ("best at these IOVAs", count(&domain.best_leaves)),
        ("best at aligned IOVAs", count(&domain.best_leaves_elsewhere)),
    ];
    let most = rows.iter().map(|(_, count)| *count).max().unwrap_or(0) as f64;
    html! {
        div.bars {
            @for (name, count) in rows {
                span { (name) }
                (bar(&format!("{name}: {count} leaves"), count as f64, most, "accent"))
                span.value { (count) }
            }
        }
        (table(
            &format!("Leaves of {} by size", domain.name),
            &["leaf", "now", "best at these IOVAs", "best at aligned IOVAs"],
            &leaf_rows(domain),
        ))
    }
}

fn missed(domain: &DomainReport) -> Markup {
    let rows = missed_rows(domain);
    if rows.is_empty() {
        return html! {};
    }
    let caption = format!("Larger leaves that {} misses", domain.name);
    let header = ["smaller than", "by its leaves", "by its IOVAs", "by its memory"];
    html! {
        (table(&caption, &header, &rows))
        p.quiet { (MISSED) }
    }
}

fn mappings(domain: &DomainReport) -> Markup {
    let shown = domain.mappings.iter().take(MOST_ROWS);
    let rows: Vec<Vec<Cell>> = shown
        .map(|mapping| {
            let hex = |number: u64| Cell::number(number, format!("{number:#x}"));
            vec![
                hex(mapping.iova),
                hex(mapping.iova.saturating_add(mapping.bytes - 1)),
                hex(mapping.paddr),
                Cell::number(mapping.bytes, ByteSize::new(mapping.bytes).to_string()),
                Cell::number(mapping.leaf_sizes[1], leaf_sizes(mapping.leaf_sizes)),
                Cell::text(mapping.prot.clone()),
            ]
        })
        .collect();
    let header = ["first IOVA", "last IOVA", "memory", "size", "leaves", "may"];
    let more = domain.mappings.len().saturating_sub(MOST_ROWS);
    html! {
        (table(&format!("Spans of {}", domain.name), &header, &rows))
        @if more != 0 { p.quiet { "And " (more) " more; the JSON report has all." } }
    }
}

fn look_up(lookup: &Lookup) -> Markup {
    let space = if lookup.space == "iova" { "IOVA" } else { "Memory at" };
    html! {
        h3 { (space) " " span.address { (format!("{:#x}", lookup.address)) } }
        @if lookup.found.is_empty() { p { "Nothing maps it." } }
        @for found in &lookup.found {
            p {
                (found.domain) " maps IOVA " span.address { (format!("{:#x}", found.iova)) }
                " to " span.address { (format!("{:#x}", found.paddr)) } ", by a leaf of "
                (units::page_size(found.leaf_size)) " (" (found.prot) ")."
            }
        }
    }
}

fn difference(diff: &DomainDiff) -> Markup {
    let rows = change_rows(diff, MOST_ROWS);
    let more = diff.changes.len().saturating_sub(MOST_ROWS);
    let header = ["change", "IOVA", "size", "before", "after"];
    html! {
        section {
            h2 { "What changed in " (diff.domain) }
            ul.figures {
                @for (name, bytes) in &diff.bytes {
                    (figure(&ByteSize::new(*bytes).to_string(), name))
                }
            }
            @if rows.is_empty() { p { "The mappings are the same as before." } }
            @else { (table(&format!("Changes of {}", diff.domain), &header, &rows)) }
            @if more != 0 { p.quiet { "And " (more) " more; the JSON report has all." } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::report::example;

    fn mapping(iova: u64, bytes: u64, leaf: u64) -> Mapping {
        Mapping {
            iova,
            paddr: 0,
            bytes,
            leaf_sizes: [leaf; 2],
            prot: "rw".to_owned(),
            in_dump: None,
        }
    }

    fn runs(mappings: &[Mapping]) -> Vec<Run> {
        let run = |mapping: &Mapping| Run {
            iova: mapping.iova,
            bytes: mapping.bytes,
            leaf_size: mapping.leaf_sizes[0],
            is_register: false,
        };
        mappings.iter().map(run).collect()
    }

    #[test]
    fn everything_that_was_found_is_on_the_page() {
        let page = render(&example());
        for part in [
            "<h2>0000:00:05.0 and 1 more</h2>",
            "tables mapped",
            "links lead back up the tree",
            "leaf-large",
            "hole of ",
            "reserved: x86's interrupts",
            "What changed in 0000:00:05.0 and 1 more",
            "Nothing maps it.",
            "0x40201234",
        ] {
            assert!(page.contains(part), "{part} is not in\n{page}");
        }
    }

    #[test]
    fn large_holes_divide_regions_and_small_ones_do_not() {
        let (page, large) = (4096, 1 << 30);
        let mappings = [
            mapping(0, large, large),
            mapping(large + (16 << 20), large, large),
            mapping(64 * large, page, page),
            mapping(64 * large + 2 * page, page, page),
        ];
        let found: Vec<_> =
            regions(&mappings).iter().map(|it| (it.first, it.mappings.len())).collect();
        assert_eq!(found, [(0, 2), (64 * large, 2)]);
        assert!(regions(&[]).is_empty());
        let top = [mapping(u64::MAX - 4095, 4096, 4096)];
        assert_eq!(parts(&regions(&top)[0], &runs(&top)).len(), 1);
    }

    #[test]
    fn a_step_has_the_colour_of_most_of_its_bytes_and_a_hole_has_none() {
        let step = 1 << 20;
        let mappings = [mapping(0, 240 * step, 2 << 20), mapping(360 * step, 120 * step, 4096)];
        let region = region(&mappings).unwrap();
        let found: Vec<_> = parts(&region, &runs(&mappings))
            .iter()
            .map(|part| (part.start, part.width, part.class))
            .collect();
        assert_eq!(found, [(0.0, 240.0, "leaf-large"), (360.0, 120.0, "leaf-small")]);
    }
}
