//! The memory of a pool, to which copies are made or not: what slots alone cost.

use dmaspan::swiotlb::{InSlot, PoolMemory, Transfer};
use dmaspan::{HostAddr, Span};
use dmaspan_linux::{BounceMemory, Memory, MemoryKind};

use crate::failed::Failed;

/// Slots in memory of this process. Where they are not `COPIED`, [copies](PoolMemory::copy) are
/// left out, and it is no use for anything but measuring how long it takes to find and release
/// slots.
#[derive(Debug)]
pub(crate) struct Slots<const COPIED: bool>(BounceMemory);

impl<const COPIED: bool> Slots<COPIED> {
    /// So many bytes in the largest pages, as a kernel's own mapping of memory has them.
    pub(crate) fn new(bytes: u64) -> Result<Self, Failed> {
        let kind = MemoryKind::thp_for(bytes);
        Ok(Self(BounceMemory::new(kind, bytes)?))
    }

    /// The memory, as a device sees it.
    pub(crate) fn memory(&self) -> &Memory {
        self.0.memory()
    }
}

#[expect(unsafe_code, reason = "the promises are those of the memory inside")]
// SAFETY: all memory is that of `BounceMemory`, which promises the same of it, and what is not
// copied touches nothing. No pool grows in it.
unsafe impl<const COPIED: bool> PoolMemory for Slots<COPIED> {
    type Address = HostAddr;

    fn spans(&self) -> &[Span<HostAddr>] {
        self.0.spans()
    }

    #[inline]
    fn copy(&self, transfer: Transfer<HostAddr>) {
        if COPIED {
            self.0.copy(transfer);
        }
    }

    fn zero(&self, bytes: InSlot<HostAddr>) {
        self.0.zero(bytes);
    }

    fn read(&self, bytes: InSlot<HostAddr>, into: &mut [u8]) {
        self.0.read(bytes, into);
    }

    fn write(&self, bytes: InSlot<HostAddr>, from: &[u8]) {
        self.0.write(bytes, from);
    }
}
