//! Device models reach what is pinned by its physical addresses.

use dmaspan::PhysAddr;
use dmaspan::iommu::soft::{Bus, BusError};

use super::PhysicalMemory;

/// What is pinned here, as a device model of this process reaches it: by physical addresses, as
/// hardware does that has none of this process's pointers. Elsewhere nothing answers.
///
/// ```no_run
/// use dmaspan::PhysAddr;
/// use dmaspan::iommu::soft::Bus;
/// use dmaspan_linux::physical::PhysicalMemory;
///
/// let memory = PhysicalMemory::new()?;
/// let ring = memory.allocate(0x1000, 0x1000, PhysAddr::new(u64::MAX))?;
/// memory.write(ring.span().paddr(), b"by its address")?;
/// let mut bytes = [0; 14];
/// ring.read(0, &mut bytes)?;
/// assert_eq!(&bytes, b"by its address");
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Bus for PhysicalMemory {
    fn read(&self, at: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        self.shared.map.visit(at, buf.len(), |memory, offset, part| {
            buf.get_mut(part).is_some_and(|part| memory.read(offset, part).is_ok())
        })
    }

    fn write(&self, at: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        self.shared.map.visit(at, buf.len(), |memory, offset, part| {
            buf.get(part).is_some_and(|part| memory.write(offset, part).is_ok())
        })
    }
}
