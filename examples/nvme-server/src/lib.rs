//! An NVMe disk for virtual machines, in a process of its own: a vfio-user server.
//!
//! A VMM is the client: it sends the files of its guest's memory, and accesses of the guest to the
//! device's registers. Nothing that a client sends is trusted. One thread reads messages
//! ([`Session`]); others do what the guest's commands say ([`Controller`]), between the guest's
//! memory and the file without a copy, so that a slow disk keeps no access waiting. All guest
//! memory is reached by [`GuestMemory`], for as long as one operation takes.
//!
//! There is no unsafe code.

mod bytes;
mod config;
mod controller;
mod disk;
mod listen;
mod memory;
mod session;
mod wire;

pub use controller::{Controller, Counts};
pub use disk::Disk;
pub use listen::{Clients, listen, raise_limit};
pub use memory::{GuestMemory, Observer};
pub use session::{Report, Session};
pub use wire::{Message, WireError};
