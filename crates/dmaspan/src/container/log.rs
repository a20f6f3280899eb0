//! The log of a mapping: a bit for each page that was written.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::error::Error;
use crate::addr::Iova;
use crate::lg2;
use crate::range::IovaRange;

/// How many pages a mapping may have to be tracked: `DIRTY_BITMAP_PAGES_MAX` of
/// drivers/vfio/vfio_iommu_type1.c.
const MAX_PAGES: u64 = (1 << 31) - 1;

/// What was written of a mapping, as far as it was not reported.
pub(super) struct Log {
    range: IovaRange,
    page_lg2: u32,
    words: Box<[AtomicU64]>,
    /// The number of the read that works on it, 0 where none does. Written under the container's
    /// lock.
    pub(super) reader: AtomicU64,
    /// Whether tables are changed and marks may not be read any more. Written and read under the
    /// lock of [walks](super::Container).
    pub(super) stopped: AtomicBool,
    /// Whether hardware may have leaves cached whose marks were taken away, so that it would not
    /// mark them anew.
    pub(super) unsynced: AtomicBool,
}

impl Log {
    /// An empty log of bits for `page` bytes each, a power of two.
    pub(super) fn new<E: core::error::Error>(
        range: IovaRange,
        page: u64,
        no_memory: impl FnOnce() -> Error<E>,
    ) -> Result<Self, Error<E>> {
        let page_lg2 = lg2::alignment(page).min(63);
        let last_page = range.len_less_one() >> page_lg2;
        if last_page >= MAX_PAGES {
            return Err(Error::TooLargeToTrack { mapping: range, most: MAX_PAGES });
        }
        let Ok(count) = usize::try_from(last_page / 64 + 1) else { return Err(no_memory()) };
        let mut words = Vec::new();
        if words.try_reserve_exact(count).is_err() {
            return Err(no_memory());
        }
        words.resize_with(count, || AtomicU64::new(0));
        Ok(Self {
            range,
            page_lg2,
            // As long as was reserved: nothing is allocated.
            words: words.into_boxed_slice(),
            reader: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            unsynced: AtomicBool::new(false),
        })
    }

    /// The page that has an address of the mapping.
    fn page(&self, at: Iova) -> u64 {
        (at.get() - self.range.start().get()) >> self.page_lg2
    }

    /// Notes that what there is of `written` in the mapping was written: all pages with an address
    /// in it.
    pub(super) fn mark(&self, written: IovaRange) {
        let Some(written) = written.intersection(self.range) else { return };
        let pages = (self.page(written.start()), self.page(written.last()));
        each_word(&self.words, pages, |word, bits| {
            // A page that is written again and again costs no exclusive access.
            if word.load(Ordering::Relaxed) & bits != bits {
                word.fetch_or(bits, Ordering::Relaxed);
            }
        });
    }

    /// Forgets all pages that lie in `reported` whole.
    pub(super) fn clear(&self, reported: IovaRange) {
        let Some(part) = reported.intersection(self.range) else { return };
        let (start, len_less_one) = (self.range.start().get(), part.len_less_one());
        let Some(first) = lg2::align_up(part.start().get() - start, self.page_lg2) else { return };
        let first = first >> self.page_lg2;
        let last = self.page(part.last());
        // The mapping's last page may be cut.
        let whole = part.last() == self.range.last()
            || lg2::is_aligned(
                (part.start().get() - start + len_less_one).wrapping_add(1),
                self.page_lg2,
            );
        let last = if whole { Some(last) } else { last.checked_sub(1) };
        if let Some(last) = last.filter(|last| *last >= first) {
            each_word(&self.words, (first, last), |word, bits| {
                word.fetch_and(!bits, Ordering::Relaxed);
            });
        }
    }

    /// Calls `found` with all that was written, page by page joined.
    pub(super) fn each_written(&self, mut found: impl FnMut(IovaRange)) {
        let words = self.words.iter().map(|word| word.load(Ordering::Relaxed));
        each_run(words, |first, last| {
            let at = |page: u64| self.range.start().wrapping_add(page << self.page_lg2);
            let end = at(last).get().saturating_add(lg2::mask(self.page_lg2));
            let end = Iova::new(end.min(self.range.last().get()));
            if let Some(written) = IovaRange::new(at(first), end) {
                found(written);
            }
        });
    }
}

/// Calls `each` with the words that have the bits `first..=last`, and the bits in them.
fn each_word<W>(words: &[W], (first, last): (u64, u64), mut each: impl FnMut(&W, u64)) {
    let index = |bit: u64| usize::try_from(bit / 64).unwrap_or(usize::MAX);
    let Some(touched) = words.get(index(first)..=index(last)) else { return };
    for (n, word) in (first / 64..).zip(touched) {
        let from = if n == first / 64 { first % 64 } else { 0 };
        let to = if n == last / 64 { last % 64 } else { 63 };
        each(word, u64::MAX << from & u64::MAX >> (63 - to));
    }
}

/// Calls `run` with the first and the last of set bits that follow each other, for all of them.
pub(super) fn each_run(words: impl Iterator<Item = u64>, mut run: impl FnMut(u64, u64)) {
    let mut open = None;
    let mut behind = 0;
    for (word, base) in words.zip((0u64..).step_by(64)) {
        behind = base + 64;
        let mut left = word;
        let mut bit = 0;
        while bit < 64 {
            match open {
                None if left == 0 => break,
                None => {
                    let zeros = u64::from(left.trailing_zeros());
                    bit += zeros;
                    left >>= zeros;
                    open = Some(base + bit);
                }
                Some(first) => {
                    let ones = u64::from(left.trailing_ones()).min(64 - bit);
                    bit += ones;
                    left = left.checked_shr(u32::try_from(ones).unwrap_or(64)).unwrap_or(0);
                    if bit < 64 {
                        run(first, base + bit - 1);
                        open = None;
                    }
                }
            }
        }
    }
    if let Some(first) = open {
        run(first, behind - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> IovaRange {
        IovaRange::from_len(Iova::new(start), len).unwrap()
    }

    fn runs(words: &[u64]) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        each_run(words.iter().copied(), |first, last| found.push((first, last)));
        found
    }

    #[test]
    fn runs_are_those_of_set_bits_within_words_and_across() {
        assert_eq!(runs(&[]), []);
        assert_eq!(runs(&[0, 0]), []);
        assert_eq!(runs(&[0b1011_0001]), [(0, 0), (4, 5), (7, 7)]);
        assert_eq!(runs(&[u64::MAX, u64::MAX]), [(0, 127)]);
        assert_eq!(runs(&[1 << 63, 0b11, 1 << 63]), [(63, 65), (191, 191)]);
        assert_eq!(runs(&[1 << 63, 0]), [(63, 63)]);
        assert_eq!(runs(&[u64::MAX << 3, 0, u64::MAX >> 1]), [(3, 63), (128, 190)]);
        let mut bits = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..200 {
            bits ^= bits << 13;
            bits ^= bits >> 7;
            bits ^= bits << 17;
            let words = [bits, bits.rotate_left(9), bits | bits >> 5];
            let mut again = [0u64; 3];
            for (first, last) in runs(&words) {
                each_word(&[0usize, 1, 2], (first, last), |n, bits| {
                    assert_eq!(again[*n] & bits, 0);
                    again[*n] |= bits;
                });
            }
            assert_eq!(again, words);
        }
    }

    fn no_memory() -> Error<core::convert::Infallible> {
        unreachable!("there is memory")
    }

    #[test]
    fn a_log_says_what_was_marked_to_the_page_and_forgets_whole_pages() {
        let base = 0u64.wrapping_sub(100 << 12);
        let log = Log::new(range(base, 100 << 12), 4096, no_memory).unwrap();
        let written = |log: &Log| {
            let mut found = Vec::new();
            log.each_written(|range| found.push(range));
            found
        };
        log.mark(range(base + 0xfff, 2));
        log.mark(range(base + (63 << 12), 37 << 12));
        log.mark(range(0, 1 << 20));
        let tail = range(base + (63 << 12), 37 << 12);
        assert_eq!(written(&log), [range(base, 0x2000), tail]);
        log.clear(range(base + 1, 0x1fff));
        assert_eq!(written(&log), [range(base, 0x1000), tail]);
        log.clear(range(base, 0xfff));
        assert_eq!(written(&log), [range(base, 0x1000), tail]);
        log.clear(range(base + (63 << 12), 37 << 12));
        log.clear(range(base, 0x1000));
        assert_eq!(written(&log), []);
    }

    #[test]
    fn what_has_more_pages_than_linux_tracks_is_refused() {
        let huge = range(0, 1 << 43);
        let error = Log::new(huge, 4096, no_memory).err().unwrap();
        assert!(matches!(error, Error::TooLargeToTrack { mapping, .. } if mapping == huge));
    }
}
