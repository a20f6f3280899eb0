//! Invalidations and accesses that are under way.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;

use dmaspan::iommu::soft::SoftIommu;
use dmaspan::iommu::{Domain, FaultAccess, FaultReason};

use super::{domain, map, reach, unmap};
use crate::common::{PROT, range, span, table};

#[test]
fn a_sync_returns_when_the_access_that_is_under_way_has_ended() {
    static WAITED: AtomicU64 = AtomicU64::new(0);
    let table_of = table::<12>();
    let iommu = SoftIommu::over(&table_of).waiting_by(|tries| {
        WAITED.store(tries + 1, Ordering::SeqCst);
        thread::yield_now();
        true
    });
    let domain = Domain::new(table_of, iommu.clone()).unwrap();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    let [inside, ended, synced] = [const { AtomicBool::new(false) }; 3];
    let mut device = iommu.device(1);
    // The first time it is found by a walk, the second time in the IOTLB.
    for _ in 0..2 {
        WAITED.store(0, Ordering::SeqCst);
        for flag in [&inside, &ended, &synced] {
            flag.store(false, Ordering::SeqCst);
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                let done = device.access(range(0x5000, 1), FaultAccess::Write, |_| {
                    inside.store(true, Ordering::SeqCst);
                    // Until the sync waits; or it has returned, which is the bug.
                    while WAITED.load(Ordering::SeqCst) < 3 && !synced.load(Ordering::SeqCst) {
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
            let unmapped = unmap(&domain, range(0x5000, 0x1000));
            let in_time = ended.load(Ordering::SeqCst);
            synced.store(true, Ordering::SeqCst);
            assert!(unmapped.is_ok());
            assert!(in_time, "the sync returned in the middle of an access");
        });
        map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
        assert_eq!(reach(&mut device, 0x5000), Ok(0x1000));
    }
}

#[test]
fn an_unmap_from_within_an_access_is_an_error_and_the_next_sync_succeeds() {
    let table_of = table::<12>();
    let iommu = SoftIommu::over(&table_of).waiting_by(|tries| tries < 100);
    let domain = Domain::new(table_of, iommu.clone()).unwrap();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    let mut device = iommu.device(1);
    let mut failed = None;
    let done = device.access(range(0x5000, 1), FaultAccess::Read, |_| {
        failed = unmap(&domain, range(0x5000, 0x1000)).err();
        Ok::<_, ()>(())
    });
    assert_eq!(done, Ok(()));
    let failed = failed.expect("it cannot wait for itself");
    assert!(failed.error.what.contains("did not end its access"), "{failed}");
    assert_eq!(failed.error.status, 100);
    // SAFETY: it was gathered from this domain.
    assert!(unsafe { domain.sync(failed.gather) }.is_ok());
    assert_eq!(reach(&mut device, 0x5000), Err(FaultReason::Translation));
}

#[test]
fn a_domain_whose_device_never_ends_its_access_leaks_its_tables() {
    let table_of = table::<12>();
    let arena = table_of.memory().clone();
    let iommu = SoftIommu::over(&table_of).waiting_by(|tries| tries < 100);
    let domain = Domain::new(table_of, iommu.clone()).unwrap();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    let tables = arena.tables();
    let mut device = iommu.device(1);
    let mut domain = Some(domain);
    let done = device.access(range(0x5000, 1), FaultAccess::Read, |_| {
        drop(domain.take());
        Ok::<_, ()>(())
    });
    assert_eq!(done, Ok(()));
    assert_eq!(arena.tables(), tables);
    assert_eq!(reach(&mut device, 0x6000), Err(FaultReason::Blocked));
}

#[test]
fn a_wait_can_say_what_it_waits_for() {
    static SAYS: OnceLock<Box<dyn Fn() -> String + Send + Sync>> = OnceLock::new();
    static SAID: Mutex<String> = Mutex::new(String::new());
    let table_of = table::<12>();
    let iommu = SoftIommu::over(&table_of).waiting_by(|tries| {
        *SAID.lock().unwrap() = SAYS.get().map_or_else(String::new, |says| says());
        tries < 2
    });
    let said = iommu.clone();
    assert!(SAYS.set(Box::new(move || format!("{said:?}"))).is_ok());
    let domain = Domain::new(table_of, iommu.clone()).unwrap();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    let mut device = iommu.device(1);
    let done = device.access(range(0x5000, 1), FaultAccess::Read, |_| {
        assert!(unmap(&domain, range(0x5000, 0x1000)).is_err());
        Ok::<_, ()>(())
    });
    assert_eq!((done, SAID.lock().unwrap().as_str()), (Ok(()), "SoftIommu { .. }"));
    assert_eq!(format!("{iommu:?}"), "SoftIommu { phase: Serves, devices: 1, .. }");
}

#[test]
fn a_panic_within_an_access_ends_it() {
    let (domain, iommu) = domain();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    let mut device = iommu.device(1);
    for _ in 0..2 {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _ = device.access(range(0x5000, 1), FaultAccess::Read, |_| -> Result<(), ()> {
                panic!("in the middle")
            });
        }));
        assert!(panicked.is_err());
    }
    assert_eq!(reach(&mut device, 0x5000), Ok(0x1000));
    assert!(unmap(&domain, range(0x5000, 0x1000)).is_ok());
    assert_eq!(reach(&mut device, 0x5000), Err(FaultReason::Translation));
}

#[test]
fn device_models_that_are_dropped_or_forgotten_are_in_nobodys_way() {
    let (domain, iommu) = domain();
    let arena = domain.memory().clone();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    for n in 0..100 {
        let mut device = iommu.device(n);
        assert_eq!(reach(&mut device, 0x5000), Ok(0x1000));
        match n % 2 {
            0 => drop(device),
            _ => std::mem::forget(device),
        }
    }
    assert!(unmap(&domain, range(0x5000, 0x1000)).is_ok());
    drop(domain);
    assert_eq!(arena.tables(), 0, "all tables were given back");
}

#[test]
fn an_invalidation_reaches_every_device_model() {
    let (domain, iommu) = domain();
    let mut devices: Vec<_> = (0..20).map(|n| iommu.device(n)).collect();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    for device in &mut devices {
        assert_eq!(reach(device, 0x5000), Ok(0x1000));
    }
    // Some are gone, and others came.
    devices.drain(3..9);
    devices.extend((0..5).map(|n| iommu.device(n)));
    for device in &mut devices {
        assert_eq!(reach(device, 0x5000), Ok(0x1000));
    }
    assert!(unmap(&domain, range(0x5000, 0x1000)).is_ok());
    for device in &mut devices {
        assert_eq!(reach(device, 0x5000), Err(FaultReason::Translation));
    }
}
