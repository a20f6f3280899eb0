//! Mappings that are unmapped alone, as most are: by threads that meet on them, and where what they
//! call panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;

use dmaspan::container::{Attach, DirtyRead, Error, Interrupts, MapRequest};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, Event, Observed, Observer};
use dmaspan::pin::Kind;
use dmaspan::{Account, Container, Iova, IovaRange, PhysAddr, UserAddr, UserRange};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{SimMemory, SimPinError, SimPinner, SimSpace};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;

use crate::common::{PROT, faulty_domain, range, walker};
use crate::hooked::{Hooked, Owner, size};
use crate::interrupted::HANGS;
use crate::stress::{Sleeping, Waits};

const PAGE: u64 = 1 << 12;
const USER: u64 = 0x7f00_0000_0000;

/// Panics at an event, the first being 1; 0 for never.
#[derive(Clone, Default)]
struct Bomb(Arc<AtomicU64>);

impl Observer for Bomb {
    fn event(&self, _event: &Event<'_>) {
        let left = self.0.load(Ordering::Relaxed);
        self.0.store(left.saturating_sub(1), Ordering::Relaxed);
        assert_ne!(left, 1, "at this event");
    }
}

/// Keeps what it hears of unmaps.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<IovaRange>>>);

impl Observer for Heard {
    fn event(&self, event: &Event<'_>) {
        if let Event::Unmapping { range, .. } = event {
            self.0.lock().push(*range);
        }
    }
}

/// With room in quarantine for 512 pages.
type Small = Container<Hooked, parking_lot::RawMutex, 64>;
type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;

type Watched<const LG2: u32, O> = Domain<ArmLpaeS1<LG2>, Arena, Observed<Tlb, O>>;

/// A domain with such a granule, which this observes.
fn watched<const LG2: u32, O: Observer + 'static>(observer: O) -> (Watched<LG2, O>, Tlb) {
    let memory = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
    let sizes = ArmLpaeS1::<LG2>::PAGE_SIZES | ArmLpaeS1::<LG2>::CONTIGUOUS_SIZES;
    let config = ArmLpaeS1Config { page_sizes: Some(sizes), ..ArmLpaeS1Config::new(48, 48) };
    let table = PageTable::new(ArmLpaeS1::<LG2>::new(config).unwrap(), memory.clone()).unwrap();
    let iotlb = Iotlb::new(walker(&table), memory);
    (Domain::new(table, Observed::new(iotlb.clone(), observer)).unwrap(), iotlb)
}

/// A container whose domain this observes.
fn observed_by(owner: &Owner, observer: impl Observer + 'static) -> (Small, Tlb) {
    let (domain, iotlb) = watched::<12, _>(observer);
    let container = Small::of_batch(owner.pinner(), Arc::clone(&owner.account));
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    (container, iotlb)
}

/// A container whose domain a bomb observes.
fn observed(owner: &Owner) -> (Small, Bomb, Tlb) {
    let bomb = Bomb::default();
    let (container, iotlb) = observed_by(owner, bomb.clone());
    (container, bomb, iotlb)
}

/// More than there is room in quarantine for, if each lost its room.
const OFTEN: u64 = 600;

/// Maps and unmaps pages, which panics each time, and then one for which nothing panics.
fn panics_often(owner: &Owner, tlb: &Tlb, container: &Small, once: impl Fn(u64)) {
    for n in 0..OFTEN {
        assert!(catch_unwind(AssertUnwindSafe(|| once(n))).is_err(), "{n}");
        assert!(owner.account.used() >= owner.memory.pinned_frames() * PAGE, "{n}");
        let reached = |iova| tlb.translate(iova, Access::Write).ok().map(|hit| hit.paddr);
        if let Some(paddr) = reached(Iova::new(n * PAGE)) {
            assert_eq!(owner.memory.pins(paddr), Some(1), "{n}");
        }
    }
    let (at, used) = (Iova::new(OFTEN * PAGE), owner.account.used());
    container.map(&owner.space, owner.pages(OFTEN, 1), at, PROT).unwrap();
    assert_eq!(container.unmap(range(OFTEN * PAGE, PAGE)).unwrap(), PAGE);
    assert_eq!((owner.account.used(), owner.memory.violations()), (used, vec![]));
}

fn map_one(owner: &Owner, container: &Small, n: u64) {
    container.map(&owner.space, owner.pages(n, 1), Iova::new(n * PAGE), PROT).unwrap();
}

#[test]
fn observers_hear_of_each_mapping_that_is_unmapped_once_whether_alone_or_with_others() {
    const MANY: u64 = 150;
    let (owner, heard) = (Owner::new(2 * MANY), Heard::default());
    let (container, _) = observed_by(&owner, heard.clone());
    (0..MANY).for_each(|n| map_one(&owner, &container, n));
    // Of more than two batches.
    let large = range(MANY * PAGE, MANY * PAGE);
    container.map(&owner.space, owner.pages(MANY, MANY), large.start(), PROT).unwrap();
    container.unmap(range(0, PAGE)).unwrap();
    assert_eq!(*heard.0.lock(), [range(0, PAGE)]);
    // Alone, and with a log.
    container.start_dirty().unwrap();
    container.unmap(range(PAGE, PAGE)).unwrap();
    assert_eq!(*heard.0.lock(), [range(0, PAGE), range(PAGE, PAGE)]);
    container.unmap_all().unwrap();
    let small = (0..MANY).map(|n| range(n * PAGE, PAGE));
    assert_eq!(*heard.0.lock(), small.chain([large]).collect::<Vec<_>>());
    owner.assert_untouched();
}

#[test]
fn observers_hear_once_of_a_mapping_that_has_more_spans_than_pages_of_all_domains() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 8 << 20, 14).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let spans = memory.allocate_scattered(2 << 20, 3).unwrap();
    let user = space.map(UserAddr::new(1 << 46), &spans).unwrap();
    let pinner = SimPinner::new(Arc::clone(&memory));
    let container: Container<_, parking_lot::RawMutex> =
        Container::new(pinner, Account::new(u64::MAX));
    let heard = Heard::default();
    let (small, _) = watched::<12, _>(heard.clone());
    let (large, _) = watched::<14, _>(Bomb::default());
    container.attach(small, Attach::new(Interrupts::Isolated)).unwrap();
    container.attach(large, Attach::new(Interrupts::Isolated)).unwrap();
    let all = range(2 << 20, 2 << 20);
    container.map(&space, user, all.start(), PROT).unwrap();
    assert_eq!(container.unmap(all).unwrap(), 2 << 20);
    assert_eq!(*heard.0.lock(), [all]);
    assert_eq!((memory.pinned_frames(), memory.violations()), (0, vec![]));
}

#[test]
fn room_comes_back_from_each_unmap_and_domains_change_behind_it() {
    let owner = Owner::new(1);
    let (container, _) = observed_by(&owner, Heard::default());
    for _ in 0..3 * OFTEN {
        map_one(&owner, &container, 0);
        assert_eq!(container.unmap(range(0, PAGE)).unwrap(), PAGE);
    }
    assert_eq!(*container.pinner().released.lock(), 3 * OFTEN);
    container.info().domains.into_iter().for_each(|id| container.detach(id).unwrap());
    owner.assert_untouched();
}

#[test]
fn an_unmap_that_an_observer_panics_in_keeps_the_pin_and_its_charge_and_loses_no_room() {
    for event in 1..=2 {
        let owner = Owner::new(OFTEN + 1);
        let (container, bomb, tlb) = observed(&owner);
        panics_often(&owner, &tlb, &container, |n| {
            map_one(&owner, &container, n);
            tlb.translate(Iova::new(n * PAGE), Access::Write).unwrap();
            bomb.0.store(event, Ordering::Relaxed);
            container.unmap(range(n * PAGE, PAGE)).unwrap();
        });
        let pinned = owner.memory.pinned_frames();
        assert_eq!((pinned, owner.account.used()), (OFTEN, OFTEN * PAGE));
    }
}

#[test]
fn an_unmap_that_a_pinner_panics_in_keeps_the_pin_and_its_charge_and_loses_no_room() {
    // With a log it goes by batches.
    for tracked in [false, true] {
        let owner = Owner::new(OFTEN + 1);
        let (container, _, tlb) = observed(&owner);
        if tracked {
            container.start_dirty().unwrap();
        }
        panics_often(&owner, &tlb, &container, |n| {
            map_one(&owner, &container, n);
            *container.pinner().on_unpin.lock() = Some(Box::new(|| panic!("while it unpins")));
            container.unmap(range(n * PAGE, PAGE)).unwrap();
        });
        assert_eq!((owner.memory.pinned_frames(), owner.account.used()), (OFTEN, OFTEN * PAGE));
    }
}

#[test]
fn a_map_that_panics_loses_no_room_for_what_hardware_does_not_confirm() {
    // A caller that is asked whether it still wants the map, an observer, and a pinner.
    for place in 0..4 {
        let owner = Owner::new(OFTEN + 1);
        let (container, bomb, tlb) = observed(&owner);
        panics_often(&owner, &tlb, &container, |n| {
            let cancelled = || panic!("when it is asked");
            let at = Iova::new(n * PAGE);
            let request = MapRequest::new(&owner.space, owner.pages(n, 1), at, PROT);
            match place {
                0 => container.map_request(&request.cancelled_by(&cancelled)).unwrap(),
                1 => {
                    *container.pinner().on_pin.lock() = Some(Box::new(|| panic!("while it pins")));
                    container.map_request(&request).unwrap()
                }
                event => {
                    bomb.0.store(event - 1, Ordering::Relaxed);
                    container.map_request(&request).unwrap()
                }
            };
        });
    }
}

#[test]
fn a_revocation_that_a_pinner_panics_in_loses_no_room() {
    let owner = Owner::new(OFTEN + 1);
    let mut pinner = owner.pinner();
    pinner.odd = Kind::Mmio;
    let container = Small::of_batch(pinner, Arc::clone(&owner.account));
    let (domain, ..) = faulty_domain::<12>(&Faults::none());
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    let odd = |n: &u64| owner.frames[size(*n)].get() / PAGE % 2 == 1;
    for n in (0..OFTEN).filter(odd) {
        map_one(&owner, &container, n);
        *container.pinner().on_unpin.lock() = Some(Box::new(|| panic!("while it unpins")));
        let revoke = || container.revoke(&owner.space, owner.pages(n, 1));
        assert!(catch_unwind(AssertUnwindSafe(revoke)).is_err(), "{n}");
    }
    map_one(&owner, &container, OFTEN);
    assert_eq!(container.unmap(range(OFTEN * PAGE, PAGE)).unwrap(), PAGE);
}

/// Mappings of the threads, neighbours in few tables: of a page or two.
const SLOTS: u64 = 24;
const THREADS: u64 = 4;
const STEPS: u32 = 2000;

type Met = Container<SimPinner, parking_lot::RawMutex>;

struct World {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    account: Arc<Account>,
    tlbs: [Tlb; 2],
    container: Met,
}

fn first_page(slot: u64) -> u64 {
    // Every third one is alone in its table.
    2 * slot + slot / 3 * 512
}

fn pages_of(slot: u64) -> u64 {
    1 + slot % 2
}

impl World {
    fn new(waits: Waits) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 1024 * PAGE, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let frames = memory.allocate_scattered(2 * SLOTS * PAGE, 7).unwrap();
        space.map(UserAddr::new(USER), &frames).unwrap();
        let account = Account::new(u64::MAX);
        let pinner = SimPinner::new(Arc::clone(&memory));
        let mut container = Met::new(pinner, Arc::clone(&account));
        if waits == Waits::ByHook {
            container = container.with_busy_hook(Box::new(Sleeping::default()));
        }
        let tlbs = [0, 1].map(|_| {
            let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
            container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
            iotlb
        });
        Self { memory, space, account, tlbs, container }
    }

    /// A device that writes reaches pinned memory or none.
    fn access(&self, iova: Iova) {
        for tlb in &self.tlbs {
            let pins = tlb.with_translation(iova, Access::Write, |hit| self.memory.pins(hit.paddr));
            assert!(pins.is_err() || pins == Ok(Some(1)), "{iova}: {pins:?}");
        }
    }

    fn step(&self, random: u64) -> Result<(), Error<SimPinError>> {
        let Self { space, container, tlbs, .. } = self;
        let slot = random / 32 % SLOTS;
        let iovas = range(first_page(slot) * PAGE, pages_of(slot) * PAGE);
        match random % 32 {
            0..=11 => {
                let at = UserAddr::new(USER + 2 * slot * PAGE);
                let user = UserRange::from_len(at, iovas.len_less_one() + 1).unwrap();
                container.map(space, user, iovas.start(), PROT).map(|_| ())
            }
            12..=21 => container.unmap(iovas).map(|_| ()),
            22..=27 => {
                self.access(iovas.start());
                Ok(())
            }
            28 => {
                tlbs[size(random / 1024 % 2)].fail_next_invalidations(random / 2048 % 3);
                Ok(())
            }
            29 => {
                let (domain, ..) = faulty_domain::<12>(&Faults::none());
                let id = container.attach(domain, Attach::new(Interrupts::Isolated))?;
                while let Err(Error::Changing) = container.detach(id) {
                    thread::yield_now();
                }
                Ok(())
            }
            30 if (random / 1024).is_multiple_of(2) => container.start_dirty(),
            30 => container.stop_dirty(),
            _ => container.dirty_bitmap(iovas, PAGE, &mut [0; 2], DirtyRead::Clear),
        }
    }

    /// What holds when nobody is at work.
    fn check(&self) {
        assert_eq!(self.memory.violations(), []);
        assert_eq!(self.account.used(), self.memory.pinned_frames() * PAGE);
        for slot in 0..SLOTS {
            self.access(Iova::new(first_page(slot) * PAGE));
        }
    }
}

fn meet(waits: Waits) {
    let world = World::new(waits);
    for round in 0..3 {
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let world = &world;
                scope.spawn(move || {
                    let seed = round * THREADS + thread + 1;
                    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
                    for _ in 0..STEPS {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        // What others have mapped there, or hardware does not forget, is refused.
                        let refused = world.step(random >> 8).err();
                        let is_busy = matches!(refused, Some(Error::Busy { .. } | Error::Changing));
                        assert!(waits == Waits::Never || !is_busy, "{refused:?}");
                    }
                });
            }
        });
        world.check();
    }
    world.tlbs.iter().for_each(|tlb| tlb.fail_next_invalidations(0));
    world.container.unmap_all().unwrap();
    world.check();
    assert_eq!((world.memory.pinned_frames(), world.container.mappings()), (0, 0));
    // Nobody is said to be at work still.
    let domains = world.container.info().domains;
    domains.into_iter().for_each(|id| world.container.detach(id).unwrap());
}

#[test]
fn threads_that_map_and_unmap_the_same_few_pages_let_no_device_reach_what_is_not_pinned() {
    let (ended, wait) = channel();
    let test = thread::spawn(move || {
        [Waits::Never, Waits::ByHook].into_iter().for_each(meet);
        ended.send(()).unwrap();
    });
    let is_hung = wait.recv_timeout(HANGS) == Err(RecvTimeoutError::Timeout);
    assert!(!is_hung, "threads wait for each other");
    test.join().unwrap();
}
