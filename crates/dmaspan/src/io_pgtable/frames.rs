//! Table memory of a kernel: [`FrameTables`], over any allocator of frames.
//!
//! The one hard part of table memory is that lists of tables are linked neither through the tables,
//! which hardware reads until they are free, nor by memory that is allocated when a table leaves
//! the tree. So each table comes with a node, a few bytes of the heap, that is allocated when the
//! table is. Nodes are alike: while a table is part of a tree its node waits with all others, and
//! whatever table leaves a tree takes any of them. There are as many nodes as tables, and nothing
//! has to be looked up.

use alloc::alloc::{alloc, dealloc};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::alloc::Layout;
use core::fmt;
use core::mem;
use core::ptr::NonNull;
use core::slice;

use lock_api::{Mutex, RawMutex};

use super::memory::{Fresh, NoTables, TableAddr, TableMemory, TableShape};
use super::word::Word;
use crate::addr::PhysAddr;
use crate::lg2;
use crate::promise::Promise;
use crate::prot::Coherency;
pub use words::FrameWords;

mod words;

/// log2 of the most tables that share a frame.
const MOST_LG2: u32 = 6;

/// A kernel's allocator of frames, and its direct map: what page tables are made of.
///
/// # Safety
///
/// The implementer promises:
///
/// 1. Frames that [`allocate`](Self::allocate) returns are of the shape asked for and nobody else's
///    until they are freed; their bytes are initialised, whatever they are.
/// 2. [`pointer`](Self::pointer) leads to the memory that hardware reads at that address, mapped
///    for reads and writes by all CPUs: for all frames that were allocated and not freed, also when
///    the implementer was dropped. What was allocated at once is one piece of memory behind the
///    pointer to any of its bytes, whose low bits, those of a frame, are the address's.
/// 3. Asked for other memory that the CPU may read and write, as for a driver's buffer, `pointer`
///    leads to it as far as that frame goes, or it panics.
///
/// The callers, [`FrameTables`], [`FrameMemory`](crate::dma::FrameMemory) and
/// [`FrameBounce`](crate::dma::FrameBounce), promise that they free frames once, in the size and
/// alignment that they were allocated in, and when neither hardware nor a CPU reads them.
///
/// # Examples
///
/// A process that plays a kernel, with the heap as its frames:
///
/// ```
/// use core::ptr::NonNull;
/// use std::alloc::{Layout, alloc_zeroed, dealloc};
///
/// use dmaspan::io_pgtable::{FrameAlloc, FrameTables, PageTable, TableShape, VtdSs, VtdSsConfig};
/// use dmaspan::platform::Flag;
/// use dmaspan::{PhysAddr, Promise};
///
/// struct Heap;
///
/// fn layout(shape: TableShape) -> Layout {
///     Layout::from_size_align(1 << shape.lg2_size, 1 << shape.lg2_align).unwrap()
/// }
///
/// // SAFETY: 1. The heap gives each frame once, zeroed. 2. Physical addresses are those of the
/// // process here, where all of its threads find the heap. 3. And all else.
/// unsafe impl FrameAlloc for Heap {
///     type Lock = Flag;
///
///     fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
///         // SAFETY: the size is not 0.
///         let frames = NonNull::new(unsafe { alloc_zeroed(layout(shape)) })?;
///         Some(PhysAddr::new(frames.as_ptr().expose_provenance() as u64))
///     }
///
///     fn free(&self, _promise: Promise<'_>, frames: PhysAddr, shape: TableShape) {
///         // SAFETY: they were allocated above in this shape, and nobody uses them.
///         unsafe { dealloc(self.pointer(frames).as_ptr(), layout(shape)) }
///     }
///
///     fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
///         let pointer = core::ptr::with_exposed_provenance_mut(paddr.get() as usize);
///         NonNull::new(pointer).expect("no frame is at 0")
///     }
/// }
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let table = PageTable::new(VtdSs::new(VtdSsConfig::new(48, 48))?, FrameTables::new(Heap))?;
///     assert_eq!(table.root().get() % 4096, 0);
///     Ok(())
/// }
/// ```
#[expect(unsafe_code, reason = "a contract about memory that hardware reads")]
pub unsafe trait FrameAlloc: Send + Sync {
    /// The lock around nodes, held for a few instructions, and where tables share frames also
    /// while the heap is asked for a larger list of those. A kernel's keeps interrupts off where
    /// mappings are made or ended in interrupts.
    type Lock: RawMutex + Send + Sync;

    /// log2 of the bytes of a frame, the least that is allocated: 12 or more.
    const FRAME_LG2: u32 = 12;

    /// Allocates contiguous frames: `2^lg2_size` bytes, a frame at least, aligned to `2^lg2_align`,
    /// a frame at least, whose last byte is at or below `max_paddr`. `None` where there are none,
    /// as for a size that no machine has.
    fn allocate(&self, shape: TableShape) -> Option<PhysAddr>;

    /// Takes frames back. The caller promises that `frames` was allocated in this size and
    /// alignment, was not freed since, and that nobody reads it, hardware included. The shape's
    /// `max_paddr` may be another than when it was allocated.
    ///
    /// # Context
    ///
    /// Wherever mappings are ended, possibly with interrupts off.
    fn free(&self, promise: Promise<'_>, frames: PhysAddr, shape: TableShape);

    /// Where the CPU finds physical memory: the direct map. It is asked at each step of a walk, so
    /// that it is arithmetic where that is possible. The address may be any
    /// [where a device writes tables](TableMemory#corrupt-tables).
    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8>;

    /// Returns whether hardware's walks see the CPU's caches; the answer does not change.
    fn coherency(&self) -> Coherency {
        Coherency::Coherent
    }

    /// Writes the cache lines of `len` bytes at `start` back to memory, all before it returns. It
    /// is called only where [`coherency`](Self::coherency) says that hardware does not see them.
    fn write_back(&self, _start: NonNull<u8>, _len: usize) {}
}

macro_rules! through {
    ($($pointer:ty),+) => { $(
        #[expect(unsafe_code, reason = "a pointer to an allocator of frames is one")]
        // SAFETY: each method is that of what the pointer leads to, which keeps all promises.
        unsafe impl<A: FrameAlloc> FrameAlloc for $pointer {
            type Lock = A::Lock;

            const FRAME_LG2: u32 = A::FRAME_LG2;

            fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
                (**self).allocate(shape)
            }

            fn free(&self, promise: Promise<'_>, frames: PhysAddr, shape: TableShape) {
                (**self).free(promise, frames, shape);
            }

            #[inline]
            fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
                (**self).pointer(paddr)
            }

            fn coherency(&self) -> Coherency {
                (**self).coherency()
            }

            fn write_back(&self, start: NonNull<u8>, len: usize) {
                (**self).write_back(start, len);
            }
        }
    )+ };
}

through!(Arc<A>, &'static A);

/// Table memory over an allocator of frames.
///
/// A table has frames of its own, or shares one where it is smaller, as Arm's short descriptors
/// are. Frames go back to the allocator with the sync that ends their use, which may be in an
/// interrupt: nothing is kept, nothing is allocated, and a lock is held for a few instructions a
/// table. Beside its frames a table takes two words of the heap.
///
/// Share it by an [`Arc`](alloc::sync::Arc), or a `&'static`, between all tables of a kernel.
pub struct FrameTables<A: FrameAlloc> {
    frames: A,
    /// As many nodes as tables are part of trees.
    spare: Mutex<A::Lock, FrameList>,
    /// By how many share a frame, as log2 less one, the frames that tables share.
    shared: [Mutex<A::Lock, Shares>; MOST_LG2 as usize],
}

/// What a table is linked by while it is part of no tree.
struct Node {
    next: Option<NonNull<Node>>,
    paddr: PhysAddr,
}

/// Tables in no tree. Dropped, it leaks them.
#[derive(Default)]
pub struct FrameList {
    first: Option<NonNull<Node>>,
    /// Of the last one, where there is any.
    last: Option<NonNull<Node>>,
}

/// Frames that several tables of one size share, in the order of their addresses.
#[derive(Default)]
struct Shares {
    frames: Vec<Share>,
    /// No frame before this one has a place.
    first_free: usize,
}

/// A frame, and which of its places are free, bit n for the n-th.
struct Share {
    frame: PhysAddr,
    free: u64,
}

impl<A: FrameAlloc> FrameTables<A> {
    /// Table memory over `frames`.
    pub fn new(frames: A) -> Self {
        const { assert!(A::FRAME_LG2 >= 12 && A::FRAME_LG2 < 32) };
        Self {
            frames,
            spare: Mutex::new(FrameList::default()),
            shared: [(); MOST_LG2 as usize].map(|()| Mutex::new(Shares::default())),
        }
    }

    /// The allocator.
    pub fn frames(&self) -> &A {
        &self.frames
    }

    /// What is allocated for a table of `shape`, and log2 of how many share it.
    fn whole_of(shape: TableShape) -> (TableShape, u32) {
        let lg2 = shape.lg2_size.max(shape.lg2_align);
        let share_lg2 = A::FRAME_LG2.saturating_sub(lg2).min(MOST_LG2);
        let lg2_size = shape.lg2_size.max(A::FRAME_LG2);
        let lg2_align = shape.lg2_align.max(A::FRAME_LG2);
        (TableShape { lg2_size, lg2_align, ..shape }, share_lg2)
    }

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        let (whole, share_lg2) = Self::whole_of(shape);
        let Some(shares) = self.shares(share_lg2) else { return self.frames.allocate(whole) };
        let place_lg2 = A::FRAME_LG2 - share_lg2;
        if let Some(place) = shares.lock().take(place_lg2, A::FRAME_LG2, shape.max_paddr) {
            return Some(place);
        }
        let frame = self.frames.allocate(whole)?;
        let added = shares.lock().add(frame, share_lg2);
        if added.is_none() {
            self.frames.free(Promise::kept(), frame, whole);
        }
        added
    }

    /// A table and a node for it.
    fn one(&self, shape: TableShape) -> Option<(NonNull<Node>, PhysAddr)> {
        let paddr = self.allocate(shape)?;
        let node = Node::new(paddr);
        if node.is_none() {
            self.give_back(paddr, shape);
        }
        node.map(|node| (node, paddr))
    }

    fn give_back_all(&self, shape: TableShape, mut list: FrameList) {
        while let Some((node, paddr)) = list.pop() {
            Node::free(node);
            self.give_back(paddr, shape);
        }
    }

    fn give_back(&self, paddr: PhysAddr, shape: TableShape) {
        let (whole, share_lg2) = Self::whole_of(shape);
        let frames = match self.shares(share_lg2) {
            None => Some(paddr),
            Some(shares) => shares.lock().put(paddr, share_lg2, A::FRAME_LG2),
        };
        if let Some(frames) = frames {
            self.frames.free(Promise::kept(), frames, whole);
        }
    }

    /// The frames that `2^share_lg2` tables share each; `None` for a table of its own frames.
    fn shares(&self, share_lg2: u32) -> Option<&Mutex<A::Lock, Shares>> {
        self.shared.get((share_lg2 as usize).checked_sub(1)?)
    }
}

impl Shares {
    /// Takes a place of `2^place_lg2` bytes in a frame that lies below `max_paddr`.
    fn take(&mut self, place_lg2: u32, frame_lg2: u32, max_paddr: PhysAddr) -> Option<PhysAddr> {
        let behind = self.frames.get(self.first_free..).unwrap_or(&[]);
        self.first_free += behind.iter().take_while(|share| share.free == 0).count();
        let share = self.frames.get_mut(self.first_free)?;
        if share.frame.checked_add(lg2::mask(frame_lg2)).is_none_or(|last| last > max_paddr) {
            // They are in order: no other one does.
            return None;
        }
        let place = share.free.trailing_zeros();
        share.free &= share.free - 1;
        share.frame.checked_add(u64::from(place) << place_lg2)
    }

    /// Adds a frame, and takes its first place; `None` where the heap has no room for it.
    fn add(&mut self, frame: PhysAddr, share_lg2: u32) -> Option<PhysAddr> {
        self.frames.try_reserve(1).ok()?;
        let at = self.frames.partition_point(|share| share.frame < frame);
        let all = lg2::mask(1 << share_lg2);
        self.frames.insert(at, Share { frame, free: all & !1 });
        self.first_free = self.first_free.min(at);
        Some(frame)
    }

    /// Takes a place back, and returns its frame where no other place of it is in use.
    fn put(&mut self, place: PhysAddr, share_lg2: u32, frame_lg2: u32) -> Option<PhysAddr> {
        let frame = PhysAddr::new(lg2::align_down(place.get(), frame_lg2));
        // What is no table of this memory takes a corrupt entry to get here, and leaks.
        let at = self.frames.binary_search_by_key(&frame, |share| share.frame).ok()?;
        let number = (place.get() - frame.get()) >> (frame_lg2 - share_lg2);
        let share = self.frames.get_mut(at)?;
        share.free |= lg2::size(u32::try_from(number).ok()?);
        self.first_free = self.first_free.min(at);
        if share.free != lg2::mask(1 << share_lg2) {
            return None;
        }
        self.frames.remove(at);
        Some(frame)
    }
}

#[expect(unsafe_code, reason = "lists of nodes of the heap")]
mod nodes {
    use super::*;

    // SAFETY: a list owns its nodes.
    unsafe impl Send for FrameList {}

    impl Node {
        /// A node of the heap, or `None` where it has no memory.
        pub(super) fn new(paddr: PhysAddr) -> Option<NonNull<Self>> {
            // SAFETY: a node has a size.
            let node = NonNull::new(unsafe { alloc(Layout::new::<Self>()) })?.cast::<Self>();
            // SAFETY: it was allocated for a node.
            unsafe { node.write(Self { next: None, paddr }) };
            Some(node)
        }

        /// Gives a node back that is in no list.
        pub(super) fn free(node: NonNull<Self>) {
            // SAFETY: 1. `new` allocated it with this layout. 2. It was taken out of the only list
            // that it was in, and is the caller's alone.
            unsafe { dealloc(node.cast().as_ptr(), Layout::new::<Self>()) }
        }
    }

    impl FrameList {
        /// Puts a node that is in no list to the front, for the table at `paddr`.
        pub(super) fn push(&mut self, mut node: NonNull<Node>, paddr: PhysAddr) {
            // SAFETY: whoever took it out of its list, or made it, has it alone.
            let inner = unsafe { node.as_mut() };
            *inner = Node { next: self.first, paddr };
            self.first = Some(node);
            self.last.get_or_insert(node);
        }

        /// Takes the first node out, with its table.
        pub(super) fn pop(&mut self) -> Option<(NonNull<Node>, PhysAddr)> {
            let node = self.first?;
            // SAFETY: the list owns its nodes, and is borrowed.
            let &Node { next, paddr } = unsafe { node.as_ref() };
            self.first = next;
            if next.is_none() {
                self.last = None;
            }
            Some((node, paddr))
        }

        /// Moves all nodes of another list behind those of this one.
        pub(super) fn append(&mut self, mut other: Self) {
            // What is dropped in the end is empty.
            let (first, last) = (other.first.take(), other.last.take());
            match self.last {
                // SAFETY: the list owns its nodes, and is borrowed.
                Some(mut end) => unsafe { end.as_mut() }.next = first,
                None => self.first = first,
            }
            self.last = last.or(self.last);
        }
    }
}

impl Drop for FrameList {
    fn drop(&mut self) {
        while let Some((node, _leaked)) = self.pop() {
            Node::free(node);
        }
    }
}

#[expect(unsafe_code, reason = "frames become tables, and tables are found by the direct map")]
// SAFETY: 1. A fresh table is a place that was in no other list and is in none now; the allocator
// promises its shape, what hardware finds there, and bytes. Places do not overlap: a frame is one
// table's, or each of its places one's. 2. `entries` is the direct map's memory at that address, of
// the size that the table was taken with. 3. Lists are nodes of the heap, and nothing else of this
// writes a table. 4. A dropped list frees nodes alone; when this is dropped, no frames are freed,
// and the allocator keeps them where they are.
unsafe impl<W: Word, A: FrameAlloc> TableMemory<W> for FrameTables<A> {
    type List = FrameList;

    fn reserve(&self, shape: TableShape, count: usize) -> Result<FrameList, NoTables> {
        let mut list = FrameList::default();
        for _ in 0..count {
            let Some((node, paddr)) = self.one(shape) else {
                self.give_back_all(shape, list);
                return Err(NoTables { asked: count });
            };
            list.push(node, paddr);
        }
        Ok(list)
    }

    fn take(
        &self,
        _promise: Promise<'_>,
        shape: TableShape,
        list: &mut FrameList,
    ) -> Option<Fresh<'_, W>> {
        let (node, paddr) = list.pop()?;
        self.spare.lock().push(node, paddr);
        let words = 1usize << (shape.lg2_size - W::LG2_BYTES);
        let start = self.frames.pointer(paddr).cast::<W>();
        // SAFETY: 1. The table was in `list` and is in no list now, so it is this call's alone
        // until it is published, which ends the borrow. 2. It has as many words, one behind the
        // other and aligned, as the allocator promises, and they are initialised.
        let words = unsafe { slice::from_raw_parts_mut(start.as_ptr(), words) };
        // SAFETY: they are the table's at that address, as was just said.
        Some(unsafe { Fresh::new(paddr, words) })
    }

    #[inline(always)]
    fn coherency(&self) -> Coherency {
        self.frames.coherency()
    }

    #[inline]
    fn publish(&self, mut fresh: Fresh<'_, W>) {
        if self.frames.coherency() == Coherency::NonCoherent {
            let words = fresh.words();
            let len = mem::size_of_val(words);
            self.frames.write_back(NonNull::from(words).cast(), len);
        }
    }

    #[inline(always)]
    fn entries(&self, table: &TableAddr) -> &[W::Atomic] {
        let start = self.frames.pointer(table.paddr()).cast::<W::Atomic>();
        let words = 1usize << (table.lg2_size() - W::LG2_BYTES);
        // SAFETY: the table was published and not freed, as the walker, who makes its address,
        // promises: so its words are mapped and aligned, and all access to them is atomic.
        unsafe { slice::from_raw_parts(start.as_ptr(), words) }
    }

    #[inline(always)]
    fn written(&self, _promise: Promise<'_>, entries: &[W::Atomic]) {
        if self.frames.coherency() == Coherency::NonCoherent {
            self.frames.write_back(NonNull::from(entries).cast(), mem::size_of_val(entries));
        }
    }

    fn retire(&self, list: &mut FrameList, table: TableAddr) {
        // There is one for each table. Only where a device wrote links there may be none left.
        let node = self.spare.lock().pop();
        if let Some((node, _)) = node {
            list.push(node, table.paddr());
        }
    }

    fn append(&self, _promise: Promise<'_>, list: &mut FrameList, other: FrameList) {
        list.append(other);
    }

    fn free(&self, _promise: Promise<'_>, shape: TableShape, list: FrameList) {
        self.give_back_all(shape, list);
    }
}

impl<A: FrameAlloc> fmt::Debug for FrameTables<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameTables").finish_non_exhaustive()
    }
}

impl fmt::Debug for FrameList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrameList({})", if self.first.is_some() { "tables" } else { "empty" })
    }
}

#[cfg(test)]
mod tests;
