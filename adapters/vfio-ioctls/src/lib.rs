#![doc = include_str!("../README.md")]
#![expect(unsafe_code, reason = "maps memory that others have by its address")]

mod guest;
mod space;

pub use guest::{GuestError, guest_region, guest_regions};
pub use space::{MappedGuest, Shared, SharedSpace};
