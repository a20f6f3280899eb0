//! The result: ratios, for people and for programs.

use std::fmt::Write as _;

use serde_json::json;

use super::plan::{Comparison, Versus, who, with_one_thread};
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

    /// The format, and the peer without the steps by which it goes.
    fn group(&self) -> (&str, &str) {
        let name = |text: &str, end| text.find(end).unwrap_or(text.len());
        (&self.case[..name(&self.case, "/")], &self.peer[..name(&self.peer, ", by ")])
    }

    /// A line of its group's table.
    fn line(&self) -> String {
        let (format, peer) = self.group();
        let case = self.case.strip_prefix(format).unwrap_or_default().trim_start_matches('/');
        let how = self.peer.strip_prefix(peer).unwrap_or_default();
        let goal = self.goal.map_or(String::new(), |goal| format!("{goal}×"));
        let mark = match self.reached() {
            Some(true) => "✓",
            Some(false) => "missed",
            None => "",
        };
        format!(
            "  {:27}{:6}{:>9}  {:>9}  {:>7}  {goal:>6}  {mark}",
            format!("{case}{how}"),
            self.operation,
            time(self.peer_ns),
            time(self.ns),
            format!("{}×", digits(self.ratio())),
        )
    }
}

/// The rows of all comparisons that both sides measured.
pub(super) fn rows(comparisons: &[Comparison], samples: &Samples) -> Vec<Row> {
    comparisons.iter().filter_map(|comparison| row(comparison, samples)).collect()
}

fn row(comparison: &Comparison, samples: &Samples) -> Option<Row> {
    let Comparison { format, operation, version, .. } = *comparison;
    let (case, their_case) = (comparison.case.as_str(), comparison.their_case.as_str());
    let fastest = |peer, case: &str| samples.fastest(&who(version, peer), case, operation);
    let own = |case| samples.median(&format!("dmaspan/{format}"), case, operation);
    let (peer_ns, ns) = match comparison.versus {
        Versus::Linux(peer) => (fastest(peer, their_case)?, own(case)?),
        // Two threads do two pairs in the time that one of them needs for its own.
        Versus::OneThread => (own(their_case)?, own(case)? / 2.0),
        Versus::GainOfOneThread(peer) => {
            let theirs = |case: &str| fastest(peer, case);
            let (one, their_one) = (with_one_thread(case), with_one_thread(their_case));
            (theirs(their_case)? / theirs(&their_one)? * own(&one)?, own(case)?)
        }
    };
    let (peer, goal) = (comparison.peer.clone(), comparison.goal);
    Some(Row { case: comparison.name(), operation, peer, peer_ns, ns, goal })
}

/// One array of `{"case", "op", "peer", "peer_ns", "ns", "ratio"}`.
pub(super) fn json(rows: &[Row]) -> String {
    let rounded = |value: f64| json!((value * 1000.0).round() / 1000.0);
    let text = |value: &str| json!(value).to_string();
    let rows = rows.iter().map(|row| {
        // One by one: an object of serde_json sorts its keys.
        format!(
            r#"  {{"case": {}, "op": {}, "peer": {}, "peer_ns": {}, "ns": {}, "ratio": {}}}"#,
            text(&row.case),
            text(row.operation),
            text(&row.peer),
            rounded(row.peer_ns),
            rounded(row.ns),
            rounded(row.ratio()),
        )
    });
    format!("[\n{}\n]", rows.collect::<Vec<_>>().join(",\n"))
}

/// Tables with the goals, one for each format and peer.
pub(super) fn text(rows: &[Row], version: &str, runs: usize) -> String {
    let processes = if runs == 1 { "one process" } else { &format!("medians of {runs} processes") };
    let mut text = format!("Linux {version} and dmaspan\n{processes}; of Linux the faster build\n");
    let mut groups: Vec<(&str, &str)> = Vec::new();
    for row in rows {
        if !groups.contains(&row.group()) {
            groups.push(row.group());
        }
    }
    for group in groups {
        let (format, peer) = group;
        let _ = writeln!(
            text,
            "\n{:29}{:6}{:>9}  {:>9}  {:>7}  {:>6}",
            format!("{format}, {peer}"),
            "",
            "peer",
            "dmaspan",
            "faster",
            "goal"
        );
        for row in rows.iter().filter(|row| row.group() == group) {
            let _ = writeln!(text, "{}", row.line().trim_end());
        }
    }
    let goals: Vec<bool> = rows.iter().filter_map(Row::reached).collect();
    let reached = goals.iter().filter(|reached| **reached).count();
    if goals.is_empty() {
        let _ = writeln!(text, "\nno goal is set for these cases");
    } else {
        let _ = writeln!(text, "\n{reached} of {} goals reached", goals.len());
    }
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
pub(super) fn digits(value: f64) -> String {
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
        read("7.2 io-pgtable-arm/u", "4k_512 map 600\nspans_1g_by_4k unmap 1.5e6");
        read("7.2 io-pgtable-arm/k", "4k_512 map 500");
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
        let text = json(&measured());
        let first = r#"  {"case": "lpae/4k_512", "op": "map", "peer": "io-pgtable-arm", "#;
        assert_eq!(text.lines().nth(1).map(|line| line.starts_with(first)), Some(true), "{text}");
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
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
        assert!(text.contains("  spans_1g, by 4K steps"), "{text}");
        assert!(text.ends_with("1 of 3 goals reached\n"), "{text}");
    }

    #[test]
    fn the_widest_table_fits_a_terminal() {
        let rows: Vec<Row> = plan::comparisons("")
            .into_iter()
            .map(|one| Row {
                case: one.name(),
                operation: one.operation,
                peer: one.peer,
                peer_ns: 1e8,
                ns: 1e5,
                goal: Some(10_000.0),
            })
            .collect();
        let text = text(&rows, "10.12.345-1~bpo12+1", 100);
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
            assert_eq!(line, line.trim_end());
        }
    }
}
