//! The DMA API: what a driver calls.
//!
//! A [`Device`] maps buffers and gets addresses for the device, translated, direct or bounced; it
//! need not know which.

mod attach;
mod attrs;
mod bounce;
mod device;
mod direct;
mod domain;
mod error;
mod list;
mod memory;
mod raw;
mod reservation;
mod scope;
mod single;
mod sync;

pub use attrs::{Attrs, CpuSync, Privilege};
pub use bounce::{BouncePool, NoPool, NoSlot, SlotRequest, To};
pub use device::{Device, DeviceConfig, DeviceLimits, Trust};
pub use direct::Direct;
pub use domain::{DmaConfig, DmaDomain, Flush, Translation};
pub use error::Error;
pub use list::{ListMapping, Segment, Segments, UnmapListFailed};
pub use memory::{DmaMemory, Piece, RawMemory, Via};
pub use reservation::{DestroyFailed, Reservation, ReserveRequest};
pub use scope::ScopeFailed;
pub use single::{Mapping, Refused, UnmapFailed, Unmapped};
