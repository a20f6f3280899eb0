//! A device without an IOMMU: it is told physical addresses, of memory that is really there.
//!
//! Packets are pinned pages, scattered as they are; a ring is contiguous memory of huge pages. The
//! program needs `CAP_SYS_ADMIN` to see physical addresses, and memory for huge pages; without them
//! it says what is missing.

// ANCHOR: head
use std::error::Error;
use std::sync::Arc;

use dmaspan::Direction;
use dmaspan::dma::{Coherent, Device, DeviceConfig, Direct, NoPool};
use dmaspan_linux::physical::{PhysicalMemory, PinnedMemory};
use dmaspan_linux::{Memory, MemoryKind, UserPlatform};

/// Descriptors of the ring, 16 bytes each: an address, a length and a mark.
const DESCRIPTORS: u64 = 256;
// ANCHOR_END: head

// ANCHOR: driver
/// Puts a packet into the ring for the device to read, and takes it back when the device has.
fn send(
    nic: &Device,
    ring: &mut Coherent,
    packets: &PinnedMemory,
    device: impl FnOnce(&Coherent) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    // 1500 bytes of pinned memory, which the mapping keeps. They lie in one page here.
    let packet = Box::new(packets.part(0x200, 1500)?);
    let mapping = nic.map_single(packet.into(), Direction::ToDevice)?;
    ring.write(0, mapping.addr().get())?;
    ring.write(8, 1500_u32)?;
    // A real driver has a barrier here, and writes a doorbell.
    device(ring)?;
    let _unmapped = nic.unmap(mapping)?;
    Ok(())
}
// ANCHOR_END: driver

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: main
    let memory = match PhysicalMemory::new() {
        Ok(memory) => memory,
        Err(error) => {
            println!("SKIP: {error}");
            return Ok(());
        }
    };
    let direct = Arc::new(Direct::new(memory.extent()?, UserPlatform));
    let nic = Device::erased(direct, NoPool, DeviceConfig::bits(64))?
        .with_coherent(Arc::new(memory.clone()));
    let mut ring = match nic.alloc(DESCRIPTORS * 16, 4096) {
        Ok(ring) => ring,
        Err(error) => {
            println!("SKIP: {error}");
            return Ok(());
        }
    };
    println!("a ring of {:#x} bytes, zeroed: {}", ring.len(), ring.read::<u64>(0)? == 0);
    println!("its address is a multiple of a page: {}", ring.addr().get() % 4096 == 0);

    let pages = Arc::new(Memory::new(MemoryKind::Base, 1 << 20)?);
    pages.write(0x200, b"a packet to the wire")?;
    let packets = memory.pin(&pages)?;
    send(&nic, &mut ring, &packets, |ring| {
        let (addr, len) = (ring.read::<u64>(0)?, ring.read::<u32>(8)?);
        println!("the device is told of {len} bytes, {:#x} into a page", addr % 4096);
        Ok(())
    })?;
    nic.free(ring)?; // the device was reset, and uses it no more
    Ok(())
    // ANCHOR_END: main
}
