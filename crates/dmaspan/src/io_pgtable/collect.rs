//! This collects the spans that a range leads to. An unmap returns them.

use core::ops::ControlFlow;

use super::cursor::{Cell, Cursor, Reached};
use super::error::Error;
use super::format::{Entry, Format};
use super::memory::TableMemory;
use super::scan::Piece;
use super::unmap::{Ahead, whole_entries};
use super::word::Word;
use super::{Owned, PageTable, block_of};
use crate::addr::{Iova, PhysAddr};
use crate::lg2;
use crate::range::IovaRange;
use crate::span::{Full, Span, SpanBuf};

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Adds the spans of `range` to `buf` and returns the first IOVA whose span had no place.
    #[inline(always)]
    pub(super) fn collect(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        ahead: Ahead,
        leaf_sizes: &mut u64,
    ) -> Result<Option<Iova>, Error> {
        let full_at = match self.collect_until(range, buf, ahead, leaf_sizes) {
            ControlFlow::Continue(()) => return Ok(None),
            ControlFlow::Break(Stop::Refused(error)) => return Err(error),
            ControlFlow::Break(Stop::Full(at)) => at,
        };
        if let (Ahead::Check, Some(rest)) = (ahead, IovaRange::new(full_at, range.last())) {
            let refused = self.scan(rest, |piece| match self.check_piece(piece, ahead) {
                Ok(_) => ControlFlow::Continue(()),
                Err(error) => ControlFlow::Break(error),
            });
            refused.break_value().map_or(Ok(()), Err)?;
        }
        Ok(Some(full_at))
    }

    #[inline(always)]
    fn collect_until(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        ahead: Ahead,
        leaf_sizes: &mut u64,
    ) -> ControlFlow<Stop> {
        let mut cursor = Cursor::new(self, range.start().get());
        let last = range.last().get();
        let mut at = range.start().get();
        loop {
            let level = match cursor.reach(at, 0) {
                Reached::Table => 0,
                Reached::Stopped { level, .. } => level,
            };
            let shift = F::shift(level);
            let entries = whole_entries(cursor.entries_from(level, at), at, last, shift);
            // Pages, the most frequent, are read in the shortest loop. Where the buffer becomes
            // full in the midst of leaves, the sweep names those before, since they are in a table
            // that it does not take whole.
            let taken = if level == 0 && !self.has_groups {
                self.collect_singles::<false>(entries, 0, at, buf)?
            } else {
                self.collect_singles::<true>(entries, level, at, buf)?
            };
            let next = if taken > 0 {
                *leaf_sizes |= lg2::size(shift);
                let done = at + (((taken as u64) << shift) - 1);
                (done < last).then(|| done + 1)
            } else {
                self.scan_table(&cursor, level, at, last, &mut |piece| {
                    match self.check_piece(piece, ahead) {
                        Err(error) => return ControlFlow::Break(Stop::Refused(error)),
                        // Below a hole there may be empty tables of any level.
                        Ok(None) => *leaf_sizes |= self.geometry.page_sizes,
                        Ok(Some((leaves, paddr, lg2))) => {
                            let span = Span::covering(paddr, leaves.len_less_one());
                            if buf.push(span) == Err(Full) {
                                return ControlFlow::Break(Stop::Full(leaves.start()));
                            }
                            *leaf_sizes |= lg2::size(lg2);
                        }
                    }
                    ControlFlow::Continue(())
                })?
            };
            match next {
                Some(next) => at = next,
                None => return ControlFlow::Continue(()),
            }
        }
    }

    /// Adds the spans of leaves up to the first entry that is none of a single entry, and returns
    /// how many leaves it took.
    ///
    /// The span at hand stays in registers: with scattered memory this loop is what an unmap costs.
    /// Without `GROUPS` there are no leaves of several entries, and no size needs to be looked at.
    #[inline(always)]
    pub(super) fn collect_singles<const GROUPS: bool>(
        &self,
        entries: &[Cell<F>],
        level: u32,
        at: u64,
        buf: &mut SpanBuf<'_>,
    ) -> ControlFlow<Stop, usize> {
        let shift = F::shift(level);
        let size = lg2::size(shift);
        let paddr_of = |cell: &Cell<F>| match self.format.decode(level, F::Word::load(cell)) {
            Entry::Leaf(leaf) if !GROUPS || leaf.lg2 == shift => Some(leaf.paddr.get()),
            _ => None,
        };
        let mut cells = entries.iter();
        let Some(first) = cells.next().and_then(paddr_of) else {
            return ControlFlow::Continue(0);
        };
        let full = |n: usize| {
            ControlFlow::Break(Stop::Full(Iova::new(at.wrapping_add((n as u64) << shift))))
        };
        let span = |start: u64, next: u64| Span::covering(PhysAddr::new(start), next - start - 1);
        // The last span of the buffer may be one that the first of these joins.
        let (mut start, mut next, mut start_n) = (first, first + size, 0);
        let mut n = 1;
        while let Some(paddr) = cells.next().and_then(paddr_of) {
            if paddr != next {
                let pushed = if start_n == 0 {
                    buf.push(span(start, next))
                } else {
                    buf.push_apart(span(start, next))
                };
                if pushed == Err(Full) {
                    return full(start_n);
                }
                (start, start_n) = (paddr, n);
                next = paddr;
            }
            next += size;
            n += 1;
        }
        match buf.push(span(start, next)) {
            Ok(()) => ControlFlow::Continue(n),
            Err(Full) => full(start_n),
        }
    }

    /// What a piece of a range that is to be unmapped adds to its spans: the IOVAs, the address and
    /// the leaves' size. A refusal where it is none of whole leaves.
    #[inline(always)]
    pub(super) fn check_piece(
        &self,
        piece: Piece<F::Word>,
        ahead: Ahead,
    ) -> Result<Option<(IovaRange, PhysAddr, u32)>, Error> {
        match (piece, ahead) {
            (Piece::Leaves { range, paddr, lg2, .. }, _) => {
                let ends = range.start().get() | range.last().get().wrapping_add(1);
                if !lg2::is_aligned(ends, lg2) {
                    return Err(split_of(range, lg2));
                }
                Ok(Some((range, paddr, lg2)))
            }
            // Its owner unmapped something here since.
            (_, Ahead::Checked) => Ok(None),
            (Piece::Hole(hole), _) => Err(Error::Hole { hole }),
            (Piece::Invalid { iova, level }, _) => Err(Error::Corrupt { iova, level }),
        }
    }
}

impl<F: Format, M: TableMemory<F::Word>> Owned<'_, F, M> {
    /// Adds the spans of a range, which is known to be mapped without holes, to `buf`, as many as
    /// fit, and returns the rest of the range.
    pub(crate) fn spans(&self, range: IovaRange, buf: &mut SpanBuf<'_>) -> Option<IovaRange> {
        let full_at = self.table.collect(range, buf, Ahead::Checked, &mut 0).ok().flatten()?;
        IovaRange::new(full_at, range.last())
    }
}

/// Why no more spans are collected.
pub(super) enum Stop {
    /// The one at this IOVA has no place.
    Full(Iova),
    Refused(Error),
}

/// The error for leaves of `2^lg2` bytes of which `part` cuts the first or the last.
#[cold]
fn split_of(part: IovaRange, lg2: u32) -> Error {
    let cut_first = !lg2::is_aligned(part.start().get(), lg2);
    let at = if cut_first { part.start() } else { part.last() };
    Error::WouldSplit { leaf: block_of(at.get(), lg2) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io_pgtable::{Arena, X86_64, X86_64Config};
    use crate::prot::Prot;

    #[test]
    fn spans_are_read_as_many_as_have_room_and_the_rest_is_said_over_holes() {
        let format = X86_64::new(X86_64Config::new(48, 48)).unwrap();
        let mut table = PageTable::new(format, Arena::default()).unwrap();
        let whole = table.whole();
        let pages = [3, 4, 9, 7, 8].map(|n| Span::new(PhysAddr::new(n << 12), 1 << 12).unwrap());
        whole.map_spans(Iova::new(0x1000), &pages, Prot::READ).unwrap();
        // A hole behind them, and a page that has no room.
        whole.map_spans(Iova::new(0x8000), &pages[..1], Prot::READ).unwrap();
        let range = |first, last| IovaRange::new(Iova::new(first), Iova::new(last)).unwrap();
        let span = |n: u64, pages: u64| Span::new(PhysAddr::new(n << 12), pages << 12).unwrap();
        let expected = [span(3, 2), span(9, 1), span(7, 2), span(3, 1)];
        let ends = [0x1000, 0x3000, 0x4000, 0x8000];
        let all = range(0x1000, 0x8fff);
        for room in 0..5 {
            let mut spans = [span(0, 1); 4];
            let mut buf = SpanBuf::new(&mut spans[..room.min(4)]);
            let rest = whole.spans(all, &mut buf);
            assert_eq!(rest, ends.get(room).map(|&at| range(at, 0x8fff)));
            assert_eq!(buf.spans(), &expected[..room.min(4)]);
        }
    }
}
