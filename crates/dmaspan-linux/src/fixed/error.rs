//! The errors of making a pool, of attaching it, and of beginning an operation.

use std::ops::Range;
use std::time::Duration;

use dmaspan::Errno;

use crate::mem::MemoryError;
use crate::os::{self, Size};
use crate::registration::{CHUNK, RegisterError, SLOTS};
use crate::sys;

/// The reason why there is no pool. Nothing stays mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The slices are empty, no multiple of the base page, or longer than a registered buffer.
    #[error(
        "slices cannot have {slice_len:#x} bytes: ask for a multiple of {}, and at most {}",
        Size(sys::page_size()), Size(*limit)
    )]
    SliceLength {
        /// The length asked for, in bytes.
        slice_len: u64,
        /// The longest, in bytes.
        limit: u64,
    },
    /// No slices, or more than an index can say.
    #[error("a pool cannot have {slices} slices: ask for 1 to {limit}")]
    SliceCount {
        /// How many were asked for.
        slices: u64,
        /// The most.
        limit: u64,
    },
    /// Registered buffers that are too short or too long, or that cut a page in two.
    #[error(
        "registered buffers cannot have {buffer_len:#x} bytes: ask for a multiple of the page size \
         {}, at least the slice length {slice_len:#x}, and at most {}",
        Size(*page_size), Size(CHUNK)
    )]
    BufferLength {
        /// The most bytes of a buffer that were asked for.
        buffer_len: u64,
        /// The bytes of a slice.
        slice_len: u64,
        /// The bytes of a page of the memory.
        page_size: u64,
    },
    /// The pool needs more registered buffers than a ring has.
    #[error(
        "the pool needs {needed} registered buffers but a ring has only {SLOTS}: make them longer, \
         or make several pools"
    )]
    TooManyBuffers {
        /// How many it needs.
        needed: u32,
    },
    /// More bytes than there are addresses.
    #[error("the pool is larger than the address space: ask for less")]
    TooLarge,
    /// The application's memory does not begin at a page.
    #[error(
        "memory at {start:#x} does not begin at a multiple of {}: align it",
        Size(sys::page_size())
    )]
    Misaligned {
        /// Its first address.
        start: u64,
    },
    /// The application's memory has no room for one slice.
    #[error(
        "memory of {len:#x} bytes has no room for a slice of {slice_len:#x}: ask for smaller slices"
    )]
    TooShort {
        /// The bytes of the memory.
        len: u64,
        /// The bytes of a slice.
        slice_len: u64,
    },
    /// There is no such memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// There is no memory for the list of free slices.
    #[error("there is no memory for a list of {slices} slices: ask for fewer, larger ones")]
    NoMemory {
        /// How many slices were asked for.
        slices: u64,
    },
}

impl PoolError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::SliceLength { .. }
            | Self::BufferLength { .. }
            | Self::SliceCount { .. }
            | Self::Misaligned { .. }
            | Self::TooShort { .. } => Errno::EINVAL,
            Self::TooManyBuffers { .. } => Errno::ENOSPC,
            Self::TooLarge => Errno::EOVERFLOW,
            Self::NoMemory { .. } => Errno::ENOMEM,
            Self::Memory(error) => error.errno(),
        }
    }
}

/// No slice came back in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "all {slices} slices of the pool stayed taken for {bound:?}: drop buffers or reap completions \
     meanwhile, or make the pool larger"
)]
pub struct AllTaken {
    /// How many the pool has.
    pub slices: u32,
    /// How long the wait was.
    pub bound: Duration,
}

impl AllTaken {
    /// `EBUSY`.
    pub const fn errno(&self) -> Errno {
        Errno::EBUSY
    }
}

/// The reason why a pool is not attached to a ring. Each of the slots is empty, or holds what it
/// held; a ring that had no table has none, and the ring can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingAttachError {
    /// The memory cannot be registered, or there is no ring to do it with.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The slots are not all in the table that the ring has.
    #[error(
        "the pool needs slots {first} to {} of the ring's table, which is shorter: register a \
         longer sparse table, or attach the pool before registering one",
        (u64::from(*first) + u64::from(*needed)).saturating_sub(1)
    )]
    TableTooShort {
        /// The first slot.
        first: u32,
        /// How many slots the pool needs.
        needed: u32,
    },
    /// No ring has so many slots.
    #[error(
        "{needed} buffers from slot {first} on do not fit in the {SLOTS} of a ring: begin lower"
    )]
    BeyondTable {
        /// The first slot.
        first: u32,
        /// How many slots the pool needs.
        needed: u32,
    },
    /// No ring has room for so many operations, or for none.
    #[error("a ring cannot do {depth} operations at a time: ask for 1 to {limit}")]
    Depth {
        /// How many were asked for.
        depth: u32,
        /// The most.
        limit: u32,
    },
    /// The kernel does not change the ring's table.
    #[error("the ring does not take buffers: {}", ring_advice(*errno))]
    Ring {
        /// What the kernel answered.
        errno: Errno,
    },
    /// The buffers cannot be shared with the ring, and sharing was demanded.
    #[error("the ring cannot share the pool's buffers ({}): {}", os::words(*errno),
        clone_advice(*errno))]
    Clone {
        /// What the kernel answered.
        errno: Errno,
    },
}

impl RingAttachError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Register(error) => error.errno(),
            Self::TableTooShort { .. } | Self::BeyondTable { .. } | Self::Depth { .. } => {
                Errno::EINVAL
            }
            Self::Ring { errno } | Self::Clone { errno } => *errno,
        }
    }
}

/// What is wrong with a ring (io_uring_register(2), ERRORS).
pub(super) fn ring_advice(errno: Errno) -> String {
    match errno {
        Errno::EEXIST => "it was made with IORING_SETUP_SINGLE_ISSUER by another thread, which \
                          must attach and detach the pool"
            .to_owned(),
        os::EBADFD => {
            "it was made with IORING_SETUP_R_DISABLED: enable it or use one thread".to_owned()
        }
        Errno::EACCES => "its restrictions forbid registering buffers: register them before they \
                          are enabled"
            .to_owned(),
        os::ENXIO => "it has no table of buffers".to_owned(),
        Errno::EOPNOTSUPP => "the file is no ring of io_uring".to_owned(),
        errno => os::words(errno),
    }
}

/// Why buffers are not cloned (io_uring_register(2), `IORING_REGISTER_CLONE_BUFFERS`).
pub(super) fn clone_advice(errno: Errno) -> &'static str {
    match errno {
        Errno::EBUSY => {
            "the ring has a table of its own, which Linux 6.13 and newer can add to; attach the \
             pool to it first"
        }
        Errno::EINVAL => {
            "it was made by another user or process, or with another privilege to lock memory, \
             than the pool's first; or the kernel is older than 6.12, or than 6.13 for a ring that \
             has buffers"
        }
        Errno::EOPNOTSUPP => "this kernel cannot clone buffers; Linux 6.12 can",
        Errno::EACCES => {
            "its restrictions forbid cloning buffers: allow it, or register the memory again"
        }
        os::ENXIO => "there are no buffers to clone",
        _ => "register the memory again instead",
    }
}

/// The reason why an operation does not begin. Nothing was queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// The bytes are not all in the slice.
    #[error("bytes {:#x}..{:#x} are not all in a slice of {len:#x} bytes", bytes.start, bytes.end)]
    Outside {
        /// The bytes asked for.
        bytes: Range<usize>,
        /// The length of the slice.
        len: usize,
    },
    /// The buffer is of another pool than the one attached to the ring.
    #[error(
        "the buffer belongs to another pool than the ring has: take one from the pool of the ring"
    )]
    OtherPool,
    /// The ring was detached from its pool.
    #[error("the ring has no buffers: attach its pool again")]
    NotAttached,
    /// As many operations are in flight as the ring has room for.
    #[error("{depth} operations are in flight, which is the limit: take completions first")]
    Full {
        /// The most operations at a time.
        depth: usize,
    },
}

impl OperationError {
    /// The errno.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Outside { .. } => Errno::EFAULT,
            Self::OtherPool | Self::NotAttached => Errno::EINVAL,
            Self::Full { .. } => Errno::EBUSY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_of_a_ring_says_what_to_change() {
        for (errno, part) in [
            (Errno::EEXIST, "IORING_SETUP_SINGLE_ISSUER"),
            (os::EBADFD, "IORING_SETUP_R_DISABLED"),
            (Errno::EACCES, "restrictions"),
            (os::ENXIO, "no table of buffers"),
            (Errno::EIO, "Input/output error"),
        ] {
            let error = RingAttachError::Ring { errno };
            assert!(error.to_string().contains(part), "{error}");
            assert_eq!(error.errno(), errno);
        }
    }

    #[test]
    fn every_refusal_to_share_says_which_kernel_or_user_can() {
        for (errno, part) in [
            (Errno::EBUSY, "Linux 6.13"),
            (Errno::EINVAL, "another user"),
            (Errno::EOPNOTSUPP, "Linux 6.12"),
            (Errno::EACCES, "restrictions"),
            (os::ENXIO, "no buffers to clone"),
            (Errno::EIO, "register the memory again"),
        ] {
            let error = RingAttachError::Clone { errno };
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
