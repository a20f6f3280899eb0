//! This lays the pieces of a list out in its IOVAs, and finds the segments that they make.
//!
//! The layout follows from the pieces and from what the device asks for, so nothing is kept: each
//! use works it out again, and no list needs memory of its own.

use super::Segment;
use crate::addr::{DmaAddr, PhysAddr};
use crate::dma::links::whole;
use crate::dma::memory::{Piece, Via};
use crate::lg2;
use crate::span::Span;

/// The part of a list that a device is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// It has IOVAs of its own, whole granules.
    Placed(Span),
    /// It is used by its own address.
    Passed(Span),
}

/// What the layout of a list depends on beside its pieces.
#[derive(Clone, Copy, Debug)]
pub(in crate::dma) struct Shape {
    /// log2 of the granule.
    pub(in crate::dma) granule_lg2: u32,
    /// The low bits of addresses that may differ within a segment: all, where no boundary matters.
    pub(in crate::dma) window: u64,
    /// The longest segment: a granule at least.
    pub(in crate::dma) max_segment: u64,
}

/// Granules of a piece and their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::dma) struct Placed {
    /// How many bytes behind the first IOVA of the list they begin.
    pub(in crate::dma) at: u64,
    /// How many bytes of the first granule lie before the piece.
    pub(in crate::dma) offset: u64,
    /// The granules themselves.
    pub(in crate::dma) whole: Span,
}

impl Shape {
    /// The place of a piece behind `next` bytes of IOVAs, which it moves on. `None` where it does
    /// not fit into 2^64 bytes.
    ///
    /// Before a piece that would cross a boundary more often than it has to, IOVAs stay free.
    #[inline(always)]
    pub(in crate::dma) fn place(&self, next: &mut u64, span: Span) -> Option<Placed> {
        let granule = lg2::mask(self.granule_lg2);
        let offset = span.paddr().get() & granule;
        let above = offset.checked_add(span.len() - 1)?;
        let mut at = *next;
        let last = at.checked_add(above)?;
        let crossed = (last & !self.window) - (at & !self.window);
        if crossed > above & !self.window {
            at = (at | self.window).checked_add(1)?;
        }
        let bytes = (above | granule).checked_add(1)?;
        *next = at.checked_add(bytes)?;
        let start = PhysAddr::new(span.paddr().get() - offset);
        Some(Placed { at, offset, whole: Span::new(start, bytes).ok()? })
    }

    /// What pieces need that are translated and lie densely, which most lists of pages do; `None`
    /// where [`Layout::need`] has to find out. A pass over the pieces that takes a few instructions
    /// each: segments are only counted where there may be no room.
    #[inline(always)]
    pub(super) fn dense(&self, pieces: &[Piece], room: usize) -> Option<Need> {
        let granule = lg2::mask(self.granule_lg2);
        let (first, rest) = pieces.split_first()?;
        let offset = first.span.paddr().get() & granule;
        let (mut bytes, mut longest, mut via) = (first.span.len(), first.span.len(), first.via);
        // Low bits: a piece ends or the next one begins elsewhere than on a granule.
        let mut seams = 0;
        for piece in rest {
            let len = piece.span.len();
            seams |= piece.span.paddr().get() | offset.wrapping_add(bytes);
            bytes = bytes.checked_add(len)?;
            longest = longest.max(len);
            via = if piece.via == Via::Memory { via } else { piece.via };
        }
        let above = offset.checked_add(bytes - 1)? | granule;
        let is_dense = via == Via::Memory && seams & granule == 0 && above <= self.window;
        if !is_dense || longest > self.max_segment {
            return None;
        }
        let mut segments = pieces.len();
        if segments > room {
            segments = 0;
            self.each_dense(pieces, 0, |_| segments += 1);
        }
        Some(Need { iovas: above.checked_add(1)?, bytes, segments, packing: Packing::Dense })
    }

    /// The segments of a dense list whose IOVAs begin at `base`, as [`Layout`] gives them.
    #[inline(always)]
    pub(super) fn each_dense(&self, pieces: &[Piece], base: u64, mut each: impl FnMut(Segment)) {
        let Some((first, rest)) = pieces.split_first() else { return };
        let offset = first.span.paddr().get() & lg2::mask(self.granule_lg2);
        let (mut addr, mut run) = (base.wrapping_add(offset), first.span.len());
        for piece in rest {
            let len = piece.span.len();
            // All pieces together have fewer than 2^64 bytes.
            if run + len > self.max_segment {
                each(Segment { addr: DmaAddr::new(addr), len: run });
                addr = addr.wrapping_add(run);
                run = 0;
            }
            run += len;
        }
        each(Segment { addr: DmaAddr::new(addr), len: run });
    }

    /// The granules of a piece that has a place.
    #[inline(always)]
    pub(in crate::dma) fn whole(&self, span: Span) -> Span {
        whole(span, lg2::mask(self.granule_lg2))
    }

    /// Whether a segment may have these bytes.
    #[inline(always)]
    fn holds(&self, addr: u64, len: u64) -> bool {
        let last = addr.wrapping_add(len - 1);
        len <= self.max_segment && (addr ^ last) & !self.window == 0
    }

    /// How many of `len` bytes at `addr`, which are too many for a segment, the first one has. It
    /// ends where a granule does if it can, so that the next one is aligned.
    #[cold]
    fn cut(&self, addr: u64, len: u64) -> u64 {
        let to_boundary = (self.window - (addr & self.window)).saturating_add(1);
        let end = lg2::align_down(addr.saturating_add(self.max_segment), self.granule_lg2);
        let longest = if end > addr { end - addr } else { self.max_segment };
        to_boundary.min(longest).min(len)
    }

    /// Skips segments that a run is cut into, none of which is its last, and counts them: pieces
    /// may be so long that nobody can wait for one after the other.
    #[inline(always)]
    fn skip(&self, run: &mut DeviceRun) -> u64 {
        if self.holds(run.addr, run.len) || !lg2::is_aligned(run.addr, self.granule_lg2) {
            return 0;
        }
        self.skip_long(run)
    }

    #[cold]
    fn skip_long(&self, run: &mut DeviceRun) -> u64 {
        let step = lg2::align_down(self.max_segment, self.granule_lg2);
        let above = run.len - 1;
        let (bytes, segments) = match self.window.checked_add(1) {
            // From one boundary to the next they are the same.
            Some(size) if run.addr & self.window == 0 => {
                let windows = above / size;
                (windows * size, windows.saturating_mul(size.div_ceil(step)))
            }
            _ => (0, 0),
        };
        run.addr = run.addr.wrapping_add(bytes);
        run.len -= bytes;
        // The last stretch ends with up to `max_segment` bytes, any other with a boundary.
        let above_boundary = self.window - (run.addr & self.window);
        let cut = if run.len - 1 > above_boundary {
            above_boundary
        } else {
            run.len.saturating_sub(self.max_segment)
        };
        let steps = cut / step;
        run.addr = run.addr.wrapping_add(steps * step);
        run.len -= steps * step;
        segments.saturating_add(steps)
    }
}

/// Bytes that follow each other for the device.
#[derive(Clone, Copy, Debug)]
struct DeviceRun {
    addr: u64,
    len: u64,
    joinable: Joinable,
}

/// Whether a run may become one segment with its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Joinable {
    /// It has IOVAs of the list.
    Yes,
    /// It is used by its own address.
    No,
}

/// The segments of a list, in the order of its bytes.
///
/// As Linux's `__finalise_sg` (drivers/iommu/dma-iommu.c): a piece joins the segment before it
/// where that ended on a granule and it begins one, with nothing free in between, and where both
/// together are not too long and cross no boundary. A piece that is too long itself is cut.
#[derive(Clone, Debug)]
pub(super) struct Layout<I> {
    shape: Shape,
    parts: I,
    /// The first IOVA of the list.
    base: u64,
    /// How many bytes of IOVAs are taken.
    next: u64,
    /// How many parts were taken, and how many bytes they have.
    taken: usize,
    bytes: u64,
    /// What was taken and belongs to the segments to come.
    pending: Option<DeviceRun>,
    /// Set where a part did not fit into the space.
    wraps: Option<usize>,
}

/// What a whole list needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    /// How many bytes of IOVAs; 0 where everything is used by its own address.
    pub(super) iovas: u64,
    /// How many bytes are mapped.
    pub(super) bytes: u64,
    /// How many segments; where there is room for as many as there are pieces, a dense list may
    /// have fewer.
    pub(super) segments: usize,
    /// Whether all of this follows from the sum of the lengths.
    pub(super) packing: Packing,
}

/// How the granules of a list lie in its IOVAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// All of it is memory, whose bytes follow each other from the first to the last, and crosses
    /// no boundary; no piece is too long for a segment.
    Dense,
    /// Anything else.
    Loose,
}

impl<I: Iterator<Item = Part>> Layout<I> {
    /// The segments of `parts`, whose IOVAs begin at `base`: a multiple of the boundary, or all of
    /// them lie between two.
    pub(super) fn new(shape: Shape, parts: I, base: u64) -> Self {
        let (next, taken, bytes) = (0, 0, 0);
        Self { shape, parts, base, next, taken, bytes, pending: None, wraps: None }
    }

    /// What all of it needs, wherever it begins; otherwise which part does not fit into 2^64 bytes.
    pub(super) fn need(mut self) -> Result<Need, usize> {
        let mut segments = 0u64;
        loop {
            if let Some(run) = &mut self.pending {
                segments = segments.saturating_add(self.shape.skip(run));
            }
            if self.next().is_none() {
                break;
            }
            segments = segments.saturating_add(1);
        }
        let segments = usize::try_from(segments).unwrap_or(usize::MAX);
        match self.wraps {
            Some(part) => Err(part),
            None => {
                let (iovas, bytes, packing) = (self.next, self.bytes, Packing::Loose);
                Ok(Need { iovas, bytes, segments, packing })
            }
        }
    }

    /// Takes the next part, and gives it an address.
    #[inline(always)]
    fn take(&mut self) -> Option<DeviceRun> {
        let part = self.parts.next()?;
        let index = self.taken;
        self.taken += 1;
        let run = match part {
            Part::Placed(span) => {
                self.shape.place(&mut self.next, span).map(|Placed { at, offset, .. }| {
                    let addr = self.base.wrapping_add(at + offset);
                    DeviceRun { addr, len: span.len(), joinable: Joinable::Yes }
                })
            }
            Part::Passed(span) => Some(DeviceRun {
                addr: span.paddr().get(),
                len: span.len(),
                joinable: Joinable::No,
            }),
        };
        let bytes = run.and_then(|run| self.bytes.checked_add(run.len));
        let (Some(run), Some(bytes)) = (run, bytes) else {
            self.wraps = Some(index);
            return None;
        };
        self.bytes = bytes;
        Some(run)
    }
}

impl<I: Iterator<Item = Part>> Iterator for Layout<I> {
    type Item = Segment;

    #[inline(always)]
    fn next(&mut self) -> Option<Segment> {
        let mut run = match self.pending.take() {
            Some(run) => run,
            None if self.wraps.is_some() => return None,
            None => self.take()?,
        };
        if !self.shape.holds(run.addr, run.len) {
            let len = self.shape.cut(run.addr, run.len);
            let rest = run.len - len;
            if rest > 0 {
                self.pending =
                    Some(DeviceRun { addr: run.addr.wrapping_add(len), len: rest, ..run });
            }
            return Some(Segment { addr: DmaAddr::new(run.addr), len });
        }
        while let Some(next) = self.take() {
            let follows = run.addr.wrapping_add(run.len) == next.addr;
            let both = run.joinable == Joinable::Yes && next.joinable == Joinable::Yes;
            let together = run.len.saturating_add(next.len);
            if !(follows && both && self.shape.holds(run.addr, together)) {
                self.pending = Some(next);
                break;
            }
            run.len = together;
        }
        Some(Segment { addr: DmaAddr::new(run.addr), len: run.len })
    }
}
