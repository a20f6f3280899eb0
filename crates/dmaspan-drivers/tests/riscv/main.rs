//! The driver of RISC-V's IOMMU over hardware of software: what it writes, word for word, and what
//! it makes of hardware that is broken or hostile.

#[cfg(feature = "log")]
#[path = "../shared/capture.rs"]
mod capture;
mod commands;
mod contexts;
mod faults;
mod hardware;
#[expect(dead_code, reason = "each program of tests needs a part of it")]
#[path = "../shared/host.rs"]
mod host;
mod hostile;
#[path = "../shared/liar.rs"]
mod liar;
#[cfg(feature = "log")]
mod logged;
mod start;
#[path = "../shared/walks.rs"]
mod walked;
mod walks;
