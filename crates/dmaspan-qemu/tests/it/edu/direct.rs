//! Without an IOMMU: a PC with as much memory beyond the copier's reach as within.

use std::sync::Arc;

use dmaspan::dma::{BouncePool as _, Device, DeviceConfig, Direct, Error, NoPool, Piece, Segment};
use dmaspan::platform::OneThread;
use dmaspan::{Direction, DmaAddr, PhysAddr, Span};
use dmaspan_qemu::{Arch, Edu, Machine, Pci, ready};
use dmaspan_sim::rng::Rng;

use crate::edu::rig::{EDU, END, Pieces, RAM, SLOT, WINDOW, Window, memory, pool, read, write};
use crate::iommus::Memory;

type Untranslated = Direct<Memory, OneThread>;

struct Setup {
    edu: Edu,
    direct: Arc<Untranslated>,
    /// Beyond the copier's reach.
    high: Window,
    /// Where the copier comes with those addresses.
    low: Window,
    rng: Rng,
    machine: Machine,
}

fn setup() -> Option<Setup> {
    let builder = Machine::builder(ready(Arch::X86_64)?, "q35").ram(RAM);
    let machine = builder.device(EDU).start().unwrap();
    let edu = Edu::new(&Pci::new(&machine), SLOT).unwrap();
    let ram = machine.ram();
    let upper = Arc::new(ram.reserve(END).unwrap());
    assert_eq!(upper.paddr().get(), END);
    let lower = Arc::new(ram.allocate(WINDOW).unwrap());
    let mut rng = Rng::new(28);
    let mut bytes = || (0..WINDOW).map(|_| rng.next().to_le_bytes()[0]).collect::<Vec<_>>();
    let high = Window::new(&machine, &upper, lower.paddr().get(), bytes());
    let low = Window::new(&machine, &lower, 0, bytes());
    let direct = Arc::new(Direct::new(Span::new(ram.base(), ram.bytes()).unwrap(), OneThread));
    Some(Setup { edu, direct, high, low, rng, machine })
}

#[test]
fn what_lies_beyond_28_bits_is_bounced_and_nothing_around_it_changes() {
    let Some(Setup { mut edu, direct, mut high, low, mut rng, machine }) = setup() else { return };
    let pool = pool(machine.ram());
    let device = Device::new(direct, Arc::clone(&pool), DeviceConfig::bits(28)).unwrap();
    for round in 0..100 {
        let len = 1 + rng.below(4096);
        // Some devices write less than they may.
        let written = if round % 3 == 0 { 1 + rng.below(len) } else { len };
        let [from, to] = [0, 1].map(|_| rng.below(WINDOW - len + 1));
        let seen = [
            read(&mut edu, &device, high.part(from, len)),
            write(&mut edu, &device, high.part(to, len), written),
        ];
        for seen in seen {
            assert!(seen.bounced && seen.addr.get() + len <= END, "{seen:?}");
            let slot = Span::new(PhysAddr::new(seen.addr.get()), len).unwrap();
            assert!(pool.owns(slot), "{slot}");
        }
        let read = high.expected(from, written).to_vec();
        high.expected(to, written).copy_from_slice(&read);
        high.check();
    }
    low.check();
    assert_eq!(pool.stats().used, 0);
    assert!(pool.stats().high_water > 0);
}

#[test]
fn without_bouncing_the_copier_reads_and_writes_other_memory() {
    let Some(Setup { mut edu, direct, high, mut low, .. }) = setup() else { return };
    let (offset, len) = (0x123, 0x456);

    // A device that says how far it reaches is told.
    let near = Device::new(Arc::clone(&direct), NoPool, DeviceConfig::bits(28)).unwrap();
    let refused = near.map_single(memory(high.part(offset, len)), Direction::ToDevice);
    let refused = refused.unwrap_err();
    assert!(matches!(refused.error, Error::Unreachable { .. }), "{refused:?}");
    assert!(refused.memory.is_some());

    // A device that does not say it gets what lies there by the lower bits.
    let far = Device::new(direct, NoPool, DeviceConfig::bits(64)).unwrap();
    let seen = read(&mut edu, &far, high.part(offset, len));
    assert!(!seen.bounced && seen.addr.get() >= END);
    write(&mut edu, &far, high.part(0x4000, len), len);
    high.check();
    let read = low.expected(offset, len).to_vec();
    low.expected(0x4000, len).copy_from_slice(&read);
    low.check();
}

#[test]
fn of_a_list_only_what_lies_beyond_is_bounced() {
    let Some(Setup { mut edu, direct, high, low, machine, .. }) = setup() else { return };
    let pool = pool(machine.ram());
    let device = Device::new(direct, Arc::clone(&pool), DeviceConfig::bits(28)).unwrap();
    let mut windows = [high, low];
    // Each from one window to the other, by places that do not overlap.
    let parts = [(0, 0x10, 0x321), (1, 0x1000, 0x1000), (0, 0x3ff0, 0x20), (1, 0x801, 1)];
    for (n, (window, offset, len)) in parts.into_iter().enumerate() {
        let other = (window + 1) % 2;
        let to = 0x5000 + n as u64 * 0x800;
        let len = u64::min(len, 0x800);
        let pieces = [windows[window].part(offset, len), windows[other].part(to, len)];
        let pieces = Pieces(pieces.map(Piece::memory).to_vec());
        let mut segments = [Segment { addr: DmaAddr::new(0), len: 0 }; 2];
        let list = device.map_list(Box::new(pieces), Direction::Bidirectional, &mut segments);
        let list = list.unwrap();
        let is_own = |window: usize, offset: u64, segment: Segment| {
            segment.addr.get() == windows[window].part(offset, len).paddr().get()
        };
        assert_eq!(is_own(window, offset, segments[0]), window == 1);
        assert_eq!(is_own(other, to, segments[1]), other == 1);
        for segment in segments {
            assert!(segment.len == len && segment.addr.get() + len <= END, "{segment:?}");
        }
        edu.read(segments[0].addr.get(), len);
        edu.write(segments[1].addr.get(), len);
        drop(device.unmap_list(list).unwrap());
        let read = windows[window].expected(offset, len).to_vec();
        windows[other].expected(to, len).copy_from_slice(&read);
        windows.iter().for_each(Window::check);
    }
    assert_eq!(pool.stats().used, 0);
}
