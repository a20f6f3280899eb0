//! The allocator of IOVAs.
//!
//! A [`Space`] hands out ranges of IOVAs that nobody else has. Magazines keep the ranges that were
//! given back lately, by size, one set a CPU; what is too much for them is in a depot that all CPUs
//! share; the rest is a tree. A magazine yields a range in constant time, and the tree finds one,
//! or that there is none, in logarithmic time.
//!
//! Sizes that are cached are rounded up to powers of two inside. Low addresses, of 32 bits, are
//! handed out first, and kept apart from high ones: a request for low ones searches no others.
//!
//! | Linux's drivers/iommu/iova.c | here |
//! |---|---|
//! | `init_iova_domain`, `iova_domain_init_rcaches` | [`Space::new`], [`Space::with_apertures`] |
//! | `alloc_iova_fast` | [`Space::alloc`], with a limit and an alignment in its [`Request`] |
//! | `free_iova_fast` | [`Space::free`] |
//! | `reserve_iova` | [`Space::reserve`] |
//! | `alloc_iova` of a place | [`Space::alloc_at`] |
//! | `find_iova`, and an address that a driver kept | [`Space::from_raw`], [`Space::into_raw`] |
//! | magazines for sizes of 1 to 32 pages | magazines for sizes of 1 to 1024 granules |
//!
//! ```
//! use dmaspan::iommu::iova::{Align, Error, Request, Space};
//! use dmaspan::platform::OneThread;
//! use dmaspan::{Iova, IovaRange};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let aperture = IovaRange::from_len(Iova::new(0), 1 << 48)?;
//!     let space = Space::new(aperture, 12, 1, OneThread)?;
//!     space.reserve(IovaRange::from_len(Iova::new(0xfee0_0000), 0x10_0000)?)?;
//!
//!     // For a device with 32 bits of address: three pages, and room for 2 MiB leaves.
//!     let limit = Iova::new(u64::from(u32::MAX));
//!     let three = space.alloc(Request { bytes: 0x3000, align: Align::Natural, limit })?;
//!     assert_eq!(three.range(), IovaRange::from_len(Iova::new(0x4000), 0x3000)?);
//!     let large = space.alloc(Request { bytes: 5 << 20, align: Align::To(2 << 20), limit })?;
//!     assert_eq!(large.range().start(), Iova::new(2 << 20));
//!     let refused = space.alloc(Request { bytes: 4 << 30, align: Align::Natural, limit });
//!     assert!(matches!(refused, Err(Error::Exhausted { .. })));
//!
//!     // Whatever was mapped there has been unmapped and synced.
//!     space.free(three)?;
//!     space.free(large)?;
//!     Ok(())
//! }
//! ```
//!
//! ```text
//!  alloc ──► magazines of the CPU ──► depot ──► tree ──► all caches go to the tree, once more
//!  free ───► magazines of the CPU ──► depot ──► tree
//! ```

mod depot;
mod error;
mod list;
mod magazine;
mod many;
mod raw;
mod request;
mod shared;
mod tree;

use alloc::boxed::Box;
use alloc::vec::Vec;

use lock_api::{Mutex, MutexGuard};

use crate::atomic::AtomicU64;
#[cfg(feature = "log")]
use crate::leak::{self, Held};
use crate::lg2;
#[cfg(feature = "log")]
use crate::log;
use crate::platform::{Apart, Flag, Id, Identity, Platform};
use crate::range::IovaRange;
use crate::sharded_map::ShardedMap;
use depot::Depot;
pub use error::{Error, Foreign, IntoRawFailed};
pub use list::{IovaState, ListedIovas};
use magazine::{Halves, Magazines, NoMemory, Zone, with_room};
pub(crate) use raw::Raw;
pub use request::{Align, Request};
use request::{UNCACHED, Wanted};
use shared::{whole_granules, zone_granules};
use tree::Tree;

/// IOVAs that the holder alone uses: from [`Space::alloc`].
///
/// Given back by [`Space::free`]; dropped, they are never used again.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "IOVAs that are dropped are lost for good"]
#[repr(C)]
pub struct Iovas {
    raw: Raw,
    space: Id,
}

/// Without the feature nothing is done where IOVAs are dropped: a driver maps and unmaps in fewer
/// instructions than these would add.
#[cfg(feature = "log")]
impl Drop for Iovas {
    #[cold]
    #[inline(never)]
    fn drop(&mut self) {
        let range = self.range();
        leak::count(Held { iovas: Some(range), ..Held::default() });
        log::warn!("the IOVAs {range} were dropped and are lost: give them back to their space");
    }
}

const _: () = assert!(size_of::<Option<Iovas>>() == size_of::<Iovas>());

impl Iovas {
    /// Returns which they are: whole granules.
    #[inline(always)]
    pub fn range(&self) -> IovaRange {
        self.raw.range
    }
}

/// Says how much of a space is where.
///
/// It is exact where nobody else works on the space; what moves meanwhile may be counted twice or
/// not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IovaStats {
    /// How many ranges are handed out, raw ones too.
    pub live: usize,
    /// How many free ranges are in caches.
    pub cached: usize,
    /// How many bytes are free, without those in caches.
    pub free: u64,
    /// How many bytes are reserved.
    pub reserved: u64,
}

/// IOVAs that are handed out.
pub struct Space<P: Platform> {
    identity: Identity,
    aperture: IovaRange,
    granule_lg2: u32,
    cpus: Box<[OfCpu]>,
    /// Which CPUs may have something in their magazines: a bit each, changed under their flag.
    stocked: Box<[AtomicU64]>,
    /// Apart from what every call reads.
    depot: Apart<Mutex<P::Lock, Depot>>,
    raw: ShardedMap<P, Raw>,
    platform: P,
}

/// A CPU's own, held for a few instructions, or under the lock of the depot.
type OfCpu = Apart<Mutex<Flag, Magazines>>;

impl<P: Platform> Space<P> {
    /// The IOVAs of `aperture`, in granules of `2^granule_lg2` bytes, with caches for `cpus` CPUs.
    ///
    /// The granule of IOVA 0 is never handed out: many a device and driver takes 0 for none.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for an aperture without a whole granule beside that of 0,
    /// [`Error::NoMemory`].
    pub fn new(
        aperture: IovaRange,
        granule_lg2: u32,
        cpus: usize,
        platform: P,
    ) -> Result<Self, Error> {
        let config = Error::Config { aperture, granule_lg2 };
        let aperture = whole_granules(aperture, granule_lg2).ok_or(config)?;
        let no_memory = |NoMemory| Error::NoMemory { range: aperture };
        let cpus = cpus.max(1);
        let granules = |zone| zone_granules(zone, aperture, granule_lg2);
        let halves = Halves::new(cpus, [granules(Zone::Low), granules(Zone::High)]);

        let mut own: Vec<OfCpu> = with_room(cpus).map_err(no_memory)?;
        for cpu in 0..cpus {
            own.push(Apart(Mutex::new(Magazines::new(cpu, &halves).map_err(no_memory)?)));
        }
        let words = cpus.div_ceil(64);
        let mut stocked = with_room(words).map_err(no_memory)?;
        stocked.resize_with(words, || AtomicU64::new(0));
        let tree = Tree::new(aperture, granule_lg2)?;
        let depot = Depot::new(tree, granule_lg2, cpus, halves).map_err(no_memory)?;
        let raw = ShardedMap::new(cpus).ok_or(NoMemory).map_err(no_memory)?;
        Ok(Self {
            identity: Identity::new(),
            aperture,
            granule_lg2,
            cpus: own.into_boxed_slice(),
            stocked: stocked.into_boxed_slice(),
            depot: Apart(Mutex::new(depot)),
            raw,
            platform,
        })
    }

    /// As [`new`](Self::new), of several apertures, in any order. What lies between them is
    /// reserved, and what has no whole granule is none.
    ///
    /// # Errors
    ///
    /// As those of [`new`](Self::new), and [`Error::NoAperture`] for an empty list.
    pub fn with_apertures(
        apertures: &[IovaRange],
        granule_lg2: u32,
        cpus: usize,
        platform: P,
    ) -> Result<Self, Error> {
        let join = |all: IovaRange, one: &IovaRange| {
            let (start, last) = (all.start().min(one.start()), all.last().max(one.last()));
            IovaRange::new(start, last).unwrap_or(all)
        };
        let (first, more) = apertures.split_first().ok_or(Error::NoAperture)?;
        let hull = more.iter().fold(*first, join);
        let no_memory = |NoMemory| Error::NoMemory { range: hull };
        let mut sorted = with_room(apertures.len()).map_err(no_memory)?;
        sorted.extend(apertures.iter().filter_map(|one| whole_granules(*one, granule_lg2)));
        sorted.sort_unstable_by_key(|one| one.start());

        let config = Error::Config { aperture: hull, granule_lg2 };
        let first = *sorted.first().ok_or(config)?;
        let space = Self::new(sorted.iter().fold(first, join), granule_lg2, cpus, platform)?;
        let mut end = first.last();
        for one in sorted {
            // Neighbours have no gap, and overlapping ones are no range this way round.
            let gap = IovaRange::new(end.wrapping_add(1), one.start().wrapping_add(u64::MAX));
            if let Some(gap) = gap.filter(|_| one.start() > end) {
                space.reserve(gap)?;
            }
            end = end.max(one.last());
        }
        Ok(space)
    }

    /// Returns what can be handed out at most, in whole granules.
    pub fn aperture(&self) -> IovaRange {
        self.aperture
    }

    /// The granule in bytes.
    pub fn granule(&self) -> u64 {
        lg2::size(self.granule_lg2)
    }

    /// The platform that the space asks for the CPU and the clock.
    pub fn platform(&self) -> &P {
        &self.platform
    }

    /// IOVAs that nobody else has; low ones, of 32 bits, where there are some at hand.
    ///
    /// Where a fit is free, one is found, also if it has to be collected from the caches; only what
    /// lies in the magazines of a CPU that was interrupted while it was at them is missed.
    ///
    /// # Errors
    ///
    /// [`Error::Exhausted`], [`Error::NoMemory`], [`Error::Range`] for no bytes, and
    /// [`Error::Align`] for an alignment that is no power of two.
    ///
    /// # Context
    ///
    /// Only tries the magazines of its CPU. Takes the lock of the space where they are empty; then
    /// records of what is taken may be allocated.
    #[inline(always)]
    pub fn alloc(&self, request: Request) -> Result<Iovas, Error> {
        let wanted = Wanted::new(request, self.granule_lg2)?;
        if wanted.class != UNCACHED
            && let Some(start) = self.own().and_then(|mut own| own.take(&wanted))
        {
            return Ok(self.handle(wanted.at(start), wanted.class));
        }
        // Handed back in parts: a handle that is written to memory and read again in larger pieces
        // costs more than the rest of this.
        let (range, class) = self.alloc_shared(request.bytes, request.align, request.limit)?;
        Ok(self.handle(range, class))
    }

    /// Takes IOVAs back. The caller has unmapped *and synced* before what was mapped there: the
    /// next holder may get the IOVAs at once.
    ///
    /// # Errors
    ///
    /// [`Foreign`] where they are of another space.
    ///
    /// # Context
    ///
    /// Does not allocate. Only tries the magazines of its CPU, and takes the lock of the space
    /// where they are full.
    #[inline(always)]
    pub fn free(&self, iovas: Iovas) -> Result<(), Foreign> {
        if iovas.space != self.identity.id() {
            return Err(Foreign { iovas });
        }
        let raw = iovas.into_raw();
        if let Some(mut own) = self.own()
            && own.put(raw.range.start().get(), raw.class())
        {
            self.announce(&mut own);
        } else {
            self.free_shared(raw.range, raw.class());
        }
        Ok(())
    }

    /// The magazines of this CPU, unless somebody is at them.
    #[inline(always)]
    fn own(&self) -> Option<MutexGuard<'_, Flag, Magazines>> {
        let cpu = self.platform.cpu();
        // Most numbers are right, and a division costs as much as the rest.
        let index = if cpu < self.cpus.len() { cpu } else { cpu % self.cpus.len() };
        self.cpus[index].try_lock()
    }

    #[inline(always)]
    fn handle(&self, range: IovaRange, class: u32) -> Iovas {
        Iovas { raw: Raw::new(range, class), space: self.identity.id() }
    }

    /// Lets everybody know that there is something in the magazines of this CPU.
    #[inline(always)]
    fn announce(&self, own: &mut Magazines) {
        if !own.is_known {
            own.is_known = true;
            self.mark(own.cpu);
        }
    }
}

#[cfg(test)]
mod tests {
    use core::mem::{align_of, offset_of};

    use super::*;
    use crate::addr::Iova;
    use crate::platform::OneThread;

    #[test]
    fn the_lock_that_all_cpus_take_is_on_no_cache_line_that_every_call_reads() {
        type One = Space<OneThread>;
        let line = |offset| offset / 128;
        let depot = line(offset_of!(One, depot));
        let read = [
            offset_of!(One, identity),
            offset_of!(One, granule_lg2),
            offset_of!(One, cpus),
            offset_of!(One, stocked),
            offset_of!(One, platform),
        ];
        assert_eq!(align_of::<One>(), 128);
        assert!(read.iter().all(|&offset| line(offset) != depot), "{depot}: {read:?}");
    }

    #[test]
    fn a_cpu_that_takes_and_gives_back_256_at_a_time_soon_does_so_without_the_depot() {
        let aperture = IovaRange::new(Iova::new(1 << 32), Iova::new((1 << 48) - 1)).unwrap();
        let space = Space::new(aperture, 12, 4, OneThread).unwrap();
        let limit = aperture.last();
        let request = Request { bytes: 4096, align: Align::Natural, limit };
        let in_depot = |space: &Space<OneThread>| space.depot.lock().count();
        let mut seen = Vec::new();
        for _ in 0..8 {
            let taken: Vec<Iovas> = (0..256).map(|_| space.alloc(request).unwrap()).collect();
            seen.push(in_depot(&space));
            taken.into_iter().for_each(|iovas| space.free(iovas).unwrap());
            seen.push(in_depot(&space));
        }
        assert!(seen[1] > 0, "a small magazine takes not all of them: {seen:?}");
        assert!(seen[4..].iter().all(|&count| count == 0), "{seen:?}");
        // What lies in caches is found where nothing else is left.
        assert_eq!(space.stats().cached, 256 - seen[seen.len() - 1]);
    }
}
