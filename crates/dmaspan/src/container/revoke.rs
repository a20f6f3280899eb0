//! Device memory is taken away here while it is mapped, for an owner whose device goes.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::ops::Range;

use lock_api::RawMutex;

use super::busy::Claim;
use super::domains::Domains;
use super::error::Error;
use super::mapping::{Behind, Mapping, SlotState, Vaddr};
use super::quarantine::Reserved;
use super::takedown::hold;
use super::unmap::Unforgotten;
use super::{Container, State};
use crate::addr::Iova;
use crate::iommu::HardwareError;
use crate::pin::{Dirty, Kind, Pinner, unpin_outputs};
use crate::range::{IovaRange, UserRange};
use crate::span::{Span, SpanBuf};

/// Where a run begins.
#[derive(Clone, Copy)]
struct Start {
    run: usize,
    /// Bytes of the mapping before it.
    offset: u64,
}

/// What follows each other in a run and is to be taken away: bytes of it.
struct Part {
    start: Start,
    bytes: Range<u64>,
    range: IovaRange,
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Takes the translations of device memory away that `user` of `space` leads to, in all
    /// mappings, and returns their bytes. When it returns no device reaches it; what an IOVA led to
    /// is then nothing, and the mapping stays otherwise as it is until it is unmapped.
    ///
    /// For who takes device memory from its user: a device that is reset or unplugged, a BAR whose
    /// user unmaps it. As nothing pins it, it is revoked *before* it goes. Memory is pinned and is
    /// left alone.
    ///
    /// It goes by contiguous device memory: all of a span goes of which a part is to go, as its
    /// leaves cannot be cut.
    ///
    /// # Context
    ///
    /// May sleep where the [`BusyHook`](super::BusyHook) does, for a map that is pinning among
    /// others: the caller holds no lock that the pinner takes, such as that of the user's page
    /// tables. The caller sees to it that nobody maps the range anew. Looks at every mapping.
    ///
    /// It waits for those at work on mappings of the range, by the hook or spinning for a bounded
    /// time. From then on nobody begins to map, unmap or look until it returns, so that it ends
    /// however many there are; a change of domains that waits already goes before it.
    ///
    /// # Errors
    ///
    /// [`Error::StillPinned`] where emulated devices have pinned some of the device memory, and do
    /// not unpin it when they are told. Then nothing was revoked.
    ///
    /// [`Error::Busy`] where a mapping of the range is still under construction or on its way out,
    /// and [`Error::Changing`], when it has waited: call it again, it goes on.
    /// [`Error::NotForgotten`] for the first mapping whose device memory hardware may still use;
    /// that of all others was revoked. Called again it asks hardware again, and succeeds when that
    /// has forgotten all.
    pub fn revoke(&self, space: &P::Space, user: UserRange) -> Result<u64, Error<P::Error>> {
        let space_id = self.pinner.space_id(space);
        self.revoke_external(space_id, user)?;
        self.retry_idle();
        let (mut from, mut revoked) = (Some(Iova::new(0)), 0u64);
        let mut failed: Option<Unforgotten> = None;
        let mut claim = None;
        while let Some(start) = from {
            let mut taken = self.take_for_revoke(start, space_id, user, claim.as_ref());
            if let Err(Error::Busy { .. } | Error::Changing) = taken {
                if claim.is_none() {
                    claim = Some(self.claim_revoking()?);
                }
                let claim = claim.as_ref();
                taken = self.waiting_first(|| self.take_for_revoke(start, space_id, user, claim));
            }
            let Some((mut mapping, domains)) = taken? else { break };
            let range = mapping.range;
            from = range.last().checked_add(1);
            let (bytes, result) = self.revoke_parts(&mut mapping, &domains, user);
            revoked = revoked.wrapping_add(bytes);
            let held = mapping.unforgotten().filter(|_| mapping.leaving.held > 0);
            if let Some(source) = result.err().or(held) {
                let kept = Unforgotten { first: range, source, bytes: 0 };
                let kept = failed.get_or_insert(kept);
                kept.bytes = kept.bytes.wrapping_add(mapping.len());
            }
            self.finish(range, Some(mapping), domains, 0);
        }
        let failed = failed.or_else(|| self.state.lock().unrevoked(space_id, user));
        failed.map_or(Ok(revoked), |Unforgotten { first, source, bytes }| {
            Err(Error::NotForgotten { range: first, source, kept: bytes, unmapped: revoked })
        })
    }

    /// Takes the next mapping over that `user` has device memory in, also where others go first if
    /// the caller has a claim.
    #[expect(clippy::type_complexity, reason = "a mapping and its domains, which end together")]
    fn take_for_revoke(
        &self,
        from: Iova,
        space_id: u64,
        user: UserRange,
        claim: Option<&Claim<'_, P, L, BATCH>>,
    ) -> Result<Option<(Box<Mapping<P>>, Arc<Domains>)>, Error<P::Error>> {
        let mut all = self.state.lock();
        let mut place = all.tree.seek(from);
        let start = loop {
            let Some((start, slot)) = all.tree.at(place) else { return Ok(None) };
            place = all.tree.next(place);
            // Its new addresses are being looked up, and may be these.
            let is_moving = slot.vaddr == Vaddr::Invalid && matches!(slot.state, SlotState::Busy);
            let is_it = slot.space_id == space_id && slot.user.intersection(user).is_some();
            if !is_moving && !is_it {
                continue;
            }
            match &slot.state {
                SlotState::Mapped(mapping)
                    if has_mmio(mapping, user) || mapping.leaving.held > 0 =>
                {
                    if mapping.copies > 0 || mapping.is_being_read() {
                        return Err(busy(slot.range(start)));
                    }
                    break start;
                }
                SlotState::Busy | SlotState::Emptied | SlotState::Doomed(..) => {
                    return Err(busy(slot.range(start)));
                }
                SlotState::Mapped(_) | SlotState::Quarantined(_) => {}
            }
        };
        if all.exclusive || claim.is_none() {
            all.check_open()?;
        }
        let domains = all.at_work();
        let Some(slot) = all.tree.get_mut(start) else { return Ok(None) };
        match core::mem::replace(&mut slot.state, SlotState::Busy) {
            SlotState::Mapped(mapping) => Ok(Some((mapping, domains))),
            other => {
                slot.state = other;
                Ok(None)
            }
        }
    }

    /// Takes away what `user` leads to of a mapping's device memory. Returns how many bytes, and
    /// what hardware said where it did not confirm a part or where there was no room for more.
    fn revoke_parts(
        &self,
        mapping: &mut Mapping<P>,
        domains: &Domains,
        user: UserRange,
    ) -> (u64, Result<(), HardwareError>) {
        let mut room = SpanBuf::room::<BATCH>();
        let (mut revoked, mut result, mut from) = (0u64, Ok(()), Start { run: 0, offset: 0 });
        while let Some(part) = next_part(mapping, domains, user, from, &mut room) {
            if Dirty::after(mapping.prot) == Dirty::Written {
                // With the leaves go hardware's marks.
                mapping.mark_dirty(part.range);
            }
            let mut rest = Some(part.range);
            while let Some(range) = rest {
                let (bytes, synced) = self.revoke_batch(mapping, domains, range, &mut room);
                result = result.and(synced);
                let left = range.len_less_one().wrapping_add(1).wrapping_sub(bytes);
                rest = IovaRange::from_len(range.start().wrapping_add(bytes), left).ok();
                if bytes == 0 {
                    break;
                }
            }
            let Some(pinned) = &mut mapping.pinned else { break };
            let left = rest.map_or(0, |rest| rest.len_less_one().wrapping_add(1));
            let bytes = part.bytes.end - part.bytes.start - left;
            if bytes == 0 {
                break;
            }
            let Start { run, offset } = part.start;
            pinned.runs.revoke(run, part.bytes.start, bytes);
            revoked = revoked.wrapping_add(bytes);
            if left > 0 {
                break;
            }
            // What lies before the part in its run, if anything does, is a run of its own now.
            let run = run + 1 + usize::from(part.bytes.start > 0);
            from = Start { run, offset: offset.saturating_add(part.bytes.end) };
        }
        (revoked, result)
    }

    /// Takes away what of device memory has room in quarantine, and says how many bytes that is.
    fn revoke_batch(
        &self,
        mapping: &mut Mapping<P>,
        domains: &Domains,
        range: IovaRange,
        room: &mut [Span],
    ) -> (u64, Result<(), HardwareError>) {
        let spans = self.state.lock().quarantine.reserve(room.len());
        if spans == 0 {
            let what = "too many unmaps wait for hardware that does not answer";
            return (0, Err(HardwareError { what, status: 0 }));
        }
        let _reserved = Reserved { container: self, spans };
        let mut buf = SpanBuf::new(&mut room[..spans]);
        let (mut bytes, mut synced) = (0, Ok(()));
        domains.gathering(&mut |gathers| {
            bytes = gathers.unmap(range, &mut buf, None);
            synced = gathers.sync();
        });
        if mapping.bound.is_some() {
            let proven = self.state.lock().proven(domains);
            mapping.unbind(proven);
        }
        let unforgotten = synced.err().or(mapping.bound.map(|bound| bound.source));
        let dirty = Dirty::after(mapping.prot);
        if let Some(pin) = mapping.pinned.as_mut().and_then(|pinned| pinned.pin.as_mut())
            && unforgotten.is_none()
        {
            unpin_outputs(&self.pinner, pin, buf.spans(), Kind::Mmio, dirty);
        }
        if let Some(error) = unforgotten {
            mapping.leaving.failed = mapping.leaving.failed.or(Some(error));
            mapping.leaving.held += buf.len();
            let mut all = self.state.lock();
            hold(&mut all, mapping.range.start(), buf.spans(), Kind::Mmio);
        }
        (bytes, unforgotten.map_or(Ok(()), Err))
    }
}

impl<P: Pinner> State<P> {
    /// The first mapping in quarantine by which hardware may use device memory that `user` leads
    /// to, or led to before it was taken away.
    fn unrevoked(&self, space_id: u64, user: UserRange) -> Option<Unforgotten> {
        let slots = self.tree.values().filter(|slot| slot.space_id == space_id);
        let mut quarantined = slots.filter_map(|slot| match &slot.state {
            SlotState::Quarantined(mapping) => Some(mapping),
            _ => None,
        });
        let is_memory = |behind: Behind| behind == Behind::Pinned(Kind::Memory);
        let found = quarantined.find(|mapping| has(mapping, user, |behind| !is_memory(behind)))?;
        let source = found.unforgotten().unwrap_or(super::quarantine::GONE);
        Some(Unforgotten { first: found.range, source, bytes: found.len() })
    }
}

fn busy<E: core::error::Error>(range: IovaRange) -> Error<E> {
    Error::Busy { range, busy: range }
}

/// Whether `user` leads to device memory of the mapping.
fn has_mmio<P: Pinner>(mapping: &Mapping<P>, user: UserRange) -> bool {
    has(mapping, user, |behind| behind == Behind::Pinned(Kind::Mmio))
}

/// Whether `user` leads to such memory of the mapping.
fn has<P: Pinner>(
    mapping: &Mapping<P>,
    user: UserRange,
    is_wanted: impl Fn(Behind) -> bool,
) -> bool {
    let Some(pinned) = &mapping.pinned else { return false };
    let mut at = mapping.user.start();
    pinned.runs.all().iter().any(|run| {
        let range = UserRange::from_len(at, run.bytes).ok();
        at = at.wrapping_add(run.bytes);
        is_wanted(run.behind) && range.is_some_and(|range| range.intersection(user).is_some())
    })
}

/// The next part to take away, from a run on.
fn next_part<P: Pinner>(
    mapping: &mut Mapping<P>,
    domains: &Domains,
    user: UserRange,
    from: Start,
    room: &mut [Span],
) -> Option<Part> {
    let (start, user_start) = (mapping.range.start(), mapping.user.start());
    let runs = &mut mapping.pinned.as_mut()?.runs;
    let mut offset = from.offset;
    for (run_number, run) in (from.run..).zip(runs.all().get(from.run..)?) {
        let before = offset;
        offset = offset.saturating_add(run.bytes);
        if run.behind != Behind::Pinned(Kind::Mmio) {
            continue;
        }
        let of_run = UserRange::from_len(user_start.wrapping_add(before), run.bytes).ok()?;
        let Some(wanted) = of_run.intersection(user) else { continue };
        let first = wanted.start().get() - of_run.start().get();
        let last = wanted.last().get() - of_run.start().get();
        let iovas = IovaRange::from_len(start.wrapping_add(before), run.bytes).ok()?;
        let mut bytes = domains.whole_spans(iovas, first..last.saturating_add(1), room);
        if !runs.room_to_cut() {
            bytes = 0..iovas.len_less_one().wrapping_add(1);
        }
        let len = bytes.end - bytes.start;
        let range = IovaRange::from_len(iovas.start().wrapping_add(bytes.start), len).ok()?;
        let start = Start { run: run_number, offset: before };
        return Some(Part { start, bytes, range });
    }
    None
}
