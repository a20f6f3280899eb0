//! This merges regions into the fewest maps.
//!
//! A map is one range of a memory, seen at one range of IOVAs with one permission, for one unit. So
//! regions with IOVAs of their own are the fewest maps if neighbours are merged in the order of
//! IOVAs, and regions without are if those of one memory, permission and unit are merged in the
//! order of addresses. Regions that follow one another already are merged as they come, so that
//! many small pieces in order cost neither memory nor sorting.

use std::sync::Arc;

use dmaspan::{Iova, IovaRange, Label, Prot, UserAddr, UserRange};

use super::places::Wanted;
use super::{PlanError, Region};
use crate::mem::{Memory, OutsideMemory};

/// What regions are parts of: memory, or what stands for memory on paper.
pub(super) trait RegionOwner: Clone {
    /// All of its addresses.
    fn range(&self) -> UserRange;

    /// A number that no other owner has.
    fn number(&self) -> u64;
}

impl RegionOwner for Arc<Memory> {
    fn range(&self) -> UserRange {
        self.user_range()
    }

    fn number(&self) -> u64 {
        u64::try_from(Arc::as_ptr(self).addr()).unwrap_or(u64::MAX)
    }
}

/// Neighbouring regions, in the order in which they came or as one map.
#[derive(Clone, Debug)]
pub(super) struct RegionRun<M> {
    pub(super) memory: M,
    pub(super) user: UserRange,
    pub(super) iova: Option<Iova>,
    pub(super) prot: Prot,
    pub(super) label: Label,
    pub(super) unit: u32,
    /// The region it begins with.
    pub(super) region: usize,
}

/// Where a region went.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Which run of those that came.
    pub(super) run: usize,
    pub(super) start: UserAddr,
}

/// All regions, merged.
#[derive(Debug)]
pub(super) struct Merged<M> {
    pub(super) maps: Vec<RegionRun<M>>,
    pub(super) pieces: Vec<Piece>,
    /// Which map each run is in.
    pub(super) map_of_run: Vec<usize>,
}

/// What runs are sorted by: those with IOVAs by them, the others by memory, permission, unit,
/// address.
type Key = (bool, u64, u32, u32, u64);

impl From<Region> for RegionRun<Arc<Memory>> {
    fn from(region: Region) -> Self {
        let Region { memory, user, iova, prot, label, unit } = region;
        Self { memory, user, iova, prot, label, unit, region: 0 }
    }
}

impl<M: RegionOwner> RegionRun<M> {
    /// A run of one region, if it is one.
    fn numbered(self, region: usize) -> Result<Self, PlanError> {
        let run = Self { region, ..self };
        let (user, prot, memory) = (run.user, run.prot, run.memory.range());
        if !memory.covers(user) {
            let source = OutsideMemory { range: user, memory };
            return Err(PlanError::Outside { region, source });
        }
        if !prot.permits_access() {
            return Err(PlanError::NoAccess { region, prot });
        }
        if let Some(iova) = run.iova {
            IovaRange::from_len(iova, run.wanted().len())
                .map_err(|source| PlanError::Wraps { region, source })?;
        }
        Ok(run)
    }

    fn key(&self) -> Key {
        match self.iova {
            Some(iova) => (false, iova.get(), 0, 0, 0),
            None => {
                let memory = self.memory.number();
                (true, memory, self.prot.bits(), self.unit, self.user.start().get())
            }
        }
    }

    /// Where its IOVAs are to be.
    pub(super) fn wanted(&self) -> Wanted {
        Wanted { user: self.user, iova: self.iova, align: 1, region: self.region }
    }

    /// Whether both are of one memory and one unit, for the same use.
    fn is_alike(&self, other: &Self) -> bool {
        self.memory.number() == other.memory.number()
            && (self.prot, self.unit) == (other.prot, other.unit)
    }

    /// Both as one, where `next` is behind this, or without an IOVA also in it.
    #[inline]
    fn joined(&self, next: &Self) -> Option<UserRange> {
        if !self.is_alike(next) {
            return None;
        }
        match (self.iova, next.iova) {
            (Some(iova), Some(next_iova)) => {
                let follows = self.user.last().checked_add(1) == Some(next.user.start())
                    && iova.checked_add(self.wanted().len()) == Some(next_iova);
                if follows { self.user.join(next.user) } else { None }
            }
            (None, None) if next.user.start() >= self.user.start() => self.user.join(next.user),
            _ => None,
        }
    }
}

/// Merges regions into the fewest maps: O(n log n), and O(n) where they come in order.
///
/// # Errors
///
/// [`PlanError`] for a region that is none, and for regions that overlap.
pub(super) fn merge<M: RegionOwner>(
    regions: impl IntoIterator<Item = RegionRun<M>>,
) -> Result<Merged<M>, PlanError> {
    let regions = regions.into_iter();
    let mut runs: Vec<RegionRun<M>> = Vec::new();
    let mut pieces = Vec::with_capacity(regions.size_hint().0);
    for (index, region) in regions.enumerate() {
        let next = region.numbered(index)?;
        let start = next.user.start();
        match runs.last_mut().map(|run| (run.joined(&next), run)) {
            Some((Some(user), run)) => run.user = user,
            _ => runs.push(next),
        }
        pieces.push(Piece { run: runs.len() - 1, start });
    }
    let mut map_of_run = vec![0; runs.len()];
    if runs.len() <= 1 {
        return Ok(Merged { maps: runs, pieces, map_of_run });
    }
    map_of_run.fill(usize::MAX);
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by_key(|&index| runs.get(index).map(RegionRun::key));
    let mut maps: Vec<RegionRun<M>> = Vec::new();
    for index in order {
        let Some(run) = runs.get(index) else { continue };
        let map_count = maps.len();
        match maps.last_mut().map(|map| (map.joined(run), map)) {
            Some((Some(user), map)) => map.user = user,
            Some((None, map)) => {
                let number = map_count - 1;
                let start = |piece: &Piece| {
                    let run = runs.get(piece.run)?;
                    let is_in = map_of_run.get(piece.run) == Some(&number);
                    let skip = piece.start.get() - run.user.start().get();
                    is_in.then_some(run.iova?.wrapping_add(skip))
                };
                check_overlap(map, run, start, &pieces)?;
                maps.push(run.clone());
            }
            None => maps.push(run.clone()),
        }
        if let Some(map) = map_of_run.get_mut(index) {
            *map = maps.len() - 1;
        }
    }
    Ok(Merged { maps, pieces, map_of_run })
}

/// Refuses a run whose IOVAs begin in the map before it, whose runs have `map` in `map_of_run`.
fn check_overlap<M: RegionOwner>(
    before: &RegionRun<M>,
    run: &RegionRun<M>,
    is_before: impl Fn(&Piece) -> Option<Iova>,
    pieces: &[Piece],
) -> Result<(), PlanError> {
    let (Some(low), Some(high)) = (before.wanted().iovas(), run.wanted().iovas()) else {
        return Ok(());
    };
    if high.start() > low.last() {
        return Ok(());
    }
    let starts = pieces.iter().enumerate().filter_map(|(n, piece)| Some((is_before(piece)?, n)));
    let reaching = starts.filter(|(start, _)| *start <= high.start());
    let region = reaching.max().map_or(before.region, |(_, region)| region);
    Err(PlanError::Overlap { regions: [region, run.region], ranges: [low, high] })
}
