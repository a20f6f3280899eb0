//! `dmaspan-bench regbuf` as its users run it.

use serde_json::Value;

use crate::program;
use crate::turn::turn;

/// The object that `--format json` prints.
fn json(args: &[&str]) -> Value {
    program::json(&[&["regbuf"], args].concat())
}

const NAMES: [&str; 5] = ["8m-4x2m", "base", "thp", "hugetlb", "mixed"];

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

fn row<'a>(report: &'a Value, case: &str) -> &'a Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|row| row["case"] == case).unwrap_or_else(|| panic!("no {case}"))
}

fn is_about(value: f64, expected: f64) -> bool {
    (value - expected).abs() <= 0.002 + expected * 1e-3
}

/// What follows from the memory and from the times does.
fn check_row(row: &Value) {
    let of = |name| number(row, name);
    let pages = of("size") / 4096.0;
    assert_eq!(of("segments_per_page"), pages, "{row}");
    assert_eq!(of("temporary_bytes_per_page"), pages * 8.0, "{row}");
    assert!(of("bytes_per_page") >= pages * 16.0, "{row}");
    assert!((1.0..=pages).contains(&of("segments")), "{row}");
    assert!(of("segments") <= of("segments_linux72") && of("segments") >= 1.0, "{row}");
    assert!(of("bytes") <= 512.0 + of("segments") * 20.0, "{row}");
    for name in [
        "register_ns",
        "register_per_page_ns",
        "import_ns",
        "import_per_page_ns",
        "descriptor_ns",
        "per_page_descriptor_ns",
        "linux72_descriptor_ns",
        "sgl_ns",
        "per_page_sgl_ns",
        "prp_ns",
        "per_page_prp_ns",
        "prp_stores_ns",
    ] {
        assert!(of(name) > 0.0, "{name} of {row}");
    }
    let speedup = of("per_page_descriptor_ns") / of("descriptor_ns");
    assert!(is_about(of("speedup"), speedup), "{row}");
    let kernel = row.get("kernel_register_ns").unwrap();
    assert!(kernel.is_null() || kernel.as_u64().unwrap() > 0, "{row}");
    assert!(["physical", "model"].contains(&row["frames"].as_str().unwrap()), "{row}");
}

#[test]
fn every_case_is_measured_on_what_the_machine_gives() {
    let _turn = turn();
    let report = json(&["--quick", "--size", "16M"]);
    assert_eq!((&report["size_bytes"], &report["runs"]), (&(16 << 20).into(), &1.into()));
    let rows = report["rows"].as_array().unwrap();
    let found: Vec<&str> = rows.iter().map(|row| row["case"].as_str().unwrap()).collect();
    assert_eq!(found, NAMES);
    rows.iter().for_each(check_row);
    for row in rows.iter().filter(|row| row["frames"] == "model") {
        let why = row["why_model"].as_str().unwrap();
        assert!(!why.is_empty() && !why.contains('\n'), "{row}");
        eprintln!("SKIP: {} of this machine: {why}", row["case"]);
    }
    let four = row(&report, "8m-4x2m");
    assert_eq!(number(four, "segments_per_page"), 2048.0);
    assert_eq!(number(four, "segments_single"), 2048.0);
    assert_eq!(number(four, "segments_linux72"), 4.0);
    assert!(number(four, "segments") <= 4.0, "{four}");
}

#[test]
fn a_model_has_no_neighbours_but_those_in_its_pages() {
    let report = json(&["--quick", "--model", "--size", "16M"]);
    let rows = report["rows"].as_array().unwrap();
    rows.iter().for_each(check_row);
    for row in rows {
        assert_eq!((&row["frames"], row.get("why_model")), (&"model".into(), None));
        assert!(row["kernel_register_ns"].is_null());
    }
    let counts = |case| {
        let row = row(&report, case);
        let count = |name| row[name].as_u64().unwrap();
        (count("segments"), count("segments_linux72"))
    };
    assert_eq!(counts("base"), (4096, 4096));
    for (case, folios) in [("8m-4x2m", 4), ("thp", 8), ("hugetlb", 8)] {
        assert_eq!(counts(case), (folios, folios), "{case}");
    }
    assert_eq!(counts("mixed"), (4 + 2048, 4096));
    assert_eq!(row(&report, "base")["uniform"], true);
    assert_eq!(row(&report, "mixed")["uniform"], false);
}

#[test]
fn cases_and_size_can_be_chosen() {
    let args = ["--quick", "--model", "--case", "mixed,8m-4x2m,mixed", "--size", "4M"];
    let report = json(&args);
    let rows = report["rows"].as_array().unwrap();
    let found: Vec<_> = rows.iter().map(|row| (&row["case"], number(row, "size"))).collect();
    let (mixed, four) = (Value::from("mixed"), Value::from("8m-4x2m"));
    assert_eq!(found, [(&mixed, 4194304.0), (&four, 8388608.0)]);
    // An I/O is no longer than its buffer.
    assert_eq!(
        (&rows[0]["io_bytes"], &rows[1]["io_bytes"]),
        (&(4 << 20).into(), &(8 << 20).into())
    );
}

#[test]
fn what_cannot_be_is_refused_in_a_line_that_says_what_can() {
    for (args, part) in [
        (&["--size", "6M"][..], "multiples of 4M"),
        (&["--size", "0"], "multiples of 4M"),
        (&["--size", "2T"], "up to 1T"),
        (&["--size", "1T"], "ask for less"),
        (&["--size", "much"], "dmaspan-bench regbuf --help"),
        (&["--case", "paper"], "dmaspan-bench regbuf --help"),
        (&["--runs", "0"], "from 1 to 1000"),
        (&["--quick", "--runs", "3"], "cannot be used with"),
    ] {
        program::is_refused(&[&["regbuf"], args].concat(), &[part]);
    }
}

#[test]
fn the_tables_are_narrow_and_say_what_they_mean() {
    let _turn = turn();
    for args in [&["--quick", "--size", "16M"][..], &["--quick", "--model"]] {
        let shown = program::tables(
            &[&["regbuf"], args].concat(),
            &["by page", "Linux 7.2", "kernel", "stores", "8m-4x2m", "--quick", "✓"],
        );
        assert_eq!(shown.contains("base*"), args.contains(&"--model") || shown.contains("model's"));
    }
}

#[test]
fn the_help_fits_a_terminal_and_says_what_is_measured_by_what() {
    program::shown(
        &["regbuf", "--help"],
        &["by page", "by segment", "segments_per_page", "speedup", "--model", "Exit codes"],
    );
}
