//! Memory of a process, planning and owning what is mapped, and I/O on fixed buffers, against what
//! the kernel says and against what answers as it does.

mod bounce;
#[path = "../charged/mod.rs"]
mod charged;
mod client;
mod fixed;
mod fixed_copy;
mod machine;
mod plan;
#[path = "../turn/mod.rs"]
mod turn;
mod unsafe_blocks;
