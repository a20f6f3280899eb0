//! [`Manual`]: what a format's manual calls its tables, its entries and their fields.

/// The words of a format's manual, by which a [dump](super::PageTable::dump) draws a tree as the
/// manual does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manual {
    /// What the tables are.
    pub title: &'static str,
    /// By level: the first is that of the smallest leaves, whatever the manual counts.
    pub levels: &'static [ManualLevel],
}

/// The words for the tables of one level, and for their entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManualLevel {
    /// A table.
    pub table: &'static str,
    /// An entry that leads to a table.
    pub link: ManualEntry,
    /// A leaf of one entry.
    pub leaf: ManualEntry,
    /// An entry of a leaf of several.
    pub group: ManualEntry,
}

/// The word for an entry, and its fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManualEntry {
    /// The entry.
    pub name: &'static str,
    /// Its fields, without the address, from the lowest bit on.
    pub fields: &'static [EntryField],
}

/// A field of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryField {
    /// What the manual calls it.
    pub name: &'static str,
    /// Its lowest bit.
    pub low: u32,
    /// Its number of bits.
    pub width: u32,
}

impl Manual {
    /// Words that fit every format: those of the glossary.
    pub const PLAIN: Self = {
        const fn level(table: &'static str) -> ManualLevel {
            let [link, leaf, group] = [
                ManualEntry::new("link", &[]),
                ManualEntry::new("leaf", &[]),
                ManualEntry::new("leaf of a group", &[]),
            ];
            ManualLevel { table, link, leaf, group }
        }
        const LEVELS: &[ManualLevel] = &[
            level("level 0 table"),
            level("level 1 table"),
            level("level 2 table"),
            level("level 3 table"),
            level("level 4 table"),
            level("level 5 table"),
        ];
        Self { title: "page table", levels: LEVELS }
    };

    /// The words for a level: plain ones, where the manual has no such level.
    pub(super) fn level(&self, level: u32) -> &ManualLevel {
        let at = level as usize;
        let plain = Self::PLAIN.levels;
        self.levels.get(at).unwrap_or(&plain[at.min(plain.len() - 1)])
    }
}

impl ManualEntry {
    /// An entry with these fields.
    pub const fn new(name: &'static str, fields: &'static [EntryField]) -> Self {
        Self { name, fields }
    }
}

impl EntryField {
    /// A field of one bit.
    pub const fn bit(name: &'static str, bit: u32) -> Self {
        Self { name, low: bit, width: 1 }
    }

    /// A field of the bits `high` to `low`, both included.
    pub const fn bits(name: &'static str, high: u32, low: u32) -> Self {
        Self { name, low, width: high - low + 1 }
    }

    /// The field's value in an entry.
    pub const fn value_in(&self, word: u64) -> u64 {
        (word >> self.low) & crate::lg2::mask(self.width)
    }
}
