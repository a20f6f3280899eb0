//! A [`FixedRing`] is a ring of its own for a pool: it reads and writes without anything unsafe.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;

use super::{
    DetachError, FixedBuf, FixedPool, OperationError, RefusedOperation, RingAttachError,
    RingAttachment, Sharing,
};
use crate::os;
use crate::registration::RegisterError;
use crate::sys::flight::Way;
use crate::sys::flights::{Flights, Op};

/// The most operations at a time (`IORING_MAX_ENTRIES`).
const MAX_DEPTH: u32 = 1 << 15;

/// A ring whose operations own their buffers and files until they are done.
///
/// Dropping it asks the kernel to cancel what is in flight and waits up to two seconds each for
/// that and for what cannot be cancelled. The slices of operations that are not done then are
/// leaked, so that nobody reuses them.
///
/// An operation that waits, as a read of an empty pipe does, may end with `ECANCELED` where the
/// thread that submitted it has ended.
///
/// See [`fixed`](super) for an example.
#[derive(Debug)]
pub struct FixedRing {
    flights: Flights,
    attachment: RingAttachment,
    state: State,
}

/// Whether the ring has its pool's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Attached,
    Detached,
}

/// An operation that is done.
#[derive(Debug)]
#[must_use = "dropping a completion gives the buffer back to its pool"]
pub struct Completion {
    /// The buffer, with what was read.
    pub buffer: FixedBuf,
    /// What the operation was begun with.
    pub token: u64,
    /// How many bytes were moved. Fewer than asked for at the end of a file.
    pub result: io::Result<usize>,
}

impl FixedRing {
    /// A ring for `depth` operations at a time, with the pool's buffers.
    ///
    /// # Errors
    ///
    /// [`RingAttachError`]; [`RegisterError::Unavailable`] where there can be no ring.
    pub fn new(pool: &FixedPool, depth: u32) -> Result<Self, RingAttachError> {
        Self::with(pool, depth, Sharing::Auto)
    }

    /// The same, with a say in whether the pool's registration is shared.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new) and [`FixedPool::attach_by`].
    pub fn with(pool: &FixedPool, depth: u32, sharing: Sharing) -> Result<Self, RingAttachError> {
        if depth == 0 || depth > MAX_DEPTH {
            return Err(RingAttachError::Depth { depth, limit: MAX_DEPTH });
        }
        let flights = Flights::new(depth)
            .map_err(|error| RegisterError::Unavailable { errno: os::errno(&error) })?;
        let attachment = pool.attach_by(&flights.submitter(), 0, sharing)?;
        Ok(Self { flights, attachment, state: State::Attached })
    }

    /// Returns where the pool's buffers are, and how they came there.
    pub fn attachment(&self) -> &RingAttachment {
        &self.attachment
    }

    /// Returns how many operations there can be at a time.
    pub fn depth(&self) -> usize {
        self.flights.depth()
    }

    /// Returns how many operations are queued, submitted, or done and not taken by
    /// [`completion`](Self::completion).
    pub fn in_flight(&self) -> usize {
        self.flights.in_flight()
    }

    /// Queues a read of `bytes.len()` bytes at `offset` of `file` into `bytes` of the buffer.
    /// `offset` is `u64::MAX` for files that have no position. The completion carries `token`.
    ///
    /// # Errors
    ///
    /// [`RefusedOperation`], with the buffer: bytes that are not all in it, a buffer of another
    /// pool, or too many operations.
    ///
    /// # Context
    ///
    /// Neither locks nor allocates. Nothing begins before [`submit`](Self::submit).
    #[inline]
    pub fn read<T: Pod>(
        &mut self,
        buffer: FixedBuf<T>,
        bytes: Range<usize>,
        file: &Arc<File>,
        offset: u64,
        token: u64,
    ) -> Result<(), RefusedOperation<T>> {
        self.begin(Way::Read, buffer, bytes, file, offset, token)
    }

    /// Queues a read as [`read`](Self::read) does, by the buffer's address and not by its
    /// registration (`IORING_OP_READ`): the kernel pins its pages for this operation alone, as it
    /// does for memory that nobody registered. It shows what the registration saves.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    ///
    /// # Context
    ///
    /// As [`read`](Self::read).
    #[inline]
    pub fn read_unregistered<T: Pod>(
        &mut self,
        buffer: FixedBuf<T>,
        bytes: Range<usize>,
        file: &Arc<File>,
        offset: u64,
        token: u64,
    ) -> Result<(), RefusedOperation<T>> {
        self.begin(Way::ReadUnregistered, buffer, bytes, file, offset, token)
    }

    /// Queues a write of `bytes` of the buffer at `offset` of `file`, as [`read`](Self::read) does
    /// a read.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    ///
    /// # Context
    ///
    /// As [`read`](Self::read).
    #[inline]
    pub fn write<T: Pod>(
        &mut self,
        buffer: FixedBuf<T>,
        bytes: Range<usize>,
        file: &Arc<File>,
        offset: u64,
        token: u64,
    ) -> Result<(), RefusedOperation<T>> {
        self.begin(Way::Write, buffer, bytes, file, offset, token)
    }

    /// Queues a write as [`write`](Self::write) does, by the buffer's address and not by its
    /// registration (`IORING_OP_WRITE`), as [`read_unregistered`](Self::read_unregistered) does a
    /// read.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    ///
    /// # Context
    ///
    /// As [`read`](Self::read).
    #[inline]
    pub fn write_unregistered<T: Pod>(
        &mut self,
        buffer: FixedBuf<T>,
        bytes: Range<usize>,
        file: &Arc<File>,
        offset: u64,
        token: u64,
    ) -> Result<(), RefusedOperation<T>> {
        self.begin(Way::WriteUnregistered, buffer, bytes, file, offset, token)
    }

    fn begin<T: Pod>(
        &mut self,
        way: Way,
        buffer: FixedBuf<T>,
        bytes: Range<usize>,
        file: &Arc<File>,
        offset: u64,
        token: u64,
    ) -> Result<(), RefusedOperation<T>> {
        if self.state == State::Detached {
            return Err(RefusedOperation { buffer, error: OperationError::NotAttached });
        }
        let (slice, len) = (buffer.into_slice(), self.attachment.pool().slice_len());
        let Some(slot) = self.attachment.slot_of(&slice) else {
            let buffer = FixedBuf::new(slice);
            return Err(RefusedOperation { buffer, error: OperationError::OtherPool });
        };
        let is_inside = bytes.start <= bytes.end && bytes.end <= len;
        let op = Op { way, bytes: bytes.clone(), slot, file, offset, token };
        self.flights.start(slice, op).map_err(|slice| RefusedOperation {
            buffer: FixedBuf::new(slice),
            error: if is_inside {
                OperationError::Full { depth: self.flights.depth() }
            } else {
                OperationError::Outside { bytes, len }
            },
        })
    }

    /// Submits what is queued; says how many operations that were.
    ///
    /// # Errors
    ///
    /// Those of io_uring_enter(2). What was not submitted stays queued.
    #[inline]
    pub fn submit(&mut self) -> io::Result<usize> {
        self.submit_and_wait(0)
    }

    /// Submits what is queued, and waits until `want` operations are done. More than are in flight
    /// are not waited for.
    ///
    /// # Errors
    ///
    /// As [`submit`](Self::submit). `EINTR` where a signal ended the wait.
    #[inline]
    pub fn submit_and_wait(&mut self, want: usize) -> io::Result<usize> {
        self.flights.submitter().submit_and_wait(want.min(self.flights.in_flight()))
    }

    /// Takes one operation that is done; `None` where none is.
    #[inline]
    pub fn completion(&mut self) -> Option<Completion> {
        self.flights.land().map(|landed| Completion {
            buffer: FixedBuf::new(landed.slice),
            token: landed.token,
            result: landed.result,
        })
    }

    /// Registers the pool's memory anew, also while operations are in flight; see
    /// [`RingAttachment::renew`].
    ///
    /// # Errors
    ///
    /// As [`FixedPool::attach_by`].
    pub fn renew(&mut self, sharing: Sharing) -> Result<(), RingAttachError> {
        self.state = State::Detached;
        self.attachment.renew(&self.flights.submitter(), sharing)?;
        self.state = State::Attached;
        Ok(())
    }

    /// Lets the pool's buffers go, also while operations are in flight; see
    /// [`RingAttachment::detach`]. [`renew`](Self::renew) brings them back.
    ///
    /// # Errors
    ///
    /// As [`RingAttachment::detach`].
    pub fn detach(&mut self) -> Result<(), DetachError> {
        self.state = State::Detached;
        self.attachment.detach(&self.flights.submitter())
    }
}
