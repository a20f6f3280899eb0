//! The driver of RISC-V's IOMMU over hardware of software: what it writes, word for word, and what
//! it makes of hardware that is broken or hostile.

mod commands;
mod contexts;
mod faults;
mod hardware;
mod host;
mod hostile;
#[path = "../shared/liar.rs"]
mod liar;
mod start;
