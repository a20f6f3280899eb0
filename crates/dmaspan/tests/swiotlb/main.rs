//! Bounce pools, over simulated memory.
#![expect(unsafe_code, reason = "the tests own the originals")]

mod common;
mod pool;
