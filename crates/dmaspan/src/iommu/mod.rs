//! Domains.
mod ops;
pub use ops::{HardwareError, Invalidation, IommuOps, Scope, Tables};
