//! The slow half of a space: these operations take the lock of the depot.
//!
//! No thread waits for a CPU's flag, which is held either for some instructions or under this lock.
//! So the holder of the lock finds all flags free but those of moments and of interrupted CPUs.

use core::fmt;

use lock_api::{Mutex, MutexGuard};

use super::depot::Depot;
use super::error::Error;
use super::magazine::{Magazines, Zone};
use super::request::{Align, Request, UNCACHED, Wanted};
use super::{IovaStats, Iovas, Space};
use crate::addr::Iova;
use crate::atomic::Ordering;
use crate::lg2;
use crate::platform::{Flag, Platform};
use crate::range::IovaRange;

/// How often a CPU's magazines are tried by who needs what is in them.
#[cfg(not(loom))]
const TRIES: u32 = 100;
#[cfg(loom)]
const TRIES: u32 = 1;

impl<P: Platform> Space<P> {
    /// Keeps `range`, widened to whole granules, from being handed out. What is reserved already
    /// may be so again; what lies outside of the aperture is never handed out anyway.
    ///
    /// # Errors
    ///
    /// [`Error::Taken`] where part of it was handed out, with nothing changed: in Linux it would
    /// silently grow what is in use. [`Error::NoMemory`].
    ///
    /// # Context
    ///
    /// Takes the lock of the space and may allocate; so does [`alloc_at`](Self::alloc_at).
    pub fn reserve(&self, range: IovaRange) -> Result<(), Error> {
        let mut depot = self.depot.lock();
        match depot.tree.reserve(range) {
            // It may be in a cache.
            Err(Error::Taken { .. }) if self.drain(&mut depot) > 0 => depot.tree.reserve(range),
            result => result,
        }
    }

    /// Exactly these IOVAs, whole granules: for what has its place already, in a table that is
    /// taken over or for a guest that chose.
    ///
    /// # Errors
    ///
    /// [`Error::Taken`] where part of it is reserved, handed out, or not of the aperture,
    /// [`Error::Unaligned`] where it is not of whole granules, [`Error::NoMemory`].
    pub fn alloc_at(&self, range: IovaRange) -> Result<Iovas, Error> {
        let granule = lg2::size(self.granule_lg2);
        let ends = range.start().get() | range.last().get().wrapping_add(1);
        if !lg2::is_aligned(ends, self.granule_lg2) {
            return Err(Error::Unaligned { range, granule });
        }
        let mut depot = self.depot.lock();
        match depot.tree.alloc_at(range) {
            // It may be in a cache.
            Err(Error::Taken { .. }) if self.drain(&mut depot) > 0 => depot.tree.alloc_at(range)?,
            result => result?,
        }
        Ok(self.handle(range, UNCACHED))
    }

    /// Returns how much is where.
    pub fn stats(&self) -> IovaStats {
        self.count(&self.depot.lock())
    }

    fn count(&self, depot: &Depot) -> IovaStats {
        let own = self.cpus.iter().filter_map(|own| try_for_long(own)).map(|own| own.count());
        let cached = depot.count() + own.sum::<usize>();
        let (allocated, reserved) = (depot.tree.allocated(), depot.tree.reserved());
        // The aperture has no IOVA 0, so its length is a number.
        let free = self.aperture.len_less_one() + 1 - (allocated.bytes + reserved.bytes);
        let live = allocated.ranges.saturating_sub(cached);
        IovaStats { live, cached, free, reserved: reserved.bytes }
    }

    /// From the depot, the tree, or all that lies in caches. The request comes in parts: one that
    /// goes into a function as a whole is written to memory where it does not, too.
    #[cold]
    #[inline(never)]
    pub(super) fn alloc_shared(
        &self,
        bytes: u64,
        align: Align,
        limit: Iova,
    ) -> Result<(IovaRange, u32), Error> {
        let request = Request { bytes, align, limit };
        let mut wanted = Wanted::new(request, self.granule_lg2)?;
        let align = lg2::size(wanted.align_lg2.min(63));
        let exhausted = Error::Exhausted { bytes: request.bytes, align, limit: request.limit };
        let reach = IovaRange::new(self.aperture.start(), self.aperture.last().min(request.limit));
        if reach.is_none_or(|reach| reach.len_less_one() < wanted.above) {
            return Err(exhausted);
        }
        let mut depot = self.depot.lock();
        if wanted.class != UNCACHED
            && let Some(mut own) = self.own()
        {
            if depot.load(&mut own, &wanted) > 0 {
                self.announce(&mut own);
            }
            if let Some(start) = own.take(&wanted) {
                return Ok((wanted.at(start), wanted.class));
            }
        }
        let mut found = depot.alloc(&wanted)?;
        if found.is_none() && self.drain(&mut depot) > 0 {
            found = depot.alloc(&wanted)?;
        }
        if found.is_none() && wanted.class != UNCACHED {
            // There may be room for it and not for what caches would take.
            wanted.class = UNCACHED;
            found = depot.alloc(&wanted)?;
        }
        let range = found.ok_or(exhausted)?;
        Ok((wanted.at(range.start().get()), wanted.class))
    }

    /// To the depot or the tree, and room is made in the magazine.
    #[cold]
    #[inline(never)]
    pub(super) fn free_shared(&self, range: IovaRange, class: u32) {
        let mut depot = self.depot.lock();
        if class == UNCACHED {
            depot.tree.free(range);
            return;
        }
        let start = range.start().get();
        if let Some(mut own) = self.own() {
            let zone = Zone::of(start);
            if let Some(magazine) = own.get_mut(zone, class) {
                depot.unload(magazine, zone, class);
            }
            if own.put(start, class) {
                self.announce(&mut own);
                return;
            }
        }
        depot.free(start, class);
    }

    /// Gives all that lies in caches back to the tree; how many ranges.
    fn drain(&self, depot: &mut Depot) -> usize {
        let mut drained = depot.drain();
        for (word, stocked) in self.stocked.iter().enumerate() {
            let mut marks = stocked.load(Ordering::Relaxed);
            while marks != 0 {
                let mark = marks & marks.wrapping_neg();
                marks ^= mark;
                let cpu = 64 * word + mark.trailing_zeros() as usize;
                let Some(mut own) = self.cpus.get(cpu).and_then(|own| try_for_long(own)) else {
                    continue;
                };
                own.drain(|start, class| {
                    depot.free(start, class);
                    drained += 1;
                });
                own.is_known = false;
                stocked.fetch_and(!mark, Ordering::Relaxed);
            }
        }
        drained
    }

    /// Marks a CPU whose magazines are no longer known to be empty. Its flag is held, so the mark
    /// and what it says change together.
    #[cold]
    pub(super) fn mark(&self, cpu: usize) {
        if let Some(stocked) = self.stocked.get(cpu / 64) {
            stocked.fetch_or(1 << (cpu % 64), Ordering::Relaxed);
        }
    }
}

/// Tries so often that only an interrupted CPU is missed. It may have been interrupted by the
/// caller, so this comes to an end.
pub(super) fn try_for_long(
    own: &Mutex<Flag, Magazines>,
) -> Option<MutexGuard<'_, Flag, Magazines>> {
    (0..TRIES).find_map(|_| {
        let own = own.try_lock();
        if own.is_none() {
            core::hint::spin_loop();
        }
        own
    })
}

impl<P: Platform> fmt::Debug for Space<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Space");
        debug.field("aperture", &self.aperture);
        if let Some(depot) = self.depot.try_lock() {
            let IovaStats { live, cached, free, reserved } = self.count(&depot);
            debug.field("live", &live).field("cached", &cached);
            debug.field("free", &free).field("reserved", &reserved);
        }
        debug.finish_non_exhaustive()
    }
}

impl<P: Platform> Drop for Space<P> {
    fn drop(&mut self) {
        // Handles that are still out must never fit another space.
        if self.stats().live > 0 {
            self.identity.keep();
        }
    }
}

/// `aperture` without parts of granules and without the granule of IOVA 0.
pub(super) fn whole_granules(aperture: IovaRange, granule_lg2: u32) -> Option<IovaRange> {
    if granule_lg2 > 62 {
        return None;
    }
    let start = lg2::align_up(aperture.start().get().max(1), granule_lg2)?;
    let behind = aperture.last().get().wrapping_add(1);
    let last = lg2::align_down(behind, granule_lg2).wrapping_sub(1);
    // Nothing but part of the first granule: the last one of it would be that of the space.
    let last = if last > aperture.last().get() { return None } else { last };
    IovaRange::new(Iova::new(start), Iova::new(last))
}

/// How many granules of `aperture` are in a zone.
pub(super) fn zone_granules(zone: Zone, aperture: IovaRange, granule_lg2: u32) -> u64 {
    let low_last = Iova::new(u64::from(u32::MAX));
    let part = match zone {
        Zone::Low => IovaRange::new(Iova::new(0), low_last),
        Zone::High => IovaRange::new(low_last.wrapping_add(1), Iova::new(u64::MAX)),
    };
    let part = part.and_then(|part| part.intersection(aperture));
    part.map_or(0, |part| (part.len_less_one() >> granule_lg2).saturating_add(1))
}
