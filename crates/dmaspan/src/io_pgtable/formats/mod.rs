//! The formats, each in a file of its own, from its architecture's manual.

pub(super) mod arm_lpae_s1;
mod config;

pub use config::{ConfigError, Half};
