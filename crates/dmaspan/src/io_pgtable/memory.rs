//! [`TableMemory`] supplies tables and takes them back: a kernel, a VMM or a test implements it.

use alloc::sync::Arc;
use core::fmt;

use super::word::Word;
use crate::addr::PhysAddr;
use crate::promise::Promise;
use crate::prot::Coherency;

/// Size and place of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// log2 of its bytes.
    pub lg2_size: u32,
    /// log2 of its alignment, in physical addresses.
    pub lg2_align: u32,
    /// Where its last byte may lie at the highest.
    pub max_paddr: PhysAddr,
}

/// No tables are left; none was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoTables {
    /// How many were asked for.
    pub asked: usize,
}

/// The address of a table that is part of a tree.
///
/// Only the walker makes them, of tables that it published and did not retire, as far as its tables
/// have in them [what it wrote](TableMemory#corrupt-tables).
#[derive(Debug, PartialEq, Eq)]
pub struct TableAddr {
    paddr: PhysAddr,
    lg2_size: u32,
}

impl TableAddr {
    #[inline(always)]
    pub(super) const fn new(paddr: PhysAddr, lg2_size: u32) -> Self {
        Self { paddr, lg2_size }
    }

    /// Its physical address.
    #[inline(always)]
    pub const fn paddr(&self) -> PhysAddr {
        self.paddr
    }

    /// log2 of its bytes, as in the [`TableShape`] that it was taken with.
    #[inline(always)]
    pub const fn lg2_size(&self) -> u32 {
        self.lg2_size
    }
}

/// A table that nothing leads to yet: the caller's alone.
///
/// Its words are anything at first. It is filled through plain stores, which the compiler makes
/// wide, and zeroed only where it stays empty.
pub struct Fresh<'m, W> {
    paddr: PhysAddr,
    words: &'m mut [W],
}

impl<'m, W: Word> Fresh<'m, W> {
    /// A table at `paddr` whose memory is `words`, all of it.
    ///
    /// # Safety
    ///
    /// The caller is [`TableMemory::take`]: the table is of its memory, as that promises.
    #[expect(unsafe_code, reason = "the memory of a table that hardware is to read")]
    pub unsafe fn new(paddr: PhysAddr, words: &'m mut [W]) -> Self {
        Self { paddr, words }
    }

    /// Its physical address.
    pub fn paddr(&self) -> PhysAddr {
        self.paddr
    }

    /// Its entries, with their bytes in hardware's order, the lowest first.
    pub fn words(&mut self) -> &mut [W] {
        self.words
    }
}

impl<W> fmt::Debug for Fresh<'_, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fresh({})", self.paddr)
    }
}

/// Gives tables and takes them back, and turns their physical addresses into memory.
///
/// [`FrameTables`](super::FrameTables) is one over a kernel's page allocator and direct map,
/// [`Arena`](super::Arena) one for a process. The walker takes what an operation needs in one
/// [`reserve`](Self::reserve) and returns what was detached in one [`free`](Self::free), after
/// hardware forgot it.
///
/// # Safety
///
/// The implementer promises:
///
/// 1. A [`Fresh`] is exclusive, of the shape asked for, and its memory is really what hardware
///    reads at its physical address.
/// 2. [`entries`](Self::entries) returns the words of exactly that table, for a table that was
///    published and not freed. Different tables do not overlap.
/// 3. Nothing but the walker writes published tables, hardware's access flags and dirty bits aside;
///    [`retire`](Self::retire), [`append`](Self::append) and a dropped list leave a table's words
///    as they are: hardware may still read them. Lists are linked through other memory.
/// 4. A list that is dropped leaks its tables. The memory of tables that were not freed stays what
///    it is, also where this is dropped: hardware may read them for ever.
/// 5. Where it can be cloned, a clone is the same memory: tables of the one are tables of the
///    other, and they stay as long as either lives.
///
/// What becomes of a freed table is the memory's own affair: it may be another table at once, or go
/// back to a page allocator and become anything. [Nobody reads it](#which-tables-are-read).
///
/// The caller, which is only the walker, promises that each list, [`Fresh`] and [`TableAddr`] is of
/// this memory, that no table is retired twice, and that a retired table is freed only when neither
/// hardware nor the walker reads it any more; all that as far as the third promise is kept to it.
/// Nobody else can call a method that relies on that: each takes a [`Promise`], or a [`Fresh`] or
/// [`TableAddr`], which the walker alone has.
///
/// # Which tables are read
///
/// Many threads work on a tree without a lock, and yet none of them reads a table after it was
/// freed, or asks for its entries:
///
/// 1. An operation goes down to addresses that it [owns](super::Owned). So each table that it
///    enters translates an address that it owns.
/// 2. A table leaves the tree through an operation that owns *all* that the table translates: an
///    unmap of all of it, or a reclaim. Two owners have no address in common, so no other operation
///    is in the table, and the one that detached it has ended when it is freed.
/// 3. A root is entered by every operation. Where a tree grows, a former root becomes an inner
///    table, which may leave the tree as others do. An operation that began at it owns an address
///    that it translates, and is one of those above; or it begins above the tree, does not ask for
///    the root's entries, and begins anew when the tree has grown.
/// 4. A [walk](super::PageTable::walk) that owns nothing registers as a reader. Tables are freed
///    when no reader is left that was there when they were detached.
/// 5. A table that another CPU's came before is freed at once: nothing ever led to it.
/// 6. A [software IOMMU](crate::iommu::soft) is hardware: its walks have ended when a sync has.
///
/// # Corrupt tables
///
/// Where something else writes tables, a device above all, the walker follows what was written: a
/// link may lead anywhere, and two links to one table. It has no books of its tables and cannot
/// tell, so that it asks for the entries of what is no table, and retires a table twice or one of
/// another tree. A memory that knows what is a table of a tree gives no entries of anything else,
/// which mostly ends the operation with [`Corrupt`](super::Error::Corrupt), and does not retire it:
/// then tables leak, and none is freed twice. A direct map cannot tell, and rests on the third
/// promise alone, as an allocator behind it does.
#[expect(unsafe_code, reason = "a contract about memory that hardware reads")]
pub unsafe trait TableMemory<W: Word>: Send + Sync {
    /// Tables in no tree: reserved for one or detached from one. Owned, and linked by the memory's
    /// own metadata.
    type List: Default + Send + fmt::Debug;

    /// Sets `count` tables aside.
    ///
    /// # Errors
    ///
    /// [`NoTables`] where there are not so many, none taken.
    fn reserve(&self, shape: TableShape, count: usize) -> Result<Self::List, NoTables>;

    /// Takes a table out of a list; `None` where it is empty. The caller promises that the list was
    /// reserved with `shape`, in this memory.
    fn take(
        &self,
        promise: Promise<'_>,
        shape: TableShape,
        list: &mut Self::List,
    ) -> Option<Fresh<'_, W>>;

    /// Returns whether hardware's walks see the CPU's caches. Where they do not,
    /// [`publish`](Self::publish) and [`written`](Self::written) write back to memory. The answer
    /// does not change.
    fn coherency(&self) -> Coherency;

    /// Ends the exclusive access: hardware may read the table from now on. Where hardware does not
    /// see the CPU's caches, the whole table is written back to memory here.
    fn publish(&self, _fresh: Fresh<'_, W>) {}

    /// The entries of a table.
    ///
    /// A memory that can tell returns none for an address that is [no table](#corrupt-tables) of
    /// its own.
    fn entries(&self, table: &TableAddr) -> &[W::Atomic];

    /// Entries that are next to each other were written; the caller promises that they are of one
    /// published table. Where hardware does not see the CPU's caches, their cache lines are written
    /// back here, each once.
    #[inline(always)]
    fn written(&self, _promise: Promise<'_>, _entries: &[W::Atomic]) {}

    /// Adds a table that was detached from a tree. A memory that can tell leaves out what is
    /// [no table](#corrupt-tables) of a tree.
    fn retire(&self, list: &mut Self::List, table: TableAddr);

    /// Moves all tables of `other` to `list`. The caller promises that both are of this memory.
    fn append(&self, promise: Promise<'_>, list: &mut Self::List, other: Self::List);

    /// Takes back all tables of a list. The caller promises that all are of that shape and of this
    /// memory, and that no hardware can read them.
    ///
    /// # Context
    ///
    /// May run with interrupts off. Does not allocate and cannot fail.
    fn free(&self, promise: Promise<'_>, shape: TableShape, list: Self::List);
}

/// A memory that several trees share, each through a pointer of its own, is theirs.
macro_rules! through {
    ($($pointer:ty),+) => { $(
        #[expect(unsafe_code, reason = "a pointer to table memory is table memory")]
        // SAFETY: each method is that of what the pointer leads to, which keeps all promises. It
        // is the same memory as long as the pointer lives: neither of them changes where it leads.
        unsafe impl<W: Word, T: TableMemory<W>> TableMemory<W> for $pointer {
            type List = T::List;

            #[inline]
            fn reserve(&self, shape: TableShape, count: usize) -> Result<T::List, NoTables> {
                (**self).reserve(shape, count)
            }

            #[inline]
            fn take(
                &self,
                promise: Promise<'_>,
                shape: TableShape,
                list: &mut T::List,
            ) -> Option<Fresh<'_, W>> {
                (**self).take(promise, shape, list)
            }

            #[inline(always)]
            fn coherency(&self) -> Coherency {
                (**self).coherency()
            }

            #[inline]
            fn publish(&self, fresh: Fresh<'_, W>) {
                (**self).publish(fresh);
            }

            #[inline(always)]
            fn entries(&self, table: &TableAddr) -> &[W::Atomic] {
                (**self).entries(table)
            }

            #[inline(always)]
            fn written(&self, promise: Promise<'_>, entries: &[W::Atomic]) {
                (**self).written(promise, entries);
            }

            #[inline]
            fn retire(&self, list: &mut T::List, table: TableAddr) {
                (**self).retire(list, table);
            }

            #[inline]
            fn append(&self, promise: Promise<'_>, list: &mut T::List, other: T::List) {
                (**self).append(promise, list, other);
            }

            #[inline]
            fn free(&self, promise: Promise<'_>, shape: TableShape, list: T::List) {
                (**self).free(promise, shape, list);
            }
        }
    )+ };
}

through!(Arc<T>, &'static T);
