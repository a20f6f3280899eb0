//! What was unmapped and waits for its sync.
//!
//! In lazy mode an unmap does not wait for hardware: what it took away is collected, and synced
//! together with what follows. Until then a device may still use the translation. That is what lazy
//! mode buys its speed with, so the time is bounded, and what must not be used again before the
//! sync (IOVAs, memory) is owned by the queue.
//!
//! What a failed sync leaves behind is in quarantine here, and tried again with the next flush.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::{fmt, mem};

use lock_api::Mutex;

use super::gather::{Gather, SyncFailed, Synced};
use super::ops::HardwareError;
use crate::io_pgtable::Retired;
use crate::platform::{Apart, Flag, Platform};

/// Who ends what a queue holds: the domain of the translations, and the owner of what is held.
pub(crate) trait Flusher {
    /// Lists of detached tables.
    type List: Send;
    /// What is released by a sync.
    type Held: Send;

    /// An empty gather for the hardware.
    fn gather(&self) -> Gather<Self::List>;

    /// Adds what was retired.
    fn add(&self, gather: &mut Gather<Self::List>, retired: Retired<Self::List>);

    /// Adds one gather to another.
    fn merge(&self, gather: &mut Gather<Self::List>, more: Gather<Self::List>);

    /// Makes hardware forget, and frees tables.
    fn sync(&self, gather: Gather<Self::List>) -> Result<Synced, SyncFailed<Self::List>>;

    /// Takes back what was held, which no device reaches any more.
    fn release(&self, held: Self::Held, synced: &Synced);
}

/// When a queue flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Unmaps that wait on one CPU at most.
    pub entries: usize,
    /// Nanoseconds that a translation may outlive its unmap. Whoever unmaps next on the same CPU
    /// keeps to it, and a timer that calls [`DmaDomain::expire`](crate::dma::DmaDomain::expire).
    pub max_age: u64,
}

impl Default for Config {
    /// As Linux: 256 entries, 10 ms.
    fn default() -> Self {
        Self { entries: 256, max_age: 10_000_000 }
    }
}

/// What was unmapped and is still to be synced, by CPU.
pub(crate) struct FlushQueue<P: Platform, L, T> {
    slots: Box<[Apart<OfCpu<L, T>>]>,
    quarantine: Mutex<P::Lock, Slot<L, T>>,
    config: Config,
}

type OfCpu<L, T> = Mutex<Flag, Slot<L, T>>;

/// A CPU's.
struct Slot<L, T> {
    gather: Option<Gather<L>>,
    held: Vec<T>,
    /// When the first of them came.
    since: u64,
}

impl<P: Platform, L: Send, T: Send> FlushQueue<P, L, T> {
    /// An empty queue with places for so many CPUs.
    pub(crate) fn new(cpus: usize, config: Config) -> Self {
        let slot = |room| Slot { gather: None, held: Vec::with_capacity(room), since: 0 };
        let slots = (0..cpus.max(1)).map(|_| Apart(Mutex::new(slot(config.entries)))).collect();
        Self { slots, quarantine: Mutex::new(slot(0)), config }
    }

    /// Takes what was retired, and what may be released when that is synced.
    ///
    /// # Errors
    ///
    /// Where it was the time to flush and hardware did not answer: all of it is in quarantine.
    #[inline]
    pub(crate) fn push(
        &self,
        retired: Retired<L>,
        held: T,
        platform: &P,
        flusher: &impl Flusher<List = L, Held = T>,
    ) -> Result<(), HardwareError> {
        let now = platform.now();
        let slot = &self.slots[platform.cpu() % self.slots.len()];
        let Some(mut slot) = slot.try_lock() else {
            let held = self.sync(retired, held, flusher)?;
            // Nobody waits for it.
            flusher.release(held.0, &held.1);
            return Ok(());
        };
        if slot.held.is_empty() {
            slot.since = now;
        }
        let gather = slot.gather.get_or_insert_with(|| flusher.gather());
        flusher.add(gather, retired);
        slot.held.push(held);
        if slot.held.len() < self.config.entries && now - slot.since < self.config.max_age {
            return Ok(());
        }
        let gather = slot.gather.take().unwrap_or_else(|| flusher.gather());
        let mut all = mem::take(&mut slot.held);
        match flusher.sync(gather) {
            Ok(synced) => {
                all.drain(..).for_each(|held| flusher.release(held, &synced));
                slot.held = all;
                Ok(())
            }
            Err(SyncFailed { gather, error }) => {
                self.quarantine(gather, all, flusher);
                Err(error)
            }
        }
    }

    /// Syncs what was retired at once, and gives back what was held.
    ///
    /// # Errors
    ///
    /// Where hardware did not answer: both are in quarantine.
    #[inline]
    pub(crate) fn sync(
        &self,
        retired: Retired<L>,
        held: T,
        flusher: &impl Flusher<List = L, Held = T>,
    ) -> Result<(T, Synced), HardwareError> {
        let mut gather = flusher.gather();
        flusher.add(&mut gather, retired);
        match flusher.sync(gather) {
            Ok(synced) => Ok((held, synced)),
            Err(SyncFailed { gather, error }) => {
                self.quarantine(gather, [held], flusher);
                Err(error)
            }
        }
    }

    /// Flushes what is as old as the bound.
    pub(crate) fn expire(
        &self,
        now: u64,
        flusher: &impl Flusher<List = L, Held = T>,
    ) -> Result<(), HardwareError> {
        self.flush_where(flusher, |since| now.saturating_sub(since) >= self.config.max_age)
    }

    /// Flushes everything, what is in quarantine too.
    pub(crate) fn flush(
        &self,
        flusher: &impl Flusher<List = L, Held = T>,
    ) -> Result<(), HardwareError> {
        self.flush_where(flusher, |_| true)
    }

    /// How many unmaps wait for a sync, and how many are in quarantine.
    pub(crate) fn waiting(&self) -> (usize, usize) {
        let waiting = self.slots.iter().map(|slot| slot.lock().held.len()).sum();
        (waiting, self.quarantine.lock().held.len())
    }

    fn flush_where(
        &self,
        flusher: &impl Flusher<List = L, Held = T>,
        is_due: impl Fn(u64) -> bool,
    ) -> Result<(), HardwareError> {
        for slot in &self.slots {
            let mut slot = slot.lock();
            let since = slot.since;
            let Some(gather) = slot.gather.take_if(|_| is_due(since)) else { continue };
            let all = mem::replace(&mut slot.held, Vec::with_capacity(self.config.entries));
            drop(slot);
            match flusher.sync(gather) {
                Ok(synced) => all.into_iter().for_each(|held| flusher.release(held, &synced)),
                Err(SyncFailed { gather, error }) => {
                    self.quarantine(gather, all, flusher);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Keeps what hardware may still use, and what must not be released therefore.
    #[cold]
    pub(crate) fn quarantine(
        &self,
        gather: Gather<L>,
        held: impl IntoIterator<Item = T>,
        flusher: &impl Flusher<List = L, Held = T>,
    ) {
        let mut quarantine = self.quarantine.lock();
        let all = quarantine.gather.get_or_insert_with(|| flusher.gather());
        flusher.merge(all, gather);
        quarantine.held.extend(held);
    }
}

impl<P: Platform, L, T> fmt::Debug for FlushQueue<P, L, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlushQueue").field("config", &self.config).finish_non_exhaustive()
    }
}
