//! Every fallible step of registering and of its end fails once: tables, hooks and pins.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, Error as DmaError, Flush, MapBufferError,
    MappedSourceError, NoPool, Registered,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::regbuf::{BufferRequest, Error};
use dmaspan::{Direction, Errno, IovaRange, PhysAddr, Prot};
use dmaspan_sim::fault::Fired;

use super::world::{Accesses as _, Behind, Host, PAGE, World, part, physical};

#[test]
fn every_failing_step_of_registering_leaves_nothing() {
    for flush in [Flush::Strict, Flush::Lazy] {
        let world = World::new();
        let behind = Behind::<12>::new(&world, flush);
        let all = world.folios(&[0; 100], 31);
        let requests = [
            BufferRequest::new(part(all, 0x123, 70 * PAGE)),
            BufferRequest::VACANT,
            BufferRequest::new(part(all, 80 * PAGE, 0x1800)),
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
    let refused = registry.register(&[BufferRequest::new(all)]).unwrap_err();
    assert_eq!(refused.errno(), Errno::EIO);
    assert_eq!((behind.state(), world.held()), ((1, (0, 1)), (4, 4 * PAGE)));
    behind.domain.flush().unwrap();
    assert_eq!((behind.state(), world.held()), ((0, (0, 0)), (0, 0)));
    registry.register(&[BufferRequest::new(all)]).unwrap();
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
        registry.register(&[BufferRequest::new(part(all, 0x10, 0x2000))]).unwrap();
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
    let refused = registry.register(&[BufferRequest::new(all)]).unwrap_err();
    world.faults.disarm();
    let Error::Buffer { error: MappedSourceError::Map(error), errno, .. } = refused else {
        panic!("{refused}");
    };
    let MapBufferError::Map { user, error: DmaError::Domain(_) } = error else { panic!("{error}") };
    assert_eq!((user, errno), (all, Errno::ENOMEM));
    assert_eq!((behind.state(), world.held()), ((0, (0, 0)), (0, 0)));
    behind.check_end();
}

/// Hooks that panic when they are told so.
#[derive(Default)]
struct Panics(AtomicBool);

impl Panics {
    fn tell(&self) -> Result<(), HardwareError> {
        assert!(!self.0.load(Ordering::Relaxed), "a hook panics");
        Ok(())
    }
}

// SAFETY: there is no device.
unsafe impl IommuOps for Panics {
    type Address = PhysAddr;

    fn invalidate(&self, _what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.tell()
    }

    fn sync_map(&self, _range: IovaRange) -> Result<(), HardwareError> {
        self.tell()
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        1
    }
}

#[test]
fn memory_stays_pinned_for_ever_where_a_hook_panics() {
    let world = World::new();
    let all = world.folios(&[0; 8], 31);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    let table = PageTable::new(format, tables).unwrap();
    let domain = Domain::new(table, Panics::default()).unwrap();
    let domain = DmaDomain::<_, _, _, _, Registered>::new(domain, DmaConfig::new(1), Host);
    let domain = Arc::new(domain.unwrap());
    let device = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(48)).unwrap();
    let panics = |panics| domain.domain().ops().0.store(panics, Ordering::Relaxed);
    // While it is mapped, and at its end.
    let buffer = physical(&world, part(all, 0, 3 * PAGE), Prot::READ);
    panics(true);
    let mapped = catch_unwind(AssertUnwindSafe(|| device.map_buffer(buffer, Prot::READ)));
    assert!(mapped.is_err());
    assert_eq!(world.held().0, 3);
    panics(false);
    let buffer = physical(&world, part(all, 4 * PAGE, 2 * PAGE), Prot::READ);
    let mapped = device.map_buffer(buffer, Prot::READ).unwrap();
    panics(true);
    assert!(catch_unwind(AssertUnwindSafe(|| drop(mapped))).is_err());
    panics(false);
    drop((device, domain));
    assert_eq!(world.held().0, 5);
}
