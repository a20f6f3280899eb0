//! The errors of regions, and of what holds parts of them.

use crate::addr::Address;
use crate::error::Errno;
use crate::prot::Prot;
use crate::regbuf::builder::BuildError;
use crate::span::Span;

/// The reason why regions were not changed, or why nothing holds part of them. Nothing changed.
/// `A` is the kind of the client's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError<A: Address> {
    /// No bytes were asked for.
    #[error("0 bytes at {:#x} are no region and no part of one: ask for at least 1", start.get())]
    Empty {
        /// Where they would begin.
        start: A,
    },
    /// The last byte would lie beyond 2^64 - 1.
    #[error("{len:#x} bytes at {:#x} wrap beyond {:#x}", start.get(), u64::MAX)]
    Wraps {
        /// Where they would begin.
        start: A,
        /// How many bytes.
        len: u64,
    },
    /// A region is there.
    #[error("{range} overlaps the region {existing}: unmap that first")]
    Overlaps {
        /// What was to be inserted.
        range: Span<A>,
        /// The lowest region that has some of it.
        existing: Span<A>,
    },
    /// Nobody could do anything with it.
    #[error("{:#x} with {access:?} permits neither reads nor writes", start.get())]
    NoAccess {
        /// Where it would begin.
        start: A,
        /// What was to be permitted.
        access: Prot,
    },
    /// No region has part of the range.
    #[error("no region has {hole} of {range}")]
    Hole {
        /// What was asked for.
        range: Span<A>,
        /// The lowest addresses of it that no region has.
        hole: Span<A>,
    },
    /// A region with part of the range permits less.
    #[error("{range} needs {wanted:?}, but the region {region} permits {access:?}")]
    Access {
        /// What was asked for.
        range: Span<A>,
        /// What for.
        wanted: Prot,
        /// The lowest region that does not permit it.
        region: Span<A>,
        /// What that permits.
        access: Prot,
    },
    /// The memory of a region is mapped for less.
    #[error(
        "{range} was to permit {wanted:?}, but its memory is mapped here for {mapped:?}: permit \
         that, or map it for more"
    )]
    Memory {
        /// What was to be inserted.
        range: Span<A>,
        /// What it was to permit.
        wanted: Prot,
        /// What the mapping permits.
        mapped: Prot,
    },
    /// A region is not all in what was to be unmapped, and no region can be cut.
    #[error("unmapping {range} would cut the region {region}: unmap all of it or none")]
    Cuts {
        /// What was to be unmapped.
        range: Span<A>,
        /// The lowest region that would be cut.
        region: Span<A>,
    },
    /// Part of the range has no address in this program.
    #[error("the region {region} of {range} is not mapped here: hold it, and read and write that")]
    NotMapped {
        /// What was asked for.
        range: Span<A>,
        /// The lowest region of it that is reached by asking the client.
        region: Span<A>,
    },
    /// There is no memory to keep track of the regions.
    #[error("there is no memory for {regions} regions")]
    NoMemory {
        /// How many.
        regions: usize,
    },
    /// The segments of a buffer cannot be kept track of.
    #[error("{range} was not registered: {error}")]
    Segments {
        /// What was to be registered.
        range: Span<A>,
        /// Why.
        #[source]
        error: BuildError,
    },
}

impl<A: Address> RegionError<A> {
    /// The errno: what VFIO answers to a map or an unmap (Linux, `vfio_dma_do_map` and
    /// `vfio_dma_do_unmap` of drivers/vfio/vfio_iommu_type1.c), and `EFAULT` where a range is not
    /// all in regions that permit it.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Overlaps { .. } => Errno::EEXIST,
            Self::Wraps { .. } => Errno::EOVERFLOW,
            Self::Empty { .. } | Self::NoAccess { .. } | Self::Cuts { .. } => Errno::EINVAL,
            Self::Hole { .. } | Self::Access { .. } => Errno::EFAULT,
            Self::Memory { .. } => Errno::EACCES,
            Self::NotMapped { .. } => Errno::EOPNOTSUPP,
            Self::NoMemory { .. } => Errno::ENOMEM,
            Self::Segments { error, .. } => error.errno(),
        }
    }
}

/// The reason why bytes of a [`Held`](super::Held) were not read, written or found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeldError<A: Address> {
    /// Not all bytes are in what is held. None was read or written.
    #[error("{len:#x} bytes at offset {offset:#x} leave what is held, {held}")]
    Outside {
        /// The offset of the first byte.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// What is held.
        held: Span<A>,
    },
    /// It is held for less. Nothing was read or written.
    #[error("{held} is held for {access:?}, and this needs {wanted:?}")]
    Access {
        /// What is held.
        held: Span<A>,
        /// What was tried.
        wanted: Prot,
        /// What it is held for.
        access: Prot,
    },
    /// Part of it has no address in this program. Nothing was read or written.
    #[error("{part} is not mapped here: read and write it instead of asking where it is")]
    NotMapped {
        /// The lowest part of what was asked for that is reached by asking the client.
        part: Span<A>,
    },
    /// The client did not answer as it should. What is before `part` was read or written.
    #[error("the client does not give access to {part}: {errno}")]
    Remote {
        /// The part of a region that was asked for.
        part: Span<A>,
        /// What its [`RemoteMemory`](super::RemoteMemory) said.
        errno: Errno,
    },
}

impl<A: Address> HeldError<A> {
    /// `EFAULT`, `EACCES`, `EOPNOTSUPP`, or what the client answered.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Outside { .. } => Errno::EFAULT,
            Self::Access { .. } => Errno::EACCES,
            Self::NotMapped { .. } => Errno::EOPNOTSUPP,
            Self::Remote { errno, .. } => *errno,
        }
    }
}
