//! Memory that a driver and the hardware of a test share, and patience that ends.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use dmaspan::PhysAddr;
use dmaspan::iommu::AllMemory;
use dmaspan_drivers::{Again, Host, NoMemory, Structure};
use dmaspan_sim::rng::Rng;
use parking_lot::Mutex;

/// How often a driver looks before it gives up.
pub(crate) const PATIENCE: u32 = 100;

type Words = Arc<[AtomicU64]>;

/// A host. Clones are the same.
#[derive(Clone)]
pub(crate) struct FakeHost(Arc<Shared>);

struct Shared {
    /// By their address.
    structures: Mutex<BTreeMap<u64, Words>>,
    next: AtomicU64,
    /// Which allocations from now on fail, counted from 0.
    failing: Mutex<Range<u64>>,
    polls: AtomicU32,
    /// What is done while the driver waits the next time.
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl FakeHost {
    /// A host whose structures are at `start` and behind.
    pub(crate) fn new(start: u64) -> Self {
        Self(Arc::new(Shared {
            structures: Mutex::default(),
            next: AtomicU64::new(start),
            failing: Mutex::new(0..0),
            polls: AtomicU32::new(0),
            meanwhile: Mutex::default(),
        }))
    }

    /// How many structures were not given back.
    pub(crate) fn count(&self) -> usize {
        self.0.structures.lock().len()
    }

    /// The n-th allocation from now on fails, and no other one; none for 0.
    pub(crate) fn fail(&self, nth: u64) {
        *self.0.failing.lock() = nth.saturating_sub(1)..nth;
    }

    /// All allocations fail but the next `left`.
    pub(crate) fn fail_after(&self, left: u64) {
        *self.0.failing.lock() = left..u64::MAX;
    }

    /// How often a driver looked again since this was asked last.
    pub(crate) fn polls(&self) -> u32 {
        self.0.polls.swap(0, Ordering::Relaxed)
    }

    /// Does something while the driver waits the next time.
    pub(crate) fn meanwhile(&self, does: impl FnOnce() + Send + 'static) {
        *self.0.meanwhile.lock() = Some(Box::new(does));
    }

    /// Stores anything to a word of each structure.
    pub(crate) fn scribble(&self, rng: &mut Rng) {
        for words in self.0.structures.lock().values() {
            let index = usize::try_from(rng.below(words.len() as u64)).unwrap();
            words[index].store(rng.next(), Ordering::Relaxed);
        }
    }

    /// What hardware reads there; `None` where no structure is.
    pub(crate) fn read(&self, paddr: u64) -> Option<u64> {
        self.word(paddr, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    /// Writes as hardware does; `None` where no structure is.
    pub(crate) fn write(&self, paddr: u64, value: u64) -> Option<()> {
        self.word(paddr, |word| word.store(value.to_le(), Ordering::Release))
    }

    /// The word at an address, if it is one of a structure.
    pub(crate) fn word<T>(&self, paddr: u64, with: impl FnOnce(&AtomicU64) -> T) -> Option<T> {
        let structures = self.0.structures.lock();
        let (start, words) = structures.range(..=paddr).next_back()?;
        words.get(usize::try_from((paddr - start) / 8).ok()?).map(with)
    }

    /// Whether the next allocation fails.
    fn fails(&self) -> bool {
        let mut failing = self.0.failing.lock();
        let fails = failing.contains(&0);
        let end = if failing.end == u64::MAX { u64::MAX } else { failing.end.saturating_sub(1) };
        *failing = failing.start.saturating_sub(1)..end;
        fails
    }
}

pub(crate) struct FakeStructure {
    paddr: PhysAddr,
    words: Words,
    host: FakeHost,
}

impl Drop for FakeStructure {
    fn drop(&mut self) {
        self.host.0.structures.lock().remove(&self.paddr.get());
    }
}

#[expect(unsafe_code, reason = "the fake hardware sees nothing but these words")]
// SAFETY: the words are shared with the host's map alone, by which the fake hardware finds them.
unsafe impl Structure for FakeStructure {
    fn paddr(&self) -> PhysAddr {
        self.paddr
    }

    fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}

#[expect(unsafe_code, reason = "the fake hardware sees nothing but these words")]
// SAFETY: sizes and alignments are those asked for; addresses beyond `max_paddr` are refused.
unsafe impl Host for FakeHost {
    type Lock = parking_lot::RawMutex;
    type Structure = FakeStructure;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<FakeStructure, NoMemory> {
        let fails = self.fails();
        let size = 1u64 << lg2_size;
        let after = |next: u64| Some(next.next_multiple_of(size) + size);
        let before = self.0.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
        let paddr = before.unwrap().next_multiple_of(size);
        if fails || paddr + (size - 1) > max_paddr.get() {
            return Err(NoMemory { lg2_size, max_paddr });
        }
        let words: Words = (0..size.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        self.0.structures.lock().insert(paddr, Arc::clone(&words));
        Ok(FakeStructure { paddr: PhysAddr::new(paddr), words, host: self.clone() })
    }

    fn again(&self, polls: u32) -> Again {
        self.0.polls.fetch_add(1, Ordering::Relaxed);
        let meanwhile = self.0.meanwhile.lock().take();
        if let Some(does) = meanwhile {
            does();
        }
        std::thread::yield_now();
        if polls < PATIENCE { Again::Poll } else { Again::GiveUp }
    }
}

/// The promise that fake devices keep.
pub(crate) fn all_memory() -> AllMemory {
    #[expect(unsafe_code, reason = "there is no device")]
    // SAFETY: no device accesses memory.
    unsafe {
        AllMemory::promise()
    }
}
