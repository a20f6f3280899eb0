//! A disk of virtio that a process drives by VFIO, with the block driver of virtio-drivers: reads
//! all of it, and says what it hashes to.
//!
//! ```text
//! virtio_disk BDF vfio|iommufd|compat [SHA256]
//! ```
//!
//! With a hash it fails where the disk's is another.
#![expect(unsafe_code, reason = "the process says where it has the registers of its device")]

use std::error::Error;
use std::process::ExitCode;

// ANCHOR: glue
use std::sync::Arc;

use dmaspan::swiotlb::{Pool, PoolConfig};
use dmaspan_linux::UserPlatform;
use dmaspan_linux::plan::{MappedBounce, Mapper};
use dmaspan_linux::vfio::{Bar, BusMaster, VfioDevice, VfioSpace};
use dmaspan_virtio_drivers::{BehindIommu, VirtioDma, hal};
use virtio_drivers::device::blk::{SECTOR_SIZE, VirtIOBlk};
use virtio_drivers::transport::pci::PciTransport;
use virtio_drivers::transport::pci::bus::{ConfigurationAccess, DeviceFunction, PciRoot};

hal! {
    /// What the disk reaches: a pool, and nothing else of this process.
    struct DiskHal: parking_lot::RawMutex;
}

/// The configuration space of one function, whichever is asked for.
struct Config(Arc<VfioDevice>);

impl ConfigurationAccess for Config {
    fn read_word(&self, _: DeviceFunction, offset: u8) -> u32 {
        self.0.config().read32(offset.into()).unwrap_or(u32::MAX)
    }

    fn write_word(&mut self, _: DeviceFunction, offset: u8, data: u32) {
        // The command register is the device's alone: its registers answer all the while.
        let _guarded = self.0.config().write32(offset.into(), data);
    }

    unsafe fn unsafe_clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// Hands a pool and the device's registers to the `Hal`, and finds the device's transport.
fn attach(
    space: VfioSpace,
    device: VfioDevice,
) -> Result<(Arc<VfioDevice>, BehindIommu<PciTransport>), Box<dyn Error>> {
    let slots = MappedBounce::new(&Mapper::new(space)?, 4 << 20)?;
    let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), UserPlatform)?);
    let mut bars = Vec::new();
    for bar in (0..6).filter_map(|index| device.bar(index).ok()) {
        bars.push((bar.bus_address()?, bar));
    }
    let registers = move |at: u64, len: usize| {
        let find = |(start, bar): &(u64, Bar)| bar.as_ptr(at.checked_sub(*start)?, len as u64).ok();
        bars.iter().find_map(find)
    };
    let dma = VirtioDma::copying(pool, |error| eprintln!("disk: {error}"));
    // SAFETY: the closure keeps the BARs mapped, which this process has to itself by VFIO.
    let dma = unsafe { dma.with_registers(registers) };
    DiskHal::attach(dma).map_err(|_| "the disk has a driver already")?;
    device.set_bus_master(BusMaster::On)?;
    let device = Arc::new(device);
    let mut root = PciRoot::new(Config(Arc::clone(&device)));
    let only = DeviceFunction { bus: 0, device: 0, function: 0 };
    let transport = PciTransport::new::<DiskHal, _>(&mut root, only)?;
    let transport = BehindIommu::new(transport).map_err(|_| "the disk bypasses the IOMMU")?;
    Ok((device, transport))
}
// ANCHOR_END: glue

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("virtio_disk: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [bdf, backend, expected @ ..] = &arguments[..] else {
        return Err("say which device, and by vfio, iommufd or compat".into());
    };
    let (space, device) = VfioSpace::open(backend.parse()?, bdf.parse()?)?;
    let (_device, transport) = attach(space, device)?;
    let mut disk = VirtIOBlk::<DiskHal, _>::new(transport)?;
    // It is polled, and nobody takes interrupts.
    disk.disable_interrupts();
    let hash = read_all(&mut disk)?;
    drop(disk);
    let usage = DiskHal::usage();
    println!(
        "{} buffers and {} queues are left, {} refused",
        usage.buffers, usage.queues, usage.refused
    );
    if (usage.buffers, usage.queues, usage.refused) != (0, 0, 0) {
        return Err("the driver left something behind, or was refused".into());
    }
    match expected.first() {
        Some(expected) if *expected != hash => {
            Err(format!("the disk should hash to {expected}").into())
        }
        _ => Ok(()),
    }
}

/// Reads the disk in pieces of several lengths, which begin anywhere in a page of the heap.
fn read_all(
    disk: &mut VirtIOBlk<DiskHal, BehindIommu<PciTransport>>,
) -> Result<String, Box<dyn Error>> {
    use sha2::{Digest as _, Sha256};

    let sectors = usize::try_from(disk.capacity())?;
    let (mut hash, mut at) = (Sha256::new(), 0);
    let mut buffer = vec![0; 13 + 256 * SECTOR_SIZE];
    for (n, len) in [1, 7, 64, 256].into_iter().cycle().enumerate() {
        let len = len.min(sectors - at);
        if len == 0 {
            break;
        }
        let part = &mut buffer[n % 13..][..len * SECTOR_SIZE];
        disk.read_blocks(at, part)?;
        hash.update(part);
        at += len;
    }
    let hash: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{sectors} sectors, sha256 {hash}");
    Ok(hash)
}
