//! Looking up what is mapped, as maximal runs.

use core::ops::ControlFlow;

use super::Owned;
use super::cursor::{Cursor, Reached};
use super::format::{Entry, Format};
use super::memory::TableMemory;
use super::scan::Piece;
use super::word::Word;
use crate::addr::{Iova, PhysAddr};
use crate::lg2;
use crate::prot::Prot;
use crate::range::IovaRange;

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
        let offset = next.range.start().get() - self.range.start().get();
        let contiguous = self.range.last().checked_add(1) == Some(next.range.start())
            && self.paddr.checked_add(offset) == Some(next.paddr);
        if !contiguous || self.prot != next.prot {
            return None;
        }
        let range = IovaRange::new(self.range.start(), next.range.last())?;
        Some(Self { range, ..self })
    }
}

/// Yields what is mapped in a range, as maximal runs in the order of IOVAs. Holes are left out.
///
/// An entry that no operation of the table wrote is passed over like a hole.
///
/// It stays with the thread that owns the range: on another one it could still be in a table that
/// this one unmaps and frees.
///
/// ```compile_fail,E0277
/// # use dmaspan::io_pgtable::{Format, Owned, TableMemory};
/// fn in_parallel<F: Format, M: TableMemory<F::Word>>(owned: &Owned<'_, F, M>) {
///     let walk = owned.walk(owned.range());
///     std::thread::scope(|scope| {
///         scope.spawn(move || walk.count());
///     });
/// }
/// ```
#[derive(Debug)]
pub struct Walk<'o, F: Format, M: TableMemory<F::Word>> {
    owned: &'o Owned<'o, F, M>,
    rest: Option<IovaRange>,
}

impl<F: Format, M: TableMemory<F::Word>> Iterator for Walk<'_, F, M> {
    type Item = MappedRun;

    fn next(&mut self) -> Option<MappedRun> {
        let range = self.rest.take()?;
        let mut run: Option<MappedRun> = None;
        let table = self.owned.table;
        let ended = table.scan(range, |piece| {
            let Piece::Leaves { range, paddr, level, word, .. } = piece else {
                return match (run, piece) {
                    (Some(_), Piece::Hole(hole)) => ControlFlow::Break(hole.start()),
                    (Some(_), Piece::Invalid { iova, .. }) => ControlFlow::Break(iova),
                    _ => ControlFlow::Continue(()),
                };
            };
            let next = MappedRun { range, paddr, prot: table.format.prot(level, word) };
            match run {
                None => run = Some(next),
                Some(so_far) => match so_far.join(next) {
                    Some(joined) => run = Some(joined),
                    None => return ControlFlow::Break(range.start()),
                },
            }
            ControlFlow::Continue(())
        });
        self.rest = ended.break_value().and_then(|next| IovaRange::new(next, range.last()));
        run
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

    /// Adds what another range has.
    pub fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
    }
}

impl<F: Format, M: TableMemory<F::Word>> Owned<'_, F, M> {
    /// Returns where `iova` leads: `None` where nothing is mapped or the address is not owned.
    pub fn iova_to_phys(&self, iova: Iova) -> Option<PhysAddr> {
        if !self.within?.contains(iova) {
            return None;
        }
        let table = self.table;
        let mut cursor = Cursor::new(table);
        let level = match cursor.reach(iova.get(), 0) {
            Reached::Table => 0,
            Reached::Stopped { level, .. } => level,
        };
        let word = F::Word::load(cursor.entries_from(level, iova.get()).first()?);
        let Entry::Leaf(leaf) = table.format.decode(level, word) else { return None };
        let offset = iova.get()
            & lg2::mask(match F::GROUPS {
                super::Groups::Consecutive => F::shift(level),
                super::Groups::Repeated => leaf.lg2,
            });
        Some(leaf.paddr.wrapping_add(offset))
    }

    /// Returns what is mapped in `range`, as maximal runs with their permissions. The part of the
    /// range that is not owned counts as a hole.
    pub fn walk(&self, range: IovaRange) -> Walk<'_, F, M> {
        Walk { owned: self, rest: self.within.and_then(|within| within.intersection(range)) }
    }

    /// Returns how many leaves of each size translate `range`. A leaf counts where it begins.
    pub fn census(&self, range: IovaRange) -> LeafCensus {
        let mut census = LeafCensus::default();
        let within = self.within.and_then(|within| within.intersection(range));
        let Some(range) = within else { return census };
        let _: ControlFlow<()> = self.table.scan(range, |piece| {
            if let Piece::Leaves { range, lg2, .. } = piece {
                // Multiples of the leaf size within the range: one begins at each.
                let before = range.start().get().checked_sub(1).map(|before| before >> lg2);
                let begun = match before {
                    Some(before) => (range.last().get() >> lg2) - before,
                    None => (range.last().get() >> lg2) + 1,
                };
                if let Some(count) = census.counts.get_mut(lg2 as usize) {
                    *count += begun;
                }
            }
            ControlFlow::Continue(())
        });
        census
    }
}
