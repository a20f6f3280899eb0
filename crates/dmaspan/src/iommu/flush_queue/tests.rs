//! The queue, beside a plain one that was given the same calls, in whose syncs and releases there
//! may be calls again, as other threads make them. Both sync, release, keep and answer the same.

extern crate std;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::rc::Rc;
use alloc::vec;
use core::cell::{Cell, RefCell};
use core::mem::{align_of, offset_of};
use core::sync::atomic::AtomicUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::*;
use crate::addr::Iova;
use crate::iommu::ops::{Scope, Tables};
use crate::platform::OneThread;

mod plain;
mod waiting;

use plain::Plain;

/// Each retired thing has one, by the number of its unmap.
type List = Vec<u32>;
type Log = Rc<RefCell<VecDeque<Did>>>;

/// A call of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Push {
        id: u32,
        cpu: usize,
        now: u64,
    },
    /// An unmap that is synced at once, and kept where that fails.
    Strict {
        id: u32,
    },
    Expire {
        now: u64,
    },
    Flush,
    TryFlush,
}

/// How a sync or a release ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Done,
    Failed,
    Panicked,
}

/// A step of a queue. Behind a sync and a release are the calls that were made in it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Did {
    Begun(Call),
    Synced {
        tables: List,
        everything: bool,
        then: Then,
    },
    Released {
        id: u32,
        then: Then,
    },
    Leaked {
        id: u32,
    },
    /// Its range was asked for, since it leaves quarantine.
    Named {
        id: u32,
    },
    /// Dropped otherwise.
    Lost {
        id: u32,
    },
    /// A call ended; nothing is in it where it panicked.
    Ended(Option<Result<Option<u64>, HardwareError>>),
}

const NO_ANSWER: HardwareError = HardwareError { what: "no answer", status: 7 };

/// A mapping that waits for a sync.
struct Held {
    id: u32,
    log: Log,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.log.borrow_mut().push_back(Did::Lost { id: self.id });
    }
}

#[derive(Default)]
struct Machine {
    cpu: AtomicUsize,
    now: AtomicU64,
}

impl Platform for Machine {
    type Lock = Flag;

    fn cpu(&self) -> usize {
        self.cpu.load(Ordering::Relaxed)
    }

    fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }
}

fn page(id: u32) -> IovaRange {
    IovaRange::point(Iova::new(2 * u64::from(id)))
}

/// The hardware and the memory of a queue, and what comes to their minds meanwhile.
struct World<'q> {
    queue: &'q FlushQueue<Machine, List, Held>,
    machine: Machine,
    cpus: usize,
    log: Log,
    random: Cell<u64>,
    next: Cell<u32>,
    /// Of a hundred syncs so many fail.
    failing: u64,
    /// How many syncs, and how many calls, are under way.
    syncs: Cell<u32>,
    calls: Cell<u32>,
}

impl World<'_> {
    fn below(&self, n: u64) -> u64 {
        let random = self.random.get().wrapping_mul(0x5851_f42d_4c95_7f2d);
        self.random.set(random.wrapping_add(0x1405_7b7e_f767_814f));
        (self.random.get() >> 33) % n
    }

    fn say(&self, did: Did) {
        self.log.borrow_mut().push_back(did);
    }

    fn then(&self, failing: u64) -> Then {
        match self.below(100) {
            0..3 => Then::Panicked,
            n if n < 3 + failing => Then::Failed,
            _ => Then::Done,
        }
    }

    fn any_call(&self) -> Call {
        // The clock mostly stands still.
        let now = self.machine.now.load(Ordering::Relaxed);
        let id = self.next.get();
        self.next.set(id + 1);
        match self.below(20) {
            // A thread that waits for its own sync never ends.
            0 if self.syncs.get() == 0 => Call::Flush,
            1 => Call::TryFlush,
            2 | 3 => Call::Expire { now },
            4 => Call::Strict { id },
            _ => {
                let cpu = usize::try_from(self.below(7)).unwrap() % (self.cpus + 1);
                Call::Push { id, cpu, now: now + self.below(3) }
            }
        }
    }

    fn call(&self, call: Call) {
        self.say(Did::Begun(call));
        self.calls.set(self.calls.get() + 1);
        let syncs = self.syncs.get();
        let ended = catch_unwind(AssertUnwindSafe(|| self.answer(call)));
        self.syncs.set(syncs);
        self.calls.set(self.calls.get() - 1);
        self.say(Did::Ended(ended.ok()));
    }

    fn answer(&self, call: Call) -> Result<Option<u64>, HardwareError> {
        let unmapped = |id| {
            let retired =
                Retired { range: Some(page(id)), leaf_sizes: 1 << 12, tables: Some(vec![id]) };
            (retired, Held { id, log: Rc::clone(&self.log) })
        };
        match call {
            Call::Push { id, cpu, now } => {
                self.machine.cpu.store(cpu, Ordering::Relaxed);
                self.machine.now.store(now, Ordering::Relaxed);
                let (retired, held) = unmapped(id);
                self.queue.push(retired, held, &self.machine, self).map(|()| None)
            }
            Call::Strict { id } => {
                let (retired, held) = unmapped(id);
                match self.queue.sync(retired, self) {
                    Ok(()) => {
                        self.release(iter::once(held));
                        Ok(None)
                    }
                    Err(SyncFailed { gather, error }) => {
                        self.queue.keep(gather, iter::once(held), self);
                        Err(error)
                    }
                }
            }
            Call::Expire { now } => self.queue.expire(now, self),
            Call::Flush => self.queue.flush(self).map(|()| None),
            Call::TryFlush => self.queue.try_flush(self).map(|()| None),
        }
    }

    /// Calls on other threads' behalf, in the midst of this one's.
    fn meanwhile(&self) {
        if self.calls.get() > 2 || self.queue.quarantine.waiting.is_locked() {
            return;
        }
        for _ in 0..self.below(7).saturating_sub(4) {
            self.call(self.any_call());
        }
    }
}

impl Flusher for World<'_> {
    type List = List;
    type QueuedMapping = Held;

    fn gather(&self) -> Gather<List> {
        Gather::new(8)
    }

    fn add(&self, gather: &mut Gather<List>, retired: Retired<List>) {
        gather.add_with(retired, |list, more| list.extend(more));
    }

    fn merge(&self, gather: &mut Gather<List>, more: Gather<List>) {
        gather.merge_with(more, |list, more| list.extend(more));
    }

    fn sync(&self, gather: Gather<List>) -> Result<(), SyncFailed<List>> {
        let what = gather.invalidation();
        let everything = what.leaf_sizes == u64::MAX;
        let tables = gather.tables.clone().unwrap_or_default();
        match what.scope {
            Scope::All => {}
            Scope::Ranges(ranges) => {
                let covers = |id: &u32| ranges.iter().any(|range| range.covers(page(*id)));
                assert!(tables.iter().all(covers) && !everything);
            }
        }
        assert!(!everything || what.tables == Tables::Detached);
        let then = self.then(self.failing);
        self.say(Did::Synced { tables, everything, then });
        self.syncs.set(self.syncs.get() + 1);
        self.meanwhile();
        self.syncs.set(self.syncs.get() - 1);
        match then {
            Then::Done => Ok(()),
            Then::Failed => Err(SyncFailed { gather, error: NO_ANSWER }),
            Then::Panicked => resume_unwind(Box::new(())),
        }
    }

    fn sync_one(&self, retired: Retired<List>) -> Result<(), SyncFailed<List>> {
        let mut gather = self.gather();
        self.add(&mut gather, retired);
        self.sync(gather)
    }

    fn release(&self, held: impl Iterator<Item = Held>) {
        for held in held {
            let (id, then) = (held.id, self.then(0));
            mem::forget(held);
            self.say(Did::Released { id, then });
            self.meanwhile();
            if then == Then::Panicked {
                resume_unwind(Box::new(()));
            }
        }
    }

    fn range(&self, held: &Held) -> IovaRange {
        self.say(Did::Named { id: held.id });
        page(held.id)
    }

    fn leak(&self, held: Held) {
        self.say(Did::Leaked { id: held.id });
        mem::forget(held);
    }
}

#[test]
fn whatever_is_called_and_fails_the_queue_does_what_a_plain_one_does() {
    for seed in 0..240 {
        let entries = [3, 0, 1, 2, 5][seed % 5];
        let max_age = [u64::MAX, 4, 0, 12][seed / 5 % 4];
        let cpus = seed / 3 % 4;
        // Hardware that never answers fills the quarantine.
        let (calls, failing) = if seed % 20 == 7 { (900, 97) } else { (120, 25) };
        let config = Config { entries, max_age };
        let mut queue =
            FlushQueue::<Machine, List, Held>::new(cpus, config, || Gather::new(8)).unwrap();
        let log = Log::default();
        let world = World {
            queue: &queue,
            machine: Machine::default(),
            cpus,
            log: Rc::clone(&log),
            random: Cell::new(seed as u64),
            next: Cell::new(0),
            failing,
            syncs: Cell::new(0),
            calls: Cell::new(if failing == 97 { 2 } else { 0 }),
        };
        let mut plain = Plain::new(cpus, config);
        for _ in 0..calls {
            world.call(world.any_call());
            plain.follow(mem::take(&mut log.borrow_mut()));
            assert_eq!(world.queue.waiting(), plain.waiting());
        }
        let left = iter::from_fn(|| queue.pop()).map(|held| {
            let id = held.id;
            mem::forget(held);
            id
        });
        assert_eq!(left.collect::<Vec<_>>(), plain.left());
    }
}

#[test]
fn a_queue_for_more_cpus_than_memory_has_room_for_is_refused() {
    let config = Config { entries: 0, max_age: 0 };
    let refused =
        FlushQueue::<Machine, List, Held>::new(usize::MAX >> 1, config, || Gather::new(8));
    assert!(refused.is_err());
}

#[test]
fn what_every_flush_writes_is_on_no_cache_line_that_every_unmap_reads() {
    type One = FlushQueue<OneThread, (), ()>;
    let line = |offset| offset / 128;
    let tickets = line(offset_of!(One, tickets));
    let read = [offset_of!(One, slots), offset_of!(One, quarantined), offset_of!(One, config)];
    assert_eq!(align_of::<One>(), 128);
    assert!(read.iter().all(|&offset| line(offset) != tickets), "{tickets}: {read:?}");
}
