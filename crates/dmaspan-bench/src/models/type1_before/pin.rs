//! Pinning through an array of pages (`vfio_pin_pages_remote`, `vaddr_get_pfns`).

use std::sync::Arc;

use dmaspan::pin::{Dirty, Kind};
use dmaspan::{PhysAddr, UserAddr, UserRange};

use super::{ARRAY_PAGES, Owner, PAGE_LG2, Type1Error};
use dmaspan_sim::memory::{FAULT_TRIES, FaultError, SimMemory, SimSpace};
use dmaspan_sim::walker::Access;

/// Pages that are pinned and not mapped yet (`struct vfio_batch`).
#[derive(Debug)]
pub(super) struct Pages {
    array: Box<[PhysAddr]>,
    /// The first that is not mapped.
    next: usize,
    /// How many there are, those that are mapped included.
    filled: usize,
}

impl Pages {
    pub(super) fn new() -> Self {
        let array = vec![PhysAddr::new(0); ARRAY_PAGES].into_boxed_slice();
        Self { array, next: 0, filled: 0 }
    }

    /// Unpins what is left, which a run ended before.
    pub(super) fn unpin_rest(&mut self, memory: &Known) {
        for page in &self.array[self.next..self.filled] {
            memory.put(*page, Dirty::Clean);
        }
        (self.next, self.filled) = (0, 0);
    }
}

/// A contiguous run of pinned pages, of memory or of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) paddr: PhysAddr,
    pub(super) pages: u64,
    /// How many of them count against the owner's limit.
    pub(super) charged: u64,
}

/// Memory, and what Linux knows of each page of it.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) memory: Arc<SimMemory>,
    map: MemMap,
}

impl Known {
    pub(super) fn new(memory: Arc<SimMemory>) -> Self {
        Self { map: MemMap::new(&memory), memory }
    }

    /// Whether a frame is none that is counted (`is_invalid_reserved_pfn`).
    #[inline]
    fn is_reserved(&self, page: PhysAddr) -> bool {
        self.memory.frame_state(page).is_none() || self.map.is_reserved(page)
    }

    /// Unpins a page where it is one of memory, and says whether it was (`put_pfn`).
    #[inline]
    fn put(&self, page: PhysAddr, dirty: Dirty) -> bool {
        if self.is_reserved(page) {
            return false;
        }
        self.memory.unpin_page(page, dirty);
        true
    }

    /// Unpins pages one by one, and returns how many were of memory (`vfio_unpin_pages_remote`).
    pub(super) fn unpin(&self, paddr: PhysAddr, pages: u64, dirty: Dirty) -> u64 {
        let page = |n: u64| paddr.wrapping_add(n << PAGE_LG2);
        (0..pages).map(|n| u64::from(self.put(page(n), dirty))).sum()
    }
}

/// What Linux keeps of a page: as long as its `struct page`, of which the flags are the first word.
type Page = [u64; 8];

/// A flag that pages of memory do not have.
const RESERVED: u64 = 1 << 0;
/// One that they have.
const UPTODATE: u64 = 1 << 3;

/// log2 of the pages of a block.
const BLOCK_LG2: u32 = 9;

/// The pages of large folios, whose flags Linux reads one by one (`PageReserved`). A folio of one
/// page has its flags beside the counts that a pin changes anyway.
#[derive(Debug)]
struct MemMap {
    /// The number of the first page.
    first: u64,
    pages: Vec<Page>,
    /// Which blocks have a large folio.
    large: Vec<bool>,
}

impl MemMap {
    fn new(memory: &SimMemory) -> Self {
        let large = || memory.folios().filter(|folio| folio.order() > 0);
        let number = |paddr: PhysAddr| paddr.get() >> PAGE_LG2;
        let first = large().next().map_or(0, |folio| number(folio.span().paddr()));
        let end = large().last().map_or(0, |folio| number(folio.span().last()) + 1);
        // Only what is written takes memory.
        let count = usize::try_from(end - first).unwrap_or(0);
        let mut map = Self {
            first,
            pages: vec![[0; 8]; count],
            large: vec![false; (count >> BLOCK_LG2) + 1],
        };
        for folio in large() {
            for number in number(folio.span().paddr())..=number(folio.span().last()) {
                let index = map.index(number);
                if let Some(page) = map.pages.get_mut(index) {
                    page[0] = UPTODATE;
                    map.large[index >> BLOCK_LG2] = true;
                }
            }
        }
        map
    }

    fn index(&self, number: u64) -> usize {
        usize::try_from(number.wrapping_sub(self.first)).unwrap_or(usize::MAX)
    }

    #[inline]
    fn is_reserved(&self, page: PhysAddr) -> bool {
        let index = self.index(page.get() >> PAGE_LG2);
        let is_large = self.large.get(index >> BLOCK_LG2).is_some_and(|large| *large);
        is_large && self.pages.get(index).is_some_and(|page| page[0] & RESERVED != 0)
    }
}

/// The frames of a range of a space, in order.
pub(super) struct Frames<'a> {
    pub(super) memory: &'a Known,
    pub(super) space: &'a SimSpace,
    pub(super) access: Access,
    pub(super) user: UserRange,
    pub(super) pages: &'a mut Pages,
    pub(super) lookups: &'a mut u64,
}

impl Frames<'_> {
    /// Pins the contiguous run that begins `offset` bytes into the range, of `bytes` at most, where
    /// the owner has room for it.
    pub(super) fn pin_run(
        &mut self,
        offset: u64,
        bytes: u64,
        owner: Owner,
    ) -> Result<Run, Type1Error> {
        let most = bytes >> PAGE_LG2;
        let (mut run, mut reserved): (Option<Run>, bool) = (None, false);
        loop {
            if self.pages.next == self.pages.filled {
                let pinned = run.map_or(0, |run| run.pages);
                let at = self.user.start().wrapping_add(offset + (pinned << PAGE_LG2));
                if let Err(error) = self.fill(at, most - pinned) {
                    run.into_iter().for_each(|run| self.unpin(run));
                    return Err(error);
                }
            }
            let memory = self.memory;
            let pages = &mut *self.pages;
            let first = pages.array[pages.next];
            let run = match &mut run {
                Some(run) => run,
                None => {
                    reserved = memory.is_reserved(first);
                    run.insert(Run { paddr: first, pages: 0, charged: 0 })
                }
            };
            while let Some(&page) = pages.array[..pages.filled].get(pages.next) {
                let continues = page == run.paddr.wrapping_add(run.pages << PAGE_LG2);
                if !continues || memory.is_reserved(page) != reserved {
                    return Ok(*run);
                }
                if !reserved {
                    if owner.locked + run.charged + 1 > owner.limit {
                        let run = *run;
                        self.unpin(run);
                        return Err(Type1Error::OverLimit { limit: owner.limit << PAGE_LG2 });
                    }
                    run.charged += 1;
                }
                run.pages += 1;
                pages.next += 1;
            }
            if run.pages == most {
                return Ok(*run);
            }
        }
    }

    /// Unpins a run that was not mapped.
    pub(super) fn unpin(&self, run: Run) {
        self.memory.unpin(run.paddr, run.pages, Dirty::Clean);
    }

    /// Pins the next pages, as many as the array has room for; of a pfnmap it is one, not pinned.
    fn fill(&mut self, at: UserAddr, most: u64) -> Result<(), Type1Error> {
        let pages = &mut *self.pages;
        // Linux tries to pin first; what was followed last time is most likely followed again.
        let followed_last = pages.filled == 1;
        (pages.next, pages.filled) = (0, 0);
        if followed_last && let Some(page) = follow(self.space, at) {
            *self.lookups += 1;
            (pages.array[0], pages.filled) = (page, 1);
            return Ok(());
        }
        let room = usize::try_from(most).unwrap_or(ARRAY_PAGES).min(ARRAY_PAGES);
        let last = at.wrapping_add((most << PAGE_LG2) - 1);
        let range = UserRange::new(at, last).unwrap_or(UserRange::point(at));
        let pinned = self.space.pin_pages(range, self.access, &mut pages.array[..room]);
        *self.lookups += pinned.leaves;
        pages.filled = pinned.pages;
        if pinned.pages == 0 {
            let page = self.first_of_pfnmap(at)?;
            (self.pages.array[0], self.pages.filled) = (page, 1);
        }
        Ok(())
    }

    /// The first page of a pfnmap, whose rights are asked here (`follow_fault_pfn`).
    fn first_of_pfnmap(&mut self, at: UserAddr) -> Result<PhysAddr, Type1Error> {
        for _ in 0..FAULT_TRIES {
            match self.space.fault(at, self.access) {
                Ok(_) => break,
                Err(FaultError::Again { .. }) => {}
                Err(_) => return Err(Type1Error::Fault { at }),
            }
        }
        *self.lookups += 1;
        follow(self.space, at).ok_or(Type1Error::Fault { at })
    }
}

/// Where a page of a pfnmap is.
#[inline]
fn follow(space: &SimSpace, at: UserAddr) -> Option<PhysAddr> {
    let (paddr, _, kind) = space.frame_at(at)?;
    (kind == Kind::Mmio).then_some(paddr)
}
