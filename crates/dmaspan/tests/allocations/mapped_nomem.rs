//! Mapping a registered buffer, or a buffer of a client's regions, changes nothing when there is no
//! memory.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, NoPool, Registered};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1};
use dmaspan::platform::OneThread;
use dmaspan::regbuf::{
    Buffer, HostMemory, HostSlice, Keep, Outside, Regions, Segments, SegmentsBuilder,
};
use dmaspan::{Iova, PhysAddr, Prot, Span, UserAddr, UserRange};
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
struct Mapped;

// SAFETY: nobody accesses it.
#[expect(unsafe_code, reason = "memory of a region is unsafe to implement")]
unsafe impl HostMemory for Mapped {
    fn slice(&self) -> HostSlice<'_> {
        HostSlice::new(NonNull::new(ptr::without_provenance_mut(0x70_0000)).unwrap(), 0x1000)
    }

    fn read(&self, offset: u64, _bytes: &mut [u8]) -> Result<(), Outside> {
        Err(Outside { offset, len: 0, buffer: 0 })
    }

    fn write(&self, offset: u64, _bytes: &[u8]) -> Result<(), Outside> {
        Err(Outside { offset, len: 0, buffer: 0 })
    }
}

type Client = Regions<Iova, parking_lot::RawMutex>;

const REGIONS: usize = 3;

/// As many regions, until one is refused.
fn insert_all(regions: &Client, memory: &Arc<Mapped>) -> usize {
    let places = (0..).step_by(0x1000).map(Iova::new).take(REGIONS);
    let inserted =
        places.map(|start| regions.insert(start, Prot::READ_WRITE, Arc::<Mapped>::clone(memory)));
    inserted.take_while(Result::is_ok).count()
}

fn inserts_regions(n: i64) -> i64 {
    let (memory, regions) = (Arc::new(Mapped), Client::new());
    failing::fail(n);
    let inserted = insert_all(&regions, &memory);
    let left = failing::fail(0);
    assert_eq!((regions.count(), Arc::strong_count(&memory)), (inserted, 1 + inserted));
    left
}

fn registers_regions(n: i64) -> i64 {
    let (memory, regions) = (Arc::new(Mapped), Client::new());
    insert_all(&regions, &memory);
    let user = UserRange::from_len(UserAddr::new(0x10), 0x2000).unwrap();
    failing::fail(n);
    let buffer = regions.buffer(user, Prot::READ);
    let left = failing::fail(0);
    let mut unmapping = regions.unmap_all();
    assert_eq!(unmapping.is_done(), buffer.is_err());
    drop(buffer);
    assert!(unmapping.is_done());
    left
}

fn holds_regions(n: i64) -> i64 {
    let (memory, regions) = (Arc::new(Mapped), Client::new());
    insert_all(&regions, &memory);
    failing::fail(n);
    let held = regions.hold(Iova::new(0x10), 0x2000, Prot::READ);
    let left = failing::fail(0);
    let mut unmapping = regions.unmap_all();
    assert_eq!(unmapping.is_done(), held.is_err());
    drop(held);
    assert_eq!((unmapping.is_done(), Arc::strong_count(&memory)), (true, 1));
    left
}

fn unmaps_regions(n: i64) -> i64 {
    let (memory, regions) = (Arc::new(Mapped), Client::new());
    insert_all(&regions, &memory);
    let held = regions.hold(Iova::new(0x10), 0x2000, Prot::READ).unwrap();
    failing::fail(n);
    let mut unmapping = regions.unmap(Iova::new(0), 0x1000 * 3).unwrap();
    drop(held);
    let is_done = unmapping.is_done();
    let left = failing::fail(0);
    assert_eq!((is_done, unmapping.bytes(), Arc::strong_count(&memory)), (true, 0x3000, 1));
    left
}

/// What is done. Those of its allocations that end a program need few bytes, whatever the buffer.
/// Tables and IOVAs are the domain's.
const CASES: [Case; 6] = [
    case("maps", Ends::Times(1), maps),
    case("ends", Ends::Never, ends),
    // Two for each region, which holders and the unmap share.
    case("inserts regions", Ends::Times(6), inserts_regions),
    case("registers regions", Ends::Times(1), registers_regions),
    case("holds regions", Ends::Never, holds_regions),
    case("unmaps regions", Ends::Never, unmaps_regions),
];

#[test]
fn child() {
    failing::child(&CASES);
}

#[test]
fn what_fails_for_want_of_memory_leaves_nothing() {
    failing::sweep(module_path!(), &CASES);
}
