//! The memory that pools are made of, and the memory that they refuse.

#![expect(unsafe_code, reason = "memory of the application's own")]

use std::alloc::{self, Layout};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::Errno;
use dmaspan_linux::fixed::{
    FixedPool, FixedRing, MemoryChoice, OperationError, PoolError, PoolOptions, RingAttachError,
    WhyNot,
};
use dmaspan_linux::mem::{ExclusiveMemory, MemoryError};
use dmaspan_linux::{HugetlbReservation, Memory, MemoryKind};

use crate::fixed::support::{base, file_with, page, ring, wait};
use crate::turn::turn;

const M2: u64 = 2 << 20;

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}

#[test]
fn hugetlb_pages_are_taken_where_they_are_free() {
    let _turn = turn();
    let mut reservation = match HugetlbReservation::new(M2, 4) {
        Ok(reservation) => reservation,
        Err(error) => return eprintln!("SKIP: {error}"),
    };
    let pool = FixedPool::new(&PoolOptions::new(192 << 10, 31)).unwrap();
    reservation.mapped();
    assert_eq!(pool.provenance().kind, Some(MemoryKind::Hugetlb2M));
    assert_eq!(pool.provenance().len, 3 * M2);
    assert!(pool.provenance().passed_over.is_empty());
    assert_eq!(pool.provenance().to_string(), "6 MiB of hugetlb memory");
}

#[test]
fn what_is_passed_over_is_said_with_its_reason() {
    let _turn = turn();
    // More hugetlb pages than are free, of a pool that everything else has.
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u32 = free.map_or(0, |text| text.trim().parse().unwrap());
    let pool = FixedPool::new(&PoolOptions::new(M2, free + 4)).unwrap();
    let got = pool.provenance();
    assert!(matches!(got.kind, Some(MemoryKind::Thp | MemoryKind::Base)), "{got}");
    let passed = &got.passed_over[0];
    assert_eq!(passed.kind, MemoryKind::Hugetlb2M);
    assert!(matches!(passed.why, WhyNot::Refused(MemoryError::NoHugePages { .. })), "{got}");
    let text = got.to_string();
    assert!(text.contains("\nno hugetlb: ") && text.contains("nr_hugepages"), "{text}");
    assert!(got.kind != Some(MemoryKind::Thp) || text.contains("in huge pages"), "{text}");
}

#[test]
fn a_kind_that_is_demanded_is_given_or_refused() {
    let only = |kind| PoolOptions::new(page(), 4).memory(MemoryChoice::Only(kind));
    let pool = FixedPool::new(&only(MemoryKind::Memfd)).unwrap();
    assert_eq!(pool.provenance().kind, Some(MemoryKind::Memfd));
    let most = PoolOptions::new(1 << 30, 1 << 10).memory(MemoryChoice::Only(MemoryKind::Hugetlb2M));
    let error = FixedPool::new(&most).unwrap_err();
    assert!(matches!(error, PoolError::Memory(_)), "{error}");
}

#[test]
fn slices_that_cannot_be_are_refused_by_name() {
    let new = |len, slices| FixedPool::new(&PoolOptions::new(len, slices)).unwrap_err();
    for len in [0, 1, 4095, 4097, 6144, (1 << 30) + 4096, u64::MAX] {
        let error = new(len, 1);
        assert_eq!(error, PoolError::SliceLength { slice_len: len, limit: 1 << 30 });
        assert!(error.to_string().contains(&format!("{len:#x}")), "{error}");
        assert_eq!(error.errno(), Errno::EINVAL);
    }
    assert!(matches!(new(page(), 0), PoolError::SliceCount { slices: 0, .. }));
    let buffer =
        |len| FixedPool::new(&PoolOptions::new(2 * page(), 1).buffer_len(len)).unwrap_err();
    for len in [0, page(), (2 << 20) + 4096, 2 << 30] {
        let error = buffer(len);
        assert!(matches!(error, PoolError::BufferLength { buffer_len, .. } if buffer_len == len));
        assert!(error.to_string().contains("at most 1 GiB"), "{error}");
    }
    let many = PoolOptions::new(2 << 20, 16385).buffer_len(2 << 20);
    assert_eq!(FixedPool::new(&many).unwrap_err(), PoolError::TooManyBuffers { needed: 16385 });
    let error = new(1 << 30, 1 << 12);
    assert!(matches!(error, PoolError::Memory(MemoryError::TooMuch { .. })), "{error}");
    let memory = || ExclusiveMemory::try_from(Memory::new(MemoryKind::Base, 2 * page()).unwrap());
    let error = FixedPool::over(memory().unwrap(), 3 * page()).unwrap_err();
    assert_eq!(error, PoolError::TooShort { len: 2 * page(), slice_len: 3 * page() });
    assert_eq!(FixedPool::over(memory().unwrap(), page()).unwrap().slices(), 2);
}

#[test]
fn an_empty_pool_gives_nothing_until_something_comes_back() {
    let pool = base(4096, 3);
    let mut held: Vec<_> = (0..3).map(|_| pool.take().unwrap()).collect();
    assert!(pool.take().is_none());
    assert_eq!(pool.free_slices(), 0);
    let mut buffer = held.pop().unwrap();
    buffer[5] = 5;
    let index = buffer.index();
    drop(buffer);
    let buffer = pool.take().unwrap();
    assert_eq!((buffer.index(), buffer[5]), (index, 5));
}

#[test]
fn a_ring_of_no_or_too_many_operations_is_refused_by_name() {
    let pool = base(4096, 1);
    for depth in [0, (1 << 15) + 1] {
        let error = FixedRing::new(&pool, depth).unwrap_err();
        assert_eq!(error, RingAttachError::Depth { depth, limit: 1 << 15 });
    }
}

#[test]
fn elements_are_as_many_as_whole_ones_fit() {
    let pool = base(4096, 1);
    let mut buffer = pool.take().unwrap().cast::<[u8; 1000]>();
    let page = size(page());
    assert_eq!(buffer.len(), page / 1000);
    buffer[3] = [7; 1000];
    let buffer = buffer.cast::<u64>();
    assert_eq!((buffer.len(), buffer[499]), (page / 8, 0x0707_0707_0707_0707));
    let bytes = buffer.cast::<u8>();
    assert_eq!((bytes[2999], bytes[3000], bytes[3999], bytes[4000]), (0, 7, 7, 0));
}

#[test]
fn bytes_outside_of_the_slice_and_other_pools_buffers_are_refused_with_the_buffer() {
    let (pool, other) = (base(4096, 2), base(4096, 1));
    let Some(mut ring) = ring(&pool, 1) else { return };
    let file = file_with(b"0123456789", 0).unwrap();
    let mut buffer = pool.take().unwrap();
    let len = buffer.len();
    let reversed = std::ops::Range { start: 2, end: 1 };
    for bytes in [0..len + 1, len..len + 1, len + 1..len + 1, reversed, usize::MAX - 1..usize::MAX]
    {
        let refused = ring.read(buffer, bytes.clone(), &file, 0, 0).unwrap_err();
        assert_eq!(refused.error, OperationError::Outside { bytes, len });
        buffer = refused.buffer;
    }
    let refused = ring.write(other.take().unwrap(), 0..1, &file, 0, 0).unwrap_err();
    assert_eq!(refused.error, OperationError::OtherPool);
    assert_eq!(ring.in_flight(), 0);
    ring.read(buffer, len - 5..len, &file, 5, 0).unwrap();
    let refused = ring.read(pool.take().unwrap(), 0..1, &file, 0, 0).unwrap_err();
    assert_eq!(refused.error, OperationError::Full { depth: 1 });
    assert_eq!(&wait(&mut ring).buffer[len - 5..], b"56789");
}

/// Memory of the allocator, freed on drop.
struct Allocated {
    start: NonNull<u8>,
    layout: Layout,
    freed: Arc<AtomicBool>,
}

// SAFETY:
// 1. Memory of the allocator belongs to no thread.
unsafe impl Send for Allocated {}

// SAFETY:
// 1. Nothing is accessed through it.
unsafe impl Sync for Allocated {}

impl Drop for Allocated {
    fn drop(&mut self) {
        self.freed.store(true, Ordering::Relaxed);
        // SAFETY:
        // 1. It was allocated with this layout, and nobody uses it any more.
        unsafe { alloc::dealloc(self.start.as_ptr(), self.layout) };
    }
}

#[test]
fn memory_of_the_application_is_freed_when_the_last_slice_goes() {
    let layout = Layout::from_size_align(1 << 20, size(page())).unwrap();
    // SAFETY:
    // 1. The layout has a size.
    let start = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).unwrap();
    let freed = Arc::new(AtomicBool::new(false));
    let keep = Allocated { start, layout, freed: Arc::clone(&freed) };
    // SAFETY:
    // 1. The memory is zeroed, and nobody has it until `keep` is dropped.
    let memory = unsafe { ExclusiveMemory::foreign(start, 1 << 20, keep) }.unwrap();
    let pool = FixedPool::over(memory, 128 << 10).unwrap();
    assert_eq!((pool.slices(), pool.provenance().kind), (8, None));
    let Some(mut ring) = ring(&pool, 2) else { return };
    let file = file_with(b"0123456789", 0).unwrap();
    ring.read(pool.take().unwrap(), 1..11, &file, 0, 0).unwrap();
    let done = wait(&mut ring);
    drop((pool, ring));
    assert_eq!(&done.buffer[1..11], b"0123456789");
    assert!(!freed.load(Ordering::Relaxed));
    drop(done);
    assert!(freed.load(Ordering::Relaxed));
}

#[test]
fn memory_between_pages_is_refused() {
    let (len, page) = (page(), size(page()));
    let memory: &'static mut [u8] = Box::leak(vec![0; 3 * page].into_boxed_slice());
    let odd = memory.as_ptr().addr().next_multiple_of(page) - memory.as_ptr().addr() + 8;
    let start = NonNull::from(&mut memory[odd..][..page]).cast::<u8>();
    // SAFETY:
    // 1. The memory is never freed, and the reference to it is not used again.
    let memory = unsafe { ExclusiveMemory::foreign(start, page, ()) }.unwrap();
    let error = FixedPool::over(memory, len).unwrap_err();
    assert!(matches!(error, PoolError::Misaligned { .. }), "{error}");
}
