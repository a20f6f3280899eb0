//! Bytes by address, in blocks that exist from the first write on.

use std::collections::BTreeMap;
use std::ops::Range;

use dmaspan::{PhysAddr, lg2};

/// Bytes that were written somewhere; all others are zeros.
#[derive(Debug)]
pub(super) struct SparseBytes {
    block_lg2: u32,
    /// By address over the size of a block.
    blocks: BTreeMap<u64, Box<[u8]>>,
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
        Self { block_lg2, blocks: BTreeMap::new() }
    }

    pub(super) fn read(&self, paddr: PhysAddr, buf: &mut [u8]) {
        let mut rest = buf;
        for BlockPart { block, offset, len } in parts(paddr, rest.len(), self.block_lg2) {
            let (here, behind) = rest.split_at_mut(len);
            match self.blocks.get(&block) {
                Some(bytes) => here.copy_from_slice(&bytes[offset..offset + len]),
                None => here.fill(0),
            }
            rest = behind;
        }
    }

    pub(super) fn write(&mut self, paddr: PhysAddr, buf: &[u8]) {
        let mut rest = buf;
        for BlockPart { block, offset, len } in parts(paddr, rest.len(), self.block_lg2) {
            let (here, behind) = rest.split_at(len);
            let empty = || vec![0; 1 << self.block_lg2].into_boxed_slice();
            let bytes = self.blocks.entry(block).or_insert_with(empty);
            bytes[offset..offset + len].copy_from_slice(here);
            rest = behind;
        }
    }

    /// Makes all bytes of some blocks zeros.
    pub(super) fn forget(&mut self, blocks: Range<u64>) {
        while let Some((&block, _)) = self.blocks.range(blocks.clone()).next() {
            self.blocks.remove(&block);
        }
    }
}
