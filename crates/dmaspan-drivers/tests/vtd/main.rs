//! The driver of VT-d over hardware in memory, which may be broken or hostile.

#[cfg(feature = "log")]
#[path = "../shared/capture.rs"]
mod capture;
mod encodings;
mod entries;
mod fake;
mod fits;
mod frames;
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
