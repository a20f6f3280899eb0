//! The memory of this side's tables: an arena, and what hardware sees of it.

use std::ptr;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use dmaspan::io_pgtable::{
    Arena, ArenaList, Fresh, NoTables, TableAddr, TableMemory, TableShape, Word,
};
use dmaspan::{Coherency, PhysAddr, Promise};
use dmaspan_sim::walker::TableWords;

/// How much memory the tables of a configuration have.
pub(crate) const BYTES: u64 = 64 << 20;

/// The reader of memory: the CPU or hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    /// The CPU, through its caches.
    Cpu,
    /// Hardware, which sees what was written back.
    Hardware,
}

/// Tables of which hardware sees, where it does not see the CPU's caches, exactly the entries that
/// were published or written back, and not their neighbours on the same cache line.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    arena: Arena,
    base: u64,
    coherency: Coherency,
    /// What hardware sees, in words of 4 bytes.
    image: Arc<Mutex<Vec<u32>>>,
    /// Where the arena begins in this process, once a table was published.
    place: Arc<AtomicUsize>,
}

impl Memory {
    /// Memory at `base`, a multiple of 2 MiB.
    pub(crate) fn new(base: u64, coherency: Coherency) -> Self {
        let words = if coherency == Coherency::NonCoherent { BYTES / 4 } else { 0 };
        let image = vec![0; usize::try_from(words).unwrap_or(0)];
        Self {
            arena: Arena::new(PhysAddr::new(base), BYTES),
            base,
            coherency,
            image: Arc::new(Mutex::new(image)),
            place: Arc::default(),
        }
    }

    /// How many tables there are.
    pub(crate) fn tables(&self) -> usize {
        self.arena.tables()
    }

    /// The words of a table; `None` where none is.
    pub(crate) fn read(&self, view: View, bytes: usize, table: u64) -> Option<Vec<u64>> {
        let image = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        let word = |at: u64| {
            // Refuses what is no table, whoever reads it.
            let word = self.arena.read_u64(PhysAddr::new(at)).ok()?;
            if view == View::Cpu {
                return Some(word);
            }
            let at = self.index(at);
            Some(u64::from(image[at]) | u64::from(image[at + 1]) << 32)
        };
        (0..bytes as u64).step_by(8).map(|offset| word(table.checked_add(offset)?)).collect()
    }

    fn index(&self, paddr: u64) -> usize {
        usize::try_from((paddr - self.base) >> 2).unwrap_or(usize::MAX)
    }

    /// Makes hardware see `bytes` from `paddr` on.
    fn write_back(&self, paddr: u64, bytes: usize) {
        if self.coherency == Coherency::Coherent {
            return;
        }
        let mut image = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        for at in (paddr..paddr + bytes as u64).step_by(4) {
            if let Ok(word) = self.arena.read_u32(PhysAddr::new(at)) {
                image[self.index(at)] = word;
            }
        }
    }

    /// Changes bits of the 8 bytes around `paddr` as hardware does: both see it.
    pub(crate) fn change(&self, paddr: u64, change: impl Fn(u64) -> u64) -> Result<(), String> {
        let at = PhysAddr::new(paddr & !7);
        let gone = |_| format!("{paddr:#x} is in no table");
        let old = self.arena.read_u64(at).map_err(gone)?;
        self.arena.exchange_u64(at, old, change(old)).map_err(gone)?;
        self.write_back(at.get(), 8);
        Ok(())
    }

    /// Flips bits of the 8 bytes around `paddr`: for both, or for hardware alone.
    pub(crate) fn flip(&self, view: View, paddr: u64, bits: u64) -> Result<(), String> {
        if view == View::Cpu {
            return self.change(paddr, |word| word ^ bits);
        }
        let at = self.index(paddr & !7);
        let mut image = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        for (n, bytes) in bits.to_le_bytes().as_chunks::<4>().0.iter().enumerate() {
            image[at + n] ^= u32::from_le_bytes(*bytes);
        }
        Ok(())
    }
}

#[expect(unsafe_code, reason = "everything but the looking on is the arena's")]
// SAFETY: every table comes from the arena and goes back to it.
unsafe impl<W: Word> TableMemory<W> for Memory {
    type List = ArenaList;

    fn coherency(&self) -> Coherency {
        self.coherency
    }

    fn reserve(&self, shape: TableShape, count: usize) -> Result<ArenaList, NoTables> {
        TableMemory::<W>::reserve(&self.arena, shape, count)
    }

    fn take(
        &self,
        promise: Promise<'_>,
        shape: TableShape,
        list: &mut ArenaList,
    ) -> Option<Fresh<'_, W>> {
        self.arena.take(promise, shape, list)
    }

    fn publish(&self, mut fresh: Fresh<'_, W>) {
        let paddr = fresh.paddr().get();
        let bytes = size_of_val(fresh.words());
        let place = ptr::from_ref(&*fresh.words()).addr();
        // All tables are as far from each other in this process as they are for hardware.
        self.place.store(place.wrapping_sub(self.index(paddr) << 2), Ordering::Relaxed);
        self.arena.publish(fresh);
        self.write_back(paddr, bytes);
    }

    fn entries(&self, table: &TableAddr) -> &[W::Atomic] {
        TableMemory::<W>::entries(&self.arena, table)
    }

    fn written(&self, _promise: Promise<'_>, entries: &[W::Atomic]) {
        let offset = ptr::from_ref(entries).addr().wrapping_sub(self.place.load(Ordering::Relaxed));
        self.write_back(self.base + offset as u64, size_of_val(entries));
    }

    fn retire(&self, list: &mut ArenaList, table: TableAddr) {
        TableMemory::<W>::retire(&self.arena, list, table);
    }

    fn append(&self, promise: Promise<'_>, list: &mut ArenaList, other: ArenaList) {
        TableMemory::<W>::append(&self.arena, promise, list, other);
    }

    fn free(&self, promise: Promise<'_>, shape: TableShape, list: ArenaList) {
        TableMemory::<W>::free(&self.arena, promise, shape, list);
    }
}
