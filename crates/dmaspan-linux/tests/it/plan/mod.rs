//! Planning, and owning what is mapped, over a space that answers as a kernel does.

mod bars;
mod blocks;
mod bounce;
mod container;
mod failing;
mod forecast;
pub(crate) mod kernel;
mod leaves;
mod listing;
mod merging;
mod others;
mod owning;
mod parts;
mod refused;
mod shared;
mod threads;
