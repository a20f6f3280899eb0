//! References and pins: what keeps folios where they are.
//!
//! A pin keeps its folio as a reference does, as in Linux's `mm/gup.c`, where pins are references
//! of a folio that are counted apart. Both counts are one word here.

use std::ops::Range;

use dmaspan::pin::Dirty;
use dmaspan::{PhysAddr, Span, lg2};
use parking_lot::Mutex;

use super::books::{FrameBooks, Wrong};
use super::bytes::parts;
use super::folio::{Folio, FolioCounts, Found, MAX_REFS, Marks};
use super::{Access, SimMemory, Violation};

impl SimMemory {
    /// The folio that the frame of `paddr` belongs to; `None` where it is free or outside.
    ///
    /// One step, whatever the order. What was allocated as no folio is the fewest naturally aligned
    /// folios that it consists of.
    pub fn folio_of(&self, paddr: PhysAddr) -> Option<Folio> {
        let found = self.records.find(self.pfn(paddr)?)?;
        self.folio(found.pfn, found.order)
    }

    /// All folios that there are, in the order of their addresses: a walk over all of memory.
    pub fn folios(&self) -> impl Iterator<Item = Folio> {
        let found = self.records.folios(self.all_pfns());
        found.filter_map(|found| self.folio(found.pfn, found.order))
    }

    /// Returns what keeps the folio of `paddr`; `None` where it is free or outside.
    pub fn counts(&self, paddr: PhysAddr) -> Option<FolioCounts> {
        Some(self.records.find(self.pfn(paddr)?)?.record.counts())
    }

    /// Takes references to the folio of `paddr`, which somebody keeps meanwhile.
    pub fn get(&self, paddr: PhysAddr, refs: u32) {
        let Some(pfn) = self.inside(paddr) else { return };
        let frame = self.pfn_paddr(pfn);
        match self.records.find(pfn).map(|found| found.record) {
            Some(record) if record.get(refs).is_some() => {}
            Some(record) if record.counts().refs.saturating_add(refs) > MAX_REFS => {
                self.violate(Violation::TooManyReferences { frame });
            }
            _ => self.violate(Violation::HeldFree { frame }),
        }
    }

    /// Gives references to the folio of `paddr` back. With the last the folio is free, unless it is
    /// pinned: then with the last pin.
    pub fn put(&self, paddr: PhysAddr, refs: u32) {
        let Some(pfn) = self.inside(paddr) else { return };
        let found = self.records.find(pfn);
        match found.and_then(|found| Some((found, found.record.put(refs)?))) {
            Some((found, FolioCounts::NONE)) => self.release(found),
            Some(_) => {}
            None => self.violate(Violation::PutTwice { frame: self.pfn_paddr(pfn) }),
        }
    }

    /// Returns how many pins the frame of `paddr` has, or, where books are not exact, all frames of
    /// its folio together; `None` outside this memory.
    pub fn pins(&self, paddr: PhysAddr) -> Option<u32> {
        let pfn = self.pfn(paddr)?;
        if let Some(books) = &self.books {
            return Some(books.lock().frame(self.number(pfn)).pins);
        }
        let pins = self.records.find(pfn).map_or(0, |found| found.record.counts().pins);
        Some(u32::try_from(pins).unwrap_or(u32::MAX))
    }

    /// Returns whether the frame of `paddr` was unpinned as written, or, where books are not exact,
    /// any of its folio; `None` outside this memory.
    pub fn is_dirty(&self, paddr: PhysAddr) -> Option<bool> {
        let pfn = self.pfn(paddr)?;
        let marks = match &self.books {
            Some(books) => books.lock().frame(self.number(pfn)).marks,
            None => self.records.find(pfn).map_or(Marks::Clean, |found| found.record.marks()),
        };
        Some(marks == Marks::Dirty)
    }

    /// Returns how many frames are pinned now, or, where books are not exact, how many the folios
    /// have that are: a walk over all folios.
    pub fn pinned_frames(&self) -> u64 {
        if let Some(books) = &self.books {
            return books.lock().pinned();
        }
        let folios = self.records.folios(self.all_pfns());
        let pinned = folios.filter(|found| found.record.counts().pins > 0);
        pinned.map(|found| lg2::size(found.order)).sum()
    }

    /// Brings the records of the folios at which spans begin into caches, all at once: what counts
    /// them one by one then does not wait for each.
    #[inline]
    pub(super) fn fetch_records(&self, spans: impl Iterator<Item = Span>) {
        for span in spans {
            let found = self.pfn(span.paddr()).and_then(|pfn| self.records.find(pfn));
            std::hint::black_box(found.map(|found| found.record.counts().refs));
        }
    }

    /// Pins the frames under a span, folio by folio. Somebody keeps the folios meanwhile.
    #[inline]
    pub fn pin_span(&self, span: Span) {
        match self.pfns_under(span) {
            Some(pfns) => self.each_part(pfns, |pfns, folio| self.pin_part(pfns, folio)),
            None => self.violate(Violation::NotFrames { span }),
        }
    }

    /// Undoes [`pin_span`](Self::pin_span), all of it or a part of whole frames.
    #[inline]
    pub fn unpin_span(&self, span: Span, dirty: Dirty) {
        match self.pfns_under(span) {
            Some(pfns) => {
                self.each_part(pfns, |pfns, folio| self.unpin_part(pfns, folio, dirty));
            }
            None => self.violate(Violation::NotFrames { span }),
        }
    }

    /// Pins one frame, as a page array is pinned.
    #[inline]
    pub fn pin_page(&self, paddr: PhysAddr) {
        if let Some(pfn) = self.inside(paddr) {
            self.pin_part(&(pfn..pfn + 1), self.records.find(pfn).as_ref());
        }
    }

    /// Undoes [`pin_page`](Self::pin_page).
    #[inline]
    pub fn unpin_page(&self, paddr: PhysAddr, dirty: Dirty) {
        if let Some(pfn) = self.inside(paddr) {
            self.unpin_part(&(pfn..pfn + 1), self.records.find(pfn).as_ref(), dirty);
        }
    }

    /// Pins whole frames, besides what a [`SimPinner`](super::SimPinner) pins: for memory that a
    /// driver owns and gives to its device.
    pub fn pin_frames(&self, spans: &[Span]) {
        self.each_of_frames(spans, |span| self.pin_span(span));
    }

    /// Undoes [`pin_frames`](Self::pin_frames).
    pub fn unpin_frames(&self, spans: &[Span], dirty: Dirty) {
        self.each_of_frames(spans, |span| self.unpin_span(span, dirty));
    }

    /// Calls `f` with each span; one that is not whole frames is a violation.
    fn each_of_frames(&self, spans: &[Span], f: impl Fn(Span)) {
        for &span in spans {
            match self.frames_of(span) {
                Some(_) => f(span),
                None => self.violate(Violation::NotFrames { span }),
            }
        }
    }

    /// Writes down what a device does to memory, all of which is here.
    pub(super) fn touch(&self, paddr: PhysAddr, len: usize, access: Access) {
        for part in parts(paddr, len, self.granule_lg2) {
            let pfn = part.block;
            if self.touch_frame(pfn, access) {
                continue;
            }
            let offset = u64::try_from(part.offset).unwrap_or(u64::MAX);
            let paddr = self.pfn_paddr(pfn).wrapping_add(offset);
            let state = self.state_of(pfn);
            self.violate(Violation::TouchedUnpinned { paddr, access, state });
        }
    }

    /// Whether the frame is pinned.
    fn touch_frame(&self, pfn: u64, access: Access) -> bool {
        let written = access == Access::Write;
        if let Some(books) = &self.books {
            let (mut books, number) = (books.lock(), self.number(pfn));
            let pinned = books.frame(number).pins > 0;
            if pinned && written {
                books.mark(number, Marks::Written);
            }
            return pinned;
        }
        let found = self.records.find(pfn).filter(|found| found.record.counts().pins > 0);
        if let Some(found) = found.filter(|_| written) {
            found.record.mark(Marks::Written);
        }
        found.is_some()
    }

    pub(super) fn folio(&self, pfn: u64, order: u32) -> Option<Folio> {
        let span = Span::new(self.pfn_paddr(pfn), lg2::size(order) << self.granule_lg2).ok()?;
        Some(Folio { span, order })
    }

    /// Frames of this memory by folio; free ones in a row are one part.
    #[inline]
    pub(super) fn parts_of(&self, pfns: Range<u64>) -> impl Iterator<Item = Part<'_>> {
        let Range { start: mut next, end } = pfns;
        std::iter::from_fn(move || {
            let start = (next < end).then_some(next)?;
            let folio = self.records.find(start);
            next = match &folio {
                Some(found) => found.pfns().end.min(end),
                None => self.behind_free(start, end),
            };
            Some(Part { pfns: start..next, folio })
        })
    }

    /// Calls `f` with frames of this memory by folio.
    #[inline(always)]
    fn each_part(&self, pfns: Range<u64>, f: impl Fn(&Range<u64>, Option<&Found<'_>>)) {
        let folio = self.records.find(pfns.start);
        // Frames that lie all over memory: what is short lets the processor wait for the records of
        // several of them at a time.
        if pfns.end - pfns.start == 1 {
            return f(&pfns, folio.as_ref());
        }
        match &folio {
            Some(found) if pfns.end <= found.pfns().end => f(&pfns, folio.as_ref()),
            _ => self.each_of_several(pfns, f),
        }
    }

    #[inline(never)]
    fn each_of_several(&self, pfns: Range<u64>, f: impl Fn(&Range<u64>, Option<&Found<'_>>)) {
        self.parts_of(pfns).for_each(|part| f(&part.pfns, part.folio.as_ref()));
    }

    #[cold]
    fn behind_free(&self, mut next: u64, end: u64) -> u64 {
        while next < end && self.records.find(next).is_none() {
            next = self.records.behind_free(next);
        }
        next.min(end)
    }

    #[inline(always)]
    fn pin_part(&self, pfns: &Range<u64>, folio: Option<&Found<'_>>) {
        if let Some(books) = &self.books {
            self.pin_books(books, pfns);
        }
        let Some(found) = folio else { return self.held_free(pfns) };
        let pins = pfns.end - pfns.start;
        if found.record.pin(pins) == FolioCounts::NONE {
            found.record.unpin(pins);
            self.held_free(pfns);
        }
    }

    #[cold]
    fn pin_books(&self, books: &Mutex<FrameBooks>, pfns: &Range<u64>) {
        let mut books = books.lock();
        self.numbers(pfns).for_each(|number| books.pin(number));
    }

    #[cold]
    fn held_free(&self, pfns: &Range<u64>) {
        self.violate(Violation::HeldFree { frame: self.pfn_paddr(pfns.start) });
    }

    #[inline(always)]
    fn unpin_part(&self, pfns: &Range<u64>, folio: Option<&Found<'_>>, dirty: Dirty) {
        let (None, Some(found)) = (&self.books, folio) else {
            return self.unpin_exactly(pfns, folio, dirty);
        };
        if dirty == Dirty::Written {
            // Before the pin goes, which may free it.
            found.record.mark(Marks::Dirty);
        }
        match found.record.unpin(pfns.end - pfns.start) {
            Some(left) if left.pins > 0 => {}
            Some(left) => {
                if dirty == Dirty::Clean && found.record.marks() == Marks::Written {
                    let frame = self.pfn_paddr(found.pfn);
                    self.violate(Violation::WrittenButClean { frame });
                }
                if left == FolioCounts::NONE {
                    self.release(*found);
                }
            }
            None => self.unpinned_twice(pfns),
        }
    }

    /// The same with exact books, and of frames that are free.
    #[cold]
    fn unpin_exactly(&self, pfns: &Range<u64>, folio: Option<&Found<'_>>, dirty: Dirty) {
        if self.books.is_none() {
            return self.unpinned_twice(pfns);
        }
        // What is wrong with the folio's own count the books have said.
        let pins = self.unpin_books(pfns, dirty);
        if let Some(found) = folio.filter(|_| pins > 0)
            && found.record.unpin(pins) == Some(FolioCounts::NONE)
        {
            self.release(*found);
        }
    }

    #[cold]
    fn unpinned_twice(&self, pfns: &Range<u64>) {
        self.violate(Violation::UnpinnedTwice { frame: self.pfn_paddr(pfns.start) });
    }

    /// Unpins frames in the exact books. Returns how many were pinned.
    fn unpin_books(&self, pfns: &Range<u64>, dirty: Dirty) -> u64 {
        let Some(books) = &self.books else { return 0 };
        let mut books = books.lock();
        let mut pinned = 0;
        for pfn in pfns.clone() {
            let frame = self.pfn_paddr(pfn);
            let wrong = books.unpin(self.number(pfn), dirty).err();
            pinned += u64::from(wrong != Some(Wrong::NotPinned));
            match wrong {
                Some(Wrong::NotPinned) => self.violate(Violation::UnpinnedTwice { frame }),
                Some(Wrong::WrittenButClean) => self.violate(Violation::WrittenButClean { frame }),
                None => {}
            }
        }
        pinned
    }

    /// Frees a folio that nothing keeps any more.
    #[cold]
    fn release(&self, found: Found<'_>) {
        let mut buddy = self.buddy.lock();
        // Somebody without a right to it may have freed it meanwhile.
        let now = self.records.find(found.pfn).map(|now| (now.pfns(), now.record.counts()));
        if now == Some((found.pfns(), FolioCounts::NONE)) {
            self.records.unmake(found.pfn, found.order);
            self.forget(&found.pfns());
            buddy.give(found.pfn, found.order);
        }
    }

    /// Forgets what is in frames that become free, and whether it was written.
    pub(super) fn forget(&self, pfns: &Range<u64>) {
        if let Some(books) = &self.books {
            let mut books = books.lock();
            self.numbers(pfns).for_each(|number| books.mark(number, Marks::Clean));
        }
        self.contents.lock().forget(pfns.clone());
    }

    /// The frame of an address, which is a violation outside this memory.
    #[inline]
    fn inside(&self, paddr: PhysAddr) -> Option<u64> {
        let pfn = self.pfn(paddr);
        if pfn.is_none() {
            self.outside(paddr);
        }
        pfn
    }

    #[cold]
    fn outside(&self, paddr: PhysAddr) {
        if let Ok(span) = Span::new(paddr, 1) {
            self.violate(Violation::NotFrames { span });
        }
    }
}

/// Frames of one folio, or of none.
#[derive(Clone, Debug)]
pub(super) struct Part<'a> {
    pub(super) pfns: Range<u64>,
    pub(super) folio: Option<Found<'a>>,
}
