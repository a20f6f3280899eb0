//! A kernel's contribution to dmaspan: frames for page tables, and the place of buffers.
//!
//! A mebibyte of RAM plays the machine. Page tables live in its frames, a driver maps a buffer by
//! the DMA API, and a device that an IOMMU translates for writes to it. On a real machine the IOMMU
//! is one of `dmaspan-drivers`, and the RAM is all that there is.

#![expect(unsafe_code, reason = "a kernel promises where its frames are")]

// ANCHOR: head
use std::alloc::{Layout, alloc_zeroed};
use std::error::Error;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, NoPool, Piece, RawMemory};
use dmaspan::io_pgtable::{FrameAlloc, FrameTables, PageTable, TableShape, VtdSs, VtdSsConfig};
use dmaspan::iommu::Domain;
use dmaspan::iommu::soft::{Bus, BusError, SoftIommu};
use dmaspan::platform::{Flag, OneThread};
use dmaspan::{Direction, Iova, PhysAddr, Promise, Span};

const FRAME: usize = 4096;
const FRAMES: usize = 256;
/// Where RAM begins on this machine.
const BASE: u64 = 0x8000_0000;
// ANCHOR_END: head

// ANCHOR: frames
/// The machine's RAM, its direct map, and which frames are free.
struct Ram {
    direct_map: NonNull<u8>,
    free: Mutex<Vec<u64>>,
}

// SAFETY: the pointer is to memory that lives for ever, and whose users order their accesses.
unsafe impl Send for Ram {}
// SAFETY: as above.
unsafe impl Sync for Ram {}

impl Ram {
    fn new() -> Result<Self, Box<dyn Error>> {
        let layout = Layout::from_size_align(FRAMES * FRAME, FRAME)?;
        // SAFETY: the size is not 0.
        let direct_map = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or("no memory")?;
        let free = (0..FRAMES).rev().map(|n| BASE + (n * FRAME) as u64).collect();
        Ok(Self { direct_map, free: Mutex::new(free) })
    }

    fn at(&self, at: PhysAddr, len: usize) -> Result<NonNull<u8>, BusError> {
        let offset = usize::try_from(at.get().wrapping_sub(BASE)).ok();
        let offset = offset.filter(|offset| offset.saturating_add(len) <= FRAMES * FRAME);
        let offset = offset.ok_or(BusError::Nobody { paddr: at })?;
        // SAFETY: the offset is inside of the RAM.
        Ok(unsafe { self.direct_map.add(offset) })
    }
}

// SAFETY: 1. A frame leaves the list when it is given out, and is initialised. 2. The direct map
// has all of RAM, for ever.
unsafe impl FrameAlloc for Ram {
    type Lock = Flag; // a kernel's own

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        // All tables of this format are of one frame. A kernel asks its buddy allocator.
        (shape.lg2_size <= 12).then(|| self.free.lock().unwrap().pop())?.map(PhysAddr::new)
    }

    fn free(&self, _promise: Promise<'_>, frames: PhysAddr, _shape: TableShape) {
        self.free.lock().unwrap().push(frames.get());
    }

    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
        self.at(paddr, FRAME).expect("the IOMMU's tables are in RAM")
    }
}
// ANCHOR_END: frames

/// What the device reaches behind the IOMMU.
impl Bus for Ram {
    fn read(&self, at: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        let from = self.at(at, buf.len())?;
        // SAFETY: the bytes are RAM, and nobody else uses them in this single thread.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *buf).cast(), buf.len()) };
        Ok(())
    }

    fn write(&self, at: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        let to = self.at(at, buf.len())?;
        // SAFETY: as above.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(buf).cast(), buf.len()) };
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: boot
    // At boot: tables in the kernel's frames, and the IOMMU that walks them.
    let tables = Arc::new(FrameTables::new(Ram::new()?));
    let table = PageTable::new(VtdSs::new(VtdSsConfig::new(48, 48))?, Arc::clone(&tables))?;
    let iommu = SoftIommu::over(&table);
    let mut card = iommu.device(0x0300); // bus 3, device 0
    let domain = DmaDomain::new(Domain::new(table, iommu)?, DmaConfig::new(1), OneThread)?;
    let nic = Device::new(Arc::new(domain), NoPool, DeviceConfig::bits(32))?;
    let ram = tables.frames();
    let free = || ram.free.lock().unwrap().len();
    println!("{} of {FRAMES} frames are free after boot", free());
    // ANCHOR_END: boot

    // ANCHOR: driver
    // The driver: a frame for a packet, mapped for the card, which has 32 bits of addresses.
    let frame = ram.free.lock().unwrap().pop().ok_or("out of memory")?;
    let packet = Span::new(PhysAddr::new(frame + 0x40), 1500)?;
    // SAFETY: the frame is this driver's, and nobody touches the bytes until the unmap.
    let packet = unsafe { RawMemory::new(Piece::memory(packet)) };
    let mapping = nic.map_single(packet, Direction::FromDevice)?;
    let addr = Iova::new(mapping.addr().get());
    card.write(ram, addr, b"a packet off the wire")?;
    let _packet = nic.unmap(mapping)?; // strict: the card does not reach the frame any more

    let mut bytes = [0; 21];
    ram.read(PhysAddr::new(frame + 0x40), &mut bytes)?;
    println!("received {:?}", String::from_utf8_lossy(&bytes));
    println!("late: {}", card.write(ram, addr, b"!").unwrap_err());
    // ANCHOR_END: driver

    drop(nic); // the domain, its tables and its IOVAs
    ram.free.lock().unwrap().push(frame);
    println!("{} of {FRAMES} frames are free in the end", free());
    Ok(())
}
