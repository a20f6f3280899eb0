//! The output of `dmaspan plan` as a page.

use dmaspan_linux::plan::forecast::{
    Forecast, ForecastMap, LeafCount, PaperLayout, PlanFinding, PlanSeverity,
};
use maud::{Markup, html};

use super::report::names;
use super::table::{heading, verdict};
use crate::html::{
    Cell, LEAF_CLASSES, Part, STRIP, bar, document, figure, leaf_class, legend, strip, table,
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
        @if !forecast.maps.is_empty() {
            (space(layout, forecast))
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

/// A text in which what is in backticks is code.
fn words(text: &str) -> Markup {
    html! {
        @for (number, part) in text.split('`').enumerate() {
            @if number % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}

/// The address space: each map, coloured by its leaves, the holes between them, and what is
/// reserved.
fn space(layout: &PaperLayout, forecast: &Forecast) -> Markup {
    let mut behind = 0_u64;
    let shown = forecast.maps.iter().take(MOST_SHOWN);
    let rows: Vec<(u64, &ForecastMap)> = shown
        .map(|map| {
            let hole = map.iova.start().get().saturating_sub(behind);
            behind = map.iova.last().get().saturating_add(1);
            (hole, map)
        })
        .collect();
    html! {
        section {
            h2 { "Address space" }
            ul.map {
                @for (hole, map) in &rows {
                    @if *hole > 0 { li.hole { "nothing in " (ByteSize::new(*hole)) } }
                    li {
                        div.row {
                            span { (names(map, layout).join(", ")) }
                            span.address { (map.iova.to_string()) }
                        }
                        (leaf_strip(&format!("{} by leaf", ByteSize::new(map.len())), map))
                    }
                }
            }
            @if forecast.maps.len() > MOST_SHOWN {
                p.quiet { "and " (forecast.maps.len() - MOST_SHOWN) " maps more" }
            }
            @for reserved in &layout.iommu.reserved {
                p.quiet {
                    span.swatch.reserved aria-hidden="true" {}
                    (reserved.range.to_string()) " is reserved for " (reserved.name)
                }
            }
            (legend(&LEAF_CLASSES))
        }
    }
}

fn leaf_strip(label: &str, map: &ForecastMap) -> Markup {
    let mut start = 0.0;
    let part = |leaf: &LeafCount| {
        let bytes = leaf.size.saturating_mul(leaf.count);
        let width = f64::from(STRIP) * bytes as f64 / map.len() as f64;
        let part = Part { start, width, height: 1.0, class: leaf_class(leaf.size) };
        start += width;
        part
    };
    let parts: Vec<Part> = map.leaves.iter().map(part).collect();
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
