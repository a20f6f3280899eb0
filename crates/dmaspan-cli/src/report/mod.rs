//! The report of `map`: its values, as JSON and tables show them.

pub(crate) mod metrics;
pub(crate) mod page;
mod real_table;
pub(crate) mod table;

use std::collections::BTreeMap;

use dmaspan_linux::vfio::{Backend, Requests};
use serde::Serialize;

use crate::doctor::CheckRow;
use crate::pinned::Witness;
use dmaspan_cli::series::{HUGE_PFNMAPS, LARGE_FOLIOS, SeriesValue};
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::{Series, rounded};
use dmaspan_cli::units::page_size;

/// What came of a run. Its public part is what `--format json` prints; what a backend does not
/// tell is absent there.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// The machine before the run, as `dmaspan doctor` says it.
    pub(crate) machine: Vec<CheckRow>,
    /// What mapped: `soft`, `vfio`, `iommufd` or `compat`.
    pub(crate) backend: &'static str,
    #[serde(flatten)]
    pub(crate) real: Option<RealDevice>,
    pub(crate) size_bytes: u64,
    pub(crate) granule: u64,
    pub(crate) runs: u32,
    /// What pinned for the software IOMMU. A kernel that maps pins by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pin: Option<&'static str>,
    /// What spans are of; absent where a BAR is mapped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) frames: Option<&'static str>,
    pub(crate) rows: Vec<Row>,
    pub(crate) verified_bytes: u64,
    /// `None` where no device tried its addresses after the unmap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stale_translations: Option<u64>,
    /// What a user should know to understand the figures.
    #[serde(skip)]
    pub(crate) notes: Vec<String>,
}

/// A real device, and what its IOMMU can map.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RealDevice {
    pub(crate) device: String,
    /// Which of its BARs is mapped; absent where memory is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bar: Option<u32>,
    #[serde(skip)]
    pub(crate) backend: Backend,
    pub(crate) iommu: Iommu,
}

/// What an IOMMU can map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Iommu {
    /// The first and the last IOVA of each.
    pub(crate) apertures: Vec<[u64; 2]>,
    /// In bytes. iommufd tells the smallest alone.
    pub(crate) page_sizes: Vec<u64>,
    /// How many mappings there may be; null where nothing limits them.
    pub(crate) mappings_limit: Option<u64>,
}

/// One kind of memory.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Row {
    /// It was measured.
    Figures(Box<Figures>),
    /// This machine, or this process on it, cannot do it: why.
    Skipped { memory: String, skipped: String },
    /// It went wrong: the first that did.
    Failed { memory: String, failed: String },
}

/// What was measured with one kind of memory, or a BAR. Times are medians.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    pub(crate) memory: String,
    pub(crate) spans: usize,
    #[serde(flatten)]
    pub(crate) by: By,
    pub(crate) verified_bytes: u64,
    /// What showed that the memory was pinned; absent where nothing is.
    #[serde(rename = "pin_witness", skip_serializing_if = "Option::is_none")]
    pub(crate) witness: Option<Witness>,
    /// What a series for Linux measured of such memory; absent where none did.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) series: Vec<SeriesValue>,
}

/// What a backend tells.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum By {
    /// The software IOMMU.
    Tables {
        /// By size in bytes.
        leaves: BTreeMap<u64, u64>,
        table_bytes: u64,
        #[serde(flatten)]
        times: Both<Phase>,
        per_page: PerPageTimes,
        table_speedup: Both<f64>,
    },
    /// The kernel.
    Requests {
        /// Of one map and one unmap.
        ioctls: Both<u64>,
        #[serde(flatten)]
        times: Both<Times>,
        per_page: PerPageRequests,
        /// How many times more bytes in a second than one page at a time.
        speedup: Both<f64>,
    },
    /// The kernel, of registers.
    Bar(BarFigures),
}

/// What was measured with a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct BarFigures {
    pub(crate) bytes: u64,
    /// What its address in this process is a multiple of, no more than the largest leaf.
    pub(crate) alignment: u64,
    /// Of one map and one unmap.
    pub(crate) ioctls: Both<u64>,
    #[serde(flatten)]
    pub(crate) times: Both<Times>,
}

/// The two operations that are measured.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Map,
    Unmap,
}

/// What is said of a map and of an unmap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Both<T> {
    pub(crate) map: T,
    pub(crate) unmap: T,
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

/// How long the kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Times {
    pub(crate) total_ns: u64,
    pub(crate) gibps: f64,
}

/// How long the kernel takes where each page is asked for by itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct PerPageRequests {
    /// How many pages that was tried with.
    pub(crate) pages: u64,
    pub(crate) page_bytes: u64,
    /// Of all these pages.
    pub(crate) ioctls: Both<u64>,
    /// Of all these pages.
    pub(crate) map_ns: u64,
    pub(crate) unmap_ns: u64,
}

/// How long tables take one page at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PerPageTimes {
    pub(crate) map_table_ns: u64,
    pub(crate) unmap_table_ns: u64,
}

impl Report {
    /// The figures of the rows that have some.
    pub(crate) fn figures(&self) -> Vec<&Figures> {
        let rows = self.rows.iter().filter_map(|row| match row {
            Row::Figures(figures) => Some(&**figures),
            _ => None,
        });
        rows.collect()
    }

    /// One without rows.
    pub(crate) fn new(backend: &'static str, granule: u64, runs: u32) -> Self {
        Self {
            machine: Vec::new(),
            backend,
            real: None,
            size_bytes: 0,
            granule,
            runs,
            pin: None,
            frames: None,
            rows: Vec::new(),
            verified_bytes: 0,
            stale_translations: None,
            notes: Vec::new(),
        }
    }

    /// Whether everything that ran was right, and anything ran.
    pub(crate) fn passed(&self) -> bool {
        self.failures().next().is_none()
    }

    /// Everything that went wrong.
    pub(crate) fn failures(&self) -> impl Iterator<Item = String> {
        let nothing_ran = self.rows.iter().all(|row| matches!(row, Row::Skipped { .. }));
        let nothing =
            nothing_ran.then(|| "nothing was mapped: no kind of memory could be used".to_owned());
        let failed = self.rows.iter().filter_map(|row| match row {
            Row::Failed { memory, failed } => Some(format!("{memory}: {failed}")),
            _ => None,
        });
        failed.chain(nothing)
    }
}

impl Phase {
    /// The medians of `series`, of operations on `bytes` bytes each.
    pub(crate) fn of(series: &Series, bytes: u64) -> Self {
        let [pin_ns, lookup_ns, table_ns, total_ns] = series.medians();
        Self { pin_ns, lookup_ns, table_ns, total_ns, gibps: gibps(bytes, total_ns) }
    }
}

impl Times {
    /// The median of `series`, of operations on `bytes` bytes each.
    pub(crate) fn of(series: &Series, bytes: u64) -> Self {
        let [.., total_ns] = series.medians();
        Self { total_ns, gibps: gibps(bytes, total_ns) }
    }
}

/// How the series for large folios calls a kind of memory that a kernel maps.
pub(crate) fn series_case(memory: &str) -> Option<&'static str> {
    match memory {
        "thp" => Some("MADV_HUGEPAGE"),
        "base" => Some("MAP_POPULATE"),
        _ if memory.starts_with("hugetlb") => Some("HUGETLBFS"),
        _ => None,
    }
}

/// What the series for large folios measured of a kind of memory, beside so many bytes of it in
/// pages of such a size.
pub(crate) fn series_of_memory(memory: &str, bytes: u64, page: u64) -> Vec<SeriesValue> {
    let Some(case) = series_case(memory) else { return Vec::new() };
    let size = ByteSize::new(bytes);
    let pages = if case == "HUGETLBFS" {
        format!("; pages of {}, theirs are not told", page_size(page))
    } else {
        String::new()
    };
    LARGE_FOLIOS.values(LARGE_FOLIOS.of(case), &format!("{size} here, 16 GiB there{pages}"))
}

/// What the series for huge pfnmaps measured, beside a BAR of so many bytes at a multiple of so
/// many.
pub(crate) fn series_of_bar(bytes: u64, alignment: u64) -> Vec<SeriesValue> {
    let (size, alignment) = (ByteSize::new(bytes), page_size(alignment));
    let differs = format!("{size}, aligned to {alignment}; theirs is a GPU's");
    HUGE_PFNMAPS.values(HUGE_PFNMAPS.of("BAR 32G"), &differs)
}

/// GiB in a second.
pub(crate) fn gibps(bytes: u64, ns: u64) -> f64 {
    let seconds = ns.max(1) as f64 / 1e9;
    rounded(bytes as f64 / (1u64 << 30) as f64 / seconds)
}

impl Way {
    pub(crate) const ALL: [Self; 2] = [Self::Map, Self::Unmap];

    /// What stands above its rows.
    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Map => "MAP",
            Self::Unmap => "UNMAP",
        }
    }
}

impl<T> Both<T> {
    pub(crate) const fn of(&self, way: Way) -> &T {
        match way {
            Way::Map => &self.map,
            Way::Unmap => &self.unmap,
        }
    }

    /// What `f` makes of either.
    pub(crate) fn map<U>(&self, f: impl Fn(&T) -> U) -> Both<U> {
        Both { map: f(&self.map), unmap: f(&self.unmap) }
    }
}

impl Both<u64> {
    /// The requests to the kernel.
    pub(crate) const fn ioctls(requests: Requests) -> Self {
        Self { map: requests.maps, unmap: requests.unmaps }
    }

    /// How many times longer these times are than `fast`, for `scale` times as much.
    pub(crate) fn speedup(self, scale: f64, fast: Self) -> Both<f64> {
        let ratio = |slow: u64, fast: u64| rounded(slow as f64 * scale / fast.max(1) as f64);
        Both { map: ratio(self.map, fast.map), unmap: ratio(self.unmap, fast.unmap) }
    }
}

impl PerPageRequests {
    /// The bytes of all pages.
    pub(crate) const fn bytes(&self) -> u64 {
        self.pages.saturating_mul(self.page_bytes)
    }

    /// How long all pages took together.
    pub(crate) const fn times(&self) -> Both<u64> {
        Both { map: self.map_ns, unmap: self.unmap_ns }
    }

    /// How many times faster `bytes` are mapped and unmapped in these times, by the byte.
    pub(crate) fn speedup(&self, bytes: u64, times: Both<Times>) -> Both<f64> {
        let scale = bytes as f64 / self.bytes().max(1) as f64;
        self.times().speedup(scale, times.map(|times| times.total_ns))
    }
}

impl PerPageTimes {
    /// Of mapping and of unmapping all pages.
    pub(crate) const fn times(&self) -> Both<u64> {
        Both { map: self.map_table_ns, unmap: self.unmap_table_ns }
    }

    /// How many times faster the tables of `spans` are.
    pub(crate) fn speedup(&self, spans: &Both<Phase>) -> Both<f64> {
        self.times().speedup(1.0, spans.map(|phase| phase.table_ns))
    }
}

#[cfg(test)]
mod shape;
#[cfg(test)]
pub(crate) mod examples {
    //! Reports for tests.

    use super::*;

    pub(crate) fn phase(total_ns: u64) -> Phase {
        Phase { pin_ns: total_ns / 2, lookup_ns: 41_000, table_ns: 4100, total_ns, gibps: 82.6 }
    }

    pub(crate) fn report() -> Report {
        let figures = Figures {
            memory: "thp".to_owned(),
            spans: 7,
            by: By::Tables {
                leaves: BTreeMap::from([(4096, 3), (2 << 20, 512)]),
                table_bytes: 12288,
                times: Both { map: phase(12_100_000), unmap: phase(4_000_000) },
                per_page: PerPageTimes { map_table_ns: 3_100_000, unmap_table_ns: 2_000_000 },
                table_speedup: Both { map: 756.1, unmap: 0.5 },
            },
            verified_bytes: 1 << 30,
            witness: Some(Witness::Process("VmPin")),
            series: Vec::new(),
        };
        let skipped =
            Row::Skipped { memory: "hugetlb".to_owned(), skipped: "no pool: do this".to_owned() };
        Report {
            machine: Vec::new(),
            backend: "soft",
            real: None,
            size_bytes: 1 << 30,
            granule: 4096,
            runs: 5,
            pin: Some("io_uring"),
            frames: Some("physical"),
            rows: vec![Row::Figures(Box::new(figures)), skipped],
            verified_bytes: 1 << 30,
            stale_translations: Some(0),
            notes: vec!["a note".to_owned()],
        }
    }

    /// A report of a real device.
    pub(crate) fn real_report() -> Report {
        let per_page = PerPageRequests {
            pages: 8192,
            page_bytes: 4096,
            ioctls: Both { map: 8192, unmap: 8193 },
            map_ns: 40_000_000,
            unmap_ns: 20_000_000,
        };
        let times = Both {
            map: Times { total_ns: 12_100_000, gibps: 82.6 },
            unmap: Times { total_ns: 4_000_000, gibps: 250.0 },
        };
        let figures = Figures {
            memory: "thp".to_owned(),
            spans: 7,
            by: By::Requests {
                ioctls: Both { map: 1, unmap: 2 },
                times,
                speedup: per_page.speedup(1 << 30, times),
                per_page,
            },
            verified_bytes: 0,
            witness: Some(Witness::Process("VmPin")),
            series: series_of_memory("thp", 1 << 30, 4096),
        };
        let iommu = Iommu {
            apertures: vec![[0, 0xfedf_ffff], [0xfef0_0000, (1 << 39) - 1]],
            page_sizes: vec![4096, 2 << 20, 1 << 30],
            mappings_limit: Some(65535),
        };
        let device = "0000:00:05.0".to_owned();
        let mut report = report();
        report.rows[0] = Row::Figures(Box::new(figures));
        report.real = Some(RealDevice { device, bar: None, backend: Backend::Vfio, iommu });
        Report { backend: "vfio", pin: None, verified_bytes: 0, stale_translations: None, ..report }
    }

    /// A report of registers.
    pub(crate) fn bar_report() -> Report {
        let mut report = real_report();
        let bytes = 32 << 30;
        let figures = Figures {
            memory: "bar 2".to_owned(),
            spans: 1,
            by: By::Bar(BarFigures {
                bytes,
                alignment: 1 << 30,
                ioctls: Both { map: 1, unmap: 1 },
                times: Both {
                    map: Times { total_ns: 1_250_000, gibps: 25600.0 },
                    unmap: Times { total_ns: 625_000, gibps: 51200.0 },
                },
            }),
            verified_bytes: 0,
            witness: None,
            series: series_of_bar(bytes, 1 << 30),
        };
        report.rows = vec![Row::Figures(Box::new(figures))];
        if let Some(real) = &mut report.real {
            real.bar = Some(2);
        }
        Report { size_bytes: bytes, frames: None, ..report }
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
        let per_page = PerPageTimes { map_table_ns: 10, unmap_table_ns: 20 };
        let speedup = per_page.speedup(&Both { map: phase, unmap: phase });
        assert_eq!(speedup, Both { map: 10.0, unmap: 20.0 });
    }

    #[test]
    fn requests_for_pages_are_compared_by_the_byte() {
        let report = examples::real_report();
        let Row::Figures(figures) = &report.rows[0] else { panic!("{report:?}") };
        let By::Requests { speedup, .. } = &figures.by else { panic!("{figures:?}") };
        // 8192 pages are a 32nd of 1 GiB.
        assert_eq!(*speedup, Both { map: 105.785, unmap: 160.0 });
    }

    #[test]
    fn a_skipped_row_is_no_failure_unless_nothing_ran() {
        let mut report = examples::report();
        assert!(report.passed());
        report.rows.remove(0);
        assert!(!report.passed());
        assert_eq!(report.failures().count(), 1);
        let mut report = examples::report();
        report.rows.push(Row::Failed { memory: "base".to_owned(), failed: "3 left".to_owned() });
        assert_eq!(report.failures().collect::<Vec<_>>(), ["base: 3 left"]);
        assert!(!report.passed());
        report.rows.drain(..2);
        assert_eq!(report.failures().collect::<Vec<_>>(), ["base: 3 left"]);
    }
}
