//! A bounce pool in memory that is never given back, as a kernel has one.

use dmaspan::swiotlb::{
    Error, Fill, InSlot, Original, Pool, PoolConfig, PoolMemory, SlotRequest, Transfer,
};
use dmaspan::{Direction, PhysAddr, Span};

use crate::dma::OneCpu;
use crate::hardware::Words;

const BYTES: usize = 16 << 10;

/// Its memory; physical addresses are pointers.
struct Slots([Span; 1]);

fn pointer(paddr: PhysAddr) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(paddr.get() as usize)
}

fn span(start: *mut u8, len: usize) -> Option<Span> {
    Span::new(PhysAddr::new(start.expose_provenance() as u64), len as u64).ok()
}

// SAFETY: the memory is this pool's alone, and each method touches the bytes that it is told to.
unsafe impl PoolMemory for Slots {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.0
    }

    fn copy(&self, transfer: Transfer) {
        let (from, to) = (pointer(transfer.source()), pointer(transfer.target()));
        // SAFETY: a slot and an original are different memory, both as long.
        unsafe { from.copy_to_nonoverlapping(to, transfer.len() as usize) }
    }

    fn zero(&self, bytes: InSlot) {
        // SAFETY: the slot is as long.
        unsafe { pointer(bytes.span().paddr()).write_bytes(0, bytes.span().len() as usize) }
    }

    fn read(&self, bytes: InSlot, into: &mut [u8]) {
        let from = pointer(bytes.span().paddr());
        // SAFETY: the slot is as long as `into`.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) }
    }

    fn write(&self, bytes: InSlot, from: &[u8]) {
        let to = pointer(bytes.span().paddr());
        // SAFETY: the slot is as long as `from`.
        unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) }
    }
}

/// Bounces a buffer that a device changes in the middle, and finds a full pool. `None` where
/// anything is not as it should be.
pub fn exercise() -> Option<()> {
    let start = Words::new(BYTES as u64, 4096)?.start();
    let memory = Slots([span(start.as_ptr(), BYTES)?]);
    let pool = Pool::new(memory, PoolConfig::new(1), OneCpu).ok()?;
    let any = SlotRequest::default();
    let mut buffer = [7u8; 5000];
    let start = buffer.as_mut_ptr();
    // SAFETY: the buffer is used by this pointer until the slot is released.
    let original = unsafe { Original::new(span(start, 5000)?) };
    let bounced = pool.map(original, Direction::Bidirectional, Fill::Copy, &any).ok()?;
    // SAFETY: the byte is in the slot, and here this program is the device.
    unsafe { pointer(bounced.span().paddr()).add(2500).write(9) };
    // SAFETY: as before; no copy is made.
    let again = unsafe { Original::new(span(start, 12_000)?) };
    matches!(pool.take(again, &any), Err(Error::Full { .. })).then_some(())?;
    pool.unmap(bounced).ok()?;
    (pool.stats().used == 0).then_some(())?;
    // SAFETY: the buffer is as long.
    let sum: u32 = (0..5000).map(|at| u32::from(unsafe { start.add(at).read() })).sum();
    (sum == 7 * 5000 + 2).then_some(())
}
