//! QEMU's `iommu-testdev`, which writes a pattern to an address that it is told. It has no mask: it
//! uses all 64 bits.

use dmaspan_drivers::{Mmio, MmioRegion};

use crate::Result;

/// Vendor and device.
pub(crate) const ID: (u16, u16) = (0x1b36, 5);
/// The bits of its addresses that its driver uses.
pub(crate) const BITS: u32 = 32;

/// Registers of 32 bits: docs/specs/iommu-testdev.rst.
const TRIGGER: u64 = 0x00;
const ADDRESS: u64 = 0x04;
const COUNT: u64 = 0x0c;
const RESULT: u64 = 0x10;
const ARM: u64 = 0x14;
const ATTRIBUTES: u64 = 0x18;
const PHYSICAL: u64 = 0x1c;
/// Accesses as of Arm's non-secure world; elsewhere they are as all others.
const NON_SECURE: u32 = 0b1010;

pub(crate) struct TestDevice(pub(crate) MmioRegion);

impl TestDevice {
    /// Has it write, and look whether that is at the physical address. Whether it says so.
    pub(crate) fn write(&self, addr: u64, paddr: u64, len: u32) -> bool {
        for (register, value) in [(ADDRESS, addr), (PHYSICAL, paddr)] {
            self.0.write32(register, value as u32);
            self.0.write32(register + 4, (value >> 32) as u32);
        }
        self.0.write32(COUNT, len);
        self.0.write32(ATTRIBUTES, NON_SECURE);
        self.0.write32(ARM, 1);
        // The read does it, and returns when it is done.
        self.0.read32(TRIGGER);
        self.0.read32(RESULT) == 0
    }

    /// The same, as expected.
    pub(crate) fn expect_written(&self, addr: u64, paddr: u64, len: u32) -> Result<()> {
        match self.write(addr, paddr, len) {
            true => Ok(()),
            false => Err("testdev's write did not arrive where it is mapped".into()),
        }
    }
}
