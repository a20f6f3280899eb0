//! The driver against a controller in memory, which can misbehave, and what the program says.
#![expect(
    clippy::cast_possible_truncation,
    reason = "fields of registers, and places in memory of this process"
)]

mod access;
mod broken;
mod counting;
mod fake;
mod ram;
mod start;
mod transfers;
#[cfg(feature = "program")]
mod words;
