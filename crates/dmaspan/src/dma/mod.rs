//! The DMA API: what a driver calls.
//!
//! A [`Device`] maps buffers and gets addresses for the device, translated, direct or bounced; it
//! need not know which.

mod attach;
mod bounce;
mod device;
mod domain;
mod error;
mod memory;
mod reservation;
mod single;

pub use bounce::{BouncePool, NoPool, NoSlot, SlotRequest, To};
pub use device::{Device, DeviceConfig, DeviceLimits, Trust};
pub use domain::{DmaConfig, DmaDomain, Flush, Translation};
pub use error::Error;
pub use memory::{DmaMemory, Piece, RawMemory, Via};
pub use reservation::{DestroyFailed, Reservation, ReserveRequest};
pub use single::{Mapping, Refused, UnmapFailed, Unmapped};
