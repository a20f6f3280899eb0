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

    /// Whether so many spans, which go to `at` and on, can be put to those that are there:
    /// otherwise these are to be [mapped](Self::map) first. An empty one takes as many as it has
    /// room for.
    #[inline(always)]
    pub(super) fn takes(&self, at: Iova, count: usize, prot: Prot) -> bool {
        let follows = at == self.end && prot == self.prot;
        self.spans.is_empty() || follows && self.spans.capacity() - self.spans.len() >= count
    }

    /// Puts spans that it [takes](Self::takes).
    #[inline(always)]
    pub(super) fn put(&mut self, at: Iova, spans: &[Span], prot: Prot) {
        if self.spans.is_empty() {
            (self.start, self.prot) = (at, prot);
        }
        self.end = at;
        for &span in spans {
            // There is room.
            let _ = self.spans.push(span);
            self.end = self.end.wrapping_add(span.len());
        }
    }

    /// Puts spans, once those are mapped that they cannot be put to.
    #[inline(always)]
    #[track_caller]
    pub(super) fn add(&mut self, at: Iova, spans: &[Span], prot: Prot) -> Result<(), Error> {
        if !self.takes(at, spans.len(), prot) {
            self.map()?;
        }
        self.put(at, spans, prot);
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
