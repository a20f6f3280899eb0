//! Memory that the driver and the hardware made here share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::PhysAddr;
use dmaspan_drivers::{Again, Host, NoMemory, Structure};
use dmaspan_sim::rng::Rng;
use parking_lot::Mutex;

type Words = Arc<[AtomicU64]>;

/// Structures by their address.
#[derive(Default)]
pub(crate) struct Memory {
    structures: Mutex<BTreeMap<u64, Words>>,
    next: AtomicU64,
    /// How many more there is memory for.
    pub(crate) left: AtomicU64,
    /// How often hardware was looked at again.
    pub(crate) polls: AtomicU64,
}

impl Memory {
    pub(crate) fn new() -> Arc<Self> {
        let memory = Self { next: AtomicU64::new(0x10_0000), ..Self::default() };
        memory.left.store(u64::MAX, Ordering::Relaxed);
        Arc::new(memory)
    }

    /// How many structures are handed out.
    pub(crate) fn count(&self) -> usize {
        self.structures.lock().len()
    }

    /// Stores anything to a word of each structure.
    pub(crate) fn scribble(&self, rng: &mut Rng) {
        for words in self.structures.lock().values() {
            let index = usize::try_from(rng.below(words.len() as u64)).unwrap();
            words[index].store(rng.next(), Ordering::Relaxed);
        }
    }

    /// The word at an address, if it is one of a structure.
    pub(crate) fn word<T>(&self, paddr: u64, with: impl FnOnce(&AtomicU64) -> T) -> Option<T> {
        let structures = self.structures.lock();
        let (start, words) = structures.range(..=paddr).next_back()?;
        let index = usize::try_from((paddr - start) / 8).ok()?;
        words.get(index).map(with)
    }

    pub(crate) fn read(&self, paddr: u64) -> Option<u64> {
        self.word(paddr, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    pub(crate) fn write(&self, paddr: u64, value: u64) {
        self.word(paddr, |word| word.store(value.to_le(), Ordering::Release));
    }
}

/// A host whose memory it is. Hardware is given up after a hundred looks.
#[derive(Clone)]
pub(crate) struct TestHost(pub(crate) Arc<Memory>);

pub(crate) struct TestStructure {
    paddr: u64,
    words: Words,
    memory: Arc<Memory>,
}

impl Drop for TestStructure {
    fn drop(&mut self) {
        self.memory.structures.lock().remove(&self.paddr);
    }
}

#[expect(unsafe_code, reason = "no hardware but that of the test reads it")]
// SAFETY: the words are found at that address by the test's hardware, and are this structure's.
unsafe impl Structure for TestStructure {
    fn paddr(&self) -> PhysAddr {
        PhysAddr::new(self.paddr)
    }

    fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}

#[expect(unsafe_code, reason = "no hardware but that of the test reads it")]
// SAFETY: structures are aligned to their size and lie far below any limit.
unsafe impl Host for TestHost {
    type Lock = parking_lot::RawMutex;
    type Structure = TestStructure;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<TestStructure, NoMemory> {
        let Self(memory) = self;
        let take = |left: u64| left.checked_sub(1);
        if memory.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            return Err(NoMemory { lg2_size, max_paddr });
        }
        let size = 1u64 << lg2_size;
        let place = |next: u64| Some(next.next_multiple_of(size) + size);
        let next = memory.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, place);
        let paddr = next.unwrap().next_multiple_of(size);
        let words: Words = (0..size.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        memory.structures.lock().insert(paddr, Arc::clone(&words));
        Ok(TestStructure { paddr, words, memory: Arc::clone(memory) })
    }

    fn again(&self, polls: u32) -> Again {
        self.0.polls.fetch_add(1, Ordering::Relaxed);
        if polls < 100 { Again::Poll } else { Again::GiveUp }
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
