//! Allocating the pages of memory by one thread and by several.

use std::hint::black_box;
use std::num::NonZero;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dmaspan_linux::{HugetlbReservation, Memory, MemoryKind};

const LEN: u64 = 2 << 30;

/// Files, as memory that is made is populated already: of base pages and of hugetlb pages.
fn populating(c: &mut Criterion) {
    for kind in [MemoryKind::Memfd, MemoryKind::MemfdHugetlb2M] {
        let mut reserved = match HugetlbReservation::for_memory(kind, LEN) {
            Ok(reservation) => reservation,
            Err(error) => return eprintln!("SKIP: {error}"),
        };
        let mut group = c.benchmark_group(format!("populate/{kind}"));
        group.throughput(Throughput::Bytes(LEN)).sample_size(10);
        let most = available_parallelism().map_or(1, NonZero::get);
        for threads in [1, most] {
            let Some(threads) = NonZero::new(threads) else { continue };
            group.bench_function(format!("{threads} threads"), |bencher| {
                bencher.iter_custom(|count| (0..count).map(|_| once(kind, threads)).sum());
            });
        }
        group.finish();
        reserved.iter_mut().for_each(HugetlbReservation::mapped);
    }
}

/// How long the pages of a fresh file took, or no time where there is none.
fn once(kind: MemoryKind, threads: NonZero<usize>) -> Duration {
    // A small one, lengthened: only its first page is there.
    let timed = || {
        let first = Memory::new(kind, kind.page_size()).ok()?;
        let file = std::fs::File::from(first.file()?.0.try_clone_to_owned().ok()?);
        drop(first);
        file.set_len(LEN).ok()?;
        let memory = Memory::from_file(file, 0, LEN).ok()?;
        let begin = Instant::now();
        black_box(&memory).populate_by(threads).ok()?;
        Some(begin.elapsed())
    };
    timed().unwrap_or_default()
}

criterion_group!(benches, populating);
criterion_main!(benches);
