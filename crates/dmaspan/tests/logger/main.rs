//! A logger is code of somebody else's and may panic. This is a program of its own, since a program
//! has one logger.
#![expect(unsafe_code, reason = "the tests promise what memory is")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Flush, NoPool, Piece, ReserveRequest,
    Segment,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::platform::OneThread;
use dmaspan::{Direction, PhysAddr, Span};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use log::{LevelFilter, Log, Metadata, Record};

/// Panics at each message.
struct Panics;

impl Log for Panics {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        assert!(std::thread::panicking(), "on purpose: {}", record.args());
    }

    fn flush(&self) {}
}

/// Whether the logger panics in `run`.
fn panics(run: impl FnOnce()) -> bool {
    let _set_before = log::set_logger(&Panics);
    log::set_max_level(LevelFilter::Trace);
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

/// A simulated IOMMU that can stop to answer.
#[derive(Clone)]
struct Iommu(Iotlb<ArmLpaeS1Walker, Arena>, Arc<AtomicBool>);

impl Iommu {
    fn check(&self) -> Result<(), HardwareError> {
        let stuck = HardwareError { what: "the IOMMU is stuck", status: 9 };
        if self.1.load(Ordering::Relaxed) { Err(stuck) } else { Ok(()) }
    }
}

// SAFETY: what it confirms, the simulated IOMMU has confirmed.
unsafe impl IommuOps for Iommu {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.check().and_then(|()| self.0.invalidate(what))
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.check().and_then(|()| self.0.detach())
    }

    fn max_ranges(&self) -> usize {
        self.0.max_ranges()
    }
}

fn domain() -> Domain<ArmLpaeS1<12>, Arena, Iommu> {
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 22);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, tables.clone()).unwrap();
    let registers = table.format().registers(table.root());
    let iommu = Iotlb::new(ArmLpaeS1Walker::new(registers.into()).unwrap(), tables);
    Domain::new(table, Iommu(iommu, Arc::default())).unwrap()
}

/// Memory that counts how many of its kind there are.
struct Counted([Piece; 1], #[expect(dead_code, reason = "it counts")] Arc<()>);

// SAFETY: no device uses it.
unsafe impl DmaMemory for Counted {
    fn pieces(&self) -> &[Piece] {
        &self.0
    }
}

#[test]
fn where_a_logger_panics_no_memory_is_freed_that_is_still_mapped() {
    let (domain, alive) = (domain(), Arc::new(()));
    let is_stuck = Arc::clone(&domain.ops().1);
    let config = DmaConfig { flush: Flush::Lazy, ..DmaConfig::new(1) };
    let domain = DmaDomain::new(domain, config, OneThread).unwrap();
    let device = Device::new(Arc::new(domain), NoPool, DeviceConfig::bits(32)).unwrap();
    let direction = Direction::FromDevice;
    let memory = |at| {
        let span = Span::new(PhysAddr::new(at), 0x1000).unwrap();
        Counted([Piece::memory(span)], Arc::clone(&alive))
    };

    let single = device.map_single(memory(0x8000_0000), direction).unwrap();
    assert!(panics(|| drop(single)));
    assert_eq!(Arc::strong_count(&alive), 2, "a device reaches freed memory");
    let mut segments = [Segment::default(); 1];
    let list = device.map_list(memory(0x8000_1000), direction, &mut segments).unwrap();
    assert!(panics(|| drop(list)));
    assert_eq!(Arc::strong_count(&alive), 3, "a device reaches freed memory");
    let request = ReserveRequest { len: 0x2000, offset: 0, pieces: 2, direction };
    let mut reservation = device.reserve(request).unwrap();
    device.link(&mut reservation, 0, memory(0x8000_2000)).unwrap();
    device.link(&mut reservation, 0x1000, memory(0x8000_3000)).unwrap();
    assert!(panics(|| drop(reservation)));
    assert_eq!(Arc::strong_count(&alive), 5, "a device reaches freed memory");

    for at in [0x8000_4000, 0x8000_5000] {
        let mapping = device.map_single(memory(at), direction).unwrap();
        let _unmapped = device.unmap(mapping).unwrap();
    }
    is_stuck.store(true, Ordering::Relaxed);
    assert!(panics(|| drop(device)));
    assert_eq!(Arc::strong_count(&alive), 7, "a device reaches freed memory");
}
