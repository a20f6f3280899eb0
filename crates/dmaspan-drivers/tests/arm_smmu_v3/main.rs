//! The driver of Arm's SMMUv3 over hardware that is made here: well-behaved, broken and hostile.

#[cfg(feature = "log")]
#[path = "../shared/capture.rs"]
mod capture;
mod commands;
mod contracts;
mod events;
mod failing;
mod hardware;
#[path = "../shared/host.rs"]
mod host;
#[path = "../shared/liar.rs"]
mod liar;
#[cfg(feature = "log")]
mod logged;
mod setup;
#[path = "../shared/walks.rs"]
mod walked;
mod walks;
