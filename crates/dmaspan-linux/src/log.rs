//! Messages for people, by the crate `log`, where the feature of that name is on. Without the
//! feature they are no code: their arguments are looked at by the compiler alone.
//!
//! They stand where something leaks, or a device is attached or goes, and on no way that a request
//! takes.

pub(crate) use dmaspan::{__info as info, __warn as warn};
