//! Operations on a page table, beside an interval map.

use dmaspan::io_pgtable::{Arena, Format, PageTable};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, lg2};

use super::choices::Choices;
use crate::model::IntervalModel;
use crate::modelled::{Marks, Modelled, claim};

/// More would only take time.
const MOST_OPERATIONS: usize = 64;

/// Reads operations from bytes and applies them to a page table and to an interval map.
///
/// # Panics
///
/// Where the two disagree, or a table leaks.
pub fn operations<F: Format>(format: F, bytes: &[u8]) {
    let arena = Arena::new(PhysAddr::new(0x4000_0000), 16 << 20);
    let table = PageTable::new(format, arena.clone()).unwrap();
    let mut pair = Pair::new(&table, bytes);
    pair.run();
    pair.finish();
    assert_eq!(arena.tables(), 1, "only the root is left");
    drop(pair);
    drop(table);
    assert_eq!(arena.tables(), 0, "tables leaked");
}

/// A table and what it should say, and what is done next.
pub(crate) struct Pair<'a, F: Format> {
    bytes: &'a [u8],
    choices: Choices<'a>,
    table: &'a PageTable<F, Arena>,
    pub(crate) model: IntervalModel,
    /// Where everything happens.
    pub(crate) window: IovaRange,
    /// Granules in it, in a table, and of memory.
    granules: u64,
    chunk: u64,
    memory: u64,
    /// Leaf sizes, log2 of granules, of which there is room for one.
    sizes: Vec<u32>,
}

impl<F: Format> Drop for Pair<'_, F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("in the window {}, by the bytes {:?}", self.window, self.bytes);
        }
    }
}

impl<'a, F: Format> Pair<'a, F> {
    /// The window is at the start or the end of the aperture, or around a border of upper tables.
    pub(crate) fn new(table: &'a PageTable<F, Arena>, bytes: &'a [u8]) -> Self {
        let mut choices = Choices::new(bytes);
        let geometry = table.format().geometry();
        let aperture = geometry.aperture;
        let first = aperture.start().get();
        let chunk = lg2::size(F::LG2_ENTRIES);
        let granules = (6 * chunk).min((aperture.len_less_one() >> F::GRANULE_LG2) + 1);
        let len = granules << F::GRANULE_LG2;
        let end = aperture.last().get() - (len - 1);
        let border = (first | lg2::mask(F::shift(2.min(geometry.top_level)))).wrapping_add(1);
        let around = border.wrapping_sub(len / 2).clamp(first, end);
        let around = lg2::align_down(around, F::GRANULE_LG2);
        let start = choices.one_of(first, &[first, around, end]);
        let memory = lg2::size(geometry.output_bits - F::GRANULE_LG2);
        let sizes = (F::GRANULE_LG2..geometry.output_bits.min(F::GRANULE_LG2 + F::LG2_ENTRIES + 1))
            .filter(|&lg2| geometry.page_sizes & lg2::size(lg2) != 0)
            .map(|lg2| lg2 - F::GRANULE_LG2);
        Self {
            bytes,
            choices,
            table,
            model: IntervalModel::new(),
            window: IovaRange::from_len(Iova::new(start), len).unwrap(),
            granules,
            chunk,
            memory,
            sizes: sizes.collect(),
        }
    }

    /// Does as many operations as the bytes are enough for.
    pub(crate) fn run(&mut self) {
        for _ in 0..MOST_OPERATIONS {
            if self.choices.is_empty() {
                break;
            }
            self.step();
        }
    }

    fn step(&mut self) {
        let which = self.choices.byte() % 16;
        match which {
            0..4 => self.map(),
            4..6 => self.map_pages(),
            14.. => self.look_up(),
            _ => {
                let range = self.range();
                match which {
                    6..9 => self.both().unmap(range, Marks::Ignored),
                    9 => self.both().unmap(range, Marks::Read),
                    10..12 => self.both().unmap_pages(range),
                    12 => {
                        let prot = self.prot();
                        self.both().protect(range, prot);
                    }
                    _ => self.both().reclaim(range),
                }
                self.compare(range);
            }
        }
    }

    fn both(&mut self) -> Modelled<'_, F> {
        let owned = claim(self.table, self.table.geometry().aperture);
        Modelled { table: self.table, owned, model: &mut self.model }
    }

    /// A place in the window, in granules: anywhere, or near the start of a table.
    fn at(&mut self) -> u64 {
        let at = match self.choices.byte() % 4 {
            0 => self.choices.below(self.granules),
            near => {
                let tables = self.granules / self.chunk + 1;
                self.choices.below(tables) * self.chunk + u64::from(near - 1) * 3
            }
        };
        at.min(self.granules - 1)
    }

    /// A length, in granules: small, or near that of tables, and up to the end of the window.
    fn len(&mut self, at: u64) -> u64 {
        let len = match self.choices.byte() % 4 {
            0 | 1 => self.choices.below(20),
            2 => self.choices.below(4) * self.chunk,
            _ => self.choices.below(self.granules),
        };
        len.clamp(1, self.granules - at)
    }

    fn iova(&self, at: u64) -> u64 {
        self.window.start().get() + (at << F::GRANULE_LG2)
    }

    fn range(&mut self) -> IovaRange {
        let at = self.at();
        let len = self.len(at);
        IovaRange::from_len(Iova::new(self.iova(at)), len << F::GRANULE_LG2).unwrap()
    }

    fn prot(&mut self) -> Prot {
        let all = [Prot::READ_WRITE, Prot::READ, Prot::READ_WRITE | Prot::CACHE];
        self.choices.one_of(Prot::READ_WRITE, &all)
    }

    /// Memory for the granules at `at`, of which large leaves can be made or not.
    fn paddr(&mut self, at: u64, len: u64) -> u64 {
        let paddr = match self.choices.byte() % 4 {
            0 => self.choices.below(0x1000),
            1 => self.choices.below(8) * self.chunk,
            _ => (self.iova(at) >> F::GRANULE_LG2) % self.chunk + self.chunk,
        };
        paddr.min(self.memory.saturating_sub(len))
    }

    fn map(&mut self) {
        let at = self.at();
        let count = 1 + self.choices.byte() % 4;
        let mut spans = Vec::new();
        let mut next = at;
        for _ in 0..count {
            if next == self.granules {
                break;
            }
            let len = self.len(next);
            let paddr = PhysAddr::new(self.paddr(next, len) << F::GRANULE_LG2);
            spans.push(Span::new(paddr, len << F::GRANULE_LG2).unwrap());
            next += len;
        }
        let prot = self.prot();
        let iova = Iova::new(self.iova(at));
        self.both().map(iova, &spans, prot);
        self.compare(IovaRange::from_len(iova, (next - at) << F::GRANULE_LG2).unwrap());
    }

    fn map_pages(&mut self) {
        let sizes = self.sizes.clone();
        let lg2 = self.choices.one_of(0, &sizes);
        let at = self.at();
        let iova = lg2::align_down(self.iova(at), lg2 + F::GRANULE_LG2).max(self.iova(0));
        let at = (iova - self.iova(0)) >> F::GRANULE_LG2;
        let count = (self.len(at) >> lg2).max(1);
        let paddr = lg2::align_down(self.paddr(at, count << lg2), lg2) << F::GRANULE_LG2;
        let bytes = count << (lg2 + F::GRANULE_LG2);
        let Ok(range) = IovaRange::from_len(Iova::new(iova), bytes) else { return };
        if !self.window.covers(range) || !lg2::is_aligned(iova, lg2 + F::GRANULE_LG2) {
            return;
        }
        let prot = self.prot();
        self.both().map_pages(range, PhysAddr::new(paddr), lg2 + F::GRANULE_LG2, prot);
        self.compare(range);
    }

    fn look_up(&mut self) {
        let last = Iova::new(self.iova(self.granules - 1) | lg2::mask(F::GRANULE_LG2));
        self.both().look_up(last);
        let at = self.at();
        let inside = self.iova(at) + self.choices.below(lg2::size(F::GRANULE_LG2));
        self.both().look_up(Iova::new(inside));
    }

    /// The walk says what the model does, at both ends of `range` and just outside.
    fn compare(&mut self, range: IovaRange) {
        let (start, last) = (range.start(), range.last());
        for iova in [start, last, start.wrapping_add(u64::MAX), last.wrapping_add(1)] {
            if self.window.contains(iova) {
                self.both().look_up(iova);
            }
        }
    }

    /// The whole window says what the model does, and nothing is left when that is gone.
    fn finish(&mut self) {
        let window = self.window;
        self.both().agree(window);
        for run in self.model.runs(window) {
            self.both().unmap(run.iova, Marks::Ignored);
        }
        let everything = self.table.geometry().aperture;
        self.both().reclaim(everything);
    }
}
