//! A kernel without a standard library starts an IOMMU of Intel's and gives a driver the DMA API.
//!
//! What the kernel brings is an allocator of frames with a direct map. Page tables, the queue and
//! the tables of the hardware, and the driver's packet are all of its frames. The driver of VT-d is
//! the real one; its hardware is a model at the end of this file, which fetches the invalidation
//! queue and walks root, context and second-stage tables as the manual says.
//!
//! Glue: 62 lines; unsafe: 2 blocks, 1 impl.

#![no_std]

extern crate alloc;
extern crate std; // for what it prints, and for `main`

// ANCHOR: glue
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::error::Error;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use dmaspan::dma::{AnyMemory, Device, DeviceConfig, DmaConfig, DmaDomain, NoPool};
use dmaspan::dma::{Piece, RawMemory};
use dmaspan::io_pgtable::{FrameAlloc, FrameTables, PageTable, TableShape, VtdSs};
use dmaspan::iommu::{Attachment, Domain, Port as _, Prepared, Relaxable};
use dmaspan::iommu::{ReservedRegions, Target};
use dmaspan::platform::{Flag, OneThread};
use dmaspan::{Direction, Iova, PhysAddr, Promise, Span};
use dmaspan_drivers::vtd::{Stage, Vtd, VtdConfig, VtdOps, VtdStream};
use dmaspan_drivers::{FrameHost, Mmio};
use lock_api::Mutex;

const FRAME: u64 = 4096;
const BASE: u64 = 0x8000_0000;
const NO_LIMIT: PhysAddr = PhysAddr::new(u64::MAX);

/// 64 frames, mapped for the CPU, as words.
static RAM: [AtomicU64; 64 * 512] = [const { AtomicU64::new(0) }; 64 * 512];

/// Which frames are free: bit n for the n-th.
struct Frames(Mutex<Flag, u64>);

// SAFETY: 1. A frame is free or somebody's, and all bytes of a static are initialised. 2. The
// direct map is a static, for all CPUs and for ever.
unsafe impl FrameAlloc for Frames {
    type Lock = Flag; // there is one CPU, and no interrupt maps anything

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        let (count, step) = (1u64 << (shape.lg2_size - 12), 1 << (shape.lg2_align - 12));
        let spare = 64u64.checked_sub(count)?;
        let bits = |first: u64| u64::MAX >> spare << first;
        let mut free = self.0.lock();
        let is_free = |first: &u64| *free & bits(*first) == bits(*first);
        let first = (0..=spare).step_by(step).find(is_free)?;
        let last = BASE + (first + count) * FRAME - 1;
        (last <= shape.max_paddr.get()).then(|| *free &= !bits(first))?;
        Some(PhysAddr::new(BASE + first * FRAME))
    }

    fn free(&self, _promise: Promise<'_>, frames: PhysAddr, shape: TableShape) {
        let count = 1u64 << (shape.lg2_size - 12);
        *self.0.lock() |= u64::MAX >> (64 - count) << ((frames.get() - BASE) / FRAME);
    }

    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
        NonNull::from(&RAM[(paddr.get() - BASE) as usize / 8..]).cast()
    }
}

type Tables = Arc<FrameTables<Frames>>;
type Iommu<R> = Arc<Vtd<R, FrameHost<Frames>>>;
type IoDomain<R> = DmaDomain<VtdSs, Tables, VtdOps<R, FrameHost<Frames>>, OneThread, AnyMemory>;
type Stream<R> = Attachment<VtdStream<IoDomain<R>, R, FrameHost<Frames>>>;

/// At boot: the unit at `registers`, of whose streams all are blocked from here on.
fn start<R: Mmio>(registers: R, tables: &Tables) -> Result<Iommu<R>, dmaspan_drivers::Error> {
    // SAFETY: the registers are this unit's alone, it reads and writes RAM by its addresses, and
    // firmware uses no device.
    unsafe { Vtd::new(registers, FrameHost::new(Arc::clone(tables)), VtdConfig::new(39)) }
}

/// When a device is found: its own domain, and what its driver is handed.
fn probe<R: Mmio + 'static>(
    iommu: &Iommu<R>,
    tables: &Tables,
    id: u32,
) -> Result<(Device, Stream<R>), Box<dyn Error>> {
    let format = VtdSs::new(iommu.second_stage_config()?)?;
    let table = PageTable::new(format, Arc::clone(tables))?;
    let domain = Domain::new(table, iommu.ops(Stage::Second)?)?;
    let domain = Arc::new(DmaDomain::new(domain, DmaConfig::new(1), OneThread)?);
    let stream = Attachment::new(iommu.stream(id, ReservedRegions::new())?)?;
    stream.port().reserved_regions().reserve_in(domain.iovas(), Relaxable::Keep)?;
    stream.attach(Target::Paging(Prepared::new(Arc::clone(&domain))))?;
    Ok((Device::erased(domain, NoPool, DeviceConfig::bits(32))?, stream))
}
// ANCHOR_END: glue

/// A driver receives a packet; `card` writes it when it has the address.
fn receive(
    nic: &Device,
    tables: &Tables,
    card: impl Fn(Iova) -> Result<(), &'static str>,
) -> Result<u64, Box<dyn Error>> {
    let frame = tables.words(12, NO_LIMIT).ok_or("out of memory")?;
    let piece = Piece::memory(Span::new(frame.paddr(), 1536)?);
    // SAFETY: the frame is the driver's until the mapping is over: it is dropped below.
    let memory = unsafe { RawMemory::new(piece) };
    let mapping = nic.map_single(memory.into(), Direction::FromDevice)?;
    let addr = Iova::new(mapping.addr().get());
    card(addr)?;
    let _memory = nic.unmap(mapping)?;
    std::println!("a late write to {addr}: {}", card(addr).unwrap_err());
    Ok(frame.words()[0].load(Ordering::Relaxed))
}

fn main() -> Result<(), Box<dyn Error>> {
    let tables = Arc::new(FrameTables::new(Frames(Mutex::new(u64::MAX))));
    let free = || tables.frames().0.lock().count_ones();
    let iommu = start(&UNIT, &tables)?;
    let after_boot = free();
    std::println!("{:?} mode, {} of 64 frames are the unit's", iommu.mode(), 64 - after_boot);
    let (nic, stream) = probe(&iommu, &tables, 0x0300)?; // bus 3, device 0
    std::println!("attached: {:?}", stream.attached_to());
    let word = receive(&nic, &tables, |addr| UNIT.dma_write(0x0300, addr, 0x6b63_6150))?;
    std::println!("received {:?}", core::str::from_utf8(&word.to_le_bytes()[..4])?);
    stream.detach()?;
    std::println!("blocked: {}", UNIT.dma_write(0x0300, Iova::new(0), 0).unwrap_err());
    drop((stream, nic));
    std::println!("{} frames of the device's are missing", after_boot - free() - 1);
    Ok(())
}

/// The hardware: registers by number (offset / 8), of which it uses a few.
struct Unit([AtomicU64; 128]);

static UNIT: Unit = Unit([const { AtomicU64::new(0) }; 128]);
/// 64K domains, 4 levels, 2M and 1G leaves, 48 bits, a fault record at 0x200, draining; snooped
/// walks and queued invalidation.
const CAP: u64 = 6 | 1 << 10 | 47 << 16 | 0x20 << 24 | 3 << 34 | 3 << 54;
const ECAP: u64 = 1 | 1 << 1;

fn ram(at: u64) -> &'static AtomicU64 {
    &RAM[(at - BASE) as usize / 8]
}

impl Unit {
    fn at(&self, offset: u64) -> &AtomicU64 {
        &self.0[offset as usize / 8]
    }

    /// Fetches commands up to the tail (6.5.2); those that wait store their number.
    fn fetch(&self, tail: u64) {
        let queue = self.at(0x90).load(Ordering::Relaxed) & !0xfff;
        let mut head = self.at(0x80).load(Ordering::Relaxed);
        while head != tail {
            let [low, high] = [0, 8].map(|word| ram(queue + head + word).load(Ordering::Acquire));
            if low & 0xf == 5 {
                ram(high).store(low >> 32, Ordering::Release);
            }
            head = (head + 16) % FRAME;
        }
        self.at(0x80).store(head, Ordering::Relaxed);
    }

    /// A device's write: root table, context table, four levels of second-stage tables (9.1, 9.3,
    /// 9.8). It caches nothing.
    fn dma_write(&self, id: u64, iova: Iova, value: u64) -> Result<(), &'static str> {
        let entry = |at: u64, bit: u64| {
            let entry = ram(at).load(Ordering::Acquire);
            if entry & bit == 0 { Err("fault") } else { Ok(entry & 0xf_ffff_ffff_f000) }
        };
        let contexts = entry((self.at(0x20).load(Ordering::Relaxed) & !0xfff) + (id >> 8) * 16, 1);
        let mut table = entry(contexts? + (id & 0xff) * 16, 1)?;
        for level in (0..4).rev() {
            table = entry(table + (iova.get() >> (12 + 9 * level) & 511) * 8, 2)?;
        }
        ram(table + iova.get() % FRAME).store(value, Ordering::Release);
        Ok(())
    }
}

impl Mmio for Unit {
    fn read32(&self, offset: u64) -> u32 {
        (self.read64(offset) >> (offset % 8 * 8)) as u32
    }

    fn read64(&self, offset: u64) -> u64 {
        match offset & !7 {
            0x00 => 0x10, // version 1.0
            0x08 => CAP,
            0x10 => ECAP,
            other => self.at(other).load(Ordering::Relaxed),
        }
    }

    fn write32(&self, offset: u64, value: u32) {
        match offset {
            // A global command: the status beside it follows, and keeps the root table (11.4.4).
            0x18 => {
                let root = self.read64(0x18) >> 32 & 1 << 30;
                let status = u64::from(value & (1 << 31 | 1 << 30 | 1 << 26)) | root;
                self.at(0x18).store(status << 32, Ordering::Relaxed);
            }
            0x34 | 0x38 => {} // faults: none are recorded
            _ => self.write64(offset, value.into()),
        }
    }

    fn write64(&self, offset: u64, value: u64) {
        match offset {
            0x88 => self.fetch(value),
            _ => self.at(offset).store(value, Ordering::Relaxed),
        }
    }
}
