//! The drivers, the bounce pools and the NVMe driver against QEMU's models of IOMMUs and devices,
//! and what its machines do without an IOMMU.

mod amd_vi;
mod arm_smmu_v3;
mod cost;
mod edu;
mod iommus;
mod judge;
mod machine;
mod nvme;
mod riscv;
mod vtd;
