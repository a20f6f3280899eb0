//! Memory is cut into equal slices here, and each is handed out to one owner at a time.

#![expect(unsafe_code, reason = "makes Rust slices of memory")]

use std::collections::VecDeque;
use std::mem;
use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::mem::ExclusiveMemory;

/// Where slices are in memory.
///
/// Slices are grouped in chunks, as one registered buffer must hold all of a slice. A chunk begins
/// at a multiple of `stride`, itself a multiple of the memory's pages, so that no page is in two
/// buffers; what does not make a slice at the end of a chunk is not used.
///
/// # Invariant
///
/// `1 <= per_chunk`, `1 <= slice_len` and `per_chunk * slice_len <= stride`: no two slices overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    slice_len: usize,
    count: u32,
    per_chunk: u32,
    stride: usize,
}

impl Layout {
    /// `count` slices of `slice_len` bytes, in chunks of `max_chunk` bytes at most, at multiples of
    /// `page`, which divides `max_chunk`. `None` for no slices, empty ones and ones that are longer
    /// than a chunk.
    pub(crate) fn new(slice_len: usize, count: u32, page: usize, max_chunk: usize) -> Option<Self> {
        if count == 0 || page == 0 || !max_chunk.is_multiple_of(page) {
            return None;
        }
        let per_chunk = max_chunk.checked_div(slice_len)?;
        let per_chunk = u32::try_from(per_chunk).ok().filter(|count| *count != 0)?;
        let used = usize::try_from(per_chunk).ok()?.checked_mul(slice_len)?;
        let stride = used.checked_next_multiple_of(page)?;
        let layout = Self { slice_len, count, per_chunk, stride };
        layout.memory_len().map(|_| layout)
    }

    /// As many slices as fit in `len` bytes.
    pub(crate) fn fitting(
        slice_len: usize,
        len: usize,
        page: usize,
        max_chunk: usize,
    ) -> Option<Self> {
        let one = Self::new(slice_len, 1, page, max_chunk)?;
        let in_rest = (len % one.stride / slice_len).min(usize::try_from(one.per_chunk).ok()?);
        let whole = (len / one.stride).checked_mul(usize::try_from(one.per_chunk).ok()?)?;
        let count = whole.checked_add(in_rest)?;
        Self::new(slice_len, u32::try_from(count).ok()?, page, max_chunk)
    }

    /// The bytes of memory that it needs; `None` only while it is made.
    pub(crate) fn memory_len(&self) -> Option<usize> {
        let last = self.count - 1;
        self.offset(last)?.checked_add(self.slice_len)
    }

    /// The bytes of a slice.
    pub(crate) fn slice_len(&self) -> usize {
        self.slice_len
    }

    /// The number of slices.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// The number of chunks.
    pub(crate) fn chunks(&self) -> u32 {
        self.count.div_ceil(self.per_chunk)
    }

    /// The chunk that slice `index` is in.
    #[inline]
    fn chunk_of(&self, index: u32) -> u32 {
        index / self.per_chunk
    }

    /// Where slice `index` begins.
    #[inline]
    fn offset(&self, index: u32) -> Option<usize> {
        let chunk = usize::try_from(index / self.per_chunk).ok()?;
        let within = usize::try_from(index % self.per_chunk).ok()?;
        let start = chunk.checked_mul(self.stride)?;
        start.checked_add(within * self.slice_len)
    }

    /// The bytes of `chunk`, of memory of `len` bytes.
    pub(crate) fn chunk(&self, chunk: u32, len: usize) -> Option<Range<usize>> {
        let start = usize::try_from(chunk).ok()?.checked_mul(self.stride)?;
        let end = start.checked_add(self.stride)?.min(len);
        (start < end).then_some(start..end)
    }
}

/// The slices of some memory, and which of them are free.
///
/// # Invariant
///
/// The numbers in `free` differ, and are those of slices of which no [`Slice`] exists and none was
/// leaked. `layout` needs no more bytes than `memory` has.
#[derive(Debug)]
pub(crate) struct Slices {
    memory: ExclusiveMemory,
    layout: Layout,
    /// A stack, the one given back last on top, as its bytes may be in a cache. It has room for
    /// all. A list without a lock is no faster: both change a line of the cache twice or so for
    /// each slice.
    free: Mutex<Free>,
}

/// Which slices are free, and who waits for one.
#[derive(Debug)]
struct Free {
    indices: Vec<u32>,
    /// Tasks by the number that each has, the one that waited longest first.
    waiters: VecDeque<(u64, Waker)>,
    /// The number of the next one that waits.
    next: u64,
}

impl Free {
    /// The task to wake where a slice is free, which waits no more.
    #[inline]
    fn next_waiter(&mut self) -> Option<Waker> {
        // Empty but where somebody waits: nothing more is done for each slice.
        if self.waiters.is_empty() || self.indices.is_empty() {
            return None;
        }
        self.waiters.pop_front().map(|(_, waker)| waker)
    }

    /// Has a task wait at its place, or behind all others. Returns its former waker. There is room.
    fn wait(&mut self, place: &mut Option<u64>, waker: Waker) -> Option<Waker> {
        let number = *place.get_or_insert_with(|| {
            self.next += 1;
            self.next
        });
        let at = self.waiters.partition_point(|(other, _)| *other < number);
        match self.waiters.get_mut(at) {
            Some((other, former)) if *other == number => Some(mem::replace(former, waker)),
            _ => {
                self.waiters.insert(at, (number, waker));
                None
            }
        }
    }

    /// Takes a task out of those who wait; `None` where it was woken, or never waited.
    fn leave(&mut self, place: Option<u64>) -> Option<Waker> {
        let number = place?;
        let at = self.waiters.partition_point(|(other, _)| *other < number);
        let waits = self.waiters.get(at).is_some_and(|(other, _)| *other == number);
        if waits { self.waiters.remove(at).map(|(_, waker)| waker) } else { None }
    }
}

/// Why there are no [`Slices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlicesError {
    /// The layout needs more bytes than the memory has.
    TooShort,
    /// There is no memory for the list of free slices.
    NoMemory,
}

impl Slices {
    /// All of them are free; the first is taken first.
    pub(crate) fn new(memory: ExclusiveMemory, layout: Layout) -> Result<Arc<Self>, SlicesError> {
        if layout.memory_len().is_none_or(|needed| needed > memory.len()) {
            return Err(SlicesError::TooShort);
        }
        let mut indices = Vec::new();
        let count = usize::try_from(layout.count).map_err(|_| SlicesError::NoMemory)?;
        indices.try_reserve_exact(count).map_err(|_| SlicesError::NoMemory)?;
        indices.extend((0..layout.count).rev());
        let free = Free { indices, waiters: VecDeque::new(), next: 0 };
        Ok(Arc::new(Self { memory, layout, free: Mutex::new(free) }))
    }

    /// The memory.
    pub(crate) fn memory(&self) -> &ExclusiveMemory {
        &self.memory
    }

    /// Where the slices are.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How many slices there are.
    pub(crate) fn count(&self) -> u32 {
        self.layout.count
    }

    /// The length of each, in bytes.
    pub(crate) fn slice_len(&self) -> usize {
        self.layout.slice_len
    }

    /// How many were free a moment ago.
    pub(crate) fn free(&self) -> u32 {
        u32::try_from(self.free.lock().indices.len()).unwrap_or(self.layout.count)
    }

    /// Takes a free slice.
    #[inline]
    pub(crate) fn take(self: &Arc<Self>) -> Option<Slice> {
        let index = self.free.lock().indices.pop()?;
        self.slice(index)
    }

    /// The slice of an index that was free.
    #[inline]
    fn slice(self: &Arc<Self>, index: u32) -> Option<Slice> {
        let start = self.memory.part(self.layout.offset(index)?, self.layout.slice_len)?;
        Some(Slice { owner: Arc::clone(self), start, index })
    }

    /// Takes a free slice, or has the task of `context` woken when one comes back. `place` is its
    /// place among those who wait, `None` before the first time.
    pub(crate) fn poll_take(
        self: &Arc<Self>,
        place: &mut Option<u64>,
        context: &Context<'_>,
    ) -> Poll<Slice> {
        // A waker is code of somebody else's: cloned and dropped without the lock.
        let waker = if self.free() == 0 { Some(context.waker().clone()) } else { None };
        let mut free = self.free.lock();
        if let Some(index) = free.indices.pop() {
            let mine = free.leave(place.take());
            drop(free);
            drop(mine);
            // Every index of a layout is in its memory.
            return self.slice(index).map_or(Poll::Pending, Poll::Ready);
        }
        let former = match waker {
            Some(waker) if free.waiters.try_reserve(1).is_ok() => free.wait(place, waker),
            // Gone this moment, or no memory to wait: the task looks again.
            waker => {
                drop(free);
                context.waker().wake_by_ref();
                drop(waker);
                return Poll::Pending;
            }
        };
        drop(free);
        drop(former);
        Poll::Pending
    }

    /// Waits no more. A task that was woken and took nothing passes that on.
    pub(crate) fn stop_waiting(&self, place: Option<u64>) {
        let Some(place) = place else { return };
        let mut free = self.free.lock();
        let mine = free.leave(Some(place));
        let next = if mine.is_none() { free.next_waiter() } else { None };
        drop(free);
        drop(mine);
        if let Some(next) = next {
            next.wake();
        }
    }
}

/// A slice that its owner alone accesses. Given back on drop.
///
/// # Invariant
///
/// `start` is the first of `slice_len` bytes of `owner`'s memory that no other value gives access
/// to.
#[derive(Debug)]
pub(crate) struct Slice {
    owner: Arc<Slices>,
    start: NonNull<u8>,
    index: u32,
}

// SAFETY:
// 1. The bytes belong to the process, not to a thread, and so does what holds them.
unsafe impl Send for Slice {}

// SAFETY:
// 1. Through `&Slice` bytes are only read.
unsafe impl Sync for Slice {}

impl Slice {
    /// What it is a slice of.
    #[inline]
    pub(crate) fn owner(&self) -> &Arc<Slices> {
        &self.owner
    }

    /// Which one it is.
    #[inline]
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// The chunk that it is in.
    #[inline]
    pub(crate) fn chunk(&self) -> u32 {
        self.owner.layout.chunk_of(self.index)
    }

    /// The length in bytes.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.owner.layout.slice_len
    }

    /// The first byte: the same for as long as the memory lives.
    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The bytes.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY:
        // 1. The bytes are readable and initialised for as long as `owner` lives (the invariant of
        //    `ExclusiveMemory`), which `self` sees to.
        // 2. Nobody writes them while `self` is borrowed: no other value gives access (the
        //    invariant). An operation that the kernel does owns its slice, and lends it nobody.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len()) }
    }

    /// The bytes, to write.
    #[inline]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY:
        // 1. As for `bytes`; they are writable too, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len()) }
    }

    /// The address of `bytes` of it, for the kernel, and their number; `None` where they are not
    /// all in the slice.
    #[inline]
    pub(crate) fn part(&self, bytes: &Range<usize>) -> Option<(*mut u8, u32)> {
        if bytes.start > bytes.end || bytes.end > self.len() {
            return None;
        }
        let len = u32::try_from(bytes.end - bytes.start).ok()?;
        Some((self.start.as_ptr().wrapping_add(bytes.start), len))
    }
}

impl Drop for Slice {
    #[inline]
    fn drop(&mut self) {
        let mut free = self.owner.free.lock();
        // There is room for all.
        free.indices.push(self.index);
        let waiter = free.next_waiter();
        drop(free);
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::thread;

    use super::*;
    use crate::{Memory, MemoryKind};

    /// Whole pages of every kernel.
    const PAGE: usize = 64 << 10;
    const M2: usize = 2 << 20;
    const G1: usize = 1 << 30;

    fn slices(slice_len: usize, count: u32) -> Arc<Slices> {
        let layout = Layout::new(slice_len, count, PAGE, 16 * PAGE).unwrap();
        let len = layout.memory_len().unwrap().next_multiple_of(PAGE);
        let memory = Memory::new(MemoryKind::Base, u64::try_from(len).unwrap()).unwrap();
        Slices::new(memory.try_into().unwrap(), layout).unwrap()
    }

    #[test]
    fn no_slice_is_in_two_chunks_and_no_page_in_two_buffers() {
        for slice_len in [PAGE, 3 * PAGE, 5 * M2 / 3 / PAGE * PAGE, 600 << 20, G1] {
            let layout = Layout::new(slice_len, 5000, M2, G1).unwrap();
            let len = layout.memory_len().unwrap();
            let (mut at, mut chunk) = (0, layout.chunk(0, len).unwrap());
            assert_eq!(chunk.start, 0);
            for index in 0..5000 {
                let start = layout.offset(index).unwrap();
                assert!(start >= at);
                at = start + slice_len;
                if start >= chunk.end {
                    assert_eq!(chunk.end % M2, 0);
                    chunk = layout.chunk(layout.chunk_of(index), len).unwrap();
                    assert!(chunk.end - chunk.start <= G1);
                }
                assert!(chunk.start <= start && at <= chunk.end, "{slice_len:#x} {index}");
            }
            assert_eq!(at, len);
            assert_eq!(layout.chunks(), layout.chunk_of(4999) + 1);
        }
    }

    #[test]
    fn as_many_slices_as_fit_and_not_one_more() {
        for (slice_len, len) in [(PAGE, PAGE), (3 * PAGE, 16 * PAGE), (3 * PAGE, 47 * PAGE)] {
            let layout = Layout::fitting(slice_len, len, PAGE, 16 * PAGE).unwrap();
            assert!(layout.memory_len().unwrap() <= len);
            let more = Layout::new(slice_len, layout.count + 1, PAGE, 16 * PAGE).unwrap();
            assert!(more.memory_len().unwrap() > len);
        }
        assert_eq!(Layout::fitting(PAGE, PAGE - 1, PAGE, 16 * PAGE), None);
    }

    #[test]
    fn impossible_layouts_are_refused() {
        assert_eq!(Layout::new(0, 1, PAGE, G1), None);
        assert_eq!(Layout::new(PAGE, 0, PAGE, G1), None);
        assert_eq!(Layout::new(G1 + PAGE, 1, PAGE, G1), None);
        let layout = Layout::new(PAGE, 3, PAGE, G1).unwrap();
        let memory = Memory::new(MemoryKind::Base, 2 * (64 << 10)).unwrap().try_into().unwrap();
        assert_eq!(Slices::new(memory, layout).unwrap_err(), SlicesError::TooShort);
    }

    #[test]
    fn the_slice_given_back_last_is_taken_first() {
        let slices = slices(PAGE, 40);
        let mut taken: Vec<_> = (0..40).map(|_| slices.take().unwrap()).collect();
        assert!(slices.take().is_none());
        assert_eq!(slices.free(), 0);
        let indices: BTreeSet<_> = taken.iter().map(Slice::index).collect();
        assert_eq!(indices.len(), 40);
        let index = taken.swap_remove(7).index();
        assert_eq!(slices.take().unwrap().index(), index);
        drop(taken);
        assert_eq!(slices.free(), 40);
    }

    #[test]
    fn threads_never_share_a_slice() {
        let slices = slices(PAGE, 6);
        thread::scope(|scope| {
            for lane in 0..4_u8 {
                let slices = &slices;
                scope.spawn(move || {
                    let mut held = Vec::new();
                    for round in 0..20_000 {
                        if round % 3 == 2 {
                            held.pop();
                        } else if let Some(mut slice) = slices.take() {
                            slice.bytes_mut()[..64].fill(lane);
                            held.push(slice);
                        }
                        for slice in &held {
                            assert!(slice.bytes()[..64].iter().all(|byte| *byte == lane));
                        }
                    }
                });
            }
        });
        assert_eq!(slices.free(), 6);
    }
}
