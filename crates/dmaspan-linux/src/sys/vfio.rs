//! The requests of VFIO: containers, groups and devices by their file descriptors.

#![expect(unsafe_code, reason = "requests of VFIO")]

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use bytemuck::Pod;
use dmaspan::container::type1::uapi as type1;
use dmaspan::{Errno, IovaRange, Prot};

use super::iommufd::{address_of_memory, room_for};
use super::kernel_mapping::{Kernel, LockedBy, Source};
use super::mapping::Mapping;
use super::request;
use super::uapi::vfio::{
    self as uapi, AttachIommufdPt, BindIommufd, DetachIommufdPt, DeviceInfo, FeatureDmaBuf,
    GroupStatus, IrqInfo, RegionInfo, Type1Dirty, Type1DirtyGet, Type1Info, Type1Map, Type1Unmap,
};

// SAFETY of each: the structure of its request (include/uapi/linux/vfio.h), which names no address.
// The kernel copies `argsz` bytes or fewer, as far as it knows the structure. Some have flags with
// which an address follows the structure; there the kernel refuses an `argsz` that ends before it,
// which that of these structures does: `VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP`,
// `VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP` (drivers/vfio/vfio_iommu_type1.c), and the token of
// `VFIO_DEVICE_BIND_IOMMUFD`, which Linux 6.17 has (drivers/vfio/device_cdev.c).
request::requests! {
    unsafe GroupStatus = uapi::GROUP_GET_STATUS,
    unsafe DeviceInfo = uapi::DEVICE_GET_INFO,
    unsafe RegionInfo = uapi::DEVICE_GET_REGION_INFO,
    unsafe IrqInfo = uapi::DEVICE_GET_IRQ_INFO,
    unsafe BindIommufd = uapi::DEVICE_BIND_IOMMUFD,
    unsafe AttachIommufdPt = uapi::DEVICE_ATTACH_IOMMUFD_PT,
    unsafe DetachIommufdPt = uapi::DEVICE_DETACH_IOMMUFD_PT,
    unsafe Type1Dirty = type1::VFIO_IOMMU_DIRTY_PAGES,
    unsafe Type1Unmap = type1::VFIO_IOMMU_UNMAP_DMA,
}

/// A container of type 1, or what iommufd offers in its place.
#[derive(Debug)]
pub(crate) struct Container {
    fd: OwnedFd,
    locked_by: LockedBy,
}

impl Container {
    /// The container behind an open `/dev/vfio/vfio` or `/dev/iommu`, and what that counts pinned
    /// memory against.
    pub(crate) fn new(file: File, locked_by: LockedBy) -> Self {
        Self { fd: file.into(), locked_by }
    }

    /// `VFIO_GET_API_VERSION`.
    pub(crate) fn api_version(&self) -> Result<i32, Errno> {
        // SAFETY: the argument is not looked at.
        unsafe { request::with_value(self.fd.as_fd(), type1::VFIO_GET_API_VERSION, 0) }
    }

    /// `VFIO_CHECK_EXTENSION`: 0 where the kernel does not have it.
    pub(crate) fn extension(&self, extension: u64) -> Result<i32, Errno> {
        // SAFETY: the argument is the number of the extension.
        unsafe { request::with_value(self.fd.as_fd(), type1::VFIO_CHECK_EXTENSION, extension) }
    }

    /// `VFIO_SET_IOMMU`.
    pub(crate) fn set_iommu(&self, iommu: u64) -> Result<(), Errno> {
        // SAFETY: the argument is the number of the type.
        unsafe { request::with_value(self.fd.as_fd(), type1::VFIO_SET_IOMMU, iommu) }.map(drop)
    }

    /// `VFIO_IOMMU_GET_INFO`, with the capabilities behind it.
    pub(crate) fn info(&self) -> Result<WithCaps<Type1Info>, Errno> {
        let mut info = Type1Info::default();
        // SAFETY: the request writes the structure and capabilities, no longer than `argsz`.
        let result = unsafe { with_caps(self.fd.as_fd(), type1::VFIO_IOMMU_GET_INFO, &mut info) };
        result.map(|bytes| WithCaps { info, bytes })
    }

    /// `VFIO_IOMMU_DIRTY_PAGES`, to start or to stop.
    pub(crate) fn dirty_pages(&self, flags: u32) -> Result<(), Errno> {
        let mut dirty = Type1Dirty { flags, ..Type1Dirty::default() };
        request::with(self.fd.as_fd(), &mut dirty).map(drop)
    }

    /// `VFIO_IOMMU_DIRTY_PAGES`: a bit for each page of `range` that may have been written, in
    /// `bits`.
    pub(crate) fn read_dirty(
        &self,
        range: IovaRange,
        page_size: u64,
        bits: &Mapping,
    ) -> Result<(), Errno> {
        let size = room_for(range, page_size, bits.words().len())?;
        let mut get = Type1DirtyGet {
            flags: type1::VFIO_IOMMU_DIRTY_PAGES_FLAG_GET_BITMAP,
            iova: range.start().get(),
            size,
            bitmap_pgsize: page_size,
            bitmap_size: u64::try_from(bits.len()).map_err(|_| Errno::EINVAL)?,
            bitmap_data: address_of_memory(bits),
            ..Type1DirtyGet::default()
        };
        // SAFETY:
        // 1. The argument is `struct vfio_iommu_type1_dirty_bitmap` with what follows it, as long
        //    as it says.
        // 2. The request writes `bitmap_size` bytes at `bitmap_data` or fewer, which `bits` has, as
        //    atomic words.
        unsafe { request::with_memory(self.fd.as_fd(), type1::VFIO_IOMMU_DIRTY_PAGES, &mut get) }?;
        Ok(())
    }
}

impl AsFd for Container {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

// SAFETY:
// 1. `VFIO_IOMMU_MAP_DMA` maps the memory at `vaddr` and nothing else, and maps nothing where it
//    fails; it knows neither files nor tables, which are refused here.
// 2. `VFIO_IOMMU_UNMAP_DMA` returns after the IOMMU has forgotten what was mapped
//    (drivers/vfio/vfio_iommu_type1.c, `vfio_dma_do_unmap`), and answers ENOENT nowhere but in
//    iommufd's place of it, as `IOMMU_IOAS_UNMAP` (drivers/iommu/iommufd/vfio_compat.c).
unsafe impl Kernel for Container {
    const MAP: &'static str = "VFIO_IOMMU_MAP_DMA";
    const UNMAP: &'static str = "VFIO_IOMMU_UNMAP_DMA";

    unsafe fn map(&self, source: Source, range: IovaRange, prot: Prot) -> Result<(), Errno> {
        let Source::User(vaddr) = source else { return Err(Errno::EOPNOTSUPP) };
        let mut flags = 0;
        if prot.contains(Prot::READ) {
            flags |= type1::VFIO_DMA_MAP_FLAG_READ;
        }
        if prot.contains(Prot::WRITE) {
            flags |= type1::VFIO_DMA_MAP_FLAG_WRITE;
        }
        let size = range.checked_len().ok_or(Errno::EOVERFLOW)?;
        let (vaddr, iova) = (vaddr.get(), range.start().get());
        let mut map = Type1Map { flags, vaddr, iova, size, ..Type1Map::default() };
        // SAFETY:
        // 1. The argument is `struct vfio_iommu_type1_dma_map`, as long as it says.
        // 2. The memory that it names may be used until it is unmapped (the caller's promise).
        unsafe { request::with_memory(self.fd.as_fd(), type1::VFIO_IOMMU_MAP_DMA, &mut map) }?;
        Ok(())
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Errno> {
        let default = Type1Unmap::default();
        let mut unmap = match range.checked_len() {
            Some(size) => Type1Unmap { iova: range.start().get(), size, ..default },
            // Linux 5.12.
            None => Type1Unmap { flags: type1::VFIO_DMA_UNMAP_FLAG_ALL, ..default },
        };
        request::with(self.fd.as_fd(), &mut unmap)?;
        Ok(unmap.size)
    }

    fn locked_by(&self) -> LockedBy {
        self.locked_by
    }
}

/// A structure and the capabilities that the kernel put behind it.
#[derive(Debug)]
pub(crate) struct WithCaps<T> {
    /// The structure.
    pub(crate) info: T,
    /// All that the kernel wrote, the structure first.
    bytes: Vec<u8>,
}

impl<T> WithCaps<T> {
    /// The bytes of the capability with that number, its header first, from `first`, the offset
    /// that the structure has. What the kernel says is not trusted: a chain that leaves the bytes,
    /// or goes back, ends.
    pub(crate) fn capability(&self, first: u32, id: u16) -> Option<&[u8]> {
        let mut at = usize::try_from(first).ok()?;
        while at != 0 {
            let bytes = self.bytes.get(at..)?;
            let header: uapi::CapHeader = read(bytes)?;
            if header.id == id {
                return Some(bytes);
            }
            let next = usize::try_from(header.next).ok()?;
            if next <= at {
                return None;
            }
            at = next;
        }
        None
    }
}

/// The structure at the beginning of `bytes`.
pub(crate) fn read<T: Pod>(bytes: &[u8]) -> Option<T> {
    bytes.get(..size_of::<T>()).map(bytemuck::pod_read_unaligned)
}

/// Makes a request twice: to learn how long its capabilities are, and to read them.
///
/// # Safety
///
/// As for [`request::with_memory`]; and the request writes how long all is into the first 32 bits.
unsafe fn with_caps<T: Pod>(
    fd: BorrowedFd<'_>,
    number: u32,
    info: &mut T,
) -> Result<Vec<u8>, Errno> {
    let asked = *info;
    // SAFETY: passed on.
    unsafe { request::with_memory(fd, number, info)? };
    let needed = read::<u32>(bytemuck::bytes_of(info)).and_then(|len| usize::try_from(len).ok());
    // No list of capabilities is so long.
    let needed = needed.unwrap_or(0).clamp(size_of::<T>(), 1 << 20);
    let mut bytes = vec![0; needed];
    bytes[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&asked));
    // SAFETY: passed on.
    unsafe { request::with_words(fd, number, &mut bytes)? };
    *info = read(&bytes).unwrap_or(asked);
    Ok(bytes)
}

/// An open group, `/dev/vfio/N`.
#[derive(Debug)]
pub(crate) struct Group {
    fd: OwnedFd,
}

impl Group {
    pub(crate) fn new(file: File) -> Self {
        Self { fd: file.into() }
    }

    /// `VFIO_GROUP_GET_STATUS`: whether all its devices are VFIO's.
    pub(crate) fn is_viable(&self) -> Result<bool, Errno> {
        let mut status = GroupStatus::default();
        request::with(self.fd.as_fd(), &mut status)?;
        Ok(status.flags & uapi::GROUP_VIABLE != 0)
    }

    /// `VFIO_GROUP_SET_CONTAINER`.
    pub(crate) fn set_container(&self, container: &Container) -> Result<(), Errno> {
        let container = container.fd.as_raw_fd();
        // SAFETY: the request reads the file descriptor.
        let result =
            unsafe { request::with_int(self.fd.as_fd(), uapi::GROUP_SET_CONTAINER, container) };
        result.map(drop)
    }

    /// `VFIO_GROUP_GET_DEVICE_FD`, of the device with that name.
    pub(crate) fn device(&self, name: &str) -> Result<DeviceFd, Errno> {
        let name = CString::new(name).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the request reads the name.
        let fd =
            unsafe { request::with_string(self.fd.as_fd(), uapi::GROUP_GET_DEVICE_FD, &name) }?;
        // SAFETY: the request has opened it for us.
        let fd = unsafe { request::opened(fd) };
        Ok(DeviceFd { file: fd.into() })
    }
}

/// An open device.
#[derive(Debug)]
pub(crate) struct DeviceFd {
    file: File,
}

impl DeviceFd {
    /// The device behind an open `/dev/vfio/devices/vfioN`.
    pub(crate) fn new(file: File) -> Self {
        Self { file }
    }

    /// For reads and writes of regions, at their offsets.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// `VFIO_DEVICE_GET_INFO`.
    pub(crate) fn info(&self) -> Result<DeviceInfo, Errno> {
        let mut info = DeviceInfo::default();
        request::with(self.file.as_fd(), &mut info)?;
        Ok(info)
    }

    /// `VFIO_DEVICE_GET_REGION_INFO`, with capabilities.
    pub(crate) fn region(&self, index: u32) -> Result<WithCaps<RegionInfo>, Errno> {
        let mut info = RegionInfo { index, ..RegionInfo::default() };
        let fd = self.file.as_fd();
        // SAFETY: the request writes the structure and capabilities, no longer than `argsz`.
        let bytes = unsafe { with_caps(fd, uapi::DEVICE_GET_REGION_INFO, &mut info) }?;
        Ok(WithCaps { info, bytes })
    }

    /// `VFIO_DEVICE_GET_IRQ_INFO`.
    pub(crate) fn irq(&self, index: u32) -> Result<IrqInfo, Errno> {
        let mut info = IrqInfo { index, ..IrqInfo::default() };
        request::with(self.file.as_fd(), &mut info)?;
        Ok(info)
    }

    /// `VFIO_DEVICE_SET_IRQS`: interrupts `index` from 0 on signal `eventfds`, or none where there
    /// are none.
    pub(crate) fn set_irqs(&self, index: u32, eventfds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let data =
            if eventfds.is_empty() { uapi::IRQ_SET_DATA_NONE } else { uapi::IRQ_SET_DATA_EVENTFD };
        let count = u32::try_from(eventfds.len()).map_err(|_| Errno::EINVAL)?;
        let fds: Vec<u8> = eventfds.iter().flat_map(|fd| fd.as_raw_fd().to_ne_bytes()).collect();
        self.set_irq(uapi::IrqSet { flags: data, index, count, ..uapi::IrqSet::default() }, &fds)
    }

    /// `VFIO_DEVICE_SET_IRQS`: signals the eventfd of an interrupt, as the device would.
    pub(crate) fn signal_irq(&self, index: u32, start: u32) -> Result<(), Errno> {
        let flags = uapi::IRQ_SET_DATA_NONE;
        self.set_irq(uapi::IrqSet { flags, index, start, count: 1, argsz: 0 }, &[])
    }

    /// Makes the request, to trigger, with file descriptors behind it.
    fn set_irq(&self, mut set: uapi::IrqSet, fds: &[u8]) -> Result<(), Errno> {
        set.flags |= uapi::IRQ_SET_ACTION_TRIGGER;
        let mut bytes = bytemuck::bytes_of(&set).to_vec();
        bytes.extend(fds);
        // SAFETY:
        // 1. The argument is `struct vfio_irq_set` with as many file descriptors as it says, or it
        //    says that there are none; the request reads it and no other memory.
        let set =
            unsafe { request::with_words(self.file.as_fd(), uapi::DEVICE_SET_IRQS, &mut bytes) }?;
        // The kernel has fewer vectors left, says how many, and has set none.
        if set > 0 { Err(Errno::ENOSPC) } else { Ok(()) }
    }

    /// `VFIO_DEVICE_FEATURE_DMA_BUF`: `length` bytes from `offset` of a BAR.
    pub(crate) fn dma_buf(&self, bar: u32, offset: u64, length: u64) -> Result<DmaBuf, Errno> {
        let open_flags = libc::O_RDWR | libc::O_CLOEXEC;
        let mut feature = FeatureDmaBuf {
            flags: uapi::FEATURE_GET | uapi::FEATURE_DMA_BUF,
            region_index: bar,
            open_flags: open_flags.cast_unsigned(),
            nr_ranges: 1,
            offset,
            length,
            ..FeatureDmaBuf::default()
        };
        // SAFETY:
        // 1. The argument is `struct vfio_device_feature` with what follows it for this feature, as
        //    long as it says.
        // 2. `flags` say that the dma-buf is to be opened. That names no memory of the process; as
        //    other features the structure would.
        let fd =
            unsafe { request::with_memory(self.file.as_fd(), uapi::DEVICE_FEATURE, &mut feature) }?;
        // SAFETY: the request has opened it for us.
        Ok(DmaBuf { fd: unsafe { request::opened(fd) } })
    }

    /// `VFIO_DEVICE_RESET`.
    pub(crate) fn reset(&self) -> Result<(), Errno> {
        // SAFETY: the request has no argument.
        unsafe { request::with_value(self.file.as_fd(), uapi::DEVICE_RESET, 0) }.map(drop)
    }

    /// `VFIO_DEVICE_BIND_IOMMUFD`; returns the device's number there.
    pub(crate) fn bind(&self, iommufd: BorrowedFd<'_>) -> Result<u32, Errno> {
        let mut bind = BindIommufd { iommufd: iommufd.as_raw_fd(), ..BindIommufd::default() };
        request::with(self.file.as_fd(), &mut bind)?;
        Ok(bind.out_devid)
    }

    /// `VFIO_DEVICE_ATTACH_IOMMUFD_PT`: to an IOAS or a page table.
    pub(crate) fn attach(&self, id: u32) -> Result<u32, Errno> {
        let mut attach = AttachIommufdPt { pt_id: id, ..AttachIommufdPt::default() };
        request::with(self.file.as_fd(), &mut attach)?;
        Ok(attach.pt_id)
    }

    /// `VFIO_DEVICE_DETACH_IOMMUFD_PT`.
    pub(crate) fn detach(&self) -> Result<(), Errno> {
        request::with(self.file.as_fd(), &mut DetachIommufdPt::default()).map(drop)
    }
}

/// Registers of a device, as a dma-buf.
#[derive(Debug)]
pub(crate) struct DmaBuf {
    fd: OwnedFd,
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
