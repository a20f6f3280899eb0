//! A [`Bus`] turns addresses behind an IOMMU into bytes.

use core::ops::Deref;

use crate::addr::{Address, HostAddr, PhysAddr};

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
    /// Nothing of the program answers at this address, in a bus of its own addresses.
    #[error("nothing of the program answers at {addr}")]
    NobodyHere {
        /// The first address at which nothing answers.
        addr: HostAddr,
    },
}

/// Memory, or registers of a device, as what comes out of an IOMMU reaches them: by addresses `A`.
pub trait Bus<A: Address = PhysAddr> {
    /// Fills `buf` with the bytes from `at` on.
    ///
    /// # Errors
    ///
    /// [`BusError`].
    fn read(&self, at: A, buf: &mut [u8]) -> Result<(), BusError>;

    /// Writes the bytes of `buf` from `at` on.
    ///
    /// # Errors
    ///
    /// [`BusError`].
    fn write(&self, at: A, buf: &[u8]) -> Result<(), BusError>;
}

/// Pointers to memory lead to the same.
impl<A: Address, P: Deref<Target: Bus<A>>> Bus<A> for P {
    fn read(&self, at: A, buf: &mut [u8]) -> Result<(), BusError> {
        (**self).read(at, buf)
    }

    fn write(&self, at: A, buf: &[u8]) -> Result<(), BusError> {
        (**self).write(at, buf)
    }
}
