//! Mapping: one walk, each entry checked and stored in one pass.
//!
//! Checking a table of 512 entries before storing costs more than the stores themselves, so entries
//! of tables that exist are checked as they are stored; a collision found late takes back what was
//! stored. Before the first *new* table is installed, though, the rest of the range is surveyed:
//! collisions there are found, and the tables that it lacks are reserved. From then on
//! nothing can fail, so a failed call never leaves a table behind.

use super::cursor::{Cell, Cursor, Reached};
use super::error::Error;
use super::format::{Entry, Format};
use super::memory::{Fresh, TableMemory};
use super::runs::{Run, Runs, Source};
use super::word::Word;
use super::{PageTable, to_index, top_word};
use crate::addr::{Iova, PhysAddr};
use crate::atomic::Ordering;
use crate::lg2;
use crate::promise::Promise;
use crate::prot::{Coherency, Prot};
use crate::range::IovaRange;

/// The tables that an operation reserved and did not use yet.
pub(super) struct Reserved<L> {
    pub(super) tables: Option<L>,
    /// The last IOVA that the operation maps.
    pub(super) last: u64,
    /// The lowest level that its leaves can have.
    pub(super) lowest: u32,
}

/// Entries next to each other in one table that were stored and not yet written back to memory:
/// however many spans wrote into a cache line, it is written back once.
struct Unwritten<'t, F: Format> {
    table: &'t [Cell<F>],
    from: usize,
    to: usize,
}

impl<'t, F: Format> Unwritten<'t, F> {
    const fn nothing() -> Self {
        Self { table: &[], from: 0, to: 0 }
    }

    /// Adds `count` entries of `table` from `first` on.
    #[inline(always)]
    fn add<M: TableMemory<F::Word>>(
        &mut self,
        memory: &M,
        table: &'t [Cell<F>],
        first: usize,
        count: usize,
    ) {
        if memory.coherency() == Coherency::Coherent {
            return;
        }
        if !core::ptr::eq(self.table, table) || self.to != first {
            self.write_back(memory);
            (self.table, self.from) = (table, first);
        }
        self.to = first + count;
    }

    #[inline(always)]
    fn write_back<M: TableMemory<F::Word>>(&mut self, memory: &M) {
        if let Some(entries) = self.table.get(self.from..self.to)
            && !entries.is_empty()
        {
            memory.written(Promise::kept(), entries);
        }
        (self.from, self.to) = (0, 0);
    }
}

/// What leaves of one size have in common.
#[derive(Clone, Copy)]
struct Leaves<W> {
    template: W,
    level: u32,
    /// log2 of the entries of one leaf.
    group: u32,
}

/// The entries of one run in one table: what to write.
#[derive(Clone, Copy)]
struct Fill<W> {
    leaves: Leaves<W>,
    /// Of the first leaf.
    paddr: u64,
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Maps `runs`, which follow each other in IOVAs from `start` to `last`, and returns where it
    /// stopped: behind the last byte mapped, modulo 2^64.
    ///
    /// The runs were checked against the aperture and the output bits, none of their leaves is
    /// smaller than `2^smallest` bytes, and `prot` permits access.
    #[inline(never)]
    pub(super) fn map_runs<R>(
        &self,
        runs: R,
        (start, last): (u64, u64),
        smallest: u32,
        prot: Prot,
    ) -> (u64, Result<(), Error>)
    where
        R: Source,
    {
        let mut reserved = Reserved { tables: None, last, lowest: F::level_of(smallest) };
        let mut unwritten = Unwritten::nothing();
        let mut at = start;
        let result = self.map_each(runs, &mut at, prot, &mut reserved, &mut unwritten);
        unwritten.write_back(&self.memory);
        if let Some(list) = reserved.tables {
            self.memory.free(Promise::kept(), self.geometry.table, list);
        }
        (at, result)
    }

    /// The same; `at` follows what is mapped.
    #[inline(always)]
    fn map_each<'t, R>(
        &'t self,
        mut runs: R,
        at: &mut u64,
        prot: Prot,
        reserved: &mut Reserved<M::List>,
        unwritten: &mut Unwritten<'t, F>,
    ) -> Result<(), Error>
    where
        R: Source,
    {
        let mut cursor = Cursor::new(self, *at);
        let mut leaves = self.leaves_of(F::GRANULE_LG2, prot);
        let mut lg2 = F::GRANULE_LG2;
        let mut shift = lg2;
        // The table at hand, and the number of the block that it translates.
        let mut table: &[Cell<F>] = &[];
        let mut block = None;
        while let Some(mut run) = runs.next() {
            if run.lg2 == lg2 && block == Some(run.iova.unbounded_shr(shift + F::LG2_ENTRIES)) {
                // Scattered leaves cost what this costs.
                let first = to_index(run.iova >> shift) & (table.len().wrapping_sub(1));
                let count = to_index(run.bytes >> shift);
                if let Some(here) = table.get(first..first.saturating_add(count)) {
                    let done = self.fill_shared(here, Fill { paddr: run.paddr, leaves });
                    unwritten.add(&self.memory, table, first, done);
                    if done == count {
                        let behind = first + count;
                        if lg2 == shift {
                            let more = self.fill_alike(&mut runs, table, behind, leaves, lg2);
                            unwritten.add(&self.memory, table, behind, more);
                        }
                        continue;
                    }
                    *at = run.iova.wrapping_add((done as u64) << shift);
                    cursor.reach(*at, leaves.level);
                    return Err(self.collision(&cursor, *at, leaves.level));
                }
            }
            if run.lg2 != lg2 {
                lg2 = run.lg2;
                leaves = self.leaves_of(lg2, prot);
                shift = F::shift(leaves.level);
            }
            loop {
                let fill = Fill { paddr: run.paddr, leaves };
                let done = if cursor.reach(run.iova, leaves.level) == Reached::Table {
                    cursor.write_back_links(leaves.level);
                    let (first, table) = cursor.table_at(leaves.level, run.iova);
                    let entries = table.get(first..).unwrap_or(&[]);
                    let count = to_index(run.bytes >> shift);
                    let here = entries.get(..count).unwrap_or(entries);
                    let done = self.fill_shared(here, fill);
                    unwritten.add(&self.memory, table, first, done);
                    if done == count {
                        break;
                    }
                    if done < here.len() || here.is_empty() {
                        *at = run.iova.wrapping_add((done as u64) << shift);
                        return Err(self.collision(&cursor, *at, leaves.level));
                    }
                    done
                } else {
                    *at = run.iova;
                    self.map_missing(&mut cursor, reserved, run, &runs, fill)?
                };
                match run.skip((done as u64) << shift) {
                    Some(rest) => run = rest,
                    None => break,
                }
            }
            table = cursor.table_at(leaves.level, run.iova).1;
            block = Some(run.iova.unbounded_shr(shift + F::LG2_ENTRIES));
        }
        *at = reserved.last.wrapping_add(1);
        Ok(())
    }

    /// Writes scattered leaves of `2^lg2` bytes, an entry each, into `table` from `from` on, up to
    /// the first that is occupied; returns how many.
    #[inline(always)]
    fn fill_alike(
        &self,
        runs: &mut impl Source,
        table: &[Cell<F>],
        from: usize,
        leaves: Leaves<F::Word>,
        lg2: u32,
    ) -> usize {
        let mut cells = table.get(from..).unwrap_or(&[]).iter();
        runs.take_alike(lg2, |paddr| {
            let Some(cell) = cells.next().filter(|cell| F::Word::load(cell) == F::Word::EMPTY)
            else {
                return false;
            };
            F::Word::store(cell, self.format.leaf(leaves.template, paddr));
            true
        })
    }

    /// What leaves of `2^lg2` bytes have in common.
    #[inline(always)]
    fn leaves_of(&self, lg2: u32, prot: Prot) -> Leaves<F::Word> {
        let level = F::level_of(lg2);
        let template = self.format.template(level, lg2, prot);
        Leaves { template, level, group: lg2 - F::shift(level) }
    }

    /// Maps the first of `runs`, as far as they are of the smallest leaves and lie in one table
    /// that exists, and returns whether those were all. The rest, whatever stands in its way, is
    /// for [`map_runs`](Self::map_runs): short lists pay for no cursor.
    #[inline(always)]
    pub(super) fn map_begin(&self, runs: &mut Runs<'_>, prot: Prot) -> bool {
        let lg2 = F::GRANULE_LG2;
        let leaves = self.leaves_of(lg2, prot);
        if self.memory.coherency() == Coherency::NonCoherent {
            // The links on the way may have to be written back.
            return false;
        }
        let Ok(mut entries) = self.find(runs.iova(), leaves.level) else { return false };
        loop {
            let taken = self.fill_alike(runs, entries, 0, leaves, lg2);
            entries = entries.get(taken..).unwrap_or(&[]);
            let Some(run) = runs.next() else { return true };
            let count = to_index(run.bytes >> lg2);
            let here = entries.get(..count).unwrap_or(entries);
            let is_alike = run.lg2 == lg2;
            let fill = Fill { paddr: run.paddr, leaves };
            let done = if is_alike { self.fill_shared(here, fill) } else { 0 };
            if let Some(rest) = run.skip((done as u64) << lg2) {
                runs.put_back(rest);
                return false;
            }
            entries = entries.get(done..).unwrap_or(&[]);
        }
    }

    /// Maps as much of a run as one table takes that exists, or all of it where it only lacks its
    /// own table. The rest, whatever stands in its way, is for [`map_runs`](Self::map_runs).
    #[inline(always)]
    pub(super) fn map_in_table(&self, run: Run, prot: Prot) -> Result<(), Run> {
        let leaves = self.leaves_of(run.lg2, prot);
        let shift = F::shift(leaves.level);
        if self.memory.coherency() == Coherency::NonCoherent {
            // The links on the way may have to be written back.
            return Err(run);
        }
        let count = to_index(run.bytes >> shift);
        let fill = Fill { paddr: run.paddr, leaves };
        let entries = match self.find(run.iova, leaves.level) {
            Ok(entries) => entries,
            Err((above, [cell, ..])) if above == leaves.level + 1 => {
                return self.map_in_new_table(cell, run, count, fill);
            }
            Err(_) => return Err(run),
        };
        let here = entries.get(..count).unwrap_or(entries);
        let done = self.fill_shared(here, fill);
        if done == count { Ok(()) } else { Err(run.skip((done as u64) << shift).unwrap_or(run)) }
    }

    /// Maps a run of `count` entries that fits into one table, which `cell` is to lead to: a table
    /// is taken, filled and installed, and nothing needs to be surveyed.
    fn map_in_new_table(
        &self,
        cell: &Cell<F>,
        run: Run,
        count: usize,
        fill: Fill<F::Word>,
    ) -> Result<(), Run> {
        let level = fill.leaves.level;
        let from = self.index(level, run.iova);
        if from + count > 1 << F::LG2_ENTRIES || F::Word::load_link(cell) != F::Word::EMPTY {
            return Err(run);
        }
        let shape = self.geometry.table;
        let mut list = self.memory.reserve(shape, 1).map_err(|_| run)?;
        let mut fresh = self.memory.take(Promise::kept(), shape, &mut list).ok_or(run)?;
        let paddr = fresh.paddr();
        self.fill_fresh(fresh.words(), from, count, fill);
        self.memory.publish(fresh);
        if F::Word::install(cell, self.format.link(level + 1, paddr)).is_err() {
            // Another CPU was first. Hardware never saw this table.
            self.memory.retire(&mut list, self.child(paddr));
            self.memory.free(Promise::kept(), shape, list);
            return Err(run);
        }
        Ok(())
    }

    /// Goes on with a run whose table is missing or cannot be: installs one table on the way there
    /// and returns how many entries of the run that mapped.
    #[cold]
    #[inline(never)]
    fn map_missing<R>(
        &self,
        cursor: &mut Cursor<'_, F, M>,
        reserved: &mut Reserved<M::List>,
        run: Run,
        behind: &R,
        fill: Fill<F::Word>,
    ) -> Result<usize, Error>
    where
        R: Source,
    {
        match cursor.reach(run.iova, fill.leaves.level) {
            Reached::Table => Ok(0),
            Reached::Stopped { level: above, word } if word == F::Word::EMPTY => {
                self.reserve_rest(reserved, run, behind)?;
                self.install_below(cursor, reserved, run, above, fill)
            }
            Reached::Stopped { level: above, word } => Err(self.blocker(run.iova, above, word)),
        }
    }

    /// Writes entries that other CPUs see, unless they are occupied; returns how many, whole
    /// leaves.
    #[inline(always)]
    fn fill_shared(&self, entries: &[Cell<F>], fill: Fill<F::Word>) -> usize {
        if fill.leaves.group != 0 {
            return self.fill_shared_groups(entries, fill);
        }
        let first = self.format.leaf(fill.leaves.template, PhysAddr::new(fill.paddr));
        // With a constant step the entries of a line are computed side by side, not one from the
        // other.
        match fill.leaves.level {
            0 => self.fill_cells(entries, first, lg2::size(F::GRANULE_LG2)),
            level => self.fill_cells(entries, first, lg2::size(F::shift(level))),
        }
    }

    /// Writes `first` and the leaves behind it, `step` bytes apart, up to the first occupied entry.
    #[inline(always)]
    fn fill_cells(&self, entries: &[Cell<F>], first: F::Word, step: u64) -> usize {
        let word = |n: usize| self.format.advance(first, (n as u64).wrapping_mul(step));
        let mut done = 0;
        // Eight entries, a cache line of most formats, are checked by one branch.
        for line in entries.chunks_exact(8) {
            let all = line.iter().fold(F::Word::EMPTY, |all, cell| all | F::Word::load(cell));
            if all != F::Word::EMPTY {
                break;
            }
            let start = word(done);
            for (n, cell) in (0u64..).zip(line) {
                F::Word::store(cell, self.format.advance(start, n * step));
            }
            done += 8;
        }
        for cell in &entries[done..] {
            if F::Word::load(cell) != F::Word::EMPTY {
                break;
            }
            F::Word::store(cell, word(done));
            done += 1;
        }
        done
    }

    /// The same for leaves of several entries, each checked whole before it is written.
    fn fill_shared_groups(&self, entries: &[Cell<F>], fill: Fill<F::Word>) -> usize {
        let per_leaf = 1 << fill.leaves.group;
        let mut done = 0;
        for leaf in entries.chunks_exact(per_leaf) {
            let all = leaf.iter().fold(F::Word::EMPTY, |all, cell| all | F::Word::load(cell));
            if all != F::Word::EMPTY {
                break;
            }
            let first = self.group_from(fill, done);
            for (n, cell) in (0u64..).zip(leaf) {
                F::Word::store(cell, self.entry_of(fill.leaves.level, first, n));
            }
            done += per_leaf;
        }
        done
    }

    /// The first entry of the leaf that begins with the `n`-th entry of a run of leaves of several
    /// entries.
    #[inline(always)]
    fn group_from(&self, fill: Fill<F::Word>, n: usize) -> F::Word {
        let shift = F::shift(fill.leaves.level);
        let paddr = PhysAddr::new(fill.paddr.wrapping_add((n as u64) << shift));
        self.format.leaf(fill.leaves.template, paddr)
    }

    /// Writes the entries of a run into a table that nobody sees yet, and empties the others.
    #[inline(always)]
    fn fill_fresh(&self, words: &mut [F::Word], from: usize, count: usize, fill: Fill<F::Word>) {
        let (before, rest) = words.split_at_mut(from);
        let (leaves, behind) = rest.split_at_mut(count);
        before.fill(F::Word::EMPTY);
        behind.fill(F::Word::EMPTY);
        if fill.leaves.group != 0 {
            let per_leaf = 1 << fill.leaves.group;
            for (leaf, words) in leaves.chunks_exact_mut(per_leaf).enumerate() {
                let first = self.group_from(fill, leaf * per_leaf);
                for (n, word) in (0u64..).zip(words) {
                    *word = self.entry_of(fill.leaves.level, first, n);
                }
            }
            return;
        }
        let first = self.format.leaf(fill.leaves.template, PhysAddr::new(fill.paddr));
        for (n, word) in (0u64..).zip(leaves) {
            *word = self.format.advance(first, n << F::shift(fill.leaves.level));
        }
    }

    /// Installs one table below the empty entry at level `above`, filled with the run's leaves
    /// where it is their table. Returns how many entries of the run that mapped: 0 for a table on
    /// the way, or where another CPU installed one first.
    fn install_below(
        &self,
        cursor: &mut Cursor<'_, F, M>,
        reserved: &mut Reserved<M::List>,
        run: Run,
        above: u32,
        fill: Fill<F::Word>,
    ) -> Result<usize, Error> {
        if cursor.is_above_root(above) {
            self.grow(above, reserved, run)?;
            cursor.restart();
            return Ok(0);
        }
        let Some(cell) = cursor.entries_from(above, run.iova).first() else {
            return Err(Error::Corrupt { iova: Iova::new(run.iova), level: above });
        };
        if F::Word::load_link(cell) != F::Word::EMPTY {
            // Another CPU installed the table, perhaps before the survey, which then did not count
            // it.
            return Ok(0);
        }
        let list = reserved.tables.get_or_insert_default();
        let Some(mut fresh) = self.memory.take(Promise::kept(), self.geometry.table, list) else {
            // Only if somebody unmaps in the caller's range, against the contract.
            return Err(self.no_tables(run.iova, run.bytes, 1));
        };
        let words = fresh.words();
        let mapped = if above - 1 == fill.leaves.level {
            let from = self.index(fill.leaves.level, run.iova);
            let count = to_index(run.bytes >> F::shift(fill.leaves.level)).min(words.len() - from);
            self.fill_fresh(words, from, count, fill);
            count
        } else {
            words.fill(F::Word::EMPTY);
            0
        };
        let installed = self.install(cursor, run.iova, above, fresh, list);
        Ok(if installed { mapped } else { 0 })
    }

    /// Makes the empty entry at level `above` lead to `fresh`; false where it is not empty any
    /// more.
    fn install(
        &self,
        cursor: &mut Cursor<'_, F, M>,
        iova: u64,
        above: u32,
        mut fresh: Fresh<'_, F::Word>,
        list: &mut M::List,
    ) -> bool {
        let Some(cell) = cursor.entries_from(above, iova).first() else { return false };
        let paddr = fresh.paddr();
        debug_assert!(fresh.words().len() == 1 << F::LG2_ENTRIES);
        self.memory.publish(fresh);
        let installed = F::Word::install(cell, self.format.link(above, paddr)).is_ok();
        // The winner's link, too, and those above: what follows here depends on them, and whoever
        // installed them may not have written them back yet.
        cursor.write_back_links(above - 1);
        if installed {
            cursor.enter(paddr);
        } else {
            // Hardware never saw the table, so it may be reused at once.
            self.memory.retire(list, self.child(paddr));
        }
        installed
    }

    /// Puts new roots above the root, each with the old one as its first table, up to `level`.
    ///
    /// Walks that began at the old root go on undisturbed: it stays where it is.
    #[cold]
    fn grow(&self, level: u32, reserved: &mut Reserved<M::List>, run: Run) -> Result<(), Error> {
        let list = reserved.tables.get_or_insert_default();
        loop {
            let (root, top) = self.top();
            if top >= level {
                return Ok(());
            }
            let Some(mut fresh) = self.memory.take(Promise::kept(), self.geometry.table, list)
            else {
                return Err(self.no_tables(run.iova, run.bytes, to_index(u64::from(level - top))));
            };
            let paddr = fresh.paddr();
            let words = fresh.words();
            words.fill(F::Word::EMPTY);
            if let Some(first) = words.first_mut() {
                // The old root is in memory as this table is going to be.
                *first = self.format.link(top + 1, root.paddr()) | F::WRITTEN_BACK;
            }
            self.memory.publish(fresh);
            let (old, new) = (top_word(root.paddr(), top), top_word(paddr, top + 1));
            let replaced = self.top.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
            if replaced.is_err() {
                // Another CPU did the same; hardware never saw this table.
                self.memory.retire(list, self.child(paddr));
            }
        }
    }

    #[cold]
    pub(super) fn no_tables(&self, iova: u64, bytes: u64, asked: usize) -> Error {
        match IovaRange::from_len(Iova::new(iova), bytes) {
            Ok(range) => Error::NoTables { range, asked },
            Err(error) => Error::Range(error),
        }
    }

    /// What the entry at `iova` and `level`, in a table that the cursor reached, is in the way
    /// with.
    #[cold]
    pub(super) fn collision(&self, cursor: &Cursor<'_, F, M>, iova: u64, level: u32) -> Error {
        let mut iova = iova;
        for cell in cursor.entries_from(level, iova) {
            let word = F::Word::load_link(cell);
            if word != F::Word::EMPTY {
                return self.blocker(iova, level, word);
            }
            // Of a leaf of several entries, a later one may be the occupied one.
            iova = iova.wrapping_add(lg2::size(F::shift(level)));
        }
        Error::Corrupt { iova: Iova::new(iova), level }
    }

    /// The error for an entry that is not empty where a leaf of its level or a lower one would go.
    #[cold]
    pub(super) fn blocker(&self, iova: u64, level: u32, word: F::Word) -> Error {
        match self.format.decode(level, word) {
            Entry::Leaf(leaf) => Error::Occupied { leaf: super::block_of(iova, leaf.lg2) },
            Entry::Table(_) => {
                let block = super::block_of(iova, F::shift(level));
                match self.first_leaf(block) {
                    Some(leaf) => Error::Occupied { leaf },
                    None => Error::EmptyTable { block },
                }
            }
            Entry::Empty | Entry::Invalid => Error::Corrupt { iova: Iova::new(iova), level },
        }
    }
}
