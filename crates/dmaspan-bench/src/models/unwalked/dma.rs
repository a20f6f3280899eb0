//! The DMA API over tables that no hardware walks: for measuring what mapping costs.
//!
//! All that a driver's mapping goes through is real: IOVAs, tables, gathers, flush queue and
//! release. There is no device, so nothing is reached by what is mapped, and whoever maps here need
//! promise nothing about the memory. Invalidations are counted and otherwise done at once.

use std::cell::Cell;
use std::hint::black_box;
use std::slice;
use std::sync::Arc;

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error, Flush, ListMapping, Mapping,
    NoPool, Piece, Segment,
};
use dmaspan::io_pgtable::{self, Format, Owned, PageTable, Retired};
use dmaspan::iommu::flush_queue;
use dmaspan::iommu::iova::{Align, Iovas, Request};
use dmaspan::iommu::{Domain, Gather, HardwareError, Invalidation, IommuOps, Scope};
use dmaspan::{Coherency, Direction, DmaAddr, Iova, IovaRange, PhysAddr, Platform, Promise, lg2};

use dmaspan_sim::arena::{Arena, ArenaList};
use dmaspan_sim::walker::TableWords;

/// How many ranges an invalidation names before it is one of everything, as that of a driver with
/// range commands might.
pub(crate) const MAX_RANGES: usize = 8;

/// What hardware would have been told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// Invalidation commands: one for each range, or one for everything.
    pub(crate) commands: u64,
    /// Waits until they were done.
    pub(crate) syncs: u64,
}

impl Told {
    /// By the calling thread, through any [`UnwalkedDma`], since the thread began: what a thread
    /// does costs others nothing.
    pub(crate) fn by_this_thread() -> Self {
        TOLD.get()
    }

    /// What was told after `earlier`.
    #[must_use]
    pub(crate) fn since(self, earlier: Self) -> Self {
        let Self { commands, syncs } = self;
        Self { commands: commands - earlier.commands, syncs: syncs - earlier.syncs }
    }
}

thread_local! {
    static TOLD: Cell<Told> = const { Cell::new(Told { commands: 0, syncs: 0 }) };
}

/// Adds commands to what the thread told.
#[inline]
fn count(commands: usize, syncs: u64) {
    let told = TOLD.get();
    let commands = told.commands + u64::try_from(commands).unwrap_or(u64::MAX);
    TOLD.set(Told { commands, syncs: told.syncs + syncs });
}

/// No hardware, counted.
#[derive(Debug)]
pub(super) struct Untold;

#[expect(unsafe_code, reason = "nothing is promised where there is no device")]
// SAFETY: no device of the domain uses any translation, ever: there is none.
unsafe impl IommuOps for Untold {
    type Address = PhysAddr;

    #[inline]
    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let commands = match what.scope {
            Scope::Ranges(ranges) => ranges.len(),
            Scope::All => 1,
        };
        count(commands, 1);
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        MAX_RANGES
    }

    fn root_changed(
        &self,
        _: Promise<'_>,
        _: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        Ok(())
    }
}

/// Counts what hardware would have to be told of a gather whose tables were freed.
pub(crate) fn told(gather: &Gather<ArenaList>) {
    // Where there is no hardware nothing fails.
    let _ = Untold.invalidate(&gather.invalidation());
}

/// Memory that no device will ever reach.
#[derive(Debug)]
enum Unreached {
    Piece(Piece),
    List(Arc<[Piece]>),
}

#[expect(unsafe_code, reason = "no device reaches the memory")]
// SAFETY: the type is private, and only domains whose hooks are `Untold` map it: no device uses
// them, so nothing is read or written through the mapping whatever the memory is used for. The
// pieces do not change.
unsafe impl DmaMemory for Unreached {
    #[inline(always)]
    fn pieces(&self) -> &[Piece] {
        match self {
            Self::Piece(piece) => slice::from_ref(piece),
            Self::List(pieces) => pieces,
        }
    }
}

type Dma<F, P> = DmaDomain<F, Arena, Untold, P, Unreached>;

/// A device's way to memory, without the device.
#[derive(Debug)]
pub(crate) struct UnwalkedDma<F: Format, P: Platform> {
    device: Device<Dma<F, P>>,
    domain: Arc<Dma<F, P>>,
    /// What is mapped page by page.
    pages: PageTable<F, Arena>,
    tables: Arena,
    /// The leaves that are one entry.
    entry_sizes: u64,
    flush: Flush,
}

/// A contiguous buffer mapped by one call.
#[derive(Debug)]
#[must_use = "a buffer that is dropped stays mapped"]
pub(crate) struct Mapped<F: Format, P: Platform>(Mapping<Dma<F, P>>);

impl<F: Format, P: Platform> Mapped<F, P> {
    /// Where the device would find it.
    pub(crate) fn addr(&self) -> DmaAddr {
        self.0.addr()
    }
}

/// A list mapped by one call.
#[derive(Debug)]
#[must_use = "a list that is dropped stays mapped"]
pub(crate) struct MappedList<F: Format, P: Platform>(ListMapping<Dma<F, P>>);

impl<F: Format, P: Platform> MappedList<F, P> {
    /// How many segments the device would be given.
    #[cfg(test)]
    pub(crate) fn segment_count(&self) -> usize {
        self.0.segment_count()
    }
}

/// A buffer that a [`Caller`] mapped.
#[derive(Debug)]
#[must_use = "a buffer that is dropped stays mapped"]
pub(crate) struct ByCalls<'d, 'm, F: Format, P: Platform> {
    dma: &'d UnwalkedDma<F, P>,
    pieces: &'m [Piece],
    iovas: Iovas,
}

impl<F: Format, P: Platform> ByCalls<'_, '_, F, P> {
    /// Where the device would find it.
    pub(crate) fn addr(&self) -> DmaAddr {
        DmaAddr::new(self.iovas.range().start().get())
    }
}

impl<F: Format, P: Platform> UnwalkedDma<F, P> {
    /// An empty domain for one device, with room for tables of `bytes` bytes together from `base`
    /// on (see [`Arena::new`]). Of the same format twice: what a [`Caller`] maps
    /// has a table of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Domain`] where the root has no room, or would lie where the format cannot reach;
    /// [`Error::Iova`] for an aperture without IOVAs; [`Error::Mask`] and [`Error::Limit`] for a
    /// device that cannot be served.
    pub(crate) fn new(
        [format, pages]: [F; 2],
        (base, bytes): (PhysAddr, u64),
        (dma, device): (DmaConfig, DeviceConfig),
        platform: P,
    ) -> Result<Self, Error> {
        let tables = Arena::new(base, bytes);
        let table = PageTable::new(format, tables.clone()).map_err(refused)?;
        let pages = PageTable::new(pages, tables.clone()).map_err(refused)?;
        let geometry = pages.geometry();
        let sizes = (0..=geometry.top_level).map(F::shift).filter(|&lg2| lg2 < 64);
        let entry_sizes = sizes.map(lg2::size).sum::<u64>() & geometry.page_sizes;
        let domain = Domain::new(table, Untold)?;
        let domain = Arc::new(DmaDomain::new(domain, dma, platform)?);
        let device = Device::new(Arc::clone(&domain), NoPool, device)?;
        Ok(Self { device, domain, pages, tables, entry_sizes, flush: dma.flush })
    }

    /// The format, which knows the values of hardware's registers.
    pub(crate) fn format(&self) -> &F {
        self.domain.domain().format()
    }

    /// The physical address of the root table.
    pub(crate) fn root(&self) -> PhysAddr {
        self.domain.domain().root()
    }

    /// The root of the table of what a [`Caller`] maps.
    pub(crate) fn pages_root(&self) -> PhysAddr {
        self.pages.root()
    }

    /// The tables, for a walker of software.
    pub(crate) fn words(&self) -> &impl TableWords {
        &self.tables
    }

    /// Maps a contiguous buffer for the device by
    /// [`map_single`](dmaspan::dma::Device::map_single).
    ///
    /// # Errors
    ///
    /// Those of the DMA API, with nothing mapped.
    #[inline]
    pub(crate) fn map_single(
        &self,
        piece: &Piece,
        direction: Direction,
    ) -> Result<Mapped<F, P>, Error> {
        let memory = Unreached::Piece(*piece);
        self.device.map_single(memory, direction).map(Mapped).map_err(|refused| refused.error)
    }

    /// Ends a mapping by [`unmap`](dmaspan::dma::Device::unmap).
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another one of these, which stays.
    #[inline]
    pub(crate) fn unmap(&self, mapped: Mapped<F, P>) -> Result<(), Error> {
        self.device.unmap(mapped.0).map(|_| ()).map_err(|failed| failed.error)
    }

    /// Maps a list for the device by [`map_list`](dmaspan::dma::Device::map_list), which writes
    /// what the device would be given to the beginning of `segments`.
    ///
    /// # Errors
    ///
    /// Those of the DMA API, with nothing mapped and nothing written.
    #[inline]
    pub(crate) fn map_list(
        &self,
        pieces: &Arc<[Piece]>,
        direction: Direction,
        segments: &mut [Segment],
    ) -> Result<MappedList<F, P>, Error> {
        let memory = Unreached::List(Arc::clone(pieces));
        let mapped = self.device.map_list(memory, direction, segments);
        mapped.map(MappedList).map_err(|refused| refused.error)
    }

    /// Ends a mapping by [`unmap_list`](dmaspan::dma::Device::unmap_list).
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another one of these, which stays.
    #[inline]
    pub(crate) fn unmap_list(&self, mapped: MappedList<F, P>) -> Result<(), Error> {
        self.device.unmap_list(mapped.0).map(|_| ()).map_err(|failed| failed.error)
    }

    /// Who maps and unmaps by a call to the table for each leaf, on one thread. In lazy mode up to
    /// `entries` unmaps wait; the IOVAs that wait with one caller are not to be had by another.
    pub(crate) fn caller(&self, entries: usize) -> Caller<'_, F, P> {
        Caller { dma: self, entries, gather: None, iovas: Vec::new(), since: 0 }
    }

    /// Syncs what was unmapped lazily by [`unmap`](Self::unmap) and
    /// [`unmap_list`](Self::unmap_list), on all threads.
    ///
    /// # Errors
    ///
    /// None: hardware that does not exist does not fail.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        self.domain.flush().map_err(|source| quarantined(self.domain.iovas().aperture(), source))
    }

    /// Whether everything was given back: nothing waits for a sync, and all IOVAs are free. They
    /// are not any more afterwards.
    ///
    /// # Errors
    ///
    /// What stands in the way, as [`Space::reserve`](dmaspan::iommu::iova::Space::reserve) says it.
    pub(crate) fn check_all_free(&mut self) -> Result<(), Error> {
        let iovas = self.domain.iovas();
        Ok(iovas.reserve(iovas.aperture())?)
    }

    /// The largest leaf that one entry can be at `addr` with so many bytes left (`iommu_pgsize` of
    /// drivers/iommu/iommu.c).
    #[inline]
    fn leaf(&self, addr: u64, left: u64) -> u64 {
        let fit = self.entry_sizes & lg2::mask(lg2::floor(left) + 1);
        lg2::size(lg2::floor(fit & lg2::mask((addr.trailing_zeros() + 1).min(63))))
    }

    /// Calls `each` with the place, the address and the size of the leaves of pieces that lie one
    /// behind the other from `iova` on, the largest that fit, up to `len` bytes; how many bytes it
    /// came to, and the error that ended it.
    #[inline]
    fn for_leaves(
        &self,
        iova: Iova,
        pieces: &[Piece],
        len: u64,
        mut each: impl FnMut(Iova, PhysAddr, u64) -> Result<(), Error>,
    ) -> (u64, Result<(), Error>) {
        let mut done = 0;
        for &Piece { span, .. } in pieces {
            let (mut paddr, mut left) = (span.paddr(), span.len());
            while left > 0 && done < len {
                let at = iova.wrapping_add(done);
                let size = self.leaf(at.get() | paddr.get(), left);
                if let Err(error) = each(at, paddr, size) {
                    return (done, Err(error));
                }
                (paddr, left, done) = (paddr.wrapping_add(size), left - size, done + size);
            }
        }
        (done, Ok(()))
    }

    /// Unmaps the leaves of the first `len` bytes of pieces, a call for each, and says how many
    /// calls it took.
    #[inline]
    fn unmap_leaves(
        &self,
        gather: &mut Gather<ArenaList>,
        iovas: IovaRange,
        pieces: &[Piece],
        len: u64,
    ) -> Result<usize, Error> {
        let owned = self.own_pages(iovas);
        let mut calls = 0;
        let each = |iova, _, size| {
            let unmapped = owned.unmap_pages(iova, size, 1);
            if let Err(retired) = gather.add(unmapped.retired) {
                self.free_tables(retired);
            }
            calls += 1;
            unmapped.result.map_err(refused)
        };
        self.for_leaves(iovas.start(), pieces, len, each).1?;
        Ok(calls)
    }

    #[expect(unsafe_code, reason = "the IOVAs are divided among callers by their space")]
    #[inline]
    fn own_pages(&self, iovas: IovaRange) -> Owned<'_, F, Arena> {
        // SAFETY: all callers hold the IOVAs, which no other one gets meanwhile.
        unsafe { self.pages.claim(iovas) }
    }

    #[expect(unsafe_code, reason = "nothing walks these tables")]
    fn free_tables(&self, retired: Retired<ArenaList>) {
        // SAFETY: 1. Nothing walks the table. 2. What was retired is of it: from `unmap_leaves`.
        unsafe { self.pages.free(retired) }
    }

    #[inline]
    fn free(&self, iovas: Iovas) {
        // Of this space: a `Caller` keeps to the domain that made it.
        let _ = self.domain.iovas().free(iovas);
    }
}

/// Maps and unmaps buffers as Linux's DMA API did before 5.15: IOVAs allocated once, a call to the
/// table for each leaf, the largest that fits, to map and to unmap it, a command for each of those
/// unmaps, and one sync for all. In lazy mode unmaps wait here, as long as in the domain's own
/// queue; dropped, what waits is lost.
#[derive(Debug)]
pub(crate) struct Caller<'d, F: Format, P: Platform> {
    dma: &'d UnwalkedDma<F, P>,
    entries: usize,
    gather: Option<Gather<ArenaList>>,
    iovas: Vec<Iovas>,
    since: u64,
}

impl<'d, F: Format, P: Platform> Caller<'d, F, P> {
    /// Maps pieces, one behind the other, each of whole pages.
    ///
    /// # Errors
    ///
    /// Those of the DMA API, with nothing mapped.
    #[inline]
    pub(crate) fn map<'m>(
        &self,
        pieces: &'m [Piece],
        direction: Direction,
    ) -> Result<ByCalls<'d, 'm, F, P>, Error> {
        let dma = self.dma;
        let bytes = pieces.iter().fold(0u64, |sum, piece| sum.saturating_add(piece.span.len()));
        let limit = Iova::new(dma.device.config().limits.last);
        let request = Request { bytes, align: Align::Natural, limit };
        let iovas = dma.domain.iovas().alloc(request)?;
        let prot = direction.prot(Coherency::Coherent);
        let range = iovas.range();
        let owned = dma.own_pages(range);
        let (done, mapped) = dma.for_leaves(range.start(), pieces, bytes, |iova, paddr, size| {
            owned.map_pages(iova, paddr, size, 1, prot).1.map_err(refused)
        });
        match mapped {
            Ok(()) => Ok(ByCalls { dma, pieces, iovas }),
            Err(error) => {
                let mut gather = dma.domain.domain().gather();
                dma.unmap_leaves(&mut gather, range, pieces, done)?;
                dma.free(iovas);
                Err(error)
            }
        }
    }

    /// Ends a mapping.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another domain, which stays.
    #[inline]
    pub(crate) fn unmap(&mut self, mapped: ByCalls<'_, '_, F, P>) -> Result<(), Error> {
        let dma = self.dma;
        if !std::ptr::eq(dma, mapped.dma) {
            return Err(Error::Foreign { addr: mapped.addr() });
        }
        let ByCalls { pieces, iovas, .. } = mapped;
        let mut gather = self.gather.take().unwrap_or_else(|| dma.domain.domain().gather());
        let calls = dma.unmap_leaves(&mut gather, iovas.range(), pieces, u64::MAX)?;
        match dma.flush {
            Flush::Strict => {
                sync(&gather, calls);
                dma.free(iovas);
                Ok(())
            }
            Flush::Lazy => {
                self.gather = Some(gather);
                self.wait(iovas);
                Ok(())
            }
        }
    }

    /// Syncs what waits, and gives its IOVAs back.
    pub(crate) fn flush(&mut self) {
        if let Some(gather) = self.gather.take() {
            // A queue is flushed by one command for everything.
            sync(&gather, 1);
        }
        self.iovas.drain(..).for_each(|iovas| self.dma.free(iovas));
    }

    fn wait(&mut self, iovas: Iovas) {
        let bounds = flush_queue::Config::default();
        let now = self.dma.domain.iovas().platform().now();
        if self.iovas.is_empty() {
            self.iovas.reserve(self.entries);
            self.since = now;
        }
        self.iovas.push(iovas);
        let age = now.saturating_sub(self.since);
        if self.iovas.len() >= self.entries || age >= bounds.max_age {
            self.flush();
        }
    }
}

/// Tells hardware, by so many commands. Tables that were retired were freed on the way.
#[inline]
fn sync(gather: &Gather<ArenaList>, commands: usize) {
    black_box(gather.invalidation());
    count(commands, 1);
}

fn refused(error: io_pgtable::Error) -> Error {
    Error::Domain(error.into())
}

fn quarantined(range: IovaRange, source: HardwareError) -> Error {
    Error::Quarantined { range, source }
}

#[cfg(test)]
mod tests;
