//! Which folio a page is of.

use std::sync::Arc;

use dmaspan::{PhysAddr, lg2};

use super::{PAGE_LG2, buffer::BvecBefore};
use dmaspan_sim::memory::SimMemory;

/// A folio: `2^order` pages of 4 KiB, naturally aligned.
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

/// What tells the folio of a page: memory of the simulation, or, for real memory whose leaves are
/// known, a closure.
pub(crate) trait FolioOf {
    /// The folio that a page of 4 KiB is of. The order is 51 at most.
    fn folio_of(&self, page: PhysAddr) -> FolioBefore;
}

/// A page that is of no folio is one by itself.
impl FolioOf for Arc<SimMemory> {
    #[inline]
    fn folio_of(&self, page: PhysAddr) -> FolioBefore {
        let alone = FolioBefore { head: page, order: 0 };
        SimMemory::folio_of(self, page).map_or(alone, |folio| {
            let order = lg2::floor(folio.span().len()).saturating_sub(PAGE_LG2);
            FolioBefore { head: folio.span().paddr(), order }
        })
    }
}

impl<F: Fn(PhysAddr) -> FolioBefore> FolioOf for F {
    #[inline]
    fn folio_of(&self, page: PhysAddr) -> FolioBefore {
        self(page)
    }
}

/// The folios of bvecs in order: small ones each, and a large one once as long as no page of
/// another comes between.
pub(super) fn folios_under<'a, F: FolioOf>(
    folios: &'a F,
    bvecs: &'a [BvecBefore],
) -> impl Iterator<Item = FolioBefore> + Clone + 'a {
    let mut seen: Option<FolioBefore> = None;
    bvecs.iter().filter_map(move |bvec| {
        if seen.is_some_and(|seen| seen.has(bvec.page)) {
            return None;
        }
        let folio = folios.folio_of(bvec.page);
        if folio.is_large() {
            seen = Some(folio);
        }
        Some(folio)
    })
}
