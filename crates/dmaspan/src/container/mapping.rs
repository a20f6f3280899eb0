//! The tree of mappings, and each mapping's runs. Every operation of the container looks here for
//! who owns a range.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cmp::Ordering;
use core::iter;

use super::log::Log;
use super::tree::Place;
use crate::account::{Account, Charge};
use crate::addr::Iova;
use crate::iommu::HardwareError;
use crate::label::Label;
use crate::leak;
use crate::pin::{Kind, Pinner};
use crate::prot::Prot;
use crate::range::{IovaRange, UserRange};

/// All mappings, by first IOVA. No two overlap.
pub(super) type Tree<P> = super::tree::Tree<MappingSlot<P>>;

/// A place in the tree: it keeps others away from its IOVAs.
pub(super) struct MappingSlot<P: Pinner> {
    pub(super) last: Iova,
    /// Tells it from what is mapped there later.
    pub(super) serial: u64,
    /// How many unmaps are telling devices of it.
    pub(super) announcing: u32,
    /// Whose memory and which, also while somebody works on the mapping.
    pub(super) space_id: u64,
    pub(super) user: UserRange,
    /// What is told of the mapping also while somebody works on it.
    pub(super) prot: Prot,
    pub(super) owner: Arc<Account>,
    pub(super) label: Label,
    pub(super) vaddr: Vaddr,
    /// Where empty tables around it were detached, which hardware may still walk: a map that comes
    /// there syncs first.
    pub(super) walks: Option<IovaRange>,
    pub(super) state: SlotState<P>,
}

/// Whether a mapping's space and user addresses are where its memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vaddr {
    /// It is, or nobody asks any more.
    Known,
    /// It has moved, and nobody has said where to.
    Invalid,
}

pub(super) enum SlotState<P: Pinner> {
    /// One operation is building it or taking it down, and owns its IOVAs.
    Busy,
    Mapped(Box<Mapping<P>>),
    /// The unmap with this number will take it down, and owns its IOVAs.
    Doomed(Box<Mapping<P>>, u64),
    /// It has no translations any more, and goes when that was synced.
    Emptied,
    /// It was taken down, and hardware has not confirmed that it forgot all of it.
    Quarantined(Box<Mapping<P>>),
}

impl<P: Pinner> MappingSlot<P> {
    pub(super) fn range(&self, start: Iova) -> IovaRange {
        // The tree holds valid ranges only; the fallback is never taken.
        IovaRange::new(start, self.last).unwrap_or(IovaRange::point(start))
    }

    /// The mapping, if it is nobody's work and still mapped, or in quarantine with a part that is,
    /// or to stay.
    pub(super) fn left(&self) -> Option<&Mapping<P>> {
        match &self.state {
            SlotState::Mapped(mapping) => Some(mapping),
            SlotState::Quarantined(mapping)
                if mapping.has_rest() || mapping.leaving.then == Then::Stay =>
            {
                Some(mapping)
            }
            _ => None,
        }
    }

    /// The mapping, if it is nobody's work, also in quarantine.
    pub(super) fn idle_mut(&mut self) -> Option<&mut Box<Mapping<P>>> {
        match &mut self.state {
            SlotState::Mapped(mapping) | SlotState::Quarantined(mapping) => Some(mapping),
            _ => None,
        }
    }

    /// The mapping, if it is nobody's work.
    pub(super) fn mapped_mut(&mut self) -> Option<&mut Mapping<P>> {
        match &mut self.state {
            SlotState::Mapped(mapping) => Some(mapping),
            _ => None,
        }
    }

    /// The mapping, if it is nobody's work.
    pub(super) fn mapped(&self) -> Option<&Mapping<P>> {
        match &self.state {
            SlotState::Mapped(mapping) => Some(mapping),
            _ => None,
        }
    }
}

/// A mapping, and what it holds.
pub(super) struct Mapping<P: Pinner> {
    pub(super) range: IovaRange,
    pub(super) user: UserRange,
    pub(super) space: P::Space,
    /// Whose memory it is.
    pub(super) account: Arc<Account>,
    pub(super) prot: Prot,
    /// `None` in a container without domains.
    pub(super) pinned: Option<Pinned<P::Pin>>,
    /// How far it was taken down, by whoever owns its slot.
    pub(super) leaving: Leaving,
    /// What was written, while that is tracked. An operation that takes a mapping out of its slot
    /// to change its tables, and puts it back, asks first whether the mapping [is being
    /// read](Self::is_being_read).
    pub(super) log: Option<Arc<Log>>,
    /// A device behind a domain that is gone may use it: nothing is unpinned before that hardware
    /// has confirmed that it does not.
    pub(super) bound: Option<Bound>,
    /// How many reads and writes of emulated devices expect that it stays, without the lock.
    pub(super) copies: u32,
    /// Of mappings that are taken down together, the next.
    pub(super) next: Option<Box<Self>>,
}

/// What a domain that is gone has not confirmed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    /// All that failed before [this](super::unconfirmed::now).
    pub(super) number: u64,
    /// What its hardware said.
    pub(super) source: HardwareError,
}

/// How much of a mapping was taken down.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Leaving {
    pub(super) bytes: u64,
    /// The place in the runs.
    pub(super) at: RunCursor,
    /// The same before the last batch.
    pub(super) before: RunCursor,
    /// How many pieces of its memory are in quarantine.
    pub(super) held: usize,
    /// What hardware said when it did not confirm a sync.
    pub(super) failed: Option<HardwareError>,
    /// Nobody knows any more what hardware uses: it is never unpinned.
    pub(super) lost: bool,
    /// Whether it stays when it is taken down, without a pin.
    pub(super) then: Then,
    /// Whether the map that made it has failed, or an unmap: it is not mapped as a whole, and goes.
    pub(super) unfinished: bool,
}

/// What becomes of a mapping that was taken down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum Then {
    /// It goes.
    #[default]
    Go,
    /// It stays, without a pin.
    Stay,
}

impl Leaving {
    /// Its end where the mappings around it have this one: an unfinished mapping goes.
    pub(super) fn then(&self, then: Then) -> Then {
        if self.unfinished { Then::Go } else { then }
    }

    /// Goes on by bytes that the current run has, `run` being its rest.
    #[inline(always)]
    pub(super) fn pass(&mut self, run: BackingRun, bytes: u64) {
        self.bytes = self.bytes.wrapping_add(bytes);
        self.at.advance(run, bytes);
    }
}

/// What is pinned for domains.
pub(super) struct Pinned<Pin> {
    /// `None` where the pinner has none after all, and hardware may use what it said was pinned.
    pub(super) pin: Option<Pin>,
    pub(super) charge: Charge,
    pub(super) runs: Runs,
}

impl<Pin> Pinned<Pin> {
    /// Keeps the memory pinned and charged for ever, and its space, by whose number it is charged:
    /// no other gets that.
    pub(super) fn leak<Space: Clone>(self, space: &Space) {
        core::mem::forget(self.pin);
        core::mem::forget(self.charge);
        core::mem::forget(space.clone());
    }
}

/// A pin that was not released stays, with its charge: a device may use it.
impl<P: Pinner> Drop for Mapping<P> {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            // First, since a logger may panic.
            pinned.leak(&self.space);
            leak::pin(self.user, self.range);
        }
    }
}

impl<P: Pinner> Mapping<P> {
    /// The addresses of `range` that are mapped here, and the user's memory behind them.
    pub(super) fn part(&self, range: IovaRange) -> Option<(IovaRange, UserRange)> {
        let part = self.range.intersection(range)?;
        let offset = part.start().get() - self.range.start().get();
        let start = self.user.start().wrapping_add(offset);
        let user = UserRange::new(start, start.wrapping_add(part.len_less_one()))?;
        Some((part, user))
    }

    /// Whether anything of it is mapped in domains.
    pub(super) fn has_rest(&self) -> bool {
        self.pinned.as_ref().is_some_and(|pinned| pinned.runs.at(self.leaving.at).is_some())
    }

    /// Whether it is as most are: pinned and mapped as a whole, of one kind, and nobody but its
    /// slot has to do with it.
    #[inline(always)]
    pub(super) fn is_plain(&self) -> bool {
        let is_run = self.pinned.as_ref().is_some_and(|pinned| {
            let run = pinned.runs.only_kind();
            pinned.pin.is_some() && run.is_some()
        });
        let Leaving { bytes, held, lost, .. } = self.leaving;
        let stays = bytes == 0 && held == 0 && !lost;
        is_run && stays && self.log.is_none() && self.bound.is_none()
    }

    /// How many of its bytes are mapped in domains.
    pub(super) fn bytes_left(&self) -> u64 {
        if self.has_rest() { self.len() - self.leaving.bytes } else { 0 }
    }

    /// Notes that hardware has confirmed what failed before `proven`.
    pub(super) fn unbind(&mut self, proven: u64) {
        self.bound.take_if(|bound| bound.number <= proven);
    }

    /// Whether hardware has confirmed all that keeps it pinned once it is taken down, of what
    /// failed before `proven`.
    pub(super) fn is_free(&self, proven: u64) -> bool {
        let unbound = self.bound.is_none_or(|bound| bound.number <= proven);
        unbound && self.leaving.held == 0 && !self.leaving.lost
    }

    /// Why it is still pinned, where hardware may use it.
    pub(super) fn unforgotten(&self) -> Option<HardwareError> {
        self.leaving.failed.or(self.bound.map(|bound| bound.source))
    }

    /// How many bytes it has.
    pub(super) fn len(&self) -> u64 {
        // No mapping is of a whole space.
        self.range.len_less_one().wrapping_add(1)
    }
}

/// What is behind bytes of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behind {
    Pinned(Kind),
    /// Device memory that was there and was taken away: nothing is mapped.
    Revoked,
}

/// Bytes that follow each other and have the same behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BackingRun {
    pub(super) bytes: u64,
    pub(super) behind: Behind,
}

/// There is no memory for another run.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoRoom;

/// What is behind a mapping, in order: usually one run, since a page-table entry cannot say of what
/// kind its memory is.
#[derive(Debug)]
pub(super) enum Runs {
    /// Of memory, which no revocation cuts. It is where the mapping is: most have no memory of
    /// their own for it.
    One(BackingRun),
    More(Vec<BackingRun>),
}

impl Default for Runs {
    fn default() -> Self {
        Self::More(Vec::new())
    }
}

impl Runs {
    /// Adds bytes behind what is there.
    #[inline(always)]
    pub(super) fn push(&mut self, bytes: u64, kind: Kind) -> Result<(), NoRoom> {
        let run = BackingRun { bytes, behind: Behind::Pinned(kind) };
        let last = match self {
            Self::More(runs) if runs.is_empty() && kind == Kind::Memory => {
                *self = Self::One(run);
                return Ok(());
            }
            Self::One(only) => Some(only),
            Self::More(runs) => runs.last_mut(),
        };
        if let Some(last) = last.filter(|last| last.behind == run.behind) {
            // A mapping is shorter than 2^64 bytes.
            last.bytes = last.bytes.saturating_add(bytes);
            return Ok(());
        }
        self.with_room(1).ok_or(NoRoom)?.push(run);
        Ok(())
    }

    /// The runs, with room for so many more.
    fn with_room(&mut self, more: usize) -> Option<&mut Vec<BackingRun>> {
        if let Self::One(only) = self {
            let mut runs = Vec::new();
            runs.try_reserve(1 + more).ok()?;
            runs.push(*only);
            *self = Self::More(runs);
        }
        let Self::More(runs) = self else { return None };
        runs.try_reserve(more).ok().map(|()| runs)
    }

    /// Takes the last `bytes` away again, which [`push`](Self::push) added.
    pub(super) fn pop(&mut self, bytes: u64) {
        let last = match self {
            Self::One(only) => Some(only),
            Self::More(runs) => runs.last_mut(),
        };
        let Some(last) = last else { return };
        last.bytes = last.bytes.saturating_sub(bytes);
        if last.bytes > 0 {
            return;
        }
        match self {
            Self::One(_) => *self = Self::default(),
            Self::More(runs) => drop(runs.pop()),
        }
    }

    /// All runs.
    #[inline(always)]
    pub(super) fn all(&self) -> &[BackingRun] {
        match self {
            Self::One(only) => core::slice::from_ref(only),
            Self::More(runs) => runs,
        }
    }

    /// Of what kind all is, where it is one run.
    #[inline(always)]
    pub(super) fn only_kind(&self) -> Option<Kind> {
        match self {
            Self::One(BackingRun { behind: Behind::Pinned(kind), .. }) => Some(*kind),
            _ => None,
        }
    }

    /// Whether there is room to cut a run into three.
    pub(super) fn room_to_cut(&mut self) -> bool {
        self.with_room(2).is_some()
    }

    /// Notes that bytes of run `n` were taken away, `len` of them from its byte `offset` on. There
    /// is [room](Self::room_to_cut), or they are the whole run.
    pub(super) fn revoke(&mut self, n: usize, offset: u64, len: u64) {
        let Some(run) = self.all().get(n).copied() else { return };
        let (behind, bytes) = (run.behind, run.bytes);
        let revoked = BackingRun { bytes: len, behind: Behind::Revoked };
        let after = bytes.saturating_sub(offset).saturating_sub(len);
        if let Self::One(only) = self {
            if after == 0 && offset == 0 {
                *only = revoked;
                return;
            }
            *self = Self::More(alloc::vec![run]);
        }
        let Self::More(runs) = self else { return };
        runs[n] = revoked;
        if after > 0 {
            runs.insert(n + 1, BackingRun { bytes: after, behind });
        }
        if offset > 0 {
            runs.insert(n, BackingRun { bytes: offset, behind });
        }
    }

    /// The parts of `user`, which is behind the mapping, that are memory.
    pub(super) fn memory(&self, user: UserRange) -> impl Iterator<Item = UserRange> + Clone {
        let parts = self.all().iter().scan(user.start(), |at, run| {
            let start = *at;
            *at = start.wrapping_add(run.bytes);
            Some((start, *run))
        });
        parts
            .filter(|(_, run)| run.behind == Behind::Pinned(Kind::Memory))
            .filter_map(|(start, run)| UserRange::from_len(start, run.bytes).ok())
    }

    /// The runs from one place to another, cut to what lies between them.
    #[inline(always)]
    pub(super) fn between(
        &self,
        from: RunCursor,
        to: RunCursor,
    ) -> impl Iterator<Item = BackingRun> {
        let runs = (from.run..).zip(self.rest(from));
        runs.map_while(move |(n, run)| match n.cmp(&to.run) {
            Ordering::Less => Some(run),
            Ordering::Equal => {
                let passed = if n == from.run { from.bytes } else { 0 };
                Some(BackingRun { bytes: to.bytes - passed, ..run }).filter(|run| run.bytes > 0)
            }
            Ordering::Greater => None,
        })
    }

    /// What lies behind `at` of the run there; `None` at the end.
    #[inline(always)]
    pub(super) fn at(&self, at: RunCursor) -> Option<BackingRun> {
        let run = self.all().get(at.run)?;
        Some(BackingRun { bytes: run.bytes - at.bytes, ..*run })
    }

    /// The runs from `at` on, the first cut to what lies behind `at`.
    #[inline(always)]
    pub(super) fn rest(&self, at: RunCursor) -> impl Iterator<Item = BackingRun> {
        let passed = move |n| if n == 0 { at.bytes } else { 0 };
        let runs = self.all().get(at.run..).unwrap_or_default().iter().enumerate();
        runs.map(move |(n, run)| BackingRun { bytes: run.bytes - passed(n), ..*run })
    }
}

/// A place in [`Runs`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RunCursor {
    run: usize,
    /// Bytes of the run that lie before it, fewer than the run has.
    bytes: u64,
}

impl RunCursor {
    /// Moves by bytes that the current run has, `run` being its rest.
    #[inline(always)]
    pub(super) fn advance(&mut self, run: BackingRun, bytes: u64) {
        if bytes < run.bytes {
            self.bytes += bytes;
        } else {
            *self = Self { run: self.run + 1, bytes: 0 };
        }
    }
}

impl<P: Pinner> Tree<P> {
    /// The place of the first slot with an address at or behind `at`.
    #[inline(always)]
    pub(super) fn reaching(&self, at: Iova) -> Place {
        if let Some(place) = self.here(at) {
            return place;
        }
        let place = self.seek(at);
        if self.key(place) == Some(at) {
            return place;
        }
        // Slots are disjoint, so of those that begin before only the last can reach so far.
        let before = self.before(place).filter(|before| {
            let slot = self.at(*before);
            slot.is_some_and(|(_, slot)| slot.last >= at)
        });
        before.unwrap_or(place)
    }

    /// The slots that have an address in `range`, each with its range; `from` is the place
    /// that is the first [reaching](Self::reaching) it.
    #[inline(always)]
    pub(super) fn overlapping(
        &self,
        from: Place,
        range: IovaRange,
    ) -> impl Iterator<Item = (IovaRange, &MappingSlot<P>)> {
        let mut next = Some(from);
        iter::from_fn(move || {
            let place = next?;
            let (start, slot) = self.at(place).filter(|(start, _)| *start <= range.last())?;
            next = (slot.last < range.last()).then(|| self.next(place));
            Some((slot.range(start), slot))
        })
    }
}

/// The slots that have an address in `range`, each with its range.
pub(super) fn overlapping<P: Pinner>(
    tree: &Tree<P>,
    range: IovaRange,
) -> impl Iterator<Item = (IovaRange, &MappingSlot<P>)> {
    tree.overlapping(tree.reaching(range.start()), range)
}
