//! The container, tried from outside. A program of its own: that of the formats takes long to
//! build.
#![expect(unsafe_code, reason = "the tests promise what pinned memory is")]

mod account;
mod busy;
mod common;
mod dirty;
mod domains;
mod failures;
mod info;
mod mappings;
mod pfnmap;
mod quarantine;
mod type1;
mod vaddr;
