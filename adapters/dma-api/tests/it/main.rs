//! Types of dma-api, and a driver that somebody else wrote for them, over a device behind an IOMMU.

mod controller;
mod nvme;
mod ops;
mod rig;
