//! Tables of registered io_uring buffers (io_uring_register(2)): memory pinned for the long term.
//!
//! A registered buffer keeps its pages pinned (`FOLL_LONGTERM` in the kernel: neither moved nor
//! swapped) until its slot is emptied or the ring closed, and the operations that use it are done.
//! A [`BufferTable`] has a ring of its own that runs no operation; [`fill`], [`empty`] and
//! [`BufferTable::clone_into`] work on the table of any [`Ring`].

use std::os::fd::AsFd;
use std::ptr;

use dmaspan::Errno;
use io_uring::IoUring;
use io_uring::types::CloneBuffersFlags;

use crate::os;
use crate::sys::ring::Ring;

/// The entries of the submission queue: the least, as none is ever used.
const ENTRIES: u32 = 1;

/// Memory of this process that is to be registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    /// The first byte.
    pub(crate) start: *mut libc::c_void,
    /// The length in bytes.
    pub(crate) len: usize,
}

/// A ring whose buffer table is filled slot by slot.
pub(crate) struct BufferTable {
    ring: IoUring,
}

impl BufferTable {
    /// A table of `slots` empty slots (`IORING_RSRC_REGISTER_SPARSE`, Linux 5.19).
    pub(crate) fn new(slots: u32) -> Result<Self, Errno> {
        let ring = IoUring::new(ENTRIES).map_err(|error| os::errno(&error))?;
        Ring::Submitter(&ring.submitter()).make_sparse(slots)?;
        Ok(Self { ring })
    }

    /// Registers memory in an empty `slot`.
    pub(crate) fn fill(&self, slot: u32, buffer: Buffer) -> Result<(), Errno> {
        fill(Ring::Submitter(&self.ring.submitter()), slot, buffer)
    }

    /// Empties `slot`: its pages are not pinned by it any more.
    pub(crate) fn empty(&self, slot: u32) -> Result<(), Errno> {
        empty(Ring::Submitter(&self.ring.submitter()), slot)
    }

    /// Whether this kernel has `IORING_REGISTER_CLONE_BUFFERS` (Linux 6.12). It looks at the number
    /// of the operation before it looks for the ring to clone from, and there is none of this
    /// number.
    pub(crate) fn can_clone(&self) -> bool {
        let no_ring = -1;
        let result = self.ring.submitter().register_buffers_clone_offset(
            no_ring,
            0,
            0,
            0,
            CloneBuffersFlags::DST_REPLACE,
        );
        // Linux 6.12 lacks the flag, and says so before it looks.
        let plain = || self.ring.submitter().register_buffers_clone(no_ring);
        let errno = |result: std::io::Result<()>| result.err().map(|error| os::errno(&error));
        let has = |errno| errno == Some(os::EBADF) || errno == Some(Errno::EBUSY);
        has(errno(result)) || has(errno(plain()))
    }

    /// Puts the first `count` buffers of this table into slots `first..` of `ring`, which gets a
    /// table, or a longer one, where it needs one. What the slots held goes. Linux 6.13; 6.12
    /// clones whole tables into rings that have none.
    pub(crate) fn clone_into(&self, ring: Ring<'_>, first: u32, count: u32) -> Result<(), Errno> {
        let source = self.ring.as_fd();
        match ring.clone_from(source, first, count, CloneBuffersFlags::DST_REPLACE) {
            Err(Errno::EINVAL) if first == 0 => {
                ring.clone_from(source, 0, 0, CloneBuffersFlags::empty())
            }
            result => result,
        }
    }
}

impl Drop for BufferTable {
    fn drop(&mut self) {
        // Closing the ring would end the pins too, but later. A table that cannot be dropped now
        // goes with the ring.
        let _ = self.ring.submitter().unregister_buffers();
    }
}

impl std::fmt::Debug for BufferTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BufferTable").finish_non_exhaustive()
    }
}

/// Registers memory in `slot` of a ring's table. What the slot held goes.
pub(crate) fn fill(ring: Ring<'_>, slot: u32, buffer: Buffer) -> Result<(), Errno> {
    ring.update(slot, libc::iovec { iov_base: buffer.start, iov_len: buffer.len })
}

/// Empties `slot` of a ring's table. Operations in flight keep what it held until they are done.
pub(crate) fn empty(ring: Ring<'_>, slot: u32) -> Result<(), Errno> {
    ring.update(slot, libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 })
}
