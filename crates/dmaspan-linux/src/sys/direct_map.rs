//! A [`DirectMap`] finds pinned memory of this process by its physical addresses.
//!
//! It is what a kernel's direct map is to a kernel: drivers name memory by where it is, and copies
//! between slots and originals need a pointer.

#![expect(unsafe_code, reason = "copies between pinned memory")]

use std::collections::BTreeMap;
use std::mem;
use std::num::NonZero;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread;

use dmaspan::bytes;
use dmaspan::dma::CoherentFrames;
use dmaspan::iommu::soft::BusError;
use dmaspan::swiotlb::{InSlot, Transfer};
use dmaspan::{PhysAddr, Platform, Span};
use parking_lot::{Mutex, RwLock};

use crate::mem::Memory;
use crate::physical::{ContiguousMemory, FreshMemory};
use crate::platform::UserPlatform;

/// No more copies of the map are kept.
const SHARDS_MOST: usize = 16;

/// Memory that is pinned there.
#[derive(Clone, Debug)]
struct Part {
    len: u64,
    memory: Arc<Memory>,
    /// Where it is in the memory.
    offset: u64,
}

type Parts = BTreeMap<u64, Part>;

/// On cache lines of its own, as each thread that copies locks its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard(RwLock<Parts>);

/// Which pinned memory is where.
///
/// A copy holds the lock of a map while it runs, so that no memory is unpinned under it. There are
/// several maps with the same content, so that threads that copy at once write no common cache
/// line; pinning, which is rare and slow, changes all of them.
#[derive(Debug)]
pub(crate) struct DirectMap {
    shards: Box<[Shard]>,
    /// Held while the maps change.
    changing: Mutex<()>,
}

impl DirectMap {
    pub(crate) fn new() -> Self {
        let cpus = thread::available_parallelism().map_or(1, NonZero::get);
        let shards = (0..cpus.min(SHARDS_MOST)).map(|_| Shard::default()).collect();
        Self { shards, changing: Mutex::new(()) }
    }

    fn shard(&self) -> &RwLock<Parts> {
        &self.shards[UserPlatform.cpu() % self.shards.len()].0
    }

    /// Adds spans of a memory, which are where its bytes from 0 on are.
    ///
    /// # Errors
    ///
    /// Where memory is known there already, with nothing changed: the span that is.
    pub(crate) fn add(&self, memory: &Arc<Memory>, spans: &[Span]) -> Result<(), Span> {
        let _turn = self.changing.lock();
        let known = self.shard().read();
        if let Some(taken) = spans.iter().find(|span| overlaps(&known, **span)) {
            return Err(*taken);
        }
        drop(known);
        for shard in &self.shards {
            let mut parts = shard.0.write();
            let mut offset = 0;
            for span in spans {
                let part = Part { len: span.len(), memory: Arc::clone(memory), offset };
                parts.insert(span.paddr().get(), part);
                offset += span.len();
            }
        }
        Ok(())
    }

    /// Takes spans away that were added.
    pub(crate) fn remove(&self, spans: &[Span]) {
        let _turn = self.changing.lock();
        for shard in &self.shards {
            let mut parts = shard.0.write();
            let gone: Vec<_> = spans.iter().map(|span| parts.remove(&span.paddr().get())).collect();
            drop(parts);
            // What was the last to keep memory frees it without the lock.
            drop(gone);
        }
    }

    /// Copies as told.
    ///
    /// # Panics
    ///
    /// Where a side is of no memory that is pinned here.
    #[inline]
    pub(crate) fn transfer(&self, transfer: &Transfer) {
        let parts = self.shard().read();
        let (mut done, len) = (0, transfer.len());
        while done < len {
            let (from, readable) = place(&parts, transfer.source().wrapping_add(done));
            let (to, writable) = place(&parts, transfer.target().wrapping_add(done));
            let part = (len - done).min(readable).min(writable);
            // SAFETY:
            // 1. Both parts are of `Memory` that the map keeps while its lock is held: `part` bytes
            //    are readable at `from` and writable at `to`.
            // 2. Nobody has a reference to a `Memory` but to atomic bytes.
            unsafe { bytes::copy(from.as_ptr(), to.as_ptr(), length(part)) };
            done += part;
        }
    }

    /// Writes zeros to the bytes of a slot.
    ///
    /// # Panics
    ///
    /// Where it is of no memory that is pinned here.
    #[inline]
    pub(crate) fn zero(&self, slot: &InSlot) {
        self.each(slot.span(), |start, len| {
            // SAFETY:
            // 1. `len` bytes from `start` are of a `Memory` that the map keeps meanwhile, and
            //    nobody has a reference to it but to atomic bytes.
            unsafe { bytes::clear(start.as_ptr(), len) };
        });
    }

    /// Copies the bytes of a slot out, as many as `into` has at most.
    ///
    /// # Panics
    ///
    /// As [`zero`](Self::zero).
    #[inline]
    pub(crate) fn read(&self, slot: &InSlot, mut into: &mut [u8]) {
        self.each(slot.span(), |start, len| {
            let len = len.min(into.len());
            let (now, rest) = mem::take(&mut into).split_at_mut(len);
            // SAFETY:
            // 1. As many bytes as `now` has are readable at `start`, of a `Memory` that the map
            //    keeps meanwhile.
            unsafe { bytes::read(start.as_ptr(), now) };
            into = rest;
        });
    }

    /// Copies bytes into a slot, as many as it has at most.
    ///
    /// # Panics
    ///
    /// As [`zero`](Self::zero).
    #[inline]
    pub(crate) fn write(&self, slot: &InSlot, mut from: &[u8]) {
        self.each(slot.span(), |start, len| {
            let (now, rest) = from.split_at(len.min(from.len()));
            // SAFETY:
            // 1. As many bytes as `now` has are writable at `start`, of a `Memory` that the map
            //    keeps meanwhile, and nobody has a reference to it but to atomic bytes.
            unsafe { bytes::write(now, start.as_ptr()) };
            from = rest;
        });
    }

    /// Whether all of a span is of memory that is pinned here.
    pub(crate) fn has(&self, span: Span) -> bool {
        let parts = self.shard().read();
        let mut done: u64 = 0;
        while done < span.len() {
            let Some((_, _, left)) = part(&parts, span.paddr().wrapping_add(done)) else {
                return false;
            };
            done = done.saturating_add(left);
        }
        true
    }

    /// Where the process has the byte at `at`, and how many bytes from there on are contiguous in
    /// both; `None` where no memory is pinned there.
    pub(crate) fn pointer(&self, at: PhysAddr) -> Option<(NonNull<u8>, u64)> {
        find(&self.shard().read(), at)
    }

    /// Calls `with` with each part of `len` bytes from `at` on: the memory, where in it they are,
    /// and which of the bytes; as long as it returns `true`.
    ///
    /// # Errors
    ///
    /// [`BusError::Nobody`] with the first address where no memory is pinned here, or for which
    /// `with` returned `false`.
    pub(crate) fn visit(
        &self,
        at: PhysAddr,
        len: usize,
        mut with: impl FnMut(&Memory, u64, Range<usize>) -> bool,
    ) -> Result<(), BusError> {
        let parts = self.shard().read();
        let mut done = 0;
        while done < len {
            let paddr = u64::try_from(done).ok().and_then(|done| at.checked_add(done));
            let nobody = BusError::Nobody { paddr: paddr.unwrap_or(at) };
            let (part, skip, left) = paddr.and_then(|at| part(&parts, at)).ok_or(nobody)?;
            let end = done + length(left).min(len - done);
            if !with(&part.memory, part.offset + skip, done..end) {
                return Err(nobody);
            }
            done = end;
        }
        Ok(())
    }

    /// Does something with each part of a slot.
    fn each(&self, span: Span, mut with: impl FnMut(NonNull<u8>, usize)) {
        let parts = self.shard().read();
        let mut done = 0;
        while done < span.len() {
            let (start, len) = place(&parts, span.paddr().wrapping_add(done));
            let len = len.min(span.len() - done);
            with(start, length(len));
            done += len;
        }
    }
}

/// Whether anything is known in a span.
fn overlaps(parts: &Parts, span: Span) -> bool {
    let below = parts.range(..=span.last().get()).next_back();
    below.is_some_and(|(start, part)| start + (part.len - 1) >= span.paddr().get())
}

/// The memory that is pinned at `at`, how far behind its first byte that is, and how many bytes are
/// left there.
fn part(parts: &Parts, at: PhysAddr) -> Option<(&Part, u64, u64)> {
    let (start, part) = parts.range(..=at.get()).next_back()?;
    let skip = at.get() - start;
    let left = part.len.checked_sub(skip).filter(|left| *left > 0)?;
    Some((part, skip, left))
}

fn find(parts: &Parts, at: PhysAddr) -> Option<(NonNull<u8>, u64)> {
    let (part, skip, left) = part(parts, at)?;
    Some((part.memory.ptr_at(part.offset + skip, left).ok()?, left))
}

/// The same of what has to be there.
#[track_caller]
fn place(parts: &Parts, at: PhysAddr) -> (NonNull<u8>, u64) {
    let Some(found) = find(parts, at) else {
        panic!("{at} is of no memory that was pinned by this PhysicalMemory")
    };
    found
}

/// The first bytes of a span, or all of it.
fn first_bytes(span: Span, len: u64) -> Span {
    Span::new(span.paddr(), len.min(span.len())).unwrap_or(span)
}

/// The same number: this crate is for 64 bits.
fn length(bytes: u64) -> usize {
    bytes.try_into().unwrap_or(usize::MAX)
}

/// The first `len` bytes of contiguous memory as the DMA API takes it: the kernel's pages may be
/// larger than what a device is given.
pub(crate) fn one_span(memory: ContiguousMemory, len: u64) -> CoherentFrames {
    let (start, span) = (memory.as_ptr(), first_bytes(memory.span(), len));
    // SAFETY:
    // 1. `ContiguousMemory` has its bytes alone until it is dropped: they are part of a `Memory`
    //    that it keeps pinned, which any thread may read and write, and were zeroed when it was
    //    made (its invariant). Nothing has written them since: this takes it as it was allocated.
    // 2. Nobody has a reference to a `Memory` but to atomic bytes.
    unsafe { CoherentFrames::new(start, span, Arc::new(memory)) }
}

/// The first `len` bytes of memory of any spans as the DMA API takes it: fresh memory that nobody
/// else has.
pub(crate) fn any_spans(memory: FreshMemory, len: u64) -> CoherentFrames {
    let mut left = len;
    let spans = memory.pinned().spans().map_while(|span| {
        let span = (left > 0).then(|| first_bytes(span, left))?;
        left -= span.len();
        Some(span)
    });
    let spans: Vec<Span> = spans.collect();
    let start = memory.pinned().memory().as_ptr();
    // SAFETY:
    // 1. All of the memory is pinned where the spans say, one behind the other, until the owner is
    //    dropped, and nobody else has it: it was made for this alone, zeroed (the invariant of
    //    `FreshMemory`).
    // 2. Nobody has a reference to a `Memory` but to atomic bytes.
    unsafe { CoherentFrames::scattered(start, &spans, Arc::new(memory)) }
}
