//! One sync a batch, and none while others wait for the container's lock.

use std::cell::Cell;
use std::sync::Arc;

use dmaspan::container::{Attach, Interrupts};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::pin::{Dirty, Kind, PinFailed, Pinner, SpanSink};
use dmaspan::{
    Account, Container, Errno, Iova, IovaRange, PhysAddr, Prot, Span, UserAddr, UserRange,
};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{SimMemory, SimPin, SimPinError, SimPinner, SimSpace};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use lock_api::{GuardSend, RawMutex};
use parking_lot::Mutex;

use crate::common::{PROT, as_inner, faulty_domain, range, walker};

thread_local! {
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// A lock that knows whether this thread has one.
pub(crate) struct Known(parking_lot::RawMutex);

// SAFETY: it is the lock within.
unsafe impl RawMutex for Known {
    const INIT: Self = Self(parking_lot::RawMutex::INIT);

    type GuardMarker = GuardSend;

    fn lock(&self) {
        assert_eq!(HELD.get(), 0, "this thread would wait for itself");
        self.0.lock();
        HELD.set(1);
    }

    fn try_lock(&self) -> bool {
        let locked = self.0.try_lock();
        HELD.set(HELD.get() + u32::from(locked));
        locked
    }

    unsafe fn unlock(&self) {
        HELD.set(HELD.get() - 1);
        // SAFETY: the caller has it.
        unsafe { self.0.unlock() };
    }
}

type Locked = Container<SimPinner, Known>;
type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
type Hook = Mutex<Option<Box<dyn FnOnce() + Send>>>;

/// Hardware that is waited for without the lock, and that does something meanwhile.
struct Unlocked {
    iotlb: Tlb,
    meanwhile: Arc<Hook>,
}

// SAFETY: all is done by the simulated hardware.
unsafe impl IommuOps for Unlocked {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        assert_eq!(HELD.get(), 0, "hardware is waited for with the container's lock held");
        let meanwhile = self.meanwhile.lock().take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        self.iotlb.invalidate(what)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.iotlb.detach()
    }

    fn max_ranges(&self) -> usize {
        self.iotlb.max_ranges()
    }
}

struct World {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    account: Arc<Account>,
    container: Arc<Locked>,
    tables: Vec<Arena>,
    iotlbs: Vec<Tlb>,
    meanwhile: Arc<Hook>,
    user: UserRange,
}

const PIECE: u64 = 64 << 10;
const STRIDE: u64 = 2 << 20;

impl World {
    fn new(domains: usize, mappings: u64) -> Self {
        let base = PhysAddr::new(1 << 40);
        let memory = Arc::new(SimMemory::new(base, (mappings + 1) * PIECE, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let frames = memory.allocate(mappings * PIECE, 16).unwrap();
        let user = space.map(UserAddr::new(1 << 46), &[frames]).unwrap();
        let account = Account::new(u64::MAX);
        let pinner = SimPinner::new(Arc::clone(&memory));
        let container = Arc::new(Locked::of_batch(pinner, Arc::clone(&account)));
        let meanwhile = Arc::new(Hook::default());
        let (mut tables, mut iotlbs) = (Vec::new(), Vec::new());
        for _ in 0..domains {
            let arena = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
            let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
            let table = PageTable::new(format, arena.clone()).unwrap();
            let iotlb = Iotlb::new(walker(&table), arena.clone());
            let ops = Unlocked { iotlb: iotlb.clone(), meanwhile: Arc::clone(&meanwhile) };
            let domain = Domain::new(table, ops).unwrap();
            container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
            tables.push(arena);
            iotlbs.push(iotlb);
        }
        Self { memory, space, account, container, tables, iotlbs, meanwhile, user }
    }

    fn user(&self, n: u64) -> UserRange {
        UserRange::from_len(self.user.start().wrapping_add(n * PIECE), PIECE).unwrap()
    }

    fn map(&self, count: u64) -> IovaRange {
        for n in 0..count {
            let iova = Iova::new(n * STRIDE);
            self.container.map(&self.space, self.user(n), iova, PROT).unwrap();
            for iotlb in &self.iotlbs {
                iotlb.translate(iova, Access::Write).unwrap();
            }
        }
        range(0, count * STRIDE)
    }

    fn invalidations(&self) -> Vec<u64> {
        let all = |iotlb: &Tlb| {
            let counters = iotlb.counters();
            counters.invalidations_by_range + counters.invalidations_of_all
        };
        self.iotlbs.iter().map(all).collect()
    }

    fn assert_empty(&self) {
        assert_eq!(self.container.mappings(), 0);
        assert_eq!((self.memory.pinned_frames(), self.account.used()), (0, 0));
        assert!(self.tables.iter().all(|tables| tables.tables() == 1), "only roots");
        let all = range(0, 1 << 48);
        for iotlb in &self.iotlbs {
            assert_eq!((iotlb.stale_leaves(all).len(), iotlb.stale_links(all).len()), (0, 0));
        }
        assert_eq!(self.memory.violations(), []);
    }
}

#[test]
fn mappings_that_have_a_table_each_are_unmapped_by_one_sync_for_64_of_them() {
    for domains in 1..4 {
        let world = World::new(domains, 513);
        let all = world.map(513);
        assert_eq!(world.tables[0].tables(), 1 + 1 + 2 + 513, "a table for each mapping");
        let before = world.invalidations();
        assert_eq!(world.container.unmap(all).unwrap(), 513 * PIECE);
        let after = world.invalidations();
        let made: Vec<u64> =
            after.iter().zip(&before).map(|(after, before)| after - before).collect();
        assert_eq!(made, vec![9; domains], "one for each batch of 64 mappings, or of the last");
        world.assert_empty();
    }
}

#[test]
fn a_batch_has_as_many_mappings_as_it_has_room_for_pieces_though_their_memory_is_one() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 32 << 12, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let frames = memory.allocate(32 << 12, 12).unwrap();
    let user = space.map(UserAddr::new(1 << 46), &[frames]).unwrap();
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let container = Container::<_, parking_lot::RawMutex, 4>::of_batch(
        SimPinner::new(Arc::clone(&memory)),
        Account::new(u64::MAX),
    );
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    for n in 0..32 {
        let page = UserRange::from_len(user.start().wrapping_add(n << 12), 1 << 12).unwrap();
        container.map(&space, page, Iova::new(n << 12), PROT).unwrap();
    }
    let before = iotlb.counters().invalidations_by_range;
    assert_eq!(container.unmap(range(0, 32 << 12)).unwrap(), 32 << 12);
    assert_eq!(iotlb.counters().invalidations_by_range - before, 8);
    assert_eq!((memory.pinned_frames(), memory.violations()), (0, vec![]));
}

#[test]
fn batches_of_short_mappings_and_of_long_ones_follow_each_other_in_any_order() {
    const PAGES: u64 = 4096;
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), PAGES << 12, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let frames = memory.allocate_scattered(PAGES << 12, 3).unwrap();
    let user = space.map(UserAddr::new(1 << 46), &frames).unwrap();
    let lens = |runs: &[(u64, u64)]| -> Vec<u64> {
        runs.iter().flat_map(|(count, len)| (0..*count).map(|_| *len)).collect()
    };
    for lens in [
        lens(&[(64, 1), (1, 250), (3, 100)]),
        lens(&[(63, 1), (1, 1000), (70, 2), (1, 300)]),
        lens(&[(1, 700), (130, 1), (2, 257)]),
    ] {
        let (domain, tables, iotlb) = faulty_domain::<12>(&Faults::none());
        let account = Account::new(u64::MAX);
        let pinner = SimPinner::new(Arc::clone(&memory));
        let container: Container<_, parking_lot::RawMutex> =
            Container::with_domain(pinner, domain, Arc::clone(&account));
        let mut at = 0;
        for len in &lens {
            let part = user.start().wrapping_add(at << 12);
            let part = UserRange::from_len(part, len << 12).unwrap();
            container.map(&space, part, Iova::new(at << 12), PROT).unwrap();
            iotlb.translate(Iova::new(at << 12), Access::Write).unwrap();
            at += len;
        }
        assert_eq!(container.unmap_all().unwrap(), at << 12, "{lens:?}");
        assert_eq!((container.mappings(), tables.tables(), account.used()), (0, 1, 0));
        assert_eq!((memory.pinned_frames(), memory.violations()), (0, vec![]));
        let all = range(0, 1 << 48);
        assert_eq!((iotlb.stale_leaves(all), iotlb.stale_links(all)), (vec![], vec![]));
    }
}

#[test]
fn a_domain_goes_with_whole_batches_of_mappings_and_with_others() {
    for count in [1, 63, 64, 65, 128, 129] {
        let world = World::new(1, count);
        world.map(count);
        let ids = world.container.info().domains;
        ids.into_iter().for_each(|id| world.container.detach(id).unwrap());
        assert_eq!(world.container.info().domains, [], "{count}");
        assert_eq!((world.container.mappings(), world.account.used()), (0, 0));
        assert_eq!((world.memory.pinned_frames(), world.memory.violations()), (0, vec![]));
    }
}

#[test]
fn tables_between_mappings_of_one_unmap_go_with_them() {
    // Two mappings in each table, and one that stays.
    let world = World::new(2, 512);
    for n in 0..256u64 {
        let iova = Iova::new(n / 2 * STRIDE + n % 2 * (STRIDE / 2));
        world.container.map(&world.space, world.user(n), iova, PROT).unwrap();
    }
    let last = range(127 * STRIDE + STRIDE / 2, PIECE);
    assert_eq!(world.container.unmap(range(0, 127 * STRIDE + PIECE)).unwrap(), 255 * PIECE);
    assert!(world.tables.iter().all(|tables| tables.tables() == 4), "those of one mapping");
    assert_eq!(world.container.unmap(last).unwrap(), PIECE);
    world.assert_empty();
}

#[test]
fn what_is_mapped_where_tables_go_is_reached_although_their_sync_is_not_over() {
    for domains in 1..3 {
        let world = World::new(domains, 4);
        world.map(1);
        // Below other tables of the same top-level table, beside what is unmapped.
        let at = [Iova::new(PIECE), Iova::new(5 * STRIDE), Iova::new(2 * PIECE)];
        let (space, users) = (Arc::clone(&world.space), [1, 2, 3].map(|n| world.user(n)));
        let (container, iotlbs) = (Arc::clone(&world.container), world.iotlbs.clone());
        *world.meanwhile.lock() = Some(Box::new(move || {
            for (at, user) in at.into_iter().zip(users) {
                container.map(&space, user, at, PROT).unwrap();
                for iotlb in &iotlbs {
                    let hit = iotlb.translate(at, Access::Write);
                    assert!(hit.is_ok(), "{at} is mapped, and hardware walks what was there");
                }
            }
        }));
        assert_eq!(world.container.unmap(range(0, PIECE)).unwrap(), PIECE);
        assert!(world.meanwhile.lock().is_none(), "it was done in the middle of the unmap");
        for iotlb in &world.iotlbs {
            at.iter().for_each(|at| assert!(iotlb.translate(*at, Access::Write).is_ok()));
        }
        assert_eq!(world.container.unmap_all().unwrap(), 3 * PIECE);
        world.assert_empty();
    }
}

/// A space that is not dropped with the container's lock held.
#[derive(Clone)]
struct Apart(Arc<SimSpace>);

impl Drop for Apart {
    fn drop(&mut self) {
        assert_eq!(HELD.get(), 0, "what it does may need the lock");
    }
}

struct OfApart(SimPinner);

// SAFETY: pins and spans are the inner pinner's.
unsafe impl Pinner for OfApart {
    type Address = PhysAddr;
    type Space = Apart;
    type Pin = SimPin;
    type Error = SimPinError;

    fn pin(
        &self,
        space: &Apart,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<SimPin, PinFailed<SimPin, SimPinError>> {
        self.0.pin(&space.0, range, prot, sink)
    }

    fn space_id(&self, space: &Apart) -> u64 {
        self.0.space_id(&space.0)
    }

    fn read(&self, space: &Apart, at: UserAddr, bytes: &mut [u8]) -> Result<(), SimPinError> {
        self.0.read(&space.0, at, bytes)
    }

    fn write(&self, space: &Apart, at: UserAddr, bytes: &[u8]) -> Result<(), SimPinError> {
        self.0.write(&space.0, at, bytes)
    }

    as_inner!(0: unpin release errno);
}

#[test]
fn spaces_are_dropped_behind_the_lock_whether_one_mapping_goes_or_many() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 32 << 12, 12).unwrap());
    let space = Apart(Arc::new(SimSpace::new(Arc::clone(&memory))));
    let frames = memory.allocate(32 << 12, 12).unwrap();
    let user = space.0.map(UserAddr::new(1 << 46), &[frames]).unwrap();
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let container = Container::<_, Known, 16>::of_batch(
        OfApart(SimPinner::new(Arc::clone(&memory))),
        Account::new(u64::MAX),
    );
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    let map = || {
        for n in 0..32 {
            let page = UserRange::from_len(user.start().wrapping_add(n << 12), 1 << 12).unwrap();
            container.map(&space, page, Iova::new(n << 12), PROT).unwrap();
        }
    };
    map();
    assert_eq!(container.unmap(range(0, 1 << 12)).unwrap(), 1 << 12);
    assert_eq!(container.unmap_all().unwrap(), 31 << 12);
    map();
    // Out of quarantine, too.
    iotlb.fail_next_invalidations(2);
    assert!(container.unmap_all().is_err());
    assert_eq!(container.unmap(range(0, 1 << 20)).unwrap(), 32 << 12);
    assert_eq!((memory.pinned_frames(), memory.violations()), (0, vec![]));
}
