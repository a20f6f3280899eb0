//! The measurements by the authors of five series for Linux, to stand beside those of the
//! benchmarks.
//!
//! The figures are theirs, digit by digit. What differs between their machine and ours stands with
//! each of them where it is shown: whoever shows it knows what it ran.

use serde::Serialize;

use crate::units;

/// What one series measured.
#[derive(Clone, Copy, Debug)]
pub struct SeriesTable {
    /// What the series did, in a few words.
    pub title: &'static str,
    /// When and where its figures were published.
    pub source: &'static str,
    /// On what they were measured, as far as the authors say.
    pub machine: &'static str,
    /// The figures, in the order of the authors.
    pub rows: &'static [SeriesRow],
}

/// One figure, before the series and with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeriesRow {
    /// What was done, as our benchmark of it calls that.
    pub case: &'static str,
    /// What was measured of it.
    pub figure: &'static str,
    /// In what; empty for a count.
    pub unit: &'static str,
    /// What it was without the series; `None` where it was not there, or not told.
    pub before: Option<Told>,
    /// What it was with the series; `None` likewise.
    pub after: Option<Told>,
}

/// A number as it was told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Told {
    /// It.
    Exactly(f64),
    /// About so much.
    About(f64),
    /// Less than that.
    Below(f64),
    /// More than that.
    Above(f64),
}

use Told::{About, Above, Below, Exactly};

/// One number of a series, as `series` in the JSON of a row has it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SeriesValue {
    /// What was measured.
    pub figure: &'static str,
    /// `before` the series or `after` it.
    pub when: &'static str,
    /// The number.
    pub value: f64,
    /// `=`, `~`, `<` or `>`: how exactly it was told.
    pub sign: &'static str,
    /// In what; empty for a count.
    pub unit: &'static str,
    /// On what it was measured.
    pub machine: &'static str,
    /// What differs between that and the row that it stands in.
    pub differs: String,
}

impl SeriesValue {
    /// The number as it was told, with its unit.
    pub fn shown(&self) -> String {
        let sign = if self.sign == "=" { "" } else { self.sign };
        let text = format!("{sign}{} {}", self.value, self.unit);
        text.trim_end().to_owned()
    }
}

impl Told {
    /// The number, and the sign before it.
    pub const fn parts(self) -> (&'static str, f64) {
        match self {
            Exactly(value) => ("=", value),
            About(value) => ("~", value),
            Below(value) => ("<", value),
            Above(value) => (">", value),
        }
    }

    /// The number as it was told: without a sign where it is exact.
    fn shown(self) -> String {
        match self.parts() {
            ("=", value) => format!("{value}"),
            (sign, value) => format!("{sign}{value}"),
        }
    }
}

impl SeriesRow {
    /// `14 → 0.8`; `-` for what was not there.
    pub fn shown(&self) -> String {
        self.both(|told| told.map_or_else(|| "-".to_owned(), Told::shown))
    }

    /// The same with at most three digits of each, for narrow tables.
    pub fn shown_short(&self) -> String {
        self.both(|told| {
            told.map_or_else(
                || "-".to_owned(),
                |told| match told.parts() {
                    (_, value) if value >= 100.0 => units::three_digits(value),
                    _ => told.shown(),
                },
            )
        })
    }

    fn both(&self, show: impl Fn(Option<Told>) -> String) -> String {
        let [before, after] = [self.before, self.after].map(show);
        format!("{before} → {after}")
    }

    /// The first number by the second: how many times less it is with the series. `None` where one
    /// of them was not told.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.before?.parts().1 / self.after?.parts().1)
    }
}

impl SeriesTable {
    /// A figure of a case.
    pub fn row(&self, case: &str, figure: &str) -> Option<&'static SeriesRow> {
        self.of(case).find(|row| row.figure == figure)
    }

    /// All figures of a case.
    pub fn of(&self, case: &str) -> impl Iterator<Item = &'static SeriesRow> {
        self.rows.iter().filter(move |row| row.case == case)
    }

    /// All numbers of some rows, for the JSON of what `differs` so from the authors' machine.
    pub fn values<'r>(
        &self,
        rows: impl IntoIterator<Item = &'r SeriesRow>,
        differs: &str,
    ) -> Vec<SeriesValue> {
        let machine = self.machine;
        let of = |row: &'r SeriesRow| {
            let told = [("before", row.before), ("after", row.after)];
            told.into_iter().filter_map(move |(when, told)| {
                let (sign, value) = told?.parts();
                let (figure, unit, differs) = (row.figure, row.unit, differs.to_owned());
                Some(SeriesValue { figure, when, value, sign, unit, machine, differs })
            })
        };
        rows.into_iter().flat_map(of).collect()
    }
}

/// All series, in the order of the layers from tables to programs.
pub const ALL: [&SeriesTable; 5] =
    [&MAP_PAGES, &SWIOTLB, &LARGE_FOLIOS, &HUGE_PFNMAPS, &FIXED_BUFFERS];

const fn exact(
    case: &'static str,
    figure: &'static str,
    unit: &'static str,
    [before, after]: [f64; 2],
) -> SeriesRow {
    let (before, after) = (Some(Exactly(before)), Some(Exactly(after)));
    SeriesRow { case, figure, unit, before, after }
}

/// Microseconds of a buffer.
const fn map(case: &'static str, us: [f64; 2]) -> SeriesRow {
    exact(case, "map", "µs", us)
}

const fn unmap(case: &'static str, us: [f64; 2]) -> SeriesRow {
    exact(case, "unmap", "µs", us)
}

/// `map_pages` and `unmap_pages` for page tables and drivers.
pub const MAP_PAGES: SeriesTable = SeriesTable {
    title: "one call for many pages of an IOMMU's tables",
    source: "iommu list, 15 July 2021, on version 7 of the series; in Linux 5.15",
    machine: "an SMMUv3, dma_map_benchmark; which CPUs is not told",
    rows: &[
        map("t=1 g=1", [0.1, 0.1]),
        unmap("t=1 g=1", [1.3, 0.8]),
        map("t=1 g=2", [0.2, 0.2]),
        unmap("t=1 g=2", [1.5, 0.9]),
        map("t=1 g=4", [0.3, 0.1]),
        unmap("t=1 g=4", [1.9, 1.1]),
        map("t=1 g=8", [0.5, 0.2]),
        unmap("t=1 g=8", [2.7, 1.4]),
        map("t=1 g=16", [1.0, 0.2]),
        unmap("t=1 g=16", [4.5, 2.0]),
        map("t=1 g=32", [1.8, 0.2]),
        unmap("t=1 g=32", [7.9, 3.3]),
        map("t=1 g=64", [3.7, 0.4]),
        unmap("t=1 g=64", [14.8, 6.1]),
        map("t=1 g=128", [7.1, 0.5]),
        unmap("t=1 g=128", [14.7, 10.4]),
        map("t=1 g=256", [14.0, 0.8]),
        unmap("t=1 g=256", [53.9, 19.3]),
        map("t=1 g=512", [0.2, 0.2]),
        unmap("t=1 g=512", [0.9, 0.9]),
        map("t=1 g=1024", [0.5, 0.4]),
        unmap("t=1 g=1024", [1.5, 1.0]),
        map("t=10 g=1", [0.3, 0.1]),
        unmap("t=10 g=1", [7.0, 5.8]),
        map("t=10 g=2", [0.4, 0.3]),
        unmap("t=10 g=2", [6.7, 6.0]),
        map("t=10 g=4", [0.5, 0.3]),
        unmap("t=10 g=4", [6.3, 5.6]),
        map("t=10 g=8", [0.5, 0.2]),
        unmap("t=10 g=8", [8.3, 6.3]),
        map("t=10 g=16", [1.0, 0.3]),
        unmap("t=10 g=16", [17.3, 12.4]),
        map("t=10 g=32", [1.8, 0.2]),
        unmap("t=10 g=32", [36.0, 24.2]),
        map("t=10 g=64", [4.3, 1.2]),
        unmap("t=10 g=64", [67.2, 46.4]),
        map("t=10 g=128", [7.8, 1.3]),
        unmap("t=10 g=128", [93.7, 94.2]),
        map("t=10 g=256", [14.7, 1.8]),
        unmap("t=10 g=256", [280.8, 191.5]),
        map("t=10 g=512", [3.6, 1.5]),
        unmap("t=10 g=512", [3.2, 2.5]),
        map("t=10 g=1024", [2.0, 1.8]),
        unmap("t=10 g=1024", [3.1, 2.6]),
    ],
};

const fn mbps(case: &'static str, values: [f64; 2]) -> SeriesRow {
    exact(case, "bandwidth", "MB/s", values)
}

const fn kiops(case: &'static str, values: [f64; 2]) -> SeriesRow {
    exact(case, "I/Os", "k/s", values)
}

const fn host(case: &'static str, values: [f64; 2]) -> SeriesRow {
    exact(case, "host CPU", "%", values)
}

const fn guest(case: &'static str, values: [f64; 2]) -> SeriesRow {
    exact(case, "guest CPU", "%", values)
}

/// The lock of bounce buffers split, free slots in a bitmap, warm slots first.
pub const SWIOTLB: SeriesTable = SeriesTable {
    title: "swiotlb: a lock for each area, a bitmap, slots in an order that caches like",
    source: "cover letter of 28 June 2022, on 5.19-rc2; the split lock is in Linux 6.0, the rest \
        is not in 7.2",
    machine: "a guest of 8 CPUs and 32 GB, swiotlb=force, fio of 4K with 256 out",
    rows: &[
        mbps("1 job read", [1037.0, 1160.0]),
        kiops("1 job read", [253.0, 283.0]),
        host("1 job read", [228.48, 232.32]),
        guest("1 job read", [101.92, 101.12]),
        mbps("1 job write", [1148.0, 1195.0]),
        kiops("1 job write", [280.0, 292.0]),
        host("1 job write", [233.28, 233.28]),
        guest("1 job write", [100.96, 100.64]),
        mbps("4 jobs read", [885.0, 2320.0]),
        kiops("4 jobs read", [214.9, 567.0]),
        host("4 jobs read", [527.04, 344.64]),
        guest("4 jobs read", [401.12, 202.8]),
        mbps("4 jobs write", [868.0, 1998.0]),
        kiops("4 jobs write", [212.1, 488.0]),
        host("4 jobs write", [531.84, 312.0]),
        guest("4 jobs write", [400.64, 173.92]),
    ],
};

const fn seconds(case: &'static str, figure: &'static str, values: [f64; 2]) -> SeriesRow {
    exact(case, figure, "s", values)
}

/// GiB a second, which the unit test calls GB/s.
const fn rate(case: &'static str, figure: &'static str, values: [f64; 2]) -> SeriesRow {
    exact(case, figure, "GB/s", values)
}

/// VFIO type1 counts, pins and unpins the pages of a large folio at once.
pub const LARGE_FOLIOS: SeriesTable = SeriesTable {
    title: "VFIO type1: all pages of a large folio at once",
    source: "cover letter of 30 June 2025, on 6.16-rc4; in Linux 6.18",
    machine: "vfio-pci-mem-dma-map of 16 GiB, 6.16-rc4",
    rows: &[
        seconds("MADV_HUGEPAGE", "map", [0.047, 0.027]),
        rate("MADV_HUGEPAGE", "map rate", [340.2, 596.4]),
        seconds("MADV_HUGEPAGE", "unmap", [0.135, 0.045]),
        rate("MADV_HUGEPAGE", "unmap rate", [118.6, 357.6]),
        seconds("MAP_POPULATE", "map", [0.28, 0.288]),
        rate("MAP_POPULATE", "map rate", [57.2, 55.5]),
        seconds("MAP_POPULATE", "unmap", [0.312, 0.288]),
        rate("MAP_POPULATE", "unmap rate", [51.3, 55.6]),
        seconds("HUGETLBFS", "map", [0.052, 0.031]),
        rate("HUGETLBFS", "map rate", [310.5, 508.3]),
        seconds("HUGETLBFS", "unmap", [0.136, 0.045]),
        rate("HUGETLBFS", "unmap rate", [117.3, 352.9]),
    ],
};

/// VFIO type1 follows what a leaf of the CPU's tables maps as one piece.
pub const HUGE_PFNMAPS: SeriesTable = SeriesTable {
    title: "VFIO type1: registers followed by the CPU's leaves",
    source: "request for Ubuntu's 6.14, 29 May 2025; in Linux 6.15",
    machine: "a local test system; the boot on DGX H100, 6.14",
    rows: &[
        SeriesRow {
            case: "BAR 32G",
            figure: "look-ups",
            unit: "",
            before: Some(About(8_388_608.0)),
            after: Some(Exactly(32.0)),
        },
        SeriesRow {
            case: "BAR 32G",
            figure: "map",
            unit: "s",
            before: Some(About(1.0)),
            after: Some(Below(0.001)),
        },
        SeriesRow {
            case: "a VM with four GPUs",
            figure: "boot",
            unit: "s",
            before: Some(Above(300.0)),
            after: Some(Below(30.0)),
        },
    ],
};

/// A share of all cycles that is gone with the series.
const fn gone(case: &'static str, figure: &'static str, share: f64) -> SeriesRow {
    SeriesRow { case, figure, unit: "% of cycles", before: Some(Exactly(share)), after: None }
}

/// What the series added to the share of a symbol.
const fn grown(case: &'static str, figure: &'static str, share: f64) -> SeriesRow {
    SeriesRow { case, figure, unit: "% of cycles", before: None, after: Some(Exactly(share)) }
}

/// io_uring keeps a registered buffer of several huge pages as that many pieces.
pub const FIXED_BUFFERS: SeriesTable = SeriesTable {
    title: "io_uring: registered buffers of several huge pages, coalesced",
    source: "cover letter of version 4, 2024; in Linux 6.12",
    machine: "fio of 8M, 64 out, fixed buffers of four pages of 2M, an NVMe disk, perf diff",
    rows: &[
        gone("randread", "__blk_rq_map_sg", 4.68),
        gone("randread", "dma_direct_map_sg", 3.31),
        gone("randread", "dma_pool_alloc", 2.64),
        gone("randread", "sg_next", 1.09),
        grown("randread", "dma_map_page_attrs", 0.49),
        gone("randwrite", "__blk_rq_map_sg", 2.82),
        gone("randwrite", "dma_direct_map_sg", 2.05),
        gone("randwrite", "dma_pool_alloc", 1.75),
        gone("randwrite", "sg_next", 0.68),
        grown("randwrite", "dma_map_page_attrs", 0.08),
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_of_a_case_is_there_once() {
        for table in ALL {
            let mut names: Vec<_> = table.rows.iter().map(|row| (row.case, row.figure)).collect();
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count, "{}", table.title);
        }
        assert_eq!(ALL.map(|table| table.rows.len()), [44, 16, 12, 3, 10]);
    }

    #[test]
    fn rates_of_large_folios_are_their_bytes_by_their_seconds() {
        for (case, op) in ["MADV_HUGEPAGE", "MAP_POPULATE", "HUGETLBFS"]
            .into_iter()
            .flat_map(|case| [(case, "map"), (case, "unmap")])
        {
            let seconds = LARGE_FOLIOS.row(case, op).unwrap();
            let rate = LARGE_FOLIOS.row(case, &format!("{op} rate")).unwrap();
            for (seconds, rate) in [(seconds.before, rate.before), (seconds.after, rate.after)] {
                let (seconds, rate) = (seconds.unwrap().parts().1, rate.unwrap().parts().1);
                // Seconds have three decimals.
                assert!((16.0 / (seconds + 0.0006)..=16.0 / (seconds - 0.0006)).contains(&rate));
            }
        }
    }

    #[test]
    fn bandwidth_of_swiotlb_is_that_of_its_ios() {
        for case in ["1 job read", "1 job write", "4 jobs read", "4 jobs write"] {
            let [mbps, kiops] =
                ["bandwidth", "I/Os"].map(|figure| *SWIOTLB.row(case, figure).unwrap());
            for (mbps, kiops) in [(mbps.before, kiops.before), (mbps.after, kiops.after)] {
                let ratio = mbps.unwrap().parts().1 / kiops.unwrap().parts().1;
                assert!((4.0..=4.2).contains(&ratio), "{case}: {ratio}");
            }
        }
    }

    #[test]
    fn what_is_shown_says_how_exact_it_is_and_what_was_not_there() {
        let shown = |table: &SeriesTable, case, figure| table.row(case, figure).unwrap().shown();
        assert_eq!(shown(&MAP_PAGES, "t=1 g=256", "map"), "14 → 0.8");
        assert_eq!(shown(&HUGE_PFNMAPS, "BAR 32G", "map"), "~1 → <0.001");
        assert_eq!(shown(&FIXED_BUFFERS, "randread", "sg_next"), "1.09 → -");
        let row = SWIOTLB.row("4 jobs read", "host CPU").unwrap();
        assert_eq!(
            (row.shown_short(), row.shown()),
            ("527 → 345".into(), "527.04 → 344.64".into())
        );
        let values = FIXED_BUFFERS.values(FIXED_BUFFERS.of("randread"), "no disk");
        assert_eq!(values.len(), 5);
        assert_eq!((values[4].when, values[4].value), ("after", 0.49));
    }
}
