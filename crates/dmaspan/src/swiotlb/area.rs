//! An area is a part of a pool, with a lock of its own.

use lock_api::{Mutex, MutexGuard, RawMutex};

use super::bitmap::Bitmap;
use super::marks::{Mark, Marks};
use super::recent::Recent;
use super::request::Fit;
use crate::atomic::{AtomicU32, Ordering};

/// Slots that a CPU takes before those of others. It stands on cache lines of its own, and so does
/// what it allocates.
///
/// The counters are written under the lock and read without it: by plain loads and stores, so that
/// nothing but the lock is atomic where slots are taken and released.
pub(super) struct Area<L> {
    /// How many slots are free.
    free: AtomicU32,
    /// No run is as long, since a search found none and nothing was released.
    hopeless: AtomicU32,
    /// How often slots were released, wrapping.
    released: AtomicU32,
    /// The most slots that were ever held.
    high: AtomicU32,
    /// What slots are counted from in the chunk.
    offset: u32,
    state: Mutex<L, State>,
}

/// What the lock guards.
#[derive(Debug)]
pub(super) struct State {
    pub(super) bitmap: Bitmap,
    recent: Recent,
    marks: Marks,
}

impl<L: RawMutex> Area<L> {
    /// An area of so many slots, all free; `None` where there is no memory.
    pub(super) fn new(offset: u32, slots: u32) -> Option<Self> {
        let (bitmap, recent) = (Bitmap::new(slots)?, Recent::new(slots)?);
        let state = State { bitmap, recent, marks: Marks::new(slots)? };
        Some(Self {
            free: AtomicU32::new(slots),
            hopeless: AtomicU32::new(u32::MAX),
            released: AtomicU32::new(0),
            high: AtomicU32::new(0),
            offset,
            state: Mutex::new(state),
        })
    }

    /// How many slots are free.
    #[inline(always)]
    pub(super) fn free(&self) -> u32 {
        self.free.load(Ordering::Acquire)
    }

    /// How often slots were released, wrapping.
    #[inline(always)]
    pub(super) fn released(&self) -> u32 {
        self.released.load(Ordering::Acquire)
    }

    /// The most slots that were ever held.
    pub(super) fn high(&self) -> u32 {
        self.high.load(Ordering::Relaxed)
    }

    /// Counts the most slots anew.
    pub(super) fn reset_high(&self) {
        let state = self.state.lock();
        self.high.store(state.bitmap.slots() - self.free(), Ordering::Relaxed);
    }

    /// Whether there may be a run of so many slots: a look that takes no lock.
    #[inline(always)]
    pub(super) fn may_have(&self, count: u32) -> bool {
        count <= self.free() && count < self.hopeless.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(super) fn lock(&self) -> MutexGuard<'_, L, State> {
        self.state.lock()
    }

    #[inline(always)]
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, L, State>> {
        self.state.try_lock()
    }

    /// Takes the run released last, if it is exactly so long; its first slot, as the chunk counts.
    #[inline(always)]
    pub(super) fn take_latest(&self, state: &mut State, count: u32) -> Option<u32> {
        let State { bitmap, recent, .. } = state;
        let first = recent.take_latest(count, bitmap)?;
        self.count_taken(state, count);
        Some(first + self.offset)
    }

    /// Takes a run that fits, the latest first; its first slot, as the chunk counts.
    pub(super) fn take(&self, state: &mut State, fit: &Fit) -> Option<u32> {
        let State { bitmap, recent, .. } = state;
        let first = match recent.take(fit, self.offset, bitmap) {
            Some(first) => first,
            None => self.search(state, fit)?,
        };
        self.count_taken(state, fit.count);
        Some(first + self.offset)
    }

    /// Takes the lowest run that fits.
    #[cold]
    fn search(&self, state: &mut State, fit: &Fit) -> Option<u32> {
        let State { bitmap, recent, .. } = state;
        let Some(first) = bitmap.find(fit, self.offset) else {
            if fit.is_plain() {
                let hopeless = self.hopeless.load(Ordering::Relaxed).min(fit.count);
                self.hopeless.store(hopeless, Ordering::Relaxed);
            }
            return None;
        };
        bitmap.take(first, fit.count);
        // What follows serves the next ones without a search.
        let behind = first + fit.count;
        let most = behind.saturating_add(LOOK_AHEAD).min(bitmap.slots());
        let end = bitmap.next_taken(behind, most).unwrap_or(most);
        recent.push(behind, end - behind);
        Some(first)
    }

    /// Takes slots that are known to be free, for a run over several areas.
    pub(super) fn take_at(&self, state: &mut State, first: u32, count: u32) {
        state.bitmap.take(first - self.offset, count);
        self.count_taken(state, count);
    }

    #[inline(always)]
    fn count_taken(&self, state: &State, count: u32) {
        let free = self.free.load(Ordering::Relaxed) - count;
        self.free.store(free, Ordering::Release);
        let used = state.bitmap.slots() - free;
        if used > self.high.load(Ordering::Relaxed) {
            self.high.store(used, Ordering::Relaxed);
        }
    }

    /// Marks slots that are held, counted as the chunk does, or takes the mark away.
    pub(super) fn mark(&self, mark: Option<Mark>, first: u32, count: u32) {
        self.state.lock().marks.set(mark, first - self.offset, count);
    }

    /// The first run from `from` on, as the chunk counts, of slots that are held and have one mark:
    /// where it begins and ends.
    pub(super) fn next_held(&self, from: u32) -> Option<(u32, u32, Option<Mark>)> {
        let State { bitmap, marks, .. } = &*self.state.lock();
        let first = bitmap.next_taken(from - self.offset, bitmap.slots())?;
        let end = bitmap.next_free(first).unwrap_or(bitmap.slots());
        let end = marks.run_end(first, end);
        Some((first + self.offset, end + self.offset, marks.of(first)))
    }

    /// Releases slots, counted as the chunk does.
    #[inline(always)]
    pub(super) fn give(&self, first: u32, count: u32) {
        let mut state = self.state.lock();
        let first = first - self.offset;
        state.bitmap.give(first, count);
        state.recent.push(first, count);
        self.hopeless.store(u32::MAX, Ordering::Relaxed);
        self.free.store(self.free.load(Ordering::Relaxed) + count, Ordering::Release);
        let released = self.released.load(Ordering::Relaxed);
        self.released.store(released.wrapping_add(1), Ordering::Release);
    }
}

/// How many slots behind a run that was searched for are remembered as free.
const LOOK_AHEAD: u32 = 1024;

#[cfg(test)]
mod tests {
    use super::super::request::{Grid, SlotRequest};
    use super::*;
    use crate::addr::PhysAddr;
    use crate::platform::Flag;
    use crate::span::Span;

    const OFFSET: u32 = 128;
    const SLOTS: u32 = 4096;

    /// So many slots, whose first is as much behind a multiple of two slots as `addr`.
    fn fit(addr: u64, keep_bits: u64, count: u32) -> Fit {
        let slots = OFFSET + SLOTS;
        let grid = Grid { base: 0, last: (u64::from(slots) << 11) - 1, slot_lg2: 11, slots };
        let original = Span::new(PhysAddr::new(addr), u64::from(count) << 11).unwrap();
        Fit::new(grid, original, &SlotRequest { keep_bits, ..SlotRequest::default() }).unwrap()
    }

    fn any(count: u32) -> Fit {
        fit(0, 0, count)
    }

    /// All slots are held, and no run is remembered.
    fn held() -> Area<Flag> {
        let area = Area::new(OFFSET, SLOTS).unwrap();
        assert_eq!(area.take(&mut area.lock(), &any(SLOTS)), Some(OFFSET));
        area
    }

    #[test]
    fn what_follows_a_run_that_was_searched_for_is_remembered_as_far_as_it_is_free() {
        // Where slots are free, and where what is remembered ends.
        for (first, free, end) in [(2, 8, 10), (100, 2000, 1126), (4000, 96, 4096), (7, 2, 9)] {
            let area = held();
            let mut state = area.lock();
            state.bitmap.give(first, free);
            area.free.store(free, Ordering::Relaxed);
            assert_eq!(area.take(&mut state, &any(2)), Some(OFFSET + first));
            let State { bitmap, recent, .. } = &mut *state;
            let behind = first + 2;
            let expected = (behind < end).then_some(behind);
            assert_eq!(recent.take_latest(end - behind, bitmap), expected, "from {first}");
            assert_eq!(recent.take(&any(1), OFFSET, bitmap), None, "from {first}");
        }
    }

    #[test]
    fn the_run_released_last_is_taken_by_its_length_alone_and_counted() {
        let area = held();
        area.give(OFFSET + 5, 7);
        assert_eq!((area.free(), area.released()), (7, 1));
        assert_eq!(area.take_latest(&mut area.lock(), 7), Some(OFFSET + 5));
        assert_eq!((area.free(), area.high()), (0, SLOTS));
    }

    #[test]
    fn a_length_that_was_searched_for_in_vain_has_no_hope_until_slots_are_released() {
        let area = held();
        let take = |fit: Fit| area.take(&mut area.lock(), &fit);
        let has_hope = || [1, 2, 3, 4].map(|count| area.may_have(count));
        for slot in (0..SLOTS).step_by(2) {
            area.give(OFFSET + slot, 1);
        }
        // That no slot is free where a run may begin says nothing of others.
        assert_eq!(take(fit(0x800, 0xfff, 1)), None);
        assert_eq!(has_hope(), [true; 4]);
        assert_eq!(take(any(3)), None);
        assert_eq!(has_hope(), [true, true, false, false]);
        assert_eq!(take(any(2)), None);
        assert_eq!(take(any(3)), None);
        assert_eq!(has_hope(), [true, false, false, false]);
        area.give(OFFSET + 1, 1);
        assert_eq!(has_hope(), [true; 4]);
        assert_eq!(take(any(3)), Some(OFFSET));
    }
}
