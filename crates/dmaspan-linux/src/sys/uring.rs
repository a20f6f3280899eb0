//! A table of registered io_uring buffers (io_uring_register(2)): memory pinned for the long term.
//!
//! The ring runs no operation. A registered buffer keeps its pages pinned (`FOLL_LONGTERM` in the
//! kernel: neither moved nor swapped) until its slot is emptied or the ring closed.

#![expect(unsafe_code, reason = "registers memory with the kernel")]

use std::ptr;

use dmaspan::Errno;
use io_uring::IoUring;

use crate::os;
use crate::sys::mapping::Mapping;

/// The entries of the submission queue: the least, as none is ever used.
const ENTRIES: u32 = 1;

/// A ring whose buffer table is filled slot by slot.
pub(crate) struct BufferTable {
    ring: IoUring,
}

impl BufferTable {
    /// A table of `slots` empty slots (`IORING_RSRC_REGISTER_SPARSE`, Linux 5.19).
    pub(crate) fn new(slots: u32) -> Result<Self, Errno> {
        let ring = IoUring::new(ENTRIES).map_err(|error| os::errno(&error))?;
        ring.submitter().register_buffers_sparse(slots).map_err(|error| os::errno(&error))?;
        Ok(Self { ring })
    }

    /// Registers `len` bytes from `offset` of `memory` in an empty `slot`.
    pub(crate) fn fill(
        &self,
        slot: u32,
        memory: &Mapping,
        offset: usize,
        len: usize,
    ) -> Result<(), Errno> {
        let buffer = libc::iovec { iov_base: memory.part(offset, len)?, iov_len: len };
        self.update(slot, buffer)
    }

    /// Empties `slot`: its pages are not pinned by it any more.
    pub(crate) fn empty(&self, slot: u32) -> Result<(), Errno> {
        self.update(slot, libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 })
    }

    fn update(&self, slot: u32, buffer: libc::iovec) -> Result<(), Errno> {
        // SAFETY:
        // 1. `buffer` is memory of a live mapping, or empty, when the kernel pins it.
        // 2. The kernel accesses a registered buffer only for operations that name it, and this
        //    ring never gets one. So the pages are held, and nothing is read or written through
        //    them, even where the mapping goes first.
        let result =
            unsafe { self.ring.submitter().register_buffers_update(slot, &[buffer], None) };
        result.map_err(|error| os::errno(&error))
    }
}

impl std::fmt::Debug for BufferTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BufferTable").finish_non_exhaustive()
    }
}
