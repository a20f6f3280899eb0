//! A bounce pool stays as it was when there is no memory.

use std::cell::Cell;

use dmaspan::platform::OneThread;
use dmaspan::swiotlb::{
    Error, Growth, InSlot, Original, Pool, PoolConfig, PoolMemory, Room, SlotOf, SlotRequest,
    Transfer,
};
use dmaspan::{PhysAddr, Promise, Span};

use crate::failing::{self, Case, Ends, case};

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
}

impl failing::World for World {
    fn state(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        let mut stats = self.pool.stats();
        // The most that was held stays, where it went back.
        stats.high_water = 0;
        (stats, self.pool.memory().1.get(), self.slots.len())
    }

    fn end(self) {}
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

/// As [`failing::unchanged`], behind what `prepare` does.
fn unchanged(n: i64, prepare: Run, operation: Run) -> i64 {
    let mut world = World::new();
    prepare(&mut world).unwrap();
    failing::unchanged(n, world, |world| {
        operation(world).inspect_err(|error| {
            // Memory for a single request without a record of it is given back: the pool is full.
            match *error {
                Error::NoMemory { bytes } => assert!(bytes > 0 && bytes.is_multiple_of(SLOT)),
                Error::Full { .. } => {}
                other => panic!("{other}"),
            }
        })
    })
}

type Run = fn(&mut World) -> Result<(), Error>;

/// What is done.
const CASES: [Case; 5] = [
    case("a pool is made", Ends::Times(2), |n| unchanged(n, |_| Ok(()), make)),
    case("it grows", Ends::Times(1), |n| unchanged(n, |_| Ok(()), grow)),
    case("it grows again", Ends::Times(1), |n| {
        unchanged(n, |world| (0..4).try_for_each(|_| grow(world)), grow)
    }),
    case("slots are taken", Ends::Never, |n| unchanged(n, |_| Ok(()), take_all)),
    case("they are released", Ends::Never, |n| {
        unchanged(n, |world| grow(world).and_then(|()| take_all(world)), end)
    }),
];

#[test]
fn child() {
    failing::child(&CASES);
}

#[test]
fn an_allocation_that_fails_changes_nothing_unless_it_ends_the_program() {
    failing::sweep(module_path!(), &CASES);
}
