//! Pinning into an array of pages, as Linux's `pin_user_pages`: the baseline of measurements.

use dmaspan::pin::Kind;
use dmaspan::{PhysAddr, Span, UserAddr, UserRange, lg2};
use parking_lot::RwLockWriteGuard;

use super::SimSpace;
use super::mm::permit_rights;
use crate::walker::Access;

/// Says what [`SimSpace::pin_pages`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinnedPages {
    /// How many pages are pinned.
    pub pages: usize,
    /// How many leaves of the CPU's tables map them.
    pub leaves: u64,
}

impl SimSpace {
    /// Pins memory of `range` from its start on and writes down where each page of it is, one entry
    /// for each page of a granule, until `pages` is full. Returns how many are pinned: fewer where
    /// what follows is a hole, is device memory or does not permit the access.
    ///
    /// Each leaf is looked up by a walk from the root, and its pages are pinned by folio in one
    /// step, as `follow_page_mask` and `try_grab_folio` do it for another process's memory
    /// (`__get_user_pages` in mm/gup.c). What is left is the array.
    ///
    /// Unpinned by [`SimMemory::unpin_page`](super::SimMemory::unpin_page), page by page, or
    /// [`SimMemory::unpin_span`](super::SimMemory::unpin_span).
    pub fn pin_pages(
        &self,
        range: UserRange,
        access: Access,
        pages: &mut [PhysAddr],
    ) -> PinnedPages {
        let granule_lg2 = self.memory().granule_lg2();
        let first = UserAddr::new(lg2::align_down(range.start().get(), granule_lg2));
        let room = u64::try_from(pages.len()).unwrap_or(u64::MAX);
        let bytes = room.saturating_mul(lg2::size(granule_lg2));
        let in_pages = UserAddr::new(range.last().get() | lg2::mask(granule_lg2));
        let Some(above) = bytes.checked_sub(1) else { return PinnedPages::default() };
        let last = first.checked_add(above).map_or(in_pages, |last| last.min(in_pages));
        let (mut next, mut done) = (first, PinnedPages::default());
        let mut mm = self.mm.read();
        loop {
            let going = UserRange::new(next, last).and_then(|rest| mm.first_going(rest));
            let stop = match going {
                Some(at) if at == next => return done,
                Some(at) => at.get() - 1,
                None => last.get(),
            };
            match mm.table.find(next.get()) {
                Some(leaf) => {
                    let end = (next.get() | lg2::mask(u32::from(leaf.size_lg2))).min(stop);
                    let permitted = permit_rights(leaf.rights, next, access).is_ok();
                    let span = Span::new(leaf.at(next.get()), end - next.get() + 1);
                    let Ok(span) = span else { return done };
                    if !permitted || leaf.kind != Kind::Memory {
                        return done;
                    }
                    self.memory().pin_span(span);
                    done.leaves += 1;
                    done.pages += fill(&mut pages[done.pages..], span, granule_lg2);
                    if end == last.get() {
                        return done;
                    }
                    next = UserAddr::new(end + 1);
                }
                None => {
                    drop(mm);
                    let mut writing = self.mm.write();
                    if self.fault_in(&mut writing, next, access).is_err() {
                        return done;
                    }
                    mm = RwLockWriteGuard::downgrade(writing);
                }
            }
        }
    }
}

/// Writes down the pages of a span that fits, and returns how many they are.
fn fill(pages: &mut [PhysAddr], span: Span, granule_lg2: u32) -> usize {
    let count = usize::try_from(span.len() >> granule_lg2).unwrap_or(usize::MAX).min(pages.len());
    let mut paddr = span.paddr();
    for page in &mut pages[..count] {
        *page = paddr;
        paddr = paddr.wrapping_add(lg2::size(granule_lg2));
    }
    count
}
