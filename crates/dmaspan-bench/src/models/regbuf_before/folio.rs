//! The folio of a page.

use dmaspan::{PhysAddr, lg2};

use super::{PAGE_LG2, buffer::BvecBefore};

/// A folio: `2^order` pages of 4 KiB, naturally aligned. A closure tells the folio of a page: a
/// page that is of no other is one by itself, and the order is 51 at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FolioBefore {
    /// Its first page.
    pub(crate) head: PhysAddr,
    /// log2 of its pages.
    pub(crate) order: u32,
}

impl FolioBefore {
    /// log2 of its bytes (`folio_shift`).
    #[inline]
    pub(super) fn size_lg2(self) -> u32 {
        self.order + PAGE_LG2
    }

    /// How many pages it has.
    #[inline]
    pub(super) fn pages(self) -> u64 {
        lg2::size(self.order)
    }

    /// Whether it is more than a page (`PageCompound`).
    #[inline]
    pub(super) fn is_large(self) -> bool {
        self.order > 0
    }

    /// Whether a page is one of it.
    #[inline]
    pub(super) fn has(self, page: PhysAddr) -> bool {
        (page.get() ^ self.head.get()) >> self.size_lg2() == 0
    }
}

/// The folios of bvecs in order: small ones each, and a large one once as long as no page of
/// another comes between.
pub(super) fn folios_under<'a, F: Fn(PhysAddr) -> FolioBefore>(
    folios: &'a F,
    bvecs: &'a [BvecBefore],
) -> impl Iterator<Item = FolioBefore> + Clone + 'a {
    let mut seen: Option<FolioBefore> = None;
    bvecs.iter().filter_map(move |bvec| {
        if seen.is_some_and(|seen| seen.has(bvec.page)) {
            return None;
        }
        let folio = folios(bvec.page);
        if folio.is_large() {
            seen = Some(folio);
        }
        Some(folio)
    })
}
