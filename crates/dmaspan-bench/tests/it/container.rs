//! `dmaspan-bench container` as its users run it.

use std::sync::LazyLock;

use serde_json::Value;

use crate::program;

/// The object that `--format json` prints.
fn json(args: &[&str]) -> Value {
    program::json(&[&["container"], args].concat())
}

/// What the quick form reports, run once for all tests that read it.
pub(crate) fn quick() -> &'static Value {
    static REPORT: LazyLock<Value> = LazyLock::new(|| json(&["--quick"]));
    &REPORT
}

const NAMES: [&str; 13] = [
    "MADV_HUGEPAGE",
    "2M apart",
    "MAP_POPULATE",
    "4K in blocks",
    "HUGETLBFS",
    "64K",
    "threads=1",
    "threads=2",
    "threads=4",
    "BAR 32G as 1G",
    "BAR 32G as 2M",
    "BAR 32G as 4K",
    "BAR 4x128G as 1G",
];

fn number(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// By page and by span, and the leaves.
fn counts(report: &Value, case: &str, op: &str) -> (u64, u64, u64) {
    let rows = report["rows"].as_array().unwrap();
    let row = rows.iter().find(|row| row["case"] == case && row["op"] == op);
    let row = row.unwrap_or_else(|| panic!("no {op} of {case}"));
    (number(row, "lookups_per_page"), number(row, "lookups"), number(row, "leaves"))
}

fn check_row(row: &Value) {
    let (old, new) = (number(row, "per_page_ns"), number(row, "ns"));
    assert!(old > 0 && new > 0, "{row}");
    let (expected, speedup) = (old as f64 / new as f64, row["speedup"].as_f64().unwrap());
    assert!((speedup - expected).abs() <= 0.0005 + expected * 1e-6, "{row}");
    assert!(row["gibps"].as_f64().unwrap() > 0.0, "{row}");
}

#[test]
fn every_case_is_looked_up_by_leaf_and_not_by_page() {
    let report = quick();
    assert_eq!((&report["size_bytes"], &report["runs"]), (&(1 << 30).into(), &1.into()));
    assert!(report["model"].as_str().unwrap().contains("dmaspan-sim"));
    let rows = report["rows"].as_array().unwrap();
    let found: Vec<&str> = rows.iter().map(|row| row["case"].as_str().unwrap()).collect();
    assert_eq!(found, NAMES.into_iter().flat_map(|name| [name, name]).collect::<Vec<_>>());
    rows.iter().for_each(check_row);
    let pages = 1 << 18;
    // Neighbours are one span, and one leaf where it is long enough.
    assert_eq!(counts(report, "MADV_HUGEPAGE", "map"), (512, 512, 1));
    assert_eq!(counts(report, "2M apart", "map"), (512, 512, 512));
    assert_eq!(counts(report, "2M apart", "unmap").1, 512);
    assert_eq!(counts(report, "MAP_POPULATE", "map"), (pages, pages, pages));
    assert_eq!(counts(report, "4K in blocks", "map"), (pages, pages, pages));
    // Arrays of 512 pages ask for a leaf of 1G 512 times.
    assert_eq!(counts(report, "HUGETLBFS", "map"), (512, 1, 1));
    assert_eq!(counts(report, "HUGETLBFS", "unmap"), (pages, 1, 1));
    assert_eq!(counts(report, "64K", "map"), (pages / 16, pages / 16, pages));
    let bar = 1 << 23;
    for (case, lookups) in [("1G", 32), ("2M", 16384), ("4K", bar)] {
        let case = format!("BAR 32G as {case}");
        assert_eq!(counts(report, &case, "map"), (bar, lookups, 32));
        assert_eq!(counts(report, &case, "unmap"), (bar, 32, 32));
    }
    assert_eq!(counts(report, "BAR 4x128G as 1G", "map"), (1 << 27, 512, 512));
}

#[test]
fn what_cannot_be_is_refused_in_a_line_that_says_what_can() {
    for (args, part) in [
        (&["--size", "1.5G"][..], "whole GiB"),
        (&["--size", "0"], "whole GiB"),
        (&["--size", "2048G"], "ask for less"),
        (&["--size", "much"], "dmaspan-bench container --help"),
        (&["--runs", "0"], "from 1 to 1000"),
        (&["--quick", "--runs", "3"], "cannot be used with"),
    ] {
        program::is_refused(&[&["container"], args].concat(), &[part]);
    }
}

#[test]
fn the_tables_are_narrow_and_say_what_they_mean() {
    let parts = ["by page", "by span", "faster", "MADV_HUGEPAGE", "BAR 32G as 1G", "✓"];
    let told = ["0.052 → 0.031", "theirs ?", "~1 → <0.001", "no boot"];
    let shown = program::tables(&["container", "--quick"], &[&parts[..], &told].concat());
    // What a series measured stands in rows that say what differs.
    let told = || shown.lines().filter(|line| line.contains('→'));
    assert!(told().count() == 10 && told().all(|line| line.contains("a model")), "{shown}");
}

#[test]
fn the_help_fits_a_terminal_and_says_what_is_measured_by_what() {
    program::shown(
        &["container", "--help"],
        &["model by a model", "lookups_per_page", "threads=N", "Exit codes"],
    );
}
