//! [`ContiguousMemory`] is a part of a huge page, or of pages that are neighbours.

use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use dmaspan::bytes::SharedWord;
use dmaspan::dma::{DmaMemory, Piece};
use dmaspan::{PhysAddr, Span, lg2};
use parking_lot::Mutex;

use super::pinned::FreshMemory;
use super::{PhysicalError, Shared, Tried};
use crate::mem::{AccessError, Memory, MemoryError, MemoryKind};
use crate::{os, sys};

/// How often memory of one kind is pinned and looked up, where it lies too high or in pieces.
/// Meanwhile all of it is held, so that each is other memory.
const TRIES: u32 = 16;

/// The largest transparent huge page that is taken for parts of it though a smaller page would do.
/// With base pages of 64 KiB it has 512 MiB, and nearly all of it could stay unused.
const SHARED_PAGE: u64 = 32 << 20;

/// The part of what is available that is held meanwhile at most: huge pages may have 512 MiB each.
const HELD_PART: u64 = 2;

/// Memory of which parts are handed out.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    state: Mutex<ChunksState>,
}

#[cfg(test)]
impl Chunks {
    pub(super) fn count(&self) -> usize {
        self.state.lock().chunks.len()
    }
}

#[derive(Debug, Default)]
struct ChunksState {
    chunks: BTreeMap<u64, Chunk>,
    next: u64,
}

/// One memory.
struct Chunk {
    fresh: FreshMemory,
    /// What nobody has, by the first address: each part of one span, and no two neighbours.
    free: BTreeMap<u64, u64>,
}

impl Chunk {
    fn new(fresh: FreshMemory) -> Self {
        let free = fresh.pinned().spans().map(|span| (span.paddr().get(), span.len())).collect();
        Self { fresh, free }
    }

    /// Takes the lowest part that is so.
    fn take(&mut self, len: u64, align: u64, last: PhysAddr) -> Option<Span> {
        let (at, free, start) = self.free.iter().find_map(|(&at, &free)| {
            let start = lg2::align_up(at, align.trailing_zeros())?;
            let end = start.checked_add(len)?;
            (end <= at + free && end - 1 <= last.get()).then_some((at, free, start))
        })?;
        self.free.remove(&at);
        let (before, behind) = (start - at, at + free - (start + len));
        for (start, len) in [(at, before), (start + len, behind)] {
            if len > 0 {
                self.free.insert(start, len);
            }
        }
        Span::new(PhysAddr::new(start), len).ok()
    }

    /// Takes a part back. Whether all of the chunk is free then.
    fn give_back(&mut self, span: Span) -> bool {
        let (mut start, mut len) = (span.paddr().get(), span.len());
        // Neighbours of one chunk that are of different spans of it would have been one span.
        if let Some((&below, &below_len)) = self.free.range(..start).next_back()
            && below + below_len == start
        {
            self.free.remove(&below);
            (start, len) = (below, below_len + len);
        }
        if let Some(above_len) = self.free.remove(&(start + len)) {
            len += above_len;
        }
        self.free.insert(start, len);
        self.free.values().sum::<u64>() == self.fresh.pinned().len()
    }

    /// Where a part is in the memory.
    fn offset_of(&self, part: Span) -> u64 {
        let mut offset = 0;
        for span in self.fresh.pinned().spans() {
            let skip = part.paddr().get().checked_sub(span.paddr().get());
            if let Some(skip) = skip.filter(|skip| *skip < span.len()) {
                return offset + skip;
            }
            offset += span.len();
        }
        offset
    }
}

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free: u64 = self.free.values().sum();
        f.debug_struct("Chunk")
            .field("len", &self.fresh.pinned().len())
            .field("free", &free)
            .finish_non_exhaustive()
    }
}

/// Memory at one range of physical addresses, from
/// [`PhysicalMemory::allocate`](super::PhysicalMemory::allocate): pinned, and this value's alone.
///
/// A device may write it at any time: it is accessed by its [pointer](Self::as_ptr), as
/// [`dmaspan::bytes`] does, or in a [`Coherent`](dmaspan::dma::Coherent), which is made of it. As a
/// `DmaMemory` it can be mapped for a device. Dropped, it is freed; a mapping of a device that is
/// dropped leaks it.
///
/// # Invariant
///
/// Nobody else has the bytes of the span. They were zeros when it was made.
pub struct ContiguousMemory {
    shared: Arc<Shared>,
    chunk: u64,
    piece: Piece,
    memory: Arc<Memory>,
    /// Where it is in the memory.
    offset: u64,
}

impl ContiguousMemory {
    /// Returns where devices reach it.
    pub fn span(&self) -> Span {
        self.piece.span
    }

    /// Returns where this process reaches the first byte; the pointer may be used for all of them,
    /// until this is dropped. See [`Memory::as_ptr`] on sharing it with a device.
    pub fn as_ptr(&self) -> NonNull<u8> {
        // No memory ends beyond the address space.
        let skip = usize::try_from(self.offset).unwrap_or(usize::MAX);
        self.memory.as_ptr().map_addr(|start| start.saturating_add(skip))
    }

    /// The length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "there is at least one byte")]
    pub fn len(&self) -> u64 {
        self.piece.span.len()
    }

    /// The whole words of it, which a device may read and write at any time.
    pub fn words(&self) -> &[SharedWord] {
        // It begins with a page of the memory.
        let [first, count] = [self.offset, self.len()].map(|bytes| usize::try_from(bytes / 8));
        let words = self.memory.words().get(first.unwrap_or(usize::MAX)..).unwrap_or_default();
        words.get(..count.unwrap_or(0)).unwrap_or(words)
    }

    /// Copies the bytes from `offset` on into `bytes`.
    ///
    /// # Errors
    ///
    /// [`AccessError::OutOfBounds`] where they are not all of this.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), AccessError> {
        self.memory.read(self.place(offset, bytes.len())?, bytes)
    }

    /// Copies `bytes` to `offset` and on.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.memory.write(self.place(offset, bytes.len())?, bytes)
    }

    #[cfg(test)]
    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    #[cfg(test)]
    pub(super) fn memory_offset(&self) -> u64 {
        self.offset
    }

    /// Where `len` bytes from `offset` are in the memory.
    fn place(&self, offset: u64, len: usize) -> Result<u64, AccessError> {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        let outside = AccessError::OutOfBounds { offset, len, memory_len: self.len() };
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len());
        if fits { Ok(self.offset + offset) } else { Err(outside) }
    }
}

impl Drop for ContiguousMemory {
    fn drop(&mut self) {
        let mut state = self.shared.chunks.state.lock();
        let Some(chunk) = state.chunks.get_mut(&self.chunk) else { return };
        let gone = chunk.give_back(self.piece.span).then(|| state.chunks.remove(&self.chunk));
        drop(state);
        // Memory is unpinned and freed without the lock.
        drop(gone);
    }
}

#[expect(unsafe_code, reason = "the pin keeps the memory where it is")]
// SAFETY:
// 1. The piece never changes. It is where a part of a `Memory` is pinned that this has alone, with
//    its pin, until it is dropped.
// 2. Nobody has a reference to a `Memory` but to atomic bytes, which devices and pools may write.
unsafe impl DmaMemory for ContiguousMemory {
    fn pieces(&self) -> &[Piece] {
        slice::from_ref(&self.piece)
    }
}

impl fmt::Debug for ContiguousMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContiguousMemory").field("span", &self.span()).finish_non_exhaustive()
    }
}

/// See [`PhysicalMemory::allocate`](super::PhysicalMemory::allocate).
pub(super) fn allocate(
    shared: &Arc<Shared>,
    len: u64,
    align: u64,
    last: PhysAddr,
) -> Result<ContiguousMemory, PhysicalError> {
    if len == 0 {
        return Err(PhysicalError::Empty);
    }
    if !align.is_power_of_two() {
        return Err(PhysicalError::Alignment { align });
    }
    let mut tried = Vec::new();
    let page = sys::page_size();
    // Whole pages, so that no two owners share one.
    let Some(whole) = lg2::align_up(len, page.trailing_zeros()) else {
        return Err(PhysicalError::None { len, align, last, tried });
    };
    let align = align.max(page);
    let from_known = {
        let mut state = shared.chunks.state.lock();
        let mut chunks = state.chunks.iter_mut();
        chunks.find_map(|(&id, chunk)| Some((id, chunk.take(whole, align, last)?)))
    };
    if let Some((id, span)) = from_known {
        return Ok(hand_out(shared, id, span));
    }
    for (kind, chunk_len) in candidates(shared, whole, align) {
        match find(shared, kind, chunk_len, |chunk| chunk.take(whole, align, last)) {
            Ok((chunk, span)) => {
                let id = {
                    let mut state = shared.chunks.state.lock();
                    let id = state.next;
                    state.next += 1;
                    state.chunks.insert(id, chunk);
                    id
                };
                return Ok(hand_out(shared, id, span));
            }
            Err(why) => tried.push(why),
        }
    }
    Err(PhysicalError::None { len, align, last, tried })
}

/// A part that was taken, zeroed.
fn hand_out(shared: &Arc<Shared>, id: u64, span: Span) -> ContiguousMemory {
    let (memory, offset) = {
        let state = shared.chunks.state.lock();
        // A chunk stays as long as a part of it is taken.
        let chunk = &state.chunks[&id];
        (Arc::clone(chunk.fresh.pinned().memory()), chunk.offset_of(span))
    };
    // It is all in the memory, whole words.
    let zeroed = memory.fill_words(offset, span.len(), |_| 0);
    debug_assert!(zeroed.is_ok(), "{span} at {offset:#x}: {zeroed:?}");
    let piece = Piece::memory(span);
    ContiguousMemory { shared: Arc::clone(shared), chunk: id, piece, memory, offset }
}

/// Which kinds of memory to try, and how much: those whose pages hold it, and then those whose
/// pages may be neighbours.
fn candidates(shared: &Shared, len: u64, align: u64) -> Vec<(MemoryKind, u64)> {
    candidates_of(
        MemoryKind::Thp.page_size(),
        sys::page_size(),
        shared.supply.page_sizes(),
        len.max(align),
    )
}

/// The same, of pages and hugetlb pages of these sizes.
fn candidates_of(thp: u64, page: u64, sizes: Vec<u64>, needed: u64) -> Vec<(MemoryKind, u64)> {
    let hugetlb = |size: &u64| MemoryKind::of_hugetlb(*size);
    let mut all = Vec::new();
    if needed <= thp {
        all.push((MemoryKind::Thp, thp));
    }
    if needed <= page {
        all.push((MemoryKind::Base, page));
    }
    let (small, large): (Vec<u64>, Vec<u64>) = sizes.into_iter().partition(|size| *size < needed);
    all.extend(large.iter().filter_map(|size| Some((hugetlb(size)?, *size))));
    if thp > SHARED_PAGE {
        all.sort_by_key(|(_, size)| *size);
    }
    let more = small.iter().rev().filter_map(|size| Some((hugetlb(size)?, *size)));
    let more = more.chain((needed > thp).then_some((MemoryKind::Thp, thp)));
    all.extend(
        more.filter_map(|(kind, size)| Some((kind, lg2::align_up(needed, size.trailing_zeros())?))),
    );
    all
}

/// How often memory of `len` bytes is made: once at least. Hugetlb pages are set aside and no other
/// memory.
fn tries(kind: MemoryKind, len: u64) -> u32 {
    let available = if kind.is_hugetlb() { None } else { os::available_bytes() };
    tries_within(available, len)
}

fn tries_within(available: Option<u64>, len: u64) -> u32 {
    let fit = available.map_or(u64::MAX, |bytes| bytes / HELD_PART / len.max(1));
    u32::try_from(fit).unwrap_or(u32::MAX).clamp(1, TRIES)
}

/// Makes, pins and looks up memory of a kind until `take` takes of it.
fn find(
    shared: &Arc<Shared>,
    kind: MemoryKind,
    len: u64,
    take: impl Fn(&mut Chunk) -> Option<Span>,
) -> Result<(Chunk, Span), Tried> {
    let mut held = Vec::new();
    let mut last = None;
    for times in 1..=tries(kind, len) {
        let made = shared.supply.make(kind, len).map_err(|source| Tried::Memory { kind, source });
        let pinned = made.and_then(|memory| {
            let pinned = FreshMemory::pin(shared, memory);
            pinned.map_err(|source| Tried::Pin { kind, source: Box::new(source) })
        });
        let mut chunk = match pinned {
            Ok(fresh) => Chunk::new(fresh),
            // What was found before says more than that there is no more of it.
            Err(error) => return Err(last.unwrap_or(error)),
        };
        if let Some(span) = take(&mut chunk) {
            return Ok((chunk, span));
        }
        let spans = || chunk.fresh.pinned().spans();
        let longest = spans().max_by_key(|span| span.len());
        last = longest.map(|longest| {
            let pieces = spans().count();
            Tried::Elsewhere { kind, len, times, pieces, longest }
        });
        // Held, so that the next is other memory.
        held.push(chunk);
    }
    // There was at least one, of at least one span.
    Err(last.unwrap_or(Tried::Memory { kind, source: MemoryError::Empty { kind } }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const M2: u64 = 2 << 20;

    #[test]
    fn large_memory_is_tried_as_often_as_half_of_what_is_available_holds() {
        for (available, len, tries) in [
            (None, 1 << 29, 16),
            (Some(1 << 34), M2, 16),
            (Some(1 << 34), 1 << 29, 16),
            (Some((1 << 34) - 1), 1 << 29, 15),
            (Some(3 << 30), 1 << 29, 3),
            (Some(1 << 29), 1 << 29, 1),
            (Some(0), 1 << 29, 1),
        ] {
            assert_eq!(tries_within(available, len), tries, "{available:?} {len:#x}");
        }
    }

    #[test]
    fn very_large_transparent_pages_come_behind_smaller_pages_that_hold_it() {
        let hugetlb = |page_lg2| (MemoryKind::Hugetlb { page_lg2 }, 1 << page_lg2);
        let (small, large) = ((MemoryKind::Hugetlb2M, M2), (MemoryKind::Thp, 1 << 29));
        let all = [small, large, hugetlb(29), hugetlb(34)];
        let of_64k = |needed| candidates_of(1 << 29, 64 << 10, vec![M2, 1 << 29, 1 << 34], needed);
        let base = (MemoryKind::Base, 64 << 10);
        assert_eq!(of_64k(64 << 10), [&[base][..], &all].concat());
        assert_eq!(of_64k(1 << 20), all);
        let neighbours = (MemoryKind::Hugetlb2M, 2 * M2);
        assert_eq!(of_64k(3 << 20), [&all[1..], &[neighbours]].concat());
        // Others are shared first.
        let usual = candidates_of(M2, 4096, vec![M2], 4096);
        assert_eq!(usual, [(MemoryKind::Thp, M2), (MemoryKind::Base, 4096), small]);
        let of_16k = candidates_of(32 << 20, 16 << 10, vec![M2], 16 << 10);
        assert_eq!(of_16k[0], (MemoryKind::Thp, 32 << 20));
    }
}
