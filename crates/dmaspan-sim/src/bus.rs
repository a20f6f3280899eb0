//! Physical memory, as a device sees it: the core's [`Bus`], which device models of users have too.

pub use dmaspan::iommu::soft::{Bus, BusError};
