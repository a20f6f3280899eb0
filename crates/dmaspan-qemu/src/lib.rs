//! QEMU's IOMMUs and devices as the hardware of tests.
//!
//! With the accelerator `qtest` QEMU runs no guest: the test process is the machine's CPU. It reads
//! and writes registers over a pipe, and the machine's RAM is memory that both share. So a driver
//! under test is ordinary code, and the hardware that judges it was written by others.
//!
//! The book says what a new driver has to show with these models ([adding a driver]), and where
//! they fall short of the manuals ([findings]); `cargo xtask book` builds the book beside these
//! pages.
//!
//! [adding a driver]: ../book/adding/driver.html
//! [findings]: ../book/findings.html
//!
//! [`find`] looks for a QEMU that is new enough, [`Machine`] starts one, [`Pci`] finds its devices,
//! [`Ram`] gives memory for tables, queues and buffers, [`RamPool`] some for bouncing, and
//! [`TestDev`] and [`Edu`] do DMA.
//!
//! ```
//! use dmaspan_drivers::Mmio as _;
//! use dmaspan_qemu::{Arch, Machine, Pci, TestDev, ready};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     // Without QEMU this says SKIP and why, or fails where `DMASPAN_HW=require` is set.
//!     let Some(qemu) = ready(Arch::Aarch64) else { return Ok(()) };
//!     let machine = Machine::builder(qemu, "virt").device("iommu-testdev,addr=1").start()?;
//!     let pci = Pci::new(&machine);
//!     let mut device = TestDev::new(&pci, 1)?;
//!
//!     // Without an IOMMU a device uses physical addresses.
//!     let buffer = machine.ram().allocate(0x1000)?;
//!     device.write(buffer.paddr().get(), buffer.paddr(), 64)?;
//!     assert_eq!(buffer.word(0), 0x1234_5678_1234_5678);
//!     Ok(())
//! }
//! ```

mod devices;
mod find;
mod host;
mod machine;
mod pci;
mod pool;
mod ram;
mod tap;
mod wire;

pub use devices::{DmaRefused, Edu, TestDev};
pub use find::{Arch, Missing, Qemu, Version, find, ready};
pub use host::{QemuHost, RamStructure};
pub use machine::{Builder, Machine, QtestMmio, StartError};
pub use pci::{Pci, PciError};
pub use pool::RamPool;
pub use ram::{Buffer, NoRam, Ram};
pub use tap::{CommandQueue, Edit, Ring, Tap};
