//! Mapping: one walk, each entry checked and stored in one pass.
//!
//! Checking a table of 512 entries before storing costs more than the stores themselves, so entries
//! of tables that exist are checked as they are stored; a collision found late takes back what was
//! stored. Before the first *new* table is installed, though, the rest of the range is surveyed:
//! collisions there are found, and exactly the tables that it lacks are reserved. From then on
//! nothing can fail, so a failed call never leaves a table behind.

use super::cursor::{Cell, Cursor, Reached};
use super::error::Error;
use super::format::{Entry, Format, Groups, MAX_LEVELS};
use super::memory::{Fresh, TableMemory};
use super::runs::Run;
use super::word::Word;
use super::{PageTable, to_index};
use crate::addr::{Iova, PhysAddr};
use crate::lg2;
use crate::prot::Prot;
use crate::range::IovaRange;

/// The tables that an operation reserved and did not use yet.
struct Reserved<L> {
    tables: Option<L>,
    /// The last IOVA that the operation maps.
    last: u64,
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
    /// The runs were checked against the aperture and the output bits, and `prot` permits access.
    #[inline(never)]
    pub(super) fn map_runs<R>(
        &self,
        runs: R,
        start: u64,
        last: u64,
        prot: Prot,
    ) -> (u64, Result<(), Error>)
    where
        R: Iterator<Item = Run> + Clone,
    {
        let mut reserved = Reserved { tables: None, last };
        let mut at = start;
        let result = self.map_each(runs, &mut at, prot, &mut reserved);
        if let Some(list) = reserved.tables {
            self.memory.free(self.geometry.table, list);
        }
        (at, result)
    }

    /// The same; `at` follows what is mapped.
    #[inline(always)]
    fn map_each<R>(
        &self,
        mut runs: R,
        at: &mut u64,
        prot: Prot,
        reserved: &mut Reserved<M::List>,
    ) -> Result<(), Error>
    where
        R: Iterator<Item = Run> + Clone,
    {
        let mut cursor = Cursor::new(self);
        let mut leaves = self.leaves_of(F::GRANULE_LG2, prot);
        let mut lg2 = F::GRANULE_LG2;
        let pages = leaves;
        // The level-0 table at hand, and the number of the block that it translates: no block has
        // the number that it begins with, which no address shifted right can be.
        let mut table: &[Cell<F>] = &[];
        let mut block = u64::MAX;
        while let Some(mut run) = runs.next() {
            if run.lg2 == F::GRANULE_LG2 && run.iova >> F::shift(1) == block {
                // Scattered pages cost what this costs.
                let first = self.index(0, run.iova);
                let count = to_index(run.bytes >> F::GRANULE_LG2);
                if let Some(here) = table.get(first..first.saturating_add(count)) {
                    let done = self.fill_shared(here, Fill { paddr: run.paddr, leaves: pages });
                    self.memory.written(&here[..done]);
                    if done == count {
                        continue;
                    }
                    *at = run.iova.wrapping_add((done as u64) << F::GRANULE_LG2);
                    cursor.reach(*at, 0);
                    return Err(self.collision(&cursor, *at, 0));
                }
            }
            if run.lg2 != lg2 {
                lg2 = run.lg2;
                leaves = self.leaves_of(lg2, prot);
            }
            let shift = F::shift(leaves.level);
            loop {
                let fill = Fill { paddr: run.paddr, leaves };
                let done = if cursor.reach(run.iova, leaves.level) == Reached::Table {
                    let entries = cursor.entries_from(leaves.level, run.iova);
                    let count = to_index(run.bytes >> shift);
                    let here = entries.get(..count).unwrap_or(entries);
                    let done = self.fill_shared(here, fill);
                    self.memory.written(&here[..done]);
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
            if leaves.level == 0 {
                (table, block) = (cursor.table_at(0, run.iova).1, run.iova >> F::shift(1));
            }
        }
        *at = reserved.last.wrapping_add(1);
        Ok(())
    }

    /// What leaves of `2^lg2` bytes have in common.
    #[inline(always)]
    fn leaves_of(&self, lg2: u32, prot: Prot) -> Leaves<F::Word> {
        let level = F::level_of(lg2);
        let template = self.format.template(level, lg2, prot);
        Leaves { template, level, group: lg2 - F::shift(level) }
    }

    /// Maps as much of a run as one table takes that exists. The rest, whatever stands in its way,
    /// is for [`map_runs`](Self::map_runs).
    #[inline(always)]
    pub(super) fn map_in_table(&self, run: Run, prot: Prot) -> Result<(), Run> {
        let leaves = self.leaves_of(run.lg2, prot);
        let shift = F::shift(leaves.level);
        let entries = self.find(run.iova, leaves.level).ok_or(run)?;
        let count = to_index(run.bytes >> shift);
        let here = entries.get(..count).unwrap_or(entries);
        let done = self.fill_shared(here, Fill { paddr: run.paddr, leaves });
        self.memory.written(&here[..done]);
        if done == count { Ok(()) } else { Err(run.skip((done as u64) << shift).unwrap_or(run)) }
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
        R: Iterator<Item = Run> + Clone,
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
            if leaf.iter().any(|cell| F::Word::load(cell) != F::Word::EMPTY) {
                break;
            }
            for (n, cell) in leaf.iter().enumerate() {
                F::Word::store(cell, self.group_word(fill, done + n));
            }
            done += per_leaf;
        }
        done
    }

    /// The `n`-th entry of a run of leaves of several entries.
    #[inline(always)]
    fn group_word(&self, fill: Fill<F::Word>, n: usize) -> F::Word {
        let n = match F::GROUPS {
            Groups::Consecutive => n as u64,
            Groups::Repeated => lg2::align_down(n as u64, fill.leaves.group),
        };
        let paddr = fill.paddr.wrapping_add(n << F::shift(fill.leaves.level));
        self.format.leaf(fill.leaves.template, PhysAddr::new(paddr))
    }

    /// Writes the entries of a run into a table that nobody sees yet, and empties the others.
    #[inline(always)]
    fn fill_fresh(&self, words: &mut [F::Word], from: usize, count: usize, fill: Fill<F::Word>) {
        let (before, rest) = words.split_at_mut(from);
        let (leaves, behind) = rest.split_at_mut(count);
        before.fill(F::Word::EMPTY);
        behind.fill(F::Word::EMPTY);
        if fill.leaves.group != 0 {
            for (n, word) in leaves.iter_mut().enumerate() {
                *word = self.group_word(fill, n);
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
        let Some(cell) = cursor.entries_from(above, run.iova).first() else {
            return Err(Error::Corrupt { iova: Iova::new(run.iova), level: above });
        };
        if F::Word::load_link(cell) != F::Word::EMPTY {
            // Another CPU installed the table, perhaps before the survey, which then did not count
            // it.
            return Ok(0);
        }
        let list = reserved.tables.get_or_insert_default();
        let Some(mut fresh) = self.memory.take(self.geometry.table, list) else {
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
        if F::Word::install(cell, self.format.link(above, paddr)).is_err() {
            // Hardware never saw the table, so it may be reused at once. It may not see the
            // winner's link yet, on which what follows here depends.
            self.memory.written(core::slice::from_ref(cell));
            self.memory.retire(list, self.child(paddr));
            return false;
        }
        self.memory.written(core::slice::from_ref(cell));
        cursor.enter(paddr);
        true
    }

    /// Reserves the tables that what is left of `run` and everything behind it lack, after looking
    /// for what they collide with. Once an operation has done so it cannot fail any more.
    fn reserve_rest<R>(
        &self,
        reserved: &mut Reserved<M::List>,
        run: Run,
        behind: &R,
    ) -> Result<(), Error>
    where
        R: Iterator<Item = Run> + Clone,
    {
        if reserved.tables.is_some() {
            return Ok(());
        }
        // Many spans lack about as many tables as small leaves all over the range would. To reserve
        // those is cheaper than to ask for every span what it lacks, as long as nothing is in the
        // way.
        let shape = self.geometry.table;
        let most = self.tables_within(run.iova, reserved.last);
        if most <= behind.size_hint().0
            && self.is_clear(run.iova, reserved.last)
            && let Ok(list) = self.memory.reserve(shape, most)
        {
            reserved.tables = Some(list);
            return Ok(());
        }
        let mut survey = Survey { cursor: Cursor::new(self), count: 0, last: [None; MAX_LEVELS] };
        survey.run(self, run)?;
        for next in behind.clone() {
            survey.run(self, next)?;
        }
        let list = self.memory.reserve(shape, survey.count).map_err(|_| {
            let bytes = (reserved.last - run.iova).saturating_add(1);
            self.no_tables(run.iova, bytes, survey.count)
        })?;
        reserved.tables = Some(list);
        Ok(())
    }

    /// The most tables below the root that leaves all over `first..=last` need.
    fn tables_within(&self, first: u64, last: u64) -> usize {
        let at_level = |level| (last >> F::shift(level)) - (first >> F::shift(level)) + 1;
        (1..=self.geometry.top_level)
            .fold(0usize, |sum, level| sum.saturating_add(to_index(at_level(level))))
    }

    /// Whether nothing can be in the way of any leaf in `first..=last`: no leaf, and no table that
    /// the range covers whole.
    fn is_clear(&self, first: u64, last: u64) -> bool {
        let mut cursor = Cursor::new(self);
        let mut at = first;
        loop {
            // An empty entry and its table, or the part of a table of pages.
            let (level, table_level, is_empty) = match cursor.reach(at, 0) {
                Reached::Stopped { level, word } => (level, level, word == F::Word::EMPTY),
                Reached::Table => {
                    let entries = cursor.entries_from(0, at);
                    let count = to_index((last - at) >> F::GRANULE_LG2).saturating_add(1);
                    let here = entries.get(..count).unwrap_or(entries);
                    let empty = here.iter().all(|cell| F::Word::load(cell) == F::Word::EMPTY);
                    (1, 0, empty && !here.is_empty())
                }
            };
            let is_root = table_level == self.geometry.top_level;
            let table = super::block_of(at, F::shift(table_level + 1));
            let covered = first <= table.start().get() && table.last().get() <= last;
            if !is_empty || (covered && !is_root) {
                return false;
            }
            let block_last = super::block_of(at, F::shift(level)).last().get();
            if block_last >= last {
                return true;
            }
            at = block_last + 1;
        }
    }

    #[cold]
    fn no_tables(&self, iova: u64, bytes: u64, asked: usize) -> Error {
        match IovaRange::from_len(Iova::new(iova), bytes) {
            Ok(range) => Error::NoTables { range, asked },
            Err(error) => Error::Range(error),
        }
    }

    /// What the entry at `iova` and `level`, in a table that the cursor reached, is in the way
    /// with.
    #[cold]
    fn collision(&self, cursor: &Cursor<'_, F, M>, iova: u64, level: u32) -> Error {
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
    fn blocker(&self, iova: u64, level: u32, word: F::Word) -> Error {
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

/// Counts the tables that runs lack, and finds what they collide with.
struct Survey<'t, F: Format, M: TableMemory<F::Word>> {
    cursor: Cursor<'t, F, M>,
    count: usize,
    /// By level, the number of the last table counted: two runs may need the same one.
    last: [Option<u64>; MAX_LEVELS],
}

impl<F: Format, M: TableMemory<F::Word>> Survey<'_, F, M> {
    fn run(&mut self, table: &PageTable<F, M>, run: Run) -> Result<(), Error> {
        let level = F::level_of(run.lg2);
        let mut left = Some(run);
        while let Some(run) = left {
            let bytes = match self.cursor.reach(run.iova, level) {
                Reached::Table => {
                    let entries = self.cursor.entries_from(level, run.iova);
                    let count = to_index(run.bytes >> F::shift(level)).min(entries.len());
                    let entries = &entries[..count];
                    if entries.iter().any(|cell| F::Word::load(cell) != F::Word::EMPTY)
                        || entries.is_empty()
                    {
                        return Err(table.collision(&self.cursor, run.iova, level));
                    }
                    (count as u64) << F::shift(level)
                }
                Reached::Stopped { level: above, word } if word == F::Word::EMPTY => {
                    let to_end =
                        lg2::size(F::shift(above)) - (run.iova & lg2::mask(F::shift(above)));
                    let bytes = run.bytes.min(to_end);
                    self.count_tables(run.iova, run.iova.wrapping_add(bytes - 1), level, above);
                    bytes
                }
                Reached::Stopped { level: above, word } => {
                    return Err(table.blocker(run.iova, above, word));
                }
            };
            left = run.skip(bytes);
        }
        Ok(())
    }

    /// Counts the tables from level `low` up to below `above` that translate `first..=last`.
    #[inline(always)]
    fn count_tables(&mut self, first: u64, last: u64, low: u32, above: u32) {
        for level in low..above {
            let table_shift = F::shift(level + 1);
            let (first, last) = (first >> table_shift, last >> table_shift);
            let counted = self.last[level as usize] == Some(first);
            self.count += to_index(last - first) + usize::from(!counted);
            self.last[level as usize] = Some(last);
        }
    }
}
