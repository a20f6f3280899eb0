//! A cache holds aligned blocks of addresses, each with a value.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use dmaspan::{Iova, IovaRange, lg2};

use crate::walker::{TableLink, WalkPath, block_around};

/// Hashes one number by a multiplication; the table takes the upper bits for its tags and the lower
/// ones for its places, so both must depend on all of the key.
#[derive(Debug, Default)]
pub(crate) struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // 2^64 divided by the golden ratio.
        let product = (self.0 ^ (number >> NEAR_LG2)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = product ^ (product >> 32);
        self.0 = lg2::align_down(mixed, NEAR_LG2) | (number & lg2::mask(NEAR_LG2));
    }
}

/// Blocks that follow each other are kept near each other, sixteen at a time: devices stream.
const NEAR_LG2: u32 = 4;

type Blocks<V> = HashMap<u64, V, BuildHasherDefault<BlockHasher>>;

/// Values by aligned block, blocks of any power of two side by side.
#[derive(Debug)]
pub(crate) struct BlockMap<V> {
    /// By log2 of the block's size, small ones first; the keys are block numbers.
    sizes: Vec<(u32, Blocks<V>)>,
}

impl<V> Default for BlockMap<V> {
    fn default() -> Self {
        Self { sizes: Vec::new() }
    }
}

/// The number of the block that has an address. A block may be the whole space.
const fn number(address: u64, lg2: u32) -> u64 {
    if lg2 >= 64 { 0 } else { address >> lg2 }
}

impl BlockMap<TableLink> {
    /// Keeps the tables of a walk that began at `from`.
    pub(crate) fn keep_path(&mut self, from: TableLink, path: &WalkPath) {
        for link in path.iter().map(|step| step.link).filter(|link| *link != from) {
            // log2 of the size of an aligned block; 64 for the whole space.
            let lg2 = 64 - link.block.len_less_one().leading_zeros();
            self.insert(link.block.start(), lg2, link);
        }
    }
}

impl<V> BlockMap<V> {
    pub(crate) fn len(&self) -> usize {
        self.sizes.iter().map(|(_, blocks)| blocks.len()).sum()
    }

    /// The smallest block that has `iova`, and its value.
    pub(crate) fn get(&self, iova: Iova) -> Option<(u32, &V)> {
        self.sizes.iter().find_map(|(lg2, blocks)| {
            blocks.get(&number(iova.get(), *lg2)).map(|value| (*lg2, value))
        })
    }

    /// Keeps `value` for the block of `2^lg2` bytes that has `iova`.
    pub(crate) fn insert(&mut self, iova: Iova, lg2: u32, value: V) {
        let at = match self.sizes.binary_search_by_key(&lg2, |(lg2, _)| *lg2) {
            Ok(at) => at,
            Err(at) => {
                self.sizes.insert(at, (lg2, Blocks::default()));
                at
            }
        };
        self.sizes[at].1.insert(number(iova.get(), lg2), value);
    }

    /// Forgets every block that intersects `range`, and says how many.
    ///
    /// Costs as many steps as the range has blocks or as the map has places, whichever is less.
    pub(crate) fn remove(&mut self, range: IovaRange) -> u64 {
        self.remove_sizes(range, |_| true)
    }

    /// The same for blocks of `2^n` bytes for every `n` of which `is_meant` says so.
    pub(crate) fn remove_sizes(&mut self, range: IovaRange, is_meant: impl Fn(u32) -> bool) -> u64 {
        let mut removed = 0;
        let meant = |(lg2, blocks): &&mut (u32, Blocks<V>)| is_meant(*lg2) && !blocks.is_empty();
        for (lg2, blocks) in self.sizes.iter_mut().filter(meant) {
            let first = number(range.start().get(), *lg2);
            let last = number(range.last().get(), *lg2);
            let before = blocks.len();
            // Removing by key costs a cache miss each; passing over the map is sequential.
            if last - first < u64::try_from(blocks.capacity() / 4).unwrap_or(u64::MAX) {
                for block in first..=last {
                    blocks.remove(&block);
                }
            } else {
                blocks.retain(|block, _| !(first..=last).contains(block));
            }
            removed += u64::try_from(before - blocks.len()).unwrap_or(u64::MAX);
        }
        removed
    }

    /// Forgets the blocks that intersect `range` and of which `is_meant` says so. Says how many.
    pub(crate) fn remove_if(&mut self, range: IovaRange, is_meant: impl Fn(&V) -> bool) -> u64 {
        let mut removed = 0;
        for (lg2, blocks) in self.sizes.iter_mut().filter(|(_, blocks)| !blocks.is_empty()) {
            let first = number(range.start().get(), *lg2);
            let last = number(range.last().get(), *lg2);
            let before = blocks.len();
            blocks.retain(|block, value| !(first..=last).contains(block) || !is_meant(value));
            removed += u64::try_from(before - blocks.len()).unwrap_or(u64::MAX);
        }
        removed
    }

    /// The blocks that `range` covers in part, each with log2 of its size: two of a size at most.
    pub(crate) fn cut_by(&self, range: IovaRange) -> impl Iterator<Item = (IovaRange, u32, &V)> {
        let ends = [Some(range.start()), (range.start() != range.last()).then(|| range.last())];
        self.sizes.iter().flat_map(move |(lg2, blocks)| {
            let around = ends.map(|end| end.map(|end| block_around(end, *lg2)));
            let [first, last] = around;
            let around = [first, last.filter(|_| first != last)];
            around.into_iter().flatten().filter_map(move |block| {
                let value = blocks.get(&number(block.start().get(), *lg2))?;
                (!range.covers(block)).then_some((block, *lg2, value))
            })
        })
    }

    /// Forgets everything, and says how many blocks that were.
    pub(crate) fn clear(&mut self) -> u64 {
        let count = self.len();
        self.sizes.iter_mut().for_each(|(_, blocks)| blocks.clear());
        u64::try_from(count).unwrap_or(u64::MAX)
    }

    /// The blocks that intersect `range`, in no order.
    pub(crate) fn blocks_in(&self, range: IovaRange) -> impl Iterator<Item = (IovaRange, &V)> + '_ {
        self.sizes.iter().flat_map(move |(lg2, blocks)| {
            blocks.iter().filter_map(move |(block, value)| {
                let start = if *lg2 >= 64 { 0 } else { block << lg2 };
                let block = block_around(Iova::new(start), *lg2);
                block.intersection(range).map(|_| (block, value))
            })
        })
    }
}
