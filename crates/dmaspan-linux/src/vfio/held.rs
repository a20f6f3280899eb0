//! [`HeldGuest`] is a guest's memory that is pinned once, for all that a virtual IOMMU maps of it.

use std::sync::Arc;

use dmaspan::{DmaSpace, Iova, IovaRange, Label, Prot};
use parking_lot::Mutex;

use super::device::VfioDevice;
use super::dirty::DirtyLogging;
use super::error::{Error, OpenError};
use super::ioas::{Ioas, Iommufd};
use crate::pci::Bdf;
use crate::plan::{Mapper, PlanError};
use crate::sys::iommufd::HwptId;

/// The memory of a guest in an address space without devices, where it is pinned for as long as it
/// is mapped there. A [`GuestDomain`] copies parts of it, and pins nothing.
///
/// A VMM with a virtual IOMMU maps for each request of its guest. By type1 each map is pinned anew,
/// counted against `RLIMIT_MEMLOCK` anew, and against the limit of 65535 mappings. Here the pins
/// are those of the guest's memory, whatever is mapped and for however many endpoints.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use dmaspan::{Iova, IovaRange, Prot};
/// use dmaspan_linux::plan::Region;
/// use dmaspan_linux::vfio::{GuestDomain, HeldGuest, Iommufd};
/// use dmaspan_linux::{Memory, MemoryKind};
///
/// let held = Arc::new(HeldGuest::new(&Iommufd::open()?)?);
/// let domain = GuestDomain::new(&held)?;
/// let device = domain.space().attach("0000:00:05.0".parse()?)?;
///
/// // All memory of the guest, at the guest's own addresses.
/// let ram = Arc::new(Memory::new(MemoryKind::Thp, 256 << 20)?);
/// let all = held.mapper().map([Region::whole(&ram, Prot::READ_WRITE).at(Iova::new(0))])?;
/// held.pin_for(&device)?;
///
/// // The guest maps two pages at 4 GiB, and unmaps them.
/// let range = IovaRange::from_len(Iova::new(4 << 30), 0x2000)?;
/// domain.map(range, Iova::new(0x8000), Prot::READ_WRITE)?;
/// domain.unmap(range)?;
/// drop((device, domain, all));
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HeldGuest {
    /// Tables of the space, which no device uses: they come first, so that they are destroyed
    /// before it. While there is one the kernel keeps all pages pinned.
    tables: Mutex<Vec<HwptId>>,
    mapper: Mapper<Ioas>,
}

impl HeldGuest {
    /// Nothing is held yet.
    ///
    /// # Errors
    ///
    /// [`Error::NoLimits`] where the kernel has no address space for it, or says that nothing can
    /// be mapped there.
    pub fn new(iommufd: &Iommufd) -> Result<Self, Error> {
        let mapper = Mapper::new(iommufd.ioas()?).map_err(|error: PlanError| {
            // The limits of an address space without a device are all addresses.
            Error::NoLimits { errno: error.errno() }
        })?;
        Ok(Self { tables: Mutex::default(), mapper })
    }

    /// What the guest's memory is mapped by, at the guest's own addresses, and unmapped where
    /// memory goes. What was copied of it stays mapped and pinned until it is unmapped, too.
    pub fn mapper(&self) -> &Mapper<Ioas> {
        &self.mapper
    }

    /// Pins all that is held and will be, by a page table for the IOMMU of `device`, which no
    /// device uses: iommufd pins only what a table has. The table takes 8 bytes for each leaf.
    /// Without it, and where the memory is not held yet, each map pins what it maps, and each unmap
    /// unpins it.
    ///
    /// One call is enough for all devices.
    ///
    /// # Errors
    ///
    /// [`OpenError`]: [`OpenError::DoesNotFit`] where memory is held that this IOMMU cannot map at
    /// its address, [`OpenError::Unsupported`] before Linux 6.7.
    pub fn pin_for(&self, device: &VfioDevice) -> Result<(), OpenError> {
        self.pin_by(device.bdf(), self.space().device_id(device)?)
    }

    /// The same by a device that others, such as a VMM, bound to the `/dev/iommu` that was
    /// [adopted](Iommufd::adopt): `dev_id` is the number that `VFIO_DEVICE_BIND_IOMMUFD` gave it,
    /// which vfio-ioctls has as `VfioDevice::iommufd_dev_id`. Errors name it `bdf`.
    ///
    /// # Errors
    ///
    /// As [`pin_for`](Self::pin_for); [`OpenError::System`] where no device has that number.
    pub fn pin_for_adopted(&self, bdf: Bdf, dev_id: u32) -> Result<(), OpenError> {
        self.pin_by(bdf, dev_id)
    }

    /// The same, for a device by its number.
    pub(super) fn pin_by(&self, bdf: Bdf, dev_id: u32) -> Result<(), OpenError> {
        let table = self.space().table_for(bdf, dev_id, DirtyLogging::Off)?;
        self.tables.lock().push(table);
        Ok(())
    }

    fn space(&self) -> &Ioas {
        self.mapper.space()
    }
}

/// What a virtual IOMMU maps for one endpoint, or for several that its guest put into one domain.
///
/// # Context
///
/// Any number of threads map and unmap at once.
#[derive(Debug)]
pub struct GuestDomain {
    space: Ioas,
    held: Arc<HeldGuest>,
}

impl GuestDomain {
    /// An empty one.
    ///
    /// # Errors
    ///
    /// [`Error::NoLimits`] where the kernel has no address space for it.
    pub fn new(held: &Arc<HeldGuest>) -> Result<Self, Error> {
        let space = held.space().iommufd().ioas()?;
        Ok(Self { space, held: Arc::clone(held) })
    }

    /// The address space, which devices are attached to.
    pub fn space(&self) -> &Ioas {
        &self.space
    }

    /// Maps the guest's memory from `guest` on at `range`: any part of what is held, also of
    /// several regions that follow one another.
    ///
    /// Where the kernel does not copy a part of a mapping the memory is mapped by itself, which
    /// pins it anew.
    ///
    /// # Errors
    ///
    /// [`Error::NotMapped`] where not all of it is held, and as [`Ioas::copy`]. Nothing is mapped
    /// then.
    #[track_caller]
    pub fn map(&self, range: IovaRange, guest: Iova, prot: Prot) -> Result<(), Error> {
        let label = Label::caller();
        let from = IovaRange::from_len(guest, range.checked_len().unwrap_or(u64::MAX))?;
        self.space.copy_or_map(self.held.space(), from, range.start(), prot, label)
    }

    /// Unmaps all that is mapped in `range`, gaps or not; how many bytes that was.
    ///
    /// # Errors
    ///
    /// [`Error::Bisects`] where it would cut what was mapped at once, with nothing changed.
    pub fn unmap(&self, range: IovaRange) -> Result<u64, Error> {
        self.space.unmap(range)
    }
}
