//! An NVMe driver over dmaspan, for authors of drivers to read and to copy. The [guide] to
//! user-space drivers leads here.
//!
//! [guide]: ../book/guides/driver.html
//!
//! It shows how a driver gets along without mapping anything for an I/O. Buffers are registered
//! with [`dmaspan::regbuf`] and mapped once. A command imports the range that it transfers, which
//! are spans as the controller sees them, and dmaspan turns them into PRPs in pages that the queue
//! has had since it was made:
//!
//! ```text
//! buffer ──import──► spans ──describe──► PRPs or SGL ──push, ring──► controller
//!   ▲                                                                    │
//!   └────────────── the slot holds a clone ◄───────reap──────────────────┘
//! ```
//!
//! | | |
//! |---|---|
//! | [`access`] | what comes from outside: registers, shared memory, buffers, time |
//! | `spec.rs` | registers, commands and structures, as bits |
//! | `queue.rs` | a pair of queues, and what commands in flight hold |
//! | `list.rs` | where the bytes of a command are, as the controller reads it |
//! | `controller.rs` | starting, identifying, making queues, shutting down |
//! | `namespace.rs`, `io.rs` | blocks; reading and writing them |
//! | `vfio` | with the feature `vfio`: controllers that a Linux process has by VFIO |
//! | `bin/dmaspan-nvme` | with the feature `program`: identifies, reads and measures them |
//!
//! ```
//! use dmaspan_nvme::access::Access;
//! use dmaspan_nvme::{Controller, Error, QueueConfig, Transfer};
//!
//! /// Reads 64 KiB, and then four times 4 KiB at once.
//! fn reads<A: Access>(access: A, buffer: &A::Buffer) -> Result<(), Error> {
//!     let mut controller = Controller::new(access, 1)?;
//!     let namespace = controller.namespace(1)?;
//!     let mut queue = controller.create_queue(QueueConfig::new(32))?;
//!     queue.read(&namespace, 0, buffer, 0..0x1_0000)?;
//!
//!     let blocks = 4096 / namespace.block_bytes();
//!     for n in 0..4 {
//!         let range = n * 4096..(n + 1) * 4096;
//!         queue.push(Transfer::Read, &namespace, n * n * blocks, buffer, range)?;
//!     }
//!     // The controller is told of all four at once.
//!     queue.ring();
//!     while queue.in_flight() > 0 {
//!         queue.reap(|completed| assert_eq!(completed.result, Ok(())))?;
//!     }
//!     controller.shutdown([queue])
//! }
//! ```
//!
//! **What the controller may use is never freed.** A slot holds what its command transfers until
//! the completion has come, a queue its memory until the controller has deleted it. Where the
//! controller does not answer, both are leaked. So there is no unsafe function here: the promises
//! are in the contracts of [`Access`](access::Access) and [`SharedMemory`](access::SharedMemory),
//! by who implements them.
//!
//! **Nothing that the controller does makes the driver hang or panic.** Each poll is bounded by
//! [`Access::pause`](access::Access::pause), and ends before that where the status of the
//! controller says that it has failed or is gone; completions are matched with what is in flight,
//! and one that is not is an error.
//!
//! **I/O allocates nothing,** takes no lock, and writes to memory that the queue has: commands,
//! lists and slots. Queues are polled. Between two polls a program may
//! [wait](IoQueue::wait) for an interrupt, where there are some.

#![no_std]

extern crate alloc;
#[cfg(feature = "vfio")]
extern crate std;

pub mod access;
mod controller;
mod error;
mod io;
mod list;
mod namespace;
mod queue;
mod spec;
#[cfg(feature = "vfio")]
pub mod vfio;

pub use controller::Controller;
pub use error::{Awaited, Error};
pub use io::{CommandId, Completed, IoQueue, QueueConfig, Transfer};
pub use namespace::Namespace;
pub use spec::{ControllerInfo, Opcode, Sgls, Status};
