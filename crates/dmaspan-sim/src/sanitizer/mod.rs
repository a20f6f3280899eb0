//! A sanitizer for the order of things in DMA: map, use, unmap, flush, release.
//!
//! A mistake between a driver and an IOMMU mostly goes unnoticed: IOTLBs are small and forget soon,
//! and a device that writes through a translation that should be gone corrupts whatever lies there
//! by then. The [`Sanitizer`] is told what happens, by events, and assumes the worst of hardware:
//!
//! - Every translation is in the IOTLB from its map on, and stays until an invalidation that *began
//!   after the unmap*, names its IOVAs (and its leaf's size, where hardware minds), and has *ended*
//!   well.
//! - Every walk is in a walk cache. Where tables were detached, walks into them stay until such an
//!   invalidation says so too.
//! - Where absent entries are cached, a mapping is not seen until `sync_map` named it.
//!
//! It knows no page table, no allocator and no driver, so that it serves anybody's. It needs no
//! events but those of what it shall look after: without releases nothing is released too early,
//! without DMA no device touches what it must not.
//!
//! # Feeding it
//!
//! A driver of any project, with page tables and an allocator of its own, makes one [`Sanitizer`] a
//! domain, and calls it where it does these things. The types are plain: [`IovaRange`] and [`Span`]
//! are an address and a length.
//!
//! - Entries were written: [`on_map`](Sanitizer::on_map). Finds a map over a mapping, and a
//!   missing flush of what was there.
//! - Entries were cleared: [`on_unmap`](Sanitizer::on_unmap). Finds a double unmap, an unmap of
//!   nothing or of a part.
//! - A flush begins and ends: [`on_invalidate_begin`](Sanitizer::on_invalidate_begin) and
//!   [`on_invalidate_end`](Sanitizer::on_invalidate_end). Finds a pointless flush.
//! - IOVAs or memory go back: [`on_release`](Sanitizer::on_release) and
//!   [`on_free`](Sanitizer::on_free). Finds a late flush, and a release of what is mapped.
//! - A device accesses memory: [`on_dma`](Sanitizer::on_dma). Finds a use after unmap, before the
//!   flush and after it, and an access to nothing, past a mapping, beside it, into the next one or
//!   without permission.
//! - CPU and device take turns: [`on_sync`](Sanitizer::on_sync). Finds a sync outside of a
//!   mapping, or in another direction.
//! - It detaches, or ends: [`on_detach`](Sanitizer::on_detach), [`finish`](Sanitizer::finish).
//!   Finds leaks, and what was never flushed.
//! - IOVAs are handed out: [`on_alloc`](Sanitizer::on_alloc). Finds some that are mapped or not
//!   flushed.
//! - Hardware was told of new entries: [`on_sync_map`](Sanitizer::on_sync_map). Finds DMA before.
//! - A table leaves the tree, and is freed: [`on_retire_table`](Sanitizer::on_retire_table) and
//!   [`on_free_table`](Sanitizer::on_free_table). Finds a late flush of the walk cache.
//!
//! An event that is left out only costs what it finds. One rule of order makes the rest exact under
//! threads: a map is told of when its entries are written and before a device is given the IOVAs;
//! an unmap when its entries are cleared and before the flush that is to be its own can begin, by
//! whomever. Then a flush that the sanitizer takes for one after the unmap was one, and the other
//! way round.
//!
//! It finds what kernel/dma/debug.c and drivers/iommu/iommu-debug-pagealloc.c of Linux find of
//! mappings, and what those cannot: whatever has to do with flushes.
//!
//! # Bytes and granules
//!
//! Memory is released by the byte, and a mapping lets a device reach whole granules. The sanitizer
//! keeps the bytes: [`on_map`](Sanitizer::on_map) is told them, of a buffer that shares granules
//! with others, and a [`Device`](dmaspan::dma::Device) of the DMA API says them itself. So the
//! release of a buffer is wrong where that buffer is mapped, and is not where a neighbour is; and a
//! device that writes beside its buffer is found, though no IOMMU refuses it. Of a device that is
//! [not trusted](SanitizerConfig::trust) neighbours are findings, too.
//!
//! # Neighbours
//!
//! An access that begins in one mapping and ends in another is an error, though no IOMMU refuses
//! it: allocators pack, and the next packet is overwritten. What a domain was asked for together is
//! one mapping, as a list or a reservation is; of events, what one [`on_map`](Sanitizer::on_map)
//! named. In the domain of a container neighbours may be one buffer:
//! [`SanitizerConfig::neighbours`] says otherwise, there or elsewhere.
//!
//! # Errors and advice
//!
//! [`errors`](Sanitizer::errors) are wrong, and a test asserts that there are none.
//! [`advice`](Sanitizer::advice) is what could be better: a pointless flush, or a trusted device
//! that looks beside its buffer. Each kind of finding has room of its
//! [own](SanitizerConfig::findings), so that a flood of one hides no other. Displayed, a sanitizer
//! is a report of all of them. A report that was not displayed is printed to standard error where a
//! panic drops a sanitizer, as that of a test's own assertion does.
//!
//! # Ready wrappers
//!
//! [`Sanitized`] goes around any [`IommuOps`](dmaspan::iommu::IommuOps), by
//! [`sanitized`](Hardware::sanitized), and sees all that a [`Domain`](dmaspan::iommu::Domain) does,
//! and so all of the DMA API: single mappings, lists, reservations, raw addresses, syncs, and a
//! flush queue. The domain keeps the rule of order. [`Tracked`] goes around the memory that is
//! mapped, [`SanitizedTables`] around that of tables. A
//! [`SimDevice`](crate::device::SimDevice::sanitized) and a [`SimPort`](crate::port::SimPort) tell
//! of what they access. A call that the API refuses changes nothing, and is a finding where a
//! driver named bytes that are not its mapping's: a sync outside, an unmap by another length, a
//! second unmap.
//!
//! A [`PoisonedPool`] goes around the bounce pool of a device that bounces all: what the CPU or the
//! device reads before it was synced is poison then.
//!
//! Clones share all state and can go to all threads; one lock is around it, which puts events in an
//! order that is the same in all reports.
//!
//! # Examples
//!
//! `examples/packets.rs` is a packet driver of two threads, `examples/virtio_blk.rs` the block
//! driver of the crate `virtio-drivers`, which is checked by events alone; both print reports of
//! planted bugs.
//!
//! A driver that gives IOVAs back before the flush, and what it is told:
//!
//! ```
//! use dmaspan::iommu::{Invalidation, Scope, Tables};
//! use dmaspan::{Iova, IovaRange, PhysAddr, Prot, RangeError, Span};
//! use dmaspan_sim::sanitizer::{Cached, Cause, FindingKind, Sanitizer, SanitizerConfig};
//!
//! fn main() -> Result<(), RangeError> {
//!     let sanitizer = Sanitizer::new(SanitizerConfig::default());
//!     let nic = sanitizer.named("nic0");
//!     let buffer = IovaRange::from_len(Iova::new(0x8000), 0x2000)?;
//!     let memory = Span::new(PhysAddr::new(0x4_2000_0000), 0x2000)?;
//!     let flush = |range| {
//!         let scope = Scope::Ranges(&[range]);
//!         nic.on_invalidate(&Invalidation { scope, leaf_sizes: 1 << 12, tables: Tables::Kept });
//!     };
//!
//!     // As it should be.
//!     nic.on_map(buffer, &[memory], Prot::READ_WRITE);
//!     nic.on_unmap(buffer, Tables::Kept);
//!     flush(buffer);
//!     nic.on_release(buffer);
//!     assert_eq!(sanitizer.errors(), []);
//!
//!     // The flush has half of it.
//!     nic.on_map(buffer, &[memory], Prot::READ_WRITE);
//!     nic.on_unmap(buffer, Tables::Kept);
//!     flush(IovaRange::from_len(Iova::new(0x8000), 0x1000)?);
//!     nic.on_release(buffer);
//!
//!     let found = sanitizer.errors();
//!     let (cached, cause) = (Cached::Leaf, Cause::TooShort);
//!     assert_eq!(found[0].kind, FindingKind::LateFlush { cached, cause, freed: None });
//!     // Without the place of each call, with which its line ends.
//!     let report = found[0].to_string();
//!     let cut = |line: &str| line.split("  at ").next().unwrap_or(line).trim_end().to_owned();
//!     let report: Vec<String> = report.lines().map(cut).collect();
//!     assert_eq!(report.join("\n"), "\
//! ERROR: late flush
//!   what: 0x9000..=0x9fff was released, and its translation is not flushed yet
//!         leads to memory 0x420001000..=0x420001fff
//!   why:  the invalidation named a part of what was unmapped, and not this
//!   do:   invalidate all that was unmapped, the last byte included
//!   history of 0x9000..=0x9fff, oldest first:
//!       #1     0x8000..=0x9fff        map to 0x420000000..=0x420001fff, reads and writes
//!       #2     0x8000..=0x9fff        unmap
//!       #3     0x8000..=0x9fff        invalidate begins, leaves of 0x1000
//!       #4     0x8000..=0x9fff        invalidate #3 done
//!       #5     0x8000..=0x9fff        release
//!       #6     0x8000..=0x9fff        map to 0x420000000..=0x420001fff, reads and writes
//!       #7     0x8000..=0x9fff        unmap
//!       #8     0x8000..=0x8fff        invalidate begins, leaves of 0x1000
//!       #9     0x8000..=0x8fff        invalidate #8 done
//!    => #10    0x8000..=0x9fff        release");
//!     Ok(())
//! }
//! ```
//!
//! Every line of a history ends with the place of the call, the thread, and the name that the
//! driver gave [itself](Sanitizer::named) or its [device](dmaspan::dma::DeviceConfig::named). Of
//! what a domain does, that is the place of the call of the DMA API, or of the domain where nothing
//! is between. A drop has no place: the memory of a [`Tracked`] is named by where it was made.

mod access;
mod config;
mod event;
mod flush;
mod intervals;
mod report;
mod state;
mod tables;
#[cfg(test)]
mod tests;
mod turns;
mod wrapper;

use std::panic::Location;
use std::sync::Arc;
use std::{fmt, thread};

use dmaspan::iommu::{Event, Invalidation, Tables};
use dmaspan::{Caller, Direction, Iova, IovaRange, Label, Prot, Span};
use parking_lot::Mutex;

use crate::walker::Access;
pub use config::{LeafSizes, Neighbours, OnFinding, Parts, SanitizerConfig};
pub use dmaspan::iommu::SyncFor;
use event::Forget;
pub use event::{Invalidating, Op, Origin, Outcome, Record, Where};
pub use report::{Cached, Cause, Finding, FindingKind, Severity};
use state::{Asked, State};
pub use turns::PoisonedPool;
pub use wrapper::{Hardware, Sanitized, SanitizedList, SanitizedTables, Tracked};

/// The sanitizer is told what happens, and finds what is wrong: see the [module](self).
///
/// One looks after one domain. All its methods may be called at any time and by any thread; events
/// that race in the driver are in the order in which they are told.
#[derive(Clone)]
pub struct Sanitizer {
    shared: Arc<Shared>,
    name: Option<&'static str>,
}

struct Shared {
    mode: OnFinding,
    state: Mutex<State>,
}

/// Prints the report to standard error where a panic drops it, as a test's own assertion does,
/// unless everything in it was displayed before.
impl Drop for Sanitizer {
    fn drop(&mut self) {
        if thread::panicking() && {
            let state = self.shared.state.lock();
            state.displayed < state.findings.len()
        } {
            eprintln!("{self}");
        }
    }
}

impl Default for Sanitizer {
    fn default() -> Self {
        Self::new(SanitizerConfig::default())
    }
}

impl Sanitizer {
    /// One that knows of nothing mapped.
    pub fn new(config: SanitizerConfig) -> Self {
        let state = Mutex::new(State::new(config));
        let shared = Shared { mode: config.mode, state };
        Self { shared: Arc::new(shared), name: None }
    }

    /// The same sanitizer; what this clone is told has `name` in histories.
    #[must_use]
    pub fn named(&self, name: &'static str) -> Self {
        Self { shared: Arc::clone(&self.shared), name: Some(name) }
    }

    /// IOVAs were handed out to be mapped.
    #[track_caller]
    pub fn on_alloc(&self, range: IovaRange) {
        self.tell(Op::Alloc, Where::Range(range), |state, now| state.expect_unused(range, now));
    }

    /// Translations were written into the tables: `range` leads to `spans`, one behind the other.
    /// Spans may be left out: of memory that is not named no wrong release is found.
    ///
    /// Said before hardware is told by a `sync_map`, and before a device is given the IOVAs.
    #[track_caller]
    pub fn on_map(&self, range: IovaRange, spans: &[Span], prot: Prot) {
        let op = Op::Map { prot, first: spans.first().copied() };
        self.tell(op, Where::Range(range), |state, now| {
            state.map(range, spans, prot, now);
        });
    }

    /// Hardware that caches absent entries has forgotten those of `range`.
    #[track_caller]
    pub fn on_sync_map(&self, range: IovaRange) {
        self.tell(Op::SyncMap, Where::Range(range), |state, now| {
            if state.config.absent == crate::iotlb::AbsentEntries::Cached {
                state.announced.take(range);
                state.announced.insert(range, now.number);
            }
        });
    }

    /// The translations of `range` were taken away, and tables of it too or not. Said when the
    /// tables are changed, and before an invalidation of it by anybody can begin: one that begins
    /// in between is taken for one before the unmap.
    #[track_caller]
    pub fn on_unmap(&self, range: IovaRange, tables: Tables) {
        self.on_unmap_leaves(range, tables, 0);
    }

    /// [`on_unmap`](Self::on_unmap) of leaves whose sizes are known: bit n for 2^n bytes.
    #[track_caller]
    pub fn on_unmap_leaves(&self, range: IovaRange, tables: Tables, leaf_sizes: u64) {
        let op = Op::Unmap { tables, leaf_sizes };
        self.tell(op, Where::Range(range), |state, now| {
            state.unmap(range, (tables, leaf_sizes), now);
        });
    }

    /// [`on_unmap_leaves`](Self::on_unmap_leaves) of whatever is mapped in `range`: holes and parts
    /// of mappings are no findings.
    #[track_caller]
    pub fn on_unmap_parts(&self, range: IovaRange, tables: Tables, leaf_sizes: u64) {
        let op = Op::Unmap { tables, leaf_sizes };
        self.tell(op, Where::Range(range), |state, now| {
            state.unmap_parts(range, (tables, leaf_sizes), now);
        });
    }

    /// The translations of `range` lead to the same memory as before by other entries: with other
    /// permissions, `prot`, or split, or with marks taken away. The old entries are stale until an
    /// invalidation, as those of an unmap are.
    #[track_caller]
    pub fn on_protect(&self, range: IovaRange, prot: Prot) {
        self.rewritten(range, Some(prot));
    }

    #[track_caller]
    fn rewritten(&self, range: IovaRange, prot: Option<Prot>) {
        self.tell(Op::Protect { prot }, Where::Range(range), |state, now| {
            state.protect(range, prot, now);
        });
    }

    /// Hardware was told to forget and has forgotten, with nothing in between.
    #[track_caller]
    pub fn on_invalidate(&self, what: &Invalidation<'_>) {
        let begun = self.on_invalidate_begin(what);
        self.on_invalidate_end(begun, Outcome::Done);
    }

    /// Hardware is about to be told to forget.
    #[track_caller]
    pub fn on_invalidate_begin(&self, what: &Invalidation<'_>) -> Invalidating {
        let Invalidation { leaf_sizes, tables, .. } = *what;
        let what = Forget::new(what);
        let iovas = what.iovas.clone();
        let begin = self.tell(Op::InvalidateBegin { tables, leaf_sizes }, iovas, |state, now| {
            state.invalidate_begin(&what, now);
            now.clone()
        });
        Invalidating { begin, what }
    }

    /// Hardware has answered.
    #[track_caller]
    pub fn on_invalidate_end(&self, begun: Invalidating, outcome: Outcome) {
        let op = Op::InvalidateEnd { began: begun.begin.number, outcome };
        self.tell(op, begun.what.iovas.clone(), |state, _| state.invalidate_end(&begun, outcome));
    }

    /// A device accesses `len` bytes. An access past the top of the space ends there, and one of no
    /// bytes is none.
    #[track_caller]
    pub fn on_dma(&self, iova: Iova, len: u64, access: Access) {
        let room = (u64::MAX - iova.get()).saturating_add(1);
        let Ok(range) = IovaRange::from_len(iova, len.min(room)) else { return };
        self.tell(Op::Dma { access }, Where::Range(range), |state, now| {
            state.dma(range, access, now);
        });
    }

    /// The CPU and the device take turns with a buffer that stays mapped (`dma_sync_single_for_cpu`
    /// and `dma_sync_single_for_device`). A mapping in both directions can be synced as any; others
    /// only as what they are, as by kernel/dma/debug.c, `check_sync`.
    #[track_caller]
    pub fn on_sync(&self, range: IovaRange, turn: SyncFor, direction: Direction) {
        let op = Op::Sync { turn, direction };
        self.tell(op, Where::Range(range), |state, now| state.sync(range, direction, None, now));
    }

    /// IOVAs go back to their owner, with what was mapped there and the tables of it.
    #[track_caller]
    pub fn on_release(&self, range: IovaRange) {
        self.tell(Op::Release, Where::Range(range), |state, now| state.release(range, now));
    }

    /// Memory goes back to its owner, who may give it another use.
    #[track_caller]
    pub fn on_free(&self, span: Span) {
        self.tell(Op::Free { span }, Where::Nowhere, |state, now| state.free(span, now));
    }

    /// [`on_free`](Self::on_free) of memory that was made at a place.
    pub(super) fn on_drop(&self, span: Span, made: &'static Location<'static>) {
        let by = Caller { device: None, label: Label::Place(made) };
        let op = Op::Drop { span };
        self.tell_of(Some(by), op, Where::Nowhere, |state, now| state.free(span, now));
    }

    /// A table was taken out of the tree. Its walks end with the next unmap that this thread tells
    /// of, with [`Tables::Detached`].
    #[track_caller]
    pub fn on_retire_table(&self, table: Span) {
        let op = Op::RetireTable { span: table };
        self.tell(op, Where::Nowhere, |state, now| state.tables.retired(table, now));
    }

    /// A table goes back to where it can become another one, or anything.
    #[track_caller]
    pub fn on_free_table(&self, table: Span) {
        let op = Op::FreeTable { span: table };
        self.tell(op, Where::Nowhere, |state, now| state.free_table(table, now));
    }

    /// Takes what a [`Domain`](dmaspan::iommu::Domain) does: see
    /// [`IommuOps::observe`](dmaspan::iommu::IommuOps::observe). Histories name who asked the
    /// domain for it.
    #[track_caller]
    pub fn on_event(&self, event: &Event<'_>) {
        match *event {
            Event::OneOwner => self.shared.state.lock().is_one_owners = true,
            Event::Mapping { range, by } => {
                self.shared.state.lock().asked(range, Asked { by, of: Some(range) });
            }
            Event::Unmapping { range, by } => {
                self.shared.state.lock().asked(range, Asked { by, of: None });
            }
            Event::Bytes { range, granule_lg2 } => {
                self.shared.state.lock().bytes(range, granule_lg2);
            }
            Event::Mapped { range, spans, prot } => self.on_map(range, spans, prot),
            Event::Unmapped { range, leaf_sizes, tables } => {
                self.on_unmap_parts(range, tables, leaf_sizes);
            }
            Event::Rewritten { range, prot } => self.rewritten(range, prot),
            Event::Sync { range, turn, direction, mapping, by } => {
                let op = Op::Sync { turn, direction };
                self.tell_of(Some(by), op, Where::Range(range), |state, now| {
                    state.sync(range, direction, mapping, now);
                });
            }
            Event::RefusedUnmap { range, by } => {
                self.tell_of(Some(by), Op::RefusedUnmap, Where::Range(range), |state, now| {
                    state.refused_unmap(range, now);
                });
            }
            _ => {}
        }
    }

    /// The domain was taken away from hardware, which holds nothing of it any more.
    #[track_caller]
    pub fn on_detach(&self) {
        self.tell(Op::Detach, Where::All, |state, now| {
            // A test that ends by a panic unmaps nothing: that is no bug of its driver.
            if !thread::panicking() {
                state.leaks(now);
            }
            state.detached(now);
        });
    }

    /// All is over: what is mapped was leaked, and what was not flushed never will be. Gives all
    /// [`errors`](Self::errors).
    #[track_caller]
    pub fn finish(&self) -> Vec<Finding> {
        self.tell(Op::Finish, Where::All, |state, now| {
            state.leaks(now);
            state.unflushed(now);
        });
        self.errors()
    }

    /// Returns what was found so far, errors and advice, in order. Of each kind there are as many
    /// as [`SanitizerConfig::findings`] says, the first ones.
    pub fn findings(&self) -> Vec<Finding> {
        self.shared.state.lock().findings.clone()
    }

    /// Returns what of the [`findings`](Self::findings) is wrong: what a test asserts to be empty.
    pub fn errors(&self) -> Vec<Finding> {
        self.of(Severity::Error)
    }

    /// Returns what of the [`findings`](Self::findings) is not wrong, and could be better.
    pub fn advice(&self) -> Vec<Finding> {
        self.of(Severity::Advice)
    }

    fn of(&self, class: Severity) -> Vec<Finding> {
        let state = self.shared.state.lock();
        state.findings.iter().filter(|finding| finding.class() == class).cloned().collect()
    }

    /// Returns how many [`findings`](Self::findings) there are.
    pub fn found(&self) -> usize {
        self.shared.state.lock().findings.len()
    }

    /// Returns how many more there were, of which as many of the same kind had been kept already.
    pub fn left_out(&self) -> u64 {
        let state = self.shared.state.lock();
        state.left_out().map(|(_, count)| count).sum()
    }

    /// Returns how many events there were.
    pub fn events(&self) -> u64 {
        self.shared.state.lock().number
    }

    /// Returns what of `range` is mapped, in whole granules and in order.
    pub fn mapped(&self, range: IovaRange) -> Vec<IovaRange> {
        let state = self.shared.state.lock();
        joined(state.mapped.meeting(range).map(|(piece, _)| state.granules(piece)), range)
    }

    /// Returns where in `range` hardware may hold entries that the tables do not have any more, in
    /// whole granules and in order.
    pub fn stale(&self, range: IovaRange) -> Vec<IovaRange> {
        let state = self.shared.state.lock();
        joined(state.leaves.meeting(range).map(|(piece, _)| state.granules(piece)), range)
    }

    /// Records an operation of the caller, or of whoever asked a domain for it, and looks at it.
    #[track_caller]
    fn tell<R>(&self, op: Op, iovas: Where, look: impl FnOnce(&mut State, &Record) -> R) -> R {
        self.tell_of(None, op, iovas, look)
    }

    /// Records an operation and looks at it; panics outside of the lock.
    #[track_caller]
    fn tell_of<R>(
        &self,
        by: Option<Caller>,
        op: Op,
        iovas: Where,
        look: impl FnOnce(&mut State, &Record) -> R,
    ) -> R {
        let (here, thread) = (Location::caller(), thread::current().id());
        let mut state = self.shared.state.lock();
        let known = state.findings.len();
        let by = by.or_else(|| state.asker(op, &iovas));
        let (location, name) = match by.map(|by| by.label) {
            Some(Label::Place(place)) => (place, None),
            Some(Label::Name(name)) => (here, Some(name)),
            None => (here, None),
        };
        let name = name.or(by.and_then(|by| by.device)).or(self.name);
        let record = state.record(op, iovas, Origin { location, thread, name });
        let answer = look(&mut state, &record);
        if thread::panicking() && state.displayed == known {
            // Nor is what else comes of unwinding, alone, worth a report.
            state.displayed = state.findings.len();
        }
        if self.shared.mode == OnFinding::Panic && !thread::panicking() {
            let mut new = state.findings[known..].iter();
            let new = new.find(|found| found.class() == Severity::Error);
            if let Some(finding) = new.cloned() {
                state.displayed = state.findings.len();
                drop(state);
                panic!("{finding}");
            }
        }
        answer
    }
}

/// The parts of pieces in `within`, those without gaps between them as one.
pub(crate) fn joined(pieces: impl Iterator<Item = IovaRange>, within: IovaRange) -> Vec<IovaRange> {
    let mut all: Vec<IovaRange> = Vec::new();
    for piece in pieces.filter_map(|piece| piece.intersection(within)) {
        match all.last_mut().and_then(|last| Some((last.join(piece)?, last))) {
            Some((longer, last)) => *last = longer,
            None => all.push(piece),
        }
    }
    all
}

impl fmt::Debug for Sanitizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (config, events, found) = {
            let state = self.shared.state.lock();
            (state.config, state.number, state.findings.len())
        };
        f.debug_struct("Sanitizer")
            .field("config", &config)
            .field("events", &events)
            .field("found", &found)
            .finish_non_exhaustive()
    }
}

/// A report: all errors, then all advice, then how many there are of each.
impl fmt::Display for Sanitizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (errors, advice) = (self.errors(), self.advice());
        errors.iter().chain(&advice).try_for_each(|finding| writeln!(f, "{finding}\n"))?;
        // Written without the lock: a writer may be behind a device that the sanitizer sees.
        let (left_out, events) = {
            let mut state = self.shared.state.lock();
            state.displayed = state.displayed.max(errors.len() + advice.len());
            (state.left_out().collect::<Vec<_>>(), state.number)
        };
        for (title, count) in left_out {
            writeln!(f, "{title}: {count} more")?;
        }
        let (errors, advice) = (errors.len(), advice.len());
        write!(f, "errors: {errors}, advice: {advice}, events: {events}")
    }
}
