//! Slots of bounce pools stand in for this memory.

use dmaspan::HostAddr;
use dmaspan::swiotlb::Original;

use super::{AccessError, Memory};

impl Memory {
    /// `len` bytes from `offset`, for a pool of [`BounceMemory`](crate::BounceMemory): by their
    /// address in this process. Only memory that is never unmapped needs no further promise, like
    /// that of `Box::leak`.
    ///
    /// ```
    /// use dmaspan::Direction;
    /// use dmaspan::swiotlb::{Fill, Pool, PoolConfig, SlotRequest};
    /// use dmaspan_linux::{BounceMemory, Memory, MemoryKind, UserPlatform};
    ///
    /// let buffers: &Memory = Box::leak(Box::new(Memory::new(MemoryKind::Base, 0x10000)?));
    /// let slots = BounceMemory::new(MemoryKind::Base, 1 << 20)?;
    /// let pool = Pool::new(slots, PoolConfig::new(1), UserPlatform)?;
    ///
    /// buffers.write_u64(0x2008, 7)?;
    /// let original = buffers.original(0x2000, 0x1000)?;
    /// let request = SlotRequest::default();
    /// let bounced = pool.map(original, Direction::ToDevice, Fill::Copy, &request)?;
    /// let slot = bounced.span().start().get() - pool.reach().start().get();
    /// assert_eq!(pool.memory().memory().read_u64(slot + 8)?, 7);
    /// pool.unmap(bounced)?;
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AccessError::OutOfBounds`] where they are not all in the memory, or none.
    #[inline]
    pub fn original(
        &'static self,
        offset: u64,
        len: u64,
    ) -> Result<Original<HostAddr>, AccessError> {
        let place = usize::try_from(offset).ok().zip(usize::try_from(len).ok());
        let original = place.and_then(|(offset, len)| self.mapping().original(offset, len));
        original.ok_or(AccessError::OutOfBounds { offset, len, memory_len: self.len() })
    }
}
