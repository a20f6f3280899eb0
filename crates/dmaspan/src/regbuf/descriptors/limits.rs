//! [`SegmentLimits`] say which segments a device takes.

use core::num::NonZeroU32;

use super::error::Error;
use super::run::{ByteRun, Runs};
use super::scatter::{ScatterEntry, ScatterGather};
use crate::addr::{Address, DmaAddr};
use crate::span::Span;

/// Says which segments a device takes.
///
/// The default has no boundary, and segments as long as a length of 32 bits can tell in pages of
/// 4 KiB: 2^32 - 4096 bytes, so that no page of a run that begins with one is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentLimits {
    max_segment: NonZeroU32,
    /// The low bits of addresses that may differ within a segment: all, where no boundary matters.
    window: u64,
}

/// The longest segment of whole 4 KiB pages.
const LONGEST: NonZeroU32 = NonZeroU32::new(0_u32.wrapping_sub(1 << 12)).unwrap();

impl Default for SegmentLimits {
    fn default() -> Self {
        Self::new(LONGEST)
    }
}

/// Says what the descriptors of some spans come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// How many segments there are; `usize::MAX` for more.
    pub entries: usize,
    /// How many bytes they have together; `u64::MAX` for more.
    pub bytes: u64,
}

impl SegmentLimits {
    /// Segments of up to so many bytes (Linux's `max_segment_size`, virtio-blk's `size_max`), which
    /// may lie anywhere.
    ///
    /// A run that is longer is cut after so many bytes, so a device that needs aligned segments
    /// wants a multiple of their alignment here.
    pub const fn new(max_segment: NonZeroU32) -> Self {
        Self { max_segment, window: u64::MAX }
    }

    /// The same, where no segment crosses a multiple of `boundary` bytes (Linux's
    /// `seg_boundary_mask` + 1).
    ///
    /// # Errors
    ///
    /// [`Error::Boundary`] where that is no power of two.
    pub const fn with_boundary(self, boundary: u64) -> Result<Self, Error> {
        if !boundary.is_power_of_two() {
            return Err(Error::Boundary { boundary });
        }
        Ok(Self { window: boundary - 1, ..self })
    }

    /// The longest segment, in bytes.
    pub const fn max_segment(self) -> NonZeroU32 {
        self.max_segment
    }

    /// Returns what no segment crosses a multiple of; `None` where that does not matter.
    pub const fn boundary(self) -> Option<u64> {
        self.window.checked_add(1)
    }

    /// The segments of `spans`, as few as the limits allow, in the order of their bytes.
    #[inline(always)]
    pub fn entries<A: Address, I>(self, spans: I) -> ScatterGather<I::IntoIter>
    where
        I: IntoIterator<Item = Span<A>>,
    {
        ScatterGather::new(self, Runs::new(spans.into_iter()))
    }

    /// Returns how many segments [`entries`](Self::entries) gives, and how many bytes they have.
    /// This costs as much as there are spans, however many segments a span is cut into.
    #[inline(always)]
    pub fn need<A: Address, I>(self, spans: I) -> Need
    where
        I: IntoIterator<Item = Span<A>>,
    {
        Runs::new(spans.into_iter()).fold(Need::default(), |need, run| Need {
            entries: need.entries.saturating_add(self.count(run)),
            bytes: need.bytes.saturating_add(run.above()).saturating_add(1),
        })
    }

    /// Writes all segments of `spans` to the beginning of `room`, and returns how many.
    ///
    /// # Errors
    ///
    /// [`Error::Room`] where they are more than have room, which has the first of them then: that
    /// is found out on the way, so that spans are gone through once.
    #[inline(always)]
    pub fn write<A: Address, I>(self, spans: I, room: &mut [ScatterEntry]) -> Result<usize, Error>
    where
        I: IntoIterator<Item = Span<A>>,
    {
        let needed = Runs::new(spans.into_iter()).fold(0, |mut written: usize, mut run| {
            loop {
                // What has no place is only counted.
                let Some(place) = room.get_mut(written) else {
                    return written.saturating_add(self.count(run));
                };
                let (entry, rest) = self.cut(run);
                *place = entry;
                written += 1;
                match rest {
                    Some(rest) => run = rest,
                    None => return written,
                }
            }
        });
        let room = room.len();
        if needed <= room { Ok(needed) } else { Err(Error::Room { needed, room }) }
    }

    /// Whether a run is one segment.
    #[inline(always)]
    fn takes(self, run: ByteRun) -> bool {
        let is_within = (run.first ^ run.last) & !self.window == 0;
        run.above() < u64::from(self.max_segment.get()) && is_within
    }

    /// How many bytes behind the first one a segment of a run has: as Linux's
    /// `get_max_segment_size` (block/blk.h), with which `bvec_split_segs` and `__blk_rq_map_sg`
    /// (block/blk-merge.c) cut.
    #[inline(always)]
    fn segment_above(self, run: ByteRun) -> u32 {
        let longest = self.max_segment.get() - 1;
        let fits = run.above().min(!run.first & self.window);
        u32::try_from(fits).map_or(longest, |above| above.min(longest))
    }

    /// The first segment of a run, and what remains.
    #[inline(always)]
    pub(super) fn cut(self, run: ByteRun) -> (ScatterEntry, Option<ByteRun>) {
        let addr = DmaAddr::new(run.first);
        if self.takes(run) {
            // Most are so. What one segment takes is less than 2^32 bytes.
            let len = u32::try_from(run.above() + 1).unwrap_or(u32::MAX);
            return (ScatterEntry { addr, len }, None);
        }
        let above = self.segment_above(run);
        // It is less than a length of 32 bits.
        let entry = ScatterEntry { addr, len: above.wrapping_add(1) };
        let last = run.first.wrapping_add(u64::from(above));
        let rest = ByteRun { first: last.wrapping_add(1), last: run.last };
        (entry, (last != run.last).then_some(rest))
    }

    /// How many segments a run has.
    #[inline(always)]
    fn count(self, run: ByteRun) -> usize {
        if self.takes(run) { 1 } else { self.count_long(run) }
    }

    #[inline(never)]
    fn count_long(self, run: ByteRun) -> usize {
        let max = u64::from(self.max_segment.get());
        let segments = |above: u64| (above / max).saturating_add(1);
        let head = ByteRun { last: run.last.min(run.first | self.window), ..run };
        let mut count = segments(head.above());
        if head.last != run.last {
            // From one boundary to the next they are as many.
            let second = head.last + 1;
            let tail = ByteRun { first: run.last & !self.window, last: run.last };
            let windows = (tail.first - second) >> self.window.trailing_ones();
            count = count.saturating_add(windows.saturating_mul(segments(self.window)));
            count = count.saturating_add(segments(tail.above()));
        }
        usize::try_from(count).unwrap_or(usize::MAX)
    }
}
