//! The cases that Linux's page tables are timed with too, for `cargo xtask peers`.
//!
//! `peers [FORMAT [CASE...]]` prints a line `case operation nanoseconds` for each measurement. What
//! a case is, and what a round, is the same as in `xtask/peers/bench/tables.h`; so are the
//! addresses and, in [`memory`], where tables lie.
#![expect(unsafe_code, reason = "there is no hardware, and tables lie where it would need them")]

mod container;
mod contention;
mod counted;
mod cpu;
mod dma;
mod domain;
mod iova;
mod memory;
mod pins;
mod registered;
mod slab;
mod swiotlb;

use std::env;
use std::hint::black_box;
use std::process::ExitCode;
use std::slice;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, ArmLpaeS1, ArmLpaeS1Config, ArmV7s, ArmV7sConfig, ConfigError, Format,
    Owned, PageTable, Retired, TableMemory, VtdSs, VtdSsConfig, X86_64, X86_64Config,
};
use dmaspan::iommu::{Gather, Invalidation, Scope, Tables};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};

use memory::{List, Memory};

#[global_allocator]
static HEAP: slab::Slab = slab::Slab;

const PROT: Prot = Prot::READ_WRITE.union(Prot::CACHE);
/// Pages mapped and unmapped a round, where the space has so many.
const TOUCHED: u64 = 16384;
/// Timed rounds a result is the median of; two more warm up.
const ROUNDS: usize = 41;
/// The same for long rounds, where one warms up.
const FRESH_ROUNDS: usize = 9;
/// Scattered spans: one of so many places is used.
const SCATTER: u64 = 3;
/// As many invalidations as an SMMUv3-like gather names.
const MAX_RANGES: usize = 8;
const SZ_4K: u64 = 4 << 10;
/// How often a thread goes through its region in a round.
const PAIR_REPEATS: u64 = 4;
const SZ_64K: u64 = 64 << 10;
const SZ_1M: u64 = 1 << 20;
const SZ_2M: u64 = 2 << 20;
const SZ_1G: u64 = 1 << 30;

/// How a range is mapped and unmapped.
#[derive(Clone, Copy)]
enum How {
    /// One `map_pages`, one `unmap_pages`.
    Range,
    /// The same calls, once a page.
    Paged,
    /// One `map_spans` with a span for each page, one `unmap_pages`.
    Scattered,
}

const RANGE_CASES: [(&str, How, u64, u64); 12] = [
    ("4k_1", How::Range, SZ_4K, 1),
    ("4k_8", How::Range, SZ_4K, 8),
    ("4k_64", How::Range, SZ_4K, 64),
    ("4k_256", How::Range, SZ_4K, 256),
    ("4k_512", How::Range, SZ_4K, 512),
    ("4k_512_paged", How::Paged, SZ_4K, 512),
    ("64k_512", How::Range, SZ_64K, 512),
    ("1m_512", How::Range, SZ_1M, 512),
    ("2m_1", How::Range, SZ_2M, 1),
    ("2m_512", How::Range, SZ_2M, 512),
    ("scattered_4k_512", How::Scattered, SZ_4K, 512),
    ("scattered_2m_8192", How::Scattered, SZ_2M, 8192),
];
const FRESH_CASES: [(&str, u64); 2] = [("16g_4k", SZ_4K), ("16g_2m", SZ_2M)];
/// With the distance of the spans, in 2M.
const SPANS_CASES: [(&str, u64); 2] = [("spans_1g", SCATTER), ("contiguous_1g", 1)];
const PAIR_CASES: [(&str, u64, usize); 4] = [
    ("pair_4k_1_threads_1", 1, 1),
    ("pair_4k_1_threads_2", 1, 2),
    ("pair_4k_512_threads_1", 512, 1),
    ("pair_4k_512_threads_2", 512, 2),
];

fn main() -> ExitCode {
    // `cargo bench` adds `--bench`.
    let arguments: Vec<String> = env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let (formats, cases) = match arguments.split_first() {
        Some((format, cases)) => (vec![format.as_str()], cases),
        None => (FORMATS.to_vec(), [].as_slice()),
    };
    // The one CPU of single threads is the second, away from most interrupts.
    cpu::pin(1);
    keep_freed();
    let memory: &'static Memory = Box::leak(Box::new(Memory::new()));
    for name in formats {
        if !run(name, memory, cases) {
            eprintln!("there is no format `{name}`; there are {}", FORMATS.join(" "));
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

/// Keeps the heap's free memory in the process, as Linux's side and a kernel's slabs do: otherwise
/// what waits in a flush queue is given back to the system at every flush and faulted in again.
#[expect(unsafe_code, reason = "an option of the C library's heap")]
fn keep_freed() {
    // SAFETY: it sets a number that the heap compares with.
    unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX) };
}

const FORMATS: [&str; 13] = [
    "lpae",
    "v7s",
    "vtd_ss",
    "x86_64",
    "amd_v1",
    "iova",
    "swiotlb",
    "dma_lpae",
    "dma_vtdss",
    "container_lpae",
    "container_vtdss",
    "registered",
    "line",
];

/// Whether a case was asked for: all are where none is named.
fn is_wanted(cases: &[String], name: &str) -> bool {
    cases.is_empty() || cases.iter().any(|case| case == name)
}

/// The cases of a format, configured as Linux's drivers configure theirs.
fn run(name: &str, memory: &'static Memory, cases: &[String]) -> bool {
    match name {
        "lpae" => {
            Bench::wide(ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)), memory, cases).run();
            domain::run(memory, cases);
        }
        "iova" => iova::run(cases),
        "swiotlb" => swiotlb::run(cases),
        "dma_lpae" => dma::run_lpae(memory, cases),
        "dma_vtdss" => dma::run_vtd_ss(memory, cases),
        "container_lpae" => container::run_lpae(memory, cases),
        "registered" => registered::run(cases),
        "line" => contention::time_line(),
        "container_vtdss" => container::run_vtd_ss(memory, cases),
        "v7s" => {
            let sizes = Some(SZ_4K | SZ_64K | SZ_1M | (16 * SZ_1M));
            let format =
                ArmV7s::new(ArmV7sConfig { page_sizes: sizes, ..ArmV7sConfig::new(32, 32) });
            let format = format.expect("a valid configuration");
            let (iova, paddr) = (0x4000_0000, 0x5000_0000);
            Bench { format, memory, iova, paddr, iova_bytes: 2 * SZ_1G, wanted: cases }.run();
        }
        "vtd_ss" => Bench::wide(VtdSs::new(VtdSsConfig::new(48, 52)), memory, cases).run(),
        "x86_64" => Bench::wide(X86_64::new(X86_64Config::new(48, 52)), memory, cases).run(),
        "amd_v1" => Bench::wide(AmdV1::new(AmdV1Config::new(64, 52)), memory, cases).run(),
        _ => return false,
    }
    true
}

struct Bench<'c, F> {
    format: F,
    memory: &'static Memory,
    iova: u64,
    paddr: u64,
    /// How much of the space behind `iova` may be used.
    iova_bytes: u64,
    /// The cases asked for; all where there is none.
    wanted: &'c [String],
}

impl<'c, F: Format + Clone> Bench<'c, F>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    /// For formats with at least 47 bits of addresses.
    fn wide(format: Result<F, ConfigError>, memory: &'static Memory, wanted: &'c [String]) -> Self {
        let format = format.expect("a valid configuration");
        let (iova, paddr) = (0x40_0000_0000, 0x1000_0000_0000);
        Self { format, memory, iova, paddr, iova_bytes: 1 << 40, wanted }
    }

    fn run(&self) {
        if contention::is_asked() {
            return self.map_in_turn();
        }
        self.self_check();
        let page_sizes = self.format.geometry().page_sizes;
        let wanted = |name: &str| is_wanted(self.wanted, name);
        let has = |page_size| page_sizes & page_size != 0;
        for &(name, how, page_size, pages) in &RANGE_CASES {
            let ranges = TOUCHED.min(self.iova_bytes / page_size) / pages;
            if wanted(name) && has(page_size) && ranges > 0 {
                self.bench_ranges(name, how, page_size, pages, ranges);
            }
        }
        for &(name, page_size) in &FRESH_CASES {
            if wanted(name) && has(page_size) && self.iova_bytes >= 16 * SZ_1G {
                self.bench_fresh(name, page_size);
            }
        }
        for &(name, scatter) in &SPANS_CASES {
            if wanted(name) && has(SZ_2M) {
                self.bench_spans(name, scatter);
            }
        }
        for &(name, pages, threads) in &PAIR_CASES {
            if wanted(name) && threads <= cpu::allowed().len() {
                self.bench_pairs(name, pages, threads);
            }
        }
    }

    fn table(&self) -> PageTable<F, &'static Memory> {
        PageTable::new(self.format.clone(), self.memory).expect("room for the root")
    }

    /// Spans of `size` bytes, every `scatter`th place.
    fn spans(&self, size: u64, count: u64, scatter: u64) -> Vec<Span> {
        let place = |n| PhysAddr::new(self.paddr + scatter * n * size);
        (0..count).map(|n| Span::new(place(n), size).expect("a valid span")).collect()
    }

    /// Do these tables translate?
    fn self_check(&self) {
        let before = self.memory.tables();
        let table = self.table();
        let mapper = Mapper::new(&table, table.geometry().aperture);
        for pages in [1, 600] {
            mapper.map(How::Range, self.iova, self.paddr, SZ_4K, pages, &[]);
            for offset in (7..pages * SZ_4K).step_by(3 * 4096) {
                let found = mapper.owned.iova_to_phys(Iova::new(self.iova + offset));
                assert_eq!(found, Some(PhysAddr::new(self.paddr + offset)), "a translation");
            }
            mapper.unmap(How::Range, self.iova, SZ_4K, pages);
            assert_eq!(mapper.owned.iova_to_phys(Iova::new(self.iova)), None, "still mapped");
        }
        drop(table);
        assert_eq!(self.memory.tables(), before, "tables were lost");
    }

    fn bench_ranges(&self, name: &str, how: How, page_size: u64, pages: u64, ranges: u64) {
        let table = self.table();
        let mapper = Mapper::new(&table, table.geometry().aperture);
        let spans = self.spans(page_size, pages, SCATTER);
        let (iova, paddr) = (self.iova, self.paddr);
        let ranges = Ranges { how, page_size, pages, count: ranges, iova, paddr };
        measure(name, MAP_UNMAP, (2, ROUNDS), ranges.count, || {
            one_then_the_other(|| ranges.map(&mapper, &spans), || ranges.unmap(&mapper))
        });
    }

    /// 16 GiB in one call, in a table that is empty.
    fn bench_fresh(&self, name: &str, page_size: u64) {
        let pages = 16 * SZ_1G / page_size;
        measure(name, MAP_UNMAP, (1, FRESH_ROUNDS), 1, || {
            let table = self.table();
            let mapper = Mapper::new(&table, table.geometry().aperture);
            one_then_the_other(
                || mapper.map(How::Range, self.iova, self.paddr, page_size, pages, &[]),
                || mapper.unmap(How::Range, self.iova, page_size, pages),
            )
        });
    }

    /// 1 GiB of 2M leaves is unmapped, which returns the memory it led to.
    fn bench_spans(&self, name: &str, scatter: u64) {
        let table = self.table();
        let mapper = Mapper::new(&table, table.geometry().aperture);
        let leaves = self.spans(SZ_2M, SZ_1G / SZ_2M, scatter);
        let range = IovaRange::from_len(Iova::new(self.iova), SZ_1G).expect("a valid range");
        let mut room = SpanBuf::room::<512>();
        measure(name, ["unmap"], (1, FRESH_ROUNDS), 1, || {
            for (n, leaf) in (0..).zip(&leaves) {
                let (iova, paddr) = (self.iova + n * SZ_2M, leaf.paddr().get());
                mapper.map(How::Range, iova, paddr, SZ_2M, 1, &[]);
            }
            let start = Instant::now();
            let mut buf = SpanBuf::new(&mut room);
            let unmapped = mapper.owned.unmap(range, &mut buf).expect("mapped");
            mapper.sync(unmapped.retired);
            let took = start.elapsed();
            let bytes: u64 = buf.spans().iter().map(|span| span.len()).sum();
            assert!(unmapped.rest.is_none() && bytes == SZ_1G, "the spans of all leaves");
            [took]
        });
    }

    /// CPUs in turn, each with 2 MiB or more of its own.
    fn map_in_turn(&self) {
        let pages = match self.wanted {
            [one] if one == "pair_4k_1" => 1,
            [one] if one == "pair_4k_512" => 512,
            _ => return,
        };
        let (table, bytes) = (self.table(), pages * SZ_4K);
        contention::take_turns(|turn| {
            let region = (contention::BATCH as u64 * bytes).next_multiple_of(SZ_2M);
            let first = turn.cpu as u64 * region;
            let iovas = IovaRange::from_len(Iova::new(self.iova + first), region);
            let mapper = Mapper::new(&table, iovas.expect("a valid range"));
            let map = |nth| {
                let at = first + nth * bytes;
                mapper.map(How::Range, self.iova + at, self.paddr + at, SZ_4K, pages, &[]);
                self.iova + at
            };
            turn.batch(map, |iova| mapper.unmap(How::Range, iova, SZ_4K, pages));
        });
    }

    /// Threads that map and unmap in one table, a region for each.
    fn bench_pairs(&self, name: &str, pages: u64, threads: usize) {
        let table = self.table();
        measure_race(name, threads, PAIR_REPEATS * TOUCHED / pages, |nth, barrier| {
            cpu::pin(nth + 1);
            let region = nth as u64 * TOUCHED * SZ_4K;
            let iovas = IovaRange::from_len(Iova::new(self.iova + region), TOUCHED * SZ_4K);
            let mapper = Mapper::new(&table, iovas.expect("a valid range"));
            let (first, memory) = (self.iova, self.paddr);
            let map = |at| mapper.map(How::Range, first + at, memory + at, SZ_4K, pages, &[]);
            let unmap = |at| mapper.unmap(How::Range, first + at, SZ_4K, pages);
            pairs(region, pages * SZ_4K, barrier, map, unmap)
        });
    }
}

/// Ranges one behind the other, each mapped and unmapped by a call.
#[derive(Clone, Copy)]
struct Ranges {
    how: How,
    page_size: u64,
    pages: u64,
    count: u64,
    iova: u64,
    paddr: u64,
}

// By value: what is reached by a reference is read again after each store to a table.
impl Ranges {
    #[inline(always)]
    fn map<F: Format>(self, mapper: &Mapper<'_, F>, spans: &[Span])
    where
        &'static Memory: TableMemory<F::Word, List = List>,
    {
        let Self { how, page_size, pages, count, iova, paddr } = self;
        for at in (0..count).map(|n| n * page_size * pages) {
            mapper.map(how, iova + at, paddr + at, page_size, pages, spans);
        }
    }

    #[inline(always)]
    fn unmap<F: Format>(self, mapper: &Mapper<'_, F>)
    where
        &'static Memory: TableMemory<F::Word, List = List>,
    {
        let Self { how, page_size, pages, count, iova, .. } = self;
        for at in (0..count).map(|n| n * page_size * pages) {
            mapper.unmap(how, iova + at, page_size, pages);
        }
    }
}

/// A caller that maps and unmaps in one range of a table.
struct Mapper<'t, F: Format>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    table: &'t PageTable<F, &'static Memory>,
    owned: Owned<'t, F, &'static Memory>,
}

impl<'t, F: Format> Mapper<'t, F>
where
    &'static Memory: TableMemory<F::Word, List = List>,
{
    fn new(table: &'t PageTable<F, &'static Memory>, range: IovaRange) -> Self {
        // SAFETY: all of this program's ranges in one table are disjoint at any time.
        let owned = unsafe { table.claim(range) };
        Self { table, owned }
    }

    #[inline(always)]
    fn map(&self, how: How, iova: u64, paddr: u64, page_size: u64, pages: u64, spans: &[Span]) {
        let map_pages = |at, pages| {
            let (iova, paddr) = (Iova::new(iova + at), PhysAddr::new(paddr + at));
            let (_, result) = self.owned.map_pages(iova, paddr, page_size, pages, PROT);
            assert!(result.is_ok());
        };
        match how {
            How::Range => map_pages(0, pages),
            How::Paged => (0..pages).for_each(|n| map_pages(n * page_size, 1)),
            How::Scattered => assert!(self.owned.map_spans(Iova::new(iova), spans, PROT).is_ok()),
        }
    }

    #[inline(always)]
    fn unmap(&self, how: How, iova: u64, page_size: u64, pages: u64) {
        match how {
            How::Range | How::Scattered => {
                let unmapped = self.owned.unmap_pages(Iova::new(iova), page_size, pages);
                assert!(unmapped.bytes == page_size * pages);
                self.sync(unmapped.retired);
            }
            How::Paged => {
                let mut gather = Gather::new(MAX_RANGES);
                for n in 0..pages {
                    let at = Iova::new(iova + n * page_size);
                    let unmapped = self.owned.unmap_pages(at, page_size, 1);
                    assert!(unmapped.bytes == page_size);
                    if let Err(retired) = gather.add(unmapped.retired) {
                        self.sync(retired);
                    }
                }
                invalidate(&gather.invalidation());
            }
        }
    }

    /// What a driver does with what was retired, but for the hardware: it gathers, hardware
    /// forgets, and tables are freed.
    #[inline(always)]
    fn sync(&self, retired: Retired<List>) {
        let mut gather = Gather::new(MAX_RANGES);
        let Err(retired) = gather.add(retired) else {
            return invalidate(&gather.invalidation());
        };
        let range = retired.range();
        let scope =
            range.as_ref().map_or(Scope::All, |range| Scope::Ranges(slice::from_ref(range)));
        let leaf_sizes = retired.leaf_sizes();
        invalidate(&Invalidation { scope, leaf_sizes, tables: Tables::Detached });
        // SAFETY: no hardware walks this table.
        unsafe { self.table.free(retired) }
    }
}

/// The commands to the hardware, of which there is none.
#[inline(never)]
fn invalidate(invalidation: &Invalidation<'_>) {
    black_box(invalidation);
}

const MAP_UNMAP: [&str; 2] = ["map", "unmap"];

/// Times operations on `count` things in each round, some of which warm up before, and prints the
/// median of each as a line.
///
/// Under a counter of instructions there are as many rounds as it asks for, and none warms up; the
/// line says how many operations a round has.
fn measure<const N: usize>(
    case: &str,
    operations: [&str; N],
    (warm_up, timed): (usize, usize),
    count: u64,
    mut round: impl FnMut() -> [Duration; N],
) {
    if let Some(rounds) = counted::rounds() {
        for number in 0..rounds {
            counted::begin(number);
            black_box(round());
        }
        println!("{case} pair {count}.000");
        return;
    }
    let mut ns = [const { Vec::new() }; N];
    for number in 0..warm_up + timed {
        for (ns, took) in ns.iter_mut().zip(round()) {
            if number >= warm_up {
                ns.push(took.as_nanos() as f64 / count as f64);
            }
        }
    }
    for (operation, mut ns) in operations.into_iter().zip(ns) {
        ns.sort_by(f64::total_cmp);
        println!("{case} {operation} {:.3}", ns[ns.len() / 2]);
    }
}

/// The same of `count` pairs in each of so many threads at once, of which the slowest counts.
fn measure_race(
    case: &str,
    threads: usize,
    count: u64,
    work: impl Fn(usize, &Barrier) -> Duration + Sync,
) {
    measure(case, ["pair"], (1, ROUNDS), count, || [cpu::race(threads, &work)]);
}

/// How long a map takes, and an unmap after it.
#[inline(always)]
fn one_then_the_other(map: impl FnOnce(), unmap: impl FnOnce()) -> [Duration; 2] {
    let start = Instant::now();
    counted::only("map", map);
    let done = start.elapsed();
    counted::only("unmap", unmap);
    [done, start.elapsed() - done]
}

/// Goes through a thread's region several times, when all are ready: maps all ranges of so many
/// bytes by their offsets, and unmaps them.
#[inline(always)]
fn pairs(
    region: u64,
    bytes: u64,
    barrier: &Barrier,
    map: impl Fn(u64),
    unmap: impl Fn(u64),
) -> Duration {
    let ranges = TOUCHED * SZ_4K / bytes;
    barrier.wait();
    let start = Instant::now();
    for _ in 0..PAIR_REPEATS {
        (0..ranges).for_each(|n| map(region + n * bytes));
        (0..ranges).for_each(|n| unmap(region + n * bytes));
    }
    start.elapsed()
}
