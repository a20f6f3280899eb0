//! This knows the IOVAs of a space, and who has them.
//!
//! The core's allocator aligns and does not make congruent, and it keeps the granule of IOVA 0 for
//! itself. So a range that is to be congruent to its memory modulo a leaf is a part of an aligned
//! one, which begins up to a leaf below it; IOVAs are plenty, and where they are not, smaller
//! leaves take less. A flag beside the allocator says whether the granule of 0 is taken: only a
//! region that asks for it gets it.
//!
//! What others have mapped in the space is not known here, so every choice is shown to the space
//! before it holds. What was in the way then is passed over from there on, until nothing else fits:
//! then all of it is looked at anew.
//!
//! The lowest IOVAs are handed out first. Maps that are planned together share a block of them
//! where they are small: to find IOVAs for each would cost as much as to map a few pages.

use std::iter;
use std::mem::{self, ManuallyDrop};
use std::sync::Arc;

use dmaspan::iommu::iova::{self, Align, IovaState, Iovas, Request, Space};
use dmaspan::space::Limits;
use dmaspan::{Iova, IovaRange, UserRange, lg2};
use parking_lot::Mutex;

use super::PlanError;
use super::leaves::LeafSizes;
use super::merge::{RegionOwner, RegionRun};
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
    /// Held because others had mapped something there when it was chosen last.
    others: Vec<Iovas>,
}

/// The holder of the granule of IOVA 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zero {
    /// It is in no aperture.
    Outside,
    Free,
    Taken,
}

/// What IOVAs are wanted for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Where the process has it, whose bytes are fewer than an address space has.
    pub(super) user: UserRange,
    /// Where the device shall see it; `None` for wherever there is room.
    pub(super) iova: Option<Iova>,
    /// The alignment of IOVAs that are chosen, a power of two. The user's address has it too.
    pub(super) align: u64,
    /// The region that errors name.
    pub(super) region: usize,
}

impl Wanted {
    /// How many bytes.
    pub(super) const fn len(self) -> u64 {
        self.user.len_less_one() + 1
    }

    /// Which IOVAs are asked for, if any; their end was checked.
    pub(super) fn iovas(self) -> Option<IovaRange> {
        let start = self.iova?;
        IovaRange::new(start, start.wrapping_add(self.user.len_less_one()))
    }
}

/// Says where others have mapped something: [`DmaSpace::mapped_in`](dmaspan::DmaSpace::mapped_in).
pub(super) type Others<'a> = &'a dyn Fn(IovaRange) -> Option<IovaRange>;

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
            || PlanError::NothingFits { page_sizes: *page_sizes, apertures: apertures.len() };
        let granule = limits.granule();
        if granule == 0 {
            return Err(nothing());
        }
        let granule_lg2 = lg2::floor(granule);
        let iovas = Space::with_apertures(apertures, granule_lg2, 1, UserPlatform);
        let iovas = iovas.map_err(|error| match error {
            iova::Error::NoMemory { .. } => PlanError::NoMemory,
            _ => nothing(),
        })?;
        let zero = zero_granule(granule).ok_or_else(nothing)?;
        let has_zero = apertures.iter().any(|aperture| aperture.covers(zero));
        let zero = if has_zero { Zero::Free } else { Zero::Outside };
        let state = Mutex::new(PlacesState {
            iovas,
            zero,
            apertures: apertures.clone(),
            others: Vec::new(),
        });
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
    pub(super) fn take_all<M: RegionOwner>(
        &self,
        maps: &[RegionRun<M>],
        others: Others<'_>,
    ) -> Result<Vec<PlacedIovas>, PlanError> {
        let mut taken = Vec::with_capacity(maps.len());
        let mut rest = maps;
        while !rest.is_empty() {
            let layout = self.layout(rest);
            let (maps, more) = rest.split_at(layout.offsets.len().clamp(1, rest.len()));
            rest = more;
            if maps.len() > 1 && self.take_block(maps, &layout, others, &mut taken) {
                continue;
            }
            for map in maps {
                match self.take(map.wanted(), others) {
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
    fn layout<M: RegionOwner>(&self, maps: &[RegionRun<M>]) -> Layout {
        let mut layout = Layout::default();
        for map in maps.iter().map(RegionRun::wanted).take_while(|map| map.iova.is_none()) {
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
    fn take_block<M: RegionOwner>(
        &self,
        maps: &[RegionRun<M>],
        layout: &Layout,
        others: Others<'_>,
        taken: &mut Vec<PlacedIovas>,
    ) -> bool {
        let Layout { ref offsets, len, align } = *layout;
        let request = Request { bytes: len, align: Align::To(align), limit: self.limit };
        let Ok(iovas) = self.alloc(request, others) else { return false };
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
    pub(super) fn take(
        &self,
        wanted: Wanted,
        others: Others<'_>,
    ) -> Result<PlacedIovas, PlanError> {
        if let Some(range) = wanted.iovas() {
            return self.take_at(wanted.region, range, others);
        }
        match self.take_anywhere(wanted, others) {
            // What others had may be free by now.
            Err(PlanError::NoRoom { .. }) if self.state.lock().forget_others() => {
                self.take_anywhere(wanted, others)
            }
            result => result,
        }
    }

    /// The lowest IOVAs that permit the largest leaves.
    fn take_anywhere(&self, wanted: Wanted, others: Others<'_>) -> Result<PlacedIovas, PlanError> {
        let Wanted { user, align, region, .. } = wanted;
        for leaf in self.leaves.fitting(user) {
            let unit = leaf.max(align);
            let skew = user.start().get() & (unit - 1);
            let Some(bytes) = wanted.len().checked_add(skew) else { continue };
            let request = Request { bytes, align: Align::To(unit), limit: self.limit };
            let held = match self.alloc(request, others) {
                Ok(held) => held,
                Err(iova::Error::NoMemory { .. }) => return Err(PlanError::NoMemory),
                Err(_) => continue,
            };
            let first = held.range().start().wrapping_add(skew);
            let range = IovaRange::new(first, first.wrapping_add(user.len_less_one()));
            // What is held begins `skew` before the range and is as long as both.
            let Some(range) = range else { continue };
            return Ok(PlacedIovas::new(range, Arc::new(held)));
        }
        Err(PlanError::NoRoom { region, len: wanted.len(), limit: self.limit })
    }

    /// IOVAs at which nobody has mapped anything.
    fn alloc(&self, request: Request, others: Others<'_>) -> Result<Iovas, iova::Error> {
        loop {
            let iovas = self.state.lock().iovas.alloc(request)?;
            // Without the lock: the space has locks of its own.
            let mapped =
                others(iovas.range()).filter(|it| it.intersection(iovas.range()).is_some());
            let Some(mapped) = mapped else { return Ok(iovas) };
            self.state.lock().pass_over(iovas, mapped, self.granule)?;
        }
    }

    /// Exactly `range`, which is whole granules.
    fn take_at(
        &self,
        region: usize,
        range: IovaRange,
        others: Others<'_>,
    ) -> Result<PlacedIovas, PlanError> {
        let taken = {
            let mut state = self.state.lock();
            match state.take_at(range, self.granule) {
                Err(iova::Error::Taken { .. }) if state.forget_others() => {
                    state.take_at(range, self.granule)
                }
                result => result,
            }
        };
        let place = match taken {
            Ok(place) if others(range).is_none() => return Ok(place),
            Ok(place) => Some(place),
            Err(iova::Error::NoMemory { .. }) => return Err(PlanError::NoMemory),
            Err(_) => None,
        };
        if let Some(place) = place {
            self.free(place);
        }
        let taken = self.in_the_way(range, others);
        Err(PlanError::InUse { region, range, taken })
    }

    /// Where `range` is mapped, planned or excluded, by whomever: sorted, neighbours joined.
    fn in_the_way(&self, range: IovaRange, others: Others<'_>) -> Vec<IovaRange> {
        let mut found = {
            let state = self.state.lock();
            let zero = zero_granule(self.granule).filter(|_| state.zero != Zero::Free);
            let zero = zero.filter(|zero| zero.intersection(range).is_some());
            zero.into_iter().chain(in_use(&state.iovas, range)).collect::<Vec<_>>()
        };
        found.extend(each(range, others));
        found.sort_unstable_by_key(|taken| taken.start());
        join_all(found)
    }

    /// Hands nothing out of `range` any more, in whole granules.
    pub(super) fn exclude(&self, range: IovaRange) -> Result<(), PlanError> {
        let mut state = self.state.lock();
        // What others have there is what the range is excluded for.
        state.forget_others();
        let zero = zero_granule(self.granule);
        let zero = zero.filter(|zero| zero.intersection(range).is_some());
        let is_taken = zero.is_some() && state.zero == Zero::Taken;
        let reserved = if is_taken { Ok(()) } else { state.iovas.reserve(range) };
        match reserved {
            Ok(()) if !is_taken => {
                if zero.is_some() {
                    state.zero = Zero::Outside;
                }
                Ok(())
            }
            Err(iova::Error::NoMemory { .. }) => Err(PlanError::NoMemory),
            _ => {
                let held = state.iovas.list_in(range);
                let held = held.filter(|listed| listed.state == IovaState::InUse);
                let held = held.map(|listed| listed.range);
                let taken = zero.filter(|_| is_taken).into_iter().chain(held);
                Err(PlanError::Held { range, taken: join_all(taken) })
            }
        }
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
            let taken = zero_granule(granule).unwrap_or(range);
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
        let gaps: Vec<_> = IovaRange::ALL.minus(&self.apertures).collect();
        for gap in gaps {
            if gap.start() == Iova::new(0) && self.zero == Zero::Free {
                self.zero = Zero::Outside;
            }
            // What has no record can still be handed out, and the space refuses it then.
            let _ = each_free(&self.iovas, gap, |free| self.iovas.reserve(free));
        }
    }

    /// Gives `iovas` back, and holds what is free of `mapped`, which others have, in its place.
    fn pass_over(
        &mut self,
        iovas: Iovas,
        mapped: IovaRange,
        granule: u64,
    ) -> Result<(), iova::Error> {
        self.free(iovas);
        let last = Iova::new(mapped.last().get() | (granule - 1));
        let first = Iova::new(mapped.start().get() & !(granule - 1));
        let whole = IovaRange::new(first, last);
        let whole = whole.and_then(|whole| whole.intersection(self.iovas.aperture()));
        let Some(whole) = whole else { return Ok(()) };
        each_free(&self.iovas, whole, |free| {
            self.others.push(self.iovas.alloc_at(free)?);
            Ok(())
        })
    }

    /// Gives back what others had; whether there was any.
    fn forget_others(&mut self) -> bool {
        let others = mem::take(&mut self.others);
        let had_any = !others.is_empty();
        others.into_iter().for_each(|iovas| self.free(iovas));
        had_any
    }
}

/// Does something with each free part of `range`.
fn each_free(
    iovas: &Space<UserPlatform>,
    range: IovaRange,
    mut with: impl FnMut(IovaRange) -> Result<(), iova::Error>,
) -> Result<(), iova::Error> {
    let taken = join_all(in_use(iovas, range));
    range.minus(&taken).try_for_each(&mut with)
}

/// What is handed out or reserved in `range`, by address; what lies in caches is free.
fn in_use(iovas: &Space<UserPlatform>, range: IovaRange) -> impl Iterator<Item = IovaRange> {
    let listed = iovas.list_in(range).filter(|listed| listed.state != IovaState::Cached);
    listed.map(|listed| listed.range)
}

/// What `first` finds in `range`, and in the rest behind that, to the end.
fn each(
    range: IovaRange,
    first: impl Fn(IovaRange) -> Option<IovaRange>,
) -> impl Iterator<Item = IovaRange> {
    let mut rest = Some(range);
    iter::from_fn(move || {
        // What does not overlap is no answer, and would be given again and again.
        let found = first(rest?).filter(|found| found.intersection(range).is_some())?;
        let behind =
            found.last().checked_add(1).filter(|behind| Some(*behind) > rest.map(IovaRange::start));
        rest = behind.and_then(|behind| IovaRange::new(behind, range.last()));
        Some(found)
    })
}

/// Neighbours as one, of sorted ranges.
fn join_all(ranges: impl IntoIterator<Item = IovaRange>) -> Vec<IovaRange> {
    let mut joined: Vec<IovaRange> = Vec::new();
    for range in ranges {
        match joined.last_mut().and_then(|last| Some((last.join(range)?, last))) {
            Some((both, last)) => *last = both,
            None => joined.push(range),
        }
    }
    joined
}

/// The IOVAs that the allocator keeps for itself.
fn zero_granule(granule: u64) -> Option<IovaRange> {
    IovaRange::from_len(Iova::new(0), granule).ok()
}

/// What keeps memory and IOVAs of a map that a device may still use: never freed, never reused.
pub(super) fn leak<T>(memory: &Arc<T>, place: PlacedIovas) {
    mem::forget(Arc::clone(memory));
    drop(place);
}
