//! Lazy unmaps: nothing is released before hardware forgot it, and all of it in time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error, Flush, Mapping, Piece, Unmapped,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps, flush_queue};
use dmaspan::{Direction, Iova, IovaRange, PhysAddr, Platform};
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;

use crate::common::{arena, format, range, span, walker};

mod listing;
mod races;

const PAGE: u64 = 1 << 12;
const MAX_AGE: u64 = 1000;

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
type Dma = DmaDomain<ArmLpaeS1<12>, Faulty<Arena>, Hooks, Machine, Buffer>;
type Dev = Device<Dma>;

/// A CPU's number and a clock, as the test sets them.
#[derive(Clone, Debug, Default)]
struct Machine(Arc<(AtomicUsize, AtomicU64)>);

impl Machine {
    fn run_on(&self, cpu: usize) {
        self.0.0.store(cpu, Ordering::Relaxed);
    }

    fn set_clock(&self, now: u64) {
        self.0.1.store(now, Ordering::Relaxed);
    }
}

impl Platform for Machine {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        self.0.0.load(Ordering::Relaxed)
    }

    fn now(&self) -> u64 {
        self.0.1.load(Ordering::Relaxed)
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// A simulated IOMMU that can be made to do something while it invalidates.
#[derive(Clone)]
struct Hooks {
    tlb: Faulty<Tlb>,
    meanwhile: Arc<Mutex<Option<Job>>>,
}

// SAFETY: the answers are the simulated IOMMU's; what runs before is no part of them.
unsafe impl IommuOps for Hooks {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let job = self.meanwhile.lock().take();
        if let Some(job) = job {
            job();
        }
        self.tlb.invalidate(what)
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.tlb.sync_map(range)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.tlb.detach()
    }

    fn max_ranges(&self) -> usize {
        self.tlb.max_ranges()
    }
}

/// Memory of one page that sees when it is released: no device may reach it then.
#[derive(Debug)]
struct Buffer {
    piece: Piece,
    /// Where it is mapped; 0 before.
    iova: Arc<AtomicU64>,
    tlb: Tlb,
    released: Arc<AtomicUsize>,
}

// SAFETY: nobody uses the memory, and there is none.
unsafe impl DmaMemory for Buffer {
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.piece)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.released.fetch_add(1, Ordering::Relaxed);
        let iova = self.iova.load(Ordering::Relaxed);
        if iova != 0
            && let Ok(hit) = self.tlb.translate(Iova::new(iova), Access::Read)
        {
            assert_ne!(hit.paddr, self.piece.span.paddr(), "released while a device reaches it");
        }
    }
}

struct Bench {
    device: Arc<Dev>,
    dma: Arc<Dma>,
    machine: Machine,
    arena: Arena,
    tlb: Tlb,
    hooks: Hooks,
    faults: Faults,
    released: Arc<AtomicUsize>,
    next: AtomicU64,
}

fn config(cpus: usize, entries: usize) -> DmaConfig {
    let queue = flush_queue::Config { entries, max_age: MAX_AGE };
    DmaConfig { flush: Flush::Lazy, queue, ..DmaConfig::new(cpus) }
}

impl Bench {
    fn new(config: DmaConfig) -> Self {
        let (faults, arena) = (Faults::none(), arena());
        let table = PageTable::new(format::<12>(48, 48), Faulty::new(arena.clone(), &faults));
        let table = table.unwrap();
        let tlb = Iotlb::new(walker(table.format(), table.root()), arena.clone());
        let hooks = Hooks { tlb: Faulty::new(tlb.clone(), &faults), meanwhile: Arc::default() };
        let domain = Domain::new(table, hooks.clone()).unwrap();
        let machine = Machine::default();
        let dma = Arc::new(DmaDomain::new(domain, config, machine.clone()).unwrap());
        let device = Device::new(Arc::clone(&dma), Default::default(), DeviceConfig::bits(40));
        Self {
            device: Arc::new(device.unwrap()),
            dma,
            machine,
            arena,
            tlb,
            hooks,
            faults,
            released: Arc::default(),
            next: AtomicU64::new(1 << 40),
        }
    }

    fn buffer(&self) -> Buffer {
        let paddr = self.next.fetch_add(PAGE, Ordering::Relaxed);
        Buffer {
            piece: Piece::memory(span(paddr, PAGE)),
            iova: Arc::default(),
            tlb: self.tlb.clone(),
            released: Arc::clone(&self.released),
        }
    }

    /// Maps a page, which a device then has in its IOTLB.
    fn map(&self) -> Mapping<Dma> {
        let buffer = self.buffer();
        let (iova, paddr) = (Arc::clone(&buffer.iova), buffer.piece.span.paddr());
        let mapping = self.device.map_single(buffer, Direction::Bidirectional).unwrap();
        iova.store(mapping.addr().get(), Ordering::Relaxed);
        assert_eq!(self.reaches(&mapping), Some(paddr), "not what was mapped there before");
        mapping
    }

    fn reaches(&self, mapping: &Mapping<Dma>) -> Option<PhysAddr> {
        let iova = Iova::new(mapping.addr().get());
        self.tlb.translate(iova, Access::Write).ok().map(|hit| hit.paddr)
    }

    /// Maps and unmaps a page, lazily.
    fn pass(&self) -> Result<Unmapped<Buffer>, Error> {
        let mapping = self.map();
        Ok(self.device.unmap(mapping)?)
    }

    fn released(&self) -> usize {
        self.released.load(Ordering::Relaxed)
    }

    fn invalidations(&self) -> u64 {
        let counters = self.tlb.counters();
        counters.invalidations_by_range + counters.invalidations_of_all
    }

    fn assert_nothing_is_left(&self) {
        assert_eq!(self.dma.waiting(), (0, 0));
        assert_eq!(self.tlb.stale_leaves(range(0, 1 << 40)), []);
        // All IOVAs came back: as many as before, and the first first.
        let mapping = self.map();
        assert!(matches!(self.device.unmap(mapping), Ok(Unmapped::Queued)));
        self.dma.flush().unwrap();
    }
}

/// Maps and unmaps a page for the queue to release.
fn pass(bench: &Bench) {
    assert!(matches!(bench.pass(), Ok(Unmapped::Queued)));
}

#[test]
fn what_was_unmapped_waits_and_is_released_by_the_flush_that_covers_it() {
    let bench = Bench::new(config(1, 8));
    for _ in 0..7 {
        assert!(matches!(bench.pass(), Ok(Unmapped::Queued)));
    }
    assert_eq!((bench.dma.waiting(), bench.released(), bench.invalidations()), ((7, 0), 0, 0));
    bench.dma.flush().unwrap();
    assert_eq!((bench.released(), bench.invalidations()), (7, 1));
    bench.assert_nothing_is_left();
}

#[test]
fn a_full_slot_is_flushed_by_one_invalidation() {
    let bench = Bench::new(config(1, 8));
    for n in 1..=64 {
        let _ = bench.pass().unwrap();
        assert_eq!(bench.dma.waiting(), (n % 8, 0));
        assert_eq!(bench.released(), n / 8 * 8);
        assert_eq!(bench.invalidations(), n as u64 / 8);
    }
}

#[test]
fn without_entries_or_age_every_unmap_is_flushed() {
    let no_age = flush_queue::Config { entries: 8, max_age: 0 };
    for config in [config(1, 0), DmaConfig { queue: no_age, ..config(1, 8) }] {
        let bench = Bench::new(config);
        for n in 1..4 {
            assert!(matches!(bench.pass(), Ok(Unmapped::Queued)));
            assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), n));
            assert_eq!(bench.invalidations(), n as u64);
        }
    }
}

#[test]
fn the_next_unmap_keeps_to_the_bound_on_the_age() {
    let bench = Bench::new(config(1, 8));
    bench.machine.set_clock(50);
    let _ = bench.pass().unwrap();
    bench.machine.set_clock(49 + MAX_AGE);
    let _ = bench.pass().unwrap();
    assert_eq!(bench.dma.waiting(), (2, 0));
    bench.machine.set_clock(50 + MAX_AGE);
    let _ = bench.pass().unwrap();
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), 3));
    // The age is that of the first in the slot since.
    bench.machine.set_clock(51 + MAX_AGE);
    let _ = bench.pass().unwrap();
    bench.machine.set_clock(50 + 2 * MAX_AGE);
    let _ = bench.pass().unwrap();
    assert_eq!(bench.dma.waiting(), (2, 0));
}

#[test]
fn expiring_flushes_what_is_due_and_says_when_the_next_is() {
    let bench = Bench::new(config(3, 8));
    assert_eq!(bench.dma.expire(), Ok(None));
    for cpu in 0..3 {
        bench.machine.run_on(cpu);
        bench.machine.set_clock(100 * cpu as u64);
        let _ = bench.pass().unwrap();
    }
    bench.machine.set_clock(MAX_AGE - 1);
    assert_eq!(bench.dma.expire(), Ok(Some(MAX_AGE)));
    assert_eq!(bench.released(), 0);
    bench.machine.set_clock(MAX_AGE + 100);
    assert_eq!(bench.dma.expire(), Ok(Some(MAX_AGE + 200)));
    assert_eq!((bench.dma.waiting(), bench.released(), bench.invalidations()), ((1, 0), 2, 1));
    bench.machine.set_clock(u64::MAX);
    assert_eq!(bench.dma.expire(), Ok(None));
    bench.assert_nothing_is_left();
}

#[test]
fn cpus_fill_slots_of_their_own_and_one_invalidation_flushes_all() {
    let bench = Bench::new(config(4, 8));
    // The last one shares the first one's slot.
    for cpu in [0, 1, 2, 3, 4] {
        bench.machine.run_on(cpu);
        for _ in 0..3 {
            let _ = bench.pass().unwrap();
        }
    }
    assert_eq!((bench.dma.waiting(), bench.invalidations()), ((15, 0), 0));
    bench.machine.run_on(0);
    let _ = bench.pass().unwrap();
    let _ = bench.pass().unwrap();
    assert_eq!(bench.dma.waiting(), (9, 0), "only the slot that was full");
    bench.dma.flush().unwrap();
    assert_eq!((bench.released(), bench.invalidations()), (17, 2));
}

#[test]
fn what_a_failed_sync_covers_is_released_by_a_later_one() {
    for retry in 0..4 {
        let bench = Bench::new(config(2, 4));
        bench.tlb.fail_next_invalidations(2);
        for _ in 0..3 {
            let _ = bench.pass().unwrap();
        }
        assert!(matches!(bench.pass(), Err(Error::Quarantined { .. })));
        assert_eq!((bench.dma.waiting(), bench.released()), ((0, 4), 0));
        assert!(bench.dma.flush().is_err());
        assert_eq!((bench.dma.waiting(), bench.released()), ((0, 4), 0));
        let invalidations = bench.invalidations();
        match retry {
            0 => bench.dma.flush().unwrap(),
            1 => assert_eq!(bench.dma.expire(), Ok(None)),
            // A full batch takes what is in quarantine along.
            2 => (0..4).for_each(|_| pass(&bench)),
            _ => {
                let mapping = bench.map();
                drop(bench.device.unmap(mapping).unwrap());
                bench.dma.flush().unwrap();
            }
        }
        assert_eq!(bench.invalidations(), invalidations + 1, "one for all");
        bench.assert_nothing_is_left();
    }
}

#[test]
fn a_strict_unmap_that_fails_is_held_and_released_later() {
    let bench = Bench::new(DmaConfig { flush: Flush::Strict, ..config(1, 4) });
    bench.tlb.fail_next_invalidations(1);
    assert!(matches!(bench.pass(), Err(Error::Quarantined { .. })));
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 1), 0));
    // The next one finds that hardware answers again.
    assert!(matches!(bench.pass(), Ok(Unmapped::Released(_))));
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), 2));
}

#[test]
fn hardware_that_never_answers_again_makes_it_leak_and_nothing_worse() {
    let bench = Bench::new(config(1, 4));
    bench.tlb.fail_next_invalidations(u64::MAX);
    for _ in 0..2000 {
        let _ = bench.pass();
    }
    assert_eq!(bench.released(), 0);
    let (waiting, quarantined) = bench.dma.waiting();
    assert!(waiting < 4 && (500..600).contains(&quarantined), "{quarantined} in quarantine");
    let Bench { device, dma, released, .. } = bench;
    drop(device);
    drop(dma);
    assert_eq!(released.load(Ordering::Relaxed), 0, "all of it leaks");
}

#[test]
fn a_dropped_domain_releases_what_waits_if_hardware_lets_go() {
    for (failures, releases) in [(0, 7), (1, 7), (2, 0)] {
        let bench = Bench::new(config(2, 4));
        bench.tlb.fail_next_invalidations(1);
        for _ in 0..4 {
            let _ = bench.pass();
        }
        assert_eq!(bench.dma.waiting(), (0, 4));
        bench.machine.run_on(1);
        (0..3).for_each(|_| pass(&bench));
        // The flush is the first, and the detach the second.
        bench.tlb.fail_next_invalidations(failures);
        let Bench { device, dma, released, arena, hooks, tlb, .. } = bench;
        drop((device, hooks));
        drop(dma);
        assert_eq!(released.load(Ordering::Relaxed), releases);
        assert_eq!(arena.tables() == 0, releases != 0, "tables leak, too, or nothing does");
        drop(tlb);
    }
}

#[test]
fn unmaps_during_a_flush_find_room_or_sync_for_themselves() {
    let bench = Arc::new(Bench::new(config(1, 4)));
    let inner = Arc::clone(&bench);
    *bench.hooks.meanwhile.lock() = Some(Box::new(move || {
        assert_eq!(inner.dma.waiting(), (0, 0));
        for n in 1..=4 {
            let _ = inner.pass().unwrap();
            assert_eq!((inner.dma.waiting(), inner.released()), ((n, 0), 0));
        }
        // Both batches are in use.
        let _ = inner.pass().unwrap();
        assert_eq!((inner.dma.waiting(), inner.released()), ((4, 0), 1));
        // A timer syncs it, and comes again: it cannot release it as long.
        inner.machine.set_clock(MAX_AGE);
        assert_eq!(inner.dma.expire(), Ok(Some(MAX_AGE)));
        assert_eq!((inner.dma.waiting(), inner.released()), ((4, 0), 1));
    }));
    for _ in 0..4 {
        let _ = bench.pass().unwrap();
    }
    assert_eq!((bench.dma.waiting(), bench.released()), ((4, 0), 5));
    assert_eq!(bench.invalidations(), 3);
    let _ = bench.pass().unwrap();
    bench.assert_nothing_is_left();
}

#[test]
fn what_a_panic_in_the_hook_tears_out_of_a_flush_is_released_by_a_later_one() {
    let bench = Bench::new(config(1, 4));
    (0..3).for_each(|_| pass(&bench));
    *bench.hooks.meanwhile.lock() = Some(Box::new(|| panic!("as the test wants")));
    let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bench.pass()));
    assert!(passed.is_err());
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 4), 0));
    (0..100).for_each(|_| pass(&bench));
    bench.dma.flush().unwrap();
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), 104));
    bench.assert_nothing_is_left();
}

#[test]
fn a_map_that_hardware_was_not_told_about_gives_the_memory_back_or_keeps_it() {
    let bench = Bench::new(config(1, 4));
    bench.tlb.fail_next_sync_maps(1);
    let refused = bench.device.map_single(bench.buffer(), Direction::ToDevice).unwrap_err();
    assert!(refused.memory.is_some());
    drop(refused);
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), 1));
    bench.tlb.fail_next_sync_maps(1);
    bench.tlb.fail_next_invalidations(1);
    let refused = bench.device.map_single(bench.buffer(), Direction::ToDevice).unwrap_err();
    assert!(matches!(refused.error, Error::Quarantined { .. }) && refused.memory.is_none());
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 1), 1));
    bench.dma.flush().unwrap();
    assert_eq!(bench.released(), 2);
    bench.assert_nothing_is_left();
}

#[test]
fn every_step_may_fail_and_nothing_is_lost_or_released_early() {
    for flush in [Flush::Lazy, Flush::Strict] {
        let bench = Bench::new(DmaConfig { flush, ..config(1, 2) });
        // A neighbour in the same tables: they stay.
        let neighbour = bench.map();
        let (tables, mut mapped) = (bench.arena.tables(), 0);
        let steps = bench.faults.sweep(|n| {
            mapped += 1;
            match bench.device.map_single(bench.buffer(), Direction::Bidirectional) {
                Ok(mapping) => drop(bench.device.unmap(mapping)),
                Err(refused) => drop(refused.memory),
            }
            let _ = bench.dma.flush();
            bench.dma.flush().unwrap();
            assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), mapped), "step {n}");
            assert_eq!(bench.tlb.stale_leaves(range(0, 1 << 40)), []);
            assert_eq!(bench.arena.tables(), tables);
        });
        assert!(steps >= 2, "{steps} steps");
        let _ = bench.device.unmap(neighbour).unwrap();
    }
}

#[test]
fn a_queue_that_is_too_large_is_refused() {
    for (cpus, entries) in [(usize::MAX, 1), (1, usize::MAX), (1, flush_queue::MAX_ENTRIES + 1)] {
        let table = PageTable::new(format::<12>(48, 48), arena()).unwrap();
        let tlb = Iotlb::new(walker(table.format(), table.root()), arena());
        let domain = Domain::new(table, tlb).unwrap();
        let dma: Result<DmaDomain<_, _, _, _, Buffer>, _> =
            DmaDomain::new(domain, config(cpus, entries), Machine::default());
        assert!(matches!(dma.unwrap_err(), Error::Limit { .. }));
    }
}

#[test]
fn threads_that_unmap_flush_and_expire_release_each_page_once() {
    const EACH: usize = 2000;
    let bench = Bench::new(config(2, 8));
    std::thread::scope(|scope| {
        for cpu in 0..3 {
            let bench = &bench;
            scope.spawn(move || {
                for n in 0..EACH {
                    bench.machine.run_on(cpu);
                    bench.machine.set_clock(n as u64 * 100);
                    let _ = bench.pass().unwrap();
                    if n % 64 == 63 {
                        bench.dma.flush().unwrap();
                    }
                    if n % 50 == 49 {
                        bench.dma.expire().unwrap();
                    }
                }
            });
        }
    });
    bench.dma.flush().unwrap();
    assert_eq!((bench.dma.waiting(), bench.released()), ((0, 0), 3 * EACH));
    bench.assert_nothing_is_left();
}
