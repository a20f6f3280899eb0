//! Bounce pools under four threads that take and release slots and leases of all lengths, while
//! the pool grows and shrinks and the host refuses now and then. The holder of a slot is written
//! beside it and into it.
//!
//! `DMASPAN_SOAK` is the number of operations; without it there are few. The whole of it:
//! `DMASPAN_SOAK=10000000 cargo test --release -p dmaspan --test simulation pool_soak`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::swiotlb::{
    Growth, HostRefused, InSlot, Lease, Original, Pool, PoolConfig, PoolMemory, Room, SlotOf,
    SlotRequest, Transfer,
};
use dmaspan::{PhysAddr, Platform, Promise, Span, lg2};
use dmaspan_sim::rng::Rng;
use parking_lot::Mutex;

const THREADS: u64 = 4;
const FEW: u64 = 100_000;
const SLOT: u64 = 128;
const WORDS: u64 = SLOT / 8;
/// What the pool begins with, in slots; four areas of 64.
const SLOTS: u64 = 256;
/// How much there is to grow by, behind it.
const MORE: u64 = 256;
/// Slots that a thread holds at most.
const HOLDS: usize = 16;
/// The owner of a slot that nobody has.
const NOBODY: u64 = 0;

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

struct Machine;

impl Platform for Machine {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        CPU.get()
    }

    fn now(&self) -> u64 {
        0
    }
}

/// Words from address 0 on, and beside them the holders of slots.
struct Host {
    spans: [Span; 1],
    words: Box<[AtomicU64]>,
    owners: Box<[AtomicU64]>,
    state: Mutex<State>,
    /// Every so many times it refuses; 0: never.
    refuses: u64,
}

#[derive(Default)]
struct State {
    /// What was allocated, and what the host sees, from first to behind the last byte.
    allocated: BTreeMap<u64, u64>,
    seen: BTreeMap<u64, u64>,
    asked: u64,
    refused: u64,
}

impl Host {
    fn new(refuses: u64) -> Self {
        let zeros = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            spans: [Span::new(PhysAddr::new(0), SLOTS * SLOT).unwrap()],
            words: zeros((SLOTS + MORE) * WORDS),
            owners: zeros(SLOTS + MORE),
            state: Mutex::default(),
            refuses,
        }
    }

    fn slots(&self, span: Span) -> &[AtomicU64] {
        &self.owners[index(span.paddr(), SLOT)..=index(span.last(), SLOT)]
    }

    /// All words that begin in the span.
    fn words(&self, span: Span) -> &[AtomicU64] {
        let from = span.paddr().get().div_ceil(8);
        &self.words[usize::try_from(from).unwrap()..=index(span.last(), 8)]
    }

    /// The slots of `whole` get another owner.
    fn hand(&self, whole: Span, from: u64, to: u64) {
        for owner in self.slots(whole) {
            let before = owner.swap(to, Ordering::Relaxed);
            assert_eq!(before, from, "{whole} goes from {from:#x} to {to:#x}");
        }
    }

    fn ask(&self, state: &mut State) -> Result<(), HostRefused> {
        state.asked += 1;
        if self.refuses != 0 && state.asked.is_multiple_of(self.refuses) {
            state.refused += 1;
            return Err(HostRefused);
        }
        Ok(())
    }
}

fn index(at: PhysAddr, unit: u64) -> usize {
    usize::try_from(at.get() / unit).unwrap()
}

fn ends(span: Span) -> (u64, u64) {
    (span.paddr().get(), span.paddr().get() + span.len())
}

#[expect(unsafe_code, reason = "the words are the pool's alone")]
// SAFETY: what is given is words of the value that nobody else was given.
unsafe impl PoolMemory for Host {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.spans
    }

    fn copy(&self, _: Transfer) {}

    fn zero(&self, bytes: InSlot) {
        self.words(bytes.span()).iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    fn read(&self, _: InSlot, _: &mut [u8]) {}

    fn write(&self, _: InSlot, _: &[u8]) {}

    fn allocate(&self, room: Room) -> Option<Span> {
        let mut state = self.state.lock();
        let mut at = lg2::align_up(SLOTS * SLOT, room.align.ilog2())?;
        for (&from, &behind) in &state.allocated {
            if at + room.bytes <= from {
                break;
            }
            at = lg2::align_up(at.max(behind), room.align.ilog2())?;
        }
        let behind = at + room.bytes;
        if behind > (SLOTS + MORE) * SLOT || behind - 1 > room.last {
            return None;
        }
        state.allocated.insert(at, behind);
        Span::new(PhysAddr::new(at), room.bytes).ok()
    }

    fn free(&self, _promise: Promise<'_>, span: Span) {
        self.hand(span, NOBODY, NOBODY);
        let mut state = self.state.lock();
        let (from, behind) = ends(span);
        assert!(!state.seen.contains_key(&from), "{span} is freed and the host sees it");
        assert_eq!(state.allocated.remove(&from), Some(behind));
    }

    fn share(&self, _promise: Promise<'_>, span: Span) -> Result<(), HostRefused> {
        let mut state = self.state.lock();
        self.ask(&mut state)?;
        let (from, behind) = ends(span);
        assert_eq!(state.seen.insert(from, behind), None, "{span} is shared twice");
        Ok(())
    }

    fn unshare(&self, _promise: Promise<'_>, span: Span) -> Result<(), HostRefused> {
        let mut state = self.state.lock();
        self.ask(&mut state)?;
        self.hand(span, NOBODY, NOBODY);
        let (from, behind) = ends(span);
        assert_eq!(state.seen.remove(&from), Some(behind), "{span} was not shared");
        Ok(())
    }
}

type Slots = Pool<Host, Machine>;

enum Handle {
    Slot(SlotOf<Machine>),
    Lease(Lease<Host, Machine>),
}

/// What a thread has, and by which name.
struct Held {
    handle: Handle,
    /// All of its slots.
    whole: Span,
    name: u64,
}

struct Soak<'a> {
    pool: &'a Arc<Slots>,
    choices: Rng,
    number: u64,
    names: u64,
    refused: u64,
}

impl<'a> Soak<'a> {
    fn new(pool: &'a Arc<Slots>, number: u64) -> Self {
        CPU.set(usize::try_from(number).unwrap());
        Self { pool, choices: Rng::new(number + 1), number, names: 0, refused: 0 }
    }

    fn request(&mut self) -> SlotRequest {
        let keep_bits = [0, 0, 0, 0x7f, 0x3ff][self.index(5)];
        let granule = [1, 1, 1, 64, 512][self.index(5)];
        let boundary = [None, None, Some(0x4000)][self.index(3)];
        SlotRequest { keep_bits, granule, boundary, ..SlotRequest::default() }
    }

    fn index(&mut self, bound: u64) -> usize {
        usize::try_from(self.choices.below(bound)).unwrap()
    }

    fn take(&mut self) -> Option<Held> {
        let most = match self.choices.below(64) {
            0 => SLOTS,
            1..4 => 80,
            4..20 => 9,
            _ => 2,
        };
        let len = 1 + self.choices.below(most * SLOT);
        let request = self.request();
        let handle = if self.choices.below(8) == 0 {
            self.pool.lease(len, &request).map(Handle::Lease)
        } else {
            let original = Span::new(PhysAddr::new(self.choices.below(0x1000)), len).unwrap();
            // SAFETY: nothing is copied.
            #[expect(unsafe_code, reason = "the originals are never used")]
            let original = unsafe { Original::new(original) };
            self.pool.take(original, &request).map(Handle::Slot)
        };
        let Ok(handle) = handle else {
            self.refused += 1;
            return None;
        };
        let span = match &handle {
            Handle::Slot(slot) => slot.span(),
            Handle::Lease(lease) => lease.span(),
        };
        assert_eq!(span.len(), len);
        let (from, behind) = ends(span);
        let granule = request.granule.max(SLOT).ilog2();
        let from = lg2::align_down(from, granule);
        let behind = lg2::align_up(behind, granule).unwrap();
        let whole = Span::new(PhysAddr::new(from), behind - from).unwrap();
        self.names += 1;
        let held = Held { handle, whole, name: (self.number + 1) << 48 | self.names };
        let host = self.pool.memory();
        host.hand(whole, NOBODY, held.name);
        host.words(whole).iter().for_each(|word| word.store(held.name, Ordering::Relaxed));
        Some(held)
    }

    fn release(&self, held: Held) {
        let host = self.pool.memory();
        for word in host.words(held.whole) {
            assert_eq!(word.load(Ordering::Relaxed), held.name, "another wrote to {}", held.whole);
        }
        host.hand(held.whole, held.name, NOBODY);
        match held.handle {
            Handle::Slot(slot) => self.pool.release(slot).unwrap(),
            Handle::Lease(lease) => drop(lease),
        }
    }

    fn run(mut self, operations: u64) -> u64 {
        let mut held: Vec<Held> = Vec::new();
        for _ in 0..operations {
            match self.choices.below(128) {
                0 => drop(self.pool.grow()),
                1 => drop(self.pool.shrink()),
                2..66 if held.len() < HOLDS => held.extend(self.take()),
                _ if !held.is_empty() => {
                    let at = self.choices.below(held.len() as u64);
                    self.release(held.swap_remove(usize::try_from(at).unwrap()));
                }
                _ => {}
            }
        }
        held.into_iter().for_each(|held| self.release(held));
        self.refused
    }
}

fn operations() -> u64 {
    std::env::var("DMASPAN_SOAK").map_or(FEW, |count| count.parse().unwrap())
}

/// Runs one function on all threads, and sums what they say up.
fn on_threads(run: impl Fn(u64) -> u64 + Sync) -> u64 {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                scope.spawn({
                    let run = &run;
                    move || run(number)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    })
}

fn soak(refuses: u64) {
    let growth = Growth { step: 64 * SLOT, limit: 160 * SLOT, last: u64::MAX };
    let config = PoolConfig { slot_bytes: SLOT, growth: Some(growth), ..PoolConfig::new(4) };
    let pool = Arc::new(Pool::new(Host::new(refuses), config, Machine).unwrap());
    let refused = on_threads(|number| Soak::new(&pool, number).run(operations() / THREADS));
    assert!(refused > 0, "the pool was never full");
    pool.shrink();
    let stats = pool.stats();
    assert_eq!((stats.used, stats.single, stats.grown), (0, 0, 0));
    let state = pool.memory().state.lock();
    let leaked: u64 = state.allocated.iter().map(|(from, behind)| behind - from).sum();
    assert_eq!(stats.leaked, leaked);
    assert_eq!(state.refused > 0, refuses != 0);
    assert!(refuses != 0 || leaked == 0);
    drop(state);
    let whole = Span::new(PhysAddr::new(0), SLOTS * SLOT).unwrap();
    // SAFETY: nothing is copied.
    #[expect(unsafe_code, reason = "the original is never used")]
    let original = unsafe { Original::new(whole) };
    let slot = pool.take(original, &SlotRequest::default()).expect("all of it is free");
    assert_eq!(slot.span(), whole);
    pool.memory().hand(whole, NOBODY, 1);
}

#[test]
fn slots_have_one_owner_and_none_is_lost_while_the_pool_grows_and_shrinks() {
    soak(0);
}

#[test]
fn what_the_host_refuses_leaks_and_nothing_else() {
    soak(97);
}

/// Each takes the next slot before it releases the last one, so that free ones move from area to
/// area all the time.
#[test]
fn as_many_slots_as_threads_hold_are_always_enough() {
    let config = PoolConfig { slot_bytes: SLOT, ..PoolConfig::new(4) };
    let mut host = Host::new(0);
    host.spans = [Span::new(PhysAddr::new(0), 2 * THREADS * SLOT).unwrap()];
    let pool = Pool::new(host, config, Machine).unwrap();
    let take = || {
        // SAFETY: nothing is copied.
        #[expect(unsafe_code, reason = "the original is never used")]
        let original = unsafe { Original::new(Span::new(PhysAddr::new(0), SLOT).unwrap()) };
        let slot = pool.take(original, &SlotRequest::default()).expect("one is free");
        pool.memory().hand(slot.span(), NOBODY, 1);
        slot
    };
    let release = |slot: SlotOf<Machine>| {
        pool.memory().hand(slot.span(), 1, NOBODY);
        pool.release(slot).unwrap();
    };
    on_threads(|number| {
        let mut choices = Rng::new(number);
        let mut held = take();
        for _ in 0..operations() / THREADS {
            CPU.set(usize::try_from(choices.below(4)).unwrap());
            let next = take();
            release(std::mem::replace(&mut held, next));
        }
        release(held);
        0
    });
    assert_eq!(pool.stats().used, 0);
}
