//! Reading the tree: one pass over a range yields runs of leaves, and holes. Look-ups, and reads of
//! marks, use it.

use core::ops::ControlFlow;

use super::cursor::{Cell, Cursor, Reached};
use super::format::{Entry, Format, Groups, Leaf};
use super::memory::TableMemory;
use super::word::Word;
use super::{PageTable, block_of, to_index};
use crate::addr::{Iova, PhysAddr};
use crate::lg2;
use crate::range::IovaRange;

/// What a scan comes across, in the order of IOVAs; consecutive pieces leave nothing out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece<W> {
    /// Nothing is mapped.
    Hole(IovaRange),
    /// Leaves of one size in one table, with the same attributes and contiguous addresses. Clipped
    /// to the range of the scan, so the first and the last may be parts of leaves.
    Leaves {
        range: IovaRange,
        /// Of the range's first byte.
        paddr: PhysAddr,
        /// log2 of a leaf's bytes.
        lg2: u32,
        level: u32,
        /// The first leaf's entry.
        word: W,
    },
    /// An entry that is none of the format's.
    Invalid { iova: Iova, level: u32 },
}

impl<W> Piece<W> {
    /// Its first address.
    pub(super) fn start(&self) -> Iova {
        match self {
            Self::Hole(range) | Self::Leaves { range, .. } => range.start(),
            Self::Invalid { iova, .. } => *iova,
        }
    }
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Visits `range` from its start on, until `visit` breaks.
    #[inline(always)]
    pub(super) fn scan<B>(
        &self,
        range: IovaRange,
        mut visit: impl FnMut(Piece<F::Word>) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        let last = range.last().get();
        let mut iova = range.start().get();
        let mut cursor = Cursor::new(self, iova);
        loop {
            let level = match cursor.reach(iova, 0) {
                Reached::Table => 0,
                Reached::Stopped { level, .. } => level,
            };
            match self.scan_table(&cursor, level, iova, last, &mut visit)? {
                Some(next) => iova = next,
                None => return ControlFlow::Continue(()),
            }
        }
    }

    /// Visits entries of one table up to the first that leads to another table; returns where to go
    /// on, if not at the end.
    #[inline(always)]
    pub(super) fn scan_table<B>(
        &self,
        cursor: &Cursor<'_, F, M>,
        level: u32,
        iova: u64,
        last: u64,
        visit: &mut impl FnMut(Piece<F::Word>) -> ControlFlow<B>,
    ) -> ControlFlow<B, Option<u64>> {
        let shift = F::shift(level);
        let entries = cursor.entries_from(level, iova);
        // As many entries as the range has; the last one may reach beyond it.
        let wanted = to_index((last >> shift).wrapping_sub(iova >> shift)).saturating_add(1);
        let entries = entries.get(..wanted).unwrap_or(entries);
        let mut at = 0;
        let mut iova = iova;
        while let Some(word) = entries.get(at).map(F::Word::load_link) {
            let block_last =
                |n: usize| ((iova >> shift) + (n as u64 - 1)) << shift | lg2::mask(shift);
            let (count, piece) = match self.format.decode(level, word) {
                Entry::Leaf(leaf) => {
                    let (count, paddr) = self.leaves(&entries[at..], level, word, leaf, iova);
                    let range = Piece::Leaves {
                        range: clip(iova, block_last(count), last),
                        paddr,
                        lg2: leaf.lg2,
                        level,
                        word,
                    };
                    (count, range)
                }
                Entry::Empty => {
                    let count = empty::<F>(&entries[at..]);
                    (count, Piece::Hole(clip(iova, block_last(count), last)))
                }
                // Reached anew, from the level above the table that it leads to.
                Entry::Table(_) => break,
                Entry::Invalid => (1, Piece::Invalid { iova: Iova::new(iova), level }),
            };
            let piece_last = block_last(count).min(last);
            visit(piece)?;
            at += count;
            if piece_last >= last {
                return ControlFlow::Continue(None);
            }
            iova = piece_last + 1;
        }
        if entries.is_empty() && cursor.is_above_root(level) {
            let hole = clip(iova, block_of(iova, shift).last().get(), last);
            visit(Piece::Hole(hole))?;
            return ControlFlow::Continue(
                hole.last().checked_add(1).map(Iova::get).filter(|&next| next <= last),
            );
        }
        if entries.is_empty() {
            // The memory does not know this table.
            visit(Piece::Invalid { iova: Iova::new(iova), level })?;
            let block_last = block_of(iova, shift).last().get();
            return ControlFlow::Continue((block_last < last).then(|| block_last + 1));
        }
        // At an entry that leads to a table: the caller descends, also where a neighbour installed
        // the table after the caller came here.
        ControlFlow::Continue(Some(iova))
    }

    /// How many of `entries` continue the leaf in the first one, and its address at `iova`.
    #[inline(always)]
    fn leaves(
        &self,
        entries: &[Cell<F>],
        level: u32,
        word: F::Word,
        leaf: Leaf,
        iova: u64,
    ) -> (usize, PhysAddr) {
        let shift = F::shift(level);
        let group = leaf.lg2 - shift;
        if group != 0 && F::GROUPS == Groups::Repeated {
            let offset = iova & lg2::mask(leaf.lg2);
            let left = to_index((lg2::size(leaf.lg2) - offset).div_ceil(lg2::size(shift)));
            let base = lg2::align_down(leaf.paddr.get(), leaf.lg2);
            return (left.min(entries.len()), PhysAddr::new(base + offset));
        }
        let first = leaf.paddr.get();
        let mut next = self.format.clean(word);
        let mut count = 1;
        for cell in &entries[1..] {
            next = self.format.advance(next, lg2::size(shift));
            // Whatever hardware marked, it is the same run.
            if self.format.clean(F::Word::load(cell)) != next {
                break;
            }
            count += 1;
        }
        (count, PhysAddr::new(first + (iova & lg2::mask(shift))))
    }

    /// The first leaf in `range`, whole.
    pub(crate) fn first_leaf(&self, range: IovaRange) -> Option<IovaRange> {
        let found = self.scan(range, |piece| match piece {
            Piece::Leaves { range, lg2, .. } => {
                ControlFlow::Break(block_of(range.start().get(), lg2))
            }
            _ => ControlFlow::Continue(()),
        });
        found.break_value()
    }
}

/// How many of `entries`, at least one, are empty.
fn empty<F: Format>(entries: &[Cell<F>]) -> usize {
    // A loop by index, since large tables are mostly empty: adapters of iterators that are not
    // optimised take three times as long, and tests are not.
    let mut count = 1;
    while count < entries.len() && F::Word::load(&entries[count]) == F::Word::EMPTY {
        count += 1;
    }
    count
}

/// From `first` to `block_last` or `last`, whichever comes first.
#[inline(always)]
fn clip(first: u64, block_last: u64, last: u64) -> IovaRange {
    let start = Iova::new(first);
    // Both are at least `first`, so the range is valid; the fallback is never taken.
    IovaRange::new(start, Iova::new(block_last.min(last))).unwrap_or(IovaRange::point(start))
}
