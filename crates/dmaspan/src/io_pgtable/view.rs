//! A [`View`] of a tree walks it as hardware does: from a root that it was told of, while others
//! map and unmap.

use core::ops::ControlFlow;

use super::cursor::{Cell, Cursor, Reached};
use super::format::{Entry, Format, Groups};
use super::memory::TableMemory;
use super::readers::Readers;
use super::scan::Piece;
use super::walk::MappedRun;
use super::word::Word;
use super::{Leaked, PageTable, block_of, top_word};
use crate::addr::{Iova, PhysAddr};
use crate::atomic::{AtomicU64, Ordering};
use crate::lg2;
use crate::platform::{Id, Identity};
use crate::prot::Prot;
use crate::range::IovaRange;

/// How often a walk tries to mark an entry that software changes meanwhile. An owner of the range
/// that keeps its word changes no entry so often between a load and an exchange behind it, and a
/// walk of tables that something else writes has to end.
const MARK_TRIES: usize = 64;

/// What tells a table from all others, and where its walks begin.
///
/// A domain gives it to its hooks, by [`IommuOps::begin`](crate::iommu::IommuOps::begin).
#[derive(Clone, Debug)]
pub struct TableRoot {
    identity: Identity,
    root: PhysAddr,
    level: u32,
}

impl TableRoot {
    /// The root table's physical address.
    pub fn paddr(&self) -> PhysAddr {
        self.root
    }

    /// The root table's level; level 0 has the smallest leaves.
    pub fn level(&self) -> u32 {
        self.level
    }
}

/// Why an address has no run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRun {
    /// Nothing is mapped there.
    Absent,
    /// There is a word that no operation of the table wrote, or it changes all the time.
    Corrupt,
}

/// The tables of a [`PageTable`] as hardware has them: it reads them, and marks what it writes.
///
/// It neither owns the tables nor keeps them. A walk by it keeps to what hardware keeps to: it
/// begins while the tables are there, and ends before an invalidation of what it could meet does.
pub(crate) struct View<F: Format, M: TableMemory<F::Word>>(PageTable<F, M>);

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// What tells this table from others.
    pub(crate) fn id(&self) -> Id {
        self.identity.id()
    }

    /// The same, and its root.
    pub(crate) fn table_root(&self) -> TableRoot {
        let (root, level) = self.root_and_level();
        TableRoot { identity: self.identity.clone(), root, level }
    }
}

impl<F: Format + Clone, M: TableMemory<F::Word> + Clone> View<F, M> {
    /// A view of the tables of `table`.
    pub(crate) fn new(table: &PageTable<F, M>) -> Self {
        Self(PageTable {
            format: table.format.clone(),
            memory: table.memory.clone(),
            geometry: table.geometry,
            top: AtomicU64::new(table.root_word()),
            walked: AtomicU64::new(table.walked()),
            identity: table.identity.clone(),
            root_mask: table.root_mask,
            last_paddr: table.last_paddr,
            has_groups: table.has_groups,
            larger: table.larger,
            // The tables are not this one's to free.
            leaked: Leaked::Yes,
            readers: Readers::new(),
        })
    }

    /// Another view of the same tables.
    pub(crate) fn again(&self) -> Self {
        Self::new(&self.0)
    }
}

impl<F: Format, M: TableMemory<F::Word>> View<F, M> {
    /// Whether `root` is that of the table which this is a view of.
    pub(crate) fn is_of(&self, root: &TableRoot) -> bool {
        self.0.identity.id() == root.identity.id()
    }

    /// Walks begin at this root from now on.
    pub(crate) fn begin_at(&self, root: PhysAddr, level: u32) {
        self.0.top.store(top_word(root, level), Ordering::Release);
    }

    /// All that the table can translate.
    pub(crate) fn aperture(&self) -> IovaRange {
        self.0.geometry.aperture
    }

    /// Whether a write has to leave a mark in the leaf.
    pub(crate) fn tracks_dirty(&self) -> bool {
        self.0.format.tracks_dirty()
    }

    /// The maximal run that has `iova`, to both sides, in one walk.
    pub(crate) fn run(&self, iova: Iova) -> Result<MappedRun, NoRun> {
        let mut run = self.run_from(iova)?;
        let mut cursor = Cursor::new(&self.0, iova.get());
        while let Some(before) = run.range.start().get().checked_sub(1).map(Iova::new)
            && let Some((level, cell)) = self.entry(&mut cursor, before)
            && let Some(leaf) = self.leaf(level, F::Word::load(cell), before)
            && let Some(range) = IovaRange::new(leaf.range.start(), before)
            && let Some(joined) = (MappedRun { range, ..leaf }).join(run)
        {
            let (index, entries) = cursor.table_at(level, before.get());
            let bytes = self.before(level, entries.get(..=index).unwrap_or(&[]));
            let start = Iova::new(joined.range.start().get() - bytes);
            let range = IovaRange::new(start, joined.range.last()).unwrap_or(joined.range);
            let paddr = PhysAddr::new(joined.paddr.get() - bytes);
            run = MappedRun { range, paddr, ..joined };
        }
        Ok(run)
    }

    /// How many bytes before the last of `entries`, which is a leaf, are mapped by leaves of one
    /// entry each that it continues.
    fn before(&self, level: u32, entries: &[Cell<F>]) -> u64 {
        let (format, size) = (&self.0.format, lg2::size(F::shift(level)));
        let Some((last, before)) = entries.split_last() else { return 0 };
        let mut next = format.clean(F::Word::load(last));
        let mut bytes = 0;
        if !format.is_single(level, next) {
            return 0;
        }
        for cell in before.iter().rev() {
            // Whatever hardware marked, it is the same run.
            let word = format.clean(F::Word::load(cell));
            if !format.is_single(level, word) || format.advance(word, size) != next {
                break;
            }
            next = word;
            bytes += size;
        }
        bytes
    }

    /// The run that has `iova`, from there on.
    fn run_from(&self, iova: Iova) -> Result<MappedRun, NoRun> {
        let beyond = |aperture: IovaRange| IovaRange::new(iova, aperture.last());
        let aperture = Some(self.aperture()).filter(|aperture| aperture.contains(iova));
        let range = aperture.and_then(beyond).ok_or(NoRun::Absent)?;
        let (mut run, mut none) = (None::<MappedRun>, NoRun::Absent);
        let _: ControlFlow<()> = self.0.scan(range, |piece| {
            let next = match piece {
                Piece::Leaves { range, paddr, level, word, .. } => {
                    MappedRun { range, paddr, prot: self.0.format.prot(level, word) }
                }
                Piece::Hole(_) => return ControlFlow::Break(()),
                Piece::Invalid { .. } => {
                    none = NoRun::Corrupt;
                    return ControlFlow::Break(());
                }
            };
            match run.map_or(Some(next), |run| run.join(next)) {
                Some(joined) => run = Some(joined),
                None => return ControlFlow::Break(()),
            }
            ControlFlow::Continue(())
        });
        run.ok_or(none)
    }

    /// Marks the leaves of `range` as written, as far as a write may go there, and returns the run
    /// that they are.
    pub(crate) fn written(&self, range: IovaRange) -> Result<MappedRun, NoRun> {
        let mut cursor = Cursor::new(&self.0, range.start().get());
        let mut run = self.mark(&mut cursor, range.start())?;
        while run.range.last() < range.last()
            && let Some(next) = run.range.last().checked_add(1)
            && let Ok(leaf) = self.mark(&mut cursor, next)
            && let Some(joined) = run.join(leaf)
        {
            run = joined;
        }
        Ok(run)
    }

    /// Marks the leaf around `iova`, unless it forbids writes.
    fn mark<'v>(&'v self, cursor: &mut Cursor<'v, F, M>, iova: Iova) -> Result<MappedRun, NoRun> {
        let format = &self.0.format;
        for _ in 0..MARK_TRIES {
            let (level, cell) = self.entry(cursor, iova).ok_or(NoRun::Absent)?;
            let word = F::Word::load(cell);
            let leaf = self.leaf(level, word, iova).ok_or(NoRun::Absent)?;
            if !leaf.prot.contains(Prot::WRITE)
                || leaf.prot.contains(Prot::PRIV)
                || format.is_dirty(word)
                || F::Word::replace(cell, word, format.dirtied(word)).is_ok()
            {
                return Ok(leaf);
            }
        }
        Err(NoRun::Corrupt)
    }

    /// The entry at which a walk for `iova` ends, and its level.
    fn entry<'v>(&'v self, cursor: &mut Cursor<'v, F, M>, iova: Iova) -> Option<Entered<'v, F>> {
        if !self.aperture().contains(iova) {
            return None;
        }
        let level = match cursor.reach(iova.get(), 0) {
            Reached::Table => 0,
            Reached::Stopped { level, .. } => level,
        };
        Some((level, cursor.entries_from(level, iova.get()).first()?))
    }

    /// What an entry at `level` maps, if it is a leaf: all of the leaf, or what the entry has of a
    /// group.
    fn leaf(&self, level: u32, word: F::Word, iova: Iova) -> Option<MappedRun> {
        let Entry::Leaf(leaf) = self.0.format.decode(level, word) else { return None };
        let lg2 = match F::GROUPS {
            Groups::Consecutive => F::shift(level),
            Groups::Repeated => leaf.lg2,
        };
        let block = block_of(iova.get(), lg2);
        let range = block.intersection(self.aperture())?;
        let offset = range.start().get() - block.start().get();
        let paddr = PhysAddr::new(lg2::align_down(leaf.paddr.get(), lg2) + offset);
        Some(MappedRun { range, paddr, prot: self.0.format.prot(level, word) })
    }
}

/// An entry and its level.
type Entered<'v, F> = (u32, &'v Cell<F>);
