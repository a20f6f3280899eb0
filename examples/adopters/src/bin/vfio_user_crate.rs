//! A device behind the crate `vfio_user`, whose server takes a client's memory and gives it back by
//! `dmaspan_linux::client`.
//!
//! Client and server are one process. The client maps two files side by side and rings a doorbell
//! for a buffer over both; the device works on it in a thread of its own. `DMA_UNMAP` is answered
//! when the device has let go of it: the crate answers when `dma_unmap` returns, so that waits.
//! (vfio_user 0.1.7: a client does not look at errors of DMA_MAP, and waits for ever for one of
//! DMA_UNMAP, whose answer is shorter. So a server's unmap should not fail.)
//!
//! Glue: 31 lines; unsafe: 0 blocks, 0 impls.

use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dmaspan::{Errno, Iova, Prot};
use dmaspan_linux::client::{self, ClientMemory, ClientRegions};
use dmaspan_linux::{Memory, MemoryKind};
use vfio_bindings::bindings::vfio::{
    VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE, vfio_region_info,
};
use vfio_user::{Client, DmaMapFlags, DmaUnmapFlags, Server, ServerBackend, ServerRegion};

const MIB: u64 = 1 << 20;
/// Where the client has its memory.
const RAM: u64 = 0x4000_0000;

/// Registers: where the buffer is, how long it is, the doorbell, and how many regions there are.
const ADDRESS: u64 = 0x00;
const LEN: u64 = 0x08;
const DOORBELL: u64 = 0x10;
const REGIONS: u64 = 0x18;

// ANCHOR: glue
/// The client's memory.
#[derive(Clone, Default)]
struct Dma(Arc<ClientRegions>);

fn system(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.get())
}

impl Dma {
    fn map(&self, flags: DmaMapFlags, offset: u64, at: u64, len: u64, fd: File) -> io::Result<()> {
        let mut access = Prot::empty();
        access.set(Prot::READ, flags.contains(DmaMapFlags::READ));
        access.set(Prot::WRITE, flags.contains(DmaMapFlags::WRITE));
        let file = client::map_file(fd, offset, len, access);
        let memory = file.map_err(|error| system(error.errno()))?;
        let inserted = self.0.insert(Iova::new(at), access, memory);
        inserted.map(|_| ()).map_err(|error| system(error.errno()))
    }

    fn unmap(&self, flags: DmaUnmapFlags, at: u64, len: u64) -> io::Result<()> {
        let mut unmapping = match flags.contains(DmaUnmapFlags::UNMAP_ALL) {
            true => self.0.unmap_all(),
            false => self.0.unmap(Iova::new(at), len).map_err(|error| system(error.errno()))?,
        };
        while let Err(still) = client::wait(unmapping, Duration::from_secs(10)) {
            eprintln!("{still}");
            unmapping = still.unmapping;
        }
        Ok(())
    }

    fn hold(&self, at: u64, len: u64) -> io::Result<ClientMemory> {
        let held = self.0.hold(Iova::new(at), len, Prot::READ_WRITE);
        held.map_err(|error| system(error.errno()))
    }
}
// ANCHOR_END: glue

/// Adds up the bytes of a buffer and puts the sum at its beginning.
#[derive(Default)]
struct Adder {
    dma: Dma,
    address: u64,
    len: u64,
    is_done: Arc<AtomicBool>,
    work: Option<JoinHandle<Result<(), Box<dyn Error + Send + Sync>>>>,
}

impl Adder {
    fn ring(&mut self) -> io::Result<()> {
        let held = self.dma.hold(self.address, self.len)?;
        let (dma, address, is_done) = (self.dma.clone(), self.address, Arc::clone(&self.is_done));
        self.work = Some(thread::spawn(move || {
            let mut bytes = vec![0; usize::try_from(held.len())?];
            held.read(0, &mut bytes)?;
            let sum: u64 = bytes.iter().copied().map(u64::from).sum();
            // So slow that the client takes the memory back meanwhile.
            while dma.hold(address, 1).is_ok() {
                thread::yield_now();
            }
            held.write(0, &sum.to_le_bytes())?;
            is_done.store(true, Ordering::Relaxed);
            Ok(())
        }));
        Ok(())
    }
}

impl ServerBackend for Adder {
    fn region_read(&mut self, _: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let value = if offset == REGIONS { self.dma.0.count() as u64 } else { u64::MAX };
        let bytes = value.to_le_bytes();
        let bytes = bytes.get(..data.len()).ok_or_else(|| system(Errno::EINVAL))?;
        data.copy_from_slice(bytes);
        Ok(())
    }

    fn region_write(&mut self, _: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        let value = u64::from_le_bytes(data.try_into().map_err(io::Error::other)?);
        match offset {
            ADDRESS => self.address = value,
            LEN => self.len = value,
            DOORBELL => self.ring()?,
            _ => return Err(system(Errno::EINVAL)),
        }
        Ok(())
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> io::Result<()> {
        let fd = fd.ok_or_else(|| system(Errno::EOPNOTSUPP))?;
        self.dma.map(flags, offset, address, size, fd)
    }

    fn dma_unmap(&mut self, flags: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        self.dma.unmap(flags, address, size)
    }

    fn reset(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn set_irqs(&mut self, _: u32, _: u32, _: u32, _: u32, _: Vec<File>) -> io::Result<()> {
        Err(system(Errno::EINVAL))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::temp_dir().join(format!("dmaspan-vfio-user-{}", std::process::id()));
    let flags = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
    let argsz = u32::try_from(size_of::<vfio_region_info>())?;
    let region_info = vfio_region_info { argsz, flags, size: 0x1000, ..Default::default() };
    let registers = ServerRegion { region_info, sparse_areas: Vec::new(), mmap_fd: None };
    let server = Server::new(&path, false, Vec::new(), vec![registers])?;
    let mut device = Adder::default();
    let is_done = Arc::clone(&device.is_done);
    let server = thread::spawn(move || server.run(&mut device).map(|()| device.work));
    let mut client = Client::new(&path)?;

    // Two files side by side.
    let ram = [Memory::new(MemoryKind::Memfd, MIB)?, Memory::new(MemoryKind::Memfd, MIB)?];
    for (address, memory) in [RAM, RAM + MIB].into_iter().zip(&ram) {
        let (fd, offset) = memory.file().ok_or("a memfd has a file")?;
        client.dma_map(offset, address, MIB, fd.as_raw_fd())?;
    }
    let mut regions = [0; 8];
    client.region_read(0, REGIONS, &mut regions)?;
    println!("the server has {} regions", u64::from_le_bytes(regions));

    // A buffer over both.
    ram[0].write(MIB - 16, &[3; 16])?;
    ram[1].write(0, &[4; 16])?;
    for (register, value) in [(ADDRESS, RAM + MIB - 16), (LEN, 32), (DOORBELL, 1)] {
        client.region_write(0, register, &u64::to_le_bytes(value))?;
    }
    client.dma_unmap(RAM, MIB)?;
    println!("the device was done before the answer: {}", is_done.load(Ordering::Relaxed));
    println!("the sum is {}", ram[0].read_u64(MIB - 16)?);
    client.region_read(0, REGIONS, &mut regions)?;
    println!("the server has {} region", u64::from_le_bytes(regions));
    client.dma_unmap(RAM + MIB, MIB)?;
    client.shutdown()?;
    let work = server.join().map_err(|_| "the server panicked")??;
    let work = work.ok_or("the doorbell was not rung")?.join();
    work.map_err(|_| "the device panicked")?.map_err(|error| error as Box<dyn Error>)?;
    Ok(())
}
