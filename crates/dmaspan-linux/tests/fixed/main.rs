//! Real I/O on fixed buffers, against plain bytes and against what the kernel says.

mod application;
#[path = "../charged/mod.rs"]
mod charged;
mod limits;
mod load;
mod model;
mod pools;
mod rings;
mod support;
#[path = "../turn/mod.rs"]
mod turn;
