//! The driver of AMD's IOMMU over hardware that is a few words of memory, obeys to the letter, and
//! misbehaves where it is told to.
#![expect(unsafe_code, reason = "a driver is promised that memory and registers are hardware's")]

mod bringup;
#[cfg(feature = "log")]
#[path = "../shared/capture.rs"]
mod capture;
mod commands;
mod events;
mod fake;
mod hostile;
#[path = "../shared/liar.rs"]
mod liar;
#[cfg(feature = "log")]
mod logged;
mod switching;
#[path = "../shared/walks.rs"]
mod walked;
mod walks;
