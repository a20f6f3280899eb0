//! Rare events of mappings: hooks that panic, memory at the ends of all addresses, owners that map
//! when they are dropped, devices with odd limits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use dmaspan::dma::{
    Attrs, Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error, Flush, NoPool, Piece,
    ReserveRequest, Segment, Via,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Direction, Errno, Iova, IovaRange, PhysAddr, Platform, Span};
use dmaspan_sim::bounce::SimPool;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::common::{arena, for_all_granules, format, span, walker};
use crate::rig::{BYTES, Caches, RAM, Rig, non_coherent, unmap, untrusted};

for_all_granules!(
    the_longest_mapping_is_one_that_fits_wherever_it_lies,
    caches_follow_what_is_linked,
);

/// Hooks of hardware and of a platform, which panic when they are told to.
#[derive(Clone, Debug)]
struct Touchy<T>(T, Arc<AtomicBool>);

impl<T> Touchy<T> {
    fn touch(&self) {
        assert!(!self.1.load(Ordering::Relaxed), "on purpose");
    }
}

type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;

// SAFETY: it does what the simulated hardware does, or panics before.
unsafe impl IommuOps for Touchy<Tlb> {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.touch();
        self.0.invalidate(what)
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.touch();
        self.0.sync_map(range)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.0.detach()
    }

    fn max_ranges(&self) -> usize {
        self.0.max_ranges()
    }
}

impl Platform for Touchy<()> {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }

    fn invalidate(&self, _span: Span) {
        self.touch();
    }
}

type Edge<H> = DmaDomain<ArmLpaeS1<12>, Arena, Touchy<Tlb>, Touchy<()>, H>;

/// A domain, and what makes its hooks panic.
fn domain<H: DmaMemory>(flush: Flush) -> (Arc<Edge<H>>, Arc<AtomicBool>) {
    let panics = Arc::<AtomicBool>::default();
    let tables = arena();
    let table = PageTable::new(format::<12>(48, 48), tables.clone()).unwrap();
    let iotlb = Iotlb::new(walker(table.format(), table.root()), tables);
    let domain = Domain::new(table, Touchy(iotlb, Arc::clone(&panics))).unwrap();
    let config = DmaConfig { flush, ..DmaConfig::new(1) };
    let domain = DmaDomain::new(domain, config, Touchy((), Arc::clone(&panics))).unwrap();
    (Arc::new(domain), panics)
}

/// Memory that counts how many of its kind there are.
#[derive(Clone, Debug)]
struct Counted(Vec<Piece>, #[expect(dead_code, reason = "it counts")] Arc<()>);

// SAFETY: nobody touches the memory.
unsafe impl DmaMemory for Counted {
    fn pieces(&self) -> &[Piece] {
        &self.0
    }
}

fn panics_in<R>(run: impl FnOnce() -> R) {
    assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
}

#[test]
fn where_a_hook_panics_nothing_is_released_that_a_device_may_use() {
    let (domain, panics) = domain::<Counted>(Flush::Lazy);
    let ram = Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, 12).unwrap());
    let pool = SimPool::new(Arc::clone(&ram), span(RAM, 0x8000)).unwrap();
    let alive = Arc::new(());
    ram.allocate_at(span(RAM + 0x10_0000, 0x2000)).unwrap();
    ram.pin_frames(&[span(RAM + 0x10_0000, 0x2000)]);
    let memory = |len| {
        let piece = Piece::memory(span(RAM + 0x10_0000, len));
        Counted(vec![piece], Arc::clone(&alive))
    };
    let uneasy = Device::new(
        Arc::clone(&domain),
        pool.clone(),
        untrusted(non_coherent(DeviceConfig::bits(40))),
    );
    let uneasy = uneasy.unwrap();
    panics.store(true, Ordering::Relaxed);
    panics_in(|| uneasy.map_single(memory(100), Direction::ToDevice));
    assert_eq!((pool.held(), Arc::strong_count(&alive)), (1, 2));
    let mut room = [Segment::default(); 2];
    panics_in(|| uneasy.map_list(memory(100), Direction::ToDevice, &mut room));
    assert_eq!((pool.held(), Arc::strong_count(&alive)), (2, 3));
    // A lazy unmap syncs caches before hardware is told.
    let config = non_coherent(DeviceConfig::bits(40));
    let trusted = Device::new(Arc::clone(&domain), NoPool, config).unwrap();
    panics.store(false, Ordering::Relaxed);
    let single = trusted.map_single(memory(100), Direction::FromDevice).unwrap();
    let list = trusted.map_list(memory(100), Direction::FromDevice, &mut room).unwrap();
    panics.store(true, Ordering::Relaxed);
    panics_in(|| trusted.unmap(single));
    panics_in(|| trusted.unmap_list(list));
    assert_eq!(Arc::strong_count(&alive), 5);
    panics.store(false, Ordering::Relaxed);
}

/// The table of all pieces was taken out, with the leaves in it, and a device knows the way there.
#[test]
fn what_a_panic_tore_out_of_a_reservation_is_forgotten_before_its_memory_is_released() {
    const PAGES: usize = 512;
    let (domain, panics) = domain::<Counted>(Flush::Strict);
    let device = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(48)).unwrap();
    let (alive, direction) = (Arc::new(()), Direction::FromDevice);
    let bytes = PAGES as u64 * 4096;
    let request = ReserveRequest { len: bytes, offset: 0, pieces: PAGES, direction };
    let mut reservation = device.reserve(request).unwrap();
    for n in 0..PAGES as u64 {
        let piece = Piece::memory(span(0x8000_0000 + 2 * n * 4096, 4096));
        let memory = Counted(vec![piece], Arc::clone(&alive));
        device.link(&mut reservation, n * 4096, memory).unwrap();
    }
    device.announce(&mut reservation).unwrap();
    let (iotlb, first) = (&domain.domain().ops().0, Iova::new(reservation.addr().get()));
    assert!(iotlb.translate(first, Access::Write).is_ok());
    panics.store(true, Ordering::Relaxed);
    panics_in(|| device.unlink(&mut reservation, 0, bytes, drop));
    panics.store(false, Ordering::Relaxed);
    assert_eq!((Arc::strong_count(&alive), reservation.linked()), (1 + PAGES, PAGES));
    let second = Iova::new(first.get() + 4096);
    let destroyed = device.destroy(reservation, |memory| {
        assert!(iotlb.translate(second, Access::Write).is_err(), "a device reaches it");
        drop(memory);
    });
    assert!(destroyed.is_ok());
    assert_eq!(Arc::strong_count(&alive), 1);
}

#[test]
fn memory_at_the_ends_of_all_addresses_is_refused_and_given_back() {
    let (domain, _) = domain::<Counted>(Flush::Strict);
    let alive = Arc::new(());
    let spans = [
        span(u64::MAX, 1),
        span(u64::MAX - 0x7ff, 0x800),
        span(u64::MAX - 0xfff, 0x1000),
        span(0, u64::MAX),
        span(1, u64::MAX),
        span(0x800, u64::MAX - 0x800),
        span(1 << 63, 1 << 63),
        span((1 << 48) - 1, 2),
        span(1 << 48, 1),
    ];
    for config in [DeviceConfig::bits(64), DeviceConfig::bits(20), DeviceConfig::bits(48)] {
        let device = Device::new(Arc::clone(&domain), NoPool, config).unwrap();
        for (index, odd) in spans.into_iter().enumerate() {
            for via in [Via::Memory, Via::HostBridge, Via::Bus] {
                let piece = Piece { span: odd, via };
                let memory = |pieces: &[Piece]| Counted(pieces.to_vec(), Arc::clone(&alive));
                let passes = via == Via::Bus && odd.last().get() <= config.limits.last;
                let mapped = device.map_single(memory(&[piece]), Direction::ToDevice);
                assert_eq!(mapped.is_ok(), passes, "{piece:?}");
                match mapped {
                    Ok(mapping) => drop(device.unmap(mapping).unwrap()),
                    Err(refused) => assert_eq!(refused.memory.unwrap().0, [piece]),
                }
                // In a list beside what is well, before and behind it.
                let well = Piece::memory(span(0x8000_0000, 0x1000));
                for pieces in [[well, piece], [piece, well], [piece, piece]] {
                    let mut room = [Segment::default(); 4];
                    let mapped = device.map_list(memory(&pieces), Direction::ToDevice, &mut room);
                    match mapped {
                        Ok(mapping) => {
                            assert!(passes, "{pieces:?}");
                            drop(device.unmap_list(mapping).unwrap());
                        }
                        Err(refused) => {
                            assert!(refused.memory.is_some(), "{index} {}", refused.error);
                            assert_eq!(room, [Segment::default(); 4]);
                        }
                    }
                }
                let request = ReserveRequest {
                    len: 0x1000,
                    offset: odd.paddr().get() & 0xfff,
                    pieces: 1,
                    direction: Direction::ToDevice,
                };
                let mut reservation = device.reserve(request).unwrap();
                let refused = device.link(&mut reservation, 0, memory(&[piece])).unwrap_err();
                assert!(refused.memory.is_some());
                device.destroy(reservation, drop).unwrap();
            }
        }
    }
    assert_eq!(Arc::strong_count(&alive), 1);
    let retired = domain.flush();
    assert_eq!((retired, domain.waiting()), (Ok(()), (0, 0)));
}

/// Memory whose owner maps other memory when it is dropped.
#[derive(Debug)]
struct Restless {
    piece: Piece,
    device: Option<Weak<Device<Edge<Restless>>>>,
    outcome: Arc<Mutex<Vec<Result<(), Error>>>>,
}

// SAFETY: nobody touches the memory.
unsafe impl DmaMemory for Restless {
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.piece)
    }
}

impl Drop for Restless {
    fn drop(&mut self) {
        let Some(device) = self.device.take().and_then(|device| device.upgrade()) else { return };
        let next = Restless { device: None, piece: self.piece, outcome: self.outcome.clone() };
        let mapped = device.map_single(next, Direction::ToDevice);
        let outcome = mapped.map(|mapping| drop(device.unmap(mapping))).map_err(|r| r.error);
        self.outcome.lock().unwrap().push(outcome);
    }
}

#[test]
fn an_owner_may_map_and_unmap_when_it_is_dropped() {
    let (domain, _) = domain::<Restless>(Flush::Lazy);
    let device =
        Arc::new(Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(20)).unwrap());
    let outcome = Arc::<Mutex<Vec<_>>>::default();
    let restless = |pages: u64| Restless {
        piece: Piece::memory(span(RAM, pages << 12)),
        device: Some(Arc::downgrade(&device)),
        outcome: Arc::clone(&outcome),
    };
    // By a flush that its domain asks for.
    let mapping = device.map_single(restless(1), Direction::ToDevice).unwrap();
    let _ = device.unmap(mapping).unwrap();
    domain.flush().unwrap();
    assert_eq!(outcome.lock().unwrap().len(), 1);
    // By the flush of a mapping that finds no IOVAs: half of them wait, and what the drop maps
    // finds none either.
    let mapping = device.map_single(restless(128), Direction::ToDevice).unwrap();
    let _ = device.unmap(mapping).unwrap();
    let mapping = device.map_single(restless(128), Direction::ToDevice);
    drop(mapping.map(|mapping| device.unmap(mapping).map(drop)));
    // When the closure of a mapping panics.
    panics_in(|| {
        device.with_mapped(restless(1), Direction::ToDevice, Attrs::default(), |_| panic!("so"))
    });
    // Raw.
    let mapping = device.map_single(restless(1), Direction::ToDevice).unwrap();
    let (addr, len) = device.into_raw(mapping).unwrap();
    drop(device.unmap_raw(addr, len, Direction::ToDevice).unwrap());
    domain.flush().unwrap();
    let outcome = outcome.lock().unwrap();
    assert!(outcome.len() >= 4 && outcome[0].is_ok(), "{outcome:?}");
    drop(outcome);
    domain.flush().unwrap();
    assert_eq!(domain.waiting(), (0, 0));
}

fn the_longest_mapping_is_one_that_fits_wherever_it_lies<const G: u32>() {
    let g = 1u64 << G;
    let rig = Rig::<G>::new(Flush::Strict);
    for (last, boundary, keep_bits) in [
        (RAM + 16 * g - 1, None, 0),
        (RAM + 16 * g - 1, Some(g), 0),
        (RAM + 16 * g - 1, Some(4 * g), 0x3ff),
        (RAM + 16 * g - 1, Some(0x400), 0x3ff),
        (RAM + 16 * g - 1, Some(0x200), 0x3ff),
        (RAM + 3 * g - 1, None, 0xff),
        (RAM + 3 * g - 1, Some(4 * g), 0xff),
        (RAM + 100, None, 0),
        (RAM, None, 0),
        (RAM + 16 * g - 1, None, u64::MAX),
    ] {
        let mut config = DeviceConfig::bits(64);
        config.limits.last = last;
        config.limits.boundary = boundary;
        config.limits.keep_bits = keep_bits;
        let device = rig.direct(config).unwrap();
        let longest = device.max_mapping_len();
        for offset in [0, keep_bits & (g - 1)] {
            if longest > 0 {
                let mapping = device.map_single(rig.buffer(offset, longest), Direction::ToDevice);
                let mapping = mapping.unwrap_or_else(|r| panic!("{}, {config:?}", r.error));
                drop(unmap(&device, mapping));
            }
        }
        let worst = rig.buffer(keep_bits & (g - 1), longest + 1);
        let refused = device.map_single(worst, Direction::ToDevice).unwrap_err();
        assert!(matches!(refused.error, Error::NoSlot { .. }), "{}, {config:?}", refused.error);
        assert!(refused.memory.is_some());
    }
    assert_eq!((rig.pool.held(), rig.memory.violations()), (0, vec![]));
}

fn caches_follow_what_is_linked<const G: u32>() {
    use Caches::{Invalidated, WrittenBack};
    let g = 1u64 << G;
    let rig = Rig::<G>::new(Flush::Strict);
    for (config, bounced) in [
        (non_coherent(DeviceConfig::bits(40)), 0),
        (untrusted(non_coherent(DeviceConfig::bits(40))), 1),
    ] {
        let device = rig.translated(config);
        for direction in [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional] {
            let request = ReserveRequest { len: 2 * g - 100, offset: 100, pieces: 2, direction };
            let mut reservation = device.reserve(request).unwrap();
            // What lies elsewhere in its granule than its place does is looked at before a slot.
            let (copies, misplaced) = (rig.pool.copies(), rig.buffer(104, 50));
            let offset = misplaced.span().paddr().get();
            let refused = device.link(&mut reservation, 0, misplaced).unwrap_err();
            assert_eq!(refused.error, Error::Misplaced { offset, granule: g });
            assert_eq!(refused.error.errno(), Errno::EIO);
            drop(refused);
            assert_eq!((rig.pool.copies(), rig.host.taken()), (copies, vec![]));
            let (head, whole) = (rig.buffer(100, g - 100), rig.buffer(0, g));
            let (own, straight) = (head.span(), whole.span());
            device.link(&mut reservation, 0, head).unwrap();
            assert_eq!(rig.pool.held(), bounced);
            let (used, given) = match bounced {
                0 => (own, own),
                _ => (span(RAM + 100, g - 100), span(RAM, g)),
            };
            assert_eq!(rig.host.taken(), [WrittenBack(given)]);
            device.link(&mut reservation, g - 100, whole).unwrap();
            assert_eq!(rig.host.taken(), [WrittenBack(straight)]);
            device.announce(&mut reservation).unwrap();
            device.destroy(reservation, drop).unwrap();
            let expected = match direction {
                Direction::ToDevice => vec![],
                _ => vec![Invalidated(used), Invalidated(straight)],
            };
            assert_eq!((rig.host.taken(), rig.pool.held()), (expected, 0));
        }
    }
    assert_eq!(rig.memory.violations(), []);
}

#[test]
fn a_list_without_pieces_has_no_room_either() {
    let (domain, _) = domain::<Counted>(Flush::Strict);
    let device = Device::new(domain, NoPool, DeviceConfig::bits(40)).unwrap();
    assert_eq!(device.list_room(&[]), Err(Error::EmptyList));
}

#[test]
fn many_mappings_at_one_address_and_many_at_others_are_found_again() {
    let (domain, _) = domain::<Counted>(Flush::Strict);
    let device = Device::new(domain, NoPool, DeviceConfig::bits(40)).unwrap();
    let (alive, mut ended) = (Arc::new(()), 0);
    let mut raw = Vec::new();
    for n in 0..3000u64 {
        // What is on the bus has its own address, as often as it is mapped.
        let (via, paddr) = match n % 3 {
            0 => (Via::Bus, 0x7000),
            1 => (Via::Bus, 0x7000 + n * 64),
            _ => (Via::Memory, 0x8000_0000),
        };
        let len = 1 + n / 100;
        let piece = Piece { span: span(paddr, len), via };
        let memory = Counted(vec![piece], Arc::clone(&alive));
        let mapping = device.map_single(memory, Direction::ToDevice).unwrap();
        raw.push(device.into_raw(mapping).unwrap());
    }
    for (addr, len) in raw.iter().rev().copied() {
        assert!(device.unmap_raw(addr, len + 30, Direction::ToDevice).is_err());
        assert!(device.unmap_raw(addr, len, Direction::FromDevice).is_err());
        device.sync_raw_for_cpu(addr, len - 1, 1, Direction::ToDevice).unwrap();
        drop(device.unmap_raw(addr, len, Direction::ToDevice).unwrap());
        ended += 1;
    }
    assert_eq!((ended, Arc::strong_count(&alive)), (3000, 1));
}

#[test]
fn a_mapping_that_outlives_its_device_fits_no_other_one() {
    let rig = Rig::<12>::new(Flush::Strict);
    let config = DeviceConfig::bits(40);
    let device = rig.translated(config);
    let mut mapping = device.map_single(rig.buffer(0, 100), Direction::ToDevice).unwrap();
    drop(device);
    // All live, so that whatever was freed by the first one is used again.
    let others: Vec<_> = (0..200).map(|_| rig.translated(config)).collect();
    for other in &others {
        let failed = other.unmap(mapping).unwrap_err();
        assert!(matches!(failed.error, Error::Foreign { .. }));
        mapping = failed.mapping.unwrap();
    }
}

#[test]
fn a_slot_that_hardware_may_use_is_nobody_elses() {
    let rig = Rig::<12>::new(Flush::Strict);
    let device = rig.translated(untrusted(DeviceConfig::bits(40)));
    for (announced, list) in [(false, false), (false, true), (true, false), (true, true)] {
        let held = rig.pool.held();
        if !announced {
            rig.iotlb.fail_next_sync_maps(1);
            rig.iotlb.fail_next_invalidations(1);
        }
        let (buffer, direction) = (rig.buffer(7, 100), Direction::Bidirectional);
        let error = if list {
            let mut segments = [Segment::default(); 1];
            match device.map_list(buffer, direction, &mut segments) {
                Ok(mapping) => {
                    rig.iotlb.fail_next_invalidations(1);
                    device.unmap_list(mapping).unwrap_err().error
                }
                Err(refused) => refused.error,
            }
        } else {
            match device.map_single(buffer, direction) {
                Ok(mapping) => {
                    rig.iotlb.fail_next_invalidations(1);
                    device.unmap(mapping).unwrap_err().error
                }
                Err(refused) => refused.error,
            }
        };
        assert!(matches!(error, Error::Quarantined { .. }), "{error}");
        assert_eq!((rig.pool.held(), rig.domain.waiting().1), (held + 1, 1));
        assert_eq!((rig.pool.quarantined(), rig.pool.lost()), (held + 1, 0));
        rig.domain.flush().unwrap();
    }
}
