//! A forecast of a mapping's cost and failure, made before the kernel is asked for anything.
//!
//! A [`PaperLayout`] says what shall be mapped, behind which IOMMU, and within which limits; its
//! memory need not exist. A [`Forecast`] has all that is to say of it: what is refused, what each
//! map costs, and what mends both. The planner of a [`Mapper`](super::Mapper) makes the maps of a
//! forecast, so that they are those which a mapper would ask for. Costs are counted by region, or
//! by span where the spans are known, never by page.
//!
//! ```
//! use dmaspan::{Iova, Prot, UserAddr, UserRange};
//! use dmaspan_linux::plan::forecast::{
//!     Backing, Forecast, IommuModel, PaperIommu, PaperLayout, PaperLimits, PaperRegion,
//!     RegionPages, PlanSeverity,
//! };
//! use dmaspan_linux::vfio::LockedBy;
//!
//! let ram = |name: &str, start, iova, len| PaperRegion {
//!     name: name.to_owned(),
//!     user: UserRange::from_len(UserAddr::new(start), len).unwrap(),
//!     memory: 0,
//!     iova: Some(Iova::new(iova)),
//!     prot: Prot::READ_WRITE,
//!     backing: Backing::Hugetlb,
//!     pages: RegionPages::Of(1 << 30),
//!     spans: None,
//!     resident: 0,
//!     node: None,
//! };
//! // QEMU's q35 with 8 GiB: 2 GiB of them below 4 GiB, the rest above.
//! let low = ram("low", 1 << 40, 0, 2 << 30);
//! let high = ram("high", (1 << 40) + (2 << 30), 4 << 30, 6 << 30);
//! let unlimited = PaperLimits::unlimited(LockedBy::Process);
//! let limits = PaperLimits { memlock: Some(8 << 30), ..unlimited };
//! let layout = PaperLayout {
//!     regions: vec![low, high],
//!     iommu: PaperIommu::new(IommuModel::Vtd),
//!     limits,
//!     kernel: Some("6.18".parse()?),
//!     devices: 1,
//!     has_viommu: false,
//!     device_node: None,
//! };
//! let forecast = Forecast::new(&layout)?;
//! assert_eq!(forecast.verdict(), PlanSeverity::Note);
//! assert_eq!((forecast.maps.len(), forecast.locked), (2, 8 << 30));
//! assert_eq!(forecast.maps[0].leaves[0].size, 1 << 30);
//!
//! let mut less = layout.clone();
//! less.limits.memlock = Some(4 << 30);
//! let forecast = Forecast::new(&less)?;
//! assert_eq!(forecast.verdict(), PlanSeverity::Fails);
//! let why = forecast.findings[0].to_string();
//! assert!(why.contains("8 GiB would be locked and RLIMIT_MEMLOCK of the process is 4 GiB"));
//! assert_eq!(forecast.findings[0].mends()[0].commands, ["ulimit -l 8388608"]);
//! Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cost;
mod examine;
mod finding;
mod iommu;
mod layout;
mod tally;

pub use cost::MapCost;
pub use finding::{Mend, PlanFinding, PlanSeverity};
pub use iommu::{IommuError, IommuModel, PaperIommu, ReservedIovas};
pub use layout::{
    Backing, LinuxVersion, PaperLayout, PaperLimits, PaperPool, PaperRegion, RegionPages,
    TYPE1_MAPPINGS, VersionError,
};
pub use tally::LeafCount;

use std::collections::BTreeMap;

use dmaspan::{IovaRange, Label, UserRange};

use super::PlanError;
use super::merge::{Merged, RegionOwner, RegionRun};
use super::places::{PlacedIovas, Places};
use super::planned::arrange;
use tally::{Stretch, Tally};

/// What is to say of a layout.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Forecast {
    /// The maps that would be made, by IOVA: as many requests.
    pub maps: Vec<ForecastMap>,
    /// All findings, the worst first.
    pub findings: Vec<PlanFinding>,
    /// The bytes that would count as locked.
    pub locked: u64,
    /// The bytes of the tables of one address space.
    pub table_bytes: u64,
    /// The same if every region were in the largest leaves.
    pub best_table_bytes: u64,
    /// What it costs, beside the best layout.
    pub cost: MapCost,
}

/// One request to map.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ForecastMap {
    /// The regions that it maps, by their place in the layout.
    pub regions: Vec<usize>,
    /// Where the device sees it.
    pub iova: IovaRange,
    /// Where the process has it.
    pub user: UserRange,
    /// How many contiguous spans it has at least.
    pub spans_least: u64,
    /// And at most: the same where it is known.
    pub spans_most: u64,
    /// The leaves that it takes, the largest first.
    pub leaves: Vec<LeafCount>,
    /// Those that as many bytes would take at best.
    pub best: Vec<LeafCount>,
}

impl ForecastMap {
    /// Returns how many bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "a map has at least one byte")]
    pub const fn len(&self) -> u64 {
        self.iova.len_less_one().saturating_add(1)
    }

    /// How many leaves there are.
    pub fn leaf_count(&self) -> u64 {
        sum(&self.leaves)
    }

    /// How many there would be at best.
    pub fn best_count(&self) -> u64 {
        sum(&self.best)
    }
}

fn sum(leaves: &[LeafCount]) -> u64 {
    leaves.iter().map(|leaf| leaf.count).fold(0, u64::saturating_add)
}

/// What stands for memory on paper.
#[derive(Clone, Copy, Debug)]
struct PaperMemory {
    number: u64,
    range: UserRange,
}

impl RegionOwner for PaperMemory {
    fn range(&self) -> UserRange {
        self.range
    }

    fn number(&self) -> u64 {
        self.number
    }
}

impl From<&PaperRegion> for RegionRun<PaperMemory> {
    fn from(region: &PaperRegion) -> Self {
        let PaperRegion { user, memory, iova, prot, .. } = *region;
        let memory = PaperMemory { number: memory, range: user };
        Self { memory, user, iova, prot, label: Label::caller(), unit: 0, region: 0 }
    }
}

/// So many refused regions are named; each costs to plan the others again.
const REFUSED_MOST: usize = 64;

/// Regions that the planner refuses.
struct Refusal {
    error: PlanError,
    /// Those that the error is about, by their place in the layout.
    regions: Vec<usize>,
}

/// What the planner makes of a layout.
struct Arranged {
    /// Which regions it takes, by their place in the layout.
    taken: Vec<usize>,
    merged: Merged<PaperMemory>,
    places: Vec<PlacedIovas>,
    /// What it refuses, and why.
    refused: Vec<Refusal>,
    is_cut: bool,
}

impl Forecast {
    /// What is to say of a layout. Nothing is asked of the kernel.
    ///
    /// # Errors
    ///
    /// [`PlanError::NoMemory`] where there is no memory for a record of IOVAs. What is refused is a
    /// finding.
    pub fn new(layout: &PaperLayout) -> Result<Self, PlanError> {
        let limits = layout.iommu.limits(layout.limits.mappings_left());
        let places = match Places::new(&limits, dmaspan::Iova::new(u64::MAX)) {
            Ok(places) => places,
            Err(PlanError::NoMemory) => return Err(PlanError::NoMemory),
            Err(error) => return Ok(Self::nothing_fits(layout, error)),
        };
        let arranged = Arranged::new(&places, layout)?;
        let mut maps = arranged.maps(layout);
        let (mut tally, mut best) = (Tally::new(&layout.iommu), Tally::new(&layout.iommu));
        for map in &mut maps {
            map.count(layout, &mut tally, &mut best);
        }
        let mapped = || arranged.taken.iter().filter_map(|region| layout.regions.get(*region));
        let counted = mapped().filter(|region| region.backing.is_counted());
        let bytes = counted.map(PaperRegion::len).fold(0, u64::saturating_add);
        let spaces = if layout.has_viommu { u64::from(layout.devices.max(1)) } else { 1 };
        let mut forecast = Self {
            maps,
            findings: Vec::new(),
            locked: bytes.saturating_mul(spaces),
            table_bytes: tally.table_bytes(),
            best_table_bytes: best.table_bytes(),
            cost: MapCost::of(mapped(), layout.kernel, layout.iommu.granule()),
        };
        forecast.findings = examine::findings(layout, &forecast, &places, &arranged);
        arranged.places.into_iter().for_each(|place| places.free(place));
        Ok(forecast)
    }

    fn nothing_fits(layout: &PaperLayout, error: PlanError) -> Self {
        let (names, reserved, instead) = (Vec::new(), None, None);
        let backing = Backing::Base;
        Self {
            maps: Vec::new(),
            findings: vec![PlanFinding::Refused { error, names, backing, reserved, instead }],
            locked: 0,
            table_bytes: 0,
            best_table_bytes: 0,
            cost: MapCost::of(layout.regions.iter(), layout.kernel, layout.iommu.granule()),
        }
    }

    /// How many leaves of each size there are.
    pub fn leaves(&self) -> BTreeMap<u64, u64> {
        let mut all = BTreeMap::new();
        for leaf in self.maps.iter().flat_map(|map| &map.leaves) {
            let count: &mut u64 = all.entry(leaf.size).or_default();
            *count = count.saturating_add(leaf.count);
        }
        all
    }

    /// The worst of all findings.
    pub fn verdict(&self) -> PlanSeverity {
        self.findings.iter().map(PlanFinding::severity).max().unwrap_or(PlanSeverity::Note)
    }
}

impl PaperRegion {
    /// Returns how many bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "a region has at least one byte")]
    pub const fn len(&self) -> u64 {
        self.user.len_less_one().saturating_add(1)
    }

    /// What it consists of, as leaves see it, at `iova`.
    fn stretches(&self, iova: u64) -> impl Iterator<Item = Stretch> {
        let (at, len) = (self.user.start().get(), self.len());
        let known = self.spans.as_deref().unwrap_or_default();
        let mut next = iova;
        let spans = known.iter().map(move |span| {
            let iova = next;
            next = next.saturating_add(span.len());
            Stretch { at: span.start().get(), iova, len: span.len(), most: u64::MAX }
        });
        let parts = match self.pages {
            RegionPages::Of(most) => [(len, most), (0, 0)],
            // Where the large pages are is not known: at the start costs the fewest tables.
            RegionPages::Partly { size, huge } => [(huge.min(len), size), (len - huge.min(len), 0)],
        };
        let mut skip = 0;
        let guessed = parts.into_iter().filter(|(len, _)| *len > 0).map(move |(len, most)| {
            let stretch = Stretch { at: at + skip, iova: iova.saturating_add(skip), len, most };
            skip += len;
            stretch
        });
        spans.chain(guessed.filter(|_| self.spans.is_none()))
    }

    /// How many spans there are, at least and at most.
    fn span_counts(&self) -> (u64, u64) {
        if let Some(spans) = &self.spans {
            let count = u64::try_from(spans.len()).unwrap_or(u64::MAX);
            return (count, count);
        }
        let base = crate::sys::page_size();
        match self.pages {
            RegionPages::Of(size) => (1, self.len().div_ceil(size.max(1))),
            RegionPages::Partly { size, huge } => {
                let huge = huge.min(self.len());
                (1, huge.div_ceil(size.max(1)) + (self.len() - huge).div_ceil(base))
            }
        }
    }
}

impl Arranged {
    /// Plans again without what is refused, until nothing is.
    fn new(places: &Places, layout: &PaperLayout) -> Result<Self, PlanError> {
        let mut limits = layout.iommu.limits(layout.limits.mappings_left());
        let mut taken: Vec<usize> = (0..layout.regions.len()).collect();
        let mut refused = Vec::new();
        loop {
            let regions = taken.iter().filter_map(|&region| layout.regions.get(region));
            let runs = regions.map(RegionRun::from);
            let error = match arrange(places, &limits, runs, &|_| None) {
                Ok((merged, places)) => {
                    return Ok(Self { taken, merged, places, refused, is_cut: false });
                }
                Err(error) => error,
            };
            match error {
                PlanError::NoMemory => return Err(error),
                PlanError::TooManyMaps { .. } => limits.mappings_left = None,
                _ => {}
            }
            let refusal = Refusal::new(error, &taken, layout);
            // The last of them goes: of two that overlap, the other may stay.
            let is_pair = matches!(refusal.error, PlanError::Overlap { .. });
            let gone = refusal.regions.get(usize::from(is_pair)..).unwrap_or_default();
            taken.retain(|region| !gone.contains(region));
            let is_stuck = gone.is_empty() && limits.mappings_left.is_some();
            refused.push(refusal);
            if is_stuck || refused.len() == REFUSED_MOST {
                let merged =
                    Merged { maps: Vec::new(), pieces: Vec::new(), map_of_run: Vec::new() };
                let (taken, places) = (Vec::new(), Vec::new());
                return Ok(Self { taken, merged, places, refused, is_cut: true });
            }
        }
    }

    /// The maps, by IOVA, with nothing counted yet.
    fn maps(&self, layout: &PaperLayout) -> Vec<ForecastMap> {
        let map = |(run, place): (&RegionRun<PaperMemory>, &PlacedIovas)| ForecastMap {
            regions: Vec::new(),
            iova: place.range,
            user: run.user,
            spans_least: 0,
            spans_most: 0,
            leaves: Vec::new(),
            best: Vec::new(),
        };
        let mut maps: Vec<_> = self.merged.maps.iter().zip(&self.places).map(map).collect();
        for (piece, region) in self.merged.pieces.iter().zip(&self.taken) {
            let map = self.merged.map_of_run.get(piece.run).and_then(|map| maps.get_mut(*map));
            if let Some(map) = map {
                map.regions.push(*region);
            }
        }
        let start = |region: &usize| layout.regions.get(*region).map(|region| region.user.start());
        maps.iter_mut().for_each(|map| map.regions.sort_by_key(start));
        maps.sort_unstable_by_key(|map| map.iova.start());
        maps
    }
}

impl Refusal {
    /// An error about regions that are counted in `taken`.
    fn new(mut error: PlanError, taken: &[usize], layout: &PaperLayout) -> Self {
        let of = |region: &mut usize| {
            *region = taken.get(*region).copied().unwrap_or(*region);
            *region
        };
        // Neighbours that would be one map are refused together.
        let all_in = |first: usize, range: IovaRange| {
            let is_in = |index: &usize| {
                let start = layout.regions.get(*index).and_then(|region| region.iova);
                *index == first || start.is_some_and(|start| range.contains(start))
            };
            taken.iter().copied().filter(is_in).collect()
        };
        let regions = match &mut error {
            PlanError::OutsideApertures { region, range, .. }
            | PlanError::InUse { region, range, .. } => all_in(of(region), *range),
            PlanError::Outside { region, .. }
            | PlanError::Wraps { region, .. }
            | PlanError::NoAccess { region, .. }
            | PlanError::Unaligned { region, .. }
            | PlanError::NoRoom { region, .. } => vec![of(region)],
            PlanError::Overlap { regions: [first, second], .. } => vec![of(first), of(second)],
            _ => Vec::new(),
        };
        Self { error, regions }
    }
}

impl ForecastMap {
    /// Counts spans and leaves, and adds the tables to those of the whole space.
    fn count(&mut self, layout: &PaperLayout, tally: &mut Tally, best: &mut Tally) {
        let mut own = Tally::of_leaves(&layout.iommu);
        let (mut least, mut most) = (0_u64, 0_u64);
        let mut behind = 0;
        let mut pending: Option<Stretch> = None;
        for region in self.regions.iter().filter_map(|region| layout.regions.get(*region)) {
            let start = region.user.start().get();
            // Regions without an address may overlap, and are mapped once.
            if start < behind {
                continue;
            }
            behind = start.saturating_add(region.len());
            let (few, many) = region.span_counts();
            (least, most) = (least.saturating_add(few), most.saturating_add(many));
            let iova = self.iova.start().get() + (start - self.user.start().get());
            for stretch in region.stretches(iova) {
                // Leaves lie across the border of regions.
                match &mut pending {
                    Some(before) if before.goes_on_with(stretch) => before.len += stretch.len,
                    _ => {
                        for tally in [&mut own, &mut *tally] {
                            pending.into_iter().for_each(|stretch| tally.add(stretch));
                        }
                        pending = Some(stretch);
                    }
                }
            }
        }
        for tally in [&mut own, tally] {
            pending.into_iter().for_each(|stretch| tally.add(stretch));
        }
        (self.spans_least, self.spans_most) = (least, most);
        self.leaves = own.leaves();
        let (iova, len) = (self.iova.start().get(), self.len());
        best.add(Stretch { at: iova, iova, len, most: u64::MAX });
        let mut alone = Tally::of_leaves(&layout.iommu);
        alone.add(Stretch { at: 0, iova: 0, len, most: u64::MAX });
        self.best = alone.leaves();
    }
}
