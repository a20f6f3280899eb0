//! A container under hardware that does not confirm one invalidation in a hundred: four threads
//! map, unmap, revoke and read what was written, and domains come and go. Once hardware is healthy
//! nothing is pinned, charged or in quarantine.
//!
//! `DMASPAN_SOAK` is the number of operations; without it there are few. The whole of it:
//! `DMASPAN_SOAK=10000000 cargo test --release -p dmaspan --test simulation container_soak`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use dmaspan::container::{Attach, BusyHook, DirtyRead, Error, GaveUp, Interrupts};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Account, Container, Iova, IovaRange, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{MapOptions, SimMemory, SimPinError, SimPinner, SimSpace};
use dmaspan_sim::rng::Rng;
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

const THREADS: u64 = 4;
const FEW: u64 = 40_000;
const PAGE: u64 = 0x1000;
/// Mappings that there can be, half a table of pages apart, and the pages of the longest.
const SLOTS: u64 = 24;
const STRIDE: u64 = 256 * PAGE;
const PAGES: u64 = 40;
/// The last slot's memory is a device's.
const BAR: u64 = SLOTS - 1;

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
type Soaked = Container<SimPinner, parking_lot::RawMutex, 8>;
type Refusal = Error<SimPinError>;

/// How often hardware was asked, and whether it fails.
#[derive(Default)]
struct Health {
    ill: AtomicBool,
    asked: AtomicU64,
    failed: AtomicU64,
}

impl Health {
    fn ask(&self) -> Result<(), HardwareError> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        // Mixed, since some operations ask in a fixed order.
        let mixed = asked.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        if self.ill.load(Ordering::Relaxed) && mixed.is_multiple_of(100) {
            self.failed.fetch_add(1, Ordering::Relaxed);
            return Err(HardwareError { what: "one in a hundred is not confirmed", status: 1 });
        }
        Ok(())
    }
}

struct Flaky {
    iotlb: Tlb,
    health: Arc<Health>,
}

#[expect(unsafe_code, reason = "a promise about devices that there are none of")]
// SAFETY: what the simulated hardware does not forget is in reach of no device but the test's.
unsafe impl IommuOps for Flaky {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        // It has forgotten nothing where it fails.
        self.health.ask().and_then(|()| self.iotlb.invalidate(what))
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.health.ask().and_then(|()| self.iotlb.sync_map(range))
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.health.ask().and_then(|()| self.iotlb.detach())
    }

    fn max_ranges(&self) -> usize {
        self.iotlb.max_ranges()
    }
}

/// Waits as long as it takes.
struct Patient;

impl BusyHook for Patient {
    fn wait(&self, ready: &dyn Fn() -> bool) -> Result<(), GaveUp> {
        while !ready() {
            thread::yield_now();
        }
        Ok(())
    }

    fn wake(&self) {}
}

fn slot(n: u64, pages: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(n * STRIDE), pages * PAGE).unwrap()
}

fn user(n: u64, pages: u64) -> UserRange {
    UserRange::from_len(UserAddr::new((1 << 44) + n * PAGES * PAGE), pages * PAGE).unwrap()
}

struct Soak {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    account: Arc<Account>,
    health: Arc<Health>,
    iotlbs: Vec<Tlb>,
    tables: Vec<Arena>,
    container: Soaked,
    refused: AtomicU64,
}

impl Soak {
    fn new() -> Self {
        let base = PhysAddr::new(1 << 40);
        let memory = Arc::new(SimMemory::new(base, SLOTS * PAGES * PAGE * 2, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let frames = memory.allocate_scattered(BAR * PAGES * PAGE, 3).unwrap();
        space.map(user(0, 1).start(), &frames).unwrap();
        let bar = Span::new(PhysAddr::new(1 << 46), PAGES * PAGE).unwrap();
        space.map_device_with(user(BAR, 1).start(), bar, MapOptions::default()).unwrap();
        let account = Account::new(u64::MAX);
        let pinner = SimPinner::new(Arc::clone(&memory));
        let container = Soaked::of_batch(pinner, Arc::clone(&account));
        let container = container.with_busy_hook(Box::new(Patient));
        let (health, iotlbs, tables, refused) = Default::default();
        let mut soak = Self { memory, space, account, health, iotlbs, tables, container, refused };
        for _ in 0..2 {
            let (domain, tables, iotlb) = soak.domain();
            soak.container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
            soak.tables.push(tables);
            soak.iotlbs.push(iotlb);
        }
        soak
    }

    fn domain(&self) -> (Domain<ArmLpaeS1<12>, Arena, Flaky>, Arena, Tlb) {
        let tables = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
        let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
        let table = PageTable::new(format, tables.clone()).unwrap();
        let registers = table.format().registers(table.root());
        let walker = ArmLpaeS1Walker::new(registers.into()).unwrap();
        let iotlb = Iotlb::new(walker, tables.clone());
        let ops = Flaky { iotlb: iotlb.clone(), health: Arc::clone(&self.health) };
        (Domain::new(table, ops).unwrap(), tables, iotlb)
    }

    fn step(&self, rng: &mut Rng) -> Result<(), Refusal> {
        let Self { container, space, .. } = self;
        let n = rng.below(SLOTS);
        match rng.below(64) {
            0..24 => {
                let pages = 1 + rng.below(PAGES);
                let at = slot(n, 1).start();
                container.map(space, user(n, pages), at, Prot::READ_WRITE).map(|_| ())
            }
            24..48 => container.unmap(slot(n, PAGES)).map(|_| ()),
            48..50 => container.unmap(slot(n, STRIDE / PAGE * (1 + rng.below(8)))).map(|_| ()),
            50 if rng.below(8) == 0 => container.unmap_all().map(|_| ()),
            51 => container.revoke(space, user(BAR, PAGES)).map(|_| ()),
            52 if rng.below(8) == 0 => {
                container.dirty_bitmap(slot(0, 64), PAGE, &mut [0], DirtyRead::Clear)
            }
            53 if rng.below(16) == 0 => {
                let (domain, ..) = self.domain();
                let id = container.attach(domain, Attach::new(Interrupts::Isolated))?;
                container.detach(id)
            }
            54 => container.write(slot(n, 1).start(), &[1; 16]),
            _ => {
                // What hardware has cached must not lead to memory that is not pinned: it is looked
                // at in the end, and used here.
                let iotlb = &self.iotlbs[rng.index(2)];
                let at = slot(n, 1).start().get() + PAGE * rng.below(PAGES);
                let _ = iotlb.translate(Iova::new(at), Access::Write);
                Ok(())
            }
        }
    }

    fn thread(&self, number: u64, operations: u64) {
        let mut rng = Rng::new(number);
        for _ in 0..operations {
            let Err(refusal) = self.step(&mut rng) else { continue };
            let of_hardware = matches!(
                refusal,
                Error::NotForgotten { .. }
                    | Error::Quarantined { .. }
                    | Error::QuarantineFull { .. }
                    | Error::MarksUnsynced { .. }
                    | Error::Map { .. }
            );
            let of_others = matches!(
                refusal,
                Error::Exists { .. }
                    | Error::Bisects { .. }
                    | Error::NotMapped { .. }
                    | Error::Copy { .. }
            );
            assert!(of_hardware || of_others, "{refusal}");
            self.refused.fetch_add(u64::from(of_hardware), Ordering::Relaxed);
        }
    }
}

#[test]
fn once_hardware_is_healthy_nothing_is_pinned_charged_or_in_quarantine() {
    let operations = std::env::var("DMASPAN_SOAK").map_or(FEW, |count| count.parse().unwrap());
    let soak = Soak::new();
    soak.container.start_dirty().unwrap();
    soak.health.ill.store(true, Ordering::Relaxed);
    thread::scope(|scope| {
        let soak = &soak;
        for number in 0..THREADS {
            scope.spawn(move || soak.thread(number, operations / THREADS));
        }
    });
    soak.health.ill.store(false, Ordering::Relaxed);
    let failed = soak.health.failed.load(Ordering::Relaxed);
    let refused = soak.refused.load(Ordering::Relaxed);
    assert!(failed > 0 && refused > 0, "hardware never failed");
    // Not all of the ranges are out of use, or nothing would have been tried in the end.
    soak.container.unmap_all().unwrap();
    assert_eq!(soak.container.mappings(), 0);
    assert_eq!((soak.memory.pinned_frames(), soak.account.used()), (0, 0));
    for n in 0..SLOTS {
        soak.container.map(&soak.space, user(n, PAGES), slot(n, 1).start(), Prot::READ).unwrap();
    }
    let bytes = SLOTS * PAGES * PAGE;
    assert_eq!(soak.container.unmap_all().unwrap(), bytes, "every range is of use");
    let all = IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap();
    for (iotlb, tables) in soak.iotlbs.iter().zip(&soak.tables) {
        assert_eq!((iotlb.stale_leaves(all).len(), iotlb.stale_links(all).len()), (0, 0));
        assert_eq!(tables.tables(), 1, "only the root");
    }
    assert_eq!((soak.memory.pinned_frames(), soak.account.used()), (0, 0));
    assert_eq!(soak.memory.violations(), []);
    println!("{operations} operations, {failed} syncs failed, {refused} were refused for that");
}
