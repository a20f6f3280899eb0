//! Devices of QEMU that do DMA where a test tells them.

use dmaspan::PhysAddr;

use crate::machine::QtestMmio;
use crate::pci::{Pci, PciError};

/// A device said that its access did not go through, or went elsewhere, with a code of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device says that its access failed ({code:#x})")]
pub struct DmaRefused {
    /// What it says.
    pub code: u32,
}

impl DmaRefused {
    /// The access was refused on its way: nothing was written.
    pub const ON_THE_WAY: Self = Self { code: 0xdead_0002 };
    /// It went through, and not to the memory that the device was told of.
    pub const ELSEWHERE: Self = Self { code: 0xdead_0004 };
}

/// QEMU's `iommu-testdev` (docs/specs/iommu-testdev.rst): writes the word 0x12345678 where it is
/// told, again and again.
#[derive(Debug)]
pub struct TestDev {
    registers: QtestMmio,
    /// What its registers have: written again only where it changes, since a write takes QEMU as
    /// long as the DMA.
    written: [Option<u32>; 5],
}

impl TestDev {
    /// What it writes.
    pub const WRITTEN: u32 = 0x1234_5678;
    const ID: u32 = 0x0005_1b36;
    const TRIGGER: u64 = 0x00;
    const IOVA: u64 = 0x04;
    const LEN: u64 = 0x0c;
    const RESULT: u64 = 0x10;
    const DOORBELL: u64 = 0x14;
    const PADDR: u64 = 0x1c;

    /// The one in a slot of bus 0.
    ///
    /// # Errors
    ///
    /// [`PciError`].
    pub fn new(pci: &Pci, slot: u8) -> Result<Self, PciError> {
        pci.enable_known(slot, Self::ID).map(|registers| Self { registers, written: [None; 5] })
    }

    /// Writes `len` bytes, whole words, from the device's address `iova` on, of which it is told
    /// that they are at `paddr`: it looks whether they arrived there.
    ///
    /// # Errors
    ///
    /// [`DmaRefused::ON_THE_WAY`], [`DmaRefused::ELSEWHERE`], or another code of the device.
    pub fn write(&mut self, iova: u64, paddr: PhysAddr, len: u32) -> Result<(), DmaRefused> {
        let ([low, high], [paddr_low, paddr_high]) = (halves(iova), halves(paddr.get()));
        let values = [
            (Self::IOVA, low),
            (Self::IOVA + 4, high),
            (Self::LEN, len),
            (Self::PADDR, paddr_low),
            (Self::PADDR + 4, paddr_high),
        ];
        let changed = values.into_iter().zip(&mut self.written).filter_map(|(write, written)| {
            (written.replace(write.1) != Some(write.1)).then_some(write)
        });
        let writes: Vec<_> = changed.chain([(Self::DOORBELL, 1)]).collect();
        match self.registers.write_then_read(&writes, [Self::TRIGGER, Self::RESULT]) {
            0 => Ok(()),
            code => Err(DmaRefused { code }),
        }
    }
}

/// QEMU's `edu` (docs/specs/edu.rst): copies up to 4 KiB between its buffer and memory.
///
/// It reaches 28 bits of addresses, unless its property `dma_mask` says otherwise, and drops those
/// above.
#[derive(Debug)]
pub struct Edu {
    registers: QtestMmio,
}

impl Edu {
    const ID: u32 = 0x11e8_1234;
    const SOURCE: u64 = 0x80;
    const TARGET: u64 = 0x88;
    const COUNT: u64 = 0x90;
    const COMMAND: u64 = 0x98;
    const RUN: u64 = 1;
    const TO_MEMORY: u64 = 2;
    /// Where its buffer of 4 KiB is, by its own addresses.
    const BUFFER: u64 = 0x4_0000;
    /// As long as it takes.
    const NANOSECONDS: u64 = 100_000_001;

    /// The one in a slot of bus 0.
    ///
    /// # Errors
    ///
    /// [`PciError`].
    pub fn new(pci: &Pci, slot: u8) -> Result<Self, PciError> {
        pci.enable_known(slot, Self::ID).map(|registers| Self { registers })
    }

    /// Reads `len` bytes of memory into its buffer. It does not say whether they were there.
    pub fn read(&mut self, iova: u64, len: u64) {
        self.run(iova, Self::BUFFER, len, Self::RUN);
    }

    /// Writes the first `len` bytes of its buffer to memory. It does not say whether they arrived.
    pub fn write(&mut self, iova: u64, len: u64) {
        self.run(Self::BUFFER, iova, len, Self::RUN | Self::TO_MEMORY);
    }

    fn run(&mut self, source: u64, target: u64, len: u64, command: u64) {
        let writes = [
            (Self::SOURCE, source),
            (Self::TARGET, target),
            (Self::COUNT, len),
            (Self::COMMAND, command),
        ];
        self.registers.write_then_step(&writes, Self::NANOSECONDS);
    }
}

fn halves(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}
