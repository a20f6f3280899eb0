//! Bounce pools of a few slots: who takes one has it alone, sees what was done with it before, and
//! is refused only where none was free; what was added goes when nobody has it.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use dmaspan::swiotlb::{
    Growth, InSlot, Original, Pool, PoolConfig, PoolMemory, Room, SlotOf, SlotRequest, Transfer,
};
use dmaspan::{PhysAddr, Promise, Span};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use crate::platform::{Machine, run_on};

const SLOT: u64 = 64;
/// Where the pool begins; what it grows by is behind it.
const BASE: u64 = 0x1000;
const CELLS: usize = 4;
type Slot = SlotOf<Machine>;

/// A word a slot, which only its holder may touch: loom finds who does so unordered.
struct Memory {
    spans: [Span; 1],
    cells: [UnsafeCell<u32>; CELLS],
    /// Whose slots are in use. Loom need not know: it asks after the fact.
    held: [AtomicBool; CELLS],
    /// Which of the cells behind the pool were allocated.
    grown: Mutex<[bool; CELLS]>,
    /// By cell: whoever allocates it sees what was done before it was freed, and nothing else.
    handed: [AtomicU32; CELLS],
}

// SAFETY: a cell is touched by the holder of its slot alone; that it is so is what loom checks.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(slots: u64) -> Self {
        Self {
            spans: [span(BASE, slots * SLOT)],
            cells: std::array::from_fn(|_| UnsafeCell::new(0)),
            held: [const { AtomicBool::new(false) }; CELLS],
            grown: Mutex::default(),
            handed: std::array::from_fn(|_| AtomicU32::new(0)),
        }
    }

    fn touch(&self, span: Span) {
        for number in numbers(span) {
            // SAFETY: see above; loom fails the test before anything goes wrong.
            self.cells[number].with_mut(|cell| unsafe { *cell += 1 });
        }
    }

    fn hold(&self, span: Span, held: bool) {
        for number in numbers(span) {
            assert_ne!(self.held[number].swap(held, Ordering::Relaxed), held, "two have one slot");
        }
    }
}

fn span(addr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(addr), len).unwrap()
}

/// The slots of a span.
fn numbers(span: Span) -> std::ops::RangeInclusive<usize> {
    let number = |at: PhysAddr| usize::try_from((at.get() - BASE) / SLOT).unwrap();
    number(span.paddr())..=number(span.last())
}

// SAFETY: there is no memory but the cells, and no device.
unsafe impl PoolMemory for Memory {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.spans
    }

    fn copy(&self, _: Transfer) {}

    fn zero(&self, bytes: InSlot) {
        self.touch(bytes.span());
    }

    fn read(&self, _: InSlot, _: &mut [u8]) {}

    fn write(&self, _: InSlot, _: &[u8]) {}

    fn allocate(&self, room: Room) -> Option<Span> {
        assert_eq!(room.bytes, SLOT);
        let mut grown = self.grown.lock().unwrap();
        let from = *numbers(self.spans[0]).end() + 1;
        let number = (from..CELLS).find(|number| !grown[*number])?;
        grown[number] = true;
        self.handed[number].fetch_add(0, Ordering::Acquire);
        Some(span(BASE + number as u64 * SLOT, SLOT))
    }

    fn free(&self, _promise: Promise<'_>, span: Span) {
        // The last user of the memory is done, and this thread has seen that.
        self.touch(span);
        for number in numbers(span) {
            assert!(!self.held[number].load(Ordering::Relaxed), "it is freed and held");
            self.handed[number].fetch_add(1, Ordering::Release);
            assert!(std::mem::take(&mut self.grown.lock().unwrap()[number]), "freed twice");
        }
    }
}

struct Shared(Pool<Memory, Machine>);

impl Shared {
    fn new(slots: u64, config: PoolConfig) -> Arc<Self> {
        let config = PoolConfig { slot_bytes: SLOT, ..config };
        Arc::new(Self(Pool::new(Memory::new(slots), config, Machine::default()).unwrap()))
    }

    fn take(&self, slots: u64) -> Option<Slot> {
        // SAFETY: nothing is ever copied.
        let original = unsafe { Original::new(span(0x10_0000, slots * SLOT)) };
        let slot = self.0.take(original, &SlotRequest::default()).ok()?;
        self.0.memory().hold(slot.span(), true);
        self.0.memory().touch(slot.span());
        Some(slot)
    }

    fn release(&self, slot: Slot) {
        self.0.memory().touch(slot.span());
        self.0.memory().hold(slot.span(), false);
        self.0.release(slot).unwrap();
    }

    fn pair(&self, slots: u64) {
        let slot = self.take(slots).expect("there are enough");
        self.release(slot);
    }

    /// The same where others may have them.
    fn try_pair(&self, slots: u64) {
        if let Some(slot) = self.take(slots) {
            self.release(slot);
        }
    }

    /// Nothing got lost.
    fn check(&self, slots: u64) {
        let stats = self.0.stats();
        assert_eq!((stats.used, stats.single, stats.leaked), (0, 0, 0));
        self.pair(slots);
    }
}

/// Runs `work`, each on a thread and CPU of its own, over so many slots in so many areas, of which
/// `prepare` may take some for the first. Threads are preempted `bound` times at most.
fn race<T: Send + 'static, const N: usize>(
    bound: usize,
    [slots, areas]: [u64; 2],
    prepare: fn(&Shared) -> T,
    first: fn(&Shared, T),
    others: [fn(&Shared); N],
) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(bound);
    model.check(move || {
        let shared = Shared::new(slots, PoolConfig::new(usize::try_from(areas).unwrap()));
        let prepared = prepare(&shared);
        let threads = std::array::from_fn::<_, N, _>(|index| {
            let (shared, work) = (Arc::clone(&shared), others[index]);
            thread::spawn(move || {
                run_on(index + 1);
                work(&shared);
            })
        });
        first(&shared, prepared);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        shared.check(slots);
    });
}

#[test]
fn two_threads_of_one_area_have_a_slot_each() {
    let twice = |shared: &Shared| {
        shared.pair(1);
        shared.pair(1);
    };
    race(3, [2, 1], |_| {}, |shared, ()| shared.pair(1), [twice]);
}

#[test]
fn one_slot_goes_from_one_thread_to_the_other() {
    race(3, [1, 1], |_| {}, |shared, ()| shared.try_pair(1), [|shared| shared.try_pair(1)]);
}

#[test]
fn as_many_slots_as_threads_are_enough_in_two_areas() {
    let twice = |shared: &Shared| {
        run_on(0);
        shared.pair(1);
        run_on(1);
        shared.pair(1);
    };
    race(3, [2, 2], |_| {}, |shared, ()| shared.pair(1), [twice]);
}

#[test]
fn as_many_slots_as_threads_are_enough_for_three() {
    let pair = |shared: &Shared| shared.pair(1);
    race(2, [3, 2], |_| {}, |shared, ()| shared.pair(1), [pair, pair]);
}

/// One slot is held, the first and then the second: who looks at one after the other may find
/// neither.
#[test]
fn a_free_slot_that_moves_to_another_area_is_found() {
    race(
        3,
        [2, 2],
        |shared| shared.take(1).unwrap(),
        |shared, slot| {
            shared.release(slot);
            run_on(1);
            shared.pair(1);
        },
        [|shared| shared.pair(1)],
    );
}

/// Two of three slots are free, the last and then the first: who counts one area after the other
/// may count one slot alone.
#[test]
fn a_pool_whose_free_slots_move_between_areas_is_not_taken_for_full() {
    race(
        2,
        [3, 3],
        |shared| shared.take(1).unwrap(),
        |shared, slot| {
            shared.release(slot);
            run_on(2);
            shared.pair(1);
        },
        [|shared| shared.pair(2)],
    );
}

#[test]
fn what_was_released_before_is_found_without_a_lock() {
    loom::model(|| {
        let shared = Shared::new(2, PoolConfig::new(2));
        let both = [0, 1].map(|cpu| {
            run_on(cpu);
            shared.take(1).unwrap()
        });
        let is_free = Arc::new(AtomicU32::new(0));
        let (other, tell) = (Arc::clone(&shared), Arc::clone(&is_free));
        let [first, second] = both;
        let thread = thread::spawn(move || {
            other.release(first);
            tell.store(1, Ordering::Release);
        });
        if is_free.load(Ordering::Acquire) != 0 {
            shared.pair(1);
        }
        thread.join().unwrap();
        shared.release(second);
        shared.check(2);
    });
}

#[test]
fn runs_over_two_areas_and_slots_of_each_wait_for_nobody_for_ever() {
    let single = |shared: &Shared| shared.try_pair(1);
    race(2, [2, 2], |_| {}, |shared, ()| shared.try_pair(2), [single]);
    race(2, [2, 2], |_| {}, |shared, ()| shared.try_pair(2), [|shared| shared.try_pair(2)]);
}

#[test]
fn a_run_over_two_areas_is_found_while_neighbours_come_and_go() {
    race(3, [4, 2], |_| {}, |shared, ()| shared.try_pair(3), [|shared| shared.pair(1)]);
}

#[test]
fn a_run_over_two_areas_is_released_while_others_take() {
    race(
        3,
        [2, 2],
        |shared| shared.take(2).unwrap(),
        |shared, run| shared.release(run),
        [|shared| {
            shared.try_pair(2);
            shared.try_pair(1);
        }],
    );
}

/// A pool of one slot, which is held, that may grow by as many as `limit`.
fn growing(limit: u64, first: fn(&Shared), second: fn(&Shared)) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let growth = Growth { step: SLOT, limit: limit * SLOT, last: u64::MAX };
        let shared = Shared::new(1, PoolConfig { growth: Some(growth), ..PoolConfig::new(1) });
        let base = shared.take(1).unwrap();
        shared.0.grow().unwrap();
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || second(&other));
        first(&shared);
        thread.join().unwrap();
        shared.release(base);
        shared.0.shrink();
        assert_eq!(shared.0.stats().grown, 0);
        assert_eq!(*shared.0.memory().grown.lock().unwrap(), [false; CELLS]);
        shared.check(1);
    });
}

fn shrink(shared: &Shared) {
    shared.0.shrink();
}

#[test]
fn what_was_added_is_given_back_when_nobody_has_a_slot_of_it() {
    growing(1, |shared| shared.try_pair(1), shrink);
}

#[test]
fn what_is_taken_while_the_pool_shrinks_is_other_memory() {
    growing(2, |shared| shared.pair(1), shrink);
}

#[test]
fn a_pool_grows_and_shrinks_at_once() {
    growing(
        2,
        |shared| {
            let grown = shared.0.grow().is_ok();
            shared.try_pair(1);
            assert!(grown, "the limit is twice the step");
        },
        shrink,
    );
}

#[test]
fn two_that_shrink_a_pool_free_each_chunk_once() {
    growing(2, shrink, |shared| {
        shared.try_pair(1);
        shrink(shared);
    });
}
