//! The examples of the documents, compiled by `cargo test`.
//!
//! A document has its place here when it belongs to no crate alone: the README of a crate is
//! compiled by that crate, from within its package.

/// The examples of the project's README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The example of the book's first page.
#[cfg(doctest)]
#[doc = include_str!("src/introduction.md")]
struct Introduction;

/// The example of how to add a page-table format.
#[cfg(doctest)]
#[doc = include_str!("src/adding/format.md")]
struct AddingAFormat;

/// The example of the guide for confidential guests.
#[cfg(doctest)]
#[doc = include_str!("src/guides/confidential.md")]
struct ConfidentialGuest;

/// The examples of the guide for kernels.
#[cfg(doctest)]
#[doc = include_str!("src/guides/kernel.md")]
struct Kernel;
