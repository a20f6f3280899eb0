//! The output of `dmaspan plan` as a page.

use std::collections::BTreeSet;

use dmaspan::IovaRange;
use dmaspan_linux::plan::forecast::{
    Backing, Forecast, ForecastMap, LeafCount, PaperLayout, PaperRegion, PlanFinding, PlanSeverity,
    ReservedIovas,
};
use maud::{Markup, html};

use super::report::names;
use super::table::{heading, verdict};
use crate::html::{
    Cell, LEAF_CLASSES, Part, STRIP, bar, document, figure, leaf_class, legend, strip, table, words,
};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::text::ratio;

/// How many maps the address space shows: more are in the table alone.
const MOST_SHOWN: usize = 24;
/// How many rows the table has: more make a page that no browser likes.
const MOST_ROWS: usize = 2000;

/// The report as a page.
pub(super) fn render(
    title: &str,
    layout: &PaperLayout,
    forecast: &Forecast,
    notes: &[String],
) -> String {
    let body = html! {
        (overview(layout, forecast, notes))
        (space(layout, forecast))
        @if !forecast.maps.is_empty() {
            (costs(forecast))
            (maps(layout, forecast))
        }
    };
    document("What mapping will cost", &heading(title, layout), &body)
}

/// A mark and its class.
const fn mark(severity: PlanSeverity) -> (&'static str, &'static str) {
    match severity {
        PlanSeverity::Note => ("✓", "right"),
        PlanSeverity::Slow => ("!", "look"),
        PlanSeverity::Fails => ("✗", "wrong"),
    }
}

fn overview(layout: &PaperLayout, forecast: &Forecast, notes: &[String]) -> Markup {
    let (sign, class) = mark(forecast.verdict());
    let locked = match layout.limits.memlock {
        Some(limit) => format!("locked, of {} at most", ByteSize::new(limit)),
        None => "locked, without a limit".to_owned(),
    };
    let mappings = match layout.limits.mappings_left() {
        Some(left) => format!("mappings, of {left} at most"),
        None => "mappings, without a limit".to_owned(),
    };
    html! {
        section {
            h2 { span class={ "mark " (class) } { (sign) } (verdict(layout, forecast)) }
            ul.figures {
                (figure(&forecast.maps.len().to_string(), &mappings))
                (figure(&ByteSize::new(forecast.locked).to_string(), &locked))
                (figure(&ByteSize::new(forecast.table_bytes).to_string(), "of table memory"))
                (figure(&ratio(forecast.cost.map_ratio), "what huge pages cost to map"))
            }
            @if !forecast.findings.is_empty() {
                h3 { "Findings" }
                ul.findings { @for finding in &forecast.findings { li { (shown(finding)) } } }
            }
            @for note in notes { p.quiet { "Note: " (note) } }
        }
    }
}

fn shown(finding: &PlanFinding) -> Markup {
    let (sign, class) = mark(finding.severity());
    html! {
        span class={ "mark " (class) } { (sign) }
        (finding.to_string()) "."
        @let mends = finding.mends();
        @if !mends.is_empty() {
            ul.examples { @for mend in &mends { li { (words(&mend.action)) ": " (mend.gain) } } }
        }
    }
}

/// A line of the address space.
enum Line<'l> {
    Map(&'l ForecastMap),
    Reserved(&'l ReservedIovas),
    /// A region that would not be mapped where it shall be.
    Refused(&'l PaperRegion),
    /// The last address that the IOMMU translates, before others that it does not.
    End,
}

/// The lines by their addresses. Of maps and of refused regions only so many are shown.
fn lines<'l>(layout: &'l PaperLayout, forecast: &'l Forecast) -> Vec<(IovaRange, Line<'l>)> {
    let maps = forecast.maps.iter().take(MOST_SHOWN).map(|map| (map.iova, Line::Map(map)));
    let is_mapped: BTreeSet<usize> =
        forecast.maps.iter().flat_map(|map| &map.regions).copied().collect();
    let refused = (0..).zip(&layout.regions).filter(|(number, _)| !is_mapped.contains(number));
    let refused = refused.filter_map(|(_, region)| {
        let range = IovaRange::from_len(region.iova?, region.len()).ok()?;
        Some((range, Line::Refused(region)))
    });
    let iommu = &layout.iommu;
    let reserved = iommu.reserved.iter().map(|it| (it.range, Line::Reserved(it)));
    let mut lines: Vec<(IovaRange, Line<'_>)> =
        maps.chain(reserved.take(MOST_SHOWN)).chain(refused.take(MOST_SHOWN)).collect();
    let last = lines.iter().map(|(range, _)| range.last()).max();
    for aperture in &iommu.apertures {
        if last.is_some_and(|last| aperture.last() < last)
            && let Some(end) = IovaRange::new(aperture.last(), aperture.last())
        {
            lines.push((end, Line::End));
        }
    }
    lines.sort_by_key(|(range, _)| (range.start(), range.last()));
    lines
}

/// The address space: each map, coloured by its leaves, the holes between them, what is reserved,
/// and what would not be mapped.
fn space(layout: &PaperLayout, forecast: &Forecast) -> Markup {
    let lines = lines(layout, forecast);
    let more = forecast.maps.len().saturating_sub(MOST_SHOWN);
    let cut = forecast.maps.get(MOST_SHOWN).map(|map| map.iova.start());
    // The first address behind what is shown; none at the end of the space.
    let mut behind = Some(0_u64);
    let holes: Vec<u64> = lines
        .iter()
        .map(|(range, line)| {
            let start = range.start().get().saturating_add(u64::from(matches!(line, Line::End)));
            // Where maps are left out, nobody sees a hole.
            let is_known = cut.is_none_or(|cut| range.start() < cut);
            let hole = behind.map_or(0, |behind| start.saturating_sub(behind));
            let next = range.last().get().checked_add(1);
            behind = behind.and_then(|behind| Some(behind.max(next?)));
            if is_known { hole } else { 0 }
        })
        .collect();
    let mut classes = LEAF_CLASSES.to_vec();
    let is_there = |is: fn(&Line<'_>) -> bool| lines.iter().any(|(_, line)| is(line));
    for (is_shown, class) in [
        (is_there(|line| matches!(line, Line::Reserved(_))), ("reserved", "reserved")),
        (
            is_there(|line| matches!(line, Line::Refused(_))),
            ("refused", "would not be mapped (striped)"),
        ),
        (
            forecast.maps.iter().take(MOST_SHOWN).any(|map| has_registers(map, layout)),
            ("other", "registers (BARs), above their leaves"),
        ),
    ] {
        classes.extend(is_shown.then_some(class));
    }
    html! {
        section {
            h2 { "Address space" }
            ul.map {
                @for ((range, line), hole) in lines.iter().zip(holes) {
                    @if hole > 0 { li.hole { "nothing in " (ByteSize::new(hole)) } }
                    (shown_line(layout, *range, line))
                }
            }
            @if more > 0 { p.quiet { "and " (more) " maps more" } }
            (legend(&classes))
        }
    }
}

/// A line of the address space with its strip.
fn shown_line(layout: &PaperLayout, range: IovaRange, line: &Line<'_>) -> Markup {
    let bytes = ByteSize::new(range.len_less_one().saturating_add(1));
    let whole = |class| [Part { start: 0.0, width: f64::from(STRIP), height: 1.0, class }];
    let (name, picture) = match line {
        Line::End => {
            return html! {
                li.hole { "the IOMMU translates nothing above " (range.last().to_string()) }
            };
        }
        Line::Map(map) => (
            html! { (names(map, layout).join(", ")) },
            leaf_strip(&format!("{bytes} by leaf"), layout, map),
        ),
        Line::Reserved(reserved) => {
            let label = format!("reserved for {}", reserved.name);
            let picture = strip(&label, &whole("reserved"));
            (html! { span.quiet { (label) } }, picture)
        }
        Line::Refused(region) => {
            let is_inside = |aperture: &IovaRange| {
                aperture.start() <= range.start() && range.last() <= aperture.last()
            };
            let why = match layout.iommu.apertures.iter().any(is_inside) {
                true => "would not be mapped",
                false => "would not be mapped: outside of what the IOMMU translates",
            };
            let name = html! { span.mark.wrong { "✗" } (region.name) " " span.quiet { (why) } };
            // Stripes, which nobody takes for small leaves.
            let stripe = |number: u32| Part {
                start: f64::from(16 * number),
                width: 8.0,
                height: 1.0,
                class: "refused",
            };
            let stripes: Vec<Part> = (0..STRIP / 16).map(stripe).collect();
            (name, strip(&format!("{}: {bytes}, {why}", region.name), &stripes))
        }
    };
    html! {
        li {
            div.row {
                span { (name) }
                span.address { (range.to_string()) }
            }
            (picture)
        }
    }
}

/// Whether a map has registers of a device.
fn has_registers(map: &ForecastMap, layout: &PaperLayout) -> bool {
    let region = |region: &usize| layout.regions.get(*region);
    map.regions.iter().filter_map(region).any(|region| region.backing == Backing::Registers)
}

/// The leaves of a map; registers have a band above them.
fn leaf_strip(label: &str, layout: &PaperLayout, map: &ForecastMap) -> Markup {
    let has_band = has_registers(map, layout);
    let mut start = 0.0;
    let (width, height) = (f64::from(STRIP), if has_band { 0.6 } else { 1.0 });
    let band = has_band.then_some(Part { start, width, height: 1.0, class: "other" });
    let part = |leaf: &LeafCount| {
        let bytes = leaf.size.saturating_mul(leaf.count);
        let width = f64::from(STRIP) * bytes as f64 / map.len() as f64;
        let part = Part { start, width, height, class: leaf_class(leaf.size) };
        start += width;
        part
    };
    let parts: Vec<Part> = band.into_iter().chain(map.leaves.iter().map(part)).collect();
    strip(label, &parts)
}

/// What it costs beside the best layout.
fn costs(forecast: &Forecast) -> Markup {
    let leaves =
        |of: fn(&ForecastMap) -> u64| forecast.maps.iter().map(of).fold(0, u64::saturating_add);
    let (now, best) = (leaves(ForecastMap::leaf_count), leaves(ForecastMap::best_count));
    let bytes = |bytes: u64| ByteSize::new(bytes).to_string();
    let (tables, best_tables) = (forecast.table_bytes, forecast.best_table_bytes);
    let (lookups, best_lookups) = (forecast.cost.lookups, forecast.cost.best_lookups);
    let rows = [
        ("leaves", now, best, now.to_string(), best.to_string()),
        ("table memory", tables, best_tables, bytes(tables), bytes(best_tables)),
        ("look-ups", lookups, best_lookups, lookups.to_string(), best_lookups.to_string()),
    ];
    html! {
        section {
            h2 { "Cost beside the best layout" }
            div.bars {
                @for (name, now, best, now_text, best_text) in &rows {
                    @let most = (*now).max(*best) as f64;
                    span { (name) }
                    (bar(&format!("{name}: {now_text}"), *now as f64, most, "accent"))
                    span.value { (now_text) }
                    span.quiet { "at best" }
                    (bar(&format!("{name} at best: {best_text}"), *best as f64, most, "leaf-huge"))
                    span.value { (best_text) }
                }
            }
        }
    }
}

fn maps(layout: &PaperLayout, forecast: &Forecast) -> Markup {
    let header = ["map", "first address", "size", "spans at most", "leaves", "at best"];
    let row = |map: &ForecastMap| {
        let start = map.iova.start().get();
        let count = |count: u64| Cell::number(count, count.to_string());
        vec![
            Cell::text(names(map, layout).join(", ")),
            Cell::number(start, format!("{start:#x}")),
            Cell::number(map.len(), ByteSize::new(map.len()).to_string()),
            count(map.spans_most),
            count(map.leaf_count()),
            count(map.best_count()),
        ]
    };
    let rows: Vec<_> = forecast.maps.iter().take(MOST_ROWS).map(row).collect();
    html! {
        section {
            h2 { "Maps" }
            (table("Each map is one request to the kernel", &header, &rows))
            @if forecast.maps.len() > MOST_ROWS {
                p.quiet { "and " (forecast.maps.len() - MOST_ROWS) " maps more" }
            }
        }
    }
}
