//! Messages for people, by the crate `log`, where the feature of that name is on. Without the
//! feature they are no code: their arguments are looked at by the compiler alone.
//!
//! They stand where hardware refuses something, or a stream is switched, and on no way that a
//! command that is done takes.

pub(crate) use dmaspan::{__info as info, __warn as warn};
