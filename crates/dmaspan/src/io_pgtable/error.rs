//! The errors of page-table operations.

use super::retired::Retired;
use crate::addr::{Iova, PhysAddr};
use crate::error::Errno;
use crate::prot::Prot;
use crate::range::{IovaRange, RangeError};
use crate::span::Span;

/// The reason why a page-table operation was refused, with the range that offends and the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An empty range, or one that wraps.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The list of spans is empty.
    #[error("the list of spans to map at {iova} is empty")]
    NoSpans {
        /// Where they would have been mapped.
        iova: Iova,
    },
    /// The page size is not one of the table's.
    #[error("pages of {page_size:#x} bytes are not among the table's sizes {page_sizes:#x}")]
    PageSize {
        /// The size asked for, in bytes.
        page_size: u64,
        /// The sizes there are, one bit each.
        page_sizes: u64,
    },
    /// An IOVA or length is not a multiple of the page.
    #[error("the range {range} is not aligned to pages of {page_size:#x} bytes")]
    Misaligned {
        /// The range asked for.
        range: IovaRange,
        /// The page, in bytes.
        page_size: u64,
    },
    /// A physical address or length is not a multiple of the page.
    #[error("the memory {span} is not aligned to pages of {page_size:#x} bytes")]
    MisalignedSpan {
        /// The memory that was to be mapped.
        span: Span,
        /// The page, in bytes.
        page_size: u64,
    },
    /// Part of the range has no translation in this table, ever.
    #[error("the range {range} is not within the table's aperture {aperture}")]
    OutsideAperture {
        /// The range asked for.
        range: IovaRange,
        /// What the table translates.
        aperture: IovaRange,
    },
    /// Part of the range does not belong to the caller.
    #[error("the range {range} is not within {owned}, which the caller owns")]
    NotOwned {
        /// The range asked for.
        range: IovaRange,
        /// What was claimed.
        owned: IovaRange,
    },
    /// Part of the memory cannot be expressed by an entry.
    #[error("the memory {span} reaches beyond {last}, the last address that entries can express")]
    OutsideOutput {
        /// The memory that was to be mapped.
        span: Span,
        /// The last physical address there is.
        last: PhysAddr,
    },
    /// Neither reading nor writing is permitted: hardware would take the entry for an empty one.
    #[error("a mapping at {iova} must permit reads or writes")]
    NoAccess {
        /// Where it would start.
        iova: Iova,
    },
    /// The format can neither express these permissions nor grant more instead. Linux answers as
    /// for a bad argument (generic_pt/fmt/vtdss.h, `vtdss_pt_iommu_set_prot`).
    #[error("this format has no entries for the permissions {prot:?}, asked for at {iova}")]
    Unsupported {
        /// Where the mapping would start.
        iova: Iova,
        /// What was asked for.
        prot: Prot,
    },
    /// Hardware does not mark what it writes through this table.
    #[error("this table has no dirty bits to read in {range}")]
    NoDirtyBits {
        /// What was asked about.
        range: IovaRange,
    },
    /// A bitmap's granule is no power of two, or there are too few words for its range.
    #[error("a bitmap of {words} words with a bit for {granule:#x} bytes does not fit {range}")]
    Bitmap {
        /// What it should have bits for.
        range: IovaRange,
        /// What a bit stands for, in bytes.
        granule: u64,
        /// How many words of 64 bits there are.
        words: usize,
    },
    /// The bitmap has no bits for part of the range.
    #[error("the bitmap has bits for {covered}, not for all of {range}")]
    OutsideBitmap {
        /// What was asked about.
        range: IovaRange,
        /// What the bitmap has bits for.
        covered: IovaRange,
    },
    /// Hardware demands that the leaf is taken away and forgotten before it is written anew, and
    /// the caller did not accept that its translation is missing meanwhile.
    #[error("the leaf {leaf} can be rewritten only by a break, which this call does not permit")]
    NeedsBreak {
        /// The leaf.
        leaf: IovaRange,
    },
    /// Something is mapped there.
    #[error("{leaf} is mapped already")]
    Occupied {
        /// The leaf in the way.
        leaf: IovaRange,
    },
    /// A table without leaves stands where a larger leaf would go.
    ///
    /// Reclaim the range, sync, and map again; [`Domain`](crate::iommu::Domain) does.
    #[error("an empty table stands in the way of a leaf at {block}")]
    EmptyTable {
        /// What the table translates.
        block: IovaRange,
    },
    /// Nothing is mapped there.
    #[error("nothing is mapped at {hole}")]
    Hole {
        /// The first hole in the range, as far as the table tells at once.
        hole: IovaRange,
    },
    /// The range begins or ends inside a leaf.
    #[error("the range begins or ends inside the leaf {leaf}, which would have to be split")]
    WouldSplit {
        /// The leaf.
        leaf: IovaRange,
    },
    /// The table memory is used up.
    #[error("the table memory has no room for the tables of {range}: {asked} are needed")]
    NoTables {
        /// What was to be mapped.
        range: IovaRange,
        /// How many tables it takes.
        asked: usize,
    },
    /// An entry that no operation of this table wrote, or one that leads to no table.
    ///
    /// It is found by chance, and protects nothing: a device that writes tables reaches all memory,
    /// and may write entries that look like the table's own. See
    /// [`TableMemory`](super::TableMemory#corrupt-tables).
    #[error("the table did not write the entry for {iova} at level {level}")]
    Corrupt {
        /// An address that it translates.
        iova: Iova,
        /// Its level; level 0 has the smallest leaves.
        level: u32,
    },
}

/// A mapping that was refused. Translations and tables are as before, unless a tree grew for a
/// leaf larger than itself and met [`Error::EmptyTable`]: then it stays grown.
///
/// It turns into an [`Error`] by `?`, which forgets what was taken back. No table is in that, since
/// a refused mapping has freed those that it needed: nothing leaks. But hardware that walks the
/// table may have seen what was mapped for a moment. There `retired` is synced before the memory is
/// used otherwise, as a [`Domain`](crate::iommu::Domain) does.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[must_use = "hardware may have seen what was taken back: sync it"]
pub struct MapUndone<L> {
    /// The reason.
    pub error: Error,
    /// What was mapped before the error was found and taken back. Empty in most cases.
    pub retired: Retired<L>,
}

impl<L> From<MapUndone<L>> for Error {
    fn from(undone: MapUndone<L>) -> Self {
        undone.error
    }
}

impl Error {
    /// Returns what a front end that looks like Linux answers.
    ///
    /// Linux's own page tables do not agree among themselves; where they differ it is the number
    /// that io-pgtable-arm uses for overlap (`EEXIST`), and generic_pt for holes and wrapping
    /// ranges.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Range(error) => error.errno(),
            Self::NoSpans { .. }
            | Self::PageSize { .. }
            | Self::Misaligned { .. }
            | Self::MisalignedSpan { .. }
            | Self::NotOwned { .. }
            | Self::NoAccess { .. }
            | Self::Bitmap { .. }
            | Self::OutsideBitmap { .. }
            | Self::WouldSplit { .. }
            | Self::Unsupported { .. } => Errno::EINVAL,
            Self::NoDirtyBits { .. } => Errno::EOPNOTSUPP,
            Self::NeedsBreak { .. } => Errno::EBUSY,
            Self::OutsideAperture { .. } | Self::OutsideOutput { .. } => Errno::ERANGE,
            Self::Occupied { .. } | Self::EmptyTable { .. } => Errno::EEXIST,
            Self::Hole { .. } => Errno::ENOENT,
            Self::NoTables { .. } => Errno::ENOMEM,
            Self::Corrupt { .. } => Errno::EIO,
        }
    }
}
