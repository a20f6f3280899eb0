//! A [`Plan`] is what a mapper will ask of its space.

use std::fmt;
use std::mem;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use dmaspan::space::Limits;
use dmaspan::{Iova, IovaRange, Label, Prot, UserAddr, UserRange};

use super::book::{ListedMap, MapKind, MapState};
use super::leaves::LeafSizes;
use super::mapper::{Inner, MemorySpace};
use super::merge::{Merged, Piece, RegionOwner, RegionRun, merge};
use super::places::{Others, PlacedIovas, Places, Wanted};
use super::{MapError, MappedRegions, PlanError, Region};
use crate::mem::Memory;

/// One map of a [`Plan`]: one call of [`DmaSpace::map`](dmaspan::space::DmaSpace::map).
#[derive(Clone, Debug)]
pub struct PlannedMap {
    memory: Arc<Memory>,
    user: UserRange,
    iova: IovaRange,
    prot: Prot,
    label: Label,
    unit: u32,
}

impl PlannedMap {
    /// What is listed of it.
    pub(super) fn listed(&self) -> ListedMap {
        let Self { user, iova: range, prot, label, .. } = *self;
        ListedMap { range, user, prot, kind: MapKind::Region, label, state: MapState::Planned }
    }

    /// Returns who maps it: of several regions that are one map, the first.
    pub fn label(&self) -> Label {
        self.label
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns which part of it.
    pub fn user(&self) -> UserRange {
        self.user
    }

    /// Returns where the device sees it.
    pub fn iova(&self) -> IovaRange {
        self.iova
    }

    /// Returns what the device may do.
    pub fn prot(&self) -> Prot {
        self.prot
    }

    /// Returns which [unit](Region::in_unit) its regions are of.
    pub fn unit(&self) -> u32 {
        self.unit
    }

    /// Returns where the device sees an address of the user; `None` where it is not of this map.
    pub fn translate(&self, user: UserAddr) -> Option<Iova> {
        let skip = user.get().checked_sub(self.user.start().get())?;
        if self.user.contains(user) { self.iova.start().checked_add(skip) } else { None }
    }

    /// Returns how many bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "a map has at least one byte")]
    pub fn len(&self) -> u64 {
        self.user.len_less_one() + 1
    }
}

/// Says which maps regions become, and where each region will be.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::space::Limits;
/// use dmaspan::{Iova, IovaRange, Prot};
/// use dmaspan_linux::plan::{Plan, Region};
/// use dmaspan_linux::{Memory, MemoryKind};
///
/// let below = IovaRange::from_len(Iova::new(0), 0xfee0_0000)?;
/// let page_sizes = (4 << 10) | (2 << 20) | (1 << 30);
/// let limits = Limits { apertures: vec![below], page_sizes, mappings_left: Some(65_535) };
///
/// let memory = Arc::new(Memory::new(MemoryKind::Thp, 4 << 20)?);
/// let pages = (0..1024).map(|n| Region::part(&memory, n << 12, 1 << 12, Prot::READ_WRITE));
/// let plan = Plan::new(&limits, pages.collect::<Result<Vec<_>, _>>()?)?;
/// assert_eq!(plan.maps().len(), 1);
/// assert_eq!(plan.bytes(), 4 << 20);
/// // The memory begins at a multiple of 2 MiB, and so do the IOVAs.
/// assert_eq!(plan.iova_of(1), Some(Iova::new((2 << 20) + 0x1000)));
/// assert_eq!(plan.leaves().find(|(_, bytes)| *bytes > 0), Some((2 << 20, 4 << 20)));
///
/// let interrupts = Region::whole(&memory, Prot::READ_WRITE).at(Iova::new(0xfee0_0000));
/// let error = Plan::new(&limits, [interrupts]).unwrap_err();
/// assert!(error.to_string().contains("0xfee00000..=0xff1fffff is in no aperture"));
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Plan {
    /// By IOVA.
    maps: Vec<PlannedMap>,
    pieces: Vec<Piece>,
    /// Where each run of pieces begins, and in which map.
    runs: Vec<usize>,
    leaves: LeafSizes,
    /// By the start of their memory; from the first search on.
    by_user: OnceLock<Vec<Found>>,
}

/// A map, for who looks for an address of the user.
#[derive(Clone, Copy, Debug)]
struct Found {
    start: UserAddr,
    /// The last address of this map and of all before it.
    reach: UserAddr,
    map: usize,
}

impl Plan {
    /// Returns what regions become in a space with these limits in which nothing is mapped. Nothing
    /// is asked of any space.
    ///
    /// # Errors
    ///
    /// [`PlanError`]: which region cannot be mapped, and why.
    pub fn new(
        limits: &Limits,
        regions: impl IntoIterator<Item = Region>,
    ) -> Result<Self, PlanError> {
        let places = Places::new(limits, Iova::new(u64::MAX))?;
        let (plan, taken) = Self::with(&places, limits, regions, &|_| None)?;
        taken.into_iter().for_each(|place| places.free(place));
        Ok(plan)
    }

    /// As [`new`](Self::new), with IOVAs that are free there, which the plan's owner holds.
    pub(super) fn with(
        places: &Places,
        limits: &Limits,
        regions: impl IntoIterator<Item = Region>,
        others: Others<'_>,
    ) -> Result<(Self, Vec<PlacedIovas>), PlanError> {
        let runs = regions.into_iter().map(RegionRun::from);
        let (merged, mut taken) = arrange(places, limits, runs, others)?;
        let Merged { maps, pieces, mut map_of_run } = merged;
        let of = |(run, place): (RegionRun<Arc<Memory>>, &PlacedIovas)| {
            let RegionRun { memory, user, prot, label, unit, .. } = run;
            PlannedMap { memory, user, iova: place.range, prot, label, unit }
        };
        let mut maps: Vec<PlannedMap> = maps.into_iter().zip(&taken).map(of).collect();
        if !maps.is_sorted_by_key(|map| map.iova.start()) {
            renumber(&maps, &mut map_of_run);
            maps.sort_unstable_by_key(|map| map.iova.start());
            taken.sort_unstable_by_key(|place| place.range.start());
        }
        let plan = Self { maps, pieces, runs: map_of_run, ..Self::empty(places.leaves()) };
        Ok((plan, taken))
    }

    /// No maps.
    fn empty(leaves: LeafSizes) -> Self {
        let (maps, pieces, runs) = (Vec::new(), Vec::new(), Vec::new());
        Self { maps, pieces, runs, leaves, by_user: OnceLock::new() }
    }

    /// The maps, by IOVA: as many calls of the space.
    pub fn maps(&self) -> &[PlannedMap] {
        &self.maps
    }

    /// Returns how many bytes are mapped, all of which the space pins. Memory that is mapped twice
    /// counts twice, as the kernel's limit of locked memory counts it for VFIO type1.
    pub fn bytes(&self) -> u64 {
        self.maps.iter().map(PlannedMap::len).fold(0, u64::saturating_add)
    }

    /// Returns how many regions there are.
    pub fn regions(&self) -> usize {
        self.pieces.len()
    }

    /// Returns where the device sees a region, by its place in what was asked; `None` where there
    /// were fewer.
    pub fn iova_of(&self, region: usize) -> Option<Iova> {
        self.place_of(region).map(|(_, iova)| iova)
    }

    /// In which map a region is, and where the device sees it.
    pub(super) fn place_of(&self, region: usize) -> Option<(usize, Iova)> {
        let piece = self.pieces.get(region)?;
        let number = *self.runs.get(piece.run)?;
        let map = self.maps.get(number)?;
        let skip = piece.start.get().checked_sub(map.user.start().get())?;
        Some((number, map.iova.start().checked_add(skip)?))
    }

    /// Returns where the device sees an address of the user; `None` where nothing is mapped of it,
    /// and the lowest IOVA where it is mapped more than once. The first call sorts the maps, others
    /// search and do not allocate.
    pub fn translate(&self, user: UserAddr) -> Option<Iova> {
        self.find(user, |_| true)
    }

    /// As [`translate`](Self::translate), by maps that are wanted.
    pub(super) fn find(&self, user: UserAddr, wanted: impl Fn(usize) -> bool) -> Option<Iova> {
        let sorted = self.by_user.get_or_init(|| by_user(&self.maps));
        let behind = sorted.partition_point(|found| found.start <= user);
        let before = sorted.get(..behind)?.iter().rev();
        before
            .take_while(|found| found.reach >= user)
            .filter(|found| wanted(found.map))
            .filter_map(|found| self.maps.get(found.map)?.translate(user))
            .min()
    }

    /// For each size of leaf, the largest first, how many bytes can be mapped by leaves of that
    /// size and no larger ones, as far as addresses permit it. The pages of the memory have to be
    /// as large.
    pub fn leaves(&self) -> impl Iterator<Item = (u64, u64)> {
        let of = |size| {
            let in_map = |map: &PlannedMap| {
                let all = self.leaves.permitted(map.user, map.iova.start());
                all.filter(|(of, _)| *of == size).map(|(_, bytes)| bytes).sum::<u64>()
            };
            (size, self.maps.iter().map(in_map).fold(0, u64::saturating_add))
        };
        self.leaves.descending().map(of)
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("maps", &self.maps)
            .field("regions", &self.pieces.len())
            .finish_non_exhaustive()
    }
}

/// Merges regions into maps, checks them, and takes IOVAs for each map.
pub(super) fn arrange<M: RegionOwner>(
    places: &Places,
    limits: &Limits,
    regions: impl IntoIterator<Item = RegionRun<M>>,
    others: Others<'_>,
) -> Result<(Merged<M>, Vec<PlacedIovas>), PlanError> {
    let merged = merge(regions)?;
    let granule = places.granule().max(limits.granule());
    merged.maps.iter().try_for_each(|map| check(limits, granule, map.wanted()))?;
    check_count(limits, merged.maps.len())?;
    let taken = places.take_all(&merged.maps, others)?;
    Ok((merged, taken))
}

/// The maps by the start of their memory.
fn by_user(maps: &[PlannedMap]) -> Vec<Found> {
    let found = |(map, planned): (usize, &PlannedMap)| {
        let (start, reach) = (planned.user.start(), planned.user.last());
        Found { start, reach, map }
    };
    let mut sorted: Vec<Found> = maps.iter().enumerate().map(found).collect();
    sorted.sort_unstable_by_key(|found| found.start);
    let mut reach = UserAddr::new(0);
    for found in &mut sorted {
        reach = reach.max(found.reach);
        found.reach = reach;
    }
    sorted
}

/// Replaces numbers of maps by those that they will have when the maps are sorted by IOVA.
fn renumber(maps: &[PlannedMap], numbers: &mut [usize]) {
    let mut sorted: Vec<usize> = (0..maps.len()).collect();
    sorted.sort_unstable_by_key(|&old| maps.get(old).map(|map| map.iova.start()));
    let mut new_of = vec![0; maps.len()];
    for (new, old) in sorted.into_iter().enumerate() {
        if let Some(number) = new_of.get_mut(old) {
            *number = new;
        }
    }
    for number in numbers {
        *number = new_of.get(*number).copied().unwrap_or(*number);
    }
}

/// Whether a map can be made, as far as the limits of a space tell.
pub(super) fn check(limits: &Limits, granule: u64, wanted: Wanted) -> Result<(), PlanError> {
    let Wanted { user, iova, region, .. } = wanted;
    let ends = user.start().get() | wanted.len() | iova.map_or(0, Iova::get);
    if !ends.is_multiple_of(granule) {
        return Err(PlanError::Unaligned { region, user, iova, granule });
    }
    let Some(range) = wanted.iovas() else { return Ok(()) };
    // Mostly one aperture has all of it.
    if limits.apertures.iter().any(|aperture| aperture.covers(range)) {
        return Ok(());
    }
    let outside: Vec<IovaRange> = range.minus(&limits.apertures).collect();
    if outside.is_empty() {
        return Ok(());
    }
    let above = limits.apertures.partition_point(|aperture| aperture.start() <= range.start());
    let below = above.checked_sub(1).and_then(|index| limits.apertures.get(index)).copied();
    let above = limits.apertures.get(above).copied();
    Err(PlanError::OutsideApertures { region, range, outside, below, above })
}

/// Whether so many maps can be made.
pub(super) fn check_count(limits: &Limits, maps: usize) -> Result<(), PlanError> {
    let needed = u64::try_from(maps).unwrap_or(u64::MAX);
    match limits.mappings_left {
        Some(left) if needed > left => Err(PlanError::TooManyMaps { needed, left }),
        _ => Ok(()),
    }
}

/// A [`Plan`] whose IOVAs are held, to be carried out: from [`Mapper::plan`](super::Mapper::plan).
///
/// Dropped, it gives the IOVAs back.
#[derive(Debug)]
#[must_use = "a plan maps nothing until it is carried out"]
pub struct Planned<S: MemorySpace> {
    pub(super) inner: Arc<Inner<S>>,
    pub(super) plan: Plan,
    /// One for each map.
    pub(super) places: Vec<PlacedIovas>,
}

impl<S: MemorySpace> Planned<S> {
    /// Carries the plan out: populates memory that has no pages yet, and maps.
    ///
    /// # Errors
    ///
    /// [`MapError`], with nothing mapped unless it says [`LeftBehind`](MapError::LeftBehind).
    pub fn map(mut self) -> Result<MappedRegions<S>, MapError<S::Error>> {
        for map in &self.plan.maps {
            map.memory.populate_range(map.user)?;
        }
        let plan = mem::replace(&mut self.plan, Plan::empty(self.inner.places.leaves()));
        let mut mapped = MappedRegions::begin(Arc::clone(&self.inner), plan);
        // Unless all are mapped, the rest is given back with `self`.
        self.places.reverse();
        while let (Some(map), Some(place)) = (mapped.next(), self.places.pop()) {
            let (user, iova) = (map.user, map.iova);
            let (memory, space) = (&map.memory, &self.inner.space);
            match space.map_labelled(memory, user, iova.start(), map.prot, map.label) {
                Ok(()) => mapped.add(place),
                Err(source) => {
                    self.inner.free(place);
                    return Err(mapped.take_back(user, iova, source));
                }
            }
        }
        mapped.note();
        Ok(mapped)
    }
}

impl<S: MemorySpace> Deref for Planned<S> {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.plan
    }
}

impl<S: MemorySpace> Drop for Planned<S> {
    fn drop(&mut self) {
        self.places.drain(..).for_each(|place| self.inner.free(place));
    }
}
