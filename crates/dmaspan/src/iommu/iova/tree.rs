//! The tree knows the ranges in use, by address, and what is free between them.
//!
//! It is a B+tree whose entries are the ranges in use; each has the gap before it, and an empty
//! range at the end of the aperture has the last gap. Giving a range back only takes an entry out,
//! so it needs no memory.
//!
//! A gap may fit by size and not by alignment. So an inner node keeps for each child and for each
//! alignment of 2^k granules the longest range that starts aligned in one gap below that child. A
//! request fits below a child if and only if that length is no shorter: the lowest fit is found on
//! one way down, and that there is none is seen in the root. Adding a gap raises a maximum; taking
//! one away finds the maximum of one node anew where it was that gap's. A gap has no fit of an
//! alignment beyond the first that has none, so that small gaps cost little.
//!
//! Positions are offsets from the start of the aperture: as IOVA 0 is in none, the end behind the
//! last IOVA has one, be it the top of the 64-bit space.

mod arena;
mod node;
mod shape;
#[cfg(test)]
mod tests;

use core::iter;

use super::Error;
use crate::addr::Iova;
use crate::lg2;
use crate::range::IovaRange;
use arena::{Arena, NoNode};
pub(super) use node::Kind;
use node::{Entry, Gap, Grid, Inner, Leaf};

/// There is no memory for the record of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoMemory {
    /// Which range: nobody has it.
    pub(super) range: IovaRange,
}

impl From<NoMemory> for Error {
    fn from(NoMemory { range }: NoMemory) -> Self {
        Self::NoMemory { range }
    }
}

/// How many ranges there are of a kind, and how long they are together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) ranges: usize,
    pub(super) bytes: u64,
}

/// No tree is as tall: its leaves have no more numbers than a `u32`, the root has two children at
/// least and every other inner node eight.
const HEIGHT: usize = 12;

pub(super) struct Tree {
    grid: Grid,
    aperture: IovaRange,
    leaves: Arena<Leaf>,
    inners: Arena<Inner>,
    root: u32,
    /// How many levels of inner nodes are above the leaves.
    height: usize,
    allocated: Usage,
    reserved: Usage,
}

/// A way from the root to a leaf.
#[derive(Clone, Copy)]
struct Path {
    steps: [Step; HEIGHT],
    leaf: u32,
}

#[derive(Clone, Copy, Default)]
struct Step {
    node: u32,
    /// Which child of that node comes next.
    child: usize,
}

/// An entry, and where it is.
struct Found {
    path: Path,
    index: usize,
    entry: Entry,
}

impl Tree {
    /// Nothing of `aperture` is in use, which is whole granules and has no IOVA 0.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], and [`Error::Config`] for an aperture that is not so.
    pub(super) fn new(aperture: IovaRange, granule_lg2: u32) -> Result<Self, Error> {
        let config = Error::Config { aperture, granule_lg2 };
        let base = aperture.start().get();
        let len = aperture.checked_len().ok_or(config)?;
        let whole = granule_lg2 < 64 && lg2::is_aligned(base | len, granule_lg2);
        if base == 0 || !whole {
            return Err(config);
        }
        let mut grid = Grid { base, granule_lg2, orders: 64 - granule_lg2 };
        let gap = Gap { start: 0, len };
        while grid.fit(gap, grid.orders - 1) == 0 {
            grid.orders -= 1;
        }
        let no_memory = |_| Error::NoMemory { range: aperture };
        let mut leaves = Arena::new();
        leaves.reserve(1, || Ok(Leaf::default())).map_err(no_memory)?;
        let root = leaves.take().ok_or(NoNode).map_err(no_memory)?;
        leaves[root].insert(0, Entry { start: len, end: len, kind: Kind::Reserved });
        let [allocated, reserved] = [Usage::default(); 2];
        let inners = Arena::new();
        Ok(Self { grid, aperture, leaves, inners, root, height: 0, allocated, reserved })
    }

    /// Keeps the part of `range` that lies in the aperture, widened to granules, from being
    /// allocated. What is reserved already may be so again, and what overlaps becomes one range.
    ///
    /// # Errors
    ///
    /// [`Error::Taken`] with the first stretch that is allocated, and [`Error::NoMemory`]; with
    /// nothing changed.
    pub(super) fn reserve(&mut self, range: IovaRange) -> Result<(), Error> {
        let Some(range) = range.intersection(self.aperture) else { return Ok(()) };
        let wanted = self.entry(range, Kind::Reserved);
        let mut whole = wanted;
        let mut at = wanted.start;
        while let Some(Found { entry, .. }) = self.overlap(at, wanted.end) {
            if entry.kind == Kind::Allocated {
                let taken = self.range(self.stretch(entry, wanted.end));
                return Err(Error::Taken { range, taken });
            }
            if entry.start <= wanted.start && entry.end >= wanted.end {
                return Ok(());
            }
            whole.start = whole.start.min(entry.start);
            whole.end = whole.end.max(entry.end);
            at = entry.end;
        }
        // Before anything is taken out: where the new entry goes may be full even then.
        self.reserve_nodes().map_err(|_| Error::NoMemory { range })?;
        while let Some(found) = self.overlap(wanted.start, wanted.end) {
            self.remove(found);
        }
        let path = self.find(whole.start);
        let path = self.make_room(path, whole.start).map_err(|_| Error::NoMemory { range })?;
        self.insert(&path, whole);
        Ok(())
    }

    /// Allocates exactly `range`, which is whole granules.
    ///
    /// # Errors
    ///
    /// [`Error::Taken`] with the first stretch in use there, or with `range` itself where it is not
    /// of the aperture; [`Error::NoMemory`]; with nothing changed.
    pub(super) fn alloc_at(&mut self, range: IovaRange) -> Result<(), Error> {
        if !self.aperture.covers(range) {
            return Err(Error::Taken { range, taken: range });
        }
        let wanted = self.entry(range, Kind::Allocated);
        if let Some(Found { entry, .. }) = self.overlap(wanted.start, wanted.end) {
            let taken = self.range(self.stretch(entry, wanted.end));
            return Err(Error::Taken { range, taken });
        }
        let path = self.find(wanted.start);
        let path = self.make_room(path, wanted.start).map_err(|_| Error::NoMemory { range })?;
        self.insert(&path, wanted);
        Ok(())
    }

    /// The lowest `len` bytes that are free, start at a multiple of `2^align_lg2` and end at or
    /// below `limit`; `None` where there are none. `len` is whole granules, and not 0.
    ///
    /// # Errors
    ///
    /// [`NoMemory`], with nothing changed.
    pub(super) fn alloc(
        &mut self,
        len: u64,
        align_lg2: u32,
        limit: u64,
    ) -> Result<Option<IovaRange>, NoMemory> {
        debug_assert!(len > 0 && lg2::is_aligned(len, self.grid.granule_lg2));
        let order = align_lg2.saturating_sub(self.grid.granule_lg2);
        if order >= self.grid.orders || len == 0 {
            return Ok(None);
        }
        let Some((path, start)) = self.lowest_fit(order, len) else { return Ok(None) };
        let entry = Entry { start, end: start + len, kind: Kind::Allocated };
        let range = self.range(entry);
        if range.last().get() > limit {
            // All others end above as well.
            return Ok(None);
        }
        let path = self.make_room(path, start).map_err(|_| NoMemory { range })?;
        self.insert(&path, entry);
        Ok(Some(range))
    }

    /// Takes back exactly what was allocated; anything else is left as it is. Does not allocate.
    pub(super) fn free(&mut self, range: IovaRange) {
        let known = self.aperture.covers(range);
        let entry = self.entry(range, Kind::Allocated);
        let found = known.then(|| self.above(entry.start)).filter(|found| found.entry == entry);
        debug_assert!(found.is_some(), "{range} is not allocated");
        if let Some(found) = found {
            self.remove(found);
        }
    }

    /// What is in use, from the first range on that ends at or behind `from`.
    pub(super) fn from(&self, from: Iova) -> impl Iterator<Item = (IovaRange, Kind)> {
        let path = self.find(from.get().saturating_sub(self.grid.base));
        let index = self.leaves[path.leaf].position(from.get().saturating_sub(self.grid.base));
        let mut at = Some((path, index));
        iter::from_fn(move || {
            loop {
                let (path, index) = at?;
                let Some(entry) = self.leaves[path.leaf].entries().get(index) else {
                    at = self.next(&path).map(|next| (next, 0));
                    continue;
                };
                at = Some((path, index + 1));
                // The end of the aperture is an entry without bytes.
                if entry.start < entry.end {
                    return Some((self.range(*entry), entry.kind));
                }
            }
        })
    }

    /// `first` and the entries of its kind that follow it without a gap and begin before `end`.
    fn stretch(&self, first: Entry, end: u64) -> Entry {
        let mut stretch = first;
        while let Some(Found { entry, .. }) = self.overlap(stretch.end, end)
            && (entry.start, entry.kind) == (stretch.end, stretch.kind)
        {
            stretch.end = entry.end;
        }
        stretch
    }

    /// What is allocated.
    pub(super) fn allocated(&self) -> Usage {
        self.allocated
    }

    /// What is reserved, in the aperture.
    pub(super) fn reserved(&self) -> Usage {
        self.reserved
    }

    /// The granules of `range`, which lies in the aperture.
    fn entry(&self, range: IovaRange, kind: Kind) -> Entry {
        let Grid { base, granule_lg2, .. } = self.grid;
        let start = lg2::align_down(range.start().get(), granule_lg2).wrapping_sub(base);
        let last = (range.last().get() | lg2::mask(granule_lg2)).wrapping_sub(base);
        Entry { start, end: last.wrapping_add(1), kind }
    }

    fn range(&self, entry: Entry) -> IovaRange {
        let [start, last] = [entry.start, entry.end - 1].map(|at| Iova::new(self.grid.base + at));
        IovaRange::new(start, last).unwrap_or(IovaRange::point(start))
    }

    /// The first entry that ends above `offset`, which lies in the aperture.
    #[inline]
    fn above(&self, offset: u64) -> Found {
        let path = self.find(offset);
        let leaf = &self.leaves[path.leaf];
        let index = leaf.position(offset);
        Found { path, index, entry: leaf.entries()[index] }
    }

    /// The first entry between two offsets.
    fn overlap(&self, start: u64, end: u64) -> Option<Found> {
        if start >= end {
            return None;
        }
        let found = self.above(start);
        (found.entry.start < end).then_some(found)
    }

    /// The way to the leaf with the first entry that ends above `offset`.
    #[inline]
    fn find(&self, offset: u64) -> Path {
        let mut path = Path { steps: [Step::default(); HEIGHT], leaf: self.root };
        for step in &mut path.steps[..self.height] {
            let node = path.leaf;
            *step = Step { node, child: self.inners[node].position(offset) };
            path.leaf = self.inners[node].child(step.child);
        }
        path
    }

    /// The way to the lowest gap with `len` aligned bytes, and where they start.
    #[inline]
    fn lowest_fit(&self, order: u32, len: u64) -> Option<(Path, u64)> {
        let mut path = Path { steps: [Step::default(); HEIGHT], leaf: self.root };
        for step in &mut path.steps[..self.height] {
            let node = path.leaf;
            *step = Step { node, child: self.inners[node].first_fit(order, len)? };
            path.leaf = self.inners[node].child(step.child);
        }
        let start = self.leaves[path.leaf].first_fit(self.grid, order, len)?;
        Some((path, start))
    }

    /// The way to the leaf behind that of `path`.
    fn next(&self, path: &Path) -> Option<Path> {
        let more = |step: &Step| step.child + 1 < self.inners[step.node].len;
        let depth = path.steps[..self.height].iter().rposition(more)?;
        let mut next = *path;
        next.steps[depth].child += 1;
        for depth in depth..self.height {
            let Step { node, child } = next.steps[depth];
            next.leaf = self.inners[node].child(child);
            if let Some(below) = next.steps[..self.height].get_mut(depth + 1) {
                *below = Step { node: next.leaf, child: 0 };
            }
        }
        Some(next)
    }

    fn usage(&mut self, kind: Kind) -> &mut Usage {
        match kind {
            Kind::Allocated => &mut self.allocated,
            Kind::Reserved => &mut self.reserved,
        }
    }

    /// Puts in an entry whose bytes are free, where the leaf has room.
    fn insert(&mut self, path: &Path, entry: Entry) {
        let leaf = &mut self.leaves[path.leaf];
        let index = leaf.position(entry.start);
        let whole = leaf.gap(index);
        leaf.insert(index, entry);
        let parts = [leaf.gap(index), leaf.gap(index + 1)];
        self.replace(path, [whole, Gap::default()], parts);
        let usage = self.usage(entry.kind);
        usage.ranges += 1;
        usage.bytes += entry.end - entry.start;
    }

    /// Takes out an entry that is there.
    fn remove(&mut self, Found { path, index, entry }: Found) {
        let leaf = &mut self.leaves[path.leaf];
        let before = leaf.gap(index);
        if index + 1 < leaf.len {
            let behind = leaf.gap(index + 1);
            leaf.remove(index);
            let joined = leaf.gap(index);
            self.replace(&path, [before, behind], [joined, Gap::default()]);
        } else {
            leaf.remove(index);
            self.replace(&path, [before, Gap::default()], [Gap::default(); 2]);
            // The last leaf's last entry is the end of the aperture: there is another leaf.
            if let Some(next) = self.next(&path) {
                self.set_begin(&next, before.start);
            }
        }
        self.rebalance(&path);
        let usage = self.usage(entry.kind);
        usage.ranges -= 1;
        usage.bytes -= entry.end - entry.start;
    }

    /// Lets the first gap of a leaf start at `begin`.
    fn set_begin(&mut self, path: &Path, begin: u64) {
        let leaf = &mut self.leaves[path.leaf];
        let old = leaf.gap(0);
        leaf.begin = begin;
        let new = leaf.gap(0);
        self.replace(path, [old, Gap::default()], [new, Gap::default()]);
        for step in path.steps[..self.height].iter().rev() {
            self.inners[step.node].set_begin(step.child, begin);
            if step.child > 0 {
                break;
            }
        }
    }

    /// Tells the nodes of the path that their leaf has the gaps `new` and no longer `old`.
    fn replace(&mut self, path: &Path, old: [Gap; 2], new: [Gap; 2]) {
        if self.height == 0 {
            return;
        }
        let grid = self.grid;
        let fit = |[a, b]: [Gap; 2], order| grid.fit(a, order).max(grid.fit(b, order));
        let others = self.leaves[path.leaf].longest_but(new);
        for order in 0..grid.orders {
            let [was, is] = [old, new].map(|gaps| fit(gaps, order));
            if was | is == 0 {
                // A larger alignment has no fit either.
                break;
            }
            if was != is {
                self.replace_fit(path, order, [was, is], others);
            }
        }
    }

    /// The same for one order. No other gap of the leaf is longer than `others`.
    fn replace_fit(&mut self, path: &Path, order: u32, [mut was, mut is]: [u64; 2], others: u64) {
        let mut below = path.leaf;
        for depth in (0..self.height).rev() {
            let Step { node, child } = path.steps[depth];
            let known = self.inners[node].fit(child, order);
            let fit = if is >= known {
                is
            } else if was < known {
                // Another gap is longer.
                return;
            } else if depth + 1 == self.height && is >= others {
                is
            } else {
                self.best(depth + 1, below, order, known)
            };
            if fit == known {
                return;
            }
            self.inners[node].set_fit(child, order, fit);
            (was, is) = (known, fit);
            below = node;
        }
    }
}
