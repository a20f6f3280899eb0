//! A container lists its mappings, while other threads change them.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::container::{Attach, ContainerMapping, Interrupts, MapRequest, MappingState};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, Event, Observed, Observer, SoftIommu};
use dmaspan::{Account, Container, Iova, IovaRange, Label, PhysAddr, Prot, UserAddr, UserRange};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};
use dmaspan_sim::rng::Rng;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;

use crate::common::{PROT, faulty_domain, range};
use crate::hooked::{Hooking, Owner, USER};

const PAGE: u64 = 0x1000;
const NAMES: [&str; 3] = ["rx ring", "tx ring", "admin queue"];

/// A mapping, as a model knows it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Known {
    range: IovaRange,
    user: UserRange,
    prot: Prot,
    label: Label,
    owner: *const Account,
}

impl Known {
    fn of(mapping: &ContainerMapping) -> Self {
        let ContainerMapping { range, user, prot, label, ref owner, .. } = *mapping;
        Self { range, user, prot, label, owner: Arc::as_ptr(owner) }
    }
}

/// A container that says what happens in the middle of its maps.
struct Watched {
    owner: Owner,
    iotlb: Iotlb<ArmLpaeS1Walker, Arena>,
    container: Hooking,
}

fn watched() -> Watched {
    let owner = Owner::new(4);
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let container = Container::with_domain(owner.pinner(), domain, Arc::clone(&owner.account));
    Watched { owner, iotlb, container }
}

fn user(page: u64, pages: u64) -> UserRange {
    UserRange::from_len(UserAddr::new(USER + page * PAGE), pages * PAGE).unwrap()
}

#[test]
fn a_listing_is_complete_sorted_and_right_whatever_was_mapped_and_unmapped() {
    let (domain, ..) = faulty_domain::<12>(&Faults::none());
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 256 * PAGE, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let frames = memory.allocate(128 * PAGE, 12).unwrap();
    space.map(UserAddr::new(USER), &[frames]).unwrap();
    let owners = [Account::new(u64::MAX), Account::new(u64::MAX)];
    let pinner = SimPinner::new(Arc::clone(&memory));
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(pinner, domain, Arc::clone(&owners[0]));
    let mut rng = Rng::new(21);
    let mut model = BTreeMap::<Iova, Known>::new();
    for _ in 0..600 {
        let pages = 1 + rng.below(3);
        let at = range(rng.below(128) * PAGE, pages * PAGE);
        let taken = model.values().any(|known| known.range.intersection(at).is_some());
        if rng.below(3) == 0 {
            let cut = model
                .values()
                .any(|known| known.range.intersection(at).is_some() && !at.covers(known.range));
            assert_eq!(container.unmap(at).is_err(), cut);
            model.retain(|_, known| cut || !at.covers(known.range));
        } else {
            let prot = if rng.below(2) == 0 { PROT } else { Prot::READ };
            let label = Label::from(NAMES[usize::try_from(rng.below(3)).unwrap()]);
            let owner = &owners[usize::try_from(rng.below(2)).unwrap()];
            let user = user(rng.below(128 - pages), pages);
            let request = MapRequest::new(&space, user, at.start(), prot);
            let mapped = container.map_request(&request.label(label).owner(owner));
            assert_eq!(mapped.is_err(), taken, "{mapped:?}");
            if !taken {
                let owner = Arc::as_ptr(owner);
                model.insert(at.start(), Known { range: at, user, prot, label, owner });
            }
        }
        let listed: Vec<_> = container.list().collect();
        let states = listed.iter().all(|m| m.state == MappingState::Mapped && m.domains == 1);
        assert!(states, "{listed:?}");
        let known: Vec<_> = model.values().copied().collect();
        assert_eq!(listed.iter().map(Known::of).collect::<Vec<_>>(), known);
        let part = range(rng.below(128) * PAGE, (1 + rng.below(32)) * PAGE);
        let in_part = known.iter().filter(|known| known.range.intersection(part).is_some());
        let listed = container.list_in(part);
        assert!(listed.map(|mapping| Known::of(&mapping)).eq(in_part.copied()), "{part}");
    }
    assert!(model.len() > 32, "some steps' worth");
}

#[test]
fn a_mapping_without_a_name_has_the_place_of_its_map() {
    let world = watched();
    let line = line!() + 1;
    world.container.map(&world.owner.space, world.owner.user, Iova::new(0), PROT).unwrap();
    let mapping = world.container.list_in(IovaRange::point(Iova::new(0xfff))).next().unwrap();
    let Label::Place(place) = mapping.label else { panic!("{mapping}") };
    assert_eq!((place.file(), place.line()), (file!(), line));
    let text = mapping.to_string();
    assert!(text.contains("mapped: ") && text.contains(file!()), "{text}");
}

#[test]
fn a_mapping_that_is_made_is_busy_and_one_that_hardware_keeps_is_in_quarantine() {
    let world = Arc::new(watched());
    let seen = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let (of, into) = (Arc::downgrade(&world), Arc::clone(&seen));
    *world.container.pinner().on_pin.lock() = Some(Box::new(move || {
        let world = of.upgrade().unwrap();
        into.lock().extend(world.container.list().map(|mapping| mapping.state));
        assert!(format!("{:?}", world.container).contains("working: 1"));
    }));
    world.container.map(&world.owner.space, world.owner.user, Iova::new(0), PROT).unwrap();
    assert_eq!(*seen.lock(), [MappingState::Busy]);

    world.iotlb.fail_next_invalidations(u64::MAX);
    assert!(world.container.unmap_all().is_err());
    let states: Vec<_> = world.container.list().map(|mapping| mapping.state).collect();
    let [MappingState::Quarantined(Some(source))] = states[..] else { panic!("{states:?}") };
    let picture = world.container.dump().to_string();
    assert!(picture.contains(&format!("quarantined: {source}")), "{picture}");
    assert!(picture.ends_with("1 mappings in 1 domains\n"), "{picture}");
    assert!(format!("{:?}", world.container).contains("quarantined: 1"));
    world.iotlb.fail_next_invalidations(0);
    world.container.unmap_all().unwrap();
    assert_eq!(world.container.list().count(), 0);
}

#[test]
fn a_live_listing_shows_what_stays_once_and_never_what_was_never_mapped() {
    let (domain, ..) = faulty_domain::<12>(&Faults::none());
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 256 * PAGE, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let frames = memory.allocate(128 * PAGE, 12).unwrap();
    space.map(UserAddr::new(USER), &[frames]).unwrap();
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(SimPinner::new(memory), domain, Account::new(u64::MAX));
    // Of page n, mapped at n, even ones stay, and odd ones come and go.
    let label = |page: u64| Label::from(NAMES[usize::try_from(page % 3).unwrap()]);
    let map = |page: u64| {
        let request = MapRequest::new(&space, user(page, 1), Iova::new(page * PAGE), PROT);
        container.map_request(&request.label(label(page))).unwrap();
    };
    (0..128).step_by(2).for_each(map);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for first in [1, 3] {
            let (map, container, done) = (&map, &container, &done);
            scope.spawn(move || {
                for _ in 0..60 {
                    let pages = || (first..128).step_by(4);
                    pages().for_each(map);
                    pages().for_each(|page| {
                        container.unmap(range(page * PAGE, PAGE)).unwrap();
                    });
                }
                done.store(true, Ordering::Relaxed);
            });
        }
        while !done.load(Ordering::Relaxed) {
            let listed: Vec<_> = container.list().collect();
            assert!(listed.is_sorted_by(|a, b| a.range.last() < b.range.start()));
            let mut stay = 0;
            for mapping in &listed {
                let page = mapping.range.start().get() / PAGE;
                assert_eq!(mapping.range, range(page * PAGE, PAGE));
                assert_eq!((mapping.user, mapping.label), (user(page, 1), label(page)));
                stay += u64::from(page.is_multiple_of(2));
            }
            assert_eq!(stay, 64);
        }
    });
}

thread_local! {
    static LOCKED: Cell<u64> = const { Cell::new(0) };
}

/// A lock that counts how often a thread takes it.
struct Counted(parking_lot::RawMutex);

// SAFETY: it is the inner lock.
unsafe impl lock_api::RawMutex for Counted {
    const INIT: Self = Self(parking_lot::RawMutex::INIT);

    type GuardMarker = <parking_lot::RawMutex as lock_api::RawMutex>::GuardMarker;

    fn lock(&self) {
        LOCKED.set(LOCKED.get() + 1);
        self.0.lock();
    }

    fn try_lock(&self) -> bool {
        self.0.try_lock()
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller holds it.
        unsafe { self.0.unlock() };
    }
}

#[test]
fn a_hundred_thousand_mappings_are_listed_without_holding_the_lock_throughout() {
    const COUNT: u64 = 100_000;
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), PAGE, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    // Without a domain a mapping is only noted.
    let container: Container<_, Counted> =
        Container::new(SimPinner::new(memory), Account::new(u64::MAX)).with_max_mappings(1 << 20);
    let map = |page: u64| container.map(&space, user(0, 1), Iova::new(page * PAGE), PROT);
    for page in 0..COUNT {
        map(page).unwrap();
    }
    let before = LOCKED.get();
    let listed = container
        .list()
        .enumerate()
        .filter(|(n, mapping)| mapping.range.start().get() == u64::try_from(*n).unwrap() * PAGE);
    assert_eq!(listed.count() as u64, COUNT);
    let steps = LOCKED.get() - before;
    assert!(steps > COUNT / 64, "{steps} steps: the lock was held for too many mappings");
    // Nor is it held while a mapping is looked at.
    for (n, mapping) in container.list().enumerate() {
        if n % 1000 == 0 {
            assert_eq!(container.unmap(mapping.range).unwrap(), PAGE);
        }
    }
    assert_eq!(container.list().count() as u64, COUNT - COUNT / 1000);
}

/// Notes whom a domain does something for.
#[derive(Clone, Default)]
struct Asked(Arc<Mutex<Vec<(bool, IovaRange, Label)>>>);

impl Observer for Asked {
    fn event(&self, event: &Event<'_>) {
        let (is_map, range, by) = match *event {
            Event::Mapping { range, by } => (true, range, by),
            Event::Unmapping { range, by } => (false, range, by),
            _ => return,
        };
        self.0.lock().push((is_map, range, by.label));
    }
}

/// A domain that says whom it does something for.
fn asked() -> (SoftDomain, Asked) {
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, Arena::default()).unwrap();
    let (iommu, asked) = (SoftIommu::over(&table), Asked::default());
    (Domain::new(table, Observed::new(iommu, asked.clone())).unwrap(), asked)
}

type SoftDomain = Domain<ArmLpaeS1<12>, Arena, Observed<SoftIommu<ArmLpaeS1<12>>, Asked>>;

#[test]
fn observers_of_all_domains_hear_who_asked_a_container() {
    let owner = Owner::new(4);
    let ((first, at_first), (second, at_second)) = (asked(), asked());
    let container: Hooking =
        Container::with_domain(owner.pinner(), first, Arc::clone(&owner.account));
    let prepared =
        |page| MapRequest::new(&owner.space, user(page, 1), Iova::new(page * PAGE), PROT);
    container.map_request(&prepared(0).label("rx ring")).unwrap();
    let (space, at) = (&owner.space, Iova::new(PAGE));
    let (_, mapped) = (container.map(space, user(1, 1), at, PROT).unwrap(), line!());
    let (id, attached) = (container.attach(second, Attach::new(Interrupts::Isolated)), line!());
    let (unmapped_bytes, unmapped) = (container.unmap(range(0, 2 * PAGE)).unwrap(), line!());
    assert_eq!(unmapped_bytes, 2 * PAGE);
    container.detach(id.unwrap()).unwrap();

    let line = |line: u32| format!("{}:{line}:", file!());
    let [rx, other] = [0, 1].map(|page| range(page * PAGE, PAGE));
    let heard = |asked: &Asked, expected: &[(bool, IovaRange, String)]| {
        let heard = asked.0.lock().clone();
        assert_eq!(heard.len(), expected.len(), "{heard:?}");
        for ((is_map, range, label), expected) in heard.iter().zip(expected) {
            assert_eq!((*is_map, *range), (expected.0, expected.1));
            assert!(label.to_string().starts_with(&expected.2), "{label}");
        }
    };
    let gone = [(false, rx, line(unmapped)), (false, other, line(unmapped))];
    let maps = [(true, rx, "rx ring".into()), (true, other, line(mapped))];
    heard(&at_first, &[maps, gone.clone()].concat());
    let copies = [rx, other].map(|range| (true, range, line(attached)));
    heard(&at_second, &[copies, gone].concat());
}
