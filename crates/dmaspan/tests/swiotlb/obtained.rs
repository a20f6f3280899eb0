//! The memory that a pool obtains beyond what it began with, and the books that it keeps of it.

use std::sync::Arc;

use dmaspan::swiotlb::{
    Error, Growth, InSlot, Pool, PoolConfig, PoolMemory, Room, SlotOf, SlotPlace, SlotRequest,
    Transfer,
};
use dmaspan::{PhysAddr, Promise, Span};
use dmaspan_sim::allocator::{allocated, fail};
use parking_lot::Mutex;

use crate::common::{SLOT, original, span};
use crate::flat::{Place, SOURCE, locks_of};

/// Where what is obtained begins.
const OBTAINED: u64 = 0x1000_0000;

/// Memory without bytes. What it gives is aligned as it was asked for, and to nothing larger.
#[derive(Clone)]
struct Meagre(Vec<Span>, Arc<Mutex<Books>>);

struct Books {
    /// What was given and not freed.
    given: Vec<Span>,
    /// What was asked for last.
    room: Option<Room>,
    /// What is given next, whatever is asked for.
    wrong: Option<Span>,
    next: u64,
    pressed: u32,
}

impl Meagre {
    fn given(&self) -> Vec<Span> {
        self.1.lock().given.clone()
    }

    fn pressed(&self) -> u32 {
        self.1.lock().pressed
    }
}

// SAFETY: it is never accessed.
unsafe impl PoolMemory for Meagre {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.0
    }

    fn copy(&self, _: Transfer) {}

    fn zero(&self, bytes: InSlot) {
        let given = self.1.lock();
        let within = |all: &Span| inside(bytes.span(), *all);
        assert!(self.0.iter().chain(&given.given).any(within), "{} is nowhere", bytes.span());
    }

    fn read(&self, _: InSlot, _: &mut [u8]) {}

    fn write(&self, _: InSlot, _: &[u8]) {}

    fn allocate(&self, room: Room) -> Option<Span> {
        assert!(room.align.is_power_of_two() && room.bytes.is_multiple_of(SLOT), "{room:x?}");
        let mut books = self.1.lock();
        books.room = Some(room);
        let given = books.wrong.take().or_else(|| {
            let start = books.next.checked_next_multiple_of(room.align)? | room.align;
            let last = start.checked_add(room.bytes - 1).filter(|last| *last <= room.last)?;
            books.next = last + 1;
            Some(span(start, room.bytes))
        })?;
        books.given.push(given);
        Some(given)
    }

    fn free(&self, _promise: Promise<'_>, span: Span) {
        let mut books = self.1.lock();
        let at = books.given.iter().position(|given| *given == span);
        books.given.remove(at.expect("it was given"));
    }

    fn pressed(&self) {
        self.1.lock().pressed += 1;
    }
}

fn inside(part: Span, all: Span) -> bool {
    all.paddr() <= part.paddr() && part.last() <= all.last()
}

fn any() -> SlotRequest {
    SlotRequest::default()
}

type MeagrePool = Arc<Pool<Meagre, Place>>;

/// Two spans of 4 slots, all of which are held, that may grow by so many slots.
fn full(slots: u64) -> (MeagrePool, Meagre, Vec<SlotOf<Place>>) {
    let spans = vec![span(0x10_0000, 4 * SLOT), span(0x20_0000, 4 * SLOT)];
    let books = Books {
        given: Vec::with_capacity(100),
        room: None,
        wrong: None,
        next: OBTAINED,
        pressed: 0,
    };
    let memory = Meagre(spans, Arc::new(Mutex::new(books)));
    let growth = Some(Growth::new(8 * SLOT, slots * SLOT));
    let config = PoolConfig { growth, ..PoolConfig::new(1) };
    let pool = Arc::new(Pool::new(memory.clone(), config, Place::default()).unwrap());
    let held = (0..2).map(|_| take(&pool, 4).unwrap()).collect();
    (pool, memory, held)
}

fn take(pool: &MeagrePool, slots: u64) -> Result<SlotOf<Place>, Error> {
    pool.take(original(SOURCE, slots * SLOT), &any())
}

/// As the DMA API asks.
fn owns(pool: &MeagrePool, at: Span) -> bool {
    dmaspan::dma::BouncePool::owns(&**pool, at)
}

#[test]
fn memory_for_one_request_is_as_long_and_as_aligned_as_that_needs_and_fits_it() {
    let (pool, memory, _held) = full(1 << 20);
    for (keep, granule) in
        [0, 11, 12, 16].into_iter().flat_map(|keep| [0, 12, 13, 16].map(|granule| (keep, granule)))
    {
        for boundary in [None, Some(6), Some(11), Some(12), Some(13), Some(15), Some(16), Some(20)]
        {
            let request = SlotRequest {
                keep_bits: (1 << keep) - 1,
                granule: 1 << granule,
                boundary: boundary.map(|lg2| 1 << lg2),
                last: 1 << 50,
            };
            let parts = [0, 0x7ff, 0x800, 0xf00, 0x1100, 0xffff]
                .into_iter()
                .flat_map(|low| [1, 0x200, 2048, 2049, 5000, 0x1_0001].map(|len| (low, len)));
            for (low, len) in parts {
                let from = span(SOURCE + low, len);
                let kept = low & request.keep_bits;
                let fits = request.boundary.is_none_or(|size| kept % size + len <= size);
                let taken = pool.take(original(from.paddr().get(), len), &request);
                assert_eq!(taken.is_ok(), fits, "{from} for {request:x?}");
                if let Ok(slot) = taken {
                    let (first, last) = (slot.span().paddr().get(), slot.span().last().get());
                    assert_eq!((first & request.keep_bits, last - first), (kept, len - 1));
                    assert!(request.boundary.is_none_or(|size| first / size == last / size));
                    let unit = request.granule.max(request.keep_bits + 1).max(SLOT);
                    let granule = request.granule.max(SLOT);
                    let start = first & !(granule - 1);
                    let whole = span(start, (last | (granule - 1)) - start + 1);
                    let given = memory.given();
                    assert!(given.len() == 1 && inside(whole, given[0]), "{whole}");
                    let room = memory.1.lock().room.unwrap();
                    assert_eq!(room.bytes, (kept + len).next_multiple_of(unit));
                    assert_eq!((room.last, pool.stats().single), (request.last, room.bytes));
                    pool.release(slot).unwrap();
                }
                assert_eq!((memory.given(), pool.stats().single), (Vec::new(), 0));
            }
        }
    }
}

#[test]
fn memory_of_another_length_or_place_than_was_asked_for_goes_back_and_does_not_count() {
    let (pool, memory, _held) = full(8);
    let bytes = 8 * SLOT;
    let wrong = [
        span(OBTAINED, bytes - SLOT),
        span(OBTAINED, bytes + SLOT),
        span(OBTAINED, 1),
        span(OBTAINED + 64, bytes),
    ];
    for wrong in wrong {
        memory.1.lock().wrong = Some(wrong);
        assert_eq!(pool.grow(), Err(Error::NoMemory { bytes }), "{wrong}");
        assert_eq!((memory.given(), pool.stats().bytes), (Vec::new(), bytes));
        memory.1.lock().wrong = Some(wrong);
        let refused = pool.take(original(SOURCE, bytes), &any()).unwrap_err();
        assert_eq!(refused, Error::TooLong { len: bytes, max: 4 * SLOT });
        assert_eq!((memory.given(), pool.stats().single), (Vec::new(), 0));
        // All of the limit is left.
        assert_eq!(pool.grow(), Ok(memory.given()[0]));
        assert_eq!((pool.stats().grown, pool.shrink()), (bytes, bytes));
        let single = take(&pool, 8).unwrap();
        assert_eq!(memory.given(), [single.span()]);
        pool.release(single).unwrap();
    }
    assert_eq!((memory.given(), pool.stats().leaked), (Vec::new(), 0));
}

#[test]
fn a_pool_that_is_not_to_grow_says_so_and_wakes_nobody() {
    let (pool, memory, _held) = full(0);
    assert_eq!(take(&pool, 1).unwrap_err(), Error::Full { len: SLOT, free: 0 });
    assert_eq!(memory.pressed(), 1);
    let config = PoolConfig::new(1);
    let never = Arc::new(Pool::new(memory.clone(), config, Place::default()).unwrap());
    assert_eq!(never.grow(), Err(Error::GrowthLimit { bytes: 0, limit: 0 }));
    let _held = [(); 2].map(|()| take(&never, 4).unwrap());
    assert_eq!(take(&never, 1).unwrap_err(), Error::Full { len: SLOT, free: 0 });
    assert_eq!(memory.pressed(), 1);
}

#[test]
fn whoever_grows_a_pool_is_woken_where_all_that_it_has_is_full() {
    let (pool, memory, mut held) = full(20);
    assert_eq!(memory.pressed(), 0);
    pool.grow().unwrap();
    held.extend((0..8).map(|_| take(&pool, 1).unwrap()));
    assert_eq!(memory.pressed(), 0);
    for pressed in 1..=3 {
        held.push(take(&pool, 1).unwrap());
        assert_eq!((memory.pressed(), pool.stats().single), (pressed, u64::from(pressed) * SLOT));
    }
    held.into_iter().for_each(|slot| pool.release(slot).unwrap());
}

#[test]
fn memory_of_one_request_is_listed_until_that_one_is_released() {
    let (pool, memory, _held) = full(20);
    let listed = || -> Vec<_> {
        let single = |place: &SlotPlace| *place == SlotPlace::Single;
        pool.list().filter(|run| single(&run.place)).map(|run| run.span).collect()
    };
    for released in 0..4 {
        let mut singles: Vec<_> = (1..5).map(|slots| take(&pool, slots).unwrap()).collect();
        assert_eq!(listed(), memory.given());
        pool.release(singles.remove(released)).unwrap();
        let left: Vec<_> = singles.iter().map(|slot| slot.span()).collect();
        assert_eq!(listed(), left);
        assert_eq!(memory.given(), left);
        singles.into_iter().for_each(|slot| pool.release(slot).unwrap());
        assert_eq!(listed(), []);
    }
}

#[test]
fn the_most_of_what_was_added_is_counted_anew() {
    let (pool, _, held) = full(8);
    pool.grow().unwrap();
    let [long, short] = [5, 2].map(|slots| take(&pool, slots).unwrap());
    pool.release(long).unwrap();
    assert_eq!(pool.stats().high_water, (8 + 7) * SLOT);
    pool.reset_high_water();
    assert_eq!(pool.stats().high_water, (8 + 2) * SLOT);
    held.into_iter().chain([short]).for_each(|slot| pool.release(slot).unwrap());
}

#[test]
fn a_pool_owns_what_it_began_with_and_leases_of_what_was_added_while_there_are_some() {
    let (pool, memory, mut held) = full(40);
    let elsewhere = span(OBTAINED - SLOT, SLOT);
    let never_added = |pool: &MeagrePool| {
        let mut own = memory.0.iter().flat_map(|span| [*span, last_of(*span)]);
        assert!(own.all(|span| owns(pool, span)));
        assert_eq!(locks_of(|| owns(pool, elsewhere)), (0, false));
    };
    never_added(&pool);
    // One of what it began with is not recorded.
    pool.release(held.remove(0)).unwrap();
    let (locks, base) = locks_of(|| pool.lease(SLOT, &any()).unwrap());
    assert_eq!(locks, 2, "the area's, as the slot is taken and as it is marked");
    never_added(&pool);
    assert_eq!(locks_of(|| drop(base)).0, 2);
    let own = take(&pool, 4).unwrap();

    let added = pool.grow().unwrap();
    never_added(&pool);
    let owns = |at: Span| owns(&pool, at);
    assert!(!owns(added));
    for dropped in 0..4 {
        let mut leases: Vec<_> =
            [3, 3, 9, 10].map(|slots| pool.lease(slots * SLOT, &any()).unwrap()).into();
        assert!(leases.iter().all(|lease| owns(lease.span()) && owns(last_of(lease.span()))));
        assert!(!owns(added) && !owns(elsewhere));
        let gone = leases.remove(dropped).span();
        assert!(!owns(gone), "{gone} is nobody's");
        assert!(leases.iter().all(|lease| owns(lease.span())));
        drop(leases);
        never_added(&pool);
    }
    held.push(own);
    held.into_iter().for_each(|slot| pool.release(slot).unwrap());
}

/// The last byte.
fn last_of(of: Span) -> Span {
    span(of.last().get(), 1)
}

#[test]
fn without_memory_for_a_record_a_lease_and_memory_for_one_request_go_back() {
    let (pool, memory, _held) = full(20);
    let before = pool.stats();
    fail(1);
    let refused = take(&pool, 2);
    assert!(fail(0) <= 0);
    assert_eq!(refused.unwrap_err(), Error::Full { len: 2 * SLOT, free: 0 });
    assert_eq!((pool.stats(), memory.given()), (before, Vec::new()));

    let added = pool.grow().unwrap();
    let used = pool.stats().used;
    fail(1);
    let refused = pool.lease(2 * SLOT, &any());
    assert!(fail(0) <= 0);
    assert_eq!(refused.unwrap_err(), Error::NoMemory { bytes: 2 * SLOT });
    assert_eq!((pool.stats().used, pool.list().count()), (used, 2));
    let elsewhere = span(OBTAINED - SLOT, SLOT);
    assert_eq!(locks_of(|| owns(&pool, elsewhere)), (0, false));
    let all = take(&pool, 8).unwrap();
    assert_eq!(all.span(), added);
    pool.release(all).unwrap();
}

#[test]
fn a_pool_without_memory_for_its_records_names_the_span_that_it_is_for() {
    let spans = [0, 1, 2].map(|n| span(n << 20, (4 << n) * SLOT));
    let (_, memory, _held) = full(0);
    let memory = Meagre(spans.into(), Arc::clone(&memory.1));
    let make = |memory, place| Pool::new(memory, PoolConfig::new(2), place);
    let (given, place) = (memory.clone(), Place::default());
    let (made, allocated) = allocated(|| make(given, place));
    drop(made.unwrap());
    // The first one is for the memory itself, the last one for what tells the pool from others.
    let last = i64::try_from(allocated.count).unwrap();
    let mut named = Vec::new();
    for n in 2..last {
        let (memory, place) = (memory.clone(), Place::default());
        fail(n);
        let made = make(memory, place);
        assert_eq!(fail(0), 0);
        let Error::NoMemory { bytes } = made.unwrap_err() else { panic!("another error") };
        named.push(bytes);
    }
    assert_eq!(named[0], spans[0].len(), "the list of all");
    assert!(named.is_sorted());
    named.dedup();
    assert_eq!(named, spans.map(Span::len));
}
