//! A table says what is mapped in an address space of the kernel, and who owns it.
//!
//! A `MappingTable` alone maps in its table, so it knows what a copy takes.

#![expect(unsafe_code, reason = "copies what it knows to be mapped")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::{Errno, Iova, IovaRange, Label, Limits, Prot, UserRange};
use parking_lot::Mutex;

use super::kernel_mapping::{DmaTable, Kernel, KernelMapping, Refused, Requests, UnmapProof};
use crate::log;
use crate::mem::Memory;
use crate::vfio::{Error, SpaceMapping, SpaceSource, SpaceState};

/// Bytes of memory that are kept for ever because the kernel did not say that it unmapped them.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Returns how many bytes of memory this process keeps for ever since a kernel did not confirm that
/// it unmapped them: a device may still use them. 0 unless an unmap failed, or a space was dropped
/// that could not be unmapped.
pub fn leaked_bytes() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

/// The mappings of a table.
///
/// # Invariant
///
/// Where a slot is [`SlotMemory::Kept`], the table has what that keeps, or nothing: this alone maps
/// in the table, and never where a slot is. A slot stays while somebody else has a reference to
/// what it keeps.
///
/// # Context
///
/// Any number of threads map and unmap at once. The thread that put a slot in, or took its memory
/// out of it, owns its IOVAs; the lock is not held while the kernel works.
#[derive(Debug)]
pub(crate) struct MappingTable<K: Kernel> {
    table: DmaTable<K>,
    gaps: Gaps,
    state: Mutex<State>,
}

/// The owners of mappings that may be where no slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gaps {
    /// Nobody: one request unmaps slots and the gaps between them.
    Empty,
    /// Others, whose mappings stay: a request unmaps neighbours alone.
    OfOthers,
}

/// A part of what is mapped, and the memory of the process that it is of.
type MemoryPart = (IovaRange, Option<(Arc<Memory>, UserRange)>);

#[derive(Debug, Default)]
struct State {
    /// By the first IOVA. No two overlap.
    slots: BTreeMap<u64, IovaSlot>,
    /// Ranges that are being unmapped: the kernel takes away whatever it finds there.
    unmapping: Vec<IovaRange>,
}

#[derive(Debug)]
struct IovaSlot {
    range: IovaRange,
    wanted: WantedMapping,
    held: SlotMemory,
}

/// What is to be mapped, for whoever lists the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WantedMapping {
    pub(crate) prot: Prot,
    /// Where the process has it, if it has.
    pub(crate) user: Option<UserRange>,
    pub(crate) source: SpaceSource,
    pub(crate) label: Label,
}

/// What has a slot's memory.
#[derive(Debug)]
enum SlotMemory {
    /// A thread that maps or unmaps it.
    Working,
    /// The slot; and threads that copy from it, which let go under no lock.
    Kept(Arc<KernelMapping>),
    /// Nobody: the kernel did not unmap all of it.
    Lost,
}

impl SlotMemory {
    /// Takes the memory out, where nobody copies from it.
    fn take(&mut self) -> Option<KernelMapping> {
        match std::mem::replace(self, Self::Working) {
            Self::Kept(kept) => match Arc::try_unwrap(kept) {
                Ok(kept) => return Some(kept),
                Err(kept) => *self = Self::Kept(kept),
            },
            other => *self = other,
        }
        None
    }
}

impl State {
    /// The slot that overlaps with `range` and comes first.
    fn overlap(&self, range: IovaRange) -> Option<&IovaSlot> {
        let before = self.slots.range(..=range.start().get()).next_back();
        let before = before.map(|(_, slot)| slot).filter(|slot| slot.range.last() >= range.start());
        before.or_else(|| {
            let (_, slot) = self.slots.range(range.start().get()..=range.last().get()).next()?;
            Some(slot)
        })
    }

    /// The slots that overlap with `range`, in order.
    fn overlaps(&self, range: IovaRange) -> impl Iterator<Item = &IovaSlot> {
        let first = self.overlap(range).map_or(range.start(), |slot| slot.range.start());
        self.slots.range(first.get()..=range.last().get()).map(|(_, slot)| slot)
    }

    /// Where the slots in `range` begin and end; `None` where there are none.
    ///
    /// # Errors
    ///
    /// Where the range covers a part of one, or one is not there to be unmapped.
    fn hull(&self, range: IovaRange) -> Result<Option<IovaRange>, Error> {
        let mut hull: Option<IovaRange> = None;
        for slot in self.overlaps(range) {
            if !range.covers(slot.range) {
                return Err(Error::Bisects { range, mapped: slot.range });
            }
            match &slot.held {
                // Copies begin under the lock alone.
                SlotMemory::Kept(kept) if Arc::strong_count(kept) == 1 => {}
                SlotMemory::Kept(_) | SlotMemory::Working => {
                    return Err(Error::Busy { range: slot.range });
                }
                SlotMemory::Lost => return Err(Error::Lost { range: slot.range }),
            }
            let start = hull.map_or(slot.range.start(), IovaRange::start);
            hull = IovaRange::new(start, slot.range.last());
        }
        Ok(hull)
    }

    /// What is mapped in all of `range`, whole mappings in order.
    fn sources(&self, range: IovaRange) -> Result<Vec<Arc<KernelMapping>>, Error> {
        let mut sources = Vec::new();
        let mut next = Some(range.start());
        for slot in self.overlaps(range) {
            if next.is_none_or(|next| slot.range.start() > next) {
                break;
            }
            match &slot.held {
                SlotMemory::Kept(kept) => sources.push(Arc::clone(kept)),
                SlotMemory::Working => return Err(Error::Busy { range: slot.range }),
                SlotMemory::Lost => return Err(Error::Lost { range: slot.range }),
            }
            if slot.range.last() >= range.last() {
                return Ok(sources);
            }
            next = slot.range.last().checked_add(1);
        }
        Err(Error::NotMapped { range })
    }

    /// The ranges of slots that `joins` adds to the range before them, or that begin a new one.
    fn runs(
        &self,
        within: IovaRange,
        joins: impl Fn(IovaRange, &IovaSlot) -> bool,
    ) -> Vec<IovaRange> {
        let mut runs: Vec<IovaRange> = Vec::new();
        for slot in self.overlaps(within).filter(|slot| !matches!(slot.held, SlotMemory::Lost)) {
            let joined = runs.last().copied().filter(|&run| joins(run, slot));
            let joined = joined.and_then(|run| IovaRange::new(run.start(), slot.range.last()));
            match (joined, runs.last_mut()) {
                (Some(joined), Some(run)) => *run = joined,
                _ => runs.push(slot.range),
            }
        }
        runs
    }
}

impl<K: Kernel> MappingTable<K> {
    pub(crate) fn new(kernel: K, gaps: Gaps) -> Self {
        Self { table: DmaTable::new(kernel), gaps, state: Mutex::default() }
    }

    /// What the table is of.
    pub(crate) fn kernel(&self) -> &K {
        self.table.kernel()
    }

    /// The requests so far.
    pub(crate) fn requests(&self) -> Requests {
        self.table.requests()
    }

    /// How many mappings there are.
    pub(crate) fn mappings(&self) -> u64 {
        u64::try_from(self.state.lock().slots.len()).unwrap_or(u64::MAX)
    }

    /// Checks `user` of `memory` against what the kernel can map, and maps it.
    pub(crate) fn map_memory(
        &self,
        limits: &Limits,
        memory: &Arc<Memory>,
        user: UserRange,
        iova: Iova,
        prot: Prot,
        label: Label,
    ) -> Result<(), Error> {
        memory.offset_of(user)?;
        let len = user.len_less_one().saturating_add(1);
        let range = IovaRange::from_len(iova, len)?;
        let source = SpaceSource::Memory;
        let wanted = WantedMapping { prot, user: Some(user), source, label };
        self.map(limits, range, wanted, |table| table.map_memory(memory, user, range, prot))
    }

    /// Checks `range` against what the kernel can map, and maps there what `ask` asks for.
    pub(crate) fn map(
        &self,
        limits: &Limits,
        range: IovaRange,
        wanted: WantedMapping,
        ask: impl FnOnce(&DmaTable<K>) -> Result<KernelMapping, Refused>,
    ) -> Result<(), Error> {
        let WantedMapping { prot, user, .. } = wanted;
        if let Some(user) = user {
            check(limits, "the user address", user.start().get())?;
        }
        check(limits, "the iova", range.start().get())?;
        check(limits, "the length", range.len_less_one().wrapping_add(1))?;
        if !prot.permits_access() {
            return Err(Error::NoAccess { range });
        }
        // Mostly one aperture has all of it.
        if !limits.apertures.iter().any(|aperture| aperture.covers(range)) {
            let outside: Vec<IovaRange> = range.minus(&limits.apertures).collect();
            if !outside.is_empty() {
                let apertures = limits.apertures.clone();
                return Err(Error::OutsideApertures { range, outside, apertures });
            }
        }
        self.claim(limits, range, wanted)?;
        let asked = ask(&self.table);
        let mut state = self.state.lock();
        match asked {
            Ok(kept) => {
                if let Some(slot) = state.slots.get_mut(&range.start().get()) {
                    slot.held = SlotMemory::Kept(Arc::new(kept));
                }
                Ok(())
            }
            Err(Refused { request, errno }) => {
                state.slots.remove(&range.start().get());
                let mappings = u64::try_from(state.slots.len()).unwrap_or(u64::MAX);
                drop(state);
                let locked_by = self.kernel().locked_by();
                Err(Error::of_map(request, locked_by, range, user, mappings, errno))
            }
        }
    }

    /// Maps at `iova` what `from` has at `source`.
    pub(crate) fn copy(
        &self,
        limits: &Limits,
        from: &Self,
        source: IovaRange,
        iova: Iova,
        prot: Prot,
        label: Label,
    ) -> Result<(), Error> {
        let range = IovaRange::from_len(iova, source.checked_len().unwrap_or(u64::MAX))?;
        check(limits, "the source", source.start().get())?;
        // They are not unmapped while this has them.
        let sources = from.state.lock().sources(source)?;
        let wanted = WantedMapping { prot, user: None, source: SpaceSource::Copy, label };
        self.map(limits, range, wanted, |table| {
            // SAFETY:
            // 1. The slots of `sources` were `Kept` under the lock of `from`, and stay until this
            //    returns, as `sources` are references. So its table has there what they keep, or
            //    nothing (the invariant).
            unsafe { table.map_copy(&from.table, &sources, source, range, prot) }
        })
    }

    /// As [`copy`](Self::copy). Where the kernel refuses to copy a part of a mapping, as
    /// linux/iommufd.h permits it to, the memory behind it is mapped, all of it or nothing.
    pub(crate) fn copy_or_map(
        &self,
        limits: &Limits,
        from: &Self,
        source: IovaRange,
        iova: Iova,
        prot: Prot,
        label: Label,
    ) -> Result<(), Error> {
        let refused = match self.copy(limits, from, source, iova, prot, label) {
            Err(error @ Error::System { errno: Errno::EINVAL | Errno::ENOENT, .. }) => error,
            result => return result,
        };
        let mut mapped: Vec<IovaRange> = Vec::new();
        for (part, memory) in from.memory_in(source)? {
            let at = Iova::new(iova.get() + (part.start().get() - source.start().get()));
            // What is a file or a copy itself has no memory of the process.
            let result = memory
                .ok_or_else(|| refused.clone())
                .and_then(|(memory, user)| self.map_memory(limits, &memory, user, at, prot, label));
            if let Err(error) = result {
                self.unmap_each(mapped)?;
                return Err(error);
            }
            mapped.extend(IovaRange::from_len(at, part.checked_len().unwrap_or(u64::MAX)));
        }
        Ok(())
    }

    /// The mappings that have all of `range`, in order: which part of it, and the memory of the
    /// process that is mapped there, where it is such.
    fn memory_in(&self, range: IovaRange) -> Result<Vec<MemoryPart>, Error> {
        let state = self.state.lock();
        state.sources(range)?;
        let part = |slot: &IovaSlot| {
            let part = slot.range.intersection(range)?;
            let SlotMemory::Kept(kept) = &slot.held else { return None };
            let memory = kept.memory().zip(slot.wanted.user).and_then(|(memory, user)| {
                let skip = part.start().get().checked_sub(slot.range.start().get())?;
                let start = user.start().checked_add(skip)?;
                let user = UserRange::from_len(start, part.checked_len()?).ok()?;
                Some((memory, user))
            });
            Some((part, memory))
        };
        Ok(state.overlaps(range).filter_map(part).collect())
    }

    /// Takes the IOVAs of `range` for a mapping.
    fn claim(&self, limits: &Limits, range: IovaRange, wanted: WantedMapping) -> Result<(), Error> {
        let mut state = self.state.lock();
        // One search, where nothing overlaps: none does if the last to begin in time ends before.
        let last = state.slots.range(..=range.last().get()).next_back();
        if last.is_some_and(|(_, slot)| slot.range.last() >= range.start())
            && let Some(slot) = state.overlap(range)
        {
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
        state
            .slots
            .insert(range.start().get(), IovaSlot { range, wanted, held: SlotMemory::Working });
        Ok(())
    }

    /// Unmaps all mappings in `range`, and returns their bytes.
    ///
    /// # Errors
    ///
    /// [`Error::System`] names the mappings that stay: those before them in `range` are gone, as
    /// the kernel may have unmapped some before it failed. With the others nothing has changed, but
    /// for [`Error::Short`].
    pub(crate) fn unmap(&self, range: IovaRange) -> Result<u64, Error> {
        let mut state = self.state.lock();
        let Some(hull) = state.hull(range)? else { return Ok(0) };
        if self.gaps == Gaps::OfOthers {
            let runs = state.runs(hull, follows);
            if runs.len() > 1 {
                drop(state);
                return self.unmap_each(runs);
            }
        }
        let kept: Vec<(IovaRange, KernelMapping)> = state
            .slots
            .range_mut(hull.start().get()..=hull.last().get())
            .filter_map(|(_, slot)| Some((slot.range, slot.held.take()?)))
            .collect();
        state.unmapping.push(hull);
        drop(state);
        let result = self.unmap_kept(hull, kept);
        self.state.lock().unmapping.retain(|&other| other != hull);
        result
    }

    /// Unmaps what was taken out of the slots in `hull`.
    fn unmap_kept(
        &self,
        hull: IovaRange,
        kept: Vec<(IovaRange, KernelMapping)>,
    ) -> Result<u64, Error> {
        match self.table.unmap(hull) {
            Ok(proof) => self.settle(hull, kept, &proof),
            // One mapping is unmapped or not.
            Err(errno) if kept.len() == 1 => {
                self.put_back(kept);
                Err(Error::System { request: K::UNMAP, range: hull, errno })
            }
            Err(_) => self.unmap_singly(hull, kept),
        }
    }

    /// The same, one by one and up to the first that stays: the kernel failed to unmap all at once,
    /// perhaps behind some, and does not say which.
    #[cold]
    fn unmap_singly(
        &self,
        hull: IovaRange,
        kept: Vec<(IovaRange, KernelMapping)>,
    ) -> Result<u64, Error> {
        let (mut bytes, mut rest) = (0_u64, kept.into_iter());
        while let Some((range, kept)) = rest.next() {
            let settled = match self.table.unmap_one(&kept) {
                Ok(proof) => self.settle(range, vec![(range, kept)], &proof),
                Err(errno) => {
                    self.put_back([(range, kept)]);
                    let stays = IovaRange::new(range.start(), hull.last()).unwrap_or(range);
                    Err(Error::System { request: K::UNMAP, range: stays, errno })
                }
            };
            match settled {
                Ok(unmapped) => bytes = bytes.saturating_add(unmapped),
                Err(error) => {
                    self.put_back(rest);
                    return Err(error);
                }
            }
        }
        Ok(bytes)
    }

    /// Puts what is mapped still back into its slots.
    fn put_back(&self, kept: impl IntoIterator<Item = (IovaRange, KernelMapping)>) {
        let mut state = self.state.lock();
        for (range, kept) in kept {
            if let Some(slot) = state.slots.get_mut(&range.start().get()) {
                slot.held = SlotMemory::Kept(Arc::new(kept));
            }
        }
    }

    /// Gives back what was unmapped, all of what was mapped in `hull`.
    fn settle(
        &self,
        hull: IovaRange,
        kept: Vec<(IovaRange, KernelMapping)>,
        proof: &UnmapProof,
    ) -> Result<u64, Error> {
        let mapped = kept.iter().fold(0, |sum: u64, &(range, _)| sum.saturating_add(len(range)));
        if proof.bytes != mapped {
            lose(hull, mapped, "the kernel unmapped another number of bytes than were mapped");
            let mut state = self.state.lock();
            for (range, _leaked) in kept {
                if let Some(slot) = state.slots.get_mut(&range.start().get()) {
                    // Nobody maps there again.
                    slot.held = SlotMemory::Lost;
                }
            }
            return Err(Error::Short { range: hull, mapped, unmapped: proof.bytes });
        }
        let mut owners = Vec::with_capacity(kept.len());
        let mut state = self.state.lock();
        for (range, kept) in kept {
            state.slots.remove(&range.start().get());
            match kept.release(proof) {
                Ok(owner) => owners.push(owner),
                Err(_leaked) => lose(range, len(range), "it was not seen that it was unmapped"),
            }
        }
        drop(state);
        // Owners free their memory behind the lock.
        drop(owners);
        Ok(mapped)
    }

    /// Unmaps everything but what was lost before.
    pub(crate) fn unmap_all(&self) -> Result<u64, Error> {
        let Some(all) = everything() else { return Ok(0) };
        let runs = {
            let state = self.state.lock();
            let lost: Vec<IovaRange> = state
                .slots
                .values()
                .filter(|slot| matches!(slot.held, SlotMemory::Lost))
                .map(|slot| slot.range)
                .collect();
            // Nothing lost lies between two slots of a run.
            state.runs(all, |run, slot| {
                let from = lost.partition_point(|lost| lost.start() < run.start());
                lost.get(from).is_none_or(|lost| lost.start() > slot.range.start())
            })
        };
        self.unmap_each(runs)
    }

    /// Unmaps all mappings in ranges, one range after the other, up to the first that stays.
    fn unmap_each(&self, ranges: Vec<IovaRange>) -> Result<u64, Error> {
        ranges.into_iter().try_fold(0, |sum: u64, range| Ok(sum.saturating_add(self.unmap(range)?)))
    }

    /// What is in the first slot that overlaps `range`.
    pub(crate) fn listed_in(&self, range: IovaRange) -> Option<SpaceMapping> {
        let state = self.state.lock();
        let slot = state.overlap(range)?;
        let WantedMapping { prot, user, source, label } = slot.wanted;
        let state = match &slot.held {
            SlotMemory::Working => SpaceState::Busy,
            SlotMemory::Kept(_) => SpaceState::Mapped,
            SlotMemory::Lost => SpaceState::Lost,
        };
        Some(SpaceMapping { range: slot.range, user, prot, source, label, state })
    }

    /// The first slot in `range` that is of registers.
    pub(crate) fn bar_in(&self, range: IovaRange) -> Option<IovaRange> {
        let state = self.state.lock();
        let mut slots = state.overlaps(range);
        slots.find(|slot| slot.wanted.source == SpaceSource::Bar).map(|slot| slot.range)
    }

    /// The first slot that overlaps `range`, lost ones too: nobody else can map there.
    pub(crate) fn first_in(&self, range: IovaRange) -> Option<IovaRange> {
        self.state.lock().overlap(range).map(|slot| slot.range)
    }

    /// Where `range` is mapped without a hole, from each of such ranges to the next.
    pub(crate) fn mapped_in(&self, range: IovaRange) -> Vec<IovaRange> {
        let runs = self.state.lock().runs(range, follows);
        runs.into_iter().filter_map(|run| run.intersection(range)).collect()
    }

    /// Whether `range` covers no mapping in part.
    pub(crate) fn check_whole(&self, range: IovaRange) -> Result<(), Error> {
        let state = self.state.lock();
        match state.overlaps(range).find(|slot| !range.covers(slot.range)) {
            Some(slot) => Err(Error::Bisects { range, mapped: slot.range }),
            None => Ok(()),
        }
    }
}

impl<K: Kernel> Drop for MappingTable<K> {
    fn drop(&mut self) {
        if self.unmap_all().is_ok() {
            return;
        }
        // One mapping that stays does not keep the others.
        let slots = self.state.get_mut().slots.values();
        let ranges: Vec<IovaRange> = slots
            .filter(|slot| matches!(slot.held, SlotMemory::Kept(_)))
            .map(|slot| slot.range)
            .collect();
        for range in ranges {
            // What was unmapped short is counted already.
            if matches!(self.unmap(range), Err(error) if !matches!(error, Error::Short { .. })) {
                lose(range, len(range), "the kernel did not unmap it when its space was dropped");
            }
        }
    }
}

/// Whether a slot begins where a range ends.
fn follows(run: IovaRange, slot: &IovaSlot) -> bool {
    run.last().checked_add(1).is_some_and(|next| next == slot.range.start())
}

/// Counts memory that is never freed, since devices may use it.
#[cold]
fn lose(range: IovaRange, bytes: u64, why: &str) {
    LEAKED.fetch_add(bytes, Ordering::Relaxed);
    log::warn!("the memory that is mapped at {range} leaks, {bytes:#x} bytes, because {why}");
}

/// All addresses.
fn everything() -> Option<IovaRange> {
    IovaRange::new(Iova::new(0), Iova::new(u64::MAX))
}

/// How many bytes a range has; of 2^64 one less.
fn len(range: IovaRange) -> u64 {
    range.checked_len().unwrap_or(u64::MAX)
}

/// Whether `value` is a multiple of the granule.
pub(crate) fn check(limits: &Limits, what: &'static str, value: u64) -> Result<(), Error> {
    let granule = limits.granule();
    if granule == 0 || !value.is_multiple_of(granule) {
        return Err(Error::Misaligned { what, value, granule });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
