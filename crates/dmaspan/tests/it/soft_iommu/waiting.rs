//! Invalidations and accesses that are under way.

use std::hint::{self, black_box};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use dmaspan::io_pgtable::{Arena, PageTable};
use dmaspan::iommu::soft::SoftIommu;
use dmaspan::iommu::{Domain, FaultAccess, FaultReason};

use super::{Format, domain, map, reach, unmap};
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
    assert_eq!((done, SAID.lock().unwrap().as_str()), (Ok(()), format!("{iommu:?}").as_str()));
    assert_eq!(format!("{iommu:?}"), "SoftIommu { phase: Serves, devices: 1, .. }");
}

/// Stops threads, also where the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Device models that do accesses without a pause, each of a few thousand steps, beside two threads
/// that do nothing but take the CPUs: `syncs` unmaps and syncs of a page that nobody uses and of
/// one that all do, none of which fails, since every access ends.
fn syncs_beside_devices(
    devices: u32,
    syncs: u64,
    iommu: SoftIommu<Format>,
    table_of: PageTable<Format, Arena>,
) {
    let domain = Domain::new(table_of, iommu.clone()).unwrap();
    let (own, all, nobodys) = (0x10_0000, 0x5000, 0x6000);
    map(&domain, own, &[span(0x20_0000, 0x10_0000)], PROT);
    let counts: Vec<AtomicU64> = (0..devices).map(|_| AtomicU64::new(0)).collect();
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = Stop(stop);
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    hint::spin_loop();
                }
            });
        }
        for (number, count) in (0..devices).zip(&counts) {
            let mut device = iommu.device(number);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let ended = count.load(Ordering::Relaxed);
                    let at = if ended % 2 == 0 { own } else { all };
                    let _ = device.access(range(at, 1), FaultAccess::Read, |_| {
                        (0..2000).for_each(|n| assert!(black_box(n) < 2000));
                        Ok::<_, ()>(())
                    });
                    count.store(ended + 1, Ordering::Relaxed);
                }
            });
        }
        while counts.iter().any(|count| count.load(Ordering::Relaxed) < 2) {
            thread::yield_now();
        }
        for n in 0..syncs {
            let at = if n % 2 == 0 { all } else { nobodys };
            map(&domain, at, &[span(0x1000, 0x1000)], PROT);
            assert!(unmap(&domain, range(at, 0x1000)).is_ok(), "sync {n} of {syncs}");
        }
    });
}

#[test]
fn no_sync_fails_beside_eight_devices_that_do_accesses_without_a_pause() {
    // One wait that spins, and one that sleeps.
    let table_of = table::<12>();
    syncs_beside_devices(8, 16, SoftIommu::over(&table_of), table_of);
    let table_of = table::<12>();
    let sleeping = SoftIommu::over(&table_of).waiting_by(|tries| {
        thread::sleep(Duration::from_micros(50));
        tries < 200_000
    });
    syncs_beside_devices(8, 16, sleeping, table_of);
}

#[test]
#[ignore = "takes minutes: `ci --full` runs it"]
fn no_sync_of_thousands_fails_beside_devices_of_any_number() {
    for devices in [1, 2, 4, 8, 16] {
        let table_of = table::<12>();
        let iommu = SoftIommu::over(&table_of).waiting_by(|tries| {
            thread::yield_now();
            tries < 1 << 30
        });
        syncs_beside_devices(devices, 5000, iommu, table_of);
    }
}

/// Between two looks of a sync its device ends the access and does others, so that it is in the
/// middle of one again: the second look finds that it need not wait for that.
#[test]
fn a_sync_that_waits_looks_at_one_access_and_not_at_those_behind_it() {
    static LOOKS: AtomicU64 = AtomicU64::new(0);
    static ACCESSES: AtomicU64 = AtomicU64::new(0);
    let table_of = table::<12>();
    let iommu = SoftIommu::over(&table_of).waiting_by(|tries| {
        LOOKS.fetch_add(1, Ordering::SeqCst);
        // The device ends the access that is under way, and is in the middle of a later one when
        // the sync looks again.
        let seen = ACCESSES.load(Ordering::SeqCst);
        while ACCESSES.load(Ordering::SeqCst) < seen + 3 {
            thread::yield_now();
        }
        tries < 1000
    });
    let domain = Domain::new(table_of, iommu.clone()).unwrap();
    map(&domain, 0x5000, &[span(0x1000, 0x2000)], PROT);
    let mut device = iommu.device(1);
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = Stop(stop);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                device
                    .access(range(0x5000, 1), FaultAccess::Read, |_| {
                        ACCESSES.fetch_add(1, Ordering::SeqCst);
                        thread::yield_now();
                        Ok::<_, ()>(())
                    })
                    .unwrap();
            }
        });
        for n in 0..200 {
            LOOKS.store(0, Ordering::SeqCst);
            assert!(unmap(&domain, range(0x6000, 0x1000)).is_ok());
            let looks = LOOKS.load(Ordering::SeqCst);
            assert!(looks <= 1, "{looks} looks, with accesses between them, in sync {n}");
            map(&domain, 0x6000, &[span(0x2000, 0x1000)], PROT);
        }
    });
}

#[test]
fn a_sync_that_waits_is_in_nobodys_way() {
    static STEP: AtomicU64 = AtomicU64::new(0);
    let table_of = table::<12>();
    let iommu = SoftIommu::over(&table_of).waiting_by(|tries| {
        STEP.fetch_max(1, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(1));
        tries < 20_000
    });
    let domain = Domain::new(table_of, iommu.clone()).unwrap();
    map(&domain, 0x5000, &[span(0x1000, 0x1000)], PROT);
    map(&domain, 0x8000, &[span(0x4000, 0x1000)], PROT);
    let mut device = iommu.device(1);
    let mut other = iommu.device(2);
    let inside = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let done = device.access(range(0x5000, 1), FaultAccess::Read, |_| {
                inside.store(true, Ordering::SeqCst);
                while STEP.load(Ordering::SeqCst) < 2 {
                    thread::yield_now();
                }
                Ok::<_, ()>(())
            });
            assert_eq!(done, Ok(()));
        });
        while !inside.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        let sync = scope.spawn(|| unmap(&domain, range(0x5000, 0x1000)).is_ok());
        while STEP.load(Ordering::SeqCst) < 1 {
            thread::yield_now();
        }
        // Others reach what is mapped, nothing of what was unmapped, and are made and dropped.
        for _ in 0..100 {
            assert_eq!(reach(&mut other, 0x8000), Ok(0x4000));
            assert_eq!(reach(&mut other, 0x5000), Err(FaultReason::Translation));
            assert_eq!(reach(&mut iommu.device(3), 0x8000), Ok(0x4000));
        }
        assert!(!sync.is_finished());
        STEP.store(2, Ordering::SeqCst);
        assert!(sync.join().unwrap());
    });
    assert_eq!(reach(&mut device, 0x5000), Err(FaultReason::Translation));
}

#[test]
fn a_sync_does_not_wait_for_an_access_that_began_after_it() {
    static AGAIN: AtomicU64 = AtomicU64::new(0);
    let table_of = table::<12>();
    let iommu = SoftIommu::over(&table_of).waiting_by(|tries| {
        AGAIN.store(tries + 1, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(1));
        tries < 20_000
    });
    let domain = Domain::new(table_of, iommu.clone()).unwrap();
    map(&domain, 0x5000, &[span(0x1000, 0x4000)], PROT);
    let mut devices = [iommu.device(1), iommu.device(2)];
    let [first, second] = &mut devices;
    let [inside, leave, later] = [const { AtomicBool::new(false) }; 3];
    let until = |flag: &AtomicBool| {
        while !flag.load(Ordering::SeqCst) {
            thread::yield_now();
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let done = first.access(range(0x5000, 1), FaultAccess::Read, |_| {
                inside.store(true, Ordering::SeqCst);
                until(&leave);
                Ok::<_, ()>(())
            });
            assert_eq!(done, Ok(()));
        });
        until(&inside);
        let sync = scope.spawn(|| unmap(&domain, range(0x6000, 0x1000)).is_ok());
        while AGAIN.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        // The second device begins one that lasts until the sync has returned.
        let done = second.access(range(0x5000, 1), FaultAccess::Read, |_| {
            later.store(true, Ordering::SeqCst);
            leave.store(true, Ordering::SeqCst);
            while !sync.is_finished() {
                thread::yield_now();
            }
            Ok::<_, ()>(())
        });
        assert_eq!(done, Ok(()));
        assert!(sync.join().unwrap());
    });
}

#[test]
fn what_a_device_was_asked_to_forget_while_it_was_busy_is_all_that_it_forgets() {
    let table_of = table::<12>();
    let iommu = SoftIommu::over(&table_of).waiting_by(|_| false);
    let domain = Domain::new(table_of, iommu.clone()).unwrap();
    let page = |n: u64| 0x10_0000 + 0x2000 * n;
    for pages in [1, 8, 9, 30] {
        let mut device = iommu.device(1);
        for n in 0..31 {
            map(&domain, page(n), &[span(0x1000 * (2 * n + 1), 0x1000)], PROT);
            assert_eq!(reach(&mut device, page(n)), Ok(0x1000 * (2 * n + 1)));
        }
        let mut gathers = Vec::new();
        let done = device.access(range(page(30), 1), FaultAccess::Read, |_| {
            // One sync for each page, none of which waits.
            gathers.extend((0..pages).map(|n| unmap(&domain, range(page(n), 0x1000)).unwrap_err()));
            Ok::<_, ()>(())
        });
        assert_eq!(done, Ok(()));
        // As many as a device keeps in mind; of more it forgets everything.
        let kept = if pages <= 8 { 31 - pages } else { 0 };
        assert_eq!(device.cached().len() as u64, kept);
        for n in 0..31 {
            let leads =
                if n < pages { Err(FaultReason::Translation) } else { Ok(0x1000 * (2 * n + 1)) };
            assert_eq!(reach(&mut device, page(n)), leads, "page {n} of {pages}");
        }
        for failed in gathers {
            // SAFETY: it was gathered from this domain.
            assert!(unsafe { domain.sync(failed.gather) }.is_ok());
        }
        for n in pages..31 {
            assert!(unmap(&domain, range(page(n), 0x1000)).is_ok());
        }
    }
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
