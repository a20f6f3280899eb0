//! Mapping and unmapping all ranges of a case, one way or the other.

use std::hint::black_box;

use crate::models::unwalked::Region;
use dmaspan::io_pgtable::{self, ArenaList, Format, Retired};
use dmaspan::iommu::Gather;
use dmaspan::{Iova, IovaRange, PhysAddr, Span, SpanBuf};

use super::cases::{Case, MEMORY, Work};
use crate::PROT;
use crate::failed::Failed;

/// How many ranges the gather of an unmap names, as that of an SMMUv3 driver might.
const MAX_RANGES: usize = 8;

/// How the work of a range is divided into calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// A call for each page; to map a scatter list, for each span.
    PerPage,
    /// One call for the range.
    Batched,
}

/// What a table says that refuses.
pub(super) fn refused(error: io_pgtable::Error) -> Failed {
    Failed::at("the table refused")(error)
}

/// What one thread does: the ranges of a case, one behind the other in a region of the table.
#[derive(Debug)]
pub(crate) struct Worker<'t, F: Format> {
    region: Region<'t, F>,
    case: &'t Case,
    way: Way,
    /// For the spans that an unmap gives back.
    room: Vec<Span>,
}

impl<'t, F: Format> Worker<'t, F> {
    /// One that works in `region`, which is large enough for the case.
    pub(crate) fn new(region: Region<'t, F>, case: &'t Case, way: Way) -> Self {
        let spans = match &case.work {
            Work::Pages { .. } => 0,
            Work::Scattered { spans, .. } => spans.len(),
        };
        let room = SpanBuf::room::<1>().repeat(spans);
        Self { region, case, way, room }
    }

    /// Maps all ranges.
    pub(crate) fn map_all(&self) -> Result<(), Failed> {
        let owned = self.region.owned();
        let mapped = match (&self.case.work, self.way) {
            (&Work::Pages { page_size, pages }, Way::Batched) => {
                self.each_range(|iova| owned.map_pages(iova, MEMORY, page_size, pages, PROT).1)
            }
            (&Work::Pages { page_size, pages }, Way::PerPage) => self.each_range(|iova| {
                (0..pages).map(|n| n * page_size).try_for_each(|at| {
                    let (iova, memory) = (iova.wrapping_add(at), MEMORY.wrapping_add(at));
                    owned.map_pages(iova, memory, page_size, 1, PROT).1
                })
            }),
            (Work::Scattered { spans, .. }, Way::Batched) => {
                self.each_range(|iova| self.map_spans(iova, spans))
            }
            (Work::Scattered { spans, .. }, Way::PerPage) => self.each_range(|mut iova| {
                spans.iter().try_for_each(|span| {
                    let at = iova;
                    iova = iova.wrapping_add(span.len());
                    self.map_spans(at, std::slice::from_ref(span))
                })
            }),
        };
        mapped.map_err(refused)
    }

    /// Unmaps all ranges, gathers for each range what hardware would have to forget, and frees the
    /// tables that were detached.
    pub(crate) fn unmap_all(&mut self) -> Result<(), Failed> {
        let mut room = std::mem::take(&mut self.room);
        let result = match (&self.case.work, self.way) {
            (&Work::Pages { page_size, pages }, Way::Batched) => {
                self.each_gathered(|iova, gather| self.unmap_pages(gather, iova, page_size, pages))
            }
            (&Work::Pages { page_size, pages }, Way::PerPage) => {
                self.each_gathered(|iova, gather| {
                    (0..pages)
                        .map(|n| iova.wrapping_add(n * page_size))
                        .try_for_each(|iova| self.unmap_pages(gather, iova, page_size, 1))
                })
            }
            (Work::Scattered { spans, .. }, Way::Batched) => {
                self.each_gathered(|iova, gather| self.unmap_spans(gather, iova, spans, &mut room))
            }
            (Work::Scattered { leaves, .. }, Way::PerPage) => self.each_gathered(|iova, gather| {
                leaves.iter().try_for_each(|&(at, size)| {
                    let iova = iova.wrapping_add(at);
                    black_box(self.region.owned().iova_to_phys(iova));
                    self.unmap_pages(gather, iova, size, 1)
                })
            }),
        };
        self.room = room;
        result
    }

    /// Maps all, looks where the first and the last byte of every range lead, unmaps all, and looks
    /// again.
    pub(crate) fn checked_pass(&mut self) -> Result<(), Failed> {
        self.map_all()?;
        let (first, last) = match &self.case.work {
            Work::Pages { .. } => (MEMORY, MEMORY.wrapping_add(self.case.bytes - 1)),
            Work::Scattered { spans, .. } => {
                let last = spans.last().map_or(MEMORY, |span| span.last());
                (spans.first().map_or(MEMORY, |span| span.paddr()), last)
            }
        };
        self.check_ends(Some(first), Some(last))?;
        self.unmap_all()?;
        self.check_ends(None, None)
    }

    fn check_ends(&self, first: Option<PhysAddr>, last: Option<PhysAddr>) -> Result<(), Failed> {
        self.each_range(|iova| {
            for (iova, expected) in [(iova, first), (iova.wrapping_add(self.case.bytes - 1), last)]
            {
                let found = self.region.owned().iova_to_phys(iova);
                if found != expected {
                    return Err(Failed::new(format_args!(
                        "iova {iova} leads to {found:x?} instead of {expected:x?}"
                    )));
                }
            }
            Ok(())
        })
    }

    #[inline(always)]
    fn each_range<E>(&self, mut each: impl FnMut(Iova) -> Result<(), E>) -> Result<(), E> {
        let mut iova = self.region.owned().range().start();
        for _ in 0..self.case.ranges {
            each(iova)?;
            iova = iova.wrapping_add(self.case.bytes);
        }
        Ok(())
    }

    #[inline(always)]
    fn each_gathered(
        &self,
        mut each: impl FnMut(Iova, &mut Gather<ArenaList>) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        self.each_range(|iova| {
            let mut gather = Gather::new(MAX_RANGES);
            each(iova, &mut gather)?;
            black_box(gather.invalidation());
            Ok(())
        })
    }

    #[inline(always)]
    fn map_spans(&self, iova: Iova, spans: &[Span]) -> Result<(), io_pgtable::Error> {
        self.region.owned().map_spans(iova, spans, PROT).map_err(|failed| failed.error)
    }

    #[inline(always)]
    fn unmap_pages(
        &self,
        gather: &mut Gather<ArenaList>,
        iova: Iova,
        page_size: u64,
        pages: u64,
    ) -> Result<(), Failed> {
        let unmapped = self.region.owned().unmap_pages(iova, page_size, pages);
        self.retire(gather, unmapped.retired);
        unmapped.result.map_err(refused)
    }

    #[inline(always)]
    fn unmap_spans(
        &self,
        gather: &mut Gather<ArenaList>,
        iova: Iova,
        spans: &[Span],
        room: &mut [Span],
    ) -> Result<(), Failed> {
        let mut removed = SpanBuf::new(room);
        let range = IovaRange::from_len(iova, self.case.bytes)?;
        let unmapped = self.region.owned().unmap(range, &mut removed).map_err(refused)?;
        self.retire(gather, unmapped.retired);
        // All of them lie apart, so as many spans of which the last is right are the same list.
        if removed.len() != spans.len() || removed.spans().last() != spans.last() {
            return Err(Failed::new(format_args!(
                "unmapping the range from iova {iova} on gave back other spans than were mapped"
            )));
        }
        Ok(())
    }

    /// What a driver does with what was retired, but for the hardware.
    #[inline(always)]
    fn retire(&self, gather: &mut Gather<ArenaList>, retired: Retired<ArenaList>) {
        if let Err(retired) = gather.add(retired) {
            self.region.free(retired);
        }
    }
}
