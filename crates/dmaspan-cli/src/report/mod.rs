//! What came of a run.

pub(crate) mod json;
pub(crate) mod table;
pub(crate) mod text;
pub(crate) mod units;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::stats::Series;

/// What came of a run. Its public part is what `--format json` prints.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) size_bytes: u64,
    pub(crate) granule: u64,
    pub(crate) runs: u32,
    pub(crate) pin: &'static str,
    pub(crate) frames: &'static str,
    pub(crate) rows: Vec<Row>,
    pub(crate) verified_bytes: u64,
    pub(crate) stale_translations: u64,
    /// What a user should know to understand the figures.
    #[serde(skip)]
    pub(crate) notes: Vec<String>,
}

/// One kind of memory.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Row {
    /// It was measured.
    Figures(Box<Figures>),
    /// This machine, or this process on it, cannot do it.
    Skipped(Skipped),
    /// It went wrong.
    Failed(Failed),
}

/// Why a kind of memory was not measured.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Skipped {
    pub(crate) memory: &'static str,
    pub(crate) skipped: String,
}

/// What went wrong with a kind of memory, the first that did.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Failed {
    pub(crate) memory: &'static str,
    pub(crate) failed: String,
}

/// What was measured with one kind of memory. Times are medians.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) memory: &'static str,
    pub(crate) spans: usize,
    /// By size in bytes.
    pub(crate) leaves: BTreeMap<u64, u64>,
    pub(crate) table_bytes: u64,
    pub(crate) map: Phase,
    pub(crate) unmap: Phase,
    pub(crate) per_page: PerPageTimes,
    pub(crate) table_speedup: Speedup,
    pub(crate) verified_bytes: u64,
}

/// Where the time of an operation goes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Phase {
    pub(crate) pin_ns: u64,
    pub(crate) lookup_ns: u64,
    pub(crate) table_ns: u64,
    pub(crate) total_ns: u64,
    pub(crate) gibps: f64,
}

/// How long tables take one page at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PerPageTimes {
    pub(crate) map_table_ns: u64,
    pub(crate) unmap_table_ns: u64,
}

/// How many times faster tables are than one page at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Speedup {
    pub(crate) map: f64,
    pub(crate) unmap: f64,
}

impl Report {
    /// Whether everything that ran was right, and anything ran.
    pub(crate) fn passed(&self) -> bool {
        self.failures().next().is_none()
    }

    /// Everything that went wrong.
    pub(crate) fn failures(&self) -> impl Iterator<Item = String> {
        let nothing_ran = self.rows.iter().all(|row| matches!(row, Row::Skipped(_)));
        let nothing =
            nothing_ran.then(|| "nothing was mapped: no kind of memory could be used".to_owned());
        let failed = self.rows.iter().filter_map(|row| match row {
            Row::Failed(Failed { memory, failed }) => Some(format!("{memory}: {failed}")),
            _ => None,
        });
        failed.chain(nothing)
    }
}

impl Phase {
    /// The medians of `series`, of operations on `bytes` bytes each.
    pub(crate) fn of(series: &Series, bytes: u64) -> Self {
        let [pin_ns, lookup_ns, table_ns, total_ns] = series.medians();
        let seconds = total_ns.max(1) as f64 / 1e9;
        let gibps = rounded(bytes as f64 / (1u64 << 30) as f64 / seconds);
        Self { pin_ns, lookup_ns, table_ns, total_ns, gibps }
    }
}

impl Speedup {
    /// The time of tables one page at a time, in that of `map` and `unmap`.
    pub(crate) fn of(map_ns: u64, unmap_ns: u64, map: &Phase, unmap: &Phase) -> Self {
        let ratio = |slow: u64, fast: u64| rounded(slow as f64 / fast.max(1) as f64);
        Self { map: ratio(map_ns, map.table_ns), unmap: ratio(unmap_ns, unmap.table_ns) }
    }
}

/// With three decimals: more would be noise.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
pub(crate) mod examples {
    //! Reports for tests.

    use super::*;

    pub(crate) fn phase(total_ns: u64) -> Phase {
        Phase { pin_ns: total_ns / 2, lookup_ns: 41_000, table_ns: 4100, total_ns, gibps: 82.6 }
    }

    pub(crate) fn report() -> Report {
        let figures = Figures {
            memory: "thp",
            spans: 7,
            leaves: BTreeMap::from([(4096, 3), (2 << 20, 512)]),
            table_bytes: 12288,
            map: phase(12_100_000),
            unmap: phase(4_000_000),
            per_page: PerPageTimes { map_table_ns: 3_100_000, unmap_table_ns: 2_000_000 },
            table_speedup: Speedup { map: 756.1, unmap: 0.5 },
            verified_bytes: 1 << 30,
        };
        let skipped = Skipped { memory: "hugetlb", skipped: "no pool: do this".to_owned() };
        Report {
            size_bytes: 1 << 30,
            granule: 4096,
            runs: 5,
            pin: "io_uring",
            frames: "physical",
            rows: vec![Row::Figures(Box::new(figures)), Row::Skipped(skipped)],
            verified_bytes: 1 << 30,
            stale_translations: 0,
            notes: vec!["a note".to_owned()],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dmaspan_linux::PinnerStats;

    use super::*;

    #[test]
    fn gibps_are_gib_of_memory_in_seconds_of_the_total() {
        let mut series = Series::default();
        series.add_map(Duration::from_millis(47), PinnerStats::default());
        // The first line of the table that the program is measured against: 16 GiB in 47 ms.
        assert!((Phase::of(&series, 16 << 30).gibps - 340.4).abs() < 0.1);
        assert!(Phase::of(&Series::default(), 1).gibps.is_finite());
    }

    #[test]
    fn a_speedup_is_finite_even_where_a_clock_saw_nothing() {
        let phase = Phase { table_ns: 0, ..examples::phase(1) };
        assert_eq!(Speedup::of(10, 20, &phase, &phase), Speedup { map: 10.0, unmap: 20.0 });
    }

    #[test]
    fn a_skipped_row_is_no_failure_unless_nothing_ran() {
        let mut report = examples::report();
        assert!(report.passed());
        report.rows.remove(0);
        assert!(!report.passed());
        assert_eq!(report.failures().count(), 1);
        let mut report = examples::report();
        report.rows.push(Row::Failed(Failed { memory: "base", failed: "3 left".to_owned() }));
        assert_eq!(report.failures().collect::<Vec<_>>(), ["base: 3 left"]);
        assert!(!report.passed());
        report.rows.drain(..2);
        assert_eq!(report.failures().collect::<Vec<_>>(), ["base: 3 left"]);
    }
}
