//! The state is what is mapped, and what hardware may hold that is not.

use std::collections::VecDeque;

use dmaspan::iommu::Tables;
use dmaspan::{Direction, Iova, IovaRange, PhysAddr, Prot, Span};

use super::config::{Parts, SanitizerConfig};
use super::event::{Op, Origin, Record, Where};
use super::intervals::{Cut, Intervals};
use super::report::{Cached, Cause, Finding, FindingKind};
use super::tables::DetachedTables;
use crate::iotlb::AbsentEntries;
use crate::walker::Access;

/// A piece of a mapping.
#[derive(Clone, Debug)]
pub(super) struct MappedPiece {
    pub(super) paddr: Option<u64>,
    pub(super) prot: Prot,
    pub(super) mapped: Record,
}

/// A piece of what was unmapped and not flushed.
#[derive(Clone, Debug)]
pub(super) struct Stale {
    pub(super) was: MappedPiece,
    pub(super) by: Unflushed,
    pub(super) leaf_sizes: u64,
}

/// Walks into detached tables that were not flushed.
#[derive(Clone, Debug)]
pub(super) struct Walk(pub(super) Unflushed);

/// What took something away that hardware may hold.
#[derive(Clone, Debug)]
pub(super) struct Unflushed {
    pub(super) unmapped: Record,
    /// What an invalidation that named it was not good for.
    pub(super) missed: Option<Cause>,
    /// Whether a finding says that it was used again or released: one bug, one finding.
    pub(super) reported: Reported,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reported {
    No,
    Yes,
}

impl Cut for MappedPiece {
    fn advance(&mut self, bytes: u64) {
        self.paddr = self.paddr.map(|paddr| paddr.wrapping_add(bytes));
    }

    fn paddr(&self) -> Option<u64> {
        self.paddr
    }
}

impl Cut for Stale {
    fn advance(&mut self, bytes: u64) {
        self.was.advance(bytes);
    }

    fn paddr(&self) -> Option<u64> {
        self.was.paddr
    }
}

impl Cut for Walk {
    fn advance(&mut self, _bytes: u64) {}

    fn paddr(&self) -> Option<u64> {
        None
    }
}

/// The number of the last `sync_map` that named a range.
impl Cut for u64 {
    fn advance(&mut self, _bytes: u64) {}

    fn paddr(&self) -> Option<u64> {
        None
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) config: SanitizerConfig,
    pub(super) mapped: Intervals<MappedPiece>,
    pub(super) stale: Intervals<Stale>,
    pub(super) walks: Intervals<Walk>,
    pub(super) tables: DetachedTables,
    /// Kept where absent entries are cached.
    pub(super) announced: Intervals<u64>,
    /// The begins of invalidations that have not ended.
    pub(super) in_flight: Vec<Record>,
    /// The number of the last event.
    pub(super) number: u64,
    pub(super) ring: VecDeque<Record>,
    pub(super) findings: Vec<Finding>,
    /// Findings in all, those that are not kept included.
    pub(super) found: u64,
}

/// What hardware may hold of a range that is asked for.
pub(super) struct Suspect {
    pub(super) cached: Cached,
    pub(super) range: IovaRange,
    pub(super) memory: Option<Span>,
    pub(super) cause: Cause,
    pub(super) before: Vec<Record>,
}

impl State {
    pub(super) fn new(config: SanitizerConfig) -> Self {
        Self {
            config,
            mapped: Intervals::default(),
            stale: Intervals::default(),
            walks: Intervals::default(),
            tables: DetachedTables::default(),
            announced: Intervals::default(),
            in_flight: Vec::new(),
            number: 0,
            ring: VecDeque::new(),
            findings: Vec::new(),
            found: 0,
        }
    }

    /// Puts an operation into the history.
    pub(super) fn record(&mut self, op: Op, iovas: Where, origin: Origin) -> Record {
        self.number += 1;
        let record = Record { number: self.number, op, iovas, origin };
        if self.config.history > 0 {
            if self.ring.len() >= self.config.history {
                self.ring.pop_front();
            }
            self.ring.push_back(record.clone());
        }
        record
    }

    /// Adds a finding; `before` are operations that led to it, however old they are.
    pub(super) fn find(
        &mut self,
        kind: FindingKind,
        (iovas, memory): (IovaRange, Option<Span>),
        before: Vec<Record>,
        now: &Record,
    ) {
        self.found += 1;
        if self.findings.len() >= self.config.findings {
            return;
        }
        // What an unmap took away together is flushed together: a flush that is too short shows.
        let subject = before.last().and_then(|record| record.iovas.ranges()?.first()?.join(iovas));
        let subject = subject.unwrap_or(iovas);
        let recent = self.ring.iter().rev().filter(|record| record.iovas.meets(subject));
        let mut history: Vec<Record> = recent.take(self.config.shown).cloned().collect();
        history.extend(before);
        history.push(now.clone());
        history.sort_by_key(|record| record.number);
        history.dedup_by_key(|record| record.number);
        self.findings.push(Finding { kind, iovas, memory, history });
    }

    pub(super) fn map(&mut self, range: IovaRange, spans: &[Span], mapped: &MappedPiece) {
        let now = &mapped.mapped;
        self.expect_unused(range, now);
        self.mapped.take(range);
        let mut next = Some(range.start());
        for span in spans {
            let Some(piece) = next.and_then(|next| {
                let whole = IovaRange::from_len(next, span.len()).ok()?;
                whole.intersection(range)
            }) else {
                break;
            };
            let paddr = Some(span.paddr().get());
            self.mapped.insert(piece, MappedPiece { paddr, ..mapped.clone() });
            next = piece.last().checked_add(1).filter(|next| range.contains(*next));
        }
        if let Some(rest) = next.and_then(|next| IovaRange::new(next, range.last())) {
            self.mapped.insert(rest, mapped.clone());
        }
    }

    /// Finds what is in use, or may be, in a range that begins a new life.
    pub(super) fn expect_unused(&mut self, range: IovaRange, now: &Record) {
        if let Some((taken, piece)) = self.mapped.first(range) {
            let (memory, before) = (memory(taken, piece), vec![piece.mapped.clone()]);
            let whole = self.whole(taken);
            self.find(FindingKind::AlreadyMapped { taken: whole }, (range, memory), before, now);
        }
        if let Some(Suspect { cached, range, memory, cause, before }) = self.suspect(range) {
            self.find(FindingKind::MissingFlush { cached, cause }, (range, memory), before, now);
        }
        self.stale.take(range);
        self.walks.take(range);
    }

    /// All that is left of the mapping that a piece is of.
    fn whole(&self, piece: IovaRange) -> IovaRange {
        let Some(number) = self.mapped.at(piece.start()).map(|(_, p)| p.mapped.number) else {
            return piece;
        };
        let same = |iova: Iova| {
            self.mapped.at(iova).filter(|(_, p)| p.mapped.number == number).map(|(range, _)| range)
        };
        let mut whole = piece;
        while let Some(before) =
            whole.start().get().checked_sub(1).and_then(|iova| same(Iova::new(iova)))
        {
            whole = whole.join(before).unwrap_or(whole);
        }
        while let Some(behind) = whole.last().checked_add(1).and_then(same) {
            whole = whole.join(behind).unwrap_or(whole);
        }
        whole
    }

    /// The first thing in `range` that hardware may hold and that no finding was about.
    fn suspect(&self, range: IovaRange) -> Option<Suspect> {
        let fresh = |by: &Unflushed| by.reported == Reported::No;
        if let Some((range, stale)) = self.stale.meeting(range).find(|(_, s)| fresh(&s.by)) {
            return Some(self.suspect_leaf(range, stale));
        }
        let (range, Walk(by)) = self.walks.meeting(range).find(|(_, walk)| fresh(&walk.0))?;
        let cause = self.cause(range, by, 0);
        let before = vec![by.unmapped.clone()];
        Some(Suspect { cached: Cached::Walk, range, memory: None, cause, before })
    }

    pub(super) fn suspect_leaf(&self, range: IovaRange, stale: &Stale) -> Suspect {
        Suspect {
            cached: Cached::Leaf,
            range,
            memory: memory(range, &stale.was),
            cause: self.cause(range, &stale.by, stale.was.mapped.number),
            before: vec![stale.was.mapped.clone(), stale.by.unmapped.clone()],
        }
    }

    /// Why nothing made hardware forget what was there from event `mapped` on.
    fn cause(&self, range: IovaRange, by: &Unflushed, mapped: u64) -> Cause {
        let after = |record: &Record| record.number > by.unmapped.number;
        if self.in_flight.iter().any(|begin| after(begin) && begin.iovas.meets(range)) {
            return Cause::StillRunning;
        }
        by.missed.unwrap_or_else(|| {
            let flushed = |record: &Record| {
                matches!(record.op, Op::InvalidateBegin { .. })
                    && (mapped..by.unmapped.number).contains(&record.number)
                    && record.iovas.meets(range)
            };
            match self.ring.iter().rev().any(flushed) {
                true => Cause::FlushBeforeUnmap,
                false => Cause::NoFlush,
            }
        })
    }

    pub(super) fn unmap(
        &mut self,
        range: IovaRange,
        (tables, leaf_sizes): (Tables, u64),
        now: &Record,
    ) {
        if self.config.parts == Parts::Report {
            self.expect_whole_mappings(range, now);
        }
        if let Some(gap) = self.mapped.gap(range) {
            self.nothing_to_unmap(gap, now);
        }
        self.unmap_parts(range, (tables, leaf_sizes), now);
    }

    /// Whatever is mapped in a range is not any more.
    pub(super) fn unmap_parts(
        &mut self,
        range: IovaRange,
        (tables, leaf_sizes): (Tables, u64),
        now: &Record,
    ) {
        let by = Unflushed { unmapped: now.clone(), missed: None, reported: Reported::No };
        for (piece, was) in self.mapped.take(range) {
            self.stale.take(piece);
            self.stale.insert(piece, Stale { was, by: by.clone(), leaf_sizes });
        }
        if self.config.absent == AbsentEntries::Cached {
            self.announced.take(range);
        }
        if tables == Tables::Detached {
            self.walks.take(range);
            self.walks.insert(range, Walk(by));
            self.tables.unmapped(range, now);
        }
    }

    pub(super) fn protect(&mut self, range: IovaRange, prot: Option<Prot>, now: &Record) {
        if let Some(gap) = self.mapped.gap(range) {
            self.find(FindingKind::ProtectOfNothing, (gap, None), Vec::new(), now);
        }
        let by = Unflushed { unmapped: now.clone(), missed: None, reported: Reported::No };
        for (piece, was) in self.mapped.take(range) {
            self.mapped
                .insert(piece, MappedPiece { prot: prot.unwrap_or(was.prot), ..was.clone() });
            self.stale.take(piece);
            self.stale.insert(piece, Stale { was, by: by.clone(), leaf_sizes: 0 });
        }
    }

    /// An unmap that changed nothing.
    pub(super) fn refused_unmap(&mut self, range: IovaRange, now: &Record) {
        let Some((mapping, memory, before)) = self.mapping_at(range.start()) else {
            return self.nothing_to_unmap(range, now);
        };
        self.find(FindingKind::RefusedUnmap { mapping }, (range, memory), before, now);
    }

    /// Nothing is mapped in a range that was to be unmapped.
    fn nothing_to_unmap(&mut self, range: IovaRange, now: &Record) {
        let was_unmapped = self.stale.first(range).is_some() || self.last_unmapped(range);
        let kind =
            if was_unmapped { FindingKind::DoubleUnmap } else { FindingKind::UnmapOfNothing };
        self.find(kind, (range, None), Vec::new(), now);
    }

    /// All that is left of the mapping that an address is in, the memory of the piece there, and
    /// the event that made it.
    fn mapping_at(&self, iova: Iova) -> Option<(IovaRange, Option<Span>, Vec<Record>)> {
        let (piece, part) = self.mapped.at(iova)?;
        Some((self.whole(piece), memory(piece, part), vec![part.mapped.clone()]))
    }

    /// Whether the history has an unmap of `range`, before the event that is looked at.
    fn last_unmapped(&self, range: IovaRange) -> bool {
        let earlier = self.ring.iter().rev().skip(1);
        earlier
            .filter(|record| record.iovas.meets(range))
            .any(|record| matches!(record.op, Op::Unmap { .. }))
    }

    fn expect_whole_mappings(&mut self, range: IovaRange, now: &Record) {
        for end in [range.start(), range.last()] {
            let Some((mapping, memory, before)) = self.mapping_at(end) else { continue };
            if !range.covers(mapping) {
                let kind = FindingKind::PartialUnmap { mapping };
                return self.find(kind, (range, memory), before, now);
            }
        }
    }

    pub(super) fn dma(&mut self, iova: Iova, len: u64, access: Access, now: &Record) {
        let Ok(range) = reached(iova, len) else { return };
        let Some(gap) = self.mapped.gap(range) else {
            return self.expect_permission(range, access, now);
        };
        if let Some((range, stale)) = self.stale.first(gap) {
            let Suspect { range, memory, cause, before, .. } = self.suspect_leaf(range, stale);
            let kind = FindingKind::UseAfterUnmap { access, cause };
            return self.find(kind, (range, memory), before, now);
        }
        let ran_out_of = gap.start().get().checked_sub(1).filter(|_| gap.start() > iova);
        match ran_out_of.and_then(|before| self.mapping_at(Iova::new(before))) {
            Some((mapping, _, before)) => {
                self.find(FindingKind::PastMapping { access, mapping }, (gap, None), before, now);
            }
            None => self.find(FindingKind::Unmapped { access }, (gap, None), Vec::new(), now),
        }
    }

    /// Of a device, in a range that is mapped.
    fn expect_permission(&mut self, range: IovaRange, access: Access, now: &Record) {
        let announced = |piece: IovaRange, since: u64| {
            let told = |(_, number): (_, &u64)| *number > since;
            self.announced.gap(piece).is_none() && self.announced.meeting(piece).all(told)
        };
        let absent_cached = self.config.absent == AbsentEntries::Cached;
        let bad = self.mapped.meeting(range).find_map(|(piece, part)| {
            let denied = !part.prot.contains(access.needs());
            let unannounced =
                absent_cached && !announced(piece.intersection(range)?, part.mapped.number);
            let kind = match () {
                () if denied => FindingKind::Denied { access, prot: part.prot },
                () if unannounced => FindingKind::Unannounced { access },
                () => return None,
            };
            Some((kind, (piece, memory(piece, part)), vec![part.mapped.clone()]))
        });
        if let Some((kind, subject, before)) = bad {
            self.find(kind, subject, before, now);
        }
    }

    pub(super) fn sync(&mut self, range: IovaRange, direction: Direction, now: &Record) {
        let Some((piece, first)) = self.mapped.at(range.start()) else {
            let before = self
                .stale
                .at(range.start())
                .map(|(_, stale)| vec![stale.was.mapped.clone(), stale.by.unmapped.clone()]);
            let kind = FindingKind::SyncOutside { mapping: None };
            return self.find(kind, (range, None), before.unwrap_or_default(), now);
        };
        let (prot, before) = (first.prot, vec![first.mapped.clone()]);
        let (mapping, memory) = (self.whole(piece), memory(piece, first));
        if !mapping.covers(range) {
            let kind = FindingKind::SyncOutside { mapping: Some(mapping) };
            return self.find(kind, (range, memory), before, now);
        }
        let access = prot & Prot::READ_WRITE;
        if access != Prot::READ_WRITE && access != access_of(direction) {
            self.find(FindingKind::SyncDirection { direction, prot }, (range, memory), before, now);
        }
    }

    /// A sync of a mapping of which the bytes are known, and the direction.
    pub(super) fn sync_of(
        &mut self,
        range: IovaRange,
        direction: Direction,
        (mapping, mapped): (IovaRange, Direction),
        now: &Record,
    ) {
        let part = self.mapped.at(range.start()).map(|(_, part)| part.mapped.clone());
        let before = part.into_iter().collect();
        if !mapping.covers(range) {
            let kind = FindingKind::SyncOutside { mapping: Some(mapping) };
            return self.find(kind, (range, None), before, now);
        }
        if direction != mapped {
            let prot = access_of(mapped);
            let kind = FindingKind::SyncDirection { direction, prot };
            return self.find(kind, (range, None), before, now);
        }
        self.sync(range, direction, now);
    }

    /// A table goes back to where it can become another.
    pub(super) fn free_table(&mut self, span: Span, now: &Record) {
        let Some((range, number)) = self.tables.freed(span) else { return };
        let found = self
            .walks
            .meeting(range)
            .find(|(_, Walk(by))| by.unmapped.number == number && by.reported == Reported::No);
        let Some((piece, Walk(by))) = found else { return };
        let (cause, before) = (self.cause(piece, by, 0), vec![by.unmapped.clone()]);
        self.walks.each_meeting(range, |walk| walk.0.reported = Reported::Yes);
        let kind = FindingKind::LateFlush { cached: Cached::Walk, cause, freed: Some(span) };
        self.find(kind, (piece, None), before, now);
    }

    /// IOVAs, and what was mapped there, go back to their owners.
    pub(super) fn release(&mut self, range: IovaRange, now: &Record) {
        if let Some((piece, part)) = self.mapped.first(range) {
            let (subject, before) = ((piece, memory(piece, part)), vec![part.mapped.clone()]);
            self.find(FindingKind::ReleasedWhileMapped { freed: None }, subject, before, now);
        }
        if let Some(Suspect { cached, range, memory, cause, before }) = self.suspect(range) {
            let kind = FindingKind::LateFlush { cached, cause, freed: None };
            self.find(kind, (range, memory), before, now);
        }
        self.stale.each_meeting(range, |stale| stale.by.reported = Reported::Yes);
        self.walks.each_meeting(range, |walk| walk.0.reported = Reported::Yes);
    }

    /// Memory goes back to its owner.
    pub(super) fn free(&mut self, span: Span, now: &Record) {
        let freed = Some(span);
        if let Some((piece, part)) = self.mapped.first_leading_to(span) {
            let (subject, before) = ((piece, memory(piece, part)), vec![part.mapped.clone()]);
            self.find(FindingKind::ReleasedWhileMapped { freed }, subject, before, now);
        }
        let fresh = |(_, stale): &(IovaRange, &Stale)| stale.by.reported == Reported::No;
        let Some((range, stale)) = self.stale.leading_to(span).find(fresh) else { return };
        let Suspect { cached, range, memory, cause, before } = self.suspect_leaf(range, stale);
        let all: Vec<_> = self.stale.leading_to(span).map(|(range, _)| range).collect();
        for range in all {
            self.stale.each_meeting(range, |stale| stale.by.reported = Reported::Yes);
        }
        self.find(FindingKind::LateFlush { cached, cause, freed }, (range, memory), before, now);
    }

    /// Reports every mapping as leaked, once, and forgets it.
    pub(super) fn leaks(&mut self, now: &Record) {
        let all = std::mem::take(&mut self.mapped);
        let mut pieces = all.iter().peekable();
        while let Some((mut range, part)) = pieces.next() {
            let (number, mut memory) = (part.mapped.number, memory(range, part));
            while let Some((more, _)) = pieces.next_if(|(_, p)| p.mapped.number == number) {
                range = range.join(more).unwrap_or(range);
                memory = None;
            }
            self.find(FindingKind::Leak, (range, memory), vec![part.mapped.clone()], now);
        }
    }

    /// Reports everything that nobody flushed, and forgets it.
    pub(super) fn unflushed(&mut self, now: &Record) {
        let everything = IovaRange::new(Iova::new(0), Iova::new(u64::MAX));
        while let Some(suspect) = everything.and_then(|all| self.suspect(all)) {
            let Suspect { cached, range, memory, cause, before } = suspect;
            let unmapped = before.last().map_or(Where::Nowhere, |record| record.iovas.clone());
            self.find(FindingKind::MissingFlush { cached, cause }, (range, memory), before, now);
            // The rest of what the same unmap took away is no other bug.
            let all = unmapped.ranges().unwrap_or_default().iter().copied();
            for range in all.chain([range]) {
                match cached {
                    Cached::Leaf => drop(self.stale.take(range)),
                    Cached::Walk => drop(self.walks.take(range)),
                }
            }
        }
    }
}

/// The memory that a piece leads to.
fn memory(piece: IovaRange, mapped: &MappedPiece) -> Option<Span> {
    Span::new(PhysAddr::new(mapped.paddr?), piece.checked_len()?).ok()
}

const fn access_of(direction: Direction) -> Prot {
    match direction {
        Direction::ToDevice => Prot::READ,
        Direction::FromDevice => Prot::WRITE,
        Direction::Bidirectional => Prot::READ_WRITE,
    }
}

/// The addresses of an access; those past the top of the space are left out.
fn reached(iova: Iova, len: u64) -> Result<IovaRange, dmaspan::RangeError> {
    let room = (u64::MAX - iova.get()).saturating_add(1);
    IovaRange::from_len(iova, len.min(room))
}
