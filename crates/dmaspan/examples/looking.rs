//! Looking at a domain while drivers use it: what is mapped, by whom, what waits, and what leaked.
//!
//! Two drivers share a domain. A recorder knows who mapped what, and an observer of the platform's
//! own counts. One driver unmaps while its card writes, and drops a mapping in the end: both show.

#![expect(unsafe_code, reason = "the drivers promise that their frames are their own")]

// ANCHOR: head
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, NoPool, Piece, RawMemory};
use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
use dmaspan::iommu::soft::SoftIommu;
use dmaspan::iommu::{Domain, Event, FaultAccess, Observed, Observer, Recorder};
use dmaspan::platform::OneThread;
use dmaspan::{Direction, Iova, IovaRange, PhysAddr, Span, leaked};

type Boxed<T> = Result<T, Box<dyn Error>>;
// ANCHOR_END: head

// ANCHOR: observer
/// An observer of one's own: the bytes that drivers have mapped at the same time, at most.
#[derive(Default)]
struct Peak {
    mapped: AtomicU64,
    peak: AtomicU64,
}

impl Observer for Peak {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Mapped { spans, .. } => {
                let bytes: u64 = spans.iter().map(|span| span.len()).sum();
                let now = self.mapped.fetch_add(bytes, Ordering::Relaxed) + bytes;
                self.peak.fetch_max(now, Ordering::Relaxed);
            }
            // The domain of this program unmaps only what it mapped, without holes.
            Event::Unmapped { range, .. } => {
                let bytes = range.checked_len().unwrap_or(u64::MAX);
                self.mapped.fetch_sub(bytes, Ordering::Relaxed);
            }
            _ => {}
        }
    }
}
// ANCHOR_END: observer

/// Memory of a driver, from `offset` on.
fn memory(offset: u64, len: u64) -> Boxed<RawMemory> {
    let piece = Piece::memory(Span::new(PhysAddr::new(0x8000_0000 + offset), len)?);
    // SAFETY: the frames are the drivers' for good, and nobody refers to their bytes.
    Ok(unsafe { RawMemory::new(piece) })
}

fn main() -> Boxed<()> {
    // ANCHOR: platform
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    let table = PageTable::new(X86_64::new(X86_64Config::new(48, 48))?, tables)?;
    let iommu = SoftIommu::over(&table).waiting_by(|tries| tries < 3);
    let mut card = iommu.device(0);

    // Observers are around the hooks of the driver, each around the other.
    let who = Arc::new(Recorder::<parking_lot::RawMutex>::new());
    let peak = Arc::new(Peak::default());
    let hooks = Observed::new(Observed::new(iommu, Arc::clone(&who)), Arc::clone(&peak));
    let domain =
        Arc::new(DmaDomain::new(Domain::new(table, hooks)?, DmaConfig::new(1), OneThread)?);
    let device =
        |name| Device::erased(Arc::clone(&domain), NoPool, DeviceConfig::bits(40).named(name));
    let (nic, disk) = (device("nic0")?, device("disk0")?);
    // ANCHOR_END: platform

    let packet = nic.map_single(memory(0x40, 1500)?.into(), Direction::FromDevice)?;
    let ring = nic.map_single(memory(0x1000, 0x2000)?.into(), Direction::Bidirectional)?;
    let block = disk.map_single(memory(0x20_0000, 0x20_0000)?.into(), Direction::ToDevice)?;

    // ANCHOR: look
    println!("what is mapped, whoever mapped it:");
    for run in domain.list() {
        println!("  {} leads to {}", run.range, run.paddr);
    }
    println!("who mapped it:");
    for mapping in who.list() {
        let device = mapping.by.and_then(|by| by.device);
        println!("  {} map #{} of {}", mapping.range, mapping.number, device.unwrap_or("nobody"));
    }
    // The address in a fault report.
    let fault = Iova::new(block.addr().get() + 0x1234);
    let by = who.find(fault).and_then(|mapping| mapping.by).ok_or("nobody")?;
    println!("a fault at {fault} is in the buffer of {by}");

    println!("the page tables, for people:");
    print!("{}", domain.domain().dump());
    println!("and for programs, the leaves alone:");
    let lines = domain.domain().dump().lines().to_string();
    for leaf in lines.lines().filter(|line| line.starts_with("leaf ")) {
        println!("  {leaf}");
    }
    // ANCHOR_END: look

    // ANCHOR: quarantine
    // The driver takes the packet back while the card is in the middle of a write to it.
    let bytes = IovaRange::from_len(Iova::new(packet.addr().get()), 64)?;
    let mut packet = Some(packet);
    card.access(bytes, FaultAccess::Write, |_span| {
        let unmapped = packet.take().map(|packet| nic.unmap(packet));
        if let Some(Err(failed)) = unmapped {
            println!("the unmap fails: {}", failed.error);
        }
        Ok::<_, Box<dyn Error>>(())
    })?;
    for unmapped in domain.list_unmapped() {
        println!("{} is unmapped and {}", unmapped.range, unmapped.state);
    }
    domain.flush()?; // the write has ended
    println!("after a flush that succeeds: {} in quarantine", domain.waiting().1);
    // ANCHOR_END: quarantine

    // ANCHOR: leak
    let _block = disk.unmap(block)?;
    drop(ring); // a bug: the card may still use it
    let leaks = leaked();
    println!("{} handle leaked, with {:#x} bytes of memory", leaks.handles, leaks.memory);
    let left = who.list().next().and_then(|mapping| mapping.by).ok_or("nothing")?;
    println!("it is the mapping of {left}");
    println!("at most {:#x} bytes were mapped", peak.peak.load(Ordering::Relaxed));
    Ok(())
    // ANCHOR_END: leak
}
