//! Memory that the fake hardware sees, and patience that ends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use dmaspan::PhysAddr;
use dmaspan_drivers::{Again, Host, NoMemory, Structure};
use parking_lot::Mutex;

/// How often a driver looks before it gives up.
pub(crate) const PATIENCE: u32 = 50;

/// A host. Clones are the same.
#[derive(Clone)]
pub(crate) struct FakeHost(Arc<Shared>);

struct Shared {
    live: Mutex<BTreeMap<u64, Arc<[AtomicU64]>>>,
    next: AtomicU64,
    /// Allocations until one fails; 0 for never.
    failing: AtomicU32,
    polls: AtomicU32,
}

pub(crate) struct FakeStructure {
    paddr: PhysAddr,
    words: Arc<[AtomicU64]>,
    host: FakeHost,
}

impl FakeHost {
    pub(crate) fn new() -> Self {
        let (live, next) = (Mutex::default(), AtomicU64::new(0x1_2345_0000));
        let (failing, polls) = (AtomicU32::new(0), AtomicU32::new(0));
        Self(Arc::new(Shared { live, next, failing, polls }))
    }

    /// Structures that were not given back.
    pub(crate) fn live(&self) -> usize {
        self.0.live.lock().len()
    }

    /// Makes the `n`-th allocation from now on fail.
    pub(crate) fn fail(&self, n: u32) {
        self.0.failing.store(n, Ordering::Relaxed);
    }

    /// How often a driver looked again.
    pub(crate) fn polls(&self) -> u32 {
        self.0.polls.swap(0, Ordering::Relaxed)
    }

    fn word<T>(&self, paddr: u64, with: impl FnOnce(&AtomicU64) -> T) -> Option<T> {
        let live = self.0.live.lock();
        let (start, words) = live.range(..=paddr).next_back()?;
        words.get(usize::try_from((paddr - start) / 8).ok()?).map(with)
    }

    /// What hardware reads there; `None` where no structure is.
    pub(crate) fn read(&self, paddr: u64) -> Option<u64> {
        self.word(paddr, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    /// Writes as hardware does.
    pub(crate) fn write(&self, paddr: u64, value: u64) -> Option<()> {
        self.word(paddr, |word| word.store(value.to_le(), Ordering::Release))
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
        let left = self.0.failing.load(Ordering::Relaxed);
        self.0.failing.store(left.saturating_sub(1), Ordering::Relaxed);
        let size = 1u64 << lg2_size;
        let after = |next: u64| Some(next.next_multiple_of(size) + size);
        let before = self.0.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
        let paddr = PhysAddr::new(before.unwrap().next_multiple_of(size));
        if left == 1 || paddr.get() + (size - 1) > max_paddr.get() {
            return Err(NoMemory { lg2_size, max_paddr });
        }
        let words: Arc<[AtomicU64]> = (0..size / 8).map(|_| AtomicU64::new(0)).collect();
        self.0.live.lock().insert(paddr.get(), Arc::clone(&words));
        Ok(FakeStructure { paddr, words, host: self.clone() })
    }

    fn again(&self, polls: u32) -> Again {
        self.0.polls.fetch_add(1, Ordering::Relaxed);
        std::thread::yield_now();
        if polls < PATIENCE { Again::Poll } else { Again::GiveUp }
    }
}

impl Drop for FakeStructure {
    fn drop(&mut self) {
        self.host.0.live.lock().remove(&self.paddr.get());
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
