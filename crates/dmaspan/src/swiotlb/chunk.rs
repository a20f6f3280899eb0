//! A chunk is contiguous memory of a pool, divided into areas.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::array;

use lock_api::{MutexGuard, RawMutex};

use super::area::{Area, State};
use super::bitmap::Bitmap;
use super::config::MAX_AREAS;
use super::marks::Mark;
use super::request::{Fit, Grid, SlotRequest};
use crate::addr::PhysAddr;
use crate::platform::Apart;
use crate::span::Span;

/// How often a request that found nothing looks again because slots were released meanwhile. Slots
/// that others take each time are a full pool to it, which its callers have to expect anyway;
/// without a bound it might look for ever.
const TRIES: u32 = 4;

/// Slots in contiguous memory.
pub(super) struct Chunk<L> {
    grid: Grid,
    span: Span,
    /// All areas have as many slots, but for the last one, which may have fewer.
    per_area: u32,
    areas: Box<[Apart<Area<L>>]>,
    /// The number of areas rounded up to a power of two, less one.
    mask: usize,
}

/// A run of slots that was taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    /// Where its first slot begins.
    start: u64,
    /// The address of the original's bytes in it.
    pub(super) data: u64,
    /// How many slots there are.
    count: u32,
    /// The area, or [`ACROSS`].
    area: u32,
}

impl Taken {
    /// All of memory that has no areas.
    pub(super) fn all(whole: Span, data: u64, slot_lg2: u32) -> Self {
        let count = u32::try_from(whole.len() >> slot_lg2).unwrap_or(u32::MAX);
        Self { start: whole.paddr().get(), data, count, area: ACROSS }
    }

    /// The same, by its parts: see [`Pool::take`](super::Pool::take).
    #[inline(always)]
    pub(super) fn by_parts(self) -> Self {
        let Self { start, data, count, area } = self;
        Self { start, data, count, area }
    }

    /// Where its first slot begins.
    #[inline(always)]
    pub(super) const fn start(&self) -> u64 {
        self.start
    }

    /// How many bytes its slots have.
    #[inline(always)]
    pub(super) const fn bytes(&self, slot_lg2: u32) -> u64 {
        (self.count as u64) << slot_lg2
    }
}

/// In the place of an area: a run over several.
const ACROSS: u32 = u32::MAX;

/// A look at areas one after the other, with the lock of the one that it is at.
struct Look<'a, L: RawMutex> {
    chunk: &'a Chunk<L>,
    at: Option<(usize, MutexGuard<'a, L, State>)>,
}

impl<'a, L: RawMutex> Look<'a, L> {
    fn new(chunk: &'a Chunk<L>) -> Self {
        Self { chunk, at: None }
    }

    /// The bitmap of an area, and the first slot of it.
    fn area(&mut self, number: usize) -> (&Bitmap, u32) {
        // Not two at a time.
        drop(self.at.take_if(|(at, _)| *at != number));
        let chunk = self.chunk;
        let (_, state) = self.at.get_or_insert_with(|| (number, chunk.areas[number].lock()));
        (&state.bitmap, chunk.offset(number))
    }

    /// The first free slot from `from` on.
    fn next_free(&mut self, from: u32) -> Option<u32> {
        let count = self.chunk.grid.slots.checked_sub(from)?;
        self.chunk.parts(from, count).find_map(|(number, at, _)| {
            let (bitmap, offset) = self.area(number);
            Some(bitmap.next_free(at - offset)? + offset)
        })
    }

    /// The first slot from `from` on, before `to`, that is held.
    fn next_taken(&mut self, from: u32, to: u32) -> Option<u32> {
        self.chunk.parts(from, to - from).find_map(|(number, at, count)| {
            let (bitmap, offset) = self.area(number);
            Some(bitmap.next_taken(at - offset, at + count - offset)? + offset)
        })
    }
}

impl<L: RawMutex> Chunk<L> {
    /// A chunk of a span that [`PoolMemory`](super::PoolMemory) gave, of which the configuration
    /// was checked; `None` where there is no memory.
    pub(super) fn new(span: Span, grid: Grid, areas: usize) -> Option<Self> {
        let wanted = u32::try_from(areas.min(MAX_AREAS)).unwrap_or(1).clamp(1, grid.slots);
        let least = grid.slots.div_ceil(wanted);
        // So that no word of the bitmap is of two areas, and large alignments fit into each.
        let per_area = if least > 64 { least.checked_next_multiple_of(64)? } else { least };
        let count = grid.slots.div_ceil(per_area);
        let mask = (count as usize).next_power_of_two() - 1;
        let mut list = Vec::new();
        list.try_reserve_exact(count as usize).ok()?;
        for number in 0..count {
            let offset = number * per_area;
            list.push(Apart(Area::new(offset, per_area.min(grid.slots - offset))?));
        }
        Some(Self { grid, span, per_area, areas: list.into_boxed_slice(), mask })
    }

    /// Where its slots are.
    pub(super) const fn grid(&self) -> Grid {
        self.grid
    }

    /// Its memory.
    pub(super) const fn span(&self) -> Span {
        self.span
    }

    /// How many slots are free, read area by area without locks.
    pub(super) fn free(&self) -> u32 {
        self.areas.iter().map(|area| area.free()).sum()
    }

    /// How many slots are held.
    pub(super) fn used(&self) -> u32 {
        self.grid.slots - self.free()
    }

    /// The most slots that each area ever held, in all.
    pub(super) fn high(&self) -> u32 {
        self.areas.iter().map(|area| area.high()).sum()
    }

    /// Of each area how many slots there are, how many of them are held, and the most that ever
    /// were, read without its lock.
    pub(super) fn by_area(&self) -> impl Iterator<Item = [u32; 3]> {
        self.areas.iter().zip(0..).map(|(area, number)| {
            let slots = self.per_area.min(self.grid.slots - self.offset(number));
            [slots, slots - area.free(), area.high()]
        })
    }

    pub(super) fn reset_high(&self) {
        self.areas.iter().for_each(|area| area.reset_high());
    }

    /// Takes a run of the CPU's own area where nothing but its length matters: the common case, and
    /// in that, the one released last is exactly as long.
    #[inline(always)]
    pub(super) fn take_plain(
        &self,
        original: Span,
        request: &SlotRequest,
        cpu: usize,
    ) -> Option<Taken> {
        let (count, inner) = self.grid.plain(original, request)?;
        let number = self.own(cpu);
        let area = &self.areas[number];
        if !area.may_have(count) {
            return None;
        }
        let mut state = area.try_lock()?;
        match area.take_latest(&mut state, count) {
            Some(first) => Some(self.taken(first, count, inner, number)),
            None => self.take_own(&mut state, original, request, number),
        }
    }

    /// Takes a run that fits: of the CPU's own area, of another one, or over several. `None` only
    /// where none was free at some moment of the call, or where slots were released during each of
    /// [`TRIES`] looks, and no run was free throughout one of them.
    pub(super) fn take(&self, fit: &Fit, cpu: usize) -> Option<Taken> {
        let own = self.own(cpu);
        let area = &self.areas[own];
        if area.may_have(fit.count)
            && let Some(mut state) = area.try_lock()
            && let Some(first) = area.take(&mut state, fit)
        {
            return Some(self.taken(first, fit.count, fit.inner, own));
        }
        self.take_elsewhere(fit, own)
    }

    /// Tries all areas, and then runs over several.
    #[cold]
    fn take_elsewhere(&self, fit: &Fit, own: usize) -> Option<Taken> {
        for _ in 0..TRIES {
            let before = self.released();
            let found = self.try_areas(fit, own).or_else(|| self.lock_areas(fit, own));
            let enough = || self.areas.len() > 1 && self.free() >= fit.count;
            let found = found.or_else(|| if enough() { self.take_across(fit) } else { None });
            // Otherwise what was seen held still is: each area was seen without a fit, none got one
            // since, and neither did the borders between them.
            if found.is_some() || self.released() == before {
                return found;
            }
        }
        None
    }

    /// Takes runs of the CPU's own area for the first originals, as many as it has, under one lock;
    /// none, where another CPU has it.
    pub(super) fn take_many(
        &self,
        originals: &[Option<Span>],
        request: &SlotRequest,
        cpu: usize,
        taken: &mut [Option<Taken>],
    ) {
        let own = self.own(cpu);
        let area = &self.areas[own];
        let Some(mut state) = area.try_lock() else { return };
        for (original, place) in originals.iter().flatten().zip(taken) {
            *place = self.take_own(&mut state, *original, request, own);
            if place.is_none() {
                break;
            }
        }
    }

    /// Takes a run of an area whose lock is held, whatever the request.
    #[inline(never)]
    fn take_own(
        &self,
        state: &mut State,
        original: Span,
        request: &SlotRequest,
        number: usize,
    ) -> Option<Taken> {
        let fit = Fit::new(self.grid, original, request)?;
        let area = &self.areas[number];
        let first = area.may_have(fit.count).then(|| area.take(state, &fit))??;
        Some(self.taken(first, fit.count, fit.inner, number))
    }

    #[inline(always)]
    fn own(&self, cpu: usize) -> usize {
        let own = cpu & self.mask;
        if own < self.areas.len() { own } else { own - self.areas.len() }
    }

    #[inline(always)]
    fn taken(&self, first: u32, count: u32, inner: u64, area: usize) -> Taken {
        // There are at most MAX_AREAS.
        let area = u32::try_from(area).unwrap_or(ACROSS);
        let start = self.grid.addr(first);
        Taken { start, data: start + inner, count, area }
    }

    /// How often slots were released, wrapping.
    pub(super) fn released(&self) -> u32 {
        self.areas.iter().fold(0, |sum, area| sum.wrapping_add(area.released()))
    }

    /// The areas from the CPU's own on, without waiting for any.
    fn try_areas(&self, fit: &Fit, own: usize) -> Option<Taken> {
        self.from(own).find_map(|(number, area)| {
            if !area.may_have(fit.count) {
                return None;
            }
            let first = area.take(&mut *area.try_lock()?, fit)?;
            Some(self.taken(first, fit.count, fit.inner, number))
        })
    }

    /// The same, waiting for each that may have a fit.
    fn lock_areas(&self, fit: &Fit, own: usize) -> Option<Taken> {
        self.from(own).find_map(|(number, area)| {
            if !area.may_have(fit.count) {
                return None;
            }
            let first = area.take(&mut area.lock(), fit)?;
            Some(self.taken(first, fit.count, fit.inner, number))
        })
    }

    fn from(&self, own: usize) -> impl Iterator<Item = (usize, &Area<L>)> {
        let all = || self.areas.iter().map(|area| &**area).enumerate();
        all().skip(own).chain(all().take(own))
    }

    /// A run that may reach over several areas. It is looked for with one of them locked at a time,
    /// and taken with those locked that it reaches over: how long a lock is held, and interrupts
    /// with it, depends on the length of an area and of the run, not of the pool.
    fn take_across(&self, fit: &Fit) -> Option<Taken> {
        let mut from = 0;
        loop {
            let first = self.find_across(fit, from)?;
            match self.take_run(first, fit.count) {
                Ok(()) => return Some(self.taken(first, fit.count, fit.inner, ACROSS as usize)),
                // Somebody was faster. Where the others are was seen a moment ago.
                Err(taken) => from = taken + 1,
            }
        }
    }

    /// The first run that fits from `from` on: each slot of it was free when it was looked at.
    fn find_across(&self, fit: &Fit, from: u32) -> Option<u32> {
        let mut look = Look::new(self);
        let mut from = look.next_free(from)?;
        loop {
            let first = fit.next(from)?;
            // A run that fits ends in the chunk.
            match look.next_taken(first, first + fit.count) {
                None => return Some(first),
                Some(taken) => from = look.next_free(taken)?,
            }
        }
    }

    /// Takes a run, with the areas that it reaches over locked in their order.
    ///
    /// # Errors
    ///
    /// A slot of it that is held; none is taken then.
    fn take_run(&self, first: u32, count: u32) -> Result<(), u32> {
        let mut guards: [Option<MutexGuard<'_, L, State>>; MAX_AREAS] = array::from_fn(|_| None);
        let parts = || self.parts(first, count);
        let free = guards.iter_mut().zip(parts()).try_for_each(|(guard, (number, at, count))| {
            let offset = self.offset(number);
            let state = guard.insert(self.areas[number].lock());
            let taken = state.bitmap.next_taken(at - offset, at + count - offset);
            taken.map_or(Ok(()), |taken| Err(taken + offset))
        });
        if free.is_ok() {
            for (state, (number, at, count)) in guards.iter_mut().flatten().zip(parts()) {
                self.areas[number].take_at(state, at, count);
            }
        }
        // Where locks keep interrupts off, the one that was taken first lets them in again.
        guards.iter_mut().rev().for_each(|guard| *guard = None);
        free
    }

    /// The first slot of an area.
    #[inline(always)]
    fn offset(&self, number: usize) -> u32 {
        u32::try_from(number).unwrap_or(0) * self.per_area
    }

    /// The parts of a run: the number of an area, the first slot there and how many there are.
    fn parts(&self, first: u32, count: u32) -> impl Iterator<Item = (usize, u32, u32)> {
        let (mut at, end, per_area) = (first, first + count, self.per_area);
        core::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let number = at / per_area;
            let to = end.min((number + 1).saturating_mul(per_area));
            let part = (number as usize, at, to - at);
            at = to;
            Some(part)
        })
    }

    /// Releases a run of this chunk.
    #[inline(always)]
    pub(super) fn give(&self, taken: Taken) {
        let first = (taken.start - self.grid.base) >> self.grid.slot_lg2;
        // It was counted so before.
        let first = u32::try_from(first).unwrap_or(0);
        match self.areas.get(taken.area as usize) {
            Some(area) => area.give(first, taken.count),
            None => self.give_across(first, taken.count),
        }
    }

    /// Marks a run of this chunk, or takes the mark away.
    #[cold]
    pub(super) fn mark(&self, taken: Taken, mark: Option<Mark>) {
        let first = (taken.start - self.grid.base) >> self.grid.slot_lg2;
        // It was counted so before.
        let first = u32::try_from(first).unwrap_or(0);
        for (number, at, count) in self.parts(first, taken.count) {
            self.areas[number].mark(mark, at, count);
        }
    }

    /// The first run of slots from an address on that are held and have one mark, in one area: that
    /// area's number, and the run.
    pub(super) fn next_held(&self, from: u64) -> Option<(u32, Span, Option<Mark>)> {
        let from = from.saturating_sub(self.grid.base) >> self.grid.slot_lg2;
        let from = u32::try_from(from).ok()?;
        self.parts(from, self.grid.slots.checked_sub(from)?).find_map(|(number, at, _)| {
            let (first, end, mark) = self.areas[number].next_held(at)?;
            let bytes = u64::from(end - first) << self.grid.slot_lg2;
            let span = Span::new(PhysAddr::new(self.grid.addr(first)), bytes).ok()?;
            Some((u32::try_from(number).unwrap_or(ACROSS), span, mark))
        })
    }

    #[cold]
    fn give_across(&self, first: u32, count: u32) {
        for (number, at, count) in self.parts(first, count) {
            self.areas[number].give(at, count);
        }
    }
}
