//! The application brings memory of its own here, and [`Memory`](super::Memory) adopts it.

#![expect(unsafe_code, reason = "takes memory by its address on a promise")]

use std::any::Any;
use std::fs::{self, File, Metadata};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

use dmaspan::{Errno, Prot, UserAddr, UserRange};

use super::{AdoptError, Memory, MemoryKind};
use crate::client::ClientDescriptor;
use crate::os;
use crate::sys;
use crate::sys::mapping::{self, Alignment, Backing, Mapping};

/// `HUGETLBFS_MAGIC` of include/uapi/linux/magic.h.
const HUGETLBFS: u64 = 0x9584_58f6;

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
    /// at the same place, and initialised, and other code of the process accesses them as a device
    /// may write them, at any moment: by [`dmaspan::bytes`] or as atomic bytes, or, as by volatile
    /// accesses, while neither the methods of this type nor a pool access the same bytes. `start`
    /// may be used for all of them.
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

    /// As [`foreign`](Self::foreign), of memory that is a shared mapping of `file` from `offset`
    /// on, as that of a guest mostly is. An [`Ioas`](crate::vfio::Ioas) maps it by the file, so
    /// that the kernel pins the file's pages without a look at this process (Linux 6.13).
    ///
    /// # Errors
    ///
    /// [`AdoptError::NotShared`] where the process has something else there, such as a private
    /// mapping of the file, whose pages differ from the file's as soon as they are written;
    /// [`AdoptError::NotInMemory`] for other files than [`from_file`](Self::from_file) takes. As
    /// [`foreign`](Self::foreign) otherwise; `keep` is dropped.
    ///
    /// # Safety
    ///
    /// As [`foreign`](Self::foreign).
    pub unsafe fn foreign_with_file(
        start: NonNull<u8>,
        len: u64,
        file: impl Into<OwnedFd>,
        offset: u64,
        keep: impl Any + Send + Sync,
    ) -> Result<Self, AdoptError> {
        let (file, metadata, ..) = in_memory(file.into(), len)?;
        whole_pages(offset, len, sys::page_size())?;
        // SAFETY: the caller promises what is asked.
        let mut memory = unsafe { Self::foreign(start, len, keep) }?;
        let maps = fs::read_to_string("/proc/self/maps")
            .map_err(|error| AdoptError::System { len, errno: os::errno(&error) })?;
        if !is_shared(&maps, memory.range, &metadata, offset) {
            return Err(AdoptError::NotShared { start: memory.range.start().get(), len, offset });
        }
        memory.file = Some((file, offset));
        // The caller that brought the file has it, too.
        memory.file_shared = true.into();
        Ok(memory)
    }

    /// Maps `len` bytes from `offset` of a file in memory, shared with whoever else has it: of
    /// memfd_create(2), or on a tmpfs or hugetlbfs. Other files cannot be pinned for a device that
    /// writes. [`ReadOnlyMemory`](super::ReadOnlyMemory) takes a file that may only be read.
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
    /// [`AdoptError`]: a file that is not in memory, is shorter, or was not opened for reading and
    /// writing, an offset or a length that is no multiple of the size of its pages, too few hugetlb
    /// pages.
    ///
    /// # Context
    ///
    /// System calls that wait for nobody, whatever the file is: one that is not in memory is looked
    /// at no further, and [closed](crate::client::ClientDescriptor) by another thread.
    pub fn from_file(file: impl Into<OwnedFd>, offset: u64, len: u64) -> Result<Self, AdoptError> {
        Self::of_file(file.into(), offset, len, Prot::READ_WRITE)
    }

    /// Maps part of a file in memory. Without [`Prot::WRITE`] the mapping is only read.
    pub(super) fn of_file(
        file: OwnedFd,
        offset: u64,
        len: u64,
        access: Prot,
    ) -> Result<Self, AdoptError> {
        let system = |errno| AdoptError::System { len, errno };
        let (file, metadata, is_hugetlb, block) = in_memory(file, len)?;
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
        let backing = match access.contains(Prot::WRITE) {
            true => Backing::Shared(file.as_fd(), offset),
            false => Backing::ReadOnly(file.as_fd(), offset),
        };
        let alignment = if is_hugetlb { Alignment::Kernel } else { to_leaves(offset, len) };
        let mapping = Mapping::new(backing, bytes, alignment).map_err(failed)?;
        let start = u64::try_from(mapping.addr()).map_err(|_| too_long)?;
        let range = whole_pages(start, len, page_size)?;
        Ok(Self::of(mapping, MemoryKind::Adopted, page_size, range, Some((file, offset))))
    }

    /// The same memory, the file's descriptor of which is closed: a server has thousands of regions
    /// of a client.
    pub(crate) fn without_file(self) -> Self {
        Self { file: None, ..self }
    }
}

/// What a file in memory is: whether it is on a hugetlbfs, and the size of its pages then.
///
/// It is on a file system of the kernel alone, which answers both calls without asking anybody.
fn in_memory(file: OwnedFd, len: u64) -> Result<(File, Metadata, bool, u64), AdoptError> {
    let system = |errno| AdoptError::System { len, errno };
    let file = ClientDescriptor::from(file).into_memory().ok_or(AdoptError::NotInMemory)?;
    let file = File::from(file);
    let metadata = file.metadata().map_err(|error| system(os::errno(&error)))?;
    let (file_system, block) = mapping::file_system(file.as_fd()).map_err(system)?;
    Ok((file, metadata, file_system == HUGETLBFS, block))
}

/// Whether `maps`, as `/proc/self/maps` is written (proc_pid_maps(5)), has shared mappings of the
/// file from `offset` on in all of `range`.
pub(super) fn is_shared(maps: &str, range: UserRange, file: &Metadata, offset: u64) -> bool {
    let (mut next, mut at) = (range.start().get(), offset);
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let mut field = || fields.next().unwrap_or_default();
        let (addresses, access, skip, device, inode) =
            (field(), field(), field(), field(), field());
        let bounds = addresses.split_once('-').and_then(|(from, to)| hex(from).zip(hex(to)));
        // They are sorted.
        let Some((from, to)) = bounds.filter(|&(_, to)| to > next) else { continue };
        let device = device.split_once(':').and_then(|(major, minor)| hex(major).zip(hex(minor)));
        let (major, minor) = (libc::major(file.dev()), libc::minor(file.dev()));
        let is_its = from <= next
            && access.ends_with('s')
            && device == Some((major.into(), minor.into()))
            && inode.parse() == Ok(file.ino())
            && hex(skip).and_then(|skip| skip.checked_add(next - from)) == Some(at);
        if !is_its {
            return false;
        }
        if to > range.last().get() {
            return true;
        }
        (next, at) = (to, at.saturating_add(to - next));
    }
    false
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
