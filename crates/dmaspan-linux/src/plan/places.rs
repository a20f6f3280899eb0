//! This knows the IOVAs of a space, and who has them.
//!
//! The core's allocator aligns and does not make congruent, and it keeps the granule of IOVA 0 for
//! itself. So a range that is to be congruent to its memory modulo a leaf is a part of an aligned
//! one, which begins up to a leaf below it; IOVAs are plenty, and where they are not, smaller
//! leaves take less. A flag beside the allocator says whether the granule of 0 is taken: only a
//! region that asks for it gets it.
//!
//! The lowest IOVAs are handed out first. Maps that are planned together share a block of them
//! where they are small: to find IOVAs for each would cost as much as to map a few pages.

use std::mem::{self, ManuallyDrop};
use std::sync::Arc;

use dmaspan::iommu::iova::{self, Align, Iovas, Request, Space};
use dmaspan::space::Limits;
use dmaspan::{Iova, IovaRange, lg2};
use parking_lot::Mutex;

use super::PlanError;
use super::leaves::LeafSizes;
use super::merge::RegionRun;
use crate::platform::UserPlatform;

/// The IOVAs of the apertures of a space.
#[derive(Debug)]
pub(super) struct Places {
    granule: u64,
    leaves: LeafSizes,
    /// The last IOVA that is handed out unasked.
    limit: Iova,
    /// Behind a lock, although the allocator has its own: it passes over what lies in the cache of
    /// a thread that was interrupted there.
    state: Mutex<PlacesState>,
}

#[derive(Debug)]
struct PlacesState {
    iovas: Space<UserPlatform>,
    zero: Zero,
    apertures: Vec<IovaRange>,
}

/// The holder of the granule of IOVA 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zero {
    /// It is in no aperture.
    Outside,
    Free,
    Taken,
}

/// A block is no longer, unless one map is: larger maps cost the kernel more than they cost here.
const BLOCK_MOST: u64 = 1 << 30;

/// Where maps lie in a block, from its start on.
#[derive(Debug, Default)]
struct Layout {
    offsets: Vec<u64>,
    len: u64,
    align: u64,
}

/// IOVAs that one map has. Dropped, they are never handed out again, nor is the block they are of.
#[derive(Debug)]
#[must_use = "IOVAs that are dropped are lost for good"]
pub(super) struct PlacedIovas {
    /// Where the map is, in what is held.
    pub(super) range: IovaRange,
    /// What is held without the granule of 0, by one map or by those of a block. A drop does not
    /// let go of it: the last one to be freed would give back what another may still use.
    held: Option<ManuallyDrop<Arc<Iovas>>>,
    zero: Zero,
}

impl PlacedIovas {
    /// A part of what is held, or all of it.
    fn new(range: IovaRange, held: Arc<Iovas>) -> Self {
        Self { range, held: Some(ManuallyDrop::new(held)), zero: Zero::Outside }
    }
}

impl Places {
    /// The IOVAs of all apertures, up to `limit` for who does not ask for certain ones.
    pub(super) fn new(limits: &Limits, limit: Iova) -> Result<Self, PlanError> {
        let Limits { apertures, page_sizes, .. } = limits;
        let nothing =
            PlanError::NothingFits { page_sizes: *page_sizes, apertures: apertures.len() };
        let granule = limits.granule();
        if granule == 0 {
            return Err(nothing);
        }
        let granule_lg2 = lg2::floor(granule);
        let iovas = Space::with_apertures(apertures, granule_lg2, 1, UserPlatform);
        let iovas = iovas.map_err(|error| match error {
            iova::Error::NoMemory { .. } => PlanError::NoMemory,
            _ => nothing,
        })?;
        let zero = IovaRange::from_len(Iova::new(0), granule).map_err(|_| nothing)?;
        let has_zero = apertures.iter().any(|aperture| aperture.covers(zero));
        let zero = if has_zero { Zero::Free } else { Zero::Outside };
        let state = Mutex::new(PlacesState { iovas, zero, apertures: apertures.clone() });
        Ok(Self { granule, leaves: LeafSizes::new(*page_sizes), limit, state })
    }

    pub(super) fn leaves(&self) -> LeafSizes {
        self.leaves
    }

    /// Hands nothing more out of what is no longer in an aperture: a device was attached that
    /// reaches less. Apertures that became larger are not noticed.
    pub(super) fn narrow(&self, apertures: &[IovaRange]) {
        let mut state = self.state.lock();
        if state.apertures == apertures {
            return;
        }
        state.apertures = apertures.to_vec();
        state.reserve_gaps();
    }

    /// IOVAs for each of the maps: those it asks for, else such as permit the largest leaves.
    pub(super) fn take_all(&self, maps: &[RegionRun]) -> Result<Vec<PlacedIovas>, PlanError> {
        let mut taken = Vec::with_capacity(maps.len());
        let mut rest = maps;
        while !rest.is_empty() {
            let layout = self.layout(rest);
            let (maps, more) = rest.split_at(layout.offsets.len().clamp(1, rest.len()));
            rest = more;
            if maps.len() > 1 && self.take_block(maps, &layout, &mut taken) {
                continue;
            }
            for map in maps {
                match self.take(map) {
                    Ok(place) => taken.push(place),
                    Err(error) => {
                        taken.into_iter().for_each(|place| self.free(place));
                        return Err(error);
                    }
                }
            }
        }
        Ok(taken)
    }

    /// How the first of the maps lie in one block, where they do not ask for IOVAs.
    fn layout(&self, maps: &[RegionRun]) -> Layout {
        let mut layout = Layout::default();
        for map in maps.iter().take_while(|map| map.iova.is_none()) {
            let Some(leaf) = self.leaves.fitting(map.user).next() else { break };
            let skip = map.user.start().get().wrapping_sub(layout.len) & (leaf - 1);
            let Some(offset) = layout.len.checked_add(skip) else { break };
            let Some(behind) = offset.checked_add(map.len()).filter(|&end| end <= BLOCK_MOST)
            else {
                break;
            };
            layout.offsets.push(offset);
            layout.len = behind;
            layout.align = layout.align.max(leaf);
        }
        layout
    }

    /// Takes a block and says of each map where it is in it. Whether there was room.
    fn take_block(
        &self,
        maps: &[RegionRun],
        layout: &Layout,
        taken: &mut Vec<PlacedIovas>,
    ) -> bool {
        let Layout { ref offsets, len, align } = *layout;
        let request = Request { bytes: len, align: Align::To(align), limit: self.limit };
        let Ok(iovas) = self.state.lock().iovas.alloc(request) else { return false };
        let start = iovas.range().start();
        let block = Arc::new(iovas);
        let places = maps.iter().zip(offsets).filter_map(|(map, &offset)| {
            let first = start.wrapping_add(offset);
            // It is in the block.
            let range = IovaRange::new(first, first.wrapping_add(map.user.len_less_one()))?;
            Some(PlacedIovas::new(range, Arc::clone(&block)))
        });
        taken.extend(places);
        true
    }

    /// IOVAs for one map.
    fn take(&self, map: &RegionRun) -> Result<PlacedIovas, PlanError> {
        let mut state = self.state.lock();
        if let Some(range) = map.iovas() {
            return state.take_at(range, self.granule).map_err(|error| match error {
                iova::Error::NoMemory { .. } => PlanError::NoMemory,
                iova::Error::Taken { taken, .. } => {
                    PlanError::InUse { region: map.region, range, taken }
                }
                _ => PlanError::InUse { region: map.region, range, taken: range },
            });
        }
        let start = map.user.start().get();
        for leaf in self.leaves.fitting(map.user) {
            let skew = start & (leaf - 1);
            let Some(bytes) = map.len().checked_add(skew) else { continue };
            let request = Request { bytes, align: Align::To(leaf), limit: self.limit };
            let held = match state.iovas.alloc(request) {
                Ok(held) => held,
                Err(iova::Error::NoMemory { .. }) => return Err(PlanError::NoMemory),
                Err(_) => continue,
            };
            let first = held.range().start().wrapping_add(skew);
            let range = IovaRange::new(first, first.wrapping_add(map.user.len_less_one()));
            // What is held begins `skew` before the range and is as long as both.
            let Some(range) = range else { continue };
            return Ok(PlacedIovas::new(range, Arc::new(held)));
        }
        Err(PlanError::NoRoom { region: map.region, len: map.len(), limit: self.limit })
    }

    /// Takes IOVAs back at which nothing is mapped any more.
    pub(super) fn free(&self, place: PlacedIovas) {
        let PlacedIovas { held, zero, .. } = place;
        if zero == Zero::Taken {
            self.state.lock().zero = Zero::Free;
        }
        let held = held.map(ManuallyDrop::into_inner);
        if let Some(iovas) = held.and_then(Arc::into_inner) {
            self.state.lock().free(iovas);
        }
    }

    /// The smallest page, in bytes.
    pub(super) fn granule(&self) -> u64 {
        self.granule
    }
}

impl PlacesState {
    /// Exactly `range`, which is whole granules.
    fn take_at(&mut self, range: IovaRange, granule: u64) -> Result<PlacedIovas, iova::Error> {
        if range.start().get() >= granule {
            return Ok(PlacedIovas::new(range, Arc::new(self.iovas.alloc_at(range)?)));
        }
        if self.zero != Zero::Free {
            let last = Iova::new(granule - 1);
            let taken = IovaRange::new(Iova::new(0), last).unwrap_or(range);
            return Err(iova::Error::Taken { range, taken });
        }
        let rest = IovaRange::new(Iova::new(granule), range.last());
        let held = rest.map(|rest| self.iovas.alloc_at(rest)).transpose()?;
        let held = held.map(|iovas| ManuallyDrop::new(Arc::new(iovas)));
        self.zero = Zero::Taken;
        Ok(PlacedIovas { range, held, zero: Zero::Taken })
    }

    /// Takes back what no longer lies in an aperture too, and does not hand it out again.
    fn free(&mut self, iovas: Iovas) {
        let range = iovas.range();
        // They are of this space. Those of another one would be lost.
        let _ = self.iovas.free(iovas);
        if !self.apertures.iter().any(|aperture| aperture.covers(range)) {
            self.reserve_gaps();
        }
    }

    /// Keeps what is free and in no aperture from being handed out.
    fn reserve_gaps(&mut self) {
        let mut gaps = Vec::with_capacity(self.apertures.len() + 1);
        let mut at = Some(Iova::new(0));
        for aperture in &self.apertures {
            let last = aperture.start().get().checked_sub(1).map(Iova::new);
            gaps.extend(at.zip(last));
            at = aperture.last().checked_add(1);
        }
        gaps.extend(at.zip(Some(Iova::new(u64::MAX))));
        gaps.into_iter().for_each(|(start, last)| self.reserve(start, last));
    }

    /// Keeps what is free from `start` to `last` from being handed out.
    fn reserve(&mut self, start: Iova, last: Iova) {
        let mut from = Some(start);
        if start == Iova::new(0) && self.zero == Zero::Free {
            self.zero = Zero::Outside;
        }
        while let Some(range) = from.and_then(|from| IovaRange::new(from, last)) {
            // What has no record can still be handed out, and the space refuses it then.
            let Err(iova::Error::Taken { taken, .. }) = self.iovas.reserve(range) else { return };
            let before = taken.start().get().checked_sub(1).map(Iova::new);
            if let Some(free) = before.and_then(|last| IovaRange::new(range.start(), last)) {
                let _ = self.iovas.reserve(free);
            }
            from = taken.last().checked_add(1);
        }
    }
}

/// What keeps memory and IOVAs of a map that a device may still use: never freed, never reused.
pub(super) fn leak<T>(memory: &Arc<T>, place: PlacedIovas) {
    mem::forget(Arc::clone(memory));
    drop(place);
}
