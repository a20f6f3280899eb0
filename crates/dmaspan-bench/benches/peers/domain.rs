//! Domains and the DMA API over them, as drivers call them.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, Flush, NoPool, Piece, RawMemory};
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Direction, Iova, IovaRange, PhysAddr, Span};

use super::iova::BenchPlatform;
use super::memory::Memory;
use super::{MAP_UNMAP, MAX_RANGES, PAIR_REPEATS, PROT, ROUNDS, SZ_2M, SZ_4K, TOUCHED};
use super::{
    contention, cpu, invalidate, is_wanted, measure, measure_race, one_then_the_other, pairs,
};

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
const PAIR_CASES: [(&str, u64, usize); 4] = [
    ("domain_pair_1_threads_1", 1, 1),
    ("domain_pair_1_threads_2", 1, 2),
    ("domain_pair_64_threads_1", 64, 1),
    ("domain_pair_64_threads_2", 64, 2),
];
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
    if contention::is_asked() {
        if is_wanted(wanted, "domain_pair_1") {
            map_in_turn(memory);
        }
        return;
    }
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
    for (name, flush) in [("dma_pair_4k_1", Flush::Lazy), ("dma_pair_strict_4k_1", Flush::Strict)] {
        if is_wanted(wanted, name) {
            bench_dma(name, flush, memory);
        }
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

/// CPUs in turn, each with 2 MiB of its own.
fn map_in_turn(memory: &'static Memory) {
    let domain = domain(memory);
    contention::take_turns(|turn| {
        let first = turn.cpu as u64 * SZ_2M;
        let map = |nth| {
            map(&domain, first + nth * SZ_4K, SZ_4K);
            first + nth * SZ_4K
        };
        turn.batch(map, |at| unmap(&domain, at, SZ_4K));
    });
}

fn bench_ranges(name: &str, memory: &'static Memory, pages: u64) {
    let domain = domain(memory);
    let (bytes, ranges) = (pages * SZ_4K, TOUCHED / pages);
    measure(name, MAP_UNMAP, (2, ROUNDS), ranges, || {
        one_then_the_other(
            || (0..ranges).for_each(|n| map(&domain, n * bytes, bytes)),
            || (0..ranges).for_each(|n| unmap(&domain, n * bytes, bytes)),
        )
    });
}

fn bench_pairs(name: &str, memory: &'static Memory, pages: u64, threads: usize) {
    let (domain, bytes) = (&domain(memory), pages * SZ_4K);
    measure_race(name, threads, PAIR_REPEATS * TOUCHED / pages, |nth, barrier| {
        cpu::pin(nth + 1);
        let region = nth as u64 * TOUCHED * SZ_4K;
        let map = |at| map(domain, at, bytes);
        pairs(region, bytes, barrier, map, |at| unmap(domain, at, bytes))
    });
}

/// A page mapped and unmapped through everything that a driver goes through, lazily flushed.
fn bench_dma(name: &str, flush: Flush, memory: &'static Memory) {
    let config = DmaConfig { flush, ..DmaConfig::new(cpu::MAX) };
    let domain = DmaDomain::new(domain(memory), config, BenchPlatform).expect("IOVAs");
    let device = Device::new(Arc::new(domain), NoPool, DeviceConfig::bits(48));
    let device = device.expect("a device");
    let span = Span::new(PhysAddr::new(PADDR), SZ_4K).expect("a valid span");
    measure(name, ["pair"], (2, ROUNDS), DMA_PAIRS, || {
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
        [start.elapsed()]
    });
}
