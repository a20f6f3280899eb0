//! QEMU's `edu`, whose addresses have 28 bits: what it does not reach is bounced, or translated.

mod direct;
mod rig;
mod translated;
