//! Real I/O on fixed buffers, against plain bytes and against what the kernel says.

mod application;
mod limits;
mod load;
mod model;
mod pools;
mod rings;
mod runtimes;
pub(crate) mod support;
mod taking;
