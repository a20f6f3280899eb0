//! These tests hold the shape of the JSON, which scripts use.

use serde_json::{Value, json};

use dmaspan_cli::json::render;

use super::{Row, examples};

#[test]
fn the_shape_is_the_one_that_scripts_use() {
    let mut report = examples::report();
    report.rows.push(Row::Failed { memory: "base".to_owned(), failed: "3 left".to_owned() });
    let text = render(&report);
    let value: Value = serde_json::from_str(&text).unwrap();
    let phase = |total_ns: u64| {
        json!({"pin_ns": total_ns / 2, "lookup_ns": 41_000, "table_ns": 4100,
            "total_ns": total_ns, "gibps": 82.6})
    };
    let expected = json!({
        "machine": [], "backend": "soft", "size_bytes": 1 << 30, "granule": 4096, "runs": 5,
        "pin": "io_uring", "frames": "physical",
        "rows": [
            {
                "memory": "thp", "spans": 7, "leaves": {"4096": 3, "2097152": 512},
                "table_bytes": 12288, "map": phase(12_100_000), "unmap": phase(4_000_000),
                "per_page": {"map_table_ns": 3_100_000, "unmap_table_ns": 2_000_000},
                "table_speedup": {"map": 756.1, "unmap": 0.5},
                "verified_bytes": 1 << 30, "pin_witness": "VmPin",
            },
            {"memory": "hugetlb", "skipped": "no pool: do this"},
            {"memory": "base", "failed": "3 left"},
        ],
        "verified_bytes": 1 << 30, "stale_translations": 0,
    });
    assert_eq!(value, expected);
    assert!(text.find("\"4096\"").unwrap() < text.find("\"2097152\"").unwrap());
}

#[test]
fn a_real_device_has_no_figures_of_tables() {
    let value: Value = serde_json::from_str(&render(&examples::real_report())).unwrap();
    let times = |total_ns: u64, gibps: f64| json!({"total_ns": total_ns, "gibps": gibps});
    let expected = json!({
        "machine": [], "backend": "vfio", "device": "0000:00:05.0",
        "iommu": {
            "apertures": [[0, 0xfedf_ffff_u64], [0xfef0_0000_u64, (1_u64 << 39) - 1]],
            "page_sizes": [4096, 2 << 20, 1 << 30], "mappings_limit": 65535,
        },
        "size_bytes": 1 << 30, "granule": 4096, "runs": 5, "frames": "physical",
        "rows": [
            {
                "memory": "thp", "spans": 7, "ioctls": {"map": 1, "unmap": 2},
                "map": times(12_100_000, 82.6), "unmap": times(4_000_000, 250.0),
                "per_page": {
                    "pages": 8192, "page_bytes": 4096, "ioctls": {"map": 8192, "unmap": 8193},
                    "map_ns": 40_000_000, "unmap_ns": 20_000_000,
                },
                "speedup": {"map": 105.785, "unmap": 160.0},
                "verified_bytes": 0, "pin_witness": "VmPin",
                "series": [
                    told("map", "before", 0.047, "s"), told("map", "after", 0.027, "s"),
                    told("map rate", "before", 340.2, "GB/s"),
                    told("map rate", "after", 596.4, "GB/s"),
                    told("unmap", "before", 0.135, "s"), told("unmap", "after", 0.045, "s"),
                    told("unmap rate", "before", 118.6, "GB/s"),
                    told("unmap rate", "after", 357.6, "GB/s"),
                ],
            },
            {"memory": "hugetlb", "skipped": "no pool: do this"},
        ],
        "verified_bytes": 0,
    });
    assert_eq!(value, expected);
}

/// A figure of the series for large folios.
fn told(figure: &str, when: &str, value: f64, unit: &str) -> Value {
    json!({"figure": figure, "when": when, "value": value, "sign": "=", "unit": unit,
        "machine": "vfio-pci-mem-dma-map of 16 GiB, 6.16-rc4",
        "differs": "1 GiB here, 16 GiB there"})
}

#[test]
fn a_bar_has_figures_of_its_own() {
    let value: Value = serde_json::from_str(&render(&examples::bar_report())).unwrap();
    assert_eq!((&value["bar"], &value["size_bytes"]), (&json!(2), &json!(32_u64 << 30)));
    let times = |total_ns: u64, gibps: f64| json!({"total_ns": total_ns, "gibps": gibps});
    let signs = value["rows"][0]["series"].as_array().unwrap().iter();
    let signs = signs.map(|told| (told["sign"].as_str().unwrap(), told["value"].as_f64().unwrap()));
    let expected = [("~", 8_388_608.0), ("=", 32.0), ("~", 1.0), ("<", 0.001)];
    assert_eq!(signs.collect::<Vec<_>>(), expected);
    let row = json!({
        "series": value["rows"][0]["series"],
        "memory": "bar 2", "spans": 1, "bytes": 32_u64 << 30, "alignment": 1 << 30,
        "ioctls": {"map": 1, "unmap": 1},
        "map": times(1_250_000, 25600.0), "unmap": times(625_000, 51200.0),
        "verified_bytes": 0,
    });
    assert_eq!(value["rows"], json!([row]));
}
