//! A domain of any format, as the container uses it.
//!
//! The container owns every range that it works on: a mapping in its tree keeps others out. So
//! these methods are safe to call from it, and from nowhere else.

use crate::addr::Iova;
use crate::io_pgtable::{Format, Geometry, LeafCensus, Rest, TableMemory};
use crate::iommu::{self, Domain, HardwareError, IommuOps, MapFailed, Synced};
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

/// What a [`Domain`] does for a container, whatever its format.
pub(super) trait Paging: Send + Sync {
    fn geometry(&self) -> &Geometry;

    /// Maps pinned spans. All or nothing.
    fn map(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Refused>;

    /// Tells hardware that caches absent entries about a mapping.
    fn announce(&self, range: IovaRange) -> Result<(), HardwareError>;

    /// Unmaps a range that is mapped without holes, a batch of spans after the other: each is
    /// passed to `release` when the sync of its IOVAs is done. Nothing is released behind a sync
    /// that failed, and nothing more unmapped.
    fn unmap(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        release: &mut dyn FnMut(&[Span], Synced),
    ) -> Result<(), HardwareError>;

    /// Frees the tables that unmapping `range` left empty, of those in `owned`. Failure leaks them.
    fn reclaim(&self, range: IovaRange, owned: IovaRange);

    fn census(&self, range: IovaRange) -> LeafCensus;
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Paging for Domain<F, M, O> {
    fn geometry(&self) -> &Geometry {
        Domain::geometry(self)
    }

    fn map(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Refused> {
        self.map_pinned(iova, spans, prot).map(|_| ()).map_err(refused)
    }

    fn announce(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.ops().sync_map(range)
    }

    fn unmap(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        release: &mut dyn FnMut(&[Span], Synced),
    ) -> Result<(), HardwareError> {
        let mut rest = Some(Rest::known(range, self.id()));
        while let Some(next) = rest {
            buf.clear();
            let unmapped = self.unmap_next(next, buf);
            let mut gather = self.gather();
            self.add_own(&mut gather, unmapped.retired);
            let synced = self.sync_own(gather).map_err(|failed| failed.error)?;
            release(buf.spans(), synced);
            rest = unmapped.rest;
        }
        Ok(())
    }

    fn reclaim(&self, range: IovaRange, owned: IovaRange) {
        // A failed sync hands its tables back, and they leak: hardware may still walk them.
        let _ = Domain::reclaim(self, range, owned);
    }

    fn census(&self, range: IovaRange) -> LeafCensus {
        Domain::census(self, range)
    }
}

fn refused<L>(failed: MapFailed<L>) -> Refused {
    let reach = if failed.unsynced.is_some() { Reach::Possible } else { Reach::None };
    Refused { error: failed.error, reach }
}
