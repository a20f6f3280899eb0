//! The DMA API on a machine of one CPU, with hardware that remembers nothing.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU32, Ordering};

use dmaspan::dma::{
    Attrs, Device, DeviceConfig, DmaConfig, DmaDomain, Flush, NoPool, Piece, RawMemory, Unmapped,
};
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps, flush_queue};
use dmaspan::platform::Flag;
use dmaspan::{Direction, PhysAddr, Platform, Span};

use crate::tables::Tables;

pub struct OneCpu;

impl Platform for OneCpu {
    type Lock = Flag;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }
}

/// Counts invalidations.
struct Hardware<'a>(&'a AtomicU32);

// SAFETY: no device walks the tables.
unsafe impl IommuOps for Hardware<'_> {
    type Address = PhysAddr;

    fn invalidate(&self, _: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        8
    }
}

/// Maps one buffer for a device, and unmaps it strictly and lazily. `None` where anything is not as
/// it should be.
pub fn exercise() -> Option<()> {
    let invalidations = AtomicU32::new(0);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).ok()?;
    let table = PageTable::new(format, Tables).ok()?;
    let domain = Domain::new(table, Hardware(&invalidations)).ok()?;
    let queue = flush_queue::Config { entries: 4, max_age: 1 };
    let config = DmaConfig { queue, ..DmaConfig::new(1) };
    let domain = Arc::new(DmaDomain::new(domain, config, OneCpu).ok()?);
    let device = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(32)).ok()?;

    let buffer = Span::new(PhysAddr::new(0x8000_0123), 6000).ok()?;
    for (flush, at_once) in [(Flush::Strict, 1), (Flush::Lazy, 0)] {
        let before = invalidations.load(Ordering::Relaxed);
        // SAFETY: there are no devices.
        let memory = unsafe { RawMemory::new(Piece::memory(buffer)) };
        let attrs = Attrs { flush: Some(flush), ..Attrs::default() };
        let mapping = device.map_single_with(memory, Direction::Bidirectional, attrs).ok()?;
        (mapping.addr().get() & 0xfff == 0x123).then_some(())?;
        (domain.iovas().stats().live == 1).then_some(())?;
        let unmapped = device.unmap(mapping).ok()?;
        (matches!(unmapped, Unmapped::Queued) == (flush == Flush::Lazy)).then_some(())?;
        (invalidations.load(Ordering::Relaxed) - before == at_once).then_some(())?;
    }
    (domain.waiting() == (1, 0)).then_some(())?;
    domain.flush().ok()?;
    let waits = domain.waiting().0 + domain.iovas().stats().live;
    (waits == 0 && invalidations.load(Ordering::Relaxed) == 2).then_some(())
}
