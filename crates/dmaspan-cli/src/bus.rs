//! The process's memory, as a device behind the software IOMMU reaches it.

use std::sync::Arc;

use dmaspan::iommu::soft::{Bus, BusError};
use dmaspan::{Address, PhysAddr};
use dmaspan_linux::{FrameMap, Memory};

/// Memory that answers to the addresses that it was mapped with: physical ones, or those of this
/// process.
#[derive(Debug)]
pub(crate) struct MemoryBus<A: Address> {
    memory: Arc<Memory>,
    frames: FrameMap<A>,
}

impl<A: Address> MemoryBus<A> {
    /// The memory that `frames` is a map of.
    pub(crate) const fn new(memory: Arc<Memory>, frames: FrameMap<A>) -> Self {
        Self { memory, frames }
    }

    /// Calls `piece` with the offset in the memory of each contiguous part of an access, and where
    /// in the access it begins and ends.
    fn pieces(
        &self,
        at: A,
        len: usize,
        mut piece: impl FnMut(u64, usize, usize) -> bool,
    ) -> Result<(), BusError> {
        let mut done = 0;
        while done < len {
            let at = at.get().wrapping_add(u64::try_from(done).unwrap_or(u64::MAX));
            let nobody = BusError::Nobody { paddr: PhysAddr::new(at) };
            let (offset, left) = self.frames.locate(A::new(at)).ok_or(nobody)?;
            let step = usize::try_from(left).unwrap_or(usize::MAX).min(len - done);
            if !piece(offset, done, done + step) {
                return Err(nobody);
            }
            done += step;
        }
        Ok(())
    }
}

impl<A: Address> Bus<A> for MemoryBus<A> {
    fn read(&self, at: A, buf: &mut [u8]) -> Result<(), BusError> {
        self.pieces(at, buf.len(), |offset, from, to| {
            self.memory.read(offset, &mut buf[from..to]).is_ok()
        })
    }

    fn write(&self, at: A, buf: &[u8]) -> Result<(), BusError> {
        self.pieces(at, buf.len(), |offset, from, to| {
            self.memory.write(offset, &buf[from..to]).is_ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmaspan::Span;
    use dmaspan_linux::MemoryKind;

    #[test]
    fn an_access_over_two_spans_reaches_both_and_nothing_between() {
        let memory = Arc::new(Memory::new(MemoryKind::Base, 0x4000).unwrap());
        let span = |paddr, len| Span::new(PhysAddr::new(paddr), len).unwrap();
        // The second half of the memory is right before the first in physical memory.
        let spans = [span(0x12000, 0x2000), span(0x10000, 0x2000)];
        let frames = FrameMap::new(&memory, memory.user_range(), &spans).unwrap();
        let bus = MemoryBus::new(Arc::clone(&memory), frames);
        let bytes: Vec<u8> = (0..=255).cycle().take(0x2000).collect();
        bus.write(PhysAddr::new(0x11000), &bytes).unwrap();
        let mut back = vec![0; 0x1000];
        memory.read(0x3000, &mut back).unwrap();
        assert_eq!(back, bytes[..0x1000]);
        memory.read(0, &mut back).unwrap();
        assert_eq!(back, bytes[0x1000..]);
        let mut read = vec![0; 0x2000];
        bus.read(PhysAddr::new(0x11000), &mut read).unwrap();
        assert_eq!(read, bytes);
        let behind = PhysAddr::new(0x14000);
        let refused = bus.read(PhysAddr::new(0x13800), &mut read);
        assert_eq!(refused, Err(BusError::Nobody { paddr: behind }));
    }
}
