//! The errors of making descriptors.

use crate::addr::DmaAddr;
use crate::error::Errno;
use crate::span::Span;

/// The reason why no descriptors were made. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The boundary is no power of two.
    #[error("the boundary {boundary:#x} is not a power of two")]
    Boundary {
        /// It.
        boundary: u64,
    },
    /// No such memory page size: 2^(12 + `mps`) bytes, of a field of four bits.
    #[error("memory pages cannot have 2^(12 + {mps}) bytes: the field is at most 15")]
    MemoryPageSize {
        /// The field, `CC.MPS`.
        mps: u32,
    },
    /// A packed ring has 1 to 2^15 descriptors.
    #[error("a packed ring cannot have {size} descriptors: it has 1 to 32768")]
    QueueSize {
        /// How many it should have.
        size: u16,
    },
    /// There are no bytes to describe.
    #[error("there are no bytes to describe")]
    Empty,
    /// An address has to be a multiple of something and is not.
    #[error("{addr} is not aligned to {align:#x} bytes")]
    Unaligned {
        /// It: the beginning of the transfer, or of a page of a list.
        addr: DmaAddr,
        /// What it has to be a multiple of.
        align: u64,
    },
    /// A span ends inside a page and is not the last, or begins inside one and is not the first.
    #[error("{span} begins or ends inside a page of {page:#x} bytes in the middle of the transfer")]
    AmidPage {
        /// It, with the spans that touch it.
        span: Span<DmaAddr>,
        /// The size of a page.
        page: u64,
    },
    /// A page of a list goes beyond the memory page that it lies in, has more bytes than a
    /// descriptor can tell, or should end with a pointer to the next one and cannot.
    #[error("the list page at {addr} has {entries} entries, but needs {expected} in its place")]
    ListPage {
        /// Where it begins.
        addr: DmaAddr,
        /// How many entries it has.
        entries: usize,
        /// How many it may have, or needs to be chained.
        expected: usize,
    },
    /// More descriptors are needed than there is room for.
    #[error("{needed} descriptors are needed, and there is room for {room}")]
    Room {
        /// How many are needed; pointers from one page of a list to the next do not count.
        needed: usize,
        /// How many of them have room.
        room: usize,
    },
    /// A virtio chain of more than 2^32 bytes.
    #[error("a chain cannot have {bytes:#x} bytes: it has at most {max:#x}")]
    TooLong {
        /// How many bytes it would have; `u64::MAX` for more.
        bytes: u64,
        /// How many it may have.
        max: u64,
    },
}

impl Error {
    /// The errno of it: `ENOSPC` where there is no room, `ERANGE` for more bytes than can be told,
    /// and `EINVAL` for the rest.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Room { .. } => Errno::ENOSPC,
            Self::TooLong { .. } => Errno::ERANGE,
            Self::Boundary { .. }
            | Self::MemoryPageSize { .. }
            | Self::QueueSize { .. }
            | Self::Empty
            | Self::Unaligned { .. }
            | Self::AmidPage { .. }
            | Self::ListPage { .. } => Errno::EINVAL,
        }
    }
}
