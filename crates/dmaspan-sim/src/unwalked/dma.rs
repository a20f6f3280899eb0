//! The DMA API over tables that no hardware walks: for measuring what mapping costs.
//!
//! All that a driver's mapping goes through is real: IOVAs, tables, gathers, flush queue and
//! release. There is no device, so nothing is reached by what is mapped, and whoever maps here need
//! promise nothing about the memory. Invalidations are counted and otherwise done at once.

use std::cell::Cell;
use std::hint::black_box;
use std::sync::Arc;

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Error, Flush, Mapping, NoPool, Piece,
};
use dmaspan::io_pgtable::{self, Format, Owned, PageTable, Retired};
use dmaspan::iommu::flush_queue;
use dmaspan::iommu::iova::{Align, Iovas, Request};
use dmaspan::iommu::{Domain, Gather, HardwareError, Invalidation, IommuOps, Scope};
use dmaspan::{
    Coherency, Direction, DmaAddr, Iova, IovaRange, PhysAddr, Platform, Prot, Span, SpanBuf, lg2,
};

use crate::arena::{Arena, ArenaList};
use crate::walker::TableWords;

/// How many ranges an invalidation names before it is one of everything, as that of a driver with
/// range commands might.
const MAX_RANGES: usize = 8;

/// What hardware would have been told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Invalidation commands: one for each range, or one for everything.
    pub commands: u64,
    /// Waits until they were done.
    pub syncs: u64,
}

impl Told {
    /// By the calling thread, through any [`UnwalkedDma`], since the thread began: what a thread
    /// does costs others nothing.
    pub fn by_this_thread() -> Self {
        TOLD.get()
    }

    /// What was told after `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
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
struct Untold;

#[expect(unsafe_code, reason = "nothing is promised where there is no device")]
// SAFETY: no device of the domain uses any translation, ever: there is none.
unsafe impl IommuOps for Untold {
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

    fn root_changed(&self, _: &dyn Fn() -> (PhysAddr, u32)) -> Result<(), HardwareError> {
        Ok(())
    }
}

/// Memory that no device will ever reach.
#[derive(Debug)]
struct Unreached(Piece);

#[expect(unsafe_code, reason = "no device reaches the memory")]
// SAFETY: the type is private, and only domains whose hooks are `Untold` map it: no device uses
// them, so nothing is read or written through the mapping whatever the memory is used for.
unsafe impl DmaMemory for Unreached {
    #[inline(always)]
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.0)
    }
}

type Dma<F, P> = DmaDomain<F, Arena, Untold, P, Unreached>;

/// A device's way to memory, without the device.
#[derive(Debug)]
pub struct UnwalkedDma<F: Format, P: Platform> {
    device: Device<Dma<F, P>>,
    domain: Arc<Dma<F, P>>,
    /// What is mapped page by page.
    pages: PageTable<F, Arena>,
    tables: Arena,
    /// The leaves that are one entry.
    entry_sizes: u64,
    flush: Flush,
}

/// A buffer mapped by one call.
#[derive(Debug)]
#[must_use = "a buffer that is dropped stays mapped"]
pub struct Mapped<F: Format, P: Platform>(Mapping<Dma<F, P>>);

impl<F: Format, P: Platform> Mapped<F, P> {
    /// Where the device would find it.
    pub fn addr(&self) -> DmaAddr {
        self.0.addr()
    }
}

/// A buffer that a [`Caller`] mapped.
#[derive(Debug)]
#[must_use = "a buffer that is dropped stays mapped"]
pub struct ByCalls<'d, F: Format, P: Platform> {
    dma: &'d UnwalkedDma<F, P>,
    iovas: Iovas,
}

impl<F: Format, P: Platform> ByCalls<'_, F, P> {
    /// Where the device would find it.
    pub fn addr(&self) -> DmaAddr {
        DmaAddr::new(self.iovas.range().start().get())
    }
}

/// How a buffer is divided into calls to the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// One for each leaf, the largest that fits, as Linux before 5.15: to map it, to unmap it, and
    /// to tell hardware.
    EachLeaf,
    /// One for the whole buffer, and one range for hardware.
    One,
}

impl<F: Format, P: Platform> UnwalkedDma<F, P> {
    /// An empty domain for one device, with room for tables of `bytes` bytes together from `base`
    /// on (see [`Arena::new`]). Of the same format twice: what is mapped [for each
    /// leaf](Calls::EachLeaf) has a table of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Domain`] where the root has no room, or would lie where the format cannot reach;
    /// [`Error::Iova`] for an aperture without IOVAs; [`Error::Mask`] and [`Error::Limit`] for a
    /// device that cannot be served.
    pub fn new(
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
    pub fn format(&self) -> &F {
        self.domain.domain().format()
    }

    /// The physical address of the root table.
    pub fn root(&self) -> PhysAddr {
        self.domain.domain().root()
    }

    /// The root of the table of what is mapped [for each leaf](Calls::EachLeaf).
    pub fn pages_root(&self) -> PhysAddr {
        self.pages.root()
    }

    /// The tables, for a walker of software.
    pub fn words(&self) -> &impl TableWords {
        &self.tables
    }

    /// Maps a contiguous buffer for the device by
    /// [`map_single`](dmaspan::dma::Device::map_single).
    ///
    /// # Errors
    ///
    /// Those of the DMA API, with nothing mapped.
    #[inline]
    pub fn map_single(&self, span: Span, direction: Direction) -> Result<Mapped<F, P>, Error> {
        let mapping = self.device.map_single(Unreached(Piece::memory(span)), direction);
        mapping.map(Mapped).map_err(|refused| refused.error)
    }

    /// Ends a mapping by [`unmap`](dmaspan::dma::Device::unmap).
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`] for a mapping of another one of these, which stays.
    #[inline]
    pub fn unmap(&self, mapped: Mapped<F, P>) -> Result<(), Error> {
        self.device.unmap(mapped.0).map(|_| ()).map_err(|failed| failed.error)
    }

    /// Who maps and unmaps by calls of its own to the table, on one thread. In lazy mode up to
    /// `entries` unmaps wait; the IOVAs that wait with one caller are not to be had by another.
    pub fn caller(&self, calls: Calls, entries: usize) -> Caller<'_, F, P> {
        Caller { dma: self, calls, entries, gather: None, iovas: Vec::new(), since: 0 }
    }

    /// Syncs what was unmapped lazily by [`unmap`](Self::unmap), on all threads.
    ///
    /// # Errors
    ///
    /// None: hardware that does not exist does not fail.
    pub fn flush(&self) -> Result<(), Error> {
        self.domain.flush().map_err(|source| quarantined(self.domain.iovas().aperture(), source))
    }

    /// Whether everything was given back: nothing waits for a sync, and all IOVAs are free. They
    /// are not any more afterwards.
    ///
    /// # Errors
    ///
    /// What stands in the way, as [`Space::reserve`](dmaspan::iommu::iova::Space::reserve) says it.
    pub fn check_all_free(&mut self) -> Result<(), Error> {
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

    /// Maps spans, a call for each leaf; how far that came, and the error that ended it.
    #[inline]
    fn map_leaves(&self, iovas: IovaRange, spans: &[Span], prot: Prot) -> (u64, Result<(), Error>) {
        let owned = self.own_pages(iovas);
        let mut done = 0;
        for span in spans {
            let (mut paddr, mut left) = (span.paddr(), span.len());
            while left > 0 {
                let iova = iovas.start().wrapping_add(done);
                let size = self.leaf(iova.get() | paddr.get(), left);
                if let Err(error) = owned.map_pages(iova, paddr, size, 1, prot).1 {
                    return (done, Err(refused(error)));
                }
                (paddr, left, done) = (paddr.wrapping_add(size), left - size, done + size);
            }
        }
        (done, Ok(()))
    }

    /// Unmaps `len` bytes, a call for each leaf that may be there, and says how many calls it took.
    #[inline]
    fn unmap_leaves(
        &self,
        gather: &mut Gather<ArenaList>,
        iovas: IovaRange,
        len: u64,
    ) -> Result<usize, Error> {
        let owned = self.own_pages(iovas);
        let (mut done, mut calls) = (0, 0);
        while done < len {
            let iova = iovas.start().wrapping_add(done);
            let size = self.leaf(iova.get(), len - done);
            let unmapped = owned.unmap_pages(iova, size, 1);
            if let Err(retired) = gather.add(unmapped.retired) {
                self.free_tables(retired);
            }
            unmapped.result.map_err(refused)?;
            done += size;
            calls += 1;
        }
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

    #[expect(unsafe_code, reason = "maps what no device reaches")]
    #[inline]
    fn map_call(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Error> {
        // SAFETY: 1. The IOVAs are this call's alone: they were allocated for it, or it was refused
        // here before. 2. No device reaches the memory.
        let mapped = unsafe { self.domain.domain().map_spans(iova, spans, prot) };
        mapped.map_err(|failed| failed.error.into())
    }

    #[expect(unsafe_code, reason = "unmaps what the caller owns")]
    #[inline]
    fn unmap_call(&self, range: IovaRange) -> Result<Gather<ArenaList>, Error> {
        let mut room = SpanBuf::room::<16>();
        let mut spans = SpanBuf::new(&mut room);
        let domain = self.domain.domain();
        // SAFETY: the range is of IOVAs that the caller holds.
        let (mut gather, mut rest) = unsafe { domain.unmap(range, &mut spans)? }.into_gather();
        while let Some(more) = rest.take() {
            spans.clear();
            // SAFETY: as above.
            let (next, left) = unsafe { domain.resume(more, &mut spans) }.into_gather();
            self.merge(&mut gather, next);
            rest = left;
        }
        Ok(gather)
    }

    #[expect(unsafe_code, reason = "both gathers are of the domain")]
    #[inline]
    fn merge(&self, gather: &mut Gather<ArenaList>, more: Gather<ArenaList>) {
        // SAFETY: both are of this domain: a `Caller` keeps to the one that made it.
        unsafe { self.domain.domain().merge(gather, more) }
    }

    #[expect(unsafe_code, reason = "no hardware has anything to forget")]
    #[inline]
    fn sync(&self, gather: Gather<ArenaList>) -> Result<(), Error> {
        // SAFETY: no hardware walks these tables, so nothing is freed that is in use.
        let synced = unsafe { self.domain.domain().sync(gather) };
        let aperture = self.domain.iovas().aperture();
        synced.map(|_| ()).map_err(|failed| quarantined(aperture, failed.error))
    }

    #[inline]
    fn free(&self, iovas: Iovas) {
        // Of this space: a `Caller` keeps to the domain that made it.
        let _ = self.domain.iovas().free(iovas);
    }
}

/// Maps and unmaps buffers as Linux's DMA API does over a table that is [called](Calls) so: IOVAs
/// allocated once, calls, and one sync for all calls of an unmap. In lazy mode unmaps wait here,
/// as long as in the domain's own queue; dropped, what waits is lost.
#[derive(Debug)]
pub struct Caller<'d, F: Format, P: Platform> {
    dma: &'d UnwalkedDma<F, P>,
    calls: Calls,
    entries: usize,
    gather: Option<Gather<ArenaList>>,
    iovas: Vec<Iovas>,
    since: u64,
}

impl<'d, F: Format, P: Platform> Caller<'d, F, P> {
    /// Maps spans, one behind the other.
    ///
    /// # Errors
    ///
    /// Those of the DMA API, with nothing mapped.
    #[inline]
    pub fn map(&self, spans: &[Span], direction: Direction) -> Result<ByCalls<'d, F, P>, Error> {
        let dma = self.dma;
        let bytes = spans.iter().fold(0u64, |bytes, span| bytes.saturating_add(span.len()));
        let limit = Iova::new(dma.device.config().limits.last);
        let request = Request { bytes, align: Align::Natural, limit };
        let iovas = dma.domain.iovas().alloc(request)?;
        let prot = direction.prot(Coherency::Coherent);
        let range = iovas.range();
        let mapped = match self.calls {
            Calls::One => dma.map_call(range.start(), spans, prot),
            Calls::EachLeaf => {
                let (done, mapped) = dma.map_leaves(range, spans, prot);
                if mapped.is_err() {
                    let mut gather = dma.domain.domain().gather();
                    dma.unmap_leaves(&mut gather, range, done)?;
                }
                mapped
            }
        };
        match mapped {
            Ok(()) => Ok(ByCalls { dma, iovas }),
            Err(error) => {
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
    pub fn unmap(&mut self, mapped: ByCalls<'_, F, P>) -> Result<(), Error> {
        let dma = self.dma;
        if !std::ptr::eq(dma, mapped.dma) {
            return Err(Error::Foreign { addr: mapped.addr() });
        }
        let ByCalls { iovas, .. } = mapped;
        let range = iovas.range();
        let mut gather = self.gather.take().unwrap_or_else(|| dma.domain.domain().gather());
        let commands = match self.calls {
            Calls::One => {
                dma.merge(&mut gather, dma.unmap_call(range)?);
                0
            }
            Calls::EachLeaf => {
                let len = range.checked_len().unwrap_or(u64::MAX);
                dma.unmap_leaves(&mut gather, range, len)?
            }
        };
        match dma.flush {
            Flush::Strict => {
                self.sync(gather, commands)?;
                dma.free(iovas);
                Ok(())
            }
            Flush::Lazy => {
                self.gather = Some(gather);
                self.wait(iovas)
            }
        }
    }

    /// Syncs what waits, and gives its IOVAs back.
    ///
    /// # Errors
    ///
    /// None: hardware that does not exist does not fail.
    pub fn flush(&mut self) -> Result<(), Error> {
        if let Some(gather) = self.gather.take() {
            // A queue is flushed by one command for everything.
            self.sync(gather, 1)?;
        }
        self.iovas.drain(..).for_each(|iovas| self.dma.free(iovas));
        Ok(())
    }

    /// Tells hardware, where each call has a command of its own by so many of them.
    #[inline]
    fn sync(&self, gather: Gather<ArenaList>, commands: usize) -> Result<(), Error> {
        match self.calls {
            Calls::One => self.dma.sync(gather),
            Calls::EachLeaf => {
                black_box(gather.invalidation());
                count(commands, 1);
                Ok(())
            }
        }
    }

    fn wait(&mut self, iovas: Iovas) -> Result<(), Error> {
        let bounds = flush_queue::Config::default();
        let now = self.dma.domain.iovas().platform().now();
        if self.iovas.is_empty() {
            self.iovas.reserve(self.entries);
            self.since = now;
        }
        self.iovas.push(iovas);
        let age = now.saturating_sub(self.since);
        if self.iovas.len() < self.entries && age < bounds.max_age {
            return Ok(());
        }
        self.flush()
    }
}

fn refused(error: io_pgtable::Error) -> Error {
    Error::Domain(error.into())
}

fn quarantined(range: IovaRange, source: HardwareError) -> Error {
    Error::Quarantined { range, source }
}

#[cfg(test)]
mod tests;
