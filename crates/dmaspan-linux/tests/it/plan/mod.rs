//! Planning, and owning what is mapped, over a space that answers as a kernel does.

mod blocks;
mod container;
mod failing;
mod kernel;
mod leaves;
mod merging;
mod owning;
mod refused;
mod threads;
