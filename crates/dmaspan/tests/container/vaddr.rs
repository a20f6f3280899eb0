//! User addresses that are forgotten and said again, while devices go on.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dmaspan::account::Counting;
use dmaspan::container::{
    Attach, Error, Interrupts, MapRequest, UnmapNotifier, VaddrUpdate, Version,
};
use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::{
    Account, Container, DmaSpace, Errno, Iova, IovaRange, PhysAddr, Promise, Prot, Span, UserAddr,
    UserRange,
};
use dmaspan_sim::device::SimDevice;
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;

use crate::account::Mixed;
use crate::common::{PROT, faulty_domain, for_all_granules, range};

for_all_granules!(
    devices_go_on_while_user_addresses_are_invalid,
    a_range_is_invalidated_as_a_whole_or_not_at_all,
    only_an_exact_mapping_without_addresses_is_updated,
    an_update_moves_exactly_what_is_charged_and_no_translation,
    a_new_owner_without_room_changes_nothing,
    domains_are_attached_only_while_all_addresses_are_valid,
    an_owner_at_its_limit_may_move_its_own_memory,
    mapping_and_unmapping_go_on_while_addresses_are_invalid,
);

const OLD: u64 = 0x7f00_0000_0000;
const NEW: u64 = 0x5500_0000_0000;
/// More than a batch.
const GRANULES: u64 = 300;

type Sim = Container<SimPinner, parking_lot::RawMutex>;

struct World<const G: u32> {
    iotlb: Iotlb<ArmLpaeS1Walker, dmaspan::io_pgtable::Arena>,
    memory: Arc<SimMemory>,
    account: Arc<Account>,
    container: Sim,
    /// A process, and the one that follows it with the same memory elsewhere.
    spaces: [(Arc<SimSpace>, u64); 2],
}

impl<const G: u32> World<G> {
    fn new(account: Arc<Account>) -> Self {
        let (domain, _, iotlb) = faulty_domain::<G>(&Faults::none());
        let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 4096 << G, G).unwrap());
        let spans = memory.allocate_scattered(GRANULES << G, 3).unwrap();
        let spaces = [OLD, NEW].map(|at| {
            let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
            space.map(UserAddr::new(at), &spans).unwrap();
            (space, at)
        });
        let pinner = SimPinner::new(Arc::clone(&memory));
        let container = Container::with_domain(pinner, domain, Arc::clone(&account));
        Self { iotlb, memory, account, container, spaces }
    }

    /// The user's granules in the old space or the new one.
    fn user(&self, space: usize, first: u64, granules: u64) -> UserRange {
        let at = UserAddr::new(self.spaces[space].1 + (first << G));
        UserRange::from_len(at, granules << G).unwrap()
    }

    fn map(&self, iova: u64, first: u64, granules: u64) {
        let user = self.user(0, first, granules);
        let iova = Iova::new(iova << G);
        self.container.map(&self.spaces[0].0, user, iova, PROT).unwrap();
    }

    fn invalidate(&self, iova: u64, granules: u64) -> Result<u64, Error<impl core::error::Error>> {
        self.container.invalidate_vaddr(range(iova << G, granules << G))
    }

    /// Moves a mapping to the new space.
    fn update(
        &self,
        iova: u64,
        first: u64,
        granules: u64,
        owner: Option<&Arc<Account>>,
    ) -> Result<(), (Error<impl core::error::Error>, Errno)> {
        let user = self.user(1, first, granules);
        let update = VaddrUpdate::new(&self.spaces[1].0, user, Iova::new(iova << G));
        let update = owner.into_iter().fold(update, VaddrUpdate::owner);
        self.container.update_vaddr(&update).map_err(|error| {
            let errno = self.container.errno(&error);
            (error, errno)
        })
    }

    /// What a device finds at the first `granules` IOVAs.
    fn translations(&self, granules: u64) -> Vec<Option<Span>> {
        let device = SimDevice::new(self.iotlb.clone(), Arc::clone(&self.memory));
        let page = |n| Iova::new(n << G);
        let probe = |n| device.probe(page(n), Access::Write).map(|at| Span::new(at, 1).unwrap());
        (0..granules).map(probe).collect()
    }
}

fn devices_go_on_while_user_addresses_are_invalid<const G: u32>() {
    let world = World::<G>::new(Account::unlimited());
    world.map(0, 0, GRANULES);
    let before = world.translations(GRANULES);
    assert!(before.iter().all(Option::is_some));
    assert_eq!(world.invalidate(0, GRANULES).unwrap(), GRANULES << G);
    assert_eq!(world.translations(GRANULES), before);
    assert_eq!(world.memory.pinned_frames(), GRANULES);
    assert_eq!(world.account.used(), GRANULES << G);
    let device = SimDevice::new(world.iotlb.clone(), Arc::clone(&world.memory));
    device.write(Iova::new(5), b"meanwhile").unwrap();
    world.update(0, 0, GRANULES, None).unwrap();
    assert_eq!(world.translations(GRANULES), before);
    let mut seen = [0; 9];
    world.spaces[1].0.read(UserAddr::new(NEW + 5), &mut seen).unwrap();
    assert_eq!(&seen, b"meanwhile");
    // Again, since the addresses are valid.
    assert_eq!(world.container.invalidate_vaddr_all().unwrap(), GRANULES << G);
    assert_eq!(world.container.unmap_all().unwrap(), GRANULES << G);
    assert_eq!((world.account.used(), world.memory.pinned_frames()), (0, 0));
    assert_eq!(world.memory.violations(), []);
}

fn a_range_is_invalidated_as_a_whole_or_not_at_all<const G: u32>() {
    let world = World::<G>::new(Account::unlimited());
    assert_eq!(world.container.invalidate_vaddr_all().unwrap(), 0);
    assert_eq!(world.invalidate(0, 64).unwrap(), 0, "nothing there is no error");
    for n in 0..4 {
        world.map(8 * n, 0, 4);
    }
    for (start, len) in [(0, 2), (2, 2), (9, 30), (0, 9)] {
        let error = world.invalidate(start, len).unwrap_err();
        assert!(matches!(error, Error::Bisects { .. }), "{error}");
    }
    let odd = world.container.invalidate_vaddr(range(1, 1 << G)).unwrap_err();
    assert!(matches!(odd, Error::MisalignedUnmap { .. }), "{odd}");
    assert_eq!(world.invalidate(16, 4).unwrap(), 4 << G);
    let [third, all] = [range(16 << G, 4 << G), range(0, 64 << G)];
    let error = world.container.invalidate_vaddr(all).unwrap_err();
    assert_eq!(world.container.errno(&error), Errno::EINVAL);
    assert!(
        matches!(error, Error::VaddrInvalidAlready { range, mapping }
            if range == all && mapping == third),
        "{error}"
    );
    let error = world.container.invalidate_vaddr_all().unwrap_err();
    assert!(matches!(error, Error::VaddrInvalidAlready { mapping, .. } if mapping == third));
    // None of the others was marked.
    assert_eq!(world.invalidate(0, 15).unwrap(), 8 << G);
    assert_eq!(world.invalidate(20, 44).unwrap(), 4 << G);
}

#[test]
fn version_1_invalidates_what_it_would_unmap() {
    let World { container, spaces, memory, .. } = World::<12>::new(Account::unlimited());
    let container = container.with_version(Version::V1);
    let user = UserRange::from_len(UserAddr::new(OLD), 4 << 12).unwrap();
    for start in [0, 8] {
        container.map(&spaces[0].0, user, Iova::new(start << 12), PROT).unwrap();
    }
    assert_eq!(container.invalidate_vaddr(range(1 << 12, 15 << 12)).unwrap(), 0);
    assert_eq!(container.invalidate_vaddr(range(0, 1 << 12)).unwrap(), 4 << 12);
    assert!(container.invalidate_vaddr(range(0, 1 << 12)).is_err(), "it was the whole mapping");
    assert_eq!(container.invalidate_vaddr(range(5 << 12, 4 << 12)).unwrap(), 4 << 12);
    assert_eq!(memory.pinned_frames(), 4);
}

fn only_an_exact_mapping_without_addresses_is_updated<const G: u32>() {
    let world = World::<G>::new(Account::unlimited());
    world.map(8, 0, 4);
    world.map(16, 0, 4);
    let (error, errno) = world.update(32, 0, 4, None).unwrap_err();
    assert!(matches!(error, Error::NothingMapped { range: r } if r == range(32 << G, 4 << G)));
    assert_eq!(errno, Errno::ENOENT);
    let not_invalid = |iova: u64, granules: u64| {
        let (error, errno) = world.update(iova, 0, granules, None).unwrap_err();
        assert_eq!(errno, Errno::EINVAL);
        let asked = range(iova << G, granules << G);
        assert!(
            matches!(error, Error::NotInvalid { range: r, mapping }
                if r == asked && mapping == range(8 << G, 4 << G)),
            "{error}"
        );
    };
    not_invalid(8, 4);
    assert_eq!(world.invalidate(8, 4).unwrap(), 4 << G);
    for (iova, granules) in [(8, 3), (8, 5), (7, 4), (9, 3), (7, 30)] {
        not_invalid(iova, granules);
    }
    let user = UserRange::from_len(UserAddr::new(NEW + 1), 4 << G).unwrap();
    let update = VaddrUpdate::new(&world.spaces[1].0, user, Iova::new(8 << G));
    let error = world.container.update_vaddr(&update).unwrap_err();
    assert!(matches!(error, Error::Misaligned { .. }), "{error}");
    let update = VaddrUpdate::new(&world.spaces[1].0, user, Iova::new(u64::MAX));
    assert!(matches!(world.container.update_vaddr(&update), Err(Error::Range(_))));
    world.update(8, 0, 4, None).unwrap();
    not_invalid(8, 4);
}

#[test]
fn device_memory_is_revoked_by_the_addresses_that_are_valid() {
    let World { memory, spaces, .. } = World::<12>::new(Account::unlimited());
    let [(old, at), (new, new_at)] = &spaces;
    let (domain, ..) = faulty_domain::<12>(&Faults::none());
    let account = Account::unlimited();
    let pinner = Mixed(SimPinner::new(Arc::clone(&memory)), 12);
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(pinner, domain, Arc::clone(&account));
    let [user, new_user] =
        [at, new_at].map(|at| UserRange::from_len(UserAddr::new(*at), 64 << 12).unwrap());
    let found = container.map(old, user, Iova::new(0), PROT).unwrap();
    assert!(found.mmio > 0 && found.memory > 0);
    assert_eq!(account.used(), found.memory);
    container.invalidate_vaddr_all().unwrap();
    let heir = Account::new(found.memory);
    let update = VaddrUpdate::new(new, new_user, Iova::new(0));
    container.update_vaddr(&update.owner(&heir)).unwrap();
    assert_eq!((account.used(), heir.used()), (0, found.memory));
    assert_eq!(container.revoke(old, user).unwrap(), 0);
    assert_eq!(container.revoke(new, new_user).unwrap(), found.mmio);
    // What was taken away is charged to nobody, and moves with the rest.
    container.invalidate_vaddr_all().unwrap();
    let frames = Account::with_counting(found.memory, Counting::Frames);
    let update = VaddrUpdate::new(old, user, Iova::new(0));
    container.update_vaddr(&update.owner(&frames)).unwrap();
    assert_eq!((heir.used(), frames.used()), (0, found.memory));
    assert_eq!(container.unmap_all().unwrap(), 64 << 12);
    assert_eq!((frames.used(), memory.pinned_frames()), (0, 0));
    assert_eq!(memory.violations(), []);
}

/// Every way of counting, for the old owner and the new one.
fn countings() -> impl Iterator<Item = [Counting; 2]> {
    let all = [Counting::Ranges, Counting::Mappings, Counting::Frames];
    all.into_iter().flat_map(move |old| all.map(|new| [old, new]))
}

fn an_update_moves_exactly_what_is_charged_and_no_translation<const G: u32>() {
    for [old, new] in countings() {
        let counted = |counting| if counting == Counting::Mappings { 400 } else { GRANULES };
        let world = World::<G>::new(Account::with_counting(u64::MAX, old));
        let heir = Account::with_counting(counted(new) << G, new);
        // The second mapping has memory that the first has too.
        world.map(0, 0, GRANULES);
        world.map(512, 50, 100);
        assert_eq!(world.account.used(), counted(old) << G);
        let before = world.translations(612);
        assert_eq!(world.container.invalidate_vaddr_all().unwrap(), 400 << G);
        world.update(0, 0, GRANULES, Some(&heir)).unwrap();
        assert_eq!(heir.used(), GRANULES << G, "{old:?} {new:?}");
        assert_eq!(world.account.used(), 100 << G, "{old:?} {new:?}");
        world.update(512, 50, 100, Some(&heir)).unwrap();
        assert_eq!(heir.used(), counted(new) << G, "{old:?} {new:?}");
        assert_eq!(world.account.used(), 0);
        assert_eq!(world.translations(612), before);
        assert_eq!(world.container.census().total(), 400);
        assert_eq!(world.memory.pinned_frames(), GRANULES);

        // It is the new space's memory now.
        let user = world.user(1, 0, 10);
        let request = MapRequest::new(&world.spaces[1].0, user, Iova::new(1 << 40), PROT);
        let once_more = world.container.map_request(&request.owner(&heir));
        assert_eq!(once_more.is_ok(), new != Counting::Mappings, "{old:?} {new:?}");
        world.container.unmap_all().unwrap();
        assert_eq!((heir.used(), world.account.used(), world.memory.pinned_frames()), (0, 0, 0));
        assert_eq!(world.memory.violations(), []);
    }
}

fn a_new_owner_without_room_changes_nothing<const G: u32>() {
    for [old, new] in countings() {
        let world = World::<G>::new(Account::with_counting(u64::MAX, old));
        world.map(0, 0, GRANULES);
        let before = world.translations(GRANULES);
        assert_eq!(world.invalidate(0, GRANULES).unwrap(), GRANULES << G);
        for room in [0, 1, 128, 299] {
            let heir = Account::with_counting((room + 7) << G, new);
            let _held = heir.charge(7 << G).unwrap();
            let (error, errno) = world.update(0, 0, GRANULES, Some(&heir)).unwrap_err();
            let Error::OverLimit { user, source } = &error else { panic!("{error}") };
            assert_eq!((*user, source.limit), (world.user(1, 0, GRANULES), (room + 7) << G));
            assert_eq!(errno, Errno::ENOMEM);
            assert_eq!((heir.used(), world.account.used()), (7 << G, GRANULES << G));
            assert_eq!(world.translations(GRANULES), before);
        }
        // It has still no addresses, and may be updated.
        assert!(world.invalidate(0, GRANULES).is_err());
        let heir = Account::with_counting(GRANULES << G, new);
        world.update(0, 0, GRANULES, Some(&heir)).unwrap();
        assert_eq!((heir.used(), world.account.used()), (GRANULES << G, 0));
    }
}

fn an_owner_at_its_limit_may_move_its_own_memory<const G: u32>() {
    for counting in [Counting::Ranges, Counting::Mappings, Counting::Frames] {
        let world = World::<G>::new(Account::with_counting(GRANULES << G, counting));
        world.map(0, 0, GRANULES);
        world.container.invalidate_vaddr_all().unwrap();
        world.update(0, 0, GRANULES, None).unwrap();
        assert_eq!(world.account.used(), GRANULES << G, "{counting:?}");
        assert_eq!(world.memory.pinned_frames(), GRANULES);
        world.container.unmap_all().unwrap();
        assert_eq!(world.account.used(), 0);
    }
    // Two mappings of the same addresses that part: the second needs room of its own.
    let world = World::<G>::new(Account::new((GRANULES + 9) << G));
    world.map(0, 0, GRANULES);
    world.map(512, 0, 10);
    world.container.invalidate_vaddr_all().unwrap();
    let (error, _) = world.update(512, 0, 10, None).unwrap_err();
    assert!(matches!(error, Error::OverLimit { .. }), "{error}");
    assert_eq!(world.account.used(), GRANULES << G);
    world.update(0, 0, GRANULES, Some(&Account::unlimited())).unwrap();
    assert_eq!(world.account.used(), 10 << G);
    world.update(512, 0, 10, None).unwrap();
    assert_eq!(world.account.used(), 10 << G);
}

fn domains_are_attached_only_while_all_addresses_are_valid<const G: u32>() {
    let world = World::<G>::new(Account::unlimited());
    world.map(0, 0, 4);
    world.map(8, 4, 4);
    let attach = || {
        let (domain, ..) = faulty_domain::<G>(&Faults::none());
        world.container.attach(domain, Attach::new(Interrupts::Isolated))
    };
    let refused = |mapping| {
        let error = attach().unwrap_err();
        assert!(matches!(error, Error::VaddrInvalid { mapping: m } if m == mapping), "{error}");
        assert_eq!(world.container.errno(&error), Errno::EBUSY);
    };
    assert_eq!(world.container.invalidate_vaddr_all().unwrap(), 8 << G);
    refused(range(0, 4 << G));
    // One is updated, the other goes.
    world.update(0, 0, 4, None).unwrap();
    refused(range(8 << G, 4 << G));
    assert_eq!(world.container.unmap(range(8 << G, 4 << G)).unwrap(), 4 << G);
    attach().unwrap();
    assert_eq!((world.account.used(), world.memory.pinned_frames()), (4 << G, 4));

    // Without domains nothing is pinned, and what comes next pins by the new addresses.
    for id in world.container.info().domains {
        world.container.detach(id).unwrap();
    }
    world.map(0, 0, 4);
    assert_eq!((world.account.used(), world.memory.pinned_frames()), (0, 0));
    assert_eq!(world.invalidate(0, 4).unwrap(), 4 << G);
    world.update(0, 0, 4, None).unwrap();
    world.spaces[0].0.unmap(world.user(0, 0, GRANULES));
    attach().unwrap();
    assert_eq!((world.account.used(), world.memory.pinned_frames()), (4 << G, 4));
    assert_eq!(world.container.unmap_all().unwrap(), 4 << G);
    assert_eq!(world.memory.violations(), []);
}

fn mapping_and_unmapping_go_on_while_addresses_are_invalid<const G: u32>() {
    let world = World::<G>::new(Account::unlimited());
    world.map(0, 0, 4);
    world.map(8, 4, 4);
    assert_eq!(world.container.invalidate_vaddr_all().unwrap(), 8 << G);
    world.map(16, 8, 4);
    assert_eq!(world.container.unmap(range(16 << G, 4 << G)).unwrap(), 4 << G);
    assert_eq!(world.container.unmap(range(0, 4 << G)).unwrap(), 4 << G);
    assert_eq!(world.account.used(), 4 << G);
    // What takes its place has addresses.
    world.map(0, 0, 4);
    assert_eq!(world.invalidate(0, 4).unwrap(), 4 << G);
    let (error, _) = world.update(16, 8, 4, None).unwrap_err();
    assert!(matches!(error, Error::NothingMapped { .. }), "{error}");
    world.update(0, 0, 4, None).unwrap();
    world.update(8, 4, 4, None).unwrap();
    assert_eq!(world.container.unmap_all().unwrap(), 8 << G);
    assert_eq!((world.account.used(), world.memory.pinned_frames()), (0, 0));
    assert_eq!(world.memory.violations(), []);
}

type Look = Box<dyn Fn() + Send + Sync>;

/// Spaces that are numbers, all of whose addresses lead to device memory, 2^30 bytes a space; and
/// what happens when they are looked up the next time.
#[derive(Default)]
struct Bars(Mutex<Option<Look>>);

// SAFETY: the addresses are of no memory, and no device of these tests touches them.
unsafe impl Pinner for Bars {
    type Space = u64;
    type Address = PhysAddr;
    type Pin = ();
    type Error = Infallible;

    fn pin(
        &self,
        space: &u64,
        range: UserRange,
        _prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<(), PinFailed<(), Infallible>> {
        let look = self.0.lock().take();
        look.into_iter().for_each(|look| look());
        let len = range.checked_len().unwrap();
        let start = PhysAddr::new((space << 30) + range.start().get() % (1 << 30));
        // Cut where nothing else is.
        for offset in (0..len).step_by(0x2000) {
            let span = Span::new(start.wrapping_add(offset), 0x2000.min(len - offset)).unwrap();
            let error = PinError::Stopped;
            sink.push(span, Kind::Mmio).map_err(|Stopped| PinFailed {
                range,
                error,
                pin: (offset > 0).then_some(()),
            })?;
        }
        Ok(())
    }

    fn unpin(&self, _: Promise<'_>, (): &mut (), _: &[Span], _: Kind, _: Dirty) {}

    fn release(&self, _: Promise<'_>, (): ()) {}

    fn space_id(&self, space: &u64) -> u64 {
        *space
    }

    fn chargeable(&self, _: &u64, _: UserRange) -> u64 {
        0
    }

    fn read(&self, _: &u64, _: UserAddr, _: &mut [u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn write(&self, _: &u64, _: UserAddr, _: &[u8]) -> Result<(), Infallible> {
        Ok(())
    }

    fn errno(&self, error: &Infallible) -> Errno {
        match *error {}
    }
}

struct Idle;

impl UnmapNotifier for Idle {
    fn unmapping(&self, _range: IovaRange) {}
}

#[test]
fn device_memory_moves_to_no_addresses_that_lead_elsewhere_so_that_its_owner_finds_it() {
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let (bars, account) = (Bars::default(), Account::unlimited());
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(bars, domain, account);
    let container = Arc::new(container);
    let len = 0x5000;
    let user = move |at| UserRange::from_len(UserAddr::new(at), len).unwrap();
    let reaches = || iotlb.translate(Iova::new(0x4000), Access::Write).is_ok();
    container.map(&7, user(0x10_0000), Iova::new(0), PROT).unwrap();
    container.invalidate_vaddr_all().unwrap();
    // Another device's memory, and another part of the same.
    for (space, at) in [(8, 0x10_0000), (7, 0x10_1000), (7, 0x20_0000)] {
        let moved = container.update_vaddr(&VaddrUpdate::new(&space, user(at), Iova::new(0)));
        let Err(error) = moved else { panic!("{space} {at:#x}") };
        let range = range(0, len);
        assert!(
            matches!(error, Error::OtherDevice { user: u, range: r } if (u, r) == (user(at), range))
        );
        assert_eq!(container.errno(&error), Errno::EINVAL);
    }
    // The owner of the new addresses takes the device away while they are looked up.
    let (weak, asked) = (Arc::downgrade(&container), Arc::new(AtomicU32::new(0)));
    let again = Arc::clone(&asked);
    *container.pinner().0.lock() = Some(Box::new(move || {
        let revoked = weak.upgrade().unwrap().revoke(&7, user(0x4010_0000));
        assert!(matches!(revoked, Err(Error::Busy { .. })), "it is to come again");
        again.fetch_add(1, Ordering::Relaxed);
    }));
    // The same memory, since spaces repeat it.
    let update = VaddrUpdate::new(&7, user(0x4010_0000), Iova::new(0));
    container.update_vaddr(&update).unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    assert!(reaches());
    assert_eq!(container.revoke(&7, user(0x10_0000)).unwrap(), 0);
    assert_eq!(container.revoke(&7, user(0x4010_0000)).unwrap(), len);
    assert!(!reaches(), "it is out of reach when its owner takes it away");
    // An emulated device has another BAR at the same addresses, and is detached.
    let device = container.attach_emulated(Arc::new(Idle)).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(range(0, 0x1000), PROT, &mut spans).unwrap();
    container.detach_emulated(device).unwrap();
    container.invalidate_vaddr_all().unwrap();
    let moved = container.update_vaddr(&VaddrUpdate::new(&8, user(0), Iova::new(0)));
    assert!(matches!(moved, Err(Error::StillPinned { range: r }) if r == range(0, len)));
    container.unpin_external(pin, Dirty::Written).unwrap();
    // What was taken away is not looked for.
    container.update_vaddr(&VaddrUpdate::new(&8, user(0), Iova::new(0))).unwrap();
    assert_eq!(container.unmap_all().unwrap(), len);
}
