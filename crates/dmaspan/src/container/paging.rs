//! A domain of any format, as the container uses it.
//!
//! The container owns every range that it works on: a mapping in its tree keeps others out. So
//! these methods are safe to call from it, and from nowhere else.

use super::dirty::DirtyRead;
use crate::addr::Iova;
use crate::io_pgtable::{DirtyBitmap, Format, Geometry, LeafCensus, Rest, Retired, TableMemory};
use crate::iommu::{self, Domain, HardwareError, IommuOps, MapFailed};
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::{Span, SpanBuf};

/// Whether hardware may still use a range that was unmapped, or that was to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// It has forgotten all of it.
    None,
    /// It may use it: nothing of it may be released.
    Possible,
}

/// A mapping that the domain refused.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) error: iommu::Error,
    pub(super) reach: Reach,
}

/// What one sync took away.
#[derive(Debug)]
#[must_use = "what was taken away may not be released where the sync failed"]
pub(super) struct Taken {
    /// How many bytes of the ranges, from the front: all of them, or as far as the buffer reached.
    pub(super) bytes: u64,
    /// Whether hardware has forgotten them.
    pub(super) synced: Result<(), HardwareError>,
}

/// Who is told what is gone before hardware has forgotten it.
pub(super) type Others<'a> = &'a mut dyn FnMut(
    &mut dyn Iterator<Item = IovaRange>,
    Option<&mut DirtyBitmap<'_>>,
) -> Result<(), HardwareError>;

/// What a [`Domain`] does for a container, whatever its format.
pub(super) trait Paging: Send + Sync {
    fn geometry(&self) -> &Geometry;

    /// Maps pinned spans. All or nothing.
    fn map(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Refused>;

    /// Tells hardware that caches absent entries about a mapping.
    fn announce(&self, range: IovaRange) -> Result<(), HardwareError>;

    /// Unmaps ranges that are mapped without holes, as far as `buf` has room for their spans, and
    /// syncs once. Before it does, `others` is told what of them is gone. Where there are `marks`
    /// hardware's go there, up to the moment in which a translation was gone.
    fn unmap(
        &self,
        ranges: &[IovaRange],
        buf: &mut SpanBuf<'_>,
        marks: Option<&mut DirtyBitmap<'_>>,
        others: Others<'_>,
    ) -> Taken;

    /// Takes whatever is mapped in the ranges away and syncs once. No leaf reaches out of a range.
    fn remove(&self, ranges: &mut dyn Iterator<Item = IovaRange>) -> Result<(), HardwareError>;

    /// The same, and hardware's marks go to `marks`.
    fn remove_dirty(
        &self,
        ranges: &mut dyn Iterator<Item = IovaRange>,
        marks: &mut DirtyBitmap<'_>,
    ) -> Result<(), HardwareError>;

    /// Whether hardware marks the leaves through which it writes.
    fn tracks_dirty(&self) -> bool;

    /// Calls `found` with every leaf that devices wrote and that has an address in `range`, whole.
    /// With [`DirtyRead::Clear`] the marks of those that begin in it are taken away, and the result
    /// is what [`forget_marks`](Self::forget_marks) is for: a range, and leaf sizes.
    fn read_dirty(
        &self,
        range: IovaRange,
        how: DirtyRead,
        found: &mut dyn FnMut(IovaRange),
    ) -> Option<(IovaRange, u64)>;

    /// Makes hardware forget leaves of these sizes, whose marks were taken away.
    fn forget_marks(&self, ranges: &[IovaRange], leaf_sizes: u64) -> Result<(), HardwareError>;

    /// Puts the spans of a range, which is mapped without holes, into `buf`, as many as fit, and
    /// returns what of the range is left.
    fn spans(&self, range: IovaRange, buf: &mut SpanBuf<'_>) -> Option<IovaRange>;

    /// Frees the tables that unmapping `range` left empty, of those in `owned`. Failure leaks them.
    fn reclaim(&self, range: IovaRange, owned: IovaRange);

    fn census(&self, range: IovaRange) -> LeafCensus;

    /// Takes the tables away from hardware for good: then it has forgotten all of them, and what is
    /// unmapped needs no sync any more. Otherwise they leak.
    fn let_go(&mut self) -> Result<(), HardwareError>;
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Paging for Domain<F, M, O> {
    fn geometry(&self) -> &Geometry {
        Domain::geometry(self)
    }

    fn map(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Refused> {
        self.map_pinned(iova, spans, prot).map(|_| ()).map_err(refused)
    }

    fn announce(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.tell_mapped(range)
    }

    fn unmap(
        &self,
        ranges: &[IovaRange],
        buf: &mut SpanBuf<'_>,
        mut marks: Option<&mut DirtyBitmap<'_>>,
        others: Others<'_>,
    ) -> Taken {
        let mut gather = self.gather();
        let mut bytes = 0u64;
        let mut last = None;
        let mut whole = 0;
        for &range in ranges {
            let rest = Rest::known(range, self.id());
            let unmapped = match &mut marks {
                Some(marks) => self.unmap_next_dirty(rest, buf, marks),
                None => self.unmap_next(rest, buf),
            };
            self.add_own(&mut gather, unmapped.retired);
            if let Some(rest) = unmapped.rest {
                last = before(range, rest.range().start());
                break;
            }
            bytes = bytes.wrapping_add(range.len_less_one()).wrapping_add(1);
            whole += 1;
        }
        bytes = last.map_or(bytes, |last| bytes.wrapping_add(last.len_less_one()).wrapping_add(1));
        let mut parts = ranges[..whole].iter().copied().chain(last);
        // All are told, also where one of them fails.
        let others = others(&mut parts, marks);
        let own = self.sync_own(gather).map(|_| ()).map_err(|failed| failed.error);
        Taken { bytes, synced: others.and(own) }
    }

    fn remove(&self, ranges: &mut dyn Iterator<Item = IovaRange>) -> Result<(), HardwareError> {
        let mut gather = self.gather();
        for range in ranges {
            let retired = self.take_away(range);
            self.add_own(&mut gather, retired);
        }
        self.sync_own(gather).map(|_| ()).map_err(|failed| failed.error)
    }

    fn remove_dirty(
        &self,
        ranges: &mut dyn Iterator<Item = IovaRange>,
        marks: &mut DirtyBitmap<'_>,
    ) -> Result<(), HardwareError> {
        let mut gather = self.gather();
        for range in ranges {
            let retired = self.take_away_dirty(range, marks);
            self.add_own(&mut gather, retired);
        }
        self.sync_own(gather).map(|_| ()).map_err(|failed| failed.error)
    }

    fn tracks_dirty(&self) -> bool {
        self.format().tracks_dirty()
    }

    fn read_dirty(
        &self,
        range: IovaRange,
        how: DirtyRead,
        found: &mut dyn FnMut(IovaRange),
    ) -> Option<(IovaRange, u64)> {
        let clears = |leaf: IovaRange| how == DirtyRead::Clear && range.contains(leaf.start());
        let retired = self.visit_dirty(range, clears, found);
        retired.range.map(|range| (range, retired.leaf_sizes))
    }

    fn forget_marks(&self, ranges: &[IovaRange], leaf_sizes: u64) -> Result<(), HardwareError> {
        let mut gather = self.gather();
        for &range in ranges {
            self.add_own(&mut gather, Retired { range: Some(range), leaf_sizes, tables: None });
        }
        self.sync_own(gather).map(|_| ()).map_err(|failed| failed.error)
    }

    fn spans(&self, range: IovaRange, buf: &mut SpanBuf<'_>) -> Option<IovaRange> {
        self.all().spans(range, buf)
    }

    fn reclaim(&self, range: IovaRange, owned: IovaRange) {
        // A failed sync hands its tables back, and they leak: hardware may still walk them.
        let _ = Domain::reclaim(self, range, owned);
    }

    fn census(&self, range: IovaRange) -> LeafCensus {
        Domain::census(self, range)
    }

    fn let_go(&mut self) -> Result<(), HardwareError> {
        self.detach()
    }
}

/// The part of `range` below `at`.
pub(super) fn before(range: IovaRange, at: Iova) -> Option<IovaRange> {
    at.get().checked_sub(1).and_then(|last| IovaRange::new(range.start(), Iova::new(last)))
}

fn refused<L>(failed: MapFailed<L>) -> Refused {
    let reach = if failed.unsynced.is_some() { Reach::Possible } else { Reach::None };
    Refused { error: failed.error, reach }
}
