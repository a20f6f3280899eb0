//! The formats, each in a file of its own, from its architecture's manual.

pub(super) mod amd_v1;
pub(super) mod arm_lpae_s1;
#[cfg(test)]
mod check;
mod config;
pub(super) mod riscv;

pub use config::{ConfigError, DirtyTracking, Half};
