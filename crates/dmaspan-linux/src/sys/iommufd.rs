//! The requests of iommufd: address spaces and page tables by their numbers.

#![expect(unsafe_code, reason = "requests of iommufd")]

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::{Errno, Iova, IovaRange, Prot};

use super::kernel_mapping::{Kernel, LockedBy, Source};
use super::mapping::Mapping;
use super::request;
use super::uapi::iommufd::{
    self as uapi, AllowIovas, Destroy, HwInfo, HwptAlloc, HwptGetDirtyBitmap, HwptSetDirtyTracking,
    IoasAlloc, IoasCopy, IoasMap, IoasMapFile, IoasNoIommuGetPa, IoasUnmap, IovaRanges,
    OptionValue, Range,
};
use crate::os;

// SAFETY of each: the structure of its request (include/uapi/linux/iommufd.h), which names no
// address; the values of options are numbers. The kernel copies `size` bytes or fewer.
request::requests! {
    unsafe Destroy = uapi::DESTROY,
    unsafe HwptSetDirtyTracking = uapi::HWPT_SET_DIRTY_TRACKING,
    unsafe IoasAlloc = uapi::IOAS_ALLOC,
    unsafe IoasNoIommuGetPa = uapi::IOAS_NOIOMMU_GET_PA,
    unsafe IoasUnmap = uapi::IOAS_UNMAP,
    unsafe OptionValue = uapi::OPTION,
}

/// An open `/dev/iommu`.
#[derive(Debug)]
pub(crate) struct Iommufd {
    fd: OwnedFd,
    /// Whether pinned memory counts against the process, not against its user.
    counts_by_process: AtomicBool,
    /// Whether the kernel has said that it maps no files.
    lacks_files: AtomicBool,
}

impl Iommufd {
    pub(crate) fn new(file: File) -> Self {
        let [counts_by_process, lacks_files] = [false; 2].map(AtomicBool::new);
        Self { fd: file.into(), counts_by_process, lacks_files }
    }

    /// Finds out what pinned memory counts against, of a file whose option others have set; where
    /// the kernel does not say, it stays what it was.
    pub(crate) fn read_locked_by(&self) {
        if let Ok(value) = self.get_option(0, uapi::OPTION_RLIMIT_MODE) {
            self.counts_by_process.store(value != 0, Ordering::Relaxed);
        }
    }

    /// `IOMMU_OPTION`, to set what pinned memory counts against.
    pub(crate) fn set_locked_by(&self, locked_by: LockedBy) -> Result<(), Errno> {
        let by_process = locked_by == LockedBy::Process;
        self.set_option(0, uapi::OPTION_RLIMIT_MODE, u64::from(by_process))?;
        self.counts_by_process.store(by_process, Ordering::Relaxed);
        Ok(())
    }

    /// `IOMMU_DESTROY`.
    pub(crate) fn destroy(&self, id: u32) -> Result<(), Errno> {
        request::with(self.fd.as_fd(), &mut Destroy { id, ..Destroy::default() }).map(drop)
    }

    /// `IOMMU_OPTION`, to set the option of an object, or of all.
    pub(crate) fn set_option(&self, id: u32, option_id: u32, val64: u64) -> Result<(), Errno> {
        self.option(uapi::OPTION_SET, id, option_id, val64).map(drop)
    }

    /// `IOMMU_OPTION`, to read it.
    pub(crate) fn get_option(&self, id: u32, option_id: u32) -> Result<u64, Errno> {
        self.option(uapi::OPTION_GET, id, option_id, 0)
    }

    fn option(&self, op: u16, object_id: u32, option_id: u32, val64: u64) -> Result<u64, Errno> {
        let default = OptionValue::default();
        let mut option = OptionValue { option_id, op, object_id, val64, ..default };
        request::with(self.fd.as_fd(), &mut option)?;
        Ok(option.val64)
    }

    /// `IOMMU_GET_HW_INFO`: the capabilities of the IOMMU of a device.
    pub(crate) fn capabilities(&self, dev_id: u32) -> Result<u64, Errno> {
        let mut info = HwInfo { dev_id, ..HwInfo::default() };
        // SAFETY:
        // 1. The argument is `struct iommu_hw_info`, as long as it says.
        // 2. The request writes `data_len` bytes at `data_uptr`, which is none.
        unsafe { request::with_memory(self.fd.as_fd(), uapi::GET_HW_INFO, &mut info) }?;
        Ok(info.out_capabilities)
    }
}

impl AsFd for Iommufd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An IO address space. One that was allocated here is destroyed on drop where nothing uses it any
/// more; one that others own stays.
#[derive(Debug)]
pub(crate) struct IoasId {
    iommufd: Arc<Iommufd>,
    id: u32,
    ours: bool,
}

impl IoasId {
    /// `IOMMU_IOAS_ALLOC`.
    pub(crate) fn alloc(iommufd: &Arc<Iommufd>) -> Result<Self, Errno> {
        let mut alloc = IoasAlloc::default();
        request::with(iommufd.as_fd(), &mut alloc)?;
        Ok(Self { iommufd: Arc::clone(iommufd), id: alloc.out_ioas_id, ours: true })
    }

    /// One that others allocated.
    pub(crate) fn of_others(iommufd: &Arc<Iommufd>, id: u32) -> Self {
        Self { iommufd: Arc::clone(iommufd), id, ours: false }
    }

    /// Its number.
    pub(crate) fn get(&self) -> u32 {
        self.id
    }

    /// `IOMMU_IOAS_ALLOW_IOVAS`: these alone are what the kernel allocates IOVAs of, and no device
    /// may be attached that cannot map them.
    pub(crate) fn allow_iovas(&self, ranges: &[IovaRange]) -> Result<(), Errno> {
        let range =
            |range: &IovaRange| Range { start: range.start().get(), last: range.last().get() };
        let mut ranges: Vec<Range> = ranges.iter().map(range).collect();
        let mut allow = AllowIovas {
            ioas_id: self.id,
            num_iovas: u32::try_from(ranges.len()).map_err(|_| Errno::EINVAL)?,
            allowed_iovas: address_of(&mut ranges),
            ..AllowIovas::default()
        };
        // SAFETY:
        // 1. The argument is `struct iommu_ioas_allow_iovas`, as long as it says.
        // 2. The request reads `num_iovas` ranges at `allowed_iovas`, which `ranges` has.
        let result = unsafe {
            request::with_memory(self.iommufd.as_fd(), uapi::IOAS_ALLOW_IOVAS, &mut allow)
        };
        result.map(drop)
    }

    /// `IOMMU_IOAS_NOIOMMU_GET_PA`: the physical address of what is mapped at `iova`, and how many
    /// bytes from there on are contiguous, `most` or fewer, and of one request to map alone.
    pub(crate) fn physical(&self, iova: Iova, most: u64) -> Result<(u64, u64), Errno> {
        let default = IoasNoIommuGetPa::default();
        let (ioas_id, iova, length) = (self.id, iova.get(), most);
        let mut get = IoasNoIommuGetPa { ioas_id, iova, length, ..default };
        request::with(self.iommufd.as_fd(), &mut get)?;
        Ok((get.out_phys, get.length))
    }

    /// The file that it is of.
    pub(crate) fn iommufd(&self) -> &Arc<Iommufd> {
        &self.iommufd
    }

    /// `IOMMU_IOAS_IOVA_RANGES`: what can be mapped, and the alignment.
    pub(crate) fn iova_ranges(&self) -> Result<(Vec<IovaRange>, u64), Errno> {
        // The first answer says how many there are; devices may come meanwhile.
        let mut ranges = vec![Range::default(); 16];
        loop {
            let mut query = IovaRanges {
                ioas_id: self.id,
                num_iovas: u32::try_from(ranges.len()).map_err(|_| Errno::EINVAL)?,
                allowed_iovas: address_of(&mut ranges),
                ..IovaRanges::default()
            };
            // SAFETY:
            // 1. The request writes `num_iovas` ranges at `allowed_iovas` or fewer, which `ranges`
            //    has, and which nothing else refers to meanwhile.
            let result = unsafe {
                request::with_memory(self.iommufd.as_fd(), uapi::IOAS_IOVA_RANGES, &mut query)
            };
            let count = usize::try_from(query.num_iovas).map_err(|_| Errno::EINVAL)?;
            match result {
                Err(errno) if errno == os::EMSGSIZE && count > ranges.len() && count <= MOST => {
                    ranges.resize(count, Range::default());
                }
                Err(errno) => return Err(errno),
                Ok(_) => {
                    ranges.truncate(count);
                    let range = |range: &Range| {
                        IovaRange::new(Iova::new(range.start), Iova::new(range.last))
                    };
                    return Ok((
                        ranges.iter().filter_map(range).collect(),
                        query.out_iova_alignment,
                    ));
                }
            }
        }
    }
}

/// A page table of an address space, which devices are attached to. Destroyed on drop where nothing
/// uses it any more.
#[derive(Debug)]
pub(crate) struct HwptId {
    iommufd: Arc<Iommufd>,
    id: u32,
}

impl HwptId {
    /// `IOMMU_HWPT_ALLOC`, for the IOMMU of a device.
    pub(crate) fn alloc(ioas: &IoasId, dev_id: u32, flags: u32) -> Result<Self, Errno> {
        let mut alloc = HwptAlloc { flags, dev_id, pt_id: ioas.id, ..HwptAlloc::default() };
        // SAFETY:
        // 1. The argument is `struct iommu_hwpt_alloc`, as long as it says.
        // 2. The request reads `data_len` bytes at `data_uptr`, which is none.
        let result =
            unsafe { request::with_memory(ioas.iommufd.as_fd(), uapi::HWPT_ALLOC, &mut alloc) };
        result?;
        Ok(Self { iommufd: Arc::clone(&ioas.iommufd), id: alloc.out_hwpt_id })
    }

    /// Its number.
    pub(crate) fn get(&self) -> u32 {
        self.id
    }

    /// `IOMMU_HWPT_SET_DIRTY_TRACKING`.
    pub(crate) fn set_dirty_tracking(&self, flags: u32) -> Result<(), Errno> {
        let default = HwptSetDirtyTracking::default();
        let mut set = HwptSetDirtyTracking { flags, hwpt_id: self.id, ..default };
        request::with(self.iommufd.as_fd(), &mut set).map(drop)
    }

    /// `IOMMU_HWPT_GET_DIRTY_BITMAP`: a bit for each page of `range` that was written, in `bits`,
    /// which begin with a page.
    pub(crate) fn read_dirty(
        &self,
        range: IovaRange,
        page_size: u64,
        flags: u32,
        bits: &Mapping,
    ) -> Result<(), Errno> {
        let length = room_for(range, page_size, bits.words().len())?;
        let (hwpt_id, iova, data) = (self.id, range.start().get(), address_of_memory(bits));
        let default = HwptGetDirtyBitmap::default();
        let mut get =
            HwptGetDirtyBitmap { hwpt_id, flags, iova, length, page_size, data, ..default };
        // SAFETY:
        // 1. The argument is `struct iommu_hwpt_get_dirty_bitmap`, as long as it says.
        // 2. The request writes a bit at `data` for each `page_size` bytes of `length`, for which
        //    `bits` has room, as atomic words. For a leaf that leaves the range it writes more:
        //    bits behind those, in the pages that they are in and no others (`iova_bitmap_set` of
        //    drivers/iommu/iommufd/iova_bitmap.c). A mapping has its pages for itself.
        let result = unsafe {
            request::with_memory(self.iommufd.as_fd(), uapi::HWPT_GET_DIRTY_BITMAP, &mut get)
        };
        result.map(drop)
    }
}

impl Drop for HwptId {
    fn drop(&mut self) {
        // Where a device is attached the kernel refuses, and the table lives as long as the file.
        let _ = self.iommufd.destroy(self.id);
    }
}

/// The length of `range`, where so many words have one bit or more for each page of it.
pub(super) fn room_for(range: IovaRange, page_size: u64, words: usize) -> Result<u64, Errno> {
    let length = range.checked_len().ok_or(Errno::EOVERFLOW)?;
    if !page_size.is_power_of_two() {
        return Err(Errno::EINVAL);
    }
    let needed = usize::try_from(length.div_ceil(page_size).div_ceil(64));
    if needed.is_ok_and(|needed| needed <= words) { Ok(length) } else { Err(Errno::EINVAL) }
}

/// No kernel has so many ranges.
const MOST: usize = 1 << 20;

/// Where the kernel finds `values`.
pub(super) fn address_of<T>(values: &mut [T]) -> u64 {
    // `usize` has 64 bits wherever the crate builds.
    u64::try_from(values.as_mut_ptr().expose_provenance()).unwrap_or(u64::MAX)
}

/// Where the kernel finds memory.
pub(super) fn address_of_memory(memory: &Mapping) -> u64 {
    u64::try_from(memory.addr()).unwrap_or(u64::MAX)
}

impl Drop for IoasId {
    fn drop(&mut self) {
        if !self.ours {
            return;
        }
        // Where a device is attached the kernel refuses, and the space lives as long as the file.
        let _ = self.iommufd.destroy(self.id);
    }
}

const fn flags(prot: Prot) -> u32 {
    let mut flags = uapi::MAP_FIXED_IOVA;
    if prot.contains(Prot::READ) {
        flags |= uapi::MAP_READABLE;
    }
    if prot.contains(Prot::WRITE) {
        flags |= uapi::MAP_WRITEABLE;
    }
    flags
}

// SAFETY:
// 1. `IOMMU_IOAS_MAP`, `IOMMU_IOAS_MAP_FILE` and `IOMMU_IOAS_COPY` map what they are asked for and
//    nothing else, and map nothing where they fail. Of a file the kernel pins the pages, whoever
//    else has them.
// 2. `IOMMU_IOAS_UNMAP` returns after all page tables have forgotten what was mapped
//    (drivers/iommu/iommufd/io_pagetable.c, `iopt_unmap_iova_range`). It goes from area to area,
//    each of which one request has mapped, and may fail behind some; then it does not say how many
//    bytes that were (ioas.c, `iommufd_ioas_unmap`). It answers ENOENT where there is no area in
//    the range, or one that leaves it, which an area with exactly that range excludes.
unsafe impl Kernel for IoasId {
    const MAP: &'static str = "IOMMU_IOAS_MAP";
    const UNMAP: &'static str = "IOMMU_IOAS_UNMAP";

    fn request(source: Source) -> &'static str {
        match source {
            Source::User(_) => Self::MAP,
            Source::File { .. } => "IOMMU_IOAS_MAP_FILE",
            Source::Table { .. } => "IOMMU_IOAS_COPY",
        }
    }

    unsafe fn map(&self, source: Source, range: IovaRange, prot: Prot) -> Result<(), Errno> {
        let length = range.checked_len().ok_or(Errno::EOVERFLOW)?;
        let (fd, flags, ioas_id) = (self.iommufd.as_fd(), flags(prot), self.id);
        let iova = range.start().get();
        let result = match source {
            Source::User(address) => {
                let user_va = address.get();
                let map = IoasMap { flags, ioas_id, user_va, length, iova, ..IoasMap::default() };
                // SAFETY:
                // 1. The argument is `struct iommu_ioas_map`, as long as it says.
                // 2. The memory that it names may be used until it is unmapped (the caller's
                //    promise).
                unsafe { request::with_memory(fd, uapi::IOAS_MAP, &mut { map }) }
            }
            Source::File { fd: file, offset: start } => {
                let default = IoasMapFile::default();
                let map = IoasMapFile { flags, ioas_id, fd: file, start, length, iova, ..default };
                // SAFETY:
                // 1. The argument is `struct iommu_ioas_map_file`, as long as it says, and names no
                //    address.
                // 2. The file's memory may be used until it is unmapped (the caller's promise).
                unsafe { request::with_memory(fd, uapi::IOAS_MAP_FILE, &mut { map }) }
            }
            Source::Table { id: src_ioas_id, iova: src_iova } => {
                let (dst_ioas_id, dst_iova) = (ioas_id, iova);
                let copy = IoasCopy {
                    flags,
                    dst_ioas_id,
                    src_ioas_id,
                    length,
                    dst_iova,
                    src_iova,
                    ..IoasCopy::default()
                };
                // SAFETY:
                // 1. The argument is `struct iommu_ioas_copy`, as long as it says, and names no
                //    address.
                // 2. What is mapped at `src_iova` may be used until it is unmapped here (the
                //    caller's promise).
                unsafe { request::with_memory(fd, uapi::IOAS_COPY, &mut { copy }) }
            }
        };
        result.map(drop)
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Errno> {
        // From 0 the largest length means everything (`iommufd_ioas_unmap`).
        let length = range.checked_len().unwrap_or(u64::MAX);
        let (ioas_id, iova) = (self.id, range.start().get());
        let mut unmap = IoasUnmap { ioas_id, iova, length, ..IoasUnmap::default() };
        request::with(self.iommufd.as_fd(), &mut unmap)?;
        Ok(unmap.length)
    }

    fn locked_by(&self) -> LockedBy {
        match self.iommufd.counts_by_process.load(Ordering::Relaxed) {
            true => LockedBy::Process,
            false => LockedBy::User,
        }
    }

    fn maps_files(&self) -> bool {
        !self.iommufd.lacks_files.load(Ordering::Relaxed)
    }

    /// Linux before 6.13 knows no such request, and no Linux pins files of a ramfs
    /// (`memfd_pin_folios` of mm/gup.c), which is EINVAL.
    fn cannot_map_file(&self, errno: Errno) -> bool {
        let lacks = [os::ENOTTY, Errno::EOPNOTSUPP].contains(&errno);
        if lacks {
            self.iommufd.lacks_files.store(true, Ordering::Relaxed);
        }
        lacks || errno == Errno::EINVAL
    }

    fn table(&self, by: &Self) -> Option<u32> {
        Arc::ptr_eq(&self.iommufd, &by.iommufd).then_some(self.id)
    }
}

#[cfg(feature = "iommufd-test")]
pub(crate) mod mock;
