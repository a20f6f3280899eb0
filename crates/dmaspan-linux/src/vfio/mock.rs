//! Devices that iommufd has for its own tests (drivers/iommu/iommufd/selftest.c), in kernels built
//! with `CONFIG_IOMMUFD_TEST`: what address spaces and page tables do can be tried where there is
//! neither a device nor an IOMMU. Such kernels are for tests alone.

use std::sync::Arc;

use dmaspan::Errno;

use super::dirty::{DirtyLogging, DirtyPages};
use super::error::{Error, OpenError};
use super::held::HeldGuest;
use super::hwpt::Hwpt;
use super::ioas::Ioas;
use crate::pci::Bdf;
use crate::sys::iommufd::{Iommufd, mock};
use crate::sys::uapi::iommufd::HW_CAP_DIRTY_TRACKING;

/// A device that does nothing, behind an IOMMU that maps IOVAs from 16 MiB to 2 GiB and notes what
/// it is told that devices write. It is taken away on drop.
#[derive(Debug)]
pub struct MockDevice {
    iommufd: Arc<Iommufd>,
    /// What destroys it.
    device: u32,
    /// The number that requests name it by.
    id: u32,
}

impl MockDevice {
    /// A device that is attached to an address space.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`]: `ENOTTY` where the kernel has none, `EADDRINUSE` where something is
    /// mapped, or promised, that it cannot map.
    pub fn of_space(space: &Ioas) -> Result<Self, Error> {
        Self::new(space.id().iommufd(), space.id().get())
    }

    /// A device that is attached to a page table.
    ///
    /// # Errors
    ///
    /// As [`of_space`](Self::of_space).
    pub fn of_table(table: &Hwpt<'_>) -> Result<Self, Error> {
        Self::new(table.iommufd(), table.id().get())
    }

    fn new(iommufd: &Arc<Iommufd>, table: u32) -> Result<Self, Error> {
        let (device, id) = mock::device(iommufd, table).map_err(failed)?;
        Ok(Self { iommufd: Arc::clone(iommufd), device, id })
    }

    /// As [`Ioas::hwpt`] of its space.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn hwpt<'space>(
        &self,
        space: &'space Ioas,
        tracking: DirtyLogging,
    ) -> Result<Hwpt<'space>, OpenError> {
        space.hwpt_for(Bdf::ZERO, self.id, tracking)
    }

    /// As [`HeldGuest::pin_for`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn pin(&self, held: &HeldGuest) -> Result<(), OpenError> {
        held.pin_by(Bdf::ZERO, self.id)
    }

    /// As [`VfioDevice::has_dirty_tracking`](super::VfioDevice::has_dirty_tracking).
    ///
    /// # Errors
    ///
    /// What the kernel answers.
    pub fn has_dirty_tracking(&self) -> Result<bool, Error> {
        let capabilities = self.iommufd.capabilities(self.id).map_err(failed)?;
        Ok(capabilities & HW_CAP_DIRTY_TRACKING != 0)
    }
}

/// What the kernel answers.
fn failed(errno: Errno) -> Error {
    Error::Setting { request: "IOMMU_TEST_CMD", errno }
}

impl Drop for MockDevice {
    fn drop(&mut self) {
        // A kernel that does not destroy it keeps it until the file is closed.
        let _ = self.iommufd.destroy(self.device);
    }
}

impl Hwpt<'_> {
    /// Has a [`MockDevice`] write the dirty pages of `pages`; returns how many that were.
    ///
    /// # Errors
    ///
    /// What the kernel answers: `EINVAL` where a page is not mapped.
    pub fn mock_write(&self, pages: &DirtyPages) -> Result<u64, Error> {
        let mut bits = pages.words().to_vec();
        let (table, page_size) = (self.id().get(), pages.page_size());
        let written = mock::write(self.iommufd(), table, pages.range(), page_size, &mut bits);
        written.map_err(failed)
    }
}
