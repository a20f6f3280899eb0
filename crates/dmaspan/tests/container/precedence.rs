//! A change of domains goes first, and so does a revocation: nobody begins anything while one
//! waits.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use dmaspan::container::{Attach, BusyHook, Error, GaveUp, Interrupts, MapRequest};
use dmaspan::pin::{Kind, Pinner};
use dmaspan::{Container, Iova};
use dmaspan_sim::fault::Faults;

use crate::common::{PROT, faulty_domain, range};
use crate::emulated::PAGE;
use crate::hooked::{Hooked, Hooking, Owner};
use parking_lot::lock_api::RawMutex;

const THREADS: usize = 4;

/// Gives up never, or as soon as it is told to.
#[derive(Default)]
struct Hook {
    waits: AtomicU64,
    gives_up: AtomicBool,
}

struct Shared(Arc<Hook>);

impl BusyHook for Shared {
    fn wait(&self, ready: &dyn Fn() -> bool) -> Result<(), GaveUp> {
        self.0.waits.fetch_add(1, Ordering::SeqCst);
        while !ready() {
            if self.0.gives_up.load(Ordering::SeqCst) {
                return Err(GaveUp);
            }
            thread::yield_now();
        }
        Ok(())
    }

    fn wake(&self) {}
}

type Attached = Result<(), Error<<Hooked as Pinner>::Error>>;

fn attach(container: &Hooking) -> Attached {
    attach_asking(container, &|| false)
}

fn attach_asking(container: &Hooking, cancelled: &dyn Fn() -> bool) -> Attached {
    let (domain, ..) = faulty_domain::<12>(&Faults::none());
    let how = Attach::new(Interrupts::Isolated).cancelled_by(cancelled);
    container.attach(domain, how).map(|_| ())
}

fn at(thread: u64) -> Iova {
    Iova::new(thread << 30)
}

#[test]
fn no_thread_begins_a_second_operation_while_an_attach_waits() {
    let owner = Owner::new(16);
    let hook = Arc::new(Hook::default());
    let container = owner.with_domain().with_busy_hook(Box::new(Shared(Arc::clone(&hook))));
    let [asked, alone, ended] = &[const { AtomicBool::new(false) }; 3];
    let copied = AtomicU64::new(0);
    // Operations that threads begin between the moment in which an attach waits and that in which
    // it works alone.
    let begun = [const { AtomicU64::new(0) }; THREADS];
    let (ready, all_at_work) = channel();
    thread::scope(|scope| {
        for (n, begun) in (0..).zip(&begun) {
            let (owner, container, ready) = (&owner, &container, ready.clone());
            scope.spawn(move || {
                let first = Cell::new(true);
                while !ended.load(Ordering::SeqCst) {
                    // It is asked before a batch is mapped: the operation is at work.
                    let cancelled = || {
                        if first.take() {
                            ready.send(()).unwrap();
                            // The attach has to wait for this one.
                            while !asked.load(Ordering::SeqCst) {
                                thread::yield_now();
                            }
                        } else if asked.load(Ordering::SeqCst) && !alone.load(Ordering::SeqCst) {
                            begun.fetch_add(1, Ordering::SeqCst);
                        }
                        false
                    };
                    let pages = owner.pages(4 * n, 4);
                    let request = MapRequest::new(&owner.space, pages, at(n), PROT);
                    container.map_request(&request.cancelled_by(&cancelled)).unwrap();
                    container.unmap(range(at(n).get(), 4 * PAGE)).unwrap();
                }
            });
        }
        (0..THREADS).for_each(|_| all_at_work.recv().unwrap());
        let attaching = scope.spawn(|| {
            // Asked while the mappings of the four are copied: nobody else works.
            let first_only = || {
                alone.store(true, Ordering::SeqCst);
                assert_eq!(container.mappings(), 4, "no more maps");
                assert_eq!(*container.pinner().unpinned.lock(), (0, 0), "no unmap has begun");
                copied.fetch_add(1, Ordering::SeqCst);
                false
            };
            attach_asking(&container, &first_only).unwrap();
            ended.store(true, Ordering::SeqCst);
        });
        // All four are in the middle of a map, and the attach waits by the hook.
        while hook.waits.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        asked.store(true, Ordering::SeqCst);
        attaching.join().unwrap();
    });
    for begun in &begun {
        assert_eq!(begun.load(Ordering::SeqCst), 0, "while an attach waits");
    }
    assert_eq!(copied.load(Ordering::SeqCst), 4);
    assert_eq!(container.info().domains.len(), 2);
    owner.assert_untouched();
}

#[test]
fn without_a_hook_an_attach_waits_for_what_others_are_at_and_they_are_refused() {
    let owner = Owner::new(16);
    let container = owner.with_domain();
    let (ready, at_work) = channel();
    thread::scope(|scope| {
        let cancelled = || {
            ready.send(()).unwrap();
            // Refused only once an attach waits for this very operation.
            let other = || container.map(&owner.space, owner.pages(4, 4), at(1), PROT);
            loop {
                let refused = other().and_then(|_| container.unmap(range(at(1).get(), 4 * PAGE)));
                match refused {
                    Ok(_) => thread::yield_now(),
                    Err(Error::Changing) => return false,
                    Err(error) => panic!("{error}"),
                }
            }
        };
        let container = &container;
        let attaching = scope.spawn(move || {
            at_work.recv().unwrap();
            while let Err(error) = attach(container) {
                assert!(matches!(error, Error::Changing), "{error}");
            }
        });
        let request = MapRequest::new(&owner.space, owner.pages(0, 4), at(0), PROT);
        container.map_request(&request.cancelled_by(&cancelled)).unwrap();
        attaching.join().unwrap();
    });
    assert_eq!(container.info().domains.len(), 2);
}

#[test]
fn whoever_gives_up_withdraws_its_claim() {
    let owner = Owner::new(16);
    let hook = Arc::new(Hook::default());
    hook.gives_up.store(true, Ordering::SeqCst);
    let hooked = owner.with_domain().with_busy_hook(Box::new(Shared(Arc::clone(&hook))));
    let spinning = owner.with_domain();
    for container in [&hooked, &spinning] {
        let cancelled = || {
            for _ in 0..2 {
                assert!(matches!(attach(container), Err(Error::Changing)));
                assert!(matches!(container.start_dirty(), Err(Error::Changing)));
            }
            // In the middle of the other one, with no claim left.
            let (space, user) = (&owner.space, owner.pages(4, 4));
            container.map(space, user, at(1), PROT).unwrap();
            container.unmap(range(at(1).get(), 4 * PAGE)).unwrap();
            false
        };
        let request = MapRequest::new(&owner.space, owner.pages(0, 4), at(0), PROT);
        container.map_request(&request.cancelled_by(&cancelled)).unwrap();
        attach(container).unwrap();
        container.unmap_all().unwrap();
    }
    owner.assert_untouched();
}

/// A hook that panics.
struct Panics;

impl BusyHook for Panics {
    fn wait(&self, _ready: &dyn Fn() -> bool) -> Result<(), GaveUp> {
        panic!("while it waits");
    }

    fn wake(&self) {}
}

#[test]
fn a_panic_in_the_hook_withdraws_the_claim() {
    let owner = Owner::new(16);
    let container = owner.with_domain().with_busy_hook(Box::new(Panics));
    let cancelled = || {
        let attaching = std::panic::AssertUnwindSafe(|| attach(&container));
        assert!(std::panic::catch_unwind(attaching).is_err());
        false
    };
    let request = MapRequest::new(&owner.space, owner.pages(0, 4), at(0), PROT);
    container.map_request(&request.cancelled_by(&cancelled)).unwrap();
    assert_eq!(container.unmap_all().unwrap(), 4 * PAGE);
    attach(&container).unwrap();
}

/// An owner, and a container whose odd frames are a device's.
fn with_device_memory() -> (Owner, Hooking) {
    let owner = Owner::new(16);
    let mut pinner = owner.pinner();
    pinner.odd = Kind::Mmio;
    let (domain, ..) = faulty_domain::<12>(&Faults::none());
    let container = Container::with_domain(pinner, domain, Arc::clone(&owner.account));
    (owner, container)
}

#[test]
fn no_thread_begins_to_map_while_a_revocation_waits() {
    let (owner, container) = with_device_memory();
    let hook = Arc::new(Hook::default());
    let container = container.with_busy_hook(Box::new(Shared(Arc::clone(&hook))));
    let (begun, meanwhile) = (AtomicU64::new(0), AtomicU64::new(0));
    let waits_or_begun = |n| {
        while hook.waits.load(Ordering::SeqCst) + begun.load(Ordering::SeqCst) < n {
            thread::yield_now();
        }
    };
    thread::scope(|scope| {
        let (owner, container, waits_or_begun, begun) =
            (&owner, &container, &waits_or_begun, &begun);
        let first = Cell::new(true);
        // It is asked in the middle of the map that the revocation has to wait for.
        let cancelled = || {
            if !first.take() {
                return false;
            }
            scope.spawn(|| container.revoke(&owner.space, owner.user).unwrap());
            waits_or_begun(1);
            for n in (1..).take(THREADS) {
                scope.spawn(move || {
                    let begins = || {
                        begun.fetch_add(1, Ordering::SeqCst);
                        false
                    };
                    let pages = owner.pages(0, 4);
                    let request = MapRequest::new(&owner.space, pages, at(n), PROT);
                    container.map_request(&request.cancelled_by(&begins)).unwrap();
                });
            }
            waits_or_begun(1 + THREADS as u64);
            meanwhile.store(begun.load(Ordering::SeqCst), Ordering::SeqCst);
            false
        };
        let request = MapRequest::new(&owner.space, owner.pages(0, 4), at(0), PROT);
        container.map_request(&request.cancelled_by(&cancelled)).unwrap();
    });
    assert_eq!(meanwhile.into_inner(), 0, "while a revocation waits");
    assert_eq!(container.mappings(), 1 + THREADS);
    container.unmap_all().unwrap();
    owner.assert_untouched();
}

#[test]
fn without_a_hook_a_revocation_waits_for_a_map_and_others_are_refused() {
    let (owner, container) = with_device_memory();
    let (ready, at_work) = channel();
    let failed = AtomicU64::new(0);
    thread::scope(|scope| {
        let (owner, container, failed) = (&owner, &container, &failed);
        let cancelled = || {
            ready.send(()).unwrap();
            // Refused only once the revocation waits for this very operation.
            loop {
                let other = container.map(&owner.space, owner.pages(4, 4), at(1), PROT);
                match other.and_then(|_| container.unmap(range(at(1).get(), 4 * PAGE))) {
                    Ok(_) => thread::yield_now(),
                    // It may come between the two: what is mapped then is found when asked again.
                    Err(Error::Changing | Error::Exists { .. }) => return false,
                    Err(error) => assert!(matches!(error, Error::Busy { .. }), "{error}"),
                }
                // It waits some time, and nobody begins in all of it.
                if failed.load(Ordering::SeqCst) > 1000 {
                    return false;
                }
            }
        };
        let revoking = scope.spawn(move || {
            at_work.recv().unwrap();
            loop {
                match container.revoke(&owner.space, owner.user) {
                    Err(Error::Busy { .. } | Error::Changing) => {
                        failed.fetch_add(1, Ordering::SeqCst);
                    }
                    revoked => return revoked.unwrap(),
                }
            }
        });
        let request = MapRequest::new(&owner.space, owner.pages(0, 4), at(0), PROT);
        container.map_request(&request.cancelled_by(&cancelled)).unwrap();
        let odd =
            owner.frames[..4].iter().filter(|frame| frame.get() >> 12 & 1 == 1).count() as u64;
        assert!(odd > 0 && revoking.join().unwrap() >= odd * PAGE);
    });
    assert!(failed.into_inner() <= 1000, "it does not go first");
    container.unmap_all().unwrap();
    owner.assert_untouched();
}

#[test]
fn a_revocation_and_an_attach_wait_for_each_other_and_both_end() {
    let (owner, container) = with_device_memory();
    let hook = Arc::new(Hook::default());
    let container = container.with_busy_hook(Box::new(Shared(Arc::clone(&hook))));
    thread::scope(|scope| {
        let (owner, container, hook) = (&owner, &container, &hook);
        let waits = |n| {
            while hook.waits.load(Ordering::SeqCst) < n {
                thread::yield_now();
            }
        };
        for attach_first in [true, false] {
            hook.waits.store(0, Ordering::SeqCst);
            let first = Cell::new(true);
            let cancelled = || {
                if !first.take() {
                    return false;
                }
                let attaching = || attach(container).unwrap();
                let revoking = || assert!(container.revoke(&owner.space, owner.user).is_ok());
                for n in 0..2 {
                    match attach_first == (n == 0) {
                        true => drop(scope.spawn(attaching)),
                        false => drop(scope.spawn(revoking)),
                    }
                    waits(n + 1);
                }
                false
            };
            let request = MapRequest::new(&owner.space, owner.pages(0, 4), at(0), PROT);
            container.map_request(&request.cancelled_by(&cancelled)).unwrap();
            container.unmap_all().unwrap();
        }
    });
    assert_eq!(container.info().domains.len(), 3);
    container.unmap_all().unwrap();
    owner.assert_untouched();
}

thread_local! {
    /// How often this thread asked for a lock.
    static LOCKS: Cell<u64> = const { Cell::new(0) };
}

/// A lock that counts who asks for it.
struct Counted(parking_lot::RawMutex);

// SAFETY: it is the inner lock.
unsafe impl RawMutex for Counted {
    const INIT: Self = Self(parking_lot::RawMutex::INIT);

    type GuardMarker = <parking_lot::RawMutex as RawMutex>::GuardMarker;

    fn lock(&self) {
        LOCKS.set(LOCKS.get() + 1);
        self.0.lock();
    }

    fn try_lock(&self) -> bool {
        LOCKS.set(LOCKS.get() + 1);
        self.0.try_lock()
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller holds it.
        unsafe { self.0.unlock() };
    }
}

#[test]
fn the_steps_of_an_attach_are_bounded_by_mappings_and_threads_also_where_syncs_fail() {
    let owner = Owner::new(16);
    let (domain, _, iotlb) = faulty_domain::<12>(&Faults::none());
    let container: Container<Hooked, Counted> =
        Container::with_domain(owner.pinner(), domain, Arc::clone(&owner.account));
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        for n in (0..).take(THREADS) {
            let (owner, container, ended, iotlb) = (&owner, &container, &ended, &iotlb);
            scope.spawn(move || {
                for step in 1u64.. {
                    if ended.load(Ordering::SeqCst) {
                        break;
                    }
                    if step % 100 == 0 {
                        iotlb.fail_next_invalidations(1);
                    }
                    let _ = container.map(&owner.space, owner.pages(4 * n, 4), at(n), PROT);
                    let _ = container.unmap(range(at(n).get(), 4 * PAGE));
                }
            });
        }
        let mut most = 0;
        for _ in 0..50 {
            let before = LOCKS.get();
            let (domain, ..) = faulty_domain::<12>(&Faults::none());
            let attached = container.attach(domain, Attach::new(Interrupts::Isolated));
            most = most.max(LOCKS.get() - before);
            if let Ok(id) = attached {
                let _ = container.detach(id);
            }
        }
        ended.store(true, Ordering::SeqCst);
        println!("at most {most} locks");
        // A handful, for each mapping, and for each operation that had begun.
        assert!(most <= 10 + 10 * THREADS as u64, "{most}");
    });
    iotlb.fail_next_invalidations(0);
    container.unmap_all().unwrap();
    owner.assert_untouched();
}

/// Says how long it took too: `cargo test -p dmaspan --test container under_four -- --nocapture`.
#[test]
fn attaches_succeed_under_four_mapping_threads_with_a_hook_and_without() {
    for hook in [None, Some(Arc::new(Hook::default()))] {
        let owner = Owner::new(16);
        let mut container = owner.with_domain();
        if let Some(hook) = &hook {
            container = container.with_busy_hook(Box::new(Shared(Arc::clone(hook))));
        }
        let ended = AtomicBool::new(false);
        let maps = AtomicU64::new(0);
        let (mut tries, begun) = (0, std::time::Instant::now());
        thread::scope(|scope| {
            for n in (0..).take(THREADS) {
                let (owner, container, ended, maps) = (&owner, &container, &ended, &maps);
                scope.spawn(move || {
                    while !ended.load(Ordering::SeqCst) {
                        let mapped =
                            container.map(&owner.space, owner.pages(4 * n, 4), at(n), PROT);
                        maps.fetch_add(u64::from(mapped.is_ok()), Ordering::SeqCst);
                        match mapped.map(|_| ()) {
                            // Without a hook: `Busy` while an attach copies the mapping.
                            Ok(()) | Err(Error::Changing | Error::Busy { .. }) => {}
                            // The thread's own, whose unmap an attach forestalled.
                            Err(Error::Exists { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                        match container.unmap(range(at(n).get(), 4 * PAGE)) {
                            Ok(_) | Err(Error::Changing | Error::Busy { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            for _ in 0..20 {
                tries += 1;
                while attach(&container).is_err() {
                    tries += 1;
                }
            }
            ended.store(true, Ordering::SeqCst);
        });
        let (took, maps) = (begun.elapsed(), maps.into_inner());
        println!("20 attaches in {tries} tries and {took:?}, beside {maps} maps");
        assert_eq!(container.info().domains.len(), 21);
        container.unmap_all().unwrap();
        owner.assert_untouched();
    }
}
