//! A mapping that is unmapped alone, as most are, is taken down here without batches.

use alloc::boxed::Box;
use core::mem;

use lock_api::RawMutex;

use super::Container;
use super::domains::{Domains, Gathers};
use super::mapping::{Mapping, Pinned, SlotState};
use super::quarantine::Reserved;
use super::room::{FEW_SPANS, NO_SPAN, Room};
use super::takedown::{TakenDown, Unmap};
use crate::iommu::Event;
use crate::label::{Caller, Label};
use crate::pin::{Dirty, Pinner, unpin_outputs};
use crate::range::IovaRange;
use crate::span::{Span, SpanBuf};

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Takes a [plain](Mapping::is_plain) mapping down that is alone, and that there is room for:
    /// the steps are those of [`Unmap::run`], without the batches. The caller's work ends with it.
    /// Returns it when it is gone.
    ///
    /// # Errors
    ///
    /// What came of it by batches, where it was not as simple. The caller is still at work.
    #[inline(always)]
    #[track_caller]
    pub(super) fn take_plain_down(
        &self,
        mapping: Box<Mapping<P>>,
        domains: &Domains,
        spans: usize,
    ) -> Result<Box<Mapping<P>>, TakenDown> {
        let mut reserved = Reserved { container: self, spans };
        let by = Caller { device: None, label: Label::caller() };
        let range = mapping.range;
        domains.observe(&Event::Unmapping { range, by });
        let (mut mapping, mut outcome) = (Some(mapping), TakenDown::default());
        domains.gathering(&mut |gathers| {
            let Some(mut own) = mapping.take() else { return };
            let mut room = Room::<Span, FEW_SPANS, BATCH>::new(spans, NO_SPAN);
            let mut buf = SpanBuf::new(room.first(spans, NO_SPAN));
            let taken = gathers.unmap(range, &mut buf, None);
            let is_down = taken == own.len();
            let walks = if is_down { self.detach_around(range, domains, gathers) } else { None };
            let synced = gathers.sync();
            if !is_down || synced.is_err() {
                let reserved = mem::take(&mut reserved.spans);
                let unmap = Unmap::of_unmap(self, domains, (Some(own), 0), reserved);
                outcome = unmap.go_on(taken, buf.spans(), synced, walks);
                return;
            }
            if let Some(Pinned { pin: Some(pin), runs, .. }) = &mut own.pinned
                && let Some(kind) = runs.only_kind()
            {
                unpin_outputs(&self.pinner, pin, buf.spans(), kind, Dirty::after(own.prot));
            }
            self.release(&mut own);
            mapping = Some(own);
        });
        let Some(mapping) = mapping else { return Err(outcome) };
        let mut all = self.state.lock();
        all.remove(range);
        all.quarantine.give_back(spans);
        mem::forget(reserved);
        if all.quarantine.slots() > 0 {
            // Perhaps something of the range waits for hardware meanwhile.
            drop(all);
            return Err(TakenDown { unmapped: mapping.len(), ..outcome });
        }
        all.working -= 1;
        Ok(mapping)
    }

    /// [`Unmap::detach_tables`] for a mapping that is taken down alone.
    #[inline(always)]
    fn detach_around(
        &self,
        range: IovaRange,
        domains: &Domains,
        gathers: &mut Gathers<'_>,
    ) -> Option<IovaRange> {
        let mut all = self.state.lock();
        let all = &mut *all;
        let slot = all.tree.get_mut(range.start())?;
        slot.state = SlotState::Emptied;
        let gap = all.gap(range)?;
        if !domains.may_reclaim(range, gap) {
            return None;
        }
        let walks = gathers.reclaim(range, gap)?;
        let slot = all.tree.get_mut(range.start())?;
        all.walking += usize::from(slot.walks.replace(walks).is_none());
        Some(walks)
    }
}
