//! A domain keeps here what a failed sync leaves behind, until a later sync succeeds.
//!
//! Failed syncs are numbered, in all containers together. Where such a sync was to make memory
//! safe, the holder of the memory notes the number, and releases the memory when every domain has
//! confirmed all syncs that failed before. Nothing here allocates: all that was not synced becomes
//! one gather.

use core::mem;
use core::sync::atomic::{AtomicU64, Ordering};

use lock_api::Mutex;

use crate::iommu::Gather;
use crate::platform::Flag;

/// How many syncs have failed.
static FAILURES: AtomicU64 = AtomicU64::new(0);

/// No sync has this number.
const NONE: u64 = u64::MAX;

/// A number that is greater than that of any sync that has failed before.
pub(super) fn now() -> u64 {
    FAILURES.load(Ordering::Relaxed)
}

/// What hardware has not confirmed to have forgotten.
pub(super) struct Unconfirmed<L> {
    state: Mutex<Flag, UnconfirmedState<L>>,
    /// The smaller of the numbers in the state. Written under its lock.
    oldest: AtomicU64,
}

struct UnconfirmedState<L> {
    waiting: Option<Part<L>>,
    /// The number of what is being tried again.
    tried: u64,
}

struct Part<L> {
    gather: Gather<L>,
    /// The number of the first failure in it.
    oldest: u64,
}

impl<L> Default for Unconfirmed<L> {
    fn default() -> Self {
        let state = Mutex::new(UnconfirmedState { waiting: None, tried: NONE });
        Self { state, oldest: AtomicU64::new(NONE) }
    }
}

impl<L> Unconfirmed<L> {
    /// The number of the first failed sync that is not confirmed.
    pub(super) fn oldest(&self) -> Option<u64> {
        Some(self.oldest.load(Ordering::Acquire)).filter(|oldest| *oldest != NONE)
    }

    /// Keeps what a sync failed for; `merge` puts two gathers together.
    #[cold]
    pub(super) fn keep(&self, gather: Gather<L>, merge: impl FnOnce(&mut Gather<L>, Gather<L>)) {
        let oldest = FAILURES.fetch_add(1, Ordering::Relaxed);
        self.change(|state| state.add(Part { gather, oldest }, merge));
    }

    fn change<T>(&self, change: impl FnOnce(&mut UnconfirmedState<L>) -> T) -> T {
        let mut state = self.state.lock();
        let result = change(&mut state);
        let waiting = state.waiting.as_ref().map_or(NONE, |part| part.oldest);
        self.oldest.store(waiting.min(state.tried), Ordering::Release);
        result
    }
}

impl<L> UnconfirmedState<L> {
    fn add(&mut self, more: Part<L>, merge: impl FnOnce(&mut Gather<L>, Gather<L>)) {
        match &mut self.waiting {
            Some(part) => {
                merge(&mut part.gather, more.gather);
                part.oldest = part.oldest.min(more.oldest);
            }
            waiting @ None => *waiting = Some(more),
        }
    }
}

/// A gather that is being synced again. After a drop, as by a panic, it is unknown what of it was
/// synced: hardware has to forget everything then, and the tables in it leak.
pub(super) struct Tried<'u, L> {
    unconfirmed: &'u Unconfirmed<L>,
}

impl<'u, L> Tried<'u, L> {
    /// What is to be synced again; nothing where another thread is at it.
    pub(super) fn begin(unconfirmed: &'u Unconfirmed<L>) -> Option<(Self, Gather<L>)> {
        unconfirmed.oldest()?;
        let part = unconfirmed.change(|state| {
            let part = state.waiting.take_if(|_| state.tried == NONE)?;
            state.tried = part.oldest;
            Some(part)
        })?;
        Some((Self { unconfirmed }, part.gather))
    }

    /// Hardware has forgotten it.
    pub(super) fn confirmed(self) {
        self.unconfirmed.change(|state| state.tried = NONE);
        mem::forget(self);
    }

    /// It has not.
    pub(super) fn failed(self, gather: Gather<L>, merge: impl FnOnce(&mut Gather<L>, Gather<L>)) {
        self.end(gather, merge);
        mem::forget(self);
    }

    fn end(&self, gather: Gather<L>, merge: impl FnOnce(&mut Gather<L>, Gather<L>)) {
        self.unconfirmed.change(|state| {
            let oldest = mem::replace(&mut state.tried, NONE);
            state.add(Part { gather, oldest }, merge);
        });
    }
}

impl<L> Drop for Tried<'_, L> {
    fn drop(&mut self) {
        // It has no tables that would have to be put together.
        self.end(Gather::everything(), |all, more| all.merge_with(more, |_, _| ()));
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::addr::Iova;
    use crate::io_pgtable::Retired;
    use crate::iommu::Scope;
    use crate::range::IovaRange;

    fn gather(at: u64) -> Gather<()> {
        let mut gather = Gather::new(8);
        let range = Some(IovaRange::point(Iova::new(at)));
        gather.add(Retired { range, leaf_sizes: 1 << 12, tables: None }).unwrap();
        gather
    }

    fn merge(all: &mut Gather<()>, more: Gather<()>) {
        all.merge_with(more, |(), ()| ());
    }

    #[test]
    fn what_fails_while_more_is_tried_again_is_not_confirmed_with_that() {
        let unconfirmed = Unconfirmed::default();
        let begun = now();
        unconfirmed.keep(gather(1), merge);
        let (tried, again) = Tried::begin(&unconfirmed).unwrap();
        unconfirmed.keep(gather(9), merge);
        assert!(Tried::begin(&unconfirmed).is_none(), "one thread at a time");
        let first = unconfirmed.oldest().unwrap();
        assert!((begun..now()).contains(&first));
        tried.confirmed();
        assert!(unconfirmed.oldest().unwrap() > first, "the second stays");
        drop(again);
        let (tried, again) = Tried::begin(&unconfirmed).unwrap();
        let expected = [IovaRange::point(Iova::new(9))];
        assert_eq!(again.invalidation().scope, Scope::Ranges(&expected));
        tried.failed(again, merge);
        let (tried, _) = Tried::begin(&unconfirmed).unwrap();
        tried.confirmed();
        assert_eq!(unconfirmed.oldest(), None);
    }

    #[test]
    fn what_fails_again_waits_with_what_failed_meanwhile_and_is_as_old_as_the_older() {
        let unconfirmed = Unconfirmed::default();
        unconfirmed.keep(gather(1), merge);
        let first = unconfirmed.oldest();
        let (tried, again) = Tried::begin(&unconfirmed).unwrap();
        unconfirmed.keep(gather(9), merge);
        tried.failed(again, merge);
        unconfirmed.keep(gather(5), merge);
        assert_eq!(unconfirmed.oldest(), first);
        let (tried, all) = Tried::begin(&unconfirmed).unwrap();
        let Scope::Ranges(ranges) = all.invalidation().scope else { panic!("{all:?}") };
        let mut starts: Vec<u64> = ranges.iter().map(|range| range.start().get()).collect();
        starts.sort_unstable();
        assert_eq!(starts, [1, 5, 9]);
        assert_eq!(unconfirmed.oldest(), first);
        tried.confirmed();
        assert_eq!(unconfirmed.oldest(), None);
    }

    #[test]
    fn what_a_panic_tears_out_of_a_sync_is_not_confirmed() {
        let unconfirmed = Unconfirmed::default();
        unconfirmed.keep(gather(1), merge);
        let first = unconfirmed.oldest();
        drop(Tried::begin(&unconfirmed).unwrap());
        assert_eq!(unconfirmed.oldest(), first);
        let (tried, again) = Tried::begin(&unconfirmed).unwrap();
        assert_eq!(again.invalidation().scope, Scope::All);
        tried.confirmed();
    }
}
