//! A device keeps bytes behind the addresses of its BARs: a user writes them there.

use std::collections::HashMap;

use dmaspan::{PhysAddr, Span, lg2};
use parking_lot::Mutex;

use crate::bus::BusError;

/// log2 of how many bytes are kept together.
const BLOCK_LG2: u32 = 12;

/// Device memory: the ranges that answer, and the bytes in them, which exist from the first write
/// on.
#[derive(Debug, Default)]
pub(super) struct DeviceMemory {
    contents: Mutex<Contents>,
}

#[derive(Debug, Default)]
struct Contents {
    answers: Vec<Span>,
    /// By address over the size of a block.
    blocks: HashMap<u64, Box<[u8]>>,
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
        let mut rest = buf;
        let mut at = paddr.get();
        while !rest.is_empty() {
            let (offset, len) = place(at, rest.len());
            let (here, behind) = rest.split_at_mut(len);
            match contents.blocks.get(&(at >> BLOCK_LG2)) {
                Some(block) => here.copy_from_slice(&block[offset..offset + len]),
                None => here.fill(0),
            }
            rest = behind;
            at = (at | lg2::mask(BLOCK_LG2)).wrapping_add(1);
        }
        Ok(())
    }

    pub(super) fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        let mut contents = self.contents.lock();
        contents.check(paddr, buf.len())?;
        let mut rest = buf;
        let mut at = paddr.get();
        while !rest.is_empty() {
            let (offset, len) = place(at, rest.len());
            let (here, behind) = rest.split_at(len);
            let empty = || vec![0; 1 << BLOCK_LG2].into_boxed_slice();
            let block = contents.blocks.entry(at >> BLOCK_LG2).or_insert_with(empty);
            block[offset..offset + len].copy_from_slice(here);
            rest = behind;
            at = (at | lg2::mask(BLOCK_LG2)).wrapping_add(1);
        }
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

/// Where in its block a byte is, and how many of `len` bytes lie in that block.
fn place(at: u64, len: usize) -> (usize, usize) {
    let block = 1usize << BLOCK_LG2;
    let offset = usize::try_from(at & lg2::mask(BLOCK_LG2)).unwrap_or(0);
    (offset, len.min(block - offset))
}
