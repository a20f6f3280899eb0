//! [`PinnedBounce`] is memory for bounce pools of devices that use physical addresses.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use dmaspan::swiotlb::{InSlot, PoolMemory, Room, Transfer};
use dmaspan::{PhysAddr, Promise, Span, lg2};
use parking_lot::Mutex;

use super::{ContiguousMemory, PhysicalError, PhysicalMemory};
use crate::sys;

/// The memory that a [`Pool`](dmaspan::swiotlb::Pool) is made of whose slots devices reach by
/// physical addresses: from [`PhysicalMemory::bounce`]. A
/// [`Device`](dmaspan::dma::Device) takes such a pool.
///
/// Originals are memory that the same [`PhysicalMemory`] has pinned: a
/// [`PinnedMemory`](super::PinnedMemory) or a part of one.
///
/// A pool that grows gets contiguous, pinned memory as well.
///
/// # Panics
///
/// Where a pool is told to copy to or from memory that this [`PhysicalMemory`] has not pinned:
/// only unsafe code can ask for that.
#[derive(Debug)]
pub struct PinnedBounce {
    source: PhysicalMemory,
    /// Neighbours are one.
    spans: Vec<Span>,
    base: Vec<ContiguousMemory>,
    /// What was allocated for growth, by its first address.
    grown: Mutex<BTreeMap<u64, ContiguousMemory>>,
}

impl PinnedBounce {
    /// Of the longest spans that there are.
    pub(super) fn new(
        source: &PhysicalMemory,
        len: u64,
        last: PhysAddr,
    ) -> Result<Self, PhysicalError> {
        let page_size = sys::page_size();
        if len == 0 {
            return Err(PhysicalError::Empty);
        }
        if !len.is_multiple_of(page_size) {
            return Err(PhysicalError::Length { len, page_size });
        }
        let (mut base, mut left, mut piece) = (Vec::new(), len, len);
        while left > 0 {
            piece = piece.min(left);
            match source.allocate(piece, page_size, last) {
                Ok(memory) => {
                    left -= piece;
                    base.push(memory);
                }
                // The next smaller size that a huge page may have, unless that was a page.
                Err(PhysicalError::None { .. }) if piece > page_size => {
                    piece = lg2::size(lg2::floor(piece - 1));
                }
                Err(error) => return Err(error),
            }
        }
        base.sort_unstable_by_key(|memory: &ContiguousMemory| memory.span().start());
        let mut spans: Vec<Span> = Vec::with_capacity(base.len());
        for span in base.iter().map(ContiguousMemory::span) {
            match spans.last_mut().and_then(|last| Some((last.join(span)?, last))) {
                Some((both, last)) => *last = both,
                None => spans.push(span),
            }
        }
        Ok(Self { source: source.clone(), spans, base, grown: Mutex::default() })
    }

    /// Returns how many bytes there are, without those of growth.
    #[expect(clippy::len_without_is_empty, reason = "there is at least one page")]
    pub fn len(&self) -> u64 {
        self.base.iter().map(ContiguousMemory::len).sum()
    }

    /// Returns how many bytes were allocated for growth and not freed.
    pub fn grown_bytes(&self) -> u64 {
        self.grown.lock().values().map(ContiguousMemory::len).sum()
    }
}

#[expect(unsafe_code, reason = "the memory is the pool's alone")]
// SAFETY:
// 1. `spans` gives contiguous memory that this value owns and hands out to nobody else until it is
//    dropped, `allocate` other such memory, which it owns until it is freed. Devices may write it:
//    nobody has references to it but to atomic bytes. It is pinned: its physical addresses lead to
//    it all the while.
// 2. The copies are of the direct map, which touches what a transfer or a slot says.
// 3. The direct map checks each address, and panics where it is of no memory that is pinned there,
//    as of an original that was unpinned against its promise.
// 4. A pointer is to the slot's bytes as far as they are contiguous in the process, which is
//    checked; they are aligned as the slot is, as whole pages are mapped.
unsafe impl PoolMemory for PinnedBounce {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        &self.spans
    }

    #[inline]
    fn can_copy(&self, original: Span) -> bool {
        self.source.shared.map.has(original)
    }

    #[inline]
    fn copy(&self, transfer: Transfer) {
        self.source.shared.map.transfer(&transfer);
    }

    #[inline]
    fn zero(&self, bytes: InSlot) {
        self.source.shared.map.zero(&bytes);
    }

    #[inline]
    fn read(&self, bytes: InSlot, into: &mut [u8]) {
        self.source.shared.map.read(&bytes, into);
    }

    #[inline]
    fn write(&self, bytes: InSlot, from: &[u8]) {
        self.source.shared.map.write(&bytes, from);
    }

    fn pointer(&self, bytes: InSlot) -> Option<NonNull<u8>> {
        let (start, contiguous) = self.source.shared.map.pointer(bytes.span().paddr())?;
        (contiguous >= bytes.span().len()).then_some(start)
    }

    /// Contiguous memory; `None` where there is none up to `room.last`.
    fn allocate(&self, room: Room) -> Option<Span> {
        let memory = self.source.allocate(room.bytes, room.align, PhysAddr::new(room.last)).ok()?;
        let span = Span::new(memory.span().paddr(), room.bytes).ok()?;
        self.grown.lock().insert(span.paddr().get(), memory);
        Some(span)
    }

    fn free(&self, _promise: Promise<'_>, span: Span) {
        let memory = self.grown.lock().remove(&span.paddr().get());
        debug_assert!(memory.is_some(), "{span} was not allocated");
    }
}
