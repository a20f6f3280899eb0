//! The errors that leave a kind of memory without figures.

use std::fmt;

use dmaspan::{IovaRange, RangeError, UserRange, container, io_pgtable};
use dmaspan_linux::framemap::FrameMapError;
use dmaspan_linux::mem::{AccessError, MemoryError};
use dmaspan_linux::pagemap::PagemapError;
use dmaspan_linux::pinner::LinuxPinError;
use dmaspan_linux::plan::PlanError;
use dmaspan_linux::registration::RegisterError;
use dmaspan_linux::vfio::{self, NoIommuPinError};

use crate::per_page::PerPageError;
use crate::pinned::{NotPinned, StillPinned};
use crate::soft_iommu::{BuildError, Left};
use crate::verify::{Mismatch, Stale};
use dmaspan_cli::hold::HoldError;
use dmaspan_cli::size::ByteSize;

pub(super) type ContainerError = container::Error<LinuxPinError>;

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RowError {
    #[error(transparent)]
    Reservation(#[from] HoldError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Pinner(#[from] LinuxPinError),
    #[error(
        "scattered frames of {} cannot be mapped with a granule of {}: {source}; use a smaller \
         --granule, or memory with larger pages", ByteSize::new(*page), ByteSize::new(*granule)
    )]
    Scattered { page: u64, granule: u64, source: io_pgtable::Error },
    #[error("a mapping was refused, and left memory mapped or charged: {source}")]
    LeftBehind { source: ContainerError },
    #[error("mapping failed: {0}")]
    Map(#[source] ContainerError),
    #[error("unmapping failed: {0}")]
    Unmap(#[source] ContainerError),
    #[error("{asked} bytes were mapped, and the unmap took {unmapped} away")]
    UnmappedLen { asked: u64, unmapped: u64 },
    #[error(transparent)]
    Frames(#[from] PagemapError),
    #[error(transparent)]
    FrameMap(#[from] FrameMapError),
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Range(#[from] RangeError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    PerPage(#[from] PerPageError),
    #[error(transparent)]
    NotPinned(#[from] NotPinned),
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    #[error(transparent)]
    Remains(#[from] Remains),
    #[error("mapping failed: {0}")]
    KernelMap(#[source] vfio::Error),
    #[error("unmapping failed: {0}")]
    KernelUnmap(#[source] vfio::Error),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("the plan has no IOVA for {user}")]
    Unplanned { user: UserRange },
    #[error("the kernel mapped {range} a second time while it was mapped")]
    MappedTwice { range: IovaRange },
    #[error("the kernel refused to map {range} twice, but by the wrong error: {source}")]
    NotAnOverlap { range: IovaRange, source: vfio::Error },
    #[error("pinning failed: {0}")]
    NoIommuPin(#[source] NoIommuPinError),
    #[error("the kernel tells other physical addresses of {user} than pagemap does")]
    OtherSpans { user: UserRange },
    #[error(transparent)]
    StillPinned(#[from] StillPinned),
    #[error(
        "after the {unmap}, {mappings} mappings are left, and the kernel allows {} more instead of \
         {}", mappings_allowed(*left), mappings_allowed(*expected)
    )]
    StillMapped { unmap: &'static str, mappings: u64, left: Option<u64>, expected: Option<u64> },
}

/// What should be gone after an unmap and is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) struct Remains {
    /// After which unmap.
    pub(super) unmap: &'static str,
    pub(super) left: Left,
    pub(super) stale: Stale,
}

impl Remains {
    /// How many things remain.
    pub(crate) fn count(&self) -> u64 {
        self.left.count().saturating_add(self.stale.translations)
    }
}

/// How many mappings a kernel allows, which may have no limit.
fn mappings_allowed(limit: Option<u64>) -> String {
    limit.map_or_else(|| "any number".to_owned(), |limit| limit.to_string())
}

impl fmt::Display for Remains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unmap, left, stale } = self;
        write!(f, "left after the {unmap}: ")?;
        if left.count() > 0 {
            write!(f, "{left}")?;
        }
        let Some(first) = stale.first else { return Ok(()) };
        let comma = if left.count() > 0 { ", " } else { "" };
        write!(f, "{comma}{} translations, the first at iova {first}", stale.translations)
    }
}

impl RowError {
    /// Whether it is the limit of locked memory.
    pub(crate) const fn is_memlock(&self) -> bool {
        matches!(
            self,
            Self::Pinner(LinuxPinError::Register(RegisterError::MemlockExceeded { .. }))
                | Self::KernelMap(vfio::Error::MemlockLimit { .. })
        )
    }

    /// Whether this machine, or this process on it, cannot do it: no fault of the mapping.
    pub(crate) const fn is_skip(&self) -> bool {
        matches!(
            self,
            Self::Reservation(_) | Self::Memory(_) | Self::Pinner(_) | Self::Scattered { .. }
        )
    }
}
