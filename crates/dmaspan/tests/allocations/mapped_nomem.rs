//! What becomes of mapping a registered buffer, or of a buffer of a client's regions, when there is
//! no memory.

use std::sync::Arc;

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, NoPool, Registered};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1};
use dmaspan::platform::OneThread;
use dmaspan::regbuf::{Buffer, HostMemory, Keep, Regions, Segments, SegmentsBuilder, Source as _};
use dmaspan::{HostAddr, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use crate::failing::{self, Case, Ends, case};

type Dma = DmaDomain<ArmLpaeS1<12>, Arena, Iotlb<ArmLpaeS1Walker, Arena>, OneThread, Registered>;

fn domain() -> Arc<Dma> {
    let (domain, _) = crate::domain(1 << 20);
    Arc::new(DmaDomain::new(domain, DmaConfig::new(1), OneThread).unwrap())
}

/// Memory that nobody has, and which needs no keeping.
struct Nobody;

impl Keep<PhysAddr> for Nobody {
    fn end(&mut self, _segments: &Segments<PhysAddr>) {}
}

/// A buffer none of whose pieces begins or ends with a granule: as many segments for a device.
fn buffer() -> Arc<Buffer<PhysAddr>> {
    let mut builder = SegmentsBuilder::new();
    for n in 1..=20 {
        builder.push(Span::new(PhysAddr::new(n * 0x3000 + 0x10), 0x10 * n).unwrap()).unwrap();
    }
    let user = UserRange::from_len(UserAddr::new(0x1000), builder.len()).unwrap();
    let segments = builder.build().unwrap();
    // SAFETY: no device accesses the memory.
    #[expect(unsafe_code, reason = "a buffer is unsafe to make")]
    let buffer = unsafe { Buffer::new(segments, user, Prot::READ_WRITE, Box::new(Nobody)) };
    Arc::new(buffer.unwrap())
}

fn maps(n: i64) -> i64 {
    let (domain, buffer) = (domain(), buffer());
    let device = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(48)).unwrap();
    let another = Arc::clone(&buffer);
    failing::fail(n);
    let mapped = device.map_buffer(another, Prot::READ_WRITE);
    let left = failing::fail(0);
    let live = usize::from(mapped.is_ok());
    assert_eq!(domain.iovas().stats().live, live, "what was refused has no IOVAs");
    assert_eq!(Arc::strong_count(&buffer), 1 + live);
    drop(mapped);
    assert_eq!((domain.iovas().stats().live, Arc::strong_count(&buffer)), (0, 1));
    left
}

fn ends(n: i64) -> i64 {
    let (domain, buffer) = (domain(), buffer());
    let device = Device::new(Arc::clone(&domain), NoPool, DeviceConfig::bits(48)).unwrap();
    let mapped = device.map_buffer(Arc::clone(&buffer), Prot::READ_WRITE).unwrap();
    failing::fail(n);
    drop(mapped);
    let left = failing::fail(0);
    assert_eq!((domain.iovas().stats().live, Arc::strong_count(&buffer)), (0, 1));
    left
}

/// A mapping that is not there.
struct Mapped(Span<HostAddr>);

// SAFETY: nobody accesses it.
#[expect(unsafe_code, reason = "memory of a region is unsafe to implement")]
unsafe impl HostMemory for Mapped {
    fn span(&self) -> Span<HostAddr> {
        self.0
    }
}

fn registers_regions(n: i64) -> i64 {
    let span = |at| Span::new(HostAddr::new(at), 0x1000).unwrap();
    let memory = Arc::new(Mapped(span(0x70_0000)));
    let regions = Regions::<_, parking_lot::RawMutex>::new();
    failing::fail(n);
    let inserted = (0..20)
        .map(|n| regions.insert(UserAddr::new(n * 0x1000), Prot::READ_WRITE, Arc::clone(&memory)));
    let inserted = inserted.take_while(Result::is_ok).count();
    let user = UserRange::from_len(UserAddr::new(0x10), 0x1_3000).unwrap();
    let buffer = regions.buffer(user, Prot::READ);
    let left = failing::fail(0);
    assert_eq!(regions.count(), inserted);
    let kept = if buffer.is_ok() { 20 } else { 0 };
    assert_eq!(Arc::strong_count(&memory), 1 + inserted + kept);
    left
}

/// What is done. Those of its allocations that end a program need few bytes, whatever the buffer.
/// Tables and IOVAs are the domain's.
const CASES: [Case; 3] = [
    case("maps", Ends::Times(1), maps),
    case("ends", Ends::Never, ends),
    case("regions", Ends::Times(1), registers_regions),
];

#[test]
fn child() {
    failing::child(&CASES);
}

#[test]
fn what_fails_for_want_of_memory_leaves_nothing() {
    failing::sweep(module_path!(), &CASES);
}
