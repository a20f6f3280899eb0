//! Registered buffers: made ready once, used for ever.
//!
//! Storage engines, servers of virtual devices and user-space drivers do millions of operations on
//! the same memory. It is pinned, coalesced and perhaps mapped when it is registered, and an
//! operation only says which bytes it wants:
//!
//! ```text
//! user range ──Source──► Buffer { segments } ──Registry──► Node ──import──► spans, descriptors
//!              pinned, charged, mapped        by slot       in flight
//! ```
//!
//! | | |
//! |---|---|
//! | [`Segments`] | where a buffer's bytes are: as few pieces as can be, found at once by offset |
//! | [`Source`] | who makes buffers: [`Pinned`] pins, [`Regions`] looks up, `dma` maps memory |
//! | [`Regions`], [`Held`] | a client's memory, as a server reaches it; a part that is held |
//! | [`Buffer`] | memory that is ready, until its last reference is gone |
//! | [`Registry`] | a table of buffers, as that of an io_uring |
//! | [`Import`], [`VectoredImport`] | part of a buffer, as contiguous pieces |
//! | [`descriptors`] | what devices read to find them |
//!
//! | Linux's io_uring | here |
//! |---|---|
//! | `IORING_REGISTER_BUFFERS2` | [`Registry::register`] |
//! | its flag `IORING_RSRC_REGISTER_SPARSE` | [`Registry::register_sparse`] |
//! | `IORING_REGISTER_BUFFERS_UPDATE` | [`Registry::update`], with tags |
//! | `IORING_UNREGISTER_BUFFERS` | [`Registry::unregister`] |
//! | `IORING_REGISTER_CLONE_BUFFERS` | [`Registry::clone_from`], [`Registry::clone_within`] |
//! | `io_find_buf_node`, `io_import_reg_buf` | [`Registry::get`], [`Buffer::import`] |
//! | `io_import_reg_vec` | [`Buffer::import_vectored`] |
//! | `io_buffer_register_bvec` of ublk | [`Registry::lend`] |
//! | `struct io_mapped_ubuf`, its `bvec`s | [`Buffer`], [`Segments`] |
//!
//! A program that only wants memory *pinned and kept so*, with its physical addresses, until it
//! drops a guard needs no registry: [`Pinned::buffer`] gives a [`Buffer`], whose
//! [`segments`](Buffer::segments) say where the memory is, and which unpins it when it is dropped.
//! A user-space driver without an IOMMU has its queues and buffers so (`LinuxPinner::pin_whole` of
//! `dmaspan-linux` is this, for a whole memory).
//!
//! Linux does this in io_uring/rsrc.c. Beyond that, pieces are joined over folios of any and of
//! mixed sizes and over frames that happen to be neighbours; nothing is kept for each page, not
//! even while registering; pinned memory is charged once, by the page, and the charge is right
//! under clones; buffers may be read-only.

mod buffer;
mod builder;
mod clone;
pub mod descriptors;
mod error;
mod import;
mod pinned;
mod regions;
mod registry;
mod segments;
mod source;
mod vectored;

pub use buffer::{Buffer, Keep, MAX_IMPORT, Node, TagSink};
pub use builder::{BuildError, SegmentsBuilder};
pub use clone::{CloneRequest, Existing};
pub use error::{Error, ImportError, PinBufferError};
pub use import::{Import, Outside};
pub use pinned::Pinned;
pub use regions::{
    Held, HeldError, HostMemory, HostSlice, HostSlices, RegionError, Regions, RemoteMemory,
    Unmapping,
};
pub use registry::{BufferRequest, MAX_BUFFER_LEN, MAX_BUFFERS, Registry};
pub use segments::Segments;
pub use source::{Owner, Source};
pub use vectored::VectoredImport;
