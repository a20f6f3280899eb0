//! Magazines and the depot: all interleavings of two threads. Magazines are of two ranges, and of
//! one size.

use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::iommu::iova::{Align, Iovas, Request, Space};
use dmaspan::{Iova, IovaRange};
use loom::sync::Arc;
use loom::thread;

use crate::platform::{Machine, run_on};

const PAGE: u64 = 0x1000;

struct Shared {
    space: Space<Machine>,
    /// The owner of each page. Loom need not know: it asks after the fact.
    owned: [AtomicBool; 4],
}

impl Shared {
    fn new(pages: u64) -> Arc<Self> {
        let aperture = IovaRange::from_len(Iova::new(PAGE), pages * PAGE).unwrap();
        let space = Space::new(aperture, 12, 2, Machine::default()).unwrap();
        Arc::new(Self { space, owned: [const { AtomicBool::new(false) }; 4] })
    }

    fn pages(&self, iovas: &Iovas) -> &[AtomicBool] {
        let index = |iova: Iova| usize::try_from(iova.get() / PAGE).unwrap() - 1;
        &self.owned[index(iovas.range().start())..=index(iovas.range().last())]
    }

    fn alloc(&self, pages: u64) -> Option<Iovas> {
        let limit = Iova::new(u64::MAX);
        let request = Request { bytes: pages * PAGE, align: Align::To(PAGE), limit };
        let iovas = self.space.alloc(request).ok()?;
        for page in self.pages(&iovas) {
            assert!(!page.swap(true, Ordering::Relaxed), "two have one page");
        }
        Some(iovas)
    }

    fn free(&self, iovas: Iovas) {
        for page in self.pages(&iovas) {
            assert!(page.swap(false, Ordering::Relaxed));
        }
        self.space.free(iovas).unwrap();
    }

    /// Nothing got lost.
    fn check(&self, pages: u64) {
        assert_eq!(self.space.stats().live, 0);
        let all = self.alloc(pages).expect("all of it is free");
        self.free(all);
    }
}

/// Two threads that take and give back, on these CPUs.
fn pairs(cpus: [usize; 2]) {
    loom::model(move || {
        let shared = Shared::new(3);
        let threads = cpus.map(|cpu| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                run_on(cpu);
                let one = shared.alloc(1).expect("three are enough");
                shared.free(one);
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        shared.check(3);
    });
}

#[test]
fn threads_of_one_cpu_share_no_iova() {
    pairs([0, 0]);
}

#[test]
fn threads_of_two_cpus_share_no_iova() {
    pairs([0, 1]);
}

#[test]
fn full_magazines_go_to_the_depot_and_come_back() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let shared = Shared::new(4);
        let mut all = [0; 4].map(|_| shared.alloc(1));
        let other = Arc::clone(&shared);
        let mut take = || all.iter_mut().find_map(Option::take).expect("four");
        let [first, second, third, fourth] = [take(), take(), take(), take()];
        let thread = thread::spawn(move || {
            [first, second, third].into_iter().for_each(|iovas| other.free(iovas));
        });
        run_on(1);
        shared.free(fourth);
        let one = shared.alloc(1).expect("one was free");
        shared.free(one);
        thread.join().unwrap();
        shared.check(4);
    });
}

#[test]
fn draining_meets_who_takes_and_gives_back() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let shared = Shared::new(2);
        let [first, second] = [0, 1].map(|_| shared.alloc(1).expect("two"));
        shared.free(first);
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            other.free(second);
            // Unless the other has both.
            if let Some(one) = other.alloc(1) {
                other.free(one);
            }
        });
        run_on(1);
        if let Some(both) = shared.alloc(2) {
            shared.free(both);
        }
        thread.join().unwrap();
        shared.check(2);
    });
}

#[test]
fn what_was_freed_before_is_found_in_any_cache() {
    loom::model(|| {
        let shared = Shared::new(1);
        let only = shared.alloc(1).expect("one");
        let is_free = Arc::new(loom::sync::atomic::AtomicBool::new(false));
        let (other, tell) = (Arc::clone(&shared), Arc::clone(&is_free));
        let thread = thread::spawn(move || {
            other.free(only);
            tell.store(true, loom::sync::atomic::Ordering::Release);
        });
        run_on(1);
        if is_free.load(loom::sync::atomic::Ordering::Acquire) {
            let only = shared.alloc(1).expect("it was freed before");
            shared.free(only);
        }
        thread.join().unwrap();
        shared.check(1);
    });
}
