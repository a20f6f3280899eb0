//! Every step that may fail, failing: memory, and the host that shares and takes back. What fails
//! changes nothing, but for what leaks because nobody knows who sees it.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::swiotlb::{
    Error, Growth, HostRefused, InSlot, Pool, PoolConfig, PoolMemory, Room, SlotRequest, Transfer,
};
use dmaspan::{Platform, Promise, Span};
use dmaspan_sim::fault::Fired;
use dmaspan_sim::pool_memory::SimPoolMemory;

use crate::common::{Cpu, ORIGINALS, RAM, Rig, SLOT, Slot, original, span};

const LIMIT: u64 = 8 * SLOT;

fn rig() -> Rig {
    let growth = Growth { step: 4 * SLOT, limit: LIMIT, last: u64::MAX };
    Rig::with(4, PoolConfig { growth: Some(growth), ..PoolConfig::new(2) })
}

fn take(rig: &Rig, slots: u64) -> Result<Slot, Error> {
    rig.pool.take(original(ORIGINALS, slots * SLOT), &SlotRequest::default())
}

/// Runs `act` on what `prepare` made with its first step failing, its second, … until none does.
/// What was allocated is what the books say; what leaked is lost, and counts against the limit;
/// everything else is there again.
fn sweep<T>(prepare: fn(&Rig) -> T, act: fn(&Rig, T) -> Vec<Slot>, steps: u32) {
    for n in 1.. {
        let rig = rig();
        let prepared = prepare(&rig);
        rig.faults.arm(n);
        let slots = act(&rig, prepared);
        let fired = rig.faults.disarm();
        for slot in slots {
            rig.pool.release(slot).unwrap();
        }
        rig.pool.shrink();
        let (stats, lost) = (rig.pool.stats(), rig.pool_memory.grown());
        assert_eq!((stats.used, stats.single, stats.grown), (0, 0, 0), "step {n}");
        assert_eq!(stats.leaked, lost.iter().map(|lost| lost.len()).sum::<u64>(), "step {n}");
        // What is left of the limit is there to the last slot, and no more.
        let base = take(&rig, 4).unwrap();
        let left = (LIMIT - stats.leaked) / SLOT;
        let singles: Vec<Slot> = (0..left).map(|_| take(&rig, 1).unwrap()).collect();
        assert!(take(&rig, 1).is_err(), "step {n}: more than the limit");
        let overlaps = |slot: &Slot| {
            let span = slot.span();
            lost.iter().any(|lost| lost.paddr() <= span.last() && span.paddr() <= lost.last())
        };
        assert!(!singles.iter().any(overlaps), "step {n}: what leaked is used again");
        for slot in singles.into_iter().chain([base]) {
            rig.pool.release(slot).unwrap();
        }
        if fired == Fired::No {
            assert_eq!((n - 1, stats.leaked), (steps, 0));
            return;
        }
    }
}

#[test]
fn memory_for_one_request_that_fails_is_lost_only_where_the_host_may_see_it() {
    sweep(
        |rig| vec![take(rig, 4).unwrap()],
        |rig, mut slots| {
            slots.extend(take(rig, 2));
            slots
        },
        2,
    );
    sweep(
        |rig| [take(rig, 4).unwrap(), take(rig, 2).unwrap()],
        |rig, [base, single]| {
            rig.pool.release(single).unwrap();
            vec![base]
        },
        1,
    );
}

#[test]
fn a_pool_grows_and_shrinks_or_does_not_and_works_on() {
    sweep(
        |_| (),
        |rig, ()| {
            let grown = rig.pool.grow();
            assert_eq!(grown.is_ok(), rig.pool.stats().grown == 4 * SLOT);
            vec![]
        },
        2,
    );
    sweep(
        |rig| [(); 2].map(|()| rig.pool.grow().unwrap()),
        |rig, _| {
            let bytes = rig.pool.shrink();
            assert_eq!(bytes + rig.pool.stats().leaked, 8 * SLOT, "it says what it gave back");
            vec![]
        },
        2,
    );
}

#[test]
fn a_lease_fails_whole() {
    sweep(
        |rig| vec![take(rig, 4).unwrap()],
        |rig, slots| {
            drop(rig.pool.lease(3 * SLOT, &SlotRequest::default()));
            slots
        },
        3,
    );
}

/// What became of a pool's memory.
#[derive(Default)]
struct Fate {
    is_dropped: AtomicBool,
    /// The host did not do as it was asked.
    is_refused: AtomicBool,
}

/// A pool's memory that says what became of it, and may panic where the host refuses.
struct Dropped {
    inner: SimPoolMemory,
    fate: Arc<Fate>,
    fails: Fails,
}

#[derive(Clone, Copy)]
enum Fails {
    Says,
    Panics,
}

impl Dropped {
    fn said(&self, result: Result<(), HostRefused>) -> Result<(), HostRefused> {
        if result.is_err() {
            self.fate.is_refused.store(true, Ordering::Relaxed);
            assert!(matches!(self.fails, Fails::Says), "the hook panics");
        }
        result
    }
}

impl Drop for Dropped {
    fn drop(&mut self) {
        self.fate.is_dropped.store(true, Ordering::Relaxed);
    }
}

// SAFETY: all of it is the inner memory's.
unsafe impl PoolMemory for Dropped {
    type Address = dmaspan::PhysAddr;

    fn spans(&self) -> &[Span] {
        self.inner.spans()
    }

    fn copy(&self, transfer: Transfer) {
        self.inner.copy(transfer);
    }

    fn zero(&self, bytes: InSlot) {
        self.inner.zero(bytes);
    }

    fn read(&self, bytes: InSlot, into: &mut [u8]) {
        self.inner.read(bytes, into);
    }

    fn write(&self, bytes: InSlot, from: &[u8]) {
        self.inner.write(bytes, from);
    }

    fn allocate(&self, room: Room) -> Option<Span> {
        self.inner.allocate(room)
    }

    fn free(&self, promise: Promise<'_>, span: Span) {
        self.inner.free(promise, span);
    }

    fn share(&self, promise: Promise<'_>, span: Span) -> Result<(), HostRefused> {
        self.said(self.inner.share(promise, span))
    }

    fn unshare(&self, promise: Promise<'_>, span: Span) -> Result<(), HostRefused> {
        self.said(self.inner.unshare(promise, span))
    }
}

/// The memory is dropped exactly if the host did as it was asked, whichever step of a pool's life
/// fails.
fn memory_is_dropped_only_if_private(fails: Fails) {
    for n in 1.. {
        let rig = rig();
        let spans = vec![span(RAM + 0x10_0000, 4 * SLOT), span(RAM + 0x20_0000, 4 * SLOT)];
        let memory = Arc::clone(&rig.memory);
        let inner = SimPoolMemory::with_faults(memory, spans, &rig.faults).unwrap();
        let fate = Arc::new(Fate::default());
        let memory = Dropped { inner: inner.clone(), fate: Arc::clone(&fate), fails };
        let config = *rig.pool.config();
        rig.faults.arm(n);
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let pool = Pool::new(memory, config, Cpu::default())?;
            let _ = pool.grow();
            let _ = pool.grow();
            pool.shrink();
            let _ = pool.grow();
            drop(pool);
            Ok::<(), Error>(())
        }));
        let fired = rig.faults.disarm();
        let is_private = inner.seen().is_empty() && inner.grown().is_empty();
        let is_dropped = fate.is_dropped.load(Ordering::Relaxed);
        assert!(is_private || !is_dropped, "step {n}");
        assert_eq!(is_dropped, !fate.is_refused.load(Ordering::Relaxed), "step {n}");
        if fired == Fired::No {
            assert!(is_dropped);
            return;
        }
    }
}

#[test]
fn memory_that_the_host_sees_is_never_dropped() {
    memory_is_dropped_only_if_private(Fails::Says);
}

#[test]
fn memory_that_the_host_sees_is_never_dropped_where_a_hook_panics() {
    memory_is_dropped_only_if_private(Fails::Panics);
}

thread_local! {
    /// The locks that are held, the latest last.
    static LOCKS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// The most that were held at once.
    static MOST: Cell<usize> = const { Cell::new(0) };
}

fn locked(lock: &Nested) {
    let held = LOCKS.with_borrow_mut(|locks| {
        locks.push(&raw const *lock as usize);
        locks.len()
    });
    MOST.set(MOST.get().max(held));
}

/// A lock that has to be left before those that were taken earlier, as one that keeps interrupts
/// off and knows whether they were on.
struct Nested(parking_lot::RawMutex);

// SAFETY: it is the inner lock.
unsafe impl lock_api::RawMutex for Nested {
    const INIT: Self = Self(parking_lot::RawMutex::INIT);

    type GuardMarker = lock_api::GuardNoSend;

    fn lock(&self) {
        self.0.lock();
        locked(self);
    }

    fn try_lock(&self) -> bool {
        let taken = self.0.try_lock();
        if taken {
            locked(self);
        }
        taken
    }

    unsafe fn unlock(&self) {
        let last = LOCKS.with_borrow_mut(Vec::pop);
        // SAFETY: the caller holds it.
        unsafe { self.0.unlock() };
        let is_last = last == Some(&raw const *self as usize);
        assert!(is_last || std::thread::panicking(), "another lock was taken later");
    }
}

struct Kernel;

impl Platform for Kernel {
    type Lock = Nested;

    fn cpu(&self) -> usize {
        1
    }

    fn now(&self) -> u64 {
        0
    }
}

#[test]
fn locks_are_left_in_the_reverse_order() {
    let rig = rig();
    let spans = vec![span(RAM + 0x10_0000, 8 * SLOT)];
    let memory = SimPoolMemory::new(Arc::clone(&rig.memory), spans).unwrap();
    let pool = Pool::new(memory, *rig.pool.config(), Kernel).unwrap();
    let take = |slots| pool.take(original(ORIGINALS, slots * SLOT), &SlotRequest::default());
    let run = take(6).unwrap();
    pool.grow().unwrap();
    let grown = take(4).unwrap();
    assert!(take(16).is_err());
    pool.release(run).unwrap();
    pool.release(grown).unwrap();
    assert_eq!(pool.shrink(), 4 * SLOT);
    assert!(LOCKS.with_borrow(Vec::is_empty));
}

#[test]
fn a_pool_that_is_nearly_full_is_looked_through_with_one_lock_at_a_time() {
    const SLOTS: usize = 512;
    const AREAS: usize = 8;
    let rig = rig();
    let spans = vec![span(RAM + 0x10_0000, SLOTS as u64 * SLOT)];
    let memory = SimPoolMemory::new(Arc::clone(&rig.memory), spans).unwrap();
    let pool = Pool::new(memory, PoolConfig::new(AREAS), Kernel).unwrap();
    let take = |slots| pool.take(original(ORIGINALS, slots * SLOT), &SlotRequest::default());
    let most = |run: &mut dyn FnMut()| {
        MOST.set(0);
        run();
        MOST.get()
    };
    let mut held: Vec<_> = (0..SLOTS).map(|_| take(1).unwrap()).collect();
    held.sort_by_key(|slot| slot.span().paddr());
    let mut held: Vec<_> = held.into_iter().map(Some).collect();
    let mut release = |number: usize| pool.release(held[number].take().unwrap()).unwrap();
    // One slot of each area, and nowhere two: the whole pool is looked at.
    (0..AREAS).for_each(|area| release(area * SLOTS / AREAS + 10));
    assert_eq!(most(&mut || assert!(take(2).is_err())), 1);
    // Two on both sides of a border: those two areas.
    [191, 192].into_iter().for_each(&mut release);
    assert_eq!(most(&mut || pool.release(take(2).unwrap()).unwrap()), 2);
    // And one as long as the pool: all of them.
    (0..SLOTS).filter(|n| n % (SLOTS / AREAS) != 10 && ![191, 192].contains(n)).for_each(release);
    assert_eq!(most(&mut || pool.release(take(SLOTS as u64).unwrap()).unwrap()), AREAS);
    assert_eq!(pool.stats().used, 0);
}
