//! Why there is no memory.

use dmaspan::{Errno, UserRange};

use super::MemoryKind;
use crate::hugetlb;
use crate::os::{self, Size};

/// Why memory was not mapped. Nothing stays mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A length of 0.
    #[error("{kind} memory of 0 bytes was asked for: ask for at least {}", Size(kind.page_size()))]
    Empty {
        /// The kind asked for.
        kind: MemoryKind,
    },
    /// The length is no multiple of the page size.
    #[error("{len:#x} bytes of {kind} memory are no multiple of its page size {page_size:#x}")]
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
            Self::Empty { .. } | Self::Length { .. } => Errno::EINVAL,
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

/// A range is not all in the memory that it was said to be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{range} is not all in the memory {memory}: ask for a range of it")]
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
