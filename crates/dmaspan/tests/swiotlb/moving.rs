//! A run that is free all the time, of which nobody knows where.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use dmaspan::Platform;
use dmaspan::swiotlb::{Pool, PoolConfig, SlotOf, SlotRequest};
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
        self.0.lock();
        HELD.set(HELD.get() + 1);
    }

    fn try_lock(&self) -> bool {
        about_to_lock();
        let taken = self.0.try_lock();
        HELD.set(HELD.get() + u32::from(taken));
        taken
    }

    unsafe fn unlock(&self) {
        HELD.set(HELD.get() - 1);
        // SAFETY: the caller holds it.
        unsafe { self.0.unlock() }
    }
}

struct Machine;

impl Platform for Machine {
    type Lock = Slow;

    fn cpu(&self) -> usize {
        CPU.get()
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
