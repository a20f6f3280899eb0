//! Physical memory, as a device sees it.

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

impl<B: Bus + ?Sized> Bus for &B {
    fn read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        (**self).read(paddr, buf)
    }

    fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        (**self).write(paddr, buf)
    }
}

impl<B: Bus + ?Sized> Bus for std::sync::Arc<B> {
    fn read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        (**self).read(paddr, buf)
    }

    fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        (**self).write(paddr, buf)
    }
}
