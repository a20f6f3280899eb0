//! Device models that are attached to one domain after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::io_pgtable::Arena;
use dmaspan::iommu::soft::{SoftDevice, SoftIommu, SoftStream};
use dmaspan::iommu::{
    AllMemory, AttachError, AttachedTo, Attachment, Domain, FaultAccess, FaultReason, IommuOps,
    Port, Prepared, ReservedRegions, Target,
};

use super::{Format, SoftDomain, domain, map, reach, unmap};
use crate::common::{PROT, range, span, table};

/// A domain that maps 0x5000 to `paddr`.
fn mapped_to(paddr: u64) -> Arc<SoftDomain> {
    let (domain, _) = domain();
    map(&domain, 0x5000, &[span(paddr, 0x1000)], PROT);
    Arc::new(domain)
}

fn paging(domain: &Arc<SoftDomain>) -> Target<SoftDomain> {
    Target::Paging(Prepared::new(Arc::clone(domain)))
}

fn stream() -> (Attachment<SoftStream<SoftDomain>>, [SoftDevice<Format, Arena>; 2]) {
    let port = SoftStream::new(7, ReservedRegions::new());
    let devices = [port.device(), port.device()];
    (Attachment::new(port).unwrap(), devices)
}

#[test]
fn every_device_model_of_a_stream_goes_where_the_stream_goes() {
    let (one, two) = (mapped_to(0x1_0000), mapped_to(0x2_0000));
    let (stream, mut devices) = stream();
    let all = |devices: &mut [SoftDevice<Format, Arena>], expected| {
        for device in devices {
            for _ in 0..2 {
                assert_eq!(reach(device, 0x5000), expected);
            }
        }
    };
    all(&mut devices, Err(FaultReason::Blocked));
    stream.attach(paging(&one)).unwrap();
    all(&mut devices, Ok(0x1_0000));
    stream.replace(paging(&two)).unwrap();
    all(&mut devices, Ok(0x2_0000));
    let mut late = stream.port().device();
    assert_eq!(reach(&mut late, 0x5000), Ok(0x2_0000));
    // SAFETY: the device models touch no memory.
    stream.replace(Target::Identity(unsafe { AllMemory::promise() })).unwrap();
    all(&mut devices, Ok(0x5000));
    assert_eq!(reach(&mut late, u64::MAX), Ok(u64::MAX));
    stream.replace(paging(&one)).unwrap();
    all(&mut devices, Ok(0x1_0000));
    stream.detach().unwrap();
    all(&mut devices, Err(FaultReason::Blocked));
    assert_eq!(stream.port().faults().reported(), 2 * 2 * 2);
}

#[test]
fn both_domains_of_a_change_have_their_syncs_heard() {
    let (one, two) = (mapped_to(0x1_0000), mapped_to(0x2_0000));
    let (stream, mut devices) = stream();
    for (domain, paddr) in [(&one, 0x1_0000), (&two, 0x2_0000), (&one, 0x1_0000)] {
        stream.replace(paging(domain)).unwrap();
        for device in &mut devices {
            assert_eq!(reach(device, 0x5000), Ok(paddr));
        }
        assert!(unmap(domain, range(0x5000, 0x1000)).is_ok());
        for device in &mut devices {
            assert_eq!(reach(device, 0x5000), Err(FaultReason::Translation));
        }
        map(domain, 0x5000, &[span(paddr, 0x1000)], PROT);
    }
}

#[test]
fn an_attached_domain_lives_and_gives_its_tables_back_when_it_is_let_go() {
    let (stream, mut devices) = stream();
    let one = mapped_to(0x1_0000);
    let arena = one.memory().clone();
    stream.attach(paging(&one)).unwrap();
    drop(one);
    assert_eq!(reach(&mut devices[0], 0x5000), Ok(0x1_0000));
    stream.replace(paging(&mapped_to(0x2_0000))).unwrap();
    assert_eq!(arena.tables(), 0, "nobody has the first domain");
    assert_eq!(reach(&mut devices[1], 0x5000), Ok(0x2_0000));
    drop(stream);
    assert_eq!(reach(&mut devices[0], 0x5000), Err(FaultReason::Blocked));
}

#[test]
fn a_domain_that_ends_takes_its_tables_from_a_stream_that_was_never_attached() {
    let port = SoftStream::<SoftDomain>::new(7, ReservedRegions::new());
    let mut device = port.device();
    let (domain, _) = domain();
    let arena = domain.memory().clone();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    port.translate(&domain).unwrap();
    assert_eq!(reach(&mut device, 0x5000), Ok(0x1000));
    drop(domain);
    assert_eq!(arena.tables(), 0);
    assert_eq!(reach(&mut device, 0x5000), Err(FaultReason::Blocked));
    // A device of the stream that comes now is given nothing either.
    assert_eq!(reach(&mut port.device(), 0x5000), Err(FaultReason::Blocked));
}

#[test]
fn hooks_that_have_let_go_of_their_tables_are_attached_to_nothing() {
    let (stream, mut devices) = stream();
    let one = mapped_to(0x1_0000);
    one.ops().detach().unwrap();
    let refused = stream.attach(paging(&one)).unwrap_err();
    assert!(matches!(refused, AttachError::Incompatible(_)), "{refused}");
    assert_eq!(stream.attached_to(), AttachedTo::Blocked);
    assert_eq!(reach(&mut devices[0], 0x5000), Err(FaultReason::Blocked));
}

#[test]
fn a_detach_waits_for_the_access_that_is_under_way() {
    let table_of = table::<12>();
    let iommu = SoftIommu::over(&table_of);
    let domain = Arc::new(Domain::new(table_of, iommu).unwrap());
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    let (stream, [mut device, _]) = stream();
    stream.attach(paging(&domain)).unwrap();
    let [inside, leave, ended] = [const { AtomicBool::new(false) }; 3];
    thread::scope(|scope| {
        scope.spawn(|| {
            let done = device.access(range(0x5000, 1), FaultAccess::Read, |_| {
                inside.store(true, Ordering::SeqCst);
                while !leave.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                ended.store(true, Ordering::SeqCst);
                Ok::<_, ()>(())
            });
            assert_eq!(done, Ok(()));
        });
        while !inside.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        // It spins until it gives up: the stream may have what it had.
        let refused = stream.detach();
        let in_time = ended.load(Ordering::SeqCst);
        leave.store(true, Ordering::SeqCst);
        assert!(matches!(refused, Err(AttachError::Hardware { .. })), "{refused:?}");
        assert!(!in_time);
        stream.detach().unwrap();
        assert!(ended.load(Ordering::SeqCst), "the detach returned in the middle of an access");
    });
    assert_eq!(reach(&mut device, 0x5000), Err(FaultReason::Blocked));
}
