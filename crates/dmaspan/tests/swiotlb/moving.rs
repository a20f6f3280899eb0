//! A run that is free all the time, of which nobody knows where.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use dmaspan::Platform;
use dmaspan::swiotlb::{Pool, PoolConfig, SlotOf, SlotRequest};
use dmaspan_sim::pool_memory::SimPoolMemory;

use crate::common::{ORIGINALS, RAM, Rig, SLOT, original, span};

type Hook = Box<dyn FnOnce()>;

thread_local! {
    /// How many locks are held.
    static HELD: Cell<u32> = const { Cell::new(0) };
    /// How many more locks are taken before the hook runs.
    static LEFT: Cell<u32> = const { Cell::new(0) };
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    static CPU: Cell<usize> = const { Cell::new(0) };
}

/// Somebody else is faster, where no lock is held.
fn about_to_lock() {
    if HELD.get() > 0 || HOOK.with_borrow(Option::is_none) {
        return;
    }
    match LEFT.get().checked_sub(1) {
        Some(left) => LEFT.set(left),
        None => {
            let hook = HOOK.take();
            hook.into_iter().for_each(|hook| hook());
        }
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

type Slots = Vec<Option<SlotOf<Machine>>>;

/// A run in the area `to` becomes free, and then the one in `from` is taken, before the n-th lock.
#[test]
fn a_run_that_is_free_at_every_moment_is_found_wherever_it_goes_meanwhile() {
    let mut moved = 0;
    for (nth, from, to) in
        (0..40).flat_map(|nth| [(nth, 2, 0), (nth, 1, 0), (nth, 0, 2), (nth, 2, 1)])
    {
        let rig = Rig::new(8, 1);
        let spans = vec![span(RAM + 0x10_0000, 12 * SLOT)];
        let memory = SimPoolMemory::new(Arc::clone(&rig.memory), spans).unwrap();
        let pool = Arc::new(Pool::new(memory, PoolConfig::new(3), Machine).unwrap());
        let take = |pool: &Pool<_, _>, slots| {
            pool.take(original(ORIGINALS, slots * SLOT), &SlotRequest::default())
        };
        // Four single slots of each area.
        let mut areas: Vec<Slots> = Vec::new();
        for cpu in 0..3 {
            CPU.set(cpu);
            areas.push((0..4).map(|_| Some(take(&pool, 1).unwrap())).collect());
        }
        let free = |pool: &Pool<_, _>, slots: &mut Slots| {
            for slot in &mut slots[1..3] {
                pool.release(slot.take().unwrap()).unwrap();
            }
        };
        free(&pool, &mut areas[from]);
        let (inner, mut there) = (Arc::clone(&pool), std::mem::take(&mut areas[to]));
        let kept = std::rc::Rc::new(Cell::new(None));
        let keep = std::rc::Rc::clone(&kept);
        CPU.set(0);
        LEFT.set(nth);
        let hook: Hook = Box::new(move || {
            for slot in &mut there[1..3] {
                inner.release(slot.take().unwrap()).unwrap();
            }
            CPU.set(from);
            keep.set(Some((take(&inner, 2).unwrap(), there)));
            CPU.set(0);
        });
        HOOK.set(Some(hook));
        let found = take(&pool, 2);
        moved += u32::from(HOOK.take().is_none());
        assert!(found.is_ok(), "{nth}: from {from} to {to}");
        pool.release(found.unwrap()).unwrap();
    }
    assert!(moved > 20, "{moved}");
}
