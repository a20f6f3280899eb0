//! `dmaspan-bench swiotlb` as its users run it.

use std::thread;

use serde_json::Value;

use crate::program;

/// The object that `--format json` prints.
fn json(args: &[&str]) -> Value {
    program::json(&[&["swiotlb"], args].concat())
}

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

fn cpus() -> u64 {
    thread::available_parallelism().unwrap().get() as u64
}

/// Names and threads of all rows.
fn found(report: &Value) -> Vec<(&str, u64)> {
    let rows = report["rows"].as_array().unwrap();
    let name = |row: &'_ Value| row["threads"].as_u64().unwrap();
    rows.iter().map(|row| (row["case"].as_str().unwrap(), name(row))).collect()
}

fn is_about(value: f64, expected: f64) -> bool {
    (value - expected).abs() <= 0.002 + expected * 1e-3
}

/// What follows from the times does.
fn check_row(row: &Value) {
    let (threads, block) = (number(row, "threads"), number(row, "block"));
    for way in ["", "vanilla_"] {
        let of = |name| number(row, &format!("{way}{name}"));
        assert!(of("ns") > 0.0 && of("cpu_ns") > 0.0, "{row}");
        assert!(is_about(of("kiops"), threads * 1e6 / of("ns")), "{way}kiops of {row}");
        assert!(is_about(of("mbps"), of("kiops") * block / 1000.0), "{way}mbps of {row}");
    }
    let speedup = number(row, "vanilla_ns") / number(row, "ns");
    assert!(is_about(number(row, "speedup"), speedup), "{row}");
    let is_patched = row["case"] == "read" || row["case"] == "write";
    assert_eq!(row["patches"].is_object(), is_patched, "{row}");
    if is_patched {
        for patch in ["lock", "bitmap", "order", "all"] {
            let of = |name| number(&row["patches"][patch], name);
            assert!(of("ns") > 0.0 && of("cpu_ns") > 0.0, "{patch} of {row}");
            assert!(is_about(of("kiops"), threads * 1e6 / of("ns")), "{patch} of {row}");
        }
    }
    let counted = ["instructions", "vanilla_instructions"].map(|name| row.get(name).is_some());
    assert_eq!(counted[0], counted[1], "{row}");
}

#[test]
fn the_rows_are_those_of_fio_and_then_pairs_and_bursts() {
    let report = json(&["--quick"]);
    assert_eq!(report["pool_bytes"], 64 << 20);
    assert_eq!((&report["iodepth"], &report["block"]), (&256.into(), &4096.into()));
    assert_eq!((&report["areas"], &report["cpus"]), (&cpus().into(), &cpus().into()));
    report["rows"].as_array().unwrap().iter().for_each(check_row);
    let found = found(&report);
    let mut jobs = vec![1, cpus().min(4)];
    jobs.dedup();
    let queues = jobs
        .iter()
        .flat_map(|&jobs| ["read", "write", "read-overwritten"].map(|name| (name, jobs)));
    assert_eq!(found[..3 * jobs.len()], queues.collect::<Vec<_>>());
    for name in ["pair", "burst-64", "burst-4096", "pair-64k"] {
        for name in [name.to_owned(), format!("{name}-uncopied")] {
            assert!(found.contains(&(&name, 1)), "{name} is not in {found:?}");
        }
    }
    assert!(found.contains(&("pair", cpus())) && found.iter().all(|(_, jobs)| *jobs <= cpus()));
}

#[test]
fn what_jobs_do_can_be_chosen() {
    let args = ["--jobs", "1", "--iodepth", "7", "--block", "6K", "--pool", "8M", "--quick"];
    let report = json(&args);
    assert_eq!((&report["iodepth"], &report["block"]), (&7.into(), &6144.into()));
    assert_eq!(report["pool_bytes"], 8 << 20);
    let rows = report["rows"].as_array().unwrap();
    rows.iter().for_each(check_row);
    assert_eq!((&rows[0]["case"], &rows[0]["block"]), (&"read".into(), &6144.into()));
    // Bursts of 4096 buffers of 4 KiB are twice the pool.
    let left: Vec<&str> = found(&report).iter().map(|(name, _)| *name).collect();
    assert!(left.contains(&"burst-64") && !left.contains(&"burst-4096"), "{left:?}");
    assert_eq!(
        report["left_out"],
        serde_json::json!([["burst-4096", 1], ["burst-4096-uncopied", 1]])
    );
}

#[test]
fn more_jobs_than_cpus_are_measured_on_request_with_an_area_each() {
    let many = (4 * cpus()).to_string();
    let report = json(&["--oversubscribe", "--quick", "--iodepth", "16"]);
    report["rows"].as_array().unwrap().iter().for_each(check_row);
    let names = ["read", "write", "read-overwritten"];
    let jobs = [1, 4 * cpus()].into_iter().flat_map(|jobs| names.map(|name| (name, jobs)));
    assert_eq!(found(&report), jobs.collect::<Vec<_>>());
    assert_eq!((&report["oversubscribed"], &report["areas"]), (&true.into(), &(4 * cpus()).into()));
    for case in ["read", "write"] {
        for pool in ["vanilla", "lock", "bitmap", "order", "all", "now"] {
            assert!(report["growth"][case][pool].as_f64().unwrap() > 0.0, "{report}");
        }
    }
    let rows = report["rows"].as_array().unwrap();
    let areas = rows[0]["area_high_water"].as_array().unwrap();
    assert_eq!(areas.len() as u64, 4 * cpus());
    // A single job has all it holds in an area of its own.
    assert_eq!(areas.iter().filter(|bytes| **bytes != 0).count(), 1);
    program::tables(
        &["swiotlb", "--oversubscribe", "--quick", "--jobs", &many, "--areas", "3"],
        &["3 areas", "order", "spin,", "✓"],
    );
}

#[test]
fn what_cannot_be_is_refused_in_a_line_that_says_what_can() {
    let many = (cpus() + 1).to_string();
    for (args, part) in [
        (&["--jobs", "0"][..], "--jobs takes whole numbers from 1 to 1024"),
        (&["--jobs", &many], "more than the CPUs"),
        (&["--areas", "129"], "--areas takes whole numbers from 1 to 128"),
        (&["--jobs", "1,x"], "dmaspan-bench swiotlb --help"),
        (&["--iodepth", "0"], "--iodepth takes whole numbers from 1 to 65536"),
        (&["--iodepth", "65536"], "--pool 512M is enough"),
        (&["--block", "1000"], "whole sectors"),
        (&["--block", "512K"], "up to 256K"),
        (&["--block", "much"], "a size is"),
        (&["--pool", "1000000"], "whole MiB"),
        (&["--pool", "1M"], "--pool 2M is enough"),
        (&["--pool", "8G"], "to 4G"),
    ] {
        let jobs = &["--jobs", "1"][..2 * usize::from(args[0] != "--jobs")];
        program::is_refused(&[&["swiotlb"], args, jobs].concat(), &[part]);
    }
}

#[test]
fn the_tables_are_narrow_and_say_what_they_mean() {
    for args in [&["--quick"][..], &["--quick", "--jobs", "1", "--pool", "16M"]] {
        program::tables(
            &[&["swiotlb"], args].concat(),
            &[
                "vanilla",
                "series",
                "455 ns",
                "1 job; series",
                "1 on 8 CPUs",
                "read, overwritten",
                "burst of 64",
                "copies left out",
                "no time has a device in it",
                "--quick",
                "✓",
            ],
        );
    }
}

#[test]
fn the_help_fits_a_terminal_and_says_what_is_measured_by_what() {
    program::shown(
        &["swiotlb", "--help"],
        &["vanilla", "speedup", "mbps, kiops", "--iodepth", "Examples:", "Exit codes"],
    );
}
