//! The table of `map` for a real device, for people.

use comfy_table::Table;
use dmaspan_linux::vfio::Backend;

use super::{BarFigures, By, Figures, PerPageRequests, RealDevice, Times, Way};
use dmaspan_cli::series::SeriesValue;
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::text::{align_right, new_table, push_table, push_wrapped, ratio};
use dmaspan_cli::units;

/// Adds the table of `rows`, and what its columns are.
pub(super) fn push(text: &mut String, rows: &[&Figures], real: &RealDevice) {
    if real.bar.is_some() {
        push_table(text, &bar_table(rows));
        push_series(text, rows);
        text.push('\n');
        push_wrapped(text, "", legend_of_bar(real.backend));
        return;
    }
    push_table(text, &memory_table(rows));
    push_series(text, rows);
    text.push('\n');
    push_wrapped(text, "", LEGEND);
    let pages = rows.iter().find_map(|row| match &row.by {
        By::Requests { per_page, .. } => Some(per_page),
        _ => None,
    });
    if let Some(per_page) = pages {
        push_wrapped(text, "", &legend_of_pages(per_page));
    }
}

const LEGEND: &str = "Total: one request for all memory, by which the kernel pins and maps it, or \
    unmaps and unpins it. The kernel does not tell how long each step takes.";

/// How the kernel finds registers.
const fn legend_of_bar(backend: Backend) -> &'static str {
    match backend {
        Backend::Vfio | Backend::Compat => {
            "Each run maps the registers into this process anew, untimed. So the total of a map \
             includes the page faults by which the kernel finds them there."
        }
        Backend::Iommufd | Backend::NoIommu => {
            "The kernel finds the registers by a dma-buf. The total of a map includes the request \
             for it; the number of ioctls does not."
        }
    }
}

fn legend_of_pages(per_page: &PerPageRequests) -> String {
    let (pages, bytes) = (per_page.pages, ByteSize::new(per_page.bytes()));
    format!(
        "Per page: the time of one of {pages} pages ({bytes}), each of which a request of its own \
         maps and unmaps. Faster = the time of as many bytes by pages / total."
    )
}

/// Adds what a series for Linux measured of such rows, where one did.
fn push_series(text: &mut String, rows: &[&Figures]) {
    let beside = rows.iter().filter(|row| !row.series.is_empty());
    let mut table = new_table(["series", "", "before", "with it", "differs"]);
    for row in beside.clone() {
        for (first, pair) in row.series.chunk_by(|a, b| a.figure == b.figure).enumerate() {
            let told = |when| {
                let told = pair.iter().find(|value| value.when == when);
                told.map_or_else(|| "-".to_owned(), SeriesValue::shown)
            };
            let (name, differs) = match (first, pair.first()) {
                (0, Some(value)) => {
                    (row.memory.clone(), value.differs.replace("; ", ";\n").replace(", ", ",\n"))
                }
                _ => Default::default(),
            };
            let figure = pair.first().map_or("", |value| value.figure).to_owned();
            table.add_row([name, figure, told("before"), told("after"), differs]);
        }
    }
    if let Some(value) = beside.clone().find_map(|row| row.series.first()) {
        push_table(text, &table);
        text.push('\n');
        push_wrapped(
            text,
            "",
            &format!("Series: what its authors measured, on {}.", value.machine),
        );
    }
}

/// All of each kind of memory at once, and page by page.
fn memory_table(rows: &[&Figures]) -> Table {
    let header = ["", "spans", "total", "GiB/s", "ioctls", "per page", "ioctls", "faster"];
    let mut table = new_table(header);
    for way in Way::ALL {
        table.add_row([way.title()]);
        for row in rows {
            let By::Requests { ioctls, times, per_page, speedup, .. } = &row.by else { continue };
            let [name, total, gibps, asked] = total_cells(row, times.of(way), *ioctls.of(way));
            // An unmap finds them where the map put them.
            let spans = match way {
                Way::Map => row.spans.to_string(),
                Way::Unmap => String::new(),
            };
            let page = per_page.one(*per_page.times().of(way));
            let (pages, faster) = (per_page.ioctls.of(way).to_string(), ratio(*speedup.of(way)));
            table.add_row([name, spans, total, gibps, asked, page, pages, faster]);
        }
    }
    align_right(&mut table, 1);
    table
}

/// A BAR, which has no pages of its own.
fn bar_table(rows: &[&Figures]) -> Table {
    let mut table = new_table(["", "size", "aligned to", "total", "ioctls"]);
    for row in rows {
        let By::Bar(BarFigures { bytes, alignment, ioctls, times }) = &row.by else { continue };
        for way in Way::ALL {
            table.add_row([way.title()]);
            let [name, total, _, asked] = total_cells(row, times.of(way), *ioctls.of(way));
            let [size, alignment] = match way {
                Way::Map => [ByteSize::new(*bytes).to_string(), units::page_size(*alignment)],
                Way::Unmap => Default::default(),
            };
            table.add_row([name, size, alignment, total, asked]);
        }
    }
    align_right(&mut table, 1);
    table
}

/// What is mapped, how long that takes, and by how many requests.
fn total_cells(row: &Figures, times: &Times, ioctls: u64) -> [String; 4] {
    [
        format!("  {}", row.memory),
        units::time(times.total_ns),
        units::three_digits(times.gibps),
        ioctls.to_string(),
    ]
}

impl PerPageRequests {
    /// The time of one page, of those that took `ns` together.
    fn one(&self, ns: u64) -> String {
        units::fine_time(ns as f64 / self.pages.max(1) as f64)
    }
}
