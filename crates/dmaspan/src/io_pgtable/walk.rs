//! Looking up what is mapped, as maximal runs.

use core::iter::FusedIterator;
use core::ops::{ControlFlow, Range};

use super::cursor::{Cursor, Reached};
use super::format::{Entry, Format};
use super::memory::TableMemory;
use super::readers::Generation;
use super::runs::Runs;
use super::scan::Piece;
use super::word::Word;
use super::{Owned, PageTable};
use crate::addr::{Iova, PhysAddr};
use crate::lg2;
use crate::prot::Prot;
use crate::range::IovaRange;
use crate::span::Span;

/// Contiguous translations with the same permissions: as far as they go, whatever their leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedRun {
    /// Which IOVAs.
    pub range: IovaRange,
    /// Where the first of them leads.
    pub paddr: PhysAddr,
    /// What a device may do there.
    pub prot: Prot,
}

impl MappedRun {
    /// Both as one, where `next` continues this in IOVAs, memory and permissions.
    pub(super) fn join(self, next: Self) -> Option<Self> {
        // Of corrupt tables the next may begin before this one; then it is not joined.
        let offset = next.range.start().get().wrapping_sub(self.range.start().get());
        let contiguous = self.range.last().checked_add(1) == Some(next.range.start())
            && self.paddr.checked_add(offset) == Some(next.paddr);
        if !contiguous || self.prot != next.prot {
            return None;
        }
        let range = IovaRange::new(self.range.start(), next.range.last())?;
        Some(Self { range, ..self })
    }
}

/// How many runs a walk reads ahead, in one section.
const BATCH: usize = 64;
/// How many pieces of tables a section reads at most, however few runs they make: tables that are
/// freed meanwhile wait for it.
pub(super) const PIECES: usize = 256;

/// Yields what is mapped in a range, as maximal runs in the order of IOVAs. Holes are left out.
///
/// Others may map and unmap in the range meanwhile. The walk is complete for what is mapped all the
/// time, and shows nothing that the table did not map at some moment of the walk. It reads some
/// runs ahead; between its steps it holds nothing up, so that it may be kept, or forgotten, for as
/// long as one likes.
///
/// An entry that no operation of the table wrote is passed over like a hole.
#[derive(Debug)]
#[must_use = "a walk reads nothing before it is asked"]
pub struct Walk<'t, F: Format, M: TableMemory<F::Word>> {
    table: &'t PageTable<F, M>,
    /// What was not read.
    rest: Option<IovaRange>,
    /// The last run of what was read: it may go on.
    open: Option<MappedRun>,
    /// Runs that were read, and which of them were not yielded.
    read: [MappedRun; BATCH],
    left: Range<usize>,
}

impl<'t, F: Format, M: TableMemory<F::Word>> Walk<'t, F, M> {
    pub(super) fn new(table: &'t PageTable<F, M>, range: Option<IovaRange>) -> Self {
        let nothing = MappedRun {
            range: IovaRange::point(Iova::new(0)),
            paddr: PhysAddr::new(0),
            prot: Prot::empty(),
        };
        Self { table, rest: range, open: None, read: [nothing; BATCH], left: 0..0 }
    }

    /// Reads the next runs of `range`, as a reader.
    fn read(&mut self, range: IovaRange) {
        let table = self.table;
        let (open, runs) = (&mut self.open, &mut self.read);
        let mut count = 0;
        self.rest = table.read_section(range, |piece| {
            if count == BATCH {
                return ControlFlow::Break(());
            }
            let Piece::Leaves { range, paddr, level, word, .. } = piece else {
                return ControlFlow::Continue(());
            };
            let next = MappedRun { range, paddr, prot: table.format.prot(level, word) };
            match open.and_then(|run| run.join(next)) {
                Some(joined) => *open = Some(joined),
                None => {
                    if let Some(run) = open.replace(next) {
                        runs[count] = run;
                        count += 1;
                    }
                }
            }
            ControlFlow::Continue(())
        });
        self.left = 0..count;
    }
}

impl<F: Format, M: TableMemory<F::Word>> Iterator for Walk<'_, F, M> {
    type Item = MappedRun;

    fn next(&mut self) -> Option<MappedRun> {
        loop {
            if let Some(next) = self.left.next() {
                return self.read.get(next).copied();
            }
            match self.rest.take() {
                Some(range) => self.read(range),
                None => return self.open.take(),
            }
        }
    }
}

impl<F: Format, M: TableMemory<F::Word>> FusedIterator for Walk<'_, F, M> {}

/// A reader of a table, until it is dropped.
pub(super) struct Reader<'t, F: Format, M: TableMemory<F::Word>> {
    table: &'t PageTable<F, M>,
    generation: Generation,
}

impl<F: Format, M: TableMemory<F::Word>> Drop for Reader<'_, F, M> {
    fn drop(&mut self) {
        let table = self.table;
        table.readers.leave(
            self.generation,
            |list, more| table.append(list, more),
            |tables| table.give_back(tables),
        );
    }
}

/// Counts the leaves of each size that translate a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeafCensus {
    counts: [u64; 64],
}

impl Default for LeafCensus {
    fn default() -> Self {
        Self { counts: [0; 64] }
    }
}

impl LeafCensus {
    /// The leaves that a mapping of `spans`, one behind the other from `iova` on, gets in a table
    /// with leaves of `page_sizes`, bit n for 2^n bytes: the fewest that both addresses allow.
    ///
    /// ```
    /// use dmaspan::io_pgtable::LeafCensus;
    /// use dmaspan::{Iova, PhysAddr, Span};
    ///
    /// let memory = [Span::new(PhysAddr::new(0x8000_0000), 4 << 20)?];
    /// let sizes = 1 << 12 | 1 << 21;
    /// let of = |iova| LeafCensus::of_spans(sizes, Iova::new(iova), &memory).sizes().collect();
    /// let (aligned, off_by_a_page): (Vec<_>, Vec<_>) = (of(0), of(0x1000));
    /// assert_eq!((aligned, off_by_a_page), (vec![(21, 2)], vec![(12, 1024)]));
    /// Ok::<(), dmaspan::RangeError>(())
    /// ```
    pub fn of_spans(page_sizes: u64, iova: Iova, spans: &[Span]) -> Self {
        let mut census = Self::default();
        for run in Runs::new(page_sizes, iova.get(), spans) {
            if let Some(count) = census.counts.get_mut(run.lg2 as usize) {
                *count += run.bytes >> run.lg2;
            }
        }
        census
    }

    /// The number of leaves of `2^lg2` bytes.
    pub fn count(&self, lg2: u32) -> u64 {
        self.counts.get(lg2 as usize).copied().unwrap_or(0)
    }

    /// The number of leaves of all sizes.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sizes that occur, log2 of bytes, ascending, each with its number of leaves.
    pub fn sizes(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        (0u32..).zip(self.counts).filter(|&(_, count)| count != 0)
    }

    /// Counts the leaves that begin in a piece.
    fn count_piece<W>(&mut self, piece: &Piece<W>) {
        let &Piece::Leaves { range, lg2, .. } = piece else { return };
        // Multiples of the leaf size within the range: one begins at each.
        let before = range.start().get().checked_sub(1).map(|before| before >> lg2);
        let begun = match before {
            Some(before) => (range.last().get() >> lg2) - before,
            None => (range.last().get() >> lg2) + 1,
        };
        if let Some(count) = self.counts.get_mut(lg2 as usize) {
            *count += begun;
        }
    }

    /// Adds what another range has.
    pub fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
    }
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Visits `range` as a [reader](super::readers): whoever frees tables waits for `visit`.
    pub(super) fn read<B>(
        &self,
        range: IovaRange,
        visit: impl FnMut(Piece<F::Word>) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        let _reader = self.reader();
        self.scan(range, visit)
    }

    /// The same up to a piece that `visit` breaks at, or to as many as a section has; returns what
    /// is left of `range`, from that piece on.
    fn read_section(
        &self,
        range: IovaRange,
        mut visit: impl FnMut(Piece<F::Word>) -> ControlFlow<()>,
    ) -> Option<IovaRange> {
        let mut pieces = 0;
        let ended = self.read(range, |piece| {
            if pieces == PIECES || visit(piece).is_break() {
                return ControlFlow::Break(piece.start());
            }
            pieces += 1;
            ControlFlow::Continue(())
        });
        ended.break_value().and_then(|next| IovaRange::new(next, range.last()))
    }

    /// A [reader](super::readers), until it is dropped.
    pub(super) fn reader(&self) -> Reader<'_, F, M> {
        Reader { table: self, generation: self.readers.enter() }
    }

    /// Returns what is mapped in `range`, as maximal runs with their permissions, also while others
    /// map and unmap there.
    ///
    /// A section of the walk takes as long as it takes to read a few hundred tables. Tables that
    /// are freed meanwhile are given back to their memory by the walk; mapping and unmapping wait
    /// for nothing.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{Arena, PageTable, X86_64, X86_64Config};
    /// use dmaspan::{Iova, PhysAddr, Prot, Span};
    ///
    /// fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///     let format = X86_64::new(X86_64Config::new(48, 48))?;
    ///     let mut table = PageTable::new(format, Arena::default())?;
    ///     let whole = table.whole();
    ///     let span = |paddr, len| Span::new(PhysAddr::new(paddr), len);
    ///     whole.map_spans(Iova::new(0x1000), &[span(0x8000, 0x2000)?], Prot::READ)?;
    ///     whole.map_spans(Iova::new(0x3000), &[span(0xa000, 0x1000)?], Prot::READ)?;
    ///     whole.map_spans(Iova::new(0x4000), &[span(0xb000, 0x1000)?], Prot::READ_WRITE)?;
    ///
    ///     let runs = table.walk(table.geometry().aperture);
    ///     let runs: Vec<_> = runs.map(|run| (run.range.to_string(), run.paddr.get())).collect();
    ///     let expected = [("0x1000..=0x3fff", 0x8000), ("0x4000..=0x4fff", 0xb000)];
    ///     assert_eq!(runs, expected.map(|(range, paddr)| (range.to_owned(), paddr)));
    ///     Ok(())
    /// }
    /// ```
    pub fn walk(&self, range: IovaRange) -> Walk<'_, F, M> {
        Walk::new(self, self.geometry.aperture.intersection(range))
    }

    /// Returns where `iova` leads, and `None` where nothing is mapped, also while others map and
    /// unmap there.
    pub fn iova_to_phys(&self, iova: Iova) -> Option<PhysAddr> {
        self.geometry.aperture.contains(iova).then_some(())?;
        let _reader = self.reader();
        self.look_up(iova)
    }

    /// Returns how many leaves of each size translate `range`, also while others map and unmap
    /// there. A leaf counts where it begins.
    pub fn census(&self, range: IovaRange) -> LeafCensus {
        let mut census = LeafCensus::default();
        let mut rest = self.geometry.aperture.intersection(range);
        while let Some(range) = rest {
            rest = self.read_section(range, |piece| {
                census.count_piece(&piece);
                ControlFlow::Continue(())
            });
        }
        census
    }

    /// Where `iova` leads, which is in the aperture.
    fn look_up(&self, iova: Iova) -> Option<PhysAddr> {
        let mut cursor = Cursor::new(self, iova.get());
        let level = match cursor.reach(iova.get(), 0) {
            Reached::Table => 0,
            Reached::Stopped { level, .. } => level,
        };
        let word = F::Word::load(cursor.entries_from(level, iova.get()).first()?);
        let Entry::Leaf(leaf) = self.format.decode(level, word) else { return None };
        let offset = iova.get()
            & lg2::mask(match F::GROUPS {
                super::Groups::Consecutive => F::shift(level),
                super::Groups::Repeated => leaf.lg2,
            });
        Some(leaf.paddr.wrapping_add(offset))
    }
}

impl<'t, F: Format, M: TableMemory<F::Word>> Owned<'t, F, M> {
    /// Returns where `iova` leads: `None` where nothing is mapped or the address is not owned.
    pub fn iova_to_phys(&self, iova: Iova) -> Option<PhysAddr> {
        if !self.within?.contains(iova) {
            return None;
        }
        self.table.look_up(iova)
    }

    /// Returns what is mapped in `range`, as maximal runs with their permissions. The part of the
    /// range that is not owned counts as a hole.
    pub fn walk(&self, range: IovaRange) -> Walk<'t, F, M> {
        Walk::new(self.table, self.within.and_then(|within| within.intersection(range)))
    }

    /// Returns how many leaves of each size translate `range`. A leaf counts where it begins.
    pub fn census(&self, range: IovaRange) -> LeafCensus {
        match self.within.and_then(|within| within.intersection(range)) {
            Some(range) => self.table.census(range),
            None => LeafCensus::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io_pgtable::{Arena, X86_64, X86_64Config};
    use crate::span::SpanBuf;

    fn range(start: u64, len: u64) -> IovaRange {
        IovaRange::from_len(Iova::new(start), len).unwrap()
    }

    fn span(paddr: u64, len: u64) -> Span {
        Span::new(PhysAddr::new(paddr), len).unwrap()
    }

    #[test]
    fn a_section_ends_at_its_bound_and_the_next_goes_on_there() {
        const BLOCK: u64 = 2 << 20;
        let format = X86_64::new(X86_64Config::new(48, 48)).unwrap();
        let tables = Arena::new(PhysAddr::new(1 << 30), 8 << 20);
        let mut table = PageTable::new(format, tables).unwrap();
        let whole = table.whole();
        let blocks = PIECES as u64 + 40;
        let mut room = SpanBuf::room::<1>();
        // Empty tables, each of which is a hole by itself.
        for n in 0..blocks {
            whole.map_spans(Iova::new(n * BLOCK), &[span(0, 4096)], Prot::READ).unwrap();
            let mut buf = SpanBuf::new(&mut room);
            let gone = whole.unmap(range(n * BLOCK, 4096), &mut buf).unwrap();
            assert!(!gone.retired.has_tables());
        }
        let all = range(0, blocks * BLOCK);
        let mut visited = 0;
        let rest = table.read_section(all, |_| {
            visited += 1;
            ControlFlow::Continue(())
        });
        assert_eq!(visited, PIECES);
        assert_eq!(rest, Some(range(PIECES as u64 * BLOCK, 40 * BLOCK)));
        assert_eq!(table.read_section(rest.unwrap(), |_| ControlFlow::Continue(())), None);
        let rest = table.read_section(all, |piece| match piece.start().get() / BLOCK {
            3 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        });
        assert_eq!(rest, Some(range(3 * BLOCK, (blocks - 3) * BLOCK)));
        // The next section finds a leaf behind the first one.
        let last = Iova::new((blocks - 1) * BLOCK);
        table.whole().map_spans(last, &[span(0x5000, 4096)], Prot::READ).unwrap();
        assert_eq!(table.census(all).total(), 1);
        assert_eq!(table.walk(all).map(|run| run.range.start()).next(), Some(last));
        assert_eq!(table.iova_to_phys(last.wrapping_add(7)), Some(PhysAddr::new(0x5007)));
        assert_eq!(table.iova_to_phys(last.wrapping_add(1 << 48)), None, "it is no IOVA");
    }

    #[test]
    fn a_census_of_spans_counts_leaves_by_size_and_adds_up() {
        let sizes = 1 << 12 | 1 << 21;
        let spans = [span(0x1ff_f000, 0x3000), span(0x20_2000, 2 << 20)];
        let mut census = LeafCensus::of_spans(sizes, Iova::new(0x1f_f000), &spans);
        assert_eq!(census.sizes().collect::<alloc::vec::Vec<_>>(), [(12, 515)]);
        let large = LeafCensus::of_spans(sizes, Iova::new(0), &[span(4 << 20, 4 << 20)]);
        census.add(&large);
        census.add(&large);
        let count = |lg2| census.count(lg2);
        assert_eq!([12, 13, 21, 64].map(count), [515, 0, 4, 0]);
        assert_eq!(census.total(), 519);
    }
}
