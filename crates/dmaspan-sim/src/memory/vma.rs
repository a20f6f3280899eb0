//! Ranges of an address space: what is behind user addresses, whether or not a CPU's tables say it.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmaspan::pin::Kind;
use dmaspan::{PhysAddr, Span, UserAddr, UserRange, lg2};

use super::SimMemory;
use super::cpu_table::{Geometry, Leaf};

/// Says what a user may do with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rights {
    /// Reading.
    ReadOnly,
    /// Reading and writing.
    ReadWrite,
}

/// When leaves of a range are entered in the CPU's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Population {
    /// When it is mapped, as `MAP_POPULATE`.
    Eager,
    /// By faults, one leaf each.
    Lazy,
}

/// Says how a range is mapped. The default is writable, eager, and by the largest leaves that fit.
///
/// ```
/// use dmaspan_sim::memory::{MapOptions, Population, Rights};
///
/// let options = MapOptions { max_leaf_lg2: 21, ..MapOptions::default() };
/// assert_eq!((options.rights, options.population), (Rights::ReadWrite, Population::Eager));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapOptions {
    /// What the user may do.
    pub rights: Rights,
    /// When leaves are entered.
    pub population: Population,
    /// log2 of the largest leaf, in bytes: 21 keeps to leaves of 2 MiB and less. Below the granule
    /// it is the granule.
    pub max_leaf_lg2: u32,
}

impl Default for MapOptions {
    fn default() -> Self {
        Self { rights: Rights::ReadWrite, population: Population::Eager, max_leaf_lg2: 63 }
    }
}

/// Memory that ranges of one or several spaces map, as the page cache of a file: spans by offset.
#[derive(Debug)]
pub(super) struct Object {
    /// In order, each joined with its neighbours as far as that goes.
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    offset: u64,
    span: Span,
}

impl Object {
    pub(super) fn new(spans: &[Span]) -> Self {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut offset: u64 = 0;
        for span in spans {
            match pieces.last_mut().and_then(|last| Some((last.span.join(*span)?, last))) {
                Some((joined, last)) => last.span = joined,
                None => pieces.push(Piece { offset, span: *span }),
            }
            offset = offset.wrapping_add(span.len());
        }
        pieces.shrink_to_fit();
        Self { pieces }
    }

    fn piece(&self, offset: u64) -> Option<Piece> {
        let behind = self.pieces.partition_point(|piece| piece.offset <= offset);
        behind.checked_sub(1).and_then(|at| self.pieces.get(at)).copied()
    }
}

/// What is behind a range.
#[derive(Clone, Debug)]
pub(super) enum Backing {
    /// Memory, from an offset on.
    Memory { object: Arc<Object>, offset: u64 },
    /// A device's registers or memory, from an address on: what Linux calls a pfnmap.
    Device { paddr: PhysAddr },
}

/// Whether a range is still what it was mapped as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Backed,
    /// It was taken away: faults find nothing.
    Revoked,
}

/// One range with one backing.
#[derive(Clone, Debug)]
pub(super) struct Vma {
    pub(super) user: UserRange,
    pub(super) backing: Backing,
    pub(super) rights: Rights,
    pub(super) presence: Presence,
    pub(super) max_leaf_lg2: u32,
}

impl Vma {
    pub(super) fn kind(&self) -> Kind {
        match self.backing {
            Backing::Memory { .. } => Kind::Memory,
            Backing::Device { .. } => Kind::Mmio,
        }
    }

    /// The part of this range in `range`, with the backing that it has there.
    pub(super) fn cut(&self, range: UserRange) -> Option<Self> {
        let user = self.user.intersection(range)?;
        let skipped = user.start().get() - self.user.start().get();
        let backing = match &self.backing {
            Backing::Memory { object, offset } => {
                Backing::Memory { object: Arc::clone(object), offset: offset + skipped }
            }
            Backing::Device { paddr } => Backing::Device { paddr: paddr.wrapping_add(skipped) },
        };
        Some(Self { user, backing, ..*self })
    }

    /// What is contiguous around `at`: user addresses of this range, and where the first is.
    pub(super) fn run(&self, at: UserAddr) -> (UserRange, PhysAddr) {
        let (object, offset) = match &self.backing {
            Backing::Device { paddr } => return (self.user, *paddr),
            Backing::Memory { object, offset } => (object, *offset),
        };
        let start = self.user.start().get();
        let Some(piece) = object.piece(offset + (at.get() - start)) else {
            unreachable!("an object is as long as its ranges");
        };
        // Where the piece begins and ends, cut to the range.
        let skipped = offset.saturating_sub(piece.offset);
        let first = start + piece.offset.saturating_sub(offset);
        let above = piece.span.len() - 1 - skipped;
        let last = first.saturating_add(above).min(self.user.last().get());
        let run = UserRange::new(UserAddr::new(first), UserAddr::new(last));
        (run.unwrap_or(UserRange::point(at)), piece.span.paddr().wrapping_add(skipped))
    }

    /// The largest leaf for `at` and its first user address: as large as the alignment of both
    /// addresses, the folio or the device's range, and the mapping's limit permit.
    pub(super) fn leaf(&self, memory: &SimMemory, geometry: Geometry, at: UserAddr) -> (u64, Leaf) {
        let (run, paddr) = self.run(at);
        self.leaf_of_run(memory, geometry, at, (run, paddr))
    }

    pub(super) fn leaf_of_run(
        &self,
        memory: &SimMemory,
        geometry: Geometry,
        at: UserAddr,
        (run, paddr): (UserRange, PhysAddr),
    ) -> (u64, Leaf) {
        let kind = self.kind();
        let here = paddr.wrapping_add(at.get() - run.start().get());
        let folio_lg2 = match kind {
            Kind::Memory => folio_lg2(memory, here),
            Kind::Mmio => 63,
        };
        let limit_lg2 = self.max_leaf_lg2.min(folio_lg2).max(geometry.granule_lg2());
        let fits = |size_lg2: &u32| {
            let first = lg2::align_down(at.get(), *size_lg2);
            let last = at.get() | lg2::mask(*size_lg2);
            *size_lg2 <= limit_lg2
                && lg2::is_aligned(at.get() ^ here.get(), *size_lg2)
                && first >= run.start().get()
                && last <= run.last().get()
        };
        let granule_lg2 = geometry.granule_lg2();
        let size_lg2 = geometry.leaf_sizes_lg2(kind).find(fits).unwrap_or(granule_lg2);
        let leaf = Leaf {
            paddr: PhysAddr::new(lg2::align_down(here.get(), size_lg2)),
            size_lg2: u8::try_from(size_lg2).unwrap_or(63),
            kind,
            rights: self.rights,
        };
        (lg2::align_down(at.get(), size_lg2), leaf)
    }
}

/// log2 of the size of the folio that has this frame; 0 where none has it.
fn folio_lg2(memory: &SimMemory, paddr: PhysAddr) -> u32 {
    memory.folio_of(paddr).map_or(0, |folio| memory.granule_lg2() + folio.order())
}

/// The disjoint ranges of a space.
#[derive(Debug, Default)]
pub(super) struct Vmas {
    /// By the first address.
    by_start: BTreeMap<u64, Vma>,
}

impl Vmas {
    /// Those that have an address of `range`, in order.
    pub(super) fn overlapping(&self, range: UserRange) -> impl Iterator<Item = &Vma> {
        let before = self.by_start.range(..range.start().get()).next_back();
        let inside = self.by_start.range(range.start().get()..=range.last().get());
        let all = before.into_iter().chain(inside).map(|(_, vma)| vma);
        all.filter(move |vma| vma.user.intersection(range).is_some())
    }

    /// The one that has this address.
    pub(super) fn at(&self, at: UserAddr) -> Option<&Vma> {
        let (_, vma) = self.by_start.range(..=at.get()).next_back()?;
        vma.user.contains(at).then_some(vma)
    }

    pub(super) fn insert(&mut self, vma: Vma) {
        self.by_start.insert(vma.user.start().get(), vma);
    }

    /// Takes out what lies in `range`, cutting ranges that reach out of it, and returns it.
    pub(super) fn take(&mut self, range: UserRange) -> Vec<Vma> {
        let starts: Vec<u64> = self.overlapping(range).map(|vma| vma.user.start().get()).collect();
        let mut taken = Vec::with_capacity(starts.len());
        for start in starts {
            let Some(vma) = self.by_start.remove(&start) else { continue };
            let (first, last) = (vma.user.start(), vma.user.last());
            let before = range.start().get().checked_sub(1).map(UserAddr::new);
            let below = before.and_then(|before| UserRange::new(first, before));
            let behind = range.last().checked_add(1);
            let above = behind.and_then(|behind| UserRange::new(behind, last));
            for part in [below, above].into_iter().flatten() {
                if let Some(part) = vma.cut(part) {
                    self.insert(part);
                }
            }
            taken.extend(vma.cut(range));
        }
        taken
    }
}
