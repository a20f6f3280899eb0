//! PCI functions, as Linux shows them in `/sys/bus/pci`.

mod bdf;

pub use bdf::{BadBdf, Bdf};
