//! Descriptors, read back as the manuals say that devices read them.

mod common;
mod prp;
mod scatter;
mod sgl;
mod virtq;
