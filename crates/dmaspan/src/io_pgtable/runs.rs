//! This decides which leaves a mapping gets: arithmetic on the bitmap of page sizes, once a span
//! and not once a page.

use crate::addr::PhysAddr;
use crate::lg2;
use crate::span::Span;

/// Whether a leaf larger than `2^lg2` bytes may fit into so many bytes.
#[inline(always)]
pub(super) fn may_have_larger(page_sizes: u64, lg2: u32, bytes: u64) -> bool {
    let above = page_sizes & !lg2::mask(lg2 + 1);
    above != 0 && bytes >= lg2::size(lg2::alignment(above))
}

/// Leaves of one size, next to each other in IOVAs and in physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) iova: u64,
    pub(super) paddr: u64,
    pub(super) bytes: u64,
    /// log2 of a leaf's bytes.
    pub(super) lg2: u32,
}

impl Run {
    /// The first leaves of `bytes` bytes at `iova` and `paddr`: as large as both addresses, the
    /// length and `page_sizes` allow, and as many of them as come before larger ones do.
    ///
    /// The addresses and the length are multiples of the smallest page.
    #[inline(always)]
    fn first(page_sizes: u64, iova: u64, paddr: u64, bytes: u64) -> Self {
        let aligned = lg2::alignment(iova | paddr).min(63);
        let largest = aligned.min(lg2::floor(bytes));
        let lg2 = lg2::floor(page_sizes & lg2::mask(largest + 1));
        let above = page_sizes & !lg2::mask(lg2 + 1);
        let whole = lg2::align_down(bytes, lg2);
        if above == 0 {
            return Self { iova, paddr, bytes: whole, lg2 };
        }
        // Larger leaves come as soon as both addresses are aligned to them, if they ever are at
        // once and one still fits then. If not the next size, then no larger one either.
        let next = lg2::alignment(above);
        let to_boundary = iova.wrapping_neg() & lg2::mask(next);
        let congruent = lg2::is_aligned(iova ^ paddr, next);
        let fits = bytes > to_boundary && bytes - to_boundary >= lg2::size(next);
        let bytes = if congruent && fits { to_boundary } else { whole };
        Self { iova, paddr, bytes, lg2 }
    }

    /// What remains when the first `bytes` are done; `None` where nothing does.
    #[inline(always)]
    pub(super) fn skip(self, bytes: u64) -> Option<Self> {
        if bytes >= self.bytes {
            return None;
        }
        Some(Self {
            iova: self.iova.wrapping_add(bytes),
            paddr: self.paddr.wrapping_add(bytes),
            bytes: self.bytes - bytes,
            lg2: self.lg2,
        })
    }
}

/// The runs of a list of spans mapped one behind the other. Spans that happen to be neighbours are
/// taken as one, so that the leaves are the largest possible however the list was cut.
#[derive(Clone, Debug)]
pub(super) struct Runs<'s> {
    page_sizes: u64,
    /// The smallest page, log2, and the bytes that the next larger one has.
    smallest_lg2: u32,
    larger: u64,
    /// log2 of the leaf that was found last for a whole span: spans of a list are often alike.
    alike: u32,
    spans: &'s [Span],
    iova: u64,
    /// What is left of the span at hand.
    paddr: u64,
    bytes: u64,
}

impl<'s> Runs<'s> {
    pub(super) fn new(page_sizes: u64, iova: u64, spans: &'s [Span]) -> Self {
        let smallest_lg2 = lg2::alignment(page_sizes);
        let above = page_sizes & !lg2::mask(smallest_lg2 + 1);
        let larger = if above == 0 { u64::MAX } else { above & above.wrapping_neg() };
        Self {
            page_sizes,
            smallest_lg2,
            larger,
            alike: smallest_lg2,
            spans,
            iova,
            paddr: 0,
            bytes: 0,
        }
    }

    /// Where the next run goes.
    #[inline(always)]
    pub(super) fn iova(&self) -> u64 {
        self.iova
    }

    /// Takes back a run, or the end of it, that it returned last.
    #[inline(always)]
    pub(super) fn put_back(&mut self, run: Run) {
        (self.iova, self.paddr) = (run.iova, run.paddr);
        self.bytes += run.bytes;
    }
}

/// What a mapping is made of, in the order of IOVAs.
pub(super) trait Source: Iterator<Item = Run> + Clone {
    /// Hands the addresses of single leaves of `2^lg2` bytes to `take`, as long as nothing but such
    /// leaves comes and `take` has a place for them; returns how many. This is the loop of
    /// scattered memory, which needs none of the arithmetic.
    fn take_alike(&mut self, lg2: u32, take: impl FnMut(PhysAddr) -> bool) -> usize;

    /// Returns how many spans were not begun yet: about as many runs are still to come.
    fn spans_left(&self) -> usize;
}

impl Source for core::iter::Once<Run> {
    fn take_alike(&mut self, _lg2: u32, _take: impl FnMut(PhysAddr) -> bool) -> usize {
        0
    }

    fn spans_left(&self) -> usize {
        0
    }
}

impl Source for Runs<'_> {
    #[inline(always)]
    fn take_alike(&mut self, lg2: u32, mut take: impl FnMut(PhysAddr) -> bool) -> usize {
        if self.bytes != 0 {
            return 0;
        }
        let mut taken = 0;
        while let Some((span, rest)) = self.spans.get(taken..).and_then(<[Span]>::split_first) {
            let paddr = span.paddr().get();
            let alike = span.len() == lg2::size(lg2) && lg2::is_aligned(paddr, lg2);
            let joins = rest.first().is_some_and(|next| next.paddr().get() == paddr + span.len());
            if !alike || joins || !take(span.paddr()) {
                break;
            }
            taken += 1;
        }
        self.spans = self.spans.get(taken..).unwrap_or(&[]);
        self.iova = self.iova.wrapping_add((taken as u64) << lg2);
        taken
    }

    fn spans_left(&self) -> usize {
        self.spans.len()
    }
}

impl Iterator for Runs<'_> {
    type Item = Run;

    #[inline(always)]
    fn next(&mut self) -> Option<Run> {
        if self.bytes == 0 {
            let (first, mut rest) = self.spans.split_first()?;
            let mut span = *first;
            while let Some((next, after)) = rest.split_first()
                && let Some(joined) = span.join(*next)
            {
                span = joined;
                rest = after;
            }
            self.spans = rest;
            self.paddr = span.paddr().get();
            self.bytes = span.len();
        }
        let (iova, paddr, bytes) = (self.iova, self.paddr, self.bytes);
        let run = if bytes < self.larger {
            Run { iova, paddr, bytes, lg2: self.smallest_lg2 }
        } else if bytes == lg2::size(self.alike) && lg2::is_aligned(iova | paddr, self.alike) {
            Run { iova, paddr, bytes, lg2: self.alike }
        } else {
            let run = Run::first(self.page_sizes, iova, paddr, bytes);
            self.alike = run.lg2;
            run
        };
        self.iova = self.iova.wrapping_add(run.bytes);
        self.paddr = self.paddr.wrapping_add(run.bytes);
        self.bytes -= run.bytes;
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const SIZES: u64 = 1 << 12 | 1 << 21 | 1 << 30;

    fn runs(iova: u64, spans: &[(u64, u64)]) -> Vec<(u32, u64)> {
        let spans: Vec<Span> =
            spans.iter().map(|&(p, n)| Span::new(PhysAddr::new(p), n).unwrap()).collect();
        Runs::new(SIZES, iova, &spans).map(|run| (run.lg2, run.bytes >> run.lg2)).collect()
    }

    #[test]
    fn generic_pt_mixed_case_has_twenty_leaves() {
        let leaves = runs(0x3_fe40_0000, &[(0x3_fe40_0000, 0x4_c060_0000 - 0x3_fe40_0000)]);
        assert_eq!(leaves, [(21, 14), (30, 3), (21, 3)]);
    }

    #[test]
    fn what_may_have_no_larger_leaf_is_one_run_of_its_common_alignment() {
        for bytes in [1 << 12, 511 << 12, 1 << 21, 2 << 21, 511 << 21, 1 << 30, 1 << 39] {
            let lg2 = lg2::floor(SIZES & lg2::mask(lg2::alignment(bytes) + 1));
            assert!(!may_have_larger(SIZES, lg2, bytes), "{bytes:#x}");
            assert_eq!(runs(0, &[(0, bytes)]), [(lg2, bytes >> lg2)]);
        }
        assert!(may_have_larger(SIZES, 12, (1 << 21) + (1 << 12)));
        assert!(may_have_larger(SIZES, 21, (1 << 30) + (1 << 21)));
    }

    #[test]
    fn incongruent_addresses_get_small_leaves_only() {
        assert_eq!(runs(0xfef8_0000, &[(0x20_8b95_d000, 0x2_0000)]), [(12, 32)]);
        assert_eq!(runs(0x20_0000, &[(0x40_1000, 0x40_0000)]), [(12, 1024)]);
    }

    #[test]
    fn a_larger_leaf_that_does_not_fit_is_not_waited_for() {
        assert_eq!(runs(0x1ff000, &[(0x1ff000, 0x200000)]), [(12, 512)]);
        assert_eq!(runs(0x1ff000, &[(0x1ff000, 0x202000)]), [(12, 1), (21, 1), (12, 1)]);
    }

    #[test]
    fn neighbouring_spans_share_a_leaf() {
        assert_eq!(runs(0, &[(0, 0x100000), (0x100000, 0x100000)]), [(21, 1)]);
        assert_eq!(runs(0, &[(0, 0x1000), (0x3000, 0x1000), (0x4000, 0x1000)]), [(12, 1), (12, 2)]);
    }

    #[test]
    fn a_run_may_end_at_the_top_of_the_space() {
        assert_eq!(runs(u64::MAX - 0x1fff, &[(0, 0x2000)]), [(12, 2)]);
        assert_eq!(runs(0u64.wrapping_sub(1 << 30), &[(0, 1 << 30)]), [(30, 1)]);
    }
}
