//! The bitmap of an area says which slots are free, by a bit each, and a bit for each word of them.

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

    /// How many words there are, and on either side.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
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
        let rest = self.words.get(index(from)) & (u64::MAX << (from % 64));
        if rest != 0 {
            return Some((from & !63) + rest.trailing_zeros());
        }
        let word = self.next_word(from / 64 + 1)?;
        Some(word * 64 + self.words.get(word as usize).trailing_zeros())
    }

    /// The first word from `from` on with a free slot.
    fn next_word(&self, from: u32) -> Option<u32> {
        let words = self.slots.div_ceil(64);
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
            let end = first.checked_add(fit.count)?;
            match self.next_taken(first, end) {
                None => return Some(first),
                Some(taken) => from = self.next_free(taken)?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::{Grid, SlotRequest};
    use super::*;
    use crate::addr::PhysAddr;
    use crate::span::Span;

    fn words(bitmap: &Bitmap) -> Vec<u64> {
        (0..index(bitmap.slots - 1) + 1).map(|word| bitmap.words.get(word)).collect()
    }

    fn fit(slots: u32, count: u32, keep_bits: u64) -> Fit {
        let grid = Grid { base: 0, last: (u64::from(slots) << 11) - 1, slot_lg2: 11, slots };
        let original = Span::new(PhysAddr::new(0), u64::from(count) << 11).unwrap();
        Fit::new(grid, original, &SlotRequest { keep_bits, ..SlotRequest::default() }).unwrap()
    }

    #[test]
    fn taking_and_giving_change_the_words_of_the_run_and_no_other() {
        let mut bitmap = Bitmap::new(1 << 16).unwrap();
        for (first, count, most) in [(0, 1, 1), (127, 2, 2), (1000, 2, 1), (64, 64, 1), (5, 300, 5)]
        {
            let before = words(&bitmap);
            let changed = |now: &Bitmap| {
                words(now).iter().zip(&before).filter(|(now, before)| now != before).count()
            };
            bitmap.take(first, count);
            assert_eq!(changed(&bitmap), most);
            bitmap.give(first, count);
            assert_eq!(changed(&bitmap), 0);
        }
    }

    #[test]
    fn there_is_a_bit_for_each_slot_and_word_and_nobodys_room_on_either_side() {
        for slots in [1, 63, 64, 65, 4095, 4096, 4097] {
            let bitmap = Bitmap::new(slots).unwrap();
            let words = slots.div_ceil(64) as usize;
            assert_eq!(bitmap.words.len(), 16 + words + 16);
            assert_eq!(bitmap.summary.len(), 16 + words.div_ceil(64) + 16);
        }
    }

    #[test]
    fn the_summary_says_which_words_are_not_0() {
        let mut bitmap = Bitmap::new(64 * 130 + 3).unwrap();
        assert_eq!(bitmap.next_free(64 * 130 + 3), None);
        assert_eq!(bitmap.next_taken(64 * 130, 64 * 130 + 4), Some(64 * 130 + 3), "no slot");
        bitmap.take(0, 64 * 130);
        assert_eq!(bitmap.next_free(0), Some(64 * 130));
        assert!(bitmap.try_take(64 * 130, 3));
        assert_eq!((bitmap.next_free(0), bitmap.next_word(0)), (None, None));
        bitmap.give(64 * 65 + 63, 1);
        assert_eq!((bitmap.next_free(3), bitmap.next_word(0)), (Some(64 * 65 + 63), Some(65)));
        assert_eq!(bitmap.next_free(64 * 65 + 63), Some(64 * 65 + 63));
        assert_eq!(bitmap.next_free(64 * 66), None);
    }

    #[test]
    fn a_bitmap_answers_what_its_slots_say_one_by_one() {
        let mut seed = 1u64;
        let mut below = |bound: u32| {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            u32::try_from((seed >> 33) % u64::from(bound)).unwrap()
        };
        let sizes = [1, 63, 64, 65, 200, 64 * 65 + 5];
        let rounds = |slots| (0..4).map(move |round| (slots, round));
        for (slots, round) in sizes.into_iter().flat_map(rounds) {
            let mut bitmap = Bitmap::new(slots).unwrap();
            let mut free = alloc::vec![true; slots as usize];
            if round % 2 == 1 {
                // Few are free.
                bitmap.take(0, slots);
                free.fill(false);
            }
            for _ in 0..3 + slots / 100 {
                let first = below(slots);
                let end = (first + 1 + below(90)).min(slots);
                let run = &mut free[first as usize..end as usize];
                let is_free = run.iter().all(|slot| *slot);
                assert_eq!(bitmap.try_take(first, end - first), is_free);
                for (slot, was) in (first..end).zip(run) {
                    if !is_free && !*was {
                        bitmap.give(slot, 1);
                    }
                    *was = !is_free;
                }
            }
            let is_free = |slot: u32| free.get(slot as usize).copied().unwrap_or(false);
            for from in (0..slots + 70).step_by(1 + slots as usize / 1000) {
                assert_eq!(bitmap.next_free(from), (from..slots).find(|slot| is_free(*slot)));
                let to = from + below(130);
                assert_eq!(bitmap.next_taken(from, to), (from..to).find(|slot| !is_free(*slot)));
            }
            for count in [1, 2, 3, 40, 64, 65, 80].into_iter().filter(|count| *count <= slots) {
                let fits = |first: &u32| (*first..first + count).all(is_free);
                let lowest = (0..=slots - count).find(fits);
                assert_eq!(bitmap.find(&fit(slots, count, 0), 0), lowest, "{count} of {slots}");
            }
        }
    }

    #[test]
    fn a_run_is_taken_only_if_all_of_it_is_free() {
        for (first, count) in [(0, 1), (60, 4), (60, 5), (63, 66), (64, 64), (1, 190)] {
            for hole in [first, first + count / 2, first + count - 1] {
                let mut bitmap = Bitmap::new(192).unwrap();
                bitmap.take(hole, 1);
                let before = words(&bitmap);
                assert!(!bitmap.try_take(first, count));
                assert_eq!(words(&bitmap), before);
                bitmap.give(hole, 1);
                assert!(bitmap.try_take(first, count));
                let taken: u32 = words(&bitmap).iter().map(|word| word.count_zeros()).sum();
                assert_eq!(taken, count);
                bitmap.give(first, count);
            }
        }
    }

    #[test]
    fn the_lowest_run_of_each_length_is_found() {
        let slots = 64 * 70;
        for count in [1, 2, 3, 31, 63, 64, 65, 200] {
            for (first, offset) in [(0, 0), (1, 0), (63, 64), (100, 128), (slots - count, 0)] {
                let mut bitmap = Bitmap::new(slots).unwrap();
                bitmap.take(0, slots);
                // Too short by one slot, in front.
                if count > 1 && first > count {
                    bitmap.give(0, count - 1);
                }
                let fit = fit(slots + offset, count, 0);
                assert_eq!(bitmap.find(&fit, offset), None);
                bitmap.give(first, count);
                assert_eq!(bitmap.find(&fit, offset), Some(first), "{count} at {first}");
            }
        }
    }

    #[test]
    fn a_long_run_right_behind_a_slot_that_is_taken_is_found() {
        let mut bitmap = Bitmap::new(76).unwrap();
        bitmap.take(10, 1);
        assert_eq!(bitmap.find(&fit(76, 65, 0), 0), Some(11));
    }

    #[test]
    fn aligned_runs_are_found_where_they_may_begin() {
        let mut bitmap = Bitmap::new(256).unwrap();
        bitmap.take(0, 1);
        for (keep_bits, first) in [(0, 1), (0xfff, 2), (0x3fff, 8), (0x1_ffff, 64), (0x3_ffff, 128)]
        {
            assert_eq!(bitmap.find(&fit(256, 2, keep_bits), 0), Some(first));
            assert_eq!(bitmap.find(&fit(256, 66, keep_bits), 0), Some(first));
        }
        bitmap.take(128, 128);
        assert_eq!(bitmap.find(&fit(256, 2, 0x3_ffff), 0), None);
    }
}
