//! The five series for Linux, each beside Linux's own code before it and after it.

mod report;

use super::plan::{self, Comparison, Peer};

pub(super) use report::report;

/// A series, and the versions of Linux between which it came.
#[derive(Debug, PartialEq, Eq)]
pub struct Series {
    pub(super) name: &'static str,
    claim: &'static str,
    before: &'static str,
    after: &'static str,
    /// dmaspan's format, and the part of Linux that does the same.
    format: &'static str,
    peer: &'static Peer,
    cases: &'static [Case],
    /// The place of the case that the series is about.
    main: usize,
    /// What the table does not show, and why.
    note: &'static str,
}

/// Something that both sides do.
#[derive(Debug, PartialEq, Eq)]
struct Case {
    title: &'static str,
    /// What dmaspan's benchmark calls it, and Linux's.
    own: &'static str,
    theirs: &'static str,
    /// Each with how many times less it takes with the series, as the authors measured it; empty
    /// where they did not. `unmap_rest` is what an unmap does but for look-ups of addresses, and is
    /// counted alone.
    operations: &'static [(&'static str, &'static str)],
}

const fn case(
    title: &'static str,
    [own, theirs]: [&'static str; 2],
    operations: &'static [(&'static str, &'static str)],
) -> Case {
    Case { title, own, theirs, operations }
}

/// An unmap without look-ups of addresses.
const REST: &str = "unmap_rest";
const NOT_CLAIMED: &[(&str, &str)] = &[("map", ""), ("unmap", "")];

/// All series, in the order of the layers from tables to programs.
pub(super) const ALL: [Series; 5] = [
    Series {
        name: "map-pages",
        claim: "one call for many pages of one size walks the tables once",
        before: "5.10",
        after: "6.1",
        format: "lpae",
        peer: &plan::IO_PGTABLE_ARM,
        cases: &[
            case(
                "1 page of 4K",
                ["domain_4k_1", "4k_1_core"],
                &[("map", "1.00×"), ("unmap", "1.62×")],
            ),
            case("8 pages", ["domain_4k_8", "4k_8_core"], &[("map", "2.50×"), ("unmap", "1.93×")]),
            case(
                "32 pages",
                ["domain_4k_32", "4k_32_core"],
                &[("map", "9.00×"), ("unmap", "2.39×")],
            ),
            case(
                "64 pages",
                ["domain_4k_64", "4k_64_core"],
                &[("map", "9.25×"), ("unmap", "2.43×")],
            ),
            case(
                "256 pages",
                ["domain_4k_256", "4k_256_core"],
                &[("map", "17.5×"), ("unmap", "2.79×")],
            ),
        ],
        main: 4,
        note: "iommu_map() and iommu_unmap() over io-pgtable-arm, beside a Domain. The series \
               measured the DMA API with an SMMUv3, whose answer its unmaps wait for.",
    },
    Series {
        name: "swiotlb",
        claim: "a lock for each area of the pool in place of one (patch 1 of 3)",
        before: "5.10",
        after: "6.1",
        format: "swiotlb",
        peer: &plan::SWIOTLB,
        cases: &[
            case(
                "256 slots of 4K, 1 thread",
                ["burst256_4k_threads_1", "burst256_4k_threads_1"],
                &[("pair", "1.04–1.12×")],
            ),
            case("1 slot, 1 thread", ["pair_4k_threads_1", "pair_4k_threads_1"], &[("pair", "")]),
            case(
                "256 slots, 2 threads",
                ["burst256_4k_threads_2", "burst256_4k_threads_2"],
                &[("pair", "2.30–2.64×")],
            ),
            case("1 slot, 2 threads", ["pair_4k_threads_2", "pair_4k_threads_2"], &[("pair", "")]),
        ],
        main: 2,
        note: "A slot is taken and released, without copies. No Linux has patches 2 and 3, which \
               the claim's figures are with, of whole I/Os by 1 and 4 jobs. Instructions do not \
               show who waits for a lock; two threads want two CPUs that do nothing else.",
    },
    Series {
        name: "large-folios",
        claim: "VFIO type1 pins and unpins all of a large folio at once",
        before: "6.12",
        after: "7.2",
        format: "container_lpae",
        peer: &plan::TYPE1_ARM,
        cases: &[
            case(
                "256 MiB of THP",
                ["256m_thp_cheap", "256m_thp_cheap"],
                &[("map", "1.74×"), ("unmap", ""), ("unmap_rest", "3.00×")],
            ),
            case(
                "1 GiB of hugetlb, 1G",
                ["1g_hugetlb_cheap", "1g_hugetlb_cheap"],
                &[("map", "1.68×"), ("unmap", ""), ("unmap_rest", "3.02×")],
            ),
            case(
                "256 MiB of base pages",
                ["256m_base_cheap", "256m_base_cheap"],
                &[("map", "0.97×"), ("unmap", ""), ("unmap_rest", "1.08×")],
            ),
            case("256 MiB of THP, dear pins", ["256m_thp_dear", "256m_thp_dear"], NOT_CLAIMED),
        ],
        main: 0,
        note: "A kernel pins besides, which is simulated: 4 instructions a page of 4 KiB where \
               pins are cheap, 200 where they are dear, on all sides. rest is an unmap without \
               look-ups of addresses: both Linuxes look each page up in the IOMMU's table, and \
               io-pgtable-arm's look-up became slower between them, by another change.",
    },
    Series {
        name: "huge-pfnmaps",
        claim: "VFIO type1 follows a BAR by the leaves of the CPU's tables",
        before: "6.12",
        after: "7.2",
        format: "container_lpae",
        peer: &plan::TYPE1_ARM,
        cases: &[
            case(
                "1 GiB of a BAR by 1G leaves",
                ["1g_bar_by_1g_cheap", "1g_bar_by_1g_cheap"],
                &[("map", ">1000×"), ("unmap", ""), ("unmap_rest", "")],
            ),
            case("by 2M leaves", ["1g_bar_by_2m_cheap", "1g_bar_by_2m_cheap"], NOT_CLAIMED),
            case("by 4K leaves", ["1g_bar_by_4k_cheap", "1g_bar_by_4k_cheap"], NOT_CLAIMED),
        ],
        main: 0,
        note: "A look-up of a leaf is simulated: 100 instructions and a lock, on all sides. The \
               series has 32 GiB: some 8388608 look-ups that become 32.",
    },
    Series {
        name: "registered",
        claim: "io_uring keeps a registered buffer of huge pages as that many pieces",
        before: "6.1",
        after: "6.12",
        format: "registered",
        peer: &plan::RSRC,
        cases: &[
            case(
                "8 MiB in 2M pages, all pieces",
                ["walk_8m_256m_thp", "walk_8m_256m_thp"],
                &[("pair", "512×")],
            ),
            case("1 MiB, all pieces", ["walk_1m_256m_thp", "walk_1m_256m_thp"], &[("pair", "")]),
            case(
                "1 MiB, the first piece",
                ["import_1m_256m_thp", "import_1m_256m_thp"],
                &[("pair", "")],
            ),
            case(
                "256 MiB registered, and its end",
                ["256m_thp_cheap", "256m_thp_cheap"],
                &[("pair", "")],
            ),
        ],
        main: 0,
        note: "An I/O imports a part of a buffer and looks at its pieces. The claim is of the \
               pieces: 2048 that become 4; the series has shares of a profile.",
    },
];

/// The series of these names, with commas between them.
pub(super) fn named(value: &str) -> Result<Vec<&'static Series>, String> {
    let names: Vec<&str> = ALL.iter().map(|series| series.name).collect();
    let all = names.join(", ");
    let none = |name| format!("there is no series `{name}`; there are {all}");
    let known = |name| ALL.iter().find(|series| series.name == name).ok_or_else(|| none(name));
    value.split(',').map(known).collect()
}

/// The versions of Linux that are needed, oldest first.
pub(super) fn versions(series: &[&Series]) -> Vec<&'static str> {
    let is_needed =
        |version| series.iter().any(|series| [series.before, series.after].contains(&version));
    plan::LINUXES.into_iter().filter(|version| is_needed(*version)).collect()
}

impl Series {
    /// Its cases with both versions of Linux.
    fn comparisons(&self) -> impl Iterator<Item = Comparison> + '_ {
        [self.before, self.after].into_iter().flat_map(move |version| {
            self.cases.iter().flat_map(move |case| {
                let operations = case.operations.iter();
                let timed = operations.filter(|(operation, _)| *operation != REST);
                timed.map(move |&(operation, _)| self.comparison(version, case, operation))
            })
        })
    }

    fn comparison(
        &self,
        version: &'static str,
        case: &Case,
        operation: &'static str,
    ) -> Comparison {
        let own = (self.format, case.own);
        Comparison::with(own, operation, version, (self.peer, case.theirs))
    }
}

/// What all of them compare.
pub(super) fn comparisons(series: &[&'static Series]) -> Vec<Comparison> {
    series.iter().flat_map(|series| series.comparisons()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_has_two_versions_that_are_built_and_a_case_that_it_is_about() {
        for series in &ALL {
            let place = |version| plan::LINUXES.iter().position(|known| *known == version);
            assert!(place(series.before).unwrap() < place(series.after).unwrap());
            let main = &series.cases[series.main];
            assert!(main.operations.iter().any(|(_, claim)| !claim.is_empty()), "{}", series.name);
        }
        assert_eq!(versions(&[&ALL[0], &ALL[3]]), ["5.10", "6.1", "6.12", "7.2"]);
    }

    #[test]
    fn a_series_that_there_is_not_is_refused_with_those_that_there_are() {
        let names = |value: &str| {
            named(value).map(|all| all.iter().map(|series| series.name).collect::<Vec<_>>())
        };
        assert_eq!(names("registered,swiotlb"), Ok(vec!["registered", "swiotlb"]));
        let error = names("folios").unwrap_err();
        assert!(error.contains("`folios`") && error.contains("large-folios"), "{error}");
    }

    #[test]
    fn every_case_is_compared_with_both_versions() {
        let all = comparisons(&[&ALL[2]]);
        assert_eq!(all.len(), 2 * 4 * 2);
        let is_of = |version| all.iter().filter(|one| one.version == version).count();
        assert_eq!((is_of("6.12"), is_of("7.2")), (8, 8));
    }
}
