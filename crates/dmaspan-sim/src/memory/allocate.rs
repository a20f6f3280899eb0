//! Which frames somebody gets.

use dmaspan::{PhysAddr, Span, lg2};

use super::{FrameState, MemoryError, SimMemory, State, Violation};
use crate::rng::Rng;

impl SimMemory {
    /// Allocates one span where it is free, naturally aligned to `2^align_lg2` bytes.
    ///
    /// # Errors
    ///
    /// [`MemoryError`]; then nothing is allocated.
    pub fn allocate(&self, bytes: u64, align_lg2: u32) -> Result<Span, MemoryError> {
        self.check_size(bytes)?;
        let mut state = self.state.lock();
        let full = MemoryError::Full { bytes, align_lg2 };
        let span = self.find(&state, bytes, align_lg2, 0).ok_or(full)?;
        self.own(&mut state, span);
        Ok(span)
    }

    /// Allocates exactly this span.
    ///
    /// # Errors
    ///
    /// [`MemoryError`] where it is not free memory.
    pub fn allocate_at(&self, span: Span) -> Result<(), MemoryError> {
        for value in [span.paddr().get(), span.len()] {
            if !lg2::is_aligned(value, self.granule_lg2) {
                let granule_lg2 = self.granule_lg2;
                return Err(MemoryError::Unaligned { value, granule_lg2 });
            }
        }
        let mut state = self.state.lock();
        if !self.is_free(&state, span) {
            let align_lg2 = self.granule_lg2;
            return Err(MemoryError::Full { bytes: span.len(), align_lg2 });
        }
        self.own(&mut state, span);
        Ok(())
    }

    /// Allocates single frames of which no two that follow each other are neighbours, so that
    /// nothing can be coalesced. The same seed on the same memory gives the same frames.
    ///
    /// # Errors
    ///
    /// [`MemoryError`]; then nothing is allocated.
    pub fn allocate_scattered(&self, bytes: u64, seed: u64) -> Result<Vec<Span>, MemoryError> {
        self.check_size(bytes)?;
        let mut state = self.state.lock();
        let granule_lg2 = self.granule_lg2;
        let free = |number: &usize| state.frames[*number].state == FrameState::Free;
        let mut frames: Vec<usize> = (0..self.frame_count).filter(free).collect();
        let wanted = usize::try_from(bytes >> granule_lg2).unwrap_or(usize::MAX);
        if frames.len() < wanted {
            return Err(MemoryError::Full { bytes, align_lg2: granule_lg2 });
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
        let span = |number: &usize| Span::new(self.frame_paddr(*number), lg2::size(granule_lg2));
        let spans: Vec<Span> = frames.iter().filter_map(|number| span(number).ok()).collect();
        spans.iter().for_each(|span| self.own(&mut state, *span));
        Ok(spans)
    }

    /// Allocates naturally aligned folios of `2^order` frames each, in the order asked for, at
    /// places that the seed chooses.
    ///
    /// # Errors
    ///
    /// [`MemoryError`]; then nothing is allocated.
    pub fn allocate_folios(&self, orders: &[u32], seed: u64) -> Result<Vec<Span>, MemoryError> {
        let mut state = self.state.lock();
        let mut rng = Rng::new(seed);
        let mut spans: Vec<Span> = Vec::with_capacity(orders.len());
        for order in orders {
            let align_lg2 = self.granule_lg2.saturating_add(*order).min(63);
            let bytes = lg2::size(align_lg2);
            let from = rng.below(u64::try_from(self.frame_count).unwrap_or(u64::MAX));
            let Some(span) = self.find(&state, bytes, align_lg2, from << self.granule_lg2) else {
                spans.iter().for_each(|span| self.disown(&mut state, *span));
                return Err(MemoryError::Full { bytes, align_lg2 });
            };
            self.own(&mut state, span);
            spans.push(span);
        }
        Ok(spans)
    }

    /// Gives frames back, and forgets what is in them.
    ///
    /// A pinned or free frame among them is a violation and is free afterwards all the same.
    pub fn free(&self, spans: &[Span]) {
        let mut state = self.state.lock();
        for span in spans {
            let Some(frames) = self.frames_of(*span) else {
                state.violations.push(Violation::NotFrames { span: *span });
                continue;
            };
            for number in frames {
                let (frame, paddr) = (state.frames[number], self.frame_paddr(number));
                if frame.pins > 0 {
                    let pins = frame.pins;
                    state.violations.push(Violation::FreedWhilePinned { frame: paddr, pins });
                }
                if frame.state == FrameState::Free {
                    state.violations.push(Violation::FreedTwice { frame: paddr });
                }
                state.frames[number].state = FrameState::Free;
                state.frames[number].marks = super::Marks::Clean;
                state.contents.remove(&number);
            }
        }
    }

    fn check_size(&self, bytes: u64) -> Result<(), MemoryError> {
        if bytes > 0 && lg2::is_aligned(bytes, self.granule_lg2) {
            Ok(())
        } else {
            Err(MemoryError::Unaligned { value: bytes, granule_lg2: self.granule_lg2 })
        }
    }

    /// The first aligned free place from `offset` into memory on, going round.
    fn find(&self, state: &State, bytes: u64, align_lg2: u32, offset: u64) -> Option<Span> {
        let align_lg2 = align_lg2.max(self.granule_lg2);
        let first = lg2::align_up(self.base.get(), align_lg2)?;
        let last = self.last().get();
        let middle = lg2::align_up(self.base.get().checked_add(offset)?, align_lg2).unwrap_or(last);
        let step = usize::try_from(lg2::size(align_lg2)).ok()?;
        let places = (middle..=last).step_by(step).chain((first..middle).step_by(step));
        places
            .filter_map(|paddr| Span::new(PhysAddr::new(paddr), bytes).ok())
            .find(|span| self.is_free(state, *span))
    }

    fn is_free(&self, state: &State, span: Span) -> bool {
        let free = |frames: std::ops::Range<usize>| {
            state.frames[frames].iter().all(|frame| frame.state == FrameState::Free)
        };
        self.frames_of(span).is_some_and(free)
    }

    fn own(&self, state: &mut State, span: Span) {
        self.set_state(state, span, FrameState::Owned);
    }

    fn disown(&self, state: &mut State, span: Span) {
        self.set_state(state, span, FrameState::Free);
    }

    fn set_state(&self, state: &mut State, span: Span, new: FrameState) {
        for number in self.frames_of(span).into_iter().flatten() {
            state.frames[number].state = new;
        }
    }
}
