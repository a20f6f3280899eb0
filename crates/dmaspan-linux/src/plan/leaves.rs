//! This finds the leaves that a mapping can have.
//!
//! A leaf maps a block of its size, aligned on both sides. Where the memory's pages are as large
//! and the user's address is congruent to the IOVA modulo a leaf, the kernel can use it.

use std::iter;

use dmaspan::{Iova, UserRange, lg2};

/// Larger leaves are not counted on: no page of the CPU is larger.
const MOST: u64 = 1 << 30;

/// The leaves of an IOMMU that says its granule alone: a table has as many entries of 8 bytes as a
/// granule has room for. With 4K 2M and 1G follow (Intel VT-d specification, 9.8; AMD IOMMU
/// specification, 2.2.3; RISC-V), on Arm with 16K 32M, and with 64K 512M (DDI 0487, D8.2). What
/// has another granule is taken for one of 4K without its smallest leaves.
const fn usual(granule: u64) -> u64 {
    const K4: u64 = 4 << 10;
    let base = match granule {
        K16 | K64 => granule,
        _ => K4,
    };
    let entries = base / 8;
    let above = base * entries;
    base | above | above.saturating_mul(entries)
}

const K16: u64 = 16 << 10;
const K64: u64 = 64 << 10;

/// The sizes of leaves that a hardware has, a bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeafSizes(u64);

impl LeafSizes {
    /// What `page_sizes` of a space's limits say. Where they are the granule alone, or all sizes
    /// from there on, they say nothing of the hardware, and the usual ones are taken.
    pub(super) const fn new(page_sizes: u64) -> Self {
        let granule = page_sizes & page_sizes.wrapping_neg();
        let says_nothing = page_sizes == granule || page_sizes == granule.wrapping_neg();
        let sizes = if says_nothing { usual(granule) } else { page_sizes };
        let from_granule = sizes & granule.wrapping_neg() & ((MOST << 1) - 1);
        Self(from_granule | granule)
    }

    /// Those that are said, of hardware that is known to have no others.
    pub(super) const fn exactly(page_sizes: u64) -> Self {
        let granule = page_sizes & page_sizes.wrapping_neg();
        Self(page_sizes & ((MOST << 1) - 1) | granule)
    }

    /// Those of no more than `most` bytes, as pages of the memory permit no larger ones, and the
    /// granule.
    pub(super) const fn up_to(self, most: u64) -> Self {
        let granule = self.0 & self.0.wrapping_neg();
        let below = match most.checked_ilog2() {
            Some(lg2) => lg2::mask(lg2) | lg2::size(lg2),
            None => 0,
        };
        Self(self.0 & below | granule)
    }

    /// The sizes, the largest first.
    pub(super) fn descending(self) -> impl Iterator<Item = u64> {
        let mut rest = self.0;
        iter::from_fn(move || {
            let size = lg2::size(rest.checked_ilog2()?);
            rest ^= size;
            Some(size)
        })
    }

    /// The sizes of which an aligned block lies in `user`, the largest first.
    pub(super) fn fitting(self, user: UserRange) -> impl Iterator<Item = u64> {
        self.descending().filter(move |&size| blocks(user, size) > 0)
    }

    /// For each size, the largest first, how many bytes of `user`, seen at `iova`, can be leaves of
    /// that size and no larger one.
    pub(super) fn permitted(self, user: UserRange, iova: Iova) -> impl Iterator<Item = (u64, u64)> {
        let apart = user.start().get() ^ iova.get();
        let mut larger = 0;
        self.descending().map(move |size| {
            let congruent = apart & (size - 1) == 0;
            let bytes = if congruent { blocks(user, size) } else { larger };
            let own = bytes - larger;
            larger = bytes;
            (size, own)
        })
    }
}

/// The bytes of the blocks of `size`, aligned to it, that lie in `user`.
fn blocks(user: UserRange, size: u64) -> u64 {
    let lg2_size = lg2::floor(size);
    let Some(first) = lg2::align_up(user.start().get(), lg2_size) else { return 0 };
    let behind = user.last().get().saturating_add(1);
    lg2::align_down(behind, lg2_size).saturating_sub(first)
}

#[cfg(test)]
mod tests {
    use dmaspan::UserAddr;

    use super::*;

    const K4: u64 = 4 << 10;
    const M2: u64 = 2 << 20;
    const G1: u64 = 1 << 30;

    fn user(start: u64, len: u64) -> UserRange {
        UserRange::from_len(UserAddr::new(start), len).unwrap()
    }

    fn sizes(page_sizes: u64) -> Vec<u64> {
        LeafSizes::new(page_sizes).descending().collect()
    }

    #[test]
    fn what_says_nothing_is_taken_for_the_usual_leaves_of_its_granule() {
        assert_eq!(sizes(K4), [G1, M2, K4]);
        assert_eq!(sizes(!0 << 12), [G1, M2, K4]);
        assert_eq!(sizes(16 << 10), [32 << 20, 16 << 10]);
        assert_eq!(sizes(64 << 10), [512 << 20, 64 << 10]);
        assert_eq!(sizes(!0 << 16), [512 << 20, 64 << 10]);
        assert_eq!(sizes(!0 << 21), [G1, M2]);
        assert_eq!(sizes(K4 | M2), [M2, K4]);
        assert_eq!(sizes(K4 | M2 | G1 | 1 << 39), [G1, M2, K4]);
        assert_eq!(sizes((64 << 10) | (512 << 20)), [512 << 20, 64 << 10]);
        assert_eq!(sizes(4 << 30), [4 << 30]);
    }

    #[test]
    fn only_leaves_of_which_a_block_lies_in_the_memory_fit() {
        let fit = |start, len| LeafSizes::new(K4).fitting(user(start, len)).collect::<Vec<_>>();
        assert_eq!(fit(G1, G1), [G1, M2, K4]);
        assert_eq!(fit(G1 + K4, G1), [M2, K4]);
        assert_eq!(fit(M2 - K4, M2), [K4]);
        assert_eq!(fit(M2 - K4, M2 + K4), [M2, K4]);
    }

    #[test]
    fn permitted_bytes_are_counted_once_for_the_largest_leaf() {
        let permitted = |start, len, iova| {
            let all = LeafSizes::new(K4).permitted(user(start, len), Iova::new(iova));
            all.map(|(_, bytes)| bytes).collect::<Vec<_>>()
        };
        assert_eq!(permitted(G1, G1, 0), [G1, 0, 0]);
        assert_eq!(permitted(G1, G1, M2), [0, G1, 0]);
        assert_eq!(permitted(G1, G1, K4), [0, 0, G1]);
        assert_eq!(permitted(G1 - K4, G1 + M2 + 3 * K4, M2 - K4), [0, G1 + M2, 3 * K4]);
        assert_eq!(permitted(G1 - K4, G1 + M2 + 3 * K4, 5 * G1 - K4), [G1, M2, 3 * K4]);
    }
}
