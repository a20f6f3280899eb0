//! A pool in simulated memory, and originals beside it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dmaspan::swiotlb::{Original, Pool, PoolConfig, SlotOf};
use dmaspan::{PhysAddr, Platform, Span};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::pool_memory::SimPoolMemory;

/// Where memory begins.
pub(crate) const RAM: u64 = 0x10_0000;
/// Where originals are.
pub(crate) const ORIGINALS: u64 = 0x200_0000;
/// How many bytes of them there are.
pub(crate) const ORIGINAL_BYTES: u64 = 0x80_0000;
pub(crate) const SLOT: u64 = 2048;

/// A platform whose CPU the test sets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cpu(Arc<AtomicUsize>);

impl Cpu {
    pub(crate) fn set(&self, cpu: usize) {
        self.0.store(cpu, Ordering::Relaxed);
    }
}

impl Platform for Cpu {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn now(&self) -> u64 {
        0
    }
}

pub(crate) type SimPool = Pool<SimPoolMemory, Cpu>;
pub(crate) type Slot = SlotOf<Cpu>;

pub(crate) struct Rig {
    pub(crate) memory: Arc<SimMemory>,
    pub(crate) pool_memory: SimPoolMemory,
    pub(crate) pool: Arc<SimPool>,
    pub(crate) faults: Faults,
    pub(crate) cpu: Cpu,
}

pub(crate) fn span(addr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(addr), len).unwrap()
}

/// Memory that a slot may stand in for.
pub(crate) fn original(addr: u64, len: u64) -> Original {
    // SAFETY: the simulated memory is there as long as the test, and nothing refers to it.
    unsafe { Original::new(span(addr, len)) }
}

impl Rig {
    /// A pool of so many slots of 2 KiB and areas.
    pub(crate) fn new(slots: u64, areas: usize) -> Self {
        Self::with(slots, PoolConfig::new(areas))
    }

    pub(crate) fn with(slots: u64, config: PoolConfig) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), 64 << 20, 11).unwrap());
        memory.allocate_at(span(ORIGINALS, ORIGINAL_BYTES)).unwrap();
        let (faults, cpu) = (Faults::none(), Cpu::default());
        let spans = vec![span(RAM, slots * config.slot_bytes)];
        let pool_memory = SimPoolMemory::with_faults(Arc::clone(&memory), spans, &faults).unwrap();
        let pool = Pool::new(pool_memory.clone(), config, cpu.clone()).unwrap();
        Self { memory, pool_memory, pool: Arc::new(pool), faults, cpu }
    }

    pub(crate) fn read(&self, at: Span) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(at.len()).unwrap()];
        self.memory.cpu_read(at.paddr(), &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.cpu_write(PhysAddr::new(at), bytes).unwrap();
    }
}
