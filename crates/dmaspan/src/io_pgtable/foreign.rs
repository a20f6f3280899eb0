//! Reading tables that somebody else made out of a copy of memory: a dump of a machine, a crash
//! kernel's view of the one before it.
//!
//! Nothing is trusted: entries may lead anywhere, also back up the tree. Each table is read at most
//! once a level, so that the work is bounded by the memory that there is.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::ControlFlow;

use super::format::{Entry, Format, Geometry, Groups, Leaf, MAX_LEVELS};
use super::memory::TableShape;
use super::word::Word;
use super::{block_of, to_index};
use crate::addr::PhysAddr;
use crate::error::Errno;
use crate::lg2;
use crate::prot::Prot;
use crate::range::IovaRange;

/// A copy of memory, by physical address.
pub trait ForeignMemory {
    /// Reads the bytes from `paddr` on into all of `bytes`, and returns whether it has all of them.
    fn read(&self, paddr: PhysAddr, bytes: &mut [u8]) -> bool;
}

/// What is read of foreign tables, in the order of IOVAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForeignPiece {
    /// A table, before what it has. A table that is linked at two levels comes twice.
    Table {
        /// Its level.
        level: u32,
        /// Where it is.
        paddr: PhysAddr,
        /// Its bytes.
        bytes: u64,
    },
    /// Leaves of one size that follow each other in a table, in memory and with one permission.
    Leaves {
        /// What they translate.
        range: IovaRange,
        /// Where the first byte leads.
        paddr: PhysAddr,
        /// log2 of a leaf's bytes.
        lg2: u32,
        /// What the leaf entries permit. What the links above them may forbid is not looked at.
        prot: Prot,
        /// The table that has the leaves.
        table: PhysAddr,
    },
    /// Something that a sound tree does not have.
    Fault {
        /// What the first entry translates, or the aperture that it is outside of.
        range: IovaRange,
        /// The level of the table with the entry.
        level: u32,
        /// The table with the entry.
        table: PhysAddr,
        /// The entry.
        word: u64,
        /// What is wrong.
        fault: ForeignFault,
    },
}

/// Says what is wrong with an entry of a foreign table. No entry that is wrong was followed, but
/// for [`OtherLevel`](Self::OtherLevel) and [`TornGroup`](Self::TornGroup).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForeignFault {
    /// So many entries, one after the other, are not of the format.
    Invalid {
        /// How many.
        entries: u64,
    },
    /// So many entries translate what is outside of the aperture.
    OutsideAperture {
        /// How many.
        entries: u64,
    },
    /// It leads to a table that the memory does not have.
    Missing {
        /// Where the table would be.
        paddr: PhysAddr,
    },
    /// It leads to a table that is above it in the tree.
    Loop {
        /// The table.
        paddr: PhysAddr,
    },
    /// It leads to a table that another entry of the same level led to. What is below the table is
    /// listed there alone.
    Again {
        /// The table.
        paddr: PhysAddr,
    },
    /// It leads to a table that is at another level too.
    OtherLevel {
        /// The table.
        paddr: PhysAddr,
        /// The lowest other level.
        other: u32,
    },
    /// It says that it belongs to a leaf of several entries, of which others differ. It is listed
    /// as a leaf of its own.
    TornGroup {
        /// log2 of the bytes of the leaf that it would belong to.
        lg2: u32,
    },
}

/// The reason why there is no tree at a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// No root of the format can be there.
    #[error("the root at {root} is not at a multiple of {alignment:#x} bytes, as the format's are")]
    Misaligned {
        /// The root.
        root: PhysAddr,
        /// What it is a multiple of, in bytes.
        alignment: u64,
    },
    /// The memory does not have it.
    #[error("the memory has no {bytes:#x} bytes at {root}, where the root would be")]
    NoRoot {
        /// The root.
        root: PhysAddr,
        /// Its bytes.
        bytes: u64,
    },
}

impl ForeignError {
    /// `EINVAL` for an address that cannot be, `ENXIO` for one that leads nowhere.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Misaligned { .. } => Errno::EINVAL,
            Self::NoRoot { .. } => Errno::ENXIO,
        }
    }
}

/// Reads the tree of `format` whose root is at `root`, and hands what it has to `visit`, until that
/// breaks.
///
/// Of a format that [grows](Format::GROWS), the root is at its
/// [first top level](Format::first_top_level).
///
/// # Errors
///
/// [`ForeignError`] where there is no root; everything else that is wrong is a
/// [fault](ForeignPiece::Fault) among the pieces.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use dmaspan::PhysAddr;
/// use dmaspan::io_pgtable::{
///     ForeignFault, ForeignMemory, ForeignPiece, VtdSs, VtdSsConfig, read_foreign,
/// };
///
/// /// Two pages at 0x1000: a root whose first entry leads to a table, and whose second back to it.
/// struct Dump(Vec<u64>);
///
/// impl ForeignMemory for Dump {
///     fn read(&self, paddr: PhysAddr, bytes: &mut [u8]) -> bool {
///         let Some(first) = paddr.get().checked_sub(0x1000) else { return false };
///         let words = self.0.iter().flat_map(|word| word.to_le_bytes());
///         let found = words.skip(first as usize).take(bytes.len());
///         bytes.iter_mut().zip(found).map(|(to, from)| *to = from).count() == bytes.len()
///     }
/// }
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let mut words = vec![0; 1024];
///     (words[0], words[1]) = (0x2003, 0x1003);
///     words[512] = 0x8000_0083; // 1 GiB, read and write
///     let mut faults = Vec::new();
///     let format = VtdSs::new(VtdSsConfig::new(48, 52))?;
///     read_foreign(&format, PhysAddr::new(0x1000), &Dump(words), &mut |piece| {
///         if let ForeignPiece::Fault { fault, .. } = piece {
///             faults.push(fault);
///         }
///         ControlFlow::Continue(())
///     })?;
///     assert_eq!(faults, [ForeignFault::Loop { paddr: PhysAddr::new(0x1000) }]);
///     Ok(())
/// }
/// ```
pub fn read_foreign<F: Format>(
    format: &F,
    root: PhysAddr,
    memory: &dyn ForeignMemory,
    visit: &mut dyn FnMut(ForeignPiece) -> ControlFlow<()>,
) -> Result<(), ForeignError> {
    let geometry = format.geometry();
    let shape = geometry.root;
    if !lg2::is_aligned(root.get(), shape.lg2_align) {
        let alignment = lg2::size(shape.lg2_align);
        return Err(ForeignError::Misaligned { root, alignment });
    }
    let top = if F::GROWS { format.first_top_level() } else { geometry.top_level };
    let mut reading = Reading { format, geometry, top, memory, seen: BTreeMap::new(), visit };
    let Some(words) = reading.words(root, shape) else {
        return Err(ForeignError::NoRoot { root, bytes: lg2::size(shape.lg2_size) });
    };
    let _: ControlFlow<()> = reading.read(root, words);
    Ok(())
}

/// A walk through foreign tables.
struct Reading<'r, F: Format> {
    format: &'r F,
    geometry: Geometry,
    /// The level of the root.
    top: u32,
    memory: &'r dyn ForeignMemory,
    /// The tables that were read, and at which levels, one bit each.
    seen: BTreeMap<PhysAddr, u8>,
    visit: &'r mut dyn FnMut(ForeignPiece) -> ControlFlow<()>,
}
const _: () = assert!(MAX_LEVELS <= u8::BITS as usize);

/// A table that is being read.
struct Open<W> {
    paddr: PhysAddr,
    level: u32,
    /// What its first entry translates; 2^64 and above wrap.
    start: u64,
    words: Vec<W>,
    /// The index of the entry that comes next.
    next: usize,
}

/// Leaves that follow each other, and where the next one would.
type Run = Option<(IovaRange, PhysAddr, u32, Prot)>;

impl<F: Format> Reading<'_, F> {
    /// Reads the tree below a root.
    fn read(&mut self, root: PhysAddr, words: Vec<F::Word>) -> ControlFlow<()> {
        // Where addresses are sign-extended, the root's first entry is below the aperture.
        let root_bits = F::shift(self.top) + (words.len() as u64).ilog2();
        let start = match root_bits {
            ..64 => lg2::align_down(self.geometry.aperture.start().get(), root_bits),
            _ => 0,
        };
        self.seen.insert(root, level_bit(self.top));
        let root = Open { paddr: root, level: self.top, start, words, next: 0 };
        self.show_table(&root)?;
        let mut path = vec![root];
        while let Some(mut open) = path.pop() {
            let Some((index, table)) = self.scan(&mut open)? else { continue };
            path.push(open);
            if let Some(below) = self.enter(&path, index, table)? {
                path.push(below);
            }
        }
        ControlFlow::Continue(())
    }

    /// The words of a table, if the memory has all of it.
    fn words(&self, paddr: PhysAddr, shape: TableShape) -> Option<Vec<F::Word>> {
        let mut bytes = vec![0; to_index(lg2::size(shape.lg2_size))];
        let words = self.memory.read(paddr, &mut bytes).then_some(bytes)?;
        Some(words.chunks(to_index(lg2::size(F::Word::LG2_BYTES))).map(F::Word::of_bytes).collect())
    }

    fn show_table(&mut self, open: &Open<F::Word>) -> ControlFlow<()> {
        let bytes = (open.words.len() as u64) << F::Word::LG2_BYTES;
        (self.visit)(ForeignPiece::Table { level: open.level, paddr: open.paddr, bytes })
    }

    /// What an entry translates; `None` where nothing has such addresses.
    fn block(&self, open: &Open<F::Word>, index: usize) -> Option<IovaRange> {
        let shift = F::shift(open.level);
        let offset = (index as u64).checked_mul(lg2::size(shift))?;
        let block = block_of(open.start.checked_add(offset)?, shift);
        block.intersection(self.geometry.aperture)
    }

    /// Reads a table up to the next entry that leads to another one: its index, and the table.
    fn scan(&mut self, open: &mut Open<F::Word>) -> ControlFlow<(), Option<(usize, PhysAddr)>> {
        let level = open.level;
        let mut run = Run::None;
        let mut link = None;
        while let Some(&word) = open.words.get(open.next)
            && link.is_none()
        {
            let index = open.next;
            open.next += 1;
            if word == F::Word::EMPTY {
                continue;
            }
            let Some(range) = self.block(open, index) else {
                while open.words.get(open.next).is_some_and(|&word| word != F::Word::EMPTY)
                    && self.block(open, open.next).is_none()
                {
                    open.next += 1;
                }
                let entries = (open.next - index) as u64;
                let (aperture, fault) =
                    (self.geometry.aperture, ForeignFault::OutsideAperture { entries });
                self.flush(&mut run, open)?;
                self.fault(open, index, aperture, fault)?;
                continue;
            };
            match self.format.decode(level, word) {
                Entry::Empty => {}
                Entry::Table(table) if level != 0 => link = Some((index, table)),
                Entry::Leaf(leaf) => self.leaf(&mut run, open, index, range, leaf)?,
                Entry::Table(_) | Entry::Invalid => {
                    while let Some(&word) = open.words.get(open.next)
                        && self.format.decode(level, word) == Entry::Invalid
                        && self.block(open, open.next).is_some()
                    {
                        open.next += 1;
                    }
                    let entries = (open.next - index) as u64;
                    self.flush(&mut run, open)?;
                    self.fault(open, index, range, ForeignFault::Invalid { entries })?;
                }
            }
        }
        self.flush(&mut run, open)?;
        ControlFlow::Continue(link)
    }

    /// Adds the leaf of the entry at `index`, and goes behind it.
    fn leaf(
        &mut self,
        run: &mut Run,
        open: &mut Open<F::Word>,
        index: usize,
        range: IovaRange,
        leaf: Leaf,
    ) -> ControlFlow<()> {
        let shift = F::shift(open.level);
        let prot = self.format.prot(open.level, open.words[index]);
        if leaf.lg2 <= shift {
            let paddr = PhysAddr::new(lg2::align_down(leaf.paddr.get(), shift));
            return self.join(run, open, (range, paddr, shift, prot));
        }
        let entries = to_index(lg2::size(leaf.lg2 - shift));
        let group = open.words.get(index..index + entries);
        let block = block_of(range.start().get(), leaf.lg2);
        if let Some(group) = group
            && index.is_multiple_of(entries)
            && self.is_whole(group, shift)
            && self.geometry.aperture.covers(block)
        {
            open.next = index + entries;
            let paddr = PhysAddr::new(lg2::align_down(leaf.paddr.get(), leaf.lg2));
            return self.join(run, open, (block, paddr, leaf.lg2, prot));
        }
        // What hardware does with such a group is its own affair; the entry says this much.
        let paddr = match F::GROUPS {
            Groups::Consecutive => leaf.paddr.get(),
            Groups::Repeated => {
                let offset = range.start().get() & lg2::mask(leaf.lg2);
                lg2::align_down(leaf.paddr.get(), leaf.lg2) | offset
            }
        };
        self.flush(run, open)?;
        self.fault(open, index, range, ForeignFault::TornGroup { lg2: leaf.lg2 })?;
        let paddr = PhysAddr::new(lg2::align_down(paddr, shift));
        self.join(run, open, (range, paddr, shift, prot))
    }

    /// Whether entries that cover `2^shift` bytes each are one leaf, whatever hardware marked in
    /// them.
    fn is_whole(&self, group: &[F::Word], shift: u32) -> bool {
        let Some((&first, others)) = group.split_first() else { return false };
        let mut next = self.format.clean(first);
        others.iter().all(|&word| {
            if F::GROUPS == Groups::Consecutive {
                next = self.format.advance(next, lg2::size(shift));
            }
            self.format.clean(word) == next
        })
    }

    /// Joins leaves with those before, or shows those and begins anew.
    fn join(
        &mut self,
        run: &mut Run,
        open: &Open<F::Word>,
        next: (IovaRange, PhysAddr, u32, Prot),
    ) -> ControlFlow<()> {
        let (range, paddr, lg2, prot) = next;
        if let Some((before, first, before_lg2, before_prot)) = *run
            && (before_lg2, before_prot) == (lg2, prot)
            && let Some(joined) = before.join(range)
            && first.checked_add(range.start().get() - before.start().get()) == Some(paddr)
        {
            *run = Some((joined, first, lg2, prot));
            return ControlFlow::Continue(());
        }
        self.flush(run, open)?;
        *run = Some(next);
        ControlFlow::Continue(())
    }

    /// Shows leaves that nothing continues.
    fn flush(&mut self, run: &mut Run, open: &Open<F::Word>) -> ControlFlow<()> {
        match run.take() {
            Some((range, paddr, lg2, prot)) => {
                (self.visit)(ForeignPiece::Leaves { range, paddr, lg2, prot, table: open.paddr })
            }
            None => ControlFlow::Continue(()),
        }
    }

    fn fault(
        &mut self,
        open: &Open<F::Word>,
        index: usize,
        range: IovaRange,
        fault: ForeignFault,
    ) -> ControlFlow<()> {
        let word = open.words.get(index).map_or(0, |word| word.bits());
        let (level, table) = (open.level, open.paddr);
        (self.visit)(ForeignPiece::Fault { range, level, table, word, fault })
    }

    /// The table that an entry of the last one in `path` leads to, if it is to be read.
    fn enter(
        &mut self,
        path: &[Open<F::Word>],
        index: usize,
        table: PhysAddr,
    ) -> ControlFlow<(), Option<Open<F::Word>>> {
        let Some(open) = path.last() else { return ControlFlow::Continue(None) };
        // The entry was read, so it has a block.
        let Some(range) = self.block(open, index) else { return ControlFlow::Continue(None) };
        let level = open.level - 1;
        let seen = self.seen.get(&table).copied().unwrap_or(0);
        let fault = if path.iter().any(|above| above.paddr == table) {
            Some(ForeignFault::Loop { paddr: table })
        } else if seen & level_bit(level) != 0 {
            Some(ForeignFault::Again { paddr: table })
        } else {
            None
        };
        if let Some(fault) = fault {
            self.fault(open, index, range, fault)?;
            return ControlFlow::Continue(None);
        }
        let Some(words) = self.words(table, self.geometry.table) else {
            self.fault(open, index, range, ForeignFault::Missing { paddr: table })?;
            return ControlFlow::Continue(None);
        };
        if seen != 0 {
            let other = seen.trailing_zeros();
            self.fault(open, index, range, ForeignFault::OtherLevel { paddr: table, other })?;
        }
        self.seen.insert(table, seen | level_bit(level));
        let shift = F::shift(open.level);
        let start = lg2::align_down(range.start().get(), shift);
        let below = Open { paddr: table, level, start, words, next: 0 };
        self.show_table(&below)?;
        ControlFlow::Continue(Some(below))
    }
}

/// The bit of a level.
const fn level_bit(level: u32) -> u8 {
    1 << level
}
