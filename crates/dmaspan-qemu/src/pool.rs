//! A bounce pool in the RAM of a machine.

use dmaspan::swiotlb::{InSlot, PoolMemory, Transfer};
use dmaspan::{PhysAddr, Span};
use dmaspan_sim::bus::Bus as _;

use crate::ram::{Buffer, NoRam, Ram};

/// The memory of a bounce pool in a machine, which copies by its CPU.
#[derive(Debug)]
pub struct RamPool {
    ram: Ram,
    buffer: Buffer,
    span: Span,
}

impl RamPool {
    /// So many bytes, as [`Ram::allocate`] gives them.
    ///
    /// # Errors
    ///
    /// [`NoRam`].
    pub fn new(ram: &Ram, bytes: u64) -> Result<Self, NoRam> {
        let buffer = ram.allocate(bytes)?;
        let (ram, span) = (ram.clone(), buffer.span());
        Ok(Self { ram, buffer, span })
    }

    /// The RAM that it is made of, to look at it.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    fn get(&self, from: PhysAddr, into: &mut [u8]) {
        self.ram.read(from, into).expect("slots and originals are RAM of the machine");
    }

    fn put(&self, to: PhysAddr, from: &[u8]) {
        self.ram.write(to, from).expect("slots and originals are RAM of the machine");
    }
}

/// So many bytes of zeros.
fn zeros(len: u64) -> Vec<u8> {
    vec![0; usize::try_from(len).expect("the RAM is mapped in this process")]
}

#[expect(unsafe_code, reason = "the RAM is the pool's alone")]
// SAFETY: the buffer is the value's until it is dropped. All access goes through the RAM, which
// checks each address and touches the bytes that it is told to.
unsafe impl PoolMemory for RamPool {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        std::slice::from_ref(&self.span)
    }

    fn copy(&self, transfer: Transfer) {
        let mut bytes = zeros(transfer.len());
        self.get(transfer.source(), &mut bytes);
        self.put(transfer.target(), &bytes);
    }

    fn zero(&self, bytes: InSlot) {
        self.put(bytes.span().paddr(), &zeros(bytes.span().len()));
    }

    fn read(&self, bytes: InSlot, into: &mut [u8]) {
        self.get(bytes.span().paddr(), into);
    }

    fn write(&self, bytes: InSlot, from: &[u8]) {
        self.put(bytes.span().paddr(), from);
    }
}
