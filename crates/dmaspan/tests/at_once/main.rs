//! Public methods that move the same bytes, each on two threads and beside every other one, at
//! every alignment and length: a data race under Miri unless each byte is accessed atomically and
//! alone.
//!
//! Nothing orders the threads among each other. So Miri, which goes by what is ordered and not by
//! what happens to overlap in time, compares each access of one with each of all others: one pass
//! of a thread over all places has every pair of places.
#![expect(unsafe_code, reason = "the tests promise to keep memory that nobody has")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::{Arc, Mutex};
use std::thread;

use dmaspan::bytes::{self, SharedWord};
use dmaspan::dma::{
    Attrs, Bounce, Coherent, CoherentPool, Device, DeviceConfig, Direct, DmaConfig, DmaDomain,
    DmaMemory, FrameBounce, FrameMemory, Piece, RawMemory, ReserveRequest, Segment, Trust,
    Unmapped,
};
use dmaspan::io_pgtable::{Arena, FrameAlloc, PageTable, TableShape, X86_64, X86_64Config};
use dmaspan::iommu::{Domain, SoftIommu};
use dmaspan::platform::Flag;
use dmaspan::swiotlb::{
    Fill, InSlot, Original, Pool, PoolConfig, PoolMemory, SlotRequest, To, Transfer,
};
use dmaspan::{Direction, PhysAddr, Platform, Promise, Span};

/// The heap as a kernel's frames.
#[derive(Clone, Debug)]
struct Heap;

fn layout(shape: TableShape) -> Layout {
    Layout::from_size_align(1 << shape.lg2_size, 1 << shape.lg2_align).unwrap()
}

// SAFETY: 1. The heap gives each frame once, zeroed. 2. Physical addresses are those of the process
// here, where all of its threads find the heap. 3. And all else.
unsafe impl FrameAlloc for Heap {
    type Lock = Flag;

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        // SAFETY: the size is not 0.
        let frames = NonNull::new(unsafe { alloc_zeroed(layout(shape)) })?;
        Some(PhysAddr::new(frames.as_ptr().expose_provenance() as u64))
    }

    fn free(&self, _promise: Promise<'_>, frames: PhysAddr, shape: TableShape) {
        // SAFETY: they were allocated above in this shape, and nobody uses them.
        unsafe { dealloc(self.pointer(frames).as_ptr(), layout(shape)) }
    }

    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
        NonNull::new(with_exposed_provenance_mut(paddr.get().try_into().unwrap())).unwrap()
    }
}

/// A machine with a CPU for two threads.
#[derive(Clone, Copy, Debug)]
struct OneCpu;

impl Platform for OneCpu {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }
}

/// All that ranges reach from their first place on.
const REACH: usize = 8 + 17;
/// What is used of memory: what is beside the ranges stays as it is.
const BYTES: u64 = 64;
const LEN: usize = 64;

/// Every alignment with every length. Under Miri, which takes a minute for each test of so many,
/// an eighth of them: every alignment, and every byte by each method.
fn places() -> impl Iterator<Item = (u64, u64)> {
    let all = (0..=8).flat_map(|at| (1..=17).map(move |len| (at, len)));
    all.filter(|(at, len)| !cfg!(miri) || (3 * at + len) % 8 == 0)
}

/// Whether what takes Miri long is done at an alignment: it copies as what is done at all.
fn is_tried(at: u64) -> bool {
    !cfg!(miri) || at == 5
}

/// Methods by their names, and what calls them at a place.
type Mover<'a> = (&'static str, Box<dyn Fn(u64, u64) + Send + Sync + 'a>);

/// A mover, which is boxed.
fn mover<'a>(name: &'static str, run: impl Fn(u64, u64) + Send + Sync + 'a) -> Mover<'a> {
    (name, Box::new(run))
}

/// Each of them on two threads, all at once.
fn at_once(movers: &[Mover<'_>]) {
    for _ in 0..if cfg!(miri) { 1 } else { 50 } {
        thread::scope(|scope| {
            for (name, run) in movers.iter().chain(movers) {
                let run = move || places().for_each(|(at, len)| run(at, len));
                thread::Builder::new().name((*name).to_owned()).spawn_scoped(scope, run).unwrap();
            }
        });
    }
}

/// What is written: never what memory is at first.
const WRITTEN: [u8; 17] = [7; 17];

fn written(len: u64) -> &'static [u8] {
    &WRITTEN[..usize::try_from(len).unwrap()]
}

/// What is read: each byte is one that was there.
fn read(len: u64, run: impl FnOnce(&mut [u8])) {
    let mut bytes = [1; 17];
    let bytes = &mut bytes[..usize::try_from(len).unwrap()];
    run(bytes);
    assert!(bytes.iter().all(|byte| [0, 7].contains(byte)), "{bytes:?}");
}

/// Frames of a test, which leak.
fn frames() -> Span {
    let shape = TableShape { lg2_size: 12, lg2_align: 12, max_paddr: PhysAddr::new(u64::MAX) };
    Span::new(Heap.allocate(shape).unwrap(), BYTES).unwrap()
}

/// Nothing was written but the ranges.
fn is_whole_beside(span: Span) -> bool {
    let mut all = [0; LEN];
    // SAFETY: they are frames of this test.
    unsafe { bytes::read(Heap.pointer(span.paddr()).as_ptr(), &mut all) };
    all[REACH..].iter().all(|byte| *byte == 0)
}

fn part(span: Span, at: u64, len: u64) -> Span {
    Span::new(span.paddr().wrapping_add(at), len).unwrap()
}

type Slots = Arc<Pool<FrameBounce<Heap>, OneCpu>>;

fn slots() -> Slots {
    let slots =
        FrameBounce::new(Heap, if cfg!(miri) { 32 } else { 256 } << 10, PhysAddr::new(u64::MAX))
            .unwrap();
    Arc::new(Pool::new(slots, PoolConfig::new(1), OneCpu).unwrap())
}

fn original(span: Span) -> Original {
    // SAFETY: the frames leak, and are read and written by `bytes` alone.
    unsafe { Original::new(span) }
}

fn raw(span: Span) -> RawMemory {
    // SAFETY: as above.
    unsafe { RawMemory::new(Piece::memory(span)) }
}

const BOTH: Direction = Direction::Bidirectional;

fn bouncing<M: DmaMemory>(pool: &Slots) -> Device<Direct<M, OneCpu>, Slots> {
    let all = Span::new(PhysAddr::new(0), u64::MAX).unwrap();
    let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(64) };
    Device::new(Arc::new(Direct::new(all, OneCpu)), Arc::clone(pool), config).unwrap()
}

#[test]
fn bytes_of_a_lease_are_read_and_written_on_two_threads() {
    let lease = slots().lease(BYTES, &SlotRequest::default()).unwrap();
    let pointer = lease.as_ptr().unwrap().as_ptr().expose_provenance();
    let byte = |at: u64| with_exposed_provenance_mut::<u8>(pointer + usize::try_from(at).unwrap());
    at_once(&[
        mover("Lease::read", |at, len| read(len, |into| lease.read(at, into).unwrap())),
        mover("Lease::write", |at, len| lease.write(at, written(len)).unwrap()),
        mover("Lease::as_ptr", |at, len| {
            let len = len.try_into().unwrap();
            // SAFETY: they are of the lease.
            unsafe { bytes::copy(byte(at), byte(at + 1), len) };
        }),
    ]);
    let mut end = [1; LEN - REACH - 1];
    lease.read(8 + 17 + 1, &mut end).unwrap();
    assert!(end.iter().all(|byte| *byte == 0));
}

#[test]
fn slots_and_their_original_are_copied_to_and_fro_on_two_threads() {
    let (pool, span) = (slots(), frames());
    let request = SlotRequest::default();
    let map = || pool.map(original(span), BOTH, Fill::Copy, &request).unwrap();
    let (bounced, slot) = (map(), pool.take(original(span), &request).unwrap());
    pool.copy(&slot, 0, BYTES, To::Slot).unwrap();
    let pointer = Heap.pointer(span.paddr()).as_ptr().expose_provenance();
    let byte = |at: u64| with_exposed_provenance_mut::<u8>(pointer + usize::try_from(at).unwrap());
    at_once(&[
        // What a driver does with the original, and so all others have something to race with.
        // SAFETY: they are of the original.
        mover("bytes::write", |at, len| unsafe { bytes::write(written(len), byte(at)) }),
        mover("Pool::sync_for_cpu", |at, len| pool.sync_for_cpu(&bounced, at, len).unwrap()),
        mover("Pool::sync_for_device", |at, len| pool.sync_for_device(&bounced, at, len).unwrap()),
        mover("Pool::copy", |at, len| {
            pool.copy(&slot, at, len, To::Original).unwrap();
            pool.copy(&slot, at, len, To::Slot).unwrap();
        }),
        mover("Pool::map Pool::unmap", |at, len| {
            if is_tried(at) {
                let part = original(part(span, at, len));
                pool.unmap(pool.map(part, BOTH, Fill::Copy, &request).unwrap()).unwrap();
            }
        }),
        mover("Pool::unmap_written", |at, len| {
            if is_tried(at) {
                let mapped = pool.map(original(part(span, at, len)), BOTH, Fill::Copy, &request);
                pool.unmap_written(mapped.unwrap(), len.div_ceil(2)).unwrap();
            }
        }),
    ]);
    assert!(is_whole_beside(span));
    pool.unmap(bounced).unwrap();
    pool.release(slot).unwrap();
}

#[test]
fn a_devices_mappings_of_one_buffer_are_synced_on_two_threads() {
    let (pool, span) = (slots(), frames());
    let device = bouncing::<RawMemory>(&pool);
    let mapping = device.map_single(raw(span), BOTH).unwrap();
    let (addr, _) = device.into_raw(device.map_single(raw(span), BOTH).unwrap()).unwrap();
    assert!(mapping.is_bounced());
    at_once(&[
        mover("Device::sync_for_cpu", |at, len| device.sync_for_cpu(&mapping, at, len).unwrap()),
        mover("Device::sync_for_device", |at, len| {
            device.sync_for_device(&mapping, at, len).unwrap();
        }),
        mover("Device::sync_raw_for_cpu", |at, len| {
            device.sync_raw_for_cpu(addr, at, len, BOTH).unwrap();
        }),
        mover("Device::sync_raw_for_device", |at, len| {
            device.sync_raw_for_device(addr, at, len, BOTH).unwrap();
        }),
        mover("Device::map_single Device::map_single_with Device::unmap", |at, len| {
            if is_tried(at) {
                let [one, other] = [(); 2].map(|()| raw(part(span, at, len)));
                let one = device.map_single(one, BOTH).unwrap();
                let other = device.map_single_with(other, BOTH, Attrs::default()).unwrap();
                assert!(matches!(device.unmap(one), Ok(Unmapped::Released(_))));
                assert!(matches!(device.unmap(other), Ok(Unmapped::Released(_))));
            }
        }),
        mover("Device::unmap_written", |at, len| {
            if is_tried(at) {
                let mapping = device.map_single(raw(part(span, at, len)), BOTH).unwrap();
                drop(device.unmap_written(mapping, len.div_ceil(2)).unwrap());
            }
        }),
        mover("Device::unmap_raw Device::unmap_raw_written", |at, len| {
            if is_tried(at) {
                let raw = || device.map_single(raw(part(span, at, len)), BOTH).unwrap();
                let [(one, _), (other, _)] = [(); 2].map(|()| device.into_raw(raw()).unwrap());
                drop(device.unmap_raw(one, len, BOTH).unwrap());
                drop(device.unmap_raw_written(other, len, BOTH, len.div_ceil(2)).unwrap());
            }
        }),
        mover("Device::with_mapped", |at, len| {
            if is_tried(at) {
                let part = raw(part(span, at, len));
                device.with_mapped(part, BOTH, Attrs::default(), |_| ()).unwrap();
            }
        }),
    ]);
    assert!(is_whole_beside(span));
}

#[test]
fn a_devices_lists_of_one_buffer_are_synced_on_two_threads() {
    let (pool, span) = (slots(), frames());
    let device = bouncing::<RawMemory>(&pool);
    let list = |span| device.map_list(raw(span), BOTH, &mut [Segment::default()]).unwrap();
    let listed = list(span);
    assert!(listed.bounced() > 0);
    at_once(&[
        mover("Device::sync_list_for_cpu", |at, len| {
            if at == 8 && len == 8 {
                device.sync_list_for_cpu(&listed).unwrap();
            }
        }),
        mover("Device::sync_list_for_device", |at, len| {
            if at == 8 && len == 8 {
                device.sync_list_for_device(&listed).unwrap();
            }
        }),
        mover("Device::map_list Device::map_list_with Device::unmap_list", |at, len| {
            if is_tried(at) {
                let (part, mut segments) = (part(span, at, len), [Segment::default()]);
                let one = device.map_list(raw(part), BOTH, &mut segments).unwrap();
                let attrs = Attrs::default();
                let other = device.map_list_with(raw(part), BOTH, &mut segments, attrs).unwrap();
                drop(device.unmap_list(one).unwrap());
                drop(device.unmap_list(other).unwrap());
            }
        }),
        mover("Device::unmap_list_written", |at, len| {
            if is_tried(at) {
                let mapping = list(part(span, at, len));
                drop(device.unmap_list_written(mapping, len.div_ceil(2)).unwrap());
            }
        }),
    ]);
    assert!(is_whole_beside(span));
}

#[test]
fn pieces_are_linked_by_slots_on_two_threads() {
    let (pool, span) = (slots(), frames());
    let tables = Arena::new(PhysAddr::new(1 << 30), 256 << 10);
    let table = PageTable::new(X86_64::new(X86_64Config::new(48, 52)).unwrap(), tables).unwrap();
    let iommu = SoftIommu::over(&table);
    let domain = Domain::new(table, iommu).unwrap();
    let domain = DmaDomain::new(domain, DmaConfig::new(1), OneCpu).unwrap();
    let config = DeviceConfig { trust: Trust::Untrusted, ..DeviceConfig::bits(48) };
    let device: Device<DmaDomain<_, _, _, _, RawMemory>, _> =
        Device::new(Arc::new(domain), Arc::clone(&pool), config).unwrap();
    at_once(&[mover("Device::link", |at, len| {
        if is_tried(at) {
            let offset = (span.paddr().get() + at) % 4096;
            let request = ReserveRequest { len, offset, pieces: 1, direction: BOTH };
            let mut reservation = device.reserve(request).unwrap();
            device.link(&mut reservation, 0, raw(part(span, at, len))).unwrap();
            device.destroy(reservation, drop).unwrap();
        }
    })]);
    assert!(is_whole_beside(span));
}

#[test]
fn memory_of_a_kernels_pool_is_moved_on_two_threads() {
    let memory = FrameBounce::new(Heap, 4096, PhysAddr::new(u64::MAX)).unwrap();
    let span = frames();
    let slot = memory.spans()[0];
    // SAFETY: this test has all slots.
    let of = |at, len| unsafe { InSlot::of(part(slot, at, len)) };
    let between = |at, len, to| {
        let [slot, original] = [slot, span].map(|all| all.paddr().wrapping_add(at));
        // SAFETY: this test has all slots, and the frames.
        unsafe { Transfer::between(slot, original, len, to) }
    };
    at_once(&[
        mover("FrameBounce::copy", |at, len| {
            memory.copy(between(at, len, To::Slot));
            memory.copy(between(at, len, To::Original));
        }),
        mover("FrameBounce::zero", |at, len| memory.zero(of(at, len))),
        mover("FrameBounce::read", |at, len| read(len, |into| memory.read(of(at, len), into))),
        mover("FrameBounce::write", |at, len| memory.write(of(at, len), written(len))),
    ]);
    assert!(is_whole_beside(span));
}

/// Memory whose exclusive borrower is on one thread, and what a device or its pool does on another.
fn beside_a_device(name: &'static str, at: NonNull<u8>, run: impl FnMut(u64, u64) + Send) {
    let pointer = at.as_ptr().expose_provenance();
    let run = Mutex::new(run);
    let byte = |at: u64| with_exposed_provenance_mut::<u8>(pointer + usize::try_from(at).unwrap());
    thread::scope(|scope| {
        let device = || {
            for (at, len) in places() {
                // SAFETY: they are of the memory, whose owner is borrowed.
                read(len, |into| unsafe { bytes::read(byte(at), into) });
                // SAFETY: as above.
                unsafe { bytes::write(written(len), byte(at)) };
            }
        };
        scope.spawn(device);
        let run = || places().for_each(|(at, len)| (run.lock().unwrap())(at, len));
        thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, run).unwrap();
    });
}

/// Every number that is aligned at an offset is read.
macro_rules! numbers {
    ($at:expr, $number:ident => $run:expr) => {{
        type $number = u8;
        $run;
        if $at % 2 == 0 {
            type $number = u16;
            $run;
        }
        if $at % 4 == 0 {
            type $number = u32;
            $run;
        }
        if $at % 8 == 0 {
            type $number = u64;
            $run;
        }
    }};
}

/// All bytes of a number are 7.
macro_rules! sevens {
    ($number:ident) => {
        $number::from_ne_bytes([7; size_of::<$number>()])
    };
}

#[test]
fn coherent_memory_is_read_and_written_beside_a_device_and_the_pool_of_another() {
    let pool = slots();
    let device = bouncing::<RawMemory>(&pool);
    let device = device.with_coherent(Arc::new(FrameMemory::new(Heap)));
    let mut blocks = CoherentPool::new(&device, BYTES, BYTES, None).unwrap();
    let (mut memory, mut block) = (device.alloc(BYTES, 1).unwrap(), blocks.alloc(&device).unwrap());
    let start = memory.as_ptr();
    beside_a_device("Coherent::write", start, |at, _| {
        numbers!(at, Number => memory.write::<Number>(at, sevens!(Number)).unwrap());
    });
    beside_a_device("Coherent::write_bytes", start, |at, len| {
        memory.write_bytes(at, written(len)).unwrap();
    });
    let start = block.as_ptr();
    beside_a_device("CoherentBlock::write", start, |at, _| {
        numbers!(at, Number => block.write::<Number>(at, sevens!(Number)).unwrap());
    });
    beside_a_device("CoherentBlock::write_bytes", start, |at, len| {
        block.write_bytes(at, written(len)).unwrap();
    });
    beside_a_device("CoherentBlock::read", start, |at, _| {
        numbers!(at, Number => assert!(block.read::<Number>(at).is_ok()));
    });
    beside_a_device("CoherentBlock::read_bytes", start, |at, len| {
        read(len, |into| block.read_bytes(at, into).unwrap());
    });
    // Another device has it mapped, by slots of its own.
    let (memory, other) = (Arc::new(memory), bouncing::<Arc<Coherent>>(&pool));
    let mapping = other.map_single(Arc::clone(&memory), BOTH).unwrap();
    at_once(&[
        mover("Coherent::read", |at, _| {
            numbers!(at, Number => assert!(memory.read::<Number>(at).is_ok()));
        }),
        mover("Coherent::read_bytes", |at, len| {
            read(len, |into| memory.read_bytes(at, into).unwrap());
        }),
        mover("Device::sync_for_cpu", |at, len| other.sync_for_cpu(&mapping, at, len).unwrap()),
        mover("Device::sync_for_device", |at, len| {
            other.sync_for_device(&mapping, at, len).unwrap();
        }),
    ]);
}

#[test]
fn bytes_and_numbers_are_accessed_on_two_threads() {
    let words: [SharedWord; 8] = Default::default();
    let pointer = words.as_ptr().cast_mut().expose_provenance();
    let byte = |at: u64| with_exposed_provenance_mut::<u8>(pointer + usize::try_from(at).unwrap());
    let word = |at: u64| usize::try_from(at / 8).unwrap();
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    at_once(&[
        // SAFETY: here and below, they are of the words.
        mover("bytes::read", |at, len| read(len, |into| unsafe { bytes::read(byte(at), into) })),
        // SAFETY: as above.
        mover("bytes::write", |at, len| unsafe { bytes::write(written(len), byte(at)) }),
        mover("bytes::copy", |at, len| {
            // SAFETY: as above.
            unsafe { bytes::copy(byte(at), byte(8 - at), len.try_into().unwrap()) };
        }),
        // SAFETY: as above.
        mover("bytes::clear", |at, len| unsafe { bytes::clear(byte(at), len.try_into().unwrap()) }),
        mover("bytes::load", |at, _| {
            numbers!(at, Number => {
                // SAFETY: as above.
                assert_ne!(unsafe { bytes::load(byte(at).cast::<Number>()) }, 1);
            });
        }),
        mover("bytes::store", |at, _| {
            numbers!(at, Number => {
                // SAFETY: as above.
                unsafe { bytes::store(byte(at).cast(), sevens!(Number)) };
            });
        }),
        mover("SharedWord::load", |at, _| assert_ne!(words[word(at)].load(relaxed), 1)),
        mover("SharedWord::store", |at, _| {
            words[word(at)].store(u64::from_ne_bytes([7; 8]), relaxed);
        }),
    ]);
    assert!(words[4..].iter().all(|word| word.load(relaxed) == 0));
}
