//! All CPUs share the depot, under one lock: it has the tree, and what full magazines gave away.

use alloc::vec::Vec;

use super::error::Error;
use super::magazine::{ByClass, Halves, Magazine, Magazines, NoMemory, Zone, with_room};
use super::request::{UNCACHED, Wanted};
use super::tree::Tree;
use crate::addr::Iova;
use crate::lg2;
use crate::range::IovaRange;

/// The depot, and the tree behind it.
///
/// The ranges of full magazines are copied to the depot's own list for their size: a copy of a few
/// cache lines costs less than the lock. So there is no empty magazine to find or to allocate.
pub(super) struct Depot {
    pub(super) tree: Tree,
    full: ByClass<Vec<u64>>,
    halves: Halves,
    granule_lg2: u32,
}

impl Depot {
    /// With room for a whole magazine a CPU, of each size, as they are at first.
    pub(super) fn new(
        tree: Tree,
        granule_lg2: u32,
        cpus: usize,
        halves: Halves,
    ) -> Result<Self, NoMemory> {
        let full = ByClass::try_new(|zone, class| {
            with_room(cpus.saturating_mul(2 * halves.first(zone, class)))
        })?;
        Ok(Self { tree, full, halves, granule_lg2 })
    }

    /// Loads the magazines that the wanted range would come from, where they are empty; with how
    /// many.
    pub(super) fn load(&mut self, magazines: &mut Magazines, wanted: &Wanted) -> usize {
        let mut loaded = 0;
        for zone in [Zone::Low, Zone::High] {
            let full = self.full.get_mut(zone, wanted.class);
            let magazine = magazines.get_mut(zone, wanted.class);
            if let (Some(full), Some(magazine)) = (full, magazine)
                && magazine.is_empty()
            {
                loaded += magazine.load(full, 2 * self.halves.most(zone, wanted.class));
            }
        }
        loaded
    }

    /// Takes the older half of a magazine that is full; back to the tree, where it has no room.
    pub(super) fn unload(&mut self, magazine: &mut Magazine, zone: Zone, class: u32) {
        let older = magazine.spill();
        let full = self.full.get_mut(zone, class);
        match full.filter(|full| full.capacity() - full.len() >= older.len()) {
            Some(full) => full.extend(older),
            None => older.for_each(|start| self.tree.free(held(start, class, self.granule_lg2))),
        }
    }

    /// A range from the tree; none where no fit is free.
    pub(super) fn alloc(&mut self, wanted: &Wanted) -> Result<Option<IovaRange>, Error> {
        let above = match wanted.class {
            UNCACHED => wanted.above,
            class => lg2::mask(class + self.granule_lg2),
        };
        let (Some(len), 0..=63) = (above.checked_add(1), wanted.align_lg2) else {
            return Ok(None);
        };
        Ok(self.tree.alloc(len, wanted.align_lg2, wanted.limit)?)
    }

    /// Takes back a range of a size that is cached.
    pub(super) fn free(&mut self, start: u64, class: u32) {
        self.tree.free(held(start, class, self.granule_lg2));
    }

    /// Gives all full magazines back to the tree; how many ranges.
    pub(super) fn drain(&mut self) -> usize {
        let mut drained = 0;
        for (class, full) in self.full.iter_mut() {
            drained += full.len();
            full.drain(..).for_each(|start| self.tree.free(held(start, class, self.granule_lg2)));
        }
        drained
    }

    /// What lies in full magazines, by first addresses.
    pub(super) fn starts(&self) -> impl Iterator<Item = u64> {
        self.full.iter().flatten().copied()
    }

    pub(super) fn count(&self) -> usize {
        self.full.iter().map(Vec::len).sum()
    }
}

/// What the tree holds for a range of a size that is cached.
fn held(start: u64, class: u32, granule_lg2: u32) -> IovaRange {
    let start = Iova::new(start);
    // It was handed out by the tree, so it ends in the space.
    let last = start.wrapping_add(lg2::mask(class + granule_lg2));
    IovaRange::new(start, last).unwrap_or(IovaRange::point(start))
}
