//! Replacing a large leaf by smaller ones.
//!
//! Source: the order of break, invalidation and make is that of DDI 0487, D8.16.1; hardware that
//! does not need it gets the new entry in one store.

use super::error::Error;
use super::format::{Entry, Format};
use super::leaves::LeafEntries;
use super::memory::TableMemory;
use super::retired::Retired;
use super::word::Word;
use super::{PageTable, block_of, to_index};
use crate::addr::{Iova, PhysAddr};
use crate::lg2;
use crate::promise::Promise;

/// Says whether a translation may be missing for a moment, in which a device that uses it faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gap {
    /// It may not: what cannot be done without is refused.
    Refuse,
    /// It may: no device uses it, or the device retries.
    Accept,
}

/// Why a leaf was not split.
#[derive(Debug)]
pub(crate) enum SplitFailed<E> {
    /// The table refuses.
    Table(Error),
    /// Hardware did not forget the leaf.
    Sync(E),
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Makes `at` the border between two leaves, by splitting the leaf around it as little as that
    /// takes. `sync` makes hardware forget the large leaf.
    ///
    /// # Errors
    ///
    /// With translations as before: [`Error::Hole`], [`Error::NoTables`], [`Error::NeedsBreak`],
    /// and [`Error::WouldSplit`] where some level has no leaves of a single entry; and what `sync`
    /// says.
    pub(crate) fn split<E>(
        &self,
        at: Iova,
        gap: Gap,
        mut sync: impl FnMut(Retired<M::List>) -> Result<(), E>,
    ) -> Result<(), SplitFailed<E>> {
        let at = at.get();
        let Some(leaf) = self.leaf_at(at) else {
            return Err(SplitFailed::Table(Error::Hole { hole: block_of(at, F::GRANULE_LG2) }));
        };
        if lg2::is_aligned(at, leaf.lg2) {
            return Ok(());
        }
        if !lg2::is_aligned(at, F::GRANULE_LG2) {
            let page_size = lg2::size(F::GRANULE_LG2);
            let range = block_of(at, 0);
            return Err(SplitFailed::Table(Error::Misaligned { range, page_size }));
        }
        // A table for each level down to the one whose leaves begin at `at`.
        let levels = || (0..leaf.level).filter(|&level| !lg2::is_aligned(at, F::shift(level + 1)));
        let own = (leaf.cells.len() > 1).then_some(leaf.level);
        if !levels().chain(own).all(|level| self.has_single(&leaf, level)) {
            return Err(SplitFailed::Table(Error::WouldSplit { leaf: leaf.range }));
        }
        let must_break = self.format.needs_break();
        if must_break && gap == Gap::Refuse {
            return Err(SplitFailed::Table(Error::NeedsBreak { leaf: leaf.range }));
        }
        let asked = levels().count();
        let mut list = self
            .memory
            .reserve(self.geometry.table, asked)
            .map_err(|_| SplitFailed::Table(Error::NoTables { range: leaf.range, asked }))?;
        let result = self.split_leaf(&leaf, at, &mut list, must_break.then_some(&mut sync));
        self.memory.free(Promise::kept(), self.geometry.table, list);
        result.map_err(SplitFailed::Sync)?;
        sync(Self::forget(&leaf)).map_err(SplitFailed::Sync)
    }

    fn forget(leaf: &LeafEntries<'_, F>) -> Retired<M::List> {
        let mut retired = Retired::nothing();
        retired.leaf_sizes = lg2::size(leaf.lg2);
        retired.cover(leaf.range);
        retired
    }

    /// Replaces a leaf by ones of a single entry, and the one around `at` by a table if need be.
    /// With a sync given the leaf is broken first.
    fn split_leaf<E>(
        &self,
        leaf: &LeafEntries<'_, F>,
        at: u64,
        list: &mut M::List,
        sync: Option<&mut impl FnMut(Retired<M::List>) -> Result<(), E>>,
    ) -> Result<(), E> {
        let Some(old) = self.first_of(leaf) else { return Ok(()) };
        let single = self.leaf_like(leaf.level, leaf.level, old);
        // Which of the entries gets a table: none where `at` is the border of two.
        let (level, shift) = (leaf.level, F::shift(leaf.level));
        let inner = to_index((at - leaf.range.start().get()) >> shift);
        let table = (!lg2::is_aligned(at, shift))
            .then(|| {
                let word = self.format.advance(single, (inner as u64) << shift);
                self.build_below(level, word, at, list)
            })
            .flatten();
        let words = |n: usize| match table {
            Some(table) if n == inner => self.format.link(level, table),
            _ => self.format.advance(single, (n as u64) << shift),
        };
        let was_dirty = self.format.is_dirty(old);
        let mut dirty = was_dirty;
        if let Some(sync) = sync {
            for cell in leaf.cells {
                dirty |= self.format.is_dirty(F::Word::exchange(cell, F::Word::EMPTY));
            }
            self.memory.written(Promise::kept(), leaf.cells);
            if let Err(error) = sync(Self::forget(leaf)) {
                self.write_leaf(leaf, if dirty { self.format.dirtied(old) } else { old });
                if let Some(table) = table {
                    self.retire_tree(table, level - 1, super::unmap::Below::Anything, list);
                }
                return Err(error);
            }
        }
        for (n, cell) in leaf.cells.iter().enumerate() {
            dirty |= self.format.is_dirty(F::Word::exchange(cell, words(n)));
        }
        self.memory.written(Promise::kept(), leaf.cells);
        if dirty && !was_dirty {
            self.soil(leaf.cells, level);
        }
        Ok(())
    }

    /// What a leaf's entries say: the first, marked where any is.
    fn first_of(&self, leaf: &LeafEntries<'_, F>) -> Option<F::Word> {
        let first = leaf.cells.first().map(F::Word::load)?;
        let dirty = leaf.cells.iter().any(|cell| self.format.is_dirty(F::Word::load(cell)));
        Some(if dirty { self.format.dirtied(first) } else { first })
    }

    /// Whether an entry at `level` can be a leaf like this one by itself: not where the format has
    /// no leaves of that size, as AMD's has none of 512G.
    fn has_single(&self, leaf: &LeafEntries<'_, F>, level: u32) -> bool {
        let Some(word) = self.first_of(leaf) else { return false };
        self.format.is_single(level, self.leaf_like(leaf.level, level, word))
    }

    /// The leaf of a single entry at `to` with the address and attributes of a leaf at `from`.
    fn leaf_like(&self, from: u32, to: u32, word: F::Word) -> F::Word {
        let Entry::Leaf(leaf) = self.format.decode(from, word) else { return F::Word::EMPTY };
        let prot = self.format.prot(from, word);
        let template = self.format.template(to, F::shift(to), prot);
        // Of a repeated leaf the address is the whole leaf's, which is the first entry's.
        let like = self.format.leaf(template, leaf.paddr);
        if self.format.is_dirty(word) { self.format.dirtied(like) } else { like }
    }

    /// A table with the leaves of the next lower level that a leaf of a single entry at `level`
    /// stands for, and below it a table around `at` wherever that is no border yet.
    fn build_below(
        &self,
        level: u32,
        leaf: F::Word,
        at: u64,
        list: &mut M::List,
    ) -> Option<PhysAddr> {
        let below = level - 1;
        let shift = F::shift(below);
        let first = self.leaf_like(level, below, leaf);
        let inner = self.index(below, at);
        let link = if lg2::is_aligned(at, shift) {
            None
        } else {
            let word = self.format.advance(first, (inner as u64) << shift);
            let table = self.build_below(below, word, at, list)?;
            Some(self.format.link(below, table) | F::WRITTEN_BACK)
        };
        // As many as were reserved.
        let mut fresh = self.memory.take(Promise::kept(), self.geometry.table, list)?;
        for (n, word) in fresh.words().iter_mut().enumerate() {
            *word = match link {
                Some(link) if n == inner => link,
                _ => self.format.advance(first, (n as u64) << shift),
            };
        }
        let paddr = fresh.paddr();
        self.memory.publish(fresh);
        Some(paddr)
    }

    /// Marks all leaves of some entries as written.
    fn soil(&self, cells: &[super::cursor::Cell<F>], level: u32) {
        for cell in cells {
            let word = F::Word::load_link(cell);
            match self.format.decode(level, word) {
                Entry::Leaf(_) => F::Word::store(cell, self.format.dirtied(word)),
                Entry::Table(table) => {
                    self.soil(self.memory.entries(&self.child(table)), level - 1);
                }
                Entry::Empty | Entry::Invalid => {}
            }
        }
        self.memory.written(Promise::kept(), cells);
    }
}
