//! A server's view of its client's memory, as vfio-user has it.
//!
//! The client sends files with its memory and takes it back; the device model holds what its
//! descriptors name, reads and writes it, and an unmap is answered when nothing holds it any more.
//! Client and server are one process here; the files are memfds either way.

// ANCHOR: head
use std::error::Error;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dmaspan::{Iova, Prot};
use dmaspan_linux::client::{self, ClientRegions};
use dmaspan_linux::{Memory, MemoryKind};

const MIB: u64 = 1 << 20;
/// Where the client's RAM is, by its addresses.
const RAM: Iova = Iova::new(0x4000_0000);
// ANCHOR_END: head

// ANCHOR: device
/// A device model: it adds up the bytes that a descriptor names, and writes the sum behind them.
fn work(regions: &ClientRegions, at: Iova, len: u64) -> Result<(), Box<dyn Error>> {
    // Over as many regions as the range lies in, and for as long as this is held.
    let input = regions.hold(at, len, Prot::READ)?;
    let mut bytes = vec![0; usize::try_from(len)?];
    input.read(0, &mut bytes)?;
    let sum: u64 = bytes.iter().copied().map(u64::from).sum();
    let output = regions.hold(at.checked_add(len).ok_or("the range wraps")?, 8, Prot::WRITE)?;
    output.write(0, &sum.to_le_bytes())?;
    Ok(())
}
// ANCHOR_END: device

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: map
    // DMA_MAP, twice: files of the client's, each with an offset, a length and an address.
    let file = |len| Memory::new(MemoryKind::Memfd, len);
    let client_ram = [file(MIB)?, file(MIB)?];
    let regions = Arc::new(ClientRegions::new());
    for (n, ram) in client_ram.iter().enumerate() {
        let (fd, offset) = ram.file().ok_or("a memfd has a file")?;
        let memory = client::map_file(fd.try_clone_to_owned()?, offset, MIB, Prot::READ_WRITE)?;
        let at = RAM.checked_add(n as u64 * MIB).ok_or("the region wraps")?;
        regions.insert(at, Prot::READ_WRITE, memory)?;
    }
    // ANCHOR_END: map

    // ANCHOR: requests
    // The client writes a buffer that goes over both regions, and the device works on it.
    client_ram[0].write(MIB - 8, &[1; 8])?;
    client_ram[1].write(0, &[2; 8])?;
    work(&regions, Iova::new(RAM.get() + MIB - 8), 16)?;
    println!("the device wrote {}", client_ram[1].read_u64(8)?);

    // What the client did not share is refused, with the part that is missing.
    println!("{}", work(&regions, Iova::new(RAM.get() + 2 * MIB - 4), 16).unwrap_err());

    // DMA_UNMAP, while the device holds some of it.
    let held = regions.hold(RAM, 4096, Prot::READ)?;
    let mut unmapping = regions.unmap(RAM, MIB)?;
    println!("answered at once: {}", unmapping.is_done());
    println!("{}", work(&regions, RAM, 4).unwrap_err());
    let device = thread::spawn(move || drop(held));
    println!("answered: {} bytes", client::wait(unmapping, Duration::from_secs(10))?);
    device.join().map_err(|_| "the device panicked")?;
    println!("{} region is left", regions.count());
    Ok(())
    // ANCHOR_END: requests
}
