//! The registers of an SMMUv2, by their spaces.

use super::spec::{gr0, gr1, id1};
use crate::mmio::Mmio;

/// The registers of an SMMU, whose pages have a size of their own (IHI 0062, chapter 8 "The SMMU
/// address space").
pub(super) struct Registers<R> {
    mmio: R,
    lg2_page: u32,
    global_pages: u64,
}

impl<R: Mmio> Registers<R> {
    pub(super) fn new(mmio: R) -> Self {
        // Page 0 has the same place, whatever the size.
        let id1 = mmio.read32(gr0::ID1);
        let lg2_page = if id1 & id1::PAGES_64K == 0 { 12 } else { 16 };
        let lg2_half = id1 >> id1::NUMPAGENDXB_SHIFT & id1::NUMPAGENDXB_MASK;
        Self { mmio, lg2_page, global_pages: 2 << lg2_half }
    }

    /// How many pages there are for banks: as many as in the global space.
    pub(super) fn bank_pages(&self) -> u64 {
        self.global_pages
    }

    /// Makes stores to memory seen by devices before later ones.
    pub(super) fn order_stores(&self) {
        self.mmio.order_stores();
    }

    pub(super) fn read(&self, register: u64) -> u32 {
        self.mmio.read32(register)
    }

    pub(super) fn read64(&self, register: u64) -> u64 {
        self.mmio.read64(register)
    }

    pub(super) fn write(&self, register: u64, value: u32) {
        self.mmio.write32(register, value);
    }

    /// Reads a register that each entry of the stream map has.
    pub(super) fn read_entry(&self, register: u64, entry: u32) -> u32 {
        self.mmio.read32(indexed(register, entry))
    }

    /// Writes a register that each entry of the stream map has.
    pub(super) fn write_entry(&self, register: u64, entry: u32, value: u32) {
        self.mmio.write32(indexed(register, entry), value);
    }

    /// Writes CBARn or CBA2Rn.
    pub(super) fn write_attribute(&self, register: u64, bank: u32, value: u32) {
        self.mmio.write32(self.page(1) + indexed(register, bank), value);
    }

    /// The register that has the stream of a bank's fault.
    pub(super) fn faulting_stream(&self, bank: u32) -> u32 {
        self.mmio.read32(self.page(1) + indexed(gr1::CBFRSYNRA, bank))
    }

    /// The registers of a context bank.
    pub(super) fn bank(&self, bank: u32) -> Bank<'_, R> {
        let start = self.page(self.global_pages + u64::from(bank));
        Bank { mmio: &self.mmio, start }
    }

    fn page(&self, page: u64) -> u64 {
        page << self.lg2_page
    }
}

/// The registers of one context bank.
pub(super) struct Bank<'r, R> {
    mmio: &'r R,
    start: u64,
}

impl<R: Mmio> Bank<'_, R> {
    pub(super) fn read(&self, register: u64) -> u32 {
        self.mmio.read32(self.start + register)
    }

    pub(super) fn read64(&self, register: u64) -> u64 {
        self.mmio.read64(self.start + register)
    }

    pub(super) fn write(&self, register: u64, value: u32) {
        self.mmio.write32(self.start + register, value);
    }

    pub(super) fn write64(&self, register: u64, value: u64) {
        self.mmio.write64(self.start + register, value);
    }
}

const fn indexed(register: u64, index: u32) -> u64 {
    register + ((index as u64) << 2)
}
