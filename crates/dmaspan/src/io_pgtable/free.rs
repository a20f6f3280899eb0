//! Giving tables back that hardware has forgotten, behind those who read them.

use super::format::Format;
use super::memory::TableMemory;
use super::retired::Retired;
use super::unmap::Below;
use super::{Leaked, PageTable};
use crate::promise::Promise;

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Frees what was retired.
    ///
    /// # Safety
    ///
    /// No hardware uses what was retired: none walks this table, or all that do have forgotten it.
    /// [`Domain::sync`](crate::iommu::Domain::sync) is this with the proof.
    #[expect(unsafe_code, reason = "the caller promises that hardware is done with the tables")]
    pub unsafe fn free(&self, retired: Retired<M::List>) {
        if let Some(tables) = retired.tables {
            self.free_tables(tables);
        }
    }

    /// Frees detached tables that no hardware uses, behind those who read them.
    pub(crate) fn free_tables(&self, tables: M::List) {
        self.readers.release(
            tables,
            |list, more| self.append(list, more),
            |tables| self.give_back(tables),
        );
    }

    /// Gives tables that nobody uses back to their memory.
    pub(super) fn give_back(&self, tables: M::List) {
        self.memory.free(Promise::kept(), self.geometry.table, tables);
    }

    /// Moves all tables of `more` to `list`.
    pub(crate) fn append(&self, list: &mut M::List, more: M::List) {
        self.memory.append(Promise::kept(), list, more);
    }
}

impl<F: Format, M: TableMemory<F::Word>> Drop for PageTable<F, M> {
    fn drop(&mut self) {
        // What waited for readers was forgotten by hardware, whatever has become of the rest.
        let (memory, shape) = (&self.memory, self.geometry.table);
        self.readers.drain(|tables| memory.free(Promise::kept(), shape, tables));
        if self.leaked == Leaked::Yes {
            return;
        }
        let mut tables = M::List::default();
        let (root, level) = self.top();
        self.retire_children(self.memory.entries(&root), level, Below::Anything, &mut tables);
        self.memory.free(Promise::kept(), self.geometry.table, tables);
        let mut roots = M::List::default();
        self.memory.retire(&mut roots, root);
        self.memory.free(Promise::kept(), self.geometry.root, roots);
    }
}
