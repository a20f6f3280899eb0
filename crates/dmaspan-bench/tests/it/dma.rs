//! `dmaspan-bench dma` as its users run it.

use std::time::Instant;

use serde_json::Value;

use crate::program;

/// The object that `--format json` prints.
fn json(args: &[&str]) -> Value {
    program::json(&[&["dma"], args].concat())
}

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().unwrap()
}

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// The only row of a run.
fn row(args: &[&str]) -> Value {
    let report = json(args);
    assert_eq!(rows(&report).len(), 1);
    rows(&report)[0].clone()
}

const WAYS: [&str; 2] = ["", "per_page_"];

fn check_row(row: &Value) {
    for (way, what) in WAYS.into_iter().flat_map(|way| [(way, "map"), (way, "unmap")]) {
        let average = number(row, &format!("{way}{what}_us"));
        assert!(average > 0.0 && average < 1e5, "{row}");
        assert!(number(row, &format!("{way}{what}_stddev_us")) >= 0.0);
        let percentiles = &row[format!("{way}{what}_percentiles_us")];
        let all = ["50", "90", "99", "99.9"].map(|name| number(percentiles, name));
        assert!(all[0] > 0.0 && all.is_sorted(), "{row}");
    }
    for what in ["map", "unmap"] {
        let (old, new) = (format!("per_page_{what}_us"), format!("{what}_us"));
        let expected = number(row, &old) / number(row, &new);
        let speedup = number(row, &format!("speedup_{what}"));
        assert!((speedup - expected).abs() <= 0.0005 + expected * 1e-6, "{row}");
    }
    assert!(number(row, "operations") >= 1.0 && number(row, "per_page_operations") >= 1.0);
}

#[test]
fn without_arguments_the_grid_is_that_of_the_series() {
    let report = json(&["--quick"]);
    assert_eq!(report["flush"], "strict");
    let found: Vec<(u64, u64)> = rows(&report)
        .iter()
        .map(|row| (row["threads"].as_u64().unwrap(), row["granule"].as_u64().unwrap()))
        .collect();
    let grid = [1, 10].into_iter().flat_map(|threads| (0..=10).map(move |n| (threads, 1 << n)));
    assert_eq!(found, grid.collect::<Vec<_>>());
    for row in rows(&report) {
        check_row(row);
        assert_eq!(row["mode"], "single");
        assert_eq!(number(row, "invalidations_per_unmap"), 1.0, "{row}");
        assert_eq!(number(row, "syncs_per_unmap"), 1.0, "{row}");
        // Buffers of 512 pages are a block, and of 1024 two.
        let granule = row["granule"].as_u64().unwrap();
        let calls = if granule < 512 { granule } else { granule / 512 };
        let commands = number(row, "per_page_invalidations_per_unmap");
        assert_eq!(commands.to_bits(), (calls as f64).to_bits(), "{row}");
        assert_eq!(number(row, "per_page_syncs_per_unmap"), 1.0, "{row}");
    }
}

#[test]
fn lazy_unmaps_share_their_syncs() {
    for args in [&["-g", "1"][..], &["-g", "4", "-t", "3"], &["-g", "2", "--mode", "sg"]] {
        let row = row(&[args, &["-s", "1", "--lazy"]].concat());
        check_row(&row);
        for name in ["invalidations_per_unmap", "syncs_per_unmap"] {
            for way in WAYS {
                let count = number(&row, &format!("{way}{name}"));
                // A queue that is flushed by age may hold few.
                assert!(count > 0.0 && count <= 0.05, "{way}{name} of {row}");
            }
        }
    }
}

#[test]
fn a_list_of_pages_is_one_command_when_it_is_batched() {
    for granule in [1u64, 3, 40, 1024] {
        let pages = granule.to_string();
        let row = row(&["-g", &pages, "-s", "1", "-m", "1", "-d", "2", "-t", "2"]);
        check_row(&row);
        assert_eq!(row["mode"], "sg");
        assert_eq!(row["granule"].as_u64(), Some(granule));
        assert_eq!(number(&row, "invalidations_per_unmap"), 1.0, "{row}");
        assert_eq!(number(&row, "syncs_per_unmap"), 1.0, "{row}");
        // By page, pages that lie apart are never a block.
        let commands = number(&row, "per_page_invalidations_per_unmap");
        assert_eq!(commands.to_bits(), (granule as f64).to_bits(), "{row}");
        assert_eq!(number(&row, "per_page_syncs_per_unmap"), 1.0, "{row}");
    }
}

#[test]
fn letters_take_their_values_in_any_order_and_form() {
    for args in [
        &["-t2", "-g4", "-s1", "-msg", "-d1", "-b40", "-x100", "-n-1", "--strict"][..],
        &[
            "--strict",
            "--node=-1",
            "-x",
            "100",
            "--bits",
            "40",
            "-d=to-device",
            "-m",
            "1",
            "--seconds",
            "1",
            "--granule=4",
            "--threads=2",
        ],
    ] {
        let report = json(args);
        assert_eq!((&report["direction"], &report["bits"]), (&"to-device".into(), &40.into()));
        assert_eq!((&report["delay_ns"], &report["flush"]), (&100.into(), &"strict".into()));
        let row = &rows(&report)[0];
        assert_eq!((row["threads"].as_u64(), row["granule"].as_u64()), (Some(2), Some(4)));
        assert_eq!(row["mode"], "sg");
    }
}

#[test]
fn a_case_takes_the_seconds_that_it_was_given_at_least() {
    let begin = Instant::now();
    let report = json(&["-s", "1", "-x", "1000", "-d", "to-device", "-b", "64", "-n", "-1"]);
    assert!(begin.elapsed().as_secs() >= 1, "{:?}", begin.elapsed());
    assert_eq!(report["direction"], "to-device");
    assert_eq!((&report["bits"], &report["delay_ns"]), (&64.into(), &1000.into()));
    let row = &rows(&report)[0];
    assert_eq!((row["threads"].as_u64(), row["granule"].as_u64()), (Some(1), Some(1)));
    // A microsecond each beside map, unmap and filling.
    assert!(number(row, "operations") <= 500_000.0, "{row}");
}

#[test]
fn many_threads_share_few_addresses() {
    // 64 buffers of 16 KiB and no more at once, where 1 MiB is all there is.
    for flush in ["--strict", "--lazy"] {
        let row = row(&["-t", "60", "-g", "4", "-b", "20", "-s", "1", flush]);
        check_row(&row);
        assert!(number(&row, "operations") >= 60.0);
    }
}

#[test]
fn wrong_usage_is_one_line_with_the_limits() {
    for (args, parts) in [
        (&["-t", "0"][..], &["'0'", "-t", "from 1 to 1024"][..]),
        (&["-t", "1025"], &["'1025'", "from 1 to 1024"]),
        (&["-g", "1025"], &["'1025'", "-g", "from 1 to 1024"]),
        (&["-g", "0"], &["'0'", "from 1 to 1024"]),
        (&["-s", "301"], &["'301'", "-s", "from 1 to 300"]),
        (&["-s", "0"], &["'0'", "from 1 to 300"]),
        (&["-s", "-1"], &["'-1'", "from 1 to 300"]),
        (&["-b", "19"], &["'19'", "-b", "from 20 to 64"]),
        (&["-b", "65"], &["'65'", "from 20 to 64"]),
        (&["-x", "10000001"], &["'10000001'", "-x", "from 0 to 10000000"]),
        (&["-n", "0"], &["'0'", "-n takes only -1"]),
        (&["-d", "3"], &["'3'", "0 (bidirectional), 1 (to-device) or 2 (from-device)"]),
        (&["-m", "2"], &["'2'", "single, sg"]),
        (&["-t", "x"], &["'x'", "from 1 to 1024"]),
        (&["--lazy", "--strict"], &["--lazy", "--strict"]),
        (&["--quick", "-t", "2"], &["--quick", "--threads"]),
        (&["-b", "20", "-g", "1024"], &["20 bits", "1024 pages", "23 or more"]),
        (&["-b", "20"], &["20 bits", "256 pages", "21 or more"]),
    ] {
        program::is_refused(&[&["dma"], args].concat(), parts);
    }
}

#[test]
fn the_tables_are_narrow_and_say_what_they_mean() {
    for args in [&["--quick"][..], &["--quick", "--lazy", "-m", "sg"], &["-s", "1", "-g", "512"]] {
        program::tables(
            &[&["dma"], args].concat(),
            &["by page", "batched", "faster", "commands", "syncs", "2M", "no hardware", "✓"],
        );
    }
}

#[test]
fn the_help_has_examples_and_every_letter_of_linuxs_tool() {
    program::shown(
        &["dma", "--help"],
        &["-t, ", "-s, ", "-n, ", "-b, ", "-d, ", "-x, ", "-g, ", "-m, ", "Examples:"],
    );
}
