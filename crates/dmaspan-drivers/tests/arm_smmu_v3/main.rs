//! The driver of Arm's SMMUv3 over hardware that is made here: well-behaved, broken and hostile.

mod commands;
mod events;
mod failing;
mod hardware;
#[expect(dead_code, reason = "each program of tests needs a part of it")]
#[path = "../shared/host.rs"]
mod host;
#[path = "../shared/liar.rs"]
mod liar;
mod setup;
