//! The program `dmaspan`, run as its users run it.

mod cli;
mod devices;
mod hostile;
mod inspect;
mod namespaces;
mod output;
mod plan;
mod process;
mod qemu;
#[path = "../../../dmaspan-linux/tests/turn/mod.rs"]
mod turn;
mod words;
