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
                let Some(first) = place.filter(|first| {
                    first.checked_add(fit.count).is_some_and(|behind| behind <= end)
                }) else {
                    break;
                };
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
}
