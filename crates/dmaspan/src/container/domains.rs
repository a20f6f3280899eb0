//! The domains of a container, which all hold the same translations.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use lock_api::RawMutex;

use super::Container;
use super::dirty::{Cleared, DirtyRead};
use super::paging::{Paging, Reach, Refused, Taken};
use crate::addr::Iova;
use crate::io_pgtable::{DirtyBitmap, Format, LeafCensus, TableMemory};
use crate::iommu::{Domain, HardwareError, IommuOps};
use crate::pin::Pinner;
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::{Span, SpanBuf};

/// Which domain of a container: what [`Container::attach`](super::Container::attach) returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DomainId(pub(super) u64);

/// The domains, and what they allow together.
#[derive(Default)]
pub(super) struct Domains {
    pub(super) list: Vec<(DomainId, Arc<dyn Paging>)>,
    /// Where mappings may lie, sorted, disjoint and with gaps between; empty without domains, and
    /// then anywhere.
    pub(super) apertures: Vec<IovaRange>,
    /// Page sizes that all domains have; 0 without domains.
    pub(super) page_sizes: u64,
}

impl Domains {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    fn each(&self) -> impl Iterator<Item = &dyn Paging> {
        self.list.iter().map(|(_, paging)| &**paging)
    }

    /// The aperture that covers `range`, if one does.
    pub(super) fn permits(&self, range: IovaRange) -> bool {
        self.is_empty() || self.apertures.iter().any(|aperture| aperture.covers(range))
    }

    /// Maps spans in all domains, or in none.
    pub(super) fn map(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Refused> {
        for (n, domain) in self.each().enumerate() {
            let Err(mut refused) = domain.map(iova, spans, prot) else { continue };
            let bytes = spans.iter().fold(0u64, |bytes, span| bytes.saturating_add(span.len()));
            if let Ok(range) = IovaRange::from_len(iova, bytes) {
                for mapped in self.each().take(n) {
                    if mapped.remove(&mut core::iter::once(range)).is_err() {
                        refused.reach = Reach::Possible;
                    }
                }
            }
            return Err(refused);
        }
        Ok(())
    }

    /// Tells hardware that caches absent entries about a mapping.
    pub(super) fn announce(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.each().try_for_each(|domain| domain.announce(range))
    }

    /// Unmaps ranges in all domains, as far as `buf` has room for their spans, and syncs each
    /// domain once. What hardware wrote is marked where there are `marks`.
    pub(super) fn unmap(
        &self,
        ranges: &[IovaRange],
        buf: &mut SpanBuf<'_>,
        marks: Option<&mut DirtyBitmap<'_>>,
    ) -> Taken {
        let Some(((_, first), rest)) = self.list.split_first() else {
            return Taken { bytes: 0, synced: Ok(()) };
        };
        // Leaves of other domains end where spans end, whatever their sizes: none is cut.
        first.unmap(ranges, buf, marks, &mut |parts, mut marks| match rest {
            [] => Ok(()),
            [(_, only)] => remove(&**only, parts, marks),
            many => {
                let mut kept = [IovaRange::point(Iova::new(0)); super::RANGES];
                let len = kept.iter_mut().zip(parts).map(|(place, part)| *place = part).count();
                many.iter().fold(Ok(()), |result, (_, domain)| {
                    let parts = &mut kept[..len].iter().copied();
                    result.and(remove(&**domain, parts, marks.as_deref_mut()))
                })
            }
        })
    }

    /// `bytes` of `range`, which is mapped without holes, extended so that no span of it is cut.
    pub(super) fn whole_spans(
        &self,
        range: IovaRange,
        bytes: Range<u64>,
        room: &mut [Span],
    ) -> Range<u64> {
        let mut whole = bytes.clone();
        let (mut at, mut rest) = (0u64, Some(range));
        while let Some(((_, first), range)) = self.list.first().zip(rest) {
            let mut buf = SpanBuf::new(room);
            rest = first.spans(range, &mut buf);
            for span in buf.spans() {
                let end = at.saturating_add(span.len());
                if (at..end).contains(&bytes.start) {
                    whole.start = at;
                }
                if (at..end).contains(&(bytes.end - 1)) {
                    whole.end = end;
                }
                at = end;
            }
            if at >= bytes.end {
                break;
            }
        }
        whole
    }

    /// Whether hardware marks what devices write, in all domains.
    pub(super) fn track_dirty(&self) -> bool {
        self.each().all(|domain| domain.tracks_dirty())
    }

    /// Calls `found` with the leaves that have an address in `range` and that devices wrote, in any
    /// domain: see [`Paging::read_dirty`].
    pub(super) fn read_dirty(
        &self,
        range: IovaRange,
        how: DirtyRead,
        cleared: &mut Cleared,
        found: &mut dyn FnMut(IovaRange),
    ) {
        for domain in self.each() {
            if let Some((range, leaf_sizes)) = domain.read_dirty(range, how, found) {
                cleared.add(range, leaf_sizes);
            }
        }
    }

    /// Makes hardware forget the leaves whose marks were taken away, by one sync a domain.
    pub(super) fn forget_marks(&self, cleared: &Cleared) -> Result<(), HardwareError> {
        if cleared.ranges().is_empty() {
            return Ok(());
        }
        // All are told, also where one of them fails.
        self.each().fold(Ok(()), |result, domain| {
            result.and(domain.forget_marks(cleared.ranges(), cleared.leaf_sizes()))
        })
    }

    /// Frees the tables that unmapping `range` left empty, of those in `owned`.
    pub(super) fn reclaim(&self, range: IovaRange, owned: IovaRange) {
        self.each().for_each(|domain| domain.reclaim(range, owned));
    }

    /// The leaves of the first domain.
    pub(super) fn census(&self, range: IovaRange) -> LeafCensus {
        self.each().next().map_or_else(LeafCensus::default, |domain| domain.census(range))
    }
}

fn remove(
    domain: &dyn Paging,
    ranges: &mut dyn Iterator<Item = IovaRange>,
    marks: Option<&mut DirtyBitmap<'_>>,
) -> Result<(), HardwareError> {
    match marks {
        Some(marks) => domain.remove_dirty(ranges, marks),
        None => domain.remove(ranges),
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Adds a domain to a container in which nothing is mapped.
    pub(super) fn add_domain<F, M, O>(&self, domain: Domain<F, M, O>)
    where
        F: Format,
        M: TableMemory<F::Word> + 'static,
        O: IommuOps + 'static,
    {
        let mut all = self.state.lock();
        let geometry = domain.geometry();
        let (aperture, page_sizes) = (geometry.aperture, geometry.page_sizes);
        all.domains = Arc::new(Domains {
            list: alloc::vec![(DomainId(0), Arc::new(domain) as Arc<dyn Paging>)],
            apertures: alloc::vec![aperture],
            page_sizes,
        });
    }
}
