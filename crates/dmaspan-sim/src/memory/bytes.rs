//! Bytes by address, in blocks that exist from the first write on.

use std::collections::BTreeMap;
use std::ops::Range;

use dmaspan::{PhysAddr, lg2};

use super::real::RealBytes;

/// Bytes that were written somewhere; all others are zeros.
#[derive(Debug)]
pub(super) struct SparseBytes {
    block_lg2: u32,
    /// By address over the size of a block.
    blocks: BTreeMap<u64, Box<[u8]>>,
    /// Blocks that a program reaches by a pointer, and where they begin in what it reaches.
    lent: BTreeMap<u64, (RealBytes, usize)>,
}

/// Part of a block: its address over the size of one, the first byte in it and how many.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockPart {
    pub(super) block: u64,
    pub(super) offset: usize,
    len: usize,
}

/// An access, block by block.
pub(super) fn parts(
    paddr: PhysAddr,
    len: usize,
    block_lg2: u32,
) -> impl Iterator<Item = BlockPart> {
    let (mut at, mut left) = (paddr.get(), len);
    std::iter::from_fn(move || {
        let offset = usize::try_from(at & lg2::mask(block_lg2)).unwrap_or(0);
        let len = left.min((1 << block_lg2) - offset);
        let part = BlockPart { block: at >> block_lg2, offset, len };
        // The position behind the last byte may be the top of the space.
        (at, left) = ((at | lg2::mask(block_lg2)).wrapping_add(1), left - len);
        (len > 0).then_some(part)
    })
}

impl SparseBytes {
    pub(super) fn new(block_lg2: u32) -> Self {
        Self { block_lg2, blocks: BTreeMap::new(), lent: BTreeMap::new() }
    }

    pub(super) fn read(&self, paddr: PhysAddr, buf: &mut [u8]) {
        let mut rest = buf;
        for BlockPart { block, offset, len } in parts(paddr, rest.len(), self.block_lg2) {
            let (here, behind) = rest.split_at_mut(len);
            match (self.lent.get(&block), self.blocks.get(&block)) {
                (Some((real, at)), _) => real.read(at + offset, here),
                (None, Some(bytes)) => here.copy_from_slice(&bytes[offset..offset + len]),
                (None, None) => here.fill(0),
            }
            rest = behind;
        }
    }

    pub(super) fn write(&mut self, paddr: PhysAddr, buf: &[u8]) {
        let mut rest = buf;
        for BlockPart { block, offset, len } in parts(paddr, rest.len(), self.block_lg2) {
            let (here, behind) = rest.split_at(len);
            rest = behind;
            if let Some((real, at)) = self.lent.get(&block) {
                real.write(at + offset, here);
                continue;
            }
            let empty = || vec![0; 1 << self.block_lg2].into_boxed_slice();
            let bytes = self.blocks.entry(block).or_insert_with(empty);
            bytes[offset..offset + len].copy_from_slice(here);
        }
    }

    /// Moves blocks, one behind the other, to memory that a program reaches by a pointer. They are
    /// zeros then.
    pub(super) fn lend(&mut self, blocks: impl Iterator<Item = u64> + Clone) -> RealBytes {
        let real = RealBytes::new(blocks.clone().count() << self.block_lg2);
        for (n, block) in blocks.enumerate() {
            self.blocks.remove(&block);
            self.lent.insert(block, (real.clone(), n << self.block_lg2));
        }
        real
    }

    /// Makes blocks zeros that no pointer leads to.
    pub(super) fn take_back(&mut self, blocks: impl Iterator<Item = u64>) {
        blocks.for_each(|block| drop(self.lent.remove(&block)));
    }

    /// Makes all bytes of some blocks zeros.
    pub(super) fn forget(&mut self, blocks: Range<u64>) {
        while let Some((&block, _)) = self.blocks.range(blocks.clone()).next() {
            self.blocks.remove(&block);
        }
    }
}
