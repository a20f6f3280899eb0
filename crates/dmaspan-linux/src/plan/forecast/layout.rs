//! A [`PaperLayout`] says what shall be mapped, for which IOMMU, within which limits.

use std::fmt;
use std::str::FromStr;

use dmaspan::{Iova, PhysAddr, Prot, Span, UserRange};

use super::iommu::PaperIommu;
use crate::vfio::LockedBy;

/// What a [`Forecast`](super::Forecast) is made of.
#[derive(Clone, Debug)]
pub struct PaperLayout {
    /// What shall be mapped.
    pub regions: Vec<PaperRegion>,
    /// What translates.
    pub iommu: PaperIommu,
    /// Which interface of the kernel maps it, and what it allows.
    pub limits: PaperLimits,
    /// The kernel; `None` where nobody knows.
    pub kernel: Option<LinuxVersion>,
    /// How many devices the process has.
    pub devices: u32,
    /// Whether a guest is given an IOMMU of its own, so that each device has its own mappings.
    pub has_viommu: bool,
    /// The NUMA node that the devices are next to; `None` where nobody knows.
    pub device_node: Option<u32>,
}

/// Memory or registers that a device shall reach.
#[derive(Clone, Debug)]
pub struct PaperRegion {
    /// What people call it.
    pub name: String,
    /// Where the process has it. On paper that says how the memory is aligned, and no more.
    pub user: UserRange,
    /// Which memory it is part of: neighbours in one memory may become one map.
    pub memory: u64,
    /// Where the device shall see it; `None` for wherever there is room.
    pub iova: Option<Iova>,
    /// What the device may do.
    pub prot: Prot,
    /// What it is.
    pub backing: Backing,
    /// Its pages.
    pub pages: RegionPages,
    /// Where it is, in the order of its addresses; `None` where nobody knows.
    pub spans: Option<Vec<Span<PhysAddr>>>,
    /// How many of its bytes are in memory already.
    pub resident: u64,
    /// The NUMA node that it shall be on, or that most of it is on.
    pub node: Option<u32>,
}

/// Says where memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backing {
    /// Private memory of base pages.
    Base,
    /// Private memory with transparent huge pages, as far as there are some.
    Thp,
    /// Hugetlb pages.
    Hugetlb,
    /// A file in memory (memfd_create(2), tmpfs).
    Memfd,
    /// A file on a disk, or another device's memory.
    File,
    /// Registers of a device.
    Registers,
}

impl Backing {
    /// Those that a layout may name for memory.
    pub const MEMORY: [Self; 5] = [Self::Base, Self::Thp, Self::Hugetlb, Self::Memfd, Self::File];

    /// The name in a layout.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Thp => "thp",
            Self::Hugetlb => "hugetlb",
            Self::Memfd => "memfd",
            Self::File => "file",
            Self::Registers => "registers",
        }
    }

    /// Whether the kernel counts it as locked memory: not registers (`is_invalid_reserved_pfn` of
    /// drivers/vfio/vfio_iommu_type1.c).
    pub const fn is_counted(self) -> bool {
        !matches!(self, Self::Registers)
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Says which pages a region has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionPages {
    /// Pages of one size, in bytes.
    Of(u64),
    /// So many of its bytes are in pages of `size`, and all others in base pages.
    Partly {
        /// The size of the large pages, in bytes.
        size: u64,
        /// How many bytes they have.
        huge: u64,
    },
}

/// What the kernel allows a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaperLimits {
    /// Whom the pinned memory counts against: the process with VFIO type 1, the user with iommufd.
    pub locked_by: LockedBy,
    /// `RLIMIT_MEMLOCK` in bytes; `None` where nothing limits the process.
    pub memlock: Option<u64>,
    /// The bytes that count against it already.
    pub locked: u64,
    /// How many mappings a container may have; `None` where nothing limits them.
    pub mappings: Option<u64>,
    /// How many it has already.
    pub mapped: u64,
    /// What the memory cgroup leaves, in bytes; `None` where nothing limits it.
    pub cgroup_left: Option<u64>,
    /// The machine's pools of hugetlb pages, as far as they are known.
    pub pools: Vec<PaperPool>,
}

/// The hugetlb pages of a size that a machine has set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaperPool {
    /// The size of a page, in bytes.
    pub page: u64,
    /// How many pages there may be: those of the pool, and those that it may grow by.
    pub pages: u64,
    /// How many of them nobody uses.
    pub free: u64,
}

/// How many mappings a container may have: `dma_entry_limit` of vfio_iommu_type1 (U16_MAX).
pub const TYPE1_MAPPINGS: u64 = 65_535;

impl PaperLimits {
    /// Those of a process without limits of its own, as root's.
    pub const fn unlimited(locked_by: LockedBy) -> Self {
        let mappings = match locked_by {
            LockedBy::Process => Some(TYPE1_MAPPINGS),
            LockedBy::User => None,
        };
        Self {
            locked_by,
            memlock: None,
            locked: 0,
            mappings,
            mapped: 0,
            cgroup_left: None,
            pools: Vec::new(),
        }
    }

    /// How many mappings can still be made.
    pub fn mappings_left(&self) -> Option<u64> {
        self.mappings.map(|most| most.saturating_sub(self.mapped))
    }
}

/// A version of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinuxVersion {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
}

impl LinuxVersion {
    /// From this version on VFIO handles all pages of a folio at once.
    pub const BY_FOLIO: Self = Self { major: 6, minor: 18 };
}

/// The reason why a text is no version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no version of Linux: write it like 6.18")]
pub struct VersionError {
    /// The text.
    pub text: String,
}

impl FromStr for LinuxVersion {
    type Err = VersionError;

    /// What a release begins with, as in `6.18.2-amd64`.
    fn from_str(text: &str) -> Result<Self, VersionError> {
        let number = |digits: &str| digits.parse::<u32>().ok();
        let version = text.trim().split_once('.').and_then(|(major, rest)| {
            let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let (minor, rest) = rest.split_at(end);
            let has_end = rest.is_empty() || rest.starts_with(['.', '-', '+', '_']);
            Some(Self { major: number(major)?, minor: number(minor)? }).filter(|_| has_end)
        });
        version.ok_or_else(|| VersionError { text: text.to_owned() })
    }
}

impl fmt::Display for LinuxVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
