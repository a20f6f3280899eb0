//! The cost of one range: nanoseconds to map and unmap it in tables that exist.
//!
//! The cases are those of the harness that times Linux's own page tables in user space, so the two
//! can be run side by side: 64-bit LPAE stage 1, 4K granule, coherent walks, no hardware to
//! invalidate. Each measurement goes over many ranges, so that the tables do not stay in the
//! first-level cache.
//!
//! The tables are in an arena, which looks up each table that a call enters, to refuse one that is
//! part of no tree. In memory without that look, as that of the harness, a call takes less.
#![expect(unsafe_code, reason = "tables are freed without hardware that could walk them")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main};
use dmaspan::io_pgtable::{Arena, ArenaList, ArmLpaeS1, ArmLpaeS1Config, PageTable, Retired};
use dmaspan::iommu::Gather;
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};

type Table = PageTable<ArmLpaeS1<12>, Arena>;

const IOVA: u64 = 0x40_0000_0000;
/// Not aligned to 2 MiB, so that contiguous memory is mapped by pages too.
const PADDR: u64 = 0x1000_0000_1000;
const PROT: Prot = Prot::READ_WRITE.union(Prot::CACHE);
/// Pages mapped and unmapped a round.
const TOUCHED: u64 = 16384;
/// As many invalidations as an SMMUv3-like gather names.
const MAX_RANGES: usize = 8;

/// How a range is mapped, or unmapped.
#[derive(Clone, Copy, PartialEq)]
enum How {
    /// `map_pages`, `unmap_pages`.
    Pages,
    /// `map_spans`, `unmap` with its spans, of contiguous memory.
    Contiguous,
    /// The same where each page is a span of its own.
    Scattered,
}

struct Bench {
    table: Table,
    how: How,
    page_size: u64,
    pages: u64,
    spans: Vec<Span>,
    room: Vec<Span>,
}

impl Bench {
    fn new(how: How, page_size: u64, pages: u64) -> Self {
        let arena = Arena::new(PhysAddr::new(0x1_0000_0000), 256 << 20);
        let format = ArmLpaeS1::new(ArmLpaeS1Config::new(48, 48)).expect("a valid configuration");
        let table = PageTable::new(format, arena).expect("room for the root");
        let span = |paddr, len| Span::new(PhysAddr::new(paddr), len).expect("a valid span");
        let spans = match how {
            How::Pages | How::Contiguous => vec![span(PADDR, page_size * pages)],
            How::Scattered => {
                (0..pages).map(|n| span(PADDR + 3 * n * page_size, page_size)).collect()
            }
        };
        Self { table, how, page_size, pages, spans, room: SpanBuf::room::<1024>().to_vec() }
    }

    fn ranges(&self) -> u64 {
        TOUCHED / self.pages
    }

    fn iova(&self, n: u64) -> Iova {
        Iova::new(IOVA + n * self.page_size * self.pages)
    }

    fn map(&mut self, iova: Iova) {
        let table = self.table.whole();
        if self.how == How::Pages {
            let paddr = PhysAddr::new(PADDR & !(self.page_size - 1));
            let (bytes, result) = table.map_pages(iova, paddr, self.page_size, self.pages, PROT);
            assert!(result.is_ok() && bytes == self.page_size * self.pages);
        } else {
            assert!(table.map_spans(iova, &self.spans, PROT).is_ok());
        }
    }

    fn unmap(&mut self, iova: Iova, pages: u64) {
        let table = self.table.whole();
        let bytes = self.page_size * pages;
        if self.how == How::Pages {
            let unmapped = table.unmap_pages(iova, self.page_size, pages);
            assert!(unmapped.bytes == bytes);
            sync(&self.table, unmapped.retired);
        } else {
            let range = IovaRange::from_len(iova, bytes).expect("a valid range");
            let mut buf = SpanBuf::new(&mut self.room);
            let unmapped = table.unmap(range, &mut buf).expect("mapped");
            black_box(buf.spans());
            assert!(unmapped.rest.is_none());
            sync(&self.table, unmapped.retired);
        }
    }

    /// Time to map, and to unmap, each range once. Unmapped in `PARTS`, none of which covers a
    /// table, it leaves its tables, whole and empty, for the next map to find.
    fn round<const PARTS: u64>(&mut self) -> (Duration, Duration) {
        let start = Instant::now();
        for n in 0..self.ranges() {
            self.map(self.iova(n));
        }
        let mapped = start.elapsed();
        let start = Instant::now();
        let pages = self.pages / PARTS;
        for n in 0..self.ranges() {
            for part in 0..PARTS {
                self.unmap(self.iova(n).wrapping_add(part * pages * self.page_size), pages);
            }
        }
        (mapped, start.elapsed())
    }
}

/// What a driver does with what was retired, but for the hardware: it gathers, and tables are
/// freed.
fn sync(table: &Table, retired: Retired<ArenaList>) {
    if retired.has_tables() {
        // SAFETY: no hardware walks this table.
        unsafe { table.free(retired) }
    } else {
        let mut gather = Gather::new(MAX_RANGES);
        let _ = gather.add(retired);
        black_box(gather.invalidation());
    }
}

/// Times `round` as often as criterion wants, and reports the median round each time: what else
/// runs on the machine hits single rounds.
fn measure(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    mut bench: Bench,
    mut round: impl FnMut(&mut Bench) -> Duration,
) {
    group.bench_function(name, |b| {
        b.iter_custom(|iterations| {
            let mut rounds: Vec<_> = (0..iterations).map(|_| round(&mut bench)).collect();
            rounds.sort_unstable();
            rounds[rounds.len() / 2].mul_f64(iterations as f64 / bench.ranges() as f64)
        });
    });
}

fn bench_case(c: &mut Criterion, name: &str, how: How, page_size: u64, pages: u64) {
    let mut group = c.benchmark_group(name);
    let bench = || Bench::new(how, page_size, pages);
    measure(&mut group, "map", bench(), |bench| bench.round::<1>().0);
    measure(&mut group, "unmap", bench(), |bench| bench.round::<1>().1);
    if pages > 1 {
        measure(&mut group, "map_present", bench(), |bench| bench.round::<2>().0);
        measure(&mut group, "unmap_halves", bench(), |bench| bench.round::<2>().1);
    }
    group.finish();
}

fn io_pgtable(c: &mut Criterion) {
    for pages in [1, 8, 64, 512] {
        bench_case(c, &format!("pages_4k_x{pages}"), How::Pages, 4096, pages);
    }
    bench_case(c, "contiguous_4k_x512", How::Contiguous, 4096, 512);
    bench_case(c, "scattered_4k_x512", How::Scattered, 4096, 512);
    bench_case(c, "pages_2m_x512", How::Pages, 2 << 20, 512);
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(700));
    targets = io_pgtable
}
criterion_main!(benches);
