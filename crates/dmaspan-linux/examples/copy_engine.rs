//! A driver and its device in one process: the driver that would run over VFIO, over a model.
//!
//! The driver maps buffers by a `Mapper`, writes a descriptor into memory that the device reads,
//! and rings a doorbell. It knows of no IOMMU: its space is a container here, and the kernel's
//! (`vfio::VfioSpace`) on a machine with the device. The device model reaches memory through the
//! page tables that the container wrote, and faults where nothing is mapped.

// ANCHOR: head
use std::error::Error;
use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::Domain;
use dmaspan::iommu::soft::{Bus, BusError, SoftDevice, SoftIommu};
use dmaspan::{Account, Container, HostAddr, Iova, PhysAddr, Prot};
use dmaspan_linux::plan::{Mapper, MemorySpace, Region};
use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
// ANCHOR_END: head

// ANCHOR: driver
/// Has the device copy `len` bytes from the beginning of one buffer to that of another. The device
/// reads what to do from the beginning of the queue.
fn copy<S: MemorySpace + 'static>(
    mapper: &Mapper<S>,
    queue: &Arc<Memory>,
    [from, to]: [&Arc<Memory>; 2],
    len: u64,
    doorbell: &mut dyn FnMut(Iova) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    // What the device is to read it cannot write, and the other way round.
    let regions = [
        Region::whole(queue, Prot::READ),
        Region::whole(from, Prot::READ),
        Region::whole(to, Prot::WRITE),
    ];
    let mapped = mapper.map(regions)?;
    let [ring, source, target] = [0, 1, 2].map(|n| mapped.iova(n).unwrap_or(Iova::new(0)));
    for (n, word) in [source.get(), target.get(), len].into_iter().enumerate() {
        queue.write_u64(8 * n as u64, word)?;
    }
    let done = doorbell(ring);
    // The device is done. Once this has returned, it reaches none of the three any more.
    mapped.unmap()?;
    done
}
// ANCHOR_END: driver

// ANCHOR: device
/// The memory of this process that the device can be sent to.
struct Process(Vec<Arc<Memory>>);

impl Process {
    fn find(&self, at: HostAddr, len: usize) -> Result<(&Memory, u64), BusError> {
        let found = self.0.iter().find_map(|memory| {
            let offset = at.get().checked_sub(memory.user_range().start().get())?;
            (offset + len as u64 <= memory.len()).then_some((&**memory, offset))
        });
        found.ok_or(BusError::NobodyHere { addr: at })
    }
}

impl Bus<HostAddr> for Process {
    fn read(&self, at: HostAddr, buf: &mut [u8]) -> Result<(), BusError> {
        let (memory, offset) = self.find(at, buf.len())?;
        memory.read(offset, buf).map_err(|_| BusError::NobodyHere { addr: at })
    }

    fn write(&self, at: HostAddr, buf: &[u8]) -> Result<(), BusError> {
        let (memory, offset) = self.find(at, buf.len())?;
        memory.write(offset, buf).map_err(|_| BusError::NobodyHere { addr: at })
    }
}

/// Reads the descriptor that the doorbell names, and copies.
fn device(
    dma: &mut SoftDevice<ArmLpaeS1<12>, Arena, HostAddr>,
    bus: &impl Bus<HostAddr>,
    descriptor: Iova,
) -> Result<(), Box<dyn Error>> {
    let mut words = [0; 24];
    dma.read(bus, descriptor, &mut words)?;
    let word = |n: usize| u64::from_le_bytes(words[8 * n..][..8].try_into().unwrap_or_default());
    let mut bytes = vec![0; usize::try_from(word(2))?];
    dma.read(bus, Iova::new(word(0)), &mut bytes)?;
    dma.write(bus, Iova::new(word(1)), &bytes)?;
    Ok(())
}
// ANCHOR_END: device

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: main
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    let table = PageTable::new(ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?, tables)?;
    let iommu = SoftIommu::over(&table).reaching::<HostAddr>();
    let mut dma = iommu.device(0);
    let container: Container<_, parking_lot::RawMutex> = Container::with_domain(
        LinuxPinner::new()?,
        Domain::new(table, iommu)?,
        Account::new(1 << 30),
    );
    let mapper = Mapper::new(container)?;

    let memory = |len| Memory::new(MemoryKind::Base, len).map(Arc::new);
    let (queue, from, to) = (memory(4096)?, memory(1 << 20)?, memory(1 << 20)?);
    let bus = Process(vec![Arc::clone(&queue), Arc::clone(&from), Arc::clone(&to)]);
    let mut doorbell = |descriptor| device(&mut dma, &bus, descriptor);

    let text = b"by way of the tables";
    from.write(0, text)?;
    copy(&mapper, &queue, [&from, &to], text.len() as u64, &mut doorbell)?;
    let mut copied = [0; 20];
    to.read(0, &mut copied)?;
    println!("the device copied {:?}", String::from_utf8_lossy(&copied));

    // A length that is too long: the device writes its buffer to the end, and faults behind it.
    let refused = copy(&mapper, &queue, [&from, &to], (1 << 20) + 1, &mut doorbell);
    println!("{}", refused.unwrap_err());
    // After the unmap nothing is reached, whatever address the device kept.
    println!("{}", doorbell(Iova::new(0x1000)).unwrap_err());
    println!("{} bytes are mapped in the end", mapper.mapped_bytes());
    // ANCHOR_END: main
    Ok(())
}
