//! The container: pins, mappings and charges come and go together.

use std::sync::Arc;
use std::thread;

use dmaspan::container::Error;
use dmaspan::io_pgtable::Arena;
use dmaspan::{
    Account, Container, DmaSpace, Errno, Iova, IovaRange, PhysAddr, Prot, Span, UserAddr, UserRange,
};
use dmaspan_sim::device::SimDevice;
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{Holes, SimMemory, SimPinner, SimSpace, Violation};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{PROT, faulty_domain, for_all_granules, range};

for_all_granules!(
    a_device_reaches_exactly_what_is_mapped_while_it_is_mapped,
    results_do_not_depend_on_where_batches_end,
    bad_input_is_refused_with_its_range_and_changes_nothing,
    unmapping_follows_type1_version_2,
    a_charge_over_the_limit_is_refused_before_anything_is_pinned,
    threads_map_and_unmap_disjoint_ranges_at_once,
    memory_that_hardware_does_not_forget_stays_pinned_and_out_of_use,
    dropping_a_container_unpins_everything,
    a_pin_that_fails_in_the_middle_is_taken_back_before_it_is_unpinned,
);

const USER: u64 = 0x7f00_0000_0000;

struct World<const G: u32> {
    tables: Arena,
    iotlb: Iotlb<ArmLpaeS1Walker, Arena>,
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    account: Arc<Account>,
    container: Container<SimPinner, parking_lot::RawMutex>,
}

impl<const G: u32> World<G> {
    fn new(limit: u64) -> Self {
        Self::with(limit, Holes::FoundFirst)
    }

    fn with(limit: u64, holes: Holes) -> Self {
        Self::sized(limit, holes, 8192)
    }

    fn sized(limit: u64, holes: Holes, granules: u64) -> Self {
        let (domain, tables, iotlb) = faulty_domain::<G>(&Faults::none());
        let memory = SimMemory::new(PhysAddr::new(1 << 40), granules << G, G).unwrap();
        let memory = Arc::new(memory);
        let account = Account::new(limit);
        let pinner = SimPinner::new(Arc::clone(&memory)).with_holes(holes);
        let container = Container::with_domain(pinner, domain, Arc::clone(&account));
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        Self { tables, iotlb, memory, space, account, container }
    }

    /// Scattered user memory of that many granules.
    fn user(&self, at: u64, granules: u64) -> (UserRange, Vec<Span>) {
        let spans = self.memory.allocate_scattered(granules << G, at).unwrap();
        (self.space.map(UserAddr::new(USER + (at << 32)), &spans).unwrap(), spans)
    }

    fn assert_untouched(&self) {
        assert_eq!(self.container.mappings(), 0);
        assert_eq!(self.container.census().total(), 0);
        assert_eq!(self.memory.pinned_frames(), 0);
        assert_eq!(self.account.used(), 0);
        assert_eq!(self.tables.tables(), 1, "only the root");
        assert_eq!(self.memory.violations(), []);
    }
}

fn a_device_reaches_exactly_what_is_mapped_while_it_is_mapped<const G: u32>() {
    let world = World::<G>::new(u64::MAX);
    let device = SimDevice::new(world.iotlb.clone(), Arc::clone(&world.memory));
    let granules = 700;
    let bytes = granules << G;
    let (user, _) = world.user(0, granules);
    let iova = Iova::new((1 << 30) + (5 << G));
    world.container.map(&world.space, user, iova, PROT).unwrap();
    assert_eq!(world.account.used(), bytes);
    assert_eq!(world.memory.pinned_frames(), granules);

    let pattern: Vec<u8> =
        (0..bytes).map(|n| (n ^ (n >> 8) ^ (n >> 16)).to_le_bytes()[0]).collect();
    device.write(iova, &pattern).unwrap();
    let mut seen = vec![0; pattern.len()];
    world.space.read(user.start(), &mut seen).unwrap();
    assert!(seen == pattern, "the CPU sees what the device wrote");
    let inverse: Vec<u8> = pattern.iter().map(|byte| !byte).collect();
    world.space.write(user.start(), &inverse).unwrap();
    device.read(iova, &mut seen).unwrap();
    assert!(seen == inverse, "the device sees what the CPU wrote");

    let mapped = IovaRange::from_len(iova, bytes).unwrap();
    assert_eq!(world.container.unmap(mapped).unwrap(), bytes);
    for page in (0..bytes).step_by(1 << G) {
        assert_eq!(device.probe(iova.wrapping_add(page), Access::Read), None);
    }
    world.assert_untouched();
}

fn results_do_not_depend_on_where_batches_end<const G: u32>() {
    // The same memory, seen as folios whose borders fall anywhere in a batch.
    for lead in [0, 1, 254, 255, 256, 257, 511] {
        let block = 1u64 << (2 * G - 3);
        let (per_block, folio) = (1u64 << (G - 3), 1u64 << (G - 5));
        let world = World::<G>::sized(u64::MAX, Holes::FoundFirst, 2 * per_block + 4096);
        // A run of two blocks, whose memory comes folio by folio, behind scattered pages.
        let run = world.memory.allocate(2 * block, 2 * G - 3).unwrap();
        let mut spans = world.memory.allocate_scattered(lead.max(1) << G, 3).unwrap();
        for n in 0..run.len() / (folio << G) {
            let paddr = run.paddr().wrapping_add(n * (folio << G));
            spans.push(Span::new(paddr, folio << G).unwrap());
        }
        let user = world.space.map(UserAddr::new(USER), &spans).unwrap();
        // The run is congruent to its IOVAs.
        let iova = Iova::new((per_block - lead.max(1) % per_block) << G);
        world.container.map(&world.space, user, iova, PROT).unwrap();
        let page_sizes = world.container.limits().page_sizes;
        let expected = dmaspan_sim::model::optimal_leaf_census(iova, &spans, page_sizes).unwrap();
        let census = world.container.census();
        assert_eq!(census.sizes().collect::<Vec<_>>(), expected.into_iter().collect::<Vec<_>>());
        assert!(world.container.unmap_all().unwrap() > 0);
        world.assert_untouched();
    }
}

fn bad_input_is_refused_with_its_range_and_changes_nothing<const G: u32>() {
    let world = World::<G>::new(u64::MAX);
    let g = 1u64 << G;
    let (user, _) = world.user(0, 8);
    let map = |user, iova, prot| world.container.map(&world.space, user, Iova::new(iova), prot);
    let errno = |error: &Error<_>| world.container.errno(error);

    let error = map(user, g / 2, PROT).unwrap_err();
    assert!(matches!(error, Error::Misaligned { granule, .. } if granule == g), "{error}");
    assert_eq!(errno(&error), Errno::EINVAL);
    let odd = UserRange::from_len(user.start().wrapping_add(8), g).unwrap();
    assert!(matches!(map(odd, 0, PROT), Err(Error::Misaligned { .. })));
    let short = UserRange::from_len(user.start(), g + 1).unwrap();
    assert!(matches!(map(short, 0, PROT), Err(Error::Misaligned { .. })));

    let error = map(user, 0, Prot::CACHE).unwrap_err();
    assert!(matches!(error, Error::NoAccess { .. }));
    let error = map(user, (1 << 48) - g, PROT).unwrap_err();
    assert!(
        matches!(error, Error::OutsideAperture { range: r, .. } if r == range((1 << 48) - g, 8 * g))
    );
    let error = map(user, 0u64.wrapping_sub(g), PROT).unwrap_err();
    assert_eq!(errno(&error), Errno::EOVERFLOW, "{error}");

    let nobody = UserRange::from_len(UserAddr::new(1 << 20), g).unwrap();
    let error = map(nobody, 0, PROT).unwrap_err();
    assert!(matches!(error, Error::Pin { user, .. } if user == nobody), "{error}");
    assert_eq!(errno(&error), Errno::EFAULT);
    world.assert_untouched();

    map(user, 16 * g, PROT).unwrap();
    for overlap in [16 * g, 23 * g, 9 * g] {
        let error = map(user, overlap, PROT).unwrap_err();
        let existing = range(16 * g, 8 * g);
        assert!(matches!(error, Error::Exists { existing: e, .. } if e == existing), "{error}");
        assert_eq!(errno(&error), Errno::EEXIST);
    }
    assert_eq!(world.account.used(), 8 * g);
    assert_eq!(world.memory.pinned_frames(), 8);
    assert_eq!(world.container.unmap_all().unwrap(), 8 * g);
    world.assert_untouched();

    let limited = World::<G>::new(u64::MAX);
    let (user, _) = limited.user(0, 1);
    let container = limited.container.with_max_mappings(2);
    container.map(&limited.space, user, Iova::new(0), PROT).unwrap();
    container.map(&limited.space, user, Iova::new(g), PROT).unwrap();
    assert_eq!(container.limits().mappings_left, Some(0));
    let error = container.map(&limited.space, user, Iova::new(2 * g), PROT).unwrap_err();
    assert!(matches!(error, Error::TooManyMappings { limit: 2 }));
    assert_eq!(container.errno(&error), Errno::ENOSPC);
}

fn unmapping_follows_type1_version_2<const G: u32>() {
    let world = World::<G>::new(u64::MAX);
    let g = 1u64 << G;
    let (user, _) = world.user(0, 4);
    assert_eq!(world.container.unmap(range(0, 64 * g)).unwrap(), 0, "nothing there is no error");
    for start in [4 * g, 8 * g, 32 * g] {
        world.container.map(&world.space, user, Iova::new(start), PROT).unwrap();
    }
    for (start, len) in [(0, 5 * g), (5 * g, 64 * g), (9 * g, g), (4 * g, 6 * g)] {
        let error = world.container.unmap(range(start, len)).unwrap_err();
        assert!(matches!(error, Error::Bisects { .. }), "{error}");
        assert_eq!(world.container.errno(&error), Errno::EINVAL);
        assert_eq!(world.container.mappings(), 3);
        assert_eq!(world.container.census().total(), 12);
    }
    // A range may have holes and many mappings.
    assert_eq!(world.container.unmap(range(2 * g, 12 * g)).unwrap(), 8 * g);
    assert_eq!(world.container.mappings(), 1);
    assert_eq!(world.container.unmap_all().unwrap(), 4 * g);
    world.assert_untouched();
}

fn a_charge_over_the_limit_is_refused_before_anything_is_pinned<const G: u32>() {
    let world = World::<G>::new(10 << G);
    let (user, other) = (world.user(0, 6).0, world.user(1, 6).0);
    let map = |user, at: u64| world.container.map(&world.space, user, Iova::new(at << G), PROT);
    map(user, 0).unwrap();
    let error = map(other, 64).unwrap_err();
    let Error::OverLimit { source, .. } = &error else { panic!("{error}") };
    assert_eq!((source.asked, source.used, source.limit), (6 << G, 6 << G, 10 << G));
    assert_eq!(world.container.errno(&error), Errno::ENOMEM);
    assert_eq!(world.memory.pinned_frames(), 6);
    assert_eq!(world.container.unmap_all().unwrap(), 6 << G);
    world.assert_untouched();
}

fn threads_map_and_unmap_disjoint_ranges_at_once<const G: u32>() {
    let world = World::<G>::new(u64::MAX);
    thread::scope(|scope| {
        for thread in 0..4u64 {
            let world = &world;
            scope.spawn(move || {
                let (user, _) = world.user(thread, 300);
                for round in 0..20u64 {
                    // Neighbours in the same tables, without a page between them.
                    let iova = Iova::new(((thread + 4 * (round % 3)) * 300) << G);
                    world.container.map(&world.space, user, iova, PROT).unwrap();
                    let mapped = IovaRange::from_len(iova, 300 << G).unwrap();
                    assert_eq!(world.container.unmap(mapped).unwrap(), 300 << G);
                }
            });
        }
    });
    world.assert_untouched();
}

fn memory_that_hardware_does_not_forget_stays_pinned_and_out_of_use<const G: u32>() {
    let world = World::<G>::new(u64::MAX);
    let (user, _) = world.user(0, 8);
    let at = Iova::new(0);
    world.container.map(&world.space, user, at, PROT).unwrap();
    world.iotlb.fail_next_invalidations(u64::MAX);
    let is_kept = |error: &Error<_>, bytes: u64| {
        let Error::NotForgotten { range: first, kept, unmapped, .. } = *error else { return false };
        (first, kept, unmapped) == (range(0, 8 << G), bytes, 0)
    };
    let error = world.container.unmap(range(0, 8 << G)).unwrap_err();
    assert!(is_kept(&error, 8 << G), "{error}");
    assert_eq!(world.container.errno(&error), Errno::EIO);
    assert_eq!(world.memory.pinned_frames(), 8);
    assert_eq!(world.account.used(), 8 << G);
    let error = world.container.map(&world.space, user, at, PROT).unwrap_err();
    assert!(matches!(error, Error::Quarantined { .. }), "{error}");
    let error = world.container.unmap_all().unwrap_err();
    assert!(is_kept(&error, 8 << G), "{error}");
    // It goes on where hardware knows no tables that are not there any more.
    world.container.map(&world.space, user, Iova::new(1 << 47), PROT).unwrap();
    let error = world.container.unmap_all().unwrap_err();
    assert!(is_kept(&error, 16 << G), "{error}");
    assert_eq!(world.memory.pinned_frames(), 8);
    // Hardware answers again: whatever comes next releases all.
    world.iotlb.fail_next_invalidations(0);
    world.container.map(&world.space, user, at, PROT).unwrap();
    assert_eq!((world.container.mappings(), world.account.used()), (1, 8 << G));
    assert_eq!(world.container.unmap_all().unwrap(), 8 << G);
    world.assert_untouched();
}

fn dropping_a_container_unpins_everything<const G: u32>() {
    let World { tables, memory, space, account, container, .. } = World::<G>::new(u64::MAX);
    let spans = memory.allocate_scattered(600 << G, 1).unwrap();
    let user = space.map(UserAddr::new(USER), &spans).unwrap();
    container.map(&space, user, Iova::new(0), PROT).unwrap();
    container.map(&space, user, Iova::new(1 << 40), Prot::READ).unwrap();
    drop(container);
    assert_eq!((memory.pinned_frames(), account.used()), (0, 0));
    assert_eq!(memory.violations(), []);
    assert!(spans.iter().all(|span| memory.is_dirty(span.paddr()) == Some(true)));
    assert_eq!(tables.tables(), 0, "the domain went with it");
}

fn a_pin_that_fails_in_the_middle_is_taken_back_before_it_is_unpinned<const G: u32>() {
    let world = World::<G>::with(u64::MAX, Holes::FoundOnTheWay);
    let (user, spans) = world.user(0, 700);
    assert!(spans.len() > 256, "more than a batch, so that some are mapped by then");
    let over = UserRange::new(user.start(), user.last().wrapping_add(1 << G)).unwrap();
    let error = world.container.map(&world.space, over, Iova::new(3 << G), PROT).unwrap_err();
    assert!(matches!(error, Error::Pin { .. }), "{error}");
    world.assert_untouched();
}

#[test]
fn the_simulated_memory_sees_a_device_that_touches_unpinned_frames() {
    let world = World::<12>::new(u64::MAX);
    let (_, spans) = world.user(0, 1);
    let mut byte = [0];
    let _ = dmaspan_sim::bus::Bus::read(&world.memory, spans[0].paddr(), &mut byte);
    let violations: Vec<Violation> = world.memory.violations();
    assert_eq!(violations.len(), 1);
}
