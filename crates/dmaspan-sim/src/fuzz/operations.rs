//! Operations on a page table, beside an interval map.

use dmaspan::io_pgtable::{DirtyBitmap, Error, Format, MapUndone, PageTable, Retired};
use dmaspan::pin::{Kind, SpanSink};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf, lg2};

use super::choices::Choices;
use crate::arena::{Arena, ArenaList};
use crate::model::{Coverage, IntervalModel};

/// More would only take time.
const MOST_OPERATIONS: usize = 64;

/// Reads operations from bytes and applies them to a page table and to an interval map.
///
/// # Panics
///
/// Where the two disagree, or a table leaks.
pub fn operations<F: Format>(format: F, bytes: &[u8]) {
    let arena = Arena::new(PhysAddr::new(0x4000_0000), 16 << 20);
    let mut pair = Pair::new(format, arena.clone(), Choices::new(bytes));
    for _ in 0..MOST_OPERATIONS {
        if pair.choices.is_empty() {
            break;
        }
        pair.step();
    }
    pair.finish(&arena);
    drop(pair);
    assert_eq!(arena.tables(), 0, "tables leaked");
}

/// What unmapping is asked for beside the spans.
#[derive(Clone, Copy)]
enum Marks {
    Ignored,
    Read,
}

/// A table and what it should say.
struct Pair<'a, F: Format> {
    choices: Choices<'a>,
    table: PageTable<F, Arena>,
    model: IntervalModel,
    /// Where everything happens.
    window: IovaRange,
    /// Granules in it, in a table, and of memory.
    granules: u64,
    chunk: u64,
    memory: u64,
    /// Leaf sizes, log2 of granules, of which there is room for one.
    sizes: Vec<u32>,
}

impl<'a, F: Format> Pair<'a, F> {
    /// The window is at the start or the end of the aperture, or around a border of upper tables.
    fn new(format: F, arena: Arena, mut choices: Choices<'a>) -> Self {
        let geometry = format.geometry();
        let aperture = geometry.aperture;
        let first = aperture.start().get();
        let chunk = lg2::size(F::LG2_ENTRIES);
        let granules = (6 * chunk).min((aperture.len_less_one() >> F::GRANULE_LG2) + 1);
        let bytes = granules << F::GRANULE_LG2;
        let end = aperture.last().get() - (bytes - 1);
        let border = (first | lg2::mask(F::shift(2.min(geometry.top_level)))).wrapping_add(1);
        let around = border.wrapping_sub(bytes / 2).clamp(first, end);
        let around = lg2::align_down(around, F::GRANULE_LG2);
        let start = choices.one_of(first, &[first, around, end]);
        let memory = lg2::size(geometry.output_bits - F::GRANULE_LG2);
        let sizes = (F::GRANULE_LG2..geometry.output_bits.min(F::GRANULE_LG2 + F::LG2_ENTRIES + 1))
            .filter(|&lg2| geometry.page_sizes & lg2::size(lg2) != 0)
            .map(|lg2| lg2 - F::GRANULE_LG2);
        Self {
            choices,
            table: PageTable::new(format, arena).unwrap(),
            model: IntervalModel::new(),
            window: IovaRange::from_len(Iova::new(start), bytes).unwrap(),
            granules,
            chunk,
            memory,
            sizes: sizes.collect(),
        }
    }

    fn step(&mut self) {
        match self.choices.byte() % 16 {
            0..4 => self.map(),
            4..6 => self.map_pages(),
            6..9 => self.unmap(Marks::Ignored),
            9 => self.unmap(Marks::Read),
            10..12 => self.unmap_pages(),
            12 => self.protect(),
            13 => self.reclaim(),
            _ => self.look_up(),
        }
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

    /// What the format grants to whom asks for `prot`.
    fn granted(&self, prot: Prot) -> Prot {
        let format = self.table.format();
        let template = format.template(0, F::GRANULE_LG2, prot);
        format.prot(0, format.leaf(template, PhysAddr::new(0)))
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
        let range = IovaRange::from_len(iova, (next - at) << F::GRANULE_LG2).unwrap();
        let mut result = self.map_spans(iova, &spans, prot);
        if matches!(result, Err(Error::EmptyTable { .. })) {
            // As a domain does.
            let retired = self.table.whole().reclaim(range).unwrap();
            assert!(retired.has_tables());
            self.free(retired);
            result = self.map_spans(iova, &spans, prot);
        }
        match result {
            Ok(()) => self.model.map(iova, &spans, self.granted(prot)).unwrap(),
            Err(Error::Occupied { leaf }) => {
                assert!(leaf.intersection(range).is_some());
                assert_ne!(self.model.covered(range), Coverage::None);
            }
            Err(Error::Unsupported { .. }) => assert!(self.table.format().refuses(prot)),
            Err(error) => panic!("{error}"),
        }
        self.compare(range);
    }

    fn map_spans(&mut self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Error> {
        let result = self.table.whole().map_spans(iova, spans, prot);
        result.map_err(|MapUndone { error, retired }| {
            self.free(retired);
            error
        })
    }

    fn map_pages(&mut self) {
        let sizes = self.sizes.clone();
        let lg2 = self.choices.one_of(0, &sizes);
        let at = self.at();
        let iova = lg2::align_down(self.iova(at), lg2 + F::GRANULE_LG2).max(self.iova(0));
        let at = (iova - self.iova(0)) >> F::GRANULE_LG2;
        let count = (self.len(at) >> lg2).max(1);
        let paddr = lg2::align_down(self.paddr(at, count << lg2), lg2) << F::GRANULE_LG2;
        let (size, bytes) = (lg2::size(lg2 + F::GRANULE_LG2), count << (lg2 + F::GRANULE_LG2));
        let Ok(range) = IovaRange::from_len(Iova::new(iova), bytes) else { return };
        if !self.window.covers(range) || !lg2::is_aligned(iova, lg2 + F::GRANULE_LG2) {
            return;
        }
        let prot = self.prot();
        let whole = self.table.whole();
        let (done, result) =
            whole.map_pages(range.start(), PhysAddr::new(paddr), size, count, prot);
        let run = self.model.runs(range).first().copied();
        let in_way = run.map_or(bytes, |run| run.iova.start().get() - iova);
        match result {
            Ok(()) => assert_eq!((done, in_way), (bytes, bytes)),
            Err(Error::Occupied { .. }) => assert!(done <= in_way && in_way < bytes),
            Err(Error::EmptyTable { block }) => {
                assert!(lg2 > 0 && done <= in_way && block.intersection(range).is_some());
            }
            Err(Error::Unsupported { .. }) => assert!(self.table.format().refuses(prot)),
            Err(error) => panic!("{error}"),
        }
        if done > 0 {
            let span = Span::new(PhysAddr::new(paddr), done).unwrap();
            self.model.map(range.start(), &[span], self.granted(prot)).unwrap();
        }
        self.compare(range);
    }

    fn unmap(&mut self, marks: Marks) {
        let range = self.range();
        let (covered, cut) = (self.model.covered(range), self.is_cut(range));
        match self.unmap_in_batches(range, marks) {
            Ok(spans) => {
                assert!(covered == Coverage::All && !cut);
                assert_eq!(spans, self.model.unmap(range));
            }
            Err(Error::Hole { hole }) => assert!(self.model.lookup(hole.start()).is_none()),
            Err(Error::WouldSplit { leaf }) => {
                assert!(cut && !range.covers(leaf) && range.intersection(leaf).is_some());
            }
            Err(Error::NoDirtyBits { .. }) => assert!(!self.table.format().tracks_dirty()),
            Err(error) => panic!("{error}"),
        }
        self.compare(range);
    }

    /// Unmaps by a buffer of three spans; no leaf is marked, as no hardware writes.
    fn unmap_in_batches(&mut self, range: IovaRange, marks: Marks) -> Result<Vec<Span>, Error> {
        let granules = range.len_less_one() >> F::GRANULE_LG2;
        let mut words = vec![0; usize::try_from(granules / 64 + 1).unwrap()];
        let mut bitmap = DirtyBitmap::new(&mut words, range, lg2::size(F::GRANULE_LG2)).unwrap();
        let mut room = SpanBuf::room::<3>();
        let mut buf = SpanBuf::new(&mut room);
        let mut spans = Vec::new();
        let mut unmapped = match marks {
            Marks::Ignored => self.table.whole().unmap(range, &mut buf)?,
            Marks::Read => self.table.whole().unmap_dirty(range, &mut buf, &mut bitmap)?,
        };
        loop {
            for &span in buf.spans() {
                SpanSink::push(&mut spans, span, Kind::Memory).unwrap();
            }
            buf.clear();
            self.free(unmapped.retired);
            let Some(rest) = unmapped.rest else { break };
            let whole = self.table.whole();
            unmapped = match marks {
                Marks::Ignored => whole.resume(rest, &mut buf),
                Marks::Read => whole.resume_dirty(rest, &mut buf, &mut bitmap),
            };
        }
        assert!(words.iter().all(|&word| word == 0));
        Ok(spans)
    }

    fn unmap_pages(&mut self) {
        let range = self.range();
        let count = (range.len_less_one() >> F::GRANULE_LG2) + 1;
        let size = lg2::size(F::GRANULE_LG2);
        let gone = self.table.whole().unmap_pages(range.start(), size, count);
        self.free(gone.retired);
        if gone.bytes > 0 {
            let taken = IovaRange::from_len(range.start(), gone.bytes).unwrap();
            assert_eq!(self.model.covered(taken), Coverage::All);
            self.model.unmap(taken);
        }
        let next = Iova::new(range.start().get().wrapping_add(gone.bytes));
        match gone.result {
            Ok(()) => assert_eq!(gone.bytes - 1, range.len_less_one()),
            Err(Error::Hole { hole }) => {
                assert!(hole.contains(next) && self.model.lookup(next).is_none());
            }
            Err(Error::WouldSplit { leaf }) => assert!(leaf.contains(next) && !range.covers(leaf)),
            Err(error) => panic!("{error}"),
        }
        self.compare(range);
    }

    fn protect(&mut self) {
        let (range, prot) = (self.range(), self.prot());
        let (covered, cut) = (self.model.covered(range), self.is_cut(range));
        match self.table.whole().protect(range, prot) {
            Ok(retired) => {
                self.free(retired);
                assert!(covered == Coverage::All && !cut);
                let granted = self.granted(prot);
                for run in self.model.runs(range) {
                    let spans = self.model.unmap(run.iova);
                    self.model.map(run.iova.start(), &spans, granted).unwrap();
                }
            }
            Err(Error::Hole { .. }) => assert_ne!(covered, Coverage::All),
            Err(Error::WouldSplit { .. }) => assert!(cut),
            Err(Error::Unsupported { .. }) => assert!(self.table.format().refuses(prot)),
            // Some leaves cannot change under hardware's eyes.
            Err(Error::NeedsBreak { .. }) => assert!(self.table.format().breaks_to_change()),
            Err(error) => panic!("{error}"),
        }
        self.compare(range);
    }

    fn reclaim(&mut self) {
        let range = self.range();
        let retired = self.table.whole().reclaim(range).unwrap();
        self.free(retired);
        self.compare(range);
    }

    fn look_up(&mut self) {
        let iova = Iova::new(self.iova(self.granules - 1) | lg2::mask(F::GRANULE_LG2));
        self.look_up_at(iova);
        let at = self.at();
        let inside = self.iova(at) + self.choices.below(lg2::size(F::GRANULE_LG2));
        self.look_up_at(Iova::new(inside));
    }

    fn look_up_at(&mut self, iova: Iova) {
        let found = self.table.whole().iova_to_phys(iova);
        assert_eq!(found, self.model.lookup(iova).map(|(paddr, _)| paddr), "at {iova}");
    }

    /// Whether a leaf reaches over one end of the range: then it cannot be unmapped.
    fn is_cut(&mut self, range: IovaRange) -> bool {
        let behind = range.last().checked_add(1);
        self.cuts(range.start()) || behind.is_some_and(|behind| self.cuts(behind))
    }

    /// Whether one leaf has this address and the one before it: a leaf counts where it begins.
    fn cuts(&mut self, iova: Iova) -> bool {
        let whole = self.table.whole();
        let Some(before) = iova.get().checked_sub(1).map(Iova::new) else { return false };
        whole.iova_to_phys(before).is_some()
            && whole.iova_to_phys(iova).is_some()
            && whole.census(IovaRange::point(iova)).total() == 0
    }

    /// The walk says what the model does, at both ends of `range` and just outside.
    fn compare(&mut self, range: IovaRange) {
        let ends = [range.start(), range.last()];
        let [before, behind] =
            [range.start().get().wrapping_sub(1), range.last().get().wrapping_add(1)];
        let around =
            [before, behind].map(Iova::new).into_iter().filter(|&i| self.window.contains(i));
        for iova in ends.into_iter().chain(around.collect::<Vec<_>>()) {
            self.look_up_at(iova);
        }
    }

    /// The whole window says what the model does, and nothing is left when that is gone.
    fn finish(&mut self, arena: &Arena) {
        let window = self.window;
        let found: Vec<_> = self.table.whole().walk(window).collect();
        let found: Vec<_> = found.iter().map(|run| (run.range, run.paddr, run.prot)).collect();
        let runs = self.model.runs(window);
        let expected: Vec<_> = runs.iter().map(|run| (run.iova, run.paddr, run.prot)).collect();
        assert_eq!(found, expected);
        for run in runs {
            let spans = self.unmap_in_batches(run.iova, Marks::Ignored).unwrap();
            assert_eq!(spans, self.model.unmap(run.iova));
        }
        let whole = self.table.whole();
        let retired = whole.reclaim(whole.range()).unwrap();
        self.free(retired);
        assert_eq!(arena.tables(), 1, "only the root is left");
    }

    fn free(&self, retired: Retired<ArenaList>) {
        #[expect(unsafe_code, reason = "no hardware walks the table")]
        // SAFETY: no hardware walks the table.
        unsafe {
            self.table.free(retired);
        }
    }
}
