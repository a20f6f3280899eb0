//! A [`Domain`] is a page table with the hooks of the hardware that walks it. It keeps the order in
//! which things are released.

use core::fmt;
use core::mem::ManuallyDrop;

use super::event::Event;
use super::gather::{Gather, SyncFailed, Synced};
use super::ops::{HardwareError, Invalidation, IommuOps, Scope, Tables};
use super::soft::SoftIommu;
use crate::addr::{Iova, PhysAddr};
use crate::error::Errno;
use crate::io_pgtable::{
    self, Arena, Dump, Format, Geometry, LeafCensus, Leaked, Owned, PageTable, Rest, Retired,
    TableMemory, UnmappedSpans, Walk,
};
use crate::log;
use crate::platform::Id;
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::{Span, SpanBuf};

/// The reason why a domain refused an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The page table did.
    #[error(transparent)]
    Table(#[from] io_pgtable::Error),
    /// Hardware could not be told about a new mapping.
    #[error("the IOMMU did not take what changed in {range}: {source}")]
    Hardware {
        /// What it was to be told about.
        range: IovaRange,
        /// What it said.
        source: HardwareError,
    },
    /// A mapping was refused, and hardware did not confirm to have forgotten what of it was there
    /// for a moment. What [`MapFailed`] with an [`unsynced`](MapFailed::unsynced) becomes.
    #[error(
        "a mapping was refused and not taken back: devices may use the memory that {range} led to; \
         keep it until a sync of all that succeeds"
    )]
    NotTakenBack {
        /// Where devices may still find memory.
        range: IovaRange,
    },
}

impl Error {
    /// Returns what a front end that looks like Linux answers; `EIO` for hardware.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Table(error) => error.errno(),
            Self::Hardware { .. } | Self::NotTakenBack { .. } => Errno::EIO,
        }
    }
}

/// What `?` makes of it. A gather in it is dropped: its tables leak, and none is freed that
/// hardware may walk. That there was one is not lost: see [`Error::NotTakenBack`].
impl<L> From<MapFailed<L>> for Error {
    fn from(MapFailed { error, unsynced }: MapFailed<L>) -> Self {
        match unsynced {
            Some(gather) => Self::NotTakenBack { range: gather.covering() },
            None => error,
        }
    }
}

/// What `?` makes of it. The gather is dropped: its tables leak, and without the [`Synced`] nothing
/// else may be released.
impl<L> From<SyncFailed<L>> for Error {
    fn from(SyncFailed { gather, error: source }: SyncFailed<L>) -> Self {
        Self::Hardware { range: gather.covering(), source }
    }
}

/// A mapping that a domain refused. Translations are as before, and tables too unless it was
/// hardware that refused it: then empty tables at the ends of the range may stay.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct MapFailed<L> {
    /// The reason.
    pub error: Error,
    /// What hardware may use still: set only where taking the mapping back could not be synced.
    /// Then the memory stays pinned until a sync of it succeeds.
    pub unsynced: Option<Gather<L>>,
}

impl<L> MapFailed<L> {
    /// Returns what a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        self.error.errno()
    }
}

/// A page table that devices use.
///
/// Nothing that a device could still reach is released before a sync: tables leave through
/// [`sync`](Self::sync), and owners of memory and IOVAs wait for the [`Synced`] that it gives.
/// Dropped, the domain makes hardware forget all of it and frees its tables; where hardware does
/// not answer, the tables leak.
///
/// `F` is the format of its tables, `M` their memory, and `O` what tells hardware of changes. A
/// `Domain<F>` alone is that of device models in a process.
pub struct Domain<F: Format, M: TableMemory<F::Word> = Arena, O: IommuOps = SoftIommu<F, M>> {
    table: PageTable<F, M>,
    ops: O,
    hardware: Hardware,
}

/// What hardware does with the tables.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hardware {
    /// It may walk them.
    Walks,
    /// It was told to let go, and did not say that it has.
    Unknown,
    /// It has let go: nothing is left to be invalidated.
    LetGo,
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Domain<F, M, O> {
    /// A domain over an empty table, whose hardware is told through `ops`.
    ///
    /// # Errors
    ///
    /// [`Occupied`](io_pgtable::Error::Occupied) where something is mapped in it: what devices
    /// reach enters through the domain, with its contracts. [`Error::Hardware`] where `ops` are not
    /// for this table: see [`IommuOps::begin`].
    pub fn new(table: PageTable<F, M>, ops: O) -> Result<Self, Error> {
        let range = table.geometry().aperture;
        if let Some(leaf) = table.first_leaf(range) {
            return Err(io_pgtable::Error::Occupied { leaf }.into());
        }
        table.walks_from(table.root_word());
        // Where the hook panics, hardware may walk it by then.
        let table = ManuallyDrop::new(table);
        let begun = ops.begin(Promise::kept(), &table.table_root());
        let table = ManuallyDrop::into_inner(table);
        begun.map_err(|source| Error::Hardware { range, source })?;
        Ok(Self { table, ops, hardware: Hardware::Walks })
    }

    /// The format, which knows the values of hardware's registers.
    pub fn format(&self) -> &F {
        self.table.format()
    }

    /// The physical address of the root table. Where the format's tree grows it changes, and
    /// hardware is told through [`IommuOps::root_changed`].
    pub fn root(&self) -> PhysAddr {
        self.table.root()
    }

    /// The root table's physical address and its level; level 0 has the smallest leaves.
    pub fn root_and_level(&self) -> (PhysAddr, u32) {
        self.table.root_and_level()
    }

    /// The aperture, the page sizes and the rest of the table's shape.
    pub fn geometry(&self) -> &Geometry {
        self.table.geometry()
    }

    /// The last byte of memory that the tables can lead to.
    #[inline(always)]
    pub(crate) fn last_paddr(&self) -> PhysAddr {
        self.table.last_paddr()
    }

    /// Returns where the tables live.
    pub fn memory(&self) -> &M {
        self.table.memory()
    }

    /// Returns what is mapped in `range`, as maximal runs with their permissions, also while others
    /// map and unmap there: see [`PageTable::walk`].
    pub fn walk(&self, range: IovaRange) -> Walk<'_, F, M> {
        self.table.walk(range)
    }

    /// A picture of the tables, also while others map and unmap in them: see [`PageTable::dump`].
    pub fn dump(&self) -> Dump<'_, F, M> {
        self.table.dump()
    }

    /// Returns where `iova` leads, and `None` where nothing is mapped, also while others map and
    /// unmap there.
    pub fn iova_to_phys(&self, iova: Iova) -> Option<PhysAddr> {
        self.table.iova_to_phys(iova)
    }

    /// Returns how many leaves of each size translate `range`, also while others map and unmap
    /// there. A leaf counts where it begins.
    pub fn census(&self, range: IovaRange) -> LeafCensus {
        self.table.census(range)
    }

    /// The invalidation hooks.
    pub fn ops(&self) -> &O {
        &self.ops
    }

    /// Maps `spans`, one behind the other from `iova` on, by the fewest leaves, in one walk, and
    /// tells hardware that caches absent entries. All or nothing.
    ///
    /// # Errors
    ///
    /// [`MapFailed`]; what was published in between has been taken back and synced, unless its
    /// `unsynced` says otherwise.
    ///
    /// # Safety
    ///
    /// 1. The caller owns the IOVAs: until the call returns nobody else maps, unmaps or rewrites
    ///    anything there.
    /// 2. Until the range has been unmapped *and* synced, a device may read the spans and, with
    ///    [`Prot::WRITE`], write them at any time: they stay allocated, and no Rust reference to
    ///    them exists that this would break.
    #[expect(unsafe_code, reason = "lets a device at raw physical addresses")]
    #[track_caller]
    pub unsafe fn map_spans(
        &self,
        iova: Iova,
        spans: &[Span],
        prot: Prot,
    ) -> Result<(), MapFailed<M::List>> {
        self.map_pinned(iova, spans, prot)?;
        self.sync_map(range_of(iova, spans))
    }

    /// Takes the translations of `range` away and adds the spans that they led to to `buf`: see
    /// [`Owned::unmap`](io_pgtable::Owned::unmap). The result syncs when it is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Table`] for a hole or a leaf that would be split anywhere in the range, with
    /// nothing changed.
    ///
    /// # Safety
    ///
    /// The caller owns the IOVAs: until the call returns nobody else maps, unmaps or rewrites
    /// anything there.
    #[expect(unsafe_code, reason = "the caller promises to own the range")]
    #[track_caller]
    pub unsafe fn unmap(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
    ) -> Result<Unsynced<'_, F, M, O>, Error> {
        Ok(self.guard(self.all().unmap(range, buf)?))
    }

    /// Goes on with an unmap whose buffer became full; cannot be refused.
    ///
    /// # Safety
    ///
    /// As for [`unmap`](Self::unmap), for the rest of its range.
    #[expect(unsafe_code, reason = "the caller promises to own the range")]
    #[track_caller]
    pub unsafe fn resume(&self, rest: Rest, buf: &mut SpanBuf<'_>) -> Unsynced<'_, F, M, O> {
        self.guard(self.all().resume(rest, buf))
    }

    /// Takes all translations of `range` away, whatever holes are between them, and tells no spans:
    /// for who knows what memory was there. The result syncs when it is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Table`] for a range that is not of whole granules or not within the aperture, with
    /// nothing changed.
    ///
    /// # Safety
    ///
    /// The caller owns the IOVAs, and no leaf reaches out of the range: until the call returns
    /// nobody else maps, unmaps or rewrites anything there.
    #[expect(unsafe_code, reason = "the caller promises to own the range")]
    #[inline]
    #[track_caller]
    pub unsafe fn remove(&self, range: IovaRange) -> Result<Unsynced<'_, F, M, O>, Error> {
        let all = self.all();
        all.check_whole(range)?;
        Ok(self.guard(UnmappedSpans { retired: all.remove(range), rest: None }))
    }

    /// An empty gather for this domain's hardware.
    pub fn gather(&self) -> Gather<M::List> {
        Gather::new(self.ops.max_ranges())
    }

    /// Adds what an operation retired to a gather.
    ///
    /// # Safety
    ///
    /// Both are of this domain: tables of another one would be freed into this one's memory.
    #[expect(unsafe_code, reason = "nothing shows which domain a gather belongs to")]
    pub unsafe fn add(&self, gather: &mut Gather<M::List>, retired: Retired<M::List>) {
        self.add_own(gather, retired);
    }

    /// Adds one gather to another.
    ///
    /// # Safety
    ///
    /// Both are of this domain.
    #[expect(unsafe_code, reason = "nothing shows which domain a gather belongs to")]
    pub unsafe fn merge(&self, gather: &mut Gather<M::List>, more: Gather<M::List>) {
        self.merge_own(gather, more);
    }

    /// Makes hardware forget what was gathered, frees the tables in it, and proves both.
    ///
    /// # Context
    ///
    /// May run with interrupts off. Does not allocate.
    ///
    /// # Errors
    ///
    /// [`SyncFailed`] with the gather; nothing of it was released.
    ///
    /// # Safety
    ///
    /// What was gathered was retired from this domain: hardware of another one would not forget it.
    #[expect(unsafe_code, reason = "nothing shows which domain a gather belongs to")]
    #[track_caller]
    pub unsafe fn sync(&self, gather: Gather<M::List>) -> Result<Synced, SyncFailed<M::List>> {
        let synced = gather.synced();
        self.sync_own(gather).map(|()| synced)
    }

    /// [`add`](Self::add), for what is known to be of this domain.
    #[inline(always)]
    pub(crate) fn add_own(&self, gather: &mut Gather<M::List>, retired: Retired<M::List>) {
        gather.add_with(retired, |list, more| {
            self.table.append(list, more);
        });
    }

    /// [`merge`](Self::merge), for gathers that are known to be of this domain.
    pub(crate) fn merge_own(&self, gather: &mut Gather<M::List>, more: Gather<M::List>) {
        gather.merge_with(more, |list, more| self.table.append(list, more));
    }

    /// [`sync`](Self::sync), for what is known to be of this domain.
    #[track_caller]
    pub(crate) fn sync_own(&self, mut gather: Gather<M::List>) -> Result<(), SyncFailed<M::List>> {
        let synced = self.sync_in_place(&mut gather);
        synced.map_err(|error| SyncFailed { gather, error })
    }

    /// [`sync_own`](Self::sync_own) of a gather that stays where it is, as it was if that fails.
    #[inline]
    #[track_caller]
    pub(crate) fn sync_in_place(&self, gather: &mut Gather<M::List>) -> Result<(), HardwareError> {
        if !gather.is_empty() {
            self.invalidate(&gather.invalidation())?;
            if let Some(tables) = gather.tables.take() {
                self.table.free_tables(tables);
            }
        }
        Ok(())
    }

    /// Makes hardware forget, unless it has let go of the tables: then it has forgotten, and may no
    /// longer answer.
    #[inline(always)]
    #[track_caller]
    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        match self.hardware {
            Hardware::LetGo => Ok(()),
            Hardware::Walks | Hardware::Unknown => {
                let result = self.ops.invalidate(what);
                // By reference: a result that goes through a closure is copied.
                if let Err(error) = &result {
                    log::warn!(
                        "hardware did not confirm that it forgot {}: {error}; what was unmapped \
                         there stays out of use",
                        what.scope
                    );
                }
                result
            }
        }
    }

    /// [`sync_own`](Self::sync_own) of what one operation retired, without a gather.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn sync_retired(
        &self,
        retired: Retired<M::List>,
    ) -> Result<(), SyncFailed<M::List>> {
        if let Retired { range: Some(range), leaf_sizes, tables: None } = retired
            && self.ops.max_ranges() > 0
        {
            let ranges = [range];
            let scope = Scope::Ranges(&ranges);
            let what = Invalidation { scope, leaf_sizes, tables: Tables::Kept };
            return self.invalidate(&what).map_err(|error| {
                let mut gather = self.gather();
                // Made anew: tables that there are not would be moved for nothing.
                let retired = Retired { range: Some(range), leaf_sizes, tables: None };
                self.add_own(&mut gather, retired);
                SyncFailed { gather, error }
            });
        }
        let mut gather = self.gather();
        self.add_own(&mut gather, retired);
        self.sync_own(gather)
    }

    /// Takes the tables away from hardware for good.
    ///
    /// # Errors
    ///
    /// Where hardware did not answer, it may go on to use all that was ever mapped and not synced.
    #[track_caller]
    pub(crate) fn detach(&mut self) -> Result<(), HardwareError> {
        // Leaked unless hardware has let go, also where the hook panics.
        self.table.leak(Leaked::Yes);
        self.hardware = Hardware::Unknown;
        self.ops.detach().inspect_err(|error| {
            log::warn!(
                "hardware did not let go of a domain's tables, which leak: {error}; reset the \
                 IOMMU before their memory is reused"
            );
        })?;
        self.hardware = Hardware::LetGo;
        self.table.leak(Leaked::No);
        Ok(())
    }

    /// [`map_spans`](Self::map_spans) up to the sync, for callers that keep its contract.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn map_pinned(
        &self,
        iova: Iova,
        spans: &[Span],
        prot: Prot,
    ) -> Result<(), MapFailed<M::List>> {
        match self.all().map_spans(iova, spans, prot) {
            Ok(()) => {
                self.ops.observe(&Event::Mapped { range: range_of(iova, spans), spans, prot })
            }
            Err(undone) => self.map_again(undone, iova, spans, prot)?,
        }
        Ok(())
    }

    /// Takes an empty table out of the way of what was to be mapped, and maps it then; what a
    /// mapping that has failed otherwise leaves.
    #[cold]
    #[inline(never)]
    #[track_caller]
    fn map_again(
        &self,
        undone: io_pgtable::MapUndone<M::List>,
        iova: Iova,
        spans: &[Span],
        prot: Prot,
    ) -> Result<(), MapFailed<M::List>> {
        let failed = |error| MapFailed { error, unsynced: None };
        let io_pgtable::MapUndone { error: io_pgtable::Error::EmptyTable { .. }, retired } = undone
        else {
            let error = self.take_back(undone.error.into(), undone.retired, prot)?;
            return Err(failed(error));
        };
        let range = range_of(iova, spans);
        // The empty table may be the root that hardware walks, which stays while it does.
        let told = if F::GROWS { self.tell_root() } else { Ok(()) };
        // Arm demands that an entry is broken, synced and then made when a table becomes a
        // block (DDI 0487, D8.16.1), and no format is hurt by it.
        let empty = io_pgtable::Error::EmptyTable { block: range }.into();
        let error = self.take_back(empty, retired, prot)?;
        match self.table.owned(range).reclaim(range) {
            Ok(retired) => self.take_back(error, retired, prot)?,
            Err(error) => return Err(failed(error.into())),
        };
        let Err(undone) = self.all().map_spans(iova, spans, prot) else {
            self.ops.observe(&Event::Mapped { range, spans, prot });
            return Ok(());
        };
        let error = match (undone.error, told) {
            (io_pgtable::Error::EmptyTable { .. }, Err(source)) => {
                Error::Hardware { range, source }
            }
            (error, _) => error.into(),
        };
        Err(failed(self.take_back(error, undone.retired, prot)?))
    }

    /// Takes the empty tables out that lie in a range which the caller owns, and makes hardware
    /// forget them: they are in the way of larger leaves.
    ///
    /// # Errors
    ///
    /// [`MapFailed`], with the tables where hardware was not seen to forget them.
    #[track_caller]
    pub(super) fn make_room(&self, range: IovaRange) -> Result<(), MapFailed<M::List>> {
        let failed = |error, unsynced| MapFailed { error, unsynced };
        if F::GROWS {
            // The empty table may be the root that hardware walks, which stays while it does.
            let told = self.tell_root();
            told.map_err(|source| failed(Error::Hardware { range, source }, None))?;
        }
        let reclaimed = self.table.owned(range).reclaim(range);
        let retired = reclaimed.map_err(|error| failed(error.into(), None))?;
        self.unmapped(&retired);
        self.sync_retired(retired).map_err(|SyncFailed { gather, error: source }| {
            failed(Error::Hardware { range, source }, Some(gather))
        })
    }

    /// Tells hardware that caches absent entries about a new mapping, and takes it back where that
    /// fails.
    #[track_caller]
    pub(crate) fn sync_map(&self, range: IovaRange) -> Result<(), MapFailed<M::List>> {
        let Err(source) = self.tell_mapped(range) else { return Ok(()) };
        let mut gather = self.gather();
        self.add_own(&mut gather, self.take_away(range));
        let error = Error::Hardware { range, source };
        let unsynced = self.sync_own(gather).err().map(|failed| failed.gather);
        Err(MapFailed { error, unsynced })
    }

    /// Tells hardware that `range` was mapped, and of the new root where the tree grew for it.
    #[track_caller]
    pub(crate) fn tell_mapped(&self, range: IovaRange) -> Result<(), HardwareError> {
        if F::GROWS && !self.table.hardware_reaches(range.last()) {
            self.tell_root()?;
        }
        self.ops.sync_map(range)
    }

    /// Tells hardware about a new root, unless it knows.
    #[cold]
    fn tell_root(&self) -> Result<(), HardwareError> {
        let root = self.table.root_word();
        if self.table.walked() != root {
            self.ops.root_changed(Promise::kept(), &|| self.table.root_and_level())?;
            // An older root that overtakes a newer one here makes the hook be called once more.
            self.table.walks_from(root);
        }
        Ok(())
    }

    /// Syncs what a failed operation took back, and hands its error on.
    #[track_caller]
    fn take_back(
        &self,
        error: Error,
        retired: Retired<M::List>,
        prot: Prot,
    ) -> Result<Error, MapFailed<M::List>> {
        if let Some(range) = retired.range.filter(|_| retired.leaf_sizes != 0) {
            // Devices could use it for a moment.
            self.ops.observe(&Event::Mapped { range, spans: &[], prot });
        }
        self.unmapped(&retired);
        let mut gather = self.gather();
        self.add_own(&mut gather, retired);
        match self.sync_own(gather) {
            Ok(()) => Ok(error),
            Err(failed) => Err(MapFailed { error, unsynced: Some(failed.gather) }),
        }
    }

    /// Detaches the tables that unmapping `range` left empty and that lie in `owned` whole, which
    /// the caller owns until they are synced.
    #[track_caller]
    pub(crate) fn reclaim(&self, range: IovaRange, owned: IovaRange) -> Option<Retired<M::List>> {
        let retired = self.table.owned(owned).reclaim(range).ok()?;
        self.unmapped(&retired);
        Some(retired)
    }

    /// What tells the domain's table from others.
    pub(crate) fn id(&self) -> Id {
        self.table.id()
    }

    /// The next spans of a range that the caller owns and that is known to be mapped without holes.
    #[track_caller]
    pub(crate) fn unmap_next(&self, rest: Rest, buf: &mut SpanBuf<'_>) -> UnmappedSpans<M::List> {
        let unmapped = self.all().resume(rest, buf);
        self.unmapped(&unmapped.retired);
        unmapped
    }

    /// Takes away whatever is mapped in a range that the caller owns and no leaf reaches out of.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn take_away(&self, range: IovaRange) -> Retired<M::List> {
        let retired = self.all().remove(range);
        self.unmapped(&retired);
        retired
    }

    /// Says what was taken away, before anybody else can know.
    #[inline(always)]
    #[track_caller]
    pub(super) fn unmapped(&self, retired: &Retired<M::List>) {
        if let Some(range) = retired.range {
            let leaf_sizes = retired.leaf_sizes;
            let tables = match retired.tables {
                Some(_) => Tables::Detached,
                None => Tables::Kept,
            };
            self.ops.observe(&Event::Unmapped { range, leaf_sizes, tables });
        }
    }

    /// The table itself.
    pub(super) fn table(&self) -> &PageTable<F, M> {
        &self.table
    }

    /// The table, for callers that own what they work on.
    pub(crate) fn all(&self) -> Owned<'_, F, M> {
        self.table.all()
    }

    #[inline(always)]
    #[track_caller]
    pub(super) fn guard(&self, unmapped: UnmappedSpans<M::List>) -> Unsynced<'_, F, M, O> {
        self.unmapped(&unmapped.retired);
        Unsynced { domain: self, retired: Some(unmapped.retired), rest: unmapped.rest }
    }
}

/// The range that spans were mapped in, which the table has checked.
#[inline(always)]
fn range_of(iova: Iova, spans: &[Span]) -> IovaRange {
    let bytes = spans.iter().fold(0u64, |bytes, span| bytes.saturating_add(span.len()));
    IovaRange::from_len(iova, bytes).unwrap_or(IovaRange::point(iova))
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Drop for Domain<F, M, O> {
    fn drop(&mut self) {
        if self.hardware == Hardware::Walks {
            // Where that fails, the tables leak.
            let _ = self.detach();
        }
    }
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> fmt::Debug for Domain<F, M, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("table", &self.table).finish_non_exhaustive()
    }
}

/// Translations that were taken away and are synced when this is dropped.
#[must_use = "dropping it syncs at once; `sync` says whether that succeeded"]
pub struct Unsynced<'d, F: Format, M: TableMemory<F::Word>, O: IommuOps> {
    domain: &'d Domain<F, M, O>,
    /// Taken by whoever syncs it.
    retired: Option<Retired<M::List>>,
    rest: Option<Rest>,
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Unsynced<'_, F, M, O> {
    /// Syncs: only with the [`Synced`] may the spans be released. Beside it what is still to be
    /// unmapped, where the buffer became full.
    ///
    /// # Errors
    ///
    /// [`SyncFailed`]: the spans may still be in use.
    #[inline]
    #[track_caller]
    pub fn sync(mut self) -> Result<(Synced, Option<Rest>), SyncFailed<M::List>> {
        let synced = match self.retired.take() {
            Some(retired) => {
                let range = retired.range();
                self.domain.sync_retired(retired)?;
                Synced::of(range)
            }
            None => Synced::of(None),
        };
        Ok((synced, self.rest.take()))
    }

    /// The gather, to sync together with others, and what is still to be unmapped.
    pub fn into_gather(mut self) -> (Gather<M::List>, Option<Rest>) {
        let mut gather = self.domain.gather();
        if let Some(retired) = self.retired.take() {
            self.domain.add_own(&mut gather, retired);
        }
        (gather, self.rest.take())
    }
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> Drop for Unsynced<'_, F, M, O> {
    #[inline]
    fn drop(&mut self) {
        if let Some(retired) = self.retired.take() {
            // A failure leaks the tables, and the spans' owner has no `Synced` to release them
            // with.
            let _ = self.domain.sync_retired(retired);
        }
    }
}

impl<F: Format, M: TableMemory<F::Word>, O: IommuOps> fmt::Debug for Unsynced<'_, F, M, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unsynced")
            .field("retired", &self.retired)
            .field("rest", &self.rest)
            .finish_non_exhaustive()
    }
}
