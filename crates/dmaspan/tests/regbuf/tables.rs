//! Tables: what slots have, tags, and buffers that outlive their slots.

use std::sync::{Arc, Mutex};

use dmaspan::regbuf::{Buffer, BufferRequest, CloneRequest, Existing, Keep, Registry, Segments};
use dmaspan::{Account, Direction, Errno, PhysAddr, Prot, UserRange};
use dmaspan_sim::memory::SimPinner;

use crate::common::{Of, USER, World, requests, span, user};

const PAGE: u64 = 0x1000;

/// What was told of a tag, and how many frames were pinned and bytes charged then.
type Told = Arc<Mutex<Vec<(u64, u64, u64)>>>;

struct Tagged {
    world: World,
    told: Told,
}

impl Tagged {
    fn new() -> Self {
        let world = World::new(64 * PAGE, 12);
        world.map_blocks(&[(0, 32)]);
        Self { world, told: Told::default() }
    }

    fn registry(&self) -> Of<SimPinner> {
        let (memory, account) = (Arc::clone(&self.world.memory), Arc::clone(&self.world.account));
        let told = Arc::clone(&self.told);
        let sink = move |tag| {
            told.lock().unwrap().push((tag, memory.pinned_frames(), account.used() / PAGE));
        };
        self.world.registry().with_tags(Arc::new(sink))
    }

    /// What was told since the last time.
    fn told(&self) -> Vec<(u64, u64, u64)> {
        std::mem::take(&mut self.told.lock().unwrap())
    }
}

fn page(number: u64) -> UserRange {
    user(USER + number * PAGE, PAGE)
}

fn tagged(number: u64, tag: u64) -> BufferRequest {
    BufferRequest { tag, ..BufferRequest::new(page(number)) }
}

/// What slots have, by the first page.
fn slots(registry: &Of<SimPinner>) -> Vec<Option<u64>> {
    let page = |index| {
        let node = registry.get(index).ok()?;
        Some((node.user().start().get() - USER) / PAGE)
    };
    (0..registry.slots()).map(page).collect()
}

#[test]
fn a_tag_is_told_once_when_its_slot_is_emptied_and_its_memory_is_let_go() {
    let tags = Tagged::new();
    let mut registry = tags.registry();
    registry
        .register(&[tagged(0, 7), tagged(1, 8), BufferRequest::new(page(2)), tagged(3, 9)])
        .unwrap();
    assert_eq!(registry.update(0, &[BufferRequest::VACANT]).unwrap(), 1);
    assert_eq!(tags.told(), [(7, 3, 3)]);
    // The new one is there before the old one goes.
    registry.update(1, &[tagged(1, 10)]).unwrap();
    assert_eq!(tags.told(), [(8, 3, 3)]);
    registry.update(2, &[BufferRequest::VACANT]).unwrap();
    assert_eq!(tags.told(), []);
    registry.unregister().unwrap();
    let mut told = tags.told();
    told.sort_unstable();
    assert_eq!(told.iter().map(|told| told.0).collect::<Vec<_>>(), [9, 10]);
    assert!(told.iter().any(|told| (told.1, told.2) == (0, 0)), "the last one after all: {told:?}");
    tags.world.assert_idle();
}

#[test]
fn a_tag_waits_for_what_is_in_flight() {
    let tags = Tagged::new();
    let mut registry = tags.registry();
    registry.register(&[tagged(0, 7)]).unwrap();
    let first = registry.get(0).unwrap().clone();
    let second = first.clone();
    registry.update(0, &[tagged(1, 8)]).unwrap();
    drop(first);
    assert_eq!(tags.told(), []);
    assert_eq!(tags.world.account.used(), 2 * PAGE);
    let other = registry.get(0).unwrap().clone();
    registry.unregister().unwrap();
    assert_eq!(tags.told(), []);
    drop(second);
    assert_eq!(tags.told(), [(7, 1, 1)]);
    drop(registry);
    assert_eq!(tags.told(), []);
    assert!(other.import(0, PAGE, Direction::Bidirectional).is_ok());
    drop(other);
    assert_eq!(tags.told(), [(8, 0, 0)]);
    tags.world.assert_idle();
}

#[test]
fn a_table_that_is_dropped_tells_its_tags() {
    let tags = Tagged::new();
    let mut registry = tags.registry();
    registry.register(&[tagged(0, 7)]).unwrap();
    drop(registry);
    assert_eq!(tags.told(), [(7, 0, 0)]);
}

#[test]
fn clones_have_no_tags_and_do_not_delay_them() {
    let tags = Tagged::new();
    let (mut registry, mut other) = (tags.registry(), tags.registry());
    registry.register(&[tagged(0, 7), tagged(1, 8)]).unwrap();
    other.clone_from(&registry, &CloneRequest::default()).unwrap();
    registry.update(0, &[BufferRequest::VACANT]).unwrap();
    // The clone has the memory still.
    assert_eq!(tags.told(), [(7, 2, 2)]);
    let (index, count, existing) = (5, 1, Existing::Replace);
    let within = CloneRequest { source_index: 1, index, count, existing, ..Default::default() };
    registry.clone_within(&within).unwrap();
    assert_eq!(tags.told(), []);
    registry.update(1, &[BufferRequest::VACANT]).unwrap();
    assert_eq!(tags.told(), [(8, 2, 2)]);
    drop((registry, other));
    assert_eq!(tags.told(), []);
    tags.world.assert_idle();
}

#[test]
fn a_clone_over_slots_tells_the_tags_of_those_and_of_no_others() {
    let tags = Tagged::new();
    let (mut registry, mut other) = (tags.registry(), tags.registry());
    registry.register(&[tagged(0, 7), tagged(1, 8), tagged(2, 9)]).unwrap();
    other.register(&requests(&[page(5)])).unwrap();
    let (index, existing) = (1, Existing::Replace);
    let request = CloneRequest { index, count: 1, existing, ..Default::default() };
    registry.clone_from(&other, &request).unwrap();
    assert_eq!(tags.told(), [(8, 3, 3)]);
    assert_eq!(slots(&registry), [Some(0), Some(5), Some(2)]);
}

#[test]
fn a_table_that_was_not_registered_tells_no_tags() {
    let tags = Tagged::new();
    let mut registry = tags.registry();
    let nowhere = BufferRequest::new(user(USER + 60 * PAGE, PAGE));
    registry.register(&[tagged(0, 7), tagged(1, 8), nowhere]).unwrap_err();
    assert_eq!(tags.told(), []);
    assert_eq!(registry.slots(), 0);
    tags.world.assert_idle();
}

#[test]
fn tags_without_a_sink_go_nowhere() {
    let tags = Tagged::new();
    let mut registry = tags.world.registry();
    registry.register(&[tagged(0, 7)]).unwrap();
    registry.unregister().unwrap();
    assert_eq!(tags.told(), []);
}

#[test]
fn an_update_that_stops_in_the_middle_says_how_far_it_came() {
    let tags = Tagged::new();
    let mut registry = tags.registry();
    registry.register(&[tagged(0, 1), tagged(1, 2), tagged(2, 3), tagged(3, 4)]).unwrap();
    let nowhere = BufferRequest::new(user(USER + 60 * PAGE, PAGE));
    let empty_with_tag = BufferRequest { tag: 5, ..BufferRequest::VACANT };
    for stop in [nowhere, empty_with_tag] {
        let done = registry.update(1, &[BufferRequest::new(page(9)), stop, tagged(7, 7)]).unwrap();
        assert_eq!(done, 1);
        assert_eq!(slots(&registry), [Some(0), Some(9), Some(2), Some(3)]);
        let first = registry.update(1, &[stop, tagged(7, 7)]).unwrap_err();
        assert!(matches!(first.errno(), Errno::EFAULT | Errno::EINVAL));
        assert_eq!(slots(&registry), [Some(0), Some(9), Some(2), Some(3)]);
    }
    assert_eq!(tags.told(), [(2, 4, 4)]);
    assert_eq!(tags.world.account.used(), 4 * PAGE);
}

#[test]
fn sparse_tables_are_filled_and_emptied_slot_by_slot() {
    let tags = Tagged::new();
    let mut registry = tags.registry();
    registry.register_sparse(8).unwrap();
    assert_eq!(slots(&registry), [None; 8]);
    assert!(registry.get(3).is_err());
    assert_eq!(registry.update(3, &requests(&[page(0), page(1)])).unwrap(), 2);
    assert_eq!(registry.update(7, &[tagged(2, 5)]).unwrap(), 1);
    let expected = [None, None, None, Some(0), Some(1), None, None, Some(2)];
    assert_eq!(slots(&registry), expected);
    let nodes: Vec<_> = registry.nodes().map(|(index, node)| (index, node.user())).collect();
    assert_eq!(nodes, [(3, page(0)), (4, page(1)), (7, page(2))]);
    assert_eq!(tags.world.account.used(), 3 * PAGE);
    assert_eq!(registry.update(3, &[BufferRequest::VACANT; 5]).unwrap(), 5);
    assert_eq!(slots(&registry), [None; 8]);
    assert_eq!(tags.told(), [(5, 0, 0)]);
    // As a table that was registered with empty slots.
    registry.unregister().unwrap();
    registry.register(&[BufferRequest::VACANT, tagged(2, 0)]).unwrap();
    assert_eq!(slots(&registry), [None, Some(2)]);
    registry.unregister().unwrap();
    tags.world.assert_idle();
}

#[test]
fn what_is_in_flight_keeps_its_memory_across_update_and_unregister() {
    let tags = Tagged::new();
    let mut registry = tags.registry();
    registry.register(&requests(&[page(0), page(1)])).unwrap();
    let nodes = [registry.get(0).unwrap().clone(), registry.get(1).unwrap().clone()];
    registry.update(0, &requests(&[page(2)])).unwrap();
    assert_eq!(tags.world.memory.pinned_frames(), 3);
    registry.unregister().unwrap();
    assert_eq!(tags.world.memory.pinned_frames(), 2);
    registry.register(&requests(&[page(0)])).unwrap();
    assert_eq!(tags.world.account.used(), 2 * PAGE, "a page that two buffers have is charged once");
    drop(registry);
    drop(nodes);
    tags.world.assert_idle();
}

#[test]
fn memory_that_is_only_read_is_registered_for_reading() {
    let world = World::new(64 * PAGE, 12);
    let frames = world.memory.allocate(PAGE, 12).unwrap();
    let rights = dmaspan_sim::memory::Rights::ReadOnly;
    let options = dmaspan_sim::memory::MapOptions { rights, ..Default::default() };
    let range = world.space.map_with(page(0).start(), &[frames], options).unwrap();
    let mut registry = world.registry();
    let error = registry.register(&requests(&[range])).unwrap_err();
    assert_eq!(error.errno(), Errno::EFAULT);
    let request = BufferRequest { access: Prot::READ, ..BufferRequest::new(range) };
    registry.register(&[request]).unwrap();
    let node = registry.get(0).unwrap();
    assert_eq!(node.access(), Prot::READ);
    assert!(node.import(0, 1, Direction::ToDevice).is_ok());
    for direction in [Direction::FromDevice, Direction::Bidirectional] {
        assert_eq!(node.import(0, 1, direction).unwrap_err().errno(), Errno::EFAULT);
        assert!(node.import_user(range, direction).is_err());
        assert!(node.import_vectored(&[range], direction).is_err());
    }
    registry.unregister().unwrap();
    assert_eq!(world.memory.is_dirty(frames.paddr()), Some(false));
    world.assert_idle();
}

#[test]
fn memory_that_devices_may_have_written_is_dirty_when_it_is_let_go() {
    for (access, dirty) in [(Prot::READ, false), (Prot::WRITE, true), (Prot::READ_WRITE, true)] {
        let world = World::new(64 * PAGE, 12);
        let range = world.map_blocks(&[(5, 2)]);
        let mut registry = world.registry();
        registry.register(&[BufferRequest { access, ..BufferRequest::new(range) }]).unwrap();
        drop(registry);
        let frame = PhysAddr::new(crate::common::BASE + 5 * PAGE);
        assert_eq!(world.memory.is_dirty(frame), Some(dirty), "{access:?}");
    }
}

#[test]
fn a_buffer_for_writing_is_not_read() {
    let world = World::new(64 * PAGE, 12);
    let range = world.map_blocks(&[(5, 2)]);
    let mut registry = world.registry();
    registry
        .register(&[BufferRequest { access: Prot::WRITE, ..BufferRequest::new(range) }])
        .unwrap();
    let node = registry.get(0).unwrap();
    assert!(node.import(0, 1, Direction::FromDevice).is_ok());
    assert!(node.import(0, 1, Direction::ToDevice).is_err());
    assert!(node.import(0, 1, Direction::Bidirectional).is_err());
}

/// Says when it was let go, and of how many bytes.
struct Lent(Arc<Mutex<Vec<u64>>>);

impl Keep<PhysAddr> for Lent {
    fn end(&mut self, segments: &Segments<PhysAddr>) {
        self.0.lock().unwrap().push(segments.len());
    }
}

fn lent(ends: &Arc<Mutex<Vec<u64>>>, len: u64) -> Buffer<PhysAddr> {
    let (segments, keep) = (Segments::one(span(0x9000, len)), Box::new(Lent(Arc::clone(ends))));
    // SAFETY: nothing uses the memory.
    unsafe { Buffer::new(segments, user(0x10, len), Prot::READ, keep) }.unwrap()
}

#[test]
fn a_lent_buffer_goes_when_it_is_taken_back_and_used_no_more() {
    let world = World::new(64 * PAGE, 12);
    world.map_blocks(&[(0, 8)]);
    let (mut registry, ends) = (world.registry(), Arc::default());
    registry.register(&[BufferRequest::new(page(0)), BufferRequest::VACANT]).unwrap();
    registry.lend(1, lent(&ends, 100)).unwrap();
    assert_eq!(registry.lend(0, lent(&ends, 1)).unwrap_err().errno(), Errno::EBUSY);
    assert_eq!(registry.lend(1, lent(&ends, 2)).unwrap_err().errno(), Errno::EBUSY);
    assert_eq!(registry.lend(2, lent(&ends, 3)).unwrap_err().errno(), Errno::EINVAL);
    // What was not taken is the caller's no more.
    assert_eq!(std::mem::take(&mut *ends.lock().unwrap()), [1, 2, 3]);
    assert_eq!(registry.take_back(0).unwrap_err().errno(), Errno::EBUSY);
    assert_eq!(registry.take_back(2).unwrap_err().errno(), Errno::EINVAL);
    let node = registry.get(1).unwrap().clone();
    assert!(node.import(0, 100, Direction::ToDevice).is_ok());
    assert!(node.import(0, 100, Direction::FromDevice).is_err());
    registry.take_back(1).unwrap();
    assert_eq!(registry.take_back(1).unwrap_err().errno(), Errno::EINVAL);
    assert!(ends.lock().unwrap().is_empty());
    drop(node);
    assert_eq!(*ends.lock().unwrap(), [100]);
    // An update empties a slot whatever it has.
    registry.lend(1, lent(&ends, 5)).unwrap();
    registry.update(1, &requests(&[page(1)])).unwrap();
    assert_eq!(*ends.lock().unwrap(), [100, 5]);
    assert_eq!(registry.take_back(1).unwrap_err().errno(), Errno::EBUSY);
}

#[test]
fn a_clone_of_a_lent_buffer_is_lent() {
    let world = World::new(64 * PAGE, 12);
    let (mut registry, mut other, ends) = (world.registry(), world.registry(), Arc::default());
    registry.register_sparse(1).unwrap();
    registry.lend(0, lent(&ends, 100)).unwrap();
    other.clone_from(&registry, &CloneRequest::default()).unwrap();
    registry.take_back(0).unwrap();
    assert!(ends.lock().unwrap().is_empty());
    other.take_back(0).unwrap();
    assert_eq!(*ends.lock().unwrap(), [100]);
}

#[test]
fn a_shared_buffer_is_lent_to_several_tables() {
    let world = World::new(64 * PAGE, 12);
    let (mut one, mut two, ends) = (world.registry(), world.registry(), Arc::default());
    let buffer = Arc::new(lent(&ends, 100));
    for registry in [&mut one, &mut two] {
        registry.register_sparse(2).unwrap();
        registry.lend(1, Arc::clone(&buffer)).unwrap();
    }
    drop(buffer);
    one.take_back(1).unwrap();
    drop(one);
    assert!(ends.lock().unwrap().is_empty());
    two.take_back(1).unwrap();
    assert_eq!(*ends.lock().unwrap(), [100]);
}

#[test]
fn a_keeper_of_a_range_of_another_length_is_not_asked_to_let_go() {
    let ends = Arc::default();
    let (segments, keep) = (Segments::one(span(0x9000, 8)), Box::new(Lent(Arc::clone(&ends))));
    // SAFETY: nothing uses the memory.
    let error = unsafe { Buffer::new(segments, user(0x10, 9), Prot::READ, keep) }.unwrap_err();
    assert_eq!(error.errno(), Errno::EFAULT);
    assert!(ends.lock().unwrap().is_empty());
}

/// Slots 0 to 3 of one have pages 0, none, 2 and 3; slots of another 8, 9 and none.
fn two() -> (World, Of<SimPinner>, Of<SimPinner>) {
    let world = World::new(64 * PAGE, 12);
    world.map_blocks(&[(0, 32)]);
    let (mut one, mut other) = (world.registry(), world.registry());
    let [a, b, c] = [0, 2, 3].map(|number| BufferRequest::new(page(number)));
    one.register(&[a, BufferRequest::VACANT, b, c]).unwrap();
    other
        .register(&[
            BufferRequest::new(page(8)),
            BufferRequest::new(page(9)),
            BufferRequest::VACANT,
        ])
        .unwrap();
    (world, one, other)
}

#[test]
fn whole_tables_are_cloned_with_their_empty_slots() {
    let (world, one, mut other) = two();
    other.unregister().unwrap();
    other.clone_from(&one, &CloneRequest::default()).unwrap();
    assert_eq!(slots(&other), slots(&one));
    let [theirs, mine] = [&other, &one].map(|registry| registry.get(2).unwrap().buffer());
    assert!(Arc::ptr_eq(theirs, mine));
    assert_eq!(world.account.used(), 3 * PAGE);
    drop(one);
    assert_eq!((world.account.used(), world.memory.pinned_frames()), (3 * PAGE, 3));
    drop(other);
    world.assert_idle();
}

#[test]
fn parts_of_tables_are_cloned_to_any_slot_and_the_rest_stays() {
    let clone = |source_index, index, count| {
        let existing = Existing::Replace;
        CloneRequest { source_index, index, count, existing, task: None }
    };
    for (request, expected) in [
        (clone(2, 0, 1), vec![Some(2), Some(9), None]),
        (clone(1, 0, 1), vec![None, Some(9), None]),
        (clone(2, 1, 2), vec![Some(8), Some(2), Some(3)]),
        (clone(0, 1, 4), vec![Some(8), Some(0), None, Some(2), Some(3)]),
        (clone(3, 5, 1), vec![Some(8), Some(9), None, None, None, Some(3)]),
        (clone(0, 0, 0), vec![Some(0), None, Some(2), Some(3)]),
    ] {
        let (world, one, mut other) = two();
        other.clone_from(&one, &request).unwrap();
        assert_eq!(slots(&other), expected, "{request:?}");
        assert_eq!(slots(&one), [Some(0), None, Some(2), Some(3)]);
        drop(one);
        let live = expected.iter().flatten().count();
        assert_eq!(world.memory.pinned_frames(), u64::try_from(live).unwrap(), "{request:?}");
        drop(other);
        world.assert_idle();
    }
}

#[test]
fn slots_are_cloned_within_a_table_from_what_it_was() {
    let (_world, mut one, _other) = two();
    let existing = Existing::Replace;
    let request = CloneRequest { source_index: 0, index: 1, count: 3, existing, task: None };
    one.clone_within(&request).unwrap();
    assert_eq!(slots(&one), [Some(0), Some(0), None, Some(2)]);
    let whole = CloneRequest { existing, ..CloneRequest::default() };
    one.clone_within(&whole).unwrap();
    assert_eq!(slots(&one), [Some(0), Some(0), None, Some(2)]);
}

#[test]
fn a_clone_into_a_new_table_begins_at_its_slot() {
    let (world, one, mut other) = two();
    other.unregister().unwrap();
    let request = CloneRequest { source_index: 2, index: 3, count: 2, ..CloneRequest::default() };
    other.clone_from(&one, &request).unwrap();
    assert_eq!(slots(&other), [None, None, None, Some(2), Some(3)]);
    drop((one, other));
    world.assert_idle();
}

#[test]
fn registries_of_other_sources_clone_where_owner_and_addresses_are_the_same() {
    let (world, one, _other) = two();
    let pinner = dmaspan_sim::fault::Faulty::new(world.pinner(), &Default::default());
    let (space, account) = (Arc::clone(&world.space), Arc::clone(&world.account));
    let source = dmaspan::regbuf::Pinned::new(Arc::new(pinner), space, account, 12);
    let mut other = Registry::new(source);
    other.clone_from(&one, &CloneRequest::default()).unwrap();
    assert_eq!(other.slots(), 4);
    let twin: Arc<Account> = Account::unlimited();
    let space = Arc::clone(&world.space);
    let source = dmaspan::regbuf::Pinned::new(Arc::new(world.pinner()), space, twin, 12);
    let error = Registry::new(source).clone_from(&one, &CloneRequest::default()).unwrap_err();
    assert_eq!(error.errno(), Errno::EINVAL);
}
