//! The n-th failure: each operation of the DMA API is run with its first fallible step failing, its
//! second, and so on. Tables, hooks and slots are what can fail.
//!
//! An operation that fails leaves everything as it was, or has left in quarantine what hardware may
//! use. When hardware has answered again, nothing is left of any of it.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dmaspan::dma::{
    Attrs, Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error, Flush, Piece, Reservation,
    ReserveRequest, Segment, Unmapped,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::Domain;
use dmaspan::iommu::iova::IovaStats;
use dmaspan::platform::OneThread;
use dmaspan::{Direction, DmaAddr, Iova, PhysAddr};
use dmaspan_sim::bounce::SimPool;
use dmaspan_sim::fault::{Faults, Faulty, Fired};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{arena, format, range, span, walker};
use crate::rig::{RAM, untrusted};

pub(crate) const PAGE: u64 = 1 << 12;
/// The pages where these operations may map something: IOVAs are handed out from the lowest on.
const TOUCHED: [Range<u64>; 3] = [0..32, 1024..1028, 1536..1538];
/// Where memory is that needs not exist, since no device looks into it.
pub(crate) const FAR: u64 = 1 << 30;

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
pub(crate) type Dma = DmaDomain<ArmLpaeS1<12>, Faulty<Arena>, Faulty<Tlb>, OneThread, Pieces>;
pub(crate) type Dev = Device<Dma, Faulty<SimPool>>;

/// Memory that says when it is released: nothing of it may be in the IOTLB then.
#[derive(Debug)]
pub(crate) struct Pieces {
    pieces: Vec<Piece>,
    alive: Arc<AtomicUsize>,
    tlb: Tlb,
}

// SAFETY: the devices only look where it is.
unsafe impl DmaMemory for Pieces {
    fn pieces(&self) -> &[Piece] {
        &self.pieces
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
        let ours = |at: PhysAddr| {
            let reaches = |piece: &Piece| {
                let (first, last) =
                    (piece.span.paddr().get() / PAGE, piece.span.last().get() / PAGE);
                (first..=last).contains(&(at.get() / PAGE))
            };
            self.pieces.iter().any(reaches)
        };
        let stale = self.tlb.stale_leaves(range(0, 1 << 32));
        let early = stale.iter().any(|leaf| ours(leaf.cached));
        assert!(!early || std::thread::panicking(), "released too early");
    }
}

pub(crate) struct Rig {
    pub(crate) device: Dev,
    /// One that sees nothing but its buffers.
    pub(crate) distrusted: Dev,
    pub(crate) domain: Arc<Dma>,
    pub(crate) faults: Faults,
    pub(crate) arena: Arena,
    pub(crate) tlb: Tlb,
    pub(crate) pool: SimPool,
    pub(crate) alive: Arc<AtomicUsize>,
    /// Slots that stay taken for ever, since hardware may use them.
    lost: Cell<usize>,
}

/// What an operation that fails must leave as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
struct State {
    tables: usize,
    alive: usize,
    slots: usize,
    waiting: (usize, usize),
    /// How many ranges of IOVAs are handed out.
    live: usize,
    mapped: Vec<Iova>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let (faults, arena) = (Faults::none(), arena());
        let tables = Faulty::new(arena.clone(), &faults);
        let table = PageTable::new(format::<12>(48, 48), tables).unwrap();
        let tlb = Iotlb::new(walker(table.format(), table.root()), arena.clone());
        let domain = Domain::new(table, Faulty::new(tlb.clone(), &faults)).unwrap();
        let domain = Arc::new(DmaDomain::new(domain, DmaConfig::new(1), OneThread).unwrap());
        let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), 1 << 20, 12).unwrap());
        let pool = SimPool::new(memory, span(RAM, 64 * PAGE)).unwrap();
        let device = |config| {
            let pool = Faulty::new(pool.clone(), &faults);
            Device::new(Arc::clone(&domain), pool, config).unwrap()
        };
        let config = DeviceConfig::bits(32);
        let (device, distrusted) = (device(config), device(untrusted(config)));
        Self {
            device,
            distrusted,
            domain,
            faults,
            arena,
            tlb,
            pool,
            alive: Arc::default(),
            lost: Cell::new(0),
        }
    }

    /// Pieces at these places in RAM.
    pub(crate) fn memory(&self, places: &[(u64, u64)]) -> Pieces {
        self.alive.fetch_add(1, Ordering::Relaxed);
        let piece = |&(at, len)| Piece::memory(span(RAM + at, len));
        Pieces {
            pieces: places.iter().map(piece).collect(),
            alive: Arc::clone(&self.alive),
            tlb: self.tlb.clone(),
        }
    }

    /// The pages that a device reaches, of those that are handed out first.
    fn touch(&self) -> Vec<Iova> {
        let pages = TOUCHED.into_iter().flatten().map(|page| Iova::new(page * PAGE));
        pages.filter(|iova| self.tlb.translate(*iova, Access::Read).is_ok()).collect()
    }

    /// How much memory is not released.
    pub(crate) fn alive(&self) -> usize {
        self.alive.load(Ordering::Relaxed)
    }

    fn state(&self) -> State {
        let IovaStats { live, .. } = self.domain.iovas().stats();
        State {
            tables: self.arena.tables(),
            alive: self.alive(),
            slots: self.pool.held(),
            waiting: self.domain.waiting(),
            live,
            mapped: self.touch(),
        }
    }
}

/// Checks what an operation left that could not be synced: memory and IOVAs are in quarantine.
fn check_quarantined(rig: &Rig, before: &State) {
    let after = rig.state();
    assert_eq!(after.waiting, (0, 1));
    assert_eq!((after.alive, after.live), (before.alive + 1, before.live + 1));
    rig.lost.update(|lost| lost + after.slots - before.slots);
}

/// One buffer, mapped and unmapped.
fn single(rig: &Rig, device: &Dev, place: (u64, u64), flush: Flush) {
    let before = rig.state();
    let attrs = Attrs { flush: Some(flush), ..Attrs::default() };
    let memory = rig.memory(&[place]);
    match device.map_single_with(memory, Direction::Bidirectional, attrs) {
        Ok(mapping) => {
            assert!(rig.state().mapped.len() > before.mapped.len());
            let unmapped = device.unmap(mapping).map_err(|failed| failed.mapping.is_none());
            check_unmapped(rig, before, unmapped);
        }
        Err(refused) => check_refused(rig, &before, refused.memory),
    }
}

/// A list of buffers, mapped and unmapped.
fn list(rig: &Rig, device: &Dev, places: &[(u64, u64)], flush: Flush) {
    let before = rig.state();
    let attrs = Attrs { flush: Some(flush), ..Attrs::default() };
    let mut room = [Segment { addr: DmaAddr::new(0), len: 0 }; 128];
    let memory = rig.memory(places);
    match device.map_list_with(memory, Direction::Bidirectional, &mut room, attrs) {
        Ok(mapping) => {
            assert!(rig.state().mapped.len() > before.mapped.len());
            let unmapped = device.unmap_list(mapping).map_err(|failed| failed.mapping.is_none());
            check_unmapped(rig, before, unmapped);
        }
        Err(refused) => check_refused(rig, &before, refused.memory),
    }
}

fn check_refused(rig: &Rig, before: &State, memory: Option<Pieces>) {
    match memory {
        Some(memory) => {
            drop(memory);
            assert_eq!(rig.state(), *before);
        }
        None => check_quarantined(rig, before),
    }
}

/// `Err` says whether the mapping is in quarantine.
fn check_unmapped(rig: &Rig, before: State, unmapped: Result<Unmapped<Pieces>, bool>) {
    match unmapped {
        Ok(Unmapped::Released(memory)) => {
            drop(memory);
            assert_eq!(rig.state(), before);
        }
        Ok(Unmapped::Queued) => {
            let after = rig.state();
            assert_eq!((after.alive, after.live), (before.alive + 1, before.live + 1));
            match rig.domain.flush() {
                Ok(()) => assert_eq!(rig.state(), before),
                Err(_) => check_quarantined(rig, &before),
            }
        }
        Err(quarantined) => {
            assert!(quarantined);
            check_quarantined(rig, &before);
        }
    }
}

/// A reservation with pieces that are linked, announced, unlinked in part, and destroyed.
fn reservation(rig: &Rig, device: &Dev) {
    let before = rig.state();
    let (len, offset, direction) = ((4 << 20) - PAGE, 0x800, Direction::Bidirectional);
    let request = ReserveRequest { len, offset, pieces: 3, direction };
    let mut reservation = device.reserve(request).unwrap();
    // The last one needs another table than the first two.
    let pieces = [(0x5_0800, 0x800), (0x5_2000, PAGE), (0x5_4000, PAGE)];
    let linked = [0, 0x800, (2 << 20) - 0x800].into_iter().zip(pieces);
    let is_linked = linked
        .into_iter()
        .all(|(offset, place)| link(rig, device, &mut reservation, offset, place));
    if is_linked {
        announce_and_unlink(rig, device, &mut reservation);
    }
    for _ in 0..3 {
        match device.destroy(reservation, drop) {
            Ok(()) => {
                // What an unlink left in quarantine is settled by the end. Tables in which other
                // IOVAs have a place stay until the domain ends.
                let after = rig.state();
                assert_eq!(after, State { tables: after.tables, ..before });
                return;
            }
            Err(failed) => match failed.reservation {
                Some(left) => reservation = left,
                None => panic!("a strict one is given back"),
            },
        }
    }
    panic!("two steps fail at most");
}

fn link(
    rig: &Rig,
    device: &Dev,
    reservation: &mut Reservation<Dma, Faulty<SimPool>>,
    offset: u64,
    place: (u64, u64),
) -> bool {
    let (before, linked) = (rig.state(), reservation.linked());
    let Err(refused) = device.link(reservation, offset, rig.memory(&[place])) else { return true };
    drop(refused.memory.expect("hardware knows nothing of it"));
    assert_eq!((rig.state(), reservation.linked()), (before, linked));
    false
}

fn announce_and_unlink(
    rig: &Rig,
    device: &Dev,
    reservation: &mut Reservation<Dma, Faulty<SimPool>>,
) {
    let before = rig.state();
    if let Err(error) = device.announce(reservation) {
        let after = rig.state();
        assert_eq!((after.alive, after.live), (before.alive, before.live));
        // The first two are mapped by one call, and were not announced.
        let mapped = after.mapped.len() - before.mapped.len();
        assert!([0, 2].contains(&mapped) || matches!(error, Error::Quarantined { .. }));
        return;
    }
    match device.unlink(reservation, 0x800, PAGE, drop) {
        Ok(()) => {
            let after = rig.state();
            assert_eq!(
                (after.alive, after.mapped.len()),
                (before.alive - 1, before.mapped.len() + 2)
            );
        }
        Err(error) => {
            assert!(matches!(error, Error::Quarantined { .. }));
            assert_eq!((rig.state().alive, reservation.linked()), (before.alive, 3));
        }
    }
}

/// What is tried: its name, and how many steps it has at least that can fail.
type Operation = (&'static str, u32, fn(&Rig));

const OPERATIONS: [Operation; 9] = [
    ("a buffer", 2, |rig| single(rig, &rig.device, (FAR, 300), Flush::Strict)),
    ("a buffer, lazily", 2, |rig| single(rig, &rig.device, (FAR, 300), Flush::Lazy)),
    ("a bounced buffer", 3, |rig| single(rig, &rig.distrusted, (0x5_0100, 300), Flush::Strict)),
    ("a buffer with bounced ends", 4, |rig| {
        single(rig, &rig.distrusted, (0x5_0100, 3 * PAGE), Flush::Strict);
    }),
    ("a list", 2, |rig| list(rig, &rig.device, &LIST, Flush::Strict)),
    ("a list, lazily", 2, |rig| list(rig, &rig.device, &LIST, Flush::Lazy)),
    ("a bounced list", 5, |rig| list(rig, &rig.distrusted, &BOUNCED, Flush::Strict)),
    ("a reservation", 5, |rig| reservation(rig, &rig.device)),
    ("a bounced reservation", 6, |rig| reservation(rig, &rig.distrusted)),
];

const LIST: [(u64, u64); 4] =
    [(FAR, PAGE), (FAR + 3 * PAGE, 5 * PAGE), (FAR + 20 * PAGE, 100), (FAR + 30 * PAGE, PAGE)];
const BOUNCED: [(u64, u64); 4] =
    [(0x5_0100, 300), (0x5_2000, PAGE), (0x5_4010, 5000), (0x5_8010, 3 * PAGE)];

/// Runs each operation with each step failing; with it fail so many further syncs.
fn sweep(further: u64) {
    for (name, least, operation) in OPERATIONS {
        let mut n = 1;
        while attempt(name, operation, n, further) == Fired::Yes {
            n += 1;
        }
        assert!(n > least, "{name} has {} steps", n - 1);
    }
}

/// Runs an operation with its n-th step failing.
fn attempt(name: &str, operation: fn(&Rig), n: u32, further: u64) -> Fired {
    let rig = Rig::new();
    // A neighbour that goes on all the time.
    let memory = rig.memory(&[(FAR << 1, PAGE)]);
    let neighbour = rig.device.map_single(memory, Direction::Bidirectional).unwrap();
    let before = rig.state();
    rig.tlb.fail_next_invalidations(further);
    rig.faults.arm(n);
    operation(&rig);
    let fired = rig.faults.disarm();
    rig.tlb.fail_next_invalidations(0);
    rig.domain.flush().unwrap();
    let (slots, tables) = (before.slots + rig.lost.get(), rig.arena.tables());
    assert_eq!(rig.state(), State { slots, tables, ..before }, "{name}, step {n}");
    assert_eq!((rig.pool.quarantined(), rig.pool.lost()), (rig.lost.get(), 0), "{name}, step {n}");
    assert!(matches!(rig.device.unmap(neighbour), Ok(Unmapped::Released(_))));
    let arena = rig.arena.clone();
    drop(rig);
    assert_eq!(arena.tables(), 0, "{name}, step {n}");
    fired
}

#[test]
fn whichever_step_fails_all_is_as_before_or_in_quarantine() {
    sweep(0);
}

#[test]
fn whichever_step_fails_and_its_sync_too_all_is_kept_until_hardware_answers() {
    sweep(1);
}
