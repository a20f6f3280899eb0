//! The plan says what is compared with what, and what the ratio is to be.

/// Linux is built in these ways, and the faster one counts: `u` as a program of user space, `k`
/// with the kernel's options.
pub(super) const BUILDS: [&str; 2] = ["u", "k"];

/// The versions of Linux that `xtask/peers/shim/versions` has a file for, oldest first.
pub(super) const LINUXES: [&str; 5] = ["5.10", "6.1", "6.12", "7.2", "7.3"];
/// The one that is compared where nobody asks for another: that of the book's tables.
pub(super) const DEFAULT_LINUX: &str = "7.2";

/// One of Linux's page tables.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) name: &'static str,
    /// The program that times it.
    pub(super) program: &'static str,
    /// What the program calls it.
    pub(super) format: &'static str,
}

pub(super) const IO_PGTABLE_ARM: Peer =
    Peer { name: "io-pgtable-arm", program: "io_pgtable", format: "lpae" };
const IO_PGTABLE_ARM_V7S: Peer =
    Peer { name: "io-pgtable-arm-v7s", program: "io_pgtable", format: "v7s" };
const GENERIC_PT_VTDSS: Peer =
    Peer { name: "generic_pt vtdss", program: "generic_pt", format: "vtdss" };
const GENERIC_PT_X86_64: Peer =
    Peer { name: "generic_pt x86_64", program: "generic_pt", format: "x86_64" };
const GENERIC_PT_AMDV1: Peer =
    Peer { name: "generic_pt amdv1", program: "generic_pt", format: "amdv1" };

const IOVA: Peer = Peer { name: "iova.c", program: "iova", format: "iova" };
pub(super) const SWIOTLB: Peer = Peer { name: "swiotlb.c", program: "swiotlb", format: "swiotlb" };
const SWIOTLB_COPY: Peer =
    Peer { name: "swiotlb.c, copies in", program: "swiotlb_copy", format: "swiotlb_copy" };
const DMA_IOMMU_ARM: Peer =
    Peer { name: "dma-iommu.c, arm", program: "dma_lpae", format: "dma_lpae" };
const DMA_IOMMU_VTDSS: Peer =
    Peer { name: "dma-iommu.c, vtdss", program: "dma_vtdss", format: "dma_vtdss" };
pub(super) const TYPE1_ARM: Peer =
    Peer { name: "vfio type1, arm", program: "container_lpae", format: "container_lpae" };
const TYPE1_VTDSS: Peer =
    Peer { name: "vfio type1, vtdss", program: "container_vtdss", format: "container_vtdss" };
pub(super) const RSRC: Peer =
    Peer { name: "io_uring rsrc.c", program: "registered", format: "registered" };

/// dmaspan's formats, in the order of the table, and what each is compared with.
const FORMATS: [(&str, &[&Peer]); 5] = [
    ("lpae", &[&IO_PGTABLE_ARM, &GENERIC_PT_VTDSS]),
    ("vtd_ss", &[&IO_PGTABLE_ARM, &GENERIC_PT_VTDSS]),
    ("v7s", &[&IO_PGTABLE_ARM_V7S]),
    ("x86_64", &[&GENERIC_PT_X86_64]),
    ("amd_v1", &[&GENERIC_PT_AMDV1]),
];

/// Cases of one map and one unmap, by the bits of addresses that they need.
const WIDE_CASES: [&str; 12] = [
    "4k_1",
    "4k_8",
    "4k_64",
    "4k_256",
    "4k_512",
    "4k_512_paged",
    "2m_1",
    "2m_512",
    "16g_4k",
    "16g_2m",
    "scattered_4k_512",
    "scattered_2m_8192",
];
const V7S_CASES: [&str; 6] = ["4k_1", "4k_8", "4k_64", "4k_512", "64k_512", "1m_512"];
/// Cases of an unmap that returns spans, and what Linux's side does instead.
const SPANS_CASES: [(&str, [(&str, &str); 2]); 2] = [
    ("spans_1g", [("spans_1g_by_4k", "by 4K steps"), ("spans_1g_by_2m", "by 2M steps")]),
    (
        "contiguous_1g",
        [("contiguous_1g_by_4k", "by 4K steps"), ("contiguous_1g_by_2m", "by 2M steps")],
    ),
];
/// Cases of two threads with the same of one.
const PAIR_CASES: [(&str, &str); 2] = [
    ("pair_4k_1_threads_2", "pair_4k_1_threads_1"),
    ("pair_4k_512_threads_2", "pair_4k_512_threads_1"),
];

/// Cases of a whole domain, and what of Linux's page tables does the same: a page at a time as
/// before 5.15, or in one call.
const DOMAIN_CASES: [(&str, &str, &str); 6] = [
    ("domain_4k_1", "4k_1", ""),
    ("domain_4k_8", "4k_8_paged", "page by page"),
    ("domain_4k_32", "4k_32_paged", "page by page"),
    ("domain_4k_64", "4k_64_paged", "page by page"),
    ("domain_4k_256", "4k_256_paged", "page by page"),
    ("domain_4k_256", "4k_256", "in one call"),
];
/// Pairs of a domain with one and with two threads, and Linux's page by page.
const DOMAIN_PAIRS: [(&str, &str); 2] = [
    ("domain_pair_64_threads_1", "pair_4k_64_paged_threads_1"),
    ("domain_pair_64_threads_2", "pair_4k_64_paged_threads_2"),
];
/// The allocator's cases, with their operation.
const IOVA_CASES: [(&str, &str); 5] = [
    ("pair_1_threads_1", "pair"),
    ("pair_1_threads_2", "pair"),
    ("pair_64_threads_1", "pair"),
    ("pair_64_threads_2", "pair"),
    ("refused_4", "refuse"),
];

/// The formats that the whole DMA API stands on, with what Linux's has there.
const DMA_FORMATS: [(&str, &Peer); 2] =
    [("dma_lpae", &DMA_IOMMU_ARM), ("dma_vtdss", &DMA_IOMMU_VTDSS)];
/// Its cases. What is bounced is not trusted, and never lazy.
const DMA_CASES: [(&str, &[u32]); 3] =
    [("single", &[1, 8, 64, 512]), ("list", &[2, 4, 8, 64]), ("steps", &[1, 8, 64])];
const BOUNCED_CASES: [&str; 2] = ["bounced_2k_strict", "bounced_64k_strict"];

/// The formats that the container stands on, with what Linux's has there.
const CONTAINER_FORMATS: [(&str, &Peer); 2] =
    [("container_lpae", &TYPE1_ARM), ("container_vtdss", &TYPE1_VTDSS)];
/// The memory that containers and registered buffers are of: each with cheap pins and with dear
/// ones.
const PINNED: [&str; 10] = [
    "4k",
    "64k_base",
    "64k_folio",
    "16m_base",
    "16m_run",
    "16m_thp",
    "256m_base",
    "256m_run",
    "256m_thp",
    "1g_hugetlb",
];
/// Memory that only registered buffers are of.
const ONLY_REGISTERED: &str = "16m_thp";

/// Ways to pin memory for registered buffers, and Linux's.
const REGISTERED_WAYS: [(&str, &str); 3] =
    [("cheap", "cheap"), ("dear", "dear"), ("ranges", "cheap")];
/// The memory of which so many bytes are imported.
const IMPORTED: [&str; 4] = ["256m_base", "256m_run", "256m_thp", "1g_hugetlb"];
const IMPORTED_BYTES: [&str; 3] = ["4k", "64k", "1m"];

/// Programs that say what they map before they are measured, each with its format.
pub(super) fn described() -> impl Iterator<Item = (&'static str, &'static Peer)> {
    DMA_FORMATS.into_iter().chain(CONTAINER_FORMATS).chain([("registered", &RSRC)])
}

/// The bounce pool's cases, and who does the same.
const SWIOTLB_CASES: [(&str, &Peer); 10] = [
    ("pair_4k_threads_1", &SWIOTLB),
    ("pair_4k_threads_2", &SWIOTLB),
    ("burst64_4k_threads_1", &SWIOTLB),
    ("burst64_4k_threads_2", &SWIOTLB),
    ("burst4096_4k_threads_1", &SWIOTLB),
    ("burst4096_4k_threads_2", &SWIOTLB),
    ("pair_64k_threads_1", &SWIOTLB),
    ("pair_64k_threads_2", &SWIOTLB),
    ("pair_4k_copy_threads_1", &SWIOTLB_COPY),
    ("pair_4k_copy_threads_2", &SWIOTLB_COPY),
];
/// Cases whose pool has parking_lot's lock instead of one as Linux's, and Linux's cases.
const PARKING_LOT_CASES: [(&str, &str); 2] = [
    ("pair_4k_mutex_threads_1", "pair_4k_threads_1"),
    ("pair_4k_mutex_threads_2", "pair_4k_threads_2"),
];

/// Formats, case, operation, the beginning of the peer's name, and the least ratio.
type Goal = (&'static [&'static str], &'static str, &'static str, &'static str, f64);

const BOTH: &[&str] = &["lpae", "vtd_ss"];
const LPAE: &[&str] = &["lpae"];
const OF_IOVA: &[&str] = &["iova"];
const OF_SWIOTLB: &[&str] = &["swiotlb"];
const GOALS: [Goal; 46] = [
    (BOTH, "4k_512", "map", "io-pgtable-arm", 5.0),
    (BOTH, "4k_512", "map", "generic_pt", 4.0),
    (BOTH, "4k_512", "unmap", "io-pgtable-arm", 6.0),
    (BOTH, "4k_512", "unmap", "generic_pt", 2.0),
    (BOTH, "4k_1", "map", "", 1.5),
    (BOTH, "4k_1", "unmap", "", 1.5),
    (BOTH, "2m_512", "map", "io-pgtable-arm", 4.0),
    (BOTH, "2m_512", "unmap", "io-pgtable-arm", 6.0),
    (BOTH, "16g_2m", "map", "io-pgtable-arm", 4.0),
    (BOTH, "16g_2m", "map", "generic_pt", 2.5),
    (BOTH, "16g_4k", "map", "io-pgtable-arm", 4.0),
    (BOTH, "16g_4k", "map", "generic_pt", 2.8),
    (BOTH, "16g_4k", "unmap", "io-pgtable-arm", 8.0),
    (BOTH, "16g_4k", "unmap", "generic_pt", 2.5),
    (BOTH, "scattered_2m_8192", "map", "", 4.0),
    (BOTH, "scattered_4k_512", "map", "", 4.0),
    (BOTH, "spans_1g", "unmap", "io-pgtable-arm, by 4K", 1000.0),
    (BOTH, "spans_1g", "unmap", "io-pgtable-arm, by 2M", 3.0),
    (BOTH, "contiguous_1g", "unmap", "io-pgtable-arm, by 4K", 1000.0),
    (BOTH, "contiguous_1g", "unmap", "io-pgtable-arm, by 2M", 3.0),
    (&["v7s"], "64k_512", "map", "", 5.0),
    (&["v7s"], "64k_512", "unmap", "", 20.0),
    (BOTH, "pair_4k_1_threads_2", "pair", "dmaspan", 1.8),
    (BOTH, "pair_4k_512_threads_2", "pair", "dmaspan", 1.8),
    (LPAE, "domain_4k_1", "map", "io-pgtable-arm", 1.0),
    (LPAE, "domain_4k_1", "unmap", "io-pgtable-arm", 1.0),
    (LPAE, "domain_4k_8", "map", "io-pgtable-arm", 4.0),
    (LPAE, "domain_4k_8", "unmap", "io-pgtable-arm", 4.0),
    (LPAE, "domain_4k_32", "map", "io-pgtable-arm", 12.0),
    (LPAE, "domain_4k_32", "unmap", "io-pgtable-arm", 10.0),
    (LPAE, "domain_4k_64", "map", "io-pgtable-arm", 18.0),
    (LPAE, "domain_4k_64", "unmap", "io-pgtable-arm", 15.0),
    (LPAE, "domain_4k_256", "map", "io-pgtable-arm, page by page", 30.0),
    (LPAE, "domain_4k_256", "unmap", "io-pgtable-arm, page by page", 20.0),
    (LPAE, "domain_4k_256", "map", "io-pgtable-arm, in one call", 3.0),
    (LPAE, "domain_4k_256", "unmap", "io-pgtable-arm, in one call", 6.0),
    // As much faster with two threads as with one, but for a fifth.
    (LPAE, "domain_pair_64_threads_2", "pair", "gain of one thread", 0.8),
    // The whole DMA API in 47 ns lazily and in 39 strictly; Linux's page table alone takes 34.
    (LPAE, "dma_pair_4k_1", "pair", "io-pgtable-arm", 0.65),
    (LPAE, "dma_pair_strict_4k_1", "pair", "io-pgtable-arm", 0.75),
    (OF_IOVA, "pair_1_threads_1", "pair", "iova.c", 0.9),
    (OF_IOVA, "pair_64_threads_2", "pair", "iova.c", 8.0),
    (OF_IOVA, "refused_4", "refuse", "iova.c", 1000.0),
    (OF_SWIOTLB, "pair_4k_threads_1", "pair", "swiotlb.c", 3.0),
    (OF_SWIOTLB, "pair_4k_threads_2", "pair", "swiotlb.c", 5.0),
    (OF_SWIOTLB, "pair_4k_threads_2", "pair", "dmaspan", 1.8),
    (OF_SWIOTLB, "burst4096_4k_threads_1", "pair", "swiotlb.c", 1.5),
];

/// What a case is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Versus {
    Linux(&'static Peer),
    /// dmaspan itself, which does the same with one thread.
    OneThread,
    /// What dmaspan gains over the peer with one thread, where both have as many threads.
    GainOfOneThread(&'static Peer),
}

/// A row of the table.
#[derive(Clone, Debug)]
pub(super) struct Comparison {
    /// dmaspan's format.
    pub(super) format: &'static str,
    /// What dmaspan's benchmark calls it.
    pub(super) case: String,
    pub(super) operation: &'static str,
    pub(super) versus: Versus,
    /// The version of Linux, where it is with Linux.
    pub(super) version: &'static str,
    /// What the peer's benchmark calls it.
    pub(super) their_case: String,
    /// The peer as people read it.
    pub(super) peer: String,
    /// The ratio that is to be reached.
    pub(super) goal: Option<f64>,
}

/// The case with one thread of a case with two.
pub(super) fn with_one_thread(case: &str) -> String {
    case.replace("_threads_2", "_threads_1")
}

impl Comparison {
    /// The part of Linux that it is with.
    pub(super) fn linux(&self) -> Option<&'static Peer> {
        match self.versus {
            Versus::Linux(peer) | Versus::GainOfOneThread(peer) => Some(peer),
            Versus::OneThread => None,
        }
    }

    /// The cases that dmaspan is timed with, and those of the peer.
    pub(super) fn cases(&self) -> (Vec<String>, Vec<String>) {
        let (own, theirs) = (self.case.clone(), self.their_case.clone());
        match self.versus {
            Versus::Linux(_) => (vec![own], vec![theirs]),
            Versus::OneThread => (vec![own, theirs], Vec::new()),
            Versus::GainOfOneThread(_) => {
                let [own_one, their_one] = [&own, &theirs].map(|case| with_one_thread(case));
                (vec![own, own_one], vec![theirs, their_one])
            }
        }
    }

    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.format, self.case)
    }

    /// A case of a format with a part of a version of Linux, which calls it otherwise.
    pub(super) fn with(
        (format, case): (&'static str, &str),
        operation: &'static str,
        version: &'static str,
        (peer, theirs): (&'static Peer, &str),
    ) -> Self {
        let versus = (Versus::Linux(peer), theirs, "");
        Self { version, goal: None, ..against(format, case, operation, versus) }
    }

    /// The same with another version of Linux, with which the name of the peer begins. No goal is
    /// set for it.
    fn of(&self, version: &'static str) -> Self {
        let peer = format!("{version} {}", self.peer);
        Self { version, peer, goal: None, ..self.clone() }
    }
}

/// The part of a version of Linux whose results these are.
pub(super) fn who(version: &str, peer: &Peer) -> String {
    format!("{version} {}", peer.name)
}

/// Comparisons with each of several versions of Linux, those of a case one behind the other.
pub(super) fn with_each(all: Vec<Comparison>, versions: &[&'static str]) -> Vec<Comparison> {
    if let [version] = *versions {
        return all.into_iter().map(|one| Comparison { version, ..one }).collect();
    }
    let each = |one: Comparison| match one.versus {
        Versus::Linux(_) => versions.iter().map(|&version| one.of(version)).collect(),
        Versus::OneThread | Versus::GainOfOneThread(_) => vec![],
    };
    all.into_iter().flat_map(each).collect()
}

/// All comparisons whose `format/case` contains `filter`, those of a format together.
pub(super) fn comparisons(filter: &str) -> Vec<Comparison> {
    let mut all = Vec::new();
    for (format, peers) in FORMATS {
        let cases = if format == "v7s" { V7S_CASES.as_slice() } else { WIDE_CASES.as_slice() };
        for &case in cases {
            for operation in ["map", "unmap"] {
                let versus = peers.iter().map(|&peer| (Versus::Linux(peer), case, ""));
                all.extend(versus.map(|versus| against(format, case, operation, versus)));
            }
        }
        if format == "v7s" {
            continue;
        }
        for (case, steps) in SPANS_CASES {
            for (&peer, (theirs, how)) in peers.iter().flat_map(|peer| steps.map(|it| (peer, it))) {
                all.push(against(format, case, "unmap", (Versus::Linux(peer), theirs, how)));
            }
        }
        for (two, one) in PAIR_CASES {
            all.push(against(format, two, "pair", (Versus::OneThread, one, "")));
            let linux = peers.iter().map(|&peer| (Versus::Linux(peer), two, ""));
            all.extend(linux.map(|versus| against(format, two, "pair", versus)));
        }
    }
    all.extend(domain_comparisons());
    for (case, operation) in IOVA_CASES {
        all.push(against("iova", case, operation, (Versus::Linux(&IOVA), case, "")));
    }
    all.extend(swiotlb_comparisons());
    for (format, peer) in DMA_FORMATS {
        let versus = Versus::Linux(peer);
        all.extend(dma_cases().map(|case| {
            let comparison = against(format, &case, "pair", (versus.clone(), &case, ""));
            Comparison { goal: Some(dma_goal(format, &case)), ..comparison }
        }));
    }
    all.extend(container_comparisons());
    all.extend(registered_cases().map(|(case, theirs)| {
        let versus = (Versus::Linux(&RSRC), theirs.as_str(), "");
        Comparison { goal: Some(1.0), ..against("registered", &case, "pair", versus) }
    }));
    all.retain(|comparison| comparison.name().contains(filter));
    all
}

/// The cases of the whole DMA API.
fn dma_cases() -> impl Iterator<Item = String> {
    let each = |(what, pages): (&'static str, &'static [u32])| {
        let ways = move |pages| ["lazy", "strict"].map(|way| format!("{what}_{pages}_{way}"));
        pages.iter().flat_map(ways)
    };
    DMA_CASES.into_iter().flat_map(each).chain(BOUNCED_CASES.map(str::to_owned))
}

/// The cases of containers.
fn container_cases() -> impl Iterator<Item = String> {
    let memory = PINNED.into_iter().filter(|memory| *memory != ONLY_REGISTERED);
    memory.flat_map(|memory| ["cheap", "dear"].map(|pins| format!("{memory}_{pins}")))
}

/// The cases of registered buffers, and Linux's.
fn registered_cases() -> impl Iterator<Item = (String, String)> {
    let pinned = PINNED.into_iter().flat_map(|memory| {
        REGISTERED_WAYS
            .map(|(own, theirs)| (format!("{memory}_{own}"), format!("{memory}_{theirs}")))
    });
    let same = |case: String| (case.clone(), case);
    let imported = ["import", "walk"].into_iter().flat_map(move |way| {
        IMPORTED_BYTES
            .into_iter()
            .flat_map(move |bytes| IMPORTED.map(|memory| same(format!("{way}_{bytes}_{memory}"))))
    });
    pinned.chain(imported)
}

/// Those of containers.
fn container_comparisons() -> Vec<Comparison> {
    let mut all = Vec::new();
    for (format, peer) in CONTAINER_FORMATS {
        for case in container_cases() {
            for operation in ["map", "unmap", "pair"] {
                let versus = (Versus::Linux(peer), case.as_str(), "");
                let goal = Some(container_goal(&case, operation));
                all.push(Comparison { goal, ..against(format, &case, operation, versus) });
            }
        }
    }
    all
}

/// What is to be reached beside Linux's container: more than 1 everywhere.
fn container_goal(case: &str, operation: &str) -> f64 {
    match (case, operation) {
        ("256m_thp_cheap" | "1g_hugetlb_cheap", "pair") => 5.0,
        _ => 1.0,
    }
}

/// Those of domains and of the DMA API, over the tables of one format.
fn domain_comparisons() -> Vec<Comparison> {
    let (mut all, peer) = (Vec::new(), || Versus::Linux(&IO_PGTABLE_ARM));
    for (case, theirs, how) in DOMAIN_CASES {
        for operation in ["map", "unmap"] {
            all.push(against("lpae", case, operation, (peer(), theirs, how)));
        }
    }
    for (case, theirs) in DOMAIN_PAIRS {
        all.push(against("lpae", case, "pair", (peer(), theirs, "page by page")));
    }
    let (case, theirs) = DOMAIN_PAIRS[1];
    let gain = Versus::GainOfOneThread(&IO_PGTABLE_ARM);
    all.push(against("lpae", case, "pair", (gain, theirs, "")));
    for case in ["dma_pair_4k_1", "dma_pair_strict_4k_1"] {
        all.push(against("lpae", case, "pair", (peer(), "4k_1", "tables only")));
    }
    all
}

/// What is to be reached beside the whole DMA API: more than 1 everywhere.
fn dma_goal(format: &str, case: &str) -> f64 {
    let mut words = case.split('_');
    match (words.next().unwrap_or_default(), words.next().unwrap_or_default()) {
        ("single" | "list", "64") if format == "dma_lpae" => 2.5,
        ("single" | "list", "64") => 1.7,
        ("single", "1") | ("list" | "steps", _) => 1.5,
        _ => 1.0,
    }
}

/// Those of bounce pools.
fn swiotlb_comparisons() -> Vec<Comparison> {
    let parking = PARKING_LOT_CASES.map(|(case, theirs)| (case, Versus::Linux(&SWIOTLB), theirs));
    let (two, one) = (SWIOTLB_CASES[1].0, SWIOTLB_CASES[0].0);
    let alone = (two, Versus::OneThread, one);
    let linux = SWIOTLB_CASES.map(|(case, peer)| (case, Versus::Linux(peer), case));
    let all = linux.into_iter().chain(parking).chain([alone]);
    all.map(|(case, versus, theirs)| against("swiotlb", case, "pair", (versus, theirs, "")))
        .collect()
}

fn against(
    format: &'static str,
    case: &str,
    operation: &'static str,
    (versus, their_case, how): (Versus, &str, &str),
) -> Comparison {
    let peer = match versus {
        Versus::Linux(peer) if how.is_empty() => peer.name.to_owned(),
        Versus::Linux(peer) => format!("{}, {how}", peer.name),
        Versus::OneThread => "dmaspan, one thread".to_owned(),
        Versus::GainOfOneThread(_) => "gain of one thread".to_owned(),
    };
    let goal = GOALS.iter().find(|(formats, of, what, beginning, _)| {
        let same = (*of, *what) == (case, operation) && formats.contains(&format);
        same && peer.starts_with(beginning)
    });
    let goal = goal.map(|&(.., least)| least);
    let (case, their_case) = (case.to_owned(), their_case.to_owned());
    let version = DEFAULT_LINUX;
    Comparison { format, case, operation, versus, version, their_case, peer, goal }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_goal_belongs_to_a_comparison() {
        let comparisons = comparisons("");
        for (formats, case, operation, peer, _) in GOALS {
            for &format in formats {
                let found = comparisons.iter().any(|comparison| {
                    (comparison.format, comparison.case.as_str(), comparison.operation)
                        == (format, case, operation)
                        && comparison.peer.starts_with(peer)
                        && comparison.goal.is_some()
                });
                assert!(found, "{format}/{case} {operation} {peer}");
            }
        }
    }

    #[test]
    fn pools_that_copy_are_compared_with_a_linux_that_copies() {
        let linux = comparisons("swiotlb/").into_iter().filter_map(|one| match one.versus {
            Versus::Linux(peer) => Some((one.case.contains("copy"), peer == &SWIOTLB_COPY)),
            _ => None,
        });
        let linux: Vec<_> = linux.collect();
        assert_eq!(linux.len(), SWIOTLB_CASES.len() + PARKING_LOT_CASES.len());
        assert!(linux.iter().all(|(ours, theirs)| ours == theirs), "{linux:?}");
    }

    #[test]
    fn a_pool_of_two_threads_is_compared_with_one_thread() {
        let alone =
            comparisons("swiotlb/").into_iter().filter(|one| one.versus == Versus::OneThread);
        let alone: Vec<_> = alone.map(|one| (one.case, one.their_case, one.goal)).collect();
        let [two, one] = ["pair_4k_threads_2", "pair_4k_threads_1"].map(str::to_owned);
        assert_eq!(alone, [(two, one, Some(1.8))]);
    }

    #[test]
    fn the_dma_api_has_a_goal_in_every_row() {
        let goal = |case: &str| comparisons(case).into_iter().find_map(|one| one.goal);
        assert_eq!(goal("dma_lpae/single_1_lazy"), Some(1.5));
        assert_eq!(goal("dma_lpae/single_8_strict"), Some(1.0));
        assert_eq!(goal("dma_lpae/list_64_lazy"), Some(2.5));
        assert_eq!(goal("dma_vtdss/single_64_strict"), Some(1.7));
        assert_eq!(goal("dma_vtdss/steps_8_lazy"), Some(1.5));
        assert_eq!(goal("dma_vtdss/bounced_64k_strict"), Some(1.0));
        assert!(comparisons("dma_").iter().all(|one| one.goal.is_some()));
    }

    #[test]
    fn containers_have_a_goal_in_every_row_and_a_higher_one_for_huge_pages_that_pin_cheaply() {
        let rows = comparisons("container_");
        assert_eq!(rows.len(), 2 * 3 * 18);
        let higher = rows.iter().filter(|one| one.goal == Some(5.0));
        let higher: Vec<_> = higher.map(|one| (one.case.as_str(), one.operation)).collect();
        let expected = [("256m_thp_cheap", "pair"), ("1g_hugetlb_cheap", "pair")];
        assert_eq!(higher, [expected, expected].concat());
        assert!(rows.iter().all(|one| one.goal >= Some(1.0)));
    }

    #[test]
    fn a_filter_keeps_what_contains_it() {
        let some = comparisons("lpae/4k_1");
        assert!(!some.is_empty() && some.iter().all(|one| one.case.starts_with("4k_1")));
        assert!(comparisons("no such case").is_empty());
    }
}
