//! The quarantine keeps what hardware has not confirmed to have forgotten, and lets it go once
//! hardware has.
//!
//! Where a sync fails, translations are gone and memory stays pinned, because a device may use it.
//! Its spans wait here, in room that was allocated when the first domain came, and its mapping
//! waits in its slot. Every operation that syncs first tries again what failed, and releases what
//! all domains have confirmed by then. A domain that goes while its hardware has not let go stays
//! here until that hardware has forgotten what failed.
//!
//! An unmap reserves room before it takes translations away. While there is none, nothing is taken
//! away: what is mapped stays as it is until hardware answers.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use lock_api::RawMutex;

use super::domains::{Attached, Domains, cover};
use super::error::Error;
use super::mapping::{Mapping, SlotState, Then, Vaddr, overlapping};
use super::unmap::Unforgotten;
use super::{Container, State};
use crate::addr::{Iova, UserAddr};
use crate::iommu::{self, HardwareError};
use crate::log;
use crate::pin::{Dirty, Kind, Pinner, unpin_outputs};
use crate::range::IovaRange;
use crate::span::Span;

/// How many batches have room.
const BATCHES: usize = 16;

/// Pieces that have room at least, however small batches are.
const LEAST: usize = 1024;

/// What is said of a domain that is not there any more.
pub(super) const GONE: HardwareError = HardwareError { what: "the domain is gone", status: 0 };

/// Memory that was taken out of a mapping and is not unpinned.
pub(super) struct Piece {
    /// Where its mapping begins.
    owner: Iova,
    span: Span,
    kind: Kind,
    /// It waits for all that failed before [this](super::unconfirmed::now).
    number: u64,
}

/// What waits for hardware.
#[derive(Default)]
pub(super) struct Quarantine {
    pieces: Vec<Piece>,
    /// How many more pieces there may be, of those that have room.
    reserved: usize,
    /// Domains that are the container's no more, and whose hardware may still use what was in them.
    departed: Vec<Arc<Attached>>,
    /// Where tables were detached that hardware may still walk.
    walks: Option<IovaRange>,
    /// How many slots are in quarantine.
    slots: usize,
}

impl Quarantine {
    /// Makes room for batches of so many spans, and for so many domains to depart.
    pub(super) fn make_room(&mut self, batch: usize, domains: usize) -> Result<(), NoRoom> {
        let pieces = batch.saturating_mul(BATCHES).max(LEAST) - self.pieces.len();
        self.pieces.try_reserve_exact(pieces).map_err(|_| NoRoom)?;
        self.departed.try_reserve(domains).map_err(|_| NoRoom)
    }

    /// Reserves room for the pieces of up to `spans` spans, which lie in as many runs at most, and
    /// returns how many spans that are: fewer where much is reserved, 0 where there is no room.
    #[inline(always)]
    pub(super) fn reserve(&mut self, spans: usize) -> usize {
        let used = self.pieces.len().saturating_add(self.reserved);
        let free = self.pieces.capacity().saturating_sub(used);
        // Each end of a span and each end of a run ends a piece.
        let spans = spans.min((free / 8).max(1)).min(free / 2);
        self.reserved += 2 * spans;
        spans
    }

    /// Gives back room that was reserved.
    #[inline(always)]
    pub(super) fn give_back(&mut self, spans: usize) {
        self.reserved -= 2 * spans;
    }

    /// Whether anything waits.
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        let none = self.pieces.is_empty() && self.departed.is_empty();
        none && self.walks.is_none() && self.slots == 0
    }

    /// Holds memory of the mapping at `owner`. There is room, which was reserved.
    pub(super) fn hold(&mut self, owner: Iova, span: Span, kind: Kind, number: u64) {
        self.pieces.push(Piece { owner, span, kind, number });
    }

    /// Notes that hardware may walk detached tables in a range.
    pub(super) fn keep_walks(&mut self, walks: Option<IovaRange>) {
        self.walks = cover(self.walks, walks);
    }

    /// Where a map of `range` must not rely on what hardware knows of tables.
    pub(super) fn walks(&self, range: IovaRange) -> Option<IovaRange> {
        self.walks.filter(|walks| walks.intersection(range).is_some())
    }

    /// Keeps a domain that has gone as long as its hardware has something to confirm. There is
    /// room.
    pub(super) fn depart(&mut self, domain: Arc<Attached>) -> Option<Arc<Attached>> {
        if domain.paging.oldest().is_none() {
            return Some(domain);
        }
        self.departed.push(domain);
        None
    }

    /// Makes the hardware of domains that have gone let go of their tables, as far as it does.
    pub(super) fn let_departed_go(&mut self) {
        for domain in &mut self.departed {
            let _ = Arc::get_mut(domain).map(|domain| domain.paging.let_go());
        }
    }

    /// How many slots are in quarantine.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// A slot went into quarantine.
    pub(super) fn enter(&mut self) {
        self.slots += 1;
    }

    /// A slot came out of it.
    pub(super) fn leave(&mut self) {
        self.slots -= 1;
    }
}

/// There is no memory for what may have to wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoRoom;

/// Room in quarantine for so many spans, which is given back when this is dropped, by a panic too.
pub(super) struct Reserved<'c, P: Pinner, L: RawMutex, const BATCH: usize> {
    pub(super) container: &'c Container<P, L, BATCH>,
    pub(super) spans: usize,
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Drop for Reserved<'_, P, L, BATCH> {
    fn drop(&mut self) {
        if self.spans > 0 {
            self.container.state.lock().quarantine.give_back(self.spans);
        }
    }
}

impl<P: Pinner> State<P> {
    /// Where a map of `range`, which is free, must not rely on what hardware knows of tables.
    #[inline(always)]
    pub(super) fn walks(&self, range: IovaRange) -> Option<IovaRange> {
        if self.walking == 0 && self.quarantine.walks.is_none() {
            return None;
        }
        self.walks_around(range)
    }

    #[cold]
    fn walks_around(&self, range: IovaRange) -> Option<IovaRange> {
        let mut found = self.quarantine.walks(range);
        if self.walking > 0 {
            let behind = self.tree.seek(range.start());
            let before = self.tree.before(behind);
            let places = before.into_iter().chain([behind]);
            for (_, slot) in places.filter_map(|place| self.tree.at(place)) {
                let walks = slot.walks.filter(|walks| walks.intersection(range).is_some());
                found = cover(found, walks);
            }
        }
        found
    }

    /// All that failed before this is confirmed by the hardware of all domains.
    pub(super) fn proven(&self, domains: &Domains) -> u64 {
        let departed = self.quarantine.departed.iter().filter_map(|domain| domain.paging.oldest());
        departed.chain(domains.oldest()).min().unwrap_or(u64::MAX)
    }

    /// The part of `range` that waits for hardware: the first mapping, why, and the bytes of all.
    #[inline(always)]
    pub(super) fn unforgotten(&self, range: IovaRange) -> Option<Unforgotten> {
        let mut found: Option<Unforgotten> = None;
        if self.quarantine.slots > 0 {
            for (at, slot) in overlapping(&self.tree, range) {
                let SlotState::Quarantined(mapping) = &slot.state else { continue };
                let source = mapping.unforgotten().unwrap_or(GONE);
                let found = found.get_or_insert(Unforgotten { first: at, source, bytes: 0 });
                found.bytes = found.bytes.wrapping_add(mapping.len());
            }
        }
        found
    }

    /// Puts a mapping that was taken down into quarantine.
    pub(super) fn quarantine(&mut self, mapping: Box<Mapping<P>>) {
        let range = mapping.range;
        self.set_vaddr(range, Vaddr::Known);
        if let Some(slot) = self.tree.get_mut(range.start()) {
            log::warn!(
                "the mapping at {range} ({}) is in quarantine, pinned and charged, until hardware \
                 confirms that it forgot it: {}",
                slot.label,
                mapping.unforgotten().unwrap_or(GONE)
            );
            slot.state = SlotState::Quarantined(mapping);
            self.quarantine.enter();
        }
    }

    /// Takes a slot out of the tree.
    #[inline(always)]
    pub(super) fn remove(&mut self, range: IovaRange) {
        let Some(place) = self.tree.find(range.start()) else { return };
        if let Some((_, slot)) = self.tree.at(place) {
            self.invalid -= usize::from(slot.vaddr == Vaddr::Invalid);
            self.walking -= usize::from(slot.walks.is_some());
            self.tree.remove(place);
        }
    }

    /// Unpins what hardware has confirmed to have forgotten, of mappings that nobody works on.
    fn unpin_proven(&mut self, pinner: &P, proven: u64) {
        let Self { tree, quarantine, .. } = self;
        let mut n = 0;
        while let Some(piece) = quarantine.pieces.get(n) {
            let mapping = tree.get_mut(piece.owner).and_then(|slot| slot.idle_mut());
            let Some(mapping) = mapping.filter(|_| piece.number <= proven) else {
                n += 1;
                continue;
            };
            mapping.unbind(proven);
            if mapping.bound.is_some() {
                n += 1;
                continue;
            }
            // First: where the pinner panics it is not asked again, and the mapping stays.
            let Piece { span, kind, .. } = quarantine.pieces.swap_remove(n);
            let dirty = Dirty::after(mapping.prot);
            if let Some(pin) = mapping.pinned.as_mut().and_then(|pinned| pinned.pin.as_mut()) {
                unpin_outputs(pinner, pin, &[span], kind, dirty);
            }
            mapping.leaving.held -= 1;
        }
    }

    /// Takes the next mapping from `from` on out of its slot that has nothing to wait for.
    fn take_free(&mut self, from: Iova, proven: u64) -> Option<Box<Mapping<P>>> {
        if self.quarantine.slots == 0 {
            return None;
        }
        let Self { tree, quarantine, .. } = self;
        tree.visit_mut(from, IovaRange::ALL.last(), |slot| {
            match core::mem::replace(&mut slot.state, SlotState::Busy) {
                SlotState::Quarantined(mapping)
                    if mapping.is_free(proven) && !mapping.has_rest() =>
                {
                    quarantine.leave();
                    return Some(mapping);
                }
                other => slot.state = other,
            }
            None
        })
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Makes hardware forget walks into tables that others have detached around `range`, which is
    /// the caller's, before there are new ones.
    #[cold]
    pub(super) fn forget_walks(
        &self,
        range: IovaRange,
        walks: IovaRange,
        domains: &Domains,
    ) -> Result<(), Error<P::Error>> {
        let synced = domains.forget_walks(walks);
        let mut all = self.state.lock();
        let slot = all.tree.get_mut(range.start());
        let user = slot.as_ref().map_or(UserAddr::new(0), |slot| slot.user.start());
        let cleared = slot.and_then(|slot| slot.walks.take());
        all.walking -= usize::from(cleared.is_some());
        synced.map_err(|source| {
            let source = iommu::Error::Hardware { range: walks, source };
            Error::Map { user, source }
        })
    }

    /// Syncs again what was not confirmed, and releases what is now. Returns the bytes of mappings
    /// in `range` that are gone by that. The caller is at work.
    #[cold]
    pub(super) fn retry(&self, domains: &Domains, range: IovaRange) -> u64 {
        for domain in domains.each() {
            // What fails waits for the next time.
            let _ = domain.retry();
        }
        for n in 0.. {
            let departed = self.state.lock().quarantine.departed.get(n).cloned();
            let Some(domain) = departed else { break };
            let _ = domain.paging.retry();
        }
        self.settle(domains, range)
    }

    /// [`retry`](Self::retry) for whoever is not at work. Nothing where nothing waits, or domains
    /// change.
    pub(super) fn retry_idle(&self) {
        let mut all = self.state.lock();
        if all.quarantine.is_empty() {
            return;
        }
        let begun = self.begin(&mut all);
        drop(all);
        if let Ok(domains) = begun {
            self.retry(&domains, IovaRange::ALL);
            drop(domains);
            self.state.lock().working -= 1;
            self.wake();
        }
    }

    /// Releases what all domains have confirmed.
    pub(super) fn settle(&self, domains: &Domains, range: IovaRange) -> u64 {
        let mut all = self.state.lock();
        let proven = all.proven(domains);
        if proven == u64::MAX {
            all.quarantine.walks = None;
        }
        all.unpin_proven(&self.pinner, proven);
        let (mut bytes, mut from) = (0u64, Some(Iova::new(0)));
        while let Some(mut mapping) = from.and_then(|from| all.take_free(from, proven)) {
            let mapped = mapping.range;
            from = mapped.last().checked_add(1);
            drop(all);
            log::info!("the mapping at {mapped} left quarantine: hardware has forgotten it");
            self.release(&mut mapping);
            all = self.state.lock();
            if mapping.leaving.then == Then::Stay {
                mapping.leaving = super::mapping::Leaving::default();
                mapping.bound = None;
                // Devices wrote until now.
                mapping.mark_dirty(mapped);
                if let Some(slot) = all.tree.get_mut(mapped.start()) {
                    slot.state = SlotState::Mapped(mapping);
                }
                continue;
            }
            all.remove(mapped);
            if range.contains(mapped.start()) {
                bytes = bytes.wrapping_add(mapping.len());
            }
            drop(all);
            // What its space does when it is dropped is its own affair.
            drop(mapping);
            all = self.state.lock();
        }
        let confirmed = |domain: &mut Arc<Attached>| domain.paging.oldest().is_none();
        let at = |all: &mut State<P>| all.quarantine.departed.iter_mut().position(confirmed);
        while let Some(n) = at(&mut all) {
            let mut domain = all.quarantine.departed.swap_remove(n);
            drop(all);
            if let Some(domain) = Arc::get_mut(&mut domain) {
                // Its tables are freed if hardware lets go of them at last.
                let _ = domain.paging.let_go();
            }
            drop(domain);
            all = self.state.lock();
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::PhysAddr;

    #[test]
    fn all_room_is_handed_out_of_which_nobody_gets_more_than_an_eighth() {
        for (batch, held) in [(1, 0), (1, 3), (64, 0), (65, 100), (256, 0)] {
            let mut quarantine = Quarantine::default();
            quarantine.make_room(batch, 1).unwrap();
            let room = quarantine.pieces.capacity();
            assert!(room >= 1024 && room >= 16 * batch);
            let span = Span::covering(PhysAddr::new(0), 1);
            (0..held).for_each(|_| quarantine.hold(Iova::new(0), span, Kind::Memory, 0));
            quarantine.make_room(batch, 1).unwrap();
            assert_eq!(quarantine.pieces.capacity(), room, "there is room already");
            let (mut free, mut handed_out) = (room - held, Vec::new());
            loop {
                let spans = quarantine.reserve(usize::MAX);
                // Each span may become two pieces.
                assert_eq!(spans, (free / 8).max(1).min(free / 2), "{free} of {room}");
                if spans == 0 {
                    break;
                }
                free -= 2 * spans;
                handed_out.push(spans);
            }
            assert!(free < 2);
            handed_out.iter().for_each(|spans| quarantine.give_back(*spans));
            assert_eq!(quarantine.reserve(5), 5);
            quarantine.give_back(5);
            assert_eq!(quarantine.reserve(usize::MAX), (room - held) / 8);
        }
    }
}
