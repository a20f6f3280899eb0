//! Unmapping by runs that page-by-page look-ups find (`vfio_unmap_unpin`).

use std::collections::LinkedList;

use dmaspan::io_pgtable::{ArenaList, Format};
use dmaspan::iommu::Gather;
use dmaspan::pin::Dirty;
use dmaspan::{IovaRange, PhysAddr};
use parking_lot::Mutex;

use super::pin::Known;
use super::{Owner, PAGE, PAGE_LG2, SYNC_RUNS, State, Type1Error};
use crate::models::unwalked;

/// Runs that are unmapped and wait for a sync, allocated one by one (`unmapped_region_list`).
#[derive(Debug)]
pub(super) struct Regions(LinkedList<Region>);

/// Where a run was, and its pages.
#[derive(Clone, Copy, Debug)]
struct Region {
    paddr: PhysAddr,
    pages: u64,
}

impl Regions {
    pub(super) fn new() -> Self {
        Self(LinkedList::new())
    }

    /// Syncs, and unpins page by page (`vfio_sync_unpin`).
    fn sync_unpin(
        &mut self,
        memory: &Known,
        owner: &Mutex<Owner>,
        gather: &mut Gather<ArenaList>,
        dirty: Dirty,
    ) {
        let gather = std::mem::replace(gather, Gather::new(unwalked::MAX_RANGES));
        if !self.0.is_empty() {
            unwalked::told(&gather);
        }
        for region in std::mem::take(&mut self.0) {
            let unpinned = memory.unpin(region.paddr, region.pages, dirty);
            owner.lock().locked -= unpinned;
        }
    }
}

impl<F: Format> State<F> {
    /// Unmaps and unpins what is mapped in `range`, which lies in one mapping.
    pub(super) fn unmap_unpin(
        &mut self,
        memory: &Known,
        range: IovaRange,
        dirty: Dirty,
    ) -> Result<(), Type1Error> {
        let Self { table, owner, regions, lookups, .. } = self;
        let whole = table.whole();
        let owned = whole.owned();
        let mut gather = Gather::new(unwalked::MAX_RANGES);
        let pages = (range.len_less_one() >> PAGE_LG2) + 1;
        let mut look_up = |page: u64| {
            lookups.iommu += 1;
            owned.iova_to_phys(range.start().wrapping_add(page << PAGE_LG2))
        };
        let mut page = 0;
        while page < pages {
            let Some(paddr) = look_up(page) else {
                page += 1;
                continue;
            };
            let mut run = 1;
            while page + run < pages
                && look_up(page + run) == Some(paddr.wrapping_add(run << PAGE_LG2))
            {
                run += 1;
            }
            let at = range.start().wrapping_add(page << PAGE_LG2);
            let unmapped = owned.unmap_pages(at, PAGE, run);
            if let Err(retired) = gather.add(unmapped.retired) {
                whole.free(retired);
            }
            unmapped.result?;
            regions.0.push_back(Region { paddr, pages: run });
            page += run;
            if regions.0.len() == SYNC_RUNS {
                regions.sync_unpin(memory, owner, &mut gather, dirty);
            }
        }
        regions.sync_unpin(memory, owner, &mut gather, dirty);
        Ok(())
    }
}
