//! The program `dmaspan`, run as its users run it.

mod cli;
mod devices;
#[path = "../../../dmaspan-linux/src/pci/fake.rs"]
#[expect(dead_code, reason = "the library's own tests use the rest of it")]
mod fake;
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
