//! This joins spans where they touch. All kinds of descriptors use it.

use crate::addr::{Address, DmaAddr};
use crate::span::Span;

/// Bytes that follow each other, from the first to the last address. Unlike a [`Span`] it may be
/// the whole space, which spans that touch can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteRun {
    pub(super) first: u64,
    pub(super) last: u64,
}

impl ByteRun {
    #[inline(always)]
    pub(super) fn of<A: Address>(span: Span<A>) -> Self {
        Self { first: span.start().get(), last: span.last().get() }
    }

    /// Whether `next` starts right behind. Behind the top lies nothing.
    #[inline(always)]
    fn touches(self, next: Self) -> bool {
        self.last.wrapping_add(1) == next.first && next.first != 0
    }

    /// The bytes behind the first one.
    #[inline(always)]
    pub(super) fn above(self) -> u64 {
        self.last - self.first
    }

    /// The run as a span, for an error. It is not the whole space.
    pub(super) fn span(self) -> Span<DmaAddr> {
        Span::covering(DmaAddr::new(self.first), self.above())
    }
}

/// The runs of an iterator of spans, each as long as it can be.
#[derive(Clone, Debug)]
pub(super) struct Runs<I> {
    spans: I,
    /// What the next span may still join; `None` at the end.
    open: Option<ByteRun>,
}

impl<A: Address, I: Iterator<Item = Span<A>>> Runs<I> {
    #[inline(always)]
    pub(super) fn new(mut spans: I) -> Self {
        let open = spans.next().map(ByteRun::of);
        Self { spans, open }
    }
}

impl<A: Address, I: Iterator<Item = Span<A>>> Iterator for Runs<I> {
    type Item = ByteRun;

    #[inline(always)]
    fn next(&mut self) -> Option<ByteRun> {
        let mut run = self.open?;
        self.open = loop {
            match self.spans.next().map(ByteRun::of) {
                Some(next) if run.touches(next) => run.last = next.last,
                next => break next,
            }
        };
        Some(run)
    }

    #[inline(always)]
    fn fold<T, F: FnMut(T, ByteRun) -> T>(self, init: T, mut each: F) -> T {
        let Some(open) = self.open else { return init };
        let (folded, last) =
            self.spans.map(ByteRun::of).fold((init, open), |(folded, run), next| {
                if run.touches(next) {
                    (folded, ByteRun { first: run.first, last: next.last })
                } else {
                    (each(folded, run), next)
                }
            });
        each(folded, last)
    }
}
