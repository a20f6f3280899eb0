//! A rig is a domain on trial, its hardware, and an observer.

use dmaspan::io_pgtable::{Arena, DirtyBitmap, Gap, TableMemory};
use dmaspan::iommu::{
    self, Domain, Gather, HardwareError, Invalidation, IommuOps, MappedPages, Scope,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use parking_lot::Mutex;

use super::Subject;
use super::space::{Space, range};
use super::survey::{self, Seen};
use super::tree::{PROT, Tree, WordOf};
use crate::iotlb::{Iotlb, IotlbConfig};
use crate::modelled::take;
use crate::rng::Rng;
use crate::walker::Switch;

/// The IOMMU of a subject's tables, with caches that forget nothing by themselves.
pub(super) type Tlb<S> = Iotlb<<S as Subject>::Walker, Arena>;

/// An invalidation that was done: where, and for leaves of which sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Forgotten {
    /// `None` for everything.
    pub(super) ranges: Option<Vec<IovaRange>>,
    pub(super) leaf_sizes: u64,
}

impl Forgotten {
    /// Whether it was for a leaf.
    pub(super) fn has(&self, leaf: IovaRange) -> bool {
        let ranges = self.ranges.as_deref();
        let covers = ranges.is_none_or(|ranges| ranges.iter().any(|forgot| forgot.covers(leaf)));
        covers && self.leaf_sizes & (leaf.len_less_one() + 1) != 0
    }
}

/// What is called when hardware has forgotten, before the domain goes on.
type Watch<S> = Box<dyn FnMut(&Tlb<S>) + Send>;

/// The hooks of an IOTLB.
pub(super) struct Hooks<S: Subject> {
    pub(super) iotlb: Tlb<S>,
    watch: Mutex<Option<Watch<S>>>,
    forgotten: Mutex<Vec<Forgotten>>,
    /// Which invalidation from now on fails; 0 for none.
    failing: Mutex<u32>,
    /// Whether hardware takes new mappings.
    takes_maps: Mutex<Switch>,
}

impl<S: Subject> Hooks<S> {
    /// Calls `watch` in every invalidation from now on.
    pub(super) fn watch(&self, watch: impl FnMut(&Tlb<S>) + Send + 'static) {
        *self.watch.lock() = Some(Box::new(watch));
    }

    /// Makes the `n`-th invalidation from now on fail, or none for 0.
    pub(super) fn fail(&self, n: u32) {
        *self.failing.lock() = n;
    }

    /// Makes hardware take new mappings, or not.
    pub(super) fn take_maps(&self, takes: Switch) {
        *self.takes_maps.lock() = takes;
    }

    /// The invalidations since the last call.
    pub(super) fn forgotten(&self) -> Vec<Forgotten> {
        std::mem::take(&mut self.forgotten.lock())
    }
}

#[expect(unsafe_code, reason = "everything but the looking on is the IOTLB's")]
// SAFETY: `Ok` comes from the IOTLB only.
unsafe impl<S: Subject> IommuOps for Hooks<S> {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let mut failing = self.failing.lock();
        let fails = *failing == 1;
        *failing = failing.saturating_sub(1);
        drop(failing);
        if fails {
            return Err(HardwareError { what: "the simulated invalidation failed", status: 1 });
        }
        self.iotlb.invalidate(what)?;
        let ranges = match what.scope {
            Scope::All => None,
            Scope::Ranges(ranges) => Some(ranges.to_vec()),
        };
        self.forgotten.lock().push(Forgotten { ranges, leaf_sizes: what.leaf_sizes });
        if let Some(watch) = &mut *self.watch.lock() {
            watch(&self.iotlb);
        }
        Ok(())
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        if *self.takes_maps.lock() == Switch::Off {
            return Err(HardwareError { what: "the simulated hardware takes no maps", status: 1 });
        }
        self.iotlb.sync_map(range)
    }

    forward! { iotlb:
        fn detach(&self) -> Result<(), HardwareError>;
        fn max_ranges(&self) -> usize;
    }
}

/// A domain of which each range is one thread's; its devices only translate.
pub(super) struct Rig<S, M = Arena, O = Hooks<S>>
where
    S: Subject,
    M: TableMemory<WordOf<S>>,
    O: IommuOps<Address = PhysAddr>,
{
    pub(super) domain: Domain<S::Format, M, O>,
    pub(super) arena: Arena,
    pub(super) space: Space,
}

impl<S: Subject> Rig<S> {
    pub(super) fn new(format: S::Format) -> Self {
        Self::with_config(Tree::<S>::new(format), IotlbConfig::default())
    }
}

impl<S, M, O> Rig<S, M, O>
where
    S: Subject,
    M: TableMemory<WordOf<S>>,
    O: IommuOps<Address = PhysAddr>,
{
    /// A part of what is mapped there that begins and ends with leaves: split, where they can be.
    pub(super) fn part_of(&self, whole: IovaRange, rng: &mut Rng) -> IovaRange {
        let granule = self.space.granule();
        let granules = whole.len_less_one() / granule + 1;
        let from = rng.below(granules);
        let count = 1 + rng.below(granules - from);
        let part = range(whole.start().get() + from * granule, count * granule);
        let ends = [Some(part.start()), part.last().checked_add(1)];
        let is_split = ends.into_iter().flatten().all(|end| {
            let inside = whole.contains(end) && end != whole.start();
            !inside || self.split(end.get(), Gap::Accept).is_ok()
        });
        if is_split { part } else { whole }
    }

    /// Unmaps a range by a buffer that becomes full; the next sync of `gather`, which is of this
    /// domain, is to be for it too.
    #[expect(unsafe_code, reason = "one thread works on the domain")]
    pub(super) fn unmap_into(&self, range: IovaRange, gather: &mut Gather<M::List>) {
        let mut room = SpanBuf::room::<2>();
        let mut buf = SpanBuf::new(&mut room);
        // SAFETY: nobody else works on the domain; its devices reach no memory.
        let mut unsynced = unsafe { self.domain.unmap(range, &mut buf) }.unwrap();
        loop {
            let (more, rest) = unsynced.into_gather();
            // SAFETY: both are this domain's.
            unsafe { self.domain.merge(gather, more) };
            buf.clear();
            let Some(rest) = rest else { break };
            // SAFETY: as above.
            unsynced = unsafe { self.domain.resume(rest, &mut buf) };
        }
    }

    #[expect(unsafe_code, reason = "devices of the suite reach no memory")]
    pub(super) fn map(&self, iova: u64, spans: &[Span], prot: Prot) -> Result<(), iommu::Error> {
        // SAFETY: no other thread of a case has this range, and its devices only translate.
        let mapped = unsafe { self.domain.map_spans(Iova::new(iova), spans, prot) };
        mapped.map_err(|failed| {
            assert!(failed.unsynced.is_none());
            failed.error
        })
    }

    #[expect(unsafe_code, reason = "devices of the suite reach no memory")]
    pub(super) fn map_pages(
        &self,
        iova: u64,
        paddr: u64,
        page_size: u64,
        count: u64,
    ) -> MappedPages<M::List> {
        let (iova, paddr) = (Iova::new(iova), PhysAddr::new(paddr));
        // SAFETY: no other thread of a case has this range, and its devices only translate.
        unsafe { self.domain.map_pages(iova, paddr, page_size, count, PROT) }
    }

    #[expect(unsafe_code, reason = "one thread works on the domain")]
    pub(super) fn sync(&self, gather: Gather<M::List>) {
        // SAFETY: the only domain of a case gave it.
        let synced = unsafe { self.domain.sync(gather) };
        assert!(synced.is_ok(), "{synced:?}");
    }

    /// How many bytes of pages were taken away, and why no more, once that is synced.
    #[expect(unsafe_code, reason = "callers work on ranges of their own")]
    pub(super) fn unmap_pages(
        &self,
        iova: u64,
        page_size: u64,
        count: u64,
        split: Option<Gap>,
    ) -> (u64, Result<(), iommu::Error>) {
        // SAFETY: no other thread of a case has this range, or leaves that it cuts.
        let taken = unsafe { self.domain.unmap_pages(Iova::new(iova), page_size, count, split) };
        let (_synced, rest) = taken.unsynced.sync().unwrap();
        assert_eq!(rest, None);
        (taken.bytes, taken.result)
    }

    #[expect(unsafe_code, reason = "one thread works on the domain")]
    pub(super) fn split(&self, at: u64, gap: Gap) -> Result<(), iommu::Error> {
        // SAFETY: nobody else works on the domain.
        unsafe { self.domain.split(Iova::new(at), gap) }
    }

    #[expect(unsafe_code, reason = "callers work on ranges of their own")]
    pub(super) fn unmap(&self, range: IovaRange) -> Result<Vec<Span>, iommu::Error> {
        let mut room = SpanBuf::room::<16>();
        let mut buf = SpanBuf::new(&mut room);
        let mut spans = Vec::new();
        // SAFETY: no other thread of a case has this range.
        let mut unsynced = unsafe { self.domain.unmap(range, &mut buf) }?;
        loop {
            let (_, rest) = unsynced.sync().unwrap();
            take(&mut buf, &mut spans);
            let Some(rest) = rest else { return Ok(spans) };
            // SAFETY: as above.
            unsynced = unsafe { self.domain.resume(rest, &mut buf) };
        }
    }
}

impl<S: Subject, M: TableMemory<WordOf<S>>> Rig<S, M> {
    /// A domain over the tree, which is empty and has all the levels that it can have.
    pub(super) fn with_config(tree: Tree<S, M>, config: IotlbConfig) -> Self {
        let iotlb = Iotlb::with_config(tree.walker(), tree.arena.clone(), config);
        let hooks = Hooks {
            iotlb,
            watch: Mutex::new(None),
            forgotten: Mutex::default(),
            failing: Mutex::new(0),
            takes_maps: Mutex::new(Switch::On),
        };
        let domain = Domain::new(tree.table, hooks).unwrap();
        Self { domain, arena: tree.arena, space: tree.space }
    }

    pub(super) fn hooks(&self) -> &Hooks<S> {
        self.domain.ops()
    }

    pub(super) fn iotlb(&self) -> &Tlb<S> {
        &self.hooks().iotlb
    }

    #[expect(unsafe_code, reason = "one thread works on the domain")]
    pub(super) fn protect(&self, range: IovaRange, prot: Prot) -> Result<(), iommu::Error> {
        // SAFETY: nobody else works on the domain, and its devices only translate.
        unsafe { self.domain.protect(range, prot, Gap::Accept) }
    }

    #[expect(unsafe_code, reason = "one thread works on the domain")]
    pub(super) fn clear_dirty(
        &self,
        range: IovaRange,
        bitmap: &mut DirtyBitmap<'_>,
    ) -> Result<(), iommu::Error> {
        // SAFETY: nobody else works on the domain.
        unsafe { self.domain.read_and_clear_dirty(range, bitmap) }
    }

    /// All leaves in `range`, as hardware finds them that has nothing cached.
    #[track_caller]
    pub(super) fn leaves(&self, range: IovaRange) -> Vec<Seen> {
        survey::leaves(self.iotlb().walker(), self.iotlb().tables(), range)
    }

    /// Where hardware finds `iova`.
    pub(super) fn translate(&self, iova: u64) -> Option<PhysAddr> {
        let iotlb = self.iotlb();
        survey::translate(iotlb.walker(), iotlb.tables(), Iova::new(iova)).map(|found| found.paddr)
    }
}
