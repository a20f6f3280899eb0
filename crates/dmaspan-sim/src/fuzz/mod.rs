//! What fuzzers call: bodies that take any bytes and panic where something is wrong.
//!
//! The first byte chooses a format and its configuration. `fuzz/` makes a target of each function
//! for libFuzzer; here they run over random bytes and over the corpus in `fuzz/seeds`.

mod choices;
mod formats;
mod hostile;
mod operations;
#[cfg(test)]
mod tests;

use choices::Choices;

/// Reads operations from bytes and applies them to a page table and to an interval map.
///
/// # Panics
///
/// Where the two disagree, or a table leaks.
pub fn operations(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    formats::with(choices.byte(), operations::Apply(choices));
}

/// Reads the words of tables from bytes, and then operations on a tree of these tables: entries
/// that no operation wrote, links to tables that are none, and tables that lead to themselves.
///
/// # Panics
///
/// Where an operation does.
pub fn hostile(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    formats::with(choices.byte(), hostile::Attack(choices));
}
