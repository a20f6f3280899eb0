//! Bounce pools, over simulated memory.
#![expect(unsafe_code, reason = "the tests own the originals")]

mod bad_input;
mod beyond_linux;
mod borders;
mod common;
mod dropped;
mod flat;
mod grown;
mod invariants;
mod leaks;
mod listing;
mod model;
mod moving;
mod obtained;
mod pool;
mod random;
mod sweep;

/// Allocations of a thread fail where its test says so.
#[global_allocator]
static ALLOCATOR: dmaspan_sim::allocator::Watched = dmaspan_sim::allocator::Watched;
