//! An [`Hwpt`] is a page table of iommufd, whose dirty pages can be read.

use std::sync::Arc;

use dmaspan::{Errno, IovaRange};

use super::device::VfioDevice;
use super::dirty::{self, DirtyLogging, DirtyNotes, DirtyPages};
use super::error::{Error, OpenError};
use super::ioas::Ioas;
use crate::pci::Bdf;
use crate::sys::iommufd::{HwptId, Iommufd};
use crate::sys::mapping::Mapping;
use crate::sys::uapi::iommufd as uapi;

/// What iommufd knows a device by.
#[derive(Clone, Debug)]
pub(super) struct Binding {
    /// The file that the device belongs to.
    pub(super) iommufd: Arc<Iommufd>,
    /// Its number there.
    pub(super) id: u32,
}

/// A page table with what an [`Ioas`] maps, of one kind of IOMMU. The kernel makes one by itself
/// for a device that is attached to the address space; this one can note the pages that devices
/// write.
///
/// A device that is attached when this is dropped keeps the table until it is closed or moved.
#[derive(Debug)]
pub struct Hwpt<'space> {
    space: &'space Ioas,
    id: HwptId,
    /// Whether it was made to note what devices write.
    tracking: DirtyLogging,
}

impl Ioas {
    /// A page table for the IOMMU of `device`, with all that is mapped. The device stays where it
    /// is until [`Hwpt::attach`].
    ///
    /// # Errors
    ///
    /// [`OpenError::Unsupported`] where the IOMMU cannot note what devices write, or the kernel has
    /// no such tables (Linux 6.7); [`OpenError::Foreign`] for a device of another `/dev/iommu`;
    /// [`OpenError::BarMapped`].
    pub fn hwpt(&self, device: &VfioDevice, tracking: DirtyLogging) -> Result<Hwpt<'_>, OpenError> {
        self.hwpt_for(device.bdf(), self.device_id(device)?, tracking)
    }

    pub(super) fn hwpt_for(
        &self,
        bdf: Bdf,
        dev_id: u32,
        tracking: DirtyLogging,
    ) -> Result<Hwpt<'_>, OpenError> {
        let id = self.table_for(bdf, dev_id, tracking)?;
        Ok(Hwpt { space: self, id, tracking })
    }

    /// The table of [`hwpt_for`](Self::hwpt_for).
    pub(super) fn table_for(
        &self,
        bdf: Bdf,
        dev_id: u32,
        tracking: DirtyLogging,
    ) -> Result<HwptId, OpenError> {
        let flags = match tracking {
            DirtyLogging::On => uapi::HWPT_ALLOC_DIRTY_TRACKING,
            DirtyLogging::Off => 0,
        };
        let no_bar = self.before_table(bdf)?;
        let made = HwptId::alloc(self.id(), dev_id, flags).map_err(|errno| match errno {
            Errno::EOPNOTSUPP | Errno::ENOTTY if tracking == DirtyLogging::On => UNTRACKED,
            Errno::ENOTTY => OpenError::Unsupported {
                what: "this kernel makes no page tables on request (IOMMU_HWPT_ALLOC)",
                advice: "Linux 6.7 does; attach the device to the address space itself",
            },
            Errno::EADDRINUSE | Errno::EINVAL => OpenError::DoesNotFit { bdf, errno },
            errno => OpenError::System { request: "IOMMU_HWPT_ALLOC", bdf, errno },
        });
        let id = made?;
        drop(no_bar);
        self.refresh();
        Ok(id)
    }

    /// The number of a device of the same file.
    pub(super) fn device_id(&self, device: &VfioDevice) -> Result<u32, OpenError> {
        let binding = device.binding().filter(|it| Arc::ptr_eq(&it.iommufd, self.id().iommufd()));
        binding.map(|binding| binding.id).ok_or(OpenError::Foreign { bdf: device.bdf() })
    }
}

/// The IOMMU has no notes.
const UNTRACKED: OpenError = OpenError::Unsupported {
    what: "the IOMMU of this device does not note what devices write",
    advice: "ask VfioDevice::has_dirty_tracking first, and take all that is mapped for dirty",
};

impl Hwpt<'_> {
    /// Moves a device, which was opened by an address space of the same `/dev/iommu`, to this
    /// table. What both tables map stays mapped for it meanwhile.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; [`OpenError::DoesNotFit`] where the device's IOMMU is of another kind. The
    /// device stays where it was.
    pub fn attach(&self, device: &VfioDevice) -> Result<(), OpenError> {
        self.space.move_to(device, self.id.get())
    }

    /// Begins to note what devices write, or ends it. What was noted before is forgotten when it
    /// begins.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the table was not made for it.
    pub fn set_dirty_tracking(&self, tracking: DirtyLogging) -> Result<(), Error> {
        let request = "IOMMU_HWPT_SET_DIRTY_TRACKING";
        let flags = match tracking {
            DirtyLogging::On => uapi::DIRTY_TRACKING_ENABLE,
            DirtyLogging::Off => 0,
        };
        self.check_tracking()?;
        let set = self.id.set_dirty_tracking(flags);
        set.map_err(|errno| Error::Setting { request, errno }.of_request(request, WHAT, ADVICE))
    }

    /// Adds to `bitmap` the pages that devices wrote since the tracking began, or since the notes
    /// were cleared. It reports nothing of what is not mapped; a caller that unmaps a range and
    /// wants to know what was written there reads it before.
    ///
    /// # Errors
    ///
    /// [`Error`]: [`Error::Bisects`] where the bitmap's range covers a part of a mapping, which may
    /// have one note for all of its pages. What was read before an error is in the bitmap.
    pub fn read_dirty(&self, bitmap: &mut DirtyPages, notes: DirtyNotes) -> Result<(), Error> {
        let request = "IOMMU_HWPT_GET_DIRTY_BITMAP";
        let flags = match notes {
            DirtyNotes::Clear => 0,
            DirtyNotes::Keep => uapi::DIRTY_BITMAP_NO_CLEAR,
        };
        self.check_tracking()?;
        let granule = self.space.granule();
        let ask = |_: &_, range: IovaRange, bits: &Mapping| {
            self.id.read_dirty(range, granule, flags, bits)
        };
        let read = dirty::read(self.space.table(), granule, bitmap, request, ask);
        read.map_err(|error| error.of_request(request, WHAT, ADVICE))
    }

    #[cfg(feature = "iommufd-test")]
    pub(super) fn id(&self) -> &HwptId {
        &self.id
    }

    #[cfg(feature = "iommufd-test")]
    pub(super) fn iommufd(&self) -> &Arc<Iommufd> {
        self.space.id().iommufd()
    }

    fn check_tracking(&self) -> Result<(), Error> {
        match self.tracking {
            DirtyLogging::On => Ok(()),
            DirtyLogging::Off => Err(Error::Unsupported { what: WHAT, advice: ADVICE }),
        }
    }
}

const WHAT: &str = "this page table does not note what devices write";
const ADVICE: &str = "make one by Ioas::hwpt with DirtyLogging::On, where the IOMMU can";

impl VfioDevice {
    /// Returns whether the device's IOMMU can note the pages that devices write
    /// (`IOMMU_GET_HW_INFO`).
    ///
    /// # Errors
    ///
    /// [`OpenError::Unsupported`] for a device that was not opened by iommufd, and for a kernel
    /// before Linux 6.7.
    pub fn has_dirty_tracking(&self) -> Result<bool, OpenError> {
        let bdf = self.bdf();
        let binding = self.binding().ok_or(OpenError::Unsupported {
            what: "VFIO's type 1 does not say what the IOMMU can",
            advice: "open the device by iommufd",
        })?;
        let asked = binding.iommufd.capabilities(binding.id);
        let capabilities = asked.map_err(|errno| match errno {
            Errno::ENOTTY | Errno::EOPNOTSUPP => OpenError::Unsupported {
                what: "this kernel does not say what the IOMMU can (IOMMU_GET_HW_INFO)",
                advice: "Linux 6.7 does",
            },
            errno => OpenError::System { request: "IOMMU_GET_HW_INFO", bdf, errno },
        })?;
        Ok(capabilities & uapi::HW_CAP_DIRTY_TRACKING != 0)
    }
}
