//! Operations on tables whose words are anything.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use dmaspan::io_pgtable::{
    Arena, ArenaList, DirtyBitmap, Format, Fresh, NoTables, PageTable, TableAddr, TableMemory,
    TableShape, Word,
};
use dmaspan::{Coherency, Iova, IovaRange, PhysAddr, Promise, Prot, Span, SpanBuf, lg2};
use parking_lot::Mutex;

use super::choices::{Bits, Choices};
use crate::modelled::free;

/// Tables beside the root.
const TABLES: usize = 4;
const MOST_ENTRIES: u8 = 32;
const MOST_OPERATIONS: usize = 16;
/// How many tables an operation may enter. Below a table that leads to itself there are as many as
/// a whole tree has; behind this many there are none.
const MOST_STEPS: u32 = 2000;
/// The most granules of an operation: those of a table are visited one by one.
const MOST_GRANULES: u64 = 1 << 14;

/// Table memory that had tables before the page table came, and fills the root.
///
/// It answers no entries for an address that is no table in a tree, and takes a table out of the
/// tree once, however many links lead to it.
struct HostileTables<W> {
    inner: Arena,
    /// log2 of the bytes of the tables that are in a tree, by their address.
    tables: Mutex<BTreeMap<u64, u32>>,
    /// What the root is filled with when it is published.
    root: Mutex<Option<Vec<W>>>,
    steps: AtomicU32,
}

impl<W: Word> HostileTables<W> {
    fn new() -> Self {
        Self {
            inner: Arena::new(PhysAddr::new(0x4000_0000), 4 << 20),
            tables: Mutex::default(),
            root: Mutex::default(),
            steps: AtomicU32::new(0),
        }
    }

    fn has(&self, table: &TableAddr) -> bool {
        self.tables.lock().get(&table.paddr().get()) == Some(&table.lg2_size())
    }
}

#[expect(unsafe_code, reason = "everything but the content of the first tables is the arena's")]
// SAFETY: 1. to 5. Every table comes from the arena and goes back to it. Entries are given of
// tables alone that were published and neither retired nor freed since, and a table is retired only
// then, so the arena sees no table twice whatever the entries say.
unsafe impl<W: Word> TableMemory<W> for HostileTables<W> {
    type List = ArenaList;

    fn publish(&self, mut fresh: Fresh<'_, W>) {
        if let Some(root) = self.root.lock().take() {
            for (word, hostile) in fresh.words().iter_mut().zip(root) {
                *word = hostile;
            }
        }
        let lg2_size = lg2::floor(size_of_val(fresh.words()) as u64);
        self.tables.lock().insert(fresh.paddr().get(), lg2_size);
        self.inner.publish(fresh);
    }

    fn entries(&self, table: &TableAddr) -> &[W::Atomic] {
        if self.steps.fetch_add(1, Ordering::Relaxed) >= MOST_STEPS || !self.has(table) {
            return &[];
        }
        TableMemory::<W>::entries(&self.inner, table)
    }

    fn retire(&self, list: &mut ArenaList, table: TableAddr) {
        if self.has(&table) {
            self.tables.lock().remove(&table.paddr().get());
            TableMemory::<W>::retire(&self.inner, list, table);
        }
    }

    forward! { inner: Arena as TableMemory<W>:
        fn coherency(&self) -> Coherency;
        fn reserve(&self, shape: TableShape, count: usize) -> Result<ArenaList, NoTables>;
        fn take(
            &self, promise: Promise<'_>, shape: TableShape, list: &mut ArenaList
        ) -> Option<Fresh<'_, W>>;
        fn append(&self, promise: Promise<'_>, list: &mut ArenaList, other: ArenaList);
        fn free(&self, promise: Promise<'_>, shape: TableShape, list: ArenaList);
    }
}

/// Reads the words of tables from bytes, and then operations on a tree of these tables: entries
/// that no operation wrote, links to tables that are none, and tables that lead to themselves.
///
/// # Panics
///
/// Where an operation does, or a table is lost.
pub fn hostile<F: Format<Word: Bits>>(format: F, bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let memory = HostileTables::new();
    fill(&format, &memory, &mut choices);
    let arena = memory.inner.clone();
    let table = PageTable::new(format, memory).unwrap();
    let mut tree = Tree { table, choices };
    for _ in 0..MOST_OPERATIONS {
        if tree.choices.is_empty() {
            break;
        }
        tree.table.memory().steps.store(0, Ordering::Relaxed);
        tree.step();
    }
    let memory = tree.table.memory();
    memory.steps.store(0, Ordering::Relaxed);
    assert_eq!(memory.tables.lock().len(), arena.tables(), "a table was lost");
}

/// Publishes tables with the entries that some bytes choose, and keeps those of the root ready.
fn fill<F: Format<Word: Bits>>(
    format: &F,
    memory: &HostileTables<F::Word>,
    choices: &mut Choices<'_>,
) {
    let geometry = format.geometry();
    let mut list = TableMemory::<F::Word>::reserve(memory, geometry.table, TABLES).unwrap();
    #[expect(unsafe_code, reason = "takes the tables as the walker does")]
    let mut tables = [(); TABLES].map(|()| {
        // SAFETY: the list was reserved with this shape, in this memory.
        let promise = unsafe { Promise::new() };
        memory.take(promise, geometry.table, &mut list).unwrap()
    });
    let root_len = 1 << (geometry.root.lg2_size - F::Word::LG2_BYTES);
    let mut root = vec![F::Word::EMPTY; root_len];
    let addresses = tables.each_ref().map(Fresh::paddr);
    tables.iter_mut().for_each(|table| table.words().fill(F::Word::EMPTY));
    for _ in 0..choices.byte() % MOST_ENTRIES {
        let which = usize::from(choices.byte()) % (TABLES + 1);
        let words = match tables.get_mut(which) {
            Some(table) => table.words(),
            None => &mut root[..],
        };
        let from = match choices.byte() % 4 {
            0 => choices.below(words.len() as u64),
            near => u64::from(near - 1),
        };
        let count = choices.one_of(1, &[1, 1, 2, 16, words.len()]);
        let entry = Hostile::new(format, &addresses, choices);
        let from = usize::try_from(from).unwrap();
        for (n, word) in (0u64..).zip(words.iter_mut().skip(from).take(count)) {
            *word = format.advance(entry.word, n.wrapping_mul(entry.step));
        }
    }
    tables.into_iter().for_each(|table| memory.publish(table));
    *memory.root.lock() = Some(root);
}

/// The words of some entries: the first, and the bytes from one to the next.
struct Hostile<W> {
    word: W,
    step: u64,
}

impl<W: Bits> Hostile<W> {
    fn new<F: Format<Word = W>>(
        format: &F,
        tables: &[PhysAddr],
        choices: &mut Choices<'_>,
    ) -> Self {
        let geometry = format.geometry();
        let kind = choices.byte() % 8;
        if kind == 0 || (kind < 4 && geometry.top_level == 0) {
            return Self { word: W::from_bits(choices.word()), step: 0 };
        }
        if kind < 4 {
            let level = 1 + u32::from(choices.byte()) % geometry.top_level;
            let table = choices.one_of(PhysAddr::new(0), tables);
            let word = format.link(level, table);
            // A link that says more than it may.
            let flip = if kind == 3 { choices.word() } else { 0 };
            return Self { word: word | W::from_bits(flip), step: 0 };
        }
        let sizes = (0..64).filter(|&lg2| geometry.page_sizes & lg2::size(lg2) != 0);
        let sizes: Vec<u32> = sizes.filter(|&lg2| lg2 <= geometry.output_bits).collect();
        let lg2 = choices.one_of(F::GRANULE_LG2, &sizes);
        let level = F::level_of(lg2);
        let mask = lg2::mask(geometry.output_bits) & !lg2::mask(lg2);
        let paddr = PhysAddr::new(choices.word() & mask);
        let word = format.leaf(format.template(level, lg2, Prot::READ_WRITE), paddr);
        let flip = if kind == 4 { choices.word() } else { 0 };
        let step = choices.one_of(0, &[0, lg2::size(F::shift(level))]);
        Self { word: word | W::from_bits(flip), step }
    }
}

/// A tree of tables that are not its own.
struct Tree<'a, F: Format> {
    table: PageTable<F, HostileTables<F::Word>>,
    choices: Choices<'a>,
}

impl<F: Format> Tree<'_, F> {
    /// A range that begins where entries probably are.
    fn range(&mut self) -> IovaRange {
        let aperture = self.table.geometry().aperture;
        let mut offset = 0;
        for level in 0..=self.table.geometry().top_level {
            let index = match self.choices.byte() % 4 {
                0 => self.choices.below(lg2::size(F::LG2_ENTRIES)),
                near => u64::from(near - 1),
            };
            offset |= index << F::shift(level);
        }
        let last = aperture.last().get();
        let start = aperture.start().get() + (offset & aperture.len_less_one());
        let start = start.min(lg2::align_down(last, F::GRANULE_LG2));
        let len = match self.choices.byte() % 4 {
            0 => 1,
            1 => 1 + self.choices.below(16),
            2 => lg2::size(F::LG2_ENTRIES),
            _ => 1 + self.choices.below(MOST_GRANULES),
        };
        let end = start.saturating_add((len << F::GRANULE_LG2) - 1).min(last);
        IovaRange::new(Iova::new(start), Iova::new(end)).unwrap()
    }

    fn step(&mut self) {
        let which = self.choices.byte() % 8;
        let range = self.range();
        match which {
            0 => self.read(range),
            1 | 2 => self.unmap(range),
            3 => {
                let count = (range.len_less_one() >> F::GRANULE_LG2) + 1;
                let size = lg2::size(F::GRANULE_LG2);
                let gone = self.table.whole().unmap_pages(range.start(), size, count);
                free(&self.table, gone.retired);
            }
            4 => self.dirty(range),
            5 => {
                if let Ok(retired) = self.table.whole().protect(range, Prot::READ) {
                    free(&self.table, retired);
                }
            }
            6 => {
                let retired = self.table.whole().reclaim(range).unwrap();
                free(&self.table, retired);
            }
            _ => self.map(range),
        }
    }

    fn read(&mut self, range: IovaRange) {
        let whole = self.table.whole();
        let mut next = range.start();
        for run in whole.walk(range) {
            assert!(range.covers(run.range) && next <= run.range.start(), "{run:?} in {range}");
            next = run.range.last();
        }
        whole.census(range);
        let drawn = self.table.dump().of(range).lines().to_string();
        assert!(drawn.lines().count() >= 2, "{drawn}");
        let whole = self.table.whole();
        whole.iova_to_phys(range.start());
        whole.iova_to_phys(range.last());
    }

    fn unmap(&mut self, range: IovaRange) {
        let mut room = SpanBuf::room::<4>();
        let mut buf = SpanBuf::new(&mut room);
        let Ok(mut unmapped) = self.table.whole().unmap(range, &mut buf) else {
            assert!(buf.spans().is_empty());
            return;
        };
        for _ in 0..8 {
            free(&self.table, unmapped.retired);
            buf.clear();
            let Some(rest) = unmapped.rest else { break };
            unmapped = self.table.whole().resume(rest, &mut buf);
        }
    }

    fn dirty(&mut self, range: IovaRange) {
        let mut words = vec![0; usize::try_from(MOST_GRANULES / 64 + 1).unwrap()];
        let mut bitmap = DirtyBitmap::new(&mut words, range, lg2::size(F::GRANULE_LG2)).unwrap();
        if self.table.whole().read_dirty(range, &mut bitmap).is_err() {
            return;
        }
        if let Ok(retired) = self.table.whole().read_and_clear_dirty(range, &mut bitmap) {
            free(&self.table, retired);
        }
        let mut room = SpanBuf::room::<4>();
        let mut buf = SpanBuf::new(&mut room);
        if let Ok(unmapped) = self.table.whole().unmap_dirty(range, &mut buf, &mut bitmap) {
            free(&self.table, unmapped.retired);
        }
    }

    fn map(&mut self, range: IovaRange) {
        let bytes = (range.len_less_one() | lg2::mask(F::GRANULE_LG2)).wrapping_add(1);
        let paddr = PhysAddr::new(self.choices.below(8) << F::GRANULE_LG2);
        let Ok(span) = Span::new(paddr, bytes) else { return };
        match self.choices.byte() % 2 {
            0 => {
                let size = lg2::size(F::GRANULE_LG2);
                let count = bytes >> F::GRANULE_LG2;
                let whole = self.table.whole();
                let _ = whole.map_pages(range.start(), paddr, size, count, Prot::READ_WRITE);
            }
            _ => {
                let failed = self.table.whole().map_spans(range.start(), &[span], Prot::READ_WRITE);
                if let Err(failed) = failed {
                    free(&self.table, failed.retired);
                }
            }
        }
    }
}
