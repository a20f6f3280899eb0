//! Importing parts of a registered buffer at random offsets: nanoseconds.
#![expect(unsafe_code, reason = "there are no devices, and no memory is touched")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dmaspan::regbuf::{Buffer, Keep, Segments, SegmentsBuilder};
use dmaspan::{Direction, PhysAddr, Prot, Span, UserAddr, UserRange};

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

/// Numbers that nothing foresees (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
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
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
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

criterion_group!(benches, imports);
criterion_main!(benches);
