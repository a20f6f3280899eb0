//! A [`Lease`] keeps a slot, which its driver uses again and again.

use alloc::sync::Arc;
use core::ptr::NonNull;
use core::{fmt, mem};

use super::error::Error;
use super::marks::Mark;
use super::memory::{InSlot, PoolMemory};
use super::pool::{Pool, SlotOf};
use super::request::SlotRequest;
use crate::addr::Address;
use crate::platform::Platform;
use crate::span::Span;

/// Memory of a pool that is used for many transfers, and stands in for none: what a driver reads
/// and writes itself, its rings and its persistent bounce buffers. It is mapped once.
///
/// It begins as zeros. Dropped, it goes back to the pool.
pub struct Lease<M: PoolMemory, P: Platform> {
    pool: Arc<Pool<M, P>>,
    /// Taken by the drop.
    slot: Option<SlotOf<P, M::Address>>,
    span: Span<M::Address>,
}

impl<M: PoolMemory, P: Platform> Pool<M, P> {
    /// A lease of `len` bytes. `keep_bits` of the request make it begin on a multiple of as much,
    /// and its granule makes it whole granules.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take); [`Error::Outside`] for no bytes; [`Error::NoMemory`] where a lease
    /// of what the pool grew by cannot be recorded.
    ///
    /// # Context
    ///
    /// As [`take`](Self::take).
    pub fn lease(self: &Arc<Self>, len: u64, request: &SlotRequest) -> Result<Lease<M, P>, Error> {
        let none = Error::Outside { offset: 0, len, mapped: 0 };
        let original = Span::new(M::Address::new(0), len).map_err(|_| none)?;
        // Nothing is copied to or from it.
        let slot = self.take_for(original, request)?;
        let span = slot.span();
        if !slot.is_base() && !self.add_lease(span.output()) {
            // It is of this pool.
            let _ = self.release(slot);
            return Err(Error::NoMemory { bytes: len });
        }
        self.mark(&slot, Some(Mark::Leased));
        self.memory.zero(InSlot::new(span));
        Ok(Lease { pool: Arc::clone(self), slot: Some(slot), span })
    }
}

impl<M: PoolMemory, P: Platform> Lease<M, P> {
    /// Returns where it is.
    pub fn span(&self) -> Span<M::Address> {
        self.span
    }

    /// Returns where the program reaches the first byte by a pointer, for as long as the lease
    /// exists; `None` where the pool's memory has [none](PoolMemory::pointer). It is read and
    /// written by [`bytes`](crate::bytes): a device may write at any time, and another thread that
    /// has the lease.
    pub fn as_ptr(&self) -> Option<NonNull<u8>> {
        self.pool.memory.pointer(InSlot::new(self.span))
    }

    /// Copies bytes from `offset` on out of it, also while other threads write them: each is one
    /// that the lease has had.
    ///
    /// # Errors
    ///
    /// [`Error::Outside`] where it has not so many.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        if let Some(part) = self.part(offset, into.len())? {
            self.pool.memory.read(part, into);
        }
        Ok(())
    }

    /// Copies bytes to `offset` and on, also while other threads read and write them: each is
    /// whole, and which one stays is not said.
    ///
    /// # Errors
    ///
    /// [`Error::Outside`] where it has not so many.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        if let Some(part) = self.part(offset, from.len())? {
            self.pool.memory.write(part, from);
        }
        Ok(())
    }

    /// `None` for no bytes.
    fn part(&self, offset: u64, len: usize) -> Result<Option<InSlot<M::Address>>, Error> {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        let mapped = self.span.len();
        let outside = Error::Outside { offset, len, mapped };
        match &self.slot {
            Some(_) if len == 0 && offset <= mapped => Ok(None),
            Some(slot) => Ok(Some(InSlot::new(self.pool.part(slot, offset, len)?))),
            None => Err(outside),
        }
    }
}

impl<M: PoolMemory, P: Platform> Drop for Lease<M, P> {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        if !slot.is_base() {
            self.pool.remove_lease(self.span.output());
        }
        self.pool.mark(&slot, None);
        if let Err(foreign) = self.pool.release(slot) {
            // It is of this pool.
            mem::forget(foreign);
        }
    }
}

impl<M: PoolMemory, P: Platform> fmt::Debug for Lease<M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("span", &self.span).finish_non_exhaustive()
    }
}
