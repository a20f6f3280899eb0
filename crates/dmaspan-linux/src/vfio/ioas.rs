//! iommufd: address spaces of their own.

use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Limits, Prot, UserRange};
use parking_lot::RwLock;

use super::bar::Bar;
use super::book::Book;
use super::device::Device;
use super::error::{Error, OpenError};
use super::sysfs;
use crate::mem::Memory;
use crate::pci::Bdf;
use crate::sys;
use crate::sys::iommufd::{self, IoasId};
use crate::sys::kept::Requests;
use crate::sys::vfio::DeviceFd;

/// An open `/dev/iommu`, which address spaces and devices are of.
#[derive(Clone, Debug)]
pub struct Iommufd {
    fd: Arc<iommufd::Iommufd>,
}

impl Iommufd {
    /// Opens `/dev/iommu`.
    ///
    /// # Errors
    ///
    /// [`OpenError::File`], where the kernel has no iommufd or the user may not use it.
    pub fn open() -> Result<Self, OpenError> {
        let file = sysfs::open(Path::new("/dev/iommu"))?;
        Ok(Self { fd: Arc::new(iommufd::Iommufd::new(file)) })
    }

    /// An empty address space.
    ///
    /// # Errors
    ///
    /// [`Error::NoLimits`] where the kernel has none for us.
    pub fn ioas(&self) -> Result<Ioas, Error> {
        let no_limits = |errno| Error::NoLimits { errno };
        let id = IoasId::alloc(&self.fd).map_err(no_limits)?;
        let limits = read_limits(&id).map_err(no_limits)?;
        let (iommufd, limits) = (self.clone(), RwLock::new(limits));
        Ok(Ioas { book: Book::new(id), iommufd, limits })
    }
}

/// An IO address space of iommufd, which any number of devices can be attached to.
///
/// # Context
///
/// Any number of threads map and unmap at once, and the kernel works for all of them at once.
#[derive(Debug)]
pub struct Ioas {
    book: Book<IoasId>,
    iommufd: Iommufd,
    limits: RwLock<Limits>,
}

impl Ioas {
    /// A new address space with the device `bdf` attached.
    ///
    /// # Errors
    ///
    /// [`OpenError`], which says what to do.
    pub fn open(bdf: Bdf) -> Result<(Self, Device), OpenError> {
        sysfs::check_bound(bdf)?;
        let failed = |error: Error| OpenError::System {
            request: "IOMMU_IOAS_ALLOC",
            bdf,
            errno: error.errno(),
        };
        let space = Iommufd::open()?.ioas().map_err(failed)?;
        let device = space.attach(bdf)?;
        Ok((space, device))
    }

    /// Opens a device and attaches it. It reaches everything that is mapped.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; [`OpenError::DoesNotFit`] where something is mapped that the device's IOMMU
    /// cannot map.
    pub fn attach(&self, bdf: Bdf) -> Result<Device, OpenError> {
        sysfs::check_bound(bdf)?;
        sysfs::group(bdf)?;
        let fd = DeviceFd::new(sysfs::open(&sysfs::cdev(bdf)?)?);
        let failed = |request| move |errno| OpenError::System { request, bdf, errno };
        fd.bind(self.iommufd.fd.as_fd()).map_err(failed("VFIO_DEVICE_BIND_IOMMUFD"))?;
        fd.attach(self.book.kernel().get()).map_err(|errno| match errno {
            Errno::EPERM => OpenError::UnsafeInterrupts { bdf },
            Errno::EADDRINUSE | Errno::EINVAL => OpenError::DoesNotFit { bdf, errno },
            errno => OpenError::System { request: "VFIO_DEVICE_ATTACH_IOMMUFD_PT", bdf, errno },
        })?;
        let device = Device::new(bdf, fd)?;
        let limits = read_limits(self.book.kernel());
        *self.limits.write() = limits.map_err(failed("IOMMU_IOAS_IOVA_RANGES"))?;
        Ok(device)
    }

    /// Maps the registers of `offsets`, in bytes from the start of `bar`, for the devices of this
    /// space: they access another device without going through memory. The BAR stays mapped, and
    /// its device open, until the range is unmapped.
    ///
    /// A [reset](Device::reset) of that device takes the registers away for good: unmap the range
    /// and map it anew.
    ///
    /// # Errors
    ///
    /// As [`map`](DmaSpace::map). [`Error::OutsideBar`] where the registers are not all mapped into
    /// the process, [`Error::NoDmaBuf`] where the kernel does not give them out as a dma-buf.
    pub fn map_bar(
        &self,
        bar: &Bar,
        offsets: Range<u64>,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Error> {
        let user = bar.user_range(offsets.clone())?;
        let range = IovaRange::from_len(iova, user.len_less_one().saturating_add(1))?;
        let dma_buf = bar.dma_buf(offsets)?;
        self.book.map(&self.limits.read(), range, prot, Some(user), |table| {
            table.map_dma_buf(bar.registers(), &dma_buf, range, prot)
        })
    }

    /// The requests that mapped and unmapped so far.
    pub fn requests(&self) -> Requests {
        self.book.requests()
    }

    /// How many mappings there are.
    pub fn mappings(&self) -> u64 {
        self.book.mappings()
    }

    /// Unmaps everything, and returns how many bytes that was.
    ///
    /// # Errors
    ///
    /// As [`unmap`](DmaSpace::unmap).
    pub fn unmap_all(&self) -> Result<u64, Error> {
        self.book.unmap_all()
    }
}

impl DmaSpace for Ioas {
    type Memory = Arc<Memory>;
    type Error = Error;

    fn map(
        &self,
        memory: &Arc<Memory>,
        user: UserRange,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Error> {
        self.book.map_memory(&self.limits.read(), memory, user, iova, prot)
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Error> {
        self.book.unmap(range)
    }

    /// What can be mapped. iommufd tells no page sizes: the granule alone is there.
    fn limits(&self) -> Limits {
        self.limits.read().clone()
    }

    fn errno(&self, error: &Error) -> Errno {
        error.errno()
    }
}

/// What an address space can map. Without a device the kernel takes any alignment; memory is pinned
/// by whole pages all the same.
fn read_limits(ioas: &IoasId) -> Result<Limits, Errno> {
    let (apertures, alignment) = ioas.iova_ranges()?;
    let granule = alignment.next_power_of_two().max(sys::page_size());
    Ok(Limits { apertures, page_sizes: granule, mappings_left: None })
}
