//! This reads which pages devices have written.

use std::sync::atomic::Ordering;

use dmaspan::{Errno, Iova, IovaRange};

use super::error::Error;
use crate::sys;
use crate::sys::kernel_mapping::Kernel;
use crate::sys::mapping::{Alignment, Backing, Mapping};
use crate::sys::mapping_table::MappingTable;

/// Says whether the pages that devices write are noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DirtyLogging {
    /// They are.
    On,
    /// They are not.
    Off,
}

/// Says what becomes of the kernel's notes when they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DirtyNotes {
    /// They are cleared: the next reading tells what was written since.
    Clear,
    /// They stay.
    Keep,
}

/// The most pages that one has, as many as type 1 says at once (`DIRTY_BITMAP_PAGES_MAX` of
/// drivers/vfio/vfio_iommu_type1.c).
const MOST_PAGES: u64 = 1 << 31;

/// Pages of a range, each of which is dirty or not. Reading adds dirty pages and never takes any
/// away, so that what was read before an error is not lost.
///
/// ```
/// use dmaspan::{Iova, IovaRange};
/// use dmaspan_linux::vfio::DirtyPages;
///
/// let range = IovaRange::from_len(Iova::new(0x10_0000), 0x10_0000)?;
/// let mut bitmap = DirtyPages::new(range, 0x1000)?;
/// bitmap.mark(IovaRange::from_len(Iova::new(0x10_1fff), 2)?);
/// assert!(bitmap.is_dirty(Iova::new(0x10_2000)));
/// let dirty = IovaRange::from_len(Iova::new(0x10_1000), 0x2000)?;
/// assert_eq!(bitmap.ranges().collect::<Vec<_>>(), [dirty]);
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyPages {
    range: IovaRange,
    lg2_page: u32,
    /// A bit for each page, the first of a word the lowest.
    words: Vec<u64>,
}

impl DirtyPages {
    /// All pages of `range`, of `page_size` bytes, clean.
    ///
    /// # Errors
    ///
    /// [`Error::Bitmap`]: `page_size` is no power of two, the range does not begin and end between
    /// pages, or has more than 2^31.
    pub fn new(range: IovaRange, page_size: u64) -> Result<Self, Error> {
        let error = Error::Bitmap { range, page_size, granule: 1 };
        if !page_size.is_power_of_two() {
            return Err(error);
        }
        let lg2_page = page_size.trailing_zeros();
        let low = page_size - 1;
        let pages_less_one = range.len_less_one() >> lg2_page;
        if range.start().get() & low != 0
            || range.last().get() & low != low
            || pages_less_one >= MOST_PAGES
        {
            return Err(error);
        }
        let words = usize::try_from(pages_less_one / 64 + 1).map_err(|_| error)?;
        Ok(Self { range, lg2_page, words: vec![0; words] })
    }

    /// The range.
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// The size of a page, in bytes.
    pub fn page_size(&self) -> u64 {
        1 << self.lg2_page
    }

    /// Returns whether the page of `iova` is dirty. One outside of the range is not.
    pub fn is_dirty(&self, iova: Iova) -> bool {
        let Some(page) = self.page(iova) else { return false };
        self.word(page / 64) & (1 << (page % 64)) != 0
    }

    /// Returns how many pages are dirty.
    pub fn dirty_pages(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// The dirty ranges, in order, no two of which touch.
    pub fn ranges(&self) -> impl Iterator<Item = IovaRange> {
        let mut next = Some(0);
        std::iter::from_fn(move || {
            let first = self.find(next?, 0)?;
            let end = self.find(first, u64::MAX);
            next = end;
            let last = end.map_or(self.range.len_less_one(), |end| (end << self.lg2_page) - 1);
            let at = |offset| self.range.start().checked_add(offset);
            IovaRange::new(at(first << self.lg2_page)?, at(last)?)
        })
    }

    /// Makes all pages clean.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Makes the pages dirty that `range` has a byte of.
    pub fn mark(&mut self, range: IovaRange) {
        let Some(range) = range.intersection(self.range) else { return };
        let (first, last) = (self.page(range.start()), self.page(range.last()));
        let (Some(first), Some(last)) = (first, last) else { return };
        for index in first / 64..=last / 64 {
            let low = if index == first / 64 { u64::MAX << (first % 64) } else { u64::MAX };
            let high = if index == last / 64 { u64::MAX >> (63 - last % 64) } else { u64::MAX };
            let word = usize::try_from(index).ok().and_then(|index| self.words.get_mut(index));
            word.into_iter().for_each(|word| *word |= low & high);
        }
    }

    /// The number of the page of an address in the range.
    fn page(&self, iova: Iova) -> Option<u64> {
        let inside = self.range.contains(iova);
        inside.then(|| (iova.get() - self.range.start().get()) >> self.lg2_page)
    }

    #[cfg(feature = "iommufd-test")]
    pub(super) fn words(&self) -> &[u64] {
        &self.words
    }

    fn word(&self, index: u64) -> u64 {
        let index = usize::try_from(index).ok();
        index.and_then(|index| self.words.get(index)).copied().unwrap_or(0)
    }

    /// The first page from `page` on whose bit differs from those of `than`; none behind the last.
    fn find(&self, page: u64, than: u64) -> Option<u64> {
        let pages = self.range.len_less_one() >> self.lg2_page;
        let mut mask = u64::MAX << (page % 64);
        let mut index = page / 64;
        while index <= pages / 64 {
            let differing = (self.word(index) ^ than) & mask;
            if differing != 0 {
                let page = index * 64 + u64::from(differing.trailing_zeros());
                return (page <= pages).then_some(page);
            }
            (mask, index) = (u64::MAX, index + 1);
        }
        None
    }
}

/// Adds to `bitmap` what `ask` says of each range that is mapped without a hole: a kernel's answer
/// may end at the first hole without saying so (`iommu_read_and_clear_dirty` of
/// drivers/iommu/iommufd/io_pagetable.c). It is asked by the granule, which is the one page size
/// that every kernel has.
pub(super) fn read<K: Kernel>(
    table: &MappingTable<K>,
    granule: u64,
    bitmap: &mut DirtyPages,
    request: &'static str,
    ask: impl Fn(&K, IovaRange, &Mapping) -> Result<(), Errno>,
) -> Result<(), Error> {
    let (range, page_size) = (bitmap.range, bitmap.page_size());
    if page_size < granule {
        return Err(Error::Bitmap { range, page_size, granule });
    }
    // A leaf has one note for all its pages, which is cleared whole.
    table.check_whole(range)?;
    for run in table.mapped_in(range) {
        let failed = |errno| Error::System { request, range: run, errno };
        let mut answer = DirtyPages::new(run, granule)?;
        let bits = room(answer.words.len()).map_err(failed)?;
        let asked = ask(table.kernel(), run, &bits);
        for (word, bits) in answer.words.iter_mut().zip(bits.words()) {
            *word = bits.load(Ordering::Relaxed);
        }
        // What was read is dirty, also where the reading failed later.
        answer.ranges().for_each(|dirty| bitmap.mark(dirty));
        asked.map_err(failed)?;
    }
    Ok(())
}

/// Memory for so many words and more, in pages of its own.
fn room(words: usize) -> Result<Mapping, Errno> {
    let page = usize::try_from(sys::page_size()).map_err(|_| Errno::ENOMEM)?;
    let len =
        words.checked_mul(size_of::<u64>()).and_then(|len| len.checked_next_multiple_of(page));
    Mapping::new(Backing::Anonymous(0), len.ok_or(Errno::ENOMEM)?, Alignment::Kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, last: u64) -> IovaRange {
        IovaRange::new(Iova::new(start), Iova::new(last)).unwrap()
    }

    #[test]
    fn every_mark_dirties_exactly_the_pages_that_it_touches() {
        let (base, page) = (0x7000, 0x1000);
        // Miri, which is hundreds of times slower, tries some.
        let step = if cfg!(miri) { 31 } else { 1 };
        for pages in [1, 2, 63, 64, 65, 130] {
            for first in (0..pages).step_by(step) {
                for last in (first..pages).step_by(step) {
                    let all = range(base, base + pages * page - 1);
                    let mut bitmap = DirtyPages::new(all, page).unwrap();
                    let marked = range(base + first * page + 5, base + last * page + 5);
                    bitmap.mark(marked);
                    let whole = range(base + first * page, base + (last + 1) * page - 1);
                    assert_eq!(bitmap.ranges().collect::<Vec<_>>(), [whole]);
                    assert_eq!(bitmap.dirty_pages(), last - first + 1);
                }
            }
        }
    }

    #[test]
    fn ranges_are_the_maximal_runs_of_dirty_pages() {
        let all = range(0, 200 * 0x1000 - 1);
        let mut bitmap = DirtyPages::new(all, 0x1000).unwrap();
        let dirty = |page: u64| page.is_multiple_of(7) || (60..70).contains(&page) || page == 199;
        for page in (0..200).filter(|&page| dirty(page)) {
            bitmap.mark(range(page * 0x1000, page * 0x1000));
        }
        let pages: Vec<u64> = bitmap
            .ranges()
            .flat_map(|run| run.start().get() / 0x1000..=run.last().get() / 0x1000)
            .collect();
        assert_eq!(pages, (0..200).filter(|&page| dirty(page)).collect::<Vec<_>>());
        for page in 0..200 {
            assert_eq!(bitmap.is_dirty(Iova::new(page * 0x1000 + 0xfff)), dirty(page));
        }
        bitmap.clear();
        assert_eq!(bitmap.ranges().count(), 0);
    }

    #[test]
    fn the_last_address_has_a_page() {
        let top = range(u64::MAX - 0x1fff, u64::MAX);
        let mut bitmap = DirtyPages::new(top, 0x1000).unwrap();
        bitmap.mark(range(u64::MAX, u64::MAX));
        let last = range(u64::MAX - 0xfff, u64::MAX);
        assert_eq!(bitmap.ranges().collect::<Vec<_>>(), [last]);
        assert!(bitmap.is_dirty(Iova::new(u64::MAX)));
        bitmap.mark(range(0, 0xfff));
        assert_eq!(bitmap.dirty_pages(), 1);
    }

    #[test]
    fn ranges_that_have_no_bitmap_are_refused() {
        for (start, last, page) in [
            (0, 0xfff, 0),
            (0, 0xfff, 3),
            (1, 0x1000, 0x1000),
            (0, 0x1000, 0x1000),
            (0, u64::MAX, 0x1000),
            (0, (1 << 43) - 1 + 0x1000, 0x1000),
        ] {
            assert!(DirtyPages::new(range(start, last), page).is_err(), "{start:#x} {last:#x}");
        }
        assert!(DirtyPages::new(range(0, u64::MAX), 1 << 63).is_ok());
    }
}
