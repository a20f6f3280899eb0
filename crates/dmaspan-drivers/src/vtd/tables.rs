//! Root and context tables, and those of PASIDs (9.1 to 9.6).
//!
//! The words of an entry are 64 bits each, and stored one by one. In scalable mode one word of the
//! context entry leads to a PASID directory, and each stream has two of them: what it is to have is
//! written to the one that hardware does not know, and the word is stored. So it changes at one
//! moment. A context entry of legacy mode has the tables in one word and the domain's number in the
//! other: a mix of both would fill the caches of one domain from the tables of another, so the
//! entry is made absent, and forgotten, in between.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;

use dmaspan::PhysAddr;
use lock_api::{Mutex, RawMutex};

use super::Mode;
use super::format::Entry;
use super::spec::PRESENT;
use crate::host::{Host, NoMemory, Structure};
use crate::structure::Words;

/// log2 of the bytes of a table.
const PAGE_LG2: u32 = 12;
/// The 64-bit words of a table.
const PAGE_WORDS: usize = 512;

/// What a stream has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Has {
    /// The domain; `None` where the stream is blocked.
    pub(super) domain: Option<u16>,
    /// Which of the two PASID directories hardware knows, or knew last.
    directory: usize,
    /// Whether hardware confirmed that it uses nothing else.
    pub(super) confirmed: bool,
}

/// A stream's entries.
pub(super) struct Device<S, L> {
    pub(super) stream: u16,
    context: Arc<Words<S>>,
    /// The first word of the context entry.
    index: usize,
    /// Scalable mode: twice a PASID directory, and a table of 64 PASIDs of which the first is for
    /// accesses without one.
    pasids: Option<Words<S>>,
    /// What it has. The lock is held while hardware is told, by who switches this one stream.
    pub(super) has: Mutex<L, Has>,
}

impl<S: Structure, L: RawMutex> Device<S, L> {
    /// Makes the context entry absent.
    pub(super) fn clear(&self, has: &mut Has) {
        self.context.set(self.index, 0);
        has.domain = None;
    }

    /// Stores what the stream is to have. In legacy mode the entry is absent, and hardware has
    /// forgotten it.
    pub(super) fn store(&self, has: &mut Has, entry: Entry, domain: u16) {
        match &self.pasids {
            None => {
                let [low, high, _] = entry;
                self.context.set(self.index + 1, high);
                self.context.set(self.index, low);
            }
            Some(pasids) => {
                has.directory ^= 1;
                let page = has.directory * 2 * PAGE_WORDS;
                for (word, value) in (page + PAGE_WORDS..).zip(entry) {
                    pasids.set(word, value);
                }
                // PDTS 0: 128 entries of the directory. RID_PASID, in the next word, is 0.
                let directory = pasids.paddr().get() + page as u64 * 8;
                self.context.set(self.index, directory | PRESENT);
            }
        }
        has.domain = Some(domain);
    }

    fn free(self) {
        if let Some(pasids) = self.pasids {
            pasids.free();
        }
    }
}

pub(super) struct Tables<S, L> {
    mode: Mode,
    max_paddr: PhysAddr,
    root: Words<S>,
    known: Mutex<L, Known<S, L>>,
}

struct Known<S, L> {
    /// Context tables, by bus: in scalable mode two, one behind the other.
    buses: BTreeMap<u8, Arc<Words<S>>>,
    devices: BTreeMap<u16, Arc<Device<S, L>>>,
}

impl<S: Structure, L: RawMutex> Tables<S, L> {
    /// Tables by which every stream is blocked.
    pub(super) fn new<H: Host<Structure = S>>(
        host: &H,
        mode: Mode,
        max_paddr: PhysAddr,
    ) -> Result<Self, NoMemory> {
        let root = Words::new(host, PAGE_LG2, max_paddr)?;
        let known = Mutex::new(Known { buses: BTreeMap::new(), devices: BTreeMap::new() });
        Ok(Self { mode, max_paddr, root, known })
    }

    /// The root table.
    pub(super) fn root(&self) -> PhysAddr {
        self.root.paddr()
    }

    /// The entries of a stream, which is blocked if it is new.
    pub(super) fn device<H: Host<Structure = S>>(
        &self,
        host: &H,
        stream: u16,
    ) -> Result<Arc<Device<S, L>>, NoMemory> {
        let mut known = self.known.lock();
        if let Some(device) = known.devices.get(&stream) {
            return Ok(Arc::clone(device));
        }
        let [bus, function] = stream.to_be_bytes();
        let context = match known.buses.get(&bus) {
            Some(context) => Arc::clone(context),
            None => {
                let context = Arc::new(self.context(host, bus)?);
                known.buses.insert(bus, Arc::clone(&context));
                context
            }
        };
        let (index, pasids) = match self.mode {
            Mode::Legacy => (usize::from(function) * 2, None),
            Mode::Scalable => (usize::from(function) * 4, Some(self.pasids(host)?)),
        };
        let has = Has { domain: None, directory: 0, confirmed: true };
        let device = Arc::new(Device { stream, context, index, pasids, has: Mutex::new(has) });
        known.devices.insert(stream, Arc::clone(&device));
        Ok(device)
    }

    /// The context tables of a bus, and the root entry that leads there.
    fn context<H: Host<Structure = S>>(&self, host: &H, bus: u8) -> Result<Words<S>, NoMemory> {
        let entry = usize::from(bus) * 2;
        let tables = match self.mode {
            Mode::Legacy => Words::new(host, PAGE_LG2, self.max_paddr)?,
            Mode::Scalable => {
                // Functions 0 to 0x7f of 32 bytes each, then the others (9.2).
                let tables = Words::new(host, PAGE_LG2 + 1, self.max_paddr)?;
                self.root.set(entry + 1, (tables.paddr().get() + (1 << PAGE_LG2)) | PRESENT);
                tables
            }
        };
        self.root.set(entry, tables.paddr().get() | PRESENT);
        Ok(tables)
    }

    /// Two PASID directories, each with a table behind it that its first entry leads to.
    fn pasids<H: Host<Structure = S>>(&self, host: &H) -> Result<Words<S>, NoMemory> {
        let pasids: Words<S> = Words::new(host, PAGE_LG2 + 2, self.max_paddr)?;
        for directory in [0, 2 * PAGE_WORDS] {
            let table = pasids.paddr().get() + (directory + PAGE_WORDS) as u64 * 8;
            pasids.set(directory, table | PRESENT);
        }
        Ok(pasids)
    }

    /// The streams that were ever claimed, one after the other.
    pub(super) fn next_device(&self, from: u16) -> Option<Arc<Device<S, L>>> {
        let known = self.known.lock();
        known.devices.range(from..).next().map(|(_, device)| Arc::clone(device))
    }

    /// Makes all root entries absent.
    pub(super) fn clear(&self) {
        for word in 0..PAGE_WORDS {
            self.root.set(word, 0);
        }
    }

    /// Takes back all memory but the root table's, which hardware goes on reading. It has forgotten
    /// what the root entries led to.
    pub(super) fn free(&self) {
        let empty = Known { buses: BTreeMap::new(), devices: BTreeMap::new() };
        let known = core::mem::replace(&mut *self.known.lock(), empty);
        for (_, device) in known.devices {
            if let Some(device) = Arc::into_inner(device) {
                device.free();
            }
        }
        for (_, context) in known.buses {
            if let Some(context) = Arc::into_inner(context) {
                context.free();
            }
        }
    }
}
