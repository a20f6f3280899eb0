//! What a cache holds: aligned blocks of addresses, each with a value.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use dmaspan::{Iova, IovaRange, Prot, lg2};

use crate::walker::block_around;

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
        let mut removed = 0;
        for (lg2, blocks) in self.sizes.iter_mut().filter(|(_, blocks)| !blocks.is_empty()) {
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

/// A leaf as it was when it was cached. The block that it is for is the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CachedLeaf {
    /// What the first address of the block translates to.
    pub(crate) paddr: u64,
    pub(crate) prot: Prot,
    pub(crate) level: u8,
    /// Whether the first write must go to the entry, to mark it dirty.
    pub(crate) clean: bool,
}

/// A leaf in eight bytes, because millions of them are kept.
///
/// Addresses of leaves are aligned to 2 KiB at least, which leaves eleven bits: six for `Prot`, one
/// for a clean leaf and three for the level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedLeaf(u64);

const PROT_LG2: u32 = 6;
const CLEAN: u64 = 1 << PROT_LG2;
const LEVEL_SHIFT: u32 = PROT_LG2 + 1;
const LEVEL_LG2: u32 = 3;
const SPARE_LG2: u32 = 11;
const _: () = assert!(Prot::all().bits() < 1 << PROT_LG2);
const _: () = assert!(LEVEL_SHIFT + LEVEL_LG2 <= SPARE_LG2);

impl PackedLeaf {
    /// `None` where the leaf is not aligned enough or its level too high to be packed.
    pub(crate) fn new(leaf: CachedLeaf) -> Option<Self> {
        let level = u64::from(leaf.level);
        let fits = lg2::is_aligned(leaf.paddr, SPARE_LG2) && level <= lg2::mask(LEVEL_LG2);
        let clean = if leaf.clean { CLEAN } else { 0 };
        let packed = leaf.paddr | u64::from(leaf.prot.bits()) | clean | (level << LEVEL_SHIFT);
        fits.then_some(Self(packed))
    }

    pub(crate) fn unpack(self) -> CachedLeaf {
        let [level, ..] = ((self.0 >> LEVEL_SHIFT) & lg2::mask(LEVEL_LG2)).to_le_bytes();
        let [prot, ..] = (self.0 & lg2::mask(PROT_LG2)).to_le_bytes();
        CachedLeaf {
            paddr: lg2::align_down(self.0, SPARE_LG2),
            prot: Prot::from_bits_truncate(u32::from(prot)),
            level,
            clean: self.0 & CLEAN != 0,
        }
    }
}
