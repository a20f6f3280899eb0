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
//! | `io_tlb_used`, `io_tlb_used_hiwater` | [`Pool::stats`] |
//! | `set_memory_decrypted` of a pool | hooks of [`PoolMemory`] |
//! | `swiotlb=force` | [`dma::Bounce::Always`](crate::dma::Bounce::Always) |
//!
//! A driver need not know: a [`dma::Device`](crate::dma::Device) bounces what its device cannot or
//! must not have. Code that uses a pool by itself maps, syncs and unmaps:
//!
//! ```
//! # use std::sync::Arc;
//! use dmaspan::swiotlb::{Fill, Original, Pool, PoolConfig, SlotRequest};
//! use dmaspan::{Direction, PhysAddr, Span};
//! # use dmaspan_sim::memory::SimMemory;
//! # use dmaspan_sim::pool_memory::SimPoolMemory;
//! # use dmaspan::platform::OneThread;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let span = |addr, len| Span::new(PhysAddr::new(addr), len);
//! # let ram = Arc::new(SimMemory::new(PhysAddr::new(0x10_0000), 4 << 20, 12)?);
//! # let memory = SimPoolMemory::new(Arc::clone(&ram), vec![span(0x10_0000, 1 << 20)?])?;
//! # ram.allocate_at(span(0x30_0000, 0x1000)?)?;
//! // `memory`: a `PoolMemory`, which says where slots are and copies.
//! let pool = Pool::new(memory, PoolConfig::new(2), OneThread)?;
//! // SAFETY: the frame is this program's until the unmap, and nothing refers to it.
//! let packet = unsafe { Original::new(span(0x30_0200, 1500)?) };
//! let any = SlotRequest::default();
//!
//! // The device may write up to 1500 bytes, and says how many it wrote: no copy into the slot.
//! let bounced = pool.map(packet, Direction::FromDevice, Fill::Overwritten, &any)?;
//! println!("the device writes to {}", bounced.span());
//! # ram.cpu_write(bounced.span().paddr(), &[7; 60])?;
//! pool.unmap_written(bounced, 60)?;
//! # let mut bytes = [0; 61];
//! # ram.cpu_read(PhysAddr::new(0x30_0200), &mut bytes)?;
//! # assert!(bytes[..60] == [7; 60] && bytes[60] == 0);
//! # Ok(())
//! # }
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
pub use stats::PoolStats;
