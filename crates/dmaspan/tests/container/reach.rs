//! No device reaches memory that is not pinned, whichever syncs hardware does not confirm.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::container::{
    Attach, DirtyRead, DomainId, Error, ExternalPin, Interrupts, UnmapNotifier,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::pin::Dirty;
use dmaspan::{Account, Container, IovaRange, PhysAddr, Span, UserAddr, UserRange};
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{MapOptions, SimMemory, SimPinner, SimSpace};
use dmaspan_sim::rng::Rng;
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{PROT, range, walker};

const PAGE: u64 = 0x1000;
const SLOTS: u64 = 6;
const PAGES: u64 = 12;
/// Mappings lie so far apart that some share a table and others do not.
const STRIDE: u64 = 256 * PAGE;
/// The last slot's memory is a device's.
const BAR: u64 = SLOTS - 1;
const SEEDS: u64 = 16;
const STEPS: u64 = 600;
/// Domains that ever come.
const DOMAINS: usize = 12;

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
type Tried = Container<SimPinner, parking_lot::RawMutex, 4>;

/// A device that unpins of itself.
struct Idle;

impl UnmapNotifier for Idle {
    fn unmapping(&self, _range: IovaRange) {}
}

/// Answers nothing while there are calls to fail.
struct Silent {
    iotlb: Tlb,
    to_fail: Arc<AtomicU64>,
}

impl Silent {
    fn ask(&self) -> Result<(), HardwareError> {
        let less = |left: u64| left.checked_sub(1);
        match self.to_fail.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
            Ok(_) => Err(HardwareError { what: "no answer", status: 1 }),
            Err(_) => Ok(()),
        }
    }
}

// SAFETY: all is done by the simulated hardware, or not confirmed.
unsafe impl IommuOps for Silent {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.ask().and_then(|()| self.iotlb.invalidate(what))
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.ask().and_then(|()| self.iotlb.sync_map(range))
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.ask().and_then(|()| self.iotlb.detach())
    }

    fn max_ranges(&self) -> usize {
        self.iotlb.max_ranges()
    }
}

struct World {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    account: Arc<Account>,
    container: Tried,
    /// Of the memory of tables.
    faults: Faults,
    /// Those that were ever attached.
    tables: Vec<(Tlb, Arena, Arc<AtomicU64>)>,
    attached: Vec<DomainId>,
    /// Of an emulated device.
    pins: Vec<ExternalPin>,
    /// Device memory that nobody may reach.
    revoked: bool,
}

fn slot(n: u64) -> IovaRange {
    range(n * STRIDE, PAGES * PAGE)
}

fn user(n: u64) -> UserRange {
    UserRange::from_len(UserAddr::new((1 << 44) + n * PAGES * PAGE), PAGES * PAGE).unwrap()
}

impl World {
    fn new() -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 1 << 20, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let frames = memory.allocate_scattered(BAR * PAGES * PAGE, 3).unwrap();
        space.map(user(0).start(), &frames).unwrap();
        let bar = Span::new(PhysAddr::new(1 << 46), PAGES * PAGE).unwrap();
        space.map_device_with(user(BAR).start(), bar, MapOptions::default()).unwrap();
        let account = Account::new(u64::MAX);
        let container = Tried::of_batch(SimPinner::new(Arc::clone(&memory)), Arc::clone(&account));
        let (tables, attached, pins) = Default::default();
        let faults = Faults::none();
        Self { memory, space, account, container, faults, tables, attached, pins, revoked: false }
    }

    fn attach(&mut self, to_fail: u64) {
        self.faults.disarm();
        let arena = Arena::new(PhysAddr::new(0x4000_0000), 16 << 20);
        let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
        let table = PageTable::new(format, Faulty::new(arena.clone(), &self.faults)).unwrap();
        let iotlb = Iotlb::new(walker(&table), arena.clone());
        let to_fail = Arc::new(AtomicU64::new(to_fail));
        let ops = Silent { iotlb: iotlb.clone(), to_fail: Arc::clone(&to_fail) };
        let domain = Domain::new(table, ops).unwrap();
        self.tables.push((iotlb, arena, to_fail));
        let attached = self.container.attach(domain, Attach::new(Interrupts::Isolated));
        self.attached.extend(attached);
        self.attached = self.container.info().domains;
    }

    fn step(&mut self, rng: &mut Rng) {
        // Some of the hardware falls silent for a while, or for good.
        if rng.below(8) == 0 && !self.tables.is_empty() {
            let calls = [0, 1, 2, 3, 7, 40, u64::MAX][rng.index(7)];
            self.tables[rng.index(self.tables.len())].2.store(calls, Ordering::Relaxed);
        }
        self.faults.disarm();
        if rng.below(4) == 0 {
            // A domain has no memory for a table, perhaps the second that is asked.
            self.faults.arm(1 + u32::try_from(rng.below(12)).unwrap());
        }
        let n = rng.below(SLOTS);
        let Self { container, space, .. } = &*self;
        match rng.below(24) {
            0..8 => {
                let _ = container.map(space, user(n), slot(n).start(), PROT);
                self.revoked &= n != BAR;
            }
            8..14 => drop(container.unmap(slot(n))),
            14 => drop(container.unmap_all()),
            15 | 16 => self.revoked |= container.revoke(space, user(BAR)).is_ok(),
            17 | 18 if self.attached.len() < 3 && self.tables.len() < DOMAINS => {
                // The first domain has all mapped anew.
                self.revoked &= !self.attached.is_empty();
                let to_fail = if rng.below(4) == 0 { rng.below(4) } else { 0 };
                self.attach(to_fail);
            }
            19 if !self.attached.is_empty() => {
                let id = self.attached[rng.index(self.attached.len())];
                let _ = container.detach(id);
                self.attached = self.container.info().domains;
            }
            20 | 21 => {
                let page = range(slot(n).start().get() + rng.below(PAGES) * PAGE, PAGE);
                let mut spans: Vec<Span> = Vec::new();
                let pin = container.pin_external(page, PROT, &mut spans);
                self.pins.extend(pin);
            }
            22 => self.unpin(),
            _ => {
                let all = range(0, (n + 1) * STRIDE);
                let mut words = [0; 32];
                if rng.below(2) == 0 {
                    let _ = container.dirty_bitmap(all, PAGE, &mut words, DirtyRead::Clear);
                } else {
                    let _ = container.unmap_dirty(all, PAGE, &mut words);
                }
            }
        }
    }

    fn unpin(&mut self) {
        for pin in self.pins.drain(..) {
            self.container.unpin_external(pin, Dirty::Written).unwrap();
        }
    }

    /// What devices behind all domains reach, those included that have gone, is pinned.
    fn check(&self, what: &str) {
        for (n, (iotlb, ..)) in self.tables.iter().enumerate() {
            for slot_number in 0..SLOTS {
                for page in 0..PAGES {
                    let at = slot(slot_number).start().wrapping_add(page * PAGE);
                    let Ok(hit) = iotlb.translate(at, Access::Write) else { continue };
                    if hit.paddr >= PhysAddr::new(1 << 46) {
                        assert!(!self.revoked, "{what}: domain {n} reaches the BAR by {at}");
                        continue;
                    }
                    let pins = self.memory.pins(hit.paddr).unwrap_or(0);
                    assert!(pins > 0, "{what}: domain {n} reaches {} by {at}", hit.paddr);
                }
            }
        }
        assert_eq!(self.memory.violations(), [], "{what}");
        assert!(self.memory.pinned_frames() * PAGE <= self.account.used(), "{what}");
    }
}

#[test]
fn no_device_reaches_memory_that_is_not_pinned_and_nothing_stays_once_hardware_answers() {
    let mut kept = 0;
    for seed in 0..SEEDS {
        let mut rng = Rng::new(seed);
        let mut world = World::new();
        if seed % 2 == 1 {
            world.container.attach_emulated(Arc::new(Idle)).unwrap();
        }
        if seed % 4 > 1 {
            world.container.start_dirty().unwrap();
        }
        world.attach(0);
        for step in 0..STEPS {
            world.step(&mut rng);
            world.check(&format!("seed {seed}, step {step}"));
            let unmapped = world.container.unmap(slot(0));
            kept += u64::from(matches!(unmapped, Err(Error::NotForgotten { .. })));
        }
        world.tables.iter().for_each(|(_, _, to_fail)| to_fail.store(0, Ordering::Relaxed));
        world.unpin();
        world.container.unmap_all().unwrap();
        assert_eq!(world.container.mappings(), 0);
        assert_eq!((world.memory.pinned_frames(), world.account.used()), (0, 0), "seed {seed}");
        world.check("in the end");
        for (n, (iotlb, ..)) in world.tables.iter().enumerate() {
            assert_eq!(iotlb.stale_leaves(range(0, SLOTS * STRIDE)), [], "domain {n}");
        }
        for id in world.container.info().domains {
            world.container.detach(id).unwrap();
        }
    }
    assert!(kept > SEEDS * 10, "hardware hardly ever was silent: {kept}");
}
