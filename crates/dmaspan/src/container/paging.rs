//! [`Paging`] is a domain of any format, as the container calls it.
//!
//! The container owns every range that it works on, since a mapping in its tree keeps others out.
//! So these methods are safe to call from the container, and from nowhere else.
//!
//! An unmap first gathers what it takes away from a domain, in any number of steps, and then syncs.
//! So all domains of a container are changed before any of them waits for hardware.

use super::dirty::DirtyRead;
use super::unconfirmed::{Tried, Unconfirmed};
use crate::addr::Iova;
use crate::io_pgtable::{DirtyBitmap, Format, Geometry, LeafCensus, Rest, Retired, TableMemory};
use crate::iommu::{self, Domain, Event, Gather, HardwareError, IommuOps, MapFailed, SyncFailed};
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::{Span, SpanBuf};

/// Whether hardware may still use a range that was unmapped, or that was to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// It has forgotten all of it.
    None,
    /// It may use it: nothing of it may be released before that is [confirmed](Paging::oldest).
    Possible,
}

/// A mapping that the domain refused.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) error: iommu::Error,
    pub(super) reach: Reach,
}

/// What a [`Domain`] does for a container, whatever its format.
pub(super) trait Paging: Send + Sync {
    fn geometry(&self) -> &Geometry;

    /// Tells observers what is asked for.
    fn observe(&self, event: &Event<'_>);

    /// Maps pinned spans. All or nothing.
    fn map(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Refused>;

    /// Tells hardware that caches absent entries about a mapping.
    fn announce(&self, range: IovaRange) -> Result<(), HardwareError>;

    /// log2 of the bytes that a table of the lowest level translates.
    fn table_lg2(&self) -> u32;

    /// Does something with an empty gather, which leads to `next`.
    fn gathering(&self, next: Option<&mut dyn Gathering>, work: &mut dyn FnMut(&mut dyn Gathering));

    /// The number of the first failed sync whose gather hardware has not confirmed, if any.
    fn oldest(&self) -> Option<u64>;

    /// Syncs again what was not confirmed, unless another thread is at that.
    fn retry(&self) -> Result<(), HardwareError>;

    /// Returns whether hardware marks the leaves through which it writes.
    fn tracks_dirty(&self) -> bool;

    /// Calls `found` with every leaf that devices wrote and that has an address in `range`, whole.
    /// With [`DirtyRead::Clear`] the marks of those that begin in it are taken away, and the result
    /// is what hardware is to [forget](Gathering::forget): a range, and leaf sizes.
    fn read_dirty(
        &self,
        range: IovaRange,
        how: DirtyRead,
        found: &mut dyn FnMut(IovaRange),
    ) -> Option<(IovaRange, u64)>;

    /// Puts the spans of a range, which is mapped without holes, into `buf`, as many as fit, and
    /// returns the rest of the range.
    fn spans(&self, range: IovaRange, buf: &mut SpanBuf<'_>) -> Option<IovaRange>;

    fn census(&self, range: IovaRange) -> LeafCensus;

    /// Takes the tables away from hardware for good: then it has forgotten all of them, and what is
    /// unmapped needs no sync any more. Otherwise they leak.
    fn let_go(&mut self) -> Result<(), HardwareError>;
}

/// What is taken away from one domain and is not synced yet.
pub(super) trait Gathering {
    /// That of the next domain.
    fn next(&mut self) -> Option<&mut dyn Gathering>;

    /// Unmaps a range that is mapped without holes, as far as `buf` has room for its spans.
    /// Returns how many bytes that is, from the front. Where there are `marks` hardware's go
    /// there, up to the moment in which a translation was gone.
    fn unmap(
        &mut self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        marks: Option<&mut DirtyBitmap<'_>>,
    ) -> u64;

    /// Takes whatever is mapped in the range away. No leaf reaches out of it.
    fn remove(&mut self, range: IovaRange, marks: Option<&mut DirtyBitmap<'_>>);

    /// Detaches the tables that unmapping `range` left empty, of those in `owned`. Returns where
    /// they were.
    fn reclaim(&mut self, range: IovaRange, owned: IovaRange) -> Option<IovaRange>;

    /// Adds leaves of these sizes, whose marks were taken away.
    fn forget(&mut self, range: IovaRange, leaf_sizes: u64);

    /// Adds walks that lead to tables which others have detached.
    fn forget_walks(&mut self, range: IovaRange);

    /// Makes hardware forget all that was gathered, and frees tables. Where hardware does not
    /// confirm it, that is tried again later: see [`Paging::retry`].
    fn sync(&mut self) -> Result<(), HardwareError>;
}

/// A domain, and what its hardware has not confirmed to have forgotten.
pub(super) struct Own<F: Format, M: TableMemory<F::Word>, O: IommuOps> {
    domain: Domain<F, M, O>,
    unconfirmed: Unconfirmed<M::List>,
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Own<F, M, O> {
    pub(super) fn new(domain: Domain<F, M, O>) -> Self {
        Self { domain, unconfirmed: Unconfirmed::default() }
    }

    fn keep(&self, gather: Gather<M::List>) {
        self.unconfirmed.keep(gather, |all, more| self.domain.merge_own(all, more));
    }
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Paging for Own<F, M, O> {
    fn geometry(&self) -> &Geometry {
        self.domain.geometry()
    }

    fn observe(&self, event: &Event<'_>) {
        self.domain.ops().observe(event);
    }

    fn map(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Refused> {
        let Err(MapFailed { error, unsynced }) = self.domain.map_pinned(iova, spans, prot) else {
            return Ok(());
        };
        let reach = if unsynced.is_some() { Reach::Possible } else { Reach::None };
        unsynced.into_iter().for_each(|gather| self.keep(gather));
        Err(Refused { error, reach })
    }

    fn announce(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.domain.tell_mapped(range)
    }

    fn table_lg2(&self) -> u32 {
        F::shift(1)
    }

    fn gathering(
        &self,
        next: Option<&mut dyn Gathering>,
        work: &mut dyn FnMut(&mut dyn Gathering),
    ) {
        work(&mut Gathered { own: self, gather: None, next });
    }

    fn oldest(&self) -> Option<u64> {
        self.unconfirmed.oldest()
    }

    fn retry(&self) -> Result<(), HardwareError> {
        let Some((tried, gather)) = Tried::begin(&self.unconfirmed) else { return Ok(()) };
        match self.domain.sync_own(gather) {
            Ok(()) => {
                tried.confirmed();
                Ok(())
            }
            Err(SyncFailed { gather, error }) => {
                tried.failed(gather, |all, more| self.domain.merge_own(all, more));
                Err(error)
            }
        }
    }

    fn tracks_dirty(&self) -> bool {
        self.domain.format().tracks_dirty()
    }

    fn read_dirty(
        &self,
        range: IovaRange,
        how: DirtyRead,
        found: &mut dyn FnMut(IovaRange),
    ) -> Option<(IovaRange, u64)> {
        let clears = |leaf: IovaRange| how == DirtyRead::Clear && range.contains(leaf.start());
        let retired = self.domain.visit_dirty(range, clears, found);
        retired.range.map(|range| (range, retired.leaf_sizes))
    }

    fn spans(&self, range: IovaRange, buf: &mut SpanBuf<'_>) -> Option<IovaRange> {
        self.domain.all().spans(range, buf)
    }

    fn census(&self, range: IovaRange) -> LeafCensus {
        self.domain.census(range)
    }

    fn let_go(&mut self) -> Result<(), HardwareError> {
        self.domain.detach()?;
        // Nothing is left to be invalidated: what was not confirmed is now.
        self.retry()
    }
}

/// What is taken away from a domain.
struct Gathered<'d, 'n, F: Format, M: TableMemory<F::Word>, O: IommuOps> {
    own: &'d Own<F, M, O>,
    /// `None` where nothing was taken away since the last sync.
    gather: Option<Gather<M::List>>,
    next: Option<&'n mut dyn Gathering>,
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Gathered<'_, '_, F, M, O> {
    fn gather(&mut self) -> &mut Gather<M::List> {
        self.gather.get_or_insert_with(|| self.own.domain.gather())
    }

    #[inline(always)]
    fn add(&mut self, retired: Retired<M::List>) {
        let own = self.own;
        own.domain.add_own(self.gather(), retired);
    }
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Gathering for Gathered<'_, '_, F, M, O> {
    fn next(&mut self) -> Option<&mut dyn Gathering> {
        match &mut self.next {
            Some(next) => Some(&mut **next),
            None => None,
        }
    }

    fn unmap(
        &mut self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        marks: Option<&mut DirtyBitmap<'_>>,
    ) -> u64 {
        let domain = &self.own.domain;
        let rest = Rest::known(range, domain.id());
        let unmapped = match marks {
            Some(marks) => domain.unmap_next_dirty(rest, buf, marks),
            None => domain.unmap_next(rest, buf),
        };
        self.add(unmapped.retired);
        match unmapped.rest {
            Some(rest) => rest.range().start().get() - range.start().get(),
            None => range.len_less_one().wrapping_add(1),
        }
    }

    fn remove(&mut self, range: IovaRange, marks: Option<&mut DirtyBitmap<'_>>) {
        let retired = match marks {
            Some(marks) => self.own.domain.take_away_dirty(range, marks),
            None => self.own.domain.take_away(range),
        };
        self.add(retired);
    }

    fn reclaim(&mut self, range: IovaRange, owned: IovaRange) -> Option<IovaRange> {
        let retired = self.own.domain.reclaim(range, owned)?;
        let detached = retired.range.filter(|_| retired.has_tables());
        self.add(retired);
        detached
    }

    fn forget(&mut self, range: IovaRange, leaf_sizes: u64) {
        self.add(Retired { range: Some(range), leaf_sizes, tables: None });
    }

    fn forget_walks(&mut self, range: IovaRange) {
        self.gather().add_walks(range);
    }

    fn sync(&mut self) -> Result<(), HardwareError> {
        let Some(gather) = &mut self.gather else { return Ok(()) };
        let synced = self.own.domain.sync_in_place(gather);
        if synced.is_ok() {
            self.gather = None;
        } else if let Some(gather) = self.gather.take() {
            self.own.keep(gather);
        }
        synced
    }
}

/// The part of `range` below `at`.
pub(super) fn before(range: IovaRange, at: Iova) -> Option<IovaRange> {
    at.get().checked_sub(1).and_then(|last| IovaRange::new(range.start(), Iova::new(last)))
}
