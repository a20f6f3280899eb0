//! A packet driver under the sanitizer: two threads receive packets of 2 KiB, two to a page, from a
//! device behind an IOMMU, and unmap them lazily. Nothing is found in that. Then the driver does
//! six things that are wrong, and the sanitizer says which.
//!
//! ```text
//! cargo run --release -p dmaspan-sim --example packets -- 1000000
//! ```

use std::cell::Cell;
use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Flush, Mapping, NoPool, Piece,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::Domain;
use dmaspan::{Direction, Iova, PhysAddr, Platform, Span};
use dmaspan_sim::device::SimDevice;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::sanitizer::{Hardware, Sanitized, Sanitizer, Tracked};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;

const PAGE: u64 = 4096;
/// Two on a page.
const BYTES: usize = 2048;
const PACKET: u64 = BYTES as u64;
/// Packets that a thread has mapped at once.
const RING: usize = 64;

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

/// Two CPUs, with a clock that each look at it moves on by a microsecond.
#[derive(Debug, Default)]
struct Machine(AtomicU64);

impl Platform for Machine {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        CPU.get()
    }

    fn now(&self) -> u64 {
        self.0.fetch_add(1000, Ordering::Relaxed)
    }
}

/// Memory for packets. What was released last is used next.
struct Packets(Mutex<Vec<Span>>);

/// A packet; dropped, its memory is another's.
struct Packet {
    piece: Piece,
    packets: Arc<Packets>,
}

impl Drop for Packet {
    fn drop(&mut self) {
        self.packets.0.lock().push(self.piece.span);
    }
}

#[expect(unsafe_code, reason = "a device writes the memory")]
// SAFETY: the simulated memory of a packet is its own until it is dropped.
unsafe impl DmaMemory for Packet {
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.piece)
    }
}

type Iommu = Iotlb<ArmLpaeS1Walker, Arena>;
type Dma = DmaDomain<ArmLpaeS1<12>, Arena, Sanitized<Iommu>, Machine, Tracked<Packet>>;

/// The driver of a network card, and the card.
struct Nic {
    device: Device<Dma>,
    packets: Arc<Packets>,
    sanitizer: Sanitizer,
    card: SimDevice<ArmLpaeS1Walker, Arena, Arc<SimMemory>>,
}

impl Nic {
    fn new() -> Result<Self, Box<dyn Error>> {
        let tables = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
        let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
        let table = PageTable::new(format, tables.clone())?;
        let registers = table.format().registers(table.root());
        let iommu = Iotlb::new(ArmLpaeS1Walker::new(registers.into())?, tables);

        let ram = Arc::new(SimMemory::new(PhysAddr::new(0x1_0000_0000), 16 << 20, 12)?);
        let mut free = Vec::new();
        for _ in 0..1024 {
            let page = ram.allocate(PAGE, 12)?;
            ram.pin_frames(&[page]);
            free.push(Span::new(page.paddr(), PACKET)?);
            free.push(Span::new(page.paddr().wrapping_add(PACKET), PACKET)?);
        }

        // These two lines, and `Tracked` below, are all that the sanitizer needs.
        let sanitizer = Sanitizer::default();
        let domain = Domain::new(table, iommu.clone().sanitized(&sanitizer))?;
        let card = SimDevice::new(iommu, ram).sanitized(&sanitizer);

        let config = DmaConfig { flush: Flush::Lazy, ..DmaConfig::new(2) };
        let domain = Arc::new(DmaDomain::new(domain, config, Machine::default())?);
        let device = Device::new(domain, NoPool, DeviceConfig::bits(48).named("nic0"))?;
        Ok(Self { device, packets: Arc::new(Packets(Mutex::new(free))), sanitizer, card })
    }

    fn take(&self) -> Span {
        self.packets.0.lock().pop().expect("there are more than can be mapped")
    }

    #[track_caller]
    fn map(&self, span: Span) -> Mapping<Dma> {
        let packet = Packet { piece: Piece::memory(span), packets: Arc::clone(&self.packets) };
        let packet = Tracked::new(packet, &self.sanitizer);
        self.device.map_single(packet, Direction::FromDevice).expect("there is room")
    }

    #[track_caller]
    fn unmap(&self, mapping: Mapping<Dma>) {
        // Queued: the packet is released behind a flush.
        let _unmapped = self.device.unmap(mapping).expect("hardware answers");
    }

    #[track_caller]
    fn flush(&self) {
        self.device.translation().flush().expect("hardware answers");
    }

    /// Receives packets, as the only thread of its CPU.
    fn receive(&self, cpu: usize, count: u64) {
        CPU.set(cpu);
        let mut ring = VecDeque::new();
        for number in 0..count {
            if ring.len() == RING
                && let Some(mapping) = ring.pop_front()
            {
                let packet = [number.to_le_bytes()[0]; BYTES];
                self.card.write(address(&mapping), &packet).expect("it is mapped");
                self.device.sync_for_cpu(&mapping, 0, PACKET).expect("it is of the mapping");
                self.unmap(mapping);
            }
            ring.push_back(self.map(self.take()));
        }
        ring.into_iter().for_each(|mapping| self.unmap(mapping));
    }

    /// What a driver must not do.
    fn go_wrong(&self) {
        // The card goes on after the unmap, and after the flush.
        for flush in [false, true] {
            let mapping = self.map(self.take());
            let iova = address(&mapping);
            self.card.write(iova, &[0]).expect("it is mapped");
            self.unmap(mapping);
            if flush {
                self.flush();
            }
            let written = self.card.write(iova, &[1]);
            assert_eq!(written.is_err(), flush, "the IOTLB has it until it is flushed");
        }

        // The memory goes back before the flush: so does a driver that keeps no owner of it.
        let packet = self.take();
        self.unmap(self.map(packet));
        self.sanitizer.on_free(packet);
        self.flush();

        // The descriptor is found twice.
        let mapping = self.map(self.take());
        let (addr, len) = self.device.into_raw(mapping).expect("it is of the device");
        let first = self.device.unmap_raw(addr, len, Direction::FromDevice);
        let second = self.device.unmap_raw(addr, len, Direction::FromDevice);
        assert!(first.is_ok() && second.is_err());

        // The length of a page is taken for that of a packet.
        let mapping = self.map(self.take());
        self.device.sync_for_cpu(&mapping, 0, PAGE).expect_err("so many bytes are not mapped");
        self.unmap(mapping);

        // And one is forgotten.
        drop(self.map(self.take()));
        self.flush();
    }
}

fn address(mapping: &Mapping<Dma>) -> Iova {
    Iova::new(mapping.addr().get())
}

/// Receives so many packets by two threads, then goes wrong; gives the sanitizer.
fn run(packets: u64) -> Result<Sanitizer, Box<dyn Error>> {
    let nic = Nic::new()?;
    std::thread::scope(|scope| {
        for cpu in 0..2 {
            let nic = &nic;
            scope.spawn(move || nic.receive(cpu, packets / 2));
        }
    });
    nic.flush();
    assert_eq!(nic.sanitizer.findings(), [], "the driver is right so far");
    nic.go_wrong();
    nic.sanitizer.finish();
    Ok(nic.sanitizer)
}

fn main() -> Result<(), Box<dyn Error>> {
    let packets = std::env::args().nth(1).map_or(Ok(1_000_000), |count| count.parse())?;
    let sanitizer = run(packets)?;
    println!("{packets} packets\n{sanitizer}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_found_in_packets_of_half_a_page_and_each_bug_is_in_words() {
        let sanitizer = run(40_000).unwrap();
        let errors = sanitizer.errors();
        let titles = [
            "use after unmap",
            "use after flush",
            "late flush",
            "double unmap",
            "sync outside of a mapping",
            "leak",
        ];
        assert_eq!(errors.len(), titles.len(), "{sanitizer}");
        for (finding, title) in errors.iter().zip(titles) {
            let report = finding.to_string();
            assert!(report.starts_with(&format!("ERROR: {title}\n")), "{report}");
            for record in &finding.history {
                assert_eq!(record.origin.location.file(), file!(), "{report}");
            }
        }
        let report = errors[1].to_string();
        assert!(
            report.contains(": unmapped by #") && report.contains(", flushed by #"),
            "{report}"
        );
        let leak = errors[5].to_string();
        assert!(leak.contains("ThreadId") && leak.contains(", nic0, mapped "), "{leak}");
        assert!(sanitizer.events() > 40_000 * 4);
    }
}
