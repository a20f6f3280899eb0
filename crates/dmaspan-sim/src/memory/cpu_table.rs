//! A CPU's page tables: radix trees with leaves of every level.
//!
//! A table of a level has one entry per `2^index_lg2` bytes of the level below, and an entry is
//! nothing, a table or a leaf. With granules of 4 KiB leaves are 4K, 2M and 1G, with 16 KiB 16K,
//! 32M and 64G, and with 64 KiB 64K, 512M and 4T. Neighbouring entries of memory may form one leaf,
//! as Arm's Contiguous bit says it: 64K of sixteen 4K entries.
//!
//! The tree is as high as the highest address that was entered needs, as Linux's xarray: user
//! addresses of 48 bits take four levels of 4 KiB, and those at the top of 64 bits six.

use std::ops::ControlFlow;

use dmaspan::pin::Kind;
use dmaspan::{PhysAddr, lg2};

use super::vma::Rights;

/// Which leaves a granule has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    granule_lg2: u32,
    index_lg2: u32,
}

impl Geometry {
    /// Tables as large as a granule, of eight bytes an entry, where that is a size of real tables.
    pub(super) fn new(granule_lg2: u32) -> Self {
        Self { granule_lg2, index_lg2: granule_lg2.saturating_sub(3).clamp(4, 13) }
    }

    pub(super) fn granule_lg2(self) -> u32 {
        self.granule_lg2
    }

    /// log2 of the size of leaves, the largest first. Only those of memory consist of several
    /// entries: Linux sets the Contiguous bit on folios (arch/arm64/mm/contpte.c).
    pub(super) fn leaf_sizes_lg2(self, kind: Kind) -> impl Iterator<Item = u32> {
        let contiguous = match (self.granule_lg2, kind) {
            (12, Kind::Memory) => Some(16),
            (14 | 16, Kind::Memory) => Some(21),
            _ => None,
        };
        let upper = [self.shift(2), self.shift(1)].into_iter().filter(|size_lg2| *size_lg2 < 64);
        upper.chain(contiguous).chain([self.granule_lg2])
    }

    fn shift(self, level: u32) -> u32 {
        self.granule_lg2 + level * self.index_lg2
    }

    /// Where in its table the entry for `at` is.
    fn index(self, at: u64, shift: u32) -> usize {
        to_usize((at >> shift) & lg2::mask(self.index_lg2))
    }
}

/// What a leaf says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    /// Where the first byte is, naturally aligned to the size.
    pub(super) paddr: PhysAddr,
    pub(super) size_lg2: u8,
    pub(super) kind: Kind,
    pub(super) rights: Rights,
}

impl Leaf {
    /// Where the byte with this user address is, which the leaf maps.
    pub(super) fn at(self, user: u64) -> PhysAddr {
        self.paddr.wrapping_add(user & lg2::mask(u32::from(self.size_lg2)))
    }
}

/// The part of a leaf that lies in a walked range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Its first user address.
    pub(super) at: u64,
    /// Its last.
    pub(super) last: u64,
    /// The whole leaf.
    pub(super) leaf: Leaf,
}

#[derive(Debug)]
enum Entry {
    Empty,
    Table(Box<Table>),
    Leaf(Leaf),
}

const _: () = assert!(size_of::<Entry>() == 16);

#[derive(Debug)]
struct Table {
    entries: Box<[Entry]>,
    /// How many are not empty.
    live: usize,
}

impl Table {
    fn new(index_lg2: u32) -> Self {
        let entries = (0..1usize << index_lg2).map(|_| Entry::Empty).collect();
        Self { entries, live: 0 }
    }

    /// The table behind an entry, which is made where there is none. A leaf there is dropped.
    fn below(&mut self, index: usize, index_lg2: u32) -> &mut Self {
        let entry = &mut self.entries[index];
        if !matches!(entry, Entry::Table(_)) {
            self.live += usize::from(matches!(entry, Entry::Empty));
            *entry = Entry::Table(Box::new(Self::new(index_lg2)));
        }
        match entry {
            Entry::Table(table) => table,
            Entry::Empty | Entry::Leaf(_) => unreachable!("a table was put there"),
        }
    }
}

/// The page tables of one address space.
#[derive(Debug)]
pub(super) struct CpuTable {
    geometry: Geometry,
    levels: u32,
    root: Table,
}

impl CpuTable {
    pub(super) fn new(geometry: Geometry) -> Self {
        // Three levels, so that every leaf has a table.
        let levels = (64 - geometry.granule_lg2).div_ceil(geometry.index_lg2).min(3);
        Self { geometry, levels, root: Table::new(geometry.index_lg2) }
    }

    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The leaf that maps an address: a walk from the root.
    pub(super) fn find(&self, at: u64) -> Option<Leaf> {
        if at > self.last() {
            return None;
        }
        let (mut table, mut shift) = (&self.root, self.top_shift());
        loop {
            match &table.entries[self.geometry.index(at, shift)] {
                Entry::Empty => return None,
                Entry::Leaf(leaf) => return Some(*leaf),
                Entry::Table(below) => (table, shift) = (below, shift - self.geometry.index_lg2),
            }
        }
    }

    /// Calls `f` with each leaf from `from` to `last`, in order and cut to that. Ends with the
    /// first address that nothing maps, or where `f` breaks.
    ///
    /// Each table is entered once and each leaf is one step, however many entries it has.
    pub(super) fn walk<B>(
        &self,
        from: u64,
        last: u64,
        f: &mut impl FnMut(Part) -> ControlFlow<B>,
    ) -> ControlFlow<Walked<B>> {
        let top = self.last();
        if from > top {
            return ControlFlow::Break(Walked::Hole(from));
        }
        self.walk_table(&self.root, self.top_shift(), from, last.min(top), f)?;
        if last > top {
            ControlFlow::Break(Walked::Hole(top + 1))
        } else {
            ControlFlow::Continue(())
        }
    }

    fn walk_table<B>(
        &self,
        table: &Table,
        shift: u32,
        from: u64,
        last: u64,
        f: &mut impl FnMut(Part) -> ControlFlow<B>,
    ) -> ControlFlow<Walked<B>> {
        let mut at = from;
        loop {
            let end = match &table.entries[self.geometry.index(at, shift)] {
                Entry::Empty => return ControlFlow::Break(Walked::Hole(at)),
                Entry::Table(below) => {
                    let end = last.min(at | lg2::mask(shift));
                    self.walk_table(below, shift - self.geometry.index_lg2, at, end, f)?;
                    end
                }
                Entry::Leaf(leaf) => {
                    let end = last.min(at | lg2::mask(u32::from(leaf.size_lg2)));
                    if let ControlFlow::Break(value) = f(Part { at, last: end, leaf: *leaf }) {
                        return ControlFlow::Break(Walked::Stopped(value));
                    }
                    end
                }
            };
            if end == last {
                return ControlFlow::Continue(());
            }
            at = end + 1;
        }
    }

    /// Enters a leaf at a naturally aligned address, instead of what was there.
    pub(super) fn enter(&mut self, at: u64, leaf: Leaf) {
        while at > self.last() {
            let mut root = Table::new(self.geometry.index_lg2);
            std::mem::swap(&mut root, &mut self.root);
            self.levels += 1;
            if root.live > 0 {
                self.root.entries[0] = Entry::Table(Box::new(root));
                self.root.live = 1;
            }
        }
        let size_lg2 = u32::from(leaf.size_lg2);
        let index_lg2 = self.geometry.index_lg2;
        let (mut shift, mut table) = (self.top_shift(), &mut self.root);
        while shift > size_lg2 {
            table = table.below(self.geometry.index(at, shift), index_lg2);
            shift -= index_lg2;
        }
        let first = self.geometry.index(at, shift);
        for entry in &mut table.entries[first..first + (1 << (size_lg2 - shift))] {
            table.live += usize::from(matches!(entry, Entry::Empty));
            *entry = Entry::Leaf(leaf);
        }
    }

    /// Drops every leaf with an address from `from` to `last`: whole, like Linux's zap of a huge
    /// leaf. Tables that are empty then go too.
    pub(super) fn clear(&mut self, from: u64, last: u64) {
        let (shift, top) = (self.top_shift(), self.last());
        if from <= top {
            clear_table(&mut self.root, self.geometry, shift, from, last.min(top));
        }
    }

    fn top_shift(&self) -> u32 {
        self.geometry.shift(self.levels - 1)
    }

    /// The last address that the tree has a place for.
    fn last(&self) -> u64 {
        lg2::mask(self.geometry.shift(self.levels).min(64))
    }
}

/// Why a walk ended early.
#[derive(Debug)]
pub(super) enum Walked<B> {
    /// Nothing maps this address.
    Hole(u64),
    /// The caller's function broke.
    Stopped(B),
}

fn clear_table(table: &mut Table, geometry: Geometry, shift: u32, from: u64, last: u64) {
    let mut at = from;
    loop {
        let index = geometry.index(at, shift);
        let end = last.min(at | lg2::mask(shift));
        match &mut table.entries[index] {
            Entry::Empty => {}
            Entry::Table(below) => {
                clear_table(below, geometry, shift - geometry.index_lg2, at, end);
                if below.live == 0 {
                    table.entries[index] = Entry::Empty;
                    table.live -= 1;
                }
            }
            Entry::Leaf(leaf) => {
                let run = 1usize << (u32::from(leaf.size_lg2) - shift);
                let first = index & !(run - 1);
                table.entries[first..first + run].fill_with(|| Entry::Empty);
                table.live -= run;
            }
        }
        if end == last {
            return;
        }
        at = end + 1;
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
