//! Every fallible step of registering and of its end fails once: tables, hooks and pins.

use dmaspan::dma::{Error as DmaError, Flush, MapBufferError, MappedSourceError};
use dmaspan::regbuf::{Error, Request};
use dmaspan::{Direction, Errno};
use dmaspan_sim::fault::Fired;

use super::world::{Accesses as _, Behind, PAGE, World, part};

#[test]
fn every_failing_step_of_registering_leaves_nothing() {
    for flush in [Flush::Strict, Flush::Lazy] {
        let world = World::new();
        let behind = Behind::<12>::new(&world, flush);
        let all = world.folios(&[0; 100], 31);
        let requests = [
            Request::new(part(all, 0x123, 70 * PAGE)),
            Request::VACANT,
            Request::new(part(all, 80 * PAGE, 0x1800)),
        ];
        // Roots stay.
        let mut registry = behind.registry(&world);
        registry.register(&requests).unwrap();
        registry.unregister().unwrap();
        let steps = world.faults.sweep(|n| {
            let registered = registry.register(&requests);
            let fired = world.faults.disarm();
            assert_eq!(registered.is_err(), fired == Fired::Yes, "step {n}");
            if registered.is_err() {
                assert_eq!(registry.slots(), 0, "step {n}");
                let left = (behind.state(), world.held());
                assert_eq!(left, ((0, (0, 0)), (0, 0)), "step {n}");
            } else {
                registry.unregister().unwrap();
                // Not reached.
                world.faults.arm(1);
            }
        });
        assert!(steps > 70, "{steps}");
        registry.register(&requests).unwrap();
        drop(registry);
        assert_eq!(world.held(), (0, 0));
        behind.check_end();
    }
}

#[test]
fn what_was_mapped_before_a_failure_stays_pinned_until_hardware_forgets_it() {
    let world = World::new();
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let all = world.folios(&[0; 4], 31);
    let mut registry = behind.registry(&world);
    behind.iotlb.fail_next_sync_maps(1);
    behind.iotlb.fail_next_invalidations(1);
    let refused = registry.register(&[Request::new(all)]).unwrap_err();
    assert_eq!(refused.errno(), Errno::EIO);
    assert_eq!((behind.state(), world.held()), ((1, (0, 1)), (4, 4 * PAGE)));
    behind.domain.flush().unwrap();
    assert_eq!((behind.state(), world.held()), ((0, (0, 0)), (0, 0)));
    registry.register(&[Request::new(all)]).unwrap();
    drop(registry);
    behind.check_end();
}

#[test]
fn memory_stays_pinned_in_quarantine_where_hardware_does_not_forget_it() {
    for flush in [Flush::Strict, Flush::Lazy] {
        let world = World::new();
        let behind = Behind::<12>::new(&world, flush);
        let all = world.folios(&[0; 4], 31);
        let mut registry = behind.registry(&world);
        registry.register(&[Request::new(part(all, 0x10, 0x2000))]).unwrap();
        let node = registry.get(0).unwrap().clone();
        let at = node.import(0, 4, Direction::FromDevice).unwrap().next().unwrap();
        behind.write(at.start(), b"seen").unwrap();
        drop(registry);
        behind.iotlb.fail_next_invalidations(1);
        drop(node);
        assert_eq!(behind.state(), (1, (0, 1)));
        assert_eq!(world.held(), (3, 3 * PAGE));
        // Hardware may use it still, and harms nobody.
        assert!(behind.write(at.start(), b"late").is_some());
        assert_eq!(world.read(part(all, 0x10, 4)), b"late");
        behind.domain.flush().unwrap();
        assert_eq!((behind.state(), world.held()), ((0, (0, 0)), (0, 0)));
        assert!(behind.write(at.start(), b"gone").is_none());
        behind.check_end();
    }
}

#[test]
fn a_domain_without_tables_refuses_by_name_and_keeps_nothing() {
    let world = World::new();
    let behind = Behind::<12>::new(&world, Flush::Strict);
    let all = world.folios(&[0; 2], 31);
    let mut registry = behind.registry(&world);
    // The pin, its two runs, and then the tables.
    world.faults.arm(4);
    let refused = registry.register(&[Request::new(all)]).unwrap_err();
    world.faults.disarm();
    let Error::Buffer { error: MappedSourceError::Map(error), errno, .. } = refused else {
        panic!("{refused}");
    };
    let MapBufferError::Map { user, error: DmaError::Domain(_) } = error else { panic!("{error}") };
    assert_eq!((user, errno), (all, Errno::ENOMEM));
    assert_eq!((behind.state(), world.held()), ((0, (0, 0)), (0, 0)));
    behind.check_end();
}
