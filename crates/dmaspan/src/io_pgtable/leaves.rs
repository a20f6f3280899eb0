//! This visits the entries of leaves, for operations that change them where they are: marks,
//! permissions and splits.

use core::ops::ControlFlow;

use super::cursor::{Cell, Cursor, Reached};
use super::format::{Entry, Format, Groups};
use super::memory::TableMemory;
use super::word::Word;
use super::{PageTable, block_of};
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::IovaRange;

/// A leaf and all its entries.
pub(super) struct LeafEntries<'t, F: Format> {
    /// What it translates.
    pub(super) range: IovaRange,
    /// log2 of its bytes.
    pub(super) lg2: u32,
    pub(super) level: u32,
    pub(super) cells: &'t [Cell<F>],
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Visits every leaf with an address in `range`, whole, in the order of IOVAs. Holes are passed
    /// over.
    pub(super) fn each_leaf<'t, B>(
        &'t self,
        range: IovaRange,
        mut visit: impl FnMut(LeafEntries<'t, F>) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        let last = range.last().get();
        let mut at = range.start().get();
        let mut cursor = Cursor::new(self, at);
        loop {
            let level = match cursor.reach(at, 0) {
                Reached::Table => 0,
                Reached::Stopped { level, .. } => level,
            };
            let (mut index, table) = cursor.table_at(level, at);
            loop {
                let shift = F::shift(level);
                let (lg2, leaf) = match table.get(index).map(F::Word::load_link) {
                    Some(word) => match self.format.decode(level, word) {
                        Entry::Leaf(leaf) => (leaf.lg2, true),
                        // Reached anew.
                        Entry::Table(_) => break,
                        Entry::Empty | Entry::Invalid => (shift, false),
                    },
                    // A table that the memory does not know, or that the tree would have to grow
                    // for.
                    None if table.is_empty() => (shift, false),
                    None => break,
                };
                let block = block_of(at, lg2);
                let first = index & !((1 << (lg2 - shift)) - 1);
                let next = first + (1 << (lg2 - shift));
                if leaf && let Some(cells) = table.get(first..next) {
                    visit(LeafEntries { range: block, lg2, level, cells })?;
                }
                if block.last().get() >= last {
                    return ControlFlow::Continue(());
                }
                at = block.last().get() + 1;
                index = next;
                if table.is_empty() {
                    break;
                }
            }
        }
    }

    /// The leaf at an address.
    pub(super) fn leaf_at(&self, at: u64) -> Option<LeafEntries<'_, F>> {
        let found = self.each_leaf(block_of(at, 0), ControlFlow::Break);
        found.break_value()
    }

    /// The `n`-th entry of a leaf at `level` whose first entry is `first`.
    #[inline(always)]
    pub(super) fn entry_of(&self, level: u32, first: F::Word, n: u64) -> F::Word {
        match F::GROUPS {
            Groups::Consecutive => self.format.advance(first, n << F::shift(level)),
            Groups::Repeated => first,
        }
    }

    /// What the first entry of a leaf would be with other permissions, without hardware's mark.
    pub(super) fn with_prot(
        &self,
        leaf: &LeafEntries<'_, F>,
        first: F::Word,
        prot: Prot,
    ) -> Option<F::Word> {
        let Entry::Leaf(old) = self.format.decode(leaf.level, first) else { return None };
        let template = self.format.template(leaf.level, leaf.lg2, prot);
        Some(self.format.leaf(template, old.paddr))
    }

    /// Writes all entries of a leaf, the first of which is `first`.
    pub(super) fn write_leaf(&self, leaf: &LeafEntries<'_, F>, first: F::Word) {
        for (n, cell) in (0u64..).zip(leaf.cells) {
            F::Word::store(cell, self.entry_of(leaf.level, first, n));
        }
        self.memory.written(Promise::kept(), leaf.cells);
    }
}
