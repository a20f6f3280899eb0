//! The formats: each is a file of its own, written from its architecture's manual.

pub(super) mod amd_v1;
mod arm_lpae;
pub(super) mod arm_lpae_32;
pub(super) mod arm_lpae_s1;
pub(super) mod arm_lpae_s2;
pub(super) mod arm_v7s;
#[cfg(test)]
mod check;
mod config;
mod manuals;
pub(super) mod riscv;
pub(super) mod vtd_ss;
pub(super) mod x86_64;

pub use config::{BreakBeforeMake, ConfigError, DirtyTracking, Half};
