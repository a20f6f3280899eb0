//! Registered buffers as Linux's io_uring keeps them, page by page or partly coalesced: what
//! `dmaspan::regbuf` is measured against.
//!
//! It follows the algorithms of `io_uring/rsrc.c`. A buffer is an array of bvecs, 16 bytes each: a
//! page, and offset and length from there. [`Coalescing`] says how many pages one stands for, as
//! three ages of Linux had it.
//!
//! - Registering takes the array of pages that pinning gave, 8 bytes each; looks whether they are
//!   whole folios; writes the bvecs; and charges the user: each page of a small folio, and a large
//!   folio whole where the ring has it for the first time, by a map of the ring from folios to
//!   counts (`io_sqe_buffer_register`, `io_buffer_account_pin`).
//! - An import finds the bvec of an offset in one step where all but the first and the last are
//!   equally long, else by a walk (`io_import_fixed`, `iov_iter_advance`).
//! - Descriptors come of one pass over the bvecs, which joins those that touch as far as a device's
//!   limits allow, and one over what that gave (`__blk_rq_map_sg`, `dma_direct_map_sg`).
//!
//! It is honest, so no slower than it must be. A bvec has the address of its page, where Linux has
//! to find that from the page's structure; that two pages are neighbours in a folio is seen from
//! their addresses, without a look at a structure for each; and nothing is allocated but the
//! arrays. Left out are the scan over all buffers of a ring by which Linux looked whether a folio
//! is charged before it had a map (`headpage_already_acct`: quadratic in the pages); pins given
//! back, and taken once for a folio, when a buffer is coalesced; the table of slots, the nodes in
//! it and their references; and lists of PRPs cut into pages.
//!
//! The account is that of Linux 7.2 with its fault: a [`RingBefore`] says how clones make it wrong.

mod buffer;
mod coalesce;
mod descriptors;
mod folio;
mod ring;
#[cfg(test)]
mod tests;

use dmaspan::{Direction, UserRange};

pub(crate) use buffer::{BufferBefore, ImportBefore};
pub(crate) use coalesce::Coalescing;
pub(crate) use descriptors::{BusBefore, EntryBefore, LimitsBefore, map_direct, map_sg, prps, sgl};
pub(crate) use folio::FolioBefore;
pub(crate) use ring::{RegisteredBefore, RingBefore, UserBefore};

/// log2 of the pages that all is counted in.
const PAGE_LG2: u32 = 12;
const PAGE: u64 = 1 << PAGE_LG2;

/// The longest buffer in bytes (`io_validate_user_buf_range`).
pub(crate) const MAX_LEN: u64 = 1 << 40;

/// The longest import in bytes (`MAX_RW_COUNT`): what an `int` counts, in whole pages.
pub(crate) const MAX_IMPORT: u64 = 0x7fff_f000;

/// Why a buffer was not registered, an import refused or descriptors not made. Nothing was changed,
/// but for entries that a caller has no use for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum RegbufBeforeError {
    /// A buffer is too long.
    #[error("the buffer {user} is longer than {max} bytes")]
    TooLong {
        /// The user's memory.
        user: UserRange,
        /// The most there may be.
        max: u64,
    },
    /// Not all pages under a buffer were pinned, or more than these.
    #[error("{pages} pages are pinned of {needed} under a buffer")]
    Pages {
        /// How many there are.
        pages: u64,
        /// How many the buffer begins, goes through and ends in.
        needed: u64,
    },
    /// The user's limit has no room.
    #[error("{asked} pages do not fit: {used} of {limit} are charged")]
    OverLimit {
        /// How many were to be charged.
        asked: u64,
        /// How many are.
        used: i64,
        /// How many may be.
        limit: u64,
    },
    /// An array or the map of folios has no memory.
    #[error("no memory for {bytes} bytes")]
    NoMemory {
        /// How many were asked for.
        bytes: u64,
    },
    /// An import is not within its buffer, or longer than an I/O may be.
    #[error("{len} bytes at {offset} are not within a buffer of {buffer}, or more than {max}")]
    Outside {
        /// Where it would begin, in bytes.
        offset: u64,
        /// How many bytes it would have.
        len: u64,
        /// How many the buffer has.
        buffer: u64,
        /// How many an import may have.
        max: u64,
    },
    /// The buffer is not there for that direction.
    #[error("a buffer for {has:?} was imported for {asked:?}")]
    Direction {
        /// What the import was for.
        asked: Direction,
        /// What the buffer is for.
        has: Direction,
    },
    /// Not all entries have a place.
    #[error("more than {room} entries are needed")]
    NoRoom {
        /// How many places there are.
        room: usize,
    },
    /// The device does not reach an entry.
    #[error("the {len} bytes at {addr:#x} are not all up to {last:#x}")]
    OutOfReach {
        /// Where the entry begins in memory.
        addr: u64,
        /// How many bytes it has.
        len: u32,
        /// The last address that the device can use.
        last: u64,
    },
    /// An entry in the middle does not begin or end with a page, or one has an odd address.
    #[error("the {len} bytes at {addr:#x} cannot be PRPs")]
    NotPages {
        /// Where the entry begins.
        addr: u64,
        /// How many bytes it has.
        len: u32,
    },
}

impl RegbufBeforeError {
    /// What Linux returns.
    #[cfg(test)]
    pub(crate) const fn errno(&self) -> dmaspan::Errno {
        use dmaspan::Errno;
        match self {
            Self::TooLong { .. } => Errno::EINVAL,
            Self::Pages { .. } | Self::Outside { .. } | Self::Direction { .. } => Errno::EFAULT,
            Self::OverLimit { .. } | Self::NoMemory { .. } => Errno::ENOMEM,
            Self::NoRoom { .. } => Errno::ENOSPC,
            Self::OutOfReach { .. } | Self::NotPages { .. } => Errno::EIO,
        }
    }
}
