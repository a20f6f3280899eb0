//! The stream table: one entry for each stream that hardware tells apart (IHI 0070, 3.3.1).

use alloc::collections::BTreeMap;
use alloc::sync::Arc;

use dmaspan::{PhysAddr, lg2};
use lock_api::Mutex;

use super::command::Tag;
use super::spec::{reg, ste, strtab};
use super::ste::{BLOCKED, Entry};
use crate::error::Error;
use crate::host::Host;
use crate::mmio::Mmio;
use crate::structure::Words;

/// log2 of the streams that a second-level table has: those of a PCI bus.
pub(super) const SPLIT: u32 = 8;

/// Says how the stream table is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamTable {
    /// Of two levels where hardware has them and one table of the second would not do.
    Any,
    /// One table with an entry for each stream.
    Linear,
    /// Tables of 256 streams, made when a stream of theirs is claimed.
    TwoLevels,
}

/// A stream's entry, while it or the driver lives.
pub(super) struct StreamSlot<H: Host> {
    pub(super) id: u32,
    table: Arc<Words<H::Structure>>,
    first: usize,
    /// Which domains hardware may use by it. The lock is around changes of the entry.
    pub(super) tags: Mutex<H::Lock, Tags>,
}

/// The domains that a stream's entry may lead to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tags {
    None,
    One(Tag),
    /// Hardware did not confirm a change, so that it may be one of several.
    Many,
}

impl Tags {
    /// Also `tag`.
    pub(super) fn with(self, tag: Option<Tag>) -> Self {
        match (self, tag) {
            (tags, None) => tags,
            (Self::None, Some(tag)) => Self::One(tag),
            (Self::One(had), Some(tag)) if had == tag => self,
            (Self::One(_) | Self::Many, Some(_)) => Self::Many,
        }
    }

    pub(super) fn may_have(self, tag: Tag) -> bool {
        match self {
            Self::None => false,
            Self::One(had) => had == tag,
            Self::Many => true,
        }
    }
}

impl<H: Host> StreamSlot<H> {
    pub(super) fn entry(&self) -> Entry {
        [0, 1, 2, 3].map(|word| self.table.get(self.first + word))
    }

    /// Stores all words, the one that says what the others mean last.
    pub(super) fn store(&self, entry: &Entry) {
        let words = entry.iter().enumerate().rev();
        words.for_each(|(word, &value)| self.table.set(self.first + word, value));
    }
}

/// The stream table.
pub(super) struct Table<H: Host> {
    /// Bits of the streams' numbers that it has entries for.
    pub(super) bits: u32,
    first: First<H>,
    max_paddr: PhysAddr,
    slots: Mutex<H::Lock, BTreeMap<u32, Arc<StreamSlot<H>>>>,
}

enum First<H: Host> {
    Entries(Arc<Words<H::Structure>>),
    Descriptors {
        table: Words<H::Structure>,
        /// Tables of the second level, by the index of their descriptor.
        second: Mutex<H::Lock, SecondLevel<H>>,
    },
}

type SecondLevel<H> = BTreeMap<u32, Arc<Words<<H as Host>::Structure>>>;

impl<H: Host> Table<H> {
    /// A table of streams with numbers of so many bits, all blocked, which hardware has not been
    /// told of.
    pub(super) fn new(
        host: &H,
        kind: StreamTable,
        bits: u32,
        max_paddr: PhysAddr,
    ) -> Result<Self, Error> {
        let first = if kind == StreamTable::TwoLevels {
            let lg2_size = (bits - SPLIT + 3).max(6);
            let table = Words::new(host, lg2_size, max_paddr)?;
            First::Descriptors { table, second: Mutex::new(BTreeMap::new()) }
        } else {
            First::Entries(Arc::new(blocked(host, bits, max_paddr)?))
        };
        Ok(Self { bits, first, max_paddr, slots: Mutex::new(BTreeMap::new()) })
    }

    /// Tells hardware of it. SMMUEN is clear.
    pub(super) fn program(&self, registers: &impl Mmio) {
        let (paddr, format) = match &self.first {
            First::Entries(table) => (table.paddr(), 0),
            First::Descriptors { table, .. } => {
                (table.paddr(), strtab::FMT_TWO_LEVEL | SPLIT << strtab::SPLIT_SHIFT)
            }
        };
        registers.write64(reg::STRTAB_BASE, strtab::READ_ALLOCATE | paddr.get());
        registers.write32(reg::STRTAB_BASE_CFG, format | self.bits);
    }

    /// The slot of a stream that the table reaches, with the tables that it needs.
    pub(super) fn slot(&self, host: &H, id: u32) -> Result<Arc<StreamSlot<H>>, Error> {
        if let Some(slot) = self.slots.lock().get(&id) {
            return Ok(Arc::clone(slot));
        }
        let (table, index) = match &self.first {
            First::Entries(table) => (Arc::clone(table), id),
            First::Descriptors { table: first, second } => {
                let table = self.second(host, first, second, id >> SPLIT)?;
                (table, id & ((1 << SPLIT) - 1))
            }
        };
        let first = (index as usize) << ste::LG2_WORDS;
        let slot = Arc::new(StreamSlot { id, table, first, tags: Mutex::new(Tags::None) });
        Ok(Arc::clone(self.slots.lock().entry(id).or_insert(slot)))
    }

    /// The second-level table with that index, which is made where there is none.
    fn second(
        &self,
        host: &H,
        first: &Words<H::Structure>,
        second: &Mutex<H::Lock, SecondLevel<H>>,
        index: u32,
    ) -> Result<Arc<Words<H::Structure>>, Error> {
        if let Some(table) = second.lock().get(&index) {
            return Ok(Arc::clone(table));
        }
        // Not under the lock, which may keep interrupts off.
        let made = blocked(host, SPLIT, self.max_paddr)?;
        let mut tables = second.lock();
        if let Some(table) = tables.get(&index) {
            let table = Arc::clone(table);
            drop(tables);
            // Nobody was told of it.
            made.free();
            return Ok(table);
        }
        first.set(index as usize, made.paddr().get() | ste::span(SPLIT));
        let table = Arc::new(made);
        tables.insert(index, Arc::clone(&table));
        Ok(table)
    }

    /// The slot with the lowest number from `id` on.
    pub(super) fn from(&self, id: u32) -> Option<Arc<StreamSlot<H>>> {
        self.slots.lock().range(id..).next().map(|(_, slot)| Arc::clone(slot))
    }

    /// Gives the memory back. Nobody has a slot, and hardware does not use the table.
    pub(super) fn free(&mut self) {
        self.slots.get_mut().clear();
        let free = |table: &mut Arc<Words<_>>| {
            if let Some(table) = Arc::get_mut(table) {
                table.free_in_place();
            }
        };
        match &mut self.first {
            First::Entries(table) => free(table),
            First::Descriptors { table, second } => {
                table.free_in_place();
                second.get_mut().values_mut().for_each(free);
            }
        }
    }
}

/// `2^lg2_entries` entries of streams that reach nothing.
fn blocked<H: Host>(
    host: &H,
    lg2_entries: u32,
    max_paddr: PhysAddr,
) -> Result<Words<H::Structure>, Error> {
    let table = Words::new(host, lg2_entries + ste::LG2_SIZE, max_paddr)?;
    let words = usize::try_from(lg2::size(lg2_entries + ste::LG2_WORDS)).unwrap_or(0);
    (0..words).step_by(1 << ste::LG2_WORDS).for_each(|word| table.set(word, BLOCKED[0]));
    Ok(table)
}
