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
        let words = (slots / 64) as usize + 1;
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
