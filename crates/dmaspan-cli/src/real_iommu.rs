//! The kernel's IOMMU, as `map` uses it: the address space of a real device.

use dmaspan::{DmaSpace, Limits};
use dmaspan_linux::Bdf;
use dmaspan_linux::vfio::{Backend, OpenError, VfioDevice, VfioSpace};

/// The address space of a device, and the device, which may not access memory.
#[derive(Debug)]
pub(crate) struct RealIommu {
    /// What the kernel is asked by.
    pub(crate) backend: Backend,
    /// What maps.
    pub(crate) space: VfioSpace,
    pub(crate) device: VfioDevice,
}

impl RealIommu {
    /// Opens a device, in an address space of its own.
    ///
    /// # Errors
    ///
    /// [`OpenError`], which says what to do.
    pub(crate) fn open(backend: Backend, bdf: Bdf) -> Result<Self, OpenError> {
        let (space, device) = VfioSpace::open(backend, bdf)?;
        Ok(Self { backend, space, device })
    }

    /// What can be mapped now.
    pub(crate) fn limits(&self) -> Limits {
        self.space.limits()
    }
}
