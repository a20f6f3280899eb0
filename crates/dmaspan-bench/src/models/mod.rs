//! The models that the benchmarks measure against, and the stand-ins for hardware: Linux as it was,
//! and tables, pins and slots of which a part is left out of the time.
//!
//! | | |
//! |---|---|
//! | [`type1_before`] | the VFIO container as Linux 6.14 had it |
//! | [`swiotlb_before`] | the bounce pool as Linux 5.19 had it, and patch by patch |
//! | [`spin`] | locks that spin, as a kernel's do |
//! | [`regbuf_before`] | registered buffers as Linux's io_uring keeps them |
//! | [`unwalked`] | page tables that no hardware walks, divided among threads |
//! | [`replay`] | a pinner that has pinned already |
//! | [`simulated`] | simulated memory and a user of it |
//! | [`slots`] | slots to which nobody copies, or somebody does |

pub(crate) mod regbuf_before;
pub(crate) mod replay;
pub(crate) mod simulated;
pub(crate) mod slots;
pub(crate) mod spin;
pub(crate) mod swiotlb_before;
pub(crate) mod type1_before;
pub(crate) mod unwalked;
