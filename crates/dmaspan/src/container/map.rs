//! Mapping: this checks the request, claims the IOVAs, charges the owner and pins; a [`Mapper`]
//! maps the spans as they come.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::mem;

use lock_api::RawMutex;

use super::alignment::Alignment;
use super::domains::Domains;
use super::error::Error;
use super::mapper::{Failure, Mapper};
use super::mapping::{Bound, Leaving, Mapping, MappingSlot, Pinned, Runs, SlotState, Then, Vaddr};
use super::paging::Reach;
use super::quarantine::Reserved;
use super::room::{FEW_SPANS, NO_SPAN, Room};
use super::takedown::{Unmap, hold};
use super::{Container, State, unconfirmed};
use crate::account::Account;
use crate::addr::Iova;
use crate::iommu::Event;
use crate::label::{Caller, Label};
use crate::pin::{Dirty, Kind, PinError, Pinner, unpin_outputs};
use crate::prot::Prot;
use crate::range::{IovaRange, RangeError, UserRange};
use crate::span::{Span, SpanBuf};

/// Says what to map and for whom.
#[expect(missing_debug_implementations, reason = "spaces and closures have no text")]
pub struct MapRequest<'a, P: Pinner> {
    pub(super) space: &'a P::Space,
    pub(super) user: UserRange,
    pub(super) iova: Iova,
    pub(super) prot: Prot,
    pub(super) owner: Option<&'a Arc<Account>>,
    pub(super) label: Label,
    pub(super) cancelled: &'a dyn Fn() -> bool,
}

impl<'a, P: Pinner> MapRequest<'a, P> {
    /// Maps `user` of `space` at `iova`, for a device that may use it as `prot` says. Its label is
    /// the place of this call.
    #[track_caller]
    pub fn new(space: &'a P::Space, user: UserRange, iova: Iova, prot: Prot) -> Self {
        let label = Label::caller();
        Self { space, user, iova, prot, owner: None, label, cancelled: &|| false }
    }

    /// Names the mapping, for whoever [lists](Container::list) the container.
    #[must_use]
    pub fn label(self, label: impl Into<Label>) -> Self {
        Self { label: label.into(), ..self }
    }

    /// Charges this account instead of the container's.
    #[must_use]
    pub fn owner(self, account: &'a Arc<Account>) -> Self {
        Self { owner: Some(account), ..self }
    }

    /// Asks `cancelled` between batches of spans, and after each GiB that is pinned, not within
    /// what a pinner pushes at once. Once it answers `true` all is taken back and the map ends with
    /// [`Error::Cancelled`].
    #[must_use]
    pub fn cancelled_by(self, cancelled: &'a dyn Fn() -> bool) -> Self {
        Self { cancelled, ..self }
    }
}

/// A slot that is the caller's own, to work on without the lock.
struct ClaimedSlot {
    domains: Arc<Domains>,
    /// For how many spans there is room in quarantine.
    room: usize,
    /// Where hardware may walk tables that others have detached.
    walks: Option<IovaRange>,
}

/// A mapping that was populated, and what was found.
pub(super) type Populated<P> = Result<(Box<Mapping<P>>, Mapped), Error<<P as Pinner>::Error>>;

/// Says what a map found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mapped {
    /// How many spans there are, each as long as memory is contiguous and of one kind.
    pub spans: u64,
    /// Bytes of memory, which are pinned.
    pub memory: u64,
    /// Bytes of devices.
    pub mmio: u64,
    /// What would have given larger leaves.
    pub better: Option<Alignment>,
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Pins memory and maps it, in all domains or in none. Without a domain the mapping is only
    /// noted; what is attached later maps it.
    ///
    /// # Errors
    ///
    /// [`Error`], with translations, pins, charges and tables as before.
    pub fn map_request(&self, request: &MapRequest<'_, P>) -> Result<Mapped, Error<P::Error>> {
        let range = check_request(request)?;
        let account = Arc::clone(request.owner.unwrap_or(&self.account));
        // Written in its place: it is large.
        let mapping = Box::write(
            Box::new_uninit(),
            Mapping {
                range,
                user: request.user,
                space: request.space.clone(),
                account,
                prot: request.prot,
                pinned: None,
                leaving: Leaving::default(),
                log: None,
                bound: None,
                copies: 0,
                next: None,
            },
        );
        let seen = self.seen();
        let ClaimedSlot { domains, room, walks } = match self.claim(range, request) {
            Ok(claimed) => claimed,
            Err(error) => self.claim_again(seen, error, range, request)?,
        };
        let reserved = Reserved { container: self, spans: room };
        let by = Caller { device: None, label: request.label };
        domains.observe(&Event::Mapping { range, by });
        let built = self.build(mapping, &domains, (room, walks), request.cancelled);
        mem::forget(reserved);
        match built {
            Ok((mapping, found)) => {
                self.finish(range, Some(mapping), domains, room);
                Ok(found)
            }
            Err(error) => {
                self.finish(range, None, domains, room);
                Err(error)
            }
        }
    }

    /// Ends the work on a mapping, whose slot it gets; without one the slot has gone already.
    /// Gives room in quarantine back.
    #[inline(always)]
    pub(super) fn finish(
        &self,
        range: IovaRange,
        mapping: Option<Box<Mapping<P>>>,
        domains: Arc<Domains>,
        room: usize,
    ) {
        let mut all = self.state.lock();
        if let Some((mapping, slot)) = mapping.zip(all.tree.get_mut(range.start())) {
            slot.state = SlotState::Mapped(mapping);
        }
        all.quarantine.give_back(room);
        drop(domains);
        all.working -= 1;
        drop(all);
        self.wake();
    }

    /// [`claim`](Self::claim) where it failed, which may have been for what others are at.
    #[cold]
    #[inline(never)]
    fn claim_again(
        &self,
        seen: u64,
        error: Error<P::Error>,
        range: IovaRange,
        request: &MapRequest<'_, P>,
    ) -> Result<ClaimedSlot, Error<P::Error>> {
        let mut claim = || self.claim(range, request);
        match self.or_wait(seen, Err(error), &mut claim) {
            Err(Error::Quarantined { .. } | Error::QuarantineFull { .. }) => {
                // Perhaps hardware answers again.
                self.retry_idle();
                self.waiting(claim)
            }
            claimed => claimed,
        }
    }

    /// Puts an unfinished mapping into the tree, which makes its IOVAs the caller's.
    ///
    /// The checks are in the order of `vfio_dma_do_map`, for their errors.
    #[inline(always)]
    fn claim(
        &self,
        range: IovaRange,
        request: &MapRequest<'_, P>,
    ) -> Result<ClaimedSlot, Error<P::Error>> {
        let mut all = self.state.lock();
        self.check_aligned(&all, request.iova, request.user)?;
        let place = all.tree.reaching(range.start());
        if let Some((existing, slot)) = all.tree.overlapping(place, range).next() {
            return Err(match slot.state {
                SlotState::Busy | SlotState::Emptied | SlotState::Doomed(..) => {
                    Error::Busy { range, busy: existing }
                }
                SlotState::Mapped(_) => Error::Exists { range, existing },
                SlotState::Quarantined(_) => Error::Quarantined { range, quarantined: existing },
            });
        }
        if all.tree.len() >= self.max_mappings {
            return Err(Error::TooManyMappings { limit: self.max_mappings });
        }
        if !all.domains.permits(range) {
            return Err(all.domains.outside(range));
        }
        let domains = self.begin(&mut all)?;
        let mut room = 0;
        if !domains.is_empty() {
            // No mapping is of a whole space.
            let spans = domains.spans_at_most(range.len_less_one().wrapping_add(1));
            room = all.quarantine.reserve(spans.min(BATCH));
            if room == 0 {
                drop(domains);
                all.working -= 1;
                return Err(Error::QuarantineFull { range });
            }
        }
        let space_id = self.pinner.space_id(request.space);
        let walks = all.walks(range);
        let slot = MappingSlot {
            last: range.last(),
            serial: all.serials,
            announcing: 0,
            space_id,
            user: request.user,
            prot: request.prot,
            owner: Arc::clone(request.owner.unwrap_or(&self.account)),
            label: request.label,
            vaddr: Vaddr::Known,
            walks,
            state: SlotState::Busy,
        };
        all.serials += 1;
        all.walking += usize::from(walks.is_some());
        all.tree.insert(place, range.start(), slot);
        Ok(ClaimedSlot { domains, room, walks })
    }

    /// Refuses what is not of whole pages.
    pub(super) fn check_aligned(
        &self,
        all: &State<P>,
        iova: Iova,
        user: UserRange,
    ) -> Result<(), Error<P::Error>> {
        let granule = self.granule(&all.domains);
        let ends = iova.get() | user.start().get() | user.last().get().wrapping_add(1);
        if ends & granule.wrapping_sub(1) == 0 {
            Ok(())
        } else {
            Err(Error::Misaligned { iova, user, granule })
        }
    }

    /// Begins an operation that works without the lock: domains stay as they are until it ends.
    pub(super) fn begin(&self, all: &mut State<P>) -> Result<Arc<Domains>, Error<P::Error>> {
        all.check_open()?;
        Ok(all.at_work())
    }

    /// Charges, pins and maps, behind a sync for the `walks` that hardware may do. Where that fails
    /// the slot has gone, or is in quarantine.
    #[inline(always)]
    fn build(
        &self,
        mut mapping: Box<Mapping<P>>,
        domains: &Domains,
        (room, walks): (usize, Option<IovaRange>),
        cancelled: &dyn Fn() -> bool,
    ) -> Populated<P> {
        if (walks.is_some() || self.tracks_dirty())
            && let Err(error) = self.prepare(&mut mapping, domains, walks)
        {
            return Err(self.withdraw_all(mapping, domains, Then::Go, error));
        }
        if domains.is_empty() {
            return Ok((mapping, Mapped::default()));
        }
        self.populate(mapping, domains, room, cancelled, Then::Go)
    }

    /// What few maps do before they begin.
    #[cold]
    fn prepare(
        &self,
        mapping: &mut Mapping<P>,
        domains: &Domains,
        walks: Option<IovaRange>,
    ) -> Result<(), Error<P::Error>> {
        if let Some(walks) = walks {
            self.forget_walks(mapping.range, walks, domains)?;
        }
        self.begin_log(mapping)
    }

    /// Charges, pins and maps a mapping that has no pin, in batches of so many spans as have room
    /// in quarantine.
    ///
    /// On an error nothing stays charged, mapped and pinned, unless hardware may still use it. The
    /// mapping is in its slot then or has gone with that, as `then` says.
    pub(super) fn populate(
        &self,
        mut mapping: Box<Mapping<P>>,
        domains: &Domains,
        room: usize,
        cancelled: &dyn Fn() -> bool,
        then: Then,
    ) -> Populated<P> {
        let (user, range, prot) = (mapping.user, mapping.range, mapping.prot);
        let over = |source| Error::OverLimit { user, source };
        let charge = match mapping.account.charge_pin(&self.pinner, &mapping.space, user) {
            Ok(charge) => charge,
            Err(source) => return Err(self.withdraw_all(mapping, domains, then, over(source))),
        };
        let mut spans = Room::<Span, FEW_SPANS, BATCH>::new(room, NO_SPAN);
        let buf = SpanBuf::new(spans.first(room, NO_SPAN));
        // In its place before the pinner is asked: where that panics, the charge stays.
        let Mapping { space, pinned, .. } = &mut *mapping;
        let pinned =
            pinned.get_or_insert_with(|| Pinned { pin: None, charge, runs: Runs::default() });
        let Pinned { pin: place, charge, runs } = pinned;
        let mut mapper = Mapper::new(domains, buf, (range, user, prot), (charge, runs), cancelled);
        let (pin, error) = match self.pinner.pin(space, user, prot, &mut mapper) {
            Ok(pin) => match mapper.end() {
                Ok(()) => {
                    *place = Some(pin);
                    let found = mapper.found;
                    return Ok((mapping, found));
                }
                Err(error) => (Some(pin), error),
            },
            Err(failed) => match failed.error {
                PinError::Failed(source) => (failed.pin, Some(Error::Pin { user, source })),
                PinError::Stopped => (failed.pin, None),
            },
        };
        let (error, reach) = match (mapper.failure.take(), error) {
            (Some(failure), _) => self.refused(failure, user, mapper.mapped()),
            (None, Some(error)) => (error, Reach::None),
            (None, None) => (Error::PinnedLen { user, found: mapper.found() }, Reach::None),
        };
        let mapped = mapper.mapped();
        let Mapper { buf, kind, .. } = mapper;
        match pin {
            // Nothing is pinned, the pinner says: then nothing stays mapped.
            None => {
                *runs = Runs::default();
                if mapped > 0 {
                    mapping.bound = clear(domains, range);
                }
            }
            Some(pin) => {
                let pin = place.insert(pin);
                if reach == Reach::None {
                    // Pinned, and never mapped.
                    let (spans, dirty) = (buf.spans(), Dirty::Clean);
                    unpin_outputs(&self.pinner, pin, spans, kind, dirty);
                } else {
                    let mut all = self.state.lock();
                    hold(&mut all, range.start(), buf.spans(), kind);
                    mapping.leaving.held = buf.len();
                }
            }
        }
        Err(self.withdraw_all(mapping, domains, then, error))
    }

    /// Takes all of a mapping back, and its slot, unless it is to stay. Returns the error.
    #[cold]
    fn withdraw_all(
        &self,
        mut mapping: Box<Mapping<P>>,
        domains: &Domains,
        then: Then,
        error: Error<P::Error>,
    ) -> Error<P::Error> {
        mapping.leaving.unfinished = then == Then::Go;
        let mut mapping = Some(mapping);
        Unmap::new(self, domains, then).run(&mut |_| mapping.take(), None);
        error
    }

    fn refused(&self, failure: Failure, user: UserRange, mapped: u64) -> (Error<P::Error>, Reach) {
        match failure {
            Failure::Refused(refused) => {
                let user = user.start().wrapping_add(mapped);
                (Error::Map { user, source: refused.error }, refused.reach)
            }
            Failure::OverLimit(source) => (Error::OverLimit { user, source }, Reach::None),
            Failure::Cancelled => (Error::Cancelled { user, mapped }, Reach::None),
            Failure::NoRoom => (Error::NoMemory { user }, Reach::None),
        }
    }
}

/// Takes away whatever is mapped in a range. Says what hardware has not confirmed then.
fn clear(domains: &Domains, range: IovaRange) -> Option<Bound> {
    let mut synced = Ok(());
    domains.gathering(&mut |gathers| {
        gathers.remove(range, None);
        synced = gathers.sync();
    });
    synced.err().map(|source| Bound { number: unconfirmed::now(), source })
}

/// What can be said without the container.
fn check_request<P: Pinner>(request: &MapRequest<'_, P>) -> Result<IovaRange, Error<P::Error>> {
    let MapRequest { user, iova, prot, .. } = *request;
    let range = iovas_of(iova, user)?;
    if prot.permits_access() { Ok(range) } else { Err(Error::NoAccess { user, prot }) }
}

/// Where `user` is mapped from `iova` on. No mapping is of a whole space, of 2^64 bytes.
pub(super) fn iovas_of(iova: Iova, user: UserRange) -> Result<IovaRange, RangeError> {
    let whole_space = RangeError::Wraps { start: iova.get(), len: u64::MAX };
    IovaRange::from_len(iova, user.checked_len().ok_or(whole_space)?)
}

impl Mapped {
    /// Adds spans, which have so many bytes together.
    pub(super) fn add(&mut self, spans: &[Span], bytes: u64, kind: Kind) {
        let all = match kind {
            Kind::Memory => &mut self.memory,
            Kind::Mmio => &mut self.mmio,
        };
        *all = all.saturating_add(bytes);
        self.spans += spans.len() as u64;
    }
}

/// How memory of a kind is mapped. Linux maps device memory as if it were cached
/// (`vfio_pin_map_dma`); here it is what it is.
pub(super) fn prot_of(prot: Prot, kind: Kind) -> Prot {
    match kind {
        Kind::Memory => prot,
        Kind::Mmio => prot.difference(Prot::CACHE).union(Prot::MMIO),
    }
}

#[inline(always)]
pub(super) fn bytes_of(spans: &[Span]) -> u64 {
    spans.iter().fold(0u64, |bytes, span| bytes.saturating_add(span.len()))
}
