//! The program as its users run it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dmaspan_linux::MemoryKind;
use serde_json::Value;

// Tests that pin, whose user may pin little, take turns too.
use crate::turn::turn;

const MIB: u64 = 1 << 20;

fn dmaspan(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmaspan"));
    command.args(args).env_remove("NO_COLOR");
    command
}

fn run(args: &[&str]) -> Output {
    dmaspan(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The object that `--format json` prints, and what the program answered.
fn json(args: &[&str]) -> (Value, Output) {
    let output = run(&[&["map", "--format", "json"], args].concat());
    let value = serde_json::from_slice(&output.stdout);
    (value.unwrap_or_else(|error| panic!("{error}: {}", stderr(&output))), output)
}

/// So many MiB, or a whole transparent huge page where that is larger: on Arm it may be.
fn huge(mib: u64) -> (u64, String) {
    let bytes = (mib * MIB).next_multiple_of(MemoryKind::Thp.page_size());
    (bytes, format!("{}M", bytes / MIB))
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().unwrap()
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// Says that a test needs to pin more than an ordinary user may.
fn needs_root() -> bool {
    if !is_root() {
        eprintln!("SKIP: not root: the limit of locked memory, or frames are hidden");
    }
    !is_root()
}

/// Says why a row has no figures, for a test that needs them.
fn skipped(row: &Value) -> bool {
    let Some(reason) = row["skipped"].as_str() else { return false };
    assert!(!is_root() || row["memory"] == "hugetlb", "{row}");
    eprintln!("SKIP: {}: {reason}", row["memory"]);
    true
}

/// Checks what every measured row promises, of `bytes` of memory.
fn check_row(row: &Value, bytes: u64) {
    let leaves = row["leaves"].as_object().unwrap();
    let leaf_bytes: u64 =
        leaves.iter().map(|(size, count)| size.parse::<u64>().unwrap() * number(count)).sum();
    assert_eq!(leaf_bytes, bytes, "{row}");
    let leaf_count: u64 = leaves.values().map(number).sum();
    assert!((1..=leaf_count).contains(&number(&row["spans"])), "{row}");
    assert!(number(&row["table_bytes"]) >= 4096);
    assert_eq!(number(&row["verified_bytes"]), bytes);
    let witness = row["pin_witness"].as_str().unwrap();
    assert!(["VmPin", "VmLck", "nr_foll_pin_acquired", "accepted"].contains(&witness), "{row}");
    for phase in ["map", "unmap"] {
        let phase = &row[phase];
        assert!(number(&phase["total_ns"]) > 0 && phase["gibps"].as_f64().unwrap() > 0.0);
        for part in ["pin_ns", "lookup_ns", "table_ns"] {
            assert!(number(&phase[part]) <= number(&phase["total_ns"]), "{row}");
        }
    }
    assert_eq!(row["unmap"]["lookup_ns"], 0);
    assert!(number(&row["per_page"]["map_table_ns"]) > 0);
    assert!(number(&row["per_page"]["unmap_table_ns"]) > 0);
    for way in ["map", "unmap"] {
        assert!(row["table_speedup"][way].as_f64().unwrap() >= 0.0, "{row}");
    }
}

fn hugetlb_pages() -> Option<String> {
    fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages").ok()
}

#[test]
fn every_usual_kind_is_mapped_verified_and_gone_after_the_unmap() {
    if needs_root() {
        return;
    }
    let _turn = turn();
    let pages_before = hugetlb_pages();
    let (bytes, size) = huge(8);
    let (report, output) = json(&[&size, "--runs", "2"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(report["backend"], "soft");
    assert_eq!(number(&report["size_bytes"]), bytes);
    assert_eq!(number(&report["granule"]), 4096);
    assert_eq!(number(&report["runs"]), 2);
    assert!(["io_uring", "mlock"].contains(&report["pin"].as_str().unwrap()));
    assert!(["physical", "virtual"].contains(&report["frames"].as_str().unwrap()));
    assert_eq!(number(&report["stale_translations"]), 0);
    let names: Vec<&str> =
        rows(&report).iter().map(|row| row["memory"].as_str().unwrap()).collect();
    assert_eq!(names, ["thp", "base", "hugetlb"]);
    let mut verified = 0;
    for row in rows(&report) {
        if !skipped(row) {
            check_row(row, bytes);
            verified += bytes;
        }
    }
    assert_eq!(number(&report["verified_bytes"]), verified);
    assert_eq!(hugetlb_pages(), pages_before);
}

#[test]
fn a_device_that_is_not_there_is_one_line_that_says_so() {
    for api in ["vfio", "iommufd", "compat"] {
        let output = run(&["map", "4M", "--backend", &format!("{api}:ffffffff:ff:1f.7")]);
        assert_eq!(output.status.code(), Some(1));
        let text = stderr(&output);
        assert_eq!(text.lines().count(), 1, "{text}");
        let says = "there is no PCI function ffffffff:ff:1f.7";
        assert!(text.starts_with("error: ") && text.contains(says), "{text}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_device_that_is_no_address_is_wrong_usage() {
    for args in [
        &["--backend", "vfio:5"][..],
        &["--backend", "vfio"],
        &["--backend", "vfio:00:05.0", "--granule", "4k"],
    ] {
        let output = run(&[&["map"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
    }
}

#[test]
fn a_run_that_is_killed_gives_hugetlb_pages_back() {
    let _turn = turn();
    let before = hugetlb_pages();
    let args = ["map", "64M", "--memory", "hugetlb", "--runs", "1000"];
    let mut child = dmaspan(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while hugetlb_pages() == before {
        if child.try_wait().unwrap().is_some() {
            return eprintln!("SKIP: the number of hugetlb pages is not raised here");
        }
        thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // The process that holds them comes to its end in a moment, or never does.
    let begin = Instant::now();
    while hugetlb_pages() != before {
        assert!(begin.elapsed() < Duration::from_secs(300), "the pages stay reserved");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn every_granule_maps_memory_of_huge_pages() {
    let _turn = turn();
    let (bytes, size) = huge(4);
    for (granule, page) in [("4k", 4096), ("16k", 16384), ("64k", 65536)] {
        let (report, output) = json(&[&size, "--memory", "thp", "--granule", granule, "--runs=1"]);
        assert_eq!(number(&report["granule"]), page);
        let row = &rows(&report)[0];
        if !skipped(row) {
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            check_row(row, bytes);
        }
    }
}

#[test]
fn scattered_pages_under_a_larger_granule_say_why_and_others_go_on() {
    let _turn = turn();
    if needs_root() {
        return;
    }
    let (bytes, size) = huge(32);
    let args = [&size, "--memory", "base,thp", "--granule", "64k", "--runs", "1"];
    let (report, output) = json(&args);
    let [base, thp] = rows(&report) else { panic!("{report}") };
    let Some(reason) = base["skipped"].as_str() else {
        check_row(base, bytes);
        return eprintln!("SKIP: the base pages happen to be contiguous, or frames are hidden");
    };
    let page = MemoryKind::Base.page_size() >> 10;
    let says =
        format!("scattered frames of {page} KiB cannot be mapped with a granule of 64 KiB: ");
    assert!(reason.starts_with(&says), "{reason}");
    if !skipped(thp) {
        check_row(thp, bytes);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
}

#[test]
fn where_no_kind_can_be_mapped_the_run_failed() {
    let _turn = turn();
    if needs_root() {
        return;
    }
    let (report, output) = json(&["32M", "--memory=base", "--granule=64k", "--runs=1"]);
    if rows(&report)[0]["skipped"].is_null() {
        return eprintln!("SKIP: the base pages happen to be contiguous, or frames are hidden");
    }
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
    assert_eq!(number(&report["verified_bytes"]), 0);
}

#[test]
fn files_in_memory_are_mapped_too() {
    let _turn = turn();
    let (report, output) = json(&["2M", "--memory", "memfd", "--runs", "1"]);
    let row = &rows(&report)[0];
    if !skipped(row) {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        check_row(row, 2 * MIB);
    }
}

#[test]
fn the_table_is_narrow_plain_and_ends_with_a_verdict() {
    let _turn = turn();
    let (bytes, size) = huge(4);
    let output = run(&["map", &size, "--memory", "thp,base", "--runs", "1"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert!(!text.contains('\x1b'), "{text}");
    let last: Vec<&str> = text.lines().rev().take(2).collect();
    assert_eq!(last[0], "✓ nothing translates after the unmap", "{text}");
    let mib = 2 * bytes / MIB;
    let size =
        if mib.is_multiple_of(1024) { format!("{} GiB", mib >> 10) } else { format!("{mib} MiB") };
    let both = format!("✓ the device wrote and read back {size}");
    assert!(last[1].starts_with(&both), "{text}");
    assert_eq!(stderr(&output), "");
}

#[test]
fn wrong_usage_is_one_line_and_exit_code_2() {
    let page = format!("multiple of {} KiB", MemoryKind::Base.page_size() >> 10);
    for (args, part) in [
        (&["map", "0"][..], "size of 0"),
        (&["map", "lots"], "512M, 4G or 1.5GiB"),
        (&["map", "-5"], "unexpected argument '-5'"),
        (&["map", "0.3K"], "whole number of bytes"),
        (&["map", "4097", "--memory", "base"], &page),
        (&["map", "1M", "--memory", "base,hugetlb"], "multiple of 2 MiB"),
        (&["map", "1M", "--memory", "hugetlb"], "1 MiB is not a multiple"),
        (&["map", "1M", "--memory", "hugetlb"], "`--memory base`"),
        (&["map", "--runs", "abc"], "--runs takes a whole number"),
        (&["map", "512M", "--memory", "hugetlb-1g"], "multiple of 1 GiB"),
        (&["map", "900T"], "are available"),
        (&["map", "99999999999999999999G"], "more than any machine has"),
        (&["map", "--memory", "paper"], "no kind of memory is called \"paper\""),
        (&["map", "--granule", "8k"], "4k, 16k, 64k"),
        (&["map", "--runs", "0"], "--runs takes a whole number from 1 to 1000"),
        (&["map", "--format", "xml"], "table, json"),
        (&["map", "--bar", "0"], "name the device with --backend"),
        (&["map", "--bar", "6"], "--bar takes a whole number from 0 to 5"),
        (&["map", "1M", "--bar", "0", "--backend", "vfio:00:05.0"], "cannot be used with"),
        (&["map", "--bar", "0", "--memory", "thp"], "cannot be used with"),
        (&["map", "1M", "2M"], "unexpected argument '2M'"),
        (&["mop"], "unrecognized subcommand 'mop'"),
    ] {
        let output = run(args);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert_eq!(text.lines().count(), 1, "{args:?}: {text}");
        assert!(text.starts_with("error: ") && text.contains(part), "{args:?}: {text}");
        assert_eq!(stdout(&output), "");
    }
}

#[test]
fn help_and_version_are_there() {
    let output = run(&[]);
    assert!(stderr(&output).contains("Usage: dmaspan <COMMAND>"), "{}", stderr(&output));
    let output = run(&["map", "--help"]);
    let help = stdout(&output);
    assert_eq!(output.status.code(), Some(0));
    assert!(help.contains("Examples:") && help.contains("Exit codes:"), "{help}");
    for args in [
        &["--help"][..],
        &["map", "-h"],
        &["map", "--help"],
        &["devices", "-h"],
        &["devices", "--help"],
        &["plan", "-h"],
        &["plan", "--help"],
        &["doctor", "-h"],
        &["doctor", "--help"],
        &["inspect", "-h"],
        &["inspect", "--help"],
    ] {
        let help = stdout(&run(args));
        assert!(help.contains("Usage: dmaspan"), "{args:?}: {help}");
        for line in help.lines() {
            assert!(line.chars().count() <= 80, "{args:?}: {line}");
        }
    }
    let version = stdout(&run(&["--version"]));
    assert_eq!(version.trim(), concat!("dmaspan ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn without_privilege_virtual_addresses_stand_for_frames() {
    let _turn = turn();
    let args = ["map", "2M", "--memory", "base", "--format", "json", "--runs", "1"];
    // A user who is nobody, where this one may become one.
    let output = match dmaspan(&args).uid(65534).gid(65534).output() {
        Ok(output) => output,
        Err(error) => return eprintln!("SKIP: no run as another user: {error}"),
    };
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    if skipped(&rows(&report)[0]) {
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(report["frames"], "virtual");
    assert_eq!(rows(&report)[0]["spans"], 1);
    check_row(&rows(&report)[0], 2 * MIB);
    assert!(stderr(&output).contains("note: spans are contiguous in virtual memory only"));
}

#[test]
fn a_report_that_cannot_be_written_is_an_error() {
    let _turn = turn();
    for format in ["table", "json"] {
        let Ok(full) = fs::OpenOptions::new().write(true).open("/dev/full") else {
            return eprintln!("SKIP: there is no /dev/full");
        };
        let args = ["map", &huge(2).1, "--memory", "thp", "--runs", "1", "--format", format];
        let output = dmaspan(&args).stdout(full).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        let text = stderr(&output);
        assert!(text.starts_with("error: the report cannot be written: "), "{text}");
    }
}

#[test]
fn a_holder_that_is_asked_to_end_holds_until_its_input_ends() {
    let _turn = turn();
    let args = ["hold-hugetlb", "hugetlb", "4194304"];
    let mut holder = dmaspan(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let held = line.trim_end() == "held";
    if held {
        for signal in ["-TERM", "-INT", "-HUP"] {
            let sent = Command::new("kill").args([signal, &holder.id().to_string()]).status();
            assert!(sent.unwrap().success());
        }
        thread::sleep(Duration::from_millis(50));
        assert_eq!(holder.try_wait().unwrap(), None);
    }
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    if !held {
        assert!(!is_root(), "{line}");
        eprintln!("SKIP: {}", line.trim_end());
    }
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let _turn = turn();
    for format in ["table", "json"] {
        let args = ["map", &huge(2).1, "--memory", "thp", "--runs", "1", "--format", format];
        let mut child =
            dmaspan(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
    }
}

#[test]
fn what_the_doctor_says_alone_is_what_map_says_first() {
    let _turn = turn();
    // How much is free changes from one run to the next.
    let lines = |output: &Output| -> Vec<String> {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let first = text.lines().take_while(|line| !line.is_empty());
        first.map(|line| line.replace(|c: char| c.is_ascii_digit(), "")).collect()
    };
    let doctor = run(&["doctor"]);
    let map = run(&["map", "1M", "--memory", "base", "--runs", "1"]);
    assert!(lines(&doctor).len() >= 7);
    assert_eq!(lines(&map), lines(&doctor));
    let json =
        |arguments: &[&str]| -> Value { serde_json::from_slice(&run(arguments).stdout).unwrap() };
    let names = |checks: &Value| -> Vec<String> {
        let checks = checks.as_array().unwrap();
        checks.iter().map(|check| check["name"].as_str().unwrap().to_owned()).collect()
    };
    let map = json(&["map", "1M", "--memory", "base", "--runs", "1", "--format", "json"]);
    assert_eq!(names(&map["machine"]), names(&json(&["doctor", "--format", "json"])["checks"]));
}
