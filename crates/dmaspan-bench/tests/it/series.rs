//! The measurements by the authors of five series for Linux stand in the rows of the benchmark
//! that repeats them, each figure once, with the circumstances that differ.

use std::collections::BTreeSet;
use std::fs;

use dmaspan_cli::series::{self, SWIOTLB, SeriesTable, SeriesValue};
use serde_json::Value;

use crate::program;

/// A figure of a series: its case, what it is, when, and its number.
type Figure = (String, String, String, String);

fn figure(case: &str, value: &SeriesValue) -> Figure {
    (case.to_owned(), value.figure.to_owned(), value.when.to_owned(), value.shown())
}

/// All figures of a table.
fn figures(table: &SeriesTable) -> BTreeSet<Figure> {
    let of = |row| table.values([row], "").into_iter().map(|value| figure(row.case, &value));
    table.rows.iter().flat_map(of).collect()
}

/// Those in rows, each of which has a name in the series.
fn found<'r>(rows: impl Iterator<Item = (&'r Value, String)>) -> BTreeSet<Figure> {
    let mut found = BTreeSet::new();
    for (row, case) in rows {
        for value in row["series"].as_array().into_iter().flatten() {
            let text = |name: &str| value[name].as_str().unwrap().to_owned();
            assert!(!text("machine").is_empty() && !text("differs").is_empty(), "{value}");
            let sign = text("sign").replace('=', "");
            let number = value["value"].as_f64().unwrap();
            let shown = format!("{sign}{number} {}", text("unit")).trim_end().to_owned();
            found.insert((case.clone(), text("figure"), text("when"), shown));
        }
    }
    found
}

fn rows(report: &Value) -> impl Iterator<Item = &Value> {
    report["rows"].as_array().unwrap().iter()
}

#[test]
fn reads_and_writes_of_swiotlb_have_the_figures_of_one_job_or_of_four() {
    let report = program::json(&["swiotlb", "--quick", "--jobs", "1"]);
    let name = |row: &Value| format!("1 job {}", row["case"].as_str().unwrap());
    let found = found(rows(&report).map(|row| (row, name(row))));
    let mut all = figures(&SWIOTLB);
    all.retain(|figure| figure.0.starts_with("1 job "));
    assert_eq!(found, all);
    for row in rows(&report).filter(|row| !row["series"].is_null()) {
        let number = |name: &str| row[name].as_f64().unwrap();
        let expected = 100.0 * number("cpu_ns") / number("ns");
        let found = number("cpu_percent");
        assert!((found - expected).abs() <= 0.001 + expected * 1e-6, "{row}");
    }
}

/// A table of the book: a line for each case, a column for each figure.
fn markdown(table: &SeriesTable) -> String {
    let (mut figures, mut cases) = (Vec::new(), Vec::new());
    for row in table.rows {
        if !figures.contains(&(row.figure, row.unit)) {
            figures.push((row.figure, row.unit));
        }
        if !cases.contains(&row.case) {
            cases.push(row.case);
        }
    }
    let named = figures.iter().map(|(figure, unit)| match *unit {
        "" => (*figure).to_owned(),
        unit => format!("{figure}, {unit}"),
    });
    let named: Vec<_> = named.collect();
    let mut lines = vec![format!("| | {} |", named.join(" | "))];
    lines.push(format!("|{}", "---|".repeat(figures.len() + 1)));
    for case in cases {
        let shown = figures
            .iter()
            .map(|(figure, _)| table.row(case, figure).map(|row| row.shown()).unwrap_or_default());
        lines.push(format!("| {case} | {} |", shown.collect::<Vec<_>>().join(" | ")));
    }
    lines.join("\n")
}

#[test]
fn the_page_of_the_book_has_every_figure_of_every_series() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/five_series.md");
    let page = fs::read_to_string(page).unwrap();
    for table in series::ALL {
        let expected = markdown(table);
        assert!(page.contains(&expected), "the page has not this table:\n{expected}");
    }
}
