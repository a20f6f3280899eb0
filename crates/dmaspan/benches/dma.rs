//! A map and an unmap of one buffer through the DMA API, alone on one CPU: nanoseconds.
#![expect(unsafe_code, reason = "there is no hardware, and no memory is touched")]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, Flush, NoPool, Piece, RawMemory};
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Direction, PhysAddr, Platform, Span};
use dmaspan_sim::Arena;

/// Hardware that does nothing.
struct Nothing;

// SAFETY: no device uses the domain.
unsafe impl IommuOps for Nothing {
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

criterion_group!(benches, pairs);
criterion_main!(benches);
