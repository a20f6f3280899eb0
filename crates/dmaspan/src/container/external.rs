//! External pins: memory behind IOVAs that emulated devices pin themselves.
//!
//! The pinner counts each of these pins by itself, so bytes stay pinned until the last of their
//! pins is gone. The container keeps a pin together with its spans, under its IOVAs, and no mapping
//! that has one is unmapped.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use lock_api::RawMutex;

use super::error::Error;
use super::mapping::{Behind, MappingSlot, RunCursor, Runs, overlapping};
use super::takedown::Spans;
use super::{Container, State, Version};
use crate::account::{Account, Charge, Counting, OverLimit};
use crate::addr::{Address, Iova};
use crate::pin::{Dirty, Kind, PinError, Pinner, SpanSink, Stopped, unpin_outputs};
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::{IovaRange, UserRange};
use crate::span::Span;

/// Memory that an emulated device has pinned by [`Container::pin_external`].
///
/// Only [`Container::unpin_external`] ends the pin. Dropped, it is never unpinned, and its mappings
/// are never unmapped.
#[must_use = "dropped, the pin is never ended"]
pub struct ExternalPin {
    /// Whose it is.
    identity: Arc<Identity>,
    id: u64,
    range: IovaRange,
}

impl ExternalPin {
    /// The IOVAs.
    pub fn range(&self) -> IovaRange {
        self.range
    }
}

impl fmt::Debug for ExternalPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalPin").field("range", &self.range).finish_non_exhaustive()
    }
}

/// A pin of another container, which stays as it was.
#[derive(Debug, thiserror::Error)]
#[error("the pin of {} belongs to another container", .pin.range)]
pub struct ForeignPin {
    /// The pin.
    pub pin: ExternalPin,
}

impl<E: core::error::Error> From<ForeignPin> for Error<E> {
    /// The pin is dropped, and so it is never ended.
    fn from(ForeignPin { pin }: ForeignPin) -> Self {
        Self::ForeignPin { range: pin.range }
    }
}

/// Tells containers apart, by where it lies: as long as a pin has it, no other lies there.
#[derive(Debug)]
pub(super) struct Identity;

/// By whom a pin will be unpinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Handle,
    Range,
}

/// Where a pin begins, and its number.
type Key = (Iova, u64);

/// A pin; `None` while it is being ended.
pub(super) type PinSlot<Pin> = Option<Box<HeldPin<Pin>>>;

/// All external pins. Each lies in one mapping.
pub(super) struct External<Pin> {
    identity: Arc<Identity>,
    pub(super) pins: BTreeMap<Key, PinSlot<Pin>>,
    /// How many there were.
    given: u64,
    /// The longest that is unpinned by range was as long, less one byte.
    longest: u64,
}

/// What is pinned for an emulated device, in one mapping.
pub(super) struct HeldPin<Pin> {
    key: Key,
    pub(super) range: IovaRange,
    pub(super) user: UserRange,
    by: By,
    pin: Pin,
    spans: Vec<Span>,
    runs: Runs,
    /// Given back with the last byte.
    charge: Option<Charge>,
    /// What is still pinned, sorted and disjoint.
    left: Vec<IovaRange>,
    /// Of pins that are being ended, the next.
    next: PinSlot<Pin>,
}

/// What an emulated device wants to pin, as far as it lies in one mapping.
struct Part<P: Pinner> {
    range: IovaRange,
    user: UserRange,
    serial: u64,
    /// How many revocations were begun before.
    revokes: u64,
    space: P::Space,
    account: Arc<Account>,
    charging: Charging,
    held: PinSlot<P::Pin>,
}

/// Charges what turned out to be memory, and nothing else.
fn settle(
    charge: &mut Charge,
    user: UserRange,
    spans: &[Span],
    runs: &Runs,
) -> Result<(), OverLimit> {
    let mut spans = Spans::new(spans);
    let mut found = Ok(());
    for run in runs.rest(RunCursor::default()) {
        spans.next(run.bytes, |spans| {
            if run.behind == Behind::Pinned(Kind::Memory) && found.is_ok() {
                found = charge.found(spans);
            }
        });
    }
    found?;
    charge.settle(runs.memory(user))
}

/// What is charged for a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Charging {
    /// Domains have the mapping pinned and charged.
    Done,
    Owner,
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Pins the memory behind `range` for an emulated device, which uses it as `prot` says, and
    /// pushes its spans, as `vfio_iommu_type1_pin_pages` does page by page.
    ///
    /// The range may reach over several mappings that follow each other. All of it counts as
    /// written from now on. Each pin finds the memory that is behind the user's addresses now.
    ///
    /// It is charged to the owner of each mapping; what domains have charged already counts once.
    ///
    /// # Errors
    ///
    /// With nothing pinned or charged, and no meaning in what was pushed: [`Error::NeedsV2`],
    /// [`Error::NotAttached`] without an emulated device, [`Error::MisalignedUnmap`] for parts of
    /// pages, [`Error::NotMapped`], [`Error::Denied`], [`Error::Quarantined`],
    /// [`Error::OverLimit`], [`Error::Pin`], [`Error::PinnedLen`], [`Error::SinkFull`],
    /// [`Error::NoMemory`], and [`Error::Busy`] for a mapping under construction. A mapping that
    /// is unmapped while it is being pinned is not mapped, nor is one with device memory while any
    /// is revoked.
    ///
    /// # Context
    ///
    /// Pins and calls the sink without the lock.
    pub fn pin_external(
        &self,
        range: IovaRange,
        prot: Prot,
        sink: &mut dyn SpanSink<P::Address>,
    ) -> Result<ExternalPin, Error<P::Error>> {
        let id = self.pin_by(By::Handle, range, prot, sink)?;
        let identity = Arc::clone(&self.state.lock().external.identity);
        Ok(ExternalPin { identity, id, range })
    }

    /// Ends a pin. `dirty` says whether the device wrote.
    ///
    /// # Errors
    ///
    /// The pin, where it is another container's.
    pub fn unpin_external(&self, pin: ExternalPin, dirty: Dirty) -> Result<(), ForeignPin> {
        let ExternalPin { id, range, .. } = pin;
        let mut all = self.state.lock();
        if !Arc::ptr_eq(&all.external.identity, &pin.identity) {
            return Err(ForeignPin { pin });
        }
        all.wrote(range, dirty);
        let mut ended = None;
        let mut rest = Some(range);
        while let Some(now) = rest {
            let place = all.external.pins.get_mut(&(now.start(), id));
            let Some(mut held) = place.and_then(Option::take) else { break };
            rest = behind(held.range, range);
            held.next = ended.take();
            ended = Some(held);
        }
        drop(all);
        self.end(ended, dirty);
        Ok(())
    }

    /// [`pin_external`](Self::pin_external) for devices that only keep IOVAs, as Linux's
    /// `vfio_pin_pages` and `vfio_unpin_pages` have it.
    ///
    /// Anybody with the container can end such a pin, by [`unpin_range`](Self::unpin_range). Code
    /// that relies on the memory and does not know who that is keeps an [`ExternalPin`].
    ///
    /// # Errors
    ///
    /// As for [`pin_external`](Self::pin_external).
    pub fn pin_range(
        &self,
        range: IovaRange,
        prot: Prot,
        sink: &mut dyn SpanSink<P::Address>,
    ) -> Result<(), Error<P::Error>> {
        self.pin_by(By::Range, range, prot, sink).map(|_| ())
    }

    /// Takes one pin from each page of `range`, of those that [`pin_range`](Self::pin_range) made.
    ///
    /// The range may hold several such pins, and parts of them. Where pins overlap the one goes
    /// first that begins last, and of those the last one made. What is charged for a pin is given
    /// back with its last page.
    ///
    /// # Errors
    ///
    /// With nothing changed: [`Error::MisalignedUnmap`] for parts of pages, [`Error::NotPinned`]
    /// for the first page that has no such pin, and [`Error::NoMemory`] where a pin would keep a
    /// part before the range and one behind it, and there is no memory to note that. What was
    /// pinned at once can always be unpinned at once.
    pub fn unpin_range(&self, range: IovaRange, dirty: Dirty) -> Result<(), Error<P::Error>> {
        let mut all = self.state.lock();
        self.check_pages(range)?;
        all.external.check_pinned(range)?;
        all.wrote(range, dirty);
        let mut ended = None;
        let mut rest = Some(range);
        while let Some(now) = rest {
            let Some((key, piece)) = all.external.find(now.start()) else { break };
            let Some(part) = piece.intersection(now) else { break };
            rest = behind(part, range);
            let Some(place) = all.external.pins.get_mut(&key) else { break };
            let last = match place {
                Some(held) if held.left != [part] => {
                    // Under the lock, since others may cut the same pin.
                    held.cut(part);
                    held.unpin(&self.pinner, part, dirty);
                    held.left.is_empty()
                }
                _ => true,
            };
            if let Some(mut held) = place.take_if(|_| last) {
                held.next = ended.take();
                ended = Some(held);
            }
        }
        drop(all);
        self.end(ended, dirty);
        Ok(())
    }

    /// Unpins what is left of pins that were taken out, and forgets them. Their places keep their
    /// mappings until then.
    fn end(&self, mut ended: PinSlot<P::Pin>, dirty: Dirty) {
        while let Some(mut held) = ended {
            ended = held.next.take();
            let key = held.key;
            self.release_held(*held, dirty);
            self.state.lock().external.pins.remove(&key);
        }
        self.wake();
    }

    fn release_held(&self, mut held: HeldPin<P::Pin>, dirty: Dirty) {
        for piece in core::mem::take(&mut held.left) {
            held.unpin(&self.pinner, piece, dirty);
        }
        self.pinner.release(Promise::kept(), held.pin);
        drop(held.charge);
    }

    /// Pins of emulated devices begin and end with pages of users, however large those of domains
    /// are.
    fn check_pages(&self, range: IovaRange) -> Result<(), Error<P::Error>> {
        let granule = self.page_size;
        let ends = range.start().get() | range.last().get().wrapping_add(1);
        let aligned = ends & granule.wrapping_sub(1) == 0;
        if aligned { Ok(()) } else { Err(Error::MisalignedUnmap { range, granule }) }
    }

    /// Pins and notes it: finds the mappings under the lock, pins without, and looks again.
    fn pin_by(
        &self,
        by: By,
        range: IovaRange,
        prot: Prot,
        sink: &mut dyn SpanSink<P::Address>,
    ) -> Result<u64, Error<P::Error>> {
        let mut parts = self.waiting(|| self.plan(range, prot))?;
        let pinned = parts.iter_mut().try_for_each(|part| self.pin_part(part, by, prot, sink));
        let noted = pinned.and_then(|()| self.waiting(|| self.note(range, &mut parts)));
        if noted.is_err() {
            let held = parts.into_iter().filter_map(|part| part.held);
            held.for_each(|held| self.release_held(*held, Dirty::Clean));
        }
        noted
    }

    /// What is to be pinned. The checks are in the order of `vfio_iommu_type1_pin_pages`.
    fn plan(&self, range: IovaRange, prot: Prot) -> Result<Vec<Part<P>>, Error<P::Error>> {
        if self.version == Version::V1 {
            return Err(Error::NeedsV2);
        }
        let all = self.state.lock();
        all.check_vaddr()?;
        if all.emulated() == 0 {
            return Err(Error::NotAttached);
        }
        self.check_pages(range)?;
        all.check_mapped(range, prot.intersection(Prot::READ_WRITE))?;
        let mut parts = Vec::new();
        for (_, slot) in overlapping(&all.tree, range) {
            let Some(mapping) = slot.mapped() else { continue };
            let Some((range, user)) = mapping.part(range) else { continue };
            if !prot.permits_access() {
                return Err(Error::NoAccess { user, prot });
            }
            parts.try_reserve(1).map_err(|_| Error::NoMemory { user })?;
            parts.push(Part {
                range,
                user,
                serial: slot.serial,
                revokes: all.revokes,
                space: mapping.space.clone(),
                account: Arc::clone(&mapping.account),
                charging: mapping.pinned.as_ref().map_or(Charging::Owner, |_| Charging::Done),
                held: None,
            });
        }
        Ok(parts)
    }

    fn pin_part(
        &self,
        part: &mut Part<P>,
        by: By,
        prot: Prot,
        sink: &mut dyn SpanSink<P::Address>,
    ) -> Result<(), Error<P::Error>> {
        let (user, mut charge) = (part.user, self.charge_external(part)?);
        let mut left = Vec::new();
        left.try_reserve_exact(1).map_err(|_| Error::NoMemory { user })?;
        left.push(part.range);
        let mut tee = Tee { sink, spans: Vec::new(), runs: Runs::default(), found: 0, full: None };
        let (pin, error) = match self.pinner.pin(&part.space, user, prot, &mut tee) {
            Ok(pin) => (Some(pin), None),
            Err(failed) => (failed.pin, Some(failed.error)),
        };
        let Tee { spans, runs, found, full, .. } = tee;
        let failed = match (error, full) {
            (Some(PinError::Failed(source)), _) => Some(Error::Pin { user, source }),
            (_, Some(Full::Sink)) => Some(Error::SinkFull { user }),
            (_, Some(Full::Memory)) => Some(Error::NoMemory { user }),
            (None, None) if Some(found) == user.checked_len() => charge
                .as_mut()
                .and_then(|charge| settle(charge, user, &spans, &runs).err())
                .map(|source| Error::OverLimit { user, source }),
            (_, None) => Some(Error::PinnedLen { user, found }),
        };
        let Some(mut pin) = pin else {
            return Err(failed.unwrap_or(Error::PinnedLen { user, found }));
        };
        if let Some(error) = failed {
            // What was pushed, and nothing else: it may be less or more than the range.
            unpin_runs(&self.pinner, &mut pin, &spans, &runs, (0, found), Dirty::Clean);
            self.pinner.release(Promise::kept(), pin);
            return Err(error);
        }
        let (range, key) = (part.range, (part.range.start(), 0));
        part.held = Some(Box::new(HeldPin {
            key,
            range,
            user,
            by,
            pin,
            spans,
            runs,
            charge,
            left,
            next: None,
        }));
        Ok(())
    }

    /// Charges the owner for an external pin: what domains have charged already counts once. Linux
    /// does so only in containers without domains, and so do accounts that count mappings.
    fn charge_external(&self, part: &Part<P>) -> Result<Option<Charge>, Error<P::Error>> {
        if part.charging == Charging::Done && part.account.counting() == Counting::Mappings {
            return Ok(None);
        }
        let user = part.user;
        let over = |source| Error::OverLimit { user, source };
        part.account.charge_pin(&self.pinner, &part.space, user).map(Some).map_err(over)
    }

    /// Notes what was pinned, if it is still mapped where it was.
    fn note(&self, range: IovaRange, parts: &mut [Part<P>]) -> Result<u64, Error<P::Error>> {
        let mut all = self.state.lock();
        let all = &mut *all;
        all.check_vaddr()?;
        all.check_mapped(range, Prot::empty())?;
        for part in parts.iter() {
            let found = overlapping(&all.tree, part.range).next();
            let same = |slot: &MappingSlot<P>| {
                let mapped = slot.mapped().and_then(|mapping| mapping.part(part.range));
                slot.serial == part.serial && mapped == Some((part.range, part.user))
            };
            let has_mmio = |held: &HeldPin<P::Pin>| held.has_mmio(part.user);
            // A revocation did not see it.
            let revoked = part.revokes != all.revokes && part.held.as_deref().is_some_and(has_mmio);
            if revoked || !found.is_some_and(|(_, slot)| same(slot)) {
                return Err(Error::NotMapped { range, at: part.range.start() });
            }
        }
        let External { pins, given, longest, .. } = &mut all.external;
        *given += 1;
        for part in parts {
            let Some(mut held) = part.held.take() else { continue };
            held.key.1 = *given;
            if all.domains.is_empty() {
                // Domains that had it charged may have gone since.
                held.charge_again(&part.account);
            }
            if held.by == By::Range {
                *longest = (*longest).max(held.range.len_less_one());
            }
            pins.insert(held.key, Some(held));
        }
        let id = *given;
        // Whatever the pin permits, as Linux.
        all.wrote(range, Dirty::Written);
        Ok(id)
    }
}

impl<P: Pinner> State<P> {
    /// Charges owners for what emulated devices have pinned, where domains had it charged that are
    /// gone (`vfio_iommu_unmap_unpin_reaccount`). What does not fit is not charged, as there.
    pub(super) fn charge_external(&mut self) {
        for ((at, _), place) in &mut self.external.pins {
            let found = overlapping(&self.tree, IovaRange::point(*at)).next();
            let mapping = found.and_then(|(_, slot)| slot.mapped());
            if let (Some(held), Some(mapping)) = (place, mapping) {
                held.charge_again(&mapping.account);
            }
        }
    }

    /// What emulated devices have pinned in a mapping, and may write at any time.
    pub(super) fn external_in(&self, mapping: IovaRange) -> impl Iterator<Item = IovaRange> {
        self.external.pins_in(mapping).flatten().flat_map(|held| held.left.iter().copied())
    }
}

impl<Pin> External<Pin> {
    /// Whether there are no pins.
    pub(super) fn is_empty(&self) -> bool {
        self.pins.is_empty()
    }

    /// The pins in a mapping.
    pub(super) fn pins_in(&self, mapping: IovaRange) -> impl Iterator<Item = &PinSlot<Pin>> {
        let keys = (mapping.start(), 0)..=(mapping.last(), u64::MAX);
        self.pins.range(keys).map(|(_, place)| place)
    }

    /// Whether any in a mapping is of device memory, or about to end, so that nobody knows.
    pub(super) fn has_mmio(&self, mapping: IovaRange) -> bool {
        let mut pins = self.pins_in(mapping);
        pins.any(|place| place.as_ref().is_none_or(|held| held.has_mmio(held.user)))
    }

    /// Of the pins that are unpinned by range, the one to unpin next at `at`, and its part around.
    fn find(&self, at: Iova) -> Option<(Key, IovaRange)> {
        let first = Iova::new(at.get().saturating_sub(self.longest));
        let near = self.pins.range((first, 0)..=(at, u64::MAX)).rev();
        let held = near.filter_map(|(_, place)| place.as_ref());
        held.filter(|held| held.by == By::Range).find_map(|held| {
            let piece = held.left.iter().find(|piece| piece.contains(at))?;
            Some((held.key, *piece))
        })
    }

    /// Refuses a range in which a page has no pin, and makes room to cut one in the middle.
    fn check_pinned<E: core::error::Error>(&mut self, range: IovaRange) -> Result<(), Error<E>> {
        let mut rest = Some(range);
        while let Some(now) = rest {
            let not = Error::NotPinned { range, at: now.start() };
            let Some((key, piece)) = self.find(now.start()) else { return Err(not) };
            let Some(part) = piece.intersection(now) else { return Err(not) };
            rest = behind(part, range);
            // Only the last can keep parts on both sides.
            if part.start() > piece.start()
                && part.last() < piece.last()
                && let Some(held) = self.pins.get_mut(&key).and_then(Option::as_mut)
            {
                let user = held.user;
                held.left.try_reserve(1).map_err(|_| Error::NoMemory { user })?;
            }
        }
        Ok(())
    }
}

impl<Pin> Default for External<Pin> {
    fn default() -> Self {
        Self { identity: Arc::new(Identity), pins: BTreeMap::new(), given: 0, longest: 0 }
    }
}

impl<Pin> HeldPin<Pin> {
    /// Charges what domains had charged when it was pinned.
    fn charge_again(&mut self, account: &Arc<Account>) {
        if self.charge.is_none() {
            let memory = self.runs.memory(self.user).filter_map(UserRange::checked_len);
            self.charge = account.charge(memory.fold(0, u64::saturating_add)).ok();
        }
    }

    /// Whether `user` leads to device memory that is pinned.
    pub(super) fn has_mmio(&self, user: UserRange) -> bool {
        let mut at = self.user.start();
        self.runs.all().iter().any(|run| {
            let range = UserRange::from_len(at, run.bytes).ok();
            at = at.wrapping_add(run.bytes);
            run.behind == Behind::Pinned(Kind::Mmio)
                && range.is_some_and(|range| range.intersection(user).is_some())
        })
    }

    /// Keeps the memory pinned and charged for ever, and its space, by whose number it is charged.
    pub(super) fn leak<Space>(self, space: Space) {
        core::mem::forget(self.pin);
        core::mem::forget(self.charge);
        core::mem::forget(space);
    }

    /// Takes `part` out of the piece that covers it. There is room for another piece where one
    /// stays on both sides.
    fn cut(&mut self, part: IovaRange) {
        let Some(n) = self.left.iter().position(|piece| piece.covers(part)) else { return };
        let piece = self.left[n];
        let before = part.start().get().checked_sub(1);
        let before = before.and_then(|last| IovaRange::new(piece.start(), Iova::new(last)));
        match (before, behind(part, piece)) {
            (Some(before), Some(behind)) => {
                self.left[n] = before;
                self.left.insert(n + 1, behind);
            }
            (Some(only), None) | (None, Some(only)) => self.left[n] = only,
            (None, None) => {
                self.left.remove(n);
            }
        }
    }

    /// Unpins a piece.
    fn unpin<P: Pinner<Pin = Pin>>(&mut self, pinner: &P, piece: IovaRange, dirty: Dirty) {
        let skip = piece.start().get() - self.range.start().get();
        // A range of users' memory is shorter than 2^64 bytes.
        let bytes = piece.len_less_one().saturating_add(1);
        unpin_runs(pinner, &mut self.pin, &self.spans, &self.runs, (skip, bytes), dirty);
    }
}

/// Unpins so many bytes of spans behind so many others.
fn unpin_runs<P: Pinner>(
    pinner: &P,
    pin: &mut P::Pin,
    spans: &[Span],
    runs: &Runs,
    (mut skip, mut bytes): (u64, u64),
    dirty: Dirty,
) {
    let mut spans = Spans::new(spans);
    spans.next(skip, |_| {});
    for run in runs.rest(RunCursor::default()) {
        let passed = run.bytes.min(skip);
        let taken = (run.bytes - passed).min(bytes);
        skip -= passed;
        bytes -= taken;
        if let Behind::Pinned(kind) = run.behind {
            spans.next(taken, |spans| unpin_outputs(pinner, pin, spans, kind, dirty));
        }
    }
}

/// The part of `range` that lies behind `part`.
fn behind(part: IovaRange, range: IovaRange) -> Option<IovaRange> {
    part.last().checked_add(1).and_then(|at| IovaRange::new(at, range.last()))
}

/// Hands spans to the caller and keeps them.
struct Tee<'s, A> {
    sink: &'s mut dyn SpanSink<A>,
    spans: Vec<Span>,
    runs: Runs,
    found: u64,
    full: Option<Full>,
}

/// Why no more spans are wanted.
#[derive(Clone, Copy, Debug)]
enum Full {
    Sink,
    Memory,
}

impl<A: Address> Tee<'_, A> {
    fn keep(&mut self, span: Span<A>, kind: Kind) -> Result<(), Full> {
        self.spans.try_reserve(1).map_err(|_| Full::Memory)?;
        self.runs.push(span.len(), kind).map_err(|_| Full::Memory)?;
        if self.sink.push(span, kind).is_err() {
            self.runs.pop(span.len());
            return Err(Full::Sink);
        }
        let span = span.output();
        // Kinds meet where runs do, so that a joined span is cut there again.
        match self.spans.last_mut().and_then(|last| Some((last.join(span)?, last))) {
            Some((joined, last)) => *last = joined,
            None => self.spans.push(span),
        }
        self.found = self.found.saturating_add(span.len());
        Ok(())
    }
}

impl<A: Address> SpanSink<A> for Tee<'_, A> {
    fn push(&mut self, span: Span<A>, kind: Kind) -> Result<(), Stopped> {
        self.keep(span, kind).map_err(|full| {
            self.full = Some(full);
            Stopped
        })
    }
}
