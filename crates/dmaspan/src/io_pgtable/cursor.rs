//! A place in the tree, kept while an operation moves through its range.

use super::format::{Format, MAX_LEVELS};
use super::memory::{TableAddr, TableMemory};
use super::word::Word;
use super::{PageTable, to_index};
use crate::addr::PhysAddr;
use crate::lg2;

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

impl<'t, F: Format, M: TableMemory<F::Word>> Cursor<'t, F, M> {
    #[inline(always)]
    pub(super) fn new(table: &'t PageTable<F, M>) -> Self {
        let root = table.memory.entries(&table.root);
        Self { table, tables: [root; MAX_LEVELS], low: table.geometry.top_level, iova: 0 }
    }

    /// Goes towards the table at `level` that translates `iova`.
    #[inline(always)]
    pub(super) fn reach(&mut self, iova: u64, level: u32) -> Reached<F::Word> {
        let differing = self.iova ^ iova;
        self.iova = iova;
        let top = self.table.geometry.top_level;
        while self.low < top && (self.low < level || differing >> F::shift(self.low + 1) != 0) {
            self.low += 1;
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
    /// of an operation that stays in one table. `None` where that table does not exist.
    #[inline(always)]
    pub(super) fn find(&self, iova: u64, level: u32) -> Option<&[Cell<F>]> {
        let mut at = self.geometry.top_level;
        let mut index = self.index(at, iova);
        let mut entries = self.memory.entries(&self.root);
        while at > level {
            let word = F::Word::load_link(entries.get(index)?);
            let paddr = self.format.table_of(at, word)?;
            entries = self.memory.entries(&self.child(paddr));
            at -= 1;
            index = to_index((iova >> F::shift(at)) & lg2::mask(F::LG2_ENTRIES));
        }
        entries.get(index..)
    }

    /// The table at `paddr` that an entry leads to.
    #[inline(always)]
    pub(super) fn child(&self, paddr: PhysAddr) -> TableAddr {
        // A constant size in every format, so the entries need no length check after inlining.
        TableAddr::new(paddr, F::LG2_ENTRIES + F::Word::LG2_BYTES)
    }
}
