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
use dmaspan::io_pgtable::{self, Arena, ArenaList, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::flush_queue;
use dmaspan::iommu::iova::{Align, Iovas, Request};
use dmaspan::iommu::{Domain, Gather, HardwareError, Invalidation, IommuOps, Scope};
use dmaspan::{Coherency, Direction, DmaAddr, Iova, IovaRange, PhysAddr, Platform, Promise, lg2};
use dmaspan_sim::walker::Checked as _;
use dmaspan_sim::walker::arm_lpae::{ArmLpaeS1Walker, ArmS1WalkRegisters};
use dmaspan_sim::walker::{Access, Walker};

use super::{Unwalked, entry_sizes};
use crate::failed::Failed;

/// How many ranges an invalidation names before it is one of everything, as that of a driver with
/// range commands might.
pub(crate) const MAX_RANGES: usize = 8;

/// Bits of IOVAs and of physical addresses of the tables.
pub(crate) const ADDRESS_BITS: u32 = 48;

/// Where tables lie: any address, since no hardware looks there.
const TABLES_AT: PhysAddr = PhysAddr::new(1 << 40);

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
pub(crate) struct Untold;

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
pub(crate) struct Unreached(Pieces);

#[derive(Debug)]
enum Pieces {
    One(Piece),
    List(Arc<[Piece]>),
}

#[expect(unsafe_code, reason = "no device reaches the memory")]
// SAFETY: only this module makes any, and only domains whose hooks are `Untold` map it: no device
// uses them, so nothing is read or written through the mapping whatever the memory is used for. The
// pieces do not change.
unsafe impl DmaMemory for Unreached {
    #[inline(always)]
    fn pieces(&self) -> &[Piece] {
        match &self.0 {
            Pieces::One(piece) => slice::from_ref(piece),
            Pieces::List(pieces) => pieces,
        }
    }
}

type Dma<P> = DmaDomain<ArmLpaeS1<12>, Arena, Untold, P, Unreached>;

/// The part that maps: a [`Caller`] maps by calls of its own, each for a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MappedBy {
    Calls,
    Device,
}

/// A device's way to memory, without the device.
#[derive(Debug)]
pub(crate) struct UnwalkedDma<P: Platform> {
    device: Device<Dma<P>>,
    domain: Arc<Dma<P>>,
    /// What is mapped page by page.
    pages: Unwalked<ArmLpaeS1<12>>,
    /// The tables that are mapped in.
    tables: Arena,
    /// The leaves that are one entry.
    entry_sizes: u64,
    flush: Flush,
    walker: ArmLpaeS1Walker,
}

impl<P: Platform> UnwalkedDma<P> {
    /// An empty domain for one device, with room for tables of `bytes` bytes together, in which
    /// nobody else maps than `by` says: what a [`Caller`] maps has a table of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Domain`] where the root has no room; [`Error::Iova`] for an aperture without IOVAs;
    /// [`Error::Mask`] and [`Error::Limit`] for a device that cannot be served.
    pub(crate) fn new(
        by: MappedBy,
        bytes: u64,
        (dma, device): (DmaConfig, DeviceConfig),
        platform: P,
    ) -> Result<Self, Failed> {
        let format = ArmLpaeS1::new(ArmLpaeS1Config::new(ADDRESS_BITS, ADDRESS_BITS))?;
        // Where nobody maps there is only a root.
        let room = |mapped| if by == mapped { bytes } else { 1 << 20 };
        let arena = Arena::new(TABLES_AT, room(MappedBy::Device));
        let table = PageTable::new(format.clone(), arena).map_err(refused)?;
        let pages = Unwalked::new(format, TABLES_AT, room(MappedBy::Calls)).map_err(refused)?;
        let walked = if by == MappedBy::Calls { &pages.table } else { &table };
        let tables = walked.memory().clone();
        let registers = walked.format().registers(walked.root());
        let (ttbr, tcr, mair) = (registers.ttbr, registers.tcr, registers.mair);
        let walker =
            ArmLpaeS1Walker::new(ArmS1WalkRegisters { ttbr, tcr, mair, ..Default::default() })?;
        let entry_sizes = entry_sizes(pages.table.format());
        let domain = Domain::new(table, Untold).map_err(Error::from)?;
        let domain = Arc::new(DmaDomain::new(domain, dma, platform)?);
        let device = Device::new(Arc::clone(&domain), NoPool, device)?;
        Ok(Self { device, domain, pages, tables, entry_sizes, flush: dma.flush, walker })
    }

    /// Where the device would find an address.
    pub(crate) fn found(&self, addr: DmaAddr, access: Access) -> Option<PhysAddr> {
        let found = self.walker.walk(&self.tables, Iova::new(addr.get()), access);
        found.ok().map(|translation| translation.paddr)
    }

    /// Whether nothing is left: no leaf is in the tables, nothing waits for a sync, and all IOVAs
    /// are free. They are not any more afterwards.
    ///
    /// # Errors
    ///
    /// What stands in the way, as [`Space::reserve`](dmaspan::iommu::iova::Space::reserve) says it.
    pub(crate) fn check_empty(&mut self) -> Result<(), Failed> {
        let whole = IovaRange::from_len(Iova::new(0), 1 << ADDRESS_BITS)?;
        let census = self.walker.census(&self.tables, whole);
        let leaves: u64 = census.map_err(Failed::at("the tables are damaged"))?.values().sum();
        if leaves > 0 {
            return Err(Failed::new(format_args!(
                "{leaves} leaves are left in the tables after all unmaps"
            )));
        }
        let iovas = self.domain.iovas();
        iovas.reserve(iovas.aperture()).map_err(Failed::at("not all IOVAs were given back"))
    }

    /// Syncs what the device unmapped lazily, on all threads.
    fn flush(&self) -> Result<(), Error> {
        let range = self.domain.iovas().aperture();
        self.domain.flush().map_err(|source| Error::Quarantined { range, source })
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
        let region = self.pages.claim(iovas);
        let mut calls = 0;
        let each = |iova, _, size| {
            let unmapped = region.owned().unmap_pages(iova, size, 1);
            if let Err(retired) = gather.add(unmapped.retired) {
                region.free(retired);
            }
            calls += 1;
            unmapped.result.map_err(refused)
        };
        self.for_leaves(iovas.start(), pieces, len, each).1?;
        Ok(calls)
    }

    #[inline]
    fn free(&self, iovas: Iovas) {
        // Of this space: a `Caller` keeps to the domain that made it.
        let _ = self.domain.iovas().free(iovas);
    }
}

/// How one thread maps and unmaps a buffer.
pub(crate) trait Mapper: Send {
    /// A buffer that is mapped. Dropped, it stays so.
    type Mapped;

    /// Maps it, or nothing.
    fn map(&mut self) -> Result<Self::Mapped, Error>;

    /// Ends a mapping; one of another domain is [`Error::Foreign`] and stays.
    fn unmap(&mut self, mapped: Self::Mapped) -> Result<(), Error>;

    /// Where the device would find its first byte; the others follow.
    fn addr(&self, mapped: &Self::Mapped) -> DmaAddr;

    /// Syncs what waits.
    fn flush(&mut self) -> Result<(), Error>;
}

/// By [`map_single`](dmaspan::dma::Device::map_single) and
/// [`unmap`](dmaspan::dma::Device::unmap).
#[derive(Debug)]
pub(crate) struct Single<'d, P: Platform> {
    pub(crate) dma: &'d UnwalkedDma<P>,
    pub(crate) piece: &'d Piece,
    pub(crate) direction: Direction,
}

impl<P: Platform> Mapper for Single<'_, P> {
    type Mapped = Mapping<Dma<P>>;

    #[inline]
    fn map(&mut self) -> Result<Self::Mapped, Error> {
        let memory = Unreached(Pieces::One(*self.piece));
        self.dma.device.map_single(memory, self.direction).map_err(|refused| refused.error)
    }

    #[inline]
    fn unmap(&mut self, mapped: Self::Mapped) -> Result<(), Error> {
        self.dma.device.unmap(mapped).map(drop).map_err(|failed| failed.error)
    }

    fn addr(&self, mapped: &Self::Mapped) -> DmaAddr {
        mapped.addr()
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.dma.flush()
    }
}

/// By [`map_list`](dmaspan::dma::Device::map_list) and
/// [`unmap_list`](dmaspan::dma::Device::unmap_list).
#[derive(Debug)]
pub(crate) struct List<'d, P: Platform> {
    pub(crate) dma: &'d UnwalkedDma<P>,
    pub(crate) pieces: &'d Arc<[Piece]>,
    /// What the device is given: one for each piece is room enough.
    pub(crate) segments: Vec<Segment>,
    pub(crate) direction: Direction,
}

impl<P: Platform> Mapper for List<'_, P> {
    type Mapped = ListMapping<Dma<P>>;

    #[inline]
    fn map(&mut self) -> Result<Self::Mapped, Error> {
        let memory = Unreached(Pieces::List(Arc::clone(self.pieces)));
        let mapped = self.dma.device.map_list(memory, self.direction, &mut self.segments);
        mapped.map_err(|refused| refused.error)
    }

    #[inline]
    fn unmap(&mut self, mapped: Self::Mapped) -> Result<(), Error> {
        self.dma.device.unmap_list(mapped).map(drop).map_err(|failed| failed.error)
    }

    fn addr(&self, _: &Self::Mapped) -> DmaAddr {
        // Pieces of whole pages leave no gaps between the segments.
        self.segments.first().map_or(DmaAddr::new(0), |segment| segment.addr)
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.dma.flush()
    }
}

/// A buffer that a [`Caller`] mapped.
#[derive(Debug)]
pub(crate) struct ByCalls<'d, P: Platform> {
    dma: &'d UnwalkedDma<P>,
    pieces: &'d [Piece],
    iovas: Iovas,
}

/// Maps and unmaps buffers as Linux's DMA API did before 5.15: IOVAs allocated once, a call to the
/// table for each leaf, the largest that fits, to map and to unmap it, a command for each of those
/// unmaps, and one sync for all. In lazy mode unmaps wait here, as long as in the domain's own
/// queue; dropped, what waits is lost.
#[derive(Debug)]
pub(crate) struct Caller<'d, P: Platform> {
    dma: &'d UnwalkedDma<P>,
    /// They are mapped one behind the other, each of whole pages.
    pieces: &'d [Piece],
    direction: Direction,
    entries: usize,
    gather: Option<Gather<ArenaList>>,
    iovas: Vec<Iovas>,
    since: u64,
}

impl<'d, P: Platform> Caller<'d, P> {
    /// One that maps these pieces. In lazy mode up to `entries` unmaps wait; the IOVAs that wait
    /// with one caller are not to be had by another.
    pub(crate) fn new(
        dma: &'d UnwalkedDma<P>,
        pieces: &'d [Piece],
        direction: Direction,
        entries: usize,
    ) -> Self {
        Self { dma, pieces, direction, entries, gather: None, iovas: Vec::new(), since: 0 }
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
        if self.iovas.len() >= self.entries || age >= bounds.max_age {
            self.flush()?;
        }
        Ok(())
    }
}

impl<'d, P: Platform> Mapper for Caller<'d, P> {
    type Mapped = ByCalls<'d, P>;

    #[inline]
    fn map(&mut self) -> Result<ByCalls<'d, P>, Error> {
        let (dma, pieces) = (self.dma, self.pieces);
        let bytes = pieces.iter().fold(0u64, |sum, piece| sum.saturating_add(piece.span.len()));
        let limit = Iova::new(dma.device.config().limits.last);
        let request = Request { bytes, align: Align::Natural, limit };
        let iovas = dma.domain.iovas().alloc(request)?;
        let prot = self.direction.prot(Coherency::Coherent);
        let range = iovas.range();
        let region = dma.pages.claim(range);
        let (done, mapped) = dma.for_leaves(range.start(), pieces, bytes, |iova, paddr, size| {
            region.owned().map_pages(iova, paddr, size, 1, prot).1.map_err(refused)
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

    #[inline]
    fn unmap(&mut self, mapped: ByCalls<'d, P>) -> Result<(), Error> {
        let dma = self.dma;
        if !std::ptr::eq(dma, mapped.dma) {
            return Err(Error::Foreign { addr: self.addr(&mapped) });
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
                self.wait(iovas)
            }
        }
    }

    fn addr(&self, mapped: &ByCalls<'d, P>) -> DmaAddr {
        DmaAddr::new(mapped.iovas.range().start().get())
    }

    fn flush(&mut self) -> Result<(), Error> {
        if let Some(gather) = self.gather.take() {
            // A queue is flushed by one command for everything.
            sync(&gather, 1);
        }
        self.iovas.drain(..).for_each(|iovas| self.dma.free(iovas));
        Ok(())
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

#[cfg(test)]
mod tests;
