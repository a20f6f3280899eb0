//! A range of a page table beside an interval map: each operation is done to both, and they agree.

use dmaspan::io_pgtable::{Arena, MappedRun, TableMemory};
use dmaspan::io_pgtable::{DirtyBitmap, Error, Format, MapUndone, Owned, PageTable, Retired};
use dmaspan::pin::{Kind, SpanSink};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf, lg2};

use crate::model::{Coverage, IntervalModel};

/// What unmapping is asked for beside the spans.
#[derive(Clone, Copy)]
pub(crate) enum Marks {
    Ignored,
    Read,
}

/// A range of a table that one thread has, and what it should say. Every operation panics where the
/// two disagree.
pub(crate) struct Modelled<'t, F: Format> {
    pub(crate) table: &'t PageTable<F, Arena>,
    pub(crate) owned: Owned<'t, F, Arena>,
    pub(crate) model: &'t mut IntervalModel,
}

impl<F: Format> Modelled<'_, F> {
    /// Maps, and reclaims empty tables that are in the way, as a domain does.
    pub(crate) fn map(&mut self, iova: Iova, spans: &[Span], prot: Prot) {
        let len = spans.iter().map(|span| span.len()).sum();
        let range = IovaRange::from_len(iova, len).unwrap();
        let mut result = self.map_spans(iova, spans, prot);
        if matches!(result, Err(Error::EmptyTable { .. })) {
            let retired = self.owned.reclaim(range).unwrap();
            assert!(retired.has_tables());
            free(self.table, retired);
            result = self.map_spans(iova, spans, prot);
        }
        let format = self.table.format();
        match result {
            Ok(()) => self.model.map(iova, spans, granted(format, prot)).unwrap(),
            Err(Error::Occupied { leaf }) => {
                assert!(leaf.intersection(range).is_some());
                assert_ne!(self.model.covered(range), Coverage::None);
            }
            Err(Error::Unsupported { .. }) => assert!(format.refuses(prot)),
            Err(error) => panic!("{error}"),
        }
    }

    fn map_spans(&self, iova: Iova, spans: &[Span], prot: Prot) -> Result<(), Error> {
        self.owned.map_spans(iova, spans, prot).map_err(|MapUndone { error, retired }| {
            free(self.table, retired);
            error
        })
    }

    /// Maps leaves of one size: those before the first that is in the way.
    pub(crate) fn map_pages(&mut self, range: IovaRange, paddr: PhysAddr, lg2: u32, prot: Prot) {
        let (iova, bytes) = (range.start(), range.len_less_one() + 1);
        let (size, count) = (lg2::size(lg2), bytes >> lg2);
        let (done, result) = self.owned.map_pages(iova, paddr, size, count, prot);
        let first = self.model.runs(range).first().map(|run| run.iova.start().get());
        let room = first.map_or(bytes, |first| lg2::align_down(first - iova.get(), lg2));
        let format = self.table.format();
        match result {
            Ok(()) => assert_eq!((done, room), (bytes, bytes)),
            // Tables that are missing behind a collision are not made, so it may stop before it.
            Err(Error::Occupied { .. }) => assert!(done <= room && room < bytes, "{result:?}"),
            Err(Error::EmptyTable { block }) => {
                assert!(lg2 > F::GRANULE_LG2 && done <= room);
                assert!(block.intersection(range).is_some());
            }
            Err(Error::Unsupported { .. }) => assert!(format.refuses(prot)),
            Err(error) => panic!("{error}"),
        }
        if done > 0 {
            let span = Span::new(paddr, done).unwrap();
            self.model.map(iova, &[span], granted(format, prot)).unwrap();
        }
    }

    pub(crate) fn unmap(&mut self, range: IovaRange, marks: Marks) {
        let (covered, cut) = (self.model.covered(range), self.is_cut(range));
        match self.unmap_in_batches(range, marks) {
            Ok(spans) => {
                assert!(covered == Coverage::All && !cut);
                assert_eq!(spans, self.model.unmap(range));
            }
            Err(Error::Hole { hole }) => {
                assert!(self.model.lookup(hole.start()).is_none());
                assert_ne!(covered, Coverage::All);
            }
            Err(Error::WouldSplit { leaf }) => {
                assert!(cut && !range.covers(leaf) && range.intersection(leaf).is_some());
            }
            Err(Error::NoDirtyBits { .. }) => assert!(!self.table.format().tracks_dirty()),
            Err(error) => panic!("{error}"),
        }
    }

    /// Unmaps by a buffer of three spans; no leaf is marked, as no hardware writes.
    fn unmap_in_batches(&self, range: IovaRange, marks: Marks) -> Result<Vec<Span>, Error> {
        let granules = range.len_less_one() >> F::GRANULE_LG2;
        let mut words = vec![0; usize::try_from(granules / 64 + 1).unwrap()];
        let mut bitmap = DirtyBitmap::new(&mut words, range, lg2::size(F::GRANULE_LG2)).unwrap();
        let mut room = SpanBuf::room::<3>();
        let mut buf = SpanBuf::new(&mut room);
        let mut spans = Vec::new();
        let mut unmapped = match marks {
            Marks::Ignored => self.owned.unmap(range, &mut buf)?,
            Marks::Read => self.owned.unmap_dirty(range, &mut buf, &mut bitmap)?,
        };
        loop {
            take(&mut buf, &mut spans);
            free(self.table, unmapped.retired);
            let Some(rest) = unmapped.rest else { break };
            unmapped = match marks {
                Marks::Ignored => self.owned.resume(rest, &mut buf),
                Marks::Read => self.owned.resume_dirty(rest, &mut buf, &mut bitmap),
            };
        }
        assert!(words.iter().all(|&word| word == 0));
        Ok(spans)
    }

    /// Unmaps granules as far as there are any.
    pub(crate) fn unmap_pages(&mut self, range: IovaRange) {
        let count = (range.len_less_one() >> F::GRANULE_LG2) + 1;
        let gone = self.owned.unmap_pages(range.start(), lg2::size(F::GRANULE_LG2), count);
        free(self.table, gone.retired);
        if gone.bytes > 0 {
            let taken = IovaRange::from_len(range.start(), gone.bytes).unwrap();
            assert_eq!(self.model.covered(taken), Coverage::All);
            self.model.unmap(taken);
        }
        let next = range.start().wrapping_add(gone.bytes);
        match gone.result {
            Ok(()) => assert_eq!(gone.bytes - 1, range.len_less_one()),
            Err(Error::Hole { hole }) => {
                assert!(hole.contains(next) && self.model.lookup(next).is_none());
            }
            Err(Error::WouldSplit { leaf }) => assert!(leaf.contains(next) && !range.covers(leaf)),
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) fn protect(&mut self, range: IovaRange, prot: Prot) {
        let (covered, cut) = (self.model.covered(range), self.is_cut(range));
        let format = self.table.format();
        match self.owned.protect(range, prot) {
            Ok(retired) => {
                free(self.table, retired);
                assert!(covered == Coverage::All && !cut);
                for run in self.model.runs(range) {
                    let spans = self.model.unmap(run.iova);
                    self.model.map(run.iova.start(), &spans, granted(format, prot)).unwrap();
                }
            }
            Err(Error::Hole { .. }) => assert_ne!(covered, Coverage::All),
            Err(Error::WouldSplit { .. }) => assert!(cut),
            Err(Error::Unsupported { .. }) => assert!(format.refuses(prot)),
            // Some leaves cannot change under hardware's eyes.
            Err(Error::NeedsBreak { .. }) => assert!(format.breaks_to_change()),
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) fn reclaim(&mut self, range: IovaRange) {
        free(self.table, self.owned.reclaim(range).unwrap());
    }

    pub(crate) fn look_up(&self, iova: Iova) {
        let found = self.owned.iova_to_phys(iova);
        assert_eq!(found, self.model.lookup(iova).map(|(paddr, _)| paddr), "at {iova}");
    }

    /// Whether a leaf reaches over one end of the range: then it cannot be unmapped.
    fn is_cut(&self, range: IovaRange) -> bool {
        let behind = range.last().checked_add(1);
        self.cuts(range.start()) || behind.is_some_and(|behind| self.cuts(behind))
    }

    /// Whether one leaf has this address and the one before it: a leaf counts where it begins.
    fn cuts(&self, iova: Iova) -> bool {
        let Some(before) = iova.get().checked_sub(1).map(Iova::new) else { return false };
        self.owned.iova_to_phys(before).is_some()
            && self.owned.iova_to_phys(iova).is_some()
            && self.owned.census(IovaRange::point(iova)).total() == 0
    }

    /// The walk says of `range` what the model does.
    #[track_caller]
    pub(crate) fn agree(&self, range: IovaRange) {
        agree(self.owned.walk(range), self.model, range);
    }
}

/// What a walk says of `range` is what the model does.
#[track_caller]
pub(crate) fn agree(
    walk: impl Iterator<Item = MappedRun>,
    model: &IntervalModel,
    range: IovaRange,
) {
    let found: Vec<_> = walk.map(|run| (run.range, run.paddr, run.prot)).collect();
    let runs = model.runs(range);
    let expected: Vec<_> = runs.iter().map(|run| (run.iova, run.paddr, run.prot)).collect();
    assert_eq!(found, expected, "the table disagrees with the model");
}

/// Takes the spans out of a buffer, behind others.
pub(crate) fn take(buf: &mut SpanBuf<'_>, spans: &mut Vec<Span>) {
    for &span in buf.spans() {
        SpanSink::push(spans, span, Kind::Memory).unwrap();
    }
    buf.clear();
}

/// What the format grants to whom asks for `prot`.
pub(crate) fn granted<F: Format>(format: &F, prot: Prot) -> Prot {
    let template = format.template(0, F::GRANULE_LG2, prot);
    format.prot(0, format.leaf(template, PhysAddr::new(0)))
}

/// Frees what was retired from a table that no hardware walks.
#[expect(unsafe_code, reason = "who judges a table walks it by itself only")]
pub(crate) fn free<F: Format, M: TableMemory<F::Word>>(
    table: &PageTable<F, M>,
    retired: Retired<M::List>,
) {
    // SAFETY: the crate's walkers keep nothing from one walk to the next where they are not told of
    // unmaps.
    unsafe { table.free(retired) }
}

/// A range of a table that one thread works on.
#[expect(unsafe_code, reason = "who judges a table divides it by itself")]
pub(crate) fn claim<F: Format, M: TableMemory<F::Word>>(
    table: &PageTable<F, M>,
    range: IovaRange,
) -> Owned<'_, F, M> {
    // SAFETY: the crate claims ranges for one thread each: disjoint ones, or one behind the other.
    unsafe { table.claim(range) }
}
