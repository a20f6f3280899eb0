//! `dmaspan-bench fixed` as its users run it, on a file of its own.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::program;

const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 8;

/// A file that is gone when the test is over.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::write(&path, vec![0xee; BLOCK * BLOCKS]).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// What the program prints of both ways over the file; `None` where this machine cannot.
fn printed(scratch: &Scratch, more: &[&str]) -> Option<String> {
    let args = [
        &["fixed", scratch.0.to_str().unwrap(), "--memory", "base"][..],
        &["--block", "64K", "--depth", "3", "--count", "9", "--runs", "1"],
        more,
    ];
    let output = program::run(&args.concat());
    let said = program::text(&output.stderr);
    if said.contains("no direct I/O") || said.contains("no ring") || said.contains("no buffers") {
        eprintln!("SKIP: {}", said.trim_end());
        return None;
    }
    assert_eq!(output.status.code(), Some(0), "{said}");
    Some(program::text(&output.stdout))
}

fn report(scratch: &Scratch, more: &[&str]) -> Option<Value> {
    let printed = printed(scratch, &[more, &["--format", "json"]].concat())?;
    Some(serde_json::from_str(&printed).unwrap())
}

fn ways(report: &Value) -> Vec<(&str, &str)> {
    let rows = report["rows"].as_array().unwrap().iter();
    rows.map(|row| (row["op"].as_str().unwrap(), row["way"].as_str().unwrap())).collect()
}

#[test]
fn without_being_told_to_write_it_leaves_the_file_as_it_is() {
    let scratch = Scratch::new("fixed-read");
    let Some(report) = report(&scratch, &[]) else { return };
    assert_eq!(ways(&report), [("read", "fixed"), ("read", "plain")]);
    assert!(fs::read(&scratch.0).unwrap().iter().all(|byte| *byte == 0xee));
}

#[test]
fn writes_are_measured_both_ways_behind_the_reads_and_leave_a_file_of_the_same_length() {
    let scratch = Scratch::new("fixed-write");
    let Some(report) = report(&scratch, &["--write"]) else { return };
    let expected = [("read", "fixed"), ("read", "plain"), ("write", "fixed"), ("write", "plain")];
    assert_eq!(ways(&report), expected);
    let bytes = fs::read(&scratch.0).unwrap();
    assert_eq!(bytes.len(), BLOCK * BLOCKS);
    assert!(bytes.iter().any(|byte| *byte != 0xee), "nothing was written");
    for row in report["rows"].as_array().unwrap() {
        assert!(row["wall_ns"].as_u64().unwrap() > 0 && row["cpu_ns"].is_u64(), "{row}");
        let is_fixed = row["way"] == "fixed";
        assert_eq!(row["series"].is_array(), is_fixed, "{row}");
        if is_fixed {
            let share = if row["op"] == "read" { 4.68 } else { 2.82 };
            assert_eq!(row["series"][0]["value"], share);
            let differs = row["series"][0]["differs"].as_str().unwrap();
            assert!(differs.contains("3 at a time") && differs.contains("64 KiB"), "{differs}");
        }
    }
}

#[test]
fn every_line_of_the_series_says_which_load_is_not_its_own() {
    let scratch = Scratch::new("fixed-text");
    let Some(shown) = printed(&scratch, &["--write"]) else { return };
    let lines: Vec<&str> = shown.lines().filter(|line| line.contains('→')).collect();
    let lines = &lines[..lines.len().min(5)];
    assert!(lines.len() == 5 && lines[0].contains("4.68 → -"), "{shown}");
    assert!(lines[0].contains("2.82 → -"), "{shown}");
    assert!(lines.iter().all(|line| line.contains("3 at a time")), "{shown}");
}
