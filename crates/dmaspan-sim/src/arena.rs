//! Table memory for user space: one arena that all tables of a domain come from.
//!
//! The arena is the reference for implementing [`TableMemory`], and the software IOMMU walks it. A
//! table's physical address is its place in the arena behind a base that the caller chooses, so
//! tests can put tables where a format can or cannot reach them.
//!
//! The arena knows the state of every table. [`TableWords::read_u64`] refuses to read one that was
//! freed, so a test finds a walk through a table that was freed too early when it happens. Where a
//! device writes tables, a link may lead anywhere: the arena enters and detaches no table that is
//! part of no tree, so that none is freed twice.

use std::alloc::{self, Layout};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use dmaspan::io_pgtable::{Fresh, NoTables, TableAddr, TableMemory, TableShape, Word};
use dmaspan::{Coherency, PhysAddr, Promise, lg2};
use parking_lot::RwLock;

use crate::walker::{NotATable, TableWords};

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

/// Memory for tables of all sizes. Clones share it.
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
    _block: Block,
    /// A number that no other arena of this process has or had.
    id: u64,
    /// For each unit, the next one of its list: never stored in the tables.
    next: Box<[AtomicU32]>,
    /// For each unit a [`Tag`].
    tags: Box<[AtomicU8]>,
    /// Locked for reading while hardware's words are read, and for writing where a table becomes
    /// one that is filled: see [`Arena::word`].
    free: RwLock<Free>,
}

/// What a unit is of: log2 of the size of the table that it belongs to, 0 while it never did, and
/// above it the [`State`] of the table that begins with it. A unit never changes its size again.
///
/// A published table is above every other one, and a larger one above a smaller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Tag(u8);

impl Tag {
    const STATE_SHIFT: u32 = 6;

    #[inline(always)]
    fn new(lg2_size: u32, state: State) -> Self {
        Self(lg2_size.to_le_bytes()[0] | (state as u8) << Self::STATE_SHIFT)
    }

    fn lg2_size(self) -> u32 {
        u32::from(self.0) & 0x3f
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
    Lent { _keep: Box<dyn Send + Sync> },
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
            // from it: entries and fresh tables borrow from an `Arena`, which keeps it alive.
            unsafe { alloc::dealloc(start.as_ptr(), layout) }
        }
    }
}

impl Arena {
    /// An arena of at least `bytes`, whose first table is at `base` or above. Memory is only used
    /// once tables lie in it.
    ///
    /// `base` is rounded up to 2 MiB and the size to whole units; at most 2 TiB.
    #[expect(unsafe_code, reason = "table memory is shared by plain and by atomic access")]
    pub fn new(base: PhysAddr, bytes: u64) -> Self {
        let most = lg2::size(UNIT_LG2 + 31);
        let bytes = lg2::align_up(bytes.clamp(1, most), UNIT_LG2).unwrap_or(most);
        let base = lg2::align_up(base.get(), LARGEST_LG2).unwrap_or(0);
        let size = usize::try_from(bytes).unwrap_or(usize::MAX >> 1);
        // Zeroed memory of a small alignment is memory that the system backs when it is touched; of
        // a large one it is all written at once. So the tables' alignment comes from room to spare;
        // and with as much behind the arena, a table that begins in it never ends outside.
        let room = (size + (2 << LARGEST_LG2)).max(LEAST_FRESH);
        let layout =
            Layout::from_size_align(room, 16).expect("2 TiB and some fit in a 64-bit size");
        // SAFETY: the layout's size is not 0.
        let block = NonNull::new(unsafe { alloc::alloc_zeroed(layout) });
        let Some(start) = block else { alloc::handle_alloc_error(layout) };
        let to_alignment = start.align_offset(1 << LARGEST_LG2);
        // SAFETY: the offset is below 2 MiB, and the block is larger than that.
        let memory = unsafe { start.add(to_alignment) };
        Self::at(memory, base, bytes, Block::Own { start, layout })
    }

    /// An arena in the memory at `memory`, which hardware finds at `base`: `bytes` of it, of which
    /// the last 2 MiB stay unused, until `keep` is dropped. `None` where either address is no
    /// multiple of 2 MiB, the size no multiple of 1 KiB, or there are no more than 2 MiB.
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
        let most = lg2::size(UNIT_LG2 + 31);
        let usable = bytes.checked_sub(lg2::size(LARGEST_LG2)).filter(|&usable| usable > 0)?;
        let aligned = lg2::is_aligned(memory.addr().get() as u64, LARGEST_LG2)
            && lg2::is_aligned(base.get(), LARGEST_LG2)
            && lg2::is_aligned(bytes, UNIT_LG2);
        let block = Block::Lent { _keep: keep };
        aligned.then(|| Self::at(memory, base.get(), usable.min(most), block))
    }

    /// An arena of `bytes` at `memory`, behind which there are 2 MiB more of the block.
    fn at(memory: NonNull<u8>, base: u64, bytes: u64, block: Block) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);

        let units = usize::try_from(bytes >> UNIT_LG2).unwrap_or(0);
        let free = Free { heads: [NONE; CLASSES], unused: 0, in_use: [0; CLASSES] };
        let shared = Shared {
            _block: block,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            next: zeroed(units),
            tags: zeroed(units),
            free: RwLock::new(free),
        };
        let shared = Arc::new(shared);
        let tags = Tags(NonNull::from(&*shared.tags).cast());
        Self { base, units: units as u64, memory: Memory(memory), tags, shared }
    }

    /// Returns how many tables are handed out, of all sizes.
    pub fn tables(&self) -> usize {
        self.shared.free.read().in_use.iter().sum()
    }

    /// The bytes of the tables that are handed out.
    pub fn table_bytes(&self) -> u64 {
        let free = self.shared.free.read();
        (UNIT_LG2..).zip(free.in_use).map(|(lg2, tables)| (tables as u64) << lg2).sum()
    }

    fn paddr_of(&self, unit: u32) -> PhysAddr {
        PhysAddr::new(self.base + (u64::from(unit) << UNIT_LG2))
    }

    fn unit_of(&self, paddr: PhysAddr) -> u32 {
        u32::try_from(paddr.get().wrapping_sub(self.base) >> UNIT_LG2).unwrap_or(NONE)
    }

    /// The offset in the arena of a table that is part of a tree and has at least so many bytes;
    /// `None` where there is no such table.
    #[inline(always)]
    fn published(&self, table: &TableAddr) -> Option<u64> {
        let offset = table.paddr().get().wrapping_sub(self.base);
        // Beyond all units, too, for what is no multiple of one.
        let unit = offset.rotate_right(UNIT_LG2);
        if unit >= self.units {
            return None;
        }
        let tag = Tag(self.tag_of(usize::try_from(unit).unwrap_or(0)).load(Ordering::Acquire));
        (tag >= Tag::new(table.lg2_size(), State::Published)).then_some(offset)
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
        let tag = Tag::new(self.tag(unit).lg2_size(), state);
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
        let tag = Tag::new(lg2_size, State::Free);
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
// unit keeps its size. 3. Lists are linked through `next`, not through the tables. 4. Freed units
// are handed out as tables only. 5. A dropped list leaves its units in no list.
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
        let mut free = self.shared.free.write();
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
            let _nobody_reads = self.shared.free.write();
            self.shared.set(unit, State::Reserved);
        }
        let words = 1usize << (shape.lg2_size - W::LG2_BYTES);
        let start = self.pointer(u64::from(unit) << UNIT_LG2).cast::<W>();
        // SAFETY: 1. The unit was in `list` and is in no list now: the table is this call's alone
        // until it is published, which ends the borrow; as hardware, nobody reads what is reserved,
        // and whoever did before held the lock that made it so. 2. It lies in the arena whole,
        // aligned to its size. 3. The arena's memory was zeroed when it was allocated.
        let words = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), words) };
        // SAFETY: they are the table's at that address, as was just said.
        Some(unsafe { Fresh::new(self.paddr_of(unit), words) })
    }

    #[inline]
    fn publish(&self, fresh: Fresh<'_, W>) {
        self.shared.set(self.unit_of(fresh.paddr()), State::Published);
    }

    #[inline(always)]
    fn entries(&self, table: &TableAddr) -> &[W::Atomic] {
        let Some(offset) = self.published(table) else { return no_table::<W>() };
        let start = self.pointer(offset).cast::<W::Atomic>();
        let words = 1usize << (table.lg2_size() - W::LG2_BYTES);
        // SAFETY: 1. A table of at least this size begins there, so the words lie in the allocation
        // and are aligned. 2. It is published, so all access to it is atomic; it is not filled
        // anew before it was retired and freed, which the walker, who calls this, does when nobody
        // walks it any more.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), words) }
    }

    fn retire(&self, list: &mut ArenaList, table: TableAddr) {
        // What is no table, or was retired before, takes a corrupt entry to get here, and leaks. No
        // exchange: it would wait for all that the unmap stored.
        if self.published(&table).is_some() {
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
        let mut free = self.shared.free.write();
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
    ) -> Result<R, NotATable> {
        let outside = NotATable::Outside { paddr };
        let unit = self.unit_of(paddr);
        if (unit as usize) >= self.shared.tags.len() {
            return Err(outside);
        }
        // From here on no table becomes one that is filled.
        let _stays = self.shared.free.read();
        let lg2_size = self.shared.tag(unit).lg2_size();
        if lg2_size == 0 || !lg2::is_aligned(paddr.get(), W::LG2_BYTES) {
            return Err(outside);
        }
        let first = unit & !((1 << (lg2_size - UNIT_LG2)) - 1);
        let tag = self.shared.tag(first);
        if !tag.is(State::Published) && !tag.is(State::Retired) {
            return Err(NotATable::Freed { paddr });
        }
        let word = self.pointer(paddr.get().wrapping_sub(self.base)).cast::<W::Atomic>();
        #[expect(unsafe_code, reason = "a word of a table, read as hardware reads it")]
        // SAFETY: 1. The word lies in a unit of the arena, and is aligned. 2. Its table is
        // published or retired and, under the lock, stays no less: all access to it is atomic.
        let word = unsafe { word.as_ref() };
        Ok(access(word))
    }
}

impl TableWords for Arena {
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
        self.word::<u64, _>(paddr, |word| word.load(Ordering::Acquire))
    }

    fn read_u32(&self, paddr: PhysAddr) -> Result<u32, NotATable> {
        self.word::<u32, _>(paddr, |word| word.load(Ordering::Acquire))
    }

    fn exchange_u64(&self, paddr: PhysAddr, old: u64, new: u64) -> Result<u64, NotATable> {
        let exchanged = self.word::<u64, _>(paddr, |word| {
            word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
        })?;
        Ok(exchanged.unwrap_or_else(|found| found))
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

/// As many zeroes.
fn zeroed<T: Default>(count: usize) -> Box<[T]> {
    (0..count).map(|_| T::default()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: TableShape =
        TableShape { lg2_size: 12, lg2_align: 12, max_paddr: PhysAddr::new(lg2::mask(48)) };

    fn arena() -> Arena {
        Arena::new(PhysAddr::new(0x4000_0000), 1 << 20)
    }

    fn reserve(arena: &Arena, shape: TableShape, count: usize) -> Result<ArenaList, NoTables> {
        TableMemory::<u64>::reserve(arena, shape, count)
    }

    #[expect(unsafe_code, reason = "a test calls what the walker calls")]
    fn promise() -> Promise<'static> {
        // SAFETY: the tests hand in lists of the arena, of one shape, that no hardware reads.
        unsafe { Promise::new() }
    }

    fn free(arena: &Arena, shape: TableShape, list: ArenaList) {
        TableMemory::<u64>::free(arena, promise(), shape, list);
    }

    fn take<'a>(arena: &'a Arena, shape: TableShape, list: &mut ArenaList) -> Fresh<'a, u64> {
        TableMemory::<u64>::take(arena, promise(), shape, list).unwrap()
    }

    #[test]
    fn the_table_freed_last_is_the_next_one_taken() {
        let arena = arena();
        let mut list = reserve(&arena, PAGE, 3).unwrap();
        let paddr = take(&arena, PAGE, &mut list).paddr();
        free(&arena, PAGE, list);
        let mut list = ArenaList::default();
        list.push(&arena.shared, arena.unit_of(paddr));
        free(&arena, PAGE, list);
        assert_eq!(arena.tables(), 0);
        let mut list = reserve(&arena, PAGE, 1).unwrap();
        assert_eq!(take(&arena, PAGE, &mut list).paddr(), paddr);
    }

    #[test]
    fn a_reservation_is_all_or_nothing() {
        let arena = arena();
        let held = reserve(&arena, PAGE, 250).unwrap();
        assert_eq!(reserve(&arena, PAGE, 7).unwrap_err(), NoTables { asked: 7 });
        assert_eq!(arena.tables(), 250);
        assert_eq!(arena.table_bytes(), 250 << 12);
        let rest = reserve(&arena, PAGE, 6).unwrap();
        free(&arena, PAGE, rest);
        free(&arena, PAGE, held);
        assert_eq!(arena.tables(), 0);
    }

    #[test]
    fn tables_lie_where_hardware_reaches_them() {
        let arena = arena();
        let low = TableShape { max_paddr: PhysAddr::new(0x4000_1fff), ..PAGE };
        assert!(reserve(&arena, low, 3).is_err());
        let list = reserve(&arena, low, 2).unwrap();
        assert!(reserve(&arena, low, 1).is_err());
        assert!(reserve(&arena, PAGE, 1).is_ok());
        free(&arena, low, list);
        assert!(reserve(&arena, low, 2).is_ok());
    }

    #[test]
    fn tables_of_all_sizes_are_aligned_and_disjoint() {
        let arena = arena();
        let mut ranges = Vec::new();
        for lg2_size in [6, 10, 16, 12, 14, 10, 17] {
            let shape = TableShape { lg2_size, lg2_align: lg2_size, ..PAGE };
            let mut list = reserve(&arena, shape, 1).unwrap();
            let mut fresh = take(&arena, shape, &mut list);
            assert!(lg2::is_aligned(fresh.paddr().get(), lg2_size));
            assert_eq!(fresh.words().len() << 3, 1 << lg2_size);
            fresh.words().fill(lg2_size.into());
            ranges.push((fresh.paddr().get(), lg2_size));
            TableMemory::<u64>::publish(&arena, fresh);
        }
        for (paddr, lg2_size) in ranges {
            for word in (paddr..paddr + lg2::size(lg2_size)).step_by(8) {
                assert_eq!(arena.read_u64(PhysAddr::new(word)), Ok(lg2_size.into()));
            }
        }
    }

    #[test]
    fn a_word_of_32_bits_is_half_of_one_of_64() {
        let arena = arena();
        let mut list = reserve(&arena, PAGE, 1).unwrap();
        let mut fresh = take(&arena, PAGE, &mut list);
        fresh.words()[1] = 0x1122_3344_5566_7788;
        let paddr = fresh.paddr();
        TableMemory::<u64>::publish(&arena, fresh);
        let at = |offset| arena.read_u32(paddr.wrapping_add(offset));
        assert_eq!((at(4), at(8), at(12)), (Ok(0), Ok(0x5566_7788), Ok(0x1122_3344)));
        let outside = NotATable::Outside { paddr: paddr.wrapping_add(10) };
        assert_eq!(at(10), Err(outside));
        // What has no way of its own to read 32 bits answers the same.
        let image = crate::walker::TableImage::new();
        image.add_table(paddr, 2);
        image.set(paddr.wrapping_add(8), 0x1122_3344_5566_7788).unwrap();
        for offset in [4, 8, 10, 12] {
            assert_eq!(image.read_u32(paddr.wrapping_add(offset)), at(offset));
        }
    }

    #[test]
    #[expect(unsafe_code, reason = "memory of a test")]
    fn an_arena_over_lent_memory_stays_in_it_and_lets_it_go() {
        let layout = Layout::from_size_align(8 << 20, 1 << LARGEST_LG2).unwrap();
        // SAFETY: the layout's size is not 0.
        let memory = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).unwrap();
        let kept = Arc::new(());
        let over = |memory, base, bytes| {
            // SAFETY: the memory is freed at the end of the test, and one arena is used.
            unsafe { Arena::over(memory, PhysAddr::new(base), bytes, Box::new(kept.clone())) }
        };
        assert!(over(memory, 1 << 20, 8 << 20).is_none());
        assert!(over(memory, 0, 2 << 20).is_none());
        assert!(over(memory, 0, (8 << 20) - 1).is_none());
        let arena = over(memory, 1 << 30, 8 << 20).unwrap();
        let shape = TableShape { lg2_size: 21, lg2_align: 21, max_paddr: PhysAddr::new(u64::MAX) };
        assert!(reserve(&arena, shape, 4).is_err());
        let mut list = reserve(&arena, shape, 3).unwrap();
        for _ in 0..3 {
            let mut fresh = take(&arena, shape, &mut list);
            let offset = fresh.paddr().get() - (1 << 30);
            assert!(offset <= 4 << 20, "{offset:#x}");
            fresh.words().fill(7);
            TableMemory::<u64>::publish(&arena, fresh);
        }
        assert_eq!(Arc::strong_count(&kept), 2);
        drop(arena);
        assert_eq!(Arc::strong_count(&kept), 1);
        // SAFETY: it was allocated above, and no arena is left.
        unsafe { alloc::dealloc(memory.as_ptr(), layout) };
    }

    #[test]
    fn a_list_of_an_arena_that_is_gone_is_refused_by_every_later_one() {
        let gone = arena();
        let mut list = reserve(&gone, PAGE, 2).unwrap();
        drop(gone);
        // The allocator gives the same memory again soon, if not at once.
        let later: Vec<_> = (0..64).map(|_| arena()).collect();
        for arena in &later {
            let _own = reserve(arena, PAGE, 2).unwrap();
            let taken = TableMemory::<u64>::take(arena, promise(), PAGE, &mut list);
            assert!(taken.is_none(), "one table is had twice: {taken:?}");
        }
        free(&later[0], PAGE, list);
        assert_eq!(later[0].tables(), 2);
    }

    #[test]
    fn a_table_that_lost_a_race_is_not_read_while_it_is_filled_again() {
        let arena = arena();
        let mut list = reserve(&arena, PAGE, 1).unwrap();
        let fresh = take(&arena, PAGE, &mut list);
        let paddr = fresh.paddr();
        assert_eq!(arena.read_u64(paddr), Err(NotATable::Freed { paddr }));
        TableMemory::<u64>::publish(&arena, fresh);
        // As the walker takes back what another thread's link came before.
        arena.shared.set(arena.unit_of(paddr), State::Retired);
        list.push(&arena.shared, arena.unit_of(paddr));
        assert!(arena.read_u64(paddr).is_ok());
        let _filled = take(&arena, PAGE, &mut list);
        assert_eq!(arena.read_u64(paddr), Err(NotATable::Freed { paddr }));
    }

    #[test]
    fn reading_a_freed_table_is_refused() {
        let arena = arena();
        let mut list = reserve(&arena, PAGE, 1).unwrap();
        let fresh = take(&arena, PAGE, &mut list);
        let paddr = fresh.paddr();
        TableMemory::<u64>::publish(&arena, fresh);
        assert!(arena.read_u64(paddr).is_ok());
        list.push(&arena.shared, arena.unit_of(paddr));
        free(&arena, PAGE, list);
        assert_eq!(arena.read_u64(paddr), Err(NotATable::Freed { paddr }));
        let outside = PhysAddr::new(0x1000);
        assert_eq!(arena.read_u64(outside), Err(NotATable::Outside { paddr: outside }));
    }
}
