//! Memory as a device model of this process reaches it.

use dmaspan::HostAddr;
use dmaspan::iommu::soft::{Bus, BusError};

use super::Memory;

/// The bytes of a [`Memory`] by their addresses in this process, from [`Memory::bytes`]: what a
/// device model behind a [`SoftIommu`](dmaspan::iommu::SoftIommu) that reaches [`HostAddr`]s reads
/// and writes.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
/// use dmaspan::iommu::{Domain, SoftIommu};
/// use dmaspan::{Account, Container, HostAddr, Iova, PhysAddr, Prot};
/// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind, UserPlatform};
///
/// // A page table, its software IOMMU, and a container that maps.
/// let tables = Arena::new(PhysAddr::new(1 << 40), 1 << 20);
/// let table = PageTable::new(X86_64::new(X86_64Config::new(48, 52))?, tables)?;
/// let iommu = SoftIommu::over(&table).reaching::<HostAddr>().waiting_by(UserPlatform::sleeping);
/// let domain = Domain::new(table, iommu.clone())?;
/// let container: Container<_, parking_lot::RawMutex> =
///     Container::with_domain(LinuxPinner::<HostAddr>::new()?, domain, Account::new(1 << 20));
///
/// let memory = Arc::new(Memory::new(MemoryKind::Base, 1 << 16)?);
/// container.map(&memory, memory.user_range(), Iova::new(0x10_0000), Prot::READ_WRITE)?;
/// let mut device = iommu.device(7);
/// device.write(&memory.bytes(), Iova::new(0x10_0ffe), b"over two pages")?;
/// let mut bytes = [0; 14];
/// memory.read(0xffe, &mut bytes)?;
/// assert_eq!(&bytes, b"over two pages");
///
/// container.unmap_all()?; // waits for accesses that are under way
/// assert!(device.write(&memory.bytes(), Iova::new(0x10_0ffe), b"late").is_err());
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct HostBytes<'m>(&'m Memory);

impl Memory {
    /// The bytes, as a device model reaches them.
    pub fn bytes(&self) -> HostBytes<'_> {
        HostBytes(self)
    }
}

impl HostBytes<'_> {
    /// How far behind the first byte an address is, beyond all of the memory for what lies before
    /// it.
    fn offset(&self, at: HostAddr) -> u64 {
        at.get().wrapping_sub(self.0.user_range().start().get())
    }

    /// An access that begins at an address and is not all within.
    fn nobody(&self, at: HostAddr) -> BusError {
        let offset = self.offset(at);
        let behind = self.0.len().saturating_sub(offset);
        BusError::NobodyHere { addr: at.wrapping_add(behind) }
    }
}

impl Bus<HostAddr> for HostBytes<'_> {
    fn read(&self, at: HostAddr, buf: &mut [u8]) -> Result<(), BusError> {
        if buf.is_empty() {
            return Ok(());
        }
        self.0.read(self.offset(at), buf).map_err(|_| self.nobody(at))
    }

    fn write(&self, at: HostAddr, buf: &[u8]) -> Result<(), BusError> {
        if buf.is_empty() {
            return Ok(());
        }
        self.0.write(self.offset(at), buf).map_err(|_| self.nobody(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryKind, sys};

    #[test]
    fn a_bus_has_the_bytes_of_the_memory_and_none_beside_it() {
        let memory = Memory::new(MemoryKind::Base, 2 * sys::page_size()).unwrap();
        let end = memory.len();
        let bus = memory.bytes();
        let at =
            |offset: u64| HostAddr::new(memory.user_range().start().get().wrapping_add(offset));
        bus.write(at(end - 3), b"end").unwrap();
        let mut bytes = [0; 3];
        memory.read(end - 3, &mut bytes).unwrap();
        assert_eq!(&bytes, b"end");
        bus.read(at(end - 3), &mut bytes).unwrap();
        assert_eq!(&bytes, b"end");
        for outside in [at(end - 2), at(end), at(u64::MAX), at(u64::MAX - 1), HostAddr::new(0)] {
            // The first byte that is not there.
            let addr = if outside == at(end - 2) { at(end) } else { outside };
            let nobody = Err(BusError::NobodyHere { addr });
            assert_eq!(bus.read(outside, &mut bytes), nobody, "{outside}");
            assert_eq!(bus.write(outside, b"out"), nobody, "{outside}");
        }
        let error = bus.read(at(end), &mut bytes).unwrap_err().to_string();
        assert_eq!(error, format!("nothing of the program answers at {}", at(end)));
        assert_eq!(bus.read(HostAddr::new(0), &mut []), Ok(()));
    }
}
