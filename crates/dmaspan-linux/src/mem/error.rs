//! The errors of allocating, adopting and populating memory.

use dmaspan::{Errno, UserRange};

use super::MemoryKind;
use crate::hugetlb;
use crate::os::{self, Size};

/// The reason why memory was not mapped. Nothing stays mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A length of 0.
    #[error(
        "0 bytes of {kind} memory cannot be allocated: ask for at least {}",
        Size(kind.page_size())
    )]
    Empty {
        /// The kind asked for.
        kind: MemoryKind,
    },
    /// Memory of [`MemoryKind::Adopted`] is brought, not made.
    #[error("adopted memory cannot be allocated: take it by Memory::from_file or Memory::foreign")]
    NotMade,
    /// The length is no multiple of the page size.
    #[error("{len:#x} bytes of {kind} memory are not a multiple of its page size {page_size:#x}")]
    Length {
        /// The kind asked for.
        kind: MemoryKind,
        /// The bytes asked for.
        len: u64,
        /// The size of its pages, in bytes.
        page_size: u64,
    },
    /// More than the system can give.
    #[error(
        "{} of {kind} memory are more than the {} that the system has available: ask for less or \
         end other programs",
        Size(*len), Size(*available)
    )]
    TooMuch {
        /// The kind asked for.
        kind: MemoryKind,
        /// The bytes asked for.
        len: u64,
        /// `MemAvailable` of `/proc/meminfo`, in bytes.
        available: u64,
    },
    /// The hugetlb pool has too few free pages.
    #[error(
        "{} of {kind} memory need {pages} free hugetlb pages of {}: {}",
        Size(*len), Size(*page_size), hugetlb::advice(*page_size, *pages)
    )]
    NoHugePages {
        /// The kind asked for.
        kind: MemoryKind,
        /// The bytes asked for.
        len: u64,
        /// The size of the pages, in bytes.
        page_size: u64,
        /// How many pages are needed.
        pages: u64,
    },
    /// The kernel does not have this kind of memory.
    #[error("{}: use another kind", missing(*kind, *page_size, *errno))]
    Unsupported {
        /// The kind asked for.
        kind: MemoryKind,
        /// The size of its pages, in bytes.
        page_size: u64,
        /// What the kernel answered.
        errno: Errno,
    },
    /// A system call failed for another reason.
    #[error(
        "mapping {} of {kind} memory failed: {}{}",
        Size(*len), os::words(*errno), advice(*errno)
    )]
    System {
        /// The kind asked for.
        kind: MemoryKind,
        /// The bytes asked for.
        len: u64,
        /// What the kernel answered.
        errno: Errno,
    },
}

impl MemoryError {
    /// What `errno` means for memory of this kind (mmap(2), memfd_create(2), madvise(2)).
    pub(super) fn mapping(kind: MemoryKind, len: u64, errno: Errno) -> Self {
        let page_size = kind.page_size();
        match errno {
            Errno::ENOMEM if kind.is_hugetlb() => {
                Self::NoHugePages { kind, len, page_size, pages: len / page_size }
            }
            Errno::EINVAL | os::ENOSYS => Self::Unsupported { kind, page_size, errno },
            // A size of hugetlb page that the kernel does not offer.
            Errno::ENOENT => Self::Unsupported { kind, page_size, errno },
            _ => Self::System { kind, len, errno },
        }
    }

    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Empty { .. } | Self::Length { .. } | Self::NotMade => Errno::EINVAL,
            Self::TooMuch { .. } | Self::NoHugePages { .. } => Errno::ENOMEM,
            Self::Unsupported { errno, .. } | Self::System { errno, .. } => *errno,
        }
    }
}

/// What a user can change whose process gets no memory, or no file to have it in (mmap(2) and
/// memfd_create(2), ERRORS).
fn advice(errno: Errno) -> &'static str {
    match errno {
        Errno::ENOMEM => {
            "; ask for less, raise the limit of addresses with `ulimit -v`, or see the sysctls \
             vm.overcommit_memory and vm.max_map_count"
        }
        os::EMFILE => "; raise the limit of open files with `ulimit -n`",
        os::ENFILE => "; raise the system's limit of open files, /proc/sys/fs/file-max",
        _ => "",
    }
}

/// What the kernel lacks that does not have this kind of memory.
fn missing(kind: MemoryKind, page_size: u64, errno: Errno) -> String {
    if errno == os::ENOSYS && kind.memfd_flags().is_some() {
        return "this kernel has no memfd_create, or a seccomp filter of a container hides it"
            .to_owned();
    }
    let (size, words) = (Size(page_size), os::words(errno));
    format!("this kernel has no {kind} memory with pages of {size} ({words})")
}

/// The reason why memory that the application brings was not adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// No bytes.
    #[error("0 bytes cannot be adopted: adopt at least {}", Size(*page_size))]
    Empty {
        /// The size of the pages, in bytes.
        page_size: u64,
    },
    /// It does not begin and end between pages.
    #[error(
        "{len:#x} bytes from {start:#x} on do not begin and end at multiples of the page size \
         {page_size:#x}"
    )]
    Unaligned {
        /// The address of the first byte, or its offset in the file.
        start: u64,
        /// The bytes that were to be adopted.
        len: u64,
        /// The size of the pages, in bytes.
        page_size: u64,
    },
    /// It ends beyond the address space, or beyond what a file can have.
    #[error("{len:#x} bytes from {start:#x} on end beyond the last address")]
    TooLong {
        /// The address of the first byte, or its offset in the file.
        start: u64,
        /// The bytes that were to be adopted.
        len: u64,
    },
    /// The file is not in memory, so that what is written there may have to be written back.
    #[error(
        "the file is not in memory: use a file of memfd_create, tmpfs (such as \
         /dev/shm) or hugetlbfs"
    )]
    NotInMemory,
    /// The memory is no shared mapping of the file.
    #[error(
        "the {len:#x} bytes at {start:#x} are no shared mapping of the file from {offset:#x} on: \
         map it with MAP_SHARED, or adopt them without the file"
    )]
    NotShared {
        /// The address of the first byte.
        start: u64,
        /// The bytes that were to be adopted.
        len: u64,
        /// The offset in the file.
        offset: u64,
    },
    /// The file is shorter.
    #[error(
        "the file has {file_len:#x} bytes, not {len:#x} from {offset:#x} on: lengthen it first"
    )]
    TooShort {
        /// The offset of the first byte.
        offset: u64,
        /// The bytes that were to be adopted.
        len: u64,
        /// The length of the file in bytes.
        file_len: u64,
    },
    /// The hugetlb pool has too few free pages.
    #[error(
        "{} of a file on hugetlbfs need {pages} free hugetlb pages of {}: {}",
        Size(*len), Size(*page_size), hugetlb::advice(*page_size, *pages)
    )]
    NoHugePages {
        /// The bytes that were to be adopted.
        len: u64,
        /// The size of the pages, in bytes.
        page_size: u64,
        /// How many pages are needed at most.
        pages: u64,
    },
    /// A system call failed for another reason.
    #[error(
        "mapping {} of a file failed: {}{}",
        Size(*len), os::words(*errno), adopt_advice(*errno)
    )]
    System {
        /// The bytes that were to be adopted.
        len: u64,
        /// What the kernel answered.
        errno: Errno,
    },
}

impl AdoptError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Empty { .. }
            | Self::Unaligned { .. }
            | Self::TooShort { .. }
            | Self::NotShared { .. } => Errno::EINVAL,
            Self::TooLong { .. } => Errno::EOVERFLOW,
            Self::NotInMemory => Errno::EOPNOTSUPP,
            Self::NoHugePages { .. } => Errno::ENOMEM,
            Self::System { errno, .. } => *errno,
        }
    }
}

/// What a user can change whose file is not mapped (mmap(2), ERRORS).
fn adopt_advice(errno: Errno) -> &'static str {
    match errno {
        os::EACCES => "; open it for reading and writing, or take it for reads alone",
        // F_SEAL_WRITE of fcntl(2).
        Errno::EPERM => "; it may be sealed against being written: take it for reads alone",
        _ => advice(errno),
    }
}

/// Pages were not allocated. Some may have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("allocating the pages of {range} failed: {}{}", os::words(*errno), populate_advice(*errno))]
pub struct PopulateError {
    /// What was to be populated.
    pub range: UserRange,
    /// What the kernel answered.
    pub errno: Errno,
}

/// What a user can change whose pages are not allocated (madvise(2), `MADV_POPULATE_WRITE`).
fn populate_advice(errno: Errno) -> &'static str {
    match errno {
        Errno::EFAULT => {
            "; check whether its file has become shorter, and whether hugetlb pages are left"
        }
        _ => advice(errno),
    }
}

/// A range is not all in the memory that it was said to be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{range} is not all within the memory {memory}: ask for a range of that")]
pub struct OutsideMemory {
    /// The range asked for.
    pub range: UserRange,
    /// Where the memory is.
    pub memory: UserRange,
}

impl OutsideMemory {
    /// `EFAULT`: a bad user address.
    pub const fn errno(&self) -> Errno {
        Errno::EFAULT
    }
}
