//! Domains and the DMA API over them, as drivers call them.

use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, Flush, NoPool, Piece, RawMemory};
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Direction, Iova, IovaRange, PhysAddr, Span};

use super::iova::BenchPlatform;
use super::memory::Memory;
use super::{MAX_RANGES, PAIR_REPEATS, PROT, ROUNDS, SZ_4K, TOUCHED};
use super::{cpu, invalidate, is_wanted, nanoseconds, print};

const IOVA: u64 = 0x40_0000_0000;
const PADDR: u64 = 0x1000_0000_0000;
/// With the pages of a range.
const CASES: [(&str, u64); 5] = [
    ("domain_4k_1", 1),
    ("domain_4k_8", 8),
    ("domain_4k_32", 32),
    ("domain_4k_64", 64),
    ("domain_4k_256", 256),
];
/// With the pages of a range and the threads.
const PAIR_CASES: [(&str, u64, usize); 2] =
    [("domain_pair_64_threads_1", 64, 1), ("domain_pair_64_threads_2", 64, 2)];
/// Pairs in a round.
const DMA_PAIRS: u64 = 20_000;

/// A driver without hardware: an invalidation is an empty call, as on Linux's side.
struct NoHardware;

// SAFETY: there is no device.
unsafe impl IommuOps for NoHardware {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        invalidate(what);
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        MAX_RANGES
    }
}

type BenchDomain = Domain<ArmLpaeS1<12>, &'static Memory, NoHardware>;

fn domain(memory: &'static Memory) -> BenchDomain {
    let format = ArmLpaeS1::new(ArmLpaeS1Config::new(48, 48)).expect("a valid configuration");
    let table = PageTable::new(format, memory).expect("room for the root");
    Domain::new(table, NoHardware).expect("an empty table")
}

pub(crate) fn run(memory: &'static Memory, wanted: &[String]) {
    for (name, pages) in CASES {
        if is_wanted(wanted, name) {
            bench_ranges(name, memory, pages);
        }
    }
    for (name, pages, threads) in PAIR_CASES {
        if is_wanted(wanted, name) && threads <= cpu::allowed().len() {
            bench_pairs(name, memory, pages, threads);
        }
    }
    if is_wanted(wanted, "dma_pair_4k_1") {
        bench_dma("dma_pair_4k_1", memory);
    }
}

#[inline(always)]
fn map(domain: &BenchDomain, offset: u64, bytes: u64) {
    let span = Span::new(PhysAddr::new(PADDR + offset), bytes).expect("a valid span");
    // SAFETY: no device uses the domain, and each thread has its own range.
    let mapped = unsafe { domain.map_spans(Iova::new(IOVA + offset), &[span], PROT) };
    assert!(mapped.is_ok());
}

#[inline(always)]
fn unmap(domain: &BenchDomain, offset: u64, bytes: u64) {
    let range = IovaRange::from_len(Iova::new(IOVA + offset), bytes).expect("a valid range");
    // SAFETY: as above.
    let removed = unsafe { domain.remove(range) };
    assert!(removed.is_ok_and(|unsynced| unsynced.sync().is_ok()));
}

fn bench_ranges(name: &str, memory: &'static Memory, pages: u64) {
    let domain = domain(memory);
    let (bytes, ranges) = (pages * SZ_4K, TOUCHED / pages);
    let (mut map_ns, mut unmap_ns) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS + 2 {
        let start = Instant::now();
        (0..ranges).for_each(|n| map(&domain, n * bytes, bytes));
        let mapped = start.elapsed();
        (0..ranges).for_each(|n| unmap(&domain, n * bytes, bytes));
        let unmapped = start.elapsed() - mapped;
        if round >= 2 {
            map_ns.push(nanoseconds(mapped, ranges));
            unmap_ns.push(nanoseconds(unmapped, ranges));
        }
    }
    print(name, "map", map_ns);
    print(name, "unmap", unmap_ns);
}

fn bench_pairs(name: &str, memory: &'static Memory, pages: u64, threads: usize) {
    let domain = &domain(memory);
    let mut pair_ns = Vec::new();
    for round in 0..=ROUNDS {
        let slowest = cpu::race(threads, |nth, barrier| pairs(domain, nth, pages, barrier));
        if round >= 1 {
            let pairs = PAIR_REPEATS * TOUCHED / pages;
            pair_ns.push(nanoseconds(slowest, pairs));
        }
    }
    print(name, "pair", pair_ns);
}

fn pairs(domain: &BenchDomain, nth: usize, pages: u64, barrier: &Barrier) -> Duration {
    cpu::pin(nth + 1);
    let (first, bytes) = (nth as u64 * TOUCHED * SZ_4K, pages * SZ_4K);
    barrier.wait();
    let start = Instant::now();
    for _ in 0..PAIR_REPEATS {
        (0..TOUCHED / pages).for_each(|n| map(domain, first + n * bytes, bytes));
        (0..TOUCHED / pages).for_each(|n| unmap(domain, first + n * bytes, bytes));
    }
    start.elapsed()
}

/// A page mapped and unmapped through everything that a driver goes through, lazily flushed.
fn bench_dma(name: &str, memory: &'static Memory) {
    let config = DmaConfig { flush: Flush::Lazy, ..DmaConfig::new(cpu::MAX) };
    let domain = DmaDomain::new(domain(memory), config, BenchPlatform).expect("IOVAs");
    let device = Device::new(Arc::new(domain), NoPool, DeviceConfig::bits(48));
    let device = device.expect("a device");
    let span = Span::new(PhysAddr::new(PADDR), SZ_4K).expect("a valid span");
    let mut pair_ns = Vec::new();
    for round in 0..ROUNDS + 2 {
        let start = Instant::now();
        for _ in 0..DMA_PAIRS {
            // SAFETY: nobody has the memory, and no device uses it.
            let memory = unsafe { RawMemory::new(Piece::memory(span)) };
            let Ok(mapping) = device.map_single(memory, Direction::Bidirectional) else {
                panic!("no mapping");
            };
            black_box(mapping.addr());
            assert!(device.unmap(mapping).is_ok());
        }
        if round >= 2 {
            pair_ns.push(nanoseconds(start.elapsed(), DMA_PAIRS));
        }
    }
    print(name, "pair", pair_ns);
}
