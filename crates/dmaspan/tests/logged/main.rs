//! With the feature `log` each kind of trouble is a message: what happened, to which range, and
//! what to do. A program of its own: the rest is tested without the feature.
#![expect(unsafe_code, reason = "the tests promise what memory is")]

#[path = "../../../dmaspan-drivers/tests/shared/capture.rs"]
mod capture;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::container::{Attach, Interrupts};
use dmaspan::dma::{
    Device, DeviceConfig, Direct, DmaConfig, DmaDomain, Flush, NoPool, Piece, RawMemory,
    ReserveRequest, Segment,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::iova::{Align, Request};
use dmaspan::iommu::{
    Attachment, Domain, FaultAccess, FaultHook, FaultReason, FaultReport, FaultState,
    HardwareError, Invalidation, IommuOps, Prepared, ReservedRegions, Target,
};
use dmaspan::platform::OneThread;
use dmaspan::swiotlb::{Original, Pool, PoolConfig, SlotRequest};
use dmaspan::{Account, Container, Direction, Iova, PhysAddr, Prot, Span, UserAddr, leaked};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};
use dmaspan_sim::pool_memory::SimPoolMemory;
use dmaspan_sim::port::SimPort;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use log::Level::{Info, Warn};

use capture::{assert_said, said};

/// A simulated IOMMU that can stop to answer.
#[derive(Clone)]
struct Iommu {
    inner: Iotlb<ArmLpaeS1Walker, Arena>,
    is_stuck: Arc<AtomicBool>,
}

const STUCK: HardwareError = HardwareError { what: "the IOMMU is stuck", status: 9 };

impl Iommu {
    fn stop(&self) {
        self.is_stuck.store(true, Ordering::Relaxed);
    }

    fn go_on(&self) {
        self.is_stuck.store(false, Ordering::Relaxed);
    }

    fn check(&self) -> Result<(), HardwareError> {
        if self.is_stuck.load(Ordering::Relaxed) { Err(STUCK) } else { Ok(()) }
    }
}

// SAFETY: what it confirms, the simulated IOMMU has confirmed.
unsafe impl IommuOps for Iommu {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.check().and_then(|()| self.inner.invalidate(what))
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.check().and_then(|()| self.inner.detach())
    }

    fn max_ranges(&self) -> usize {
        self.inner.max_ranges()
    }
}

type Domained = DmaDomain<ArmLpaeS1<12>, Arena, Iommu, OneThread, RawMemory>;

fn span(at: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(at), len).unwrap()
}

fn memory(at: u64, len: u64) -> RawMemory {
    // SAFETY: no device uses it.
    unsafe { RawMemory::new(Piece::memory(span(at, len))) }
}

/// A domain whose hooks are made of the simulated IOMMU.
fn domain_of<O: IommuOps>(
    hooks: impl FnOnce(Iotlb<ArmLpaeS1Walker, Arena>) -> O,
) -> Domain<ArmLpaeS1<12>, Arena, O> {
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 22);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, tables.clone()).unwrap();
    let registers = table.format().registers(table.root());
    let iommu = Iotlb::new(ArmLpaeS1Walker::new(registers.into()).unwrap(), tables);
    Domain::new(table, hooks(iommu)).unwrap()
}

fn domain() -> (Domain<ArmLpaeS1<12>, Arena, Iommu>, Iommu) {
    let domain = domain_of(|inner| Iommu { inner, is_stuck: Arc::default() });
    let iommu = domain.ops().clone();
    (domain, iommu)
}

fn device(flush: Flush) -> (Device<Domained>, Iommu) {
    let (domain, iommu) = domain();
    let config = DmaConfig { flush, ..DmaConfig::new(1) };
    let domain = Arc::new(DmaDomain::new(domain, config, OneThread).unwrap());
    (Device::new(domain, NoPool, DeviceConfig::bits(32)).unwrap(), iommu)
}

#[test]
fn handles_that_are_dropped_are_named_with_their_range_and_counted() {
    let (device, _) = device(Flush::Strict);
    let mapping = device.map_single(memory(0x8000_0000, 0x1000), Direction::ToDevice).unwrap();
    let at = mapping.addr().to_string();
    let before = leaked();
    let ((), messages) = said(|| drop(mapping));
    assert_said(&messages, Warn, &["0x1000 bytes", &at, "Device::unmap"]);
    assert_eq!(messages.len(), 1);
    assert!(leaked().memory >= before.memory + 0x1000);
    assert!(leaked().iovas >= before.iovas + 0x1000);

    let mut segments = [Segment::default(); 1];
    let list = device.map_list(memory(0x9000_0000, 0x3000), Direction::ToDevice, &mut segments);
    let list = list.unwrap();
    let start = list.iovas().unwrap().start().to_string();
    let ((), messages) = said(|| drop(list));
    assert_said(&messages, Warn, &["0x3000 bytes", &start, "Device::unmap_list"]);

    let request =
        ReserveRequest { len: 0x2000, offset: 0, pieces: 2, direction: Direction::ToDevice };
    let mut reservation = device.reserve(request).unwrap();
    device.link(&mut reservation, 0, memory(0xa000_0000, 0x1000)).unwrap();
    let at = reservation.addr().to_string();
    let ((), messages) = said(|| drop(reservation));
    assert_said(&messages, Warn, &["0x2000 bytes", &at, "1 pieces", "Device::destroy"]);

    let limit = Iova::new(u64::MAX);
    let request = Request { bytes: 0x1000, align: Align::Natural, limit };
    let iovas = device.translation().iovas().alloc(request).unwrap();
    let range = iovas.range().to_string();
    let before = leaked();
    let ((), messages) = said(|| drop(iovas));
    assert_said(&messages, Warn, &["IOVAs", &range, "give them back"]);
    assert!(leaked().iovas >= before.iovas + 0x1000);

    let raw = device.map_single(memory(0xb000_0000, 0x1000), Direction::ToDevice).unwrap();
    let (addr, _) = device.into_raw(raw).unwrap();
    let ((), messages) = said(|| drop(device));
    assert_said(&messages, Warn, &["a mapping", &addr.to_string(), "was dropped"]);
}

#[test]
fn nothing_is_said_where_everything_is_given_back() {
    let (device, _) = device(Flush::Lazy);
    let ((), messages) = said(|| {
        let mapping = device.map_single(memory(0x8000_0000, 0x1000), Direction::ToDevice);
        let _unmapped = device.unmap(mapping.unwrap()).unwrap();
        drop(device);
    });
    assert_eq!(messages, []);
}

#[test]
fn what_hardware_does_not_confirm_is_said_in_and_out_of_quarantine() {
    let (device, iommu) = device(Flush::Strict);
    let mapping = device.map_single(memory(0x8000_0000, 0x1000), Direction::ToDevice).unwrap();
    let start = mapping.addr().to_string();
    iommu.stop();
    let (failed, messages) = said(|| device.unmap(mapping).is_err());
    assert!(failed);
    assert_said(
        &messages,
        Warn,
        &["hardware did not confirm", &start, "the IOMMU is stuck (status 0x9)"],
    );
    assert_said(&messages, Warn, &[&start, "went into quarantine", "until a flush succeeds"]);
    iommu.go_on();
    let (flushed, messages) = said(|| device.translation().flush());
    flushed.unwrap();
    assert_said(&messages, Info, &[&start, "left quarantine"]);
}

#[test]
fn a_domain_that_goes_while_hardware_does_not_answer_says_what_leaks() {
    let (device, iommu) = device(Flush::Lazy);
    let mapping = device.map_single(memory(0x8000_0000, 0x2000), Direction::ToDevice).unwrap();
    let start = mapping.addr().to_string();
    let _unmapped = device.unmap(mapping).unwrap();
    iommu.stop();
    let before = leaked();
    let ((), messages) = said(|| drop(device));
    assert_said(&messages, Warn, &[&start, "0x2000 bytes", "leak", "reset the device"]);
    assert_said(&messages, Warn, &["did not let go of a domain's tables"]);
    assert!(leaked().memory >= before.memory + 0x2000);
}

#[test]
fn slots_and_pools_that_are_dropped_are_named_and_counted() {
    let ram = Arc::new(SimMemory::new(PhysAddr::new(0x10_0000), 4 << 20, 12).unwrap());
    let spans = vec![span(0x10_0000, 1 << 20)];
    let sim = SimPoolMemory::new(ram, spans).unwrap();
    let pool = Pool::new(sim, PoolConfig::new(1), OneThread).unwrap();
    // SAFETY: nothing is copied.
    let original = || unsafe { Original::new(span(0x30_0000, 100)) };
    let slot = pool.take(original(), &SlotRequest::default()).unwrap();
    let at = format!("{:#x}", slot.span().paddr().get());
    let before = leaked();
    let ((), messages) = said(|| drop(slot));
    assert_said(&messages, Warn, &["0x64 bytes", &at, "release them"]);
    assert!(leaked().slots >= before.slots + 100);

    let slot = pool.take(original(), &SlotRequest::default()).unwrap();
    let (kept, messages) = said(|| pool.quarantine(slot));
    kept.unwrap();
    assert_said(&messages, Warn, &["0x800 bytes of slots", "in quarantine for ever"]);

    let ((), messages) = said(|| drop(pool));
    assert_said(
        &messages,
        Warn,
        &["a pool of 0x100000 bytes", "0x1000 bytes of its slots", "leaks"],
    );
    assert!(leaked().memory >= before.memory + (1 << 20));
}

#[test]
fn a_container_says_attaches_quarantine_and_pins_that_stay_for_ever() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 64 << 12, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let spans = memory.allocate_scattered(4 << 12, 1).unwrap();
    let user = space.map(UserAddr::new(1 << 32), &spans).unwrap();
    let container: Container<_, parking_lot::RawMutex> =
        Container::new(SimPinner::new(memory), Account::new(u64::MAX));
    let (domain, iommu) = domain();
    let how = Attach::new(Interrupts::Isolated);
    let (id, messages) = said(|| container.attach(domain, how));
    id.unwrap();
    assert_said(&messages, Info, &["was attached to the container"]);

    container.map(&space, user, Iova::new(0x10_0000), Prot::READ_WRITE).unwrap();
    iommu.stop();
    let (failed, messages) = said(|| container.unmap_all().is_err());
    assert!(failed);
    assert_said(&messages, Warn, &["0x100000..=0x103fff", file!(), "in quarantine", "pinned"]);
    iommu.go_on();
    let (unmapped, messages) = said(|| container.unmap_all());
    unmapped.unwrap();
    assert_said(&messages, Info, &["0x100000..=0x103fff", "left quarantine"]);

    container.map(&space, user, Iova::new(0x20_0000), Prot::READ_WRITE).unwrap();
    iommu.stop();
    let before = leaked();
    let ((), messages) = said(|| drop(container));
    let words = [&user.to_string(), "0x200000..=0x203fff", "stays pinned and charged for ever"];
    assert_said(&messages, Warn, &words);
    assert!(leaked().pinned >= before.pinned + 0x4000);
}

#[test]
fn a_container_says_that_a_domain_was_detached() {
    let memory = SimMemory::new(PhysAddr::new(1 << 40), 1 << 12, 12).unwrap();
    let container: Container<_, parking_lot::RawMutex> =
        Container::new(SimPinner::new(memory.into()), Account::new(0));
    let id = container.attach(domain().0, Attach::new(Interrupts::Isolated)).unwrap();
    let (detached, messages) = said(|| container.detach(id));
    detached.unwrap();
    assert_said(&messages, Info, &["was detached from the container"]);
}

#[test]
fn streams_that_are_switched_and_faults_that_nobody_handles_are_said() {
    let port = SimPort::new(7, ReservedRegions::new());
    let stream = Attachment::new(port).unwrap();
    let (attached, messages) =
        said(|| stream.attach(Target::Paging(Prepared::new(Arc::new(domain_of(|iommu| iommu))))));
    attached.unwrap();
    assert_said(&messages, Info, &["stream was switched", "Paging"]);
    let (detached, messages) = said(|| stream.detach());
    detached.unwrap();
    assert_said(&messages, Info, &["stream was switched", "Blocked"]);

    let hook = FaultHook::<parking_lot::RawMutex>::new();
    let report = FaultReport {
        stream: 7,
        iova: Iova::new(0x1000),
        access: FaultAccess::Write,
        reason: FaultReason::Permission,
        state: FaultState::Ended,
    };
    let (_, messages) = said(|| hook.report(&report));
    let words = ["stream 0x7", "a write of 0x1000", "does not permit", "nobody handles"];
    assert_said(&messages, Warn, &words);
}

#[test]
fn memory_of_a_direct_device_that_is_dropped_is_named() {
    let direct = Arc::new(Direct::<RawMemory, _>::new(span(0, 1 << 30), OneThread));
    let device = Device::new(direct, NoPool, DeviceConfig::bits(32)).unwrap();
    let mapping = device.map_single(memory(0x5000, 0x10), Direction::FromDevice).unwrap();
    let ((), messages) = said(|| drop(mapping));
    assert_said(&messages, Warn, &["0x10 bytes at 0x5000"]);
}
