//! This checks the JSON of `dmaspan map --format json`.
//!
//! Scripts rely on these keys, and readers on figures that agree with each other: every byte mapped
//! by some leaf, every byte verified, no translation alive after its sync, and times that add up.

use serde_json::Value;

/// How far a figure may be from what follows from others, as a fraction: they were rounded.
const ROUNDING: f64 = 0.05;

/// Kinds of memory that every machine has: their rows may not be skipped.
const REQUIRED: [&str; 2] = ["thp", "base"];
/// What maps without an IOMMU.
const BACKEND: &str = "soft";
/// The kind of memory for which spans must be faster than pages.
const FASTER: &str = "thp";

/// Checks the report of a run over `size` bytes, and returns what is wrong with it.
pub fn check(json: &str, size: u64) -> Vec<String> {
    match serde_json::from_str(json) {
        Ok(report) => {
            let mut checker = Checker { size, runs: 0, place: String::new(), problems: Vec::new() };
            checker.report(&report);
            checker.problems
        }
        Err(error) => vec![format!("the report is not JSON: {error}")],
    }
}

struct Checker {
    size: u64,
    /// How many runs the figures are medians of.
    runs: u64,
    /// Where in the report, for messages.
    place: String,
    problems: Vec<String>,
}

impl Checker {
    fn refuse(&mut self, what: String) {
        self.problems.push(format!("{}{what}", self.place));
    }

    /// The value at a path of keys, if it is what `read` reads.
    fn get<'v, T>(
        &mut self,
        value: &'v Value,
        keys: &[&str],
        kind: &str,
        read: impl Fn(&'v Value) -> Option<T>,
    ) -> Option<T> {
        let found = keys.iter().try_fold(value, |value, key| value.get(key)).and_then(read);
        if found.is_none() {
            self.refuse(format!("`{}` must be {kind}", keys.join(".")));
        }
        found
    }

    fn integer(&mut self, value: &Value, keys: &[&str]) -> Option<u64> {
        self.get(value, keys, "an integer of at least 0", Value::as_u64)
    }

    fn figure(&mut self, value: &Value, keys: &[&str]) -> Option<f64> {
        let read = |value: &Value| value.as_f64().filter(|figure| *figure > 0.0);
        self.get(value, keys, "a number above 0", read)
    }

    fn report(&mut self, report: &Value) {
        let size = self.size;
        let backend = self.get(report, &["backend"], "a text", Value::as_str);
        if backend.is_some_and(|backend| backend != BACKEND) {
            self.refuse(format!("`backend` must be `{BACKEND}`, whose figures are checked here"));
        }
        self.exactly(report, "size_bytes", size);
        self.exactly(report, "stale_translations", 0);
        self.runs = self.integer(report, &["runs"]).unwrap_or(0);
        if report["runs"] == 0 {
            self.refuse("`runs` must be at least 1".to_owned());
        }
        let granule = self.integer(report, &["granule"]);
        if granule.is_some_and(|granule| !granule.is_power_of_two()) {
            self.refuse("`granule` must be a power of two".to_owned());
        }
        let Some(rows) = self.get(report, &["rows"], "a list", Value::as_array) else { return };
        let mut ran = Vec::new();
        for row in rows {
            let Some(memory) = self.get(row, &["memory"], "a text", Value::as_str) else {
                continue;
            };
            if self.skipped(row, memory) {
                continue;
            }
            ran.push(memory);
            self.place = format!("row {memory}: ");
            self.row(row, memory, granule.unwrap_or(1));
            self.place.clear();
        }
        for memory in REQUIRED.iter().filter(|memory| !ran.contains(memory)) {
            self.refuse(format!("there must be a row for `{memory}` with figures"));
        }
        self.exactly(report, "verified_bytes", size.saturating_mul(ran.len() as u64));
    }

    fn exactly(&mut self, report: &Value, key: &str, expected: u64) {
        let Some(found) = self.integer(report, &[key]) else { return };
        if found != expected {
            self.refuse(format!("`{key}` must be {expected} and is {found}"));
        }
    }

    /// Whether a row has no figures, which it must say why.
    fn skipped(&mut self, row: &Value, memory: &str) -> bool {
        let Some(reason) = row.get("skipped") else { return false };
        if reason.as_str().is_none_or(str::is_empty) {
            self.refuse(format!("row {memory}: `skipped` must say why"));
        }
        true
    }

    fn row(&mut self, row: &Value, memory: &str, granule: u64) {
        for key in ["spans", "table_bytes"] {
            if self.integer(row, &[key]) == Some(0) {
                self.refuse(format!("`{key}` must be above 0"));
            }
        }
        self.leaves(row, granule);
        for way in ["map", "unmap"] {
            self.times(row, way);
            self.speedup(row, way, memory);
        }
    }

    /// Leaves of all sizes together are what was mapped.
    fn leaves(&mut self, row: &Value, granule: u64) {
        let Some(leaves) = self.get(row, &["leaves"], "an object", Value::as_object) else {
            return;
        };
        let mut bytes = 0u64;
        for (size, count) in leaves {
            let leaf = size.parse().ok().filter(|leaf: &u64| leaf.is_power_of_two());
            let (Some(leaf), Some(count)) = (leaf, count.as_u64()) else {
                self.refuse(format!(
                    "`leaves` has `{size}: {count}`, not a power of two with a count"
                ));
                continue;
            };
            if leaf < granule {
                self.refuse(format!("`leaves` has leaves of {leaf} bytes, below the granule"));
            }
            bytes = bytes.saturating_add(leaf.saturating_mul(count));
        }
        if bytes != self.size {
            self.refuse(format!(
                "`leaves` are {bytes} bytes together, and {} were mapped",
                self.size
            ));
        }
    }

    /// The parts explain the total, and the throughput is the size by the total.
    fn times(&mut self, row: &Value, way: &str) {
        let parts = ["pin_ns", "lookup_ns", "table_ns"];
        let parts = parts.map(|part| self.integer(row, &[way, part]));
        let total = self.figure(row, &[way, "total_ns"]);
        let gibps = self.figure(row, &[way, "gibps"]);
        let ([Some(pin), Some(lookup), Some(table)], Some(total)) = (parts, total) else { return };
        let parts = [pin, lookup, table].map(float);
        let sum: f64 = parts.iter().sum();
        // Of several runs each figure is a median of its own: their sum may be anything.
        if self.runs == 1 && total != sum {
            self.refuse(format!("`{way}.total_ns` is {total}, and its parts together are {sum}"));
        } else if let Some(part) = parts.into_iter().find(|part| *part > total) {
            self.refuse(format!("`{way}.total_ns` is {total}, and one of its parts is {part}"));
        }
        let expected = float(self.size) / float(1 << 30) / (total / 1e9);
        if gibps.is_some_and(|gibps| !near(gibps, expected)) {
            self.refuse(format!("`{way}.gibps` must be near {expected:.3}: size by total"));
        }
    }

    /// The speed-up is that of the two table times, and one where it must be.
    fn speedup(&mut self, row: &Value, way: &str, memory: &str) {
        let per_page = self.figure(row, &["per_page", &format!("{way}_table_ns")]);
        let speedup = self.figure(row, &["table_speedup", way]);
        let spans = row.get(way).and_then(|way| way.get("table_ns")).and_then(Value::as_f64);
        let (Some(per_page), Some(speedup)) = (per_page, speedup) else { return };
        if spans.is_some_and(|spans| spans > 0.0 && !near(speedup, per_page / spans)) {
            self.refuse(format!("`table_speedup.{way}` is not the ratio of the table times"));
        }
        if memory == FASTER && speedup <= 1.0 {
            self.refuse(format!(
                "`table_speedup.{way}` is {speedup}: spans must be faster than pages"
            ));
        }
    }
}

/// Whether two figures are the same but for rounding, of one decimal too.
fn near(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= expected * ROUNDING + 0.1
}

/// For comparisons with a tolerance far above what this rounds.
fn float(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests;
