//! The kinds of memory: which pages, and where they come from.

use std::fmt;
use std::str::FromStr;

use crate::{os, sys};

/// Says what pages memory has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Private memory with transparent huge pages, as far as the kernel finds them
    /// (`MADV_HUGEPAGE`); see [`huge_bytes`](crate::pagemap::huge_bytes).
    Thp,
    /// Private memory with base pages alone (`MADV_NOHUGEPAGE`).
    Base,
    /// Private memory with hugetlb pages of 2 MiB (`MAP_HUGETLB`).
    Hugetlb2M,
    /// Private memory with hugetlb pages of 1 GiB.
    Hugetlb1G,
    /// Private memory with hugetlb pages of another size that the kernel has, as Arm's 64 KiB and
    /// 32 MiB; see [`of_hugetlb`](Self::of_hugetlb).
    Hugetlb {
        /// The log2 of the size of the pages in bytes.
        page_lg2: u32,
    },
    /// A file in memory (memfd_create(2)), mapped shared.
    Memfd,
    /// A file in memory with hugetlb pages of 2 MiB, mapped shared.
    MemfdHugetlb2M,
    /// Memory that the application brought, by [`Memory::foreign`](super::Memory::foreign) or
    /// [`Memory::from_file`](super::Memory::from_file): of whatever pages. None is made of this
    /// kind.
    Adopted,
}

const SIZE_2M: u64 = 2 << 20;
const SIZE_1G: u64 = 1 << 30;

impl MemoryKind {
    /// Private memory with hugetlb pages of `page_size` bytes; `None` where that is no power of
    /// two. Whether the kernel has them shows when [`Memory`](super::Memory) is made;
    /// [`hugetlb::page_sizes`](crate::hugetlb::page_sizes) lists what it has.
    pub const fn of_hugetlb(page_size: u64) -> Option<Self> {
        match page_size {
            SIZE_2M => Some(Self::Hugetlb2M),
            SIZE_1G => Some(Self::Hugetlb1G),
            _ if page_size.is_power_of_two() => {
                Some(Self::Hugetlb { page_lg2: page_size.trailing_zeros() })
            }
            _ => None,
        }
    }

    /// Transparent huge pages where `len` bytes are whole ones, and base pages where they are not:
    /// a huge page has 2 MiB on x86-64, and up to 512 MiB on Arm.
    ///
    /// ```
    /// use dmaspan_linux::{Memory, MemoryKind};
    ///
    /// let memory = Memory::new(MemoryKind::thp_for(4 << 20), 4 << 20)?;
    /// assert_eq!(memory.len(), 4 << 20);
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn thp_for(len: u64) -> Self {
        if len.is_multiple_of(os::thp_size()) { Self::Thp } else { Self::Base }
    }

    /// All that memory can be made of on every machine.
    pub const ALL: [Self; 6] = [
        Self::Thp,
        Self::Base,
        Self::Hugetlb2M,
        Self::Hugetlb1G,
        Self::Memfd,
        Self::MemfdHugetlb2M,
    ];

    /// The name on a command line: `thp`, `base`, `hugetlb`, `hugetlb-1g` and others of a size,
    /// `memfd` or `memfd-hugetlb`; `adopted` and `hugetlb-other` are none.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Thp => "thp",
            Self::Base => "base",
            Self::Hugetlb2M => "hugetlb",
            Self::Hugetlb1G => "hugetlb-1g",
            // Every size that a kernel has (Linux: Documentation/arch/arm64/hugetlbpage.rst).
            Self::Hugetlb { page_lg2: 16 } => "hugetlb-64k",
            Self::Hugetlb { page_lg2: 25 } => "hugetlb-32m",
            Self::Hugetlb { page_lg2: 29 } => "hugetlb-512m",
            Self::Hugetlb { page_lg2: 34 } => "hugetlb-16g",
            Self::Hugetlb { .. } => "hugetlb-other",
            Self::Memfd => "memfd",
            Self::MemfdHugetlb2M => "memfd-hugetlb",
            Self::Adopted => "adopted",
        }
    }

    /// The page size in bytes, which lengths are multiples of. For [`Thp`](Self::Thp) that of a
    /// huge page, though some of the memory may get base pages. For [`Adopted`](Self::Adopted) the
    /// least that it can be; see [`Memory::page_size`](super::Memory::page_size).
    pub fn page_size(self) -> u64 {
        match self {
            Self::Thp => os::thp_size(),
            Self::Base | Self::Memfd | Self::Adopted => sys::page_size(),
            Self::Hugetlb2M | Self::MemfdHugetlb2M => SIZE_2M,
            Self::Hugetlb1G => SIZE_1G,
            Self::Hugetlb { page_lg2 } => 1_u64.checked_shl(page_lg2).unwrap_or(1 << 63),
        }
    }

    /// The largest leaf, in bytes, that the CPU's page table can have for such memory. A file in
    /// memory gets transparent huge pages where the system's settings say so, and adopted memory is
    /// taken for such.
    pub fn leaf_size(self) -> u64 {
        match self {
            Self::Memfd | Self::Adopted => os::thp_size(),
            _ => self.page_size(),
        }
    }

    /// Returns whether its pages come from the hugetlb pool.
    pub const fn is_hugetlb(self) -> bool {
        matches!(
            self,
            Self::Hugetlb2M | Self::Hugetlb1G | Self::Hugetlb { .. } | Self::MemfdHugetlb2M
        )
    }

    /// The flags for memfd_create(2); `None` for memory without a file.
    pub(super) const fn memfd_flags(self) -> Option<libc::c_uint> {
        match self {
            Self::Memfd => Some(0),
            Self::MemfdHugetlb2M => Some(libc::MFD_HUGETLB | libc::MFD_HUGE_2MB),
            _ => None,
        }
    }

    /// The flags for mmap(2) of memory without a file.
    pub(super) const fn map_flags(self) -> libc::c_int {
        match self {
            Self::Hugetlb2M => libc::MAP_HUGETLB | libc::MAP_HUGE_2MB,
            Self::Hugetlb1G => libc::MAP_HUGETLB | libc::MAP_HUGE_1GB,
            // Six bits of the flags are the log2 of the size (mmap(2), `MAP_HUGE_SHIFT`).
            Self::Hugetlb { page_lg2 } => {
                libc::MAP_HUGETLB | ((page_lg2 & 63) << libc::MAP_HUGE_SHIFT).cast_signed()
            }
            _ => 0,
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// No kind of memory has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no kind of memory is called {name:?}: use thp, base, hugetlb, hugetlb-1g, memfd, \
     memfd-hugetlb or, with Arm's sizes, hugetlb-64k, hugetlb-32m, hugetlb-512m or hugetlb-16g"
)]
pub struct UnknownKind {
    /// The name that was asked for.
    pub name: String,
}

impl FromStr for MemoryKind {
    type Err = UnknownKind;

    fn from_str(name: &str) -> Result<Self, UnknownKind> {
        let arms = [16, 25, 29, 34].map(|page_lg2| Self::Hugetlb { page_lg2 });
        let found = Self::ALL.into_iter().chain(arms).find(|kind| kind.name() == name);
        found.ok_or_else(|| UnknownKind { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_of_hugetlb_pages_has_a_name_that_is_understood() {
        for lg2 in [16, 21, 25, 29, 30, 34] {
            let kind = MemoryKind::of_hugetlb(1 << lg2).unwrap();
            assert_eq!((kind.name().parse(), kind.page_size()), (Ok(kind), 1 << lg2));
        }
        assert!("hugetlb-other".parse::<MemoryKind>().is_err());
    }
}
