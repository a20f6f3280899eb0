//! Reading, and clearing, the marks that hardware sets in entries where it writes.

use core::fmt;
use core::ops::ControlFlow;

use super::error::Error;
use super::format::Format;
use super::memory::TableMemory;
use super::retired::Retired;
use super::unmap::{Ahead, Rest, UnmappedSpans};
use super::word::Word;
use super::{Owned, PageTable};
use crate::addr::Iova;
use crate::lg2;
use crate::promise::Promise;
use crate::range::IovaRange;
use crate::span::SpanBuf;

/// One bit for each granule of a range: whether hardware wrote there.
///
/// Bit `n % 64` of word `n / 64` stands for the `n`-th granule, as in the bitmaps of VFIO and
/// iommufd (include/uapi/linux/iommufd.h, `struct iommu_hwpt_get_dirty_bitmap`). Bits are only ever
/// set here: the caller clears them.
///
/// ```
/// use dmaspan::io_pgtable::DirtyBitmap;
/// use dmaspan::{Iova, IovaRange};
///
/// let range = IovaRange::from_len(Iova::new(0x10_0000), 1 << 20)?;
/// let mut words = [0; 4];
/// let bitmap = DirtyBitmap::new(&mut words, range, 4096)?;
/// assert_eq!(bitmap.range(), range);
/// assert!(DirtyBitmap::new(&mut [0; 3], range, 4096).is_err());
/// Ok::<(), dmaspan::io_pgtable::Error>(())
/// ```
pub struct DirtyBitmap<'b> {
    words: &'b mut [u64],
    range: IovaRange,
    granule_lg2: u32,
}

impl<'b> DirtyBitmap<'b> {
    /// Bits in `words` for `range`, whose first granule of `granule` bytes begins at its start.
    ///
    /// # Errors
    ///
    /// [`Error::Bitmap`] where there are too few words, or the granule is no power of two.
    pub fn new(words: &'b mut [u64], range: IovaRange, granule: u64) -> Result<Self, Error> {
        let refused = Error::Bitmap { range, granule, words: words.len() };
        if !granule.is_power_of_two() {
            return Err(refused);
        }
        let granule_lg2 = lg2::alignment(granule);
        let last_bit = range.len_less_one() >> granule_lg2;
        if last_bit >> 6 >= words.len() as u64 {
            return Err(refused);
        }
        Ok(Self { words, range, granule_lg2 })
    }

    /// Returns what there are bits for.
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// Sets the bits of all granules with an address in `dirty`.
    pub(crate) fn mark(&mut self, dirty: IovaRange) {
        let Some(dirty) = dirty.intersection(self.range) else { return };
        let bit = |iova: Iova| (iova.get() - self.range.start().get()) >> self.granule_lg2;
        let (first, last) = (bit(dirty.start()), bit(dirty.last()));
        for (n, word) in (0u64..).zip(&mut *self.words).skip(super::to_index(first >> 6)) {
            let from = if n == first >> 6 { first & 63 } else { 0 };
            let to = if n == last >> 6 { last & 63 } else { 63 };
            *word |= u64::MAX << from & u64::MAX >> (63 - to);
            if n == last >> 6 {
                break;
            }
        }
    }

    /// The same for the part of a leaf that is in `range`.
    fn mark_within(&mut self, leaf: IovaRange, range: IovaRange) {
        if let Some(dirty) = leaf.intersection(range) {
            self.mark(dirty);
        }
    }
}

impl fmt::Debug for DirtyBitmap<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirtyBitmap")
            .field("range", &self.range)
            .field("granule_lg2", &self.granule_lg2)
            .finish_non_exhaustive()
    }
}

impl<F: Format, M: TableMemory<F::Word>> Owned<'_, F, M> {
    /// Sets the bits of `bitmap` for what hardware wrote in `range` since it was mapped or last
    /// read here, and takes the marks away. Holes are clean.
    ///
    /// Hardware marks leaves, so a leaf is reported whole, as far as it lies in `range`. A leaf
    /// that reaches out of the range keeps its mark: nobody was told yet about the rest of it.
    ///
    /// Sync the result: hardware that has a leaf cached as marked would not mark it again.
    ///
    /// # Errors
    ///
    /// [`Error::NoDirtyBits`], [`Error::OutsideBitmap`], [`Error::NotOwned`] and
    /// [`Error::OutsideAperture`], with nothing changed.
    pub fn read_and_clear_dirty(
        &self,
        range: IovaRange,
        bitmap: &mut DirtyBitmap<'_>,
    ) -> Result<Retired<M::List>, Error> {
        self.check_dirty(range, bitmap)?;
        Ok(self.table.read_dirty(
            range,
            |leaf| range.covers(leaf),
            |leaf| bitmap.mark_within(leaf, range),
        ))
    }

    /// The same, and the marks stay.
    ///
    /// # Errors
    ///
    /// As for [`read_and_clear_dirty`](Self::read_and_clear_dirty).
    pub fn read_dirty(&self, range: IovaRange, bitmap: &mut DirtyBitmap<'_>) -> Result<(), Error> {
        self.check_dirty(range, bitmap)?;
        let found = |leaf| bitmap.mark_within(leaf, range);
        let _ = self.table.read_dirty(range, |_| false, found);
        Ok(())
    }

    /// Calls `found` with every leaf that hardware wrote and that has an address in `range`, whole,
    /// and takes the marks of those away that `clears` says. None where hardware marks nothing.
    pub(crate) fn visit_dirty(
        &self,
        range: IovaRange,
        clears: impl Fn(IovaRange) -> bool,
        found: impl FnMut(IovaRange),
    ) -> Retired<M::List> {
        if !self.table.format.tracks_dirty() || self.check_range(range, 0).is_err() {
            return Retired::nothing();
        }
        self.table.read_dirty(range, clears, found)
    }

    /// Takes whatever is mapped in `range` away, which no leaf reaches out of, and sets the bits of
    /// `bitmap` as [`unmap_dirty`](Self::unmap_dirty) does.
    pub(crate) fn remove_dirty(
        &self,
        range: IovaRange,
        bitmap: &mut DirtyBitmap<'_>,
    ) -> Retired<M::List> {
        let mut retired = Retired::nothing();
        if self.check_range(range, F::GRANULE_LG2).is_ok() {
            self.table.take_dirty(range, bitmap, &mut retired);
        }
        retired
    }

    /// [`unmap`](Self::unmap) that also sets the bits of `bitmap` for what hardware wrote, up to
    /// the moment in which the translation was gone.
    ///
    /// It costs an atomic exchange an entry: for who needs the bits.
    ///
    /// # Errors
    ///
    /// As for [`unmap`](Self::unmap), [`Error::NoDirtyBits`] and [`Error::OutsideBitmap`].
    pub fn unmap_dirty(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        bitmap: &mut DirtyBitmap<'_>,
    ) -> Result<UnmappedSpans<M::List>, Error> {
        self.check_range(range, F::GRANULE_LG2)?;
        self.check_dirty(range, bitmap)?;
        self.table.unmap_dirty(range, buf, bitmap, Ahead::Check)
    }

    /// Goes on with an [`unmap_dirty`](Self::unmap_dirty) whose buffer became full, as
    /// [`resume`](Self::resume) does. Nothing refuses it but a `rest` of another table or range, or
    /// one that the bitmap has no bits for.
    pub fn resume_dirty(
        &self,
        rest: Rest,
        buf: &mut SpanBuf<'_>,
        bitmap: &mut DirtyBitmap<'_>,
    ) -> UnmappedSpans<M::List> {
        let range = rest.range();
        if rest.is_of(self.table.id())
            && self.check_range(range, F::GRANULE_LG2).is_ok()
            && self.check_dirty(range, bitmap).is_ok()
            && let Ok(unmapped) = self.table.unmap_dirty(range, buf, bitmap, Ahead::Checked)
        {
            return unmapped;
        }
        UnmappedSpans { retired: Retired::nothing(), rest: Some(rest) }
    }

    fn check_dirty(&self, range: IovaRange, bitmap: &DirtyBitmap<'_>) -> Result<(), Error> {
        self.check_range(range, 0)?;
        if !self.table.format.tracks_dirty() {
            return Err(Error::NoDirtyBits { range });
        }
        if !bitmap.range.covers(range) {
            return Err(Error::OutsideBitmap { range, covered: bitmap.range });
        }
        Ok(())
    }
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    fn read_dirty(
        &self,
        range: IovaRange,
        clears: impl Fn(IovaRange) -> bool,
        mut found: impl FnMut(IovaRange),
    ) -> Retired<M::List> {
        let mut retired = Retired::nothing();
        let _: ControlFlow<()> = self.each_leaf(range, |leaf| {
            // Hardware may have marked any entry of a leaf.
            if !leaf.cells.iter().any(|cell| self.format.is_dirty(F::Word::load(cell))) {
                return ControlFlow::Continue(());
            }
            if clears(leaf.range) {
                leaf.cells.iter().for_each(|cell| self.clean_cell(cell));
                self.memory.written(Promise::kept(), leaf.cells);
                retired.leaf_sizes |= lg2::size(leaf.lg2);
                retired.cover(leaf.range);
            }
            found(leaf.range);
            ControlFlow::Continue(())
        });
        retired
    }

    /// Takes the mark of an entry away, which hardware may set at any time.
    fn clean_cell(&self, cell: &super::cursor::Cell<F>) {
        let mut word = F::Word::load(cell);
        while self.format.is_dirty(word) {
            match F::Word::replace(cell, word, self.format.clean(word)) {
                Ok(()) => return,
                Err(found) => word = found,
            }
        }
    }

    fn unmap_dirty(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        bitmap: &mut DirtyBitmap<'_>,
        ahead: Ahead,
    ) -> Result<UnmappedSpans<M::List>, Error> {
        self.unmap_by(range, buf, ahead, |taken, retired| self.take_dirty(taken, bitmap, retired))
    }

    /// Takes the translations of a range of whole leaves away, and the marks that they had.
    fn take_dirty(
        &self,
        taken: IovaRange,
        bitmap: &mut DirtyBitmap<'_>,
        retired: &mut Retired<M::List>,
    ) {
        let _: ControlFlow<()> = self.each_leaf(taken, |leaf| {
            let dirty = leaf.cells.iter().fold(false, |dirty, cell| {
                dirty | self.format.is_dirty(F::Word::exchange(cell, F::Word::EMPTY))
            });
            self.memory.written(Promise::kept(), leaf.cells);
            retired.leaf_sizes |= lg2::size(leaf.lg2);
            if dirty {
                bitmap.mark(leaf.range);
            }
            ControlFlow::Continue(())
        });
        // Only now, with its entries empty: a walk that is still in a detached table would mark an
        // entry that nobody looks at any more.
        retired.tables = self.reclaim_tables(taken, taken).tables;
        retired.cover(taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> IovaRange {
        IovaRange::from_len(Iova::new(start), len).unwrap()
    }

    #[test]
    fn every_granule_that_is_touched_is_marked_and_no_other() {
        for (start, len, words) in [
            (0u64, 1u64, [1u64, 0, 0]),
            (0xfff, 2, [0b11, 0, 0]),
            (63 << 12, 0x2000, [1 << 63, 1, 0]),
            (0x1000, 127 << 12, [u64::MAX << 1, u64::MAX, 0]),
            (128 << 12, 64 << 12, [0, 0, u64::MAX]),
            (0, 192 << 12, [u64::MAX; 3]),
        ] {
            let mut bits = [0; 3];
            let base = 0x7000_0000;
            let mut bitmap = DirtyBitmap::new(&mut bits, range(base, 192 << 12), 4096).unwrap();
            bitmap.mark(range(base + start, len));
            assert_eq!(bits, words, "{start:#x} {len:#x}");
        }
    }

    #[test]
    fn what_lies_outside_of_the_bitmap_is_not_marked() {
        let mut bits = [0; 1];
        let mut bitmap = DirtyBitmap::new(&mut bits, range(0x4000, 0x4000), 0x1000).unwrap();
        bitmap.mark(range(0, 0x4000));
        bitmap.mark(range(0x8000, 0x4000));
        bitmap.mark(range(0x3000, 0x2000));
        assert_eq!(bits, [1]);
    }

    #[test]
    fn a_bitmap_may_end_at_the_last_address() {
        let mut bits = [0; 1];
        let top = range(0u64.wrapping_sub(64 << 12), 64 << 12);
        let mut bitmap = DirtyBitmap::new(&mut bits, top, 4096).unwrap();
        bitmap.mark(range(u64::MAX, 1));
        assert_eq!(bits, [1 << 63]);
    }

    #[test]
    fn a_granule_that_is_no_power_of_two_and_too_few_words_are_refused() {
        let refused = |words: &mut [u64], granule| {
            DirtyBitmap::new(words, range(0, 65 << 12), granule).is_err()
        };
        assert!(refused(&mut [0; 2], 0) && refused(&mut [0; 2], 4097));
        assert!(refused(&mut [0; 1], 4096) && !refused(&mut [0; 2], 4096));
        assert!(refused(&mut [], 1 << 40));
    }
}
