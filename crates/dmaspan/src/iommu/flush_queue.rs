//! The flush queue keeps what was unmapped lazily, until its sync. A
//! [`DmaDomain`](crate::dma::DmaDomain) has one.
//!
//! In lazy mode an unmap does not wait for hardware: the queue collects what it took away, and
//! syncs that together with what follows. Until then a device may still use the translation. Lazy
//! mode buys its speed with that, so the time is bounded, and the queue owns what must not be used
//! again before the sync: IOVAs and memory.
//!
//! Each CPU has a slot with two batches: one that fills, and one that is being flushed or empty. A
//! flush exchanges them and syncs without holding the slot, so only the thread that flushes waits
//! for hardware. An unmap that finds its slot taken, or both batches full, syncs for itself.
//!
//! The quarantine has what a failed sync leaves behind, and every later flush tries it again.
//! Nothing here allocates once the queue exists.

mod list;
#[cfg(test)]
mod tests;

use alloc::boxed::Box;
use alloc::collections::TryReserveError;
use alloc::vec::Vec;
use core::{iter, mem, ptr, slice};

use lock_api::{Mutex, MutexGuard, RawMutex};

use super::gather::{Gather, SyncFailed};
use super::ops::HardwareError;
use crate::atomic::{AtomicBool, AtomicU64, Ordering, spin_loop};
use crate::io_pgtable::Retired;
use crate::log;
use crate::platform::{Apart, Flag, Platform};
use crate::range::IovaRange;

pub(crate) use list::QueuedFor;

/// The two that end what a queue holds: the domain of the translations, and the owner of the IOVAs
/// and memory.
pub(crate) trait Flusher {
    /// Lists of detached tables.
    type List;
    /// What is released by a sync. Dropped instead, it leaks.
    type QueuedMapping;

    /// An empty gather for the hardware.
    fn gather(&self) -> Gather<Self::List>;

    /// Adds what was retired.
    fn add(&self, gather: &mut Gather<Self::List>, retired: Retired<Self::List>);

    /// Adds one gather to another.
    fn merge(&self, gather: &mut Gather<Self::List>, more: Gather<Self::List>);

    /// Makes hardware forget, and frees tables.
    #[track_caller]
    fn sync(&self, gather: Gather<Self::List>) -> Result<(), SyncFailed<Self::List>>;

    /// The same for what one operation retired.
    #[track_caller]
    fn sync_one(&self, retired: Retired<Self::List>) -> Result<(), SyncFailed<Self::List>>;

    /// Takes back what was held, one after the other; no device reaches any of it any more. What a
    /// panic leaves in the iterator is released later.
    fn release(&self, held: impl Iterator<Item = Self::QueuedMapping>);

    /// The IOVAs of what is held.
    fn range(&self, held: &Self::QueuedMapping) -> IovaRange;

    /// Keeps for ever what a device may use, and counts it.
    fn leak(&self, held: Self::QueuedMapping);
}

/// When a queue flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Unmaps that wait on one CPU at most, up to [`MAX_ENTRIES`]; so many more may be on their way
    /// to hardware. With 0 every unmap is strict.
    pub entries: usize,
    /// Nanoseconds that a translation may outlive its unmap. The next unmap on the same CPU keeps
    /// to it, and so does a timer that calls [`DmaDomain::expire`](crate::dma::DmaDomain::expire):
    /// the first of them that comes after that time flushes what waits. With 0 every unmap flushes.
    pub max_age: u64,
}

/// The most entries that a queue may have for each CPU.
pub const MAX_ENTRIES: usize = 1 << 16;

impl Default for Config {
    /// As Linux: 256 entries, 10 ms.
    fn default() -> Self {
        Self { entries: 256, max_age: 10_000_000 }
    }
}

/// What was unmapped and is still to be synced, by CPU.
pub(crate) struct FlushQueue<P: Platform, L, T> {
    slots: Box<[Apart<CpuQueue<Flag, L, T>>]>,
    quarantine: CpuQueue<P::Lock, L, T>,
    /// Whether anything may be in quarantine.
    quarantined: AtomicBool,
    /// The last ticket that was given to a flush; apart from what every unmap reads.
    tickets: Apart<AtomicU64>,
    config: Config,
}

/// The entries that wait in one place, and those of them that are being flushed.
struct CpuQueue<R, L, T> {
    waiting: Mutex<R, Batch<L, T>>,
    /// [`FREE`], or the ticket of the flush that has `flushed`, with [`SYNCED`].
    flush: AtomicU64,
    /// Only the flush whose ticket is in `flush` comes here.
    flushed: Mutex<Flag, Vec<T>>,
}

/// Entries and what hardware must forget before they are released.
struct Batch<L, T> {
    gather: Gather<L>,
    held: Vec<T>,
    /// When the first of them came.
    since: u64,
}

/// For how many entries each CPU makes room in quarantine at least.
const QUARANTINE_LEAST: usize = 256;

/// No flush of the slot is running.
const FREE: u64 = 0;
/// In a ticket: the sync is over.
const SYNCED: u64 = 1;

/// Whether a flush waits for hardware.
fn is_syncing(flush: u64) -> bool {
    flush & SYNCED == 0 && flush != FREE
}

/// Whether a flush waits for those that other threads are at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Others {
    Wait,
    Skip,
}

impl<R: RawMutex, L, T> CpuQueue<R, L, T> {
    fn new(gather: Gather<L>, room: usize) -> Result<Self, TryReserveError> {
        let mut both = [Vec::new(), Vec::new()];
        both.iter_mut().try_for_each(|held| held.try_reserve_exact(room))?;
        let [held, flushed] = both;
        let waiting = Mutex::new(Batch { gather, held, since: 0 });
        Ok(Self { waiting, flush: AtomicU64::new(FREE), flushed: Mutex::new(flushed) })
    }

    /// Hands what waits over to the flush with this ticket, and what hardware must forget; `None`
    /// where another flush has the second batch.
    fn begin(
        &self,
        batch: &mut Batch<L, T>,
        ticket: u64,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Option<Gather<L>> {
        self.flush.compare_exchange(FREE, ticket, Ordering::Acquire, Ordering::Relaxed).ok()?;
        mem::swap(&mut batch.held, &mut self.flushed.lock());
        Some(mem::replace(&mut batch.gather, flusher.gather()))
    }

    /// Whether the flush with this ticket has what was in the slot.
    fn is_of(&self, ticket: u64) -> bool {
        self.flush.load(Ordering::Relaxed) & !SYNCED == ticket
    }
}

/// The slots that a flush has, which it gives free again. What is still there then was torn out of
/// it by a panic, of a hook or of memory that was released: it is for quarantine, so that the next
/// flush comes to it, and hardware has to forget everything, since nobody knows any more what that
/// was.
struct FlushClaim<'q, P: Platform, L, T> {
    queue: &'q FlushQueue<P, L, T>,
    slots: &'q [Apart<CpuQueue<Flag, L, T>>],
    ticket: u64,
}

impl<P: Platform, L, T> FlushClaim<'_, P, L, T> {
    /// The second batches of its slots.
    fn flushed(&self) -> impl Iterator<Item = (&AtomicU64, &Mutex<Flag, Vec<T>>)> {
        let slots = self.slots.iter().filter(|slot| slot.is_of(self.ticket));
        let quarantine = iter::once(&self.queue.quarantine).filter(|slot| slot.is_of(self.ticket));
        slots
            .map(|slot| (&slot.flush, &slot.flushed))
            .chain(quarantine.map(|slot| (&slot.flush, &slot.flushed)))
    }
}

impl<P: Platform, L, T> Drop for FlushClaim<'_, P, L, T> {
    fn drop(&mut self) {
        let is_torn = |(flush, held): (&AtomicU64, &Mutex<Flag, Vec<T>>)| {
            is_syncing(flush.load(Ordering::Relaxed)) || !held.lock().is_empty()
        };
        if self.flushed().any(is_torn) {
            self.queue.keep_torn(self.flushed().map(|(_, held)| held));
        }
        self.flushed().for_each(|(flush, _)| flush.store(FREE, Ordering::Release));
    }
}

impl<P: Platform, L, T> FlushQueue<P, L, T> {
    /// An empty queue with slots for so many CPUs, one at least. `gather` makes empty ones.
    pub(crate) fn new(
        cpus: usize,
        config: Config,
        gather: impl Fn() -> Gather<L>,
    ) -> Result<Self, TryReserveError> {
        let cpus = cpus.max(1);
        let mut slots = Vec::new();
        slots.try_reserve_exact(cpus)?;
        for _ in 0..cpus {
            slots.push(Apart(CpuQueue::new(gather(), config.entries)?));
        }
        // All that can wait at once has a place in quarantine, and what follows for a while.
        let room = (cpus + 1).saturating_mul(config.entries.max(QUARANTINE_LEAST));
        Ok(Self {
            slots: slots.into(),
            quarantine: CpuQueue::new(gather(), room)?,
            quarantined: AtomicBool::new(false),
            tickets: Apart(AtomicU64::new(FREE)),
            config,
        })
    }

    /// Takes what was retired, and what may be released when that is synced.
    ///
    /// # Errors
    ///
    /// Where it was the time to flush and hardware did not answer: all of it is in quarantine.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn push(
        &self,
        retired: Retired<L>,
        held: T,
        platform: &P,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<(), HardwareError> {
        let now = platform.now();
        let cpu = platform.cpu();
        let cpu = if cpu < self.slots.len() { cpu } else { cpu % self.slots.len() };
        let slot = &self.slots[cpu];
        let Some(mut batch) = slot.waiting.try_lock() else {
            return self.push_strictly(retired, held, flusher);
        };
        let len = batch.held.len();
        if len == batch.held.capacity() {
            return self.push_full(slot, batch, retired, held, flusher);
        }
        if len == 0 {
            batch.since = now;
        }
        flusher.add(&mut batch.gather, retired);
        batch.held.push(held);
        let is_young = now.saturating_sub(batch.since) < self.config.max_age;
        if len + 1 < self.config.entries && is_young {
            return Ok(());
        }
        self.flush_slot(slot, batch, flusher)
    }

    /// The same with a slot that is full: a flush found the second batch still in use, or the queue
    /// has no entries. One sync is for all of it.
    #[cold]
    #[inline(never)]
    #[track_caller]
    fn push_full(
        &self,
        slot: &Apart<CpuQueue<Flag, L, T>>,
        mut batch: MutexGuard<'_, Flag, Batch<L, T>>,
        retired: Retired<L>,
        held: T,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<(), HardwareError> {
        let claim = self.claim(slice::from_ref(slot));
        let has_entries = !batch.held.is_empty();
        let begun = has_entries.then(|| slot.begin(&mut batch, claim.ticket, flusher)).flatten();
        drop(batch);
        let Some(mut gather) = begun else { return self.push_strictly(retired, held, flusher) };
        flusher.add(&mut gather, retired);
        self.begin_quarantine(&claim, &mut gather, flusher);
        let flushed = self.finish(claim, gather, flusher);
        match flushed {
            Ok(()) => flusher.release(iter::once(held)),
            // What hardware must forget for it is there already.
            Err(_) => self.keep(flusher.gather(), iter::once(held), flusher),
        }
        flushed
    }

    /// The same without a slot.
    #[cold]
    #[track_caller]
    fn push_strictly(
        &self,
        retired: Retired<L>,
        held: T,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<(), HardwareError> {
        match self.sync(retired, flusher) {
            Ok(()) => {
                flusher.release(iter::once(held));
                Ok(())
            }
            Err(SyncFailed { gather, error }) => {
                self.keep(gather, iter::once(held), flusher);
                Err(error)
            }
        }
    }

    /// Syncs what was retired at once.
    ///
    /// # Errors
    ///
    /// Where hardware did not answer: it is to be [kept](Self::keep), with what it was of.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn sync(
        &self,
        retired: Retired<L>,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<(), SyncFailed<L>> {
        if self.quarantined.load(Ordering::Relaxed) {
            // Hardware may answer again. What comes out of it is of the same kind as what follows.
            let _ = self.flush_quarantine(flusher);
        }
        flusher.sync_one(retired)
    }

    /// Flushes what is as old as the bound, and what is in quarantine; says when the next is due.
    ///
    /// # Errors
    ///
    /// Where hardware did not answer: what was flushed is in quarantine.
    #[track_caller]
    pub(crate) fn expire(
        &self,
        now: u64,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<Option<u64>, HardwareError> {
        let due = |since: u64| since.saturating_add(self.config.max_age);
        let mut next = None;
        self.flush_where(flusher, Others::Skip, |batch| match batch {
            Some(batch) if due(batch.since) <= now => true,
            // Nobody knows what is in a slot that is taken, or stays in it: look again.
            batch => {
                let at = batch.map_or(now, |batch| due(batch.since));
                next = Some(next.map_or(at, |next: u64| next.min(at)));
                false
            }
        })?;
        Ok(next)
    }

    /// Flushes everything, what is in quarantine too. What other threads are flushing has been
    /// synced, too, when this returns.
    ///
    /// # Errors
    ///
    /// Where hardware did not answer: what was flushed is in quarantine.
    #[track_caller]
    pub(crate) fn flush(
        &self,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<(), HardwareError> {
        self.flush_where(flusher, Others::Wait, |_| true)
    }

    /// Flushes everything that waits where no other thread is, and waits for none.
    ///
    /// # Errors
    ///
    /// Where hardware did not answer: what was flushed is in quarantine.
    #[track_caller]
    pub(crate) fn try_flush(
        &self,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<(), HardwareError> {
        self.flush_where(flusher, Others::Skip, |batch| batch.is_some())
    }

    /// How many unmaps wait for a flush, and how many are in quarantine. What is being flushed is
    /// neither.
    pub(crate) fn waiting(&self) -> (usize, usize) {
        let waiting = self.slots.iter().map(|slot| slot.waiting.lock().held.len()).sum();
        (waiting, self.quarantine.waiting.lock().held.len())
    }

    /// Puts into quarantine what hardware may still use, and what must not be released therefore.
    ///
    /// There is room for all that can wait at once and more. If hardware has not answered for
    /// longer than that, what has no place leaks.
    #[cold]
    pub(crate) fn keep(
        &self,
        gather: Gather<L>,
        held: impl Iterator<Item = T>,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) {
        let mut batch = self.quarantine.waiting.lock();
        flusher.merge(&mut batch.gather, gather);
        let held = held.inspect(|held| {
            log::warn!(
                "{} went into quarantine, with the memory that was mapped there, until a flush \
                 succeeds",
                flusher.range(held)
            );
        });
        self.fill(batch, held, |held| flusher.leak(held));
    }

    /// Takes something out that waits, where hardware does not answer any more.
    #[cold]
    pub(crate) fn pop(&mut self) -> Option<T> {
        let waiting = self.slots.iter_mut().find_map(|slot| slot.waiting.get_mut().held.pop());
        waiting.or_else(|| self.quarantine.waiting.get_mut().held.pop())
    }

    /// The same for what a panic tore out of a flush, or out of an operation whose memory somebody
    /// still has.
    #[cold]
    pub(crate) fn keep_torn<'q>(&'q self, torn: impl Iterator<Item = &'q Mutex<Flag, Vec<T>>>)
    where
        T: 'q,
    {
        let mut batch = self.quarantine.waiting.lock();
        batch.gather.merge_with(Gather::everything(), |_, _| ());
        log::warn!(
            "a panic interrupted a flush or an unmap: what it had is in quarantine until a flush \
             succeeds"
        );
        self.fill(batch, torn.flat_map(popped), drop);
    }

    fn fill(
        &self,
        mut batch: MutexGuard<'_, P::Lock, Batch<L, T>>,
        held: impl Iterator<Item = T>,
        leak: impl Fn(T),
    ) {
        for held in held {
            if batch.held.len() < batch.held.capacity() {
                batch.held.push(held);
            } else {
                leak(held);
            }
        }
        self.quarantined.store(true, Ordering::Relaxed);
    }

    /// Flushes one slot, unless another thread is at it: it comes again with the next unmap.
    #[cold]
    #[inline(never)]
    #[track_caller]
    fn flush_slot(
        &self,
        slot: &Apart<CpuQueue<Flag, L, T>>,
        mut batch: MutexGuard<'_, Flag, Batch<L, T>>,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<(), HardwareError> {
        let claim = self.claim(slice::from_ref(slot));
        let begun = slot.begin(&mut batch, claim.ticket, flusher);
        let Some(mut gather) = begun else { return Ok(()) };
        drop(batch);
        self.begin_quarantine(&claim, &mut gather, flusher);
        self.finish(claim, gather, flusher)
    }

    /// Tries again to sync what is in quarantine.
    #[cold]
    #[track_caller]
    fn flush_quarantine(
        &self,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<(), HardwareError> {
        let claim = self.claim(&[]);
        let mut gather = flusher.gather();
        self.begin_quarantine(&claim, &mut gather, flusher);
        self.finish(claim, gather, flusher)
    }

    /// Flushes the slots that `is_due` chooses, by one sync. It is not given those that are empty,
    /// and `None` for those that are taken and not waited for, and for those whose entries stay.
    #[track_caller]
    fn flush_where(
        &self,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
        others: Others,
        mut is_due: impl FnMut(Option<&Batch<L, T>>) -> bool,
    ) -> Result<(), HardwareError> {
        let claim = self.claim(&self.slots);
        let mut gather = flusher.gather();
        let mut result = Ok(());
        for slot in &self.slots {
            let batch = match others {
                Others::Wait => Some(slot.waiting.lock()),
                Others::Skip => slot.waiting.try_lock(),
            };
            let Some(mut batch) = batch else {
                is_due(None);
                continue;
            };
            if batch.held.is_empty() || !is_due(Some(&batch)) {
                continue;
            }
            match slot.begin(&mut batch, claim.ticket, flusher) {
                Some(more) => flusher.merge(&mut gather, more),
                None => {
                    result = result.and(sync_in_place(&mut batch, flusher));
                    // It waits to be released.
                    is_due(None);
                }
            }
        }
        self.begin_quarantine(&claim, &mut gather, flusher);
        let result = result.and(self.finish(claim, gather, flusher));
        if others == Others::Skip {
            return result;
        }
        self.slots.iter().for_each(|slot| wait_for(&slot.flush));
        match result {
            Ok(()) => self.sync_quarantine(flusher),
            Err(error) => Err(error),
        }
    }

    /// Syncs what other threads had to put into quarantine meanwhile, or waits until they have.
    #[track_caller]
    fn sync_quarantine(
        &self,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<(), HardwareError> {
        let quarantine = &self.quarantine;
        // Dropped after the lock, which it may need.
        let claim = self.claim(&[]);
        let mut batch = loop {
            wait_for(&quarantine.flush);
            let batch = quarantine.waiting.lock();
            // None begins but under the lock.
            if !is_syncing(quarantine.flush.load(Ordering::Acquire)) {
                break batch;
            }
        };
        if !self.quarantined.load(Ordering::Relaxed) {
            return Ok(());
        }
        match quarantine.begin(&mut batch, claim.ticket, flusher) {
            Some(gather) => {
                self.quarantined.store(false, Ordering::Relaxed);
                drop(batch);
                self.finish(claim, gather, flusher)
            }
            // What was there before is being released.
            None => sync_in_place(&mut batch, flusher),
        }
    }

    /// Takes what is in quarantine along, unless another thread is at it.
    fn begin_quarantine(
        &self,
        claim: &FlushClaim<'_, P, L, T>,
        gather: &mut Gather<L>,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) {
        if !self.quarantined.load(Ordering::Relaxed) {
            return;
        }
        let mut batch = self.quarantine.waiting.lock();
        if let Some(more) = self.quarantine.begin(&mut batch, claim.ticket, flusher) {
            self.quarantined.store(false, Ordering::Relaxed);
            drop(batch);
            flusher.merge(gather, more);
        }
    }

    /// Syncs what a flush has, and releases it or puts it into quarantine.
    #[track_caller]
    fn finish(
        &self,
        claim: FlushClaim<'_, P, L, T>,
        gather: Gather<L>,
        flusher: &impl Flusher<List = L, QueuedMapping = T>,
    ) -> Result<(), HardwareError> {
        // Nobody needs to wait for this flush any more, also where `release` calls back.
        let is_over = || {
            let ticket = claim.ticket | SYNCED;
            claim.flushed().for_each(|(flush, _)| flush.store(ticket, Ordering::Release));
        };
        match flusher.sync(gather) {
            Ok(()) => {
                is_over();
                for (_, held) in claim.flushed() {
                    let was_quarantined = ptr::eq(held, &self.quarantine.flushed);
                    // Nobody else comes for the lock before the claim is dropped, and nothing that
                    // `release` calls back does.
                    let mut held = held.lock();
                    if was_quarantined {
                        for held in &*held {
                            let range = flusher.range(held);
                            log::info!("{range} left quarantine: hardware has forgotten it");
                        }
                    }
                    // What a panic leaves in it waits for another sync.
                    flusher.release(iter::from_fn(|| held.pop()));
                }
                Ok(())
            }
            Err(SyncFailed { gather, error }) => {
                let all = claim.flushed().flat_map(|(_, held)| popped(held));
                self.keep(gather, all, flusher);
                is_over();
                Err(error)
            }
        }
    }

    /// A flush that is to have some of `slots`, and perhaps what is in quarantine.
    fn claim<'q>(&'q self, slots: &'q [Apart<CpuQueue<Flag, L, T>>]) -> FlushClaim<'q, P, L, T> {
        let ticket = self.tickets.fetch_add(2, Ordering::Relaxed).wrapping_add(2);
        FlushClaim { queue: self, slots, ticket }
    }
}

/// Syncs what waits in a slot whose second batch another thread has, and leaves the entries where
/// they are: that thread is about to be done, and whoever unmaps meanwhile finds the slot taken.
#[cold]
#[track_caller]
fn sync_in_place<L, T>(
    batch: &mut Batch<L, T>,
    flusher: &impl Flusher<List = L, QueuedMapping = T>,
) -> Result<(), HardwareError> {
    // That stays, where the hook panics: then nobody knows what was synced.
    let gather = mem::replace(&mut batch.gather, Gather::everything());
    let (gather, result) = match flusher.sync(gather) {
        Ok(()) => (flusher.gather(), Ok(())),
        Err(SyncFailed { gather, error }) => (gather, Err(error)),
    };
    batch.gather = gather;
    result
}

/// The entries of a batch that was being flushed, one after the other.
fn popped<T>(held: &Mutex<Flag, Vec<T>>) -> impl Iterator<Item = T> {
    iter::from_fn(move || held.lock().pop())
}

/// Waits until the flush that another thread is at has been synced: for that one, and as long as
/// hardware takes for a sync, or gives up on it. It spins, as drivers do that wait for hardware.
fn wait_for(flush: &AtomicU64) {
    let seen = flush.load(Ordering::Acquire);
    while is_syncing(seen) && flush.load(Ordering::Acquire) == seen {
        spin_loop();
    }
}
