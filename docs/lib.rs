//! The examples of the documents, compiled by `cargo test`.
//!
//! A document has its place here when it belongs to no crate alone: the README of a crate is
//! compiled by that crate, from within its package.

/// The examples of the project's README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The example of writing_a_format.md.
#[cfg(doctest)]
#[doc = include_str!("writing_a_format.md")]
struct WritingAFormat;
