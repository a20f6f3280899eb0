//! Changing the permissions of what is mapped.

use core::ops::ControlFlow;

use super::error::Error;
use super::format::Format;
use super::leaves::LeafEntries;
use super::memory::TableMemory;
use super::retired::Retired;
use super::unmap::Ahead;
use super::word::Word;
use super::{Owned, PageTable};
use crate::addr::Iova;
use crate::lg2;
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::IovaRange;

impl<F: Format, M: TableMemory<F::Word>> Owned<'_, F, M> {
    /// Gives all of `range` the permissions and memory type `prot`. All or nothing; the leaves stay
    /// as large as they are, and a device finds a translation at any time, an old or a new one.
    ///
    /// Sync the result: until then hardware may use the old permissions. Marks of written leaves
    /// stay, but where `prot` takes [`Prot::WRITE`] away some formats cannot keep them: read them
    /// first.
    ///
    /// # Errors
    ///
    /// [`Error::Hole`] and [`Error::WouldSplit`] anywhere in the range, [`Error::NoAccess`],
    /// [`Error::Unsupported`], bad ranges; and [`Error::NeedsBreak`] where hardware wants a leaf
    /// broken first (Arm: one of several entries, and one whose memory type changes), which
    /// [`Domain::protect`](crate::iommu::Domain::protect) can do. Nothing is changed then.
    pub fn protect(&self, range: IovaRange, prot: Prot) -> Result<Retired<M::List>, Error> {
        self.check_range(range, F::GRANULE_LG2)?;
        self.check_prot(range.start(), prot)?;
        self.table.check_whole(range)?;
        if let Some(leaf) = self.table.first_to_break(range, prot) {
            return Err(Error::NeedsBreak { leaf });
        }
        let mut retired = Retired::nothing();
        let _: ControlFlow<()> = self.table.each_leaf(range, |leaf| {
            self.table.reprotect(&leaf, prot);
            retired.leaf_sizes |= lg2::size(leaf.lg2);
            ControlFlow::Continue(())
        });
        retired.cover(range);
        Ok(retired)
    }
}

impl<F: Format, M: TableMemory<F::Word>> PageTable<F, M> {
    /// Refuses a range with holes, or with leaves that reach out of it.
    pub(crate) fn check_whole(&self, range: IovaRange) -> Result<(), Error> {
        let refused = self.scan(range, |piece| match self.check_piece(piece, Ahead::Check) {
            Ok(_) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(error),
        });
        refused.break_value().map_or(Ok(()), Err)
    }

    /// Whether a leaf may not be rewritten with these permissions while hardware may use it.
    fn is_to_break(&self, leaf: &LeafEntries<'_, F>, prot: Prot) -> bool {
        if !self.format.breaks_to_change() {
            return false;
        }
        let memory = Prot::CACHE | Prot::MMIO;
        let old = leaf.cells.first().map_or(F::Word::EMPTY, F::Word::load);
        let new = self.format.template(leaf.level, leaf.lg2, prot);
        let [old, new] = [old, new].map(|word| self.format.prot(leaf.level, word) & memory);
        leaf.cells.len() > 1 || old != new
    }

    /// The first leaf in `range` that may not be rewritten while hardware may use it.
    fn first_to_break(&self, range: IovaRange, prot: Prot) -> Option<IovaRange> {
        if !self.format.breaks_to_change() {
            return None;
        }
        let found = self.each_leaf(range, |leaf| {
            if self.is_to_break(&leaf, prot) {
                ControlFlow::Break(leaf.range)
            } else {
                ControlFlow::Continue(())
            }
        });
        found.break_value()
    }

    /// Rewrites the entries of a leaf, and keeps hardware's marks, also those that it sets
    /// meanwhile.
    fn reprotect(&self, leaf: &LeafEntries<'_, F>, prot: Prot) {
        let old = leaf.cells.first().map_or(F::Word::EMPTY, F::Word::load);
        let Some(first) = self.with_prot(leaf, old, prot) else { return };
        for (n, cell) in (0u64..).zip(leaf.cells) {
            let new = self.entry_of(leaf.level, first, n);
            if !self.format.tracks_dirty() {
                F::Word::store(cell, new);
                continue;
            }
            let mut old = F::Word::load(cell);
            loop {
                let marked = if self.format.is_dirty(old) { self.format.dirtied(new) } else { new };
                match F::Word::replace(cell, old, marked) {
                    Ok(()) => break,
                    Err(found) => old = found,
                }
            }
        }
        self.memory.written(Promise::kept(), leaf.cells);
    }

    /// [`Owned::protect`] for leaves that have to be broken: takes them away a few at a time, has
    /// `sync` make hardware forget them, and writes them anew. The range was checked.
    ///
    /// # Errors
    ///
    /// That of `sync`: the leaves at hand have their old permissions again.
    pub(crate) fn protect_broken<E>(
        &self,
        range: IovaRange,
        prot: Prot,
        mut sync: impl FnMut(Retired<M::List>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rest = Some(range);
        while let Some(range) = rest {
            let mut broken: [Option<Broken<'_, F>>; BROKEN] = [const { None }; BROKEN];
            let mut retired = Retired::nothing();
            let mut places = broken.iter_mut();
            rest = self
                .each_leaf(range, |leaf| {
                    let size = lg2::size(leaf.lg2);
                    if !self.is_to_break(&leaf, prot) {
                        self.reprotect(&leaf, prot);
                    } else if let Some(place) = places.next() {
                        *place = self.take_away(leaf);
                    } else {
                        return ControlFlow::Break(leaf.range.start());
                    }
                    retired.leaf_sizes |= size;
                    ControlFlow::Continue(())
                })
                .break_value()
                .and_then(|next| IovaRange::new(next, range.last()));
            // Up to where the next leaves begin, which is behind the first ones.
            let last = rest.map_or(range.last(), |rest| Iova::new(rest.start().get() - 1));
            retired.cover(IovaRange::new(range.start(), last).unwrap_or(range));
            let synced = sync(retired);
            for broken in broken.into_iter().flatten() {
                let prot = if synced.is_ok() { Some(prot) } else { None };
                self.put_back(&broken, prot);
            }
            synced?;
        }
        Ok(())
    }

    /// Empties the entries of a leaf.
    fn take_away<'t>(&self, leaf: LeafEntries<'t, F>) -> Option<Broken<'t, F>> {
        let first = leaf.cells.first().map(F::Word::load)?;
        let first = self.format.clean(first);
        let mut dirty = false;
        for cell in leaf.cells {
            dirty |= self.format.is_dirty(F::Word::exchange(cell, F::Word::EMPTY));
        }
        self.memory.written(Promise::kept(), leaf.cells);
        Some(Broken { leaf, first, dirty })
    }

    /// Writes the entries of a leaf that was taken away, with other permissions or its own.
    fn put_back(&self, broken: &Broken<'_, F>, prot: Option<Prot>) {
        let Broken { leaf, first, dirty } = broken;
        let first = prot.and_then(|prot| self.with_prot(leaf, *first, prot)).unwrap_or(*first);
        self.write_leaf(leaf, if *dirty { self.format.dirtied(first) } else { first });
    }
}

/// How many leaves are away at a time: one sync for as many, and no memory allocated.
const BROKEN: usize = 32;

/// A leaf whose entries were emptied.
struct Broken<'t, F: Format> {
    leaf: LeafEntries<'t, F>,
    /// What its first entry was, without hardware's mark.
    first: F::Word,
    /// Whether hardware had marked it.
    dirty: bool,
}
