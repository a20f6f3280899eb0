//! Bounce pools, as `xtask/peers/bench/swiotlb.c` has Linux's.

use std::arch::asm;
use std::mem::MaybeUninit;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{iter, ptr, slice};

use dmaspan::swiotlb::{
    InSlot, Original, Pool, PoolConfig, PoolMemory, SlotOf, SlotRequest, To, Transfer,
};
use dmaspan::{PhysAddr, Platform, Span};
use parking_lot::lock_api::{GuardSend, RawMutex};

use super::iova::BenchPlatform;
use super::{SZ_2M, SZ_4K, SZ_64K};
use super::{contention, cpu, is_wanted, measure_race, memory};

/// Linux's default.
pub(crate) const POOL: u64 = 64 << 20;
const BUFFER: u64 = SZ_64K;
const PAIRS: u64 = 16384;

/// How slots are taken and released.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    bytes: u64,
    /// Slots taken before the first is released.
    held: u64,
    how: How,
}

#[derive(Clone, Copy)]
enum How {
    /// Copies are left out.
    Empty,
    Copied,
    /// Copies are left out, and the lock is parking_lot's.
    ParkingLot,
}

const CASES: [Case; 7] = [
    Case { name: "pair_4k", bytes: SZ_4K, held: 1, how: How::Empty },
    Case { name: "burst64_4k", bytes: SZ_4K, held: 64, how: How::Empty },
    Case { name: "burst256_4k", bytes: SZ_4K, held: 256, how: How::Empty },
    Case { name: "burst4096_4k", bytes: SZ_4K, held: 4096, how: How::Empty },
    Case { name: "pair_64k", bytes: SZ_64K, held: 1, how: How::Empty },
    Case { name: "pair_4k_copy", bytes: SZ_4K, held: 1, how: How::Copied },
    Case { name: "pair_4k_mutex", bytes: SZ_4K, held: 1, how: How::ParkingLot },
];

pub(crate) fn run(wanted: &[String]) {
    if contention::is_asked() {
        return take_in_turn();
    }
    self_check(BenchPlatform);
    self_check(SpinPlatform);
    for threads in 1..=cpu::MAX.min(cpu::allowed().len()) {
        let (pool, parking) = (pool(threads, SpinPlatform), pool(threads, BenchPlatform));
        for case in CASES {
            let name = format!("{}_threads_{threads}", case.name);
            if !is_wanted(wanted, &name) {
                continue;
            }
            match case.how {
                How::Empty => bench::<_, false>(&name, &pool, case, threads),
                How::Copied => bench::<_, true>(&name, &pool, case, threads),
                How::ParkingLot => bench::<_, false>(&name, &parking, case, threads),
            }
        }
    }
}

/// CPUs in turn, each with an area.
fn take_in_turn() {
    let pool = pool(contention::CPUS, SpinPlatform);
    let buffers: Vec<_> = (0..contention::CPUS).map(|_| Process::new(BUFFER)).collect();
    contention::take_turns(|turn| {
        let take = |_| take::<_, false>(&pool, &buffers[turn.cpu], SZ_4K);
        turn.batch(take, |slot| assert!(pool.release(slot).is_ok()));
    });
}

/// A pool with as many areas as threads.
fn pool<P: Platform>(threads: usize, platform: P) -> Pool<Process, P> {
    Pool::new(Process::new(POOL), PoolConfig::new(threads), platform).expect("a pool")
}

fn bench<P: Platform, const COPY: bool>(
    name: &str,
    pool: &Pool<Process, P>,
    case: Case,
    threads: usize,
) {
    let buffers: Vec<Process> = iter::repeat_with(|| Process::new(BUFFER)).take(threads).collect();
    measure_race(name, threads, PAIRS, |nth, barrier| {
        cpu::pin(if threads == 1 { 1 } else { nth });
        pairs::<P, COPY>(pool, &buffers[nth], case, barrier)
    });
}

#[inline(always)]
fn take<P: Platform, const COPY: bool>(
    pool: &Pool<Process, P>,
    buffer: &Process,
    bytes: u64,
) -> SlotOf<P> {
    let span = Span::new(buffer.spans[0].paddr(), bytes).expect("a valid span");
    // SAFETY: the buffer outlives all slots, and only copies use it.
    let original = unsafe { Original::new(span) };
    let Ok(slot) = pool.take(original, &SlotRequest::default()) else {
        panic!("the pool is full");
    };
    if COPY {
        assert!(pool.copy(&slot, 0, bytes, To::Slot).is_ok());
    }
    slot
}

fn pairs<P: Platform, const COPY: bool>(
    pool: &Pool<Process, P>,
    buffer: &Process,
    case: Case,
    barrier: &Barrier,
) -> Duration {
    let mut slots: Vec<_> = iter::repeat_with(MaybeUninit::uninit).take(size(case.held)).collect();
    barrier.wait();
    let start = Instant::now();
    if case.held == 1 {
        // A caller that takes and releases one has it in a variable.
        for _ in 0..PAIRS {
            let slot = take::<P, COPY>(pool, buffer, case.bytes);
            assert!(pool.release(slot).is_ok());
        }
        return start.elapsed();
    }
    for _ in 0..PAIRS / case.held {
        for place in &mut slots {
            place.write(take::<P, COPY>(pool, buffer, case.bytes));
        }
        for place in &slots {
            // SAFETY: it was written above, and is read once.
            let slot = unsafe { place.assume_init_read() };
            assert!(pool.release(slot).is_ok());
        }
    }
    start.elapsed()
}

/// Two slots at a time, which are not the same and hold what was copied.
fn self_check<P: Platform>(platform: P) {
    let (pool, buffers) = (pool(1, platform), [Process::new(BUFFER), Process::new(BUFFER)]);
    for (fill, buffer) in (1..).zip(&buffers) {
        // SAFETY: the buffer is this long, and nobody else uses it.
        unsafe { pointer(buffer.spans[0].paddr()).write_bytes(fill, size(SZ_4K)) };
    }
    let [a, b] = buffers.each_ref().map(|buffer| take::<P, false>(&pool, buffer, SZ_4K));
    let [first, second] = [&a, &b].map(|slot| slot.span().paddr().get());
    assert!(first.abs_diff(second) >= SZ_4K, "the slots {first:#x} and {second:#x} overlap");
    for (fill, slot) in (1..).zip([a, b]) {
        assert!(pool.copy(&slot, 0, SZ_4K, To::Slot).is_ok());
        let (start, len) = (pointer(slot.span().paddr()), size(SZ_4K));
        // SAFETY: the slot is this long and held, and nobody writes it now.
        let bytes: &[u8] = unsafe { slice::from_raw_parts(start, len) };
        assert!(bytes.iter().all(|byte| *byte == fill), "wrong contents of a slot");
        assert!(pool.release(slot).is_ok());
    }
}

/// Memory of this process, on huge pages that were touched before; physical addresses are
/// pointers.
pub(crate) struct Process {
    spans: [Span; 1],
}

impl Process {
    pub(crate) fn new(bytes: u64) -> Self {
        let len = size(bytes.next_multiple_of(SZ_2M));
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, which replaces none.
        let start = unsafe { libc::mmap(ptr::null_mut(), len * 2, protection, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "no memory");
        let start = start.map_addr(|addr| addr.next_multiple_of(size(SZ_2M)));
        // SAFETY: advice about memory that was just mapped. Without huge pages it still works.
        let _ = unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
        if super::counted::rounds().is_none() {
            // SAFETY: the memory is writable and this long, and nobody else knows it.
            unsafe { start.cast::<u8>().write_bytes(0, len) };
        }
        let paddr = PhysAddr::new(start.expose_provenance() as u64);
        Self { spans: [Span::new(paddr, bytes).expect("a valid span")] }
    }

    /// Where it begins.
    pub(crate) fn start(&self) -> u64 {
        self.spans[0].paddr().get()
    }
}

#[inline(always)]
fn size(bytes: u64) -> usize {
    usize::try_from(bytes).expect("the size or the address of memory")
}

#[inline(always)]
pub(crate) fn pointer(paddr: PhysAddr) -> *mut u8 {
    ptr::with_exposed_provenance_mut(size(paddr.get()))
}

// SAFETY: 1. Only this knows the memory, which stays mapped as long as the program runs. 2. Each
// touches the bytes that it was told to.
unsafe impl PoolMemory for Process {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// As Linux copies on CPUs with fast string operations.
    #[inline(always)]
    fn copy(&self, transfer: Transfer) {
        let (source, target) = (pointer(transfer.source()), pointer(transfer.target()));
        // SAFETY: the slot is held and the original was promised; both are this long.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") transfer.len() => _,
                inout("rsi") source => _,
                inout("rdi") target => _,
                options(nostack, preserves_flags),
            );
        }
    }

    fn zero(&self, bytes: InSlot) {
        let span = bytes.span();
        // SAFETY: the slot is held and this long.
        unsafe { pointer(span.paddr()).write_bytes(0, size(span.len())) };
    }

    fn read(&self, bytes: InSlot, into: &mut [u8]) {
        let from = pointer(bytes.span().paddr());
        // SAFETY: the slot is held and as long as `into`.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
    }

    fn write(&self, bytes: InSlot, from: &[u8]) {
        let into = pointer(bytes.span().paddr());
        // SAFETY: the slot is held and as long as `from`.
        unsafe { into.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    }
}

/// Threads that know their CPU, with the lock that Linux's side has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinPlatform;

impl Platform for SpinPlatform {
    type Lock = Spin;

    #[inline(always)]
    fn cpu(&self) -> usize {
        memory::cpu()
    }

    #[inline(always)]
    fn now(&self) -> u64 {
        0
    }
}

/// A kernel's lock, as `xtask/peers/shim/kshim.h` has it: one locked instruction and one store,
/// where parking_lot's has two locked ones.
pub(crate) struct Spin(AtomicU32);

// SAFETY: who changed the word from 0 to 1 has the lock, until it writes 0.
unsafe impl RawMutex for Spin {
    const INIT: Self = Self(AtomicU32::new(0));

    type GuardMarker = GuardSend;

    #[inline(always)]
    fn lock(&self) {
        while !self.try_lock() {
            while self.0.load(Ordering::Relaxed) != 0 {
                std::hint::spin_loop();
            }
        }
    }

    #[inline(always)]
    fn try_lock(&self) -> bool {
        self.0.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline(always)]
    unsafe fn unlock(&self) {
        self.0.store(0, Ordering::Release);
    }
}
