//! A space of others, and a mapper for it.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Label, Limits, Prot, UserRange};
use dmaspan_linux::Memory;
use dmaspan_linux::plan::{MappedRegions, Mapper};
use dmaspan_linux::vfio::{self, Ioas, Iommufd, Requests, VfioContainer, VfioSpace};
use vfio_ioctls::{VfioError, VfioIommufd, VfioOps};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::errno::Error as SysError;

use crate::guest::{GuestError, guest_region, guest_regions};

/// Memory of a guest that is mapped. It is unmapped when this is dropped, or a part of it by
/// [`MappedRegions::unmap_part`].
pub type MappedGuest = MappedRegions<SharedSpace>;

/// A space of a VMM, into which dmaspan maps beside it, with a mapper. Clones map into the same.
///
/// # Context
///
/// Any number of threads map and unmap at once.
#[derive(Clone, Debug)]
pub struct Shared {
    mapper: Mapper<SharedSpace>,
}

impl Shared {
    /// Takes a container that has a group in it: after the first `VfioDevice::new`.
    ///
    /// # Errors
    ///
    /// [`GuestError::Space`] where it has none.
    ///
    /// # Safety
    ///
    /// What [`VfioContainer::adopt`] asks for: above all, nobody else unmaps what this maps. What
    /// the VMM maps by its own calls, as BARs of devices, stays its own.
    pub unsafe fn container(theirs: Arc<vfio_ioctls::VfioContainer>) -> Result<Self, GuestError> {
        let fd = duplicate(&*theirs)?;
        // SAFETY:
        // 1. It is a container, which vfio-ioctls opened, and the caller promises the rest.
        let space = unsafe { VfioContainer::adopt(fd, IovaRange::ALL) }?;
        Self::of(VfioSpace::Type1(space), Theirs::Container { _kept: theirs })
    }

    /// Takes the address space of an iommufd.
    ///
    /// # Errors
    ///
    /// [`GuestError::Space`] where the kernel does not say what it maps.
    ///
    /// # Safety
    ///
    /// What [`Ioas::adopt`] asks for, as long as this and its clones live: nobody else unmaps what
    /// this maps, or copies it. What the VMM maps by its own calls stays its own.
    pub unsafe fn iommufd(theirs: Arc<VfioIommufd>) -> Result<Self, GuestError> {
        let fd = duplicate(&**theirs.iommufd())?;
        // SAFETY:
        // 1. It is `/dev/iommu`, which iommufd-ioctls opened, and makes no address space.
        let iommufd = unsafe { Iommufd::adopt(fd) }?;
        // SAFETY:
        // 1. The address space is destroyed with `theirs`, which lives as long as this.
        // 2. The caller promises the rest.
        let space = unsafe { Ioas::adopt(&iommufd, theirs.ioas().id(), IovaRange::ALL) }?;
        Self::of(VfioSpace::Ioas(space), Theirs::Iommufd { _kept: theirs })
    }

    fn of(space: VfioSpace, theirs: Theirs) -> Result<Self, GuestError> {
        Ok(Self { mapper: Mapper::new(SharedSpace { space, _theirs: theirs })? })
    }

    /// Maps all memory of a guest at the guest's own addresses, readable and writable: all of it or
    /// nothing. Memory that has no pages yet gets them.
    ///
    /// # Errors
    ///
    /// [`GuestError`]: which region, and why. Nothing is mapped then.
    ///
    /// # Safety
    ///
    /// As [`guest_regions`].
    #[track_caller]
    pub unsafe fn map_guest<M>(&self, guest: &M) -> Result<MappedGuest, GuestError>
    where
        M: GuestMemoryBackend + Clone + Send + Sync + 'static,
    {
        // SAFETY: the caller promises it.
        let regions = unsafe { guest_regions(guest) }?;
        Ok(self.mapper.map(regions)?)
    }

    /// Maps one region more, such as a DIMM that is plugged in. It goes with what is returned.
    ///
    /// # Errors
    ///
    /// As [`map_guest`](Self::map_guest).
    ///
    /// # Safety
    ///
    /// As [`guest_region`].
    #[track_caller]
    pub unsafe fn add_region<R>(&self, region: &Arc<R>) -> Result<MappedGuest, GuestError>
    where
        R: GuestMemoryRegion + Send + Sync + 'static,
    {
        // SAFETY: the caller promises it.
        let region = unsafe { guest_region(region) }?;
        Ok(self.mapper.map([region])?)
    }

    /// Unmaps what was mapped in `range` by [`VfioOps`] or by the [space](Self::space) itself,
    /// gaps or not; how many bytes that was. What a [`MappedGuest`] has is unmapped by that.
    ///
    /// # Errors
    ///
    /// [`vfio::Error::Bisects`] where it would cut a mapping, with nothing changed.
    pub fn unmap(&self, range: IovaRange) -> Result<u64, vfio::Error> {
        self.space().unmap(range)
    }

    /// The space.
    pub fn space(&self) -> &SharedSpace {
        self.mapper.space()
    }

    /// The mapper, which plans and lists.
    pub fn mapper(&self) -> &Mapper<SharedSpace> {
        &self.mapper
    }
}

/// Maps and unmaps as the crate's own types do, but that an unmap of less than its range is none:
/// gaps are permitted, and what would be cut is refused before the kernel is asked.
impl VfioOps for Shared {
    unsafe fn vfio_dma_map(
        &self,
        iova: u64,
        size: usize,
        user_addr: *mut u8,
    ) -> vfio_ioctls::Result<()> {
        let refused = |errno: Errno| VfioError::IommuDmaMap(SysError::new(errno.get()));
        let start = NonNull::new(user_addr).ok_or(VfioError::GetHostAddress)?;
        let len = u64::try_from(size).map_err(|_| refused(Errno::EOVERFLOW))?;
        // SAFETY:
        // 1. It is memory that is accessed atomically or as volatile until it is unmapped (the
        //    caller's promise), and nothing here accesses it. If the caller takes it out of the
        //    process before, nobody reads or writes it there: the kernel has its pages, and the
        //    `Memory` stays in the space.
        let memory = unsafe { Memory::foreign(start, len, ()) };
        let memory = Arc::new(memory.map_err(|error| refused(error.errno()))?);
        let mapped =
            self.space().map(&memory, memory.user_range(), Iova::new(iova), Prot::READ_WRITE);
        mapped.map_err(|error| refused(error.errno()))
    }

    fn vfio_dma_unmap(&self, iova: u64, size: usize) -> vfio_ioctls::Result<()> {
        let refused = |errno: Errno| VfioError::IommuDmaUnmap(SysError::new(errno.get()));
        let len = u64::try_from(size).map_err(|_| refused(Errno::EOVERFLOW))?;
        let range = IovaRange::from_len(Iova::new(iova), len);
        let range = range.map_err(|_| refused(Errno::EINVAL))?;
        self.unmap(range).map(drop).map_err(|error| refused(error.errno()))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The container or the address space itself, a [`DmaSpace`]. It keeps the VMM's.
#[derive(Debug)]
pub struct SharedSpace {
    /// Comes first: it is dropped, which unmaps, while the VMM's lives.
    space: VfioSpace,
    _theirs: Theirs,
}

impl SharedSpace {
    /// The requests that mapped and unmapped so far.
    pub fn requests(&self) -> Requests {
        self.space.requests()
    }

    /// Returns how many mappings there are.
    pub fn mappings(&self) -> u64 {
        self.space.mappings()
    }
}

/// What has to live.
enum Theirs {
    Container { _kept: Arc<vfio_ioctls::VfioContainer> },
    Iommufd { _kept: Arc<VfioIommufd> },
}

impl fmt::Debug for Theirs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Container { .. } => "a container of vfio-ioctls",
            Self::Iommufd { .. } => "an iommufd of vfio-ioctls",
        })
    }
}

impl DmaSpace for SharedSpace {
    type Memory = Arc<Memory>;
    type Error = vfio::Error;

    fn map_labelled(
        &self,
        memory: &Arc<Memory>,
        user: UserRange,
        iova: Iova,
        prot: Prot,
        label: Label,
    ) -> Result<(), vfio::Error> {
        self.space.map_labelled(memory, user, iova, prot, label)
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, vfio::Error> {
        self.space.unmap(range)
    }

    fn mapped_in(&self, range: IovaRange) -> Option<IovaRange> {
        self.space.mapped_in(range)
    }

    fn limits(&self) -> Limits {
        self.space.limits()
    }

    fn errno(&self, error: &vfio::Error) -> Errno {
        error.errno()
    }
}

/// A file descriptor of our own for the file of theirs.
fn duplicate(theirs: &impl AsRawFd) -> Result<OwnedFd, GuestError> {
    // SAFETY: it is the file of `theirs`, which is borrowed meanwhile.
    let fd = unsafe { BorrowedFd::borrow_raw(theirs.as_raw_fd()) };
    let failed = |error: std::io::Error| {
        let errno = Errno::from_raw(error.raw_os_error().unwrap_or_default());
        vfio::Error::NoLimits { errno }
    };
    Ok(fd.try_clone_to_owned().map_err(failed)?)
}
