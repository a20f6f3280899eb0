//! Domains, IOVAs and the DMA API, tried from outside. A program of its own: that of the formats
//! takes long to build.
#![expect(unsafe_code, reason = "the tests promise to keep memory that nobody has")]

mod api;
mod attach;
mod bounce;
mod coherent;
mod common;
mod edges;
mod erased;
mod flush_queue;
mod growth;
mod iova;
mod list;
mod observed;
mod pool;
mod random;
mod raw;
mod reservation;
mod reserved;
mod rig;
mod single;
mod sweep;
mod torn;
