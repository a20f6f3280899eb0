//! IOTLBs, each of which one access has at a time, and the unmaps that all of them hear of.
//!
//! # Why nobody waits but an unmap, and that for little
//!
//! An access takes a [`Place`] that is free: the one of its thread, or another one where an access
//! of that thread, or of one with the same place, is under way there. So it has an IOTLB for
//! itself, into which it puts what it misses. An unmap touches no IOTLB. It enters its range in a
//! [`Log`], and each access brings its IOTLB up to date before it looks there.
//!
//! # Why nothing is used behind an unmap
//!
//! An access says where it is, and then looks at the log. An unmap takes entries out of the tables,
//! enters its range in the log, and then looks at the places. All of these are `SeqCst`, so one
//! sees the other. Where the access sees the log, it finds neither in its IOTLB nor in the tables
//! what was taken away. Where the unmap sees the access, it waits until that has ended if they
//! meet, or until the place says that its access has seen the log: then that began later.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::mem;
use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dmaspan::IovaRange;
use dmaspan::io_pgtable::MappedRun;
use dmaspan::iommu::HardwareError;
use dmaspan::platform::Flag;
use parking_lot::Mutex;
use parking_lot::lock_api::{self, GuardNoSend};
use vm_memory::GuestAddress;
use vm_memory::iommu::Iotlb;

use crate::{MOST_ENTRIES, permissions};

/// How long an unmap waits for an access that is under way.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a waiting unmap lets other threads run before it sleeps, and how long it sleeps then.
const YIELDS: u32 = 64;
const NAP: Duration = Duration::from_micros(50);

/// The places in the first bank. Each bank has twice as many as the one before.
const FIRST: usize = 32;
const BANKS: usize = 32;
/// From the place of a thread to where it goes on where that is taken. Far, since neighbours are
/// places of other threads, and odd, so that it comes to all of the bank.
const STRIDE: usize = 13;
/// How many unmaps an IOTLB may have missed without forgetting everything.
const LOGGED: usize = 64;

/// All IOTLBs of an IOMMU.
#[derive(Default)]
pub(crate) struct Iotlbs {
    log: Log,
    /// How many places, from the first on, were ever used.
    reach: AtomicUsize,
    banks: [OnceLock<Box<[Place]>>; BANKS],
    /// The sum of [`Cache::entries`].
    entries: AtomicUsize,
}

/// What was taken away, in its order.
struct Log {
    /// How many ranges were entered, ever.
    count: AtomicU64,
    /// The first and last address of each of the latest.
    ranges: [[AtomicU64; 2]; LOGGED],
    writing: Mutex<()>,
}

/// What one access at a time has, on lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Place {
    /// Only ever tried: whoever finds it taken goes elsewhere.
    cache: lock_api::Mutex<Flag, Cache>,
    /// Counts begins and ends of accesses. It is odd while one is under way.
    turn: AtomicU64,
    /// How much of the log the latest access has heard of: an unmap waits for none that knows of
    /// it.
    heard: AtomicU64,
    /// Where that is, and whose.
    ends: [AtomicU64; 2],
    thread: AtomicUsize,
}

#[derive(Debug, Default)]
pub(crate) struct Cache {
    iotlb: Iotlb,
    /// How many entries it has at most: it was given so many, or cut in two, since it was emptied.
    entries: usize,
    /// How much of the log it has heard of.
    heard: u64,
}

impl Iotlbs {
    /// Begins an access to `length` bytes from `iova` on, which do not wrap. None where there is
    /// no number for one more.
    #[inline]
    pub(crate) fn begin(&self, iova: u64, length: usize) -> Option<IotlbGuard<'_>> {
        let thread = number();
        let (index, place, cache) = self.free_place(thread)?;
        if index >= self.reach.load(Ordering::SeqCst) {
            self.reach.fetch_max(index + 1, Ordering::SeqCst);
        }
        // Whoever sees one of these knows that the access before it has ended.
        place.ends[0].store(iova, Ordering::Release);
        place.ends[1].store(iova + (length as u64).saturating_sub(1), Ordering::Release);
        place.thread.store(thread, Ordering::Relaxed);
        place.turn.store(place.turn.load(Ordering::Relaxed) + 1, Ordering::SeqCst);
        let mut guard = IotlbGuard { cache, place, thread: PhantomData };
        let now = self.log.count.load(Ordering::SeqCst);
        if guard.cache.heard != now {
            self.catch_up(&mut guard.cache, now);
            place.heard.store(now, Ordering::Release);
        }
        Some(guard)
    }

    /// The place of a thread, or another one that is free.
    #[inline]
    fn free_place(&self, thread: usize) -> Option<Taken<'_>> {
        let index = thread % FIRST;
        let place = self.place_or_new(index)?;
        match place.cache.try_lock() {
            Some(cache) => Some((index, place, cache)),
            None => self.other_place(thread),
        }
    }

    #[cold]
    fn other_place(&self, thread: usize) -> Option<Taken<'_>> {
        let near = (1..FIRST).map(|n| (thread + n * STRIDE) % FIRST);
        for index in near.chain(FIRST..) {
            let place = self.place_or_new(index)?;
            if let Some(cache) = place.cache.try_lock() {
                return Some((index, place, cache));
            }
        }
        None
    }

    #[inline]
    fn place_or_new(&self, index: usize) -> Option<&Place> {
        let (bank, offset) = bank_of(index);
        let places = || (0..FIRST << bank).map(|_| Place::default()).collect();
        self.banks.get(bank)?.get_or_init(places).get(offset)
    }

    /// The places that were ever used.
    fn places(&self) -> impl Iterator<Item = &Place> {
        (0..self.reach.load(Ordering::SeqCst)).filter_map(|index| {
            let (bank, offset) = bank_of(index);
            self.banks[bank].get()?.get(offset)
        })
    }

    /// Takes what the log has out of an IOTLB.
    #[cold]
    fn catch_up(&self, cache: &mut Cache, now: u64) {
        let heard = cache.heard;
        let missed = |until: u64| usize::try_from(until - heard).unwrap_or(usize::MAX);
        let mut is_known = missed(now) < LOGGED;
        if is_known && cache.entries != 0 {
            for n in heard..now {
                let [first, last] =
                    self.log.at(n).each_ref().map(|end| end.load(Ordering::Acquire));
                cache.forget(first, last);
            }
            // What is removed from the middle of an entry leaves two.
            self.entries.fetch_add(missed(now), Ordering::Relaxed);
            cache.entries += missed(now);
        }
        // What was overwritten meanwhile was another range.
        is_known &= missed(self.log.count.load(Ordering::Acquire)) < LOGGED;
        if !is_known || cache.entries > MOST_ENTRIES {
            self.clear(cache);
        }
        cache.heard = now;
    }

    /// Adds runs, no more than may be in all IOTLBs, to that of an access.
    pub(crate) fn add(&self, to: &mut Cache, runs: &[MappedRun]) -> Result<(), &'static str> {
        let before = self.entries.fetch_add(runs.len(), Ordering::Relaxed);
        if before + runs.len() > MOST_ENTRIES {
            // Those of accesses that are under way go with the next one.
            for place in self.places() {
                if let Some(mut idle) = place.cache.try_lock() {
                    self.clear(&mut idle);
                }
            }
            self.clear(to);
        }
        to.entries += runs.len();
        runs.iter().try_for_each(|&run| to.add(run))
    }

    fn clear(&self, cache: &mut Cache) {
        cache.iotlb.invalidate_all();
        self.entries.fetch_sub(mem::take(&mut cache.entries), Ordering::Relaxed);
    }

    /// Whether this thread is in the middle of an access that meets `range`.
    pub(crate) fn is_within(&self, range: IovaRange) -> bool {
        let own = number();
        self.places().any(|place| {
            place.meets(&[range]).is_some() && place.thread.load(Ordering::Relaxed) == own
        })
    }

    /// Has every IOTLB forget `ranges`, and waits for accesses that meet them and began before.
    pub(crate) fn forget(&self, ranges: &[IovaRange]) -> Result<(), HardwareError> {
        let entered = self.log.enter(ranges);
        let mut begun = None;
        for place in self.places() {
            let Some(turn) = place.meets(ranges) else { continue };
            let begun = *begun.get_or_insert_with(Instant::now);
            let mut looks = 0;
            while place.turn.load(Ordering::Acquire) == turn
                && place.heard.load(Ordering::Acquire) < entered
            {
                // All that are waited for began before: one of them has lasted as long as this.
                if begun.elapsed() >= PATIENCE {
                    let what = "an access of a device model there did not end in ten seconds";
                    return Err(HardwareError { what, status: 0 });
                }
                if looks < YIELDS {
                    looks += 1;
                    thread::yield_now();
                } else {
                    thread::sleep(NAP);
                }
            }
        }
        Ok(())
    }
}

type Taken<'a> = (usize, &'a Place, lock_api::MutexGuard<'a, Flag, Cache>);

/// The bank that a place is in, and which one it is there.
fn bank_of(index: usize) -> (usize, usize) {
    let bank = (index / FIRST + 1).ilog2() as usize;
    (bank, index - FIRST * ((1 << bank) - 1))
}

impl Log {
    fn at(&self, n: u64) -> &[AtomicU64; 2] {
        &self.ranges[usize::try_from(n % LOGGED as u64).unwrap_or(0)]
    }

    /// Enters ranges, and returns the count behind them.
    fn enter(&self, ranges: &[IovaRange]) -> u64 {
        // Held for a few stores. Accesses do not take it.
        let _writing = self.writing.lock();
        let mut count = self.count.load(Ordering::Relaxed);
        for range in ranges {
            // Whoever sees one of these sees the count that the range before had.
            let [first, last] = self.at(count);
            first.store(range.start().get(), Ordering::Release);
            last.store(range.last().get(), Ordering::Release);
            count += 1;
            self.count.store(count, Ordering::SeqCst);
        }
        count
    }
}

impl Default for Log {
    fn default() -> Self {
        let ranges = [const { [const { AtomicU64::new(0) }; 2] }; LOGGED];
        Self { count: AtomicU64::new(0), ranges, writing: Mutex::new(()) }
    }
}

impl Place {
    /// The turn of the access that is under way here, if it meets one of `ranges`.
    fn meets(&self, ranges: &[IovaRange]) -> Option<u64> {
        let turn = self.turn.load(Ordering::SeqCst);
        let [first, last] = self.ends.each_ref().map(|end| end.load(Ordering::Acquire));
        let meets = |range: &IovaRange| first <= range.last().get() && range.start().get() <= last;
        (turn % 2 == 1 && ranges.iter().any(meets)).then_some(turn)
    }
}

impl Cache {
    fn add(&mut self, run: MappedRun) -> Result<(), &'static str> {
        // The crate's ranges end before 2^64 - 1.
        let bytes = run.range.last().get().saturating_add(1) - run.range.start().get();
        let len = usize::try_from(bytes).map_err(|_| "it is longer than the address space")?;
        let (iova, to) = (GuestAddress(run.range.start().get()), GuestAddress(run.paddr.get()));
        let set = self.iotlb.set_mapping(iova, to, len, permissions(run.prot));
        set.map_err(|_| "the IOTLB did not take it")
    }

    fn forget(&mut self, first: u64, last: u64) {
        // No entry has the last address of all. One that is overwritten may have any ends.
        let bytes = last.saturating_add(1).saturating_sub(first);
        if bytes != 0 {
            let len = usize::try_from(bytes).unwrap_or(usize::MAX);
            self.iotlb.invalidate_mapping(GuestAddress(first), len);
        }
    }
}

/// A number of this thread that no other one has, ever; not 0.
fn number() -> usize {
    static NUMBERS: AtomicUsize = AtomicUsize::new(1);
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(0) };
    }
    if NUMBER.get() == 0 {
        NUMBER.set(NUMBERS.fetch_add(1, Ordering::Relaxed));
    }
    NUMBER.get()
}

/// An access, and the IOTLB that it has as long as it lasts.
#[derive(Debug)]
pub struct IotlbGuard<'a> {
    pub(crate) cache: lock_api::MutexGuard<'a, Flag, Cache>,
    place: &'a Place,
    /// It stays on its thread, so that an unmap knows whether it would wait for its own.
    thread: PhantomData<GuardNoSend>,
}

impl Deref for IotlbGuard<'_> {
    type Target = Iotlb;

    #[inline]
    fn deref(&self) -> &Iotlb {
        &self.cache.iotlb
    }
}

impl Drop for IotlbGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let turn = self.place.turn.load(Ordering::Relaxed);
        self.place.turn.store(turn + 1, Ordering::Release);
    }
}

impl fmt::Debug for Iotlbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.entries.load(Ordering::Relaxed);
        f.debug_struct("Iotlbs").field("entries", &entries).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use dmaspan::io_pgtable::{self, Arena, PageTable, X86_64, X86_64Config};
    use dmaspan::{Iova, PhysAddr, Prot, iommu};

    use super::*;
    use crate::TableIommu;

    #[test]
    fn a_map_over_what_is_mapped_lets_devices_at_nothing_that_is_to_be_waited_for() {
        let tables = Arena::new(PhysAddr::new(1 << 45), 1 << 20);
        let format = X86_64::new(X86_64Config::new(48, 52)).unwrap();
        let iommu = TableIommu::new(PageTable::new(format, tables).unwrap()).unwrap();
        let pages =
            |first: u64, count: u64| IovaRange::from_len(Iova::new(first << 12), count << 12);
        let map = |first, count| {
            iommu.map(pages(first, count).unwrap(), GuestAddress(0), Prot::READ_WRITE)
        };
        map(2, 1).unwrap();
        for (first, count) in [(0, 4), (1, 2), (2, 1), (2, 512), (0, 1024)] {
            let Err(iommu::Error::Table(io_pgtable::Error::Occupied { leaf })) = map(first, count)
            else {
                panic!("{first} {count}");
            };
            assert_eq!(leaf, pages(2, 1).unwrap());
        }
        assert_eq!(iommu.shared.iotlbs.log.count.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn an_unmap_waits_for_no_access_that_began_after_it_to_what_is_mapped_anew() {
        let (iotlbs, range) = (Iotlbs::default(), IovaRange::point(Iova::new(5)));
        let all = |count| (0..count).map(|_| iotlbs.begin(5, 1).unwrap()).collect::<Vec<_>>();
        drop(all(FIRST));
        let before = iotlbs.begin(5, 1).unwrap();
        thread::scope(|scope| {
            let unmap = scope.spawn(|| iotlbs.forget(&[range]));
            while iotlbs.log.count.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            // In all other places, so that the unmap comes to some when the first has ended.
            let after = all(FIRST - 1);
            assert!(!unmap.is_finished());
            drop(before);
            assert_eq!(unmap.join().unwrap(), Ok(()));
            drop(after);
        });
    }
}
