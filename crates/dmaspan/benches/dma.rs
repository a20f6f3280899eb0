//! A map and an unmap of one buffer through the DMA API, alone on one CPU, and of that the IOVAs:
//! nanoseconds.
//!
//! What a map returns is the same for a device of any type, and counts as a leak where it is
//! dropped: for that it goes through memory once more than this program alone would need.
#![expect(unsafe_code, reason = "there is no hardware, and no memory is touched")]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, Flush, NoPool, Piece, RawMemory};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::iova::{Align, Request, Space};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Direction, Iova, IovaRange, PhysAddr, Platform, Span};

/// Hardware that does nothing.
struct Nothing;

// SAFETY: no device uses the domain.
unsafe impl IommuOps for Nothing {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        black_box(what);
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        8
    }
}

/// One thread; the clock stands still.
struct OneThread;

impl Platform for OneThread {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }
}

fn pairs(c: &mut Criterion) {
    let mut group = c.benchmark_group("dma_pair");
    for (name, flush) in [("lazy", Flush::Lazy), ("strict", Flush::Strict)] {
        for pages in [1u64, 8, 64, 256] {
            let arena = Arena::new(PhysAddr::new(1 << 40), 64 << 20);
            let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
            let table = PageTable::new(format, arena).unwrap();
            let domain = Domain::new(table, Nothing).unwrap();
            let config = DmaConfig { flush, ..DmaConfig::new(1) };
            let domain = Arc::new(DmaDomain::new(domain, config, OneThread).unwrap());
            let device = Device::new(domain, NoPool, DeviceConfig::bits(48)).unwrap();
            let span = Span::new(PhysAddr::new(0x1000_0000), pages * 4096).unwrap();
            group.bench_function(BenchmarkId::new(name, pages), |b| {
                b.iter(|| {
                    // SAFETY: nobody touches the memory.
                    let memory = unsafe { RawMemory::new(Piece::memory(span)) };
                    let mapping = device.map_single(memory, Direction::Bidirectional).unwrap();
                    black_box(mapping.addr());
                    let _ = black_box(device.unmap(mapping).unwrap());
                });
            });
        }
    }
    group.finish();
}

fn request(pages: u64) -> Request {
    Request { bytes: pages * 4096, align: Align::Natural, limit: Iova::new(u64::MAX) }
}

/// An allocation and its release: from magazines, and of 2048 pages from the tree.
fn iova_pairs(c: &mut Criterion) {
    let mut group = c.benchmark_group("iova_pair");
    let aperture = IovaRange::from_len(Iova::new(0), 1 << 48).unwrap();
    for pages in [1u64, 64, 2048] {
        let space = Space::new(aperture, 12, 1, OneThread).unwrap();
        group.bench_function(BenchmarkId::from_parameter(pages), |b| {
            b.iter(|| {
                let iovas = space.alloc(black_box(request(pages))).unwrap();
                space.free(black_box(iovas)).unwrap();
            });
        });
    }
    group.finish();
}

/// A release, the refusal after it, which looks for it in all caches, and an allocation, in a space
/// of 100,000 live ranges where nothing else is free.
fn iova_refusals(c: &mut Criterion) {
    const LIVE: u64 = 100_000;
    let aperture = IovaRange::from_len(Iova::new(4096), LIVE * 4096).unwrap();
    let space = Space::new(aperture, 12, 1, OneThread).unwrap();
    let mut live: Vec<_> = (0..LIVE).map(|_| space.alloc(request(1)).unwrap()).collect();
    let mut next = 0;
    c.bench_function("iova_refusal", |b| {
        b.iter(|| {
            // Far from the last one, as those of a space that has been used for a while are.
            next = (next + 7919) % live.len();
            space.free(live.swap_remove(next)).unwrap();
            assert!(space.alloc(black_box(request(2))).is_err());
            live.push(space.alloc(request(1)).unwrap());
        });
    });
}

criterion_group!(benches, pairs, iova_pairs, iova_refusals);
criterion_main!(benches);
