//! The container: user memory, pinned and mapped into a domain.
//!
//! It does the work of Linux's VFIO type1 (drivers/vfio/vfio_iommu_type1.c): pin a range, map its
//! spans, keep account, and take all of it back in the order that keeps devices out of freed
//! memory. Unmapping follows type1 version 2: a range may hold many mappings and may not cut one.
//!
//! # Who owns what
//!
//! A mapping enters the tree of mappings *before* it is built and leaves it after it is gone, and
//! no mapping overlaps another: whoever put one there, or took one over to unmap it, owns its
//! IOVAs. The lock around the tree is held for that. Memory is pinned and tables are written
//! without it, so many threads map at once, and a range that another thread works on answers
//! [`Error::Busy`].
//!
//! # When memory is unpinned
//!
//! Only in the closure that `Paging::unmap` calls with the proof that hardware has forgotten the
//! spans. Where hardware does not confirm that, the mapping stays in the tree for ever, pinned and
//! charged.

mod error;
mod paging;

pub use error::Error;

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use lock_api::{Mutex, RawMutex};

use crate::account::{Account, Charge};
use crate::addr::Iova;
use crate::error::Errno;
use crate::io_pgtable::{Format, LeafCensus, TableMemory};
use crate::iommu::{self, Domain, IommuOps};
use crate::pin::{Dirty, Kind, PinError, Pinner, SpanSink, Stopped};
use crate::prot::Prot;
use crate::range::{IovaRange, UserRange};
use crate::space::{DmaSpace, Limits};
use crate::span::{Span, SpanBuf};
use paging::{Paging, Reach};

/// Spans that go into the table, or come out of it, at once: 4 KiB of stack. A sync of an unmap
/// covers as many at most.
const BATCH: usize = 256;

/// How many mappings a container has by default: `dma_entry_limit` of type1.
pub const DEFAULT_MAPPINGS: usize = 65535;

/// User memory mapped for devices.
///
/// `P` pins memory, and `L` is the lock around the tree of mappings.
///
/// Dropped, it unmaps everything; what hardware does not forget stays pinned for ever.
pub struct Container<P: Pinner, L: RawMutex> {
    pinner: P,
    domain: Box<dyn Paging>,
    account: Arc<Account>,
    max_mappings: usize,
    /// How many unmaps there were.
    unmaps: AtomicU64,
    /// By first IOVA. The lock guards nothing else and is the only one. It is not held while memory
    /// is pinned or mapped, but while the empty tables around a mapping that is gone are taken out.
    mappings: Mutex<L, BTreeMap<Iova, Mapping<P::Pin>>>,
}

#[derive(Debug)]
struct Mapping<Pin> {
    last: Iova,
    prot: Prot,
    state: State<Pin>,
}

#[derive(Debug)]
enum State<Pin> {
    /// One thread is building it or taking it down, and owns its IOVAs.
    Busy,
    Mapped(Pinned<Pin>),
    /// The unmap with this number will take it down, and owns its IOVAs.
    Doomed(Pinned<Pin>, u64),
    /// Hardware may use it for ever.
    Quarantined,
}

/// What a mapping holds. Dropped, the pin leaks.
#[derive(Debug)]
struct Pinned<Pin> {
    pin: Pin,
    charge: Charge,
}

impl<Pin> Pinned<Pin> {
    /// Keeps the memory pinned and charged for ever.
    fn leak(self) {
        core::mem::forget(self.pin);
        core::mem::forget(self.charge);
    }
}

impl<Pin> Mapping<Pin> {
    fn range(&self, start: Iova) -> IovaRange {
        // The tree holds valid ranges only; the fallback is never taken.
        IovaRange::new(start, self.last).unwrap_or(IovaRange::point(start))
    }

    /// Makes the mapping the unmap's with this number, if it is mapped.
    fn doom(&mut self, unmap: u64) {
        self.state = match core::mem::replace(&mut self.state, State::Busy) {
            State::Mapped(pinned) => State::Doomed(pinned, unmap),
            other => other,
        };
    }
}

impl<P: Pinner, L: RawMutex> Container<P, L> {
    /// An empty container that maps into `domain`, which is its alone, and charges `account`.
    pub fn new<F, M, O>(pinner: P, domain: Domain<F, M, O>, account: Arc<Account>) -> Self
    where
        F: Format,
        M: TableMemory<F::Word> + 'static,
        O: IommuOps + 'static,
    {
        Self {
            pinner,
            domain: Box::new(domain),
            account,
            max_mappings: DEFAULT_MAPPINGS,
            unmaps: AtomicU64::new(0),
            mappings: Mutex::new(BTreeMap::new()),
        }
    }

    /// The same container with another limit on its mappings.
    pub fn with_max_mappings(mut self, max_mappings: usize) -> Self {
        self.max_mappings = max_mappings;
        self
    }

    /// What supplies the memory.
    pub fn pinner(&self) -> &P {
        &self.pinner
    }

    /// What the container charges.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// The number of mappings, those under construction and in quarantine included.
    pub fn mappings(&self) -> usize {
        self.mappings.lock().len()
    }

    /// How many leaves of each size translate all that is mapped.
    ///
    /// # Context
    ///
    /// Holds the container's lock while it reads the tables: for reports, not for hot paths.
    pub fn census(&self) -> LeafCensus {
        let mappings = self.mappings.lock();
        let mut census = LeafCensus::default();
        for (&start, mapping) in &*mappings {
            if matches!(mapping.state, State::Mapped(_)) {
                census.add(&self.domain.census(mapping.range(start)));
            }
        }
        census
    }

    /// Pins `user` of `space` and maps it at `iova`. See [`DmaSpace::map`].
    ///
    /// # Errors
    ///
    /// [`Error`], with translations, pins, charges and tables as before.
    pub fn map(
        &self,
        space: &P::Space,
        user: UserRange,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Error<P::Error>> {
        let range = self.check_map(user, iova, prot)?;
        let bytes = user.checked_len().unwrap_or(u64::MAX);
        let charge =
            self.account.charge(bytes).map_err(|source| Error::OverLimit { user, source })?;
        self.claim(range, prot)?;
        match self.build(space, user, range, prot) {
            Ok(pin) => {
                self.finish(range.start(), State::Mapped(Pinned { pin, charge }));
                Ok(())
            }
            Err((error, Reach::None)) => {
                self.forget(range);
                Err(error)
            }
            Err((error, Reach::Possible)) => {
                core::mem::forget(charge);
                self.finish(range.start(), State::Quarantined);
                Err(error)
            }
        }
    }

    /// Unmaps all mappings in `range` and returns their bytes. See [`DmaSpace::unmap`].
    ///
    /// # Errors
    ///
    /// [`Error::Bisects`] and [`Error::Busy`] with nothing changed. [`Error::NotForgotten`] for the
    /// first mapping that hardware may still use; all others in the range are gone.
    pub fn unmap(&self, range: IovaRange) -> Result<u64, Error<P::Error>> {
        let unmap = self.doom(range)?;
        let mut unmapped = 0u64;
        let mut failed = None;
        let mut rest = Some(range);
        while let Some((taken, prot, pinned)) = rest.and_then(|rest| self.take_doomed(rest, unmap))
        {
            rest = taken.last().checked_add(1).and_then(|at| IovaRange::new(at, range.last()));
            match self.tear_down(taken, prot, pinned) {
                Ok(()) => {
                    unmapped = unmapped.wrapping_add(taken.len_less_one()).wrapping_add(1);
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(unmapped), Err)
    }

    /// Unmaps everything and returns its bytes.
    ///
    /// # Errors
    ///
    /// As for [`unmap`](Self::unmap).
    pub fn unmap_all(&self) -> Result<u64, Error<P::Error>> {
        self.unmap(self.domain.geometry().aperture)
    }

    fn check_map(
        &self,
        user: UserRange,
        iova: Iova,
        prot: Prot,
    ) -> Result<IovaRange, Error<P::Error>> {
        let geometry = self.domain.geometry();
        let granule = geometry.page_sizes & geometry.page_sizes.wrapping_neg();
        let ends = iova.get() | user.start().get() | user.last().get().wrapping_add(1);
        if ends & granule.wrapping_sub(1) != 0 {
            return Err(Error::Misaligned { iova, user, granule });
        }
        if !prot.permits_access() {
            return Err(Error::NoAccess { user, prot });
        }
        let len = user.checked_len().unwrap_or(u64::MAX);
        let range = IovaRange::from_len(iova, len)?;
        let aperture = geometry.aperture;
        if !aperture.covers(range) {
            return Err(Error::OutsideAperture { range, aperture });
        }
        Ok(range)
    }

    /// Puts an unfinished mapping into the tree, which makes its IOVAs the caller's.
    fn claim(&self, range: IovaRange, prot: Prot) -> Result<(), Error<P::Error>> {
        let mut mappings = self.mappings.lock();
        if let Some((existing, mapping)) = overlapping(&mappings, range).next() {
            return Err(match mapping.state {
                State::Busy | State::Doomed(..) => Error::Busy { range, busy: existing },
                State::Mapped(_) => Error::Exists { range, existing },
                State::Quarantined => Error::Quarantined { range, quarantined: existing },
            });
        }
        if mappings.len() >= self.max_mappings {
            return Err(Error::TooManyMappings { limit: self.max_mappings });
        }
        let mapping = Mapping { last: range.last(), prot, state: State::Busy };
        mappings.insert(range.start(), mapping);
        Ok(())
    }

    /// Pins and maps; on an error nothing stays mapped and pinned, unless hardware may still use
    /// it.
    fn build(
        &self,
        space: &P::Space,
        user: UserRange,
        range: IovaRange,
        prot: Prot,
    ) -> Result<P::Pin, (Error<P::Error>, Reach)> {
        let mut room = SpanBuf::room::<BATCH>();
        let mut mapper = Mapper {
            domain: &*self.domain,
            buf: SpanBuf::new(&mut room),
            at: range.start(),
            last: range.last(),
            prot,
            outcome: Ok(()),
        };
        let (pin, pin_error) = match self.pinner.pin(space, user, prot, &mut mapper) {
            Ok(pin) => {
                mapper.flush();
                (Some(pin), None)
            }
            Err(failed) => (failed.pin, Some(failed.error)),
        };
        let mapped = mapper.at.get().wrapping_sub(range.start().get());
        let complete = mapper.at == range.last().wrapping_add(1);
        let found = mapper.found(range);
        let failed = match (mapper.outcome, pin_error) {
            (Err(refused), _) => {
                let at = user.start().wrapping_add(mapped);
                Some((Error::Map { user: at, source: refused.error }, refused.reach))
            }
            (Ok(()), Some(PinError::Failed(source))) => {
                Some((Error::Pin { user, source }, Reach::None))
            }
            (Ok(()), None) if complete => self.domain.announce(range).err().map(|source| {
                let source = iommu::Error::Hardware { range, source };
                (Error::Map { user: user.start(), source }, Reach::None)
            }),
            (Ok(()), None | Some(PinError::Stopped)) => {
                Some((Error::PinnedLen { user, found }, Reach::None))
            }
        };
        match (failed, pin) {
            (None, Some(pin)) => Ok(pin),
            (None, None) => Err((Error::PinnedLen { user, found: 0 }, Reach::None)),
            (Some((error, reach)), pin) => {
                let done = IovaRange::new(range.start(), mapper.at.wrapping_add(u64::MAX))
                    .filter(|_| mapper.at != range.start());
                let reach = self.undo(done, mapper.buf, prot, pin, reach);
                Err((error, reach))
            }
        }
    }

    /// Takes back what a failed map mapped and pinned: `done` is mapped, `unmapped` only pinned.
    fn undo(
        &self,
        done: Option<IovaRange>,
        mut unmapped: SpanBuf<'_>,
        prot: Prot,
        pin: Option<P::Pin>,
        reach: Reach,
    ) -> Reach {
        let dirty = Dirty::after(prot);
        if reach == Reach::Possible {
            core::mem::forget(pin);
            return reach;
        }
        let unpin = |pin: &mut Option<P::Pin>, spans: &[Span]| {
            if let Some(pin) = pin {
                self.pinner.unpin(pin, spans, Kind::Memory, dirty);
            }
        };
        let mut pin = pin;
        unpin(&mut pin, unmapped.spans());
        if let Some(done) = done {
            let release = &mut |spans: &[Span], _synced| unpin(&mut pin, spans);
            if self.domain.unmap(done, &mut unmapped, release).is_err() {
                core::mem::forget(pin);
                return Reach::Possible;
            }
        }
        if let Some(pin) = pin {
            self.pinner.release(pin);
        }
        Reach::None
    }

    /// Makes all mappings in `range` the caller's to take down, or none of them, and returns the
    /// number by which it knows them: others may be mapped and doomed in the range meanwhile.
    fn doom(&self, range: IovaRange) -> Result<u64, Error<P::Error>> {
        let mut mappings = self.mappings.lock();
        for (mapped, mapping) in overlapping(&mappings, range) {
            match mapping.state {
                // Unmapped already, as far as it can be.
                State::Quarantined => {}
                _ if !range.covers(mapped) => {
                    return Err(Error::Bisects { range, mapping: mapped });
                }
                State::Mapped(_) => {}
                State::Busy | State::Doomed(..) => return Err(Error::Busy { range, busy: mapped }),
            }
        }
        let unmap = self.unmaps.fetch_add(1, Ordering::Relaxed);
        for (_, mapping) in mappings.range_mut(range.start()..=range.last()) {
            mapping.doom(unmap);
        }
        Ok(unmap)
    }

    /// The next mapping of a range that the unmap with this number doomed.
    fn take_doomed(
        &self,
        range: IovaRange,
        unmap: u64,
    ) -> Option<(IovaRange, Prot, Pinned<P::Pin>)> {
        let mut mappings = self.mappings.lock();
        for (&start, mapping) in mappings.range_mut(range.start()..=range.last()) {
            match core::mem::replace(&mut mapping.state, State::Busy) {
                State::Doomed(pinned, by) if by == unmap => {
                    return Some((mapping.range(start), mapping.prot, pinned));
                }
                other => mapping.state = other,
            }
        }
        None
    }

    /// Unmaps a mapping that was taken over, releases what it held and takes it out of the tree.
    fn tear_down(
        &self,
        range: IovaRange,
        prot: Prot,
        mut pinned: Pinned<P::Pin>,
    ) -> Result<(), Error<P::Error>> {
        let mut room = SpanBuf::room::<BATCH>();
        let mut buf = SpanBuf::new(&mut room);
        let dirty = Dirty::after(prot);
        let release = &mut |spans: &[Span], synced: iommu::Synced| {
            debug_assert!(synced.meets(range));
            self.pinner.unpin(&mut pinned.pin, spans, Kind::Memory, dirty);
        };
        if let Err(source) = self.domain.unmap(range, &mut buf, release) {
            pinned.leak();
            self.finish(range.start(), State::Quarantined);
            return Err(Error::NotForgotten { range, source });
        }
        self.pinner.release(pinned.pin);
        drop(pinned.charge);
        self.forget(range);
        Ok(())
    }

    /// Ends the work on a mapping that stays in the tree.
    fn finish(&self, start: Iova, state: State<P::Pin>) {
        if let Some(mapping) = self.mappings.lock().get_mut(&start) {
            mapping.state = state;
        }
    }

    /// Takes a mapping out of the tree, and with it the tables that it leaves empty.
    ///
    /// Those at its ends may hold entries of neighbours. The gap between its neighbours, under the
    /// lock and so nobody else's, says which.
    fn forget(&self, range: IovaRange) {
        let mut mappings = self.mappings.lock();
        let aperture = self.domain.geometry().aperture;
        let before = mappings.range(..range.start()).next_back().map(|(_, mapping)| mapping.last);
        let start = before.map_or(Some(aperture.start()), |last| last.checked_add(1));
        let behind = range.last().checked_add(1);
        let next = behind.and_then(|at| mappings.range(at..).next().map(|(&start, _)| start));
        let last = next.map_or(aperture.last(), |start| start.wrapping_add(u64::MAX));
        if let Some(gap) = start.and_then(|start| IovaRange::new(start, last)) {
            self.domain.reclaim(range, gap);
        }
        mappings.remove(&range.start());
    }
}

/// The mappings that have an address in `range`, each with its range.
fn overlapping<Pin>(
    mappings: &BTreeMap<Iova, Mapping<Pin>>,
    range: IovaRange,
) -> impl Iterator<Item = (IovaRange, &Mapping<Pin>)> {
    // Mappings are disjoint, so of those that begin before the range only the last can reach into
    // it.
    let before = mappings.range(..range.start()).next_back();
    before
        .into_iter()
        .chain(mappings.range(range.start()..=range.last()))
        .map(|(&start, mapping)| (mapping.range(start), mapping))
        .filter(move |(mapped, _)| mapped.intersection(range).is_some())
}

/// Maps spans as the pinner finds them, a batch at a time.
struct Mapper<'a> {
    domain: &'a dyn Paging,
    /// Pinned, and not mapped yet.
    buf: SpanBuf<'a>,
    /// Where the buffer's first span goes: behind what is mapped, modulo 2^64.
    at: Iova,
    last: Iova,
    prot: Prot,
    outcome: Result<(), paging::Refused>,
}

impl Mapper<'_> {
    /// Maps all spans in the buffer.
    fn flush(&mut self) {
        if self.outcome.is_err() || self.buf.is_empty() || self.exceeds() {
            return;
        }
        let spans = self.buf.spans();
        self.outcome = self.domain.map(self.at, spans, self.prot);
        if self.outcome.is_ok() {
            self.at = self.at.wrapping_add(bytes_of(spans));
            self.buf.clear();
        }
    }

    /// Maps all spans in the buffer but the last, which the next one may still join: so the leaves
    /// do not depend on the size of the batches.
    fn flush_closed(&mut self) -> Result<(), Stopped> {
        if self.exceeds() {
            return Err(Stopped);
        }
        let (domain, at, prot) = (self.domain, self.at, self.prot);
        let mut mapped = 0;
        let drained = self.buf.drain_closed(|closed| {
            domain.map(at, closed, prot)?;
            mapped = bytes_of(closed);
            Ok(())
        });
        self.at = at.wrapping_add(mapped);
        drained.map_err(|refused| {
            self.outcome = Err(refused);
            Stopped
        })
    }

    /// Whether there is more memory than the range has IOVAs.
    fn exceeds(&self) -> bool {
        let left = self.last.get().wrapping_sub(self.at.get());
        bytes_of(self.buf.spans()).wrapping_sub(1) > left
    }

    /// The bytes of all spans so far.
    fn found(&self, range: IovaRange) -> u64 {
        let mapped = self.at.get().wrapping_sub(range.start().get());
        mapped.saturating_add(bytes_of(self.buf.spans()))
    }
}

impl SpanSink for Mapper<'_> {
    fn push(&mut self, span: Span, _kind: Kind) -> Result<(), Stopped> {
        if self.buf.push(span).is_ok() {
            return Ok(());
        }
        self.flush_closed()?;
        self.buf.push(span).map_err(|_| Stopped)
    }
}

fn bytes_of(spans: &[Span]) -> u64 {
    spans.iter().fold(0u64, |bytes, span| bytes.saturating_add(span.len()))
}

impl<P: Pinner, L: RawMutex + Send + Sync> DmaSpace for Container<P, L> {
    type Memory = P::Space;
    type Error = Error<P::Error>;

    fn map(
        &self,
        memory: &P::Space,
        user: UserRange,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Self::Error> {
        Container::map(self, memory, user, iova, prot)
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Self::Error> {
        Container::unmap(self, range)
    }

    fn limits(&self) -> Limits {
        let geometry = self.domain.geometry();
        let left = self.max_mappings.saturating_sub(self.mappings());
        Limits {
            apertures: alloc::vec![geometry.aperture],
            page_sizes: geometry.page_sizes,
            mappings_left: Some(left as u64),
        }
    }

    fn errno(&self, error: &Self::Error) -> Errno {
        error.errno(|error| self.pinner.errno(error))
    }
}

impl<P: Pinner, L: RawMutex> Drop for Container<P, L> {
    fn drop(&mut self) {
        let unmap = self.unmaps.fetch_add(1, Ordering::Relaxed);
        self.mappings.get_mut().values_mut().for_each(|mapping| mapping.doom(unmap));
        let aperture = self.domain.geometry().aperture;
        while let Some((range, prot, pinned)) = self.take_doomed(aperture, unmap) {
            // What fails stays pinned for ever, which is all that can be done.
            let _ = self.tear_down(range, prot, pinned);
        }
    }
}

impl<P: Pinner, L: RawMutex> fmt::Debug for Container<P, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Container").field("account", &self.account).finish_non_exhaustive()
    }
}
