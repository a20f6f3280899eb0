//! [`MappedRegions`] own what a [`Mapper`](super::Mapper) mapped, until it is unmapped.

use std::fmt;
use std::sync::Arc;

use dmaspan::{Iova, IovaRange, UserAddr, UserRange};

use super::book::MapState;
use super::mapper::{Inner, MemorySpace};
use super::places::{self, PlacedIovas};
use super::planned::{Plan, PlannedMap};
use super::{MapError, NotUnmapped, PartError, StillMapped};
use crate::log;

/// Regions that a device can use, from [`Mapper::map`](super::Mapper::map).
///
/// It keeps their memory, and the space, until they are unmapped: by [`unmap`](Self::unmap), which
/// says what failed, or when it is dropped. What the space does not unmap is leaked, and so is all
/// of it if this is forgotten: memory that a device may write is never freed.
#[must_use = "what is mapped is unmapped when this is dropped"]
pub struct MappedRegions<S: MemorySpace> {
    inner: Arc<Inner<S>>,
    plan: Plan,
    /// One for each map that was made, the first ones; `None` where it was unmapped or leaked.
    places: Vec<Option<PlacedIovas>>,
}

impl<S: MemorySpace> MappedRegions<S> {
    /// None of the plan's maps is made yet.
    pub(super) fn begin(inner: Arc<Inner<S>>, plan: Plan) -> Self {
        let places = Vec::with_capacity(plan.maps().len());
        Self { inner, plan, places }
    }

    /// The next map to be made.
    pub(super) fn next(&self) -> Option<&PlannedMap> {
        self.plan.maps().get(self.places.len())
    }

    /// Notes for whoever lists them that all are made: once for all, since it costs a look-up each.
    pub(super) fn note(&self) {
        self.inner.book.set_mapped(self.places.iter().flatten().map(|place| place.range));
    }

    /// Notes that the next map was made.
    pub(super) fn add(&mut self, place: PlacedIovas) {
        self.inner.count_mapped(place.range);
        self.places.push(Some(place));
    }

    /// Unmaps what was mapped, as one more was refused.
    pub(super) fn take_back(
        mut self,
        user: UserRange,
        iova: IovaRange,
        source: S::Error,
    ) -> MapError<S::Error> {
        match self.release(|_| true) {
            Ok(()) => MapError::Refused { user, iova, source },
            Err(why) => {
                let leaked = self.leak_rest();
                MapError::LeftBehind { user, iova, source, leaked, why }
            }
        }
    }

    /// Returns which maps were made, and of what.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns where the device sees a region, by its place in what was asked, from 0 on; `None`
    /// where there were fewer, and where it is not mapped any more.
    pub fn iova(&self, region: usize) -> Option<Iova> {
        let (map, iova) = self.plan.place_of(region)?;
        self.places.get(map)?.as_ref().map(|_| iova)
    }

    /// Returns where the device sees an address of the user; see [`Plan::translate`].
    pub fn translate(&self, user: UserAddr) -> Option<Iova> {
        self.plan.find(user, |map| self.places.get(map).is_some_and(Option::is_some))
    }

    /// Returns how many bytes are mapped.
    pub fn bytes(&self) -> u64 {
        self.held().map(|(map, _)| map.len()).fold(0, u64::saturating_add)
    }

    /// Unmaps what is mapped at `part`, and keeps the rest: a DIMM that is removed. How many bytes
    /// that was; 0 where nothing is mapped there. When this returns no device reaches them, and
    /// their IOVAs can be planned again.
    ///
    /// A part is whole [maps](Plan::maps), of which there are as few as can be: neighbouring
    /// regions are one. No kernel unmaps a part of what it mapped at once, and to unmap all of it
    /// and map the rest anew would take memory from a device that is using it. So a region that
    /// will go before its neighbours is planned [in a unit](super::Region::in_unit) of its own, for
    /// which [`unmap_unit`](Self::unmap_unit) is shorter.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use dmaspan::{Account, Container, HostAddr, Iova, IovaRange, Prot};
    /// use dmaspan_linux::plan::{Mapper, PartError, Region};
    /// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
    ///
    /// let container: Container<_, parking_lot::RawMutex> =
    ///     Container::new(LinuxPinner::<HostAddr>::new()?, Account::new(1 << 30));
    /// let mapper = Mapper::new(container)?;
    /// // Two DIMMs of 2 MiB, one behind the other, each of them 512 slots.
    /// let ram = Arc::new(Memory::new(MemoryKind::Memfd, 4 << 20)?);
    /// let mut slots = Vec::new();
    /// for n in 0..1024 {
    ///     let slot = Region::part(&ram, n << 12, 1 << 12, Prot::READ_WRITE)?;
    ///     slots.push(slot.at(Iova::new((1 << 30) + (n << 12))).in_unit(u32::from(n >= 512)));
    /// }
    /// let mut mapped = mapper.map(slots)?;
    /// assert_eq!(mapped.plan().maps().len(), 2);
    ///
    /// let half = IovaRange::from_len(Iova::new(1 << 30), 1 << 20)?;
    /// assert!(matches!(mapped.unmap_part(half), Err(PartError::Cuts { .. })));
    /// assert_eq!(mapped.bytes(), 4 << 20);
    /// assert_eq!(mapped.unmap_unit(1)?, 2 << 20);
    /// assert_eq!((mapped.bytes(), mapped.iova(512)), (2 << 20, None));
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PartError::Cuts`] where it would cut a map, with nothing changed; [`PartError::Left`]
    /// where the space does not unmap all of it.
    pub fn unmap_part(&mut self, part: IovaRange) -> Result<u64, PartError<S::Error>> {
        let cut = self.held().find(|(map, _)| {
            map.iova().intersection(part).is_some_and(|covered| covered != map.iova())
        });
        if let Some((map, _)) = cut {
            return Err(PartError::Cuts { part, map: map.iova() });
        }
        self.unmap_where(|map| part.covers(map.iova()))
    }

    /// Unmaps all regions of a [unit](super::Region::in_unit), and keeps the others. How many bytes
    /// that was; 0 where nothing of it is mapped.
    ///
    /// # Errors
    ///
    /// [`PartError::Left`] where the space does not unmap all of it.
    pub fn unmap_unit(&mut self, unit: u32) -> Result<u64, PartError<S::Error>> {
        self.unmap_where(|map| map.unit() == unit)
    }

    /// Unmaps the maps that are wanted, and returns how many bytes they were.
    fn unmap_where(
        &mut self,
        wanted: impl Fn(&PlannedMap) -> bool,
    ) -> Result<u64, PartError<S::Error>> {
        let before = self.bytes();
        match self.release(&wanted) {
            Ok(()) => Ok(before - self.bytes()),
            Err(source) => {
                let left = self.held().filter(|(map, _)| wanted(map)).map(|(map, _)| map.len());
                Err(PartError::Left { left: left.fold(0, u64::saturating_add), source })
            }
        }
    }

    /// Unmaps everything. When this returns no device reaches the memory.
    ///
    /// # Errors
    ///
    /// [`StillMapped`], with what is still mapped; everything else is unmapped.
    pub fn unmap(mut self) -> Result<(), StillMapped<S>> {
        match self.release(|_| true) {
            Ok(()) => Ok(()),
            Err(source) => Err(StillMapped { bytes: self.bytes(), left: self, source }),
        }
    }

    /// Gives up what is mapped: the memory is never freed and the IOVAs are never used again. How
    /// many bytes.
    pub fn leak(mut self) -> u64 {
        self.leak_rest()
    }

    fn held(&self) -> impl Iterator<Item = (&PlannedMap, &PlacedIovas)> {
        let all = self.plan.maps().iter().zip(&self.places);
        all.filter_map(|(map, place)| place.as_ref().map(|place| (map, place)))
    }

    /// Unmaps all wanted maps that it can, neighbours at once.
    fn release(
        &mut self,
        wanted: impl Fn(&PlannedMap) -> bool,
    ) -> Result<(), NotUnmapped<S::Error>> {
        let mut failed = None;
        let (mut maps, mut rest) = (self.plan.maps(), self.places.as_mut_slice());
        while let Some((range, count)) = neighbours(maps, rest, &wanted) {
            // None of them at all: those before are not wanted, or were unmapped.
            let (now, later) = rest.split_at_mut(count);
            (maps, rest) = (maps.get(count..).unwrap_or_default(), later);
            let Some(range) = range else { continue };
            let error = match self.inner.unmap(range) {
                Ok(()) => {
                    let places = now.iter_mut().filter_map(Option::take);
                    places.for_each(|place| self.inner.free(place));
                    continue;
                }
                Err(error) => error,
            };
            failed = failed.or(Some(error));
        }
        failed.map_or(Ok(()), Err)
    }

    /// Leaks what is mapped; how many bytes.
    fn leak_rest(&mut self) -> u64 {
        let mut leaked = 0;
        for (map, place) in self.plan.maps().iter().zip(&mut self.places) {
            if let Some(place) = place.take() {
                self.inner.book.set(place.range, MapState::Leaked);
                places::leak(map.memory(), place);
                leaked += map.len();
                log::warn!(
                    "{} at {} was not unmapped and leaks, so that a device may go on using it",
                    map.user(),
                    map.iova()
                );
            }
        }
        self.inner.count_leaked(leaked);
        leaked
    }
}

/// How many of the first maps to look at together: those that are wanted, mapped and follow one
/// another without a gap, with their range; or one that is not, without. `None` at the end.
fn neighbours(
    maps: &[PlannedMap],
    places: &[Option<PlacedIovas>],
    wanted: impl Fn(&PlannedMap) -> bool,
) -> Option<(Option<IovaRange>, usize)> {
    let mut places = maps.iter().zip(places);
    let range = |(map, place): (&PlannedMap, &Option<PlacedIovas>)| {
        place.as_ref().filter(|_| wanted(map)).map(|place| place.range)
    };
    let Some(mut joined) = range(places.next()?) else { return Some((None, 1)) };
    let mut count = 1;
    for next in places.map_while(range) {
        // They are sorted, and do not overlap.
        let Some(both) = joined.join(next) else { break };
        (joined, count) = (both, count + 1);
    }
    Some((Some(joined), count))
}

impl<S: MemorySpace> Drop for MappedRegions<S> {
    fn drop(&mut self) {
        if self.release(|_| true).is_err() {
            self.leak_rest();
        }
    }
}

impl<S: MemorySpace> fmt::Debug for MappedRegions<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedRegions")
            .field("plan", &self.plan)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}
