//! Before a mapping installs its first table, this finds out which tables it will need and what is
//! in its way.

use super::cursor::{Cursor, Reached};
use super::error::Error;
use super::format::{Format, MAX_LEVELS};
use super::map::Reserved;
use super::memory::TableMemory;
use super::runs::{Run, Source};
use super::word::Word;
use super::{PageTable, to_index};
use crate::lg2;

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Reserves the tables that what is left of `run` and everything behind it lack, after looking
    /// for what they collide with. Once an operation has done so it cannot fail any more.
    pub(super) fn reserve_rest<R>(
        &self,
        reserved: &mut Reserved<M::List>,
        run: Run,
        behind: &R,
    ) -> Result<(), Error>
    where
        R: Source,
    {
        if reserved.tables.is_some() {
            return Ok(());
        }
        // Many spans lack about as many tables as the smallest of their leaves would all over the
        // range. To reserve those is cheaper than to ask for every span what it lacks, as long as
        // nothing is in the way.
        let shape = self.geometry.table;
        let growth = if F::GROWS { self.geometry.top_level as usize } else { 0 };
        let most =
            self.tables_within(run.iova, reserved.last, reserved.lowest).saturating_add(growth);
        if most <= behind.spans_left()
            && self.is_clear(run.iova, reserved.last)
            && let Ok(list) = self.memory.reserve(shape, most)
        {
            reserved.tables = Some(list);
            return Ok(());
        }
        let mut survey = Survey::new(self, run.iova);
        survey.run(self, run)?;
        for next in behind.clone() {
            survey.run(self, next)?;
        }
        let count = survey.count.saturating_add(survey.growth);
        let list = self.memory.reserve(shape, count).map_err(|_| {
            let bytes = (reserved.last - run.iova).saturating_add(1);
            self.no_tables(run.iova, bytes, count)
        })?;
        reserved.tables = Some(list);
        Ok(())
    }

    /// The most tables below the root that leaves of `lowest` and higher levels all over
    /// `first..=last` need.
    fn tables_within(&self, first: u64, last: u64, lowest: u32) -> usize {
        let at_level = |level| (last >> F::shift(level)) - (first >> F::shift(level)) + 1;
        (lowest + 1..=self.geometry.top_level)
            .fold(0usize, |sum, level| sum.saturating_add(to_index(at_level(level))))
    }

    /// Whether nothing can be in the way of any leaf in `first..=last`: no leaf, and no table that
    /// the range covers whole.
    fn is_clear(&self, first: u64, last: u64) -> bool {
        let mut cursor = Cursor::new(self, first);
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
}

/// Counts the tables that runs lack, and finds what they collide with.
struct Survey<'t, F: Format, M: TableMemory<F::Word>> {
    cursor: Cursor<'t, F, M>,
    count: usize,
    /// How many roots have to be put above the root.
    growth: usize,
    /// By level, the number of the last table counted: two runs may need the same one.
    last: [Option<u64>; MAX_LEVELS],
}

impl<'t, F: Format, M: TableMemory<F::Word>> Survey<'t, F, M> {
    fn new(table: &'t PageTable<F, M>, first: u64) -> Self {
        Self { cursor: Cursor::new(table, first), count: 0, growth: 0, last: [None; MAX_LEVELS] }
    }

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
                    if self.cursor.is_above_root(above) {
                        self.count_growth(table, run.iova, above)?;
                    }
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

    /// Counts the roots up to `level`. The first entry of a new root leads to the tree as it is.
    #[cold]
    fn count_growth(
        &mut self,
        table: &PageTable<F, M>,
        iova: u64,
        level: u32,
    ) -> Result<(), Error> {
        let block = super::block_of(iova, F::shift(level));
        if block.start().get() == 0
            && let Some(leaf) = table.first_leaf(block)
        {
            return Err(Error::Occupied { leaf });
        }
        self.growth = self.growth.max((level - self.cursor.top()) as usize);
        Ok(())
    }

    /// Counts the tables from level `low` up to below `above` that translate `first..=last`.
    #[inline(always)]
    fn count_tables(&mut self, first: u64, last: u64, low: u32, above: u32) {
        for level in low..above {
            let table_shift = F::shift(level + 1);
            let (first, last) = (first >> table_shift, last >> table_shift);
            let counted = self.last[level as usize] == Some(first);
            let more = to_index(last - first).saturating_add(usize::from(!counted));
            self.count = self.count.saturating_add(more);
            self.last[level as usize] = Some(last);
        }
    }
}
