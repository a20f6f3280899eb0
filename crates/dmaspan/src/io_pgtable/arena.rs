//! Table memory of a process: an [`Arena`] that the tables of its domains come from.
//!
//! A table's physical address is its place in the arena behind a base that the caller chooses: what
//! a software IOMMU follows, or, in [memory that hardware reads](Arena::over), what hardware does.
//!
//! The arena knows the state of every table. [`Arena::load`], which reads as hardware does, refuses
//! a table that was freed, so a test finds a walk through one that was freed too early. Where a
//! device writes tables, a link may lead anywhere: the arena enters and detaches no table that is
//! part of no tree, so that none is freed twice.

use alloc::alloc::{alloc_zeroed, dealloc, handle_alloc_error};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::alloc::Layout;
use core::fmt;
use core::mem;
use core::ptr::NonNull;
use core::slice;
// Not loom's, which are no plain words: its tests have table memory of their own.
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use lock_api::Mutex;

use super::memory::{Fresh, NoTables, TableAddr, TableMemory, TableShape};
use super::word::Word;
use crate::addr::PhysAddr;
use crate::lg2;
use crate::platform::Flag;
use crate::promise::Promise;
use crate::prot::Coherency;

/// log2 of the smallest piece that the arena hands out.
const UNIT_LG2: u32 = 10;
/// log2 of the largest table, and the alignment of the arena's memory.
const LARGEST_LG2: u32 = 21;
const CLASSES: usize = (LARGEST_LG2 - UNIT_LG2) as usize + 1;
/// The end of a list of units.
const NONE: u32 = u32::MAX;

/// What a table is at the moment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// No table, or one that was freed.
    Free = 0,
    /// In a list or being filled, through plain memory: nobody else reads it.
    Reserved = 1,
    /// Detached; hardware may still read it.
    Retired = 2,
    /// Part of a tree.
    Published = 3,
}

/// The reason why a word of table memory cannot be read as hardware would read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotInTree {
    /// No table memory is at this address, or the address is not that of a word.
    #[error("no table memory is at {paddr}")]
    Outside {
        /// The word's address.
        paddr: PhysAddr,
    },
    /// The address lies in a table that was freed, or that nothing leads to yet.
    #[error("the table at {paddr} is part of no tree: it was freed, or not yet published")]
    Freed {
        /// The word's address.
        paddr: PhysAddr,
    },
    /// The table's words have another length: to hardware it is a table of another format.
    #[error("the table at {paddr} has words of {} bytes: read it by those", 1 << lg2_bytes)]
    OtherWord {
        /// The word's address.
        paddr: PhysAddr,
        /// log2 of the bytes of the table's words.
        lg2_bytes: u32,
    },
}

/// Memory for tables of all sizes, for a process. Clones share it.
///
/// It finds a table by arithmetic and hands one out with a short lock. Memory is used once tables
/// lie in it, and freed tables are used again, the last one first.
///
/// A kernel, whose tables are to be where its other memory is, uses
/// [`FrameTables`](super::FrameTables).
///
/// # Examples
///
/// ```
/// use dmaspan::PhysAddr;
/// use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
///     let table = PageTable::new(X86_64::new(X86_64Config::new(48, 48))?, tables.clone())?;
///     assert_eq!(table.root(), PhysAddr::new(0x4000_0000));
///     assert_eq!(tables.tables(), 1);
///     drop(table);
///     assert_eq!(tables.tables(), 0);
///     Ok(())
/// }
/// ```
#[derive(Clone)]
pub struct Arena {
    // Copied out of `shared`, so that finding a table reads no other memory but its tag.
    base: u64,
    units: u64,
    memory: Memory,
    tags: Tags,
    shared: Arc<Shared>,
}

struct Shared {
    /// What the arena's memory lies in.
    block: Block,
    /// A number that no other arena of this process has or had.
    id: u64,
    /// For each unit, the next one of its list: never stored in the tables.
    next: Box<[AtomicU32]>,
    /// For each unit a [`Tag`].
    tags: Box<[AtomicU8]>,
    /// Locked also while a word is read as hardware reads it, and where a table becomes one that is
    /// filled: see [`Arena::word`].
    free: Mutex<Flag, Free>,
}

/// What a unit is of: log2 of the size of the table that it belongs to, 0 while it never did; above
/// it a bit for the words that the table was last published with, since all accesses to a word are
/// of one size; and above that the [`State`] of the table that begins with it. A unit never changes
/// its size again.
///
/// A published table is above every other one, and of those with the same words a larger one above
/// a smaller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Tag(u8);

impl Tag {
    const WORD_SHIFT: u32 = 5;
    const STATE_SHIFT: u32 = 6;
    /// More than log2 of any table's size.
    const LARGEST: u32 = (1 << Self::WORD_SHIFT) - 1;

    /// What the first unit of a published table is, whose words are `W`.
    #[inline(always)]
    fn published<W: Word>(lg2_size: u32) -> Self {
        // There are two words: `u32` and `u64`.
        let word = (W::LG2_BYTES - u32::LG2_BYTES) << Self::WORD_SHIFT;
        Self((lg2_size | word).to_le_bytes()[0]).with(State::Published)
    }

    fn with(self, state: State) -> Self {
        Self(self.0 & ((1 << Self::STATE_SHIFT) - 1) | (state as u8) << Self::STATE_SHIFT)
    }

    fn lg2_size(self) -> u32 {
        u32::from(self.0) & Self::LARGEST
    }

    /// log2 of the bytes of the table's words, where it is or was published.
    fn lg2_word(self) -> u32 {
        u32::LG2_BYTES + (u32::from(self.0) >> Self::WORD_SHIFT & 1)
    }

    fn is(self, state: State) -> bool {
        self.0 >> Self::STATE_SHIFT == state as u8
    }
}

/// Memory that an arena is in.
enum Block {
    /// Allocated for it.
    Own { start: NonNull<u8>, layout: Layout },
    /// Kept alive by somebody else's value.
    Lent { keep: Option<Box<dyn Send + Sync>> },
}

struct Free {
    /// By size, the first unit of the table freed last: its lines are still in the cache.
    heads: [u32; CLASSES],
    /// The first unit that was never used.
    unused: u32,
    /// Tables handed out, by size.
    in_use: [usize; CLASSES],
}

/// The least memory that an arena asks for. glibc takes less than 32 MiB from what was used before,
/// and writes zeroes to all of it; more comes from the system, zeroed where it is touched.
const LEAST_FRESH: usize = 33 << 20;
/// The most bytes of an arena: units have numbers of 31 bits.
const MOST_BYTES: u64 = lg2::size(UNIT_LG2 + 31);
/// The highest base there is.
const LAST_BASE: u64 = u64::MAX - lg2::mask(LARGEST_LG2);

/// The arena's first byte.
#[derive(Clone, Copy)]
struct Memory(NonNull<u8>);

/// The first of an arena's tags.
#[derive(Clone, Copy)]
struct Tags(NonNull<AtomicU8>);

#[expect(unsafe_code, reason = "the pointers are to memory that all threads may use")]
mod threads {
    use super::{Block, Memory, Tags};

    // SAFETY: 1. The pointer is only used through `Arena`'s methods, which reach published tables
    // by atomics and unpublished ones through the one `Fresh` that owns them. 2. `Block` keeps the
    // memory until no `Arena` is left.
    unsafe impl Send for Memory {}
    // SAFETY: as for `Send`.
    unsafe impl Sync for Memory {}
    // SAFETY: it leads to atomics, and `Arena` keeps them by its `Shared`.
    unsafe impl Send for Tags {}
    // SAFETY: as for `Send`.
    unsafe impl Sync for Tags {}
    // SAFETY: its pointer is only used to free the memory when it is dropped.
    unsafe impl Send for Block {}
    // SAFETY: as for `Send`.
    unsafe impl Sync for Block {}
}

impl Drop for Block {
    #[expect(unsafe_code, reason = "gives the memory back that the constructor took")]
    fn drop(&mut self) {
        if let Self::Own { start, layout } = *self {
            // SAFETY: 1. `start` was allocated with `layout` by `Arena::new`. 2. Nothing borrows
            // from it: entries and fresh tables borrow from an `Arena`, which keeps it alive. 3.
            // Its addresses are the arena's own, so that no hardware reads it.
            unsafe { dealloc(start.as_ptr(), layout) }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Block::Lent { keep } = &mut self.block
            && self.free.get_mut().in_use.iter().any(|&tables| tables != 0)
        {
            // Tables leaked, because hardware may read them still: their memory stays.
            mem::forget(keep.take());
        }
    }
}

impl Arena {
    /// An arena of at least `bytes`, whose first table is at `base` or above. Memory is only used
    /// once tables lie in it.
    ///
    /// `base` is rounded up to 2 MiB and the size to whole KiB. An arena ends, however large it was
    /// to be, at the top of physical addresses, and has at most 2 TiB. No hardware knows its
    /// addresses: where one is to walk the tables, see [`over`](Self::over).
    ///
    /// # Panics
    ///
    /// As every collection does, where the process has no memory: a process that may not die of
    /// that uses [`try_new`](Self::try_new).
    pub fn new(base: PhysAddr, bytes: u64) -> Self {
        let Some(arena) = Self::try_new(base, bytes) else {
            let size = usize::try_from(bytes.min(MOST_BYTES)).unwrap_or(0);
            handle_alloc_error(Layout::array::<u8>(size).unwrap_or(Layout::new::<u8>()))
        };
        arena
    }

    /// [`new`](Self::new), or `None` where the process has no memory for it.
    #[expect(unsafe_code, reason = "table memory is shared by plain and by atomic access")]
    pub fn try_new(base: PhysAddr, bytes: u64) -> Option<Self> {
        let base = lg2::align_up(base.get(), LARGEST_LG2).unwrap_or(LAST_BASE);
        let bytes = lg2::align_up(bytes.clamp(1, MOST_BYTES), UNIT_LG2).unwrap_or(MOST_BYTES);
        let size = usize::try_from(bytes).ok()?;
        // Zeroed memory of a small alignment is memory that the system backs when it is touched; of
        // a large one it is all written at once. So the tables' alignment comes from room to spare;
        // and with as much behind the arena, a table that begins in it never ends outside.
        let room = size.checked_add(2 << LARGEST_LG2)?.max(LEAST_FRESH);
        let layout = Layout::from_size_align(room, 16).ok()?;
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let block = Block::Own { start, layout };
        let to_alignment = start.align_offset(1 << LARGEST_LG2);
        // SAFETY: the offset is below 2 MiB, and the block is larger than that.
        let memory = unsafe { start.add(to_alignment) };
        Self::at(memory, base, bytes, block)
    }

    /// An arena in the memory at `memory`, which hardware finds at `base`: `bytes` of it, of which
    /// the last 2 MiB stay unused, until `keep` is dropped. That happens with the last clone of the
    /// arena, or never where tables leaked, since hardware may read those for ever.
    ///
    /// `None` where either address is no multiple of 2 MiB, the size no multiple of 1 KiB, there
    /// are no more than 2 MiB or the physical addresses wrap, and where there is no memory for the
    /// arena's own records.
    ///
    /// # Safety
    ///
    /// Until `keep` is dropped the memory is mapped and nobody's but the arena's, apart from
    /// hardware that reads the tables in it. It is zeroed.
    #[expect(unsafe_code, reason = "the memory is somebody else's")]
    pub unsafe fn over(
        memory: NonNull<u8>,
        base: PhysAddr,
        bytes: u64,
        keep: Box<dyn Send + Sync>,
    ) -> Option<Self> {
        let usable = bytes.checked_sub(lg2::size(LARGEST_LG2)).filter(|&usable| usable > 0)?;
        base.checked_add(bytes - 1)?;
        let aligned = lg2::is_aligned(memory.addr().get() as u64, LARGEST_LG2)
            && lg2::is_aligned(base.get(), LARGEST_LG2)
            && lg2::is_aligned(bytes, UNIT_LG2);
        let block = Block::Lent { keep: Some(keep) };
        aligned.then(|| Self::at(memory, base.get(), usable.min(MOST_BYTES), block))?
    }

    /// An arena of `bytes` at `memory`, as far as there are addresses, behind which there are 2 MiB
    /// more of the block.
    fn at(memory: NonNull<u8>, base: u64, bytes: u64, block: Block) -> Option<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);

        // The last address of 64 bits is that of no table: sums do not wrap.
        let bytes = bytes.min(u64::MAX - base);
        let units = usize::try_from(bytes >> UNIT_LG2).ok()?;
        let free = Free { heads: [NONE; CLASSES], unused: 0, in_use: [0; CLASSES] };
        let shared = Shared {
            block,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            next: zeroed(units)?,
            tags: zeroed(units)?,
            free: Mutex::new(free),
        };
        let shared = Arc::new(shared);
        let tags = Tags(NonNull::from(&*shared.tags).cast());
        Some(Self { base, units: units as u64, memory: Memory(memory), tags, shared })
    }

    /// Returns how many tables are handed out, of all sizes.
    pub fn tables(&self) -> usize {
        self.shared.free.lock().in_use.iter().sum()
    }

    /// The bytes of the tables that are handed out.
    pub fn table_bytes(&self) -> u64 {
        let free = self.shared.free.lock();
        (UNIT_LG2..).zip(free.in_use).map(|(lg2, tables)| (tables as u64) << lg2).sum()
    }

    /// The word at `paddr` of a table that hardware may read, read as hardware reads it. It is what
    /// a software IOMMU follows, and what a test reads behind the tables' back.
    ///
    /// # Errors
    ///
    /// [`NotInTree`], where hardware would read something that is no table of a tree.
    pub fn load<W: Word>(&self, paddr: PhysAddr) -> Result<W, NotInTree> {
        self.word::<W, _>(paddr, W::load_link)
    }

    /// Replaces the word at `paddr` by `new` where it is `old`, as hardware marks an entry, and
    /// returns the word found. The caller promises that it only sets or clears what hardware may
    /// change by itself: accessed flags and dirty bits.
    ///
    /// # Errors
    ///
    /// [`NotInTree`], where hardware would write something that is no table of a tree.
    pub fn exchange<W: Word>(
        &self,
        _promise: Promise<'_>,
        paddr: PhysAddr,
        old: W,
        new: W,
    ) -> Result<W, NotInTree> {
        self.word::<W, _>(paddr, |word| W::replace(word, old, new).err().unwrap_or(old))
    }

    fn paddr_of(&self, unit: u32) -> PhysAddr {
        PhysAddr::new(self.base + (u64::from(unit) << UNIT_LG2))
    }

    fn unit_of(&self, paddr: PhysAddr) -> u32 {
        u32::try_from(paddr.get().wrapping_sub(self.base) >> UNIT_LG2).unwrap_or(NONE)
    }

    /// The offset in the arena of a table that is part of a tree, of words `W`, and has at least so
    /// many bytes; `None` where there is no such table.
    #[inline(always)]
    fn published<W: Word>(&self, table: &TableAddr) -> Option<u64> {
        let offset = table.paddr().get().wrapping_sub(self.base);
        // Beyond all units, too, for what is no multiple of one.
        let unit = offset.rotate_right(UNIT_LG2);
        if unit >= self.units {
            return None;
        }
        let tag = Tag(self.tag_of(usize::try_from(unit).unwrap_or(0)).load(Ordering::Acquire));
        let as_large = Tag::published::<W>(table.lg2_size())..=Tag::published::<W>(Tag::LARGEST);
        as_large.contains(&tag).then_some(offset)
    }

    /// The tag of one of the arena's units.
    #[expect(unsafe_code, reason = "the arena's own memory, without a look for where it is")]
    #[inline(always)]
    fn tag_of(&self, unit: usize) -> &AtomicU8 {
        debug_assert!((unit as u64) < self.units);
        // SAFETY: the caller saw that it is below `units`, and there are as many tags.
        let tag = unsafe { self.tags.0.add(unit) };
        // SAFETY: it leads to one of the tags, which `shared` keeps where they are.
        unsafe { tag.as_ref() }
    }

    /// A pointer to a place in the arena; `offset` is within it.
    #[expect(unsafe_code, reason = "a place in the arena's memory")]
    #[inline(always)]
    fn pointer(&self, offset: u64) -> NonNull<u8> {
        debug_assert!(offset < self.units << UNIT_LG2);
        let offset = usize::try_from(offset).unwrap_or(0);
        // SAFETY: every caller got `offset` from a unit of the arena, so it lies in the one
        // allocation that `memory` points to.
        unsafe { self.memory.0.add(offset) }
    }
}

impl Shared {
    fn tag(&self, unit: u32) -> Tag {
        Tag(self.tags[unit as usize].load(Ordering::Acquire))
    }

    /// Sets a table's state, which no other thread does at the moment. A thread that sees the
    /// state sees how the table was filled.
    fn set(&self, unit: u32, state: State) {
        self.tags[unit as usize].store(self.tag(unit).with(state).0, Ordering::Release);
    }

    /// Makes a table part of a tree whose words are `W`, as [`set`](Self::set) does.
    fn publish<W: Word>(&self, unit: u32) {
        let tag = Tag::published::<W>(self.tag(unit).lg2_size());
        self.tags[unit as usize].store(tag.0, Ordering::Release);
    }

    /// Takes one table of a size, of those freed before or from memory never used.
    fn take_free(&self, free: &mut Free, lg2_size: u32) -> Option<u32> {
        let class = class_of(lg2_size);
        let unit = free.heads[class];
        if unit != NONE {
            free.heads[class] = self.next[unit as usize].load(Ordering::Relaxed);
            return Some(unit);
        }
        let units = 1u32 << (lg2_size - UNIT_LG2);
        let unit = free.unused.checked_next_multiple_of(units)?;
        let behind = unit.checked_add(units).filter(|&end| end as usize <= self.next.len())?;
        let tag = Tag::published::<u32>(lg2_size).with(State::Free);
        for unit in unit..behind {
            self.tags[unit as usize].store(tag.0, Ordering::Relaxed);
        }
        free.unused = behind;
        Some(unit)
    }

    fn put_free(&self, free: &mut Free, lg2_size: u32, unit: u32) {
        let head = &mut free.heads[class_of(lg2_size)];
        self.next[unit as usize].store(*head, Ordering::Relaxed);
        self.set(unit, State::Free);
        *head = unit;
    }
}

/// Tables in no tree. Dropped, it leaks them; so does an arena that is given another one's list.
#[derive(Debug)]
pub struct ArenaList {
    first: u32,
    last: u32,
    /// Whose tables are in it, once one was.
    owner: u64,
}

impl Default for ArenaList {
    fn default() -> Self {
        Self { first: NONE, last: NONE, owner: 0 }
    }
}

impl ArenaList {
    fn push(&mut self, shared: &Shared, unit: u32) {
        if self.first == NONE {
            self.last = unit;
            self.owner = shared.id;
        } else if self.owner != shared.id {
            // Another arena's list: the table leaks.
            return;
        }
        shared.next[unit as usize].store(self.first, Ordering::Relaxed);
        self.first = unit;
    }

    fn pop(&mut self, shared: &Shared) -> Option<u32> {
        let unit = self.first;
        if unit == NONE || self.owner != shared.id {
            return None;
        }
        self.first = shared.next[unit as usize].load(Ordering::Relaxed);
        Some(unit)
    }
}

#[expect(unsafe_code, reason = "the arena keeps the contract of table memory")]
// SAFETY: 1. A fresh table is a unit that was in no other list and is in none now, its memory is
// the arena's at its address, and its size and alignment are the shape's: units of a size begin at
// multiples of it, and the base is aligned to the largest. 2. `entries` computes the place from the
// address alone, where a published table begins there; tables of the arena do not overlap, since a
// unit keeps its size. 3. Lists are linked through `next`, not through the tables. 4. A dropped
// list leaves its units in no list, and memory that hardware may read stays where tables leaked in
// it: see `Shared`. 5. Clones share all of it.
unsafe impl<W: Word> TableMemory<W> for Arena {
    type List = ArenaList;

    #[inline(always)]
    fn coherency(&self) -> Coherency {
        Coherency::Coherent
    }

    fn reserve(&self, shape: TableShape, count: usize) -> Result<ArenaList, NoTables> {
        let lg2_size = shape.lg2_size.max(UNIT_LG2);
        let mut list = ArenaList::default();
        if count == 0 {
            return Ok(list);
        }
        if lg2_size > LARGEST_LG2 || shape.lg2_align > LARGEST_LG2 {
            return Err(NoTables { asked: count });
        }
        // An alignment above the size takes the smallest larger table.
        let lg2_size = lg2_size.max(shape.lg2_align);
        let mut free = self.shared.free.lock();
        for _ in 0..count {
            let unit = self.shared.take_free(&mut free, lg2_size);
            if let Some(unit) = unit {
                self.shared.set(unit, State::Reserved);
                list.push(&self.shared, unit);
            }
            let last = unit.and_then(|unit| self.paddr_of(unit).checked_add(lg2::mask(lg2_size)));
            if last.is_none_or(|last| last > shape.max_paddr) {
                while let Some(unit) = list.pop(&self.shared) {
                    self.shared.put_free(&mut free, lg2_size, unit);
                }
                return Err(NoTables { asked: count });
            }
        }
        free.in_use[class_of(lg2_size)] += count;
        Ok(list)
    }

    fn take(
        &self,
        _promise: Promise<'_>,
        shape: TableShape,
        list: &mut ArenaList,
    ) -> Option<Fresh<'_, W>> {
        let unit = list.pop(&self.shared)?;
        let tag = self.shared.tag(unit);
        if tag.lg2_size() < shape.lg2_size {
            // Reserved with another shape: it leaks.
            return None;
        }
        if !tag.is(State::Reserved) {
            // It was published, for a moment: who reads it now is done before it is filled anew.
            let _nobody_reads = self.shared.free.lock();
            self.shared.set(unit, State::Reserved);
        }
        let words = 1usize << (shape.lg2_size - W::LG2_BYTES);
        let start = self.pointer(u64::from(unit) << UNIT_LG2).cast::<W>();
        // SAFETY: 1. The unit was in `list` and is in no list now: the table is this call's alone
        // until it is published, which ends the borrow; as hardware, nobody reads what is reserved,
        // and whoever did before held the lock that made it so. 2. It lies in the arena whole,
        // aligned to its size. 3. The arena's memory was zeroed when it was allocated.
        let words = unsafe { slice::from_raw_parts_mut(start.as_ptr(), words) };
        // SAFETY: they are the table's at that address, as was just said.
        Some(unsafe { Fresh::new(self.paddr_of(unit), words) })
    }

    #[inline]
    fn publish(&self, fresh: Fresh<'_, W>) {
        self.shared.publish::<W>(self.unit_of(fresh.paddr()));
    }

    #[inline(always)]
    fn entries(&self, table: &TableAddr) -> &[W::Atomic] {
        let Some(offset) = self.published::<W>(table) else { return no_table::<W>() };
        let start = self.pointer(offset).cast::<W::Atomic>();
        let words = 1usize << (table.lg2_size() - W::LG2_BYTES);
        // SAFETY: 1. A table of at least this size begins there, so the words lie in the allocation
        // and are aligned. 2. It is published with words as long, so all access to it is atomic and
        // of one size; it is not filled anew before it was retired and freed, which the walker, who
        // calls this, does when nobody walks it any more.
        unsafe { slice::from_raw_parts(start.as_ptr(), words) }
    }

    fn retire(&self, list: &mut ArenaList, table: TableAddr) {
        // What is no table, or was retired before, takes a corrupt entry to get here, and leaks. No
        // exchange: it would wait for all that the unmap stored.
        if self.published::<W>(&table).is_some() {
            let unit = self.unit_of(table.paddr());
            self.shared.set(unit, State::Retired);
            list.push(&self.shared, unit);
        }
    }

    fn append(&self, _promise: Promise<'_>, list: &mut ArenaList, other: ArenaList) {
        if list.first == NONE {
            *list = other;
        } else if other.first != NONE && other.owner == list.owner {
            self.shared.next[list.last as usize].store(other.first, Ordering::Relaxed);
            list.last = other.last;
        }
    }

    fn free(&self, _promise: Promise<'_>, _shape: TableShape, mut list: ArenaList) {
        if list.first == NONE {
            return;
        }
        let mut free = self.shared.free.lock();
        while let Some(unit) = list.pop(&self.shared) {
            let lg2_size = self.shared.tag(unit).lg2_size();
            self.shared.put_free(&mut free, lg2_size, unit);
            free.in_use[class_of(lg2_size)] -= 1;
        }
    }
}

impl Arena {
    /// What `access` gives for the word at `paddr`, in a table that hardware may read.
    fn word<W: Word, R>(
        &self,
        paddr: PhysAddr,
        access: impl FnOnce(&W::Atomic) -> R,
    ) -> Result<R, NotInTree> {
        let outside = NotInTree::Outside { paddr };
        let unit = self.unit_of(paddr);
        if (unit as usize) >= self.shared.tags.len() {
            return Err(outside);
        }
        // From here on no table becomes one that is filled.
        let _stays = self.shared.free.lock();
        let lg2_size = self.shared.tag(unit).lg2_size();
        if lg2_size == 0 || !lg2::is_aligned(paddr.get(), W::LG2_BYTES) {
            return Err(outside);
        }
        let first = unit & !((1 << (lg2_size - UNIT_LG2)) - 1);
        let tag = self.shared.tag(first);
        if !tag.is(State::Published) && !tag.is(State::Retired) {
            return Err(NotInTree::Freed { paddr });
        }
        if tag.lg2_word() != W::LG2_BYTES {
            return Err(NotInTree::OtherWord { paddr, lg2_bytes: tag.lg2_word() });
        }
        let word = self.pointer(paddr.get().wrapping_sub(self.base)).cast::<W::Atomic>();
        #[expect(unsafe_code, reason = "a word of a table, read as hardware reads it")]
        // SAFETY: 1. The word lies in a unit of the arena, and is aligned. 2. Its table is
        // published or retired and, under the lock, stays no less: all access to it is atomic, and
        // of words as long as this one.
        let word = unsafe { word.as_ref() };
        Ok(access(word))
    }
}

/// 64 MiB, whose addresses begin at 1 GiB: below 4 GiB, where every format's tables may be.
///
/// Tables of 4 KiB that are full of leaves of 4 KiB map 32 GiB then.
impl Default for Arena {
    fn default() -> Self {
        Self::new(PhysAddr::new(1 << 30), 64 << 20)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({:#x}, {} tables)", self.base, self.tables())
    }
}

/// No entries. Out of line, so that a walk guesses that there are some and goes on: computed
/// without a branch, the choice would delay each of its steps.
#[cold]
#[inline(never)]
fn no_table<'a, W: Word>() -> &'a [W::Atomic] {
    &[]
}

/// The index of a table size in the free lists.
fn class_of(lg2_size: u32) -> usize {
    ((lg2_size - UNIT_LG2) as usize).min(CLASSES - 1)
}

/// As many zeroes, or `None` where there is no memory.
fn zeroed<T: Default>(count: usize) -> Option<Box<[T]>> {
    let mut zeroes = Vec::new();
    zeroes.try_reserve_exact(count).ok()?;
    zeroes.resize_with(count, T::default);
    Some(zeroes.into_boxed_slice())
}

#[cfg(test)]
mod tests;
