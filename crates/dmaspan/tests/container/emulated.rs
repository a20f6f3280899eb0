//! Emulated devices are told of what is unmapped, and unmaps wait until they have unpinned.

use std::sync::{Arc, Weak};
use std::thread;

use dmaspan::account::Counting;
use dmaspan::container::{EmulatedId, Error, ExternalPin, UnmapNotifier};
use dmaspan::pin::Dirty;
use dmaspan::{Account, Container, DmaSpace, Errno, Iova, IovaRange, PhysAddr, Span, UserAddr};
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};
use parking_lot::Mutex;

use crate::common::{PROT, faulty_domain, range};
use crate::hooked::{Hooking, Owner};

pub(crate) const PAGE: u64 = 1 << 12;

/// Pages of IOVAs.
pub(crate) fn pages(first: u64, count: u64) -> IovaRange {
    range(first * PAGE, count * PAGE)
}

type Reaction = fn(&Hooking, IovaRange);

/// A device that unpins what it is told of, if it wants to.
#[derive(Default)]
pub(crate) struct Model {
    container: Mutex<Weak<Hooking>>,
    pub(crate) pins: Mutex<Vec<ExternalPin>>,
    told: Mutex<Vec<IovaRange>>,
    /// What it does with a range that it is told of, before it unpins.
    first: Mutex<Option<Reaction>>,
}

impl UnmapNotifier for Model {
    fn unmapping(&self, range: IovaRange) {
        self.told.lock().push(range);
        let container = self.container.lock().upgrade();
        let (Some(container), first) = (container, *self.first.lock()) else { return };
        if let Some(first) = first {
            first(&container, range);
        }
        let is_in = |pin: &mut ExternalPin| range.intersection(pin.range()).is_some();
        let gone: Vec<_> = self.pins.lock().extract_if(.., is_in).collect();
        gone.into_iter().for_each(|pin| container.unpin_external(pin, Dirty::Written).unwrap());
    }
}

impl Model {
    pub(crate) fn attach(container: Hooking) -> (Arc<Self>, Arc<Hooking>, EmulatedId) {
        let (model, container) = (Arc::new(Self::default()), Arc::new(container));
        *model.container.lock() = Arc::downgrade(&container);
        let id = container.attach_emulated(Arc::clone(&model) as _).unwrap();
        (model, container, id)
    }

    pub(crate) fn told(&self) -> Vec<IovaRange> {
        std::mem::take(&mut self.told.lock())
    }
}

/// A container of one mapping of 8 pages, of which two are pinned.
fn pinned(owner: &Owner) -> (Arc<Model>, Arc<Hooking>, ExternalPin) {
    let (model, container, _) = Model::attach(owner.container());
    container.map(&owner.space, owner.pages(0, 8), Iova::new(0), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(2, 2), PROT, &mut spans).unwrap();
    (model, container, pin)
}

#[test]
fn nothing_is_unmapped_while_a_device_has_pinned_any_of_it() {
    let owner = Owner::new(16);
    for pinned in [0, 4, 8] {
        let (_model, container, _) = Model::attach(owner.container());
        for page in [0, 4, 8] {
            let user = owner.pages(page, 4);
            container.map(&owner.space, user, Iova::new(page * PAGE), PROT).unwrap();
        }
        let mut spans: Vec<Span> = Vec::new();
        let pin = container.pin_external(pages(pinned, 2), PROT, &mut spans).unwrap();
        let error = container.unmap_all().unwrap_err();
        assert!(matches!(error, Error::StillPinned { .. }), "{error}");
        assert_eq!(container.mappings(), 3);
        container.unpin_external(pin, Dirty::Clean).unwrap();
        assert_eq!(container.unmap_all().unwrap(), 12 * PAGE);
    }
    owner.assert_untouched();
}

#[test]
fn a_device_unpins_what_it_is_told_of_and_then_it_is_unmapped() {
    let owner = Owner::new(16);
    let (model, container, _) = Model::attach(owner.container());
    for page in [0, 4, 8, 12] {
        let user = owner.pages(page, 4);
        container.map(&owner.space, user, Iova::new(page * PAGE), PROT).unwrap();
    }
    let mut spans: Vec<Span> = Vec::new();
    for at in [pages(1, 1), pages(1, 2), pages(9, 3), pages(15, 1)] {
        model.pins.lock().push(container.pin_external(at, PROT, &mut spans).unwrap());
    }
    assert_eq!(container.unmap(pages(4, 4)).unwrap(), 4 * PAGE);
    assert_eq!(model.told(), [], "nothing is pinned there");
    assert!(matches!(container.unmap(pages(0, 2)), Err(Error::Bisects { .. })));
    assert_eq!(model.told(), [], "nothing will be unmapped");
    assert_eq!(container.unmap(pages(0, 12)).unwrap(), 8 * PAGE);
    assert_eq!(model.told(), [pages(0, 4), pages(8, 4)]);
    assert_eq!(owner.memory.pinned_frames(), 1);
    assert_eq!(container.unmap_all().unwrap(), 4 * PAGE);
    assert_eq!(model.told(), [pages(12, 4)]);
    owner.assert_untouched();
}

#[test]
fn a_device_that_does_not_unpin_is_told_ten_times_and_nothing_changes() {
    let owner = Owner::new(8);
    let (model, container, pin) = pinned(&owner);
    // One more that is told, and cannot help.
    let (other, id) = (Arc::new(Model::default()), container.attach_emulated(model.clone()));
    container.detach_emulated(id.unwrap()).unwrap();
    container.attach_emulated(Arc::clone(&other) as _).unwrap();
    for unmap in [|c: &Hooking| c.unmap(pages(0, 64)), |c: &Hooking| c.unmap_all()] {
        let error = unmap(&container).unwrap_err();
        assert!(matches!(error, Error::StillPinned { range } if range == pages(0, 8)), "{error}");
        assert_eq!(container.errno(&error), Errno::EBUSY);
        assert_eq!(model.told(), [pages(0, 8); 10]);
        assert_eq!(other.told(), [pages(0, 8); 10]);
        assert_eq!((container.mappings(), owner.memory.pinned_frames()), (1, 2));
    }
    container.unpin_external(pin, Dirty::Clean).unwrap();
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    owner.assert_untouched();
}

#[test]
fn a_dropped_pin_keeps_its_mapping_for_ever() {
    let owner = Owner::new(8);
    let (_, container, pin) = pinned(&owner);
    drop(pin);
    assert!(matches!(container.unmap_all(), Err(Error::StillPinned { .. })));
    assert_eq!((owner.memory.pinned_frames(), owner.account.used()), (2, 2 * PAGE));
}

#[test]
fn a_device_may_unmap_what_it_is_told_of() {
    let owner = Owner::new(8);
    let (model, container, pin) = pinned(&owner);
    // It unpins in the unmap of its own, so that the outer one finds nothing.
    model.pins.lock().push(pin);
    *model.first.lock() = Some(|container, range| {
        if let Err(error) = container.unmap(range) {
            assert!(matches!(error, Error::StillPinned { .. }), "{error}");
        }
    });
    container.unmap_all().unwrap();
    assert_eq!(container.mappings(), 0);
    owner.assert_untouched();
}

#[test]
fn a_device_that_unmaps_and_never_unpins_ends_with_an_error() {
    let owner = Owner::new(8);
    let (model, container, pin) = pinned(&owner);
    *model.first.lock() = Some(|container, range| {
        assert!(matches!(container.unmap(range), Err(Error::StillPinned { .. })));
    });
    assert!(matches!(container.unmap_all(), Err(Error::StillPinned { .. })));
    assert_eq!((container.mappings(), owner.memory.pinned_frames()), (1, 2));
    *model.first.lock() = None;
    model.pins.lock().push(pin);
    model.told();
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    assert_eq!(model.told(), [pages(0, 8)]);
    owner.assert_untouched();
}

#[test]
fn the_last_device_takes_the_mappings_of_a_container_without_domains_with_it() {
    let owner = Owner::new(8);
    let (model, container, first) = Model::attach(owner.container());
    let second = container.attach_emulated(Arc::new(Model::default())).unwrap();
    container.map(&owner.space, owner.user, Iova::new(0), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(2, 2), PROT, &mut spans).unwrap();
    container.detach_emulated(second).unwrap();
    assert_eq!(container.mappings(), 1);
    assert!(matches!(container.detach_emulated(first), Err(Error::StillPinned { .. })));
    model.pins.lock().push(pin);
    container.detach_emulated(first).unwrap();
    assert_eq!(container.mappings(), 0);
    owner.assert_untouched();

    let (_, container, only) = Model::attach(owner.with_domain());
    container.map(&owner.space, owner.user, Iova::new(0), PROT).unwrap();
    container.detach_emulated(only).unwrap();
    assert_eq!((container.mappings(), container.unmap_all().unwrap()), (1, 8 * PAGE));
}

#[test]
fn what_the_last_domain_had_charged_is_charged_for_who_has_it_pinned() {
    let owner = Owner::new(8);
    let account = Account::with_counting(u64::MAX, Counting::Mappings);
    let (domain, ..) = faulty_domain::<12>(&Faults::none());
    let container = Container::with_domain(owner.pinner(), domain, Arc::clone(&account));
    let (_, container, _) = Model::attach(container);
    container.map(&owner.space, owner.user, Iova::new(0), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(2, 3), PROT, &mut spans).unwrap();
    assert_eq!(account.used(), 8 * PAGE);
    container.detach(container.info().domains[0]).unwrap();
    assert_eq!((account.used(), owner.memory.pinned_frames()), (3 * PAGE, 3));
    container.unpin_external(pin, Dirty::Written).unwrap();
    assert_eq!((account.used(), owner.memory.pinned_frames()), (0, 0));
}

#[test]
fn dropping_a_container_tells_devices_and_leaks_what_they_have_pinned() {
    let owner = Owner::new(8);
    let (model, container, _) = Model::attach(owner.with_domain());
    container.map(&owner.space, owner.user, Iova::new(0), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    container.pin_range(pages(2, 2), PROT, &mut spans).unwrap();
    let pin = container.pin_external(pages(3, 2), PROT, &mut spans).unwrap();
    drop(Arc::into_inner(container).unwrap());
    assert_eq!(model.told(), [pages(0, 8)]);
    drop(pin);
    let pins: Vec<_> = owner.frames.iter().map(|frame| owner.memory.pins(*frame)).collect();
    assert_eq!(pins, [0, 0, 1, 2, 1, 0, 0, 0].map(Some));
    assert_eq!(owner.memory.violations(), []);

    let alone = Owner::new(8);
    let (_, container, pin) = pinned(&alone);
    drop(container);
    drop(pin);
    assert_eq!((alone.memory.pinned_frames(), alone.account.used()), (2, 2 * PAGE));
}

#[test]
fn a_mapping_that_goes_while_it_is_pinned_was_not_there() {
    let owner = Owner::new(16);
    let (_, container, _) = Model::attach(owner.container());
    let map = |from| container.map(&owner.space, owner.pages(from, 8), Iova::new(0), PROT);
    map(0).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    for again in [None, Some(8), Some(0)] {
        let (other, space) = (Arc::clone(&container), Arc::clone(&owner.space));
        let user = again.map(|from| owner.pages(from, 8));
        *container.pinner().on_pin.lock() = Some(Box::new(move || {
            assert_eq!(other.unmap_all().unwrap(), 8 * PAGE);
            if let Some(user) = user {
                other.map(&space, user, Iova::new(0), PROT).unwrap();
            }
        }));
        let error = container.pin_external(pages(1, 2), PROT, &mut spans).unwrap_err();
        assert!(matches!(error, Error::NotMapped { .. }), "{error}");
        assert_eq!(container.errno(&error), Errno::EINVAL);
        owner.assert_untouched();
        container.unmap_all().unwrap();
        map(0).unwrap();
    }
}

#[test]
fn nothing_is_unmapped_while_a_pin_in_it_is_being_ended() {
    let owner = Owner::new(8);
    let (model, container, pin) = pinned(&owner);
    let other = Arc::clone(&container);
    *container.pinner().on_unpin.lock() = Some(Box::new(move || {
        let error = other.unmap_all().unwrap_err();
        assert!(matches!(error, Error::Busy { busy, .. } if busy == pages(0, 8)), "{error}");
    }));
    container.unpin_external(pin, Dirty::Clean).unwrap();
    assert!(container.pinner().on_unpin.lock().is_none(), "it was called");
    assert_eq!(model.told(), [], "nobody has anything left to unpin");
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    owner.assert_untouched();
}

#[test]
fn pins_race_with_unmaps() {
    let owner = Owner::new(32);
    let (model, container, _) = Model::attach(owner.container());
    let may_be = |error: &Error<_>| {
        use Error::{Busy, Exists, NotMapped, StillPinned};
        let refused =
            matches!(error, NotMapped { .. } | Busy { .. } | Exists { .. } | StillPinned { .. });
        assert!(refused, "{error}");
    };
    let unmapped = thread::scope(|scope| {
        let pinning = [0, 1].map(|n| {
            let (model, container) = (&model, &container);
            scope.spawn(move || {
                let (mut pinned, mut spans): (u64, Vec<Span>) = (0, Vec::new());
                while pinned < 1000 {
                    let at = pages((7 * pinned + n) % 30, 1 + pinned % 2);
                    match container.pin_external(at, PROT, &mut spans) {
                        // The device unpins it when it is told.
                        Ok(pin) if pinned % 3 == 0 => model.pins.lock().push(pin),
                        Ok(pin) => container.unpin_external(pin, Dirty::Written).unwrap(),
                        Err(error) => {
                            may_be(&error);
                            thread::yield_now();
                            continue;
                        }
                    }
                    pinned += 1;
                }
            })
        });
        let mut unmapped = 0;
        for round in 0.. {
            if pinning.iter().all(|thread| thread.is_finished()) {
                break;
            }
            for page in [0, 8, 16, 24] {
                let (user, at) = (owner.pages(page, 8), Iova::new(page * PAGE));
                container
                    .map(&owner.space, user, at, PROT)
                    .map(drop)
                    .unwrap_or_else(|e| may_be(&e));
            }
            thread::yield_now();
            match container.unmap(pages(8 * (round % 4), 8)) {
                Ok(bytes) => unmapped += bytes,
                Err(error) => may_be(&error),
            }
        }
        unmapped
    });
    assert!(unmapped > 0);
    // What was pushed behind the last notification.
    let pins = std::mem::take(&mut *model.pins.lock());
    pins.into_iter().for_each(|pin| container.unpin_external(pin, Dirty::Clean).unwrap());
    container.unmap_all().unwrap();
    owner.assert_untouched();
}

#[test]
fn a_failure_of_any_step_of_a_pin_leaves_nothing() {
    let faults = Faults::none();
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 256 * PAGE, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let spans = memory.allocate_scattered(64 * PAGE, 3).unwrap();
    let user = space.map(UserAddr::new(1 << 32), &spans).unwrap();
    let half =
        |n: u64| dmaspan::UserRange::from_len(user.start().wrapping_add(n * 32 * PAGE), 32 * PAGE);
    let account = Account::new(u64::MAX);
    let pinner = Faulty::new(SimPinner::new(Arc::clone(&memory)), &faults);
    let container: Container<_, parking_lot::RawMutex> =
        Container::new(pinner, Arc::clone(&account));
    container.attach_emulated(Arc::new(Model::default())).unwrap();
    container.map(&space, half(1).unwrap(), Iova::new(0), PROT).unwrap();
    container.map(&space, half(0).unwrap(), Iova::new(32 * PAGE), PROT).unwrap();
    let mut failed = 0;
    let steps = faults.sweep(|n| {
        let mut spans: Vec<Span> = Vec::new();
        match container.pin_external(pages(1, 60), PROT, &mut spans) {
            Ok(pin) => {
                assert_eq!(memory.pinned_frames(), 60);
                container.unpin_external(pin, Dirty::Clean).unwrap();
            }
            Err(error) => {
                assert!(matches!(error, Error::Pin { .. }), "step {n}: {error}");
                failed += 1;
            }
        }
        assert_eq!((memory.pinned_frames(), account.used()), (0, 0), "step {n}");
        assert_eq!(memory.violations(), [], "step {n}");
    });
    assert!(failed == steps && steps > 40, "{failed} of {steps} steps");
    assert_eq!(container.unmap_all().unwrap(), 64 * PAGE);
}
