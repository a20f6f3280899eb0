//! The driver of RISC-V's IOMMU against QEMU's model of it: as a PCI device and as one of the
//! platform, with contexts of both formats, through both stages.

mod foreign;
mod hostile;
mod isolation;
mod rig;
mod sabotage;
mod translation;
