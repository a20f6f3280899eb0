//! A [`Cursor`] is a place in the tree. Every operation keeps one while it moves through its range.

use super::format::{Format, MAX_LEVELS};
use super::memory::{TableAddr, TableMemory};
use super::word::Word;
use super::{PageTable, to_index};
use crate::addr::PhysAddr;
use crate::lg2;
use crate::promise::Promise;
use crate::prot::Coherency;

/// An entry of a format, as hardware and other CPUs see it.
pub(super) type Cell<F> = <<F as Format>::Word as Word>::Atomic;

/// The tables from the root down to where the operation is.
///
/// Moving to the next address climbs only as far as the two addresses differ, so a mapping of many
/// spans is one walk.
pub(super) struct Cursor<'t, F: Format, M: TableMemory<F::Word>> {
    table: &'t PageTable<F, M>,
    /// Entries by level; valid from `low` up.
    tables: [&'t [Cell<F>]; MAX_LEVELS],
    low: u32,
    /// The level of the root.
    top: u32,
    iova: u64,
}

/// Where a descent ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reached<W> {
    /// At the level asked for.
    Table,
    /// Above it, at an entry that leads nowhere.
    Stopped { level: u32, word: W },
}

/// Where a walk ended that did not find its table: the level, and the entries from the one for the
/// address on; none where the tree would have to grow.
pub(super) type Missing<'t, F> = (u32, &'t [Cell<F>]);

impl<'t, F: Format, M: TableMemory<F::Word>> Cursor<'t, F, M> {
    /// A place at the root, for an operation that begins at `iova` and goes upwards.
    #[inline(always)]
    pub(super) fn new(table: &'t PageTable<F, M>, iova: u64) -> Self {
        let (root, top) = table.top();
        if F::GROWS && !table.covers(top, iova) {
            // The tree grows for what begins there. Meanwhile this root may become an inner table,
            // and leave the tree with what others have in it.
            return Self { table, tables: [&[]; MAX_LEVELS], low: top, top, iova: 0 };
        }
        let mut tables = [table.memory.entries(&root); MAX_LEVELS];
        if F::GROWS {
            // Above the root there is nothing yet.
            tables[top as usize + 1..].fill(&[]);
        }
        Self { table, tables, low: top, top, iova: 0 }
    }

    /// Begins anew at the root, which was replaced.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.table, self.iova);
    }

    /// The level of the root.
    #[inline(always)]
    pub(super) fn top(&self) -> u32 {
        self.top
    }

    /// Goes towards the table at `level` that translates `iova`.
    ///
    /// Where the tree would first have to grow, it stops at the level that the root would have.
    #[inline(always)]
    pub(super) fn reach(&mut self, iova: u64, level: u32) -> Reached<F::Word> {
        let differing = self.iova ^ iova;
        self.iova = iova;
        while self.low < self.top && (self.low < level || differing >> F::shift(self.low + 1) != 0)
        {
            self.low += 1;
        }
        if F::GROWS && (level > self.top || !self.table.covers(self.top, iova)) {
            let level = level.max(F::level_of(lg2::floor(iova).max(F::GRANULE_LG2)));
            return Reached::Stopped { level, word: F::Word::EMPTY };
        }
        while self.low > level {
            let word = self.load_link(self.low, iova);
            match self.table.format.table_of(self.low, word) {
                Some(paddr) => self.enter(paddr),
                None => return Reached::Stopped { level: self.low, word },
            }
        }
        Reached::Table
    }

    /// Whether a table at `level` is one that the tree would first have to grow for.
    #[inline(always)]
    pub(super) fn is_above_root(&self, level: u32) -> bool {
        F::GROWS && level > self.top
    }

    /// Makes sure that the links from the root down to `level`, which was reached, are in memory
    /// that is not coherent with the CPU's caches: the thread that installed one may not have
    /// written it back yet, and hardware would not see what is mapped below it.
    #[inline(always)]
    pub(super) fn write_back_links(&self, level: u32) {
        if self.table.memory.coherency() == Coherency::Coherent {
            return;
        }
        for above in level + 1..=self.top {
            if let Some(cell) = self.entries_from(above, self.iova).first() {
                self.table.write_back_link(cell);
            }
        }
    }

    /// Steps into a table that an entry of the lowest one leads to.
    #[inline(always)]
    pub(super) fn enter(&mut self, table: PhysAddr) {
        self.low -= 1;
        self.tables[self.low as usize] = self.table.memory.entries(&self.table.child(table));
    }

    /// The entries of the table at `level` from the one for `iova` on. The table was reached.
    #[inline(always)]
    pub(super) fn entries_from(&self, level: u32, iova: u64) -> &'t [Cell<F>] {
        // Empty where the memory does not know the table.
        self.tables[level as usize].get(self.table.index(level, iova)..).unwrap_or(&[])
    }

    /// The index of the entry for `iova` in the table at `level`, and all of that table's entries.
    #[inline(always)]
    pub(super) fn table_at(&self, level: u32, iova: u64) -> (usize, &'t [Cell<F>]) {
        (self.table.index(level, iova), self.tables[level as usize])
    }

    #[inline(always)]
    fn load_link(&self, level: u32, iova: u64) -> F::Word {
        self.entries_from(level, iova).first().map_or(F::Word::EMPTY, F::Word::load_link)
    }
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// The entries from the one for `iova` on, in the table at `level` that translates it: the walk
    /// of an operation that stays in one table.
    ///
    /// # Errors
    ///
    /// [`Missing`] where that table does not exist.
    #[inline(always)]
    pub(super) fn find(&self, iova: u64, level: u32) -> Result<&[Cell<F>], Missing<'_, F>> {
        let (root, mut at) = self.top();
        if F::GROWS && (level > at || !self.covers(at, iova)) {
            return Err((level, &[]));
        }
        let mut index = self.index(at, iova);
        let mut entries = self.memory.entries(&root);
        while at > level {
            let rest = entries.get(index..).unwrap_or(&[]);
            let word = rest.first().map_or(F::Word::EMPTY, F::Word::load_link);
            let Some(paddr) = self.format.table_of(at, word) else { return Err((at, rest)) };
            entries = self.memory.entries(&self.child(paddr));
            at -= 1;
            index = to_index((iova >> F::shift(at)) & lg2::mask(F::LG2_ENTRIES));
        }
        Ok(entries.get(index..).unwrap_or(&[]))
    }

    /// Writes a link back to memory, unless a bit in it says that somebody did.
    #[cold]
    pub(super) fn write_back_link(&self, cell: &Cell<F>) {
        if F::Word::load(cell) & F::WRITTEN_BACK != F::Word::EMPTY {
            return;
        }
        self.memory.written(Promise::kept(), core::slice::from_ref(cell));
        if F::WRITTEN_BACK != F::Word::EMPTY {
            F::Word::set(cell, F::WRITTEN_BACK);
        }
    }

    /// The table at `paddr` that an entry leads to.
    #[inline(always)]
    pub(super) fn child(&self, paddr: PhysAddr) -> TableAddr {
        // A constant size in every format, so the entries need no length check after inlining.
        TableAddr::new(paddr, F::LG2_ENTRIES + F::Word::LG2_BYTES)
    }
}
