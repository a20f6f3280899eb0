//! The driver's platform in these tests: registers of the model, and a host that gives up soon.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::Arena;
use dmaspan_drivers::{Again, Host, Mmio, NoMemory, Structure};
use dmaspan_sim::bus::{Bus, BusError};
use dmaspan_sim::smmu_v2::Smmu;
use parking_lot::Mutex;

/// The model, whose tables are in an arena.
pub(crate) type Hardware = Smmu<Arena>;

/// What a driver with a bug leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeftOut {
    Nothing,
    /// All invalidations by address, of an ASID and of a VMID.
    Invalidations,
    /// The syncs, which are reported as done.
    Syncs,
    /// The lower bit of the ASID and the VMID.
    LastBitOfIds,
}

/// Looks at the model after a write of the register at an offset.
pub(crate) type Watch = Box<dyn FnMut(&Hardware, u64) + Send>;

/// The registers of a model. Clones are the same ones.
#[derive(Clone)]
pub(crate) struct Registers {
    pub(crate) hardware: Arc<Hardware>,
    pub(crate) left_out: LeftOut,
    /// Writes so far.
    pub(crate) writes: Arc<AtomicU64>,
    /// How often stores to memory were ordered before later ones.
    pub(crate) ordered: Arc<AtomicU64>,
    /// Whether writes get lost.
    pub(crate) deaf: Arc<AtomicBool>,
    pub(crate) watch: Arc<Mutex<Option<Watch>>>,
    page_lg2: u32,
    banks_from: u64,
}

impl Registers {
    pub(crate) fn new(hardware: Arc<Hardware>, left_out: LeftOut) -> Self {
        let id1 = hardware.read32(0x24);
        let page_lg2 = if id1 >> 31 == 0 { 12 } else { 16 };
        let banks_from = 2 << (id1 >> 28 & 7);
        let (writes, ordered, deaf, watch) = Default::default();
        Self { hardware, left_out, writes, ordered, deaf, watch, page_lg2, banks_from }
    }

    fn watch(&self, offset: u64) {
        // Not under the lock: it may have others write.
        let watch = self.watch.lock().take();
        if let Some(mut watch) = watch {
            watch(&self.hardware, offset);
            self.watch.lock().get_or_insert(watch);
        }
    }

    /// What a driver with the bug would write, if it would.
    fn mutated(&self, offset: u64, value: u64) -> Option<u64> {
        let (page, register) = (offset >> self.page_lg2, offset & ((1 << self.page_lg2) - 1));
        let is_bank = page >= self.banks_from;
        let by_address = is_bank && (0x600..0x640).contains(&register);
        match self.left_out {
            LeftOut::Invalidations if by_address || page == 0 && register == 0x64 => None,
            LeftOut::Syncs if is_bank && register == 0x7f0 => None,
            LeftOut::LastBitOfIds if is_bank && register == 0x610 => Some(value ^ 1),
            LeftOut::LastBitOfIds if page == 0 && register == 0x64 => Some(value ^ 1),
            LeftOut::LastBitOfIds if is_bank && matches!(register, 0x600 | 0x620) => {
                // In bit 48 of 64, or bit 0 of 32.
                Some(if value >> 32 == 0 && value & 0xfff != 0 {
                    value ^ 1
                } else {
                    value ^ 1 << 48
                })
            }
            _ => Some(value),
        }
    }
}

impl Mmio for Registers {
    fn read32(&self, offset: u64) -> u32 {
        self.hardware.read32(offset)
    }

    fn order_stores(&self) {
        self.ordered.fetch_add(1, Ordering::Relaxed);
    }

    fn write32(&self, offset: u64, value: u32) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        let value = self.mutated(offset, value.into()).and_then(|value| u32::try_from(value).ok());
        if let Some(value) = value.filter(|_| !self.deaf.load(Ordering::Relaxed)) {
            self.hardware.write32(offset, value);
        }
        self.watch(offset);
    }

    fn read64(&self, offset: u64) -> u64 {
        self.hardware.read64(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        let value = self.mutated(offset, value);
        if let Some(value) = value.filter(|_| !self.deaf.load(Ordering::Relaxed)) {
            self.hardware.write64(offset, value);
        }
        self.watch(offset);
    }
}

/// Gives up after a number of looks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TestHost;

/// How often the host lets a driver look at hardware.
pub(crate) const POLLS: u32 = 100;

/// There is none: an SMMUv2 reads nothing but tables.
pub(crate) enum NoStructure {}

// SAFETY: there is no such value.
#[expect(unsafe_code, reason = "a contract about memory that hardware reads")]
unsafe impl Structure for NoStructure {
    fn paddr(&self) -> PhysAddr {
        match *self {}
    }

    fn words(&self) -> &[AtomicU64] {
        match *self {}
    }
}

// SAFETY: nothing is ever allocated.
#[expect(unsafe_code, reason = "a contract about memory that hardware reads")]
unsafe impl Host for TestHost {
    type Lock = parking_lot::RawMutex;
    type Structure = NoStructure;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<NoStructure, NoMemory> {
        Err(NoMemory { lg2_size, max_paddr })
    }

    fn again(&self, polls: u32) -> Again {
        if polls < POLLS { Again::Poll } else { Again::GiveUp }
    }
}

/// Memory at all addresses, which is there once it is written; zeros before.
#[derive(Debug, Default)]
pub(crate) struct Ram(Mutex<BTreeMap<u64, u8>>);

impl Ram {
    pub(crate) fn bytes<const N: usize>(&self, paddr: PhysAddr) -> [u8; N] {
        let mut bytes = [0; N];
        self.read(paddr, &mut bytes).unwrap();
        bytes
    }
}

impl Bus for Ram {
    fn read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        let bytes = self.0.lock();
        for (at, byte) in (paddr.get()..).zip(buf) {
            *byte = bytes.get(&at).copied().unwrap_or(0);
        }
        Ok(())
    }

    fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        self.0.lock().extend((paddr.get()..).zip(buf.iter().copied()));
        Ok(())
    }
}
