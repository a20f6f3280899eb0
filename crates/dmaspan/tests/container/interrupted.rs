//! Operations that meet in the middle of each other, pinners that say what is not so, and callers
//! that panic.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use dmaspan::container::{
    Attach, DirtyRead, DirtySink, Error, Interrupts, MapRequest, Undelivered, UnmapNotifier,
    VaddrUpdate,
};
use dmaspan::pin::{Dirty, Kind, PinError, PinFailed};
use dmaspan::{
    Account, Container, Iova, IovaRange, PhysAddr, RangeError, Span, UserAddr, UserRange,
};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{PROT, faulty_domain, range};
use crate::emulated::{Model, PAGE, pages};
use crate::hooked::{Hooking, Owner};
use crate::quarantine::Liar;

/// After so long a thread hangs: it would have come to its end many times on the busiest machine.
pub(crate) const HANGS: Duration = Duration::from_secs(300);

type Tlb = Iotlb<ArmLpaeS1Walker, dmaspan::io_pgtable::Arena>;

fn attach(container: &Hooking) -> (dmaspan::container::DomainId, Tlb) {
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    (container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap(), iotlb)
}

fn map(owner: &Owner, container: &Hooking, count: u64) {
    container.map(&owner.space, owner.pages(0, count), Iova::new(0), PROT).unwrap();
}

#[test]
fn what_a_lost_domain_may_use_is_not_said_to_be_revoked() {
    let owner = Owner::new(16);
    let mut pinner = owner.pinner();
    pinner.odd = Kind::Mmio;
    let container = Hooking::new(pinner, Arc::clone(&owner.account));
    let (_, kept) = attach(&container);
    let (id, lost) = attach(&container);
    map(&owner, &container, 16);
    lost.fail_next_invalidations(u64::MAX);
    assert!(matches!(container.detach(id), Err(Error::NotForgotten { .. })));
    for _ in 0..2 {
        let error = container.revoke(&owner.space, owner.user).unwrap_err();
        let Error::NotForgotten { range, .. } = error else { panic!("{error}") };
        assert_eq!(range, pages(0, 16));
        assert_eq!(container.pinner().unpinned.lock().1, 0, "its device may use it");
        assert_eq!(kept.stale_leaves(pages(0, 16)), []);
    }
    lost.fail_next_invalidations(0);
    container.revoke(&owner.space, owner.user).unwrap();
    let devices = owner.frames.iter().filter(|frame| frame.get() >> 12 & 1 == 1).count();
    assert_eq!(container.pinner().unpinned.lock().1, PAGE * devices as u64);
}

/// Does something in the middle of a read of what was written.
struct Meanwhile<F>(F);

impl<F: FnMut()> DirtySink for Meanwhile<F> {
    fn room(&self) -> u64 {
        64
    }

    fn write(&mut self, _offset: u64, _bytes: &[u8]) -> Result<(), Undelivered> {
        (self.0)();
        Ok(())
    }
}

#[test]
fn addresses_are_updated_before_or_after_a_read_of_what_was_written() {
    let owner = Owner::new(16);
    let container = owner.with_domain();
    map(&owner, &container, 16);
    container.start_dirty().unwrap();
    container.invalidate_vaddr_all().unwrap();
    let update =
        || container.update_vaddr(&VaddrUpdate::new(&owner.space, owner.user, Iova::new(0)));
    let mut sink = Meanwhile(|| {
        let error = update().unwrap_err();
        assert!(matches!(error, Error::Busy { busy, .. } if busy == pages(0, 16)), "{error}");
    });
    container.dirty_bitmap_to(pages(0, 16), PAGE, &mut sink, DirtyRead::Clear).unwrap();
    update().unwrap();
    let mut words = [0];
    container.dirty_bitmap(pages(0, 16), PAGE, &mut words, DirtyRead::Clear).unwrap();
    assert_eq!(words, [0xffff]);
}

#[test]
fn addresses_are_updated_before_or_after_a_copy() {
    let owner = Owner::new(16);
    let container = Arc::new(owner.with_domain());
    map(&owner, &container, 16);
    let update = {
        let (container, space, user) =
            (Arc::downgrade(&container), owner.space.clone(), owner.user);
        move || {
            let container: Arc<Hooking> = Weak::upgrade(&container).unwrap();
            container.update_vaddr(&VaddrUpdate::new(&space, user, Iova::new(0)))
        }
    };
    *container.pinner().on_copy.lock() = Some(Box::new({
        let (container, update) = (Arc::downgrade(&container), update.clone());
        move || {
            container.upgrade().unwrap().invalidate_vaddr_all().unwrap();
            assert!(matches!(update(), Err(Error::Busy { .. })));
        }
    }));
    container.read(Iova::new(0), &mut [0; 4]).unwrap();
    update().unwrap();
    assert_eq!(container.unmap_all().unwrap(), 16 * PAGE);
}

#[test]
fn a_domain_is_attached_after_the_last_one_went_with_addresses_unknown() {
    for answers in [false, true] {
        let owner = Owner::new(16);
        let container = owner.container();
        let (id, iotlb) = attach(&container);
        map(&owner, &container, 16);
        container.invalidate_vaddr_all().unwrap();
        if !answers {
            iotlb.fail_next_invalidations(u64::MAX);
        }
        assert_eq!(container.detach(id).is_ok(), answers);
        assert_eq!(container.mappings(), usize::from(!answers), "in quarantine");
        attach(&container);
        iotlb.fail_next_invalidations(0);
        assert_eq!(container.unmap_all().unwrap(), if answers { 0 } else { 16 * PAGE });
        owner.assert_untouched();
    }
}

#[test]
fn a_domain_is_attached_when_what_had_no_addresses_was_unmapped() {
    for count in 1..4 {
        let owner = Owner::new(16);
        let container = owner.container();
        attach(&container);
        for n in 0..count {
            container.map(&owner.space, owner.pages(n, 1), Iova::new(n * PAGE), PROT).unwrap();
        }
        container.invalidate_vaddr_all().unwrap();
        assert_eq!(container.unmap_all().unwrap(), count * PAGE);
        attach(&container);
        owner.assert_untouched();
    }
}

#[test]
fn a_panic_while_the_first_domain_is_attached_keeps_the_memory_and_ends() {
    let owner = Owner::new(16);
    let container = owner.container();
    for n in 0..2 {
        let user = owner.pages(8 * n, 8);
        container.map(&owner.space, user, Iova::new(8 * n * PAGE), PROT).unwrap();
    }
    let (domain, ..) = faulty_domain::<12>(&Faults::none());
    let calls = std::cell::Cell::new(0);
    let cancelled = || {
        calls.set(calls.get() + 1);
        assert!(calls.get() < 2, "the second mapping");
        false
    };
    let how = Attach::new(Interrupts::Isolated).cancelled_by(&cancelled);
    let attaching = AssertUnwindSafe(|| container.attach(domain, how));
    assert!(catch_unwind(attaching).is_err());
    assert!(matches!(container.unmap(pages(0, 8)), Err(Error::Changing)));
    let (ended, wait) = channel();
    thread::spawn(move || {
        drop(container);
        ended.send(()).unwrap();
    });
    wait.recv_timeout(HANGS).expect("it is dropped");
    assert_eq!(owner.account.used(), 16 * PAGE, "as nobody knows what hardware uses");
}

#[test]
fn what_a_panicking_map_had_mapped_stays_charged() {
    let owner = Owner::new(16);
    let (domain, ..) = faulty_domain::<12>(&Faults::none());
    let container: Container<_, parking_lot::RawMutex, 1> =
        Container::of_batch(owner.pinner(), Arc::clone(&owner.account));
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    let calls = std::cell::Cell::new(0);
    let cancelled = || {
        calls.set(calls.get() + 1);
        assert!(calls.get() < 5, "four spans are mapped");
        false
    };
    let request = MapRequest::new(&owner.space, owner.pages(0, 16), Iova::new(0), PROT);
    let mapping = || container.map_request(&request.cancelled_by(&cancelled));
    assert!(catch_unwind(AssertUnwindSafe(mapping)).is_err());
    assert_eq!(owner.account.used(), 16 * PAGE);
    assert!(matches!(container.unmap_all(), Err(Error::Busy { .. })));
}

#[test]
fn what_a_panicking_unmap_had_taken_over_stays_charged() {
    let owner = Owner::new(16);
    let container = owner.with_domain();
    map(&owner, &container, 16);
    *container.pinner().on_unpin.lock() = Some(Box::new(|| panic!("while it unpins")));
    assert!(catch_unwind(AssertUnwindSafe(|| container.unmap_all())).is_err());
    assert_eq!(owner.account.used(), owner.memory.pinned_frames() * PAGE);
    drop(container);
    assert_eq!(owner.account.used(), 16 * PAGE);
}

/// Memory, and so many bytes of device memory behind the range.
fn too_much(bytes: u64) -> impl Fn(u64) -> Vec<(Span, Kind)> + Send + Sync {
    let span = |at, len| Span::new(PhysAddr::new(at), len).unwrap();
    move |len| vec![(span(1 << 30, len), Kind::Memory), (span(1 << 40, bytes), Kind::Mmio)]
}

/// What comes of a map of 8 pages, and whether anything is left of it.
fn lied_to<const BATCH: usize>(
    pinner: Liar<impl Fn(u64) -> Vec<(Span, Kind)> + Send + Sync>,
) -> Error<std::convert::Infallible> {
    let (domain, tables, _) = faulty_domain::<12>(&Faults::none());
    let account = Account::new(u64::MAX);
    let container: Container<_, parking_lot::RawMutex, BATCH> =
        Container::of_batch(pinner, Arc::clone(&account));
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    let user = UserRange::from_len(UserAddr::new(0), 8 * PAGE).unwrap();
    let error = container.map(&(), user, Iova::new(0), PROT).unwrap_err();
    assert_eq!((account.used(), container.mappings(), tables.tables()), (0, 0, 1), "{error}");
    error
}

#[test]
fn a_pinner_that_pushes_more_of_another_kind_is_refused() {
    for more in [PAGE, 64 * PAGE] {
        let liar = || Liar { pushes: too_much(more), says: |_| Ok(()) };
        for error in [lied_to::<1>(liar()), lied_to::<256>(liar())] {
            let Error::PinnedLen { found, .. } = error else { panic!("{error}") };
            assert_eq!(found, 8 * PAGE + more);
        }
    }
}

#[test]
fn nothing_stays_mapped_for_a_pinner_that_has_no_pin_after_all() {
    let says = |range| Err(PinFailed { range, error: PinError::Stopped, pin: None });
    let liar = || Liar { pushes: too_much(PAGE), says };
    for error in [lied_to::<1>(liar()), lied_to::<256>(liar())] {
        assert!(matches!(error, Error::PinnedLen { .. }), "{error}");
    }
}

#[test]
fn what_a_pinner_without_a_pin_had_mapped_is_out_of_use_while_hardware_may_use_it() {
    let says = |range| Err(PinFailed { range, error: PinError::Stopped, pin: None });
    let liar = Liar { pushes: too_much(PAGE), says };
    let (domain, tables, iotlb) = faulty_domain::<12>(&Faults::none());
    let account = Account::new(u64::MAX);
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(liar, domain, Arc::clone(&account));
    let user = UserRange::from_len(UserAddr::new(0), 8 * PAGE).unwrap();
    let map = || container.map(&(), user, Iova::new(0), PROT).unwrap_err();
    iotlb.fail_next_invalidations(u64::MAX);
    let error = map();
    assert!(matches!(error, Error::PinnedLen { .. }), "{error}");
    assert_eq!((account.used(), container.mappings()), (8 * PAGE, 1));
    assert!(matches!(map(), Error::Quarantined { .. }));
    assert!(matches!(container.unmap_all(), Err(Error::NotForgotten { .. })));
    assert_eq!((account.used(), container.mappings()), (8 * PAGE, 1));
    iotlb.fail_next_invalidations(0);
    assert!(matches!(map(), Error::PinnedLen { .. }));
    assert_eq!((account.used(), container.mappings(), tables.tables()), (0, 0, 1));
}

#[test]
fn a_whole_space_has_no_length_to_map() {
    let owner = Owner::new(1);
    let container = owner.container();
    let whole = UserRange::new(UserAddr::new(0), UserAddr::new(u64::MAX)).unwrap();
    let error = container.map(&owner.space, whole, Iova::new(0), PROT).unwrap_err();
    assert!(matches!(error, Error::Range(RangeError::Wraps { .. })), "{error}");
    let top = UserRange::from_len(UserAddr::new(PAGE), 0u64.wrapping_sub(PAGE)).unwrap();
    container.map(&owner.space, top, Iova::new(PAGE), PROT).unwrap();
    assert_eq!(container.unmap_all().unwrap(), 0u64.wrapping_sub(PAGE));
}

/// Uses the container when it is dropped.
struct Leaving(Weak<Hooking>);

impl UnmapNotifier for Leaving {
    fn unmapping(&self, _range: IovaRange) {}
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let mappings = self.0.upgrade().map(|container| container.mappings());
        assert_eq!(mappings, Some(0));
    }
}

#[test]
fn a_device_may_use_the_container_when_it_is_dropped() {
    let (ended, wait) = channel();
    thread::spawn(move || {
        let container = Arc::new(Owner::new(1).container());
        let device = Arc::new(Leaving(Arc::downgrade(&container)));
        let id = container.attach_emulated(device).unwrap();
        container.detach_emulated(id).unwrap();
        ended.send(()).unwrap();
    });
    wait.recv_timeout(HANGS).expect("no lock is held");
}

#[test]
fn device_memory_that_is_revoked_while_it_is_being_pinned_is_not_pinned() {
    let owner = Owner::new(16);
    let mut pinner = owner.pinner();
    pinner.odd = Kind::Mmio;
    let (_, container, _) = Model::attach(Hooking::new(pinner, Arc::clone(&owner.account)));
    map(&owner, &container, 16);
    *container.pinner().on_pin.lock() = Some(Box::new({
        let (container, space, user) =
            (Arc::downgrade(&container), owner.space.clone(), owner.user);
        move || assert_eq!(container.upgrade().unwrap().revoke(&space, user).unwrap(), 0)
    }));
    let mut spans: Vec<Span> = Vec::new();
    let error = container.pin_external(pages(0, 16), PROT, &mut spans).unwrap_err();
    assert!(matches!(error, Error::NotMapped { .. }), "{error}");
    owner.assert_untouched();
}

/// Attaches a domain that is still being attached when it returns.
struct Attaching {
    container: Mutex<Weak<Hooking>>,
    go: Mutex<Vec<std::sync::mpsc::Sender<()>>>,
    threads: Mutex<Vec<thread::JoinHandle<dmaspan::container::DomainId>>>,
}

impl UnmapNotifier for Attaching {
    fn unmapping(&self, _range: IovaRange) {
        let container = self.container.lock().unwrap().upgrade().unwrap();
        let ((began, wait_began), (go, wait_go)) = (channel(), channel());
        *container.pinner().on_pin.lock() = Some(Box::new(move || {
            began.send(()).unwrap();
            wait_go.recv().unwrap();
        }));
        let attaching = thread::spawn(move || attach(&container).0);
        wait_began.recv().unwrap();
        self.go.lock().unwrap().push(go);
        self.threads.lock().unwrap().push(attaching);
    }
}

#[test]
fn devices_can_be_told_of_a_mapping_although_domains_came_while_they_were() {
    let owner = Owner::new(16);
    let container = Arc::new(owner.container());
    let device = Arc::new(Attaching {
        container: Mutex::new(Arc::downgrade(&container)),
        go: Mutex::default(),
        threads: Mutex::default(),
    });
    let id = container.attach_emulated(Arc::clone(&device) as _).unwrap();
    map(&owner, &container, 16);
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(0, 1), PROT, &mut spans).unwrap();
    // More often than unmaps may tell of one mapping at a time.
    for round in 0..5 {
        let error = container.unmap_all().unwrap_err();
        assert!(matches!(error, Error::Busy { .. } | Error::Changing), "round {round}: {error}");
        device.go.lock().unwrap().pop().unwrap().send(()).unwrap();
        let domain = device.threads.lock().unwrap().pop().unwrap().join().unwrap();
        container.detach(domain).unwrap();
    }
    container.unpin_external(pin, Dirty::Written).unwrap();
    assert_eq!(container.unmap(range(0, 16 * PAGE)).unwrap(), 16 * PAGE);
    container.detach_emulated(id).unwrap();
    owner.assert_untouched();
}
