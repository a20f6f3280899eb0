//! Two trees of tables, entry by entry.
//!
//! Tables lie elsewhere on each side, so links are compared by where they lead: each must be what
//! this side's encoder makes of the address in it, and the tables that they lead to are compared
//! in turn. Each table has one place in the tree. Leaves are compared whole.

use std::collections::HashSet;
use std::fmt;

use dmaspan::io_pgtable::{Entry, Format, PageTable, Word};
use dmaspan::{PhysAddr, lg2};

use crate::differences::{Difference, Expected, Met};
use crate::formats::{Bits, Register, Setup, Subject, Told};
use crate::linux::Linux;
use crate::memory::{Memory, View};
use crate::model::{Mapping, Model};

/// Both sides at one moment.
pub(crate) struct Sides<'a, S: Subject> {
    pub(crate) setup: &'a Setup,
    pub(crate) linux: &'a mut Linux,
    pub(crate) table: &'a PageTable<S::Format, Memory>,
    pub(crate) model: &'a Model,
    /// Whose view is compared.
    pub(crate) view: View,
}

/// What was compared.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) trees: u64,
    pub(crate) leaves: u64,
    pub(crate) links: u64,
    pub(crate) registers: u64,
    pub(crate) met: Met,
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Self) {
        self.trees += other.trees;
        self.leaves += other.leaves;
        self.links += other.links;
        self.registers += other.registers;
        self.met.add(&other.met);
    }
}

/// A comparison that found nothing that is not in the list.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) counts: Counts,
    /// Where this side's leaf entries are.
    pub(crate) leaves: Vec<u64>,
    /// Where its links are.
    pub(crate) links: Vec<u64>,
    /// The bytes that the leaves translate.
    bytes: u128,
    /// This side's tables below the root.
    reached: HashSet<u64>,
    /// Tables without a counterpart, by this side or Linux's, and their level: they must be empty.
    alone: Vec<(bool, u64, u32)>,
}

/// A table on both sides, and the first address that it translates.
#[derive(Clone, Copy)]
struct Pair {
    theirs: u64,
    ours: u64,
    iova: u64,
}

/// An entry on both sides.
struct Both {
    level: u32,
    iova: u64,
    theirs: u64,
    ours: u64,
    at: (u64, u64),
}

impl fmt::Display for Both {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { level, iova, theirs, ours, at } = self;
        write!(
            f,
            "the entry for {iova:#x} at level {level} is {theirs:#x} in Linux, at {:#x}, and \
             {ours:#x} here, at {:#x}",
            at.0, at.1
        )
    }
}

/// The words of entries.
pub(crate) fn entries<W: Bits>(words: &[u64]) -> Vec<u64> {
    if W::LG2_BYTES == 3 {
        return words.to_vec();
    }
    words.iter().flat_map(|word| [word & 0xffff_ffff, word >> 32]).collect()
}

/// Whether all registers are the same.
pub(crate) fn registers(registers: &[Register]) -> Result<(), String> {
    for Register { name, theirs, ours } in registers {
        if theirs != ours {
            return Err(format!("{name} is {theirs:#x} for Linux's table and {ours:#x} here"));
        }
    }
    Ok(())
}

impl<S: Subject> Sides<'_, S> {
    /// Compares everything.
    pub(crate) fn compare(&mut self) -> Result<Found, String> {
        let mut found = Found::default();
        let words = self.linux.root()?;
        let root = S::root(self.setup, &words);
        let (ours, top) = self.table.root_and_level();
        let (setup, format, met) = (self.setup, self.table.format(), &mut found.counts.met);
        let all = S::registers(Told { setup, format, at: (ours, top), root: &words, met });
        registers(&all)?;
        found.counts.registers += all.len() as u64;
        if let Some(level) = root.level.filter(|&level| level != top) {
            return Err(format!("the root is at level {level} in Linux and {top} here"));
        }
        let geometry = self.table.geometry();
        let entries = geometry.root.lg2_size - <S::Format as Format>::Word::LG2_BYTES;
        let reached = <S::Format as Format>::shift(top) + entries;
        let start = geometry.aperture.start().get();
        let iova = if reached < 64 { lg2::align_down(start, reached) } else { 0 };
        let mut pairs = vec![Pair { theirs: root.paddr, ours: ours.get(), iova }];
        for level in (0..=top).rev() {
            pairs = self.level(level, &pairs, &mut found)?;
        }
        self.all_empty(&mut found)?;
        let (tables, reached) = (self.table.memory().tables(), found.reached.len() + 1);
        if tables != reached {
            return Err(format!("this side has {tables} tables, {reached} of them in the tree"));
        }
        if found.bytes != self.model.bytes() {
            let (bytes, mapped) = (found.bytes, self.model.bytes());
            return Err(format!("{bytes:#x} bytes have leaves and {mapped:#x} are mapped"));
        }
        found.counts.trees = 1;
        Ok(found)
    }

    /// Notes that a link leads to a table of this side, which no other link and not the root may
    /// have.
    fn reach(&self, table: u64, found: &mut Found) -> Result<(), String> {
        let (root, top) = self.table.root_and_level();
        let root = root.get()..root.get() + self.bytes(top) as u64;
        if root.contains(&table) || !found.reached.insert(table) {
            return Err(format!("the table at {table:#x} has two places in the tree"));
        }
        Ok(())
    }

    /// The bytes of a table at a level.
    fn bytes(&self, level: u32) -> usize {
        let geometry = self.table.geometry();
        let shape = if level == geometry.top_level { geometry.root } else { geometry.table };
        1 << shape.lg2_size
    }

    fn read_ours(&self, level: u32, table: u64) -> Result<Vec<u64>, String> {
        let words = self.table.memory().read(self.view, self.bytes(level), table);
        words
            .map(|words| entries::<<S::Format as Format>::Word>(&words))
            .ok_or_else(|| format!("a link at level {} leads to {table:#x}, no table", level + 1))
    }

    fn read_theirs(&mut self, level: u32, tables: &[u64]) -> Result<Vec<Vec<u64>>, String> {
        let read = self.linux.read(self.view, self.bytes(level), tables)?;
        Ok(read.iter().map(|words| entries::<<S::Format as Format>::Word>(words)).collect())
    }

    /// Compares all tables of a level, and returns those of the next.
    fn level(
        &mut self,
        level: u32,
        pairs: &[Pair],
        found: &mut Found,
    ) -> Result<Vec<Pair>, String> {
        let mut next = Vec::new();
        let mut mapping = None;
        let size = 1u64 << <S::Format as Format>::Word::LG2_BYTES;
        let addresses: Vec<u64> = pairs.iter().map(|pair| pair.theirs).collect();
        let read = self.read_theirs(level, &addresses)?;
        for (pair, theirs) in pairs.iter().zip(read) {
            let ours = self.read_ours(level, pair.ours)?;
            for (n, (theirs, ours)) in (0u64..).zip(theirs.into_iter().zip(ours)) {
                if theirs | ours == 0 {
                    continue;
                }
                let at = (pair.theirs + n * size, pair.ours + n * size);
                let iova = pair.iova.wrapping_add(n << <S::Format as Format>::shift(level));
                let both = Both { level, iova, theirs, ours, at };
                next.extend(self.entry(&both, &mut mapping, found)?);
            }
        }
        Ok(next)
    }

    /// Compares an entry that is not empty on both sides, and returns the tables that it leads to.
    fn entry(
        &self,
        both: &Both,
        mapping: &mut Option<Mapping>,
        found: &mut Found,
    ) -> Result<Option<Pair>, String> {
        let format = self.table.format();
        let level = both.level;
        let decode = |word| format.decode(level, Bits::of(word));
        if let Entry::Table(ours) = decode(both.ours) {
            self.reach(ours.get(), found)?;
        }
        match (decode(both.theirs), decode(both.ours)) {
            (Entry::Table(theirs), Entry::Table(ours)) => {
                self.link(both, theirs, ours, &mut found.counts.met)?;
                found.counts.links += 1;
                found.links.push(both.at.1);
                Ok(Some(Pair { theirs: theirs.get(), ours: ours.get(), iova: both.iova }))
            }
            (Entry::Table(theirs), Entry::Empty) => {
                found.counts.met.count(Difference::EmptyTable);
                found.alone.push((false, theirs.get(), level - 1));
                Ok(None)
            }
            (Entry::Empty, Entry::Table(ours)) => {
                found.counts.met.count(Difference::EmptyTable);
                found.alone.push((true, ours.get(), level - 1));
                Ok(None)
            }
            (Entry::Leaf(_), Entry::Leaf(leaf)) => {
                if !mapping.is_some_and(|m| (m.start..=m.last).contains(&both.iova)) {
                    *mapping = self.model.at(both.iova);
                }
                let Some(mapping) = *mapping else {
                    return Err(format!("{both}, and nothing is mapped there"));
                };
                self.leaf(both, mapping, &mut found.counts.met)?;
                found.leaves.push(both.at.1);
                let shift = <S::Format as Format>::shift(level);
                found.bytes += 1 << shift;
                if both.iova & lg2::mask(leaf.lg2) == 0 {
                    found.counts.leaves += 1;
                    let paddr = mapping.paddr + (both.iova - mapping.start);
                    if leaf.paddr.get() != paddr {
                        return Err(format!("{both}, and {paddr:#x} was asked for"));
                    }
                }
                Ok(None)
            }
            _ => Err(both.to_string()),
        }
    }

    /// Whether both links are what this side makes of where they lead, software's bits aside.
    fn link(
        &self,
        both: &Both,
        theirs: PhysAddr,
        ours: PhysAddr,
        met: &mut Met,
    ) -> Result<(), String> {
        let format = self.table.format();
        let expect = |table| format.link(both.level, table).bits();
        let marks = self.setup.non_coherent();
        let mut expected = Expected::of(both.theirs, met);
        let unmarked = |bit: u64| move |word: u64| word & !bit;
        if marks {
            expected.apply(Difference::SoftwareBit, unmarked(S::SOFTWARE_BIT));
        }
        S::link(self.setup, &mut expected);
        let theirs_is = expected.word;
        let mut expected = Expected::of(both.ours, met);
        let written_back = <S::Format as Format>::WRITTEN_BACK.bits();
        expected.apply(Difference::SoftwareBit, unmarked(written_back));
        if theirs_is != expect(theirs) || expected.word != expect(ours) {
            let (a, b) = (expect(theirs), expect(ours));
            return Err(format!("{both}; by where they lead, {a:#x} and {b:#x} were expected"));
        }
        Ok(())
    }

    /// Whether a leaf of this side is Linux's, the list of differences aside.
    fn leaf(&self, both: &Both, mapping: Mapping, met: &mut Met) -> Result<(), String> {
        let mut expected = Expected::of(both.theirs, met);
        S::leaf(self.setup, mapping.asked, &mut expected);
        if expected.word == both.ours {
            return Ok(());
        }
        let (word, asked) = (expected.word, mapping.asked.prot);
        Err(format!(
            "{both}; mapped as {asked:?}, it was to be {word:#x} by the list of differences"
        ))
    }

    /// Whether tables that only one side has are empty, and those below them.
    fn all_empty(&mut self, found: &mut Found) -> Result<(), String> {
        while let Some((is_ours, table, level)) = found.alone.pop() {
            let words = if is_ours {
                self.read_ours(level, table)?
            } else {
                self.read_theirs(level, &[table])?.remove(0)
            };
            for word in words.into_iter().filter(|&word| word != 0) {
                let Entry::Table(below) = self.table.format().decode(level, Bits::of(word)) else {
                    let who = if is_ours { "this side" } else { "Linux" };
                    return Err(format!("only {who} has {word:#x} in the table {table:#x}"));
                };
                if is_ours {
                    self.reach(below.get(), found)?;
                }
                found.alone.push((is_ours, below.get(), level - 1));
            }
        }
        Ok(())
    }
}
