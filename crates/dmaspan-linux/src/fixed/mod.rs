//! Fixed buffers of io_uring: memory that is registered once and then used for any number of reads
//! and writes, without pinning a page again.
//!
//! A [`FixedPool`] cuts the best memory that the machine gives into equal slices. It is attached to
//! any ring of the `io-uring` crate; the first time its memory is registered, and other rings share
//! that registration (`IORING_REGISTER_CLONE_BUFFERS`, Linux 6.12), so memory is pinned and charged
//! once. A slice is taken as a [`FixedBuf`], and moves into the operation that reads or writes it:
//! nobody can touch or reuse its bytes before the completion.
//!
//! ```text
//! FixedPool ──take──► FixedBuf ──read, write──► in flight ──completion──► FixedBuf ──drop──┐
//!     ▲                                                                                    │
//!     └────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Runtimes that have a ring of their own, and take buffers by value (compio, monoio), get the pool
//! by [`attach_fd`](FixedPool::attach_fd). A wrapper of a [`FixedBuf`] implements their trait of
//! buffers: [`as_ptr`](FixedBuf::as_ptr) is the same for as long as the pool lives, and the runtime
//! keeps the buffer until it has seen the completion. See
//! [`as_mut_ptr`](FixedBuf::as_mut_ptr) for an example.
//!
//! | type | what |
//! |---|---|
//! | [`FixedPool`] | the memory, its slices, and attaching it to rings |
//! | [`FixedBuf`] | one slice, as `[T]` |
//! | [`FixedRing`] | a ring whose operations own their buffers and files: nothing unsafe |
//! | [`InFlight`] | an operation of the application's own ring, or of a runtime's |
//! | [`Taking`] | a slice that is waited for |
//! | [`RingAttachment`] | where in a ring's table the pool's buffers are |
//!
//! | Linux's io_uring | here |
//! |---|---|
//! | `IORING_REGISTER_BUFFERS` | [`FixedPool::attach`], [`FixedRing::new`] |
//! | `IORING_REGISTER_CLONE_BUFFERS` | the same, for each ring but the first ([`Sharing`]) |
//! | `IORING_OP_READ_FIXED` | [`FixedRing::read`]; in rings of your own [`FixedBuf::read`] |
//! | `IORING_OP_WRITE_FIXED` | [`FixedRing::write`]; in rings of your own [`FixedBuf::write`] |
//! | `IORING_UNREGISTER_BUFFERS` | [`RingAttachment::detach`], [`FixedRing::detach`] |
//!
//! ```
//! use std::fs::File;
//! use std::sync::Arc;
//!
//! use dmaspan_linux::fixed::{FixedPool, FixedRing, PoolOptions};
//!
//! let pool = FixedPool::new(&PoolOptions::new(4096, 8))?;
//! let mut ring = FixedRing::new(&pool, 4)?;
//! let file = Arc::new(File::open("/proc/self/exe")?);
//!
//! let buffer = pool.take().ok_or("every slice is taken")?;
//! ring.read(buffer, 0..4, &file, 0, 7)?;
//! ring.submit_and_wait(1)?;
//! let done = ring.completion().ok_or("nothing is done")?;
//! assert_eq!((done.token, done.result?), (7, 4));
//! assert_eq!(&done.buffer[..4], b"\x7fELF");
//! Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attach;
mod buffer;
mod choice;
mod error;
mod pool;
mod ring;
mod taking;

pub use attach::{AttachMethod, DetachError, RingAttachment, Sharing};
pub use buffer::{FixedBuf, RefusedOperation};
pub use choice::{MemoryChoice, PassedOver, Provenance, WhyNot};
pub use error::{AllTaken, OperationError, PoolError, RingAttachError};
pub use pool::{FixedPool, PoolOptions};
pub use ring::{Completion, FixedRing};
pub use taking::Taking;

pub use crate::sys::flight::{InFlight, RingFile};
