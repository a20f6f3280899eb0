//! The DMA API without type parameters, and errors that `?` hands on.

use std::error::Error as StdError;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dmaspan::dma::{
    AnyMemory, AnyPool, Attrs, Bounce, BouncePool, CoherentPool, DestroyFailed, Device,
    DeviceConfig, Direct, DmaConfig, DmaDomain, DmaMemory, Error, Flush, FreeFailed, ListMapping,
    Mapping, NoPool, Piece, RawMemory, Refused, Reservation, ReserveRequest, ScopeFailed, Segment,
    UnmapFailed, UnmapListFailed, Unmapped,
};
use dmaspan::io_pgtable::PageTable;
use dmaspan::iommu::Domain;
use dmaspan::swiotlb::{Original, Pool, PoolConfig, SlotRequest, To};
use dmaspan::{Direction, DmaAddr, PhysAddr};
use dmaspan_sim::bounce::SimPool;
use dmaspan_sim::coherent::SimCoherent;
use dmaspan_sim::device::SimDevice;
use dmaspan_sim::fault::{Faults, Faulty, Fired};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::pool_memory::SimPoolMemory;

use crate::common::{arena, format, span, walker};
use crate::rig::{BYTES, Buffer, Dma, Host, RAM, Translated, non_coherent, pattern, untrusted};

/// A driver as one is written: no type has a parameter.
struct Driver {
    device: Arc<Device>,
    rx: Vec<Mapping>,
    lists: Vec<ListMapping>,
    reservation: Option<Reservation>,
}

impl Driver {
    fn new(device: Device) -> Self {
        let device = Arc::new(device);
        Self { device, rx: Vec::new(), lists: Vec::new(), reservation: None }
    }

    fn post(&mut self, buffer: Buffer) -> Result<DmaAddr, Error> {
        let mapping = self.device.map_single(AnyMemory::new(buffer), Direction::FromDevice)?;
        self.rx.push(mapping);
        Ok(self.rx[self.rx.len() - 1].addr())
    }

    fn receive(&mut self) -> Result<Option<Buffer>, Error> {
        let Some(mapping) = self.rx.pop() else { return Ok(None) };
        match self.device.unmap(mapping)? {
            Unmapped::Released(memory) => Ok(memory.downcast().ok()),
            Unmapped::Queued => Ok(None),
        }
    }
}

/// Takes any.
fn addr_of(device: &Device, memory: RawMemory) -> Result<(DmaAddr, u64), Error> {
    let mapping = device.map_single(memory.into(), Direction::ToDevice)?;
    Ok(device.into_raw(mapping)?)
}

type Tlb = crate::rig::Tlb;

/// Memory, an IOMMU, and what may fail of it.
struct Ground {
    memory: Arc<SimMemory>,
    faults: Faults,
    pool: SimPool,
    tlb: Tlb,
    domain: Arc<Translated<12, AnyMemory>>,
    host: Host,
}

impl Ground {
    fn new(flush: Flush) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, 12).unwrap());
        let pool = SimPool::new(Arc::clone(&memory), span(RAM, 16 << 12)).unwrap();
        let (faults, tables, host) = (Faults::none(), arena(), Host::default());
        let table =
            PageTable::new(format::<12>(48, 48), Faulty::new(tables.clone(), &faults)).unwrap();
        let tlb = Iotlb::new(walker(table.format(), table.root()), tables);
        let domain = Domain::new(table, Faulty::new(tlb.clone(), &faults)).unwrap();
        let config = DmaConfig { flush, ..DmaConfig::new(1) };
        let domain = Arc::new(DmaDomain::new(domain, config, host.clone()).unwrap());
        Self { memory, faults, pool, tlb, domain, host }
    }

    fn translated(&self, config: DeviceConfig) -> Device {
        Device::erased(Arc::clone(&self.domain), Arc::new(self.pool.clone()), config).unwrap()
    }

    fn direct(&self, config: DeviceConfig) -> Device {
        let direct = Arc::new(Direct::new(span(RAM, BYTES), self.host.clone()));
        Device::erased(direct, Arc::new(self.pool.clone()), config).unwrap()
    }

    fn behind(&self) -> impl Dma + use<> {
        SimDevice::new(self.tlb.clone(), Arc::clone(&self.memory))
    }

    fn buffer(&self, offset: u64, len: u64) -> Buffer {
        Buffer::new(&self.memory, offset, len)
    }
}

/// A device writes what a driver posted, and the driver has it.
fn receives(ground: &Ground, device: Device, dma: &impl Dma, bounced: usize) {
    let mut driver = Driver::new(device);
    let addrs = [0x123, 0].map(|offset| driver.post(ground.buffer(offset, 0x1100)).unwrap());
    assert_eq!(driver.rx.iter().filter(|mapping| mapping.is_bounced()).count(), bounced);
    for (seed, addr) in (2..).zip(addrs) {
        dma.write(addr, &pattern(0x1100, seed)).unwrap();
    }
    for seed in [3, 2] {
        let buffer = driver.receive().unwrap().unwrap();
        assert_eq!(buffer.bytes(), pattern(0x1100, seed));
        assert!(buffer.is_whole());
    }
    assert!(driver.receive().unwrap().is_none());
    assert_eq!(ground.memory.violations(), []);
}

#[test]
fn a_driver_without_type_parameters_receives_whatever_is_behind_its_device() {
    let ground = Ground::new(Flush::Strict);
    let bits = DeviceConfig::bits(40);
    receives(&ground, ground.translated(bits), &ground.behind(), 0);
    receives(&ground, ground.translated(untrusted(bits)), &ground.behind(), 2);
    receives(&ground, ground.translated(non_coherent(bits)), &ground.behind(), 0);
    assert_eq!(ground.host.taken().len(), 4, "two writes back and two invalidations");
    receives(&ground, ground.direct(bits), &ground.memory, 0);
    let always = DeviceConfig { bounce: Bounce::Always, ..bits };
    receives(&ground, ground.direct(always), &ground.memory, 2);
    assert_eq!(ground.pool.held(), 0);
    let none = Device::erased(Arc::clone(&ground.domain), NoPool, bits).unwrap();
    receives(&ground, none, &ground.behind(), 0);
    let refused = Device::erased(Arc::clone(&ground.domain), NoPool, always).unwrap_err();
    assert_eq!(refused, Error::NoPool);
}

#[test]
fn lists_reservations_scopes_and_raw_mappings_work_without_type_parameters() -> Result<(), Error> {
    let ground = Ground::new(Flush::Lazy);
    let mut driver = Driver::new(ground.translated(DeviceConfig::bits(40)));
    let device = Arc::clone(&driver.device);
    let dma = ground.behind();

    let mut segments = [Segment::default()];
    let shared = Arc::new(ground.buffer(0, 0x2000));
    let list = device.map_list(Arc::clone(&shared).into(), Direction::ToDevice, &mut segments)?;
    assert_eq!(dma.read(segments[0].addr, 0x2000).unwrap(), shared.bytes());
    driver.lists.push(list);
    for list in driver.lists.drain(..) {
        assert!(matches!(device.unmap_list(list)?, Unmapped::Queued));
    }
    device.flush()?;
    assert_eq!(Arc::strong_count(&shared), 1, "the flush let go of it");

    let direction = Direction::ToDevice;
    let request = ReserveRequest { len: 0x2000, offset: 0, pieces: 2, direction };
    let piece = Arc::new(ground.buffer(0, 0x1000));
    let mut reservation = device.reserve(request)?;
    for (n, offset) in [0, 0x1000].into_iter().enumerate() {
        device.link(&mut reservation, offset, Arc::clone(&piece).into())?;
        assert_eq!(reservation.linked(), n + 1);
    }
    device.announce(&mut reservation)?;
    assert!(dma.read(reservation.addr(), 0x2000).is_some());
    driver.reservation = Some(reservation);
    let mut released = 0;
    if let Some(reservation) = &mut driver.reservation {
        device.unlink(reservation, 0, 0x1000, |memory| released += memory.pieces().len())?;
    }
    assert_eq!(released, 1);
    if let Some(reservation) = driver.reservation.take() {
        device.destroy(reservation, |_| panic!("it waits for the flush"))?;
    }
    assert_eq!(Arc::strong_count(&piece), 2, "the queue has the other one");
    device.flush()?;
    assert_eq!(Arc::strong_count(&piece), 1);

    let attrs = Attrs::default();
    let ran = device.with_mapped(Arc::clone(&shared).into(), direction, attrs, |mapping| {
        dma.read(mapping.addr(), 4).unwrap()
    });
    let (memory, read) = ran?;
    assert_eq!(read, shared.bytes()[..4]);
    assert!(Arc::ptr_eq(&memory.downcast_arc::<Buffer>().unwrap(), &shared));

    let piece = Piece::memory(shared.span());
    // SAFETY: the buffer is kept, and simulated.
    let (addr, len) = addr_of(&device, unsafe { RawMemory::new(piece) })?;
    device.sync_raw_for_device(addr, 0, len, Direction::ToDevice)?;
    let refused = device.unmap_raw(addr, len - 1, Direction::ToDevice).unwrap_err();
    assert_eq!(refused, Error::OtherLength { addr, len: len - 1, mapped: len });
    let _queued = device.unmap_raw(addr, len, Direction::ToDevice)?;
    let again = device.unmap_raw(addr, len, Direction::ToDevice).unwrap_err();
    assert_eq!(again, Error::NotMapped { addr });
    device.flush()?;

    let source = SimCoherent::new(Arc::clone(&ground.memory), &Faults::none());
    let sharing = ground.translated(DeviceConfig::bits(40)).with_coherent(Arc::new(source));
    let mut ring = sharing.alloc(0x100, 0x100)?;
    ring.write(0, 3_u32)?;
    let mut pool = CoherentPool::new(&sharing, 32, 32, None)?;
    let block = pool.alloc(&sharing)?;
    assert_eq!(dma.read(ring.addr(), 4).unwrap(), 3_u32.to_ne_bytes());
    pool.free(block)?;
    pool.destroy(&sharing)?;
    sharing.free(ring)?;
    assert_eq!((ground.pool.held(), ground.memory.violations()), (0, vec![]));
    Ok(())
}

#[test]
fn a_device_that_bounces_all_shares_memory_of_its_pool_without_type_parameters() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, 12).unwrap());
    let spans = vec![span(RAM, 0x1_0000)];
    let slots = SimPoolMemory::with_pointers(Arc::clone(&memory), spans, &Faults::none()).unwrap();
    let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), Host::default()).unwrap());
    let direct = Arc::new(Direct::new(span(RAM, BYTES), Host::default()));
    let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(32) };
    let device = Device::erased(direct, Arc::clone(&pool), config).unwrap();
    let mut ring = device.alloc(0x1000, 0x1000).unwrap();
    assert!(BouncePool::owns(&pool, ring.pieces()[0].span));
    ring.write(8, 7_u64).unwrap();
    assert_eq!(Dma::read(&memory, ring.addr(), 16).unwrap()[8..], 7_u64.to_ne_bytes());
    device.free(ring).unwrap();
    assert_eq!(pool.stats().used, 0);
    let none = AnyPool::from(NoPool);
    assert!(none.reach().is_none());
}

#[test]
fn slots_of_other_pools_and_bytes_outside_of_a_slot_are_copied_by_nobody() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, 12).unwrap());
    let [one, other] = [RAM, RAM + 0x1_0000].map(|at| {
        let (memory, spans) = (Arc::clone(&memory), vec![span(at, 0x1_0000)]);
        let slots = SimPoolMemory::with_pointers(memory, spans, &Faults::none()).unwrap();
        Arc::new(Pool::new(slots, PoolConfig::new(1), Host::default()).unwrap())
    });
    let sim = SimPool::new(Arc::clone(&memory), span(RAM + 0x4_0000, 16 << 12)).unwrap();
    // SAFETY: nobody has the memory, and nothing is copied.
    let original = || unsafe { Original::new(span(RAM + 0x8_0000, 0x100)) };
    let request = SlotRequest::default();
    let slot = BouncePool::take(&one, original(), &request).unwrap();
    for (offset, len) in [(0, 0), (0, 0x101), (0x100, 1), (1, u64::MAX), (u64::MAX, 1)] {
        BouncePool::copy(&one, &slot, offset, len, To::Original);
    }
    BouncePool::copy(&other, &slot, 0, 1, To::Original);
    BouncePool::release(&one, slot);
    let (any, third) = (AnyPool::from(Arc::clone(&one)), AnyPool::from(Arc::new(sim)));
    let slot = any.take(original(), &request).unwrap();
    assert_eq!((any.span(&slot).len(), third.span(&slot).len()), (0x100, 1));
    any.release(slot);
    assert_eq!((one.stats().used, memory.violations()), (0, vec![]));
}

/// Memory that counts how much of it there is, and is neither `Debug` nor `Sync`.
struct Counted(Piece, Arc<AtomicUsize>, std::cell::Cell<()>);

impl Counted {
    fn new(at: u64, alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::Relaxed);
        Self(Piece::memory(span(at, 0x1000)), Arc::clone(alive), std::cell::Cell::new(()))
    }
}

// SAFETY: no device looks there.
unsafe impl DmaMemory for Counted {
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.0)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::Relaxed);
        self.2.set(());
    }
}

fn plain<R, E: Into<Error>>(refused: Result<R, E>) -> Error {
    let run = || -> Result<(), Error> {
        refused.map_err(Into::into)?;
        Ok(())
    };
    run().unwrap_err()
}

#[test]
fn a_plain_error_drops_memory_that_no_device_reaches_and_leaks_what_is_mapped() {
    let alive = Arc::new(AtomicUsize::new(0));
    let left = || alive.load(Ordering::Relaxed);
    let direct = Arc::new(Direct::<Counted, Host>::new(span(RAM, BYTES), Host::default()));
    let [one, other] =
        [(); 2].map(|()| Device::new(Arc::clone(&direct), NoPool, DeviceConfig::bits(32)).unwrap());
    let map = |at| one.map_single(Counted::new(at, &alive), Direction::ToDevice);

    // Nothing was mapped: it is dropped.
    let refused = map(1 << 33);
    assert_eq!(left(), 1);
    assert!(matches!(plain(refused), Error::Unreachable { .. }));
    let mut room = [];
    let refused = one.map_list(Counted::new(RAM, &alive), Direction::ToDevice, &mut room);
    assert!(matches!(plain(refused), Error::SegmentRoom { .. }));
    let beyond = Counted::new(1 << 33, &alive);
    let refused = one.with_mapped(beyond, Direction::ToDevice, Attrs::default(), |_| 5);
    assert!(matches!(plain(refused), Error::Unreachable { .. }));
    assert_eq!(left(), 0);

    // Still mapped: a device may use it.
    assert!(matches!(plain(other.unmap(map(RAM).unwrap())), Error::Foreign { .. }));
    let list =
        one.map_list(Counted::new(RAM, &alive), Direction::ToDevice, &mut [Segment::default()]);
    assert!(matches!(plain(other.unmap_list(list.unwrap())), Error::Foreign { .. }));
    assert_eq!(left(), 2, "memory was freed under a device");
    // And by a box they are there for who looks.
    let boxed: Box<dyn StdError> = other.unmap(map(RAM).unwrap()).err().unwrap().into();
    let failed = boxed.downcast::<UnmapFailed<Direct<Counted, Host>>>().unwrap();
    drop(one.unmap(failed.mapping.unwrap()).unwrap());
    assert_eq!(left(), 2);
}

fn goes_to_threads<T: StdError + Send + Sync + 'static>() {}
fn is_shared<T: Send + Sync + 'static>() {}

/// As an `anyhow::Error` asks.
#[test]
fn errors_of_a_plain_device_go_to_other_threads_with_what_they_hold() {
    goes_to_threads::<Refused<AnyMemory>>();
    goes_to_threads::<UnmapFailed>();
    goes_to_threads::<UnmapListFailed>();
    goes_to_threads::<DestroyFailed>();
    goes_to_threads::<ScopeFailed<AnyMemory, u32>>();
    goes_to_threads::<FreeFailed>();
    goes_to_threads::<dmaspan::dma::ForeignBlock>();
    is_shared::<Device>();
    is_shared::<Mapping>();
    is_shared::<ListMapping>();
    is_shared::<Reservation>();
    is_shared::<CoherentPool>();

    let ground = Ground::new(Flush::Strict);
    let send = |memory: AnyMemory| -> Result<(), Box<dyn StdError + Send + Sync>> {
        let always = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(32) };
        let mapping = ground.direct(always).map_single(memory, Direction::ToDevice)?;
        panic!("{mapping:?} of more than the pool has");
    };
    let boxed = send(AnyMemory::new(ground.buffer(0, 0x2_0000))).unwrap_err();
    let refused = boxed.downcast::<Refused<AnyMemory>>().unwrap();
    assert!(matches!(refused.error, Error::NoSlot { .. }), "{refused}");
    assert!(refused.memory.unwrap().downcast::<Buffer>().is_ok());
}

#[test]
fn whichever_step_fails_nothing_is_left_of_it_when_hardware_answers() {
    for config in [DeviceConfig::bits(40), untrusted(DeviceConfig::bits(40))] {
        let ground = Ground::new(Flush::Strict);
        let device = ground.translated(config);
        // Tables are there then.
        let first = device.map_single(AnyMemory::new(ground.buffer(0, 8)), Direction::ToDevice);
        drop(device.unmap(first.unwrap()).unwrap());
        let mut outcomes = [0; 3];
        for n in 1.. {
            let buffer = AnyMemory::new(ground.buffer(0x200, 0x2000));
            ground.faults.arm(n);
            let mapped = device.map_single(buffer, Direction::Bidirectional);
            let ended = mapped.map_err(Error::from).and_then(|mapping| Ok(device.unmap(mapping)?));
            if ground.faults.disarm() == Fired::No {
                break;
            }
            let outcome = match ended {
                Ok(_) => 0,
                Err(Error::Quarantined { .. }) => 1,
                Err(_) => 2,
            };
            outcomes[outcome] += 1;
            device.flush().unwrap();
            assert_eq!(ground.memory.pinned_frames(), 16, "after the failure of step {n}");
        }
        assert!(outcomes[1] > 0 && outcomes[2] > 0, "{outcomes:?}");
        assert_eq!(ground.memory.violations(), []);
    }
}

#[test]
fn memory_of_any_kind_comes_out_as_what_it_was() {
    let ground = Ground::new(Flush::Strict);
    let piece = Piece::memory(span(RAM, 8));
    // SAFETY: no device looks there.
    let raw = || unsafe { RawMemory::new(piece) };
    assert_eq!(AnyMemory::from(raw()).into_raw().unwrap(), raw());
    assert_eq!(AnyMemory::from(raw()).downcast::<RawMemory>().unwrap(), raw());
    assert_eq!(AnyMemory::new(raw()).downcast::<RawMemory>().unwrap(), raw());
    let other = AnyMemory::from(raw()).downcast::<Buffer>().unwrap_err();
    assert_eq!(other.pieces(), [piece]);
    assert_eq!(other.downcast::<RawMemory>().unwrap(), raw());
    let buffer = ground.buffer(0, 8);
    let at = buffer.span();
    let memory = AnyMemory::from(Box::new(buffer)).downcast::<RawMemory>().unwrap_err();
    let memory = memory.downcast_arc::<Buffer>().unwrap_err();
    assert_eq!(memory.downcast::<Buffer>().unwrap().span(), at);
    let shared = Arc::new(ground.buffer(0, 8));
    let memory = AnyMemory::from(Arc::clone(&shared)).downcast::<Buffer>().unwrap_err();
    assert!(memory.into_raw().unwrap_err().downcast_arc::<Buffer>().is_ok());
}
