//! A device model behind a software IOMMU: what a VMM's emulated device does for each access.
//!
//! The domain writes page tables, the device model's accesses are translated through them with an
//! IOTLB of spans, and when a sync has returned no access to what was unmapped is under way.

#![expect(unsafe_code, reason = "the program owns the ranges of its domain")]

use std::error::Error;
use std::sync::Mutex;

use dmaspan::io_pgtable::{AmdV1, AmdV1Config, Arena, PageTable};
use dmaspan::iommu::Domain;
use dmaspan::iommu::soft::{Bus, BusError, SoftIommu};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};

const PAGE: usize = 4096;

// ANCHOR: bus
/// A megabyte of the guest's memory, from 2 GiB on.
struct Ram(Mutex<Vec<u8>>);

impl Ram {
    const BASE: u64 = 0x8000_0000;

    fn at(&self, at: PhysAddr, len: usize, with: impl FnOnce(&mut [u8])) -> Result<(), BusError> {
        let nobody = BusError::Nobody { paddr: at };
        let start = usize::try_from(at.get().wrapping_sub(Self::BASE)).map_err(|_| nobody)?;
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
// ANCHOR_END: bus

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: iommu
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    let table = PageTable::new(AmdV1::new(AmdV1Config::new(48, 48))?, tables)?;
    let iommu = SoftIommu::over(&table);
    let domain = Domain::new(table, iommu.clone())?;
    let mut disk = iommu.device(7);
    let ram = Ram(Mutex::new(vec![0; 1 << 20]));

    // Eight pages in a row, then one elsewhere, at IOVAs that follow each other.
    let spans = [
        Span::new(PhysAddr::new(Ram::BASE + 0x1_0000), 8 * PAGE as u64)?,
        Span::new(PhysAddr::new(Ram::BASE + 0x8_0000), PAGE as u64)?,
    ];
    let buffer = IovaRange::from_len(Iova::new(0x20_0000), 9 * PAGE as u64)?;
    // SAFETY: nobody else works on the domain, and the memory is the guest's for good.
    unsafe { domain.map_spans(buffer.start(), &spans, Prot::READ_WRITE) }?;

    disk.write(&ram, buffer.start(), &[0x5a; 9 * PAGE])?;
    let bytes = ram.0.lock().unwrap();
    println!("{} bytes arrived", bytes.iter().filter(|&&byte| byte == 0x5a).count());
    drop(bytes);
    // ANCHOR_END: iommu

    // ANCHOR: faults
    // A miss is one walk for a whole span: two spans, two misses, however many pages.
    let mut page = [0; PAGE];
    for n in 0..9 {
        disk.read(&ram, buffer.start().wrapping_add(n * PAGE as u64), &mut page)?;
    }
    println!("{} misses for 9 pages, written and read", disk.misses());
    match disk.read(&ram, buffer.last(), &mut [0; 2]) {
        Ok(()) => println!("the read behind the end went through"),
        Err(error) => println!("{error}"),
    }

    let mut room = SpanBuf::room::<4>();
    // SAFETY: as above.
    let unsynced = unsafe { domain.unmap(buffer, &mut SpanBuf::new(&mut room)) }?;
    let (_proof, _) = unsynced.sync()?; // from here on the guest may have the memory back
    match disk.write(&ram, buffer.start(), b"too late") {
        Ok(()) => println!("the write after the unmap went through"),
        Err(error) => println!("{error}"),
    }
    Ok(())
}
// ANCHOR_END: faults
