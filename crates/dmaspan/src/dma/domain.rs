//! A domain with IOVAs of its own: what the buffers of devices are mapped into.

use core::fmt;

use super::error::Error;
use super::memory::DmaMemory;
use super::single::{Refused, Unmapped};
use crate::addr::Iova;
use crate::io_pgtable::{Format, Retired, TableMemory};
use crate::iommu::flush_queue::{self, FlushQueue, Flusher};
use crate::iommu::iova::{Iovas, Request, Space};
use crate::iommu::{Domain, Gather, HardwareError, IommuOps, MapFailed, SyncFailed, Synced};
use crate::platform::Platform;
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

/// How a domain serves the DMA API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaConfig {
    /// How many CPUs have caches and queues of their own.
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

/// IOVAs and the memory that was mapped there.
#[derive(Debug)]
#[expect(unreachable_pub, reason = "a type of a trait that a public type implements")]
pub struct Held<H> {
    iovas: Iovas,
    memory: H,
}

/// A [`Domain`], the IOVAs of it, and what of both waits for a sync.
///
/// `H` is the memory that is mapped in it; whoever maps memory of several kinds makes an enum of
/// them.
///
/// Dropped, it releases all that waits, if hardware lets go; otherwise all of that leaks.
pub struct DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word>,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    // In the order of their ends.
    queue: FlushQueue<P, M::List, Held<H>>,
    domain: Domain<F, M, O>,
    iovas: Space<P>,
    flush: Flush,
}

impl<F, M, O, P, H> DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word>,
    M::List: Send,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    /// Hands out the IOVAs of a domain that nobody else maps anything in.
    ///
    /// # Errors
    ///
    /// [`Error::Iova`] where the domain's aperture has none to hand out.
    pub fn new(domain: Domain<F, M, O>, config: DmaConfig, platform: P) -> Result<Self, Error> {
        let aperture = domain.geometry().aperture;
        let iovas = Space::new(aperture, F::GRANULE_LG2, config.cpus, platform)?;
        let queue = FlushQueue::new(config.cpus, config.queue);
        Ok(Self { queue, domain, iovas, flush: config.flush })
    }

    /// The domain. Nothing may be mapped in it but by this.
    pub fn domain(&self) -> &Domain<F, M, O> {
        &self.domain
    }

    /// The IOVAs, of which some can be [reserved](Space::reserve).
    pub fn iovas(&self) -> &Space<P> {
        &self.iovas
    }

    /// Flushes what waits as long as the bound says. For a timer.
    ///
    /// # Errors
    ///
    /// [`HardwareError`]: what waited is in quarantine.
    pub fn expire(&self) -> Result<(), HardwareError> {
        self.queue.expire(self.iovas.platform().now(), self)
    }

    /// Flushes everything that waits, what is in quarantine too.
    ///
    /// # Errors
    ///
    /// [`HardwareError`]: what waited is in quarantine.
    pub fn flush(&self) -> Result<(), HardwareError> {
        self.queue.flush(self)
    }

    /// How many unmaps wait for a sync, and how many are in quarantine.
    pub fn waiting(&self) -> (usize, usize) {
        self.queue.waiting()
    }
}

impl<F, M, O, P, H> Flusher for DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word>,
    M::List: Send,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    type List = M::List;
    type Held = Held<H>;

    #[inline(always)]
    fn gather(&self) -> Gather<M::List> {
        self.domain.gather()
    }

    #[inline(always)]
    fn add(&self, gather: &mut Gather<M::List>, retired: Retired<M::List>) {
        self.domain.add_own(gather, retired);
    }

    fn merge(&self, gather: &mut Gather<M::List>, more: Gather<M::List>) {
        self.domain.merge_own(gather, more);
    }

    #[inline(always)]
    fn sync(&self, gather: Gather<M::List>) -> Result<Synced, SyncFailed<M::List>> {
        self.domain.sync_own(gather)
    }

    #[inline(always)]
    fn release(&self, held: Held<H>, _synced: &Synced) {
        // Of this space: nobody else makes what is held.
        let _ = self.iovas.free(held.iovas);
        drop(held.memory);
    }
}

/// What translates the addresses of devices; sealed.
pub trait Translation: translation::Sealed {}

impl<T: translation::Sealed> Translation for T {}

pub(super) mod translation {
    use super::{Error, Flush, IovaRange, Iovas, Platform, Prot, Request, Span, Unmapped};
    use crate::addr::Iova;
    use crate::dma::memory::DmaMemory;

    pub trait Sealed: Send + Sync {
        /// The memory that is mapped.
        type Memory: DmaMemory;

        /// Where it runs.
        type Platform: Platform;

        /// Whom to ask for locks and caches.
        fn platform(&self) -> &Self::Platform;

        /// All memory that there is, where nothing is translated: then there are no IOVAs.
        #[inline(always)]
        fn direct_memory(&self) -> Option<Span> {
            None
        }

        fn granule_lg2(&self) -> u32;

        fn aperture(&self) -> IovaRange;

        /// How unmaps are flushed that do not say.
        fn flush_mode(&self) -> Flush;

        fn alloc(&self, request: Request) -> Result<Iovas, Error>;

        /// Takes back IOVAs where nothing was mapped since their last sync.
        fn free(&self, iovas: Iovas);

        /// Maps spans of whole granules from `iova` on, in IOVAs that the caller holds. Hardware
        /// that caches absent entries is not told yet.
        ///
        /// [`Error::Quarantined`] says that hardware may use what was taken back: see
        /// [`hold`](Self::hold).
        fn map(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Error>;

        /// Tells hardware that caches absent entries what was mapped in `range`, which is all that
        /// a caller holds, or takes all of it away; errors as those of [`map`](Self::map).
        fn announce(&self, range: IovaRange) -> Result<(), Error>;

        /// Takes away what is mapped in the IOVAs, holes or not, and releases them and the memory
        /// when that is synced.
        fn unmap(
            &self,
            iovas: Iovas,
            memory: Self::Memory,
            flush: Flush,
        ) -> Result<Unmapped<Self::Memory>, Error>;

        /// Takes away what is mapped in `range`, a part of IOVAs that the caller holds and goes on
        /// holding, and syncs. After an error hardware may use it: see [`hold`](Self::hold).
        fn unlink(&self, range: IovaRange) -> Result<(), Error>;

        /// Puts IOVAs and memory into quarantine, to what made it necessary.
        fn hold(&self, iovas: Iovas, memory: Self::Memory);

        /// Syncs what is in quarantine, whoever put it there.
        fn settle(&self) -> Result<(), Error>;
    }
}

use translation::Sealed;

/// Maps memory in IOVAs by `fill`, all or nothing: whatever `fill` mapped before it failed is taken
/// away again.
#[inline(always)]
pub(super) fn map_into<T: Sealed>(
    translation: &T,
    iovas: Iovas,
    memory: T::Memory,
    fill: impl FnOnce(&T, &T::Memory, IovaRange) -> Result<(), Error>,
) -> Result<(Iovas, T::Memory), Refused<T::Memory>> {
    let range = iovas.range();
    match fill(translation, &memory, range).and_then(|()| translation.announce(range)) {
        Ok(()) => Ok((iovas, memory)),
        Err(error) => Err(take_back(translation, iovas, memory, error)),
    }
}

#[cold]
fn take_back<T: Sealed>(
    translation: &T,
    iovas: Iovas,
    memory: T::Memory,
    error: Error,
) -> Refused<T::Memory> {
    if let Error::Quarantined { .. } = error {
        translation.hold(iovas, memory);
        return Refused { error, memory: None };
    }
    match translation.unmap(iovas, memory, Flush::Strict) {
        Ok(Unmapped::Released(memory)) => Refused { error, memory: Some(memory) },
        Ok(Unmapped::Queued) | Err(_) => Refused { error, memory: None },
    }
}

impl<F, M, O, P, H> Sealed for DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word> + Send + Sync,
    M::List: Send,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    type Memory = H;
    type Platform = P;

    #[inline(always)]
    fn platform(&self) -> &P {
        self.iovas.platform()
    }

    #[inline(always)]
    fn granule_lg2(&self) -> u32 {
        F::GRANULE_LG2
    }

    fn aperture(&self) -> IovaRange {
        self.iovas.aperture()
    }

    #[inline(always)]
    fn flush_mode(&self) -> Flush {
        self.flush
    }

    #[inline(always)]
    fn alloc(&self, request: Request) -> Result<Iovas, Error> {
        Ok(self.iovas.alloc(request)?)
    }

    fn free(&self, iovas: Iovas) {
        let _ = self.iovas.free(iovas);
    }

    #[inline(always)]
    fn map(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Error> {
        self.domain.map_pinned(iova, spans, prot).map(|_| ()).map_err(|f| self.refused(iova, f))
    }

    #[inline(always)]
    fn announce(&self, range: IovaRange) -> Result<(), Error> {
        self.domain.sync_map(range).map_err(|failed| self.refused(range.start(), failed))
    }

    #[inline(always)]
    fn unmap(&self, iovas: Iovas, memory: H, flush: Flush) -> Result<Unmapped<H>, Error> {
        let range = iovas.range();
        let retired = self.domain.all().remove(range);
        let held = Held { iovas, memory };
        let quarantined = |source| Error::Quarantined { range, source };
        match flush {
            Flush::Lazy => {
                let platform = self.iovas.platform();
                self.queue.push(retired, held, platform, self).map_err(quarantined)?;
                Ok(Unmapped::Queued)
            }
            Flush::Strict => {
                let (held, _) = self.queue.sync(retired, held, self).map_err(quarantined)?;
                let _ = self.iovas.free(held.iovas);
                Ok(Unmapped::Released(held.memory))
            }
        }
    }

    fn unlink(&self, range: IovaRange) -> Result<(), Error> {
        let retired = self.domain.all().remove(range);
        let mut gather = self.domain.gather();
        self.domain.add_own(&mut gather, retired);
        self.domain.sync_own(gather).map(|_| ()).map_err(|SyncFailed { gather, error }| {
            self.queue.quarantine(gather, [], self);
            Error::Quarantined { range, source: error }
        })
    }

    fn hold(&self, iovas: Iovas, memory: H) {
        self.queue.quarantine(self.domain.gather(), [Held { iovas, memory }], self);
    }

    fn settle(&self) -> Result<(), Error> {
        let range = self.iovas.aperture();
        self.queue.flush(self).map_err(|source| Error::Quarantined { range, source })
    }
}

impl<F, M, O, P, H> DmaDomain<F, M, O, P, H>
where
    F: Format,
    M: TableMemory<F::Word>,
    M::List: Send,
    O: IommuOps,
    P: Platform,
    H: DmaMemory,
{
    /// The error of a mapping that was taken back; what could not be synced is in quarantine.
    #[cold]
    fn refused(&self, iova: Iova, failed: MapFailed<M::List>) -> Error {
        let MapFailed { error, unsynced } = failed;
        let Some(gather) = unsynced else { return error.into() };
        self.queue.quarantine(gather, [], self);
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
            .field("flush", &self.flush)
            .finish_non_exhaustive()
    }
}
