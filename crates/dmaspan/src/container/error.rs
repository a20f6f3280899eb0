//! The errors of a container, with the errno that Linux answers for each.

use alloc::vec::Vec;
use core::fmt;

use super::domains::DomainId;
use crate::account::OverLimit;
use crate::addr::{Iova, UserAddr};
use crate::error::Errno;
use crate::iommu::{self, HardwareError, ReservedRegion};
use crate::prot::Prot;
use crate::range::{IovaRange, RangeError, UserRange};

/// The reason why a container refused an operation, with the range that offends and the limit. `E`
/// is the pinner's error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error<E: core::error::Error> {
    /// An empty range, or one that wraps.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// An address or a length is not a multiple of the smallest page.
    #[error("mapping {user} at {iova} is not aligned to pages of {granule:#x} bytes")]
    Misaligned {
        /// Where it was to be mapped.
        iova: Iova,
        /// The memory.
        user: UserRange,
        /// The smallest page, in bytes.
        granule: u64,
    },
    /// What is to be unmapped, pinned or looked at does not begin and end with a page.
    #[error("{range} is not aligned to pages of {granule:#x} bytes")]
    MisalignedUnmap {
        /// What was to be unmapped, pinned, unpinned or looked at.
        range: IovaRange,
        /// The smallest page, in bytes.
        granule: u64,
    },
    /// The mapping would permit nothing.
    #[error("mapping {user} with {prot:?} permits neither reads nor writes")]
    NoAccess {
        /// The memory.
        user: UserRange,
        /// What was asked for.
        prot: Prot,
    },
    /// Devices cannot be given addresses there.
    #[error("{} in no aperture; the nearest is {aperture}", Parts { of: *range, parts: outside })]
    OutsideAperture {
        /// Where it was to be mapped.
        range: IovaRange,
        /// The aperture that the range begins in, or else the first behind its start.
        aperture: IovaRange,
        /// The parts of the range in which no mapping may lie, in order; empty where there is no
        /// memory to list them.
        outside: Vec<IovaRange>,
    },
    /// There is a mapping already.
    #[error("{range} overlaps the mapping at {existing}")]
    Exists {
        /// Where it was to be mapped.
        range: IovaRange,
        /// What is mapped.
        existing: IovaRange,
    },
    /// Another operation works on a mapping there. Try again when it is done.
    #[error("{range} overlaps {busy}, which another operation is mapping or unmapping: try again")]
    Busy {
        /// What was asked for.
        range: IovaRange,
        /// What the other operation works on.
        busy: IovaRange,
    },
    /// Domains are being attached or detached, or tracking is started or stopped, or would be while
    /// mappings are made or unmapped. Try again when that is done.
    #[error("domains or tracking cannot change while mappings do, and the reverse: try again")]
    Changing,
    /// The caller did not want the mapping any more.
    #[error("mapping {user} was cancelled after {mapped:#x} bytes")]
    Cancelled {
        /// The memory.
        user: UserRange,
        /// Bytes that were mapped, and are not any more.
        mapped: u64,
    },
    /// There is no memory to keep book of a mapping.
    #[error("there is no memory for a record of the mapping of {user}")]
    NoMemory {
        /// The memory that was to be mapped.
        user: UserRange,
    },
    /// Hardware may still use the range, since an invalidation failed: it is out of use until one
    /// succeeds.
    #[error(
        "{range} overlaps {quarantined}, which a device may still use: its invalidation failed"
    )]
    Quarantined {
        /// What was asked for.
        range: IovaRange,
        /// What is out of use.
        quarantined: IovaRange,
    },
    /// As much as can waits for hardware to confirm that it has forgotten it: nothing more is
    /// mapped until that answers.
    #[error(
        "{range} was not mapped, because too much memory waits for an IOMMU that does not answer: \
         map it when that has answered"
    )]
    QuarantineFull {
        /// Where it was to be mapped.
        range: IovaRange,
    },
    /// The range begins or ends inside a mapping.
    #[error("{range} would cut the mapping at {mapping}: unmap all of that")]
    Bisects {
        /// What was to be unmapped.
        range: IovaRange,
        /// The mapping.
        mapping: IovaRange,
    },
    /// Users' addresses cannot be forgotten while emulated devices use memory by them.
    #[error("{range} needs its user addresses, because {devices} emulated devices use them")]
    Emulated {
        /// Whose addresses were to be forgotten.
        range: IovaRange,
        /// How many emulated devices there are.
        devices: usize,
    },
    /// What is asked for needs the user addresses of all mappings, and some are invalid.
    #[error("the mapping at {mapping} has no valid user addresses")]
    VaddrInvalid {
        /// The first such mapping.
        mapping: IovaRange,
    },
    /// The user addresses of a mapping are invalid already.
    #[error("the mapping at {mapping}, in {range}, has lost its valid user addresses before")]
    VaddrInvalidAlready {
        /// Whose addresses were to be forgotten.
        range: IovaRange,
        /// The first such mapping.
        mapping: IovaRange,
    },
    /// There is no mapping whose user addresses could be updated.
    #[error("nothing is mapped at {range}")]
    NothingMapped {
        /// Where it was to be.
        range: IovaRange,
    },
    /// User addresses are updated for whole mappings, where they are invalid.
    #[error("{range} is not a mapping with invalid user addresses: {mapping} is mapped")]
    NotInvalid {
        /// Where it was to be.
        range: IovaRange,
        /// The first mapping there.
        mapping: IovaRange,
    },
    /// Device memory is mapped, and the new user addresses lead to something else.
    #[error("{user} does not lead to the device memory that is mapped at {range}: unmap that")]
    OtherDevice {
        /// The new addresses of the device memory.
        user: UserRange,
        /// Where it is mapped.
        range: IovaRange,
    },
    /// There are as many mappings as there may be.
    #[error("all {limit} mappings that the container allows are in use: unmap one first")]
    TooManyMappings {
        /// How many there may be.
        limit: usize,
    },
    /// The owner may not pin so much.
    #[error("{user} was not pinned: {source}")]
    OverLimit {
        /// The memory.
        user: UserRange,
        /// The charge and the limit.
        source: OverLimit,
    },
    /// The memory could not be pinned.
    #[error("pinning {user} failed: {source}")]
    Pin {
        /// The memory.
        user: UserRange,
        /// The pinner's reason.
        source: E,
    },
    /// The pinner found less or more memory than the range has.
    #[error("the pinner pushed spans of {found:#x} bytes for {user}")]
    PinnedLen {
        /// The memory.
        user: UserRange,
        /// How many bytes the spans had.
        found: u64,
    },
    /// The domain refused part of it: memory not aligned as its IOVAs, no room for tables, or
    /// hardware that could not be told.
    #[error("the memory behind {user} cannot be mapped: {source}")]
    Map {
        /// The memory, from the first byte that could not be mapped on.
        user: UserAddr,
        /// The domain's reason.
        source: iommu::Error,
    },
    /// Hardware did not confirm that it forgot memory, which stays pinned and charged until it
    /// does: every later operation that syncs asks it again.
    #[error(
        "{kept:#x} bytes from {range} on stay pinned, because a device may still use them, and \
         {unmapped:#x} bytes were unmapped: {source}"
    )]
    NotForgotten {
        /// The first mapping that stays.
        range: IovaRange,
        /// The bytes of all mappings that stay.
        kept: u64,
        /// Bytes that were unmapped.
        unmapped: u64,
        /// What hardware said.
        source: HardwareError,
    },
    /// Only with [`Version::V2`](super::Version::V2) is tracked what was written, and do emulated
    /// devices pin.
    #[error(
        "VFIO_TYPE1_IOMMU has no external pins and does not track writes: use VFIO_TYPE1v2_IOMMU"
    )]
    NeedsV2,
    /// What was written is not tracked.
    #[error("writes to {range} are not tracked: start tracking first")]
    NotTracking {
        /// What was asked about.
        range: IovaRange,
    },
    /// Bits stand for the smallest pages only.
    #[error("bits of {range} cannot stand for {page_size:#x} bytes: the granule is {granule:#x}")]
    BitSize {
        /// What was asked about.
        range: IovaRange,
        /// The bytes that a bit was to stand for.
        page_size: u64,
        /// The smallest page, in bytes.
        granule: u64,
    },
    /// A bitmap has too few bits, none, or more than there may be.
    #[error(
        "a bitmap of {bytes:#x} bytes does not fit {range}, which takes {least:#x} to {most:#x}"
    )]
    BitmapSize {
        /// What was asked about.
        range: IovaRange,
        /// The bytes of the bitmap.
        bytes: u64,
        /// The bytes that the range takes, in whole words of 64 bits.
        least: u64,
        /// The bytes that a bitmap may have.
        most: u64,
    },
    /// A mapping has more pages than a log has bits.
    #[error("the mapping at {mapping} has more than {most} pages, which is the limit of tracking")]
    TooLargeToTrack {
        /// The mapping.
        mapping: IovaRange,
        /// The pages that it may have.
        most: u64,
    },
    /// There is no memory for a bitmap.
    #[error("there is no memory for a bitmap of {range}")]
    NoBitmap {
        /// What was asked about.
        range: IovaRange,
    },
    /// A sink did not take the bitmap. The bits are kept and reported again.
    #[error("the caller did not take the bitmap of {range}")]
    Undelivered {
        /// What was asked about.
        range: IovaRange,
    },
    /// Hardware did not confirm that it marks the range anew. The bits were reported, and may lack
    /// what is written from now on; they are kept, and the next read reports them again with all
    /// that they may lack.
    #[error("writes to {range} may go unnoticed until its bitmap is read again: {source}")]
    MarksUnsynced {
        /// What was asked about.
        range: IovaRange,
        /// What hardware said.
        source: HardwareError,
    },
    /// Devices behind the domain can send interrupts that are not theirs, and nobody allows that.
    #[error("the devices' interrupts are not isolated, and unsafe interrupts are not allowed")]
    UnsafeInterrupts,
    /// The domain translates no address that the other domains do, and that no device of them has
    /// reserved.
    #[error("reserved regions leave nothing of the domain's aperture {aperture}")]
    NoAperture {
        /// What the domain translates.
        aperture: IovaRange,
    },
    /// The domain has no page size in common with the others.
    #[error("the domain's page sizes {domain:#x} and those of the others {others:#x} are disjoint")]
    NoPageSize {
        /// Those of the domain, bit n for 2^n bytes.
        domain: u64,
        /// Those that all other domains have.
        others: u64,
    },
    /// What is mapped already cannot be translated by the domain.
    #[error(
        "{} mapped and not within {aperture}, which is all that the domain translates: unmap it \
         first",
        Beyond { mapping: *mapping, aperture: *aperture }
    )]
    MappedOutside {
        /// The mapping.
        mapping: IovaRange,
        /// What the domain translates.
        aperture: IovaRange,
    },
    /// What is mapped already is reserved for a device behind the domain.
    #[error("the mapping at {mapping} overlaps {}, which is reserved for a device", region.range)]
    MappedReserved {
        /// The mapping.
        mapping: IovaRange,
        /// What is reserved.
        region: ReservedRegion,
    },
    /// What is mapped already does not begin and end with a page as pages would be then.
    #[error("the mapping at {mapping} is not aligned to pages of {granule:#x} bytes")]
    MappedMisaligned {
        /// The mapping.
        mapping: IovaRange,
        /// The smallest page that the domain would leave, in bytes.
        granule: u64,
    },
    /// There is no memory for the list of domains or of where they may map.
    #[error("there is no memory for another domain")]
    NoMemoryForDomain,
    /// The container has no such domain.
    #[error("the container has no {id:?}")]
    NoDomain {
        /// Which.
        id: DomainId,
    },
    /// Not everything is mapped that an emulated device wants to use.
    #[error("nothing is mapped at {at} of {range}")]
    NotMapped {
        /// What it wants to use.
        range: IovaRange,
        /// The first address of it where nothing is mapped.
        at: Iova,
    },
    /// The mapping does not permit what an emulated device wants to do.
    #[error("the mapping at {mapping} permits {permits:?}, but the access needs {asked:?}")]
    Denied {
        /// The mapping.
        mapping: IovaRange,
        /// What it permits.
        permits: Prot,
        /// What was needed.
        asked: Prot,
    },
    /// No such emulated device is attached, or none at all.
    #[error("no emulated device is attached, or this one is not")]
    NotAttached,
    /// Emulated devices have pinned part of the mapping, and do not unpin it.
    #[error("emulated devices keep parts of {range} pinned: let them unpin first")]
    StillPinned {
        /// The mapping.
        range: IovaRange,
    },
    /// Not everything is pinned that an emulated device wants to unpin.
    #[error("nothing is pinned at {at} of {range}")]
    NotPinned {
        /// What was to be unpinned.
        range: IovaRange,
        /// The first address of it that is not pinned.
        at: Iova,
    },
    /// A pin was to be ended that another container made.
    #[error("the pin of {range} belongs to another container")]
    ForeignPin {
        /// The IOVAs of the pin.
        range: IovaRange,
    },
    /// The caller's sink wanted no more spans.
    #[error("the sink had no room for the spans of {user}")]
    SinkFull {
        /// The memory.
        user: UserRange,
    },
    /// A user's memory could not be read or written.
    #[error("copying {bytes:#x} bytes at {user} failed: {source}")]
    Copy {
        /// Where in the user's memory.
        user: UserAddr,
        /// How many bytes.
        bytes: usize,
        /// The pinner's reason.
        source: E,
    },
}

impl<E: core::error::Error> Error<E> {
    /// Returns what a front end that looks like Linux's VFIO answers
    /// (drivers/vfio/vfio_iommu_type1.c); `pin` gives the number for the pinner's own errors.
    pub fn errno(&self, pin: impl FnOnce(&E) -> Errno) -> Errno {
        match self {
            Self::Range(error) => error.errno(),
            Self::Misaligned { .. }
            | Self::MisalignedUnmap { .. }
            | Self::NoAccess { .. }
            | Self::OutsideAperture { .. }
            | Self::NotTracking { .. }
            | Self::BitSize { .. }
            | Self::BitmapSize { .. }
            | Self::TooLargeToTrack { .. }
            | Self::VaddrInvalidAlready { .. }
            | Self::NotInvalid { .. }
            | Self::OtherDevice { .. }
            | Self::Bisects { .. }
            | Self::NotMapped { .. }
            | Self::NotAttached
            | Self::NotPinned { .. }
            | Self::ForeignPin { .. } => Errno::EINVAL,
            Self::Denied { .. } => Errno::EPERM,
            Self::NeedsV2 => Errno::EACCES,
            Self::UnsafeInterrupts => Errno::EPERM,
            Self::NoAperture { .. }
            | Self::NoPageSize { .. }
            | Self::MappedOutside { .. }
            | Self::MappedReserved { .. }
            | Self::MappedMisaligned { .. } => Errno::EINVAL,
            Self::NoDomain { .. } => Errno::ENODEV,
            Self::NoMemoryForDomain => Errno::ENOMEM,
            Self::Exists { .. } => Errno::EEXIST,
            Self::Busy { .. }
            | Self::Changing
            | Self::Quarantined { .. }
            | Self::StillPinned { .. }
            | Self::Emulated { .. }
            | Self::VaddrInvalid { .. } => Errno::EBUSY,
            Self::NothingMapped { .. } => Errno::ENOENT,
            Self::TooManyMappings { .. } => Errno::ENOSPC,
            Self::Cancelled { .. } => Errno::EINTR,
            Self::NoMemory { .. } | Self::NoBitmap { .. } | Self::SinkFull { .. } => Errno::ENOMEM,
            Self::OverLimit { source, .. } => source.errno(),
            Self::Pin { source, .. } | Self::Copy { source, .. } => pin(source),
            Self::PinnedLen { .. } | Self::Undelivered { .. } => Errno::EFAULT,
            Self::Map { source, .. } => source.errno(),
            Self::NotForgotten { .. }
            | Self::QuarantineFull { .. }
            | Self::MarksUnsynced { .. } => Errno::EIO,
        }
    }
}

/// Parts of a range, and the verb: "A of B is", or "A and B of C are".
struct Parts<'a> {
    of: IovaRange,
    parts: &'a [IovaRange],
}

impl fmt::Display for Parts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, parts } = self;
        for (n, part) in parts.iter().enumerate() {
            write!(f, "{}{part}", if n == 0 { "" } else { " and " })?;
        }
        match **parts {
            [] => write!(f, "{of} is not all"),
            [part] if part == *of => f.write_str(" is"),
            [_] => write!(f, " of {of} is"),
            _ => write!(f, " of {of} are"),
        }
    }
}

/// The parts of a mapping that are outside of an aperture, at most two.
struct Beyond {
    mapping: IovaRange,
    aperture: IovaRange,
}

impl fmt::Display for Beyond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mapping, aperture } = *self;
        let (mut parts, mut count) = ([mapping; 2], 0);
        for (place, part) in parts.iter_mut().zip(mapping.minus(&[aperture])) {
            *place = part;
            count += 1;
        }
        Parts { of: mapping, parts: &parts[..count] }.fmt(f)
    }
}
