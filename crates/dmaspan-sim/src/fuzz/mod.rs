//! Fuzzers call this: operations that any bytes choose, on tables of any format.
//!
//! `fuzz/` makes targets for libFuzzer of them, whose first byte chooses the format; the tests run
//! the same targets over random bytes and over those in `fuzz/seeds`.

mod choices;
mod hostile;
mod operations;

pub use choices::Bits;
pub use hostile::hostile;
pub(crate) use operations::Pair;
pub use operations::operations;
