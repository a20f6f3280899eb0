//! Taking tables out of the tree that became empty.

use super::cursor::Cell;
use super::format::{Entry, Format};
use super::memory::TableMemory;
use super::retired::Retired;
use super::word::Word;
use super::{PageTable, block_of};
use crate::addr::Iova;
use crate::lg2;
use crate::promise::Promise;
use crate::range::IovaRange;

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Detaches the tables with an address in `range` that lie in `owned` whole and have no leaves.
    pub(super) fn reclaim_tables(&self, range: IovaRange, owned: IovaRange) -> Retired<M::List> {
        let mut retired = Retired::nothing();
        let (root, top) = self.top();
        let covered = IovaRange::new(
            Iova::new(0),
            if self.covers(top, u64::MAX) {
                Iova::new(u64::MAX)
            } else {
                Iova::new(lg2::mask(F::shift(top + 1)))
            },
        );
        // What the tree would have to grow for has no tables.
        if let Some(range) = covered.and_then(|covered| covered.intersection(range)) {
            self.prune(self.memory.entries(&root), top, range, owned, &mut retired);
        }
        retired
    }

    /// The same below one table, of which `range` is a part.
    fn prune(
        &self,
        entries: &[Cell<F>],
        level: u32,
        range: IovaRange,
        owned: IovaRange,
        retired: &mut Retired<M::List>,
    ) {
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
                self.prune(below, level - 1, part, owned, retired);
                // Only a table that may go is read through.
                if owned.covers(block)
                    && is_empty::<F>(below)
                    && !self.is_walked(level - 1, block.start().get())
                {
                    F::Word::store(cell, F::Word::EMPTY);
                    self.memory.written(Promise::kept(), core::slice::from_ref(cell));
                    self.memory.retire(retired.tables.get_or_insert_default(), addr);
                    retired.cover(block);
                }
            }
            match block.last().checked_add(1) {
                Some(next) if next <= range.last() => at = next,
                _ => break,
            }
        }
    }
}

/// Whether a table has no entries. One that the memory does not know is none to take out.
fn is_empty<F: Format>(entries: &[Cell<F>]) -> bool {
    !entries.is_empty() && entries.iter().all(|cell| F::Word::load(cell) == F::Word::EMPTY)
}
