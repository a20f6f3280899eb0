//! An [`Ioas`] is an address space of iommufd.

#![expect(unsafe_code, reason = "declares what adopts the files of others")]

use std::fs;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Label, Limits, Prot, UserRange};
use parking_lot::{RwLock, RwLockReadGuard};

use super::adopt::{device_file, within};
use super::backend::Backend;
use super::bar::Bar;
use super::device::VfioDevice;
use super::error::{Error, OpenError};
use super::hwpt::Binding;
use super::opening::{self, Candidate};
use super::{SpaceMapping, SpaceSource};
use crate::log;
use crate::mem::Memory;
use crate::pci::Bdf;
use crate::sys;
use crate::sys::iommufd::{self, IoasId};
use crate::sys::kernel_mapping::{LockedBy, Requests};
use crate::sys::mapping_table::{self, Gaps, MappingTable, WantedMapping};
use crate::sys::uapi::iommufd as uapi;
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
        let file = opening::open(Path::new("/dev/iommu"))?;
        Ok(Self { fd: Arc::new(iommufd::Iommufd::new(file)) })
    }

    /// Takes a `/dev/iommu` that others have open too, such as a VMM's: `fd` is a duplicate of
    /// theirs. [`Ioas::adopt`] maps in their address spaces, and [`ioas`](Self::ioas) makes new
    /// ones, which [`Ioas::copy`] copies to and from without pinning anew.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where `fd` is no device file.
    ///
    /// # Safety
    ///
    /// `fd` is an open `/dev/iommu`. Nobody destroys the address spaces that are made here, nor
    /// maps or unmaps in them, nor copies from them (`IOMMU_IOAS_COPY`), by their numbers: an unmap
    /// here would leave a copy to devices.
    pub unsafe fn adopt(fd: OwnedFd) -> Result<Self, Error> {
        let file = device_file(fd)?;
        let fd = iommufd::Iommufd::new(file);
        fd.read_locked_by();
        Ok(Self { fd: Arc::new(fd) })
    }

    /// Sets what pinned memory is counted against: the user, unless this says otherwise.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`]: it takes `CAP_SYS_RESOURCE`, and comes before all address spaces.
    pub fn set_accounting(&self, locked_by: LockedBy) -> Result<(), Error> {
        let set = self.fd.set_locked_by(locked_by);
        set.map_err(|errno| Error::Setting { request: "IOMMU_OPTION", errno })
    }

    /// Returns what pinned memory is counted against.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`], where the kernel does not say: it takes `CAP_SYS_RESOURCE`.
    pub fn accounting(&self) -> Result<LockedBy, Error> {
        let value = self.fd.get_option(0, uapi::OPTION_RLIMIT_MODE);
        let value = value.map_err(|errno| Error::Setting { request: "IOMMU_OPTION", errno })?;
        Ok(if value == 0 { LockedBy::User } else { LockedBy::Process })
    }

    /// An empty address space.
    ///
    /// # Errors
    ///
    /// [`Error::NoLimits`] where the kernel has none for us.
    pub fn ioas(&self) -> Result<Ioas, Error> {
        let id = IoasId::alloc(&self.fd).map_err(|errno| Error::NoLimits { errno })?;
        Ioas::of(self, id, None)
    }
}

/// Says whether larger pages than the smallest are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HugePages {
    /// They are.
    On,
    /// They are not.
    Off,
}

/// An IO address space of iommufd, which any number of devices can be attached to.
///
/// What can be mapped is what all its devices can: it shrinks when one is attached, and grows again
/// when one is closed. A mapping that is refused by what was known asks the kernel once more, and
/// so does [`limits`](DmaSpace::limits).
///
/// # Context
///
/// Any number of threads map and unmap at once, and the kernel works for all of them at once.
#[derive(Debug)]
pub struct Ioas {
    table: MappingTable<IoasId>,
    iommufd: Iommufd,
    /// As of the last time that the kernel was asked.
    limits: RwLock<Arc<Limits>>,
    /// The part of the addresses that is mapped here, where others have the rest.
    part: Option<IovaRange>,
    /// Held while a BAR is mapped, and shared by what may take one from a page table.
    bars: RwLock<()>,
}

/// The first Linux in which a page table takes a BAR from another one as the registers that they
/// are. A distribution may have mended an older one, which its number does not say: it is taken for
/// one that was not, as it costs an order of calls alone.
const KEEPS_BARS: [u32; 3] = [7, 3, 4];

/// Whether page tables keep BARs in the kernel of this name; not where that has no version.
fn keeps_bars(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let version = [(); 3].map(|()| numbers.next().and_then(|n| n.parse().ok()).unwrap_or(0));
    version >= KEEPS_BARS
}

/// Whether it is a dma-buf, of which the kernel maps those of registers. By its name, as the file
/// system of a stranger's file may never answer.
fn is_dma_buf(file: BorrowedFd<'_>) -> bool {
    let name = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    name.is_ok_and(|name| name.as_os_str().as_encoded_bytes().starts_with(b"/dmabuf:"))
}

impl Ioas {
    fn of(iommufd: &Iommufd, id: IoasId, part: Option<IovaRange>) -> Result<Self, Error> {
        let limits = read_limits(&id, part).map_err(|errno| Error::NoLimits { errno })?;
        let (iommufd, limits) = (iommufd.clone(), RwLock::new(Arc::new(limits)));
        let gaps = if part.is_some() { Gaps::OfOthers } else { Gaps::Empty };
        let bars = RwLock::new(());
        Ok(Self { table: MappingTable::new(id, gaps), iommufd, limits, part, bars })
    }

    /// Takes `part` of an address space that others made by `iommufd`, such as that of a VMM's
    /// devices, whose number is `ioas_id`. What is mapped here lies in `part` alone: the
    /// [limits](DmaSpace::limits) have the apertures that `part` has, and what this knows and
    /// counts is what was mapped by it. Unmapping takes away what it has mapped and nothing that
    /// lies between: a request for each run of neighbours. Dropping it unmaps all of that, and
    /// leaves the address space to those who made it.
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
    /// use dmaspan_linux::vfio::{Ioas, Iommufd};
    ///
    /// /// Maps above 1 TiB, beside a VMM which has `iommufd` open.
    /// ///
    /// /// # Safety
    /// ///
    /// /// While the mapper lives, the VMM keeps the address space, and unmaps below 1 TiB alone.
    /// unsafe fn above_1_tib(
    ///     iommufd: impl AsFd,
    ///     ioas_id: u32,
    /// ) -> Result<Mapper<Ioas>, Box<dyn std::error::Error>> {
    ///     let part = IovaRange::from_len(Iova::new(1 << 40), 1 << 40)?;
    ///     let fd = iommufd.as_fd().try_clone_to_owned()?;
    ///     // SAFETY: it is `/dev/iommu`, and of the address space the caller promises it.
    ///     let space = unsafe { Ioas::adopt(&Iommufd::adopt(fd)?, ioas_id, part)? };
    ///     Ok(Mapper::new(space)?)
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NoLimits`] where `ioas_id` is the number of no address space.
    ///
    /// # Safety
    ///
    /// Until this is dropped, nobody destroys the address space, and nobody else unmaps what this
    /// has mapped or copies it to another address space (`IOMMU_IOAS_COPY`): an unmap here would
    /// leave the copy to devices.
    pub unsafe fn adopt(iommufd: &Iommufd, ioas_id: u32, part: IovaRange) -> Result<Self, Error> {
        Self::of(iommufd, IoasId::of_others(&iommufd.fd, ioas_id), Some(part))
    }

    /// A new address space with the device `bdf` attached.
    ///
    /// # Errors
    ///
    /// [`OpenError`], which says what to do.
    pub fn open(bdf: Bdf) -> Result<(Self, VfioDevice), OpenError> {
        let candidate = Candidate::find(Backend::Iommufd, bdf)?;
        let failed = |error: Error| OpenError::System {
            request: "IOMMU_IOAS_ALLOC",
            bdf,
            errno: error.errno(),
        };
        let iommufd = Iommufd::open().map_err(|error| candidate.explain(error))?;
        let space = iommufd.ioas().map_err(failed)?;
        let device = space.attach_candidate(&candidate)?;
        Ok((space, device))
    }

    /// Opens a device and attaches it. It reaches everything that is mapped.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; [`OpenError::DoesNotFit`] where something is mapped that the device's IOMMU
    /// cannot map; [`OpenError::BarMapped`].
    pub fn attach(&self, bdf: Bdf) -> Result<VfioDevice, OpenError> {
        self.attach_candidate(&Candidate::find(Backend::Iommufd, bdf)?)
    }

    fn attach_candidate(&self, candidate: &Candidate) -> Result<VfioDevice, OpenError> {
        let (device, id) = self.attach_unbound(candidate)?;
        let iommufd = Arc::clone(&self.iommufd.fd);
        Ok(device.bound(Binding { iommufd, id }))
    }

    /// Opens a device and attaches it, for as long as its file is open: no other address space
    /// takes it. Its number, too.
    pub(super) fn attach_unbound(
        &self,
        candidate: &Candidate,
    ) -> Result<(VfioDevice, u32), OpenError> {
        let bdf = candidate.bdf();
        drop(self.before_table(bdf)?);
        let fd = DeviceFd::new(candidate.open_cdev()?);
        let bound = fd.bind(self.iommufd.fd.as_fd());
        let id = bound.map_err(|errno| bind_error(candidate, errno))?;
        // Again, as another thread may have mapped one.
        let no_bar = self.before_table(bdf)?;
        let attached = fd.attach(self.table.kernel().get());
        drop(no_bar);
        attached.map_err(|errno| attach_error(bdf, errno))?;
        let device = VfioDevice::new(bdf, fd)?;
        self.refresh();
        log::info!("{bdf} was attached: it reaches all that is mapped in the space");
        Ok((device, id))
    }

    /// Maps the registers of `offsets`, in bytes from the start of `bar`, for the devices of this
    /// space: they access another device without going through memory. The BAR stays mapped, and
    /// its device open, until the range is unmapped.
    ///
    /// A [reset](VfioDevice::reset) of that device takes the registers away for good: unmap the
    /// range and map it anew.
    ///
    /// Linux before 7.3.4 makes memory of a BAR when a page table takes it from another one, so
    /// that there nothing may: attach all devices before, and map a BAR in each space rather than
    /// [copy](Self::copy) it. Such requests are refused here; others who attach devices to an
    /// [adopted](Self::adopt) space see to it themselves.
    ///
    /// # Errors
    ///
    /// As [`map`](DmaSpace::map). [`Error::OutsideBar`] where the registers are not all mapped into
    /// the process, [`Error::NoDmaBuf`] where the kernel does not give them out as a dma-buf.
    #[track_caller]
    pub fn map_bar(
        &self,
        bar: &Bar,
        offsets: Range<u64>,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Error> {
        let user = bar.user_range(offsets.clone())?;
        let len = user.len_less_one().saturating_add(1);
        let range = IovaRange::from_len(iova, len)?;
        let limits = Arc::clone(&self.limits.read());
        // The kernel's own answer to a dma-buf that is none of whole pages says less.
        mapping_table::check(&limits, "the user address", user.start().get())?;
        mapping_table::check(&limits, "the length", len)?;
        let dma_buf = bar.dma_buf(offsets)?;
        let (source, label) = (SpaceSource::Bar, Label::caller());
        let wanted = WantedMapping { prot, user: Some(user), source, label };
        // No page table comes meanwhile: all that are there get it from the dma-buf.
        let _bars = self.bars.write();
        self.table.map(&limits, range, wanted, |table| {
            table.map_dma_buf(bar.registers(), &dma_buf, range, prot)
        })
    }

    /// Moves a device here that was opened by another address space, or attached to a page table,
    /// of the same `/dev/iommu`. What is mapped alike in both stays mapped for it meanwhile.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; [`OpenError::DoesNotFit`] where something is mapped that the device's IOMMU
    /// cannot map; [`OpenError::BarMapped`]. The device stays where it was.
    pub fn reattach(&self, device: &VfioDevice) -> Result<(), OpenError> {
        let _no_bar = self.before_table(device.bdf())?;
        self.move_to(device, self.table.kernel().get())
    }

    /// Detaches a device, which stays open and reaches nothing.
    ///
    /// # Errors
    ///
    /// [`OpenError`], where the device is of another `/dev/iommu`, or the kernel refuses.
    pub fn detach(&self, device: &VfioDevice) -> Result<(), OpenError> {
        self.device_id(device)?;
        let (request, bdf) = ("VFIO_DEVICE_DETACH_IOMMUFD_PT", device.bdf());
        device.fd().detach().map_err(|errno| OpenError::System { request, bdf, errno })
    }

    /// Moves a device to this address space or a page table of it.
    pub(super) fn move_to(&self, device: &VfioDevice, id: u32) -> Result<(), OpenError> {
        self.device_id(device)?;
        let moved = device.fd().attach(id);
        moved.map_err(|errno| attach_error(device.bdf(), errno))?;
        self.refresh();
        Ok(())
    }

    /// Maps `len` bytes from `offset` of a file in memory or a dma-buf at `iova` (Linux 6.13). The
    /// kernel holds the memory, which need not be mapped in this process.
    ///
    /// # Errors
    ///
    /// [`Error`]; [`Error::Unsupported`] where the kernel cannot.
    #[track_caller]
    pub fn map_file(
        &self,
        file: impl AsFd,
        offset: u64,
        len: u64,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Error> {
        let range = IovaRange::from_len(iova, len)?;
        let is_bar = is_dma_buf(file.as_fd());
        let source = if is_bar { SpaceSource::Bar } else { SpaceSource::File };
        let _bars = is_bar.then(|| self.bars.write());
        let label = Label::caller();
        let wanted = WantedMapping { prot, user: None, source, label };
        let mapped = self.with_limits(|limits| {
            mapping_table::check(limits, "the offset", offset)?;
            self.table.map(limits, range, wanted, |table| {
                table.map_file(file.as_fd(), offset, range, prot)
            })
        });
        mapped.map_err(|error| {
            error.of_request(
                "IOMMU_IOAS_MAP_FILE",
                "this kernel maps no files for devices (IOMMU_IOAS_MAP_FILE)",
                "Linux 6.13 does; map the file's memory of the process instead",
            )
        })
    }

    /// Maps at `iova` what `from`, of the same `/dev/iommu`, has at `range`, without pinning it
    /// again. Unmapping one leaves the other.
    ///
    /// # Errors
    ///
    /// [`Error::NotMapped`] where not all of `range` is mapped, [`Error::Busy`] while a part of it
    /// is unmapped, [`Error::BarCopied`], and as [`map`](DmaSpace::map). While the copy is made,
    /// unmapping its source is refused with [`Error::Busy`].
    #[track_caller]
    pub fn copy(&self, from: &Self, range: IovaRange, iova: Iova, prot: Prot) -> Result<(), Error> {
        let label = Label::caller();
        let _no_bar = self.before_copy(from, range)?;
        let copied = self
            .with_limits(|limits| self.table.copy(limits, &from.table, range, iova, prot, label));
        copied.map_err(|error| {
            let what = "this kernel copies no mappings (IOMMU_IOAS_COPY)";
            error.of_request("IOMMU_IOAS_COPY", what, "map the memory again")
        })
    }

    /// As [`copy`](Self::copy), and maps the memory itself where the kernel refuses that.
    pub(super) fn copy_or_map(
        &self,
        from: &Self,
        range: IovaRange,
        iova: Iova,
        prot: Prot,
        label: Label,
    ) -> Result<(), Error> {
        let _no_bar = self.before_copy(from, range)?;
        self.with_limits(|limits| {
            self.table.copy_or_map(limits, &from.table, range, iova, prot, label)
        })
    }

    /// Refuses where the two are not of the same open file, or a BAR would become memory, which no
    /// thread maps until this is dropped.
    fn before_copy<'s>(
        &self,
        from: &'s Self,
        range: IovaRange,
    ) -> Result<RwLockReadGuard<'s, ()>, Error> {
        if !Arc::ptr_eq(&self.iommufd.fd, &from.iommufd.fd) {
            return Err(Error::Unsupported {
                what: "the two address spaces are of two open files",
                advice: "make both by one Iommufd",
            });
        }
        let no_bar = from.bars.read();
        match from.bar_lost_in(range) {
            Some((range, release)) => Err(Error::BarCopied { range, release }),
            None => Ok(no_bar),
        }
    }

    /// Refuses where a page table that comes, for `bdf`, would make memory of a BAR, which no
    /// thread maps until this is dropped.
    pub(super) fn before_table(&self, bdf: Bdf) -> Result<RwLockReadGuard<'_, ()>, OpenError> {
        let no_bar = self.bars.read();
        match self.bar_lost_in(IovaRange::ALL) {
            Some((range, release)) => Err(OpenError::BarMapped { bdf, range, release }),
            None => Ok(no_bar),
        }
    }

    /// The first BAR in `range`, where this kernel makes memory of it, and what that is called.
    fn bar_lost_in(&self, range: IovaRange) -> Option<(IovaRange, String)> {
        let bar = self.table.bar_in(range)?;
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        (!keeps_bars(&release)).then(|| (bar, release.trim().to_owned()))
    }

    /// Promises that these ranges stay mappable: a device that cannot map them is refused. Of them
    /// alone a kernel chooses IOVAs; mappings may lie elsewhere all the same. None is all.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where a device that is attached keeps a part of them for itself;
    /// [`Error::Setting`] where two overlap.
    pub fn allow_iovas(&self, ranges: &[IovaRange]) -> Result<(), Error> {
        self.table.kernel().allow_iovas(ranges).map_err(|errno| match errno {
            Errno::EADDRINUSE => Error::Unsupported {
                what: "a device that is attached cannot map all of the ranges",
                advice: "choose some in the apertures of the limits",
            },
            errno => Error::Setting { request: "IOMMU_IOAS_ALLOW_IOVAS", errno },
        })
    }

    /// Returns whether larger pages than the smallest are mapped where the memory permits it, as
    /// they are at first.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] where something is mapped that the smallest pages cannot map.
    pub fn set_huge_pages(&self, pages: HugePages) -> Result<(), Error> {
        let (kernel, value) = (self.table.kernel(), u64::from(pages == HugePages::On));
        let set = kernel.iommufd().set_option(kernel.get(), uapi::OPTION_HUGE_PAGES, value);
        set.map_err(|errno| Error::Setting { request: "IOMMU_OPTION", errno })?;
        self.refresh();
        Ok(())
    }

    /// Returns whether larger pages are mapped.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`], where the kernel does not say.
    pub fn huge_pages(&self) -> Result<HugePages, Error> {
        let kernel = self.table.kernel();
        let value = kernel.iommufd().get_option(kernel.get(), uapi::OPTION_HUGE_PAGES);
        let value = value.map_err(|errno| Error::Setting { request: "IOMMU_OPTION", errno })?;
        Ok(if value == 0 { HugePages::Off } else { HugePages::On })
    }

    /// The file that it is of, for address spaces beside it.
    pub fn iommufd(&self) -> &Iommufd {
        &self.iommufd
    }

    /// Its number, by which others who have the same `/dev/iommu` open attach their devices to it
    /// (`VFIO_DEVICE_ATTACH_IOMMUFD_PT`).
    pub fn number(&self) -> u32 {
        self.table.kernel().get()
    }

    pub(super) fn id(&self) -> &IoasId {
        self.table.kernel()
    }

    pub(super) fn table(&self) -> &MappingTable<IoasId> {
        &self.table
    }

    /// The smallest page, in bytes.
    pub(super) fn granule(&self) -> u64 {
        self.refresh().granule()
    }

    /// Asks the kernel what can be mapped.
    pub(super) fn refresh(&self) -> Arc<Limits> {
        // Under the lock, so that the last to ask is the last to write.
        let mut limits = self.limits.write();
        if let Ok(now) = read_limits(self.table.kernel(), self.part) {
            *limits = Arc::new(now);
        }
        Arc::clone(&limits)
    }

    /// Does `map` with what can be mapped. No lock is held meanwhile.
    fn with_limits(&self, map: impl Fn(&Limits) -> Result<(), Error>) -> Result<(), Error> {
        let known = Arc::clone(&self.limits.read());
        let error = match map(&known) {
            // A device may have come or gone since. Nothing is mapped yet.
            Err(
                error @ (Error::OutsideApertures { .. }
                | Error::Misaligned { .. }
                | Error::System { errno: Errno::EINVAL, .. }),
            ) => error,
            other => return other,
        };
        let now = self.refresh();
        if now == known { Err(error) } else { map(&now) }
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

    /// The first mapping that has an address in `range`.
    pub(super) fn listed_in(&self, range: IovaRange) -> Option<SpaceMapping> {
        self.table.listed_in(range)
    }
}

impl DmaSpace for Ioas {
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
        self.with_limits(|limits| self.table.map_memory(limits, memory, user, iova, prot, label))
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Error> {
        self.table.unmap(range)
    }

    fn mapped_in(&self, range: IovaRange) -> Option<IovaRange> {
        self.table.first_in(range)
    }

    /// What can be mapped. iommufd tells no page sizes: the granule alone is there.
    fn limits(&self) -> Limits {
        Limits::clone(&self.refresh())
    }

    fn errno(&self, error: &Error) -> Errno {
        error.errno()
    }
}

/// Why iommufd did not take a device (`iommufd_device_bind`, and `vfio_df_open` for one that is
/// open).
fn bind_error(candidate: &Candidate, errno: Errno) -> OpenError {
    let (request, bdf) = ("VFIO_DEVICE_BIND_IOMMUFD", candidate.bdf());
    match errno {
        Errno::EPERM => candidate.not_permitted(request),
        Errno::EINVAL => OpenError::NotTaken { bdf },
        Errno::EBUSY => candidate.explain(OpenError::InUse { bdf }),
        errno => OpenError::System { request, bdf, errno },
    }
}

/// Why a device was not attached, which iommufd has taken: it looked at interrupts and the group
/// then.
fn attach_error(bdf: Bdf, errno: Errno) -> OpenError {
    match errno {
        Errno::EADDRINUSE | Errno::EINVAL => OpenError::DoesNotFit { bdf, errno },
        Errno::EBUSY => OpenError::InUse { bdf },
        errno => OpenError::System { request: "VFIO_DEVICE_ATTACH_IOMMUFD_PT", bdf, errno },
    }
}

/// What an address space can map. Without a device the kernel takes any alignment; memory is pinned
/// by whole pages all the same.
fn read_limits(ioas: &IoasId, part: Option<IovaRange>) -> Result<Limits, Errno> {
    let (apertures, alignment) = ioas.iova_ranges()?;
    let granule = alignment.next_power_of_two().max(sys::page_size());
    Ok(within(Limits { apertures, page_sizes: granule, mappings_left: None }, part))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::sys::kernel_mapping::Refused;

    const BAR: u64 = 0x10_0000;

    fn bdf() -> Bdf {
        "0000:00:05.0".parse().unwrap()
    }

    fn bar() -> IovaRange {
        IovaRange::from_len(Iova::new(BAR), 0x4000).unwrap()
    }

    /// Over a file that answers no request.
    fn space() -> Ioas {
        let fd = Arc::new(iommufd::Iommufd::new(File::open("/dev/null").unwrap()));
        let table = MappingTable::new(IoasId::of_others(&fd, 1), Gaps::Empty);
        let limits = RwLock::new(Arc::new(limits()));
        Ioas { table, iommufd: Iommufd { fd }, limits, part: None, bars: RwLock::new(()) }
    }

    fn limits() -> Limits {
        let page_sizes = sys::page_size();
        Limits { apertures: vec![IovaRange::ALL], page_sizes, mappings_left: None }
    }

    #[test]
    fn page_tables_and_copies_are_refused_while_a_bar_is_mapped_that_they_would_take() {
        let (space, other) = (space(), space());
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let is_lost = !keeps_bars(&release);
        let free = || {
            assert!(space.before_table(bdf()).is_ok());
            let foreign = other.before_copy(&space, bar());
            assert!(matches!(foreign, Err(Error::Unsupported { .. })));
            assert!(space.before_copy(&space, bar()).is_ok());
        };
        for source in [SpaceSource::Memory, SpaceSource::File, SpaceSource::Bar] {
            let wanted =
                WantedMapping { prot: Prot::READ, user: None, source, label: Label::caller() };
            free();
            // In the middle of a map, as here is no kernel that would end it.
            let mapped = space.table.map(&limits(), bar(), wanted, |_| {
                let is_lost = is_lost && source == SpaceSource::Bar;
                let refused = space.before_table(bdf()).map(drop);
                let expected = is_lost.then(|| (bdf(), bar(), release.trim().to_owned()));
                assert_eq!(
                    refused.err().map(|error| match error {
                        OpenError::BarMapped { bdf, range, release } => (bdf, range, release),
                        error => panic!("{error}"),
                    }),
                    expected
                );
                let whole = IovaRange::ALL;
                for (range, meets) in [
                    (whole, true),
                    (IovaRange::point(bar().last()), true),
                    (IovaRange::point(Iova::new(0)), false),
                ] {
                    let copied = space.before_copy(&space, range).map(drop);
                    assert_eq!(
                        matches!(copied, Err(Error::BarCopied { range, .. }) if range == bar()),
                        is_lost && meets
                    );
                    assert_eq!(copied.is_ok(), !(is_lost && meets));
                }
                Err(Refused { request: "none", errno: Errno::EIO })
            });
            assert!(matches!(mapped, Err(Error::System { errno: Errno::EIO, .. })));
            free();
        }
    }

    #[test]
    fn a_bar_stays_a_bar_in_every_page_table_from_linux_7_3_4_on() {
        for release in ["7.3.4", "7.3.4+deb13-amd64\n", "7.3.10-1", "7.4.0-rc1", "8.0", "10.1.2"] {
            assert!(keeps_bars(release), "{release}");
        }
        let before =
            ["6.19.3-arch1", "7.2.13", "7.3", "7.3-rc7", "7.3.0", "7.3.3-amd64", "next", ""];
        for release in before {
            assert!(!keeps_bars(release), "{release}");
        }
    }

    #[test]
    fn refusals_of_a_bar_name_the_range_the_kernel_and_what_to_do() {
        let range = bar();
        let release = "7.2.13-amd64".to_owned();
        let copied = Error::BarCopied { range, release: release.clone() };
        let attached = OpenError::BarMapped { bdf: bdf(), range, release };
        assert_eq!(copied.errno(), attached.errno());
        for (error, instead) in [
            (copied.to_string(), "map the BAR itself there"),
            (attached.to_string(), "unmap 0x100000..=0x103fff, attach 0000:00:05.0"),
        ] {
            for part in ["0x100000..=0x103fff", "Linux before 7.3.4", "7.2.13-amd64", instead] {
                assert!(error.contains(part), "{error}: {part}");
            }
        }
    }
}
