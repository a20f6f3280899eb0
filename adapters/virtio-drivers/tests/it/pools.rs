//! Pools as large as the README says are never full, and what becomes of a buffer that is refused.

use std::ptr::NonNull;

use dmaspan::dma::{FrameBounce, Trust};
use dmaspan::platform::OneThread;
use dmaspan::swiotlb::{Pool, PoolConfig};
use dmaspan::{DmaAddr, Iova, PhysAddr};
use dmaspan_sim::sanitizer::{FindingKind, Sanitizer};
use dmaspan_sim::walker::Access;
use dmaspan_virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, hal};

use crate::hal::{share, unshare};
use crate::rig::{Heap, Process, copying, with_pool};

const WAY: BufferDirection = BufferDirection::DriverToDevice;

/// The size of a pool by the README, in slots.
fn slots(queue: usize, longest: usize) -> usize {
    (2 * queue + 2) * longest
}

/// A small generator, by which each run is the same.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

/// Keeps a queue of so many descriptors as full as it can be by buffers of any length, of which any
/// comes back next.
fn keep_full<H: Hal>(queue: usize, longest: usize) {
    let mut memory: Vec<Vec<u8>> = (0..queue).map(|_| vec![7; longest + PAGE_SIZE]).collect();
    let mut shared: Vec<Option<(u64, NonNull<[u8]>)>> = vec![None; queue];
    let mut random = Random(queue as u64);
    let mut most = 0;
    for _ in 0..20_000 {
        let place = random.below(queue);
        if let Some((addr, buffer)) = shared[place].take() {
            unshare::<H>(addr, buffer, WAY);
        }
        // Most are short or as long as can be: that makes small holes.
        let len = match random.below(3) {
            0 => longest,
            1 => 1 + random.below(16),
            _ => 1 + random.below(longest),
        };
        let offset = random.below(PAGE_SIZE);
        let buffer = NonNull::from(&mut memory[place][offset..offset + len]);
        shared[place] = Some((share::<H>(buffer, WAY), buffer));
        most = most.max(shared.iter().flatten().count());
    }
    assert_eq!(most, queue);
    for (addr, buffer) in shared.into_iter().flatten() {
        assert_ne!(addr, DmaAddr::REFUSED.get());
        unshare::<H>(addr, buffer, WAY);
    }
}

#[test]
fn a_pool_of_copies_that_is_as_large_as_the_readme_says_is_never_full() {
    hal! { struct Short: parking_lot::RawMutex; }
    hal! { struct Long: parking_lot::RawMutex; }
    fn drive<H: Hal>(queue: usize, longest: usize) {
        let pages = [(); 2].map(|()| H::dma_alloc(1, BufferDirection::Both));
        assert!(pages.iter().all(|(addr, _)| *addr != 0));
        keep_full::<H>(queue, longest);
    }
    let bytes = |queue, slots_each| 2048 * slots(queue, slots_each) + 2 * PAGE_SIZE;
    // The README's own figure.
    assert_eq!(bytes(16, 2), 144 << 10);
    let (dma, _) = copying(bytes(16, 2) as u64);
    Short::attach(dma).unwrap();
    drive::<Short>(16, 4096);
    assert_eq!((Short::usage().buffers, Short::usage().refused), (0, 0));
    let (dma, _) = copying(bytes(8, 9) as u64);
    Long::attach(dma).unwrap();
    drive::<Long>(8, 9 * 2048);
    assert_eq!((Long::usage().buffers, Long::usage().refused), (0, 0));
}

#[test]
fn a_pool_for_an_untrusted_device_that_is_as_large_as_the_readme_says_is_never_full() {
    hal! { struct Disk: parking_lot::RawMutex; }
    // A power of two, of which the heap makes one span.
    let queue = 15;
    let len = (slots(queue, 2) * PAGE_SIZE) as u64;
    assert_eq!(len, 1 << 18);
    let frames = FrameBounce::new(std::sync::Arc::new(Heap), len, PhysAddr::new(u64::MAX)).unwrap();
    let pool = Pool::new(frames, PoolConfig::new(1), OneThread).unwrap();
    let (dma, _) = with_pool(Trust::Untrusted, std::sync::Arc::new(pool));
    Disk::attach(dma).unwrap();
    keep_full::<Disk>(queue, 3 * PAGE_SIZE);
    assert_eq!((Disk::usage().buffers, Disk::usage().refused), (0, 0));
}

#[test]
fn a_buffer_that_a_full_pool_refused_is_found_by_the_sanitizer_once_the_driver_submits_it() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (dma, mut reach) = copying(4 * 2048);
    Disk::attach(dma).unwrap();
    let sanitizer = Sanitizer::default();
    let mut memory = vec![0; 5 * 2048];
    let (first, rest) = memory.split_at_mut(4 * 2048);
    let first = NonNull::from(first);
    let addr = share::<Disk>(first, WAY);
    let refused = share::<Disk>(NonNull::from(&mut rest[..64]), WAY);
    assert_eq!((refused, Disk::usage().refused), (DmaAddr::REFUSED.get(), 1));
    // The descriptor is written as any other, and the device reads what it names.
    let access = Access::Read;
    sanitizer.on_dma(Iova::new(refused), 64, access);
    assert!(reach.read(&Process, Iova::new(refused), &mut [0; 64]).is_err());
    let found: Vec<_> = sanitizer.errors().iter().map(|finding| finding.kind).collect();
    assert_eq!(found, [FindingKind::RefusedBuffer { access }]);
    unshare::<Disk>(addr, first, WAY);
}
