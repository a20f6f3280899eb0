//! Each CPU keeps free ranges by size here, so that most are taken and given back without a lock
//! that others want (Bonwick and Adams, Magazines and Vmem, USENIX 2001, section 3).
//!
//! A magazine has room for two halves. Where Bonwick's design has a loaded magazine and the
//! previous one and swaps them, here a full magazine gives away its older half, and an empty one
//! gets half a magazine. Either way, a CPU that takes and gives back in turn stays off the depot.
//! A magazine that is empty while the depot has ranges was too small for what came back at once:
//! it gets more room, up to four times as much.

use alloc::vec::Vec;

use super::request::Wanted;

/// How many sizes are cached: 1 granule, 2, 4 and so on up to 1024. That is 4 MiB where the granule
/// is 4 KiB; larger ranges are used long enough for the tree.
#[cfg(not(loom))]
pub(super) const CLASSES: usize = 11;
#[cfg(loom)]
pub(super) const CLASSES: usize = 1;

/// The most ranges of one size in half a magazine at first.
#[cfg(not(loom))]
const FIRST_HALF: usize = 64;
#[cfg(loom)]
const FIRST_HALF: usize = 1;

/// The most ranges of one size in half a magazine: all that a flush queue gives back at once then
/// fit beside as many.
#[cfg(not(loom))]
const HALF: usize = 256;
#[cfg(loom)]
const HALF: usize = 1;

/// The most granules in half a magazine, where one range is not longer, so that of ranges of 512
/// granules there are 64: a flush queue gives back 256 at once, which magazine and depot take, and
/// the tree takes several times as long. A larger range that lies idle is missed sooner.
const HALF_GRANULES: u64 = 32768;

/// The share of its part of the space that half the magazines of one size may hold at most, of all
/// CPUs together. So a quarter of it lies in magazines and depot at most, until somebody finds no
/// other: then all of it goes to the tree.
const SHARE: u64 = 16;

/// No memory for a cache.
pub(super) struct NoMemory;

/// An empty list with room.
pub(super) fn with_room<T>(room: usize) -> Result<Vec<T>, NoMemory> {
    let mut list = Vec::new();
    list.try_reserve_exact(room).map_err(|_| NoMemory)?;
    Ok(list)
}

/// Which part of the space: a device with only 32 bits looks through no addresses beyond them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Zone {
    Low,
    High,
}

impl Zone {
    #[inline(always)]
    pub(super) fn of(start: u64) -> Self {
        if start > u64::from(u32::MAX) { Self::High } else { Self::Low }
    }
}

/// One of something for each zone and size.
pub(super) struct ByClass<T> {
    low: [T; CLASSES],
    high: [T; CLASSES],
}

impl<T> ByClass<T> {
    /// By zone and class.
    pub(super) fn try_new(
        mut make: impl FnMut(Zone, u32) -> Result<T, NoMemory>,
    ) -> Result<Self, NoMemory> {
        let mut all = |zone| {
            let mut made = with_room(CLASSES)?;
            for class in 0..CLASSES {
                let class = u32::try_from(class).map_err(|_| NoMemory)?;
                made.push(make(zone, class)?);
            }
            <[T; CLASSES]>::try_from(made).map_err(|_| NoMemory)
        };
        Ok(Self { low: all(Zone::Low)?, high: all(Zone::High)? })
    }

    #[inline(always)]
    pub(super) fn get_mut(&mut self, zone: Zone, class: u32) -> Option<&mut T> {
        match zone {
            Zone::Low => self.low.get_mut(class as usize),
            Zone::High => self.high.get_mut(class as usize),
        }
    }

    /// All of them, each with its class.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        (0..).zip(&mut self.low).chain((0..).zip(&mut self.high))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.low.iter().chain(&self.high)
    }
}

/// How many ranges half a magazine has for a zone and class.
pub(super) struct Halves {
    granules: [u64; 2],
}

impl Halves {
    /// For so many CPUs and for zones of so many granules, the low one first.
    pub(super) fn new(cpus: usize, zones: [u64; 2]) -> Self {
        let most = |granules: u64| (granules / (SHARE * cpus as u64)).min(HALF_GRANULES);
        Self { granules: zones.map(most) }
    }

    /// The most.
    pub(super) fn most(&self, zone: Zone, class: u32) -> usize {
        let [low, high] = self.granules;
        let granules = if zone == Zone::Low { low } else { high };
        usize::try_from(granules >> class).unwrap_or(HALF).clamp(1, HALF)
    }

    /// At first.
    pub(super) fn first(&self, zone: Zone, class: u32) -> usize {
        self.most(zone, class).min(FIRST_HALF)
    }
}

/// Free ranges of one size and zone, by their first address; the latest is the first to go.
pub(super) struct Magazine(Vec<u64>);

impl Magazine {
    fn new(half: usize) -> Result<Self, NoMemory> {
        Ok(Self(with_room(2 * half)?))
    }

    #[inline(always)]
    fn take(&mut self, wanted: &Wanted) -> Option<u64> {
        self.0.pop_if(|start| wanted.takes(*start))
    }

    /// Whether there was room for it.
    #[inline(always)]
    fn put(&mut self, start: u64) -> bool {
        let has_room = self.0.len() < self.0.capacity();
        if has_room {
            self.0.push(start);
        }
        has_room
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The half of it that was longest unused, where it is full.
    pub(super) fn spill(&mut self) -> impl ExactSizeIterator<Item = u64> {
        let is_full = self.0.len() == self.0.capacity();
        let count = if is_full { self.0.len().div_ceil(2) } else { 0 };
        self.0.drain(..count)
    }

    /// Fills half of an empty one from what lies in the depot; with how many. It gets more room
    /// before, for up to `most` ranges: what it now takes back it could have kept.
    pub(super) fn load(&mut self, from: &mut Vec<u64>, most: usize) -> usize {
        let more = most.min(2 * self.0.capacity());
        if !from.is_empty() {
            // Without memory it stays as it is.
            let _ = self.0.try_reserve_exact(more);
        }
        let count = from.len().min(self.0.capacity() / 2);
        self.0.extend(from.drain(from.len() - count..));
        count
    }
}

/// The magazines of a CPU.
pub(super) struct Magazines {
    all: ByClass<Magazine>,
    pub(super) cpu: usize,
    /// Whether the space was told that there is something in them.
    pub(super) is_known: bool,
}

impl Magazines {
    pub(super) fn new(cpu: usize, halves: &Halves) -> Result<Self, NoMemory> {
        let all = ByClass::try_new(|zone, class| Magazine::new(halves.first(zone, class)))?;
        Ok(Self { all, cpu, is_known: false })
    }

    /// A range of the wanted size that was free: a low one, if there is.
    #[inline(always)]
    pub(super) fn take(&mut self, wanted: &Wanted) -> Option<u64> {
        let low = self.all.get_mut(Zone::Low, wanted.class)?.take(wanted);
        match low {
            None => self.take_high(wanted),
            low => low,
        }
    }

    #[inline(always)]
    fn take_high(&mut self, wanted: &Wanted) -> Option<u64> {
        match Zone::of(wanted.limit) {
            Zone::Low => None,
            Zone::High => self.all.get_mut(Zone::High, wanted.class)?.take(wanted),
        }
    }

    /// Whether there was room for the free range.
    #[inline(always)]
    pub(super) fn put(&mut self, start: u64, class: u32) -> bool {
        self.all.get_mut(Zone::of(start), class).is_some_and(|magazine| magazine.put(start))
    }

    pub(super) fn get_mut(&mut self, zone: Zone, class: u32) -> Option<&mut Magazine> {
        self.all.get_mut(zone, class)
    }

    /// Gives up all that is in them, each with its class.
    pub(super) fn drain(&mut self, mut sink: impl FnMut(u64, u32)) {
        for (class, magazine) in self.all.iter_mut() {
            magazine.0.drain(..).for_each(|start| sink(start, class));
        }
    }

    /// All that is in them, by first addresses.
    pub(super) fn starts(&self) -> impl Iterator<Item = u64> {
        self.all.iter().flat_map(|magazine| magazine.0.iter().copied())
    }

    pub(super) fn count(&self) -> usize {
        self.all.iter().map(|magazine| magazine.0.len()).sum()
    }
}
