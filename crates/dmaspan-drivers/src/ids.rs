//! Numbers by which hardware tells domains apart.

use alloc::boxed::Box;
use alloc::vec;

use lock_api::{Mutex, RawMutex};

/// The numbers of a hardware's domains (ASIDs, VMIDs, domain IDs), each of one owner at a time.
pub(crate) struct Ids<L> {
    taken: Mutex<L, Taken>,
    first: u32,
}

struct Taken {
    /// A set bit is a number that is somebody's, or none.
    words: Box<[u64]>,
    /// No word before this one has a free number.
    from: usize,
}

impl<L: RawMutex> Ids<L> {
    /// The numbers `first..=last`; none where `last` is smaller.
    pub(crate) fn new(first: u32, last: u32) -> Self {
        let count = (u64::from(last) + 1).saturating_sub(u64::from(first));
        let words = usize::try_from(count.div_ceil(64)).unwrap_or(0);
        let mut words = vec![0; words].into_boxed_slice();
        if let Some(last) = words.last_mut().filter(|_| count % 64 != 0) {
            *last = u64::MAX << (count % 64);
        }
        Self { taken: Mutex::new(Taken { words, from: 0 }), first }
    }

    /// The lowest free number.
    pub(crate) fn take(&self) -> Option<u32> {
        let mut taken = self.taken.lock();
        let from = taken.from;
        let free = taken.words.iter().skip(from).position(|&word| word != u64::MAX);
        let index = from + free.unwrap_or(taken.words.len() - from);
        taken.from = index;
        let word = taken.words.get_mut(index)?;
        let bit = word.trailing_ones();
        *word |= 1 << bit;
        Some(self.first + u32::try_from(index).ok()? * 64 + bit)
    }

    /// Takes a number back that hardware knows nothing of any more.
    pub(crate) fn give(&self, id: u32) {
        let Some(place) = id.checked_sub(self.first) else { return };
        let index = place as usize / 64;
        let mut taken = self.taken.lock();
        if let Some(word) = taken.words.get_mut(index) {
            *word &= !(1 << (place % 64));
            taken.from = taken.from.min(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use dmaspan::platform::Flag;

    use super::*;

    type Numbers = Ids<Flag>;

    #[test]
    fn each_number_has_one_owner_and_comes_back() {
        for (first, last) in [(1, 1), (0, 63), (1, 64), (5, 200)] {
            let ids = Numbers::new(first, last);
            for id in first..=last {
                assert_eq!(ids.take(), Some(id));
            }
            assert_eq!((ids.take(), ids.take()), (None, None));
            ids.give(last);
            ids.give(first);
            assert_eq!(ids.take(), Some(first));
            if first != last {
                assert_eq!(ids.take(), Some(last));
            }
            assert_eq!(ids.take(), None);
        }
    }

    #[test]
    fn a_range_without_numbers_has_none() {
        assert_eq!(Numbers::new(1, 0).take(), None);
    }
}
