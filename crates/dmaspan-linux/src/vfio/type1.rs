//! A [`VfioContainer`] is an address space of VFIO type 1, with its groups.

#![expect(unsafe_code, reason = "declares what adopts the files of others")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use dmaspan::container::type1::uapi;
use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Label, Limits, Prot, UserRange};
use parking_lot::{Mutex, RwLock};

use super::adopt::{device_file, within};
use super::backend::Backend;
use super::bar::Bar;
use super::device::VfioDevice;
use super::dirty::{self, DirtyLogging, DirtyPages};
use super::error::{Error, OpenError};
use super::opening::Candidate;
use super::{SpaceMapping, SpaceSource};
use crate::log;
use crate::mem::Memory;
use crate::os;
use crate::pci::Bdf;
use crate::sys;
use crate::sys::kernel_mapping::{LockedBy, Requests};
use crate::sys::mapping::Mapping;
use crate::sys::mapping_table::{Gaps, MappingTable, WantedMapping};
use crate::sys::uapi::vfio::CapHeader;
use crate::sys::vfio::{Container, Group, read};

/// A VFIO container of type 1 (version 2): an address space for the devices of the groups that are
/// in it.
///
/// # Context
///
/// Any number of threads map and unmap at once; the kernel lets them take turns.
///
/// A group stays in the container until that is dropped, also when its devices are closed: what can
/// be mapped shrinks with each group, and does not grow again.
#[derive(Debug)]
pub struct VfioContainer {
    /// The interface that answers the requests.
    backend: Backend,
    table: MappingTable<Container>,
    /// What can be mapped with the groups that are in it; `mappings_left` counts from none.
    limits: RwLock<Arc<Limits>>,
    groups: Mutex<BTreeMap<u32, Group>>,
    /// The part of the addresses that is mapped here, where others have the rest.
    part: Option<IovaRange>,
}

impl VfioContainer {
    /// A container of VFIO with the group of `bdf` in it, and that device.
    ///
    /// # Errors
    ///
    /// [`OpenError`], which says what to do.
    pub fn open(bdf: Bdf) -> Result<(Self, VfioDevice), OpenError> {
        Self::open_by(Backend::Vfio, CONTAINER, LockedBy::Process, bdf)
    }

    /// As [`open`](Self::open), of iommufd, which serves the same requests.
    ///
    /// # Errors
    ///
    /// [`OpenError`], which says what to do.
    pub fn open_compat(bdf: Bdf) -> Result<(Self, VfioDevice), OpenError> {
        // It counts as iommufd does, whoever asks.
        Self::open_by(Backend::Compat, IOMMUFD, LockedBy::User, bdf)
    }

    /// Takes `part` of a container that others made, such as a VMM's, which has groups in it and
    /// its IOMMU set: `fd` is a duplicate of theirs, of VFIO or of iommufd in its place. What is
    /// mapped here lies in `part` alone: the [limits](DmaSpace::limits) have the apertures that
    /// `part` has. What this knows is what was mapped by it, also where it counts mappings: others
    /// use up the same limit of the kernel. Unmapping takes away what it has mapped and nothing
    /// that lies between: a request for each run of neighbours. Dropping it unmaps all of that, and
    /// leaves the container to those who made it.
    ///
    /// `part` may be all addresses ([`IovaRange::ALL`]) for a caller that chooses each IOVA. A
    /// [`Mapper`](crate::plan::Mapper) that chooses them itself needs a part in which others map
    /// nothing, as it is refused where they do.
    ///
    /// ```no_run
    /// use std::os::fd::AsFd;
    ///
    /// use dmaspan::{Iova, IovaRange};
    /// use dmaspan_linux::plan::Mapper;
    /// use dmaspan_linux::vfio::VfioContainer;
    ///
    /// /// Maps above 1 TiB, beside a VMM which has `container` open.
    /// ///
    /// /// # Safety
    /// ///
    /// /// It is a container whose IOMMU is set. While the mapper lives, the VMM unmaps below 1 TiB
    /// /// alone.
    /// unsafe fn above_1_tib(
    ///     container: impl AsFd,
    /// ) -> Result<Mapper<VfioContainer>, Box<dyn std::error::Error>> {
    ///     let part = IovaRange::from_len(Iova::new(1 << 40), 1 << 40)?;
    ///     let fd = container.as_fd().try_clone_to_owned()?;
    ///     // SAFETY: the caller promises it.
    ///     let space = unsafe { VfioContainer::adopt(fd, part)? };
    ///     Ok(Mapper::new(space)?)
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where `fd` is no device file or has no type 1 (version 2),
    /// [`Error::NoLimits`] where its IOMMU is not set.
    ///
    /// # Safety
    ///
    /// `fd` is an open container of VFIO, or `/dev/iommu` with an address space for its requests.
    /// Until this is dropped, nobody else unmaps what this has mapped, as taking the last group out
    /// of a container does. Nor does anybody give `/dev/iommu` another address space for its
    /// requests (`IOMMU_VFIO_IOAS`), destroy the one that it has, or copy from it
    /// (`IOMMU_IOAS_COPY`) what this has mapped: an unmap would leave that to devices.
    pub unsafe fn adopt(fd: OwnedFd, part: IovaRange) -> Result<Self, Error> {
        let file = device_file(fd)?;
        let device =
            file.metadata().map_err(|error| Error::NoLimits { errno: os::errno(&error) })?;
        let (backend, locked_by) = match device.rdev() {
            VFIO_DEVICE => (Backend::Vfio, LockedBy::Process),
            _ => (Backend::Compat, LockedBy::User),
        };
        let container = Container::new(file, locked_by);
        if container.extension(uapi::VFIO_TYPE1V2_IOMMU).is_ok_and(|has| has == 0) {
            return Err(Error::Unsupported {
                what: "the container has no IOMMU of type 1, version 2",
                advice: "adopt one whose VFIO_SET_IOMMU chose VFIO_TYPE1v2_IOMMU",
            });
        }
        let limits =
            read_limits(&container, Some(part)).map_err(|errno| Error::NoLimits { errno })?;
        Ok(Self {
            backend,
            table: MappingTable::new(container, Gaps::OfOthers),
            limits: RwLock::new(Arc::new(limits)),
            groups: Mutex::default(),
            part: Some(part),
        })
    }

    fn open_by(
        backend: Backend,
        path: &str,
        locked_by: LockedBy,
        bdf: Bdf,
    ) -> Result<(Self, VfioDevice), OpenError> {
        let candidate = Candidate::find(backend, bdf)?;
        let container = Container::new(candidate.open(Path::new(path))?, locked_by);
        let failed = |request| move |errno| OpenError::System { request, bdf, errno };
        let version = container.api_version().map_err(failed("VFIO_GET_API_VERSION"))?;
        let type1 = container.extension(uapi::VFIO_TYPE1V2_IOMMU);
        if version != uapi::VFIO_API_VERSION.cast_signed() || type1.is_ok_and(|has| has == 0) {
            return Err(candidate.explain(OpenError::Unsupported {
                what: "the kernel has no VFIO of type 1, version 2",
                advice: "`modprobe vfio_iommu_type1`",
            }));
        }
        let group = open_group(&container, &candidate)?;
        let set = container.set_iommu(uapi::VFIO_TYPE1V2_IOMMU);
        set.map_err(|errno| match errno {
            Errno::EPERM => candidate.not_permitted("VFIO_SET_IOMMU"),
            errno => OpenError::System { request: "VFIO_SET_IOMMU", bdf, errno },
        })?;
        let device = open_device(&group, &candidate)?;
        let limits = read_limits(&container, None).map_err(failed("VFIO_IOMMU_GET_INFO"))?;
        let space = Self {
            backend,
            table: MappingTable::new(container, Gaps::Empty),
            limits: RwLock::new(Arc::new(limits)),
            groups: Mutex::new(BTreeMap::from([(candidate.group, group)])),
            part: None,
        };
        Ok((space, device))
    }

    /// Opens another device, and puts its group into the container. It reaches everything that is
    /// mapped.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; [`OpenError::DoesNotFit`] where something is mapped that the device's IOMMU
    /// cannot map.
    pub fn attach(&self, bdf: Bdf) -> Result<VfioDevice, OpenError> {
        let candidate = Candidate::find(self.backend, bdf)?;
        let mut groups = self.groups.lock();
        if let Some(group) = groups.get(&candidate.group) {
            return open_device(group, &candidate);
        }
        // The group leaves the container again where the device cannot be opened.
        let group = open_group(self.table.kernel(), &candidate).map_err(|error| match error {
            // What is mapped is not in the group's apertures (vfio_iommu_type1_attach_group).
            OpenError::System { request: SET_CONTAINER, bdf, errno: errno @ Errno::EINVAL } => {
                OpenError::DoesNotFit { bdf, errno }
            }
            other => other,
        })?;
        let device = open_device(&group, &candidate)?;
        let system = |errno| OpenError::System { request: "VFIO_IOMMU_GET_INFO", bdf, errno };
        let now = read_limits(self.table.kernel(), self.part).map_err(system)?;
        let mut limits = self.limits.write();
        // The limit of mappings is the container's from the start.
        *limits = Arc::new(Limits { mappings_left: limits.mappings_left, ..now });
        drop(limits);
        groups.insert(candidate.group, group);
        log::info!("{bdf} was attached: it reaches all that is mapped in the container");
        Ok(device)
    }

    /// Maps the registers of `offsets`, in bytes from the start of `bar`, for the devices of this
    /// space: they access another device without going through memory. The BAR stays mapped, and
    /// its device open, until the range is unmapped.
    ///
    /// # Errors
    ///
    /// As [`map`](DmaSpace::map). [`Error::OutsideBar`] where the registers are not all mapped into
    /// the process, [`Error::NotPinnable`] from iommufd's compatibility mode, which cannot map
    /// registers.
    #[track_caller]
    pub fn map_bar(
        &self,
        bar: &Bar,
        offsets: Range<u64>,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Error> {
        let user = bar.user_range(offsets)?;
        let range = IovaRange::from_len(iova, user.len_less_one().saturating_add(1))?;
        let limits = Arc::clone(&self.limits.read());
        let (source, label) = (SpaceSource::Bar, Label::caller());
        let wanted = WantedMapping { prot, user: Some(user), source, label };
        self.table.map(&limits, range, wanted, |table| {
            table.map_registers(bar.registers(), user, range, prot)
        })
    }

    /// Begins to note what devices write, or ends it (Linux 5.8). VFIO notes it in software: all
    /// that is mapped for a device that does DMA by itself counts as written.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where nothing is noted, as in iommufd's compatibility mode.
    pub fn set_dirty_tracking(&self, tracking: DirtyLogging) -> Result<(), Error> {
        let flags = match tracking {
            DirtyLogging::On => uapi::VFIO_IOMMU_DIRTY_PAGES_FLAG_START,
            DirtyLogging::Off => uapi::VFIO_IOMMU_DIRTY_PAGES_FLAG_STOP,
        };
        let set = self.table.kernel().dirty_pages(flags);
        let error = |errno| Error::Setting { request: DIRTY_PAGES, errno };
        set.map_err(|errno| error(errno).of_request(DIRTY_PAGES, UNTRACKED, ADVICE))
    }

    /// Adds to `bitmap` the pages that devices may have written since the tracking began or they
    /// were read, and clears the notes. It reports nothing of what is not mapped; a caller that
    /// unmaps a range and wants to know what was written there reads it before.
    ///
    /// # Errors
    ///
    /// [`Error`]: [`Error::Bisects`] where the bitmap's range covers a part of a mapping,
    /// [`Error::System`] where the tracking is off. What was read before an error is in the bitmap.
    pub fn read_dirty(&self, bitmap: &mut DirtyPages) -> Result<(), Error> {
        let granule = self.limits.read().granule();
        let ask = |container: &Container, range: IovaRange, bits: &Mapping| {
            container.read_dirty(range, granule, bits)
        };
        let read = dirty::read(&self.table, granule, bitmap, DIRTY_PAGES, ask);
        read.map_err(|error| error.of_request(DIRTY_PAGES, UNTRACKED, ADVICE))
    }

    /// The requests that mapped and unmapped so far.
    pub fn requests(&self) -> Requests {
        self.table.requests()
    }

    /// Returns how many mappings there are.
    pub fn mappings(&self) -> u64 {
        self.table.mappings()
    }

    /// Unmaps everything, and returns how many bytes that was.
    ///
    /// # Errors
    ///
    /// As [`unmap`](DmaSpace::unmap).
    pub fn unmap_all(&self) -> Result<u64, Error> {
        self.table.unmap_all()
    }
}

impl VfioContainer {
    /// The first mapping that has an address in `range`.
    pub(super) fn listed_in(&self, range: IovaRange) -> Option<SpaceMapping> {
        self.table.listed_in(range)
    }
}

impl DmaSpace for VfioContainer {
    type Memory = Arc<Memory>;
    type Error = Error;

    fn map_labelled(
        &self,
        memory: &Arc<Memory>,
        user: UserRange,
        iova: Iova,
        prot: Prot,
        label: Label,
    ) -> Result<(), Error> {
        let limits = Arc::clone(&self.limits.read());
        self.table.map_memory(&limits, memory, user, iova, prot, label)
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Error> {
        self.table.unmap(range)
    }

    fn mapped_in(&self, range: IovaRange) -> Option<IovaRange> {
        self.table.first_in(range)
    }

    fn limits(&self) -> Limits {
        let mut limits = Limits::clone(&self.limits.read());
        let left = |most: u64| most.saturating_sub(self.table.mappings());
        limits.mappings_left = limits.mappings_left.map(left);
        limits
    }

    fn errno(&self, error: &Error) -> Errno {
        error.errno()
    }
}

/// What a container of VFIO is opened by, and one of iommufd.
const CONTAINER: &str = "/dev/vfio/vfio";
const IOMMUFD: &str = "/dev/iommu";

/// The number of the former's device: `MISC_MAJOR` 10 (include/uapi/linux/major.h) and `VFIO_MINOR`
/// 196 (include/linux/miscdevice.h). The latter has no number of its own.
const VFIO_DEVICE: u64 = 10 << 8 | 196;

const DIRTY_PAGES: &str = "VFIO_IOMMU_DIRTY_PAGES";
const UNTRACKED: &str = "this kernel does not note what devices write";
const ADVICE: &str = "take all that is mapped for dirty, or use iommufd's page tables";
const SET_CONTAINER: &str = "VFIO_GROUP_SET_CONTAINER";
const GET_DEVICE: &str = "VFIO_GROUP_GET_DEVICE_FD";

/// Opens the group of a device and puts it into a container.
fn open_group(container: &Container, candidate: &Candidate) -> Result<Group, OpenError> {
    let bdf = candidate.bdf();
    let group = Group::new(candidate.open_group()?);
    let failed = |request| move |errno| OpenError::System { request, bdf, errno };
    if !group.is_viable().map_err(failed("VFIO_GROUP_GET_STATUS"))? {
        return Err(candidate.explain(OpenError::NotViable { bdf, group: candidate.group }));
    }
    group.set_container(container).map_err(|errno| match errno {
        Errno::EPERM => candidate.not_permitted(SET_CONTAINER),
        Errno::EBUSY => candidate.explain(OpenError::InUse { bdf }),
        errno => OpenError::System { request: SET_CONTAINER, bdf, errno },
    })?;
    Ok(group)
}

fn open_device(group: &Group, candidate: &Candidate) -> Result<VfioDevice, OpenError> {
    let bdf = candidate.bdf();
    let fd = group.device(&bdf.to_string()).map_err(|errno| match errno {
        Errno::EBUSY => candidate.explain(OpenError::InUse { bdf }),
        // iommufd attaches the device only now.
        Errno::EPERM => candidate.not_permitted(GET_DEVICE),
        Errno::EADDRINUSE => OpenError::DoesNotFit { bdf, errno },
        errno => OpenError::System { request: GET_DEVICE, bdf, errno },
    })?;
    VfioDevice::new(bdf, fd)
}

/// What a container can map (`VFIO_IOMMU_GET_INFO`).
fn read_limits(container: &Container, part: Option<IovaRange>) -> Result<Limits, Errno> {
    let answer = container.info()?;
    let info = answer.info;
    let page_sizes = if info.flags & uapi::VFIO_IOMMU_INFO_PGSIZES != 0 && info.iova_pgsizes != 0 {
        info.iova_pgsizes
    } else {
        sys::page_size()
    };
    let has_caps = info.flags & uapi::VFIO_IOMMU_INFO_CAPS != 0;
    let cap = |id| answer.capability(info.cap_offset, id).filter(|_| has_caps);
    let body = |id| cap(id).and_then(|bytes| bytes.get(size_of::<CapHeader>()..));
    let mappings_left =
        body(uapi::VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL).and_then(read::<u32>).map(u64::from);
    let apertures = match body(uapi::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE) {
        Some(bytes) => apertures(bytes),
        // Linux before 5.4 does not say.
        None => IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).into_iter().collect(),
    };
    Ok(within(Limits { apertures, page_sizes, mappings_left }, part))
}

/// The ranges of `struct vfio_iommu_type1_info_cap_iova_range` behind its header: their number, 32
/// reserved bits, and of each the first and the last address.
fn apertures(bytes: &[u8]) -> Vec<IovaRange> {
    let count = read::<u32>(bytes).and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
    let ranges = bytes.get(8..).unwrap_or_default().as_chunks::<16>().0.iter().take(count);
    let range = |bytes: &[u8; 16]| {
        let [first, last]: [u64; 2] = read(bytes)?;
        IovaRange::new(Iova::new(first), Iova::new(last))
    };
    ranges.filter_map(range).collect()
}
