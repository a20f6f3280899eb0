//! The device directory ("Device-Directory-Table"): one to three levels of tables, by which
//! hardware finds the context of a device.

use alloc::collections::BTreeMap;

use dmaspan::PhysAddr;
use lock_api::{Mutex, RawMutex};

use super::spec::{DC_WORDS, directory_entry};
use crate::host::{Host, NoMemory, Structure};
use crate::structure::Words;

/// log2 of the bytes of a table.
const TABLE_LG2: u32 = 12;

/// How device IDs are divided among the levels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// 1 to 3.
    pub(super) levels: u32,
    /// log2 of the words of a context: 2 in the base format, 3 in the extended one.
    pub(super) context_lg2: u32,
}

impl Shape {
    /// Bits that the last level translates.
    const fn leaf_bits(self) -> u32 {
        TABLE_LG2 - 3 - self.context_lg2
    }

    /// The bits of device IDs that such a directory tells apart: 7, 16 and 24 in the base format,
    /// 6, 15 and 24 in the extended one.
    pub(super) fn device_bits(self) -> u32 {
        (self.leaf_bits() + 9 * self.levels.saturating_sub(1)).min(24)
    }

    /// The lowest bit that a level translates; 0 is the last one.
    fn shift(self, level: u32) -> u32 {
        if level == 0 { 0 } else { self.leaf_bits() + 9 * (level - 1) }
    }

    /// What all devices of one table of a level have in common.
    fn table_of(self, level: u32, device: u32) -> (u32, u32) {
        let above = self.shift(level + 1);
        (level, device >> above)
    }

    /// The entry of a table of a level, above the last one.
    fn entry(self, level: u32, device: u32) -> usize {
        (device >> self.shift(level) & 0x1ff) as usize
    }

    /// The first word of a device's context in its table.
    fn context(self, device: u32) -> usize {
        let context = device & ((1 << self.leaf_bits()) - 1);
        (context << self.context_lg2) as usize
    }
}

/// The tables. Those below the root are made for the streams that need them, and stay.
pub(super) struct Directory<S, L> {
    shape: Shape,
    root: PhysAddr,
    /// By level and by what their devices have in common. Taken for a few words at a time.
    tables: Mutex<L, BTreeMap<(u32, u32), Words<S>>>,
}

impl<S: Structure, L: RawMutex> Directory<S, L> {
    /// A directory in which all devices are blocked.
    pub(super) fn new<H: Host<Structure = S>>(
        host: &H,
        shape: Shape,
        max_paddr: PhysAddr,
    ) -> Result<Self, NoMemory> {
        let root = Words::new(host, TABLE_LG2, max_paddr)?;
        let paddr = root.paddr();
        let tables = BTreeMap::from([(shape.table_of(shape.levels - 1, 0), root)]);
        Ok(Self { shape, root: paddr, tables: Mutex::new(tables) })
    }

    pub(super) fn root(&self) -> PhysAddr {
        self.root
    }

    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    /// Makes the tables that lead to a device's context.
    pub(super) fn reach<H: Host<Structure = S>>(
        &self,
        host: &H,
        device: u32,
        max_paddr: PhysAddr,
    ) -> Result<(), NoMemory> {
        for level in (0..self.shape.levels - 1).rev() {
            let key = self.shape.table_of(level, device);
            if self.tables.lock().contains_key(&key) {
                continue;
            }
            // Not under the lock, which may keep interrupts off.
            let fresh = Words::new(host, TABLE_LG2, max_paddr)?;
            let entry = directory_entry(fresh.paddr().get());
            let mut tables = self.tables.lock();
            if tables.contains_key(&key) {
                drop(tables);
                fresh.free();
                continue;
            }
            tables.insert(key, fresh);
            let above = self.shape.table_of(level + 1, device);
            if let Some(table) = tables.get(&above) {
                // Hardware caches no entry that is not valid ("Caching invalid entries"), so it
                // needs not be told.
                table.set(self.shape.entry(level + 1, device), entry);
            }
        }
        Ok(())
    }

    /// A word of a device's context; 0 where no table leads to it.
    pub(super) fn get(&self, device: u32, word: usize) -> u64 {
        let tables = self.tables.lock();
        let table = tables.get(&self.shape.table_of(0, device));
        table.map_or(0, |table| table.get(self.shape.context(device) + word))
    }

    /// Stores a word of a device's context, in one piece.
    pub(super) fn set(&self, device: u32, word: usize, value: u64) {
        let tables = self.tables.lock();
        if let Some(table) = tables.get(&self.shape.table_of(0, device)) {
            table.set(self.shape.context(device) + word, value);
        }
    }

    /// The words of a device's context that this driver uses.
    pub(super) fn context(&self, device: u32) -> [u64; DC_WORDS] {
        core::array::from_fn(|word| self.get(device, word))
    }

    /// Gives all tables back. Hardware reads none of them.
    pub(super) fn free(&mut self) {
        core::mem::take(self.tables.get_mut()).into_values().for_each(Words::free);
    }
}
