//! Rings whose tables of buffers change: of the crate `io-uring`, or of a runtime that has its own.

#![expect(unsafe_code, reason = "registers memory with the kernel")]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use dmaspan::Errno;
use io_uring::Submitter;
use io_uring::types::CloneBuffersFlags;

use crate::fixed::{DetachError, FixedPool, RingAttachError, RingAttachment, Sharing};
use crate::os;
use crate::sys::uapi::io_uring as uapi;

/// A ring whose table is changed.
#[derive(Clone, Copy)]
pub(crate) enum Ring<'r> {
    /// One of the crate `io-uring`.
    Submitter(&'r Submitter<'r>),
    /// Any other: what is known of it is its file.
    Fd(BorrowedFd<'r>),
}

impl Ring<'_> {
    /// Gives a ring without a table one of `slots` empty slots (`IORING_RSRC_REGISTER_SPARSE`,
    /// Linux 5.19).
    pub(crate) fn make_sparse(self, slots: u32) -> Result<(), Errno> {
        match self {
            Self::Submitter(ring) => {
                ring.register_buffers_sparse(slots).map_err(|error| os::errno(&error))
            }
            Self::Fd(fd) => {
                let flags = uapi::REGISTER_SPARSE;
                let argument = uapi::RsrcRegister { nr: slots, flags, ..Default::default() };
                // SAFETY:
                // 1. The request reads the structure, which is as long as is said, and no other
                //    memory: a table of empty slots has neither data nor tags.
                unsafe { register(fd, uapi::REGISTER_BUFFERS2, &argument, len_of(&argument)) }
            }
        }
    }

    /// Lets the whole table go.
    pub(crate) fn unregister(self) -> Result<(), Errno> {
        match self {
            Self::Submitter(ring) => ring.unregister_buffers().map_err(|error| os::errno(&error)),
            Self::Fd(fd) => {
                // SAFETY:
                // 1. The request has no argument.
                unsafe { register::<()>(fd, uapi::UNREGISTER_BUFFERS, ptr::null(), 0) }
            }
        }
    }

    /// Changes one slot: for several the kernel reports how many it did, which the crate
    /// `io-uring` drops.
    pub(crate) fn update(self, slot: u32, buffer: libc::iovec) -> Result<(), Errno> {
        match self {
            Self::Submitter(ring) => {
                // SAFETY:
                // 1. The kernel pins the pages that are mapped at `buffer` now, or fails with
                //    `EFAULT`; it reads and writes nothing. Pinned pages stay when the mapping
                //    goes.
                // 2. The kernel accesses a registered buffer only for operations that name it. To
                //    queue one is unsafe (`SubmissionQueue::push`), and promises that the memory
                //    may be accessed.
                let result = unsafe { ring.register_buffers_update(slot, &[buffer], None) };
                result.map_err(|error| os::errno(&error))
            }
            Self::Fd(fd) => {
                let data = (&raw const buffer).expose_provenance();
                // `usize` has 64 bits wherever the crate builds.
                let data = u64::try_from(data).unwrap_or(0);
                let argument = uapi::RsrcUpdate { offset: slot, data, nr: 1, ..Default::default() };
                // SAFETY:
                // 1. The request reads the structure, which is as long as is said, and one `iovec`
                //    at `data`, which lives until the call returns.
                // 2. The rest is as above; a runtime queues operations by unsafe code as well.
                unsafe { register(fd, uapi::REGISTER_BUFFERS_UPDATE, &argument, len_of(&argument)) }
            }
        }
    }

    /// Puts `count` buffers of the ring `source` from its first slot on into slots `first..`; all
    /// of them where `count` is 0.
    pub(crate) fn clone_from(
        self,
        source: BorrowedFd<'_>,
        first: u32,
        count: u32,
        flags: CloneBuffersFlags,
    ) -> Result<(), Errno> {
        match self {
            Self::Submitter(ring) => {
                let source = source.as_raw_fd();
                let result = ring.register_buffers_clone_offset(source, 0, first, count, flags);
                result.map_err(|error| os::errno(&error))
            }
            Self::Fd(fd) => {
                let argument = uapi::CloneBuffers {
                    // The number of an open file is not negative.
                    src_fd: u32::try_from(source.as_raw_fd()).unwrap_or(u32::MAX),
                    flags: flags.bits(),
                    dst_off: first,
                    nr: count,
                    ..Default::default()
                };
                // SAFETY:
                // 1. The request reads one structure, and no other memory.
                unsafe { register(fd, uapi::REGISTER_CLONE_BUFFERS, &argument, 1) }
            }
        }
    }
}

const _: () = assert!(CloneBuffersFlags::DST_REPLACE.bits() == uapi::CLONE_DST_REPLACE);

/// io_uring_register(2).
///
/// # Safety
///
/// The request reads `argument` and what that names, which live until the call returns, and writes
/// neither.
unsafe fn register<T>(
    ring: BorrowedFd<'_>,
    request: u32,
    argument: *const T,
    count: u32,
) -> Result<(), Errno> {
    let fd = ring.as_raw_fd();
    // SAFETY:
    // 1. The caller's promise. A file that is no ring is `EOPNOTSUPP`, and nothing else happens.
    let result =
        unsafe { libc::syscall(libc::SYS_io_uring_register, fd, request, argument, count) };
    if result < 0 { Err(os::last_errno()) } else { Ok(()) }
}

/// The length of an argument, as the kernel is told it.
fn len_of<T>(_argument: &T) -> u32 {
    // They have 32 bytes.
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

impl FixedPool {
    /// Puts the pool's buffers into slots `first_slot..first_slot + buffers()` of a ring that is
    /// known by its file alone: that of a runtime, such as compio or monoio, which has the ring to
    /// itself. All else is as [`attach`](Self::attach) says.
    ///
    /// The runtime's own operations do the I/O. Each owns a [`FixedBuf`](crate::fixed::FixedBuf),
    /// or the [`InFlight`](crate::fixed::InFlight) that has the entry of a fixed read or write,
    /// until the runtime has seen its completion and [`complete_with`] is called.
    ///
    /// ```
    /// use std::os::fd::{AsFd, AsRawFd};
    ///
    /// use dmaspan_linux::fixed::{FixedPool, PoolOptions, RingFile};
    ///
    /// let pool = FixedPool::new(&PoolOptions::new(4096, 1))?;
    /// // The ring of a runtime.
    /// let mut ring = io_uring::IoUring::new(4)?;
    /// // SAFETY: nobody else uses the slots that the pool gets.
    /// let attachment = unsafe { pool.attach_fd(ring.as_fd(), 0)? };
    /// let file = std::fs::File::open("/proc/self/exe")?;
    ///
    /// let buffer = pool.take().ok_or("every slice is taken")?;
    /// let operation = buffer.read(&attachment, RingFile::Fd(file.as_raw_fd()), 0, 0..4)?;
    /// // SAFETY: the operation owns the buffer until it is completed, and the file is open.
    /// unsafe { ring.submission().push(&operation.entry())? };
    /// ring.submit_and_wait(1)?;
    /// let result = ring.completion().next().ok_or("nothing is done")?.result();
    /// // SAFETY: the ring had this operation alone, and it is done.
    /// let (buffer, read) = unsafe { operation.complete_with(result) };
    /// assert_eq!((read?, &buffer[..4]), (4, &b"\x7fELF"[..]));
    /// Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [`complete_with`]: crate::fixed::InFlight::complete_with
    ///
    /// # Errors
    ///
    /// As [`attach`](Self::attach), and [`RingAttachError::Ring`] with `EOPNOTSUPP` where the file
    /// is no ring.
    ///
    /// # Context
    ///
    /// As [`attach`](Self::attach).
    ///
    /// # Safety
    ///
    /// The ring's owner has left these slots to the caller: no other code relies on what they hold,
    /// and none queues an operation that names them for memory that is not its own.
    pub unsafe fn attach_fd(
        &self,
        ring: BorrowedFd<'_>,
        first_slot: u32,
    ) -> Result<RingAttachment, RingAttachError> {
        self.attach_to(Ring::Fd(ring), first_slot, Sharing::Auto)
    }
}

impl RingAttachment {
    /// Empties the slots of a ring that is known by its file alone, as [`detach`](Self::detach)
    /// does.
    ///
    /// # Errors
    ///
    /// As [`detach`](Self::detach).
    ///
    /// # Context
    ///
    /// As [`FixedPool::attach`].
    ///
    /// # Safety
    ///
    /// `ring` is the ring that was attached, and no other code relies on what these slots hold.
    pub unsafe fn detach_fd(&self, ring: BorrowedFd<'_>) -> Result<(), DetachError> {
        self.detach_from(Ring::Fd(ring))
    }
}
