//! Drivers of IOMMU hardware, for [`dmaspan`]'s domains.
//!
//! Each driver owns one IOMMU: its queues and its tables of devices. It makes the hooks that tell
//! the hardware what a [`Domain`](dmaspan::iommu::Domain) unmapped
//! ([`IommuOps`](dmaspan::iommu::IommuOps)), and a [`Port`](dmaspan::iommu::Port) for each stream
//! of accesses that the hardware tells apart; an [`Attachment`](dmaspan::iommu::Attachment) of a
//! port gives the stream a domain or takes it away. A stream that nobody attached reaches no
//! memory. Interrupts are another matter: each module says first which ones a device can raise.
//!
//! | module | hardware | manual |
//! |---|---|---|
//! | [`arm_smmu`] | Arm's SMMUv2 | Arm System MMU architecture, version 2 (IHI 0062) |
//! | [`arm_smmu_v3`] | Arm's SMMUv3 | Arm System MMU architecture, version 3 (IHI 0070) |
//! | [`vtd`] | Intel's VT-d | Virtualization Technology for Directed I/O |
//! | [`amd_vi`] | AMD's IOMMU | I/O Virtualization Technology (48882) |
//! | [`riscv`] | RISC-V's IOMMU | RISC-V IOMMU Architecture Specification |
//!
//! [`firmware`] says which of them a machine has and which streams they serve, from ACPI's tables
//! or the device tree.
//!
//! Begin with the module of your hardware, whose `new` takes the registers. The [guide for kernels]
//! goes from there to a domain and the DMA API, and [how to add a driver] to other hardware. Both
//! are in `docs/src` of the repository; `cargo xtask book` builds the book beside these pages.
//!
//! [guide for kernels]: ../book/guides/kernel.html
//! [how to add a driver]: ../book/adding/driver.html
//!
//! A driver stands on two traits: [`Mmio`] reaches the registers, and [`Host`] supplies memory that
//! the hardware reads and writes itself, a lock, and waiting. It allocates when it is made and when
//! a stream or a domain is; telling hardware to forget, switching a stream and handling faults
//! allocate nothing. Every poll ends: where hardware does not answer, the driver looks at the
//! register that says why, and returns an error that names it.

#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod amd_vi;
pub mod arm_smmu;
pub mod arm_smmu_v3;
pub mod firmware;
pub mod riscv;
pub mod vtd;

mod blocks;
mod error;
mod faults;
mod host;
mod ids;
mod log;
mod mmio;
mod ring;
mod stage;
mod stream;
mod structure;

pub use error::Error;
pub use faults::Handled;
pub use host::{Again, FrameHost, FrameStructure, Host, NoMemory, Structure};
pub use mmio::{Mmio, MmioRegion};
pub use stream::IommuStream;

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
