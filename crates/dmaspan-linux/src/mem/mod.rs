//! Memory of this process, of one page size.
//!
//! [`Memory`] is what devices read and write, so Rust code never gets a `&[u8]` of it: bytes are
//! copied in and out. Inside, memory is bytes that are accessed atomically (relaxed), each by
//! itself ([`dmaspan::bytes`]), so a device or another thread that writes meanwhile is no data
//! race: a load yields a byte that the memory has had. Order between accesses is the caller's
//! business.
//!
//! [`ExclusiveMemory`] is memory that its owner alone accesses, besides the kernel at the owner's
//! request. Of that Rust code may have slices; see [`fixed`](crate::fixed).
//!
//! Every page is there when [`Memory::new`] returns: too little memory is an error then, never a
//! signal later. Memory that the application brings ([`Memory::foreign`], [`Memory::from_file`])
//! is populated by [`Memory::populate`], which a [`Mapper`](crate::plan::Mapper) does before it
//! maps.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::{Errno, UserAddr, UserRange};

use crate::os;
use crate::sys::mapping::{Advice, Alignment, Backing, Mapping};
use crate::sys::{self};

mod access;
mod adopt;
#[cfg(test)]
mod at_once;
mod bus;
mod error;
mod exclusive;
mod host;
mod kind;
mod original;
mod populate;
mod read_only;

pub use access::{AccessError, CheckError};
pub use bus::HostBytes;
pub use error::{AdoptError, MemoryError, OutsideMemory, PopulateError};
pub use exclusive::{ExclusiveMemory, NotExclusive};
pub use kind::{MemoryKind, UnknownKind};
pub use read_only::ReadOnlyMemory;

/// Memory of one [`MemoryKind`], unmapped on drop.
///
/// # While devices use it
///
/// What is pinned and mapped for a device are pages, not addresses of the process. Where the
/// process takes other pages for these addresses, the device goes on with those that were pinned:
/// it harms nobody, but neither sees any more what the other one writes. That happens by
/// madvise(2) with `MADV_DONTNEED` or `MADV_REMOVE`, by a hole in the file (fallocate(2)), by
/// munmap(2), and by mmap(2) in its place. The pages that were pinned are the system's again, and
/// no longer counted against `RLIMIT_MEMLOCK`, when they are unmapped for the device.
///
/// Nothing here does any of this to memory while it is mapped: a
/// [`MappedRegions`](crate::plan::MappedRegions) shares it until then. The owner of
/// adopted memory ([`foreign`](Self::foreign), [`from_file`](Self::from_file)) does none of it
/// either: a VMM whose balloon gives pages of its guest back unmaps them for devices first.
///
/// ```
/// use dmaspan_linux::{Memory, MemoryKind};
///
/// let memory = Memory::new(MemoryKind::Base, 0x4000)?;
/// memory.write(0x1003, b"hello")?;
/// let mut bytes = [0; 5];
/// memory.read(0x1003, &mut bytes)?;
/// assert_eq!(&bytes, b"hello");
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Memory {
    mapping: Mapping,
    kind: MemoryKind,
    page_size: u64,
    range: UserRange,
    /// The file that is mapped, and from which offset on.
    file: Option<(File, u64)>,
    /// Whether every page has been allocated.
    populated: AtomicBool,
    /// Whether the file was handed out.
    file_shared: AtomicBool,
}

impl Memory {
    /// Maps `len_bytes` of memory and allocates all of its pages, zeroed.
    ///
    /// # Errors
    ///
    /// [`MemoryError`]: a length of 0 or that is no multiple of
    /// [`page_size`](MemoryKind::page_size), more than the system has available, a kind that the
    /// kernel does not have, or too few hugetlb pages (see
    /// [`HugetlbReservation`](crate::HugetlbReservation)). A limit of a memory cgroup is not seen
    /// in advance.
    pub fn new(kind: MemoryKind, len_bytes: u64) -> Result<Self, MemoryError> {
        Self::laid_out(kind, Pages::Alike, len_bytes, 1)
    }

    /// Memory in which transparent huge pages and as many bytes of base pages take turns, huge ones
    /// first: one range of a user, as a heap has it of which only parts were advised. Its kind is
    /// [`MemoryKind::Thp`].
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), with the kind [`MemoryKind::Thp`].
    pub fn striped(len_bytes: u64) -> Result<Self, MemoryError> {
        Self::laid_out(MemoryKind::Thp, Pages::InTurn, len_bytes, 1)
    }

    /// Memory as of [`new`](Self::new), at a multiple of `align`, a power of two: for memory of
    /// base pages and of transparent huge ones.
    pub(crate) fn aligned(
        kind: MemoryKind,
        len_bytes: u64,
        align: u64,
    ) -> Result<Self, MemoryError> {
        Self::laid_out(kind, Pages::Alike, len_bytes, align)
    }

    fn laid_out(
        kind: MemoryKind,
        pages: Pages,
        len_bytes: u64,
        align: u64,
    ) -> Result<Self, MemoryError> {
        let page_size = kind.page_size();
        if kind == MemoryKind::Adopted {
            return Err(MemoryError::NotMade);
        }
        if len_bytes == 0 {
            return Err(MemoryError::Empty { kind });
        }
        if !len_bytes.is_multiple_of(page_size) {
            return Err(MemoryError::Length { kind, len: len_bytes, page_size });
        }
        if !kind.is_hugetlb()
            && let Some(available) = os::available_bytes()
            && len_bytes > available
        {
            return Err(MemoryError::TooMuch { kind, len: len_bytes, available });
        }
        let failed = |errno| MemoryError::mapping(kind, len_bytes, errno);
        let (mapping, file) = map(kind, pages, len_bytes, align).map_err(failed)?;
        let start = u64::try_from(mapping.addr()).map_err(|_| failed(Errno::ENOMEM))?;
        let range = UserRange::from_len(UserAddr::new(start), len_bytes)
            .map_err(|error| failed(error.errno()))?;
        let file = file.map(|file| (file, 0));
        let memory = Self::of(mapping, kind, page_size, range, file);
        memory.populate().map_err(|error| failed(error.errno))?;
        Ok(memory)
    }

    fn of(
        mapping: Mapping,
        kind: MemoryKind,
        page_size: u64,
        range: UserRange,
        file: Option<(File, u64)>,
    ) -> Self {
        let [populated, file_shared] = [false; 2].map(AtomicBool::new);
        Self { mapping, kind, page_size, range, file, populated, file_shared }
    }

    /// Returns what kind of memory it is.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// The length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "memory has at least one page")]
    pub fn len(&self) -> u64 {
        self.range.len_less_one() + 1
    }

    /// The page size that was asked for, in bytes; see [`MemoryKind::page_size`]. That of the file
    /// system for a file, and the base page for other adopted memory.
    pub fn page_size(&self) -> u64 {
        self.page_size
    }

    /// The file that is mapped, and the offset in it at which the memory begins; `None` for memory
    /// without a file, or whose file only the application knows.
    ///
    /// A holder of the file can map the memory once more, so the memory is no [`ExclusiveMemory`]
    /// afterwards.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        let (file, offset) = self.file.as_ref()?;
        self.file_shared.store(true, Ordering::Relaxed);
        Some((file.as_fd(), *offset))
    }

    /// The file behind `range` and the offset in it, for a kernel that maps by it: whoever has the
    /// memory may not know of it.
    pub(crate) fn file_of(&self, range: UserRange) -> Option<(BorrowedFd<'_>, u64)> {
        let (file, offset) = self.file.as_ref()?;
        let skip = self.offset_of(range).ok()?;
        Some((file.as_fd(), offset.checked_add(skip)?))
    }

    fn is_file_shared(&self) -> bool {
        self.file_shared.load(Ordering::Relaxed)
    }

    /// Returns where it is in this process. Its provenance is exposed: a bounce pool of
    /// [`BounceMemory`] may copy by such addresses.
    ///
    /// [`BounceMemory`]: crate::BounceMemory
    pub fn user_range(&self) -> UserRange {
        self.range
    }

    /// Returns where `len` bytes from `offset` are in this process.
    ///
    /// # Errors
    ///
    /// [`AccessError::OutOfBounds`] where they are not all in the memory, or none.
    pub fn sub_range(&self, offset: u64, len: u64) -> Result<UserRange, AccessError> {
        let outside = AccessError::OutOfBounds { offset, len, memory_len: self.len() };
        let start = self.range.start().checked_add(offset).ok_or(outside)?;
        let range = UserRange::from_len(start, len).map_err(|_| outside)?;
        if self.range.covers(range) { Ok(range) } else { Err(outside) }
    }

    /// Returns how far `range` begins behind the start of the memory, in bytes.
    ///
    /// # Errors
    ///
    /// [`OutsideMemory`] where the range is not all in the memory.
    pub fn offset_of(&self, range: UserRange) -> Result<u64, OutsideMemory> {
        if !self.range.covers(range) {
            return Err(OutsideMemory { range, memory: self.range });
        }
        Ok(range.start().get() - self.range.start().get())
    }

    /// The mapping, for the system calls of this crate.
    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

/// Which pages of a kind memory has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    /// The kind's everywhere.
    Alike,
    /// The kind's, which are transparent huge pages, and base pages, in turn.
    InTurn,
}

/// Maps memory, and says how its pages shall be.
fn map(
    kind: MemoryKind,
    pages: Pages,
    len_bytes: u64,
    align: u64,
) -> Result<(Mapping, Option<File>), Errno> {
    let to_usize = |value: u64| usize::try_from(value).map_err(|_| Errno::ENOMEM);
    let len = to_usize(len_bytes)?;
    let leaf_size = kind.leaf_size();
    // The kernel aligns hugetlb pages. Only memory that holds a whole leaf gains from being
    // aligned to leaves.
    let align = if leaf_size > len_bytes { align } else { align.max(leaf_size) };
    let alignment = if kind.is_hugetlb() || align == 1 {
        Alignment::Kernel
    } else {
        Alignment::To(to_usize(align.max(sys::page_size()))?)
    };
    let file = match kind.memfd_flags() {
        Some(flags) => {
            let file = File::from(sys::memfd(c"dmaspan", flags)?);
            file.set_len(len_bytes).map_err(|error| os::errno(&error))?;
            Some(file)
        }
        None => None,
    };
    let backing = match &file {
        Some(file) => Backing::Shared(file.as_fd(), 0),
        None => Backing::Anonymous(kind.map_flags()),
    };
    let mapping = Mapping::new(backing, len, alignment)?;
    match kind {
        MemoryKind::Thp => mapping.advise(0, len, Advice::Huge)?,
        // A kernel without transparent huge pages does not know the advice: nothing to forbid.
        MemoryKind::Base => match mapping.advise(0, len, Advice::NoHuge) {
            Ok(()) | Err(Errno::EINVAL) => {}
            Err(errno) => return Err(errno),
        },
        _ => {}
    }
    if pages == Pages::InTurn {
        let stripe = to_usize(leaf_size)?;
        for offset in (stripe..len).step_by(2 * stripe) {
            mapping.advise(offset, stripe, Advice::NoHuge)?;
        }
    }
    Ok((mapping, file))
}

#[cfg(test)]
mod tests;
