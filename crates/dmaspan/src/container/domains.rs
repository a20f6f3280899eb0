//! All domains of a container as one: they hold the same translations, and each operation changes
//! all of them.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use super::attach::CacheCoherency;
use super::dirty::{Cleared, DirtyRead};
use super::error::Error;
use super::paging::{Gathering, Paging, Reach, Refused, before};
use crate::addr::Iova;
use crate::io_pgtable::{DirtyBitmap, LeafCensus};
use crate::iommu::{Event, HardwareError, Relaxable, ReservedRegions};
use crate::lg2;
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::{Span, SpanBuf};

/// Names a domain of a container: [`Container::attach`](super::Container::attach) returns it. No
/// other domain of the container gets it later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DomainId(pub(super) u64);

/// A domain, and what is known of the devices behind it.
pub(super) struct Attached {
    pub(super) regions: ReservedRegions,
    pub(super) coherency: CacheCoherency,
    pub(super) paging: Box<dyn Paging>,
}

/// The domains, and what they allow together.
#[derive(Default)]
pub(super) struct Domains {
    pub(super) list: Vec<(DomainId, Arc<Attached>)>,
    /// Where mappings may lie, sorted, disjoint and with gaps between; empty without domains, and
    /// then anywhere.
    pub(super) apertures: Vec<IovaRange>,
    /// Page sizes that all domains have; 0 without domains.
    pub(super) page_sizes: u64,
    /// log2 of the bytes that the least table of any domain translates.
    table_lg2: u32,
    /// What the next domain is called.
    next: u64,
}

/// There is no memory for a list of domains or of apertures.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoRoom;

impl Domains {
    /// A domain without reserved regions, alone.
    pub(super) fn only(domain: Arc<Attached>) -> Self {
        let geometry = domain.paging.geometry();
        Self {
            apertures: alloc::vec![geometry.aperture],
            page_sizes: geometry.page_sizes,
            table_lg2: domain.paging.table_lg2(),
            list: alloc::vec![(DomainId(0), domain)],
            next: 1,
        }
    }

    /// These domains and one more.
    pub(super) fn with(&self, domain: &Arc<Attached>) -> Result<(Self, DomainId), NoRoom> {
        let id = DomainId(self.next);
        let mut list = Vec::new();
        list.try_reserve_exact(self.list.len() + 1).map_err(|_| NoRoom)?;
        list.extend(self.list.iter().cloned());
        list.push((id, Arc::clone(domain)));
        let (apertures, page_sizes) = (apertures(&list)?, page_sizes(&list));
        let table_lg2 = table_lg2(&list);
        Ok((Self { list, apertures, page_sizes, table_lg2, next: self.next + 1 }, id))
    }

    /// Takes a domain out. Where there is no memory for the apertures of the others they stay as
    /// small as they are.
    pub(super) fn remove(&mut self, id: DomainId) -> Option<Arc<Attached>> {
        let at = self.list.iter().position(|&(other, _)| other == id)?;
        let (_, removed) = self.list.remove(at);
        if let Ok(apertures) = apertures(&self.list) {
            self.apertures = apertures;
        }
        self.page_sizes = page_sizes(&self.list);
        self.table_lg2 = table_lg2(&self.list);
        Some(removed)
    }

    /// Makes the hardware of a domain let go of its tables. It holds these domains alone.
    pub(super) fn let_go(&mut self, id: DomainId) -> Result<(), HardwareError> {
        let found = self.list.iter_mut().find(|(other, _)| *other == id);
        match found.and_then(|(_, domain)| Arc::get_mut(domain)) {
            Some(domain) => domain.paging.let_go(),
            None => Err(HardwareError { what: "the domain is in use elsewhere", status: 0 }),
        }
    }

    /// Makes the hardware of all domains let go of their tables, as far as it does.
    pub(super) fn let_all_go(&mut self) {
        for (_, domain) in &mut self.list {
            let _ = Arc::get_mut(domain).map(|domain| domain.paging.let_go());
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn get(&self, id: DomainId) -> Option<&dyn Paging> {
        self.list.iter().find(|&&(other, _)| other == id).map(|(_, domain)| &*domain.paging)
    }

    #[inline(always)]
    pub(super) fn each(&self) -> impl Iterator<Item = &dyn Paging> {
        self.list.iter().map(|(_, domain)| &*domain.paging)
    }

    /// How many spans so many bytes may have that are mapped.
    #[inline(always)]
    pub(super) fn spans_at_most(&self, bytes: u64) -> usize {
        let page = 1 << (self.page_sizes.trailing_zeros() % u64::BITS);
        usize::try_from(bytes.div_ceil(page)).unwrap_or(usize::MAX)
    }

    /// Whether an aperture covers `range`.
    #[inline(always)]
    pub(super) fn permits(&self, range: IovaRange) -> bool {
        self.is_empty() || self.apertures.iter().any(|aperture| aperture.covers(range))
    }

    /// Why `range`, which is [not permitted](Self::permits), is not: names the aperture that it
    /// begins in, or else the first behind its start.
    pub(super) fn outside<E: core::error::Error>(&self, range: IovaRange) -> Error<E> {
        let near = self.apertures.iter().find(|aperture| aperture.last() >= range.start());
        let aperture = near.or(self.apertures.last()).copied();
        let aperture = aperture.unwrap_or(IovaRange::point(Iova::new(0)));
        let parts = || range.minus(&self.apertures);
        let mut outside = Vec::new();
        // Without memory to name the parts, the range and the aperture are all that is said.
        if outside.try_reserve_exact(parts().count()).is_ok() {
            outside.extend(parts());
        }
        Error::OutsideAperture { range, aperture, outside }
    }

    /// Tells observers of all domains what is asked for.
    #[inline(always)]
    pub(super) fn observe(&self, event: &Event<'_>) {
        self.each().for_each(|domain| domain.observe(event));
    }

    /// Maps spans in all domains, or in none.
    #[inline(always)]
    pub(super) fn map(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Refused> {
        for (n, domain) in self.each().enumerate() {
            let Err(mut refused) = domain.map(iova, spans, prot) else { continue };
            let bytes = spans.iter().fold(0u64, |bytes, span| bytes.saturating_add(span.len()));
            if let Ok(range) = IovaRange::from_len(iova, bytes)
                && n > 0
            {
                let mut cleared = Ok(());
                gathering(&self.list[..n], None, &mut |gathers| {
                    gathers.remove(range, None);
                    cleared = gathers.sync();
                });
                if cleared.is_err() {
                    refused.reach = Reach::Possible;
                }
            }
            return Err(refused);
        }
        Ok(())
    }

    /// Tells hardware that caches absent entries about a mapping. Where one of them fails, the
    /// mapping is taken back, and the others need not know.
    #[inline(always)]
    pub(super) fn announce(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.each().try_for_each(|domain| domain.announce(range))
    }

    /// Does something with empty gathers of all domains.
    #[inline(always)]
    pub(super) fn gathering(&self, work: &mut dyn FnMut(&mut Gathers<'_>)) {
        gathering(&self.list, None, work);
    }

    /// Whether `owned` may cover a table with an address in `range`, which is part of it, whole, in
    /// any domain: then it covers what one of the lowest level translates.
    #[inline(always)]
    pub(super) fn may_reclaim(&self, range: IovaRange, owned: IovaRange) -> bool {
        let mask = lg2::mask(self.table_lg2);
        let covers = |at: Iova| {
            owned.start().get() <= at.get() & !mask && at.get() | mask <= owned.last().get()
        };
        let far = range.len_less_one() > mask;
        far || covers(range.start()) || covers(range.last())
    }

    /// The number of the first failed sync that hardware has not confirmed since, in any domain.
    #[inline(always)]
    pub(super) fn oldest(&self) -> Option<u64> {
        self.each().filter_map(|domain| domain.oldest()).min()
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
            rest = first.paging.spans(range, &mut buf);
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
        let mut synced = Ok(());
        if cleared.ranges().is_empty() {
            return synced;
        }
        self.gathering(&mut |gathers| {
            gathers.each(|domain| {
                let ranges = cleared.ranges().iter();
                ranges.for_each(|range| domain.forget(*range, cleared.leaf_sizes()));
            });
            synced = gathers.sync();
        });
        synced
    }

    /// Makes hardware forget walks to tables that another thread has detached and not synced yet.
    #[cold]
    pub(super) fn forget_walks(&self, range: IovaRange) -> Result<(), HardwareError> {
        let mut synced = Ok(());
        self.gathering(&mut |gathers| {
            gathers.each(|domain| domain.forget_walks(range));
            synced = gathers.sync();
        });
        synced
    }

    /// Puts the spans of a range, which is mapped without holes, into `buf`, as many as fit, and
    /// returns the rest of the range.
    pub(super) fn spans(&self, range: IovaRange, buf: &mut SpanBuf<'_>) -> Option<IovaRange> {
        self.each().next().and_then(|domain| domain.spans(range, buf))
    }

    /// The leaves of the first domain.
    pub(super) fn census(&self, range: IovaRange) -> LeafCensus {
        self.each().next().map_or_else(LeafCensus::default, |domain| domain.census(range))
    }

    /// Whether the IOMMU makes the accesses of all devices coherent.
    pub(super) fn coherency(&self) -> CacheCoherency {
        let enforced = |domain: &Attached| domain.coherency == CacheCoherency::Enforced;
        if self.list.iter().all(|(_, domain)| enforced(domain)) {
            CacheCoherency::Enforced
        } else {
            CacheCoherency::NotEnforced
        }
    }
}

/// What is taken away from all domains and is not synced yet: first it is gathered everywhere, and
/// then it is synced everywhere.
pub(super) struct Gathers<'g> {
    /// The first domain's, which leads to the others.
    first: Option<&'g mut dyn Gathering>,
}

impl Gathers<'_> {
    #[inline(always)]
    fn each(&mut self, mut work: impl FnMut(&mut dyn Gathering)) {
        let mut next: Option<&mut dyn Gathering> = match &mut self.first {
            Some(first) => Some(&mut **first),
            None => None,
        };
        while let Some(gathering) = next {
            work(gathering);
            next = gathering.next();
        }
    }

    /// Unmaps a range that is mapped without holes in all domains, as far as `buf` has room for
    /// its spans. Returns how many bytes that is, from the front. What hardware wrote is marked
    /// where there are `marks`.
    ///
    /// Without a domain, as after a panic while the first was attached, all is taken and there are
    /// no spans: nobody says whether hardware has forgotten what was pinned for it.
    #[inline(always)]
    pub(super) fn unmap(
        &mut self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
        mut marks: Option<&mut DirtyBitmap<'_>>,
    ) -> u64 {
        let mut bytes = None;
        self.each(|domain| match bytes {
            None => bytes = Some(domain.unmap(range, buf, marks.as_deref_mut())),
            // Leaves of other domains end where spans end, whatever their sizes: none is cut.
            Some(bytes) => {
                if let Ok(part) = IovaRange::from_len(range.start(), bytes) {
                    domain.remove(part, marks.as_deref_mut());
                }
            }
        });
        bytes.unwrap_or(range.len_less_one().wrapping_add(1))
    }

    /// Takes whatever is mapped in a range away.
    pub(super) fn remove(&mut self, range: IovaRange, mut marks: Option<&mut DirtyBitmap<'_>>) {
        self.each(|domain| domain.remove(range, marks.as_deref_mut()));
    }

    /// Detaches the tables that unmapping `range` left empty, of those in `owned`. Returns where
    /// they were, at least.
    #[inline(always)]
    pub(super) fn reclaim(&mut self, range: IovaRange, owned: IovaRange) -> Option<IovaRange> {
        let mut hull = None;
        self.each(|domain| hull = cover(hull, domain.reclaim(range, owned)));
        hull
    }

    /// Makes hardware forget what was gathered: in all domains, also where one fails.
    #[inline(always)]
    pub(super) fn sync(&mut self) -> Result<(), HardwareError> {
        let mut synced = Ok(());
        self.each(|domain| {
            if let Err(error) = domain.sync() {
                synced = synced.and(Err(error));
            }
        });
        if self.first.is_some() { synced } else { Err(super::quarantine::GONE) }
    }
}

/// The range that covers both.
pub(super) fn cover(one: Option<IovaRange>, other: Option<IovaRange>) -> Option<IovaRange> {
    let (Some(one), Some(other)) = (one, other) else { return one.or(other) };
    IovaRange::new(one.start().min(other.start()), one.last().max(other.last()))
}

type List = [(DomainId, Arc<Attached>)];

/// Puts the gathers of a list before others. They are of different types, so each lies on the stack
/// of a call.
fn gathering(
    list: &List,
    next: Option<&mut dyn Gathering>,
    work: &mut dyn FnMut(&mut Gathers<'_>),
) {
    match list.split_last() {
        Some(((_, only), [])) => {
            only.paging.gathering(next, &mut |first| work(&mut Gathers { first: Some(first) }));
        }
        None => work(&mut Gathers { first: next }),
        Some(((_, last), before)) => {
            last.paging.gathering(next, &mut |first| gathering(before, Some(first), work));
        }
    }
}

/// log2 of the bytes that the least table of any domain translates; 0 without domains.
fn table_lg2(list: &List) -> u32 {
    list.iter().map(|(_, domain)| domain.paging.table_lg2()).min().unwrap_or(0)
}

/// Page sizes that all domains have; 0 without domains.
fn page_sizes(list: &[(DomainId, Arc<Attached>)]) -> u64 {
    let sizes = list.iter().map(|(_, domain)| domain.paging.geometry().page_sizes);
    sizes.reduce(|all, sizes| all & sizes).unwrap_or(0)
}

/// What all domains translate, without what is reserved for their devices. Regions that firmware
/// uses until a device is taken over count as free (`vfio_iommu_resv_exclude`).
fn apertures(list: &[(DomainId, Arc<Attached>)]) -> Result<Vec<IovaRange>, NoRoom> {
    let mut apertures = list.iter().map(|(_, domain)| domain.paging.geometry().aperture);
    let common = apertures.try_fold(IovaRange::ALL, |all, aperture| all.intersection(aperture));
    let mut ranges = Vec::new();
    let Some(common) = common.filter(|_| !list.is_empty()) else { return Ok(ranges) };
    ranges.try_reserve(1).map_err(|_| NoRoom)?;
    ranges.push(common);
    for (_, domain) in list {
        for region in domain.regions.kept_out(Relaxable::Drop) {
            exclude(&mut ranges, region)?;
        }
    }
    Ok(ranges)
}

/// Takes `taken` out of sorted and disjoint ranges.
fn exclude(ranges: &mut Vec<IovaRange>, taken: IovaRange) -> Result<(), NoRoom> {
    ranges.try_reserve(1).map_err(|_| NoRoom)?;
    let first = ranges.partition_point(|range| range.last() < taken.start());
    let end = ranges.partition_point(|range| range.start() <= taken.last());
    let hit = ranges.get(first..end).unwrap_or_default();
    let below = hit.first().and_then(|&lowest| before(lowest, taken.start()));
    let behind = taken.last().checked_add(1);
    let above = hit.last().and_then(|highest| IovaRange::new(behind?, highest.last()));
    ranges.splice(first..end, below.into_iter().chain(above));
    Ok(())
}
