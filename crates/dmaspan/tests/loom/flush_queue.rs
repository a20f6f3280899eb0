//! Unmaps that wait for their sync: what two or three threads do to one slot, in all interleavings.
//!
//! A page may be released, and its IOVA handed out again, only after a sync that names it has
//! returned. An unmap names a page after it has cleared its leaf, so such a sync began after that.

use std::sync::{Arc, Mutex};

use dmaspan::dma::{
    Attrs, Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error, Flush, Mapping, NoPool,
    Piece, Unmapped,
};
use dmaspan::io_pgtable::PageTable;
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps, Scope, flush_queue};
use dmaspan::{Direction, PhysAddr, Span};
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use crate::platform::Machine;
use crate::tables::Tables;
use crate::tiny::{TOP, Tiny};
use crate::{MEMORY, PAGE};

type Dma = DmaDomain<Tiny<TOP>, Tables, Hardware, Machine, Page>;

const PAGES: usize = 1 << (TOP + 1);
const MAX_AGE: u64 = 1000;

/// What happened, in the order of it.
#[derive(Clone, Debug, Default)]
struct Log(Arc<(AtomicU64, Mutex<Record>)>);

#[derive(Debug, Default)]
struct Record {
    /// The number of the last thing that was written down.
    clock: u64,
    /// By page of the IOVAs: when something was last mapped there, and when a sync of it ended.
    mapped: [u64; PAGES],
    synced: [u64; PAGES],
    /// How many pages of memory there are, and how often each was released.
    released: Vec<u32>,
    failures_to_come: u32,
}

impl Log {
    fn with<R>(&self, change: impl FnOnce(&mut Record) -> R) -> R {
        // Loom tries all orders of this, and lets others run before. `Relaxed`, and a lock of the
        // standard library: the threads get no order from it that the code under test does not give
        // them.
        self.0.0.fetch_add(1, Ordering::Relaxed);
        let mut record = self.0.1.lock().unwrap();
        record.clock += 1;
        change(&mut record)
    }

    /// When something was last mapped there.
    fn mapped(&self, page: usize) -> u64 {
        self.with(|record| record.mapped[page])
    }

    /// Whether hardware is known to have forgotten what was mapped there then.
    fn is_synced(&self, page: usize, mapped: u64) -> bool {
        self.with(|record| record.synced[page] >= mapped)
    }
}

/// Hardware that other threads overtake.
struct Hardware(Log);

// SAFETY: there are no devices.
unsafe impl IommuOps for Hardware {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let Scope::Ranges(ranges) = what.scope else { panic!("there are never so many ranges") };
        let fails = self.0.with(|record| {
            let fails = record.failures_to_come > 0;
            record.failures_to_come -= u32::from(fails);
            fails
        });
        if fails {
            return Err(HardwareError { what: "the test says so", status: 1 });
        }
        self.0.with(|record| {
            for range in ranges {
                for page in range.start().get() / PAGE..=range.last().get() / PAGE {
                    record.synced[usize::try_from(page).unwrap()] = record.clock;
                }
            }
        });
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        8
    }
}

/// Memory that says whether it is released as it should be.
#[derive(Debug)]
struct Page {
    piece: Piece,
    number: usize,
    log: Log,
    /// The page of the IOVAs where it is mapped, and when that was.
    place: Arc<Mutex<Option<(usize, u64)>>>,
}

// SAFETY: nobody uses the memory, and there is none.
unsafe impl DmaMemory for Page {
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.piece)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let place = *self.place.lock().unwrap();
        let is_early = self.log.with(|record| {
            record.released[self.number] += 1;
            place.is_some_and(|(page, mapped)| record.synced[page] < mapped)
        });
        assert!(!is_early, "released before it was synced");
    }
}

struct Rig {
    device: Device<Dma>,
    domain: Arc<Dma>,
    tables: Tables,
    log: Log,
}

impl Rig {
    fn new(entries: usize) -> Self {
        let (tables, log) = (Tables::new(), Log::default());
        let table = PageTable::new(Tiny, tables.clone()).unwrap();
        let domain = Domain::new(table, Hardware(log.clone())).unwrap();
        let queue = flush_queue::Config { entries, max_age: MAX_AGE };
        let config = DmaConfig { flush: Flush::Lazy, queue, ..DmaConfig::new(1) };
        let domain = Arc::new(DmaDomain::new(domain, config, Machine::default()).unwrap());
        let device = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(40)).unwrap();
        Self { device, domain, tables, log }
    }

    fn map(&self, flush: Flush) -> Mapping<Dma> {
        let number = self.log.with(|record| {
            record.released.push(0);
            record.released.len() - 1
        });
        let span = Span::new(PhysAddr::new(MEMORY + number as u64 * PAGE), PAGE).unwrap();
        let place = Arc::default();
        let (piece, log) = (Piece::memory(span), self.log.clone());
        let page = Page { piece, number, log, place: Arc::clone(&place) };
        let attrs = Attrs { flush: Some(flush), ..Attrs::default() };
        let mapped = self.device.map_single_with(page, Direction::Bidirectional, attrs);
        let mapping = mapped.unwrap();
        let at = page_of(&mapping);
        assert!(
            self.log.is_synced(at, self.log.mapped(at)),
            "handed out again before it was synced"
        );
        let now = self.log.with(|record| {
            record.mapped[at] = record.clock;
            record.clock
        });
        *place.lock().unwrap() = Some((at, now));
        mapping
    }

    fn unmap(&self, mapping: Mapping<Dma>) -> Result<Unmapped<Page>, Error> {
        Ok(self.device.unmap(mapping)?)
    }

    fn unmap_lazily(&self, mapping: Mapping<Dma>) {
        assert!(matches!(self.unmap(mapping), Ok(Unmapped::Queued)));
    }

    /// Everything was released once, and nothing is left behind.
    fn check(self) {
        self.domain.flush().unwrap();
        assert_eq!(self.domain.waiting(), (0, 0));
        assert_eq!(self.domain.iovas().stats().live, 0);
        self.log.with(|record| assert!(record.released.iter().all(|times| *times == 1)));
        let tables = self.tables.clone();
        drop(self);
        assert_eq!(tables.in_use(), 0);
    }
}

fn page_of(mapping: &Mapping<Dma>) -> usize {
    usize::try_from(mapping.addr().get() / PAGE).unwrap()
}

/// Runs `work` of as many threads, which each have a lazy mapping, on one slot of so many entries.
/// `preemptions`, where there is a bound, is how often a thread is stopped that could go on: races
/// of a few instructions take no more than two or three.
fn race<const N: usize>(entries: usize, preemptions: Option<usize>, work: [Work; N]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(move || {
        let rig = loom::sync::Arc::new(Rig::new(entries));
        let mappings = work.map(|_| rig.map(Flush::Lazy));
        let mut jobs: Vec<_> = work.into_iter().zip(mappings).collect();
        let (here, own) = jobs.pop().unwrap();
        let threads = jobs.into_iter().map(|(there, mapping)| {
            let rig = loom::sync::Arc::clone(&rig);
            thread::spawn(move || there(&rig, mapping))
        });
        let threads: Vec<_> = threads.collect();
        here(&rig, own);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        loom::sync::Arc::try_unwrap(rig).ok().unwrap().check();
    });
}

type Work = fn(&Rig, Mapping<Dma>);

fn unmap(rig: &Rig, mapping: Mapping<Dma>) {
    rig.unmap_lazily(mapping);
}

/// What was unmapped before a flush is synced when it returns, whoever does it. By then the other
/// thread may have mapped something else there.
fn unmap_and_flush(rig: &Rig, mapping: Mapping<Dma>) {
    let page = page_of(&mapping);
    let mapped = rig.log.mapped(page);
    rig.unmap_lazily(mapping);
    rig.domain.flush().unwrap();
    assert!(rig.log.is_synced(page, mapped));
}

fn unmap_and_expire(rig: &Rig, mapping: Mapping<Dma>) {
    rig.unmap_lazily(mapping);
    rig.domain.iovas().platform().pass(MAX_AGE);
    let next = rig.domain.expire().unwrap();
    assert!(next.is_none_or(|next| next <= 2 * MAX_AGE));
}

/// Maps once more, perhaps where the other thread was.
fn unmap_and_map(rig: &Rig, mapping: Mapping<Dma>) {
    rig.unmap_lazily(mapping);
    let again = rig.map(Flush::Lazy);
    rig.unmap_lazily(again);
}

#[test]
fn two_unmaps_that_fill_a_slot_are_released_once() {
    race(2, None, [unmap, unmap]);
}

#[test]
fn unmaps_that_each_fill_a_slot_sync_for_themselves_or_wait() {
    race(1, None, [unmap, unmap]);
}

#[test]
fn a_flush_beside_an_unmap_has_synced_what_was_unmapped_before() {
    race(3, Some(3), [unmap, unmap_and_flush]);
}

#[test]
fn two_flushes_release_each_page_once() {
    race(3, Some(3), [unmap_and_flush, unmap_and_flush]);
}

#[test]
fn an_expiry_beside_an_unmap_releases_each_page_once() {
    race(3, Some(3), [unmap, unmap_and_expire]);
}

/// The next sync fails, and a flush tries it again.
fn unmap_strictly_and_fail(rig: &Rig, mapping: Mapping<Dma>) {
    rig.unmap_lazily(mapping);
    let strict = rig.map(Flush::Strict);
    rig.log.with(|record| record.failures_to_come = 1);
    match rig.unmap(strict) {
        // The other's failed, or none did yet.
        Ok(unmapped) => assert!(matches!(unmapped, Unmapped::Released(_))),
        Err(error) => assert!(matches!(error, Error::Quarantined { .. })),
    }
}

fn unmap_and_flush_twice(rig: &Rig, mapping: Mapping<Dma>) {
    let page = page_of(&mapping);
    let mapped = rig.log.mapped(page);
    rig.unmap_lazily(mapping);
    // Only once can it fail.
    if rig.domain.flush().is_ok() || rig.domain.flush().is_ok() {
        assert!(rig.log.is_synced(page, mapped));
    } else {
        panic!("one sync fails, not two");
    }
}

#[test]
fn a_sync_that_fails_beside_a_flush_loses_nothing_and_releases_nothing_early() {
    race(3, Some(2), [unmap_strictly_and_fail, unmap_and_flush_twice]);
}

#[test]
fn two_unmaps_and_a_flush_take_turns() {
    race(2, Some(2), [unmap, unmap, unmap_and_flush]);
}

#[test]
fn an_iova_is_handed_out_again_only_after_its_sync() {
    race(1, Some(2), [unmap, unmap_and_map]);
}
