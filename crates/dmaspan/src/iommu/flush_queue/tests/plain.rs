//! A queue without locks, tickets and threads.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::mem;

use super::super::{Config, QUARANTINE_LEAST};
use super::{Call, Did, List, NO_ANSWER, Then};
use crate::iommu::HardwareError;

/// The invalidation that hardware gets.
#[derive(Clone, Debug, Default)]
struct Told {
    tables: List,
    everything: bool,
}

impl Told {
    fn merge(&mut self, more: Self) {
        self.tables.extend(more.tables);
        self.everything |= more.everything;
    }
}

/// A CPU's unmaps, or those in quarantine.
#[derive(Clone, Debug, Default)]
struct Place {
    waiting: Vec<u32>,
    told: Told,
    since: u64,
    flushed: Vec<u32>,
    is_flushed: bool,
    is_locked: bool,
}

/// A panic goes through.
struct Torn;

pub(super) struct Plain {
    /// By CPU, and the last is the quarantine.
    places: Vec<Place>,
    config: Config,
    /// Whether the quarantine is to be looked at.
    quarantined: bool,
    log: VecDeque<Did>,
}

impl Plain {
    pub(super) fn new(cpus: usize, config: Config) -> Self {
        let places = vec![Place::default(); cpus.max(1) + 1];
        Self { places, config, quarantined: false, log: VecDeque::new() }
    }

    fn quarantine(&self) -> usize {
        self.places.len() - 1
    }

    pub(super) fn waiting(&self) -> (usize, usize) {
        let (quarantine, slots) = self.places.split_last().unwrap();
        (slots.iter().map(|slot| slot.waiting.len()).sum(), quarantine.waiting.len())
    }

    /// All that waits, in the order in which it is taken out.
    pub(super) fn left(&self) -> Vec<u32> {
        self.places.iter().flat_map(|place| place.waiting.iter().rev().copied()).collect()
    }

    /// Does what the log of one call says that another queue did.
    pub(super) fn follow(&mut self, log: VecDeque<Did>) {
        self.log = log;
        self.calls();
        assert_eq!(self.log, []);
    }

    #[track_caller]
    fn expect(&mut self, did: Did) {
        assert_eq!(self.log.pop_front(), Some(did));
    }

    /// All calls that come now.
    fn calls(&mut self) {
        while let Some(&Did::Begun(call)) = self.log.front() {
            self.log.pop_front();
            let ended = self.call(call).ok();
            self.expect(Did::Ended(ended));
        }
    }

    fn call(&mut self, call: Call) -> Result<Result<Option<u64>, HardwareError>, Torn> {
        let is_done = match call {
            Call::Push { id, cpu, now } => self.push(id, cpu, now)?,
            Call::Strict { id } => self.strict(id)?,
            Call::Flush => self.flush()?,
            Call::TryFlush => self.flush_some(|_| true, &mut |_| ())?,
            Call::Expire { now } => {
                let max_age = self.config.max_age;
                let mut next = None;
                let mut later = |since: Option<u64>| {
                    let at = since.map_or(now, |since| since.saturating_add(max_age));
                    next = Some(next.map_or(at, |next: u64| next.min(at)));
                };
                if self.flush_some(|since| since.saturating_add(max_age) <= now, &mut later)? {
                    return Ok(Ok(next));
                }
                false
            }
        };
        Ok(if is_done { Ok(None) } else { Err(NO_ANSWER) })
    }

    fn push(&mut self, id: u32, cpu: usize, now: u64) -> Result<bool, Torn> {
        let at = cpu % self.quarantine();
        let Config { entries, max_age } = self.config;
        let slot = &mut self.places[at];
        if slot.is_locked {
            return self.strict(id);
        }
        if slot.waiting.len() == entries {
            if entries == 0 || slot.is_flushed {
                return self.strict(id);
            }
            let (mut all, mut told) = (vec![at], self.begin(at));
            told.tables.push(id);
            self.add_quarantine(&mut all, &mut told);
            let is_done = self.finish(&all, told);
            return match is_done {
                Ok(true) => self.release_one(id).map(|()| true),
                Ok(false) => {
                    self.keep(Told::default(), [id]);
                    Ok(false)
                }
                Err(Torn) => self.lose(id),
            };
        }
        if slot.waiting.is_empty() {
            slot.since = now;
        }
        slot.told.tables.push(id);
        slot.waiting.push(id);
        let is_young = now.saturating_sub(slot.since) < max_age;
        if slot.waiting.len() < entries && is_young || slot.is_flushed {
            return Ok(true);
        }
        let (mut all, mut told) = (vec![at], self.begin(at));
        self.add_quarantine(&mut all, &mut told);
        self.finish(&all, told)
    }

    fn strict(&mut self, id: u32) -> Result<bool, Torn> {
        if self.quarantined {
            let (mut all, mut told) = (Vec::new(), Told::default());
            self.add_quarantine(&mut all, &mut told);
            if self.finish(&all, told).is_err() {
                return self.lose(id);
            }
        }
        let told = Told { tables: vec![id], everything: false };
        match self.sync(told) {
            Ok(None) => self.release_one(id).map(|()| true),
            Ok(Some(told)) => {
                self.keep(told, [id]);
                Ok(false)
            }
            Err(Torn) => self.lose(id),
        }
    }

    fn flush(&mut self) -> Result<bool, Torn> {
        if !self.flush_some(|_| true, &mut |_| ())? {
            return Ok(false);
        }
        if !self.quarantined {
            return Ok(true);
        }
        let quarantine = self.quarantine();
        if self.places[quarantine].is_flushed {
            return self.sync_in_place(quarantine);
        }
        self.quarantined = false;
        let told = self.begin(quarantine);
        self.finish(&[quarantine], told)
    }

    /// Flushes those that are due, by the time since which they wait, and says of the others since
    /// when they do, where anybody knows.
    fn flush_some(
        &mut self,
        is_due: impl Fn(u64) -> bool,
        later: &mut dyn FnMut(Option<u64>),
    ) -> Result<bool, Torn> {
        let (mut all, mut told, mut is_done) = (Vec::new(), Told::default(), true);
        for at in 0..self.quarantine() {
            let slot = &self.places[at];
            if slot.is_locked {
                later(None);
            } else if slot.waiting.is_empty() {
            } else if !is_due(slot.since) {
                later(Some(slot.since));
            } else if slot.is_flushed {
                match self.sync_in_place(at) {
                    Ok(done) => is_done &= done,
                    Err(Torn) => {
                        self.tear(&all, &all);
                        return Err(Torn);
                    }
                }
                later(None);
            } else {
                told.merge(self.begin(at));
                all.push(at);
            }
        }
        self.add_quarantine(&mut all, &mut told);
        Ok(self.finish(&all, told)? && is_done)
    }

    /// Takes what waits, for a flush.
    fn begin(&mut self, at: usize) -> Told {
        let place = &mut self.places[at];
        place.is_flushed = true;
        place.flushed = mem::take(&mut place.waiting);
        mem::take(&mut place.told)
    }

    fn add_quarantine(&mut self, all: &mut Vec<usize>, told: &mut Told) {
        let quarantine = self.quarantine();
        if self.quarantined && !self.places[quarantine].is_flushed {
            self.quarantined = false;
            told.merge(self.begin(quarantine));
            all.push(quarantine);
        }
    }

    /// Syncs what was taken from these places, and releases or keeps it.
    fn finish(&mut self, all: &[usize], told: Told) -> Result<bool, Torn> {
        let synced = self.sync(told);
        match synced {
            Ok(None) => {
                for &at in all {
                    let is_quarantine = at == self.quarantine();
                    for id in self.places[at].flushed.clone() {
                        if is_quarantine {
                            self.expect(Did::Named { id });
                        }
                    }
                    while let Some(id) = self.places[at].flushed.pop() {
                        if self.release_one(id).is_err() {
                            let is_left = |at: &&usize| !self.places[**at].flushed.is_empty();
                            let left: Vec<_> = all.iter().filter(is_left).copied().collect();
                            self.tear(&left, all);
                            return Err(Torn);
                        }
                    }
                }
            }
            Ok(Some(ref told)) => {
                let flushed = self.flushed(all);
                self.keep(told.clone(), flushed);
            }
            Err(Torn) => {
                self.tear(all, all);
                return Err(Torn);
            }
        }
        all.iter().for_each(|&at| self.places[at].is_flushed = false);
        Ok(synced.is_ok_and(|failed| failed.is_none()))
    }

    /// All that was being flushed in these places.
    fn flushed(&mut self, all: &[usize]) -> Vec<u32> {
        let mut taken = Vec::new();
        for &at in all {
            taken.extend(mem::take(&mut self.places[at].flushed).into_iter().rev());
        }
        taken
    }

    /// A panic ended a flush of these places; what was torn out of it is in some of them.
    fn tear(&mut self, torn: &[usize], all: &[usize]) {
        if !torn.is_empty() {
            let flushed = self.flushed(torn);
            let quarantine = self.quarantine();
            self.places[quarantine].told.everything = true;
            for id in self.fill(flushed) {
                self.expect(Did::Lost { id });
            }
        }
        all.iter().for_each(|&at| self.places[at].is_flushed = false);
    }

    fn keep(&mut self, told: Told, held: impl IntoIterator<Item = u32>) {
        let quarantine = self.quarantine();
        self.places[quarantine].told.merge(told);
        for id in self.fill(held) {
            self.expect(Did::Leaked { id });
        }
    }

    /// Puts it into quarantine, and returns what has no room there.
    fn fill(&mut self, held: impl IntoIterator<Item = u32>) -> Vec<u32> {
        self.quarantined = true;
        let room = self.places.len() * self.config.entries.max(QUARANTINE_LEAST);
        let quarantine = self.quarantine();
        let waiting = &mut self.places[quarantine].waiting;
        waiting.extend(held);
        waiting.split_off(room.min(waiting.len()))
    }

    /// Syncs what waits, and leaves it where it is.
    fn sync_in_place(&mut self, at: usize) -> Result<bool, Torn> {
        let place = &mut self.places[at];
        let unknown = Told { tables: List::new(), everything: true };
        let told = mem::replace(&mut place.told, unknown);
        place.is_locked = true;
        let synced = self.sync(told);
        let place = &mut self.places[at];
        place.is_locked = false;
        let failed = synced?;
        let is_done = failed.is_none();
        place.told = failed.unwrap_or_default();
        Ok(is_done)
    }

    /// Syncs, and returns what was not.
    fn sync(&mut self, told: Told) -> Result<Option<Told>, Torn> {
        let Some(Did::Synced { tables, everything, then }) = self.log.pop_front() else {
            panic!("it did not sync {told:?}");
        };
        assert_eq!((&tables, everything), (&told.tables, told.everything));
        self.calls();
        match then {
            Then::Done => Ok(None),
            Then::Failed => Ok(Some(told)),
            Then::Panicked => Err(Torn),
        }
    }

    fn release_one(&mut self, id: u32) -> Result<(), Torn> {
        let Some(Did::Released { id: released, then }) = self.log.pop_front() else {
            panic!("it did not release {id}");
        };
        assert_eq!(released, id);
        self.calls();
        if then == Then::Panicked { Err(Torn) } else { Ok(()) }
    }

    /// A panic dropped what an unmap had in its hands.
    fn lose(&mut self, id: u32) -> Result<bool, Torn> {
        self.expect(Did::Lost { id });
        Err(Torn)
    }
}
