//! A user's address space over simulated memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmaspan::{PhysAddr, Span, UserAddr, UserRange};
use parking_lot::Mutex;

use super::SimMemory;
use crate::bus::BusError;

/// Contiguous user memory that is contiguous in physical memory too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The user's addresses.
    pub user: UserRange,
    /// Where the first of them is.
    pub paddr: PhysAddr,
}

/// A user's address space: which user addresses are which physical memory, with holes between.
///
/// It owns no frames. Unmapping does not free them, as pages of a process live on while they are
/// pinned.
#[derive(Debug)]
pub struct SimSpace {
    memory: Arc<SimMemory>,
    /// By the first address.
    segments: Mutex<BTreeMap<u64, Segment>>,
}

impl SimSpace {
    /// An address space without memory.
    pub fn new(memory: Arc<SimMemory>) -> Self {
        Self { memory, segments: Mutex::default() }
    }

    /// The memory behind it.
    pub fn memory(&self) -> &Arc<SimMemory> {
        &self.memory
    }

    /// Puts spans at `start`, one behind the other, instead of what was there. Returns what they
    /// occupy; `None`, with nothing changed, where they do not fit below the top or are none.
    pub fn map(&self, start: UserAddr, spans: &[Span]) -> Option<UserRange> {
        let bytes = spans.iter().try_fold(0u64, |sum, span| sum.checked_add(span.len()))?;
        let whole = UserRange::from_len(start, bytes).ok()?;
        self.unmap(whole);
        let mut segments = self.segments.lock();
        let mut at = start;
        for span in spans {
            let user = UserRange::from_len(at, span.len()).ok()?;
            segments.insert(at.get(), Segment { user, paddr: span.paddr() });
            // Only behind the last span this may be the top of the space.
            at = at.wrapping_add(span.len());
        }
        Some(whole)
    }

    /// Takes a range out, which may begin and end anywhere.
    pub fn unmap(&self, range: UserRange) {
        let mut segments = self.segments.lock();
        for segment in overlapping(&segments, range) {
            let (start, last) = (segment.user.start(), segment.user.last());
            segments.remove(&start.get());
            if let Some(before) = range.start().get().checked_sub(1)
                && let Some(user) = UserRange::new(start, UserAddr::new(before))
            {
                segments.insert(start.get(), Segment { user, ..segment });
            }
            if let Some(behind) = range.last().checked_add(1)
                && let Some(user) = UserRange::new(behind, last)
            {
                let paddr = segment.paddr.wrapping_add(behind.get() - start.get());
                segments.insert(behind.get(), Segment { user, paddr });
            }
        }
    }

    /// What is behind a range, in order and cut to it.
    ///
    /// # Errors
    ///
    /// The first address without memory, where the range has a hole.
    pub fn resolve(&self, range: UserRange) -> Result<Vec<Segment>, UserAddr> {
        let segments = self.segments.lock();
        let mut found = Vec::new();
        let mut next = Some(range.start());
        for segment in overlapping(&segments, range) {
            let cut = segment.user.intersection(range).ok_or(range.start())?;
            if next != Some(cut.start()) {
                break;
            }
            let offset = cut.start().get() - segment.user.start().get();
            found.push(Segment { user: cut, paddr: segment.paddr.wrapping_add(offset) });
            next = cut.last().checked_add(1);
        }
        match next {
            Some(hole) if range.contains(hole) => Err(hole),
            _ => Ok(found),
        }
    }

    /// Reads as the user does.
    ///
    /// # Errors
    ///
    /// The first address without memory; nothing was read.
    pub fn read(&self, start: UserAddr, buf: &mut [u8]) -> Result<(), UserAddr> {
        let mut rest = buf;
        for (segment, len) in self.pieces(start, rest.len())? {
            let (here, behind) = rest.split_at_mut(len);
            outside(segment, self.memory.cpu_read(segment.paddr, here))?;
            rest = behind;
        }
        Ok(())
    }

    /// Writes as the user does.
    ///
    /// # Errors
    ///
    /// The first address without memory; nothing was written.
    pub fn write(&self, start: UserAddr, buf: &[u8]) -> Result<(), UserAddr> {
        let mut rest = buf;
        for (segment, len) in self.pieces(start, rest.len())? {
            let (here, behind) = rest.split_at(len);
            outside(segment, self.memory.cpu_write(segment.paddr, here))?;
            rest = behind;
        }
        Ok(())
    }

    fn pieces(&self, start: UserAddr, len: usize) -> Result<Vec<(Segment, usize)>, UserAddr> {
        if len == 0 {
            return Ok(Vec::new());
        }
        let len = u64::try_from(len).map_err(|_| start)?;
        let range = UserRange::from_len(start, len).map_err(|_| start)?;
        let piece = |segment: Segment| {
            let above = usize::try_from(segment.user.len_less_one()).unwrap_or(usize::MAX);
            (segment, above.saturating_add(1))
        };
        Ok(self.resolve(range)?.into_iter().map(piece).collect())
    }
}

/// A segment that lies outside the memory has none.
fn outside(segment: Segment, result: Result<(), BusError>) -> Result<(), UserAddr> {
    result.map_err(|_| segment.user.start())
}

fn overlapping(segments: &BTreeMap<u64, Segment>, range: UserRange) -> Vec<Segment> {
    let before = segments.range(..range.start().get()).next_back();
    let inside = segments.range(range.start().get()..=range.last().get());
    before
        .into_iter()
        .chain(inside)
        .map(|(_, segment)| *segment)
        .filter(|segment| segment.user.intersection(range).is_some())
        .collect()
}
