//! Tables that were detached, into which hardware still walks, and what stays mapped at last.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use dmaspan::container::{Attach, BusyHook, DirtyRead, Error, GaveUp, Interrupts, MapRequest};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, Event, HardwareError, Invalidation, IommuOps};
use dmaspan::{Account, Container, Iova, IovaRange, PhysAddr, Span, UserAddr, UserRange};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{MapOptions, SimMemory, SimPinner, SimSpace};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;

use crate::common::{PROT, faulty_domain, walker};
use crate::emulated::{Model, PAGE, pages};
use crate::hooked::{Hooking, Owner};
use crate::interrupted::HANGS;
use crate::stress::Sleeping;

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
type Hook = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// A simulated IOMMU that has something done before it invalidates, or hears of a map, the next
/// time.
struct Meanwhile(Tlb, Hook);

impl Meanwhile {
    fn fire(&self) {
        let hook = self.1.lock().take();
        if let Some(hook) = hook {
            hook();
        }
    }
}

// SAFETY: all is done by the simulated IOMMU, after what is no part of it.
unsafe impl IommuOps for Meanwhile {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.fire();
        self.0.invalidate(what)
    }

    fn observe(&self, event: &Event<'_>) {
        if let Event::Mapping { .. } = event {
            self.fire();
        }
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.0.sync_map(range)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.0.detach()
    }

    fn max_ranges(&self) -> usize {
        self.0.max_ranges()
    }
}

/// A container with a domain of such an IOMMU.
fn meanwhile(owner: &Owner) -> (Arc<Hooking>, Tlb, Hook) {
    with_meanwhile(owner.container())
}

/// This container with such a domain.
fn with_meanwhile(container: Hooking) -> (Arc<Hooking>, Tlb, Hook) {
    let (domain, iotlb, hook) = domain();
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    (Arc::new(container), iotlb, hook)
}

/// Such a domain.
fn domain() -> (Domain<ArmLpaeS1<12>, Arena, Meanwhile>, Tlb, Hook) {
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, tables.clone()).unwrap();
    let (iotlb, hook) = (Iotlb::new(walker(&table), tables), Hook::default());
    let domain = Domain::new(table, Meanwhile(iotlb.clone(), Arc::clone(&hook))).unwrap();
    (domain, iotlb, hook)
}

fn reached(iotlb: &Tlb, page: u64) -> Option<PhysAddr> {
    iotlb.translate(Iova::new(page * PAGE), Access::Write).ok().map(|hit| hit.paddr)
}

/// The mappings of an unmap are of 2 pages from page 100 on, with or without holes between them.
#[test]
fn what_is_mapped_around_an_unmap_that_is_not_synced_yet_is_reached() {
    for (count, step) in [(1, 2), (2, 2), (3, 2), (2, 4), (3, 4)] {
        let end = 100 + (count - 1) * step + 2;
        let inside = (step == 4).then_some(102);
        for at in [40, 98, end, 300].into_iter().chain(inside) {
            let owner = Owner::new(16);
            let (container, iotlb, hook) = meanwhile(&owner);
            for n in 0..count {
                let iova = Iova::new((100 + n * step) * PAGE);
                container.map(&owner.space, owner.pages(2 * n, 2), iova, PROT).unwrap();
                assert!(reached(&iotlb, 100 + n * step).is_some());
            }
            let (inner, tlb) = (Arc::clone(&container), iotlb.clone());
            let (space, user) = (Arc::clone(&owner.space), owner.pages(10, 2));
            let frame = owner.frames[10];
            *hook.lock() = Some(Box::new(move || {
                inner.map(&space, user, Iova::new(at * PAGE), PROT).unwrap();
                assert_eq!(reached(&tlb, at), Some(frame), "{at} beside {count} by {step}");
            }));
            assert_eq!(container.unmap(pages(100, end - 100)).unwrap(), 2 * count * PAGE);
            assert!(hook.lock().is_none());
            assert_eq!(reached(&iotlb, at), Some(frame));
            assert_eq!(container.unmap(pages(at, 2)).unwrap(), 2 * PAGE);
            // Tables that are new by now.
            container.map(&owner.space, owner.pages(4, 8), Iova::new(100 * PAGE), PROT).unwrap();
            assert_eq!(reached(&iotlb, 107), Some(owner.frames[11]));
            assert_eq!(iotlb.stale_links(IovaRange::ALL), []);
            drop(container);
            owner.assert_untouched();
        }
    }
}

#[test]
fn a_map_to_where_hardware_may_walk_detached_tables_fails_while_it_does_not_forget_them() {
    let owner = Owner::new(16);
    let (container, iotlb, hook) = meanwhile(&owner);
    container.map(&owner.space, owner.pages(0, 2), Iova::new(100 * PAGE), PROT).unwrap();
    assert!(reached(&iotlb, 100).is_some());
    let (inner, tlb) = (Arc::clone(&container), iotlb.clone());
    let (space, user) = (Arc::clone(&owner.space), owner.pages(10, 2));
    *hook.lock() = Some(Box::new(move || {
        tlb.fail_next_invalidations(1);
        let error = inner.map(&space, user, Iova::new(104 * PAGE), PROT).unwrap_err();
        assert!(matches!(error, Error::Map { user: at, .. } if at == user.start()), "{error}");
    }));
    assert_eq!(container.unmap(pages(100, 2)).unwrap(), 2 * PAGE);
    assert!(hook.lock().is_none());
    assert_eq!(container.mappings(), 0);
    // Hardware is asked for them again, once.
    for asked in [2, 1] {
        let before = iotlb.counters().invalidations_of_tables;
        container.map(&owner.space, owner.pages(0, 2), Iova::new(300 * PAGE), PROT).unwrap();
        assert_eq!(container.unmap(pages(300, 2)).unwrap(), 2 * PAGE);
        assert_eq!(iotlb.counters().invalidations_of_tables - before, asked);
    }
    owner.assert_untouched();
}

#[test]
fn the_last_of_the_unmaps_of_neighbours_that_meet_takes_their_table_with_it() {
    for count in 1..4 {
        let owner = Owner::new(16);
        let (container, iotlb, hook) = meanwhile(&owner);
        for n in 0..=count {
            let iova = Iova::new((100 + 4 * n) * PAGE);
            container.map(&owner.space, owner.pages(2 * n, 2), iova, PROT).unwrap();
            assert!(reached(&iotlb, 100 + 4 * n).is_some());
        }
        let (inner, last) = (Arc::clone(&container), pages(100 + 4 * count, 2));
        *hook.lock() = Some(Box::new(move || assert_eq!(inner.unmap(last).unwrap(), 2 * PAGE)));
        assert_eq!(container.unmap(pages(100, 4 * count)).unwrap(), 2 * count * PAGE);
        assert_eq!((container.mappings(), iotlb.tables().tables()), (0, 1), "with {count}");
        assert_eq!(iotlb.stale_links(IovaRange::ALL), []);
        owner.assert_untouched();
    }
}

#[test]
fn tables_on_both_sides_of_what_hardware_did_not_forget_go() {
    let owner = Owner::new(16);
    let (domain, tables, iotlb) = faulty_domain::<12>(&Faults::none());
    let container = Hooking::with_domain(owner.pinner(), domain, Arc::clone(&owner.account));
    // Each has a table.
    let place = |n: u64| pages(512 * n, 2);
    for n in 0..5 {
        container.map(&owner.space, owner.pages(2 * n, 2), place(n).start(), PROT).unwrap();
    }
    assert_eq!(tables.tables(), 3 + 5);
    iotlb.fail_next_invalidations(1);
    assert!(container.unmap(place(2)).is_err());
    // Not now, either.
    iotlb.fail_next_invalidations(1);
    assert!(matches!(container.unmap_all(), Err(Error::NotForgotten { .. })));
    assert_eq!(container.unmap_all().unwrap(), 2 * PAGE);
    assert_eq!(tables.tables(), 3, "those of more than one mapping are left");
    owner.assert_untouched();
}

#[test]
fn unmaps_that_meet_in_a_range_take_each_its_own_mappings() {
    let owner = Owner::new(16);
    let (container, _, hook) = meanwhile(&owner);
    let (space, user) = (Arc::clone(&owner.space), owner.pages(0, 1));
    let map = move |container: &Hooking, page: u64| {
        container.map(&space, user, Iova::new(page * PAGE), PROT).unwrap();
    };
    // More than a batch, which leaves room behind it.
    (0..64).chain(200..203).for_each(|page| map(&container, page));
    let ((began, has_begun), (go, may_go)) = (channel(), channel());
    let (ended, end) = channel();
    let (inner, next) = (Arc::clone(&container), Arc::clone(&hook));
    *hook.lock() = Some(Box::new(move || {
        (100..170).for_each(|page| map(&inner, page));
        *next.lock() = Some(Box::new(move || {
            began.send(()).unwrap();
            may_go.recv().unwrap();
        }));
        thread::spawn(move || ended.send(inner.unmap(pages(100, 70)).unwrap()).unwrap());
        has_begun.recv().unwrap();
    }));
    assert_eq!(container.unmap(pages(0, 300)).unwrap(), 67 * PAGE);
    go.send(()).unwrap();
    assert_eq!(end.recv(), Ok(70 * PAGE));
    assert_eq!(container.mappings(), 0);
    owner.assert_untouched();
}

/// Says when somebody waits first.
struct Said(Sleeping, Mutex<Option<Sender<()>>>);

impl BusyHook for Said {
    fn wait(&self, ready: &dyn Fn() -> bool) -> Result<(), GaveUp> {
        if let Some(waits) = self.1.lock().take() {
            waits.send(()).unwrap();
        }
        self.0.wait(ready)
    }

    fn wake(&self) {
        self.0.wake();
    }
}

#[test]
fn the_end_of_an_unmap_wakes_who_waits_for_its_place() {
    for count in 1..3 {
        let owner = Owner::new(16);
        let (waits, waiting) = channel();
        let said = Said(Sleeping::default(), Mutex::new(Some(waits)));
        let (container, _, hook) = with_meanwhile(owner.container().with_busy_hook(Box::new(said)));
        for n in 0..count {
            container.map(&owner.space, owner.pages(n, 1), Iova::new(n * PAGE), PROT).unwrap();
        }
        let (ended, end) = channel();
        let (inner, space, user) =
            (Arc::clone(&container), Arc::clone(&owner.space), owner.pages(8, 1));
        *hook.lock() = Some(Box::new(move || {
            thread::spawn(move || {
                let mapped = inner.map(&space, user, Iova::new(0), PROT).is_ok();
                ended.send(mapped).unwrap();
            });
            waiting.recv().unwrap();
        }));
        assert_eq!(container.unmap(pages(0, count)).unwrap(), count * PAGE);
        assert_eq!(end.recv_timeout(HANGS), Ok(true), "{count}");
        assert_eq!(container.unmap_all().unwrap(), PAGE);
    }
}

#[test]
fn the_end_of_a_retry_wakes_who_waits_to_attach() {
    let owner = Owner::new(16);
    let (waits, waiting) = channel();
    let said = Said(Sleeping::default(), Mutex::new(Some(waits)));
    let (container, iotlb, hook) = with_meanwhile(owner.container().with_busy_hook(Box::new(said)));
    container.map(&owner.space, owner.pages(0, 1), Iova::new(0), PROT).unwrap();
    iotlb.fail_next_invalidations(1);
    container.unmap(pages(0, 1)).unwrap_err();
    let (ended, end) = channel();
    let inner = Arc::clone(&container);
    *hook.lock() = Some(Box::new(move || {
        thread::spawn(move || {
            let attached = inner.attach(domain().0, Attach::new(Interrupts::Isolated));
            ended.send(attached.is_ok()).unwrap();
        });
        waiting.recv().unwrap();
    }));
    // It retries, and finds nothing to revoke.
    assert_eq!(container.revoke(&owner.space, owner.pages(8, 1)).unwrap(), 0);
    assert_eq!(end.recv_timeout(HANGS), Ok(true));
}

#[test]
fn what_is_being_mapped_beside_an_unmap_that_hardware_does_not_confirm_is_reached() {
    for (count, at) in [(1, 97), (1, 98), (1, 102), (1, 103), (2, 98), (2, 102), (2, 108)] {
        let owner = Owner::new(16);
        let (container, iotlb, _) = meanwhile(&owner);
        for n in 0..count {
            let iova = Iova::new((100 + 6 * n) * PAGE);
            container.map(&owner.space, owner.pages(2 * n, 2), iova, PROT).unwrap();
            assert!(reached(&iotlb, 100 + 6 * n).is_some());
        }
        let (inner, tlb) = (Arc::clone(&container), iotlb.clone());
        *container.pinner().on_pin.lock() = Some(Box::new(move || {
            tlb.fail_next_invalidations(1);
            for n in 0..count {
                let _ = inner.unmap(pages(100 + 6 * n, 2));
            }
        }));
        container.map(&owner.space, owner.pages(8, 2), Iova::new(at * PAGE), PROT).unwrap();
        assert_eq!(iotlb.counters().invalidations_failed, 1);
        assert_eq!(reached(&iotlb, at), Some(owner.frames[8]), "{at} beside {count}");
        container.unmap_all().unwrap();
        assert_eq!((container.mappings(), iotlb.stale_links(IovaRange::ALL)), (0, vec![]));
        owner.assert_untouched();
    }
}

#[test]
fn an_unmap_says_what_of_its_range_others_left_in_use_meanwhile() {
    let owner = Owner::new(16);
    let (container, iotlb, hook) = meanwhile(&owner);
    container.map(&owner.space, owner.pages(0, 2), Iova::new(100 * PAGE), PROT).unwrap();
    let (inner, tlb) = (Arc::clone(&container), iotlb.clone());
    let (space, user) = (Arc::clone(&owner.space), owner.pages(10, 2));
    *hook.lock() = Some(Box::new(move || {
        inner.map(&space, user, Iova::new(110 * PAGE), PROT).unwrap();
        tlb.fail_next_invalidations(1);
        assert!(matches!(inner.unmap(pages(110, 2)), Err(Error::NotForgotten { .. })));
    }));
    let error = container.unmap(pages(100, 20)).unwrap_err();
    let Error::NotForgotten { range, kept, unmapped, .. } = error else { panic!("{error}") };
    assert_eq!((range, kept, unmapped), (pages(110, 2), 2 * PAGE, 2 * PAGE));
    assert_eq!(container.unmap(pages(100, 20)).unwrap(), 2 * PAGE);
    owner.assert_untouched();
}

#[test]
fn walks_to_tables_that_a_refused_map_detaches_are_noted_while_hardware_does_not_forget_them() {
    let owner = Owner::new(16);
    let (container, iotlb, hook) = meanwhile(&owner);
    container.map(&owner.space, owner.pages(0, 2), Iova::new(100 * PAGE), PROT).unwrap();
    assert!(reached(&iotlb, 100).is_some());
    let (inner, tlb) = (Arc::clone(&container), iotlb.clone());
    *hook.lock() = Some(Box::new(move || {
        // Its table is that of the map, too, which has begun.
        assert_eq!(inner.unmap(pages(100, 2)).unwrap(), 2 * PAGE);
        tlb.fail_next_invalidations(1);
    }));
    let poor = Account::new(0);
    let refused = MapRequest::new(&owner.space, owner.pages(4, 2), Iova::new(104 * PAGE), PROT);
    let error = container.map_request(&refused.owner(&poor)).unwrap_err();
    assert!(matches!(error, Error::OverLimit { .. }), "{error}");
    assert_eq!((iotlb.counters().invalidations_failed, container.mappings()), (1, 0));
    container.map(&owner.space, owner.pages(10, 2), Iova::new(108 * PAGE), PROT).unwrap();
    assert_eq!(reached(&iotlb, 108), Some(owner.frames[10]));
    assert_eq!(container.unmap_all().unwrap(), 2 * PAGE);
    assert_eq!(iotlb.stale_links(IovaRange::ALL), []);
    owner.assert_untouched();
}

/// A container with device memory at page 100 and memory at pages 10000 and 30000, each in a table
/// of its own, which a device has used.
struct Revoked {
    container: Container<SimPinner, parking_lot::RawMutex>,
    space: Arc<SimSpace>,
    memory: Arc<SimMemory>,
    user: UserRange,
    iotlb: Tlb,
}

fn revoked() -> Revoked {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 1 << 20, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let bar = Span::new(PhysAddr::new(1 << 42), 2 * PAGE).unwrap();
    let at = UserAddr::new(1 << 44);
    let device = space.map_device_with(at, bar, MapOptions::default()).unwrap();
    let spans = memory.allocate_scattered(4 * PAGE, 1).unwrap();
    let user = space.map(UserAddr::new(1 << 32), &spans).unwrap();
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(SimPinner::new(Arc::clone(&memory)), domain, Account::new(u64::MAX));
    container.map(&space, device, Iova::new(100 * PAGE), PROT).unwrap();
    container.map(&space, user, Iova::new(10000 * PAGE), PROT).unwrap();
    container.map(&space, user, Iova::new(30000 * PAGE), PROT).unwrap();
    assert!(reached(&iotlb, 100).is_some() && reached(&iotlb, 10000).is_some());
    container.revoke(&space, device).unwrap();
    Revoked { container, space, memory, user, iotlb }
}

#[test]
fn walks_that_hardware_did_not_forget_are_noted_as_long_as_it_does_not_though_no_memory_is() {
    for retries in 0..3 {
        let Revoked { container, space, memory, user, iotlb } = revoked();
        iotlb.fail_next_invalidations(1);
        // Nothing is mapped there any more but tables.
        let _ = container.unmap(pages(100, 2));
        for n in 0..retries {
            iotlb.fail_next_invalidations(1);
            // It tries again what failed, in vain.
            let _ = container.unmap(pages(10000, 4));
            container.map(&space, user, Iova::new((20000 + n) * PAGE), PROT).unwrap();
            iotlb.fail_next_invalidations(1);
            let _ = container.unmap(pages(20000 + n, 4));
        }
        iotlb.fail_next_invalidations(0);
        let asked = iotlb.counters().invalidations_of_tables;
        container.map(&space, user, Iova::new(40000 * PAGE), PROT).unwrap();
        assert_eq!(iotlb.counters().invalidations_of_tables, asked, "it is far away");
        container.map(&space, user, Iova::new(104 * PAGE), PROT).unwrap();
        assert!(reached(&iotlb, 104).is_some(), "after {retries}");
        // Hardware confirms all, and is not asked again.
        assert_eq!(container.unmap(pages(104, 4)).unwrap(), 4 * PAGE);
        let asked = iotlb.counters().invalidations_of_tables;
        container.map(&space, user, Iova::new(104 * PAGE), PROT).unwrap();
        assert_eq!(iotlb.counters().invalidations_of_tables, asked);
        container.unmap_all().unwrap();
        assert_eq!((container.mappings(), memory.pinned_frames()), (0, 0));
        assert_eq!(iotlb.stale_links(IovaRange::ALL), []);
        assert_eq!(memory.violations(), []);
    }
}

#[test]
fn what_stays_mapped_when_its_last_domain_goes_was_written_all_of_it() {
    for (answers, restarts) in [(true, false), (false, false), (false, true)] {
        let owner = Owner::new(16);
        let (_model, container, _) = Model::attach(owner.container());
        let (domain, _, iotlb) = crate::common::marking_domain::<12>(&Faults::none());
        let id = container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
        container.map(&owner.space, owner.pages(0, 4), Iova::new(0), PROT).unwrap();
        container.map(&owner.space, owner.pages(8, 2), Iova::new(8 * PAGE), PROT).unwrap();
        container.start_dirty().unwrap();
        let read = || {
            let mut words = [0];
            container.dirty_bitmap(pages(0, 64), PAGE, &mut words, DirtyRead::Clear).unwrap();
            words[0]
        };
        assert_eq!(read(), 0, "nothing was written");
        if !answers {
            iotlb.fail_next_invalidations(u64::MAX);
        }
        assert_eq!(container.detach(id).is_ok(), answers);
        // No hardware walks any table.
        container.map(&owner.space, owner.pages(12, 2), Iova::new(12 * PAGE), PROT).unwrap();
        assert_eq!(read(), 0x30f, "nobody asked hardware");
        if restarts {
            // It is not known by then what was written before.
            container.stop_dirty().unwrap();
            container.start_dirty().unwrap();
        }
        if !answers {
            iotlb.fail_next_invalidations(0);
            // It waits for hardware, which answers now.
            let _ = container.unmap(pages(32, 1));
            assert_eq!(read(), 0x30f, "devices wrote until now");
        }
        assert_eq!(read(), 0);
        assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
        owner.assert_untouched();
    }
}
