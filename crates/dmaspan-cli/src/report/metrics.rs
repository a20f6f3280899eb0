//! The report of `map` for Prometheus.

use crate::metrics::Metrics;

use super::{By, Report, Row, Way};

const OK: &str = "Whether everything that was mapped was mapped, checked and unmapped";
const SPANS: &str = "Contiguous spans of a kind of memory";
const LEAVES: &str = "Leaves of a size that map a kind of memory";
const TABLES: &str = "Bytes of the tables that map a kind of memory";
const VERIFIED: &str = "Bytes that a device reached through the mapping";
const TIME: &str = "Median time of mapping or unmapping all of the memory";

/// The report as Prometheus's text.
pub(crate) fn render(report: &Report) -> String {
    let mut metrics = Metrics::new();
    let device = report.real.as_ref().map(|real| real.device.clone()).unwrap_or_default();
    let common = [("backend", report.backend.to_owned()), ("device", device)];
    metrics.add("dmaspan_map_ok", OK, &common, u64::from(report.passed()));
    for row in &report.rows {
        let Row::Figures(figures) = row else { continue };
        let with = |more: &[(&'static str, String)]| {
            [&common[..], &[("memory", figures.memory.clone())], more].concat()
        };
        metrics.add("dmaspan_map_spans", SPANS, &with(&[]), figures.spans as u64);
        metrics.add("dmaspan_map_verified_bytes", VERIFIED, &with(&[]), figures.verified_bytes);
        if let By::Tables { leaves, table_bytes, .. } = &figures.by {
            metrics.add("dmaspan_map_table_bytes", TABLES, &with(&[]), *table_bytes);
            for (size, count) in leaves {
                let labels = with(&[("size_bytes", size.to_string())]);
                metrics.add("dmaspan_map_leaves", LEAVES, &labels, *count);
            }
        }
        for (way, name) in [(Way::Map, "map"), (Way::Unmap, "unmap")] {
            let nanoseconds = match &figures.by {
                By::Tables { times, .. } => times.of(way).total_ns,
                By::Requests { times, .. } => times.of(way).total_ns,
                By::Bar(bar) => bar.times.of(way).total_ns,
            };
            let labels = with(&[("operation", name.to_owned())]);
            metrics.add_time("dmaspan_map_duration_seconds", TIME, &labels, nanoseconds);
        }
    }
    metrics.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::examples;

    #[test]
    fn each_kind_of_memory_has_samples() {
        let text = render(&examples::report());
        for line in [
            "dmaspan_map_ok{backend=\"soft\",device=\"\"} 1",
            "dmaspan_map_spans{backend=\"soft\",device=\"\",memory=\"thp\"} 7",
            "dmaspan_map_leaves{backend=\"soft\",device=\"\",memory=\"thp\",\
             size_bytes=\"2097152\"} 512",
            "dmaspan_map_duration_seconds{backend=\"soft\",device=\"\",memory=\"thp\",\
             operation=\"unmap\"} 0.004",
        ] {
            assert!(text.lines().any(|known| known == line), "{line} is not in\n{text}");
        }
        let text = render(&examples::real_report());
        assert!(
            text.contains("dmaspan_map_ok{backend=\"vfio\",device=\"0000:00:05.0\"} 1"),
            "{text}"
        );
    }
}
