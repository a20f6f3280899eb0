//! [`DmaDomain`] is a domain with its own IOVAs and flush queue, into which
//! [`Device`](super::Device) maps buffers.

use core::mem::ManuallyDrop;
use core::{fmt, iter};

use super::any::AnyMemory;
use super::bounce::{BouncePool, NoPool};
use super::error::Error;
use super::memory::DmaMemory;
use super::queued::{QueuedMapping, QueuedMemory};
use super::reach::Typed;
use super::single::{Refused, Unmapped};
use crate::addr::{Iova, PhysAddr};
use crate::io_pgtable::{Arena, Format, TableMemory};
use crate::iommu::flush_queue::{self, FlushQueue, Flusher};
use crate::iommu::iova::{self, Align, Iovas, Request, Space};
use crate::iommu::soft::SoftIommu;
use crate::iommu::{Domain, Event, HardwareError, IommuOps, MapFailed, SyncFailed};
use crate::label::Caller;
use crate::platform::{OneThread, Platform};
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::Span;

/// When hardware is told about an unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flush {
    /// At once: when the unmap returns, no device reaches the memory.
    Strict,
    /// Together with later ones, within the bound of the domain's flush queue.
    Lazy,
}

/// The most CPUs that a domain can have caches and queues for.
const MAX_CPUS: usize = 1 << 16;

/// Says how a domain serves the DMA API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaConfig {
    /// How many CPUs have caches and queues of their own, up to 65,536; 0 is taken for 1. Those
    /// with higher numbers share them.
    pub cpus: usize,
    /// How unmaps of mappings that do not say are flushed.
    pub flush: Flush,
    /// How lazy ones are.
    pub queue: flush_queue::Config,
}

impl DmaConfig {
    /// Strict, with caches for so many CPUs.
    pub fn new(cpus: usize) -> Self {
        Self { cpus, flush: Flush::Strict, queue: flush_queue::Config::default() }
    }
}

/// A [`Domain`], its IOVAs, and a queue of what waits for a sync.
///
/// `F`, `M` and `O` are the [`Domain`]'s, `P` is the platform, and `H` the memory that is mapped:
/// of any type, or an enum of the kinds that a driver has. A `DmaDomain<F>` alone is that of device
/// models in one thread.
///
/// Dropped, it releases all that waits, if hardware lets go; otherwise all of that leaks.
pub struct DmaDomain<F, M = Arena, O = SoftIommu<F, M>, P = OneThread, H = AnyMemory>
where
    F: Format,
    M: TableMemory<F::Word>,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    pub(super) queue: FlushQueue<P, M::List, QueuedMapping<H>>,
    domain: Domain<F, M, O>,
    iovas: Space<P>,
    flush: Flush,
}

impl<F, M, O, P, H> DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word>,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    /// Hands out the IOVAs of a domain that nobody else maps anything in.
    ///
    /// # Errors
    ///
    /// [`Error::Iova`] where the domain's aperture has none to hand out, [`Error::Limit`] for more
    /// CPUs or entries than a queue can have, and [`Error::NoQueue`] where there is no memory for
    /// it.
    pub fn new(domain: Domain<F, M, O>, config: DmaConfig, platform: P) -> Result<Self, Error>
    where
        O: IommuOps<Address = PhysAddr>,
    {
        let DmaConfig { cpus, flush, queue } = config;
        for (what, value, limit) in [
            ("CPUs", cpus, MAX_CPUS),
            ("entries of a flush queue", queue.entries, flush_queue::MAX_ENTRIES),
        ] {
            if value > limit {
                let count = |value| u64::try_from(value).unwrap_or(u64::MAX);
                return Err(Error::Limit { what, value: count(value), limit: count(limit) });
            }
        }
        let aperture = domain.geometry().aperture;
        let iovas = Space::new(aperture, F::GRANULE_LG2, cpus, platform)?;
        let entries = queue.entries;
        let queue = FlushQueue::new(cpus, queue, || domain.gather())
            .map_err(|_| Error::NoQueue { cpus, entries })?;
        Ok(Self { queue, domain, iovas, flush })
    }

    /// The domain. Nothing may be mapped in it but by this.
    pub fn domain(&self) -> &Domain<F, M, O> {
        &self.domain
    }

    /// The IOVAs, of which some can be [reserved](Space::reserve).
    pub fn iovas(&self) -> &Space<P> {
        &self.iovas
    }

    /// Flushes what waits for as long as the bound says, and tries what is in quarantine, all by
    /// one invalidation. For a timer.
    ///
    /// Returns when it is next to be called, as [`Platform::now`] counts; `None` where nothing
    /// waits. What is unmapped later is due no earlier than the bound after that, so a timer that
    /// sleeps for the bound then is in time.
    ///
    /// # Context
    ///
    /// May run in an interrupt: it waits for hardware, and for nobody else but for the quarantine's
    /// lock where there is something in it.
    ///
    /// # Errors
    ///
    /// [`HardwareError`]: what was due is in quarantine, and what was not waits.
    #[track_caller]
    pub fn expire(&self) -> Result<Option<u64>, HardwareError> {
        self.queue.expire(self.iovas.platform().now(), self)
    }

    /// Flushes everything that waits, what is in quarantine too, by one invalidation. When it
    /// returns successfully, no device uses what was unmapped before the call.
    ///
    /// What another thread is flushing has been synced then, too, but that thread may still be
    /// releasing it.
    ///
    /// # Context
    ///
    /// May wait for an unmap or a flush of another thread: not in an interrupt that may have
    /// interrupted one.
    ///
    /// # Errors
    ///
    /// [`HardwareError`]: what waited is in quarantine.
    #[track_caller]
    pub fn flush(&self) -> Result<(), HardwareError> {
        self.queue.flush(self)
    }

    /// Returns how many unmaps wait for a flush, and how many are in quarantine. What is being
    /// flushed at the moment is neither.
    ///
    /// # Context
    ///
    /// As for [`flush`](Self::flush).
    pub fn waiting(&self) -> (usize, usize) {
        self.queue.waiting()
    }
}

impl<F, M, O, P, H> Drop for DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word>,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    fn drop(&mut self) {
        // Where hardware does not answer, it may still let go of the tables as a whole. If it does
        // not do that either, what the queue has leaks.
        if self.queue.flush(&*self).is_ok() {
            return;
        }
        if self.domain.detach().is_err() || self.queue.flush(&*self).is_err() {
            while let Some(waiting) = self.queue.pop() {
                self.leak(waiting);
            }
        }
    }
}

/// Translates the addresses of devices, as a [`DmaDomain`] does, or leaves them as they are, as a
/// [`Direct`](super::Direct). It is sealed.
///
/// In signatures, `T::Memory` is the `H` of either: the memory that is mapped.
///
/// What it does is done by a [`Device`](super::Device). Its owner cannot map memory that
/// nobody promised:
///
/// ```compile_fail,E0061
/// use dmaspan::dma::Translation;
/// use dmaspan::{Iova, Prot, Span};
///
/// fn map<T: Translation>(translation: &T, iova: Iova, span: Span) {
///     let _ = translation.map(iova, &[span], Prot::READ_WRITE);
/// }
/// ```
///
/// nor take away what another one has mapped:
///
/// ```compile_fail,E0061
/// use dmaspan::IovaRange;
/// use dmaspan::dma::Translation;
///
/// fn unlink<T: Translation>(translation: &T, others: IovaRange) {
///     let _ = translation.unlink(others);
/// }
/// ```
pub trait Translation: translation::Sealed {}

impl<T: translation::Sealed> Translation for T {}

pub(super) mod translation {
    use super::{Error, Event, Flush, IovaRange, Iovas, Platform, Prot, Request, Span, Unmapped};
    use crate::addr::{DmaAddr, Iova, PhysAddr};
    use crate::dma::bounce::BouncePool;
    use crate::dma::device::{DeviceConfig, Place};
    use crate::dma::memory::DmaMemory;
    use crate::dma::queued::QueuedMemory;
    use crate::dma::reach::Reach;
    use crate::dma::single::granules;
    use crate::iommu::iova::Align;
    use crate::label::{Caller, Label};
    use crate::promise::Promise;

    /// Code with a [`Translation`](super::Translation) can call all of this, also where the trait
    /// has no name: a method that maps, or takes away, what the caller answers for takes a promise.
    pub trait Sealed: Send + Sync {
        /// The memory that is mapped.
        type Memory: DmaMemory;

        /// The pool of a device that names none.
        type Pool: BouncePool
        where
            Self: Sized;

        /// How a device with a pool reaches it.
        type Reach<B: BouncePool>: Reach<Self, B>
        where
            Self: Sized;

        /// Writes the CPU's caches back.
        fn write_back(&self, span: Span);

        /// Makes the CPU's caches forget.
        fn invalidate(&self, span: Span);

        /// All memory that there is, where nothing is translated: then there are no IOVAs.
        #[inline(always)]
        fn direct_memory(&self) -> Option<Span> {
            None
        }

        fn granule_lg2(&self) -> u32;

        /// The last byte of memory that translations can lead to.
        fn last_paddr(&self) -> PhysAddr;

        fn aperture(&self) -> IovaRange;

        /// Returns how unmaps are flushed that do not say.
        fn flush_mode(&self) -> Flush;

        #[track_caller]
        fn alloc(&self, request: Request) -> Result<Iovas, Error>;

        /// Takes back IOVAs where nothing was mapped since their last sync.
        fn free(&self, promise: Promise<'_>, iovas: Iovas);

        /// Maps spans of whole granules from `iova` on, in IOVAs that the caller holds. Hardware
        /// that caches absent entries is not told yet.
        ///
        /// [`Error::Quarantined`] says that hardware may use what was taken back: see
        /// [`hold`](Self::hold).
        #[track_caller]
        fn map(
            &self,
            promise: Promise<'_>,
            iova: Iova,
            spans: &[Span],
            prot: Prot,
        ) -> Result<(), Error>;

        /// Maps the granules of a span for a device, in IOVAs of their own, and announces them: all
        /// of a map by one call. Returns the IOVAs, and where the device finds the span.
        #[inline(always)]
        #[track_caller]
        fn place(
            &self,
            promise: Promise<'_>,
            config: &DeviceConfig,
            span: Span,
            prot: Prot,
            caller: Place,
        ) -> Result<(Iovas, DmaAddr), PlaceFailed> {
            let none = |error| PlaceFailed { error, iovas: None };
            let (whole, offset) = granules(self.granule_lg2(), span).map_err(none)?;
            let limit = Iova::new(config.limits.last);
            let request = Request { bytes: whole.len(), align: Align::Natural, limit };
            let iovas = match self.alloc(request) {
                Ok(iovas) => iovas,
                Err(error) => return Err(none(error)),
            };
            let range = iovas.range();
            let by = Caller { device: config.name, label: Label::Place(caller) };
            self.observe(&Event::Mapping { range, by });
            let start = range.start().wrapping_add(offset);
            if let Ok(range) = IovaRange::from_len(start, span.len()) {
                self.observe(&Event::Bytes { range, granule_lg2: self.granule_lg2() });
            }
            let mapped = self.map(promise, range.start(), &[whole], prot);
            match mapped.and_then(|()| self.announce(promise, range)) {
                Ok(()) => Ok((iovas, DmaAddr::new(start.get()))),
                Err(error) => Err(PlaceFailed { error, iovas: Some(iovas) }),
            }
        }

        /// Tells hardware that caches absent entries what was mapped in `range`, which is all that
        /// a caller holds, or takes all of it away; errors as those of [`map`](Self::map).
        #[track_caller]
        fn announce(&self, promise: Promise<'_>, range: IovaRange) -> Result<(), Error>;

        /// Takes away what is mapped in the IOVAs, holes or not, and releases them and the memory
        /// when that is synced.
        #[track_caller]
        fn unmap(
            &self,
            promise: Promise<'_>,
            iovas: Iovas,
            memory: Self::Memory,
            flush: Flush,
        ) -> Result<Unmapped<Self::Memory>, Error>;

        /// Takes away what is linked in the IOVAs, holes or not. The queue releases them and the
        /// memory when that is synced.
        #[track_caller]
        fn unmap_linked(
            &self,
            promise: Promise<'_>,
            iovas: Iovas,
            memory: QueuedMemory<Self::Memory>,
        ) -> Result<(), Error>;

        /// Takes away what is mapped in `range`, a part of IOVAs that the caller holds and goes on
        /// holding, and syncs. After an error hardware may use it: see [`hold`](Self::hold).
        #[track_caller]
        fn unlink(&self, promise: Promise<'_>, range: IovaRange) -> Result<(), Error>;

        /// Takes away what is mapped in the IOVAs, and puts them and the memory into quarantine.
        #[track_caller]
        fn hold(&self, promise: Promise<'_>, iovas: Iovas, memory: Self::Memory);

        /// Has all that was ever unmapped synced once more, together with what is in quarantine: a
        /// panic tore an operation, and nobody knows what it had unmapped.
        fn keep_torn(&self);

        /// Syncs what is in quarantine, whoever put it there.
        #[track_caller]
        fn settle(&self) -> Result<(), Error>;

        /// Tells an observer what a driver asks for.
        #[inline(always)]
        fn observe(&self, _event: &Event<'_>) {}
    }

    /// A span that was not mapped.
    #[derive(Debug)]
    pub struct PlaceFailed {
        /// Why.
        pub(in crate::dma) error: Error,
        /// The IOVAs, if it had any: [taken back](super::take_back) with the memory.
        pub(in crate::dma) iovas: Option<Iovas>,
    }

    /// One whose type is known, as its platform is.
    pub trait Known: Sealed + Sized {
        /// Where it runs.
        type Platform: Platform;

        /// `false` where no address is.
        const TRANSLATES: bool = true;
    }
}

use translation::Sealed;

/// Maps memory, or the slots that stand in for it, in IOVAs by `fill`, all or nothing: whatever
/// `fill` mapped before it failed is taken away again. Where the memory is not given back, hardware
/// may still use it and its slots.
#[inline(always)]
#[track_caller]
pub(super) fn map_into<T: Sealed + ?Sized>(
    translation: &T,
    iovas: Iovas,
    memory: T::Memory,
    by: Caller,
    fill: impl FnOnce(&T, &T::Memory, IovaRange) -> Result<(), Error>,
) -> Result<(Iovas, T::Memory), Refused<T::Memory>> {
    let range = iovas.range();
    translation.observe(&Event::Mapping { range, by });
    // Where a hook panics, a device may use it by then.
    let memory = ManuallyDrop::new(memory);
    // Without closures, which would be the callers that an observer hears of.
    let filled = match fill(translation, &memory, range) {
        Ok(()) => translation.announce(Promise::kept(), range),
        Err(error) => Err(error),
    };
    let memory = ManuallyDrop::into_inner(memory);
    match filled {
        Ok(()) => Ok((iovas, memory)),
        Err(error) => Err(take_back(translation, iovas, memory, error)),
    }
}

#[cold]
#[track_caller]
pub(super) fn take_back<T: Sealed + ?Sized>(
    translation: &T,
    iovas: Iovas,
    memory: T::Memory,
    error: Error,
) -> Refused<T::Memory> {
    if let Error::Quarantined { .. } = error {
        translation.hold(Promise::kept(), iovas, memory);
        return Refused { error, memory: None };
    }
    match translation.unmap(Promise::kept(), iovas, memory, Flush::Strict) {
        Ok(Unmapped::Released(memory)) => Refused { error, memory: Some(memory) },
        Ok(Unmapped::Queued) | Err(_) => Refused { error, memory: None },
    }
}

impl<F, M, O, P, H> translation::Known for DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word> + Send + Sync,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    type Platform = P;
}

impl<F, M, O, P, H> Sealed for DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word> + Send + Sync,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    type Memory = H;
    type Pool = NoPool;
    type Reach<B: BouncePool> = Typed<Self, B>;

    fn write_back(&self, span: Span) {
        self.iovas.platform().write_back(span);
    }

    fn invalidate(&self, span: Span) {
        self.iovas.platform().invalidate(span);
    }

    #[inline(always)]
    fn granule_lg2(&self) -> u32 {
        F::GRANULE_LG2
    }

    #[inline(always)]
    fn last_paddr(&self) -> PhysAddr {
        self.domain.last_paddr()
    }

    fn aperture(&self) -> IovaRange {
        self.iovas.aperture()
    }

    #[inline(always)]
    fn flush_mode(&self) -> Flush {
        self.flush
    }

    #[inline(always)]
    #[track_caller]
    fn alloc(&self, request: Request) -> Result<Iovas, Error> {
        match self.iovas.alloc(request) {
            Ok(iovas) => Ok(iovas),
            Err(error) => self.alloc_after(request.bytes, request.align, request.limit, error),
        }
    }

    #[inline(always)]
    fn free(&self, _promise: Promise<'_>, iovas: Iovas) {
        let _ = self.iovas.free(iovas);
    }

    #[inline(always)]
    #[track_caller]
    fn map(
        &self,
        _promise: Promise<'_>,
        iova: Iova,
        spans: &[Span],
        prot: Prot,
    ) -> Result<(), Error> {
        self.domain.map_pinned(iova, spans, prot).map_err(|failed| self.refused(iova, failed))
    }

    #[inline(always)]
    #[track_caller]
    fn announce(&self, _promise: Promise<'_>, range: IovaRange) -> Result<(), Error> {
        self.domain.sync_map(range).map_err(|failed| self.refused(range.start(), failed))
    }

    #[inline(always)]
    #[track_caller]
    fn unmap(
        &self,
        _promise: Promise<'_>,
        iovas: Iovas,
        memory: H,
        flush: Flush,
    ) -> Result<Unmapped<H>, Error> {
        if flush == Flush::Lazy {
            self.unmap_lazily(iovas, QueuedMemory::Once(memory))?;
            return Ok(Unmapped::Queued);
        }
        let range = iovas.range();
        // Where a hook panics, a device may still use it.
        let memory = ManuallyDrop::new(memory);
        let retired = self.domain.take_away(range);
        let synced = self.queue.sync(retired, self);
        let memory = ManuallyDrop::into_inner(memory);
        match synced {
            Ok(()) => {
                let _ = self.iovas.free(iovas);
                Ok(Unmapped::Released(memory))
            }
            Err(failed) => Err(self.quarantine(iovas, memory, failed)),
        }
    }

    #[inline(always)]
    #[track_caller]
    fn unmap_linked(
        &self,
        _promise: Promise<'_>,
        iovas: Iovas,
        memory: QueuedMemory<H>,
    ) -> Result<(), Error> {
        self.unmap_lazily(iovas, memory)
    }

    #[inline(always)]
    #[track_caller]
    fn unlink(&self, _promise: Promise<'_>, range: IovaRange) -> Result<(), Error> {
        let retired = self.domain.take_away(range);
        self.domain.sync_retired(retired).map_err(|SyncFailed { gather, error }| {
            self.queue.keep(gather, iter::empty(), self);
            Error::Quarantined { range, source: error }
        })
    }

    #[cold]
    #[track_caller]
    fn hold(&self, _promise: Promise<'_>, iovas: Iovas, memory: H) {
        let range = iovas.range();
        let held = QueuedMapping::new(iovas, QueuedMemory::Once(memory));
        // All of the range is synced before it is released, whoever has what was taken back by now;
        // and other parts of it may still be mapped.
        let mut gather = self.domain.gather();
        self.domain.add_own(&mut gather, self.domain.take_away(range));
        self.queue.keep(gather, iter::once(held), self);
    }

    #[cold]
    fn keep_torn(&self) {
        self.queue.keep_torn(iter::empty());
    }

    #[track_caller]
    fn settle(&self) -> Result<(), Error> {
        let range = self.iovas.aperture();
        self.queue.flush(self).map_err(|source| Error::Quarantined { range, source })
    }

    #[inline(always)]
    fn observe(&self, event: &Event<'_>) {
        self.domain.ops().observe(event);
    }
}

impl<F, M, O, P, H> DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word>,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    /// Keeps what hardware was not seen to forget.
    #[cold]
    #[inline(never)]
    fn quarantine(&self, iovas: Iovas, memory: H, failed: SyncFailed<M::List>) -> Error {
        let range = iovas.range();
        let held = QueuedMapping::new(iovas, QueuedMemory::Once(memory));
        self.queue.keep(failed.gather, iter::once(held), self);
        Error::Quarantined { range, source: failed.error }
    }

    /// Takes away what is mapped in the IOVAs; the queue holds them and the memory until the sync.
    #[inline(always)]
    #[track_caller]
    fn unmap_lazily(&self, iovas: Iovas, memory: QueuedMemory<H>) -> Result<(), Error> {
        let range = iovas.range();
        // Where a hook panics, a device may still use it.
        let memory = ManuallyDrop::new(memory);
        let retired = self.domain.take_away(range);
        // Not before: what is moved through a call is copied.
        let held = QueuedMapping::new(iovas, ManuallyDrop::into_inner(memory));
        let pushed = self.queue.push(retired, held, self.iovas.platform(), self);
        pushed.map_err(|source| Error::Quarantined { range, source })
    }

    /// IOVAs where there were none: those that wait for a flush are free after one. It waits for no
    /// other thread: that may be what an interrupt, which maps, has interrupted. The request comes
    /// in parts, as in the space.
    #[cold]
    #[track_caller]
    fn alloc_after(
        &self,
        bytes: u64,
        align: Align,
        limit: Iova,
        error: iova::Error,
    ) -> Result<Iovas, Error> {
        let request = Request { bytes, align, limit };
        let is_short = matches!(error, iova::Error::Exhausted { .. });
        if is_short && self.queue.try_flush(self).is_ok() {
            return Ok(self.iovas.alloc(request)?);
        }
        Err(error.into())
    }

    /// The error of a mapping that was taken back; what could not be synced is in quarantine.
    #[cold]
    fn refused(&self, iova: Iova, failed: MapFailed<M::List>) -> Error {
        let MapFailed { error, unsynced } = failed;
        let Some(gather) = unsynced else { return error.into() };
        self.queue.keep(gather, iter::empty(), self);
        let source = HardwareError { what: "a failed mapping was not synced", status: 0 };
        Error::Quarantined { range: IovaRange::point(iova), source }
    }
}

impl<F, M, O, P, H> fmt::Debug for DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word>,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaDomain")
            .field("domain", &self.domain)
            .field("iovas", &self.iovas)
            .field("queue", &self.queue)
            .field("flush", &self.flush)
            .finish_non_exhaustive()
    }
}
