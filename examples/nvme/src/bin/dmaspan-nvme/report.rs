//! The report of the bench.

use std::fmt::Write as _;

use serde::Serialize;

use crate::args::BenchArgs;
use crate::latency::Latencies;
use crate::load::Turn;

/// What a bench found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    backend: &'static str,
    memory: &'static str,
    operation: &'static str,
    block_bytes: u64,
    depth: u16,
    /// The bytes from the start of the disk on that were used.
    span_bytes: u64,
    /// Those that were asked for.
    #[serde(skip)]
    span_asked: u64,
    turns: u64,
    rows: Vec<Row>,
    /// The driver's I/Os a second by those of itself with PRPs written by hand: the median of all
    /// turns.
    ratio: Option<f64>,
    /// The same by those of the loop that is no driver.
    ratio_to_bare: Option<f64>,
}

/// What one of them did.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    name: &'static str,
    ios: u64,
    /// The median of all turns.
    iops: f64,
    bytes_per_s: f64,
    median_ns: u64,
    p99_ns: u64,
    /// From the first I/O of each turn to its last.
    allocations: u64,
    #[serde(skip)]
    turns: Vec<f64>,
}

impl Row {
    pub(crate) fn new(
        name: &'static str,
        block: u64,
        turns: &[Turn],
        latencies: &Latencies,
    ) -> Self {
        let each: Vec<f64> =
            turns.iter().map(|turn| turn.count as f64 / turn.time.as_secs_f64()).collect();
        let iops = median(&each);
        Self {
            name,
            ios: turns.iter().map(|turn| turn.count).sum(),
            iops,
            bytes_per_s: iops * block as f64,
            median_ns: latencies.per_mille(500),
            p99_ns: latencies.per_mille(990),
            allocations: turns.iter().map(|turn| turn.allocations).sum(),
            turns: each,
        }
    }
}

impl Report {
    /// Of a bench that used `span` bytes of the disk.
    pub(crate) fn new(args: &BenchArgs, span: u64, rows: Vec<Row>) -> Self {
        let ratio = |to: usize| {
            let pairs = rows.first()?.turns.iter().zip(&rows.get(to)?.turns);
            Some(median(&pairs.map(|(driver, other)| driver / other).collect::<Vec<_>>()))
        };
        let (ratio, ratio_to_bare) = (ratio(1), ratio(2));
        Self {
            backend: args.target.backend.name(),
            memory: args.memory.name(),
            operation: if args.write { "write" } else { "read" },
            block_bytes: args.block,
            depth: args.depth,
            span_bytes: span,
            span_asked: args.span,
            turns: args.turns,
            rows,
            ratio,
            ratio_to_bare,
        }
    }

    /// For people.
    pub(crate) fn table(&self) -> String {
        let Self { backend, memory, operation, block_bytes, depth, .. } = self;
        let mut text = format!(
            "random {operation}s of {block_bytes} bytes, {depth} in flight, {backend}, {memory}\n"
        );
        let _ = writeln!(
            text,
            "{:<13}{:>10}{:>12}{:>10}{:>11}{:>11}{:>13}",
            "", "I/Os", "IOPS", "MiB/s", "median µs", "99 % µs", "allocations"
        );
        for row in &self.rows {
            let us = |ns: u64| ns as f64 / 1e3;
            let _ = writeln!(
                text,
                "{:<13}{:>10}{:>12.0}{:>10.1}{:>11.1}{:>11.1}{:>13}",
                row.name,
                row.ios,
                row.iops,
                row.bytes_per_s / f64::from(1 << 20),
                us(row.median_ns),
                us(row.p99_ns),
                row.allocations
            );
        }
        if let Some(note) = self.note() {
            let _ = writeln!(text, "note: {note}");
        }
        for (ratio, of) in [(self.ratio, "hand-written"), (self.ratio_to_bare, "the bare loop")] {
            if let Some(ratio) = ratio {
                let _ = writeln!(text, "dmaspan reaches {:.1} % of {of}", ratio * 100.0);
            }
        }
        text
    }

    /// What is not as it was asked for.
    pub(crate) fn note(&self) -> Option<String> {
        let (used, asked) = (self.span_bytes, self.span_asked);
        (used < asked).then(|| {
            format!(
                "the first {used} bytes of the disk were used, which are whole I/Os, instead of \
                 the {asked} of --span"
            )
        })
    }
}

/// Any value as JSON, with a newline at its end.
pub(crate) fn json(value: &impl Serialize) -> String {
    // Serialising numbers and texts cannot fail.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}

/// The middle value, or the mean of the two middle ones; 0 of none.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = |index: usize| sorted.get(index).copied().unwrap_or(0.0);
    match sorted.len() {
        len if len % 2 == 1 => at(len / 2),
        len => f64::midpoint(at(len / 2), at((len / 2).saturating_sub(1))),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Command, Line};

    #[test]
    fn a_span_that_the_disk_has_not_is_said() {
        let line = ["dmaspan-nvme", "bench", "0000:00:05.0", "--span", "1g"];
        let Ok(Line { command: Command::Bench(args) }) = Line::try_parse_from(line) else {
            panic!("{line:?} is a bench")
        };
        let report = Report::new(&args, 64 << 20, Vec::new());
        let says = "note: the first 67108864 bytes of the disk were used, which are whole I/Os, \
            instead of the 1073741824 of --span\n";
        assert!(report.table().contains(says), "{}", report.table());
        assert!(json(&report).contains("\"span_bytes\": 67108864"), "{}", json(&report));
        assert_eq!(Report::new(&args, 1 << 30, Vec::new()).note(), None);
    }

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_ones() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
