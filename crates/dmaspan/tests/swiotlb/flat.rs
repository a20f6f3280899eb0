//! Memory of a pool that is an array, at any address, and locks that count.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use dmaspan::swiotlb::{
    Error, HostRefused, InSlot, Pool, PoolConfig, PoolMemory, Room, SlotOf, Transfer,
};
use dmaspan::{PhysAddr, Platform, Promise, Span};
use parking_lot::Mutex;

use crate::common::span;

/// What memory is before anything was written.
pub(crate) const POISON: u8 = 0xa5;
/// Where memory for growth is.
const GROWTH: u64 = 0x8000_0000_0000;

thread_local! {
    /// How often this thread took a lock.
    static LOCKS: Cell<u64> = const { Cell::new(0) };
}

/// How many locks `run` takes.
pub(crate) fn locks_of<T>(run: impl FnOnce() -> T) -> (u64, T) {
    let before = LOCKS.get();
    let result = run();
    (LOCKS.get() - before, result)
}

/// A lock that counts how often it is taken.
pub(crate) struct Counted(parking_lot::RawMutex);

// SAFETY: it is the lock inside.
unsafe impl lock_api::RawMutex for Counted {
    const INIT: Self = Self(<parking_lot::RawMutex as lock_api::RawMutex>::INIT);

    type GuardMarker = lock_api::GuardNoSend;

    fn lock(&self) {
        LOCKS.set(LOCKS.get() + 1);
        self.0.lock();
    }

    fn try_lock(&self) -> bool {
        let taken = self.0.try_lock();
        LOCKS.set(LOCKS.get() + u64::from(taken));
        taken
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller holds the lock.
        unsafe { self.0.unlock() }
    }
}

/// A platform whose CPU and node the test sets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place(Arc<(AtomicUsize, AtomicUsize)>);

impl Place {
    pub(crate) fn set(&self, cpu: usize, node: usize) {
        self.0.0.store(cpu, Ordering::Relaxed);
        self.0.1.store(node, Ordering::Relaxed);
    }
}

impl Platform for Place {
    type Lock = Counted;

    fn cpu(&self) -> usize {
        self.0.0.load(Ordering::Relaxed)
    }

    fn node(&self) -> usize {
        self.0.1.load(Ordering::Relaxed)
    }

    fn now(&self) -> u64 {
        0
    }
}

/// Arrays of bytes at addresses, by their first one.
pub(crate) type Bytes = Vec<(u64, Vec<u8>)>;

/// The array of a span, and where in it the span begins.
pub(crate) fn find(bytes: &Bytes, at: Span) -> (usize, usize, usize) {
    let (start, last) = (at.paddr().get(), at.last().get());
    let inside = |(base, bytes): &(u64, Vec<u8>)| {
        start >= *base && last - base < u64::try_from(bytes.len()).unwrap()
    };
    let index = bytes.iter().position(inside).unwrap_or_else(|| panic!("{at} is nowhere"));
    let from = usize::try_from(start - bytes[index].0).unwrap();
    (index, from, from + usize::try_from(at.len()).unwrap())
}

pub(crate) fn part(bytes: &Bytes, at: Span) -> &[u8] {
    let (index, from, to) = find(bytes, at);
    &bytes[index].1[from..to]
}

pub(crate) fn part_mut(bytes: &mut Bytes, at: Span) -> &mut [u8] {
    let (index, from, to) = find(bytes, at);
    &mut bytes[index].1[from..to]
}

/// The memory.
#[derive(Clone)]
pub(crate) struct Flat {
    spans: Vec<Span>,
    state: Arc<Mutex<State>>,
    /// The answers of the host that are no.
    pub(crate) refuse: Arc<(AtomicBool, AtomicBool)>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) bytes: Bytes,
    pub(crate) shared: Vec<Span>,
    next: u64,
}

impl Flat {
    pub(crate) fn new(spans: Vec<Span>, originals: Span) -> Self {
        let array =
            |at: &Span| (at.paddr().get(), vec![POISON; usize::try_from(at.len()).unwrap()]);
        let bytes = spans.iter().chain([&originals]).map(array).collect();
        let state = State { bytes, next: GROWTH, ..State::default() };
        Self { spans, state: Arc::new(Mutex::new(state)), refuse: Arc::default() }
    }

    pub(crate) fn with<T>(&self, run: impl FnOnce(&mut State) -> T) -> T {
        run(&mut self.state.lock())
    }

    pub(crate) fn read(&self, at: Span) -> Vec<u8> {
        self.with(|state| part(&state.bytes, at).to_vec())
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        let at = span(at, u64::try_from(bytes.len()).unwrap());
        self.with(|state| part_mut(&mut state.bytes, at).copy_from_slice(bytes));
    }

    /// How many values of this memory there are, leaked ones included.
    pub(crate) fn values(&self) -> usize {
        Arc::strong_count(&self.state)
    }
}

// SAFETY: the arrays are the pool's alone, and every access is checked.
unsafe impl PoolMemory for Flat {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.spans
    }

    fn copy(&self, transfer: Transfer) {
        let bytes = self.read(span(transfer.source().get(), transfer.len()));
        self.write(transfer.target().get(), &bytes);
    }

    fn zero(&self, bytes: InSlot) {
        self.with(|state| part_mut(&mut state.bytes, bytes.span()).fill(0));
    }

    fn read(&self, bytes: InSlot, into: &mut [u8]) {
        self.with(|state| into.copy_from_slice(part(&state.bytes, bytes.span())));
    }

    fn write(&self, bytes: InSlot, from: &[u8]) {
        self.with(|state| part_mut(&mut state.bytes, bytes.span()).copy_from_slice(from));
    }

    fn allocate(&self, room: Room) -> Option<Span> {
        if room.bytes > 1 << 24 {
            return None;
        }
        self.with(|state| {
            let start = state.next.checked_next_multiple_of(room.align)?;
            let last = start.checked_add(room.bytes - 1)?;
            if last > room.last {
                return None;
            }
            state.next = last.checked_add(0x1_0001)? & !0xffff;
            state.bytes.push((start, vec![POISON; usize::try_from(room.bytes).unwrap()]));
            Some(span(start, room.bytes))
        })
    }

    fn free(&self, _promise: Promise<'_>, at: Span) {
        self.with(|state| {
            assert!(!state.shared.contains(&at), "{at} is freed and the host sees it");
            let (index, from, to) = find(&state.bytes, at);
            assert_eq!((from, to), (0, state.bytes[index].1.len()), "a part is freed");
            state.bytes.remove(index);
        });
    }

    fn share(&self, _promise: Promise<'_>, span: Span) -> Result<(), HostRefused> {
        if self.refuse.0.load(Ordering::Relaxed) {
            return Err(HostRefused);
        }
        self.with(|state| {
            assert!(!state.shared.contains(&span), "{span} is shared twice");
            state.shared.push(span);
        });
        Ok(())
    }

    fn unshare(&self, _promise: Promise<'_>, span: Span) -> Result<(), HostRefused> {
        if self.refuse.1.load(Ordering::Relaxed) {
            return Err(HostRefused);
        }
        self.with(|state| {
            let index = state.shared.iter().position(|shared| *shared == span);
            state.shared.swap_remove(index.expect("it was shared"));
        });
        Ok(())
    }
}

pub(crate) type FlatPool = Pool<Flat, Place>;
pub(crate) type FlatSlot = SlotOf<Place>;

/// A pool in such memory.
pub(crate) struct FlatRig {
    pub(crate) memory: Flat,
    pub(crate) place: Place,
    pub(crate) pool: Arc<FlatPool>,
}

/// Where originals are.
pub(crate) const SOURCE: u64 = 0x4000_0000_0000;
/// How many bytes of them there are.
pub(crate) const SOURCE_BYTES: u64 = 1 << 20;

impl FlatRig {
    pub(crate) fn new(spans: Vec<Span>, config: PoolConfig) -> Self {
        Self::try_new(spans, config).unwrap()
    }

    pub(crate) fn try_new(spans: Vec<Span>, config: PoolConfig) -> Result<Self, Error> {
        let memory = Flat::new(spans, span(SOURCE, SOURCE_BYTES));
        let place = Place::default();
        let pool = Arc::new(Pool::new(memory.clone(), config, place.clone())?);
        Ok(Self { memory, place, pool })
    }

    /// A span of so many slots, somewhere.
    pub(crate) fn simple(slots: u64, config: PoolConfig) -> Self {
        Self::new(vec![span(0x10_0000, slots * config.slot_bytes)], config)
    }
}

/// Bytes of a span that is part of another one, at an offset.
pub(crate) fn within(at: Span, offset: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(at.paddr().get() + offset), len).unwrap()
}

/// Memory that nobody looks at, and which finds no original at [`NOWHERE`].
pub(crate) struct Nothing(Span);

pub(crate) const NOWHERE: u64 = 0x1234_5678_9abc_d000;

// SAFETY: it is never accessed.
unsafe impl PoolMemory for Nothing {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        std::slice::from_ref(&self.0)
    }

    fn can_copy(&self, original: Span) -> bool {
        original.paddr().get() != NOWHERE
    }

    fn copy(&self, _: Transfer) {}

    fn zero(&self, bytes: InSlot) {
        assert!(self.0.paddr() <= bytes.span().paddr() && bytes.span().last() <= self.0.last());
    }

    fn read(&self, _: InSlot, _: &mut [u8]) {}

    fn write(&self, _: InSlot, _: &[u8]) {}
}

/// A pool of a span, without any bytes.
pub(crate) fn small(span: Span, slot_bytes: u64) -> Pool<Nothing, Place> {
    let config = PoolConfig { slot_bytes, ..PoolConfig::new(3) };
    Pool::new(Nothing(span), config, Place::default()).unwrap()
}
