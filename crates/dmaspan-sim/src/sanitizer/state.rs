//! The state is what is mapped, what hardware may hold that is not, and what it has forgotten.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;

use dmaspan::dma::Trust;
use dmaspan::iommu::Tables;
use dmaspan::{Caller, Iova, IovaRange, PhysAddr, Prot, Span, lg2};

use super::config::{Neighbours, Parts, SanitizerConfig};
use super::event::{Op, Origin, Record, Where};
use super::flush::everything;
use super::intervals::{Cut, Intervals};
use super::report::{Cached, Cause, Finding, FindingKind, Severity};
use super::tables::DetachedTables;
use super::turns::Turns;
use crate::iotlb::AbsentEntries;

/// A piece of a mapping.
#[derive(Clone, Debug)]
pub(super) struct MappedPiece {
    pub(super) paddr: Option<u64>,
    pub(super) prot: Prot,
    pub(super) mapped: Record,
    /// What was asked for together with it: a device may go from one piece to the next in it.
    pub(super) of: IovaRange,
}

/// What a domain was asked for last.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) by: Caller,
    /// What was to be mapped; `None` of an unmap.
    pub(super) of: Option<IovaRange>,
}

/// A piece of what was unmapped and not flushed.
#[derive(Clone, Debug)]
pub(super) struct Stale {
    /// The mapping; `None` for walks into detached tables.
    pub(super) was: Option<MappedPiece>,
    pub(super) unmapped: Record,
    /// The sizes of its leaves, bit n for 2^n bytes; 0 where they were not said.
    pub(super) leaf_sizes: u64,
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

/// A piece of what was unmapped and flushed, until it is mapped again.
#[derive(Clone, Debug)]
pub(super) struct Gone {
    pub(super) mapped: Record,
    pub(super) unmapped: Record,
    /// The begin of the invalidation that made hardware forget it.
    pub(super) flushed: Record,
    /// Whether an invalidation has named it, and not only everything.
    pub(super) named: bool,
}

impl Gone {
    pub(super) fn records(&self) -> Vec<Record> {
        vec![self.mapped.clone(), self.unmapped.clone(), self.flushed.clone()]
    }
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
        self.was.iter_mut().for_each(|was| was.advance(bytes));
    }

    fn paddr(&self) -> Option<u64> {
        self.was.as_ref()?.paddr
    }
}

impl Cut for Gone {}

/// The number of the last `sync_map` that named a range.
impl Cut for u64 {}

impl Cut for () {}
impl Cut for Record {}

impl Cut for Asked {}

#[derive(Debug)]
pub(super) struct State {
    pub(super) config: SanitizerConfig,
    pub(super) mapped: Intervals<MappedPiece>,
    pub(super) leaves: Intervals<Stale>,
    pub(super) walks: Intervals<Stale>,
    pub(super) gone: Intervals<Gone>,
    /// Unmaps of ranges in which nothing was mapped, until a flush names the range or it is mapped.
    pub(super) vain: Intervals<Record>,
    /// Where `gone` begins and when it was flushed, the oldest first.
    pub(super) going: VecDeque<(Iova, u64)>,
    /// The last invalidation of everything by each thread.
    pub(super) flushed_all: HashMap<ThreadId, u64>,
    pub(super) tables: DetachedTables,
    /// What a domain was asked for last, by the IOVAs that it was about.
    asked: Intervals<Asked>,
    pub(super) is_one_owners: bool,
    /// The bytes of buffers that are about to be mapped.
    bytes: Intervals<()>,
    /// Kept where absent entries are cached.
    pub(super) announced: Intervals<u64>,
    /// The begins of invalidations that have not ended.
    pub(super) in_flight: Vec<Record>,
    /// The number of the last event.
    pub(super) number: u64,
    /// The last events, without gaps.
    ring: VecDeque<Record>,
    pub(super) findings: Vec<Finding>,
    /// How many of them were in a report that was displayed.
    pub(super) displayed: usize,
    /// What follows who may use the slots of pools.
    pub(super) turns: Vec<Arc<Turns>>,
    /// How many findings there were of each kind, by its title, errors apart from advice, those
    /// that are not kept included.
    pub(super) seen: BTreeMap<(&'static str, Severity), u64>,
}

/// What hardware may hold of a range that is asked for.
pub(super) struct Suspect {
    pub(super) cached: Cached,
    pub(super) subject: Subject,
    pub(super) cause: Cause,
    pub(super) before: Vec<Record>,
}

/// The IOVAs that a finding is about, and the memory that they lead to.
pub(super) type Subject = (IovaRange, Option<Span>);

impl State {
    pub(super) fn new(config: SanitizerConfig) -> Self {
        Self {
            config,
            mapped: Intervals::default(),
            leaves: Intervals::default(),
            walks: Intervals::default(),
            gone: Intervals::default(),
            vain: Intervals::default(),
            going: VecDeque::new(),
            flushed_all: HashMap::new(),
            tables: DetachedTables::default(),
            asked: Intervals::default(),
            is_one_owners: false,
            bytes: Intervals::default(),
            announced: Intervals::default(),
            in_flight: Vec::new(),
            number: 0,
            ring: VecDeque::new(),
            findings: Vec::new(),
            displayed: 0,
            turns: Vec::new(),
            seen: BTreeMap::new(),
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
        (iovas, memory): Subject,
        before: Vec<Record>,
        now: &Record,
    ) {
        let seen = self.seen.entry((kind.title(), kind.class())).or_default();
        *seen += 1;
        if usize::try_from(*seen).is_ok_and(|seen| seen > self.config.findings) {
            return;
        }
        // What an unmap took away together is flushed together: a flush that is too short shows.
        let subject = before.last().and_then(|record| record.iovas.ranges()?.first()?.join(iovas));
        let subject = subject.unwrap_or(iovas);
        let mut history = self.told_of(subject);
        history.drain(..history.len().saturating_sub(self.config.shown));
        history.extend(before);
        history.push(now.clone());
        history.sort_by_key(|record| record.number);
        history.dedup_by_key(|record| record.number);
        self.findings.push(Finding { kind, iovas, memory, history });
    }

    /// The titles of kinds of which not all are kept, and how many are not.
    pub(super) fn left_out(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let kept = u64::try_from(self.config.findings).unwrap_or(u64::MAX);
        let beyond = self.seen.iter();
        let beyond = beyond.map(move |((title, _), seen)| (*title, seen.saturating_sub(kept)));
        beyond.filter(|(_, count)| *count > 0)
    }

    /// The operations of the history that touched a range, the oldest first. Of invalidations of
    /// everything, those that came next after one that named it, begin and end.
    fn told_of(&self, range: IovaRange) -> Vec<Record> {
        let mut all: Vec<Record> = Vec::new();
        for record in self.ring.iter().filter(|record| record.iovas.meets(range)) {
            let in_a_row = all.iter().rev().take_while(|last| last.iovas == Where::All).count();
            if record.iovas != Where::All || (in_a_row < 2 && !all.is_empty()) {
                all.push(record.clone());
            }
        }
        all
    }

    /// A domain was asked for something.
    pub(super) fn asked(&mut self, range: IovaRange, asked: Asked) {
        self.asked.take(range);
        self.asked.insert(range, asked);
    }

    /// The caller that asked a domain for an operation in these IOVAs and nowhere else.
    pub(super) fn asker(&self, op: Op, iovas: &Where) -> Option<Caller> {
        let Where::Range(range) = iovas else { return None };
        match op {
            Op::Map { .. }
            | Op::SyncMap
            | Op::Unmap { .. }
            | Op::InvalidateBegin { .. }
            | Op::InvalidateEnd { .. } => self.asked.at(range.start()).map(|(_, asked)| asked.by),
            _ => None,
        }
    }

    /// A buffer of these bytes is about to be mapped, in their granules.
    pub(super) fn bytes(&mut self, bytes: IovaRange, granule_lg2: u32) {
        self.config.granule_lg2 = granule_lg2;
        self.bytes.take(self.granules(bytes));
        self.bytes.insert(bytes, ());
    }

    pub(super) fn map(&mut self, range: IovaRange, spans: &[Span], prot: Prot, now: &Record) {
        self.expect_unused(range, now);
        self.mapped.take(range);
        self.turns.iter().for_each(|turns| spans.iter().for_each(|span| turns.mapped(*span, prot)));
        let asked = self.asked.at(range.start()).and_then(|(_, asked)| asked.of);
        let of = match (self.config.neighbours, self.is_one_owners) {
            (Neighbours::Joined, _) | (Neighbours::ByOwner, true) => everything(),
            _ => asked.filter(|of| of.covers(range)).unwrap_or(range),
        };
        let mapped = MappedPiece { paddr: None, prot, mapped: now.clone(), of };
        let mut left = Some(range);
        for span in spans {
            let Some(rest) = left else { break };
            let whole = IovaRange::from_len(rest.start(), span.len());
            let piece = whole.ok().and_then(|whole| whole.intersection(rest)).unwrap_or(rest);
            let paddr = Some(span.paddr().get());
            self.mapped.insert(piece, MappedPiece { paddr, ..mapped.clone() });
            left = behind(piece, range);
        }
        if let Some(rest) = left {
            self.mapped.insert(rest, mapped);
        }
        // Without spans it was mapped for a moment and is taken back: the buffer is still to come.
        if spans.is_empty() || self.bytes.first(range).is_none() {
            return;
        }
        // What else is in the granules of a buffer is not of it.
        let mut left = Some(range);
        while let Some(other) = left.and_then(|rest| self.bytes.gap(rest)) {
            self.mapped.take(other);
            left = behind(other, range);
        }
        self.bytes.take(range);
    }

    /// Finds what is in use, or may be, in a range that begins a new life.
    pub(super) fn expect_unused(&mut self, range: IovaRange, now: &Record) {
        if let Some((taken, piece)) = self.mapped.first(range) {
            let (memory, before) = (memory(taken, piece), vec![piece.mapped.clone()]);
            let whole = self.whole(taken);
            self.find(FindingKind::AlreadyMapped { taken: whole }, (range, memory), before, now);
        }
        if let Some(Suspect { cached, subject, cause, before }) = self.suspect(range) {
            self.find(FindingKind::MissingFlush { cached, cause }, subject, before, now);
        }
        self.leaves.take(range);
        self.walks.take(range);
        self.gone.take(range);
        self.vain.take(range);
    }

    /// The granules that a range lies in.
    pub(super) fn granules(&self, range: IovaRange) -> IovaRange {
        let mask = lg2::mask(self.config.granule_lg2);
        let (start, last) = (range.start().get() & !mask, range.last().get() | mask);
        IovaRange::new(Iova::new(start), Iova::new(last)).unwrap_or(range)
    }

    /// All that is left of the mapping that a piece is of.
    pub(super) fn whole(&self, piece: IovaRange) -> IovaRange {
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
        let fresh = |(_, stale): &(IovaRange, &Stale)| stale.reported == Reported::No;
        let first = self.leaves.meeting(range).find(fresh);
        first.or_else(|| self.walks.meeting(range).find(fresh)).map(|(at, s)| self.suspected(at, s))
    }

    pub(super) fn suspected(&self, range: IovaRange, stale: &Stale) -> Suspect {
        let mut before = vec![stale.unmapped.clone()];
        before.splice(0..0, stale.was.iter().map(|was| was.mapped.clone()));
        Suspect {
            cached: if stale.was.is_some() { Cached::Leaf } else { Cached::Walk },
            subject: (range, stale.was.as_ref().and_then(|was| memory(range, was))),
            cause: self.cause(range, stale),
            before,
        }
    }

    /// Why nothing made hardware forget what was unmapped.
    fn cause(&self, range: IovaRange, stale: &Stale) -> Cause {
        let unmapped = stale.unmapped.number;
        let after = |begin: &Record| begin.number > unmapped && begin.iovas.meets(range);
        if self.in_flight.iter().any(after) {
            return Cause::StillRunning;
        }
        stale.missed.unwrap_or_else(|| {
            let mapped = stale.was.as_ref().map_or(0, |was| was.mapped.number);
            let flushed = |record: &Record| {
                matches!(record.op, Op::InvalidateBegin { .. }) && record.iovas.meets(range)
            };
            match self.between(mapped, unmapped).any(flushed) {
                true => Cause::FlushBeforeUnmap,
                false => Cause::NoFlush,
            }
        })
    }

    /// The events of the history from one number to before another.
    fn between(&self, from: u64, to: u64) -> impl Iterator<Item = &Record> {
        let first = self.ring.front().map_or(0, |record| record.number);
        let index = |number: u64| usize::try_from(number.saturating_sub(first)).unwrap_or(0);
        let to = index(to).min(self.ring.len());
        self.ring.range(index(from).min(to)..to)
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
        let taken = self.mapped.take(range);
        if taken.is_empty() {
            self.vain.take(range);
            self.vain.insert(range, now.clone());
        }
        for (piece, was) in taken {
            if let Some(slots) = memory(piece, &was) {
                self.turns.iter().for_each(|turns| turns.unmapped(slots));
            }
            self.outlive(piece, was, leaf_sizes, now);
        }
        if self.config.absent == AbsentEntries::Cached {
            self.announced.take(range);
        }
        if tables == Tables::Detached {
            let (unmapped, missed, reported) = (now.clone(), None, Reported::No);
            self.walks.take(range);
            self.walks
                .insert(range, Stale { was: None, unmapped, leaf_sizes: 0, missed, reported });
            self.tables.unmapped(range, now);
        }
    }

    /// A piece of what was mapped stays in the IOTLB.
    fn outlive(&mut self, piece: IovaRange, was: MappedPiece, leaf_sizes: u64, now: &Record) {
        let (unmapped, missed, reported) = (now.clone(), None, Reported::No);
        self.leaves.take(piece);
        self.leaves.insert(piece, Stale { was: Some(was), unmapped, leaf_sizes, missed, reported });
    }

    pub(super) fn protect(&mut self, range: IovaRange, prot: Option<Prot>, now: &Record) {
        if let Some(gap) = self.mapped.gap(range) {
            self.find(FindingKind::ProtectOfNothing, (gap, None), Vec::new(), now);
        }
        for (piece, was) in self.mapped.take(range) {
            self.mapped
                .insert(piece, MappedPiece { prot: prot.unwrap_or(was.prot), ..was.clone() });
            self.outlive(piece, was, 0, now);
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
        let (kind, before) = match self.unmapped_before(range) {
            Some(before) => (FindingKind::DoubleUnmap, before),
            None => (FindingKind::UnmapOfNothing, Vec::new()),
        };
        self.find(kind, (range, None), before, now);
    }

    /// The map, the unmap, and perhaps the flush of what was in a range last.
    pub(super) fn unmapped_before(&self, range: IovaRange) -> Option<Vec<Record>> {
        if let Some((range, stale)) = self.leaves.first(range) {
            return Some(self.suspected(range, stale).before);
        }
        self.gone.first(range).map(|(_, gone)| gone.records())
    }

    /// All that is left of the mapping that an address is in, the memory of the piece there, and
    /// the event that made it.
    pub(super) fn mapping_at(&self, iova: Iova) -> Option<(IovaRange, Option<Span>, Vec<Record>)> {
        let (piece, part) = self.mapped.at(iova)?;
        Some((self.whole(piece), memory(piece, part), vec![part.mapped.clone()]))
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

    /// A table goes back to where it can become another.
    pub(super) fn free_table(&mut self, span: Span, now: &Record) {
        let Some((range, number)) = self.tables.freed(span) else { return };
        let fresh = |(_, walk): &(IovaRange, &Stale)| {
            walk.unmapped.number == number && walk.reported == Reported::No
        };
        let Some((piece, walk)) = self.walks.meeting(range).find(fresh) else { return };
        let Suspect { cached, subject, cause, before } = self.suspected(piece, walk);
        self.walks.each_meeting(range, |walk| walk.reported = Reported::Yes);
        let kind = FindingKind::LateFlush { cached, cause, freed: Some(span) };
        self.find(kind, subject, before, now);
    }

    /// IOVAs, and what was mapped there, go back to their owners.
    pub(super) fn release(&mut self, range: IovaRange, now: &Record) {
        if let Some((piece, part)) = self.mapped.first(range) {
            let (subject, before) = ((piece, memory(piece, part)), vec![part.mapped.clone()]);
            self.find(FindingKind::ReleasedWhileMapped { freed: None }, subject, before, now);
        }
        if let Some(Suspect { cached, subject, cause, before }) = self.suspect(range) {
            let kind = FindingKind::LateFlush { cached, cause, freed: None };
            self.find(kind, subject, before, now);
        }
        for all in [&mut self.leaves, &mut self.walks] {
            all.each_meeting(range, |stale| stale.reported = Reported::Yes);
        }
    }

    /// Memory goes back to its owner.
    pub(super) fn free(&mut self, span: Span, now: &Record) {
        let (freed, extent) = (Some(span), (span.paddr().get(), span.last().get()));
        let mapped = self.mapped.leading_to(extent).next();
        if let Some((piece, part)) = mapped {
            let (subject, before) = ((piece, memory(piece, part)), vec![part.mapped.clone()]);
            self.find(FindingKind::ReleasedWhileMapped { freed }, subject, before, now);
        }
        let fresh = |(_, stale): &(IovaRange, &Stale)| stale.reported == Reported::No;
        let stale = self.leaves.leading_to(extent).find(fresh);
        if let Some((range, stale)) = stale {
            let Suspect { cached, subject, cause, before } = self.suspected(range, stale);
            let all: Vec<_> = self.leaves.leading_to(extent).map(|(range, _)| range).collect();
            let all: Vec<_> = all.into_iter().flat_map(|range| self.leaves.take(range)).collect();
            for (piece, stale) in all {
                // No release is late for it again: it is not found by its memory, so that a driver
                // which never flushes costs no more with each release.
                let was = stale.was.map(|was| MappedPiece { paddr: None, ..was });
                self.leaves.insert(piece, Stale { was, reported: Reported::Yes, ..stale });
            }
            let kind = FindingKind::LateFlush { cached, cause, freed };
            self.find(kind, subject, before, now);
        }
        if self.config.trust == Trust::Untrusted {
            self.expect_no_neighbours(span, now);
        }
    }

    /// No device reaches freed memory by the granule of a neighbour.
    fn expect_no_neighbours(&mut self, span: Span, now: &Record) {
        let mask = lg2::mask(self.config.granule_lg2);
        let around = (span.paddr().get() & !mask, span.last().get() | mask);
        let mapped = self.mapped.leading_to(around).map(|(range, part)| {
            let before = vec![part.mapped.clone()];
            (range, memory(range, part), before)
        });
        let stale = self.leaves.leading_to(around).map(|(range, stale)| {
            let Suspect { subject: (range, memory), before, .. } = self.suspected(range, stale);
            (range, memory, before)
        });
        let found = mapped.chain(stale).find_map(|(range, memory, before)| {
            let neighbour = memory?;
            let (first, last) = (neighbour.paddr(), neighbour.last());
            let granule = match () {
                () if last < span.paddr() => last,
                () if first > span.last() => first,
                // The same bytes: that is said by another finding.
                () => return None,
            };
            let granule =
                Span::new(PhysAddr::new(granule.get() & !mask), mask.checked_add(1)?).ok()?;
            Some((FindingKind::SharedGranule { freed: span, granule }, (range, memory), before))
        });
        if let Some((kind, subject, before)) = found {
            self.find(kind, subject, before, now);
        }
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
        for all in [std::mem::take(&mut self.leaves), std::mem::take(&mut self.walks)] {
            // What one unmap took away is one bug.
            let mut told = HashSet::new();
            for (range, stale) in all.iter().filter(|(_, stale)| stale.reported == Reported::No) {
                if told.insert(stale.unmapped.number) {
                    let Suspect { cached, subject, cause, before } = self.suspected(range, stale);
                    self.find(FindingKind::MissingFlush { cached, cause }, subject, before, now);
                }
            }
        }
    }
}

/// The memory that a piece leads to.
pub(super) fn memory(piece: IovaRange, mapped: &MappedPiece) -> Option<Span> {
    Span::new(PhysAddr::new(mapped.paddr?), piece.checked_len()?).ok()
}

/// The part of `within` that lies behind a piece of it.
pub(super) fn behind(piece: IovaRange, within: IovaRange) -> Option<IovaRange> {
    IovaRange::new(piece.last().checked_add(1)?, within.last())
}
