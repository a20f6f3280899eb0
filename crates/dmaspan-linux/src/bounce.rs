//! [`BounceMemory`] is memory of this process for bounce pools.

use std::collections::BTreeMap;

use dmaspan::swiotlb::{InSlot, PoolMemory, Room, Transfer};
use dmaspan::{HostAddr, Promise, Span};
use parking_lot::Mutex;

use crate::mem::{Memory, MemoryError, MemoryKind};
use crate::sys::{self, bytes};

/// The memory that a [`Pool`](dmaspan::swiotlb::Pool) of this process is made of. Its addresses are
/// those of the process, of slots as well as of [originals](dmaspan::swiotlb::Original), which can
/// be any of its memory whose provenance is exposed, as that of a [`Memory`] is. A device of the
/// [DMA API](dmaspan::dma) takes no such pool: it has no physical addresses, as a
/// [`PinnedBounce`](crate::physical::PinnedBounce) has.
///
/// Every page is there from the beginning. None is pinned: what hardware is to reach goes through a
/// [`LinuxPinner`](crate::LinuxPinner) or VFIO first.
///
/// A pool that grows gets memory of the same kind where its size permits it, else of base pages.
///
/// ```
/// use dmaspan::swiotlb::{Fill, Original, Pool, PoolConfig, SlotRequest};
/// use dmaspan::{Direction, HostAddr, Span};
/// use dmaspan_linux::{BounceMemory, MemoryKind, UserPlatform};
///
/// let memory = BounceMemory::new(MemoryKind::Base, 4 << 20)?;
/// let pool = Pool::new(memory, PoolConfig::new(2), UserPlatform)?;
///
/// let mut buffer = vec![1u8; 5000];
/// let addr = buffer.as_mut_ptr().expose_provenance() as u64;
/// // SAFETY: the buffer outlives the mapping, and nothing refers to its bytes until that ends.
/// let original = unsafe { Original::new(Span::new(HostAddr::new(addr), 5000)?) };
/// let request = SlotRequest::default();
/// let bounced = pool.map(original, Direction::Bidirectional, Fill::Copy, &request)?;
///
/// // The device finds the bytes in the slot, and writes one of them.
/// let slot: *mut u8 =
///     std::ptr::with_exposed_provenance_mut(bounced.span().start().get() as usize);
/// // SAFETY: the slot is held, and has a byte at least.
/// assert_eq!(unsafe { slot.read_volatile() }, 1);
/// // SAFETY: as before.
/// unsafe { slot.write_volatile(7) };
///
/// pool.unmap(bounced)?;
/// assert_eq!(buffer[..2], [7, 1]);
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct BounceMemory {
    memory: Memory,
    spans: [Span<HostAddr>; 1],
    /// What was allocated for growth, by its first address.
    grown: Mutex<BTreeMap<u64, Memory>>,
}

impl BounceMemory {
    /// Maps `len_bytes` of memory and allocates all of its pages, zeroed.
    ///
    /// # Errors
    ///
    /// As [`Memory::new`].
    pub fn new(kind: MemoryKind, len_bytes: u64) -> Result<Self, MemoryError> {
        let memory = Memory::new(kind, len_bytes)?;
        let spans = [span(&memory, len_bytes).ok_or(MemoryError::Empty { kind })?];
        Ok(Self { memory, spans, grown: Mutex::default() })
    }

    /// Of memory that a test has made.
    #[cfg(test)]
    pub(crate) fn over(memory: Memory) -> Self {
        let spans = [span(&memory, memory.len()).unwrap()];
        Self { memory, spans, grown: Mutex::default() }
    }

    /// Returns what kind of memory it began with.
    pub fn kind(&self) -> MemoryKind {
        self.memory.kind()
    }

    /// The memory that it began with, as a device sees it: slots are at their addresses.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns how many bytes were allocated for growth and not freed: whole pages.
    pub fn grown_bytes(&self) -> u64 {
        self.grown.lock().values().map(Memory::len).sum()
    }

    /// Gives memory that was allocated for growth back to the system.
    fn unmap(&self, span: Span<HostAddr>) {
        let memory = self.grown.lock().remove(&span.start().get());
        debug_assert!(memory.is_some(), "{span} was not allocated");
    }
}

/// The first `len` bytes of memory.
fn span(memory: &Memory, len: u64) -> Option<Span<HostAddr>> {
    Span::new(HostAddr::new(memory.user_range().start().get()), len).ok()
}

#[expect(unsafe_code, reason = "the mappings are the pool's alone")]
// SAFETY:
// 1. `spans` gives a mapping that this value owns and hands out to nobody else until it is
//    dropped, `allocate` others, which it owns until they are freed. Devices may write them:
//    nobody has references to them but to atomic bytes.
// 2. The copies are of `sys::bytes`, which touches what a transfer or a slot says, each byte by
//    itself.
unsafe impl PoolMemory for BounceMemory {
    type Address = HostAddr;

    fn spans(&self) -> &[Span<HostAddr>] {
        &self.spans
    }

    #[inline]
    fn copy(&self, transfer: Transfer<HostAddr>) {
        bytes::transfer(&transfer);
    }

    #[inline]
    fn zero(&self, bytes: InSlot<HostAddr>) {
        bytes::zero(&bytes);
    }

    #[inline]
    fn read(&self, bytes: InSlot<HostAddr>, into: &mut [u8]) {
        bytes::read(&bytes, into);
    }

    #[inline]
    fn write(&self, bytes: InSlot<HostAddr>, from: &[u8]) {
        bytes::write(&bytes, from);
    }

    /// Maps memory; `None` where the system has too little, or maps it beyond `room.last`.
    fn allocate(&self, room: Room) -> Option<Span<HostAddr>> {
        let kind = match self.kind() {
            MemoryKind::Thp if room.bytes.is_multiple_of(MemoryKind::Thp.page_size()) => {
                MemoryKind::Thp
            }
            _ => MemoryKind::Base,
        };
        let len = room.bytes.checked_next_multiple_of(sys::page_size())?;
        let memory = Memory::aligned(kind, len, room.align).ok()?;
        let span = span(&memory, room.bytes)?;
        if span.last().get() > room.last {
            return None;
        }
        self.grown.lock().insert(span.start().get(), memory);
        Some(span)
    }

    fn free(&self, _promise: Promise<'_>, span: Span<HostAddr>) {
        self.unmap(span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const M1: u64 = 1 << 20;

    fn memory() -> BounceMemory {
        BounceMemory::new(MemoryKind::Base, M1).unwrap()
    }

    fn room(bytes: u64, align: u64, last: u64) -> Room {
        Room { bytes, align, last }
    }

    #[test]
    fn growth_gives_memory_as_it_was_asked_for_and_takes_it_back() {
        let memory = memory();
        for align in [2048, sys::page_size(), M1, 4 * M1] {
            let span = memory.allocate(room(3 * 2048, align, u64::MAX)).unwrap();
            assert_eq!((span.len(), span.start().get() % align), (3 * 2048, 0));
            assert_eq!(memory.grown_bytes(), (3 * 2048_u64).next_multiple_of(sys::page_size()));
            memory.unmap(span);
            assert_eq!(memory.grown_bytes(), 0);
        }
    }

    #[test]
    fn growth_beyond_the_last_address_or_all_memory_is_refused() {
        let memory = memory();
        assert_eq!(memory.allocate(room(M1, sys::page_size(), u64::from(u32::MAX))), None);
        assert_eq!(memory.allocate(room(1 << 60, sys::page_size(), u64::MAX)), None);
        assert_eq!(memory.allocate(room(!4095, sys::page_size(), u64::MAX)), None);
        assert_eq!(memory.allocate(room(M1, 1 << 62, u64::MAX)), None);
        assert_eq!(memory.grown_bytes(), 0);
    }

    #[test]
    fn growth_of_huge_pages_is_of_huge_pages_where_it_has_whole_ones() {
        let huge = MemoryKind::Thp.page_size();
        let memory = BounceMemory::new(MemoryKind::Thp, huge).unwrap();
        let kind = |bytes| {
            let span = memory.allocate(room(bytes, 2048, u64::MAX)).unwrap();
            let kind = memory.grown.lock()[&span.start().get()].kind();
            memory.unmap(span);
            kind
        };
        assert_eq!((kind(2 * huge), kind(huge / 2)), (MemoryKind::Thp, MemoryKind::Base));
    }

    #[test]
    fn memory_of_no_bytes_is_refused() {
        let none = BounceMemory::new(MemoryKind::Base, 0).unwrap_err();
        assert_eq!(none, MemoryError::Empty { kind: MemoryKind::Base });
    }
}
