//! A run that is free all the time, of which nobody knows where.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use dmaspan::Platform;
use dmaspan::swiotlb::{Error, Pool, PoolConfig, SlotOf, SlotRequest};
use dmaspan_sim::pool_memory::SimPoolMemory;

use crate::common::{ORIGINALS, RAM, Rig, SLOT, original, span};

type Hook = Box<dyn FnMut()>;

thread_local! {
    /// How many locks are held.
    static HELD: Cell<u32> = const { Cell::new(0) };
    /// How often the hook still runs.
    static LEFT: Cell<u32> = const { Cell::new(0) };
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    static CPU: Cell<usize> = const { Cell::new(0) };
    static NODE: Cell<usize> = const { Cell::new(0) };
    /// The lock that was taken last, and one that somebody else has until it is waited for.
    static LAST: Cell<usize> = const { Cell::new(0) };
    static BUSY: Cell<usize> = const { Cell::new(0) };
}

/// Somebody else is faster, where no lock is held.
fn about_to_lock() {
    if HELD.get() > 0 {
        return;
    }
    // Its own locks are none before which it runs.
    if let (Some(left), Some(mut hook)) = (LEFT.get().checked_sub(1), HOOK.take()) {
        LEFT.set(left);
        hook();
        HOOK.set(Some(hook));
    }
}

struct Slow(parking_lot::RawMutex);

// SAFETY: it is the inner lock.
unsafe impl lock_api::RawMutex for Slow {
    const INIT: Self = Self(<parking_lot::RawMutex as lock_api::RawMutex>::INIT);

    type GuardMarker = lock_api::GuardNoSend;

    fn lock(&self) {
        about_to_lock();
        BUSY.set(if self.is_busy() { 0 } else { BUSY.get() });
        self.0.lock();
        LAST.set(self.number());
        HELD.set(HELD.get() + 1);
    }

    fn try_lock(&self) -> bool {
        about_to_lock();
        let taken = !self.is_busy() && self.0.try_lock();
        LAST.set(if taken { self.number() } else { LAST.get() });
        HELD.set(HELD.get() + u32::from(taken));
        taken
    }

    unsafe fn unlock(&self) {
        HELD.set(HELD.get() - 1);
        // SAFETY: the caller holds it.
        unsafe { self.0.unlock() }
    }
}

impl Slow {
    fn number(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn is_busy(&self) -> bool {
        BUSY.get() == self.number()
    }
}

struct Machine;

impl Platform for Machine {
    type Lock = Slow;

    fn cpu(&self) -> usize {
        CPU.get()
    }

    fn node(&self) -> usize {
        NODE.get()
    }

    fn now(&self) -> u64 {
        0
    }
}

/// Before each of the first locks a run in one area becomes free, and then the one in another is
/// taken: each look at all areas may just miss it, and none of four in a row does.
#[test]
fn a_run_that_is_free_at_every_moment_is_found_wherever_it_goes_meanwhile() {
    for (moves, first) in (0..12).flat_map(|moves| [(moves, 0), (moves, 2)]) {
        let rig = Rig::new(8, 1);
        let spans = vec![span(RAM + 0x10_0000, 12 * SLOT)];
        let memory = SimPoolMemory::new(Arc::clone(&rig.memory), spans).unwrap();
        let pool = Arc::new(Pool::new(memory, PoolConfig::new(3), Machine).unwrap());
        let take = |pool: &Pool<_, _>, slots| {
            pool.take(original(ORIGINALS, slots * SLOT), &SlotRequest::default())
        };
        // All slots of the areas, each in pairs of which the last ones move.
        let mut held = Vec::new();
        let mut runs: [Option<SlotOf<Machine>>; 3] = [None, None, None];
        for (cpu, run) in runs.iter_mut().enumerate() {
            CPU.set(cpu);
            held.push(take(&pool, 2).unwrap());
            *run = Some(take(&pool, 2).unwrap());
        }
        held.extend(runs[1].take());
        pool.release(runs[first].take().unwrap()).unwrap();
        let (inner, mut at) = (Arc::clone(&pool), first);
        CPU.set(0);
        LEFT.set(moves);
        HOOK.set(Some(Box::new(move || {
            let to = 2 - at;
            inner.release(runs[to].take().unwrap()).unwrap();
            CPU.set(at);
            runs[at] = Some(take(&inner, 2).unwrap());
            CPU.set(0);
            at = to;
        })));
        let found = take(&pool, 2);
        HOOK.set(None);
        assert!(found.is_ok(), "{moves} from {first}, of which {} are left", LEFT.get());
        LEFT.set(0);
        for slot in held.into_iter().chain(found) {
            pool.release(slot).unwrap();
        }
    }
}

type SlowPool = Arc<Pool<SimPoolMemory, Machine>>;

/// A pool of spans of so many slots each.
fn pool(rig: &Rig, spans: u64, slots: u64, areas: usize) -> SlowPool {
    let spans = (0..spans).map(|n| span(RAM + (n + 1) * 0x10_0000, slots * SLOT)).collect();
    let memory = SimPoolMemory::new(Arc::clone(&rig.memory), spans).unwrap();
    Arc::new(Pool::new(memory, PoolConfig::new(areas), Machine).unwrap())
}

fn take(pool: &SlowPool, slots: u64) -> Result<SlotOf<Machine>, Error> {
    pool.take(original(ORIGINALS, slots * SLOT), &SlotRequest::default())
}

/// Before each of the next `moves` locks somebody does that.
fn meanwhile<T>(moves: u32, does: impl FnMut() + 'static, run: impl FnOnce() -> T) -> (u32, T) {
    LEFT.set(moves);
    HOOK.set(Some(Box::new(does)));
    let result = run();
    HOOK.set(None);
    (moves - LEFT.replace(0), result)
}

/// A look at both nodes may miss the run twice, and the first one also before it begins.
#[test]
fn a_run_is_found_on_whichever_node_it_is_while_one_of_four_looks_is_not_disturbed() {
    for (moves, first) in (0..8).map(|moves| (moves, 0)).chain((0..7).map(|moves| (moves, 1))) {
        let rig = Rig::new(8, 1);
        let pool = pool(&rig, 2, 4, 1);
        let mut held = Vec::new();
        let mut runs: [Option<SlotOf<Machine>>; 2] = [None, None];
        for (node, run) in runs.iter_mut().enumerate() {
            NODE.set(node);
            held.push(take(&pool, 2).unwrap());
            *run = Some(take(&pool, 2).unwrap());
        }
        NODE.set(0);
        pool.release(runs[first].take().unwrap()).unwrap();
        let (inner, mut at) = (Arc::clone(&pool), first);
        let move_it = move || {
            inner.release(runs[1 - at].take().unwrap()).unwrap();
            NODE.set(at);
            runs[at] = Some(take(&inner, 2).unwrap());
            NODE.set(0);
            at = 1 - at;
        };
        let (moved, found) = meanwhile(moves, move_it, || take(&pool, 2));
        assert!(found.is_ok(), "{moved} of {moves} from {first}");
        assert_eq!(moved, moves);
        for slot in held.into_iter().chain(found) {
            pool.release(slot).unwrap();
        }
    }
}

#[test]
fn a_pool_that_others_use_without_end_is_full_after_as_many_looks() {
    let rig = Rig::new(8, 1);
    let pool = pool(&rig, 1, 8, 2);
    let mut slots: Vec<_> = (0..8).map(|_| Some(take(&pool, 1).unwrap())).collect();
    let mut taken = |index: usize| slots[index].take().unwrap();
    let mut moved = Some(taken(5));
    let free = [1, 3, 7].map(&mut taken);
    free.into_iter().for_each(|slot| pool.release(slot).unwrap());
    let inner = Arc::clone(&pool);
    let release_and_take = move || {
        inner.release(moved.take().unwrap()).unwrap();
        CPU.set(1);
        moved = Some(take(&inner, 1).unwrap());
        CPU.set(0);
    };
    let (moved, refused) = meanwhile(1000, release_and_take, || take(&pool, 2));
    assert_eq!(refused.unwrap_err(), Error::Full { len: 2 * SLOT, free: 3 * SLOT });
    // By each of four looks: each area is tried, waited for, and looked at for a longer run.
    assert!((8..=1 + 4 * 6).contains(&moved), "{moved}");
}

#[test]
fn a_run_over_areas_that_others_are_faster_to_take_is_not_looked_for_without_end() {
    let rig = Rig::new(8, 1);
    let pool = pool(&rig, 1, 6, 2);
    let (inner, mut first, mut turn) = (Arc::clone(&pool), None, 0);
    // Its first slot is free whenever one looks, and taken as soon as one takes.
    let flicker = move || {
        turn += 1;
        match (turn % 3, first.take()) {
            (1, Some(slot)) => inner.release(slot).unwrap(),
            (0, None) => first = Some(take(&inner, 1).unwrap()),
            (_, held) => first = held,
        }
    };
    let (turns, _) = meanwhile(1000, flicker, || take(&pool, 6));
    assert!((3..100).contains(&turns), "{turns}");
}

#[test]
fn an_area_that_somebody_else_has_is_waited_for_only_where_no_other_has_room() {
    for areas in [1, 3] {
        let rig = Rig::new(8, 1);
        let pool = pool(&rig, 1, 12, areas);
        let own = take(&pool, 1).unwrap();
        let (busy, at) = (LAST.get(), own.span());
        pool.release(own).unwrap();
        let mut held = Vec::new();
        for _ in 0..12 - 12 / areas {
            BUSY.set(busy);
            held.push(take(&pool, 1).unwrap());
            assert_eq!(BUSY.get(), busy, "nobody waited");
        }
        BUSY.set(busy);
        let found = take(&pool, 1).unwrap();
        assert_eq!((BUSY.get(), found.span()), (0, at), "somebody waited");
        for slot in held.into_iter().chain([found]) {
            pool.release(slot).unwrap();
        }
    }
}
