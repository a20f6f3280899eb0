//! The result: ratios, for people and for programs.

use std::fmt::Write as _;

use serde_json::json;

use super::plan::{Comparison, Versus};
use super::samples::Samples;

/// A comparison that was measured.
#[derive(Debug)]
pub(super) struct Row {
    case: String,
    operation: &'static str,
    peer: String,
    peer_ns: f64,
    ns: f64,
    goal: Option<f64>,
}

impl Row {
    /// How many times faster dmaspan is.
    fn ratio(&self) -> f64 {
        self.peer_ns / self.ns
    }

    fn reached(&self) -> Option<bool> {
        self.goal.map(|goal| self.ratio() >= goal)
    }
}

/// The rows of all comparisons that both sides measured.
pub(super) fn rows(comparisons: &[Comparison], samples: &Samples) -> Vec<Row> {
    comparisons.iter().filter_map(|comparison| row(comparison, samples)).collect()
}

fn row(comparison: &Comparison, samples: &Samples) -> Option<Row> {
    let Comparison { format, case, operation, their_case, .. } = *comparison;
    let own = |case| samples.median(&format!("dmaspan/{format}"), case, operation);
    let (peer_ns, ns) = match comparison.versus {
        Versus::Linux(peer) => (samples.fastest(peer.name, their_case, operation)?, own(case)?),
        // Two threads do two pairs in the time that one of them needs for its own.
        Versus::OneThread => (own(their_case)?, own(case)? / 2.0),
    };
    let (peer, goal) = (comparison.peer.clone(), comparison.goal);
    Some(Row { case: comparison.name(), operation, peer, peer_ns, ns, goal })
}

/// One array of `{"case", "op", "peer", "peer_ns", "ns", "ratio"}`.
pub(super) fn json(rows: &[Row]) -> String {
    let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
    let rows = rows.iter().map(|row| {
        let row = json!({
            "case": row.case,
            "op": row.operation,
            "peer": row.peer,
            "peer_ns": rounded(row.peer_ns),
            "ns": rounded(row.ns),
            "ratio": rounded(row.ratio()),
        });
        format!("  {row}")
    });
    format!("[\n{}\n]", rows.collect::<Vec<_>>().join(",\n"))
}

/// A table with the goals.
pub(super) fn text(rows: &[Row], version: &str, runs: usize) -> String {
    let mut text = format!(
        "Linux {version}, the faster of its builds, and dmaspan; medians of {runs} processes\n\n"
    );
    let width = |cells: &dyn Fn(&Row) -> usize| rows.iter().map(cells).max().unwrap_or(0);
    let case_width = width(&|row| row.case.chars().count());
    let peer_width = width(&|row| row.peer.chars().count());
    let _ = writeln!(
        text,
        "{:case_width$}  {:5}  {:peer_width$}  {:>9}  {:>9}  {:>7}  {:>6}",
        "case", "op", "peer", "peer", "dmaspan", "faster", "goal"
    );
    let mut last = "";
    for row in rows {
        if !last.is_empty() && last.split('/').next() != row.case.split('/').next() {
            text.push('\n');
        }
        last = &row.case;
        let goal = row.goal.map_or(String::new(), |goal| format!("{goal}×"));
        let mark = match row.reached() {
            Some(true) => "  ✓",
            Some(false) => "  missed",
            None => "",
        };
        let line = format!(
            "{:case_width$}  {:5}  {:peer_width$}  {:>9}  {:>9}  {:>7}  {goal:>6}{mark}",
            row.case,
            row.operation,
            row.peer,
            time(row.peer_ns),
            time(row.ns),
            format!("{}×", digits(row.ratio())),
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    let goals: Vec<bool> = rows.iter().filter_map(Row::reached).collect();
    let reached = goals.iter().filter(|reached| **reached).count();
    let _ = writeln!(text, "\n{reached} of {} goals reached", goals.len());
    text
}

fn time(ns: f64) -> String {
    match ns {
        ..1e3 => format!("{} ns", digits(ns)),
        1e3..1e6 => format!("{} µs", digits(ns / 1e3)),
        _ => format!("{} ms", digits(ns / 1e6)),
    }
}

/// Three digits, or all before the point.
fn digits(value: f64) -> String {
    match value {
        ..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan;
    use super::*;

    fn measured() -> Vec<Row> {
        let mut samples = Samples::default();
        let mut read = |who, lines| samples.read(who, lines).unwrap();
        read("io-pgtable-arm/u", "4k_512 map 600\nspans_1g_by_4k unmap 1.5e6");
        read("io-pgtable-arm/k", "4k_512 map 500");
        read("dmaspan/lpae", "4k_512 map 125\nspans_1g unmap 1000");
        read("dmaspan/lpae", "pair_4k_1_threads_1 pair 30\npair_4k_1_threads_2 pair 40");
        rows(&plan::comparisons(""), &samples)
    }

    #[test]
    fn a_ratio_is_the_faster_build_over_dmaspan() {
        let rows = measured();
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.case.as_str(), row.peer.as_str(), row.ratio(), row.reached()))
            .collect();
        let expected = [
            ("lpae/4k_512", "io-pgtable-arm", 4.0, Some(false)),
            ("lpae/spans_1g", "io-pgtable-arm, by 4K steps", 1500.0, Some(true)),
            ("lpae/pair_4k_1_threads_2", "dmaspan, one thread", 1.5, Some(false)),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn programs_read_the_same_rows() {
        let json: serde_json::Value = serde_json::from_str(&json(&measured())).unwrap();
        let expected = json!({
            "case": "lpae/4k_512",
            "op": "map",
            "peer": "io-pgtable-arm",
            "peer_ns": 500.0,
            "ns": 125.0,
            "ratio": 4.0,
        });
        assert_eq!(json[0], expected);
        assert_eq!(json.as_array().unwrap().len(), 3);
    }

    #[test]
    fn the_table_counts_the_goals() {
        let text = text(&measured(), "7.0", 2);
        assert!(text.contains("500 ns") && text.contains("1.50 ms"), "{text}");
        assert!(text.contains("4.00×      5×  missed"), "{text}");
        assert!(text.ends_with("1 of 3 goals reached\n"), "{text}");
    }
}
