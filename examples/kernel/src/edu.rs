//! QEMU's educational device, which copies between its own memory and whatever address it is told.

use core::hint;

use dmaspan_drivers::{Mmio, MmioRegion};

use crate::{Result, cpu};

/// Vendor and device.
pub(crate) const ID: (u16, u16) = (0x1234, 0x11e8);
/// The bits of its addresses (`dma_mask`).
pub(crate) const BITS: u32 = 32;

/// Where its own memory is, for itself, and how much that is.
const OWN: u64 = 0x4_0000;
/// Registers: docs/specs/edu.rst.
const SOURCE: u64 = 0x80;
const TARGET: u64 = 0x88;
const COUNT: u64 = 0x90;
const COMMAND: u64 = 0x98;
const START: u32 = 1;
const TO_MEMORY: u32 = 2;

/// Nanoseconds that a copy may take; it takes a tenth of a second.
const LIMIT: u64 = 20_000_000_000;

pub(crate) struct Edu(pub(crate) MmioRegion);

impl Edu {
    /// Has it read memory.
    pub(crate) fn read(&self, addr: u64, len: u64) -> Result<()> {
        self.start(addr, OWN, len, START);
        self.wait()
    }

    /// Has it write what it read.
    pub(crate) fn write(&self, addr: u64, len: u64) -> Result<()> {
        self.start_write(addr, len);
        self.wait()
    }

    /// The same, without waiting for the end.
    pub(crate) fn start_write(&self, addr: u64, len: u64) {
        self.start(OWN, addr, len, START | TO_MEMORY);
    }

    fn start(&self, source: u64, target: u64, len: u64, command: u32) {
        self.0.write64(SOURCE, source);
        self.0.write64(TARGET, target);
        self.0.write64(COUNT, len);
        self.0.write32(COMMAND, command);
    }

    /// Waits until it has ended.
    pub(crate) fn wait(&self) -> Result<()> {
        let began = cpu::nanoseconds();
        while self.0.read32(COMMAND) & START != 0 {
            if cpu::nanoseconds() - began > LIMIT {
                return Err("edu does not end what it was told".into());
            }
            hint::spin_loop();
        }
        Ok(())
    }
}
