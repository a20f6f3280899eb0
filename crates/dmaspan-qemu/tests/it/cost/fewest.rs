//! The fewest commands that hardware can do with: from the manuals, and not from the drivers.

use dmaspan::{IovaRange, lg2};

use crate::cost::bench::PAGE_LG2;

/// As many ranges as a gather names; with more it asks for all of the domain.
pub(crate) const PLACES: usize = 8;

/// How hardware was told to forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forget {
    /// By as many commands that name addresses.
    Named(u64),
    /// By one command that names the domain alone.
    All,
}

/// What a command is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// To forget at addresses that it names.
    Named,
    /// To forget a domain.
    All,
    /// To say when what is before it is done.
    Wait,
    Other,
}

/// The fewest commands for ranges that are unmapped under one sync, and were mapped by leaves of as
/// many bytes, log2.
pub(crate) type Fewest = fn(&[IovaRange], u32) -> Forget;

/// An IOMMU as its manual has it.
pub(crate) struct Hardware {
    pub(crate) name: &'static str,
    pub(crate) fewest: Fewest,
}

/// At most `most` commands that name addresses, as many as `of` says for each range; all of the
/// domain beyond.
pub(crate) fn named(ranges: &[IovaRange], most: u64, of: impl Fn(Pages) -> u64) -> Forget {
    let pages = |range: &IovaRange| Pages {
        first: range.start().get() >> PAGE_LG2,
        last: range.last().get() >> PAGE_LG2,
    };
    let count = ranges.iter().map(|range| of(pages(range))).sum();
    if ranges.len() <= PLACES && count <= most { Forget::Named(count) } else { Forget::All }
}

/// A range by the numbers of its pages.
#[derive(Clone, Copy)]
pub(crate) struct Pages {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

impl Pages {
    pub(crate) fn count(self) -> u64 {
        self.last - self.first + 1
    }
}

/// The aligned blocks of up to `2^most` pages that cover a range with less than twice its pages:
/// the one around it where that is small enough, and otherwise one on each side of the most aligned
/// page in it.
pub(crate) fn covering(pages: Pages, most: u32) -> u64 {
    let Pages { first, last } = pages;
    let around = u64::BITS - (first ^ last).leading_zeros();
    let touched = |first: u64, last: u64, lg2: u32| {
        if lg2 <= most { 1 } else { (last >> most) - (first >> most) + 1 }
    };
    if lg2::size(around) < 2 * pages.count() {
        return touched(first, last, around);
    }
    let lg2_of = |pages: u64| pages.next_power_of_two().trailing_zeros();
    let cut = lg2::align_down(last, around - 1);
    touched(first, cut - 1, lg2_of(cut - first)) + touched(cut, last, lg2_of(last - cut + 1))
}
