//! Domains, IOVAs and the DMA API, tried from outside. A program of its own: that of the formats
//! takes long to build.
#![expect(unsafe_code, reason = "the tests promise to keep memory that nobody has")]

mod attach;
mod common;
mod iova;
mod reservation;
mod reserved;
mod bounce;
mod raw;
mod rig;
mod single;
