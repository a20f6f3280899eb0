//! Reservations whose hooks fail and panic anywhere, with a device that uses all it can reach.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error, Flush, NoPool, Piece,
    Reservation, ReserveRequest,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::iova::{Align, Request};
use dmaspan::iommu::{Domain, Event, HardwareError, Invalidation, IommuOps, flush_queue};
use dmaspan::platform::OneThread;
use dmaspan::{Direction, Iova, IovaRange, PhysAddr};
use dmaspan_sim::iotlb::{AbsentEntries, Iotlb, IotlbConfig};
use dmaspan_sim::rng::Rng;
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;

use crate::common::{arena, format, span, walker};

const PAGE: u64 = 4096;
/// Pages of a reservation.
const PAGES: u64 = 8;
/// All that the device has addresses for.
const BITS: u32 = 19;

/// Which call of a hook goes wrong, and how.
#[derive(Debug, Default)]
struct Plan {
    left: AtomicI64,
    /// 1 for a panic.
    panics: AtomicI64,
}

impl Plan {
    fn arm(&self, rng: &mut Rng) -> bool {
        let is_armed = rng.below(2) == 0;
        let left = if is_armed { 1 + rng.below(3) } else { 0 };
        self.panics.store(i64::try_from(rng.below(2)).unwrap(), Ordering::Relaxed);
        self.left.store(i64::try_from(left).unwrap(), Ordering::Relaxed);
        is_armed
    }

    fn disarm(&self) {
        self.left.store(0, Ordering::Relaxed);
    }

    fn is_due(&self) -> bool {
        let is_due = self.left.fetch_sub(1, Ordering::Relaxed) == 1;
        assert!(!is_due || self.panics.load(Ordering::Relaxed) == 0, "planted");
        is_due
    }
}

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;

#[derive(Clone, Debug)]
struct Hooks(Tlb, Arc<Plan>);

impl Hooks {
    fn step(&self) -> Result<(), HardwareError> {
        let planted = HardwareError { what: "planted", status: 0 };
        if self.1.is_due() { Err(planted) } else { Ok(()) }
    }
}

// SAFETY: `Ok` comes from the simulated hardware alone.
unsafe impl IommuOps for Hooks {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.step()?;
        self.0.invalidate(what)
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.step()?;
        self.0.sync_map(range)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.0.detach()
    }

    fn observe(&self, _event: &Event<'_>) {
        if self.1.panics.load(Ordering::Relaxed) == 1 {
            let _ = self.step();
        }
    }

    fn max_ranges(&self) -> usize {
        self.0.max_ranges()
    }
}

/// What is seen of all memory.
#[derive(Debug)]
struct Seen {
    tlb: Tlb,
    alive: AtomicUsize,
    reached: Mutex<Vec<String>>,
}

/// Memory that looks whether a device reaches it when it is dropped.
#[derive(Debug)]
struct Looks {
    piece: Piece,
    seen: Arc<Seen>,
    /// Refused memory was never mapped; what has its place may have its address.
    is_refused: bool,
}

// SAFETY: nobody touches the memory but devices that only look where it is.
unsafe impl DmaMemory for Looks {
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.piece)
    }
}

/// Where the device gets for an address.
fn reached(tlb: &Tlb, iova: u64) -> Option<u64> {
    tlb.translate(Iova::new(iova), Access::Write).ok().map(|hit| hit.paddr.get())
}

impl Drop for Looks {
    fn drop(&mut self) {
        self.seen.alive.fetch_sub(1, Ordering::Relaxed);
        let (start, last) = (self.piece.span.paddr().get(), self.piece.span.last().get());
        let granules = start & !(PAGE - 1)..=last | (PAGE - 1);
        for iova in (0..1 << BITS).step_by(4096) {
            if !self.is_refused
                && let Some(paddr) = reached(&self.seen.tlb, iova)
                && granules.contains(&paddr)
            {
                self.seen.reached.lock().push(format!("{iova:#x} leads to freed {paddr:#x}"));
            }
        }
    }
}

type Translation = DmaDomain<ArmLpaeS1<12>, Arena, Hooks, OneThread, Looks>;

struct Trial {
    device: Device<Translation>,
    plan: Arc<Plan>,
    seen: Arc<Seen>,
    rng: Rng,
    region: u64,
    /// Whether it is known what is mapped.
    is_certain: bool,
    /// Pieces and IOVAs of reservations that a panic took.
    lost: (usize, usize),
}

/// What is linked, by offset: how long it is and where.
type Model = BTreeMap<u64, (u64, u64)>;

impl Trial {
    fn new(seed: u64, flush: Flush, absent: AbsentEntries) -> Self {
        let tables = arena();
        let table = PageTable::new(format::<12>(48, 48), tables.clone()).unwrap();
        let config = IotlbConfig { absent, ..IotlbConfig::default() };
        let tlb = Iotlb::with_config(walker(table.format(), table.root()), tables, config);
        let plan = Arc::<Plan>::default();
        let domain = Domain::new(table, Hooks(tlb.clone(), Arc::clone(&plan))).unwrap();
        let queue = flush_queue::Config { entries: 2, max_age: u64::MAX };
        let config = DmaConfig { flush, queue, ..DmaConfig::new(1) };
        let domain = Arc::new(DmaDomain::new(domain, config, OneThread).unwrap());
        let device = Device::new(domain, NoPool, DeviceConfig::bits(BITS)).unwrap();
        let seen = Seen { tlb, alive: AtomicUsize::new(0), reached: Mutex::default() };
        let (seen, rng) = (Arc::new(seen), Rng::new(seed));
        Self { device, plan, seen, rng, region: 1, is_certain: true, lost: (0, 0) }
    }

    fn memory(&self, paddr: u64, len: u64) -> Looks {
        self.seen.alive.fetch_add(1, Ordering::Relaxed);
        let piece = Piece::memory(span(paddr, len));
        Looks { piece, seen: Arc::clone(&self.seen), is_refused: false }
    }

    fn link(
        &mut self,
        reservation: &mut Reservation<Translation>,
        (model, pieces, low): (&mut Model, usize, u64),
    ) {
        let (page, pages) = (self.rng.below(PAGES), 1 + self.rng.below(2));
        if page + pages > PAGES {
            return;
        }
        self.region += u64::from(self.rng.below(3) == 0);
        let (offset, cut) = if page == 0 { (0, low) } else { (page * PAGE - low, 0) };
        let (len, paddr) = (pages * PAGE - cut, (self.region << 20) + page * PAGE + cut);
        let end = offset + len;
        let is_free = model.iter().all(|(at, (len, _))| at + len <= offset || end <= *at);
        let fits = is_free && model.len() < pieces;
        match self.device.link(reservation, offset, self.memory(paddr, len)) {
            Ok(()) => {
                assert!(fits);
                model.insert(offset, (len, paddr));
            }
            Err(refused) => {
                assert!(!fits || !self.is_certain, "{}", refused.error);
                refused.memory.unwrap().is_refused = true;
            }
        }
    }

    /// Returns whether what is mapped is known.
    fn announce(&mut self, reservation: &mut Reservation<Translation>, model: &Model) -> bool {
        let is_armed = self.plan.arm(&mut self.rng);
        let announced = catch_unwind(AssertUnwindSafe(|| self.device.announce(reservation)));
        self.plan.disarm();
        let addr = reservation.addr().get();
        // The device uses all it can.
        for iova in (0..1 << BITS).step_by(4096) {
            let _ = reached(&self.seen.tlb, iova);
        }
        match announced {
            Ok(Ok(())) => {
                for (offset, (len, paddr)) in model {
                    for byte in [0, len / 2, len - 1] {
                        let found = reached(&self.seen.tlb, addr + offset + byte);
                        assert_eq!(found, Some(paddr + byte), "{offset:#x}");
                    }
                }
                true
            }
            Ok(Err(error)) => {
                assert!(is_armed || matches!(error, Error::Withdrawn { .. } | Error::Domain(_)));
                false
            }
            Err(_panic) => false,
        }
    }

    /// Returns whether what is mapped is known.
    fn unlink(&mut self, reservation: &mut Reservation<Translation>, model: &mut Model) -> bool {
        let (first, pages) = (self.rng.below(PAGES), 1 + self.rng.below(PAGES));
        let low = PAGES * PAGE - reservation.len();
        let offset = (first * PAGE).saturating_sub(low);
        let end = ((first + pages) * PAGE - low).min(reservation.len());
        let is_in = |at: u64, len: u64| at < end && offset < at + len;
        let cuts =
            model.iter().any(|(at, (len, _))| is_in(*at, *len) && (*at < offset || at + len > end));
        self.plan.arm(&mut self.rng);
        let mut released = Vec::new();
        let unlinked = catch_unwind(AssertUnwindSafe(|| {
            let mut release = |memory: Looks| released.push(memory.piece.span.paddr().get());
            self.device.unlink(reservation, offset, end - offset, &mut release)
        }));
        self.plan.disarm();
        match unlinked {
            Ok(Ok(())) => {
                assert!(!cuts);
                let mut expected = Vec::new();
                model.retain(|at, (len, paddr)| {
                    let is_in = is_in(*at, *len);
                    if is_in {
                        expected.push(*paddr);
                    }
                    !is_in
                });
                assert_eq!(released, expected);
                true
            }
            Ok(Err(error)) => {
                assert_eq!(released, []);
                assert_eq!(cuts, matches!(error, Error::CutsLink { .. }), "{error}");
                cuts
            }
            Err(_panic) => {
                assert_eq!(released, []);
                false
            }
        }
    }

    fn destroy(&mut self, reservation: Reservation<Translation>, model: &Model) {
        self.plan.arm(&mut self.rng);
        let ended = catch_unwind(AssertUnwindSafe(|| self.device.destroy(reservation, drop)));
        self.plan.disarm();
        match ended {
            Ok(Ok(())) => {}
            Ok(Err(failed)) => {
                if let Some(reservation) = failed.reservation {
                    assert_eq!(reservation.linked(), model.len());
                    self.device.destroy(reservation, drop).unwrap();
                }
            }
            Err(_panic) => self.lost = (self.lost.0 + model.len(), self.lost.1 + 1),
        }
    }

    fn round(&mut self) {
        // Memory of others has other addresses: a panic may have left it to the device.
        self.region += 1;
        let pieces = 1 + self.rng.index(4);
        let low = 0x234 * self.rng.below(2);
        let (len, direction) = (PAGES * PAGE - low, Direction::Bidirectional);
        let request = ReserveRequest { len, offset: low, pieces, direction };
        let mut reservation = self.device.reserve(request).unwrap();
        let mut model = Model::new();
        self.is_certain = true;
        for _ in 0..self.rng.below(16) {
            match self.rng.below(4) {
                0 | 1 => self.link(&mut reservation, (&mut model, pieces, low)),
                2 => {
                    let is_known = self.announce(&mut reservation, &model);
                    self.is_certain &= is_known;
                }
                _ => {
                    let is_known = self.unlink(&mut reservation, &mut model);
                    self.is_certain &= is_known;
                }
            }
            assert_eq!(reservation.linked(), model.len());
        }
        self.destroy(reservation, &model);
    }
}

#[test]
fn whatever_hook_of_a_reservation_fails_or_panics_no_device_reaches_memory_that_went() {
    let seeds = if cfg!(miri) { 1 } else { 40 };
    for seed in 0..seeds {
        for flush in [Flush::Strict, Flush::Lazy] {
            for absent in [AbsentEntries::NotCached, AbsentEntries::Cached] {
                let mut trial = Trial::new(seed, flush, absent);
                (0..4).for_each(|_| trial.round());
                trial.device.translation().flush().unwrap();
                let (seen, (memory, iovas)) = (&trial.seen, trial.lost);
                assert_eq!(*seen.reached.lock(), [] as [String; 0], "{seed} {flush:?} {absent:?}");
                let alive = seen.alive.load(Ordering::Relaxed);
                assert!(alive <= memory, "{seed} {flush:?} {absent:?}: {alive} of {memory}");
                assert!(trial.device.translation().iovas().stats().live <= iovas);
            }
        }
    }
}

/// Memory that panics when it is dropped, as often as it is told.
#[derive(Debug)]
struct Panics(Piece, Arc<Plan>, #[expect(dead_code, reason = "it counts")] Arc<()>);

// SAFETY: nobody touches the memory.
unsafe impl DmaMemory for Panics {
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.0)
    }
}

impl Drop for Panics {
    fn drop(&mut self) {
        assert!(!self.1.is_due(), "planted");
    }
}

#[test]
fn iovas_are_freed_once_each_where_memory_panics_in_a_flush_that_frees_many() {
    for nth in [1, 2, 15, 16, 17, 18, 33, 40] {
        let tables = arena();
        let table = PageTable::new(format::<12>(48, 48), tables.clone()).unwrap();
        let tlb = Iotlb::new(walker(table.format(), table.root()), tables);
        let domain = Domain::new(table, tlb).unwrap();
        let queue = flush_queue::Config { entries: 64, max_age: u64::MAX };
        let config = DmaConfig { flush: Flush::Lazy, queue, ..DmaConfig::new(1) };
        let domain = Arc::new(DmaDomain::new(domain, config, OneThread).unwrap());
        let device = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(BITS)).unwrap();
        let (plan, alive) = (Arc::<Plan>::default(), Arc::new(()));
        plan.panics.store(1, Ordering::Relaxed);
        let mappings: Vec<_> = (0..40)
            .map(|n| {
                let piece = Piece::memory(span(0x8000_0000 + 2 * n * PAGE, PAGE));
                let memory = Panics(piece, Arc::clone(&plan), Arc::clone(&alive));
                device.map_single(memory, Direction::ToDevice).unwrap()
            })
            .collect();
        for mapping in mappings {
            assert!(device.unmap(mapping).is_ok());
        }
        plan.left.store(nth, Ordering::Relaxed);
        assert!(catch_unwind(AssertUnwindSafe(|| domain.flush())).is_err());
        let stats = domain.iovas().stats();
        let left = usize::try_from(40 - nth).unwrap();
        assert_eq!((stats.live, Arc::strong_count(&alive)), (left, left + 1), "{nth}");
        plan.disarm();
        assert_eq!(domain.waiting(), (0, left), "{nth}");
        domain.flush().unwrap();
        assert_eq!(Arc::strong_count(&alive), 1, "{nth}");
        let stats = domain.iovas().stats();
        assert_eq!((stats.live, domain.waiting()), (0, (0, 0)), "{nth}");
        // Each is there once: all can be had, and none twice.
        let space = domain.iovas();
        let limit = Iova::new((1 << BITS) - 1);
        let request = Request { bytes: PAGE, align: Align::Natural, limit };
        let taken: Vec<_> = std::iter::from_fn(|| space.alloc(request).ok()).collect();
        let starts: BTreeSet<u64> = taken.iter().map(|one| one.range().start().get()).collect();
        assert_eq!((starts.len(), taken.len()), (127, 127), "{nth}");
        taken.into_iter().for_each(|one| space.free(one).unwrap());
    }
}
