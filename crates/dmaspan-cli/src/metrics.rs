//! Figures as Prometheus's text, for node_exporter's textfile collector.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

type Labels = Vec<(String, String)>;
type Figures = Family<Labels, Gauge<u64, AtomicU64>>;
type Times = Family<Labels, Gauge<f64, AtomicU64>>;

/// Gauges by name and labels.
pub(crate) struct Metrics {
    registry: Registry,
    known: BTreeMap<&'static str, Figures>,
    times: BTreeMap<&'static str, Times>,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        Self { registry: Registry::default(), known: BTreeMap::new(), times: BTreeMap::new() }
    }

    /// Sets a figure. Two of one name and the same labels are one: the later.
    pub(crate) fn add(
        &mut self,
        name: &'static str,
        help: &str,
        labels: &[(&'static str, String)],
        value: u64,
    ) {
        let figures = self.known.entry(name).or_insert_with(|| {
            let figures = Figures::default();
            self.registry.register(name, help, figures.clone());
            figures
        });
        figures.get_or_create(&owned(labels)).set(value);
    }

    /// Sets a time, which Prometheus has in seconds.
    pub(crate) fn add_time(
        &mut self,
        name: &'static str,
        help: &str,
        labels: &[(&'static str, String)],
        nanoseconds: u64,
    ) {
        let times = self.times.entry(name).or_insert_with(|| {
            let times = Times::default();
            self.registry.register(name, help, times.clone());
            times
        });
        times.get_or_create(&owned(labels)).set(nanoseconds as f64 / 1e9);
    }

    /// All of them, sorted so that two runs differ only by figures.
    pub(crate) fn render(&self) -> String {
        let mut text = String::new();
        // A text takes whatever is written to it.
        let _ = encode(&mut text, &self.registry);
        let mut sorted = String::with_capacity(text.len());
        let mut samples: Vec<&str> = Vec::new();
        for line in text.lines() {
            if !line.starts_with('#') {
                samples.push(line);
                continue;
            }
            samples.sort_unstable();
            samples.drain(..).for_each(|line| push(&mut sorted, line));
            push(&mut sorted, line);
        }
        sorted
    }
}

fn owned(labels: &[(&'static str, String)]) -> Labels {
    labels.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
}

fn push(text: &mut String, line: &str) {
    text.push_str(line);
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_sorted_and_labels_are_escaped() {
        let mut metrics = Metrics::new();
        for (name, value) in [("b", 2), ("a\"\\\n", 1), ("b", 3)] {
            metrics.add("dmaspan_test_bytes", "Bytes", &[("name", name.to_owned())], value);
        }
        assert_eq!(
            metrics.render(),
            "# HELP dmaspan_test_bytes Bytes.\n# TYPE dmaspan_test_bytes gauge\n\
             dmaspan_test_bytes{name=\"a\\\"\\\\\\n\"} 1\ndmaspan_test_bytes{name=\"b\"} 3\n# EOF\n"
        );
    }
}
