//! Domains are attached here, with a replay of all that is mapped, and detached.
//!
//! Both change what every mapping must be put into or taken out of, so no thread maps or unmaps
//! meanwhile. They do not hold the lock for that: an operation that comes in between gets
//! [`Error::Changing`]. No operation begins to map or unmap while an attach or a detach waits for
//! those that have begun.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;

use lock_api::RawMutex;

use super::domains::{Attached, DomainId, Domains};
use super::error::Error;
use super::map::{bytes_of, prot_of};
use super::mapping::{
    Behind, Bound, Mapping, MappingSlot, RunCursor, SlotState, Then, overlapping,
};
use super::paging::{Own, Paging, before};
use super::takedown::{TakenDown, Unmap};
use super::unmap::Unforgotten;
use super::{Container, State, unconfirmed};
use crate::addr::Iova;
use crate::io_pgtable::{self, Format, TableMemory};
use crate::iommu::{self, Domain, Event, HardwareError, IommuOps, RegionKind, ReservedRegions};
use crate::label::{Caller, Label};
use crate::log;
use crate::pin::Pinner;
use crate::range::IovaRange;
use crate::span::SpanBuf;

/// Says whether the devices behind a domain can send only interrupts that are theirs
/// (`iommu_group_has_isolated_msi`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interrupts {
    /// They can send no others.
    Isolated,
    /// They can send any, and so can whoever programs them.
    Unsafe,
}

/// Says whether the IOMMU makes a device's accesses coherent with the CPU's caches even where the
/// device asks for others (`enforce_cache_coherency`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheCoherency {
    /// It does.
    Enforced,
    /// A device can pass the caches by.
    NotEnforced,
}

/// Says what is known of the devices behind a domain that is attached.
#[must_use]
pub struct Attach<'a> {
    interrupts: Interrupts,
    regions: ReservedRegions,
    coherency: CacheCoherency,
    cancelled: &'a dyn Fn() -> bool,
}

impl Attach<'_> {
    /// Devices with such interrupts and without reserved regions, whose accesses need not be
    /// coherent.
    pub fn new(interrupts: Interrupts) -> Self {
        Self {
            interrupts,
            regions: ReservedRegions::new(),
            coherency: CacheCoherency::NotEnforced,
            cancelled: &|| false,
        }
    }

    /// Attaches also where interrupts are not isolated: `allow_unsafe_interrupts` of type1. A user
    /// of the devices can then disturb everybody on the machine.
    pub fn allow_unsafe_interrupts(self) -> Self {
        Self { interrupts: Interrupts::Isolated, ..self }
    }

    /// Nothing is mapped in these regions, but in those that are
    /// [relaxable](RegionKind::DirectRelaxable): the caller has taken the devices over from
    /// firmware.
    pub fn regions(self, regions: ReservedRegions) -> Self {
        Self { regions, ..self }
    }

    /// The domain makes accesses coherent, or does not.
    pub fn coherency(self, coherency: CacheCoherency) -> Self {
        Self { coherency, ..self }
    }

    /// A domain of such devices.
    pub(super) fn into_attached<F, M, O>(self, domain: Domain<F, M, O>) -> Arc<Attached>
    where
        F: Format,
        M: TableMemory<F::Word> + 'static,
        O: IommuOps + 'static,
    {
        let Self { regions, coherency, .. } = self;
        domain.ops().observe(&Event::OneOwner);
        Arc::new(Attached { regions, coherency, paging: Box::new(Own::new(domain)) })
    }
}

impl<'a> Attach<'a> {
    /// Asks `cancelled` between batches of spans. Once it answers `true` all is taken back and the
    /// attach ends with [`Error::Cancelled`].
    pub fn cancelled_by(self, cancelled: &'a dyn Fn() -> bool) -> Self {
        Self { cancelled, ..self }
    }
}

impl fmt::Debug for Attach<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attach")
            .field("interrupts", &self.interrupts)
            .field("regions", &self.regions)
            .field("coherency", &self.coherency)
            .finish_non_exhaustive()
    }
}

/// A mapping that is to go back into its slot, and whether it was refused.
type Put<P> = (Option<Box<Mapping<P>>>, Result<(), Error<<P as Pinner>::Error>>);

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Maps all that is mapped into `domain` too, which is the container's from now on, and limits
    /// what can be mapped to what all domains can translate.
    ///
    /// The first domain has everything pinned and charged; the next get the spans of the first, at
    /// the price of its leaves. Nobody maps or unmaps meanwhile. A device that fits to a domain
    /// which is there already, where Linux would look for an equal one, is attached to that one by
    /// the caller: an [`Attachment`](iommu::Attachment) says what a device uses, and a container
    /// what a domain translates.
    ///
    /// ```
    /// use std::error::Error;
    ///
    /// use dmaspan::container::{Attach, Error as ContainerError, Interrupts};
    /// use dmaspan::io_pgtable::{AmdV1, AmdV1Config, Arena, PageTable};
    /// use dmaspan::iommu::{Domain, SoftIommu};
    /// use dmaspan::{Account, Container, HostAddr, PhysAddr};
    /// use dmaspan_linux::LinuxPinner;
    ///
    /// fn main() -> Result<(), Box<dyn Error>> {
    ///     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    ///     let table = PageTable::new(AmdV1::new(AmdV1Config::new(48, 48))?, tables)?;
    ///     let iommu = SoftIommu::over(&table).reaching::<HostAddr>();
    ///     let domain = Domain::new(table, iommu)?;
    ///     let container: Container<_, parking_lot::RawMutex> =
    ///         Container::new(LinuxPinner::<HostAddr>::new()?, Account::new(1 << 20));
    ///     let id = container.attach(domain, Attach::new(Interrupts::Isolated))?;
    ///     assert_eq!(container.info().domains, [id]);
    ///     container.detach(id)?;
    ///     assert!(matches!(container.detach(id), Err(ContainerError::NoDomain { .. })));
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error`], with translations, pins and charges as before; the domain is dropped.
    /// [`Error::UnsafeInterrupts`]; [`Error::Changing`] where others did not end in time what they
    /// were at; [`Error::NoAperture`] and [`Error::NoPageSize`] where the domain does not go with
    /// others; [`Error::MappedOutside`], [`Error::MappedReserved`] and [`Error::MappedMisaligned`]
    /// where it does not go with a mapping; [`Error::Quarantined`] where a mapping that hardware
    /// may use is still mapped in part, or stays for emulated devices: it is unmapped first, or
    /// hardware answers; and all that a map is refused for. Where the domain's hardware answers
    /// neither that it has forgotten a mapping nor that it has let go, the memory of that mapping
    /// stays pinned and charged, also when it is unmapped later, until it answers; and where so
    /// much waits for it that there is no room, the domain stays attached.
    ///
    /// # Context
    ///
    /// From the moment that this is called nobody begins to map, unmap or look; it waits until
    /// those who are at it are done: with a [`BusyHook`](super::BusyHook) by that, else by spinning
    /// for 2^20 looks at most. The caller is in the middle of no other operation.
    ///
    /// Nothing that others begin prolongs it: it waits for the operations that had begun, one of
    /// each thread at most, and their syncs, which take as long as hardware needs to answer or to
    /// fail. Then it does a fixed number of steps for each mapping, and the leaves. Callers that
    /// are refused meanwhile and come again at once take its CPU and its lock: without a hook they
    /// should pause.
    #[track_caller]
    pub fn attach<F, M, O>(
        &self,
        domain: Domain<F, M, O>,
        how: Attach<'_>,
    ) -> Result<DomainId, Error<P::Error>>
    where
        F: Format,
        M: TableMemory<F::Word> + 'static,
        O: IommuOps<Address = P::Address> + 'static,
    {
        if how.interrupts == Interrupts::Unsafe {
            return Err(Error::UnsafeInterrupts);
        }
        self.retry_idle();
        let cancelled = how.cancelled;
        let attached = how.into_attached(domain);
        let (domains, id) = self.waiting_alone(|| self.begin_attach(&attached))?;
        // Its place in the list is the only one, so that it can be made to let go.
        drop(attached);
        self.attach_last(domains, id, cancelled)
    }

    /// Looks whether the domain goes with the others and with what is mapped, and keeps everybody
    /// else away.
    fn begin_attach(
        &self,
        attached: &Arc<Attached>,
    ) -> Result<(Domains, DomainId), Error<P::Error>> {
        let mut all = self.state.lock();
        all.check_idle()?;
        all.check_vaddr()?;
        all.check_parts()?;
        let (domains, id) = all.domains.with(attached).map_err(|_| Error::NoMemoryForDomain)?;
        let room = all.quarantine.make_room(BATCH, domains.list.len());
        room.map_err(|_| Error::NoMemoryForDomain)?;
        let geometry = attached.paging.geometry();
        if domains.page_sizes == 0 {
            let (domain, others) = (geometry.page_sizes, all.domains.page_sizes);
            return Err(Error::NoPageSize { domain, others });
        }
        all.check_aperture(geometry.aperture)?;
        all.check_regions(&attached.regions)?;
        if domains.apertures.is_empty() {
            return Err(Error::NoAperture { aperture: geometry.aperture });
        }
        let granule = self.granule(&domains);
        if granule > self.granule(&all.domains) {
            all.check_granule(granule)?;
        }
        all.exclusive = true;
        Ok((domains, id))
    }

    /// Replays all mappings into the last of `domains`, which become the container's.
    #[track_caller]
    fn attach_last(
        &self,
        mut domains: Domains,
        id: DomainId,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<DomainId, Error<P::Error>> {
        let by = Caller { device: None, label: Label::caller() };
        let replayed = match domains.list.as_slice() {
            [(_, first), .., (_, last)] => {
                let (from, to) = (&*first.paging, &*last.paging);
                self.replay(|mapping| {
                    to.observe(&Event::Mapping { range: mapping.range, by });
                    let copied = self.copy(&mapping, from, to, cancelled);
                    (Some(mapping), copied)
                })
            }
            _ => self.replay(|mapping| {
                domains.observe(&Event::Mapping { range: mapping.range, by });
                let room = self.state.lock().quarantine.reserve(BATCH);
                if room == 0 {
                    let range = mapping.range;
                    return (Some(mapping), Err(Error::QuarantineFull { range }));
                }
                let populated = self.populate(mapping, &domains, room, cancelled, Then::Stay);
                self.state.lock().quarantine.give_back(room);
                match populated {
                    Ok((mapping, _)) => (Some(mapping), Ok(())),
                    Err(error) => (None, Err(error)),
                }
            }),
        };
        let Err(error) = replayed else {
            self.end_exclusive(Some(domains));
            log::info!("{id:?} was attached to the container");
            return Ok(id);
        };
        log::warn!("{id:?} was not attached to the container: {error}");
        // The error says why there is no domain, not what became of it.
        let gone = domains.let_go(id);
        if domains.list.len() > 1 {
            if let (Err(source), Some(last)) = (gone, domains.get(id)) {
                let _ = self.withdraw(last, source);
            }
        } else if self.take_all(&domains, Then::Stay).stuck {
            self.end_exclusive(Some(domains));
            return Err(error);
        }
        let domain = domains.remove(id);
        drop(domains);
        self.depart(domain);
        self.end_exclusive(None);
        Err(error)
    }

    /// Takes a domain out of the container and away from its hardware.
    ///
    /// With the last domain everything is unmapped, unless there are emulated devices: then
    /// mappings stay, pinned only where those have pinned them. Nobody maps or unmaps meanwhile,
    /// and nothing is allocated, but for the list of where mappings may lie: it stays as it was
    /// where there is no memory for a longer one.
    ///
    /// # Errors
    ///
    /// [`Error::NoDomain`] and [`Error::Changing`] with nothing changed. [`Error::NotForgotten`]
    /// for the first mapping that hardware may still use, since it answers neither that it has let
    /// go nor that it has forgotten it: its memory stays pinned and charged until it does. The
    /// domain is out of the container nevertheless, unless it is the last one and there is no room
    /// for all that would have to wait; its tables leak.
    ///
    /// # Context
    ///
    /// As for [`attach`](Self::attach).
    pub fn detach(&self, id: DomainId) -> Result<(), Error<P::Error>> {
        self.retry_idle();
        let gone = self.waiting_alone(|| self.begin_detach(id))?;
        let domains = Arc::clone(&self.state.lock().domains);
        let emulated = self.state.lock().emulated();
        let mut outcome = TakenDown::default();
        match (domains.list.len(), gone, domains.get(id)) {
            (1, ..) if emulated > 0 => {
                outcome = self.take_all(&domains, Then::Stay);
                self.state.lock().charge_external();
            }
            (1, ..) => outcome = self.take_all(&domains, Then::Go),
            (_, Err(source), Some(domain)) => outcome.kept = self.withdraw(domain, source),
            _ => {}
        }
        drop(domains);
        if !outcome.stuck {
            let mut all = self.state.lock();
            let removed = Arc::get_mut(&mut all.domains).and_then(|domains| domains.remove(id));
            drop(all);
            self.depart(removed);
        }
        self.end_exclusive(None);
        log::info!("{id:?} was detached from the container");
        let TakenDown { unmapped, kept, .. } = outcome;
        kept.map_or(Ok(()), |Unforgotten { first, source, bytes }| {
            Err(Error::NotForgotten { range: first, source, kept: bytes, unmapped })
        })
    }

    /// Ends a domain that is out of the container: its tables are freed, and what it was the last
    /// to confirm is released. One whose hardware has something to confirm waits for that.
    fn depart(&self, domain: Option<Arc<Attached>>) {
        let Some(domain) = domain else { return };
        let gone = self.state.lock().quarantine.depart(domain);
        drop(gone);
        let domains = Arc::clone(&self.state.lock().domains);
        self.settle(&domains, IovaRange::ALL);
    }

    /// Keeps everybody else away and makes the domain's hardware let go.
    fn begin_detach(&self, id: DomainId) -> Result<Result<(), HardwareError>, Error<P::Error>> {
        let mut all = self.state.lock();
        if all.domains.get(id).is_none() {
            return Err(Error::NoDomain { id });
        }
        all.check_idle()?;
        all.mark_all_dirty();
        let domains = Arc::get_mut(&mut all.domains).ok_or(Error::Changing)?;
        let gone = domains.let_go(id);
        all.exclusive = true;
        Ok(gone)
    }

    /// Lets others map and unmap again, with other domains or the same.
    pub(super) fn end_exclusive(&self, domains: Option<Domains>) {
        let mut all = self.state.lock();
        if let Some(domains) = domains {
            all.domains = Arc::new(domains);
        }
        all.exclusive = false;
        drop(all);
        self.wake();
    }

    /// Unmaps everything from the only domain and unpins it; mappings go or stay.
    fn take_all(&self, domains: &Domains, then: Then) -> TakenDown {
        let mut at = Some(IovaRange::ALL.start());
        let mut outcome = Unmap::new(self, domains, then).run(
            &mut |all| {
                let mapping = all.take_next(at?)?;
                at = mapping.range.last().checked_add(1);
                Some(mapping)
            },
            None,
        );
        // What waited for this domain alone does not any more where it has let go.
        outcome.unmapped = outcome.unmapped.wrapping_add(self.settle(domains, IovaRange::ALL));
        let waits = self.state.lock().unforgotten(IovaRange::ALL);
        if waits.is_none() && !outcome.stuck {
            outcome.kept = None;
        }
        if let Some((kept, waits)) = outcome.kept.as_mut().zip(waits) {
            kept.bytes = kept.bytes.wrapping_add(waits.bytes);
        }
        outcome
    }

    /// Takes all mappings out of one domain of several, whose hardware did not let go. Unless it
    /// confirms that it has forgotten them, they stay pinned until it does.
    fn withdraw(&self, domain: &dyn Paging, source: HardwareError) -> Option<Unforgotten> {
        let mut synced = Ok(());
        domain.gathering(None, &mut |own| {
            let mut from = Some(Iova::new(0));
            while let Some((range, ())) = self.next_mapping(from, |_| ()) {
                own.remove(range, None);
                from = range.last().checked_add(1);
            }
            synced = own.sync();
        });
        if synced.and_then(|()| domain.retry()).is_ok() {
            return None;
        }
        let number = unconfirmed::now();
        let mut found: Option<Unforgotten> = None;
        let mut from = Some(Iova::new(0));
        while let Some((range, bytes)) = self.next_mapping(from, |mapping| {
            let pinned = mapping.pinned.is_some();
            mapping.bound = pinned.then_some(Bound { number, source }).or(mapping.bound);
            if pinned { mapping.len() } else { 0 }
        }) {
            from = range.last().checked_add(1);
            if bytes > 0 {
                let found = found.get_or_insert(Unforgotten { first: range, source, bytes: 0 });
                found.bytes = found.bytes.wrapping_add(bytes);
            }
        }
        found
    }

    /// Puts every mapping into a domain until one is refused. `put` returns what its slot gets.
    fn replay(
        &self,
        mut put: impl FnMut(Box<Mapping<P>>) -> Put<P>,
    ) -> Result<(), Error<P::Error>> {
        let mut at = Some(IovaRange::ALL.start());
        while let Some(mapping) = at.and_then(|at| self.state.lock().take_next(at)) {
            let range = mapping.range;
            let (mapping, result) = put(mapping);
            let mut all = self.state.lock();
            if let Some((slot, mapping)) = all.tree.get_mut(range.start()).zip(mapping) {
                slot.state = SlotState::Mapped(mapping);
            }
            drop(all);
            result?;
            at = range.last().checked_add(1);
        }
        Ok(())
    }

    /// Maps what `from` has of a mapping into `to`, span by span.
    fn copy(
        &self,
        mapping: &Mapping<P>,
        from: &dyn Paging,
        to: &dyn Paging,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error<P::Error>> {
        let Some(pinned) = &mapping.pinned else { return Ok(()) };
        let (user, start) = (mapping.user, mapping.range.start());
        let mut room = SpanBuf::room::<BATCH>();
        let mut at = start;
        for run in pinned.runs.rest(RunCursor::default()) {
            let range = IovaRange::from_len(at, run.bytes).ok();
            at = at.wrapping_add(run.bytes);
            let (Behind::Pinned(kind), mut rest) = (run.behind, range) else { continue };
            while let Some(range) = rest {
                let mapped = range.start().get() - start.get();
                if cancelled() {
                    return Err(Error::Cancelled { user, mapped });
                }
                let mut buf = SpanBuf::new(&mut room);
                rest = from.spans(range, &mut buf);
                let left = rest.map_or(0, |rest| rest.len_less_one().wrapping_add(1));
                let user = user.start().wrapping_add(mapped);
                let refused = |source| Error::Map { user, source };
                if bytes_of(buf.spans()) != range.len_less_one().wrapping_add(1).wrapping_sub(left)
                {
                    // Never so; what follows a hole would be mapped elsewhere.
                    let error = io_pgtable::Error::Hole { hole: range };
                    return Err(refused(error.into()));
                }
                to.map(range.start(), buf.spans(), prot_of(mapping.prot, kind))
                    .map_err(|failed| refused(failed.error))?;
            }
        }
        to.announce(mapping.range).map_err(|source| {
            let source = iommu::Error::Hardware { range: mapping.range, source };
            Error::Map { user: user.start(), source }
        })
    }
}

impl<P: Pinner> State<P> {
    /// Takes the first mapping from `at` on, whose slot is the caller's then; also one in
    /// quarantine with a part that is mapped.
    fn take_next(&mut self, at: Iova) -> Option<Box<Mapping<P>>> {
        let Self { tree, quarantine, .. } = self;
        tree.visit_mut(at, IovaRange::ALL.last(), |slot| {
            match core::mem::replace(&mut slot.state, SlotState::Busy) {
                SlotState::Mapped(mapping) => return Some(mapping),
                SlotState::Quarantined(mut mapping) if mapping.has_rest() => {
                    quarantine.leave();
                    mapping.leaving.unfinished |= mapping.leaving.then == Then::Go;
                    return Some(mapping);
                }
                other => slot.state = other,
            }
            None
        })
    }

    /// Refuses where a mapping in quarantine is still mapped in part, or is to stay.
    fn check_parts(&self) -> Result<(), Error<P::Error>> {
        let Some(Unforgotten { first, .. }) = self.unforgotten(IovaRange::ALL) else {
            return Ok(());
        };
        let mut slots = overlapping(&self.tree, IovaRange::ALL);
        let is_part = |slot: &MappingSlot<P>| slot.mapped().is_none() && slot.left().is_some();
        match slots.find(|(_, slot)| is_part(slot)) {
            Some((quarantined, _)) => Err(Error::Quarantined { range: first, quarantined }),
            None => Ok(()),
        }
    }

    /// Refuses to begin anything while domains change, or somebody goes first.
    #[inline(always)]
    pub(super) fn check_open(&self) -> Result<(), Error<P::Error>> {
        if self.exclusive || self.asking > 0 { Err(Error::Changing) } else { Ok(()) }
    }

    /// Counts one more at work, of whom domains stay as they are.
    #[inline(always)]
    pub(super) fn at_work(&mut self) -> Arc<Domains> {
        self.working += 1;
        Arc::clone(&self.domains)
    }

    /// Refuses where anybody is at work.
    pub(super) fn check_idle(&mut self) -> Result<(), Error<P::Error>> {
        // A caller that works without the lock holds the domains.
        let alone = Arc::get_mut(&mut self.domains).is_some();
        let idle = alone && self.working == 0 && self.revoking == 0 && !self.exclusive;
        if idle { Ok(()) } else { Err(Error::Changing) }
    }

    /// Refuses where something is mapped that `aperture` does not cover.
    fn check_aperture(&self, aperture: IovaRange) -> Result<(), Error<P::Error>> {
        let below = before(IovaRange::ALL, aperture.start());
        let behind = aperture.last().checked_add(1);
        let above = behind.and_then(|start| IovaRange::new(start, IovaRange::ALL.last()));
        match below.into_iter().chain(above).find_map(|range| self.mapping_in(range)) {
            Some(mapping) => Err(Error::MappedOutside { mapping, aperture }),
            None => Ok(()),
        }
    }

    /// Refuses where something is mapped that a device has reserved.
    fn check_regions(&self, regions: &ReservedRegions) -> Result<(), Error<P::Error>> {
        for &region in regions.as_slice() {
            if region.kind == RegionKind::DirectRelaxable {
                continue;
            }
            if let Some(mapping) = self.mapping_in(region.range) {
                return Err(Error::MappedReserved { mapping, region });
            }
        }
        Ok(())
    }

    /// Refuses where something is mapped that does not begin and end with a page.
    fn check_granule(&self, granule: u64) -> Result<(), Error<P::Error>> {
        let cut = |mapping: &IovaRange| {
            let ends = mapping.start().get() | mapping.last().get().wrapping_add(1);
            ends & granule.wrapping_sub(1) != 0
        };
        let mapped = self.tree.values().filter_map(|slot| Some(slot.mapped()?.range));
        match mapped.into_iter().find(cut) {
            Some(mapping) => Err(Error::MappedMisaligned { mapping, granule }),
            None => Ok(()),
        }
    }

    /// The first mapping that has an address in `range`.
    fn mapping_in(&self, range: IovaRange) -> Option<IovaRange> {
        let mut mapped = overlapping(&self.tree, range).filter(|(_, slot)| slot.mapped().is_some());
        mapped.next().map(|(range, _)| range)
    }
}
