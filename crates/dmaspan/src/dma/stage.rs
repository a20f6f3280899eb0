//! Spans on their way to a page table, of which one call maps as many as it can.

use super::domain::translation::Sealed;
use super::error::Error;
use crate::addr::Iova;
use crate::promise::Promise;
use crate::prot::Prot;
use crate::span::{Span, SpanBuf};

/// How many physical runs go into one call of the page table, which costs a walk: they take a
/// kilobyte of stack.
pub(super) const STAGE: usize = 64;

/// The same of short lists, which take no longer to map than a large stage takes to clear.
pub(super) const FEW: usize = 8;

/// Spans that are mapped one behind the other, with the same permissions.
pub(super) struct Stage<'a, T> {
    translation: &'a T,
    spans: SpanBuf<'a>,
    start: Iova,
    /// Behind the last one.
    end: Iova,
    prot: Prot,
}

impl<'a, T: Sealed> Stage<'a, T> {
    /// An empty one over `room`.
    #[inline(always)]
    pub(super) fn new(translation: &'a T, room: &'a mut [Span]) -> Self {
        let at = Iova::new(0);
        Self { translation, spans: SpanBuf::new(room), start: at, end: at, prot: Prot::empty() }
    }

    /// Puts spans that go to `at` and on, and returns whether it did: where there is a gap, another
    /// permission or no room, those that are there are to be [mapped](Self::map) first. An empty
    /// stage takes as many as it has room for.
    #[inline(always)]
    pub(super) fn put(&mut self, at: Iova, spans: &[Span], prot: Prot) -> bool {
        if self.spans.is_empty() {
            (self.start, self.prot) = (at, prot);
        } else if at != self.end
            || prot != self.prot
            || self.spans.capacity() - self.spans.len() < spans.len()
        {
            return false;
        }
        self.end = at;
        for &span in spans {
            // There is room.
            let _ = self.spans.push(span);
            self.end = self.end.wrapping_add(span.len());
        }
        true
    }

    /// Puts spans, once those are mapped that they cannot be put to.
    #[inline(always)]
    #[track_caller]
    pub(super) fn add(&mut self, at: Iova, spans: &[Span], prot: Prot) -> Result<(), Error> {
        if !self.put(at, spans, prot) {
            self.map()?;
            self.put(at, spans, prot);
        }
        Ok(())
    }

    /// Maps them, all or none, and is empty.
    #[inline(always)]
    #[track_caller]
    pub(super) fn map(&mut self) -> Result<(), Error> {
        if self.spans.is_empty() {
            return Ok(());
        }
        let mapped = match self.spans.spans() {
            // The table has a shorter way for one run.
            &[span] => self.translation.map(Promise::kept(), self.start, &[span], self.prot),
            spans => self.translation.map(Promise::kept(), self.start, spans, self.prot),
        };
        self.spans.clear();
        mapped
    }
}
