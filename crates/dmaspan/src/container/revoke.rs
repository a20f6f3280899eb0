//! Device memory that is taken away while it is mapped.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::ops::Range;

use lock_api::RawMutex;

use super::Container;
use super::domains::Domains;
use super::error::Error;
use super::mapping::{Behind, Mapping, SlotState};
use super::paging::Taken;
use crate::addr::Iova;
use crate::iommu::HardwareError;
use crate::pin::{Dirty, Kind, Pinner};
use crate::range::{IovaRange, UserRange};
use crate::span::SpanBuf;

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
    /// tables. Whoever calls it sees to it that nobody maps the range anew. Looks at every mapping.
    ///
    /// # Errors
    ///
    /// [`Error::StillPinned`] where emulated devices have pinned some of the device memory, and do
    /// not unpin it when they are told. Then nothing was revoked.
    ///
    /// [`Error::Busy`] where a mapping of the range is under construction or on its way out, and
    /// [`Error::Changing`]: call it again, it goes on. [`Error::NotForgotten`] for the first
    /// mapping whose device memory hardware may still use; all others were revoked.
    pub fn revoke(&self, space: &P::Space, user: UserRange) -> Result<u64, Error<P::Error>> {
        let space_id = self.pinner.space_id(space);
        self.revoke_external(space_id, user)?;
        let (mut from, mut revoked, mut failed) = (Some(Iova::new(0)), 0u64, None);
        while let Some(start) = from {
            let taken = self.waiting(|| self.take_for_revoke(start, space_id, user))?;
            let Some((mut mapping, domains)) = taken else { break };
            let range = mapping.range;
            from = range.last().checked_add(1);
            let state = match self.revoke_parts(&mut mapping, &domains, user) {
                Ok(bytes) => {
                    revoked = revoked.wrapping_add(bytes);
                    if let Some(source) = mapping.unforgotten {
                        failed = failed.or(Some(Error::NotForgotten { range, source }));
                    }
                    SlotState::Mapped(mapping)
                }
                Err(source) => {
                    failed = failed.or(Some(Error::NotForgotten { range, source }));
                    // With what it has pinned.
                    drop(mapping);
                    SlotState::Quarantined
                }
            };
            self.finish(range, Some(state), domains);
        }
        failed.map_or(Ok(revoked), Err)
    }

    /// Takes the next mapping over that `user` has device memory in.
    #[expect(clippy::type_complexity, reason = "a mapping and its domains, which end together")]
    fn take_for_revoke(
        &self,
        from: Iova,
        space_id: u64,
        user: UserRange,
    ) -> Result<Option<(Box<Mapping<P>>, Arc<Domains>)>, Error<P::Error>> {
        let mut all = self.state.lock();
        let slots = all.tree.range(from..);
        let mut of_user = slots.filter(|(_, slot)| {
            slot.space_id == space_id && slot.user.intersection(user).is_some()
        });
        let start = loop {
            let Some((&start, slot)) = of_user.next() else { return Ok(None) };
            match &slot.state {
                SlotState::Mapped(mapping) if has_mmio(mapping, user) => {
                    if mapping.copies > 0 || mapping.is_being_read() {
                        return Err(busy(slot.range(start)));
                    }
                    break start;
                }
                SlotState::Busy | SlotState::Doomed(..) => return Err(busy(slot.range(start))),
                SlotState::Mapped(_) | SlotState::Quarantined => {}
            }
        };
        let domains = self.begin(&mut all)?;
        let Some(slot) = all.tree.get_mut(&start) else { return Ok(None) };
        match core::mem::replace(&mut slot.state, SlotState::Busy) {
            SlotState::Mapped(mapping) => Ok(Some((mapping, domains))),
            other => {
                slot.state = other;
                Ok(None)
            }
        }
    }

    /// Takes away what `user` leads to of a mapping's device memory.
    fn revoke_parts(
        &self,
        mapping: &mut Mapping<P>,
        domains: &Domains,
        user: UserRange,
    ) -> Result<u64, HardwareError> {
        let mut room = SpanBuf::room::<BATCH>();
        let (mut revoked, mut from) = (0u64, Start { run: 0, offset: 0 });
        let dirty = Dirty::after(mapping.prot);
        while let Some(part) = next_part(mapping, domains, user, from, &mut room) {
            if dirty == Dirty::Written {
                // With the leaves go hardware's marks.
                mapping.mark_dirty(part.range);
            }
            let Some(pinned) = &mut mapping.pinned else { break };
            let mut rest = Some(part.range);
            while let Some(range) = rest {
                let mut buf = SpanBuf::new(&mut room);
                let Taken { bytes, synced } = domains.unmap(&[range], &mut buf, None);
                synced?;
                if mapping.unforgotten.is_none() {
                    self.pinner.unpin(&mut pinned.pin, buf.spans(), Kind::Mmio, dirty);
                }
                let left = range.len_less_one().wrapping_add(1).wrapping_sub(bytes);
                rest = IovaRange::from_len(range.start().wrapping_add(bytes), left).ok();
            }
            let bytes = part.bytes.end - part.bytes.start;
            let Start { run, offset } = part.start;
            pinned.runs.revoke(run, part.bytes.start, bytes);
            revoked = revoked.wrapping_add(bytes);
            // What lies before the part in its run, if anything does, is a run of its own now.
            let run = run + 1 + usize::from(part.bytes.start > 0);
            from = Start { run, offset: offset.saturating_add(part.bytes.end) };
        }
        Ok(revoked)
    }
}

fn busy<E: core::error::Error>(range: IovaRange) -> Error<E> {
    Error::Busy { range, busy: range }
}

/// Whether `user` leads to device memory of the mapping.
fn has_mmio<P: Pinner>(mapping: &Mapping<P>, user: UserRange) -> bool {
    let Some(pinned) = &mapping.pinned else { return false };
    let mut at = mapping.user.start();
    pinned.runs.all().iter().any(|run| {
        let range = UserRange::from_len(at, run.bytes).ok();
        at = at.wrapping_add(run.bytes);
        run.behind == Behind::Pinned(Kind::Mmio)
            && range.is_some_and(|range| range.intersection(user).is_some())
    })
}

/// The next part to take away, from a run on.
fn next_part<P: Pinner>(
    mapping: &mut Mapping<P>,
    domains: &Domains,
    user: UserRange,
    from: Start,
    room: &mut [crate::span::Span],
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
