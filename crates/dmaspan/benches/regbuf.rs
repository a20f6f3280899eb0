//! Importing parts of a registered buffer at random offsets, and descriptors of an 8 MiB I/O by 4
//! spans and by 2048: nanoseconds.
#![expect(unsafe_code, reason = "there are no devices, and no memory is touched")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dmaspan::regbuf::descriptors::{
    Chain, ListPage, MemoryPageSize, ScatterEntry, SegmentLimits, Sgl, SglDescriptor,
    SplitDescriptor,
};
use dmaspan::regbuf::{Buffer, Keep, Segments, SegmentsBuilder};
use dmaspan::{Direction, DmaAddr, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::rng::Rng;

/// There is nothing to let go of.
struct Nothing;

impl Keep<PhysAddr> for Nothing {
    fn end(&mut self, _segments: &Segments<PhysAddr>) {}
}

/// A buffer in segments of these lengths, which are not neighbours.
fn buffer(lens: impl Iterator<Item = u64>) -> Buffer<PhysAddr> {
    let mut builder = SegmentsBuilder::new();
    let mut at = 1 << 32;
    for len in lens {
        builder.push(Span::new(PhysAddr::new(at), len).unwrap()).unwrap();
        at += len + 0x1000;
    }
    let segments = builder.build().unwrap();
    let user = UserRange::from_len(UserAddr::new(1 << 40), segments.len()).unwrap();
    // SAFETY: no device uses the addresses.
    unsafe { Buffer::new(segments, user, Prot::READ_WRITE, Box::new(Nothing)) }.unwrap()
}

/// The first piece of 4 KiB at a random offset.
fn imports(c: &mut Criterion) {
    const LEN: u64 = 4096;
    let huge = 2 << 20;
    let mixed = |index: u64| if index.is_multiple_of(7) { huge } else { 4096 * (1 + index % 5) };
    let buffers = [
        ("one", buffer([1 << 40].into_iter())),
        ("2M_8M", buffer([huge; 4].into_iter())),
        ("2M_1G", buffer([huge; 512].into_iter())),
        ("2M_1T", buffer((0..1 << 19).map(|_| huge))),
        ("4K_1G", buffer((0..1 << 18).map(|_| 4096))),
        ("runs_1G", buffer((0..1 << 17).map(|index| 4096 * (1 + index % 3)))),
        ("mixed_100G", buffer((0..1 << 18).map(mixed))),
    ];
    let mut group = c.benchmark_group("import");
    for (name, buffer) in &buffers {
        // Looked up beforehand: a division costs as much as an import.
        let mut random = Rng::new(1);
        let offsets: Vec<u64> = (0..4096).map(|_| random.below(buffer.len() - LEN)).collect();
        let mut at = 0;
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                at = (at + 1) % 4096;
                let mut import = buffer.import(offsets[at], LEN, Direction::FromDevice).unwrap();
                black_box(import.next())
            });
        });
    }
    group.finish();
}

const BYTES: u64 = 8 << 20;
/// Entries of a list page of 4 KiB.
const PRPS: usize = 512;

/// An I/O of so many spans, no two of which touch.
fn spans(count: u64) -> Vec<Span<DmaAddr>> {
    let len = BYTES / count;
    let of = |n| Span::new(DmaAddr::new((1 << 32) + n * 2 * len), len);
    (0..count).map(|n| of(n).unwrap()).collect()
}

fn segments(c: &mut Criterion) {
    let mut group = c.benchmark_group("regbuf_segments");
    let limits = SegmentLimits::default();
    for count in [4, 2048] {
        let spans = spans(count);
        let mut entries = vec![ScatterEntry::default(); 2048];
        group.bench_function(BenchmarkId::new("sg", count), |b| {
            b.iter(|| {
                let spans = black_box(&spans[..]).iter().copied();
                limits.write(spans, black_box(&mut entries[..])).unwrap()
            });
        });
        let mut descriptors = vec![SglDescriptor::default(); 2048];
        group.bench_function(BenchmarkId::new("sgl", count), |b| {
            b.iter(|| {
                let entries = black_box(&mut descriptors[..]);
                let list = &mut [ListPage { addr: DmaAddr::new(0x1000), entries }];
                Sgl::write(limits, black_box(&spans[..]).iter().copied(), list).unwrap()
            });
        });
        let mut table = vec![SplitDescriptor::default(); 2048];
        group.bench_function(BenchmarkId::new("virtio", count), |b| {
            b.iter(|| {
                let spans = black_box(&spans[..]).iter().copied();
                let chain = Chain::new(limits, spans, []);
                chain.write_split_table(black_box(&mut table[..])).unwrap()
            });
        });
    }
    group.finish();
}

/// PRP lists, next to stores of as many entries to the same memory.
fn pages(c: &mut Criterion) {
    let mut group = c.benchmark_group("regbuf_pages");
    let page = MemoryPageSize::new(0).unwrap();
    let mut memory = vec![0_u64; 5 * PRPS];
    group.bench_function("stores", |b| {
        b.iter(|| {
            let (addr, memory) = (black_box(1_u64 << 32), black_box(&mut memory[..2051]));
            for (page, place) in (0..).zip(memory) {
                *place = (addr + page * 4096).to_le();
            }
        });
    });
    for count in [4, 2048] {
        let spans = spans(count);
        group.bench_function(BenchmarkId::new("prp", count), |b| {
            let mut addr = DmaAddr::new(0x1000);
            let mut list: Vec<_> = memory
                .chunks_mut(PRPS)
                .map(|entries| {
                    addr = addr.wrapping_add(0x2000);
                    ListPage { addr, entries }
                })
                .collect();
            b.iter(|| {
                let spans = black_box(&spans[..]).iter().copied();
                page.write(spans, black_box(&mut list[..])).unwrap()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, imports, segments, pages);
criterion_main!(benches);
