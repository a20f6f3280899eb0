use super::*;
use serde_json::json;

const SIZE: u64 = 256 << 20;

fn row(memory: &str) -> Value {
    let times = json!({
        "pin_ns": 700_000, "lookup_ns": 200_000, "table_ns": 100_000,
        "total_ns": 1_000_000, "gibps": 250.0,
    });
    json!({
        "memory": memory, "spans": 3, "leaves": {"4096": 1024, "2097152": 126},
        "table_bytes": 16384, "map": times, "unmap": times,
        "per_page": {"map_table_ns": 4_500_000, "unmap_table_ns": 900_000},
        "table_speedup": {"map": 45.0, "unmap": 9.0},
    })
}

fn good() -> Value {
    json!({
        "backend": "soft", "size_bytes": SIZE, "granule": 4096, "runs": 1,
        "rows": [row("thp"), row("base"), {"memory": "hugetlb", "skipped": "no huge pages"}],
        "verified_bytes": 2 * SIZE, "stale_translations": 0,
    })
}

/// What is wrong with the good report after a change.
fn problems(change: impl FnOnce(&mut Value)) -> Vec<String> {
    let mut report = good();
    change(&mut report);
    check(&report.to_string(), SIZE)
}

/// Asserts that setting the value at `pointer` makes one problem that names `key`.
fn refused(pointer: &str, value: Value, key: &str) {
    let found = problems(|report| *report.pointer_mut(pointer).unwrap() = value.clone());
    assert_eq!(found.len(), 1, "{pointer} = {value}: {found:?}");
    assert!(found[0].contains(key), "{found:?}");
}

#[test]
fn a_report_that_agrees_with_itself_is_accepted() {
    assert!(problems(|_| ()).is_empty(), "{:?}", problems(|_| ()));
    let with_hugetlb = |report: &mut Value| {
        report["rows"][2] = row("hugetlb");
        report["verified_bytes"] = (3 * SIZE).into();
        report["device"] = "none".into();
    };
    assert!(problems(with_hugetlb).is_empty(), "{:?}", problems(with_hugetlb));
}

#[test]
fn what_is_no_report_is_refused() {
    assert_eq!(check("", SIZE).len(), 1);
    assert!(check("{}", SIZE).len() >= 5);
    assert!(check("[1]", SIZE).len() >= 5);
}

#[test]
fn every_key_of_the_contract_is_needed() {
    fn remove_each(report: &Value, pointer: &str, missed: &mut Vec<String>) {
        let Some(object) = report.pointer(pointer).and_then(Value::as_object) else { return };
        for key in object.keys() {
            let mut without = report.clone();
            without.pointer_mut(pointer).unwrap().as_object_mut().unwrap().remove(key);
            if check(&without.to_string(), SIZE).is_empty() {
                missed.push(format!("{pointer}/{key}"));
            }
            remove_each(report, &format!("{pointer}/{key}"), missed);
        }
    }
    let mut missed = Vec::new();
    remove_each(&good(), "", &mut missed);
    remove_each(&good(), "/rows/0", &mut missed);
    assert!(missed.is_empty(), "not missed: {missed:?}");
}

#[test]
fn another_size_or_too_little_verified_is_refused() {
    refused("/size_bytes", json!(SIZE / 2), "size_bytes");
    refused("/verified_bytes", json!(SIZE), "verified_bytes");
    refused("/stale_translations", json!(1), "stale_translations");
    refused("/runs", json!(0), "runs");
    refused("/granule", json!(4095), "granule");
    refused("/backend", json!("vfio"), "backend");
}

#[test]
fn rows_that_must_run_may_not_be_skipped() {
    let found = problems(|report| {
        report["rows"][1] = json!({"memory": "base", "skipped": "no memory"});
        report["verified_bytes"] = SIZE.into();
    });
    assert!(found.len() == 1 && found[0].contains("base"), "{found:?}");
    refused("/rows/2/skipped", json!(""), "skipped");
    refused("/rows/2/skipped", json!(true), "skipped");
}

#[test]
fn leaves_that_do_not_cover_the_memory_are_refused() {
    refused("/rows/0/leaves/4096", json!(1023), "leaves");
    refused("/rows/0/leaves", json!({"268435455": 1, "268435456": 1}), "leaves");
    refused("/rows/0/leaves", json!({"2048": 131_072}), "granule");
    refused("/rows/1/spans", json!(0), "spans");
    refused("/rows/1/table_bytes", json!(-1), "table_bytes");
}

#[test]
fn times_that_do_not_add_up_are_refused() {
    refused("/rows/0/map/pin_ns", json!(700_001), "together");
    refused("/rows/0/unmap/gibps", json!(500), "gibps");
    let with = |runs: u64, pin: u64, total: u64| {
        problems(|report| {
            report["runs"] = runs.into();
            let times = &mut report["rows"][1]["unmap"];
            (times["pin_ns"], times["total_ns"]) = (pin.into(), total.into());
            times["gibps"] = (0.25e9 / total as f64).into();
        })
    };
    assert!(with(1, 9_000_000, 9_300_000).is_empty());
    for total in [9_200_000, 9_300_001, 15_000_000] {
        let found = with(1, 9_000_000, total);
        assert!(found.len() == 1 && found[0].contains("together"), "{found:?}");
        // Medians of parts and of totals may be of different runs.
        assert!(with(5, 9_000_000, total).is_empty());
    }
    let found = with(5, 9_000_000, 8_999_999);
    assert!(found.len() == 1 && found[0].contains("one of its parts"), "{found:?}");
}

#[test]
fn spans_that_are_no_faster_than_pages_are_refused_for_large_pages() {
    let slower = |report: &mut Value, row: usize| {
        report["rows"][row]["per_page"]["map_table_ns"] = 90_000.into();
        report["rows"][row]["table_speedup"]["map"] = 0.9.into();
    };
    assert_eq!(problems(|report| slower(report, 0)).len(), 1);
    assert!(problems(|report| slower(report, 1)).is_empty());
    refused("/rows/0/table_speedup/map", json!(90), "table_speedup");
}
