//! The `Hal`, and drivers of virtio-drivers over it.

mod drivers;
mod hal;
mod model;
mod pools;
mod rig;
mod transport;
