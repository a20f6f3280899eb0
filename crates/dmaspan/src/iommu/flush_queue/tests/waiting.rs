//! Flushes of two threads: the one that is to sync everything waits for the other.

extern crate std;

use core::sync::atomic::AtomicBool;
use core::time::Duration;
use std::sync::mpsc::channel;
use std::thread;

use super::*;

type Queue = FlushQueue<Machine, List, u32>;

/// Hardware that does this before it has forgotten.
struct Hook<F: Fn()>(F);

impl<F: Fn()> Flusher for Hook<F> {
    type List = List;
    type QueuedMapping = u32;

    fn gather(&self) -> Gather<List> {
        Gather::new(8)
    }

    fn add(&self, gather: &mut Gather<List>, retired: Retired<List>) {
        gather.add_with(retired, |list, more| list.extend(more));
    }

    fn merge(&self, gather: &mut Gather<List>, more: Gather<List>) {
        gather.merge_with(more, |list, more| list.extend(more));
    }

    fn sync(&self, _: Gather<List>) -> Result<(), SyncFailed<List>> {
        (self.0)();
        Ok(())
    }

    fn sync_one(&self, _: Retired<List>) -> Result<(), SyncFailed<List>> {
        (self.0)();
        Ok(())
    }

    fn release(&self, held: impl Iterator<Item = u32>) {
        held.for_each(drop);
    }

    fn range(&self, held: &u32) -> IovaRange {
        page(*held)
    }

    fn leak(&self, _: u32) {}
}

fn queue() -> Queue {
    FlushQueue::new(1, Config { entries: 1, max_age: 1 }, || Gather::new(8)).unwrap()
}

/// Time in which a thread that does not wait comes to its end. One that waits is right at any time.
fn give_time() {
    thread::sleep(Duration::from_millis(20));
}

#[test]
fn a_flush_of_everything_waits_until_another_thread_has_synced_its_slot() {
    let (queue, is_over) = (queue(), AtomicBool::new(false));
    let (begun, has_begun) = channel();
    let (go_on, may_go_on) = channel::<()>();
    let (flushing, is_flushing) = channel();
    thread::scope(|scope| {
        let (queue, is_over) = (&queue, &is_over);
        scope.spawn(move || {
            let hook = Hook(|| {
                begun.send(()).unwrap();
                may_go_on.recv().unwrap();
            });
            queue.push(Retired::nothing(), 0, &Machine::default(), &hook).unwrap();
        });
        has_begun.recv().unwrap();
        let flush = scope.spawn(move || {
            queue.flush(&Hook(|| flushing.send(()).unwrap())).unwrap();
            assert!(is_over.load(Ordering::Acquire), "it waited for none");
        });
        is_flushing.recv().unwrap();
        give_time();
        is_over.store(true, Ordering::Release);
        go_on.send(()).unwrap();
        flush.join().unwrap();
    });
}

#[test]
fn a_flush_of_everything_waits_for_one_of_the_quarantine_that_comes_before_it() {
    let (queue, is_over) = (queue(), AtomicBool::new(false));
    let (flushing, is_flushing) = channel();
    thread::scope(|scope| {
        let (queue, is_over) = (&queue, &is_over);
        let mut batch = queue.quarantine.waiting.lock();
        let flush = scope.spawn(move || {
            queue.flush(&Hook(|| flushing.send(()).unwrap())).unwrap();
            assert!(is_over.load(Ordering::Acquire), "it waited for none");
        });
        is_flushing.recv().unwrap();
        // It comes to the lock.
        give_time();
        let hook = Hook(|| {
            give_time();
            is_over.store(true, Ordering::Release);
        });
        let claim = queue.claim(&[]);
        let gather = queue.quarantine.begin(&mut batch, claim.ticket, &hook).unwrap();
        drop(batch);
        queue.finish(claim, gather, &hook).unwrap();
        flush.join().unwrap();
    });
}
