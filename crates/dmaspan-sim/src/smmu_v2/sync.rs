//! Invalidations that were accepted, and the syncs that complete them (IHI 0062, "TLB
//! maintenance").

use std::collections::HashMap;

use super::behaviour::SyncCompletion;
use super::tlb::Invalidation;

/// Where an invalidation or a sync was written: a sync of a bank is for what was written to that
/// bank, the global one for everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Origin {
    Global,
    Bank(usize),
}

impl Origin {
    fn covers(self, written: Self) -> bool {
        self == Self::Global || self == written
    }
}

/// A sync that was begun.
#[derive(Debug)]
struct InProgress {
    /// The number of the first invalidation that it does not cover.
    end: u64,
    /// Status reads that still say that it is active.
    polls: u32,
}

/// Accepted invalidations and syncs in progress.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    next: u64,
    pending: Vec<(u64, Origin, Invalidation)>,
    in_progress: HashMap<Origin, InProgress>,
}

impl Syncs {
    pub(super) fn accept(&mut self, origin: Origin, what: Invalidation) {
        self.pending.push((self.next, origin, what));
        self.next += 1;
    }

    /// How many invalidations no sync has completed.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Begins a sync, and returns what it has completed already.
    pub(super) fn begin(
        &mut self,
        origin: Origin,
        completion: SyncCompletion,
    ) -> Vec<Invalidation> {
        let polls = match completion {
            SyncCompletion::AfterPolls(0) => return self.complete(origin, self.next),
            SyncCompletion::AfterPolls(polls) => polls,
            SyncCompletion::Never => u32::MAX,
        };
        self.in_progress.insert(origin, InProgress { end: self.next, polls });
        Vec::new()
    }

    /// A read of the status: whether the sync is active, or else what it has completed.
    pub(super) fn poll(
        &mut self,
        origin: Origin,
        completion: SyncCompletion,
    ) -> Result<Vec<Invalidation>, Active> {
        let Some(sync) = self.in_progress.get_mut(&origin) else { return Ok(Vec::new()) };
        if completion == SyncCompletion::Never {
            return Err(Active);
        }
        match sync.polls.checked_sub(1) {
            Some(fewer) => {
                sync.polls = fewer;
                Err(Active)
            }
            None => {
                let end = sync.end;
                self.in_progress.remove(&origin);
                Ok(self.complete(origin, end))
            }
        }
    }

    fn complete(&mut self, origin: Origin, end: u64) -> Vec<Invalidation> {
        let is_covered = |(number, written, _): &mut (u64, Origin, Invalidation)| {
            *number < end && origin.covers(*written)
        };
        self.pending.extract_if(.., is_covered).map(|(.., what)| what).collect()
    }
}

/// A sync that is not done.
#[derive(Debug)]
pub(super) struct Active;
