//! The report of `map` as a page.

use dmaspan_cli::size::ByteSize;
use dmaspan_cli::text::ratio;
use dmaspan_cli::units;
use maud::{Markup, html};

use crate::html::{
    Cell, LEAF_CLASSES, Part, STRIP, bar, document, figure, leaf_class, legend, strip, table, words,
};

use crate::doctor::CheckRow;

use super::table::{heading, push_verdict};
use super::{By, Figures, Report, Row, Way};

/// The report as a page.
pub(crate) fn render(report: &Report) -> String {
    let figures = report.figures();
    let body = html! {
        (verdict(report))
        (machine(&report.machine))
        @if figures.iter().any(|figures| matches!(figures.by, By::Tables { .. })) {
            (leaves(&figures))
        }
        @if !figures.is_empty() { (times(&figures)) }
    };
    let title = match &report.real {
        Some(real) => format!("Memory mapped for {}", real.device),
        None => "Memory mapped by a software IOMMU".to_owned(),
    };
    document(&title, &heading(report), &body)
}

fn verdict(report: &Report) -> Markup {
    let mut text = String::new();
    push_verdict(&mut text, report);
    // A line that was broken goes on with two spaces.
    let joined = text.replace("\n  ", " ");
    let skipped = report.rows.iter().filter_map(|row| match row {
        Row::Skipped { memory, skipped } => Some((memory, skipped)),
        _ => None,
    });
    html! {
        section {
            h2 { "Verdict" }
            ul.findings {
                @for line in joined.lines() {
                    @let class = if line.starts_with('✓') { "right" } else { "wrong" };
                    @let mark: String = line.chars().take(1).collect();
                    li {
                        span class={ "mark " (class) } { (mark) }
                        (line.trim_start_matches(['✓', '✗', ' ']))
                    }
                }
                @for (memory, skipped) in skipped {
                    li { span.mark.note { "·" } strong { (memory) } " was skipped: " (skipped) }
                }
                @for note in &report.notes { li { span.mark.note { "·" } (note) } }
            }
        }
    }
}

/// What is found of the machine, as `dmaspan doctor` prints it alone.
fn machine(checks: &[CheckRow]) -> Markup {
    html! {
        @if !checks.is_empty() {
            section {
                h2 { "Machine" }
                ul.findings {
                    @for CheckRow { right, text, change, .. } in checks {
                        @let (mark, class) = if *right { ("✓", "right") } else { ("✗", "wrong") };
                        li {
                            span class={ "mark " (class) } { (mark) }
                            (words(text))
                            @if let Some(change) = change {
                                ul.examples { li { (words(change)) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// How each kind of memory lies in the tables.
fn leaves(figures: &[&Figures]) -> Markup {
    html! {
        section {
            h2 { "Leaves" }
            p.quiet { "What share of the bytes each size of leaf maps." }
            @for figures in figures {
                @if let By::Tables { leaves, table_bytes, .. } = &figures.by {
                    h3 { (figures.memory) }
                    (shares(&figures.memory, leaves))
                    ul.figures {
                        (figure(&figures.spans.to_string(), "spans"))
                        @for (size, count) in leaves.iter().rev() {
                            @let name = format!("{} leaves", units::page_size(*size));
                            (figure(&count.to_string(), &name))
                        }
                        (figure(&ByteSize::new(*table_bytes).to_string(), "of table memory"))
                    }
                }
            }
            (legend(&LEAF_CLASSES))
        }
    }
}

/// A strip of the sizes of leaves, the largest first.
fn shares(memory: &str, leaves: &std::collections::BTreeMap<u64, u64>) -> Markup {
    let bytes = |size: u64, count: u64| size as f64 * count as f64;
    let total: f64 = leaves.iter().map(|(size, count)| bytes(*size, *count)).sum();
    let mut start = 0.0;
    let mut parts = Vec::new();
    for (size, count) in leaves.iter().rev() {
        let width = f64::from(STRIP) * bytes(*size, *count) / total.max(1.0);
        parts.push(Part { start, width, height: 1.0, class: leaf_class(*size) });
        start += width;
    }
    let sizes = leaves.iter().rev();
    let sizes: Vec<_> =
        sizes.map(|(size, count)| format!("{count} of {}", units::page_size(*size))).collect();
    strip(&format!("leaves of {memory}: {}", sizes.join(", ")), &parts)
}

/// Where the time goes, and what it is beside one page at a time.
fn times(figures: &[&Figures]) -> Markup {
    html! {
        section {
            h2 { "Times" }
            p.quiet { "Medians. The times are this machine's: compare the ratios." }
            @for way in Way::ALL {
                @let name = if matches!(way, Way::Map) { "Map" } else { "Unmap" };
                h3 { (name) }
                @for figures in figures { (beside(figures, way)) }
                (table(
                    &format!("{name}: times of each kind of memory"),
                    &["memory", "total", "GiB/s", "faster than by page"],
                    &figures.iter().map(|figures| cells(figures, way)).collect::<Vec<_>>(),
                ))
            }
        }
    }
}

/// How long the same work takes by span and by page, and how many times longer.
struct Beside {
    span_ns: f64,
    page_ns: f64,
    speedup: f64,
}

/// The time of a kind of memory, in nanoseconds and as GiB/s, and beside it one page at a time.
fn of(figures: &Figures, way: Way) -> (u64, f64, Option<Beside>) {
    match &figures.by {
        By::Tables { times, per_page, table_speedup, .. } => {
            let phase = times.of(way);
            let (span_ns, page_ns) = (phase.table_ns as f64, *per_page.times().of(way) as f64);
            let beside = Beside { span_ns, page_ns, speedup: *table_speedup.of(way) };
            (phase.total_ns, phase.gibps, Some(beside))
        }
        By::Requests { times, speedup, .. } => {
            let times = times.of(way);
            // Pages are tried with fewer bytes: this is what all of them would take.
            let (span_ns, speedup) = (times.total_ns as f64, *speedup.of(way));
            let beside = Beside { span_ns, page_ns: span_ns * speedup, speedup };
            (times.total_ns, times.gibps, Some(beside))
        }
        By::Bar(bar) => {
            let times = bar.times.of(way);
            (times.total_ns, times.gibps, None)
        }
    }
}

fn beside(figures: &Figures, way: Way) -> Markup {
    let (_, _, Some(Beside { span_ns, page_ns, .. })) = of(figures, way) else { return html! {} };
    let most = span_ns.max(page_ns);
    let memory = &figures.memory;
    let times = [("by span", span_ns, "leaf-huge"), ("by page", page_ns, "reserved")];
    html! {
        div.bars {
            @for (how, ns, class) in times {
                @let time = units::fine_time(ns);
                span { (memory) ", " (how) }
                (bar(&format!("{memory} {how}: {time}"), ns, most, class))
                span.value { (time) }
            }
        }
    }
}

fn cells(figures: &Figures, way: Way) -> Vec<Cell> {
    let (total, gibps, beside) = of(figures, way);
    vec![
        Cell::text(figures.memory.clone()),
        Cell::number(total, units::time(total)),
        Cell::real(gibps, units::three_digits(gibps)),
        beside.map_or_else(
            || Cell::text("-"),
            |beside| Cell::real(beside.speedup, ratio(beside.speedup)),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples;

    #[test]
    fn everything_that_was_found_is_on_the_page() {
        let page = render(&examples::report());
        for part in [
            "1 GiB of each kind of memory",
            "thp, by span",
            "756×",
            "2M leaves",
            "was skipped",
            "a note",
            "the device wrote and read back 1 GiB",
            "mark right",
        ] {
            assert!(page.contains(part), "{part} is not in\n{page}");
        }
        let page = render(&examples::real_report());
        assert!(page.contains("Memory mapped for 0000:00:05.0") && page.contains("106×"), "{page}");
        let mut failed = examples::report();
        let check = |right, text: &str, change: Option<&str>| CheckRow {
            name: "check",
            right,
            text: text.to_owned(),
            change: change.map(str::to_owned),
        };
        assert!(!render(&failed).contains("<h2>Machine</h2>"));
        failed.machine = vec![
            check(true, "all is right here", None),
            check(false, "this is not", Some("`modprobe vfio-pci`, as root")),
        ];
        let page = render(&failed);
        for part in ["all is right here", "this is not", "<code>modprobe vfio-pci</code>, as root"]
        {
            assert!(page.contains(part), "{part} is not in\n{page}");
        }
        failed.rows.clear();
        assert!(render(&failed).contains("mark wrong"));
        assert!(render(&examples::bar_report()).contains("bar 2"));
    }
}
