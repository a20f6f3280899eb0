//! Which slots of an area are free: a bit each, and a bit for each word of them.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::request::Fit;

/// An array of words of 8 bytes that shares no cache line with anything else: 128 bytes on either
/// side are nobody's, as for [`Apart`](crate::platform::Apart).
#[derive(Debug)]
pub(super) struct Lines<T>(Box<[T]>);

/// How many words are on either side.
const MARGIN: usize = 16;

impl<T: Copy + Default> Lines<T> {
    /// So many words; `None` where there is no memory.
    pub(super) fn new(words: usize) -> Option<Self> {
        let len = words.checked_add(2 * MARGIN)?;
        let mut all = Vec::new();
        all.try_reserve_exact(len).ok()?;
        all.resize(len, T::default());
        Some(Self(all.into_boxed_slice()))
    }

    /// A word; right behind the last one they are as at first.
    #[inline(always)]
    pub(super) fn get(&self, index: usize) -> T {
        self.0.get(index + MARGIN).copied().unwrap_or_default()
    }

    /// A word that there is.
    #[inline(always)]
    pub(super) fn at(&mut self, index: usize) -> &mut T {
        &mut self.0[index + MARGIN]
    }
}

/// The free slots of an area, which are numbered from 0.
#[derive(Debug)]
pub(super) struct Bitmap {
    /// Set where a slot is free; bits behind the last slot never are.
    words: Lines<u64>,
    /// Set where a word is not 0.
    summary: Lines<u64>,
    slots: u32,
}

/// A place among the bits, as indices fit into it: slots are counted in 32 bits.
#[inline(always)]
const fn index(slot: u32) -> usize {
    (slot / 64) as usize
}

/// The bits of one word from `from % 64` on, as many as `to` leaves.
#[inline(always)]
const fn mask(from: u32, to: u32) -> u64 {
    let count = to - from;
    let bits = if count >= 64 { u64::MAX } else { (1 << count) - 1 };
    bits << (from % 64)
}

/// Bits where `count` set ones begin, of the low word; `count` is from 1 to 64.
#[inline(always)]
const fn starts(mut low: u64, mut high: u64, count: u32) -> u64 {
    let mut have = 1;
    while have < count {
        let more = if count - have < have { count - have } else { have };
        low &= low >> more | high << (64 - more);
        high &= high >> more;
        have += more;
    }
    low
}
const _: () = assert!(starts(0b1110_1101, 0, 1) == 0b1110_1101);
const _: () = assert!(starts(0b1110_1101, 0, 3) == 0b0010_0000);
const _: () = assert!(starts(1 << 63, 0b11, 3) == 1 << 63 && starts(1 << 63, 0b11, 4) == 0);
const _: () = assert!(starts(u64::MAX, u64::MAX >> 1, 64) == u64::MAX);

impl Bitmap {
    /// All slots are free; `None` where there is no memory.
    pub(super) fn new(slots: u32) -> Option<Self> {
        let count = index(slots - 1) + 1;
        let (words, summary) = (Lines::new(count)?, Lines::new(count.div_ceil(64))?);
        let mut bitmap = Self { words, summary, slots };
        bitmap.give(0, slots);
        Some(bitmap)
    }

    /// How many slots there are.
    pub(super) const fn slots(&self) -> u32 {
        self.slots
    }

    /// Takes `count` slots from `first` on, if all of them are free.
    #[inline(always)]
    pub(super) fn try_take(&mut self, first: u32, count: u32) -> bool {
        if first % 64 + count > 64 {
            return self.try_take_words(first, count);
        }
        let word = self.words.at(index(first));
        // At least one, and they are all in the word.
        let wanted = (u64::MAX >> ((64 - count) & 63)) << (first % 64);
        if *word & wanted != wanted {
            return false;
        }
        *word &= !wanted;
        if *word == 0 {
            self.note_full(index(first));
        }
        true
    }

    #[inline(never)]
    fn try_take_words(&mut self, first: u32, count: u32) -> bool {
        let is_free = self.next_taken(first, first + count).is_none();
        if is_free {
            self.take(first, count);
        }
        is_free
    }

    /// A word has no free slots any more.
    #[inline(never)]
    fn note_full(&mut self, word: usize) {
        *self.summary.at(word / 64) &= !(1 << (word % 64));
    }

    /// A word has free slots again.
    #[inline(never)]
    fn note_free(&mut self, word: usize) {
        *self.summary.at(word / 64) |= 1 << (word % 64);
    }

    /// Takes `count` slots from `first` on, which are free.
    pub(super) fn take(&mut self, first: u32, count: u32) {
        let end = first + count;
        let mut from = first;
        while from < end {
            let to = end.min((from | 63) + 1);
            let word = self.words.at(index(from));
            let taken = mask(from, to);
            debug_assert!(*word & taken == taken, "slots that are not free");
            *word &= !taken;
            if *word == 0 {
                self.note_full(index(from));
            }
            from = to;
        }
    }

    /// Gives `count` slots from `first` on back, which are taken.
    #[inline(always)]
    pub(super) fn give(&mut self, first: u32, count: u32) {
        let end = first + count;
        let mut from = first;
        while from < end {
            let to = end.min((from | 63) + 1);
            let word = self.words.at(index(from));
            let given = mask(from, to);
            debug_assert!(*word & given == 0, "slots that are free already");
            let was_full = *word == 0;
            *word |= given;
            if was_full {
                self.note_free(index(from));
            }
            from = to;
        }
    }

    /// The first free slot from `from` on.
    pub(super) fn next_free(&self, from: u32) -> Option<u32> {
        if from >= self.slots {
            return None;
        }
        let rest = self.words.get(index(from)) & (u64::MAX << (from % 64));
        if rest != 0 {
            return Some((from & !63) + rest.trailing_zeros());
        }
        let word = self.next_word(from / 64 + 1)?;
        Some(word * 64 + self.words.get(word as usize).trailing_zeros())
    }

    /// The first word from `from` on with a free slot.
    fn next_word(&self, from: u32) -> Option<u32> {
        let words = (self.slots - 1) / 64 + 1;
        let mut at = from;
        while at < words {
            let rest = self.summary.get(index(at)) & (u64::MAX << (at % 64));
            if rest != 0 {
                return Some((at & !63) + rest.trailing_zeros());
            }
            at = (at | 63) + 1;
        }
        None
    }

    /// The first slot from `from` on, before `to`, that is not free.
    pub(super) fn next_taken(&self, from: u32, to: u32) -> Option<u32> {
        let mut at = from;
        while at < to {
            let rest = !self.words.get(index(at)) & (u64::MAX << (at % 64));
            if rest != 0 {
                let found = (at & !63) + rest.trailing_zeros();
                return (found < to).then_some(found);
            }
            at = (at | 63) + 1;
        }
        None
    }

    /// The lowest free run that fits, of an area whose slot 0 is `offset` of what `fit` counts.
    /// Complete: `None` means that there is none.
    pub(super) fn find(&self, fit: &Fit, offset: u32) -> Option<u32> {
        match fit.pattern(offset) {
            Some(pattern) if fit.count <= 64 => self.find_short(fit, offset, pattern),
            _ => self.find_long(fit, offset),
        }
    }

    /// Runs of up to 64 slots, by words: where they can begin is a pattern of bits.
    fn find_short(&self, fit: &Fit, offset: u32, pattern: u64) -> Option<u32> {
        let mut at = self.next_word(0);
        while let Some(word) = at {
            let (low, high) = (self.words.get(word as usize), self.words.get(word as usize + 1));
            let mut runs = starts(low, high, fit.count) & pattern;
            while runs != 0 {
                let first = word * 64 + runs.trailing_zeros();
                if first + offset > fit.highest() {
                    return None;
                }
                // A boundary may be in the way.
                if fit.next(first + offset) == Some(first + offset) {
                    return Some(first);
                }
                runs &= runs - 1;
            }
            at = self.next_word(word + 1);
        }
        None
    }

    /// Any runs, from one place that they can begin with to the next.
    fn find_long(&self, fit: &Fit, offset: u32) -> Option<u32> {
        let mut from = self.next_free(0)?;
        loop {
            let first = fit.next(from.checked_add(offset)?)? - offset;
            let end = first.checked_add(fit.count).filter(|end| *end <= self.slots)?;
            match self.next_taken(first, end) {
                None => return Some(first),
                Some(taken) => from = self.next_free(taken + 1)?,
            }
        }
    }
}
