//! This finds the addresses that would have given a mapping larger leaves;
//! [`Container::map`](super::Container::map) reports them.

use crate::addr::{Iova, UserAddr};
use crate::lg2;
use crate::pin::Kind;
use crate::span::Span;

/// Says what addresses must be like for larger leaves: congruent to the device's or the memory's,
/// modulo the size of the leaf.
///
/// An IOVA decides over the leaves of the IO page tables. For device memory the user's address
/// decides over those of the CPU's page tables, by whose size the memory is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alignment {
    /// The size of the leaves that there could be, in bytes: a power of two.
    pub leaf: u64,
    /// How many bytes of the mapping they would translate.
    pub bytes: u64,
    /// What to add to the IOVA, modulo `leaf`; 0 where it is right.
    pub iova: u64,
    /// What to add to the user's address, modulo `leaf`; 0 where it is right or does not matter.
    pub user: u64,
}

/// A span and the addresses that it has.
pub(super) struct PlacedSpan {
    pub(super) user: UserAddr,
    pub(super) iova: Iova,
    pub(super) span: Span,
    pub(super) kind: Kind,
}

impl PlacedSpan {
    /// Whether the addresses are right for the largest leaves that are not longer than the span,
    /// and so for all smaller ones. For most spans it is all that is asked.
    #[inline(always)]
    pub(super) fn is_best(&self, page_sizes: u64) -> bool {
        let paddr = self.span.paddr().get();
        let user = match self.kind {
            Kind::Mmio => paddr ^ self.user.get(),
            Kind::Memory => 0,
        };
        let fit = page_sizes & u64::MAX >> self.span.len().leading_zeros();
        let largest = fit.checked_ilog2().map_or(0, lg2::mask);
        ((paddr ^ self.iova.get()) | user) & largest == 0
    }

    /// What would give the span larger leaves, of the largest size for which something would.
    pub(super) fn better(&self, page_sizes: u64) -> Option<Alignment> {
        let paddr = self.span.paddr().get();
        // Each span is looked at, so only leaves that are not longer than it.
        let mut sizes = page_sizes & lg2::mask(lg2::floor(self.span.len()) + 1);
        core::iter::from_fn(|| {
            let leaf = lg2::size(sizes.checked_ilog2()?);
            sizes &= !leaf;
            Some(leaf)
        })
        .find_map(|leaf| {
            let mask = leaf - 1;
            let first = lg2::align_up(paddr, leaf.trailing_zeros())?;
            let bytes = (self.span.last().get().checked_sub(first)?.checked_add(1)?) & !mask;
            let iova = paddr.wrapping_sub(self.iova.get()) & mask;
            let user = match self.kind {
                Kind::Mmio => paddr.wrapping_sub(self.user.get()) & mask,
                Kind::Memory => 0,
            };
            (bytes > 0 && (iova | user) != 0).then_some(Alignment { leaf, bytes, iova, user })
        })
    }
}

/// The second smallest of page sizes; no span is so long where there is none.
pub(super) const fn second_leaf(page_sizes: u64) -> u64 {
    let others = page_sizes & page_sizes.wrapping_sub(1);
    if others == 0 { u64::MAX } else { others & others.wrapping_neg() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::PhysAddr;

    const SIZES: u64 = 1 << 12 | 1 << 21 | 1 << 30;

    fn better(user: u64, iova: u64, paddr: u64, len: u64, kind: Kind) -> Option<Alignment> {
        let span = Span::new(PhysAddr::new(paddr), len).unwrap();
        PlacedSpan { user: UserAddr::new(user), iova: Iova::new(iova), span, kind }.better(SIZES)
    }

    #[test]
    fn the_largest_leaf_that_another_address_would_bring_is_named() {
        let (m2, g1) = (1 << 21, 1 << 30);
        // 3 GiB from 1 GiB + 4K on: one leaf of 1 GiB lies in it.
        let found = better(0x7000, 0x1000, g1 + 0x1000, 3 * g1 - 0x2000, Kind::Mmio);
        let user = (0x1000u64).wrapping_sub(0x7000) & (g1 - 1);
        assert_eq!(found, Some(Alignment { leaf: g1, bytes: g1, iova: 0, user }));
        // The user's address of memory does not matter.
        assert_eq!(better(0x7000, 0x1000, g1 + 0x1000, 3 * g1, Kind::Memory), None);
        let found = better(0, 0x3000, g1, m2, Kind::Memory);
        assert_eq!(found, Some(Alignment { leaf: m2, bytes: m2, iova: m2 - 0x3000, user: 0 }));
        // Too short for any but the smallest, or right already.
        assert_eq!(better(0, 0x3000, g1, m2 - 1, Kind::Mmio), None);
        assert_eq!(better(g1, 5 * g1, 2 * g1, g1, Kind::Mmio), None);
        // The top of the space.
        assert_eq!(better(0, 0, u64::MAX - 0xfff, 0x1000, Kind::Mmio), None);
    }

    #[test]
    fn spans_below_the_second_leaf_are_not_looked_at() {
        assert_eq!(second_leaf(SIZES), 1 << 21);
        assert_eq!(second_leaf(1 << 12), u64::MAX);
        assert_eq!(second_leaf(0), u64::MAX);
    }
}
