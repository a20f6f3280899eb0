//! Marks of an area's slots: which of those that are held are leased, and which are in quarantine.
//!
//! They are for whoever lists the pool, and change only where slots are leased or put into
//! quarantine.

use super::bitmap::Lines;

/// What is noted of slots beside that they are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Leased,
    Quarantined,
}

/// A bit for each slot and mark.
#[derive(Debug)]
pub(super) struct Marks {
    leased: Lines<u64>,
    quarantined: Lines<u64>,
}

impl Marks {
    /// No marks of so many slots; `None` where there is no memory.
    pub(super) fn new(slots: u32) -> Option<Self> {
        let words = slots.div_ceil(64) as usize;
        Some(Self { leased: Lines::new(words)?, quarantined: Lines::new(words)? })
    }

    /// Marks `count` slots from `first` on with this mark and no other, or with none.
    pub(super) fn set(&mut self, mark: Option<Mark>, first: u32, count: u32) {
        let marks = [(&mut self.leased, Mark::Leased), (&mut self.quarantined, Mark::Quarantined)];
        for (words, of) in marks {
            for slot in first..first + count {
                let word = words.at((slot / 64) as usize);
                let bit = 1 << (slot % 64);
                *word = if mark == Some(of) { *word | bit } else { *word & !bit };
            }
        }
    }

    /// The mark of a slot.
    pub(super) fn of(&self, slot: u32) -> Option<Mark> {
        let has = |words: &Lines<u64>| words.get((slot / 64) as usize) >> (slot % 64) & 1 == 1;
        if has(&self.quarantined) {
            Some(Mark::Quarantined)
        } else {
            has(&self.leased).then_some(Mark::Leased)
        }
    }

    /// The end of the slots from `first` to `end` that have the mark of the first.
    pub(super) fn run_end(&self, first: u32, end: u32) -> u32 {
        let all = |mark| if self.of(first) == Some(mark) { u64::MAX } else { 0 };
        let (leased, quarantined) = (all(Mark::Leased), all(Mark::Quarantined));
        let mut at = first;
        while at < end {
            let word = (at / 64) as usize;
            let others =
                (self.leased.get(word) ^ leased) | (self.quarantined.get(word) ^ quarantined);
            let others = others & (u64::MAX << (at % 64));
            if others != 0 {
                return end.min((at & !63) + others.trailing_zeros());
            }
            at = (at | 63) + 1;
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn there_is_a_bit_for_each_slot_and_mark_and_no_word_more() {
        for (slots, words) in [(1, 1), (63, 1), (64, 1), (65, 2), (4095, 64), (4097, 65)] {
            let marks = Marks::new(slots).unwrap();
            assert_eq!([marks.leased.len(), marks.quarantined.len()], [16 + words + 16; 2]);
        }
    }

    #[test]
    fn marks_are_those_of_the_slots_one_by_one() {
        let mut seed = 1u64;
        let mut below = |bound: u32| {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            u32::try_from((seed >> 33) % u64::from(bound)).unwrap()
        };
        for slots in [1, 64, 65, 129, 200] {
            let mut marks = Marks::new(slots).unwrap();
            let mut plain = vec![None; slots as usize];
            for round in 0..9 {
                for (slot, mark) in (0..slots).zip(&plain) {
                    assert_eq!(marks.of(slot), *mark, "{slot} of {slots}");
                }
                // Of all ends every so many, and those where words end.
                let ends = |first| {
                    let step = 1 + (slots - first) as usize / 8;
                    (first..=slots).filter(move |end| {
                        let far = (*end - first) as usize;
                        far.is_multiple_of(step) || *end % 64 < 2 || *end == slots
                    })
                };
                for (first, end) in
                    (0..slots).flat_map(|first| ends(first).map(move |e| (first, e)))
                {
                    let run = plain.get(first as usize..end as usize).unwrap_or_default();
                    let same = run.iter().take_while(|mark| **mark == run[0]).count();
                    let expected = first + u32::try_from(same).unwrap();
                    assert_eq!(marks.run_end(first, end), expected, "{first} to {end} of {slots}");
                }
                let mark = [None, Some(Mark::Leased), Some(Mark::Quarantined)][round % 3];
                let first = below(slots);
                // Also runs that are longer than a word.
                let count = 1 + below(if round % 4 == 0 { slots - first } else { 3 });
                let end = slots.min(first + count);
                marks.set(mark, first, end - first);
                plain[first as usize..end as usize].fill(mark);
            }
        }
    }
}
