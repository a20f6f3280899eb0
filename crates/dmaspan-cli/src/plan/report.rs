//! The JSON of `dmaspan plan`. Its names and units are a contract.

use std::collections::BTreeMap;

use dmaspan_linux::plan::forecast::{
    Forecast, ForecastMap, LeafCount, Mend, PaperLayout, PaperRegion, PlanFinding, PlanSeverity,
};
use dmaspan_linux::vfio::LockedBy;
use serde::Serialize;

use dmaspan_cli::stats::rounded;

/// All that is printed.
#[derive(Debug, Serialize)]
pub(super) struct PlanReport {
    /// `fits`, `slow` or `fails`.
    verdict: &'static str,
    layout: String,
    iommu: IommuRow,
    /// `type1` or `iommufd`.
    interface: &'static str,
    kernel: Option<String>,
    devices: u32,
    viommu: bool,
    device_node: Option<u32>,
    regions: Vec<RegionRow>,
    maps: Vec<MapRow>,
    mappings: Mappings,
    locked: Locked,
    table_bytes: u64,
    best_table_bytes: u64,
    lookups: u64,
    best_lookups: u64,
    map_ratio: f64,
    unmap_ratio: f64,
    findings: Vec<FindingRow>,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct IommuRow {
    kind: Option<&'static str>,
    address_bits: u32,
    page_sizes: Vec<u64>,
    /// The first and the last IOVA of each.
    apertures: Vec<[u64; 2]>,
    reserved: Vec<ReservedRow>,
}

#[derive(Debug, Serialize)]
struct ReservedRow {
    name: String,
    range: [u64; 2],
}

#[derive(Debug, Serialize)]
struct RegionRow {
    name: String,
    /// Null for wherever there is room.
    at: Option<u64>,
    bytes: u64,
    backing: &'static str,
    numa_node: Option<u32>,
}

#[derive(Debug, Serialize)]
struct MapRow {
    regions: Vec<String>,
    iova: [u64; 2],
    bytes: u64,
    /// At least and at most.
    spans: [u64; 2],
    /// By size in bytes.
    leaves: BTreeMap<u64, u64>,
    best: BTreeMap<u64, u64>,
}

#[derive(Debug, Serialize)]
struct Mappings {
    needed: usize,
    /// Null where nothing limits them.
    left: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Locked {
    bytes: u64,
    already: u64,
    limit: Option<u64>,
    /// `process` or `user`.
    by: &'static str,
}

#[derive(Debug, Serialize)]
struct FindingRow {
    name: &'static str,
    /// `note`, `slow` or `fails`.
    severity: &'static str,
    text: String,
    mends: Vec<MendRow>,
}

#[derive(Debug, Serialize)]
struct MendRow {
    action: String,
    /// For a shell of root, in their order.
    commands: Vec<String>,
    /// For QEMU, behind its others.
    options: Vec<String>,
    /// Where to map instead.
    at: Option<u64>,
    gain: String,
}

impl PlanReport {
    pub(super) fn new(
        title: &str,
        layout: &PaperLayout,
        forecast: &Forecast,
        notes: &[String],
    ) -> Self {
        let limits = &layout.limits;
        let iommu = &layout.iommu;
        let ends = |range: dmaspan::IovaRange| [range.start().get(), range.last().get()];
        let reserved = iommu.reserved.iter();
        let reserved =
            reserved.map(|it| ReservedRow { name: it.name.clone(), range: ends(it.range) });
        let sizes = (0..u64::BITS).map(|lg2| 1 << lg2).filter(|size| iommu.page_sizes & size != 0);
        let cost = forecast.cost;
        Self {
            verdict: match forecast.verdict() {
                PlanSeverity::Note => "fits",
                PlanSeverity::Slow => "slow",
                PlanSeverity::Fails => "fails",
            },
            layout: title.to_owned(),
            iommu: IommuRow {
                kind: iommu.kind.map(|kind| kind.name()),
                address_bits: iommu.address_bits,
                page_sizes: sizes.collect(),
                apertures: iommu.limits(None).apertures.into_iter().map(ends).collect(),
                reserved: reserved.collect(),
            },
            interface: interface(limits.locked_by),
            kernel: layout.kernel.map(|kernel| kernel.to_string()),
            devices: layout.devices,
            viommu: layout.has_viommu,
            device_node: layout.device_node,
            regions: layout.regions.iter().map(RegionRow::new).collect(),
            maps: forecast.maps.iter().map(|map| MapRow::new(map, layout)).collect(),
            mappings: Mappings { needed: forecast.maps.len(), left: limits.mappings_left() },
            locked: Locked {
                bytes: forecast.locked,
                already: limits.locked,
                limit: limits.memlock,
                by: whose(limits.locked_by),
            },
            table_bytes: forecast.table_bytes,
            best_table_bytes: forecast.best_table_bytes,
            lookups: cost.lookups,
            best_lookups: cost.best_lookups,
            map_ratio: rounded(cost.map_ratio),
            unmap_ratio: rounded(cost.unmap_ratio),
            findings: forecast.findings.iter().map(FindingRow::new).collect(),
            notes: notes.to_vec(),
        }
    }
}

/// The interface whose accounting that is.
pub(super) const fn interface(locked_by: LockedBy) -> &'static str {
    match locked_by {
        LockedBy::Process => "type1",
        LockedBy::User => "iommufd",
    }
}

/// Whose limit counts.
pub(super) const fn whose(locked_by: LockedBy) -> &'static str {
    match locked_by {
        LockedBy::Process => "process",
        LockedBy::User => "user",
    }
}

/// What people call the regions of a map.
pub(super) fn names(map: &ForecastMap, layout: &PaperLayout) -> Vec<String> {
    let region = |region: &usize| layout.regions.get(*region).map(|region| region.name.clone());
    map.regions.iter().filter_map(region).collect()
}

impl RegionRow {
    fn new(region: &PaperRegion) -> Self {
        Self {
            name: region.name.clone(),
            at: region.iova.map(|iova| iova.get()),
            bytes: region.len(),
            backing: region.backing.name(),
            numa_node: region.node,
        }
    }
}

impl MapRow {
    fn new(map: &ForecastMap, layout: &PaperLayout) -> Self {
        let by_size = |leaves: &[LeafCount]| {
            leaves.iter().map(|leaf| (leaf.size, leaf.count)).collect::<BTreeMap<_, _>>()
        };
        Self {
            regions: names(map, layout),
            iova: [map.iova.start().get(), map.iova.last().get()],
            bytes: map.len(),
            spans: [map.spans_least, map.spans_most],
            leaves: by_size(&map.leaves),
            best: by_size(&map.best),
        }
    }
}

impl FindingRow {
    fn new(finding: &PlanFinding) -> Self {
        let mend = |mend: Mend| {
            let Mend { action, commands, options, iova, gain } = mend;
            MendRow { action, commands, options, at: iova.map(|iova| iova.get()), gain }
        };
        Self {
            name: finding.name(),
            severity: match finding.severity() {
                PlanSeverity::Note => "note",
                PlanSeverity::Slow => "slow",
                PlanSeverity::Fails => "fails",
            },
            text: finding.to_string(),
            mends: finding.mends().into_iter().map(mend).collect(),
        }
    }
}
