//! The models that bounce buffers are measured against, and what stands in for a kernel there.
//!
//! | | |
//! |---|---|
//! | [`swiotlb_before`] | the bounce pool as Linux 5.19 had it, and patch by patch |
//! | [`spin`] | locks that spin, as a kernel's do |
//! | [`slots`] | slots to which nobody copies, or somebody does |
//!
//! `cargo xtask peers --series` measures against Linux's own code, before each series and after it.
//! Two of the three patches for swiotlb are in no Linux: a bitmap in place of run lengths, and the
//! slots released last taken first. Only the model has those.

pub(crate) mod slots;
pub(crate) mod spin;
pub(crate) mod swiotlb_before;
