//! A pool that poisons what nobody synced: a driver that forgets a sync sees it, or is told.

use dmaspan::dma::Bounce;
use dmaspan::swiotlb::{self, Fill, PoolConfig};
use dmaspan_sim::bounce::{POISON, SimPool};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::pool_memory::SimPoolMemory;
use dmaspan_sim::sanitizer::PoisonedPool;

use super::*;

type Pool = PoisonedPool<SimPool>;
type Card = SimDevice<ArmLpaeS1Walker, Arena, Arc<SimMemory>>;

const LEN: u64 = 2048;

/// A driver, its device, and the memory of both.
struct Rig {
    sanitizer: Sanitizer,
    driver: Device<Dma, Pool>,
    card: Card,
    ram: Arc<SimMemory>,
    buffer: Span,
}

fn rig() -> Rig {
    let (sanitizer, iotlb, domain, _) = dma(Flush::Strict);
    let ram = Arc::new(SimMemory::new(PhysAddr::new(1 << 32), 64 * PAGE, 12).unwrap());
    let slots = SimPool::new(Arc::clone(&ram), frames(0, 16)).unwrap();
    let pool = PoisonedPool::new(slots, Arc::clone(&ram), &sanitizer);
    let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(40) };
    let driver = Device::new(domain, pool, config).unwrap();
    let page = ram.allocate(PAGE, 12).unwrap();
    ram.pin_frames(&[page]);
    let buffer = Span::new(page.paddr().wrapping_add(0x100), LEN).unwrap();
    ram.cpu_write(buffer.paddr(), &vec![1; usize::try_from(LEN).unwrap()]).unwrap();
    let card = SimDevice::new(iotlb, Arc::clone(&ram)).sanitized(&sanitizer);
    Rig { sanitizer, driver, card, ram, buffer }
}

impl Rig {
    fn map(&self, direction: Direction) -> Mapping<Dma, Pool> {
        self.map_with(direction, Attrs::default())
    }

    fn map_with(&self, direction: Direction, attrs: Attrs) -> Mapping<Dma, Pool> {
        let memory = memory(&self.sanitizer, self.buffer);
        self.driver.map_single_with(memory, direction, attrs).unwrap()
    }

    fn unmap(&self, mapping: Mapping<Dma, Pool>) {
        let unmapped = self.driver.unmap(mapping).unwrap();
        assert!(matches!(unmapped, Unmapped::Released(_)));
    }

    /// What the CPU finds at an offset.
    fn cpu(&self, offset: u64) -> u8 {
        let mut byte = [0];
        self.ram.cpu_read(self.buffer.paddr().wrapping_add(offset), &mut byte).unwrap();
        byte[0]
    }

    fn cpu_writes(&self, offset: u64, bytes: &[u8]) {
        self.ram.cpu_write(self.buffer.paddr().wrapping_add(offset), bytes).unwrap();
    }

    /// What the device finds at an offset.
    fn card(&self, mapping: &Mapping<Dma, Pool>, offset: u64) -> u8 {
        let mut byte = [0];
        self.card.read(Iova::new(mapping.addr().get() + offset), &mut byte).unwrap();
        byte[0]
    }

    fn card_writes(&self, mapping: &Mapping<Dma, Pool>, offset: u64, bytes: &[u8]) {
        self.card.write(Iova::new(mapping.addr().get() + offset), bytes).unwrap();
    }

    /// The IOVAs that a device read without a sync.
    fn missing(&self) -> Vec<IovaRange> {
        assert!(kinds(&self.sanitizer).iter().all(|kind| *kind == FindingKind::MissingSync));
        self.sanitizer.errors().iter().map(|found| found.iovas).collect()
    }
}

#[test]
fn a_driver_that_forgets_to_sync_for_the_cpu_reads_poison_and_one_that_syncs_reads_the_data() {
    let rig = rig();
    let mapping = rig.map(Direction::FromDevice);
    rig.card_writes(&mapping, 0, b"packet");
    assert_eq!((rig.cpu(0), rig.cpu(LEN - 1)), (POISON, POISON), "it forgot the sync");
    rig.driver.sync_for_cpu(&mapping, 0, 6).unwrap();
    assert_eq!((rig.cpu(0), rig.cpu(5), rig.cpu(6)), (b'p', b't', POISON));
    // The next packet, which is not synced. What only the device writes needs no sync for it.
    rig.card_writes(&mapping, 0, b"second");
    assert_eq!((rig.cpu(0), rig.cpu(6)), (POISON, POISON));
    rig.unmap(mapping);
    // The unmap syncs; what the device did not write is as it was.
    assert_eq!((rig.cpu(0), rig.cpu(6), rig.cpu(LEN - 1)), (b's', 1, 1));
    assert_eq!(rig.sanitizer.finish(), []);
}

#[test]
fn a_driver_that_forgets_to_sync_for_the_device_is_told_and_its_device_reads_poison() {
    let rig = rig();
    let mapping = rig.map(Direction::ToDevice);
    assert_eq!((rig.card(&mapping, 0), rig.cpu(0)), (1, 1), "both see what was mapped");
    rig.cpu_writes(8, b"again");
    rig.driver.sync_for_device(&mapping, 8, 5).unwrap();
    assert_eq!((rig.card(&mapping, 8), rig.card(&mapping, 13)), (b'a', 1));
    assert_eq!(rig.missing(), []);
    // The next packet, which it does not sync.
    rig.cpu_writes(8, b"wrong");
    assert_eq!(rig.card(&mapping, 0), 1, "these bytes were not written");
    assert_eq!(rig.missing(), []);
    let mut bytes = [0; 16];
    rig.card.read(Iova::new(mapping.addr().get()), &mut bytes).unwrap();
    assert_eq!(bytes[8..13], [POISON; 5]);
    assert_eq!((bytes[7], bytes[13]), (1, 1));
    let iovas = IovaRange::from_len(Iova::new(mapping.addr().get() + 8), 5).unwrap();
    assert_eq!(rig.missing(), [iovas]);
    let report = rig.sanitizer.findings()[0].to_string();
    assert!(report.starts_with("ERROR: missing sync for the device\n"), "{report}");
    assert!(report.contains("sync what the CPU wrote"), "{report}");
    // One bug, one finding; and a sync ends it.
    rig.card(&mapping, 8);
    rig.driver.sync_for_device(&mapping, 0, LEN).unwrap();
    assert_eq!((rig.card(&mapping, 8), rig.missing().len()), (b'w', 1));
    rig.unmap(mapping);
    assert_eq!((rig.cpu(0), rig.cpu(8)), (1, b'w'), "a device that only reads changes nothing");
}

#[test]
fn both_syncs_of_a_buffer_that_goes_both_ways_are_missed_where_they_are_missing() {
    let rig = rig();
    let mapping = rig.map(Direction::Bidirectional);
    // It is the device's: the CPU finds nothing in it.
    assert_eq!((rig.cpu(0), rig.card(&mapping, 0)), (POISON, 1));
    rig.card_writes(&mapping, 0, b"ask");
    rig.driver.sync_for_cpu(&mapping, 0, 64).unwrap();
    assert_eq!((rig.cpu(0), rig.cpu(3), rig.cpu(64)), (b'a', 1, POISON));
    // Only read, it needs no sync for the device.
    assert_eq!(rig.card(&mapping, 0), b'a');
    assert_eq!(rig.missing(), []);
    rig.cpu_writes(0, b"reply!");
    assert_eq!(rig.card(&mapping, 0), POISON);
    assert_eq!(rig.missing().len(), 1);
    rig.driver.sync_for_device(&mapping, 0, 64).unwrap();
    assert_eq!((rig.card(&mapping, 0), rig.card(&mapping, 5)), (b'r', b'!'));
    // Written in the device's turn, without any sync.
    rig.cpu_writes(100, b"x");
    assert_eq!((rig.card(&mapping, 100), rig.missing().len()), (POISON, 2));
    rig.unmap(mapping);
}

#[test]
fn syncs_that_are_not_needed_change_nothing() {
    let rig = rig();
    let mapping = rig.map(Direction::Bidirectional);
    rig.driver.sync_for_device(&mapping, 0, LEN).unwrap();
    assert_eq!((rig.card(&mapping, 0), rig.card(&mapping, LEN - 1)), (1, 1));
    rig.driver.sync_for_cpu(&mapping, 0, LEN).unwrap();
    rig.driver.sync_for_cpu(&mapping, 0, LEN).unwrap();
    rig.driver.sync_for_device(&mapping, 0, LEN).unwrap();
    rig.driver.sync_for_device(&mapping, 0, LEN).unwrap();
    assert_eq!((rig.card(&mapping, 0), rig.cpu(0)), (1, POISON));
    rig.unmap(mapping);
    assert_eq!((rig.cpu(0), rig.cpu(LEN - 1)), (1, 1));
    let mapping = rig.map(Direction::ToDevice);
    rig.driver.sync_for_cpu(&mapping, 0, LEN).unwrap();
    rig.driver.sync_for_device(&mapping, 0, LEN).unwrap();
    assert_eq!((rig.card(&mapping, 0), rig.cpu(0)), (1, 1));
    rig.unmap(mapping);
    assert_eq!(rig.sanitizer.finish(), []);
}

#[test]
fn what_an_unmap_does_not_sync_stays_poison_where_the_device_wrote() {
    let rig = rig();
    let attrs = Attrs { sync: dmaspan::dma::CpuSync::Skip, ..Attrs::default() };
    let mapping = rig.map_with(Direction::FromDevice, attrs);
    rig.card_writes(&mapping, 0, b"packet");
    rig.driver.sync_for_cpu(&mapping, 0, 3).unwrap();
    rig.unmap(mapping);
    assert_eq!([0, 2, 3, 5, 6].map(|at| rig.cpu(at)), [b'p', b'c', POISON, POISON, 1]);
    rig.cpu_writes(0, &[1; 6]);
    // A device that says how much it wrote: the rest is as it was.
    let attrs = Attrs { fill: Fill::Overwritten, ..Attrs::default() };
    let mapping = rig.map_with(Direction::FromDevice, attrs);
    rig.card_writes(&mapping, 0, b"12");
    assert_eq!(rig.cpu(0), POISON);
    let unmapped = rig.driver.unmap_written(mapping, 2).unwrap();
    assert!(matches!(unmapped, Unmapped::Released(_)));
    assert_eq!([0, 1, 2, 6].map(|at| rig.cpu(at)), [b'1', b'2', 1, 1]);
    assert_eq!(rig.sanitizer.finish(), []);
}

#[test]
fn coherent_memory_of_the_pool_needs_no_sync_and_a_list_is_followed_by_its_slots() {
    let (sanitizer, iotlb, domain, _) = dma(Flush::Strict);
    let ram = Arc::new(SimMemory::new(PhysAddr::new(1 << 32), 64 * PAGE, 12).unwrap());
    let slots =
        SimPoolMemory::with_pointers(Arc::clone(&ram), vec![frames(0, 16)], &Faults::none());
    let inner = swiotlb::Pool::new(slots.unwrap(), PoolConfig::new(1), Machine).unwrap();
    let pool = PoisonedPool::new(Arc::new(inner), Arc::clone(&ram), &sanitizer);
    let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(40) };
    let driver = Device::new(domain, pool, config).unwrap();
    let card = SimDevice::new(iotlb, Arc::clone(&ram)).sanitized(&sanitizer);
    let mut ring = driver.alloc(PAGE, PAGE).unwrap();
    card.write(Iova::new(ring.addr().get() + 8), &7u64.to_le_bytes()).unwrap();
    assert_eq!(ring.read::<u64>(8), Ok(7));
    ring.write(16, 9u64).unwrap();
    let mut word = [0; 8];
    card.read(Iova::new(ring.addr().get() + 16), &mut word).unwrap();
    assert_eq!(u64::from_le_bytes(word), 9);

    let page = ram.allocate(PAGE, 12).unwrap();
    ram.pin_frames(&[page]);
    let mut segments = [Segment::default(); 2];
    let list = memory(&sanitizer, page);
    let list = driver.map_list(list, Direction::FromDevice, &mut segments).unwrap();
    let mut byte = [0];
    card.write(Iova::new(segments[0].addr.get() + 9), b"x").unwrap();
    ram.cpu_read(page.paddr().wrapping_add(9), &mut byte).unwrap();
    assert_eq!(byte, [POISON]);
    driver.sync_list_for_cpu(&list).unwrap();
    ram.cpu_read(page.paddr().wrapping_add(9), &mut byte).unwrap();
    assert_eq!(byte, *b"x");
    driver.sync_list_for_device(&list).unwrap();
    card.write(Iova::new(segments[0].addr.get() + 9), b"y").unwrap();
    ram.cpu_read(page.paddr().wrapping_add(9), &mut byte).unwrap();
    assert_eq!(byte, [POISON]);
    assert!(matches!(driver.unmap_list(list).unwrap(), Unmapped::Released(_)));
    driver.free(ring).unwrap();
    assert_eq!(sanitizer.finish(), []);
}
