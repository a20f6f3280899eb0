//! Memory for tables as the programs with Linux's page tables have it, in
//! `xtask/peers/shim/runtime.c`: huge pages at a fixed low address, pointers that are physical
//! addresses, and for each CPU and size a list of free tables, last in, first out.

use std::cell::Cell;
use std::iter;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use dmaspan::io_pgtable::{Fresh, NoTables, TableAddr, TableMemory, TableShape, Word};
use dmaspan::{Coherency, PhysAddr, Promise};
use parking_lot::Mutex;

use super::{contention, cpu};

const BASE: usize = 0x1000_0000;
const BYTES: usize = 96 << 20;
/// log2 of the smallest table.
const UNIT_LG2: u32 = 10;
const CLASSES: usize = 12;
/// The end of a list of units.
const NONE: u32 = u32::MAX;

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

/// Which list this thread uses.
pub(crate) fn run_on(nth: usize) {
    CPU.set(nth % cpu::count());
}

/// Which CPU this thread says that it runs on.
#[inline(always)]
pub(crate) fn cpu() -> usize {
    CPU.get()
}

/// Where all tables are.
pub(crate) fn range() -> Range<usize> {
    BASE..BASE + BYTES
}

/// The memory, of which there is one: it is at a fixed address.
pub(crate) struct Memory {
    /// For each unit, the next one of its list.
    next: Box<[AtomicU32]>,
    lists: [Lists; contention::CPUS],
    /// The first unit that was never used.
    unused: AtomicU32,
}

/// The free tables of a CPU, by size, on cache lines of their own.
#[repr(align(128))]
struct Lists(Mutex<Free>);

#[derive(Clone, Copy)]
struct Free {
    heads: [u32; CLASSES],
    /// Tables taken, less those given back.
    in_use: isize,
}

impl Memory {
    /// Maps and touches all of it, so that no benchmark meets a fault; where instructions are
    /// counted, and no time, it is new memory.
    pub(crate) fn new() -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let at = std::ptr::without_provenance_mut::<libc::c_void>(BASE);
        // SAFETY: new memory, which replaces none.
        let start = unsafe { libc::mmap(at, BYTES, protection, flags, -1, 0) };
        assert_eq!(start.addr(), BASE, "the place of the tables is taken");
        // SAFETY: advice about memory that was just mapped. Without huge pages it still works.
        let _ = unsafe { libc::madvise(start, BYTES, libc::MADV_HUGEPAGE) };
        start.expose_provenance();
        if super::counted::rounds().is_none() {
            // SAFETY: the memory is writable and this long, and nobody else knows it.
            unsafe { start.cast::<u8>().write_bytes(1, BYTES) };
        }
        let next = iter::repeat_with(|| AtomicU32::new(NONE)).take(BYTES >> UNIT_LG2).collect();
        let free = || Lists(Mutex::new(Free { heads: [NONE; CLASSES], in_use: 0 }));
        Self { next, lists: std::array::from_fn(|_| free()), unused: AtomicU32::new(0) }
    }

    /// How many tables are in use.
    pub(crate) fn tables(&self) -> isize {
        self.lists.iter().map(|lists| lists.0.lock().in_use).sum()
    }

    fn lists(&self) -> &Mutex<Free> {
        &self.lists[CPU.get()].0
    }

    fn link(&self, unit: u32) -> &AtomicU32 {
        &self.next[unit as usize]
    }

    /// A table that was never used.
    #[cold]
    fn unused(&self, class: usize) -> Option<u32> {
        let units = 1u32 << class;
        let behind = |unused: u32| Some(unused.next_multiple_of(units) + units);
        let last = self.unused.fetch_update(Ordering::Relaxed, Ordering::Relaxed, behind);
        let unit = last.unwrap_or(NONE).next_multiple_of(units);
        ((unit + units) as usize <= self.next.len()).then_some(unit)
    }
}

fn class_of(shape: TableShape) -> usize {
    (shape.lg2_size.max(shape.lg2_align).max(UNIT_LG2) - UNIT_LG2) as usize
}

#[inline(always)]
fn pointer(paddr: PhysAddr) -> *mut u8 {
    let address = usize::try_from(paddr.get()).expect("the address of a table");
    std::ptr::with_exposed_provenance_mut(address)
}

/// Tables in no tree. Aligned as lists of dmaspan's own table memories are: what is not is moved in
/// pieces, and one that was just written is then waited for.
#[derive(Debug)]
#[repr(align(8))]
pub(crate) struct List {
    first: u32,
    last: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NONE, last: NONE }
    }
}

impl List {
    fn push(&mut self, memory: &Memory, unit: u32) {
        memory.link(unit).store(self.first, Ordering::Relaxed);
        if self.first == NONE {
            self.last = unit;
        }
        self.first = unit;
    }

    fn pop(&mut self, memory: &Memory) -> Option<u32> {
        let unit = self.first;
        if unit == NONE {
            return None;
        }
        self.first = memory.link(unit).load(Ordering::Relaxed);
        Some(unit)
    }
}

// SAFETY: 1. A unit is in one list at a time, of one size, and all of it is memory that only this
// maps; units of a size begin at multiples of it. 2. A table is where its physical address says. 3.
// Lists are linked outside of the tables. 4. A dropped list leaves its units in no
// list, and the memory lives as long as the program.
unsafe impl<W: Word> TableMemory<W> for Memory {
    type List = List;

    #[inline(always)]
    fn coherency(&self) -> Coherency {
        Coherency::Coherent
    }

    fn reserve(&self, shape: TableShape, count: usize) -> Result<List, NoTables> {
        let class = class_of(shape);
        let mut list = List::default();
        let mut free = self.lists().lock();
        for _ in 0..count {
            let mut unit = free.heads[class];
            if unit == NONE {
                unit = self.unused(class).ok_or(NoTables { asked: count })?;
            } else {
                free.heads[class] = self.link(unit).load(Ordering::Relaxed);
            }
            list.push(self, unit);
        }
        free.in_use += count as isize;
        Ok(list)
    }

    fn take(
        &self,
        _promise: Promise<'_>,
        shape: TableShape,
        list: &mut List,
    ) -> Option<Fresh<'_, W>> {
        let unit = list.pop(self)?;
        let paddr = PhysAddr::new(BASE as u64 + (u64::from(unit) << UNIT_LG2));
        let words = 1usize << (shape.lg2_size - W::LG2_BYTES);
        // SAFETY: the table was in `list` and is in no list now; it is this long and was written.
        let words = unsafe { std::slice::from_raw_parts_mut(pointer(paddr).cast::<W>(), words) };
        // SAFETY: they are the table's at that address.
        Some(unsafe { Fresh::new(paddr, words) })
    }

    #[inline(always)]
    fn entries(&self, table: &TableAddr) -> &[W::Atomic] {
        let words = 1usize << (table.lg2_size() - W::LG2_BYTES);
        let start = pointer(table.paddr()).cast::<W::Atomic>();
        // SAFETY: a table that is part of a tree is where its address says, and shared.
        unsafe { std::slice::from_raw_parts(start, words) }
    }

    fn retire(&self, list: &mut List, table: TableAddr) {
        let unit = (table.paddr().get() - BASE as u64) >> UNIT_LG2;
        list.push(self, u32::try_from(unit).expect("a table of this memory"));
    }

    fn append(&self, _promise: Promise<'_>, list: &mut List, other: List) {
        if list.first == NONE {
            *list = other;
        } else if other.first != NONE {
            self.link(list.last).store(other.first, Ordering::Relaxed);
            list.last = other.last;
        }
    }

    fn free(&self, _promise: Promise<'_>, shape: TableShape, mut list: List) {
        let class = class_of(shape);
        let mut free = self.lists().lock();
        while let Some(unit) = list.pop(self) {
            self.link(unit).store(free.heads[class], Ordering::Relaxed);
            free.heads[class] = unit;
            free.in_use -= 1;
        }
    }
}
