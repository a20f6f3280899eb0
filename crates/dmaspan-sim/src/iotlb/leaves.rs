//! A TLB holds leaves, and an invalidation by address makes it forget some of them.

use dmaspan::{Iova, IovaRange, Prot, lg2};

use super::blocks::BlockMap;

/// A leaf as it was when it was cached. The block that it is for is the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CachedLeaf {
    /// What the first address of the block translates to.
    pub(crate) paddr: u64,
    pub(crate) prot: Prot,
    pub(crate) level: u8,
    /// Whether the first write must go to the entry, to mark it dirty.
    pub(crate) clean: bool,
    /// log2 of what one entry of the table covers: less than the leaf has where it is a contiguous
    /// group.
    pub(crate) entry_lg2: u32,
}

/// A leaf in eight bytes, because millions of them are kept.
///
/// Addresses of leaves are aligned to 2 KiB at least, which leaves eleven bits: six for `Prot`, one
/// for a clean leaf and three for the level. They have 56 bits at most, as RISC-V's have, which
/// leaves six for the size of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedLeaf(u64);

const PROT_LG2: u32 = 6;
const CLEAN: u64 = 1 << PROT_LG2;
const LEVEL_SHIFT: u32 = PROT_LG2 + 1;
const LEVEL_LG2: u32 = 3;
const SPARE_LG2: u32 = 11;
const ENTRY_SHIFT: u32 = 58;
const _: () = assert!(Prot::all().bits() < 1 << PROT_LG2);
const _: () = assert!(LEVEL_SHIFT + LEVEL_LG2 <= SPARE_LG2);

impl PackedLeaf {
    /// `None` where the leaf is not aligned enough or its level too high to be packed.
    pub(crate) fn new(leaf: CachedLeaf) -> Option<Self> {
        let level = u64::from(leaf.level);
        let fits = lg2::is_aligned(leaf.paddr, SPARE_LG2)
            && leaf.paddr <= lg2::mask(ENTRY_SHIFT)
            && level <= lg2::mask(LEVEL_LG2)
            && leaf.entry_lg2 < 64;
        let clean = if leaf.clean { CLEAN } else { 0 };
        let attributes = u64::from(leaf.prot.bits()) | clean | (level << LEVEL_SHIFT);
        let packed = leaf.paddr | attributes | u64::from(leaf.entry_lg2) << ENTRY_SHIFT;
        fits.then_some(Self(packed))
    }

    pub(crate) fn unpack(self) -> CachedLeaf {
        let [level, ..] = ((self.0 >> LEVEL_SHIFT) & lg2::mask(LEVEL_LG2)).to_le_bytes();
        let [prot, ..] = (self.0 & lg2::mask(PROT_LG2)).to_le_bytes();
        let [entry_lg2, ..] = (self.0 >> ENTRY_SHIFT).to_le_bytes();
        CachedLeaf {
            paddr: lg2::align_down(self.0 & lg2::mask(ENTRY_SHIFT), SPARE_LG2),
            prot: Prot::from_bits_truncate(u32::from(prot)),
            level,
            clean: self.0 & CLEAN != 0,
            entry_lg2: u32::from(entry_lg2),
        }
    }
}

/// What is left of a contiguous group of which a part was forgotten: some of its entries.
#[derive(Clone, Copy, Debug)]
struct Piece {
    leaf: PackedLeaf,
    /// log2 of the group's size.
    group_lg2: u32,
}

/// Leaves, each until an invalidation names an address and the size of it.
///
/// A contiguous group answers as one leaf, as if each of its entries had been cached by itself:
/// hardware may do both, so an invalidation of some of its addresses leaves the other ones.
#[derive(Debug, Default)]
pub(crate) struct LeafCache {
    leaves: BlockMap<PackedLeaf>,
    pieces: BlockMap<Piece>,
}

impl LeafCache {
    pub(crate) fn len(&self) -> usize {
        self.leaves.len() + self.pieces.len()
    }

    /// The smallest leaf that has `iova`, and log2 of its size.
    pub(crate) fn get(&self, iova: Iova) -> Option<(u32, CachedLeaf)> {
        let leaf = self.leaves.get(iova).map(|(lg2, leaf)| (lg2, leaf.unpack()));
        let piece = self.pieces.get(iova).map(|(lg2, piece)| (lg2, piece.leaf.unpack()));
        match (leaf, piece) {
            (Some(leaf), Some(piece)) if leaf.0 < piece.0 => Some(leaf),
            (leaf, piece) => piece.or(leaf),
        }
    }

    /// Keeps a leaf of `2^lg2` bytes that has `iova`, in the place of a piece for which a walk was
    /// begun there.
    pub(crate) fn insert(&mut self, iova: Iova, lg2: u32, leaf: CachedLeaf) {
        let Some(packed) = PackedLeaf::new(leaf) else { return };
        self.leaves.insert(iova, lg2, packed);
        self.pieces.remove(IovaRange::point(iova));
    }

    /// Forgets the leaves of `2^n` bytes for each bit `n` of `sizes` that intersect `range`, but of
    /// a contiguous group only the entries that do. Says how many leaves it cut or forgot.
    pub(crate) fn forget(&mut self, range: IovaRange, sizes: u64) -> u64 {
        let is_named = |lg2: u32| sizes.checked_shr(lg2).is_some_and(|sizes| sizes & 1 != 0);
        let mut removed = self.pieces.remove_if(range, |piece| is_named(piece.group_lg2));
        for (block, group_lg2, leaf) in self.leaves.cut_by(range) {
            let CachedLeaf { paddr, entry_lg2, .. } = leaf.unpack();
            if entry_lg2 >= group_lg2 || !is_named(group_lg2) {
                continue;
            }
            for offset in (0..lg2::size(group_lg2)).step_by(1 << entry_lg2) {
                let at = Iova::new(block.start().get() + offset);
                let entry = super::block_around(at, entry_lg2);
                let leaf = CachedLeaf { paddr: paddr + offset, ..leaf.unpack() };
                if range.intersection(entry).is_none()
                    && let Some(leaf) = PackedLeaf::new(leaf)
                {
                    self.pieces.insert(at, entry_lg2, Piece { leaf, group_lg2 });
                }
            }
        }
        removed += self.leaves.remove_sizes(range, is_named);
        removed
    }

    /// Forgets everything, and says how many leaves that were.
    pub(crate) fn clear(&mut self) -> u64 {
        self.leaves.clear() + self.pieces.clear()
    }

    /// The leaves that intersect `range`, in no order.
    pub(crate) fn leaves_in(
        &self,
        range: IovaRange,
    ) -> impl Iterator<Item = (IovaRange, CachedLeaf)> + '_ {
        let leaves = self.leaves.blocks_in(range).map(|(block, leaf)| (block, leaf.unpack()));
        let pieces = self.pieces.blocks_in(range);
        leaves.chain(pieces.map(|(block, piece)| (block, piece.leaf.unpack())))
    }
}
