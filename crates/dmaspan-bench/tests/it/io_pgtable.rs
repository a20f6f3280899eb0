//! `dmaspan-bench io-pgtable` as its users run it, and what all refuse.

use serde_json::Value;

use crate::program::{is_refused, run, text};

/// All case names of a format with 4K granule and 48 bits of IOVA, with one thread.
const CASES_4K: [&str; 16] = [
    "g=1", "g=2", "g=4", "g=8", "g=16", "g=32", "g=64", "g=128", "g=256", "g=512", "2M", "4M",
    "1G as 4K", "1G as 2M", "1G as 1G", "scatter",
];

#[test]
fn a_quick_benchmark_has_a_row_for_every_case_thread_count_and_operation() {
    let args = ["io-pgtable", "--quick", "--format=json", "--format-name=arm-lpae"];
    let output = run(&[&args[..], &["--threads", "3,1,3"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut found = Vec::new();
    for row in report["rows"].as_array().unwrap() {
        assert_eq!(row["format"], "arm-lpae");
        let (slow, fast) = (row["per_page_ns"].as_f64().unwrap(), row["ns"].as_f64().unwrap());
        assert!(slow > 0.0 && fast > 0.0, "{row}");
        let speedup = row["speedup"].as_f64().unwrap();
        assert!((speedup - slow / fast).abs() <= 0.001 + speedup * 0.001, "{row}");
        let word = |key: &str| row[key].as_str().unwrap().to_owned();
        found.push((row["threads"].as_u64().unwrap(), word("case"), word("op")));
    }
    let expected = [1, 3].into_iter().flat_map(|threads| {
        let cases = CASES_4K.iter().filter(move |case| threads == 1 || !case.contains(" as "));
        cases.flat_map(move |case| {
            ["map", "unmap"].map(|op| (threads, (*case).to_owned(), op.to_owned()))
        })
    });
    assert_eq!(found, expected.collect::<Vec<_>>());
}

#[test]
fn every_format_can_be_measured_and_its_table_is_narrow() {
    let output = run(&["io-pgtable", "--quick", "--threads", "10,2"]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for line in shown.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let help = text(&run(&["io-pgtable", "--help"]).stdout);
    let formats = help.lines().skip_while(|line| *line != "Formats:").skip(1);
    let names = formats.map_while(|line| line.split_whitespace().next());
    let mut count = 0;
    for name in names {
        assert!(shown.contains(&format!("\n{name}: ")), "{name} is not in\n{shown}");
        count += 1;
    }
    assert!(count >= 3, "{help}");
    assert!(shown.ends_with("nothing was left after the unmaps\n"), "{shown}");
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn wrong_usage_is_one_line_and_exit_code_2() {
    for (args, part) in [
        (&["io-pgtable", "--format-name", "arm"][..], "there are arm-lpae, arm-lpae-16k"),
        (&["io-pgtable", "--threads", "1,65"], "--threads takes whole numbers from 1 to"),
        (&["io-pgtable", "--quick", "4"], "unexpected argument '4'"),
        (&["iotlb"], "unrecognized subcommand 'iotlb'"),
        (&["fixed", "/dev/null"], "neither a file nor a disk"),
        (&["fixed", "/nowhere"], "name a file or a disk that is there"),
        (&["fixed", "/nowhere", "--depth", "0"], "--depth takes whole numbers from 1 to"),
    ] {
        is_refused(args, &[part]);
    }
}
