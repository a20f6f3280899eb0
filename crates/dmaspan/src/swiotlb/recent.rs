//! The runs of an area that were given back last: what is still in the CPU's cache.
//!
//! They are hints. What is free is in the bitmap alone: a hint whose slots were taken by another
//! way is dropped when it is met, and nothing has to be drained before a request may fail.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::bitmap::{Bitmap, Lines};
use super::request::Fit;

/// How many runs of a size are remembered at most: more would be in no cache any more.
const DEPTH: u32 = 4096;

/// The last runs of lengths from 2^n to 2^(n + 1) - 1: a ring, so that the oldest is forgotten.
#[derive(Debug)]
struct Ring {
    runs: Lines<Run>,
    mask: u32,
    /// Where the next one goes.
    head: u32,
    len: u32,
}

/// Slots that follow each other.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    first: u32,
    count: u32,
}

impl Ring {
    fn new(slots: u32) -> Option<Self> {
        let runs = slots.clamp(16, DEPTH).next_power_of_two();
        Some(Self { runs: Lines::new(runs as usize)?, mask: runs - 1, head: 0, len: 0 })
    }

    #[inline(always)]
    fn push(&mut self, run: Run) {
        *self.runs.at(self.head as usize) = run;
        self.head = (self.head + 1) & self.mask;
        self.len = (self.len + 1).min(self.mask + 1);
    }

    /// The one pushed last; there is one.
    #[inline(always)]
    fn top(&self) -> Run {
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
            ring.push(Run { first, count });
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
