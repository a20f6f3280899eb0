//! A client of the server, and a guest with a driver of its own.
#![expect(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

mod client;
mod guest;
mod hostile;
mod judge;
mod listening;
mod transfers;
