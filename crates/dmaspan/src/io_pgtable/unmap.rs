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
use super::word::Word;
use super::{PageTable, block_of, to_index};
use crate::addr::{Iova, PhysAddr};
use crate::lg2;
use crate::platform::Id;
use crate::promise::Promise;
use crate::range::IovaRange;
use crate::span::SpanBuf;

/// Says what [`Owned::unmap_pages`](super::Owned::unmap_pages) did.
#[derive(Debug)]
#[must_use = "hardware may still use what was retired"]
pub struct UnmappedPages<L> {
    /// Bytes taken away, from the start of the range on.
    pub bytes: u64,
    /// Why it stopped before the end of the range.
    pub result: Result<(), Error>,
    /// What to sync.
    pub retired: Retired<L>,
}

/// Says what an unmap with spans did.
#[derive(Debug)]
#[must_use = "hardware may still use what was retired"]
pub struct UnmappedSpans<L> {
    /// What to sync before the spans in the buffer may be freed.
    pub retired: Retired<L>,
    /// What is still to be unmapped, where the buffer became full.
    pub rest: Option<Rest>,
}

/// The rest of a range that is being unmapped. All of it was checked: nothing refuses it any more.
/// What its owner unmaps in between is passed over.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the rest of the range is still mapped"]
pub struct Rest {
    range: IovaRange,
    /// The table that it is of.
    table: Id,
}

impl Rest {
    /// A range that is known to be mapped by whole leaves without holes.
    pub(crate) fn known(range: IovaRange, table: Id) -> Self {
        Self { range, table }
    }

    /// Whether it is of the table with this id.
    pub(super) fn is_of(&self, table: Id) -> bool {
        self.table == table
    }

    /// Returns what is still mapped.
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
    ) -> Result<UnmappedSpans<M::List>, Error> {
        self.unmap_by(range, buf, ahead, |taken, retired| {
            // Whole leaves without holes, as was just seen: nothing refuses them. Whatever happens,
            // what was taken away is in `retired`.
            let _ = self.sweep::<false>(taken, Covered::Detach, retired);
        })
    }

    /// The same; `take` takes the translations of a range of whole leaves away.
    #[inline(always)]
    pub(super) fn unmap_by(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        ahead: Ahead,
        take: impl FnOnce(IovaRange, &mut Retired<M::List>),
    ) -> Result<UnmappedSpans<M::List>, Error> {
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
            take(taken, &mut retired);
        }
        Ok(UnmappedSpans { retired, rest: rest.map(|range| Rest { range, table: self.id() }) })
    }

    /// Puts the spans of `range` into `buf` and takes those translations away, in one walk, if they
    /// are pages of one table that the range does not cover whole, and all of them have room.
    #[inline(always)]
    pub(super) fn unmap_in_table(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
    ) -> Option<Retired<M::List>> {
        let (first, last) = (range.start().get(), range.last().get());
        let count = to_index((last - first) >> F::GRANULE_LG2).saturating_add(1);
        if count >= 1 << F::LG2_ENTRIES {
            return None;
        }
        let entries = self.find(first, 0).ok()?.get(..count)?;
        let mark = buf.mark();
        let found = self.collect_singles::<true>(entries, 0, first, buf);
        if !matches!(found, ControlFlow::Continue(singles) if singles == count) {
            buf.rewind(mark);
            return None;
        }
        entries.iter().for_each(|cell| F::Word::store(cell, F::Word::EMPTY));
        self.memory.written(Promise::kept(), entries);
        Some(Retired { range: Some(range), leaf_sizes: lg2::size(F::GRANULE_LG2), tables: None })
    }

    /// Takes the translations of `range` away as far as they are leaves of one entry each, of
    /// `page_size`, in one table that it does not cover whole. What is left of the range is for
    /// [`sweep`](Self::sweep).
    #[inline(always)]
    pub(super) fn sweep_in_table(
        &self,
        range: IovaRange,
        page_size: u64,
        retired: &mut Retired<M::List>,
    ) -> Option<IovaRange> {
        // Pages, the most frequent, at the price of a constant level.
        if page_size == lg2::size(F::GRANULE_LG2) {
            return self.sweep_level(0, range, retired);
        }
        let lg2 = lg2::alignment(page_size);
        let level = F::level_of(lg2);
        if lg2 == F::shift(level) { self.sweep_level(level, range, retired) } else { Some(range) }
    }

    /// The same for leaves of the size of one entry at `level`.
    #[inline(always)]
    fn sweep_level(
        &self,
        level: u32,
        range: IovaRange,
        retired: &mut Retired<M::List>,
    ) -> Option<IovaRange> {
        let (first, last) = (range.start().get(), range.last().get());
        let shift = F::shift(level);
        let count = to_index((last - first) >> shift).saturating_add(1);
        if count >= 1 << F::LG2_ENTRIES {
            return Some(range);
        }
        let Some(entries) = self.find(first, level).ok().and_then(|found| found.get(..count))
        else {
            return Some(range);
        };
        let singles = self.take_singles(entries, level);
        if singles == count {
            self.memory.written(Promise::kept(), entries);
            retired.leaf_sizes = lg2::size(shift);
            retired.range = Some(range);
            return None;
        }
        let rest = IovaRange::new(Iova::new(first + ((singles as u64) << shift)), range.last());
        if singles > 0 {
            self.memory.written(Promise::kept(), &entries[..singles]);
            retired.leaf_sizes = lg2::size(shift);
            retired.range = rest.and_then(|rest| before(range, rest.start()));
        }
        rest
    }

    /// Takes the translations of `range` away, in order, and returns where it stopped: behind the
    /// last byte that was taken away, modulo 2^64.
    ///
    /// With `VERIFY` it stops at the first hole and at a leaf that reaches out of the range.
    /// Without, the range is known to consist of whole leaves whose sizes are in `retired` already,
    /// and of holes only where all sizes are.
    #[inline(never)]
    pub(super) fn sweep<const VERIFY: bool>(
        &self,
        range: IovaRange,
        covered: Covered,
        retired: &mut Retired<M::List>,
    ) -> (u64, Result<(), Error>) {
        let (first, last) = (range.start().get(), range.last().get());
        let mut cursor = Cursor::new(self, first);
        let mut at = first;
        let top = match covered {
            Covered::Detach => cursor.top(),
            Covered::Keep => 0,
        };
        // A covered table that must stay or has holes is entered, and what it translates taken part
        // by part. That is asked for at its first address alone: from the next one on it is not
        // covered whole.
        let mut entered = (at, top);
        let result = loop {
            let cap = if entered.0 == at { entered.1 } else { top };
            let level = Self::uncovered_level(at, last, cap);
            let level = match cursor.reach(at, level) {
                Reached::Table => level,
                Reached::Stopped { level, .. } => level,
            };
            let step = if cursor.is_above_root(level) {
                let hole = block_of(at, F::shift(level));
                Step { next: at, end: Some(End::Refused(Error::Hole { hole })) }
            } else {
                self.sweep_table::<VERIFY>(&cursor, (level, covered), at, last, retired)
            };
            at = step.next;
            match step.end {
                None => {}
                Some(End::Done) => break Ok(()),
                Some(End::Refused(error @ Error::WouldSplit { .. })) => break Err(error),
                Some(End::Refused(error)) if VERIFY => break Err(error),
                Some(End::Refused(_)) => {
                    // The owner unmapped something here after the range was checked.
                    let hole = block_of(at, F::shift(level)).last().get();
                    at = hole.min(last).wrapping_add(1);
                    if hole >= last {
                        break Ok(());
                    }
                }
                Some(End::Descend) => entered = (at, level - 1),
                Some(End::Partial) => {}
            }
        };
        // Where all of 2^64 is taken away, it stopped where it began.
        if let Some(taken) = before(range, Iova::new(at)).filter(|_| at != first || result.is_ok())
        {
            retired.cover(taken);
        }
        (at, result)
    }

    /// The level, up to `cap`, of the highest table around `at` that `at..=last` does not cover
    /// whole: entries are taken out of that one.
    #[inline(always)]
    fn uncovered_level(at: u64, last: u64, cap: u32) -> u32 {
        let mut level = 0;
        while level < cap {
            let block = lg2::mask(F::shift(level + 1));
            if at & block != 0 || last - at < block {
                break;
            }
            level += 1;
        }
        level
    }

    /// Clears leaves of any size and detaches covered tables, unless those stay, in one table at
    /// `level`.
    #[inline(always)]
    fn sweep_table<const VERIFY: bool>(
        &self,
        cursor: &Cursor<'_, F, M>,
        (level, covered): (u32, Covered),
        at: u64,
        last: u64,
        retired: &mut Retired<M::List>,
    ) -> Step {
        let shift = F::shift(level);
        let (mut index, table) = cursor.table_at(level, at);
        let mut at = at;
        loop {
            let entries = table.get(index..).unwrap_or(&[]);
            let entries = whole_entries(entries, at, last, shift);
            let singles = self.clear_singles::<VERIFY>(entries, level);
            if singles != 0 {
                self.memory.written(Promise::kept(), &entries[..singles]);
                retired.leaf_sizes |= lg2::size(shift);
                let bytes = (singles as u64) << shift;
                let done = last - at == bytes.wrapping_sub(1);
                at = at.wrapping_add(bytes);
                if done {
                    return Step { next: at, end: Some(End::Done) };
                }
                index += singles;
            }
            let Some(cell) = table.get(index) else {
                let corrupt = || End::Refused(Error::Corrupt { iova: Iova::new(at), level });
                return Step { next: at, end: table.is_empty().then(corrupt) };
            };
            if covered == Covered::Keep
                && level > 0
                && self.format.table_of(level, F::Word::load_link(cell)).is_some()
            {
                return Step { next: at, end: Some(End::Partial) };
            }
            let lg2 =
                match self.take_entry::<VERIFY>(&table[index..], cell, level, at, last, retired) {
                    Ok(lg2) => lg2,
                    Err(end) => return Step { next: at, end: Some(end) },
                };
            let done = last - at == lg2::mask(lg2);
            at = at.wrapping_add(lg2::size(lg2));
            if done {
                return Step { next: at, end: Some(End::Done) };
            }
            index += 1 << (lg2 - shift);
        }
    }

    /// Clears the leaf of several entries, or detaches the table, at the first of `entries`, and
    /// returns the log2 of the bytes that it translated.
    fn take_entry<const VERIFY: bool>(
        &self,
        entries: &[Cell<F>],
        cell: &Cell<F>,
        level: u32,
        at: u64,
        last: u64,
        retired: &mut Retired<M::List>,
    ) -> Result<u32, End> {
        let shift = F::shift(level);
        let covers = |lg2| lg2::is_aligned(at, lg2) && last - at >= lg2::mask(lg2);
        match self.format.decode(level, F::Word::load_link(cell)) {
            Entry::Leaf(leaf) => {
                if !covers(leaf.lg2) {
                    return Err(End::Refused(Error::WouldSplit { leaf: block_of(at, leaf.lg2) }));
                }
                let group = entries.get(..1 << (leaf.lg2 - shift)).unwrap_or(entries);
                group.iter().for_each(|cell| F::Word::store(cell, F::Word::EMPTY));
                self.memory.written(Promise::kept(), group);
                retired.leaf_sizes |= lg2::size(leaf.lg2);
                Ok(leaf.lg2)
            }
            Entry::Table(child) => {
                if !covers(shift) {
                    return Err(End::Partial);
                }
                if self.is_walked(level - 1, at)
                    || VERIFY && !self.is_full(child, level - 1, &mut retired.leaf_sizes)
                {
                    return Err(End::Descend);
                }
                F::Word::store(cell, F::Word::EMPTY);
                self.memory.written(Promise::kept(), core::slice::from_ref(cell));
                let below = Below::LeavesOf(retired.leaf_sizes);
                self.retire_tree(child, level - 1, below, retired.tables.get_or_insert_default());
                Ok(shift)
            }
            Entry::Empty => Err(End::Refused(Error::Hole { hole: block_of(at, shift) })),
            Entry::Invalid => Err(End::Refused(Error::Corrupt { iova: Iova::new(at), level })),
        }
    }

    /// Clears the leaves of one entry each that `entries` begin with, and returns how many.
    #[inline(always)]
    fn clear_singles<const VERIFY: bool>(&self, entries: &[Cell<F>], level: u32) -> usize {
        if !VERIFY && level == 0 && !self.has_groups {
            // They are known to be pages.
            entries.iter().for_each(|cell| F::Word::store(cell, F::Word::EMPTY));
            return entries.len();
        }
        self.take_singles(entries, level)
    }

    /// The same where nothing is known. Each line is cleared right behind the look at it.
    #[inline(always)]
    fn take_singles(&self, entries: &[Cell<F>], level: u32) -> usize {
        let mut taken = 0;
        for line in entries.chunks_exact(8) {
            if !self.all_single(line, level) {
                break;
            }
            line.iter().for_each(|cell| F::Word::store(cell, F::Word::EMPTY));
            taken += 8;
        }
        for cell in &entries[taken..] {
            if !self.format.is_single(level, F::Word::load(cell)) {
                break;
            }
            F::Word::store(cell, F::Word::EMPTY);
            taken += 1;
        }
        taken
    }

    /// How many leaves of one entry each `entries` begin with.
    #[inline(always)]
    fn count_singles(&self, entries: &[Cell<F>], level: u32) -> usize {
        let is_single = |cell| self.format.is_single(level, F::Word::load(cell));
        // By lines of eight: one branch each.
        let lines = entries.chunks_exact(8).take_while(|line| self.all_single(line, level)).count();
        let behind = entries[lines * 8..].iter().take_while(|cell| is_single(cell)).count();
        lines * 8 + behind
    }

    /// By a branch for all of them.
    #[inline(always)]
    fn all_single(&self, entries: &[Cell<F>], level: u32) -> bool {
        let is_single = |cell| self.format.is_single(level, F::Word::load(cell));
        entries.iter().fold(true, |all, cell| all & is_single(cell))
    }

    /// Whether a table and all below it have no holes; adds the sizes of its leaves.
    fn is_full(&self, table: PhysAddr, level: u32, leaf_sizes: &mut u64) -> bool {
        let entries = self.memory.entries(&self.child(table));
        let shift = F::shift(level);
        let mut index = 0;
        while let Some(cell) = entries.get(index) {
            match self.format.decode(level, F::Word::load_link(cell)) {
                Entry::Leaf(leaf) if leaf.lg2 == shift => {
                    *leaf_sizes |= lg2::size(shift);
                    index += self.count_singles(&entries[index..], level).max(1);
                }
                Entry::Leaf(leaf) => {
                    *leaf_sizes |= lg2::size(leaf.lg2);
                    index += 1 << (leaf.lg2 - shift);
                }
                Entry::Table(child) if self.is_full(child, level - 1, leaf_sizes) => index += 1,
                _ => return false,
            }
        }
        !entries.is_empty()
    }

    /// Adds a detached table and all below it to `list`. The tables themselves are only read.
    pub(super) fn retire_tree(
        &self,
        table: PhysAddr,
        level: u32,
        below: Below,
        list: &mut M::List,
    ) {
        let addr = self.child(table);
        let has_tables = match below {
            Below::Anything => true,
            Below::LeavesOf(sizes) => sizes & lg2::mask(F::shift(level)) != 0,
        };
        if has_tables {
            self.retire_children(self.memory.entries(&addr), level, below, list);
        }
        self.memory.retire(list, addr);
    }

    /// Adds the tables that `entries` of a table at `level` lead to, and all below them, to `list`.
    pub(super) fn retire_children(
        &self,
        entries: &[Cell<F>],
        level: u32,
        below: Below,
        list: &mut M::List,
    ) {
        let Some(lower) = level.checked_sub(1) else { return };
        for cell in entries {
            if let Some(child) = self.format.table_of(level, F::Word::load_link(cell)) {
                self.retire_tree(child, lower, below, list);
            }
        }
    }
}

/// What may be below a detached table.
#[derive(Clone, Copy)]
pub(super) enum Below {
    Anything,
    /// No holes, and leaves of these sizes: no tables where all of them are larger than what the
    /// entries of a lower table cover.
    LeavesOf(u64),
}

/// Those of `entries`, the first of them at `at`, that lie in `at..=last` whole.
#[inline(always)]
pub(super) fn whole_entries<T>(entries: &[T], at: u64, last: u64, shift: u32) -> &[T] {
    if !lg2::is_aligned(at, shift) {
        return &[];
    }
    let bytes = last - at;
    let ends_whole = bytes & lg2::mask(shift) == lg2::mask(shift);
    let count = to_index(bytes >> shift).saturating_add(usize::from(ends_whole));
    entries.get(..count).unwrap_or(entries)
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
    /// At a table that the rest of the range does not cover, or that stays.
    Partial,
    /// At a table with holes, or one that must stay.
    Descend,
}

/// The part of `range` before `at`.
fn before(range: IovaRange, at: Iova) -> Option<IovaRange> {
    IovaRange::new(range.start(), Iova::new(at.get().wrapping_sub(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io_pgtable::{
        AmdV1, AmdV1Config, Arena, ArmLpaeS1, ArmLpaeS1Config, MapUndone, Owned,
    };
    use crate::prot::Prot;
    use crate::span::Span;

    const PAGE: u64 = 4 << 10;
    const GIB: u64 = 1 << 30;

    fn range(start: u64, len: u64) -> IovaRange {
        IovaRange::from_len(Iova::new(start), len).unwrap()
    }

    fn map<F: Format>(
        owned: &Owned<'_, F, Arena>,
        iova: u64,
        paddr: u64,
        len: u64,
    ) -> Result<(), MapUndone<<Arena as TableMemory<F::Word>>::List>>
    where
        Arena: TableMemory<F::Word>,
    {
        let span = Span::new(PhysAddr::new(paddr), len).unwrap();
        owned.map_spans(Iova::new(iova), &[span], Prot::READ_WRITE)
    }

    #[test]
    fn the_root_that_hardware_walks_stays_and_all_else_that_is_covered_goes() {
        let memory = Arena::new(PhysAddr::new(1 << 30), 1 << 20);
        let page_sizes = Some(1 << 12 | 1 << 21);
        let config = AmdV1Config { first_levels: 2, page_sizes, ..AmdV1Config::new(48, 48) };
        let mut table = PageTable::new(AmdV1::new(config).unwrap(), memory.clone()).unwrap();
        table.walks_from(table.root_word());
        let whole = table.whole();
        let beyond = whole.unmap_pages(Iova::new(1 << 40), PAGE, 1);
        assert!(matches!(beyond.result, Err(Error::Hole { .. })), "{beyond:?}");
        // A page, and behind it what the tree would have to grow for.
        map(&whole, GIB - PAGE, 0, PAGE).unwrap();
        let mut room = SpanBuf::room::<1>();
        let refused = whole.unmap(range(GIB - PAGE, 2 * PAGE), &mut SpanBuf::new(&mut room));
        assert!(matches!(refused, Err(Error::Hole { .. })), "{refused:?}");
        let gone = whole.unmap(range(GIB - PAGE, PAGE), &mut SpanBuf::new(&mut room)).unwrap();
        assert!(!gone.retired.has_tables());
        // The tree grows, and what hardware walks is below its root.
        map(&whole, 4 * GIB, 0, PAGE).unwrap();
        let emptied = table.whole().reclaim(range(0, GIB)).unwrap();
        table.free_tables(emptied.tables.unwrap());
        let whole = table.whole();
        let before = memory.tables();
        map(&whole, 0, 8 * GIB, PAGE).unwrap();
        map(&whole, PAGE, 8 * GIB + PAGE, 2 * GIB - PAGE).unwrap();
        // One of pages at the begin, and one for the second gibibyte.
        assert_eq!(memory.tables(), before + 2);
        let gone = whole.unmap(range(0, 2 * GIB), &mut SpanBuf::new(&mut room)).unwrap();
        assert!(gone.rest.is_none() && gone.retired.has_tables());
        table.free_tables(gone.retired.tables.unwrap());
        assert_eq!(memory.tables(), before);
    }

    #[test]
    fn a_rest_that_is_all_of_a_table_detaches_it() {
        let memory = Arena::new(PhysAddr::new(1 << 30), 1 << 20);
        let mut table = PageTable::new(
            AmdV1::new(AmdV1Config {
                page_sizes: Some(1 << 12 | 1 << 21),
                ..AmdV1Config::new(48, 48)
            })
            .unwrap(),
            memory,
        )
        .unwrap();
        let id = table.id();
        let whole = table.whole();
        let all = range(2 << 20, 2 << 20);
        map(&whole, 2 << 20, PAGE, 2 << 20).unwrap();
        let mut room = SpanBuf::room::<1>();
        let gone = whole.resume(Rest::known(all, id), &mut SpanBuf::new(&mut room));
        assert!(gone.rest.is_none() && gone.retired.has_tables());
    }

    #[test]
    fn groups_that_were_mapped_before_a_collision_are_taken_back() {
        for group in [16 * PAGE, 32 << 20] {
            let memory = Arena::new(PhysAddr::new(1 << 30), 1 << 20);
            let page_sizes = Some(1 << 12 | 1 << 21 | group);
            let config = ArmLpaeS1Config { page_sizes, ..ArmLpaeS1Config::new(48, 48) };
            let format = ArmLpaeS1::<12>::new(config).unwrap();
            let mut table = PageTable::new(format, memory).unwrap();
            let whole = table.whole();
            map(&whole, 2 * group, 0, PAGE).unwrap();
            let undone = map(&whole, 0, 4 * group, 2 * group + PAGE).unwrap_err();
            let leaf = range(2 * group, PAGE);
            assert_eq!(undone.error, Error::Occupied { leaf });
            if let Some(taken) = undone.retired.range() {
                assert_eq!((taken, undone.retired.leaf_sizes()), (range(0, 2 * group), group));
            }
            assert_eq!(whole.walk(range(0, 4 * group)).map(|run| run.range).next(), Some(leaf));
            // The second of two that follow each other is named where it is cut.
            map(&whole, 0, 4 * group, 2 * group).unwrap();
            let mut room = SpanBuf::room::<1>();
            let cut = whole.unmap(range(0, group + PAGE), &mut SpanBuf::new(&mut room));
            let leaf = range(group, group);
            assert!(matches!(cut, Err(Error::WouldSplit { leaf: it }) if it == leaf), "{cut:?}");
        }
    }
}
