//! Mappings lose and get user addresses here: their memory moves to another address or process
//! while devices go on.
//!
//! A VMM that is replaced by another process forgets the user addresses of all mappings, and the
//! new process says where the memory is there (`VFIO_DMA_UNMAP_FLAG_VADDR` and
//! `VFIO_DMA_MAP_FLAG_VADDR` of drivers/vfio/vfio_iommu_type1.c).

use alloc::boxed::Box;
use alloc::sync::Arc;

use lock_api::RawMutex;

use super::domains::Domains;
use super::error::Error;
use super::map::iovas_of;
use super::mapping::{Behind, Mapping, Pinned, RunCursor, SlotState, Vaddr, overlapping};
use super::unmap::UnmapScope;
use super::{Container, State};
use crate::account::{Account, Charge, OverLimit};
use crate::addr::{Address, Iova};
use crate::pin::{Dirty, Kind, PinError, Pinner, SpanSink, Stopped, unpin_outputs};
use crate::promise::Promise;
use crate::range::{IovaRange, UserRange};
use crate::span::{Span, SpanBuf};

/// Says where the memory of a mapping is now, and whose it is.
#[expect(missing_debug_implementations, reason = "spaces have no text")]
pub struct VaddrUpdate<'a, P: Pinner> {
    space: &'a P::Space,
    user: UserRange,
    iova: Iova,
    owner: Option<&'a Arc<Account>>,
}

impl<'a, P: Pinner> VaddrUpdate<'a, P> {
    /// The memory that is mapped at `iova` is `user` of `space` now.
    pub fn new(space: &'a P::Space, user: UserRange, iova: Iova) -> Self {
        Self { space, user, iova, owner: None }
    }

    /// Charges this account instead of the one that is charged.
    #[must_use]
    pub fn owner(self, account: &'a Arc<Account>) -> Self {
        Self { owner: Some(account), ..self }
    }
}

/// A mapping that its slot is without, and the domains that it is in.
type TakenMapping<P> = (Box<Mapping<P>>, Arc<Domains>);

impl<P: Pinner> State<P> {
    /// Refuses what needs the user's addresses of all mappings, while some are not known.
    pub(super) fn check_vaddr(&self) -> Result<(), Error<P::Error>> {
        if self.invalid == 0 {
            return Ok(());
        }
        let mut slots = self.tree.iter();
        let found = slots.find(|(_, slot)| slot.vaddr == Vaddr::Invalid);
        found
            .map_or(Ok(()), |(start, slot)| Err(Error::VaddrInvalid { mapping: slot.range(start) }))
    }

    /// Says whether the user's addresses of the mapping at `range` are known.
    pub(super) fn set_vaddr(&mut self, range: IovaRange, vaddr: Vaddr) {
        let Some(slot) = self.tree.get_mut(range.start()) else { return };
        self.invalid -= usize::from(slot.vaddr == Vaddr::Invalid);
        self.invalid += usize::from(vaddr == Vaddr::Invalid);
        slot.vaddr = vaddr;
    }

    /// Makes the addresses of all mappings that begin in `range` invalid, or of none. Returns their
    /// bytes, modulo 2^64.
    fn invalidate(&mut self, range: IovaRange) -> Result<u64, Error<P::Error>> {
        let devices = self.emulated();
        if devices > 0 {
            return Err(Error::Emulated { range, devices });
        }
        let already = overlapping(&self.tree, range).find(|(_, slot)| slot.vaddr == Vaddr::Invalid);
        if let Some((mapping, _)) = already {
            return Err(Error::VaddrInvalidAlready { range, mapping });
        }
        let Self { tree, invalid, .. } = self;
        let mut bytes = 0u64;
        tree.visit_mut(range.start(), range.last(), |slot| {
            if let SlotState::Mapped(mapping) = &slot.state {
                slot.vaddr = Vaddr::Invalid;
                *invalid += 1;
                bytes = bytes.wrapping_add(mapping.range.len_less_one()).wrapping_add(1);
            }
            None::<()>
        });
        Ok(bytes)
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Forgets the user addresses of all mappings in `range`, until each is
    /// [updated](Self::update_vaddr) or unmapped. Translations and pins stay, and so do charges.
    /// Returns the bytes of the mappings; 0 where there is none.
    ///
    /// Which mappings `range` may hold is as for [`unmap`](Self::unmap). While any is without, what
    /// needs users' addresses is refused with [`Error::VaddrInvalid`].
    ///
    /// # Errors
    ///
    /// With nothing changed: [`Error::MisalignedUnmap`], [`Error::Bisects`] and [`Error::Busy`];
    /// [`Error::VaddrInvalidAlready`] where one is without already, and [`Error::Emulated`] while
    /// emulated devices are attached.
    pub fn invalidate_vaddr(&self, range: IovaRange) -> Result<u64, Error<P::Error>> {
        self.waiting(|| {
            let mut all = self.state.lock();
            let first = all.tree.reaching(range.start());
            match self.check_unmap(&all, range, first, None)? {
                UnmapScope::Nothing => Ok(0),
                UnmapScope::Mappings => all.invalidate(range),
            }
        })
    }

    /// [`invalidate_vaddr`](Self::invalidate_vaddr) of all mappings.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn invalidate_vaddr_all(&self) -> Result<u64, Error<P::Error>> {
        self.invalidate_vaddr(IovaRange::ALL)
    }

    /// Says where the memory of a mapping is, whose user addresses are invalid, and perhaps whose.
    /// What was charged to its owner is charged to the new one before it is given back.
    ///
    /// # Context
    ///
    /// The same memory must be there: it stays pinned and mapped, and nobody looks. Where it is
    /// not, devices go on with the old memory, and what is read, written or pinned through the
    /// container is the new, of which both are allowed to use: it is wrong, and not unsafe. Device
    /// memory, which nothing pins, is [revoked](Self::revoke) by its new addresses from now on: so
    /// the pinner is asked whether these lead to it.
    ///
    /// # Errors
    ///
    /// With nothing changed: [`Error::Range`] and [`Error::Misaligned`]; [`Error::NothingMapped`],
    /// and [`Error::NotInvalid`] where the mapping is of another size or place or has its
    /// addresses; [`Error::OtherDevice`] and [`Error::Pin`] where device memory of the mapping is
    /// not at the new ones; [`Error::OverLimit`] for the new owner; [`Error::Busy`],
    /// [`Error::Quarantined`], and [`Error::StillPinned`] where emulated devices have device
    /// memory.
    pub fn update_vaddr(&self, update: &VaddrUpdate<'_, P>) -> Result<(), Error<P::Error>> {
        let range = iovas_of(update.iova, update.user)?;
        let (mut mapping, domains) = self.waiting(|| self.claim_invalid(range, update))?;
        let result = self.check_devices(&mapping, &domains, update).and_then(|()| {
            let changed = self.change_owner(&mut mapping, &domains, update);
            changed.map_err(|source| Error::OverLimit { user: update.user, source })
        });
        if result.is_ok() {
            let mut all = self.state.lock();
            // External pins of device memory that are under way are of the old addresses.
            all.revokes += 1;
            all.set_vaddr(range, Vaddr::Known);
            if let Some(slot) = all.tree.get_mut(range.start()) {
                slot.space_id = self.pinner.space_id(&mapping.space);
                slot.user = mapping.user;
            }
        }
        self.finish(range, Some(mapping), domains, 0);
        result
    }

    /// Looks whether the new addresses lead to the device memory that is mapped. Meanwhile
    /// [`revoke`](Self::revoke) waits for the mapping, whatever addresses it is for.
    fn check_devices(
        &self,
        mapping: &Mapping<P>,
        domains: &Domains,
        update: &VaddrUpdate<'_, P>,
    ) -> Result<(), Error<P::Error>> {
        let runs = mapping.pinned.as_ref().map_or(&[][..], |pinned| pinned.runs.all());
        let mut offset = 0u64;
        for run in runs {
            let (start, user) = (mapping.range.start(), update.user.start());
            let range = IovaRange::from_len(start.wrapping_add(offset), run.bytes)?;
            let user = UserRange::from_len(user.wrapping_add(offset), run.bytes)?;
            offset = offset.wrapping_add(run.bytes);
            if run.behind != Behind::Pinned(Kind::Mmio) {
                continue;
            }
            let mut same = SameDevice { domains, rest: Some(range) };
            let (pin, error) = match self.pinner.pin(update.space, user, mapping.prot, &mut same) {
                Ok(pin) => (Some(pin), None),
                Err(failed) => (failed.pin, Some(failed.error)),
            };
            if let Some(mut pin) = pin {
                same.each_taken(range, &mut |spans| {
                    unpin_outputs(&self.pinner, &mut pin, spans, Kind::Mmio, Dirty::Clean);
                });
                self.pinner.release(Promise::kept(), pin);
            }
            match error {
                None if same.rest.is_none() => {}
                Some(PinError::Failed(source)) => return Err(Error::Pin { user, source }),
                _ => return Err(Error::OtherDevice { user, range }),
            }
        }
        Ok(())
    }

    /// Makes the mapping at exactly `range` the caller's own, to work on without the lock.
    ///
    /// The checks are in the order of `vfio_dma_do_map`, for their errors.
    fn claim_invalid(
        &self,
        range: IovaRange,
        update: &VaddrUpdate<'_, P>,
    ) -> Result<TakenMapping<P>, Error<P::Error>> {
        let mut all = self.state.lock();
        self.check_aligned(&all, update.iova, update.user)?;
        let Some((mapped, slot)) = overlapping(&all.tree, range).next() else {
            return Err(Error::NothingMapped { range });
        };
        match &slot.state {
            SlotState::Busy | SlotState::Emptied | SlotState::Doomed(..) => {
                return Err(Error::Busy { range, busy: mapped });
            }
            SlotState::Quarantined(_) => {
                return Err(Error::Quarantined { range, quarantined: mapped });
            }
            // Both look for it in its slot when they end.
            SlotState::Mapped(mapping) if mapping.copies > 0 || mapping.is_being_read() => {
                return Err(Error::Busy { range, busy: mapped });
            }
            SlotState::Mapped(_) if mapped == range && slot.vaddr == Vaddr::Invalid => {
                // A revocation finds what external pins have by the addresses that they had.
                if all.external.has_mmio(mapped) {
                    return Err(Error::StillPinned { range: mapped });
                }
            }
            SlotState::Mapped(_) => return Err(Error::NotInvalid { range, mapping: mapped }),
        }
        let domains = self.begin(&mut all)?;
        let slot = all.tree.get_mut(range.start());
        match slot.map(|slot| core::mem::replace(&mut slot.state, SlotState::Busy)) {
            Some(SlotState::Mapped(mapping)) => Ok((mapping, domains)),
            // It was a moment ago, under the same lock.
            _ => Err(Error::NothingMapped { range }),
        }
    }

    /// Moves a mapping to another space, address and owner, or changes nothing.
    fn change_owner(
        &self,
        mapping: &mut Mapping<P>,
        domains: &Domains,
        update: &VaddrUpdate<'_, P>,
    ) -> Result<(), OverLimit> {
        let VaddrUpdate { space, user, .. } = *update;
        let account = update.owner.unwrap_or(&mapping.account);
        let log = mapping.log.as_ref().filter(|_| !Arc::ptr_eq(account, &mapping.account));
        let of_log = log.map(|log| log.charge_to(account)).transpose()?;
        if let Some(pinned) = &mut mapping.pinned {
            let memory = pinned.runs.memory(user);
            if Arc::ptr_eq(account, &mapping.account) {
                pinned.charge.settle_in(&self.pinner, space, memory)?;
            } else {
                let mut charge = account.charge_none(&self.pinner, space);
                charge.settle(memory)?;
                if charge.counts_frames() {
                    charge_mapped::<P::Pin, BATCH>(&mut charge, mapping.range, pinned, domains)?;
                }
                pinned.charge = charge;
            }
        }
        if let Some((log, charge)) = log.zip(of_log) {
            drop(log.pay(charge));
        }
        mapping.account = Arc::clone(account);
        mapping.space = space.clone();
        mapping.user = user;
        Ok(())
    }
}

/// Takes device memory as far as it is what is mapped.
struct SameDevice<'d> {
    domains: &'d Domains,
    /// What is mapped and was not found yet.
    rest: Option<IovaRange>,
}

impl SameDevice<'_> {
    /// Passes on what was taken of `range`, which is what is mapped there.
    fn each_taken(&self, range: IovaRange, each: &mut dyn FnMut(&[Span])) {
        let mut room = SpanBuf::room::<8>();
        let mut left = match self.rest.map(|rest| rest.start().get().checked_sub(1)) {
            Some(last) => last.and_then(|last| IovaRange::new(range.start(), Iova::new(last))),
            None => Some(range),
        };
        while let Some(range) = left {
            let mut buf = SpanBuf::new(&mut room);
            left = self.domains.spans(range, &mut buf);
            each(buf.spans());
        }
    }
}

impl<A: Address> SpanSink<A> for SameDevice<'_> {
    fn push(&mut self, span: Span<A>, kind: Kind) -> Result<(), Stopped> {
        let rest = self.rest.filter(|_| kind == Kind::Mmio).ok_or(Stopped)?;
        let found = IovaRange::from_len(rest.start(), span.len()).map_err(|_| Stopped)?;
        let mut room = SpanBuf::room::<1>();
        let mut buf = SpanBuf::new(&mut room);
        let more = self.domains.spans(found, &mut buf);
        if !rest.covers(found) || more.is_some() || *buf.spans() != [span.output()] {
            return Err(Stopped);
        }
        let behind = found.last().checked_add(1);
        self.rest = behind.and_then(|behind| IovaRange::new(behind, rest.last()));
        Ok(())
    }
}

/// Charges the frames that are mapped at `range`.
fn charge_mapped<Pin, const BATCH: usize>(
    charge: &mut Charge,
    range: IovaRange,
    pinned: &Pinned<Pin>,
    domains: &Domains,
) -> Result<(), OverLimit> {
    let mut room = SpanBuf::room::<BATCH>();
    let mut at = range.start();
    for run in pinned.runs.rest(RunCursor::default()) {
        let mut rest = IovaRange::from_len(at, run.bytes).ok();
        at = at.wrapping_add(run.bytes);
        while run.behind == Behind::Pinned(Kind::Memory)
            && let Some(range) = rest
        {
            let mut buf = SpanBuf::new(&mut room);
            rest = domains.spans(range, &mut buf);
            charge.found(buf.spans())?;
        }
    }
    Ok(())
}
