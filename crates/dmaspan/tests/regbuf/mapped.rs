//! Registered buffers that are mapped once: what a device finds at imported addresses.

mod failures;
mod memory;
mod refused;
mod threads;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use dmaspan::dma::{
    Device, DeviceConfig, DeviceLimits, DmaConfig, DmaDomain, Flush, FromRegistered, MappedSource,
    NoPool, Translation,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::soft::SoftIommu;
use dmaspan::iommu::{Domain, Event, Observed, Observer};
use dmaspan::platform::OneThread;
use dmaspan::regbuf::{Buffer, BufferRequest, CloneRequest, Error, Node, Registry, TagSink};
use dmaspan::{Direction, DmaAddr, Errno, Iova, PhysAddr, Prot, Span, UserAddr};
use dmaspan_sim::walker::Access;

use world::{Accesses, Behind, PAGE, RAM, Rng, USER, World, part, physical, size};

/// Writes and reads random parts of a buffer, whole pieces at a time, by a device; the user sees
/// the same bytes, and nothing else changes.
fn bytes_land(
    world: &World,
    device: &impl Accesses,
    buffer: &Buffer<DmaAddr>,
    all: dmaspan::UserRange,
    rng: &mut Rng,
) {
    let user = buffer.user();
    let mut expected = rng.bytes(size(all.checked_len().unwrap()));
    world.space.write(all.start(), &expected).unwrap();
    let before = user.start().get() - all.start().get();
    for _ in 0..100 {
        let offset = rng.below(buffer.len());
        let len = 1 + rng.below((buffer.len() - offset).min(0x3000));
        let place = size(before + offset)..size(before + offset + len);
        let mut read = Vec::new();
        for piece in buffer.import(offset, len, Direction::ToDevice).unwrap() {
            read.extend(device.read(piece).unwrap());
        }
        assert_eq!(read, expected[place.clone()], "{len:#x} bytes at {offset:#x}");
        let new = rng.bytes(size(len));
        let mut left = &new[..];
        for piece in buffer.import(offset, len, Direction::FromDevice).unwrap() {
            let (now, rest) = left.split_at(size(piece.len()));
            device.write(piece.start(), now).unwrap();
            left = rest;
        }
        assert!(left.is_empty());
        expected[place].copy_from_slice(&new);
    }
    assert!(world.read(all) == expected, "bytes elsewhere changed");
}

fn bytes_land_behind<const G: u32>(seed: u64) {
    println!("seed {seed:#x}");
    let mut rng = Rng::new(seed);
    let world = World::new();
    let behind = Behind::<G>::new(&world, Flush::Strict);
    let orders: Vec<u32> = (0..20).map(|_| [0, 0, 1, 2, 4, 5][size(rng.below(6))]).collect();
    let all = world.folios(&orders, seed);
    for _ in 0..8 {
        let offset = rng.below(all.checked_len().unwrap());
        let len = 1 + rng.below(all.checked_len().unwrap() - offset);
        let mut registry = behind.registry(&world);
        registry.register(&[BufferRequest::new(part(all, offset, len))]).unwrap();
        bytes_land(&world, &behind, registry.get(0).unwrap(), all, &mut rng);
    }
    assert_eq!(world.held(), (0, 0));
    behind.check_end();
}

#[test]
fn bytes_land_where_they_are_the_users_behind_an_iommu() {
    (1..=4).for_each(bytes_land_behind::<12>);
}

#[test]
fn bytes_land_where_granules_are_larger_than_pages() {
    (1..=4).for_each(bytes_land_behind::<14>);
    (1..=4).for_each(bytes_land_behind::<16>);
}

#[test]
fn bytes_land_where_nothing_is_translated() {
    let world = World::new();
    let device = world.direct(DeviceConfig::bits(48));
    let all = world.folios(&[0, 2, 0, 1, 0, 0], 3);
    let mut registry = Registry::new(MappedSource::new(world.pinned(), device));
    registry.register(&[BufferRequest::new(part(all, 0x123, 0x6789))]).unwrap();
    let buffer = registry.get(0).unwrap();
    bytes_land(&world, &world.memory, buffer, all, &mut Rng::new(3));
    let physical = physical(&world, part(all, 0x123, 0x6789), Prot::READ);
    let own: Vec<_> =
        physical.segments().iter().map(|span| (span.start().get(), span.len())).collect();
    let given: Vec<_> =
        buffer.segments().iter().map(|span| (span.start().get(), span.len())).collect();
    assert!(own.len() > 1);
    assert_eq!(own, given);
}

#[test]
fn scattered_pages_are_one_segment_whatever_the_device_takes_at_once() {
    let world = World::new();
    let limits = DeviceLimits { max_segment: PAGE, boundary: Some(PAGE), ..DeviceLimits::bits(48) };
    let config = DeviceConfig { limits, ..DeviceConfig::bits(48) };
    let behind = Behind::<12>::with(&world, Flush::Strict, config);
    let all = world.folios(&[0; 300], 11);
    // More runs than go into one call of the table, in each case; in one page; and in two.
    for (offset, len) in [(0, 300 * PAGE), (0x123, 0x12_0001), (0x10, 1), (0xfff, 2), (1, PAGE)] {
        let user = part(all, offset, len);
        let mut registry = behind.registry(&world);
        registry.register(&[BufferRequest::new(user)]).unwrap();
        let node = registry.get(0).unwrap();
        assert_eq!((node.segments().count(), node.len(), node.user()), (1, len, user));
        let start = node.segments().iter().next().unwrap().start();
        assert_eq!(start.get() % PAGE, offset % PAGE, "low bits are those of the memory");
        assert_eq!(node.segments().footprint(), size_of_val(node.segments()), "kept in no memory");
    }
    assert!(physical(&world, all, Prot::READ).segments().count() > 64);
    behind.check_end();
}

#[test]
fn leaves_are_as_large_as_the_memory_wherever_a_buffer_begins() {
    let world = World::new();
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let all = world.folios(&[9, 9, 9, 9], 5);
    let huge = 2 << 20;
    for offset in [0, 0x3_4567, huge - 1] {
        let mut registry = behind.registry(&world);
        registry.register(&[BufferRequest::new(part(all, offset, 4 * huge - offset))]).unwrap();
        let node = registry.get(0).unwrap();
        assert_eq!(node.segments().count(), 1);
        // All but the first, which is entered in its middle.
        for n in 1..4 {
            let at =
                node.import(n * huge - offset, 1, Direction::ToDevice).unwrap().next().unwrap();
            let hit = behind.iotlb.translate(Iova::new(at.start().get()), Access::Read).unwrap();
            assert_eq!(hit.block.checked_len(), Some(huge), "{n} of {offset:#x}");
        }
    }
    behind.check_end();
}

#[test]
fn a_long_run_without_large_leaves_costs_the_others_none() {
    let world = World::new();
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let huge = 2 << 20;
    // 3 MiB that have no aligned 2 MiB, and pages that are.
    let run = Span::new(PhysAddr::new(RAM + PAGE), 3 << 20).unwrap();
    world.memory.allocate_at(run).unwrap();
    let mut spans = vec![run];
    spans.extend(world.memory.allocate_folios(&[9; 4], 5).unwrap());
    let all = world.space.map(UserAddr::new(USER), &spans).unwrap();
    let mut registry = behind.registry(&world);
    registry.register(&[BufferRequest::new(all)]).unwrap();
    let node = registry.get(0).unwrap();
    assert_eq!(node.segments().count(), 1);
    for n in 0..4 {
        let import = node.import(run.len() + n * huge, 1, Direction::ToDevice);
        let at = import.unwrap().next().unwrap();
        let hit = behind.iotlb.translate(Iova::new(at.start().get()), Access::Read).unwrap();
        assert_eq!(hit.block.checked_len(), Some(huge), "{n}");
    }
    drop(registry);
    behind.check_end();
}

#[test]
fn no_iovas_are_left_out_for_leaves_that_memory_does_not_have() {
    let world = World::new();
    // From 4 KiB to 8 MiB.
    let behind = Behind::<12>::with(&world, Flush::Strict, DeviceConfig::bits(23));
    // 2 MiB, but twice 1 MiB that are aligned.
    let run = Span::new(PhysAddr::new(RAM + (1 << 20)), 2 << 20).unwrap();
    world.memory.allocate_at(run).unwrap();
    let all = world.space.map(UserAddr::new(USER), &[run]).unwrap();
    let buffer = physical(&world, all, Prot::READ);
    let map = || behind.device.map_buffer(Arc::clone(&buffer), Prot::READ);
    let mapped: Vec<_> = (0..3).map(|_| map().unwrap()).collect();
    assert_eq!(map().unwrap_err().errno(), Errno::ENOMEM);
    drop((mapped, buffer));
    behind.check_end();
}

#[test]
fn a_device_that_reaches_few_iovas_gets_smaller_leaves_rather_than_none() {
    let world = World::new();
    // 4 MiB, of which IOVA 0 is never handed out: there is one place for 2 MiB that is aligned.
    let config = DeviceConfig::bits(22);
    let behind = Behind::<12>::with(&world, Flush::Strict, config);
    let all = world.folios(&[9, 9], 5);
    let mut registry = behind.registry(&world);
    registry.register(&[BufferRequest::new(part(all, 0x1000, (3 << 20) + 0x800))]).unwrap();
    let mut rng = Rng::new(9);
    bytes_land(&world, &behind, registry.get(0).unwrap(), all, &mut rng);
    let last = registry.get(0).unwrap().segments().iter().next().unwrap().last();
    assert!(last.get() < 4 << 20);
    // There is no place for it a second time.
    let mut second = behind.registry(&world);
    let refused = second.register(&[BufferRequest::new(part(all, 0, 3 << 20))]).unwrap_err();
    assert_eq!(refused.errno(), Errno::ENOMEM);
    drop(registry);
    second.register(&[BufferRequest::new(part(all, 0, 3 << 20))]).unwrap();
    drop(second);
    assert_eq!(world.held(), (0, 0));
    behind.check_end();
}

#[test]
fn a_million_imports_tell_hardware_nothing_and_write_no_table() {
    let world = World::new();
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let all = world.folios(&[0, 3, 0, 1, 5, 0], 17);
    let mut registry = behind.registry(&world);
    registry.register(&[BufferRequest::new(part(all, 0x321, 0x2_0000))]).unwrap();
    let counters = || {
        let tables = behind.tables.tables();
        (behind.iotlb.counters(), tables, behind.state(), behind.sanitizer.events(), world.held())
    };
    let before = counters();
    let (mut rng, mut bytes) = (Rng::new(17), 0);
    for _ in 0..1_000_000 {
        let offset = rng.below(0x1_0000);
        let import = registry.get(0).unwrap().import(offset, 0x1_0000, Direction::FromDevice);
        bytes += import.unwrap().map(Span::len).sum::<u64>();
    }
    assert_eq!(bytes, 1_000_000 << 16);
    assert_eq!(counters(), before);
}

/// A node in flight, and where a device finds its first byte.
fn in_flight<T>(registry: &Registry<world::Source<T>>) -> (Node<DmaAddr>, Span<DmaAddr>)
where
    T: Translation<Memory: FromRegistered> + 'static,
{
    let node = registry.get(0).unwrap().clone();
    let at = node.import(0, 1, Direction::ToDevice).unwrap().next().unwrap();
    (node, at)
}

fn lives_until_the_last_reference(flush: Flush) {
    let world = World::new();
    let behind = Behind::<12>::new(&world, flush);
    let all = world.folios(&[0; 8], 2);
    let mut registry = behind.registry(&world);
    registry.register(&[BufferRequest::new(part(all, 0x10, 0x2000))]).unwrap();
    let (node, at) = in_flight(&registry);
    // Another buffer in its slot, and then no table at all.
    registry.update(0, &[BufferRequest::new(part(all, 0x4000, 0x1000))]).unwrap();
    let (second, second_at) = in_flight(&registry);
    registry.unregister().unwrap();
    assert_eq!(world.held(), (4, 4 * PAGE));
    assert_eq!(behind.state(), (2, (0, 0)));
    assert!(behind.read(at).is_some() && behind.read(second_at).is_some());
    drop(node);
    // Strictly, also in a lazy domain: nothing waits.
    assert_eq!(behind.state(), (1, (0, 0)));
    assert_eq!(world.held(), (1, PAGE));
    assert!(behind.read(at).is_none(), "no device reaches memory that is not pinned");
    assert!(behind.read(second_at).is_some());
    drop((second, registry));
    assert!(behind.read(second_at).is_none());
    assert_eq!(world.held(), (0, 0));
    behind.check_end();
}

#[test]
fn a_buffer_is_mapped_until_the_last_operation_is_done() {
    lives_until_the_last_reference(Flush::Strict);
}

#[test]
fn a_lazy_domain_unmaps_a_buffer_strictly() {
    lives_until_the_last_reference(Flush::Lazy);
}

/// Panics when a mapping is about to be ended.
struct Panics;

impl Observer for Panics {
    fn event(&self, event: &Event<'_>) {
        assert!(!matches!(event, Event::Unmapping { .. }), "on purpose");
    }
}

#[test]
fn where_an_observer_panics_the_memory_of_a_mapped_buffer_stays() {
    let world = World::new();
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, Arena::default()).unwrap();
    let hooks = Observed::new(SoftIommu::over(&table), Panics);
    let domain = Domain::new(table, hooks).unwrap();
    let domain = DmaDomain::new(domain, DmaConfig::new(1), OneThread).unwrap();
    let device = Device::erased(Arc::new(domain), NoPool, DeviceConfig::bits(48)).unwrap();
    let all = world.folios(&[0; 4], 2);
    let mapped = device.map_buffer(physical(&world, all, Prot::READ), Prot::READ).unwrap();
    let before = world.held();
    assert_ne!(before, (0, 0));
    assert!(catch_unwind(AssertUnwindSafe(|| drop(mapped))).is_err());
    assert_eq!(world.held(), before, "a device reaches freed memory");
}

#[test]
fn the_mapping_keeps_the_domain_where_the_device_is_gone() {
    let world = World::new();
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let all = world.folios(&[0; 4], 2);
    let config = DeviceConfig::bits(48);
    let other = Device::new(Arc::clone(&behind.domain), NoPool, config).unwrap();
    let mapped = other.map_buffer(physical(&world, all, Prot::READ), Prot::READ).unwrap();
    drop(other);
    let at = mapped.segments().iter().next().unwrap();
    assert!(behind.read(Span::new(at.start(), 8).unwrap()).is_some());
    drop(mapped);
    assert_eq!(world.held(), (0, 0));
    behind.check_end();
}

#[test]
fn a_device_gets_no_more_than_the_buffer_is_registered_for() {
    let world = World::new();
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let all = world.folios(&[0; 2], 2);
    for (access, reads, writes) in
        [(Prot::READ, true, false), (Prot::WRITE, false, true), (Prot::READ_WRITE, true, true)]
    {
        let mut registry = behind.registry(&world);
        registry.register(&[BufferRequest { access, ..BufferRequest::new(all) }]).unwrap();
        let node = registry.get(0).unwrap();
        let at = node.segments().import(0x10, 4).unwrap().next().unwrap();
        // What Arm's stage 1 permits to write it permits to read.
        assert_eq!(behind.read(at).is_some(), reads || writes);
        assert_eq!(behind.write(at.start(), b"data").is_some(), writes);
        assert_eq!(node.import(0, 1, Direction::ToDevice).is_ok(), reads);
        assert_eq!(node.import(0, 1, Direction::FromDevice).is_ok(), writes);
    }
    behind.check_end();
}

#[test]
fn several_devices_and_domains_map_one_buffer() {
    let world = World::new();
    let domains = [0; 2].map(|_| Behind::<12>::new(&world, Flush::Lazy));
    let direct = world.direct(DeviceConfig::bits(48));
    let all = world.folios(&[0; 4], 8);
    let buffer = physical(&world, part(all, 0x800, 0x2000), Prot::READ_WRITE);
    let map = |behind: &Behind<12>, access| {
        behind.device.map_buffer(Arc::clone(&buffer), access).unwrap()
    };
    let [first, second] = [0, 1].map(|n| map(&domains[n], Prot::READ_WRITE));
    let third = map(&domains[0], Prot::READ);
    let beside = direct.map_buffer(Arc::clone(&buffer), Prot::WRITE).unwrap();
    drop(buffer);
    assert_eq!(world.held(), (3, 3 * PAGE), "pinned and charged once");
    let at = |buffer: &Buffer<DmaAddr>| buffer.segments().import(4, 4).unwrap().next().unwrap();
    domains[0].write(at(&first).start(), b"seen").unwrap();
    assert_eq!(domains[1].read(at(&second)).unwrap(), b"seen");
    assert_eq!(world.memory.read(at(&beside)).unwrap(), b"seen");
    let gone = at(&first);
    drop((first, beside));
    assert!(domains[0].read(gone).is_none());
    assert_eq!(domains[0].read(at(&third)).unwrap(), b"seen");
    assert!(domains[0].write(at(&third).start(), b"more").is_none());
    drop(second);
    assert_eq!(world.held(), (3, 3 * PAGE));
    drop(third);
    assert_eq!(world.held(), (0, 0));
    domains.iter().for_each(Behind::check_end);
}

#[test]
fn registries_of_one_device_share_mappings_and_no_others_do() {
    let world = World::new();
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let all = world.folios(&[0; 4], 8);
    let mut first = behind.registry(&world);
    first.register(&[BufferRequest::new(all)]).unwrap();
    let mut second = behind.registry(&world);
    second.clone_from(&first, &CloneRequest::default()).unwrap();
    assert_eq!(behind.state().0, 1);
    assert_eq!(world.held(), (4, 4 * PAGE));
    // Its addresses lead elsewhere, or are out of its reach.
    let elsewhere = Behind::<12>::new(&world, Flush::Strict);
    let refused = elsewhere.registry(&world).clone_from(&first, &CloneRequest::default());
    assert!(matches!(refused, Err(Error::OtherOwner)));
    let config = DeviceConfig::bits(20);
    let near = Device::new(Arc::clone(&behind.domain), NoPool, config).unwrap();
    let mut near = Registry::new(MappedSource::new(world.pinned(), Arc::new(near)));
    let refused = near.clone_from(&first, &CloneRequest::default());
    assert!(matches!(refused, Err(Error::OtherOwner)));
    drop(first);
    let at = second.get(0).unwrap().import(0, 4, Direction::ToDevice).unwrap().next().unwrap();
    assert!(behind.read(at).is_some());
    drop(second);
    assert_eq!(world.held(), (0, 0));
    behind.check_end();
}

#[test]
fn a_tag_is_told_when_memory_is_neither_mapped_nor_pinned() {
    struct Sink(World, Arc<Behind<12>>, Mutex<Vec<u64>>, AtomicUsize);
    impl TagSink for Sink {
        fn released(&self, tag: u64) {
            self.2.lock().unwrap().push(tag);
            let live = self.1.state().0;
            assert_eq!(self.0.held().0, 2 * u64::try_from(live).unwrap());
            self.3.store(live, Ordering::Relaxed);
        }
    }
    let world = World::new();
    let behind = Arc::new(Behind::<12>::new(&world, Flush::Lazy));
    let all = world.folios(&[0; 4], 8);
    let registry = behind.registry(&world);
    let sink = Sink(world, behind, Mutex::default(), AtomicUsize::new(9));
    let sink = Arc::new(sink);
    let mut registry = registry.with_tags(Arc::clone(&sink) as Arc<dyn TagSink>);
    let tagged =
        |offset, tag| BufferRequest { tag, ..BufferRequest::new(part(all, offset, 2 * PAGE)) };
    registry.register(&[tagged(0, 5), tagged(2 * PAGE, 6)]).unwrap();
    let node = registry.get(0).unwrap().clone();
    registry.unregister().unwrap();
    assert_eq!(*sink.2.lock().unwrap(), [6]);
    assert_eq!(sink.3.load(Ordering::Relaxed), 1);
    drop(node);
    assert_eq!(*sink.2.lock().unwrap(), [6, 5]);
    assert_eq!(sink.3.load(Ordering::Relaxed), 0);
}
