//! The container tracks what was written: by devices, as hardware marks it or as must be assumed,
//! and by others.
//!
//! Each mapping has a log while writes are tracked. Hardware's marks go there before they are
//! cleared, and what is reported leaves the log only when it was delivered and hardware was seen to
//! forget the marks: no failure loses a bit.
//!
//! A read works without the container's lock, and mappings are unmapped meanwhile. Both meet in the
//! locks of the walks: a read takes the tables a part at a time, and an operation that is to change
//! a table first says so in the log.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use lock_api::RawMutex;

use super::domains::Domains;
use super::error::Error;
use super::log::{Log, each_run};
use super::mapping::{Mapping, MappingSlot, SlotState, overlapping};
use super::{Container, State, Version, WALKS};
use crate::addr::Iova;
use crate::io_pgtable::DirtyBitmap;
use crate::lg2;
use crate::pin::Pinner;
use crate::range::IovaRange;

/// How many bytes a bitmap may have: `DIRTY_BITMAP_SIZE_MAX` of
/// drivers/vfio/vfio_iommu_type1.c.
const MAX_BITMAP: u64 = 1 << 28;

/// How many pages of tables are read before an unmap of them can go on.
const PART_PAGES: u64 = 1 << 15;

/// How many bytes a sink is given at once.
const PIECE: usize = 512;

/// Says whether what is reported is still dirty afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum DirtyRead {
    /// It is not, until it is written again.
    #[default]
    Clear,
    /// It is: the next read reports it too (`IOMMU_HWPT_GET_DIRTY_BITMAP_NO_CLEAR`).
    Keep,
}

/// A [`DirtySink`] did not take what it was given; it knows why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undelivered;

/// Takes a bitmap to where it is wanted, byte by byte: memory of a client, at any address.
pub trait DirtySink {
    /// Returns how many bytes it has room for. A bitmap takes 8 bytes for each 64 pages or fewer.
    fn room(&self) -> u64;

    /// Takes `bytes` of the bitmap, from its byte `offset` on. Bit `n % 8` of byte `n / 8` is that
    /// of page `n`.
    ///
    /// # Context
    ///
    /// No lock of the container is held.
    ///
    /// # Errors
    ///
    /// [`Undelivered`] where they were not taken. Nothing more is given, and the read ends with
    /// [`Error::Undelivered`].
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Undelivered>;
}

impl DirtySink for [u8] {
    fn room(&self) -> u64 {
        u64::try_from(self.len()).unwrap_or(u64::MAX)
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Undelivered> {
        let offset = usize::try_from(offset).map_err(|_| Undelivered)?;
        let end = offset.checked_add(bytes.len()).ok_or(Undelivered)?;
        self.get_mut(offset..end).ok_or(Undelivered)?.copy_from_slice(bytes);
        Ok(())
    }
}

impl<P: Pinner> Mapping<P> {
    /// Notes that somebody other than a device behind a domain wrote there, or may have: behind the
    /// write and before anybody is told of it, as a read in between would take a mark that was
    /// there before. Nothing where nothing is tracked.
    pub(super) fn mark_dirty(&self, range: IovaRange) {
        if let Some(log) = &self.log {
            log.mark(range);
        }
    }

    /// Whether marks of it are being read from tables: then those stay as they are.
    pub(super) fn is_being_read(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.reader.load(Ordering::Acquire) != 0)
    }

    /// Sets the bits of what was written of a mapping that has just been taken down, but those of
    /// hardware's marks.
    pub(super) fn mark_gone(&self, domains: &Domains, marks: &mut DirtyBitmap<'_>) {
        let assumed = self.pinned.is_some() && !domains.track_dirty();
        if assumed || self.unforgotten().is_some() {
            marks.mark(self.range);
        }
        if let Some(log) = &self.log {
            log.each_written(|written| marks.mark(written));
        }
    }
}

impl<P: Pinner> State<P> {
    /// Notes that what others have pinned of a mapping may be written at any time.
    fn mark_pinned(&self, mapped: IovaRange) {
        let slot = self.tree.get(mapped.start());
        if let Some(mapping) = slot.and_then(|slot| slot.mapped()) {
            self.external_in(mapped).for_each(|pinned| mapping.mark_dirty(pinned));
        }
    }

    /// Sets the bits of what hardware may still write.
    pub(super) fn mark_quarantined(&self, range: IovaRange, marks: &mut DirtyBitmap<'_>) {
        let quarantined = |slot: &MappingSlot<P>| matches!(slot.state, SlotState::Quarantined(_));
        let slots = overlapping(&self.tree, range).filter(|(_, slot)| quarantined(slot));
        slots.for_each(|(mapped, _)| marks.mark(mapped));
    }

    /// Notes that all that is mapped may have been written, for a domain that goes: what devices
    /// wrote through it cannot be asked any more (`vfio_iommu_populate_bitmap_full`).
    pub(super) fn mark_all_dirty(&self) {
        for mapping in self.tree.values().filter_map(|slot| slot.mapped()) {
            mapping.mark_dirty(mapping.range);
        }
    }
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Begins to track what is written in all mappings, those included that are made later. What
    /// was written before is not reported. Does nothing where it is tracked already.
    ///
    /// As in type1 (`vfio_dma_bitmap_alloc_all`), each mapping gets a bit for each of the smallest
    /// pages; but the memory for these comes with the pages that are written, a chunk of them at a
    /// time, and is charged to the mapping's owner. Where there is none, or the owner may not have
    /// it, all of the mapping counts as written. Where hardware marks what devices write, in all
    /// domains, the marks are taken away.
    ///
    /// # Errors
    ///
    /// [`Error::NeedsV2`], [`Error::Changing`], and [`Error::TooLargeToTrack`] for the first
    /// mapping that has too many pages. Nothing is tracked then.
    pub fn start_dirty(&self) -> Result<(), Error<P::Error>> {
        self.check_version()?;
        let (domains, page) = self.waiting_alone(|| self.begin_alone())?;
        let mut result = Ok(());
        if self.tracking.load(Ordering::Relaxed) == 0 {
            result = self.open_logs(page);
            if result.is_ok() {
                self.drop_marks(&domains);
                self.tracking.store(page, Ordering::Relaxed);
            } else {
                self.close_logs();
            }
        }
        self.end_alone(domains);
        result
    }

    /// Ends the tracking and frees its memory. Does nothing where nothing is tracked.
    ///
    /// # Errors
    ///
    /// [`Error::NeedsV2`] and [`Error::Changing`], with nothing changed.
    pub fn stop_dirty(&self) -> Result<(), Error<P::Error>> {
        self.check_version()?;
        let (domains, _) = self.waiting_alone(|| self.begin_alone())?;
        self.tracking.store(0, Ordering::Relaxed);
        self.close_logs();
        self.end_alone(domains);
        Ok(())
    }

    /// Returns whether it is tracked what is written.
    pub fn tracks_dirty(&self) -> bool {
        self.tracking.load(Ordering::Relaxed) != 0
    }

    /// Reports what was written in `range` since it was mapped, tracked or last read: bit `n % 64`
    /// of word `n / 64` is that of page `n`. All bits of the range are written, and those of
    /// addresses that are not mapped are clear. Mappings may not be cut, gaps may.
    ///
    /// Where hardware marks what devices write, in all domains, what is marked is reported: whole
    /// leaves. Otherwise all is reported that is mapped in a domain, always. In either case so is
    /// what was written by others: through the container, and what they pinned. What is out of use,
    /// since hardware may still use it, is dirty.
    ///
    /// One sync a domain, behind all walks of tables, and none with [`DirtyRead::Keep`]. A mapping
    /// that is unmapped meanwhile may or may not be reported.
    ///
    /// # Context
    ///
    /// The container's lock is not held while tables are read: others map, unmap, and read what is
    /// written elsewhere.
    ///
    /// # Errors
    ///
    /// With nothing read: [`Error::NeedsV2`], [`Error::NotTracking`], [`Error::BitSize`] where
    /// `page_size` is not the smallest page, [`Error::BitmapSize`] for too few words or more than
    /// 2^31 bits, [`Error::MisalignedUnmap`], [`Error::Bisects`], [`Error::Changing`], and
    /// [`Error::Busy`] for what is under construction, on its way out, or read by others.
    ///
    /// [`Error::MarksUnsynced`] where hardware did not confirm a sync; the bits are reported, and
    /// kept.
    pub fn dirty_bitmap(
        &self,
        range: IovaRange,
        page_size: u64,
        words: &mut [u64],
        how: DirtyRead,
    ) -> Result<(), Error<P::Error>> {
        let reading = self.begin_read(range, page_size, bytes_of(words))?;
        self.read_marks(reading, words, how, |_| Ok(()))
    }

    /// [`dirty_bitmap`](Self::dirty_bitmap) to memory that is not this process's, or at any
    /// address.
    ///
    /// ```
    /// use std::error::Error;
    ///
    /// use dmaspan::container::DirtyRead;
    /// use dmaspan::{Account, Container, HostAddr, Iova, IovaRange};
    /// use dmaspan_linux::LinuxPinner;
    ///
    /// fn main() -> Result<(), Box<dyn Error>> {
    ///     let container: Container<_, parking_lot::RawMutex> =
    ///         Container::new(LinuxPinner::<HostAddr>::new()?, Account::new(1 << 20));
    ///     container.start_dirty()?;
    ///     let range = IovaRange::from_len(Iova::new(0), 1 << 20)?;
    ///     let mut bytes = [0xff; 35];
    ///     container.dirty_bitmap_to(range, 4096, &mut bytes[3..], DirtyRead::Clear)?;
    ///     assert_eq!(bytes[3..], [0; 32], "nothing is mapped");
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// As there; [`Error::NoBitmap`] where there is no memory for the bits on their way, and
    /// [`Error::Undelivered`] where the sink did not take them: they are kept.
    pub fn dirty_bitmap_to(
        &self,
        range: IovaRange,
        page_size: u64,
        sink: &mut (impl DirtySink + ?Sized),
        how: DirtyRead,
    ) -> Result<(), Error<P::Error>> {
        let reading = self.begin_read(range, page_size, sink.room())?;
        let mut words = Vec::new();
        let count = word_count(range, page_size);
        if words.try_reserve_exact(count).is_err() {
            self.end_read(reading, |_| ());
            return Err(Error::NoBitmap { range });
        }
        words.resize(count, 0);
        self.read_marks(reading, &mut words, how, |words| deliver(words, sink))
    }

    /// [`unmap`](Self::unmap) that reports what was written in what it unmaps, in the words that
    /// [`dirty_bitmap`](Self::dirty_bitmap) takes. Hardware's marks are exact up to the moment in
    /// which the translations were gone.
    ///
    /// # Errors
    ///
    /// As for [`unmap`](Self::unmap), with [`Error::NotTracking`], [`Error::BitSize`] and
    /// [`Error::BitmapSize`]. With [`Error::NotForgotten`] the bits are reported: all of those of
    /// mappings that hardware may still use.
    #[track_caller]
    pub fn unmap_dirty(
        &self,
        range: IovaRange,
        page_size: u64,
        words: &mut [u64],
    ) -> Result<u64, Error<P::Error>> {
        let bytes = bytes_of(words);
        let doomed = self.announcing(range, || {
            let mut all = self.state.lock();
            self.check_bitmap(&all, range, page_size, bytes)?;
            self.doom_range(&mut all, range)
        })?;
        let words = words_of(words, range, page_size);
        words.fill(0);
        let Some(doomed) = doomed else { return Ok(0) };
        match DirtyBitmap::new(words, range, page_size) {
            Ok(mut marks) => self.unmap_doomed(doomed, range, Some(&mut marks)),
            // Its size was checked.
            Err(_) => self.unmap_doomed(doomed, range, None),
        }
    }

    /// Sees to it that nobody reads marks of a mapping from tables any more, which is the caller's
    /// and cannot be claimed by a read any more.
    pub(super) fn stop_reading(&self, mapping: &Mapping<P>) {
        if let Some(log) = mapping.log.as_ref().filter(|_| mapping.is_being_read()) {
            let _not_walking = self.walk_of(mapping.range).lock();
            log.stopped.store(true, Ordering::Relaxed);
        }
    }

    /// Gives a mapping that is made a log, if that is tracked. The caller is at work: nobody starts
    /// or stops the tracking.
    pub(super) fn begin_log(&self, mapping: &mut Mapping<P>) -> Result<(), Error<P::Error>> {
        let page = self.tracking.load(Ordering::Relaxed);
        if page != 0 {
            let log = Log::new(mapping.range, page, &mapping.account)?;
            mapping.log = Some(Arc::new(log));
        }
        Ok(())
    }

    fn check_version(&self) -> Result<(), Error<P::Error>> {
        if self.version == Version::V2 { Ok(()) } else { Err(Error::NeedsV2) }
    }

    /// Keeps everybody else from working. Returns the smallest page too.
    fn begin_alone(&self) -> Result<(Arc<Domains>, u64), Error<P::Error>> {
        let mut all = self.state.lock();
        all.check_idle()?;
        all.exclusive = true;
        Ok((Arc::clone(&all.domains), self.granule(&all.domains)))
    }

    fn end_alone(&self, domains: Arc<Domains>) {
        drop(domains);
        self.end_exclusive(None);
    }

    /// The first mapping from `from` on, as `get` sees it; also one in quarantine.
    pub(super) fn next_mapping<T>(
        &self,
        from: Option<Iova>,
        get: impl FnOnce(&mut Mapping<P>) -> T,
    ) -> Option<(IovaRange, T)> {
        let mut all = self.state.lock();
        let mut get = Some(get);
        all.tree.visit_mut(from?, IovaRange::ALL.last(), |slot| {
            let mapping = slot.idle_mut()?;
            get.take().map(|get| (mapping.range, get(mapping)))
        })
    }

    /// Gives all mappings logs. The lock is not held while those are allocated.
    fn open_logs(&self, page: u64) -> Result<(), Error<P::Error>> {
        let mut from = Some(Iova::new(0));
        let owner = |mapping: &mut Mapping<P>| Arc::clone(&mapping.account);
        while let Some((range, account)) = self.next_mapping(from, owner) {
            let log = Arc::new(Log::new(range, page, &account)?);
            self.next_mapping(Some(range.start()), |mapping| mapping.log = Some(log));
            self.state.lock().mark_pinned(range);
            from = range.last().checked_add(1);
        }
        Ok(())
    }

    /// Takes all logs away. The lock is not held while they are freed.
    fn close_logs(&self) {
        let mut from = Some(Iova::new(0));
        while let Some((range, log)) = self.next_mapping(from, |mapping| mapping.log.take()) {
            drop(log);
            from = range.last().checked_add(1);
        }
    }

    /// Takes the marks of all that was written before away, nobody else being at work.
    fn drop_marks(&self, domains: &Domains) {
        if domains.is_empty() || !domains.track_dirty() {
            return;
        }
        let mut cleared = Cleared::new();
        let mut from = Some(Iova::new(0));
        while let Some((range, ())) = self.next_mapping(from, |_| ()) {
            domains.read_dirty(range, DirtyRead::Clear, &mut cleared, &mut |_| ());
            // All of it: nobody knows any more what an earlier log had to tell hardware again.
            cleared.add(range, u64::MAX);
            from = range.last().checked_add(1);
        }
        if domains.forget_marks(&cleared).is_err() {
            // The next read says more than was written, and tells hardware again.
            self.each_log(|log, range| {
                log.mark(range);
                log.unsynced.store(true, Ordering::Relaxed);
            });
        }
    }

    fn each_log(&self, mut each: impl FnMut(&Log, IovaRange)) {
        let mut from = Some(Iova::new(0));
        while let Some((range, log)) = self.next_mapping(from, |mapping| mapping.log.clone()) {
            if let Some(log) = log {
                each(&log, range);
            }
            from = range.last().checked_add(1);
        }
    }

    /// Whether a bitmap of `bytes` may be asked for.
    fn check_bitmap(
        &self,
        all: &State<P>,
        range: IovaRange,
        page_size: u64,
        bytes: u64,
    ) -> Result<(), Error<P::Error>> {
        let granule = self.granule(&all.domains);
        if page_size != granule {
            return Err(Error::BitSize { range, page_size, granule });
        }
        let least = bitmap_bytes(range, page_size);
        if !(least..=MAX_BITMAP).contains(&bytes) {
            return Err(Error::BitmapSize { range, bytes, least, most: MAX_BITMAP });
        }
        if (range.start().get() | range.last().get().wrapping_add(1)) & granule.wrapping_sub(1) != 0
        {
            return Err(Error::MisalignedUnmap { range, granule });
        }
        if self.tracks_dirty() { Ok(()) } else { Err(Error::NotTracking { range }) }
    }

    /// Claims the logs of all mappings in `range` for a read.
    fn begin_read(
        &self,
        range: IovaRange,
        page_size: u64,
        bytes: u64,
    ) -> Result<Reading, Error<P::Error>> {
        self.check_version()?;
        self.waiting(|| {
            let mut all = self.state.lock();
            self.check_bitmap(&all, range, page_size, bytes)?;
            for (mapped, slot) in overlapping(&all.tree, range) {
                match &slot.state {
                    SlotState::Quarantined(_) => {}
                    _ if !range.covers(mapped) => {
                        return Err(Error::Bisects { range, mapping: mapped });
                    }
                    SlotState::Mapped(mapping) if !mapping.is_being_read() => {}
                    _ => return Err(Error::Busy { range, busy: mapped }),
                }
            }
            let domains = self.begin(&mut all)?;
            all.reads += 1;
            let number = all.reads;
            for (_, slot) in overlapping(&all.tree, range) {
                if let Some(log) = slot.mapped().and_then(|mapping| mapping.log.as_ref()) {
                    log.reader.store(number, Ordering::Release);
                }
            }
            let assumed = !domains.is_empty() && !domains.track_dirty();
            Ok(Reading { number, range, page_size, domains, assumed })
        })
    }

    /// Ends a read; `each` sees every log first.
    fn end_read(&self, reading: Reading, mut each: impl FnMut(&Log)) {
        let mut from = Some(reading.range.start());
        while let Some((range, found)) = self.next_read(&reading, from) {
            if let Found::Mapping(log, _) = found {
                each(&log);
                let all = self.state.lock();
                // The owner of the pin may go on writing.
                all.mark_pinned(range);
                log.reader.store(0, Ordering::Release);
            }
            from = range.last().checked_add(1);
        }
        // A caller that waits for it to change domains finds nobody else who has them.
        drop(reading);
        self.state.lock().working -= 1;
        self.wake();
    }

    /// What a read has to look at next, from `from` on.
    fn next_read(&self, reading: &Reading, from: Option<Iova>) -> Option<(IovaRange, Found)> {
        let rest = IovaRange::new(from?, reading.range.last())?;
        let all = self.state.lock();
        overlapping(&all.tree, rest).find_map(|(range, slot)| match &slot.state {
            SlotState::Quarantined(_) => Some((range, Found::Quarantined)),
            SlotState::Mapped(mapping) => {
                let log = mapping.log.as_ref()?;
                let claimed = log.reader.load(Ordering::Relaxed) == reading.number;
                let found = Found::Mapping(Arc::clone(log), mapping.pinned.is_some());
                claimed.then_some((range, found))
            }
            SlotState::Busy | SlotState::Emptied | SlotState::Doomed(..) => None,
        })
    }

    /// Reads what was claimed, delivers it and, where that is well, forgets what was delivered.
    fn read_marks(
        &self,
        reading: Reading,
        words: &mut [u64],
        how: DirtyRead,
        deliver: impl FnOnce(&[u64]) -> Result<(), Undelivered>,
    ) -> Result<(), Error<P::Error>> {
        let (range, page_size) = (reading.range, reading.page_size);
        let words = words_of(words, range, page_size);
        words.fill(0);
        let mut cleared = Cleared::new();
        // The size was checked.
        if let Ok(mut bitmap) = DirtyBitmap::new(words, range, page_size) {
            self.collect(&reading, how, &mut bitmap, &mut cleared);
        }
        let synced = reading.domains.forget_marks(&cleared);
        let result = match (deliver(words), synced) {
            (Err(Undelivered), _) => Err(Error::Undelivered { range }),
            (_, Err(source)) => Err(Error::MarksUnsynced { range, source }),
            (Ok(()), Ok(())) => Ok(()),
        };
        self.end_read(reading, |log| {
            if synced.is_err() {
                log.unsynced.store(true, Ordering::Relaxed);
            } else if result.is_ok() && how == DirtyRead::Clear {
                each_run(words.iter().copied(), |first, last| {
                    if let Some(reported) = pages(range, page_size, first, last) {
                        log.clear(reported);
                    }
                });
            }
        });
        result
    }

    /// Puts what was written into `bitmap`, and hardware's marks into the logs.
    fn collect(
        &self,
        reading: &Reading,
        how: DirtyRead,
        bitmap: &mut DirtyBitmap<'_>,
        cleared: &mut Cleared,
    ) {
        let mut from = Some(reading.range.start());
        while let Some((range, found)) = self.next_read(reading, from) {
            match found {
                Found::Quarantined => bitmap.mark(range),
                Found::Mapping(_, true) if reading.assumed => bitmap.mark(range),
                Found::Mapping(log, in_domains) => {
                    if in_domains {
                        self.read_tables(reading, &log, range, how, cleared);
                    }
                    log.each_written(|written| bitmap.mark(written));
                }
            }
            from = range.last().checked_add(1);
        }
    }

    /// Puts the marks of a mapping into its log, a part of its tables at a time.
    fn read_tables(
        &self,
        reading: &Reading,
        log: &Log,
        mapping: IovaRange,
        how: DirtyRead,
        cleared: &mut Cleared,
    ) {
        if how == DirtyRead::Clear && log.unsynced.swap(false, Ordering::Relaxed) {
            cleared.add(mapping, u64::MAX);
        }
        let part_mask = reading.page_size.saturating_mul(PART_PAGES).saturating_sub(1);
        let mut rest = Some(mapping);
        while let Some(left) = rest {
            let last = left.start().get().saturating_add(part_mask).min(left.last().get());
            let part = IovaRange::new(left.start(), Iova::new(last)).unwrap_or(left);
            let _walking = self.walk_of(mapping).lock();
            if log.stopped.load(Ordering::Relaxed) {
                return;
            }
            // Leaves that follow each other are marked at once.
            let mut open: Option<IovaRange> = None;
            reading.domains.read_dirty(part, how, cleared, &mut |leaf| {
                let joined = open.and_then(|open| open.join(leaf));
                if joined.is_none() {
                    open.into_iter().for_each(|open| log.mark(open));
                }
                open = joined.or(Some(leaf));
            });
            open.into_iter().for_each(|open| log.mark(open));
            rest = part.last().checked_add(1).and_then(|at| IovaRange::new(at, left.last()));
        }
    }

    /// The lock of the walks of a mapping's tables.
    fn walk_of(&self, mapping: IovaRange) -> &lock_api::Mutex<L, ()> {
        // Mappings of like alignment go to different places.
        let mixed = mapping.start().get().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let n = mixed >> (64 - lg2::floor(WALKS as u64));
        &self.walks[usize::try_from(n).unwrap_or(0)]
    }
}

/// A read at work.
struct Reading {
    /// What tells it from others.
    number: u64,
    range: IovaRange,
    page_size: u64,
    domains: Arc<Domains>,
    /// Whether all that is mapped in domains is dirty, as nothing tells what devices wrote.
    assumed: bool,
}

/// What a read finds.
enum Found {
    /// A mapping that it has claimed, and whether it is mapped in domains.
    Mapping(Arc<Log>, bool),
    /// Devices may write there.
    Quarantined,
}

/// Where marks were taken away that hardware may have cached. It allocates nothing.
pub(super) struct Cleared {
    ranges: [IovaRange; 16],
    len: usize,
    leaf_sizes: u64,
}

impl Cleared {
    fn new() -> Self {
        Self { ranges: [IovaRange::point(Iova::new(0)); 16], len: 0, leaf_sizes: 0 }
    }

    pub(super) fn ranges(&self) -> &[IovaRange] {
        &self.ranges[..self.len]
    }

    pub(super) fn leaf_sizes(&self) -> u64 {
        self.leaf_sizes
    }

    /// Adds a range. What has no place widens the last one, which says too much and no less.
    pub(super) fn add(&mut self, range: IovaRange, leaf_sizes: u64) {
        self.leaf_sizes |= leaf_sizes;
        let full = self.len == self.ranges.len();
        if let Some(last) = self.ranges[..self.len].last_mut() {
            let near = last.last().checked_add(1).is_none_or(|behind| range.start() <= behind);
            if full || (near && range.start() >= last.start()) {
                let start = last.start().min(range.start());
                *last = IovaRange::new(start, last.last().max(range.last())).unwrap_or(range);
                return;
            }
        }
        self.ranges[self.len] = range;
        self.len += 1;
    }
}

/// The bytes of a bitmap, in whole words of 64 bits, as type1 counts them.
fn bitmap_bytes(range: IovaRange, page_size: u64) -> u64 {
    // Fewer than 2^64 / 8.
    ((range.len_less_one() >> lg2::alignment(page_size).min(63)) / 64 + 1).saturating_mul(8)
}

fn word_count(range: IovaRange, page_size: u64) -> usize {
    usize::try_from(bitmap_bytes(range, page_size) / 8).unwrap_or(usize::MAX)
}

/// The words that the bits of `range` take.
fn words_of(words: &mut [u64], range: IovaRange, page_size: u64) -> &mut [u64] {
    words.get_mut(..word_count(range, page_size)).unwrap_or_default()
}

fn bytes_of(words: &[u64]) -> u64 {
    u64::try_from(words.len()).unwrap_or(u64::MAX).saturating_mul(8)
}

/// The pages `first..=last` of `range`.
fn pages(range: IovaRange, page_size: u64, first: u64, last: u64) -> Option<IovaRange> {
    let at = |page: u64| range.start().get().checked_add(page.checked_mul(page_size)?);
    let end = at(last)?.saturating_add(page_size - 1).min(range.last().get());
    IovaRange::new(Iova::new(at(first)?), Iova::new(end))
}

/// Gives the bitmap to the sink, in pieces.
fn deliver(words: &[u64], sink: &mut (impl DirtySink + ?Sized)) -> Result<(), Undelivered> {
    let mut offset = 0;
    for piece in words.chunks(PIECE / 8) {
        let mut bytes = [0; PIECE];
        for (place, word) in bytes.chunks_exact_mut(8).zip(piece) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let len = piece.len() * 8;
        sink.write(offset, &bytes[..len])?;
        offset += u64::try_from(len).unwrap_or(u64::MAX);
    }
    Ok(())
}
