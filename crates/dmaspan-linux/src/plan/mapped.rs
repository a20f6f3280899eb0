//! [`MappedRegions`] own what a [`Mapper`](super::Mapper) mapped, until it is unmapped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dmaspan::{Iova, IovaRange, UserAddr, UserRange};

use super::mapper::{Inner, MemorySpace};
use super::places::{self, PlacedIovas};
use super::planned::{Plan, PlannedMap};
use super::{MapError, NotUnmapped, StillMapped};

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

    /// Notes that the next map was made.
    pub(super) fn add(&mut self, place: PlacedIovas) {
        let bytes = place.range.len_less_one() + 1;
        self.places.push(Some(place));
        self.inner.mapped.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Unmaps what was mapped, as one more was refused.
    pub(super) fn take_back(
        mut self,
        user: UserRange,
        iova: IovaRange,
        source: S::Error,
    ) -> MapError<S::Error> {
        match self.release() {
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

    /// Unmaps everything. When this returns no device reaches the memory.
    ///
    /// # Errors
    ///
    /// [`StillMapped`], with what is still mapped; everything else is unmapped.
    pub fn unmap(mut self) -> Result<(), StillMapped<S>> {
        match self.release() {
            Ok(()) => Ok(()),
            Err(source) => Err(StillMapped { left: self, source }),
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

    /// Unmaps all that it can, neighbours at once.
    fn release(&mut self) -> Result<(), NotUnmapped<S::Error>> {
        let mut failed = None;
        let mut rest = self.places.as_mut_slice();
        while !rest.is_empty() {
            let Some((range, count)) = neighbours(rest) else {
                // Unmapped before.
                rest = rest.split_at_mut(1).1;
                continue;
            };
            let (now, later) = rest.split_at_mut(count);
            rest = later;
            let bytes = range.len_less_one().saturating_add(1);
            let error = match self.inner.space.unmap(range) {
                Ok(unmapped) if unmapped == bytes => {
                    let places = now.iter_mut().filter_map(Option::take);
                    places.for_each(|place| self.inner.places.free(place));
                    self.inner.mapped.fetch_sub(bytes, Ordering::Relaxed);
                    continue;
                }
                Ok(unmapped) => NotUnmapped::Short { range, unmapped },
                Err(source) => NotUnmapped::Refused { range, source },
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
                places::leak(map.memory(), place);
                leaked += map.len();
            }
        }
        self.inner.mapped.fetch_sub(leaked, Ordering::Relaxed);
        self.inner.leaked.fetch_add(leaked, Ordering::Relaxed);
        leaked
    }
}

/// The range of the first place and of those that follow it without a gap, and how many they are;
/// `None` where the first is none.
fn neighbours(places: &[Option<PlacedIovas>]) -> Option<(IovaRange, usize)> {
    let mut rest = places.iter();
    let mut range = rest.next()?.as_ref()?.range;
    let mut count = 1;
    for place in rest.map_while(Option::as_ref) {
        // They are sorted, and do not overlap.
        let Some(joined) = range.join(place.range) else { break };
        (range, count) = (joined, count + 1);
    }
    Some((range, count))
}

impl<S: MemorySpace> Drop for MappedRegions<S> {
    fn drop(&mut self) {
        if self.release().is_err() {
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
