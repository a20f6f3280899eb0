//! Scatter-gather entries.

use super::limits::SegmentLimits;
use super::run::{ByteRun, Runs};
use crate::addr::{Address, DmaAddr};
use crate::span::Span;

/// A segment that a device takes: contiguous bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScatterEntry {
    /// Where it begins.
    pub addr: DmaAddr,
    /// How many bytes it has; not 0.
    pub len: u32,
}

/// The segments of some spans, from [`SegmentLimits::entries`].
///
/// Going through all of them by [`for_each`](Iterator::for_each) or [`fold`](Iterator::fold) is
/// faster than one by one.
#[derive(Clone, Debug)]
pub struct ScatterGather<I> {
    limits: SegmentLimits,
    runs: Runs<I>,
    /// What a run was cut off from.
    rest: Option<ByteRun>,
}

impl<I> ScatterGather<I> {
    #[inline(always)]
    pub(super) fn new(limits: SegmentLimits, runs: Runs<I>) -> Self {
        Self { limits, runs, rest: None }
    }
}

impl<A: Address, I: Iterator<Item = Span<A>>> Iterator for ScatterGather<I> {
    type Item = ScatterEntry;

    #[inline(always)]
    fn next(&mut self) -> Option<ScatterEntry> {
        let run = match self.rest {
            Some(rest) => rest,
            None => self.runs.next()?,
        };
        let (entry, rest) = self.limits.cut(run);
        self.rest = rest;
        Some(entry)
    }

    #[inline(always)]
    fn fold<T, F: FnMut(T, ScatterEntry) -> T>(self, init: T, mut each: F) -> T {
        let Self { limits, runs, rest } = self;
        let mut cut = |mut folded: T, mut run: ByteRun| loop {
            let (entry, rest) = limits.cut(run);
            folded = each(folded, entry);
            match rest {
                Some(rest) => run = rest,
                None => return folded,
            }
        };
        let folded = match rest {
            Some(rest) => cut(init, rest),
            None => init,
        };
        runs.fold(folded, cut)
    }
}
