//! The SMMU caches leaves and table entries of every VMID and ASID, until the right invalidation.

use std::collections::HashMap;

use dmaspan::{Iova, IovaRange};

use crate::iotlb::blocks::BlockMap;
use crate::iotlb::leaves::{CachedLeaf, LeafCache};
use crate::walker::{TableLink, WalkPath};

/// Whose entries they are, within a VMID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Space {
    /// Stage 1, of one ASID.
    One(u16),
    /// Stage 1, of every ASID: leaves with nG = 0.
    Global,
    /// Stage 2.
    Two,
}

/// What entries are tagged with. The context bank is no part of it, since the architecture lets
/// banks with the same VMID and ASID share entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tag {
    pub(super) vmid: u16,
    pub(super) space: Space,
}

#[derive(Debug, Default)]
struct Entries {
    leaves: LeafCache,
    links: BlockMap<TableLink>,
}

/// Which entries of a VMID an invalidation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    /// All.
    All,
    /// Stage 1 of every ASID, global leaves included.
    One,
    /// Stage 1 of one ASID, and global leaves.
    AsidAndGlobal(u16),
    /// Stage 1 of one ASID.
    Asid(u16),
    /// Stage 2.
    Two,
}

/// Which levels of a table walk an invalidation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Levels {
    /// All: leaves, and the table entries on the way to them.
    All,
    /// The last: leaves.
    Last,
}

/// An invalidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Invalidation {
    /// `None` for every VMID.
    pub(super) vmid: Option<u16>,
    pub(super) which: Which,
    /// `None` for every address.
    pub(super) at: Option<Iova>,
    pub(super) levels: Levels,
}

impl Invalidation {
    /// Everything that is cached.
    pub(super) const EVERYTHING: Self =
        Self { vmid: None, which: Which::All, at: None, levels: Levels::All };

    fn concerns(&self, tag: Tag) -> bool {
        let whose = match (self.which, tag.space) {
            (Which::All, _)
            | (Which::One, Space::One(_) | Space::Global)
            | (Which::AsidAndGlobal(_), Space::Global)
            | (Which::Two, Space::Two) => true,
            (Which::AsidAndGlobal(asid) | Which::Asid(asid), Space::One(of)) => asid == of,
            _ => false,
        };
        whose && self.vmid.is_none_or(|vmid| vmid == tag.vmid)
    }
}

/// A TLB that forgets nothing by itself.
#[derive(Debug, Default)]
pub(super) struct Tlb {
    entries: HashMap<Tag, Entries>,
}

impl Tlb {
    /// The cached leaf for an address, and log2 of its size.
    pub(super) fn leaf(&self, tag: Tag, at: Iova) -> Option<(u32, CachedLeaf)> {
        let find = |tag| self.entries.get(&tag)?.leaves.get(at);
        let global = Tag { space: Space::Global, ..tag };
        match tag.space {
            Space::One(_) => find(tag).or_else(|| find(global)),
            Space::Global | Space::Two => find(tag),
        }
    }

    /// The deepest cached table for an address.
    pub(super) fn link(&self, tag: Tag, at: Iova) -> Option<TableLink> {
        self.entries.get(&tag)?.links.get(at).map(|(_, link)| *link)
    }

    /// Keeps a leaf of `2^lg2` bytes that has `at`.
    pub(super) fn keep_leaf(&mut self, tag: Tag, at: Iova, lg2: u32, leaf: CachedLeaf) {
        self.entries.entry(tag).or_default().leaves.insert(at, lg2, leaf);
    }

    /// Keeps the tables of a walk that began at `from`.
    pub(super) fn keep_path(&mut self, tag: Tag, from: TableLink, path: &WalkPath) {
        self.entries.entry(tag).or_default().links.keep_path(from, path);
    }

    pub(super) fn invalidate(&mut self, what: &Invalidation) {
        for (_, entries) in self.entries.iter_mut().filter(|(tag, _)| what.concerns(**tag)) {
            match what.at {
                // Leaves of any size, since no argument says one.
                Some(at) => entries.leaves.forget(IovaRange::point(at), u64::MAX),
                None => entries.leaves.clear(),
            };
            if what.levels == Levels::All {
                match what.at {
                    Some(at) => entries.links.remove(IovaRange::point(at)),
                    None => entries.links.clear(),
                };
            }
        }
    }

    /// How many leaves and tables are cached.
    pub(super) fn len(&self) -> (usize, usize) {
        let leaves = self.entries.values().map(|entries| entries.leaves.len()).sum();
        (leaves, self.entries.values().map(|entries| entries.links.len()).sum())
    }
}
