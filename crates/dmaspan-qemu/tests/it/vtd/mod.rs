//! The driver of VT-d against QEMU's model of it.

mod faults;
mod isolation;
mod queue;
mod rig;
mod translation;
