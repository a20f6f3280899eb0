//! A device's accesses to mapped memory and beside it, and syncs.

use std::sync::Arc;

use dmaspan::{Direction, DmaAddr, Iova, IovaRange, PhysAddr, Prot, Span};

use super::event::Record;
use super::intervals::Cut as _;
use super::report::{FindingKind, Severity};
use super::state::{MappedPiece, State, Subject, Suspect, behind, memory};
use super::turns::Turns;
use crate::iotlb::AbsentEntries;
use crate::walker::Access;

/// A finding, and operations that led to it.
type Wrong = (FindingKind, Subject, Vec<Record>);

impl State {
    pub(super) fn dma(&mut self, range: IovaRange, access: Access, now: &Record) {
        let (own, next) = self.next_mapping(range, access).unzip();
        let own = own.unwrap_or(range);
        let mut left = Some(own);
        while let Some(gap) = left.and_then(|rest| self.mapped.gap(rest)) {
            let (kind, subject, before) = self.used(gap, access);
            let goes_on = kind.class() == Severity::Advice;
            self.find(kind, subject, before, now);
            if !goes_on {
                return;
            }
            left = behind(subject.0, own);
        }
        let wrong = self.forbidden(own, access).or(next);
        let wrong = wrong.or_else(|| self.unsynced(own, access));
        if let Some((kind, subject, before)) = wrong {
            self.find(kind, subject, before, now);
        }
    }

    /// The part of an access before it comes into another mapping than it began in, if it does.
    fn next_mapping(&self, range: IovaRange, access: Access) -> Option<(IovaRange, Wrong)> {
        let mut pieces = self.mapped.meeting(range);
        let (first, from) = pieces.next()?;
        let (next, into) = pieces.find(|(_, part)| part.of != from.of)?;
        let last = next.start().get().checked_sub(1).map(Iova::new)?;
        let own = IovaRange::new(range.start(), last)?;
        let (mapping, used) = (self.whole(first), next.intersection(range)?);
        let kind = FindingKind::IntoNext { access, mapping, next: self.whole(next) };
        let before = vec![from.mapped.clone(), into.mapped.clone()];
        Some((own, (kind, (used, memory_in(used, next, into)), before)))
    }

    /// What is wrong with an access to a gap, or at least with its first part.
    fn used(&self, gap: IovaRange, access: Access) -> Wrong {
        let used = |piece: IovaRange| piece.intersection(gap).unwrap_or(piece);
        if let Some((range, stale)) = self.leaves.first(gap) {
            let (part, mut stale) = (used(range), stale.clone());
            stale.advance(part.start().get() - range.start().get());
            let Suspect { subject, cause, before, .. } = self.suspected(part, &stale);
            return (FindingKind::UseAfterUnmap { access, cause }, subject, before);
        }
        if let Some((range, gone)) = self.gone.first(gap) {
            let (unmapped, flushed) = (gone.unmapped.number, gone.flushed.number);
            let kind = FindingKind::UseAfterFlush { access, unmapped, flushed };
            return (kind, (used(range), None), gone.records());
        }
        let granule = self.granules(IovaRange::point(gap.start()));
        if let Some((piece, part)) = self.mapped.first(granule) {
            let (trust, mapping) = (self.config.trust, self.whole(piece));
            let kind = FindingKind::BesideMapping { access, mapping, trust };
            return (kind, (used(granule), None), vec![part.mapped.clone()]);
        }
        let before = gap.start().get().checked_sub(1).map(Iova::new);
        match before.and_then(|iova| self.mapping_at(iova)) {
            Some((mapping, _, before)) => {
                (FindingKind::PastMapping { access, mapping }, (gap, None), before)
            }
            None if gap.start().get() >= DmaAddr::REFUSED.get() => {
                (FindingKind::RefusedBuffer { access }, (gap, None), Vec::new())
            }
            None => (FindingKind::Unmapped { access }, (gap, None), Vec::new()),
        }
    }

    /// What a mapping does not permit a device, in what of a range is mapped.
    fn forbidden(&self, range: IovaRange, access: Access) -> Option<Wrong> {
        let announced = |piece: IovaRange, since: u64| {
            let told = |(_, number): (_, &u64)| *number > since;
            self.announced.gap(piece).is_none() && self.announced.meeting(piece).all(told)
        };
        let absent_cached = self.config.absent == AbsentEntries::Cached;
        self.mapped.meeting(range).find_map(|(piece, part)| {
            let denied = !part.prot.contains(access.needs());
            let unannounced =
                absent_cached && !announced(piece.intersection(range)?, part.mapped.number);
            let kind = match () {
                () if denied => FindingKind::Denied { access, prot: part.prot },
                () if unannounced => FindingKind::Unannounced { access },
                () => return None,
            };
            Some((kind, (piece, memory(piece, part)), vec![part.mapped.clone()]))
        })
    }

    /// What a device reads of slots whose buffers the CPU wrote and did not sync. What it writes is
    /// not the CPU's before a sync.
    fn unsynced(&self, range: IovaRange, access: Access) -> Option<Wrong> {
        let in_slots = |turns: &Arc<Turns>| {
            self.mapped.meeting(range).find_map(|(piece, part)| {
                let used = piece.intersection(range)?;
                let slots = memory_in(used, piece, part)?;
                let (first, last) = turns.used(slots, access)?;
                let at = |paddr: PhysAddr| {
                    used.start().wrapping_add(paddr.get().wrapping_sub(slots.paddr().get()))
                };
                let unsynced = IovaRange::new(at(first), at(last))?;
                let subject = (unsynced, memory_in(unsynced, piece, part));
                Some((FindingKind::MissingSync, subject, vec![part.mapped.clone()]))
            })
        };
        self.turns.iter().find_map(in_slots)
    }

    /// A sync; where the API knows it, of a mapping of these bytes in this direction.
    pub(super) fn sync(
        &mut self,
        range: IovaRange,
        direction: Direction,
        known: Option<(IovaRange, Direction)>,
        now: &Record,
    ) {
        let Some((piece, first)) = self.mapped.at(range.start()) else {
            let mapping = known.map(|(mapping, _)| mapping);
            let before = self.unmapped_before(range).unwrap_or_default();
            return self.find(FindingKind::SyncOutside { mapping }, (range, None), before, now);
        };
        let (prot, before) = (first.prot, vec![first.mapped.clone()]);
        let subject = (range, memory(piece, first));
        let mapping = known.map_or_else(|| self.whole(piece), |(mapping, _)| mapping);
        let prot = known.map_or(prot & Prot::READ_WRITE, |(_, mapped)| access_of(mapped));
        // Without an API, what is mapped in both directions can be synced as any.
        let fits = prot == access_of(direction) || (known.is_none() && prot == Prot::READ_WRITE);
        if !mapping.covers(range) {
            let kind = FindingKind::SyncOutside { mapping: Some(mapping) };
            self.find(kind, subject, before, now);
        } else if !fits {
            self.find(FindingKind::SyncDirection { direction, prot }, subject, before, now);
        }
    }
}

/// The memory that a part of a piece leads to.
fn memory_in(within: IovaRange, piece: IovaRange, part: &MappedPiece) -> Option<Span> {
    let mut part = part.clone();
    part.advance(within.start().get() - piece.start().get());
    memory(within, &part)
}

const fn access_of(direction: Direction) -> Prot {
    match direction {
        Direction::ToDevice => Prot::READ,
        Direction::FromDevice => Prot::WRITE,
        Direction::Bidirectional => Prot::READ_WRITE,
    }
}
