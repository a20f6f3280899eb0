//! The container, tried from outside. A program of its own: that of the formats takes long to
//! build.
#![expect(unsafe_code, reason = "the tests promise what pinned memory is")]

mod access;
mod account;
mod alone;
mod api;
mod at_once;
mod batches;
mod busy;
mod common;
mod dirty;
mod domains;
mod emulated;
mod external;
mod fail_nth;
mod failures;
mod followed;
mod hooked;
mod info;
mod interrupted;
mod listing;
mod mappings;
mod pfnmap;
mod precedence;
mod quarantine;
mod random;
mod reach;
mod recovery;
mod selftests;
mod stress;
mod type1;
mod vaddr;
mod walks;
