//! Bounce pools, over simulated memory.
#![expect(unsafe_code, reason = "the tests own the originals")]

mod bad_input;
mod beyond_linux;
mod common;
mod dropped;
mod flat;
mod grown;
mod invariants;
mod listing;
mod model;
mod moving;
mod pool;
mod random;
mod sweep;
