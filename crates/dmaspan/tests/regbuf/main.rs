//! Registered buffers, tried from outside.
#![expect(unsafe_code, reason = "the tests promise what pinned memory is")]

mod accounting;
mod common;
mod descriptors;
mod directory;
mod edges;
mod errnos;
mod failures;
mod held;
mod import;
mod layouts;
mod mapped;
mod regions;
mod tables;
mod threads;
