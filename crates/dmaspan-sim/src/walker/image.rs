//! Tables written by hand, for tests and examples.

use std::collections::BTreeMap;

use dmaspan::{PhysAddr, lg2};
use parking_lot::Mutex;

use super::{NotATable, TableWords};

/// A few tables whose words are set one by one.
///
/// ```
/// use dmaspan::PhysAddr;
/// use dmaspan_sim::walker::{NotATable, TableImage, TableWords};
///
/// let image = TableImage::new();
/// image.add_table(PhysAddr::new(0x1000), 512);
/// image.set(PhysAddr::new(0x1008), 0xf00d)?;
/// assert_eq!(image.read_u64(PhysAddr::new(0x1008)), Ok(0xf00d));
///
/// image.free_table(PhysAddr::new(0x1000));
/// let freed = NotATable::Freed { paddr: PhysAddr::new(0x1008) };
/// assert_eq!(image.read_u64(PhysAddr::new(0x1008)), Err(freed));
/// Ok::<(), NotATable>(())
/// ```
#[derive(Debug, Default)]
pub struct TableImage {
    tables: Mutex<BTreeMap<u64, Table>>,
}

#[derive(Debug)]
struct Table {
    words: Vec<u64>,
    freed: bool,
}

impl TableImage {
    /// No tables.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a table of `words` zero words at `paddr`, instead of what was there.
    pub fn add_table(&self, paddr: PhysAddr, words: usize) {
        let table = Table { words: vec![0; words], freed: false };
        self.tables.lock().insert(paddr.get(), table);
    }

    /// Frees the table that begins at `paddr`: reading it is an error from now on.
    pub fn free_table(&self, paddr: PhysAddr) {
        if let Some(table) = self.tables.lock().get_mut(&paddr.get()) {
            table.freed = true;
        }
    }

    /// Writes a word.
    ///
    /// # Errors
    ///
    /// [`NotATable`] where no table was added.
    pub fn set(&self, paddr: PhysAddr, word: u64) -> Result<(), NotATable> {
        self.with(paddr, |place| *place = word)
    }

    /// Writes a word of 32 bits.
    ///
    /// # Errors
    ///
    /// [`NotATable`] where no table was added.
    pub fn set_u32(&self, paddr: PhysAddr, word: u32) -> Result<(), NotATable> {
        let around = PhysAddr::new(lg2::align_down(paddr.get(), 3));
        let shift = match paddr.get() - around.get() {
            0 => 0,
            4 => 32,
            _ => return Err(NotATable::Outside { paddr }),
        };
        self.with(around, |place| {
            *place = (*place & !(lg2::mask(32) << shift)) | u64::from(word) << shift;
        })
    }

    /// Calls `f` with the word at `paddr`.
    fn with<R>(&self, paddr: PhysAddr, f: impl FnOnce(&mut u64) -> R) -> Result<R, NotATable> {
        let mut tables = self.tables.lock();
        let outside = NotATable::Outside { paddr };
        let (start, table) = tables.range_mut(..=paddr.get()).next_back().ok_or(outside)?;
        let offset = paddr.get() - start;
        let index = usize::try_from(offset / 8).map_err(|_| outside)?;
        let place =
            table.words.get_mut(index).filter(|_| offset.is_multiple_of(8)).ok_or(outside)?;
        if table.freed { Err(NotATable::Freed { paddr }) } else { Ok(f(place)) }
    }
}

impl TableWords for TableImage {
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
        self.with(paddr, |place| *place)
    }

    fn exchange_u64(&self, paddr: PhysAddr, old: u64, new: u64) -> Result<u64, NotATable> {
        self.with(paddr, |place| {
            let found = *place;
            if found == old {
                *place = new;
            }
            found
        })
    }
}
