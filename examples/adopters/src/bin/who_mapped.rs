//! A device faults, or memory does not come back: who has mapped what?
//!
//! A domain for drivers is observed by a `Recorder`; a container of user memory, its planner and a
//! bounce pool know by themselves. All of it lists itself while it is used. In the end a device
//! model does not let go of a packet that is unmapped, and the quarantine shows it.
//!
//! Glue: 5 lines; unsafe: 1 block, 0 impls.

use std::error::Error;
use std::sync::Arc;

use dmaspan::container::MapRequest;
use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, NoPool, Piece, RawMemory, UnmapFailed,
};
use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
use dmaspan::iommu::soft::SoftIommu;
use dmaspan::iommu::{Domain, FaultAccess, Observed, Recorder};
use dmaspan::swiotlb::{Pool, PoolConfig, SlotRequest};
use dmaspan::{Account, Container, Direction, HostAddr, Iova, IovaRange, PhysAddr, Prot, Span};
use dmaspan_linux::plan::{Mapper, Region};
use dmaspan_linux::{BounceMemory, LinuxPinner, Memory, MemoryKind, UserPlatform};

type Boxed<T> = Result<T, Box<dyn Error>>;

/// Memory of a driver, from `offset` on.
fn memory(offset: u64, len: u64) -> Boxed<RawMemory> {
    let piece = Piece::memory(Span::new(PhysAddr::new(0x8000_0000 + offset), len)?);
    // SAFETY: the frames are the drivers', and the device model touches no memory.
    Ok(unsafe { RawMemory::new(piece) })
}

fn table(base: u64) -> Boxed<PageTable<X86_64, Arena>> {
    let tables = Arena::new(PhysAddr::new(base), 1 << 20);
    Ok(PageTable::new(X86_64::new(X86_64Config::new(48, 48))?, tables)?)
}

fn drivers() -> Boxed<()> {
    let table = table(0x4000_0000)?;
    let iommu = SoftIommu::over(&table).waiting_by(|tries| tries < 3);
    let mut card = iommu.device(1);
    // ANCHOR: glue
    // What a platform adds, to know who mapped what.
    let who = Arc::new(Recorder::<parking_lot::RawMutex>::new());
    let domain = Domain::new(table, Observed::new(iommu, Arc::clone(&who)))?;
    let domain = Arc::new(DmaDomain::new(domain, DmaConfig::new(1), UserPlatform)?);
    let device =
        |name| Device::erased(Arc::clone(&domain), NoPool, DeviceConfig::bits(32).named(name));
    // ANCHOR_END: glue
    let (nic, disk) = (device("nic0")?, device("disk0")?);
    let packet = nic.map_single(memory(0x40, 1500)?.into(), Direction::FromDevice)?;
    let ring = nic.map_single(memory(0x1_0000, 0x2000)?.into(), Direction::Bidirectional)?;
    let block = disk.map_single(memory(0x20_0000, 0x20_0000)?.into(), Direction::ToDevice)?;

    let fault = Iova::new(block.addr().get() + 0x1234);
    println!("who has {fault}?");
    match who.find(fault).and_then(|found| Some((found, found.by?))) {
        Some((found, by)) => println!("{} of {by}, map #{}", found.range, found.number),
        None => println!("nobody"),
    }
    let behind = Iova::new(ring.addr().get() + 0x2000);
    println!("and {behind}? {}", who.find(behind).map_or("nobody", |_| "somebody"));
    print!("\nwho mapped what:\n{}", who.dump());
    print!("\nthe page tables:\n{}", domain.domain().dump());
    print!("\nwhat is mapped, and the IOVAs:\n{}", domain.dump());

    // The card is in the middle of a write when its driver unmaps the packet.
    let range = IovaRange::from_len(Iova::new(packet.addr().get()), 64)?;
    let mut packet = Some(packet);
    card.access(range, FaultAccess::Write, |_span| {
        let failed = packet.take().map(|packet| nic.unmap(packet));
        if let Some(Err(UnmapFailed { error, .. })) = failed {
            println!("\n{error}");
        }
        Ok::<_, Box<dyn Error>>(())
    })?;
    print!("\nafter that:\n{}", domain.dump());
    // It has ended, and the next flush is confirmed.
    nic.flush()?;
    println!("\nand after a flush: {:?} wait", domain.waiting());
    let _released = (nic.unmap(ring)?, disk.unmap(block)?);
    println!("{} mappings in the end", who.list().count());
    Ok(())
}

fn user_memory() -> Boxed<()> {
    let table = table(0x5000_0000)?;
    let iommu = SoftIommu::over(&table).reaching::<HostAddr>();
    let pinner = LinuxPinner::<HostAddr>::new()?;
    let account = Account::new(4 << 20);
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(pinner, Domain::new(table, iommu)?, account);
    let memory = Arc::new(Memory::new(MemoryKind::Base, 1 << 20)?);
    let ram = memory.sub_range(0, 0x8_0000)?;
    let ring = memory.sub_range(0x8_0000, 0x1000)?;
    let request = MapRequest::new(&memory, ram, Iova::new(0x10_0000), Prot::READ_WRITE);
    container.map_request(&request.label("guest RAM"))?;
    container.map(&memory, ring, Iova::new(0x80_0000), Prot::READ)?;
    println!("\nuser memory:");
    for mapping in container.list() {
        println!("{} {} by {}", mapping.range, mapping.state, mapping.label);
    }
    let at = IovaRange::point(Iova::new(0x10_1234));
    println!("0x101234 is of {}", container.list_in(at).next().ok_or("nobody")?.label);
    // A planner over the same container knows what was mapped through it.
    let mapper = Mapper::new(container)?;
    let queues = Region::part(&memory, 0x9_0000, 0x2000, Prot::READ_WRITE)?.label("queues");
    let mapped = mapper.map([queues.at(Iova::new(0x90_0000))])?;
    for map in mapper.list() {
        println!("the mapper has {} for {}", map.range, map.label);
    }
    mapped.unmap()?;
    mapper.space().unmap_all()?;
    println!("{} mappings in the end", mapper.space().mappings());
    Ok(())
}

fn slots() -> Boxed<()> {
    let memory = BounceMemory::new(MemoryKind::Base, 1 << 20)?;
    let pool = Arc::new(Pool::new(memory, PoolConfig::new(1), UserPlatform)?);
    let _ring = pool.lease(6000, &SlotRequest::default())?;
    println!("\nslots:");
    for slots in pool.list() {
        println!("{:#x} bytes {} in {}", slots.span.len(), slots.held, slots.place);
    }
    Ok(())
}

fn main() -> Boxed<()> {
    drivers()?;
    user_memory()?;
    slots()
}
