//! The errors of registries and buffers.

use super::builder::BuildError;
use crate::account::OverLimit;
use crate::error::{Either, Errno};
use crate::prot::{Direction, Prot};
use crate::range::UserRange;

/// The reason why part of a buffer was not imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// Not all of it is in the buffer.
    #[error("{range} leaves the buffer of {len:#x} bytes{}", At(*buffer))]
    Outside {
        /// What was asked for, by the addresses that were registered.
        range: UserRange,
        /// What was registered; `None` where a buffer is only being made of it.
        buffer: Option<UserRange>,
        /// The length of the buffer, in bytes.
        len: u64,
    },
    /// No address is so far behind the beginning of the buffer.
    #[error("{len:#x} bytes at offset {offset:#x} wrap around: the buffer is {user}")]
    Wraps {
        /// The offset of the first byte.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// What was registered.
        user: UserRange,
    },
    /// A range of a vector has no bytes (`io_vec_fill_bvec` of Linux, io_uring/rsrc.c).
    #[error("the range at {start:#x} is empty")]
    Empty {
        /// Where it would begin.
        start: u64,
    },
    /// More bytes than one operation can have.
    #[error("{len:#x} bytes are more than the {limit:#x} bytes of one import")]
    TooLong {
        /// How many bytes.
        len: u64,
        /// The most.
        limit: u64,
    },
    /// The ranges have more bytes together than one operation can have.
    #[error("the ranges together have more than the {limit:#x} bytes of one import")]
    TooLongTogether {
        /// The most.
        limit: u64,
    },
    /// The buffer is not registered for data that goes that way.
    #[error("data goes {direction:?}, but {user} is registered for {access:?}")]
    Direction {
        /// What was registered.
        user: UserRange,
        /// What devices may do with it.
        access: Prot,
        /// What was asked for.
        direction: Direction,
    },
}

impl ImportError {
    /// `EFAULT`, and `EINVAL` for ranges that are too long together (`io_import_fixed` and
    /// `io_import_reg_vec` of Linux, io_uring/rsrc.c).
    pub const fn errno(&self) -> Errno {
        match self {
            Self::TooLongTogether { .. } => Errno::EINVAL,
            _ => Errno::EFAULT,
        }
    }
}

struct At(Option<UserRange>);

impl core::fmt::Display for At {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.map_or(Ok(()), |range| write!(f, ", {range}"))
    }
}

/// The reason why memory was not pinned as a buffer. Nothing is pinned or charged. `E` is the
/// pinner's error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PinBufferError<E: core::error::Error> {
    /// The owner may not have so much pinned.
    #[error("{user} was not pinned: {over}")]
    OverLimit {
        /// What was to be registered, to whole pages.
        user: UserRange,
        /// By how much.
        #[source]
        over: OverLimit,
    },
    /// The pinner's own reason.
    #[error("{user} was not pinned: {error}")]
    Pinner {
        /// What was to be registered, to whole pages.
        user: UserRange,
        /// Why.
        #[source]
        error: E,
        /// Its errno.
        errno: Errno,
    },
    /// Part of it is a device's, which may be taken away at any time.
    #[error("{user} is not all memory: a device's registers cannot be registered")]
    NotMemory {
        /// What was to be registered, to whole pages.
        user: UserRange,
    },
    /// It cannot be kept track of.
    #[error("{user} was not registered: {error}")]
    Segments {
        /// What was to be registered, to whole pages.
        user: UserRange,
        /// Why.
        #[source]
        error: BuildError,
    },
    /// The pinner gave more or fewer bytes than it was asked for.
    #[error("the pinner gave {got:#x} bytes for {user}")]
    Pinned {
        /// What was to be registered, to whole pages.
        user: UserRange,
        /// How many bytes it gave.
        got: u64,
    },
}

impl<E: core::error::Error> PinBufferError<E> {
    /// The errno: `ENOMEM` over the limit or without memory, `EFAULT` for what is no memory,
    /// `EOVERFLOW` for too many segments, or the pinner's (`io_sqe_buffer_register` of Linux,
    /// io_uring/rsrc.c).
    pub const fn errno(&self) -> Errno {
        match self {
            Self::OverLimit { over, .. } => over.errno(),
            Self::Pinner { errno, .. } => *errno,
            Self::NotMemory { .. } | Self::Pinned { .. } => Errno::EFAULT,
            Self::Segments { error, .. } => error.errno(),
        }
    }
}

/// The reason why a registry refused. `E` is the error of its source of buffers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error<E: core::error::Error> {
    /// There is no table.
    #[error("no table of buffers is registered")]
    NoTable,
    /// There is a table already.
    #[error("a table of {slots} buffers is registered already: unregister it first")]
    TableExists {
        /// How many slots it has.
        slots: u32,
    },
    /// A table has at least one slot, and not so many.
    #[error("a table cannot have {slots} buffers: it has 1 to {limit}")]
    TableLen {
        /// How many slots were asked for.
        slots: usize,
        /// The most.
        limit: u32,
    },
    /// There is no memory for the table.
    #[error("there is no memory for a table of {slots} buffers")]
    NoMemory {
        /// How many slots were asked for.
        slots: u32,
    },
    /// There are fewer slots.
    #[error("{}", Either(
        *count == 0,
        format_args!("no slots were asked for, of the table of {slots}"),
        format_args!("{count} slots from {index} on leave the table of {slots}"),
    ))]
    Index {
        /// The first slot.
        index: u32,
        /// How many.
        count: u32,
        /// How many slots there are.
        slots: u32,
    },
    /// Slots beyond what numbers can say.
    #[error("{count} slots from {index} on leave the {slots} of the table")]
    IndexOverflow {
        /// The first slot.
        index: u32,
        /// How many.
        count: u32,
        /// How many slots there are.
        slots: u32,
    },
    /// The slot is empty.
    #[error("slot {index} is empty")]
    Vacant {
        /// The slot.
        index: u32,
    },
    /// The slot is in use.
    #[error("slot {index} is in use")]
    Occupied {
        /// The slot.
        index: u32,
    },
    /// The buffer in the slot was registered as memory, not lent.
    #[error("the buffer in slot {index} was not lent: empty the slot by an update")]
    NotLent {
        /// The slot.
        index: u32,
    },
    /// There is nothing in the slot to be taken back.
    #[error("slot {index} is empty: no buffer was lent to it")]
    NothingLent {
        /// The slot.
        index: u32,
    },
    /// A length without an address.
    #[error("a buffer of {len:#x} bytes needs an address")]
    NoAddress {
        /// The length.
        len: u64,
    },
    /// An address without a length.
    #[error("the buffer at {start:#x} has no bytes")]
    Empty {
        /// The address.
        start: u64,
    },
    /// The range wraps.
    #[error("{len:#x} bytes at {start:#x} wrap beyond {:#x}", u64::MAX)]
    Wraps {
        /// The address.
        start: u64,
        /// The length.
        len: u64,
    },
    /// The buffer is too long.
    #[error("a buffer cannot have {len:#x} bytes: it has at most {limit:#x}")]
    TooLong {
        /// How many bytes; `u64::MAX` for more.
        len: u64,
        /// The most.
        limit: u64,
    },
    /// Devices could do nothing with it.
    #[error("{user} with {access:?} permits neither reads nor writes")]
    NoAccess {
        /// What was to be registered.
        user: UserRange,
        /// What was asked for.
        access: Prot,
    },
    /// An empty slot has no tag.
    #[error("slot {index} would be empty, so it cannot have the tag {tag:#x}")]
    TagOfVacant {
        /// The slot.
        index: u32,
        /// The tag.
        tag: u64,
    },
    /// The registries are of different owners, or of different address spaces.
    #[error("the registries have different owners or address spaces")]
    OtherOwner,
    /// Another task than the one that the source belongs to.
    #[error("the registry belongs to task {issuer}")]
    OtherTask {
        /// The task.
        issuer: u64,
    },
    /// Offsets without saying of how many buffers.
    #[error("a clone from slot {source_index} to slot {index} must say how many slots")]
    NoCount {
        /// The first slot of the source.
        source_index: u32,
        /// The first slot here.
        index: u32,
    },
    /// There is no buffer for it.
    #[error("slot {index}: {error}")]
    Buffer {
        /// The slot.
        index: u32,
        /// Why.
        #[source]
        error: E,
        /// Its errno.
        errno: Errno,
    },
}

impl<E: core::error::Error> Error<E> {
    /// The errno that Linux answers (io_uring/rsrc.c: `io_sqe_buffers_register`,
    /// `__io_sqe_buffers_update`, `io_clone_buffers` and `io_buffer_register_bvec`).
    pub const fn errno(&self) -> Errno {
        match self {
            Self::NoTable => Errno::ENXIO,
            Self::TableExists { .. } | Self::Occupied { .. } | Self::NotLent { .. } => Errno::EBUSY,
            Self::NoMemory { .. } => Errno::ENOMEM,
            Self::TableLen { .. }
            | Self::Index { .. }
            | Self::TooLong { .. }
            | Self::NoAccess { .. }
            | Self::NothingLent { .. }
            | Self::TagOfVacant { .. }
            | Self::OtherOwner
            | Self::NoCount { .. } => Errno::EINVAL,
            Self::IndexOverflow { .. } | Self::Wraps { .. } => Errno::EOVERFLOW,
            Self::Vacant { .. } | Self::NoAddress { .. } | Self::Empty { .. } => Errno::EFAULT,
            Self::OtherTask { .. } => Errno::EEXIST,
            Self::Buffer { errno, .. } => *errno,
        }
    }
}
