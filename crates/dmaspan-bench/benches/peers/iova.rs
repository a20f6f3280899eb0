//! The allocator of IOVAs, as `xtask/peers/bench/iova.c` has Linux's.

use std::time::Instant;

use dmaspan::iommu::iova::{Align, Iovas, Request, Space};
use dmaspan::{Iova, IovaRange, Platform};

use super::SZ_4K;
use super::{contention, cpu, is_wanted, measure, measure_race, memory};

const PAIRS: u64 = 20_000;
/// With the pages of an allocation and the threads.
const PAIR_CASES: [(&str, u64, usize); 4] = [
    ("pair_1_threads_1", 1, 1),
    ("pair_1_threads_2", 1, 2),
    ("pair_64_threads_1", 64, 1),
    ("pair_64_threads_2", 64, 2),
];
const LIVE: u64 = 100_000;
const REFUSED_ROUNDS: usize = 9;
/// Of so many live ranges one is freed.
const APART: usize = 5000;
const LAST_32: u64 = (1 << 32) - 1;

/// Threads that know their CPU, and a clock that stands still.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BenchPlatform;

impl Platform for BenchPlatform {
    type Lock = parking_lot::RawMutex;

    #[inline(always)]
    fn cpu(&self) -> usize {
        memory::cpu()
    }

    #[inline(always)]
    fn now(&self) -> u64 {
        0
    }
}

pub(crate) fn run(wanted: &[String]) {
    if contention::is_asked() {
        let pages = if is_wanted(wanted, "pair_64") { 64 } else { 1 };
        return alloc_in_turn(pages);
    }
    for (name, pages, threads) in PAIR_CASES {
        if is_wanted(wanted, name) && threads <= cpu::allowed().len() {
            bench_pairs(name, pages, threads);
        }
    }
    if is_wanted(wanted, "refused_4") {
        bench_refused("refused_4");
    }
}

/// A space from `first` up to the last byte of `bits` bits.
fn space(first: u64, bits: u32) -> Space<BenchPlatform> {
    let aperture = IovaRange::new(Iova::new(first), Iova::new((1 << bits) - 1));
    Space::new(aperture.expect("a valid range"), 12, cpu::count(), BenchPlatform).expect("a space")
}

fn request(pages: u64, limit: u64) -> Request {
    Request { bytes: pages * SZ_4K, align: Align::Natural, limit: Iova::new(limit) }
}

fn alloc_in_turn(pages: u64) {
    let (space, request) = (&space(0, 48), request(pages, (1 << 48) - 1));
    contention::take_turns(|turn| {
        let free = |iovas| assert!(space.free(iovas).is_ok());
        turn.batch(|_| space.alloc(request).expect("room"), free);
    });
}

fn bench_pairs(name: &str, pages: u64, threads: usize) {
    let (space, request) = (&space(0, 48), request(pages, (1 << 48) - 1));
    measure_race(name, threads, PAIRS, |nth, barrier| {
        cpu::pin(if threads == 1 { 1 } else { nth });
        assert!(space.free(space.alloc(request).expect("room")).is_ok());
        barrier.wait();
        let start = Instant::now();
        for _ in 0..PAIRS {
            let Ok(iovas) = space.alloc(request) else { panic!("the space is full") };
            assert!(space.free(iovas).is_ok());
        }
        start.elapsed()
    });
}

/// A 32-bit space of single pages with holes of a page between them refuses four pages, each time
/// after one of them was freed.
fn bench_refused(name: &str) {
    let space = space(LAST_32 + 1 - 2 * LIVE * SZ_4K, 32);
    let one = |_| space.alloc(request(1, LAST_32)).expect("room");
    let mut all: Vec<Iovas> = (0..2 * LIVE).map(one).collect();
    all.sort_by_key(|iovas| iovas.range().start());
    // What stays live is lost with the space.
    let (mut holes, mut live) = (Vec::new(), Vec::new());
    for (n, iovas) in all.into_iter().enumerate() {
        if n % 2 == 0 { &mut holes } else { &mut live }.push(iovas);
    }
    holes.into_iter().for_each(|iovas| assert!(space.free(iovas).is_ok()));
    // What is cached goes back first, in the refusal of something larger.
    assert!(space.alloc(request(4, LAST_32)).is_err());
    let mut freed = live.drain(..).step_by(APART);
    measure(name, ["refuse"], (0, REFUSED_ROUNDS), 1, || {
        // Each joins its two holes to three pages, and no two of them are neighbours.
        assert!(space.free(freed.next().expect("a live range")).is_ok());
        let start = Instant::now();
        assert!(space.alloc(request(4, LAST_32)).is_err());
        [start.elapsed()]
    });
}
