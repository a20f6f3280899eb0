//! A pool of bounce slots in simulated memory.
//!
//! This pool finds a slot by trying every place, which shows what any pool could have found; and it
//! fills slots that come back with [`POISON`], so that data of former holders shows wherever it
//! leaks.

use std::sync::Arc;

use dmaspan::dma::BouncePool;
use dmaspan::swiotlb::{Original, SlotRequest, To};
use dmaspan::{PhysAddr, Span, lg2};
use parking_lot::Mutex;

use crate::memory::{AllocError, SimMemory};

/// What the bytes of a slot are before it was filled.
pub const POISON: u8 = 0xa5;

/// Places are tried at multiples of so many bytes, plus the bits that are kept.
const STEP: u64 = 64;
/// Of how many originals with other kept bits the longest slot is sought.
const KEPT_TRIED: u64 = 64;

/// Slots in a piece of simulated memory. Clones are the same pool.
#[derive(Clone, Debug)]
pub struct SimPool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    memory: Arc<SimMemory>,
    span: Span,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What is held, padding included, and what never comes back.
    held: Vec<Span>,
    quarantined: usize,
    lost: usize,
    copies: Copies,
}

/// Says what was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Copies {
    /// How often into slots.
    pub to_slots: u64,
    /// How often out of slots.
    pub to_originals: u64,
    /// How many bytes in all.
    pub bytes: u64,
}

/// A slot of a [`SimPool`], which counts as lost where it is dropped.
#[derive(Debug)]
pub struct SimSlot {
    /// Taken when it is released or put into quarantine.
    pool: Option<Arc<Shared>>,
    span: Span,
    original: Original,
    /// The slot with its padding.
    whole: Span,
}

impl SimPool {
    /// A pool of the frames of `span`, which nobody else uses. It allocates and pins them.
    ///
    /// # Errors
    ///
    /// [`AllocError`] where they are not free.
    pub fn new(memory: Arc<SimMemory>, span: Span) -> Result<Self, AllocError> {
        memory.allocate_at(span)?;
        memory.pin_frames(&[span]);
        let shared = Shared { memory, span, state: Mutex::default() };
        shared.memory.fill(span, POISON);
        Ok(Self(Arc::new(shared)))
    }

    /// Returns where its slots are.
    pub fn span(&self) -> Span {
        self.0.span
    }

    /// Returns how many slots are held, those in quarantine and those that were lost included.
    pub fn held(&self) -> usize {
        self.0.state.lock().held.len()
    }

    /// Returns how many are in quarantine.
    pub fn quarantined(&self) -> usize {
        self.0.state.lock().quarantined
    }

    /// Returns how many were dropped, and neither released nor put into quarantine.
    pub fn lost(&self) -> usize {
        self.0.state.lock().lost
    }

    /// Returns what was copied so far.
    pub fn copies(&self) -> Copies {
        self.0.state.lock().copies
    }
}

impl Shared {
    /// A slot at `place` with its padding, where that is legal and free.
    fn at(
        &self,
        place: u64,
        len: u64,
        request: &SlotRequest,
        held: &[Span],
    ) -> Option<(Span, Span)> {
        let slot = Span::new(PhysAddr::new(place), len).ok()?;
        let (first, last) = (place, slot.last().get());
        let first_whole = lg2::align_down(first, request.granule.ilog2());
        let last_whole = last | (request.granule - 1);
        let len = (last_whole - first_whole).checked_add(1)?;
        let whole = Span::new(PhysAddr::new(first_whole), len).ok()?;
        let is_ours = self.span.paddr() <= whole.paddr() && whole.last() <= self.span.last();
        let crosses = request.boundary.is_some_and(|bytes| first / bytes != last / bytes);
        let free = held.iter().all(|h| h.last() < whole.paddr() || whole.last() < h.paddr());
        (is_ours && last <= request.last && !crosses && free).then_some((slot, whole))
    }

    /// A slot for `original` with its padding, beside what is held.
    fn find(&self, original: Span, request: &SlotRequest, held: &[Span]) -> Option<(Span, Span)> {
        let kept = original.paddr().get() & request.keep_bits;
        // Places that have the kept bits lie so far apart at least.
        let step = request.keep_bits.checked_add(1)?.checked_next_power_of_two()?;
        let step = step.max(STEP).max(request.granule);
        let first = lg2::align_down(self.span.paddr().get(), step.ilog2());
        let last = self.span.last().get();
        let mut places = (first..=last).step_by(usize::try_from(step).ok()?);
        places.find_map(|place| self.at(place + kept, original.len(), request, held))
    }

    /// Whether an empty pool has a slot of so many bytes for every original.
    fn has(&self, len: u64, request: &SlotRequest) -> bool {
        let keep_bits = request.keep_bits;
        let step = usize::try_from(keep_bits / KEPT_TRIED + 1).unwrap_or(usize::MAX);
        let mut all = (0..keep_bits).step_by(step).chain([keep_bits]);
        all.all(|kept| {
            let original = Span::new(PhysAddr::new(kept), len);
            original.is_ok_and(|original| self.find(original, request, &[]).is_some())
        })
    }
}

#[expect(unsafe_code, reason = "slots are of memory that the pool alone uses")]
// SAFETY: the pool allocated its memory, `take` finds what no other slot has, padding included, and
// only `release` gives it back. `copy` keeps to the slot and its original.
unsafe impl BouncePool for SimPool {
    type Slot = SimSlot;

    fn take(&self, original: Original, request: &SlotRequest) -> Option<SimSlot> {
        let mut state = self.0.state.lock();
        let (span, whole) = self.0.find(original.span(), request, &state.held)?;
        state.held.push(whole);
        drop(state);
        let before = span.paddr().get() - whole.paddr().get();
        let after = whole.last().get() - span.last().get();
        let behind = PhysAddr::new(span.last().get().wrapping_add(1));
        for (paddr, len) in [(whole.paddr(), before), (behind, after)] {
            if let Ok(padding) = Span::new(paddr, len) {
                self.0.memory.fill(padding, 0);
            }
        }
        Some(SimSlot { pool: Some(Arc::clone(&self.0)), span, original, whole })
    }

    fn release(&self, mut slot: SimSlot) {
        let pool = slot.pool.take().expect("a slot is released once");
        assert!(Arc::ptr_eq(&pool, &self.0), "{slot:?} is of another pool");
        pool.memory.fill(slot.whole, POISON);
        let mut state = pool.state.lock();
        let index = state.held.iter().position(|held| *held == slot.whole);
        state.held.swap_remove(index.expect("a slot is held until it is released"));
    }

    fn quarantine(&self, mut slot: SimSlot) {
        let pool = slot.pool.take().expect("a slot is put into quarantine once");
        assert!(Arc::ptr_eq(&pool, &self.0), "{slot:?} is of another pool");
        pool.state.lock().quarantined += 1;
    }

    fn span(&self, slot: &SimSlot) -> Span {
        slot.span
    }

    fn copy(&self, slot: &SimSlot, offset: u64, len: u64, to: To) {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= slot.span.len()), "{len} bytes at {offset}");
        let place = |span: Span| PhysAddr::new(span.paddr().get() + offset);
        let (from, into) = match to {
            To::Slot => (place(slot.original.span()), place(slot.span)),
            To::Original => (place(slot.span), place(slot.original.span())),
        };
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        self.0.memory.get_bytes(from, &mut bytes);
        self.0.memory.put_bytes(into, &bytes);
        let copies = &mut self.0.state.lock().copies;
        match to {
            To::Slot => copies.to_slots += 1,
            To::Original => copies.to_originals += 1,
        }
        copies.bytes += len;
    }

    fn reach(&self) -> Option<Span> {
        Some(self.0.span)
    }

    fn owns(&self, span: Span) -> bool {
        self.0.span.paddr() <= span.paddr() && span.last() <= self.0.span.last()
    }

    fn max_len(&self, request: &SlotRequest) -> u64 {
        let (mut least, mut most) = (0, self.0.span.len());
        while least < most {
            let middle = least + (most - least).div_ceil(2);
            if self.0.has(middle, request) { least = middle } else { most = middle - 1 }
        }
        least
    }

    fn granules(&self, granule: u64) -> u64 {
        let request = SlotRequest { granule, ..SlotRequest::default() };
        let mut held = Vec::new();
        let original = Span::new(PhysAddr::new(0), granule);
        while let Ok(original) = original
            && let Some((_, whole)) = self.0.find(original, &request, &held)
        {
            held.push(whole);
        }
        held.len() as u64
    }
}

impl Drop for SimSlot {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.state.lock().lost += 1;
        }
    }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "tests promise to keep memory that nobody has")]
mod tests {
    use super::*;

    fn span(paddr: u64, len: u64) -> Span {
        Span::new(PhysAddr::new(paddr), len).unwrap()
    }

    fn pool() -> (SimPool, Arc<SimMemory>) {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(0x10_0000), 0x20_0000, 12).unwrap());
        let pool = SimPool::new(Arc::clone(&memory), span(0x10_0000, 0x8000)).unwrap();
        (pool, memory)
    }

    fn original(paddr: u64, len: u64) -> Original {
        // SAFETY: no test frees it, and nothing refers to simulated memory.
        unsafe { Original::new(span(paddr, len)) }
    }

    #[test]
    fn a_slot_keeps_bits_its_boundary_and_its_limit() {
        let (pool, _) = pool();
        let take = |asked| pool.take(original(0x20_0234, 0x700), &asked);
        let any = SlotRequest::default();
        let asked = SlotRequest { keep_bits: 0xfff, boundary: Some(0x800), ..any };
        assert!(take(asked).is_none(), "0x234 + 0x700 crosses 0x800 wherever it is");
        let asked = SlotRequest { keep_bits: 0x3ff, ..asked };
        assert!(take(asked).is_none());
        let asked = SlotRequest { keep_bits: 0x3f, ..asked };
        assert_eq!(pool.max_len(&asked), 0x800 - 0x3f);
        let slot = take(asked).unwrap();
        assert_eq!(slot.span.paddr().get() & 0x3f, 0x34);
        assert_eq!(slot.span.paddr().get() / 0x800, slot.span.last().get() / 0x800);
        let take = |last| pool.take(original(0x20_0000, 0x900), &SlotRequest { last, ..any });
        assert!(take(slot.span.last().get()).is_none(), "{:?} is in the way", slot.span);
        pool.release(slot);
        assert_eq!(pool.max_len(&SlotRequest { last: 0x10_08fe, ..any }), 0x8ff);
        assert!(take(0x10_08fe).is_none());
        pool.release(take(0x10_08ff).unwrap());
        assert_eq!(pool.max_len(&any), 0x8000);
    }

    #[test]
    fn only_a_release_gives_a_slot_back() {
        let (pool, _) = pool();
        let take = || pool.take(original(0x20_0000, 0x4000), &SlotRequest::default());
        drop(take().unwrap());
        pool.quarantine(take().unwrap());
        assert!(take().is_none());
        assert_eq!((pool.held(), pool.lost(), pool.quarantined()), (2, 1, 1));
    }

    #[test]
    fn padding_is_zero_and_what_was_given_back_is_poison() {
        let (pool, memory) = pool();
        memory.cpu_write(PhysAddr::new(0x20_0100), &[7; 0x80]).unwrap();
        let asked = SlotRequest { keep_bits: 0x1ff, granule: 0x1000, ..SlotRequest::default() };
        let slot = pool.take(original(0x20_0100, 0x80), &asked).unwrap();
        let mut frame = [0; 0x1000];
        let mut look = || {
            memory.cpu_read(PhysAddr::new(0x10_0000), &mut frame).unwrap();
            frame
        };
        let fresh = look();
        assert!(fresh[..0x100].iter().chain(&fresh[0x180..]).all(|byte| *byte == 0));
        assert!(fresh[0x100..0x180].iter().all(|byte| *byte == POISON));
        pool.copy(&slot, 0x10, 0x20, To::Slot);
        assert_eq!(look()[0x10f..0x131], {
            let mut part = [7; 0x22];
            (part[0], part[0x21]) = (POISON, POISON);
            part
        });
        assert_eq!(pool.copies(), Copies { to_slots: 1, to_originals: 0, bytes: 0x20 });
        pool.release(slot);
        assert_eq!((look(), pool.held()), ([POISON; 0x1000], 0));
    }
}
