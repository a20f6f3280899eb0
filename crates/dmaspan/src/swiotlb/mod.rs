//! Bounce buffers: memory that devices reach stands in for memory that they do not.
//!
//! A [`Pool`] does what Linux's kernel/dma/swiotlb.c does, without the words that all CPUs share:
//! it is divided into areas, each with a lock of its own on cache lines of its own. One bit says
//! whether a slot is free, and bits are found by words. The runs released last are taken first,
//! while they are still in the CPU's cache. A slot is a handle that is moved, so it is released
//! once and into its own pool.
//!
//! ```text
//!  take ──► latest runs of the CPU's area ──► its bitmap ──► other areas ──► runs over several
//!                                  other nodes ──► what the pool grew by ──► memory for this one
//! ```
//!
//! # From Linux
//!
//! | Linux's kernel/dma/swiotlb.c | here |
//! |---|---|
//! | `swiotlb_init`, `rmem_swiotlb_device_init` | [`Pool::new`], over a [`PoolMemory`] |
//! | `swiotlb_tbl_map_single` | [`Pool::map`]; without a copy [`Pool::take`] |
//! | `swiotlb_tbl_unmap_single` | [`Pool::unmap`], [`Pool::unmap_written`]; [`Pool::release`] |
//! | `swiotlb_sync_single_for_cpu` | [`Pool::sync_for_cpu`] |
//! | `swiotlb_sync_single_for_device` | [`Pool::sync_for_device`] |
//! | `dma_get_min_align_mask`, `swiotlb_max_mapping_size` | [`SlotRequest`], [`Pool::max_len`] |
//! | `CONFIG_SWIOTLB_DYNAMIC` | [`Pool::grow`], [`Pool::shrink`] |
//! | `io_tlb_used`, `io_tlb_used_hiwater` | [`Pool::stats`], by area [`Pool::area_stats`] |
//! | `set_memory_decrypted` of a pool | hooks of [`PoolMemory`] |
//! | `swiotlb=force` | [`dma::Bounce::Always`](crate::dma::Bounce::Always) |
//!
//! A driver need not know: a [`dma::Device`](crate::dma::Device) bounces what its device cannot or
//! must not have. Code that uses a pool by itself maps, syncs and unmaps:
//!
//! ```
//! use std::error::Error;
//!
//! use dmaspan::Direction;
//! use dmaspan::swiotlb::{Fill, Pool, PoolConfig, SlotRequest};
//! use dmaspan_linux::{BounceMemory, Memory, MemoryKind, UserPlatform};
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     // A `PoolMemory`, which says where slots are and copies: 1 MiB, in two areas.
//!     let shared = BounceMemory::new(MemoryKind::Base, 1 << 20)?;
//!     let pool = Pool::new(shared, PoolConfig::new(2), UserPlatform)?;
//!     // Memory that the device does not reach, and which lives for ever.
//!     let private: &Memory = Box::leak(Box::new(Memory::new(MemoryKind::Base, 0x1000)?));
//!     let packet = private.original(0x200, 1500)?;
//!     let any = SlotRequest::default();
//!
//!     // The device may write up to 1500 bytes, and says how many it wrote: no copy into the slot.
//!     let bounced = pool.map(packet, Direction::FromDevice, Fill::Overwritten, &any)?;
//!     let slot = bounced.span().start().get() - pool.reach().start().get();
//!     pool.memory().memory().write(slot, &[7; 60])?; // as the device does
//!     pool.unmap_written(bounced, 60)?;
//!     let mut bytes = [0; 61];
//!     private.read(0x200, &mut bytes)?;
//!     assert!(bytes[..60] == [7; 60] && bytes[60] == 0);
//!     Ok(())
//! }
//! ```
//!
//! [Lease](Pool::lease) a slot once for a buffer that is used again and again. A pool that is too
//! small obtains memory for single requests, and [grows](Pool::grow) and [shrinks](Pool::shrink) by
//! whole chunks; [`PoolMemory`] allocates, and shares with the host of a confidential guest.

mod area;
mod batch;
mod bitmap;
mod chunk;
mod config;
mod error;
mod growth;
mod lease;
mod list;
mod marks;
mod memory;
mod pool;
mod recent;
mod request;
mod slot;
mod stats;

pub use config::{Growth, MAX_AREAS, PoolConfig, Wipe};
pub use error::Error;
pub use lease::Lease;
pub use list::{ListedSlots, SlotPlace, SlotUse};
pub use memory::{HostRefused, InSlot, Original, PoolMemory, Room, To, Transfer};
pub use pool::{BouncedOf, Pool, SlotOf};
pub use request::SlotRequest;
pub use slot::{Bounced, Fill, NotReleased, Slot};
pub use stats::{AreaStats, PoolStats};
