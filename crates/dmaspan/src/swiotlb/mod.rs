//! Bounce buffers: memory that devices reach stands in for memory that they do not.
//!
//! What Linux's kernel/dma/swiotlb.c does, without its shared words: a [`Pool`] is divided into
//! areas, each with a lock of its own on cache lines of its own. Which slots are free is a bit
//! each, found by words; the slots released last are taken first, while they are still in the
//! CPU's cache. A slot is a handle that is moved, so it is released once and into its own pool.
//!
//! ```text
//!  take ──► latest runs of the CPU's area ──► its bitmap ──► other areas ──► runs over several
//!                                  other nodes ──► what the pool grew by ──► memory for this one
//! ```

mod area;
mod batch;
mod bitmap;
mod chunk;
mod config;
mod error;
mod growth;
mod lease;
mod memory;
mod pool;
mod recent;
mod request;
mod slot;
mod stats;

pub use config::{Growth, MAX_AREAS, PoolConfig, Wipe};
pub use error::Error;
pub use lease::Lease;
pub use memory::{HostRefused, InSlot, Original, PoolMemory, Room, To, Transfer};
pub use pool::{BouncedOf, Pool, SlotOf};
pub use request::SlotRequest;
pub use slot::{Bounced, Fill, Kept, Slot};
pub use stats::Stats;
