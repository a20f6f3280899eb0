//! An area remembers here which runs were given back last: those are still in the CPU's cache.
//!
//! They are hints: the bitmap alone says what is free. A hint whose slots were taken another way is
//! dropped when it is met, and nothing has to be drained before a request may fail.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::bitmap::{Bitmap, Lines};
use super::request::Fit;

/// How many runs of a size are remembered at most: more would be in no cache any more.
const DEPTH: u32 = 4096;

/// The last runs of lengths from 2^n to 2^(n + 1) - 1: a ring, so that the oldest is forgotten.
#[derive(Debug)]
struct Ring {
    runs: Lines<SlotRun>,
    mask: u32,
    /// Where the next one goes.
    head: u32,
    len: u32,
}

/// Slots that follow each other.
#[derive(Clone, Copy, Debug, Default)]
struct SlotRun {
    first: u32,
    count: u32,
}

impl Ring {
    fn new(slots: u32) -> Option<Self> {
        let runs = slots.clamp(16, DEPTH).next_power_of_two();
        Some(Self { runs: Lines::new(runs as usize)?, mask: runs - 1, head: 0, len: 0 })
    }

    #[inline(always)]
    fn push(&mut self, run: SlotRun) {
        *self.runs.at(self.head as usize) = run;
        self.head = (self.head + 1) & self.mask;
        self.len = (self.len + 1).min(self.mask + 1);
    }

    /// The one pushed last; there is one.
    #[inline(always)]
    fn top(&self) -> SlotRun {
        self.runs.get((self.head.wrapping_sub(1) & self.mask) as usize)
    }

    #[inline(always)]
    fn pop(&mut self) {
        self.head = self.head.wrapping_sub(1) & self.mask;
        self.len -= 1;
    }
}

/// The rings of an area.
#[derive(Debug)]
pub(super) struct Recent {
    rings: Box<[Ring]>,
    /// Which of them have runs.
    has: u32,
}

impl Recent {
    /// Of an area all of whose slots are free; `None` where there is no memory.
    pub(super) fn new(slots: u32) -> Option<Self> {
        let count = slots.ilog2() + 1;
        let mut rings = Vec::new();
        rings.try_reserve_exact(count as usize).ok()?;
        for class in 0..count {
            rings.push(Ring::new(slots >> class)?);
        }
        let mut recent = Self { rings: rings.into_boxed_slice(), has: 0 };
        recent.push(0, slots);
        Some(recent)
    }

    /// Remembers a run that is free.
    #[inline(always)]
    pub(super) fn push(&mut self, first: u32, count: u32) {
        if let Some(class) = count.checked_ilog2()
            && let Some(ring) = self.rings.get_mut(class as usize)
        {
            ring.push(SlotRun { first, count });
            self.has |= 1 << class;
        }
    }

    /// Takes the run released last out of the bitmap, of those about as long, if it is exactly as
    /// long: most requests are.
    #[inline(always)]
    pub(super) fn take_latest(&mut self, count: u32, bitmap: &mut Bitmap) -> Option<u32> {
        let class = count.checked_ilog2()?;
        if self.has & (1 << class) == 0 {
            return None;
        }
        let ring = self.rings.get_mut(class as usize)?;
        let run = ring.top();
        if run.count != count {
            return None;
        }
        ring.pop();
        if ring.len == 0 {
            self.has &= !(1 << class);
        }
        bitmap.try_take(run.first, count).then_some(run.first)
    }

    /// Takes the front of the latest run that fits out of the bitmap, whatever its length. `None`
    /// where the latest ones of all lengths do not fit.
    pub(super) fn take(&mut self, fit: &Fit, offset: u32, bitmap: &mut Bitmap) -> Option<u32> {
        let mut classes = self.has & (u32::MAX << fit.count.ilog2());
        while classes != 0 {
            let class = classes.trailing_zeros();
            while self.has & (1 << class) != 0 {
                let run = self.rings[class as usize].top();
                let end = run.first + run.count;
                let place = fit.next(run.first + offset).map(|first| first - offset);
                // A run that fits ends in the chunk.
                let Some(first) = place.filter(|first| first + fit.count <= end) else { break };
                self.pop(class);
                if bitmap.try_take(first, fit.count) {
                    self.push(run.first, first - run.first);
                    self.push(first + fit.count, end - (first + fit.count));
                    return Some(first);
                }
            }
            classes &= classes - 1;
        }
        None
    }

    #[inline(always)]
    fn pop(&mut self, class: u32) {
        let ring = &mut self.rings[class as usize];
        ring.pop();
        if ring.len == 0 {
            self.has &= !(1 << class);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::{Grid, SlotRequest};
    use super::*;
    use crate::addr::PhysAddr;
    use crate::span::Span;

    fn fit(count: u32, keep_bits: u64) -> Fit {
        let grid = Grid { base: 0, last: (1 << 21) - 1, slot_lg2: 11, slots: 1024 };
        let original = Span::new(PhysAddr::new(0), u64::from(count) << 11).unwrap();
        Fit::new(grid, original, &SlotRequest { keep_bits, ..SlotRequest::default() }).unwrap()
    }

    /// All slots are taken, and nothing is remembered.
    fn empty() -> (Bitmap, Recent) {
        let (mut bitmap, mut recent) = (Bitmap::new(1024).unwrap(), Recent::new(1024).unwrap());
        assert_eq!(recent.take(&fit(1024, 0), 0, &mut bitmap), Some(0));
        (bitmap, recent)
    }

    fn give(bitmap: &mut Bitmap, recent: &mut Recent, first: u32, count: u32) {
        bitmap.give(first, count);
        recent.push(first, count);
    }

    #[test]
    fn the_latest_run_of_a_length_is_taken_first_and_the_shortest_before_longer_ones() {
        let (mut bitmap, mut recent) = empty();
        for (first, count) in [(0, 2), (10, 2), (20, 8), (40, 2)] {
            give(&mut bitmap, &mut recent, first, count);
        }
        let mut take = |count| recent.take(&fit(count, 0), 0, &mut bitmap);
        assert_eq!([take(2), take(2), take(2)], [Some(40), Some(10), Some(0)]);
        assert_eq!([take(2), take(6), take(1)], [Some(20), Some(22), None]);
    }

    #[test]
    fn the_short_way_takes_runs_of_exactly_that_length() {
        let (mut bitmap, mut recent) = empty();
        give(&mut bitmap, &mut recent, 8, 7);
        for count in [4, 5, 6, 8] {
            assert_eq!(recent.take_latest(count, &mut bitmap), None);
        }
        assert_eq!(recent.take_latest(7, &mut bitmap), Some(8));
        assert_eq!(recent.take_latest(7, &mut bitmap), None);
    }

    #[test]
    fn what_was_taken_in_another_way_is_forgotten() {
        let (mut bitmap, mut recent) = empty();
        for first in [0, 10, 20] {
            give(&mut bitmap, &mut recent, first, 2);
        }
        bitmap.take(21, 1);
        bitmap.take(10, 1);
        assert_eq!(recent.take(&fit(2, 0), 0, &mut bitmap), Some(0));
        assert_eq!(recent.take(&fit(2, 0), 0, &mut bitmap), None);
    }

    #[test]
    fn a_run_in_the_middle_of_a_longer_one_leaves_both_ends() {
        let (mut bitmap, mut recent) = empty();
        give(&mut bitmap, &mut recent, 3, 10);
        assert_eq!(recent.take(&fit(2, 0x3fff), 0, &mut bitmap), Some(8));
        assert_eq!(recent.take(&fit(5, 0), 0, &mut bitmap), Some(3));
        assert_eq!(recent.take(&fit(3, 0), 0, &mut bitmap), Some(10));
        assert_eq!(bitmap.next_free(0), None);
    }

    #[test]
    fn more_runs_than_are_remembered_forget_the_oldest() {
        let mut ring = Ring::new(16).unwrap();
        for first in 0..20 {
            ring.push(SlotRun { first, count: 1 });
        }
        let mut seen = Vec::new();
        while ring.len != 0 {
            seen.push(ring.top().first);
            ring.pop();
        }
        assert_eq!(seen, (4..20).rev().collect::<Vec<_>>());
    }

    #[test]
    fn there_is_room_for_as_many_runs_of_a_length_as_there_can_be_up_to_a_limit() {
        for slots in [1, 15, 16, 17, 100, 1024, 5000, 1 << 16] {
            let recent = Recent::new(slots).unwrap();
            assert_eq!(recent.rings.len(), slots.ilog2() as usize + 1);
            for (class, ring) in recent.rings.iter().enumerate() {
                let room = (slots >> class).clamp(16, 4096).next_power_of_two();
                assert_eq!((ring.runs.len(), ring.mask), (room as usize + 32, room - 1));
            }
        }
    }

    #[test]
    fn a_ring_gives_back_what_was_pushed_and_no_more() {
        let mut ring = Ring::new(16).unwrap();
        for _ in 0..10 {
            assert_eq!(ring.len, 0);
            (0..3).for_each(|first| ring.push(SlotRun { first, count: 1 }));
            for first in [2, 1, 0] {
                assert_eq!(ring.top().first, first);
                ring.pop();
            }
        }
    }

    #[test]
    fn all_slots_of_a_long_area_are_a_run_from_the_beginning() {
        let slots = 1 << 16;
        let grid = Grid { base: 0, last: (1 << 27) - 1, slot_lg2: 11, slots };
        let original = Span::new(PhysAddr::new(0), 1 << 27).unwrap();
        let all = Fit::new(grid, original, &SlotRequest::default()).unwrap();
        let (mut bitmap, mut recent) = (Bitmap::new(slots).unwrap(), Recent::new(slots).unwrap());
        assert_eq!(recent.take(&all, 0, &mut bitmap), Some(0));
        assert_eq!((recent.has, bitmap.next_free(0)), (0, None));
    }

    /// What [`Recent`] is, by lists: of each length's runs the last ones, and the slots that are
    /// free.
    struct Plain {
        runs: Vec<Vec<(u32, u32)>>,
        is_free: Vec<bool>,
    }

    impl Plain {
        fn push(&mut self, first: u32, count: u32) {
            if count > 0 {
                let class = count.ilog2() as usize;
                let room = (self.is_free.len() >> class).clamp(16, 4096).next_power_of_two();
                self.runs[class].push((first, count));
                if self.runs[class].len() > room {
                    self.runs[class].remove(0);
                }
            }
        }

        fn try_take(&mut self, first: u32, count: u32) -> bool {
            let run = &mut self.is_free[first as usize..(first + count) as usize];
            let is_free = run.iter().all(|free| *free);
            if is_free {
                run.fill(false);
            }
            is_free
        }

        fn take_latest(&mut self, count: u32) -> Option<u32> {
            let runs = &mut self.runs[count.ilog2() as usize];
            let (first, _) = runs.pop_if(|(_, latest)| *latest == count)?;
            self.try_take(first, count).then_some(first)
        }

        /// A run that begins on a multiple of `step`, as slots are counted from `offset`.
        fn take(&mut self, count: u32, step: u32, offset: u32) -> Option<u32> {
            for class in count.ilog2() as usize..self.runs.len() {
                while let Some(&(start, len)) = self.runs[class].last() {
                    let first = (start + offset).next_multiple_of(step) - offset;
                    if first + count > start + len {
                        break;
                    }
                    self.runs[class].pop();
                    if self.try_take(first, count) {
                        self.push(start, first - start);
                        self.push(first + count, start + len - (first + count));
                        return Some(first);
                    }
                }
            }
            None
        }
    }

    /// The runs of each length, the latest last, and which lengths have some.
    fn runs_of(recent: &Recent) -> (Vec<Vec<(u32, u32)>>, u32) {
        let runs = recent.rings.iter().map(|ring| {
            let at = |back: u32| (ring.head.wrapping_sub(back) & ring.mask) as usize;
            let run = |back| ring.runs.get(at(back));
            (1..=ring.len).rev().map(|back| (run(back).first, run(back).count)).collect()
        });
        (runs.collect(), recent.has)
    }

    #[test]
    fn runs_are_remembered_taken_and_forgotten_as_lists_say() {
        let mut seed = 7u64;
        let mut below = |bound: u32| {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            u32::try_from((seed >> 33) % u64::from(bound)).unwrap()
        };
        let mut found = [0; 2];
        for (slots, offset) in [(1, 0), (5, 64), (40, 0), (100, 128), (100, 192), (300, 0)] {
            let (mut bitmap, mut recent) =
                (Bitmap::new(slots).unwrap(), Recent::new(slots).unwrap());
            let mut plain = Plain {
                runs: alloc::vec![Vec::new(); slots.ilog2() as usize + 1],
                is_free: alloc::vec![true; slots as usize],
            };
            plain.push(0, slots);
            let all = slots + offset;
            let grid = Grid { base: 0, last: (u64::from(all) << 11) - 1, slot_lg2: 11, slots: all };
            let mut held: Vec<(u32, u32)> = Vec::new();
            for _ in 0..500 {
                let most = [2, 5, slots][below(3) as usize];
                let count = 1 + below(most).min(slots - 1);
                let lg2 = below(4).min((slots / 8).checked_ilog2().unwrap_or(0));
                let taken = match below(8) {
                    0..3 => {
                        let taken = recent.take_latest(count, &mut bitmap);
                        assert_eq!(taken, plain.take_latest(count));
                        found[0] += u32::from(taken.is_some());
                        taken
                    }
                    3..6 => {
                        let original = Span::new(PhysAddr::new(0), u64::from(count) << 11).unwrap();
                        let request =
                            SlotRequest { keep_bits: (1 << (11 + lg2)) - 1, ..Default::default() };
                        let Some(fit) = Fit::new(grid, original, &request) else { continue };
                        let taken = recent.take(&fit, offset, &mut bitmap);
                        assert_eq!(taken, plain.take(count, 1 << lg2, offset));
                        found[1] += u32::from(taken.is_some());
                        taken
                    }
                    // In another way.
                    6 => {
                        let first = below(slots - count + 1);
                        let is_free = plain.try_take(first, count);
                        assert_eq!(bitmap.try_take(first, count), is_free);
                        is_free.then_some(first)
                    }
                    _ => None,
                };
                held.extend(taken.map(|first| (first, count)));
                if taken.is_none() && !held.is_empty() {
                    let at = below(u32::try_from(held.len()).unwrap()) as usize;
                    let (first, count) = held.swap_remove(at);
                    give(&mut bitmap, &mut recent, first, count);
                    plain.is_free[first as usize..(first + count) as usize].fill(true);
                    plain.push(first, count);
                }
                let (runs, has) = runs_of(&recent);
                assert_eq!(runs, plain.runs);
                let some = runs.iter().enumerate().filter(|(_, runs)| !runs.is_empty());
                assert_eq!(has, some.map(|(class, _)| 1 << class).sum::<u32>());
            }
        }
        assert!(found.iter().all(|count| *count > 150), "{found:?}");
    }
}
