//! This decides which frames an allocation gets.

use std::ops::Range;

use dmaspan::{Span, lg2};

use super::buddy::{Buddy, at, pieces};
use super::folio::{Folio, FolioCounts, Found};
use super::pins::Part;
use super::{AllocError, SimMemory, Violation};
use crate::rng::Rng;

/// What whoever allocates a folio has.
const FIRST: FolioCounts = FolioCounts { refs: 1, pins: 0 };

impl SimMemory {
    /// Allocates a folio of `2^order` frames, with one reference.
    ///
    /// What was freed last is taken first.
    ///
    /// # Errors
    ///
    /// [`AllocError::Full`] where no free block is large enough; then nothing is allocated.
    pub fn allocate_folio(&self, order: u32) -> Result<Folio, AllocError> {
        let mut buddy = self.buddy.lock();
        let folio = buddy.take(order).and_then(|pfn| {
            self.records.make(pfn, order, FIRST);
            self.folio(pfn, order)
        });
        folio.ok_or_else(|| self.full_folio(order))
    }

    /// Frees a folio, whatever still keeps it: anything but one reference is a violation.
    pub fn free_folio(&self, folio: Folio) {
        self.free(&[folio.span]);
    }

    /// Allocates one span where it is free, naturally aligned to `2^align_lg2` bytes: the first
    /// place of memory.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; then nothing is allocated.
    pub fn allocate(&self, bytes: u64, align_lg2: u32) -> Result<Span, AllocError> {
        let frames = self.check_size(bytes)?;
        let full = AllocError::Full { bytes, align_lg2 };
        let order = align_lg2.saturating_sub(self.granule_lg2);
        let whole = self.all_pfns();
        let mut buddy = self.buddy.lock();
        let pfn = self.find(&buddy, frames, order, whole).ok_or(full)?;
        let span = Span::new(self.pfn_paddr(pfn), bytes).map_err(|_| full)?;
        self.own(&mut buddy, pfn..pfn + frames);
        Ok(span)
    }

    /// Allocates exactly this span.
    ///
    /// # Errors
    ///
    /// [`AllocError`] where it is not free memory.
    pub fn allocate_at(&self, span: Span) -> Result<(), AllocError> {
        let granule_lg2 = self.granule_lg2;
        for value in [span.paddr().get(), span.len()] {
            if !lg2::is_aligned(value, granule_lg2) {
                return Err(AllocError::Unaligned { value, granule_lg2 });
            }
        }
        let mut buddy = self.buddy.lock();
        let pfns = self.frames_of(span);
        match pfns.filter(|pfns| buddy.first_taken(pfns.clone()).is_none()) {
            Some(pfns) => self.own(&mut buddy, pfns),
            None => return Err(AllocError::Full { bytes: span.len(), align_lg2: granule_lg2 }),
        }
        Ok(())
    }

    /// Allocates single frames of which no two that follow each other are neighbours, so that
    /// nothing can be coalesced. The same seed on the same memory gives the same frames. They are
    /// chosen from the lowest ones: twice as many as are wanted, and 4096 at least.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; then nothing is allocated.
    pub fn allocate_scattered(&self, bytes: u64, seed: u64) -> Result<Vec<Span>, AllocError> {
        let wanted = at(self.check_size(bytes)?);
        let mut buddy = self.buddy.lock();
        // Choosing among all frames of terabytes would take longer than anything done with them.
        let choices = wanted.saturating_mul(2).max(1 << 12);
        let mut frames = self.free_frames(&buddy, choices);
        if frames.len() < wanted {
            return Err(AllocError::Full { bytes, align_lg2: self.granule_lg2 });
        }
        let mut rng = Rng::new(seed);
        for at in 0..wanted {
            let left = u64::try_from(frames.len() - at).unwrap_or(u64::MAX);
            let other = at + usize::try_from(rng.below(left)).unwrap_or(0);
            frames.swap(at, other);
            // Neighbours in ascending order would be one run; in descending order they are two. The
            // frame before them is no neighbour of the higher one, or it would be the lower one.
            if at > 0 && frames[at] == frames[at - 1] + 1 {
                frames.swap(at, at - 1);
            }
        }
        frames.truncate(wanted);
        // In the order of memory, in which neighbours are cut from the same block.
        let mut sorted = frames.clone();
        sorted.sort_unstable();
        sorted.iter().for_each(|pfn| self.own(&mut buddy, *pfn..*pfn + 1));
        let span = |pfn: &u64| Some(self.folio(*pfn, 0)?.span);
        Ok(frames.iter().filter_map(span).collect())
    }

    /// Allocates folios of these orders, in the order asked for, at places that the seed chooses.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; then nothing is allocated.
    pub fn allocate_folios(&self, orders: &[u32], seed: u64) -> Result<Vec<Span>, AllocError> {
        let mut rng = Rng::new(seed);
        let mut taken: Vec<Folio> = Vec::with_capacity(orders.len());
        let mut buddy = self.buddy.lock();
        for order in orders {
            let whole = self.all_pfns();
            let from = whole.start + rng.below(whole.end - whole.start);
            let frames = 1u64.checked_shl(*order).unwrap_or(u64::MAX);
            let find = |starts| self.find(&buddy, frames, *order, starts);
            let pfn = find(from..whole.end).or_else(|| find(whole.start..from));
            let Some(folio) = pfn.and_then(|pfn| self.folio(pfn, *order)) else {
                drop(buddy);
                taken.iter().for_each(|folio| self.free_folio(*folio));
                return Err(self.full_folio(*order));
            };
            self.own(&mut buddy, self.pfns_of(folio));
            taken.push(folio);
        }
        Ok(taken.iter().map(|folio| folio.span).collect())
    }

    /// Fragments memory on purpose, until at least `percent` of what is free lies in blocks of
    /// `2^highest` frames and smaller. Returns the frames that it allocates for that, one in each
    /// larger block that it cuts up, at places that the seed chooses; freeing them undoes it.
    ///
    /// So looks memory after a long time, with small allocations all over it that cannot be moved.
    ///
    /// ```
    /// use dmaspan::PhysAddr;
    /// use dmaspan_sim::memory::SimMemory;
    ///
    /// let memory = SimMemory::new(PhysAddr::new(0), 4 << 20, 12)?;
    /// let frames = memory.fragment(100, 4, 1);
    /// assert_eq!(memory.free_blocks().len(), 5);
    /// assert!(memory.allocate_folio(5).is_err());
    /// memory.free(&frames);
    /// assert!(memory.allocate_folio(10).is_ok());
    /// Ok::<(), dmaspan_sim::memory::AllocError>(())
    /// ```
    pub fn fragment(&self, percent: u32, highest: u32, seed: u64) -> Vec<Span> {
        let chunk = highest.saturating_add(1);
        let mut buddy = self.buddy.lock();
        let mut chunks: Vec<u64> = Vec::new();
        for order in chunk..u64::BITS {
            let inside = |pfn| (pfn..pfn + lg2::size(order)).step_by(at(lg2::size(chunk)));
            chunks.extend(buddy.blocks(order).flat_map(inside));
        }
        let mut rng = Rng::new(seed);
        let mut taken = Vec::new();
        while u128::from(buddy.free_up_to(highest)) * 100
            < u128::from(buddy.free_up_to(u32::MAX)) * u128::from(percent.min(100))
        {
            let choices = u64::try_from(chunks.len()).unwrap_or(u64::MAX);
            let choice = usize::try_from(rng.below(choices)).unwrap_or(0);
            if choice >= chunks.len() {
                break;
            }
            let pfn = chunks.swap_remove(choice) + rng.below(lg2::size(chunk));
            self.own(&mut buddy, pfn..pfn + 1);
            taken.extend(self.folio(pfn, 0).map(|folio| folio.span));
        }
        taken
    }

    /// Returns how many free blocks there are of each order, from 0 up to the highest that has one.
    /// What `/proc/buddyinfo` shows of a Linux.
    pub fn free_blocks(&self) -> Vec<u64> {
        self.buddy.lock().by_order()
    }

    /// Gives frames back, and forgets what is in them.
    ///
    /// They need not be all that was allocated together: the rest of a folio stays, as smaller
    /// ones with as many references each. A pinned, free or otherwise referenced frame among them
    /// is a violation and is free afterwards all the same; where books are not exact, a pinned
    /// folio of which a part is freed loses all its pins.
    pub fn free(&self, spans: &[Span]) {
        for span in spans {
            let Some(pfns) = self.frames_of(*span) else {
                self.violate(Violation::NotFrames { span: *span });
                continue;
            };
            let mut buddy = self.buddy.lock();
            for part in self.parts_of(pfns) {
                self.free_part(&mut buddy, part);
            }
        }
    }

    fn free_part(&self, buddy: &mut Buddy, part: Part<'_>) {
        let counts = part.folio.map(|found| self.records.unmake(found.pfn, found.order));
        self.complain(&part, counts);
        let (Some(found), Some(counts)) = (part.folio, counts) else { return };
        self.forget(&part.pfns);
        pieces(part.pfns.clone()).for_each(|(pfn, order)| buddy.give(pfn, order));
        let Found { pfn, .. } = found;
        for rest in [pfn..part.pfns.start, part.pfns.end..found.pfns().end] {
            for (pfn, order) in pieces(rest) {
                let pins = self.exact_pins(pfn..pfn + lg2::size(order));
                self.records.make(pfn, order, FolioCounts { pins, ..counts });
            }
        }
    }

    /// Records what is wrong with freeing frames whose folio had these counts.
    fn complain(&self, part: &Part<'_>, counts: Option<FolioCounts>) {
        if let Some(books) = &self.books {
            let books = books.lock();
            for pfn in part.pfns.clone() {
                let (frame, pins) = (self.pfn_paddr(pfn), books.frame(self.number(pfn)).pins);
                if pins > 0 {
                    self.violate(Violation::FreedWhilePinned { frame, pins });
                }
                if counts.is_none() {
                    self.violate(Violation::FreedTwice { frame });
                }
            }
        } else if counts.is_none() {
            self.violate(Violation::FreedTwice { frame: self.pfn_paddr(part.pfns.start) });
        }
        let (Some(found), Some(counts)) = (part.folio, counts) else { return };
        let frame = self.pfn_paddr(found.pfn);
        if self.books.is_none() && counts.pins > 0 {
            let pins = u32::try_from(counts.pins).unwrap_or(u32::MAX);
            self.violate(Violation::FreedWhilePinned { frame, pins });
        }
        if let Some(refs @ 1..) = counts.refs.checked_sub(FIRST.refs) {
            self.violate(Violation::FreedWhileReferenced { frame, refs });
        }
    }

    fn exact_pins(&self, pfns: Range<u64>) -> u64 {
        let Some(books) = &self.books else { return 0 };
        let books = books.lock();
        pfns.map(|pfn| u64::from(books.frame(self.number(pfn)).pins)).sum()
    }

    /// How many frames so many bytes are.
    fn check_size(&self, bytes: u64) -> Result<u64, AllocError> {
        if bytes > 0 && lg2::is_aligned(bytes, self.granule_lg2) {
            Ok(bytes >> self.granule_lg2)
        } else {
            Err(AllocError::Unaligned { value: bytes, granule_lg2: self.granule_lg2 })
        }
    }

    /// The first place in `starts`, aligned to `2^order` frames, at which so many are free.
    fn find(&self, buddy: &Buddy, frames: u64, order: u32, starts: Range<u64>) -> Option<u64> {
        let end = self.all_pfns().end;
        // The whole space has fewer frames than any higher order.
        let order = order.min(63);
        let mut start = lg2::align_up(starts.start, order)?;
        while start < starts.end {
            let behind = start.checked_add(frames).filter(|behind| *behind <= end)?;
            let Some(taken) = buddy.first_taken(start..behind) else { return Some(start) };
            let next = self.records.find(taken).map_or(taken + 1, |found| found.pfns().end);
            start = lg2::align_up(next, order)?;
        }
        None
    }

    /// The lowest free frames, at most so many.
    fn free_frames(&self, buddy: &Buddy, most: usize) -> Vec<u64> {
        let Range { start: mut next, end } = self.all_pfns();
        let mut frames = Vec::new();
        while next < end && frames.len() < most {
            if let Some((head, order)) = buddy.block_around(next) {
                let behind = head + lg2::size(order);
                frames.extend((next..behind).take(most - frames.len()));
                next = behind;
            } else {
                next = self.records.find(next).map_or(next + 1, |found| found.pfns().end);
            }
        }
        frames
    }

    /// Makes free frames the fewest folios.
    fn own(&self, buddy: &mut Buddy, pfns: Range<u64>) {
        for (pfn, order) in pieces(pfns) {
            if buddy.take_at(pfn, order).is_some() {
                self.records.make(pfn, order, FIRST);
            }
        }
    }

    fn pfns_of(&self, folio: Folio) -> Range<u64> {
        let pfn = folio.span.paddr().get() >> self.granule_lg2;
        pfn..pfn + lg2::size(folio.order)
    }

    fn full_folio(&self, order: u32) -> AllocError {
        let align_lg2 = self.granule_lg2.saturating_add(order).min(63);
        AllocError::Full { bytes: lg2::size(align_lg2), align_lg2 }
    }
}
