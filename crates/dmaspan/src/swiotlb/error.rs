//! The errors of a pool.

use super::request::SlotRequest;
use crate::error::{Either, Errno};
use crate::prot::Direction;
use crate::span::Span;

/// The reason why a pool did not do what it was asked to. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No run of free slots is long enough and as it has to be.
    #[error("no free slots fit {len:#x} bytes; {free:#x} bytes are free in all")]
    Full {
        /// How many bytes were asked for.
        len: u64,
        /// How many bytes of slots are free, scattered or out of reach.
        free: u64,
    },
    /// No span of the pool is as long.
    #[error("{len:#x} bytes are more than the {max:#x} bytes of the pool's longest span")]
    TooLong {
        /// How many bytes were asked for.
        len: u64,
        /// How many the longest span of the pool has.
        max: u64,
    },
    /// The device reaches none of the pool.
    #[error("the pool begins at {lowest:#x}, beyond {last:#x}, the last address of the device")]
    Unreachable {
        /// The last address that the device can use.
        last: u64,
        /// The first address of the pool.
        lowest: u64,
    },
    /// Nowhere in the pool, were it empty, would a slot be so.
    #[error("no place in the pool suits {original} and {request:x?}")]
    Unfit {
        /// What the slot should stand in for.
        original: Span,
        /// What it should be like.
        request: SlotRequest,
    },
    /// The bits to keep are not low ones.
    #[error("the bits to keep, {keep_bits:#x}, are not 2^n - 1")]
    KeepBits {
        /// They.
        keep_bits: u64,
    },
    /// The granule is no power of two.
    #[error("the granule {granule:#x} is not a power of two")]
    Granule {
        /// It.
        granule: u64,
    },
    /// The boundary is no power of two.
    #[error("the boundary {boundary:#x} is not a power of two")]
    Boundary {
        /// It.
        boundary: u64,
    },
    /// The slot is of another pool.
    #[error("the slot at {addr:#x} belongs to another pool")]
    Foreign {
        /// Where its bytes are.
        addr: u64,
    },
    /// No bytes, or not all of them are the slot's.
    #[error("{}", Either(
        *len == 0,
        format_args!("no bytes were asked for, of the {mapped:#x} bytes of the slot"),
        format_args!(
            "{len:#x} bytes at {offset:#x} are not within the {mapped:#x} bytes of the slot"
        ),
    ))]
    Outside {
        /// The offset of the first byte.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// How many the slot has.
        mapped: u64,
    },
    /// Data does not go that way.
    #[error("a slot whose data goes {direction:?} does not permit this call")]
    Direction {
        /// Which way it goes.
        direction: Direction,
    },
    /// A slot was not filled, since the device writes all of it, and nobody said how much it wrote.
    #[error("the slot was not filled: say how many of its bytes the device wrote")]
    Unreported,
    /// Slots are powers of two, from 64 bytes to 1 GiB.
    #[error("slots cannot have {bytes:#x} bytes: ask for a power of two from 0x40 to 0x40000000")]
    SlotSize {
        /// What was asked for.
        bytes: u64,
    },
    /// A span of a pool has to begin on a slot and have whole ones, up to 2^31.
    #[error("{span} is not a whole number, from 1 to 2^31, of slots of {slot:#x} bytes")]
    PoolSpan {
        /// The span.
        span: Span,
        /// The size of a slot.
        slot: u64,
    },
    /// A pool without memory.
    #[error("the pool's memory has no span, or more than {max}")]
    Spans {
        /// How many it may have.
        max: usize,
    },
    /// The host did not share or take back memory of a pool. It is never used again.
    #[error("the host refused to change who sees {span}; the pool never uses it again")]
    Host {
        /// The memory.
        span: Span,
    },
    /// The pool does not grow, or would beyond its limit.
    #[error("{}", Either(
        *limit == 0,
        format_args!("the pool has no room to grow: `PoolConfig::growth` gives it some"),
        format_args!("growing by {bytes:#x} bytes exceeds the limit of {limit:#x} bytes"),
    ))]
    GrowthLimit {
        /// By how much.
        bytes: u64,
        /// The limit; 0 where it does not grow at all.
        limit: u64,
    },
    /// The pool's memory has no copies of what a slot was asked for.
    #[error("the pool cannot copy to and from {original}, which its memory does not find")]
    NoCopies {
        /// The memory that the slot was to stand in for, by the numbers of its addresses.
        original: Span,
    },
    /// Out of memory, for slots or for the records of them.
    #[error("there is no memory for {bytes:#x} bytes of slots")]
    NoMemory {
        /// How many bytes of slots.
        bytes: u64,
    },
}

impl Error {
    /// The errno that Linux has for it. Where its DMA API only says `DMA_MAPPING_ERROR`, drivers
    /// make `ENOMEM` of a pool that is full.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Full { .. } | Self::NoMemory { .. } | Self::GrowthLimit { .. } => Errno::ENOMEM,
            Self::Unreachable { .. } => Errno::ERANGE,
            Self::Host { .. } => Errno::EIO,
            Self::NoCopies { .. } => Errno::EFAULT,
            Self::TooLong { .. }
            | Self::Unfit { .. }
            | Self::KeepBits { .. }
            | Self::Granule { .. }
            | Self::Boundary { .. }
            | Self::Foreign { .. }
            | Self::Outside { .. }
            | Self::Direction { .. }
            | Self::Unreported
            | Self::SlotSize { .. }
            | Self::PoolSpan { .. }
            | Self::Spans { .. } => Errno::EINVAL,
        }
    }
}
