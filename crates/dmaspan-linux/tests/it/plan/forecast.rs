//! A forecast says what the planner, the kernel and the page tables then do.

use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
use dmaspan::{Iova, IovaRange, PhysAddr, Span, UserAddr, UserRange};
use dmaspan_linux::Instructions;
use dmaspan_linux::plan::forecast::{
    Backing, Forecast, IommuModel, LinuxVersion, PaperIommu, PaperLayout, PaperLimits, PaperPool,
    PaperRegion, PlanFinding, PlanSeverity, RegionPages,
};
use dmaspan_linux::plan::{MapError, Mapper, PlanError, Region};
use dmaspan_linux::vfio::LockedBy;

use crate::plan::kernel::{Kernel, RW, file};

/// Pages and leaves of what is forecast: an x86 machine, wherever the tests run.
const PAGE: u64 = 4 << 10;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;

fn paper(name: &str, user: u64, iova: Option<u64>, len: u64, page: u64) -> PaperRegion {
    PaperRegion {
        name: name.to_owned(),
        user: UserRange::from_len(UserAddr::new(user), len).unwrap(),
        memory: 0,
        iova: iova.map(Iova::new),
        prot: RW,
        backing: if page < M2 { Backing::Base } else { Backing::Hugetlb },
        pages: RegionPages::Of(page),
        spans: None,
        resident: 0,
        node: None,
    }
}

fn layout(regions: Vec<PaperRegion>) -> PaperLayout {
    PaperLayout {
        regions,
        iommu: PaperIommu::new(IommuModel::Vtd),
        limits: PaperLimits::unlimited(LockedBy::Process),
        kernel: None,
        devices: 1,
        has_viommu: false,
        device_node: None,
    }
}

fn names(forecast: &Forecast) -> Vec<&str> {
    forecast.findings.iter().map(PlanFinding::name).collect()
}

/// A generator of fixed numbers (xorshift).
fn random(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

#[test]
fn a_forecast_has_the_maps_or_the_error_of_the_mapper() {
    let memory = file(64 * M2);
    let start = memory.user_range().start().get();
    let iommu = PaperIommu::new(IommuModel::Vtd).with_bits(39).unwrap();
    let (mut seed, mut mapped, mut refused) = (0x2545_f491_4f6c_dd1d, 0, 0);
    for _ in 0..300 {
        let mut regions = Vec::new();
        let mut papers = Vec::new();
        for n in 0..1 + random(&mut seed) % 6 {
            let offset = random(&mut seed) % 8192 * PAGE;
            let odd = random(&mut seed) % 40;
            let len = (1 + random(&mut seed) % 1024) * PAGE + u64::from(odd == 0);
            let iova = match random(&mut seed) % 8 {
                0 => Some(0xfed0_0000 + random(&mut seed) % 512 * PAGE),
                1 => Some((1 << 39) - random(&mut seed) % 2048 * PAGE),
                2..5 => Some(4 * G1 + n * 2 * M2 + random(&mut seed) % 700 * PAGE),
                _ => None,
            };
            let region = Region::part(&memory, offset, len, RW).unwrap();
            regions.push(Region { iova: iova.map(Iova::new), ..region });
            papers.push(paper("piece", start + offset, iova, len, PAGE));
        }
        let layout = PaperLayout { iommu: iommu.clone(), ..layout(papers) };
        let kernel = Kernel::new(iommu.limits(Some(65_535)));
        let mapper = Mapper::shared(kernel.clone()).unwrap();
        let forecast = Forecast::new(&layout).unwrap();
        match mapper.map(regions) {
            Ok(_owned) => {
                mapped += 1;
                let made = kernel.entries().into_iter().map(|entry| (entry.iova, entry.user));
                let said = forecast.maps.iter().map(|map| (map.iova, map.user));
                assert!(made.eq(said), "{forecast:?}");
                assert!(forecast.verdict() < PlanSeverity::Fails);
                assert_eq!(kernel.state().map_calls, forecast.maps.len() as u64);
            }
            Err(MapError::Plan(error)) => {
                refused += 1;
                let PlanFinding::Refused { error: said, .. } = &forecast.findings[0] else {
                    panic!("{forecast:?}")
                };
                assert_eq!(*said, error);
                assert_eq!(forecast.verdict(), PlanSeverity::Fails);
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(mapped > 30 && refused > 30, "{mapped} {refused}");
}

#[test]
fn the_tables_and_leaves_are_those_of_a_page_table() {
    let mut seed = 0x9e37_79b9_7f4a_7c15;
    for _ in 0..60 {
        let mut papers = Vec::new();
        let format = X86_64::new(X86_64Config::new(48, 52)).unwrap();
        let mut table =
            PageTable::new(format, Arena::new(PhysAddr::new(1 << 46), 64 << 20)).unwrap();
        let mut iova = random(&mut seed) % 512 * G1;
        for memory in 0..1 + random(&mut seed) % 4 {
            iova += random(&mut seed) % 3 * M2 + random(&mut seed) % 2 * G1;
            let at = match random(&mut seed) % 3 {
                0 => iova + PAGE,
                1 => iova + M2,
                _ => iova + 4 * G1,
            };
            let len = (1 + random(&mut seed) % 600_000) * PAGE;
            let spans = vec![Span::new(PhysAddr::new(at), len).unwrap()];
            let known = PaperRegion {
                memory,
                spans: random(&mut seed).is_multiple_of(2).then(|| spans.clone()),
                ..paper("ram", at, Some(iova), len, 1 << 63)
            };
            table.whole().map_spans(Iova::new(iova), &spans, RW).unwrap();
            papers.push(known);
            iova += len;
        }
        let forecast = Forecast::new(&layout(papers)).unwrap();
        assert_eq!(forecast.table_bytes, table.memory().table_bytes(), "{forecast:?}");
        let census = table.whole().census(IovaRange::ALL);
        for size in [PAGE, M2, G1] {
            let leaves = forecast.maps.iter().flat_map(|map| &map.leaves);
            let said: u64 = leaves.filter(|leaf| leaf.size == size).map(|leaf| leaf.count).sum();
            assert_eq!(said, census.count(size.ilog2()), "{size:#x} {forecast:?}");
        }
    }
}

/// q35's memory: 2 GiB below 4 GiB, the rest above.
fn q35(total: u64, page: u64) -> PaperLayout {
    let low = paper("low", 1 << 45, Some(0), 2 * G1, page);
    let high = paper("high", (1 << 45) + 2 * G1, Some(4 * G1), total - 2 * G1, page);
    layout(vec![low, high])
}

#[test]
fn a_tebibyte_costs_what_a_few_gibibytes_cost() {
    let counter = match Instructions::of_this_thread() {
        Ok(counter) => counter,
        Err(why) => return eprintln!("SKIP: {why}"),
    };
    let cost = |total, page| {
        let layout = q35(total, page);
        Forecast::new(&layout).unwrap();
        let before = counter.read().unwrap();
        Forecast::new(&layout).unwrap();
        counter.read().unwrap() - before
    };
    for page in [PAGE, M2, G1] {
        let (small, large) = (cost(3 * G1, page), cost(1 << 40, page));
        println!("pages of {page:#x}: {small} instructions at 3 GiB, {large} at 1 TiB");
        assert!(large < small + small / 4, "{page:#x}: {small} at 3 GiB, {large} at 1 TiB");
    }
}

#[test]
fn the_largest_layout_of_base_pages_is_planned_by_region() {
    // A step for each of 2^44 pages would take hours, and a byte for each all memory.
    let iommu = PaperIommu::new(IommuModel::Vtd).with_bits(57).unwrap();
    let ram = paper("ram", 1 << 60, Some(1 << 56), 1 << 56, PAGE);
    let forecast = Forecast::new(&PaperLayout { iommu, ..layout(vec![ram]) }).unwrap();
    assert_eq!(forecast.maps[0].leaf_count(), 1 << 44);
    assert_eq!(forecast.table_bytes / PAGE, (1 << 35) + (1 << 26) + (1 << 17) + (1 << 8) + 1);
    assert_eq!(forecast.cost.lookups, 1 << 44);
}

#[test]
fn pages_decide_which_leaves_there_are() {
    let leaves = |page| {
        let forecast = Forecast::new(&q35(1 << 40, page)).unwrap();
        let maps = forecast.maps.iter().flat_map(|map| map.leaves.clone());
        (maps.map(|leaf| (leaf.size, leaf.count)).collect::<Vec<_>>(), forecast.table_bytes)
    };
    assert_eq!(leaves(G1), (vec![(G1, 2), (G1, 1022)], 4 * PAGE));
    assert_eq!(leaves(M2).0, [(M2, 1024), (M2, 1022 * 512)]);
    // A table for each 2 MiB, 1 GiB and 512 GiB, and the root.
    assert_eq!(leaves(PAGE).1, ((512 << 10) + 1024 + 3 + 1) * PAGE);
}

/// One of each mistake.
fn mistakes() -> PaperLayout {
    let bar = PaperRegion {
        memory: 1,
        backing: Backing::Registers,
        ..paper("bar", 1 << 44, Some(1 << 40), G1, G1)
    };
    let over = paper("over", 1 << 46, Some(0xfee0_0000 - M2), 2 * M2, PAGE);
    let odd = PaperRegion { memory: 2, ..paper("odd", 1 << 42, Some(8 * G1 + PAGE), 8 * M2, M2) };
    let low = PaperRegion { memory: 3, ..paper("low", 1 << 43, Some(0), G1, PAGE) };
    let twice = PaperRegion { memory: 4, ..paper("twice", 1 << 41, Some(M2), M2, PAGE) };
    let limits = PaperLimits {
        memlock: Some(M2),
        mappings: Some(2),
        mapped: 1,
        cgroup_left: Some(PAGE),
        ..PaperLimits::unlimited(LockedBy::Process)
    };
    PaperLayout {
        iommu: PaperIommu::new(IommuModel::Vtd).with_bits(39).unwrap(),
        limits,
        kernel: Some(LinuxVersion { major: 6, minor: 12 }),
        devices: 3,
        ..layout(vec![bar, over, odd, low, twice])
    }
}

#[test]
fn all_findings_are_found_at_once_and_the_worst_come_first() {
    let forecast = Forecast::new(&mistakes()).unwrap();
    let mut found = names(&forecast);
    let severities: Vec<_> = forecast.findings.iter().map(PlanFinding::severity).collect();
    assert!(severities.is_sorted_by(|one, next| one >= next), "{severities:?}");
    found.sort_unstable();
    let expected = [
        "cgroup",
        "memlock",
        "misaligned",
        "outside-apertures",
        "outside-apertures",
        "overlap",
        "small-pages",
        "too-many-mappings",
        "viommu",
    ];
    assert_eq!(found, expected, "{:#?}", forecast.findings);
    let text: Vec<String> = forecast.findings.iter().map(ToString::to_string).collect();
    let text = text.join("\n");
    for part in [
        "bar: 0x10000000000..=0x1003fffffff is outside of what the IOMMU translates",
        "over: 0xfee00000..=0xfeefffff of 0xfec00000..=0xfeffffff is reserved for interrupts (MSI)",
        "low, twice overlap: 0x0..=0x3fffffff and 0x200000..=0x3fffff",
        "2 mappings are needed and 1 can be made",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn what_is_said_to_mend_a_finding_does() {
    let layout = mistakes();
    let forecast = Forecast::new(&layout).unwrap();
    for finding in &forecast.findings {
        if let PlanFinding::Refused {
            error: PlanError::OutsideApertures { region, .. },
            instead,
            ..
        } = finding
        {
            let mut again = layout.clone();
            let start = instead.unwrap().start();
            again.regions[*region].iova = Some(start);
            let again = Forecast::new(&again).unwrap();
            let count =
                |of: &Forecast| names(of).iter().filter(|it| **it == "outside-apertures").count();
            assert_eq!(count(&again) + 1, count(&forecast));
        }
        if let PlanFinding::Misaligned { instead, best, .. } = finding {
            let mut again = layout.clone();
            again.regions[2].iova = Some(*instead);
            let again = Forecast::new(&again).unwrap();
            assert!(!names(&again).contains(&"misaligned"));
            assert!(again.maps.iter().any(|map| map.leaf_count() == *best));
        }
    }
}

#[test]
fn a_command_and_an_option_that_mend_stand_in_the_words_as_they_are() {
    let mut layout = mistakes();
    layout.limits.pools = vec![PaperPool { page: M2, pages: 3, free: 3 }];
    let forecasts = [layout, q35(4 * G1, PAGE)].map(|layout| Forecast::new(&layout).unwrap());
    let findings = forecasts.iter().flat_map(|forecast| &forecast.findings);
    let (mut commands, mut options) = (0, 0);
    for mend in findings.flat_map(PlanFinding::mends) {
        for exact in mend.commands.iter().chain(&mend.options) {
            assert!(mend.action.contains(&format!("`{exact}`")), "{mend:?}");
        }
        assert!(mend.iova.is_none_or(|iova| mend.action.contains(&iova.to_string())));
        commands += mend.commands.len();
        options += mend.options.len();
    }
    assert!(commands >= 4 && options >= 3, "{commands} {options}");
}

#[test]
fn a_pool_of_too_few_hugetlb_pages_is_said_and_raised_by_what_is_missing() {
    let mut layout = q35(4 * G1, M2);
    let pool = |pages, free| vec![PaperPool { page: M2, pages, free }];
    let said = |layout: &PaperLayout| {
        let forecast = Forecast::new(layout).unwrap();
        let found = forecast.findings.iter().find(|finding| finding.name() == "pool").cloned();
        found.map(|finding| (forecast.verdict(), finding.mends()[0].commands.clone()))
    };
    assert_eq!(said(&layout), None);
    layout.limits.pools = pool(1000, 600);
    let command = "echo 2448 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    assert_eq!(said(&layout), Some((PlanSeverity::Fails, vec![command.to_owned()])));
    layout.limits.pools = pool(2448, 2048);
    assert_eq!(said(&layout), None);
    // Pages that are in memory need no others.
    layout.limits.pools = pool(1000, 0);
    for region in &mut layout.regions {
        region.resident = region.len();
    }
    assert_eq!(said(&layout), None);
}

#[test]
fn memory_on_another_node_than_the_devices_is_said() {
    let mut layout = q35(4 * G1, G1);
    layout.regions[1].node = Some(1);
    let far = |layout: &PaperLayout| names(&Forecast::new(layout).unwrap()).contains(&"far-node");
    assert!(!far(&layout), "the node of the device is not known");
    layout.device_node = Some(1);
    assert!(!far(&layout));
    layout.device_node = Some(0);
    let forecast = Forecast::new(&layout).unwrap();
    assert_eq!(forecast.verdict(), PlanSeverity::Slow);
    let text = forecast.findings[0].to_string();
    assert_eq!(text, "high: 2 GiB are on NUMA node 1 and the devices are on node 0");
}

#[test]
fn registers_at_an_address_that_rules_larger_leaves_out_are_told_the_next_one() {
    let host = 0x38_0000_0000;
    let bar = |iova| PaperRegion {
        backing: Backing::Registers,
        spans: Some(vec![Span::new(PhysAddr::new(host), G1).unwrap()]),
        ..paper("BAR 1", host, Some(iova), G1, G1)
    };
    let forecast = Forecast::new(&layout(vec![bar(8 * G1 + PAGE)])).unwrap();
    let Some(PlanFinding::Misaligned { instead, leaves, best, .. }) = forecast.findings.first()
    else {
        panic!("{forecast:?}")
    };
    assert_eq!((*leaves, *best, instead.get()), (1 << 18, 1, 9 * G1));
    let forecast = Forecast::new(&layout(vec![bar(instead.get())])).unwrap();
    assert!(forecast.findings.is_empty(), "{forecast:?}");
}

#[test]
fn registers_are_told_an_address_that_is_a_multiple_of_their_size() {
    let ram = paper("ram", 1 << 40, Some(4 * G1), 6 * G1, M2);
    let bar = |user| PaperRegion {
        backing: Backing::Registers,
        memory: 1,
        ..paper("BAR 1", user, Some(1 << 40), 8 * G1, 8 * G1)
    };
    let iommu = PaperIommu::new(IommuModel::Vtd).with_bits(39).unwrap();
    let said = |bar| {
        let layout = PaperLayout { iommu: iommu.clone(), ..layout(vec![ram.clone(), bar]) };
        let forecast = Forecast::new(&layout).unwrap();
        forecast.findings[0].mends()[0].iova.unwrap().get()
    };
    assert_eq!(said(bar(8 * G1)), 16 * G1);
    // Where the host has it otherwise, it is congruent to that.
    assert_eq!(said(bar(11 * G1)) % G1, 0);
}

#[test]
fn what_qemu_can_do_about_a_reserved_range_is_said_where_it_helps() {
    let said = |kind, at, len| {
        let iommu = PaperIommu::new(kind);
        let regions = vec![paper("ram", 1 << 41, Some(at), len, M2)];
        let forecast = Forecast::new(&PaperLayout { iommu, ..layout(regions) }).unwrap();
        forecast.findings[0].mends()[0].clone()
    };
    let low = said(IommuModel::Vtd, 0, 8 * G1);
    assert_eq!(low.options, ["-machine q35,max-ram-below-4g=2G"]);
    // What lies above 4 GiB stays there.
    let high = said(IommuModel::Amd, 4 * G1, 1 << 40);
    assert!(high.options.is_empty() && high.action.contains("0xfcffffffff"), "{high:?}");
}

#[test]
fn limits_are_counted_against_whom_the_interface_says() {
    let mut layout = q35(4 * G1, G1);
    layout.limits.memlock = Some(4 * G1);
    let verdict = |layout: &PaperLayout| Forecast::new(layout).unwrap().verdict();
    assert_eq!(verdict(&layout), PlanSeverity::Note);
    layout.limits.locked = 1;
    assert_eq!(verdict(&layout), PlanSeverity::Fails);
    layout.limits.locked = 0;
    (layout.devices, layout.has_viommu) = (2, true);
    let forecast = Forecast::new(&layout).unwrap();
    assert_eq!((forecast.locked, forecast.verdict()), (8 * G1, PlanSeverity::Fails));
    layout.limits = PaperLimits::unlimited(LockedBy::User);
    assert_eq!(layout.limits.mappings, None);
    // Registers are not locked.
    layout.regions[1].backing = Backing::Registers;
    assert_eq!(Forecast::new(&layout).unwrap().locked, 4 * G1);
}

#[test]
fn a_kernel_before_6_18_costs_what_was_measured() {
    let cost = |version: &str, page| {
        let mut layout = q35(4 * G1, page);
        layout.kernel = Some(version.parse().unwrap());
        let forecast = Forecast::new(&layout).unwrap();
        (forecast.cost, names(&forecast).contains(&"by-page"))
    };
    let (new, says) = cost("6.18.2-amd64", M2);
    assert_eq!((new.lookups, new.best_lookups, says), (2048, 2048, false));
    assert_eq!((new.map_ratio, new.newer_map_ratio), (1.0, 1.0));
    let (old, says) = cost("6.17", M2);
    assert_eq!((old.lookups, says), (1 << 20, true));
    assert!((old.newer_map_ratio - 4.18).abs() < 0.01, "{old:?}");
    let (base, _) = cost("6.18", PAGE);
    assert_eq!(base.lookups, 1 << 20);
    assert!((base.map_ratio - 28.8).abs() < 0.1, "{base:?}");
    for text in ["6", "six.one", "6.x", "", "6.18rc", "-6.1"] {
        assert!(text.parse::<LinuxVersion>().is_err(), "{text}");
    }
}

#[test]
fn memory_whose_pages_are_smaller_than_the_granule_cannot_be_mapped() {
    let iommu = PaperIommu::new(IommuModel::SmmuV3).with_granule(64 << 10).unwrap();
    let forecast = Forecast::new(&PaperLayout { iommu, ..q35(4 * G1, PAGE) }).unwrap();
    assert!(names(&forecast).contains(&"below-granule"));
    // Its window of interrupts lies in the low memory.
    assert!(names(&forecast).contains(&"outside-apertures"));
}

#[test]
fn small_pages_are_compared_with_those_that_are_advised() {
    let said = |layout: &PaperLayout| {
        let forecast = Forecast::new(layout).unwrap();
        let small = forecast.findings.into_iter().find(|finding| finding.name() == "small-pages");
        small.map(|finding| match finding {
            PlanFinding::SmallPages { page, best, .. } => {
                (page, best, finding.mends()[0].action.clone())
            }
            other => panic!("{other:?}"),
        })
    };
    let (page, best, advice) = said(&q35(4 * G1, PAGE)).unwrap();
    assert_eq!((page, best), (M2, 2048));
    assert!(advice.contains("size=4G,hugetlb=on,hugetlbsize=2M"), "{advice}");
    assert!(advice.contains("`echo 2048 > ") && advice.contains("hugepages-2048kB"), "{advice}");
    // Pages that others use stay theirs.
    let mut used = q35(4 * G1, PAGE);
    used.limits.pools = vec![PaperPool { page: M2, pages: 100, free: 40 }];
    let (_, _, advice) = said(&used).unwrap();
    assert!(advice.contains("`echo 2108 > "), "{advice}");
    // And those that another region of the layout needs.
    used.regions.push(PaperRegion { memory: 9, ..paper("huge", 1 << 50, None, G1, M2) });
    let (_, _, advice) = said(&used).unwrap();
    assert!(advice.contains("`echo 2620 > "), "{advice}");
    // Of several memories each has an object of its own.
    let mut nodes = q35(4 * G1, PAGE);
    nodes.regions[1].memory = 1;
    let forecast = Forecast::new(&nodes).unwrap();
    let mend = &forecast.findings[0].mends()[0];
    assert!(mend.action.contains("of each") && mend.options.is_empty(), "{mend:?}");
    let huge = Forecast::new(&q35(4 * G1, M2)).unwrap();
    assert_eq!(huge.maps.iter().map(|map| map.leaf_count()).sum::<u64>(), best);
    // An IOMMU of Arm whose large leaves have 512 MiB.
    let iommu = PaperIommu::new(IommuModel::SmmuV3).with_granule(64 << 10).unwrap();
    let (page, best, advice) =
        said(&PaperLayout { iommu, ..q35(4 * G1, 64 << 10) }).unwrap_or_default();
    assert_eq!((page, best), (512 << 20, 4), "the low memory has interrupts in it");
    assert!(advice.contains("hugepages-524288kB"), "{advice}");
    // One that has no large leaves, and says so.
    let iommu = PaperIommu::new(IommuModel::Vtd).with_page_sizes(PAGE).unwrap();
    let only = PaperLayout { iommu, ..q35(4 * G1, M2) };
    assert_eq!(said(&only), None);
    assert_eq!(
        Forecast::new(&only).unwrap().leaves().into_iter().collect::<Vec<_>>(),
        [(PAGE, 1 << 20)]
    );
}
