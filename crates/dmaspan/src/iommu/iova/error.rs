//! The errors of the allocator, and the handles that they give back.

use super::Iovas;
use crate::addr::Iova;
use crate::error::Errno;
use crate::range::{IovaRange, RangeError};

/// The reason why there are no IOVAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An empty range, or one that wraps.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Nothing that long is free below the limit.
    #[error("no {bytes:#x} bytes of IOVAs, aligned to {align:#x}, are free up to {limit}")]
    Exhausted {
        /// How many bytes were asked for.
        bytes: u64,
        /// To what they were to be aligned, in bytes.
        align: u64,
        /// The last IOVA that would have done.
        limit: Iova,
    },
    /// The alignment is no power of two.
    #[error("IOVAs cannot be aligned to {align:#x}, which is not a power of two")]
    Align {
        /// What was asked for, in bytes.
        align: u64,
    },
    /// Part of the range is in use or reserved by somebody else.
    #[error("{range} is not free, because {taken} is in use")]
    Taken {
        /// What was to be reserved or handed out.
        range: IovaRange,
        /// The first IOVAs that stand in the way, with all that follow them in the range without a
        /// gap; [`Space::list_in`](super::Space::list_in) names those behind.
        taken: IovaRange,
    },
    /// The range does not consist of whole granules.
    #[error("{range} is not whole granules of {granule:#x} bytes")]
    Unaligned {
        /// What was asked for.
        range: IovaRange,
        /// The granule in bytes.
        granule: u64,
    },
    /// The range is not what was turned into a raw one, or was turned back before.
    #[error("{range} was not given out raw by this space")]
    NotRaw {
        /// What was to be turned back.
        range: IovaRange,
    },
    /// The IOVAs are of another space.
    #[error("the IOVAs {range} belong to another space")]
    Foreign {
        /// Which.
        range: IovaRange,
    },
    /// There is no memory for the records of the space.
    #[error("there is no memory for a record of {range}")]
    NoMemory {
        /// What was to be recorded.
        range: IovaRange,
    },
    /// There is no aperture in the list of them.
    #[error("the space has no aperture to hand IOVAs out of")]
    NoAperture,
    /// The granule or the aperture is none.
    #[error("no IOVAs can be handed out of {aperture} by granules of 2^{granule_lg2} bytes")]
    Config {
        /// What IOVAs were to be of.
        aperture: IovaRange,
        /// log2 of the granule.
        granule_lg2: u32,
    },
}

impl Error {
    /// Returns what a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Range(error) => error.errno(),
            Self::Exhausted { .. } => Errno::ENOSPC,
            Self::Align { .. }
            | Self::Unaligned { .. }
            | Self::NotRaw { .. }
            | Self::Foreign { .. }
            | Self::NoAperture
            | Self::Config { .. } => Errno::EINVAL,
            Self::Taken { .. } => Errno::EADDRINUSE,
            Self::NoMemory { .. } => Errno::ENOMEM,
        }
    }
}

/// A space that IOVAs were not of; they are given back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the IOVAs {} belong to another space", iovas.range())]
pub struct Foreign {
    /// What was to be freed.
    pub iovas: Iovas,
}

impl From<Foreign> for Error {
    /// The IOVAs are dropped, and lost to their space.
    fn from(Foreign { iovas }: Foreign) -> Self {
        Self::Foreign { range: iovas.range() }
    }
}

/// IOVAs that were not made raw; they are given back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IntoRawFailed {
    /// They are of another space.
    #[error(transparent)]
    Foreign(#[from] Foreign),
    /// There is no memory for the record of them.
    #[error("there is no memory for a record of {}", iovas.range())]
    NoMemory {
        /// What was to be made raw.
        iovas: Iovas,
    },
}

impl IntoRawFailed {
    /// Returns what a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Foreign(_) => Errno::EINVAL,
            Self::NoMemory { .. } => Errno::ENOMEM,
        }
    }
}

impl From<IntoRawFailed> for Error {
    /// The IOVAs are dropped, and lost to their space.
    fn from(failed: IntoRawFailed) -> Self {
        match failed {
            IntoRawFailed::Foreign(foreign) => foreign.into(),
            IntoRawFailed::NoMemory { iovas } => Self::NoMemory { range: iovas.range() },
        }
    }
}
