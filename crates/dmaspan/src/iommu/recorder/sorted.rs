//! Records by address, with memory that may run out.

use alloc::vec::Vec;

use crate::addr::Iova;
use crate::range::IovaRange;

/// Something that stands for a range.
pub(super) trait Placed: Copy {
    fn range(&self) -> IovaRange;

    /// The same for another range.
    fn at(&self, range: IovaRange) -> Self;
}

/// There is no memory for a record.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoRoom;

/// Records of disjoint ranges, sorted, in blocks of a bounded length, none of which is empty. So a
/// change moves the records of one block, and seldom the blocks.
pub(super) struct Sorted<T> {
    blocks: Vec<Vec<T>>,
    len: usize,
}

/// How many records a block has at most: few in tests, so that few records make many blocks.
const BLOCK: usize = if cfg!(test) { 4 } else { 256 };

impl<T> Default for Sorted<T> {
    fn default() -> Self {
        Self { blocks: Vec::new(), len: 0 }
    }
}

impl<T: Placed> Sorted<T> {
    /// How many records there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The place of the first record that ends at or behind `from`.
    fn find(&self, from: Iova) -> (usize, usize) {
        let ends_before = |record: &T| record.range().last() < from;
        let block = self.blocks.partition_point(|block| block.last().is_some_and(ends_before));
        let at = self.blocks.get(block).map_or(0, |block| block.partition_point(ends_before));
        (block, at)
    }

    /// The records from the first on that ends at or behind `from`.
    pub(super) fn from(&self, from: Iova) -> impl Iterator<Item = &T> {
        let (block, at) = self.find(from);
        self.blocks.iter().skip(block).flatten().skip(at)
    }

    fn first_in(&mut self, range: IovaRange) -> Option<(usize, usize, T)> {
        let (block, at) = self.find(range.start());
        let record = *self.blocks.get(block)?.get(at)?;
        record.range().intersection(range).map(|_| (block, at, record))
    }

    /// Puts in a record, where there is none.
    pub(super) fn insert(&mut self, record: T) -> Result<(), NoRoom> {
        let (mut block, mut at) = self.find(record.range().start());
        if block == self.blocks.len() && block > 0 {
            block -= 1;
            at = self.blocks[block].len();
        }
        if self.blocks.get(block).is_none_or(|block| block.len() == BLOCK) {
            (block, at) = self.split(block, at)?;
        }
        self.blocks[block].insert(at, record);
        self.len += 1;
        Ok(())
    }

    /// Makes room for a record at a place whose block is full or not there, and says where.
    fn split(&mut self, block: usize, at: usize) -> Result<(usize, usize), NoRoom> {
        let mut upper = Vec::new();
        upper.try_reserve_exact(BLOCK).map_err(|_| NoRoom)?;
        self.blocks.try_reserve(1).map_err(|_| NoRoom)?;
        let Some(lower) = self.blocks.get_mut(block) else {
            self.blocks.push(upper);
            return Ok((block, 0));
        };
        // Records that come in order leave full blocks.
        let half = if at == BLOCK { BLOCK } else { BLOCK / 2 };
        upper.extend(lower.drain(half..));
        self.blocks.insert(block + 1, upper);
        Ok(if at <= half && at < BLOCK { (block, at) } else { (block + 1, at - half) })
    }

    fn take(&mut self, block: usize, at: usize) {
        self.blocks[block].remove(at);
        self.len -= 1;
        if self.blocks[block].is_empty() {
            self.blocks.remove(block);
        }
    }

    /// Takes `range` out of all records. What is left of one behind the range is lost where there
    /// is no memory for it.
    pub(super) fn remove(&mut self, range: IovaRange) -> Result<(), NoRoom> {
        let mut result = Ok(());
        while let Some((block, at, record)) = self.first_in(range) {
            let (before, behind) = around(record.range(), range);
            match (before, behind) {
                (None, None) => self.take(block, at),
                (Some(part), None) | (None, Some(part)) => self.blocks[block][at] = record.at(part),
                (Some(before), Some(behind)) => {
                    self.blocks[block][at] = record.at(before);
                    result = result.and(self.insert(record.at(behind)));
                }
            }
        }
        result
    }

    /// Changes all records in `range`; those that reach out of it are cut.
    pub(super) fn change(
        &mut self,
        range: IovaRange,
        change: impl Fn(&mut T),
    ) -> Result<(), NoRoom> {
        let (mut result, mut from) = (Ok(()), Some(range.start()));
        while let Some(rest) = from.and_then(|from| IovaRange::new(from, range.last())) {
            let Some((block, at, mut record)) = self.first_in(rest) else { break };
            let Some(part) = record.range().intersection(rest) else { break };
            from = part.last().checked_add(1);
            let whole = record;
            change(&mut record);
            self.blocks[block][at] = record.at(part);
            let (before, behind) = around(whole.range(), part);
            for left in before.into_iter().chain(behind) {
                result = result.and(self.insert(whole.at(left)));
            }
        }
        result
    }

    /// Lets the record that begins where `whole` does end where it does.
    pub(super) fn extend_to(&mut self, whole: IovaRange) {
        if let Some((block, at, record)) = self.first_in(whole) {
            self.blocks[block][at] = record.at(whole);
        }
    }
}

/// The parts of `whole` before and behind `hole`.
fn around(whole: IovaRange, hole: IovaRange) -> (Option<IovaRange>, Option<IovaRange>) {
    let last = hole.start().get().checked_sub(1).map(Iova::new);
    let before = last.and_then(|last| IovaRange::new(whole.start(), last));
    let start = hole.last().checked_add(1);
    (before, start.and_then(|start| IovaRange::new(start, whole.last())))
}

#[cfg(test)]
mod tests;
