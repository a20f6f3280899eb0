//! Unmapping: leaves are cleared, tables that the range covers whole are detached.
//!
//! A detached table is not written at all: one store to the entry that leads to it takes all of it
//! away. It is freed only after the sync, since hardware may still be reading it.

use core::ops::ControlFlow;

use super::cursor::{Cell, Cursor, Reached};
use super::error::Error;
use super::format::{Entry, Format};
use super::memory::TableMemory;
use super::retired::Retired;
use super::scan::Piece;
use super::word::Word;
use super::{PageTable, block_of, to_index};
use crate::addr::{Iova, PhysAddr};
use crate::lg2;
use crate::range::IovaRange;
use crate::span::{Full, Span, SpanBuf};

/// What an unmap with spans did.
#[derive(Debug)]
#[must_use = "hardware may still use what was retired"]
pub struct Unmapped<L> {
    /// What to sync before the spans in the buffer may be freed.
    pub retired: Retired<L>,
    /// What is still to be unmapped, where the buffer became full.
    pub rest: Option<Rest>,
}

/// The rest of a range that is being unmapped. All of it was checked: nothing refuses it any more.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the rest of the range is still mapped"]
pub struct Rest {
    range: IovaRange,
    /// The root of the table that it is of.
    root: PhysAddr,
}

impl Rest {
    /// A range that is known to be mapped by whole leaves without holes.
    pub(crate) fn known(range: IovaRange, root: PhysAddr) -> Self {
        Self { range, root }
    }

    /// Whether it is of the table with this root.
    pub(super) fn is_of(&self, root: PhysAddr) -> bool {
        self.root == root
    }

    /// What is still mapped.
    pub fn range(&self) -> IovaRange {
        self.range
    }
}

/// What becomes of tables that the range covers whole.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Covered {
    /// They leave the tree.
    Detach,
    /// They stay, empty.
    Keep,
}

/// Whether a range is checked on the way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ahead {
    /// All of it, before anything is taken away.
    Check,
    /// It was.
    Checked,
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Puts the spans of `range` into `buf`, as many as fit, and takes those translations away.
    ///
    /// With [`Ahead::Check`], a hole or a leaf that reaches out of the range anywhere refuses the
    /// whole range.
    #[inline(always)]
    pub(super) fn unmap_spans(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        ahead: Ahead,
    ) -> Result<Unmapped<M::List>, Error> {
        let mark = buf.mark();
        let mut retired = Retired::nothing();
        let full_at = match self.collect(range, buf, ahead, &mut retired.leaf_sizes) {
            Ok(full_at) => full_at,
            Err(error) => {
                buf.rewind(mark);
                return Err(error);
            }
        };
        let (taken, rest) = match full_at {
            None => (Some(range), None),
            Some(at) => {
                let taken = (at > range.start()).then(|| before(range, at)).flatten();
                (taken, IovaRange::new(at, range.last()))
            }
        };
        if let Some(taken) = taken {
            // Whole leaves without holes, as was just seen: nothing refuses them. Whatever happens,
            // what was taken away is in `retired`.
            let _ = self.sweep::<false>(taken, Covered::Detach, &mut retired);
        }
        Ok(Unmapped { retired, rest: rest.map(|range| Rest { range, root: self.root.paddr() }) })
    }

    /// Adds the spans of `range` to `buf` and returns the first IOVA whose span had no place.
    #[inline(always)]
    fn collect(
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
        let mut cursor = Cursor::new(self);
        let last = range.last().get();
        let mut at = range.start().get();
        loop {
            let level = match cursor.reach(at, 0) {
                Reached::Table => 0,
                Reached::Stopped { level, .. } => level,
            };
            let pages = if level == 0 && !self.has_groups {
                let spans = buf.len();
                let pages = self.collect_pages(cursor.entries_from(0, at), at, last, buf);
                if buf.len() > spans || pages.is_continue() {
                    *leaf_sizes |= lg2::size(F::GRANULE_LG2);
                }
                pages?
            } else {
                0
            };
            let next = if pages > 0 {
                let done = at + (((pages as u64) << F::GRANULE_LG2) - 1);
                (done < last).then(|| done + 1)
            } else {
                self.scan_table(&cursor, level, at, last, &mut |piece| {
                    match self.check_piece(piece, ahead) {
                        Err(error) => return ControlFlow::Break(Stop::Refused(error)),
                        Ok(None) => {}
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

    /// Adds the spans of pages up to the first entry that is none, and returns how many pages it
    /// took.
    ///
    /// The span at hand stays in registers: with scattered memory this loop is what an unmap costs.
    #[inline(always)]
    fn collect_pages(
        &self,
        entries: &[Cell<F>],
        at: u64,
        last: u64,
        buf: &mut SpanBuf<'_>,
    ) -> ControlFlow<Stop, usize> {
        let page = lg2::size(F::GRANULE_LG2);
        let wanted = to_index((last - at) >> F::GRANULE_LG2).saturating_add(1);
        let entries = entries.get(..wanted).unwrap_or(entries);
        let paddr_of = |cell| match self.format.decode(0, F::Word::load(cell)) {
            Entry::Leaf(leaf) => Some(leaf.paddr.get()),
            _ => None,
        };
        let Some(first) = entries.first().and_then(paddr_of) else {
            return ControlFlow::Continue(0);
        };
        let full = |n: usize| {
            let at = Iova::new(at.wrapping_add((n as u64) << F::GRANULE_LG2));
            ControlFlow::Break(Stop::Full(at))
        };
        let span = |start: u64, next: u64| Span::covering(PhysAddr::new(start), next - start - 1);
        // The last span of the buffer may be one that the first of these joins.
        let (mut start, mut next, mut start_n) = (first, first + page, 0);
        let mut n = 1;
        while let Some(paddr) = entries.get(n).and_then(paddr_of) {
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
            next += page;
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
    fn check_piece(
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
            // Somebody unmapped in the caller's range, against the contract: nothing is left to do.
            (_, Ahead::Checked) => Ok(None),
            (Piece::Hole(hole), _) => Err(Error::Hole { hole }),
            (Piece::Invalid { iova, level }, _) => Err(Error::Corrupt { iova, level }),
        }
    }

    /// Takes the translations of `range` away where they are pages of one table that it does not
    /// cover whole, and says whether it did. Otherwise it is for [`sweep`](Self::sweep).
    #[inline(always)]
    pub(super) fn sweep_in_table(&self, range: IovaRange, retired: &mut Retired<M::List>) -> bool {
        let (first, last) = (range.start().get(), range.last().get());
        let table = F::shift(1);
        let pages = to_index((last - first) >> F::GRANULE_LG2).saturating_add(1);
        if self.has_groups || (first ^ last) >> table != 0 || pages == 1 << F::LG2_ENTRIES {
            return false;
        }
        let Some(entries) = self.find(first, 0).and_then(|entries| entries.get(..pages)) else {
            return false;
        };
        if entries.iter().any(|cell| F::Word::load(cell) == F::Word::EMPTY) {
            return false;
        }
        entries.iter().for_each(|cell| F::Word::store(cell, F::Word::EMPTY));
        self.memory.written(entries);
        retired.leaf_sizes = lg2::size(F::GRANULE_LG2);
        retired.range = Some(range);
        true
    }

    /// Takes the translations of `range` away, in order, and returns where it stopped: behind the
    /// last byte that was taken away, modulo 2^64.
    ///
    /// With `VERIFY` it stops at the first hole and at a leaf that reaches out of the range.
    /// Without, the range is known to consist of whole leaves whose sizes are in `retired` already.
    #[inline(never)]
    pub(super) fn sweep<const VERIFY: bool>(
        &self,
        range: IovaRange,
        covered: Covered,
        retired: &mut Retired<M::List>,
    ) -> (u64, Result<(), Error>) {
        let mut cursor = Cursor::new(self);
        let (first, last) = (range.start().get(), range.last().get());
        let mut at = first;
        // Lowered where a covered table turns out to have holes, so that its leaves are taken one
        // by one.
        let mut cap = match covered {
            Covered::Detach => self.geometry.top_level,
            Covered::Keep => 0,
        };
        let result = loop {
            let level = self.uncovered_level(at, last).min(cap);
            let level = match cursor.reach(at, level) {
                Reached::Table => level,
                Reached::Stopped { level, .. } => level,
            };
            let step = if level == 0 && !self.has_groups {
                self.sweep_pages::<VERIFY>(&cursor, at, last, retired)
            } else {
                self.sweep_entries::<VERIFY>(&cursor, level, at, last, retired)
            };
            at = step.next;
            match step.end {
                None => {}
                Some(End::Done) => break Ok(()),
                Some(End::Refused(error)) => break Err(error),
                // The entry leads to a table that the range does not cover, or that has holes.
                Some(End::Descend) => cap = cap.min(level - 1),
                Some(End::Partial) => {}
            }
        };
        if let Some(taken) = before(range, Iova::new(at)).filter(|_| at != first || result.is_ok())
        {
            retired.cover(if result.is_ok() { range } else { taken });
        }
        (at, result)
    }

    /// The level of the highest table around `at` that `at..=last` does not cover whole: entries
    /// are taken out of that one.
    #[inline(always)]
    fn uncovered_level(&self, at: u64, last: u64) -> u32 {
        let mut level = 0;
        while level < self.geometry.top_level {
            let block = lg2::mask(F::shift(level + 1));
            if at & block != 0 || last - at < block {
                break;
            }
            level += 1;
        }
        level
    }

    /// Clears leaves of a level-0 table that has no leaves of several entries.
    #[inline(always)]
    fn sweep_pages<const VERIFY: bool>(
        &self,
        cursor: &Cursor<'_, F, M>,
        at: u64,
        last: u64,
        retired: &mut Retired<M::List>,
    ) -> Step {
        let shift = F::GRANULE_LG2;
        let entries = cursor.entries_from(0, at);
        let wanted = to_index((last - at) >> shift).saturating_add(1);
        let entries = entries.get(..wanted).unwrap_or(entries);
        let mut done = 0;
        for cell in entries {
            if VERIFY && F::Word::load(cell) == F::Word::EMPTY {
                break;
            }
            F::Word::store(cell, F::Word::EMPTY);
            done += 1;
        }
        self.memory.written(&entries[..done]);
        if VERIFY && done != 0 {
            retired.leaf_sizes |= lg2::size(shift);
        }
        let next = at.wrapping_add((done as u64) << shift);
        if done == wanted {
            return Step { next, end: Some(End::Done) };
        }
        let end = (done < entries.len() || done == 0)
            .then(|| End::Refused(Error::Hole { hole: block_of(next, shift) }));
        Step { next, end }
    }

    /// Clears leaves of any size and detaches covered tables, in one table at `level`.
    fn sweep_entries<const VERIFY: bool>(
        &self,
        cursor: &Cursor<'_, F, M>,
        level: u32,
        at: u64,
        last: u64,
        retired: &mut Retired<M::List>,
    ) -> Step {
        let shift = F::shift(level);
        let (index, table) = cursor.table_at(level, at);
        let mut index = index;
        let mut at = at;
        while let Some(cell) = table.get(index) {
            let word = F::Word::load_link(cell);
            let lg2 = match self.format.decode(level, word) {
                Entry::Leaf(leaf) => {
                    if !lg2::is_aligned(at, leaf.lg2) || last - at < lg2::mask(leaf.lg2) {
                        let error = Error::WouldSplit { leaf: block_of(at, leaf.lg2) };
                        return Step { next: at, end: Some(End::Refused(error)) };
                    }
                    let group = &table[index..index + (1 << (leaf.lg2 - shift))];
                    group.iter().for_each(|cell| F::Word::store(cell, F::Word::EMPTY));
                    self.memory.written(group);
                    retired.leaf_sizes |= lg2::size(leaf.lg2);
                    leaf.lg2
                }
                Entry::Table(child) => {
                    if !lg2::is_aligned(at, shift) || last - at < lg2::mask(shift) {
                        return Step { next: at, end: Some(End::Partial) };
                    }
                    if VERIFY && !self.is_full(child, level - 1, &mut retired.leaf_sizes) {
                        return Step { next: at, end: Some(End::Descend) };
                    }
                    F::Word::store(cell, F::Word::EMPTY);
                    self.memory.written(core::slice::from_ref(cell));
                    self.retire_tree(child, level - 1, retired.tables.get_or_insert_default());
                    shift
                }
                Entry::Empty => {
                    let error = Error::Hole { hole: block_of(at, shift) };
                    return Step { next: at, end: Some(End::Refused(error)) };
                }
                Entry::Invalid => {
                    let error = Error::Corrupt { iova: Iova::new(at), level };
                    return Step { next: at, end: Some(End::Refused(error)) };
                }
            };
            let done = last - at == lg2::mask(lg2);
            at = at.wrapping_add(lg2::size(lg2));
            if done {
                return Step { next: at, end: Some(End::Done) };
            }
            index += 1 << (lg2 - shift);
        }
        let corrupt = || End::Refused(Error::Corrupt { iova: Iova::new(at), level });
        Step { next: at, end: table.is_empty().then(corrupt) }
    }

    /// Whether a table has no holes; adds the sizes of its leaves.
    fn is_full(&self, table: PhysAddr, level: u32, leaf_sizes: &mut u64) -> bool {
        let entries = self.memory.entries(&self.child(table));
        if level == 0 && !self.has_groups {
            *leaf_sizes |= lg2::size(F::GRANULE_LG2);
            // By lines of eight, of which every table but a root is made: one branch each.
            let full = |line: &[Cell<F>]| {
                line.iter().fold(true, |full, cell| full & (F::Word::load(cell) != F::Word::EMPTY))
            };
            return !entries.is_empty() && entries.chunks_exact(8).all(full);
        }
        !entries.is_empty()
            && entries.iter().all(|cell| {
                match self.format.decode(level, F::Word::load_link(cell)) {
                    Entry::Leaf(leaf) => {
                        *leaf_sizes |= lg2::size(leaf.lg2);
                        true
                    }
                    Entry::Table(child) => self.is_full(child, level - 1, leaf_sizes),
                    Entry::Empty | Entry::Invalid => false,
                }
            })
    }

    /// Adds a detached table and all below it to `list`. The tables themselves are only read.
    pub(super) fn retire_tree(&self, table: PhysAddr, level: u32, list: &mut M::List) {
        let addr = self.child(table);
        if level > 0 {
            self.retire_children(self.memory.entries(&addr), level, list);
        }
        self.memory.retire(list, addr);
    }

    /// Adds the tables that `entries` of a table at `level` lead to, and all below them, to `list`.
    pub(super) fn retire_children(&self, entries: &[Cell<F>], level: u32, list: &mut M::List) {
        for cell in entries {
            if let Entry::Table(child) = self.format.decode(level, F::Word::load_link(cell)) {
                self.retire_tree(child, level - 1, list);
            }
        }
    }

    /// Detaches the tables with an address in `range` that lie in `owned` whole and have no leaves.
    pub(super) fn reclaim_tables(&self, range: IovaRange, owned: IovaRange) -> Retired<M::List> {
        let mut retired = Retired::nothing();
        let root = self.memory.entries(&self.root);
        self.prune(root, self.geometry.top_level, range, owned, &mut retired);
        retired
    }

    /// The same below one table, of which `range` is a part. Returns whether the table has become,
    /// or was, empty.
    fn prune(
        &self,
        entries: &[Cell<F>],
        level: u32,
        range: IovaRange,
        owned: IovaRange,
        retired: &mut Retired<M::List>,
    ) -> bool {
        let shift = F::shift(level);
        let mut at = range.start();
        while level > 0
            && let Some(cell) = entries.get(self.index(level, at.get()))
        {
            let block = block_of(at.get(), shift);
            if let (Entry::Table(child), Some(part)) =
                (self.format.decode(level, F::Word::load_link(cell)), range.intersection(block))
            {
                let addr = self.child(child);
                let below = self.memory.entries(&addr);
                if self.prune(below, level - 1, part, owned, retired) && owned.covers(block) {
                    F::Word::store(cell, F::Word::EMPTY);
                    self.memory.written(core::slice::from_ref(cell));
                    self.memory.retire(retired.tables.get_or_insert_default(), addr);
                    retired.cover(block);
                }
            }
            match block.last().checked_add(1) {
                Some(next) if next <= range.last() => at = next,
                _ => break,
            }
        }
        // A table that the memory does not know is none to take out.
        !entries.is_empty() && entries.iter().all(|cell| F::Word::load(cell) == F::Word::EMPTY)
    }
}

/// How far a sweep of one table came.
struct Step {
    /// Behind the last byte taken away, modulo 2^64.
    next: u64,
    /// Why it ended before the end of the table.
    end: Option<End>,
}

enum End {
    /// At the end of the range.
    Done,
    Refused(Error),
    /// At a table that the rest of the range does not cover.
    Partial,
    /// At a table with holes.
    Descend,
}

/// Why no more spans are collected.
enum Stop {
    /// The one at this IOVA has no place.
    Full(Iova),
    Refused(Error),
}

/// The part of `range` before `at`.
fn before(range: IovaRange, at: Iova) -> Option<IovaRange> {
    IovaRange::new(range.start(), Iova::new(at.get().wrapping_sub(1)))
}

/// The error for leaves of `2^lg2` bytes of which `part` cuts the first or the last.
#[cold]
fn split_of(part: IovaRange, lg2: u32) -> Error {
    let cut_first = !lg2::is_aligned(part.start().get(), lg2);
    let at = if cut_first { part.start() } else { part.last() };
    Error::WouldSplit { leaf: block_of(at.get(), lg2) }
}
