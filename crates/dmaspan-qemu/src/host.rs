//! A driver stands on this [`Host`] in a [`Machine`].

use std::sync::atomic::AtomicU64;

use dmaspan::PhysAddr;
use dmaspan_drivers::{Again, Host, NoMemory, Structure};

use crate::machine::Machine;
use crate::ram::Buffer;

/// A driver's host: structures are RAM of the machine, and virtual time passes with each poll.
#[derive(Clone, Debug)]
pub struct QemuHost(Machine);

impl QemuHost {
    /// In that machine.
    pub fn new(machine: &Machine) -> Self {
        Self(machine.clone())
    }
}

/// RAM that an IOMMU reads and writes.
#[derive(Debug)]
pub struct RamStructure(Buffer);

#[expect(unsafe_code, reason = "the RAM is what the machine's hardware sees")]
// SAFETY: 1. A buffer's words are the machine's memory at its address, and the buffer's alone. 2.
// QEMU and the test share the memory, whose stores it sees as another thread does.
unsafe impl Structure for RamStructure {
    fn paddr(&self) -> PhysAddr {
        self.0.paddr()
    }

    fn words(&self) -> &[AtomicU64] {
        self.0.words()
    }
}

#[expect(unsafe_code, reason = "the RAM is what the machine's hardware sees")]
// SAFETY: a buffer is aligned to its size, which is the one asked for or 64 bytes; one beyond
// `max_paddr` is refused.
unsafe impl Host for QemuHost {
    type Lock = parking_lot::RawMutex;
    type Structure = RamStructure;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<RamStructure, NoMemory> {
        let refused = NoMemory { lg2_size, max_paddr };
        let bytes = 1u64.checked_shl(lg2_size).ok_or(refused)?;
        let buffer = self.0.ram().allocate(bytes).map_err(|_| refused)?;
        let fits = buffer.paddr().checked_add(bytes - 1).is_some_and(|last| last <= max_paddr);
        if fits { Ok(RamStructure(buffer)) } else { Err(refused) }
    }

    fn again(&self, polls: u32) -> Again {
        if polls >= 1000 || self.0.is_gone() {
            return Again::GiveUp;
        }
        self.0.clock_step(10_000);
        Again::Poll
    }
}
