//! iommufd: address spaces and page tables by their numbers.

#![expect(unsafe_code, reason = "requests of iommufd")]

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use dmaspan::{Errno, Iova, IovaRange, Prot};

use super::kept::{Kernel, Source};
use super::request::{self, Request};
use super::uapi::iommufd::{
    self as uapi, Destroy, IoasAlloc, IoasCopy, IoasMap, IoasMapFile, IoasUnmap, IovaRanges, Range,
};

// SAFETY of each: the structure of its request (include/uapi/linux/iommufd.h), which names no
// address. The kernel copies `size` bytes or fewer.
macro_rules! requests {
    ($($structure:ty = $number:expr,)*) => {$(
        // SAFETY: as said above.
        unsafe impl Request for $structure {
            const NUMBER: u32 = $number;
        }
    )*};
}

requests! {
    Destroy = uapi::DESTROY,
    IoasAlloc = uapi::IOAS_ALLOC,
    IoasCopy = uapi::IOAS_COPY,
    IoasMapFile = uapi::IOAS_MAP_FILE,
    IoasUnmap = uapi::IOAS_UNMAP,
}

/// An open `/dev/iommu`.
#[derive(Debug)]
pub(crate) struct Iommufd {
    fd: OwnedFd,
}

impl Iommufd {
    pub(crate) fn new(file: File) -> Self {
        Self { fd: file.into() }
    }

    /// `IOMMU_DESTROY`.
    pub(crate) fn destroy(&self, id: u32) -> Result<(), Errno> {
        request::with(self.fd.as_fd(), &mut Destroy { id, ..Destroy::default() }).map(drop)
    }
}

impl AsFd for Iommufd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An IO address space, destroyed on drop where nothing uses it any more.
#[derive(Debug)]
pub(crate) struct IoasId {
    iommufd: Arc<Iommufd>,
    id: u32,
}

impl IoasId {
    /// `IOMMU_IOAS_ALLOC`.
    pub(crate) fn alloc(iommufd: &Arc<Iommufd>) -> Result<Self, Errno> {
        let mut alloc = IoasAlloc::default();
        request::with(iommufd.as_fd(), &mut alloc)?;
        Ok(Self { iommufd: Arc::clone(iommufd), id: alloc.out_ioas_id })
    }

    /// Its number.
    pub(crate) fn get(&self) -> u32 {
        self.id
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
                Err(errno) if errno == crate::os::EMSGSIZE && count > ranges.len() => {
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

/// Where the kernel finds `values`.
fn address_of<T>(values: &mut [T]) -> u64 {
    // `usize` has 64 bits wherever the crate builds.
    u64::try_from(values.as_mut_ptr().expose_provenance()).unwrap_or(u64::MAX)
}

impl Drop for IoasId {
    fn drop(&mut self) {
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
//    nothing else, and map nothing where they fail. The last two pin the pages of the file or of the
//    other space's memory, whoever else has them.
// 2. `IOMMU_IOAS_UNMAP` returns after all page tables have forgotten what was mapped
//    (drivers/iommu/iommufd/io_pagetable.c, `iopt_unmap_iova_range`).
unsafe impl Kernel for IoasId {
    const MAP: &'static str = "IOMMU_IOAS_MAP";
    const UNMAP: &'static str = "IOMMU_IOAS_UNMAP";

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
                request::with(fd, &mut { map })
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
                request::with(fd, &mut { copy })
            }
        };
        result.map(drop)
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Errno> {
        let length = range.checked_len().ok_or(Errno::EOVERFLOW)?;
        let (ioas_id, iova) = (self.id, range.start().get());
        let mut unmap = IoasUnmap { ioas_id, iova, length, ..IoasUnmap::default() };
        request::with(self.iommufd.as_fd(), &mut unmap)?;
        Ok(unmap.length)
    }
}
