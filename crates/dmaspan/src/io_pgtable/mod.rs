//! IO page tables: one generic walker for all formats.
//!
//! A [`Format`] says how entries are encoded, a [`TableMemory`] where tables live, and
//! [`PageTable`] does the rest, compiled anew for each pair. Level 0 is that of the smallest
//! leaves, whatever the architecture's manual counts.
//!
//! # From Linux
//!
//! Of include/linux/io-pgtable.h and include/linux/generic_pt:
//!
//! | Linux | here |
//! |---|---|
//! | `alloc_io_pgtable_ops`, `pt_iommu_amdv1_init` | [`PageTable::new`], of a [`Format`] |
//! | `ias`, `oas` and quirks of `struct io_pgtable_cfg` | a configuration: [`ArmLpaeS1Config`] |
//! | its `arm_lpae_s1_cfg.ttbr`, `pt_iommu_amdv1_hw_info` | `registers` of the format |
//! | `ops->map_pages` | [`Owned::map_pages`] |
//! | `iommu_map_sg`, above page tables | [`Owned::map_spans`] |
//! | `ops->unmap_pages` | [`Owned::unmap_pages`] |
//! | an unmap behind a look-up of each page | [`Owned::unmap`], which returns the spans |
//! | `ops->iova_to_phys` | [`Owned::iova_to_phys`], [`Owned::walk`] |
//! | `ops->read_and_clear_dirty` | [`Owned::read_and_clear_dirty`] |
//! | `iommu_alloc_pages_sz`, `iommu_put_pages_list` | [`TableMemory`] |
//! | `struct iommu_flush_ops` | [`Retired`], which a caller gathers and syncs |
//!
//! # Owning ranges
//!
//! There is no lock around a table: disjoint ranges are mapped and unmapped in parallel. A caller
//! must own the range that it works on, and [`Owned`] says that it does. It comes from
//! `&mut PageTable` safely ([`PageTable::whole`]), or from a promise ([`PageTable::claim`]).
//!
//! Looking needs no range of one's own: [`PageTable::walk`] lists what is mapped while others map
//! and unmap there. Tables that are freed meanwhile wait for it.
//!
//! # When tables come and go
//!
//! A missing table is filled while no other thread sees it and then installed by compare-and-swap,
//! since neighbours may need the same one. Unmapping detaches the tables that its range covers
//! whole. A neighbour may use those at the range's ends, so they stay, empty, until
//! [`Owned::reclaim`]. Detached tables are in [`Retired`], and the sync frees them. At once they
//! are the [memory's](TableMemory#which-tables-are-read), which may give them back to a page
//! allocator.
//!
//! ```
//! use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
//! use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
//!     let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
//!     let mut table = PageTable::new(format, tables)?;
//!     let whole = table.whole();
//!
//!     // 4 MiB of contiguous memory and one page elsewhere: two leaves of 2 MiB and one of 4 KiB.
//!     let spans = [
//!         Span::new(PhysAddr::new(0x8000_0000), 4 << 20)?,
//!         Span::new(PhysAddr::new(0x5000), 4096)?,
//!     ];
//!     whole.map_spans(Iova::new(0), &spans, Prot::READ_WRITE)?;
//!     assert_eq!(whole.iova_to_phys(Iova::new(0x40_0123)), Some(PhysAddr::new(0x5123)));
//!
//!     let mut room = SpanBuf::room::<8>();
//!     let mut removed = SpanBuf::new(&mut room);
//!     let range = IovaRange::from_len(Iova::new(0), (4 << 20) + 4096)?;
//!     let unmapped = whole.unmap(range, &mut removed)?;
//!     assert_eq!(removed.spans(), spans);
//!     assert_eq!(unmapped.retired.range(), Some(range)); // what hardware must forget now
//!     Ok(())
//! }
//! ```

mod arena;
mod collect;
mod cursor;
mod dirty;
mod dump;
mod error;
mod foreign;
mod format;
mod formats;
mod frames;
mod free;
mod leaves;
mod manual;
mod map;
mod memory;
mod protect;
mod readers;
mod reclaim;
mod retired;
mod runs;
mod scan;
mod split;
mod survey;
mod unmap;
pub(crate) mod view;
mod walk;
mod word;

pub use arena::{Arena, ArenaList, NotInTree};
pub use dirty::DirtyBitmap;
pub use dump::{Dump, DumpLines};
pub use error::{Error, MapUndone};
pub use foreign::{ForeignError, ForeignFault, ForeignMemory, ForeignPiece, read_foreign};
pub use format::{Entry, Format, Geometry, Groups, Leaf, MAX_LEVELS};
pub use formats::amd_v1::{AmdV1, AmdV1Config, AmdV1Registers};
pub use formats::arm_lpae_32::{
    ArmLpae32, ArmLpae32S1, ArmLpae32S1Registers, ArmLpae32S2, ArmLpae32S2Registers,
};
pub use formats::arm_lpae_s1::{ArmLpaeS1, ArmLpaeS1Config, ArmS1Registers, OuterWalks};
pub use formats::arm_lpae_s2::{ArmLpaeS2, ArmLpaeS2Config, ArmS2Registers, S2MemoryTypes};
pub use formats::arm_v7s::{ArmV7s, ArmV7sConfig, ArmV7sRegisters, ArmV7sVariant};
pub use formats::riscv::{
    Riscv, RiscvConfig, RiscvMemoryTypes, RiscvMode, RiscvRegisters, RiscvStage,
};
pub use formats::vtd_ss::{ReadOnlyLeaves, SnoopControl, VtdSs, VtdSsConfig, VtdSsRegisters};
pub use formats::x86_64::{ExecuteDisable, X86_64, X86_64Config, X86_64Registers};
pub use formats::{BreakBeforeMake, ConfigError, DirtyTracking, Half};
pub use frames::{FrameAlloc, FrameList, FrameTables, FrameWords};
pub use manual::{EntryField, Manual, ManualEntry, ManualLevel};
pub use memory::{Fresh, NoTables, TableAddr, TableMemory, TableShape};
pub use retired::Retired;
pub use split::Gap;
pub(crate) use split::SplitFailed;
pub use unmap::{Rest, UnmappedPages, UnmappedSpans};
pub use view::TableRoot;
pub use walk::{LeafCensus, MappedRun, Walk};
pub use word::Word;

use core::cell::Cell;
use core::fmt;
use core::iter;
use core::marker::PhantomData;
use core::mem;

use crate::addr::{Iova, PhysAddr};
use crate::atomic::{AtomicU64, Ordering};
use crate::lg2;
use crate::platform::Identity;
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::{IovaRange, RangeError};
use crate::span::{Span, SpanBuf};
use readers::Readers;
use runs::{Run, Runs};
use unmap::{Ahead, Covered};

/// A tree of tables of one format.
///
/// Dropping it frees all its tables.
///
/// # Context
///
/// It may be dropped only when no hardware walks it any more; [`Domain`](crate::iommu::Domain) sees
/// to that.
pub struct PageTable<F: Format, M: TableMemory<F::Word>> {
    format: F,
    memory: M,
    geometry: Geometry,
    /// The root table's address and, in the bits below its alignment, its level: a tree that grows
    /// replaces both at once.
    top: AtomicU64,
    /// The root that hardware is known to walk, as one word like `top`: where the tree grew since,
    /// it is an inner table that must not leave the tree.
    walked: AtomicU64,
    /// What tells the table from all others that live.
    identity: Identity,
    root_mask: u64,
    /// The last physical address that a leaf can have.
    last_paddr: PhysAddr,
    /// Whether leaves of several entries can occur.
    has_groups: bool,
    /// The bytes of the second smallest leaf: what is shorter is all of the smallest.
    larger: u64,
    /// Whether hardware may use the tables for ever.
    leaked: Leaked,
    /// Those who read without owning, whom freed tables wait for.
    readers: Readers<M::List>,
}

/// Whether a table is freed when it is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaked {
    No,
    Yes,
}

/// A range of a [`PageTable`] that the holder alone works on.
pub struct Owned<'t, F: Format, M: TableMemory<F::Word>> {
    table: &'t PageTable<F, M>,
    range: IovaRange,
    /// The part of it that the table translates: where operations may be.
    within: Option<IovaRange>,
    /// One thread at a time works on the range, so a reference to this is not for two.
    not_sync: PhantomData<Cell<()>>,
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// An empty table: a root without entries.
    ///
    /// # Errors
    ///
    /// [`Error::NoTables`] where `memory` has no place for the root, and [`Error::PageSize`] where
    /// the granule is not the smallest of the format's [`page_sizes`](Geometry::page_sizes).
    pub fn new(format: F, memory: M) -> Result<Self, Error> {
        let mut geometry = format.geometry();
        geometry.check(F::GRANULE_LG2)?;
        // Room for the level beside the root's address.
        geometry.root.lg2_align = geometry.root.lg2_align.max(LEVEL_BITS);
        let no_root = Error::NoTables { range: geometry.aperture, asked: 1 };
        let mut list = memory.reserve(geometry.root, 1).map_err(|NoTables { .. }| no_root)?;
        let mut fresh = memory.take(Promise::kept(), geometry.root, &mut list).ok_or(no_root)?;
        fresh.words().fill(F::Word::EMPTY);
        let root = fresh.paddr();
        memory.publish(fresh);
        let format_top = format.first_top_level();
        let root_mask = lg2::mask(geometry.root.lg2_size - F::Word::LG2_BYTES);
        let has_groups = (0..64)
            .filter(|&lg2| geometry.page_sizes & lg2::size(lg2) != 0)
            .any(|lg2| F::shift(F::level_of(lg2)) != lg2);
        let last_paddr = PhysAddr::new(lg2::mask(geometry.output_bits));
        let above = geometry.page_sizes & !lg2::mask(F::GRANULE_LG2 + 1);
        let larger = if above == 0 { u64::MAX } else { lg2::size(lg2::alignment(above)) };
        Ok(Self {
            format,
            memory,
            geometry,
            top: AtomicU64::new(top_word(root, format_top)),
            walked: AtomicU64::new(NO_ROOT),
            identity: Identity::new(),
            root_mask,
            last_paddr,
            has_groups,
            larger,
            leaked: Leaked::No,
            readers: Readers::new(),
        })
    }

    /// The format, which knows the values of hardware's registers.
    pub fn format(&self) -> &F {
        &self.format
    }

    /// Returns where the tables live.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The physical address of the root table. It changes where the format's tree grows.
    pub fn root(&self) -> PhysAddr {
        self.top().0.paddr()
    }

    /// The root table's physical address and its level, which is 0 for a tree of one table. Both
    /// change where the format's tree [grows](Format::GROWS).
    pub fn root_and_level(&self) -> (PhysAddr, u32) {
        let (root, level) = self.top();
        (root.paddr(), level)
    }

    /// The shape of the tree: aperture, page sizes, levels.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The last byte of memory that entries can lead to.
    #[inline(always)]
    pub(crate) fn last_paddr(&self) -> PhysAddr {
        self.last_paddr
    }

    /// All of the table, whose exclusive reference proves that nobody else works on it.
    pub fn whole(&mut self) -> Owned<'_, F, M> {
        self.owned(self.geometry.aperture)
    }

    /// A range of the table that the caller owns.
    ///
    /// # Safety
    ///
    /// While the result is used, nobody else claims an address in `range`: a table that an unmap
    /// detaches is freed and becomes anything, and an operation that is still in it would read
    /// that. [`walk`](Self::walk), [`iova_to_phys`](Self::iova_to_phys) and
    /// [`census`](Self::census) of the table itself claim nothing.
    #[expect(unsafe_code, reason = "the caller promises to own the range")]
    pub unsafe fn claim(&self, range: IovaRange) -> Owned<'_, F, M> {
        self.owned(range)
    }

    /// [`claim`](Self::claim) for the parts of this crate that keep the promise.
    #[inline(always)]
    pub(crate) fn owned(&self, range: IovaRange) -> Owned<'_, F, M> {
        let within = range.intersection(self.geometry.aperture);
        Owned { table: self, range, within, not_sync: PhantomData }
    }

    /// All that the table translates, for the same.
    #[inline(always)]
    pub(crate) fn all(&self) -> Owned<'_, F, M> {
        let range = self.geometry.aperture;
        Owned { table: self, range, within: Some(range), not_sync: PhantomData }
    }

    /// Whether the tables outlive this, because hardware may still walk them.
    pub(crate) fn leak(&mut self, leaked: Leaked) {
        self.leaked = leaked;
    }

    /// The root and its level as one word, which is another one after the tree has grown.
    pub(crate) fn root_word(&self) -> u64 {
        self.top.load(Ordering::Acquire)
    }

    /// The root that hardware was told of last, as [`root_word`](Self::root_word) had it.
    pub(crate) fn walked(&self) -> u64 {
        self.walked.load(Ordering::Acquire)
    }

    /// Hardware walks from this root, or from one that was put above it since: those below it may
    /// leave the tree. To say so of an older root than before is only too careful.
    pub(crate) fn walks_from(&self, root_word: u64) {
        self.walked.store(root_word, Ordering::Release);
    }

    /// Whether a walk from the root that hardware was told of last comes to what translates `iova`.
    pub(crate) fn hardware_reaches(&self, iova: Iova) -> bool {
        let level = level_in(self.walked());
        level >= self.geometry.top_level || self.covers(level, iova.get())
    }

    /// Whether the table at `level` for the block that begins at `start` is a root that hardware
    /// may still begin at: emptied and freed with the tables above it, it would be walked on.
    #[inline(always)]
    fn is_walked(&self, level: u32, start: u64) -> bool {
        F::GROWS && start == 0 && level >= level_in(self.walked())
    }

    /// The root table and its level.
    #[inline(always)]
    fn top(&self) -> (TableAddr, u32) {
        // The root's entries are visible to whoever sees its address.
        let word = self.top.load(Ordering::Acquire);
        let paddr = PhysAddr::new(lg2::align_down(word, LEVEL_BITS));
        let root = TableAddr::new(paddr, self.geometry.root.lg2_size);
        if F::GROWS { (root, level_in(word)) } else { (root, self.geometry.top_level) }
    }

    /// Whether a tree whose root is at `top` translates `iova`, which is in the aperture.
    #[inline(always)]
    fn covers(&self, top: u32, iova: u64) -> bool {
        top == self.geometry.top_level || iova >> F::shift(top + 1) == 0
    }

    /// The index of the entry for `iova` in the table of `level` that translates it.
    #[inline(always)]
    fn index(&self, level: u32, iova: u64) -> usize {
        let mask = if level == self.geometry.top_level {
            self.root_mask
        } else {
            lg2::mask(F::LG2_ENTRIES)
        };
        to_index((iova >> F::shift(level)) & mask)
    }
}

impl<F: Format, M: TableMemory<F::Word>> fmt::Debug for PageTable<F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageTable")
            .field("format", &self.format)
            .field("root", &self.root())
            .finish_non_exhaustive()
    }
}

impl<F: Format, M: TableMemory<F::Word>> fmt::Debug for Owned<'_, F, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owned").field("table", self.table).field("range", &self.range).finish()
    }
}

impl<'t, F: Format, M: TableMemory<F::Word>> Owned<'t, F, M> {
    /// Returns what the holder owns.
    pub fn range(&self) -> IovaRange {
        self.range
    }

    /// Maps `page_count` pages of `page_size` bytes from `iova` to contiguous memory at `paddr`,
    /// and returns how many bytes it mapped and why it stopped, if it did before the end. In one
    /// walk, whatever the count; never by leaves of another size.
    ///
    /// What was mapped before an error stays: partial progress is the caller's to keep or unmap, as
    /// in Linux's `map_pages` (include/linux/io-pgtable.h).
    ///
    /// # Errors
    ///
    /// See [`Error`]; a bad argument maps nothing.
    #[inline]
    pub fn map_pages(
        &self,
        iova: Iova,
        paddr: PhysAddr,
        page_size: u64,
        page_count: u64,
        prot: Prot,
    ) -> (u64, Result<(), Error>) {
        let bytes = match self.check_pages(iova, page_size, page_count) {
            Ok((_, bytes)) => bytes,
            Err(error) => return (0, Err(error)),
        };
        let lg2 = lg2::alignment(page_size);
        if let Err(error) = self.check_memory(iova, paddr, bytes, lg2, prot) {
            return (0, Err(error));
        }
        let run = Run { iova: iova.get(), paddr: paddr.get(), bytes, lg2 };
        let Err(rest) = self.table.map_in_table(run, prot) else { return (bytes, Ok(())) };
        let last = iova.get().wrapping_add(bytes - 1);
        let (at, result) = self.table.map_runs(iter::once(rest), (rest.iova, last), lg2, prot);
        (at.wrapping_sub(iova.get()), result)
    }

    /// Maps `spans`, one behind the other from `iova` on, by the fewest leaves that their addresses
    /// allow. One walk, all or nothing.
    ///
    /// # Errors
    ///
    /// [`MapUndone`], whose `retired` is to be synced: see [`Error`] for the reasons.
    #[inline]
    pub fn map_spans(
        &self,
        iova: Iova,
        spans: &[Span],
        prot: Prot,
    ) -> Result<(), MapUndone<M::List>> {
        let refuse = |error| MapUndone { error, retired: Retired::nothing() };
        // One span of leaves of one size, as most buffers of drivers are: nothing to choose.
        if let &[span] = spans {
            let (range, smallest) = self.check_spans(iova, spans, prot).map_err(refuse)?;
            let (paddr, bytes) = (span.paddr().get(), span.len());
            let lg2 = if bytes < self.table.larger { F::GRANULE_LG2 } else { smallest };
            if !runs::may_have_larger(self.table.geometry.page_sizes, lg2, bytes) {
                let run = Run { iova: iova.get(), paddr, bytes, lg2 };
                return match self.table.map_in_table(run, prot) {
                    Ok(()) => Ok(()),
                    Err(rest) => self.map_rest(range, rest, prot),
                };
            }
        }
        self.map_list(iova, spans, prot)
    }

    /// The rest of a range that began to be mapped by one run of pages.
    #[inline(never)]
    fn map_rest(&self, range: IovaRange, rest: Run, prot: Prot) -> Result<(), MapUndone<M::List>> {
        let ends = (rest.iova, range.last().get());
        let (at, result) = self.table.map_runs(iter::once(rest), ends, rest.lg2, prot);
        result.map_err(|error| MapUndone { error, retired: self.withdraw(range.start(), at) })
    }

    /// [`map_spans`](Self::map_spans) for any list.
    #[inline(never)]
    fn map_list(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), MapUndone<M::List>> {
        let refuse = |error| MapUndone { error, retired: Retired::nothing() };
        let (range, smallest) = self.check_spans(iova, spans, prot).map_err(refuse)?;
        let mut runs = Runs::new(self.table.geometry.page_sizes, iova.get(), spans);
        if smallest == F::GRANULE_LG2 && self.table.map_begin(&mut runs, prot) {
            return Ok(());
        }
        let ends = (runs.iova(), range.last().get());
        let (at, result) = self.table.map_runs(runs, ends, smallest, prot);
        result.map_err(|error| MapUndone { error, retired: self.withdraw(iova, at) })
    }

    /// Takes away up to `page_count` pages of `page_size` bytes from `iova` on, whatever leaves map
    /// them, in one walk. It stops at the first hole.
    ///
    /// # Errors
    ///
    /// In the result's `result`, beside what was done before: [`Error::Hole`], and
    /// [`Error::WouldSplit`] for a leaf that reaches out of the range, which stays.
    #[inline]
    pub fn unmap_pages(
        &self,
        iova: Iova,
        page_size: u64,
        page_count: u64,
    ) -> UnmappedPages<M::List> {
        let mut retired = Retired::nothing();
        match self.check_pages(iova, page_size, page_count) {
            Ok((range, bytes)) => {
                let Some(rest) = self.table.sweep_in_table(range, page_size, &mut retired) else {
                    return UnmappedPages { bytes, result: Ok(()), retired };
                };
                let (at, result) = self.table.sweep::<true>(rest, Covered::Detach, &mut retired);
                let done = if result.is_ok() { bytes } else { at.wrapping_sub(iova.get()) };
                UnmappedPages { bytes: done, result, retired }
            }
            Err(error) => UnmappedPages { bytes: 0, result: Err(error), retired },
        }
    }

    /// Takes the translations of `range` away and adds the spans of memory that they led to to
    /// `buf`, in the order of IOVAs.
    ///
    /// Where the buffer becomes full it stops there: sync, release the spans, clear the buffer and
    /// go on with [`resume`](Self::resume). A buffer without room makes no progress.
    ///
    /// # Errors
    ///
    /// [`Error::Hole`] and [`Error::WouldSplit`] anywhere in the range, and bad arguments: nothing
    /// is changed and nothing added to `buf`.
    #[inline]
    pub fn unmap(
        &self,
        range: IovaRange,
        buf: &mut SpanBuf<'_>,
    ) -> Result<UnmappedSpans<M::List>, Error> {
        self.check_range(range, F::GRANULE_LG2)?;
        self.table.unmap_spans(range, buf, Ahead::Check)
    }

    /// Goes on with an unmap whose buffer became full. It refuses only a `rest` that is not of this
    /// table or not of the range owned here, and then unmaps nothing.
    pub fn resume(&self, rest: Rest, buf: &mut SpanBuf<'_>) -> UnmappedSpans<M::List> {
        let range = rest.range();
        if rest.is_of(self.table.id()) && self.check_range(range, F::GRANULE_LG2).is_ok() {
            if let Some(retired) = self.table.unmap_in_table(range, buf) {
                return UnmappedSpans { retired, rest: None };
            }
            if let Ok(unmapped) = self.table.unmap_spans(range, buf, Ahead::Checked) {
                return unmapped;
            }
        }
        UnmappedSpans { retired: Retired::nothing(), rest: Some(rest) }
    }

    /// Takes all translations of `range` away, whatever holes there are between them. No leaf
    /// reaches out of the range. What is retired covers all of it.
    #[inline(always)]
    pub(crate) fn remove(&self, range: IovaRange) -> Retired<M::List> {
        let mut retired = Retired::nothing();
        let granule = lg2::size(F::GRANULE_LG2);
        if let Some(rest) = self.table.sweep_in_table(range, granule, &mut retired) {
            self.remove_any(rest, &mut retired);
        }
        retired
    }

    #[inline(never)]
    fn remove_any(&self, range: IovaRange, retired: &mut Retired<M::List>) {
        let (at, result) = self.table.sweep::<true>(range, Covered::Detach, retired);
        if result.is_err()
            && let Some(rest) = IovaRange::new(Iova::new(at), range.last())
        {
            // There are holes: what lies between them may be of any size.
            retired.leaf_sizes |= self.table.geometry.page_sizes;
            let _ = self.table.sweep::<false>(rest, Covered::Detach, retired);
            retired.cover(range);
        }
    }

    /// Detaches the tables that have an address in `range`, lie in the *owned* range whole, and
    /// have no leaves: what unmapping `range` left empty.
    ///
    /// # Errors
    ///
    /// [`Error::NotOwned`] and [`Error::OutsideAperture`].
    pub fn reclaim(&self, range: IovaRange) -> Result<Retired<M::List>, Error> {
        self.check_range(range, 0)?;
        Ok(self.table.reclaim_tables(range, self.range))
    }

    /// Takes back what was mapped from `iova` up to before `at`. Its tables were all there before.
    fn withdraw(&self, iova: Iova, at: u64) -> Retired<M::List> {
        let mut retired = Retired::nothing();
        if let Ok(range) = IovaRange::from_len(iova, at.wrapping_sub(iova.get())) {
            // Whole leaves that this caller just mapped: nothing refuses them.
            let _ = self.table.sweep::<true>(range, Covered::Keep, &mut retired);
        }
        retired
    }

    /// Whether `range` is of whole granules and where operations may be.
    #[inline(always)]
    pub(crate) fn check_whole(&self, range: IovaRange) -> Result<(), Error> {
        self.check_range(range, F::GRANULE_LG2)
    }

    #[inline(always)]
    fn check_range(&self, range: IovaRange, page_lg2: u32) -> Result<(), Error> {
        if !self.within.is_some_and(|within| within.covers(range)) {
            return Err(self.outside(range));
        }
        let unaligned = range.start().get() | range.last().get().wrapping_add(1);
        if !lg2::is_aligned(unaligned, page_lg2) {
            return Err(Error::Misaligned { range, page_size: lg2::size(page_lg2) });
        }
        Ok(())
    }

    /// Why `range` is not where operations may be.
    #[cold]
    fn outside(&self, range: IovaRange) -> Error {
        let aperture = self.table.geometry.aperture;
        if aperture.covers(range) {
            Error::NotOwned { range, owned: self.range }
        } else {
            Error::OutsideAperture { range, aperture }
        }
    }

    /// The range of some pages and its length.
    #[inline(always)]
    pub(crate) fn check_pages(
        &self,
        iova: Iova,
        page_size: u64,
        page_count: u64,
    ) -> Result<(IovaRange, u64), Error> {
        let page_sizes = self.table.geometry.page_sizes;
        if !page_size.is_power_of_two() || page_sizes & page_size == 0 {
            return Err(Error::PageSize { page_size, page_sizes });
        }
        let page_lg2 = lg2::alignment(page_size);
        if page_count > u64::MAX >> page_lg2 {
            return Err(RangeError::Wraps { start: iova.get(), len: u64::MAX }.into());
        }
        let bytes = page_count << page_lg2;
        let range = IovaRange::from_len(iova, bytes)?;
        self.check_range(range, page_lg2)?;
        Ok((range, bytes))
    }

    #[inline(always)]
    fn check_memory(
        &self,
        iova: Iova,
        paddr: PhysAddr,
        bytes: u64,
        page_lg2: u32,
        prot: Prot,
    ) -> Result<(), Error> {
        self.check_prot(iova, prot)?;
        let span = Span::new(paddr, bytes)?;
        let last = self.table.last_paddr;
        if span.last() > last {
            return Err(Error::OutsideOutput { span, last });
        }
        if !lg2::is_aligned(paddr.get() | bytes, page_lg2) {
            return Err(Error::MisalignedSpan { span, page_size: lg2::size(page_lg2) });
        }
        Ok(())
    }

    #[inline(always)]
    fn check_prot(&self, iova: Iova, prot: Prot) -> Result<(), Error> {
        if !prot.permits_access() {
            return Err(Error::NoAccess { iova });
        }
        if self.table.format.refuses(prot) {
            return Err(Error::Unsupported { iova, prot });
        }
        Ok(())
    }

    /// The range that the spans are mapped at, and log2 of the smallest leaf that they can have.
    #[inline(always)]
    fn check_spans(
        &self,
        iova: Iova,
        spans: &[Span],
        prot: Prot,
    ) -> Result<(IovaRange, u32), Error> {
        self.check_prot(iova, prot)?;
        if spans.is_empty() {
            return Err(Error::NoSpans { iova });
        }
        let last = self.table.last_paddr;
        let mut bytes = 0u64;
        let mut all = iova.get();
        for span in spans {
            let (start, len) = (span.paddr().get(), span.len());
            all |= start | len;
            if !lg2::is_aligned(start | len, F::GRANULE_LG2) || span.last() > last {
                let (span, page_size) = (*span, lg2::size(F::GRANULE_LG2));
                return Err(if span.last() > last {
                    Error::OutsideOutput { span, last }
                } else {
                    Error::MisalignedSpan { span, page_size }
                });
            }
            bytes = bytes
                .checked_add(len)
                .ok_or(RangeError::Wraps { start: iova.get(), len: u64::MAX })?;
        }
        let range = IovaRange::from_len(iova, bytes)?;
        self.check_range(range, F::GRANULE_LG2)?;
        let sizes = self.table.geometry.page_sizes & lg2::mask(lg2::alignment(all).min(63) + 1);
        Ok((range, lg2::floor(sizes)))
    }
}

/// Bits for a level, below the alignment of every root.
const LEVEL_BITS: u32 = 3;
const _: () = assert!(MAX_LEVELS <= 1 << LEVEL_BITS);

/// The word of no root: its level is above all others.
const NO_ROOT: u64 = u64::MAX;

/// A root's address and level as one word.
fn top_word(root: PhysAddr, level: u32) -> u64 {
    root.get() | u64::from(level)
}

/// The level in such a word.
#[inline(always)]
fn level_in(word: u64) -> u32 {
    u32::from(word.to_le_bytes()[0]) & 0b111
}

/// The aligned block of `2^lg2` bytes around `iova`.
#[inline(always)]
fn block_of(iova: u64, lg2: u32) -> IovaRange {
    let start = Iova::new(lg2::align_down(iova, lg2));
    let last = Iova::new(iova | lg2::mask(lg2));
    // The block contains the address, so the range is valid; the fallback is never taken.
    IovaRange::new(start, last).unwrap_or(IovaRange::point(Iova::new(iova)))
}

/// An index or count of entries, which a table's size bounds far below `usize`. What would be cut
/// is saturated.
#[inline(always)]
fn to_index(value: u64) -> usize {
    const { assert!(mem::size_of::<usize>() <= mem::size_of::<u64>()) };
    usize::try_from(value).unwrap_or(usize::MAX)
}
