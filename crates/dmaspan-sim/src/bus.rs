//! Physical memory, as a device sees it.

use std::ops::Deref;

use dmaspan::PhysAddr;

/// The reason why a bus access failed. Part of it may have been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BusError {
    /// Nothing answers at this address.
    #[error("nothing answers at {paddr}")]
    Nobody {
        /// The first address at which nothing answers.
        paddr: PhysAddr,
    },
}

/// Answers to physical addresses: memory, or registers of another device.
pub trait Bus {
    /// Reads from `paddr` on.
    ///
    /// # Errors
    ///
    /// [`BusError`].
    fn read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError>;

    /// Writes from `paddr` on.
    ///
    /// # Errors
    ///
    /// [`BusError`].
    fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError>;
}

/// Pointers to memory lead to the same.
impl<P: Deref<Target: Bus>> Bus for P {
    fn read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        (**self).read(paddr, buf)
    }

    fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        (**self).write(paddr, buf)
    }
}
