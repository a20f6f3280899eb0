//! Table memory without an operating system: a few tables in a static.

use core::cell::UnsafeCell;
use core::slice;
use core::sync::atomic::{AtomicU64, Ordering};

use dmaspan::io_pgtable::{Fresh, NoTables, TableAddr, TableMemory, TableShape};
use dmaspan::{Coherency, PhysAddr, Promise};

const TABLES: usize = 16;
const WORDS: usize = 512;
const LG2_SIZE: u32 = 12;
/// The physical address that the first table pretends to have.
const BASE: u64 = 0x4000_0000;

#[repr(align(4096))]
struct Memory(UnsafeCell<[[u64; WORDS]; TABLES]>);

// SAFETY: `Tables` gives a table's words out either as the one `Fresh` of whoever took its bit, or
// as atomics once it is published.
unsafe impl Sync for Memory {}

static MEMORY: Memory = Memory(UnsafeCell::new([[0; WORDS]; TABLES]));
/// A bit for each table that is in no list and no tree.
static FREE: AtomicU64 = AtomicU64::new((1 << TABLES) - 1);

/// The tables in `MEMORY`.
pub struct Tables;

/// Tables in no tree, a bit each.
#[derive(Debug, Default)]
pub struct List(u64);

impl List {
    fn pop(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let index = self.0.trailing_zeros();
        self.0 &= self.0 - 1;
        Some(index as usize)
    }
}

fn paddr_of(index: usize) -> PhysAddr {
    PhysAddr::new(BASE + ((index as u64) << LG2_SIZE))
}

/// The index of a table; beyond all of them for an address that is none.
fn index_of(paddr: PhysAddr) -> usize {
    usize::try_from(paddr.get().wrapping_sub(BASE) >> LG2_SIZE).unwrap_or(TABLES)
}

/// Where the words of a table are.
fn words_of(index: usize) -> *mut u64 {
    assert!(index < TABLES);
    MEMORY.0.get().cast::<u64>().wrapping_add(index * WORDS)
}

// SAFETY: 1. A table's bit is in `FREE`, in one list or nowhere, so a fresh table is one caller's;
// it is 4 KiB, aligned to that, and other shapes are refused. 2. The place follows from the index
// alone.
// 3. Lists are bits beside the tables. 4. The static holds nothing but tables. 5. A dropped list is
//    a number that nobody has any more.
unsafe impl TableMemory<u64> for Tables {
    type List = List;

    fn coherency(&self) -> Coherency {
        Coherency::Coherent
    }

    fn reserve(&self, shape: TableShape, count: usize) -> Result<List, NoTables> {
        let none = NoTables { asked: count };
        if shape.lg2_size != LG2_SIZE || shape.lg2_align > LG2_SIZE {
            return Err(none);
        }
        let take = |mut free: u64| {
            for _ in 0..count {
                if free == 0 {
                    return None;
                }
                free &= free - 1;
            }
            Some(free)
        };
        let before =
            FREE.fetch_update(Ordering::Acquire, Ordering::Relaxed, take).map_err(|_| none)?;
        // What `take` left is what was there without its lowest `count` bits.
        let left = take(before).ok_or(none)?;
        Ok(List(before & !left))
    }

    fn take(
        &self,
        _promise: Promise<'_>,
        _shape: TableShape,
        list: &mut List,
    ) -> Option<Fresh<'_, u64>> {
        let index = list.pop()?;
        // SAFETY: 1. The bit was in `list` and is nowhere now: the table is this call's alone. 2.
        // It lies in `MEMORY` whole, which is static, aligned and initialised.
        let words = unsafe { slice::from_raw_parts_mut(words_of(index), WORDS) };
        // SAFETY: they are the table's at that address.
        Some(unsafe { Fresh::new(paddr_of(index), words) })
    }

    fn entries(&self, table: &TableAddr) -> &[AtomicU64] {
        let index = index_of(table.paddr());
        if index >= TABLES {
            return &[];
        }
        // SAFETY: 1. The table is published, so all access to it is atomic. 2. It lies in `MEMORY`
        // whole, and an atomic has the size and the alignment of its word.
        unsafe { slice::from_raw_parts(words_of(index).cast::<AtomicU64>(), WORDS) }
    }

    fn retire(&self, list: &mut List, table: TableAddr) {
        list.0 |= 1 << index_of(table.paddr());
    }

    fn append(&self, _promise: Promise<'_>, list: &mut List, other: List) {
        list.0 |= other.0;
    }

    fn free(&self, _promise: Promise<'_>, _shape: TableShape, list: List) {
        FREE.fetch_or(list.0, Ordering::Release);
    }
}
