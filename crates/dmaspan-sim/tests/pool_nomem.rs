//! What becomes of a bounce pool when there is no memory: an allocation that may fail changes
//! nothing. Those that may not fail end the program, and what takes and ends has none of them.
//!
//! Each allocation fails in a program of its own, since it may be the last thing that program does.

mod failing;

use std::cell::Cell;

use dmaspan::swiotlb::{
    Error, Growth, InSlot, Original, Pool, PoolConfig, PoolMemory, Room, SlotOf, SlotRequest,
    Stats, Transfer,
};
use dmaspan::{PhysAddr, Platform, Promise, Span};

const SLOT: u64 = 2048;

fn span(addr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(addr), len).unwrap()
}

/// Memory without bytes, which counts what it gave.
struct Nothing([Span; 2], Cell<u64>);

// SAFETY: each test has one thread.
#[expect(unsafe_code, reason = "the tests have one thread")]
unsafe impl Sync for Nothing {}

// SAFETY: it is never accessed.
#[expect(unsafe_code, reason = "memory of a pool is unsafe to implement")]
unsafe impl PoolMemory for Nothing {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.0
    }

    fn copy(&self, _: Transfer) {}

    fn zero(&self, _: InSlot) {}

    fn read(&self, _: InSlot, _: &mut [u8]) {}

    fn write(&self, _: InSlot, _: &[u8]) {}

    fn allocate(&self, room: Room) -> Option<Span> {
        self.1.set(self.1.get() + 1);
        Some(span(0x100_0000 * (1 + self.1.get()), room.bytes))
    }

    fn free(&self, _promise: Promise<'_>, _: Span) {
        self.1.set(self.1.get() - 1);
    }
}

struct OneThread;

impl Platform for OneThread {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }
}

struct World {
    pool: Pool<Nothing, OneThread>,
    slots: Vec<SlotOf<OneThread>>,
}

fn pool() -> Result<Pool<Nothing, OneThread>, Error> {
    let memory = Nothing([span(0, 8 * SLOT), span(0x10_0000, 300 * SLOT)], Cell::new(0));
    let growth = Some(Growth::new(130 * SLOT, 1 << 30));
    Pool::new(memory, PoolConfig { growth, ..PoolConfig::new(3) }, OneThread)
}

impl World {
    fn new() -> Self {
        Self { pool: pool().unwrap(), slots: Vec::new() }
    }

    fn state(&self) -> (Stats, u64, usize) {
        let mut stats = self.pool.stats();
        // The most that was held stays, where it went back.
        stats.high_water = 0;
        (stats, self.pool.memory().1.get(), self.slots.len())
    }
}

fn make(_: &mut World) -> Result<(), Error> {
    pool().map(drop)
}

fn grow(world: &mut World) -> Result<(), Error> {
    world.pool.grow().map(drop)
}

fn take_all(world: &mut World) -> Result<(), Error> {
    // SAFETY: nothing is ever copied.
    #[expect(unsafe_code, reason = "a promise about memory")]
    let original = |n: u64| unsafe { Original::new(span(0x1000_0000 + n * SLOT, SLOT)) };
    world.pool.take_all((0..400).map(original), &SlotRequest::default(), &mut world.slots)
}

fn end(world: &mut World) -> Result<(), Error> {
    world.slots.drain(..).for_each(|slot| world.pool.release(slot).unwrap());
    world.pool.shrink();
    Ok(())
}

type Run = fn(&mut World) -> Result<(), Error>;

/// What it does, before and then with memory failing, and how many allocations end the program.
const OPERATIONS: [(&str, Run, Run, u32); 5] = [
    ("a pool is made", |_| Ok(()), make, 2),
    ("it grows", |_| Ok(()), grow, 1),
    ("it grows again", |world| (0..4).try_for_each(|_| grow(world)), grow, 1),
    ("slots are taken", |_| Ok(()), take_all, 0),
    ("they are released", |world| grow(world).and_then(|()| take_all(world)), end, 0),
];

#[test]
fn child() {
    let Some((operation, n)) = failing::asked() else { return };
    let (_, prepare, run, _) = OPERATIONS[operation];
    let mut world = World::new();
    prepare(&mut world).unwrap();
    let before = world.state();
    failing::fail(n);
    let result = run(&mut world);
    let left = failing::fail(0);
    if let Err(error) = result {
        assert!(matches!(error, Error::NoMemory { .. }), "{error}");
        assert_eq!(world.state(), before);
    }
    failing::done(left);
}

#[test]
fn an_allocation_that_fails_changes_nothing_unless_it_ends_the_program() {
    for (number, (name, _, _, ends)) in OPERATIONS.iter().enumerate() {
        let ended = failing::programs_that_end(number, name);
        assert_eq!(ended, *ends, "{name}: allocations that end the program");
    }
}
