//! The arguments of io_uring_register(2) for tables of buffers (include/uapi/linux/io_uring.h): the
//! crate `io-uring` has them for its own rings alone.

use super::structures;

/// `IORING_UNREGISTER_BUFFERS`: lets the whole table go.
pub(crate) const UNREGISTER_BUFFERS: u32 = 1;
/// `IORING_REGISTER_BUFFERS2`: makes a table.
pub(crate) const REGISTER_BUFFERS2: u32 = 15;
/// `IORING_REGISTER_BUFFERS_UPDATE`: changes slots.
pub(crate) const REGISTER_BUFFERS_UPDATE: u32 = 16;
/// `IORING_REGISTER_CLONE_BUFFERS`: shares another ring's buffers.
pub(crate) const REGISTER_CLONE_BUFFERS: u32 = 30;

/// `IORING_RSRC_REGISTER_SPARSE`: the slots of the table are empty.
pub(crate) const REGISTER_SPARSE: u32 = 1;
/// `IORING_REGISTER_DST_REPLACE`: what the slots held goes.
pub(crate) const CLONE_DST_REPLACE: u32 = 2;

structures! {
    /// `struct io_uring_rsrc_register`.
    RsrcRegister (32) {
        nr: u32 = 0,
        flags: u32 = 4,
        resv2: u64 = 8,
        data: u64 = 16,
        tags: u64 = 24,
    }

    /// `struct io_uring_rsrc_update2`.
    RsrcUpdate (32) {
        offset: u32 = 0,
        resv: u32 = 4,
        data: u64 = 8,
        tags: u64 = 16,
        nr: u32 = 24,
        resv2: u32 = 28,
    }

    /// `struct io_uring_clone_buffers`.
    CloneBuffers (32) {
        src_fd: u32 = 0,
        flags: u32 = 4,
        src_off: u32 = 8,
        dst_off: u32 = 12,
        nr: u32 = 16,
        pad: [u32; 3] = 20,
    }
}
