#![expect(unsafe_code, reason = "the tests say where memory is, and promise to keep it")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dmaspan::account::OverLimit;
use dmaspan::dma::{Bounce, Device, DeviceConfig, Direct, DmaMemory, NoPool, Trust, Unmapped};
use dmaspan::iommu::soft::{Bus as _, BusError};
use dmaspan::regbuf::{Keep, PinBufferError, Segments, SegmentsBuilder};
use dmaspan::swiotlb::{Growth, InSlot, Original, Pool, PoolConfig, PoolMemory, SlotRequest};
use dmaspan::{Direction, UserAddr, UserRange};
use parking_lot::Mutex;

use super::*;
use crate::UserPlatform;
use crate::hugetlb::{HugetlbReservation, turn};

const PAGE: u64 = 4096;
const M2: u64 = 2 << 20;

/// Whether the kernel's pages are not those that a test's numbers are of; says so.
fn has_other_pages() -> bool {
    let others = crate::sys::page_size() != PAGE || MemoryKind::Thp.page_size() != M2;
    if others {
        eprintln!("SKIP: the numbers of this test are of pages of 4 KiB and 2 MiB");
    }
    others
}

const ANY: PhysAddr = PhysAddr::new(u64::MAX);

/// Says where the n-th memory that is pinned lies, from its first byte on; `None` where pinning
/// fails.
type Where = dyn Fn(usize, u64) -> Option<Vec<(u64, u64)>> + Send + Sync;

/// A machine whose memory lies where a test says.
#[derive(Clone)]
struct Machine {
    places: Arc<Where>,
    sizes: Vec<u64>,
    /// A kind that it has none of.
    without: Option<MemoryKind>,
    /// How many memories were made and pinned, and which of all these steps fails.
    steps: Arc<AtomicUsize>,
    failing: Option<usize>,
    pins: Arc<AtomicUsize>,
    /// Bytes that are pinned.
    pinned: Arc<AtomicU64>,
    kinds: Arc<Mutex<Vec<(MemoryKind, u64)>>>,
}

struct Kept(Arc<AtomicU64>, u64);

impl Keep<PhysAddr> for Kept {
    fn end(&mut self, _segments: &Segments<PhysAddr>) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl Machine {
    fn new(places: impl Fn(usize, u64) -> Option<Vec<(u64, u64)>> + Send + Sync + 'static) -> Self {
        Self {
            places: Arc::new(places),
            sizes: Vec::new(),
            without: None,
            steps: Arc::default(),
            failing: None,
            pins: Arc::default(),
            pinned: Arc::default(),
            kinds: Arc::default(),
        }
    }

    /// Memory one behind the other, each contiguous.
    fn contiguous() -> Self {
        Self::contiguous_from(1 << 32)
    }

    fn contiguous_from(first: u64) -> Self {
        let apart = MemoryKind::Thp.page_size().max(64 << 20);
        Self::new(move |n, len| Some(vec![(first + (n as u64) * apart, len)]))
    }

    fn memory(&self) -> PhysicalMemory {
        PhysicalMemory::supplied(Box::new(self.clone()))
    }

    fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    fn fails(&self) -> bool {
        Some(self.steps.fetch_add(1, Ordering::Relaxed)) == self.failing
    }
}

impl Supply for Machine {
    fn make(&self, kind: MemoryKind, len: u64) -> Result<Memory, MemoryError> {
        self.kinds.lock().push((kind, len));
        if self.without == Some(kind) || self.fails() {
            return Err(MemoryError::System { kind, len, errno: Errno::ENOMEM });
        }
        // Their pages do not matter.
        Memory::new(MemoryKind::Base, len)
    }

    fn pin(&self, memory: &Arc<Memory>) -> Result<Buffer<PhysAddr>, PhysicalError> {
        let (user, len) = (memory.user_range(), memory.len());
        let refused = || PinBufferError::<LinuxPinError>::Pinned { user, got: 0 };
        if self.fails() {
            return Err(refused().into());
        }
        let n = self.pins.fetch_add(1, Ordering::Relaxed);
        let places = (self.places)(n, len).ok_or_else(refused)?;
        let mut segments = SegmentsBuilder::new();
        for (at, len) in places {
            segments.push(Span::new(PhysAddr::new(at), len).unwrap()).unwrap();
        }
        self.pinned.fetch_add(len, Ordering::Relaxed);
        let keep = Box::new(Kept(Arc::clone(&self.pinned), len));
        // SAFETY: there is no device; who copies there finds the memory by the direct map.
        let buffer =
            unsafe { Buffer::new(segments.build().unwrap(), user, Prot::READ_WRITE, keep) };
        Ok(buffer.unwrap())
    }

    fn page_sizes(&self) -> Vec<u64> {
        self.sizes.clone()
    }
}

/// What a device reads at a physical address.
fn device_reads(memory: &PhysicalMemory, at: PhysAddr, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    // SAFETY: the tests have it mapped.
    memory.shared.map.read(&unsafe { InSlot::of(Span::new(at, len).unwrap()) }, &mut bytes);
    bytes
}

fn device_writes(memory: &PhysicalMemory, at: PhysAddr, bytes: &[u8]) {
    let len = u64::try_from(bytes.len()).unwrap();
    // SAFETY: the tests have it mapped.
    memory.shared.map.write(&unsafe { InSlot::of(Span::new(at, len).unwrap()) }, bytes);
}

#[test]
fn parts_are_disjoint_aligned_zeroed_and_given_back_whole() {
    let machine = Machine::contiguous();
    let memory = machine.memory();
    let mut held: Vec<ContiguousMemory> = Vec::new();
    let mut state = 88_172_645_463_325_252_u64;
    let mut draw = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for _ in 0..3000 {
        if draw(3) == 0 && !held.is_empty() {
            let index = usize::try_from(draw(held.len() as u64)).unwrap();
            held.swap_remove(index);
            continue;
        }
        let (len, align) = (1 + draw(9 * PAGE), 1 << draw(18));
        let part = memory.allocate(len, align, ANY).unwrap();
        assert!(part.len() >= len && part.span().paddr().get().is_multiple_of(align));
        let mut bytes = vec![1; usize::try_from(part.len()).unwrap()];
        part.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "what another owner wrote is seen");
        part.write(0, &vec![0xa5; bytes.len()]).unwrap();
        assert_eq!(device_reads(&memory, part.span().paddr(), 1), [0xa5]);
        let meets = |other: &&ContiguousMemory| {
            other.span().paddr() <= part.span().last() && part.span().paddr() <= other.span().last()
        };
        assert!(held.iter().find(meets).is_none());
        held.push(part);
        if held.len() > 300 {
            held.drain(..280);
        }
    }
    let chunks = || memory.shared.chunks.count();
    let chunk = MemoryKind::Thp.page_size();
    if chunk > 32 << 20 {
        // One holds all from the first on that no base page holds.
        let (large, rest) = (machine.pinned() / chunk, machine.pinned() % chunk);
        assert!(large <= 1 && chunks() > 0);
        assert_eq!(rest, (chunks() as u64 - large) * crate::sys::page_size());
    } else {
        assert!(chunks() > 0 && machine.pinned() == chunks() as u64 * chunk);
        assert!(chunk > M2 || chunks() > 1);
    }
    held.clear();
    assert_eq!((chunks(), machine.pinned()), (0, 0));
    // Nothing is known there any more.
    assert!(memory.shared.map.pointer(PhysAddr::new(1 << 32)).is_none());
}

#[test]
fn parts_of_a_chunk_are_joined_again_in_any_order() {
    if has_other_pages() {
        return;
    }
    let machine = Machine::contiguous();
    let memory = machine.memory();
    let keep = memory.allocate(PAGE, PAGE, ANY).unwrap();
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
        let mut parts = [(); 4].map(|()| Some(memory.allocate(PAGE, PAGE, ANY).unwrap()));
        for index in order {
            parts[index] = None;
        }
        let rest = memory.allocate(M2 - PAGE, PAGE, ANY).unwrap();
        assert_eq!(rest.span().paddr(), keep.span().last().wrapping_add(1));
        assert_eq!(machine.pinned(), M2);
    }
}

#[test]
fn pages_of_each_size_that_the_kernel_lists_are_tried_the_smallest_that_holds_it_first() {
    if has_other_pages() {
        return;
    }
    // Nothing is contiguous but the page of 32 MiB.
    let mut machine = Machine::new(|n, len| {
        (len == 32 << 20).then(|| vec![(1 << 32, len)]).or_else(|| {
            let half = len / 2;
            Some(vec![((n as u64 + 1) << 40, half), ((n as u64 + 1) << 40 | 1 << 39, half)])
        })
    });
    machine.sizes = vec![64 << 10, M2, 32 << 20, 1 << 30];
    let memory = machine.memory();
    let part = memory.allocate(M2 + PAGE, PAGE, ANY).unwrap();
    assert_eq!(part.span().paddr().get(), 1 << 32);
    assert_eq!(*machine.kinds.lock(), [(MemoryKind::Hugetlb { page_lg2: 25 }, 32 << 20)]);

    // What no page holds is looked for in neighbours, the largest pages first.
    machine.kinds.lock().clear();
    machine.sizes = vec![64 << 10, M2];
    let memory = machine.memory();
    let error = memory.allocate(3 << 20, PAGE, ANY).unwrap_err();
    let mut kinds = machine.kinds.lock().clone();
    kinds.dedup();
    let neighbours = [
        (MemoryKind::Hugetlb2M, 2 * M2),
        (MemoryKind::Hugetlb { page_lg2: 16 }, 3 << 20),
        (MemoryKind::Thp, 2 * M2),
    ];
    assert_eq!(kinds, neighbours);
    let text = error.to_string();
    let PhysicalError::None { tried, .. } = &error else { panic!("{error}") };
    assert_eq!(tried.len(), 3);
    assert!(text.contains("pinned 16 times, lay in 2 pieces at last"), "{text}");
    assert_eq!(error.errno(), Errno::ENOMEM);
}

#[test]
fn memory_that_lies_too_high_is_held_until_other_memory_was_found() {
    if has_other_pages() {
        return;
    }
    // The tenth lies low.
    let machine = Machine::new(|n, len| {
        let base = if n == 9 { 1 << 24 } else { 1 << 32 };
        Some(vec![(base + (n as u64) * M2, len)])
    });
    let memory = machine.memory();
    let low = PhysAddr::new(u64::from(u32::MAX));
    let part = memory.allocate(PAGE, PAGE, low).unwrap();
    assert!(part.span().last() <= low);
    // What was passed over was given back.
    assert_eq!(machine.pinned(), M2);
    drop(part);
    // None lies lower than this.
    let error = memory.allocate(PAGE, PAGE, PhysAddr::new(0xffff)).unwrap_err();
    assert!(error.to_string().contains("up to 0xffff"), "{error}");
    assert_eq!((machine.pinned(), memory.shared.chunks.count()), (0, 0));
}

#[test]
fn the_nth_step_fails_and_the_next_pages_are_tried_with_nothing_left_behind() {
    // A transparent page is made and pinned, and where that fails a base page; or the other way
    // round, where a transparent page is very large.
    for n in 0..4 {
        let mut machine = Machine::contiguous();
        machine.failing = Some(n);
        let memory = machine.memory();
        match memory.allocate(PAGE, PAGE, ANY) {
            Ok(part) => drop(part),
            Err(error) => panic!("{n}: {error}"),
        }
        assert_eq!((machine.pinned(), memory.shared.chunks.count()), (0, 0), "{n}");
    }
    // Nothing works at all.
    let machine = Machine::new(|_, _| None);
    let memory = machine.memory();
    let error = memory.allocate(PAGE, PAGE, ANY).unwrap_err();
    let PhysicalError::None { tried, .. } = &error else { panic!("{error}") };
    let [Tried::Pin { kind: first, .. }, Tried::Pin { kind: second, .. }] = tried[..] else {
        panic!("{error}")
    };
    let is_shared = MemoryKind::Thp.page_size() <= 32 << 20;
    let (thp, base) = (MemoryKind::Thp, MemoryKind::Base);
    assert_eq!((first, second), if is_shared { (thp, base) } else { (base, thp) });
    let refused = PinBufferError::<LinuxPinError>::Pinned {
        user: dmaspan::UserRange::point(dmaspan::UserAddr::new(0)),
        got: 0,
    };
    let word = refused.to_string();
    assert!(error.to_string().contains(word.split(" for ").next().unwrap()), "{error}");
}

#[test]
fn bad_requests_are_refused_before_anything_is_made() {
    let machine = Machine::contiguous();
    let memory = machine.memory();
    assert!(matches!(memory.allocate(0, 1, ANY), Err(PhysicalError::Empty)));
    for align in [0, 3, u64::MAX] {
        let error = memory.allocate(1, align, ANY).unwrap_err();
        assert!(matches!(error, PhysicalError::Alignment { align: a } if a == align), "{error}");
    }
    assert!(matches!(memory.allocate(u64::MAX, 1, ANY), Err(PhysicalError::None { .. })));
    assert!(matches!(memory.bounce(0, ANY), Err(PhysicalError::Empty)));
    assert!(matches!(memory.bounce(100, ANY), Err(PhysicalError::Length { len: 100, .. })));
    assert!(machine.kinds.lock().is_empty());
}

#[test]
fn memory_is_pinned_once_and_parts_of_it_share_the_pin() {
    let page = crate::sys::page_size();
    // In two pieces, the second below the first.
    let machine = Machine::new(|_, len| Some(vec![(1 << 33, len / 2), (1 << 32, len / 2)]));
    let memory = machine.memory();
    let user = Arc::new(Memory::new(MemoryKind::Base, 4 * page).unwrap());
    let whole = memory.pin(&user).unwrap();
    let error = memory.pin(&user).unwrap_err();
    assert!(matches!(error, PhysicalError::Known { .. }), "{error}");
    assert_eq!((error.errno(), machine.pinned()), (Errno::EEXIST, 4 * page));
    let spans = |part: &PinnedMemory| {
        part.spans().map(|span| (span.paddr().get(), span.len())).collect::<Vec<_>>()
    };
    let low = whole.part(page + 8, 100).unwrap();
    assert_eq!(spans(&low), [((1 << 33) + page + 8, 100)]);
    let across = whole.part(page, 2 * page).unwrap();
    assert_eq!(spans(&across), [((1 << 33) + page, page), (1 << 32, page)]);
    let inner = across.part(page - 8, 16).unwrap();
    assert_eq!(spans(&inner), [((1 << 33) + 2 * page - 8, 8), (1 << 32, 8)]);
    assert_eq!((inner.offset(), inner.len(), inner.pieces().len()), (2 * page - 8, 16, 2));
    for (offset, len) in [(0, 0), (2 * page, 1), (0, 2 * page + 1), (u64::MAX, 2)] {
        assert!(across.part(offset, len).is_err(), "{offset:#x} {len:#x}");
    }
    drop((whole, low, across));
    assert_eq!(machine.pinned(), 4 * page);
    drop(inner);
    assert_eq!((machine.pinned(), Arc::strong_count(&user)), (0, 1));
    drop(memory.pin(&user).unwrap());
}

#[test]
fn a_direct_device_bounces_through_pinned_slots_with_every_byte_where_it_belongs() {
    if has_other_pages() {
        return;
    }
    // Everything is scattered by 3 pages, backward.
    let machine = Machine::new(|n, len| {
        if len == M2 {
            return Some(vec![((1 << 32) + (n as u64) * M2, len)]);
        }
        let (step, base) = (3 * PAGE, (n as u64 + 1) << 36);
        let count = len.div_ceil(step);
        let piece = |k: u64| (base + (count - k) * 4 * PAGE, step.min(len - k * step));
        Some((0..count).map(piece).collect())
    });
    let memory = machine.memory();
    let slots = memory.bounce(2 * M2, ANY).unwrap();
    let pool = Pool::new(slots, PoolConfig::new(1), UserPlatform).unwrap();
    let direct = Arc::new(Direct::new(memory.extent().unwrap(), UserPlatform));
    let config =
        DeviceConfig { bounce: Bounce::Always, trust: Trust::Untrusted, ..DeviceConfig::bits(64) };
    let device = Device::new(direct, pool, config).unwrap();
    let user = Arc::new(Memory::new(MemoryKind::Base, 16 * PAGE).unwrap());
    let before: Vec<u8> = (0..16 * PAGE).map(|at| (at * 7 + at / 251).to_le_bytes()[0]).collect();
    let pinned = memory.pin(&user).unwrap();
    // Within a span, and up to the end of one.
    for (offset, len) in [(0, 1), (5, 100), (3 * PAGE - 9, 9), (3 * PAGE, 2 * PAGE + 1)] {
        user.write(0, &before).unwrap();
        let at = usize::try_from(offset).unwrap()..usize::try_from(offset + len).unwrap();
        let part = pinned.part(offset, len).unwrap();
        let mapping = device.map_single(part, Direction::Bidirectional).unwrap();
        assert!(mapping.is_bounced());
        let slot = PhysAddr::new(mapping.addr().get());
        assert_eq!(device_reads(&memory, slot, len), before[at.clone()]);
        let written: Vec<u8> = before[at.clone()].iter().map(|byte| !byte).collect();
        device_writes(&memory, slot, &written);
        assert!(matches!(device.unmap(mapping), Ok(Unmapped::Released(_))));
        let mut after = vec![0; before.len()];
        user.read(0, &mut after).unwrap();
        assert_eq!(after[at.clone()], written);
        assert_eq!(after[..at.start], before[..at.start]);
        assert_eq!(after[at.end..], before[at.end..]);
    }
    drop((device, pinned));
    assert_eq!(machine.pinned(), 0);
}

#[test]
fn a_pool_is_of_what_there_is_and_grows_by_pinned_memory() {
    // No more than a huge page is contiguous, and no two touch.
    let mut machine = Machine::new(|n, len| {
        let spans = (0..len / M2).map(|k| ((n as u64 + 1) << 33 | k << 28, M2)).collect();
        Some(if len < M2 { vec![((n as u64 + 1) << 33, len)] } else { spans })
    });
    if MemoryKind::Thp.page_size() > M2 {
        // Then those of 2 MiB are of hugetlb.
        (machine.sizes, machine.without) = (vec![M2], Some(MemoryKind::Thp));
    }
    let memory = machine.memory();
    let slots = memory.bounce(3 * M2, ANY).unwrap();
    assert_eq!((slots.spans().len(), slots.len()), (3, 3 * M2));
    let config = PoolConfig { growth: Some(Growth::new(1 << 20, 2 << 20)), ..PoolConfig::new(1) };
    let pool = Pool::new(slots, config, UserPlatform).unwrap();
    pool.grow().unwrap();
    assert!(pool.memory().grown_bytes() >= 1 << 20);
    let span = pool.memory().spans()[1];
    // SAFETY: nobody uses the pool.
    let slot = unsafe { InSlot::of(Span::new(span.paddr(), PAGE).unwrap()) };
    let start = pool.memory().pointer(slot).unwrap();
    device_writes(&memory, span.paddr(), &[7]);
    // SAFETY: it is of the pool's memory, and nobody else accesses it.
    assert_eq!(unsafe { start.read_volatile() }, 7);
    pool.shrink();
    assert_eq!(pool.memory().grown_bytes(), 0);
    drop(pool);
    assert_eq!(machine.pinned(), 0);
}

#[test]
fn coherent_memory_of_a_device_is_contiguous_within_its_mask_and_not_reused_while_it_has_it() {
    if has_other_pages() {
        return;
    }
    let machine = Machine::contiguous();
    let memory = machine.memory();
    let direct = Arc::new(Direct::<PinnedMemory, _>::new(memory.extent().unwrap(), UserPlatform));
    let device = Device::new(direct, NoPool, DeviceConfig::bits(40)).unwrap();
    let device = device.with_coherent(Arc::new(memory.clone()));
    let mut ring = device.alloc(3 * PAGE + 5, 8 * PAGE).unwrap();
    assert!(ring.addr().get().is_multiple_of(8 * PAGE));
    ring.write(PAGE, 0x1234_5678_u32).unwrap();
    let at = PhysAddr::new(ring.addr().get() + PAGE);
    assert_eq!(device_reads(&memory, at, 4), 0x1234_5678_u32.to_ne_bytes());
    device_writes(&memory, at, &[1; 8]);
    assert_eq!(ring.read::<u64>(PAGE).unwrap(), 0x0101_0101_0101_0101);
    let first = ring.addr();
    device.free(ring).unwrap();
    assert_eq!(machine.pinned(), 0);
    let again = device.alloc(PAGE, PAGE).unwrap();
    assert_ne!(again.addr(), first);
    let lost = again.addr();
    // The device was never told to let go.
    drop(again);
    let others: Vec<_> = (0..511).map(|_| device.alloc(PAGE, PAGE).unwrap()).collect();
    assert!(others.iter().all(|other| other.addr() != lost));
    assert_eq!(machine.pinned(), M2);
    others.into_iter().for_each(|other| device.free(other).unwrap());
    assert_eq!(machine.pinned(), M2);
    // A device of 20 bits reaches none of it.
    let low = Device::new(Arc::clone(device.translation()), NoPool, DeviceConfig::bits(20));
    let Ok(low) = low else {
        return eprintln!("SKIP: all memory lies higher than 1 MiB, as Arm's may");
    };
    let low = low.with_coherent(Arc::new(memory.clone()));
    let error = low.alloc(PAGE, PAGE).unwrap_err();
    assert!(error.to_string().contains("no huge page is free"), "{error}");
}

#[test]
fn coherent_memory_that_was_not_pinned_blames_the_limit_only_where_that_is_the_cause() {
    let (contiguity, coherency) = (Contiguity::AnySpans, Coherency::Coherent);
    let (granule, align, last) = (PAGE, PAGE, ANY);
    let request = CoherentRequest { len: PAGE, granule, align, last, contiguity, coherency };
    // No pin succeeds, and none for want of a limit.
    let refused = CoherentMemory::allocate(&Machine::new(|_, _| None).memory(), &request);
    assert_eq!(
        refused.unwrap_err().why,
        "memory could not be pinned: PhysicalMemory::pin says why"
    );
    let user = UserRange::from_len(UserAddr::new(PAGE), PAGE).unwrap();
    let over = OverLimit { asked: PAGE, used: 0, limit: 0 };
    let pin = PinBufferError::<LinuxPinError>::OverLimit { user, over };
    let why = PhysicalError::Pin(pin).why();
    assert_eq!(why, "memory could not be pinned: raise the limit of locked memory (ulimit -l)");
}

#[test]
fn behind_an_iommu_coherent_memory_may_be_scattered_and_is_one_for_the_program() {
    let machine = Machine::new(|n, len| {
        let base = (n as u64 + 1) << 36;
        Some((0..len / PAGE).map(|page| (base + page * 2 * PAGE, PAGE)).collect())
    });
    let memory = machine.memory();
    let request = CoherentRequest {
        len: 4 * PAGE,
        granule: PAGE,
        align: PAGE,
        last: ANY,
        contiguity: Contiguity::AnySpans,
        coherency: Coherency::Coherent,
    };
    let frames = CoherentMemory::allocate(&memory, &request).unwrap();
    assert_eq!(frames.pieces().len(), 4);
    for (page, piece) in (0..).zip(frames.pieces()) {
        device_writes(&memory, piece.span.paddr(), &[page + 1]);
        let at = frames.as_ptr().as_ptr().wrapping_byte_add(usize::from(page) * 4096);
        // SAFETY: it is of the frames, and nobody else accesses it.
        assert_eq!(unsafe { at.read_volatile() }, page + 1);
    }
    drop(frames);
    assert_eq!(machine.pinned(), 0);
    let one = CoherentRequest { contiguity: Contiguity::OneSpan, ..request };
    assert!(CoherentMemory::allocate(&memory, &one).is_err());
    let uncached = CoherentRequest { coherency: Coherency::NonCoherent, ..request };
    let error = CoherentMemory::allocate(&memory, &uncached).unwrap_err();
    assert!(error.to_string().contains("not cached"), "{error}");
}

#[test]
fn coherent_memory_is_as_long_as_was_asked_for_however_long_the_kernels_pages_are() {
    let memory = Machine::contiguous().memory();
    let direct = Arc::new(Direct::<PinnedMemory, _>::new(memory.extent().unwrap(), UserPlatform));
    let device = Device::new(direct, NoPool, DeviceConfig::bits(64)).unwrap();
    let device = device.with_coherent(Arc::new(memory));
    let ring = device.alloc(PAGE, PAGE).unwrap();
    assert_eq!(ring.len(), PAGE);
    device.free(ring).unwrap();
}

#[test]
fn what_is_pinned_nowhere_is_not_copied() {
    let memory = Machine::contiguous().memory();
    let slots = memory.bounce(M2, ANY).unwrap();
    let pool = Pool::new(slots, PoolConfig::new(1), UserPlatform).unwrap();
    let user = Arc::new(Memory::new(MemoryKind::Base, crate::sys::page_size()).unwrap());
    let pinned = memory.pin(&user).unwrap();
    let span = pinned.spans().next().unwrap();
    // SAFETY: nothing is there: that is refused.
    let original = unsafe { Original::new(span) };
    let slot = pool.take(original, &SlotRequest::default()).unwrap();
    pool.copy(&slot, 0, 8, dmaspan::swiotlb::To::Slot).unwrap();
    drop(pinned);
    let copy = || pool.copy(&slot, 0, 8, dmaspan::swiotlb::To::Slot);
    assert!(catch_unwind(AssertUnwindSafe(copy)).is_err());
}

#[test]
fn what_another_has_pinned_gets_no_slot() {
    let memory = Machine::contiguous().memory();
    let other = Machine::contiguous_from(1 << 40);
    let pin = |memory: &PhysicalMemory| {
        let user = Memory::new(MemoryKind::Base, crate::sys::page_size());
        memory.pin(&Arc::new(user.unwrap())).unwrap()
    };
    let foreign = pin(&other.memory());
    let span = foreign.spans().next().unwrap();
    let slots = memory.bounce(M2, ANY).unwrap();
    let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), UserPlatform).unwrap());
    let all = Span::new(PhysAddr::new(0), 1 << 50).unwrap();
    let direct = Arc::new(Direct::new(all, UserPlatform));
    let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(64) };
    let device = Device::new(direct, Arc::clone(&pool), config).unwrap();
    let refused = device.map_single(foreign, Direction::ToDevice).unwrap_err();
    assert!(matches!(refused.error, dmaspan::dma::Error::NoSlot { .. }), "{}", refused.error);
    let mapped = device.map_single(pin(&memory), Direction::ToDevice).unwrap();
    let _unmapped = device.unmap(mapped).unwrap();
    // SAFETY: it is refused.
    let original = || unsafe { Original::new(span) };
    let no_copies = Err(dmaspan::swiotlb::Error::NoCopies { original: span });
    let (request, mut slots) = (SlotRequest::default(), Vec::new());
    assert_eq!(pool.take(original(), &request).map(drop), no_copies);
    assert_eq!(pool.take_all([original()], &request, &mut slots), no_copies);
    assert_eq!((slots.len(), pool.stats().used), (0, 0));
}

#[test]
fn a_lease_stands_in_for_nothing_and_needs_no_copies() {
    let slots = Machine::contiguous().memory().bounce(M2, ANY).unwrap();
    let pool = Arc::new(Pool::new(slots, PoolConfig::new(1), UserPlatform).unwrap());
    let lease = pool.lease(16, &SlotRequest::default()).unwrap();
    lease.write(0, &[7; 16]).unwrap();
    let mut bytes = [0; 16];
    lease.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 16]);
}

/// What the kernel itself says of memory, where it tells.
fn real() -> Option<PhysicalMemory> {
    match PhysicalMemory::new() {
        Ok(memory) => Some(memory),
        Err(error) => {
            eprintln!("SKIP: {error}");
            assert!(error.to_string().contains("CAP_SYS_ADMIN") || error.errno() != Errno::EPERM);
            None
        }
    }
}

#[test]
fn contiguous_memory_of_this_machine_is_where_the_kernel_says() {
    let Some(memory) = real() else { return };
    let frames = crate::FrameSource::<PhysAddr>::new().unwrap();
    let pages = |part: &ContiguousMemory| {
        let user = part.memory().sub_range(part.memory_offset(), part.len()).unwrap();
        let mut pages = Vec::new();
        frames.page_frames(part.memory(), user, &mut pages).unwrap();
        pages
    };
    for (len, align) in [(PAGE, PAGE), (64 << 10, 64 << 10), (1 << 20, M2)] {
        let part = match memory.allocate(len, align, ANY) {
            Ok(part) => part,
            Err(error) => return eprintln!("SKIP: {error}"),
        };
        let expected =
            |n: usize| part.span().paddr().wrapping_add(n as u64 * crate::sys::page_size());
        for (n, page) in pages(&part).into_iter().enumerate() {
            assert_eq!(page, expected(n));
        }
        assert!(part.span().paddr().get().is_multiple_of(align));
        let extent = memory.extent().unwrap();
        assert!(extent.paddr() <= part.span().paddr() && part.span().last() <= extent.last());
    }
}

#[test]
fn hugetlb_pages_back_what_is_longer_than_a_transparent_one() {
    let _turn = turn();
    let Some(memory) = real() else { return };
    let mut reserved = match HugetlbReservation::new(1 << 30, 1) {
        Ok(reserved) => reserved,
        Err(error) => {
            // Without such a page the error says what to do.
            let error_here = memory.allocate(8 << 20, 1, ANY);
            if let Err(error) = error_here {
                assert!(error.to_string().contains("nr_hugepages"), "{error}");
            }
            return eprintln!("SKIP: {error}");
        }
    };
    let len = 4 * MemoryKind::Thp.page_size();
    let part = memory.allocate(len, len, ANY).unwrap();
    reserved.mapped();
    assert_eq!((part.len(), part.memory().kind()), (len, MemoryKind::Hugetlb1G));
    drop(part);
}

#[test]
fn a_device_model_reaches_what_is_pinned_by_its_addresses_and_nothing_else() {
    if has_other_pages() {
        return;
    }
    // Two spans of one memory that are no neighbours, and in the other order.
    let machine = Machine::new(|_, len| Some(vec![(0x9000, len / 2), (0x5000, len / 2)]));
    let physical = machine.memory();
    let memory = Arc::new(Memory::new(MemoryKind::Base, 2 * PAGE).unwrap());
    let pinned = physical.pin(&memory).unwrap();
    memory.write(PAGE - 3, b"abcdef").unwrap();
    let mut bytes = [0; 3];
    physical.read(PhysAddr::new(0x9ffd), &mut bytes).unwrap();
    assert_eq!(&bytes, b"abc");
    physical.write(PhysAddr::new(0x5000), b"xyz").unwrap();
    memory.read(PAGE, &mut bytes).unwrap();
    assert_eq!(&bytes, b"xyz");
    let refused = |at: u64, len: usize| physical.read(PhysAddr::new(at), &mut vec![0; len]);
    assert_eq!(refused(0x5fff, 2), Err(BusError::Nobody { paddr: PhysAddr::new(0x6000) }));
    assert_eq!(refused(0x4fff, 1), Err(BusError::Nobody { paddr: PhysAddr::new(0x4fff) }));
    assert!(refused(u64::MAX, 2).is_err() && refused(0x1_0000, 0).is_ok());
    drop(pinned);
    assert!(refused(0x5000, 1).is_err());
}
