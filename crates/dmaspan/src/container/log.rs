//! The log of a mapping: a bit for each page that was written.
//!
//! A client that may not be trusted says how long a mapping is, so a log has no memory for pages
//! that nobody writes. Its bits are in chunks: a chunk comes with its first written page, is
//! charged to the owner of the mapping, and goes with the mapping. Where there is no memory for a
//! chunk, the whole mapping counts as written until that is reported: the log reports more than was
//! written, and never less.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;
use core::sync::atomic::{AtomicBool, AtomicU64};

use lock_api::Mutex;

use super::error::Error;
use crate::account::{Account, Charge, OverLimit};
use crate::addr::Iova;
use crate::lg2;
use crate::platform::Flag;
use crate::range::IovaRange;

/// How many pages a mapping may have to be tracked: `DIRTY_BITMAP_PAGES_MAX` of
/// drivers/vfio/vfio_iommu_type1.c.
const MAX_PAGES: u64 = (1 << 31) - 1;

/// log2 of the pages of a chunk, whose bits are 4 KiB.
const CHUNK_LG2: u32 = 15;

/// What was written of a mapping, as far as it was not reported.
pub(super) struct Log {
    range: IovaRange,
    page_lg2: u32,
    /// Under the lock nothing is allocated or freed.
    written: Mutex<Flag, Written>,
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

struct Written {
    /// Whether all of the mapping counts as written, whatever the chunks say.
    all: bool,
    /// By their numbers.
    chunks: Vec<Chunk>,
    /// For the chunks.
    charge: Charge,
}

struct Chunk {
    number: u64,
    words: Box<[u64]>,
}

/// What a chunk is without that is to be marked.
enum Lack {
    Chunk,
    Place,
}

impl Written {
    fn find(&self, number: u64) -> Result<usize, usize> {
        self.chunks.binary_search_by_key(&number, |chunk| chunk.number)
    }

    /// Sets bits of a chunk, if it is there or has a place.
    fn set(
        &mut self,
        number: u64,
        bits: (u64, u64),
        spare: &mut Option<Box<[u64]>>,
    ) -> Result<(), Lack> {
        let at = match self.find(number) {
            _ if self.all => return Ok(()),
            Ok(at) => at,
            Err(_) if self.chunks.len() == self.chunks.capacity() => return Err(Lack::Place),
            Err(at) => {
                let words = spare.take().ok_or(Lack::Chunk)?;
                let bytes = u64::try_from(mem::size_of_val(&*words)).unwrap_or(u64::MAX);
                if self.charge.grow(bytes).is_err() {
                    self.all = true;
                    // It is freed behind the lock.
                    *spare = Some(words);
                    return Ok(());
                }
                self.chunks.insert(at, Chunk { number, words });
                at
            }
        };
        if let Some(chunk) = self.chunks.get_mut(at) {
            each_word(&mut chunk.words, bits, |word, bits| *word |= bits);
        }
        Ok(())
    }
}

impl Log {
    /// An empty log of bits for `page` bytes each, a power of two, whose memory `account` pays.
    pub(super) fn new<E: core::error::Error>(
        range: IovaRange,
        page: u64,
        account: &Arc<Account>,
    ) -> Result<Self, Error<E>> {
        let page_lg2 = lg2::alignment(page).min(63);
        if range.len_less_one() >> page_lg2 >= MAX_PAGES {
            return Err(Error::TooLargeToTrack { mapping: range, most: MAX_PAGES });
        }
        let charge = account.charge_nothing();
        let written = Written { all: false, chunks: Vec::new(), charge };
        Ok(Self {
            range,
            page_lg2,
            written: Mutex::new(written),
            reader: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            unsynced: AtomicBool::new(false),
        })
    }

    /// The page that has an address of the mapping.
    fn page(&self, at: Iova) -> u64 {
        (at.get() - self.range.start().get()) >> self.page_lg2
    }

    /// The parts of `pages` in chunks: the number of each, and the first and last bit in it.
    fn chunks(pages: (u64, u64)) -> impl Iterator<Item = (u64, (u64, u64))> {
        let (first, last) = pages;
        (first >> CHUNK_LG2..=last >> CHUNK_LG2).map(move |number| {
            let start = number << CHUNK_LG2;
            let end = start | lg2::mask(CHUNK_LG2);
            (number, (first.max(start) - start, last.min(end) - start))
        })
    }

    /// Notes that what there is of `written` in the mapping was written: all pages with an address
    /// in it.
    pub(super) fn mark(&self, written: IovaRange) {
        let Some(written) = written.intersection(self.range) else { return };
        if written == self.range {
            self.written.lock().all = true;
            return;
        }
        let pages = (self.page(written.start()), self.page(written.last()));
        let mut spare = None;
        for (number, bits) in Self::chunks(pages) {
            loop {
                let lack = self.written.lock().set(number, bits, &mut spare);
                let made = match lack {
                    Ok(()) => break,
                    Err(Lack::Chunk) => {
                        spare = self.new_chunk(number);
                        spare.is_some()
                    }
                    Err(Lack::Place) => self.make_place(),
                };
                if !made {
                    self.written.lock().all = true;
                    return;
                }
            }
        }
    }

    /// Empty bits, as many as the mapping has in that chunk.
    #[cold]
    fn new_chunk(&self, number: u64) -> Option<Box<[u64]>> {
        let last = self.page(self.range.last()).min(number << CHUNK_LG2 | lg2::mask(CHUNK_LG2));
        let count = (last - (number << CHUNK_LG2)) / 64 + 1;
        let count = usize::try_from(count).ok()?;
        let mut words = Vec::new();
        words.try_reserve_exact(count).ok()?;
        words.resize(count, 0);
        // As long as was reserved: nothing is allocated.
        Some(words.into_boxed_slice())
    }

    /// Makes room for more chunks.
    #[cold]
    fn make_place(&self) -> bool {
        let len = self.written.lock().chunks.len();
        let mut chunks = Vec::new();
        if chunks.try_reserve_exact(2 * len + 1).is_err() {
            return false;
        }
        let mut written = self.written.lock();
        if written.chunks.len() < chunks.capacity() {
            chunks.append(&mut written.chunks);
            mem::swap(&mut chunks, &mut written.chunks);
        }
        drop(written);
        // The former room is freed behind the lock.
        drop(chunks);
        true
    }

    /// Forgets all pages that lie in `reported` whole. Where all of the mapping counts as written,
    /// only a report of all of it changes that.
    pub(super) fn clear(&self, reported: IovaRange) {
        let Some(part) = reported.intersection(self.range) else { return };
        let mut written = self.written.lock();
        if part == self.range {
            written.all = false;
        }
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
        let Some(last) = last.filter(|last| *last >= first) else { return };
        for chunk in &mut written.chunks {
            let chunk_start = chunk.number << CHUNK_LG2;
            let chunk_end = chunk_start | lg2::mask(CHUNK_LG2);
            if first <= chunk_end && chunk_start <= last {
                let bits =
                    (first.max(chunk_start) - chunk_start, last.min(chunk_end) - chunk_start);
                each_word(&mut chunk.words, bits, |word, bits| *word &= !bits);
            }
        }
    }

    /// Calls `found` with all that was written, page by page joined within a chunk.
    pub(super) fn each_written(&self, mut found: impl FnMut(IovaRange)) {
        let written = self.written.lock();
        if written.all {
            found(self.range);
            return;
        }
        for chunk in &written.chunks {
            let base = chunk.number << CHUNK_LG2;
            each_run(chunk.words.iter().copied(), |first, last| {
                let at =
                    |page: u64| self.range.start().wrapping_add((base + page) << self.page_lg2);
                let end = at(last).get().saturating_add(lg2::mask(self.page_lg2));
                let end = Iova::new(end.min(self.range.last().get()));
                if let Some(written) = IovaRange::new(at(first), end) {
                    found(written);
                }
            });
        }
    }

    /// What another owner would pay for the log as it is.
    pub(super) fn charge_to(&self, account: &Arc<Account>) -> Result<Charge, OverLimit> {
        let bytes = self.written.lock().charge.bytes();
        let mut charge = account.charge_nothing();
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// Has another owner pay. Returns what the former one paid.
    pub(super) fn pay(&self, charge: Charge) -> Charge {
        mem::replace(&mut self.written.lock().charge, charge)
    }
}

/// Calls `each` with the words that have the bits `first..=last`, and the bits in them.
fn each_word(words: &mut [u64], (first, last): (u64, u64), mut each: impl FnMut(&mut u64, u64)) {
    let index = |bit: u64| usize::try_from(bit / 64).unwrap_or(usize::MAX);
    let Some(touched) = words.get_mut(index(first)..=index(last)) else { return };
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
    use alloc::vec;
    use core::convert::Infallible;

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
        for _ in 0..if cfg!(miri) { 10 } else { 200 } {
            bits ^= bits << 13;
            bits ^= bits >> 7;
            bits ^= bits << 17;
            let words = [bits, bits.rotate_left(9), bits | bits >> 5];
            let mut again = [0u64; 3];
            for (first, last) in runs(&words) {
                each_word(&mut again, (first, last), |word, bits| {
                    assert_eq!(*word & bits, 0);
                    *word |= bits;
                });
            }
            assert_eq!(again, words);
        }
    }

    fn log(range: IovaRange, account: &Arc<Account>) -> Result<Log, Error<Infallible>> {
        Log::new(range, 4096, account)
    }

    fn written(log: &Log) -> Vec<IovaRange> {
        let mut found = Vec::new();
        log.each_written(|range| found.push(range));
        found
    }

    #[test]
    fn a_log_says_what_was_marked_to_the_page_and_forgets_whole_pages() {
        let base = 0u64.wrapping_sub(100 << 12);
        let log = log(range(base, 100 << 12), &Account::new(1 << 20)).unwrap();
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
        let error = log(huge, &Account::new(1 << 20)).err().unwrap();
        assert!(matches!(error, Error::TooLargeToTrack { mapping, .. } if mapping == huge));
    }

    #[test]
    fn chunks_are_charged_when_they_are_written_and_only_then() {
        let account = Account::new(3 << 12);
        let chunk = 1u64 << (CHUNK_LG2 + 12);
        let log = log(range(chunk, 1 << 42), &account).unwrap();
        assert_eq!(account.used(), 0);
        let pages = [range(chunk << 3, 0x1000), range(chunk << 8, 0x3000)];
        // From the last to the first, and over the edge of two chunks.
        pages.iter().rev().for_each(|pages| log.mark(*pages));
        assert_eq!((written(&log), account.used()), (pages.to_vec(), 2 << 12));
        log.mark(range((chunk << 8) - 0x1000, 0x2000));
        assert_eq!(account.used(), 3 << 12);
        let before = range((chunk << 8) - 0x1000, 0x1000);
        assert_eq!(written(&log), [pages[0], before, pages[1]]);
        drop(log);
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn where_a_chunk_cannot_be_charged_all_counts_as_written_until_all_is_reported() {
        let account = Account::new(1 << 12);
        let all = range(0, 1 << 40);
        let log = log(all, &account).unwrap();
        log.mark(range(0, 0x1000));
        log.mark(range(1 << 39, 0x1000));
        assert_eq!((written(&log), account.used()), (vec![all], 1 << 12));
        log.clear(range(0, 1 << 39));
        assert_eq!(written(&log), [all]);
        log.clear(all);
        assert_eq!(written(&log), []);
        log.mark(range(0x5000, 0x1000));
        assert_eq!(written(&log), [range(0x5000, 0x1000)]);
    }
}
