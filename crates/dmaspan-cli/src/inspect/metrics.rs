//! The report of `inspect` for Prometheus.

use crate::metrics::Metrics;

use super::report::Report;

/// The report as Prometheus's text.
pub(crate) fn render(report: &Report) -> String {
    let mut metrics = Metrics::new();
    for domain in &report.domains {
        // A domain without a known device is known by its table.
        let device = domain.devices.first().cloned().unwrap_or_default();
        let root = domain.root.map(|root| format!("{root:#x}")).unwrap_or_default();
        let labels = [("device", device), ("root", root)];
        let with = |name, value| [labels.clone().to_vec(), vec![(name, value)]].concat();
        metrics.add("dmaspan_inspect_mapped_bytes", MAPPED, &labels, domain.mapped_bytes);
        metrics.add("dmaspan_inspect_spans", SPANS, &labels, domain.spans.count as u64);
        metrics.add("dmaspan_inspect_table_bytes", TABLES, &labels, domain.table_bytes);
        for (size, count) in &domain.leaves {
            let labels = with("size_bytes", size.to_string());
            metrics.add("dmaspan_inspect_leaves", LEAVES, &labels, *count);
        }
        let best = domain.best_leaves_elsewhere.values().sum();
        metrics.add("dmaspan_inspect_best_leaves", BEST, &labels, best);
    }
    for finding in &report.findings {
        let severity = format!("{:?}", finding.severity).to_lowercase();
        let labels = [("name", finding.name.to_owned()), ("severity", severity)];
        metrics.add("dmaspan_inspect_findings", FINDINGS, &labels, finding.count);
    }
    metrics.render()
}

const MAPPED: &str = "Bytes that the table of a domain maps";
const SPANS: &str = "Contiguous spans that the table of a domain maps";
const TABLES: &str = "Bytes of the tables of a domain";
const LEAVES: &str = "Leaves of a size in the table of a domain";
const BEST: &str = "Fewest leaves that the spans of a domain could have, at aligned IOVAs";
const FINDINGS: &str = "Ranges or entries of a kind of finding in the dump";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::report::example;

    #[test]
    fn each_figure_has_a_sample_with_its_domain() {
        let text = render(&example());
        for line in [
            "dmaspan_inspect_mapped_bytes{device=\"0000:00:05.0\",root=\"0x1000\"} 1077542912",
            "dmaspan_inspect_leaves{device=\"0000:00:05.0\",root=\"0x1000\",\
             size_bytes=\"2097152\"} 511",
            "dmaspan_inspect_spans{device=\"\",root=\"0x9000\"} 2",
            "dmaspan_inspect_findings{name=\"loop\",severity=\"wrong\"} 3",
            "# TYPE dmaspan_inspect_leaves gauge",
        ] {
            assert!(text.lines().any(|known| known == line), "{line} is not in\n{text}");
        }
    }
}
