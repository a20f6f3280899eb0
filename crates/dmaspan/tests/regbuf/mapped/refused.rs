//! Buffers that cannot be mapped once and for all are refused with the reason.

use std::sync::Arc;

use dmaspan::dma::{
    Bounce, Device, DeviceConfig, DeviceLimits, Flush, MapBufferError, MappedSource,
    MappedSourceError, MustBounce, Trust,
};
use dmaspan::regbuf::{BufferRequest, Error, Registry};
use dmaspan::{Coherency, Errno, PhysAddr, Prot, Span};
use dmaspan_sim::bounce::SimPool;

use super::world::{Accesses as _, Behind, PAGE, RAM, World, part, physical};

fn pool(world: &World) -> SimPool {
    let span = Span::new(PhysAddr::new(RAM), 16 * PAGE).unwrap();
    SimPool::new(Arc::clone(&world.memory), span).unwrap()
}

#[test]
fn memory_beyond_a_device_is_refused_by_the_first_part_that_it_does_not_reach() {
    let world = World::new();
    let pool = pool(&world);
    let before = world.held();
    // Reaches all but the last frames of memory.
    let last = RAM + (32 << 20) - 1;
    let limits = DeviceLimits { last, ..DeviceLimits::bits(48) };
    let config = DeviceConfig { limits, ..DeviceConfig::bits(48) };
    let direct = Arc::clone(world.direct(DeviceConfig::bits(48)).translation());
    let device = Device::new(direct, pool.clone(), config).unwrap();
    let frame = |at, len| {
        let span = Span::new(PhysAddr::new(at), len).unwrap();
        world.memory.allocate_at(span).unwrap();
        span
    };
    let near = frame(last + 1 - 2 * PAGE, 2 * PAGE);
    let far = frame(last + 1 + PAGE, PAGE);
    let start = dmaspan::UserAddr::new(super::world::USER);
    let all = world.space.map(start, &[near, far]).unwrap();
    let buffer = physical(&world, part(all, 0x800, 0x2000), Prot::READ);
    let refused = device.map_buffer(buffer, Prot::READ).unwrap_err();
    let expected = MapBufferError::Bounced {
        part: part(all, 0x2000, 0x800),
        span: Span::new(far.start(), 0x800).unwrap(),
        why: MustBounce::Beyond { last },
    };
    assert_eq!(refused, expected);
    assert_eq!(refused.errno(), Errno::EIO);
    assert_eq!(world.held(), before);
    let buffer = physical(&world, part(all, 0x800, 0x1800), Prot::READ);
    assert!(device.map_buffer(buffer, Prot::READ).is_ok());
    assert_eq!((pool.held(), world.held()), (0, before));
}

#[test]
fn an_untrusted_device_gets_whole_granules_and_is_refused_parts() {
    let world = World::new();
    let config = DeviceConfig { trust: Trust::Untrusted, ..DeviceConfig::bits(48) };
    let behind = Behind::<12>::with(&world, Flush::Lazy, config);
    let all = world.folios(&[0, 0, 0, 0], 21);
    let mut registry = behind.registry(&world);
    registry.register(&[BufferRequest::new(all)]).unwrap();
    drop(registry);
    for (user, bad) in [
        (part(all, 0x10, 3 * PAGE), part(all, 0x10, PAGE - 0x10)),
        (part(all, 0, PAGE + 1), part(all, PAGE, 1)),
    ] {
        let mut registry = behind.registry(&world);
        let refused = registry.register(&[BufferRequest::new(user)]).unwrap_err();
        assert_eq!(refused.errno(), Errno::EPERM);
        let Error::Buffer { index: 0, error: MappedSourceError::Map(error), .. } = refused else {
            panic!("{refused}");
        };
        let MapBufferError::Bounced { part, why, .. } = error else { panic!("{error}") };
        assert_eq!((part, why), (bad, MustBounce::SharesGranule { granule: PAGE }));
        assert_eq!(world.held(), (0, 0));
    }
    behind.check_end();
}

#[test]
fn a_device_that_sees_only_its_pool_is_refused_other_memory() {
    let world = World::new();
    let pool = pool(&world);
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(48) };
    let device = Device::new(Arc::clone(&behind.domain), pool.clone(), config).unwrap();
    let all = world.folios(&[1], 21);
    let before = world.held();
    let mut registry = Registry::new(MappedSource::new(world.pinned(), Arc::new(device)));
    let refused = registry.register(&[BufferRequest::new(all)]).unwrap_err();
    assert_eq!(refused.errno(), Errno::EPERM);
    assert!(refused.to_string().contains("see nothing but its pool"), "{refused}");
    assert_eq!(world.held(), before);
    assert_eq!(pool.held(), 0);
    behind.check_end();
}

#[test]
fn a_device_that_sees_only_its_pool_maps_memory_of_the_pool() {
    let world = World::new();
    let pool = pool(&world);
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let start = dmaspan::UserAddr::new(super::world::USER);
    let all = world.space.map(start, &[pool.span()]).unwrap();
    let before = world.held();
    let amid = part(all, 0x801, 3 * PAGE);
    let seen = |trust| {
        let config = DeviceConfig { bounce: Bounce::Always, trust, ..DeviceConfig::bits(48) };
        Device::new(Arc::clone(&behind.domain), pool.clone(), config).unwrap()
    };
    let trusted = seen(Trust::Trusted);
    let mapped = trusted.map_buffer(physical(&world, amid, Prot::READ), Prot::READ).unwrap();
    let at = mapped.import(0, 4, dmaspan::Direction::ToDevice).unwrap().next().unwrap();
    world.space.write(amid.start(), b"slot").unwrap();
    assert_eq!(behind.read(at).unwrap(), b"slot");
    // Nobody but the device has whole granules of it; of parts, others have slots.
    let untrusted = seen(Trust::Untrusted);
    let whole = part(all, PAGE, 3 * PAGE);
    drop(untrusted.map_buffer(physical(&world, whole, Prot::READ), Prot::READ).unwrap());
    let buffer = physical(&world, amid, Prot::READ);
    let span = buffer.segments().iter().next().unwrap();
    let refused = untrusted.map_buffer(buffer, Prot::READ).unwrap_err();
    let why = MustBounce::SharesGranule { granule: PAGE };
    assert_eq!(refused, MapBufferError::Bounced { part: amid, span, why });
    drop(mapped);
    assert_eq!((pool.held(), world.held()), (0, before));
    behind.check_end();
}

#[test]
fn a_device_that_does_not_see_caches_is_refused() {
    let world = World::new();
    let config = DeviceConfig { coherency: Coherency::NonCoherent, ..DeviceConfig::bits(48) };
    let behind = Behind::<12>::with(&world, Flush::Strict, config);
    let all = world.folios(&[1], 21);
    let buffer = physical(&world, all, Prot::READ);
    let refused = behind.device.map_buffer(buffer, Prot::READ).unwrap_err();
    assert_eq!(refused, MapBufferError::NonCoherent { user: all });
    assert_eq!(refused.errno(), Errno::EOPNOTSUPP);
    assert_eq!(world.held(), (0, 0));
    behind.check_end();
}

#[test]
fn a_device_is_refused_what_the_buffer_is_not_registered_for() {
    let world = World::new();
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let all = world.folios(&[1], 21);
    for (access, wanted) in [
        (Prot::READ, Prot::WRITE),
        (Prot::READ, Prot::READ_WRITE),
        (Prot::WRITE, Prot::READ),
        (Prot::READ_WRITE, Prot::empty()),
    ] {
        let buffer = physical(&world, all, access);
        let refused = behind.device.map_buffer(buffer, wanted | Prot::CACHE).unwrap_err();
        assert_eq!(refused, MapBufferError::Access { user: all, access, wanted });
        assert_eq!(refused.errno(), Errno::EACCES);
    }
    assert_eq!(world.held(), (0, 0));
    behind.check_end();
}

#[test]
fn the_reason_of_the_memory_and_its_errno_are_passed_on() {
    let world = World::new();
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let all = world.folios(&[1], 21);
    let mut registry = behind.registry(&world);
    // Half of it is nobody's.
    let refused = registry.register(&[BufferRequest::new(part(all, PAGE, 2 * PAGE))]).unwrap_err();
    let Error::Buffer { error: MappedSourceError::Buffer { error, errno }, .. } = &refused else {
        panic!("{refused}");
    };
    assert_eq!((*errno, refused.errno()), (error.errno(), Errno::EFAULT));
    assert_eq!(world.held(), (0, 0));
    behind.check_end();
}
