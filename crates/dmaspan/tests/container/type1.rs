//! Requests of Linux's interface, answered as type1 does.

mod cases;
mod dirty;
mod info;
mod oracle;
mod random;
mod selftests;
mod vaddr;
mod world;
