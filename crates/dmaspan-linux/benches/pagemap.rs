//! Finding the frames of memory: one look-up for each page against one for each huge leaf.
//!
//! Needs the privilege to see frame numbers.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dmaspan::{PhysAddr, Span};
use dmaspan_linux::{FrameSource, HugetlbReservation, Lookup, Memory, MemoryKind};

/// The length of the memory in bytes, of whatever page size.
fn len_of(kind: MemoryKind) -> u64 {
    kind.page_size().max(256 << 20)
}

fn lookups(c: &mut Criterion) {
    let source = match FrameSource::<PhysAddr>::new() {
        Ok(source) => source,
        Err(why) => return eprintln!("SKIP: {why}"),
    };
    for kind in [MemoryKind::Thp, MemoryKind::Base, MemoryKind::Hugetlb1G] {
        let len = len_of(kind);
        let mut reserved = match HugetlbReservation::for_memory(kind, len) {
            Ok(reservation) => reservation,
            Err(error) => return eprintln!("SKIP: {error}"),
        };
        let memory = match Memory::new(kind, len) {
            Ok(memory) => memory,
            Err(error) => return eprintln!("SKIP: {error}"),
        };
        reserved.iter_mut().for_each(HugetlbReservation::mapped);
        let mut group = c.benchmark_group(format!("pagemap/{kind}"));
        group.throughput(Throughput::Bytes(len));
        for lookup in [Lookup::EveryPage, Lookup::HugeLeaves] {
            let mut spans: Vec<Span> = Vec::new();
            group.bench_function(format!("{lookup:?}"), |bencher| {
                bencher.iter(|| {
                    spans.clear();
                    let range = black_box(memory.user_range());
                    source.frames(&memory, range, lookup, &mut spans)
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, lookups);
criterion_main!(benches);
