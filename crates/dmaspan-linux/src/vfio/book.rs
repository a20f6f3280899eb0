//! What is mapped in a table of the kernel, and who owns it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::{Errno, Iova, IovaRange, Limits, Prot, UserRange};
use parking_lot::Mutex;

use super::error::Error;
use crate::mem::Memory;
use crate::sys::kept::{DmaTable, Kept, Kernel, Requests};

/// Bytes of memory that are kept for ever because the kernel did not say that it unmapped them.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// How many bytes of memory this process keeps for ever since a kernel did not confirm that it
/// unmapped them: a device may still use them. 0 unless an unmap failed, or a space was dropped that
/// could not be unmapped.
pub fn leaked_bytes() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

/// The mappings of a table.
///
/// # Context
///
/// Any number of threads map and unmap at once. Who put a slot in, or took its memory out of it,
/// owns its IOVAs; the lock is not held while the kernel works.
#[derive(Debug)]
pub(super) struct Book<K: Kernel> {
    table: DmaTable<K>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By the first IOVA. No two overlap.
    slots: BTreeMap<u64, Slot>,
    /// Ranges that are being unmapped: the kernel takes away whatever it finds there.
    unmapping: Vec<IovaRange>,
}

#[derive(Debug)]
struct Slot {
    range: IovaRange,
    /// `None` while the kernel maps or unmaps it, and for ever where it did not say what it did.
    kept: Option<Kept>,
}

impl State {
    /// The slot that overlaps with `range` and comes first.
    fn overlap(&self, range: IovaRange) -> Option<&Slot> {
        let before = self.slots.range(..=range.start().get()).next_back();
        let before = before.map(|(_, slot)| slot).filter(|slot| slot.range.last() >= range.start());
        before.or_else(|| {
            let (_, slot) = self.slots.range(range.start().get()..=range.last().get()).next()?;
            Some(slot)
        })
    }

    /// Where the slots in `range` begin and end; `None` where there are none.
    ///
    /// # Errors
    ///
    /// Where the range covers a part of one, or one is not there to be unmapped.
    fn hull(&self, range: IovaRange) -> Result<Option<IovaRange>, Error> {
        let mut hull: Option<IovaRange> = None;
        let first = self.overlap(range).map_or(range.start(), |slot| slot.range.start());
        for slot in self.slots.range(first.get()..=range.last().get()).map(|(_, slot)| slot) {
            if !range.covers(slot.range) {
                return Err(Error::Bisects { range, mapped: slot.range });
            }
            if slot.kept.is_none() {
                return Err(Error::Busy { range: slot.range });
            }
            let start = hull.map_or(slot.range.start(), IovaRange::start);
            hull = IovaRange::new(start, slot.range.last());
        }
        Ok(hull)
    }
}

impl<K: Kernel> Book<K> {
    pub(super) fn new(kernel: K) -> Self {
        Self { table: DmaTable::new(kernel), state: Mutex::default() }
    }

    /// What the table is of.
    pub(super) fn kernel(&self) -> &K {
        self.table.kernel()
    }

    /// The requests so far.
    pub(super) fn requests(&self) -> Requests {
        self.table.requests()
    }

    /// How many mappings there are.
    pub(super) fn mappings(&self) -> u64 {
        u64::try_from(self.state.lock().slots.len()).unwrap_or(u64::MAX)
    }

    /// Checks `user` of `memory` against what the kernel can map, and maps it.
    pub(super) fn map_memory(
        &self,
        limits: &Limits,
        memory: &Arc<Memory>,
        user: UserRange,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Error> {
        memory.offset_of(user)?;
        let len = user.len_less_one().saturating_add(1);
        let range = IovaRange::from_len(iova, len)?;
        self.map(limits, range, prot, Some(user), |table| {
            table.map_memory(memory, user, range, prot)
        })
    }

    /// Checks `range` against what the kernel can map, and maps there what `ask` asks for.
    pub(super) fn map(
        &self,
        limits: &Limits,
        range: IovaRange,
        prot: Prot,
        user: Option<UserRange>,
        ask: impl FnOnce(&DmaTable<K>) -> Result<Kept, Errno>,
    ) -> Result<(), Error> {
        if let Some(user) = user {
            check(limits, "the user address", user.start().get())?;
        }
        check(limits, "the iova", range.start().get())?;
        check(limits, "the length", range.len_less_one().wrapping_add(1))?;
        if !prot.permits_access() {
            return Err(Error::NoAccess { range });
        }
        if !limits.apertures.iter().any(|aperture| aperture.covers(range)) {
            let apertures = limits.apertures.clone();
            return Err(Error::OutsideApertures { range, apertures });
        }
        self.claim(limits, range)?;
        let asked = ask(&self.table);
        let mut state = self.state.lock();
        match asked {
            Ok(kept) => {
                if let Some(slot) = state.slots.get_mut(&range.start().get()) {
                    slot.kept = Some(kept);
                }
                Ok(())
            }
            Err(errno) => {
                state.slots.remove(&range.start().get());
                let mappings = u64::try_from(state.slots.len()).unwrap_or(u64::MAX);
                drop(state);
                Err(Error::of_map(K::MAP, range, user, mappings, errno))
            }
        }
    }

    /// Takes the IOVAs of `range` for a mapping.
    fn claim(&self, limits: &Limits, range: IovaRange) -> Result<(), Error> {
        let mut state = self.state.lock();
        if let Some(slot) = state.overlap(range) {
            return Err(Error::Overlap { range, mapped: slot.range });
        }
        if let Some(&busy) =
            state.unmapping.iter().find(|other| other.intersection(range).is_some())
        {
            return Err(Error::Busy { range: busy });
        }
        let mappings = u64::try_from(state.slots.len()).unwrap_or(u64::MAX);
        if limits.mappings_left.is_some_and(|most| mappings >= most) {
            return Err(Error::NoMappingsLeft { mappings });
        }
        state.slots.insert(range.start().get(), Slot { range, kept: None });
        Ok(())
    }

    /// Unmaps all mappings in `range`, and returns their bytes. All or nothing.
    pub(super) fn unmap(&self, range: IovaRange) -> Result<u64, Error> {
        let mut state = self.state.lock();
        let Some(hull) = state.hull(range)? else { return Ok(0) };
        let kept: Vec<(IovaRange, Kept)> = state
            .slots
            .range_mut(hull.start().get()..=hull.last().get())
            .filter_map(|(_, slot)| Some((slot.range, slot.kept.take()?)))
            .collect();
        state.unmapping.push(hull);
        drop(state);
        let result = self.unmap_kept(hull, kept);
        self.state.lock().unmapping.retain(|&other| other != hull);
        result
    }

    /// Unmaps what was taken out of the slots in `hull`.
    fn unmap_kept(&self, hull: IovaRange, kept: Vec<(IovaRange, Kept)>) -> Result<u64, Error> {
        if hull.checked_len().is_none() {
            // No request names 2^64 bytes: one for each mapping, of which there are two or more.
            return kept.into_iter().try_fold(0, |sum, (range, kept)| {
                Ok(sum + self.unmap_kept(range, vec![(range, kept)])?)
            });
        }
        let proof = match self.table.unmap(hull) {
            Ok(proof) => proof,
            Err(errno) => {
                let mut state = self.state.lock();
                for (range, kept) in kept {
                    if let Some(slot) = state.slots.get_mut(&range.start().get()) {
                        slot.kept = Some(kept);
                    }
                }
                return Err(Error::System { request: K::UNMAP, range: hull, errno });
            }
        };
        let mapped = kept.iter().fold(0, |sum: u64, (range, _)| {
            sum.saturating_add(range.checked_len().unwrap_or(u64::MAX))
        });
        if proof.bytes != mapped {
            // What is dropped here is leaked, and its slots stay: nobody maps there again.
            LEAKED.fetch_add(mapped, Ordering::Relaxed);
            return Err(Error::Short { range: hull, mapped, unmapped: proof.bytes });
        }
        let mut owners = Vec::with_capacity(kept.len());
        let mut state = self.state.lock();
        for (range, kept) in kept {
            state.slots.remove(&range.start().get());
            owners.push(kept.release(&proof));
        }
        drop(state);
        // Owners free their memory behind the lock.
        drop(owners);
        Ok(mapped)
    }

    /// Unmaps everything.
    pub(super) fn unmap_all(&self) -> Result<u64, Error> {
        match IovaRange::new(Iova::new(0), Iova::new(u64::MAX)) {
            Some(all) => self.unmap(all),
            None => Ok(0),
        }
    }
}

impl<K: Kernel> Drop for Book<K> {
    fn drop(&mut self) {
        if self.unmap_all().is_ok() {
            return;
        }
        let state = self.state.get_mut();
        let left = state.slots.values().filter(|slot| slot.kept.is_some());
        let bytes = left.filter_map(|slot| slot.range.checked_len()).sum();
        LEAKED.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Whether `value` is a multiple of the granule.
fn check(limits: &Limits, what: &'static str, value: u64) -> Result<(), Error> {
    let granule = limits.granule();
    if granule == 0 || !value.is_multiple_of(granule) {
        return Err(Error::Misaligned { what, value, granule });
    }
    Ok(())
}
