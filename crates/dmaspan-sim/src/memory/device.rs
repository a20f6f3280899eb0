//! A device keeps bytes behind the addresses of its BARs: a user writes them there.

use dmaspan::{PhysAddr, Span};
use parking_lot::Mutex;

use super::bytes::SparseBytes;
use crate::bus::BusError;

/// log2 of how many bytes are kept together.
const BLOCK_LG2: u32 = 12;

/// Device memory: the ranges that answer, and the bytes in them.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    contents: Mutex<Contents>,
}

#[derive(Debug)]
struct Contents {
    answers: Vec<Span>,
    bytes: SparseBytes,
}

impl Default for DeviceMemory {
    fn default() -> Self {
        let bytes = SparseBytes::new(BLOCK_LG2);
        Self { contents: Mutex::new(Contents { answers: Vec::new(), bytes }) }
    }
}

impl DeviceMemory {
    /// From now on something answers at `span`.
    pub(super) fn add(&self, span: Span) {
        let mut contents = self.contents.lock();
        let covers = |known: &Span| known.paddr() <= span.paddr() && span.last() <= known.last();
        if !contents.answers.iter().any(covers) {
            contents.answers.push(span);
        }
    }

    pub(super) fn read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        let contents = self.contents.lock();
        contents.check(paddr, buf.len())?;
        contents.bytes.read(paddr, buf);
        Ok(())
    }

    pub(super) fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        let mut contents = self.contents.lock();
        contents.check(paddr, buf.len())?;
        contents.bytes.write(paddr, buf);
        Ok(())
    }
}

impl Contents {
    fn check(&self, paddr: PhysAddr, len: usize) -> Result<(), BusError> {
        let above = u64::try_from(len).unwrap_or(u64::MAX).saturating_sub(1);
        let last = paddr.checked_add(above);
        let answers =
            |span: &Span| span.paddr() <= paddr && last.is_some_and(|last| last <= span.last());
        let answered = self.answers.iter().any(answers);
        if answered { Ok(()) } else { Err(BusError::Nobody { paddr }) }
    }
}
