//! The errors of planning, mapping and unmapping.

use std::fmt;

use dmaspan::{Errno, Iova, IovaRange, Prot, RangeError, UserRange};

use super::MappedRegions;
use super::mapper::MemorySpace;
use crate::mem::{MemoryError, OutsideMemory, PopulateError};
use crate::os::{Parts, Ranges, Size};

/// The reason why regions cannot be mapped as asked. Nothing has been asked of the kernel.
///
/// Regions are named by their place in what was asked, from 0 on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A region is not all in its memory.
    #[error("region {region}: {source}")]
    Outside {
        /// Which region.
        region: usize,
        /// The range and the memory.
        source: OutsideMemory,
    },
    /// A region would end beyond the last IOVA.
    #[error("region {region}: {source}")]
    Wraps {
        /// Which region.
        region: usize,
        /// Where it would start, and how long it is.
        source: RangeError,
    },
    /// The device may neither read nor write.
    #[error("region {region}: {prot:?} lets the device neither read nor write: add READ or WRITE")]
    NoAccess {
        /// Which region.
        region: usize,
        /// What was asked for.
        prot: Prot,
    },
    /// What becomes one map does not begin and end between pages of the IOMMU.
    #[error(
        "region {region}: {user} at {} does not begin and end at multiples of {granule:#x}, the \
         IOMMU's page size: align the address, the IOVA and the length",
        At(*iova)
    )]
    Unaligned {
        /// Which region it begins with.
        region: usize,
        /// The memory, of all regions that become one map.
        user: UserRange,
        /// Where it was to be seen; `None` for anywhere.
        iova: Option<Iova>,
        /// The smallest page of the IOMMU, in bytes.
        granule: u64,
    },
    /// The device cannot reach these IOVAs, or they are reserved, as those of interrupts are.
    #[error(
        "region {region}: {} in no aperture; {}",
        Parts(*range, outside), Nearest(*below, *above)
    )]
    OutsideApertures {
        /// Which region it begins with.
        region: usize,
        /// Where it was to be seen.
        range: IovaRange,
        /// The parts of that which no aperture has, in order.
        outside: Vec<IovaRange>,
        /// The last aperture that begins at or below the range.
        below: Option<IovaRange>,
        /// The first aperture that begins above the start of the range.
        above: Option<IovaRange>,
    },
    /// Two regions were to be seen at the same IOVAs.
    #[error("regions {} and {} overlap: {} and {}", regions[0], regions[1], ranges[0], ranges[1])]
    Overlap {
        /// Which regions.
        regions: [usize; 2],
        /// Where they were to be seen, with the regions that become one map with each.
        ranges: [IovaRange; 2],
    },
    /// Something is mapped or planned there, by this mapper or by others, or it was excluded.
    #[error(
        "region {region}: {range} is not free, because {} mapped, planned or excluded: \
         choose other IOVAs",
        Are(taken)
    )]
    InUse {
        /// Which region it begins with.
        region: usize,
        /// Where it was to be seen.
        range: IovaRange,
        /// All that is so there, in order, also as far as it reaches out of the range.
        taken: Vec<IovaRange>,
    },
    /// IOVAs that the mapper has mapped or planned cannot be excluded.
    #[error(
        "{range} cannot be excluded, because {} mapped or planned: unmap that first",
        Are(taken)
    )]
    Held {
        /// What was to be excluded.
        range: IovaRange,
        /// All that is mapped or planned there, in order, also as far as it reaches out of the
        /// range.
        taken: Vec<IovaRange>,
    },
    /// The alignment is no power of two.
    #[error("IOVAs cannot be aligned to {align:#x}, which is not a power of two: use one")]
    Alignment {
        /// What was asked for, in bytes.
        align: u64,
    },
    /// More maps are needed than may be made.
    #[error(
        "{needed} maps are needed but only {left} can be made: map larger pieces, map memory that \
         is one range so that neighbours merge, or raise the limit (for type1, the parameter \
         dma_entry_limit of the module vfio_iommu_type1)"
    )]
    TooManyMaps {
        /// How many maps are needed, with neighbours merged.
        needed: u64,
        /// How many can be made.
        left: u64,
    },
    /// No IOVAs are free for a region.
    #[error(
        "region {region}: {} of IOVAs are not free up to {limit}: unmap something, or map less",
        Size(*len)
    )]
    NoRoom {
        /// Which region it begins with.
        region: usize,
        /// The bytes of all regions that become one map.
        len: u64,
        /// The last IOVA that would have done.
        limit: Iova,
    },
    /// The space says that it has no pages or no apertures.
    #[error(
        "nothing can be mapped: the space has page sizes {page_sizes:#x} and {apertures} \
         apertures; attach a device first"
    )]
    NothingFits {
        /// The page sizes, a bit each.
        page_sizes: u64,
        /// How many apertures there are.
        apertures: usize,
    },
    /// There is no memory for the record of IOVAs.
    #[error("there is no memory for a record of IOVAs: end other programs")]
    NoMemory,
}

impl PlanError {
    /// The errno that Linux would have answered, as far as it would have been asked.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Outside { source, .. } => source.errno(),
            Self::Wraps { source, .. } => source.errno(),
            Self::NoAccess { .. }
            | Self::Unaligned { .. }
            | Self::OutsideApertures { .. }
            | Self::Alignment { .. }
            | Self::NothingFits { .. } => Errno::EINVAL,
            Self::Overlap { .. } | Self::InUse { .. } | Self::Held { .. } => Errno::EEXIST,
            Self::TooManyMaps { .. } | Self::NoRoom { .. } => Errno::ENOSPC,
            Self::NoMemory => Errno::ENOMEM,
        }
    }
}

/// Where something was to be.
struct At(Option<Iova>);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(iova) => write!(f, "IOVA {iova}"),
            None => f.write_str("any IOVA"),
        }
    }
}

/// Ranges with the verb.
struct Are<'a>(&'a [IovaRange]);

impl fmt::Display for Are<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", Ranges(self.0), if self.0.len() > 1 { "are" } else { "is" })
    }
}

/// The apertures around something.
struct Nearest(Option<IovaRange>, Option<IovaRange>);

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0, self.1) {
            (Some(below), Some(above)) => write!(f, "the nearest are {below} and {above}"),
            (Some(nearest), None) | (None, Some(nearest)) => write!(f, "the nearest is {nearest}"),
            (None, None) => f.write_str("there is none"),
        }
    }
}

/// The reason why regions were not mapped. `E` is the error of the space.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError<E> {
    /// They cannot be mapped as asked.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// There is no such memory. Nothing was mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Pages of adopted memory were not allocated. Nothing was mapped.
    #[error(transparent)]
    Populate(#[from] PopulateError),
    /// The registers of a BAR that were asked for are not all there. Nothing was mapped.
    #[error("{source}")]
    Bar {
        /// What the space says of them.
        source: E,
    },
    /// The space refused a map, and those before it were taken back: nothing is mapped.
    #[error("mapping {user} at {iova} failed: {source}")]
    Refused {
        /// The memory.
        user: UserRange,
        /// Where it was to be seen.
        iova: IovaRange,
        /// Why.
        source: E,
    },
    /// The space refused a map, and not all of those before it could be taken back: a device may
    /// still reach them, so their memory and IOVAs are leaked.
    #[error(
        "mapping {user} at {iova} failed: {source}; of what was mapped before, {} remain \
         mapped: {why}",
        Size(*leaked)
    )]
    LeftBehind {
        /// The memory that was refused.
        user: UserRange,
        /// Where it was to be seen.
        iova: IovaRange,
        /// Why it was refused.
        source: E,
        /// How many bytes are leaked.
        leaked: u64,
        /// Why the first of them was not unmapped.
        why: NotUnmapped<E>,
    },
}

impl<E> MapError<E> {
    /// The errno, of the space's errors as `of_space` says.
    pub(crate) fn errno_by(&self, of_space: impl FnOnce(&E) -> Errno) -> Errno {
        match self {
            Self::Plan(error) => error.errno(),
            Self::Memory(error) => error.errno(),
            Self::Populate(error) => error.errno,
            Self::Bar { source }
            | Self::Refused { source, .. }
            | Self::LeftBehind { source, .. } => of_space(source),
        }
    }
}

/// The reason why something is still mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotUnmapped<E> {
    /// The space refused to.
    #[error("unmapping {range} failed: {source}")]
    Refused {
        /// What was to be unmapped.
        range: IovaRange,
        /// Why it was not.
        source: E,
    },
    /// The space found less there than was mapped: somebody else unmaps in it.
    #[error("unmapping {range} found only {unmapped:#x} bytes mapped there")]
    Short {
        /// What was to be unmapped.
        range: IovaRange,
        /// How many bytes were unmapped.
        unmapped: u64,
    },
}

/// Mappings that could not be unmapped.
///
/// Unmap [`left`](Self::left) again, or drop this, which tries once more and then leaks what
/// remains: a device may still write it.
#[derive(thiserror::Error)]
#[error("{} remain mapped: {source}", Size(*bytes))]
pub struct StillMapped<S: MemorySpace, L = MappedRegions<S>> {
    /// What is still mapped.
    pub left: L,
    /// How many bytes that is.
    pub bytes: u64,
    /// Why the first of it is.
    pub source: NotUnmapped<S::Error>,
}

impl<S: MemorySpace, L: fmt::Debug> fmt::Debug for StillMapped<S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StillMapped")
            .field("left", &self.left)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

/// The reason why a part of what is mapped was not unmapped. `E` is the error of the space.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartError<E> {
    /// It would cut a map. Nothing was unmapped.
    #[error(
        "{part} would cut the map of {map}{}, and no kernel unmaps a part of a map: unmap all of \
         the map, or plan what is unmapped by itself as a unit of its own (Region::in_unit)",
        covered(*part, *map)
    )]
    Cuts {
        /// What was to be unmapped.
        part: IovaRange,
        /// The first map that it would cut.
        map: IovaRange,
    },
    /// The space did not unmap all of the part. What it left is still mapped, and still owned.
    #[error("{} of the part remain mapped: {source}", Size(*left))]
    Left {
        /// How many bytes of the part are still mapped.
        left: u64,
        /// Why the first of them are.
        source: NotUnmapped<E>,
    },
}

/// What a part has of a map, as a clause, where it reaches beyond.
fn covered(part: IovaRange, map: IovaRange) -> String {
    let inside = part.intersection(map).filter(|inside| *inside != part);
    inside.map(|inside| format!(", of which it covers {inside}")).unwrap_or_default()
}

/// The reason why a scope did not begin, or ended with something mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScopeError<E> {
    /// The regions were not mapped, and the closure was not called.
    #[error(transparent)]
    Map(#[from] MapError<E>),
    /// The closure has returned, and not all was unmapped: it is leaked.
    #[error("{} remain mapped and are leaked: {source}", Size(*leaked))]
    Unmap {
        /// How many bytes are leaked; 0 where a second attempt succeeded.
        leaked: u64,
        /// Why the first of them was not unmapped.
        source: NotUnmapped<E>,
    },
}
