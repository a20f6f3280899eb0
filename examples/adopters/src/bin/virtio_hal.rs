//! The block driver of the crate `virtio-drivers` over the DMA API: without an IOMMU, and behind
//! one. The `Hal` is the same; only the `Device` that it is handed differs.
//!
//! Queues are coherent memory of the device. A buffer that the driver shares may be anything, also
//! a variable of its stack, which nobody has pinned: the device gets a slot of a pool in its place,
//! which is pinned and has a physical address. The disk is a model that reaches memory by those
//! addresses, or by what a software IOMMU makes of its own. Physical addresses of a process take
//! `CAP_SYS_ADMIN`.
//!
//! Glue: 60 lines; unsafe: 2 blocks, 1 impl.

use std::error::Error;
use std::sync::Arc;

use dmaspan::dma::{DeviceConfig, Direct, DmaConfig, DmaDomain, NoPool};
use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
use dmaspan::iommu::Domain;
use dmaspan::iommu::soft::{Bus as _, SoftDevice, SoftIommu};
use dmaspan::swiotlb::PoolConfig;
use dmaspan::{Iova, IovaRange, PhysAddr};
use dmaspan_linux::physical::PhysicalMemory;
use virtio_drivers::device::blk::{SECTOR_SIZE, VirtIOBlk};
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use zerocopy::{FromBytes, Immutable, IntoBytes};

// ANCHOR: glue
use std::collections::BTreeMap;
use std::ptr::NonNull;

use dmaspan::dma::{AnyMemory, Coherent, Device, Leased, Unmapped};
use dmaspan::swiotlb::{Pool, SlotRequest};
use dmaspan::{Direction, DmaAddr};
use dmaspan_linux::{UserPlatform, physical::PinnedBounce};
use parking_lot::Mutex;
use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE};

type Slot = Leased<PinnedBounce, UserPlatform>;

/// What the functions of a `Hal` work with, which have no `self`.
struct Dma {
    device: Device,
    slots: Arc<Pool<PinnedBounce, UserPlatform>>,
    queues: BTreeMap<u64, Coherent>,
}

static DMA: Mutex<Option<Dma>> = Mutex::new(None);

fn dma<R>(run: impl FnOnce(&mut Dma) -> Result<R, Box<dyn Error>>) -> R {
    run(DMA.lock().as_mut().expect("set up before the driver")).expect("a `Hal` cannot fail")
}

fn direction(direction: BufferDirection) -> Direction {
    match direction {
        BufferDirection::DriverToDevice => Direction::ToDevice,
        BufferDirection::DeviceToDriver => Direction::FromDevice,
        BufferDirection::Both => Direction::Bidirectional,
    }
}

struct DmaHal;

// SAFETY: a queue is zeroed and aligned, and the driver's alone until the device frees it.
unsafe impl Hal for DmaHal {
    fn dma_alloc(pages: usize, _direction: BufferDirection) -> (u64, NonNull<u8>) {
        dma(|Dma { device, queues, .. }| {
            let queue = device.alloc((pages * PAGE_SIZE) as u64, PAGE_SIZE as u64)?;
            let (addr, start) = (queue.addr().get(), queue.as_ptr());
            queues.insert(addr, queue);
            Ok((addr, start))
        })
    }

    unsafe fn dma_dealloc(paddr: u64, _vaddr: NonNull<u8>, _pages: usize) -> i32 {
        let free = |dma: &mut Dma| Some(dma.device.free(dma.queues.remove(&paddr)?));
        dma(|dma| Ok(if let Some(Ok(())) = free(dma) { 0 } else { -1 }))
    }

    unsafe fn mmio_phys_to_virt(_paddr: u64, _size: usize) -> NonNull<u8> {
        unreachable!("the transport is not PCI")
    }

    unsafe fn share(buffer: NonNull<[u8]>, way: BufferDirection) -> u64 {
        dma(|Dma { device, slots, .. }| {
            let slot = slots.lease(buffer.len() as u64, &SlotRequest::default())?;
            // SAFETY: the driver lends the buffer for this call, readable and initialised.
            slot.write(0, unsafe { buffer.as_ref() })?;
            let mapping = device.map_single(AnyMemory::new(Leased::new(slot)), direction(way))?;
            Ok(device.into_raw(mapping)?.0.get())
        })
    }

    unsafe fn unshare(paddr: u64, mut buffer: NonNull<[u8]>, way: BufferDirection) {
        let (addr, len) = (DmaAddr::new(paddr), buffer.len() as u64);
        let unmapped = dma(|dma| Ok(dma.device.unmap_raw(addr, len, direction(way))?));
        let Unmapped::Released(memory) = unmapped else { unreachable!("unmaps are strict") };
        let slot = memory.downcast::<Slot>().expect("`share` mapped a slot");
        if way != BufferDirection::DriverToDevice {
            // SAFETY: the driver lends the buffer for this call, for the device's bytes.
            slot.lease().read(0, unsafe { buffer.as_mut() }).expect("it is as long");
        }
    }
}
// ANCHOR_END: glue

type Iommu = SoftDevice<X86_64, Arc<Arena>>;

/// Hands the `Hal` a device that nothing translates for.
fn without_iommu(memory: &PhysicalMemory) -> Result<(), Box<dyn Error>> {
    let direct = Arc::new(Direct::new(memory.extent()?, UserPlatform));
    set_up(memory, Device::erased(direct, NoPool, DeviceConfig::bits(64))?)
}

/// Hands it one behind an IOMMU, which has 32 bits of addresses. What the disk translates by, and
/// what tells how many runs are mapped.
fn behind_iommu(memory: &PhysicalMemory) -> Result<(Iommu, impl Fn() -> usize), Box<dyn Error>> {
    let tables = Arc::new(Arena::new(PhysAddr::new(1 << 50), 1 << 20));
    let table = PageTable::new(X86_64::new(X86_64Config::new(48, 52))?, tables)?;
    let iommu = SoftIommu::over(&table);
    let device = iommu.device(1);
    let domain = DmaDomain::new(Domain::new(table, iommu)?, DmaConfig::new(2), UserPlatform)?;
    let domain = Arc::new(domain);
    set_up(memory, Device::erased(Arc::clone(&domain), NoPool, DeviceConfig::bits(32))?)?;
    Ok((device, move || domain.domain().walk(IovaRange::ALL).count()))
}

fn set_up(memory: &PhysicalMemory, device: Device) -> Result<(), Box<dyn Error>> {
    let slots = memory.bounce(1 << 20, PhysAddr::new(u64::MAX))?;
    let slots = Arc::new(Pool::new(slots, PoolConfig::new(2), UserPlatform)?);
    let device = device.with_coherent(Arc::new(memory.clone()));
    *DMA.lock() = Some(Dma { device, slots, queues: BTreeMap::new() });
    Ok(())
}

/// Writes a block and reads it again.
fn drive(disk: Disk) -> Result<(), Box<dyn Error>> {
    let mut driver = VirtIOBlk::<DmaHal, Disk>::new(disk)?;
    let mut block = [0; SECTOR_SIZE];
    block[..24].copy_from_slice(b"written by their driver.");
    driver.write_blocks(7, &block)?;
    let mut again = [0; 2 * SECTOR_SIZE];
    driver.read_blocks(6, &mut again)?;
    println!("  read {:?}", str::from_utf8(&again[SECTOR_SIZE..][..24])?);
    drop(driver);
    dma(|dma| {
        let (slots, queues) = (dma.slots.stats().used, dma.queues.len());
        println!("  {slots} bytes of slots and {queues} queues are left");
        Ok(())
    });
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let memory = match PhysicalMemory::new() {
        Ok(memory) => memory,
        Err(error) => {
            println!("SKIP: {error}");
            return Ok(());
        }
    };
    println!("without an IOMMU");
    without_iommu(&memory)?;
    drive(Disk::new(&memory, None))?;
    println!("behind an IOMMU");
    let (iommu, mapped) = behind_iommu(&memory)?;
    drive(Disk::new(&memory, Some(iommu)))?;
    println!("  {} runs are mapped", mapped());
    Ok(())
}

/// The disk, of 16 sectors.
struct Disk {
    memory: PhysicalMemory,
    iommu: Option<Iommu>,
    status: DeviceStatus,
    /// The addresses of descriptors, of what is available, and of what was used.
    queue: [u64; 3],
    size: u16,
    done: u16,
    sectors: Vec<u8>,
}

impl Disk {
    fn new(memory: &PhysicalMemory, iommu: Option<Iommu>) -> Self {
        let (status, sectors) = (DeviceStatus::empty(), vec![0; 16 * SECTOR_SIZE]);
        Self { memory: memory.clone(), iommu, status, queue: [0; 3], size: 0, done: 0, sectors }
    }

    fn read(&mut self, addr: u64, buf: &mut [u8]) -> Result<(), Box<dyn Error>> {
        match &mut self.iommu {
            Some(iommu) => Ok(iommu.read(&self.memory, Iova::new(addr), buf)?),
            None => Ok(self.memory.read(PhysAddr::new(addr), buf)?),
        }
    }

    fn write(&mut self, addr: u64, buf: &[u8]) -> Result<(), Box<dyn Error>> {
        match &mut self.iommu {
            Some(iommu) => Ok(iommu.write(&self.memory, Iova::new(addr), buf)?),
            None => Ok(self.memory.write(PhysAddr::new(addr), buf)?),
        }
    }

    fn number(&mut self, addr: u64, bytes: usize) -> Result<u64, Box<dyn Error>> {
        let mut number = [0; 8];
        self.read(addr, &mut number[..bytes])?;
        Ok(u64::from_le_bytes(number))
    }

    /// The address, the length and the next number of a descriptor.
    fn descriptor(&mut self, number: u64) -> Result<[u64; 3], Box<dyn Error>> {
        let at = self.queue[0] + 16 * number;
        Ok([self.number(at, 8)?, self.number(at + 8, 4)?, self.number(at + 14, 2)?])
    }

    /// Does what is available: a request, its data, and a byte of status each.
    fn work(&mut self) -> Result<(), Box<dyn Error>> {
        let [_, available, used] = self.queue;
        while u64::from(self.done) != self.number(available + 2, 2)? {
            let slot = u64::from(self.done % self.size);
            let head = self.number(available + 4 + 2 * slot, 2)?;
            let [request, _, data] = self.descriptor(head)?;
            let [data, len, status] = self.descriptor(data)?;
            let [status, ..] = self.descriptor(status)?;
            let first = self.number(request + 8, 8)? as usize * SECTOR_SIZE;
            let mut bytes = self.sectors[first..][..len as usize].to_vec();
            if self.number(request, 4)? == 1 {
                self.read(data, &mut bytes)?;
                self.sectors[first..][..len as usize].copy_from_slice(&bytes);
            } else {
                self.write(data, &bytes)?;
            }
            self.write(status, &[0])?;
            self.write(used + 4 + 8 * slot, &(head | (len + 1) << 32).to_le_bytes())?;
            self.done = self.done.wrapping_add(1);
            let done = self.done;
            self.write(used + 2, &done.to_le_bytes())?;
        }
        Ok(())
    }
}

impl Transport for Disk {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }

    fn read_device_features(&mut self) -> u64 {
        1 << 32 // VIRTIO_F_VERSION_1
    }

    fn write_driver_features(&mut self, _driver_features: u64) {}

    fn max_queue_size(&mut self, _queue: u16) -> u32 {
        16
    }

    fn notify(&mut self, _queue: u16) {
        self.work().expect("the driver's addresses lead to memory");
    }

    fn get_status(&self) -> DeviceStatus {
        self.status
    }

    fn set_status(&mut self, status: DeviceStatus) {
        self.status = status;
    }

    fn set_guest_page_size(&mut self, _guest_page_size: u32) {}

    fn requires_legacy_layout(&self) -> bool {
        false
    }

    fn queue_set(&mut self, _queue: u16, size: u32, table: u64, available: u64, used: u64) {
        self.queue = [table, available, used];
        self.size = size as u16;
    }

    fn queue_unset(&mut self, _queue: u16) {
        self.queue = [0; 3];
    }

    fn queue_used(&mut self, _queue: u16) -> bool {
        self.queue[0] != 0
    }

    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }

    fn read_config_generation(&self) -> u32 {
        0
    }

    fn read_config_space<T: FromBytes + IntoBytes>(&self, at: usize) -> virtio_drivers::Result<T> {
        let config = 16u64.to_le_bytes(); // the capacity comes first
        let field = config.get(at..).and_then(|field| T::read_from_prefix(field).ok());
        field.map(|(field, _)| field).ok_or(virtio_drivers::Error::ConfigSpaceTooSmall)
    }

    fn write_config_space<T: IntoBytes + Immutable>(
        &mut self,
        _at: usize,
        _value: T,
    ) -> virtio_drivers::Result {
        Err(virtio_drivers::Error::Unsupported)
    }
}
