//! Tracking writes costs memory in proportion to the writes, and not to a client's claims.

use std::sync::Arc;

use dmaspan::account::Counting;
use dmaspan::container::type1::{Client, Type1, uapi};
use dmaspan::container::{DirtyRead, MapRequest, UnmapNotifier};
use dmaspan::{Account, Container, Errno, Iova, IovaRange, PhysAddr, Prot, UserAddr, UserRange};
use dmaspan_sim::allocator::{Allocated, allocated};
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};

const PAGE: u64 = 4096;
const USER: u64 = 1 << 44;
const HUGE: u64 = 1 << 40;
/// Bits of 2^15 pages.
const CHUNK: u64 = 4096;

type Tracking = Container<SimPinner, parking_lot::RawMutex>;

struct Idle;

impl UnmapNotifier for Idle {
    fn unmapping(&self, _range: IovaRange) {}
}

/// A container for emulated devices, in which nothing is pinned, and a page of memory.
fn container() -> (Tracking, Arc<SimSpace>) {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 1 << 20, 12).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let frames = memory.allocate_scattered(16 * PAGE, 1).unwrap();
    space.map(UserAddr::new(USER), &frames).unwrap();
    let container = Tracking::new(SimPinner::new(memory), Account::new(u64::MAX));
    container.attach_emulated(Arc::new(Idle)).unwrap();
    (container, space)
}

fn huge() -> UserRange {
    UserRange::from_len(UserAddr::new(USER), HUGE).unwrap()
}

fn map_dma(iova: u64, size: u64) -> Vec<u8> {
    let flags = uapi::VFIO_DMA_MAP_FLAG_READ | uapi::VFIO_DMA_MAP_FLAG_WRITE;
    let mut arg = [32u32.to_ne_bytes(), flags.to_ne_bytes()].concat();
    arg.extend([USER, iova, size].into_iter().flat_map(u64::to_ne_bytes));
    arg
}

fn assert_small(what: &str, allocated: Allocated, most: i64) {
    assert!(allocated.peak <= most, "{what}: {allocated:?}");
}

#[test]
fn a_map_costs_as_much_however_long_a_client_says_it_is() {
    let (container, space) = container();
    container.start_dirty().unwrap();
    let type1 = Type1::new(&container);
    let poor = Account::with_counting(PAGE, Counting::Mappings);
    let client = Client::new(&space, &poor);
    let number = uapi::VFIO_IOMMU_MAP_DMA;
    // Refused, since it is not of whole pages, since it is not all there, and not refused.
    for (n, size) in [(0, HUGE + 1), (0, HUGE), (1, 2 * HUGE), (5, 4 * HUGE)] {
        let mut arg = map_dma(n << 43, size);
        let (answer, allocated) = allocated(|| type1.ioctl(&client, number, &mut arg));
        assert_small(&format!("{size:#x}: {answer:?}"), allocated, 4096);
    }
    let mut arg = map_dma(7 << 43, HUGE << 4);
    let (answer, allocated) = allocated(|| type1.ioctl(&client, number, &mut arg));
    assert_eq!(answer, Err(Errno::EINVAL), "more pages than are tracked");
    assert_small("refused", allocated, 4096);
    assert_eq!(poor.used(), 0);
}

#[test]
fn tracking_begins_without_memory_for_pages() {
    let (container, space) = container();
    for n in 0..16 {
        container.map(&space, huge(), Iova::new(n << 41), Prot::READ_WRITE).unwrap();
    }
    let (result, allocated) = allocated(|| container.start_dirty());
    result.unwrap();
    assert_small("16 mappings", allocated, 16 * 512);
    let (result, allocated) = self::allocated(|| container.stop_dirty());
    result.unwrap();
    assert!(allocated.kept <= 0, "{allocated:?}");
}

#[test]
fn what_is_written_is_charged_by_chunks_and_where_that_is_refused_all_is_reported() {
    let (container, space) = container();
    container.start_dirty().unwrap();
    let account = Account::with_counting(CHUNK, Counting::Mappings);
    let request = || {
        let request = MapRequest::new(&space, huge(), Iova::new(0), Prot::READ_WRITE);
        request.owner(&account)
    };
    container.map_request(&request()).unwrap();
    assert_eq!(account.used(), 0);
    let (result, allocated) = allocated(|| container.write(Iova::new(5 * PAGE), &[1]));
    result.unwrap();
    // The chunk, and the page that is there in the simulation once it is written.
    assert_small("a page", allocated, 3 * 4096);
    assert_eq!(account.used(), CHUNK);
    let range = IovaRange::from_len(Iova::new(0), HUGE).unwrap();
    let mut words = vec![0; usize::try_from(HUGE / PAGE / 64).unwrap()];
    container.dirty_bitmap(range, PAGE, &mut words, DirtyRead::Clear).unwrap();
    assert_eq!((words[0], words[1..].iter().all(|word| *word == 0)), (1 << 5, true));
    assert_eq!(container.unmap(range).unwrap(), HUGE);
    assert_eq!(account.used(), 0, "it goes with the mapping");

    // An owner who has nothing left.
    let charge = account.charge(CHUNK).unwrap();
    container.map_request(&request()).unwrap();
    container.write(Iova::new(5 * PAGE), &[1]).unwrap();
    container.dirty_bitmap(range, PAGE, &mut words, DirtyRead::Clear).unwrap();
    assert!(words.iter().all(|word| *word == u64::MAX), "nothing that was written is lost");
    container.dirty_bitmap(range, PAGE, &mut words, DirtyRead::Clear).unwrap();
    assert!(words.iter().all(|word| *word == 0), "reported once");
    drop(charge);
    container.unmap_all().unwrap();
}
