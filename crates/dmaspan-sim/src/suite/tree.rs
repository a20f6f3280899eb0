//! A tree is a page table on trial, with the operations of the suite on it.

use std::marker::PhantomData;

use dmaspan::io_pgtable::{
    Arena, DirtyBitmap, Error, Format, MapUndone, MappedRun, PageTable, TableMemory,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};

use super::Subject;
use super::space::{Space, range};
use super::survey::{self, Seen};
use crate::fault::{Faults, Faulty};
use crate::model::IntervalModel;
use crate::modelled::{agree, take};
pub(super) use crate::modelled::{claim, free, granted};
use crate::rng::Rng;
use crate::walker::TableWords;

/// What most mappings permit.
pub(super) const PROT: Prot = Prot::READ_WRITE.union(Prot::CACHE);

/// All that a table says: its maximal runs, and how many leaves of each size, as log2, it has.
pub(super) type Contents = (Vec<MappedRun>, Vec<(u32, u64)>);

/// The format's entry.
pub(super) type WordOf<S> = <<S as Subject>::Format as Format>::Word;

/// A page table in an arena, or in memory that an arena is behind.
pub(super) struct Tree<S: Subject, M: TableMemory<WordOf<S>> = Arena> {
    pub(super) table: PageTable<S::Format, M>,
    pub(super) arena: Arena,
    pub(super) space: Space,
    subject: PhantomData<fn() -> S>,
}

/// What [`Tree::unmap_pages`] did: bytes, why it stopped, and what hardware has to forget.
pub(super) struct Gone {
    pub(super) bytes: u64,
    pub(super) result: Result<(), Error>,
    pub(super) gathered: Option<IovaRange>,
    /// The sizes of leaves that a sync would name.
    pub(super) leaf_sizes: u64,
}

/// Where hardware has to forget leaves, and of which sizes.
type Forgotten = (Option<IovaRange>, u64);

/// An empty bitmap in `words`.
pub(super) fn marks_of(words: &mut Vec<u64>, range: IovaRange, granule: u64) -> DirtyBitmap<'_> {
    let count = (range.len_less_one() / granule + 1).div_ceil(64);
    *words = vec![0; usize::try_from(count).unwrap()];
    DirtyBitmap::new(words, range, granule).unwrap()
}

/// Memory for the tables of one tree, where every format can reach it.
pub(super) fn arena() -> Arena {
    Arena::new(PhysAddr::new(0x4000_0000), 24 << 20)
}

impl<S: Subject> Tree<S> {
    pub(super) fn new(format: S::Format) -> Self {
        let arena = arena();
        Self::over(format, arena.clone(), arena)
    }

    /// The walker finds exactly what the model has in `range`, and so do look-ups; nothing that the
    /// manual forbids is in the tables. Permissions of the model are those granted.
    #[track_caller]
    pub(super) fn check(&mut self, model: &IntervalModel, range: IovaRange, rng: &mut Rng) {
        agree(self.table.whole().walk(range), model, range);
        let mut bytes = 0;
        let walker = self.walker();
        let mut entries = Vec::new();
        survey::survey(&walker, &self.arena, range, &mut |block, found| {
            assert_eq!(
                model.lookup(found.iova),
                Some((found.paddr, found.prot)),
                "the walker disagrees with the model at {}",
                found.iova
            );
            bytes += block.intersection(range).map_or(0, |block| block.len_less_one() + 1);
            entries.push(block);
        });
        let runs = model.runs(range);
        let mapped: u64 = runs.iter().map(|run| run.iova.len_less_one() + 1).sum();
        assert_eq!(bytes, mapped, "the walker finds less than the model");
        for block in entries {
            let offset = rng.next() & block.len_less_one();
            for iova in [block.last(), block.start().wrapping_add(offset)] {
                let walked = survey::translate(&walker, &self.arena, iova).map(|found| found.paddr);
                assert_eq!(walked, self.table.whole().iova_to_phys(iova), "at {iova}");
                let (paddr, _) = model.lookup(iova).unwrap_or_else(|| panic!("{iova}"));
                assert_eq!(walked, Some(paddr), "at {iova}");
            }
        }
        if let Err(what) = S::strict(&walker, &self.arena, range) {
            panic!("{what}");
        }
    }
}

impl<S: Subject> Tree<S, Faulty<Arena>> {
    /// A tree whose tables may be refused.
    pub(super) fn faulty(format: S::Format, faults: &Faults) -> Self {
        let arena = arena();
        Self::over(format, Faulty::new(arena.clone(), faults), arena)
    }
}

impl<S: Subject, M: TableMemory<WordOf<S>>> Tree<S, M> {
    /// A tree in `memory`, whose tables come from `arena`, with all the levels that it can have.
    pub(super) fn over(format: S::Format, memory: M, arena: Arena) -> Self {
        let mut tree = Self::sapling(format, memory, arena);
        if S::Format::GROWS {
            // The highest page makes it grow as far as it can, and leaves its roots.
            let (granule, last) = (tree.space.granule(), tree.space.granule_lg2);
            let page = tree.space.nth_back(last, 0).unwrap();
            tree.map(page, &[super::space::span(0, granule)], PROT).unwrap();
            tree.unmap(range(page, granule)).unwrap();
            tree.reclaim();
        }
        tree
    }

    /// A tree as it is made: with its first root, where it grows.
    pub(super) fn sapling(format: S::Format, memory: M, arena: Arena) -> Self {
        let space = Space::of(&format);
        let table = PageTable::new(format, memory).unwrap();
        Self { table, arena, space, subject: PhantomData }
    }

    /// Hardware that walks this tree.
    pub(super) fn walker(&self) -> S::Walker {
        let (root, top_level) = self.table.root_and_level();
        S::walker(self.table.format(), root, top_level)
    }

    /// Maps, and frees what a failure retired.
    pub(super) fn map(&mut self, iova: u64, spans: &[Span], prot: Prot) -> Result<(), Error> {
        let result = self.table.whole().map_spans(Iova::new(iova), spans, prot);
        result.map_err(|MapUndone { error, retired }| {
            free(&self.table, retired);
            error
        })
    }

    pub(super) fn map_pages(
        &mut self,
        iova: u64,
        paddr: u64,
        size: u64,
        count: u64,
        prot: Prot,
    ) -> (u64, Result<(), Error>) {
        self.table.whole().map_pages(Iova::new(iova), PhysAddr::new(paddr), size, count, prot)
    }

    /// Unmaps through a buffer of `ROOM` spans, batch after batch, and returns all spans.
    pub(super) fn unmap_by<const ROOM: usize>(
        &mut self,
        range: IovaRange,
    ) -> Result<Vec<Span>, Error> {
        let mut room = SpanBuf::room::<ROOM>();
        let mut buf = SpanBuf::new(&mut room);
        let mut spans = Vec::new();
        let mut unmapped = self.table.whole().unmap(range, &mut buf)?;
        loop {
            take(&mut buf, &mut spans);
            free(&self.table, unmapped.retired);
            match unmapped.rest {
                Some(rest) => unmapped = self.table.whole().resume(rest, &mut buf),
                None => return Ok(spans),
            }
        }
    }

    pub(super) fn unmap(&mut self, range: IovaRange) -> Result<Vec<Span>, Error> {
        self.unmap_by::<64>(range)
    }

    pub(super) fn unmap_pages(&mut self, iova: u64, size: u64, count: u64) -> Gone {
        let unmapped = self.table.whole().unmap_pages(Iova::new(iova), size, count);
        let gathered = unmapped.retired.range();
        let leaf_sizes = unmapped.retired.leaf_sizes();
        free(&self.table, unmapped.retired);
        Gone { bytes: unmapped.bytes, result: unmapped.result, gathered, leaf_sizes }
    }

    /// Changes permissions, and syncs.
    pub(super) fn protect(&mut self, range: IovaRange, prot: Prot) -> Result<(), Error> {
        let retired = self.table.whole().protect(range, prot)?;
        assert_eq!(retired.range(), Some(range));
        free(&self.table, retired);
        Ok(())
    }

    /// Reads and clears marks, a bit for `granule` bytes each, and syncs. Also what hardware has to
    /// forget: where, and leaves of which sizes.
    pub(super) fn clear_dirty(
        &mut self,
        range: IovaRange,
        granule: u64,
    ) -> Result<(Vec<u64>, Forgotten), Error> {
        let mut words = Vec::new();
        let mut bits = marks_of(&mut words, range, granule);
        let retired = self.table.whole().read_and_clear_dirty(range, &mut bits)?;
        let forgotten = (retired.range(), retired.leaf_sizes());
        free(&self.table, retired);
        Ok((words, forgotten))
    }

    /// Reclaims all tables without leaves.
    pub(super) fn reclaim(&mut self) {
        let whole = self.space.aperture;
        let retired = self.table.whole().reclaim(whole).unwrap();
        free(&self.table, retired);
    }

    pub(super) fn lookup(&mut self, iova: u64) -> Option<u64> {
        self.table.whole().iova_to_phys(Iova::new(iova)).map(PhysAddr::get)
    }

    /// All that the table says: its maximal runs and its leaves by size.
    pub(super) fn contents(&mut self) -> Contents {
        let whole = self.table.whole();
        (whole.walk(whole.range()).collect(), whole.census(whole.range()).sizes().collect())
    }

    /// The number of leaves of each size, as the table counts them.
    pub(super) fn census(&mut self) -> Vec<(u32, u64)> {
        self.contents().1
    }

    /// All leaves of the aperture, as the walker finds them.
    #[track_caller]
    pub(super) fn leaves(&self) -> Vec<Seen> {
        self.leaves_in(&self.arena)
    }

    /// All leaves of the aperture, as the walker finds them in `tables`.
    #[track_caller]
    pub(super) fn leaves_in(&self, tables: &dyn TableWords) -> Vec<Seen> {
        survey::leaves(&self.walker(), tables, self.space.aperture)
    }
}
