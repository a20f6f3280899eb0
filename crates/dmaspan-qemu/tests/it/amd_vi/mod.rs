//! The driver of AMD's IOMMU against QEMU's model of one.
//!
//! Where the model falls short of the manual, `model` has a test that says so.
#![expect(unsafe_code, reason = "devices are let at the memory of a machine")]

mod attach;
mod events;
mod forget;
mod map;
mod model;
mod rig;
