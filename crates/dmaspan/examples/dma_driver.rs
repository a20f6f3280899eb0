//! The DMA API as a driver uses it: single buffers, a list, and lazy unmaps.
//!
//! The driver holds a plain `Device` and knows of no IOMMU: the same driver runs where nothing
//! translates, and where everything bounces. The card is a model behind a software IOMMU here.

#![expect(unsafe_code, reason = "the driver promises that its frames are its own")]

// ANCHOR: head
use std::error::Error;
use std::sync::{Arc, Mutex};

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Flush, NoPool, Piece, RawMemory, Segment,
};
use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
use dmaspan::iommu::Domain;
use dmaspan::iommu::soft::{Bus, BusError, SoftIommu};
use dmaspan::platform::OneThread;
use dmaspan::{Direction, DmaAddr, Iova, PhysAddr, Span};

const RAM: u64 = 0x8000_0000;
// ANCHOR_END: head

// ANCHOR: driver
/// The driver of a network card.
struct Driver {
    nic: Device,
}

/// Frames of a packet that is sent: a header, and its payload elsewhere.
struct Packet([Piece; 2]);

// SAFETY: the frames are this driver's for good, and nobody refers to their bytes.
unsafe impl DmaMemory for Packet {
    fn pieces(&self) -> &[Piece] {
        &self.0
    }
}

impl Driver {
    /// Gives the card a buffer to receive into, and takes it back when the card has written.
    fn receive(
        &self,
        buffer: Span,
        card: impl FnOnce(DmaAddr) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        // SAFETY: the buffer is the driver's, and nobody touches it before the unmap.
        let memory = unsafe { RawMemory::new(Piece::memory(buffer)) };
        let mapping = self.nic.map_single(memory.into(), Direction::FromDevice)?;
        card(mapping.addr())?;
        let _unmapped = self.nic.unmap(mapping)?;
        Ok(())
    }

    /// Sends a packet of two pieces, by as few descriptors as can be.
    fn send(
        &self,
        packet: Packet,
        card: impl FnOnce(&[Segment]) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        let mut segments = [Segment::default(); 2];
        let memory = Box::new(packet).into();
        let list = self.nic.map_list(memory, Direction::ToDevice, &mut segments)?;
        card(&segments[..list.segment_count()])?;
        let _unmapped = self.nic.unmap_list(list)?;
        Ok(())
    }
}
// ANCHOR_END: driver

/// A megabyte of memory.
struct Ram(Mutex<Vec<u8>>);

impl Ram {
    fn at(&self, at: PhysAddr, len: usize, with: impl FnOnce(&mut [u8])) -> Result<(), BusError> {
        let nobody = BusError::Nobody { paddr: at };
        let start = usize::try_from(at.get().wrapping_sub(RAM)).map_err(|_| nobody)?;
        let end = start.checked_add(len).ok_or(nobody)?;
        with(self.0.lock().unwrap().get_mut(start..end).ok_or(nobody)?);
        Ok(())
    }
}

impl Bus for Ram {
    fn read(&self, at: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        self.at(at, buf.len(), |bytes| buf.copy_from_slice(bytes))
    }

    fn write(&self, at: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        self.at(at, buf.len(), |bytes| bytes.copy_from_slice(buf))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: platform
    // What the platform does once: a domain whose unmaps wait for a common flush.
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    let table = PageTable::new(X86_64::new(X86_64Config::new(48, 48))?, tables)?;
    let iommu = SoftIommu::over(&table);
    let mut card = iommu.device(0);
    let config = DmaConfig { flush: Flush::Lazy, ..DmaConfig::new(1) };
    let domain = Arc::new(DmaDomain::new(Domain::new(table, iommu)?, config, OneThread)?);
    let nic = Device::erased(Arc::clone(&domain), NoPool, DeviceConfig::bits(40).named("nic0"))?;
    let driver = Driver { nic };
    // ANCHOR_END: platform

    // ANCHOR: traffic
    let ram = Ram(Mutex::new(vec![0; 1 << 20]));
    let span = |offset, len| Span::new(PhysAddr::new(RAM + offset), len);
    let mut stale = Iova::new(0);
    driver.receive(span(0x1040, 1500)?, |addr| {
        stale = Iova::new(addr.get());
        Ok(card.write(&ram, stale, b"a packet off the wire")?)
    })?;
    println!("received {:?}", String::from_utf8_lossy(&ram.0.lock().unwrap()[0x1040..][..21]));

    // The pieces end and begin on pages, so one descriptor does.
    let pieces = [span(0x2000, 0x1000)?, span(0x8000, 0x1000)?].map(Piece::memory);
    driver.send(Packet(pieces), |segments| {
        println!("sent {} bytes by {} descriptor", segments[0].len, segments.len());
        Ok(card.read(&ram, Iova::new(segments[0].addr.get()), &mut [0; 0x2000])?)
    })?;

    // Lazy: until the flush the card may still write, to memory that nobody has back yet.
    println!("before the flush it still writes: {}", card.write(&ram, stale, b"late").is_ok());
    domain.flush()?; // or `expire`, by a timer
    println!("after the flush: {}", card.write(&ram, stale, b"late").unwrap_err());
    Ok(())
    // ANCHOR_END: traffic
}
