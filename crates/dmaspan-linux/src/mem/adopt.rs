//! The application brings memory of its own here, and [`Memory`](super::Memory) adopts it.

#![expect(unsafe_code, reason = "takes memory by its address on a promise")]

use std::any::Any;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use dmaspan::{Errno, UserAddr, UserRange};

use super::{AdoptError, Memory, MemoryKind};
use crate::os;
use crate::sys;
use crate::sys::mapping::{self, Alignment, Backing, Mapping};

/// File systems in memory (include/uapi/linux/magic.h): `TMPFS_MAGIC`, which files of
/// memfd_create(2) are on too, `HUGETLBFS_MAGIC` and `RAMFS_MAGIC`.
const TMPFS: u64 = 0x0102_1994;
const HUGETLBFS: u64 = 0x9584_58f6;
const RAMFS: u64 = 0x8584_58f6;

impl Memory {
    /// Takes memory of the application by its address, such as a guest's that a VMM has mapped.
    ///
    /// ```
    /// use std::ptr::NonNull;
    ///
    /// use dmaspan_linux::{Memory, MemoryKind};
    ///
    /// #[repr(align(65536))]
    /// struct Buffers([u8; 1 << 20]);
    ///
    /// let buffers: &'static mut Buffers = Box::leak(Box::new(Buffers([0; 1 << 20])));
    /// let start = NonNull::from(&mut buffers.0).cast();
    /// // SAFETY: it is never freed, and the only reference to it was given up.
    /// let memory = unsafe { Memory::foreign(start, 1 << 20, ())? };
    /// memory.write(0x1003, b"hello")?;
    /// assert_eq!(memory.kind(), MemoryKind::Adopted);
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AdoptError`] where it does not begin and end between base pages; `keep` is dropped.
    ///
    /// # Safety
    ///
    /// Until `keep` is dropped, `len` bytes from `start` are memory, mapped readable and writable
    /// at the same place, and initialised, and other code of the process accesses them atomically,
    /// as volatile, or not at all: a device may write them at any moment. `start` may be used for
    /// all of them.
    pub unsafe fn foreign(
        start: NonNull<u8>,
        len: u64,
        keep: impl Any + Send + Sync,
    ) -> Result<Self, AdoptError> {
        let addr = u64::try_from(start.addr().get()).unwrap_or(u64::MAX);
        let page_size = sys::page_size();
        let range = whole_pages(addr, len, page_size)?;
        let too_long = AdoptError::TooLong { start: addr, len };
        let bytes = usize::try_from(len).map_err(|_| too_long)?;
        // SAFETY:
        // 1. All that is asked is what the caller promised.
        let mapping = unsafe { Mapping::foreign(start, bytes, Box::new(keep)) };
        // Pages are whole words.
        let unaligned = AdoptError::Unaligned { start: addr, len, page_size };
        let mapping = mapping.ok_or(unaligned)?;
        // Bounce pools copy by addresses alone.
        mapping.addr();
        Ok(Self::of(mapping, MemoryKind::Adopted, page_size, range, None))
    }

    /// Maps `len` bytes from `offset` of a file in memory, shared with whoever else has it: of
    /// memfd_create(2), or on a tmpfs or hugetlbfs. Other files cannot be pinned for a device that
    /// writes.
    ///
    /// Pages are allocated by [`populate`](Self::populate), or when they are first used. If
    /// somebody shortens the file meanwhile, an access beyond its end ends the process by
    /// `SIGBUS`; `F_SEAL_SHRINK` of fcntl(2) keeps that from happening.
    ///
    /// ```
    /// use dmaspan_linux::{Memory, MemoryKind};
    ///
    /// let first = Memory::new(MemoryKind::Memfd, 1 << 20)?;
    /// let (fd, offset) = first.file().ok_or("a memfd has a file")?;
    /// let again = Memory::from_file(fd.try_clone_to_owned()?, offset + 0x1_0000, 0x2_0000)?;
    /// first.write_u64(0x1_0008, 7)?;
    /// assert_eq!(again.read_u64(8)?, 7);
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AdoptError`]: a file that is not in memory or is shorter, an offset or a length that is no
    /// multiple of the size of its pages, too few hugetlb pages.
    pub fn from_file(file: impl Into<OwnedFd>, offset: u64, len: u64) -> Result<Self, AdoptError> {
        let file = File::from(file.into());
        let system = |errno| AdoptError::System { len, errno };
        let metadata = file.metadata().map_err(|error| system(os::errno(&error)))?;
        let (file_system, block) = mapping::file_system(file.as_fd()).map_err(system)?;
        // Devices have their files on a tmpfs as well, and are no memory.
        if !metadata.is_file() || ![TMPFS, HUGETLBFS, RAMFS].contains(&file_system) {
            return Err(AdoptError::NotInMemory);
        }
        let is_hugetlb = file_system == HUGETLBFS;
        let page_size = if is_hugetlb { block.max(sys::page_size()) } else { sys::page_size() };
        let in_file = whole_pages(offset, len, page_size)?;
        let file_len = metadata.len();
        if in_file.last().get() >= file_len {
            return Err(AdoptError::TooShort { offset, len, file_len });
        }
        let failed = |errno| match errno {
            Errno::ENOMEM if is_hugetlb => {
                AdoptError::NoHugePages { len, page_size, pages: len / page_size }
            }
            errno => system(errno),
        };
        let too_long = AdoptError::TooLong { start: offset, len };
        let bytes = usize::try_from(len).map_err(|_| too_long)?;
        let backing = Backing::Shared(file.as_fd(), offset);
        let alignment = if is_hugetlb { Alignment::Kernel } else { to_leaves(offset, len) };
        let mapping = Mapping::new(backing, bytes, alignment).map_err(failed)?;
        let start = u64::try_from(mapping.addr()).map_err(|_| too_long)?;
        let range = whole_pages(start, len, page_size)?;
        Ok(Self::of(mapping, MemoryKind::Adopted, page_size, range, Some((file, offset))))
    }
}

/// Where a file is mapped so that it can have transparent huge pages: at the same place within a
/// huge page as in the file.
fn to_leaves(offset: u64, len: u64) -> Alignment {
    let leaf = MemoryKind::Adopted.leaf_size();
    match usize::try_from(leaf) {
        Ok(align) if len >= leaf && offset.is_multiple_of(leaf) => Alignment::To(align),
        _ => Alignment::Kernel,
    }
}

/// A range that begins and ends between pages: of addresses, or of offsets in a file.
fn whole_pages(start: u64, len: u64, page_size: u64) -> Result<UserRange, AdoptError> {
    if len == 0 {
        return Err(AdoptError::Empty { page_size });
    }
    if !start.is_multiple_of(page_size) || !len.is_multiple_of(page_size) {
        return Err(AdoptError::Unaligned { start, len, page_size });
    }
    UserRange::from_len(UserAddr::new(start), len).map_err(|_| AdoptError::TooLong { start, len })
}
