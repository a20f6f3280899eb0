//! The DMA API over tables that get more levels: AMD's, which begin with few.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, Error, Flush, Unmapped};
use dmaspan::io_pgtable::{AmdV1, AmdV1Config, Arena, Format, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Direction, Iova, PhysAddr, Promise};
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::walker::amd_v1::{AmdV1WalkRegisters, AmdV1Walker};
use dmaspan_sim::walker::{Access, Walker};
use parking_lot::Mutex;

use crate::common::{arena, range};
use crate::rig::{BYTES, Buffer, Host, RAM};

/// Hardware without caches, whose root is programmed under a lock.
struct Driver {
    format: AmdV1,
    arena: Arena,
    root: Mutex<(PhysAddr, u32)>,
    refuses: AtomicBool,
    programmed: Mutex<usize>,
}

impl Driver {
    fn reaches(&self, iova: u64) -> Option<u64> {
        let (root, level) = *self.root.lock();
        if iova >> AmdV1::shift(level + 1) != 0 {
            return None;
        }
        let dte = self.format.registers(root, level).dte;
        let walker = AmdV1Walker::new(AmdV1WalkRegisters { dte }).unwrap();
        let found = walker.walk(&self.arena, Iova::new(iova), Access::Write);
        found.ok().map(|found| found.paddr.get())
    }
}

/// The driver, which the test looks at too.
#[derive(Clone)]
struct Hooks(Arc<Driver>);

// SAFETY: 1. and 2. Nothing is cached. 3. The root is programmed under the lock under which it is
// asked for, and used under it.
unsafe impl IommuOps for Hooks {
    type Address = PhysAddr;

    fn invalidate(&self, _what: &Invalidation<'_>) -> Result<(), HardwareError> {
        Ok(())
    }

    fn root_changed(
        &self,
        _: Promise<'_>,
        current: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        let mut root = self.0.root.lock();
        if self.0.refuses.load(Ordering::Relaxed) {
            return Err(HardwareError { what: "hardware keeps its root", status: 0 });
        }
        *self.0.programmed.lock() += 1;
        *root = current();
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        8
    }
}

#[test]
fn a_buffer_beyond_the_reach_of_the_root_is_mapped_when_hardware_has_the_new_one() {
    for (first_levels, reach) in [(1, 21), (2, 30), (3, 39), (4, 48)] {
        for flush in [Flush::Lazy, Flush::Strict] {
            grows(first_levels, 1 << reach, flush);
        }
    }
}

fn grows(first_levels: u32, reach: u64, flush: Flush) {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, 12).unwrap());
    let arena = arena();
    let format = AmdV1::new(AmdV1Config { first_levels, ..AmdV1Config::new(64, 52) }).unwrap();
    let table = PageTable::new(format.clone(), arena.clone()).unwrap();
    let driver = Arc::new(Driver {
        format,
        arena: arena.clone(),
        root: Mutex::new(table.root_and_level()),
        refuses: AtomicBool::new(false),
        programmed: Mutex::new(0),
    });
    let domain = Domain::new(table, Hooks(Arc::clone(&driver))).unwrap();
    let config = DmaConfig { flush, ..DmaConfig::new(1) };
    let dma: Arc<DmaDomain<_, _, _, _, Buffer>> =
        Arc::new(DmaDomain::new(domain, config, Host::default()).unwrap());
    let device = Device::new(Arc::clone(&dma), Default::default(), DeviceConfig::bits(64));
    let device: Device<_> = device.unwrap();
    let low = dma.domain().root_and_level();
    // Only what is beyond can be handed out.
    dma.iovas().reserve(range(0, reach)).unwrap();
    let buffer = || Buffer::new(&memory, 0x234, 0x2000);

    driver.refuses.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        let refused = device.map_single(buffer(), Direction::Bidirectional).unwrap_err();
        assert!(matches!(refused.error, Error::Domain(_)), "{}", refused.error);
        assert!(refused.memory.is_some() && dma.waiting() == (0, 0));
        assert_eq!(*driver.root.lock(), low, "hardware walks from a table that is still there");
    }
    driver.refuses.store(false, Ordering::Relaxed);
    let mut mappings = Vec::new();
    for _ in 0..3 {
        let buffer = buffer();
        let paddr = buffer.span().paddr().get();
        let mapping = device.map_single(buffer, Direction::Bidirectional).unwrap();
        assert!(mapping.addr().get() >= reach);
        assert_eq!(driver.reaches(mapping.addr().get()), Some(paddr));
        mappings.push(mapping);
    }
    assert_eq!(*driver.programmed.lock(), 1, "once for each new root");
    for mapping in mappings {
        let addr = mapping.addr().get();
        match device.unmap(mapping).map_err(|failed| failed.error).unwrap() {
            Unmapped::Released(buffer) => assert!(flush == Flush::Strict && buffer.is_whole()),
            Unmapped::Queued => assert_eq!(flush, Flush::Lazy),
        }
        assert_eq!(driver.reaches(addr), None);
    }
    dma.flush().unwrap();
    assert_eq!((memory.pinned_frames(), dma.waiting()), (0, (0, 0)));
    drop((device, dma));
    assert_eq!(arena.tables(), 0);
}
