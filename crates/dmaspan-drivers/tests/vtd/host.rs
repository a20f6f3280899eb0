//! Memory that the driver and the hardware in memory share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::PhysAddr;
use dmaspan_drivers::{Again, Host, NoMemory, Structure};
use parking_lot::Mutex;

/// Structures by their address. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Memory(Arc<Shared>);

#[derive(Default)]
struct Shared {
    structures: Mutex<BTreeMap<u64, Arc<[AtomicU64]>>>,
    next: AtomicU64,
    /// How many allocations succeed before one fails; 0 for all.
    fails: AtomicU64,
    /// What is done while the driver waits the next time.
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Memory {
    /// The n-th allocation from now on fails, and no other one.
    pub(crate) fn fail(&self, nth: u64) {
        self.0.fails.store(nth, Ordering::Relaxed);
    }

    /// Does something while the driver waits the next time.
    pub(crate) fn meanwhile(&self, does: impl FnOnce() + Send + 'static) {
        *self.0.meanwhile.lock() = Some(Box::new(does));
    }

    /// How many structures there are.
    pub(crate) fn structures(&self) -> usize {
        self.0.structures.lock().len()
    }

    /// The word at an address; `None` where there is no structure.
    pub(crate) fn load(&self, paddr: u64) -> Option<u64> {
        self.word(paddr, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    /// Stores to a word; nothing where there is no structure.
    pub(crate) fn store(&self, paddr: u64, value: u64) {
        self.word(paddr, |word| word.store(value.to_le(), Ordering::Release));
    }

    fn word<T>(&self, paddr: u64, with: impl FnOnce(&AtomicU64) -> T) -> Option<T> {
        let structures = self.0.structures.lock();
        let (start, words) = structures.range(..=paddr).next_back()?;
        words.get(usize::try_from((paddr - start) / 8).ok()?).map(with)
    }
}

pub(crate) struct Piece {
    paddr: u64,
    words: Arc<[AtomicU64]>,
    memory: Memory,
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.memory.0.structures.lock().remove(&self.paddr);
    }
}

#[expect(unsafe_code, reason = "the hardware is in memory, too")]
// SAFETY: the words are what the hardware finds at the address.
unsafe impl Structure for Piece {
    fn paddr(&self) -> PhysAddr {
        PhysAddr::new(self.paddr)
    }

    fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}

#[expect(unsafe_code, reason = "the hardware is in memory, too")]
// SAFETY: addresses are multiples of the size, below 4 GiB.
unsafe impl Host for Memory {
    type Lock = parking_lot::RawMutex;
    type Structure = Piece;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<Piece, NoMemory> {
        let left = self.0.fails.load(Ordering::Relaxed);
        self.0.fails.store(left.saturating_sub(1), Ordering::Relaxed);
        let size = 1u64 << lg2_size;
        let paddr = (self.0.next.fetch_add(2 * size, Ordering::Relaxed) + 0x10_0000) / size * size;
        let paddr = if paddr < 0x10_0000 { paddr + size } else { paddr };
        if left == 1 || paddr + size > max_paddr.get() {
            return Err(NoMemory { lg2_size, max_paddr });
        }
        let words: Arc<[AtomicU64]> = (0..size / 8).map(|_| AtomicU64::new(0)).collect();
        self.0.structures.lock().insert(paddr, Arc::clone(&words));
        Ok(Piece { paddr, words, memory: self.clone() })
    }

    fn again(&self, polls: u32) -> Again {
        let meanwhile = self.0.meanwhile.lock().take();
        if let Some(does) = meanwhile {
            does();
        }
        if polls < 200 { Again::Poll } else { Again::GiveUp }
    }
}

/// The promise that fake devices keep.
pub(crate) fn all_memory() -> dmaspan::iommu::AllMemory {
    #[expect(unsafe_code, reason = "there is no device")]
    // SAFETY: no device accesses memory.
    unsafe {
        dmaspan::iommu::AllMemory::promise()
    }
}
